"""Transport over symmetric memory, for the GPUs of one NVLink host: copy engines move rows, without SMs.

A pass publishes its rows in memory that every rank of the group can read. Peers pull the rows that they need on a side
stream, stage after stage; no pull waits for another rank's hop. Gradients are pushed on a second stream into slots of
the owner's memory, one slot per sender. With two ranks the slot is where the rows were: their one reader has pulled all
of them before it sends.

These barriers keep it correct, without state that the replay of a CUDA graph could miss:

    barrier                 all ranks are done with the rows and slots of the pass before
    write the rows
    barrier                 all rows are written: pulls begin; slots may be pushed to
    ... pulls, tiles, pushes ...
    barrier (push stream)   all pushes have landed: the owner sums its slots

Every barrier is in stream order on the device; the host never waits. If a rank never comes, the barrier of the others
fails with a device error after the group's timeout, like a lost collective.

The memory and the two streams belong to the group and are shared by all of its passes. An eager pass waits for the
eager pass before it, on whichever stream that was. This wait is impossible for a CUDA graph: all passes of a group in
one capture must be on one stream, and replays in one order with the group's other passes. Memory grows when a pass
needs more, by a collective, so a graph is captured after a warm-up call with the same shapes.
"""

from __future__ import annotations

import importlib.util
import socket
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from cp_mesh._torch import SYMMETRIC_MEMORY, symmetric_memory, timeout_of
from cp_mesh.comm.contract import Arrived, Copy, Swap, split_arrived
from cp_mesh.comm.group_state import state_of, states_of_all
from cp_mesh.comm.packing import Packing
from cp_mesh.errors import UnsupportedError
from cp_mesh.geometry.host_tensors import lasting
from cp_mesh.geometry.schedule import Route, Stage, num_rows

_ALIGNMENT = 256  # bytes; copy engines and kernels are fastest on aligned addresses
_GROWTH = 4  # memory grows by at least a quarter, so that slowly rising lengths do not make it grow every time
_MAX_VIEWS = 1024  # cached views of one workspace
_MAIN, _PUSHED = 0, 1  # barrier channels: two barriers may be pending at once, on two streams


class Workspace:
    """Memory of a group, equally many bytes on every rank, that every rank can read and write."""

    def __init__(self, group: dist.ProcessGroup, nbytes: int, device: torch.device) -> None:
        symm_mem = symmetric_memory()
        self.nbytes, self.captured = nbytes, False
        self._timeout_ms = int(timeout_of(group, device).total_seconds() * 1000)
        with lasting():
            self._buffer = symm_mem.empty(nbytes, dtype=torch.uint8, device=device)
        self._handle = symm_mem.rendezvous(self._buffer, group)
        self._views: dict[tuple[Any, ...], tuple[Tensor, tuple[Tensor, ...]]] = {}

    def rows(self, rank: int, offset: int, num_rows: int, packing: Packing) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Return a buffer [num_rows, features] at ``offset`` bytes in a rank's memory, and the tensors in it."""
        key = rank, offset, num_rows, packing
        made = self._views.get(key)
        if made is None:
            if len(self._views) >= _MAX_VIEWS:
                self._views.clear()
            # Cached: making views takes the host longer than the copy takes the device. The offset counts elements.
            shape, first = (num_rows, packing.features), offset // packing.dtype.itemsize
            buffer = self._handle.get_buffer(rank, shape, packing.dtype, first)
            made = self._views[key] = buffer, packing.views(buffer)
        return made

    def barrier(self, channel: int) -> None:
        """Wait on the current stream until every rank's stream has reached the barrier."""
        self._handle.barrier(channel=channel, timeout_ms=self._timeout_ms)


