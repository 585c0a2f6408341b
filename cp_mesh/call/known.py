"""Calls that passed all checks: one look-up finds them again, and a node of autograd runs their passes.

Only eager calls on local tensors without score tensors are kept. Their key has what checks, comparisons and plans read:
keywords, shapes, dtypes, devices, modes, and the identity of mesh and mask. A call is known as long as both live, and
with it the plan of its batch.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from cp_mesh._torch import below_autograd, forward_level, function_mode, profiles, times_written
from cp_mesh.call.method import Plan
from cp_mesh.call.op import attention_backward_op, without_rows
from cp_mesh.call.operators import PLAIN, is_seen
from cp_mesh.call.passes import backward, kind_of, run_backward, run_forward
from cp_mesh.call.plan import MOST as MOST_PLANS
from cp_mesh.call.plan import Plans, make_plan, refuse_copies
from cp_mesh.call.spec import Call, autocast
from cp_mesh.comm.agreement import CHECK, Calls, calls_of, checking
from cp_mesh.comm.group_state import states_of
from cp_mesh.geometry.layouts import Layout
from cp_mesh.geometry.mask import TENSORS, Mask
from cp_mesh.kernels.scores import Scores
from cp_mesh.sequence.sharded_sequence import ROOT

MOST = 512  # calls that are known
_calls: dict[tuple[Any, ...], Known] = {}
_PLAIN = (str, int, float, type(None), type, Layout, torch.Size, torch.dtype, torch.device)


class Known(NamedTuple):
    """A call that passed all checks.

    Attributes:
        plan, scores, call: calls of one key share them.
        group: a weak reference, as a group's plans go with it.
        dtype: of q, k and v, cast by autocast.
        states: of the group; ``plans``, ``calls`` and ``kinds`` must be those in it, else the group was told to forget.
        read: tensors of the mask, and how often they had been written when the plan read them.
        alive: weak references to mesh and mask.
    """

    plan: Plan
    scores: Scores
    call: Call
    dtype: torch.dtype
    group: Callable[[], Any]
    states: dict[Any, Any]
    plans: Plans
    calls: Calls
    kinds: set[Any]
    read: list[tuple[Tensor, int]]
    alive: tuple[Any, ...]


def key_of(
    qkv: tuple[Tensor, Tensor, Tensor], mesh: Any, mask: Any, seq_dim: Any, return_lse: Any, others: Mapping[str, Any]
) -> tuple[Any, ...] | None:
    """The key of a call; None if the op must see it, or check mode compares every call."""
    if profiles() or function_mode() is not None or CHECK.get().enabled is not None or torch.jit.is_tracing():
        return None
    if forward_level() >= 0:  # forward-mode derivatives are refused
        return None
    query, key, value = qkv
    if is_seen(qkv, graded=True) or type(query) not in PLAIN or type(key) not in PLAIN or type(value) not in PLAIN:
        return None
    device_type = query.device.type
    if device_type == "meta" or query.is_nested or key.is_nested or value.is_nested:  # which have no shape
        return None
    cast = torch.get_autocast_dtype(device_type) if torch.is_autocast_enabled(device_type) else None
    given = seq_dim, return_lse, *others.values()
    return (
        id(mesh), id(mask), *given, *map(type, given), *others, query.shape, key.shape, value.shape,
        query.dtype, key.dtype, value.dtype, query.device, key.device, value.device, query.requires_grad,
        key.requires_grad, value.requires_grad, torch.is_grad_enabled(), torch.are_deterministic_algorithms_enabled(),
        cast, os.environ.get("CP_MESH_CHECK"),
    )  # fmt: skip


def find(key: tuple[Any, ...]) -> Known | None:
    """The call of this key, if nothing that its checks read has changed."""
    try:
        found = _calls.get(key)
    except TypeError:  # a keyword without a hash
        return None
    if found is None or found.calls.broken or found.kinds is not found.calls.kinds:
        return None
    if found.states.get(Plans) is not found.plans or found.states.get(Calls) is not found.calls:
        return None
    for x, times in found.read:
        if times_written(x) != times:
            return None
    if found.call.options.of_root and (root := ROOT.get()) is not None and root.seq_len != found.call.seq_len:
        return None
    return found


def note(key: tuple[Any, ...], call: Call, qkv: tuple[Tensor, Tensor, Tensor], mesh: Any, mask: Mask) -> None:
    """Keep a call that has just run, if the next one of its key needs no check."""
    options, group, (q, k, v) = call.options, call.group, call.format.to_bhsd(*qkv)
    if options.score_mod or options.mask_mod or any(x is not None for x in call.tensors[len(TENSORS) + 1 :]):
        return
    if not all(isinstance(x, _PLAIN) for x in key) or checking(group) is not None:
        return
    scores = call.scores(q)
    plan = make_plan(q, k, v, call, group, scores.features)
    states, read = states_of(group), [x for x in call.tensors if x is not None]
    if kind_of(plan, call) not in states[Calls].kinds:
        return
    known = [*_calls.items()]
    held = [*dict.fromkeys(x.plan for _, x in known if x.plan.reads_tensors and x.plan is not plan)]
    # as many plans that hold device memory as `Plans` keeps
    dropped = held[: max(0, len(held) + 1 - MOST_PLANS)] if plan.reads_tensors else []
    for i, (old, x) in enumerate(known):
        if i <= len(known) - MOST or x.plan in dropped:
            _calls.pop(old, None)
    calls = states[Calls]

    def watch(x: Any) -> Any:
        return weakref.ref(x, lambda _: _calls.pop(key, None))

    versions = [(x, times_written(x)) for x in read]
    _calls[key] = Known(
        plan,
        scores,
        call,
        q.dtype,
        watch(group),
        states,
        states[Plans],
        calls,
        calls.kinds,
        versions,
        (watch(mesh), watch(mask)),
    )


def run(known: Known, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """out and lse of a known call."""
    if not q.dtype == k.dtype == v.dtype == known.dtype:  # by autocast
        q, k, v = autocast(q, k, v)
    if torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad):
        found: tuple[Tensor, Tensor] = _Node.apply(known, q, k, v)
        return found
    with below_autograd():
        out, lse, *_ = forward(known, q, k, v)
    return out, lse


def forward(known: Known, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, ...]:
    """As `passes.run_forward`."""
    if known.plan.reads_tensors:
        refuse_copies(known.plan)
    return run_forward(known.plan, known.scores, known.call, known.group(), q, k, v)


class _Node(torch.autograd.Function):
    """The autograd node of a known call. Its tensors are q, k and v; its results out and lse."""

    @staticmethod
    def forward(ctx, known, q, k, v):  # type: ignore[no-untyped-def]
        with below_autograd():
            out, lse, *kept = forward(known, q, k, v)
        ctx.known, ctx.shape = known, out.shape
        if not known.call.options.differentiable_lse:  # it must not be dropped silently
            ctx.mark_non_differentiable(lse)
        # the same tensors as the op's node saves: a checkpoint's recomputation may find the call known
        of_mask = [x for x, _ in known.read]
        if kept:
            rows, *of_heads = kept
            qkv = [without_rows(x, known.call.seq_dim) for x in (q, k, v)]
            ctx.save_for_backward(*qkv, *of_mask, *of_heads, rows)
        else:
            ctx.save_for_backward(q, k, v, *of_mask, out, lse, None)
        ctx.set_materialize_grads(False)  # no zero gradient for an unused lse: most kernels would refuse it
        return out, lse

    @staticmethod
    def backward(ctx, dout, dlse):  # type: ignore[no-untyped-def]
        known, (q, k, v, *_, out, lse, kept) = ctx.known, ctx.saved_tensors
        dout = q.new_zeros(ctx.shape) if dout is None else dout
        given = dout, q, k, v, out, lse, dlse, kept
        if is_seen(given):
            dq, dk, dv, *_ = attention_backward_op(*given, *known.call.arguments(), "")
        elif CHECK.get().enabled is not None:
            with below_autograd():
                dq, dk, dv, *_ = backward(*given, *known.call.arguments(), "", plan=known.plan)
        else:
            if known.plan.reads_tensors:
                refuse_copies(known.plan)
            calls_of(group := known.group())  # refuses a group in which a pass broke off
            with below_autograd():
                dq, dk, dv, _ = run_backward(known.plan, known.scores, known.call, group, *given)
        return None, dq, dk, dv
