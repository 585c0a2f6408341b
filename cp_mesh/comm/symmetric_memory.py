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
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor

from cp_mesh._torch import SYMMETRIC_MEMORY, symmetric_memory, timeout_of
from cp_mesh.comm.contract import Arrived, Freight, Swap, Write, split_arrived
from cp_mesh.comm.group_state import state_of, states_of_all
from cp_mesh.comm.packing import Packing
from cp_mesh.errors import UnsupportedError
from cp_mesh.geometry.host_tensors import lasting
from cp_mesh.geometry.schedule import Rows, Stage, num_rows

_ALIGNMENT = 256  # bytes; copy engines and kernels are fastest on aligned addresses
_GROWTH = 4  # memory grows by at least a quarter, so that slowly rising lengths do not make it grow every time
_MAX_VIEWS = 1024  # cached views of one workspace
_MAIN, _PUSHED = 0, 1  # barrier channels: two barriers may be pending at once, on two streams

Parts = tuple[list[Tensor], list[int]]
"""Rows of workspaces that are copied from or to one buffer, in its order, and their numbers."""


class Workspace:
    """Memory of a group, equally many bytes on every rank, that every rank can read and write."""

    def __init__(self, group: dist.ProcessGroup, nbytes: int, device: torch.device) -> None:
        symm_mem = symmetric_memory()
        self.nbytes, self.captured = nbytes, False
        with lasting():
            self._buffer = symm_mem.empty(nbytes, dtype=torch.uint8, device=device)
        # PyTorch clears the signal pads and copies their addresses without waiting for either. A barrier on a side
        # stream read addresses that had not arrived: an illegal memory access (2.11, H200).
        torch.cuda.synchronize(device)
        self._handle = symm_mem.rendezvous(self._buffer, group)
        torch.cuda.synchronize(device)
        timeout_ms = int(timeout_of(group, device).total_seconds() * 1000)
        self.barrier: Callable[..., None] = partial(self._handle.barrier, timeout_ms=timeout_ms)
        """(channel=): wait on the current stream until every rank's stream has reached the barrier."""
        self._views: dict[tuple[Any, ...], Tensor] = {}
        self._bound: WeakKeyDictionary[Freight | Swap, dict[Any, Any]] = WeakKeyDictionary()

    def rows(self, rank: int, offset: int, num_rows: int, packing: Packing) -> Tensor:
        """Return a buffer [num_rows, features] at ``offset`` bytes in a rank's memory."""
        key = rank, offset, num_rows, packing
        made = self._views.get(key)
        if made is None:
            if len(self._views) >= _MAX_VIEWS:
                self._views.clear()
            # Cached: making views takes the host longer than the copy takes the device. The offset counts elements.
            shape, first = (num_rows, packing.features), offset // packing.dtype.itemsize
            made = self._views[key] = self._handle.get_buffer(rank, shape, packing.dtype, first)
        return made

    def bound(self, to: Freight | Swap, what: Any, place: Callable[[], Any]) -> Any:
        """Return views of this memory as ``place`` made them in the first call; kept as long as ``to`` lives."""
        kept = self._bound.setdefault(to, {})
        if what not in kept:
            kept[what] = place()
        return kept[what]


