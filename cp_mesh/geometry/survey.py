"""Survey: the blocks of a layout and a mask, computed for one rank on request, and figures that all ranks need alike.

A rank computes the blocks of its own queries, and sends the keys in the blocks of other ranks. It also needs some
figures of all ranks: how many rows travel between every two ranks, which kinds of tile occur. Pieces of queries are
paired with pieces of keys: runs of the layout, cut where the mask's distances change. Packed documents cut them too,
if documents are runs of positions with few bands; pieces are then paired within each document alone.

All blocks of all ranks are computed, in chunks that are not kept; `examples/benchmarks/planning.py` measures the time.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from copy import copy
from functools import lru_cache
from itertools import chain, pairwise

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
    ceil_div,
    cut,
    expand,
    increasing,
    is_order,
    join_full,
    keys_of,
    own_causal,
    pieces_of,
    run_begins,
    shard_lens_of,
    shares_keys,
    squares,
    unions,
)
from cp_mesh.geometry.host_tensors import Content
from cp_mesh.geometry.layout import Layout
from cp_mesh.geometry.mask import NONE, Documents, Mask, parse_mask

Seen = NDArray[np.bool_]
SAME_KEYS = RECEIVER, SOURCE, K, K_END
CHUNK = 1 << 15  # pairs of pieces that are computed together: their blocks fit in the processor's cache
MAX_BANDS = 8
"""Most bands of one rank, since each band takes its own calls; with more bands, documents become tiles of pairs."""
MAX_PAIRS = 1 << 20
"""Most pairs of pieces that are planned as sequences of documents, about 300 ms per batch. Striped layouts cut every
document on every rank; with many ranks and documents their tiles are pairs, unless whole runs have half as many."""


class Geometry:
    """The blocks of all ranks, one table per batch row, or one table if all batch rows share it.

    Attributes:
        shard_lens: rows held by each rank.
        needed: int64 [receiver, source], how many of the source's rows the receiver fetches; 0 on the diagonal.
        overlapping: whether, on any rank, two kernel calls of a stage compute gradients of the same row.
        covers: kinds of tile that occur on any rank, see `Schedule`.
    """

    needed: Array
    overlapping: bool
    covers: frozenset[str]
    _sources: Seen | None = None

    def __init__(
        self, layout: Layout, pieces: Pieces, mask: Mask, seq_len: int, cp_size: int, by_documents: bool
    ) -> None:
        self.shard_lens, self._cp_size = shard_lens_of(pieces, cp_size), cp_size
        self._by_documents, self._opaque = by_documents, mask.elementwise and not by_documents
        self._squares, self._max_pairs = by_documents and mask.causal, max(MAX_PAIRS, 2 * pieces.num**2)
        self._rising = increasing(pieces, cp_size) & (is_order(mask, seq_len) and not self._opaque)
        parts = [_in_documents(pieces, documents) for documents in mask.runs()] if by_documents else [pieces]
        self._rows = [(q, keys_of(q, mask, seq_len)) for q in parts]
        if mask.documents is not None and not by_documents:
            simple = pieces.regular.all() and (pieces.stride == 1).all()
            order = None if simple else layout.permutation(seq_len, cp_size).numpy()
            ((q, k),) = self._rows
            self._rows = [(_labelled(q, mask, self.shard_lens, order), _labelled(k, mask, self.shard_lens, order))]

    def of_sources(self, sources: Seen) -> Geometry:
        """Return it without the blocks outside of bool [receiver, source]; `covers` then lists kinds that may occur."""
        found = copy(self)
        found._sources, found.needed = sources, np.where(sources, self.needed, 0)
        return found

    def of_receiver(self, rank: int) -> tuple[Array, ...]:
        """Return the blocks of a rank's queries, with full blocks joined along rows."""
        tables = []
        for q, k in self._rows:
            q = q.at(q.rank == rank)
            i, j = np.concatenate([np.empty((2, 0), dtype=np.int64), *self._pairs(q, k)], axis=1)
            order = i.argsort(kind="stable")
            blocks = [own_causal(q.at(self._rising[q.rank])), self._blocks(q, i[order], k, j[order])]
            tables.append(self._seen(join_full(np.concatenate(blocks), SAME_KEYS, Q, Q_END)))
        return tuple(tables)

    def of_source(self, rank: int) -> Array:
        """Return the blocks of other ranks with keys of this rank, for all batch rows; only their keys are used."""
        tables = [np.empty((0, 8), dtype=np.int64)]
        for q, k in self._rows:
            k = k.at(k.rank == rank)
            tables += [self._blocks(q, i, k, j) for i, j in self._pairs(q, k)]
        table = np.concatenate(tables)
        return self._seen(table[table[:, RECEIVER] != rank])

    def _seen(self, blocks: Array) -> Array:
        return blocks if self._sources is None else blocks[self._sources[blocks[:, RECEIVER], blocks[:, SOURCE]]]

    def _blocks(self, q: Pieces, i: Array, k: Pieces, j: Array) -> Array:
        blocks = block_table(q, i, k, j, self._opaque, keep_own=self._by_documents)
        return squares(blocks) if self._squares else blocks

    def _groups(self, q: Pieces, k: Pieces) -> tuple[Array, Array, Array, Array]:
        """Group pieces of q, sorted by document and rank, by these two, with all pieces of k of the document.

        Returns:
            For each group its first piece of q, the number of pieces, and where its pieces of k begin and end.
        """
        owner = q.document * self._cp_size + q.rank
        first = run_begins(owner[1:] != owner[:-1])[: q.num]
        begin, end = (np.searchsorted(k.document, q.document[first], side=side) for side in ("left", "right"))
        return first, np.diff(np.append(first, q.num)), begin, end

    def _num_pairs(self) -> int:
        """Number of pairs of pieces within documents."""
        groups = (self._groups(q, k) for q, k in self._rows)
        return sum(int(num @ (end - begin)) for _, num, begin, end in groups)

    def _pairs(self, q: Pieces, k: Pieces) -> Iterator[Array]:
        """Yield pairs of pieces that may see each other, except those of `own_causal`: [2, n], in chunks.

        They are in order of `_groups`, then of k. The pairs of a group with one piece of k, a slot, are in one chunk.
        """
        first, num, begin, end = self._groups(q, k)
        slots, pairs = np.cumsum(end - begin), np.cumsum(num * (end - begin))
        cuts = np.arange(0, pairs.max(initial=0), CHUNK)
        group = np.searchsorted(pairs, cuts, side="right")
        edges = np.unique(np.append(slots[group] - ceil_div(pairs[group] - cuts, num[group]), slots[-1:]))
        for some in pairwise(edges.tolist()):
            slot = np.arange(*some)
            group = np.searchsorted(slots, slot, side="right")
            which, place = expand(num[group])
            i, j = first[group][which] + place, (end[group] - slots[group] + slot)[which]
            meet = (q.rank[i] != k.rank[j]) | ~self._rising[q.rank[i]]
            if q.labels.size:
                (q_low, q_high), (k_low, k_high) = (x.labels.T[..., of] for x, of in ((q, i), (k, j)))
                meet &= ((q_low <= k_high) & (k_low <= q_high)).any(0)
            yield np.stack([i, j])[:, meet]

    def survey(self) -> bool:
        """Compute `needed`, `overlapping` and `covers` from all blocks.

        Returns:
            False if documents have too many pairs of pieces, too many bands, or blocks that are not bands.
        """
        size, self.overlapping = self._cp_size, False
        kinds: set[str] = set()
        bands: set[tuple[int, int]] = set()  # receiver, and both bounds in one number
        ranges: list[tuple[Array, Array, Array]] = []
        if self._by_documents and self._num_pairs() > self._max_pairs:
            return False
        for q, k in self._rows:
            tables = (self._blocks(q, i, k, j) for i, j in self._pairs(q, k))
            for blocks in chain([own_causal(q.at(self._rising[q.rank]))], tables):
                blocks = join_full(blocks, SAME_KEYS, Q, Q_END, in_order=True)
                kinds |= self._kinds(blocks)
                if self._by_documents:
                    of_blocks, which = np.unique(bands_of(blocks), return_inverse=True)
                    receiver, which = divmod(
                        np.unique(blocks[:, RECEIVER] * len(of_blocks) + which), len(of_blocks) or 1
                    )
                    bands.update(zip(receiver.tolist(), of_blocks[which].tolist(), strict=True))
                away = blocks[blocks[:, RECEIVER] != blocks[:, SOURCE]]
                self.overlapping |= shares_keys(away, size)
                ranges.append(unions(away[:, RECEIVER] * size + away[:, SOURCE], away[:, K], away[:, K_END]))
        owner, begin, end = unions(*map(np.concatenate, zip(*ranges, strict=True)))
        self.needed = np.bincount(owner, end - begin, size * size).astype(np.int64).reshape(size, size)
        self.covers = frozenset({"segments"} | kinds & {"window"} if self._by_documents else kinds)
        most = max(Counter(receiver for receiver, _ in bands).values(), default=0)
        return most <= MAX_BANDS and not (self._by_documents and "pairs" in kinds)

    def _kinds(self, blocks: Array) -> set[str]:
        left, right = blocks[:, LEFT], blocks[:, RIGHT]
        causal = (left == NONE) & (right == 0 if self._by_documents else right < NONE)
        found = {"pairs": left == PAIRS, "full": (left == NONE) & (right == NONE), "causal": causal}
        found["window"] = ~np.any([*found.values()], axis=0)
        return {kind for kind, x in found.items() if x.any()}


