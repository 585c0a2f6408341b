"""Blocks between whole runs of a layout, and what all ranks must know of one another found without making all blocks.

A grid of booleans says which pairs of runs are seen in full, and only the others, few of a row, become blocks; alike
ones are looked at once. So planning takes milliseconds at hundreds of ranks (`examples/benchmarks/planning.py`).
"""

from __future__ import annotations

from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from cp_mesh.geometry.block_table import (
    K_END,
    Q_END,
    RECEIVER,
    SOURCE,
    Array,
    K,
    Pieces,
    Q,
    block_table,
    cut_in_two,
    grid,
    increasing,
    is_order,
    join_full,
    keys_of,
    own_causal,
    shard_lens_of,
    shares_keys,
    unions,
)
from cp_mesh.geometry.global_plan import Facts, Found, Groups, alike, blocks_of_alike
from cp_mesh.geometry.layouts import Layout
from cp_mesh.geometry.mask import NONE, Documents, Mask

CHUNK = 1 << 17  # pairs of pieces that are looked at together: their booleans stay in the cache
SHORT = 64  # keys of a piece, more than any kernel needs: it is not asked whether its neighbours join it
FEW = 1 << 12  # blocks that are made as fast as it is found out which of them are alike


class ByRuns:
    """Blocks between whole runs of a layout, cut where the mask's distances change."""

    def __init__(self, layout: Layout, pieces: Pieces, mask: Mask, seq_len: int, cp_size: int) -> None:
        self.shard_lens = shard_lens_of(pieces, cp_size)
        self._q, self._k, self._cp_size = pieces, keys_of(pieces, mask, seq_len), cp_size
        self._opaque = mask.elementwise
        compares_order = is_order(mask) and not self._opaque
        self._one_tile = increasing(pieces, cp_size) if compares_order else np.zeros(cp_size, dtype=bool)
        self._documents: list[tuple[Array, Array]] = []  # by batch row, bounds of pieces of queries and of keys
        if mask.documents is not None:
            simple = pieces.regular.all() and (pieces.stride == 1).all()
            order = None if simple else layout.permutation(seq_len, cp_size).numpy()
            self._documents = [
                (self._label_bounds(x, pieces, order), self._label_bounds(x, self._k, order)) for x in mask.runs()
            ]
        self.facts = self._survey()

    def of_receiver(self, rank: int) -> tuple[Array, ...]:
        table = self._table(np.flatnonzero(self._q.rank == rank), np.arange(self._k.num))
        own = own_causal(self._q.at(self._q.rank == rank)) if self._one_tile[rank] else table[:0]
        return (join_full(np.concatenate([own, table]), (RECEIVER, SOURCE, K, K_END), Q, Q_END),)

    def of_source(self, rank: int) -> Array:
        table = self._table(np.arange(self._q.num), np.flatnonzero(self._k.rank == rank))
        return table[table[:, RECEIVER] != rank]

    def _label_bounds(self, documents: Documents, pieces: Pieces, order: Array | None) -> Array:
        """Smallest and largest document of each piece: [2, pieces]. ``order``: the positions of rank after rank; None:
        every piece is a run of stride 1."""
        if not pieces.num:
            return np.zeros((2, 0), dtype=np.int64)
        labels = documents.labels
        if order is None:
            first = np.searchsorted(documents.edges, pieces.low, side="right") - 1
            last = np.searchsorted(documents.edges, pieces.high, side="right")
        else:
            lens = np.array(self.shard_lens)
            labels = np.repeat(labels, np.diff(documents.edges))[order]
            first = (np.cumsum(lens) - lens)[pieces.rank] + pieces.row
            last = first + pieces.length
        edges = np.stack([first, last], 1).reshape(-1)
        low = np.where(labels < 0, NONE, labels)  # so excluded ones are in no bounds
        bounds = (np.minimum, np.r_[low, 0]), (np.maximum, np.r_[labels, 0])  # longer, so that an end may be named
        return np.stack([bound.reduceat(x, edges)[::2] for bound, x in bounds])

    def _table(self, q: Array, k: Array) -> Array:
        i, j = _indices(self._seen(q, k)[0])
        return block_table(self._q, q[i], self._k, k[j], self._opaque)

    def _seen(self, q: Array, k: Array) -> tuple[NDArray[np.bool_], NDArray[np.bool_]]:
        """`grid` of these pieces without what `own_causal` has and what ids keep apart."""
        seen, full = grid(self._q.at(q), self._k.at(k))
        q_rank, k_rank = self._q.rank[q], self._k.rank[k]
        if self._one_tile.any():
            others = (q_rank[:, None] != k_rank) | ~self._one_tile[q_rank][:, None]
            seen &= others
            full &= others
        if self._documents:
            meet = np.zeros_like(seen)
            for (q_low, q_high), (k_low, k_high) in self._documents:
                meet |= (q_low[q, None] <= k_high[k]) & (k_low[k] <= q_high[q, None])
            seen &= meet
        return seen, full

    def _survey(self) -> Facts:
        """Look at all pairs of pieces, some receivers at a time."""
        q, k, size = self._q, self._k, self._cp_size
        found = Found(np.zeros((size, size), dtype=np.int64))
        if self._one_tile.any() and any(lens := np.array(self.shard_lens)[self._one_tile]):
            found.covers.add("causal")
            found.min_keys = int(lens[lens > 0].min())
        if k.num:
            ranks, first = np.unique(q.rank, return_index=True)
            ends = np.r_[first[1:], q.num]
            step = max(1, CHUNK * len(ranks) // (q.num * k.num))
            for begin in range(0, len(ranks), step):
                some = slice(begin, begin + step)
                rows = np.arange(first[begin], ends[some][-1])
                self._look_at(found, ranks[some], rows, Groups.of(q.rank[rows]), Groups.of(k.rank))
        return found.facts()

    def _look_at(self, found: Found, ranks: Array, rows: Array, by_rank: Groups, by_source: Groups) -> None:
        """All that pieces of queries ``rows``, of receivers ``ranks``, see."""
        q, k, size = self._q.at(rows), self._k, self._cp_size
        seen, full = self._seen(rows, np.arange(k.num))
        if self._opaque:  # whole pieces travel, and no two tiles are joined
            seen, full, calls = np.zeros_like(seen), seen, by_rank.count_true(seen)
        else:
            starts = full.copy()  # full tiles of neighbouring runs of queries are one
            starts[1:] &= ~full[:-1]
            starts[by_rank.first] = full[by_rank.first]
            calls = by_rank.count_true(starts)
        whole = calls > 0
        if whole.any():
            found.covers.add("pairs" if self._opaque else "full")
            found.min_keys = min(found.min_keys, self._fewest_keys(full, whole, by_rank, found.min_keys))
        away = ranks[:, None] != k.rank
        found.overlapping |= bool((calls[away] > 1).any())
        # Of a piece that is seen in part, by one piece of the receiver, only the number of keys matters. In striped
        # layouts those are all pieces, so the blocks of alike pairs are made once.
        part = seen & ~full
        one_call = (by_rank.count_true(part) == 1) & ~whole & away
        alone = part & by_rank.spread(one_call)
        i, j = _indices(alone)
        counts = np.where(whole & away, k.length, 0)
        counts[by_rank.group[i], j] = self._counts_of_keys(found, rows[i], j)
        found.needed[ranks[:, None], k.rank[by_source.first]] = by_source.sum_columns(counts)
        i, j = _indices(part & ~alone)
        blocks = found.add(block_table(q, i, k, j, opaque=False))
        blocks = blocks[blocks[:, RECEIVER] != blocks[:, SOURCE]]
        if not len(blocks):
            return
        piece = np.searchsorted(k.rank * NONE + k.row, blocks[:, SOURCE] * NONE + blocks[:, K], side="right") - 1
        receiver = np.searchsorted(ranks, blocks[:, RECEIVER])
        in_whole = whole[receiver, piece]
        also = np.zeros_like(whole)  # pieces that other rows see in full, in a call of their own or the same
        also[receiver[in_whole], piece[in_whole]] = True
        i, j = _indices(full & by_rank.spread(also))
        every = np.concatenate([blocks, block_table(q, i, k, j, opaque=False)])
        found.overlapping |= shares_keys(join_full(every, (RECEIVER, SOURCE, K, K_END), Q, Q_END), size)
        blocks = blocks[~in_whole]
        owner, begins, ends = unions(blocks[:, RECEIVER] * size + blocks[:, SOURCE], blocks[:, K], blocks[:, K_END])
        np.add.at(found.needed.reshape(-1), owner, ends - begins)

    def _fewest_keys(self, full: NDArray[np.bool_], whole: NDArray[np.bool_], by_rank: Groups, known: int) -> int:
        """Of the calls of whole pieces. Neighbours in a shard, of which the same queries see all, are one call."""
        k = self._k
        fewest = int(k.length[whole.any(0)].min())
        if self._opaque or fewest >= min(SHORT, known):  # joined ones have no fewer
            return fewest
        follows = (k.rank[1:] == k.rank[:-1]) & (k.row[1:] == (k.row + k.length)[:-1])
        begins = np.ones(whole.shape, dtype=bool)
        begins[:, 1:] = ~follows | (by_rank.count_true(full[:, 1:] != full[:, :-1]) > 0)
        first = np.flatnonzero(begins)
        keys = np.add.reduceat(np.tile(k.length, len(whole)), first)
        return int(keys[whole.reshape(-1)[first]].min())

    def _counts_of_keys(self, found: Found, i: Array, j: Array) -> Array:
        """How many keys each block of q[i] and k[j] names."""
        q, k, number = self._q, self._k, np.arange(len(i))
        if len(i) > FEW and q.regular.all() and k.regular.all():
            of_q, of_k = self._alike
            number = of_q[i] + of_k[j]
        blocks, keys = blocks_of_alike(q, i, k, j, number)
        found.add(blocks)
        found.overlapping |= cut_in_two(blocks)
        return keys

    @cached_property
    def _alike(self) -> tuple[Array, Array]:
        return alike(self._q, self._k)


def _indices(x: NDArray[np.bool_]) -> tuple[Array, Array]:
    """As ``x.nonzero()`` of two dims, several times as fast."""
    i, j = np.divmod(np.flatnonzero(x), max(1, x.shape[1]))
    return i, j
