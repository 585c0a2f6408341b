"""Time one training step on one very long sequence, for few layers of Llama-3-8B, and project to a whole model.

    torchrun --nproc-per-node 2 examples/benchmarks/long.py --seq-len 1048576 --layers 1 2 --csv long.csv
    torchrun --nproc-per-node 2 examples/benchmarks/long.py --seq-len 262144 --layers 2 4  # as many rows as 8 GPUs

Memory is saved by two styles, and by a checkpoint of the loss:

- a block keeps its input and attention's outputs, or with `--recompute full` only its input, and they wait in host
  memory (`cp_mesh.Checkpointed`);
- the MLP (`cp_mesh.TiledMLP`) and the loss process a few rows at a time. So neither the MLP's hidden units nor the
  logits of all rows exist at once. `cp_mesh.cross_entropy(count=)` divides each part by the tokens of all.

First a short sequence must give the same loss and gradient norm with and without all this. Weights, gradients and the
optimizer's state are fp32 and sharded by FSDP2 over all ranks; layers compute in bf16.

`--layers 1 2` gives the time and memory of one more layer, and so of 32 layers (`project`). `--as 8` projects to 8
GPUs: work is divided by the ratio of ranks, and memory is that of equally many rows per rank, so take memory from a
shorter sequence. It assumes, without proof, that a ring of 8 hides its communication as well as a ring of 2.

Columns: `seconds`: forward, backward, clipping and AdamW on the slowest rank, the last of `--steps`. `peak_gib`: peak
of PyTorch's allocator on any rank, with cp_mesh's symmetric memory. `host_gib`: host memory of one rank. The first step
is longer: it allocates host memory, and `TiledMLP` looks at the MLP.
"""

from __future__ import annotations

import argparse
import gc
import os
import sys
import time
from datetime import date, timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.utils.checkpoint import checkpoint

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "examples"), str(Path(__file__).parent)]

from llama import CoreAttention, Llama, LlamaConfig, rotary  # noqa: E402
from metrics import peak_flops  # noqa: E402
from parallel_llama import apply_fsdp  # noqa: E402
from report import append  # noqa: E402
from training import commit, model_flops, say  # noqa: E402

import cp_mesh  # noqa: E402
from cp_mesh.comm.exchange import release, symmetric_memory_bytes  # noqa: E402

COLUMNS = (
    *("date", "commit", "gpu", "world", "torch", "layers", "seq_len", "vocab", "recompute", "offload", "head_chunks"),
    *("loss_rows", "mlp_rows", "seconds", "tokens_per_s_per_gpu", "mfu", "peak_gib", "host_gib", "loss", "grad_norm"),
)


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--seq-len", type=int, nargs="+", default=[1048576])
    add("--layers", type=int, nargs="+", default=[1, 2])
    add("--dim", type=int, default=4096)
    add("--heads", type=int, default=32)
    add("--kv-heads", type=int, default=8)
    add("--ffn", type=int, default=14336)
    add("--vocab", type=int, default=128256)
    add("--recompute", nargs="+", choices=("selective", "full"), default=["selective"], help="selective: not attention")
    add("--no-offload", dest="offload", action="store_false", help="keep them on the device")
    add("--head-chunks", type=int, default=1, help="head chunks of cp_mesh's attention")
    add("--loss-rows", type=int, default=8192, help="rows of logits that exist at a time")
    add("--mlp-rows", type=int, default=16384, help="rows that the MLP computes at a time")
    add("--gate-len", type=int, default=65536, help="tokens of the sequence that is compared with a plain step")
    add("--steps", type=int, default=2)
    add("--as", dest="ranks", type=int, default=8, help="ranks to project to")
    add("--whole", type=int, default=32, help="layers to project to")
    add("--device", choices=("cpu", "cuda"), default="cuda" if torch.cuda.is_available() else "cpu")
    add("--csv", type=Path, help="append a row for each measurement")
    add("--commit", help="recorded in the rows (default: ask git)")
    return parser.parse_args(arguments)


class LongLlama(Llama):
    """A Llama that returns this rank's share of the loss, not logits."""

    def __init__(self, config: LlamaConfig, data: DeviceMesh, loss_rows: int) -> None:
        super().__init__(config, CoreAttention)
        self.data, self.loss_rows = data, loss_rows

    def forward(
        self, tokens: Tensor, positions: Tensor | None = None, labels: Tensor | None = None, count: int = 0
    ) -> Tensor:
        """Compute a share of the mean loss of ``count`` tokens, of tokens [1, L], their positions, labels [1, L]."""
        assert positions is not None and labels is not None
        rope = rotary(positions, self.config.head_dim, self.config.rope_theta)
        x = self.tok_embeddings(tokens)
        for layer in self.layers:
            x = layer(x, rope, None)
        parts = zip(x.split(self.loss_rows, 1), labels.split(self.loss_rows, 1), strict=True)
        shares = [checkpoint(partial(self.share, count=count), *part, use_reentrant=False) for part in parts]
        return torch.stack(shares).sum()

    def share(self, x: Tensor, labels: Tensor, count: int) -> Tensor:
        return cp_mesh.cross_entropy(self.output(self.norm(x)), labels, self.data, count=count)


