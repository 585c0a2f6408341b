"""The library's own attention kernel, in Triton: any mask, any layout, any head dims, a gradient of lse, no atomics.

It reads the mask at the positions of its rows, so it takes windows, documents, key padding, a prefix and permuted
layouts, and visits no block of pairs that the mask excludes (`cp_mesh.kernels.triton_attention_kernels`). The backward
is two kernels, one that writes dk and dv and one that writes dq; each sums in a fixed order.

Nothing waits for the device. Lengths, bounds, positions and documents are no part of a compiled variant; head dims,
the group size, dtypes and whether there are positions and documents are. Block sizes are a static table, so that all
ranks compute alike. A variant must have been compiled before it is captured in a CUDA graph.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from cp_mesh.kernels.contract import Capability, Kernel, Pairs
from cp_mesh.kernels.merge import BackwardTile, merging_kernel
from cp_mesh.masks import Band, Mask

MAX_ROWS = 1 << 30  # of a tile: band bounds and local indices are computed in 32 bits
UNLIMITED = (1 << 31) - 1  # a distance: positions are checked to be below it


@dataclass(frozen=True)
class Blocks:
    """Rows of queries and of keys that a program computes together; powers of two, 16 at least."""

    q: int
    k: int
    num_warps: int = 4
    num_stages: int = 2


@dataclass(frozen=True)
class Config:
    """Blocks of the three kernels."""

    forward: Blocks
    key_gradients: Blocks
    query_gradients: Blocks


def config_for(dtype: torch.dtype, head_dim: int) -> Config:
    """The static table; ``head_dim`` is the larger of the two."""
    configs = FLOAT_CONFIGS if dtype == torch.float32 else HALF_CONFIGS
    return next(config for largest, config in configs if head_dim <= largest)


# By the largest head dim; the largest blocks that compile for Hopper without spilled registers, whatever the mask.
HALF_CONFIGS = (
    (64, Config(Blocks(128, 64, 8, 3), Blocks(64, 128, 8), Blocks(128, 64, 8, 3))),
    (128, Config(Blocks(128, 64, 8, 3), Blocks(32, 128, 8, 3), Blocks(128, 64, 8, 3))),
    (256, Config(Blocks(128, 32, 8), Blocks(32, 32, 8), Blocks(128, 32, 8))),
)
# There are no exact products of fp32 on tensor cores: they are computed in registers, in which small blocks fit.
FLOAT_CONFIGS = (
    (64, Config(Blocks(32, 32), Blocks(32, 16), Blocks(32, 32))),
    (128, Config(Blocks(16, 32, 8), Blocks(16, 32, 8), Blocks(16, 32, 8))),
    (256, Config(Blocks(32, 16, 8), Blocks(16, 32, 8), Blocks(32, 16, 8))),
)


def triton_kernel(config: Config | None = None) -> Kernel:
    """The kernel, with blocks from the table or, for tests, of these sizes."""
    return merging_kernel(
        "triton",
        Capability(
            devices=("cuda",),
            dtypes=(torch.float32, torch.bfloat16, torch.float16),
            compute_capability=(8, 0),
            covers=("full", "causal", "window", "pairs"),
            max_head_dim=256,
            v_head_dim=True,
            differentiable_lse=True,
            lacking=_lacks,
        ),
        partial(_forward, config),
        partial(_backward, config),
        uses_delta=True,
    )


def _lacks() -> str | None:
    found = "triton" in sys.modules or find_spec("triton") is not None
    return None if found else "package triton (pip install triton)"


def _forward(
    config: Config | None, q: Tensor, k: Tensor, v: Tensor, cover: Band | Pairs, scale: float
) -> tuple[Tensor, Tensor]:
    from cp_mesh.kernels.triton_attention_kernels import forward_kernel

    blocks = (config or config_for(q.dtype, max(q.shape[3], v.shape[3]))).forward
    out, lse = _empty_like(q, v.shape[3]), torch.empty(q.shape[:3], dtype=torch.float32, device=q.device)
    with torch.cuda.device_of(q):
        rows = None if isinstance(cover, Band) else _MaskRows(cover, (blocks,))
        _launch(forward_kernel, blocks, cover, rows, (q, k, v, out, lse), (q, k, v, out), (), scale)
    return out, lse


def _backward(config: Config | None, t: BackwardTile) -> tuple[Tensor, Tensor, Tensor]:
    from cp_mesh.kernels.triton_attention_kernels import key_gradients_kernel, query_gradients_kernel

    assert t.delta is not None, "uses_delta is set"
    config = config or config_for(t.q.dtype, max(t.q.shape[3], t.v.shape[3]))
    by_key, by_query = config.key_gradients, config.query_gradients
    dq = _empty_like(t.q, t.q.shape[3])
    dk, dv = (_empty_like(x, x.shape[3]) if into is None else into for x, into in ((t.k, t.dk), (t.v, t.dv)))
    read = (t.q, t.k, t.v, t.dout)
    strides = (*t.lse.stride(), *t.delta.stride())
    with torch.cuda.device_of(t.q):
        rows = None if isinstance(t.cover, Band) else _MaskRows(t.cover, (by_key, by_query))
        for kernel, blocks, written in (
            (key_gradients_kernel, by_key, (dk, dv)),
            (query_gradients_kernel, by_query, (dq,)),
        ):
            tensors = (*read, t.lse, t.delta, *written)
            of_keys = kernel is key_gradients_kernel
            _launch(kernel, blocks, t.cover, rows, tensors, (*read, *written), strides, t.scale, of_keys=of_keys)
    return dq, dk, dv


def _empty_like(x: Tensor, dim: int) -> Tensor:
    """[B, H, S, dim] with heads and rows in x's order in memory, where a result of this order needs no copy."""
    B, H, S, _ = x.shape
    if x.stride(1) < x.stride(2):
        return x.new_empty((B, S, H, dim)).transpose(1, 2)
    return x.new_empty((B, H, S, dim))


