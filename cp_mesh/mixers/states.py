"""The method "states": every rank computes its own rows, and states travel.

The state after a piece is affine in the state before it, S_out = A S_in + B. Each rank computes A and B of its pieces
whose document goes on elsewhere, all ranks gather them, and each folds those before its own pieces, in order of
position. Then it computes its rows from the states that they are due. What travels is as large as the states, whatever
the length. The source is flash-linear-attention's context parallelism (fla/ops/cp) and its form over fragments in
attention-gym; that of pieces in any layout of runs is ours.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from cp_mesh.kernels.combine import accumulation_dtype
from cp_mesh.kernels.precision import exactly
from cp_mesh.mixers.moving import after, gather_rows
from cp_mesh.mixers.pieces import Ints, Pieces
from cp_mesh.mixers.recurrence import Inputs, Run


def by_states(
    run: Run,
    inputs: Inputs,
    initial: Tensor | None,
    pieces: Pieces,
    group_name: str,
    what: str,
    final: bool,
) -> tuple[Tensor, Tensor | None]:
    """Compute this rank's rows.

    Args:
        run: what computes sequences.
        inputs: of this rank's rows, batch row after batch row.
        initial: of the documents that are kept, [num_documents, HV, K, V].
        final: whether the state after each document is returned, on every rank.
    """
    device, (heads, V), K, delta = inputs.v.device, inputs.v.shape[1:], inputs.k.shape[2], inputs.beta is not None
    dtype = accumulation_dtype(inputs.v.dtype)
    zero = torch.zeros(1, heads, K, V, dtype=dtype, device=device)
    known = zero if initial is None else torch.cat([zero, initial.to(dtype)])
    summaries = None
    if pieces.sends.any():
        sent, chains = pieces.chains
        rows, of_rows = _rows(pieces, sent.own, device)
        a, b = _summaries(run, inputs, rows, of_rows, pieces.lens[sent.own].tolist(), dtype)
        flat = after(torch.cat([a.flatten(1), b.flatten(1)], 1), *inputs.at(slice(0)))
        summaries = gather_rows(flat, sent.lens, pieces.cp_rank, group_name, what)
        a_of, b_of = summaries.split([a.shape[1:].numel(), heads * K * V], 1)
        a_of, b_of = a_of.unflatten(1, a.shape[1:]), b_of.unflatten(1, (heads, K, V))
        begin = chains.documents + 1 if initial is not None else np.zeros_like(chains.documents)
        state, states = known[pieces.on(device, ("begin", initial is None), lambda: begin)], []
        for slots in pieces.on(device, "slots", lambda: chains.slots).unbind(1):
            a = a_of[slots]
            state = (exactly(torch.matmul, a, state) if delta else a[..., None] * state) + b_of[slots]
            states.append(state)
        if states:
            at = pieces.on(device, "at", lambda: (chains.depths - 1) * len(chains.documents) + chains.of)
            known = torch.cat([known, torch.cat(states)[at]])
    due = pieces.on(device, ("due", initial is None), lambda: _due(pieces, initial is not None))
    out, states_after = run(inputs, known[due], pieces.lens.tolist())
    out = after(out, summaries)
    if not pieces.kept.all():
        kept = pieces.on(device, "kept", lambda: np.repeat(pieces.kept[pieces.own], pieces.lens))
        out = out.masked_fill(~kept[:, None, None], 0.0)
    if not final:
        return out, None
    closes = pieces.kept & (pieces.end == pieces.last)
    ends, slots_of = pieces.sent(closes)
    own = states_after[pieces.on(device, "ends", lambda: ends.own)].flatten(1)
    states_of = gather_rows(own, ends.lens, pieces.cp_rank, group_name, what)
    return out, states_of[pieces.on(device, "closes", lambda: slots_of[closes])].unflatten(1, (heads, K, V))


def _due(pieces: Pieces, given: bool) -> Ints:
    """Of each own piece, where its state is: 0 is none, then come those of documents if ``given``, then the folded."""
    own, num_given = pieces.own, pieces.num_documents * given
    opens = pieces.kept[own] & (pieces.start == pieces.first)[own]
    receives = pieces.receives[own]
    due = np.where(opens, (pieces.document[own] + 1) * given, 0)
    return np.where(receives, num_given + np.cumsum(receives), due)


def _rows(pieces: Pieces, chosen: Ints, device: torch.device) -> tuple[Tensor, Tensor]:
    """Rows of some of the own pieces, and the number of the piece of each."""
    begins = pieces.row[pieces.own][chosen]
    lens = pieces.lens[chosen]
    rows = pieces.on(device, "rows", lambda: np.concatenate([*map(np.arange, begins, begins + lens), begins[:0]]))
    return rows, pieces.on(device, "of rows", lambda: np.repeat(np.arange(len(lens)), lens))


def _summaries(
    run: Run,
    inputs: Inputs,
    rows: Tensor,
    of_rows: Tensor,
    lens: list[int],
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:
    """A and B of the pieces that are sent. A is [n, HV, K, K] of a delta rule, else what decays, [n, HV, 1 or K]."""
    (heads, V), K, n = inputs.v.shape[1:], inputs.k.shape[2], len(lens)
    inputs = inputs.at(rows)
    v, g = inputs.v, inputs.g
    initial = torch.zeros(n, heads, K, V, dtype=dtype, device=v.device)
    if inputs.beta is not None:  # columns of the state do not know of each other: those of the identity become A
        eye = torch.eye(K, dtype=dtype, device=v.device).expand(n, heads, K, K)
        v = torch.cat([v, v.new_zeros(len(v), heads, K)], -1)
        _, found = run(inputs._replace(v=v), torch.cat([initial, eye], -1), lens)
        return found[..., V:], found[..., :V]
    _, b = run(inputs, initial, lens)
    if g is None:
        return torch.ones(n, heads, 1, dtype=dtype, device=v.device), b
    g = g if g.ndim == 3 else g[..., None]
    return torch.zeros(n, *g.shape[1:], dtype=dtype, device=v.device).index_add(0, of_rows, g.to(dtype)).exp(), b
