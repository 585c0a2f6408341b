"""Tables of blocks: which 128 x 128 pairs of a tile nobody sees, which are skipped, and which all see, not masked.

They are computed on the device, by kernels that are compiled from the functions of the tile, some rows at a time, so
that no mask is ever held whole.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from cp_mesh._torch import times_written
from cp_mesh.kernels.flex.programs import program
from cp_mesh.kernels.flex.tiles import Tile, kept_of

BLOCK = 128
"""Queries and keys of a block of pairs that is skipped as a whole, as in PyTorch."""
PAIRS = 1 << 26
"""Pairs that are looked at together, to find blocks of them."""


def blocks_of(tile: Tile, shape: tuple[int, int, int, int]) -> Any:
    """PyTorch's BlockMask of the pairs [B, H, Sq, Sk] of the tile."""
    scores = tile.scores
    mask_mod = scores.mask_mod
    read = () if mask_mod is None else tile.of_mask[1 + len(tile.rows) :]
    first = scores.first_batch, scores.first_head  # chunks of heads share a tile
    of_read = ((x.data_ptr(), x.stride(), times_written(x)) for x in read)
    if any(x.is_inference() for x in read):  # which do not tell of writes
        return _made(tile, shape)
    key = "blocks", mask_mod and mask_mod.handle, *shape, *first, *of_read
    # The tensors are kept too: an address then belongs to no other.
    return kept_of(tile.cover, key, lambda: (_made(tile, shape), read))[0]


def _made(tile: Tile, shape: tuple[int, int, int, int]) -> Any:
    from torch.nn.attention.flex_attention import BlockMask, noop_mask

    B, H, Sq, Sk = shape
    mask_mod = tile.scores.mask_mod
    of_mask_mod = (1, 1) if mask_mod is None else mask_mod.sizes(B, H)
    B, H = B if tile.rows[2].ndim == 2 else of_mask_mod[0], of_mask_mod[1]
    device, num_k = tile.rows[0].device, -(-Sk // BLOCK)
    num_q = min(-(-Sq // BLOCK), max(1, PAIRS // (num_k * BLOCK**2)))  # of a part of the rows

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
    # PyTorch makes columns of rows by vmap, which takes the host longer than all the rest. The mask_mod is not that of
    # the tile, which would keep copies of captured tensors.
    partial, tables = some & ~every, dict[str, Any]()
    for name, x in {"kv": partial, "full_kv": every, "q": partial.mT, "full_q": every.mT}.items():
        tables[f"{name}_num_blocks"], tables[f"{name}_indices"] = _in_order(x)
    return BlockMask((Sq, Sk), BLOCK_SIZE=(BLOCK, BLOCK), mask_mod=noop_mask, **tables)


def _in_order(x: Tensor) -> tuple[Tensor, Tensor]:
    """How many blocks of each row are listed, and which, ahead of those that are not: int32."""
    return x.sum(-1, dtype=torch.int32), x.int().argsort(dim=-1, descending=True, stable=True).int().contiguous()
