"""What a function of users can depend on: the tensors, numbers and code that it reaches, where these are all there is.

A function that reaches what one reached before does what that did, so it need not be traced again. Where something else
is reached, such as a module's attributes, a list or what another package says, nothing is known.
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

_PACKAGES = ("torch", "math", "operator")  # whose modules and functions are what they are
_BUILTINS = frozenset(
    ("abs", "bool", "float", "int", "isinstance", "len", "max", "min", "pow", "range", "round", "sum")
)
_NUMBERS = (bool, int, float, str, type(None), torch.dtype, torch.device)
_OTHERS = ("STORE_GLOBAL", "STORE_ATTR", "STORE_SUBSCR", "STORE_NAME", "DELETE_", "IMPORT_", "LOAD_NAME", "LOAD_BUILD",
           "LOAD_FROM", "LOAD_LOCALS", "YIELD", "SEND")  # fmt: skip
"""Instructions that write where others read, or read what is not looked at here."""
_STATES = ("is_", "are_", "get_", "_", "backends", "cuda", "distributed", "random", "initial_seed", "current_", "grad")
"""Beginnings of attributes that tell what is so now: of torch, and of tensors."""


class Reached(NamedTuple):
    """``key`` is equal where code, numbers, and shapes and the like of tensors are; each of these is listed once."""

    key: tuple[Hashable, ...]
    tensors: list[Tensor]


def reached_by(function: Any) -> Reached | None:
    """None if the function may depend on something else."""
    found = _Found()
    return Reached(tuple(found.key), found.tensors) if type(function) is FunctionType and found.add(function) else None


class _Found:
    def __init__(self) -> None:
        self.key: list[Hashable] = []
        self.tensors: list[Tensor] = []
        self._functions: list[FunctionType] = []

    def add(self, x: Any) -> bool:
        """Whether what it is was written down."""
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
        except ValueError:  # nothing is in it yet
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
    """Of what is global in a function and those within it; None if it may depend on more than is looked at here."""
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
