"""The two passes of the ops on this rank: plan the call with expanded keys and values, and run its method on latents.

`ops.py` registers the ops. Their first call loads this file.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from cp_mesh._torch import below_autograd
from cp_mesh.call.method import Backward, Plan
from cp_mesh.call.passes import begin, compare_backward, graded_of, run_backward, run_forward
from cp_mesh.call.plan import make_plan
from cp_mesh.call.spec import GRADED, Call, Operand
from cp_mesh.kernels.combine import accumulation_dtype
from cp_mesh.latent.expand import LatentScores, latent_kernel, matrices, of_matrices


def forward(
    call: Call, expanded: tuple[Tensor, Tensor], q: Tensor, latent: Tensor, rope: Tensor, up: Tensor
) -> tuple[Tensor, ...]:
    """out and lse; ``expanded``: tensors with the shapes of keys and values."""
    group, (k, v) = call.group, expanded
    widths = f"{latent.shape[-1]} and {rope.shape[-1]} features"
    plan, *_ = begin(q, k, v, call, group, **{"latent and rope": widths})
    with below_autograd():
        plan = _of_latents(plan, call.format.to_bhsd(q, latent, rope))
        scores, _ = _scores_of(call, q, rope, up, graded=False)
        out, lse = run_forward(plan, scores, call, group, q, latent, rope)
    return out, lse


def backward(
    call: Call, expanded: tuple[Tensor, Tensor], wanted: str, dout: Tensor, q: Tensor, latent: Tensor, rope: Tensor,
    up: Tensor, out: Tensor, lse: Tensor, dlse: Tensor | None,
) -> tuple[Tensor, ...]:  # fmt: skip
    """Gradients of q, latent, rope, the up-projection and `GRADED`, those that are not ``wanted`` empty."""
    names = wanted.split(",")
    group, qkv = call.group, call.format.to_bhsd(q, *expanded)
    plan = make_plan(qkv[0], qkv[1], qkv[2], call, group, call.scores(q).features)
    compare_backward(call, group, qkv, wanted)
    with below_autograd():
        plan = _of_latents(plan, call.format.to_bhsd(q, latent, rope))
        scores, grad = _scores_of(call, q, rope, up, graded="up" in names)
        of_terms = [name for name in GRADED if name in names]
        given = Backward(dout, q, latent, rope, out, lse, dlse, None, scores, of_terms)
        dq, dlatent, drope, of_scores = run_backward(plan, call, group, given)
        dup = up.new_empty(0) if grad is None else of_matrices(grad, q.shape[-1], rope.shape[-1]).to(up.dtype)
    return dq, dlatent, drope, dup, *graded_of(call, of_scores, q)


def _of_latents(plan: Plan, qkv: Sequence[Tensor]) -> Plan:
    """The plan of expanded keys as one that moves the latent as k and rope as v; kept with the other."""
    key = "latent", *(x.shape for x in qkv)
    if (found := plan.prepared.get(key)) is None:
        q, k, v = (Operand(x.shape, x.dtype, x.device) for x in qkv)
        kernel, options = latent_kernel(plan.kernel), plan.options._replace(head_chunks=0)  # chunks are of tiles
        given = q, k, v, plan.schedule, kernel, plan.features, plan.settings.degree
        settings = plan.method.settings(options, *given)
        found = plan.prepared[key] = replace(plan, kernel=kernel, settings=settings, prepared={})
    return found


def _scores_of(call: Call, q: Tensor, rope: Tensor, up: Tensor, graded: bool) -> tuple[LatentScores, Tensor | None]:
    """The scores of a pass, and zeros for the gradient of their matrices."""
    heads = q.shape[call.format.dims["heads"]]
    whole = matrices(up, heads, q.shape[-1], rope.shape[-1])
    grad = torch.zeros_like(whole, dtype=accumulation_dtype(q.dtype)) if graded else None
    given = {name: x for name, x in vars(call.scores(q)).items() if name in LatentScores.__dataclass_fields__}
    return LatentScores(**given, up=whole, of_up=grad, chunks=call.options.head_chunks), grad
