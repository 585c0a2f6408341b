"""Eager calls that nothing intercepts: a node of autograd runs their passes, and one look-up finds them again.

The op serves all other calls. Calls are known by what their checks, comparisons and plans read: keywords, shapes,
dtypes, devices, modes, and the identity of mesh and mask. A call is known as long as both live, and with it the plan of
its batch. Tensors of the scores come with each call; dropout and functions are checked anew.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Mapping, Sequence
from itertools import repeat
from typing import Any, NamedTuple

import torch
from torch import Tensor

from cp_mesh._torch import below_autograd, forward_level, function_mode, profiles, times_written, untraced
from cp_mesh.call.method import Backward, Plan
from cp_mesh.call.op import attention_backward_op, by_name, graded_if_asked, wanted_of, without_rows
from cp_mesh.call.operators import PLAIN, is_seen
from cp_mesh.call.passes import begin, run_backward, run_forward
from cp_mesh.call.plan import MOST as MOST_PLANS
from cp_mesh.call.plan import NUM_READ, refuse_copies
from cp_mesh.call.spec import Call, Tensors, autocast
from cp_mesh.comm.agreement import CHECK, Calls, calls_of
from cp_mesh.comm.group_state import state_of
from cp_mesh.geometry.layouts import Layout
from cp_mesh.geometry.mask import Mask
from cp_mesh.kernels.scores import TERMS, Scores, name_of_captured
from cp_mesh.sequence.sharded_sequence import ROOT

MOST = 512  # calls that are known
_calls: dict[tuple[Any, ...], Known] = {}
_PLAIN = (str, int, float, type(None), type, Layout, torch.Size, torch.dtype, torch.device)


class Ready(NamedTuple):
    """A call that was planned and compared.

    Attributes:
        plan, scores, call: without tensors of the scores.
        names: of these tensors, fields of `Tensors`; captured tensors follow them.
        read: tensors of the mask and the layout.
        group: a weak reference, as a group's plans go with it.
        calls: those of the group.
    """

    plan: Plan
    scores: Scores
    call: Call
    names: tuple[str, ...]
    read: Sequence[Tensor]
    group: Callable[[], Any]
    calls: Calls

    def complete(self, q: Tensor, scored: Sequence[Tensor]) -> tuple[Call, Scores]:
        """The call and its scores, with the tensors of the scores."""
        tensors = self.call.tensors._replace(**dict(zip(self.names, scored, strict=False)))
        call = self.call._replace(tensors=tensors, captured=scored[len(self.names) :])
        return call, call.scores(q)


class Known(NamedTuple):
    """A call that needs no check.

    Attributes:
        ready: calls of one key share it.
        dtype: of q, k and v, cast by autocast.
        kinds: of the group's calls, else first calls are compared again.
        read: tensors of the mask, and how often they had been written when the plan read them.
        alive: weak references to mesh and mask.
    """

    ready: Ready
    dtype: torch.dtype
    kinds: set[Any]
    read: list[tuple[Tensor, int]]
    alive: tuple[Any, ...]


def key_of(
    qkv: tuple[Tensor, Tensor, Tensor], mesh: Any, mask: Any, seq_dim: Any, return_lse: Any, others: Mapping[str, Any]
) -> tuple[Any, ...] | None:
    """The key of a call; None if the op must see it, or check mode may be on."""
    if profiles() or function_mode() is not None or CHECK.get().enabled is not None or torch.jit.is_tracing():
        return None
    if forward_level() >= 0 or os.environ.get("CP_MESH_CHECK"):  # the op refuses forward-mode derivatives
        return None
    query, key, value = qkv
    given, scored, of_scored = dict(others), list[Tensor](), list[Any]()
    for x in (*qkv, given.get("dropout_seed"), *given.get("captured", ())):
        if isinstance(x, Tensor) and (type(x) not in PLAIN or x.is_nested or x.layout is not torch.strided):
            return None
    for name in TERMS:
        if isinstance(x := given.get(name), Tensor):
            if type(x) not in PLAIN or x.is_nested or x.layout is not torch.strided:  # sparse ones are refused
                return None
            scored.append(x)
            of_scored += x.shape, x.dtype, x.device, x.requires_grad
            given[name] = Tensor
    if not isinstance(query, Tensor) or not isinstance(key, Tensor) or not isinstance(value, Tensor) or query.is_meta:
        return None
    if is_seen((*qkv, *scored), graded=True):
        return None
    device_type = query.device.type
    cast = torch.get_autocast_dtype(device_type) if torch.is_autocast_enabled(device_type) else None
    values = seq_dim, return_lse, *given.values()
    return (
        id(mesh), id(mask), *values, *map(type, values), *given, *of_scored, query.shape, key.shape, value.shape,
        query.dtype, key.dtype, value.dtype, query.device, key.device, value.device, query.requires_grad,
        key.requires_grad, value.requires_grad, torch.is_grad_enabled(), torch.are_deterministic_algorithms_enabled(),
        cast,
    )  # fmt: skip


def run_again(
    key: tuple[Any, ...], q: Tensor, k: Tensor, v: Tensor, others: Mapping[str, Any]
) -> tuple[Tensor, Tensor] | None:
    """out and lse of the call of this key; None if it is not known, or what its checks read has changed."""
    try:
        found = _calls.get(key)
    except TypeError:  # a keyword without a hash
        return None
    if found is None or (ready := found.ready).calls.broken or found.kinds is not ready.calls.kinds:
        return None
    for x, times in found.read:
        if times_written(x) != times:
            return None
    if (root := ROOT.get()) is not None:
        if ready.call.options.of_root and root.seq_len != ready.call.seq_len:
            return None
        if root.differs(ready.plan.layout, ready.plan.seq_len, ready.call.group_name):
            return None
    if not q.dtype == k.dtype == v.dtype == found.dtype:  # by autocast
        q, k, v = autocast(q, k, v)
    if ready.plan.reads_tensors:
        refuse_copies(ready.plan)
    return _Node.apply(ready, q, k, v, *map(others.__getitem__, ready.names))


@untraced
def run_first(
    key: tuple[Any, ...], call: Call, qkv: tuple[Tensor, Tensor, Tensor], mesh: Any, mask: Mask
) -> tuple[Tensor, Tensor]:
    """out and lse of a call that passed its checks; it is known from now on, if the next one needs none."""
    group, options, (q, k, v) = call.group, call.options, qkv
    plan, _, kind = begin(q, k, v, call, group)
    given = {name: x for name, x in call.tensors._asdict().items() if x is not None}
    read = [given.pop(name) for name in Tensors._fields[:NUM_READ] if name in given]
    bare = call._replace(tensors=Tensors(*call.tensors[:NUM_READ]), captured=())
    calls = state_of(group, Calls)
    ready = Ready(plan, bare.scores(q), bare, tuple(given), read, weakref.ref(group), calls)
    results: tuple[Tensor, Tensor] = _Node.apply(ready, q, k, v, *given.values(), *call.captured)
    if options.score_mod or options.mask_mod or options.dropout_p or not all(map(isinstance, key, repeat(_PLAIN))):
        return results
    if kind not in calls.kinds:
        return results
    known = [*_calls.copy().items()]  # the garbage collector may drop calls at any time
    held = [*dict.fromkeys(x.ready.plan for _, x in known if _holds_memory(x.ready.plan) and x.ready.plan is not plan)]
    # as many plans that hold device memory as `Plans` keeps
    dropped = held[: max(0, len(held) + 1 - MOST_PLANS)] if _holds_memory(plan) else []
    for i, (old, x) in enumerate(known):
        if i <= len(known) - MOST or x.ready.plan in dropped:
            _calls.pop(old, None)

    def watch(x: Any) -> Any:
        return weakref.ref(x, lambda _: _calls.pop(key, None))

    versions = [(x, times_written(x)) for x in read]
    _calls[key] = Known(ready, q.dtype, calls.kinds, versions, (watch(group), watch(mesh), watch(mask)))
    return results


def _holds_memory(plan: Plan) -> bool:
    """Whether a plan holds device memory: tables of tiles, or the order of a batch's layout."""
    return plan.reads_tensors or plan.layout.tensor is not None


