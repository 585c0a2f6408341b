"""Segments: packed documents as variable-length sequences, one varlen call for each tile.

Documents that are runs of positions cut every shard in pieces that belong to one document. Between a piece of queries
and a piece of keys of the same document causal and window conditions are a band; trimmed to the rows and keys that it
reaches, it is said as kernels say it for sequences of unequal length, ``-left <= j - i - (num_k - num_q) <= right``:
the bottom right corners are aligned. So a block of keys before the queries is full, of the same rows causal, and of a
later rank's stripe causal too, one row smaller. Everything here is integers, and vectors of them where there can be
many: the work is one pass over pairs of pieces of one document.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise, zip_longest

import torch
from torch import Tensor

from cp_mesh.layouts import Layout, Run
from cp_mesh.masks import Band, Mask

NONE = 1 << 30
"""A bound that is not there, in tables."""
MAX_BANDS = 8
"""Bands of one rank at most, each of which takes calls of its own; documents of other masks stay as they are."""
# columns of a table of blocks
RECEIVER, SOURCE, Q, Q_END, K, K_END, LEFT, RIGHT = range(8)


@dataclass(frozen=True, eq=False)
class Segments:
    """Blocks of a tile, each of one document; pairs outside of them are masked.

    Attributes:
        blocks: by batch row, or once for all of them: int64 CPU tensors [n, 4] of first and end row, first and end key,
            counted in the tile. Both rows and keys of a block come after those of the block before: no two share any,
            and kernels that pad sequences find room for the padding.
        left, right: a row i of a block of ``num_q`` rows sees its keys j with
            ``-left <= j - i - (num_k - num_q) <= right``; None is unbounded.
    """

    blocks: tuple[Tensor, ...]
    left: int | None
    right: int | None

    def bands(self, blocks: Tensor) -> tuple[Tensor, Tensor]:
        """(lo, hi) [n]: the band ``lo <= i - j <= hi`` of each block, in its own indices."""
        shift = (blocks[:, 3] - blocks[:, 2]) - (blocks[:, 1] - blocks[:, 0])
        right, left = (NONE if bound is None else bound for bound in (self.right, self.left))
        return -right - shift, left - shift

    @property
    def pairs(self) -> int:
        """Allowed pairs, the mean over batch rows rounded up."""
        total = 0
        for blocks in self.blocks:
            for (q, q_end, k, k_end), lo, hi in zip(
                blocks.tolist(), *(x.tolist() for x in self.bands(blocks)), strict=True
            ):
                total += Band(max(lo, k - k_end), min(hi, q_end - q)).count(q_end - q, k_end - k)
        return -(-total // len(self.blocks))

    def allowed(self, q_rows: Tensor, k_rows: Tensor) -> Tensor:
        """bool [B or 1, len(q_rows), len(k_rows)] from int64 local indices, on their device."""
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
        """What a kernel for sequences of unequal length is given, by batch row; copied to the device once."""
        if device not in self._tables:
            self._tables[device] = [SequenceTable.of(blocks, device) for blocks in self.blocks]
        return self._tables[device]

    @cached_property
    def _tables(self) -> dict[torch.device, list[SequenceTable]]:
        return {}


@dataclass(frozen=True, eq=False)
class SequenceTable:
    """The blocks of one batch row as sequences: where each begins and how long it is, so that gaps are no matter.

    Attributes:
        q_begins, k_begins: int32 [n + 1]; the last entry is no sequence.
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
        if device.type == "cuda":  # pinned: a copy from other memory would wait for the stream
            table = table.pin_memory()
        parts = table.to(device, non_blocking=True).split([n + 1, n + 1, n, n])
        longest = lens.amax(0).tolist() if n else [0, 0]
        return cls(parts[0], parts[2], parts[1], parts[3], *longest)


def _block_of(rows: Tensor, begins: Tensor, ends: Tensor) -> Tensor:
    """Which block [begin, end) each row lies in, -1 for none."""
    begins, order = begins.sort()
    place = torch.searchsorted(begins, rows, right=True) - 1
    block = order[place.clamp(min=0)]
    return torch.where((place >= 0) & (rows < ends[block]), block, -1)


