"""Time whole training steps of a hybrid of Transformers over cp, beside one GPU with the same kernels.

    torchrun --nproc-per-node 2 examples/benchmarks/hybrid_step.py --rows 65536 131072 262144 --csv hybrid.csv

The model has layers of Qwen3.5-9B, three of four with the gated delta rule, and a vocabulary of 32,768, since with few
layers the whole one would dominate. A step is forward, backward, clipping and AdamW: FSDP2, float32 weights, bfloat16
products, layers that keep only their inputs and what attention returns. "cp" shards the sequence over all ranks; of
"one" each rank alone has the whole sequence. Packed documents are those of attention.py.

A gate runs first, on ``--gate-rows`` tokens: the error of all gradients together, from a rank that computes in float32,
may be 1.5 times that of "one". A length that would not fit, by the peak of the one before, is not run. Times are those
of one step on the slowest rank. ``peak_gib`` is the largest on any rank, without NCCL's buffers.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from transformers import Qwen3_5ForCausalLM, Qwen3_5TextConfig

sys.path[:0] = [str(Path(__file__).resolve().parents[2]), str(Path(__file__).parent)]  # a checkout not installed

from attention import OWN_FACTOR, OWN_ROUNDING, Ranks, milliseconds  # noqa: E402
from contestants import document_lengths  # noqa: E402
from report import machine, options, spread  # noqa: E402

import cp_mesh  # noqa: E402
from cp_mesh.comm.exchange import symmetric_memory_bytes  # noqa: E402
from cp_mesh.integrations.transformers import parallelize  # noqa: E402

COLUMNS = (
    *("date", "commit", "gpu", "world_size", "torch", "cuda", "cudnn", "nccl", "packages", "transformers"),
    *("contestant", "documents", "rows", "layers", "width", "vocab", "dtype", "repeats"),  # rows of all ranks together
    *("step_ms", "step_ms_min", "step_ms_max", "tokens_per_s", "of_share", "peak_gib", "loss", "grad_norm"),
    *("error", "bound", "status"),  # of the gradients, RMS over RMS; and what it may be
)


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = options(__doc__, time_limit=True)
    add = parser.add_argument
    add("--rows", type=int, nargs="+", default=[65536, 131072, 262144], help="tokens of all ranks together, ascending")
    add("--documents", nargs="+", choices=("one", "packed"), default=["one", "packed"])
    add("--layers", type=int, default=4)
    add("--tiny", action="store_true", help="few features")
    add("--gate-rows", type=int, default=2048)
    add("--repeats", type=int, default=3)
    return parser.parse_args(argv)


def config_of(args: argparse.Namespace) -> Qwen3_5TextConfig:
    shapes: dict[str, Any] = {"vocab_size": 32768}  # others are those of the 9B model by default
    if args.tiny:
        shapes = {"vocab_size": 96, "hidden_size": 32, "intermediate_size": 64, "head_dim": 16}
        shapes |= {"num_attention_heads": 4, "num_key_value_heads": 2, "linear_num_key_heads": 2}
        shapes |= {"linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 8}
    rope = {"rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25}
    return Qwen3_5TextConfig(num_hidden_layers=args.layers, rope_parameters=rope, use_cache=False, **shapes)


class Trained:
    """A model, sharded over the ranks of a contestant, and its optimizer."""

    def __init__(self, name: str, args: argparse.Namespace, ranks: Ranks, dtype: torch.dtype) -> None:
        self.ranks, self.mesh = ranks, (mesh := ranks.mesh if name == "cp" else ranks.alone)
        torch.manual_seed(0)
        with ranks.device:
            self.model = Qwen3_5ForCausalLM(config_of(args)).train()
        parallelize(self.model, mesh)
        cp_mesh.parallelize(self.model, mesh, {"model.layers.*": cp_mesh.Checkpointed()})
        policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
        for layer in (*self.model.model.layers, self.model):
            fully_shard(layer, mesh=mesh, mp_policy=policy)
        cp_mesh.sum_gradients(self.model)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), 1e-5, fused=ranks.device.type == "cuda")

    def backward(self, batch: dict[str, Tensor]) -> Tensor:
        """This rank's share of the loss."""
        self.optimizer.zero_grad()
        loss = self.model(**batch, labels=batch["input_ids"]).loss
        loss.backward()
        return loss.detach()

    def gradients(self, batch: dict[str, Tensor]) -> list[Tensor]:
        """Whole, on the CPU."""
        self.backward(batch)
        found = [x.grad for x in self.model.parameters()]
        return [(x.full_tensor() if isinstance(x, DTensor) else x).float().cpu() for x in found]


def make_batch(documents: str, rows: int, args: argparse.Namespace, device: torch.device) -> dict[str, Tensor]:
    """Random tokens [1, rows], and ids of documents if there are several; equal on all ranks."""
    made = torch.Generator().manual_seed(0)
    batch = {"input_ids": torch.randint(config_of(args).vocab_size, (1, rows), generator=made).to(device)}
    if documents == "packed":
        lengths = torch.tensor(document_lengths(rows))
        batch["documents"] = torch.arange(len(lengths)).repeat_interleave(lengths)[None].to(device)
    return batch


