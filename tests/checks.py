"""Checks that the gates run on many cases, and the mutation gate on a few against broken copies of the library."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import cache, lru_cache
from itertools import accumulate, pairwise
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from cases import LAYOUTS, gap, make_mask, make_scores, mask_of, pairs, pairs_of
from dense import dense_attention, dense_dropout, make_qkv
from inside import (
    NONE,
    Band,
    Distances,
    Index,
    Schedule,
    Segments,
    block_table,
    inner,
    make_schedule,
    num_rows,
    pieces_of,
    room,
    split_causal,
    tiles_by_source,
    tiles_of,
)
from ranks import mesh
from recording import recording
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.checkpoint import checkpoint

import cp_mesh
from cp_mesh import Contiguous, Layout, Mask
from cp_mesh.geometry import Permuted
from cp_mesh.geometry.layouts import Run

plan = room("call.plan")
flat = inner("groups", "flat")
PARTIAL = inner("mask", "PARTIAL")
Rows, Tile = inner("schedule", "Rows", "Tile")


def coverage(layout: Layout, mask: Mask, want: Tensor, cp_size: int, segments: bool = False) -> list[str]:
    """What is wrong with the schedules of all ranks: they must compute every allowed pair exactly once, and no other.

    Args:
        layout: the layout.
        mask: the mask.
        want: bool [B or 1, S, S] in original order, what the mask must allow.
        cp_size: number of ranks.
        segments: ask for tiles by documents.
    """
    S = want.shape[-1]
    schedules = [make_schedule(layout, mask, S, cp_size, rank, segments) for rank in range(cp_size)]
    lens = schedules[0].shard_lens
    begins = [0, *accumulate(lens)]
    order = layout.permutation(S, cp_size)
    want = want[:, order][:, :, order].int()
    times, problems = torch.zeros_like(want), []
    for rank, schedule in enumerate(schedules):
        for source, tiles in enumerate(tiles_by_source(schedule)):
            for tile in tiles:
                rows = slice(begins[rank] + tile.q[0], begins[rank] + tile.q[1])
                keys = slice(begins[source] + tile.k[0], begins[source] + tile.k[1])
                if not (0 <= tile.q[0] < tile.q[1] <= lens[rank] and 0 <= tile.k[0] < tile.k[1] <= lens[source]):
                    problems.append(f"rank {rank}, source {source}: {tile} leaves the shards {lens}")
                elif tile.cover == PARTIAL:  # the kernel asks Mask.allowed, which test_masks.py proves
                    times[:, rows, keys] += want[:, rows, keys]
                elif isinstance(tile.cover, Segments):
                    times[:, rows, keys] += segment_pairs(tile)
                    problems += segment_problems(tile)
                else:
                    shape = tile.q[1] - tile.q[0], tile.k[1] - tile.k[0]
                    times[:, rows, keys] += band_pairs(tile.cover, *shape).int()
                    problems += band_problems(tile.cover, *shape)
        problems += _fetch_problems(layout, mask, want, schedules, rank, begins)
    for what, counted in {"tiles": times, "stages": staged_pairs(schedules, want, begins)}.items():
        if not torch.equal(counted, want):
            b, i, j = (counted != want).nonzero()[0].tolist()
            pair = f"query {order[i]}, key {order[j]} of row {b}"
            problems.append(f"{what}, {pair}: computed {counted[b, i, j]} times instead of {want[b, i, j]}")
    return problems


def band_tile(at: Distances, num_q: int, num_k: int) -> Tile:
    """The tile, trimmed, of a run of queries and a run of keys of which a mask allows pairs at these distances."""
    nearest, farthest = (-NONE if at.lo is None else at.lo), (NONE if at.hi is None else at.hi)
    q, k = (pieces_of(Contiguous(), n, 1) for n in (num_q, num_k))
    k = k._replace(nearest=k.nearest + nearest, farthest=k.farthest + farthest)
    only = np.zeros(1, dtype=np.int64)
    (tile,) = tiles_of([block_table(q, only, k, only, opaque=False)], by_documents=False)
    return tile


def forget_plans() -> None:
    """Nothing is kept of earlier calls, so that what a test patches is asked again."""
    forget_kept(plan.Plans)


def forget_kept(*kinds: type) -> None:
    """Nothing of these kinds is kept of any group."""
    for of_group in room("group_state")._STATES.values():
        for kind in kinds:
            of_group.pop(kind, None)
    room("call.known")._calls.clear()


def staged_pairs(schedules: Sequence[Schedule], want: Tensor, begins: Sequence[int]) -> Tensor:
    """How often each pair is computed by the local tiles and the stages.

    The rows of a stage's buffer are looked up in what its sources hold, as a transport fills it.
    """
    counts = torch.zeros_like(want)
    for rank, schedule in enumerate(schedules):
        own = torch.arange(begins[rank], begins[rank + 1])
        visits = [(own, schedule.local_tiles)]
        for stage in schedule.route.stages:
            parts = [
                torch.arange(begins[s] + begin, begins[s] + end) for s, ranges in stage.fetch for begin, end in ranges
            ]
            visits.append((torch.cat([own[:0], *parts]), stage.tiles))
            assert stage.num_fetched == len(visits[-1][0])
        for fetched, tiles in visits:
            for tile in tiles:
                rows, keys = own[tile.q[0] : tile.q[1]], fetched[tile.k[0] : tile.k[1]]
                assert (len(rows), len(keys)) == (tile.q[1] - tile.q[0], tile.k[1] - tile.k[0])
                block = (slice(None), rows[:, None], keys)
                if tile.cover == PARTIAL:
                    counts[block] += want[block]
                elif isinstance(tile.cover, Segments):
                    counts[block] += segment_pairs(tile)
                    assert not segment_problems(tile), segment_problems(tile)
                else:
                    counts[block] += band_pairs(tile.cover, len(rows), len(keys)).int()
    return counts


def segment_pairs(tile: Tile) -> Tensor:
    """int [B or 1, rows, keys]: how often the blocks of a tile name each pair, from the definition of their band."""
    assert isinstance(tile.cover, Segments)
    left, right = tile.cover.left, tile.cover.right
    times = torch.zeros(len(tile.cover.blocks), tile.q[1] - tile.q[0], tile.k[1] - tile.k[0], dtype=torch.int)
    for b, blocks in enumerate(tile.cover.blocks):
        for q, q_end, k, k_end in blocks.tolist():
            shift = (k_end - k) - (q_end - q)
            at = Distances(None if right is None else -right - shift, None if left is None else left - shift)
            times[b, q:q_end, k:k_end] += at.pairs(q_end - q, k_end - k).int()
    return times


def segment_problems(tile: Tile) -> list[str]:
    """Blocks fill their tile, have rows and keys of their own, and no row or key for nothing."""
    cover, times = tile.cover, segment_pairs(tile)
    assert isinstance(cover, Segments)
    problems, shape = [], times.shape[1:]
    taken = [torch.zeros(len(cover.blocks), n, dtype=torch.int) for n in shape]
    for b, blocks in enumerate(cover.blocks):
        for q, q_end, k, k_end in blocks.tolist():
            taken[0][b, q:q_end] += 1
            taken[1][b, k:k_end] += 1
            part = times[b, q:q_end, k:k_end]
            if not part.numel() or not part.any(0).all() or not part.any(1).all():
                problems.append(f"{tile.q} x {tile.k}: {(q, q_end, k, k_end)} has rows or keys for nothing")
    if any(int(x.max()) > 1 for x in taken):
        problems.append(f"{tile.q} x {tile.k}: two blocks share rows or keys")
    if any((blocks[1:, :4:2] < blocks[:-1, 1:4:2]).any() for blocks in cover.blocks):
        problems.append(f"{tile.q} x {tile.k}: blocks are not in order")
    if not all(x[:, end].any() for x in taken for end in (0, -1)):
        problems.append(f"{tile.q} x {tile.k} is larger than its blocks")
    rows, keys = (torch.arange(n) for n in shape)
    if not torch.equal(cover.allowed(rows, keys).int(), times):
        problems.append(f"{tile.q} x {tile.k}: allows other pairs than its blocks")
    return problems


@cache
def band_pairs(band: Band, num_q: int, num_k: int) -> Tensor:
    """bool [num_q, num_k]: the pairs of a band, from its definition."""
    return Distances.of(band, num_q, num_k).pairs(num_q, num_k)


@cache
def band_problems(band: Band, num_q: int, num_k: int) -> list[str]:
    """A tile's band is cut in full rectangles and square causal tiles if it has no upper bound."""
    want, tile = band_pairs(band, num_q, num_k), f"{band} of {num_q} rows and {num_k} keys"
    problems = []
    parts = split_causal(band, num_q, num_k)
    if (parts is None) != (Distances.of(band, num_q, num_k).hi is not None):
        return [*problems, f"{tile}: split is {parts}"]
    times = torch.zeros(want.shape, dtype=torch.int)
    for (q_begin, q_end), (k_begin, k_end), causal in parts or ():
        part = torch.ones(q_end - q_begin, k_end - k_begin, dtype=torch.int)
        if not part.numel() or (causal and part.shape[0] != part.shape[1]):
            problems.append(f"{tile}: part {tuple(part.shape)}, causal={causal}")
        times[q_begin:q_end, k_begin:k_end] += part.tril() if causal else part
    if parts is not None and not torch.equal(times, want.int()):
        problems.append(f"{tile}: split in {parts}, which is not its band")
    return problems


