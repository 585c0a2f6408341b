"""The ops: `torch.ops.cp_mesh.attention` and `torch.ops.cp_mesh.attention_backward`.

One opaque op around the whole loop, with a fake, autograd, autocast and DTensor sharding rules. So it takes DTensors
``[Shard(seq) on cp, Shard(head) on tp, Shard(batch) on dp]``, is one node under torch.compile, and can be named in a
selective-checkpoint policy so that recompute does not replay the ring.

Tensors are in the caller's format, told by ``seq_dim`` (`formats.py`). out and the gradients are dense, contiguous or
in memory as q, k and v are (``as_inputs``): callers who transpose q, and out back, pay for no copy then. DTensors ask
for contiguous ones: their shards may lie in another order than their spec says. What follows q, k and v is a
`spec.Call`. With `Options.keeps` the forward returns three more tensors, which have elements if its method keeps
something for the backward: that is given these in place of q, k, v, out and lse. They are results, so that policies of
checkpointing and compiled code see them. Of the tensors of the scores, and of those that its functions read (captured),
the backward returns gradients too: this rank's share of a sum over ranks, and empty where they are not wanted.
"""

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial, reduce
from hashlib import sha256
from typing import Any

import torch
from torch import Tensor
from torch.distributed.distributed_c10d import _resolve_process_group
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.experimental import implicit_replication, register_sharding
from torch.distributed.tensor.placement_types import Placement

from cp_mesh.call.captures import check_rows, cuts_of, to_shards, told, with_whole
from cp_mesh.call.dtensor import place_beside, require_sharded, score_placements
from cp_mesh.call.formats import FORMATS
from cp_mesh.call.methods import METHODS, Plan
from cp_mesh.call.operators import is_seen, library, refuse_tangents
from cp_mesh.call.plan import make_plan
from cp_mesh.call.spec import GRADED, NUM_ARGUMENTS, NUM_TENSORS, SCHEMA, Call, Operand, Options, Tensors, autocast
from cp_mesh.comm.agreement import (
    ORDER,
    PASS,
    announce_refusal,
    announce_trace,
    checking,
    keep_to_itself,
    note_refusals,
    require_agreement,
)
from cp_mesh.comm.fingerprints import fingerprint
from cp_mesh.comm.first_calls import agree_first, backward_of, is_first, last_forward, note_call, order_of
from cp_mesh.errors import UnsupportedError, refuse
from cp_mesh.geometry.mask import parse_mask
from cp_mesh.kernels import functions
from cp_mesh.kernels.combine import accumulation_dtype, dense_like
from cp_mesh.kernels.scores import FUNCTIONS, OF_ROWS, TERMS, name_of_captured
from cp_mesh.sequence.rows import Rows, note_called, warn_of_padding
from cp_mesh.sequence.sharded_sequence import ROOT


def _no_autocast(x: Tensor) -> AbstractContextManager[Any]:
    """A backward may run inside the caller's autocast, which would cast the fp32 sums of the kernels."""
    device_type = x.device.type
    return torch.autocast(device_type, enabled=False) if torch.is_autocast_enabled(device_type) else nullcontext()


def length_of_call(arguments: Sequence[Any]) -> tuple[str, int | None]:
    """The group of a call of `attention_op`, and its tokens if they must be those of the model's root."""
    call = Call.read(arguments[3:])
    return call.group_name, call.seq_len if call.options.of_root else None


def check_length(seq_len: int, expected: int) -> None:
    """Refuse a core whose rows are not those of its root. ``seq_len`` is that of its call, rows times ranks."""
    if seq_len != expected:
        hint = (
            "does the core attend to a part of its rows, or call SDPA on [B, S, H, D], where it takes [B, H, S, D]? A "
            "core of another sequence needs a ShardedSequence with its length="
        )
        got = f"{seq_len} by the rows of the SDPA call"
        refuse("ContextParallel", f"attention over the root's {expected} tokens", got, hint)


