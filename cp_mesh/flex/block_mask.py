"""Masks of `flex_attention`: `create_block_mask`, and what is read of PyTorch's BlockMask."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from cp_mesh._torch import SLICED_MASK_MOD
from cp_mesh.errors import UnsupportedError, refuse
from cp_mesh.flex.rank_mask import Sources, Unchanged, find_sources
from cp_mesh.flex.trace import trace
from cp_mesh.kernels.functions import ScalarFunction
from cp_mesh.sequence.sharded_sequence import ShardedSequence

MaskMod = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True, eq=False)
class PairMask:
    """What `create_block_mask` returns: a mask_mod, and the sizes for which it was meant.

    ``sources``: which ranks' keys it shows to whom, if it was made for a sequence; nothing else is computed of it.
    """

    mask_mod: MaskMod
    batch: int | None
    heads: int | None
    seq_len: int
    sources: Sources | None = None


def create_block_mask(
    mask_mod: MaskMod,
    B: int | None,
    H: int | None,
    Q_LEN: int,
    KV_LEN: int,
    sequence: ShardedSequence | None = None,
) -> PairMask:
    """A mask for `flex_attention`, as torch's function of this name; it has no blocks and takes no memory.

    With ``sequence`` every cp rank calls it alike. Each looks at all pairs of its own queries, some at a time, and one
    all-gather of a bit for each source tells the others which ranks' keys it needs: others neither travel to it nor are
    computed, in both passes. That holds in this layout, of what mask_mod reads now; calls of the mask in another one,
    or after a write to what it reads, are refused. Make it once for each batch, not in each layer.

    Args:
        mask_mod: (b, h, q_idx, kv_idx) -> bool: whether the query sees the key, of global indices. With ``sequence`` it
            reads plain tensors.
        B, H: batch rows and query heads, or None or 1 where the mask is the same for all. With ``sequence`` they are
            those of the calls, global ones of DTensors, where mask_mod reads these indices.
        Q_LEN, KV_LEN: tokens of the whole sequence.
        sequence: in which mesh and layout the calls will be. None: all keys travel that their ``mask=`` leaves.

    Raises:
        ArgumentError: if ``sequence`` is of another length.
        UnsupportedError: if the lengths differ; with ``sequence``, for what mask_mod may not read then.
        RankMismatchError: with ``sequence``, if ranks differ, in the first call of each mask_mod, layout and length; in
            any call if another rank raised while it looked.
    """
    if Q_LEN != KV_LEN:
        hint = "keys are those of the same sequence"
        refuse("create_block_mask", "Q_LEN and KV_LEN that are equal", (Q_LEN, KV_LEN), hint, UnsupportedError)
    sources = None if sequence is None else find_sources(mask_mod, B, H, Q_LEN, sequence)
    return PairMask(mask_mod, B, H, Q_LEN, sources)


def read_mask(
    block_mask: Any, query: Tensor, sizes: tuple[int, int, int], last: int | None = None
) -> tuple[ScalarFunction, tuple[Tensor, ...]]:
    """The mask_mod of a mask; refuses masks of another size than batch, heads and length."""
    from torch.nn.attention.flex_attention import BlockMask

    if isinstance(block_mask, PairMask):
        given: tuple[Any, ...] = block_mask.batch, block_mask.heads, block_mask.seq_len, block_mask.seq_len
    elif isinstance(block_mask, BlockMask):
        if getattr(block_mask.mask_mod, "__name__", "") == SLICED_MASK_MOD:
            hint = "pass the mask of the whole sequence, heads and batch as create_block_mask made it, on every rank"
            refuse("block_mask", "a whole mask", "a slice of one, block_mask[...]", hint)
        given = *block_mask.kv_num_blocks.shape[:2], *block_mask.seq_lengths
    else:
        hint = "cp_mesh.create_block_mask(mask_mod, B, H, S, S)"
        refuse("block_mask", "a mask of create_block_mask", type(block_mask).__name__, hint)
    batch, heads, length = sizes
    if given[0] not in (None, 1, batch) or given[1] not in (None, 1, heads) or set(given[2:]) != {length}:
        expected = f"the whole sequence: B 1 or {batch}, H 1 or {heads}, {length} queries and keys"
        hint = "make it of the global length, and never slice it; pass seq_len= where shards are of unequal lengths"
        refuse("block_mask", expected, given, hint)
    if block_mask.mask_mod is None:
        refuse("block_mask", "a mask with a mask_mod", None, "block_mask=None shows every pair")
    function, captured = trace("mask_mod", block_mask.mask_mod, query, last, 0 not in sizes)
    assert function is not None
    function.check(captured, (*sizes, sizes[2]))
    if isinstance(block_mask, PairMask) and block_mask.sources is not None:
        block_mask.sources.check(function, captured, batch, heads)
    if isinstance(block_mask, BlockMask):
        if any(isinstance(x, DTensor) for x in captured):
            hint = "cp_mesh.create_block_mask(mask_mod, B, H, S, S) has none"
            refuse("block_mask", "blocks of plain tensors", "a mask_mod of DTensors", hint, UnsupportedError)
        if 0 not in sizes:
            _check_blocks(block_mask, function, captured, sizes)
    return function, captured


_checked: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()


def _check_blocks(
    block_mask: Any, function: ScalarFunction, captured: Sequence[Tensor], sizes: tuple[int, int, int]
) -> None:
    """Refuse blocks that are not those of mask_mod: it would not be the whole mask. Looks at each mask once.

    That takes as many pairs as PyTorch's function looked at.
    """
    key = function.handle, sizes, Unchanged(captured)
    if _checked.get(block_mask) == key:
        return
    device, (rows, keys) = block_mask.kv_num_blocks.device, block_mask.BLOCK_SIZE
    b, h, every = _indices(function, sizes, device)
    listed, whole = block_mask.to_dense().bool(), None
    if block_mask.full_kv_num_blocks is not None:
        of_full = block_mask.full_kv_num_blocks, block_mask.full_kv_indices
        whole = type(block_mask).from_kv_blocks(*of_full, BLOCK_SIZE=block_mask.BLOCK_SIZE).to_dense().bool()
    for i, at in enumerate(every.split(rows)):
        seen = function.of_pairs(None, (b, h, at, every), captured)
        blocks = seen.split(keys, dim=3)
        some = torch.stack([x.any(-1).any(-1) for x in blocks], -1)
        alike = not (some & ~listed[:, :, i, : len(blocks)]).any()
        if alike and whole is not None:
            all_of = torch.stack([x.all(-1).all(-1) for x in blocks], -1)
            alike = not (whole[:, :, i, : len(blocks)] & ~all_of).any()
        if not alike:
            hint = "say the whole mask in mask_mod: cp_mesh.create_block_mask(mask_mod, B, H, S, S)"
            refuse("block_mask", "blocks that follow from its mask_mod", "others", hint, UnsupportedError)
    _checked[block_mask] = key


def _indices(mask_mod: ScalarFunction, sizes: tuple[int, int, int], device: torch.device) -> list[Tensor]:
    """Of batch rows and heads in which a mask_mod differs, and of tokens."""
    return [torch.arange(n, device=device) for n in (*mask_mod.sizes(*sizes[:2]), sizes[2])]
