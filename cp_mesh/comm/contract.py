"""The contract between the loops and the transports that move rows between ranks.

Ranks address owners, not neighbours. In step i every rank fetches rows straight from rank ``r - i`` and serves rank
``r + i``, instead of passing on what its neighbour sent. The volume is at most that of a rotation, but only rows that
the receiver's mask needs travel, steps that no rank needs are skipped, and no hop waits for the hop before. A gradient
goes to its owner in one hop and is summed there, in a fixed order, so results do not depend on timing.

A pass opens a transport, fetches and delivers in the order of the stages, and closes it, also after an exception.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from torch import Tensor

from cp_mesh.comm.packing import Packing
from cp_mesh.geometry.schedule import Route, Rows, Stage

Copy = Callable[[Sequence[tuple[Tensor, Tensor]]], None]
"""Copies tensors [B, H, rows, D] into others, all on one device."""


@dataclass(frozen=True, eq=False)
class Arrived:
    """Gradients of this rank's rows from ``begin`` on, as computed by one other rank."""

    begin: int
    tensors: tuple[Tensor, ...]


class Incoming(Protocol):
    """Rows under way to this rank, stage by stage."""

    def next(self) -> tuple[Tensor, ...] | None:
        """Return the tensors [B, H, rows, D] of the next stage, in the order of its buffer; None if it has no rows."""


class Outgoing(Protocol):
    """Gradients on their way to the owners of the rows they belong to."""

    def buffer(self, stage: Stage) -> tuple[Tensor, ...] | None:
        """Return the tensors for gradients [B, H, rows, D] of the rows fetched in ``stage``; None if it has no rows."""

    def send(self, stage: Stage) -> None:
        """Start sending the buffer of a stage. Every rank calls it for every stage, in order."""

    def collect(self) -> Iterator[Arrived]:
        """Yield gradients that have arrived for this rank's rows, in order of stages; all once every stage was sent."""


class Transport(Protocol):
    """The hops of one call."""

    def fetch(self, tensors: Sequence[Tensor], route: Route) -> Incoming:
        """Start moving the rows of these [B, H, S_local, D] tensors that the stages of the route name."""

    def deliver(self, packing: Packing, route: Route) -> Outgoing:
        """Prepare to send gradients with this packing to the owners of the rows fetched on this route."""

    def close(self) -> None:
        """End the pass, also after an exception: the memory of its buffers may be used again."""


class Swap(NamedTuple):
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


class Swaps(Protocol):
    """The all-to-alls of one pass, one after the other."""

    def start(
        self, packings: Sequence[Packing], write: Callable[[Sequence[Tensor]], None], swap: Swap
    ) -> Callable[[], Sequence[Tensor]]:
        """Start to move buffers [rows, features], one per packing, which ``write`` fills.

        The returned function waits for the rows of all ranks and returns them, in rank order.
        """

    def close(self) -> None:
        """End the pass, also after an exception: the memory of its buffers may be used again."""


def split_arrived(buffer: Tensor, serve: Iterable[tuple[int, tuple[Rows, ...]]], packing: Packing) -> Iterator[Arrived]:
    """Yield gradients [rows, features] that returned for served rows, receiver after receiver, range after range."""
    offset = 0
    for _, ranges in serve:
        for begin, end in ranges:
            yield Arrived(begin, packing.views(buffer[offset : offset + end - begin]))
            offset += end - begin
