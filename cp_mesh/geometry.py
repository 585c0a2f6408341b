"""Geometry: the blocks of a layout and a mask, for one rank when it is asked for, and what all ranks must know alike.

A rank computes the blocks of its own queries, serves the keys that others' blocks name, and needs to know a little of
everybody: how many rows travel between every two ranks, which kinds of tile occur. These facts are found without making
the blocks of all ranks: a grid of booleans says which pairs of pieces are seen in full, and only the others, few of a
row, become blocks. So planning takes milliseconds at hundreds of ranks (`examples/benchmarks/planning.py`).

Packed documents that are runs of positions are cut in pieces of one document, and pieces meet within a document alone;
there the blocks of all ranks are few enough to be made.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.lib.stride_tricks import as_strided
from numpy.typing import NDArray

from cp_mesh.blocks import (
    K_END,
    LEFT,
    PAIRS,
    Q_END,
    RECEIVER,
    RIGHT,
    SOURCE,
    Array,
    K,
    Pieces,
    Q,
    block_table,
    cut,
    expand,
    grid,
    increasing,
    is_order,
    join_full,
    keys_of,
    own_causal,
    pieces_of,
    squares,
    unions,
)
from cp_mesh.layouts import Layout
from cp_mesh.masks import NONE, Documents, Mask, parse_mask
from cp_mesh.owned import Content

MAX_BANDS = 8
"""Bands of one rank at most, each of which takes calls of its own; documents of other masks are tiles of pairs."""
MANY_KEYS = 1 << 30
CHUNK = 1 << 17  # pairs of pieces that are looked at together: their booleans stay in the cache
FEW = 1 << 12  # blocks that are made as fast as it is found out which of them are alike


class Facts(NamedTuple):
    """What all ranks must know alike.

    Attributes:
        needed: int64 [receiver, source], how many of the source's rows the receiver fetches; 0 on the diagonal.
        active_steps: steps >= 1 in which some rank fetches rows.
        overlapping: whether, on any rank, two kernel calls of a stage give gradients of the same row.
        covers: kinds of tile that occur on any rank, see `Schedule`.
        min_keys: fewest keys of any kernel call on any rank, before neighbouring full tiles are joined.
    """

    needed: Array
    active_steps: tuple[int, ...]
    overlapping: bool
    covers: frozenset[str]
    min_keys: int


class Geometry(Protocol):
    """Tables of blocks are by batch row: one if all rows share it."""

    shard_lens: tuple[int, ...]
    facts: Facts

    def of_receiver(self, rank: int) -> tuple[Array, ...]:
        """Blocks of a rank's queries, full ones joined along its rows."""

    def of_source(self, rank: int) -> Array:
        """Blocks that name a rank's keys, of all batch rows and other ranks; of use for their keys alone."""


def geometry(layout: Layout, mask: Mask, seq_len: int, cp_size: int, documents: bool) -> Geometry:
    """The geometry, kept for later calls of the same arguments.

    Args:
        layout: positions of every rank.
        mask: its tensors, if any, hold all ``seq_len`` tokens.
        seq_len, cp_size: length of the whole sequence in tokens, and number of ranks.
        documents: blocks by documents, where these are runs of positions and their bands are few.
    """
    ids, padding = (None if x is None else Content.of(x) for x in (mask.documents, mask.key_padding))
    return _geometry(layout, mask.spec(), ids, padding, seq_len, cp_size, documents)


@lru_cache(maxsize=32)
def _geometry(
    layout: Layout,
    mask_spec: str,
    ids: Content | None,
    padding: Content | None,
    seq_len: int,
    cp_size: int,
    documents: bool,
) -> Geometry:
    mask = parse_mask(mask_spec, *(None if x is None else x.tensor for x in (ids, padding)))
    pieces = pieces_of(layout, seq_len, cp_size)
    if documents and ids is not None and padding is None and pieces.regular.all():
        of_documents = _OfDocuments.made(pieces, mask, seq_len, cp_size)
        if of_documents is not None:
            return of_documents
    return _OfPieces(layout, pieces, mask, seq_len, cp_size)


def _shard_lens(pieces: Pieces, cp_size: int) -> tuple[int, ...]:
    return tuple(np.bincount(pieces.rank, pieces.length, cp_size).astype(int).tolist())


