"""Time the linears of a transformer block over tp, forward and backward, with rows sharded between them.

    torchrun --nproc-per-node 2 examples/benchmarks/linears.py --rows 4096 16384 65536 --csv linears.csv

Parts are the feed-forward layer and the projections of attention (without attention) of Llama-3-8B and 70B.
Contestants: "cp_mesh", `OverlappedColwise` and `OverlappedRowwise`; "cp_mesh again", which gathers the input again in
the backward; "cp_mesh NCCL", with transport="functional"; "cp_mesh compiled", under torch.compile; "torch",
`ColwiseParallel` and `RowwiseParallel` with the sequence sharded between them; "torch async", the same under
torch.compile with `_micro_pipeline_tp`; "floor", the matmuls of one rank without communication.

A gate runs first: outputs and gradients of few rows, each compared with float64. If a contestant fails it or cannot
run, its row has only a status. In each repeat every contestant runs ``--calls`` calls in sequence, after a barrier. A
time is that of one call on the slowest rank; a row has the median, minimum and maximum over the repeats. ``exposed_ms``
is a time minus the floor's: communication that is not hidden, and all other costs. ``kept_gib`` is the memory that a
forward keeps for its backward, output included.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    parallelize_module,
)

sys.path[:0] = [str(Path(__file__).resolve().parents[2]), str(Path(__file__).parent)]  # a checkout not installed

from attention import Ranks, in_turns  # noqa: E402
from decoding import bound_of, judge  # noqa: E402
from report import machine, options, spread  # noqa: E402

from cp_mesh import parallelize  # noqa: E402
from cp_mesh.tensor_parallel import OverlappedColwise, OverlappedRowwise  # noqa: E402

COLUMNS = (
    *("date", "commit", "gpu", "world_size", "torch", "cuda", "cudnn", "nccl", "packages"),
    *("contestant", "part", "rows", "dtype", "repeats", "calls_per_time"),  # rows of all tp ranks together
    *("fwd_ms", "fwdbwd_ms", "fwdbwd_ms_min", "fwdbwd_ms_max", "of_floor", "exposed_ms", "kept_gib"),
    *("error", "bound", "status"),  # RMS error over RMS of the exact result, in the gate; and what it may be
)


class FeedForward(nn.Module):
    """Two column linears of one input, and a row linear. ``share``: of its hidden units, 1 / share."""

    columns, row = ("w1", "w3"), "w2"

    def __init__(self, dim: int, hidden: int, share: int = 1) -> None:
        super().__init__()
        self.w1, self.w3 = (nn.Linear(dim, hidden // share, bias=False) for _ in range(2))
        self.w2 = nn.Linear(hidden // share, dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


class Projections(nn.Module):
    """Three column linears and a row linear; each query head is weighed by key and value in the place of attention."""

    columns, row = ("wq", "wk", "wv"), "wo"

    def __init__(self, dim: int, heads: int, kv_heads: int, share: int = 1) -> None:
        super().__init__()
        self.groups, self.head_dim = heads // kv_heads, dim // heads
        size, kv_size = dim // share, dim // heads * kv_heads // share
        self.wq, self.wk, self.wv = (nn.Linear(dim, n, bias=False) for n in (size, kv_size, kv_size))
        self.wo = nn.Linear(size, dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        q = self.wq(x).unflatten(-1, (-1, self.groups, self.head_dim))
        k, v = (w(x).unflatten(-1, (-1, 1, self.head_dim)) for w in (self.wk, self.wv))
        return self.wo((q * k + v).flatten(-3))


PARTS: dict[str, Callable[..., nn.Module]] = {
    "8B mlp": partial(FeedForward, 4096, 14336),
    "8B attention": partial(Projections, 4096, 32, 8),
    "70B mlp": partial(FeedForward, 8192, 28672),
    "70B attention": partial(Projections, 8192, 64, 8),
    "tiny mlp": partial(FeedForward, 16, 24),
    "tiny attention": partial(Projections, 16, 4, 2),
}


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = options(__doc__, time_limit=True)
    add = parser.add_argument
    add("--parts", nargs="+", choices=tuple(PARTS), default=list(PARTS)[:4])
    add("--rows", type=int, nargs="+", default=[4096, 16384, 65536], help="rows of all tp ranks together")
    add("--dtype", default="bfloat16", choices=("bfloat16", "float16", "float32"))
    add("--contestants", nargs="+", choices=tuple(CONTESTANTS), default=list(CONTESTANTS))
    add("--gate-rows", type=int, default=512)
    add("--repeats", type=int, default=7)
    add("--calls", type=int, default=10)
    return parser.parse_args(argv)


def ours(module: Any, tp: DeviceMesh, again: bool = False, transport: Any = "auto", compile: bool = False) -> nn.Module:
    columns = OverlappedColwise(*module.columns, recompute_all_gather=again, transport=transport)
    module = parallelize(module, tp, {"": columns, module.row: OverlappedRowwise(transport=transport)})
    return compiled(module) if compile else module


def compiled(module: nn.Module, options: Any = None) -> nn.Module:
    torch._dynamo.config.recompile_limit = 256  # else later parts and lengths would silently run uncompiled
    return torch.compile(module, dynamic=False, options=options)  # type: ignore[return-value]


def torchs(module: Any, tp: DeviceMesh, micro_pipeline: bool = False) -> nn.Module:
    inputs = PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),))
    plan = {"": inputs, module.row: RowwiseParallel(output_layouts=Shard(1))}
    parallelize_module(module, tp, plan | {name: ColwiseParallel() for name in module.columns})
    if not micro_pipeline:
        return module
    if tp.device_type != "cuda":
        raise NotImplementedError("_micro_pipeline_tp needs symmetric memory of GPUs")
    from torch.distributed._symmetric_memory import enable_symm_mem_for_group

    enable_symm_mem_for_group(tp.get_group().group_name)
    return compiled(module, {"_micro_pipeline_tp": True})


CONTESTANTS: dict[str, Callable[[Any, DeviceMesh], nn.Module]] = {
    "cp_mesh": ours,
    "cp_mesh again": partial(ours, again=True),
    "cp_mesh NCCL": partial(ours, transport="functional"),
    "cp_mesh compiled": partial(ours, compile=True),
    "torch": torchs,
    "torch async": partial(torchs, micro_pipeline=True),
}
FLOOR = "floor"


class Run:
    """A contestant on one part and number of rows; inputs and weights are equal whoever runs."""

    def __init__(self, name: str, part: str, rows: int, args: argparse.Namespace, ranks: Ranks, tp: DeviceMesh) -> None:
        torch.manual_seed(0)
        dtype = getattr(torch, args.dtype)
        with torch.device(ranks.device):
            module = PARTS[part](**({"share": ranks.size} if name == FLOOR else {})).to(dtype)
            x, self.dout = (torch.randn(1, rows, next(module.children()).in_features) for _ in range(2))  # type: ignore[arg-type]
        self.x, self.dout, self.module = x.to(dtype), self.dout.to(dtype), module
        if name != FLOOR:
            self.x, self.dout = (y.chunk(ranks.size, 1)[ranks.rank].contiguous() for y in (self.x, self.dout))
            self.module = CONTESTANTS[name](module, tp)
        self.parameters = list(module.parameters())
        self.x.requires_grad_()

    def forward(self) -> Tensor:
        out = self.module(self.x)
        if isinstance(out, AsyncCollectiveTensor):
            out.trigger_wait()
        return out

    def both(self) -> Tensor:
        for x in (self.x, *self.parameters):
            x.grad = None
        out = self.forward()
        out.backward(self.dout)
        return out


def exact(part: str, args: argparse.Namespace, device: torch.device, dtype: torch.dtype) -> list[Tensor]:
    """Output and gradients of one device, by products of a dtype, of inputs of the benchmark's."""
    torch.manual_seed(0)
    given = getattr(torch, args.dtype)
    with torch.device(device):
        module = PARTS[part]().to(given)
        x, dout = (torch.randn(1, args.gate_rows, next(module.children()).in_features) for _ in range(2))  # type: ignore[arg-type]
    x, module = x.to(given).to(dtype).requires_grad_(), module.to(dtype)
    out = module(x)
    out.backward(dout.to(given).to(dtype))
    return [out.detach(), *(y.grad for y in (x, *module.parameters()) if y.grad is not None)]


