"""Token losses from logits, computed in chunks of rows by two custom ops.

Logits are the largest tensor of many training steps. In half precision `F.cross_entropy` holds the logits in float32,
their log-softmax, and its gradient: 12 bytes for each entry. Here the backward reads the original logits and two
numbers per row, and only one chunk of rows at a time is in float32.

The loss of a row of logits x is ``lse - q @ x + z_loss * lse**2``, with lse the log-sum-exp of x. The targets q are 1
at the label, or the softmax of a teacher's logits; label smoothing mixes them with 1 / V.

Shapes: N tokens of this rank, V vocabulary, C features.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.tensor import DTensor

from cp_mesh._torch import in_transform, untraced
from cp_mesh.call.spec import autocast
from cp_mesh.errors import UnsupportedError, refuse
from cp_mesh.kernels.combine import accumulation_dtype
from cp_mesh.sequence.losses import note_compiled_backward
from cp_mesh.tensor_parallel.vocab_parallel import add_terms

CHUNK_BYTES = 256 << 20
"""Bytes of a chunk of rows in the accumulation dtype. A kernel on a chunk takes a GPU longer than its launch."""

Head = tuple[Tensor, Tensor, Tensor | None]
"""Hidden states [N, C], weight [V, C] and bias [V]."""


class LazyLogits(Protocol):
    """Logits [..., V] that are computed only inside the loss; implemented in `tensor_parallel.vocab_parallel`."""

    @property
    def head(self) -> Any: ...
    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def requires_grad(self) -> bool: ...
    def check_groups(self, names: Sequence[str], /) -> None: ...
    def losses(self, labels: Tensor, ignore_index: int, label_smoothing: float, z_loss: float, /) -> Tensor: ...


def prepare_losses(
    what: str,
    x: Tensor | LazyLogits,
    labels: Tensor,
    ignore_index: int,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    temperature: float = 1.0,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    teacher: Tensor | tuple[Tensor, ...] | None = None,
) -> Callable[[], Tensor]:
    """Check the arguments of `cross_entropy`, without a collective; return the function that computes losses [N]."""
    if not (isinstance(x, Tensor) or hasattr(x, "check_groups")):
        refuse(f"{what}: logits", "a tensor", type(x).__name__, "of an output of Transformers pass its logits")
    if not torch.compiler.is_compiling() and in_transform():
        got, hint = "torch.func.grad or the like", "use torch.autograd.grad, or backward()"
        refuse(what, "no transform of torch.func", got, hint, UnsupportedError)
    soft: tuple[Tensor, ...] = ()
    if teacher is not None:
        if any(hasattr(y, "check_groups") for y in (x, teacher)):
            hint = "leave the last linears of both models out of tp plans, and pass weight="
            refuse(f"{what}: teacher", "no logits of VocabParallelHead", "some", hint, UnsupportedError)
        soft = tuple(y for y in teacher if y is not None) if isinstance(teacher, tuple | list) else (teacher,)
        if not (soft and all(isinstance(y, Tensor) for y in soft)):
            refuse(f"{what}: teacher", _TEACHER, type(teacher).__name__, "of an output of Transformers pass its logits")
        if torch.is_grad_enabled() and any(y.requires_grad for y in soft):
            hint = "call the teacher under torch.no_grad(), and pass its weight.detach()"
            refuse(f"{what}: teacher", "tensors without a gradient", "one with requires_grad", hint)
    for y in (x, labels, weight, bias):
        if isinstance(y, DTensor):
            hint = "under FSDP2 call it in the module's forward; over tp take VocabParallelHead, without weight="
            refuse(what, "local tensors", "DTensors", hint)
    for y in soft:
        if isinstance(y, DTensor):
            refuse(f"{what}: teacher", "local tensors", "DTensors", _UNSHARD)
    check_ids(f"{what}: labels", labels)
    if not isinstance(ignore_index, int):
        refuse(f"{what}: ignore_index", "an int", type(ignore_index).__name__, "-100, as shard pads labels")
    if x.shape[:-1] != labels.shape:
        refuse(f"{what}: labels", f"shape {tuple(x.shape[:-1])}", tuple(labels.shape), "shard both with one sequence")
    for number in (temperature, label_smoothing, z_loss):
        if not isinstance(number, int | float):
            named = f"{what}: temperature, label_smoothing or z_loss"
            refuse(named, "a number", type(number).__name__, "it has no gradient: float(x)")
    if not (0 <= label_smoothing <= 1 and 0 <= z_loss < math.inf):
        got = f"label_smoothing={label_smoothing}, z_loss={z_loss}"
        refuse(what, "label_smoothing from 0 to 1 and a z_loss of 0 or more", got, "0.0 leaves a term out")
    if weight is None:
        if temperature != 1 or bias is not None:
            got = f"temperature={temperature}, bias={None if bias is None else tuple(bias.shape)}"
            refuse(what, "neither temperature nor bias without weight=", got, "write logits / temperature + bias")
        fits = teacher is None or (len(soft) == 1 and soft[0].shape == x.shape)
    else:
        if not _fit(x, weight, bias):
            got = str([tuple(y.shape) for y in (x, weight, bias) if y is not None])
            hint = "VocabParallelHead needs no weight="
            refuse(what, "hidden states [..., C], weight [V, C] and bias [V]", got, hint)
        fits = teacher is None or (soft[0].shape[:-1] == labels.shape and _fit(*soft) and len(soft[1]) == len(weight))
    if not fits:
        alone = weight is not None and len(soft) == 1
        hint = "weight= asks for the tuple" if alone else "rows and V are those of the student"
        refuse(f"{what}: teacher", _TEACHER, [tuple(y.shape) for y in soft], hint)
    if not temperature > 0:
        refuse(f"{what}: temperature", "a positive number", temperature, "1.0 leaves the logits as they are")
    flat, options = labels.flatten(), (ignore_index, label_smoothing, z_loss)
    if not isinstance(x, Tensor):
        return partial(x.losses, flat, *options)
    if weight is None:
        rows = [] if teacher is None else [soft[0].flatten(0, -2)]
        return partial(_TokenLosses.apply, x.flatten(0, -2), flat, *options, *rows)
    for held in () if torch.compiler.is_compiling() else (weight, *soft[1:]):
        if held.numel() and not held.untyped_storage().size():
            whose, hint = "weight", "call it within the forward of the module that holds it"
            if held is not weight:
                whose, hint = "teacher's weight", _UNSHARD
            refuse(f"{what}: {whose}", "one that is there", "one that FSDP2 has freed", hint)
    return partial(
        _linear_losses, _head(x, weight, bias), flat, 1 / temperature, options, () if teacher is None else _head(*soft)
    )


def check_ids(what: str, labels: Any) -> None:
    is_local = isinstance(labels, Tensor) and not isinstance(labels, DTensor)
    if not is_local or labels.dtype != torch.int64:
        hint = "pass the labels of this rank's rows; labels.long() converts them"
        refuse(what, "a local tensor, int64", labels.dtype if is_local else type(labels).__name__, hint)


_UNSHARD = "under FSDP2 call unshard() of the teacher's module that holds its weight, and then read the weight"
_TEACHER = "logits [..., V], or with weight= a tuple of hidden states [..., C], weight [V, C], perhaps bias [V]"


def _fit(hidden: Any = None, weight: Any = None, bias: Tensor | None = None, *other: Tensor) -> bool:
    fits = isinstance(hidden, Tensor) and weight is not None and weight.shape[1:] == hidden.shape[-1:] and not other
    return fits and (bias is None or bias.shape == weight.shape[:1])


def _head(hidden: Tensor, weight: Tensor, bias: Tensor | None = None) -> Head:
    hidden, weight = autocast(hidden, weight)
    return hidden.flatten(0, -2), weight, None if bias is None else bias.to(weight.dtype)


@untraced  # else torch.compile would unroll the loop over chunks
def _linear_losses(student: Head, labels: Tensor, scale: float, options: tuple[Any, ...], teacher: Any) -> Tensor:
    """Losses of ``scale * (hidden @ weight.t() + bias)``, without the whole logits: hidden [N, C]."""
    losses: Tensor = _LinearLosses.apply(*student, labels, scale, options, *teacher)
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
def _token_losses(
    logits: Tensor,
    labels: Tensor,
    ignore_index: int,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    teacher: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return losses [N] and for each row, [N, 1], the largest logit and the sum of exp(logit - largest).

    One number, the log-sum-exp, would lose digits of the sum if logits are large.
    """
    largest = logits.amax(1, keepdim=True).to(accumulation_dtype(logits.dtype))
    sums, losses = torch.empty_like(largest), largest.new_empty(labels.shape)
    for rows, x in _chunks(logits):
        torch.sub(logits[rows], largest[rows], out=x)
        if teacher is None:
            losses[rows] = F.nll_loss(x, labels[rows], ignore_index=ignore_index, reduction="none")
        else:
            q = teacher[rows].softmax(1, x.dtype)
            losses[rows] = -(q * x).masked_fill_(q == 0, 0).sum(1)  # a logit may be -inf there
        if label_smoothing:
            losses[rows] = (1 - label_smoothing) * losses[rows] - label_smoothing * x.mean(1)
        torch.sum(x.exp_(), 1, keepdim=True, out=sums[rows])
    losses += sums.squeeze(1).log()
    if z_loss:
        losses += z_loss * (largest + sums.log()).squeeze(1).square()
    return losses.where(labels != ignore_index, 0), largest, sums


