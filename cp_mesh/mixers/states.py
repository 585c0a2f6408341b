"""The method "states": every rank computes its own rows, and states travel.

The state after a piece is affine in the state before it, S_out = A S_in + B. Each rank computes A and B of its pieces
whose document goes on elsewhere, all ranks gather them, and each folds those before its own pieces, in order of
position. Then it computes its rows from the states that they are due. Rules without beta compute rows once, and add
what the states make of them; kernels of fla-core take the states in between (`seam`). What travels is as large as the
states, whatever the length. The source is flash-linear-attention's context parallelism (fla/ops/cp) and its form over
fragments in attention-gym; that of pieces in any layout of runs is ours.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from cp_mesh.kernels.combine import accumulation_dtype
from cp_mesh.kernels.precision import exactly
from cp_mesh.mixers.between import Between
from cp_mesh.mixers.chunks import CHUNK
from cp_mesh.mixers.kernels import folds
from cp_mesh.mixers.moving import Group, after, gather_rows
from cp_mesh.mixers.pieces import Pieces, index_on
from cp_mesh.mixers.reference import Inputs, Run


def by_states(
    run: Run, inputs: Inputs, initial: Tensor | None, pieces: Pieces, group: Group, final: bool, scale: float
) -> tuple[Tensor, Tensor | None]:
    """Compute this rank's rows.

    Args:
        run: what computes sequences.
        inputs: of this rank's rows, [B, rows, ...].
        initial: of the documents that are kept, [num_documents, HV, K, V].
        final: whether the state after each document is returned, on every rank.
        scale: of q, which ``run`` knows.
    """
    device, (heads, V), K = inputs.v.device, inputs.v.shape[-2:], inputs.k.shape[-1]
    given = device, initial is not None, group
    between: Between = pieces.once(("between", *given), lambda: Between(pieces, *given))
    fused, lens, dtype = folds(run), between.lens, accumulation_dtype(inputs.v.dtype)
    begin: Any = None
    batch, summaries = len(inputs.v), None
    if batch > 1 or not fused:
        inputs = inputs.of_each(lambda x: x.flatten(0, 1))
    if initial is not None:
        zero = initial.new_zeros(1, heads, K, V, dtype=dtype)
        begin = torch.cat([zero, initial.to(dtype)])[between.begin]
    elif not fused:
        begin = torch.zeros(len(lens), heads, K, V, dtype=dtype, device=device)
    if fused:
        out, states_after = run(inputs, begin, lens, between=between, final=final)
    elif between.sends:
        compute = _superpose if inputs.beta is None else _prepend
        out, states_after, summaries = compute(run, inputs, begin, lens, between, scale)
    else:
        out, states_after = run(inputs, begin, lens)
    if not fused:
        out = after(out, summaries, *(() if len(out) else inputs))
    out = out if out.ndim == 4 else out.unflatten(0, (batch, -1))
    if not final:
        return out, None
    closes = pieces.kept & (pieces.end == pieces.last)
    ends, slots_of = pieces.sent(closes)
    own = states_after[pieces.on(device, "ends", lambda: ends.own)].flatten(1)
    # a rank without rows joins the backward, too
    own = after(own, summaries, *(() if inputs.v.shape[-3] else inputs))
    states_of = gather_rows(own, ends.most, group)
    return out, states_of[pieces.on(device, "closes", lambda: slots_of[closes])].unflatten(1, (heads, K, V))


def _prepend(
    run: Run, inputs: Inputs, begin: Tensor, lens: list[int], between: Between, scale: float
) -> tuple[Tensor, Any, Tensor]:
    """A delta rule: pieces that are sent compute the identity beside their state, then all from what they are due."""
    (heads, V), K, way = inputs.v.shape[1:], inputs.k.shape[2], between.ways[0]
    eye = torch.eye(K, K * between.passes, dtype=begin.dtype, device=begin.device)
    found = torch.cat([begin[way.sent], eye.expand(len(way.senders), heads, -1, -1)], -1)
    if of := [lens[i] for i in way.senders]:
        ends = np.cumsum(lens)
        rows = np.concatenate([np.arange(ends[i] - lens[i], ends[i]) for i in way.senders])
        part = inputs.at(between.once(("rows", begin.device), lambda: index_on(begin.device, rows)))
        v = F.pad(part.v, (0, eye.shape[1]))
        _, found = run(part._replace(v=v), found, of)  # columns of a state do not know of each other
    b, a = found.split([V, eye.shape[1]], -1)
    due, gathered = between.pass_on(a, after(b, *inputs.at(slice(0))))
    return *run(inputs, between.add(begin, due), lens), gathered


def _superpose(
    run: Run, inputs: Inputs, begin: Tensor, lens: list[int], between: Between, scale: float
) -> tuple[Tensor, Any, Tensor]:
    """Another rule: what a state adds to later rows is known without them, so these are computed once."""
    dtype, way = inputs.v.dtype, between.ways[0]
    if any(
        between.reached
    ):  # what is read twice has a gradient of two parts, which round once, as what is added to rows
        q, v, g = (x if x is None else x.to(begin.dtype) for x in (inputs.q, inputs.v, inputs.g))
        inputs = Inputs(q, inputs.k, v, g, None)  # type: ignore[arg-type]
    q, g = inputs.q, inputs.g
    out, ends = run(inputs, begin, lens)
    decays = between.decays_of(g, begin)
    due, gathered = between.pass_on(decays[way.sent], after(ends[way.sent], *inputs.at(slice(0))))
    if not len(way.receivers):
        return out.to(dtype), ends, gathered
    parts = [*out.split(lens)]
    for i, state in zip(way.receivers, due * scale, strict=True):
        rows = slice(sum(lens[:i]), sum(lens[: i + 1]))
        parts[i] = parts[i] + exactly(_of_state, state, q[rows], None if g is None else g[rows])
    return torch.cat(parts).to(dtype), between.add(ends, decays[way.due] * due), gathered


def _of_state(state: Tensor, q: Tensor, g: Tensor | None) -> Tensor:
    """What a state [HV, K, V] adds to rows behind it, [T, HV, V], in its dtype."""
    groups = len(state) // q.shape[1]
    decay = None if g is None else _decay(g.to(state.dtype))
    if decay is not None and decay.ndim == 3:
        q, decay, groups = q.repeat_interleave(groups, 1) * decay, None, 1
    of_heads = state.unflatten(0, (-1, groups)).movedim(1, 2).flatten(2)  # [H, K, groups * V]
    out = q.to(state.dtype).movedim(0, 1) @ of_heads
    out = out.movedim(0, 1).unflatten(2, (groups, -1)).flatten(1, 2)
    return out if decay is None else out * decay[..., None]


def _decay(g: Tensor) -> Tensor:
    """That from the begin to each row: GPUs sum column by column, so long sums are of chunks, and in float64."""
    chunks = F.pad(g.flatten(1), (0, 0, 0, -len(g) % CHUNK)).unflatten(0, (-1, CHUNK)).cumsum(1)
    before = F.pad(chunks[:-1, -1].double().cumsum(0), (0, 0, 1, 0)).exp().to(g.dtype)
    return (chunks.exp() * before[:, None]).flatten(0, 1)[: len(g)].view_as(g)
