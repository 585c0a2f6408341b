"""Probes: change one input and see which logits change. They need no reference, and no cp_mesh in the model.

A probe changes a token or a sink. Logits that depend on it must change. All other logits must stay equal, up to the
difference of two equal runs: a larger tolerance would hide a leak. Other probes test scales: the loss must be the mean
over the valid tokens of the logits, and the gradients must be those of the loss.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from cp_mesh._torch import unwrapped
from cp_mesh.errors import refuse
from cp_mesh.geometry.mask import Mask
from cp_mesh.sequence.sharded_sequence import IGNORED
from cp_mesh.tools.verification.compare import factor_finding, of_styles
from cp_mesh.tools.verification.report import Finding
from cp_mesh.tools.verification.step import Step, StepRun, inner, local
from cp_mesh.training.traces import PART

# By dtype, in eps of the largest logit: change that passes as rounding, as when experts get other tokens.
STEPS, STEPS_COARSE = {torch.float64: 64, torch.float32: 64}, 2
KEYS = 1024  # keys per call of Mask.allowed
# By dtype: relative changes of the loss along the gradient, and the allowed relative error of the slope.
SLOPES = {torch.float64: ((1e-6, 1e-8), 1e-3), torch.float32: ((1e-3, 1e-4, 2e-5), 3e-2)}
SLOPES_COARSE = ((3e-2, 1e-2), 0.25)
SAME_GRADIENT = 2.5e-3  # allowed difference of a gradient's sum between ranks, relative to its absolute sum
LOSS, LOSS_COARSE = {torch.float64: 1e-9, torch.float32: 1e-5}, 2e-2


def tokens_to_change(step: Step, mask: Mask) -> dict[str, int]:
    """Positions to change, by the name of the probe."""
    length = step.seq_len
    owner = torch.full((length,), -1, device=step.device)
    positions = step.positions()
    if step.ranks.cp and step.ranks.mesh is not None:
        owner[positions[positions < length]] = step.ranks.mesh.get_local_rank(*step.ranks.cp)
        step.ranks.reduce(owner, dist.ReduceOp.MAX, step.ranks.cp)
    found = {"far token": 0, "last token": length - 1}
    edges = (owner[1:] != owner[:-1]).nonzero().flatten().tolist()
    if edges:
        found["edge of a shard"] = edges[len(edges) // 2]
    if mask.documents is not None:
        ids = torch.atleast_2d(mask.documents)[0]
        ends = (ids[1:] != ids[:-1]).nonzero().flatten().tolist()
        if ends:
            found["end of a document"] = ends[0]
            found["start of a document"] = ends[-1] + 1
    window = mask.window and mask.window[0]
    if window is not None and window + 1 < length:
        found["window edge"] = (length - window - 1) // 2
    everywhere = sorted({name for names in step.ranks.gather(list(found)) for name in names})
    return {name: found.get(name, 0) for name in everywhere}  # all ranks need the same number of runs


def who_moves(masks: Sequence[Mask], token: int, batch: int, length: int) -> Tensor:
    """bool [B, S]: the positions that a token influences through all layers."""
    everyone = torch.arange(length, device="cpu")
    reached = torch.zeros(batch, length, dtype=torch.bool, device="cpu")
    reached[:, token] = True
    for mask in masks:
        now = reached.clone()
        for keys in everyone[reached.any(0)].split(KEYS):
            now |= (mask.allowed(everyone, keys) & reached[:, None, keys]).any(2)
        reached = now
    return reached


def probe_tokens(step: Step, masks: Sequence[Mask], exact: bool, say: Callable[[str], None]) -> Iterator[Finding]:
    """Test which positions see which tokens, by changing single tokens.

    Args:
        step: the trainer's step.
        masks: of the layers.
        exact: whether all logits that depend on a token must change. If False, some on each rank must: low precision
            may round a small change away.
        say: called with a progress message.
    """
    tokens = step.batch[step.tokens]
    values = tokens.unique()
    if len(values) < 2:
        refuse("verify_model: tokens", "at least two different tokens", values.tolist(), "pass a batch of real tokens")
    step.positions()
    with torch.no_grad(), step.agreed():
        before = step.run()
        logits = before.logits
        steps = STEPS.get(logits.dtype, STEPS_COARSE) * torch.finfo(logits.dtype).eps
        noise = max(float(_moves(step, before, step.run()).max()), steps * float(logits.abs().max()))
        noise = max(step.ranks.gather(noise))
    narrowest = min(masks, key=lambda mask: mask.window[0] if mask.window and mask.window[0] is not None else 1 << 60)
    for what, token in tokens_to_change(step, narrowest).items():
        say(f"probe: {what}, {token}")
        other = tokens.clone()
        other[:, token] = torch.where(tokens[:, token] == values[0], values[-1], values[0])
        with torch.no_grad(), step.agreed():
            moved = _moves(step, before, step.run(step.batch | {step.tokens: other})) > noise
        expected = who_moves(masks, token, len(tokens), step.seq_len).to(moved.device)
        yield _judge(step, what, token, moved, expected, masks, exact)


def _moves(step: Step, a: StepRun, b: StepRun) -> Tensor:
    """float64 [B, S]: difference of the logits at each position; equal on all ranks that share sequences."""
    found = torch.zeros(len(a.logits), step.seq_len, dtype=torch.float64, device=step.device)
    real = a.positions < step.seq_len
    off = (a.logits - b.logits)[:, real].abs().amax(2).double().nan_to_num(float("inf"))
    found[:, a.positions[real]] = off
    return step.ranks.reduce(found, dist.ReduceOp.MAX, (*step.ranks.same, *step.ranks.cp))


def _judge(
    step: Step, what: str, token: int, moved: Tensor, expected: Tensor, masks: Sequence[Mask], exact: bool
) -> Finding:
    leaks, lost = moved & ~expected, expected & ~moved
    if not exact:  # rounding may hide a change at some positions, but not at all positions of a rank
        mine = torch.zeros_like(expected)
        positions = step.positions()
        mine[:, positions[positions < step.seq_len]] = True
        deaf = (expected & mine).any() & ~(moved & expected & mine).any()
        lost = lost & mine & deaf
    first = torch.full((2,), step.seq_len, device=step.device)
    for i, wrong in enumerate((leaks, lost)):
        if wrong.any():
            first[i] = wrong.any(0).nonzero()[0, 0]
    leak, deaf_from = step.ranks.reduce(first, dist.ReduceOp.MIN).tolist()
    if leak == deaf_from == step.seq_len:
        return Finding(what, True, note=f"token {token} changes the logits of all positions that see it, and no others")
    if leak < step.seq_len:
        where = f"logits at position {leak} change with token {token}"
        if any(mask.causal for mask in masks) and leak < token:
            return Finding(what, False, where=where, note="the token is later: attention is not causal")
        documents = masks[0].documents
        if documents is not None and (documents[..., leak] != documents[..., token]).any():
            return Finding(what, False, where=where, note="the token is in another document: packed documents leak")
        return Finding(what, False, where=where, note="the token is outside of the window of that position")
    where = f"logits at position {deaf_from} do not change with token {token}, which that position should see"
    note = f"if attention has windows or documents, pass mask=, one for each layer{of_styles(step)}"
    return Finding(what, False, where=where, note=note)


def probe_rows(step: Step, run: StepRun) -> Finding:
    """Check that each position has logits on exactly one rank of the cp axis, or on all of them."""
    count = torch.zeros(step.seq_len, dtype=torch.int64, device=step.device)
    real = run.positions[run.positions < step.seq_len]
    count.index_add_(0, real, torch.ones_like(real))
    step.ranks.reduce(count, axes=step.ranks.cp)
    wrong = ((count != 1) & (count != step.ranks.cp_size)).nonzero().flatten()
    mine = (int(wrong[0]), int(count[wrong[0]])) if len(wrong) else (step.seq_len, 0)
    first, held = min(step.ranks.gather(mine))
    if first == step.seq_len:
        return Finding("rows", True, note=f"all {first} positions have logits")
    note = f"{held} of {step.ranks.cp_size} ranks have its logits, expected one"
    return Finding("rows", False, where=f"position {first}", note=note)


def probe_sinks(step: Step) -> Iterator[Finding]:
    """Check that logits depend on the first parameter named as a sink."""
    for name, parameter in inner(step.model).named_parameters():
        if "sink" not in name:
            continue
        kept = parameter.detach().clone()
        with torch.no_grad(), step.agreed():
            before = step.run()
            parameter.add_(1.0)
            moved = _moves(step, before, step.run()).amax()
            parameter.copy_(kept)
        note = "logits change with it" if moved > 0 else "logits do not change with it: sinks are dropped"
        moves = bool(step.ranks.reduce(moved, dist.ReduceOp.MIN) > 0)
        yield Finding("sinks", moves, where=unwrapped(name), note=note)
        return


def probe_loss(step: Step, run: StepRun, dtype: torch.dtype) -> Iterator[Finding]:
    """Check that the loss is the mean over valid tokens, for the model's logits and the labels at their positions."""
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
    axes = step.ranks.dp if run.logits.shape[1] == step.seq_len else step.ranks.data
    both = torch.stack([torch.stack(sums).sum(), (mine != IGNORED).sum().double()])
    total, count = step.ranks.reduce(both, axes=axes).tolist()
    want, got = total / max(count, 1), step.total_loss(run.loss)
    error, allowed = abs(got - want) / max(abs(want), 1e-30), LOSS.get(dtype, LOSS_COARSE)
    note = f"{got:.6g}; the mean over these logits and the labels at their positions is {want:.6g}"
    yield factor_finding(step, "loss of the logits", error, allowed, note, (got, want))


