"""Ring attention on local tensors: each rank visits the keys of all ranks, one source a step.

Liu et al. 2023 (arXiv:2310.01889). Who owns what, on rank r, in the step that visits source s = r - i:

    q, out, lse, dq    this rank's rows, for the whole call; fp32 sums are held by the kernel's pass
    k, v               this rank's rows; served to whoever needs them
    k_s, v_s           the rows of s that this rank's queries need; received, read in one step, dropped
    dk_s, dv_s         this rank's contribution to the gradient of *those rows of s*; a new tensor in every step, sent
                       to s, which alone adds it to its dk, dv

The hop of the next step is always under way while a step computes. The backward computes the local step last, so that
the last delivery of dk and dv hides behind it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from cp_mesh.kernels.contract import accumulation_dtype
from cp_mesh.plan import Plan
from cp_mesh.schedule import Rows
from cp_mesh.transport import FunctionalTransport, Hop


def ring_forward(q: Tensor, k: Tensor, v: Tensor, plan: Plan) -> tuple[Tensor, Tensor]:
    """Attention of this rank's queries over all keys.

    Args:
        q: [B, H, S_local, D]; k: [B, K, S_local, D]; v: [B, K, S_local, Dv], never written.
        plan: the call's plan.

    Returns:
        out [B, H, S_local, Dv] in q's dtype and lse [B, H, S_local] in fp32 (fp64 for fp64 inputs).
    """
    schedule = plan.schedule
    transport = FunctionalTransport(plan.group, schedule)
    forward = plan.kernel.begin_forward(q, v.shape[3], plan.options.scale)
    steps = schedule.active_steps
    hop = transport.fetch(steps[0], k, v) if steps else None
    if local_tiles := plan.tiles(schedule.cp_rank):
        forward.step(k, v, local_tiles)
    for i, step in enumerate(steps):
        assert hop is not None
        fetched = hop.wait()
        hop = transport.fetch(steps[i + 1], k, v) if i + 1 < len(steps) else None
        if fetched is not None:
            forward.step(*fetched, plan.tiles(schedule.source(step)))
    return forward.finish()


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
    schedule, dtype = plan.schedule, accumulation_dtype(q.dtype)
    transport = FunctionalTransport(plan.group, schedule)
    steps = schedule.active_steps
    hop = transport.fetch(steps[0], k, v) if steps else None
    backward = plan.kernel.begin_backward(dout, q, out, lse, dlse, plan.options.scale)
    dk, dv = torch.zeros_like(k, dtype=dtype), torch.zeros_like(v, dtype=dtype)
    delivery: tuple[int, Hop] | None = None
    for i, step in enumerate(steps):
        assert hop is not None
        fetched = hop.wait()
        hop = transport.fetch(steps[i + 1], k, v) if i + 1 < len(steps) else None
        dk_s, dv_s = None, None
        if fetched is not None:
            dk_s, dv_s = backward.step(*fetched, plan.tiles(schedule.source(step)))
        if delivery is not None:
            _collect(delivery, plan, dk, dv)
        delivery = step, transport.deliver(step, dk_s, dv_s, like=(dk, dv))
    if local_tiles := plan.tiles(schedule.cp_rank):
        local_dk, local_dv = backward.step(k, v, local_tiles)
        dk += local_dk
        dv += local_dv
    if delivery is not None:
        _collect(delivery, plan, dk, dv)
    return backward.finish(), dk.to(k.dtype), dv.to(v.dtype)


def _collect(delivery: tuple[int, Hop], plan: Plan, dk: Tensor, dv: Tensor) -> None:
    """Add the gradients that the receiver of ``step`` computed for this rank's rows."""
    step, hop = delivery
    received = hop.wait()
    if received is not None:
        ranges = plan.schedule.serve[plan.schedule.receiver(step)]
        _add_rows(dk, received[0], ranges)
        _add_rows(dv, received[1], ranges)


def _add_rows(total: Tensor, rows: Tensor, ranges: tuple[Rows, ...]) -> None:
    offset = 0
    for begin, end in ranges:
        total[:, :, begin:end] += rows[:, :, offset : offset + end - begin]
        offset += end - begin
