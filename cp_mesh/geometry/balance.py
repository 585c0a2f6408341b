"""Balancing: a layout for one batch of packed documents, by the time that a layer takes.

A token's linears take as long as ``pairs_per_token`` pairs of query and key take in attention. Shards have equally many
tokens, so ranks differ in pairs only, and a difference below `SLACK` of a layer counts as none. Documents are dealt in
order of density, most pairs per token first:

1.  Whole, to the rank with fewest pairs that has room.
2.  A document that would bring this rank above its share, or fits nowhere, is cut: the rank takes rows for its share,
    and the next rank goes on with the rest. What open room will hold later is not known yet: `WEIGHTS` are tried.
3.  Of the smallest documents, ranks take some that fill their shards exactly. Where there are none, the last are cut.

Keys of a causal document travel to the ranks that hold later rows. So a rank takes its last rows, or its first ones if
these are fewer than the last would leave. Where a whole shard of first rows has less than a share of pairs, ranks take
equally many rows from both ends, as in zigzag: more from the head means fewer pairs.
"""

from __future__ import annotations

from bisect import bisect_right, insort
from collections.abc import Sequence
from heapq import heapreplace
from itertools import accumulate
from math import ceil, inf, sqrt

import numpy as np
import torch

from cp_mesh.errors import UnsupportedError, check_int, refuse, typed
from cp_mesh.geometry.block_table import run_begins
from cp_mesh.geometry.layouts import Balanced, chunk_bounds
from cp_mesh.geometry.mask import NONE, Mask
from cp_mesh.geometry.pair_counts import Part, documents_of, parts_between

PAIRS_PER_TOKEN = 15_000
"""Of Llama-3-8B: the linears of a token are 1.3 GFLOP at 600 TFLOP/s, a pair is 57 kFLOP at 400 (H200, both passes)."""
SLACK = 0.02
"""Imbalance, as a fraction of a layer's time, that is accepted where it saves a cut."""
WEIGHTS = 0.25, 0.5, 0.75, 1.0
"""Pairs per token of open room, from the lightest document (0) to the mean of all lighter ones (1): the first that ends
even is taken."""
CHANGE = 16
"""Documents per rank, the smallest ones, that fill shards exactly: 2**16 sums are about as many as lengths."""


