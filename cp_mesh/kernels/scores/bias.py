"""bias[b, h, row, t], indexed by the row of q and the position of the key."""

from torch import Tensor

from cp_mesh.kernels.scores import Where


def added(x: Tensor, where: Where) -> Tensor:
    return x.index_select(3, where.k_pos)


def add_gradient(total: Tensor, x: Tensor, dscores: Tensor, where: Where) -> None:
    total[..., where.k_pos] += dscores.sum_to_size((*total.shape[:3], dscores.shape[3]))