def _fetch_problems(
    layout: Layout, mask: Mask, want: Tensor, schedules: Sequence[Schedule], rank: int, begins: Sequence[int]
) -> list[str]:
    """Rows fetched and served agree, hold all tiles, and are no more than needed where the mask is a band."""
    problems, schedule = [], schedules[rank]
    pieces = [layout.runs(want.shape[-1], len(schedules), holder) for holder in range(len(schedules))]
    exact = not mask.elementwise or "segments" in schedule.covers
    for source, ranges in enumerate(schedule.fetch):
        where = f"rank {rank} from {source}"
        if source == rank:
            problems += [f"{where}: fetches its own {ranges}"] if ranges else []
            continue
        if num_rows(ranges) != schedule.route.needed[rank][source]:
            problems.append(f"{where}: fetches {ranges}, counted {schedule.route.needed[rank][source]} rows")
        if ranges != schedules[source].serve[rank]:
            problems.append(f"{where}: fetches {ranges}, is served {schedules[source].serve[rank]}")
        if any(
            not any(begin <= first and last <= end for begin, end in ranges)
            for tile in tiles_by_source(schedule)[source]
            for first, last in key_ranges(tile)
        ):
            problems.append(f"{where}: a tile reads rows outside of {ranges}")
        if any(before[1] >= after[0] for before, after in pairwise(ranges)):
            problems.append(f"{where}: {ranges} overlap, touch or are unordered")
        block = want[:, begins[rank] : begins[rank + 1], begins[source] : begins[source + 1]]
        needed = needed_rows(block)
        if exact and in_bands(ranges, pieces[rank], pieces[source]) != in_bands(needed, pieces[rank], pieces[source]):
            problems.append(f"{where}: fetches {ranges}, needs {needed}")
        step = (rank - source) % len(schedules)
        if ranges and step not in active_steps(schedule):
            problems.append(f"{where}: step {step} is not among {active_steps(schedule)}")
    return problems


