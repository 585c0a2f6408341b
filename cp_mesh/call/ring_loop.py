"""Attention in stages of fetched keys, on local tensors: the ring and all-gather, and parts of Ulysses.

Ring attention, Liu et al. 2023 (arXiv:2310.01889), fetches from a few source ranks per stage: the wait for the first
stage is short, and buffers hold two stages. All-gather, Llama 3 (arXiv:2407.21783), has one stage, for the fewest
kernel calls and collectives, and holds all fetched rows at once. Both send only rows that some query of the receiver
may see.

Who owns what on rank r, in the stage that visits sources s, s', ...:

    q, out, lse, dq    this rank's rows, for the whole call; the kernel's pass holds partial sums
    k, v               this rank's rows; sent to the ranks that need them
    k_s, v_s           the rows of the sources that this rank's queries need; received, read in one stage, dropped
    dk_s, dv_s         this rank's contribution to the gradient of *k_s, v_s*; written to the transport's buffer and
                       sent to the owners, which alone add it to their dk, dv

The next stage is always fetched while one is computed. The forward computes the local tiles first, which hides the
first fetch; the backward computes them last, which hides the last delivery of dk and dv.

Heads may be computed in chunks, one after the other, so that buffers hold one chunk.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from itertools import chain
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from cp_mesh.call.method import Backward, Method, Plan, takes_one_tile
from cp_mesh.call.spec import AttentionSpec, Operand
from cp_mesh.comm.contract import Freight
from cp_mesh.comm.exchange import Transport, transport_maker
from cp_mesh.comm.packing import Packing
from cp_mesh.errors import refuse
from cp_mesh.geometry.layouts import Layout
from cp_mesh.geometry.mask import Mask
from cp_mesh.geometry.schedule import Grouping, Schedule, in_one_stage, in_rising_stages, make_schedule
from cp_mesh.geometry.survey import Seen
from cp_mesh.kernels.combine import RowSum, accumulation_dtype, copy_together, dense_like, finish_sums, make_delta
from cp_mesh.kernels.merge import Kernel, MergingForward, SummingBackward
from cp_mesh.kernels.scores import ScoreGradients, Scores
from cp_mesh.kernels.scores.sinks import gradient_of_sinks, include_sinks, share_of_keys

CHUNK_BYTES = 512 << 20  # bytes of K and V that a rank fetches, for the heads of one chunk


class StageSettings(NamedTuple):
    """The settings of a call.

    Attributes:
        head_chunks: parts of the kv heads that are computed one after the other.
        gradient_dtype: the dtype in which dk and dv are sent: q's dtype if the kernel rounds them and a message has at
            most one contribution to a row; else the accumulation dtype, so that every sum is rounded once.
        degree: ranks that exchange heads for rows.
        repeats: how often they send each kv head.
        home_dtype: the dtype in which their all-to-all returns dk and dv: q's if these are complete sums, else the
            accumulation dtype; None without one.
    """

    head_chunks: int
    gradient_dtype: torch.dtype
    degree: int = 1
    repeats: int = 1
    home_dtype: torch.dtype | None = None


def travels_rounded(kernel: Kernel, schedule: Schedule, features: Collection[str]) -> bool:
    """Whether dk and dv are sent as the kernel rounded them: a message has at most one contribution to a row."""
    return kernel.rounds and (takes_one_tile(kernel, schedule, features) or not schedule.overlapping)


def choose_head_chunks(wanted: int, q: Operand, k: Operand, v: Operand, schedule: Schedule) -> int:
    """The number of chunks ``wanted``; if 0, the fewest in which no rank fetches over `CHUNK_BYTES` of K and V."""
    num_kv_heads = k.shape[1]
    if wanted:
        if num_kv_heads % wanted:
            near = max(n for n in range(1, wanted + 1) if num_kv_heads % n == 0)
            expected = f"a divisor of the {num_kv_heads} kv heads"
            refuse("head_chunks", expected, wanted, f"head_chunks={near} works")
        return wanted
    total = q.shape[0] * schedule.route.most_fetched * num_kv_heads * (k.shape[3] + v.shape[3]) * k.dtype.itemsize
    return next((n for n in range(1, num_kv_heads) if num_kv_heads % n == 0 and total <= n * CHUNK_BYTES), num_kv_heads)


def forward_of_heads(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scores: Scores,
    plan: Plan,
    group: dist.ProcessGroup,
    into: tuple[Tensor, Tensor] | None,
) -> tuple[Tensor, Tensor]:
    """out and lse of these heads, written to ``into`` or to new tensors."""
    transport = _open_transport(plan, group, k, v)
    try:
        forward = MergingForward(plan.kernel, q, plan.v_head_dim, scores)
        if local_tiles := plan.tiles(None):
            forward.step(k, v, local_tiles)
        for stage in plan.schedule.route.stages:
            assert transport is not None
            if (fetched := transport.arrived(stage)) is not None:
                forward.step(fetched[0], fetched[1], plan.tiles(stage))
            del fetched  # before the next stage
        return forward.finish(into)
    finally:
        if transport is not None:
            transport.end()


class BackwardRows(NamedTuple):
    """Inputs of the tiles of a backward for this rank's rows, with sinks and the gradient of lse already applied.

    Attributes:
        dout: [B, H, S_local, Dv].
        out_or_delta: delta [B, H, S_local] for a kernel that uses it, else out.
        lse: [B, H, S_local].
        scores: with ``wanted`` set to the tensors whose gradients tiles compute.
        of_scores: the gradient of sinks, if wanted.
    """

    dout: Tensor
    out_or_delta: Tensor
    lse: Tensor
    scores: Scores
    of_scores: dict[str, Tensor]


def begin_backward(given: Backward, kernel: Kernel) -> BackwardRows:
    """Prepare the tiles of a backward, on some rows and heads."""
    dout, *_, out, lse, dlse, _, scores, wanted = given
    of_scores = {}
    scores = replace(scores, wanted=frozenset(wanted) - {"sinks"}) if wanted else scores
    if (sinks := scores.sinks) is not None:
        if "sinks" in wanted:
            of_scores["sinks"] = gradient_of_sinks(dout, out, lse, sinks)
        if dlse is None:
            lse = include_sinks(lse, sinks)
        else:
            dout = (dout * share_of_keys(lse, sinks)[..., None]).to(dout.dtype)  # rounded once
    return BackwardRows(dout, make_delta(dout, out, dlse) if kernel.uses_delta else out, lse, scores, of_scores)


def backward_of_heads(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out_or_delta: Tensor,
    lse: Tensor,
    *into: Tensor,
    scores: Scores,
    plan: Plan,
    group: dist.ProcessGroup,
    round_to: torch.dtype | None = None,
) -> tuple[tuple[Tensor, ...], ScoreGradients]:
    """dq, dk and dv of these heads, written to ``into`` or to new tensors. Fetches keys and delivers their gradients.

    ``round_to`` is for a caller that copies the results: they may then have the kernel's dtype and any strides, and
    dk and dv that are summed are rounded to the dtype ``round_to``.
    """
    transport = _open_transport(plan, group, k, v)
    try:
        out, delta = (None, out_or_delta) if plan.kernel.uses_delta else (out_or_delta, None)
        backward = SummingBackward(plan.kernel, dout, q, out, lse, delta, scores)
        dk_sum, dv_sum = RowSum(k.shape, backward.dtype, k.device), RowSum(v.shape, backward.dtype, v.device)
        for stage in plan.schedule.route.stages:
            assert transport is not None
            fetched, written = transport.arrived(stage), transport.buffer(stage)
            if fetched is not None and written is not None:
                backward.step(fetched[0], fetched[1], plan.tiles(stage), (written[0], written[1]))
            del fetched, written  # as in the forward
            for begin, dk, dv in transport.collect():
                dk_sum.add(begin, dk)
                dv_sum.add(begin, dv)
            transport.send(stage)
        local_tiles = plan.tiles(None)
        local_pieces = backward.step(k, v, local_tiles) if local_tiles else []
        # after all deliveries, so that every transport adds in the same order
        for begin, dk, dv in chain(() if transport is None else transport.collect(), local_pieces):
            dk_sum.add(begin, dk)
            dv_sum.add(begin, dv)
        dq_sum = backward.dq
        if round_to is not None:
            results = dq_sum.result(q, q.dtype), dk_sum.result(k, round_to), dv_sum.result(v, round_to)
            return results, backward.of_scores
        if not any(plan.schedule.serve):  # each piece is a kernel's own tensor
            dq, dk, dv = into or (dq_sum.ready(q), dk_sum.ready(k), dv_sum.ready(v))
        else:
            dq, dk, dv = into or (dense_like(q), dense_like(k), dense_like(v))
        finish_sums([(dq_sum, dq), (dk_sum, dk), (dv_sum, dv)])
        return (dq, dk, dv), backward.of_scores
    finally:
        if transport is not None:
            transport.end()


def _open_transport(plan: Plan, group: dist.ProcessGroup, k: Tensor, v: Tensor) -> Transport | None:
    """Start to move the rows of k and v for one pass over one chunk of heads; None if no rows are fetched."""
    schedule, prepared, key = plan.schedule, plan.prepared, ("freight", k.shape, v.shape)
    if not schedule.route.stages:
        return None  # a transport takes host time
    if (bound := prepared.get(key)) is None:  # the plan's first pass, after ranks compared the call
        make = transport_maker(plan.options.transport, group, plan.device)
        keys, gradients = Packing.of((k, v)), Packing.of((k, v), plan.settings.gradient_dtype)
        bound = prepared[key] = make, Freight(schedule.route, schedule.shard_lens, keys, gradients, copy_together)
    make, freight = bound
    transport: Transport = make(group)
    try:
        transport.publish((k, v), freight)
    except BaseException:
        transport.end()
        raise
    return transport


def _by_head_chunks(tensors: tuple[Tensor, ...], num: int) -> list[tuple[tuple[int, int], tuple[Tensor, ...]]]:
    """Views of [B, heads, ...] tensors, one chunk of the kv heads after the other, with the query heads that read them.

    The first tensor has query heads; the range of these comes with the views.
    """
    heads = tensors[0].shape[1] // num
    if num == 1:  # a view of each tensor would cost the host time of a kernel launch
        return [((0, heads), tensors)]
    chunks = zip(*(x.chunk(num, dim=1) for x in tensors), strict=True)
    return [((i * heads, (i + 1) * heads), chunk) for i, chunk in enumerate(chunks)]


class Stages(Method):
    """A ring, or one of its kind, that fetches from sources in stages by ``groups``."""

    def __init__(self, name: str, groups: Grouping = in_rising_stages) -> None:
        super().__init__(name)
        self._groups = groups

    def make_schedule(
        self, layout: Layout, mask: Mask, seq_len: int, cp_size: int, cp_rank: int, segments: bool = False,
        degree: int = 1, sources: Seen | None = None,
    ) -> Schedule:  # fmt: skip
        return make_schedule(layout, mask, seq_len, cp_size, cp_rank, segments, self._groups, sources=sources)

    def settings(
        self, options: AttentionSpec, q: Operand, k: Operand, v: Operand, schedule: Schedule, kernel: Kernel,
        features: Collection[str], degree: int,
    ) -> StageSettings:  # fmt: skip
        rounded = travels_rounded(kernel, schedule, features)
        dtype = q.dtype if rounded else accumulation_dtype(q.dtype)
        return StageSettings(choose_head_chunks(options.head_chunks, q, k, v, schedule), dtype)

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, scores: Scores, plan: Plan, group: dist.ProcessGroup
    ) -> tuple[Tensor, ...]:
        """See `Method`."""
        if plan.settings.head_chunks == 1:
            return forward_of_heads(q, k, v, scores, plan, group, None)
        out = dense_like(q, plan.v_head_dim)
        lse = q.new_empty(q.shape[:3], dtype=accumulation_dtype(q.dtype))
        for heads, (q_c, k_c, v_c, out_c, lse_c) in _by_head_chunks((q, k, v, out, lse), plan.settings.head_chunks):
            forward_of_heads(q_c, k_c, v_c, scores.heads(*heads), plan, group, (out_c, lse_c))
        return out, lse

    def backward(
        self, given: Backward, plan: Plan, group: dist.ProcessGroup
    ) -> tuple[Tensor, Tensor, Tensor, dict[str, Tensor]]:
        """See `Method`."""
        rows, qkv, num = begin_backward(given, plan.kernel), given[1:4], plan.settings.head_chunks
        of_tiles = ScoreGradients.zeros(rows.scores, accumulation_dtype(given.q.dtype)) if rows.scores.wanted else None
        # for a single chunk they are allocated at its end, when the kernels' own buffers are free
        grads = tuple(map(dense_like, qkv)) if num > 1 else ()
        for heads, chunk in _by_head_chunks((rows.dout, *qkv, rows.out_or_delta, rows.lse, *grads), num):
            of_heads = rows.scores if num == 1 else rows.scores.heads(*heads)
            written, of_chunk = backward_of_heads(*chunk, scores=of_heads, plan=plan, group=group)
            if of_tiles is not None:
                of_tiles.part(heads=heads).add_(of_chunk)
        dq, dk, dv = grads or written
        return dq, dk, dv, rows.of_scores if of_tiles is None else rows.of_scores | of_tiles


RING, ALL_GATHER = Stages("ring"), Stages("all_gather", in_one_stage)
