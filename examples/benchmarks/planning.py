"""Time planning on the host, up to a million tokens on 1024 ranks. Needs no process group and no GPU.

The CSV has a row for each mask, layout and number of ranks, for the middle rank. Milliseconds are CPU time, which other
programs disturb least, and the minimum over ``--repeats``. Caches are empty before a first schedule, but the code is
warm.

    balance_ms      `balance` makes a layout (packed documents in a balanced layout; every batch)
    read_ms         a Mask is made of the ids and its documents are read (every batch)
    first_ms        the first schedule of the mask, layout and lengths: by documents, as FlashAttention-4 takes them
    later_us        microseconds of a cached plan, as needed by every further layer and by the backward
    calls           kernel calls of a forward on this rank
    fetched_shards  rows that the rank with most fetches receives, over the rows of a shard

Documents have ``--shortest`` to ``--longest`` tokens (uniform), or lognormal lengths with ``--median``, sigma 1.5.

    python examples/benchmarks/planning.py --csv planning_cpu.csv
"""

from __future__ import annotations

import argparse
import csv
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import astuple, dataclass, fields
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

sys.path[:0] = [str(Path(__file__).resolve().parents[2]), str(Path(__file__).parent)]  # a checkout not installed

from contestants import document_lengths  # noqa: E402

from cp_mesh.call import plan  # noqa: E402
from cp_mesh.call.plan import make_plan  # noqa: E402
from cp_mesh.call.spec import AttentionSpec, Tensors  # noqa: E402
from cp_mesh.geometry import survey  # noqa: E402
from cp_mesh.geometry.balance import balance  # noqa: E402
from cp_mesh.geometry.layouts import Contiguous, Layout, Striped, ZigZag  # noqa: E402
from cp_mesh.geometry.mask import Mask  # noqa: E402
from cp_mesh.geometry.schedule import make_schedule  # noqa: E402

MASKS = {
    "causal": {},
    "window 4096": {"window": (4095, 0)},
    "prefix 4096": {"prefix": 4096},
    "full": {"causal": False},
}
LATER = 200  # plans again, whose mean is one measurement


@dataclass(frozen=True)
class Row:
    """See the head of this file."""

    seq_len: int
    ranks: int
    mask: str
    documents: int
    layout: str
    balance_ms: float
    read_ms: float
    first_ms: float
    later_us: float
    calls: int
    fetched_shards: float


class OneOf:
    """What planning reads of a process group."""

    def __init__(self, size: int) -> None:
        self._size = size

    def size(self) -> int:
        return self._size

    def rank(self) -> int:
        return self._size // 2


def document_ids(lens: Sequence[int]) -> Tensor:
    """[1, sum of lens]."""
    return torch.repeat_interleave(torch.arange(len(lens)), torch.tensor(lens))[None]


def milliseconds(fn: Callable[[], object]) -> float:
    begin = time.process_time()
    fn()
    return (time.process_time() - begin) * 1e3


def forget() -> None:
    """Nothing is kept of earlier plans."""
    survey._geometry.cache_clear()  # plans are those of a group, of which each planner has its own


def planner(layout: Layout, mask: Mask, seq_len: int, num_ranks: int) -> Callable[[], plan.Plan]:
    """Makes the plan that a call makes."""
    rows = layout.shard_len(seq_len, num_ranks, num_ranks // 2)
    q, k = (torch.empty(1, heads, rows, 1, dtype=torch.bfloat16) for heads in (8, 1))
    options = AttentionSpec(layout.spec(), mask.spec(), 1.0)
    tensors = Tensors(mask.documents, layout_index=layout.tensor)
    return partial(make_plan, q, k, k, tensors, seq_len, OneOf(num_ranks), options)


def measured(layout: Layout, mask: Mask, seq_len: int, num_ranks: int, repeats: int) -> tuple[float, float, int, float]:
    """first_ms, later_us, calls and fetched_shards."""
    make = planner(layout, mask, seq_len, num_ranks)
    scheduled = partial(make_schedule, layout, mask, seq_len, num_ranks, num_ranks // 2, True)
    first, later = [], []
    for _ in range(repeats):
        forget()
        first.append(milliseconds(scheduled))
        make()
        later.append(milliseconds(lambda: [make() for _ in range(LATER)]) / LATER * 1e3)
    schedule = scheduled()
    calls = len(schedule.local_tiles) + sum(len(stage.tiles) for stage in schedule.route.stages)
    return min(first), min(later), calls, schedule.route.most_fetched / (seq_len / num_ranks)


def of_masks(seq_len: int, num_ranks: int, repeats: int) -> Iterator[Row]:
    for (name, options), layout in ((x, y) for x in MASKS.items() for y in (Contiguous(), ZigZag(), Striped())):
        found = measured(layout, Mask(**options), seq_len, num_ranks, repeats)
        yield Row(seq_len, num_ranks, name, 1, layout.spec(), 0.0, 0.0, *found)


def of_documents(lens: Sequence[int], num_ranks: int, repeats: int) -> Iterator[Row]:
    seq_len, ids = sum(lens), document_ids(lens)
    for name in ("contiguous", "zigzag", "striped", "balanced"):
        read, solve = [], []
        for _ in range(repeats):
            mask = Mask(documents=ids)
            read.append(milliseconds(lambda: Mask(documents=ids).runs()))
            if name == "balanced":
                solve.append(milliseconds(partial(balance, Mask(documents=ids), seq_len, num_ranks)))
        plain: dict[str, Layout] = {"contiguous": Contiguous(), "zigzag": ZigZag(), "striped": Striped()}
        layout = plain[name] if name in plain else balance(mask, seq_len, num_ranks)
        found = measured(layout, mask, seq_len, num_ranks, repeats)
        yield Row(seq_len, num_ranks, "documents", len(lens), name, min(solve or [0.0]), min(read), *found)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seq-len", type=int, default=1 << 20)
    parser.add_argument("--ranks", type=int, nargs="+", default=[8, 64, 128, 1024])
    parser.add_argument("--document-ranks", type=int, nargs="+", default=[8, 128])
    parser.add_argument("--shortest", type=int, default=200)
    parser.add_argument("--longest", type=int, default=5000)
    parser.add_argument("--median", type=float, help="use lognormal document lengths with this median")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--csv", help="write the rows to this file")
    args = parser.parse_args(argv)
    lens = lognormal_or_uniform(args)
    rows = [row for num_ranks in args.ranks for row in of_masks(args.seq_len, num_ranks, args.repeats)]
    rows += [row for num_ranks in args.document_ranks for row in of_documents(lens, num_ranks, args.repeats)]
    names = [field.name for field in fields(Row)]
    table = [[f"{x:.3g}" if isinstance(x, float) else str(x) for x in astuple(row)] for row in rows]
    print("\n".join(",".join(line) for line in [names, *table]))
    if args.csv:
        with open(args.csv, "w", newline="") as file:
            csv.writer(file, lineterminator="\n").writerows([names, *table])


def lognormal_or_uniform(args: argparse.Namespace) -> list[int]:
    """Lengths of documents that fill the sequence."""
    if args.median:
        return document_lengths(args.seq_len, 0, args.median)
    generator, lens = torch.Generator().manual_seed(0), []
    while (left := args.seq_len - sum(lens)) > 0:
        lens.append(min(left, int(torch.randint(args.shortest, args.longest + 1, (), generator=generator))))
    return lens


if __name__ == "__main__":
    main()
