"""The portable transport: functional collectives (gloo, NCCL across hosts), one unequal all-to-all per stage.

A collective is asynchronous until its wait; one stage is under way while another is computed.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence

import torch.distributed as dist
from torch import Tensor

from cp_mesh._torch import funcol
from cp_mesh.comm.contract import Arrived, Copy, Swap, split_arrived
from cp_mesh.comm.packing import Packing
from cp_mesh.comm.waiting import wait_for
from cp_mesh.geometry.schedule import Route, Stage


class _Exchange:
    """One all-to-all under way. ``sent`` is kept until the collective has read it."""

    def __init__(self, sent: Tensor, sent_rows: list[int], received_rows: list[int], group_name: str) -> None:
        self._sent, self._rows, self._group_name = sent, (received_rows, sent_rows), group_name
        self._received = funcol.all_to_all_single(sent, received_rows, sent_rows, group_name)

    def wait(self) -> Tensor:
        """Wait for the received buffer [rows, features], rank after rank."""
        what = "attention: rows of other ranks"
        received: Tensor = wait_for(self._received, what, self._group_name, self._rows)
        del self._sent
        return received


class FunctionalTransport:
    """Hops over functional collectives.

    Args:
        group: the cp group, or a group within it.
        copy: copies the rows that are sent.
    """

    def __init__(self, group: dist.ProcessGroup, copy: Copy) -> None:
        self._group_name, self._size, self.copy = group.group_name, group.size(), copy

    def fetch(self, tensors: Sequence[Tensor], route: Route) -> FunctionalIncoming:
        return FunctionalIncoming(self, tensors, route.stages)

    def deliver(self, packing: Packing, route: Route) -> FunctionalOutgoing:
        return FunctionalOutgoing(self, packing)

    def close(self) -> None:
        pass

    def exchange(self, sent: Tensor, to: Sequence[tuple[int, int]], origin: Sequence[tuple[int, int]]) -> _Exchange:
        """Start an all-to-all of rows; ``to`` and ``origin`` are (rank, number of rows)."""
        sent_rows, received_rows = [0] * self._size, [0] * self._size
        for rank, count in to:
            sent_rows[rank] = count
        for rank, count in origin:
            received_rows[rank] = count
        return _Exchange(sent, sent_rows, received_rows, self._group_name)


class FunctionalSwaps:
    """All-to-alls of all rows, over functional collectives."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group_name = group.group_name

    def start(
        self, packings: Sequence[Packing], write: Callable[[Sequence[Tensor]], None], swap: Swap
    ) -> Callable[[], Sequence[Tensor]]:
        sent = [packing.empty(sum(swap.to)) for packing in packings]
        write(sent)
        under_way = [_Exchange(buffer, swap.to, swap.origin, self._group_name) for buffer in sent]
        return lambda: [exchange.wait() for exchange in under_way]

    def close(self) -> None:
        pass


class FunctionalIncoming:
    """Receives stage after stage; the next stage is under way while the caller uses one."""

    def __init__(self, transport: FunctionalTransport, tensors: Sequence[Tensor], stages: Sequence[Stage]) -> None:
        self._transport, self._tensors, self._stages = transport, tensors, deque(stages)
        self._packing = Packing.of(tensors)
        self._under_way = self._start() if stages else None

    def _start(self) -> _Exchange:
        stage, packing = self._stages.popleft(), self._packing
        sent, offset = packing.empty(stage.num_served), 0
        for _, served in stage.serve:
            for begin, end in served:
                places = packing.views(sent[offset : offset + end - begin])
                self._transport.copy([(x[:, :, begin:end], to) for x, to in zip(self._tensors, places, strict=True)])
                offset += end - begin
        return self._transport.exchange(sent, stage.served, stage.fetched)

    def next(self) -> tuple[Tensor, ...] | None:
        assert self._under_way is not None, "every stage is waited for once"
        received = self._under_way.wait()
        self._under_way = self._start() if self._stages else None
        return self._packing.views(received) if received.shape[0] else None


class FunctionalOutgoing:
    def __init__(self, transport: FunctionalTransport, packing: Packing) -> None:
        self._transport, self._packing = transport, packing
        self._written: Tensor | None = None
        self._under_way: deque[tuple[Stage, _Exchange]] = deque()

    def buffer(self, stage: Stage) -> tuple[Tensor, ...] | None:
        self._written = self._packing.empty(stage.num_fetched)
        return self._packing.views(self._written) if stage.num_fetched else None

    def send(self, stage: Stage) -> None:
        assert self._written is not None, "buffer() comes before send()"
        exchange = self._transport.exchange(self._written, stage.fetched, stage.served)
        self._under_way.append((stage, exchange))
        self._written = None

    def collect(self) -> Iterator[Arrived]:
        while self._under_way:
            stage, exchange = self._under_way.popleft()
            yield from split_arrived(exchange.wait(), stage.serve, self._packing)
