"""The benchmark of flex_attention on two CPU ranks, in sizes that say nothing of speed."""

from __future__ import annotations

import csv
import shlex
from pathlib import Path

import pytest
from scripts import run_script

ROOT = Path(__file__).resolve().parent.parent
BENCHMARKS = ROOT / "examples" / "benchmarks"
TINY = shlex.split("--device cpu --rows 128 --gate-rows 128 --heads 4/2 --head-dim 16 --repeats 2 --calls 1")


def rows_of(table: Path) -> dict[tuple[str, str], dict[str, str]]:
    with table.open(newline="") as file:
        return {(row["score"], row["contestant"]): row for row in csv.DictReader(file)}


@pytest.mark.nightly("benchmarks")
def test_every_contestant_is_compared_and_timed(tmp_path: Path) -> None:
    """PyTorch has no backward on CPUs, so forwards; and a bias by local indices is found out."""
    table = tmp_path / "x.csv"
    options = [*TINY, "--scores", "distances", "--forward", "--csv", table]
    done = run_script(BENCHMARKS / "flex.py", options, 2)
    assert done.returncode == 0, done.printed
    rows = rows_of(table)
    contestants = ("floor", "cp_mesh", "cp_mesh gather", "cp_mesh untuned", "torch", "torch mended")
    assert list(rows) == [("distances", x) for x in contestants]
    for (_, contestant), row in rows.items():
        if contestant == "torch":
            assert row["status"].startswith("failed the gate") and not row["fwd_ms"]
            continue
        assert row["status"] == "ok" and float(row["fwd_ms"]) > 0
        assert contestant == "floor" or float(row["error"]) <= float(row["bound"])
    assert float(rows["distances", "floor"]["of_floor_fwd"]) == 1


@pytest.mark.nightly("benchmarks")
def test_backwards_are_compared_and_timed(tmp_path: Path) -> None:
    options = [*TINY, "--scores", "learned documents", "--contestants", "cp_mesh", "--csv", tmp_path / "x.csv"]
    done = run_script(BENCHMARKS / "flex.py", options, 2)
    assert done.returncode == 0, done.printed
    rows = rows_of(tmp_path / "x.csv")
    row = rows["learned documents", "cp_mesh"]
    assert row["status"] == "ok" and float(row["fwdbwd_ms"]) > 0
    assert rows["learned documents", "floor"]["status"].startswith("unsupported")


FOLDERS = {"benchmarks": str(BENCHMARKS), "tests": str(ROOT / "tests")}
WITHOUT_MEMORY = 'inside.room("exchange").unavailable = lambda *group: None'
PLAYED = """
import sys
sys.path[:0] = [{benchmarks!r}, {tests!r}]
import flex, inside
inside.room("exchange").unavailable = lambda *group: None  # of symmetric memory, of which a CPU has none
flex.main()
"""


@pytest.mark.nightly("benchmarks")
def test_a_rank_is_played(tmp_path: Path) -> None:
    """Alone, and compared with the attention of its queries and of keys that are its own on every rank."""
    script, table = tmp_path / "bench.py", tmp_path / "x.csv"
    script.write_text(PLAYED.format(**FOLDERS))
    options = [*TINY, "--played", "3/4", "--scores", "distances", "--contestants", "cp_mesh", "cp_mesh gather"]
    done = run_script(script, [*options, "--csv", table])
    assert done.returncode == 0, done.printed
    rows = rows_of(table)
    for contestant in ("cp_mesh", "cp_mesh gather"):
        row = rows["distances", contestant]
        assert row["status"] == "ok" and row["played"] == "3/4" and float(row["fwdbwd_ms"]) > 0


BROKEN = """
import sys
sys.path[:0] = [{benchmarks!r}]
import flex
exact = flex.ours
def wrong(*args, **options):
    call = exact(*args, **options)
    return lambda q, k, v: call(q, k, v * 1.1)
flex.CONTESTANTS[{name!r}] = wrong
flex.main()
"""