def probe_gradients(step: Step, loss: Tensor, dtype: torch.dtype) -> Iterator[Finding]:
    """Check that gradients after the trainer's reduction are equal on all ranks, and are those of the ``loss``."""
    everything = {unwrapped(name): p for name, p in inner(step.model).named_parameters()}
    parameters = {name: p for name, p in everything.items() if p.grad is not None}
    worst, first = torch.zeros((), dtype=torch.float64, device=step.device), ""
    for name, parameter in parameters.items():
        assert parameter.grad is not None
        whole = local(parameter.grad).double()
        sums = torch.stack([whole.sum(), -whole.sum()])
        size = whole.abs().sum().clamp(min=1e-300)
        low, high = step.ranks.reduce(sums, dist.ReduceOp.MIN, step.ranks.data)
        spread = (-high - low) / size
        worst = torch.maximum(worst, step.ranks.reduce(spread.nan_to_num(float("inf")), dist.ReduceOp.MAX))
        if not first and not float(spread) <= SAME_GRADIENT:
            first = name
    same = float(worst) <= SAME_GRADIENT
    note = f"{len(parameters)} of {len(everything)} parameters have one, equal on all ranks"
    if not same:
        note = "differs between ranks: nothing sums gradients over them"
    yield Finding("gradients of ranks", same, float(worst), SAME_GRADIENT, first, note, not same)
    if not same:
        return
    shares, allowed = SLOPES.get(dtype, SLOPES_COARSE)
    squares = sum(_dot(p.grad, p.grad) for p in parameters.values() if p.grad is not None)
    if not 0 < squares < float("inf"):
        yield Finding("scale of gradients", False, note=f"the sum of their squares is {squares}")
        return
    best, found = float("inf"), (0.0, 0.0)
    here = step.total_loss(loss)
    for share in shares:  # smaller steps and each side alone help where the model is discontinuous, as with experts
        for told, moved in _slopes(step, parameters, here, share * abs(here) / (2 * squares)):
            if moved and abs(told / moved - 1) < best:
                best, found = abs(told / moved - 1), (told, moved)
        if all(step.ranks.gather(best <= allowed)):
            break
    told, moved = found
    note = f"along the gradients the loss should change by {told:.4g}, and it changed by {moved:.4g}"
    yield factor_finding(step, "scale of gradients", best, allowed, note, found, allowed)


def _slopes(step: Step, parameters: Mapping[str, Tensor], here: float, h: float) -> Iterator[tuple[float, float]]:
    """Yield the expected and the measured change of the loss along ``h`` times the gradient; ``here`` is the loss.

    First from side to side, then on each side. The expected change uses the weights as rounded to their dtype.
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
    return float(local((x.detach().double() * y.double()).sum()))
