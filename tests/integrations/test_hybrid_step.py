"""One run of the benchmark of training steps of a hybrid on two CPU ranks, in sizes that say nothing of speed."""

from __future__ import annotations

import csv
import shlex
from pathlib import Path

import pytest
from scripts import run_script

pytest.importorskip("transformers.models.qwen3_5")

SCRIPT = Path(__file__).resolve().parents[2] / "examples" / "benchmarks" / "hybrid_step.py"
TINY = shlex.split("--device cpu --tiny --gate-rows 98 --repeats 1 --documents packed --rows 64")


@pytest.mark.nightly("benchmarks")
def test_steps_over_ranks_are_those_of_one(tmp_path: Path) -> None:
    done = run_script(SCRIPT, [*TINY, "--csv", str(tmp_path / "x.csv")], 2)
    assert done.returncode == 0, done.printed
    with (tmp_path / "x.csv").open(newline="") as file:
        one, cp = csv.DictReader(file)
    assert one["contestant"] == "one" and cp["status"] == one["status"] == "ok"
    assert float(cp["loss"]) == pytest.approx(float(one["loss"]), abs=2e-6)
    assert float(cp["grad_norm"]) == pytest.approx(float(one["grad_norm"]), abs=1e-5)
