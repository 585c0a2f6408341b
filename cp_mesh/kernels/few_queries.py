"""Attention of few queries over many keys, in Triton: the keys of a head are split over the whole GPU.

A kernel that gives a block of queries to a program uses as many processors as there are kv heads, and cannot read
memory at its speed. Here each kv head's keys are split, so that there is a program for each half of a processor; a
second kernel merges the splits. How many keys there are may stand on the device, as in a CUDA graph. Blocks and the
number of splits follow from shapes and the device, so a graph's replays compute what an eager call does.

What it can do is in the capability of the kernel "triton", which takes all other tiles.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from cp_mesh.kernels.contract import Pairs
from cp_mesh.kernels.merge import _dense_rows as dense_rows
from cp_mesh.kernels.scores import Scores
from cp_mesh.kernels.triton_attention import _block_dim as block_dim
from cp_mesh.kernels.triton_attention import _distances as distances

MAX_ROWS = 64
"""Rows of queries that share a kv head, up to which they count as few."""
MAX_SPLITS = 256
PROGRAMS_PER_PROCESSOR = 2


@dataclass(frozen=True)
class Blocks:
    """Keys that a program reads together, how many such blocks are on their way, and its warps."""

    k: int
    num_stages: int
    num_warps: int = 4


def blocks_for(dtype: torch.dtype, head_dim: int) -> Blocks:
    """Two programs of a processor share 227 KiB of memory; products of fp32 are computed in registers."""
    if dtype == torch.float32:
        return Blocks(32, 2, 8) if head_dim <= 128 else Blocks(16, 2, 8)
    return Blocks(64, 3) if head_dim <= 128 else Blocks(32, 3)


def attend_few(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    pairs: Pairs | None,
    num_keys: Tensor | None,
    scores: Scores,
    into: tuple[Tensor, Tensor],
) -> None:
    """Write out and lse of queries [B, H, Sq, D] over the first keys.

    Args:
        q, k, v: as in `cp_mesh.kernels.contract`.
        pairs: the positions of rows and which pairs of them count; None: all do.
        num_keys: int64, one number: how many keys there are; None: all rows of k.
        scores: without sinks.
        into: out [B, H, Sq, Dv] and lse [B, H, Sq], float32, contiguous.
    """
    from cp_mesh.kernels.few_queries_triton import merge_splits_kernel, splits_kernel

    assert scores.sinks is None and all(x.is_contiguous() and x.dtype == torch.float32 for x in into)
    (B, H, num_q, dim), (K, num_k), v_dim = q.shape, k.shape[1:3], v.shape[3]
    q, k, v = dense_rows(q), dense_rows(k), dense_rows(v)
    blocks, group = blocks_for(q.dtype, max(dim, v_dim)), H // K
    block_q = max(16, min(64, 1 << (group * num_q - 1).bit_length()))
    num_programs = B * K * -(-group * num_q // block_q)
    most = min(MAX_SPLITS, max(1, PROGRAMS_PER_PROCESSOR * _num_processors(q.device) // num_programs))
    num_splits = max(1, min(most, -(-num_k // blocks.k)))
    parts = q.new_empty(num_splits * B * H * num_q * (v_dim + 1), dtype=torch.float32)
    outs, lses = parts.split([num_splits * B * H * num_q * v_dim, num_splits * B * H * num_q])
    table, slopes = scores.relative_bias, scores.alibi_slopes
    with torch.cuda.device_of(q):
        splits_kernel[(num_programs * num_splits,)](
            q, k, v, outs, lses, q.stride()[:3], k.stride()[:3], v.stride()[:3], num_keys,
            None if pairs is None else (pairs.q_pos.contiguous(), pairs.k_pos.contiguous()),
            None if scores.softcap is None else float(scores.softcap),
            None if slopes is None else slopes.contiguous(), None if table is None else table.contiguous(),
            H, num_q, num_k, num_splits, 0 if table is None else table.shape[1] // 2,
            *((0, 0, 0, 0, 0) if pairs is None else distances(pairs.mask)), scores.scale,
            GROUP=group, HEAD_DIM=dim, V_HEAD_DIM=v_dim, BLOCK_DIM=block_dim(dim), BLOCK_V_DIM=block_dim(v_dim),
            BLOCK_Q=block_q, BLOCK_K=blocks.k, num_warps=blocks.num_warps, num_stages=blocks.num_stages,
        )  # fmt: skip
        merge_splits_kernel[(B * H * num_q,)](
            outs, lses, *into, num_splits, B * H * num_q, V_HEAD_DIM=v_dim, BLOCK_V_DIM=block_dim(v_dim),
            SPLITS=max(16, 1 << (most - 1).bit_length()), CHUNK=16, num_warps=4,
        )  # fmt: skip


@lru_cache
def _num_processors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 4
