"""The trainer as users run it, in processes of its own: on a mesh, on one rank, and from one to the other."""

from __future__ import annotations

import csv
import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from scripts import run_script

ROOT = Path(__file__).resolve().parent.parent
sys.path.append(str(ROOT / "examples"))
import environment  # noqa: E402
import parallel_llama  # noqa: E402
import quickstart  # noqa: E402

# 61 tokens: neither cp nor tp divides them.
SMALL = shlex.split("--device cpu --dim 32 --layers 2 --seq-len 61 --batch-size 2 --steps 4 --warmup 1 --documents")


def train(out: Path, *options: str, num_ranks: int | None = None) -> dict:
    dump = out / "dump.pt"
    arguments = [*SMALL, *options, "--out", out, "--dump", dump]
    done = run_script(ROOT / "examples" / "train_llama.py", arguments, num_ranks)
    assert done.returncode == 0, done.printed
    return torch.load(dump)


def assert_same(mesh: dict, plain: dict) -> None:
    """The losses of all steps, and the gradients of the first."""
    assert mesh["losses"] == pytest.approx(plain["losses"], abs=1e-5)
    assert mesh["gradients"].keys() == plain["gradients"].keys()
    for name, gradient in plain["gradients"].items():
        scale = float(gradient.abs().max())
        torch.testing.assert_close(mesh["gradients"][name], gradient, rtol=0, atol=1e-5 * scale, msg=name)


@pytest.mark.full
def test_trainer_on_a_mesh_equals_plain_and_resumes(tmp_path: Path) -> None:
    options = shlex.split("--cp 2 --tp 2 --recompute selective --save-every 2 --eval-every 4 --save")
    mesh = train(tmp_path / "mesh", *options, str(tmp_path / "checkpoints"), num_ranks=4)
    plain = train(tmp_path / "plain", "--plain", "--eval-every", "4")
    resumed = train(tmp_path / "resumed", "--plain", "--resume", str(tmp_path / "checkpoints" / "step_2"))

    assert_same(mesh, plain)
    assert resumed["losses"] == pytest.approx(plain["losses"][2:], abs=1e-5)
    tables = [list(csv.DictReader((tmp_path / run / "metrics.csv").open())) for run in ("mesh", "plain")]
    for column in ("eval_loss", "grad_norm", "lr"):
        on_mesh, on_one_rank = ([float(row[column] or 0) for row in table] for table in tables)
        assert on_mesh == pytest.approx(on_one_rank, rel=1e-5), column


@pytest.mark.full
@pytest.mark.parametrize("options", ["--dp 2 --cp 2", "--cp 4 --joined --compile aot_eager"])
def test_trainer_with_a_layout_for_each_batch(options: str, tmp_path: Path) -> None:
    mesh = train(tmp_path / "mesh", "--restart-positions", *shlex.split(options), num_ranks=4)
    plain = train(tmp_path / "plain", "--plain", "--restart-positions")
    assert mesh["losses"] == pytest.approx(plain["losses"], abs=1e-5)


SAVING = {
    "every line": "--recompute selective --offload-checkpoints --tiled-loss --mlp-rows 17 --offload-optimizer "
    "--head-chunks 2",
    "full": "--recompute full --tiled-loss --offload-checkpoints",
    "a window that sees all": "--window 61 --recompute selective",
}
"""Options that save memory."""


@pytest.mark.quick("every line")
@pytest.mark.parametrize("name", SAVING)
def test_what_saves_memory_changes_no_result(name: str, tmp_path: Path) -> None:
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2}
    sizes |= {"vocab_size": 264, "num_hidden_layers": 3, "tie_word_embeddings": name == "full"}
    both = ["--model", json.dumps(sizes), *shlex.split("--layers 2 --random-tokens")]
    mesh = train(tmp_path / "mesh", *both, "--cp", "2", *shlex.split(SAVING[name]), num_ranks=2)
    assert_same(mesh, train(tmp_path / "plain", *both, "--plain"))
    if "--window" in SAVING[name]:
        narrow = train(tmp_path / "narrow", *both, "--cp", "2", "--window", "9", num_ranks=2)
        assert narrow["losses"] != pytest.approx(mesh["losses"], abs=1e-4)


def test_norms_of_very_long_sequences_are_tiled() -> None:
    norms = {"layers.*.attention_norm", "layers.*.feed_forward_norm", "norm"}
    assert parallel_llama.saving_plan(elements=2**32).keys() == norms
    assert not parallel_llama.saving_plan(elements=2**32 - 1)


def losses(out: Path) -> list[list[float]]:
    table = csv.DictReader((out / "metrics.csv").open())
    return [[float(row[column] or 0) for column in ("loss", "eval_loss", "grad_norm")] for row in table]