def document_blocks(layout: Layout, mask: Mask, seq_len: int, cp_size: int) -> tuple[Tensor, ...] | None:
    """The allowed pairs of all ranks as blocks, each pair in exactly one.

    Returns:
        By batch row (one for all if they share documents) an int64 table [n, 8] with the columns named above: rows of
        the receiver, keys of the source, in local indices; absent bounds are `NONE`. None where documents are not known
        on the host or an id comes back, and for masks and layouts whose blocks are no bands, or too many kinds of them.
    """
    if not mask.host_documents or mask.key_padding is not None or mask.prefix:
        return None
    shards = [layout.runs(seq_len, cp_size, rank) for rank in range(cp_size)]
    if not all(isinstance(piece, Run) for shard in shards for piece in shard):
        return None
    runs, rows = [], [0] * cp_size
    for rank, shard in enumerate(shards):
        for run in shard:
            assert isinstance(run, Run)
            runs.append((rank, rows[rank], run.start, run.stride, run.length))
            rows[rank] += run.length
    increasing = all(a.bounds()[1] < b.bounds()[0] for shard in shards for a, b in pairwise(shard))
    table = torch.tensor(runs, dtype=torch.int64, device="cpu").view(-1, 5)
    assert mask.documents is not None
    tables = []
    for ids in torch.atleast_2d(mask.documents):
        bounds = _document_bounds(ids)
        blocks = None if bounds is None else _blocks(_cut_runs(table, bounds), mask, increasing)
        if blocks is None:
            return None
        tables.append(blocks)
    bands, which = torch.cat([_bands(blocks) for blocks in tables]).unique(return_inverse=True)
    receivers = (torch.cat([blocks[:, RECEIVER] for blocks in tables]) * len(bands) + which).unique() // max(
        1, len(bands)
    )
    return tuple(tables) if not len(bands) or receivers.bincount().max() <= MAX_BANDS else None


def _bands(blocks: Tensor) -> Tensor:
    """Both bounds in one number [n]."""
    return blocks[:, LEFT] * (4 * NONE) + blocks[:, RIGHT]


def _document_bounds(ids: Tensor) -> Tensor | None:
    """Where documents begin, and the end: int64 [num_docs + 1]; None if an id comes back after another."""
    edges = torch.tensor([True], device="cpu").expand(min(1, len(ids)))
    begins = torch.cat([edges, ids[1:] != ids[:-1]]).nonzero().flatten()
    if len(ids[begins].unique()) != len(begins):
        return None
    return torch.cat([begins, torch.tensor([len(ids)], device="cpu")])


def _cut_runs(runs: Tensor, bounds: Tensor) -> Tensor:
    """Pieces of one document: rank, first row, first position, stride, length and document of each, by document."""
    start, stride, length = runs[:, 2:].T.contiguous()
    first = torch.searchsorted(bounds, start, right=True) - 1
    last = torch.searchsorted(bounds, start + stride * (length - 1), right=True) - 1
    run, place = _expand(last - first + 1)
    document, start, stride, length = first[run] + place, start[run], stride[run], length[run]
    begin = _ceil_div(bounds[document] - start, stride).clamp(min=0)
    end = torch.minimum(_ceil_div(bounds[document + 1] - start, stride), length)
    columns = [runs[run, 0], runs[run, 1] + begin, start + stride * begin, stride, end - begin, document]
    pieces = torch.stack(columns, dim=1)[end > begin]
    return pieces[pieces[:, 5].argsort(stable=True)]


