"""The ops: `torch.ops.cp_mesh.attention` and `torch.ops.cp_mesh.attention_backward`.

Each is one opaque op around the whole loop, with a fake, autograd, autocast and DTensor sharding rules. So it takes
DTensors ``[Shard(seq) on cp, Shard(head) on tp, Shard(batch) on dp]``, is one node under torch.compile, and can be
named in a selective-checkpoint policy so that recompute does not replay the ring.

Tensors are in the caller's format, given by ``seq_dim`` (`formats.py`). out and the gradients are dense: contiguous, or
with the memory order of q, k and v (``as_inputs``), so that callers who transpose q, and out back, pay for no copy.
DTensors need contiguous ones, as a shard may have another memory order than its spec. The arguments after q, k and v
are a `spec.Call`. With `AttentionSpec.keeps` the forward returns three more tensors, empty unless its method keeps
something; the backward takes them in place of q, k, v, out and lse. They are results of the op so that checkpoint
policies and compiled code see them. The backward also returns gradients of the score tensors and of captured tensors:
partial ones, to be summed over ranks, and empty ones where no gradient is wanted.
"""

from collections.abc import Collection, Sequence
from contextlib import nullcontext
from functools import partial, reduce
from itertools import compress
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.experimental import implicit_replication, register_sharding
from torch.distributed.tensor.placement_types import Placement

from cp_mesh._torch import (
    KEYS_BELOW_AUTOGRAD,
    DispatchKey,
    DispatchKeySet,
    OpOverload,
    allows_plain,
    below_autograd,
    forward_level,
    in_transform,
    resolve_group,
    untraced,
    without_keys,
)
from cp_mesh.call.dtensor import place_beside, require_sharded, score_placements
from cp_mesh.call.formats import FORMATS
from cp_mesh.call.operators import library, refuse_tangents, register
from cp_mesh.call.spec import GRADED, NUM_ARGUMENTS, NUM_TENSORS, SCHEMA, Call, Tensors, autocast, nothing_kept
from cp_mesh.comm.agreement import checked, checking, last_forward
from cp_mesh.errors import UnsupportedError, refuse
from cp_mesh.kernels import functions
from cp_mesh.kernels.combine import accumulation_dtype, dense_like
from cp_mesh.kernels.scores import FUNCTIONS, name_of_captured


def without_rows(x: Tensor, seq_dim: int) -> Tensor:
    """A tensor with the strides and dtype of x but no rows, for a backward that does not read the content."""
    shape = (*x.shape[:seq_dim], 0, *x.shape[seq_dim + 1 :])
    return torch.empty_strided(shape, x.stride(), dtype=x.dtype, device=x.device)


def _compute(direction: str, *inputs: Any) -> tuple[Tensor, ...]:
    from cp_mesh.call import passes  # at the first call: graphs that name the ops need no plan, method or kernel

    results: tuple[Tensor, ...] = getattr(passes, direction)(*inputs)
    return results


def _empty_results(q, k, v, *arguments):  # type: ignore[no-untyped-def]
    call = Call.read(arguments)
    q, k, v = call.format.to_bhsd(q, k, v)
    shapes, dtype = [], accumulation_dtype(q.dtype)
    if call.options.keeps:
        from cp_mesh.call.plan import choose_method  # as in `_compute`

        method, size = choose_method(call.options.method), call.group.size()
        shapes = method.kept_shapes(q, k, v, call.seq_len, size, method.choose_degree(call.options, q, k, size))
    if shapes and not call.options.differentiable_lse:
        lse = q.new_empty(0, dtype=dtype)
    else:
        lse = call.format.lse_from_bhs(q.new_empty(q.shape[:3], dtype=dtype))
    kept = [q.new_empty(shape, dtype=x.dtype) for shape, x in zip(shapes, (q, q, lse), strict=False)]
    return *call.in_callers_format(dense_like(q, v.shape[-1])), lse, *(kept or nothing_kept(q, lse))


