"""One run of each benchmark on CPU ranks, in sizes that say nothing of speed: it ends well and writes its rows."""

from __future__ import annotations

import csv
import shlex
from pathlib import Path

import pytest
from scripts import run_script

BENCHMARKS = Path(__file__).resolve().parent.parent / "examples" / "benchmarks"

RUNS: dict[str, tuple[int | None, str]] = {
    "attention": (
        2,
        "--device cpu --local-len 16 --gate-len 16 --heads 4/2 --mask causal documents --repeats 2 "
        "--seconds-per-case 0.01 --contestants default cp_mesh/ring/zigzag/reference/functional",
    ),
    "batches": (
        2,
        "--device cpu --heads 4/2 --head-dim 16 --seq-len 96 --median 10 --window 6 --layers 1 --batches 7 --blocks 1 "
        "--layouts balanced zigzag --gate-len 16",
    ),
    "decoding": (2, "--device cpu --heads 4/2 --head-dim 8 --cached 64 --gate-len 61 --repeats 2 --calls 3"),
    "flex": (
        2,
        "--device cpu --rows 128 --gate-rows 128 --heads 4/2 --head-dim 16 --repeats 2 --calls 1 --scores distances "
        "--forward --contestants cp_mesh 'cp_mesh gather' 'torch mended'",
    ),
    "guard": (2, "--repeats 1 --calls 2"),
    "importing": (None, "--repeats 1"),
    "layers": (2, "--device cpu --kernel reference --rows 16 --layers 2 --steps 1 --head-dim 8"),
    "linears": (
        2,
        "--device cpu --parts 'tiny mlp' 'tiny attention' --rows 8 --gate-rows 12 --repeats 2 --calls 1 "
        "--contestants cp_mesh 'cp_mesh again' torch",
    ),
    "mixers": (
        2,
        "--device cpu --dtype float32 --layers 'tiny gdn' 'tiny layer' --documents one packed --rows 64 "
        "--gate-rows 96 --repeats 2 --calls 1 --contestants one/torch cp_mesh/states/zigzag/torch",
    ),
    "planning": (
        None,
        "--seq-len 4096 --ranks 4 --document-ranks 4 --shortest 20 --longest 200 --repeats 1",
    ),
    "probe": (2, "--shape example --layers 1 --seq-len 64 --repeats 1 --device cpu"),
    "registration": (None, "--repeats 1 --calls 1"),
    "training": (
        2,
        "--device cpu --precision fp32 --seq-len 64 --layers 2 --dim 32 --heads 4 --kv-heads 2 --ffn 48 --vocab 64 "
        "--warmup 1 --steps 2",
    ),
}


@pytest.mark.nightly("benchmarks")
@pytest.mark.parametrize("name", RUNS)
def test_it_runs(name: str, tmp_path: Path) -> None:
    num_ranks, options = RUNS[name]
    script, table = BENCHMARKS / f"{name}.py", tmp_path / "rows.csv"
    writes = '"--csv"' in script.read_text()
    done = run_script(script, [*shlex.split(options), *(["--csv", str(table)] if writes else [])], num_ranks)
    assert done.returncode == 0, done.printed
    if writes:
        with table.open(newline="") as file:
            rows = list(csv.DictReader(file))
        assert rows and not [row["status"] for row in rows if row.get("status", "").startswith(("failed", "error"))]
