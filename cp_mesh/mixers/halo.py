"""Layers that read a few tokens beside each: causal convolutions, token shift, and `roll` of labels."""

from __future__ import annotations

from typing import Any, NoReturn

import numpy as np
import torch
import torch.nn.functional as F
from numpy.lib.stride_tricks import sliding_window_view
from torch import Tensor

from cp_mesh.errors import UnsupportedError
from cp_mesh.mixers.fla import convolve
from cp_mesh.mixers.moving import Group, gather_rows, scatter_sum
from cp_mesh.mixers.pieces import Index, Pieces, index_on


def rolled(x: Tensor, shifts: int, pieces: Pieces, group: Group, fill: float) -> Tensor:
    """Of each row [B * rows, ...] the one ``shifts`` before it in its document; ``fill`` where there is none."""

    def found() -> tuple[int, Index, Index]:
        sent, near = pieces.beside(max(shifts, 0), max(-shifts, 0))
        near = len(x) + np.minimum(near, len(pieces.shard_lens) * sent.most)
        *rows, rest = np.split(np.arange(len(x)), pieces.lens.cumsum())
        whole = (np.r_[at, own] if shifts > 0 else np.r_[own, at] for own, at in zip(rows, near, strict=True))
        each = (x[: len(own)] if shifts > 0 else x[-len(own) :] for x, own in zip(whole, rows, strict=True))
        return sent.most, index_on(device, sent.own), index_on(device, np.concatenate([*each, rest]))

    device = x.device
    most, sent, index = pieces.once(("rolled", shifts, device), found)
    return torch.cat([x, gather_rows(x[sent], most, group), x.new_full((1, *x.shape[1:]), fill)])[index]


def convolution(
    x: Tensor, weight: Tensor, bias: Tensor | None, pieces: Pieces, group: Group, initial: Tensor | None = None,
    activation: str | None = None, by_fla: bool = False,
) -> Tensor:  # fmt: skip
    """Causal, of each channel by itself: x [B, rows, D], weight [D, W], initial [num_documents, D, W].

    All rows are convolved as they lie. Those before pieces are states [pieces, D, W]; None: zeros.
    """
    width, key = weight.shape[1], (weight.shape[1], initial is not None, x.device)
    at, lens, first, windows = pieces.once(("states", *key), lambda: _states(pieces, *key))
    begins = None if initial is None else initial[..., 1:].transpose(1, 2).flatten(0, 1)
    rows, states = x if len(x) == 1 else x.flatten(0, 1)[None], None
    if at[0] or begins is not None:
        rows, states = _Beside.apply(rows, begins, len(pieces.lens) * width, at, group)
    if by_fla and width > 1 and x.shape[1]:
        states = states if states is None else states.unflatten(0, (-1, width)).transpose(1, 2)
        out = convolve(rows, weight, bias, activation, states, lens)
        return out if len(x) == 1 else out.view(x.shape)

    def convolved(x: Tensor, padding: int) -> Tensor:
        """By another name than conv1d, which watches read as one over the rows of this rank alone."""
        return torch.convolution(x, weight[:, None], bias, [1], [padding], [1], False, [0], len(weight))

    flat = rows[0] if len(rows[0]) else F.pad(rows[0], (0, 0, 0, 1))
    out = convolved(flat.t()[None], width - 1)[0].t()[: rows.shape[1]]
    states = rows.new_zeros(len(pieces.lens) * width, x.shape[2]) if states is None else states
    near = torch.cat([states, rows[0, first]])[windows]  # [first rows, W, D]
    out = out.index_copy_(0, first, convolved(near.transpose(1, 2), 0)[..., 0]).view(x.shape)
    return out if activation is None else F.silu(out)


