"""Forward and backward passes of a kernel: they collect partial results of tiles and combine them in fp32 or fp64.

A tile kernel is a pair of functions on one tile; `merging_kernel` makes a `Kernel` from them. Partial outputs and
gradients stay as the kernel returned them until the pass ends (`combine`): a running fp32 sum would be read and written
once per tile, which costs five times the memory traffic and rounds no better.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

from cp_mesh.geometry.mask import CAUSAL, FULL, Band
from cp_mesh.geometry.schedule import split_causal
from cp_mesh.geometry.varlen import Segments
from cp_mesh.kernels.combine import OutputSum, RowSum, accumulation_dtype, finish_sums
from cp_mesh.kernels.contract import Capability, KernelTile, Pairs
from cp_mesh.kernels.few_heads import are_far, by_heads
from cp_mesh.kernels.scores import ScoreGradients, Scores

# (q, k, v, cover, scores) -> (out, lse) of the tile alone; lse as in `contract`. The cover is of a kind that the
# kernel's capability lists.
TileForward = Callable[[Tensor, Tensor, Tensor, Any, Scores], tuple[Tensor, Tensor]]
# -> the tile's contribution to (dq, dk, dv), and to the gradients of `Scores.wanted`, if any
TileBackward = Callable[["BackwardTile"], tuple[Tensor, Tensor, Tensor] | tuple[Tensor, Tensor, Tensor, ScoreGradients]]
MOST_BOUND = 64  # memory orders of a tile
BoundForward = Callable[[Tensor, Tensor, Tensor, Scores], tuple[Tensor, Tensor]]
"""(q, k, v, scores) -> (out, lse) of a tile, from tensors with all rows and keys."""
BoundBackward = Callable[..., Any]
"""(dout, q, k, v, out, lse, delta, scores, dk, dv) -> as `TileBackward`; all rows, but of dk and dv the tile's keys."""


class BackwardTile(NamedTuple):
    """The input of a tile's backward; out, lse and delta are global, over all keys, for the tile's rows.

    ``scores`` has the bias of the tile's rows. A kernel that reads delta = rowsum(dout · out) - dlse, float32 or
    float64, gets it; other kernels get out. dk and dv, if given, are buffers that the kernel may write these gradients
    into: [B, K, n, D] views of k's dtype with unit last stride. It then returns these tensors themselves, or others,
    which the caller copies.
    """

    dout: Tensor
    q: Tensor
    k: Tensor
    v: Tensor
    out: Tensor | None
    lse: Tensor
    delta: Tensor | None
    cover: Band | Pairs | Segments
    scores: Scores
    dk: Tensor | None = None
    dv: Tensor | None = None


@dataclass(frozen=True, eq=False)
class KeyGradients:
    """Gradients of key rows from ``begin`` on: dk [B, K, n, D], dv [B, K, n, Dv]; read-only."""

    begin: int
    dk: Tensor
    dv: Tensor


@dataclass(frozen=True)
class Kernel:
    """A named kernel: ``begin_forward(q, v_head_dim, scores)``, ``begin_backward(dout, q, out, lse, delta, scores)``.

    The backward gets the *global* lse, over all keys, and the global out, or delta = rowsum(dout · out) - dlse if it
    ``uses_delta``; so partial gradients sum to the full ones. It returns them in the inputs' dtype if it ``rounds``,
    else in the accumulation dtype. A kernel with ``one_tile`` skips masked blocks of `Pairs` itself and gets all tiles
    of a step in one call.

    ``reproducible`` is the kernel for calls that ask for a deterministic backward, if it is a different one.
    """

    name: str
    capability: Capability
    begin_forward: Callable[[Tensor, int, Scores], MergingForward]
    begin_backward: Callable[[Tensor, Tensor, Tensor | None, Tensor, Tensor | None, Scores], SummingBackward]
    uses_delta: bool
    rounds: bool
    one_tile: bool = False
    reproducible: Kernel | None = None


