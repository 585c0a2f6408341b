"""Forward and backward passes of a kernel: they collect partial results of tiles and combine them in fp32 or fp64.

A `Kernel` is a pair of functions on one tile. Partial outputs and gradients stay as the kernel returned them until the
pass ends (`combine`): a running fp32 sum would be read and written once per tile, which costs five times the memory
traffic and rounds no better.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from operator import attrgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor

from cp_mesh.geometry.mask import Band
from cp_mesh.geometry.varlen import Segments
from cp_mesh.kernels.combine import OutputSum, RowSum, accumulation_dtype, finish_sums
from cp_mesh.kernels.contract import Capability, KernelTile, Pairs
from cp_mesh.kernels.few_heads import are_far, backward_of_parts, forward_of_parts
from cp_mesh.kernels.scores import ScoreGradients, Scores

# (q, k, v, cover, scores) -> (out, lse) of the tile alone; lse as in `contract`. The cover is of a kind that the
# kernel's capability lists.
TileForward = Callable[[Tensor, Tensor, Tensor, Any, Scores], tuple[Tensor, Tensor]]
# -> the tile's contribution to (dq, dk, dv), and to the gradients of `Scores.wanted`, if any
TileBackward = Callable[["BackwardTile"], tuple[Tensor, Tensor, Tensor] | tuple[Tensor, Tensor, Tensor, ScoreGradients]]
MOST_BOUND = 512  # memory orders and scales of a tile; a model may have a scale for each layer
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


KeyGradients = tuple[int, Tensor, Tensor]
"""Gradients of key rows: the first row, dk [B, K, n, D] and dv [B, K, n, Dv]; read-only."""


@dataclass(frozen=True)
class Kernel:
    """A named kernel: two functions that compute single tiles. `MergingForward` and `SummingBackward` are its passes.

    The backward gets the *global* lse, over all keys, and the global out, or delta = rowsum(dout · out) - dlse if it
    ``uses_delta``; so partial gradients sum to the full ones.

    Attributes:
        name, capability: what the kernel is called, and what it supports.
        forward, backward: the tile functions.
        int64_offsets: these functions count elements in 64 bits; others get tensors of `few_heads`.
        bind: two functions that bind a tile: (tile, q, k, v, scores) -> a `BoundForward`, and (tile, dout, q, k, v,
            out, lse, scores, dk, dv) -> a `BoundBackward`; None: the tile function is called.
        squares: the functions take only full tiles and square causal tiles.
        uses_delta: the backward reads delta instead of computing it from out.
        rounds: partial gradients are in the inputs' dtype, not in the accumulation dtype.
        one_tile: the functions skip masked blocks of `Pairs` themselves, and get all tiles of a step as one.
        reproducible: the kernel for calls that ask for a deterministic backward, if it is a different one.
    """

    name: str
    capability: Capability
    forward: TileForward
    backward: TileBackward
    int64_offsets: bool = False
    bind: tuple[Callable[..., BoundForward | None], Callable[..., BoundBackward | None]] | None = None
    squares: bool = False
    uses_delta: bool = False
    rounds: bool = True
    one_tile: bool = False
    reproducible: Kernel | None = None

    def bind_forward(self, tile: KernelTile, q: Tensor, k: Tensor, v: Tensor, scores: Scores) -> BoundForward:
        """The forward of a tile, for tensors of these shapes and strides."""
        of_q, of_k, cover, compute = tile.q, tile.k, tile.cover, self.forward
        if not self.int64_offsets and are_far(*_rows(of_q, q), *_rows(of_k, k, v)):
            compute = partial(forward_of_parts, compute)
        elif self.bind is not None and (found := self.bind[0](tile, q, k, v, scores)) is not None:
            return found

        def run(q: Tensor, k: Tensor, v: Tensor, scores: Scores) -> tuple[Tensor, Tensor]:
            (q,), (k, v) = _rows(of_q, q), _rows(of_k, k, v)
            return compute(q, k, v, cover, scores.rows(*of_q))

        return run

    def bind_backward(
        self, tile: KernelTile, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor | None, *others: Any
    ) -> BoundBackward:
        """As `bind_forward`; others: lse, scores, dk, dv."""
        of_q, of_k, cover, compute = tile.q, tile.k, tile.cover, self.backward
        if not self.int64_offsets and are_far(*_rows(of_q, q), *_rows(of_k, k, v), *_rows(of_q, dout, out)):
            compute = partial(backward_of_parts, compute)
        elif self.bind is not None and (found := self.bind[1](tile, dout, q, k, v, out, *others)) is not None:
            return found

        def run(
            dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor | None, lse: Tensor, delta: Tensor | None,
            scores: Scores, dk: Tensor | None, dv: Tensor | None,
        ) -> Any:  # fmt: skip
            dout, q, out, lse, delta = _rows(of_q, dout, q, out, lse, delta)
            k, v = _rows(of_k, k, v)
            return compute(BackwardTile(dout, q, k, v, out, lse, delta, cover, scores.rows(*of_q), dk, dv))

        return run


def _squares(tiles: Sequence[KernelTile]) -> list[KernelTile]:
    return [part for tile in tiles for part in tile.squares]


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
    """Forward pass: (out, lse) of one rank's queries q [B, H, S, D], merged over steps."""

    def __init__(self, kernel: Kernel, q: Tensor, v_head_dim: int, scores: Scores) -> None:
        self._kernel, self._scores, self._like, (self._q,) = kernel, scores, q, dense_rows(q)
        self._sum = OutputSum((*q.shape[:3], v_head_dim), accumulation_dtype(q.dtype), q.device)

    def step(self, k: Tensor, v: Tensor, tiles: Sequence[KernelTile]) -> None:
        """Add the tiles of one source's keys."""
        (k, v), q, scores = dense_rows(k, v), self._q, self._scores
        key = q.shape, k.shape, v.shape, q.stride(), k.stride(), v.stride(), scores.scale, scores.softcap
        for tile in _squares(tiles) if self._kernel.squares else tiles:
            if (run := tile.bound.get(key)) is None:
                run = _remember(tile, key, self._kernel.bind_forward(tile, q, k, v, scores))
            self._sum.add(tile.q[0], *run(q, k, v, scores))

    def finish(self, into: tuple[Tensor, Tensor] | None = None) -> tuple[Tensor, Tensor]:
        """Return out in q's dtype and lse in the accumulation dtype, written to ``into`` if given."""
        return self._sum.finish(self._like, self._q.dtype, into, self._scores.sinks)