def gate(part: str, args: argparse.Namespace, ranks: Ranks, tp: DeviceMesh) -> tuple[dict[str, Any], float]:
    """Of each contestant the largest error over results and ranks, and what became of it; and what it may be."""
    want = exact(part, args, ranks.device, torch.float64)
    plain = exact(part, args, ranks.device, getattr(torch, args.dtype))
    bound = bound_of(plain, want)
    of_rank = [x.chunk(ranks.size, 1)[ranks.rank] for x in want[:2]] + want[2:]
    found = {}
    for name in args.contestants:

        def results(name: str = name) -> list[Tensor]:
            run = Run(name, part, args.gate_rows, args, ranks, tp)
            out = run.both().detach()
            grads = [x.grad for x in (run.x, *run.parameters) if x.grad is not None]
            return [x.full_tensor() if isinstance(x, DTensor) else x for x in (out, *grads)]

        found[name] = judge(ranks, results, of_rank, bound)
    return found, bound


def race(names: Sequence[str], part: str, rows: int, args: argparse.Namespace, ranks: Ranks, tp: DeviceMesh) -> Any:
    """Of each: milliseconds of forwards and of both passes on the slowest rank, by repeat, and GiB that are kept."""
    runs = {name: Run(name, part, rows, args, ranks, tp) for name in names}
    times = in_turns(ranks, {name: (run.forward, run.both) for name, run in runs.items()}, args.repeats, args.calls)
    kept = {}
    for name, run in runs.items():
        if ranks.device.type == "cuda":
            before = torch.cuda.memory_allocated()
            out = run.forward()
            kept[name] = float(ranks.largest(torch.cuda.memory_allocated() - before)) / 2**30
            del out
    return times, kept


