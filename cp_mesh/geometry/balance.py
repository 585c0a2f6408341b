"""Balancing: a layout for one batch of packed documents, by the time that a layer takes.

A token's linears take as long as ``pairs_per_token`` pairs of query and key take in attention. Shards have equally many
tokens, so ranks differ in pairs only, and a difference below `SLACK` of a layer counts as none:

1.  Documents go whole to the rank with fewest pairs that has room, the densest (most pairs per token) first.
2.  A document that brings a rank above its share, or is longer than a shard, is cut over just enough ranks. What will
    come into a rank's open room is not known yet: `WEIGHTS` are tried.
3.  Of the smallest documents, ranks take some that fill their shards exactly. Where there are none, the last are cut.

A cut takes rows from both ends of a document, as zigzag does within a sequence: later queries see more keys, so the
number of rows from the head sets the pairs. One end is enough where that is within the slack.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import takewhile
from math import ceil
from typing import NamedTuple

import numpy as np
import torch

from cp_mesh.errors import UnsupportedError, check_int, refuse, typed
from cp_mesh.geometry.block_table import Array
from cp_mesh.geometry.layouts import Balanced, chunk_bounds
from cp_mesh.geometry.mask import NONE, Documents, Mask, pairs_from

PAIRS_PER_TOKEN = 15_000
"""Of Llama-3-8B: the linears of a token are 1.3 GFLOP at 600 TFLOP/s, a pair is 57 kFLOP at 400 (H200, both passes)."""
SLACK = 0.02
"""Imbalance, as a fraction of a layer's time, that is accepted where it saves a cut."""
WEIGHTS = 0.0, 0.25, 0.5, 0.75, 1.0
"""What open room will hold, as fractions of the mean of all lighter documents. The first that ends even is taken."""
CHANGE = 16
"""Documents per rank, the smallest ones, that fill shards exactly: 2**16 sums are about as many as lengths."""


@typed
def balance(mask: Mask, seq_len: int, cp_size: int, *, pairs_per_token: float = PAIRS_PER_TOKEN) -> Balanced:
    """Return a layout in which a layer takes all ranks equally long; call it for every packed batch.

    Documents stay whole on one rank, and nothing of them travels, unless ranks would then differ by more than 2 %.

    Args:
        mask: conditions on positions, documents and blocks. Batch rows share one layout: their pairs are added up. A
            document id that returns after another one counts as another document.
        seq_len: tokens in the whole sequence.
        cp_size: number of ranks to balance for; the layout is valid for other numbers too.
        pairs_per_token: how many pairs of query and key take attention as long as one token takes the linears. Of a
            model it is about 0.3 · (parameters that a token uses in a layer) / (query heads · head_dim). 0: attention
            alone counts.

    Returns:
        A layout with shards of `torch.chunk` sizes: equal where ``cp_size`` divides ``seq_len``.

    Raises:
        ArgumentError: if documents or blocks do not have ``seq_len`` tokens, or ``pairs_per_token`` is negative.
        UnsupportedError: if the mask has key padding, or if its documents or blocks are meta tensors.

    >>> documents = torch.tensor([0] * 9 + [1] * 3 + [2] * 4)
    >>> layout = balance(Mask(documents=documents), 16, 2)
    >>> [layout.positions(16, 2, rank).tolist() for rank in range(2)]
    [[0, 1, 2, 3, 12, 13, 14, 15], [4, 5, 6, 7, 8, 9, 10, 11]]
    """
    seq_len, cp_size = check_int("balance: seq_len", seq_len, 0, NONE), check_int("balance: cp_size", cp_size)
    given = {name: x for name, x in (("documents", mask.documents), ("blocks", mask.blocks)) if x is not None}
    if mask.key_padding is not None or any(x.is_meta for x in given.values()):
        what = "key_padding" if mask.key_padding is not None else "meta tensors"
        hint = "pass documents with content, and no key_padding"
        refuse("balance", "a mask of positions, documents and blocks", what, hint, UnsupportedError)
    for name, x in given.items():
        if x.shape[-1] != seq_len:
            hint = "pass their length as seq_len" + "; it is the last entry of cu_seqlens" * (name == "documents")
            refuse(f"balance: mask.{name}", f"{seq_len} tokens", x.shape[-1], hint)
    if not 0 <= pairs_per_token < NONE:
        refuse("balance: pairs_per_token", f"a number of 0 to {NONE}", pairs_per_token, "leave it out")
    rows, bounds = _rows(mask, seq_len), [chunk_bounds(seq_len, cp_size, rank) for rank in range(cp_size)]
    changes = [(reach.begin, reach.end) for reach in mask.reaches(seq_len)]
    parts = _parts(np.concatenate([[0, seq_len], *changes, *(documents.edges for documents in rows)]), mask, seq_len)
    share = sum(part.pairs for part in parts) / cp_size
    slack = SLACK * (pairs_per_token * seq_len / cp_size + share)
    if len(rows) > 1:  # a part is hardly ever a document of all rows, so it is no loss to cut parts
        chunks = _parts(np.array(bounds), mask, seq_len)
        parts = chunks if all(chunk.pairs <= share + slack for chunk in chunks) else parts
    parts.sort(key=lambda part: -part.pairs / part.num)
    best: Shards | None = None
    for weight in WEIGHTS:
        shards = Shards([end - begin for begin, end in bounds], share, slack, weight)
        shards.deal(parts)
        if best is None or max(shards.pairs) < max(best.pairs):
            best = shards
        if max(best.pairs) <= share + slack:
            break
    assert best is not None
    table = [(begin, end - begin) for runs in best.runs for begin, end in _with_neighbours(runs)]
    return Balanced(torch.tensor(table, dtype=torch.int64, device="cpu").reshape(-1, 2))


