"""Heads against rows: after an all-to-all a rank holds all rows of some heads, and after another its rows of all heads.

A buffer holds rows in rank order, which is the order of the layout; ``order`` puts them where their positions are, so
that whoever computes on all rows sees one plain sequence. Tensors of one dtype travel in one buffer.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from itertools import accumulate

import torch
import torch.distributed as dist
from torch import Tensor

from cp_mesh.transport.contract import Swap, Swaps
from cp_mesh.transport.packing import Packing

Arrive = Callable[[], tuple[Tensor, ...]]
"""Waits for an all-to-all; what it brought."""
Like = tuple[int, int, int, torch.dtype]
"""Batch, heads, head dim and dtype of a tensor."""


class HeadExchange:
    """The all-to-alls of one pass.

    Args:
        swaps: of the group.
        group: the cp group.
        shard_lens: rows of each rank, [cp_size].
        order: int64 [S] on the tensors' device, the positions of all rows in rank order; None if they rise one by one.

    Attributes:
        seq_len: rows of all ranks.
    """

    def __init__(self, swaps: Swaps, group: dist.ProcessGroup, shard_lens: Sequence[int], order: Tensor | None) -> None:
        self._swaps, self._order = swaps, order
        rank, size, whole = group.rank(), group.size(), list(shard_lens)
        self.seq_len, self._own = sum(whole), (size, whole[rank])
        own, begin = [whole[rank]] * size, [*accumulate(whole, initial=0)][rank]
        self._out = Swap(own, whole, [rank * n for n in whole], size * max(whole))
        self._home = Swap(whole, own, [begin] * size, self.seq_len)

    def to_heads(self, tensors: Sequence[Tensor]) -> Arrive:
        """Start sending rank r the heads [:, r] of [B, cp_size, heads, S_local, D]; [B, heads, S, D] by position."""
        likes = tuple((x.shape[0], x.shape[2], x.shape[4], x.dtype) for x in tensors)
        packings = _packings(likes, tensors[0].device)

        def write(buffers: Sequence[Tensor]) -> None:
            for view, x in zip(packings.views(buffers), tensors, strict=True):
                view.unflatten(2, self._own).copy_(x.transpose(1, 2))

        wait = self._start(packings, write, self._out)

        def arrive() -> tuple[Tensor, ...]:
            received = wait()
            if (order := self._order) is not None:
                received = [torch.empty_like(rows).index_copy_(0, order, rows) for rows in received]
            return packings.views(received)

        return arrive

    def home(self, likes: Sequence[Like], device: torch.device) -> Home:
        """What this rank computes of its heads, to be sent to the owners of the rows."""
        return Home(self, _packings(tuple(likes), device))

    def send_home(self, packings: _Packings, computed: Sequence[Tensor]) -> Arrive:
        """See `Home.send`."""

        def write(buffers: Sequence[Tensor]) -> None:
            for buffer, rows in zip(buffers, computed, strict=True):
                if self._order is None:
                    buffer.copy_(rows)
                else:
                    torch.index_select(rows, 0, self._order, out=buffer)

        wait = self._start(packings, write, self._home)
        return lambda: tuple(x.unflatten(2, self._own).transpose(1, 2) for x in packings.views(wait()))

    def _start(
        self, packings: _Packings, write: Callable[[Sequence[Tensor]], None], swap: Swap
    ) -> Callable[[], Sequence[Tensor]]:
        if self._own[0] > 1 and self.seq_len:
            return self._swaps.start(packings.each, write, swap)
        buffers = [packing.empty(self.seq_len) for packing in packings.each]
        write(buffers)
        return lambda: buffers


class Home:
    """Tensors of this rank's heads, on their way to the owners of the rows.

    Attributes:
        tensors: [B, heads, S, D] by position, to be written before they are sent.
    """

    def __init__(self, exchange: HeadExchange, packings: _Packings) -> None:
        self._exchange, self._packings = exchange, packings
        self._computed = [packing.empty(exchange.seq_len) for packing in packings.each]
        self.tensors = packings.views(self._computed)

    def send(self) -> Arrive:
        """Start; what arrives are the tensors of all ranks, [B, cp_size, heads, S_local, D] of this rank's rows."""
        return self._exchange.send_home(self._packings, self._computed)


class _Packings:
    """Packings of tensors of several dtypes.

    Attributes:
        each: one for each dtype.
    """

    def __init__(self, likes: Sequence[Like], device: torch.device) -> None:
        self._dtypes = [dtype for *_, dtype in likes]
        self.each = [
            Packing(tuple((batch, heads, dim) for batch, heads, dim, other in likes if other == dtype), dtype, device)
            for dtype in dict.fromkeys(self._dtypes)
        ]

    def views(self, buffers: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """The tensors [B, heads, rows, D] that lie in the buffers, in their own order."""
        parts = {x.dtype: iter(x.views(buffer)) for x, buffer in zip(self.each, buffers, strict=True)}
        return tuple(next(parts[dtype]) for dtype in self._dtypes)


_packings = lru_cache(maxsize=256)(_Packings)
