"""A process group that notes what passes through it, and delivers nothing before it is waited for.

Hops and bytes are counted here, below the library and below torch's functional collectives, which find the group by
its name. A receive buffer holds NaN until the wait, so a result that reads it too early is NaN, whatever the timing;
a send buffer that was written between the start and the wait is an error at the wait.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from cp_mesh import groups

_c10d = torch._C._distributed_c10d


@dataclass
class Sent:
    """One all-to-all: numbers of elements by peer, bytes of one, the name of the group, whether it was waited for."""

    to: list[int]
    origin: list[int]
    itemsize: int
    group: str
    waited: bool = False

    @property
    def bytes_sent(self) -> int:
        return sum(self.to) * self.itemsize

    @property
    def bytes_received(self) -> int:
        return sum(self.origin) * self.itemsize


@dataclass
class Recording:
    """Everything one rank sent, in order, when it began and was waited for, and what went wrong.

    Events of a part of the group end with its name.
    """

    sent: list[Sent] = field(default_factory=list)
    events: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)

    @property
    def hops(self) -> int:
        return len(self.sent)


class _Work(_c10d.Work):
    def __init__(
        self, work: Any, entry: Sent, recording: Recording, of: str, received: Tensor, arrived: Tensor, sent: Tensor
    ):
        super().__init__()
        self.of = of
        self.work, self.entry, self.recording = work, entry, recording
        self.received, self.arrived, self.sent, self.version = received, arrived, sent, sent.clone()

    def wait(self, timeout: Any = None) -> bool:
        if not self.entry.waited:
            self.entry.waited = True
            self.recording.events.append(f"wait{self.of}")
            self.work.wait()
            self.received.copy_(self.arrived)
            if not torch.equal(self.sent, self.version):
                self.recording.problems.append(f"a buffer was written while it was being sent: {self.entry}")
        return True


class _Group(dist.ProcessGroup):
    """All-to-alls of another group; any other collective is refused by the base class."""

    def __init__(self, group: dist.ProcessGroup, recording: Recording, of: str):
        super().__init__(group.rank(), group.size())
        self.group, self.recording, self.of = group, recording, of

    @property
    def group_name(self) -> str:
        return self.group.group_name

    def getBackendName(self) -> str:
        return "recording"

    def alltoall_base(self, received: Tensor, sent: Tensor, origin: list[int], to: list[int], options: Any) -> _Work:
        entry = Sent(list(to), list(origin), sent.element_size(), self.group_name)
        self.recording.sent.append(entry)
        self.recording.events.append(f"start{self.of}")
        arrived = torch.zeros_like(received)
        received.fill_(torch.nan)
        work = self.group.alltoall_base(arrived, sent, origin, to, options)
        return _Work(work, entry, self.recording, self.of, received, arrived, sent)


@contextmanager
def recording(axis: DeviceMesh) -> Iterator[Recording]:
    """While open, the group of a 1-D mesh and the parts that it has record; all ranks of the group must enter it."""
    whole: Any = axis.get_group()
    result, ranks = Recording(), dist.distributed_c10d._world.pg_group_ranks
    parts = [*groups.made_of(whole)]
    recorders = {whole: _Group(whole, result, "")}  # kept, as the registry is weak
    recorders |= {group: _Group(group, result, f" {group.group_name}") for group in parts}
    groups._PARTS[recorders[whole]] = groups._PARTS.get(whole, {})
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
    result.problems += [f"never waited for: {entry}" for entry in result.sent if not entry.waited]
