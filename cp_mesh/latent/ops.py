"""The ops `torch.ops.cp_mesh.latent_attention` and `latent_attention_backward`: one node each, also in compiled code.

Tensors are in the caller's format. The arguments after them are a `spec.Call`. The backward returns gradients of query,
latent, rope, the up-projection, and of the tensors of the scores: empty ones where none is wanted.
"""

from __future__ import annotations

from itertools import compress
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from cp_mesh._torch import resolve_group
from cp_mesh.call.operators import library, register
from cp_mesh.call.spec import GRADED, NUM_TENSORS, SCHEMA, Call, Tensors
from cp_mesh.comm.agreement import checked, checking, last_forward
from cp_mesh.errors import UnsupportedError
from cp_mesh.kernels.combine import accumulation_dtype, dense_like


def expanded_like(call_format: Any, query: Tensor, rope: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
    """Tensors with the shapes of expanded keys and values, without memory."""
    heads, one = query.shape[call_format.dims["heads"]], query.new_empty(1)
    v_dim = up.shape[0] // heads - (query.shape[-1] - rope.shape[-1])
    return one.expand(query.shape), one.expand(*query.shape[:-1], v_dim)


def _forward(q: Tensor, latent: Tensor, rope: Tensor, up: Tensor, *arguments: Any) -> tuple[Tensor, ...]:
    from cp_mesh.latent import latent_passes  # at the first call, as in `cp_mesh.call.op`

    call = Call.read(arguments)
    return latent_passes.forward(call, expanded_like(call.format, q, rope, up), q, latent, rope, up)


def _backward(dout: Tensor, q: Tensor, latent: Tensor, rope: Tensor, up: Tensor, *others: Any) -> tuple[Tensor, ...]:
    from cp_mesh.latent import latent_passes

    out, lse, dlse, *arguments, wanted = others
    call = Call.read(arguments)
    given = dout, q, latent, rope, up, out, lse, dlse
    return latent_passes.backward(call, expanded_like(call.format, q, rope, up), wanted, *given)


def _empty_results(q, latent, rope, up, *arguments):  # type: ignore[no-untyped-def]
    call = Call.read(arguments)
    q_bhsd, _, v = call.format.to_bhsd(q, *expanded_like(call.format, q, rope, up))
    lse = q.new_empty(q_bhsd.shape[:3], dtype=accumulation_dtype(q.dtype))
    return *call.in_callers_format(dense_like(q_bhsd, v.shape[3])), call.format.lse_from_bhs(lse)


def _empty_gradients(dout, q, latent, rope, up, out, lse, dlse, *arguments):  # type: ignore[no-untyped-def]
    call, names = Call.read(arguments[:-1]), arguments[-1].split(",")
    moved = call.in_callers_format(*map(dense_like, call.format.to_bhsd(q, latent, rope)))
    others = ("up", up), *((name, getattr(call.tensors, name)) for name in GRADED)
    return *moved, *(x.new_empty(x.shape) if name in names else q.new_empty(0) for name, x in others)


_GIVEN = "Tensor q, Tensor latent, Tensor rope, Tensor up"
latent_attention_op = register(
    f"latent_attention({_GIVEN}, {SCHEMA}) -> (Tensor, Tensor)", _forward, _empty_results
)  # fmt: skip
latent_attention_backward_op = register(
    f"latent_attention_backward(Tensor dout, {_GIVEN}, Tensor out, Tensor lse, Tensor? dlse, {SCHEMA}, str wanted)"
    f" -> ({', '.join(['Tensor'] * (4 + len(GRADED)))})",
    _backward, _empty_gradients,
)  # fmt: skip


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    tensors, ctx.others, (out, lse) = inputs[: 4 + NUM_TENSORS], inputs[5 + NUM_TENSORS :], output
    if not Call.read(inputs[4:]).options.differentiable_lse:  # it must not be dropped silently
        ctx.mark_non_differentiable(lse)
    ctx.set_materialize_grads(False)  # no zero gradient for an unused lse: most kernels would refuse it
    group = resolve_group(ctx.others[2])
    ctx.forward = last_forward(group) if checking(group) else ""
    ctx.save_for_backward(*tensors, out, lse)


def _differentiate(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> tuple[Any, ...]:
    *tensors, out, lse = ctx.saved_tensors
    names = "q", "latent", "rope", "up", *Tensors._fields
    wanted = [*compress(names, ctx.needs_input_grad)]
    # Run even without any gradient: other ranks may have one, and would wait for this rank.
    dout = torch.zeros_like(out) if dout is None else dout
    given = (dout, *tensors[:4], out, lse, dlse, *tensors[4:], [], *ctx.others, ",".join(wanted))
    group: dist.ProcessGroup = resolve_group(ctx.others[2])
    if ctx.forward or checking(group):
        with checked(enabled=True, backward_of=ctx.forward):
            results = latent_attention_backward_op(*given)
    else:
        results = latent_attention_backward_op(*given)
    found = dict(zip((*names[:4], *GRADED), results, strict=True))
    return *(found[name] if name in wanted else None for name in names), [], *[None] * len(ctx.others)


def _refuse(ctx: Any, *grads: Any) -> None:
    raise UnsupportedError("cp_mesh::latent_attention_backward has no gradient: it can be differentiated once")


torch.library.register_autograd("cp_mesh::latent_attention", _differentiate, setup_context=_keep, lib=library)
torch.library.register_autograd("cp_mesh::latent_attention_backward", _refuse, lib=library)
