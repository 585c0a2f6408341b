"""The benchmark of training steps of a hybrid on two CPU ranks, in sizes that say nothing of speed."""

from __future__ import annotations

import csv
import shlex
import sys
from pathlib import Path
from unittest import mock

import pytest
from scripts import run_script

pytest.importorskip("transformers.models.qwen3_5")

BENCHMARKS = Path(__file__).resolve().parents[2] / "examples" / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))

import tables  # noqa: E402

TINY = shlex.split("--device cpu --tiny --gate-rows 98 --repeats 1 --documents packed")
BROKEN = """
import sys
sys.path[:0] = [{benchmarks!r}, {tests!r}]
import hybrid_step
from inside import room
halo = room("mixers.halo")
own = halo.gather_rows
halo.gather_rows = lambda x, *others: 2 * own(x, *others)
hybrid_step.main()
"""


def run(script: Path, options: str, table: Path) -> tuple[int, list[dict[str, str]]]:
    done = run_script(script, [*TINY, *shlex.split(options), "--csv", str(table)], 2)
    assert table.exists(), done.printed
    with table.open(newline="") as file:
        return done.returncode, [*csv.DictReader(file)]


@pytest.mark.full
def test_steps_over_ranks_are_those_of_one(tmp_path: Path) -> None:
    code, (one, cp) = run(BENCHMARKS / "hybrid_step.py", "--rows 64", tmp_path / "x.csv")
    assert code == 0 and one["contestant"] == "one" and cp["status"] == one["status"] == "ok"
    assert float(cp["loss"]) == pytest.approx(float(one["loss"]), abs=2e-6)
    assert float(cp["grad_norm"]) == pytest.approx(float(one["grad_norm"]), abs=1e-5)
    with mock.patch.object(tables, "RESULTS", tmp_path):
        assert f"| 64, packed | cp | {cp['step_ms']} | {cp['of_share']} |" in tables.hybrid_page("x.csv")
    assert float(cp["of_share"]) == pytest.approx(2 * float(cp["step_ms"]) / float(one["step_ms"]), rel=1e-3)


@pytest.mark.full
def test_a_wrong_model_is_not_timed(tmp_path: Path) -> None:
    script = tmp_path / "bench.py"
    script.write_text(BROKEN.format(benchmarks=str(BENCHMARKS), tests=str(Path(__file__).resolve().parents[1])))
    code, rows = run(script, "--rows 64", tmp_path / "x.csv")
    assert code and [row["status"].startswith("failed the gate") for row in rows] == [False, True]
    assert rows[0]["step_ms"] and not rows[1]["step_ms"]


FULL = """
import sys
sys.path[:0] = [{benchmarks!r}]
import hybrid_step
import torch
own = hybrid_step.measure
def measure(trained, *others):
    if trained.mesh.size() == 1:
        raise torch.OutOfMemoryError("no memory. Tried a lot")
    return own(trained, *others)
hybrid_step.measure = measure
hybrid_step.main()
"""


@pytest.mark.full
def test_steps_that_one_rank_cannot_hold_have_no_share(tmp_path: Path) -> None:
    script = tmp_path / "bench.py"
    script.write_text(FULL.format(benchmarks=str(BENCHMARKS)))
    code, (one, cp) = run(script, "--rows 64", tmp_path / "x.csv")
    assert code == 0 and "no memory" in one["status"] and not one["step_ms"]
    assert cp["status"] == "ok" and float(cp["step_ms"]) > 0 and cp["of_share"] == ""
    with mock.patch.object(tables, "RESULTS", tmp_path):
        assert "no memory |" in tables.hybrid_page("x.csv")