@pytest.mark.nightly("benchmarks")
@pytest.mark.parametrize("name", ["cp_mesh", "cp_mesh gather"])
def test_a_wrong_contestant_is_not_timed(tmp_path: Path, name: str) -> None:
    script, table = tmp_path / "bench.py", tmp_path / "x.csv"
    script.write_text(BROKEN.format(**FOLDERS, name=name))
    done = run_script(script, [*TINY, "--scores", "none", "--contestants", name, "--forward", "--csv", table], 2)
    assert done.returncode != 0
    row = rows_of(table)["none", name]
    assert row["status"].startswith("failed the gate") and not row["fwd_ms"]


SLOW = """
import sys, time
sys.path[:0] = [{benchmarks!r}, {tests!r}]
import flex, inside
inside.room("exchange").unavailable = lambda *group: None
exact = flex.ours
def slow(*args, **options):
    if "--compile" in sys.argv:
        time.sleep(600)
    return exact(*args, **options)
def failing(*args, **options):
    raise ValueError("does not compile")
flex.CONTESTANTS |= {{"cp_mesh gather": slow, "torch": failing}}
flex.main()
"""


@pytest.mark.nightly("benchmarks")
def test_what_does_not_compile_in_time_is_left_out(tmp_path: Path) -> None:
    """What fails is not tried again. Contestants of ours must not be late."""
    script, table = tmp_path / "bench.py", tmp_path / "x.csv"
    script.write_text(SLOW.format(**FOLDERS))
    options = [*TINY, "--played", "0/2", "--scores", "none", "--compile-first", "60", "--forward", "--csv", table]
    done = run_script(script, [*options, "--contestants", "cp_mesh", "torch", "cp_mesh gather"])
    assert done.returncode != 0 and "ValueError: does not compile" in done.printed
    rows = rows_of(table)
    assert rows["none", "cp_mesh"]["status"] == rows["none", "floor"]["status"] == "ok"
    for name in ("cp_mesh gather", "torch"):
        row = rows["none", name]
        assert row["status"] == "not compiled in 60 s" and not row["fwd_ms"]


@pytest.mark.nightly("benchmarks")
def test_ranks_compile_first_and_agree_on_what_is_late(tmp_path: Path) -> None:
    """What cannot be compiled is left out on both ranks."""
    script, table = tmp_path / "bench.py", tmp_path / "x.csv"
    script.write_text(SLOW.replace(WITHOUT_MEMORY, "").format(**FOLDERS))
    options = [*TINY, "--scores", "none", "--compile-first", "100", "--forward", "--csv", table]
    done = run_script(script, [*options, "--contestants", "cp_mesh", "torch"], 2)
    assert done.returncode == 0 and "ValueError: does not compile" in done.printed, done.printed
    rows = rows_of(table)
    assert rows["none", "cp_mesh"]["status"] == rows["none", "floor"]["status"] == "ok"
    assert rows["none", "torch"]["status"] == "not compiled in 100 s"


def test_processes_get_what_was_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    monkeypatch.setattr(sys, "path", [str(BENCHMARKS), *sys.path])
    import flex

    words = "--device cpu --rows 128 256 --gate-rows 384 --heads 4/2 --head-dim 16 --dtype float16 --forward"
    words += " --kernel flex --scores none alibi --contestants cp_mesh --played 1/2 --device-number 3 --compile-first 7"
    args, found = flex.parse_arguments(words.split()), []

    def run_beside(script: Path, cases: list[list[str]], seconds: float, devices: int) -> list[float | None]:
        found.extend(cases)
        assert (seconds, devices) == (7, 1)
        return [1.0, None, *[1.0] * 10]

    monkeypatch.setattr(flex, "run_beside", run_beside)
    assert flex.compile_first(args, None) == {("none", "cp_mesh")}
    of_processes = [flex.parse_arguments(case) for case in found]
    assert [(x.rows, x.scores, x.contestants) for x in of_processes] == [
        ([n], [score], [name]) for n in (384, 128, 256) for score in ("none", "alibi") for name in ("floor", "cp_mesh")
    ]
    for x in of_processes:
        assert x.compile and not x.compile_first and x.rows == [x.gate_rows]
        for name in ("device", "heads", "head_dim", "dtype", "forward", "kernel", "played", "device_number"):
            assert getattr(x, name) == getattr(args, name), name