def geometry(
    layout: Layout, mask: Mask, seq_len: int, cp_size: int, documents: bool, sources: Seen | None = None
) -> Geometry:
    """Return the geometry, cached for later calls with the same arguments.

    Args:
        layout: positions of every rank.
        mask: its tensors, if any, hold all ``seq_len`` tokens.
        seq_len, cp_size: length of the whole sequence in tokens, and number of ranks.
        documents: make blocks by documents, if documents are runs of positions with few bands.
        sources: bool [receiver, source], a further limit on which sources a receiver sees; None: all.
    """
    tensors = (mask.documents, mask.key_padding, mask.blocks)
    contents = tuple(None if x is None else Content.of(x) for x in tensors)
    by_documents = documents and contents[0] is not None and contents[1:] == (None, None)
    found = _geometry(layout, mask.spec(), contents, seq_len, cp_size, by_documents)
    return found if sources is None else found.of_sources(sources)


@lru_cache(maxsize=4)  # small: a key holds a batch's documents. It halves the time of `explain`, which needs all ranks
def _geometry(
    layout: Layout,
    mask_spec: str,
    contents: tuple[Content | None, ...],
    seq_len: int,
    cp_size: int,
    by_documents: bool,
) -> Geometry:
    mask = parse_mask(mask_spec, *(None if x is None else x.tensor for x in contents))
    pieces = pieces_of(layout, seq_len, cp_size)
    if by_documents and pieces.regular.all() and not any(documents.come_back for documents in mask.runs()):
        found = Geometry(layout, pieces, mask, seq_len, cp_size, True)
        if found.survey():
            return found
    found = Geometry(layout, pieces, mask, seq_len, cp_size, False)
    found.survey()
    return found


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


def _in_documents(pieces: Pieces, documents: Documents) -> Pieces:
    """Cut pieces where documents begin, sort them by document, and drop excluded tokens."""
    q, part = cut(pieces, documents.edges)
    order = part.argsort(kind="stable")
    return q._replace(document=part).at(order[documents.labels[part[order]] >= 0])


def _labelled(pieces: Pieces, mask: Mask, shard_lens: tuple[int, ...], order: Array | None) -> Pieces:
    """Return the pieces with `Pieces.labels`.

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
