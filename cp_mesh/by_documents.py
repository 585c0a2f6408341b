"""Blocks of packed documents that are runs of positions: pieces of one document meet within it alone."""

from __future__ import annotations

import numpy as np

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
from cp_mesh.facts import Facts, Groups, active_steps
from cp_mesh.masks import NONE, Mask

CHUNK = 1 << 17  # pairs of pieces that are looked at together

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
            q = q._replace(document=part).at(part.argsort(kind="stable"))
            self._rows.append((q, keys_of(q, mask, seq_len)))

    @classmethod
    def made(cls, pieces: Pieces, mask: Mask, seq_len: int, cp_size: int) -> ByDocuments | None:
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
                overlapping |= shares_keys(away, size)
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
