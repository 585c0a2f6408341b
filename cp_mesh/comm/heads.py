"""Exchange heads for rows (Ulysses): one all-to-all gives a rank all rows of some heads, another its rows of all heads.

A buffer holds rows in rank order, which is the order of the layout. ``order`` moves them to their positions on arrival,
so that the computation sees one plain sequence. Tensors of one dtype travel in one buffer.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from itertools import accumulate
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from cp_mesh.comm.contract import Swap, Swaps
from cp_mesh.comm.packing import Packing

Like = tuple[int, int, int, torch.dtype]
"""Batch, heads, head dim and dtype of a tensor."""


class AllRows(NamedTuple):
    """All rows of this rank's heads.

    Attributes:
        tensors: [B, heads, S, D] by position, views of the buffers.
        buffers: [S, features], one for each dtype.
    """

    tensors: tuple[Tensor, ...]
    buffers: list[Tensor]


class HeadExchange:
    """The all-to-alls of a group; it holds no state of a pass.

    Args:
        group: the cp group, or a group within it.
        shard_lens: rows of each rank, [size of the group].
        order: int64 [S] on the tensors' device, the positions of all rows in rank order; None if they rise one by one.

    Attributes:
        seq_len: rows of all ranks together.
        own_rows, fewest_rows: rows of this rank, and of the rank with the fewest.
    """

    def __init__(self, group: dist.ProcessGroup, shard_lens: Sequence[int], order: Tensor | None) -> None:
        self._order = order
        rank, size, whole = group.rank(), group.size(), list(shard_lens)
        self.seq_len, self.own_rows, self.fewest_rows, self._size = sum(whole), whole[rank], min(whole), size
        own, begin = [whole[rank]] * size, [*accumulate(whole, initial=0)][rank]
        self._out = Swap(own, whole, [rank * n for n in whole], size * max(whole))
        self._home = Swap(whole, own, [begin] * size, self.seq_len)

    def to_heads(self, swaps: Swaps, tensors: Sequence[Tensor]) -> AllRows:
        """Send rank r its part of `by_rank`, [r, S_local, B, heads, D] of each tensor; return the rows of all ranks."""
        packings = _packings(tuple((*x.shape[2:], x.dtype) for x in tensors), tensors[0].device)

        def write(buffers: Sequence[Tensor]) -> None:
            for buffer, group in zip(buffers, packings.grouped(tensors), strict=True):
                _pack(buffer, group)

        received = self._swap(swaps, packings, write, self._out)
        if (order := self._order) is not None:
            received = [torch.empty_like(rows).index_copy_(0, order, rows) for rows in received]
        return AllRows(packings.views(received), received)

    def home(
        self, swaps: Swaps, tensors: Sequence[Tensor], dtypes: Sequence[torch.dtype] | None = None
    ) -> tuple[Tensor, ...]:
        """Send results of this rank's heads, [B, heads, S, D] each, to the owners of the rows.

        Args:
            swaps: of the pass.
            tensors: by position.
            dtypes: in which they travel; None: their own.

        Returns:
            Results of all ranks for this rank's rows, [rank, S_local, B, heads, D] of each, as in `by_rank`.
        """
        each = [x.dtype for x in tensors] if dtypes is None else dtypes
        likes = tuple((x.shape[0], x.shape[1], x.shape[3], dtype) for x, dtype in zip(tensors, each, strict=True))
        packings, order = _packings(likes, tensors[0].device), self._order
        by_row = [x.permute(2, 0, 1, 3) for x in tensors]

        def write(buffers: Sequence[Tensor]) -> None:
            for buffer, group in zip(buffers, packings.grouped(by_row), strict=True):
                if order is None:
                    _pack(buffer, group)
                    continue
                for x, part in zip(group, _split(buffer, group), strict=True):
                    if x.dtype == part.dtype:
                        torch.index_select(x, 0, order, out=part)
                    else:
                        part.copy_(x.index_select(0, order))

        received = self._swap(swaps, packings, write, self._home)
        by_source = (x.view(self._size, self.own_rows, x.shape[1]) for x in received)
        return packings.parts(list(by_source))

    def _swap(
        self, swaps: Swaps, packings: _Packings, write: Callable[[Sequence[Tensor]], None], swap: Swap
    ) -> list[Tensor]:
        if self._size > 1 and self.seq_len:
            return list(swaps.start(packings.each, write, swap)())
        buffers = [packing.empty(self.seq_len) for packing in packings.each]
        write(buffers)
        return buffers


def by_rank(x: Tensor, size: int, chunks: int = 1, chunk: int = 0) -> Tensor:
    """View [B, size · chunks · heads, S, D] as [size, S, B, heads, D]: each rank's heads, or a chunk of these."""
    (B, H, S, D), (batch, head, row, last) = x.shape, x.stride()
    heads = H // (size * chunks)
    strides = chunks * heads * head, row, batch, head, last
    return x.as_strided((size, S, B, heads, D), strides, x.storage_offset() + chunk * heads * head)


