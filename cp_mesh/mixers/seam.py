"""Rules of fla-core with states of other ranks in between, for pieces of any layout.

The package's own context parallelism of delta rules calls a function between the summaries of pieces and their rows,
one forward and one backward, which gathers states of contiguous or zigzag shards. Copies of its autograd functions call
ours there; those of other rules call ours where they scan gradients. So each pass computes rows once, and nothing is
differentiated that only summarizes.
"""

from __future__ import annotations

import inspect
from contextvars import ContextVar
from functools import cache, lru_cache, partial
from importlib import import_module
from typing import Any

import numpy as np
import torch
from torch import Tensor

from cp_mesh.mixers.between import Between
from cp_mesh.mixers.moving import Linear, after
from cp_mesh.wrap import with_names

_FUNCTIONS = {
    **{"gated_delta_rule": "ChunkGatedDeltaRuleFunction", "kda": "ChunkKDAFunction"},
    **{"simple_gla": "ChunkSimpleGLAFunction", "gla": "ChunkGLAFunction"},
}
_CHUNK, _DELTA = 64, "fla.ops.common.chunk_delta_h"


class RuleCall:
    """One call: the context that the package hands to our functions for delta rules; others find it in `_BACK`."""

    def __init__(
        self, between: Any, k: Tensor, v: Tensor, g: Tensor | None = None, beta: Tensor | None = None, **_: Any
    ) -> None:
        K, heads, V = k.shape[3], *v.shape[2:]
        self.between, self.shape = between, (heads, K, V)  # of states
        of_decays = (1, 1) if g is None or g.ndim == 3 else (K, 1)
        self.of_a = (heads, *(of_decays if beta is None else (K, K)))
        self.a: Tensor | None = None  # of own pieces; of delta rules of those `through` which a document goes

    def taken(self) -> Tensor | None:
        """A, which is not kept here any longer."""
        a, self.a = self.a, None
        return a

    def pass_on(self, a: Tensor | None, b: list[Tensor], known: Tensor | None, back: bool = False) -> Tensor | None:
        """All states after this, of A and of parts of B of pieces that are sent, and of states that are known.

        Of pieces that no document goes through, nobody reads A: it may be of the others alone.
        """
        between, way = self.between, self.between.ways[back]
        b = b or [torch.empty(0, *self.shape, dtype=torch.float32, device=between.device)]
        of_b = b[0] if len(b) == 1 else torch.cat(b)
        if between.passes and (a is None or len(a) < len(way.senders)):
            whole = of_b.new_zeros(len(way.senders), *self.of_a)
            if a is not None:
                whole[way.through] = a
            a = whole
        with torch.no_grad():
            due, _ = between.pass_on(a, of_b, back)
        return between.add(known, due, back)


_BACK: ContextVar[RuleCall] = ContextVar("cp_mesh_seam")
"""That whose backward runs."""


@lru_cache(maxsize=16)
def of_package(module: str, name: str) -> Any:
    return getattr(import_module(module), name)


def with_seam(rule: str, rows: dict[str, Any], between: Between | None) -> tuple[Tensor, Tensor | None]:
    """Compute pieces, from the states that they are due.

    Args:
        rule: a name of `_FUNCTIONS`.
        rows: arguments of the package's function by name, of all pieces of this rank one after another.
    """
    call, v, known = RuleCall(between, **rows), rows["v"], rows["initial_state"]
    rows["cp_context"] = call
    if not v.shape[1]:  # takes part in what the others gather, in both passes
        known = torch.zeros(0, *call.shape, dtype=torch.float32, device=v.device) if known is None else known
        known = after(known, *(x for x in rows.values() if isinstance(x, Tensor)))
        if between is not None and between.sends:
            joins = partial(call.pass_on, None, [])
            known = Linear.apply(known, joins, partial(joins, back=True))
        return after(v, known), known
    function, scan, defaults = _function(rule)
    if "beta" not in rows:
        rows["initial_state"] = scan(call, **rows)
    given = defaults | rows
    out, states = function.apply(call, *[given[name] for name in defaults])
    return out, states


