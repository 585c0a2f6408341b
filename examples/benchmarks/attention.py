"""Time context-parallel attention, forward and backward, beside its floor and its rivals in one run.

    torchrun --nproc-per-node 4 examples/benchmarks/attention.py --csv attention.csv       # everything, on 4 GPUs
    torchrun --nproc-per-node 8 examples/benchmarks/attention.py --grid magi --csv magi.csv

A correctness gate runs first; contestants that fail it are not timed. In each repeat every contestant runs once, after
a barrier. A time is that of the slowest rank; a row has the median, minimum and maximum over the repeats. "eager" rows
time single calls, launches included. "queued" rows (``--queued``) time calls in sequence without a wait, as in
training: some forwards, then one backward through all of them. "graph" rows (``--graph``) time replays of CUDA graphs.
Python's garbage collector is off meanwhile, as in trainers, which collect between steps. "floor/best" takes the fastest
kernel for each pass. `report.COLUMNS` describes the columns.

``--grid magi`` has the shapes, masks and document lengths of MagiAttention's benchmark (SandAI-org/MagiAttention,
exps/dist_attn/benchmark_conf.py at 2c641357): 64/8 heads of 128, bf16, 8K rows a GPU (16K of H200s and B200s), full and
causal masks, with and without packed documents. That benchmark takes the mean of 20 packs, this one times one pack.
TFLOP/s count the same pairs.

Rivals run if they are installed, all on one kernel: wheels of ring-flash-attn, axolotl-ringmaster (whose kernels come
from a hub) and deepspeed (0.19.8, built with DS_BUILD_OPS=0), the last two with Transformers. MagiAttention and
TransformerEngine, which have to be built for CUDA, are not run.
"""

from __future__ import annotations

import argparse
import fnmatch
import gc
import math
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from datetime import timedelta
from importlib import import_module
from itertools import chain
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(Path(__file__).parent)]  # a checkout that is not installed

from contestants import DOCUMENTS, Case, Contestant, Inputs, Run, all_contestants, default_patterns  # noqa: E402
from raw_kernels import RAW_KERNELS, present_kernels  # noqa: E402
from report import PASSES, RESULTS, Entrant, Report, Times, append, machine, options  # noqa: E402

from cp_mesh import Contiguous, Mask  # noqa: E402
from cp_mesh import attention as cp_attention  # noqa: E402
from cp_mesh.comm.exchange import choose_transport, release  # noqa: E402
from cp_mesh.comm.groups import known_parts  # noqa: E402
from cp_mesh.kernels.scores import Scores  # noqa: E402
from cp_mesh.tools.verification.dense import dense_attention as plain_products  # noqa: E402

T = TypeVar("T")

