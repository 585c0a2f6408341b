"""Schedule: the tiles of each ring step, the rows needed from each rank, pairs and bytes. Pure Python, no ranks.

Step i of rank r works on the keys of source ``(r - i) mod cp_size``; step 0 is local. Every rank can compute every
other rank's schedule, so senders know what receivers need with no communication, and a step that moves nothing
anywhere is skipped on all ranks alike.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise

import torch

from cp_mesh.layouts import Layout, Permuted, Piece, Run
from cp_mesh.masks import CAUSAL, EMPTY, FULL, Band, Cover, Mask, parse_mask

Rows = tuple[int, int]  # begin, end of local rows


@dataclass(frozen=True)
class Tile:
    """A block of local query rows against a block of one source's local key rows; ``cover`` is never EMPTY."""

    q: Rows
    k: Rows
    cover: Cover

    @property
    def pairs(self) -> int:
        """Allowed pairs; for a PARTIAL tile the area, an upper bound."""
        num_q, num_k = self.q[1] - self.q[0], self.k[1] - self.k[0]
        return self.cover.count(num_q, num_k) if isinstance(self.cover, Band) else num_q * num_k


@dataclass(frozen=True)
class Schedule:
    """What one rank computes, fetches and serves.

    Attributes:
        shard_lens: rows held by each rank, [cp_size].
        tiles: tiles by source rank, [cp_size].
        fetch: row ranges of each source that this rank needs, [cp_size]; its own entry is empty.
        serve: row ranges of this rank that each receiver needs, [cp_size].
        active_steps: steps >= 1 in which some rank moves rows; the same on every rank.
        covers: kinds of tile that occur on any rank: "full", "causal", "window", "pairs"; the same on every rank.
        min_keys: fewest keys of any kernel call on any rank (after `split_causal`); the same on every rank.
    """

    cp_rank: int
    shard_lens: tuple[int, ...]
    tiles: tuple[tuple[Tile, ...], ...]
    fetch: tuple[tuple[Rows, ...], ...]
    serve: tuple[tuple[Rows, ...], ...]
    active_steps: tuple[int, ...]
    covers: frozenset[str]
    min_keys: int

    @property
    def cp_size(self) -> int:
        return len(self.shard_lens)

    def source(self, step: int) -> int:
        """The rank whose keys this rank visits in ``step``."""
        return (self.cp_rank - step) % self.cp_size

    def receiver(self, step: int) -> int:
        """The rank that visits this rank's keys in ``step``."""
        return (self.cp_rank + step) % self.cp_size

    @property
    def pairs(self) -> int:
        """Query-key pairs that this rank computes (an upper bound where tiles are PARTIAL)."""
        return sum(tile.pairs for tiles in self.tiles for tile in tiles)

    def flops(self, batch: int, num_heads: int, head_dim: int, v_head_dim: int | None = None) -> int:
        """Floating-point operations of this rank's forward; the backward takes 2.5 times as many (D = Dv)."""
        return 2 * self.pairs * batch * num_heads * (head_dim + (v_head_dim or head_dim))

    def fetch_bytes(self, row_bytes: int) -> tuple[int, ...]:
        """Bytes that this rank receives in each step, [cp_size]; ``row_bytes`` is one token's K and V."""
        return tuple(num_rows(self.fetch[self.source(step)]) * row_bytes for step in range(self.cp_size))


def num_rows(ranges: Iterable[Rows]) -> int:
    return sum(end - begin for begin, end in ranges)


def make_schedule(layout: Layout, mask: Mask, seq_len: int, cp_size: int, cp_rank: int) -> Schedule:
    """The schedule of one rank.

    Args:
        layout: positions of every rank.
        mask: its tensors, if any, hold all ``seq_len`` tokens.
        seq_len: length of the whole sequence, in tokens.
        cp_size: number of ranks.
        cp_rank: the rank.
    """
    if mask.host_documents or isinstance(layout, Permuted):  # depends on tensors, whose content is no cache key
        return _make_schedule(layout, mask, seq_len, cp_size, cp_rank)
    return _cached_schedule(layout, mask.spec(), mask.elementwise, seq_len, cp_size, cp_rank)