@pytest.mark.full
def test_trainer_in_a_pipeline(tmp_path: Path) -> None:
    """Two stages of one layer, on two cp ranks each."""
    runs = {"mesh": ["--pp", "2", "--cp", "2", "--restart-positions"], "plain": ["--plain", "--restart-positions"]}
    for run, options in runs.items():
        arguments = [*SMALL, *options, "--eval-every", "2", "--out", tmp_path / run]
        done = run_script(ROOT / "examples" / "train_llama.py", arguments, 4 if run == "mesh" else None)
        assert done.returncode == 0, done.printed
    found, wanted = losses(tmp_path / "mesh"), losses(tmp_path / "plain")
    assert len(found) == 4
    for ours, theirs in zip(found, wanted, strict=True):
        assert ours == pytest.approx(theirs, rel=1e-5)


@pytest.mark.full
@pytest.mark.parametrize(
    "options",
    ["", pytest.param("--sequence-parallel --seq-len 60 --compile aot_eager", marks=pytest.mark.nightly("compiled"))],
)
def test_trainer_with_the_linears_of_cp_mesh(tmp_path: Path, options: str) -> None:
    overlapped = "--cp 2 --tp 2 --overlapped --recompute selective --eval-every 4"
    mesh = train(tmp_path / "mesh", *shlex.split(f"{overlapped} {options}"), num_ranks=4)
    plain = train(tmp_path / "plain", "--plain", *(shlex.split("--seq-len 60") if options else ()))
    assert_same(mesh, plain)


def words_of(stderr: str) -> list[str]:
    """Its lines but for the trainer's progress bar."""
    return [line for line in re.split(r"[\r\n]+", stderr) if line.strip() and "it/s" not in line and "s/it" not in line]


@pytest.mark.nightly("runs")
def test_the_quick_start_prints_no_warnings(tmp_path: Path, monkeypatch: Any, capfd: Any) -> None:
    monkeypatch.setattr(quickstart, "RUN", [*SMALL, "--dim", "32"])
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    four = [*quickstart.FOUR_RANKS, quickstart.TRAINER, "--cp=2", "--tp=2"]
    assert len(quickstart.train("four ranks", four, "cpu", tmp_path / "four")["losses"]) == 4
    assert len(quickstart.train("one rank", [quickstart.TRAINER, "--plain"], "cpu", tmp_path / "one")["losses"]) == 4
    printed = capfd.readouterr()
    assert "it/s" in printed.err and words_of(printed.err) == []
    assert [line for line in printed.out.splitlines() if line and line[0] != " "] == ["four ranks:", "one rank:"]


def test_a_command_that_fails_says_why_and_one_that_works_nothing(capfd: Any) -> None:
    warns = "echo an index is ignored >&2; exit"
    environment.run(["sh", "-c", f"{warns} 0"], "pip could not install")
    assert capfd.readouterr() == ("", "")
    with pytest.raises(SystemExit, match="an index is ignored\npip could not install"):
        environment.run(["sh", "-c", f"{warns} 1"], "pip could not install")


@pytest.mark.full
def test_the_page_of_the_quick_start_prints_no_warnings(tmp_path: Path) -> None:
    page = (ROOT / "docs" / "index.md").read_text()
    (tmp_path / "train.py").write_text("\n".join(re.findall(r"```python\n(.*?)```", page, re.DOTALL)[:2]))
    (words,) = re.findall(r"`torchrun (.*train.py)`", page)
    command = [sys.executable, "-m", "torch.distributed.run", *shlex.split(words)]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, env=environment, cwd=tmp_path)
    assert done.returncode == 0 and done.stdout.count(".") == 20, done.stderr  # ten losses on two ranks
    assert done.stderr == ""


@pytest.mark.full
def test_attention_equals_sdpa_on_three_ranks() -> None:
    """1000 rows do not divide by 3: the sequence is padded."""
    done = run_script(ROOT / "examples" / "attention.py", [], 3)
    assert done.returncode == 0 and done.printed.count("largest difference") == 3, done.printed


@pytest.mark.full
def test_generated_tokens_equal_one_device_on_two_ranks() -> None:
    done = run_script(ROOT / "examples" / "generate.py", [], 2)
    assert done.returncode == 0 and done.printed.count("as one device: True") == 2, done.printed


@pytest.mark.full
def test_a_hybrid_trains_on_three_ranks_as_on_one() -> None:
    """200 rows do not divide by 3 zigzag pairs: the sequence is padded."""
    done = run_script(ROOT / "examples" / "train_hybrid.py", shlex.split("--steps 5 --seq-len 200"), 3)
    assert done.returncode == 0 and "Warning" not in done.printed, done.printed
    first, last, alone = re.findall(r"loss (\d\.\d+) -> (\d\.\d+) on 3 ranks, (\d\.\d+) on one", done.printed)[0]
    assert float(last) < float(first) - 0.2 and float(alone) == pytest.approx(float(last), abs=1e-4)
    assert "SAME: they differ by at most" in done.printed


@pytest.mark.full
def test_minimal_example() -> None:
    """The file of README, whose figures tests/test_docs.py compares."""
    done = run_script(ROOT / "examples" / "minimal.py", [], 2)
    assert done.returncode == 0, done.printed
    assert sorted(re.findall(r"rank (\d): loss 2\.\d{4}", done.printed)) == ["0", "1"]
