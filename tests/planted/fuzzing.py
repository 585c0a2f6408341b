"""Which planted bugs tests/fuzz.py finds by itself, in how many cases; see its `--planted`."""

from __future__ import annotations

import compileall
import shutil
import sys
import tempfile
import time
from collections.abc import Sequence
from itertools import count
from pathlib import Path

import ranks
from fuzz import Fuzzer
from ranks import Pool

import cp_mesh
from planted import MUTATIONS, infect
from planted.ranks import origin

PACKAGE = Path(cp_mesh.__file__).parent
BATCH = 10


def look(seed: int, sizes: Sequence[int], seconds: float) -> int:
    """Prints a line of CSV for each bug: the time is that of ranks which have started."""
    ranks.GRACE = 0.5
    print("bug,area,found,cases,seconds", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        clean = Path(folder) / "clean"
        shutil.copytree(PACKAGE, clean, ignore=shutil.ignore_patterns("__pycache__"))
        compileall.compile_dir(clean, quiet=1)
        sys.path.insert(0, f"{folder}/infected")
        for mutation in MUTATIONS.values():
            if mutation.area == "kernels in Triton":  # which no case on CPUs calls
                continue
            copy = Path(folder) / "infected" / "cp_mesh"
            shutil.copytree(clean, copy)
            infect(copy, mutation)
            found, num_cases, taken = search(seed, sizes, seconds, str(copy / "__init__.py"))
            print(f'"{mutation.name}",{mutation.area},{found},{num_cases},{taken:.1f}', flush=True)
            shutil.rmtree(copy)
    return 0


def search(seed: int, sizes: Sequence[int], seconds: float, file: str) -> tuple[str, int, float]:
    """How the first case fails, if one does, the number of cases up to it, and the time."""
    pools = {size: Pool(size, group_timeout=5.0) for size in sizes}
    try:
        for pool in pools.values():
            assert set(pool.run(origin)) == {file}
        begin, fuzzer, num_cases = time.monotonic(), Fuzzer(pools.__getitem__, timeout=20.0), 0
        for block in count():
            size = sizes[block % len(sizes)]
            seeds = [(f"{seed}:{i}", size) for i in range(block * BATCH, (block + 1) * BATCH)]
            for _, verdict in fuzzer.run(size, seeds):
                num_cases += 1
                if verdict.fails:
                    return verdict.kind, num_cases, time.monotonic() - begin
            if time.monotonic() - begin > seconds:
                return "", num_cases, time.monotonic() - begin
        raise AssertionError
    except ranks.RankFailure:  # it cannot be imported, or computes when it is
        return "at the start", 0, 0.0
    finally:
        for pool in pools.values():
            pool.close()
