"""Which planted bugs tests/fuzz.py finds by itself, in how many cases; see its `--planted`."""

from __future__ import annotations

import compileall
import shutil
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import ranks
from fuzz import Fuzzer
from ranks import ImportingPool

import cp_mesh
from planted import MUTATIONS, infect
from planted.ranks import origin

PACKAGE = Path(cp_mesh.__file__).parent
BATCH = 10


def look(seed: int, sizes: Sequence[int], num_cases: int, every: int = 1) -> int:
    """Prints a line of CSV for each bug: how the first case fails, if one does, and the number of cases up to it."""
    ranks.GRACE = 0.5
    print("bug,area,found,cases", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        clean = Path(folder) / "clean"
        shutil.copytree(PACKAGE, clean, ignore=shutil.ignore_patterns("__pycache__"))
        compileall.compile_dir(clean, quiet=1)
        sys.path.insert(0, f"{folder}/infected")
        # no case on CPUs calls those in Triton
        for mutation in [x for x in MUTATIONS.values() if x.area != "kernels in Triton"][::every]:
            mutation.find()
            copy = Path(folder) / "infected" / "cp_mesh"
            shutil.copytree(clean, copy)
            infect(copy, mutation)
            found, cases = search(seed, sizes, num_cases, str(copy / "__init__.py"))
            print(f'"{mutation.name}",{mutation.area},{found},{cases}', flush=True)
            shutil.rmtree(copy)
    return 0


def search(seed: int, sizes: Sequence[int], num_cases: int, file: str) -> tuple[str, int]:
    pools = {size: ImportingPool(size, group_timeout=5.0) for size in sizes}
    try:
        for pool in pools.values():
            assert set(pool.run(origin)) == {file}
        fuzzer, done = Fuzzer(pools.__getitem__, timeout=20.0), 0
        for block, begin in enumerate(range(0, num_cases, BATCH)):
            size = sizes[block % len(sizes)]
            for _, verdict in fuzzer.run(size, [(f"{seed}:{i}", size) for i in range(begin, begin + BATCH)]):
                done += 1
                if verdict.fails:
                    return verdict.kind, done
        return "", done
    finally:
        for pool in pools.values():
            pool.close()