MASKS = ("causal", "full", "window1024", *DOCUMENTS)
GRIDS = {"magi": {"heads": ["64/8"], "mask": ["full", "causal", "varlen_full", "varlen_causal"], "local_len": [8192]}}
"""Options by the name of a grid; what the command line says goes first."""
OWN_FACTOR, OWN_ROUNDING = 1.5, 1e-6  # of the same kernel's error on one device; of the signal, for fp32 sums
PLAIN_FACTOR = 2.0  # of the error of plain products of the dtype: what kernels may have on one device, and we sharded
RIVALS_ERROR = 2e-2
LEAST_REPEATS = 2
LEAST_QUEUED = 4  # of a single call the time until its first kernel counts, which is hidden in training
LONG_MS = 200.0  # from here on forward and backward are parts of one timed region: a barrier more would change nothing


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = options(__doc__, time_limit=True)
    add = parser.add_argument
    add("--local-len", type=int, nargs="+", help="rows per rank, even")
    add("--heads", nargs="+", help="query heads/kv heads")
    add("--head-dim", type=int)
    add("--mask", choices=MASKS, nargs="+")
    add("--grid", choices=GRIDS, help="heads, masks and rows of another project's benchmark")
    add("--contestants", nargs="+", default=["default"], help='patterns of names; "default" is a representative choice')
    add("--kernels", nargs="+", help="kernels of the default contestants (default: the best)")
    add("--list", action="store_true", help="print all names (the chosen ones with a star) and exit")
    add("--repeats", type=int, default=7)
    add("--seconds-per-case", type=float, default=10.0, help="run fewer repeats if they take longer")
    add("--graph", action="store_true", help="also time replays of CUDA graphs")
    add("--queued", action="store_true", help="also time eager calls in sequence")
    add("--graph-max-len", type=int, default=16384, help="local length up to which graphs are timed")
    add("--gate-len", type=int, help="rows per rank in the correctness gate")
    args = parser.parse_args(argv)
    cuda = args.device == "cuda"
    for name, values in GRIDS.get(args.grid, {}).items():
        setattr(args, name, getattr(args, name) or values)
    args.mask = args.mask or ["causal", "full"]
    args.local_len = args.local_len or ([1024, 4096, 16384, 65536] if cuda else [64])
    args.heads = args.heads or (["32/8", "32/32"] if cuda else ["4/2"])
    args.head_dim = args.head_dim or (128 if cuda else 16)
    args.gate_len = args.gate_len or (512 if cuda else 64)
    if any(length % 2 for length in [*args.local_len, args.gate_len]):
        parser.error("lengths must be even: zigzag halves them")
    return args


class Ranks:
    """The group, and what its ranks have to do together."""

    def __init__(self, device_type: str, one_gpu: bool = False) -> None:
        """``one_gpu``: all ranks on the first GPU, where they take turns."""
        place = 0 if one_gpu else int(os.environ["LOCAL_RANK"])
        self.device = torch.device("cuda", place) if device_type == "cuda" else torch.device("cpu")
        options: dict[str, Any] = {"backend": "gloo"}
        if device_type == "cuda":
            torch.cuda.set_device(self.device)
            options = {"backend": "nccl", "device_id": self.device}
        if one_gpu:
            sys.path.append(str(ROOT / "tests"))
            import_module("ranks").join_on_gpus(one_gpu=True)
        else:
            dist.init_process_group(timeout=timedelta(minutes=3), **options)
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self.mesh: DeviceMesh = init_device_mesh(device_type, (self.size,), mesh_dim_names=("cp",))
        self.alone = init_device_mesh(device_type, (self.size, 1), mesh_dim_names=("others", "alone"))["alone"]

    def reduce(self, values: Any, op: dist.ReduceOp.RedOpType) -> Tensor:
        """float64 on the CPU, of the shape of values."""
        tensor = torch.as_tensor(values, dtype=torch.float64).to(self.device)
        dist.all_reduce(tensor, op)
        return tensor.cpu()

    def largest(self, values: Any) -> Tensor:
        return self.reduce(values, dist.ReduceOp.MAX)

    def total(self, values: Any) -> Tensor:
        return self.reduce(values, dist.ReduceOp.SUM)

    def attempt(self, call: Callable[[], T]) -> tuple[T | None, str | None]:
        """What a call returns, or the problem of any rank with it: a contestant's failure is its result.

        No rank goes on without the others. A rank that fails between collectives which others wait in ends the run.
        """
        result, problem = None, None
        try:
            result = call()
            self.synchronize()
        except Exception as error:
            problem = describe(error)
        if not self.largest(float(problem is not None)):
            return result, None
        problems: list[str | None] = [None] * self.size
        dist.all_gather_object(problems, problem)
        return None, next(text for text in problems if text is not None)

    def synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    def line_up(self) -> None:
        """All ranks idle, at the same time."""
        self.synchronize()
        dist.barrier()
        self.synchronize()

    def mark(self) -> Any:
        """A point in time, on the device."""
        if self.device.type == "cpu":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def print(self, *words: object) -> None:
        if self.rank == 0:
            print(*words, flush=True)

    def append(self, path: Path | None, columns: Sequence[str], rows: Sequence[Mapping[str, Any]]) -> None:
        """To the CSV, if there is one."""
        if path is not None and self.rank == 0:
            append(path, columns, rows)

    def release(self, *groups: dist.ProcessGroup) -> None:
        """Give back what no contestant holds, also of the groups: the next is charged for its own needs only."""
        gc.collect()
        for group in groups:
            release(group)
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def end(self, failed: bool) -> None:
        dist.barrier()  # Python must not end while a thread of gloo still holds tensors of the last collective
        dist.destroy_process_group()
        sys.exit(failed)


