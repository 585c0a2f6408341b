"""Time flex_attention over cp, forward and backward: causal attention with score functions as users write them.

    torchrun --nproc-per-node 2 examples/benchmarks/flex.py --csv flex.csv

Scores: "none"; "alibi", slopes without a gradient; "distances", a learned bias for each head and distance; "softcap", a
tanh.

Contestants: "cp_mesh", the ring in the zigzag layout with kernel="flex"; "torch mended", PyTorch's own context
parallelism of flex_attention, with its head-tail balance and functions that look up global positions, as a user may
write who knows that PyTorch passes indices of local queries and rearranged keys. "floor" is torch.compile of
flex_attention on one GPU without communication: causal, over as many rows as a rank holds. Its times are scaled to the
pairs of a rank: multiplied by (whole pairs / ranks) / (its own pairs), which is close to the number of ranks.

A gate runs first: out and gradients of ``--gate-rows`` rows per rank, captured tensors included, each compared with
float64. If a contestant fails it or cannot run, its row has only a status. In each repeat every contestant runs
``--calls`` calls in sequence, after a barrier. A time is that of one call on the slowest rank; a row has the median,
minimum and maximum over the repeats. ``of_floor`` is a time over the floor's. ``extra_gib`` is the peak of memory
beyond the inputs, and ``symmetric_gib`` the symmetric memory beside that.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor.parallel import parallelize_module
from torch.nn.attention.flex_attention import create_block_mask
from torch.nn.attention.flex_attention import flex_attention as torch_flex_attention

sys.path[:0] = [str(Path(__file__).resolve().parents[2]), str(Path(__file__).parent)]  # a checkout not installed

from attention import Ranks, in_turns  # noqa: E402
from decoding import bound_of, judge  # noqa: E402
from report import machine, options, spread  # noqa: E402

from cp_mesh import Mask, ZigZag, flex_attention  # noqa: E402
from cp_mesh.comm.exchange import symmetric_memory_bytes  # noqa: E402

SOFTCAP = 20.0
COLUMNS = (
    *("date", "commit", "gpu", "world_size", "torch", "cuda", "cudnn", "nccl", "packages"),
    *("contestant", "score", "rows", "heads_q", "heads_kv", "head_dim", "dtype", "repeats", "calls_per_time"),
    *("fwd_ms", "fwd_ms_min", "fwd_ms_max", "fwdbwd_ms", "fwdbwd_ms_min", "fwdbwd_ms_max"),
    *("of_floor_fwd", "of_floor_fwdbwd", "extra_gib", "symmetric_gib"),
    *("error", "bound", "status"),  # RMS error over RMS of the exact result, in the gate; and what it may be
)
ScoreMod = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]


def causal(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
    return q_idx >= kv_idx


class Function:
    """A score, and its tensors for a whole sequence: the same on every rank.

    Attributes:
        score_mod: of positions.
        learned: what it reads that has a gradient, float32.
    """

    def __init__(self, score: str, seq_len: int, heads: int, device: torch.device) -> None:
        generator = torch.Generator(device).manual_seed(1)
        self.learned: list[Tensor] = []
        if score == "none":
            self.score_mod: ScoreMod = lambda score, b, h, i, j: score
        elif score == "alibi":
            slopes = 2.0 ** -(8 / heads * torch.arange(1, heads + 1, device=device))
            self.score_mod = lambda score, b, h, i, j: score - slopes[h] * (i - j)
        elif score == "distances":
            table = torch.randn(heads, seq_len, generator=generator, device=device)
            self.learned = [table.requires_grad_()]
            self.score_mod = lambda score, b, h, i, j: score + table[h, (i - j).abs()]
        else:
            self.score_mod = lambda score, b, h, i, j: SOFTCAP * torch.tanh(score / SOFTCAP)


SCORES = ("none", "distances", "alibi", "softcap")


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = options(__doc__, time_limit=True)
    add = parser.add_argument
    add("--scores", nargs="+", choices=SCORES, default=list(SCORES))
    add("--rows", type=int, nargs="+", default=[8192, 16384, 2048], help="rows per rank, in this order")
    add("--heads", default="32/8", help="query heads/kv heads")
    add("--head-dim", type=int, default=128)
    add("--dtype", default="bfloat16", choices=("bfloat16", "float16", "float32"))
    add("--contestants", nargs="+", choices=(FLOOR, *CONTESTANTS), default=[FLOOR, *CONTESTANTS])
    add("--kernel", help="kernel of cp_mesh; default: flex, or reference on CPUs")
    add("--gate-rows", type=int, default=2048, help="rows per rank in the gate, a multiple of 128")
    add("--repeats", type=int, default=7)
    add("--calls", type=int, default=5)
    add("--forward", action="store_true", help="without backward: PyTorch has none on CPUs")
    args = parser.parse_args(argv)
    args.kernel = args.kernel or ("flex" if args.device == "cuda" else "reference")
    args.num_heads, args.num_kv_heads = map(int, args.heads.split("/"))
    args.contestants = [name for name in args.contestants if name != FLOOR]  # is always there
    return args


@lru_cache(maxsize=1)
def compiled(device_type: str) -> Callable[..., Tensor]:
    torch._dynamo.config.recompile_limit = 256  # else later cases would silently run uncompiled
    return torch.compile(torch_flex_attention, dynamic=False) if device_type == "cuda" else torch_flex_attention


def ours(function: Function, rows: int, args: argparse.Namespace, ranks: Ranks) -> Callable[..., Tensor]:
    options: dict[str, Any] = {"mesh": ranks.mesh, "seq_dim": 2, "layout": ZigZag(), "mask": Mask()}
    options |= {"method": "ring", "kernel": args.kernel, "enable_gqa": True}
    return lambda q, k, v: flex_attention(q, k, v, function.score_mod, **options)


class Core(nn.Module):
    """What PyTorch's style is applied to."""

    def __init__(self, call: Callable[..., Tensor], score_mod: ScoreMod, block_mask: Any) -> None:
        super().__init__()
        self.call, self.options = call, {"score_mod": score_mod, "block_mask": block_mask, "enable_gqa": True}

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return self.call(q, k, v, **self.options)


