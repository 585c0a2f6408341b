"""Ulysses, Jacobs et al. 2023 (arXiv:2309.14509): each rank computes some heads over the rows of all ranks.

An all-to-all within an inner group gives each rank all rows of the group for its heads; another one returns out and
lse. The inner group acts as one rank of a ring whose ranks are inner groups (`joined_layout`). In plain Ulysses the
inner group is the whole cp group: the ring has one rank, and in any layout kernels see the problem of one device, with
the unsharded mask and one contiguous shard. Who owns what, with U ranks in an inner group and h = H / U:

    q, k, v, out, lse    [B, heads, S_local, D], all heads of this rank's rows
    q_h, k_h, ...        [B, h, rows of the group, D], this rank's heads, in the order of the joined shard

If U does not divide the kv heads, each is sent several times, so that every rank has equal groups of query heads per kv
head; the owner of the rows then sums the gradients in fp32. Score terms by head are narrowed to the rank's heads, and
rows of a bias are exchanged like those of q. The backward applies sinks and delta before the exchange, to the rank's
own rows, or after it, to the rank's heads, if the forward kept tensors.

The hybrid, Fang and Zhao 2024 (arXiv:2405.07719), has smaller groups: rank r of the cp axis has number r mod U in inner
group r // U, and fetches keys of the other groups, for its heads, in the stages of the ring. Heads limit U, not the
number of ranks. If inner groups are hosts, only the ring sends between hosts.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from cp_mesh.call.joined_layout import join, rows_of_group
from cp_mesh.call.method import Backward, Plan, stream_of
from cp_mesh.call.ring_loop import Stages, StageSettings, backward_of_heads, begin_backward, forward_of_heads
from cp_mesh.call.spec import AttentionSpec, Operand
from cp_mesh.comm.exchange import Transport, choose_transport, transport_maker
from cp_mesh.comm.groups import parts_of
from cp_mesh.comm.heads import HeadExchange, by_rank
from cp_mesh.comm.packing import make_packing
from cp_mesh.errors import UnsupportedError, refuse
from cp_mesh.geometry.layouts import Layout, Piece, Run
from cp_mesh.geometry.mask import Mask
from cp_mesh.geometry.schedule import Schedule
from cp_mesh.geometry.survey import Seen
from cp_mesh.kernels.combine import accumulation_dtype, dense_like
from cp_mesh.kernels.merge import Kernel
from cp_mesh.kernels.scores import TERMS, ScoreGradients, Scores


def _chunk_of(x: Tensor, chunks: int, chunk: int) -> Tensor:
    """A view [n, m, ...] of one chunk in a buffer [n, chunks · m, ...], in whose memory chunks follow one another."""
    return x if chunks == 1 else x.view(chunks, x.shape[0], x.shape[1] // chunks, *x.shape[2:])[chunk]


def _by_row(x: Tensor) -> Tensor:
    """A [B, heads, rows, D] tensor as [rows, features]: a view if its memory has this order."""
    return x.permute(2, 0, 1, 3).reshape(x.shape[2], x.shape[0] * x.shape[1] * x.shape[3])


class _HeadsPass:
    """The state of one pass that computes this rank's heads; a context manager around the pass.

    Attributes:
        outer: the group of the ring.
        transport, exchange: the all-to-alls of heads against rows in the inner group.
        plan: the plan for the ring of inner groups.
        scores: for this rank's heads and the rows of its inner group.
    """

    transport: Transport

    def __init__(self, plan: Plan, group: dist.ProcessGroup, num_heads: int, scores: Scores) -> None:
        degree = plan.settings.degree
        # A ring of one rank sends nothing, so its group is not used.
        self.outer, self._inner = (group, group) if degree == group.size() else parts_of(group, degree)
        self.exchange = _exchange(plan, degree, group, self._inner)
        self._size, self._settings, self._num_heads = degree, plan.settings, num_heads
        self.plan = plan
        if plan.reads_tensors:  # positions come from the layout
            self.plan = replace(plan, layout=join(plan.layout, degree, group.size()))
        rank, of_rank = self._inner.rank(), num_heads // degree
        self._heads = rank * of_rank, (rank + 1) * of_rank
        self.scores = scores.heads(*self._heads)
        # If a rank has one row, a bias of one row may be for all rows or for that row.
        bias = scores.bias
        self._bias_travels = bias is not None and (bias.shape[2] != 1 or self.exchange.fewest_rows < 2)
        self._bias = bias if self._bias_travels else None

    def __enter__(self) -> _HeadsPass:
        self.transport = self.exchange.make_transport(self._inner)
        if self._bias is not None:
            try:
                self._exchange_bias(self._bias)
            except BaseException:
                self.transport.end()
                raise
        return self

    def __exit__(self, *_: object) -> None:
        self.transport.end()

    def _exchange_bias(self, bias: Tensor) -> None:
        bias = bias.expand(-1, -1, self.exchange.own_rows, -1)
        bias = bias.expand(-1, self._size, -1, -1) if bias.shape[1] == 1 else bias  # equal for all heads
        (arrived,), _ = self.exchange.to_heads(self.transport, (by_rank(bias, self._size),))
        self.scores = replace(self.scores, bias=arrived)

    def by_parts(self, tensors: Sequence[Tensor]) -> Iterator[tuple[Scores, tuple[Tensor, ...]]]:
        """Views [U, S_local, B, heads, D] of [B, heads, S_local, D] tensors, one chunk of each rank's heads at a time.

        Each comes with the scores of this rank's chunk.
        """
        chunks, num_heads = self._settings.head_chunks, self._heads[1] - self._heads[0]
        for chunk in range(chunks):
            heads = chunk * num_heads // chunks, (chunk + 1) * num_heads // chunks
            scores = self.scores if chunks == 1 else self.scores.heads(*heads)
            yield scores, tuple(by_rank(x, self._size, chunks, chunk) for x in tensors)

    def bring_home(
        self, computed: Sequence[Tensor], into: Sequence[Tensor], dtypes: Sequence[torch.dtype] | None = None
    ) -> None:
        """Copy from `HeadExchange.home`; a function, so that the arrived tensors are freed before the next chunk."""
        for part, x in zip(into, self.exchange.home(self.transport, computed, dtypes), strict=True):
            part.copy_(x)

    def views(self, kept: Tensor, out: Tensor, chunk: int, likes: Sequence[Tensor]) -> list[Tensor]:
        """q, k, v and out [B, h, rows, D] of a chunk, as views of the kept tensors; ``likes``: [B, heads, any, D]."""
        chunks = self._settings.head_chunks
        q, k, v = ((x.shape[0], x.shape[1] // (self._size * chunks), x.shape[3]) for x in likes)
        found: list[Tensor] = []
        for buffer, shapes in ((kept, (q, k, v)), (out, ((*q[:2], v[2]),))):
            found += make_packing(shapes, buffer.dtype, buffer.device).views(_chunk_of(buffer, chunks, chunk))
        return found

    def repeated(self, x: Tensor) -> Tensor:
        """kv heads, each repeated as often as it is sent."""
        return x if self._settings.repeats == 1 else x.repeat_interleave(self._settings.repeats, dim=1)

    def sent_back(self, x: Tensor, num_rows: int) -> Tensor:
        """An empty tensor for the gradients of `repeated` kv heads."""
        if self._settings.repeats == 1:
            return dense_like(x, num_rows=num_rows)
        heads = x.shape[1] * self._settings.repeats
        return x.new_empty((x.shape[0], heads, *x.shape[2:]), dtype=self._settings.home_dtype)

    def summed(self, arrived: Tensor, x: Tensor) -> Tensor:
        """The gradient of x: the sum over `repeated` heads, rounded once."""
        if self._settings.repeats == 1:
            return arrived
        return dense_like(x).copy_(arrived.unflatten(1, (x.shape[1], self._settings.repeats)).sum(2))

    def shares(self, scores: Scores, of_own: ScoreGradients) -> dict[str, Tensor]:
        """This rank's partial gradients of score tensors, from the gradients of its heads and all rows."""
        found = {}
        for name, grad in of_own.items():
            if name not in TERMS:  # a captured tensor, which is not cut by heads
                found[name] = grad
                continue
            x = getattr(scores, name)
            if name == "bias" and self._bias_travels:
                (arrived,) = self.exchange.home(self.transport, (grad,))  # [U, S_local, B, heads, keys]
                found[name] = arrived.permute(2, 0, 3, 1, 4).flatten(1, 2).sum_to_size(x.shape)
            else:
                found[name] = torch.zeros_like(x, dtype=grad.dtype)
                TERMS[name].narrow(found[name], "heads", *self._heads).add_(grad)
        return found


