"""The reference: the plain model on one rank, with the weights of the parallelized model and the whole batch."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from cp_mesh._torch import unwrapped
from cp_mesh.errors import refuse
from cp_mesh.flex.function import Alone
from cp_mesh.sequence.sharded_sequence import IGNORED
from cp_mesh.tools.verification.step import Batch, Loss, Ranks, Step, inner, local, logits_of, mean_loss, root_of
from cp_mesh.training.probe import mesh_of_one
from cp_mesh.training.style_helpers import styles_of
from cp_mesh.training.traces import RowProducts, Trace, rows_of

JITTER = 2.0**-40  # relative change of float64 weights: large enough to change the rounding of float32 in the model


class Reference(NamedTuple):
    """Results of the reference on this rank's batch; ``loss`` and ``grads`` include all data-parallel ranks."""

    trace: Trace
    logits: RowProducts
    loss: float
    grads: dict[str, Tensor]


def make_twin(
    make: Callable[[], nn.Module], model: nn.Module, dtype: torch.dtype | None, device: torch.device
) -> nn.Module:
    """Make the model for one rank, and copy the weights of the parallelized ``model`` into it."""
    twin = make().to(device, dtype)
    if any(styles_of(twin)) or any(isinstance(parameter, DTensor) for parameter in twin.parameters()):
        hint = "if make_model parallelizes the model, pass a make_reference= that makes the plain one"
        refuse("verify_model: reference", "a plain model on one rank", "a model with styles or DTensors", hint)
    spread_out = {unwrapped(name): parameter for name, parameter in inner(model).named_parameters()}
    names = [name for name, _ in twin.named_parameters()]
    if unlike := set(names) ^ set(spread_out):
        hint = "pass a make_reference= whose parameters have the same names"
        expected = "the same names on one rank and in the parallelized model"
        refuse("verify_model: parameters", expected, f"names in one of them only: {sorted(unlike)}", hint)
    with torch.no_grad():
        for name, parameter in twin.named_parameters():
            whole = local(spread_out[name].detach())
            if whole.shape != parameter.shape:
                hint = "shard parameters as DTensors, so that whole parameters can be compared"
                refuse(f"verify_model: {name}", tuple(parameter.shape), tuple(whole.shape), hint)
            parameter.copy_(whole)
    return twin


def loss_of_one_rank(step: Step) -> Loss:
    """Return the mean over valid tokens as a loss; it passes positions if the model needs those of the root's style."""
    root = root_of(step.model)
    positions = root.positions if root is not None else None

    def loss(model: nn.Module, batch: Batch) -> Tensor:
        labels = batch.pop(step.labels)
        argument = inspect.signature(model.forward).parameters.get(positions or "")
        if positions and argument and argument.default is argument.empty:
            batch.setdefault(positions, torch.arange(step.seq_len, device=step.device))
        return mean_loss(logits_of(model(**batch)), labels)

    return loss


def run_reference(step: Step, twin: nn.Module, loss: Loss | None = None) -> Reference:
    """Run ``twin`` on the batch of ``step``; losses of data-parallel ranks are weighted by their valid tokens.

    ``loss``: None is the mean over valid tokens.
    """
    ranks, labels = step.ranks, step.batch.get(step.labels)
    valid = torch.ones((), device="cpu") if labels is None else (labels != IGNORED).sum()
    valid = valid.double().to(step.device)
    weight = valid / ranks.reduce(valid.clone(), axes=ranks.dp).clamp(min=1)
    twin.zero_grad()
    alone = Step(twin, loss or loss_of_one_rank(step), Ranks(), step.batch, step.tokens, step.labels)
    trace = Trace(step.seq_len, alone.positions)
    with _flex_without_plan(ranks):
        run = alone.run(trace=trace)
        share = run.loss.nan_to_num() * weight  # the loss is NaN if no token is valid
        share.backward()
    grads = {
        unwrapped(name): ranks.reduce(torch.zeros_like(p) if p.grad is None else p.grad, axes=ranks.dp)
        for name, p in twin.named_parameters()
    }
    total = float(ranks.reduce(share.detach().double().clone(), axes=ranks.dp))
    return Reference(trace, rows_of(run.logits, step.seq_len, run.positions), total, grads)


@contextmanager
def _flex_without_plan(ranks: Ranks) -> Iterator[None]:
    """Give modules that call `cp_mesh.flex_attention` a mesh of this rank alone, since no plan sets their mesh."""
    if ranks.mesh is None:
        yield
        return
    with mesh_of_one(ranks.mesh) as alone:
        Alone.mesh = alone
        try:
            yield
        finally:
            Alone.mesh = None


@torch.no_grad()
def jitter(model: nn.Module) -> None:
    """Change the last bits of all weights, with random signs."""
    generator = torch.Generator().manual_seed(0)
    for parameter in model.parameters():
        if not parameter.is_floating_point():
            continue
        eps = JITTER if parameter.dtype == torch.float64 else torch.finfo(parameter.dtype).eps
        signs = torch.randint(2, parameter.shape, generator=generator, device="cpu").to(parameter.device) * 2 - 1
        parameter.mul_((1 + eps * signs.double()).to(parameter.dtype))
