"""The ops: `torch.ops.cp_mesh.attention` and `torch.ops.cp_mesh.attention_backward`.

One opaque op around the whole loop, with a fake, autograd, autocast and DTensor sharding rules. So it takes DTensors
``[Shard(seq) on cp, Shard(head) on tp, Shard(batch) on dp]``, is one node under torch.compile, and can be named in a
selective-checkpoint policy so that recompute does not replay the ring.

Tensors are in the caller's format, told by ``seq_dim``: 2 = [B, H, S, D], 1 = [B, S, H, D], 0 = packed [T, H, D].
lse is [B, H, S], or [H, T] when packed. out and the gradients are dense, contiguous or in memory as q, k and v are
(``as_inputs``): callers who transpose q, and out back, pay for no copy then. DTensors ask for contiguous ones: their
shards may lie in another order than their spec says. The string argument is `plan.Options.spec`.
The tensors after q, k and v are those of `plan.Tensors`; of the scores' the backward returns gradients too, which are
this rank's share of a sum over ranks, and empty where they are not wanted.
"""

import math
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import forward_ad
from torch.distributed.distributed_c10d import _resolve_process_group
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.experimental import register_sharding
from torch.distributed.tensor.placement_types import Placement

from cp_mesh.agreement import announce_refusal, checking, fingerprint, require_agreement
from cp_mesh.errors import ArgumentError, UnsupportedError, describe
from cp_mesh.kernels.combine import accumulation_dtype, dense_like
from cp_mesh.plan import Options, Plan, Tensors, make_plan
from cp_mesh.ring import ring_backward, ring_forward
from cp_mesh.sequence import ROOT

NUM_TENSORS = len(Tensors._fields)
GRADED = ("sinks", "alibi_slopes", "relative_bias", "bias")
"""Tensors of the scores that have a gradient, in the order in which the backward op returns theirs."""


def to_bhsd(x: Tensor, seq_dim: int) -> Tensor:
    """A [B, H, S, D] view of a tensor in the caller's format."""
    return x if seq_dim == 2 else x.transpose(1, 2) if seq_dim == 1 else x.transpose(0, 1)[None]


def from_bhsd(x: Tensor, seq_dim: int, spec: str) -> Tensor:
    """Back from [B, H, S, D] to the caller's format; keeps the memory order, or makes it contiguous (``as_inputs``)."""
    x = x if seq_dim == 2 else x.transpose(1, 2) if seq_dim == 1 else x[0].transpose(0, 1)
    return x if Options.parse(spec).as_inputs else x.contiguous()


def _no_autocast(x: Tensor) -> AbstractContextManager[Any]:
    """A backward may run inside the caller's autocast, which would cast the fp32 sums of the kernels."""
    device_type = x.device.type
    return torch.autocast(device_type, enabled=False) if torch.is_autocast_enabled(device_type) else nullcontext()


def _lse_to_bhs(lse: Tensor, seq_dim: int) -> Tensor:
    return lse[None] if seq_dim == 0 else lse


def length_of_call(arguments: Sequence[Any]) -> tuple[str, int | None]:
    """The group of a call of `attention_op`, and its tokens if they must be those of the model's root."""
    seq_len, _, group_name, spec = arguments[-4:]
    return group_name, seq_len if Options.parse(spec).of_root else None


def check_length(seq_len: int, expected: int) -> None:
    """Refuse a core whose rows are not those of its root. ``seq_len`` is that of its call, rows times ranks."""
    if seq_len != expected:
        hint = (
            "does the core attend to a part of its rows, or call SDPA on [B, S, H, D], where it takes [B, H, S, D]? A "
            "core of another sequence needs a ShardedSequence with its length="
        )
        got = f"{seq_len} by the rows of the SDPA call"
        raise ArgumentError(describe("ContextParallel", f"attention over the root's {expected} tokens", got, hint))


