"""axolotl with its plugin on two ranks, against axolotl without it on one: losses, weights, an evaluation, to 1e-5.

`python3 tests/run.py --integrations-axolotl` has the environment. This file is also the script that a rank runs.
"""

from __future__ import annotations

import json
import os
import re
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

os.environ |= {"AXOLOTL_DO_NOT_TRACK": "1", "HF_HUB_OFFLINE": "1"}  # read when axolotl is imported
pytest.importorskip("axolotl")

ROOT = Path(__file__).resolve().parents[2]
sys.path += [str(ROOT / "examples"), str(ROOT / "tests")]

import yaml  # noqa: E402
from inside import inner  # noqa: E402
from safetensors.torch import load_file  # noqa: E402
from scripts import run_script  # noqa: E402

from cp_mesh import ArgumentError, UnsupportedError  # noqa: E402

PAGE = ROOT / "docs" / "trainer.md"
BOUND = 1e-5
CP: dict[str, Any] = yaml.safe_load(re.findall(r"^```yaml\n(.*?)^```", PAGE.read_text(), re.M | re.S)[0])
"""The keys that docs/trainer.md adds."""
PACKED = {"sample_packing": True, "micro_batch_size": 1}
CHANGES: dict[str, dict[str, Any]] = {
    "plain": {},
    "packed": PACKED,
    "dp": {
        "curriculum_sampling": True,
        "micro_batch_size": 1,
        "max_steps": 3,
        "val_set_size": 0,
        "eval_strategy": "no",
    },
    "lora": {"adapter": "lora", "lora_r": 4, "lora_alpha": 8, "lora_target_modules": ["q_proj", "down_proj"]},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With a model, its tokenizer and texts."""
    import offline
    import ranks

    ranks.PRELOAD[:0] = ["axolotl.train", "axolotl.cli.config"]
    made = tmp_path_factory.mktemp("axolotl")
    offline.tokenizer().save_pretrained(made / "model")
    offline.model().save_pretrained(made / "model")
    rows = [json.dumps({"text": text}) for text in offline.texts() if 40 < len(text) < 600]
    (made / "texts.jsonl").write_text("\n".join(rows[:30]))
    return made


def run(folder: Path, name: str, ranks: int | None = None, **changes: Any) -> Any:
    """Trains by axolotl's command; returns what it logged, and the weights that it saved."""
    settings = {
        **{"base_model": str(folder / "model"), "output_dir": str(folder / name), "sequence_len": 256},
        **{"datasets": [{"path": str(folder / "texts.jsonl"), "ds_type": "json", "type": "completion"}]},
        **{"dataset_prepared_path": str(folder / f"of {name}"), "val_set_size": 0.1, "eval_strategy": "epoch"},
        **{"attn_implementation": "sdpa", "sample_packing": False, "pad_to_sequence_len": False},
        **{"micro_batch_size": 2, "gradient_accumulation_steps": 2, "num_epochs": 1, "save_strategy": "epoch"},
        **{"optimizer": "sgd", "learning_rate": 0.3, "lr_scheduler": "constant", "logging_steps": 1},
        **{"bf16": False, "fp16": False, "tf32": False, "dataloader_num_workers": 0, "dataset_num_proc": 1},
    } | changes
    (folder / f"{name}.yml").write_text(json.dumps(settings))
    done = run_script(Path(__file__), [str(folder / f"{name}.yml")], ranks)
    assert not done.returncode, done.printed[-4000:]
    (saved,) = (folder / name).glob("checkpoint-*")
    log = json.loads((saved / "trainer_state.json").read_text())["log_history"]
    kept = ("loss", "grad_norm", "eval_loss", "tokens/trainable", "tokens/total", "step")
    logged = [{key: x[key] for key in kept if key in x} for x in log]
    return logged, load_file(next((folder / name).glob("*model.safetensors")))


def test_refusals() -> None:
    plugin = inner("integrations.axolotl", "ContextParallelPlugin")()
    given = {"rl": "dpo", "reward_model": True, "trainer_cls": "mine.Trainer", "use_ray": True, "deepspeed": "x.json"}
    given |= {"orpo_alpha": 0.1, "dp_shard_size": 4}
    for key, value in (given | {"tensor_parallel_size": 2, "expert_parallel_size": 2}).items():
        with pytest.raises(UnsupportedError, match=f"{key}: expected none"):
            plugin.register(CP | {key: value})
    for changes in ({"fsdp_version": 1}, {"fsdp_config": None}):
        with pytest.raises(ArgumentError, match="fsdp_version: 2 with fsdp_config"):
            plugin.register(CP | changes)
    with pytest.raises(ArgumentError, match="rename the key"):
        plugin.register({"sequence_parallel_degree": 2})
    plugin.register(dict(CP))
    with pytest.raises(ArgumentError, match="expected the trainer of this plugin, got object"):
        plugin.post_trainer_create({}, object())
    plugin.register({"context_parallel_size": 1, "rl": "dpo"})
    assert plugin.get_trainer_cls({}) is None and plugin.get_training_args({}) is None


@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=() if case == "packed" else pytest.mark.full) for case in CHANGES]
)
def test_one_epoch(folder: Path, case: str) -> None:
    dp = 2 if case == "dp" else 1
    logged, weights = run(folder, f"{case} on one", **CHANGES[case], gradient_accumulation_steps=2 * dp)
    found, sharded = run(folder, f"{case} on ranks", 2 * dp, **CP | CHANGES[case])
    assert len(logged) >= 3 and len(found) == len(logged)
    for ours, theirs in zip(found, logged, strict=True):
        assert ours == pytest.approx(theirs, rel=0, abs=BOUND)
    assert sharded.keys() == weights.keys()
    assert max((x - weights[name]).abs().max().item() for name, x in sharded.items()) < BOUND


if __name__ == "__main__":
    os.environ["ACCELERATE_USE_CPU"] = "true"
    from accelerate import ParallelismConfig
    from axolotl.cli.train import do_cli

    on_cuda = ParallelismConfig.build_device_mesh
    with mock.patch.object(ParallelismConfig, "build_device_mesh", lambda config, _: on_cuda(config, "cpu")):
        do_cli(sys.argv[1])
