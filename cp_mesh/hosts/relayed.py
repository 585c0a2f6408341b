"""The transport of the double ring: two transports, between hosts and within a host, both under way at once.

Rows travel between hosts once, between ranks with the same place, and are read there over the transport of the host,
like the rank's own rows (`relay_plan.Visit`). The rows of the next host travel while those of one host are used.
Gradients of a host's rows are summed in at least fp32 at the rank that received the rows, once all ranks of its host
have sent theirs, and travel back once; the last of them while the local tiles run.

The order of all sums is fixed: at a relay its own gradients, then those of its host in the order of stages; at the
owner its own host's gradients, then host after host.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from cp_mesh.comm.contract import Arrived, Transport, split_arrived
from cp_mesh.comm.functional import FunctionalIncoming, FunctionalOutgoing, FunctionalTransport
from cp_mesh.comm.packing import Packing
from cp_mesh.geometry.schedule import Route, Stage
from cp_mesh.hosts.relay_plan import RelayedRoute, Visit
from cp_mesh.kernels.combine import RowSum, copy_together


class RelayedTransport:
    """Hops of one pass over several hosts.

    Args:
        outer: transport between the ranks with this place on all hosts.
        inner: transport between the ranks of this host.
    """

    def __init__(self, outer: FunctionalTransport, inner: Transport) -> None:
        self.outer, self.inner = outer, inner

    def fetch(self, tensors: Sequence[Tensor], route: Route) -> RelayedIncoming:
        assert isinstance(route, RelayedRoute)
        return RelayedIncoming(self, tensors, route.visits)

    def deliver(self, packing: Packing, route: Route) -> RelayedOutgoing:
        assert isinstance(route, RelayedRoute)
        return RelayedOutgoing(self, packing, route.visits)

    def close(self) -> None:
        self.inner.close()


class RelayedIncoming:
    """Receives rows host by host; the rows of the next host travel while one is visited."""

    def __init__(self, transport: RelayedTransport, tensors: Sequence[Tensor], visits: Sequence[Visit]) -> None:
        self._transport, self._packing, self._none = transport, Packing.of(tensors), [x[:, :, :0] for x in tensors]
        crossings = [visit.crossing for visit in visits if visit.crossing is not None]
        self._outer = FunctionalIncoming(transport.outer, tensors, crossings)
        self._visits = deque(visits)
        self._begin(tensors)

    def _begin(self, rows: Sequence[Tensor]) -> None:
        """Visit the next host; ``rows`` [B, H, rows, D] are this rank's buffer."""
        visit = self._visits.popleft()
        self._rows, self._inner = rows, self._transport.inner.fetch(rows, visit.route)
        self._own, self._left = visit.own, len(visit.route.stages)

    def next(self) -> tuple[Tensor, ...] | None:
        while self._own is None and not self._left:
            self._begin(self._outer.next() or self._none)
        if self._own is None:
            self._left -= 1
            return self._inner.next()
        stage, self._own = self._own, None
        return self._read(stage)

    def _read(self, stage: Stage) -> tuple[Tensor, ...] | None:
        """Return rows of this rank's own buffer."""
        ranges = [rows for _, fetched in stage.fetch for rows in fetched]
        if len(ranges) == 1:
            ((begin, end),) = ranges
            return tuple(x[:, :, begin:end] for x in self._rows)
        offset, into = 0, self._packing.views(self._packing.empty(stage.num_fetched))
        for begin, end in ranges:
            places = [x[:, :, offset : offset + end - begin] for x in into]
            copy_together([(x[:, :, begin:end], place) for x, place in zip(self._rows, places, strict=True)])
            offset += end - begin
        return into if ranges else None


class RelayedOutgoing:
    """Sums the gradients of one host's rows when all have arrived, while those of the host before travel."""

    def __init__(self, transport: RelayedTransport, packing: Packing, visits: Sequence[Visit]) -> None:
        self._transport, self._packing, self._visits = transport, packing, deque(visits)
        self._sum_packing = replace(packing, dtype=torch.promote_types(packing.dtype, torch.float32))
        self._outer = FunctionalOutgoing(transport.outer, self._sum_packing)
        self._arrived: list[Arrived] = []
        self._begin()

    def _begin(self) -> None:
        """Visit the next host."""
        packing, visit = self._sum_packing, self._visits.popleft()
        self._visit, self._inner = visit, self._transport.inner.deliver(self._packing, visit.route)
        self._stages = deque([visit.own] if visit.own else [])
        self._stages += visit.route.stages
        self._sums = [
            RowSum((batch, heads, visit.num_rows, head_dim), packing.dtype, packing.device)
            for batch, heads, head_dim in packing.shapes
        ]

    def buffer(self, stage: Stage) -> tuple[Tensor, ...] | None:
        while not self._stages:
            self._begin()
        if self._stages[0] is not self._visit.own:
            return self._inner.buffer(self._stages[0])
        self._written = self._packing.empty(stage.num_fetched)
        return self._packing.views(self._written) if stage.num_fetched else None

    def send(self, stage: Stage) -> None:
        within = self._stages.popleft()
        if within is self._visit.own:
            self._add(split_arrived(self._written, within.fetch, self._packing))
            del self._written
        else:
            self._inner.send(within)
        if not self._stages:
            self._cross()

    def _add(self, arrived: Iterable[Arrived]) -> None:
        for part in arrived:
            for total, x in zip(self._sums, part.tensors, strict=True):
                total.add(part.begin, x)

    def _cross(self) -> None:
        """Sum the gradients of this host's rows, which are all sent, and start to move the sums to their owner."""
        self._add(self._inner.collect())
        visit, packing = self._visit, self._sum_packing
        if visit.crossing is None:
            sums = packing.views(packing.empty(visit.num_rows))
            self._arrived += [Arrived(begin, tuple(x[:, :, begin:end] for x in sums)) for begin, end in visit.shared]
        else:
            self._arrived += self._outer.collect()  # of the host before: one transfer between hosts at a time
            sums = self._outer.buffer(visit.crossing) or ()
        for total, into in zip(self._sums, sums, strict=False):
            total.finish(into)
        self._sums = []  # frees the summands
        if visit.crossing is not None:
            self._outer.send(visit.crossing)

    def collect(self) -> Iterator[Arrived]:
        arrived, self._arrived = self._arrived, []
        yield from arrived
        if self._stages:
            self._add(self._inner.collect())
        elif not self._visits:
            yield from self._outer.collect()
