"""Layers that read a few tokens beside each: causal convolutions, token shift, and `roll` of labels."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from cp_mesh.mixers.moving import gather_rows
from cp_mesh.mixers.pieces import Pieces


def with_halo(
    x: Tensor, pieces: Pieces, before: int, after: int, group_name: str, what: str, fill: int = 0
) -> tuple[Tensor, Tensor]:
    """Rows [B * rows, ...] piece by piece, each between its neighbours of the same document; ``fill`` where are none.

    Returns:
        The rows, and where among them each row of this rank is.
    """
    key, device = ("halo", before, after), x.device
    halo = pieces.halo_of(before, after)
    gathered = x[pieces.on(device, (*key, "sent"), lambda: halo.sent.own)]
    if sum(halo.sent.lens):
        gathered = gather_rows(gathered, halo.sent.lens, pieces.cp_rank, group_name, what)
    source = pieces.on(device, (*key, "source"), lambda: halo.source)
    rows = torch.cat([x, gathered, x.new_full((1, *x.shape[1:]), fill)])[source]
    return rows, pieces.on(device, (*key, "rows"), lambda: halo.rows)


def convolution(x: Tensor, weight: Tensor, bias: Tensor | None, pieces: Pieces, group_name: str, what: str) -> Tensor:
    """Causal, of each channel by itself: x [B * rows, D], weight [D, W]."""
    rows, at = with_halo(x, pieces, weight.shape[1] - 1, 0, group_name, what)
    rows = rows if len(rows) else F.pad(rows, (0, 0, 0, weight.shape[1]))  # of a rank that holds none
    found = F.conv1d(rows.t()[None], weight[:, None], bias, groups=len(weight))
    return found[0].t()[at - (weight.shape[1] - 1)]