def _empty_gradients(dout, q, k, v, out, lse, dlse, kept, *arguments):  # type: ignore[no-untyped-def]
    call, wanted = Call.read(arguments[:-1]), arguments[-1].split(",")
    graded, (dout, *qkv) = {name: getattr(call.tensors, name) for name in GRADED}, call.format.to_bhsd(dout, q, k, v)
    read = [x for i, x in enumerate(call.captured) if name_of_captured(i) in wanted]
    dtype = reduce(torch.promote_types, (x.dtype for x in read), accumulation_dtype(q.dtype))
    return (
        *call.in_callers_format(*(dense_like(x, num_rows=dout.shape[2]) for x in qkv)),
        *(x.new_empty(x.shape) if name in wanted else q.new_empty(0) for name, x in graded.items()),
        q.new_empty(sum(x.numel() for x in read), dtype=dtype),
    )


# `torch.library.custom_op` and `register_autograd` would cost 60 us more host time for a forward that needs gradients,
# and 100 us for both passes (docs/log.md, "ways to register an op").
_OWN = "Tensor dout, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, Tensor? dlse, Tensor? kept"
attention_op = register(
    f"attention(Tensor q, Tensor k, Tensor v, {SCHEMA}) -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
    partial(_compute, "forward"), _empty_results,
)  # fmt: skip
attention_backward_op = register(
    f"attention_backward({_OWN}, {SCHEMA}, str wanted) -> ({', '.join(['Tensor'] * (4 + len(GRADED)))})",
    partial(_compute, "backward"), _empty_gradients,
)  # fmt: skip


class _Attention(torch.autograd.Function):
    """The autograd node of `attention_op`. Its backward calls `attention_backward_op`.

    Captured tensors follow the op's arguments a second time, as autograd does not look into lists.
    """

    @staticmethod
    def forward(ctx, keys, *given):  # type: ignore[no-untyped-def]
        inputs, captured = given[: 3 + NUM_ARGUMENTS], given[3 + NUM_ARGUMENTS :]
        out, lse, kept, *of_heads = _below_autograd(attention_op, keys, inputs)
        qkv, tensors, ctx.others = inputs[:3], inputs[3 : 3 + NUM_TENSORS], inputs[4 + NUM_TENSORS :]
        options = Call.read(inputs[3:]).options
        ctx.score_mod = ctx.mask_mod = None
        if options.score_mod or options.mask_mod:  # keeps the functions alive
            ctx.score_mod, ctx.mask_mod = (functions.find(getattr(options, name)) for name in FUNCTIONS)
        # most kernels support no gradient of lse, and it must not be dropped silently
        ctx.mark_non_differentiable(*(() if options.differentiable_lse else (lse,)), kept, *of_heads)
        ctx.has_kept, ctx.shape = kept.ndim > 1, out.shape
        group = resolve_group(ctx.others[2])
        ctx.forward = last_forward(group) if checking(group) else ""
        if ctx.has_kept:
            ctx.save_for_backward(*(without_rows(x, ctx.others[1]) for x in qkv), *tensors, *of_heads, kept, *captured)
        else:
            ctx.save_for_backward(*qkv, *tensors, out, lse, None, *captured)
        ctx.set_materialize_grads(False)  # no zero gradient for an unused lse: most kernels would refuse it
        return out, lse, kept, *of_heads

    @staticmethod
    def backward(ctx, dout, dlse, *_):  # type: ignore[no-untyped-def]
        saved = ctx.saved_tensors  # under a checkpoint this can be read only once
        q, k, v, *tensors, out, lse, kept = saved[: 6 + NUM_TENSORS]
        captured = saved[6 + NUM_TENSORS :]
        needed = *ctx.needs_input_grad[4 : 4 + NUM_TENSORS], *ctx.needs_input_grad[4 + NUM_ARGUMENTS :]
        wanted = wanted_of(Tensors._fields, ctx.score_mod, needed)
        # Run even without any gradient: other ranks may have one, and would wait for this rank in the ring.
        if kept is None:
            dout = torch.zeros_like(out) if dout is None else _placed_like(dout, out)
            dlse = None if dlse is None else _placed_like(dlse, lse)
        else:
            dout = graded_if_asked(q.new_zeros(ctx.shape) if dout is None else dout)
        given = (dout, q, k, v, out, lse, dlse, kept, *tensors, [*captured], *ctx.others, ",".join(wanted))
        group = resolve_group(ctx.others[2])
        with checked(enabled=True, backward_of=ctx.forward) if ctx.forward or checking(group) else nullcontext():
            dq, dk, dv, *grads = attention_backward_op(*given)
        named, shares = by_name(grads, wanted, captured), []
        names = *Tensors._fields, *map(name_of_captured, range(len(captured)))
        for name, x in zip(names, (*tensors, *captured), strict=True):
            grad = named.get(name)  # a plain tensor beside DTensors gets this rank's partial gradient
            plain = isinstance(grad, DTensor) and not isinstance(x, DTensor)
            shares.append(grad.to_local() if plain else grad)
        return None, dq, dk, dv, *shares[:NUM_TENSORS], None, *[None] * len(ctx.others), *shares[NUM_TENSORS:]