def _what_must_agree(plan: Plan, q: Tensor, k: Tensor, v: Tensor, call: Call) -> dict[str, str]:
    """Everything that must be equal on all cp ranks."""
    options, given = plan.options, call.tensors._asdict()
    cuts = cuts_of(options.captured_cuts)
    graded = [name for name in GRADED if (x := given[name]) is not None and x.requires_grad]
    found = [(name, functions.find(getattr(options, name))) for name in FUNCTIONS]
    # of terms by row each rank has its own: what they are like must agree
    alike = {
        name: tuple(size for size, dim in zip(x.shape, TERMS[name].dims, strict=True) if dim != "rows")
        for name in OF_ROWS
        if (x := given.pop(name)) is not None
    }
    return {
        **_in_words(plan.seq_len, options, q, k, v),
        **{name.replace("layout_", "layout "): fingerprint(x) for name, x in given.items()},
        **{name: str(alike.get(name)) for name in OF_ROWS},
        **{name: function.said for name, function in found if function is not None},
        **{
            f"captured tensor {i} of score_mod and mask_mod": told(x, cuts.get(i, ()))
            for i, x in enumerate(call.captured)
        },
        "sources of block_mask": sha256(options.sources.encode()).hexdigest()[:12] if options.sources else "all",
        "gradients wanted of": ", ".join(graded) or "none",  # Ulysses sends that of a bias
        "kernel": plan.kernel.name,
        "method": plan.method.name,
    }


def _in_words(seq_len: int, options: Options, q: Tensor, k: Tensor, v: Tensor) -> dict[str, str]:
    """What both passes are told of a call, without its tensors."""
    names = ("scale", "softcap", "dropout_p", "method", "ulysses_degree", "inner_ring_size", "kernel",
             "transport", "head_chunks", "deterministic")  # fmt: skip
    return {
        "layout": options.layout,
        "mask": str(parse_mask(options.mask, None, None, None)),
        "seq_len": str(seq_len),
        "batch, heads and head dims": str([(x.shape[0], x.shape[1], x.shape[3]) for x in (q, k, v)]),
        "dtype": str(q.dtype),
        "options": " ".join(f"{name}={getattr(options, name)}" for name in names),
    }


def _kind(arguments: Sequence[Any], q: Tensor, k: Tensor, v: Tensor, call: Call) -> tuple[Any, ...]:
    """What calls of attention have in common of which the first one alone is compared; the same on all ranks."""
    heads = q.shape[0], q.shape[1], k.shape[1], q.shape[3], v.shape[3], q.dtype
    given = *call.tensors, *call.captured
    return _options_of(arguments, call), heads, tuple(x is not None and (x.requires_grad, x.ndim) for x in given)


def _options_of(arguments: Sequence[Any], call: Call) -> tuple[Any, ...]:
    """What follows the tensors of a call, without which ranks' keys a mask shows: that is new in every batch."""
    if call.options.sources:
        arguments = *arguments[:-1], call.options._replace(sources="some").spec()
    return tuple(arguments[NUM_TENSORS + 1 :])


def _attention(q: Tensor, k: Tensor, v: Tensor, *arguments: Any) -> tuple[Tensor, ...]:
    """Attention over the cp group. Returns out, lse, and what is kept: rows, out and lse of this rank's heads.

    lse has no element where something is kept and it has no gradient.
    """
    call = Call.read(arguments)
    form, group = call.format, call.group
    q, k, v = map(form.to_bhsd, (q, k, v))
    try:
        root = ROOT.get()
        if call.options.of_root and root is not None and root.sequence.mesh.get_group().group_name == call.group_name:
            check_length(call.seq_len, root.seq_len)
        plan = make_plan(q, k, v, call.tensors, call.seq_len, group, call.options, call.captured)
        check_rows(plan, call)
    except Exception as error:
        announce_refusal(group, error)
        raise
    kind = _kind(arguments, q, k, v, call)
    if checking(group):
        told = _what_must_agree(plan, q, k, v, call)
        require_agreement(group, {PASS: "forward", **told, ORDER: order_of(group, "forward", kind)})
    elif is_first(group, kind):
        agree_first(group, kind, _what_must_agree(plan, q, k, v, call))
        if call.tensors.bias is None and plan.scores.features.isdisjoint(FUNCTIONS):  # which may hide it
            warn_of_padding(group, plan.seq_len, plan.mask)
    note_call(group, "forward", kind)
    note_called(Rows(plan.options.layout, plan.seq_len, call.group_name), (q.shape[0], q.shape[2]))
    try:
        with _no_autocast(q):
            out, lse, *kept = plan.method.forward(q, k, v, with_whole(plan, call), group)
    except Exception as error:
        keep_to_itself(error)
        note_refusals(group, error)
        raise
    lse = form.lse_from_bhs(lse).contiguous() if lse.ndim > 1 else lse
    return _as_asked(out, call), lse, *(kept or _nothing(q, lse))


