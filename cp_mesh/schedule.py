"""Schedule: the tiles of each ring step, the rows needed from each rank, pairs and bytes. Pure Python, no ranks.

Step i of rank r works on the keys of source ``(r - i) mod cp_size``; step 0 is local. Every rank can compute every
other rank's schedule, so senders know what receivers need with no communication, and a step that moves nothing
anywhere is skipped on all ranks alike.

Steps are taken in stages of 1, 2, 4, 4, ... steps. The rows of a stage lie in one buffer, source after source, so full
tiles of several sources become one: fewer and larger kernel calls, while a small first stage keeps the wait for it
short and each stage computes long enough to hide the fetch of the next. A zigzag rank's sources below it are all
visited before those above it, and each side needs one call a stage.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache, partial
from itertools import accumulate, pairwise

import torch
from torch import Tensor

from cp_mesh.layouts import Layout, Piece, Run
from cp_mesh.masks import CAUSAL, EMPTY, FULL, PARTIAL, Band, Cover, Mask, parse_mask
from cp_mesh.segments import (
    RECEIVER,
    SOURCE,
    Segments,
    any_windows,
    deal,
    document_blocks,
    place,
    shares_keys,
    unions,
)

Rows = tuple[int, int]  # begin, end of local rows
Ranges = tuple[Rows, ...]
Fetch = tuple[tuple[int, Ranges], ...]  # source, its rows
MAX_STAGE = 4  # steps in a stage at most: a stage's buffer is received while another is read


@dataclass(frozen=True)
class Tile:
    """A block of local query rows against a block of one source's local key rows; ``cover`` is never EMPTY."""

    q: Rows
    k: Rows
    cover: Cover | Segments

    @property
    def pairs(self) -> int:
        """Allowed pairs; for a PARTIAL tile the area, an upper bound."""
        num_q, num_k = self.q[1] - self.q[0], self.k[1] - self.k[0]
        if isinstance(self.cover, Segments):
            return self.cover.pairs
        return self.cover.count(num_q, num_k) if isinstance(self.cover, Band) else num_q * num_k


@dataclass(frozen=True)
class Stage:
    """Consecutive steps whose rows travel together and lie in one buffer, source after source in rank order.

    Attributes:
        steps: the ring steps; the same on every rank.
        fetch: (source, its row ranges) of what this rank receives; sources that it needs nothing of are left out.
        serve: (receiver, this rank's row ranges) of what it sends.
        tiles: tiles whose keys are rows of the buffer.
    """

    steps: tuple[int, ...]
    fetch: Fetch
    serve: Fetch
    tiles: tuple[Tile, ...]

    @cached_property
    def num_fetched(self) -> int:
        return sum(num_rows(ranges) for _, ranges in self.fetch)


@dataclass(frozen=True)
class Route:
    """What travels in a pass.

    Attributes:
        stages: this rank's, in order; all ranks have the same number of them.
        needed: [receiver][source], how many of the source's rows the receiver fetches; the same on every rank.
    """

    stages: tuple[Stage, ...]
    needed: tuple[tuple[int, ...], ...]

    @property
    def num_rows(self) -> int:
        """Rows that all ranks together fetch."""
        return sum(map(sum, self.needed))

    @cached_property
    def slots(self) -> tuple[tuple[int, ...], ...]:
        """[receiver][source], the first of a receiver's rows among all that the source gets back; last, how many."""
        return tuple(zip(*(accumulate(column, initial=0) for column in zip(*self.needed, strict=True)), strict=True))


@dataclass(frozen=True)
class Schedule:
    """What one rank computes, fetches and serves.

    Attributes:
        shard_lens: rows held by each rank, [cp_size].
        tiles: tiles by source rank, [cp_size].
        fetch: row ranges of each source that this rank needs, [cp_size]; its own entry is empty.
        serve: row ranges of this rank that each receiver needs, [cp_size].
        active_steps: steps >= 1 in which some rank moves rows; the same on every rank.
        route: the active steps in stages.
        overlapping: whether, on any rank, two kernel calls of a stage give gradients of the same row.
        covers: kinds of tile that occur on any rank: "full", "causal", "window", "pairs", "segments" (with "window" if
            a band of theirs is neither full nor causal); the same on every rank.
        min_keys: fewest keys of any kernel call on any rank (after `split_causal`); the same on every rank.
    """

    cp_rank: int
    shard_lens: tuple[int, ...]
    tiles: tuple[tuple[Tile, ...], ...]
    fetch: tuple[tuple[Rows, ...], ...]
    serve: tuple[tuple[Rows, ...], ...]
    active_steps: tuple[int, ...]
    route: Route
    overlapping: bool
    covers: frozenset[str]
    min_keys: int

    @property
    def local_tiles(self) -> tuple[Tile, ...]:
        """Tiles of this rank's queries against its own keys."""
        return self.tiles[self.cp_rank]

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