def _blocks(pieces: Tensor, mask: Mask, increasing: bool) -> Tensor | None:
    """The table of blocks between all pieces; None if some are no bands."""
    rank, row, start, stride, length, document = pieces.unbind(1)
    counts = document.bincount()
    first = counts.cumsum(0) - counts
    q, place = _expand(counts[document])
    k = first[document[q]] + place
    kept, local = torch.ones_like(q, dtype=torch.bool), []
    causal_only = mask.causal and mask.window is None and mask.length is None
    if causal_only:
        kept &= start[k] <= start[q] + stride[q] * (length[q] - 1)
        if increasing:  # within a shard local order is that of positions, and a document's rows are next to each other
            kept &= rank[q] != rank[k]
            _, shard = (document * (int(rank.max()) + 1 if len(rank) else 1) + rank).unique_consecutive(
                return_inverse=True
            )
            begins, ends = _per_group(shard, row), _per_group(shard, row + length, last=True)
            ranks, no_bound = _per_group(shard, rank), torch.full_like(begins, NONE)
            local = [torch.stack([ranks, ranks, begins, ends, begins, ends, no_bound, torch.zeros_like(begins)], dim=1)]
    q, k = q[kept], k[kept]
    num_q, num_k = length[q], length[k]
    if mask.length is not None:
        num_k = torch.minimum(num_k, _ceil_div(mask.length - start[k], stride[k]).clamp(min=0))
        q, k, num_q, num_k = (x[num_k > 0] for x in (q, k, num_q, num_k))
    step = torch.where(num_q > 1, stride[q], stride[k])  # a piece of one row has any stride
    q_low, k_low = start[q], start[k]
    q_high, k_high = q_low + stride[q] * (num_q - 1), k_low + stride[k] * (num_k - 1)
    left, right = mask.window or (None, None)
    farthest, nearest = NONE if left is None else left, -NONE if right is None else -right
    nearest = max(0, nearest) if mask.causal else nearest
    # a piece against itself keeps bounds that do not cut, so that documents of all lengths share one band
    other, absent = q != k, torch.full_like(q, NONE)
    no_lo = (q_low - k_high >= nearest) & other if nearest > -NONE else torch.ones_like(other)
    no_hi = (q_high - k_low <= farthest) & other if farthest < NONE else torch.ones_like(other)
    lo = torch.where(no_lo, -absent, _ceil_div(nearest - (q_low - k_low), step))
    hi = torch.where(no_hi, absent, (farthest - (q_low - k_low)).div(step, rounding_mode="floor"))
    seen = (q_high - k_low >= nearest) & (q_low - k_high <= farthest) & (lo <= hi)
    bounded = (lo > -NONE) | (hi < NONE)
    if (seen & bounded & (num_q > 1) & (num_k > 1) & (stride[q] != stride[k])).any():
        return None
    # as `schedule.trim`: the rows and keys that the band reaches
    q_begin, q_end = lo.clamp(min=0), torch.minimum(num_q, num_k + hi)
    k_begin, k_end = (-hi).clamp(min=0), torch.minimum(num_k, num_q - lo)
    shift = k_begin - q_begin
    no_lo |= (lo + shift <= k_begin - k_end + 1) & other
    no_hi |= (hi + shift >= q_end - q_begin - 1) & other
    shift = k_end - q_end  # from the upper left corner to the lower right one
    left_bound, right_bound = torch.where(no_hi, absent, hi + shift), torch.where(no_lo, absent, -lo - shift)
    columns = [rank[q], rank[k], row[q] + q_begin, row[q] + q_end, row[k] + k_begin, row[k] + k_end]
    blocks = torch.stack([*columns, left_bound, right_bound], dim=1)[seen & (q_begin < q_end) & (k_begin < k_end)]
    blocks = torch.cat([*local, *(_squares(blocks) if mask.causal else [blocks])])
    return join_full(blocks, (RECEIVER, SOURCE, K, K_END), (Q, Q_END))