class Part(NamedTuple):
    """Positions ``begin`` to ``end``, within one document of every batch row.

    Attributes:
        pairs: of their queries with keys, in all batch rows.
        rise: how many more keys a query sees than the one before, about.
    """

    pairs: float
    begin: int
    end: int
    rise: float

    @property
    def num(self) -> int:
        return self.end - self.begin


class Shards:
    """What ranks hold while parts are dealt out.

    Attributes:
        room: tokens that each rank has still to get.
        pairs: of each rank, about.
        runs: begin and end of what each rank holds.
    """

    def __init__(self, room: list[int], share: float, slack: float, weight: float) -> None:
        self.room, self.pairs = room, [0.0] * len(room)
        self.runs: list[list[tuple[int, int]]] = [[] for _ in room]
        self._share, self._slack, self._weight = share, slack, weight

    def deal(self, parts: Sequence[Part]) -> None:
        """Deal out all parts, which are sorted by density."""
        excluded = sum(1 for _ in takewhile(lambda part: not part.pairs, reversed(parts)))
        seen, pairs, small = parts[: len(parts) - excluded], 0.0, 0
        while small < min(len(seen), CHANGE * len(self.room)) and (pairs := pairs + seen[~small].pairs) <= self._slack:
            small += 1
        left = self._place(seen[: len(seen) - small])
        left += self._place(self._fill_exactly(seen[len(seen) - small :]))
        self._fill([*left, *parts[len(seen) :]])  # a cut of excluded tokens costs nothing

    def _place(self, parts: Sequence[Part]) -> list[Part]:
        """Give parts to the fewest ranks that do not end above their share; return those that have no such ranks."""
        left, ranks = [], [*range(len(self.room))]
        tokens, pairs = sum(self.room), self._share * len(ranks) - sum(self.pairs)
        for part in parts:
            tokens, pairs = tokens - part.num, pairs - part.pairs
            lighter, least = self._weight * pairs / max(tokens, 1), part.num
            projected = [pairs + room * lighter for pairs, room in zip(self.pairs, self.room, strict=True)]
            ranks.sort(key=projected.__getitem__)
            chosen: list[int] = []
            fewest = ceil(part.num / max(self.room))
            for rank in ranks:
                num_ranks = len(chosen) + 1
                if self.room[rank] * max(num_ranks, fewest) < part.num:
                    continue
                chosen.append(rank)
                least = min(least, self.room[rank])
                more = (part.pairs - part.num * lighter) / num_ranks
                if least >= ceil(part.num / num_ranks) and projected[rank] + more <= self._share + self._slack:
                    break
            else:
                left.append(part)
                continue
            rest = part
            for i, rank in enumerate(chosen):
                rest = self._give(rank, rest, rest.num // (num_ranks - i), part.pairs / num_ranks)
        return left

    def _fill_exactly(self, parts: Sequence[Part]) -> Sequence[Part]:
        """Give whole parts to ranks whose room they fill; return the parts that are left."""
        for room, rank in sorted((room, rank) for rank, room in enumerate(self.room) if room):
            some = parts[-2 * CHANGE :]
            taken = _adding_up([part.num for part in some], room)
            for i in taken:
                self._give(rank, some[i], some[i].num)
            if taken:
                parts = [*parts[: -2 * CHANGE], *(part for i, part in enumerate(some) if i not in taken)]
        return parts

    def _fill(self, parts: Sequence[Part]) -> None:
        """Cut the last parts so that they fill the ranks, those with most room first."""
        for part in parts:
            while part.num:
                rank = max(range(len(self.room)), key=self.room.__getitem__)
                num = min(self.room[rank], part.num)
                part = self._give(rank, part, num, (self._share - self.pairs[rank]) * num / self.room[rank])

    def _give(self, rank: int, part: Part, num: int, wanted: float = 0.0) -> Part:
        """Give ``num`` rows from both ends of a part to a rank, with pairs near ``wanted``; return the part's rest."""
        spread = part.rise * (part.num - num) * num  # pairs of the last rows less those of the first
        of_last = part.pairs * num / part.num + spread / 2
        head = min(max((of_last - wanted) / spread, 0.0), 1.0) if spread else 1.0
        for one_end in (0.0, 1.0):
            head = one_end if abs(head - one_end) * abs(spread) <= self._slack / 2 else head
        begin, pairs = part.begin + round(head * num), of_last - head * spread
        end = part.end - (num - (begin - part.begin))
        self.room[rank] -= num
        self.pairs[rank] += pairs
        self.runs[rank] += [(part.begin, begin), (end, part.end)]
        return Part(part.pairs - pairs, begin, end, part.rise)


def _adding_up(numbers: Sequence[int], total: int) -> set[int]:
    """Return indices of numbers that add up to ``total``; none if there are no such numbers."""
    sums, taken = [1], set[int]()  # bit n of sums[i]: some of the first i numbers add up to n
    for number in numbers if sum(numbers) >= total else ():
        sums.append((sums[-1] | sums[-1] << number) & (2 << total) - 1)
    for i in reversed(range(len(sums) - 1)) if sums[-1] >> total & 1 else ():
        if not sums[i] >> total & 1:
            taken.add(i)
            total -= numbers[i]
    return taken


def _with_neighbours(runs: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """Sort runs, drop empty ones and join adjacent ones."""
    merged: list[tuple[int, int]] = []
    for begin, end in sorted(run for run in runs if run[1] > run[0]):
        if merged and merged[-1][1] == begin:
            begin = merged.pop()[0]
        merged.append((begin, end))
    return merged


def _parts(edges: Array, mask: Mask, seq_len: int) -> list[Part]:
    """Return the parts between positions, which may be in any order."""
    edges = np.unique(edges)
    begin, end = edges[:-1], edges[1:]
    middle = (begin + end) // 2
    points = np.unique(np.concatenate([edges, middle]))
    before = np.append(0, pairs_between(points, mask, seq_len).cumsum())
    at_begin, at_middle, at_end = (before[np.searchsorted(points, x)] for x in (begin, middle, end))
    gain = (at_end - at_middle) / (end - middle) - (at_middle - at_begin) / np.maximum(middle - begin, 1)
    rise = np.where(middle > begin, 2 * gain / (end - begin), 0)
    return [*map(Part, (at_end - at_begin).tolist(), begin.tolist(), end.tolist(), rise.tolist())]


def _rows(mask: Mask, seq_len: int) -> tuple[Documents, ...]:
    """The documents of each batch row; one entry if all batch rows share them."""
    return (Documents.of(np.zeros(seq_len)),) if mask.documents is None else mask.runs()


def pairs_between(points: Array, mask: Mask, seq_len: int) -> Array:
    """Return the number of pairs whose query lies between two points, summed over batch rows: int64 [n - 1].

    Args:
        points: n rising positions, the last of which is ``seq_len``.
        mask: without key padding.
        seq_len: tokens in the whole sequence.
    """
    rows, seen = _rows(mask, seq_len), []
    if mask.blocks is not None:
        blocks = [Documents.of(ids) for ids in torch.atleast_2d(mask.blocks).numpy()]
        ahead = replace(mask, causal=False, prefix=0, blocks=None).reaches(seq_len)
    for i in range(max(len(rows), 0 if mask.blocks is None else len(blocks)) if rows else 0):
        documents = rows[i % len(rows)]
        seen += [(documents, reach) for reach in mask.reaches(seq_len)]
        if mask.blocks is not None:  # later keys of the query's block and document
            block = blocks[i % len(blocks)]
            edges = np.union1d(block.edges, documents.edges)
            labels = (x.labels[np.searchsorted(x.edges, edges[:-1], side="right") - 1] for x in (block, documents))
            both = Documents(edges, np.minimum(*labels))
            seen += [(both, reach._replace(begin=min(mask.prefix, reach.end), farthest=-1)) for reach in ahead]
    cuts = np.unique(np.concatenate([points, *(documents.edges for documents, _ in seen)]))
    begin, num_q, total = cuts[:-1], np.diff(cuts), np.zeros(max(0, len(cuts) - 1), dtype=np.int64)
    for documents, reach in seen:
        which = np.searchsorted(documents.edges, begin, side="right") - 1
        key = np.maximum(documents.edges[which], reach.begin)
        num_k = np.maximum(np.minimum(documents.edges[which + 1], reach.end) - key, 0)
        bounds = (least + key - begin for least in (reach.nearest, reach.farthest + 1))
        near, far = (pairs_from(np.clip(least, -num_k, num_q), num_q, num_k) for least in bounds)
        total += np.where(documents.labels[which] < 0, 0, near - far)
    return np.add.reduceat(total, np.searchsorted(cuts, points[:-1]))
