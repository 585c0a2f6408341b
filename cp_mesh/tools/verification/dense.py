"""Reference attention of a whole sequence, by plain matrix products and autograd.

The mask comes from `Mask.allowed`, the specification. No layout, schedule, kernel or transport takes part. The float64
result is the ground truth. In lower precision each product is one `torch.matmul` of that dtype and the steps between
products are float32: its error is that of the plain formula, and a kernel may have at most a multiple of it.
FlashAttention's tests have the same rule: at most twice this error (github.com/Dao-AILab/flash-attention, tests).
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

import torch
from torch import Tensor

from cp_mesh.geometry.mask import Mask
from cp_mesh.kernels.combine import accumulation_dtype
from cp_mesh.kernels.precision import without_tf32
from cp_mesh.kernels.scores import Scores
from cp_mesh.kernels.scores.dropout import kept_weights

MAX_SCORES = 1 << 25  # most scores in memory at a time


@dataclass(frozen=True, eq=False)
class Dense:
    """Results and gradients of attention on one device. ``of_scores``: gradients of score tensors, by name."""

    out: Tensor
    lse: Tensor
    dq: Tensor
    dk: Tensor
    dv: Tensor
    of_scores: dict[str, Tensor]


def dense_attention(
    q: Tensor, k: Tensor, v: Tensor, dout: Tensor, mask: Mask, scores: Scores, wanted: Collection[str] = ()
) -> Dense:
    """Compute attention of all queries over all keys in original order, and its gradients.

    Args:
        q: [B, H, S, D]; k: [B, K, S, D]; v: [B, K, S, Dv]; dout: [B, H, S, Dv], all of one dtype.
        mask: the mask, with tensors on the device of q.
        scores: score options with whole tensors; a bias has all rows.
        wanted: names of score tensors whose gradients are returned.

    Returns:
        out, dq, dk, dv in the dtype of q; lse and ``of_scores`` in float32 (float64 for float64).
    """
    dtype, wide = q.dtype, accumulation_dtype(q.dtype)
    S = q.shape[2]
    # Leaves are float32 or wider, so that gradients of row blocks and of the heads of a group are summed in float32.
    k, v = (x.detach().to(wide).requires_grad_() for x in (k, v))
    of_scores = {name: getattr(scores, name).detach().to(wide).requires_grad_() for name in sorted(wanted)}
    tensors = vars(scores) | of_scores
    leaves = [k, v, *of_scores.values()]
    outs, lses, dqs, totals = [], [], [], [torch.zeros_like(x) for x in leaves]
    num_rows = max(1, MAX_SCORES // max(1, q.shape[0] * q.shape[1] * S))
    with without_tf32():
        for begin in range(0, S, num_rows):
            rows = slice(begin, min(begin + num_rows, S))
            q_rows = q[:, :, rows].detach().to(wide).requires_grad_()
            out, lse = _attend(q_rows, k, v, dtype, rows, mask, Scores(**tensors))
            dq, *grads = torch.autograd.grad(out, [q_rows, *leaves], dout[:, :, rows], allow_unused=True)
            for total, grad in zip(totals, grads, strict=True):
                if grad is not None:
                    total.add_(grad)
            outs.append(out.detach())
            lses.append(lse.detach())
            dqs.append(dq)
    dk, dv, *others = totals
    return Dense(
        torch.cat(outs, dim=2),
        torch.cat(lses, dim=2),
        torch.cat(dqs, dim=2).to(dtype),
        dk.to(dtype),
        dv.to(dtype),
        dict(zip(of_scores, others, strict=True)),
    )


def _attend(
    q: Tensor, k: Tensor, v: Tensor, dtype: torch.dtype, rows: slice, mask: Mask, scores: Scores
) -> tuple[Tensor, Tensor]:
    """Compute (out, lse) of the query rows at positions ``rows``; matrix products use ``dtype``."""
    S, group = k.shape[2], q.shape[1] // k.shape[1]
    kv_head = torch.arange(q.shape[1], device=q.device) // group
    q, k, v = q.to(dtype), k[:, kv_head].to(dtype), v[:, kv_head].to(dtype)
    k_pos = torch.arange(S, device=q.device)
    q_pos = k_pos[rows]
    x = (q @ k.mT).to(accumulation_dtype(dtype)) * scores.scale
    if scores.softcap is not None:
        x = scores.softcap * torch.tanh(x / scores.softcap)
    distance = q_pos[:, None] - k_pos
    if scores.alibi_slopes is not None:
        x = x - scores.alibi_slopes[:, None, None] * distance.abs()
    if (bias := scores.bias) is not None:
        x = x + (bias[:, :, rows] if bias.shape[2] > 1 else bias)
    allowed = mask.allowed(q_pos, k_pos)[:, None]
    blind = ~allowed.any(-1)
    # The softmax of a row without keys has NaN gradients: it gets zeros as scores, and its weights are zeroed below.
    x = x.masked_fill(~allowed, -torch.inf).masked_fill(blind[..., None], 0.0)
    lse = torch.logsumexp(x, -1)
    denominator = lse if scores.sinks is None else torch.logaddexp(lse, scores.sinks[:, None])
    weights = (x - denominator[..., None]).exp().masked_fill(blind[..., None], 0.0)
    if scores.dropout_p:
        kept = kept_weights(scores, q.shape[0], q.shape[1], q_pos, k_pos)
        weights = weights * (kept.double() / (1 - scores.dropout_p)).to(weights.dtype)
    return weights.to(dtype) @ v, lse.masked_fill(blind, -torch.inf)
