"""Compute how evenly layouts share a layer's time on packed documents, and how much travels. No GPU.

    python examples/benchmarks/placement.py --csv placement.csv

A rank's time in a layer is that of its tokens in linears and of its pairs of query and key in attention, of Llama-3-8B
on an H200: a token takes as long as 15,000 pairs. Lengths are lognormal and the same in every run; each row is the mean
of ``--batches`` batches:

    time, worst_time      of a layer on the slowest rank, over even, and its largest in a batch
    pairs                 of the rank with most, over even
    mib, worst_mib        keys and values that a rank receives in a forward (8 heads of 128, bf16); most of a rank
    local                 part of the ranks that neither send nor receive
    calls                 of the attention kernel in a forward, most of a rank
    plan_ms               of one processor to make the layout, the least of three; the mask has read its documents

    python examples/benchmarks/placement.py --host --layouts zigzag balanced --csv planning_cpu.csv

What a new batch costs one processor, in ms: 128K tokens, 100 lognormal documents, the least of nine; mean and largest
of the batches. ``layout``: from document ids to the mask, the layout and this rank's positions. ``call``: the plan of
attention.
"""

from __future__ import annotations

import argparse
import math
import sys
import time
from itertools import product
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(Path(__file__).parent)]  # a checkout that is not installed

from report import append, git_commit  # noqa: E402

from cp_mesh import Contiguous, Layout, Mask, ShardedSequence, ZigZag, balance  # noqa: E402
from cp_mesh.geometry.pair_counts import pairs_between  # noqa: E402
from cp_mesh.geometry.schedule import make_schedule  # noqa: E402
from cp_mesh.geometry.survey import of_many_ranks  # noqa: E402

PER_TOKEN = 15_000  # pairs
ROW = 2 * 8 * 128 * 2  # bytes of keys and values of a token
LENGTHS = {"chat": (400, 1.0), "web": (1000, 1.5), "long": (8000, 1.0)}
"""Median and sigma."""
CASES = [("chat", 4096, 2), ("chat", 16384, 2), ("web", 16384, 2), ("web", 65536, 2), ("long", 65536, 2)]
CASES += [("chat", 16384, 8), ("web", 16384, 8), ("web", 65536, 8), ("long", 65536, 8), ("chat", 1024, 128)]
COLUMNS = ("commit", "layout", "documents", "rows", "ranks", "time", "worst_time", "pairs")
COLUMNS += ("mib", "worst_mib", "local", "calls", "plan_ms")
HOST = ("commit", "layout", "ranks", "layout_ms", "worst_layout_ms", "call_ms", "worst_call_ms")


def lengths(name: str, seq_len: int, seed: int) -> list[int]:
    median, sigma = LENGTHS[name]
    drawn, found = np.random.RandomState(seed), list[int]()
    while left := seq_len - sum(found):
        found.append(min(left, max(1, round(median * math.exp(sigma * drawn.randn())))))
    return found


def measure(layout: str, mask: Mask, seq_len: int, ranks: int) -> list[float]:
    """The figures of one batch."""
    placed, plan_ms = OTHERS.get(layout), []
    for _ in range(3 if placed is None else 0):
        begin = time.process_time()
        placed = balance(mask, seq_len, ranks)
        plan_ms.append((time.process_time() - begin) * 1e3)
    assert placed is not None
    with of_many_ranks():
        schedules = [make_schedule(placed, mask, seq_len, ranks, rank, segments=True) for rank in range(ranks)]
    tiles = [[*x.local_tiles, *(tile for stage in x.route.stages for tile in stage.tiles)] for x in schedules]
    seen = pairs_between(np.arange(seq_len + 1), mask, seq_len)
    pairs = np.array([seen[placed.positions(seq_len, ranks, rank)].sum() for rank in range(ranks)], dtype=np.float64)
    times = PER_TOKEN * seq_len / ranks + pairs
    needed = schedules[0].route.needed
    mib, local = needed.sum(1) * ROW / 2**20, ((needed.sum(0) + needed.sum(1)) == 0).mean()
    evenness = times.max() / times.mean(), pairs.max() / pairs.mean()
    return [*evenness, mib.mean(), mib.max(), local, max(map(len, tiles)), min(plan_ms, default=0.0)]


def host(layout: str, ranks: int, batches: int) -> list[float]:
    """Mean and largest time of batches, in ms: of their layouts, and of the plans of their calls."""
    rank, seq_len, found = ranks // 2, 1 << 17, []
    dist.init_process_group("fake", rank=rank, world_size=ranks, store=FakeStore())
    sequence = ShardedSequence(dist.group.WORLD, OTHERS.get(layout, "auto"))
    for seed in range(batches):
        ends = np.random.RandomState(seed).lognormal(size=100).cumsum()
        ids = torch.from_numpy((ends / ends[-1] * seq_len).round().searchsorted(np.arange(seq_len), "right"))
        times = []
        for _ in range(9):
            clock = [time.process_time()]
            mask = Mask(documents=ids)
            batch = sequence.for_batch(seq_len, mask)
            batch.positions()
            clock.append(time.process_time())
            make_schedule(batch.layout, batch.mask(mask), seq_len, ranks, rank, segments=True)
            times.append(np.diff([*clock, time.process_time()]) * 1e3)
        found.append(np.min(times, axis=0))
    dist.destroy_process_group()
    return [x for each in np.transpose(found) for x in (each.mean(), each.max())]


OTHERS: dict[str, Layout] = {"zigzag": ZigZag(), "contiguous": Contiguous()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layouts", nargs="+", choices=("balanced", *OTHERS), default=["balanced"])
    parser.add_argument("--batches", type=int, default=16)
    parser.add_argument("--csv", type=Path, help="append a row for each layout and case")
    parser.add_argument("--commit", help="recorded in the rows (default: ask git)")
    parser.add_argument("--host", action="store_true", help="time what a batch costs the host, and nothing else")
    args = parser.parse_args()
    for layout, ranks in product(args.layouts, (2, 4, 8, 16, 32, 64, 128) if args.host else ()):
        figures = [f"{x:.2f}" for x in host(layout, ranks, args.batches)]
        row = dict(zip(HOST, [args.commit or git_commit(), layout, ranks, *figures], strict=True))
        print(*row.values(), flush=True)
        if args.csv:
            append(args.csv, HOST, [row])
    for layout in () if args.host else args.layouts:
        for name, rows, ranks in CASES:
            found = []
            for seed in range(args.batches):
                lens = torch.tensor(lengths(name, rows * ranks, seed))
                mask = Mask(documents=torch.repeat_interleave(torch.arange(len(lens)), lens))
                found.append(measure(layout, mask, rows * ranks, ranks))
            means = np.mean(found, axis=0).tolist()
            evenness = [f"{x:.3f}" for x in (means[0], max(x[0] for x in found), means[1])]
            about = [args.commit or git_commit(), layout, name, rows, ranks]
            row = dict(zip(COLUMNS, [*about, *evenness, *(f"{x:.3g}" for x in means[2:])], strict=True))
            print(*row.values(), flush=True)
            if args.csv:
                append(args.csv, COLUMNS, [row])


if __name__ == "__main__":
    main()
