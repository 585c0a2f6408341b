"""Time flex_attention over cp on batches whose packed documents all differ, and on the same batches again.

    torchrun --nproc-per-node 2 examples/benchmarks/flex_batches.py --csv flex_batches.csv
    python examples/benchmarks/flex_batches.py --played 1/2     # one GPU plays a rank, as in `flex.py`

A step does what a trainer does with a new batch: make a mask of its document ids, and run ``--layers`` calls with ALiBi
by a score_mod, forward and backward. Its time is host time from a barrier until the device is idle, on the slowest
rank. Then the same batch runs again with the same mask: the difference is the price of a new batch. Python's garbage is
collected between steps, as in trainers.

Contestants: "cp_mesh", ``create_block_mask`` with a causal mask_mod of documents; "cp_mesh sources", the same made for
the sequence, so that keys that nobody needs do not travel; "cp_mesh Mask", ``Mask(documents=ids)``; "torch mended",
PyTorch's context parallelism with functions that look up positions (see `flex.py`); "floor", one GPU's compiled
flex_attention with as many rows as a rank holds; its times are not scaled, since its documents are shorter.

A gate runs first, on the first batches with ``--gate-rows`` rows per rank: out, and q's gradient, compared with
float64. Programs compiled for it are dropped afterwards, but not Inductor's cache on disk. Columns of ``--csv``, one
row per contestant: first_ms, the first step with all its compilation; new_ms and again_ms, medians over the later
steps; worst_ms, the slowest new step; new_over_again, the median of the ratios of a step; compiled, programs that the
first step made; compiled_later, programs that later steps made.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor.parallel import parallelize_module
from torch.nn.attention.flex_attention import create_block_mask as torch_create_block_mask

sys.path[:0] = [str(Path(__file__).resolve().parents[2]), str(Path(__file__).parent)]  # a checkout not installed

from attention import PLAIN_FACTOR, Ranks  # noqa: E402
from contestants import document_lengths  # noqa: E402
from decoding import ROUNDING, relative  # noqa: E402
from flex import Core, compiled, played_rank, positions, whole_tensors  # noqa: E402
from report import append, machine  # noqa: E402

from cp_mesh import Mask, ShardedSequence, ZigZag, create_block_mask, flex_attention  # noqa: E402
from cp_mesh.kernels.flex import programs as flex_programs  # noqa: E402

COLUMNS = (
    *("date", "commit", "gpu", "world_size", "torch", "cuda", "cudnn", "nccl", "packages"),
    *("played", "contestant", "rows", "heads_q", "heads_kv", "head_dim", "dtype", "layers", "steps"),
    *("first_ms", "new_ms", "again_ms", "worst_ms", "new_over_again", "compiled", "compiled_later"),
    *("error", "bound", "status"),
)
FLOOR = "floor"
Call = Callable[[Tensor, Tensor, Tensor], Tensor]
ScoreMod = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]
MaskMod = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--device", choices=("cuda", "cpu"), default="cuda" if torch.cuda.is_available() else "cpu")
    add("--rows", type=int, default=8192, help="rows per rank")
    add("--gate-rows", type=int, default=1024)
    add("--heads", default="32/8", help="query heads/kv heads")
    add("--head-dim", type=int, default=128)
    add("--dtype", default="bfloat16", choices=("bfloat16", "float16", "float32"))
    add("--layers", type=int, default=4)
    add("--steps", type=int, default=16)
    add("--contestants", nargs="+", choices=(FLOOR, *CONTESTANTS), default=[FLOOR, *CONTESTANTS])
    add("--kernel", help="kernel of cp_mesh; default: auto")
    add("--forward", action="store_true", help="without backward: PyTorch has none on CPUs")
    add("--played", help="RANK/SIZE: one device plays this rank")
    add("--csv", type=Path, help="append a row for each contestant")
    add("--commit", help="recorded in the rows (default: ask git)")
    args = parser.parse_args(argv)
    args.num_heads, args.num_kv_heads = map(int, args.heads.split("/"))
    args.kernel = args.kernel or "auto"
    if args.steps < 2:
        parser.error("--steps: expected at least 2, since the first one compiles")
    return args


def slopes_of(args: argparse.Namespace, device: torch.device) -> Tensor:
    return 2.0 ** -(8 / args.num_heads * torch.arange(1, args.num_heads + 1, device=device))


def ids_of(step: int, seq_len: int, device: torch.device) -> Tensor:
    """Document ids of a batch, the same on every rank."""
    lengths = torch.tensor(document_lengths(seq_len, seed=step))
    return torch.repeat_interleave(torch.arange(len(lengths)), lengths).to(device)


def of_documents(ids: Tensor) -> MaskMod:
    return lambda b, h, i, j: (ids[i] == ids[j]) & (i >= j)


def ours(kind: str, ids: Tensor, slopes: Tensor, args: argparse.Namespace, ranks: Ranks) -> Call:
    options: dict[str, Any] = {"mesh": ranks.mesh, "seq_dim": 2, "layout": ZigZag(), "enable_gqa": True}
    options |= {"kernel": args.kernel, "transport": "symmetric_memory" if args.played else "auto"}
    S = len(ids)
    if kind == "Mask":
        options["mask"] = Mask(documents=ids)
    else:
        sequence = ShardedSequence(ranks.mesh, ZigZag(), S) if kind == "sources" else None
        options |= {"mask": Mask(), "block_mask": create_block_mask(of_documents(ids), None, None, S, S, sequence)}

    def score_mod(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return score - slopes[h] * (i - j)

    return lambda q, k, v: flex_attention(q, k, v, score_mod, **options)


def torchs(ids: Tensor, slopes: Tensor, args: argparse.Namespace, ranks: Ranks) -> Call:
    from torch.distributed.tensor.experimental._context_parallel._attention import (
        _ContextParallel,
        _create_cp_block_mask,
    )
    from torch.distributed.tensor.experimental._context_parallel._load_balancer import _HeadTailLoadBalancer

    balancer = _HeadTailLoadBalancer(len(ids), ranks.size, ranks.device)
    block_mask = _create_cp_block_mask(of_documents(ids), 1, 1, len(ids), len(ids), ranks.mesh, balancer)
    of_keys = balancer._generate_indices()[0].long()
    of_queries = of_keys.chunk(ranks.size)[ranks.rank].contiguous()

    def score_mod(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return score - slopes[h] * (of_queries[i] - of_keys[j])

    style = _ContextParallel(seq_dim=2, attention_type=_ContextParallel.AttentionType.FLEX)
    return parallelize_module(Core(compiled(args.device), score_mod, block_mask), ranks.mesh, style)


def floor(ids: Tensor, slopes: Tensor, args: argparse.Namespace, ranks: Ranks) -> Call:
    make = torch.compile(torch_create_block_mask, dynamic=False) if args.device == "cuda" else torch_create_block_mask
    block_mask = make(of_documents(ids), None, None, len(ids), len(ids), device=ranks.device.type)

    def score_mod(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return score - slopes[h] * (i - j)

    return Core(compiled(args.device), score_mod, block_mask)


CONTESTANTS: dict[str, Callable[..., Call]] = {
    "cp_mesh": partial(ours, "mask_mod"),
    "cp_mesh sources": partial(ours, "sources"),
    "cp_mesh Mask": partial(ours, "Mask"),
    "torch mended": torchs,
}


def num_compiled() -> int:
    """Programs of ours and of torch.compile since `forget`; of ours no more are kept than `flex_programs.KEPT`."""
    from torch._dynamo.utils import counters

    return len(flex_programs._programs) + counters["stats"]["unique_graphs"]


def forget() -> None:
    """What was compiled for another contestant or for the gate."""
    from torch._dynamo.utils import counters

    flex_programs._programs.clear()
    torch.compiler.reset()
    counters.clear()


class Runs:
    """A contestant's steps."""

    def __init__(self, name: str, rows: int, args: argparse.Namespace, ranks: Ranks) -> None:
        self.name, self.args, self.ranks = name, args, ranks
        self.seq_len = rows if name == FLOOR else rows * ranks.size
        at = torch.arange(rows, device=ranks.device) if name == FLOOR else positions(rows, ranks)
        *x, self.dout = (x[:, :, at].contiguous() for x in whole_tensors(rows, args, ranks))
        self.x = x if args.forward else [y.requires_grad_() for y in x]
        self.slopes = slopes_of(args, ranks.device)

    def begun(self, step: int) -> Call:
        ids = ids_of(step, self.seq_len, self.ranks.device)
        return ({FLOOR: floor} | CONTESTANTS)[self.name](ids, self.slopes, self.args, self.ranks)

    def layers(self, call: Call) -> tuple[Tensor, ...]:
        """out, and q's gradient, of the last layer."""
        for _ in range(self.args.layers):
            out = call(*self.x)
            dq = () if self.args.forward else torch.autograd.grad(out, self.x, self.dout)[:1]
        return out.detach(), *dq

    def timed(self, work: Callable[[], Any]) -> tuple[float, Any]:
        """Milliseconds on the slowest rank, and the result."""
        self.ranks.line_up()
        begin = time.perf_counter()
        result = work()
        self.ranks.synchronize()
        return float(self.ranks.largest((time.perf_counter() - begin) * 1e3)), result

    def figures(self) -> dict[str, str]:
        new, again, made = list[float](), list[float](), list[int]()
        gc.disable()
        for step in range(self.args.steps):
            before = num_compiled()
            gc.collect()

            def first(step: int = step) -> Call:
                call = self.begun(step)
                self.layers(call)
                return call

            ms, call = self.timed(first)
            new.append(ms)
            again.append(self.timed(partial(self.layers, call))[0])
            made.append(num_compiled() - before)
        gc.enable()
        ratios = [a / b for a, b in zip(new[1:], again[1:], strict=True)]
        numbers = {"first_ms": new[0], "new_ms": statistics.median(new[1:]), "again_ms": statistics.median(again[1:])}
        numbers |= {"worst_ms": max(new[1:]), "new_over_again": statistics.median(ratios)}
        return {name: f"{x:.4g}" for name, x in numbers.items()} | {
            "compiled": str(made[0]), "compiled_later": str(sum(made[1:]))
        }  # fmt: skip


