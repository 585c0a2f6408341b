"""Train a Llama on one very long sequence: which length fits, what it takes, and how fast a step is.

    torchrun --nproc-per-node 2 examples/long_llama.py --model llama-3-8b --seq-len 262144 --tiled-loss \
        --mlp-rows 8192 --offload-checkpoints
    torchrun --nproc-per-node 1 examples/long_llama.py --model MODEL/config.json --ladder 65536 300000 \
        --optimizer-dtype bf16 --recompute full --tiled-loss --mlp-rows 8192 --offload-checkpoints --csv long.csv

`--model` is a preset, or the config.json of a Transformers Llama, whose sizes are taken; weights and tokens are random,
since neither time nor memory depends on them. `--layers` takes fewer layers than the model has.

FSDP2 shards weights, gradients and AdamW's states over all ranks; cp_mesh shards the sequence. Each option is a line of
a plan that saves memory: see docs/long.md. `--plain` is PyTorch alone, without any of them: each rank holds whole
sequences. Only the norm of gradients is cp_mesh's in both.

Before a length runs, `cp_mesh.tools.explain_step` predicts its memory; one that does not fit is skipped unless
`--force` is given. `--ladder` runs several lengths, from short to long, with one model; it ends where memory does.
`--gate 8192` first compares loss and gradient norm of two layers and 8,192 tokens with the plain model; if they differ,
nothing runs.

Columns: `seconds`: forward, backward, clipping and AdamW on the slowest rank, the last of `--steps`. `peak_gib`: the
peak of PyTorch's allocator on any rank, with cp_mesh's symmetric memory. `host_gib`: pinned host memory of a rank, and
AdamW's states if they are there. `attention_s`: with `--split`, attention alone, both passes, of all layers; from one
kv head and its query heads. `mfu`: of the GPUs' bf16 peak, with causal attention as half of full attention, and its
backward as 2.5 times its forward.
"""

from __future__ import annotations

import argparse
import csv
import gc
import json
import os
import sys
import time
from dataclasses import replace
from datetime import date, timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

sys.path[:0] = [str(Path(__file__).resolve().parent), str(Path(__file__).resolve().parents[1])]

from llama import CoreAttention, Llama, LlamaConfig  # noqa: E402
from metrics import flops_per_token, peak_flops  # noqa: E402
from parallel_llama import apply_fsdp  # noqa: E402

import cp_mesh  # noqa: E402
from cp_mesh.comm.exchange import symmetric_memory_bytes  # noqa: E402
from cp_mesh.tools.explain.step import PRESETS, ModelSizes, StepExplanation  # noqa: E402
from cp_mesh.training.host_copies import pinned_bytes  # noqa: E402

DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
LARGE_NORMS = 2**32  # elements of an input from which on PyTorch 2.11 computes them wrong (pytorch/pytorch#181555)
OPTIONS = ("plain", "recompute", "tiled_loss", "mlp_rows", "offload_checkpoints", "offload_optimizer")
COLUMNS = (
    *("date", "commit", "gpu", "world", "torch", "model", "layers", "cp", "seq_len", "window", "head_chunks"),
    *("optimizer_dtype", *OPTIONS, "status", "predicted_gib", "peak_gib", "predicted_host_gib", "host_gib", "seconds"),
    *("tokens_per_s", "attention_s", "mfu", "loss", "grad_norm"),
)


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--model", default="llama-3-8b", help=f"{', '.join(PRESETS)}; a config.json, its folder or its text")
    add("--layers", type=int, help="layers that are built; default: all")
    add("--seq-len", "--ladder", dest="seq_len", type=int, nargs="+", required=True, metavar="N", help="tokens")
    add("--cp", type=int, help="ranks that share a sequence; default: all. Others have sequences of their own")
    add("--window", type=int, metavar="N", help="a query sees the last N tokens, itself included")
    add("--head-chunks", type=int, metavar="N", help="head chunks of cp_mesh's attention")
    add("--plain", action="store_true", help="without cp_mesh and all options below")
    add("--recompute", choices=("selective", "full"), default="selective", help="selective: not attention")
    add("--tiled-loss", action="store_true", help="never hold the logits of all rows")
    add("--mlp-rows", type=int, metavar="N", help="compute MLPs N rows at a time")
    add("--offload-checkpoints", action="store_true", help="keep what blocks keep in host memory")
    add("--offload-optimizer", action="store_true", help="keep weights, gradients and AdamW's states there (FSDP2)")
    add("--optimizer-dtype", choices=DTYPES, default="fp32", help="of weights, gradients and AdamW's states")
    add("--gate", type=int, metavar="N", help="tokens of the comparison with the plain model; default: none")
    add("--steps", type=int, default=1, help="steps of each length; the last is reported")
    add("--split", action="store_true", help="also time attention alone")
    add("--force", action="store_true", help="run what is predicted not to fit")
    add("--gpu-memory", type=float, metavar="GiB", help="default: what is free on the GPU")
    add("--device", choices=("cpu", "cuda"), default="cuda" if torch.cuda.is_available() else "cpu")
    add("--csv", type=Path, help="append a row for each length")
    add("--commit", default="", help="recorded in the rows")
    args = parser.parse_args(arguments)
    args.precision = "bf16" if args.device == "cuda" else "fp32"
    if args.gate and args.window:
        parser.error("--gate takes no --window: the plain model has none")
    if args.plain and (args.tiled_loss or args.mlp_rows or args.offload_checkpoints or args.window):
        parser.error("--plain takes neither --tiled-loss, --mlp-rows, --offload-checkpoints nor --window")
    return args


