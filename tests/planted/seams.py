"""Planting bugs: a seam is a name of the package, a planted bug is a function that makes another thing for that name.

A seam is a function, a class, a method or another attribute, written ``module:name`` or ``module:Class.method``. It is
bound anew in the process that runs, and so is whatever else holds the thing: names of other modules, of the package and
of the tests, attributes, entries of tables, defaults, what functions close over. Undoing binds all of it back, in
modules that were imported meanwhile too, and what was kept of earlier calls is forgotten both times. What C++ holds,
such as the function of an op that is registered, stays as it was: then what that function calls is the seam.

Planted bugs read arguments, results and documented attributes, not source lines, so that they survive a refactoring of
what is inside of a function. Where a seam is gone, or an argument of it, `SeamLost` says so.
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections import OrderedDict, deque
from collections.abc import Callable
from contextlib import suppress
from copy import copy
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from pathlib import Path
from types import BuiltinFunctionType, FunctionType, ModuleType
from typing import Any

import torch
from inside import path_of
from torch.distributed.tensor.debug import _clear_sharding_prop_cache

PACKAGE = "cp_mesh"
MUTATIONS: dict[str, Mutation] = {}
"""By name."""


class SeamLost(Exception):
    """A seam does not exist any more, or has no such argument."""


@dataclass(frozen=True)
class Mutation:
    """A planted bug.

    Attributes:
        name: what is wrong, in words.
        area: what of the library it breaks.
        seam: where it is planted.
        checks: each of them must find it.
        make: returns what takes the place of the thing that it is given; without side effects.
        new_ranks: why it cannot be planted on ranks that ran the package without it, if it cannot.
    """

    name: str
    area: str
    seam: str
    checks: tuple[str, ...]
    make: Callable[[Any], Any]
    new_ranks: str = ""

    @property
    def module(self) -> str:
        return path_of(self.seam.partition(":")[0])

    def find(self) -> tuple[Any, str, Any]:
        """The module or class that holds the seam, the attribute, and what is there.

        Raises:
            SeamLost: if there is nothing.
        """
        names = self.seam.partition(":")[2].split(".")
        try:
            room_path = self.module
            found: list[Any] = [import_module(room_path)]
            for name in names:
                found.append(vars(found[-1])[name])
            is_defined = inspect.isfunction(found[1]) or inspect.isclass(found[1])
            home = found[1].__module__ if is_defined else room_path
            if home != room_path and home.startswith(f"{PACKAGE}."):
                raise KeyError(f"{names[0]} is imported from {home}")
        except (ImportError, KeyError) as error:
            homes = ", ".join(_homes(names[0])) or "no module"
            raise SeamLost(
                f"{self.name!r} is planted at {self.seam}, which does not exist any more ({error}; {names[0]} is in"
                f" {homes}): plant it at another name, in {self.make.__module__}"
            ) from error
        return found[-2], names[-1], found[-1]

    def plant(self) -> Callable[[], None]:
        """Bind the name anew, in this process, and return what undoes that."""
        owner, name, original = self.find()
        mutant = self.made()
        bind(owner, name, original, mutant)
        return lambda: bind(owner, name, mutant, original)

    def made(self) -> Any:
        """What takes the place of what is there; of a classmethod, staticmethod or property, of its function."""
        original = self.find()[2]
        try:
            if isinstance(original, classmethod | staticmethod):
                return type(original)(self.make(original.__func__))
            return property(self.make(original.fget)) if isinstance(original, property) else self.make(original)
        except SeamLost as error:
            raise SeamLost(f"{self.name!r}, in {self.make.__module__}: {error}") from None


def _homes(name: str) -> list[str]:
    """The modules that define a name, of those that were imported."""
    modules = [module for key, module in sys.modules.items() if key.startswith(f"{PACKAGE}.")]
    return [x.__name__ for x in modules if getattr(vars(x).get(name), "__module__", None) == x.__name__]


def in_area(area: str) -> Callable[..., Callable[[Callable[[Any], Any]], Callable[[Any], Any]]]:
    """The decorator of planted bugs of an area: ``@plant(name, seam, *checks)`` on their `Mutation.make`."""

    def plant(
        name: str, seam: str, *checks: str, new_ranks: str = ""
    ) -> Callable[[Callable[[Any], Any]], Callable[[Any], Any]]:
        def register(make: Callable[[Any], Any]) -> Callable[[Any], Any]:
            assert name not in MUTATIONS and checks, name
            MUTATIONS[name] = Mutation(name, area, seam, checks, make, new_ranks)
            return make

        return register

    return plant


def bind(owner: Any, name: str, old: Any, new: Any) -> None:
    """Make the one the other: an attribute of a class, or whatever a module reaches that is the old one.

    Numbers and the like are alike in many places by chance: of these, names of modules.
    """
    if isinstance(owner, type):
        setattr(owner, name, new)
    elif isinstance(old, int | float | frozenset):
        for module in modules():
            if vars(module).get(name) is old:
                setattr(module, name, new)
    else:
        _Binding(old, new).everywhere()
    assert vars(owner)[name] is new, f"{owner.__name__}.{name} is not bound"


class _Binding:
    """Goes through what modules reach, of the package and of the tests, and binds one thing to another."""

    def __init__(self, old: Any, new: Any) -> None:
        self._old, self._new, self._seen = old, new, {id(new)}
        self._modules = {module.__name__: module for module in modules()}

    def everywhere(self) -> None:
        for module in self._modules.values():
            self._each([item for item in vars(module).items() if item[0][:2] != "__"], vars(module).__setitem__)

    def _each(self, items: Any, put: Callable[[Any, Any], None]) -> None:
        for key, value in list(items):
            if (bound := self._bound(value)) is not value:
                put(key, bound)

    def _bound(self, x: Any) -> Any:
        """What takes the place of this; what is within it is bound where it lies, or in a new tuple."""
        if x is self._old:
            return self._new
        kind = type(x)
        if kind in _PLAIN or id(x) in self._seen:
            return x
        self._seen.add(id(x))
        if isinstance(x, tuple):
            made = [self._bound(value) for value in x]
            if any(one is not other for one, other in zip(made, x, strict=True)):
                return kind(made) if kind is tuple else kind(*made)
        elif isinstance(x, dict):
            self._each(x.items(), x.__setitem__)
        elif isinstance(x, list):
            self._each(enumerate(x), x.__setitem__)
        elif isinstance(x, staticmethod | classmethod | property):
            self._bound(x.fget if isinstance(x, property) else x.__func__)
        elif isinstance(x, FunctionType):
            if x.__module__ in self._modules:
                x.__defaults__ = self._bound(x.__defaults__)
                self._bound(x.__kwdefaults__)
                for cell in x.__closure__ or ():
                    with suppress(ValueError):  # that is empty
                        self._each([("cell_contents", cell.cell_contents)], partial(setattr, cell))
        elif isinstance(x, type):
            if x.__module__ in self._modules:
                self._each(vars(x).items(), partial(setattr, x))
        elif kind.__module__ in self._modules and hasattr(x, "__dict__"):
            self._each(vars(x).items(), partial(object.__setattr__, x))
        return x


_TESTS = {file.stem for file in Path(__file__).parent.parent.glob("*.py")} - {"interpreted"}
_VARIABLES = {dict, list, set, deque, OrderedDict}
_PLAIN = {str, int, float, bool, type(None), ModuleType, BuiltinFunctionType, torch.Tensor}


def forget() -> None:
    """What was kept of calls: in caches of the package and of the tests, and in variables of the package's modules."""
    for module in modules():
        for name, x in vars(module).items():
            is_variable = (type(x) in _VARIABLES and name.islower()) or type(x).__name__.startswith("Weak")
            if type(x) is functools._lru_cache_wrapper:
                x.cache_clear()
            elif is_variable and name[:2] != "__" and module.__name__.startswith(PACKAGE):
                x.clear()
    _clear_sharding_prop_cache()


