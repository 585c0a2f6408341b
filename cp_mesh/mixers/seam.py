"""Rules of fla-core with states of other ranks in between, for pieces of any layout.

The package's own context parallelism of delta rules calls a function between the summaries of pieces and their rows,
one forward and one backward, which gathers states of contiguous or zigzag shards. Copies of its autograd functions call
ours there; those of other rules call ours where they scan gradients. So each pass computes rows once, and nothing is
differentiated that only summarizes.
"""

from __future__ import annotations

import inspect
from functools import cache, partial
from importlib import import_module
from typing import Any

import numpy as np
import torch
from torch import Tensor

from cp_mesh.mixers.between import Between
from cp_mesh.wrap import with_names

_FUNCTIONS = {
    **{"gated_delta_rule": "ChunkGatedDeltaRuleFunction", "kda": "ChunkKDAFunction"},
    **{"simple_gla": "ChunkSimpleGLAFunction", "gla": "ChunkGLAFunction"},
}
_CHUNK = 64


def with_seam(rule: str, rows: dict[str, Any], between: Between) -> tuple[Tensor, Tensor]:
    """Compute pieces, from the states that they are due.

    Args:
        rule: a name of `_FUNCTIONS`.
        rows: arguments of the package's function by name, of all pieces of this rank one after another.
    """
    function, defaults = _function(rule)
    if "beta" in rows:
        rows = rows | {"cp_context": between}
    else:
        with torch.no_grad():
            between.a = between.decays_of(None if "g" not in rows else rows["g"][0], rows["initial_state"])
        scanned = import_module("fla.utils").input_guard(_scanned)  # its kernel takes rows that lie one after another
        rows = rows | {"initial_state": scanned(between, **rows)}
    given = defaults | {"state_v_first": False} | rows  # as without a seam: kernels are tuned for each value
    out, states = function.apply(between, *(given[name] for name in defaults))
    return out, states


@cache
def _function(rule: str) -> tuple[type[torch.autograd.Function], dict[str, Any]]:
    """The autograd function of a rule, whose first argument is a `Between`; the others with their defaults."""
    module = import_module(f"fla.ops.{rule}.chunk")
    own, guard = getattr(module, _FUNCTIONS[rule]), import_module("fla.utils").input_guard

    def half(method: Any, between: Between, direction: str) -> Any:
        method, inside = inspect.unwrap(method), getattr(module, f"chunk_{rule}_{direction}")
        seam = {name: partial(ours, between) for name, ours in _SEAM.items()}
        changed = with_names(inside, inside.__globals__ | seam)
        return with_names(method, method.__globals__ | {inside.__name__: changed})

    class WithSeam(torch.autograd.Function):
        @staticmethod
        @guard
        def forward(ctx: Any, between: Between, *given: Any) -> Any:
            ctx.between = between
            return half(own.forward, between, "fwd")(ctx, *given)

        @staticmethod
        @guard
        def backward(ctx: Any, *grads: Tensor) -> Any:
            return None, *half(own.backward, ctx.between, "bwd")(ctx, *grads)

    parameters = [*inspect.signature(own.forward).parameters.values()][1:]
    return WithSeam, {x.name: None if x.default is x.empty else x.default for x in parameters}


def _scanned(between: Between, **rows: Any) -> Tensor:
    """The states before this rank's pieces, of a rule that is no delta rule."""
    known, sent = rows["initial_state"], between.pieces.chains(False)[0].own
    ends = known
    if len(sent):
        g, bounds = rows.get("g"), rows["cu_seqlens"]
        if g is not None:
            utils = import_module("fla.ops.utils")
            g = utils.chunk_local_cumsum(g, _CHUNK, scale=utils.constant.RCP_LN2, cu_seqlens=bounds)
        options = {"g" if g is None or g.ndim == 3 else "gk": g, "h0": known, "output_final_state": True}
        scan = import_module("fla.ops.common.chunk_h").chunk_fwd_h
        _, ends = scan(rows["k"], rows["v"], cu_seqlens=bounds, chunk_size=_CHUNK, **options)
    return _passed_on(ends, known, between, False)


def _scan_back(between: Between, **given: Any) -> Any:
    """As `chunk_bwd_dh`, with the gradients of the states after this rank's pieces."""
    scan = import_module("fla.ops.common.chunk_h").chunk_bwd_dh
    sent, chains = between.pieces.chains(True)
    found = scan(**given) if len(sent.own) or not len(chains.own) else (None, given["dht"])
    due = _passed_on(found[1], given["dht"], between, True)
    return scan(**given | {"dht": due}) if len(chains.own) else found


def _passed_on(ends: Tensor, known: Tensor, between: Between, back: bool) -> Tensor:
    assert between.a is not None
    sent = between.sent(back)
    return _with_due(between.a[sent], ends[sent], known, between, back)


def _with_due(a: Tensor, b: Tensor, known: Tensor, between: Between, back: bool) -> Tensor:
    with torch.no_grad():
        due, _ = between.pass_on(a, b, back)
    return between.add(known, due, back)