def in_turns(
    ranks: Ranks, calls: Mapping[str, Sequence[Callable[[], Any]]], repeats: int, num_calls: int
) -> dict[str, list[list[float]]]:
    """By contestant, for each of its calls: milliseconds of one of ``num_calls`` on the slowest rank, by repeat."""
    times: dict[str, list[list[float]]] = {name: [[] for _ in of_name] for name, of_name in calls.items()}
    for repeat in range(repeats + 1):  # the first one warms up
        for name, of_name in calls.items():
            for found, call in zip(times[name], of_name, strict=True):
                ranks.line_up()
                begin = ranks.mark()
                for _ in range(num_calls):
                    call()
                end = ranks.mark()
                ranks.synchronize()
                ms = float(ranks.largest(milliseconds(begin, end))) / num_calls
                if repeat > 0:
                    found.append(ms)
    return times


def milliseconds(begin: Any, end: Any) -> float:
    return (end - begin) * 1e3 if isinstance(begin, float) else begin.elapsed_time(end)


def describe(error: Exception) -> str:
    text = " ".join(str(error).split())
    kind = "unsupported" if isinstance(error, NotImplementedError) else f"error: {type(error).__name__}"
    return f"{kind}: {text[:300]}"


def dense_attention(x: Inputs, mask: Mask, scale: float) -> tuple[Tensor, ...]:
    """out, dq, dk, dv of the whole sequence by plain products of the dtype of ``x``; [1, S, heads, D]."""
    q, k, v, dout = (y.transpose(1, 2) for y in (x.q, x.k, x.v, x.dout))
    dense = plain_products(q, k, v, dout, mask.to(q.device), Scores(scale))
    return tuple(getattr(dense, name).transpose(1, 2) for name in RESULTS)


def random_inputs(case: Case, length: int, seed: int) -> Inputs:
    """Standard normal; the same on every rank for the same seed."""
    generator = torch.Generator(case.device).manual_seed(seed)
    options: dict[str, Any] = {"generator": generator, "device": case.device, "dtype": case.dtype}
    heads = (case.heads, case.kv_heads, case.kv_heads, case.heads)
    return Inputs(*(torch.randn(1, length, n, case.head_dim, **options) for n in heads))


@dataclass
class Verdict:
    """What the gate found of one contestant: relative errors of out, dq, dk, dv, and why it may not be timed."""

    errors: list[float] = field(default_factory=list)
    problem: str | None = None