class _CudaLane:
    """A side stream beside the caller's stream; within ``with lane:`` work is launched on it."""

    def __init__(self, device: torch.device) -> None:
        self.forked, self._left = False, 0
        # High priority: a barrier is one small block that must not queue behind the blocks of an attention kernel.
        self._stream = torch.cuda.Stream(device, priority=-1)
        self.caller = torch.cuda.current_stream(device)
        self._forking = torch.cuda.Event()
        self._marks: list[torch.cuda.Event] = []  # reused by every pass; a pass waits for all of its marks
        self.num_marks = 0  # of this pass

    def fork(self) -> None:
        """Order later work of the lane after all work that the caller's stream has so far."""
        self._forking.record(self.caller)
        self._forking.wait(self._stream)
        self.forked = True

    def __enter__(self) -> None:
        self._left = torch.cuda.current_device()
        torch.cuda.set_stream(self._stream)  # less host time than `torch.cuda.stream`

    def __exit__(self, *_: object) -> None:
        torch.cuda.set_stream(self.caller)
        if self._left != self._stream.device_index:  # to which the device must return
            torch.cuda.set_device(self._left)

    def mark(self) -> torch.cuda.Event:
        """Record an event on the lane."""
        if self.num_marks == len(self._marks):
            self._marks.append(torch.cuda.Event())
        mark = self._marks[self.num_marks]
        self.num_marks += 1
        mark.record(self._stream)
        return mark

    def wait(self, mark: torch.cuda.Event) -> None:
        """Make the caller's stream wait for a mark of the lane."""
        if mark is self._marks[self.num_marks - 1]:
            self.forked = False  # it has no later work
        mark.wait(self.caller)


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
                Workspace(group, _ALIGNMENT, device).barrier(channel=_MAIN)
            except Exception as error:
                problem = f"a try failed ({type(error).__name__}: {error})"
            dist.all_gather_object(answers, problem, group=group)
            self.obstacle = next((answer for answer in answers if answer), None)
        self._workspaces: dict[str, Workspace] = {}
        self._kept: list[Workspace] = []  # replaced by larger ones, but a captured graph holds their addresses
        self._done: torch.cuda.Event | None = None  # the end of the last eager pass
        self._capturing = False  # in this pass
        self.pulls, self.pushes = _CudaLane(device), _CudaLane(device)

    def begin(self) -> None:
        """Order a pass after the one before, whichever stream that was on."""
        stream = torch.cuda.current_stream(self._device)
        self._capturing = torch.cuda.is_current_stream_capturing()
        # A capture begins after a device-wide wait, and may not wait for work from outside.
        if self._done is not None and not self._capturing:
            self._done.wait(stream)
        for lane in (self.pulls, self.pushes):
            lane.caller, lane.num_marks = stream, 0

    def end(self) -> None:
        """Order all work of the pass before later work of the caller's stream."""
        for lane in (self.pulls, self.pushes):
            if lane.forked:  # a capture may not wait for a stream that did not fork from it
                lane.wait(lane.mark())
        if not self._capturing:
            self._done = self._done or torch.cuda.Event()
            self._done.record(self.pulls.caller)

    def workspace(self, purpose: str, nbytes: int, group: dist.ProcessGroup) -> Workspace:
        """Return memory for "rows" or "gradients" of at least ``nbytes``; every rank must ask for the same size."""
        workspace = self._workspaces.get(purpose)
        if workspace is None or workspace.nbytes < nbytes:
            if self._capturing:
                raise UnsupportedError(
                    f"transport='symmetric_memory': the group's memory must grow to {nbytes} bytes, which a CUDA graph "
                    "capture cannot do; run one forward and backward with these shapes before the capture"
                )
            if workspace is not None:
                nbytes = max(nbytes, workspace.nbytes + workspace.nbytes // _GROWTH)
                if workspace.captured:
                    self._kept.append(workspace)
            workspace = Workspace(group, aligned(nbytes), self._device)  # waits: no peer reads what is freed here
            self._workspaces[purpose] = workspace
        workspace.captured |= self._capturing
        return workspace

    def wait(self) -> None:
        """Let the host wait until the device is done."""
        torch.cuda.synchronize(self._device)

    def free(self) -> None:
        """Drop the workspaces; a later pass makes new ones."""
        self._workspaces.clear()
        self._kept.clear()

    @property
    def nbytes(self) -> int:
        return sum(workspace.nbytes for workspace in [*self._workspaces.values(), *self._kept])


@dataclass
class Held:
    """A group's memory, from its first use."""

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
    memories = [held.memory for each in (group, *within) if (held := state_of(each, Held)).memory is not None]
    for memory in memories:
        memory.wait()
    dist.barrier(group)
    for memory in memories:
        memory.free()


class SymmetricTransport:
    """One pass over symmetric memory; see `cp_mesh.comm.contract`.

    Rows are published at once. The pulls of all stages are launched when the first stage is asked for, so that the
    caller's local tiles, launched before, do not wait until the host has launched the pulls. The slots of an owner lie
    sender after sender; they are complete all at once, so nothing arrives before the last stage was sent.

    An all-to-all of rows runs on the caller's stream, as the caller waits for the result at once. Its first barrier is
    that of a pass: all ranks have pulled the rows of the all-to-all before.
    """

    _freight: Freight

    def __init__(self, memory: GroupMemory, group: dist.ProcessGroup) -> None:
        self._memory, self._group, self._rank = memory, group, group.rank()
        # Also after an exception: the caller's stream waits for copies before it reuses their buffers.
        self.end = memory.end
        memory.begin()
        self._pulls: list[Parts] = []
        self._buffers: deque[Tensor] = deque()  # of stages that have not arrived
        self._marks: deque[Any] = deque()  # of the pulls
        self._written: list[Tensor] = []
        self._slots: tuple[Workspace, deque[Parts], list[Arrived]] | None = None
        self._sent: deque[tuple[Tensor, Any]] = deque()

    def publish(self, tensors: Sequence[Tensor], freight: Freight) -> None:
        self._freight, packing = freight, freight.keys
        workspace = self._memory.workspace("rows", max(freight.shard_lens) * packing.row_bytes, self._group)
        own, self._pulls = workspace.bound(freight, "rows", partial(self._place_rows, workspace))
        workspace.barrier(channel=_MAIN)
        if own:
            freight.copy(list(zip(tensors, own, strict=True)))
        workspace.barrier(channel=_MAIN)
        for stage in freight.route.stages:
            self._buffers.append(packing.empty(stage.num_fetched))
        # After the barrier, and after earlier work that used the memory of these buffers.
        self._memory.pulls.fork()

    def _place_rows(self, workspace: Workspace) -> tuple[tuple[Tensor, ...], list[Parts]]:
        """Where this rank's rows are published, if it serves any; and the rows that it pulls, stage by stage."""
        packing, pulls = self._freight.keys, []
        for stage in self._freight.route.stages:
            rows: list[Tensor] = []
            for source, ranges in stage.fetch:
                theirs = workspace.rows(source, 0, ranges[-1][1], packing)
                rows += [theirs[begin:end] for begin, end in ranges]
            pulls.append(_parts(rows))
        own = workspace.rows(self._rank, 0, self._freight.shard_lens[self._rank], packing)
        serves = any(stage.serve for stage in self._freight.route.stages)
        return packing.views(own) if serves else (), pulls

    def arrived(self, stage: Stage) -> tuple[Tensor, ...] | None:
        lane = self._memory.pulls
        if self._pulls:
            with lane:
                for (rows, counts), into in zip(self._pulls, self._buffers, strict=True):
                    for part, theirs in zip((into,) if len(rows) == 1 else into.split(counts), rows, strict=True):
                        part.copy_(theirs)
                    self._marks.append(lane.mark())
            self._pulls = []
        buffer = self._buffers.popleft()
        lane.wait(self._marks.popleft())
        return self._freight.keys.views(buffer) if buffer.shape[0] else None

    def buffer(self, stage: Stage) -> tuple[Tensor, ...] | None:
        packing = self._freight.gradients
        self._written.append(packing.empty(stage.num_fetched))
        return packing.views(self._written[0]) if stage.num_fetched else None

    def send(self, stage: Stage) -> None:
        lane, freight, written = self._memory.pushes, self._freight, self._written.pop()
        if self._slots is None:
            purpose = "rows" if self._group.size() == 2 else "gradients"
            nbytes = freight.route.most_served * freight.gradients.row_bytes
            workspace = self._memory.workspace(purpose, nbytes, self._group)
            pushes, arrived = workspace.bound(freight, "slots", partial(self._place_slots, workspace))
            self._slots = workspace, deque(pushes), arrived
        workspace, pushes, _ = self._slots
        slots, counts = pushes.popleft()
        lane.fork()
        with lane:
            for part, slot in zip((written,) if len(slots) == 1 else written.split(counts), slots, strict=True):
                slot.copy_(part)
            if not pushes:
                workspace.barrier(channel=_PUSHED)
            self._sent.append((written, lane.mark()))
        if len(self._sent) > 2:  # pushed long before: its memory may be used again
            lane.wait(self._sent.popleft()[1])

    def _place_slots(self, workspace: Workspace) -> tuple[list[Parts], list[Arrived]]:
        """The slots that this rank pushes to, stage by stage; and what its own hold, in the order of the sums."""
        packing, slots, rank = self._freight.gradients, self._freight.route.slots, self._rank
        pushes: list[Parts] = []
        arrived: list[Arrived] = []

        def slot(owner: int, sender: int, ranges: Sequence[Rows]) -> Tensor:
            return workspace.rows(owner, slots[sender][owner] * packing.row_bytes, num_rows(ranges), packing)

        for stage in self._freight.route.stages:
            pushes.append(_parts([slot(owner, rank, ranges) for owner, ranges in stage.fetch]))
            for served in stage.serve:
                arrived += split_arrived(slot(rank, *served), (served,), packing)
        return pushes, arrived

    def collect(self) -> list[Arrived]:
        if self._slots is None or self._slots[1] or not self._sent:  # not all are sent, or all were collected
            return []
        self._memory.pushes.wait(self._sent[-1][1])  # which follows the barrier
        self._sent.clear()
        return self._slots[2]

    def swap(self, packings: tuple[Packing, ...], write: Write, swap: Swap) -> list[Tensor]:
        offsets = [*accumulate((aligned(swap.most * packing.row_bytes) for packing in packings), initial=0)]
        workspace = self._memory.workspace("rows", offsets.pop(), self._group)
        place = partial(self._place_swap, workspace, offsets, packings, swap)
        own, pulls = workspace.bound(swap, packings, place)
        workspace.barrier(channel=_MAIN)
        write(own)
        workspace.barrier(channel=_MAIN)
        received = [packing.empty(sum(swap.origin)) for packing in packings]
        for buffer, of_packing in zip(received, pulls, strict=True):
            parts = buffer.split(swap.origin)
            for source, rows in of_packing:
                parts[source].copy_(rows)
        return received

    def _place_swap(
        self, workspace: Workspace, offsets: Sequence[int], packings: Sequence[Packing], swap: Swap
    ) -> tuple[list[Tensor], list[list[tuple[int, Tensor]]]]:
        """Where the rows that are sent are written; and those that this rank pulls from each rank, by packing."""
        own, pulls, size = [], [], self._group.size()
        for offset, packing in zip(offsets, packings, strict=True):
            own.append(workspace.rows(self._rank, offset, sum(swap.to), packing))
            of_packing = []
            for step in range(size):  # so that no two ranks pull from the same rank at a time
                source = (self._rank - step) % size
                first = offset + swap.firsts[source] * packing.row_bytes
                if count := swap.origin[source]:
                    of_packing.append((source, workspace.rows(source, first, count, packing)))
            pulls.append(of_packing)
        return own, pulls


def _parts(rows: list[Tensor]) -> Parts:
    return rows, [len(x) for x in rows]


def aligned(nbytes: int) -> int:
    """Return the size of aligned memory for ``nbytes``."""
    return max(_ALIGNMENT, -(-nbytes // _ALIGNMENT) * _ALIGNMENT)
