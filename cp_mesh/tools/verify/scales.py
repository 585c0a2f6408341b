"""Probes of scale: the loss is the mean over the valid tokens of the logits, and gradients are those of the loss."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.tensor import DTensor

from cp_mesh.tools.verify.hints import step_factor
from cp_mesh.tools.verify.models import inner
from cp_mesh.tools.verify.report import Finding
from cp_mesh.tools.verify.step import IGNORED, Run, Step
from cp_mesh.tools.verify.traces import PART, clean

# By dtype: shares of the loss by which it is moved along the gradient, and how far the slope may then be off.
SLOPES = {torch.float64: ((1e-6, 1e-8), 1e-3), torch.float32: ((1e-3, 1e-4, 2e-5), 3e-2)}
COARSE = ((3e-2, 1e-2), 0.25)
SAME_GRADIENT = 2.5e-3  # of the sum of a gradient's sizes, by which ranks that hold it may differ
LOSS = {torch.float64: 1e-9, torch.float32: 1e-5}
LOSS_COARSE = 2e-2


def probe_loss(step: Step, run: Run, dtype: torch.dtype) -> Iterator[Finding]:
    """The loss is the mean over valid tokens of the logits that the model gave, with the labels at their positions."""
    if step.labels not in step.batch:
        return
    labels = step.batch[step.labels]
    real = run.positions < step.seq_len
    mine = labels[:, run.positions[real]]
    logits = run.logits.detach()[:, real]
    rows = max(1, PART // logits[:, 0].numel())
    sums = [
        F.cross_entropy(part.double().flatten(0, 1), theirs.flatten(), ignore_index=IGNORED, reduction="sum")
        for part, theirs in zip(logits.split(rows, 1), mine.split(rows, 1), strict=True)
    ]
    whole = run.logits.shape[1] == step.seq_len
    axes = step.ranks.dp if whole else step.ranks.data
    both = torch.stack([torch.stack(sums).sum(), (mine != IGNORED).sum().double()])
    total, count = step.ranks.reduce(both, axes=axes).tolist()
    want, got = total / max(count, 1), step.total_loss(run.loss)
    error, allowed = abs(got - want) / max(abs(want), 1e-30), LOSS.get(dtype, LOSS_COARSE)
    note, named = f"{got:.6g}; the mean over the valid tokens of these logits is {want:.6g}", False
    if not error <= allowed:
        text, named = step_factor(step, got / want)
        note += f": {text}"
    yield Finding("loss of the logits", error <= allowed, error, allowed, note=note, named=named)


def probe_gradients(step: Step, loss: Tensor, dtype: torch.dtype) -> Iterator[Finding]:
    """Gradients after the trainer's reduction: equal on ranks, and the slope of the ``loss``."""
    everything = {clean(name): p for name, p in inner(step.model).named_parameters()}
    parameters = {name: p for name, p in everything.items() if p.grad is not None}
    worst, first = torch.zeros((), dtype=torch.float64, device=step.device), ""
    for name, parameter in parameters.items():
        grad = parameter.grad
        assert grad is not None
        whole = (grad.full_tensor() if isinstance(grad, DTensor) else grad).double()
        sums = torch.stack([whole.sum(), -whole.sum()])
        size = whole.abs().sum().clamp(min=1e-300)
        low, high = step.ranks.reduce(sums, dist.ReduceOp.MIN, step.ranks.data)
        spread = (-high - low) / size
        worst = torch.maximum(worst, step.ranks.reduce(spread.nan_to_num(float("inf")), dist.ReduceOp.MAX))
        if not first and not float(spread) <= SAME_GRADIENT:
            first = name
    same = float(worst) <= SAME_GRADIENT
    note = (
        f"of {len(parameters)} of {len(everything)} parameters, equal on all ranks"
        if same
        else "differs between ranks: nothing sums gradients over them"
    )
    yield Finding("gradients of ranks", same, float(worst), SAME_GRADIENT, first, note, not same)
    if not same:
        return
    shares, allowed = SLOPES.get(dtype, COARSE)
    squares = sum(_dot(p.grad, p.grad) for p in parameters.values() if p.grad is not None)
    if not 0 < squares < float("inf"):
        yield Finding("scale of gradients", False, note=f"the sum of their squares is {squares}")
        return
    best, found = float("inf"), (0.0, 0.0)
    here = step.total_loss(loss)
    for share in shares:  # smaller steps, and either side, where the model jumps, as one does that chooses experts
        for told, moved in _slopes(step, parameters, here, share * abs(here) / (2 * squares)):
            if moved and abs(told / moved - 1) < best:
                best, found = abs(told / moved - 1), (told, moved)
        if all(step.ranks.gather(best <= allowed)):
            break
    told, moved = found
    note, named = f"by them the loss was to change by {told:.4g}, and it changed by {moved:.4g}", False
    if not best <= allowed and moved:
        text, named = step_factor(step, told / moved, allowed)
        note += f": {text}"
    yield Finding("scale of gradients", best <= allowed, best, allowed, note=note, named=named)


def _slopes(step: Step, parameters: Mapping[str, Tensor], here: float, h: float) -> Iterator[tuple[float, float]]:
    """What the loss, which is ``here``, is to change by along ``h`` times the gradient, and what it changes by.

    From side to side, and on each side. Weights move as far as their dtype lets them.
    """
    kept = {name: parameter.detach().clone() for name, parameter in parameters.items()}
    sides = []
    with torch.no_grad(), step.agreed():
        for sign in (1, -1):
            told = 0.0
            for name, parameter in parameters.items():
                assert parameter.grad is not None
                parameter.copy_(kept[name]).add_(parameter.grad, alpha=sign * h)
                told += _dot(parameter.grad, parameter - kept[name])
            sides.append((told, step.total_loss(step.run().loss) - here))
        for name, parameter in parameters.items():
            parameter.copy_(kept[name])
    ahead, behind = sides
    yield ahead[0] - behind[0], ahead[1] - behind[1]
    yield from sides


def _dot(x: Tensor, y: Tensor) -> float:
    dot = (x.detach().double() * y.double()).sum()
    return float(dot.full_tensor() if isinstance(dot, DTensor) else dot)