class _CudaLane:
    """A side stream beside the caller's stream."""

    def __init__(self, device: torch.device) -> None:
        self._forked = False
        # High priority: a barrier is one small block that must not queue behind the blocks of an attention kernel.
        self._stream = torch.cuda.Stream(device, priority=-1)
        self.caller = torch.cuda.current_stream(device)
        self._forking, self._joining = torch.cuda.Event(), torch.cuda.Event()
        self._marks: list[torch.cuda.Event] = []  # reused by every pass; a pass waits for all of its marks
        self._num_marks = 0

    def begin(self, caller: torch.cuda.Stream) -> None:
        """Begin a pass on the caller's stream."""
        self.caller, self._num_marks = caller, 0

    def fork(self) -> None:
        """Order later work of the lane after all work that the caller's stream has so far."""
        self._forking.record(self.caller)
        self._stream.wait_event(self._forking)
        self._forked = True

    @contextmanager
    def entered(self) -> Iterator[None]:
        """Launch work inside on the lane."""
        if torch.cuda.current_device() != self._stream.device_index:  # to which the device must return
            with torch.cuda.stream(self._stream):
                yield
            return
        torch.cuda.set_stream(self._stream)  # less host time than `torch.cuda.stream`
        try:
            yield
        finally:
            torch.cuda.set_stream(self.caller)

    def mark(self) -> torch.cuda.Event:
        """Record an event on the lane."""
        if self._num_marks == len(self._marks):
            self._marks.append(torch.cuda.Event())
        mark = self._marks[self._num_marks]
        self._num_marks += 1
        mark.record(self._stream)
        return mark

    def wait(self, mark: torch.cuda.Event) -> None:
        """Make the caller's stream wait for a mark of the lane."""
        if mark is self._marks[self._num_marks - 1]:
            self._forked = False  # it has no later work
        self.caller.wait_event(mark)

    def join(self) -> None:
        """Make the caller's stream wait for all work that the lane has so far."""
        # A capture may not wait for a stream that did not fork from it.
        if self._forked:
            self._joining.record(self._stream)
            self.caller.wait_event(self._joining)
        self._forked = False


