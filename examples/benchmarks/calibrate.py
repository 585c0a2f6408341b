"""Measure the numbers of a `predict.time.Machine` on the ranks of this launch, or only the kernels on one device.

    torchrun --nproc-per-node 8 examples/benchmarks/calibrate.py --out machine.json
    python -m cp_mesh explain --machine machine.json ...

Every number is a coefficient of a linear model of times, fitted by least squares of relative errors: times of kernels
on single tiles, of copies, of a fetch of rows, of an all-to-all of heads, and of the host on short calls. The slowest
rank counts. Numbers that the times cannot tell apart keep the proportions of the table that comes with cp_mesh. Numbers
that were not measured (the network; links and the host on a single rank) keep its values.
"""

from __future__ import annotations

import argparse
import math
import os
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))  # a checkout that is not installed

from cp_mesh.call.function import attention  # noqa: E402
from cp_mesh.call.methods import METHODS  # noqa: E402
from cp_mesh.call.plan import compute_capability_of  # noqa: E402
from cp_mesh.comm.exchange import choose_transport, make_swaps, make_transport  # noqa: E402
from cp_mesh.comm.heads import HeadExchange, by_rank  # noqa: E402
from cp_mesh.errors import refuse  # noqa: E402
from cp_mesh.geometry.layouts import Contiguous, Run, ZigZag  # noqa: E402
from cp_mesh.geometry.mask import CAUSAL, FULL, Band, Mask  # noqa: E402
from cp_mesh.geometry.schedule import num_rows  # noqa: E402
from cp_mesh.kernels.combine import copy_together, make_delta  # noqa: E402
from cp_mesh.kernels.contract import KernelTile, Request, shortfalls  # noqa: E402
from cp_mesh.kernels.merge import Kernel  # noqa: E402
from cp_mesh.kernels.scores import Scores  # noqa: E402
from cp_mesh.kernels.table import KERNELS  # noqa: E402
from cp_mesh.tools.explain.predict.machines import write_machine  # noqa: E402
from cp_mesh.tools.explain.predict.time import H200, HostTime, KernelRate, Machine  # noqa: E402

ROUNDS = 5
FITTED = ("memory_rate", "link_rate", "exchange_rate", "per_launch", "per_barrier")


class Shapes(NamedTuple):
    """Of what is timed.

    Attributes:
        rows: of a rank, several lengths.
        heads, kv_heads, head_dim, dtype: of q, k and v.
        calls: timed together, of the shortest.
    """

    rows: Sequence[int]
    heads: int
    kv_heads: int
    head_dim: int
    dtype: torch.dtype
    calls: int = 10


class Calibration(NamedTuple):
    """The machine as it was measured, and which numbers of it were."""

    machine: Machine
    measured: frozenset[str]


def calibrate(
    shapes: Shapes,
    device: torch.device,
    kernels: Sequence[str] = (),
    group: dist.ProcessGroup | None = None,
) -> Calibration:
    """Measure; every rank of the group calls it, and gets the same.

    Args:
        shapes: of the calls that are timed.
        device: of this rank.
        kernels: names; none: those that can compute causal attention of these shapes here.
        group: None: this device alone, whose links and host are not measured.
    """
    clock = _Clock(device, group)
    able = [name for name, kernel in KERNELS.items() if not shortfalls(kernel.capability, _request(shapes, device))]
    if missing := [name for name in kernels if name not in able]:
        refuse("calibrate: kernels", f"some of {', '.join(able)}", missing[0], "others cannot run here")
    if not able:
        refuse("calibrate", "a kernel for causal attention", f"{shapes.dtype}, {device.type}", "dtype=bfloat16 works")
    chosen = list(kernels or [name for name in able if name != "reference"] or able)
    copies = fit(*_copies(clock, shapes), (1 / H200.memory_rate, H200.per_launch))
    rates = {}
    for name in chosen:
        rates[name] = _rates(clock, shapes, KERNELS[name])
    machine = replace(
        H200,
        name=torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        compute_capability=compute_capability_of(device),
        kernels=rates,
        memory_rate=_rate(copies[0], H200.memory_rate),
        per_launch=copies[1],
        transport="symmetric_memory" if device.type == "cuda" else "functional",
    )
    measured = {"memory_rate", "per_launch"}
    if group is not None and group.size() > 1:
        transport = choose_transport("auto", group, device)
        machine = replace(machine, transport=transport, gpus_per_host=group.size())
        per_byte, per_barrier = fit(*_fetches(clock, shapes, machine, group), (1 / H200.link_rate, H200.per_barrier))
        machine = replace(machine, link_rate=_rate(per_byte, H200.link_rate), per_barrier=per_barrier)
        (per_byte,) = fit(*_exchanges(clock, shapes, machine, group), (1 / H200.exchange_rate,))
        machine = replace(machine, exchange_rate=_rate(per_byte, H200.exchange_rate))
        forward, backward = _host(clock, shapes, chosen[0], group)
        machine = replace(machine, host_forward=forward, host_backward=backward)
        measured |= {"link_rate", "per_barrier", "exchange_rate", "host"}
    return Calibration(machine, frozenset(measured))