def _agree(plan: Plan, group: dist.ProcessGroup, q: Tensor, k: Tensor, v: Tensor, tensors: Tensors) -> None:
    """Check mode: compare everything that must be equal on all cp ranks."""
    shapes = [tuple(x.shape) for x in (q, k, v)]
    options, bias = plan.options, None if tensors.bias is None else tensors.bias.shape  # its rows are each rank's own
    require_agreement(
        group,
        {
            "layout": options.layout,
            "mask": options.mask,
            "seq_len": str(plan.seq_len),
            "batch, heads and head dims": str([(shape[0], shape[1], shape[3]) for shape in shapes]),
            "dtype": str(q.dtype),
            "documents": fingerprint(tensors.documents),
            "key_padding": fingerprint(tensors.key_padding),
            "layout index": fingerprint(tensors.layout_index),
            "sinks": fingerprint(tensors.sinks),
            "alibi_slopes": fingerprint(tensors.alibi_slopes),
            "relative_bias": fingerprint(tensors.relative_bias),
            "bias": str(bias and (bias[0], bias[1], bias[3])),
            "dropout_seed": fingerprint(tensors.dropout_seed),
            "options": f"scale={options.scale} softcap={options.softcap} dropout_p={options.dropout_p} "
            f"method={options.method} kernel={options.kernel} "
            f"transport={options.transport} head_chunks={options.head_chunks} deterministic={options.deterministic}",
            "kernel": plan.kernel.name,
        },
    )


def _attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    documents: Tensor | None,
    key_padding: Tensor | None,
    index: Tensor | None,
    sinks: Tensor | None,
    alibi_slopes: Tensor | None,
    relative_bias: Tensor | None,
    bias: Tensor | None,
    dropout_seed: Tensor | None,
    seq_len: int,
    seq_dim: int,
    group_name: str,
    spec: str,
) -> tuple[Tensor, Tensor]:
    """Attention over the cp group; see `cp_mesh.attention` for the arguments. Returns (out, lse)."""
    tensors = Tensors(documents, key_padding, index, sinks, alibi_slopes, relative_bias, bias, dropout_seed)
    group: dist.ProcessGroup = _resolve_process_group(group_name)  # type: ignore[arg-type]
    q, k, v = (to_bhsd(x, seq_dim) for x in (q, k, v))
    try:
        options, root = Options.parse(spec), ROOT.get()
        if options.of_root and root is not None and root.sequence.mesh.get_group().group_name == group_name:
            check_length(seq_len, root.seq_len)
        plan = make_plan(q, k, v, tensors, seq_len, group, options)
    except Exception as error:
        if checking():
            announce_refusal(group, error)
        raise
    if checking():
        _agree(plan, group, q, k, v, tensors)
    with _no_autocast(q):
        out, lse = ring_forward(q, k, v, plan, group)
    return from_bhsd(out, seq_dim, spec), (lse[0] if seq_dim == 0 else lse).contiguous()


