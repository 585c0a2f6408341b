"""The reference: the plain model on one rank, with the weights of the spread one and the whole batch."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from cp_mesh.errors import refuse
from cp_mesh.tools.verify.chunks import keep_on_host, run_in_chunks
from cp_mesh.tools.verify.models import inner, local, logits_of, root_of
from cp_mesh.tools.verify.ranks import Ranks
from cp_mesh.tools.verify.step import IGNORED, Batch, Loss, Step, mean_loss
from cp_mesh.tools.verify.traces import Rows, Trace, clean, rows_of
from cp_mesh.training.style_helpers import styles_of

JITTER = 2.0**-40  # how weights are changed in float64: enough to round float32 inside of the model otherwise


class Reference(NamedTuple):
    """A run of the whole batch on this rank; ``loss`` and ``grads`` are those of all data-parallel ranks."""

    trace: Trace
    logits: Rows
    loss: float
    grads: dict[str, Tensor]


def make_twin(
    make: Callable[[], nn.Module],
    model: nn.Module,
    dtype: torch.dtype | None,
    device: torch.device,
    chunks: bool = False,
) -> nn.Module:
    """The model for one rank, with the weights of the spread one."""
    twin = make().to(dtype)
    if not chunks:
        twin = twin.to(device)
    if any(styles_of(twin)) or any(isinstance(parameter, DTensor) for parameter in twin.parameters()):
        hint = "make_reference= makes the plain model where make_model spreads it"
        refuse("verify_model: reference", "a model that is not spread", "styles or DTensors in it", hint)
    spread_out = {clean(name): parameter for name, parameter in inner(model).named_parameters()}
    names = [name for name, _ in twin.named_parameters()]
    if unlike := set(names) ^ set(spread_out):
        hint = "make_reference= makes a model whose parameters have the same names"
        refuse("verify_model: parameters", "the same names on one rank and in the spread model", sorted(unlike), hint)
    with torch.no_grad():
        for name, parameter in twin.named_parameters():
            whole = local(spread_out[name].detach())
            if whole.shape != parameter.shape:
                hint = "shard parameters as DTensors, so that the whole can be compared"
                refuse(f"verify_model: {name}", tuple(parameter.shape), tuple(whole.shape), hint)
            parameter.copy_(whole)
    if chunks:
        keep_on_host(twin, device)
    return twin


def call_of_one_rank(step: Step) -> Callable[[nn.Module, Batch], Any]:
    """A call of the plain model with a whole batch, and with positions if it needs those that the root supplies."""
    root = root_of(step.model)
    positions = root.positions if root is not None else None

    def call(model: nn.Module, batch: Batch) -> Any:
        batch.pop(step.labels)
        argument = inspect.signature(model.forward).parameters.get(positions or "")
        if positions and argument and argument.default is argument.empty:
            batch.setdefault(positions, torch.arange(step.seq_len, device=step.device))
        return model(**batch)

    return call


def loss_of_one_rank(step: Step) -> Loss:
    call = call_of_one_rank(step)

    def loss(model: nn.Module, batch: Batch) -> Tensor:
        whole = batch[step.labels]
        return mean_loss(logits_of(call(model, batch)), whole)

    return loss


def run_reference(step: Step, twin: nn.Module, loss: Loss | None = None, chunks: bool = False) -> Reference:
    """One run of the reference; data-parallel ranks weigh by their valid tokens.

    Args:
        step: the trainer's, of which the reference has the batch.
        twin: the model for one rank.
        loss: None: the mean over valid tokens.
        chunks: in less memory.
    """
    ranks = step.ranks
    labels = step.batch.get(step.labels)
    valid = torch.ones(()) if labels is None else (labels != IGNORED).sum()
    valid = valid.double().to(step.device)
    weight = valid / ranks.reduce(valid.clone(), axes=ranks.dp).clamp(min=1)
    twin.zero_grad()
    alone = Step(twin, loss or loss_of_one_rank(step), Ranks(None, None, ()), step.batch, step.tokens, step.labels)
    if chunks:
        trace, logits, share = run_in_chunks(alone, call_of_one_rank(step), weight)
    else:
        trace = Trace(step.seq_len, alone.positions)
        run = alone.run(trace=trace)
        share = run.loss.nan_to_num() * weight  # the mean over no token at all
        share.backward()
        logits = rows_of(run.logits, step.seq_len, run.positions)
    grads = {clean(name): _summed(step, parameter) for name, parameter in twin.named_parameters()}
    return Reference(trace, logits, float(ranks.reduce(share.detach().double().clone(), axes=ranks.dp)), grads)


def _summed(step: Step, parameter: nn.Parameter) -> Tensor:
    """The gradient, summed over data-parallel ranks; it stays where the parameter is."""
    grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
    return step.ranks.reduce(grad.to(step.device), axes=step.ranks.dp).to(grad.device) if step.ranks.dp else grad


@torch.no_grad()
def jitter(model: nn.Module) -> None:
    """Change the last bits of all weights, by as much in either direction."""
    generator = torch.Generator().manual_seed(0)
    for parameter in model.parameters():
        if not parameter.is_floating_point():
            continue
        eps = JITTER if parameter.dtype == torch.float64 else torch.finfo(parameter.dtype).eps
        signs = torch.randint(2, parameter.shape, generator=generator).to(parameter.device) * 2 - 1
        parameter.mul_((1 + eps * signs.double()).to(parameter.dtype))
