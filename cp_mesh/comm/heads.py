"""Exchange heads for rows (Ulysses): one all-to-all gives a rank all rows of some heads, another its rows of all heads.

A buffer holds rows in rank order, which is the order of the layout. ``order`` moves them to their positions on arrival,
so that the computation sees one plain sequence. Tensors of one dtype travel in one buffer.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from itertools import accumulate

import torch
import torch.distributed as dist
from torch import Tensor

from cp_mesh.comm.contract import Swap
from cp_mesh.comm.exchange import MakeTransport, Transport
from cp_mesh.comm.packing import Packing, make_packing

Like = tuple[int, int, int, torch.dtype]
"""Batch, heads, head dim and dtype of a tensor."""


class HeadExchange:
    """The all-to-alls of a group; it holds no state of a pass.

    Args:
        group: the cp group, or a group within it.
        shard_lens: rows of each rank, [size of the group].
        order: int64 [S] on the tensors' device, the positions of all rows in rank order; None if they rise one by one.
        make_transport: makes the transport of a pass, see `cp_mesh.comm.exchange.transport_maker`.

    Attributes:
        seq_len: rows of all ranks together.
        own_rows, fewest_rows: rows of this rank, and of the rank with the fewest.
    """

    def __init__(
        self, group: dist.ProcessGroup, shard_lens: Sequence[int], order: Tensor | None, make_transport: MakeTransport
    ) -> None:
        self._order, self.make_transport = order, make_transport
        rank, size, whole = group.rank(), group.size(), list(shard_lens)
        self.seq_len, self.own_rows, self.fewest_rows, self._size = sum(whole), whole[rank], min(whole), size
        own, begin = [whole[rank]] * size, [*accumulate(whole, initial=0)][rank]
        self._out = Swap(own, whole, [rank * n for n in whole], size * max(whole))
        self._home = Swap(whole, own, [begin] * size, self.seq_len)

    def to_heads(self, transport: Transport, tensors: Sequence[Tensor]) -> tuple[tuple[Tensor, ...], list[Tensor]]:
        """Send rank r its part of `by_rank`, [r, S_local, B, heads, D] of each tensor.

        Returns:
            The rows of all ranks for this rank's heads, [B, heads, S, D] by position; and the buffers [S, features] of
            which these are views, one for each dtype.
        """
        likes = tuple((*x.shape[2:], x.dtype) for x in tensors)
        packings, received = self._swap(transport, self._out, tensors, likes, None)
        if (order := self._order) is not None:
            received = [torch.empty_like(rows).index_copy_(0, order, rows) for rows in received]
        return packings.views(received), received

    def home(
        self, transport: Transport, tensors: Sequence[Tensor], dtypes: Sequence[torch.dtype] | None = None
    ) -> list[Tensor]:
        """Send results of this rank's heads, [B, heads, S, D] each, to the owners of the rows.

        Args:
            transport: of the pass.
            tensors: by position.
            dtypes: in which they travel; None: their own.

        Returns:
            Results of all ranks for this rank's rows, [rank, S_local, B, heads, D] of each, as in `by_rank`.
        """
        each = [x.dtype for x in tensors] if dtypes is None else dtypes
        by_row = [x.permute(2, 0, 1, 3) for x in tensors]
        likes = tuple((*x.shape[1:], dtype) for x, dtype in zip(by_row, each, strict=True))
        packings, received = self._swap(transport, self._home, by_row, likes, self._order)
        sizes = self._size, self.own_rows
        return [x.permute(2, 0, 1, 3).unflatten(0, sizes) for x in packings.views(received)]

    def _swap(
        self, transport: Transport, swap: Swap, tensors: Sequence[Tensor], likes: tuple[Like, ...], order: Tensor | None
    ) -> tuple[_Packings, list[Tensor]]:
        """Exchange tensors [..., B, heads, D], whose rows are sent in this order; return the buffers that arrive."""
        packings = _packings(likes, tensors[0].device)

        def write(buffers: Sequence[Tensor]) -> None:
            for packing, of_dtype, buffer in zip(packings.each, packings.of, buffers, strict=True):
                _pack(packing, buffer, [tensors[i] for i in of_dtype], order)

        if self._size > 1 and self.seq_len:
            return packings, transport.swap(packings.each, write, swap)
        buffers = [packing.empty(self.seq_len) for packing in packings.each]
        write(buffers)
        return packings, buffers


def by_rank(x: Tensor, size: int, chunks: int = 1, chunk: int = 0) -> Tensor:
    """View [B, size · chunks · heads, S, D] as [size, S, B, heads, D]: each rank's heads, or a chunk of these."""
    (B, H, S, D), (batch, head, row, last) = x.shape, x.stride()
    heads = H // (size * chunks)
    strides = chunks * heads * head, row, batch, head, last
    return x.as_strided((size, S, B, heads, D), strides, x.storage_offset() + chunk * heads * head)


def _pack(packing: Packing, buffer: Tensor, tensors: Sequence[Tensor], order: Tensor | None) -> None:
    """Write tensors [..., B, heads, D] side by side into rows [rows, features], in one launch where possible."""
    (*rows, B, _, D), same = tensors[0].shape, {x.dtype for x in tensors} == {buffer.dtype}
    if order is None and len(tensors) > 1 and B == 1 and same and {x.shape[-1] for x in tensors} == {D}:
        into = buffer.view(*rows, buffer.shape[1] // D, D)
        torch.cat([x.squeeze(-3) for x in tensors], -2, out=into)
        return
    for x, part in zip(tensors, packing.views(buffer), strict=True):
        by_row = part.permute(2, 0, 1, 3)
        if order is None:
            by_row.view(x.shape).copy_(x)
        elif same:
            torch.index_select(x, 0, order, out=by_row)
        else:
            by_row.copy_(x.index_select(0, order))


class _Packings:
    """Packings of tensors of several dtypes.

    Attributes:
        each: one for each dtype.
        of: the numbers of its tensors.
    """

    def __init__(self, likes: Sequence[Like], device: torch.device) -> None:
        dtypes = [dtype for *_, dtype in likes]
        self.of = [[i for i, of in enumerate(dtypes) if of == dtype] for dtype in dict.fromkeys(dtypes)]
        self.each = tuple(make_packing(tuple(likes[i][:3] for i in of), dtypes[of[0]], device) for of in self.of)

    def views(self, buffers: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Return the tensors [B, heads, rows, D] that lie in the buffers, in their original order."""
        found: dict[int, Tensor] = {}
        for packing, of_dtype, buffer in zip(self.each, self.of, buffers, strict=True):
            found.update(zip(of_dtype, packing.views(buffer), strict=True))
        return tuple(found[i] for i in range(len(found)))


_packings = lru_cache(maxsize=256)(_Packings)
