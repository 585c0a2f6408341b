"""The method "states": every rank computes its own rows, and states travel.

The state after a piece is affine in the state before it, S_out = A S_in + B. Each rank computes A and B of its pieces
whose document goes on elsewhere, all ranks gather them, and each folds those before its own pieces, in order of
position. Then it computes its rows from the states that they are due. Rules without beta compute rows once, and add
what the states make of them; kernels of fla-core take the states in between (`seam`). What travels is as large as the
states, whatever the length. The source is flash-linear-attention's context parallelism (fla/ops/cp) and its form over
fragments in attention-gym; that of pieces in any layout of runs is ours.
"""

from __future__ import annotations

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from cp_mesh.kernels.combine import accumulation_dtype
from cp_mesh.kernels.precision import exactly
from cp_mesh.mixers.between import Between
from cp_mesh.mixers.chunks import CHUNK
from cp_mesh.mixers.kernels import folds
from cp_mesh.mixers.moving import after, gather_rows
from cp_mesh.mixers.pieces import Pieces
from cp_mesh.mixers.recurrence import Inputs, Run


def by_states(
    run: Run, inputs: Inputs, initial: Tensor | None, pieces: Pieces, group_name: str, what: str, final: bool,
    scale: float,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """Compute this rank's rows.

    Args:
        run: what computes sequences.
        inputs: of this rank's rows, batch row after batch row.
        initial: of the documents that are kept, [num_documents, HV, K, V].
        final: whether the state after each document is returned, on every rank.
        scale: of q, which ``run`` knows.
    """
    device, (heads, V), K = inputs.v.device, inputs.v.shape[1:], inputs.k.shape[2]
    zero = torch.zeros(1, heads, K, V, dtype=accumulation_dtype(inputs.v.dtype), device=device)
    known = zero if initial is None else torch.cat([zero, initial.to(zero.dtype)])
    between = Between(pieces, device, initial is not None, group_name, what)
    begin = known[between.index(("begin", between.given), lambda: between.begin)]
    summaries, lens = None, pieces.lens.tolist()
    if not pieces.sends.any():
        out, states_after = run(inputs, begin, lens)
    elif folds(run) and all(pieces.shard_lens):
        out, states_after = run(inputs, begin, lens, between=between)
    else:
        compute = _superpose if inputs.beta is None else _prepend
        out, states_after, summaries = compute(run, inputs, begin, lens, between, scale)
    out = after(out, summaries, *(() if len(out) else inputs))
    if not final:
        return out, None
    closes = pieces.kept & (pieces.end == pieces.last)
    ends, slots_of = pieces.sent(closes)
    own = states_after[pieces.on(device, "ends", lambda: ends.own)].flatten(1)
    states_of = gather_rows(after(own, summaries), ends.lens, pieces.cp_rank, group_name, what)
    return out, states_of[pieces.on(device, "closes", lambda: slots_of[closes])].unflatten(1, (heads, K, V))


def _prepend(
    run: Run, inputs: Inputs, begin: Tensor, lens: list[int], between: Between, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """A delta rule: pieces that are sent compute the identity beside their state, then all from what they are due."""
    (heads, V), K, sent = inputs.v.shape[1:], inputs.k.shape[2], between.pieces.chains(False)[0].own
    ends = np.cumsum(between.pieces.lens)
    rows = np.concatenate([*(np.arange(ends[i] - lens[i], ends[i]) for i in sent), ends[:0]])
    part = inputs.at(between.index("rows", lambda: rows))
    eye = torch.eye(K, dtype=begin.dtype, device=begin.device).expand(len(sent), heads, K, K)
    v = torch.cat([part.v, part.v.new_zeros(len(rows), heads, K)], -1)
    initial = torch.cat([begin[between.sent()], eye], -1)
    _, found = run(part._replace(v=v), initial, [lens[i] for i in sent])  # columns of a state do not know of each other
    b, a = found.split([V, K], -1)
    due, gathered = between.pass_on(after(a, *inputs.at(slice(0))), b)
    return *run(inputs, between.add(begin, due), lens), gathered


def _superpose(
    run: Run, inputs: Inputs, begin: Tensor, lens: list[int], between: Between, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Another rule: what a state adds to later rows is known without them, so these are computed once."""
    dtype = inputs.v.dtype
    if not folds(run):  # what is read twice has a gradient of two parts, which round once, as what is added to rows
        q, v, g = (x if x is None else x.to(begin.dtype) for x in (inputs.q, inputs.v, inputs.g))
        inputs = Inputs(q, inputs.k, v, g, None)  # type: ignore[arg-type]
    q, g = inputs.q, inputs.g
    out, ends = run(inputs, begin, lens)
    decays = between.decays_of(g, begin)
    due, gathered = between.pass_on(decays[between.sent()], after(ends[between.sent()], *inputs.at(slice(0))))
    parts = [*out.split(lens)]
    for i, state in zip(between.pieces.chains(False)[1].own, due * scale, strict=True):
        rows = slice(sum(lens[:i]), sum(lens[: i + 1]))
        parts[i] = parts[i] + exactly(_of_state, state, q[rows], None if g is None else g[rows])
    ends = between.add(ends, decays[between.due()] * due)
    return torch.cat([*parts, out[:0]]).to(dtype), ends, gathered


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