def _pack(buffer: Tensor, tensors: Sequence[Tensor]) -> None:
    """Write tensors [..., B, heads, D] side by side into rows [rows, features], in one launch where possible."""
    x = tensors[0]
    rows, (B, _, D) = x.shape[:-3], x.shape[-3:]
    if len(tensors) == 1:
        buffer.view(x.shape).copy_(x)
    elif B == 1 and all(y.shape[-1] == D and y.dtype == buffer.dtype for y in tensors):
        torch.cat([y.squeeze(-3) for y in tensors], -2, out=buffer.view(*rows, buffer.shape[1] // D, D))
    else:
        for y, part in zip(tensors, _split(buffer.view(*rows, buffer.shape[1]), tensors), strict=True):
            part.copy_(y)


def _split(buffer: Tensor, likes: Sequence[Tensor]) -> list[Tensor]:
    """Return the parts of a buffer [..., features] that hold the tensors in its rows, in their shapes."""
    widths = [x.shape[-3:].numel() for x in likes]
    return [part.unflatten(-1, x.shape[-3:]) for part, x in zip(buffer.split(widths, -1), likes, strict=True)]


class _Packings:
    """Packings of tensors of several dtypes.

    Attributes:
        each: one for each dtype.
    """

    def __init__(self, likes: Sequence[Like], device: torch.device) -> None:
        dtypes = [dtype for *_, dtype in likes]
        self.each = [
            Packing(tuple((batch, heads, dim) for batch, heads, dim, other in likes if other == dtype), dtype, device)
            for dtype in dict.fromkeys(dtypes)
        ]
        self._of = [[i for i, dtype in enumerate(dtypes) if dtype == packing.dtype] for packing in self.each]

    def grouped(self, tensors: Sequence[Tensor]) -> list[list[Tensor]]:
        """Return the tensors of each packing."""
        return [list(tensors)] if len(self.each) == 1 else [[tensors[i] for i in of_dtype] for of_dtype in self._of]

    def views(self, buffers: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Return the tensors [B, heads, rows, D] that lie in the buffers, in their original order."""
        return self._in_order([packing.views(buffer) for packing, buffer in zip(self.each, buffers, strict=True)])

    def parts(self, buffers: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Return the tensors [..., B, heads, D] that lie in buffers [..., features], in their original order."""
        found = []
        for packing, buffer in zip(self.each, buffers, strict=True):
            widths = [batch * heads * dim for batch, heads, dim in packing.shapes]
            parts = (buffer,) if len(widths) == 1 else buffer.split(widths, -1)
            lead = buffer.shape[:-1]
            found.append([x.view(*lead, *shape) for x, shape in zip(parts, packing.shapes, strict=True)])
        return self._in_order(found)

    def _in_order(self, found: Sequence[Sequence[Tensor]]) -> tuple[Tensor, ...]:
        if len(found) == 1:
            return tuple(found[0])
        placed = {i: x for of_dtype, xs in zip(self._of, found, strict=True) for i, x in zip(of_dtype, xs, strict=True)}
        return tuple(placed[i] for i in range(len(placed)))


_packings = lru_cache(maxsize=256)(_Packings)
