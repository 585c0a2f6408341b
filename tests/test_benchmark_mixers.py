"""The benchmark of recurrent layers on two CPU ranks, in sizes that say nothing of speed."""

from __future__ import annotations

import csv
import shlex
from pathlib import Path

import pytest
from scripts import run_script

ROOT = Path(__file__).resolve().parent.parent
TINY = shlex.split(
    "--device cpu --dtype float32 --layers 'tiny gdn' 'tiny kda' --documents one packed --rows 64 --gate-rows 96 "
    "--repeats 2 --calls 1 --contestants one/torch fla/zigzag cp_mesh/states/zigzag/torch cp_mesh/heads/striped/torch"
)
BROKEN = """
import sys
sys.path[:0] = [{benchmarks!r}, {tests!r}]
import mixers
from inside import room
between = room("mixers.between")
own = between.gather_rows
between.gather_rows = lambda x, *others: 2 * own(x, *others)
mixers.main()
"""


@pytest.mark.full
def test_every_contestant_is_compared_and_timed(tmp_path: Path) -> None:
    done = run_script(ROOT / "examples" / "benchmarks" / "mixers.py", [*TINY, "--csv", tmp_path / "x.csv"], 2)
    assert done.returncode == 0, done.printed
    with (tmp_path / "x.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 16
    for row in rows:
        if row["contestant"] == "fla/zigzag":
            assert row["status"].startswith("unsupported") and not row["fwdbwd_ms"]
        else:
            assert row["status"] == "ok" and float(row["fwdbwd_ms"]) > 0
            assert 0 < float(row["error"]) <= float(row["bound"]) < 1e-5


@pytest.mark.full
def test_a_wrong_contestant_is_not_timed(tmp_path: Path) -> None:
    script, table = tmp_path / "bench.py", tmp_path / "x.csv"
    script.write_text(BROKEN.format(benchmarks=str(ROOT / "examples" / "benchmarks"), tests=str(ROOT / "tests")))
    done = run_script(script, [*TINY, "--layers", "tiny gdn", "--csv", table], 2)
    assert done.returncode != 0
    with table.open(newline="") as file:
        rows = [row for row in csv.DictReader(file) if row["contestant"] == "cp_mesh/states/zigzag/torch"]
    assert rows and all(row["status"].startswith("failed the gate") and not row["fwdbwd_ms"] for row in rows)
