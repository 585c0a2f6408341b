"""Layers that read a few tokens beside each: causal convolutions, token shift, and `roll` of labels."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from cp_mesh.mixers.fla import convolve
from cp_mesh.mixers.moving import Group, gather, gather_rows, padded, scatter_sum
from cp_mesh.mixers.pieces import Index, Ints, Pieces, Sent, index_on


def with_halo(
    x: Tensor, pieces: Pieces, before: int, after: int, group: Group, fill: float = 0, initial: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Rows [B * rows, ...] piece by piece, each between its neighbours of the same document; ``fill`` where are none.

    Args:
        initial: the rows before each document, [num_documents * before, ...]; None: these are ``fill``.

    Returns:
        The rows, and where among them each row of this rank is.
    """
    sent, index = pieces.beside(before, after)
    own, source, rows = pieces.once(("halo", before, after, x.device), lambda: _halo(pieces, sent, index, before, x))
    gathered = gather_rows(x[own], sent.most, group)
    return _rows([x, gathered], initial, source.long(), fill), rows.long()


def _halo(pieces: Pieces, sent: Sent, index: Ints, before: int, x: Tensor) -> tuple[Index, Tensor, Tensor]:
    """Rows that are sent; of all with their halos the index among own rows and what is gathered; and where own are."""
    num_own, ends, after = len(x), pieces.lens.cumsum(), index.shape[1] - before
    beside = np.r_[np.repeat(ends, after), np.repeat(ends - pieces.lens, before)]
    near = num_own + np.r_[index[:, before:].ravel(), index[:, :before].ravel()]
    moved = before + np.arange(len(ends)) * index.shape[1]
    found = np.insert(np.arange(num_own), beside, near), np.arange(num_own) + np.repeat(moved, pieces.lens)
    source, rows = (torch.from_numpy(each.astype(np.int32)).to(x.device) for each in found)
    return index_on(x.device, sent.own), source, rows


def _rows(known: list[Tensor], initial: Tensor | None, index: Tensor, fill: float = 0) -> Tensor:
    """Rows of what is known, then of one of ``fill``, then of ``initial``, for which ``fill`` stands if it is None."""
    one = known[0].new_full((1, *known[0].shape[1:]), fill)
    if initial is None:
        return torch.cat([*known, one])[index.clamp(max=sum(map(len, known)))]
    return torch.cat([*known, one, initial.to(one.dtype)])[index]


def convolution(
    x: Tensor, weight: Tensor, bias: Tensor | None, pieces: Pieces, group: Group, initial: Tensor | None = None,
    activation: str | None = None, by_fla: bool = False,
) -> Tensor:  # fmt: skip
    """Causal, of each channel by itself: x [B, rows, D], weight [D, W], initial [num_documents, D, W]."""
    before = weight.shape[1] - 1
    begins = None if initial is None else initial[..., 1:].transpose(1, 2).flatten(0, 1)
    if by_fla and before and x.shape[1]:
        key = before, begins is not None, x.device
        at = pieces.once(("states", *key), lambda: _states(pieces, *key))
        rows, states = _Beside.apply(x, begins, len(at[0]) * (1 + before), at[1:], group)
        states = states if states is None else states.unflatten(0, (-1, 1 + before)).transpose(1, 2)
        return convolve(rows, weight, bias, activation, states, at[0]).view(x.shape)
    rows, at = with_halo(x.flatten(0, 1), pieces, before, 0, group, initial=begins)
    rows = rows if len(rows) else F.pad(rows, (0, 0, 0, before + 1))  # of a rank that holds none
    # by another name than conv1d, which watches read as one over the rows of this rank alone
    found = torch.convolution(rows.t()[None], weight[:, None], bias, [1], [0], [1], False, [0], len(weight))
    out = found[0].t()[at - before].unflatten(0, x.shape[:2])
    return out if activation is None else F.silu(out)


def _states(pieces: Pieces, before: int, given: bool, device: torch.device) -> tuple[Any, ...]:
    """Where the rows before the pieces of this rank are, for kernels that take them as states [pieces, D, 1 + before].

    Returns:
        Rows of each piece; those that a rank sends at most, and those of this rank; the rows of states [pieces * (1 +
        before), D] that are known; and of these the index among what is gathered, then the rows before documents.
    """
    sent, index = pieces.beside(before, 0)
    zero = len(pieces.shard_lens) * sent.most
    places = np.flatnonzero((index < zero) | ((index > zero) & given))
    index = index.ravel()[places]
    found = sent.own, places + 1 + places // before, index - (index > zero)  # the first row of a state is not read
    return tuple(pieces.lens.tolist()), sent.most, *(index_on(device, x) for x in found)


class _Beside(torch.autograd.Function):
    """All rows [1, B * rows, D]; and without a copy of them the ``num`` rows of `_states`, None if all are zeros.

    Gradients of these are added to that of all in place: `convolve` made it for nobody else.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, initial: Tensor | None, num: int, at: Any, group: Group) -> Any:
        (most, sent, places, index), rows, states = at, x.flatten(0, 1), None
        ctx.given = x.shape, initial, at, group
        found = gather(padded(rows[sent], most), group) if most else rows[:0]
        if initial is not None:
            found = torch.cat([found, initial.to(x.dtype)])
        if places != slice(0, 0):
            states = rows.new_zeros(num, x.shape[2])
            states[places] = found[index]
        return rows[None], states

    @staticmethod
    def backward(ctx: Any, grad: Tensor, of_states: Tensor | None) -> tuple[Tensor | None, ...]:
        shape, initial, (most, sent, places, index), group = ctx.given
        num, of_initial = group[0] * most, None
        found = grad.new_zeros(num + (0 if initial is None else len(initial)), shape[2])
        if of_states is not None:
            _add(found, index, of_states[places])
        if most and ctx.needs_input_grad[0]:  # ranks without rows gather x alone
            _add(grad[0], sent, scatter_sum(found[:num], group))
        if initial is not None:
            of_initial = found[num:].to(initial.dtype)
        return grad.view(shape), of_initial, None, None, None


def _add(x: Tensor, index: Index, rows: Tensor) -> None:
    if isinstance(index, slice):
        x[index].add_(rows[: index.stop - index.start])
    else:
        x.index_put_((index,), rows[: len(index)], accumulate=True)


def last_rows(x: Tensor, width: int, initial: Tensor | None, pieces: Pieces, group: Group) -> Tensor:
    """The last rows of each document, [num_documents, D, width], on every rank; x and ``initial`` as `convolution`."""
    sent, index = pieces.tails(width)
    own = x[pieces.on(x.device, ("tails", width, "sent"), lambda: sent.own)]
    gathered = gather_rows(own, sent.most, group)
    begins = None if initial is None else initial.transpose(1, 2).flatten(0, 1)
    return _rows([gathered], begins, pieces.on(x.device, ("tails", width), lambda: index)).transpose(1, 2)
