"""Time of a forward and a backward on one rank, from its schedule and a few measured numbers of a machine.

A closed model: it needs no process group and no GPU. In one of n head chunks, F is the bytes of a row's keys and
values, Q those of its queries, and heads is the batch times the query heads:

    a kernel call       FLOPs / rate + query rows · heads · per_row + per_call. Rows of tiles that the mask cuts cost
                        more: blocks on the mask's edge are computed whole
    publishing rows     2 · local rows · F / memory_rate in a launch, between two barriers, each per_barrier · log2(cp)
    receiving rows      stage by stage while tiles are computed, from ranks of this host at link_rate, from others at
                        network_rate; a launch for each range of rows
    forward             publish; local tiles; each stage's tiles once its rows have arrived; merge of partial outputs
    backward            publish; each stage's tiles once its rows have arrived, whose gradients are sent stage by stage;
                        local tiles; a barrier when the last gradients have arrived; sums of all partial gradients
    the host            time of a pass, its kernel calls and stages. Calls in sequence take the longer of device and
                        host time
    Ulysses             an all-to-all of heads for rows, with copies before and after it; one device's kernel calls on
                        the rank's heads; an all-to-all back. Each has two barriers and the launches that
                        `exchange_launches` counts; two launches in the benchmark's Ulysses (``plain``)
    the hybrid          these exchanges in an inner group, and between them a ring on the rank's heads
    the double ring     rows of the next host cross at network_rate while one host is computed, and are published when
                        that host is visited. Gradients of a host are waited for, summed, and cross in fp32, the last
                        ones behind the local tiles. A crossing costs the host the time of a stage

The model includes waiting for rows, but no other waiting for ranks: take the slowest rank. docs/performance.md has the
prediction errors.
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
    """Speed of one pass of a kernel in bf16: the rate of long calls, and extra seconds."""

    rate: float  # FLOP/s
    per_row: float  # per query row and head
    per_cut_row: float  # more in a tile that is not full
    per_band_row: float  # more in a tile of a window or of documents
    per_call: float


@dataclass(frozen=True)
class HostTime:
    """Host seconds of a pass; the terms add up."""

    per_pass: float
    per_call: float  # for each kernel call
    per_stage: float
    per_exchange: float  # for each all-to-all of Ulysses


@dataclass(frozen=True)
class Machine:
    """Measured numbers of a machine.

    Attributes:
        name: name of its GPU, from `torch.cuda.get_device_name`.
        compute_capability: of its GPU; (0, 0) for a CPU.
        kernels: rates of forward and backward of the measured kernels, by name.
        memory_rate: bytes/s that copies and sums read and write.
        link_rate: bytes/s that a GPU receives from GPUs of its host while it computes.
        network_rate: bytes/s that a GPU receives from other hosts.
        exchange_rate: bytes/s of an all-to-all of heads within a host, with its copies; a rank's own share counts.
        gpus_per_host: ranks that share a host; rank r is on host r // gpus_per_host.
        per_launch, per_barrier: device seconds of a kernel launch or copy, and of a barrier of two ranks.
        host_forward, host_backward: host time of the passes.
        transport: the transport of the measurement.
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
"""H200s, 8 per NVLink host. Fitted to docs/results/attention_{2,4}xh200.csv, rows with 32 heads, and to windows and
documents of masks_{2,4}xh200.csv; host times to 2 GPUs. network_rate is not measured: nominal 400 Gb/s InfiniBand."""

MACHINES = {"h200": H200}


@dataclass(frozen=True)
class PassCost:
    """Seconds of one pass on one rank.

    Attributes:
        device: device time from the first kernel to the end of the last.
        exposed: the part of ``device`` that waits for rows or gradients in transit.
        host: host time until the call returns.
    """

    device: float
    exposed: float
    host: float

    @property
    def queued(self) -> float:
        """Time per pass of many calls in sequence: the longer of device and host time."""
        return max(self.device, self.host)

    def times(self, count: int) -> PassCost:
        return PassCost(count * self.device, count * self.exposed, count * self.host)