@typed
def balance(mask: Mask, seq_len: int, cp_size: int, *, pairs_per_token: float = PAIRS_PER_TOKEN) -> Balanced:
    """Return a layout in which a layer takes all ranks equally long; call it for every packed batch.

    Documents stay whole on one rank, and nothing of them travels, unless ranks would then differ by more than 2 %. Long
    ones are cut, so that few keys travel; short ones only to fill a shard.

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
    [[1, 2, 3, 4, 5, 6, 7, 8], [0, 9, 10, 11, 12, 13, 14, 15]]
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
    rows, bounds = documents_of(mask, seq_len), [chunk_bounds(seq_len, cp_size, rank) for rank in range(cp_size)]
    edges = [0, seq_len, *(x for reach in mask.reaches(seq_len) for x in (reach.begin, reach.end))]
    parts = parts_between(np.concatenate([edges, *(documents.edges for documents in rows)]), mask, seq_len)
    share = sum(part.pairs for part in parts) / cp_size
    slack = SLACK * (pairs_per_token * seq_len / cp_size + share)
    if len(rows) > 1:  # a part is hardly ever a document of all rows, so it is no loss to cut parts
        chunks = parts_between(np.array(bounds), mask, seq_len)
        parts = chunks if all(chunk.pairs <= share + slack for chunk in chunks) else parts
    parts.sort(key=lambda part: -part.pairs / part.num)
    tried = []
    for weight in WEIGHTS:
        tried.append(_deal(parts, [end - begin for begin, end in bounds], share, slack, weight))
        if tried[-1][0] <= share + slack:
            break
    _, shards = min(tried, key=lambda x: x[0])
    runs = np.array([run for shard in shards for run in sorted(shard) if run[1]], dtype=np.int64).reshape(-1, 2)
    first = run_begins(runs[1:, 0] != runs[:-1].sum(1))[: len(runs)]  # adjacent runs are one
    return Balanced(torch.from_numpy(np.stack([runs[first, 0], np.add.reduceat(runs[:, 1], first)], 1)))


Runs = list[tuple[int, int]]  # first position and length of each


def _deal(parts: list[Part], room: list[int], share: float, slack: float, weight: float) -> tuple[float, list[Runs]]:
    """Deal out parts, the densest first; return the most pairs of a rank, and what each rank holds.

    Args:
        room: tokens that each rank has still to get.
        share, slack: pairs that each rank should get, and how many more it may get.
    """
    pairs, runs = [0.0] * len(room), [Runs() for _ in room]

    def give(rank: int, part: Part, num: int, wanted: float = 0.0) -> Part:
        """Give ``num`` rows of a part to a rank, with pairs near ``wanted``; return the part's rest."""
        head, of_both = _ends(part, num, wanted, slack / 2)
        runs[rank] += [(part.begin, head), (part.begin + part.num - (num - head), num - head)]
        room[rank] -= num
        pairs[rank] += of_both
        return Part(part.pairs - of_both, part.begin + head, part.num - num, part.rise)

    small = bisect_right([*accumulate(part.pairs for part in reversed(parts))], slack)
    many = len(parts) - min(small, CHANGE * len(room))
    left, change = list[Part](), parts[many:]
    tokens, more, lighter, most = sum(room), share * len(room), inf, share + slack
    for part in parts[:many]:
        tokens, more = tokens - part.num, more - part.pairs
        now = weight * more / max(tokens, 1) + (1 - weight) * parts[-1].pairs / parts[-1].num
        if now < 0.9 * lighter:
            lighter = now  # ranks by their pairs with those that their room will hold
            order = sorted([(pairs[rank] + num * lighter, rank) for rank, num in enumerate(room) if num])
        used = []
        while part.num and order:
            (load, rank), price = order[0], part.pairs - lighter * part.num
            fits = load + price <= most and part.num <= max(room)
            able = next((x for x in order if room[x[1]] >= part.num), None) if fits else None
            if able and able[0] + price <= most:
                order.remove(able)
                rank, num = able[1], part.num
            elif (gap := share - load) > slack / 4:
                del order[0]
                first = part.pairs / part.num - part.rise * part.num / 2 - lighter  # what the first row costs
                head, tail = _rows(first, part.rise, gap), _rows(first + part.rise * part.num, -part.rise, gap)
                num = head if head < part.num - tail else tail
                if head > room[rank]:  # first rows alone are less than this rank's share
                    num = max(tail, part.num // max(1, ceil((price - slack) / gap)))
                num = min(num, room[rank], part.num)
            else:
                break
            part = give(rank, part, num, share - pairs[rank] - lighter * (room[rank] - num))
            used.append(rank)
        left += [part] if part.num else []
        for rank in filter(room.__getitem__, used):
            insort(order, (pairs[rank] + room[rank] * lighter, rank))
    for rank in sorted(filter(room.__getitem__, range(len(room))), key=room.__getitem__):
        some = change[-2 * CHANGE :]
        taken = {some[i] for i in _adding_up([part.num for part in some], room[rank])}
        for part in sorted(taken):
            give(rank, part, part.num)
        change = [part for part in change if part not in taken]
    heap = sorted((-num, rank) for rank, num in enumerate(room))  # the rank with most room first
    for part in left + change:
        while part.num:
            rank = heap[0][1]
            num = min(room[rank], part.num)
            part = give(rank, part, num, (share - pairs[rank]) * num / room[rank])
            heapreplace(heap, (-room[rank], rank))
    return max(pairs), runs


def _rows(first: float, rise: float, pairs: float) -> int:
    """Return how many rows have these pairs: the first row has ``first``, each other ``rise`` more than the last."""
    slope = first + sqrt(max(first * first + 2 * rise * pairs, 0.0))
    return ceil(min(2 * pairs / slope, NONE)) if slope > 0 else NONE


def _ends(part: Part, num: int, wanted: float, tolerance: float) -> tuple[int, float]:
    """Return how many of ``num`` rows to take from a part's head, the others from its tail, and the pairs of all.

    One end is enough where it has as many pairs as wanted; if both have, the one that leaves fewer keys to fetch.
    """
    if num == part.num:
        return num, part.pairs
    of_tail = part.pairs * num / part.num + part.rise * (part.num - num) * num / 2
    step = part.rise * (part.num - num)  # what a row of the head instead of the tail saves
    head = round(min(max((of_tail - wanted) / step, 0), num)) if step else 0
    for end in (0, num) if 2 * num < part.num else (num, 0):
        head = end if abs(of_tail - end * step - wanted) <= tolerance else head
    return head, of_tail - head * step


def _adding_up(numbers: Sequence[int], total: int) -> set[int]:
    """Return indices of numbers that add up to ``total``; none if there are no such numbers."""
    sums, taken, until = [1], set[int](), (2 << total) - 1  # bit n of sums[i]: some of the first i numbers add up to n
    for number in numbers if sum(numbers) >= total else ():
        sums.append((sums[-1] | sums[-1] << number) & until)
    for i in reversed(range(len(sums) - 1)) if sums[-1] >> total else ():
        if not sums[i] >> total & 1:
            taken.add(i)
            total -= numbers[i]
    return taken
