"""Time torchtitan's own Trainer, with its own context parallelism and with cp_mesh, in one run on the same ranks.

    torchrun --nproc-per-node 2 examples/benchmarks/torchtitan_training.py --seq-len 8192 32768 --csv torchtitan.csv
    torchrun --nproc-per-node 2 examples/benchmarks/torchtitan_training.py --kernel cudnn   # the kernel of its own CP
    torchrun --nproc-per-node 2 examples/benchmarks/torchtitan_training.py --documents
    torchrun --nproc-per-node 2 examples/benchmarks/torchtitan_training.py --device cpu --tiny --variants cp_mesh

It needs torchtitan 0.3.0 and PyTorch 2.13. Layers are those of Llama-3-8B; tokens are random. All variants use
torchtitan's own settings: head-tail placement, FSDP2 over cp, bf16, checkpoints, loss, optimizer. Its attention is
flex_attention, which it compiles and tunes for minutes at the first step of each length.

Variant after variant, --rounds times, a Trainer is made, warmed up, timed and dropped. Trainers start with the same
weights and tokens, and losses and gradient norms of their first steps must agree; otherwise the status says so and the
exit code is 1. Columns:
`step_ms`, the median of the slowest rank's steps over all rounds, with minimum and maximum; `tokens_per_s` of all
ranks; `peak_gib`, the largest peak of PyTorch's allocator on any rank, plus cp_mesh's symmetric memory, which that
allocator does not count.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from importlib.metadata import version
from itertools import cycle
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

ROOT = Path(__file__).resolve().parents[2]
# a checkout that is not installed, the other benchmarks, and titan.py
sys.path[:0] = [str(ROOT), str(Path(__file__).parent), str(ROOT / "tests" / "integrations")]

import titan  # noqa: E402
from attention import Ranks  # noqa: E402
from contestants import document_lengths  # noqa: E402
from report import machine, options, spread  # noqa: E402

from cp_mesh.comm.exchange import symmetric_memory_bytes  # noqa: E402
from cp_mesh.integrations.torchtitan import context_parallel  # noqa: E402

VARIANTS = ("torchtitan", "cp_mesh")
AGREE = {"bf16": (2e-3, 5e-3), "fp32": (1e-6, 5e-5)}
"""How far first losses and gradient norms may be apart, relative. A mask without documents changes the norm by 1 %."""
COLUMNS = (
    *("date", "commit", "gpu", "world_size", "torch", "torchtitan", "variant", "kernel", "method", "precision"),
    *("layers", "seq_len", "documents", "checkpoint", "compile", "rounds", "steps"),
    *("step_ms", "step_ms_min", "step_ms_max", "tokens_per_s", "peak_gib", "first_loss", "first_norm"),
    *("last_loss", "status"),
)


def parse_arguments() -> argparse.Namespace:
    parser = options(__doc__)
    parser.add_argument("--variants", nargs="+", choices=VARIANTS, default=VARIANTS)
    parser.add_argument("--seq-len", nargs="+", type=int, default=[8192, 16384, 32768, 65536])
    parser.add_argument("--documents", action="store_true", help="pack documents")
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--tiny", action="store_true", help="small layers in fp32, 256 tokens, to test that it runs")
    parser.add_argument("--checkpoint", choices=("none", "selective", "full"), default="selective")
    parser.add_argument("--compile", action="store_true", help="compile each block, and the loss")
    parser.add_argument("--kernel", default="auto", help="kernel of cp_mesh")
    parser.add_argument("--method", default="auto", help="method of cp_mesh")
    parser.add_argument("--warmup", type=int, default=3)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--rounds", type=int, default=2)
    args = parser.parse_args()
    args.precision = "fp32" if args.tiny else "bf16"
    if args.tiny:
        args.seq_len, args.layers = [256], 2
    return args


class Batches:
    """A dataloader of random tokens, the same in every run."""

    def __init__(self, seq_len: int, vocabulary: int, documents: bool = False) -> None:
        self.seq_len, self.vocabulary = seq_len, vocabulary
        lengths = document_lengths(seq_len) if documents else (seq_len,)
        positions = torch.cat([torch.arange(n) for n in lengths])[None]
        self.positions = positions

    def __iter__(self) -> Iterator[tuple[dict[str, Tensor], Tensor]]:
        numbers = torch.Generator().manual_seed(0)
        while True:
            tokens = torch.randint(self.vocabulary, (1, self.seq_len + 1), generator=numbers)
            yield {"input": tokens[:, :-1], "positions": self.positions}, tokens[:, 1:]

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        pass


def make_trainer(args: argparse.Namespace, variant: str, seq_len: int) -> Any:
    """A Trainer."""
    from torchtitan.distributed.activation_checkpoint import FullAC, SelectiveAC
    from torchtitan.models.common.config_utils import decoder_vocab_size
    from torchtitan.models.llama3 import config_registry, model_registry

    config = config_registry.llama3_debugmodel()
    config.model_spec = spec = model_registry("debugmodel" if args.tiny else "8B", attn_backend="flex")
    spec.model.layers = spec.model.layers[: args.layers]
    vocabulary = config.loss.loss_fn.global_vocab_size = decoder_vocab_size(spec)
    titan.read(config, lambda *_: Batches(seq_len, vocabulary, args.documents))
    kinds = {"none": None, "selective": SelectiveAC.Config(), "full": FullAC.Config()}
    config.activation_checkpoint = kinds[args.checkpoint]
    settings = {
        "parallelism.spmd_backend": "partial_dtensor",
        "training.disable_cuda_graphs": True,
        "validator.enable": False,
        "checkpoint.enable": False,
        "training.local_batch_size": 1,
        "training.seq_len": seq_len,
        "training.steps": args.warmup + args.steps,
        "training.mixed_precision_param": "bfloat16" if args.precision == "bf16" else "float32",
        "parallelism.context_parallel_degree": dist.get_world_size(),
        "parallelism.data_parallel_shard_degree": 1,
        "compile.enable": args.compile,
        "debug.seed": 0,
        "dump_folder": tempfile.gettempdir(),
    }
    titan.set_settings(config, settings)
    if variant == "cp_mesh":
        config = context_parallel(config, kernel=args.kernel, method=args.method)
    return config.build()


def run(
    ranks: Ranks, args: argparse.Namespace, variant: str, seq_len: int
) -> tuple[list[float], float, list[tuple[float, float]]]:
    """Step times in ms, peak in GiB, and losses and gradient norms of one Trainer."""
    trainer = make_trainer(args, variant, seq_len)
    losses: list[tuple[float, float]] = []
    trainer.metrics_processor.should_log = lambda step: True
    trainer.metrics_processor.log = lambda step, loss, _, norm, *__, **___: losses.append((float(loss), float(norm)))
    data, times = trainer.batch_generator(trainer.dataloader), []
    group, cuda = trainer.parallel_dims.get_mesh("cp").get_group(), args.device == "cuda"
    for step in range(args.warmup + args.steps):
        if step == args.warmup and cuda:
            torch.cuda.reset_peak_memory_stats()
        ranks.line_up()
        begin = time.perf_counter()
        trainer.step = step + 1
        trainer.train_step(data)
        ranks.synchronize()
        times.append(float(ranks.largest((time.perf_counter() - begin) * 1e3)))
    peak = torch.cuda.max_memory_allocated() + symmetric_memory_bytes() if cuda else 0
    trainer.close()
    del trainer, data
    torch._dynamo.reset()
    ranks.release(group)
    return times[args.warmup :], float(ranks.largest(peak / 2**30)), losses


def measure(ranks: Ranks, args: argparse.Namespace, seq_len: int) -> list[dict[str, Any]]:
    found: dict[str, list[Any]] = {variant: [] for variant in args.variants}
    for _ in range(args.rounds):
        for variant in args.variants:
            found[variant].append(run(ranks, args, variant, seq_len))
    first, rows = found[args.variants[0]][0][2][0], []
    about = vars(args) | machine(ranks.device, ranks.size, args.commit)
    about |= {"torchtitan": version("torchtitan"), "seq_len": seq_len}
    for variant, rounds in found.items():
        losses, status = [losses for _, _, losses in rounds], "ok"
        apart = [abs(x / y - 1) for each in losses for x, y in zip(each[0], first, strict=True)]
        if not all(x < most for x, most in zip(apart, cycle(AGREE[args.precision]))):
            status = f"first loss and gradient norm are not those of {args.variants[0]}, {first[0]:.6f}, {first[1]:.6f}"
        times = [ms for of_round, _, _ in rounds for ms in of_round]
        ms, peak = statistics.median(times), max(peak for _, peak, _ in rounds)
        row = about | {"variant": variant, "status": status}
        if variant != "cp_mesh":
            row |= {"kernel": "torchtitan's", "method": "torch context parallel"}
        row |= spread("step", times, 2)
        row |= {"tokens_per_s": f"{seq_len / ms * 1e3:.0f}", "peak_gib": f"{peak:.2f}" if peak else ""}
        row |= {"first_loss": f"{losses[0][0][0]:.6f}", "first_norm": f"{losses[0][0][1]:.6f}"}
        rows.append(row | {"last_loss": f"{losses[0][-1][0]:.6f}"})
        told = ("variant", "seq_len", "step_ms", "tokens_per_s", "peak_gib", "first_loss", "last_loss", "status")
        ranks.print(", ".join(f"{name} {rows[-1][name]}" for name in told))
    return [{name: row[name] for name in COLUMNS} for row in rows]


def main() -> None:
    args = parse_arguments()
    if args.device == "cpu":
        titan.on_cpus()
    ranks = Ranks(args.device)
    rows = [row for seq_len in args.seq_len for row in measure(ranks, args, seq_len)]
    ranks.append(args.csv, COLUMNS, rows)
    ranks.end(any(row["status"] != "ok" for row in rows))


if __name__ == "__main__":
    main()