def styles(args: argparse.Namespace, recompute: str) -> dict[str, Any]:
    """What saves memory in the blocks."""
    return {
        "layers.*": cp_mesh.Checkpointed(offload=args.offload, keep_attention=recompute == "selective"),
        "layers.*.feed_forward": cp_mesh.TiledMLP(tile_rows=args.mlp_rows),
    }


class PlainLlama(Llama):
    """The same without any of it, for the gate."""

    def __init__(self, config: LlamaConfig, data: DeviceMesh) -> None:
        super().__init__(config, CoreAttention)
        self.data = data

    def forward(
        self, tokens: Tensor, positions: Tensor | None = None, labels: Tensor | None = None, count: int = 0
    ) -> Tensor:
        assert labels is not None
        return cp_mesh.cross_entropy(super().forward(tokens, positions), labels, self.data, count=count)


class Trainer:
    """A model on all ranks, and its steps."""

    def __init__(
        self, model: Llama, others: dict[str, Any], mesh: DeviceMesh, args: argparse.Namespace, device: torch.device
    ) -> None:
        self.model, self.mesh, self.args, self.device = model, mesh, args, device
        self.sequence = cp_mesh.ShardedSequence(mesh, cp_mesh.ZigZag())
        style = cp_mesh.ContextParallel(self.sequence, head_chunks=args.head_chunks)
        root = cp_mesh.ShardedModel(self.sequence, inputs=("tokens",), positions="positions")
        cp_mesh.parallelize(model, mesh, {"": root, "layers.*.attention.core": style} | others)
        apply_fsdp(model, mesh, "bf16" if device.type == "cuda" else "fp32")
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)

    def step(self, seq_len: int) -> tuple[float, float, float]:
        """Loss, gradient norm and seconds of one step on random tokens [1, S], equal on all ranks."""
        generator = torch.Generator().manual_seed(seq_len)
        batch = torch.randint(self.args.vocab, (1, seq_len + 1), generator=generator).to(self.device)
        labels = self.sequence.shard({"labels": batch[:, 1:]})["labels"]
        self._wait()
        start = time.perf_counter()
        share = self.model(batch[:, :-1], labels=labels, count=seq_len)
        share.backward()
        norm = cp_mesh.clip_grad_norm(list(self.model.parameters()), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self._wait()
        seconds = self._over_ranks(time.perf_counter() - start, dist.ReduceOp.MAX)
        return self._over_ranks(share.item(), dist.ReduceOp.SUM), float(norm), seconds

    def peak_bytes(self) -> float:
        if self.device.type != "cuda":
            return 0.0
        return self._over_ranks(torch.cuda.max_memory_allocated() + symmetric_memory_bytes(), dist.ReduceOp.MAX)

    def _wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        dist.barrier()

    def _over_ranks(self, value: float, how: dist.ReduceOp.RedOpType) -> float:
        found = torch.tensor(value, dtype=torch.float64, device=self.device)
        dist.all_reduce(found, how)
        return found.item()


def make(
    args: argparse.Namespace, layers: int, recompute: str | None, mesh: DeviceMesh, device: torch.device
) -> Trainer:
    """A trainer of a long model, or without ``recompute`` of a plain one."""
    config = LlamaConfig(args.vocab, args.dim, layers, args.heads, args.kv_heads, ffn_dim=args.ffn)
    with torch.device(device):
        model = LongLlama(config, mesh, args.loss_rows) if recompute else PlainLlama(config, mesh)
    model.init_weights(seed=0)  # whole: with few layers it fits
    return Trainer(model, styles(args, recompute) if recompute else {}, mesh, args, device)


def gate(args: argparse.Namespace, mesh: DeviceMesh, device: torch.device) -> bool:
    """Whether a long model's loss and gradient norm are those of a plain one, but for rounding."""
    found = [make(args, 1, recompute, mesh, device).step(args.gate_len)[:2] for recompute in (None, *args.recompute)]
    bound = 2e-3 if device.type == "cuda" else 1e-5
    (loss, norm), agree = found[0], True
    for recompute, (its_loss, its_norm) in zip(args.recompute, found[1:], strict=True):
        parts = abs(its_loss / loss - 1), abs(its_norm / norm - 1)
        agree &= max(parts) < bound
        say(
            f"gate, {args.gate_len} tokens, {recompute}: loss {its_loss:.6f}, apart {parts[0]:.1e}, norm {parts[1]:.1e}"
        )
    return agree


def measure(trainer: Trainer, seq_len: int, recompute: str) -> dict[str, str]:
    args, device, world = trainer.args, trainer.device, trainer.mesh.size()
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
        torch.cuda.reset_peak_host_memory_stats()
    for _ in range(args.steps):
        loss, norm, seconds = trainer.step(seq_len)
    config, peak = trainer.model.config, peak_flops(device)
    mfu = model_flops(config, seq_len)[0] / (seconds * world * peak) if peak else None
    host = torch.cuda.host_memory_stats()["allocated_bytes.peak"] if device.type == "cuda" else 0
    values = {
        "date": date.today().isoformat(),
        "commit": args.commit or commit(),
        "gpu": torch.cuda.get_device_name() if device.type == "cuda" else "cpu",
        "world": world,
        "torch": torch.__version__,
        "layers": config.num_layers,
        "seq_len": seq_len,
        "vocab": args.vocab,
        "recompute": recompute,
        "offload": args.offload,
        "head_chunks": args.head_chunks,
        "loss_rows": args.loss_rows,
        "mlp_rows": args.mlp_rows,
        "seconds": f"{seconds:.3f}",
        "tokens_per_s_per_gpu": f"{seq_len / world / seconds:.1f}",
        "mfu": "" if mfu is None else f"{mfu:.4f}",
        "peak_gib": f"{trainer.peak_bytes() / 2**30:.2f}",
        "host_gib": f"{host / 2**30:.2f}",
        "loss": f"{loss:.6f}",
        "grad_norm": f"{norm:.6g}",
    }
    return {name: str(value) for name, value in values.items()}


STATE_BYTES = 16
"""Of a parameter: fp32 weight and gradient, and two of AdamW."""


def layer_parameters(args: argparse.Namespace) -> int:
    return args.dim * (2 * args.dim + 2 * args.dim * args.kv_heads // args.heads + 3 * args.ffn + 2)


def project(fewer: dict[str, str], more: dict[str, str], args: argparse.Namespace) -> tuple[float, float]:
    """Seconds and peak GiB of ``--whole`` layers on ``--as`` ranks, from two measurements that differ in layers.

    Memory is that of the same rows a rank. What weights and their state take is known, so it is scaled to the ranks.
    """
    world, layers = int(more["world"]), int(more["layers"])
    each = {x: (float(more[x]) - float(fewer[x])) / (layers - int(fewer["layers"])) for x in ("seconds", "peak_gib")}
    seconds = (float(more["seconds"]) + (args.whole - layers) * each["seconds"]) * world / args.ranks
    spread = 1 / world - 1 / args.ranks
    layer_state = STATE_BYTES * layer_parameters(args) / 2**30
    ends = STATE_BYTES * (2 * args.vocab * args.dim + args.dim) / 2**30
    peak = float(more["peak_gib"]) + (args.whole - layers) * each["peak_gib"]
    return seconds, peak - spread * (ends + args.whole * layer_state)


def main() -> None:
    args = parse_arguments()
    device = torch.device("cpu")
    if args.device == "cuda":
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if args.device == "cuda" else "gloo", timeout=timedelta(minutes=3))
    mesh = init_device_mesh(args.device, (dist.get_world_size(),), mesh_dim_names=("cp",))
    agree = gate(args, mesh, device)
    for seq_len in args.seq_len if agree else ():
        for recompute in args.recompute:
            of_layers: list[dict[str, str]] = []
            for layers in args.layers:
                gc.collect()
                release(mesh.get_group())
                if device.type == "cuda":
                    torch.cuda.empty_cache()
                trainer = make(args, layers, recompute, mesh, device)
                of_layers.append(measure(trainer, seq_len, recompute))
                del trainer
                say(", ".join(f"{name} {of_layers[-1][name]}" for name in COLUMNS[5:]))
                if args.csv and dist.get_rank() == 0:
                    append(args.csv, COLUMNS, of_layers[-1:])
            if len(of_layers) > 1:
                seconds, peak = project(*of_layers[-2:], args)
                said = f"{args.whole} layers on {args.ranks} GPUs"
                rows_a_rank = seq_len // mesh.size()
                say(f"{said}: {seconds:.1f} s a step; with {rows_a_rank} rows a rank {peak:.1f} GiB")
    say("SAME, measured" if agree else "DIFFERENT: nothing was timed")
    dist.barrier()
    dist.destroy_process_group()
    sys.exit(0 if agree else 1)


if __name__ == "__main__":
    main()
