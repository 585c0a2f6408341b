"""Planting bugs: a seam is a name of the package, a planted bug is a function that makes another thing for that name.

A seam is a function, a class, a method or another attribute, written ``module:name`` or ``module:Class.method``. Ranks
are forked anew for each bug; there the name is bound to the other thing before anything runs, and so is whatever else
holds what was there: names of other modules, entries of tables, attributes, defaults, what functions close over. What
C++ holds, such as the function of an op that is registered, stays as it was: then what that function calls is the seam.

Planted bugs read arguments, results and documented attributes, not source lines, so that they survive a refactoring of
what is inside of a function. Where a seam is gone, or an argument of it, `SeamLost` says so.
"""

from __future__ import annotations

import functools
import gc
import inspect
import pickle
from collections.abc import Callable
from copy import copy
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from types import CellType, FunctionType, ModuleType
from typing import Any

from inside import path_of
from ranks import Pool, Pools

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

    def find(self) -> tuple[Any, str, Any]:
        """The module or class that holds the seam, the attribute, and what is there."""
        room, _, path = self.seam.partition(":")
        *names, last = path.split(".")
        try:
            owner = import_module(path_of(room))
            for name in names:
                owner = vars(owner)[name]
            return owner, last, vars(owner)[last]
        except (ImportError, KeyError) as error:
            raise SeamLost(
                f"{self.name!r} is planted at {self.seam}, which does not exist any more ({error}): plant it at another"
                f" name, in {self.make.__module__}"
            ) from error

    def made(self) -> Any:
        """What takes the place of what is there; of a classmethod, staticmethod or property, of its function."""
        original = self.find()[2]
        if isinstance(original, classmethod | staticmethod):
            return type(original)(self.make(original.__func__))
        return property(self.make(original.fget)) if isinstance(original, property) else self.make(original)

    def plant(self) -> None:
        """In this process, for good."""
        owner, name, original = self.find()
        home = getattr(original, "__module__", None) or type(original).__module__
        if isinstance(owner, type) or not home.startswith("cp_mesh"):
            setattr(owner, name, self.made())
        else:
            gc.unfreeze()
            holders = gc.get_referrers(original)  # but not the bug itself
            bind(holders, original, self.made())
        assert vars(owner)[name] is not original, self.seam


def bind(holders: list[Any], old: Any, new: Any) -> None:
    """Make the one the other wherever these hold it; what is in a tuple, in a new tuple."""
    for x in holders:
        if type(x) is tuple or (isinstance(x, tuple) and hasattr(x, "_fields")):
            made = [new if value is old else value for value in x]
            bind(gc.get_referrers(x), x, tuple(made) if type(x) is tuple else type(x)(*made))
        elif isinstance(x, dict):
            x.update({key: new for key, value in x.items() if value is old})
        elif isinstance(x, list) and x is not holders:
            x[:] = [new if value is old else value for value in x]
        elif isinstance(x, CellType):
            x.cell_contents = new
        elif isinstance(x, FunctionType) and x.__defaults__ is old:
            x.__defaults__ = new
        elif hasattr(x, "__dict__") and not isinstance(x, type | FunctionType | ModuleType):
            for key in [key for key, value in vars(x).items() if value is old]:
                object.__setattr__(x, key, new)


def in_area(area: str) -> Callable[..., Callable[[Callable[[Any], Any]], Callable[[Any], Any]]]:
    """The decorator of planted bugs of an area: ``@plant(name, seam, *checks)`` on their `Mutation.make`."""

    def plant(name: str, seam: str, *checks: str) -> Callable[[Callable[[Any], Any]], Callable[[Any], Any]]:
        def register(make: Callable[[Any], Any]) -> Callable[[Any], Any]:
            assert name not in MUTATIONS and checks, name
            MUTATIONS[name] = Mutation(name, area, seam, checks, make)
            return make

        return register

    return plant


class InfectedPool(Pool):
    """Ranks on which a bug is planted, or none, before anything runs."""

    def __init__(self, name: str | None, world_size: int, *backend: str) -> None:
        super().__init__(world_size, *backend, group_timeout=5.0)  # which gives up on a lost collective soon
        self.name, self.is_planted = name, False

    def _start(self) -> None:
        super()._start()
        if self.name is not None:
            for conn in self.conns:
                conn.send_bytes(pickle.dumps((plant_on_rank, (self.name,), False)))
            self._collect("planting", 60.0)
        self.is_planted = True


def infected_pools(name: str | None) -> Pools:
    return Pools(partial(InfectedPool, name))


def plant_on_rank(rank: int, name: str) -> None:
    MUTATIONS[name].plant()


# What planted bugs are made of.


def with_result(original: Any, change: Callable[[Any], Any]) -> Any:
    """The function, with a result that is changed."""

    @functools.wraps(original)
    def mutant(*args: Any, **kwargs: Any) -> Any:
        return change(original(*args, **kwargs))

    return mutant


def with_arguments(original: Any, **changes: Callable[[Any], Any]) -> Any:
    """The function, with arguments that are changed, each by a function of its value."""
    signature = inspect.signature(original)
    if missing := set(changes) - set(signature.parameters):
        raise SeamLost(f"{original.__module__}.{original.__qualname__} has no argument {', '.join(sorted(missing))}")

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


class Namespace:
    """A module or the like, of which some names are others."""

    def __init__(self, original: ModuleType | Any, **others: Any) -> None:
        self._original = original
        vars(self).update(others)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._original, name)
