"""Attention of few queries over many keys, in Triton: the keys of a head are split over the whole GPU.

A kernel that gives a block of queries to a program uses only as many processors as there are kv heads, and cannot read
memory at full speed. Here the keys of each kv head are split, so that there are two programs per processor; a second
kernel merges the splits. The number of keys may be on the device, as in a CUDA graph. Blocks and the number of splits
depend on shapes and the device alone, so a graph's replays compute the same as an eager call.

Its limits are the capability of the kernel "triton", which computes all other tiles.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from itertools import chain
from typing import NamedTuple

import torch
from torch import Tensor

from cp_mesh.geometry.mask import NONE
from cp_mesh.kernels.combine import fused
from cp_mesh.kernels.contract import Pairs
from cp_mesh.kernels.merge import dense_rows
from cp_mesh.kernels.scores import Scores
from cp_mesh.kernels.triton_attention import block_dim

MAX_ROWS = 64
"""Most rows of queries per kv head that count as few."""
MAX_SPLITS = 256
PROGRAMS_PER_PROCESSOR = 2


@dataclass(frozen=True)
class SplitBlocks:
    """Keys that a program reads together, number of blocks loaded ahead (pipeline stages), and warps."""

    k: int
    num_stages: int
    num_warps: int = 4


def blocks_for(dtype: torch.dtype, head_dim: int) -> SplitBlocks:
    """Return the block sizes: two programs of a processor share 227 KiB; products of fp32 are computed in registers."""
    if dtype == torch.float32:
        return SplitBlocks(32, 2, 8) if head_dim <= 128 else SplitBlocks(16, 2, 8)
    return SplitBlocks(64, 3) if head_dim <= 128 else SplitBlocks(32, 3)


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
        pairs: positions of rows and the mask that allows pairs; None: all pairs.
        num_keys: int64, one element, the number of keys; None: all rows of k.
        scores: without sinks.
        into: out [B, H, Sq, Dv] and lse [B, H, Sq], float32, contiguous.
    """
    from cp_mesh.inference.split_kv_triton import merge_splits_kernel, splits_kernel

    assert scores.sinks is None and all(x.is_contiguous() and x.dtype == torch.float32 for x in into)
    (B, H, num_q, dim), (K, num_k), v_dim = q.shape, k.shape[1:3], v.shape[3]
    q, k, v = dense_rows(q, k, v)
    blocks, group = blocks_for(q.dtype, max(dim, v_dim)), H // K
    block_q = max(16, min(64, 1 << (group * num_q - 1).bit_length()))
    num_programs = B * K * -(-group * num_q // block_q)
    most = min(MAX_SPLITS, max(1, PROGRAMS_PER_PROCESSOR * _num_processors(q.device) // num_programs))
    num_splits = max(1, min(most, -(-num_k // blocks.k)))
    parts = q.new_empty(num_splits * B * H * num_q * (v_dim + 1), dtype=torch.float32)
    outs, lses = parts.split([num_splits * B * H * num_q * v_dim, num_splits * B * H * num_q])
    splits = max(16, 1 << (most - 1).bit_length())
    slopes = scores.alibi_slopes
    reaches = () if pairs is None else tuple(chain(*pairs.mask.reaches(NONE)))
    with torch.cuda.device_of(q):
        splits_kernel[(num_programs * num_splits,)](
            q, k, v, outs, lses, q.stride()[:3], k.stride()[:3], v.stride()[:3], num_keys,
            None if pairs is None else (pairs.q_pos.contiguous(), pairs.k_pos.contiguous()),
            None if scores.softcap is None else float(scores.softcap),
            None if slopes is None else slopes.contiguous(), H, num_q, num_k, num_splits, reaches, scores.scale,
            GROUP=group, HEAD_DIM=dim, V_HEAD_DIM=v_dim, BLOCK_DIM=block_dim(dim), BLOCK_V_DIM=block_dim(v_dim),
            BLOCK_Q=block_q, BLOCK_K=blocks.k, num_warps=blocks.num_warps, num_stages=blocks.num_stages,
        )  # fmt: skip
        merge_splits_kernel[(B * H * num_q,)](
            outs, lses, *into, num_splits, B * H * num_q, V_HEAD_DIM=v_dim, BLOCK_V_DIM=block_dim(v_dim),
            SPLITS=splits, CHUNK=min(splits, 64), num_warps=8,
        )  # fmt: skip


class Further(NamedTuple):
    """Where appended tokens go in keys and values of fixed shape, and how many have come: on the device.

    Attributes:
        rows: int64 [n], rows of this rank's memory for all tokens that may come.
        counts: int64 [n + 1], number of keys on this rank before each of them, and after the last one.
        taken: int64 [1], how many have come.
        num_keys: int64 [1], number of keys on this rank.
        ticket: int32 [1], 0.
    """

    rows: Tensor
    counts: Tensor
    taken: Tensor
    num_keys: Tensor
    ticket: Tensor

    @classmethod
    def planned(cls, rows: Tensor, counts: Tensor) -> Further:
        zeros = torch.zeros_like(counts[:1])
        return cls(rows, counts, zeros, counts[:1].clone(), zeros.to(torch.int32))

    def append(self, new: tuple[Tensor, Tensor], memory: tuple[Tensor, Tensor]) -> None:
        """Write the next tokens' keys and values [B, K, n, D] to their rows; a device error beyond the last row."""
        (key, value), (to_key, to_value), num_new = new, memory, new[0].shape[2]
        if fused(torch.float32, key.device):
            self.append_fused(key, value, to_key, to_value)
            return
        at = self.taken + torch.arange(num_new, device=self.rows.device)
        rows = self.rows.index_select(0, at)
        to_key.index_copy_(2, rows, key)
        to_value.index_copy_(2, rows, value)
        self.taken.add_(num_new)
        self.num_keys.copy_(self.counts.index_select(0, self.taken))

    def append_fused(self, key: Tensor, value: Tensor, to_key: Tensor, to_value: Tensor) -> None:
        """Do the same in one launch; both memories have last stride 1."""
        from cp_mesh.inference.split_kv_triton import append_kernel

        (B, K, num_new, dim), v_dim, tensors = key.shape, value.shape[3], (key, value, to_key, to_value)
        with torch.cuda.device_of(key):
            append_kernel[(B * K,)](
                *tensors, *(x.stride() for x in tensors), *self, K, num_new, len(self.rows), DIM=dim, V_DIM=v_dim,
                BLOCK_DIM=block_dim(dim), BLOCK_V_DIM=block_dim(v_dim), num_warps=1,
            )  # fmt: skip


@lru_cache
def _num_processors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 4