def _states(pieces: Pieces, width: int, given: bool, device: torch.device) -> tuple[Any, ...]:
    """Where the rows before the pieces of this rank are, which are states [pieces * width, D].

    Returns:
        The rows that a rank sends at most, those of this rank, the rows of states that are known (the first of a state
        is not read), and of these the index among what is gathered, then the rows before documents. Then the rows that
        read states, and what each reads, [W]: of all states, then of these rows.
    """
    sent, index = pieces.beside(width - 1, 0)
    zero = len(pieces.shard_lens) * sent.most
    places = np.flatnonzero((index < zero) | ((index > zero) & given))
    index, states = index.ravel()[places], np.arange(len(pieces.lens) * width).reshape(-1, width)
    at = sent.own, states[:, 1:].ravel()[places], index - (index > zero)
    rows = [own[: width - 1] for own in np.split(np.arange(pieces.lens.sum()), pieces.lens.cumsum())]
    first = np.concatenate(rows)
    read = np.split(states.size + np.arange(len(first)), np.cumsum([*map(len, rows)])[:-1])
    windows = (sliding_window_view(np.r_[x, own], width)[1:] for x, own in zip(states, read, strict=False))
    found = first, np.concatenate([*windows, states[:0]])
    lens = tuple(pieces.lens.tolist())
    return (sent.most, *(index_on(device, x) for x in at)), lens, *(torch.from_numpy(x).to(device) for x in found)


class _Beside(torch.autograd.Function):
    """Rows [1, rows, D], and without a copy of them the ``num`` rows of `_states`; None if all are zeros.

    Gradients of these are added to that of all in place: what convolves made it for nobody else.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, initial: Tensor | None, num: int, at: Any, group: Group) -> Any:
        (most, sent, places, index), states = at, None
        ctx.given = initial, at, group
        ctx.save_for_backward(x.new_empty(0))  # as in `moving`
        found = gather_rows(x[0, sent], most, group)
        if initial is not None:
            found = torch.cat([found, initial.to(x.dtype)])
        if places != slice(0, 0):
            states = x.new_zeros(num, x.shape[2])
            states[places] = found[index]
        return x.view_as(x), states

    @staticmethod
    def backward(ctx: Any, grad: Tensor, of_states: Tensor | None) -> tuple[Tensor | None, ...]:
        with torch.no_grad():
            found = _Beside._gradients(ctx, grad, of_states)
        if torch.is_grad_enabled():  # create_graph
            found = tuple(x if x is None else _Gradient.apply(x, grad, of_states) for x in found)
        return *found, None, None, None

    @staticmethod
    def _gradients(ctx: Any, grad: Tensor, of_states: Tensor | None) -> tuple[Tensor | None, ...]:
        initial, (most, sent, places, index), group = ctx.given
        _ = ctx.saved_tensors
        num, of_initial = group[0] * most, None
        found = grad.new_zeros(num + (0 if initial is None else len(initial)), grad.shape[2])
        if of_states is not None:
            _add(found, index, of_states[places])
        if most and ctx.needs_input_grad[0]:
            _add(grad[0], sent, scatter_sum(found[:num], group) if group[0] > 1 else found[:num])
        if initial is not None:
            of_initial = found[num:].to(initial.dtype)
        return grad, of_initial


class _Gradient(torch.autograd.Function):
    """A gradient as it is, whose own gradient is refused."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, *of: Tensor | None) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> NoReturn:
        raise UnsupportedError("causal_conv1d of documents that are cut has no second derivative: use whole documents")


def _add(x: Tensor, index: Index, rows: Tensor) -> None:
    if isinstance(index, slice):
        x[index].add_(rows[: index.stop - index.start])
    else:
        x.index_put_((index,), rows[: len(index)], accumulate=True)


def last_rows(x: Tensor, width: int, initial: Tensor | None, pieces: Pieces, group: Group) -> Tensor:
    """The last rows of each document, [num_documents, D, width], on every rank; x and ``initial`` as `convolution`."""
    sent, index = pieces.tails(width)
    own = x[pieces.on(x.device, ("tails", width, "sent"), lambda: sent.own)]
    known = [gather_rows(own, sent.most, group), x.new_zeros(1, x.shape[1])]
    at = pieces.on(x.device, ("tails", width), lambda: index)
    if initial is None:
        return torch.cat(known)[at.clamp(max=len(known[0]))].transpose(1, 2)
    return torch.cat([*known, initial.to(x.dtype).transpose(1, 2).flatten(0, 1)])[at].transpose(1, 2)