def _exchange(plan: Plan, degree: int, group: dist.ProcessGroup, inner: dist.ProcessGroup) -> HeadExchange:
    """The exchange of the inner group; cached with the plan, since it may hold an order on the device."""
    stream, of_group = stream_of(plan.device), (plan.layout, degree, plan.seq_len, group.size())

    def make() -> HeadExchange:
        name = plan.options.transport if plan.seq_len else "functional"
        if name == "symmetric_memory" and degree < group.size():
            choose_transport(name, group, plan.device)  # refuses on all ranks: only some inner groups may lack it
        ranks = range(group.rank() // degree * degree, (group.rank() // degree + 1) * degree)
        rows = rows_of_group(*of_group, group.rank() // degree)
        shard_lens = [plan.layout.shard_len(plan.seq_len, group.size(), rank) for rank in ranks]
        make_transport = transport_maker(name, inner, plan.device)
        return HeadExchange(inner, shard_lens, _order(rows, plan.device), make_transport)

    if stream is None and plan.layout.tensor is not None:
        hint = "leave attention out of the graph, or use method='ring'"
        got, what = f"{plan.layout.spec()}, whose order is copied to the device", f"method={plan.options.method!r}"
        refuse(f"CUDA graph capture with {what}", "a layout without a tensor", got, hint, UnsupportedError)
    exchange: HeadExchange = plan.prepare(("exchange",), stream, make)
    return exchange


def _order(pieces: Sequence[Piece], device: torch.device) -> Tensor | None:
    begin, parts, rises = 0, [], True
    for piece in pieces:
        if isinstance(piece, Run):  # made on the device without a copy, so that a CUDA graph can capture it
            parts.append(
                torch.arange(piece.start, piece.start + piece.stride * piece.length, piece.stride, device=device)
            )
            rises &= piece.start == begin and (piece.stride == 1 or piece.length == 1)
        else:
            parts.append(piece.values.to(device))
            rises = False
        begin += piece.length
    return None if rises else torch.cat(parts)


class Ulysses(Stages):
    """A ring of inner groups, in which ``degree`` ranks exchange heads for rows; they count as one rank."""

    def inner_size(self, degree: int) -> int:
        return degree

    def choose_degree(self, options: AttentionSpec, q: Operand, k: Operand, cp_size: int) -> int:
        num_heads = q.shape[1]
        if num_heads % cp_size:
            near = max(n for n in range(1, cp_size) if num_heads % n == 0)
            expected = f"a multiple of the {cp_size} cp ranks"
            hint = f"method='ring' works{f', or {near} cp ranks' if near > 1 else ''}"
            refuse("method='ulysses': query heads", expected, num_heads, hint, UnsupportedError)
        return cp_size

    def make_schedule(
        self, layout: Layout, mask: Mask, seq_len: int, cp_size: int, cp_rank: int, segments: bool = False,
        degree: int = 0, sources: Seen | None = None,
    ) -> Schedule:  # fmt: skip
        """The schedule of a ring of inner groups (one of all ranks if ``degree`` is 0)."""
        degree = degree or cp_size
        joined, outer = join(layout, degree, cp_size), cp_size // degree
        of_groups = None if sources is None else np.any(sources.reshape(outer, degree, outer, degree), (1, 3))
        return super().make_schedule(joined, mask, seq_len, outer, cp_rank // degree, segments, sources=of_groups)

    def settings(
        self, options: AttentionSpec, q: Operand, k: Operand, v: Operand, schedule: Schedule, kernel: Kernel,
        features: Collection[str], degree: int,
    ) -> StageSettings:  # fmt: skip
        num_heads, num_kv_heads = q.shape[1], k.shape[1]
        per_kv_head, of_rank = num_heads // num_kv_heads, num_heads // degree
        group = math.gcd(per_kv_head, of_rank)  # consecutive query heads that read one kv head, equal on all ranks
        wanted, of_kv = options.head_chunks, of_rank // group
        if wanted and of_kv % wanted:
            near = max(n for n in range(1, wanted) if of_kv % n == 0)
            hint = f"head_chunks={near} works, or method='ring'"
            what, expected = f"method={options.method!r}: head_chunks", f"a divisor of the {of_kv} kv heads of a rank"
            refuse(what, expected, wanted, hint)
        k_h, v_h = (x._replace(shape=torch.Size((x.shape[0], of_kv, *x.shape[2:]))) for x in (k, v))
        staged = super().settings(options, q, k_h, v_h, schedule, kernel, features, degree)
        repeats = per_kv_head // group
        home_dtype = q.dtype if repeats == 1 else accumulation_dtype(q.dtype)
        return staged._replace(degree=degree, repeats=repeats, home_dtype=home_dtype)

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, scores: Scores, plan: Plan, group: dist.ProcessGroup
    ) -> tuple[Tensor, ...]:
        """Attention of this rank's queries over all keys.

        With `AttentionSpec.keeps`, and if kv heads are sent once, it also returns for this rank's heads the q, k and v
        that arrived [rows, features], out [rows, features] and lse [B, h, rows]. The first lse is then empty unless it
        has a gradient.
        """
        if plan.settings.degree == 1:
            return super().forward(q, k, v, scores, plan, group)
        keeps, chunks = plan.options.keeps and plan.settings.repeats == 1, plan.settings.head_chunks
        brings_lse = not keeps or plan.options.differentiable_lse
        out = dense_like(q, plan.v_head_dim)
        lse = q.new_empty(q.shape[:3] if brings_lse else 0, dtype=accumulation_dtype(q.dtype))
        kept: list[Tensor] = []

        def compute(chunk: int, scores: Scores, qkv: Sequence[Tensor]) -> list[Tensor]:
            # a function, so that the arrived tensors are freed when it returns
            (q_h, k_h, v_h), buffers = call.exchange.to_heads(call.transport, qkv)
            out_h, lse_h = forward_of_heads(q_h, k_h, v_h, scores, call.plan, call.outer, None)
            if keeps:
                parts = buffers[0], _by_row(out_h), lse_h
                if chunks > 1:
                    for x in () if chunk else parts:
                        kept.append(x.new_empty((x.shape[0], x.shape[1] * chunks, *x.shape[2:])))
                    for x, part in zip(kept, parts, strict=True):
                        _chunk_of(x, chunks, chunk).copy_(part)
                else:
                    kept.extend(parts)
            return [out_h, lse_h[..., None]] if brings_lse else [out_h]

        with _HeadsPass(plan, group, q.shape[1], scores) as call:
            tensors, into = (q, call.repeated(k), call.repeated(v)), (out, lse[..., None]) if brings_lse else (out,)
            for chunk, (of_part, parts) in enumerate(call.by_parts((*tensors, *into))):
                call.bring_home(compute(chunk, of_part, parts[:3]), parts[3:])
        return out, lse, *kept

    def kept_shapes(
        self, q: Tensor, k: Tensor, v: Tensor, seq_len: int, cp_size: int, degree: int
    ) -> list[tuple[int, ...]]:
        per_kv_head, of_rank = q.shape[1] // k.shape[1], q.shape[1] // degree
        if degree == 1 or of_rank % per_kv_head:
            return []
        rows = seq_len if degree == cp_size else q.shape[2] * degree
        of_kv, (B, _, _, D), v_dim = k.shape[1] // degree, q.shape, v.shape[3]
        return [(rows, B * (of_rank * D + of_kv * (D + v_dim))), (rows, B * of_rank * v_dim), (B, of_rank, rows)]

    def backward(
        self, given: Backward, plan: Plan, group: dist.ProcessGroup
    ) -> tuple[Tensor, Tensor, Tensor, dict[str, Tensor]]:
        """See `Method`. ``kept`` holds the q, k and v that arrived in the forward; out and lse are then those of this
        rank's heads."""
        if plan.settings.degree == 1:
            return super().backward(given, plan, group)
        dout, q, k, v, out, lse, dlse, kept, scores, wanted = given
        kernel, dtype, chunks = plan.kernel, plan.settings.home_dtype, plan.settings.head_chunks
        if kept is not None and dlse is None and plan.options.differentiable_lse:  # other ranks may send theirs
            dlse = dout.new_zeros(dout.shape[:3], dtype=accumulation_dtype(q.dtype))
        own = None if kept is not None else begin_backward(given, kernel)
        of_sinks: list[Tensor] = []

        def compute(chunk: int, scores: Scores, parts: Sequence[Tensor]) -> tuple[tuple[Tensor, ...], ScoreGradients]:
            # as in the forward
            dout_h, *others = call.exchange.to_heads(call.transport, parts)[0]
            if kept is None:
                q_h, k_h, v_h, out_or_delta, lse_h = others
                # kernels read one number per row with stride 1
                out_or_delta = out_or_delta[..., 0].contiguous() if kernel.uses_delta else out_or_delta
                inputs_h = dout_h, q_h, k_h, v_h, out_or_delta, lse_h[..., 0].contiguous()
            else:
                q_h, k_h, v_h, out_h = call.views(kept, out, chunk, (q, k, v))
                lse_h = _chunk_of(lse, chunks, chunk)
                dlse_h = others[0][..., 0].contiguous() if others else None
                of_heads = Backward(dout_h, q_h, k_h, v_h, out_h, lse_h, dlse_h, None, scores, wanted)
                rows = begin_backward(of_heads, kernel)
                of_sinks.extend(rows.of_scores.values())
                scores, inputs_h = rows.scores, (rows.dout, q_h, k_h, v_h, rows.out_or_delta, rows.lse)
            return backward_of_heads(*inputs_h, scores=scores, plan=call.plan, group=call.outer, round_to=dtype)

        asked = scores if own is None else own.scores
        if own is None and wanted:
            asked = replace(asked, wanted=frozenset(wanted) - {"sinks"})
        with _HeadsPass(plan, group, q.shape[1], asked) as call:
            of_scores, heads = ScoreGradients.zeros(call.scores, accumulation_dtype(q.dtype)), 0
            inputs: tuple[Tensor, ...]
            if own is None:
                inputs = (dout,) if dlse is None else (dout, dlse[..., None])
            else:
                out_or_delta = own.out_or_delta[..., None] if kernel.uses_delta else own.out_or_delta
                inputs = own.dout, q, call.repeated(k), call.repeated(v), out_or_delta, own.lse[..., None]
            num_rows = dout.shape[2]
            dq, dk, dv = dense_like(q, num_rows=num_rows), call.sent_back(k, num_rows), call.sent_back(v, num_rows)
            for chunk, (of_chunk, (*parts, dq_part, dk_part, dv_part)) in enumerate(
                call.by_parts((*inputs, dq, dk, dv))
            ):
                grads, of_part = compute(chunk, of_chunk, parts)
                num_heads = dq_part.shape[3]
                if of_chunk.wanted:
                    of_scores.part(heads=(heads, heads + num_heads)).add_(of_part)
                heads += num_heads
                call.bring_home(grads, (dq_part, dk_part, dv_part), (q.dtype, dtype, dtype))
                del grads  # before the next chunk
            if of_sinks:
                of_scores["sinks"] = torch.cat(of_sinks)
            shares = call.shares(asked, of_scores) | (own.of_scores if own is not None else {})
        return dq, call.summed(dk, k), call.summed(dv, v), shares


class Hybrid(Ulysses):
    """Ulysses in inner groups of some ranks."""

    def choose_degree(self, options: AttentionSpec, q: Operand, k: Operand, cp_size: int) -> int:
        """``ulysses_degree``; if 0, gcd(cp_size, kv heads), or if that is 1, with query heads."""
        num_heads, num_kv_heads, degree = q.shape[1], k.shape[1], options.ulysses_degree
        if not degree:
            common = math.gcd(num_kv_heads, cp_size)
            return common if common > 1 else math.gcd(num_heads, cp_size)
        if cp_size % degree or num_heads % degree:
            both = math.gcd(cp_size, num_heads)
            near = max(n for n in range(1, min(both, degree) + 1) if both % n == 0)
            expected = f"a divisor of the {cp_size} cp ranks and of the {num_heads} query heads"
            hint = f"ulysses_degree={near} works, or method='ring'"
            refuse("method='hybrid': ulysses_degree", expected, degree, hint)
        return degree


ULYSSES, HYBRID = Ulysses("ulysses"), Hybrid("hybrid")