@cache
def _function(rule: str) -> tuple[type[torch.autograd.Function], Any, dict[str, Any]]:
    """The autograd function of a rule, whose first argument is a `RuleCall`; `_scanned`; others with defaults."""
    module = import_module(f"fla.ops.{rule}.chunk")
    own, guard = getattr(module, _FUNCTIONS[rule]), of_package("fla.utils", "input_guard")

    def half(method: Any, direction: str) -> Any:
        method, inside = inspect.unwrap(method), getattr(module, f"chunk_{rule}_{direction}")
        changed = with_names(inside, inside.__globals__ | _SEAM)
        return guard(with_names(method, method.__globals__ | {inside.__name__: changed}))

    forward, backward = half(own.forward, "fwd"), half(own.backward, "bwd")

    class WithSeam(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, call: RuleCall, *given: Any) -> Any:
            found = forward(ctx, *given)
            ctx.call, ctx.shape, ctx.dtype = call, found[0].shape, found[0].dtype
            ctx.set_materialize_grads(False)  # no zeros for states that nobody reads
            return found

        @staticmethod
        def backward(ctx: Any, dout: Tensor | None, dstates: Tensor | None) -> Any:
            if dout is None:
                assert dstates is not None
                dout = dstates.new_zeros(ctx.shape, dtype=ctx.dtype)
            token = _BACK.set(ctx.call)
            try:
                return None, *backward(ctx, dout, dstates)
            finally:
                _BACK.reset(token)

    parameters = [*inspect.signature(own.forward).parameters.values()][1:]
    defaults = {x.name: None if x.default is x.empty else x.default for x in parameters}
    # without guard, kernels would take rows that do not lie one after another
    return WithSeam, guard(_scanned), defaults | ({"state_v_first": False} if "state_v_first" in defaults else {})


def _scanned(call: RuleCall, **rows: Any) -> Tensor | None:
    """The states before this rank's pieces, of a rule that is no delta rule."""
    between, g, bounds, known = call.between, rows.get("g"), rows["cu_seqlens"], rows["initial_state"]
    if known is None:
        known = torch.zeros(len(between.lens), *call.shape, dtype=torch.float32, device=between.device)
    with torch.no_grad():
        a, sent, ends = between.decays_of(None if g is None else g[0], known), between.ways[0].sent, known
        if len(between.ways[0].senders):
            if g is not None:
                utils = import_module("fla.ops.utils")
                g = utils.chunk_local_cumsum(g, _CHUNK, scale=utils.constant.RCP_LN2, cu_seqlens=bounds)
            options = {"g" if g is None or g.ndim == 3 else "gk": g, "h0": known, "output_final_state": True}
            scan = of_package("fla.ops.common.chunk_h", "chunk_fwd_h")
            _, ends = scan(rows["k"], rows["v"], cu_seqlens=bounds, chunk_size=_CHUNK, **options)
    call.a = a
    return call.pass_on(a[sent], [ends[sent]], known)


def _scan_back(dht: Tensor | None, **given: Any) -> Any:
    """As `chunk_bwd_dh`, with the gradients of the states after this rank's pieces."""
    scan, call, parts = of_package("fla.ops.common.chunk_h", "chunk_bwd_dh"), _BACK.get(), []
    way = call.between.ways[1]
    if len(way.senders) or not len(way.receivers):
        found = scan(dht=dht, **given)
        parts = [found[1][way.sent]] if len(way.senders) else []
    assert call.a is not None
    due = call.pass_on(call.a[way.sent], parts, dht, back=True)
    return scan(dht=due, **given) if len(way.receivers) else found


def _before(
    k: Tensor, w: Tensor, u: Tensor, initial_state: Tensor | None, context: RuleCall, chunk_size: int = _CHUNK,
    **options: Any,
) -> Tensor | None:  # fmt: skip
    """As `chunk_gated_delta_rule_fwd_h_pre_process`: the states before this rank's pieces; None: zeros.

    A and B come from the kernel of the rows themselves: A from the identity as state and zeros as values. `cp_context`
    has a kernel for both, whose products are TF32x3. It took longer on H100s (docs/log.md).
    """
    scan, (heads, K, _), a, b = of_package(_DELTA, "chunk_gated_delta_rule_fwd_h"), context.shape, [], []
    sizes = {"chunk_size": chunk_size, "output_final_state": True, "save_new_value": False}
    for own, rows, bounds in _adjacent(context, "through", chunk_size):
        given, eye = _part(rows, k=k, w=w, **options), torch.eye(K, device=w.device)
        begin = eye.expand(own.stop - own.start, heads, K, K).contiguous()
        a.append(scan(u=torch.zeros_like(given["w"]), initial_state=begin, **given, **bounds, **sizes)[2])
    for own, rows, bounds in _adjacent(context, "behind", chunk_size):
        given, known = _part(rows, k=k, w=w, u=u, **options), None if initial_state is None else initial_state[own]
        b.append(scan(initial_state=known, **given, **bounds, **sizes)[2])
    context.a = torch.cat(a) if a else None
    return context.pass_on(context.a, b, initial_state)