def make_schedule(
    layout: Layout, mask: Mask, seq_len: int, cp_size: int, cp_rank: int, segments: bool = False
) -> Schedule:
    """The schedule of one rank.

    Args:
        layout: positions of every rank.
        mask: its tensors, if any, hold all ``seq_len`` tokens.
        seq_len: length of the whole sequence, in tokens.
        cp_size: number of ranks.
        cp_rank: the rank.
        segments: tiles by documents (`Segments`) where `document_blocks` can tell them, instead of PARTIAL ones.
    """
    if segments and (blocks := document_blocks(layout, mask, seq_len, cp_size)) is not None:
        return _schedule_of_blocks(blocks, layout, seq_len, cp_size, cp_rank)
    if mask.host_documents or layout.tensor is not None:  # depends on tensors, whose content is no cache key
        return _make_schedule(layout, mask, seq_len, cp_size, cp_rank)
    return _cached_schedule(layout, mask.spec(), mask.elementwise, seq_len, cp_size, cp_rank)


@lru_cache(maxsize=256)
def _cached_schedule(
    layout: Layout, mask_spec: str, elementwise: bool, seq_len: int, cp_size: int, cp_rank: int
) -> Schedule:
    unread = torch.ones(1, dtype=torch.bool) if elementwise else None  # tiles are PARTIAL, whatever it holds
    return _make_schedule(layout, parse_mask(mask_spec, None, unread), seq_len, cp_size, cp_rank)


def _make_schedule(layout: Layout, mask: Mask, seq_len: int, cp_size: int, cp_rank: int) -> Schedule:
    ranks = range(cp_size)
    shards = [layout.runs(seq_len, cp_size, rank) for rank in ranks]
    grid = [  # [receiver][source]
        [tiles_between(q_shard, k_shard, mask, q_shard is k_shard) for k_shard in shards] for q_shard in shards
    ]
    every_tile = [tile for row in grid for tiles in row for tile in tiles]
    rows = _travelling([[_union(tile.k for tile in tiles) for tiles in row] for row in grid])

    def arrange(fetch: Fetch, rank: int) -> list[Tile]:
        placed, offset = [], 0
        for source, ranges in fetch:
            placed += [_place(tile, ranges, offset) for tile in grid[rank][source]]
            offset += num_rows(ranges)
        return _merge_full(sorted(placed, key=lambda tile: (tile.q, tile.k)), along_q=False)

    stages = [_stages(rows, partial(arrange, rank=rank), rank) for rank in ranks]
    return _schedule(
        cp_rank, shards, grid[cp_rank], rows,
        stages=stages[cp_rank],
        overlapping=any(_overlap(stage.tiles) for row in stages for stage in row),
        covers=frozenset(_kind(tile.cover) for tile in every_tile),
        min_keys=min((_fewest_keys(tile) for tile in every_tile), default=1 << 30),
    )  # fmt: skip


def _schedule_of_blocks(blocks: Sequence[Tensor], layout: Layout, seq_len: int, cp_size: int, cp_rank: int) -> Schedule:
    """The same from the blocks of all ranks, see `document_blocks`."""

    rows = _travelling(unions(blocks, cp_size))
    own = [table[table[:, RECEIVER] == cp_rank] for table in blocks]

    def dealt(tables: Sequence[Tensor]) -> list[Tile]:
        return [Tile(q, k, cover) for q, k, cover in deal(tables)]

    return _schedule(
        cp_rank,
        [layout.runs(seq_len, cp_size, rank) for rank in range(cp_size)],
        [dealt([table[table[:, SOURCE] == source] for table in own]) for source in range(cp_size)],
        rows,
        stages=_stages(rows, lambda fetch: dealt([place(x, fetch) for x in own]), cp_rank),
        overlapping=any(shares_keys(table, cp_size) for table in blocks),
        covers=frozenset(["segments", *(["window"] if any_windows(blocks) else [])]),
        min_keys=1,
    )


def _schedule(
    cp_rank: int,
    shards: Sequence[tuple[Piece, ...]],
    tiles: Sequence[Sequence[Tile]],
    rows: list[list[Ranges]],
    *,
    stages: tuple[Stage, ...],
    overlapping: bool,
    covers: frozenset[str],
    min_keys: int,
) -> Schedule:
    return Schedule(
        cp_rank=cp_rank,
        shard_lens=tuple(sum(piece.length for piece in shard) for shard in shards),
        tiles=tuple(map(tuple, tiles)),
        fetch=tuple(rows[cp_rank]),
        serve=tuple(row[cp_rank] for row in rows),
        active_steps=_active(rows),
        route=Route(stages, _counts(rows)),
        overlapping=overlapping,
        covers=covers,
        min_keys=min_keys,
    )