class Gate:
    """Correctness before speed: everyone computes one short sequence, and is compared with float64."""

    def __init__(self, ranks: Ranks, case: Case) -> None:
        """``case`` has the length of the gate's shards."""
        self._ranks, self._case = ranks, case
        self._whole = whole = random_inputs(case, case.seq_len, seed=0)
        wide = Inputs(*(y.double() for y in (whole.q, whole.k, whole.v, whole.dout)))
        self._exact = dense_attention(wide, case.mask, case.scale)
        plain = self._squares(dense_attention(whole, case.mask, case.scale), self._exact)
        self._plain = [PLAIN_FACTOR * math.sqrt(error / signal) + OWN_ROUNDING for error, signal in plain]
        self._one_device: dict[str, list[float]] = {}

    def one_device(self, kernel: str) -> list[float]:
        """Errors of a kernel that sees the whole sequence."""
        if kernel not in self._one_device:
            x, case = self._whole, self._case
            if kernel in RAW_KERNELS and not case.pattern:
                raw = RAW_KERNELS[kernel]
                out, lse = raw.forward(x.q, x.k, x.v, case.causal, case.scale)
                gradients = raw.backward(x.dout, x.q, x.k, x.v, out, lse, case.causal, case.scale, None)
            else:
                qkv = [y.detach().requires_grad_() for y in (x.q, x.k, x.v)]
                options: dict[str, Any] = {"mask": case.mask, "kernel": kernel, "layout": Contiguous()}
                out = cp_attention(*qkv, mesh=self._ranks.alone, seq_dim=1, **options)
                gradients = torch.autograd.grad(out, qkv, x.dout)
            squares = self._squares((out.detach(), *gradients), self._exact)
            self._one_device[kernel] = [math.sqrt(error / signal) for error, signal in squares]
        return self._one_device[kernel]

    def try_out(self, contestant: Contestant) -> Verdict:
        verdict = Verdict(problem=contestant.unsupported(self._case))
        if verdict.problem:
            return replace(verdict, problem=f"not run: {verdict.problem}")
        case, allowed = self._case, [RIVALS_ERROR] * 4
        if contestant.kernel and (contestant.is_ours or not contestant.distributed):
            kernel = contestant.kernel
            errors, verdict.problem = self._ranks.attempt(lambda: self.one_device(kernel))
            if errors is None:
                return verdict
            if not contestant.distributed:
                return self._judge(errors, self._plain)
            own = [OWN_FACTOR * error + OWN_ROUNDING for error in errors]
            allowed = list(map(min, own, self._plain))
        rows = contestant.layout(case).positions(case.seq_len, case.cp_size, case.cp_rank).to(case.device)
        x = Inputs(*(getattr(self._whole, name)[:, rows].contiguous() for name in ("q", "k", "v", "dout")))

        def compute(run: Run) -> list[list[float]]:
            with contestant.active(case):
                state = run.forward()
                gradients = run.backward(state)
            return self._squares(run.results(state, gradients), [y[:, rows] for y in self._exact])

        run, verdict.problem = set_up(self._ranks, case, contestant, x)
        if run is None:
            return verdict
        squares, verdict.problem = self._ranks.attempt(lambda: compute(run))
        if squares is None:
            return verdict
        errors = [math.sqrt(error / signal) for error, signal in self._ranks.total(squares).tolist()]
        return self._judge(errors, allowed)

    def _judge(self, errors: list[float], allowed: list[float]) -> Verdict:
        named = zip(RESULTS, errors, allowed, strict=True)
        wrong = [f"{name} {error:.1e} > {most:.1e}" for name, error, most in named if not error <= most]
        return Verdict(errors, f"failed the gate: {', '.join(wrong)}" if wrong else None)

    def _squares(self, results: Iterable[Tensor], exact: Iterable[Tensor]) -> list[list[float]]:
        """Sums of squares of error and signal, of each result."""
        return [
            [(x.double() - y).square().sum().item(), y.square().sum().item()]
            for x, y in zip(results, exact, strict=True)
        ]


class GraphRun(Run):
    """Replays of another run's calls. Captured on one stream, after warm-up calls on it."""

    def __init__(self, run: Run) -> None:
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(2):
                run.both()
        torch.cuda.current_stream().wait_stream(stream)
        torch.cuda.synchronize()
        self._graphs = [torch.cuda.CUDAGraph() for _ in PASSES]
        # Threads of NCCL and of autograd may make calls that a capture of theirs could not hold.
        options: dict[str, Any] = {"stream": stream, "capture_error_mode": "thread_local"}
        with torch.cuda.graph(self._graphs[0], **options):
            self.state = run.forward()
        with torch.cuda.graph(self._graphs[1], pool=self._graphs[0].pool(), **options):
            self.gradients = run.backward(self.state)
        with torch.cuda.graph(self._graphs[2], **options):
            self._kept = run.both()

    def forward(self) -> None:
        self._graphs[0].replay()

    def backward(self, state: None) -> None:
        self._graphs[1].replay()

    def both(self) -> None:
        self._graphs[2].replay()


