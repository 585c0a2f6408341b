"""The portable transport: functional collectives (gloo, NCCL across hosts), one unequal all-to-all per stage.

A collective is asynchronous until its wait; one stage is under way while another is computed.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from functools import partial

import torch.distributed as dist
from torch import Tensor

from cp_mesh._torch import funcol
from cp_mesh.comm.contract import Arrived, Freight, Swap, Write, split_arrived
from cp_mesh.comm.packing import Packing
from cp_mesh.comm.waiting import wait_for
from cp_mesh.geometry.schedule import Stage


def _exchange(sent: Tensor, sent_rows: list[int], received_rows: list[int], group_name: str) -> Callable[[], Tensor]:
    """Start an all-to-all; the returned function waits for the received buffer [rows, features], rank after rank."""
    started = funcol.all_to_all_single(sent, received_rows, sent_rows, group_name)
    return partial(wait_for, started, "attention: rows of other ranks", group_name, (received_rows, sent_rows), sent)


class FunctionalTransport:
    """One pass over functional collectives; see `cp_mesh.comm.contract`."""

    _freight: Freight
    _tensors: Sequence[Tensor]

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group_name, self._num_served, self._num_sent = group.group_name, 0, 0
        self._fetched: deque[Callable[[], Tensor]] = deque()
        self._written: list[Tensor] = []
        self._sent: deque[tuple[Stage, Callable[[], Tensor]]] = deque()

    def publish(self, tensors: Sequence[Tensor], freight: Freight) -> None:
        self._tensors, self._freight = tensors, freight
        self._serve()

    def _serve(self) -> None:
        """Start the exchange of the next stage, if any."""
        freight, number, packing = self._freight, self._num_served, self._freight.keys
        if number == len(freight.route.stages):
            return
        stage, offset = freight.route.stages[number], 0
        sent = packing.empty(stage.num_served)
        for _, ranges in stage.serve:
            for begin, end in ranges:
                places = packing.views(sent[offset : offset + end - begin])
                freight.copy([(x[:, :, begin:end], to) for x, to in zip(self._tensors, places, strict=True)])
                offset += end - begin
        self._fetched.append(_exchange(sent, *freight.counts[number], self._group_name))
        self._num_served += 1

    def arrived(self, stage: Stage) -> tuple[Tensor, ...] | None:
        received = self._fetched.popleft()()
        self._serve()  # under way while the caller uses this one
        return self._freight.keys.views(received) if received.shape[0] else None

    def buffer(self, stage: Stage) -> tuple[Tensor, ...] | None:
        packing = self._freight.gradients
        self._written.append(packing.empty(stage.num_fetched))
        return packing.views(self._written[0]) if stage.num_fetched else None

    def send(self, stage: Stage) -> None:
        served, fetched = self._freight.counts[self._num_sent]
        self._sent.append((stage, _exchange(self._written.pop(), fetched, served, self._group_name)))
        self._num_sent += 1

    def collect(self) -> Iterator[Arrived]:
        while self._sent:
            stage, wait = self._sent.popleft()
            received = wait()
            del wait  # and what was sent
            yield from split_arrived(received, stage.serve, self._freight.gradients)

    def swap(self, packings: tuple[Packing, ...], write: Write, swap: Swap) -> list[Tensor]:
        sent = [packing.empty(sum(swap.to)) for packing in packings]
        write(sent)
        under_way = [_exchange(buffer, swap.to, swap.origin, self._group_name) for buffer in sent]
        return [wait() for wait in under_way]

    def end(self) -> None:
        pass
