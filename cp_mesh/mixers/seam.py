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

import torch
from torch import Tensor

from cp_mesh.kernels.precision import exactly
from cp_mesh.mixers.between import Between
from cp_mesh.wrap import with_names

_FUNCTIONS = {
    **{"gated_delta_rule": "ChunkGatedDeltaRuleFunction", "kda": "ChunkKDAFunction"},
    **{"simple_gla": "ChunkSimpleGLAFunction", "gla": "ChunkGLAFunction"},
}


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
            between.decays = between.decays_of(None if "g" not in rows else rows["g"][0], rows["initial_state"])
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
    assert between.decays is not None
    with torch.no_grad():
        due, _ = between.pass_on(between.decays[between.sent(back)], ends[between.sent(back)], back)
    return between.add(known, due, back)


def _before(
    between: Between, k: Tensor, w: Tensor, u: Tensor, cu_seqlens: Tensor, initial_state: Tensor, **options: Any
) -> Tensor:
    """As `chunk_gated_delta_rule_fwd_h_pre_process`: the states before this rank's pieces."""
    summarize, given = import_module("fla.ops.cp.chunk_fwd").chunk_cp_fwd_h, _read(options)

    def of_piece(i: int, out: Tensor) -> None:
        summarize(k=k, w=w, u=u, hm=out, cu_seqlens=cu_seqlens[i : i + 2], **given)

    return _summarized(of_piece, initial_state, between, False)


def _after(
    between: Between, q: Tensor, k: Tensor, w: Tensor, do: Tensor, dv: Tensor, cu_seqlens: Tensor, dht: Tensor,
    initial_state: Tensor, **options: Any,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """As `chunk_gated_delta_rule_bwd_dhu_pre_process`: the gradients after this rank's pieces; the states before."""
    summarize, given = import_module("fla.ops.cp.chunk_bwd").chunk_cp_bwd_dh, _read(options)

    def of_piece(i: int, out: Tensor) -> None:
        summarize(q=q, k=k, w=w, do=do, dv=dv, dhm=out, cu_seqlens=cu_seqlens[i : i + 2], **given)

    return _summarized(of_piece, dht, between, True), initial_state


def _summarized(of_piece: Any, known: Tensor, between: Between, back: bool) -> Tensor:
    """The package summarizes a piece as [HV, K, V + K]: what it makes of no state, then A."""
    sent, (K, V) = between.pieces.chains(back)[0].own, known.shape[2:]
    found = known.new_empty(len(sent), known.shape[1], K, V + K)
    for i, out in zip(sent.tolist(), found, strict=True):
        of_piece(i, out)
    b, a = found.split([V, K], -1)
    b = b + exactly(torch.matmul, a, known[between.sent(back)])
    return between.add(known, between.pass_on(a, b, back)[0], back)


def _read(options: dict[str, Any]) -> dict[str, Any]:
    return {name: x for name, x in options.items() if name in ("g", "gk", "scale", "chunk_size")}


def _held(between: Between, states: Tensor, **_: Any) -> Tensor:
    """Those that are not zero: the package holds them between the passes."""
    return states[between.held]


def _whole(between: Between, states: Tensor, **_: Any) -> Tensor:
    return states.new_zeros(len(between.pieces.lens), *states.shape[1:]).index_copy(0, between.held, states)


_CHUNK = 64
_SEAM: dict[str, Any] = {
    "chunk_gated_delta_rule_fwd_h_pre_process": _before,
    "chunk_gated_delta_rule_bwd_dhu_pre_process": _after,
    "compress_h0": _held,
    "expand_h0": _whole,
    "chunk_bwd_dh": _scan_back,
}