def merging_kernel(
    name: str,
    capability: Capability,
    forward: TileForward,
    backward: TileBackward,
    *,
    large: bool = False,
    bind: tuple[Callable[..., BoundForward | None], Callable[..., BoundBackward | None]] | None = None,
    squares: bool = False,
    uses_delta: bool = False,
    rounds: bool = True,
    one_tile: bool = False,
    reproducible: Kernel | None = None,
) -> Kernel:
    """Make a `Kernel` from two functions that compute single tiles.

    Args:
        name, capability: of the kernel.
        forward, backward: the tile functions.
        large: these functions count elements in 64 bits; others get tensors of `few_heads`.
        bind: two functions that bind a tile: (tile, q, k, v, scores) -> a `BoundForward`, and (tile, dout, q, k, v,
            out, lse, scores, dk, dv) -> a `BoundBackward`; None: the tile function is called.
        squares: pass only full tiles and square causal tiles to these functions.
        uses_delta: the backward reads delta instead of computing it from out.
        rounds: partial gradients are in the inputs' dtype, not in the accumulation dtype.
        one_tile: the tile functions skip masked blocks of `Pairs` of any size and order.
        reproducible: as in `Kernel`.
    """
    parted = (forward, backward) if large else by_heads(forward, backward)

    def bind_forward(tile: KernelTile, q: Tensor, k: Tensor, v: Tensor, scores: Scores) -> BoundForward:
        of_q, of_k, cover = tile.q, tile.k, tile.cover
        is_far = not large and are_far(*_rows(of_q, q), *_rows(of_k, k, v))
        if bind is not None and not is_far and (found := bind[0](tile, q, k, v, scores)) is not None:
            return found
        compute = parted[0] if is_far else forward

        def run(q: Tensor, k: Tensor, v: Tensor, scores: Scores) -> tuple[Tensor, Tensor]:
            (q,), (k, v) = _rows(of_q, q), _rows(of_k, k, v)
            return compute(q, k, v, cover, scores.rows(*of_q))

        return run

    def bind_backward(
        tile: KernelTile, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor | None, lse: Tensor,
        scores: Scores, dk: Tensor | None, dv: Tensor | None,
    ) -> BoundBackward:  # fmt: skip
        of_q, of_k, cover = tile.q, tile.k, tile.cover
        near = [*_rows(of_k, k, v), *_rows(of_q, dout, out)]
        is_far = not large and are_far(*_rows(of_q, q), *near)
        given = dout, q, k, v, out, lse, scores, dk, dv
        if bind is not None and not is_far and (found := bind[1](tile, *given)) is not None:
            return found
        compute = parted[1] if is_far else backward

        def run(
            dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor | None, lse: Tensor, delta: Tensor | None,
            scores: Scores, dk: Tensor | None, dv: Tensor | None,
        ) -> Any:  # fmt: skip
            dout, q, out, lse, delta = _rows(of_q, dout, q, out, lse, delta)
            k, v = _rows(of_k, k, v)
            return compute(BackwardTile(dout, q, k, v, out, lse, delta, cover, scores.rows(*of_q), dk, dv))

        return run

    def begin_forward(q: Tensor, v_head_dim: int, scores: Scores) -> MergingForward:
        return MergingForward(bind_forward, squares, q, v_head_dim, scores)

    def begin_backward(
        dout: Tensor, q: Tensor, out: Tensor | None, lse: Tensor, delta: Tensor | None, scores: Scores
    ) -> SummingBackward:
        return SummingBackward(bind_backward, squares, dout, q, out, lse, delta, scores)

    return Kernel(name, capability, begin_forward, begin_backward, uses_delta, rounds, one_tile, reproducible)


def _squares(tiles: Sequence[KernelTile]) -> list[KernelTile]:
    parts = []
    for tile in tiles:
        if "squares" not in tile.bound:
            tile.bound["squares"] = _squares_of(tile)
        parts += tile.bound["squares"]
    return parts


