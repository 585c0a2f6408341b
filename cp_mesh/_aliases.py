"""Modules that had another name before 0.2: they can still be imported by it for one release, with a warning."""

from __future__ import annotations

import sys
import warnings
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

ALIASES = {
    "compat": "integrations.torch_api",
    "costs": "predict.time",
    "decoding": "inference.decode",
    "layouts": "geometry.layouts",
    "transport": "comm.exchange",
}
"""New names by old ones, below `cp_mesh`."""


class _Finder(MetaPathFinder, Loader):
    def find_spec(self, fullname: str, path: Any, target: Any = None) -> ModuleSpec | None:
        package, _, name = fullname.partition(".")
        return ModuleSpec(fullname, self) if package == "cp_mesh" and name in ALIASES else None

    def create_module(self, spec: ModuleSpec) -> None:
        return None

    def exec_module(self, module: ModuleType) -> None:
        new = f"cp_mesh.{ALIASES[module.__name__.partition('.')[2]]}"
        warnings.warn(f"{module.__name__} is {new} since 0.2: import that", FutureWarning, stacklevel=2)
        sys.modules[module.__name__] = import_module(new)  # what import then returns


def register() -> None:
    sys.meta_path.insert(0, _Finder())