def _nothing(q: Tensor, lse: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return q.new_empty(0), q.new_empty(0), lse.new_empty(0)


def _without_rows(x: Tensor, seq_dim: int) -> Tensor:
    """What a backward reads of a tensor whose content it does not need: shape, strides and dtype."""
    shape = (*x.shape[:seq_dim], 0, *x.shape[seq_dim + 1 :])
    return torch.empty_strided(shape, x.stride(), dtype=x.dtype, device=x.device)


def _attention_backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    dlse: Tensor | None,
    kept: Tensor | None,
    *arguments: Any,
) -> tuple[Tensor, ...]:
    """Gradients of `attention_op`, given those of its results: of q, k, v, and of those named in wanted.

    They are `GRADED`, and by `name_of_captured` captured tensors, whose gradients come as one flat tensor that is not
    rounded: DTensor and autograd see into no list.
    With ``kept``, out and lse are those that the forward kept, and q, k and v are `_without_rows`.
    """
    call, wanted = Call.read(arguments[:-1]), arguments[-1]
    form, group = call.format, call.group
    dout, q, k, v = map(form.to_bhsd, (dout, q, k, v))
    kind = _options_of(arguments[:-1], call), q.shape[:2], k.shape[1], q.shape[3], v.shape[3], q.dtype
    if checking(group):
        told = {**_in_words(call.seq_len, call.options, q, k, v), "gradients wanted of": wanted}
        require_agreement(group, {PASS: "backward", ORDER: order_of(group, "backward", kind), **told})
    note_call(group, "backward", kind)
    if kept is None:
        plan = make_plan(q, k, v, call.tensors, call.seq_len, group, call.options, call.captured)
        out, lse, keywords = form.to_bhsd(out), form.lse_to_bhs(lse), {}
    else:
        rows, keywords = dout.shape[2], {"kept": kept}
        of_q, of_k, of_v = (Operand(_with_rows(x.shape, rows), x.dtype, x.device) for x in (q, k, v))
        plan = make_plan(of_q, of_k, of_v, call.tensors, call.seq_len, group, call.options, call.captured)
    if dlse is not None:
        if not plan.kernel.capability.differentiable_lse:
            raise UnsupportedError(f"kernel {plan.kernel.name!r} takes no gradient of lse; kernel='reference' does")
        dlse = form.lse_to_bhs(dlse)
    with _no_autocast(q):
        names = wanted.split(",") if wanted else ()
        given = dout, q, k, v, out, lse, dlse, with_whole(plan, call), group, names
        *grads, of_scores = plan.method.backward(*given, **keywords)
        of_scores = to_shards(of_scores, plan, call)
    dq, dk, dv = (_as_asked(x, call) for x in grads)
    of_terms = (_graded(getattr(call.tensors, name), of_scores.get(name), q) for name in GRADED)
    read = [of_scores[name].flatten() for i in range(len(call.captured)) if (name := name_of_captured(i)) in names]
    flat = torch.cat(read) if read else q.new_empty(0, dtype=accumulation_dtype(q.dtype))
    return dq, dk, dv, *of_terms, flat


def _with_rows(shape: torch.Size, num_rows: int) -> torch.Size:
    batch, heads, _, dim = shape
    return torch.Size((batch, heads, num_rows, dim))


def _as_asked(x: Tensor, call: Call) -> Tensor:
    """A [B, H, S, D] result in the caller's format; keeps its memory order, or is made contiguous."""
    x = call.format.from_bhsd(x)
    return x if call.options.as_inputs else x.contiguous()


