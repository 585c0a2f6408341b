"""Rows of the sequence on their way between ranks, such as tp ranks: gathered, or summed and scattered to their owners.

Each function starts a collective and returns a function that waits for it; matrix products run in between. Shards have
`torch.chunk` sizes, or any others: unequal shards are padded to the largest while they travel.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from cp_mesh._torch import funcol, resolve_group
from cp_mesh.comm.waiting import wait_for
from cp_mesh.geometry.layouts import chunk_bounds

Result = Callable[[], Tensor]
"""Waits for a collective and returns its result."""


class Shards(NamedTuple):
    """How the rows [..., rows, D] of a sequence lie on the ranks of a group.

    Attributes:
        num_rows: of all ranks together.
        group_name: of the group.
        what: the function that the user called, for errors.
        lens: rows of each rank, if they are not `torch.chunk` sizes.
        rank: this rank, if the caller knows it: code that torch.compile traces cannot ask the group.
    """

    num_rows: int
    group_name: str
    what: str = "tensor parallelism"
    lens: tuple[int, ...] = ()
    rank: int | None = None

    @property
    def group(self) -> dist.ProcessGroup:
        return resolve_group(self.group_name)

    @property
    def own(self) -> int:
        """Number of rows on this rank."""
        return self.sizes[self.group.rank() if self.rank is None else self.rank]

    @property
    def sizes(self) -> list[int]:
        """Number of rows on each rank."""
        if self.lens:
            return [*self.lens]
        size = self.group.size()
        return [end - begin for begin, end in (chunk_bounds(self.num_rows, size, rank) for rank in range(size))]

    def of(self, rank: int, part: slice | None = None) -> slice:
        """Return the rows of a rank, or a part of them, for equal shards."""
        own = self.num_rows // self.group.size()
        begin, end = (0, own) if part is None else (part.start, part.stop)
        return slice(rank * own + begin, rank * own + end)

    def gather(self, x: Tensor) -> Result:
        """Start to gather x [..., own, D] to [..., num_rows, D]."""
        sizes = self.sizes
        if len(sizes) == 1:
            return lambda: x
        lead, most = x.shape[:-2], max(sizes)
        sent = _padded(x, most).contiguous()
        started = funcol.all_gather_into_tensor(sent.view(-1), len(sizes), self.group_name)

        def result() -> Tensor:
            parts = self.wait(started, sent).view(len(sizes), *lead, most, x.shape[-1])
            if len(sizes) * most == self.num_rows:
                return parts.movedim(0, -3).reshape(*lead, self.num_rows, x.shape[-1])  # a view of one batch row
            return torch.cat([part[..., :size, :] for part, size in zip(parts, sizes, strict=True)], -2)

        return result

    def scatter_sum(self, x: Tensor) -> Result:
        """Start to sum x [..., num_rows, D] over the ranks; each rank gets its own rows."""
        sizes = self.sizes
        if len(sizes) == 1:
            return lambda: x
        own, most = self.own, max(sizes)
        if len(sizes) * most == self.num_rows:
            sent = x.unflatten(-2, (len(sizes), most)).movedim(-3, 0).contiguous()  # a view of one batch row
        else:
            sent = torch.stack([_padded(part, most) for part in x.split(sizes, -2)])
        started = funcol.reduce_scatter_tensor(sent.view(-1), "sum", len(sizes), self.group_name)
        return lambda: self.wait(started, sent).view(*x.shape[:-2], most, x.shape[-1])[..., :own, :].contiguous()

    def all_sum(self, x: Tensor) -> Result:
        """Start to sum x over the ranks; each rank gets the whole sum."""
        if len(self.sizes) == 1:
            return lambda: x
        sent = x.contiguous()
        started = funcol.all_reduce(sent, "sum", self.group_name)
        return lambda: self.wait(started, sent)

    def wait(self, started: Tensor, sent: Tensor) -> Tensor:
        """Wait for a collective; the argument ``sent`` keeps its input alive until then."""
        return wait_for(started, f"{self.what}: rows of other ranks", self.group_name)


def _padded(x: Tensor, num_rows: int) -> Tensor:
    missing = num_rows - x.shape[-2]
    return F.pad(x, (0, 0, 0, missing)) if missing else x


def gather(x: Tensor, dim: int, lens: Sequence[int], inverse: Tensor | None, group_name: str, what: str) -> Tensor:
    """Return the whole tensor, contiguous, from each rank's shard along a dim; ``what`` names the call in an error."""
    rows = x.movedim(dim, 0)
    whole = Shards(sum(lens), group_name, what, tuple(lens)).gather(_flat(rows))()
    whole = whole if inverse is None else whole.index_select(0, inverse)
    return whole.view(len(whole), *rows.shape[1:]).movedim(0, dim).contiguous()


def scatter_sum(
    x: Tensor, dim: int, lens: Sequence[int], inverse: Tensor | None, rank: int, group_name: str, what: str
) -> Tensor:
    """Return this rank's shard of the sum of whole tensors over ranks, contiguous, summed in their dtype."""
    rows = x.movedim(dim, 0)
    rows = rows if inverse is None else rows.new_zeros(sum(lens), *rows.shape[1:]).index_copy(0, inverse, rows)
    own = Shards(sum(lens), group_name, what, tuple(lens), rank).scatter_sum(_flat(rows))()
    return own.view(len(own), *rows.shape[1:]).movedim(0, dim).contiguous()


def _flat(rows: Tensor) -> Tensor:
    """[rows, D]"""
    return rows.reshape(len(rows), rows.shape[1:].numel())