def torchs(function: Function, rows: int, args: argparse.Namespace, ranks: Ranks) -> Callable[..., Tensor]:
    from torch.distributed.tensor.experimental._context_parallel._attention import (
        _ContextParallel,
        _create_cp_block_mask,
    )
    from torch.distributed.tensor.experimental._context_parallel._load_balancer import _HeadTailLoadBalancer

    seq_len = rows * ranks.size
    balancer = _HeadTailLoadBalancer(seq_len, ranks.size, ranks.device)
    with torch.compiler.set_stance("force_eager"):  # compiled, its kernel keeps PyTorch's assembler busy for minutes
        block_mask = _create_cp_block_mask(causal, 1, 1, seq_len, seq_len, ranks.mesh, balancer)
    of_keys = balancer._generate_indices()[0].long()
    of_queries = of_keys.chunk(ranks.size)[ranks.rank].contiguous()

    def score_mod(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return function.score_mod(score, b, h, of_queries[q_idx], of_keys[kv_idx])

    core = Core(compiled(args.device), score_mod, block_mask)
    style = _ContextParallel(seq_dim=2, attention_type=_ContextParallel.AttentionType.FLEX)
    return parallelize_module(core, ranks.mesh, style)


def floor(function: Function, rows: int, args: argparse.Namespace, ranks: Ranks) -> Callable[..., Tensor]:
    block_mask = create_block_mask(causal, None, None, rows, rows, device=ranks.device.type)
    return Core(compiled(args.device), function.score_mod, block_mask)


CONTESTANTS: dict[str, Callable[..., Callable[..., Tensor]]] = {"cp_mesh": ours, "torch mended": torchs}
FLOOR = "floor"


def whole_tensors(rows: int, args: argparse.Namespace, ranks: Ranks) -> list[Tensor]:
    """q, k, v, dout of the whole sequence, the same on every rank."""
    generator = torch.Generator(ranks.device).manual_seed(0)
    heads = (args.num_heads, args.num_kv_heads, args.num_kv_heads, args.num_heads)
    shapes = ((1, n, rows * ranks.size, args.head_dim) for n in heads)
    drawn = (torch.randn(shape, generator=generator, device=ranks.device) for shape in shapes)
    return [x.to(getattr(torch, args.dtype)) for x in drawn]


def positions(rows: int, ranks: Ranks) -> Tensor:
    return ZigZag().positions(rows * ranks.size, ranks.size, ranks.rank).to(ranks.device)


class Run:
    """A contestant on one score and number of rows."""

    def __init__(self, name: str, score: str, rows: int, args: argparse.Namespace, ranks: Ranks) -> None:
        size = ranks.size
        self.function = Function(score, rows * size, args.num_heads, ranks.device)
        at = torch.arange(rows, device=ranks.device) if name == FLOOR else positions(rows, ranks)
        local = (x[:, :, at].contiguous() for x in whole_tensors(rows, args, ranks))
        self.q, self.k, self.v, self.dout = local
        self.call = ({FLOOR: floor} | CONTESTANTS)[name](self.function, rows, args, ranks)
        self._leaves = [] if args.forward else [self.q, self.k, self.v, *self.function.learned]
        for x in self.function.learned:
            x.requires_grad_(not args.forward)
        for x in self._leaves:
            x.requires_grad_()

    def forward(self) -> Tensor:
        return self.call(self.q, self.k, self.v)

    def both(self) -> list[Tensor]:
        """out, dq, dk, dv, and gradients of what is learned, this rank's share; with --forward out alone."""
        out = self.forward()
        found = torch.autograd.grad(out, self._leaves, self.dout) if self._leaves else ()
        return [out.detach(), *found]


def ready(name: str, score: str, rows: int, args: argparse.Namespace, ranks: Ranks) -> Run:
    """One that has run. PyTorch's kernels read less far ahead where there is no room for as much as is usual."""
    run = Run(name, score, rows, args, ranks)
    for stages in (2, 1):
        try:
            run.both()
        except Exception as error:
            if "out of resource" not in str(error):
                raise
            run.call.options["kernel_options"] = {"bwd_num_stages": stages}
        else:
            return run
    run.both()
    return run


def exact(score: str, args: argparse.Namespace, ranks: Ranks, dtype: torch.dtype) -> list[Tensor]:
    """out, dq, dk, dv of this rank's rows, and gradients of what is learned, of one device, by products of a dtype.

    As kernels do, and autograd does not: gradients of scores from the out that was rounded.
    """
    rows, S, device = args.gate_rows, args.gate_rows * ranks.size, ranks.device
    function = Function(score, S, args.num_heads, device)
    q, k, v, dout = (x.to(dtype) for x in whole_tensors(rows, args, ranks))
    own = positions(rows, ranks)
    b, h = torch.zeros(1, 1, 1, 1, dtype=torch.int64, device=device), torch.arange(q.shape[1], device=device)
    i, j = torch.arange(S, device=device).view(-1, 1), torch.arange(S, device=device)
    leaves = [x.requires_grad_() for x in (q, k, *function.learned)]
    keys, values = (x.repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))
    wide = torch.promote_types(dtype, torch.float32)
    scores = function.score_mod((q @ keys.mT).to(wide) * q.shape[3] ** -0.5, b, h.view(-1, 1, 1), i, j)
    scores = scores.masked_fill(i < j, -torch.inf)
    weights = scores.detach().softmax(-1)
    out = weights.to(dtype) @ values
    if args.forward:
        return [out[:, :, own]]
    delta = (dout.to(wide) * out).sum(-1, keepdim=True)
    dscores = weights * ((dout @ values.mT).to(wide) - delta)
    dv = (weights.to(dtype).mT @ dout).unflatten(1, (k.shape[1], -1)).sum(2)
    dq, dk, *found = torch.autograd.grad(scores, leaves, dscores)
    return [out[:, :, own], dq[:, :, own], dk[:, :, own], dv[:, :, own], *found]