def _graded(x: Tensor | None, grad: Tensor | None, q: Tensor) -> Tensor:
    """A new tensor: the gradient as the op returns it."""
    if x is None or grad is None:
        return q.new_empty(0)
    return grad.to(x.dtype, copy=True, memory_format=torch.contiguous_format)


# Not by `torch.library.custom_op` or `register_autograd`: these take the host 60 us more for a forward that needs
# gradients, and 100 us for both passes (examples/benchmarks/registration.py; docs/results/registration_*.csv).
_OWN = "Tensor dout, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, Tensor? dlse, Tensor? kept"
for _schema in (
    f"attention(Tensor q, Tensor k, Tensor v, {SCHEMA}) -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
    f"attention_backward({_OWN}, {SCHEMA}, str wanted) -> ({', '.join(['Tensor'] * (4 + len(GRADED)))})",
):
    # results lie in memory as the inputs do: Inductor may not choose other strides for these than the fakes saw
    library.define(_schema, tags=(torch.Tag.pt2_compliant_tag, torch.Tag.needs_exact_strides))
attention_op = torch.ops.cp_mesh.attention.default
attention_backward_op = torch.ops.cp_mesh.attention_backward.default
_FUNCTIONS: dict[Any, Any] = {attention_op: _attention, attention_backward_op: _attention_backward}
for _op, _function in _FUNCTIONS.items():
    library.impl(_op._opname, torch._disable_dynamo(_function), "CompositeExplicitAutograd")
_DEVICES = (torch._C.DispatchKey.CPU, torch._C.DispatchKey.CUDA)


@torch.library.register_fake("cp_mesh::attention", lib=library)
def _(q, k, v, *arguments):  # type: ignore[no-untyped-def]
    call = Call.read(arguments)
    q, k, v = map(call.format.to_bhsd, (q, k, v))
    method, shapes, dtype = METHODS.get(call.options.method), [], accumulation_dtype(q.dtype)
    if call.options.keeps and method is not None and method.kept_shapes is not None:
        size = call.group.size()
        try:
            degree = method.choose_degree(call.options, q, k, size)
        except Exception:
            announce_trace(call.group_name)
            raise
        shapes = method.kept_shapes(q, k, v, call.seq_len, size, degree)
    if shapes and not call.options.differentiable_lse:
        lse = q.new_empty(0, dtype=dtype)
    else:
        lse = call.format.lse_from_bhs(q.new_empty(q.shape[:3], dtype=dtype))
    kept = [q.new_empty(shape, dtype=x.dtype) for shape, x in zip(shapes, (q, q, lse), strict=False)]
    return _as_asked(dense_like(q, v.shape[-1]), call), lse, *(kept or _nothing(q, lse))


@torch.library.register_fake("cp_mesh::attention_backward", lib=library)
def _(dout, q, k, v, out, lse, dlse, kept, *arguments):  # type: ignore[no-untyped-def]
    call, wanted = Call.read(arguments[:-1]), arguments[-1].split(",")
    graded, rows = {name: getattr(call.tensors, name) for name in GRADED}, call.format.to_bhsd(dout).shape[2]
    read = [x for i, x in enumerate(call.captured) if name_of_captured(i) in wanted]
    dtype = reduce(torch.promote_types, (x.dtype for x in read), accumulation_dtype(q.dtype))
    return (
        *(_as_asked(dense_like(call.format.to_bhsd(x), num_rows=rows), call) for x in (q, k, v)),
        *(x.new_empty(x.shape) if name in wanted else q.new_empty(0) for name, x in graded.items()),
        q.new_empty(sum(x.numel() for x in read), dtype=dtype),
    )