def active_steps(schedule: Schedule) -> tuple[int, ...]:
    """Those in which some rank moves rows."""
    return tuple(step for stage in schedule.route.stages for step in stage.steps)


def num_pairs(schedule: Schedule) -> int:
    """Query-key pairs that the rank computes, an upper bound where tiles are PARTIAL."""
    return sum(pairs_of_tile(tile) for tiles in tiles_by_source(schedule) for tile in tiles)


def pairs_of_tile(tile: Tile) -> int:
    """Of tiles by documents the mean over batch rows, rounded up."""
    if tile.cover == PARTIAL:
        return (tile.q[1] - tile.q[0]) * (tile.k[1] - tile.k[0])
    rows = tile.cover.blocks if isinstance(tile.cover, Segments) else [torch.tensor([[*tile.q, *tile.k]])]
    counts = [pairs_of_band(tile.cover, q_end - q, k_end - k) for x in rows for q, q_end, k, k_end in x.tolist()]
    return -(-sum(counts) // len(rows))


def pairs_of_band(band: Any, num_q: int, num_k: int) -> int:
    """Summed over the rows: the keys between both bounds."""
    aligned = np.arange(num_q) + num_k - num_q
    first = np.maximum(aligned - (NONE if band.left is None else band.left), 0)
    last = np.minimum(aligned + (NONE if band.right is None else band.right) + 1, num_k)
    return int((last - first).clip(min=0).sum())


def key_ranges(tile: Tile) -> list[Rows]:
    """Keys of a tile, or of its blocks."""
    if not isinstance(tile.cover, Segments):
        return [tile.k]
    return [(tile.k[0] + k, tile.k[0] + k_end) for blocks in tile.cover.blocks for _, _, k, k_end in blocks.tolist()]


def in_bands(ranges: Sequence[Rows], queries: Sequence[Run | Index], keys: Sequence[Run | Index]) -> list[int]:
    """The rows of these ranges that are in pieces of keys with which every piece of queries has a band.

    A mask is a band for two runs of one stride, and for a run and a single row. Other pieces are fetched whole.
    """
    banded = [
        all(
            isinstance(q, Run) and isinstance(k, Run) and (1 in (q.length, k.length) or q.stride == k.stride)
            for q in queries
        )
        for k in keys
        for _ in range(k.length)
    ]
    return [row for begin, end in ranges for row in range(begin, end) if banded[row]]


def needed_rows(block: Tensor) -> tuple[Rows, ...]:
    """Ranges of keys of a block [B, rows, keys] that some query may see."""
    seen = [False, *block.bool().flatten(0, 1).any(0).tolist(), False]
    edges = [i for i in range(len(seen) - 1) if seen[i] != seen[i + 1]]
    return tuple(zip(edges[::2], edges[1::2], strict=True))


TOLERANCE = 1e-10
UNITS = 4
B, D, E = 2, 5, 4  # unlike one another, the heads and most lengths, so that mixed-up dims do not fit
MHA, GQA, MQA = (3, 3), (6, 3), (3, 1)


@dataclass(frozen=True)
class Case:
    """A call of `cp_mesh.attention`.

    Attributes:
        layout: a name of `LAYOUTS`, the index of a permutation, or the layout itself.
        mask: a name of `MASKS`, or the mask's options.
        S: length of the whole sequence.
        heads: numbers of query and kv heads.
        memory: how inputs lie in memory, see `laid_out`; one for all, or of q, k, v and dout.
        sizes: batch size and head dims of keys and values, instead of `dims`.
        scores: a name of `SCORES`, or options as `make_scores` takes them.
        head_chunks: as the library takes it.
        method: as the library takes it.
        lse_gradient: whether gradients go through lse too, or "alone"; None: where the kernel is the reference.
        options: other arguments of `cp_mesh.attention`.
        dtype: of q, k and v.
        frozen: names of inputs and of scores that require no gradient.
        way: how the call is made, one of `WAYS` or `BY_FUNCTIONS`.
    """

    layout: str | Sequence[int] | Layout
    mask: str | dict[str, Any]
    S: int
    heads: tuple[int, int] = GQA
    seq_dim: int = 2
    kernel: str = "reference"
    memory: str | tuple[str, ...] = "contiguous"
    scale: float | None = None
    sizes: tuple[int, int, int] | None = None
    scores: str | dict[str, Any] = "plain"
    head_chunks: int | None = None
    method: str = "auto"
    lse_gradient: bool | str | None = None
    options: dict[str, Any] = field(default_factory=dict)
    dtype: torch.dtype = torch.float64
    frozen: tuple[str, ...] = ()
    way: str = "eager"

    @property
    def through_lse(self) -> bool | str:
        return self.kernel == "reference" if self.lse_gradient is None else self.lse_gradient

    @property
    def dims(self) -> tuple[int, int, int]:
        """Batch size and head dims: a packed call has no batch, and only the reference takes unlike head dims."""
        return self.sizes or ((B if self.seq_dim else 1), D, (E if self.kernel == "reference" else D))

    def degree(self, cp_size: int) -> int | None:
        """Of inner groups, if there are several of several ranks."""
        if self.method != "hybrid":
            return None
        degree = self.options.get("ulysses_degree") or largest_degree(cp_size, self.heads)
        return degree if 1 < degree < cp_size else None

    def make_layout(self) -> Layout:
        if isinstance(self.layout, Layout):
            return self.layout
        return LAYOUTS[self.layout](self.S) if isinstance(self.layout, str) else Permuted(self.layout)

    def make_mask(self) -> Mask:
        return make_mask(self.mask, self.dims[0], self.S) if isinstance(self.mask, str) else mask_of(self.mask)

    def make_scores(self) -> dict[str, Any]:
        return make_scores(self.scores, self.dims[0], self.heads[0], self.S)

    def oracle(self, seed: int) -> dict[str, Tensor]:
        """Inputs and results of dense attention on the whole sequence, fp64, [B, H, S, D]."""
        named = isinstance(self.mask, str)
        allowed = pairs(self.mask, self.dims[0], self.S) if named else pairs_of(self.mask, self.S)
        # Masks of the table are cached, so that equal ones are one object; others would be kept for nothing.
        compute = oracle if named and isinstance(self.scores, str) else oracle.__wrapped__
        expanded = self.memory == "expanded"
        given = self.heads, self.dims, expanded, self.through_lse, self.scale, seed, self.scores, self.dtype
        return compute(allowed, *given)


@lru_cache(maxsize=512)
def oracle(
    allowed: Tensor, heads: tuple[int, int], dims: tuple[int, int, int], expanded: bool, through_lse: bool | str,
    scale: float | None, seed: int, scores: str | dict[str, Any], dtype: torch.dtype,
) -> dict[str, Tensor]:  # fmt: skip
    B, D, E = dims
    inputs = tuple(x.double() for x in make_qkv(B, *heads, allowed.shape[-1], D, E, seed=seed, dtype=dtype))
    if expanded:
        inputs = tuple(x[:1].expand_as(x) for x in inputs)
    *qkv, dout = inputs
    qkv = [x.detach().clone().requires_grad_() for x in qkv]
    given = dense_scores(make_scores(scores, B, heads[0], allowed.shape[-1]), B, heads[0], allowed.shape[-1])
    leaves = {name: x.requires_grad_() for name, x in given.items() if isinstance(x, Tensor) and name != "kept"}
    out, lse = dense_attention(*qkv, allowed, scale, **given)
    accumulated = torch.float64 if dtype == torch.float64 else torch.float32
    dlse = torch.randn(lse.shape, dtype=lse.dtype, generator=torch.Generator().manual_seed(seed + 1))
    dlse = dlse.to(accumulated).double()
    results, gradients = ((out, lse), (dout, dlse)) if through_lse else ((out,), (dout,))
    alone = slice(1, None) if through_lse == "alone" else slice(None)
    dq, dk, dv, *others = torch.autograd.grad(
        results[alone], [*qkv, *leaves.values()], gradients[alone], materialize_grads=True
    )
    values = {"out": out, "lse": lse, "dq": dq, "dk": dk, "dv": dv, "dout": dout, "dlse": dlse}
    values |= {f"d{name}": x for name, x in zip(leaves, others, strict=True)}
    return {name: x.detach() for name, x in (values | dict(zip("qkv", qkv, strict=True))).items()}


def dense_scores(options: dict[str, Any], B: int, H: int, S: int) -> dict[str, Any]:
    """The oracle's arguments for options of `cp_mesh.attention`; new tensors."""
    given = {name: x.clone() if isinstance(x, Tensor) else x for name, x in options.items()}
    if (p := given.pop("dropout_p", 0.0)) > 0:
        seed = given.pop("dropout_seed")
        given["kept"] = dense_dropout(B, H, S, p, *(seed.flatten().tolist() if isinstance(seed, Tensor) else [seed]))
    return given


def local_scores(options: dict[str, Any], rows: Tensor, frozen: Sequence[str] = ()) -> dict[str, Any]:
    """The options of a rank that holds these rows; new leaves, but for those that are frozen."""
    given = {name: x.clone() if isinstance(x, Tensor) else x for name, x in options.items()}
    if "bias" in given and given["bias"].shape[2] > 1:
        given["bias"] = given["bias"].index_select(2, rows)
    graded = {name: isinstance(x, Tensor) and x.is_floating_point() and name not in frozen for name, x in given.items()}
    return {name: x.requires_grad_() if graded[name] else x for name, x in given.items()}


def to_format(x: Tensor, seq_dim: int) -> Tensor:
    """[B, H, S, D] or an lse [B, H, S] in the format of a call."""
    if seq_dim == 0:
        return x[0].transpose(0, 1) if x.ndim == 4 else x[0]
    return x.transpose(1, 2) if seq_dim == 1 and x.ndim == 4 else x


def laid_out(x: Tensor, memory: str) -> Tensor:
    """The same values in memory of another shape: a new tensor, unless expanded."""
    match memory:
        case "contiguous":
            return x.clone(memory_format=torch.contiguous_format)
        case "strided":  # the last dim is contiguous, as in a projection of all heads at once
            return x.transpose(0, -2).clone(memory_format=torch.contiguous_format).transpose(0, -2)
        case "transposed":
            return x.transpose(0, -1).clone(memory_format=torch.contiguous_format).transpose(0, -1)
        case "sliced":  # every other element of NaNs, in every dim
            inside = x.new_full([2 * size + 1 for size in x.shape], torch.nan)[(slice(1, None, 2),) * x.ndim]
            return inside.copy_(x)
        case "expanded":  # the batch has stride 0
            return x[:1].clone().expand_as(x)
    raise ValueError(memory)


def _checkpointed(*qkv: Tensor, **options: Any) -> Any:
    return checkpoint(lambda *x: cp_mesh.attention(*x, **options), *qkv, use_reentrant=False)


def _saved(*qkv: Tensor, **options: Any) -> Any:
    given = {"use_reentrant": False, "context_fn": cp_mesh.training.checkpoint_context_fn}
    return checkpoint(lambda *x: cp_mesh.attention(*x, **options), *qkv, **given)


def _cast(*qkv: Tensor, **options: Any) -> Any:
    with torch.autocast("cpu", torch.bfloat16):
        return cp_mesh.attention(*qkv, **options)


def _compared(*qkv: Tensor, **options: Any) -> Any:
    with cp_mesh.check_mode():
        return cp_mesh.attention(*qkv, **options)


def _compiled(*qkv: Tensor, **options: Any) -> Any:
    torch._dynamo.reset()  # else the calls before count against the limit of recompilations
    return torch.compile(cp_mesh.attention, backend="aot_eager", fullgraph=True)(*qkv, **options)


WAYS: dict[str, Callable[..., Any]] = {
    "eager": lambda *qkv, **options: cp_mesh.attention(*qkv, **options),
    "checkpoint": _checkpointed,
    "selective checkpoint": _saved,
    "autocast": _cast,  # which leaves float64 as it is
    "check mode": _compared,
    "compiled": _compiled,
}
"""How `cp_mesh.attention` can be called."""


def _with_score_mod(*qkv: Tensor, alibi_slopes: Tensor, **options: Any) -> Any:
    def score_mod(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return score - alibi_slopes[h] * (q_idx - kv_idx).abs()

    return cp_mesh.flex_attention(*qkv, score_mod, enable_gqa=True, **options)


def _with_mask_mod(*qkv: Tensor, mask: Mask, seq_len: int, **options: Any) -> Any:
    assert mask.spec() == Mask().spec()

    def causal(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return q_idx >= kv_idx

    block_mask = cp_mesh.flex.create_block_mask(causal, None, None, seq_len, seq_len)
    return cp_mesh.flex_attention(*qkv, None, block_mask, enable_gqa=True, seq_len=seq_len, **options)


def _with_functions(
    *qkv: Tensor,
    mask: Mask,
    seq_len: int,
    softcap: float | None = None,
    alibi_slopes: Tensor | None = None,
    **options: Any,
) -> Any:
    left, right = mask.window or (None, None)
    end = seq_len if mask.length is None else mask.length
    given = mask.documents, mask.key_padding, mask.blocks
    ids, keep, image = (None if x is None else torch.atleast_2d(x) for x in given)

    def score_mod(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        score = score if softcap is None else softcap * torch.tanh(score / softcap)
        return score if alibi_slopes is None else score - alibi_slopes[h] * (q_idx - kv_idx).abs()

    def mask_mod(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        seen = (kv_idx < end) & (q_idx - kv_idx <= (seq_len if left is None else left))
        seen = seen & (kv_idx - q_idx <= (seq_len if right is None else right))
        if mask.causal:
            ahead = kv_idx < mask.prefix
            if image is not None:
                row = b % len(image)
                ahead = ahead | (image[row, q_idx] == image[row, kv_idx]) & (image[row, kv_idx] >= 0)
            seen = seen & ((q_idx >= kv_idx) | ahead)
        if ids is not None:
            row = b % len(ids)
            seen = seen & (ids[row, q_idx] == ids[row, kv_idx]) & (ids[row, kv_idx] >= 0)
        return seen if keep is None else seen & keep[b % len(keep), kv_idx]

    block_mask = cp_mesh.flex.create_block_mask(mask_mod, None, None, seq_len, seq_len)
    return cp_mesh.flex_attention(
        *qkv, score_mod, block_mask, mask=Mask(causal=False), enable_gqa=True, seq_len=seq_len, **options
    )


BY_FUNCTIONS = {"score_mod": _with_score_mod, "mask_mod": _with_mask_mod, "functions": _with_functions}
"""Calls of `cp_mesh.flex_attention` that say ALiBi, or the causal mask, by a function; or all but sinks and biases."""


def call(
    qkv: Sequence[Tensor], gradients: list[Tensor], through_lse: bool | str, options: dict[str, Any], way: str = "eager"
) -> dict[str, Tensor]:
    """Results of a call of `cp_mesh.attention` and the gradients of what requires one, under "d" and its name.

    They go through lse too, or through lse "alone", where that is possible.
    """
    given, attend = dict(zip("qkv", qkv, strict=True)) | options, (WAYS | BY_FUNCTIONS)[way]
    leaves = {name: x for name, x in given.items() if isinstance(x, Tensor) and x.requires_grad}
    if through_lse:
        out, lse = attend(*qkv, return_lse=True, **options)
        results = [out, lse]
    else:
        with torch.no_grad():
            _, lse = attend(*qkv, return_lse=True, **options)
        out = attend(*qkv, **options)
        results, gradients = [out], gradients[:1]
    if through_lse == "alone":
        results, gradients = results[1:], gradients[1:]
    found = torch.autograd.grad(results, [*leaves.values()], gradients) if leaves else ()
    return {"out": out, "lse": lse} | {f"d{name}": x for name, x in zip(leaves, found, strict=True)}


def tolerances(case: Case, whole: dict[str, Tensor]) -> Callable[[str], float]:
    """What each result may be off by: in float64 as in all gates.

    Of others a few units in the last place of the largest number that its sums could hold: that finds what is wrong, in
    float32 at least; how often sums are rounded is found by gates of their own.
    """
    if case.dtype == torch.float64 or not case.S:
        return lambda name: TOLERANCE
    q, k, v, dout, dlse = (max(1.0, whole[name].abs().max().item()) for name in ("q", "k", "v", "dout", "dlse"))
    (_, D, E), rows, scale = case.dims, case.S * case.heads[0] // case.heads[1], max(1.0, case.scale or 0.0)
    score, of_score = D * q * k * scale + case.S, E * v * dout + dlse
    sizes = {"out": v, "lse": 1, "dq": of_score * k * scale, "dk": of_score * q * scale * rows, "dv": dout * rows}
    unit = UNITS * torch.finfo(case.dtype).eps * score / (1 - case.make_scores().get("dropout_p", 0.0))
    return lambda name: unit * sizes.get(name, of_score * rows * case.S)


def parity(
    case: Case, axis: DeviceMesh, partial: list[tuple[str, Tensor, Tensor, float]], seed: int = 0, told: Any = None
) -> list[str]:
    """What is wrong with this rank's part of a call: results and gradients equal the oracle's, inputs are untouched.

    Gradients that are sums over ranks are added to ``partial``: a name, this rank's part, the whole, and what it may be
    off by. ``told``: what the call is given as ``mesh``, if not the axis.
    """
    layout, (_, _, v_dim) = case.make_layout(), case.dims
    rows = layout.positions(case.S, axis.size(), axis.get_local_rank())
    whole = case.oracle(seed)
    scores = case.make_scores()
    of_scores = {f"d{name}" for name in scores}
    shared = {name for name in of_scores & set(whole) if whole[name].ndim < 4 or whole[name].shape[2] == 1}
    local = {name: x.index_select(2, rows) for name, x in whole.items() if name not in shared}
    want = {name: x if name in of_scores else to_format(x, case.seq_dim) for name, x in local.items()}
    memories = (case.memory,) * 4 if isinstance(case.memory, str) else case.memory
    inputs = zip(("q", "k", "v", "dout"), memories, strict=True)
    given = {name: laid_out(want[name].to(case.dtype), memory) for name, memory in inputs}
    before = {name: x.clone() for name, x in given.items()}
    qkv = [given[name].requires_grad_(name not in case.frozen) for name in "qkv"]
    accumulated = torch.float64 if case.dtype == torch.float64 else torch.float32
    options = {"mesh": told or axis, "seq_dim": case.seq_dim, "seq_len": case.S, "layout": layout}
    options |= {"mask": case.make_mask(), "scale": case.scale, "kernel": case.kernel}
    options |= {"head_chunks": case.head_chunks, "method": case.method}
    options |= local_scores(scores, rows, case.frozen) | case.options
    got = call(qkv, [given["dout"], want["dlse"].to(accumulated)], case.through_lse, options, case.way)
    problems, tolerance = [], tolerances(case, whole)
    for name, value in got.items():
        if value.dtype != (dtype := {"lse": accumulated}.get(name, torch.float64 if name in of_scores else case.dtype)):
            problems.append(f"{case}: {name} is {value.dtype}, not {dtype}")
        if name in shared:
            partial.append((f"{case}: {name}", value.double(), whole[name], tolerance(name)))
        elif not (off := gap(value, want[name])) <= tolerance(name):
            problems.append(f"{case}: {name} is off by {off:.1e}")
    problems += [f"{case}: {name} was written" for name, x in given.items() if not torch.equal(x, before[name])]
    if not lies_as(got["out"], given["q"]) or got["out"].shape[-1] != v_dim:
        problems.append(f"{case}: out is {tuple(got['out'].shape)} with strides {got['out'].stride()}")
    return problems


def lies_as(x: Tensor, like: Tensor) -> bool:
    """Whether a tensor is dense and has its dims in memory in the order of another, the last one last."""
    order = sorted(range(x.ndim - 1), key=like.stride, reverse=True)
    return x.permute(*order, x.ndim - 1).is_contiguous()


def serves(
    method: str, cp_size: int, heads: tuple[int, int], head_chunks: int | None, degree: int | None = None
) -> bool:
    """Whether a method computes so many query and kv heads in so many chunks; else it must refuse."""
    num_heads, kv_heads = heads
    if method in ("ulysses", "hybrid"):
        degree = cp_size if method == "ulysses" else degree or largest_degree(cp_size, heads)
        if num_heads % degree or cp_size % degree:
            return False
        # A rank's query heads in groups as large as divide both its heads and those of one kv head.
        kv_heads = num_heads // degree // math.gcd(num_heads // degree, num_heads // kv_heads)
    return kv_heads % (head_chunks or 1) == 0


def largest_degree(cp_size: int, heads: tuple[int, int]) -> int:
    """What the hybrid takes by itself: of the divisors of the ranks, the largest that divides kv heads, or else q's."""
    divisors = [n for n in range(2, cp_size + 1) if cp_size % n == 0]
    dividing = ([n for n in divisors if num % n == 0] for num in (heads[1], heads[0]))
    return next((found[-1] for found in dividing if found), 1)


def parity_on_ranks(
    rank: int, shape: tuple[int, ...], names: tuple[str, ...], cases: Sequence[Case], recorded: bool = False,
    told: str = "axis",
) -> list[str]:  # fmt: skip
    """`parity` of all cases on the axis "cp" of a mesh; each cp group has data of its own.

    ``told``: as what the axis is passed; "axes": all axes whose names begin with "cp" are the cp axis together.
    """
    grid = mesh(shape, names)
    axes = tuple(name for name in names if name[:2] == "cp")
    axis = flat(grid[axes]) if told == "axes" else grid["cp"]
    passed = {"axis": axis, "group": axis.get_group(), "axes": grid[axes]}[told]
    places = dict(zip(names, grid.get_coordinate(), strict=True))
    seed = sum(10 * (i + 1) * places[name] for i, name in enumerate(names) if name not in axes)
    problems: list[str] = []
    for case in cases:
        partial: list[tuple[str, Tensor, Tensor, float]] = []
        try:
            degree = case.degree(axis.size())
            divides = degree is None or axis.size() % degree == 0  # else the call is refused
            with recording(axis, degree) if recorded and divides else nullcontext() as notes:
                problems += parity(case, axis, partial, seed, passed)
            for name, part, whole, allowed in partial:
                dist.all_reduce(part, group=axis.get_group())
                if not (off := gap(part, whole)) <= allowed:
                    problems.append(f"{name} summed over ranks is off by {off:.1e}")
            problems += [f"{case}: {problem}" for problem in notes.problems] if notes else []
        except Exception as error:
            error.add_note(f"in {case}")
            raise
    return [f"rank {rank}: {problem}" for problem in problems]


def report(results: Iterable[Iterable[str]]) -> None:
    """Fails the test with all problems that the ranks found, the first ones in words."""
    problems = [problem for result in results for problem in result]
    if problems:
        pytest.fail("\n".join([f"{len(problems)} problems", *problems[:20]]), pytrace=False)
