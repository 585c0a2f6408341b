"""Blocks of packed documents that are runs of positions: pieces of one document meet within it alone."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from cp_mesh.geometry.block_table import (
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
    bands_of,
    block_table,
    cut,
    cut_in_two,
    increasing,
    is_order,
    join_full,
    keys_of,
    own_causal,
    shard_lens_of,
    shares_keys,
    squares,
    unions,
)
from cp_mesh.geometry.global_plan import Facts, Groups, alike, blocks_of_alike
from cp_mesh.geometry.mask import NONE, Mask

CHUNK = 1 << 17  # pairs of pieces that are looked at together
FEW = 1 << 12  # pairs of pieces of a document that are looked at one by one
MAX_BANDS = 8
"""Bands of one rank at most, each of which takes calls of its own; documents of other masks are tiles of pairs."""


class ByDocuments:
    """Blocks of packed documents: pieces of one document, by batch row, meet within it."""

    facts: Facts

    def __init__(self, pieces: Pieces, mask: Mask, seq_len: int, cp_size: int) -> None:
        self.shard_lens, self._cp_size, self._causal = shard_lens_of(pieces, cp_size), cp_size, mask.causal
        self._rising = increasing(pieces, cp_size) & is_order(mask)
        self._rows = []
        for documents in mask.runs():
            q, part = cut(pieces, documents.edges)
            order = part.argsort(kind="stable")
            q = q._replace(document=part).at(order[documents.labels[part[order]] >= 0])
            self._rows.append((q, keys_of(q, mask, seq_len)))

    @classmethod
    def made(cls, pieces: Pieces, mask: Mask, seq_len: int, cp_size: int) -> ByDocuments | None:
        """None if an id comes back, if blocks are no bands, or bands too many."""
        if any(documents.come_back for documents in mask.runs()):
            return None
        made = cls(pieces, mask, seq_len, cp_size)
        facts = made._survey(FEW) or made._survey(np.inf)
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
            i, j = _same(q.document, k.document)
            tables.append(block_table(q, i, k, j, opaque=False, keep_own=True))
        table = np.concatenate(tables)
        return table[table[:, RECEIVER] != rank]

    def _blocks(self, q: Pieces, k: Pieces, i: Array, own: bool = False) -> Array:
        """Of the queries ``i``, sorted by document and rank, against all keys of their documents, or their rank's."""
        q = q.at(i)
        i, j = _same(_owners(q, self._cp_size), _owners(k, self._cp_size)) if own else _same(q.document, k.document)
        others = (q.rank[i] != k.rank[j]) | ~self._rising[q.rank[i]]
        blocks = block_table(q, i[others], k, j[others], opaque=False, keep_own=True)
        blocks = np.concatenate([own_causal(q.at(self._rising[q.rank])), self._cut(blocks)])
        return join_full(blocks, (RECEIVER, SOURCE, K, K_END), Q, Q_END)

    def _cut(self, blocks: Array) -> Array:
        return squares(blocks) if self._causal else blocks

    def _survey(self, few: float) -> Facts | None:
        """Look at the documents of all ranks, some at a time; None if some blocks are no bands, or bands too many.

        Args:
            few: pairs of pieces of a document above which alike ones are looked at once. All receivers then count as
                having all bands of these, so only without such documents a None is sure.
        """
        size, found, ranges = self._cp_size, _DocumentFacts(self._cp_size), []
        for q, k in self._rows:
            large, of_row = self._large(q, k, few), [np.empty((3, 0), dtype=np.int64)]
            for i in self._chunks(q, k, np.flatnonzero(~large)):
                if not found.add(blocks := self._blocks(q, k, i)):
                    return None
                away = blocks[blocks[:, RECEIVER] != blocks[:, SOURCE]]
                found.overlapping |= shares_keys(away, size)
                owner = away[:, RECEIVER] * size + away[:, SOURCE]
                of_row.append(np.stack(unions(owner, away[:, K], away[:, K_END])))
            ranges.append(np.concatenate(of_row, axis=1))
            if large.any() and not self._add_alike(found, q, k, np.flatnonzero(large)):
                return None
        owner, begin, end = np.concatenate(ranges, axis=1)
        owner, begin, end = unions(owner, begin, end) if len(ranges) > 1 else (owner, begin, end)
        np.add.at(found.needed, owner, end - begin)
        return found.facts()

    def _large(self, q: Pieces, k: Pieces, few: float) -> NDArray[np.bool_]:
        """Pieces of queries in documents of many pairs, of which every rank has one piece: no two share keys."""
        if len(self._rows) > 1 or not q.num or q.copied.any():  # batch rows share what travels, and copies do not
            return np.zeros(q.num, dtype=bool)
        of_one, of_document = Groups.of(_owners(q, self._cp_size)), Groups.of(q.document)
        alone = np.maximum.reduceat(of_one.num[of_one.group], of_document.first) == 1
        return (alone & (of_document.num * _num_keys(q, k)[of_document.first] > few))[of_document.group]

    def _add_alike(self, found: _DocumentFacts, q: Pieces, k: Pieces, large: Array) -> bool:
        """Look at documents of which every rank has one piece, alike pairs once; False as in `_DocumentFacts`."""
        size, receivers = self._cp_size, np.unique(q.rank[large])
        if not found.add(self._blocks(q, k, large, own=True)):
            return False
        for chunk in self._chunks(q, k, large):
            x = q.at(chunk)
            y = k.at(slice(*np.searchsorted(k.document, [x.document[0], x.document[-1] + 1])))
            (begin, end), (own, after) = _places(x.document, y.document), _places(_owners(x, size), _owners(y, size))
            i, j = np.concatenate([_pairs(begin, own), _pairs(after, end)], axis=1)
            of_q, of_k = alike(x, y)
            blocks, keys = blocks_of_alike(x, i, y, j, of_q[i] + of_k[j])
            found.overlapping |= cut_in_two(blocks)
            np.add.at(found.needed, x.rank[i] * size + y.rank[j], keys)
            if not found.add(self._cut(blocks), receivers):
                return False
        return True

    def _chunks(self, q: Pieces, k: Pieces, i: Array) -> list[Array]:
        """Queries ``i`` in parts of about as many pairs; what one rank holds of a document is not parted."""
        if not len(i):
            return []
        q = q.at(i)
        first = Groups.of(_owners(q, self._cp_size)).first
        chunk = (np.cumsum(_num_keys(q, k)) // CHUNK)[first]
        return np.split(i, first[1:][chunk[1:] != chunk[:-1]])


class _DocumentFacts:
    """`Facts`, as far as they are known: ``needed`` is [receiver * cp_size + source]."""

    def __init__(self, cp_size: int) -> None:
        self._cp_size, self.needed = cp_size, np.zeros(cp_size * cp_size, dtype=np.int64)
        self.overlapping = self._windows = False
        self._bands = np.empty((0, 2), dtype=np.int64)  # receiver, and both bounds in one number

    def add(self, blocks: Array, receivers: Array | None = None) -> bool:
        """Their bands, for each of ``receivers`` if given; False if some are none, or one receiver's too many."""
        left, right = blocks[:, LEFT], blocks[:, RIGHT]
        self._windows |= bool(((left < NONE) | ((right != 0) & (right < NONE))).any())
        bands, which = np.unique(bands_of(blocks), return_inverse=True)
        if receivers is None:
            number = np.flatnonzero(np.bincount(blocks[:, RECEIVER] * len(bands) + which.reshape(-1)))
            more = np.stack([number // max(1, len(bands)), bands[number % max(1, len(bands))]], 1)
        else:
            more = np.stack([np.repeat(receivers, len(bands)), np.tile(bands, len(receivers))], 1)
        self._bands = np.unique(np.concatenate([self._bands, more]), axis=0)
        return not (left == PAIRS).any() and np.bincount(self._bands[:, 0]).max(initial=0) <= MAX_BANDS

    def facts(self) -> Facts:
        needed = self.needed.reshape(self._cp_size, self._cp_size)
        covers = frozenset(["segments", *(["window"] if self._windows else [])])
        return Facts(needed, self.overlapping, covers, 1)


def _owners(pieces: Pieces, cp_size: int) -> Array:
    """A number for what one rank holds of a document; it rises."""
    return pieces.document * cp_size + pieces.rank


def _num_keys(q: Pieces, k: Pieces) -> Array:
    """Pieces of keys that each piece of queries is paired with."""
    begin, end = _places(q.document, k.document)
    return end - begin


def _places(q: Array, k: Array) -> tuple[Array, Array]:
    """Where in k, which rises, each number of q begins and ends."""
    return np.searchsorted(k, q), np.searchsorted(k, q, side="right")


def _pairs(begin: Array, end: Array) -> Array:
    """All i and j with begin[i] <= j < end[i]: [2, n]."""
    num = end - begin
    i = np.repeat(np.arange(len(num)), num)
    return np.stack([i, np.arange(len(i)) + np.repeat(begin - np.cumsum(num) + num, num)])


def _same(q: Array, k: Array) -> Array:
    """All pairs of equal numbers in q and in k, which rises."""
    return _pairs(*_places(q, k))
