"""Schedule: the tiles of each step, the rows needed from each rank, pairs and bytes. Integers, without process groups.

In step i rank r works on the keys of source ``(r - i) mod cp_size``; step 0 is local. Every rank computes how many rows
travel between every two ranks (`geometry.survey`). So senders know what receivers need without communication, and all
ranks skip a step in which no rows move.

Steps are grouped in stages, as each method likes. The rows of a stage lie in one buffer, source after source, so full
tiles of several sources become one tile: fewer and larger kernel calls. A zigzag rank visits all sources below it
before those above it, and each side needs one call per stage. The ring's stages have 1, 2, 4, 4, ... steps: a small
first stage keeps the wait for it short, and each stage computes long enough to hide the transfer of the next.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

import numpy as np

from cp_mesh.geometry.block_table import K_END, PAIRS, Q_END, SOURCE, Array, K, Q, causal_parts, join_full, unions
from cp_mesh.geometry.layout import Layout
from cp_mesh.geometry.mask import NONE, PARTIAL, Band, Cover, Mask
from cp_mesh.geometry.survey import Seen, active_steps, survey
from cp_mesh.geometry.varlen import Segments, segments_of

Rows = tuple[int, int]  # begin, end of local rows
Ranges = tuple[Rows, ...]
Fetch = tuple[tuple[int, Ranges], ...]  # source, its rows
Grouping = Callable[[tuple[int, ...]], list[tuple[int, ...]]]  # groups the active steps in stages
MAX_STAGE = 4  # most steps in a stage of the ring: one stage's buffer is received while another is read


@dataclass(frozen=True)
class Tile:
    """A block of local query rows against a block of one buffer's key rows; ``cover`` tells which pairs are allowed."""

    q: Rows
    k: Rows
    cover: Cover | Segments


@dataclass(frozen=True, eq=False)
class Stage:
    """Consecutive steps whose rows travel together and lie in one buffer, source after source in rank order.

    Attributes:
        steps: the same on every rank.
        fetch: (source, its row ranges) that this rank receives; sources without needed rows are left out.
        serve: (receiver, this rank's row ranges) that this rank sends.
        tiles: tiles whose keys are rows of the buffer.
    """

    steps: tuple[int, ...]
    fetch: Fetch
    serve: Fetch
    tiles: tuple[Tile, ...]

    @cached_property
    def num_fetched(self) -> int:
        return sum(num_rows(ranges) for _, ranges in self.fetch)

    @cached_property
    def num_served(self) -> int:
        return sum(num_rows(ranges) for _, ranges in self.serve)


@dataclass(frozen=True, eq=False)
class Route:
    """The rows that travel in a pass.

    Attributes:
        stages: this rank's, in order; all ranks have the same number of stages.
        needed: int64 [receiver, source], how many of the source's rows the receiver fetches; the same on every rank.
    """

    stages: tuple[Stage, ...]
    needed: Array

    @property
    def num_rows(self) -> int:
        """Number of rows that all ranks together fetch."""
        return int(self.needed.sum())

    @cached_property
    def most_fetched(self) -> int:
        """Largest number of rows that one rank fetches."""
        return int(self.needed.sum(1).max())

    @cached_property
    def most_served(self) -> int:
        """Largest number of rows that one rank sends; a row sent to several receivers counts for each."""
        return int(self.needed.sum(0).max())

    @cached_property
    def slots(self) -> list[list[int]]:
        """[receiver][source]: first row of the receiver's slot among all rows that are returned to the source."""
        firsts: list[list[int]] = (np.cumsum(self.needed, 0) - self.needed).tolist()
        return firsts


