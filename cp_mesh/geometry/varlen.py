"""Packed documents as variable-length sequences (`Segments`): one varlen call for each tile.

A varlen kernel computes the blocks of a tile in one call if they have one band, and if both rows and keys are in
ascending order from block to block. So the blocks of a stage are sorted by band, and in layers that are ascending.
The blocks of a causal mask in a layout of runs need one layer per side.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import zip_longest

import numpy as np
import torch
from torch import Tensor

from cp_mesh.geometry.block_table import K_END, LEFT, Q_END, RIGHT, Array, K, Q, bands_of, of_band
from cp_mesh.geometry.host_tensors import lasting
from cp_mesh.geometry.mask import NONE


@dataclass(frozen=True, eq=False)
class Segments:
    """Blocks of a tile, each of one document; pairs outside of the blocks are masked.

    Attributes:
        blocks: one int64 CPU tensor [n, 4] per batch row, or one for all: first and end row, first and end key, counted
            in the tile. Both rows and keys of a block come after those of the block before. So no two blocks share any,
            and kernels that pad sequences find room for the padding.
        left, right: the `Band` of each block.
    """

    blocks: tuple[Tensor, ...]
    left: int | None
    right: int | None
    _tables: dict[torch.device, list[SequenceTable]] = field(default_factory=dict, init=False, repr=False)

    def bands(self, blocks: Tensor) -> tuple[Tensor, Tensor]:
        """Return (lo, hi) [n]: the band ``lo <= i - j <= hi`` of each block, in the block's own indices."""
        shift = (blocks[:, 3] - blocks[:, 2]) - (blocks[:, 1] - blocks[:, 0])
        right, left = (NONE if bound is None else bound for bound in (self.right, self.left))
        return -right - shift, left - shift

    def allowed(self, q_rows: Tensor, k_rows: Tensor) -> Tensor:
        """Return bool [B or 1, len(q_rows), len(k_rows)] from int64 indices in the tile, on their device."""
        return torch.stack([self._allowed(blocks.to(q_rows.device), q_rows, k_rows) for blocks in self.blocks])

    def _allowed(self, blocks: Tensor, q_rows: Tensor, k_rows: Tensor) -> Tensor:
        if not len(blocks):
            return torch.zeros(len(q_rows), len(k_rows), dtype=torch.bool, device=q_rows.device)
        q_block, k_block = _block_of(q_rows, blocks[:, 0], blocks[:, 1]), _block_of(k_rows, blocks[:, 2], blocks[:, 3])
        distance = (q_rows - blocks[q_block, 0])[:, None] - (k_rows - blocks[k_block, 2])
        lo, hi = (x[q_block][:, None] for x in self.bands(blocks))
        same = (q_block[:, None] == k_block) & (q_block >= 0)[:, None] & (k_block >= 0)
        return same & (distance >= lo) & (distance <= hi)

    def on(self, device: torch.device) -> list[SequenceTable]:
        """Return the arguments of a varlen kernel, one entry per batch row; copied to the device once."""
        if device not in self._tables:
            with lasting():
                self._tables[device] = [SequenceTable.of(blocks, device) for blocks in self.blocks]
        return self._tables[device]


@dataclass(frozen=True, eq=False)
class SequenceTable:
    """The blocks of one batch row as sequences: begin and length of each, so that gaps between them are allowed.

    Attributes:
        q_begins, k_begins: int32 [n + 1]; the last entry is not a sequence.
        q_lens, k_lens: int32 [n].
        max_q, max_k: the longest.
    """

    q_begins: Tensor
    q_lens: Tensor
    k_begins: Tensor
    k_lens: Tensor
    max_q: int
    max_k: int

    @classmethod
    def of(cls, blocks: Tensor, device: torch.device) -> SequenceTable:
        n = len(blocks)
        ends = blocks[:, 1::2].amax(0) if n else blocks.new_zeros(2)
        begins, lens = torch.cat([blocks[:, 0::2], ends[None]]), blocks[:, 1::2] - blocks[:, 0::2]
        table = torch.cat([begins.T.flatten(), lens.T.flatten()]).to(torch.int32)
        if device.type == "cuda":  # pinned: a copy from pageable memory would wait for the stream
            table = table.pin_memory()
        parts = table.to(device, non_blocking=True).split([n + 1, n + 1, n, n])
        longest = lens.amax(0).tolist() if n else [0, 0]
        return cls(parts[0], parts[2], parts[1], parts[3], *longest)


def _block_of(rows: Tensor, begins: Tensor, ends: Tensor) -> Tensor:
    """Return the block [begin, end) in which each row lies, -1 for none."""
    begins, order = begins.sort()
    place = torch.searchsorted(begins, rows, right=True) - 1
    block = order[place.clamp(min=0)]
    return torch.where((place >= 0) & (rows < ends[block]), block, -1)


def segments_of(tables: Sequence[Array]) -> list[tuple[tuple[int, int], tuple[int, int], Segments]]:
    """Return (rows, keys, cover) of tiles: layers of blocks with one band, one kernel call each.

    Args:
        tables: blocks by batch row, rows and keys counted in the buffers that the tiles read.
    """
    if any(((table[:, LEFT] == NONE) & (table[:, RIGHT] == 0)).any() for table in tables):
        tables = [_single_pairs_causal(table) for table in tables]
    tiles, bands = [], [bands_of(table) for table in tables]
    for band in np.unique(np.concatenate(bands)).tolist():
        left, right = (None if bound == NONE else bound for bound in of_band(band))
        chosen = [table[of_table == band] for table, of_table in zip(tables, bands, strict=True)]
        for parts in zip_longest(*map(_layers, chosen), fillvalue=np.empty((0, 4), dtype=np.int64)):
            every = np.concatenate(parts)
            first, (_, q_end, _, k_end) = every.min(0), every.max(0).tolist()
            first[1::2] = q, k = first[0::2].tolist()
            within = tuple(torch.from_numpy(part - first) for part in parts)
            tiles.append(((q, q_end), (k, k_end), Segments(within, left, right)))
    return tiles


def _single_pairs_causal(blocks: Array) -> Array:
    """Turn full blocks of one row and one key into causal blocks, so that they share a call with these."""
    single = (blocks[:, Q_END] - blocks[:, Q] == 1) & (blocks[:, K_END] - blocks[:, K] == 1) & (blocks[:, LEFT] == NONE)
    blocks = blocks.copy()
    blocks[single, RIGHT] = 0
    return blocks


def _layers(blocks: Array) -> list[Array]:
    """Sort blocks [n, 4] in layers; within a layer both rows and keys are ascending and disjoint.

    Chains that are ascending already, usually all blocks of a source or large parts of them, go to the first layer that
    has room for them.
    """
    if not len(blocks):
        return []
    blocks = blocks[blocks[:, K].argsort(kind="stable")][:, [Q, Q_END, K, K_END]]
    if _following(blocks).all():
        return [blocks]
    layers: list[Array] = []
    for chain in np.split(blocks, np.flatnonzero(~_following(blocks)) + 1):
        for i, layer in enumerate(layers):
            joined = np.concatenate([layer, chain])
            joined = joined[joined[:, 0].argsort(kind="stable")]
            if _following(joined).all():
                layers[i] = joined
                break
        else:
            layers.append(chain)
    return layers


def _following(blocks: Array) -> np.ndarray:
    """Return whether each block [n, 4] but the first begins after the block before, in rows and keys: bool [n - 1]."""
    return (blocks[1:, 0] >= blocks[:-1, 1]) & (blocks[1:, 2] >= blocks[:-1, 3])
