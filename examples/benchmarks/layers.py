"""Measure host time of attention in a stack of layers, in microseconds per layer: forward, backward, and both.

A step is a forward of all layers in sequence, and a backward through all of them, as in training; the host waits for
the device only between two steps. Each layer has its own tensors; layers share the mask.

- "cp_mesh": the default call; "computed": the same without tapes, so that passes are computed in every call;
- "dense" layers have the causal mask, "packed" ones documents of 64 to 1000 tokens, different in each step, so that
  each step plans once;
- "FlashAttention-4": only its public function, one call per pass on this rank's rows, without communication.

    torchrun --nproc-per-node 2 examples/benchmarks/layers.py --rows 1024 4096 --csv layers.csv
"""

from __future__ import annotations

import argparse
import csv
import gc
import random
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from statistics import median
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor

sys.path[:0] = [str(Path(__file__).resolve().parents[2]), str(Path(__file__).parent)]  # a checkout not installed

from report import machine  # noqa: E402

from cp_mesh import Mask, attention  # noqa: E402
from cp_mesh.call import method  # noqa: E402

Layer = Callable[[Tensor, Tensor, Tensor], Tensor]
WARM = 4  # steps that are not counted


def documents(seed: int, seq_len: int) -> Mask:
    draw, ids = random.Random(seed), [0]
    while len(ids) < seq_len:
        ids += [ids[-1] + 1] * draw.randint(64, 1000)
    return Mask(documents=torch.tensor(ids[:seq_len]))


@contextmanager
def computed() -> Iterator[None]:
    with mock.patch.object(method, "repeat", lambda tapes, what, compute, inputs: compute(*inputs)):
        yield


def step(layer: Layer, inputs: Sequence[Sequence[Tensor]], dout: Tensor) -> tuple[float, float, float]:
    """Seconds of the host in the forward and in the backward, and until the device is done."""
    wait = torch.cuda.synchronize if dout.is_cuda else lambda: None
    wait()
    dist.barrier()
    wait()
    begin = time.perf_counter()
    outs = [layer(*x) for x in inputs]
    between = time.perf_counter()
    for out, x in zip(reversed(outs), reversed(inputs), strict=True):
        torch.autograd.grad(out, x, dout)
    end = time.perf_counter()
    wait()
    return between - begin, end - between, time.perf_counter() - begin


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--rows", type=int, nargs="+", default=[4096], help="rows per rank")
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--heads", type=int, nargs=2, default=(32, 8))
    parser.add_argument("--head-dim", type=int, default=128)
    parser.add_argument("--kernel", default="fa4")
    parser.add_argument("--steps", type=int, default=11)
    parser.add_argument("--commit", help="recorded in the rows (default: ask git)")
    parser.add_argument("--csv", type=Path, required=True)
    options = parser.parse_args(argv)
    dist.init_process_group("nccl" if options.device == "cuda" else "gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    device = torch.device(options.device, rank if options.device == "cuda" else 0)
    if options.device == "cuda":
        torch.cuda.set_device(device)
    about = machine(device, size, options.commit)
    for rows in options.rows:
        shapes = [(1, heads, rows, options.head_dim) for heads in (options.heads[0], *[options.heads[1]] * 2)]
        inputs = [
            [torch.randn(shape, device=device, dtype=torch.bfloat16, requires_grad=True) for shape in shapes]
            for _ in range(options.layers)
        ]
        dout = torch.randn(shapes[0], device=device, dtype=torch.bfloat16)
        ways: dict[tuple[str, str], tuple[Any, Callable[[int], Layer]]] = {}
        for mask in ("dense", "packed"):
            for way, around in (("cp_mesh", nullcontext), ("computed", computed)):

                def make(i: int, mask: str = mask, rows: int = rows) -> Layer:
                    of_step = Mask() if mask == "dense" else documents(i, rows * size)
                    return lambda *qkv: attention(*qkv, mesh=dist.group.WORLD, mask=of_step, kernel=options.kernel)

                ways[mask, way] = around, make
        if options.kernel == "fa4":
            from flash_attn.cute import flash_attn_func

            def alone(i: int) -> Layer:
                return lambda *qkv: flash_attn_func(*(x.transpose(1, 2) for x in qkv), causal=True)[0].transpose(1, 2)

            ways["dense", "FlashAttention-4"] = nullcontext, alone
        times: dict[tuple[str, str], list[tuple[float, float, float]]] = {way: [] for way in ways}
        for i in range(WARM + options.steps):
            for way, (around, make) in ways.items():
                layer = make(i)
                gc.collect()
                gc.disable()
                with around():
                    found = step(layer, inputs, dout)
                gc.enable()
                if i >= WARM:
                    times[way].append(found)
        of_ranks: list[Any] = [None] * size
        dist.all_gather_object(of_ranks, times)
        if rank:
            continue
        with options.csv.open("a", newline="") as file:
            writer = csv.writer(file)
            if file.tell() == 0:
                writer.writerow(
                    [*about, "kernel", "rows", "layers", "mask", "way", "forward_us", "backward_us", "all_us"]
                )
            for mask, way in ways:
                # of the slowest rank
                slowest = [max(median(x[i] for x in each[mask, way]) for each in of_ranks) for i in range(3)]
                row = [options.kernel, rows, options.layers, mask, way]
                row += [f"{x / options.layers * 1e6:.0f}" for x in slowest]
                writer.writerow([*about.values(), *row])
                print(",".join(map(str, row)), flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