def gate(
    names: Sequence[str], score: str, args: argparse.Namespace, ranks: Ranks
) -> tuple[dict[str, tuple[float, str]], float]:
    """Of each contestant the largest error over results and ranks, and what became of it; and what it may be."""
    want = exact(score, args, ranks, torch.float64)
    plain = exact(score, args, ranks, getattr(torch, args.dtype))
    bound = bound_of(plain, want)
    found = {}
    for name in names:

        def results(name: str = name) -> list[Tensor]:
            got = ready(name, score, args.gate_rows, args, ranks).both()
            for x in got[4:]:
                dist.all_reduce(x)
            return got

        found[name] = judge(ranks, results, want, bound)
    return found, bound


def race(
    names: Sequence[str], score: str, rows: int, args: argparse.Namespace, ranks: Ranks
) -> tuple[dict[str, list[list[float]]], dict[str, tuple[float, float]], dict[str, str]]:
    """Of each: milliseconds of forwards and of both passes on the slowest rank, by repeat; GiB; and what failed."""
    runs, problems = dict[str, Run](), dict[str, str]()
    for name in names:
        run, problem = ranks.attempt(partial(ready, name, score, rows, args, ranks))
        if run is None:
            problems[name] = str(problem)
        else:
            runs[name] = run
    S = rows * ranks.size
    longer = S * (S + 1) / ranks.size / (rows * (rows + 1))  # pairs of a rank over those of the floor
    passes = {name: (run.forward,) if args.forward else (run.forward, run.both) for name, run in runs.items()}
    times = in_turns(ranks, passes, args.repeats, args.calls)
    if FLOOR in times:
        times[FLOOR] = [[ms * longer for ms in of_pass] for of_pass in times[FLOOR]]
    gib = {}
    for name, run in runs.items():
        if ranks.device.type == "cuda":
            ranks.line_up()
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            run.both()
            ranks.synchronize()
            symmetric = symmetric_memory_bytes() if name.startswith("cp_mesh") else 0
            peak = torch.cuda.max_memory_allocated() - before
            gib[name] = tuple(float(x) / 2**30 for x in ranks.largest([peak, symmetric]))
    return times, gib, problems