def set_up(ranks: Ranks, case: Case, contestant: Contestant, inputs: Inputs) -> tuple[Run | None, str | None]:
    """By itself, before any rank enters a collective of the contestant's."""

    def call() -> Run:
        with contestant.active(case):
            return contestant.setup(case, inputs)

    return ranks.attempt(call)


def warm_up(ranks: Ranks, case: Case, inputs: Inputs, entrant: Entrant) -> None:
    """Set up and run once: plans are made, kernels compiled; memory is measured."""
    cuda, contestant = case.device.type == "cuda", entrant.contestant

    def call(run: Run) -> list[float]:
        before = torch.cuda.memory_allocated() if cuda else 0
        if cuda:
            torch.cuda.reset_peak_memory_stats()
        with contestant.active(case):
            state = run.forward()
            gradients = run.backward(state)
        ranks.synchronize()
        del state, gradients
        extra = torch.cuda.max_memory_allocated() - before - case.output_bytes if cuda else 0
        return [max(0, extra), contestant.symmetric_bytes()]

    run, problem = set_up(ranks, case, contestant, inputs)
    if run is not None:
        figures, problem = ranks.attempt(lambda: call(run))
    if problem or figures is None:
        entrant.status = problem or "error"
        return
    entrant.run = run
    extra, entrant.symmetric_bytes = ranks.largest(figures).tolist()
    entrant.extra_bytes = extra + entrant.symmetric_bytes


def capture(ranks: Ranks, case: Case, entrant: Entrant) -> str | None:
    """Make the CUDA graphs of a contestant, or say why there are none."""
    run, contestant = entrant.run, entrant.contestant
    assert run is not None

    def call() -> tuple[tuple[Tensor, ...], GraphRun]:
        with contestant.active(case):
            state = run.forward()
            eager = run.results(state, run.backward(state)) if contestant.distributed else ()
            del state  # its autograd nodes belong to the current stream, and would draw it into the capture
            return eager, GraphRun(run)

    captured, problem = ranks.attempt(call)
    if captured is None:
        return f"capture: {problem}"
    eager, entrant.graph = captured
    if contestant.distributed:
        # Only now that all ranks captured: replays meet in barriers on the device.
        entrant.graph.forward()
        entrant.graph.backward(None)
        ranks.synchronize()
        replayed = run.results(entrant.graph.state, entrant.graph.gradients)
        apart = [float((x - y).float().norm() / y.float().norm()) for x, y in zip(replayed, eager, strict=True)]
        # dq is summed by atomics, in any order
        if not float(ranks.largest(max(apart))) < 1e-2:
            entrant.graph = None
            return "failed the gate: a replay computes something else"
    return None


def measure(ranks: Ranks, case: Case, contestant: Contestant, run: Run, times: Times) -> list[float]:
    """fwd, bwd and fwdbwd of one call in ms, host time of fwd and bwd in us, on this rank."""
    calls = range(times.calls)
    with contestant.active(case):
        ranks.line_up()
        marks, clock = [ranks.mark()], [time.perf_counter()]
        for _ in calls:
            state = run.forward()
        clock.append(time.perf_counter())
        marks.append(ranks.mark())
        if times.apart:
            ranks.line_up()
            marks.append(ranks.mark())
        clock.append(time.perf_counter())
        for _ in calls:
            gradients = run.backward(state)
            if times.calls == 1:
                state = None  # as in training, where the graph goes with its backward
        clock.append(time.perf_counter())
        marks.append(ranks.mark())
        del state, gradients
        if times.apart:
            ranks.line_up()
            marks.append(ranks.mark())
            for _ in calls:
                run.both()
            marks.append(ranks.mark())
        ranks.synchronize()
    pairs = [(0, 1), (2, 3), (4, 5)] if times.apart else [(0, 1), (1, 2), (0, 2)]
    host = [(clock[1] - clock[0]) * 1e6, (clock[3] - clock[2]) * 1e6]
    return [x / times.calls for x in [*(milliseconds(marks[a], marks[b]) for a, b in pairs), *host]]