class _Node(torch.autograd.Function):
    """The autograd node. Its tensors are q, k, v and those of the scores; its results out and lse."""

    @staticmethod
    def forward(ctx, ready, q, k, v, *scored):  # type: ignore[no-untyped-def]
        call, scores = ready.complete(q, scored) if scored else (ready.call, ready.scores)
        with below_autograd():
            out, lse, *kept = run_forward(ready.plan, scores, call, ready.group(), q, k, v)
        ctx.ready, ctx.shape = ready, out.shape
        if not call.options.differentiable_lse:  # it must not be dropped silently
            ctx.mark_non_differentiable(lse)
        # the same tensors as the op's node saves: a checkpoint's recomputation may go there
        num = len(ready.names)
        others, captured = (*ready.read, *scored[:num]), scored[num:]
        if kept:
            rows, *of_heads = kept
            qkv = [without_rows(x, call.seq_dim) for x in (q, k, v)]
            ctx.save_for_backward(*qkv, *others, *of_heads, rows, *captured)
        else:
            ctx.save_for_backward(q, k, v, *others, out, lse, None, *captured)
        ctx.set_materialize_grads(False)  # no zero gradient for an unused lse: most kernels would refuse it
        return out, lse

    @staticmethod
    def backward(ctx, dout, dlse):  # type: ignore[no-untyped-def]
        ready, saved = ctx.ready, ctx.saved_tensors
        (q, k, v), first = saved[:3], 3 + len(ready.read)
        end = first + len(ready.names)
        out, lse, kept = saved[end : end + 3]
        scored = *saved[first:end], *saved[end + 3 :]
        # Run even without any gradient: other ranks may have one, and would wait for this rank in the ring.
        dout = q.new_zeros(ctx.shape) if dout is None else dout
        dout = dout if kept is None else graded_if_asked(dout)
        given, wanted = (dout, q, k, v, out, lse, dlse, kept), ()
        call, scores = ready.complete(q, scored) if scored else (ready.call, ready.scores)
        if scored:
            wanted = wanted_of(ready.names, scores.score_mod, ctx.needs_input_grad[4:])
        if is_seen((*given, *scored)) or CHECK.get().enabled is not None:
            dq, dk, dv, *grads = attention_backward_op(*given, *call.arguments(), ",".join(wanted))
            of_scores = by_name(grads, wanted, call.captured)
        else:
            if ready.plan.reads_tensors:
                refuse_copies(ready.plan)
            group = ready.group()
            if ready.calls.broken:
                calls_of(group)  # refuses the group
            with below_autograd():
                dq, dk, dv, of_scores = run_backward(ready.plan, call, group, Backward(*given, scores, wanted))
        if not scored:
            return None, dq, dk, dv
        names = *ready.names, *map(name_of_captured, range(len(call.captured)))
        shares = [
            of_scores[name].view_as(x).to(x.dtype) if name in wanted else None
            for name, x in zip(names, scored, strict=True)
        ]
        return None, dq, dk, dv, *shares