def _launch(
    kernel: Any,
    blocks: Blocks,
    cover: Band | Pairs,
    rows: _MaskRows | None,
    tensors: Sequence[Tensor],
    strided: Sequence[Tensor],
    strides: Sequence[int],
    scale: float,
    *,
    of_keys: bool = False,
) -> None:
    """Launch one of the three kernels.

    Args:
        kernel, blocks: what to launch.
        cover, rows: the mask; ``rows`` is None for a band.
        tensors: the kernel's first arguments; q, k and v come first.
        strided: those of them that are [B, H, S, D], with unit last stride.
        strides: of the others.
        scale: of the scores.
        of_keys: whether a program owns a block of keys, or of queries.
    """
    q, k, v = tensors[:3]
    num_q, num_k = q.shape[2], k.shape[2]
    assert max(num_q, num_k) < MAX_ROWS and all(x.stride(3) == 1 or x.shape[3] == 1 for x in strided)
    num_blocks = -(-num_k // blocks.k) if of_keys else -(-num_q // blocks.q)
    num_programs = q.shape[0] * (k if of_keys else q).shape[1] * num_blocks
    if not num_programs:
        return
    visits = None if rows is None else rows.visits(blocks, keys_inside=not of_keys)
    lo, hi = _bounds(cover, num_q, num_k) if isinstance(cover, Band) else (0, 0)
    kernel[(num_programs,)](
        *tensors,
        *(x.stride()[:3] for x in strided),
        *strides,
        None if visits is None else visits.tensors,
        q.shape[1],
        num_q,
        num_k,
        1 if visits is None else visits.num_masks,
        lo,
        hi,
        scale,
        GROUP=q.shape[1] // k.shape[1],
        HEAD_DIM=q.shape[3],
        V_HEAD_DIM=v.shape[3],
        BLOCK_DIM=_block_dim(q.shape[3]),
        BLOCK_V_DIM=_block_dim(v.shape[3]),
        BLOCK_Q=blocks.q,
        BLOCK_K=blocks.k,
        PAIRS=visits is not None,
        DOCUMENTS=visits is not None and visits.documents,
        num_warps=blocks.num_warps,
        num_stages=blocks.num_stages,
    )


def _block_dim(dim: int) -> int:
    return max(16, 1 << (dim - 1).bit_length())


def _bounds(band: Band, num_q: int, num_k: int) -> tuple[int, int]:
    """(lo, hi) of the same pairs, both finite: no distance is below -num_k or above num_q."""
    lo = -num_k if band.lo is None else min(max(band.lo, -num_k), num_q)
    hi = num_q if band.hi is None else min(max(band.hi, -num_k), num_q)
    return (lo, hi) if lo <= hi else (num_q, num_q)


@dataclass(frozen=True)
class _Visits:
    """What the kernels read of a mask; ``tensors`` are their ``pairs``."""

    tensors: tuple[Tensor, ...]
    num_masks: int
    documents: bool


class _MaskRows:
    """A mask read at the rows of a tile, on the device, for kernels of these blocks."""

    def __init__(self, cover: Pairs, blocks: Sequence[Blocks]) -> None:
        mask = cover.mask
        tensors = [torch.atleast_2d(x) for x in (mask.documents, mask.key_padding) if x is not None]
        self._num_masks = max((len(x) for x in tensors), default=1)
        self._documents = mask.documents is not None
        self._grain = min(size for block in blocks for size in (block.q, block.k))
        self._num_q, self._num_k = cover.q_pos.numel(), cover.k_pos.numel()
        self._q, self._k = self._read(mask, cover.q_pos, keys=False), self._read(mask, cover.k_pos, keys=True)

    def _read(self, mask: Mask, positions: Tensor, keys: bool) -> dict[str, Tensor]:
        from cp_mesh.kernels.triton_attention_kernels import rows_kernel

        positions = positions.contiguous()
        num_rows, num_grains = positions.numel(), -(-positions.numel() // self._grain)

        def empty(*shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
            return torch.empty(shape, dtype=dtype, device=positions.device)

        firsts = empty(self._num_masks, num_rows)
        result = {"firsts": firsts, "lasts": empty(self._num_masks, num_rows) if keys else firsts}
        result["bounds"] = empty(4, self._num_masks, num_grains)
        if mask.documents is not None:  # compared as they are: 64 bits only where they have them
            dtype = torch.int64 if mask.documents.dtype == torch.int64 else torch.int32
            result["ids"] = empty(self._num_masks, num_rows, dtype=dtype)
            result["id_bounds"] = empty(2, self._num_masks, num_grains, dtype=dtype)
        padding = None if mask.key_padding is None else mask.key_padding.view(torch.uint8)
        if num_rows:
            rows_kernel[(num_grains, self._num_masks)](
                positions,
                mask.documents,
                *_strides(mask.documents),
                padding,
                *_strides(padding),
                firsts,
                result["lasts"],
                result.get("ids"),
                result["bounds"],
                result.get("id_bounds"),
                num_rows,
                *_distances(mask),
                min(mask.prefix, UNLIMITED),
                UNLIMITED if mask.length is None else min(mask.length, UNLIMITED),
                KEYS=keys,
                GRAIN=self._grain,
                num_warps=1,
            )
        return result

    def visits(self, blocks: Blocks, keys_inside: bool) -> _Visits:
        """For programs that own blocks of queries and loop over keys, or the reverse."""
        from cp_mesh.kernels.triton_attention_kernels import blocks_kernel

        (outer, num_outer, outer_rows), (inner, num_inner, inner_rows) = (
            (self._q, self._num_q, blocks.q),
            (self._k, self._num_k, blocks.k),
        )[:: 1 if keys_inside else -1]
        num_outer_blocks, num_inner_blocks = -(-num_outer // outer_rows), -(-num_inner // inner_rows)
        shape = (self._num_masks, num_outer_blocks, num_inner_blocks)
        listed = torch.empty(shape, dtype=torch.int32, device=self._q["firsts"].device)
        counts = torch.empty((*shape[:2], 2), dtype=torch.int32, device=listed.device)
        if num_outer:
            blocks_kernel[(num_outer_blocks, self._num_masks)](
                outer["bounds"],
                outer.get("id_bounds"),
                inner["bounds"],
                inner.get("id_bounds"),
                listed,
                counts,
                outer["bounds"].shape[2],
                inner["bounds"].shape[2],
                num_inner,
                INNER_KEYS=keys_inside,
                OUTER=outer_rows // self._grain,
                INNER=inner_rows // self._grain,
                INNER_ROWS=inner_rows,
                num_warps=4,
            )
        q, k = self._q, self._k
        ids = (q["ids"], k["ids"]) if self._documents else (q["firsts"], k["firsts"])  # not read
        tensors = (q["firsts"], k["firsts"], k["lasts"], *ids, listed, counts)
        return _Visits(tensors, self._num_masks, self._documents)


def _strides(x: Tensor | None) -> tuple[int, int]:
    """(mask row, position) of [B or 1, S] or [S]; 0 where it is shared by the batch."""
    if x is None:
        return 0, 0
    return 0 if x.ndim == 1 or len(x) == 1 else x.stride(0), x.stride(-1)


def _distances(mask: Mask) -> tuple[int, int, int]:
    """Bounds of q_pos - k_pos: least, least for keys of the prefix, greatest."""
    left, right = mask.window or (None, None)
    ahead = -UNLIMITED if right is None else -min(right, UNLIMITED)
    return max(ahead, 0) if mask.causal else ahead, ahead, UNLIMITED if left is None else min(left, UNLIMITED)


TRITON = triton_kernel()
