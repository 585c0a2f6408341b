"""Survey: what one rank's queries see, what others see of its keys, and figures that all ranks need alike.

A rank computes the blocks of its own queries, and sends the keys in the blocks of other ranks. It also needs some
figures of all ranks: how many rows travel between every two ranks, which kinds of tile occur. Pieces of queries are
paired with pieces of keys: runs of the layout, cut where the mask's distances change. Packed documents cut them too,
if documents are runs of positions with few bands; pieces are then paired within each document alone.

One walk computes all blocks of all ranks, some thousand pairs of pieces at a time, and keeps those of one rank.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cached_property, partial
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from cp_mesh.geometry.block_table import (
    K_END,
    PAIRS,
    Q_END,
    RECEIVER,
    SOURCE,
    Array,
    K,
    Q,
    ShardPieces,
    bands_of,
    block_table,
    ceil_div,
    cut,
    expand,
    increasing,
    is_order,
    join_full,
    keys_of,
    of_band,
    own_causal,
    pieces_of,
    run_begins,
    shares_keys,
    squares,
    unions,
)
from cp_mesh.geometry.layout import Layout
from cp_mesh.geometry.mask import NONE, Documents, Mask

Seen = NDArray[np.bool_]
SAME_KEYS = RECEIVER, SOURCE, K, K_END
CHUNK = 1 << 15  # pairs of pieces that are computed together: their blocks fit in the processor's cache
MAX_BANDS = 8
"""Most bands of one rank, since each band takes its own calls; with more bands, documents become tiles of pairs."""
MAX_PAIRS = 1 << 20
"""Most pairs of pieces that are planned as sequences of documents, about 300 ms per batch. Striped layouts cut every
document on every rank; with many ranks and documents their tiles are pairs, unless whole runs have half as many."""


class Survey(NamedTuple):
    """What one rank computes and sends, and figures that are the same on every rank.

    Attributes:
        shard_lens: rows held by each rank.
        blocks: the blocks of this rank's queries, one table per batch row, or one table if all batch rows share it.
        asked: the keys of this rank that others see, for all batch rows: receiver, begin and end of `unions`.
        needed: int64 [receiver, source], how many of the source's rows the receiver fetches; 0 on the diagonal.
        overlapping: whether, on any rank, two kernel calls of a stage compute gradients of the same row.
        covers: kinds of tile that occur on any rank, see `Schedule`.
    """

    shard_lens: tuple[int, ...]
    blocks: tuple[Array, ...]
    asked: tuple[Array, Array, Array]
    needed: Array
    overlapping: bool
    covers: frozenset[str]


def survey(
    layout: Layout, mask: Mask, seq_len: int, cp_size: int, cp_rank: int, documents: bool, sources: Seen | None = None
) -> Survey:
    """Return the survey of one rank.

    Args:
        layout: positions of every rank.
        mask: its tensors, if any, hold all ``seq_len`` tokens.
        seq_len, cp_size: length of the whole sequence in tokens, and number of ranks.
        cp_rank: the rank.
        documents: make blocks by documents, if documents are runs of positions with few bands.
        sources: bool [receiver, source], a further limit on which sources a receiver sees; None: all. `Survey.covers`
            then lists kinds that may occur.
    """
    documents = documents and mask.documents is not None and mask.key_padding is None and mask.blocks is None
    ranks, walks = np.arange(cp_size) == cp_rank, _WALKS.get()
    if walks is None:
        walk = _walk(layout, mask, seq_len, documents, ranks)
    else:
        key = layout, mask, seq_len, cp_size, documents
        if key not in walks:
            walks[key] = _walk(layout, mask, seq_len, documents, np.ones_like(ranks))
        walk = walks[key]
    asked, tables = [], []
    for q, own, blocks in walk.rows:
        receiver, source = blocks[:, RECEIVER], blocks[:, SOURCE]
        asked.append(blocks[(source == cp_rank) & (receiver != cp_rank)])
        mine = walk.squared(_by_pieces(blocks[receiver == cp_rank], q.at(q.rank == cp_rank)))
        mine = np.concatenate([own[own[:, RECEIVER] == cp_rank], mine])
        tables.append(join_full(mine, SAME_KEYS, Q, Q_END))
    others, needed = np.concatenate(asked), walk.needed
    if sources is not None:
        others, *tables = (x[sources[x[:, RECEIVER], x[:, SOURCE]]] for x in (others, *tables))
        needed = np.where(sources, needed, 0)
    ranges = unions(others[:, RECEIVER], others[:, K], others[:, K_END])
    return Survey(walk.shard_lens, tuple(tables), ranges, needed, walk.overlapping, walk.covers)


_WALKS: ContextVar[dict[Any, Walk] | None] = ContextVar("cp_mesh_walks", default=None)


@contextmanager
def of_many_ranks() -> Iterator[None]:
    """Around surveys of many ranks: the first one of a layout and mask keeps the blocks of all ranks."""
    token = _WALKS.set({})
    try:
        yield
    finally:
        _WALKS.reset(token)


def _walk(layout: Layout, mask: Mask, seq_len: int, documents: bool, ranks: Seen) -> Walk:
    """Walk over all blocks and keep those of some ranks, bool [cp_size]."""
    pieces = pieces_of(layout, seq_len, len(ranks))
    by_documents = documents and pieces.regular.all() and not any(runs.come_back for runs in mask.runs())
    if by_documents and (walk := Walk(layout, pieces, mask, seq_len, ranks, True)).is_whole:
        return walk
    return Walk(layout, pieces, mask, seq_len, ranks, False)


class Walk:
    """All blocks of all ranks, computed some at a time: those of some ranks are kept, of all the figures.

    Attributes:
        shard_lens, overlapping: as in `Survey`.
        is_whole: False if documents have too many pairs of pieces or bands, or blocks that are not bands.
        rows: for each batch row, or for all, the pieces of queries, the blocks of `own_causal`, and the other blocks
            that are kept.
    """

    def __init__(
        self, layout: Layout, pieces: ShardPieces, mask: Mask, seq_len: int, ranks: Seen, by_documents: bool
    ) -> None:
        self._size, self._by_documents, self._causal = len(ranks), by_documents, mask.causal
        shard_lens = np.bincount(pieces.rank, pieces.length, self._size).astype(int)
        self.shard_lens, self.overlapping = tuple(shard_lens.tolist()), False
        self.rows: list[tuple[ShardPieces, Array, Array]] = []
        self._kinds, self._bands = set[str](), set[tuple[int, int]]()  # receiver, and both bounds in one number
        self._ranges: list[tuple[Array, Array, Array]] = []
        opaque = mask.elementwise and not by_documents
        rising = increasing(pieces, self._size) & (is_order(mask, seq_len) and not opaque)
        parts = [_in_documents(pieces, documents) for documents in mask.runs()] if by_documents else [pieces]
        rows = [(q, keys_of(q, mask, seq_len)) for q in parts]
        if mask.documents is not None and not by_documents:
            simple = pieces.regular.all() and (pieces.stride == 1).all()
            order = None if simple else layout.permutation(seq_len, self._size).numpy()
            label = partial(_labelled, mask=mask, shard_lens=self.shard_lens, order=order)
            rows = [(label(q), label(k)) for q, k in rows]
        grouped = [_groups(q, k, self._size) for q, k in rows]
        if by_documents and sum(int(num @ num_k) for _, num, _, num_k in grouped) > max(MAX_PAIRS, 2 * pieces.num**2):
            self.is_whole = False
            return
        for (q, k), groups in zip(rows, grouped, strict=True):
            own, kept = own_causal(q.at(rising[q.rank])), []
            more = own
            for i, j in _pairs(q, k, groups, rising):
                blocks = block_table(q, i, k, j, opaque, keep_own=by_documents)
                kept.append(blocks[ranks[blocks[:, RECEIVER]] | ranks[blocks[:, SOURCE]]])
                self._note(np.concatenate([more, self.squared(blocks)]))
                more = more[:0]
            self.rows.append((q, own, np.concatenate(kept)))
        most = max(Counter(receiver for receiver, _ in self._bands).values(), default=0)
        self.is_whole = most <= MAX_BANDS and not (by_documents and "pairs" in self._kinds)

    def squared(self, blocks: Array) -> Array:
        """Return blocks as they are computed: of causal documents as squares."""
        return squares(blocks) if self._by_documents and self._causal else blocks

    def _note(self, blocks: Array) -> None:
        """Note figures of blocks; all of a receiver with the same keys are noted together, in order of their rows."""
        size, bands = self._size, bands_of(blocks)
        known = np.unique(bands)
        self._kinds.update(self._kind(*of_band(band)) for band in known.tolist())
        if self._by_documents:
            which = known.searchsorted(bands)
            receiver, which = divmod(np.unique(blocks[:, RECEIVER] * len(known) + which), len(known) or 1)
            self._bands.update(zip(receiver.tolist(), known[which].tolist(), strict=True))
        away = blocks[blocks[:, RECEIVER] != blocks[:, SOURCE]]
        if not self.overlapping and shares_keys(away, size):
            self.overlapping = shares_keys(join_full(away, SAME_KEYS, Q, Q_END, in_order=True), size)
        self._ranges.append(unions(away[:, RECEIVER] * size + away[:, SOURCE], away[:, K], away[:, K_END]))

    def _kind(self, left: int, right: int) -> str:
        if left != NONE:
            return "pairs" if left == PAIRS else "window"
        if right == NONE:
            return "full"
        return "causal" if right == 0 or not self._by_documents else "window"

    @property
    def covers(self) -> frozenset[str]:
        """As in `Survey`."""
        return frozenset({"segments"} | self._kinds & {"window"} if self._by_documents else self._kinds)

    @cached_property
    def needed(self) -> Array:
        """As in `Survey`."""
        owner, begin, end = unions(*map(np.concatenate, zip(*self._ranges, strict=True)))
        counts = np.bincount(owner, end - begin, self._size**2)
        return counts.astype(np.int64).reshape(self._size, self._size)


def _groups(q: ShardPieces, k: ShardPieces, cp_size: int) -> tuple[Array, Array, Array, Array]:
    """Group pieces of q, sorted by document and rank, by these two, with all pieces of k of the document.

    Returns:
        For each group its first piece of q, the number of pieces, where its pieces of k begin, and their number.
    """
    owner = q.document * cp_size + q.rank
    first = run_begins(owner[1:] != owner[:-1])[: q.num]
    begin, end = (k.document.searchsorted(q.document[first], side) for side in ("left", "right"))
    return first, np.append(first, q.num)[1:] - first, begin, end - begin


def _pairs(
    q: ShardPieces, k: ShardPieces, groups: tuple[Array, Array, Array, Array], rising: NDArray[np.bool_]
) -> Iterator[tuple[Array, Array]]:
    """Yield pairs of pieces that may see each other, except those of `own_causal`: indices in q and in k, in chunks.

    They are in order of `_groups`, then of k. The pairs of a group with one piece of k, a slot, are in one chunk.
    """
    first, num, begin, num_k = groups
    slots, pairs = num_k.cumsum(), (num * num_k).cumsum()
    cuts = np.arange(CHUNK, pairs.max(initial=0), CHUNK)
    group = pairs.searchsorted(cuts, "right")
    inner = slots[group] - ceil_div(pairs[group] - cuts, num[group])
    for some in pairwise([*dict.fromkeys([0, *inner.tolist()]), slots.max(initial=0)]):
        slot = np.arange(*some)
        group = slots.searchsorted(slot, "right")
        which, place = expand(num[group])
        i, j = first[group][which] + place, (begin[group] + num_k[group] - slots[group] + slot)[which]
        meet = (q.rank[i] != k.rank[j]) | ~rising[q.rank[i]]
        if k.labels.size:
            (q_low, q_high), (k_low, k_high) = (x.labels.T[..., of] for x, of in ((q, i), (k, j)))
            meet &= ((q_low <= k_high) & (k_low <= q_high)).any(0)
        yield i[meet], j[meet]


def _by_pieces(blocks: Array, q: ShardPieces) -> Array:
    """Sort blocks by the piece of q that holds their rows; those of a piece stay in order."""
    rows = q.rank * NONE + q.row
    order = rows.argsort()
    piece = order[rows.searchsorted(blocks[:, RECEIVER] * NONE + blocks[:, Q], "right", order) - 1]
    return blocks[piece.argsort(kind="stable")]


def active_steps(needed: Array) -> tuple[int, ...]:
    """Return the steps >= 1 in which some rank fetches rows. In step i the receiver is i ranks ahead of the source."""
    receiver, source = np.nonzero(needed)
    return tuple(np.flatnonzero(np.bincount((receiver - source) % len(needed))).tolist())


def say_sources(sources: Seen) -> str:
    """Encode bool [receiver, source] as a string, which `parse_sources` decodes."""
    return np.packbits(sources).tobytes().hex()


def parse_sources(spec: str, cp_size: int) -> Seen | None:
    """Decode the string of `say_sources`; None for the empty string."""
    bits = np.unpackbits(np.frombuffer(bytes.fromhex(spec), dtype=np.uint8), count=cp_size**2 if spec else 0)
    return bits.reshape(cp_size, cp_size).astype(np.bool_) if spec else None


def _in_documents(pieces: ShardPieces, documents: Documents) -> ShardPieces:
    """Cut pieces where documents begin, sort them by document, and drop excluded tokens."""
    q, part = cut(pieces, documents.edges)
    order = part.argsort(kind="stable")
    return q._replace(document=part).at(order[documents.labels[part[order]] >= 0])


def _labelled(pieces: ShardPieces, mask: Mask, shard_lens: tuple[int, ...], order: Array | None) -> ShardPieces:
    """Return the pieces with `ShardPieces.labels`.

    Args:
        order: the positions of rank after rank; None: every piece is a run of stride 1.
    """
    if not pieces.num:
        return pieces
    lens, bounds = np.array(shard_lens), []
    for documents in mask.runs():
        labels = documents.labels
        if order is None:
            first = np.searchsorted(documents.edges, pieces.low, side="right") - 1
            last = np.searchsorted(documents.edges, pieces.high, side="right")
        else:
            labels = np.repeat(labels, np.diff(documents.edges))[order]
            first = (np.cumsum(lens) - lens)[pieces.rank] + pieces.row
            last = first + pieces.length
        edges = np.stack([first, last], 1).reshape(-1)
        low = np.where(labels < 0, NONE, labels)  # excluded tokens do not count
        ends = (np.minimum, np.r_[low, 0]), (np.maximum, np.r_[labels, 0])  # one more entry: an end is a valid index
        bounds.append([bound.reduceat(x, edges)[::2] for bound, x in ends])
    return pieces._replace(labels=np.array(bounds).transpose(2, 0, 1))
