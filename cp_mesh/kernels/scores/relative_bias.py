"""table[h, clip(p - t, -R, R) + R] (Raffel et al. 2020, arXiv:1910.10683, without its buckets)."""

import torch
from torch import Tensor

from cp_mesh.kernels.scores import Where


def added(x: Tensor, where: Where) -> Tensor:
    reach = x.shape[1] // 2
    return x[:, where.distance.clamp(-reach, reach) + reach]


def add_gradient(total: Tensor, x: Tensor, dscores: Tensor, where: Where) -> None:
    """Scatter dscores by distance: a query's distances all differ, so no two values meet and order does not matter.

    Only clipped distances share a bin: the outermost bins are summed separately.
    """
    width, distance, dscores = total.shape[1], where.distance, dscores.sum(0)
    reach = width // 2
    bins = torch.where(distance.abs() < reach, distance + reach, width)
    of_rows = dscores.new_zeros((*dscores.shape[:2], width + 1)).scatter_(2, bins.expand_as(dscores), dscores)
    found = of_rows.sum(1)[:, :width]
    behind = distance <= -reach
    found[:, 0] += (dscores * behind).sum((1, 2))
    found[:, -1] += (dscores * ((distance >= reach) & ~behind)).sum((1, 2))
    total.add_(found)