def fit(columns: Sequence[Sequence[float]], seconds: Sequence[float], scale: Sequence[float]) -> list[float]:
    """Numbers x >= 0 for which columns · x is nearest to the seconds, by relative error.

    Args:
        columns: [times][numbers], how much of each number is in each time.
        seconds: [times], above 0.
        scale: numbers, whose proportions what cannot be told apart keeps.
    """
    units = np.where(np.array(scale) > 0, scale, 1e-10)
    table = np.array(columns) * units / np.array(seconds)[:, None]
    found, free = np.zeros(len(units)), np.arange(len(units))
    while len(free):
        solution = np.linalg.lstsq(table[:, free], np.ones(len(seconds)), rcond=1e-9)[0]
        if (solution >= 0).all():
            found[free] = solution
            break
        free = np.delete(free, solution.argmin())
    return [float(x) for x in found * units]


def _rate(per_unit: float, otherwise: float) -> float:
    """Its inverse; where the times show none of it, as shipped."""
    return 1 / per_unit if per_unit > 0 else otherwise


class _Clock:
    """Seconds of a call: on the device, by replays of a CUDA graph where it can be captured; of the slowest rank."""

    def __init__(self, device: torch.device, group: dist.ProcessGroup | None) -> None:
        self.device, self.group = device, group
        self.cuda = device.type == "cuda"

    def seconds(self, call: Callable[[], Any], calls: int, capturable: bool = True) -> float:
        for _ in range(2):
            call()
        self._line_up()
        if self.cuda and capturable:
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, capture_error_mode="thread_local"):
                for _ in range(calls):
                    call()
            return self._slowest(self._timed(graph.replay)) / calls

        def many() -> None:
            for _ in range(calls):
                call()

        return self._slowest(self._timed(many)) / calls

    def host_seconds(self, call: Callable[[], Any], calls: int) -> float:
        """Until it returns, of calls in a row."""
        for _ in range(3):
            call()
        samples = []
        for _ in range(ROUNDS):
            self._line_up()
            begin = time.perf_counter()
            for _ in range(calls):
                call()
            samples.append(time.perf_counter() - begin)
        self._line_up()
        return self._slowest(statistics.median(samples)) / calls

    def _timed(self, call: Callable[[], Any]) -> float:
        call()
        samples = []
        for _ in range(ROUNDS):
            self._line_up()
            if self.cuda:
                begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                begin.record()
                call()
                end.record()
                torch.cuda.synchronize(self.device)
                samples.append(begin.elapsed_time(end) / 1e3)
            else:
                start = time.perf_counter()
                call()
                samples.append(time.perf_counter() - start)
        return statistics.median(samples)

    def _line_up(self) -> None:
        if self.cuda:
            torch.cuda.synchronize(self.device)
        if self.group is not None:
            dist.barrier(self.group)
        if self.cuda:
            torch.cuda.synchronize(self.device)

    def _slowest(self, seconds: float) -> float:
        if self.group is None:
            return seconds
        longest = torch.tensor([seconds], dtype=torch.float64, device=self.device)
        dist.all_reduce(longest, dist.ReduceOp.MAX, self.group)
        return float(longest)


