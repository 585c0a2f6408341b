"""Token losses from logits, computed in chunks of rows by two custom ops.

Logits are the largest tensor of many training steps. In half precision `F.cross_entropy` holds the logits in float32,
their log-softmax, and its gradient: 12 bytes for each entry. Here the backward reads the original logits and two
numbers per row, and only one chunk of rows at a time is in float32.

Shapes: N tokens of this rank, V vocabulary.
"""

from collections.abc import Iterator, Sequence
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from cp_mesh._torch import untraced
from cp_mesh.errors import UnsupportedError
from cp_mesh.kernels.combine import accumulation_dtype
from cp_mesh.sequence.losses import note_compiled_backward

CHUNK_BYTES = 256 << 20
"""Bytes of a chunk of rows in the accumulation dtype. A kernel on a chunk takes a GPU longer than its launch."""


class LazyLogits(Protocol):
    """Logits [..., V] that are computed only inside the loss; implemented in `tensor_parallel.vocab_parallel`."""

    @property
    def head(self) -> Any: ...
    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def requires_grad(self) -> bool: ...
    def check_groups(self, names: Sequence[str], /) -> None: ...
    def losses(self, labels: Tensor, ignore_index: int, /) -> Tensor: ...


def token_losses(logits: Tensor, labels: Tensor, ignore_index: int) -> Tensor:
    """Return losses [N] of logits [N, V] and labels [N], in float32 (float64 for float64 logits); 0 if ignored."""
    return _TokenLosses.apply(logits, labels, ignore_index)


@untraced  # else torch.compile would unroll the loop over chunks
def linear_losses(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor, ignore_index: int, scale: float
) -> Tensor:
    """`token_losses` of ``scale * (hidden @ weight.t() + bias)``, without the whole logits: hidden [N, C]."""
    losses: Tensor = _LinearLosses.apply(hidden, weight, bias, labels, ignore_index, scale)
    return losses


