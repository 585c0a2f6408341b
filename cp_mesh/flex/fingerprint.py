"""Fingerprint of a user's function: all tensors, numbers and code that it can depend on.

A function with the fingerprint of an earlier one does the same, so it need not be traced again. A function that may
read anything else, such as attributes of a module, a list or state of another package, has no fingerprint.
"""

from __future__ import annotations

import dis
import math
from collections.abc import Hashable
from functools import lru_cache
from types import BuiltinFunctionType, CodeType, FunctionType, ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

_PACKAGES = ("torch", "math", "operator")  # their modules and functions are taken as constant
_BUILTINS = frozenset(
    ("abs", "bool", "float", "int", "isinstance", "len", "max", "min", "pow", "range", "round", "sum")
)
_NUMBERS = (bool, int, float, str, type(None), torch.dtype, torch.device)
_OTHERS = ("STORE_GLOBAL", "STORE_ATTR", "STORE_SUBSCR", "STORE_NAME", "DELETE_", "IMPORT_", "LOAD_NAME", "LOAD_BUILD",
           "LOAD_FROM", "LOAD_LOCALS", "YIELD", "SEND")  # fmt: skip
"""Instructions that write shared state, or read state that the fingerprint does not cover."""
_STATES = ("is_", "are_", "get_", "_", "backends", "cuda", "distributed", "random", "initial_seed", "current_", "grad")
"""Prefixes of attributes of torch and of tensors that read changing state."""


class Reached(NamedTuple):
    """``key``: the code, the numbers and the metadata of the tensors. ``tensors``: each tensor once."""

    key: tuple[Hashable, ...]
    tensors: list[Tensor]


def reached_by(function: Any) -> Reached | None:
    """The fingerprint of a function; None if it may depend on anything else."""
    found = _ReachedParts()
    return Reached(tuple(found.key), found.tensors) if type(function) is FunctionType and found.add(function) else None


class _ReachedParts:
    def __init__(self) -> None:
        self.key: list[Hashable] = []
        self.tensors: list[Tensor] = []
        self._functions: list[FunctionType] = []

    def add(self, x: Any) -> bool:
        """Add a value to the key; False if the key cannot cover it."""
        if type(x) in (Tensor, nn.Parameter, nn.Buffer):
            place = next((i for i, y in enumerate(self.tensors) if y is x), len(self.tensors))
            self.tensors += [x] * (place == len(self.tensors))
            self.key += [place, type(x).__name__, x.shape, x.stride(), x.dtype, x.device, x.requires_grad]
            return x.layout == torch.strided and not vars(x)
        if type(x) in _NUMBERS:
            self.key += [type(x).__name__, repr(x)]  # 0.0 and -0.0 are equal, and so are 1 and True
            return not (type(x) is float and math.isnan(x))
        if type(x) is tuple:
            self.key += ["tuple", len(x)]
            return all(map(self.add, x))
        if type(x) is FunctionType and not _is_of(x.__module__):
            return self._add_function(x)
        of_package = type(x) is ModuleType and _is_of(x.__name__)
        of_package |= isinstance(x, (FunctionType, BuiltinFunctionType, type)) and _is_of(x.__module__)
        of_package = of_package and not x.__name__.rpartition(".")[2].startswith(_STATES)
        self.key.append(x if of_package else None)
        return of_package

    def _add_function(self, function: FunctionType) -> bool:
        if function in self._functions:
            self.key.append(self._functions.index(function))
            return True
        self._functions.append(function)
        names = _names_in(function.__code__)
        if names is None or vars(function):
            return False
        self.key += [function.__code__, names]
        try:
            cells = [cell.cell_contents for cell in function.__closure__ or ()]
        except ValueError:  # a cell is still empty
            return False
        defaults = (*(function.__defaults__ or ()), *sorted((function.__kwdefaults__ or {}).items()))
        of_globals = function.__globals__
        known = [of_globals[name] for name in names if name in of_globals]
        others = {name for name in names if name not in of_globals}
        self.key += [len(cells), len(defaults), frozenset(others)]
        return others <= _BUILTINS and all(map(self.add, (*cells, *defaults, *known)))


def _is_of(module: str | None) -> bool:
    return (module or "").partition(".")[0] in _PACKAGES


@lru_cache(maxsize=256)
def _names_in(code: CodeType) -> tuple[str, ...] | None:
    """Names of the globals that a function and its inner functions read; None if it may depend on other state."""
    names = dict[str, None]()
    for x in dis.get_instructions(code):
        if x.opname.startswith(_OTHERS) or (x.opname == "STORE_DEREF" and x.argval in code.co_freevars):
            return None
        if x.opname in ("LOAD_ATTR", "LOAD_METHOD") and x.argval.startswith(_STATES):
            return None
        if x.opname == "LOAD_GLOBAL":
            names[x.argval] = None
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            of_inner = _names_in(inner)
            if of_inner is None:
                return None
            names |= dict.fromkeys(of_inner)
    return tuple(names)
