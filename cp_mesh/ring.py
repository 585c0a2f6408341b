"""Ring attention on local tensors: each rank visits the keys of all ranks, a few sources a stage.

Liu et al. 2023 (arXiv:2310.01889). Who owns what on rank r, in the stage that visits sources s, s', ...:

    q, out, lse, dq    this rank's rows, for the whole call; partial sums are held by the kernel's pass
    k, v               this rank's rows; served to whoever needs them
    k_s, v_s           the rows of the sources that this rank's queries need; received, read in one stage, dropped
    dk_s, dv_s         this rank's contribution to the gradient of *those rows*; written to the transport's buffer and
                       sent to their owners, which alone add them to their dk, dv

The next stage is always under way while one computes. The backward computes the local tiles last, so that the last
delivery of dk and dv hides behind them.

A backward may visit queries instead: (q, dout, lse, delta) travel, dq goes home, and dk, dv stay. It moves fewer bytes
where kv heads are as many as query heads. Heads may be computed in chunks, one after the other: buffers are those of
one chunk.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from cp_mesh.kernels.combine import RowSum
from cp_mesh.kernels.contract import KernelTile, accumulation_dtype, make_delta
from cp_mesh.plan import Plan
from cp_mesh.transport.contract import Transport
from cp_mesh.transport.packing import Packing


def ring_forward(q: Tensor, k: Tensor, v: Tensor, plan: Plan) -> tuple[Tensor, Tensor]:
    """Attention of this rank's queries over all keys.

    Args:
        q: [B, H, S_local, D]; k: [B, K, S_local, D]; v: [B, K, S_local, Dv], never written.
        plan: the call's plan.

    Returns:
        out [B, H, S_local, Dv] in q's dtype and lse [B, H, S_local] in fp32 (fp64 for fp64 inputs).
    """

    def forward(q: Tensor, k: Tensor, v: Tensor, transport: Transport) -> tuple[Tensor, ...]:
        route = plan.schedule.keys
        incoming = transport.fetch((k, v), route)
        forward = plan.kernel.begin_forward(q, v.shape[3], plan.options.scale)
        if local_tiles := plan.local_tiles:
            forward.step(k, v, local_tiles)
        for stage in route.stages:
            if (fetched := incoming.next()) is not None:
                forward.step(fetched[0], fetched[1], plan.tiles(stage))
        return forward.finish()

    out, lse = _over_head_chunks(forward, plan, (q, k, v))
    return out, lse


def ring_backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, dlse: Tensor | None, plan: Plan
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of this rank's q, k and v.

    Args:
        dout: [B, H, S_local, Dv], the gradient of out.
        q, k, v: the forward's inputs.
        out, lse: the forward's results.
        dlse: [B, H, S_local] or None, the gradient of lse.
        plan: the forward's plan.

    Returns:
        dq, dk, dv in the inputs' dtype.
    """
    delta = make_delta(dout, out, dlse) if plan.kernel.uses_delta else None
    visit = _visit_queries if plan.fetches_queries else _visit_keys

    def backward(*args: Any) -> tuple[Tensor, ...]:
        *tensors, k, v, transport = args
        dout, q, out, lse, *some_delta = tensors
        return visit(dout, q, out, lse, some_delta[0] if some_delta else None, k, v, plan, transport)

    tensors = (dout, q, out, lse, *(() if delta is None else (delta,)), k, v)
    dq, dk, dv = _over_head_chunks(backward, plan, tensors)
    return dq, dk, dv


