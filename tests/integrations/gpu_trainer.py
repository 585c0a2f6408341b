"""Six steps of Transformers' Trainer on GPUs that share each sequence, under FSDP2, against one GPU.

    python tests/integrations/gpu_trainer.py --gpus 2                # a table; exits with 1 if any line fails
    python tests/integrations/gpu_trainer.py --gpus 2 --device cpu   # on ranks of gloo

It needs Transformers and accelerate, not TRL. In float32, without TF32, losses, gradient norms and the loss of an
evaluation may differ from one GPU's by 1e-5, as in test_trainer.py. In bfloat16 they may be off from those in float32
by twice as much as the Trainer without cp_mesh is at worst, on as many GPUs by FSDP2 alone: accelerate's FSDP2 rounds
the loss itself to bfloat16.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from contextlib import nullcontext
from pathlib import Path

import torch
import torch.distributed as dist
import transformers

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # a checkout that is not installed

from accelerate import ParallelismConfig
from accelerate.state import AcceleratorState, GradientState, PartialState
from transformers import DataCollatorWithFlattening, LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

from cp_mesh.integrations.trainer import context_parallel, fsdp_on_cpus

BOUND, FACTOR, STEPS, ROWS, VOCABULARY = 1e-5, 2.0, 6, 4, 512
CASES = ("plain", "packed")
AXES = {"": "float32", "dp_shard": "bfloat16", "cp": "float32 bfloat16"}
"""What ranks share, if there are several: dtypes that are run."""


def rows() -> list[dict[str, list[int]]]:
    """Sequences of unequal lengths, as many as two micro-batches a step take, and four for the evaluation."""
    numbers = torch.Generator().manual_seed(1)
    lengths = torch.randint(100, 400, (2 * STEPS * ROWS + ROWS,), generator=numbers).tolist()
    ids = [torch.randint(1, VOCABULARY, (length,), generator=numbers).tolist() for length in lengths]
    return [{"input_ids": x, "labels": x} for x in ids]


def padded(batch: list[dict[str, list[int]]]) -> dict[str, torch.Tensor]:
    ids = torch.nn.utils.rnn.pad_sequence([torch.tensor(x["input_ids"]) for x in batch], batch_first=True)
    return {"input_ids": ids, "labels": ids.where(ids > 0, -100), "attention_mask": (ids > 0).long()}


def model() -> LlamaForCausalLM:
    transformers.set_seed(0)
    sizes = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2, "num_attention_heads": 4}
    return LlamaForCausalLM(LlamaConfig(vocab_size=VOCABULARY, num_key_value_heads=2, use_cache=False, **sizes))


def train(axis: str, case: str, dtype: str, device: str) -> list[float]:
    """The loss and gradient norm of every step, and the loss of an evaluation."""
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    batch = ROWS // (ranks if axis == "dp_shard" else 1)
    for state in (AcceleratorState, GradientState, PartialState):
        state._reset_state()
    sharing = {"parallelism_config": ParallelismConfig(**{f"{axis}_size": ranks}), "fsdp": True} if axis else {}
    arguments = TrainingArguments(
        **{"output_dir": tempfile.gettempdir(), "save_strategy": "no", "report_to": [], "disable_tqdm": True},
        **{"use_cpu": device == "cpu", "bf16": dtype == "bfloat16", "tf32": None if device == "cpu" else False},
        **{"per_device_train_batch_size": batch, "per_device_eval_batch_size": batch, "gradient_accumulation_steps": 2},
        **{"max_steps": STEPS, "logging_steps": 1, "optim": "sgd", "learning_rate": 0.3},
        **{"lr_scheduler_type": "constant", "seed": 3, **sharing},
    )
    kind = context_parallel(Trainer) if axis == "cp" else Trainer
    collator = padded if case == "plain" else DataCollatorWithFlattening()
    data = {"train_dataset": rows()[ROWS:], "eval_dataset": rows()[:ROWS]}
    with fsdp_on_cpus() if axis == "dp_shard" and device == "cpu" else nullcontext():
        trainer = kind(model=model(), args=arguments, data_collator=collator, **data)
    trainer.train()
    logged = [x[name] for name in ("loss", "grad_norm") for x in trainer.state.log_history if "grad_norm" in x]
    assert len(logged) == 2 * STEPS
    return [*map(float, logged), trainer.evaluate()["eval_loss"]]


def apart(ours: list[float], theirs: list[float]) -> float:
    """The largest difference, which is not a number where some number is not."""
    return (torch.tensor(ours) - torch.tensor(theirs)).abs().max().item()


def run(axis: str, ranks: int, device: str) -> dict[str, list[float]]:
    """What processes of this file find, one or as many as there are ranks."""
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)] if axis else []
    environment = os.environ | {"OMP_NUM_THREADS": "1"} | ({} if axis else {"CUDA_VISIBLE_DEVICES": "0"})
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "found.json"
        command = [sys.executable, *torchrun, __file__, "--device", device, "--axis", axis, "--write", str(file)]
        subprocess.run(command, env=environment, check=True)
        return json.loads(file.read_text())  # type: ignore[no-any-return]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gpus", type=int, default=2, help="or ranks of gloo")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--write", type=Path, help=argparse.SUPPRESS)  # of the processes that this file starts
    parser.add_argument("--axis", choices=AXES, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.write:
        cases = [(case, dtype) for case in CASES for dtype in AXES[args.axis].split()]
        found = {f"{case} {dtype}": train(args.axis, case, dtype, args.device) for case, dtype in cases}
        if os.environ.get("RANK", "0") == "0":
            args.write.write_text(json.dumps(found))
        if dist.is_initialized():
            dist.barrier()  # gloo may still hold tensors of the last collective
            dist.destroy_process_group()
        return
    alone, by_dp, found = (run(axis, args.gpus, args.device) for axis in AXES)
    kind = torch.cuda.get_device_name() if args.device == "cuda" else "CPU ranks"
    print(f"{args.gpus} x {kind}, torch {torch.__version__}, transformers {transformers.__version__}")
    failed = False
    for name, ours in found.items():
        case, _, dtype = name.partition(" ")
        exact = alone[f"{case} float32"]
        bound = BOUND if dtype == "float32" else FACTOR * apart(by_dp[name], exact)
        largest = apart(ours, exact)
        failed |= not largest <= bound  # nor is it where it is not a number
        print(f"{name:16} {largest:.1e} of at most {bound:.1e} {'ok' if largest <= bound else 'FAILED'}")
    sys.exit(failed)


if __name__ == "__main__":
    main()
