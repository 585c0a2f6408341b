"""Full precision where a model computes in less: `exactly` runs a function without autocast and TF32."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from threading import Lock
from typing import Any

import torch
from torch import Tensor

_BACKENDS: Any = torch.backends
_UNITS = _BACKENDS.cuda.matmul, _BACKENDS.cudnn.conv, _BACKENDS.mkldnn.matmul
"""Backends that may compute float32 matmuls in TF32 or bfloat16."""


_lock, _switched, _inside = Lock(), ExitStack(), [0]


@contextmanager
def without_tf32() -> Iterator[None]:
    """Turn TF32 off. Threads may overlap: the first one switches it off, the last one back."""
    with _lock:
        if not _inside[0]:
            _switched.enter_context(_switched_off())
        _inside[0] += 1
    try:
        yield
    finally:
        with _lock:
            _inside[0] -= 1
            if not _inside[0]:
                _switched.close()


@contextmanager
def _switched_off() -> Iterator[None]:
    """PyTorch has two switches; reading the older one raises if only the newer one was set."""
    before = [unit.fp32_precision for unit in _UNITS]
    try:
        older = torch.get_float32_matmul_precision()
        torch.set_float32_matmul_precision("highest")
    except RuntimeError:
        older = None
    try:
        for unit in _UNITS:
            unit.fp32_precision = "ieee"
        yield
    finally:
        if older is not None:
            torch.set_float32_matmul_precision(older)
        for unit, word in zip(_UNITS, before, strict=True):
            unit.fp32_precision = word


@contextmanager
def _full(device: torch.device) -> Iterator[None]:
    with torch.autocast(device.type, enabled=False), without_tf32():
        yield


class _Exactly(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, function: Callable[..., Any], *tensors: Tensor | None) -> Any:
        ctx.function, ctx.device = function, next(x.device for x in tensors if x is not None)
        ctx.save_for_backward(*tensors)
        with _full(ctx.device):
            return function(*tensors)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        needed = ctx.needs_input_grad[1:]
        pairs = zip(ctx.saved_tensors, needed, strict=True)
        given: list[Any] = [x if x is None else x.detach().requires_grad_(need) for x, need in pairs]
        with torch.enable_grad(), _full(ctx.device):
            out = ctx.function(*given)
            outs = zip(out if isinstance(out, tuple) else (out,), grads, strict=True)
            known = [(x, grad) for x, grad in outs if x.requires_grad]
            wanted = [x for x, need in zip(given, needed, strict=True) if need]
            of_outs = [x for x, _ in known], wanted, [grad for _, grad in known]
            found = iter(torch.autograd.grad(*of_outs, allow_unused=True))
        return None, *(next(found) if need else None for need in needed)


def exactly(function: Callable[..., Any], *tensors: Tensor | None) -> Any:
    """``function(*tensors)`` without autocast and TF32, forward and backward, whatever the caller set.

    Between both passes ``tensors`` alone are held: the backward calls ``function`` again. TF32 is a switch of the
    process, so other threads compute without it meanwhile.

    Args:
        function: returns a tensor, or a tuple of them; it reads no other tensor that needs a gradient.
    """
    return _Exactly.apply(function, *tensors)
