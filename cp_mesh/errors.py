"""Errors for users. A message has four parts: what, expected, got, and the nearest setting that works."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import inspect
import operator
import os
import re
import sys
import warnings
from pathlib import Path
from types import FrameType, FunctionType, UnionType
from typing import Any, NoReturn, TypeVar, Union, cast, get_args, get_origin, get_type_hints

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Placement, Shard

Made = TypeVar("Made")
_SKIPPED_FILES = (
    *(f"{Path(file).parent}{os.sep}" for file in (__file__, torch.__file__)),  # the separator keeps torchvision's files
    *(contextlib.__file__[:-1], dataclasses.__file__[:-1], "<string"),  # "<string>" is the __init__ of a dataclass
)
"""Prefixes of file names: users did not write these files, so no warning names a line of them.

CPython 3.12 and 3.13 do not match a prefix that is the whole file name, so the last character is left out.
"""

_IMPORT_FILES = "<frozen importlib._bootstrap"
"""Prefix of the frames of an import statement, which `warnings` skips and does not count in stacklevel."""


class ArgumentError(ValueError):
    """An argument is wrong, or disagrees with another one."""


class UnsupportedError(NotImplementedError):
    """The combination is meaningful but not supported: cp_mesh refuses it rather than compute something else."""


class RankMismatchError(RuntimeError):
    """Ranks passed different arguments. Raised on every rank, at first calls and in check mode."""


REFUSALS = (ArgumentError, UnsupportedError, RankMismatchError)


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


def warn(text: str, category: type[Warning] = UserWarning) -> None:
    """Issue a warning that names the user's line: the innermost frame outside of cp_mesh and PyTorch."""
    text = f"cp_mesh: {text}"
    if sys.version_info >= (3, 12):
        warnings.warn(text, category, skip_file_prefixes=_SKIPPED_FILES)
        return
    frame: FrameType | None = sys._getframe(1)
    stacklevel = 2
    while frame is not None and frame.f_code.co_filename.startswith((*_SKIPPED_FILES, _IMPORT_FILES)):
        stacklevel += not frame.f_code.co_filename.startswith(_IMPORT_FILES)
        frame = frame.f_back
    warnings.warn(text, category, stacklevel=stacklevel)


def as_int(x: Any) -> Any:
    """Convert an integer of another type, such as NumPy's or a one-element CPU tensor, to int; others unchanged."""
    if x is None or isinstance(x, int | torch.SymInt):
        return x
    if isinstance(x, torch.Tensor) and (x.device.type != "cpu" or x.dtype == torch.bool):  # a GPU would wait
        return x
    with contextlib.suppress(TypeError):
        return operator.index(x)
    return x


MOST = 1 << 20
"""Most ranks, heads and the like: what is done for each of them must end."""


def check_int(what: str, x: Any, least: int = 1, most: int = MOST, hint: str = "pass an int") -> Any:
    """Return an integer of any type as an int; refuse other values, and those out of bounds."""
    number = as_int(x)
    if isinstance(number, bool) or not isinstance(number, int | torch.SymInt) or not least <= number <= most:
        refuse(what, f"an int of {least} to {most}", repr(x), hint)
    return number


def typed(function: Made) -> Made:
    """Decorate a public function: if a call fails and an argument is not of the annotated type, say so.

    Types are looked at after a call has failed only, so whatever works is taken.
    """
    plain: Any = function

    @functools.wraps(plain)
    def call(*args: Any, **kwargs: Any) -> Any:
        try:
            return plain(*args, **kwargs)
        except (AttributeError, TypeError) as error:
            _explain(plain, args, kwargs, error)
            raise

    return cast(Made, call)


def _explain(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any], error: Exception) -> None:
    """Refuse the first argument whose type is not the annotated one."""
    try:
        hints, bound = get_type_hints(function), inspect.signature(function).bind(*args, **kwargs)
    except (NameError, TypeError):  # other arguments than the function's, of which Python tells
        return
    what = function.__qualname__
    for name, x in bound.arguments.items():
        if name in hints and not _fits(x, hints[name]):
            expected = re.sub(r"(\w+\.)+(?=\w)", "", inspect.formatannotation(hints[name]))
            hint = f"help({function.__module__}.{what}) describes it"
            raise ArgumentError(describe(f"{what}: {name}", expected, type(x).__name__, hint)) from error


def _fits(x: object, hint: Any) -> bool:
    """Whether a value is of an annotated type, or of one that is not known."""
    kind = get_origin(hint) or hint
    if kind in (Union, UnionType):
        return any(_fits(x, part) for part in get_args(hint))
    if kind in (int, float):
        return hasattr(x, "__float__") or isinstance(x, torch.SymInt | torch.SymFloat)
    try:
        return isinstance(x, kind)
    except TypeError:  # Any, a Literal or a protocol
        return True
