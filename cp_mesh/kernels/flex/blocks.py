"""Tables of blocks: which blocks of 128 x 128 pairs of a tile are empty and skipped, full and not masked, or partial.

Kernels compiled from the tile's functions compute the tables on the device, some rows at a time, so that no mask is
ever in memory as a whole.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from cp_mesh._torch import times_written
from cp_mesh.kernels.flex.programs import program
from cp_mesh.kernels.flex.tiles import FlexTile, kept_of

BLOCK = 128
"""Block size in queries and in keys, PyTorch's default."""
PAIRS = 1 << 26
"""Maximum number of pairs evaluated at once."""


def blocks_of(tile: FlexTile, shape: tuple[int, int, int, int]) -> Any:
    """PyTorch's BlockMask for the pairs [B, H, Sq, Sk] of the tile, cached with the tile's cover."""
    scores = tile.scores
    mask_mod = scores.mask_mod
    read = () if mask_mod is None else tile.of_mask[1 + len(tile.rows) :]
    B, H, Sq, Sk = shape
    reads_heads = mask_mod is not None and mask_mod.sizes(1, 2)[1] == 2
    heads = (scores.first_head, H) if reads_heads else ()  # chunks of heads share a tile
    of_read = ((x.data_ptr(), x.stride(), times_written(x)) for x in read)
    if any(x.is_inference() for x in read):  # these have no version counter, so no cache
        return _made(tile, shape)
    key = "blocks", mask_mod and mask_mod.handle, B, Sq, Sk, scores.first_batch, heads, *of_read
    # The cache holds the tensors too, so that no other tensor gets their address.
    return kept_of(tile.cover, key, lambda: (_made(tile, shape), read))[0]


def _made(tile: FlexTile, shape: tuple[int, int, int, int]) -> Any:
    from torch.nn.attention.flex_attention import BlockMask, noop_mask

    B, H, Sq, Sk = shape
    mask_mod = tile.scores.mask_mod
    of_mask_mod = (1, 1) if mask_mod is None else mask_mod.sizes(B, H)
    B, H = B if tile.rows[2].ndim == 2 else of_mask_mod[0], of_mask_mod[1]
    device, num_k = tile.rows[0].device, -(-Sk // BLOCK)
    num_q = min(-(-Sq // BLOCK), max(1, PAIRS // (num_k * BLOCK**2)))  # blocks of queries per part

    def of_rows(b: Tensor, h: Tensor, i: Tensor, j: Tensor, *tensors: Tensor) -> tuple[Tensor, Tensor]:
        call: Callable[..., Tensor] = tile.mask
        for dim in (3, 2, 1, 0):
            call = torch.vmap(call, in_dims=(*(0 if at == dim else None for at in range(4)), *[None] * len(tensors)))
        inside = (i < Sq)[:, None] & (j < Sk)
        seen = call(b, h, i.clamp(max=Sq - 1), j.clamp(max=Sk - 1), *tensors) & inside
        seen = seen.unflatten(3, (num_k, BLOCK)).unflatten(2, (num_q, BLOCK))
        return seen.any(-1).any(-2), seen.all(-1).all(-2)

    b, h, j, i = (torch.arange(n, device=device, dtype=torch.int32) for n in (B, H, num_k * BLOCK, num_q * BLOCK))
    parts = [i + begin for begin in range(0, Sq, num_q * BLOCK)]
    run = program(("blocks", tile.key, Sq, Sk), (b, h, parts[0], j, *tile.of_mask), lambda options: of_rows)
    found = zip(*(run(b, h, i, j, *tile.of_mask) for i in parts), strict=True)
    some, every = (torch.cat(x, 2)[:, :, : -(-Sq // BLOCK)] for x in found)
    # PyTorch would transpose the tables by vmap, which takes the host longer than all the rest. noop_mask: the tile's
    # mask_mod would keep copies of captured tensors alive.
    partial, tables = some & ~every, dict[str, Any]()
    for name, x in {"kv": partial, "full_kv": every, "q": partial.mT, "full_q": every.mT}.items():
        tables[f"{name}_num_blocks"], tables[f"{name}_indices"] = _in_order(x)
    return BlockMask((Sq, Sk), BLOCK_SIZE=(BLOCK, BLOCK), mask_mod=noop_mask, **tables)


def _in_order(x: Tensor) -> tuple[Tensor, Tensor]:
    """The number of True blocks in each row, and the block indices with the True ones first; int32."""
    return x.sum(-1, dtype=torch.int32), x.int().argsort(dim=-1, descending=True, stable=True).int().contiguous()