def checkpoint_blocks(args: argparse.Namespace) -> dict[str, Any]:
    """The line of the plan for blocks: what they keep, and where it waits."""
    keep_attention = args.recompute == "selective"
    return {"layers.*": cp_mesh.Checkpointed(offload=args.offload_checkpoints, keep_attention=keep_attention)}


class LongLlama(Llama):
    """A Llama that returns this rank's share of the loss, not logits: FSDP2 has its head whole in its forward."""

    def __init__(self, config: LlamaConfig, data: DeviceMesh, args: argparse.Namespace) -> None:
        super().__init__(config, CoreAttention)
        self.data, self.plain, self.tiled = data, args.plain, args.tiled_loss

    def forward(
        self, tokens: Tensor, positions: Tensor | None = None, labels: Tensor | None = None, count: int = 1
    ) -> Tensor:
        """Compute a share of the mean loss of ``count`` tokens, of tokens and labels [B, S] and positions [S]."""
        assert labels is not None
        if self.plain:
            return F.cross_entropy(super().forward(tokens, positions).flatten(0, 1).float(), labels.flatten())
        x = self.hidden(tokens, positions) if self.tiled else super().forward(tokens, positions)
        weight = self.output.weight if self.tiled else None
        return cp_mesh.cross_entropy(x, labels, self.data, count=count, weight=weight)


def build(config: LlamaConfig, mesh: DeviceMesh, args: argparse.Namespace, device: torch.device) -> LongLlama:
    """The model on a mesh of axes dp and cp, after every line of the plan."""
    data = mesh["dp", "cp"]._flatten("data")
    with device:  # whole on each rank at first
        model = LongLlama(config, data, args)
    model.init_weights(seed=0)
    if args.tied:
        model.output.weight = model.tok_embeddings.weight
    model.to(DTYPES[args.optimizer_dtype])
    if args.plain:
        for block in model.layers:
            block.checkpoint = partial(checkpoint, use_reentrant=False)
    else:
        sequence = cp_mesh.ShardedSequence(mesh["cp"])
        core = cp_mesh.ContextParallel(sequence, mask=mask_of(args), head_chunks=args.head_chunks)
        plan: dict[str, Any] = {
            "": cp_mesh.ShardedModel(sequence, positions="positions"),
            "layers.*.attention.core": core,
            **checkpoint_blocks(args),
        }
        if args.mlp_rows:
            plan["layers.*.feed_forward"] = cp_mesh.TiledMLP(tile_rows=args.mlp_rows)
        if max(args.seq_len) // mesh["cp"].size() * config.dim >= LARGE_NORMS:
            norms = ("layers.*.attention_norm", "layers.*.feed_forward_norm", "norm")
            plan |= dict.fromkeys(norms, cp_mesh.TiledMLP(tile_rows=args.mlp_rows or 8192))
        cp_mesh.parallelize(model, mesh["cp"], plan)
    offload = {"offload_policy": CPUOffloadPolicy(pin_memory=device.type == "cuda")} if args.offload_optimizer else {}
    apply_fsdp(model, data, args.precision, summed=not args.plain, **offload)
    return model


def mask_of(args: argparse.Namespace) -> cp_mesh.Mask:
    return cp_mesh.Mask(causal=True, window=None if args.window is None else (args.window - 1, 0))