def figures(times: Sequence[Sequence[float]], floor: Sequence[Sequence[float]] | None) -> dict[str, str]:
    row = {}
    for name, ms, least in zip(("fwd", "fwdbwd"), times, floor or ((), ()), strict=False):
        row |= spread(name, ms)
        row |= {f"of_floor_{name}": f"{statistics.median(ms) / statistics.median(least):.4g}"} if least else {}
    return row


def main(argv: Sequence[str] | None = None) -> None:
    args = parse_arguments(argv)
    ranks = Ranks(args.device)
    about = machine(ranks.device, ranks.size, args.commit)
    about |= {"heads_q": args.num_heads, "heads_kv": args.num_kv_heads}
    about |= {"head_dim": args.head_dim, "dtype": args.dtype, "calls_per_time": args.calls}
    began, failed = time.monotonic(), False
    verdicts: dict[str, tuple[dict[str, tuple[float, str]], float]] = {}
    for rows in args.rows:
        for score in args.scores:
            if ranks.largest(time.monotonic() - began) > args.time_limit:
                ranks.print(f"{score:18} {rows:>7} rows  left out: the time limit")
                continue
            if score not in verdicts:
                verdicts[score] = gate(args.contestants, score, args, ranks)
            of_gate, bound = verdicts[score]
            ours_of_gate = (status for name, (_, status) in of_gate.items() if name.startswith("cp_mesh"))
            failed |= not all(status.startswith(("ok", "unsupported")) for status in ours_of_gate)
            names = [name for name, (_, status) in of_gate.items() if status == "ok"]
            times, gib, problems = race([FLOOR, *names], score, rows, args, ranks)
            table = []
            for name, (error, status) in {FLOOR: (0.0, "ok"), **of_gate}.items():
                row = about | {"contestant": name, "score": score, "rows": rows, "status": problems.get(name, status)}
                row |= {"error": f"{error:.1e}", "bound": f"{bound:.1e}"} if name != FLOOR else {}
                if name in times:
                    row |= {"repeats": args.repeats} | figures(times[name], times.get(FLOOR))
                if name in gib:
                    row |= {"extra_gib": f"{gib[name][0]:.4f}", "symmetric_gib": f"{gib[name][1]:.4f}"}
                table.append(row)
                keys = ("fwd_ms", "fwdbwd_ms", "of_floor_fwd", "of_floor_fwdbwd", "extra_gib", "error")
                words = " ".join(f"{row.get(key, ''):>9}" for key in keys)
                ranks.print(f"{score:18}{rows:>7} {name:15} fwd, both, of floor, GiB, error: {words}  {row['status']}")
            ranks.print(f"{time.monotonic() - began:.0f} s")
            ranks.append(args.csv, COLUMNS, table)
    ranks.end(failed)


if __name__ == "__main__":
    main()