@dataclass(frozen=True, eq=False)
class Schedule:
    """What one rank computes, fetches and serves.

    Attributes:
        shard_lens: rows held by each rank, [cp_size].
        blocks: this rank's blocks, one table per batch row, see `cp_mesh.geometry.block_table`.
        local_tiles: tiles of this rank's queries against its own keys.
        fetch: row ranges of each source that this rank needs, [cp_size]; its own entry is empty.
        serve: row ranges of this rank that each receiver needs, [cp_size].
        route: the steps >= 1 in which some rank moves rows, in stages.
        overlapping: whether, on any rank, two kernel calls of a stage compute gradients of the same row.
        covers: kinds of tile that occur on any rank: "full", "causal", "window", "pairs", "segments" (with "window" if
            the band of a segment is neither full nor causal); the same on every rank.
    """

    cp_rank: int
    shard_lens: tuple[int, ...]
    blocks: tuple[Array, ...]
    local_tiles: tuple[Tile, ...]
    fetch: tuple[tuple[Rows, ...], ...]
    serve: tuple[tuple[Rows, ...], ...]
    route: Route
    overlapping: bool
    covers: frozenset[str]

    @property
    def cp_size(self) -> int:
        return len(self.shard_lens)


def num_rows(ranges: Iterable[Rows]) -> int:
    return sum(end - begin for begin, end in ranges)


def in_rising_stages(active: tuple[int, ...]) -> list[tuple[int, ...]]:
    """Group steps in stages of 1, 2, 4, 4, ... steps."""
    groups, begin, size = [], 0, 1
    while begin < len(active):
        groups.append(active[begin : begin + size])
        begin, size = begin + size, min(2 * size, MAX_STAGE)
    return groups


def in_one_stage(active: tuple[int, ...]) -> list[tuple[int, ...]]:
    """Group all steps in one stage; no stage if there are no steps."""
    return [active] if active else []


def make_schedule(
    layout: Layout,
    mask: Mask,
    seq_len: int,
    cp_size: int,
    cp_rank: int,
    segments: bool = False,
    groups: Grouping = in_rising_stages,
    sources: Seen | None = None,
) -> Schedule:
    """Return the schedule of one rank.

    Args:
        layout: positions of every rank.
        mask: its tensors, if any, hold all ``seq_len`` tokens.
        seq_len: length of the whole sequence, in tokens.
        cp_size: number of ranks.
        cp_rank: the rank.
        segments: make tiles of documents (`Segments`) where documents are runs of positions, instead of PARTIAL tiles.
        groups: groups the active steps in stages; the same on every rank.
        sources: bool [receiver, source], the sources that may be visited; None: all.
    """
    found = survey(layout, mask, seq_len, cp_size, cp_rank, segments, sources)
    needed, blocks, by_documents = found.needed, found.blocks, "segments" in found.covers
    of_others = [table[table[:, SOURCE] != cp_rank] for table in blocks]
    away = np.concatenate(of_others)
    fetch = unions(away[:, SOURCE], away[:, K], away[:, K_END])
    fetched, served = by_rank(fetch, cp_size), by_rank(found.asked, cp_size)
    steps_of = groups(active_steps(needed))
    stage_of = np.full(cp_size, -1)  # stage of each source; this rank's own rows are in no stage
    for number, group in enumerate(steps_of):
        stage_of[(cp_rank - np.array(group)) % cp_size] = number
    placed = [_placed(table, fetch, stage_of) for table in of_others]
    stages = []
    for number, group in enumerate(steps_of):
        sources, receivers = (np.sort((cp_rank + sign * np.array(group)) % cp_size).tolist() for sign in (-1, 1))
        stages.append(
            Stage(
                group,
                tuple((source, fetched[source]) for source in sources if fetched[source]),
                tuple((receiver, served[receiver]) for receiver in receivers if served[receiver]),
                tiles_of(of_group(placed, number), by_documents),
            )
        )
    return Schedule(
        cp_rank=cp_rank,
        shard_lens=found.shard_lens,
        blocks=blocks,
        local_tiles=tiles_of(of_group(blocks, cp_rank), by_documents),
        fetch=tuple(fetched),
        serve=tuple(served),
        route=Route(tuple(stages), needed),
        overlapping=found.overlapping,
        covers=found.covers,
    )