def gate(name: str, args: argparse.Namespace, ranks: Ranks) -> tuple[float, float]:
    """The largest error of out and q's gradient in three batches over ranks, and what it may be."""
    runs, errors = Runs(name, args.gate_rows, args, ranks), list[tuple[float, float]]()
    for step in range(3):
        found = runs.layers(runs.begun(step))
        wants, plains = (exact(runs, step, dtype) for dtype in (torch.float64, getattr(torch, args.dtype)))
        for x, want, plain in zip(found, wants, plains, strict=False):
            bound = PLAIN_FACTOR * relative(plain.double(), want) + ROUNDING
            errors.append((relative(x.double(), want) / bound, bound))
    excess, bound = ranks.largest(errors).T
    return float(excess.max()), float(bound[excess.argmax()])


def exact(runs: Runs, step: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """out of this rank's rows and q's gradient, by dense products of a dtype."""
    args, ranks, S = runs.args, runs.ranks, runs.seq_len
    ids, whole = ids_of(step, S, ranks.device), whole_tensors(args.gate_rows, args, ranks)
    rows = torch.arange(S, device=ranks.device) if runs.name == FLOOR else positions(args.gate_rows, ranks)
    keys = torch.arange(S, device=ranks.device)
    q, k, v = (x.to(dtype) for x in (whole[0][:, :, rows], whole[1][:, :, :S], whole[2][:, :, :S]))
    q, (k, v) = q.requires_grad_(), (x.repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))
    distance = rows.view(-1, 1) - keys
    scores = (q @ k.mT).to(torch.promote_types(dtype, torch.float32)) * q.shape[3] ** -0.5
    scores = scores - runs.slopes.view(-1, 1, 1) * distance
    seen = (distance >= 0) & (ids[rows].view(-1, 1) == ids)
    out = scores.masked_fill(~seen, -torch.inf).softmax(-1).to(dtype) @ v
    return out.detach(), *torch.autograd.grad(out, q, runs.dout.to(dtype))