@torch.library.custom_op("cp_mesh::token_losses_backward", mutates_args=())
def _token_losses_backward(
    dlosses: Tensor,
    logits: Tensor,
    labels: Tensor,
    largest: Tensor,
    sums: Tensor,
    ignore_index: int,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    teacher: Tensor | None = None,
) -> Tensor:
    """Return (softmax * (1 + 2 z_loss lse) - targets) * dlosses, rounded once to the dtype of the logits."""
    note_compiled_backward()
    dlogits = torch.empty_like(logits, memory_format=torch.contiguous_format)
    counts = labels != ignore_index
    classes, scale = labels.where(counts, 0)[:, None].long(), dlosses.where(counts, 0)[:, None] / sums
    for rows, x in _chunks(logits):
        torch.sub(logits[rows], largest[rows], out=x).exp_()
        add_terms(x, largest[rows], sums[rows], logits.shape[1], label_smoothing, z_loss)
        if teacher is None:
            x.scatter_add_(1, classes[rows], (label_smoothing - 1) * sums[rows])
        else:
            q = teacher[rows].softmax(1, x.dtype).masked_fill_(~counts[rows, None], 0)
            x.addcmul_(q, sums[rows], value=label_smoothing - 1)
        torch.mul(x, scale[rows], out=dlogits[rows])
    return dlogits


