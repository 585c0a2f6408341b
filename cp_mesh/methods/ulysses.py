"""Ulysses, Jacobs et al. 2023 (arXiv:2309.14509): each rank computes some heads of the rows of all ranks.

An all-to-all gives a rank the rows of the ranks beside it, its inner group, for its heads; another one brings out and
lse home. Among these rows it computes as one rank of a ring whose ranks are the inner groups (`joined.py`). Of plain
Ulysses the inner group is the whole cp group: the ring has one rank, and its kernels see the problem of one device, the
mask as it is, in one contiguous shard, whatever the layout. `hybrid.py` has smaller groups. Who owns what, with U ranks
in an inner group and h = H / U:

    q, k, v, out, lse    [B, heads, S_local, D], all heads of this rank's rows
    q_h, k_h, ...        [B, h, rows of the group, D], this rank's heads, in the order of the joined shard

Where kv heads do not divide by U each is sent several times, as many as make the groups of query heads equal on every
rank; its gradients are then summed in fp32 where it came from. Terms of the scores by head are cut to the rank's heads,
and rows of a bias travel as those of q do. Sinks and delta are dealt with before, on the rank's own rows.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import replace
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from cp_mesh.call import Operand, Options
from cp_mesh.errors import UnsupportedError, refuse
from cp_mesh.groups import parts_of
from cp_mesh.kernels.combine import accumulation_dtype, dense_like
from cp_mesh.kernels.contract import Kernel
from cp_mesh.kernels.scores import TERMS, ScoreGradients, Scores
from cp_mesh.layouts import Layout, Piece, Run
from cp_mesh.masks import Mask
from cp_mesh.methods.contract import Method, Plan, stream_of
from cp_mesh.methods.joined import join, rows_of_group
from cp_mesh.methods.stages import (
    backward_by_stages,
    backward_of_heads,
    begin_backward,
    forward_by_stages,
    forward_of_heads,
)
from cp_mesh.methods.stages import settle as settle_stages
from cp_mesh.schedule import Schedule, make_schedule
from cp_mesh.transport import choose_transport, make_swaps
from cp_mesh.transport.contract import Swaps
from cp_mesh.transport.heads import HeadExchange, Home

Places = tuple[list[int], Tensor | None]


class UlyssesSettings(NamedTuple):
    """What is decided for a call.

    Attributes:
        head_chunks: parts of a rank's heads that are exchanged and computed one after the other.
        gradient_dtype: in which dk and dv travel between inner groups, as in `StageSettings`.
        degree: ranks of an inner group.
        repeats: how often each kv head is sent.
        home_dtype: in which dk and dv travel home: rounded where they are complete, else the accumulation dtype.
    """

    head_chunks: int
    gradient_dtype: torch.dtype
    degree: int
    repeats: int
    home_dtype: torch.dtype


def choose_degree(options: Options, q: Operand, k: Operand, cp_size: int) -> int:
    """All ranks; see `Method.choose_degree`."""
    num_heads = q.shape[1]
    if num_heads % cp_size:
        near = max(n for n in range(1, cp_size) if num_heads % n == 0)
        expected = f"a multiple of the {cp_size} cp ranks"
        hint = f"method='ring' works{f', or {near} cp ranks' if near > 1 else ''}"
        refuse("method='ulysses': query heads", expected, num_heads, hint, UnsupportedError)
    return cp_size


def schedule_of_groups(
    layout: Layout, mask: Mask, seq_len: int, cp_size: int, cp_rank: int, segments: bool = False, degree: int = 0
) -> Schedule:
    """The schedule of a ring of inner groups, of all ranks if no ``degree`` is given; see `Method.make_schedule`."""
    degree = degree or cp_size
    joined = join(layout, degree, cp_size)
    return make_schedule(joined, mask, seq_len, cp_size // degree, cp_rank // degree, segments)


def settle(
    options: Options, q: Operand, k: Operand, v: Operand, schedule: Schedule, kernel: Kernel,
    features: Collection[str], degree: int,
) -> UlyssesSettings:  # fmt: skip
    """The settings of a call; see `Method.settle`."""
    num_heads, num_kv_heads = q.shape[1], k.shape[1]
    per_kv_head, of_rank = num_heads // num_kv_heads, num_heads // degree
    group = math.gcd(per_kv_head, of_rank)  # consecutive query heads that read one kv head, on every rank alike
    wanted, of_kv = options.head_chunks, of_rank // group
    if wanted and of_kv % wanted:
        near = max(n for n in range(1, wanted) if of_kv % n == 0)
        expected, hint = f"a divisor of the {of_kv} kv heads of a rank", f"head_chunks={near} works, or method='ring'"
        refuse(f"method={options.method!r}: head_chunks", expected, wanted, hint)
    k_h, v_h = (x._replace(shape=torch.Size((x.shape[0], of_kv, *x.shape[2:]))) for x in (k, v))
    staged, repeats = settle_stages(options, q, k_h, v_h, schedule, kernel, features, degree), per_kv_head // group
    return UlyssesSettings(*staged, degree, repeats, q.dtype if repeats == 1 else accumulation_dtype(q.dtype))


def forward(q: Tensor, k: Tensor, v: Tensor, plan: Plan, group: dist.ProcessGroup) -> tuple[Tensor, Tensor]:
    """Attention of this rank's queries over all keys; see `cp_mesh.methods.stages.forward_by_stages`."""
    if plan.settings.degree == 1:
        return forward_by_stages(q, k, v, plan, group)
    out, lse = dense_like(q, v.shape[3]), q.new_empty(q.shape[:3], dtype=accumulation_dtype(q.dtype))

    def compute(scores: Scores, qkv: Sequence[Tensor]) -> Home:  # a function, so that what arrived is given back
        q_h, k_h, v_h = call.exchange.to_heads(qkv)()
        batch, heads = q_h.shape[:2]
        home = call.exchange.home(((batch, heads, v.shape[3], q.dtype), (batch, heads, 1, lse.dtype)), q.device)
        out_h, lse_h = home.tensors
        forward_of_heads(q_h, k_h, v_h, scores, call.plan, call.outer, (out_h, lse_h[..., 0]))
        return home

    with _opened(plan, group, q.shape[1], plan.scores) as call:
        tensors = q, call.repeated(k), call.repeated(v), out, lse[..., None]
        for scores, (*qkv, out_part, lse_part) in call.by_parts(tensors):
            for part, x in zip((out_part, lse_part), compute(scores, qkv).send()(), strict=True):
                part.copy_(x)
    return out, lse


def backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    dlse: Tensor | None,
    plan: Plan,
    group: dist.ProcessGroup,
    wanted: Collection[str] = (),
) -> tuple[Tensor, Tensor, Tensor, dict[str, Tensor]]:
    """Gradients; see `cp_mesh.methods.stages.backward_by_stages`."""
    if plan.settings.degree == 1:
        return backward_by_stages(dout, q, k, v, out, lse, dlse, plan, group, wanted)
    given, dtype = begin_backward(dout, out, lse, dlse, plan, wanted), plan.settings.home_dtype
    uses_delta = plan.kernel.uses_delta

    def compute(scores: Scores, parts: Sequence[Tensor]) -> tuple[Home, ScoreGradients]:  # as in the forward
        dout_h, q_h, k_h, v_h, out_or_delta_h, lse_h = call.exchange.to_heads(parts)()
        likes = [(*x.shape[:2], x.shape[3], own) for x, own in ((q_h, q.dtype), (k_h, dtype), (v_h, dtype))]
        home = call.exchange.home(likes, q.device)
        # kernels read numbers of rows with stride 1
        out_or_delta_h = out_or_delta_h[..., 0].contiguous() if uses_delta else out_or_delta_h
        tensors = dout_h, q_h, k_h, v_h, out_or_delta_h, lse_h[..., 0].contiguous(), *home.tensors
        return home, backward_of_heads(*tensors, scores=scores, plan=call.plan, group=call.outer)[1]

    with _opened(plan, group, q.shape[1], given.scores) as call:
        of_scores, heads = ScoreGradients.zeros(call.scores, accumulation_dtype(q.dtype)), 0
        out_or_delta = given.out_or_delta[..., None] if uses_delta else given.out_or_delta
        inputs = given.dout, q, call.repeated(k), call.repeated(v), out_or_delta, given.lse[..., None]
        dq, dk, dv = dense_like(q), call.sent_back(k), call.sent_back(v)
        for scores, (*parts, dq_part, dk_part, dv_part) in call.by_parts((*inputs, dq, dk, dv)):
            home, of_part = compute(scores, parts)
            of_scores.part(heads=(heads, heads + dq_part.shape[2])).add_(of_part)
            heads += dq_part.shape[2]
            for part, x in zip((dq_part, dk_part, dv_part), home.send()(), strict=True):
                part.copy_(x)
        shares = call.shares(given.scores, of_scores)
    return dq, call.summed(dk, k), call.summed(dv, v), given.of_scores | shares