class _OfPieces:
    """Blocks between whole runs of a layout, cut where the mask's distances change."""

    def __init__(self, layout: Layout, pieces: Pieces, mask: Mask, seq_len: int, cp_size: int) -> None:
        self.shard_lens = _shard_lens(pieces, cp_size)
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
        labels = np.r_[labels, 0]  # so that an end may be named
        return np.stack([bound.reduceat(labels, edges)[::2] for bound in (np.minimum, np.maximum)])

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
        found = _Found(np.zeros((size, size), dtype=np.int64))
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

    def _look_at(self, found: _Found, ranks: Array, rows: Array, by_rank: Groups, by_source: Groups) -> None:
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
        if (keys := whole.any(0)).any():
            found.covers.add("pairs" if self._opaque else "full")
            found.min_keys = min(found.min_keys, int(k.length[keys].min()))
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
        in_whole = whole[np.searchsorted(ranks, blocks[:, RECEIVER]), piece]
        found.overlapping |= bool(in_whole.any()) or _shares_keys(blocks, size)
        blocks = blocks[~in_whole]
        owner, begins, ends = unions(blocks[:, RECEIVER] * size + blocks[:, SOURCE], blocks[:, K], blocks[:, K_END])
        np.add.at(found.needed.reshape(-1), owner, ends - begins)

    def _counts_of_keys(self, found: _Found, i: Array, j: Array) -> Array:
        """How many keys each block of q[i] and k[j] names: those alike in lengths and offset are looked at once."""
        q, k, alike, num = self._q, self._k, np.arange(len(i)), len(i)
        if len(i) > FEW and q.regular.all() and k.regular.all():
            (q_kind, q_kinds), (k_kind, k_kinds) = self._like
            offset = q.low[i] - k.low[j]
            lowest = int(offset.min())
            range_of = (int(offset.max()) - lowest + 1) * q_kinds * k_kinds
            if range_of <= 2 * len(i):
                alike, num = ((offset - lowest) * q_kinds + q_kind[i]) * k_kinds + k_kind[j], range_of
        chosen = np.full(num, -1)
        chosen[alike] = np.arange(len(i))
        chosen = chosen[chosen >= 0]
        q, k, here = q.at(i[chosen]), k.at(j[chosen]), np.arange(len(chosen))
        # a rank of its own for each pair, so that its block tells which it is
        blocks = found.add(block_table(q._replace(rank=here), here, k, here, opaque=False))
        found.overlapping |= _cut_in_two(blocks)
        keys = np.zeros(num, dtype=np.int64)
        keys[alike[chosen[blocks[:, RECEIVER]]]] = blocks[:, K_END] - blocks[:, K]
        return keys[alike]

    @cached_property
    def _like(self) -> tuple[tuple[Array, int], tuple[Array, int]]:
        """A number for all that matters of a piece but its position, and how many there are: of queries and of keys."""
        kinds = []
        for x in (self._q, self._k):
            columns = np.stack([x.length, x.stride, x.nearest, x.farthest, x.whole])
            of_each, which = np.unique(columns, axis=1, return_inverse=True)
            kinds.append((which.reshape(-1), of_each.shape[1]))
        return kinds[0], kinds[1]


@dataclass
class _Found:
    """`Facts`, as far as they are known."""

    needed: Array
    overlapping: bool = False
    covers: set[str] = field(default_factory=set)
    min_keys: int = MANY_KEYS

    def add(self, blocks: Array) -> Array:
        """Take in what kernel calls of these blocks are like."""
        self.covers |= _kinds(blocks)
        self.min_keys = min(self.min_keys, _fewest_keys(blocks))
        return blocks

    def facts(self) -> Facts:
        return Facts(self.needed, active_steps(self.needed), self.overlapping, frozenset(self.covers), self.min_keys)


