"""Token losses of logits, or of the linear that makes them, in chunks of rows; its vocabulary may be sharded over tp.

Logits are the largest tensor of many training steps. In half precision `F.cross_entropy` holds the logits in float32,
their log-softmax, and its gradient: 12 bytes for each entry. Here only one chunk of rows at a time is in float32. The
backward computes the chunk again from the logits, or from the linear's input, and a few numbers per row.

The loss of a row of logits x is ``lse - q @ x + z_loss * lse**2``, with lse the log-sum-exp of x. The targets q are 1
at the label, or the softmax of a teacher's logits; label smoothing mixes them with 1 / V. Each tp rank sums over its
part of the vocabulary, relative to its own largest logit; the sums of all ranks are gathered.

Shapes: N rows of the batch, V vocabulary, C features.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from cp_mesh._torch import resolve_group
from cp_mesh.comm.shards import Shards
from cp_mesh.errors import UnsupportedError
from cp_mesh.kernels.combine import accumulation_dtype
from cp_mesh.sequence.losses import note_compiled_backward
from cp_mesh.tensor_parallel.matmul import LinearSpec, check_rows, graded_names

CHUNK_BYTES = 256 << 20
"""Bytes of a chunk of logits in the accumulation dtype. A kernel on a chunk takes a GPU longer than its launch."""


def own_index(tokens: Tensor, begin: int, count: int, size: int) -> tuple[Tensor, Tensor]:
    """Indices in this rank's part of the vocabulary (0 for tokens of other ranks), and which tokens are in the part.

    Tokens outside of the vocabulary keep an index out of range, so that a lookup raises.
    """
    other = (tokens >= 0) & (tokens < size) & ((tokens < begin) | (tokens >= begin + count))
    return torch.where(other, 0, tokens - begin), ~other


def token_losses(
    given: Sequence[Tensor | None],
    labels: Tensor,
    ignore_index: int,
    temperature: float = 1.0,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    teacher: Sequence[Tensor | None] = (),
    over_tp: tuple[int, int, int, str, bool] | None = None,
) -> Tensor:
    """Losses [N], float32 or float64; 0 for ignored tokens.

    Args:
        given: logits [N, V]; or hidden states [N, C], weight [V, C] and perhaps bias [V]. Over tp hidden states are
            [..., rows of this rank, C], and weight and bias those of this rank's tokens.
        labels: int64 [N], equal on all tp ranks.
        teacher: as ``given``, of the model whose probabilities are the targets.
        over_tp: the first token of this rank, V, rows of the sequence, the tp group's name, and whether each tp rank
            has its own rows of x.
    """
    x, weight, bias = (*given, None, None)[:3]
    assert x is not None
    graded = graded_names(["input", "weight", "bias"], [x, weight, bias]) if over_tp else ""
    over_tp = over_tp or (0, x.shape[-1] if weight is None else len(weight), 0, "", False)
    call = ignore_index, 1 / temperature, label_smoothing, z_loss, *over_tp
    losses: Tensor = _ChunkLosses.apply(x, weight, bias, labels, graded, call, *(y for y in teacher if y is not None))
    return losses


class _ChunkLosses(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor | None, bias: Tensor | None, labels: Tensor, graded: str, call: Any,
        *teacher: Tensor,
    ) -> Tensor:  # fmt: skip
        losses, of_rows = _token_losses(x, weight, bias, labels, [*teacher], *call, graded)
        ctx.save_for_backward(x, weight, bias, labels, of_rows, *teacher)
        ctx.call = call
        return losses

    @staticmethod
    def backward(ctx: Any, dlosses: Tensor) -> tuple[Any, ...]:
        x, weight, bias, labels, of_rows, *teacher = ctx.saved_tensors
        wants = list(ctx.needs_input_grad[:3])
        found = iter(_token_losses_backward(dlosses, x, weight, bias, labels, of_rows, teacher, wants, *ctx.call))
        return *(next(found) if wanted else None for wanted in wants), *[None] * (len(ctx.needs_input_grad) - 3)


def _logits(rows: slice, x: Tensor, weight: Tensor | None = None, bias: Tensor | None = None) -> Tensor:
    return x[rows] if weight is None else F.linear(x[rows], weight, bias)


def _largest(logits: Tensor, out: Tensor) -> None:
    """The largest logit of each row, finite even if all tokens of this rank are at -inf."""
    out.copy_(logits.amax(1, keepdim=True)).clamp_(min=torch.finfo(out.dtype).min)


def _apart(logits: Tensor, scale: float, largest: Tensor, out: Tensor) -> Tensor:
    """``scale * (logits - largest)``, in the dtype of ``out``; rounding of large logits times scale would lose more."""
    torch.sub(logits, largest, out=out)
    return out if scale == 1 else out.mul_(scale)


def _chunks(x: Tensor, weight: Tensor | None) -> Iterator[tuple[slice, Tensor]]:
    """Yield slices of rows with a buffer [rows, V] in the accumulation dtype; all buffers share their memory."""
    vocab, dtype = x.shape[1] if weight is None else len(weight), accumulation_dtype(x.dtype)
    rows = min(len(x), max(1, CHUNK_BYTES // (vocab * dtype.itemsize)))
    buffer = x.new_empty((rows, vocab), dtype=dtype)
    for begin in range(0, len(x), rows or 1):
        end = min(begin + rows, len(x))
        yield slice(begin, end), buffer[: end - begin]


def _all_rows(x: Tensor, num_rows: int, group_name: str, sharded: bool) -> Tensor:
    whole = Shards(num_rows, group_name, "cross_entropy").gather(x)() if sharded else x
    return whole.reshape(-1, whole.shape[-1])


# Custom ops, since torch.compile would unroll the loop and recompile it for each length.
@torch.library.custom_op("cp_mesh::token_losses", mutates_args=())
def _token_losses(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, labels: Tensor, teacher: Sequence[Tensor],
    ignore_index: int, scale: float, label_smoothing: float, z_loss: float,
    begin: int, size: int, num_rows: int = 0, group_name: str = "", sharded: bool = False, graded: str = "",
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Return losses [N], and the largest logit and the sum of exp(logit - largest) of each row, also of the teacher.

    These are [4, N, 1]. One number, the log-sum-exp, would lose digits of the sum if logits are large. Over tp the
    terms of the loss are compared in a first call of a kind: later they must be equal on all tp ranks.
    """
    terms = label_smoothing, z_loss, scale
    if group_name:
        # at least the kind in training/loss.py
        trained = [y is not None and y.requires_grad for y in (x, weight, bias)]
        taught = len(teacher), *[(y.shape[-1], y.dtype) for y in teacher[:1]]
        kind = size, ignore_index, *trained, bias is None, *taught, label_smoothing > 0, z_loss > 0
        alike = {"labels": labels, "label_smoothing, z_loss and temperature": torch.tensor(terms, device="cpu")}
        check_rows("cross_entropy", x, LinearSpec(num_rows, group_name, sharded), *kind, graded=graded, alike=alike)
    x, counts = _all_rows(x, num_rows, group_name, sharded), labels != ignore_index
    soft = [_all_rows(y, num_rows, group_name, sharded) for y in teacher[:1]] + [*teacher[1:]]
    index, own = own_index(labels.where(counts, begin), begin, size if weight is None else len(weight), size)
    # of this rank's logits: the largest, the sum, the label's (or the teacher's mean) and its share; then, for a
    # teacher and label smoothing alone: the teacher's largest logit, the sum of all logits
    found = x.new_zeros((6, len(x), 1), dtype=accumulation_dtype(x.dtype))
    for rows, out in _chunks(x, weight):
        largest, sums, target, share, heaviest, total = found[:, rows]
        logits = _logits(rows, x, weight, bias)
        _largest(logits, largest)
        _apart(logits, scale, largest, out)
        if soft:
            logits = _logits(rows, *soft)
            _largest(logits, heaviest)
            q = _apart(logits, scale, heaviest, torch.empty_like(out)).exp_()
            torch.sum(q, 1, keepdim=True, out=share)
            torch.sum((q * out).masked_fill_(q == 0, 0), 1, keepdim=True, out=target)  # a logit may be -inf there
        else:
            share.copy_(own[rows, None])
            at_label = -F.nll_loss(out, index[rows], ignore_index=ignore_index - begin, reduction="none")
            target.copy_(at_label[:, None]).masked_fill_(~own[rows, None], 0)
        if label_smoothing:
            torch.sum(out, 1, keepdim=True, out=total)
        torch.sum(out.exp_(), 1, keepdim=True, out=sums)
    lens, every = [size], found[None]
    if group_name:
        sent, tp_size = found[: 6 if soft or label_smoothing else 4], resolve_group(group_name).size()
        gathered = Shards(len(sent) * tp_size, group_name, "cross_entropy").gather(sent.flatten(1))()
        lens, every = Shards(size, group_name).sizes, gathered.view(tp_size, len(sent), -1, 1)
    largest, sums, target, share, *others = every.unbind(1)
    heaviest, total = others or found[4:, None]
    top, most = largest.amax(0), heaviest.amax(0)
    below = ((largest - top) * scale).clamp(min=torch.finfo(top.dtype).min)
    weights = ((heaviest - most) * scale).exp()
    sums, mass = (sums * below.exp()).sum(0), (share * weights).sum(0)
    target = ((target + share * below) * weights).sum(0) / mass
    if label_smoothing:
        total = torch.stack([x + y * num_tokens for x, y, num_tokens in zip(total, below, lens, strict=True)]).sum(0)
        target = (1 - label_smoothing) * target + label_smoothing / size * total
    losses = sums.log() - target
    if z_loss:
        losses += z_loss * (scale * top + sums.log()).square()
    return losses.squeeze(1).where(counts, 0), torch.stack([top, sums, most, mass])