def modules() -> list[ModuleType]:
    """Those of the package and of the tests that were imported; not what plants, and what is done once a process."""
    modules = list(sys.modules.items())
    return [module for name, module in modules if name in _TESTS or name.partition(".")[0] == PACKAGE]


# What planted bugs are made of.


def with_result(original: Any, change: Callable[[Any], Any]) -> Any:
    """The function, with a result that is changed."""

    @functools.wraps(original)
    def mutant(*args: Any, **kwargs: Any) -> Any:
        return change(original(*args, **kwargs))

    return mutant


def with_arguments(original: Any, **changes: Callable[[Any], Any]) -> Any:
    """The function, with arguments that are changed, each by a function of its value."""
    signature = _signature(original, changes)

    @functools.wraps(original)
    def mutant(*args: Any, **kwargs: Any) -> Any:
        given = signature.bind(*args, **kwargs)
        given.apply_defaults()
        for name, change in changes.items():
            given.arguments[name] = change(given.arguments[name])
        return original(*given.args, **given.kwargs)

    return mutant


def changed(original: Any, **attributes: Any) -> Any:
    """A copy of an object, with other attributes."""
    found = copy(original)
    vars(found).update(attributes)
    return found


def with_call(original: Any, change: Callable[..., dict[str, Any]]) -> Any:
    """The function, with arguments of which some are changed: by a function that takes some of them, by name."""
    wanted = list(inspect.signature(change).parameters)
    signature = _signature(original, wanted)

    @functools.wraps(original)
    def mutant(*args: Any, **kwargs: Any) -> Any:
        given = signature.bind(*args, **kwargs)
        given.apply_defaults()
        given.arguments.update(change(**{name: given.arguments[name] for name in wanted}))
        return original(*given.args, **given.kwargs)

    return mutant


def _signature(function: Any, needed: Any) -> inspect.Signature:
    signature = inspect.signature(function)
    if missing := set(needed) - set(signature.parameters):
        name = f"{function.__module__}.{function.__qualname__}"
        raise SeamLost(f"{name} has no argument {', '.join(sorted(missing))} any more, but {signature}")
    return signature


class Namespace:
    """A module or the like, of which some names are others."""

    def __init__(self, original: ModuleType | Any, **others: Any) -> None:
        self._original = original
        vars(self).update(others)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._original, name)