def by_rank(ranges: tuple[Array, Array, Array], cp_size: int) -> list[Ranges]:
    """Return the ranges of each rank, from the result of `unions`."""
    rank, begin, end = ranges
    pairs = tuple(zip(begin.tolist(), end.tolist(), strict=True))
    firsts = np.searchsorted(rank, np.arange(cp_size + 1)).tolist()
    return [pairs[first:last] for first, last in pairwise(firsts)]


def of_group(tables: Sequence[Array], number: int) -> list[Array]:
    """Return the blocks of one source, or of one stage, for each batch row."""
    return [table[table[:, SOURCE] == number] for table in tables]


def _placed(blocks: Array, fetch: tuple[Array, Array, Array], stage_of: Array) -> Array:
    """Count the keys of blocks in the buffer of their stage; the stage's number replaces the source.

    Args:
        blocks: this rank's queries with keys of other ranks.
        fetch: source, begin and end of the ranges that are fetched, in order.
        stage_of: stage of each source.
    """
    source, begin, end = fetch
    stage = stage_of[source]
    order = stage.argsort(kind="stable")  # ranges are consecutive in a buffer
    offset = np.empty_like(begin)
    offset[order] = np.cumsum((end - begin)[order]) - (end - begin)[order]
    first = np.full(int(stage.max(initial=-1)) + 1, NONE)
    np.minimum.at(first, stage, offset)
    moved = offset - first[stage] - begin
    which = np.searchsorted(source * NONE + begin, blocks[:, SOURCE] * NONE + blocks[:, K], side="right") - 1
    blocks = blocks.copy()
    blocks[:, [K, K_END]] += moved[which][:, None]
    blocks[:, SOURCE] = stage[which]
    return blocks


def tiles_of(tables: Sequence[Array], by_documents: bool) -> tuple[Tile, ...]:
    """Make tiles of blocks whose rows and keys lie in one buffer each, by batch row; join full blocks along keys."""
    tables = [join_full(table, (Q, Q_END), K, K_END) for table in tables]
    if by_documents:
        return tuple(Tile(*tile) for tile in segments_of(tables))
    (table,) = tables
    table = table[np.lexsort([table[:, column] for column in (K_END, K, Q_END, Q)])]
    tiles = []
    for q, q_end, k, k_end, left, right in table[:, Q:].tolist():
        band = Band(*(None if bound == NONE else bound for bound in (left, right)))
        tiles.append(Tile((q, q_end), (k, k_end), PARTIAL if left == PAIRS else band))
    return tuple(tiles)


def enclosing(tiles: Sequence[Tile]) -> tuple[Tile, ...]:
    """Return the smallest tile that contains all of these; pairs outside of them are not allowed by the mask."""
    if not tiles:
        return ()
    q = min(tile.q[0] for tile in tiles), max(tile.q[1] for tile in tiles)
    k = min(tile.k[0] for tile in tiles), max(tile.k[1] for tile in tiles)
    return (Tile(q, k, PARTIAL),)


def split_causal(band: Band, num_q: int, num_k: int) -> list[tuple[Rows, Rows, bool]] | None:
    """Cut a trimmed band in square causal tiles and full rectangles, which every stock kernel computes alike.

    Kernels disagree on how causal aligns when there are more keys than queries (top-left or bottom-right), so
    they only get squares.

    Returns:
        ``(q rows, k rows, causal)`` of each part, or None if the band has a left bound (a window).
    """
    if band.left is not None:
        return None
    if band.right is None:
        return [((0, num_q), (0, num_k), False)]
    before, square, after = causal_parts(num_q, num_k, band.right)
    assert before >= 0, "split_causal takes trimmed tiles"
    parts = [((0, num_q), (0, before), False)] if before else []
    parts.append(((0, square), (before, num_k), True))
    if after:
        parts.append(((square, num_q), (before, num_k), False))
    return parts
