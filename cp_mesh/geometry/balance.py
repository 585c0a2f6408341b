"""Balancing: a layout that gives all ranks equally many tokens and equal shares of a mask's work.

A position's work is the number of keys that it sees. Each rank takes documents, the densest (most work per position)
together with the lightest:

1.  It takes whole documents from the light end as long as the rest of its tokens, taken from the densest document,
    keeps its work at or above its share. Of the next light document it takes all, nothing, or what meets the share.
2.  The rest comes from both ends of the densest document, as zigzag does within a sequence. Later positions have more
    work, so the number of tokens from the head sets the work, and is chosen to meet the share. A document with too few
    tokens is taken whole, and the next densest follows.

A rank's rows are then sorted by position and adjacent ranges merged. So most documents stay on one rank, and a cut
document gives each rank one or two runs, the first rank's outermost: a stage needs one or two calls, as in zigzag.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import torch

from cp_mesh.errors import UnsupportedError, check_int, refuse, typed
from cp_mesh.geometry.block_table import Array
from cp_mesh.geometry.layouts import Balanced, chunk_bounds
from cp_mesh.geometry.mask import NONE, Documents, Mask


@typed
def balance(mask: Mask, seq_len: int, cp_size: int) -> Balanced:
    """Return a layout in which every rank computes an equal share of a mask's work; call it for every packed batch.

    Args:
        mask: conditions on positions, documents and blocks. Batch rows share one layout: their work is added up. A
            document id that returns after another one counts as another document.
        seq_len: tokens in the whole sequence.
        cp_size: number of ranks to balance for; the layout is valid for other numbers too.

    Returns:
        A layout with shards of `torch.chunk` sizes: equal where ``cp_size`` divides ``seq_len``.

    Raises:
        ArgumentError: if documents or blocks do not have ``seq_len`` tokens.
        UnsupportedError: if the mask has key padding, or if its documents or blocks are meta tensors.

    >>> documents = torch.tensor([0] * 8 + [1] * 2 + [2] * 2 + [3] * 4)
    >>> layout = balance(Mask(documents=documents), 16, 2)
    >>> [layout.positions(16, 2, rank).tolist() for rank in range(2)]
    [[0, 1, 2, 3, 4, 7, 8, 9], [5, 6, 10, 11, 12, 13, 14, 15]]
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
    edges = np.unique(np.concatenate([[0, seq_len], *(x.edges for x in _documents(mask, seq_len))])).tolist()
    work = memoryview(np.r_[0, keys_seen(mask, seq_len).cumsum()])  # work before each position; the last is the total
    parts: list[Part] = []  # sorted by density
    for begin, end in pairwise(edges):
        _insert(parts, begin, end, work)
    order: list[tuple[int, int]] = []
    tokens_left, work_left = seq_len, work[seq_len]
    for rank in range(cp_size):
        begin, end = chunk_bounds(seq_len, cp_size, rank)
        share = work_left * (end - begin) / tokens_left if tokens_left else 0.0
        taken = _take(parts, end - begin, share, work)
        order += _with_neighbours(taken)
        tokens_left -= end - begin
        work_left -= sum(work[b] - work[a] for a, b in taken)
    table = np.array([(begin, end - begin) for begin, end in order], dtype=np.int64).reshape(-1, 2)
    return Balanced(torch.from_numpy(table))


class Part(NamedTuple):
    """Positions ``begin`` to ``end``, and their density: the mean work of a position."""

    density: float
    begin: int
    end: int

    @property
    def num(self) -> int:
        return self.end - self.begin


def _insert(parts: list[Part], begin: int, end: int, work: Sequence[int]) -> None:
    if end > begin:
        insort(parts, Part((work[end] - work[begin]) / (end - begin), begin, end))