class Groups(NamedTuple):
    """Rows that belong together, which follow one another: where each group begins, how many they are, and of whom."""

    first: Array
    num: Array
    group: Array

    @classmethod
    def of(cls, owner: Array) -> Groups:
        """From the owner of each row."""
        first = np.flatnonzero(np.r_[True, owner[1:] != owner[:-1]])
        num = np.diff(np.r_[first, len(owner)])
        return cls(first, num, np.repeat(np.arange(len(first)), num))

    def count_true(self, x: NDArray[np.bool_]) -> NDArray[Any]:
        """How many rows of each group are true: [groups, ...] of x [rows, ...]."""
        longest = int(self.num.max())
        if longest == 1:
            return x.view(np.uint8)
        total: NDArray[Any] = x[self.first].astype(np.uint8 if longest < 256 else np.int64)
        for place in range(1, longest):  # faster than `reduceat`
            more = np.flatnonzero(self.num > place)
            if len(more) == len(total):
                total += x[self.first + place]
            else:
                total[more] += x[self.first[more] + place]
        return total

    def spread(self, x: NDArray[np.bool_]) -> NDArray[np.bool_]:
        """[rows, ...] from what is said of groups, [groups, ...]."""
        return x if len(self.first) == len(self.group) else x[self.group]

    def sum_columns(self, x: Array) -> Array:
        """[n, groups] of x [n, rows]."""
        total = np.cumsum(x, axis=1)[:, self.first + self.num - 1]
        total[:, 1:] -= total[:, :-1].copy()
        return total


def _indices(x: NDArray[np.bool_]) -> tuple[Array, Array]:
    """As ``x.nonzero()`` of two dims, several times as fast."""
    i, j = np.divmod(np.flatnonzero(x), max(1, x.shape[1]))
    return i, j


def active_steps(needed: Array) -> tuple[int, ...]:
    """Steps in which some rank fetches rows. Whoever needs a rank's keys in step i is i ranks ahead."""
    size = len(needed)
    twice = np.tile(needed > 0, 2)
    by_step = as_strided(twice[:, size:], (size, size), (twice.strides[0] + 1, -1))  # [receiver, step]
    return tuple(np.flatnonzero(by_step.any(0)).tolist())


class _OfDocuments:
    """Blocks of packed documents: pieces of one document, by batch row, meet within it."""

    facts: Facts

    def __init__(self, pieces: Pieces, mask: Mask, seq_len: int, cp_size: int) -> None:
        self.shard_lens, self._cp_size, self._causal = _shard_lens(pieces, cp_size), cp_size, mask.causal
        self._rising = increasing(pieces, cp_size) & is_order(mask)
        self._rows = []
        for documents in mask.runs():
            q, part = cut(pieces, documents.edges)
            q = q._replace(document=part).at(part.argsort(kind="stable"))
            self._rows.append((q, keys_of(q, mask, seq_len)))

    @classmethod
    def made(cls, pieces: Pieces, mask: Mask, seq_len: int, cp_size: int) -> _OfDocuments | None:
        """None if an id comes back, if blocks are no bands, or bands too many."""
        if any(documents.come_back for documents in mask.runs()):
            return None
        made = cls(pieces, mask, seq_len, cp_size)
        facts = made._survey()
        if facts is None:
            return None
        made.facts = facts
        return made

    def of_receiver(self, rank: int) -> tuple[Array, ...]:
        return tuple(self._blocks(q, k, np.flatnonzero(q.rank == rank)) for q, k in self._rows)

    def of_source(self, rank: int) -> Array:
        tables = []
        for q, k in self._rows:
            k = k.at(k.rank == rank)
            i, j = _same_document(q.document, k.document)
            tables.append(block_table(q, i, k, j, opaque=False, keep_own=True))
        table = np.concatenate(tables)
        return table[table[:, RECEIVER] != rank]

    def _blocks(self, q: Pieces, k: Pieces, i: Array) -> Array:
        """Of the queries ``i``, sorted by document, against all keys of their documents."""
        q = q.at(i)
        i, j = _same_document(q.document, k.document)
        others = (q.rank[i] != k.rank[j]) | ~self._rising[q.rank[i]]
        blocks = block_table(q, i[others], k, j[others], opaque=False, keep_own=True)
        blocks = np.concatenate([own_causal(q.at(self._rising[q.rank])), squares(blocks) if self._causal else blocks])
        return join_full(blocks, (RECEIVER, SOURCE, K, K_END), Q, Q_END)

    def _survey(self) -> Facts | None:
        """Look at the documents of all ranks, some at a time; None if some blocks are no bands, or bands too many."""
        size, overlapping, windows = self._cp_size, False, False
        bands, rows = np.empty((0, 2), dtype=np.int64), []  # receiver, and both bounds in one number
        for q, k in self._rows:
            of_row = []
            num_keys = np.searchsorted(k.document, q.document, "right") - np.searchsorted(k.document, q.document)
            of_one = Groups.of(q.document * size + q.rank) if q.num else None  # what one rank holds of a document
            chunk = np.cumsum(num_keys) // CHUNK
            chunk = chunk if of_one is None else chunk[of_one.first][of_one.group]
            for number in range(int(chunk.max(initial=0)) + 1):
                blocks = self._blocks(q, k, np.flatnonzero(chunk == number))
                if (blocks[:, LEFT] == PAIRS).any():
                    return None
                bands = np.concatenate([bands, _bands(blocks)])
                bands = np.unique(bands, axis=0)
                if len(bands) and np.bincount(bands[:, 0]).max() > MAX_BANDS:
                    return None
                left, right = blocks[:, LEFT], blocks[:, RIGHT]
                windows |= bool(((left < NONE) | ((right != 0) & (right < NONE))).any())
                away = blocks[blocks[:, RECEIVER] != blocks[:, SOURCE]]
                overlapping |= _shares_keys(away, size)
                owner = away[:, RECEIVER] * size + away[:, SOURCE]
                of_row.append(np.stack(unions(owner, away[:, K], away[:, K_END])))
            rows.append(np.concatenate(of_row, axis=1))
        owner, begin, end = np.concatenate(rows, axis=1)
        owner, begin, end = unions(owner, begin, end) if len(rows) > 1 else (owner, begin, end)
        needed = np.bincount(owner, end - begin, size * size).astype(np.int64).reshape(size, size)
        covers = frozenset(["segments", *(["window"] if windows else [])])
        return Facts(needed, active_steps(needed), overlapping, covers, 1)