class _Attention(torch.autograd.Function):
    """Below autograd in its forward; its backward is the other op.

    Captured tensors follow the op's arguments once more, as autograd looks into no list.
    """

    @staticmethod
    def forward(ctx, keys, *given):  # type: ignore[no-untyped-def]
        inputs, captured = given[: 3 + NUM_ARGUMENTS], given[3 + NUM_ARGUMENTS :]
        out, lse, kept, *of_heads = _below_autograd(attention_op, keys, inputs)
        qkv, tensors, ctx.others = inputs[:3], inputs[3 : 3 + NUM_TENSORS], inputs[4 + NUM_TENSORS :]
        call = Call.read(inputs[3:])
        ctx.functions = [functions.find(getattr(call.options, name)) for name in FUNCTIONS]  # kept alive
        # most kernels take no gradient of lse, and none must be dropped silently
        ctx.mark_non_differentiable(*(() if call.options.differentiable_lse else (lse,)), kept, *of_heads)
        ctx.has_kept, ctx.shape = kept.ndim > 1, out.shape
        group = call.group
        ctx.forward, ctx.checked = last_forward(group), checking(group)
        if ctx.has_kept:
            ctx.save_for_backward(*(_without_rows(x, call.seq_dim) for x in qkv), *tensors, *of_heads, kept, *captured)
        else:
            ctx.save_for_backward(*qkv, *tensors, out, lse, None, *captured)
        ctx.set_materialize_grads(False)  # an unused lse must not cost a gradient of zeros, which most kernels refuse
        return out, lse, kept, *of_heads

    @staticmethod
    def backward(ctx, dout, dlse, *_):  # type: ignore[no-untyped-def]
        saved = ctx.saved_tensors  # a checkpoint lets them be asked for once
        q, k, v, *tensors, out, lse, kept = saved[: 6 + NUM_TENSORS]
        captured = saved[6 + NUM_TENSORS :]
        needed, of_captured = ctx.needs_input_grad[4 : 4 + NUM_TENSORS], ctx.needs_input_grad[4 + NUM_ARGUMENTS :]
        wanted = [name for name, need in zip(Tensors._fields, needed, strict=True) if need]
        score_mod, _ = ctx.functions  # what a mask reads has no gradient
        read = [i for i, need in enumerate(of_captured) if need and score_mod and i < score_mod.num_captured]
        # Without any gradient too: on the other ranks there may be some, which wait for this one in the ring.
        if kept is None:
            dout = torch.zeros_like(out) if dout is None else _placed_like(dout, out)
            dlse = None if dlse is None else _placed_like(dlse, lse)
        elif dout is None:
            dout = q.new_zeros(ctx.shape)
        names = ",".join([*wanted, *map(name_of_captured, read)])
        given = (dout, q, k, v, out, lse, dlse, kept, *tensors, [*captured], *ctx.others, names)
        group = _resolve_process_group(ctx.others[2])
        with backward_of(ctx.forward) if ctx.checked or checking(group) else nullcontext():
            dq, dk, dv, *grads, flat = _call_backward(given)
        named, of_tensors = dict(zip(GRADED, grads, strict=True)), dict.fromkeys(Tensors._fields)
        for name in wanted:  # of a plain tensor beside DTensors: this rank's share
            plain = isinstance(q, DTensor) and not isinstance(getattr(Tensors(*tensors), name), DTensor)
            of_tensors[name] = named[name].to_local() if plain else named[name]
        parts = iter(flat.split([captured[i].numel() for i in read])) if read else iter(())
        shares = [next(parts).view_as(x).to(x.dtype) if i in read else None for i, x in enumerate(captured)]
        return None, dq, dk, dv, *of_tensors.values(), None, *[None] * len(ctx.others), *shares


def _call_backward(given: Sequence[Any]) -> tuple[Tensor, ...]:
    """`attention_backward_op`; where nothing would see the call, past PyTorch's dispatcher, which takes host time."""
    if is_seen((*given, *given[8 + NUM_TENSORS])):
        return attention_backward_op(*given)
    with torch._C._AutoDispatchBelowADInplaceOrView():
        return _FUNCTIONS[attention_backward_op](*given)


class _Gradients(torch.autograd.Function):
    """What ``create_graph`` asks for: gradients that have none themselves."""

    @staticmethod
    def forward(ctx, keys, *given):  # type: ignore[no-untyped-def]
        return _below_autograd(attention_backward_op, keys, given[: 9 + NUM_ARGUMENTS])

    @staticmethod
    def backward(ctx, *grads):  # type: ignore[no-untyped-def]
        raise UnsupportedError("cp_mesh::attention_backward has no gradient: attention can be differentiated once")