def _attention_backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    dlse: Tensor | None,
    documents: Tensor | None,
    key_padding: Tensor | None,
    index: Tensor | None,
    sinks: Tensor | None,
    alibi_slopes: Tensor | None,
    relative_bias: Tensor | None,
    bias: Tensor | None,
    dropout_seed: Tensor | None,
    seq_len: int,
    seq_dim: int,
    group_name: str,
    spec: str,
    wanted: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients of `attention_op`, given those of its results: of q, k, v, and of those of `GRADED` named in wanted."""
    tensors = Tensors(documents, key_padding, index, sinks, alibi_slopes, relative_bias, bias, dropout_seed)
    group: dist.ProcessGroup = _resolve_process_group(group_name)  # type: ignore[arg-type]
    dout, q, k, v, out = (to_bhsd(x, seq_dim) for x in (dout, q, k, v, out))
    plan = make_plan(q, k, v, tensors, seq_len, group, Options.parse(spec))
    lse = _lse_to_bhs(lse, seq_dim)
    if dlse is not None:
        if not plan.kernel.capability.differentiable_lse:
            raise UnsupportedError(f"kernel {plan.kernel.name!r} takes no gradient of lse; kernel='reference' does")
        dlse = _lse_to_bhs(dlse, seq_dim)
    with _no_autocast(q):
        names = wanted.split(",") if wanted else ()
        *grads, of_scores = ring_backward(dout, q, k, v, out, lse, dlse, plan, group, names)
    dq, dk, dv = (from_bhsd(x, seq_dim, spec) for x in grads)
    dsinks, dslopes, dtable, dbias = (_graded(getattr(tensors, name), of_scores.get(name), q) for name in GRADED)
    return dq, dk, dv, dsinks, dslopes, dtable, dbias


def _graded(x: Tensor | None, grad: Tensor | None, q: Tensor) -> Tensor:
    """A new tensor: the gradient as the op returns it."""
    return (
        q.new_empty(0)
        if x is None or grad is None
        else grad.to(x.dtype, copy=True, memory_format=torch.contiguous_format)
    )


# Not `torch.library.custom_op`: what that does around a call takes the host longer than all of the ops' own Python.
_library = torch.library.Library("cp_mesh", "FRAGMENT")
for _name, _function in (("attention", _attention), ("attention_backward", _attention_backward)):
    _schema = torch.library.infer_schema(_function, mutates_args=())
    # results lie in memory as the inputs do: Inductor may not choose other strides for these than the fakes saw
    _library.define(_name + _schema, tags=(torch.Tag.pt2_compliant_tag, torch.Tag.needs_exact_strides))
    _library.impl(_name, torch._disable_dynamo(_function), "CompositeExplicitAutograd")
attention_op = torch.ops.cp_mesh.attention.default
attention_backward_op = torch.ops.cp_mesh.attention_backward.default
_FUNCTIONS: dict[Any, Any] = {attention_op: _attention, attention_backward_op: _attention_backward}
_DEVICES = (torch._C.DispatchKey.CPU, torch._C.DispatchKey.CUDA)


@torch.library.register_fake("cp_mesh::attention", lib=_library)
def _(q, k, v, *args):  # type: ignore[no-untyped-def]
    seq_dim, spec = args[-3], args[-1]
    q = to_bhsd(q, seq_dim)
    lse = q.new_empty(q.shape[1:3] if seq_dim == 0 else q.shape[:3], dtype=accumulation_dtype(q.dtype))
    return from_bhsd(dense_like(q, v.shape[-1]), seq_dim, spec), lse


@torch.library.register_fake("cp_mesh::attention_backward", lib=_library)
def _(dout, q, k, v, out, lse, dlse, *args):  # type: ignore[no-untyped-def]
    tensors, (_, seq_dim, _, spec, wanted) = Tensors(*args[:NUM_TENSORS]), args[NUM_TENSORS:]
    graded = {name: getattr(tensors, name) for name in GRADED}
    return (
        *(from_bhsd(dense_like(to_bhsd(x, seq_dim)), seq_dim, spec) for x in (q, k, v)),
        *(x.new_empty(x.shape) if name in wanted.split(",") else q.new_empty(0) for name, x in graded.items()),
    )


class _Attention(torch.autograd.Function):
    """Below autograd in its forward; its backward is the other op."""

    @staticmethod
    def forward(ctx, keys, *inputs):  # type: ignore[no-untyped-def]
        out, lse = _below_autograd(attention_op, keys, inputs)
        *tensors, ctx.seq_len, ctx.seq_dim, ctx.group_name, ctx.spec = inputs
        if not Options.parse(ctx.spec).differentiable_lse:
            ctx.mark_non_differentiable(lse)  # most kernels take no gradient of it, and none must be dropped silently
        ctx.save_for_backward(*tensors, out, lse)
        ctx.set_materialize_grads(False)  # an unused lse must not cost a gradient of zeros, which most kernels refuse
        return out, lse

    @staticmethod
    def backward(ctx, dout, dlse):  # type: ignore[no-untyped-def]
        q, k, v, *tensors, out, lse = ctx.saved_tensors
        needed = ctx.needs_input_grad[4 : 4 + NUM_TENSORS]
        wanted = [name for name, need in zip(Tensors._fields, needed, strict=True) if need]
        # Without any gradient too: on the other ranks there may be some, which wait for this one in the ring.
        dout = torch.zeros_like(out) if dout is None else _placed_like(dout, out)
        dlse = None if dlse is None else _placed_like(dlse, lse)
        dq, dk, dv, *others = attention_backward_op(
            dout, q, k, v, out, lse, dlse, *tensors,
            ctx.seq_len, ctx.seq_dim, ctx.group_name, ctx.spec, ",".join(wanted),
        )  # fmt: skip
        of_tensors = {name: grad for name, grad in zip(GRADED, others, strict=True) if name in wanted}
        return None, dq, dk, dv, *(of_tensors.get(name) for name in Tensors._fields), None, None, None, None


class _Gradients(torch.autograd.Function):
    """What ``create_graph`` asks for: gradients that have none themselves."""

    @staticmethod
    def forward(ctx, keys, *inputs):  # type: ignore[no-untyped-def]
        return _below_autograd(attention_backward_op, keys, inputs)

    @staticmethod
    def backward(ctx, *grads):  # type: ignore[no-untyped-def]
        raise UnsupportedError("cp_mesh::attention_backward has no gradient: attention can be differentiated once")


def _below_autograd(op: torch._ops.OpOverload, keys: torch._C.DispatchKeySet, inputs: Sequence[Any]) -> Any:
    keys &= torch._C._after_ADInplaceOrView_keyset
    # Views that are made inside are nobody's: a result that is one can be written in place.
    with torch._C._AutoDispatchBelowADInplaceOrView():
        if keys.highestPriorityTypeId() in _DEVICES:  # no DTensor, no mode: nothing is asked but the function below
            return _FUNCTIONS[op](*inputs)
        return op.redispatch(keys, *inputs)


def _with_autograd(op: torch._ops.OpOverload, graph: Any, keys: torch._C.DispatchKeySet, *inputs: Any) -> Any:
    tensors = [x for x in inputs if isinstance(x, Tensor)]
    if forward_ad._current_level >= 0 and any(forward_ad.unpack_dual(x).tangent is not None for x in tensors):
        raise UnsupportedError(
            describe(str(op), "inputs without tangents", "forward-mode derivatives", "use backward()")
        )
    graded = torch.is_grad_enabled() and any(x.requires_grad for x in tensors)
    if graded and torch._C._are_functorch_transforms_active():
        hint = "use torch.autograd.grad, or backward()"
        raise UnsupportedError(describe(str(op), "no transform of torch.func", "torch.func.grad or the like", hint))
    return graph.apply(keys, *inputs) if graded else _below_autograd(op, keys, inputs)


for _op, _graph in ((attention_op, _Attention), (attention_backward_op, _Gradients)):
    _kernel = torch._disable_dynamo(partial(_with_autograd, _op, _graph))
    _library.impl(_op._opname, _kernel, "Autograd", with_keyset=True)


def _placed_like(grad: Tensor, x: Tensor) -> Tensor:
    """A gradient where its tensor is: from ``out.sum()`` it comes replicated, and then the sharding rule could choose
    to shard the sequence over an axis that is not cp, which costs DTensor nothing."""
    if isinstance(x, DTensor) and isinstance(grad, DTensor) and grad.placements != x.placements:
        return grad.redistribute(placements=x.placements)
    return grad


def _register_autocast(library: torch.library.Library, device_type: str) -> None:
    """Cast q, k, v to the autocast dtype, as `F.scaled_dot_product_attention` does; fp64 is left alone there too.

    `CustomOpDef.register_autocast` fixes the dtype when it is registered; the one in force at the call is wanted.
    """
    key = f"Autocast{device_type.upper()}"
    keys = torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, key))

    def autocast(q, k, v, *args):  # type: ignore[no-untyped-def]
        dtype = torch.get_autocast_dtype(device_type)
        cast = [x.to(dtype) if x.is_floating_point() and x.dtype != torch.float64 else x for x in (q, k, v)]
        with torch._C._ExcludeDispatchKeyGuard(keys):
            return torch.ops.cp_mesh.attention.default(*cast, *args)

    library.impl("attention", autocast, key)


for _device_type in ("cpu", "cuda"):
    _register_autocast(_library, _device_type)


def _placements(seq_dim: int) -> list[tuple[str, Placement, Placement]]:
    """For each way to place an axis: its name, the placement of q, k and v in the caller's format, and that of lse."""
    head_dim = 2 if seq_dim == 1 else 1
    rows: list[tuple[str, Placement, Placement]] = [("sequence", Shard(seq_dim), Shard(1 if seq_dim == 0 else 2))]
    rows.append(("heads", Shard(head_dim), Shard(0 if seq_dim == 0 else 1)))
    if seq_dim != 0:
        rows.append(("batch", Shard(0), Shard(0)))
    return [*rows, ("whole", Replicate(), Replicate())]