@lru_cache(maxsize=256)
def _cached_schedule(
    layout: Layout, mask_spec: str, elementwise: bool, seq_len: int, cp_size: int, cp_rank: int
) -> Schedule:
    unread = torch.ones(1, dtype=torch.bool) if elementwise else None  # tiles are PARTIAL, whatever it holds
    return _make_schedule(layout, parse_mask(mask_spec, None, unread), seq_len, cp_size, cp_rank)


def _make_schedule(layout: Layout, mask: Mask, seq_len: int, cp_size: int, cp_rank: int) -> Schedule:
    shards = [layout.runs(seq_len, cp_size, rank) for rank in range(cp_size)]

    grid = [  # [receiver][source]
        [tiles_between(q_shard, k_shard, mask, q_shard is k_shard) for k_shard in shards] for q_shard in shards
    ]
    rows = [[_union(tile.k for tile in tiles) for tiles in row] for row in grid]
    every_tile = [tile for row in grid for tiles in row for tile in tiles]
    others = [rank for rank in range(cp_size) if rank != cp_rank]
    return Schedule(
        cp_rank=cp_rank,
        shard_lens=tuple(sum(piece.length for piece in shard) for shard in shards),
        tiles=tuple(grid[cp_rank]),
        fetch=tuple(rows[cp_rank][rank] if rank in others else () for rank in range(cp_size)),
        serve=tuple(rows[rank][cp_rank] if rank in others else () for rank in range(cp_size)),
        active_steps=tuple(
            step for step in range(1, cp_size) if any(rows[rank][(rank - step) % cp_size] for rank in range(cp_size))
        ),
        covers=frozenset(_kind(tile.cover) for tile in every_tile),
        min_keys=min((_fewest_keys(tile) for tile in every_tile), default=1 << 30),
    )


def _kind(cover: Cover) -> str:
    if not isinstance(cover, Band):
        return "pairs"
    return "window" if cover.hi is not None else "full" if cover.lo is None else "causal"


def _fewest_keys(tile: Tile) -> int:
    num_q, num_k = tile.q[1] - tile.q[0], tile.k[1] - tile.k[0]
    parts = split_causal(tile.cover, num_q, num_k) if isinstance(tile.cover, Band) else None
    return min((end - begin for _, (begin, end), _ in parts), default=num_k) if parts else num_k


def tiles_between(
    q_shard: tuple[Piece, ...], k_shard: tuple[Piece, ...], mask: Mask, same_shard: bool
) -> tuple[Tile, ...]:
    """Tiles of one shard's queries against another's keys: every allowed pair exactly once, no pair that is not."""
    if same_shard and _is_order(mask) and _increasing(q_shard):
        # A causal mask only compares order, and within a shard local order is the order of positions.
        length = sum(piece.length for piece in q_shard)
        return (Tile((0, length), (0, length), CAUSAL),) if length else ()
    columns: dict[Rows, list[Tile]] = {}
    for k_begin, k_piece in _with_offsets(_cut(k_shard, mask.cuts())):
        for q_begin, q_piece in _with_offsets(q_shard):
            cover = mask.tile(q_piece, k_piece)
            if cover != EMPTY:
                k_rows = (k_begin, k_begin + k_piece.length)
                columns.setdefault(k_rows, []).append(Tile((q_begin, q_begin + q_piece.length), k_rows, cover))
    stacked = [tile for column in columns.values() for tile in _merge_full(column, along_q=True)]
    return tuple(trim(tile) for tile in _merge_full(sorted(stacked, key=lambda t: (t.q, t.k)), along_q=False))


