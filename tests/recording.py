"""A process group that notes what passes through it, and delivers nothing before it is waited for.

It takes all-to-alls, and the collectives of tensor parallelism. Hops and bytes are counted here, below the library and
below torch's functional collectives, which find the group by its name. A receive buffer holds NaN until the wait, so a
result that reads it too early is NaN, whatever the timing; a send buffer that was written between the start and the
wait is an error at the wait.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from inside import room, state_of
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

groups = room("groups")

_c10d = torch._C._distributed_c10d


@dataclass
class Sent:
    """One collective: numbers of elements by peer, the size of an element in bytes, and whether it was waited for.

    ``ranks`` are those of its group.
    """

    to: list[int]
    origin: list[int]
    itemsize: int
    ranks: list[int] = field(default_factory=list, repr=False)
    waited: bool = False

    @property
    def bytes_sent(self) -> int:
        return sum(self.to) * self.itemsize

    @property
    def bytes_received(self) -> int:
        return sum(self.origin) * self.itemsize


@dataclass
class Collective:
    """An all-gather, reduce-scatter or all-reduce: elements that this rank gives, and that it gets."""

    kind: str
    given: int
    got: int
    itemsize: int
    ranks: list[int] = field(default_factory=list, repr=False)
    waited: bool = False


class Event(str):
    """ "start" or "wait" of a collective, among the ``ranks`` of its group."""

    ranks: list[int]

    @classmethod
    def of(cls, kind: str, ranks: list[int]) -> Event:
        event = cls(kind)
        event.ranks = ranks
        return event


@dataclass
class Recording:
    """Everything one rank sent, in order, when it began and was waited for, and what went wrong."""

    sent: list[Sent] = field(default_factory=list)
    collectives: list[Collective] = field(default_factory=list)
    events: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)

    @property
    def hops(self) -> int:
        return len(self.sent)


class _Work(_c10d.Work):
    def __init__(
        self, work: Any, entry: Sent | Collective, recording: Recording, received: Tensor, arrived: Tensor, sent: Tensor
    ):
        super().__init__()
        self.work, self.entry, self.recording = work, entry, recording
        self.received, self.arrived, self.sent, self.version = received, arrived, sent, sent.clone()

    def wait(self, timeout: Any = None) -> bool:
        if not self.entry.waited:
            self.entry.waited = True
            self.recording.events.append(Event.of("wait", self.entry.ranks))
            self.work.wait()
            self.received.copy_(self.arrived)
            if not torch.equal(self.sent, self.version):
                self.recording.problems.append(f"a buffer was written while it was being sent: {self.entry}")
        return True


class _Group(dist.ProcessGroup):
    """Collectives of another group; any that is not noted is refused by the base class."""

    def __init__(self, group: dist.ProcessGroup, recording: Recording):
        super().__init__(group.rank(), group.size())
        self.group, self.recording = group, recording

    @property
    def group_name(self) -> str:
        return self.group.group_name

    def getBackendName(self) -> str:
        return "recording"

    def alltoall_base(self, received: Tensor, sent: Tensor, origin: list[int], to: list[int], options: Any) -> _Work:
        row = math.prod(sent.shape[1:])  # elements; splits count rows
        numbers = [n * row for n in to], [n * row for n in origin]
        entry = Sent(*numbers, sent.element_size(), dist.get_process_group_ranks(self.group))
        self.recording.sent.append(entry)
        self.recording.events.append(Event.of("start", entry.ranks))
        arrived = torch.zeros_like(received)
        received.fill_(torch.nan)
        work = self.group.alltoall_base(arrived, sent, origin, to, options)
        return _Work(work, entry, self.recording, received, arrived, sent)

    def _begin(self, kind: str, received: Tensor, sent: Tensor, begin: Callable[[Tensor], Any]) -> _Work:
        ranks = dist.get_process_group_ranks(self.group)
        entry = Collective(kind, sent.numel(), received.numel(), sent.element_size(), ranks)
        self.recording.collectives.append(entry)
        self.recording.events.append(Event.of(f"start {kind}", entry.ranks))
        arrived, given = torch.zeros_like(received), sent.clone() if sent is received else sent
        received.fill_(torch.nan)
        if sent is received:  # in place
            arrived.copy_(given)
        return _Work(begin(arrived), entry, self.recording, received, arrived, given)

    def allgather_into_tensor_coalesced(self, received: list[Tensor], sent: list[Tensor], options: Any) -> _Work:
        def begin(arrived: Tensor) -> Any:
            return self.group.allgather_into_tensor_coalesced([arrived], sent, options)

        return self._begin("all-gather", received[0], sent[0], begin)

    def reduce_scatter_tensor_coalesced(self, received: list[Tensor], sent: list[Tensor], options: Any) -> _Work:
        def begin(arrived: Tensor) -> Any:
            return self.group.reduce_scatter_tensor_coalesced([arrived], sent, options)

        return self._begin("reduce-scatter", received[0], sent[0], begin)

    def allreduce(self, tensors: list[Tensor], options: Any) -> _Work:
        return self._begin("all-reduce", tensors[0], tensors[0], lambda x: self.group.allreduce([x], options))


@contextmanager
def recording(axis: DeviceMesh, degree: int | None = None) -> Iterator[Recording]:
    """While open, the group of a 1-D mesh is one that records; all ranks of the group must enter it.

    So are its outer and inner groups of this ``degree``.
    """
    whole, result = axis.get_group(), Recording()
    parts: tuple[Any, ...] = ()
    if degree is not None:
        groups.parts_of(whole, degree)
        parts = state_of(whole, groups._PartsBySize)[degree]  # of which a planted bug has changed nothing
    recorders = {group: _Group(group, result) for group in (whole, *parts)}  # the registry holds them weakly
    if degree is not None:
        state_of(recorders[whole], groups._PartsBySize)[degree] = parts  # which are found by their names
    ranks = dist.distributed_c10d._world.pg_group_ranks
    for group, recorder in recorders.items():
        ranks[recorder] = ranks[group]  # where DeviceMesh looks up the rank in the group
        _c10d._unregister_process_group(group.group_name)
        _c10d._register_process_group(group.group_name, recorder)
    try:
        yield result
    finally:
        for group, recorder in recorders.items():
            _c10d._unregister_process_group(group.group_name)
            _c10d._register_process_group(group.group_name, group)
            del ranks[recorder]
    started: list[Sent | Collective] = [*result.sent, *result.collectives]
    result.problems += [f"never waited for: {entry}" for entry in started if not entry.waited]
