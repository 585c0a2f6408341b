"""One run of each benchmark on CPU ranks, in sizes that say nothing of speed: it ends well and writes its rows."""

from __future__ import annotations

import csv
import shlex
from pathlib import Path

import pytest
from scripts import run_script

BENCHMARKS = Path(__file__).resolve().parent.parent / "examples" / "benchmarks"

RUNS = {
    "attention": (
        "--device cpu --local-len 16 --gate-len 16 --heads 4/2 --mask causal documents --repeats 2 "
        "--seconds-per-case 0.01 --contestants default cp_mesh/ring/zigzag/reference/functional"
    ),
    "decoding": "--device cpu --heads 4/2 --head-dim 8 --cached 64 --gate-len 61 --repeats 2 --calls 3",
    "flex": (
        "--device cpu --rows 128 --gate-rows 128 --heads 4/2 --head-dim 16 --repeats 2 --calls 1 --scores distances "
        "--forward --contestants cp_mesh 'torch mended'"
    ),
    "layers": "--device cpu --kernel reference --rows 16 --layers 2 --steps 1 --head-dim 8",
    "linears": (
        "--device cpu --parts 'tiny mlp' 'tiny attention' --rows 8 --gate-rows 12 --repeats 2 --calls 1 "
        "--contestants cp_mesh 'cp_mesh again' torch"
    ),
    "mixers": (
        "--device cpu --dtype float32 --layers 'tiny gdn' 'tiny layer' --documents one packed --rows 64 "
        "--gate-rows 96 --repeats 2 --calls 1 --contestants one/torch cp_mesh/states/zigzag/torch"
    ),
    "training": (
        "--device cpu --precision fp32 --seq-len 64 --layers 2 --dim 32 --heads 4 --kv-heads 2 --ffn 48 --vocab 64 "
        "--warmup 1 --steps 2"
    ),
}
RUNS["training packed"] = f"{RUNS['training']} --packed"


@pytest.mark.nightly("benchmarks")
@pytest.mark.parametrize("name", RUNS)
def test_it_runs(name: str, tmp_path: Path) -> None:
    script, table = BENCHMARKS / f"{name.split()[0]}.py", tmp_path / "rows.csv"
    done = run_script(script, [*shlex.split(RUNS[name]), "--csv", str(table)], 2)
    assert done.returncode == 0, done.printed
    with table.open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert rows and not [row["status"] for row in rows if row.get("status", "").startswith(("failed", "error"))]
