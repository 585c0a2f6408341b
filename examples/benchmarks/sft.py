"""Time TRL's recipe for long sequences: SFTTrainer with Qwen3-8B's layers, by cp_mesh and by accelerate's own cp.

    torchrun --nproc-per-node 2 examples/benchmarks/sft.py --seq-len 65536 131072 262144 --layers 6 --csv sft.csv
    torchrun --nproc-per-node 2 examples/benchmarks/sft.py --seq-len 65536 131072 --warmup 1 --csv sft.csv  # 36 layers

Contestants are the same SFTTrainer with the same arguments: FSDP2 with its activation checkpointing, float32 weights
and AdamW, bfloat16 products, TRL's loss, which makes no whole logits. `context_parallel` is around that of "cp_mesh".
SDPA of "accelerate" takes the backend that PyTorch prefers, that of "accelerate/cudnn" cuDNN's. "one": a document
fills each sequence; "packed": `packing=True`, lognormal lengths with median 512, which TRL refuses with accelerate's
cp. Weights are random; they and the batches are equal for all.

A step lasts from the end of the one before, with its batch, metrics and log; times are those of the slowest rank.
`tokens` is the mean of measured steps. `peak_gib` is the largest of measured steps on any rank, with cp_mesh's
symmetric memory and without NCCL's buffers. `loss` and `grad_norm` are those of the first step, from equal weights;
`difference`, the larger relative one from cp_mesh's, may be `BOUND`: two units of bfloat16, to which FSDP2 rounds log-
probabilities and gradients. A contestant that raises has the reason in `status`.
"""

from __future__ import annotations

import itertools
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import nullcontext
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from accelerate import ParallelismConfig
from accelerate.state import AcceleratorState, GradientState, PartialState
from datasets import Dataset
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import Qwen3Config, Qwen3ForCausalLM, TrainerCallback, set_seed
from trl import SFTConfig, SFTTrainer

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(Path(__file__).parent), str(ROOT / "examples")]  # a checkout that is not installed

from attention import Ranks  # noqa: E402
from contestants import document_lengths  # noqa: E402
from offline import tokenizer  # noqa: E402
from report import machine, options, spread  # noqa: E402

from cp_mesh.comm.exchange import symmetric_memory_bytes  # noqa: E402
from cp_mesh.integrations.trainer import context_parallel  # noqa: E402

BOUND = 2**-7
COLUMNS = (
    *("date", "commit", "gpu", "world_size", "torch", "cuda", "cudnn", "nccl", "packages", "contestant", "documents"),
    *("layers", "seq_len", "optimizer", "warmup", "steps", "step_ms", "step_ms_min", "step_ms_max", "tokens"),
    *("tokens_per_s", "tokens_per_s_per_gpu", "peak_gib", "loss", "grad_norm", "difference", "status"),
)
SDPA = {"accelerate": None, "accelerate/cudnn": SDPBackend.CUDNN_ATTENTION}
"""Contestants beside cp_mesh, and the backend of SDPA that they are given."""
TINY = {"vocab_size": 1000, "hidden_size": 64, "intermediate_size": 96, "head_dim": 16}


class Clock(TrainerCallback):
    """When each step ended on the device; after those that warm up, memory's peak is counted anew."""

    def __init__(self, ranks: Ranks, warmup: int) -> None:
        self.ranks, self.warmup, self.ends = ranks, warmup, list[float]()

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.ranks.synchronize()
        self.ends.append(time.perf_counter())
        if state.global_step == self.warmup and self.ranks.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()


def parse_arguments(argv: Sequence[str] | None) -> Any:
    parser = options(__doc__ or "", time_limit=True)
    add = parser.add_argument
    add("--seq-len", type=int, nargs="+", default=[65536, 131072, 262144], help="tokens of a sequence, ascending")
    add("--contestants", nargs="+", choices=("cp_mesh", *SDPA), default=["cp_mesh", "accelerate"])
    add("--documents", nargs="+", choices=("one", "packed"), default=["one", "packed"])
    add("--layers", type=int, default=36)
    add("--tiny", action="store_true", help="few features and words")
    add("--optim", default="adamw_torch_fused", help="as in TrainingArguments")
    add("--warmup", type=int, default=2, help="steps before the measured ones, at least one")
    add("--steps", type=int, default=3, help="measured steps")
    return parser.parse_args(argv)


