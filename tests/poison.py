"""Allocations that hold garbage: a read of memory that nobody wrote then shows in the result."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch


def _poison(tensor: Any) -> Any:
    # Fake, functional and distributed tensors are subclasses; a traced fill would change the program under test.
    if torch.compiler.is_compiling() or type(tensor) is not torch.Tensor or tensor.is_meta:
        return tensor
    with torch.no_grad():
        if tensor.is_floating_point() or tensor.is_complex():
            return tensor.fill_(float("nan"))
        return tensor.fill_(True if tensor.dtype is torch.bool else torch.iinfo(tensor.dtype).max)


def _poisoning_twin(allocate: Callable[..., Any]) -> Callable[..., Any]:
    def twin(*args: Any, **kwargs: Any) -> Any:
        return _poison(allocate(*args, **kwargs))

    return twin


_new_empty = torch.Tensor.new_empty


def _poisoned_new_empty(self: torch.Tensor, *size: Any, **kwargs: Any) -> Any:
    if torch.compiler.is_compiling():  # Dynamo cannot trace the method once it is reached as a plain function
        return torch.ops.aten.new_empty.default(self, size if isinstance(size[0], int) else size[0], **kwargs)
    return _poison(_new_empty(self, *size, **kwargs))


_TWINS = {name: _poisoning_twin(getattr(torch, name)) for name in ("empty", "empty_like", "empty_strided")}


@contextmanager
def poisoned(on: bool = True) -> Iterator[None]:
    """While open, memory that torch hands out unwritten holds NaN (floating), the largest integer, or True."""
    if not on:
        yield
        return
    import torch._dynamo.trace_rules  # Dynamo lists torch's functions once, by identity: before they are replaced

    torch.utils._device._device_constructors()  # and so do `torch.device("meta")` and its like
    with mock.patch.multiple(torch, **_TWINS), mock.patch.object(torch.Tensor, "new_empty", _poisoned_new_empty):
        yield


def poisoning() -> bool:
    return torch.empty is _TWINS["empty"]