def graded_if_asked(dout: Tensor) -> Tensor:
    """``dout`` with a gradient under ``create_graph``: kept tensors have none, and no node would refuse more."""
    return dout if dout.requires_grad or not torch.is_grad_enabled() else dout.detach().requires_grad_()


def wanted_of(names: Sequence[str], score_mod: Any, needed: Sequence[bool]) -> list[str]:
    """The names of tensors that need a gradient; captured tensors follow ``names``, those of mask_mod get none."""
    captured = range(score_mod.num_captured if score_mod else 0)
    return [*compress([*names, *map(name_of_captured, captured)], needed)]


def by_name(grads: Sequence[Tensor], wanted: Collection[str], captured: Sequence[Tensor]) -> dict[str, Tensor]:
    """The results of `attention_backward_op` after dv that were wanted."""
    *of_terms, flat = grads
    found = {name: x for name, x in zip(GRADED, of_terms, strict=True) if name in wanted}
    read = [i for i in range(len(captured)) if name_of_captured(i) in wanted]
    parts = flat.split([captured[i].numel() for i in read]) if read else ()
    shaped = {i: x.view_as(captured[i]).to(captured[i].dtype) for i, x in zip(read, parts, strict=True)}
    return found | {name_of_captured(i): x for i, x in shaped.items()}


class _Gradients(torch.autograd.Function):
    """The autograd node of `attention_backward_op`, for ``create_graph``: a second backward raises."""

    @staticmethod
    def forward(ctx, keys, *given):  # type: ignore[no-untyped-def]
        return _below_autograd(attention_backward_op, keys, given[: 9 + NUM_ARGUMENTS])

    @staticmethod
    def backward(ctx, *grads):  # type: ignore[no-untyped-def]
        raise UnsupportedError("cp_mesh::attention_backward has no gradient: attention can be differentiated once")


def _below_autograd(op: OpOverload, keys: DispatchKeySet, inputs: Sequence[Any]) -> Any:
    # Autograd tracks no view that is made inside, so a result that is a view can be written in place.
    keys &= KEYS_BELOW_AUTOGRAD
    with below_autograd():
        if keys.highestPriorityTypeId() in (DispatchKey.CPU, DispatchKey.CUDA):  # no DTensor, no mode
            return _compute("forward" if op is attention_op else "backward", *inputs)
        if isinstance(inputs[0], DTensor):
            return _dispatch_dtensors(op, keys, inputs)
        return op.redispatch(keys, *inputs)