class Trainer:
    """A model on all ranks, and its steps."""

    def __init__(self, config: LlamaConfig, mesh: DeviceMesh, args: argparse.Namespace, device: torch.device) -> None:
        self.config, self.mesh, self.args, self.device = config, mesh, args, device
        self.model = build(config, mesh, args, device)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-5, fused=True)
        self.sequence = cp_mesh.ShardedSequence(mesh["cp"])

    def step(self, seq_len: int) -> tuple[float, float, float]:
        """Loss, gradient norm and seconds of one step; each dp group has a sequence of random tokens of its own."""
        dp, generator = self.mesh["dp"], torch.Generator().manual_seed(seq_len)
        batch = torch.randint(self.config.vocab_size, (dp.size(), seq_len + 1), generator=generator)
        if not self.args.plain:
            batch = batch[dp.get_local_rank()][None]
        tokens, labels = batch[:, :-1].to(self.device), batch[:, 1:].to(self.device)
        if not self.args.plain:
            labels = self.sequence.shard({"labels": labels})["labels"]
        self.wait()
        start = time.perf_counter()
        share = self.model(tokens, labels=labels, count=dp.size() * seq_len)
        share.backward()
        norm = cp_mesh.clip_grad_norm(list(self.model.parameters()), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.wait()
        seconds = over_ranks(time.perf_counter() - start, dist.ReduceOp.MAX, self.device)
        loss = over_ranks(share.item(), dist.ReduceOp.SUM, self.device)
        return loss / (dist.get_world_size() if self.args.plain else 1), float(norm), seconds

    def attention_seconds(self, seq_len: int) -> float:
        """Both passes of attention alone, of all layers: those of one kv head with random rows, times their number."""
        config, rows = self.config, seq_len // self.mesh["cp"].size()
        dtype = DTYPES[self.args.precision]

        def random(heads: int) -> Tensor:
            return torch.randn(1, heads, rows, config.head_dim, dtype=dtype, device=self.device)

        group = config.num_heads // config.num_kv_heads
        q, k, v = (random(heads).requires_grad_() for heads in (group, 1, 1))
        dout = random(group)
        for _ in range(2):  # the first compiles and plans
            self.wait()
            start = time.perf_counter()
            cp_mesh.attention(q, k, v, mesh=self.mesh["cp"], mask=mask_of(self.args)).backward(dout)
            self.wait()
        seconds = over_ranks(time.perf_counter() - start, dist.ReduceOp.MAX, self.device)
        return seconds * config.num_kv_heads * config.num_layers

    def memory(self) -> tuple[float, float]:
        """Peak GiB on a GPU, and of pinned memory and AdamW's states in the host's; of the rank that takes most."""
        if self.device.type != "cuda":
            return 0.0, 0.0
        local = (
            x.to_local() for state in self.optimizer.state.values() for x in state.values() if isinstance(x, DTensor)
        )
        host = torch.cuda.host_memory_stats()["allocated_bytes.peak"] + pinned_bytes()
        host += sum(x.nbytes for x in local if not x.is_cuda)
        gpu = torch.cuda.max_memory_allocated() + symmetric_memory_bytes()
        most = [over_ranks(num / 2**30, dist.ReduceOp.MAX, self.device) for num in (gpu, host)]
        return most[0], most[1]

    def wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        dist.barrier()


def over_ranks(value: float, how: dist.ReduceOp.RedOpType, device: torch.device) -> float:
    found = torch.tensor(value, dtype=torch.float64, device=device)
    dist.all_reduce(found, how)
    return found.item()


def predict(args: argparse.Namespace, sizes: ModelSizes, seq_len: int, mesh: DeviceMesh) -> StepExplanation:
    return cp_mesh.tools.explain_step(
        vars(sizes) | {"model_type": "llama"}, seq_len, mesh["cp"].size(), dp_size=mesh["dp"].size(),
        dtype=DTYPES[args.precision], optimizer_dtype=DTYPES[args.optimizer_dtype], recompute=args.recompute,
        tiled_loss=args.tiled_loss, mlp_rows=args.mlp_rows, offload_checkpoints=args.offload_checkpoints,
        offload_optimizer=args.offload_optimizer, device=args.device, mask=mask_of(args), head_chunks=args.head_chunks,
    )  # fmt: skip


def measure(trainer: Trainer, seq_len: int) -> dict[str, Any]:
    """The figures of one length; "out of memory" if that is what happened here."""
    args, device = trainer.args, trainer.device
    if device.type == "cuda":
        torch.cuda.empty_cache()  # the longer the rung, the larger its pieces
        torch.cuda.reset_peak_memory_stats()
        torch.cuda.reset_peak_host_memory_stats()
    try:
        for _ in range(args.steps):
            loss, norm, seconds = trainer.step(seq_len)
        gpu, host = trainer.memory()
        attention = trainer.attention_seconds(seq_len) if args.split and not args.plain else None
    except torch.OutOfMemoryError as error:
        print(f"rank {dist.get_rank()}: {error}", flush=True)
        return {"status": f"out of memory on rank {dist.get_rank()}"}
    ranks, sequences, peak = dist.get_world_size(), trainer.mesh["dp"].size(), peak_flops(device)
    config = trainer.config
    of_attention = config.num_layers * config.num_heads * config.head_dim * seq_len**2
    flops = sequences * (seq_len * flops_per_token(config, seq_len) + of_attention)
    return {
        "status": "ok", "peak_gib": f"{gpu:.2f}", "host_gib": f"{host:.2f}", "seconds": f"{seconds:.3f}",
        "tokens_per_s": f"{sequences * seq_len / seconds:.1f}", "loss": f"{loss:.6f}", "grad_norm": f"{norm:.6g}",
        "attention_s": "" if attention is None else f"{attention:.3f}",
        "mfu": f"{flops / (seconds * ranks * peak):.4f}" if peak and not args.window else "",
    }  # fmt: skip


def same_as_plain(config: LlamaConfig, mesh: DeviceMesh, args: argparse.Namespace, device: torch.device) -> bool:
    """Whether a step of ``--gate`` tokens has the loss and gradient norm of the plain model, but for rounding."""
    found = []
    for plain in (True, False):
        args_too = argparse.Namespace(**vars(args) | {"plain": plain})
        found.append(Trainer(replace(config, num_layers=2), mesh, args_too, device).step(args.gate)[:2])
        gc.collect()  # modules and their hooks hold one another
    apart = [abs(ours / plain - 1) for plain, ours in zip(*found, strict=True)]
    if dist.get_rank() == 0:
        print(
            f"gate, {args.gate} tokens: loss {found[1][0]:.6f}, apart {apart[0]:.1e}, norm {apart[1]:.1e}", flush=True
        )
    return max(apart) < (2e-3 if device.type == "cuda" else 1e-5)


def write(path: Path | None, row: dict[str, Any]) -> None:
    print(", ".join(f"{name} {row[name]}" for name in COLUMNS[5:] if row.get(name) not in ("", None)), flush=True)
    if path is not None:
        is_new = not path.exists()
        with path.open("a", newline="") as file:
            writer = csv.DictWriter(file, COLUMNS)
            if is_new:
                writer.writeheader()
            writer.writerow(row)


def main() -> None:
    args = parse_arguments()
    device = torch.device("cpu")
    if args.device == "cuda":
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if args.device == "cuda" else "gloo", timeout=timedelta(minutes=10))
    world = dist.get_world_size()
    cp = args.cp = args.cp or world
    mesh = init_device_mesh(args.device, (world // cp, cp), mesh_dim_names=("dp", "cp"))
    sizes = ModelSizes.read(json.loads(args.model) if args.model.startswith("{") else args.model)
    if args.layers:
        sizes = replace(sizes, num_hidden_layers=args.layers)
    if sizes.head_dim * sizes.num_attention_heads != sizes.hidden_size:
        raise SystemExit(f"{args.model}: expected heads that make up hidden_size, as examples/llama.py has them")
    config = LlamaConfig(
        sizes.vocab_size, sizes.hidden_size, sizes.num_hidden_layers, sizes.num_attention_heads,
        sizes.num_key_value_heads, ffn_dim=sizes.intermediate_size,
    )  # fmt: skip
    args.tied = sizes.tie_word_embeddings
    free = torch.cuda.mem_get_info()[0] / 2**30 if device.type == "cuda" else float("inf")
    limit = args.gpu_memory or over_ranks(free, dist.ReduceOp.MIN, device)
    about = {
        "date": date.today().isoformat(), "commit": args.commit, "world": world, "torch": torch.__version__,
        "gpu": torch.cuda.get_device_name() if device.type == "cuda" else "cpu",
    }  # fmt: skip
    about |= {name: value for name, value in vars(args).items() if name in COLUMNS}
    about |= {"model": args.model, "layers": sizes.num_hidden_layers}
    predicted = {} if args.plain else {length: predict(args, sizes, length, mesh) for length in args.seq_len}
    fits = [args.force or args.plain or predicted[length].peak <= limit * 2**30 for length in args.seq_len]
    if args.gate and not same_as_plain(config, mesh, args, device):
        raise SystemExit("DIFFERENT: nothing was run")
    trainer, failed = None, False
    for length, fit in zip(args.seq_len, fits, strict=True):
        row, told = about | {"seq_len": length}, predicted.get(length)
        if told is not None:
            if dist.get_rank() == 0:
                print(told, flush=True)
            row |= {"predicted_gib": f"{told.peak / 2**30:.2f}", "predicted_host_gib": f"{told.host / 2**30:.2f}"}
        if not fit:
            row["status"] = f"not run: predicted not to fit in {limit:.1f} GiB"
        else:
            if trainer is None:
                trainer = Trainer(config, mesh, args, device)
                trainer.step(128 * cp)  # from here on AdamW has its states
            row |= measure(trainer, length)
        failed = row["status"].startswith("out of memory")
        if failed or dist.get_rank() == 0:
            write(args.csv, row)
        if failed:
            break
    if failed and world > 1:
        os._exit(1)  # other ranks wait in a collective; torchrun ends them
    dist.barrier()
    dist.destroy_process_group()
    sys.exit(0 if trainer is not None and not failed else 1)


if __name__ == "__main__":
    main()
