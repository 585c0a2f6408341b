"""Rows of the sequence on their way between ranks, such as those of tp: gathered, or summed and given to their owners.

What begins here is under way until its result is asked for; products run in between. Shards are those of
`torch.chunk`, or of any sizes: those that differ are padded to the largest while they travel.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.distributed_c10d import _resolve_process_group

from cp_mesh.layouts import chunk_bounds
from cp_mesh.transport.waiting import wait_for

_funcol = torch.ops._c10d_functional

Result = Callable[[], Tensor]
"""Waits for a collective and returns what came."""


class Shards(NamedTuple):
    """How the rows [..., rows, D] of a sequence lie on the ranks of a group.

    Attributes:
        num_rows: of all ranks together.
        group_name: of the group.
        what: the user's function, for messages.
        lens: how many rows each rank holds, where these are not the sizes of `torch.chunk`.
        rank: this one, if the caller knows it: code that torch.compile traces cannot ask the group.
    """

    num_rows: int
    group_name: str
    what: str = "tensor parallelism"
    lens: tuple[int, ...] = ()
    rank: int | None = None

    @property
    def own(self) -> int:
        """How many rows this rank holds."""
        rank = _resolve_process_group(self.group_name).rank() if self.rank is None else self.rank  # type: ignore[arg-type]
        return self.sizes[rank]

    @property
    def sizes(self) -> list[int]:
        """How many rows each rank holds."""
        if self.lens:
            return [*self.lens]
        size = _resolve_process_group(self.group_name).size()  # type: ignore[arg-type]
        return [end - begin for begin, end in (chunk_bounds(self.num_rows, size, rank) for rank in range(size))]

    def gather(self, x: Tensor) -> Result:
        """Begin to gather x [..., own, D] to [..., num_rows, D]."""
        sizes = self.sizes
        if len(sizes) == 1:
            return lambda: x
        lead, most = x.shape[:-2], max(sizes)
        sent = _padded(x, most).contiguous()
        started = _funcol.all_gather_into_tensor(sent.view(-1), len(sizes), self.group_name)

        def result() -> Tensor:
            parts = self._wait(started, sent).view(len(sizes), *lead, most, x.shape[-1])
            if len(sizes) * most == self.num_rows:
                return parts.movedim(0, -3).reshape(*lead, self.num_rows, x.shape[-1])  # a view of one batch row
            return torch.cat([part[..., :size, :] for part, size in zip(parts, sizes, strict=True)], -2)

        return result

    def scatter_sum(self, x: Tensor) -> Result:
        """Begin to sum x [..., num_rows, D] over the ranks, of which each gets its own rows."""
        sizes = self.sizes
        if len(sizes) == 1:
            return lambda: x
        own, most = self.own, max(sizes)
        if len(sizes) * most == self.num_rows:
            sent = x.unflatten(-2, (len(sizes), most)).movedim(-3, 0).contiguous()  # a view of one batch row
        else:
            sent = torch.stack([_padded(part, most) for part in x.split(sizes, -2)])
        started = _funcol.reduce_scatter_tensor(sent.view(-1), "sum", len(sizes), self.group_name)
        return lambda: self._wait(started, sent).view(*x.shape[:-2], most, x.shape[-1])[..., :own, :].contiguous()

    def all_sum(self, x: Tensor) -> Result:
        """Begin to sum x over the ranks, of which each gets all."""
        if len(self.sizes) == 1:
            return lambda: x
        sent = x.contiguous()
        started = _funcol.all_reduce(sent, "sum", self.group_name)
        return lambda: self._wait(started, sent)

    def _wait(self, started: Tensor, sent: Tensor) -> Tensor:
        """``sent`` is what the collective reads until then."""
        return wait_for(started, f"{self.what}: rows of other ranks", self.group_name)


def _padded(x: Tensor, num_rows: int) -> Tensor:
    missing = num_rows - x.shape[-2]
    return F.pad(x, (0, 0, 0, missing)) if missing else x
