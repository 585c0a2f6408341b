"""The table of blocks: which rows of each rank see which keys of each other rank, as one table of integers.

A layout gives every rank runs of positions, and a mask allows keys at certain distances (`Mask.reaches`). For a run of
queries and a run of keys with one stride, these pairs are a band of local indices. So a whole mask is a table of
blocks: rows of a receiver, keys of a source, and a band. A mask without documents is one document. With packed
documents the runs are cut where documents begin, and blocks are made within each document alone.

Bands use the convention of variable-length kernels, ``-left <= j - i - (num_k - num_q) <= right``: the bottom right
corners are aligned. So keys before the queries are a full block, and keys of the same rows a causal block.

Everything here is NumPy on int64 vectors, because there can be millions of pairs of runs (1024 ranks in zigzag: four).
"""

from __future__ import annotations

from collections.abc import Sequence
from operator import itemgetter
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from cp_mesh.geometry.layout import Layout, Run
from cp_mesh.geometry.mask import NONE, Mask, Reach

Array = NDArray[np.int64]
RECEIVER, SOURCE, Q, Q_END, K, K_END, LEFT, RIGHT = range(8)  # columns of a table of blocks
PAIRS = -NONE
"""Value of LEFT in a block without a band: only `Mask.allowed` tells which of its pairs are allowed."""


_ZERO = np.zeros(1, dtype=np.int64)


class ShardPieces(NamedTuple):
    """Parts of shards, one entry each: a run of positions, or positions in any order between two bounds.

    Attributes:
        document: the number of its document, or 0.
        rank, row: the rank that holds the piece, and its first local row there.
        low, high: smallest and largest position.
        stride, length: of the run; the stride means nothing where ``regular`` is False.
        regular: whether the piece is a run.
        nearest, farthest: for keys, the distances ``p - t`` at which queries see them.
        whole: for keys, whether these distances hold for all positions of the piece.
        labels: [n, rows, 2], its smallest and largest document in each batch row; ``rows`` is 0 if the mask has no
            documents, or if pieces of different documents never meet.
    """

    document: Array
    rank: Array
    row: Array
    low: Array
    high: Array
    stride: Array
    length: Array
    regular: NDArray[np.bool_]
    nearest: Array
    farthest: Array
    whole: NDArray[np.bool_]
    labels: Array

    def at(self, index: Any) -> ShardPieces:
        return ShardPieces._make(map(itemgetter(index), self))

    @property
    def num(self) -> int:
        return len(self.rank)


def pieces_of(layout: Layout, seq_len: int, cp_size: int) -> ShardPieces:
    """Return the pieces of all shards, rank after rank in local order."""
    rows = []
    for rank in range(cp_size):
        begin = 0
        for piece in layout.runs(seq_len, cp_size, rank):
            stride = piece.stride if isinstance(piece, Run) else 1
            rows.append((rank, begin, *piece.bounds(), stride, piece.length, isinstance(piece, Run)))
            begin += piece.length
    columns: list[Any] = [*np.array(rows, dtype=np.int64).reshape(-1, 7).T.copy()]
    unset, regular = np.zeros_like(columns[0]), columns[6].astype(np.bool_)
    labels = np.zeros((len(unset), 0, 2), dtype=np.int64)
    return ShardPieces(*[unset, *columns[:6], regular, unset, unset, np.ones_like(regular), labels])


def cut(pieces: ShardPieces, edges: Array) -> tuple[ShardPieces, Array]:
    """Cut the pieces at the edges of the parts of a sequence; return them and the part in which each lies.

    Args:
        pieces: pieces that are not runs are not cut, and count to the part of their first position.
        edges: ascending positions at which parts begin; the last one is the end, and no position is beyond it.
    """
    first = edges.searchsorted(pieces.low, "right") - 1
    last = edges.searchsorted(np.where(pieces.regular, pieces.high, pieces.low), "right") - 1
    if (first == last).all():
        return pieces, first
    which, place = expand(last - first + 1)
    part, x = first[which] + place, pieces.at(which)
    begin = np.maximum(ceil_div(edges[part] - x.low, x.stride), 0)
    end = np.minimum(ceil_div(edges[part + 1] - x.low, x.stride), x.length)
    begin, end = np.where(x.regular, begin, 0), np.where(x.regular, end, x.length)
    low = x.low + x.stride * begin
    high = np.where(x.regular, low + x.stride * (end - begin - 1), x.high)
    x = x._replace(row=x.row + begin, low=np.where(x.regular, low, x.low), high=high, length=end - begin)
    return x.at(end > begin), part[end > begin]


