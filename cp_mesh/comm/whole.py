"""Gather the shards of all ranks to a whole tensor, and back: for tensors that are small beside keys and values.

Shards may be unequal, and in any order. ``lens`` are their lengths by rank; ``inverse`` gives for each row of the
whole its index among the shards, rank after rank (None: the same order).
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from cp_mesh.comm.shards import Shards


def gather(x: Tensor, dim: int, lens: Sequence[int], inverse: Tensor | None, group_name: str, what: str) -> Tensor:
    """Return the whole tensor, contiguous, from each rank's shard along a dim; ``what`` names the call in an error."""
    rows = x.movedim(dim, 0)
    whole = Shards(sum(lens), group_name, what, tuple(lens)).gather(_flat(rows))()
    whole = whole if inverse is None else whole.index_select(0, inverse)
    return whole.view(len(whole), *rows.shape[1:]).movedim(0, dim).contiguous()


def scatter_sum(
    x: Tensor, dim: int, lens: Sequence[int], inverse: Tensor | None, rank: int, group_name: str, what: str
) -> Tensor:
    """Return this rank's shard of the sum of whole tensors over ranks, contiguous, summed in their dtype."""
    rows = x.movedim(dim, 0)
    rows = rows if inverse is None else rows.new_zeros(sum(lens), *rows.shape[1:]).index_copy(0, inverse, rows)
    own = Shards(sum(lens), group_name, what, tuple(lens), rank).scatter_sum(_flat(rows))()
    return own.view(len(own), *rows.shape[1:]).movedim(0, dim).contiguous()


def _flat(rows: Tensor) -> Tensor:
    """[rows, D]"""
    return rows.reshape(len(rows), rows.shape[1:].numel())
