"""What planning packed documents costs on the host, and what it finds. Needs no ranks and no device.

Lengths of documents are lognormal with median ``--median`` and sigma 1.5, capped at a quarter of the sequence. Columns:
ms in which `balance` makes a layout; ms of the first plan of a batch, and of a later one, which compares contents
(medians of ``--repeats``; without FlashAttention-4 the first makes tiles of both kinds); ms for each of ``--layers``
layers, which plan twice (forward and backward; a third time with DTensors), so that the first plan is spread over
them; kernel calls of a forward on the rank that has most; rows that the rank which fetches most does fetch, in rows of
a shard; the largest share of the work (1.00 is the mean).

    python examples/benchmarks/planning.py --seq-len 65536 --ranks 8
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from statistics import median

import torch
from torch import Tensor

sys.path[:0] = [str(Path(__file__).resolve().parents[2]), str(Path(__file__).parent)]  # a checkout not installed

from contestants import document_lengths  # noqa: E402

from cp_mesh.balancing import balance  # noqa: E402
from cp_mesh.layouts import Contiguous, Layout, Striped, ZigZag  # noqa: E402
from cp_mesh.masks import Mask  # noqa: E402
from cp_mesh.plan import Options, Tensors, make_plan  # noqa: E402
from cp_mesh.schedule import make_schedule  # noqa: E402


def document_ids(lens: Sequence[int]) -> Tensor:
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


def milliseconds(fn: Callable[[], object]) -> float:
    begin = time.perf_counter()
    fn()
    return (time.perf_counter() - begin) * 1e3


def plan(layout: Layout, mask: Mask, seq_len: int, num_ranks: int) -> None:
    q = torch.empty(1, 1, layout.shard_len(seq_len, num_ranks, num_ranks // 2), 128, dtype=torch.bfloat16)
    options = Options(layout.spec(), mask.spec(), 1.0)
    make_plan(q, q, q, Tensors(mask.documents, None, layout.tensor), seq_len, OneOf(num_ranks), options)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seq-len", type=int, default=65536)
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--median", type=float, default=512)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--repeats", type=int, default=15)
    options = parser.parse_args(argv)
    seq_len, num_ranks = options.seq_len, options.ranks
    batches = [
        Mask(documents=document_ids(document_lengths(seq_len, seed, options.median)))
        for seed in range(1000, 1000 + options.repeats)
    ]
    print("seed,documents,layout,balance ms,first ms,later ms,ms a layer,calls,fetched shards,largest share")
    for seed in range(options.seeds):
        lens = document_lengths(seq_len, seed, options.median)
        mask = Mask(documents=document_ids(lens))
        for layout in (Contiguous(), ZigZag(), Striped(), balance(mask, seq_len, num_ranks)):
            made = [layout if layout.tensor is None else balance(batch, seq_len, num_ranks) for batch in batches]
            solve = 0.0
            if layout.tensor is not None:
                solve = median(milliseconds(partial(balance, batch, seq_len, num_ranks)) for batch in batches)
            pairs = list(zip(made, batches, strict=True))
            plan(layout, mask, seq_len, num_ranks)  # once, so that nothing is done for the first time below
            first = median(milliseconds(partial(plan, *pair, seq_len, num_ranks)) for pair in pairs)
            later = median(milliseconds(partial(plan, *pairs[-1], seq_len, num_ranks)) for _ in pairs)
            a_layer = (first + (2 * options.layers - 1) * later) / options.layers
            ranks = [make_schedule(layout, mask, seq_len, num_ranks, rank, segments=True) for rank in range(num_ranks)]
            calls = max(len(x.local_tiles) + sum(len(stage.tiles) for stage in x.route.stages) for x in ranks)
            fetched = max(map(sum, ranks[0].route.needed)) / (seq_len / num_ranks)
            share = max(x.pairs for x in ranks) / (sum(x.pairs for x in ranks) / num_ranks)
            name = layout.spec().partition(":")[0]
            print(
                f"{seed},{len(lens)},{name},{solve:.1f},{first:.1f},{later:.3f},{a_layer:.2f},{calls},{fetched:.2f},{share:.2f}"
            )


if __name__ == "__main__":
    main()