def keys_of(pieces: ShardPieces, mask: Mask, seq_len: int) -> ShardPieces:
    """Return the pieces that some query can see as keys, cut where the distances change at which they are seen.

    Blocks of a mask extend over several pieces. Keys are then also cut where the keys begin or end that a piece needs.
    """
    if mask.blocks is not None:
        pieces = cut(pieces, _ends_of_needed(pieces, mask, seq_len))[0]
    reaches = [*mask.reaches(seq_len)]
    edges = np.array([*(reach.begin for reach in reaches), reaches[-1].end if reaches else 0, seq_len], dtype=np.int64)
    keys, part = cut(pieces, edges)
    last = edges[:-1].searchsorted(keys.high, "right") - 1
    visible = part < len(reaches)
    keys, part, last = keys.at(visible), part[visible], last[visible]
    if not reaches:
        return keys
    near, far = np.array([(reach.nearest, reach.farthest) for reach in reaches], dtype=np.int64).T
    nearest, farthest = near[part], far[part]
    whole = last == part
    for other in range(len(reaches)) if not whole.all() else ():  # irregular pieces lie in several parts
        inside = (part <= other) & (other <= last)  # take the union of their distances
        nearest = np.where(inside, np.minimum(nearest, near[other]), nearest)
        farthest = np.where(inside, np.maximum(farthest, far[other]), farthest)
    if mask.blocks is not None:  # the first key of a piece is seen from the earliest query
        nearest = np.minimum(nearest, mask.starts.amin(0).numpy()[keys.low] - keys.low)
    return keys._replace(nearest=nearest, farthest=farthest, whole=whole)


def _ends_of_needed(pieces: ShardPieces, mask: Mask, seq_len: int) -> Array:
    """Return the positions where the keys begin or end that some piece's queries need, with 0 and ``seq_len``."""
    ends = [np.searchsorted(starts, pieces.high, side="right") for starts in mask.starts.numpy()]
    begins = [pieces.low - reach.farthest for reach in mask.reaches(seq_len)]
    every = np.unique(np.concatenate([[0, seq_len], *ends, *begins]))
    return every[every >= 0]


def sees(q: ShardPieces, i: Array, k: ShardPieces, j: Array) -> NDArray[np.bool_]:
    """Return whether the distances let some query of q[i] see some key of k[j]."""
    seen: NDArray[np.bool_] = (q.high[i] - k.low[j] >= k.nearest[j]) & (q.low[i] - k.high[j] <= k.farthest[j])
    return seen


