"""-slope[h] · |p - t| (ALiBi, Press et al. 2022, arXiv:2108.12409)."""

from torch import Tensor

from cp_mesh.kernels.scores import Where


def added(x: Tensor, where: Where) -> Tensor:
    return -(x[:, None, None] * where.distance.abs())


def add_gradient(total: Tensor, x: Tensor, dscores: Tensor, where: Where) -> None:
    total.sub_((dscores * where.distance.abs()).sum((0, 2, 3)))
