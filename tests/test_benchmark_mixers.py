"""The benchmark of recurrent layers on two CPU ranks, in sizes that say nothing of speed."""

from __future__ import annotations

import csv
import shlex
import sys
from pathlib import Path
from unittest import mock

import pytest
from scripts import run_script

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "examples" / "benchmarks"))

import tables  # noqa: E402

TINY = shlex.split(
    "--device cpu --dtype float32 --layers 'tiny gdn' 'tiny kda' 'tiny layer' --documents one packed --rows 64 "
    "--gate-rows 96 --repeats 2 --calls 1 "
    "--contestants one/torch fla/zigzag cp_mesh/states/zigzag/torch cp_mesh/heads/striped/torch/auto"
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
    assert len(rows) == 3 * 2 * (4 + 3)  # of the gate, and of those that passed
    for row in rows:
        if row["contestant"] == "fla/zigzag":
            assert row["status"].startswith("unsupported") and not row["fwdbwd_ms"]
        else:
            assert row["status"] == "ok" and (row["rows"] == "96" or float(row["fwdbwd_ms"]) > 0)
            assert 0 < float(row["error"]) <= float(row["bound"]) < 1e-5
    with mock.patch.object(tables, "RESULTS", tmp_path):
        page = tables.recurrent_page("x.csv")
    ms = {row["contestant"]: float(row["fwdbwd_ms"]) for row in rows[4:7]}  # of tiny gdn, one document
    cells = [f"{x:.1f} ({2 * x / ms['one/torch']:.2f})" for x in ms.values()]
    assert f"| 64 | {' | '.join(cells)} |" in page and "- `fla/zigzag`, 96 tokens: unsupported" in page


FULL = """
import sys
sys.path[:0] = [{benchmarks!r}]
import mixers
import torch
import torch.distributed as dist
own = mixers.Run.__init__
def init(self, name, layer, documents, given, ranks):
    own(self, name, layer, documents, given, ranks)
    if name == "cp_mesh/states/zigzag/torch" and given[0][0].shape[1] == 64 and dist.get_rank() == 1:
        raise torch.OutOfMemoryError("no memory")
mixers.Run.__init__ = init
mixers.main()
"""


@pytest.mark.full
def test_a_rank_without_memory_ends_nothing(tmp_path: Path) -> None:
    script, table = tmp_path / "bench.py", tmp_path / "x.csv"
    script.write_text(FULL.format(benchmarks=str(ROOT / "examples" / "benchmarks")))
    options = "--layers 'tiny gdn' --documents one --rows 64 32"
    done = run_script(script, [*TINY, *shlex.split(options), "--csv", table], 2)
    assert done.returncode == 0, done.printed
    with table.open(newline="") as file:
        found = {(row["contestant"], row["rows"]): row["status"] for row in csv.DictReader(file)}
    assert "OutOfMemoryError" in found.pop(("cp_mesh/states/zigzag/torch", "64"))
    assert len(found) == 9 and sum(status == "ok" for status in found.values()) == 8


@pytest.mark.full
def test_tuning_plays_both_ranks_of_two() -> None:
    done = run_script(ROOT / "examples" / "benchmarks" / "mixers.py", [*TINY, "--tune", "--layers", "tiny layer"])
    ended = [line for line in done.printed.splitlines() if ": ok, " in line]
    assert done.returncode == 0 and len(ended) == 2 * 2 * 3, done.printed


@pytest.mark.full
def test_a_wrong_contestant_is_not_timed(tmp_path: Path) -> None:
    script, table = tmp_path / "bench.py", tmp_path / "x.csv"
    script.write_text(BROKEN.format(benchmarks=str(ROOT / "examples" / "benchmarks"), tests=str(ROOT / "tests")))
    done = run_script(script, [*TINY, "--layers", "tiny gdn", "--csv", table], 2)
    assert done.returncode != 0
    with table.open(newline="") as file:
        rows = [row for row in csv.DictReader(file) if row["contestant"] == "cp_mesh/states/zigzag/torch"]
    assert rows and all(row["status"].startswith("failed the gate") and not row["fwdbwd_ms"] for row in rows)