def _visit_keys(
    dout: Tensor,
    q: Tensor,
    out: Tensor,
    lse: Tensor,
    delta: Tensor | None,
    k: Tensor,
    v: Tensor,
    plan: Plan,
    transport: Transport,
) -> tuple[Tensor, Tensor, Tensor]:
    route, dtype = plan.schedule.keys, accumulation_dtype(q.dtype)
    incoming = transport.fetch((k, v), route)
    outgoing = transport.deliver(Packing.of((k, v), plan.gradient_dtype), route)
    backward = plan.kernel.begin_backward(dout, q, out, lse, delta, plan.options.scale)
    dk, dv = (RowSum(x.shape, dtype, x.device) for x in (k, v))

    def collect() -> None:
        for arrived in outgoing.collect():
            dk.add(arrived.begin, arrived.tensors[0])
            dv.add(arrived.begin, arrived.tensors[1])

    for stage in route.stages:
        fetched, written = incoming.next(), outgoing.buffer(stage)
        if fetched is not None and written is not None:
            backward.step(fetched[0], fetched[1], plan.tiles(stage), (written[0], written[1]))
        collect()
        outgoing.send(stage)
    local_tiles = plan.local_tiles
    local_pieces = backward.step(k, v, local_tiles) if local_tiles else []
    collect()
    for piece in local_pieces:  # after all that arrived, so that the order of the sums is the same in every transport
        dk.add(piece.begin, piece.dk)
        dv.add(piece.begin, piece.dv)
    # in q's order of dims, so that the caller's format needs no copy
    return backward.finish(torch.empty_like(q)), dk.finish(torch.empty_like(k)), dv.finish(torch.empty_like(v))


def _visit_queries(
    dout: Tensor,
    q: Tensor,
    out: Tensor,
    lse: Tensor,
    delta: Tensor | None,
    k: Tensor,
    v: Tensor,
    plan: Plan,
    transport: Transport,
) -> tuple[Tensor, Tensor, Tensor]:
    assert delta is not None, "planned for kernels that read delta only: out stays where it is"
    route, dtype, scale = plan.schedule.queries, accumulation_dtype(q.dtype), plan.options.scale
    # One dtype on the wire: lse and delta have no other that is exact.
    travelling = [x.to(dtype) for x in (q, dout, lse[..., None], delta[..., None])]
    incoming = transport.fetch(travelling, route)
    outgoing = transport.deliver(Packing.of((q,), dtype), route)
    dq, dk, dv = (RowSum(x.shape, dtype, x.device) for x in (q, k, v))

    def visit(q: Tensor, dout: Tensor, lse: Tensor, delta: Tensor, tiles: Sequence[KernelTile], into: Tensor) -> Tensor:
        backward = plan.kernel.begin_backward(dout, q, None, lse, delta, scale)
        for piece in backward.step(k, v, tiles):
            dk.add(piece.begin, piece.dk)
            dv.add(piece.begin, piece.dv)
        return backward.finish(into)

    def collect() -> None:
        for arrived in outgoing.collect():
            dq.add(arrived.begin, arrived.tensors[0])

    for stage in route.stages:
        fetched, written = incoming.next(), outgoing.buffer(stage)
        if fetched is not None and written is not None:
            q_s, dout_s, lse_s, delta_s = fetched
            visit(
                q_s.to(q.dtype), dout_s.to(q.dtype), lse_s[..., 0], delta_s[..., 0], plan.query_tiles(stage), written[0]
            )
        collect()
        outgoing.send(stage)
    local_dq = torch.empty(q.shape, dtype=dtype, device=q.device)
    visit(q, dout, lse, delta, plan.local_tiles, local_dq)
    collect()
    dq.add(0, local_dq)
    return dq.finish(torch.empty_like(q)), dk.finish(torch.empty_like(k)), dv.finish(torch.empty_like(v))


def _over_head_chunks(
    run: Callable[..., tuple[Tensor, ...]], plan: Plan, tensors: tuple[Tensor, ...]
) -> tuple[Tensor, ...]:
    """``run`` on all heads, or on a chunk of the kv heads and their query heads at a time."""
    if plan.head_chunks == 1:
        with plan.open_transport() as transport:
            return run(*tensors, transport)
    chunks: list[tuple[Tensor, ...]] = []
    for part in zip(*(x.chunk(plan.head_chunks, dim=1) for x in tensors), strict=True):
        with plan.open_transport() as transport:
            chunks.append(run(*part, transport))
    return tuple(torch.cat(results, dim=1) for results in zip(*chunks, strict=True))
