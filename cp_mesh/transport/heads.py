"""Heads against rows: after an all-to-all a rank holds all rows of some heads, and after another its rows of all heads.

Over functional collectives. A buffer holds rows in rank order, which is the order of the layout; ``order`` puts them
where their positions are, so that whoever computes on all rows sees one plain sequence.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from cp_mesh.transport.functional import Exchange
from cp_mesh.transport.packing import Packing

Arrive = Callable[[], tuple[Tensor, ...]]
"""Waits for an all-to-all; what it brought."""


class HeadExchange:
    """The all-to-alls of one call.

    Args:
        group: the cp group.
        shard_lens: rows of each rank, [cp_size].
        order: int64 [S] on the tensors' device, the positions of all rows in rank order; None if they rise one by one.

    Attributes:
        own: number of ranks, and of this rank's rows.
        seq_len: rows of all ranks.
    """

    def __init__(self, group: dist.ProcessGroup, shard_lens: Sequence[int], order: Tensor | None) -> None:
        self._group_name, self._shard_lens = group.group_name, list(shard_lens)
        self.own, self.order, self.seq_len = (group.size(), shard_lens[group.rank()]), order, sum(shard_lens)

    def to_heads(self, tensors: Sequence[Tensor]) -> Arrive:
        """Start sending rank r the heads [:, r] of [B, cp_size, heads, S_local, D]; [B, heads, S, D] by position."""
        packing = Packing.of([x[:, 0] for x in tensors])
        sent = packing.empty(math.prod(self.own))
        for view, x in zip(packing.views(sent), tensors, strict=True):
            view.unflatten(2, self.own).copy_(x.transpose(1, 2))
        wait = self.start(sent, home=False)

        def arrive() -> tuple[Tensor, ...]:
            rows = wait()
            if self.order is not None:
                rows = torch.empty_like(rows).index_copy_(0, self.order, rows)
            return packing.views(rows)

        return arrive

    def home(self, shapes: Sequence[tuple[int, int, int]], dtype: torch.dtype, device: torch.device) -> Home:
        """A message to the owners of all rows, of tensors (B, heads, D) of this rank's heads."""
        return Home(self, Packing(tuple(shapes), dtype, device))

    def start(self, sent: Tensor, home: bool) -> Callable[[], Tensor]:
        """Start an all-to-all of a buffer in rank order: of this rank's rows for every rank, or of all rows home."""
        size, own_rows = self.own
        if size == 1 or not self.seq_len:
            return lambda: sent
        own = [own_rows] * size
        return Exchange(sent, *((self._shard_lens, own) if home else (own, self._shard_lens)), self._group_name).wait


class Home:
    """What was computed of this rank's heads, on its way to the owners of the rows.

    Attributes:
        tensors: [B, heads, S, D] by position, to be written before it is sent.
    """

    def __init__(self, swap: HeadExchange, packing: Packing) -> None:
        self._swap, self._packing, self._rows = swap, packing, packing.empty(swap.seq_len)
        self.tensors = packing.views(self._rows)

    def send(self) -> Arrive:
        """Start; what arrives are the tensors of all ranks, [B, cp_size, heads, S_local, D] of this rank's rows."""
        swap, packing = self._swap, self._packing
        wait = swap.start(self._rows if swap.order is None else self._rows.index_select(0, swap.order), home=True)
        return lambda: tuple(x.unflatten(2, swap.own).transpose(1, 2) for x in packing.views(wait()))
