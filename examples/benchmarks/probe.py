"""Time the probe beside a training step of a Llama in bf16, on all ranks as cp, under FSDP2.

For ``--layers`` layers of a shape of ``SHAPES``: seconds of `cp_mesh.probe` on the first tokens of a batch, the first
time and the median of later ones, and of a step (forward, backward, AdamW), on the slowest rank. On CUDA also the peak
memory of each in GiB, on the rank with most. It prints one line, and writes a row to ``--csv``.

    torchrun --nproc-per-node 2 examples/benchmarks/probe.py --shape 1B --csv probe.csv
    torchrun --nproc-per-node 2 examples/benchmarks/probe.py --shape 8B --layers 8 --csv probe.csv
"""

from __future__ import annotations

import argparse
import csv
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

EXAMPLES = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(EXAMPLES.parent), str(EXAMPLES), str(EXAMPLES / "benchmarks")]  # a checkout not installed

from llama import CoreAttention, Llama, LlamaConfig  # noqa: E402
from parallel_llama import apply_fsdp  # noqa: E402
from report import machine  # noqa: E402

import cp_mesh  # noqa: E402

SHAPES = {
    "1B": LlamaConfig(128256, 2048, 16, 32, 8, ffn_dim=8192),
    "8B": LlamaConfig(128256, 4096, 32, 32, 8, ffn_dim=14336),
    "example": LlamaConfig(),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="1B")
    parser.add_argument("--layers", type=int, help="default: those of the shape")
    parser.add_argument("--seq-len", type=int, default=8192)
    parser.add_argument("--batch-size", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--commit", default="", help="recorded in the rows (default: ask git)")
    parser.add_argument("--csv", type=Path, required=True)
    options = parser.parse_args()
    device = torch.device(options.device)
    if device.type == "cuda":
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    axis = init_device_mesh(device.type, (dist.get_world_size(),), mesh_dim_names=("cp",))
    config = SHAPES[options.shape]
    layers = options.layers or config.num_layers
    sizes = config.vocab_size, config.dim, layers, config.num_heads, config.num_kv_heads
    with device:
        model = Llama(LlamaConfig(*sizes, ffn_dim=config.ffn_dim), CoreAttention).to(torch.bfloat16)
    model.init_weights(0)
    sequence = cp_mesh.ShardedSequence(axis)
    plan = {"": cp_mesh.ShardedModel(sequence), "layers.*.attention.core": cp_mesh.ContextParallel(sequence)}
    cp_mesh.parallelize(model, axis, plan)
    apply_fsdp(model, axis, "bf16")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
    generator = torch.Generator().manual_seed(0)
    shape = options.batch_size, options.seq_len + 1
    batch = torch.randint(config.vocab_size, shape, generator=generator).to(device)
    tokens, labels = batch[:, :-1], sequence.shard({"labels": batch[:, 1:]})["labels"]

    def step() -> None:
        cp_mesh.cross_entropy(model(tokens), labels, axis).backward()
        optimizer.step()
        optimizer.zero_grad()

    def probe() -> None:
        assert not cp_mesh.probe(model, {"tokens": tokens}), "the rows agree, and were compared"

    found: dict[str, float] = {}
    for name, run in {"probe": probe, "step": step, "later_probe": probe}.items():
        for _ in range(name == "step"):
            run()  # which makes the optimizer's state
        times, peak = measured(run, device, 1 if name == "probe" else options.repeats)
        found |= {f"{name}_s": times, f"{name}_peak_gib": peak}
    worst = torch.tensor([*found.values()], device=device, dtype=torch.float64)
    dist.all_reduce(worst, dist.ReduceOp.MAX)
    if dist.get_rank() == 0:
        about = machine(device, dist.get_world_size(), options.commit)
        about |= {"shape": options.shape, "layers": layers, "seq_len": options.seq_len}
        about |= {"batch_size": options.batch_size, "repeats": options.repeats}
        row = {name: f"{x:.4g}" for name, x in zip(found, worst.tolist(), strict=True)}
        with options.csv.open("a", newline="") as file:
            writer = csv.writer(file)
            if file.tell() == 0:
                writer.writerow([*about, *row])
            writer.writerow([*about.values(), *row.values()])
        print(f"{options.shape}, {layers} layers: " + ", ".join(f"{name} {x}" for name, x in row.items()))
    dist.destroy_process_group()


def measured(run: Callable[[], None], device: torch.device, repeats: int) -> tuple[float, float]:
    """Median of seconds, and peak GiB."""
    on_gpu = device.type == "cuda"
    if on_gpu:
        torch.cuda.reset_peak_memory_stats()
    times = []
    for _ in range(repeats):
        dist.barrier()
        begin = time.perf_counter()
        run()
        if on_gpu:
            torch.cuda.synchronize()
        times.append(time.perf_counter() - begin)
    return median(times), torch.cuda.max_memory_allocated() / 2**30 if on_gpu else 0.0


if __name__ == "__main__":
    main()
