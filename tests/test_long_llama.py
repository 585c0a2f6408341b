"""`examples/long_llama.py` on two CPU ranks: lines of a plan that save memory change nothing of a step."""

from __future__ import annotations

import csv
import json
import shlex
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from ranks import group_of_one
from scripts import run_script
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "examples" / "benchmarks"), str(ROOT / "examples")]

import long_llama  # noqa: E402
from llama import LlamaConfig  # noqa: E402

SCRIPT = ROOT / "examples" / "long_llama.py"
SIZES = {
    "model_type": "llama", "hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4,
    "num_key_value_heads": 2, "num_hidden_layers": 3, "vocab_size": 64,
}  # fmt: skip
PLANS = {
    "as it is": ("", ""),
    "every line": ("", "--tiled-loss --mlp-rows 17 --offload-checkpoints --offload-optimizer --head-chunks 2 --split"),
    "full": ("", "--recompute full --tiled-loss --offload-checkpoints"),
    "a sequence each": ("--cp 1", "--mlp-rows 17 --offload-optimizer"),
    "fewer layers": ("--layers 2", "--tiled-loss"),
}
"""What both take, and what the plan adds."""


def rows_of(folder: Path, *words: str, sizes: dict = SIZES, code: int = 0) -> tuple[list[dict[str, str]], str]:
    """The rows that a run writes, and what it prints; the model is a folder with a config.json."""
    (folder / "config.json").write_text(json.dumps(sizes))
    out = folder / "rows.csv"
    out.unlink(missing_ok=True)
    words = ("--device", "cpu", "--model", str(folder), "--csv", str(out), *words)
    done = run_script(SCRIPT, words, 2)
    assert done.returncode == code, done.printed
    with out.open(newline="") as file:
        return list(csv.DictReader(file)), done.printed


@pytest.mark.parametrize("name", PLANS)
@pytest.mark.quick("every line")
def test_each_plan_takes_the_plain_step(name: str, tmp_path: Path) -> None:
    """The second step of two lengths has the loss and norm of PyTorch's alone, in float32."""
    both, words = (shlex.split(words) for words in PLANS[name])
    both += ["--seq-len", "152", "300", "--steps", "2"]
    ours, printed = rows_of(tmp_path, *both, *words)
    plain, _ = rows_of(tmp_path, *both, "--plain")
    assert [row["seq_len"] for row in ours] == ["152", "300"] and {row["status"] for row in ours} == {"ok"}
    assert all("predicted_gib" in row and row["predicted_gib"] for row in ours) and "peak " in printed
    for a, b in zip(ours, plain, strict=True):
        for column in ("loss", "grad_norm"):
            assert float(a[column]) == pytest.approx(float(b[column]), rel=2e-6), (column, a, b)
    assert (ours[0]["attention_s"] != "") == ("--split" in words)


@pytest.mark.parametrize(("limit", "rows"), [(152 * 32 + 1, 152), (152 * 32, 17)])
def test_norms_of_very_long_sequences_are_tiled(limit: int, rows: int) -> None:
    seen, real = set[int](), F.rms_norm

    def norm(x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        seen.add(x.shape[-2])
        return real(x, *args, **kwargs)

    config = LlamaConfig(64, 32, 2, 4, 2, ffn_dim=48)
    args = long_llama.parse_arguments(["--seq-len", "152", "--mlp-rows", "17", "--device", "cpu"])
    args.tied = False
    with group_of_one(), mock.patch.object(F, "rms_norm", norm), mock.patch.object(long_llama, "LARGE_NORMS", limit):
        axes = init_device_mesh("cpu", (1, 1), mesh_dim_names=("dp", "cp"))
        long_llama.Trainer(config, axes, args, torch.device("cpu")).step(152)
    assert max(seen) == rows, seen


@pytest.mark.full
def test_tied_weights_and_a_window(tmp_path: Path) -> None:
    """A window that sees all, of the step before too, changes nothing; a narrow one does."""
    tied = SIZES | {"tie_word_embeddings": True}
    (plain,), _ = rows_of(tmp_path, "--plain", "--seq-len", "152", sizes=tied)
    (wide,), _ = rows_of(tmp_path, "--window", "256", "--tiled-loss", "--seq-len", "152", sizes=tied)
    (narrow,), _ = rows_of(tmp_path, "--window", "9", "--tiled-loss", "--seq-len", "152", sizes=tied)
    (untied,), _ = rows_of(tmp_path, "--seq-len", "152")
    assert float(wide["loss"]) == pytest.approx(float(plain["loss"]), rel=2e-6)
    assert float(wide["grad_norm"]) == pytest.approx(float(plain["grad_norm"]), rel=2e-6)
    assert len({plain["grad_norm"], narrow["grad_norm"], untied["grad_norm"]}) == 3


@pytest.mark.full
def test_what_does_not_fit_is_not_run(tmp_path: Path) -> None:
    """Except by force; shorter lengths run, behind a gate."""
    few = ("--gpu-memory", "0.0025", "--seq-len", "64", "4096", "--gate", "100")
    (first, second), printed = rows_of(tmp_path, *few)
    assert first["status"] == "ok" and second["status"] == "not run: predicted not to fit in 0.0 GiB"
    assert not second["loss"] and "gate, 100 tokens" in printed
    rows, _ = rows_of(tmp_path, *few, "--force")
    assert [row["status"] for row in rows] == ["ok", "ok"]


def test_a_step_without_memory_is_a_row(tmp_path: Path) -> None:
    args = long_llama.parse_arguments(["--seq-len", "64", "--device", "cpu"])
    trainer = mock.Mock(args=args, device=torch.device("cpu"))
    trainer.step.side_effect = torch.OutOfMemoryError("none is left")
    with mock.patch.object(long_llama.dist, "get_rank", return_value=1):
        row = long_llama.measure(trainer, 64)
    assert row == {"status": "out of memory on rank 1"}
    for _ in range(2):
        long_llama.write(tmp_path / "x.csv", dict.fromkeys(long_llama.COLUMNS, "") | row)
    assert (tmp_path / "x.csv").read_text().count("out of memory on rank 1") == 2


def test_a_step_that_differs_ends_the_run() -> None:
    args = long_llama.parse_arguments(["--seq-len", "64", "--gate", "64", "--device", "cpu"])
    config = long_llama.LlamaConfig()
    with mock.patch.object(long_llama, "Trainer") as made, mock.patch.object(long_llama.dist, "get_rank"):
        for norm, same in ((1.0, True), (1.01, False)):
            made.return_value.step.side_effect = [(2.0, 1.0, 0.1), (2.0, norm, 0.1)]
            assert long_llama.same_as_plain(config, mock.Mock(), args, torch.device("cpu")) == same


def test_options_that_do_not_go_together(capsys: pytest.CaptureFixture[str]) -> None:
    for words in ("--plain --tiled-loss", "--plain --window 5", "--gate 8 --window 5"):
        with pytest.raises(SystemExit):
            long_llama.parse_arguments(["--seq-len", "64", *words.split()])
        assert words.split()[0] in capsys.readouterr().err