def _squares(blocks: Tensor) -> list[Tensor]:
    """Causal blocks whose last rows see all keys, cut in rows that end with the keys and a full block of the others."""
    loose = (blocks[:, LEFT] == NONE) & (blocks[:, RIGHT] > 0) & (blocks[:, RIGHT] < NONE)
    if not loose.any():
        return [blocks]
    causal, full = blocks[loose].clone(), blocks[loose].clone()
    cut = causal[:, Q_END] - causal[:, RIGHT]
    causal[:, Q_END], causal[:, RIGHT] = cut, 0
    full[:, Q], full[:, RIGHT] = cut, NONE
    return [blocks[~loose], causal, full]


def join_full(blocks: Tensor, same: Sequence[int], along: tuple[int, int]) -> Tensor:
    """Join full blocks that agree in the columns ``same`` and follow each other along rows or keys."""
    begin, end = along
    full = (blocks[:, LEFT] == NONE) & (blocks[:, RIGHT] == NONE)
    others, blocks = blocks[~full], blocks[full]
    if len(blocks) < 2:
        return torch.cat([others, blocks])
    for column in (begin, *reversed(same)):
        blocks = blocks[blocks[:, column].argsort(stable=True)]
    columns = list(same)
    follows = (blocks[1:, columns] == blocks[:-1, columns]).all(1) & (blocks[1:, begin] == blocks[:-1, end])
    group = torch.cat([torch.zeros(1, dtype=torch.int64, device="cpu"), (~follows).cumsum(0)])
    joined = _per_group(group, blocks)
    joined[:, end] = _per_group(group, blocks[:, end], last=True)
    return torch.cat([others, joined])


def any_windows(blocks: Iterable[Tensor]) -> bool:
    """Whether some block is neither full nor causal."""
    return any(((x[:, LEFT] < NONE) | ((x[:, RIGHT] != 0) & (x[:, RIGHT] < NONE))).any() for x in blocks)