def _request(shapes: Shapes, device: torch.device) -> Request:
    covers, dim = frozenset({"full", "causal"}), shapes.head_dim
    return Request(device.type, compute_capability_of(device), shapes.dtype, covers, dim, dim, False, False)


def _random(shapes: Shapes, device: torch.device, heads: int, rows: int) -> Tensor:
    """[1, heads, rows, D], in memory as a projection leaves it."""
    return torch.randn(1, rows, heads, shapes.head_dim, dtype=shapes.dtype, device=device).transpose(1, 2)


def _calls(shapes: Shapes, rows: int) -> int:
    return max(1, shapes.calls * min(shapes.rows) // rows)


def _copies(clock: _Clock, shapes: Shapes) -> tuple[list[list[float]], list[float]]:
    """Of tensors of q's sizes: bytes read and written, and a launch."""
    columns, seconds = [], []
    for rows in shapes.rows:
        x = _random(shapes, clock.device, shapes.heads, rows)
        y = torch.empty_like(x)
        columns.append([2.0 * x.nbytes, 1.0])
        seconds.append(clock.seconds(lambda x=x, y=y: y.copy_(x), shapes.calls))  # type: ignore[misc]
    return columns, seconds


def _rates(clock: _Clock, shapes: Shapes, kernel: Kernel) -> tuple[KernelRate, KernelRate]:
    """Of squares that are full, causal and, where the kernel has them, windows; and of half as many keys."""
    columns: list[list[float]] = []
    times: tuple[list[float], list[float]] = ([], [])
    flops = 4.0 * shapes.heads * shapes.head_dim
    for rows in shapes.rows:
        tiles = [(rows, FULL), (rows // 2, FULL), (rows, CAUSAL)]
        tiles += [(rows, Band(rows // 4, 0))] if "window" in kernel.capability.covers else []
        for keys, band in tiles:
            per_row = float(rows * shapes.heads)
            cut, banded = per_row * (band != FULL), per_row * (band.left is not None)
            columns.append([band.count(rows, keys) * flops, per_row, cut, banded, 1.0])
            for calls, seconds in zip(_passes(clock, shapes, kernel, rows, keys, band), times, strict=True):
                seconds.append(clock.seconds(calls, _calls(shapes, rows)))
    rates = []
    shipped = H200.kernels.get(kernel.name, H200.kernels["fa4"])
    for of_pass, seconds, forwards in zip(shipped, times, (1.0, 2.5), strict=True):
        table = [[forwards * pairs, *others] for pairs, *others in columns]
        scale = [1 / of_pass.rate, of_pass.per_row, of_pass.per_cut_row, of_pass.per_band_row, of_pass.per_call]
        per_flop, *others = fit(table, seconds, scale)
        rates.append(KernelRate(_rate(per_flop, of_pass.rate), *others))
    forward, backward = rates
    return forward, backward


def _passes(
    clock: _Clock, shapes: Shapes, kernel: Kernel, rows: int, keys: int, band: Band
) -> tuple[Callable[[], Any], Callable[[], Any]]:
    """A forward and a backward of one tile, without what merges it with others."""
    q, dout = (_random(shapes, clock.device, shapes.heads, rows) for _ in range(2))
    k, v = (_random(shapes, clock.device, shapes.kv_heads, keys) for _ in range(2))
    scores, tiles = Scores(shapes.head_dim**-0.5), [KernelTile((0, rows), (0, keys), band)]

    def forward() -> Any:
        running = kernel.begin_forward(q, shapes.head_dim, scores)
        running.step(k, v, tiles)
        return running

    out, lse = forward().finish()
    delta = make_delta(dout, out, None) if kernel.uses_delta else None

    def backward() -> Any:
        running = kernel.begin_backward(dout, q, None if kernel.uses_delta else out, lse, delta, scores)
        return running, running.step(k, v, tiles)

    return forward, backward


def _fetches(
    clock: _Clock, shapes: Shapes, machine: Machine, group: dist.ProcessGroup
) -> tuple[list[list[float]], list[float]]:
    """Of all ranks' keys and values, in one stage: bytes received, and barriers; the rest is known."""
    columns, seconds, size = [], [], group.size()
    for rows in shapes.rows:
        make = METHODS["all_gather"].make_schedule
        schedule = make(Contiguous(), Mask(causal=False), rows * size, size, group.rank(), False)
        k, v = (_random(shapes, clock.device, shapes.kv_heads, rows) for _ in range(2))

        def fetch(k: Tensor = k, v: Tensor = v, schedule: Any = schedule) -> None:
            made = make_transport(machine.transport, group, schedule, clock.device, copy_together)
            with closing(made) as transport:
                incoming = transport.fetch((k, v), schedule.route)
                for _ in schedule.route.stages:
                    incoming.next()

        row_bytes = (k.nbytes + v.nbytes) / rows
        received = sum(num_rows(ranges) for stage in schedule.route.stages for _, ranges in stage.fetch)
        known = 2 * rows * row_bytes / machine.memory_rate + size * machine.per_launch
        columns.append([received * row_bytes, 2 * math.log2(size)])
        found = clock.seconds(fetch, shapes.calls, machine.transport == "symmetric_memory")
        seconds.append(max(found - known, found / 10))
    return columns, seconds


def _exchanges(
    clock: _Clock, shapes: Shapes, machine: Machine, group: dist.ProcessGroup
) -> tuple[list[list[float]], list[float]]:
    """Of q, k and v, heads against rows, in zigzag: bytes; the rest is known."""
    columns, seconds, size = [], [], group.size()
    of_kv = max(1, shapes.kv_heads // size)
    for rows in shapes.rows:
        layout = ZigZag()
        runs = [layout.runs(rows * size, size, rank) for rank in range(size)]
        pieces = [
            [slice(run.start, run.start + run.length) for run in of_rank if isinstance(run, Run)] for of_rank in runs
        ]
        order = torch.cat([run.positions() for of_rank in runs for run in of_rank]).to(clock.device)
        parts = [
            by_rank(_random(shapes, clock.device, size * heads, rows), size)
            for heads in (max(1, shapes.heads // size), of_kv, of_kv)
        ]

        def exchange(parts: Any = parts, order: Tensor = order, pieces: Any = pieces, rows: int = rows) -> None:
            with closing(make_swaps(machine.transport, group, rows * size, clock.device)) as swaps:
                HeadExchange(group, [rows] * size, order, pieces).to_heads(swaps, parts)

        pulls = machine.transport == "symmetric_memory"
        launches = 1 + (2 * size if pulls else 2)  # packed, and pulled to places, or moved and put in order
        known = launches * machine.per_launch + 2 * machine.per_barrier * math.log2(size)
        columns.append([float(sum(x.nbytes for x in parts))])
        found = clock.seconds(exchange, shapes.calls, pulls)
        seconds.append(max(found - known, found / 10))
    return columns, seconds


def _host(clock: _Clock, shapes: Shapes, kernel: str, group: dist.ProcessGroup) -> tuple[HostTime, HostTime]:
    """Of calls with few rows: of each rank's own, by the ring, by all-gather and by Ulysses."""
    rows, size = min(shapes.rows), group.size()
    heads = -(-shapes.heads // size) * size
    inputs = [_random(shapes, clock.device, n, rows).requires_grad_() for n in (heads, heads, heads)]
    dout = _random(shapes, clock.device, heads, rows)
    full, near = Mask(causal=False), Mask(documents=torch.arange(rows * size) // rows)
    cases = [(method, full) for method in ("ring", "all_gather", "ulysses")]
    cases += [("ring", near)] if "segments" in KERNELS[kernel].capability.covers else []
    columns, forwards, backwards = [], [], []
    for method, mask in cases:
        made = METHODS[method].make_schedule(Contiguous(), mask, rows * size, size, group.rank(), near is mask)
        stages = made.route.stages
        calls = len(made.local_tiles) + sum(len(stage.tiles) for stage in stages)
        columns.append([1.0, calls, len(stages), 2.0 * METHODS[method].swaps])

        def forward(method: str = method, mask: Mask = mask) -> Any:
            return attention(*inputs, mesh=group, layout=Contiguous(), mask=mask, kernel=kernel, method=method)

        def both(forward: Callable[[], Any] = forward) -> Any:
            return torch.autograd.grad(forward(), inputs, dout)

        one = clock.host_seconds(forward, shapes.calls)
        forwards.append(one)
        backwards.append(max(clock.host_seconds(both, shapes.calls) - one, one / 10))
    times = []
    for shipped, seconds in ((H200.host_forward, forwards), (H200.host_backward, backwards)):
        times.append(HostTime(*fit(columns, seconds, [getattr(shipped, field.name) for field in fields(HostTime)])))
    of_forward, of_backward = times
    return of_forward, of_backward


def table(found: Calibration, shipped: Machine = H200) -> str:
    """The numbers in lines of less than 100 columns: as fitted, and as they come with cp_mesh."""
    machine, lines = found.machine, [["", "fitted", "shipped"]]
    for name, rates in machine.kernels.items():
        for which, rate in zip(("forward", "backward"), rates, strict=True):
            known = shipped.kernels.get(name)
            of_shipped = None if known is None else known[which == "backward"]
            for field in fields(KernelRate):
                unit = "TFLOP/s" if field.name == "rate" else "us" if field.name == "per_call" else "ns"
                words = f"{name} {which}: {field.name.replace('_', ' ')}, {unit}"
                figures = [getattr(x, field.name) if x else None for x in (rate, of_shipped)]
                lines.append([words, *(_shown(x, unit) for x in figures)])
    for name in FITTED:
        unit = "GB/s" if name.endswith("rate") else "us"
        fitted = getattr(machine, name) if name in found.measured else None
        lines.append([f"{name.replace('_', ' ')}, {unit}", _shown(fitted, unit), _shown(getattr(shipped, name), unit)])
    for name in ("host_forward", "host_backward"):
        for field in fields(HostTime):
            fitted = getattr(getattr(machine, name), field.name) if "host" in found.measured else None
            words = f"{name.replace('_', ' ')}: {field.name.replace('_', ' ')}, us"
            lines.append([words, _shown(fitted, "us"), _shown(getattr(getattr(shipped, name), field.name), "us")])
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    first = f"{machine.name}, {machine.transport}; - was not measured"
    left, *right = widths
    shown = [f"{words.ljust(left)}  {a.rjust(right[0])}  {b.rjust(right[1])}" for words, a, b in lines]
    return "\n".join([first, *shown])


_UNITS = {"TFLOP/s": 1e-12, "GB/s": 1e-9, "us": 1e6, "ns": 1e9}


def _shown(x: float | None, unit: str) -> str:
    return "-" if x is None else f"{x * _UNITS[unit]:.3g}"


def main(argv: Sequence[str] | None = None) -> None:
    cuda = torch.cuda.is_available()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda" if cuda else "cpu")
    parser.add_argument(
        "--dtype", default="bfloat16" if cuda else "float32", choices=("bfloat16", "float16", "float32")
    )
    parser.add_argument("--heads", default="32/8", help="query heads/kv heads per rank")
    parser.add_argument("--head-dim", type=int, default=128)
    parser.add_argument("--rows", type=int, nargs="+", default=[1024, 2048, 4096, 8192, 16384], help="rows per rank")
    parser.add_argument("--kernel", nargs="+", default=[], choices=list(KERNELS))
    parser.add_argument("--calls", type=int, default=10, help="calls that are timed together")
    parser.add_argument("--out", type=Path, default=Path("machine.json"), help="output file")
    args = parser.parse_args(argv)
    device, group = torch.device(args.device), None
    if args.device == "cuda":
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)))
        torch.cuda.set_device(device)
    if "RANK" in os.environ:
        dist.init_process_group("nccl" if args.device == "cuda" else "gloo")
        group = dist.group.WORLD
    heads, kv_heads = map(int, args.heads.split("/"))
    shapes = Shapes(sorted(args.rows), heads, kv_heads, args.head_dim, getattr(torch, args.dtype), args.calls)
    found = calibrate(shapes, device, args.kernel, group)
    if group is None or dist.get_rank() == 0:
        print(table(found))
        write_machine(found.machine, args.out)
        print(f"MEASURED: {found.machine.name}, written to {args.out}")
    if group is not None:
        dist.barrier()
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