def _squares_of(tile: KernelTile) -> list[KernelTile]:
    assert isinstance(tile.cover, Band), "choose_kernel gives tensor masks to kernels that read them"
    split = split_causal(tile.cover, tile.q[1] - tile.q[0], tile.k[1] - tile.k[0])
    assert split is not None, "choose_kernel gives windows to kernels that support them"
    parts = []
    for q, k, causal in split:
        q_rows, k_rows = (tile.q[0] + q[0], tile.q[0] + q[1]), (tile.k[0] + k[0], tile.k[0] + k[1])
        parts.append(KernelTile(q_rows, k_rows, CAUSAL if causal else FULL))
    return parts


def dense_rows(*tensors: Tensor) -> list[Tensor]:
    """The tensors with unit stride in the head dim and, on CUDA, rows aligned to 16 bytes; copied if necessary.

    SDPA checks this before it calls a stock kernel; called through aten, a kernel would read wrong memory.
    """
    dense = []
    for x in tensors:
        (B, H, S, _), (batch, head, row, last) = x.shape, x.stride()
        steps = batch * (B > 1) | head * (H > 1) | row * (S > 1)
        if last != 1 or (x.is_cuda and (x.data_ptr() | steps * x.element_size()) % 16):
            x = x.clone(memory_format=torch.contiguous_format)  # contiguous() would return an unaligned x itself
        dense.append(x)
    return dense


def _rows(rows: tuple[int, int], *tensors: Any) -> list[Any]:
    """Views of a range of rows; a tensor itself if the range is all its rows; None for None."""
    begin, end = rows
    cut = []
    for x in tensors:
        cut.append(x if x is None or (begin == 0 and end == x.shape[2]) else x[:, :, begin:end])
    return cut


def _remember(tile: KernelTile, key: Any, run: Callable[..., Any]) -> Callable[..., Any]:
    """Keep what was bound; strides may differ in every call, so at most `MOST_BOUND`."""
    if len(tile.bound) >= MOST_BOUND:
        tile.bound.clear()
    tile.bound[key] = run
    return run


class MergingForward:
    """Forward pass: (out, lse) of one rank's queries, merged over steps."""

    def __init__(
        self, bind: Callable[..., BoundForward], squares: bool, q: Tensor, v_head_dim: int, scores: Scores
    ) -> None:
        self._bind, self._squares, self._scores = bind, squares, scores
        self._like, (self._q,) = q, dense_rows(q)
        self._sum = OutputSum((*q.shape[:3], v_head_dim), accumulation_dtype(q.dtype), q.device)

    def step(self, k: Tensor, v: Tensor, tiles: Sequence[KernelTile]) -> None:
        """Add the tiles of one source's keys."""
        (k, v), q, scores = dense_rows(k, v), self._q, self._scores
        key = q.shape, k.shape, v.shape, q.stride(), k.stride(), v.stride(), scores.scale, scores.softcap
        for tile in _squares(tiles) if self._squares else tiles:
            if (run := tile.bound.get(key)) is None:
                run = _remember(tile, key, self._bind(tile, q, k, v, scores))
            out, lse = run(q, k, v, scores)
            self._sum.add(tile.q[0], out, lse)

    def finish(self, into: tuple[Tensor, Tensor] | None = None) -> tuple[Tensor, Tensor]:
        """Return out in q's dtype and lse in the accumulation dtype, written to ``into`` if given."""
        return self._sum.finish(self._like, self._q.dtype, into, self._scores.sinks)


