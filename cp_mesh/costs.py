"""Costs: the time of a forward and a backward on a rank, from its schedule and a few measured numbers of a machine.

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
                        on the rank's heads; an exchange back. Each is two barriers and a few launches, and as many
                        more as there are ranks; of the benchmark's Ulysses (``plain``) two launches

What a rank waits for others is not in it, but for their rows: take the slowest rank. Errors are in docs/performance.md.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from cp_mesh.masks import FULL, Band
from cp_mesh.memory import Sizes, kv_heads_of_rank
from cp_mesh.schedule import Fetch, Schedule, Tile, num_rows


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
    schedule: Schedule, sizes: Sizes, machine: Machine, kernel: str, head_chunks: int = 1
) -> tuple[PassCost, PassCost]:
    """Forward and backward, on the schedule's rank, of a method that fetches rows in stages.

    Args:
        schedule: the rank's, as the method makes it.
        sizes: of its tensors, in half precision.
        machine, kernel: the kernel that computes all tiles, by name, and a machine with its rates.
        head_chunks: parts of the heads that are computed one after the other.
    """
    stages, num_rows_here = schedule.route.stages, schedule.shard_lens[schedule.cp_rank]
    heads, kv_heads = sizes.num_heads // head_chunks, sizes.num_kv_heads // head_chunks
    sizes = replace(sizes, num_heads=heads, num_kv_heads=kv_heads)
    row = sizes.batch * kv_heads * (sizes.head_dim + sizes.v_head_dim)
    out_row = sizes.batch * heads * sizes.v_head_dim * sizes.itemsize
    dq_row = sizes.batch * heads * sizes.head_dim * sizes.itemsize
    key_row, gradient_row = row * sizes.itemsize, row * sizes.gradient_itemsize
    barrier = machine.per_barrier * math.log2(schedule.cp_size) if stages else 0.0
    publish = 2 * num_rows_here * key_row / machine.memory_rate + machine.per_launch + 2 * barrier if stages else 0.0
    calls = [schedule.local_tiles, *(stage.tiles for stage in stages)]
    num_calls, tile_rows = sum(map(len, calls)), num_rows(tile.q for tiles in calls for tile in tiles)
    forward_rate, backward_rate = machine.kernels[kernel]

    keys, now, exposed = _Links(schedule.cp_rank, machine), publish, 0.0
    arrivals = [keys.move(publish, stage.fetch, key_row) for stage in stages]
    now += _seconds(schedule.local_tiles, sizes, forward_rate, 1.0)
    for stage, arrival in zip(stages, arrivals, strict=True):
        if stage.num_fetched:
            exposed += max(0.0, arrival - now)
            now = max(now, arrival) + _seconds(stage.tiles, sizes, forward_rate, 1.0)
    if num_calls > 1:
        now += (tile_rows + num_rows_here) * out_row / machine.memory_rate + machine.per_launch
    forward = PassCost(now, exposed, _host(machine.host_forward, num_calls, len(stages)))

    gradients, now, exposed, sent = _Links(schedule.cp_rank, machine), publish, 0.0, 0.0
    for stage, arrival in zip(stages, arrivals, strict=True):
        if stage.num_fetched:
            exposed += max(0.0, arrival - now)
            now = max(now, arrival) + _seconds(stage.tiles, sizes, backward_rate, 2.5)
            sent = gradients.move(now, stage.fetch, gradient_row)
    now += _seconds(schedule.local_tiles, sizes, backward_rate, 2.5)
    exposed += max(0.0, sent - now)
    now = max(now, sent) + barrier
    if num_calls > 1:
        sums = (tile_rows + num_rows_here) * dq_row + 3 * num_rows_here * key_row
        now += sums / machine.memory_rate + machine.per_launch
    backward = PassCost(now, exposed, _host(machine.host_backward, num_calls, len(stages)))
    return forward.times(head_chunks), backward.times(head_chunks)


def ulysses_costs(
    whole: Schedule, cp_size: int, sizes: Sizes, machine: Machine, kernel: str, head_chunks: int = 1,
    kept: bool = True, plain: bool = False,
) -> tuple[PassCost, PassCost]:  # fmt: skip
    """Forward and backward of Ulysses: an exchange of q, k, v; a rank's heads of the whole sequence; out comes home.

    Args:
        whole: the schedule of one device that holds the whole sequence.
        cp_size: number of ranks; divides ``sizes.num_heads``. Each kv head is sent to all ranks that read it.
        sizes, machine, kernel, head_chunks: as in `staged_costs`.
        kept: whether what the forward received, and out, are held for the backward, which else exchanges them again,
            as it does where kv heads are sent to several ranks.
        plain: of the benchmark's, whose exchange is two launches.
    """
    kept &= kv_heads_of_rank(sizes, cp_size) * cp_size == sizes.num_kv_heads
    heads, kv_heads = sizes.num_heads // cp_size // head_chunks, kv_heads_of_rank(sizes, cp_size) // head_chunks
    of_rank, rows = replace(sizes, num_heads=heads, num_kv_heads=kv_heads), whole.shard_lens[0] * sizes.batch
    q, k, out, v = (
        rows * n * dim * sizes.itemsize for dim in (sizes.head_dim, sizes.v_head_dim) for n in (heads, kv_heads)
    )

    def exchange(nbytes: float) -> float:
        far = nbytes * max(0, cp_size - machine.gpus_per_host) / cp_size
        moved = max(nbytes / machine.exchange_rate, far / machine.network_rate)
        if plain:
            return moved + 2 * machine.per_launch
        launches = 3 + cp_size if kept else 4 + 2 * cp_size  # lse is of another dtype, and is pulled beside
        return moved + launches * machine.per_launch + 2 * machine.per_barrier * math.log2(cp_size)

    def cost(moved: float, rate: KernelRate, forwards: float, host: HostTime) -> PassCost:
        device = moved + _seconds(whole.local_tiles, of_rank, rate, forwards)
        of_host = _host(host, len(whole.local_tiles), 0) + 2 * host.per_exchange
        return PassCost(device, moved, of_host).times(head_chunks)

    (forward, backward), qkv = machine.kernels[kernel], exchange(q + k + v)
    there = exchange(out if kept else 2 * out + q + k + v)
    return (
        cost(qkv + exchange(out), forward, 1.0, machine.host_forward),
        cost(there + qkv, backward, 2.5, machine.host_backward),
    )


class _Links:
    """What one rank's links have moved so far, to one direction: those of its host, and the network."""

    def __init__(self, cp_rank: int, machine: Machine) -> None:
        self._host, self._machine = cp_rank // machine.gpus_per_host, machine
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
        per_row += 0.0 if isinstance(tile.cover, Band) and tile.cover.hi is None else kernel.per_band_row
        total += tile.num_pairs * flops / kernel.rate + num_rows([tile.q]) * heads * per_row + kernel.per_call
    return total


def _host(time: HostTime, num_calls: int, num_stages: int) -> float:
    return time.per_pass + num_calls * time.per_call + num_stages * time.per_stage