def staged_costs(
    schedule: Schedule, sizes: Sizes, machine: Machine, kernel: str, head_chunks: int = 1, degree: int = 1
) -> tuple[PassCost, PassCost]:
    """Predict forward and backward of one rank, for methods that fetch rows in stages (the double ring included).

    Args:
        schedule: the rank's schedule.
        sizes: of its tensors, in half precision.
        machine: a machine with rates of the kernel.
        kernel: name of the kernel that computes all tiles.
        head_chunks: number of chunks in which heads are computed.
        degree: cp ranks per rank of the schedule: the size of an inner group of the hybrid.
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
        """Yield each host once its rows are published, with the arrival times of the rows of each stage."""
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
        if num_crossings:  # sums of this host's gradients cross once all gradients have arrived
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
    """Predict forward and backward of Ulysses and the hybrid: all-to-all of q, k, v, attention, all-to-all of out.

    Args:
        schedule: of a ring of inner groups; for plain Ulysses, of one device that holds the whole sequence.
        degree: ranks of an inner group; divides ``sizes.num_heads``. Each kv head goes to all ranks that read it.
        cp_size: number of ranks.
        sizes, machine, kernel, head_chunks: as in `staged_costs`.
        kept: whether the forward keeps the received q, k, v, and out, for the backward. Otherwise, and always if kv
            heads go to several ranks, the backward exchanges them again.
        plain: whether this is the benchmark's own Ulysses, whose exchanges are two launches each.
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
    """Count copies and collectives of the exchanges in a forward and in a backward of Ulysses, for one head chunk.

    A buffer for each dtype is packed, moved, and put in order of positions; returned results are copied to their heads.
    Kv heads for several ranks are repeated before the exchange, and their gradients are summed after it.

    Args:
        degree, sizes: as in `ulysses_costs`.
        kept: whether the forward keeps q, k, v and out; False if kv heads go to several ranks.
        pieces: runs of a rank's rows, each copied to its place directly; 0: all rows are put in order afterwards.
        collective: whether one collective moves a buffer, instead of a copy for each piece of each rank.
    """
    moves, ordered = 1 if collective else degree * max(1, pieces), pieces == 0 or (collective and pieces > 1)
    together = sizes.batch == 1 and sizes.head_dim == sizes.v_head_dim
    repeated = kv_heads_of_rank(sizes, degree) * degree != sizes.num_kv_heads

    def there(tensors: int) -> int:
        return (1 if together else tensors) + moves + ordered

    def home(tensors: int) -> int:
        return there(tensors) + tensors

    alone = home(1) - ordered  # out, or dq: packed in order
    forward = there(3) + alone
    if kept:
        return forward, there(1) + home(3)
    # lse, and gradients that are summed afterwards, have other dtypes: each needs a buffer of its own
    summed = alone + 4 + moves + ordered + 4
    backward = there(5) + there(1) + 1 + (summed if repeated else home(3))
    return forward + home(1) + 2 * repeated, backward + 2 * repeated


class Leg(NamedTuple):
    """A visit of the double ring to one host, with its stages; other methods have one leg with all stages.

    Attributes:
        crossing: rows that cross to this rank's buffer first, by cp rank; None if the buffer has its local rows.
        leaving: number of rows that this rank sends to another host meanwhile.
        moves: rows that this rank receives in each stage, by cp rank; None if they are in its own buffer.
        tiles: of each stage.
        num_rows: rows of the buffer.
        returning: number of rows whose gradients return to this buffer.
    """

    crossing: Fetch | None
    leaving: int
    moves: list[Fetch | None]
    tiles: list[tuple[Tile, ...]]
    num_rows: int
    returning: int

    @property
    def received(self) -> list[Fetch]:
        """All rows that this rank receives."""
        return [move for move in (self.crossing, *self.moves) if move is not None]


def legs_of(schedule: Schedule, degree: int = 1) -> list[Leg]:
    """The legs of a rank, in order; ``degree`` as in `staged_costs`."""
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
    """Elapsed time of one rank in a pass, and the part of it spent waiting."""

    def __init__(self) -> None:
        self.now = self.exposed = 0.0

    def wait(self, until: float) -> None:
        self.exposed += max(0.0, until - self.now)
        self.now = max(self.now, until)


class _Links:
    """When the links of a rank are free again, in one direction: those within its host, and the network."""

    def __init__(self, rank: int, machine: Machine) -> None:
        self._host, self._machine = rank // machine.gpus_per_host, machine
        self._free = [0.0, 0.0]

    def move(self, begin: float, parts: Fetch, row_bytes: int) -> float:
        """Return when these rows of other ranks have arrived, if the transfer starts at ``begin`` or later."""
        machine = self._machine
        for far, rate in enumerate((machine.link_rate, machine.network_rate)):
            own = [ranges for rank, ranges in parts if (rank // machine.gpus_per_host != self._host) == far]
            launches = machine.per_launch * sum(map(len, own))
            self._free[far] = max(begin, self._free[far]) + sum(map(num_rows, own)) * row_bytes / rate + launches
        return max(begin, *self._free)


def _seconds(tiles: Sequence[Tile], sizes: Sizes, kernel: KernelRate, forwards: float) -> float:
    """Seconds of the kernel calls; ``forwards``: FLOPs relative to a forward."""
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