class SummingBackward:
    """Backward pass: dq of one rank's queries, summed over steps."""

    def __init__(
        self,
        bind: Callable[..., BoundBackward],
        squares: bool,
        dout: Tensor,
        q: Tensor,
        out: Tensor | None,
        lse: Tensor,
        delta: Tensor | None,
        scores: Scores,
    ) -> None:
        self._bind, self._squares, self._scores = bind, squares, scores
        self._dout, self._q, *dense = dense_rows(*(x for x in (dout, q, out) if x is not None))
        self._out, self._lse, self._delta = dense[0] if dense else None, lse, delta
        self._dtype = accumulation_dtype(q.dtype)
        self._dq = RowSum(q.shape, self._dtype, q.device)
        self._of_scores = ScoreGradients.zeros(scores, self._dtype)

    def step(
        self, k: Tensor, v: Tensor, tiles: Sequence[KernelTile], into: tuple[Tensor, Tensor] | None = None
    ) -> list[KeyGradients]:
        """Add the contribution of one source's keys to dq, and compute their dk and dv.

        If ``into`` is given, dk and dv are *written* to all rows of these views, 0 for rows that no tile reaches. Else
        they are returned as pieces; overlapping pieces add up.
        """
        parts, (k, v) = _squares(tiles) if self._squares else tiles, dense_rows(k, v)
        if into is None:
            return [self._tile(k, v, tile, None, None) for tile in parts]
        dk, dv = into
        if _partition([tile.k for tile in parts], k.shape[2]):
            for tile in parts:
                dk_rows, dv_rows = _rows(tile.k, dk, dv)
                piece = self._tile(k, v, tile, dk_rows, dv_rows)
                for written, rows in ((piece.dk, dk_rows), (piece.dv, dv_rows)):
                    if written is not rows:
                        rows.copy_(written)
            return []
        dk_sum, dv_sum = RowSum(k.shape, self._dtype, k.device), RowSum(v.shape, self._dtype, v.device)
        for tile in parts:
            piece = self._tile(k, v, tile, None, None)
            dk_sum.add(piece.begin, piece.dk)
            dv_sum.add(piece.begin, piece.dv)
        finish_sums([(dk_sum, dk), (dv_sum, dv)])
        return []

    def _tile(self, k: Tensor, v: Tensor, tile: KernelTile, dk: Tensor | None, dv: Tensor | None) -> KeyGradients:
        if dk is not None and dk.dtype != k.dtype:  # a kernel cannot write to a buffer of fp32 sums
            dk = dv = None
        dout, q, out, lse, delta, scores = self._dout, self._q, self._out, self._lse, self._delta, self._scores
        given = [x for x in (dout, q, k, v, out, lse, dk, dv) if x is not None]
        key = (
            q.shape, k.shape, v.shape, *map(Tensor.stride, given), None if dk is None else dk.data_ptr() % 16,
            None if dv is None else dv.data_ptr() % 16, scores.scale, scores.softcap,
        )  # fmt: skip
        if (run := tile.bound.get(key)) is None:
            run = _remember(tile, key, self._bind(tile, dout, q, k, v, out, lse, scores, dk, dv))
        dq, dk, dv, *of_scores = run(dout, q, k, v, out, lse, delta, scores, dk, dv)
        for gradients in of_scores if self._scores.wanted else ():
            self._of_scores.part(rows=tile.q).add_(gradients)
        self._dq.add(tile.q[0], dq)
        return KeyGradients(tile.k[0], dk, dv)

    def finish(self, into: Tensor | None, beside: Sequence[tuple[RowSum, Tensor]] = ()) -> Tensor:
        """Write dq, rounded once, into a tensor [B, H, S, D] and return it; write the sums ``beside`` to theirs.

        Without ``into``, return dq with any strides, possibly a kernel's own result in its dtype.
        """
        if into is None:
            finish_sums(beside)
            return self._dq.result(self._q, self._q.dtype)
        finish_sums([(self._dq, into), *beside])
        return into

    def score_gradients(self) -> ScoreGradients:
        """Gradients of `Scores.wanted`, summed over all steps, for q's heads and rows."""
        return self._of_scores


def _partition(ranges: Sequence[tuple[int, int]], length: int) -> bool:
    """Whether row ranges cover each of ``length`` rows exactly once."""
    edges = sorted(ranges)
    return bool(edges) and edges[0][0] == 0 and edges[-1][1] == length and all(a[1] == b[0] for a, b in pairwise(edges))
