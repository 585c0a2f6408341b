"""Planting bugs: a seam is a name of the package, a planted bug is a function that makes another thing for that name.

A seam is a function, a class, a method or another attribute, written ``module:name`` or ``module:Class.method``. The
module file of a *copy* of the package gets two more lines at its end, which bind the name anew; whoever imports it from
there later has the bug. What the module itself kept of the old thing while it was executed (a decorator's argument, an
entry of a table) stays as it was: then that name is the seam.

Planted bugs read arguments, results and documented attributes, not source lines, so that they survive a refactoring of
what is inside of a function. Where a seam is gone, or an argument of it, `SeamLost` says so.
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

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
    """

    name: str
    area: str
    seam: str
    checks: tuple[str, ...]
    make: Callable[[Any], Any]

    @property
    def module(self) -> str:
        return f"{PACKAGE}.{self.seam.partition(':')[0]}"

    def find(self) -> tuple[Any, str, Any]:
        """The module or class that holds the seam, the attribute, and what is there.

        Raises:
            SeamLost: if there is nothing.
        """
        names = self.seam.partition(":")[2].split(".")
        try:
            found: list[Any] = [import_module(self.module)]
            for name in names:
                found.append(vars(found[-1])[name])
            is_defined = inspect.isfunction(found[1]) or inspect.isclass(found[1])
            home = found[1].__module__ if is_defined else self.module
            if home != self.module and home.startswith(f"{PACKAGE}."):
                raise KeyError(f"{names[0]} is imported from {home}")
        except (ImportError, KeyError) as error:
            homes = ", ".join(_homes(names[0])) or "no module"
            raise SeamLost(
                f"{self.name!r} is planted at {self.seam}, which does not exist any more ({error}; {names[0]} is in"
                f" {homes}): plant it at another name, in {self.make.__module__}"
            ) from error
        return found[-2], names[-1], found[-1]

    def plant(self) -> None:
        """Bind the name anew, in this process."""
        owner, name, _ = self.find()
        setattr(owner, name, self.made())

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

    def plant(name: str, seam: str, *checks: str) -> Callable[[Callable[[Any], Any]], Callable[[Any], Any]]:
        def register(make: Callable[[Any], Any]) -> Callable[[Any], Any]:
            assert name not in MUTATIONS and checks, name
            MUTATIONS[name] = Mutation(name, area, seam, checks, make)
            return make

        return register

    return plant


def infect(copy: Path, mutation: Mutation) -> None:
    """Plant a bug in a copy of the package: in processes that import it from now on."""
    parts = mutation.module.split(".")[1:]
    file = copy.joinpath(*parts).with_suffix(".py") if parts else copy / "__init__.py"
    if not file.exists():
        file = copy.joinpath(*parts, "__init__.py")
    with file.open("a") as text:
        text.write(f"\nfrom planted import MUTATIONS\n\nMUTATIONS[{mutation.name!r}].plant()\n")


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
