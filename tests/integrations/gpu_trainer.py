"""Six steps of Transformers' Trainer on GPUs that share each sequence, under FSDP2, against one GPU.

    python tests/integrations/gpu_trainer.py --gpus 2                # a table; exits with 1 if any line fails
    python tests/integrations/gpu_trainer.py --gpus 2 --device cpu   # on ranks of gloo

It needs Transformers and accelerate, not TRL. In float32, without TF32, losses, gradient norms and the loss of an
evaluation may differ from one GPU's by 1e-5, as in test_trainer.py. In bfloat16 they are compared with one GPU's in
float32: they may be off by twice as much as one GPU in bfloat16 is at worst, and by the rounding of each rank's share
of the loss, which FSDP2 gives in bfloat16 by accelerate's settings, with cp_mesh and without.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
import transformers

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # a checkout that is not installed

from accelerate import ParallelismConfig
from accelerate.state import AcceleratorState, GradientState, PartialState
from transformers import DataCollatorWithFlattening, LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

from cp_mesh.integrations.trainer import context_parallel

BOUND, FACTOR, STEPS, ROWS, VOCABULARY = 1e-5, 2.0, 6, 4, 512
CASES = [f"{case} {dtype}" for case in ("plain", "packed") for dtype in ("float32", "bfloat16")]
ROUNDING = {"float32": 0.0, "bfloat16": 2.0**-8}  # relative


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


def train(case: str, dtype: str, device: str) -> list[float]:
    """The loss and gradient norm of every step, and the loss of an evaluation."""
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    for state in (AcceleratorState, GradientState, PartialState):
        state._reset_state()
    sharing = {"parallelism_config": ParallelismConfig(cp_size=ranks), "fsdp": True} if ranks > 1 else {}
    arguments = TrainingArguments(
        **{"output_dir": tempfile.gettempdir(), "save_strategy": "no", "report_to": [], "disable_tqdm": True},
        **{"use_cpu": device == "cpu", "bf16": dtype == "bfloat16", "tf32": None if device == "cpu" else False},
        **{"per_device_train_batch_size": ROWS, "per_device_eval_batch_size": ROWS, "gradient_accumulation_steps": 2},
        **{"max_steps": STEPS, "logging_steps": 1, "optim": "sgd", "learning_rate": 0.3},
        **{"lr_scheduler_type": "constant", "seed": 3, **sharing},
    )
    kind = context_parallel(Trainer) if ranks > 1 else Trainer
    collator = padded if case == "plain" else DataCollatorWithFlattening()
    data = {"train_dataset": rows()[ROWS:], "eval_dataset": rows()[:ROWS]}
    trainer = kind(model=model(), args=arguments, data_collator=collator, **data)
    trainer.train()
    logged = [x[name] for name in ("loss", "grad_norm") for x in trainer.state.log_history if "grad_norm" in x]
    assert len(logged) == 2 * STEPS
    return [*map(float, logged), trainer.evaluate()["eval_loss"]]


def run(ranks: int, device: str) -> dict[str, torch.Tensor]:
    """What so many processes of this file find."""
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)] if ranks > 1 else []
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    if ranks == 1:
        environment["CUDA_VISIBLE_DEVICES"] = "0"  # of several the Trainer would take all
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "found.json"
        command = [sys.executable, *torchrun, __file__, "--device", device, "--write", str(file)]
        subprocess.run(command, env=environment, check=True)
        return {name: torch.tensor(x, dtype=torch.float64) for name, x in json.loads(file.read_text()).items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gpus", type=int, default=2, help="or ranks of gloo")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--write", type=Path, help=argparse.SUPPRESS)  # of the processes that this file starts
    args = parser.parse_args()
    if args.write:
        found = {name: train(*name.split(), args.device) for name in CASES}
        if os.environ.get("RANK", "0") == "0":
            args.write.write_text(json.dumps(found))
        if dist.is_initialized():
            dist.barrier()  # gloo may still hold tensors of the last collective
            dist.destroy_process_group()
        return
    alone, shared = run(1, args.device), run(args.gpus, args.device)
    kind = torch.cuda.get_device_name() if args.device == "cuda" else "CPU ranks"
    print(f"{args.gpus} x {kind}, torch {torch.__version__}, transformers {transformers.__version__}")
    failed = False
    for name, ours in shared.items():
        case, dtype = name.split()
        exact = alone[f"{case} float32"]
        allowed = BOUND if dtype == "float32" else FACTOR * (alone[name] - exact).abs().max()
        apart = (ours - exact).abs()
        share = (apart / (allowed + ROUNDING[dtype] * exact.abs())).max().item()
        verdict = "ok" if share <= 1 else "FAILED"  # as it is where it is not a number
        failed |= verdict != "ok"
        print(f"{name:16} differs by {apart.max():.1e}, {share:4.0%} of what is allowed: {verdict}")
    sys.exit(failed)


if __name__ == "__main__":
    main()
