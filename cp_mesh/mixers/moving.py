"""What travels between ranks for mixers: a gather of a few rows, and heads against rows. Both are differentiable.

The gradient of what a rank sent is the sum over ranks of the gradients of what they received.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor

from cp_mesh._torch import funcol
from cp_mesh.comm import whole
from cp_mesh.comm.waiting import wait_for


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, lens: tuple[int, ...], rank: int, group_name: str, what: str) -> Tensor:
        ctx.given = lens, rank, group_name, what
        ctx.save_for_backward(x.new_empty(0))  # so a checkpoint computes all again first, on every rank alike
        return whole.gather(x, 0, lens, None, group_name, what)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None, None]:
        _ = ctx.saved_tensors
        lens, rank, group_name, what = ctx.given
        return whole.scatter_sum(grad, 0, lens, None, rank, group_name, what), None, None, None, None


def gather_rows(x: Tensor, lens: tuple[int, ...], rank: int, group_name: str, what: str) -> Tensor:
    """Rows [n, ...] of all ranks, rank after rank: [sum of lens, ...]; nothing is sent if there are none."""
    if not sum(lens) or len(lens) == 1:
        return x
    return cast(Tensor, _Gather.apply(x, lens, rank, group_name, what))


class _After(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, *others: Tensor) -> Tensor:
        ctx.shapes = [(y.shape, y.dtype, y.device) for y in others]
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, ...]:
        return grad, *(torch.zeros(shape, dtype=dtype, device=device) for shape, dtype, device in ctx.shapes)


def after(x: Tensor, *others: Tensor | None) -> Tensor:
    """``x`` as if it depended on the others: a rank that needs nothing of a collective runs its backward, too."""
    needed = [y for y in others if y is not None and y.requires_grad]
    return cast(Tensor, _After.apply(x, *needed)) if needed else x


class _AllToAll(torch.autograd.Function):
    """Blocks of rows, ``sent`` to each rank and ``received`` from each; the backward is the way back."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, sent: list[int], received: list[int], group_name: str, what: str) -> Tensor:
        ctx.given = sent, received, group_name, what
        started = funcol.all_to_all_single(x.contiguous(), received, sent, group_name)
        return wait_for(started, what, group_name)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None, None]:
        sent, received, group_name, what = ctx.given
        started = funcol.all_to_all_single(grad.contiguous(), sent, received, group_name)
        return wait_for(started, what, group_name), None, None, None, None


class _Ordered(torch.autograd.Function):
    """Rows in another order; gradients go ``back``. The backward of `index_select` would add them row by row."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, order: Tensor, back: Tensor) -> Tensor:
        ctx.save_for_backward(back)
        return x.index_select(0, order)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return grad.index_select(0, *ctx.saved_tensors), None, None


def to_heads(
    x: Tensor, lens: tuple[int, ...], inverse: Tensor, order: Tensor, group_name: str, what: str
) -> Tensor:  # fmt: skip
    """[B, rows, H, ...] of this rank to [B, S, H / cp, ...], by position, of this rank's heads."""
    size = len(lens)
    parts = x.unflatten(2, (size, -1)).permute(2, 1, 0, *range(3, x.ndim + 1))  # [cp, rows, B, heads, ...]
    moved: Tensor = _AllToAll.apply(parts.flatten(0, 1), [x.shape[1]] * size, [*lens], group_name, what)
    ordered: Tensor = _Ordered.apply(moved, inverse, order)
    return ordered.transpose(0, 1)


def to_rows(
    x: Tensor, lens: tuple[int, ...], inverse: Tensor, order: Tensor, rank: int, group_name: str, what: str
) -> Tensor:  # fmt: skip
    """[B, S, heads, ...] by position to [B, rows, cp * heads, ...]: the way back of `to_heads`."""
    size, rows = len(lens), _Ordered.apply(x.transpose(0, 1), order, inverse)
    moved: Tensor = _AllToAll.apply(rows, [*lens], [lens[rank]] * size, group_name, what)
    parts = moved.unflatten(0, (size, lens[rank])).permute(2, 1, 0, *range(3, x.ndim + 1))
    return parts.flatten(2, 3)
