"""Time a decode step of one attention layer: cache a token's key and value, and attend from its query to all tokens.

    torchrun --nproc-per-node 2 examples/benchmarks/decoding.py --csv decoding.csv

Contestants on one device, run by every rank alone: "sdpa", `F.scaled_dot_product_attention` over all cached tokens;
"sdpa flash", the same with FlashAttention only, and "sdpa flash graph", its replay as a CUDA graph; "alone graph", the
replay of a `ShardedCache` of one rank. On all ranks together: "cache", a growing `ShardedCache` with 1/N of the tokens
per rank, and "cache fa2", the same with PyTorch's FlashAttention-2; "capacity", a cache of fixed capacity; "graph", its
replay. Every rank generates the whole prompt, since one device needs it. ``of_best`` is a time over that of the fastest
contestant on one device.

A gate runs first: some steps after a short prompt, each compared with float64. If a contestant fails it or cannot run,
its row has only a status. In each repeat every contestant runs ``--calls`` steps in sequence, after a barrier. A time
is that of one step on the slowest rank; a row has the median, minimum and maximum over the repeats. ``gb_per_s`` is the
keys and values that one rank reads, over that time; memory bandwidth bounds it.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

sys.path[:0] = [str(Path(__file__).resolve().parents[2]), str(Path(__file__).parent)]  # a checkout not installed

from attention import PLAIN_FACTOR, Ranks, in_turns  # noqa: E402
from report import machine, options, spread  # noqa: E402

from cp_mesh import ShardedSequence  # noqa: E402
from cp_mesh.geometry.mask import Mask  # noqa: E402
from cp_mesh.inference import ShardedCache  # noqa: E402
from cp_mesh.kernels.scores import Scores  # noqa: E402
from cp_mesh.tools.verification.dense import dense_attention  # noqa: E402

GATE_STEPS = 6
ROUNDING = 1e-6  # of the signal: what fp32 sums may add to the bound of the gate
COLUMNS = (
    *("date", "commit", "gpu", "world_size", "torch", "cuda", "cudnn", "nccl", "packages"),
    *("contestant", "batch", "heads_q", "heads_kv", "head_dim", "dtype", "cached", "repeats", "calls_per_time"),
    *("step_ms", "step_ms_min", "step_ms_max", "of_best", "gb_per_s"),  # this time over the best of one device
    *("error", "bound", "status"),  # RMS error over RMS of the exact result, in the gate; and what it may be
)


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = options(__doc__, time_limit=True)
    add = parser.add_argument
    add("--cached", type=int, nargs="+", default=[131072], help="tokens of the prompt")
    add("--batch", type=int, default=1)
    add("--heads", default="32/8", help="query heads/kv heads")
    add("--head-dim", type=int, default=128)
    add("--dtype", default="bfloat16", choices=("bfloat16", "float16", "float32"))
    add("--contestants", nargs="+", choices=tuple(CONTESTANTS), default=list(CONTESTANTS))
    add("--gate-len", type=int, default=1000, help="tokens of the prompt in the correctness gate")
    add("--repeats", type=int, default=7)
    add("--calls", type=int, default=20)
    args = parser.parse_args(argv)
    if args.calls < 2:
        parser.error("--calls: expected 2 or more, since a graph is captured in the second step, before timing")
    return args


@dataclass
class Sequences:
    """q, k and v of a prompt and of the tokens after it, [B, heads, S, D], equal on all ranks."""

    q: Tensor
    k: Tensor
    v: Tensor
    prompt: int

    @classmethod
    def random(cls, args: argparse.Namespace, ranks: Ranks, prompt: int, num_steps: int) -> Sequences:
        generator = torch.Generator(ranks.device).manual_seed(0)
        heads, kv_heads = map(int, args.heads.split("/"))
        options: dict[str, Any] = {
            "generator": generator, "device": ranks.device, "dtype": getattr(torch, args.dtype)
        }  # fmt: skip
        shapes = ((args.batch, n, prompt + num_steps, args.head_dim) for n in (heads, kv_heads, kv_heads))
        return cls(*(torch.randn(shape, **options) for shape in shapes), prompt)

    def token(self, step: int) -> tuple[Tensor, Tensor, Tensor]:
        """Contiguous copies of one row each."""
        at = self.prompt + step
        q, k, v = (x[:, :, at : at + 1].contiguous() for x in (self.q, self.k, self.v))
        return q, k, v


class Alone:
    """All tokens in one tensor, which has room for all that come."""

    def __init__(self, x: Sequences, ranks: Ranks, *backends: SDPBackend) -> None:
        self.k, self.v, self.length, self.backends = x.k.clone(), x.v.clone(), x.prompt, backends

    def step(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        self.k[:, :, self.length], self.v[:, :, self.length] = k[:, :, 0], v[:, :, 0]
        self.length += 1
        k, v = self.k[:, :, : self.length], self.v[:, :, : self.length]
        if not self.backends:
            return F.scaled_dot_product_attention(q, k, v, enable_gqa=True)
        with sdpa_kernel(list(self.backends)):
            return F.scaled_dot_product_attention(q, k, v, enable_gqa=True)


class Cache:
    """A `ShardedCache`, of one rank if alone, that grows if it is not fixed."""

    def __init__(
        self, x: Sequences, ranks: Ranks, *, fixed: bool = False, alone: bool = False, kernel: str = "auto"
    ) -> None:
        sequence, self.kernel = ShardedSequence(ranks.alone if alone else ranks.mesh, length=x.prompt), kernel
        self.cache = ShardedCache(sequence, x.k.shape[2] if fixed else None)
        self.cache.prefill(*(sequence.shard(y[:, :, : x.prompt], dim=2) for y in (x.k, x.v)))

    def step(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        self.cache.append(k, v)
        return self.cache.attend(q, kernel=self.kernel)


class Graph:
    """Replays of a step of another contestant, after an eager one that compiles kernels.

    What is counted on the host stays: "sdpa" attends to as many tokens as in the captured step.
    """

    def __init__(self, contestant: Any) -> None:
        self.contestant = contestant
        self.given: list[Tensor] = []
        self.graph: Any = None

    def step(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if not self.given:
            self.given = [q, k, v]
            return self.contestant.step(q, k, v)
        if self.graph is None:
            if not q.is_cuda:
                raise NotImplementedError("CUDA graphs need a GPU")
            torch.cuda.synchronize()
            self.graph = torch.cuda.CUDAGraph()
            # threads of NCCL make calls that a capture of theirs could not hold
            with torch.cuda.graph(self.graph, capture_error_mode="thread_local"):  # which computes nothing
                self.out = self.contestant.step(*self.given)
        for x, y in zip(self.given, (q, k, v), strict=True):
            if x is not y:
                x.copy_(y)
        self.graph.replay()
        return self.out


FLASH = SDPBackend.FLASH_ATTENTION
CONTESTANTS: dict[str, Any] = {
    "sdpa": Alone,
    "sdpa flash": lambda x, ranks: Alone(x, ranks, FLASH),
    "sdpa flash graph": lambda x, ranks: Graph(Alone(x, ranks, FLASH)),
    "alone graph": lambda x, ranks: Graph(Cache(x, ranks, fixed=True, alone=True)),
    "cache": Cache,
    "cache fa2": partial(Cache, kernel="fa2"),
    "capacity": partial(Cache, fixed=True),
    "graph": lambda x, ranks: Graph(Cache(x, ranks, fixed=True)),
}
ON_ONE_DEVICE = frozenset({"sdpa", "sdpa flash", "sdpa flash graph", "alone graph"})


def exact(x: Sequences, dtype: torch.dtype) -> Tensor:
    """The results of the steps by plain products of a dtype."""
    q, k, v = (y.to(dtype) for y in (x.q, x.k, x.v))
    with torch.enable_grad():  # it computes gradients too
        out = dense_attention(q, k, v, torch.zeros_like(q), Mask(), Scores(q.shape[3] ** -0.5)).out
    return out[:, :, x.prompt :].double()


def gate(args: argparse.Namespace, ranks: Ranks) -> tuple[dict[str, tuple[float, str]], float]:
    """The largest error of each contestant over the ranks, and what became of it; and what the error may be.

    On one device a kernel may have twice the error of plain products of the dtype; we may too, for all ranks together.
    """
    x = Sequences.random(args, ranks, args.gate_len, GATE_STEPS)
    want = exact(x, torch.float64)
    bound, found = bound_of([exact(x, x.q.dtype)], [want]), {}
    for name in args.contestants:
        steps = 2 if name == "sdpa flash graph" else GATE_STEPS  # whose replays attend to as many tokens
        call = partial(lambda name, steps: [run(CONTESTANTS[name](x, ranks), x, steps)], name, steps)
        found[name] = judge(ranks, call, [want[:, :, :steps]], bound)
    return found, bound


def bound_of(plain: Sequence[Tensor], want: Sequence[Tensor]) -> float:
    """What an error may be, by that of plain products of the dtype."""
    return PLAIN_FACTOR * max(relative(x.double(), y) for x, y in zip(plain, want, strict=True)) + ROUNDING


def judge(
    ranks: Ranks, call: Callable[[], Sequence[Tensor]], want: Sequence[Tensor], bound: float
) -> tuple[float, str]:
    """The largest error of what a call returns, over results and ranks, and what became of it."""
    got, problem = ranks.attempt(call)
    errors = [relative(x.double(), y.double()) for x, y in zip(got, want, strict=True)] if got else [torch.inf]
    error = float(ranks.largest(max(errors)))
    failed = "" if error <= bound else f"failed the gate: {error:.1e} > {bound:.1e}"
    return error, problem or failed or "ok"


def relative(x: Tensor, want: Tensor) -> float:
    """RMS error over RMS."""
    error = ((x - want).square().mean() / want.square().mean()).sqrt().item()
    return torch.inf if error != error else error


def run(contestant: Any, x: Sequences, num_steps: int) -> Tensor:
    return torch.cat([contestant.step(*x.token(step)).clone() for step in range(num_steps)], dim=2)


def race(args: argparse.Namespace, ranks: Ranks, names: Sequence[str], cached: int) -> dict[str, list[float]]:
    """Milliseconds of a step on the slowest rank, repeat by repeat; the first repeat, which warms up, is left out."""
    x = Sequences.random(args, ranks, cached, (args.repeats + 1) * args.calls + 2)
    token = x.token(0)
    steps = {name: [partial(CONTESTANTS[name](x, ranks).step, *token)] for name in names}
    return {name: times for name, (times,) in in_turns(ranks, steps, args.repeats, args.calls).items()}


@torch.no_grad()
def main(argv: Sequence[str] | None = None) -> None:
    args = parse_arguments(argv)
    ranks = Ranks(args.device)
    verdicts, bound = gate(args, ranks)
    heads, kv_heads = map(int, args.heads.split("/"))
    about = machine(ranks.device, ranks.size, args.commit) | {
        "batch": args.batch, "heads_q": heads,
        "heads_kv": kv_heads, "head_dim": args.head_dim, "dtype": args.dtype, "bound": f"{bound:.1e}",
    }  # fmt: skip
    begin = time.monotonic()
    for cached in args.cached:
        if ranks.largest(time.monotonic() - begin) > args.time_limit:
            ranks.print(f"{cached:>9} tokens  left out: the time limit")
            continue
        times = race(args, ranks, [name for name, (_, status) in verdicts.items() if status == "ok"], cached)
        alone = min((statistics.median(times[name]) for name in ON_ONE_DEVICE & times.keys()), default=None)
        rows = []
        for name, (error, status) in verdicts.items():
            row = about | {"contestant": name, "cached": cached, "error": f"{error:.1e}", "status": status}
            if name in times:
                ms = statistics.median(times[name])
                nbytes = 2 * args.batch * kv_heads * args.head_dim * cached * getattr(torch, args.dtype).itemsize
                nbytes //= 1 if name in ON_ONE_DEVICE else ranks.size
                row |= {"repeats": args.repeats, "calls_per_time": args.calls} | spread("step", times[name])
                row["gb_per_s"] = f"{nbytes / ms / 1e6:.4g}"
                if alone is not None:
                    row["of_best"] = f"{ms / alone:.4g}"
            rows.append(row)
            figures = "  ".join(f"{row.get(key, ''):>10}" for key in ("step_ms", "of_best", "gb_per_s", "error"))
            ranks.print(f"{cached:>9} tokens  {name:16} ms, of best, GB/s, error: {figures}  {status[:100]}")
        ranks.append(args.csv, COLUMNS, rows)
    ranks.end(any(status.startswith("failed") for _, status in verdicts.values()))


if __name__ == "__main__":
    main()