def gate(documents: str, args: argparse.Namespace, ranks: Ranks, dtype: torch.dtype) -> dict[str, dict[str, str]]:
    """Of each contestant the error of its gradients, what it may be, and what became of it."""
    batch, exact, bound, found = make_batch(documents, args.gate_rows, args, ranks.device), None, torch.nan, {}
    for name, own_dtype in (("exact", torch.float32), ("one", dtype), ("cp", dtype)):
        ranks.release()
        of = name, args, ranks, own_dtype
        own, problem = ranks.attempt(lambda of=of: Trained(*of).gradients(batch))
        exact, error = own if name == "exact" else exact, torch.inf
        if own and exact:
            apart = sum(float((x - y).square().sum()) for x, y in zip(own, exact, strict=True))
            error = float(ranks.largest((apart / sum(float(y.square().sum()) for y in exact)) ** 0.5))
        bound = OWN_FACTOR * error + OWN_ROUNDING if name != "cp" else bound
        failed = "" if error <= bound < torch.inf else f"failed the gate: {error:.1e} > {bound:.1e}"
        found[name] = {"error": f"{error:.1e}", "bound": f"{bound:.1e}", "status": problem or failed or "ok"}
        ranks.print(f"gate, {documents}: {name} {found[name]}")
    return found


def measure(trained: Trained, batch: dict[str, Tensor], repeats: int) -> tuple[dict[str, str], float]:
    """The figures of a row, and the bytes that steps needed beside what stays between them."""
    ranks, ms, most = trained.ranks, [], 0.0
    if cuda := ranks.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    for _ in range(repeats + 1):  # the first one warms up
        ranks.line_up()
        begin = ranks.mark()
        loss = trained.backward(batch)
        norm = torch.nn.utils.clip_grad_norm_(trained.model.parameters(), 1.0)
        trained.optimizer.step()
        end = ranks.mark()
        ranks.synchronize()
        ms.append(float(ranks.largest(milliseconds(begin, end))))
    del ms[0]
    norm = float(norm.full_tensor() if isinstance(norm, DTensor) else norm)
    loss = float(ranks.total(loss)) * trained.mesh.size() / ranks.size
    found = {"loss": f"{loss:.6f}", "grad_norm": f"{norm:.6f}"} | spread("step", ms, 1)
    if cuda:
        most = float(ranks.largest(torch.cuda.max_memory_allocated() + symmetric_memory_bytes()))
        found["peak_gib"] = f"{most / 2**30:.2f}"
        most -= torch.cuda.memory_allocated()
    return found, most


def main(argv: Sequence[str] | None = None) -> None:
    args = parse_arguments(argv)
    ranks, config, began, failed = Ranks(args.device), config_of(args), time.monotonic(), False
    dtype = torch.bfloat16 if args.device == "cuda" else torch.float32
    about = machine(ranks.device, ranks.size, args.commit) | {"repeats": args.repeats, "dtype": str(dtype)[6:]}
    about |= {"transformers": transformers.__version__, "layers": args.layers, "vocab": config.vocab_size}
    about, alone = about | {"width": config.hidden_size}, dict[tuple[str, int], float]()
    for documents in args.documents:
        verdicts = gate(documents, args, ranks, dtype)
        failed |= any(found["status"].startswith("failed") for found in verdicts.values())
        for name in ("one", "cp"):
            ranks.release()
            trained, problem = ranks.attempt(lambda name=name: Trained(name, args, ranks, dtype))
            status, of_row = problem or verdicts[name]["status"], 0.0
            for rows in args.rows:
                row = about | verdicts[name] | {"contestant": name, "documents": documents, "rows": rows}
                if status == "ok" and float(ranks.largest(time.monotonic() - began)) > args.time_limit:
                    status = "left out: the time limit"
                if status == "ok" and of_row > 0:
                    ranks.release()
                    free = -float(ranks.largest(-torch.cuda.mem_get_info()[0]))
                    if (needs := float(ranks.largest(of_row * rows))) > 0.97 * free:
                        status = f"out of memory: needs {needs / 2**30:.0f} GiB of {free / 2**30:.0f}"
                if status == "ok" and trained is not None:
                    batch = make_batch(documents, rows, args, ranks.device)
                    result, problem = ranks.attempt(lambda t=trained, b=batch: measure(t, b, args.repeats))
                    found, most = result or ({}, 0.0)
                    status, of_row = problem or "ok", most / rows
                    if ms := float(found.get("step_ms", 0)):
                        alone |= {(documents, rows): ms} if name == "one" else {}
                        row |= found | {"tokens_per_s": f"{rows / ms * 1e3:.0f}"}
                        if best := alone.get((documents, rows)):
                            row["of_share"] = f"{ms * ranks.size / best:.4g}"
                row["status"] = status
                ranks.print(", ".join(f"{x} {row[x]}" for x in COLUMNS[COLUMNS.index("contestant") :] if x in row))
                ranks.append(args.csv, COLUMNS, [row])
            del trained
    ranks.end(failed)


if __name__ == "__main__":
    main()
