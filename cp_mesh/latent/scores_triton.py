"""Index scores of half precision on GPUs: products of a query's heads and a block of keys, never in memory.

A program has one block of keys and goes through some queries; the heads of a query are the rows of its matmul.
"""

# No annotations: Triton evaluates them, and accepts only its own types.
# mypy: disallow-untyped-defs=False

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK_KEYS = 128
QUERIES = 32
"""Queries of a program: it reads its keys once for them."""


@triton.jit
def scores_kernel(
    q, k, weights, out, q_strides, k_strides, weights_strides, out_strides, scale, num_q, num_k,
    HEADS: tl.constexpr, DIM: tl.constexpr, BLOCK_HEADS: tl.constexpr, BLOCK_DIM: tl.constexpr,
    BLOCK_KEYS: tl.constexpr, QUERIES: tl.constexpr,
):  # fmt: skip
    """out[b, i, j] = sum_h weights[b, i, h] * relu(scale * q[b, i, h] @ k[b, j])."""
    batch = tl.program_id(2).to(tl.int64)
    keys = tl.program_id(0) * BLOCK_KEYS + tl.arange(0, BLOCK_KEYS)
    dims, heads = tl.arange(0, BLOCK_DIM), tl.arange(0, BLOCK_HEADS)
    k_at = batch * k_strides[0] + keys[None, :].to(tl.int64) * k_strides[1] + dims[:, None] * k_strides[2]
    block = tl.load(k + k_at, mask=(keys[None, :] < num_k) & (dims[:, None] < DIM), other=0.0)
    begin = tl.program_id(1).to(tl.int64) * QUERIES
    for step in range(0, tl.minimum(QUERIES, num_q - begin)):
        query = begin + step
        q_row = batch * q_strides[0] + query * q_strides[1]
        q_at = q_row + heads[:, None] * q_strides[2] + dims[None, :] * q_strides[3]
        rows = tl.load(q + q_at, mask=(heads[:, None] < HEADS) & (dims[None, :] < DIM), other=0.0)
        weights_at = batch * weights_strides[0] + query * weights_strides[1] + heads * weights_strides[2]
        share = tl.load(weights + weights_at, mask=heads < HEADS, other=0.0).to(tl.float32)
        products = tl.maximum(tl.dot(rows, block) * scale, 0.0)
        total = tl.sum(products * share[:, None], 0)
        out_at = batch * out_strides[0] + query * out_strides[1] + keys
        tl.store(out + out_at, total, mask=keys < num_k)


def index_scores_triton(q: Tensor, k: Tensor, weights: Tensor, scale: float) -> Tensor:
    """`index_scores` of half precision: float32 [B, L, T] from [B, L, H, D], [B, T, D] and [B, L, H]."""
    (batch, num_q, heads, dim), num_k = q.shape, k.shape[1]
    out = torch.empty((batch, num_q, num_k), dtype=torch.float32, device=q.device)
    if out.numel():
        grid = (triton.cdiv(num_k, BLOCK_KEYS), triton.cdiv(num_q, QUERIES), batch)
        blocks = max(16, triton.next_power_of_2(heads)), max(16, triton.next_power_of_2(dim))
        scores_kernel[grid](
            q, k, weights, out, q.stride(), k.stride(), weights.stride(), out.stride(), scale, num_q, num_k,
            heads, dim, *blocks, BLOCK_KEYS, QUERIES,
        )  # fmt: skip
    return out
