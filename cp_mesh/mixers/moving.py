"""What travels between ranks for mixers: a gather of a few rows, and heads against rows. Both are differentiable.

The gradient of what a rank sent is the sum over ranks of the gradients of what they received.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from cp_mesh._torch import below_autograd, funcol
from cp_mesh.comm.waiting import wait_for
from cp_mesh.mixers.pieces import Pieces

Group = tuple[int, str, str]
"""Size and name of a group, and the call, for messages."""


class Linear(torch.autograd.Function):
    """``there`` of a tensor, and ``back`` of the gradient, which is its transpose."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, there: Callable[[Tensor], Tensor], back: Callable[[Tensor], Tensor]) -> Tensor:
        ctx.ways = back, there
        ctx.save_for_backward(x.new_empty(0))  # so a checkpoint computes all again first, on every rank alike
        return there(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        _ = ctx.saved_tensors
        return Linear.apply(grad, *ctx.ways), None, None


def _moved(collective: Any, x: Tensor, group: Group, *options: Any) -> Tensor:
    """What a collective of rows gives; PyTorch's own formulas for its gradient would take as long as it does."""
    x, (_, name, what) = x.contiguous(), group  # it lives until the end
    with below_autograd():
        return wait_for(collective(x, *options, name), f"{what}: rows of other ranks", name)


def gather_rows(x: Tensor, most: int, group: Group) -> Tensor:
    """Rows [n, ...] of all ranks, ``most`` of each, the missing ones zeros; nothing is sent if there are none."""
    if not most or group[0] == 1:
        return x
    x = x if len(x) == most else F.pad(x, [0, 0] * (x.ndim - 1) + [0, most - len(x)])
    if not (x.requires_grad and torch.is_grad_enabled()):
        return _moved(funcol.all_gather_into_tensor, x, group, group[0])
    return cast(Tensor, Linear.apply(x, lambda x: gather_rows(x, most, group), lambda x: scatter_sum(x, group)))


def scatter_sum(x: Tensor, group: Group) -> Tensor:
    """This rank's rows of the sum over ranks: the transpose of `gather_rows`."""
    return _moved(funcol.reduce_scatter_tensor, x, group, "sum", group[0])


class _After(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, *others: Tensor) -> Tensor:
        ctx.shapes = [(y.shape, y.dtype, y.device) for y in others]
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, ...]:
        return grad, *(torch.zeros(shape, dtype=dtype, device=device) for shape, dtype, device in ctx.shapes)


def after(x: Tensor, *others: Tensor | None) -> Tensor:
    """``x`` with a dependency of gradient zero on the others, so that every rank takes part in their collectives."""
    needed = [y for y in others if y is not None and y.requires_grad]
    return cast(Tensor, _After.apply(x, *needed)) if needed else x


def _exchanged(x: Tensor, sent: list[int], received: list[int], group: Group) -> Tensor:
    """Blocks of rows, ``sent`` to each rank and ``received`` from each."""

    def exchange(x: Tensor, sent: list[int], received: list[int]) -> Tensor:
        return _moved(funcol.all_to_all_single, x, group, received, sent)

    found = Linear.apply(x, lambda x: exchange(x, sent, received), lambda grad: exchange(grad, received, sent))
    return cast(Tensor, found)


def _ordered(x: Tensor, order: Tensor, back: Tensor) -> Tensor:
    """Rows in another order; gradients go ``back``. The backward of `index_select` would add them row by row."""
    return cast(Tensor, Linear.apply(x, lambda x: x.index_select(0, order), lambda grad: grad.index_select(0, back)))


def to_heads(x: Tensor, pieces: Pieces, group: Group) -> Tensor:
    """[B, rows, H, ...] of this rank to [B, S, H / cp, ...], by position, of this rank's heads."""
    lens, (order, inverse) = pieces.shard_lens, _orders(pieces, x.device)
    parts = x.unflatten(2, (len(lens), -1)).permute(2, 1, 0, *range(3, x.ndim + 1))  # [cp, rows, B, heads, ...]
    moved = _exchanged(parts.flatten(0, 1), [x.shape[1]] * len(lens), [*lens], group)
    return _ordered(moved, inverse, order).transpose(0, 1)


def to_rows(x: Tensor, pieces: Pieces, group: Group) -> Tensor:
    """[B, S, heads, ...] by position to [B, rows, cp * heads, ...]: the way back of `to_heads`."""
    lens, (order, inverse) = pieces.shard_lens, _orders(pieces, x.device)
    size, own = len(lens), lens[pieces.cp_rank]
    moved = _exchanged(_ordered(x.transpose(0, 1), order, inverse), [*lens], [own] * size, group)
    return moved.unflatten(0, (size, own)).permute(2, 1, 0, *range(3, x.ndim + 1)).flatten(2, 3)


def _orders(pieces: Pieces, device: torch.device) -> tuple[Tensor, Tensor]:
    return pieces.on(device, "order", lambda: pieces.order), pieces.on(device, "inverse", lambda: pieces.inverse)