def unions(blocks: Iterable[Tensor], cp_size: int) -> list[list[tuple[tuple[int, int], ...]]]:
    """[receiver][source]: ranges of the source's keys that blocks of any batch row name, each row once."""
    ranges = torch.cat([table[:, [RECEIVER, SOURCE, K, K_END]] for table in blocks])
    owner = (ranges[:, 0] * cp_size + ranges[:, 1]) * NONE
    begins, order = (owner + ranges[:, 2]).sort()
    ends = (owner + ranges[:, 3])[order].cummax(0).values
    new = torch.cat([torch.ones(min(1, len(begins)), dtype=torch.bool, device="cpu"), begins[1:] > ends[:-1]])
    lasts = _per_group(new.cumsum(0), ends, last=True)
    found: list[list[list[tuple[int, int]]]] = [[[] for _ in range(cp_size)] for _ in range(cp_size)]
    for begin, end in zip(begins[new].tolist(), lasts.tolist(), strict=True):
        pair = begin // NONE
        found[pair // cp_size][pair % cp_size].append((begin - pair * NONE, end - pair * NONE))
    return [[tuple(parts) for parts in row] for row in found]


def shares_keys(blocks: Tensor, cp_size: int) -> bool:
    """Whether two blocks of one receiver and source have a key in common."""
    owner = (blocks[:, RECEIVER] * cp_size + blocks[:, SOURCE]) * NONE
    begins, order = (owner + blocks[:, K]).sort()
    return bool(((owner + blocks[:, K_END])[order][:-1] > begins[1:]).any())


def place(blocks: Tensor, fetch: Iterable[tuple[int, Iterable]]) -> Tensor:
    """The blocks of a rank with what it fetches, their keys counted in the buffer where they lie range after range.

    Args:
        blocks: those of the rank's queries.
        fetch: (source, its row ranges) in the order of the buffer, sources ascending.
    """
    rows = [(source, *rows) for source, parts in fetch for rows in parts]
    ranges = torch.tensor(rows, dtype=torch.int64, device="cpu").view(-1, 3)
    blocks = blocks[torch.isin(blocks[:, SOURCE], ranges[:, 0])]
    lens = ranges[:, 2] - ranges[:, 1]
    which = torch.searchsorted(ranges[:, 0] * NONE + ranges[:, 1], blocks[:, SOURCE] * NONE + blocks[:, K], right=True)
    moved = (lens.cumsum(0) - lens - ranges[:, 1])[which - 1]
    blocks[:, K] += moved
    blocks[:, K_END] += moved
    return join_full(blocks, (Q, Q_END), (K, K_END))


def deal(blocks: Sequence[Tensor]) -> list[tuple[tuple[int, int], tuple[int, int], Segments]]:
    """(rows, keys, cover) of tiles: blocks of one band in layers, as one kernel call takes them.

    Args:
        blocks: tables by batch row, rows and keys counted in the buffers that the tiles read.
    """
    if any(((table[:, LEFT] == NONE) & (table[:, RIGHT] == 0)).any() for table in blocks):
        blocks = [_single_pairs_causal(table) for table in blocks]
    tiles = []
    for band in torch.cat([_bands(table) for table in blocks]).unique():
        chosen = [table[_bands(table) == band] for table in blocks]
        left, right = next(table[0, [LEFT, RIGHT]].tolist() for table in chosen if len(table))
        for parts in zip_longest(*(_layers(x) for x in chosen), fillvalue=blocks[0].new_empty(0, 4)):
            every = torch.cat(parts)
            (q, k), (q_end, k_end) = every[:, 0::2].amin(0).tolist(), every[:, 1::2].amax(0).tolist()
            within = tuple(part - torch.tensor([q, q, k, k], device="cpu") for part in parts)
            bounds = (None if bound == NONE else bound for bound in (left, right))
            tiles.append(((q, q_end), (k, k_end), Segments(within, *bounds)))
    return tiles


def _single_pairs_causal(blocks: Tensor) -> Tensor:
    """Full blocks of one row and one key said as causal ones, with which they share a call."""
    single = (blocks[:, Q_END] - blocks[:, Q] == 1) & (blocks[:, K_END] - blocks[:, K] == 1) & (blocks[:, LEFT] == NONE)
    blocks = blocks.clone()
    blocks[single, RIGHT] = 0
    return blocks


def _layers(blocks: Tensor) -> list[Tensor]:
    """Blocks [n, 4] dealt out in layers, in each of which both rows and keys follow one another.

    Chains that do so already, which are all blocks of a source or large parts of them, go to the first layer that has
    room for them.
    """
    if not len(blocks):
        return []
    blocks = blocks[blocks[:, K].argsort(stable=True)][:, [Q, Q_END, K, K_END]]
    layers: list[Tensor] = []
    for chain in blocks.tensor_split((~_following(blocks)).nonzero().flatten() + 1):
        joined = (torch.cat([layer, chain]) for layer in layers)
        joined = (x[x[:, 0].argsort()] for x in joined)
        place, layer = next(((i, x) for i, x in enumerate(joined) if _following(x).all()), (len(layers), chain))
        layers[place : place + 1] = [layer]
    return layers


def _following(blocks: Tensor) -> Tensor:
    """Whether each block [n, 4] but the first begins after the rows and the keys of the one before: bool [n - 1]."""
    return (blocks[1:, 0] >= blocks[:-1, 1]) & (blocks[1:, 2] >= blocks[:-1, 3])


def _expand(counts: Tensor) -> tuple[Tensor, Tensor]:
    """For ``counts[i]`` entries of each i: i, and the number of the entry among those of i."""
    which = torch.repeat_interleave(torch.arange(len(counts), device="cpu"), counts)
    return which, torch.arange(len(which), device="cpu") - (counts.cumsum(0) - counts)[which]


def _per_group(group: Tensor, values: Tensor, last: bool = False) -> Tensor:
    """The first or last value of each group; groups are numbered in order and contiguous."""
    edges = torch.ones(len(group), dtype=torch.bool, device="cpu")
    if last:
        edges[:-1] = group[1:] != group[:-1]
    else:
        edges[1:] = group[1:] != group[:-1]
    return values[edges]


def _ceil_div(a: Tensor | int, b: Tensor) -> Tensor:
    return -torch.div(-a, b, rounding_mode="floor")