def measure_queued(ranks: Ranks, case: Case, contestant: Contestant, run: Run, times: Times) -> list[float]:
    """As `measure`, for calls that follow one another, as layers do; backwards are what both take beyond forwards."""

    def forwards() -> None:
        for _ in range(times.calls):
            run.forward()

    spans = []
    with contestant.active(case):
        for call in (forwards, lambda: run.layers(times.calls)):
            ranks.line_up()
            begin, clock = ranks.mark(), time.perf_counter()
            call()
            spans.append((begin, ranks.mark(), time.perf_counter() - clock))
        ranks.synchronize()
    forward, both = (milliseconds(begin, end) for begin, end, _ in spans)
    host = [spans[0][2] * 1e6, (spans[1][2] - spans[0][2]) * 1e6]
    return [x / times.calls for x in (forward, both - forward, both, *host)]


@contextmanager
def no_garbage_collection() -> Iterator[None]:
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


@no_garbage_collection()
def race(
    ranks: Ranks,
    case: Case,
    runs: Sequence[tuple[Contestant, Run]],
    args: argparse.Namespace,
    calls_ms: float = 0.0,
    measure: Callable[..., list[float]] = measure,
    least_calls: int = 1,
) -> dict[str, Times]:
    """Everyone in turn, as often as the time allows; slowest rank; by name.

    ``calls_ms``: repeat calls to fill that time, ``least_calls`` at least if they are not long.
    """
    all_times = [Times() for _ in runs]

    def one_round() -> list[list[float]]:
        mine = [measure(ranks, case, *entry, times) for entry, times in zip(runs, all_times, strict=True)]
        return ranks.largest(mine).tolist()

    begin = time.perf_counter()
    first = one_round()
    for times, sample in zip(all_times, first, strict=True):
        times.apart = sample[2] < LONG_MS
        least = least_calls if times.apart else 1
        times.calls = max(least, min(20, int(calls_ms / max(sample[2], 1e-3)))) if calls_ms else 1
    seconds = float(ranks.largest(time.perf_counter() - begin))
    affordable = int(args.seconds_per_case / max(seconds, 1e-9))
    repeats = max(LEAST_REPEATS, min(args.repeats, affordable))
    # The first round still warms up; where rounds are dear it counts.
    rounds = [first] if repeats < args.repeats and not calls_ms else []
    while len(rounds) < repeats:
        rounds.append(one_round())
    for samples in rounds:
        for times, sample in zip(all_times, samples, strict=True):
            times.samples.append(sample)
    return {contestant.name: times for (contestant, _), times in zip(runs, all_times, strict=True)}


def choose(args: argparse.Namespace, field: list[Contestant], defaults: list[str]) -> list[Contestant]:
    patterns = [p for pattern in args.contestants for p in (defaults if pattern == "default" else [pattern])]
    names = [contestant.name for contestant in field]
    if strangers := [p for p in args.contestants if p != "default" and not fnmatch.filter(names, p)]:
        raise SystemExit(f"no contestant is named {', '.join(strangers)}; --list shows all")
    return [contestant for contestant in field if any(fnmatch.fnmatch(contestant.name, p) for p in patterns)]


