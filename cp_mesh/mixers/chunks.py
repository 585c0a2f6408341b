"""The recurrence of all rules in chunks: matrix products within all chunks at once, then a scan from chunk to chunk.

With p_i, the decay from the chunk's begin to row i, and d_ij, that from row j to row i (1 for i = j):

    (I + beta_i (k_i k_j d_ij)_{i>j}) U = beta (V - p K S),   O = scale (p Q S + (q_i k_j d_ij)_{i>=j} U)
    S' = p_last S + sum_j d_last,j k_j u_j

The logarithm of a decay is always a sum of the g between its rows, never a difference of two sums: strong decays lose
no digits, and exp is never of a positive number. The source of the forms is flash-linear-attention; the halves of
`_pairs` are ours.
"""

from __future__ import annotations

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from cp_mesh.kernels.combine import accumulation_dtype
from cp_mesh.mixers.reference import Inputs

CHUNK = 64


class _Chunks:
    """Where rows of sequences lie in chunks: the first chunks of all, then the second of those that are longer, ...

    Attributes:
        rows: of each place, [chunks, C]; the number of rows where there is none.
        places: of each row, among all of ``rows``.
        counts: chunks of each step of the scan.
        order: sequences by their number of chunks, most first; ``inverse`` is the way back.
    """

    def __init__(self, lens: list[int], device: torch.device) -> None:
        of, num_rows = np.array(lens, dtype=np.int64), sum(lens)
        mean = num_rows // sum(map(bool, lens))
        size = 1 << (max(1, min(CHUNK, mean)).bit_length() - 1)  # so less than half of the places are empty
        num = -(-of // size)
        order = np.argsort(-num, kind="stable")
        steps = np.arange(num.max(initial=0))
        counts = len(of) - np.searchsorted(np.sort(num), steps, side="right")
        ends = of.cumsum()
        sequences = np.concatenate([*(order[:n] for n in counts), order[:0]])
        rows = ((ends - of)[sequences] + np.repeat(steps, counts) * size)[:, None] + np.arange(size)
        inside = rows < ends[sequences][:, None]
        places = np.empty(num_rows, dtype=np.int64)
        places[rows[inside]] = np.flatnonzero(inside)
        found = np.where(inside, rows, num_rows), places, order, np.argsort(order)
        self.rows, self.places, self.order, self.inverse = (torch.from_numpy(x).to(device) for x in found)
        self.counts: list[int] = counts.tolist()


def chunked(inputs: Inputs, initial: Tensor, lens: list[int], scale: float) -> tuple[Tensor, Tensor]:
    """Compute sequences that lie one after another; as `recurrence`."""
    dtype, (heads, V), (H, K) = accumulation_dtype(inputs.v.dtype), inputs.v.shape[1:], inputs.k.shape[1:]
    if not len(inputs.v):
        return inputs.v.clone(), initial.to(dtype, copy=True)
    chunks = _Chunks(lens, inputs.v.device)

    def cut(x: Tensor, dim: int) -> Tensor:
        """[chunks, H, groups, C, dim]; places without a row are zeros, which change no state."""
        rows = F.pad(x.flatten(1), (0, 0, 0, 1))[chunks.rows]
        return rows.unflatten(2, (H, -1, dim)).movedim(1, 3).contiguous().to(dtype)

    q, k, v = cut(inputs.q, K), cut(inputs.k, K), cut(inputs.v, V)
    beta = None if inputs.beta is None else cut(inputs.beta, 1)
    g = None if inputs.g is None else cut(inputs.g, K if inputs.g.ndim == 3 else 1)
    channels = g is not None and g.shape[-1] > 1
    begin = end = whole = v.new_ones(1).expand(len(v), 1, 1, 1, 1)
    if g is not None:
        begin, end, whole = g.cumsum(-2).exp(), _later(g).exp(), g.sum(-2, keepdim=True).exp().mT
    pairs = _pairs(torch.stack([q, k]) if beta is not None else q[None], k, g)

    def added(u: Tensor, end: Tensor, k: Tensor) -> Tensor:
        return _product((k * end).mT, u) if channels else _product(k.mT, u * end)

    steps: tuple[Tensor, ...]
    if beta is None:
        steps = whole, added(v, end, k)
    else:
        right = torch.cat([v, (k * begin).expand(*v.shape[:-1], K)], -1) * beta
        solved = torch.linalg.solve_triangular(pairs[1] * beta, right, upper=False, unitriangular=True)
        steps = whole, *solved.split([V, K], -1), end, k
    counts = chunks.counts
    state, done = initial.to(dtype).unflatten(1, (H, -1))[chunks.order].tensor_split([counts[0]])
    begins, us, ends = [], [], [done]
    of_steps = zip(*(x.split(counts) for x in steps), strict=True)
    for still, (decay, u, *delta) in zip([*counts[1:], 0], of_steps, strict=True):
        begins.append(state)
        if delta:
            keys, *of_rows = delta
            us.append(u - keys @ state)
            u = added(us[-1], *of_rows)
        state = state * decay + u
        if still < len(state):
            state, done = state.tensor_split([still])
            ends.append(done)
    states, u = torch.cat(begins), torch.cat(us) if us else v
    out = _product(q * begin, states) if channels else _product(q, states) * begin
    out = (out + _product(pairs[0], u)) * scale
    out = out.movedim(3, 1).reshape(-1, heads, V)[chunks.places]
    return out.to(inputs.v.dtype), torch.cat(ends[::-1])[chunks.inverse].flatten(1, 2)


def _product(x: Tensor, y: Tensor) -> Tensor:
    """x @ y; where heads of y share one of x, they lie beside each other, so x is not repeated."""
    if x.shape[2] == y.shape[2]:
        return x @ y
    return (x[:, :, 0] @ y.movedim(2, 3).flatten(3)).unflatten(3, y.shape[2::2]).movedim(3, 2)


def _later(g: Tensor) -> Tensor:
    """Of each row the sum of g of the rows after it."""
    return F.pad(g[..., 1:, :], (0, 0, 0, 1)).flip(-2).cumsum(-2).flip(-2)


def _pairs(x: Tensor, k: Tensor, g: Tensor | None) -> Tensor:
    """The products of rows of x and k, each times the decay from the row of k to that of x; 0 for later rows of k.

    A decay for each head multiplies [C, C]. With one for each channel halves of the rows are paired, then halves of
    the halves: the decay between rows of two halves is the product of those to and from the border.

    Args:
        x: [n, ..., C, K].
        k: [..., C, K].
        g: [..., C, 1 or K]; None: no decay.
    """
    if g is None:
        return (x @ k.mT).tril()
    if g.shape[-1] == 1:
        return (x @ k.mT) * g.expand(*g.shape[:-1], g.shape[-2]).tril(-1).cumsum(-2).exp().tril()
    found = (x * k).sum(-1).expand(len(x), *g.shape[:-1])[..., None, None]  # blocks on the diagonal
    while (size := found.shape[-1]) < g.shape[-2]:
        halves = (-1, 2, size)
        left, right = g.unflatten(-2, halves).unbind(-3)
        before = k.unflatten(-2, halves).select(-3, 0) * _later(left).exp()
        after = x.unflatten(-2, halves).select(-3, 1) * right.cumsum(-2).exp()
        first, second = found.unflatten(-3, (-1, 2)).unbind(-3)
        found = torch.cat([F.pad(first, (0, size)), torch.cat([after @ before.mT, second], -1)], -2)
    return found[..., 0, :, :]
