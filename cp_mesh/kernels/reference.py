"""The specification: attention in plain PyTorch, any device, fp64-capable, every mask. No other kernel imports it.

Memory is O(ROWS x keys of the tile). With P = exp(scale·QKᵀ - lse): dV = PᵀdO, dS = P ∘ (dO Vᵀ - delta),
dQ = scale·dS K, dK = scale·dSᵀ Q, where delta = rowsum(dO ∘ O) - dlse (FlashAttention-2, arXiv:2307.08691, alg. 2).
"""

from __future__ import annotations

import torch
from einops import rearrange
from torch import Tensor

from cp_mesh.kernels.contract import Capability, Pairs, accumulation_dtype
from cp_mesh.kernels.merge import BackwardTile, merging_kernel
from cp_mesh.masks import Band
from cp_mesh.segments import Segments

ROWS = 512  # query rows whose scores are held at a time


def _scores(q: Tensor, k: Tensor, cover: Band | Pairs | Segments, first_row: int, scale: float) -> Tensor:
    """Masked scores [B, K, G, rows, Sk] of query rows ``first_row`` onwards; q [B, K, G, rows, D]."""
    scores = torch.einsum("bkgid,bkjd->bkgij", q, k) * scale
    rows = torch.arange(first_row, first_row + q.shape[3], device=q.device)
    allowed = cover.allowed(rows, torch.arange(k.shape[2], device=q.device))
    allowed = rearrange(allowed, "... i j -> ... 1 1 i j")  # [i, j] broadcasts, [B, i, j] aligns with the batch
    return scores.masked_fill(~allowed, float("-inf"))


def _grouped(x: Tensor, num_kv_heads: int, dtype: torch.dtype) -> Tensor:
    """[B, H, S, D] -> [B, K, G, S, D] in the accumulation dtype."""
    return rearrange(x.to(dtype), "b (k g) s d -> b k g s d", k=num_kv_heads)


def _forward(q: Tensor, k: Tensor, v: Tensor, cover: Band | Pairs | Segments, scale: float) -> tuple[Tensor, Tensor]:
    dtype = accumulation_dtype(q.dtype)
    q, k, v = _grouped(q, k.shape[1], dtype), k.to(dtype), v.to(dtype)
    outs, lses = [], []
    for begin in range(0, q.shape[3], ROWS):
        scores = _scores(q[:, :, :, begin : begin + ROWS], k, cover, begin, scale)
        lse = torch.logsumexp(scores, dim=-1)
        finite = torch.where(lse == float("-inf"), 0.0, lse)  # a row with no key: all weights exp(-inf) = 0
        outs.append(torch.einsum("bkgij,bkjd->bkgid", torch.exp(scores - finite[..., None]), v))
        lses.append(lse)
    return (
        rearrange(torch.cat(outs, dim=3), "b k g s d -> b (k g) s d"),
        rearrange(torch.cat(lses, dim=3), "b k g s -> b (k g) s"),
    )


def _backward(tile: BackwardTile) -> tuple[Tensor, Tensor, Tensor]:
    dtype, num_kv_heads, scale = accumulation_dtype(tile.q.dtype), tile.k.shape[1], tile.scale
    q, dout = (_grouped(x, num_kv_heads, dtype) for x in (tile.q, tile.dout))
    assert tile.delta is not None
    lse, delta = (rearrange(x, "b (k g) s -> b k g s 1", k=num_kv_heads) for x in (tile.lse, tile.delta))
    k, v = tile.k.to(dtype), tile.v.to(dtype)
    finite = torch.where(lse == float("-inf"), 0.0, lse)
    dqs, dk, dv = [], torch.zeros_like(k), torch.zeros_like(v)
    for begin in range(0, q.shape[3], ROWS):
        rows = slice(begin, begin + ROWS)
        q_rows, dout_rows = q[:, :, :, rows], dout[:, :, :, rows]
        probs = torch.exp(_scores(q_rows, k, tile.cover, begin, scale) - finite[:, :, :, rows])
        dscores = torch.einsum("bkgid,bkjd->bkgij", dout_rows, v) - delta[:, :, :, rows]
        dscores = probs * dscores * scale
        dqs.append(torch.einsum("bkgij,bkjd->bkgid", dscores, k))
        dk += torch.einsum("bkgij,bkgid->bkjd", dscores, q_rows)
        dv += torch.einsum("bkgij,bkgid->bkjd", probs, dout_rows)
    return rearrange(torch.cat(dqs, dim=3), "b k g s d -> b (k g) s d"), dk, dv


REFERENCE = merging_kernel(
    "reference",
    Capability(
        devices=("cpu", "cuda"),
        dtypes=(torch.float64, torch.float32, torch.bfloat16, torch.float16),
        covers=("full", "causal", "window", "pairs", "segments"),
        v_head_dim=True,
        differentiable_lse=True,
    ),
    _forward,
    _backward,
    uses_delta=True,
    rounds=False,
)