@torch.library.custom_op("cp_mesh::token_losses_backward", mutates_args=())
def _token_losses_backward(
    dlosses: Tensor, x: Tensor, weight: Tensor | None, bias: Tensor | None, labels: Tensor, of_rows: Tensor,
    teacher: Sequence[Tensor], wants: Sequence[bool],
    ignore_index: int, scale: float, label_smoothing: float, z_loss: float,
    begin: int, size: int, num_rows: int = 0, group_name: str = "", sharded: bool = False,
) -> list[Tensor]:  # fmt: skip
    """Return the wanted gradients of x, weight and bias, each rounded once to its tensor's dtype.

    That of the logits is (softmax * (1 + 2 z_loss lse) - targets) * dlosses.
    """
    note_compiled_backward()
    shape = x.shape
    x, counts = _all_rows(x, num_rows, group_name, sharded), labels != ignore_index
    soft = [_all_rows(y, num_rows, group_name, sharded) for y in teacher[:1]] + [*teacher[1:]]
    index, own = own_index(labels.where(counts, begin), begin, size if weight is None else len(weight), size)
    largest, sums, heaviest, mass = of_rows
    factor = dlosses.where(counts, 0)[:, None] / sums * scale
    at_target = (label_smoothing - 1) * sums
    options: dict[str, Any] = {"memory_format": torch.contiguous_format}
    dx = torch.empty_like(x, **options) if wants[0] else None
    dweight, dbias = (
        torch.zeros_like(y, dtype=sums.dtype, **options) if y is not None and wanted else None
        for y, wanted in zip((weight, bias), wants[1:], strict=True)
    )
    for rows, out in _chunks(x, weight):
        _apart(_logits(rows, x, weight, bias), scale, largest[rows], out).exp_()
        if z_loss:
            out.mul_(1 + 2 * z_loss * (scale * largest[rows] + sums[rows].log()))
        if label_smoothing:
            out.sub_(label_smoothing / size * sums[rows])
        if soft:
            q = _apart(_logits(rows, *soft), scale, heaviest[rows], torch.empty_like(out)).exp_()
            out.addcmul_(q, at_target[rows] / mass[rows]).masked_fill_(~counts[rows, None], 0)
        else:
            out.scatter_add_(1, index[rows, None], at_target[rows].where(own[rows, None], 0))
        if weight is None:
            assert dx is not None
            torch.mul(out, factor[rows], out=dx[rows])
            continue
        rounded = out.mul_(factor[rows]).to(x.dtype)
        if dx is not None:
            torch.mm(rounded, weight, out=dx[rows])
        if dweight is not None:
            dweight += rounded.t() @ x[rows]
        if dbias is not None:
            dbias += out.sum(0)
    if dx is not None and group_name:
        shards = Shards(num_rows, group_name, "backward of cross_entropy")
        dx = dx.view(*shape[:-2], num_rows, shape[-1])
        dx = (shards.scatter_sum(dx) if sharded else shards.all_sum(dx))()
    pairs = (dx, x), (dweight, weight), (dbias, bias)
    return [grad.to(y.dtype) for grad, y in pairs if grad is not None and y is not None]


@_token_losses.register_fake
def _(x: Tensor, weight: Tensor | None, bias: Tensor | None, labels: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    losses = labels.new_empty(labels.shape, dtype=accumulation_dtype(x.dtype))
    return losses, losses.new_empty((4, labels.shape[0], 1))


@_token_losses_backward.register_fake
def _(dlosses: Tensor, x: Tensor, weight: Any, bias: Any, labels: Any, of_rows: Any, teacher: Any, wants: Any, *_: Any):  # type: ignore[no-untyped-def]
    return [y.new_empty(y.shape) for y, wanted in zip((x, weight, bias), wants, strict=True) if wanted]


def _refuse_second_backward(ctx: Any, *_: Any) -> None:
    raise UnsupportedError("cp_mesh.cross_entropy has no second derivative: use F.cross_entropy on logits.float()")


_token_losses_backward.register_autograd(_refuse_second_backward)