def _below_autograd(op: torch._ops.OpOverload, keys: torch._C.DispatchKeySet, inputs: Sequence[Any]) -> Any:
    keys &= torch._C._after_ADInplaceOrView_keyset
    # Views that are made inside are nobody's: a result that is one can be written in place.
    with torch._C._AutoDispatchBelowADInplaceOrView():
        if keys.highestPriorityTypeId() in _DEVICES:  # no DTensor, no mode: nothing is asked but the function below
            return _FUNCTIONS[op](*inputs)
        if isinstance(inputs[0], DTensor):
            return _dispatch_dtensors(op, keys, inputs)
        return op.redispatch(keys, *inputs)


def _dispatch_dtensors(op: torch._ops.OpOverload, keys: torch._C.DispatchKeySet, inputs: Sequence[Any]) -> Any:
    """By the sharding rule, with plain tensors beside DTensors, which autograd never sees as DTensors."""
    begin = 3 if op is attention_op else 8
    end = begin + NUM_TENSORS
    tensors, form = Tensors(*inputs[begin:end]), FORMATS[inputs[end + 2]]
    if inputs[end]:
        hint = "pass local tensors, to_local(), which cp_mesh.flex_attention does by itself"
        refuse(str(op), "no captured tensors beside DTensors", len(inputs[end]), hint, UnsupportedError)
    if all(x is None or isinstance(x, DTensor) for x in tensors):
        return op.redispatch(keys, *inputs)
    placed = place_beside(tensors._asdict(), inputs[0], form)
    # It would be turned off at the end for a caller who turned it on.
    with nullcontext() if DTensor._op_dispatcher._allow_implicit_replication else implicit_replication():
        return op.redispatch(keys, *inputs[:begin], *placed, *inputs[end:])


def _with_autograd(op: torch._ops.OpOverload, graph: Any, keys: torch._C.DispatchKeySet, *inputs: Any) -> Any:
    captured = next(x for x in inputs if isinstance(x, list | tuple))
    tensors = [x for x in (*inputs, *captured) if isinstance(x, Tensor)]
    refuse_tangents(str(op), tensors)
    graded = torch.is_grad_enabled() and any(x.requires_grad for x in tensors)
    if graded and torch._C._are_functorch_transforms_active():
        got, hint = "torch.func.grad or the like", "use torch.autograd.grad, or backward()"
        refuse(str(op), "no transform of torch.func", got, hint, UnsupportedError)
    return graph.apply(keys, *inputs, *captured) if graded else _below_autograd(op, keys, inputs)


for _op, _graph in ((attention_op, _Attention), (attention_backward_op, _Gradients)):
    _kernel = torch._disable_dynamo(partial(_with_autograd, _op, _graph))
    library.impl(_op._opname, _kernel, "Autograd", with_keyset=True)


def _placed_like(grad: Tensor, x: Tensor) -> Tensor:
    """A gradient where its tensor is: from ``out.sum()`` it comes replicated, and then the sharding rule could choose
    to shard the sequence over an axis that is not cp, which costs DTensor nothing."""
    if isinstance(x, DTensor) and isinstance(grad, DTensor) and grad.placements != x.placements:
        return grad.redistribute(placements=x.placements)
    return grad


def _cast_and_call(keys: torch._C.DispatchKeySet, q: Tensor, k: Tensor, v: Tensor, *arguments: Any) -> Any:
    """`CustomOpDef.register_autocast` fixes the dtype when it is registered; the one in force at the call is wanted."""
    cast = autocast(q, k, v)
    with torch._C._ExcludeDispatchKeyGuard(keys):
        return attention_op(*cast, *arguments)


for _key in ("AutocastCPU", "AutocastCUDA"):
    _keys = torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, _key))
    library.impl("attention", partial(_cast_and_call, _keys), _key)


def _placed(tensors: Tensors, part: str) -> list[Placement | None]:
    named = zip(Tensors._fields, tensors, strict=True)
    return [None if x is None else score_placements(name, x.shape, part)[0] for name, x in named]


@register_sharding(attention_op)
def _(q, k, v, *arguments):  # type: ignore[no-untyped-def]
    call = Call.read(arguments)
    require_sharded((q, k, v), call.seq_dim, call.group_name)
    rows = call.format.rows()
    # DTensors keep nothing (`Options.keeps`)
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