def run_case(
    ranks: Ranks, case: Case, chosen: list[Contestant], verdicts: dict[str, Verdict], args: Any, report: Report
) -> None:
    inputs = random_inputs(case, case.local_len, seed=1 + ranks.rank)
    entrants = [Entrant(c, verdicts[c.name].errors) for c in chosen if c.name in verdicts]
    for entrant in entrants:
        reason = entrant.contestant.unsupported(case)
        problem = verdicts[entrant.contestant.name].problem or (f"not run: {reason}" if reason else None)
        if problem:
            entrant.status = problem
        else:
            warm_up(ranks, case, inputs, entrant)
    running = [(entrant.contestant, entrant.run) for entrant in entrants if entrant.run is not None]
    report.add(case, "eager", entrants, race(ranks, case, running, args) if running else {}, {})
    if running and args.queued:
        times = race(ranks, case, running, args, 30.0, measure_queued, LEAST_QUEUED)
        report.add(case, "queued", [entrant for entrant in entrants if entrant.run is not None], times, {})
    if args.graph and case.device.type == "cuda" and case.local_len <= args.graph_max_len:
        able = [entrant for entrant in entrants if entrant.run is not None and entrant.contestant.capturable]
        problems = {entrant.contestant.name: capture(ranks, case, entrant) for entrant in able}
        graphs = [(entrant.contestant, entrant.graph) for entrant in able if entrant.graph is not None]
        times = race(ranks, case, graphs, args, calls_ms=5.0) if graphs else {}
        report.add(case, "graph", able, times, {name: text for name, text in problems.items() if text})
    for entrant in entrants:
        entrant.run = entrant.graph = None


def main(argv: Sequence[str] | None = None) -> None:
    args = parse_arguments(argv)
    ranks = Ranks(args.device)
    begin = time.perf_counter()
    present = present_kernels(ranks.device)
    if not present:
        raise SystemExit(f"no kernel of {', '.join(RAW_KERNELS)} runs here")
    transport = choose_transport("auto", ranks.mesh.get_group(), ranks.device)
    field = all_contestants(ranks.mesh, present)
    defaults = default_patterns(args.kernels or present[:1], present, transport)
    if args.grid:  # it has documents
        defaults += [name.replace("/zigzag/", "/balanced/") for name in defaults if "/ring/zigzag/" in name]
    chosen = choose(args, field, defaults)
    if args.list:
        ranks.print("\n".join(f"{'*' if contestant in chosen else ' '} {contestant.name}" for contestant in field))
        dist.destroy_process_group()
        return
    report = Report(args.csv, machine(ranks.device, ranks.size, args.commit) if ranks.rank == 0 else {})
    verdicts: dict[tuple[str, str], dict[str, Verdict]] = {}
    ranks.print(f"{ranks.size} ranks; kernels {', '.join(present)}; transport {transport}; {len(chosen)} contestants")
    for local_len in sorted(args.local_len):
        for heads in args.heads:
            for mask in args.mask:
                spent = float(ranks.largest(time.perf_counter() - begin))
                if spent > args.time_limit:
                    ranks.print(f"time limit: {local_len} {heads} {mask} and what follows is left out")
                    dist.destroy_process_group()
                    return
                num_heads, num_kv_heads = (int(x) for x in heads.split("/"))
                pattern = mask if mask not in ("causal", "full") else ""
                case = Case(
                    num_heads, num_kv_heads, args.head_dim, torch.bfloat16, "full" not in mask, local_len, ranks.size,
                    ranks.rank, ranks.device, pattern,
                )  # fmt: skip
                if (heads, mask) not in verdicts:
                    gate = Gate(ranks, replace(case, local_len=args.gate_len))
                    verdicts[heads, mask] = {contestant.name: gate.try_out(contestant) for contestant in chosen}
                run_case(ranks, case, chosen, verdicts[heads, mask], args, report)
                whole = ranks.mesh.get_group()
                ranks.release(whole, *chain(*known_parts(whole)))
    ranks.print(f"{time.perf_counter() - begin:.0f} s")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