@_token_losses.register_fake
def _(logits: Tensor, labels: Tensor, *_: Any) -> tuple[Tensor, Tensor, Tensor]:
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
    def forward(ctx: Any, logits: Tensor, labels: Tensor, *options: Any) -> Tensor:
        ctx.options, teacher = options[:3], options[3:]
        losses, *of_rows = _token_losses(logits, labels, *options)
        ctx.save_for_backward(logits, labels, *of_rows, *teacher)
        return losses

    @staticmethod
    def backward(ctx: Any, dlosses: Tensor) -> tuple[Tensor | None, ...]:
        logits, labels, largest, sums, *teacher = ctx.saved_tensors
        dlogits = _token_losses_backward(dlosses, logits, labels, largest, sums, *ctx.options, *teacher)
        return dlogits, *[None] * (len(ctx.needs_input_grad) - 1)


def _logits(scale: float, *heads: Any) -> Iterator[tuple[Any, ...]]:
    """Yield slices of rows with their logits of each `Head`, scaled, in the accumulation dtype."""
    hidden, weight, _ = heads[0]
    step = max(1, CHUNK_BYTES // (len(weight) * accumulation_dtype(hidden.dtype).itemsize))
    for begin in range(0, len(hidden), step):
        rows = slice(begin, min(begin + step, len(hidden)))
        parts = (F.linear(x[rows], *head) for x, *head in filter(None, heads))
        yield rows, *(x.to(accumulation_dtype(x.dtype)).mul_(scale) for x in parts)


class _Gradient(torch.autograd.Function):
    """A gradient of the inputs that has none itself."""

    @staticmethod
    def forward(ctx: Any, grad: Tensor, *inputs: Tensor) -> Tensor:
        return grad.view_as(grad)

    backward = staticmethod(_refuse_second_backward)


class _LinearLosses(torch.autograd.Function):
    """The backward computes the logits again, and adds the gradients of the weight in the accumulation dtype."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor, *options: Any) -> Tensor:
        ctx.scale, ctx.options, *teacher = options
        found = hidden.new_empty((3, len(hidden), 1), dtype=accumulation_dtype(hidden.dtype))
        for rows, logits, *soft in _logits(ctx.scale, (hidden, weight, bias), teacher):
            losses, *of_rows = _token_losses(logits, labels[rows], *ctx.options, *soft)
            for x, y in zip(found[:, rows], (losses[:, None], *of_rows), strict=True):
                x.copy_(y)
        ctx.save_for_backward(hidden, weight, bias, labels, *found[1:], *teacher)
        return found[0].flatten()

    @staticmethod
    def backward(ctx: Any, dlosses: Tensor) -> tuple[Tensor | None, ...]:
        saved = ctx.saved_tensors
        with torch.no_grad():
            grads = _LinearLosses._gradients(ctx, dlosses, *saved)
        if torch.is_grad_enabled():  # create_graph
            grads = [x if x is None else _Gradient.apply(x, dlosses, *saved[:2]) for x in grads]
        return *grads, *[None] * (len(ctx.needs_input_grad) - 3)

    @staticmethod
    def _gradients(
        ctx: Any, dlosses: Tensor, hidden: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor, largest: Tensor,
        sums: Tensor, *teacher: Any,
    ) -> list[Tensor | None]:  # fmt: skip
        wants = [want and x is not None for x, want in zip((hidden, weight, bias), ctx.needs_input_grad, strict=False)]
        dhidden = torch.empty_like(hidden) if wants[0] else None
        dweight = torch.zeros_like(weight, dtype=dlosses.dtype) if wants[1] else None
        dbias = torch.zeros_like(bias, dtype=dlosses.dtype) if bias is not None and wants[2] else None
        for rows, logits, *soft in _logits(ctx.scale, (hidden, weight, bias), teacher):
            of_rows = labels[rows], largest[rows], sums[rows]
            dlogits = _token_losses_backward(dlosses[rows], logits, *of_rows, *ctx.options, *soft).mul_(ctx.scale)
            rounded = dlogits.to(hidden.dtype)
            if dhidden is not None:
                torch.mm(rounded, weight, out=dhidden[rows])
            if dweight is not None:
                dweight += rounded.t() @ hidden[rows]
            if dbias is not None:
                dbias += dlogits.sum(0)
        pairs = (dhidden, hidden), (dweight, weight), (dbias, bias)
        return [None if x is None or y is None else x.to(y.dtype) for x, y in pairs]
