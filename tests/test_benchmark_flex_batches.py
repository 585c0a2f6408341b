"""The benchmark of changing documents with flex_attention on two CPU ranks, in sizes that say nothing of speed."""

from __future__ import annotations

import csv
import shlex
import sys
from collections import OrderedDict
from pathlib import Path

import pytest
import torch
from scripts import run_script

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "examples" / "benchmarks"))

import flex_batches

SCRIPT = Path(__file__).resolve().parent.parent / "examples" / "benchmarks" / "flex_batches.py"
TINY = shlex.split(
    "--device cpu --rows 128 --gate-rows 128 --heads 4/2 --head-dim 16 --dtype float32 --layers 2 --steps 3"
)
OURS = ("cp_mesh", "cp_mesh sources", "cp_mesh Mask")


def rows_of(table: Path) -> dict[str, dict[str, str]]:
    with table.open(newline="") as file:
        return {row["contestant"]: row for row in csv.DictReader(file)}


@pytest.mark.nightly("benchmarks")
def test_every_contestant_is_compared_and_timed(tmp_path: Path) -> None:
    """PyTorch has no backward on CPUs, so forwards."""
    done = run_script(SCRIPT, [*TINY, "--forward", "--csv", tmp_path / "x.csv"], 2)
    assert done.returncode == 0, done.printed
    rows = rows_of(tmp_path / "x.csv")
    assert list(rows) == ["floor", *OURS, "torch mended"]
    for row in rows.values():
        assert row["status"] == "ok" and 0 < float(row["error"]) <= float(row["bound"])
        assert all(float(row[name]) > 0 for name in ("first_ms", "new_ms", "again_ms", "new_over_again"))


@pytest.mark.nightly("benchmarks")
def test_backwards_are_timed(tmp_path: Path) -> None:
    done = run_script(SCRIPT, [*TINY, "--contestants", *OURS, "--csv", tmp_path / "x.csv"], 2)
    assert done.returncode == 0, done.printed
    assert [row["status"] for row in rows_of(tmp_path / "x.csv").values()] == ["ok"] * 3


BROKEN = """
import sys
sys.path[:0] = [{benchmarks!r}]
import flex_batches
ids_of = flex_batches.ids_of
def ours(kind, ids, *args):
    return flex_batches.ours(kind, ids_of(0, len(ids), ids.device), *args)
flex_batches.CONTESTANTS["cp_mesh"] = lambda *args: ours("mask_mod", *args)
flex_batches.main()
"""
OF_ANOTHER_GRADIENT = """
import sys
sys.path[:0] = [{benchmarks!r}]
import flex_batches
def of(x):
    x.register_hook(lambda grad: grad * 1.05)
    return x
def ours(*args):
    call = flex_batches.ours("Mask", *args)
    return lambda q, k, v: call(of(q * 1.0), k, v)
flex_batches.CONTESTANTS["cp_mesh"] = ours
flex_batches.main()
"""


@pytest.mark.nightly("benchmarks")
@pytest.mark.parametrize("broken", [BROKEN, OF_ANOTHER_GRADIENT], ids=["documents of the first batch", "gradient"])
def test_what_is_wrong_is_found_out(tmp_path: Path, broken: str) -> None:
    script, table = tmp_path / "bench.py", tmp_path / "x.csv"
    script.write_text(broken.format(benchmarks=str(SCRIPT.parent)))
    options = [*TINY, "--gate-rows", "1024", "--contestants", "cp_mesh", "--csv", table]
    done = run_script(script, options, 2)
    assert done.returncode != 0
    row = rows_of(table)["cp_mesh"]
    assert row["status"].startswith("failed the gate") and not row["new_ms"]


def test_programs_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of cp_mesh and those of torch.compile, since the contestant before."""
    monkeypatch.setattr(flex_batches.flex_programs, "_programs", OrderedDict())
    flex_batches.forget()
    assert flex_batches.num_compiled() == 0
    torch.compile(lambda x: x + 1, backend="eager")(torch.ones(3))
    flex_batches.flex_programs._programs["a"] = len
    assert flex_batches.num_compiled() == 2
    flex_batches.forget()
    assert flex_batches.num_compiled() == 0


def test_one_step_has_none_after_the_first() -> None:
    with pytest.raises(SystemExit):
        flex_batches.parse_arguments(["--steps", "1"])