def block_table(q: ShardPieces, i: Array, k: ShardPieces, j: Array, opaque: bool, keep_own: bool = False) -> Array:
    """Return the blocks of pairs of pieces, q[i] with k[j]: [n, 8], trimmed to the rows and keys in their bands.

    A pair in which no query sees a key has no block. The blocks are in the order of the pairs.

    Args:
        q, k: pieces of queries and of keys.
        i, j: indices of the paired pieces, equally many.
        opaque: make no bands, because some condition of the mask is read from a tensor.
        keep_own: keep bounds of a piece against itself that cut nothing: documents of all lengths then have one band.
    """
    if not (seen := sees(q, i, k, j)).all():
        i, j = i[seen], j[seen]
    q, k = q.at(i), k.at(j)
    if opaque:
        return _whole(q, k)
    near, far, offset = k.nearest, k.farthest, q.low - k.low
    no_lo, no_hi = q.low - k.high >= near, q.high - k.low <= far
    step = np.where(q.length > 1, q.stride, k.stride)  # a piece of one row has any stride
    bands = q.regular & k.regular & ((q.length == 1) | (k.length == 1) | (q.stride == k.stride))
    bands = k.whole & (bands | (no_lo & no_hi))
    free_lo, free_hi = near <= -NONE, far >= NONE
    if keep_own:
        other = (q.rank != k.rank) | (q.row != k.row)
        no_lo, no_hi = no_lo & other, no_hi & other
    lo = np.where(no_lo | free_lo, -NONE, ceil_div(near - offset, step))
    hi = np.where(no_hi | free_hi, NONE, (far - offset) // step)
    q_begin, q_end = np.maximum(lo, 0), np.minimum(q.length, k.length + hi)
    k_begin, k_end = np.maximum(-hi, 0), np.minimum(k.length, q.length - lo)
    shift = k_begin - q_begin
    cuts_lo, cuts_hi = lo + shift > k_begin - k_end + 1, hi + shift < q_end - q_begin - 1
    if keep_own:
        cuts_lo, cuts_hi = (cuts_lo | ~other) & ~free_lo, (cuts_hi | ~other) & ~free_hi
    shift = k_end - q_end  # from the upper left corner to the lower right one
    left, right = np.where(cuts_hi, hi + shift, NONE), np.where(cuts_lo, -lo - shift, NONE)
    table = np.stack([q.rank, k.rank, q.row + q_begin, q.row + q_end, k.row + k_begin, k.row + k_end, left, right]).T
    kept = (lo <= hi) & (q_begin < q_end) & (k_begin < k_end)
    if not bands.all():
        table, kept = np.where(bands[:, None], table, _whole(q, k)), kept | ~bands
    return table if kept.all() else table.T[:, kept].T


def _whole(q: ShardPieces, k: ShardPieces) -> Array:
    """Return blocks of all rows and keys without a band: only `Mask.allowed` tells their pairs."""
    ends = q.row + q.length, k.row + k.length
    pairs = np.full_like(q.row, PAIRS)
    return np.stack([q.rank, k.rank, q.row, ends[0], k.row, ends[1], pairs, np.zeros_like(pairs)]).T  # by columns


def own_causal(pieces: ShardPieces) -> Array:
    """Return one causal block per document and rank: for masks that compare order alone, in shards of rising positions.

    Args:
        pieces: pieces of these shards, sorted by document and rank.
    """
    if not pieces.num:
        return np.empty((0, 8), dtype=np.int64)
    new = (pieces.document[1:] != pieces.document[:-1]) | (pieces.rank[1:] != pieces.rank[:-1])
    first = run_begins(new)
    rank, begin = pieces.rank[first], pieces.row[first]
    end = (pieces.row + pieces.length)[np.append(first[1:], pieces.num) - 1]
    return np.stack([rank, rank, begin, end, begin, end, np.full_like(begin, NONE), np.zeros_like(begin)], 1)


def increasing(pieces: ShardPieces, cp_size: int) -> NDArray[np.bool_]:
    """Return for each rank whether its local rows are in the order of their positions."""
    result = np.ones(cp_size, dtype=bool)
    result[pieces.rank[~pieces.regular]] = False
    falls = (pieces.rank[1:] == pieces.rank[:-1]) & (pieces.low[1:] <= pieces.high[:-1])
    result[pieces.rank[1:][falls]] = False
    return result


def is_order(mask: Mask, seq_len: int) -> bool:
    """Return whether a mask compares only the order of positions, and documents."""
    return mask.key_padding is None and mask.reaches(seq_len) == (Reach(0, seq_len, 0, NONE),)


def causal_parts(num_q: Any, num_k: Any, right: Any) -> tuple[Any, Any, Any]:
    """Return the parts in which causal blocks are computed, from numbers or arrays: rows, keys, the bound ``right``.

    Returns:
        Keys that all rows see, rows (and further keys) of the causal square, and rows after it, which see all keys.
    """
    square = num_q - right
    return num_k - square, square, right


def parts_of(blocks: Array) -> tuple[NDArray[np.bool_], Array, Array, Array]:
    """Return which blocks are causal, and the `causal_parts` of all; they mean nothing for the other blocks."""
    num_q, num_k = blocks[:, Q_END] - blocks[:, Q], blocks[:, K_END] - blocks[:, K]
    causal = (blocks[:, LEFT] == NONE) & (blocks[:, RIGHT] < NONE)
    return causal, *causal_parts(num_q, num_k, blocks[:, RIGHT])


def squares(blocks: Array) -> Array:
    """Cut causal blocks whose last rows see all keys: into rows that end with the keys, and a full block of others."""
    causal, _, square, after = parts_of(blocks)
    loose = causal & (after > 0)
    if not loose.any():
        return blocks
    all_seen = loose & (square <= 1)
    blocks = blocks.copy()
    blocks[all_seen, RIGHT] = NONE
    loose &= ~all_seen
    until, rest = blocks[loose], blocks[loose]
    until[:, Q_END] = rest[:, Q] = until[:, Q] + square[loose]
    until[:, RIGHT], rest[:, RIGHT] = 0, NONE
    return np.concatenate([blocks[~loose], until, rest])


def bands_of(blocks: Array) -> Array:
    """Return both bounds of each block as one number."""
    return np.asarray(blocks[:, LEFT] * (4 * NONE) + blocks[:, RIGHT])


def of_band(number: int) -> tuple[int, int]:
    """Return the bounds that `bands_of` made a number of."""
    left, right = divmod(number + 2 * NONE, 4 * NONE)
    return left, right - 2 * NONE


def cut_in_two(blocks: Array) -> bool:
    """Return whether a causal block has rows after its square, so that two calls have the same keys."""
    causal, _, _, after = parts_of(blocks)
    return bool((causal & (after > 0)).any())


def shares_keys(blocks: Array, cp_size: int) -> bool:
    """Return whether two calls of one receiver have keys of a source in common."""
    owner = (blocks[:, RECEIVER] * cp_size + blocks[:, SOURCE]) * NONE
    order = (owner + blocks[:, K]).argsort(kind="stable")
    begins, ends = (owner + blocks[:, K])[order], (owner + blocks[:, K_END])[order]
    return cut_in_two(blocks) or bool((ends[:-1] > begins[1:]).any())


def join_full(blocks: Array, same: Sequence[int], begin: int, end: int, in_order: bool = False) -> Array:
    """Join full blocks that are equal in the columns ``same`` and adjacent from column ``begin`` to column ``end``.

    ``in_order``: blocks that can be joined are neighbours in the table already.
    """
    full = (blocks[:, LEFT] == NONE) & (blocks[:, RIGHT] == NONE)
    others, blocks = blocks[~full], blocks[full]
    if len(blocks) < 2:
        return np.concatenate([others, blocks])
    if not in_order:
        blocks = blocks[np.lexsort([blocks[:, begin], *(blocks[:, column] for column in reversed(same))])]
    follows = blocks[1:, begin] == blocks[:-1, end]
    for column in same:
        follows &= blocks[1:, column] == blocks[:-1, column]
    firsts = run_begins(~follows)
    joined = blocks[firsts]
    joined[:, end] = blocks[np.append(firsts[1:], len(blocks)) - 1, end]
    return np.concatenate([others, joined])


def unions(owner: Array, begin: Array, end: Array) -> tuple[Array, Array, Array]:
    """Merge ranges by owner, so that each row occurs once: (owner, begin, end), sorted; ``owner`` is below 2**32."""
    begins, ends = owner * NONE + begin, owner * NONE + end
    if (begins[1:] < begins[:-1]).any():
        order = begins.argsort(kind="stable")
        begins, ends = begins[order], ends[order]
    ends = np.maximum.accumulate(ends)
    new = run_begins(begins[1:] > ends[:-1])[: len(begins)]
    begins, lasts = begins[new], ends[np.append(new[1:], len(ends))[: len(new)] - 1]
    owner = begins // NONE
    return owner, begins - owner * NONE, lasts - owner * NONE


def run_begins(is_new: NDArray[np.bool_]) -> Array:
    """Return where runs begin: 0, and later entries that are new. (`numpy.r_` is much slower.)"""
    return np.concatenate([_ZERO, is_new.nonzero()[0] + 1])


def expand(counts: Array) -> tuple[Array, Array]:
    """Return, for ``counts[i]`` entries of each i: i of every entry, and the entry's number among those of its i."""
    which = np.arange(len(counts)).repeat(counts)
    return which, np.arange(len(which)) - (counts.cumsum() - counts)[which]


def ceil_div(a: Any, b: Any) -> Array:
    return -(-a // b)