def _travelling(rows: list[list[Ranges]]) -> list[list[Ranges]]:
    """Without a rank's own rows, which stay where they are."""
    return [[() if source == rank else row[source] for source in range(len(row))] for rank, row in enumerate(rows)]


def _counts(rows: list[list[Ranges]]) -> tuple[tuple[int, ...], ...]:
    return tuple(tuple(num_rows(ranges) for ranges in row) for row in rows)


def _active(rows: list[list[Ranges]]) -> tuple[int, ...]:
    """Steps in which some rank fetches rows. Whoever needs a rank's keys in step i is i ranks ahead."""
    size = len(rows)
    return tuple(step for step in range(1, size) if any(rows[rank][(rank - step) % size] for rank in range(size)))


def _groups(active: tuple[int, ...]) -> list[tuple[int, ...]]:
    groups, begin, size = [], 0, 1
    while begin < len(active):
        groups.append(active[begin : begin + size])
        begin, size = begin + size, min(2 * size, MAX_STAGE)
    return groups


def _stages(rows: list[list[Ranges]], arrange: Callable[[Fetch], list[Tile]], rank: int) -> tuple[Stage, ...]:
    """The stages of one rank; ``rows`` [receiver][source] travel, ``arrange`` tells the tiles of what it fetches."""
    cp_size, stages = len(rows), []
    for steps in _groups(_active(rows)):
        sources = sorted((rank - step) % cp_size for step in steps)
        receivers = sorted((rank + step) % cp_size for step in steps)
        fetch = tuple((source, rows[rank][source]) for source in sources if rows[rank][source])
        serve = tuple((receiver, rows[receiver][rank]) for receiver in receivers if rows[receiver][rank])
        stages.append(Stage(steps, fetch, serve, tuple(arrange(fetch))))
    return tuple(stages)


def _place(tile: Tile, ranges: tuple[Rows, ...], offset: int) -> Tile:
    """The tile with its keys counted in the stage's buffer, where ``ranges`` begin at ``offset``."""
    first, last = tile.k
    for begin, end in ranges:
        if begin <= first and last <= end:
            return Tile(tile.q, (first - begin + offset, last - begin + offset), tile.cover)
        offset += end - begin
    raise AssertionError("a tile lies within one fetched range")


def _overlap(tiles: Iterable[Tile]) -> bool:
    """Whether kernel calls of these tiles, cut for stock kernels, share keys."""
    keys: list[Rows] = []
    for tile in tiles:
        num_q, num_k = tile.q[1] - tile.q[0], tile.k[1] - tile.k[0]
        parts = split_causal(tile.cover, num_q, num_k) if isinstance(tile.cover, Band) else None
        keys += [(tile.k[0] + k[0], tile.k[0] + k[1]) for _, k, _ in parts or [((0, num_q), (0, num_k), False)]]
    return any(a[1] > b[0] for a, b in pairwise(sorted(keys)))


def _kind(cover: Cover | Segments) -> str:
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
    q_pieces, k_pieces = _with_offsets(q_shard), _with_offsets(_cut(k_shard, mask.cuts()))
    for j, i in mask.near([piece for _, piece in q_pieces], [piece for _, piece in k_pieces]):
        (k_begin, k_piece), (q_begin, q_piece) = k_pieces[j], q_pieces[i]
        cover = mask.tile(q_piece, k_piece)
        if cover != EMPTY:
            k_rows = (k_begin, k_begin + k_piece.length)
            columns.setdefault(k_rows, []).append(Tile((q_begin, q_begin + q_piece.length), k_rows, cover))
    stacked = [tile for column in columns.values() for tile in _merge_full(column, along_q=True)]
    return tuple(trim(tile) for tile in _merge_full(sorted(stacked, key=lambda t: (t.q, t.k)), along_q=False))


def joined(tiles: Sequence[Tile]) -> tuple[Tile, ...]:
    """The smallest tile that holds all of these: what else it holds is not allowed, or they would hold it too."""
    if not tiles:
        return ()
    q = min(tile.q[0] for tile in tiles), max(tile.q[1] for tile in tiles)
    k = min(tile.k[0] for tile in tiles), max(tile.k[1] for tile in tiles)
    return (Tile(q, k, PARTIAL),)


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
