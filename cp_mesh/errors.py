"""Errors for users. A message has four parts: what, expected, got, and the nearest setting that works."""

from __future__ import annotations

import operator
from contextlib import suppress
from types import FunctionType
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Placement, Shard


class ArgumentError(ValueError):
    """An argument is wrong, or disagrees with another one."""


class UnsupportedError(NotImplementedError):
    """The combination is meaningful but not supported: cp_mesh refuses it rather than compute something else."""


class RankMismatchError(RuntimeError):
    """Ranks passed different arguments. Raised on every rank, at first calls and in check mode."""


def describe(what: str, expected: object, got: object, hint: str) -> str:
    """The message of an error, from its four parts."""
    return f"{what}: expected {written(expected)}, got {written(got)}; {hint}"


def written(x: object) -> str:
    """A value as users write it: a mesh by its axes, a class by its name, a string unchanged."""
    if isinstance(x, DeviceMesh):
        names = x.mesh_dim_names or [f"axis {i}" for i in range(x.ndim)]
        return f"DeviceMesh({', '.join(f'{name}={size}' for name, size in zip(names, x.shape, strict=True))})"
    if isinstance(x, dist.ProcessGroup):
        return f"ProcessGroup of ranks {dist.get_process_group_ranks(x)}"
    if isinstance(x, Placement):
        return f"Shard({x.dim})" if type(x) is Shard else repr(x)
    if isinstance(x, tuple | list):
        items = ", ".join(repr(item) if isinstance(item, str) else written(item) for item in x)
        return f"[{items}]" if isinstance(x, list) else f"({items}{',' * (len(x) == 1)})"
    return x.__name__ if isinstance(x, type | FunctionType) else f"{x}"


def refuse(what: str, expected: object, got: object, hint: str, error: type[Exception] = ArgumentError) -> NoReturn:
    """Raise ``error`` with the message that `describe` makes."""
    raise error(describe(what, expected, got, hint))


def as_int(x: Any) -> Any:
    """Convert an integer of another type, such as NumPy's or a one-element CPU tensor, to int; others unchanged."""
    if x is None or isinstance(x, int | torch.SymInt):
        return x
    if isinstance(x, torch.Tensor) and (x.device.type != "cpu" or x.dtype == torch.bool):  # a GPU would wait
        return x
    with suppress(TypeError):
        return operator.index(x)
    return x
