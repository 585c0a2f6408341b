"""What planning packed documents costs on the host, and what it finds. Needs no ranks and no device.

Lengths of documents are lognormal with median ``--median`` and sigma 1.5, capped at a quarter of the sequence. Columns:
ms of the first plan of a mask; ms of every later one, which compares contents; kernel calls of a forward on the rank
that has most; rows that the rank which fetches most does fetch, in rows of a shard; the largest share of the work (1.00
is the mean).

    python examples/benchmarks/planning.py --seq-len 65536 --ranks 8
"""

from __future__ import annotations

import argparse
import time

import torch
from torch import Tensor

from cp_mesh.balancing import balance
from cp_mesh.layouts import Contiguous, Layout, Striped, ZigZag
from cp_mesh.masks import Mask
from cp_mesh.plan import Options, make_plan
from cp_mesh.schedule import make_schedule


def document_lengths(seq_len: int, median: float = 512, sigma: float = 1.5, seed: int = 0) -> list[int]:
    """Lognormal lengths, at most a quarter of the sequence, that fill it."""
    generator, lens, left = torch.Generator().manual_seed(seed), [], seq_len
    while left:
        drawn = median * float((sigma * torch.randn((), generator=generator)).exp())
        lens.append(min(left, max(1, seq_len // 4), max(1, round(drawn))))
        left -= lens[-1]
    return lens


def document_ids(lens: list[int]) -> Tensor:
    """[1, sum of lens]."""
    return torch.repeat_interleave(torch.arange(len(lens)), torch.tensor(lens))[None]


class OneOf:
    """What planning reads of a process group."""

    def __init__(self, size: int) -> None:
        self._size = size

    def size(self) -> int:
        return self._size

    def rank(self) -> int:
        return self._size // 2


def milliseconds(layout: Layout, mask: Mask, seq_len: int, num_ranks: int) -> list[float]:
    """Of the first plan of a mask, and of the second."""
    q = torch.empty(1, 1, layout.shard_len(seq_len, num_ranks, num_ranks // 2), 128, dtype=torch.bfloat16)
    options, times = Options(layout.spec(), mask.spec(), 1.0), []
    for _ in range(2):
        begin = time.perf_counter()
        make_plan(q, q, q, mask.documents, None, layout.tensor, seq_len, OneOf(num_ranks), options)
        times.append((time.perf_counter() - begin) * 1e3)
    return times


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seq-len", type=int, default=65536)
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--median", type=float, default=512)
    parser.add_argument("--seeds", type=int, default=3)
    options = parser.parse_args()
    seq_len, num_ranks = options.seq_len, options.ranks
    print("seed,documents,layout,first ms,later ms,calls,fetched shards,largest share")
    for seed in range(options.seeds):
        lens = document_lengths(seq_len, options.median, seed=seed)
        mask = Mask(documents=document_ids(lens))
        for layout in (Contiguous(), ZigZag(), Striped(), balance(mask, seq_len, num_ranks)):
            first, later = milliseconds(layout, mask, seq_len, num_ranks)
            ranks = [make_schedule(layout, mask, seq_len, num_ranks, rank, segments=True) for rank in range(num_ranks)]
            calls = max(len(x.local_tiles) + sum(len(stage.tiles) for stage in x.keys.stages) for x in ranks)
            fetched = max(map(sum, ranks[0].keys.needed)) / (seq_len / num_ranks)
            share = max(x.pairs for x in ranks) / (sum(x.pairs for x in ranks) / num_ranks)
            name = layout.spec().partition(":")[0]
            print(f"{seed},{len(lens)},{name},{first:.1f},{later:.3f},{calls},{fetched:.2f},{share:.2f}")


if __name__ == "__main__":
    main()
