"""Six steps of Trainer and SFTTrainer on GPUs that share each sequence, under FSDP2, against one GPU.

    python tests/integrations/gpu_trainer.py --gpus 2                # a table; exits with 1 if any line fails
    python tests/integrations/gpu_trainer.py --gpus 2 --device cpu   # on ranks of gloo

It needs Transformers and accelerate. With liger-kernel the Trainer applies that. With TRL, SFTTrainer packs documents
for two layers of Qwen3-8B, of Gemma-3-1B with windows of 64 tokens and of Qwen3.5-9B: random weights, 512 words, on
CPUs a sixteenth of the features. In float32, without TF32, losses, gradient norms and the loss of an evaluation may
differ from one GPU's by 1e-5, as in test_trainer.py; norms of Qwen3.5, which are large, are left out in both. In
bfloat16 they are compared with one GPU's in float32: they may be off by twice as much as one GPU in bfloat16 is at
worst, and by the rounding of each rank's share of the loss, which FSDP2 gives in bfloat16 by accelerate's settings,
with cp_mesh and without.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import subprocess
import sys
import tempfile
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import transformers

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # a checkout that is not installed
sys.path.append(str(Path(__file__).resolve().parents[2] / "examples"))

from accelerate import ParallelismConfig
from accelerate.state import AcceleratorState, GradientState, PartialState
from transformers import AutoConfig, AutoModelForCausalLM, DataCollatorWithFlattening, Trainer, TrainingArguments

from cp_mesh.integrations.trainer import context_parallel

BOUND, FACTOR, STEPS, ROWS, VOCABULARY = 1e-5, 2.0, 6, 4, 512
ROUNDING = {"float32": 0.0, "bfloat16": 2.0**-8}  # relative
SIZES = ("hidden_size", "intermediate_size", "head_dim", "num_attention_heads", "num_key_value_heads")
_LINEAR = {"linear_key_head_dim": 128, "linear_value_head_dim": 128}
MODELS: dict[str, tuple[str, tuple[int, ...], dict[str, Any]]] = {
    "plain": ("llama", (256, 512, 64, 4, 2), {}),
    "packed": ("llama", (256, 512, 64, 4, 2), {}),
    "liger": ("llama", (256, 512, 64, 4, 2), {}),
    "dense": ("qwen3", (4096, 12288, 128, 32, 8), {}),
    "windows": ("gemma3_text", (1152, 6912, 256, 4, 1), {"sliding_window": 64, "layer_types": "sliding_attention"}),
    "hybrid": ("qwen3_5_text", (4096, 12288, 256, 16, 4), _LINEAR | {"layer_types": "linear_attention"}),
}
"""By case: a family, `SIZES`, and what else its config has; `layer_types` is that of the first layer, of two."""
OF_TRL = ("dense", "windows", "hybrid")
NEEDED = dict.fromkeys(OF_TRL, "trl") | {"liger": "liger_kernel" if torch.cuda.is_available() else "no CPU kernels"}
CASES = [f"{case} {dtype}" for case in MODELS if find_spec(NEEDED.get(case, "torch")) for dtype in ROUNDING]


def rows() -> list[dict[str, list[int]]]:
    """Sequences of unequal lengths, as many as two micro-batches a step take, and four for the evaluation."""
    numbers = torch.Generator().manual_seed(1)
    lengths = torch.randint(100, 400, (2 * STEPS * ROWS + ROWS,), generator=numbers).tolist()
    ids = [torch.randint(1, VOCABULARY, (length,), generator=numbers).tolist() for length in lengths]
    return [{"input_ids": x, "labels": x} for x in ids]


def padded(batch: list[dict[str, list[int]]]) -> dict[str, torch.Tensor]:
    ids = torch.nn.utils.rnn.pad_sequence([torch.tensor(x["input_ids"]) for x in batch], batch_first=True)
    return {"input_ids": ids, "labels": ids.where(ids > 0, -100), "attention_mask": (ids > 0).long()}


def apart(batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The documents of a packed batch as rows that are padded: recurrent layers of Transformers take no others."""
    begins = (batch["position_ids"][0] == 0).nonzero()[:, 0].tolist()
    ids = batch["input_ids"][0].tolist()
    return padded([{"input_ids": ids[i:j]} for i, j in itertools.pairwise([*begins, len(ids)])])


def model(case: str, device: torch.device) -> Any:
    transformers.set_seed(0)
    family, sizes, others = MODELS[case]
    shape = dict(zip(SIZES, sizes, strict=True)) | others
    if "layer_types" in shape:
        shape["layer_types"] = [shape["layer_types"], "full_attention"]
    if case in OF_TRL and device.type == "cpu":
        shape |= {name: x // 16 for name, x in shape.items() if name.endswith(("_size", "_dim"))}
    config = AutoConfig.for_model(family, vocab_size=VOCABULARY, num_hidden_layers=2, use_cache=False, **shape)
    with device:
        return AutoModelForCausalLM.from_config(config)


def train(case: str, dtype: str, device: str) -> list[float]:
    """The loss and gradient norm of every step, and the loss of an evaluation."""
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    for state in (AcceleratorState, GradientState, PartialState):
        state._reset_state()
    sharing = {"parallelism_config": ParallelismConfig(cp_size=ranks), "fsdp": True} if ranks > 1 else {}
    if ranks > 1 and case == "hybrid":
        sharing["fsdp_config"] = {"transformer_layer_cls_to_wrap": ["Qwen3_5DecoderLayer"]}
    given = sharing | {
        **{"output_dir": tempfile.gettempdir(), "save_strategy": "no", "report_to": [], "disable_tqdm": True},
        **{"use_cpu": device == "cpu", "bf16": dtype == "bfloat16", "tf32": None if device == "cpu" else False},
        **{"per_device_train_batch_size": ROWS, "per_device_eval_batch_size": ROWS, "gradient_accumulation_steps": 2},
        **{"max_steps": STEPS, "logging_steps": 1, "optim": "sgd", "learning_rate": 0.3},
        **{"lr_scheduler_type": "constant", "seed": 3},
    }
    data: dict[str, Any] = {"train_dataset": rows()[ROWS:], "eval_dataset": rows()[:ROWS]}
    if case in OF_TRL:
        from datasets import Dataset
        from offline import tokenizer
        from trl import SFTConfig, SFTTrainer

        data = {name: Dataset.from_list(x) for name, x in data.items()} | {"processing_class": tokenizer()}
        given |= {"packing": True, "max_length": 1024, "per_device_train_batch_size": 1, "learning_rate": 0.03}
        kind, arguments = SFTTrainer, SFTConfig(**given)
    else:
        if case == "liger":
            given |= {"use_liger_kernel": True, "liger_kernel_config": {"fused_linear_cross_entropy": False}}
        kind, arguments = Trainer, TrainingArguments(**given)
        data["data_collator"] = DataCollatorWithFlattening() if case == "packed" else padded
    kind = context_parallel(kind) if ranks > 1 else kind
    trainer = kind(model=model(case, arguments.device), args=arguments, **data)
    if ranks == 1 and case == "hybrid":
        collator = trainer.data_collator
        trainer.data_collator = lambda rows: apart(collator(rows))
    trainer.train()
    names = ("loss",) if case == "hybrid" else ("loss", "grad_norm")
    logged = [x[name] for name in names for x in trainer.state.log_history if "grad_norm" in x]
    assert len(logged) == len(names) * STEPS
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
