"""The contract between the loops and the transports that move rows between ranks.

Addressed by owner, not by neighbour. In step i every rank fetches rows straight from rank ``r - i`` and serves rank
``r + i``, instead of passing on what its neighbour passed to it: the volume is that of a rotation at most, but only the
rows that the receiver's mask needs travel, steps that nobody needs are skipped, and no hop waits for the one before.
A gradient goes to its owner in one hop and is summed there, in a fixed order, so results do not depend on timing.

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
        """The tensors [B, H, rows, D] of the next stage, in the order of its buffer; None if it brings nothing."""


class Outgoing(Protocol):
    """Gradients on their way to the owners of the rows they belong to."""

    def buffer(self, stage: Stage) -> tuple[Tensor, ...] | None:
        """Where gradients [B, H, rows, D] of the rows fetched in ``stage`` are to be written; None if it has none."""

    def send(self, stage: Stage) -> None:
        """Start sending what was written. Every rank calls it for every stage, in order."""

    def collect(self) -> Iterator[Arrived]:
        """What has arrived for this rank's rows, in the order of the stages; all of it once every stage was sent."""


class Transport(Protocol):
    """The hops of one call."""

    def fetch(self, tensors: Sequence[Tensor], route: Route) -> Incoming:
        """Start moving the rows of these [B, H, S_local, D] tensors that the stages of the route name."""

    def deliver(self, packing: Packing, route: Route) -> Outgoing:
        """Prepare to send gradients with this packing to the owners of the rows fetched on this route."""

    def close(self) -> None:
        """The pass is over, perhaps by an exception: memory of its buffers may be used again."""


class Swap(NamedTuple):
    """An all-to-all of rows as one rank sees it. A buffer holds what goes to one rank after what goes to another.

    Attributes:
        to: rows for each rank, [cp_size].
        origin: rows from each rank, [cp_size].
        firsts: where this rank's rows begin in the buffer of each rank, [cp_size].
        most: rows of the largest buffer of any rank.
        places: where the rows from each rank belong in what arrives, piece by piece; None: in rank order.
        picks: of the rows of each rank's buffer, the pieces that are for this rank; None: those that lie in a row.
    """

    to: list[int]
    origin: list[int]
    firsts: list[int]
    most: int
    places: list[list[slice]] | None = None
    picks: list[slice] | None = None


class Swaps(Protocol):
    """The all-to-alls of one pass, one after the other.

    Attributes:
        pulls: whether each rank takes its rows itself, so that `Swap.places` and `Swap.picks` are served.
    """

    pulls: bool

    def start(
        self, packings: Sequence[Packing], write: Callable[[Sequence[Tensor]], None], swap: Swap
    ) -> Callable[[], Sequence[Tensor]]:
        """Start to move buffers [rows, features], one of each packing, which ``write`` fills.

        What is returned waits for what came from all ranks, in rank order.
        """

    def close(self) -> None:
        """The pass is over, perhaps by an exception: memory of its buffers may be used again."""


def split_arrived(buffer: Tensor, serve: Iterable[tuple[int, tuple[Rows, ...]]], packing: Packing) -> Iterator[Arrived]:
    """Gradients [rows, features] that came back for the rows served, receiver after receiver, range after range."""
    offset = 0
    for _, ranges in serve:
        for begin, end in ranges:
            yield Arrived(begin, packing.views(buffer[offset : offset + end - begin]))
            offset += end - begin
