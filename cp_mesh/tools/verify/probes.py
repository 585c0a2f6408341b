"""Probes: change one thing in the batch and see which logits move. They need no reference, and no cp_mesh in the model.

A tolerance would hide a leak, so what must not depend on a change is compared bit by bit (up to what two equal runs
differ by), and what must depend on it has to move.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from cp_mesh.errors import refuse
from cp_mesh.geometry.mask import Mask
from cp_mesh.tools.verify.hints import of_styles
from cp_mesh.tools.verify.models import inner
from cp_mesh.tools.verify.report import Finding
from cp_mesh.tools.verify.step import Run, Step
from cp_mesh.tools.verify.traces import clean

# By dtype: in steps of the largest logit, what may move as kernels take other tiles: experts that get other tokens.
STEPS, STEPS_COARSE = {torch.float64: 64, torch.float32: 64}, 2
KEYS = 1024  # whose queries are asked of a mask at once


def tokens_to_change(step: Step, mask: Mask) -> dict[str, int]:
    """Positions to change, by what they probe."""
    length = step.seq_len
    owner = torch.full((length,), -1, device=step.device)
    positions = step.positions()
    if step.ranks.cp and step.ranks.mesh is not None:
        owner[positions[positions < length]] = step.ranks.mesh.get_local_rank(step.ranks.cp)
        step.ranks.reduce(owner, dist.ReduceOp.MAX, (step.ranks.cp,))
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
    return {name: found.get(name, 0) for name in everywhere}  # as many runs on all ranks, whatever their batches


def who_moves(masks: Sequence[Mask], token: int, batch: int, length: int) -> Tensor:
    """bool [B, S]: the positions that a token reaches, layer by layer."""
    everyone = torch.arange(length)
    reached = torch.zeros(batch, length, dtype=torch.bool)
    reached[:, token] = True
    for mask in masks:
        now = reached.clone()
        for keys in everyone[reached.any(0)].split(KEYS):
            now |= (mask.allowed(everyone, keys) & reached[:, None, keys]).any(2)
        reached = now
    return reached


def probe_tokens(step: Step, masks: Sequence[Mask], exact: bool, say: Callable[[str], None]) -> Iterator[Finding]:
    """Who sees whom, by changing single tokens.

    Args:
        step: the trainer's step.
        masks: of the layers.
        exact: whether every position that sees a token has to move; else some on each rank, as low precision may round
            a small change away.
        say: told what is being done.
    """
    tokens = step.batch[step.tokens]
    values = tokens.unique()
    if len(values) < 2:
        refuse("verify_model: tokens", "at least two different ones", values.tolist(), "give a batch of real tokens")
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


def _moves(step: Step, a: Run, b: Run) -> Tensor:
    """float64 [B, S]: by how much the logits of each position differ, equal on all ranks of the same sequences."""
    found = torch.zeros(len(a.logits), step.seq_len, dtype=torch.float64, device=step.device)
    real = a.positions < step.seq_len
    off = (a.logits - b.logits)[:, real].abs().amax(2).double().nan_to_num(float("inf"))
    found[:, a.positions[real]] = off
    axes = (*step.ranks.same, *((step.ranks.cp,) if step.ranks.cp else ()))
    return step.ranks.reduce(found, dist.ReduceOp.MAX, axes)


def _judge(
    step: Step, what: str, token: int, moved: Tensor, expected: Tensor, masks: Sequence[Mask], exact: bool
) -> Finding:
    leaks, lost = moved & ~expected, expected & ~moved
    if not exact:  # a change may be rounded away, but not on a whole rank
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
        return Finding(what, True, note=f"token {token} moves what sees it, and nothing else")
    if leak < step.seq_len:
        where = f"position {leak} moves with token {token}"
        if any(mask.causal for mask in masks) and leak < token:
            return Finding(what, False, where=where, note="which comes after it: attention is not causal")
        documents = masks[0].documents
        if documents is not None and (documents[..., leak] != documents[..., token]).any():
            return Finding(what, False, where=where, note="which is of another document: packed documents leak")
        return Finding(what, False, where=where, note="which is outside of its window")
    where = f"position {deaf_from} does not move with token {token}, which it is to see"
    note = f"if attention has windows, say mask=, one for each layer{of_styles(step)}"
    return Finding(what, False, where=where, note=note)


def probe_rows(step: Step, run: Run) -> Iterator[Finding]:
    """Every position has logits on one rank of the cp axis, or on each of them."""
    count = torch.zeros(step.seq_len, dtype=torch.int64, device=step.device)
    real = run.positions[run.positions < step.seq_len]
    count.index_add_(0, real, torch.ones_like(real))
    if step.ranks.cp:
        step.ranks.reduce(count, axes=(step.ranks.cp,))
    wrong = ((count != 1) & (count != step.ranks.cp_size)).nonzero().flatten()
    mine = (int(wrong[0]), int(count[wrong[0]])) if len(wrong) else (step.seq_len, 0)
    first, held = min(step.ranks.gather(mine))
    if first == step.seq_len:
        yield Finding("rows", True, note=f"all {first} positions have logits")
        return
    where = f"position {first}"
    yield Finding(
        "rows", False, where=where, note=f"{held} of {step.ranks.cp_size} ranks have its logits, expected one"
    )


def probe_sinks(step: Step) -> Iterator[Finding]:
    """Parameters named as sinks take part."""
    for name, parameter in inner(step.model).named_parameters():
        if "sink" not in name:
            continue
        kept = parameter.detach().clone()
        with torch.no_grad(), step.agreed():
            before = step.run()
            parameter.add_(1.0)
            moved = _moves(step, before, step.run()).amax()
            parameter.copy_(kept)
        note = "logits move with it" if moved > 0 else "logits do not move with it: sinks are dropped"
        moves = bool(step.ranks.reduce(moved, dist.ReduceOp.MIN) > 0)
        yield Finding("sinks", moves, where=clean(name), note=note)
        return
