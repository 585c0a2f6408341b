"""Which planted bugs tests/fuzz.py finds by itself, in how many cases; see its `--planted`."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import ranks
from fuzz import Fuzzer
from ranks import Pool

from planted import MUTATIONS
from planted.pools import Bug, infected_pools

BATCH = 10


def look(seed: int, sizes: Sequence[int], num_cases: int, every: int = 1) -> int:
    """Prints a line of CSV for each bug: how the first case fails, if one does, and the number of cases up to it."""
    ranks.GRACE = 0.5
    print("bug,area,found,cases", flush=True)
    with infected_pools() as pools:
        # no case on CPUs calls those in Triton
        for mutation in [x for x in MUTATIONS.values() if x.area != "kernels in Triton"][::every]:
            found, cases = search(seed, sizes, num_cases, Bug(pools, mutation.name))
            print(f'"{mutation.name}",{mutation.area},{found},{cases}', flush=True)
    return 0


def search(seed: int, sizes: Sequence[int], num_cases: int, pool: Callable[[int], Pool]) -> tuple[str, int]:
    fuzzer, done = Fuzzer(pool, timeout=20.0), 0
    for block, begin in enumerate(range(0, num_cases, BATCH)):
        size = sizes[block % len(sizes)]
        for _, verdict in fuzzer.run(size, [(f"{seed}:{i}", size) for i in range(begin, begin + BATCH)]):
            done += 1
            if verdict.fails:
                return verdict.kind, done
    return "", done
