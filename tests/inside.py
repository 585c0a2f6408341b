"""What the pins of test_pins.py read of the inside of cp_mesh: when a name moves, a line here is what changes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import cp_mesh
from cp_mesh.blocks import PAIRS, SOURCE
from cp_mesh.layouts import Layout
from cp_mesh.masks import NONE, PARTIAL, Band, Mask
from cp_mesh.methods import METHODS
from cp_mesh.schedule import Tile, make_schedule

METHOD_NAMES = tuple(METHODS)
SOURCES = str(Path(cp_mesh.__file__).parent)
"""The folder of our own functions."""


def planned(layout: Layout, mask: Mask, seq_len: int, cp_size: int, cp_rank: int, by_documents: bool) -> dict[str, Any]:
    """What a rank of a ring computes, fetches and serves, in lists of integers.

    A block of rows and keys has a band ``-left <= j - i - (num_k - num_q) <= right``, of which None bounds nothing, or
    "pairs": only the mask itself says which of its pairs are allowed.
    """
    schedule = make_schedule(layout, mask, seq_len, cp_size, cp_rank, by_documents)
    stages = schedule.route.stages
    return {
        "blocks": [[_block(row) for row in table[:, SOURCE:].tolist()] for table in schedule.blocks],
        "tiles": [[_tile(tile) for tile in tiles] for tiles in schedule.tiles],
        "moves": [schedule.fetch, schedule.serve, schedule.route.needed.tolist()],
        "covers": [sorted(schedule.covers), schedule.overlapping],
        "stages": [[x.steps, x.fetch, x.serve, [_tile(tile) for tile in x.tiles]] for x in stages],
    }


def _block(row: list[int]) -> list[Any]:
    """Source, rows, keys and band."""
    *where, left, right = row
    return [*where, *(["pairs"] if left == PAIRS else [None if x == NONE else x for x in (left, right)])]


def _tile(tile: Tile) -> list[Any]:
    cover, shift = tile.cover, (tile.k[1] - tile.k[0]) - (tile.q[1] - tile.q[0])
    if isinstance(cover, Band):
        left, right = (
            (None if cover.hi is None else cover.hi + shift),
            (None if cover.lo is None else -cover.lo - shift),
        )
        return [tile.q, tile.k, left, right]
    if cover == PARTIAL:
        return [tile.q, tile.k, "pairs"]
    return [tile.q, tile.k, cover.left, cover.right, [blocks.tolist() for blocks in cover.blocks]]