def _dispatch_dtensors(op: OpOverload, keys: DispatchKeySet, inputs: Sequence[Any]) -> Any:
    """Dispatch by the sharding rule; plain tensors beside DTensors become DTensors here, below autograd."""
    begin = 3 if op is attention_op else 8
    end = begin + NUM_TENSORS
    tensors, form = Tensors(*inputs[begin:end]), FORMATS[inputs[end + 2]]
    if inputs[end]:
        hint = "pass local tensors, to_local(), or call cp_mesh.flex_attention, which converts them"
        refuse(str(op), "no captured tensors beside DTensors", len(inputs[end]), hint, UnsupportedError)
    if {*map(type, tensors)} <= {DTensor, type(None)}:
        return op.redispatch(keys, *inputs)
    placed = place_beside(tensors._asdict(), inputs[0], form)
    # Not entered twice: its exit would turn it off for a caller who turned it on.
    with nullcontext() if allows_plain() else implicit_replication():
        return op.redispatch(keys, *inputs[:begin], *placed, *inputs[end:])


def _with_autograd(op: OpOverload, graph: Any, keys: DispatchKeySet, *inputs: Any) -> Any:
    captured = inputs[(3 if op is attention_op else 8) + NUM_TENSORS]
    if forward_level() >= 0:
        refuse_tangents(str(op), (*inputs, *captured))
    graded = False
    for x in (*inputs, *captured) if torch.is_grad_enabled() else ():
        graded = graded or (isinstance(x, Tensor) and x.requires_grad)
    if graded and in_transform():
        got, hint = "torch.func.grad or the like", "use torch.autograd.grad, or backward()"
        refuse(str(op), "no transform of torch.func", got, hint, UnsupportedError)
    return graph.apply(keys, *inputs, *captured) if graded else _below_autograd(op, keys, inputs)


for _op, _graph in ((attention_op, _Attention), (attention_backward_op, _Gradients)):
    _kernel = untraced(partial(_with_autograd, _op, _graph))
    library.impl(_op, _kernel, "Autograd", with_keyset=True)


def _placed_like(grad: Tensor, x: Tensor) -> Tensor:
    """A gradient with the placements of its tensor. That of ``out.sum()`` arrives replicated, and the sharding rule
    could then shard the sequence over an axis other than cp, which costs DTensor nothing."""
    if isinstance(x, DTensor) and isinstance(grad, DTensor) and grad.placements != x.placements:
        return grad.redistribute(placements=x.placements)
    return grad


def _cast_and_call(keys: DispatchKeySet, q: Tensor, k: Tensor, v: Tensor, *arguments: Any) -> Any:
    """Cast to the autocast dtype of the call; `CustomOpDef.register_autocast` would fix it at registration."""
    cast = autocast(q, k, v)
    with without_keys(keys):
        return attention_op(*cast, *arguments)


for _key in ("AutocastCPU", "AutocastCUDA"):
    _keys = DispatchKeySet(getattr(DispatchKey, _key))
    library.impl("attention", partial(_cast_and_call, _keys), _key)


def _placed(tensors: Tensors, part: str) -> list[Placement | None]:
    named = zip(Tensors._fields, tensors, strict=True)
    return [None if x is None else score_placements(name, x.shape, part)[0] for name, x in named]


@register_sharding(attention_op)
def _(q, k, v, *arguments):  # type: ignore[no-untyped-def]
    call = Call.read(arguments)
    require_sharded((q, k, v), call.seq_dim, call.group_name)
    rows = call.format.rows()
    # DTensors keep nothing (`AttentionSpec.keeps`)
    nothing = [Replicate()] * 3
    return [([x, lse, *nothing], [x, x, x, *_placed(call.tensors, part), *[None] * 5]) for part, x, lse in rows]


@register_sharding(attention_backward_op)
def _(dout, q, k, v, out, lse, dlse, kept, *arguments):  # type: ignore[no-untyped-def]
    call, wanted = Call.read(arguments[:-1]), arguments[-1].split(",")
    require_sharded((q, k, v, out), call.seq_dim, call.group_name)
    graded = {name: getattr(call.tensors, name) if name in wanted else None for name in GRADED}
    rows = []
    for part, x, on_lse in call.format.rows():
        grads = [Replicate() if y is None else score_placements(name, y.shape, part)[1] for name, y in graded.items()]
        given = [x] * 5 + [on_lse, None if dlse is None else on_lse, None]
        rows.append(([x, x, x, *grads, Replicate()], [*given, *_placed(call.tensors, part), *[None] * 6]))
    return rows