def make(name: str, documents: str, seq_len: int, args: Any, ranks: Ranks) -> Any:
    """A trainer of the contestant."""
    shapes = {"vocab_size": 151936, "hidden_size": 4096, "intermediate_size": 12288, "head_dim": 128}
    shapes |= {"num_attention_heads": 32, "num_key_value_heads": 8} | (TINY if args.tiny else {})
    config = Qwen3Config(num_hidden_layers=args.layers, max_position_embeddings=max(args.seq_len), **shapes)
    for state in (AcceleratorState, GradientState, PartialState):
        state._reset_state()  # a process has one of each
    arguments = SFTConfig(
        **{"output_dir": tempfile.gettempdir(), "save_strategy": "no", "report_to": [], "disable_tqdm": True},
        **{"use_cpu": args.device == "cpu", "bf16": args.device == "cuda", "max_steps": args.warmup + args.steps},
        **{"logging_steps": 1, "per_device_train_batch_size": 1, "optim": args.optim, "learning_rate": 1e-5},
        **{"max_length": seq_len, "packing": documents == "packed", "gradient_checkpointing": False},
        **{"fsdp": True, "fsdp_config": {"activation_checkpointing": True}},
        parallelism_config=ParallelismConfig(cp_size=ranks.size),
    )
    lengths = [seq_len] * arguments.max_steps
    if documents == "packed":
        lengths = [*document_lengths(arguments.max_steps * seq_len, longest=seq_len // 4)]
    drawn = torch.Generator().manual_seed(0)
    texts = [torch.randint(config.vocab_size, (length,), generator=drawn).tolist() for length in lengths]
    data = {"train_dataset": Dataset.from_dict({"input_ids": texts, "labels": texts})}
    set_seed(0)
    with ranks.device:
        model = Qwen3ForCausalLM(config)
    kind = context_parallel(SFTTrainer) if name == "cp_mesh" else SFTTrainer
    return kind(model, arguments, processing_class=tokenizer(), **data)


def measure(trainer: Any, name: str, args: Any, ranks: Ranks) -> dict[str, Any]:
    clock, sizes, collator = Clock(ranks, args.warmup), list[int](), trainer.data_collator
    trainer.data_collator = lambda rows: sizes.append(sum(len(x["input_ids"]) for x in rows)) or collator(rows)
    trainer.add_callback(clock)
    with sdpa_kernel(backend) if (backend := SDPA.get(name)) else nullcontext():
        trainer.train()
    ms = [1e3 * (end - begin) for begin, end in itertools.pairwise(clock.ends[args.warmup - 1 :])]
    ms = ranks.largest(ms).tolist()
    tokens = sum(sizes[args.warmup : args.warmup + args.steps]) / args.steps
    speed = 1e3 * tokens * args.steps / sum(ms)
    found = {"tokens": f"{tokens:.0f}", "tokens_per_s": f"{speed:.0f}"} | spread("step", ms, 1)
    found["tokens_per_s_per_gpu"] = f"{speed / ranks.size:.0f}"
    first = next(log for log in trainer.state.log_history if "grad_norm" in log)
    found |= {key: float(first[key]) for key in ("loss", "grad_norm")}
    if ranks.device.type == "cuda":
        own = symmetric_memory_bytes() if name == "cp_mesh" else 0
        found["peak_gib"] = f"{float(ranks.largest(torch.cuda.max_memory_allocated() + own)) / 2**30:.1f}"
    return found


def main(argv: Sequence[str] | None = None) -> None:
    args, began, failed = parse_arguments(argv), time.monotonic(), False
    ranks = Ranks(args.device)
    about = machine(ranks.device, ranks.size, args.commit)
    about["packages"] += "".join(f" {name}={metadata.version(name)}" for name in ("accelerate", "trl"))
    about |= {"layers": args.layers, "optimizer": args.optim, "warmup": args.warmup, "steps": args.steps}
    of_cp_mesh = dict[tuple[int, str], dict[str, Any]]()
    for seq_len, name, documents in itertools.product(args.seq_len, args.contestants, args.documents):
        found, problem = dict[str, Any](), "left out: the time limit"
        if float(ranks.largest(time.monotonic() - began)) < args.time_limit:
            of = name, documents, seq_len, args, ranks
            trainer, problem = ranks.attempt(lambda of=of: make(*of))
            if trainer is not None:
                result, problem = ranks.attempt(lambda x=trainer, name=name: measure(x, name, args, ranks))
                found = result or {}
            groups = [trainer.accelerator.torch_device_mesh["cp"].get_group()] if trainer else []
            del trainer
            ranks.release(*groups)
        if found and name == "cp_mesh":
            of_cp_mesh[seq_len, documents] = found
        elif found and (ours := of_cp_mesh.get((seq_len, documents))):
            difference = max(abs(found[key] / ours[key] - 1) for key in ("loss", "grad_norm"))
            found["difference"] = f"{difference:.1e}"
            if not difference <= BOUND:
                problem, failed = f"failed: differs from cp_mesh by {difference:.1e}", True
        status = (problem or "ok").replace("error: ValueError", "refused")
        row = about | {"contestant": name, "documents": documents, "seq_len": seq_len} | found | {"status": status}
        ranks.print(", ".join(f"{key} {row[key]}" for key in COLUMNS[COLUMNS.index("contestant") :] if key in row))
        ranks.append(args.csv, COLUMNS, [row])
    ranks.end(failed)


if __name__ == "__main__":
    main()
