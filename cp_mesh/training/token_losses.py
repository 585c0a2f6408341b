"""Losses of tokens from their logits, in chunks of rows: two ops.

Logits are the largest tensor of many training steps. `F.cross_entropy` of half precision holds them in float32, with
their log-softmax and its gradient: 12 bytes for each. Here the backward reads the logits as they were given, with two
numbers a row, and only one chunk of rows is in float32 at a time.

Shapes: N tokens of this rank, V vocabulary.
"""

from collections.abc import Iterator, Sequence
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from cp_mesh.errors import UnsupportedError
from cp_mesh.kernels.combine import accumulation_dtype
from cp_mesh.sequence.losses import note_compiled_backward

CHUNK_BYTES = 256 << 20
"""Of a chunk of rows in the dtype that they are computed in. A kernel on as much takes a GPU longer than its launch."""


class LazyLogits(Protocol):
    """Logits [..., V] that are computed where their losses are; `tensor_parallel.vocab_parallel` has them."""

    @property
    def head(self) -> Any: ...
    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def requires_grad(self) -> bool: ...
    def check_groups(self, names: Sequence[str], /) -> None: ...
    def losses(self, labels: Tensor, ignore_index: int, /) -> Tensor: ...


def token_losses(logits: Tensor, labels: Tensor, ignore_index: int) -> Tensor:
    """Losses [N] of logits [N, V] and labels [N], in float32 (float64 for float64 logits); 0 of ignored tokens."""
    return _TokenLosses.apply(logits, labels, ignore_index)


def _chunks(logits: Tensor) -> Iterator[tuple[slice, Tensor]]:
    """Rows, and where they may be computed, the same memory each time: [rows, V] in the accumulation dtype."""
    (num_tokens, vocab), dtype = logits.shape, accumulation_dtype(logits.dtype)
    rows = min(num_tokens, max(1, CHUNK_BYTES // (vocab * dtype.itemsize)))
    buffer = logits.new_empty((rows, vocab), dtype=dtype)
    for begin in range(0, num_tokens, rows or 1):
        end = min(begin + rows, num_tokens)
        yield slice(begin, end), buffer[: end - begin]


# Ops, so that torch.compile keeps the loop as it is: traced, it would be unrolled, and once more for each length.
@torch.library.custom_op("cp_mesh::token_losses", mutates_args=())
def _token_losses(logits: Tensor, labels: Tensor, ignore_index: int) -> tuple[Tensor, Tensor, Tensor]:
    """Losses [N]; and of each row, [N, 1], the largest logit and the sum of exp(logit - largest).

    Their log-sum-exp as one number would lose the digits of the sum where logits are large.
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
    """(softmax - one-hot) * dlosses, rounded once to the dtype of the logits."""
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
