"""Masks of `flex_attention`: `create_block_mask`, and reading PyTorch's BlockMask."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from cp_mesh._torch import SLICED_MASK_MOD
from cp_mesh.errors import UnsupportedError, refuse
from cp_mesh.flex.rank_mask import Sources, Unchanged, find_sources
from cp_mesh.flex.trace import trace
from cp_mesh.kernels.functions import ScalarFunction
from cp_mesh.sequence.sharded_sequence import ShardedSequence

MaskMod = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True, eq=False)
class PairMask:
    """What `create_block_mask` returns: a mask_mod, and the sizes that it is for.

    ``sources``: which ranks' keys it shows to which ranks, if it was built with a sequence; else None.
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
    """A mask for `flex_attention`, like torch's function of this name, but without blocks and their memory.

    With ``sequence``, call it on every cp rank with the same arguments. Each rank evaluates mask_mod on all pairs of
    its own queries, part by part, and one small all-gather shares which ranks' keys it needs. Other keys are neither
    sent to it nor computed, in both passes. The mask is then valid for this layout and for the tensors that mask_mod
    reads as they are now: a call in another layout, or after a write to such a tensor, raises. Build it once per batch,
    not once per layer.

    Args:
        mask_mod: (b, h, q_idx, kv_idx) -> bool, on global indices: whether the query sees the key. With ``sequence`` it
            may only read plain tensors.
        B, H: batch rows and query heads, or None or 1 where the mask is the same for all. With ``sequence`` pass the
            sizes of the calls (global ones for DTensors) if mask_mod reads these indices.
        Q_LEN, KV_LEN: tokens of the whole sequence.
        sequence: the mesh and layout of the calls. None: all keys that ``mask=`` of a call keeps are sent.

    Raises:
        ArgumentError: if ``sequence`` has another length.
        UnsupportedError: if Q_LEN and KV_LEN differ; with ``sequence``, if mask_mod reads inference tensors.
        RankMismatchError: with ``sequence``, if ranks differ (checked at the first call of each mask_mod, layout and
            length), or if another rank raised while it evaluated mask_mod.
    """
    if Q_LEN != KV_LEN:
        hint = "only self-attention is supported: queries and keys of one sequence"
        refuse("create_block_mask", "Q_LEN and KV_LEN that are equal", (Q_LEN, KV_LEN), hint, UnsupportedError)
    sources = None if sequence is None else find_sources(mask_mod, B, H, Q_LEN, sequence)
    return PairMask(mask_mod, B, H, Q_LEN, sources)


def read_mask(
    block_mask: Any, query: Tensor, sizes: tuple[int, int, int], last: int | None = None
) -> tuple[ScalarFunction, tuple[Tensor, ...]]:
    """The traced mask_mod of a mask and its captured tensors; refuses a mask whose batch, heads or length differ."""
    from torch.nn.attention.flex_attention import BlockMask

    if isinstance(block_mask, PairMask):
        given: tuple[Any, ...] = block_mask.batch, block_mask.heads, block_mask.seq_len, block_mask.seq_len
    elif isinstance(block_mask, BlockMask):
        if getattr(block_mask.mask_mod, "__name__", "") == SLICED_MASK_MOD:
            hint = "pass the whole mask, as create_block_mask made it, on every rank"
            refuse("block_mask", "a whole mask", "a slice of one, block_mask[...]", hint)
        given = *block_mask.kv_num_blocks.shape[:2], *block_mask.seq_lengths
    else:
        hint = "cp_mesh.flex.create_block_mask(mask_mod, B, H, S, S)"
        refuse("block_mask", "a mask of create_block_mask", type(block_mask).__name__, hint)
    batch, heads, length = sizes
    if given[0] not in (None, 1, batch) or given[1] not in (None, 1, heads) or set(given[2:]) != {length}:
        expected = f"the whole sequence: B 1 or {batch}, H 1 or {heads}, {length} queries and keys"
        hint = "build it for the global length and do not slice it; pass seq_len= if shards have unequal lengths"
        refuse("block_mask", expected, given, hint)
    if block_mask.mask_mod is None:
        refuse("block_mask", "a mask with a mask_mod", None, "block_mask=None hides nothing")
    function, captured = trace("mask_mod", block_mask.mask_mod, query, last, 0 not in sizes)
    assert function is not None
    function.check(captured, (*sizes, sizes[2]))
    if isinstance(block_mask, PairMask) and block_mask.sources is not None:
        block_mask.sources.check(function, captured, batch, heads)
    if isinstance(block_mask, BlockMask) and 0 not in sizes:
        _check_blocks(block_mask, function, captured, sizes)
    return function, captured


_checked: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()


def _check_blocks(
    block_mask: Any, function: ScalarFunction, captured: Sequence[Tensor], sizes: tuple[int, int, int]
) -> None:
    """Refuse a BlockMask whose blocks contradict its mask_mod, which alone decides here. Checks each mask once.

    The check evaluates as many pairs as PyTorch's function evaluated to build the mask.
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
            hint = "express the whole mask in mask_mod: cp_mesh.flex.create_block_mask(mask_mod, B, H, S, S)"
            refuse("block_mask", "blocks that follow from its mask_mod", "others", hint, UnsupportedError)
    _checked[block_mask] = key


def _indices(mask_mod: ScalarFunction, sizes: tuple[int, int, int], device: torch.device) -> list[Tensor]:
    """Indices of the batch rows and heads in which mask_mod differs, and of all tokens."""
    return [torch.arange(n, device=device) for n in (*mask_mod.sizes(*sizes[:2]), sizes[2])]
