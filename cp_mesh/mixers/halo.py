"""Layers that read a few tokens beside each: causal convolutions, token shift, and `roll` of labels."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from cp_mesh.mixers.fla import convolve
from cp_mesh.mixers.moving import gather_rows
from cp_mesh.mixers.pieces import Halo, Ints, Pieces


def with_halo(
    x: Tensor,
    pieces: Pieces,
    before: int,
    after: int,
    group_name: str,
    what: str,
    fill: float = 0,
    initial: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Rows [B * rows, ...] piece by piece, each between its neighbours of the same document; ``fill`` where are none.

    Args:
        initial: the rows before each document, [num_documents * before, ...]; None: these are ``fill``.

    Returns:
        The rows, and where among them each row of this rank is.
    """
    key, device = ("halo", before, after), x.device
    halo = pieces.halo_of(before, after)
    gathered = x[pieces.on(device, (*key, "sent"), lambda: halo.sent.own)]
    if sum(halo.sent.lens):
        gathered = gather_rows(gathered, halo.sent.lens, pieces.cp_rank, group_name, what)
    source = pieces.on(device, (*key, "source"), lambda: halo.source)
    rows = _rows([x, gathered], initial, source, fill)
    return rows, pieces.on(device, (*key, "rows"), lambda: halo.rows)


def _rows(known: list[Tensor], initial: Tensor | None, index: Tensor, fill: float = 0) -> Tensor:
    """Rows of what is known, then of one of ``fill``, then of ``initial``, for which ``fill`` stands if it is None."""
    one = known[0].new_full((1, *known[0].shape[1:]), fill)
    if initial is None:
        return torch.cat([*known, one])[index.clamp(max=sum(map(len, known)))]
    return torch.cat([*known, one, initial.to(one.dtype)])[index]


def convolution(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    pieces: Pieces,
    group_name: str,
    what: str,
    initial: Tensor | None = None,
    activation: str | None = None,
    by_fla: bool = False,
) -> Tensor:
    """Causal, of each channel by itself: x [B * rows, D], weight [D, W], initial [num_documents, D, W]."""
    before = weight.shape[1] - 1
    begins = None if initial is None else initial[..., 1:].transpose(1, 2).flatten(0, 1)
    if by_fla and before and len(x):
        x, states = _states(x, pieces, before, group_name, what, begins)
        return convolve(x, weight, bias, activation, states, tuple(pieces.lens.tolist()))
    rows, at = with_halo(x, pieces, before, 0, group_name, what, initial=begins)
    rows = rows if len(rows) else F.pad(rows, (0, 0, 0, before + 1))  # of a rank that holds none
    # by another name than conv1d, which watches read as one over the rows of this rank alone
    found = torch.convolution(rows.t()[None], weight[:, None], bias, [1], [0], [1], False, [0], len(weight))
    out = found[0].t()[at - before]
    return out if activation is None else F.silu(out)


class _Taken(torch.autograd.Function):
    """All rows, and some. Gradients of these are added to that of all in place: `convolve` made it for nobody else."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, index: Tensor) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(index)
        return x.view_as(x), x[index]

    @staticmethod
    def backward(ctx: Any, grad: Tensor, of_taken: Tensor) -> tuple[Tensor, None]:
        return grad.index_put_(ctx.saved_tensors, of_taken, accumulate=True), None


def _states(
    x: Tensor, pieces: Pieces, before: int, group_name: str, what: str, initial: Tensor | None
) -> tuple[Tensor, Tensor]:
    """All rows, for their gradient; and without a copy of them the rows before each piece, [pieces, D, 1 + before]."""
    halo, key, device = pieces.halo_of(before, 0), ("states", before), x.device
    num_near, taken, index = pieces.once(key, lambda: _beside(halo, len(x)))
    x, rows = _Taken.apply(x, pieces.on(device, (*key, "taken"), lambda: taken))
    own, sent = rows.split([num_near, len(halo.sent.own)])
    gathered = gather_rows(sent, halo.sent.lens, pieces.cp_rank, group_name, what)
    rows = _rows([own, gathered], initial, pieces.on(device, (*key, "index"), lambda: index))
    return x, F.pad(rows.unflatten(0, (-1, before)).transpose(1, 2), (1, 0))


def _beside(halo: Halo, num_own: int) -> tuple[int, Ints, Ints]:
    """How many rows before pieces this rank has; their indices, then those that it sends; where each is found."""
    beside = np.delete(halo.source, halo.rows)
    near = beside < num_own
    index = np.where(near, near.cumsum() - 1, beside - num_own + near.sum())
    return int(near.sum()), np.r_[beside[near], halo.sent.own], index


def last_rows(x: Tensor, width: int, initial: Tensor | None, pieces: Pieces, group_name: str, what: str) -> Tensor:
    """The last rows of each document, [num_documents, D, width], on every rank; x and ``initial`` as `convolution`."""
    sent, index = pieces.tails(width)
    own = x[pieces.on(x.device, ("tails", width, "sent"), lambda: sent.own)]
    gathered = gather_rows(own, sent.lens, pieces.cp_rank, group_name, what)
    begins = None if initial is None else initial.transpose(1, 2).flatten(0, 1)
    return _rows([gathered], begins, pieces.on(x.device, ("tails", width), lambda: index)).transpose(1, 2)
