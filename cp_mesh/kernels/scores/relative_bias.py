"""table[h, clip(p - t, -R, R) + R] (Raffel et al. 2020, arXiv:1910.10683, without its buckets)."""

import torch
from torch import Tensor

from cp_mesh.kernels.scores import Where


def added(x: Tensor, where: Where) -> Tensor:
    reach = x.shape[1] // 2
    return x[:, where.distance.clamp(-reach, reach) + reach]


def add_gradient(total: Tensor, x: Tensor, dscores: Tensor, where: Where) -> None:
    """A query's distances differ, so each has a bin of its own: no sum depends on order.

    The outermost bins, of clipped distances, are summed apart.
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