def main(argv: Sequence[str] | None = None) -> None:
    args = parse_arguments(argv)
    ranks = Ranks(args.device) if args.played is None else played_rank(args.played, args.device)
    about = machine(ranks.device, 1 if args.played else ranks.size, args.commit)
    about |= {"played": args.played or "", "rows": args.rows, "heads_q": args.num_heads, "heads_kv": args.num_kv_heads}
    about |= {"head_dim": args.head_dim, "dtype": args.dtype, "layers": args.layers, "steps": args.steps}
    failed, table = False, list[dict[str, Any]]()
    for name in args.contestants:
        found, problem = ranks.attempt(partial(gate, name, args, ranks))
        excess, bound = found or (torch.inf, 0.0)
        error = excess * bound if found else torch.inf
        status = problem or ("ok" if excess <= 1 else f"failed the gate: {error:.1e} > {bound:.1e}")
        row = about | {"contestant": name, "error": f"{error:.1e}", "bound": f"{bound:.1e}"}
        forget()
        if status == "ok":
            figures, problem = ranks.attempt(lambda name=name: Runs(name, args.rows, args, ranks).figures())
            row |= figures or {}
            status = problem or status
        failed |= name.startswith("cp_mesh") and status != "ok"
        row |= {"status": status, "date": datetime.now(UTC).isoformat(timespec="seconds")}
        words = " ".join(f"{key} {row.get(key, '-')}" for key in COLUMNS[-10:-3])
        ranks.print(f"{name:16} {words}  {status}")
        table.append(row)
    if args.csv is not None and (args.played or ranks.rank == 0):
        append(args.csv, COLUMNS, table)
    dist.barrier()
    dist.destroy_process_group()
    if failed:
        sys.exit(1)


if __name__ == "__main__":
    main()
