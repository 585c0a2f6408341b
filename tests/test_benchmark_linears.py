"""The benchmark of linears over tp on two CPU ranks, in sizes that say nothing of speed."""

from __future__ import annotations

import csv
import shlex
from pathlib import Path

import pytest
from scripts import run_script

ROOT = Path(__file__).resolve().parent.parent
TINY = shlex.split(
    "--device cpu --parts 'tiny mlp' 'tiny attention' --rows 8 --gate-rows 12 --repeats 2 --calls 1 "
    "--contestants cp_mesh 'cp_mesh again' torch 'torch async'"
)
BROKEN = """
import sys
sys.path[:0] = [{benchmarks!r}, {tests!r}]
import linears
from inside import inner
Shards = inner("shards", "Shards")
Shards.scatter_sum = lambda self, x: lambda: x[..., : self.own, :].clone()
linears.main()
"""


@pytest.mark.full
def test_every_contestant_is_compared_and_timed(tmp_path: Path) -> None:
    done = run_script(ROOT / "examples" / "benchmarks" / "linears.py", [*TINY, "--csv", tmp_path / "x.csv"], 2)
    assert done.returncode == 0, done.printed
    with (tmp_path / "x.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["part"] for row in rows] == ["tiny mlp"] * 5 + ["tiny attention"] * 5
    for row in rows:
        if row["contestant"] == "torch async":
            assert row["status"].startswith("unsupported") and not row["fwdbwd_ms"]
        else:
            assert row["status"] == "ok" and float(row["fwdbwd_ms"]) > 0
        if row["contestant"] in ("cp_mesh", "cp_mesh again", "torch"):
            assert 0 < float(row["error"]) <= float(row["bound"]) < 0.1


@pytest.mark.nightly("benchmarks")
def test_a_rank_is_played(tmp_path: Path) -> None:
    options = [*TINY, "--played", "1/2", "--csv", tmp_path / "x.csv"]
    done = run_script(ROOT / "examples" / "benchmarks" / "linears.py", options)
    assert done.returncode == 0, done.printed
    with (tmp_path / "x.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    names = ["floor", "cp_mesh", "cp_mesh again", "torch"]  # "torch async" needs peers' memory
    assert [row["contestant"] for row in rows] == names * 2
    for row in rows:
        assert row["played"] == "1/2" and float(row["fwdbwd_ms"]) > 0 and not row["error"]
        assert row["status"] == ("ok" if row["contestant"] == "floor" else "played, not judged")


@pytest.mark.nightly("benchmarks")
def test_a_wrong_contestant_is_not_timed(tmp_path: Path) -> None:
    script, table = tmp_path / "bench.py", tmp_path / "x.csv"
    script.write_text(BROKEN.format(benchmarks=str(ROOT / "examples" / "benchmarks"), tests=str(ROOT / "tests")))
    done = run_script(script, [*TINY, "--csv", table], 2)
    assert done.returncode != 0
    with table.open(newline="") as file:
        rows = {row["contestant"]: row for row in csv.DictReader(file)}
    assert rows["cp_mesh"]["status"].startswith("failed the gate") and not rows["cp_mesh"]["fwdbwd_ms"]
    assert rows["torch"]["status"] == "ok"