def main(argv: Sequence[str] | None = None) -> None:
    args = parse_arguments(argv)
    ranks = Ranks(args.device)
    tp = init_device_mesh(args.device, (ranks.size,), mesh_dim_names=("tp",))
    about = machine(ranks.device, ranks.size, args.commit)
    about |= {"dtype": args.dtype, "calls_per_time": args.calls}
    began, failed = time.monotonic(), False
    for part in args.parts:
        verdicts, bound = gate(part, args, ranks, tp)
        failed |= any(status.startswith("failed") for _, status in verdicts.values())
        for rows in args.rows:
            if ranks.largest(time.monotonic() - began) > args.time_limit:
                ranks.print(f"{part:16} {rows:>7} rows  left out: the time limit")
                continue
            names = [name for name, (_, status) in verdicts.items() if status == "ok"]
            times, kept = race([FLOOR, *names], part, rows, args, ranks, tp)
            floor, table = statistics.median(times[FLOOR][1]), []
            for name, (error, status) in {FLOOR: (0.0, "ok"), **verdicts}.items():
                row = about | {"contestant": name, "part": part, "rows": rows, "status": status}
                row |= {"error": f"{error:.1e}", "bound": f"{bound:.1e}"} if name != FLOOR else {}
                if name in times:
                    forward, both = times[name]
                    ms = statistics.median(both)
                    row |= {"repeats": args.repeats, "fwd_ms": f"{statistics.median(forward):.4f}"}
                    row |= spread("fwdbwd", both) | {"of_floor": f"{ms / floor:.4g}"}
                    row |= {"exposed_ms": f"{ms - floor:.4f}"}
                    row |= {"kept_gib": f"{kept[name]:.4f}"} if name in kept else {}
                table.append(row)
                keys = ("fwd_ms", "fwdbwd_ms", "of_floor", "kept_gib", "error")
                figures = " ".join(f"{row.get(key, ''):>10}" for key in keys)
                ranks.print(f"{part:16} {rows:>7} rows  {name:15} fwd, both, of floor, GiB, error: {figures}  {status}")
            ranks.append(args.csv, COLUMNS, table)
    ranks.end(failed)


if __name__ == "__main__":
    main()
