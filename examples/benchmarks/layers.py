"""Measure host time of attention in a stack of layers, in microseconds per layer: forward, backward, and both.

A step is a forward of all layers in sequence, and a backward through all of them, as in training; the host waits for
the device only between two steps. Each layer has its own tensors; layers share the mask.

- "dense" layers have the causal mask, "packed" ones documents of lognormal lengths (median 400), new in each step, so
  that each step plans once;
- "ring", "ulysses", and "balanced", the ring over a layout made for the step's documents (`cp_mesh.balance`);
- "FlashAttention-4": its public functions alone, one call per pass on this rank's rows, packed ones whole documents,
  without communication: the floor.

    torchrun --nproc-per-node 2 examples/benchmarks/layers.py --rows 1024 4096 --csv layers.csv

With ``--one-gpu``, ranks share the first GPU and take turns on it: only times of the host tell something, and both
passes of ways in which ranks do not wait for each other.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from itertools import product
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

sys.path[:0] = [str(Path(__file__).resolve().parents[2]), str(Path(__file__).parent)]  # a checkout not installed

from attention import Ranks, no_garbage_collection  # noqa: E402
from contestants import document_lengths  # noqa: E402
from report import machine, options  # noqa: E402

from cp_mesh import Mask, attention  # noqa: E402
from cp_mesh.geometry.balance import balance  # noqa: E402

Layer = Callable[[Tensor, Tensor, Tensor], Tensor]
WARM = 4  # steps that are not counted


def ends(seed: int, seq_len: int) -> Tensor:
    """Where documents begin, and the end of the last."""
    return torch.tensor((0, *document_lengths(seq_len, seed, 400, seq_len, 1.0))).cumsum(0, dtype=torch.int32)


def step(
    ranks: Ranks, make: Callable[[], Layer], inputs: Sequence[Sequence[Tensor]], dout: Tensor
) -> tuple[float, float, float]:
    """Seconds of the host in the forward and in the backward, and until the device is done."""
    ranks.line_up()
    begin = time.perf_counter()
    layer = make()
    outs = [layer(*x) for x in inputs]
    between = time.perf_counter()
    for out, x in zip(reversed(outs), reversed(inputs), strict=True):
        torch.autograd.grad(out, x, dout)
    end = time.perf_counter()
    ranks.synchronize()
    return between - begin, end - between, time.perf_counter() - begin


def main(argv: Sequence[str] | None = None) -> None:
    parser = options(__doc__)
    parser.add_argument("--one-gpu", action="store_true", help="all ranks on the first GPU")
    parser.add_argument("--rows", type=int, nargs="+", default=[4096], help="rows per rank")
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--heads", type=int, nargs=2, default=(32, 8))
    parser.add_argument("--head-dim", type=int, default=128)
    parser.add_argument("--kernel", default="fa4")
    parser.add_argument("--steps", type=int, default=11)
    args = parser.parse_args(argv)
    ranks = Ranks(args.device, args.one_gpu)
    rank, size, device = ranks.rank, ranks.size, ranks.device
    about = machine(device, size, args.commit)
    for rows in args.rows:
        shapes = [(1, rows, heads, args.head_dim) for heads in (args.heads[0], *[args.heads[1]] * 2)]
        make_tensor = partial(torch.randn, device=device, dtype=torch.bfloat16)
        inputs = [[make_tensor(shape).transpose(1, 2).requires_grad_() for shape in shapes] for _ in range(args.layers)]
        dout = make_tensor(shapes[0]).transpose(1, 2)
        ways: dict[tuple[str, str], Callable[[Tensor, Tensor], Layer]] = {}
        for mask, way in (*product(("dense", "packed"), ("ring", "ulysses")), ("packed", "balanced")):

            def make(all_ends: Tensor, own: Tensor, mask: str = mask, way: str = way, rows: int = rows) -> Layer:
                of_step = Mask()
                if mask == "packed":
                    of_step = Mask.from_cu_seqlens(all_ends)
                given = {"layout": balance(of_step, rows * size, size)} if way == "balanced" else {"method": way}
                call = partial(attention, mesh=dist.group.WORLD, mask=of_step, kernel=args.kernel, **given)
                return lambda *qkv: call(*qkv)

            ways[mask, way] = make
        if args.kernel == "fa4":
            from flash_attn.cute import flash_attn_func, flash_attn_varlen_func

            def alone(all_ends: Tensor, own: Tensor) -> Layer:
                return lambda *qkv: flash_attn_func(*(x.transpose(1, 2) for x in qkv), causal=True)[0].transpose(1, 2)

            def whole(all_ends: Tensor, own: Tensor) -> Layer:
                longest, at = int(own.diff().max()), own.to(device)
                named = {"cu_seqlens_q": at, "cu_seqlens_k": at, "max_seqlen_q": longest, "max_seqlen_k": longest}

                def layer(*qkv: Tensor) -> Tensor:
                    out = flash_attn_varlen_func(*(x[0].transpose(0, 1) for x in qkv), causal=True, **named)[0]
                    return out.transpose(0, 1)[None]

                return layer

            ways |= {("dense", "FlashAttention-4"): alone, ("packed", "FlashAttention-4"): whole}
        times: dict[tuple[str, str], list[tuple[float, float, float]]] = {way: [] for way in ways}
        for i in range(WARM + args.steps):
            of_step = ends(i, rows * size), ends(size * i + rank, rows)
            for way, make in ways.items():
                with no_garbage_collection():
                    found = step(ranks, partial(make, *of_step), inputs, dout)
                if i >= WARM:
                    times[way].append(found)
        of_ranks: list[Any] = [None] * size
        dist.all_gather_object(of_ranks, times)
        for mask, way in ways:
            row = {"kernel": args.kernel, "rows": rows, "layers": args.layers, "mask": mask, "way": way}
            for i, name in enumerate(("forward_us", "backward_us", "all_us")):
                slowest = max(median(x[i] for x in each[mask, way]) for each in of_ranks)
                row[name] = f"{slowest / args.layers * 1e6:.0f}"
            ranks.append(args.csv, [*about, *row], [about | row])
            ranks.print(*row.values())
    ranks.end(False)


if __name__ == "__main__":
    main()
