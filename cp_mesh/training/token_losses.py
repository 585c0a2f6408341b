"""Arguments of a loss over tokens, checked before a collective; `losses_in_chunks` computes it."""

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from cp_mesh._torch import in_transform
from cp_mesh.call.spec import autocast
from cp_mesh.errors import UnsupportedError, refuse
from cp_mesh.tensor_parallel.losses_in_chunks import token_losses
from cp_mesh.tensor_parallel.vocab_parallel import DeferredLogits

Teacher = Tensor | DeferredLogits | tuple[Tensor, ...]


def prepare_losses(
    what: str,
    x: Tensor | DeferredLogits,
    labels: Tensor,
    ignore_index: int,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    temperature: float = 1.0,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    teacher: Teacher | None = None,
) -> Callable[[], Tensor]:
    """Check the arguments of `cross_entropy`, without a collective; return the function that computes losses [N]."""
    if not isinstance(x, Tensor | DeferredLogits):
        refuse(f"{what}: logits", "a tensor", type(x).__name__, "of an output of Transformers pass its logits")
    if not torch.compiler.is_compiling() and in_transform():
        got, hint = "torch.func.grad or the like", "use torch.autograd.grad, or backward()"
        refuse(what, "no transform of torch.func", got, hint, UnsupportedError)
    soft: tuple[Any, ...] = ()
    if teacher is not None:
        is_tuple = isinstance(teacher, tuple | list) and not isinstance(teacher, DeferredLogits)
        soft = tuple(y for y in teacher if y is not None) if is_tuple else (teacher,)
        if not (soft and all(isinstance(y, Tensor | DeferredLogits) for y in soft)):
            refuse(f"{what}: teacher", _TEACHER, type(teacher).__name__, "of an output of Transformers pass its logits")
        if torch.is_grad_enabled() and any(y.requires_grad for y in soft):
            hint = "call the teacher under torch.no_grad(), and pass its weight.detach()"
            refuse(f"{what}: teacher", "tensors without a gradient", "one with requires_grad", hint)
        deferred = any(isinstance(y, DeferredLogits) for y in (x, *soft))
        if deferred and not (isinstance(x, DeferredLogits) and x.is_like(teacher)):
            expected = "logits of VocabParallelHead in both models or in none, with equal rows, V, mode and tp group"
            refuse(f"{what}: teacher", expected, "others", "give both models the same plan over tp, or pass weight=")
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
        if (temperature != 1 and isinstance(x, Tensor)) or bias is not None:
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
    options = labels.flatten(), ignore_index, temperature, label_smoothing, z_loss
    if isinstance(x, DeferredLogits):
        return partial(x.losses, *options, teacher=teacher if isinstance(teacher, DeferredLogits) else None)
    if weight is None:
        return partial(token_losses, [x.flatten(0, -2)], *options, teacher=[y.flatten(0, -2) for y in soft])
    for held in () if torch.compiler.is_compiling() else (weight, *soft[1:]):
        if held.numel() and not held.untyped_storage().size():
            whose, hint = "weight", "call it within the forward of the module that holds it"
            if held is not weight:
                whose, hint = "teacher's weight", _UNSHARD
            refuse(f"{what}: {whose}", "one that is there", "one that FSDP2 has freed", hint)
    return partial(token_losses, _head(x, weight, bias), *options, teacher=_head(*soft) if soft else [])


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


def _head(hidden: Tensor, weight: Tensor, *bias: Tensor | None) -> list[Any]:
    hidden, weight = autocast(hidden, weight)
    return [hidden.flatten(0, -2), weight, *(x if x is None else x.to(weight.dtype) for x in bias)]