def _take(parts: list[Part], tokens: int, share: float, work: Sequence[int]) -> list[tuple[int, int]]:
    """Remove ``tokens`` positions of work near ``share`` from ``parts``, sorted by density, and return them."""
    taken: list[tuple[int, int]] = []
    while tokens and parts:
        density, begin, end = dense = parts.pop()
        whole, rest, excess = 0, tokens, tokens * density - share  # excess if all had this density
        for part in parts:
            saved = (density - part.density) * part.num
            if part.num > rest or saved > excess:
                break
            whole, rest, excess = whole + 1, rest - part.num, excess - saved
        # how much of the next light part meets the share
        cut, light = 0, parts[whole] if whole < len(parts) else None
        if light is not None and excess > 0:
            saved = density - light.density
            cut = min(rest, light.num, round(excess / saved) if saved > 0 else rest)
        if rest - cut > dense.num:
            taken.append((begin, end))
            tokens, share = tokens - dense.num, share - (work[end] - work[begin])
            continue
        wanted = share - sum(part.density * part.num for part in parts[:whole])
        best: tuple[tuple[float, bool], list[tuple[int, int]], list[tuple[int, int]], bool] | None = None
        for size in {0, cut, light.num if light is not None and cut else 0}:
            if not 0 <= rest - size <= dense.num:
                continue
            some: list[tuple[int, int]] = []
            left: list[tuple[int, int]] = []
            if size and light is not None:
                some, left = _peel(light, size, size * light.density, work)
            wanted_here = wanted - sum(work[b] - work[a] for a, b in some)
            ends, middle = _peel(dense, rest - size, wanted_here, work)
            error = abs(sum(work[b] - work[a] for a, b in ends) - wanted_here)
            rank = max(error, SLACK * share), bool(size and left)
            if best is None or rank < best[0]:
                best = rank, [*some, *ends], [*left, *middle], bool(size)
        assert best is not None
        _, chosen, left, uses_light = best
        taken += [(part.begin, part.end) for part in parts[:whole]] + chosen
        del parts[: whole + uses_light]
        for a, b in left:
            _insert(parts, a, b, work)
        return taken
    return taken


def _peel(
    part: Part, tokens: int, wanted: float, work: Sequence[int]
) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
    """Take ``tokens`` from the head and the tail of a part so that their work is near ``wanted``: (taken, left)."""
    _, begin, end = part

    def of_head(head: int) -> int:
        return work[begin + head] - work[begin] + work[end] - work[end - (tokens - head)]

    if of_head(0) >= of_head(tokens):  # more from the head means less work
        head = bisect_left(range(tokens + 1), -wanted, key=lambda head: -of_head(head))
    else:
        head = bisect_left(range(tokens + 1), wanted, key=of_head)
    nearest = min((max(0, head - 1), min(head, tokens)), key=lambda head: abs(of_head(head) - wanted))
    for whole in (tokens, 0):  # one run is better than two if the work is nearly the same
        if abs(of_head(whole) - wanted) <= abs(of_head(nearest) - wanted) + SLACK * wanted:
            nearest = whole
            break
    cut, back = begin + nearest, end - (tokens - nearest)
    return _nonempty((begin, cut), (back, end)), _nonempty((cut, back))


def _nonempty(*parts: tuple[int, int]) -> list[tuple[int, int]]:
    return [part for part in parts if part[1] > part[0]]


SLACK = 0.002
"""Imbalance, as a fraction of a rank's work, that is accepted where it saves a run."""


def _with_neighbours(parts: list[tuple[int, int]]) -> list[tuple[int, int]]:
    merged: list[tuple[int, int]] = []
    for begin, end in sorted(parts):
        if merged and merged[-1][1] == begin:
            begin = merged.pop()[0]
        merged.append((begin, end))
    return merged


def _documents(mask: Mask, seq_len: int) -> tuple[Documents, ...]:
    """The documents of each batch row; one entry if all batch rows share them."""
    return (Documents(np.array([0, seq_len]), np.zeros(1, dtype=np.int64)),) if mask.documents is None else mask.runs()


def keys_seen(mask: Mask, seq_len: int) -> Array:
    """Number of keys that each position sees, summed over all batch rows: int64 [seq_len].

    Args:
        mask: without key padding.
        seq_len: tokens in the whole sequence.
    """
    position, total = np.arange(seq_len), np.zeros(seq_len, dtype=np.int64)
    ends: list[Array | None] = [None]
    if mask.blocks is not None:  # end of the keys that each position sees by its block
        ends = [np.bincount(starts, minlength=seq_len).cumsum() for starts in mask.starts.numpy()]
    rows = _documents(mask, seq_len)
    for i in range(max(len(rows), len(ends)) if rows else 0):  # no documents if the batch has no rows
        documents, end_of_block = rows[i % len(rows)], ends[i % len(ends)]
        lens = np.diff(documents.edges)
        excluded = np.repeat(documents.labels < 0, lens)
        for reach in mask.reaches(seq_len):
            first = np.repeat(np.maximum(documents.edges[:-1], reach.begin), lens)
            last = np.repeat(np.minimum(documents.edges[1:], reach.end), lens)
            if reach.farthest < NONE:
                np.maximum(first, position - reach.farthest, out=first)
            if reach.nearest > -NONE:
                seen = position + (1 - reach.nearest)
                np.minimum(last, seen if end_of_block is None else np.maximum(seen, end_of_block), out=last)
            last -= first
            last[excluded] = 0
            total += np.maximum(last, 0, out=last)
    return total