def score_placements(name: str, shape: Sequence[int], part: str) -> tuple[Placement, Placement]:
    """A tensor of the scores on an axis that shards the sequence, heads or batch of q, or nothing ("whole").

    Args:
        name: its name in `plan.Tensors`.
        shape: its global shape.
        part: what the axis does to q.

    Returns:
        Its placement and that of its gradient.
    """
    dims = {"heads": 0} if name in ("sinks", "alibi_slopes", "relative_bias") else {}
    if name == "bias":
        dims = {"batch": 0, "heads": 1, "sequence": 2}
    if (dim := dims.get(part)) is not None and (name != "bias" or shape[dim] > 1):
        return Shard(dim), Shard(dim)
    return Replicate(), Replicate() if part == "whole" else Partial()


def _require_sharded(specs, seq_dim: int, group_name: str) -> None:  # type: ignore[no-untyped-def]
    """The cp axis, and no other, shards the sequence. `attention` checks this with better words; this is the guard
    for direct calls of the op, whose rule would otherwise let DTensor choose other placements."""
    mesh = specs[0].mesh
    for axis in range(mesh.ndim):
        if mesh.size(axis) == 1:
            continue  # every placement is the whole there, and axes of one rank may share one group
        is_cp = mesh.get_group(axis).group_name == group_name
        for spec in specs:
            if (spec.placements[axis] == Shard(seq_dim)) != is_cp:
                raise ValueError(
                    describe(
                        f"placement on mesh axis {axis}",
                        f"Shard({seq_dim}) exactly on the cp axis",
                        tuple(spec.placements),
                        "shard the sequence on the cp axis alone",
                    )
                )
    for spec in specs:
        for dim in {0, 1, 2} - {seq_dim}:
            parts = math.prod(mesh.size(axis) for axis, p in enumerate(spec.placements) if p == Shard(dim))
            if spec.shape[dim] % parts:
                hint = "use sizes whose product divides it"
                raise ValueError(describe(f"size of dim {dim}", f"a multiple of {parts}", spec.shape[dim], hint))