def trim(tile: Tile) -> Tile:
    """Shrink a tile to the rows and keys that its band reaches. A strict band becomes causal on fewer rows."""
    if not isinstance(tile.cover, Band):
        return tile
    lo, hi = tile.cover.lo, tile.cover.hi
    num_q, num_k = tile.q[1] - tile.q[0], tile.k[1] - tile.k[0]
    q_begin, q_end = max(0, lo or 0), num_q if hi is None else min(num_q, num_k + hi)
    k_begin, k_end = max(0, -hi if hi is not None else 0), num_k if lo is None else min(num_k, num_q - lo)
    shift = k_begin - q_begin
    lo = None if lo is None or lo + shift <= -(k_end - k_begin - 1) else lo + shift
    hi = None if hi is None or hi + shift >= q_end - q_begin - 1 else hi + shift
    return Tile((tile.q[0] + q_begin, tile.q[0] + q_end), (tile.k[0] + k_begin, tile.k[0] + k_end), Band(lo, hi))


def split_causal(band: Band, num_q: int, num_k: int) -> list[tuple[Rows, Rows, bool]] | None:
    """A trimmed band as square causal tiles and full rectangles, which every stock kernel computes alike.

    Kernels disagree on how causal aligns when there are more keys than queries (top-left or bottom-right), so
    nothing but squares is given to them.

    Returns:
        ``(q rows, k rows, causal)`` of each part, or None if the band has an upper bound (a window).
    """
    if band.hi is not None:
        return None
    if band.lo is None:
        return [((0, num_q), (0, num_k), False)]
    seen_by_all = -band.lo  # keys below it are visible to row 0 already
    assert seen_by_all >= 0, "split_causal takes trimmed tiles"
    square = num_k - seen_by_all
    parts = [((0, num_q), (0, seen_by_all), False)] if seen_by_all else []
    parts.append(((0, square), (seen_by_all, num_k), True))
    if square < num_q:
        parts.append(((square, num_q), (seen_by_all, num_k), False))
    return parts


def _is_order(mask: Mask) -> bool:
    return mask.causal and mask.window is None and mask.length is None and not mask.prefix and not mask.elementwise


def _increasing(shard: tuple[Piece, ...]) -> bool:
    runs = [piece for piece in shard if isinstance(piece, Run)]
    return len(runs) == len(shard) and all(a.last < b.start for a, b in pairwise(runs))


def _cut(shard: tuple[Piece, ...], cuts: list[int]) -> list[Piece]:
    pieces: list[Piece] = []
    for piece in shard:
        if isinstance(piece, Run):
            for cut in cuts:
                below = -(-(cut - piece.start) // piece.stride)  # rows at positions < cut
                if 0 < below < piece.length:
                    pieces.append(piece.slice(0, below))
                    piece = piece.slice(below, piece.length)
        pieces.append(piece)
    return pieces


def _with_offsets(shard: Iterable[Piece]) -> list[tuple[int, Piece]]:
    offset, result = 0, []
    for piece in shard:
        result.append((offset, piece))
        offset += piece.length
    return result


def _merge_full(tiles: list[Tile], along_q: bool) -> list[Tile]:
    """Join neighbouring FULL tiles: fewer and larger kernel calls."""
    merged: list[Tile] = []
    for tile in tiles:
        last = merged[-1] if merged else None
        if last is not None and last.cover == FULL and tile.cover == FULL:
            if along_q and last.k == tile.k and last.q[1] == tile.q[0]:
                merged[-1] = Tile((last.q[0], tile.q[1]), tile.k, FULL)
                continue
            if not along_q and last.q == tile.q and last.k[1] == tile.k[0]:
                merged[-1] = Tile(tile.q, (last.k[0], tile.k[1]), FULL)
                continue
        merged.append(tile)
    return merged


def _union(ranges: Iterable[Rows]) -> tuple[Rows, ...]:
    merged: list[Rows] = []
    for begin, end in sorted(ranges):
        if merged and begin <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        else:
            merged.append((begin, end))
    return tuple(merged)