def _after(
    q: Tensor, k: Tensor, w: Tensor, do: Tensor, dv: Tensor, dht: Tensor | None, initial_state: Tensor | None,
    context: RuleCall, scale: float | None = None, chunk_size: int = _CHUNK, **options: Any,
) -> tuple[Tensor | None, Tensor | None]:  # fmt: skip
    """As `chunk_gated_delta_rule_bwd_dhu_pre_process`: the gradients after this rank's pieces; the states before.

    The latter are left out if nobody gave states, as then nobody asks for their gradients.
    """
    scan, a, b = of_package(_DELTA, "chunk_gated_delta_rule_bwd_dhu"), context.taken(), []
    for own, rows, bounds in _adjacent(context, "before", chunk_size):
        assert initial_state is not None  # such pieces have a state before them
        given = _part(rows, q=q, k=k, w=w, do=do, dv=dv, **options) | bounds | {"scale": scale}
        end = None if dht is None else dht[own]
        b.append(scan(h0=initial_state[own], dht=end, chunk_size=chunk_size, **given)[1])
    due = context.pass_on(None if a is None else a.mT, b, dht, back=True)
    return due, initial_state if context.between.given else None


def _adjacent(call: RuleCall, which: str, chunk_size: int) -> list[tuple[slice, slice | None, dict[str, Any]]]:
    """Runs of this rank's pieces that lie one after another: which, their rows (None: all), where each begins.

    ``which``: of a document that also lies "behind" them, "before" them, or on both sides, "through" them.
    """
    between = call.between
    all_lens, device = np.array(between.lens), between.device

    def runs() -> Any:
        own = between.through if which == "through" else between.ways[which == "before"].senders
        ends = all_lens.cumsum()
        for run in np.split(own, np.flatnonzero(np.diff(own) > 1) + 1) if len(own) else ():
            lens = all_lens[run]
            bounds, offsets = (np.r_[0, num.cumsum()] for num in (lens, -(-lens // chunk_size)))
            given: dict[str, Any] = {"cu_seqlens": torch.from_numpy(bounds.astype(np.int32)).to(device)}
            given |= {"chunk_offsets": torch.from_numpy(offsets).to(device)}
            given |= {"chunk_indices": range(offsets[-1])}  # the package asks for their number alone
            rows = slice(ends[run[-1]] - lens.sum(), ends[run[-1]])
            yield slice(run[0], run[-1] + 1), None if len(run) == len(all_lens) else rows, given

    found: list[Any] = between.once(("adjacent", which, chunk_size), lambda: [*runs()])
    return found


def _part(rows: slice | None, **given: Any) -> dict[str, Any]:
    """The rows of some pieces, None: of all, of each argument that the kernel knows."""
    names = "q", "k", "w", "u", "g", "gk", "do", "dv"
    known = {name: x for name, x in given.items() if x is not None and name in names}
    return known if rows is None else {name: x[:, rows] for name, x in known.items()}


def _held(states: Tensor | None, context: RuleCall) -> Tensor | None:
    """What the package saves for the backward: states that are not zero, and A."""
    parts = None if states is None else states[context.between.held], context.taken()
    known = [x.flatten() for x in parts if x is not None]
    return torch.cat(known) if known else None


def _whole(saved: Tensor | None, context: RuleCall) -> Tensor | None:
    """The states before all pieces, of what was saved; A waits for `_after`."""
    if saved is None:
        return None
    between, (heads, K, V) = context.between, context.shape
    states, a = saved.tensor_split([between.num_held * heads * K * V])
    context.a, states = a.view(-1, heads, K, K) if len(a) else None, states.view(-1, heads, K, V)
    if len(states) == len(between.lens):
        return states
    whole = states.new_zeros(len(between.lens), heads, K, V)
    whole[between.held] = states
    return whole


_SEAM: dict[str, Any] = {
    "chunk_gated_delta_rule_fwd_h_pre_process": _before,
    "chunk_gated_delta_rule_bwd_dhu_pre_process": _after,
    "compress_h0": _held,
    "expand_h0": _whole,
    "chunk_bwd_dh": _scan_back,
}
