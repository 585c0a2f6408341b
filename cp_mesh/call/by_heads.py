"""Attention by heads: an all-to-all from sequence to heads, attention on what arrived, an all-to-all home.

Each of the three is an op, so that policies of checkpointing and compiled code see them; the backward is the same three
the other way round. Ulysses and the hybrid are this. With U ranks in an inner group and h = H / U:

    q, k, v, out, lse    [B, heads, S_local, D], all heads of this rank's rows
    q_h, k_h, ...        [B, h, rows of the group, D], this rank's heads, in the order of the joined shard

What arrived of q, k and v, and out and lse of the rank's heads, are as large as its own rows, and are kept for the
backward in their place. Where kv heads do not divide by U each is sent several times, as many as make the groups of
query heads equal on every rank. Those would be larger, so q, k and v travel again, and gradients are summed in fp32
where the heads came from. A trace that does not know how many rows an inner group has keeps nothing: all travel again.

Terms of the scores by head are cut to the rank's heads, and rows of a bias travel as those of q do.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import closing
from functools import cached_property, lru_cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from cp_mesh.call import passes
from cp_mesh.call.joined_layout import rows_of_group
from cp_mesh.call.method import stream_of
from cp_mesh.call.methods import METHODS
from cp_mesh.call.operators import PLAIN, is_seen
from cp_mesh.call.spec import EXCHANGING, GRADED, Call, Operand
from cp_mesh.call.ulysses import FEW, split_heads
from cp_mesh.comm.agreement import keep_to_itself, note_refusals
from cp_mesh.comm.contract import Swaps
from cp_mesh.comm.exchange import choose_transport, make_swaps
from cp_mesh.comm.groups import parts_of
from cp_mesh.comm.heads import HeadExchange, by_rank, views
from cp_mesh.errors import ArgumentError, UnsupportedError, refuse
from cp_mesh.geometry.host_tensors import Content
from cp_mesh.geometry.layouts import Piece, Run, parse_layout
from cp_mesh.kernels.combine import accumulation_dtype, dense_like, dense_strides
from cp_mesh.kernels.scores import TERMS

Place = tuple[Sequence[int], Sequence[int]]
"""Shape and strides of a [B, heads, S_local, D] tensor."""
_OPS = torch.ops.cp_mesh


def degree_of(call: Call, q: Tensor, k: Tensor) -> int:
    """Ranks that exchange heads for rows in a call of such a method; 1 also of heads that its plan will refuse."""
    if call.options.joined:
        return 1
    of_q, of_k = (Operand.of(call.format.to_bhsd(x)) for x in (q, k))
    try:
        return METHODS[call.options.method].choose_degree(call.options, of_q, of_k, call.group.size())
    except (ArgumentError, UnsupportedError):
        return 1


def degree_that_keeps(call: Call, q: Tensor, k: Tensor) -> int:
    """The same, but 1 in a trace that does not know how many rows arrive: then the op is traced whole."""
    degree, known = degree_of(call, q, k), call.tensors.layout_index is None or type(q) in PLAIN
    return degree if known or degree == call.group.size() else 1


def places_of(call: Call, *tensors: Tensor) -> list[Place]:
    """Where the gradients of q, k and v are written: as `dense_like` these."""
    return [(x.shape, dense_strides(x.shape, x)) for x in map(call.format.to_bhsd, tensors)]


def forward(
    q: Tensor, k: Tensor, v: Tensor, call: Call, degree: int, keeps: bool = False
) -> tuple[Tensor, Tensor, Sequence[Tensor], list[Tensor]]:
    """out and lse as the op returns them; and what a `backward` is given, ``own`` and ``held``, if this one keeps it.

    Of one that does, lse has no element unless it has a gradient.
    """
    given = q, k, v
    own = q, k, v = tuple(map(call.format.to_bhsd, given))
    heads = _Heads(call, q, q.shape, k.shape, degree)
    brings_lse = call.options.differentiable_lse or not keeps
    out = dense_like(q, v.shape[3])
    lse = q.new_empty(q.shape[:3] if brings_lse else 0, dtype=accumulation_dtype(q.dtype))

    into, held = (out, lse[..., None]) if brings_lse else (out,), list[Tensor]()

    def compute(chunk: int) -> list[Tensor]:  # a function, so that what arrived is given back
        buffers, qkv = heads.arrive(own, heads.times, chunk, "forward")
        out_h, lse_h = heads.run(_OPS.attention.default, *qkv, *heads.arguments(chunk))
        if keeps:
            held.extend([*(buffers if heads.repeats == 1 else ()), out_h, lse_h])
        return [out_h, lse_h[..., None]]

    for chunk in range(heads.chunks):
        heads.bring_home(compute(chunk)[: len(into)], into, chunk)
    lse = call.format.lse_from_bhs(lse).contiguous() if brings_lse else lse
    return call.as_asked(out), lse, given if heads.repeats > 1 else (), held


def backward(
    dout: Tensor,
    dlse: Tensor | None,
    own: Sequence[Tensor],
    held: Sequence[Tensor],
    places: Sequence[Place],
    call: Call,
    degree: int,
    wanted: str,
) -> tuple[Tensor, ...]:
    """What the backward op returns.

    Args:
        dout, dlse: gradients of what `forward` returned.
        own: q, k and v, where they travel again; and out and lse, where nothing was kept.
        held: what was kept.
        places: of q, k and v.
        call, degree, wanted: as in the forward, and as the op takes them.
    """
    form, dtype, shapes = call.format, dout.dtype, [shape for shape, _ in places]
    heads = _Heads(call, dout, shapes[0], shapes[1], degree)
    sent, times = [form.to_bhsd(dout)], [1]
    if dlse is not None:
        sent, times = [*sent, form.lse_to_bhs(dlse)[..., None]], [*times, 1]
    if own:
        sent, times = [*sent, *map(form.to_bhsd, own[:4])], [*times, *heads.times, 1]
    sent += [form.lse_to_bhs(x)[..., None] for x in own[4:]]
    into, of_scores = [dout.new_empty_strided(*place) for place in places], list[Sequence[Tensor]]()
    if heads.repeats > 1:  # every time that a head was sent
        wide = accumulation_dtype(dtype)
        into[1:] = (dout.new_empty((B, n * heads.repeats, S, D), dtype=wide) for B, n, S, D in shapes[1:])

    def compute(chunk: int) -> Sequence[Tensor]:  # as in the forward
        kept = held[chunk * len(held) // heads.chunks : (chunk + 1) * len(held) // heads.chunks]
        arrived = heads.arrive(sent, [*times, 1][: len(sent)], chunk, f"backward:{wanted}")[1]
        dout_h = arrived.pop(0)
        dlse_h = None if dlse is None else arrived.pop(0)[..., 0].contiguous()  # as kernels read numbers of rows
        qkv = arrived[:3] or heads.views(kept[:1], [(shape, dtype) for shape in shapes], heads.times)
        out_h, lse_h = kept[-2:] or (arrived[3], arrived[4][..., 0].contiguous())
        given = dout_h, *qkv, out_h, lse_h, dlse_h, *heads.arguments(chunk), wanted
        grads = heads.run(_OPS.attention_backward.default, *given)
        of_scores.append(grads[3:])
        return grads[:3]

    for chunk in range(heads.chunks):
        heads.bring_home(compute(chunk), into, chunk)
    *of_terms, of_captured = zip(*of_scores, strict=True)
    dq, *dkv = into
    if heads.repeats > 1:
        dkv = [
            dout.new_empty_strided(*place).copy_(summed(x, heads.repeats))
            for place, x in zip(places[1:], dkv, strict=True)
        ]
    shares, total = heads.shares(of_terms, wanted.split(",")), of_captured[0]
    for part in of_captured[1:]:
        total = total + part
    return *map(call.as_asked, (dq, *dkv)), *shares, total


def repeated(x: Tensor, times: int) -> Tensor:
    """Heads as often as they are sent."""
    return x if times == 1 else x.repeat_interleave(times, 1)


def summed(x: Tensor, times: int) -> Tensor:
    """The gradients of `repeated` heads."""
    return x.unflatten(1, (-1, times)).sum(2)


class _Heads:
    """Of one call, the heads that this rank computes, chunk by chunk.

    Attributes:
        chunks: parts of a rank's heads that are exchanged and computed one after the other.
        times: how often each head of q, k and v is sent; ``repeats`` of k and v.
    """

    def __init__(self, call: Call, x: Tensor, q: Sequence[int], k: Sequence[int], degree: int) -> None:
        self._call, self._degree, self._num_rows = call, degree, q[2]
        self.chunks, self.repeats = split_heads(call.options, q[1], k[1], degree)
        self.times = 1, self.repeats, self.repeats
        self._num = q[1] // degree // self.chunks
        self._first = call.group.rank() % degree * self.chunks * self._num
        self._is_seen = is_seen((x, *call.tensors, *call.captured))

    def run(self, op: Any, *inputs: Any) -> Any:
        """An op of this pass; where nothing would see it, past PyTorch's dispatcher, which takes host time."""
        return op(*inputs) if self._is_seen else FUNCTIONS[op](*inputs)

    def arrive(
        self, own: Sequence[Tensor], times: Sequence[int], chunk: int, begins: str = "", chunks: int = 0
    ) -> tuple[list[Tensor], list[Tensor]]:
        """Buffers [rows, features] of a chunk, one for each dtype, and `views` of them. The first begins a pass."""
        split = self._degree, chunks or self.chunks, chunk, "" if chunk else begins
        buffers = self.run(_OPS.seq_to_heads.default, [*own], [*times], *split, *self._call.arguments())
        return buffers, self.views(buffers, [(x.shape, x.dtype) for x in own], times, chunks)

    def views(
        self, buffers: Sequence[Tensor], sent: Sequence[tuple[Sequence[int], torch.dtype]], times: Sequence[int],
        chunks: int = 0,
    ) -> list[Tensor]:  # fmt: skip
        """What arrived of tensors of these shapes, [B, h, rows, D]."""
        parts = self._degree * (chunks or self.chunks)
        likes = ((B, n * H // parts, D, dtype) for ((B, H, _, D), dtype), n in zip(sent, times, strict=True))
        return views(buffers, [*likes])

    def bring_home(self, computed: Sequence[Tensor], into: Sequence[Tensor], chunk: int = 0, chunks: int = 0) -> None:
        """Write what all ranks computed of this rank's rows, of tensors [B, h, rows, D], into those of all heads."""
        split, chunks = (self._degree, self._num_rows), chunks or self.chunks
        buffers = self.run(_OPS.heads_to_seq.default, [*computed], *split, *self._call.arguments())
        arrived = views(buffers, [(x.shape[0], x.shape[1], x.shape[3], x.dtype) for x in computed])
        for x, part in zip(into, arrived, strict=True):
            part = part.unflatten(2, split).transpose(1, 2)  # [B, U, h, S_local, D]
            if chunks == 1:  # by a view, from which a trace knows that all is written
                x.unflatten(1, (self._degree, -1)).copy_(part)
            else:
                x.unflatten(1, (self._degree, chunks, -1)).select(2, chunk).copy_(part)

    def arguments(self, chunk: int) -> tuple[Any, ...]:
        """Of the op, on a chunk."""
        call, begin, options = self._call, self._first + chunk * self._num, self._call.options
        given = {
            name: TERMS[name].narrow(x, "heads", begin, begin + self._num)
            for name in GRADED
            if (x := getattr(call.tensors, name)) is not None
        }
        if self._bias is not None:
            begin_of_rank = chunk * self._num
            given["bias"] = TERMS["bias"].narrow(self._bias, "heads", begin_of_rank, begin_of_rank + self._num)
        options = options._replace(
            joined=self._degree, in_sums=self.repeats > 1, head_chunks=1, as_inputs=True,
            first_head=options.first_head + begin,
        )  # fmt: skip
        return call._replace(tensors=call.tensors._replace(**given), seq_dim=2, options=options).arguments()

    @cached_property
    def _bias(self) -> Tensor | None:
        """Of the rank's heads and all rows of its inner group, if a bias is by row."""
        call, bias = self._call, self._call.tensors.bias
        if bias is None or (bias.shape[2] == 1 and _fewest_rows(call, self._degree) > 1):
            return None  # of a rank with one row it may be that of all rows, or of its own
        bias = bias.expand(-1, self._degree if bias.shape[1] == 1 else -1, self._num_rows, -1)
        return self.arrive([bias], [1], 0, chunks=1)[1][0]

    def shares(self, of_chunks: Sequence[Sequence[Tensor]], wanted: Sequence[str]) -> list[Tensor]:
        """This rank's shares of the gradients of `GRADED`, from those of each chunk; empty where none are wanted."""
        found = []
        for name, parts in zip(GRADED, of_chunks, strict=True):
            share, x, first = parts[0], getattr(self._call.tensors, name), self._first
            if name in wanted:
                whole, first = (x, first) if name != "bias" or self._bias is None else (self._bias, 0)
                share = torch.zeros(whole.shape, dtype=share.dtype, device=share.device)
                for part in parts:
                    TERMS[name].narrow(share, "heads", first, first := first + self._num).add_(part)
                if whole is not x:
                    B, h, _, keys = share.shape
                    own = share.new_empty(B, h * self._degree, self._num_rows, keys)
                    self.bring_home([share], [own], chunks=1)
                    share = own.sum_to_size(x.shape)
                share = share.to(x.dtype)
            found.append(share)
        return found


# --- what the ops compute
def attention(q: Tensor, k: Tensor, v: Tensor, *arguments: Any) -> tuple[Tensor, Tensor]:
    """`attention_op`, without a gradient."""
    call = Call.read(arguments)
    if call.options.method in EXCHANGING and (degree := degree_of(call, q, k)) > 1:
        return forward(q, k, v, call, degree)[:2]
    return passes.forward(q, k, v, arguments, call)


def attention_backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, dlse: Tensor | None, *given: Any
) -> tuple[Tensor, ...]:
    """`attention_backward_op`, of a forward that kept nothing."""
    *arguments, wanted = given
    call = Call.read(arguments)
    if call.options.method in EXCHANGING and (degree := degree_of(call, q, k)) > 1:
        return backward(dout, dlse, (q, k, v, out, lse), (), places_of(call, q, k, v), call, degree, wanted)
    return passes.backward(dout, q, k, v, out, lse, dlse, arguments, call, wanted)


def seq_to_heads(
    tensors: Sequence[Tensor], times: Sequence[int], degree: int, chunks: int, chunk: int, begins: str, *arguments: Any
) -> list[Tensor]:
    """Buffers of what arrives, one for each dtype; ``begins`` a pass, before which ranks are compared."""
    call = Call.read(arguments)
    group, (begins, _, wanted) = call.group, begins.partition(":")
    if begins == "forward":
        passes.begin_forward(tensors[0], tensors[1], tensors[2], arguments, call, group)
    elif begins:
        passes.begin_backward(tensors[0], tensors[0], tensors[0], arguments, call, group, wanted)
    sent = [by_rank(repeated(x, n), degree, chunks, chunk) for x, n in zip(tensors, times, strict=True)]
    return _exchanged(call, group, degree, sent[0].device, lambda exchange, swaps: exchange.to_heads(swaps, sent))


def heads_to_seq(tensors: Sequence[Tensor], degree: int, num_rows: int, *arguments: Any) -> list[Tensor]:
    """Buffers of what comes home, one for each dtype."""
    call, device = Call.read(arguments), tensors[0].device
    return _exchanged(call, call.group, degree, device, lambda exchange, swaps: exchange.home(swaps, tensors))


FUNCTIONS: dict[Any, Callable[..., Any]] = {
    _OPS.attention.default: attention,
    _OPS.attention_backward.default: attention_backward,
    _OPS.seq_to_heads.default: seq_to_heads,
    _OPS.heads_to_seq.default: heads_to_seq,
}
"""What the ops compute."""


def _exchanged(
    call: Call, group: dist.ProcessGroup, degree: int, device: torch.device,
    move: Callable[[HeadExchange, Swaps], list[Tensor]],
) -> list[Tensor]:  # fmt: skip
    name, index, stream = call.options.transport, call.tensors.layout_index, stream_of(device)
    try:
        if stream is None and index is not None:
            hint = "leave attention out of the graph, or use method='ring'"
            got = f"{call.options.layout}, whose order is copied to the device"
            what = f"CUDA graph capture with method={call.options.method!r}"
            refuse(what, "a layout without a tensor", got, hint, UnsupportedError)
        inner = group if degree == group.size() else parts_of(group, degree).inner
        if name == "symmetric_memory" and inner is not group and call.seq_len:
            choose_transport(name, group, device)  # parts of a group may differ in what they have
        make = _exchange.__wrapped__ if stream is None else _exchange  # memory of a graph is nobody else's
        content = None if index is None else Content.of(index)
        exchange = make(call.options.layout, content, call.seq_len, group.size(), group.rank(), degree, device, stream)
        with closing(make_swaps(name, inner, exchange.seq_len, device)) as swaps:
            return move(exchange, swaps)
    except Exception as error:
        keep_to_itself(error)
        note_refusals(group, error)
        raise


@lru_cache(maxsize=16)
def _exchange(
    layout: str, index: Content | None, seq_len: int, cp_size: int, cp_rank: int, degree: int, device: torch.device,
    stream: int | None,
) -> HeadExchange:  # fmt: skip
    """Of an inner group; it may hold an order on the device."""
    read, inner = parse_layout(layout, None if index is None else index.tensor), cp_rank // degree
    rows = rows_of_group(read, degree, seq_len, cp_size, inner)
    lens = [read.shard_len(seq_len, cp_size, rank) for rank in range(inner * degree, (inner + 1) * degree)]
    order = _order(rows, device)
    return HeadExchange(cp_rank % degree, lens, order, None if order is None else _slices(rows, lens))


def _fewest_rows(call: Call, degree: int) -> int:
    """Of a rank of this inner group; 0 where a trace does not know."""
    index, size, rank = call.tensors.layout_index, call.group.size(), call.group.rank()
    if index is not None and type(index) is not Tensor:
        return 0
    layout, first = parse_layout(call.options.layout, index), rank - rank % degree
    return min(layout.shard_len(call.seq_len, size, rank) for rank in range(first, first + degree))


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


def _slices(pieces: Sequence[Piece], shard_lens: Sequence[int]) -> list[list[slice]] | None:
    """Those of each rank, of whose rows there are so many; None where they are more than `FEW` of a rank, or lists."""
    found, left = [], [*pieces]
    for length in shard_lens:
        own: list[slice] = []
        while length:
            piece = left.pop(0)
            if not isinstance(piece, Run) or len(own) == FEW:
                return None
            own.append(slice(piece.start, piece.last + 1, piece.stride))
            length -= piece.length
        found.append(own)
    return found
