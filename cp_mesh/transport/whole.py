"""A whole tensor of the shards of all ranks, and back: for tensors that are small beside keys and values.

Shards may be unequal, and lie in any order: ``lens`` are their lengths by rank, ``inverse`` tells for each row of the
whole where it is among the shards, rank after rank; None: in that order.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from cp_mesh.transport.waiting import wait_for

_funcol = torch.ops._c10d_functional


def gather(x: Tensor, dim: int, lens: Sequence[int], inverse: Tensor | None, group_name: str, what: str) -> Tensor:
    """The whole tensor, contiguous, of this rank's shard along a dim; ``what`` names the call in an error."""
    rows = x.movedim(dim, 0)
    padded = torch.cat([rows, rows.new_zeros(max(lens) - rows.shape[0], *rows.shape[1:])])
    gathered = _funcol.all_gather_into_tensor(padded.contiguous(), len(lens), group_name)
    gathered = wait_for(gathered, f"{what}: rows of other ranks", group_name)
    whole = torch.cat([part[:length] for part, length in zip(gathered.split(max(lens)), lens, strict=True)])
    whole = whole if inverse is None else whole.index_select(0, inverse)
    return whole.movedim(0, dim).contiguous()


def scatter_sum(
    x: Tensor, dim: int, lens: Sequence[int], inverse: Tensor | None, rank: int, group_name: str, what: str
) -> Tensor:
    """This rank's shard of the sum over ranks of whole tensors, contiguous, summed in their dtype.

    Of rows that several ranks hold the first one has the sum, the others zeros.
    """
    rows = x.movedim(dim, 0)
    rows = rows if inverse is None else rows.new_zeros(sum(lens), *rows.shape[1:]).index_copy(0, inverse, rows)
    parts = [torch.cat([part, part.new_zeros(max(lens) - len(part), *part.shape[1:])]) for part in rows.split([*lens])]
    summed = _funcol.reduce_scatter_tensor(torch.cat(parts).contiguous(), "sum", len(lens), group_name)
    summed = wait_for(summed, f"{what}: gradients of other ranks", group_name)
    return summed[: lens[rank]].movedim(0, dim).contiguous()
