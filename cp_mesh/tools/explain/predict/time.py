"""Time: that of a forward and a backward on a rank, from its schedule and a few measured numbers of a machine.

A closed model; no ranks, no device. In one of n head chunks, F are the bytes of a row's keys and values, Q those of its
queries, heads the batch times the query heads:

    a kernel call       FLOPs / rate + query rows · heads · per_row + per_call; more a row where a tile is cut by the
                        mask: blocks on its edge are computed whole
    rows are published  2 · local rows · F / memory_rate in a launch, between two barriers, each per_barrier · log2(cp)
    rows arrive         stage after stage while tiles are computed, from ranks of this host at link_rate, from others at
                        network_rate, each range of rows with a launch
    forward             publish; local tiles; each stage's tiles once its rows are there; the merge of partial outputs
    backward            publish; each stage's tiles once its rows are there, whose gradients leave stage after stage;
                        local tiles; a barrier when the last gradients have arrived; sums of all partial gradients
    the host            a pass, its kernel calls and stages. Calls that follow one another take the longer of the two
    Ulysses             an exchange of heads for rows, with the copies before and after it; one device's kernel calls
                        on the rank's heads; an exchange back. Each is two barriers and the launches that
                        `exchange_launches` counts; of the benchmark's Ulysses (``plain``) two launches
    the hybrid          these exchanges in an inner group, and between them its ring, on the rank's heads
    the double ring     rows of the next host cross while one is computed, at the rate of the network, and are published
                        when that host is visited. Gradients of a host are waited for, summed, and cross in fp32, the
                        last of them behind the local tiles. A crossing takes the host as long as a stage

What a rank waits for others is not in it, but for their rows: take the slowest rank. Errors are in docs/performance.md.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from cp_mesh.geometry.mask import FULL, Band
from cp_mesh.geometry.schedule import Fetch, Schedule, Tile, num_rows
from cp_mesh.tools.explain.predict.memory import Sizes, host_size_of, kv_heads_of_rank, visits_of


@dataclass(frozen=True)
class KernelRate:
    """Of one pass of a kernel, in bf16: of long calls, and seconds beside that."""

    rate: float  # FLOP/s
    per_row: float  # for a query row of a head
    per_cut_row: float  # more for one in a tile that is not full
    per_band_row: float  # more for one in a window or of documents
    per_call: float


@dataclass(frozen=True)
class HostTime:
    """Seconds of the host for a pass."""

    per_pass: float
    per_call: float  # more, of the kernel
    per_stage: float  # more
    per_exchange: float  # more, of Ulysses


@dataclass(frozen=True)
class Machine:
    """What the model reads of a machine.

    Attributes:
        name: of its GPU, as `torch.cuda.get_device_name` says it.
        compute_capability: of its GPU.
        kernels: forward and backward of the kernels that were measured, by name.
        memory_rate: bytes/s that copies and sums read and write.
        link_rate: bytes/s that a GPU receives from others of its host while it computes.
        network_rate: bytes/s that a GPU receives from other hosts.
        exchange_rate: bytes/s, of all a rank's, of an exchange of heads in a host with the copies on both sides.
        gpus_per_host: ranks that share a host; rank r is on host r // gpus_per_host.
        per_launch, per_barrier: seconds of a launch on the device, or a copy, and of a barrier of two ranks.
        host_forward, host_backward: of the host.
        transport: over which rows travelled when this was measured.
    """

    name: str
    compute_capability: tuple[int, int]
    kernels: Mapping[str, tuple[KernelRate, KernelRate]] = field(hash=False)
    memory_rate: float
    link_rate: float
    network_rate: float
    exchange_rate: float
    gpus_per_host: int
    per_launch: float
    per_barrier: float
    host_forward: HostTime
    host_backward: HostTime
    transport: str = "symmetric_memory"

    @property
    def on_gpu(self) -> bool:
        return self.compute_capability > (0, 0)


H200 = Machine(
    "NVIDIA H200",
    (9, 0),
    {
        "fa4": (KernelRate(660e12, 0.22e-9, 0.0, 0.45e-9, 2.1e-6), KernelRate(605e12, 0.71e-9, 0.37e-9, 0.0, 22e-6)),
        "cudnn": (KernelRate(605e12, 0.41e-9, 0.0, 0.0, 2.1e-6), KernelRate(517e12, 0.85e-9, 0.27e-9, 0.0, 26e-6)),
    },
    memory_rate=3.9e12,
    link_rate=280e9,
    network_rate=50e9,
    exchange_rate=240e9,
    gpus_per_host=8,
    per_launch=4.4e-6,
    per_barrier=5.1e-6,
    host_forward=HostTime(500e-6, 100e-6, 200e-6, 400e-6),
    host_backward=HostTime(700e-6, 140e-6, 350e-6, 350e-6),
)
"""H200s, 8 on an NVLink host. Fitted to docs/results/attention_{2,4}xh200.csv, rows of 32 heads, and to windows and
documents of masks_{2,4}xh200.csv; the host to 2 GPUs. The network was never measured: 400 Gb/s InfiniBand on paper."""

MACHINES = {"h200": H200}


@dataclass(frozen=True)
class PassCost:
    """Seconds of one pass on one rank.

    Attributes:
        device: from its first kernel to its last.
        exposed: of these, waiting for rows or gradients on their way.
        host: until the call returns.
    """

    device: float
    exposed: float
    host: float

    @property
    def queued(self) -> float:
        """Of a pass among others that follow one another: the device or the host decides."""
        return max(self.device, self.host)

    def times(self, count: int) -> PassCost:
        return PassCost(count * self.device, count * self.exposed, count * self.host)


def staged_costs(
    schedule: Schedule, sizes: Sizes, machine: Machine, kernel: str, head_chunks: int = 1, degree: int = 1
) -> tuple[PassCost, PassCost]:
    """Forward and backward, on the schedule's rank, of a method that fetches rows in stages, also by hosts.

    Args:
        schedule: the rank's, as the method makes it.
        sizes: of its tensors, in half precision.
        machine, kernel: the kernel that computes all tiles, by name, and a machine with its rates.
        head_chunks: parts of the heads that are computed one after the other.
        degree: ranks of the cp group that are one of the schedule: those of an inner group of the hybrid.
    """
    legs, num_rows_here = legs_of(schedule, degree), schedule.shard_lens[schedule.cp_rank]
    heads, kv_heads = sizes.num_heads // head_chunks, sizes.num_kv_heads // head_chunks
    sizes = replace(sizes, num_heads=heads, num_kv_heads=kv_heads)
    row = sizes.batch * kv_heads * (sizes.head_dim + sizes.v_head_dim)
    out_row = sizes.batch * heads * sizes.v_head_dim * sizes.itemsize
    dq_row = sizes.batch * heads * sizes.head_dim * sizes.itemsize
    key_row, gradient_row = row * sizes.itemsize, row * sizes.gradient_itemsize
    barrier = machine.per_barrier * math.log2(host_size_of(schedule))
    calls = [schedule.local_tiles, *(tiles for leg in legs for tiles in leg.tiles)]
    num_calls, tile_rows = sum(map(len, calls)), num_rows(tile.q for tiles in calls for tile in tiles)
    forward_rate, backward_rate = machine.kernels[kernel]
    rank, num_crossings = schedule.cp_rank * degree, sum(leg.crossing is not None for leg in legs)
    num_stages = len(schedule.route.stages) + num_crossings

    def arrivals(clock: _Clock) -> Iterator[tuple[Leg, list[float]]]:
        """Host after host, once its rows are there, with the times at which the rows of each stage are here."""
        links, outer = _Links(rank, machine), _Links(rank, machine)
        crossings = [leg for leg in legs if leg.crossing is not None]

        def cross() -> float:
            leg = crossings.pop(0)
            packed = clock.now + 2 * leg.leaving * key_row / machine.memory_rate + machine.per_launch
            return outer.move(packed, leg.crossing or (), key_row)

        crossed = cross() if crossings else 0.0
        for leg in legs:
            if leg.crossing is not None:
                clock.wait(crossed)
                crossed = cross() if crossings else 0.0
            if any(move is not None for move in leg.moves):
                clock.now += 2 * leg.num_rows * key_row / machine.memory_rate + machine.per_launch + 2 * barrier
            yield leg, [clock.now if move is None else links.move(clock.now, move, key_row) for move in leg.moves]

    clock = _Clock()
    for leg, times in arrivals(clock):
        if leg is legs[0]:
            clock.now += _seconds(schedule.local_tiles, sizes, forward_rate, 1.0)
        for tiles, arrival in zip(leg.tiles, times, strict=True):
            if tiles:
                clock.wait(arrival)
                clock.now += _seconds(tiles, sizes, forward_rate, 1.0)
    if num_calls > 1:
        clock.now += (tile_rows + num_rows_here) * out_row / machine.memory_rate + machine.per_launch
    forward = PassCost(clock.now, clock.exposed, _host(machine.host_forward, num_calls, num_stages))

    clock, links, outer = _Clock(), _Links(rank, machine), _Links(rank, machine)
    sent = home = 0.0
    for leg, times in arrivals(clock):
        for move, tiles, arrival in zip(leg.moves, leg.tiles, times, strict=True):
            if tiles:
                clock.wait(arrival)
                clock.now += _seconds(tiles, sizes, backward_rate, 2.5)
                sent = sent if move is None else links.move(clock.now, move, gradient_row)
        if num_crossings:  # sums of this host's gradients, which cross once all of them are here
            clock.wait(sent)
            sum_row = row * max(sizes.gradient_itemsize, 4)
            clock.now += (leg.returning * gradient_row + leg.num_rows * sum_row) / machine.memory_rate
            clock.now += machine.per_launch + barrier * any(move is not None for move in leg.moves)
            if leg.crossing is not None:
                clock.wait(home)
                home = outer.move(clock.now, leg.crossing, sum_row)
    clock.now += _seconds(schedule.local_tiles, sizes, backward_rate, 2.5)
    clock.wait(max(home, sent))
    if schedule.route.stages and not num_crossings:
        clock.now += barrier
    if num_calls > 1:
        sums = (tile_rows + num_rows_here) * dq_row + 3 * num_rows_here * key_row
        clock.now += sums / machine.memory_rate + machine.per_launch
    backward = PassCost(clock.now, clock.exposed, _host(machine.host_backward, num_calls, num_stages))
    return forward.times(head_chunks), backward.times(head_chunks)


def ulysses_costs(
    schedule: Schedule,
    degree: int,
    cp_size: int,
    sizes: Sizes,
    machine: Machine,
    kernel: str,
    head_chunks: int = 1,
    kept: bool = True,
    plain: bool = False,
    pieces: int = 2,
    collective: bool = False,
) -> tuple[PassCost, PassCost]:
    """Forward and backward of Ulysses and the hybrid: q, k, v are exchanged, a rank's heads computed, out comes home.

    Args:
        schedule: that of a ring of inner groups; of plain Ulysses one device that holds the whole sequence.
        degree: ranks of an inner group; divides ``sizes.num_heads``. Each kv head is sent to all that read it.
        cp_size: number of ranks.
        sizes, machine, kernel, head_chunks: as in `staged_costs`.
        kept: whether what the forward received, and out, are held for the backward, which else exchanges them again,
            as it does where kv heads are sent to several ranks.
        plain: of the benchmark's, whose exchange is two launches.
        pieces, collective: as in `exchange_launches`.
    """
    kept &= kv_heads_of_rank(sizes, degree) * degree == sizes.num_kv_heads
    launches = (4, 4) if plain else exchange_launches(degree, sizes, kept, pieces, collective)
    barriers = 0.0 if plain else 4 * machine.per_barrier * math.log2(degree)
    heads, kv_heads = sizes.num_heads // degree // head_chunks, kv_heads_of_rank(sizes, degree) // head_chunks
    of_rank = replace(sizes, num_heads=heads, num_kv_heads=kv_heads)
    rows = schedule.shard_lens[schedule.cp_rank] * sizes.batch
    q, k, out, v = (rows * n * dim for dim in (sizes.head_dim, sizes.v_head_dim) for n in (heads, kv_heads))
    near = degree if cp_size <= machine.gpus_per_host else math.gcd(degree, machine.gpus_per_host)

    def exchange(nbytes: float) -> float:
        far = nbytes * (degree - near) / degree
        return max(nbytes / machine.exchange_rate, far / machine.network_rate)

    def cost(moved: float, num_launches: int, ring: PassCost, host: HostTime) -> PassCost:
        moved += num_launches * machine.per_launch + barriers
        of_host = ring.host + 2 * host.per_exchange
        return PassCost(moved + ring.device, moved + ring.exposed, of_host).times(head_chunks)

    forward, backward = staged_costs(schedule, of_rank, machine, kernel, 1, degree)
    e, qkv = sizes.itemsize, exchange((q + k + v) * sizes.itemsize)
    there = exchange((out if kept else 2 * out + q + k + v) * e)
    home = exchange(q * e + (k + v) * (sizes.home_itemsize or sizes.gradient_itemsize))
    return (
        cost(qkv + exchange(out * e), launches[0], forward, machine.host_forward),
        cost(there + home, launches[1], backward, machine.host_backward),
    )


def exchange_launches(degree: int, sizes: Sizes, kept: bool, pieces: int, collective: bool) -> tuple[int, int]:
    """Copies and collectives of the exchanges of a forward and of a backward of Ulysses, of one head chunk.

    A buffer of each dtype is packed, moved, and put in order; what comes home is copied to its heads. Kv heads that are
    sent several times are repeated before, and their gradients summed after.

    Args:
        degree, sizes, kept: as in `ulysses_costs`; kept as it will be.
        pieces: of a rank's rows, each of which is pulled to its place by itself; 0: all are put in order afterwards.
        collective: whether one collective moves a buffer, in place of a copy of each rank's pieces.
    """
    moves, ordered = 1 if collective else degree * max(1, pieces), pieces == 0 or (collective and pieces > 1)
    together = sizes.batch == 1 and sizes.head_dim == sizes.v_head_dim
    repeated = kv_heads_of_rank(sizes, degree) * degree != sizes.num_kv_heads

    def there(tensors: int) -> int:
        return (1 if together else tensors) + moves + ordered

    def home(tensors: int) -> int:
        return there(tensors) + tensors

    alone = home(1) - ordered  # out, or dq, which is packed in order
    forward = there(3) + alone
    if kept:
        return forward, there(1) + home(3)
    # lse is of another dtype, and so are gradients that are summed afterwards, each of which is packed by itself
    summed = alone + 4 + moves + ordered + 4
    backward = there(5) + there(1) + 1 + (summed if repeated else home(3))
    return forward + home(1) + 2 * repeated, backward + 2 * repeated


class Leg(NamedTuple):
    """Stages whose rows lie in the buffers of one host's ranks, of the double ring; of others all stages.

    Attributes:
        crossing: what comes to this rank's buffer first, by cp rank; None where its own rows lie there.
        leaving: rows that cross from here at that time.
        moves: what comes here in each stage, by cp rank; None where the rows lie in this rank's buffer.
        tiles: of each stage.
        num_rows: of the buffer.
        returning: rows of which gradients come to this buffer.
    """

    crossing: Fetch | None
    leaving: int
    moves: list[Fetch | None]
    tiles: list[tuple[Tile, ...]]
    num_rows: int
    returning: int

    @property
    def received(self) -> list[Fetch]:
        """All that comes to this rank."""
        return [move for move in (self.crossing, *self.moves) if move is not None]


def legs_of(schedule: Schedule, degree: int = 1) -> list[Leg]:
    """What a rank receives, in order; ``degree`` as in `staged_costs`."""
    host_size = host_size_of(schedule)
    host, place = divmod(schedule.cp_rank, host_size)
    tiles, legs = iter(schedule.route.stages), []
    for visit in visits_of(schedule):
        moves: list[Fetch | None] = [None] if visit.own is not None else []
        moves += [_by_cp_rank(x.fetch, host * host_size, degree) for x in visit.route.stages]
        crossing, leaving = None, 0
        if visit.crossing is not None:
            crossing = _by_cp_rank(visit.crossing.fetch, place, host_size)
            leaving = sum(num_rows(ranges) for _, ranges in visit.crossing.serve)
        returning = visit.own.num_fetched if visit.own is not None else 0
        returning += sum(num_rows(ranges) for x in visit.route.stages for _, ranges in x.serve)
        legs.append(Leg(crossing, leaving, moves, [next(tiles).tiles for _ in moves], visit.num_rows, returning))
    return legs


def _by_cp_rank(parts: Fetch, first: int, step: int) -> Fetch:
    return tuple((first + step * number, ranges) for number, ranges in parts)


class _Clock:
    """The time of one rank in a pass, and how much of it was waiting."""

    def __init__(self) -> None:
        self.now = self.exposed = 0.0

    def wait(self, until: float) -> None:
        self.exposed += max(0.0, until - self.now)
        self.now = max(self.now, until)


class _Links:
    """What one rank's links have moved so far, to one direction: those of its host, and the network."""

    def __init__(self, rank: int, machine: Machine) -> None:
        self._host, self._machine = rank // machine.gpus_per_host, machine
        self._free = [0.0, 0.0]

    def move(self, begin: float, parts: Fetch, row_bytes: int) -> float:
        """When these rows of other ranks have been moved, from ``begin`` at the earliest."""
        machine = self._machine
        for far, rate in enumerate((machine.link_rate, machine.network_rate)):
            own = [ranges for rank, ranges in parts if (rank // machine.gpus_per_host != self._host) == far]
            launches = machine.per_launch * sum(map(len, own))
            self._free[far] = max(begin, self._free[far]) + sum(map(num_rows, own)) * row_bytes / rate + launches
        return max(begin, *self._free)


def _seconds(tiles: Sequence[Tile], sizes: Sizes, kernel: KernelRate, forwards: float) -> float:
    """Of kernel calls; ``forwards``: FLOPs over those of a forward."""
    heads = sizes.batch * sizes.num_heads
    flops = 2 * heads * (sizes.head_dim + sizes.v_head_dim) * forwards
    total = 0.0
    for tile in tiles:
        per_row = kernel.per_row + (0.0 if tile.cover == FULL else kernel.per_cut_row)
        per_row += 0.0 if isinstance(tile.cover, Band) and tile.cover.left is None else kernel.per_band_row
        total += tile.num_pairs * flops / kernel.rate + num_rows([tile.q]) * heads * per_row + kernel.per_call
    return total


def _host(time: HostTime, num_calls: int, num_stages: int) -> float:
    return time.per_pass + num_calls * time.per_call + num_stages * time.per_stage