def _chunks(logits: Tensor) -> Iterator[tuple[slice, Tensor]]:
    """Yield slices of rows with a buffer [rows, V] in the accumulation dtype; all buffers share their memory."""
    (num_tokens, vocab), dtype = logits.shape, accumulation_dtype(logits.dtype)
    rows = min(num_tokens, max(1, CHUNK_BYTES // (vocab * dtype.itemsize)))
    buffer = logits.new_empty((rows, vocab), dtype=dtype)
    for begin in range(0, num_tokens, rows or 1):
        end = min(begin + rows, num_tokens)
        yield slice(begin, end), buffer[: end - begin]


# Custom ops, since torch.compile would unroll the loop and recompile it for each length.
@torch.library.custom_op("cp_mesh::token_losses", mutates_args=())
def _token_losses(logits: Tensor, labels: Tensor, ignore_index: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return losses [N] and for each row, [N, 1], the largest logit and the sum of exp(logit - largest).

    One number, the log-sum-exp, would lose digits of the sum if logits are large.
    """
    largest = logits.amax(1, keepdim=True).to(accumulation_dtype(logits.dtype))
    sums, losses = torch.empty_like(largest), largest.new_empty(labels.shape)
    for rows, x in _chunks(logits):
        torch.sub(logits[rows], largest[rows], out=x)
        losses[rows] = F.nll_loss(x, labels[rows], ignore_index=ignore_index, reduction="none")
        torch.sum(x.exp_(), 1, keepdim=True, out=sums[rows])
    return (losses + sums.squeeze(1).log()).where(labels != ignore_index, 0), largest, sums


@torch.library.custom_op("cp_mesh::token_losses_backward", mutates_args=())
def _token_losses_backward(
    dlosses: Tensor, logits: Tensor, labels: Tensor, largest: Tensor, sums: Tensor, ignore_index: int
) -> Tensor:
    """Return (softmax - one-hot) * dlosses, rounded once to the dtype of the logits."""
    note_compiled_backward()
    dlogits = torch.empty_like(logits, memory_format=torch.contiguous_format)
    counts = labels != ignore_index
    classes, scale = labels.where(counts, 0)[:, None].long(), dlosses.where(counts, 0)[:, None] / sums
    for rows, x in _chunks(logits):
        torch.sub(logits[rows], largest[rows], out=x).exp_()
        x.scatter_add_(1, classes[rows], -sums[rows])
        torch.mul(x, scale[rows], out=dlogits[rows])
    return dlogits


@_token_losses.register_fake
def _(logits: Tensor, labels: Tensor, ignore_index: int) -> tuple[Tensor, Tensor, Tensor]:
    row = logits.new_empty((logits.shape[0], 1), dtype=accumulation_dtype(logits.dtype))
    return row.new_empty(labels.shape), row, torch.empty_like(row)


@_token_losses_backward.register_fake
def _(dlosses: Tensor, logits: Tensor, *_: Any) -> Tensor:
    return torch.empty_like(logits, memory_format=torch.contiguous_format)


def _refuse_second_backward(ctx: Any, *_: Any) -> None:
    raise UnsupportedError("cp_mesh.cross_entropy has no second derivative: use F.cross_entropy on logits.float()")


_token_losses_backward.register_autograd(_refuse_second_backward)


class _TokenLosses(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, labels: Tensor, ignore_index: int) -> Tensor:
        losses, *of_rows = _token_losses(logits, labels, ignore_index)
        ctx.save_for_backward(logits, labels, *of_rows)
        ctx.ignore_index = ignore_index
        return losses

    @staticmethod
    def backward(ctx: Any, dlosses: Tensor) -> tuple[Tensor, None, None]:
        return _token_losses_backward(dlosses, *ctx.saved_tensors, ctx.ignore_index), None, None


def _logits(hidden: Tensor, weight: Tensor, bias: Tensor | None, scale: float) -> Iterator[tuple[slice, Tensor]]:
    """Yield slices of rows with their logits in the accumulation dtype."""
    dtype = accumulation_dtype(hidden.dtype)
    step = max(1, CHUNK_BYTES // (len(weight) * dtype.itemsize))
    for begin in range(0, len(hidden), step):
        rows = slice(begin, min(begin + step, len(hidden)))
        yield rows, F.linear(hidden[rows], weight, bias).to(dtype).mul_(scale)


class _LinearLosses(torch.autograd.Function):
    """The backward computes the logits again, and adds the gradients of the weight in the accumulation dtype."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor, *options: Any) -> Tensor:
        ctx.ignore_index, ctx.scale = options
        found = hidden.new_empty((3, len(hidden), 1), dtype=accumulation_dtype(hidden.dtype))
        for rows, logits in _logits(hidden, weight, bias, ctx.scale):
            losses, *of_rows = _token_losses(logits, labels[rows], ctx.ignore_index)
            for x, y in zip(found[:, rows], (losses[:, None], *of_rows), strict=True):
                x.copy_(y)
        ctx.save_for_backward(hidden, weight, bias, labels, *found[1:])
        return found[0].flatten()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dlosses: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, labels, *of_all = ctx.saved_tensors
        wants = [want and x is not None for x, want in zip((hidden, weight, bias), ctx.needs_input_grad, strict=False)]
        dhidden = torch.empty_like(hidden) if wants[0] else None
        dweight = torch.zeros_like(weight, dtype=dlosses.dtype) if wants[1] else None
        dbias = torch.zeros_like(bias, dtype=dlosses.dtype) if wants[2] else None
        for rows, logits in _logits(hidden, weight, bias, ctx.scale):
            of_rows = labels[rows], *(x[rows] for x in of_all)
            dlogits = _token_losses_backward(dlosses[rows], logits, *of_rows, ctx.ignore_index).mul_(ctx.scale)
            rounded = dlogits.to(hidden.dtype)
            if dhidden is not None:
                torch.mm(rounded, weight, out=dhidden[rows])
            if dweight is not None:
                dweight += rounded.t() @ hidden[rows]
            if dbias is not None:
                dbias += dlogits.sum(0)
        grads = (None if x is None else x.to(y.dtype) for x, y in ((dhidden, hidden), (dweight, weight), (dbias, bias)))
        return *grads, None, None, None