@contextmanager
def _opened(plan: Plan, group: dist.ProcessGroup, num_heads: int, scores: Scores) -> Iterator[_Call]:
    degree, name = plan.settings.degree, plan.options.transport
    # Of a ring of one rank nothing travels, and nothing is asked of its group.
    outer, inner = (group, group) if degree == group.size() else parts_of(group, degree)
    if name == "symmetric_memory" and degree < group.size() and plan.seq_len:
        choose_transport(name, group, plan.device)  # parts of a group may differ in what they have
    places = _places(plan, degree, group)
    with closing(make_swaps(name, inner, sum(places[0]), plan.device)) as swaps:
        yield _Call(plan, outer, inner, swaps, places, num_heads, scores)


class _Call:
    """What one pass needs to compute this rank's heads.

    Attributes:
        outer: the group of the ring.
        exchange: heads against rows, in the inner group.
        plan: of the ring of inner groups.
        scores: of this rank's heads, and the rows of its inner group.
    """

    def __init__(
        self,
        plan: Plan,
        outer: dist.ProcessGroup,
        inner: dist.ProcessGroup,
        swaps: Swaps,
        places: Places,
        num_heads: int,
        scores: Scores,
    ) -> None:
        self.outer, self._size, self._settings = outer, inner.size(), plan.settings
        shard_lens, order = places
        cp_size = plan.schedule.cp_size * self._size
        self.exchange = HeadExchange(swaps, inner, shard_lens, order)
        self.plan = replace(plan, layout=join(plan.layout, self._size, cp_size))
        self._own_rows, of_rank = shard_lens[inner.rank()], num_heads // self._size
        self._heads = inner.rank() * of_rank, (inner.rank() + 1) * of_rank
        self.scores = scores.heads(*self._heads)
        # Of a rank with one row a bias may be that of all rows, or of its own.
        self._bias_travels = scores.bias is not None and (scores.bias.shape[2] != 1 or min(shard_lens) < 2)
        if scores.bias is not None and self._bias_travels:
            bias = scores.bias.expand(-1, -1, self._own_rows, -1)
            alike = bias.shape[1] == 1  # for all heads
            by_rank = bias[:, None].expand(-1, self._size, -1, -1, -1) if alike else bias.unflatten(1, (self._size, -1))
            self.scores = replace(self.scores, bias=self.exchange.to_heads((by_rank,))()[0])

    def by_parts(self, tensors: Sequence[Tensor]) -> Iterator[tuple[Scores, tuple[Tensor, ...]]]:
        """Views [B, U, heads, S_local, D] of [B, heads, S_local, D] tensors, a chunk of each rank's at a time.

        With them come the scores of this rank's chunk; the first tensor has query heads.
        """
        chunks = self._settings.head_chunks
        by_rank = [x.unflatten(1, (self._size, chunks, x.shape[1] // (self._size * chunks))) for x in tensors]
        num_heads = by_rank[0].shape[3]
        for chunk in range(chunks):
            heads = chunk * num_heads, (chunk + 1) * num_heads
            yield self.scores if chunks == 1 else self.scores.heads(*heads), tuple(x[:, :, chunk] for x in by_rank)

    def repeated(self, x: Tensor) -> Tensor:
        """kv heads as often as they are sent."""
        return x if self._settings.repeats == 1 else x.repeat_interleave(self._settings.repeats, dim=1)

    def sent_back(self, x: Tensor) -> Tensor:
        """Where gradients of `repeated` kv heads arrive."""
        if self._settings.repeats == 1:
            return dense_like(x)
        heads = x.shape[1] * self._settings.repeats
        return x.new_empty((x.shape[0], heads, *x.shape[2:]), dtype=self._settings.home_dtype)

    def summed(self, arrived: Tensor, x: Tensor) -> Tensor:
        """The gradient of x, rounded once."""
        if self._settings.repeats == 1:
            return arrived
        return dense_like(x).copy_(arrived.unflatten(1, (x.shape[1], self._settings.repeats)).sum(2))

    def shares(self, scores: Scores, of_own: ScoreGradients) -> dict[str, Tensor]:
        """This rank's shares of the gradients of tensors of the scores, from those of its heads and all rows."""
        found = {}
        for name in scores.wanted:
            x, grad = getattr(scores, name), getattr(of_own, name)
            if name == "bias" and self._bias_travels:
                home = self.exchange.home([(*grad.shape[:2], grad.shape[3], grad.dtype)], grad.device)
                home.tensors[0].copy_(grad)
                found[name] = home.send()()[0].flatten(1, 2).sum_to_size(x.shape)
            else:
                found[name] = torch.zeros_like(x, dtype=grad.dtype)
                TERMS[name].narrow(found[name], "heads", *self._heads).add_(grad)
        return found


def _places(plan: Plan, degree: int, group: dist.ProcessGroup) -> Places:
    """Rows of every rank of the inner group, and their order as `HeadExchange` takes it; kept with the plan."""
    stream, of_group = stream_of(plan.device), (plan.layout, degree, plan.seq_len, group.size())

    def make() -> Places:
        ranks = range(group.rank() // degree * degree, (group.rank() // degree + 1) * degree)
        rows = rows_of_group(*of_group, group.rank() // degree)
        return [plan.layout.shard_len(plan.seq_len, group.size(), rank) for rank in ranks], _order(rows, plan.device)

    if stream is None and plan.layout.tensor is not None:
        hint = "leave attention out of the graph, or use method='ring'"
        got, what = f"{plan.layout.spec()}, whose order is copied to the device", f"method={plan.options.method!r}"
        refuse(f"CUDA graph capture with {what}", "a layout without a tensor", got, hint, UnsupportedError)
    places: Places = plan.prepare(("places",), stream, make)
    return places


def _order(pieces: Sequence[Piece], device: torch.device) -> Tensor | None:
    begin, parts, rises = 0, [], True
    for piece in pieces:
        if isinstance(piece, Run):  # made on the device: nothing is copied, so that a CUDA graph may hold it
            parts.append(
                torch.arange(piece.start, piece.start + piece.stride * piece.length, piece.stride, device=device)
            )
            rises &= piece.start == begin and (piece.stride == 1 or piece.length == 1)
        else:
            parts.append(piece.values.to(device))
            rises = False
        begin += piece.length
    return None if rises else torch.cat(parts)


ULYSSES = Method("ulysses", choose_degree, schedule_of_groups, settle, forward, backward)