def _tensor_placements(tensors: Tensors, part: str) -> list[Placement | None]:
    named = zip(Tensors._fields, tensors, strict=True)
    return [None if x is None else score_placements(name, x.shape, part)[0] for name, x in named]


@register_sharding(torch.ops.cp_mesh.attention.default)
def _(q, k, v, *args):  # type: ignore[no-untyped-def]
    tensors, (_, seq_dim, group_name, _) = Tensors(*args[:NUM_TENSORS]), args[NUM_TENSORS:]
    _require_sharded((q, k, v), seq_dim, group_name)
    return [
        ([x, lse], [x, x, x, *_tensor_placements(tensors, part), *[None] * 4]) for part, x, lse in _placements(seq_dim)
    ]


@register_sharding(torch.ops.cp_mesh.attention_backward.default)
def _(dout, q, k, v, out, lse, dlse, *args):  # type: ignore[no-untyped-def]
    tensors, (_, seq_dim, group_name, _, wanted) = Tensors(*args[:NUM_TENSORS]), args[NUM_TENSORS:]
    _require_sharded((q, k, v, out), seq_dim, group_name)
    graded = {name: getattr(tensors, name) if name in wanted.split(",") else None for name in GRADED}
    rows = []
    for part, x, on_lse in _placements(seq_dim):
        grads = [Replicate() if y is None else score_placements(name, y.shape, part)[1] for name, y in graded.items()]
        given = [x] * 5 + [on_lse, None if dlse is None else on_lse]
        rows.append(([x, x, x, *grads], [*given, *_tensor_placements(tensors, part), *[None] * 5]))
    return rows