def _before(
    between: Between, k: Tensor, w: Tensor, u: Tensor, initial_state: Tensor, chunk_size: int = _CHUNK, **options: Any
) -> Tensor:
    """As `chunk_gated_delta_rule_fwd_h_pre_process`: the states before this rank's pieces.

    A and B come from the kernel of the rows themselves: A from the identity as state and zeros as values. `cp_context`
    has a kernel for both, whose products are TF32x3. It took longer on H100s (docs/log.md).
    """
    scan = import_module("fla.ops.common.chunk_delta_h").chunk_gated_delta_rule_fwd_h
    sizes = {"chunk_size": chunk_size, "output_final_state": True, "save_new_value": False}
    eye = torch.eye(w.shape[3], device=w.device).expand(1, w.shape[2], -1, -1)
    a, b = [eye[:0]], [initial_state[:0]]
    for own, rows, bounds in _adjacent(between, "through", chunk_size):
        given, begin = _part(rows, k=k, w=w, **options), eye.repeat(own.stop - own.start, 1, 1, 1)
        a.append(scan(u=torch.zeros_like(given["w"]), initial_state=begin, **given, **bounds, **sizes)[2])
    for own, rows, bounds in _adjacent(between, "behind", chunk_size):
        given = _part(rows, k=k, w=w, u=u, **options)
        b.append(scan(initial_state=initial_state[own], **given, **bounds, **sizes)[2])
    between.a, between.shape = torch.cat(a), initial_state.shape[1:]
    return _with_due(_of_sent(between.a, between, False), torch.cat(b), initial_state, between, False)


def _after(
    between: Between, q: Tensor, k: Tensor, w: Tensor, do: Tensor, dv: Tensor, dht: Tensor, initial_state: Tensor,
    scale: float | None = None, chunk_size: int = _CHUNK, **options: Any,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """As `chunk_gated_delta_rule_bwd_dhu_pre_process`: the gradients after this rank's pieces; the states before."""
    scan = import_module("fla.ops.common.chunk_delta_h").chunk_gated_delta_rule_bwd_dhu
    a, b = between.taken(), [dht[:0]]
    for own, rows, bounds in _adjacent(between, "before", chunk_size):
        given = _part(rows, q=q, k=k, w=w, do=do, dv=dv, **options) | bounds | {"scale": scale}
        b.append(scan(h0=initial_state[own], dht=dht[own], chunk_size=chunk_size, **given)[1])
    return _with_due(_of_sent(a.mT, between, True), torch.cat(b), dht, between, True), initial_state


def _of_sent(a: Tensor, between: Between, back: bool) -> Tensor:
    """A of the pieces that are sent. Of a document's first piece, or ``back`` of its last, nobody reads it."""
    num = len(between.sent(back))
    if len(a) == num:
        return a
    pieces = between.pieces
    index = between.index(("through", back), lambda: np.searchsorted(pieces.chains(back)[0].own, pieces.through))
    return a.new_zeros(num, *a.shape[1:]).index_copy(0, index, a)


def _adjacent(between: Between, which: str, chunk_size: int) -> list[tuple[slice, slice, dict[str, Any]]]:
    """Runs of this rank's pieces that lie one after another: which, their rows, and where each begins among these.

    ``which``: of a document that also lies "behind" them, "before" them, or on both sides, "through" them.
    """
    pieces, device = between.pieces, between.device

    def runs() -> Any:
        own = pieces.through if which == "through" else pieces.chains(which == "before")[0].own
        ends = pieces.lens.cumsum()
        for run in np.split(own, np.flatnonzero(np.diff(own) > 1) + 1) if len(own) else ():
            lens = pieces.lens[run]
            bounds, offsets = (np.r_[0, num.cumsum()] for num in (lens, -(-lens // chunk_size)))
            given: dict[str, Any] = {"cu_seqlens": torch.from_numpy(bounds.astype(np.int32)).to(device)}
            given |= {"chunk_offsets": torch.from_numpy(offsets).to(device)}
            given |= {"chunk_indices": range(offsets[-1])}  # the package asks for their number alone
            yield slice(run[0], run[-1] + 1), slice(ends[run[-1]] - lens.sum(), ends[run[-1]]), given

    found: list[Any] = pieces.once(("adjacent", device, which, chunk_size), lambda: [*runs()])
    return found


def _part(rows: slice, **given: Any) -> dict[str, Any]:
    """The rows of some pieces, of each argument that the kernel knows."""
    names = "q", "k", "w", "u", "g", "gk", "do", "dv"
    return {name: x[:, rows] for name, x in given.items() if name in names and x is not None}


def _held(between: Between, states: Tensor, **_: Any) -> Tensor:
    """What the package saves for the backward: states that are not zero, and A."""
    return torch.cat([states[between.held].flatten(), between.taken().flatten()])


def _whole(between: Between, saved: Tensor, **_: Any) -> Tensor:
    """The states before all pieces, of what was saved; A waits for `_after`."""
    num, (heads, K, V) = len(between.held), between.shape
    states, a = saved.split([num * heads * K * V, len(saved) - num * heads * K * V])
    between.a = a.view(-1, heads, K, K)
    whole = saved.new_zeros(len(between.pieces.lens), heads, K, V)
    return whole.index_copy(0, between.held, states.view(num, heads, K, V))


_SEAM: dict[str, Any] = {
    "chunk_gated_delta_rule_fwd_h_pre_process": _before,
    "chunk_gated_delta_rule_bwd_dhu_pre_process": _after,
    "compress_h0": _held,
    "expand_h0": _whole,
    "chunk_bwd_dh": _scan_back,
}