class GroupMemory:
    """A group's symmetric memory and the streams beside the caller's, which outlive a call.

    All ranks of the group make it together: they exchange the names of their hosts.
    """

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        self._device = device
        answers: list[Any] = [None] * group.size()
        dist.all_gather_object(answers, (host_name(), device.index or 0, _local_obstacle(device)), group=group)
        self.obstacle: str | None = _obstacle(answers)
        if self.obstacle is None:
            # Only a try shows all obstacles, such as containers or other backends of symmetric memory.
            problem = None
            try:
                Workspace(group, _ALIGNMENT, device).barrier(_MAIN)
            except Exception as error:
                problem = f"a try failed ({type(error).__name__}: {error})"
            dist.all_gather_object(answers, problem, group=group)
            self.obstacle = next((answer for answer in answers if answer), None)
        self._workspaces: dict[str, Workspace] = {}
        self._kept: list[Workspace] = []  # replaced by larger ones, but a captured graph holds their addresses
        self._done: torch.cuda.Event | None = None  # the end of the last eager pass
        self.pulls, self.pushes = _CudaLane(device), _CudaLane(device)

    def begin(self) -> None:
        """Order a pass after the one before, whichever stream that was on."""
        stream = torch.cuda.current_stream(self._device)
        # A capture begins after a device-wide wait, and may not wait for work from outside.
        if self._done is not None and not torch.cuda.is_current_stream_capturing():
            stream.wait_event(self._done)
        self.pulls.begin(stream)
        self.pushes.begin(stream)

    def end(self) -> None:
        """Order all work of the pass before later work of the caller's stream."""
        self.pulls.join()
        self.pushes.join()
        if not torch.cuda.is_current_stream_capturing():
            self._done = self._done or torch.cuda.Event()
            self._done.record(self.pulls.caller)

    def workspace(self, purpose: str, nbytes: int, group: dist.ProcessGroup) -> Workspace:
        """Return memory for "rows" or "gradients" of at least ``nbytes``; every rank must ask for the same size."""
        capturing = torch.cuda.is_current_stream_capturing()
        workspace = self._workspaces.get(purpose)
        if workspace is None or workspace.nbytes < nbytes:
            if capturing:
                raise UnsupportedError(
                    f"transport='symmetric_memory': the group's memory must grow to {nbytes} bytes, which a CUDA graph "
                    "capture cannot do; run one forward and backward with these shapes before the capture"
                )
            # Peers may still read the memory that is freed here.
            torch.cuda.synchronize(self._device)
            if workspace is not None:
                nbytes = max(nbytes, workspace.nbytes + workspace.nbytes // _GROWTH)
                if workspace.captured:
                    self._kept.append(workspace)
            workspace = Workspace(group, nbytes, self._device)
            self._workspaces[purpose] = workspace
        workspace.captured |= capturing
        return workspace

    def wait(self) -> None:
        """Let the host wait until the device is done."""
        torch.cuda.synchronize(self._device)

    @property
    def nbytes(self) -> int:
        return sum(workspace.nbytes for workspace in [*self._workspaces.values(), *self._kept])


@dataclass
class Held:
    """A group's memory, from its first use until `release`."""

    memory: GroupMemory | None = None


def group_memory(group: dist.ProcessGroup, device: torch.device) -> GroupMemory:
    """Return the memory of a group; the first call for a group is a collective."""
    held = state_of(group, Held)
    if held.memory is None:
        if torch.cuda.is_current_stream_capturing():
            raise UnsupportedError(
                "attention: the first call over a group chooses its transport, which a CUDA graph capture cannot do; "
                "run one forward and backward with these shapes before the capture"
            )
        held.memory = GroupMemory(group, device)
    return held.memory


def unavailable(group: dist.ProcessGroup, device: torch.device) -> str | None:
    """Return why this group has no symmetric memory, or None if it has.

    The first call for a group of CUDA ranks is a collective: its ranks exchange their hosts. The answer is cached, and
    equal on all ranks.
    """
    if device.type != "cuda":
        return f"it joins CUDA devices, the tensors are on {device.type}"
    return group_memory(group, device).obstacle


def host_name() -> str:
    """Return the host name with the boot id, since containers and even machines may share a name."""
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            return f"{socket.gethostname()} {file.read().strip()}"
    except OSError:
        return socket.gethostname()


def _obstacle(answers: Sequence[tuple[str, int, str | None]]) -> str | None:
    """Return what prevents symmetric memory, from the hosts, device indices and local obstacles of the ranks."""
    hosts, devices = {host for host, _, _ in answers}, {index for _, index, _ in answers}
    if len(hosts) > 1:
        return f"the group's ranks are on {len(hosts)} hosts"
    if len(devices) < len(answers):
        return "ranks share a device index: make all GPUs of the host visible to every process"
    return next((obstacle for _, _, obstacle in answers if obstacle), None)


def _local_obstacle(device: torch.device) -> str | None:
    if torch.version.hip:
        return "it is not tried on ROCm"
    if importlib.util.find_spec(SYMMETRIC_MEMORY) is None:
        return "this PyTorch has none"
    others = [index for index in range(torch.cuda.device_count()) if index != (device.index or 0)]
    if any(not torch.cuda.can_device_access_peer(device, index) for index in others):
        return "the GPUs of the host have no peer access to each other"
    return None


def symmetric_memory_bytes() -> int:
    """Return this process's bytes of symmetric memory, for all groups; the caching allocator does not count them."""
    return sum(held.memory.nbytes for held in states_of_all(Held) if held.memory is not None)


def release(group: dist.ProcessGroup, within: Iterable[dist.ProcessGroup] = ()) -> None:
    """Free a group's symmetric memory; every rank of the group calls it, and no captured graph may replay after.

    Args:
        group: the cp group.
        within: this rank's groups within it, whose memory is freed too: those of `cp_mesh.comm.groups.known_parts`.
    """
    of_groups = [state_of(each, Held) for each in (group, *within)]
    for held in of_groups:
        if held.memory is not None:
            held.memory.wait()
    dist.barrier(group)
    for held in of_groups:
        if held.memory is not None and held.memory.obstacle is None:  # else keep the answer of all ranks
            held.memory = None


class SymmetricTransport:
    """Hops of one pass over symmetric memory.

    Args:
        group: the cp group, or a group within it.
        most_rows: most rows that a rank publishes.
        device: this rank's CUDA device.
        copy: copies the rows that are published.
    """

    def __init__(self, group: dist.ProcessGroup, most_rows: int, device: torch.device, copy: Copy) -> None:
        self.memory, self.most_rows, self.group, self.copy = group_memory(group, device), most_rows, group, copy
        self.memory.begin()

    def fetch(self, tensors: Sequence[Tensor], route: Route) -> SymmetricIncoming:
        return SymmetricIncoming(self, tensors, route)

    def deliver(self, packing: Packing, route: Route) -> SymmetricOutgoing:
        return SymmetricOutgoing(self, packing, route)

    def close(self) -> None:
        # Also after an exception: the caller's stream waits for copies before it reuses their buffers.
        self.memory.end()


class SymmetricIncoming:
    """Pulls all stages ahead, in order, while the caller computes.

    Rows are published at once. The pulls are launched when the first stage is asked for, so that the caller's local
    tiles, launched before, do not wait until the host has launched the pulls.
    """

    def __init__(self, transport: SymmetricTransport, tensors: Sequence[Tensor], route: Route) -> None:
        memory, packing = transport.memory, Packing.of(tensors)
        self._lane, self._packing, self._stages = memory.pulls, packing, route.stages
        self._under_way: deque[tuple[Tensor, Any]] = deque()
        if not route.stages:
            return
        workspace = memory.workspace("rows", aligned(transport.most_rows * packing.row_bytes), transport.group)
        workspace.barrier(_MAIN)
        _, own = workspace.rows(transport.group.rank(), 0, tensors[0].shape[2], packing)
        transport.copy(list(zip(tensors, own, strict=True)))
        workspace.barrier(_MAIN)
        self._workspace: Workspace = workspace
        self._buffers = [packing.empty(stage.num_fetched) for stage in route.stages]
        # After the barrier, and after earlier work that used the memory of these buffers.
        self._lane.fork()

    def _pull(self) -> None:
        packing = self._packing
        with self._lane.entered():
            for stage, buffer in zip(self._stages, self._buffers, strict=True):
                offset = 0
                for source, ranges in stage.fetch:
                    first, last = ranges[0][0], ranges[-1][1]
                    theirs, _ = self._workspace.rows(source, first * packing.row_bytes, last - first, packing)
                    for begin, end in ranges:
                        _part(buffer, offset, end - begin).copy_(_part(theirs, begin - first, end - begin))
                        offset += end - begin
                self._under_way.append((buffer, self._lane.mark()))
        self._buffers = []

    def next(self) -> tuple[Tensor, ...] | None:
        if self._buffers:
            self._pull()
        buffer, arrived = self._under_way.popleft()
        self._lane.wait(arrived)
        return self._packing.views(buffer) if buffer.shape[0] else None


class SymmetricOutgoing:
    """Pushes gradients to slots in the owner's memory; the slots of an owner lie sender after sender."""

    def __init__(self, transport: SymmetricTransport, packing: Packing, route: Route) -> None:
        memory, self._group = transport.memory, transport.group
        self._lane, self._packing, self._route = memory.pushes, packing, route
        self._written: Tensor | None = None
        self._sent: deque[tuple[Tensor, Any]] = deque()
        self._num_sent, self._collected = 0, not route.stages
        self._workspace: Workspace | None = None
        if route.stages:
            purpose = "rows" if self._group.size() == 2 else "gradients"
            nbytes = aligned(route.most_served * packing.row_bytes)
            self._workspace = memory.workspace(purpose, nbytes, transport.group)

    def buffer(self, stage: Stage) -> tuple[Tensor, ...] | None:
        self._written = self._packing.empty(stage.num_fetched)
        return self._packing.views(self._written) if stage.num_fetched else None

    def send(self, stage: Stage) -> None:
        assert self._written is not None and self._workspace is not None, "buffer() comes before send()"
        rank, packing = self._group.rank(), self._packing
        self._lane.fork()
        with self._lane.entered():
            offset = 0
            for owner, ranges in stage.fetch:
                count = num_rows(ranges)
                first = self._route.slots[rank][owner]
                slot, _ = self._workspace.rows(owner, first * packing.row_bytes, count, packing)
                slot.copy_(_part(self._written, offset, count))
                offset += count
            self._num_sent += 1
            if self._num_sent == len(self._route.stages):
                self._workspace.barrier(_PUSHED)
            self._sent.append((self._written, self._lane.mark()))
        self._written = None
        if len(self._sent) > 2:  # pushed long before: its memory may be used again
            self._lane.wait(self._sent.popleft()[1])

    def collect(self) -> Iterator[Arrived]:
        """Yield nothing before the last stage was sent: all slots are complete at once."""
        if self._collected or self._num_sent < len(self._route.stages):
            return
        assert self._workspace is not None
        self._collected = True
        self._lane.join()
        self._sent.clear()
        rank, packing = self._group.rank(), self._packing
        for stage in self._route.stages:  # sums in the same order as the other transport
            for receiver, ranges in stage.serve:
                first = self._route.slots[receiver][rank] * packing.row_bytes
                slot, tensors = self._workspace.rows(rank, first, num_rows(ranges), packing)
                if len(ranges) == 1:
                    yield Arrived(ranges[0][0], tensors)
                else:
                    yield from split_arrived(slot, [(receiver, ranges)], packing)


class SymmetricSwaps:
    """All-to-alls of all rows: each rank publishes the rows that it sends, and pulls its rows from each other rank.

    They run on the caller's stream, as the caller waits for the result at once. The barrier before rows are written is
    that of a pass: all ranks have pulled the rows of the all-to-all before.
    """

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        self._memory, self._group = group_memory(group, device), group
        self._rank, self._size = group.rank(), group.size()
        self._memory.begin()

    def start(
        self, packings: Sequence[Packing], write: Callable[[Sequence[Tensor]], None], swap: Swap
    ) -> Callable[[], Sequence[Tensor]]:
        rank, size = self._rank, self._size
        offsets = [*accumulate((aligned(swap.most * packing.row_bytes) for packing in packings), initial=0)]
        workspace = self._memory.workspace("rows", offsets.pop(), self._group)
        workspace.barrier(_MAIN)
        places = [*zip(offsets, packings, strict=True)]
        write([workspace.rows(rank, offset, sum(swap.to), packing)[0] for offset, packing in places])
        workspace.barrier(_MAIN)
        received = [packing.empty(sum(swap.origin)) for packing in packings]
        for (offset, packing), buffer in zip(places, received, strict=True):
            parts = buffer.split(swap.origin)
            for step in range(size):  # so that no two ranks pull from the same rank at a time
                source = (rank - step) % size
                if count := swap.origin[source]:
                    first = offset + swap.firsts[source] * packing.row_bytes
                    parts[source].copy_(workspace.rows(source, first, count, packing)[0])
        return lambda: received

    def close(self) -> None:
        self._memory.end()


def _part(buffer: Tensor, first: int, count: int) -> Tensor:
    """Return rows of a buffer; most buffers have a single source and are moved whole."""
    return buffer if buffer.shape[0] == count else buffer[first : first + count]


def aligned(nbytes: int) -> int:
    """Return the size of aligned memory for ``nbytes``."""
    return max(_ALIGNMENT, -(-nbytes // _ALIGNMENT) * _ALIGNMENT)