class SummingBackward:
    """Backward pass: dq of one rank's queries, summed over steps; the arguments are as in `BackwardTile`.

    Attributes:
        dtype: of sums.
        dq: its sum.
        of_scores: gradients of `Scores.wanted`, summed over all steps, for q's heads and rows.
    """

    def __init__(
        self, kernel: Kernel, dout: Tensor, q: Tensor, out: Tensor | None, lse: Tensor, delta: Tensor | None,
        scores: Scores,
    ) -> None:  # fmt: skip
        self._kernel, self._scores, self._lse, self._delta = kernel, scores, lse, delta
        self._dout, self._q, *dense = dense_rows(dout, q) if out is None else dense_rows(dout, q, out)
        self._out, self.dtype = dense[0] if dense else None, accumulation_dtype(q.dtype)
        self.dq = RowSum(q.shape, self.dtype, q.device)
        self.of_scores = ScoreGradients.zeros(scores, self.dtype)

    def step(
        self, k: Tensor, v: Tensor, tiles: Sequence[KernelTile], into: tuple[Tensor, Tensor] | None = None
    ) -> list[KeyGradients]:
        """Add the contribution of one source's keys to dq, and compute their dk and dv.

        If ``into`` is given, dk and dv are *written* to all rows of these views, 0 for rows that no tile reaches. Else
        they are returned as pieces; overlapping pieces add up.
        """
        tiles, (k, v) = _squares(tiles) if self._kernel.squares else tiles, dense_rows(k, v)
        if into is None:
            return [self._tile(k, v, tile) for tile in tiles]
        if _partition(tiles, k.shape[2]):
            for tile in tiles:
                self._tile(k, v, tile, *_rows(tile.k, *into))
            return []
        sums = [(RowSum(x.shape, self.dtype, x.device), x) for x in into]
        for tile in tiles:
            begin, *piece = self._tile(k, v, tile)
            for (total, _), x in zip(sums, piece, strict=True):
                total.add(begin, x)
        finish_sums(sums)
        return []

    def _tile(self, k: Tensor, v: Tensor, tile: KernelTile, *into: Tensor) -> KeyGradients:
        """The gradients of a tile's keys, written to ``into``, if given: views of its rows for dk and dv."""
        # a kernel cannot write to a buffer of fp32 sums
        dk, dv = into if into and into[0].dtype == k.dtype else (None, None)
        dout, q, out, lse, delta, scores = self._dout, self._q, self._out, self._lse, self._delta, self._scores
        key = (
            q.shape, k.shape, v.shape, *map(Tensor.stride, (dout, q, k, v, lse)), out is None or out.stride(),
            dk is None or (dk.stride(), dk.data_ptr() % 16), dv is None or (dv.stride(), dv.data_ptr() % 16),
            scores.scale, scores.softcap,
        )  # fmt: skip
        if (run := tile.bound.get(key)) is None:
            run = _remember(tile, key, self._kernel.bind_backward(tile, dout, q, k, v, out, lse, scores, dk, dv))
        dq, dk, dv, *of_scores = run(dout, q, k, v, out, lse, delta, scores, dk, dv)
        for gradients in of_scores if scores.wanted else ():
            self.of_scores.part(rows=tile.q).add_(gradients)
        self.dq.add(tile.q[0], dq)
        for part, x in zip(into, (dk, dv), strict=False):
            if x is not part:
                part.copy_(x)
        return tile.k[0], dk, dv


def _partition(tiles: Sequence[KernelTile], length: int) -> bool:
    """Whether tiles cover each of ``length`` keys exactly once."""
    end = 0
    for tile in sorted(tiles, key=attrgetter("k")):
        if tile.k[0] != end:
            return False
        end = tile.k[1]
    return end == length