def _same_document(q: Array, k: Array) -> tuple[Array, Array]:
    """Indices of all pairs of pieces of one document, from the documents of q and of k, sorted."""
    first = np.searchsorted(k, q)
    i, place = expand(np.searchsorted(k, q, side="right") - first)
    return i, first[i] + place


def _bands(blocks: Array) -> Array:
    """The bands of each receiver, once: [n, 2], receiver, and both bounds in one number."""
    bands, which = np.unique(blocks[:, LEFT] * (4 * NONE) + blocks[:, RIGHT], return_inverse=True)
    number = np.flatnonzero(np.bincount(blocks[:, RECEIVER] * len(bands) + which.reshape(-1)))
    return np.stack([number // max(1, len(bands)), bands[number % max(1, len(bands))]], 1)


def _kinds(blocks: Array) -> set[str]:
    left, right = blocks[:, LEFT], blocks[:, RIGHT]
    pairs, above = left == PAIRS, (left < NONE) & (left != PAIRS)
    kinds = {"pairs": pairs, "window": above, "full": (left == NONE) & (right == NONE)}
    kinds["causal"] = (left == NONE) & (right < NONE)
    return {kind for kind, found in kinds.items() if found.any()}


def _fewest_keys(blocks: Array) -> int:
    """Of the calls of these blocks, see `schedule.split_causal`."""
    if not len(blocks):
        return MANY_KEYS
    keys = blocks[:, K_END] - blocks[:, K]
    causal = (blocks[:, LEFT] == NONE) & (blocks[:, RIGHT] < NONE)
    square = blocks[:, Q_END] - blocks[:, Q] - blocks[:, RIGHT]
    before = np.where(causal & (keys > square), keys - square, MANY_KEYS)
    return int(min(np.where(causal, square, keys).min(), before.min()))


def _shares_keys(blocks: Array, cp_size: int) -> bool:
    """Whether two calls of one receiver have keys of a source in common."""
    owner = (blocks[:, RECEIVER] * cp_size + blocks[:, SOURCE]) * NONE
    order = (owner + blocks[:, K]).argsort(kind="stable")
    begins, ends = (owner + blocks[:, K])[order], (owner + blocks[:, K_END])[order]
    return _cut_in_two(blocks) or bool((ends[:-1] > begins[1:]).any())


def _cut_in_two(blocks: Array) -> bool:
    """Whether some block is a square and, with the same keys, rows after it: see `schedule.split_causal`."""
    return bool(((blocks[:, LEFT] == NONE) & (blocks[:, RIGHT] > 0) & (blocks[:, RIGHT] < NONE)).any())
