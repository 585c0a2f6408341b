"""The contract between the loops and the ways to move rows between ranks: `FunctionalTransport`, `SymmetricTransport`.

Ranks address owners, not neighbours. In step i every rank fetches rows straight from rank ``r - i`` and serves rank
``r + i``, instead of passing on what its neighbour sent. The volume is at most that of a rotation, but only rows that
the receiver's mask needs travel, steps that no rank needs are skipped, and no hop waits for the hop before. A gradient
goes to its owner in one hop and is summed there, in a fixed order, so results do not depend on timing.

An object of these classes serves one pass of a group. It has:

    publish(x, freight) starts to move those rows of the tensors x, [B, H, S_local, D] each, that the freight names
    arrived(stage)      waits for the rows of the next stage: tensors [B, H, rows, D], or None if it has no rows
    buffer(stage)       tensors for gradients [B, H, rows, D] of the rows fetched in a stage; None if it has no rows
    send(stage)         starts to send the buffer to the owners of the rows; every rank sends every stage, in order
    collect()           what has `Arrived` for this rank's rows, in order of stages; all once every stage was sent
    swap(...)           an all-to-all of rows: moves buffers [rows, features], one per packing, which ``write`` fills,
                        and returns the rows of all ranks, in rank order
    end()               ends the pass, also after an exception: the memory of its buffers may be used again
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

from torch import Tensor

from cp_mesh.comm.packing import Packing
from cp_mesh.geometry.schedule import Fetch, Route, num_rows

Arrived = tuple[int, Tensor, Tensor]
"""Gradients of this rank's rows as computed by one other rank: the first row, dk and dv [B, K, rows, D]."""
Write = Callable[[Sequence[Tensor]], None]


@dataclass(frozen=True, eq=False)
class Freight:
    """What travels in the passes of a plan, in integers. A plan keeps it; it holds no rows.

    Attributes:
        route: this rank's.
        shard_lens: rows of each rank, [cp_size].
        keys, gradients: packings of the rows that are fetched, and of their gradients.
        copy: copies tensors [B, H, rows, D] into others, all on one device.
    """

    route: Route
    shard_lens: tuple[int, ...]
    keys: Packing
    gradients: Packing
    copy: Callable[[Sequence[tuple[Tensor, Tensor]]], None]

    @cached_property
    def counts(self) -> list[tuple[list[int], list[int]]]:
        """For each stage, how many rows this rank serves to each rank, and how many it fetches, [cp_size] each."""
        return [(self._by_rank(stage.serve), self._by_rank(stage.fetch)) for stage in self.route.stages]

    def _by_rank(self, rows: Fetch) -> list[int]:
        found = dict(rows)
        return [num_rows(found.get(rank, ())) for rank in range(len(self.shard_lens))]


@dataclass(frozen=True, eq=False)
class Swap:
    """An all-to-all of rows as one rank sees it. The send buffer holds the rows for each rank in rank order.

    Attributes:
        to: number of rows for each rank, [cp_size].
        origin: number of rows from each rank, [cp_size].
        firsts: first row for this rank in the buffer of each rank, [cp_size].
        most: rows of the largest buffer of any rank.
    """

    to: list[int]
    origin: list[int]
    firsts: list[int]
    most: int


def split_arrived(buffer: Tensor, serve: Fetch, packing: Packing) -> Iterator[Arrived]:
    """Yield what a buffer [rows, features] returned for served rows, receiver after receiver, range after range."""
    offset = 0
    for _, ranges in serve:
        for begin, end in ranges:
            dk, dv = packing.views(buffer[offset : offset + end - begin])
            yield begin, dk, dv
            offset += end - begin
