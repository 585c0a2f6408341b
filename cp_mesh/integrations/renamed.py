"""Copies of functions of other packages with other globals; the modules themselves are not changed."""

from __future__ import annotations

from types import FunctionType
from typing import Any, TypeGuard


def asks_for(function: Any, *names: str) -> TypeGuard[FunctionType]:
    """Whether ``function`` is a plain Python function that reads these names."""
    return isinstance(function, FunctionType) and {*names} <= {*function.__code__.co_names}


def with_names(function: FunctionType, names: dict[str, Any]) -> FunctionType:
    """Return a copy of the function with these globals replaced."""
    found = FunctionType(
        function.__code__, function.__globals__ | names, function.__name__, function.__defaults__, function.__closure__
    )
    found.__kwdefaults__ = function.__kwdefaults__
    return found
