"""Names whose modules are loaded at first use.

Public names of a package are said once: its stub `__init__.pyi` imports each from its home, which `lazy` loads.
"""

import importlib
import re
import sys
from collections import UserDict
from collections.abc import Callable
from pathlib import Path
from typing import Any


def homes(package: str) -> dict[str, str]:
    """The module that each public name is imported from; of a package's own packages, itself."""
    stub = Path(__file__).parent.joinpath(*package.split(".")[1:], "__init__.pyi")
    lines = re.findall(r"^from ([\w.]+) import (.+)$", stub.read_text() if stub.exists() else "", re.MULTILINE)
    return {name: module for module, names in lines for name in re.findall(r" as (\w+)", names)}


def lazy(package: str) -> tuple[Callable[[str], Any], Callable[[], list[str]], list[str]]:
    """``__getattr__``, ``__dir__``, ``__all__``. A name that only a room has raises an error that says where it is."""
    own = homes(package)
    public = sorted(name for name, home in own.items() if home != package)

    def get(name: str) -> Any:
        if name not in own:
            rooms = (f"{package}.{room}" for room, home in own.items() if home == package)
            at = next((f": import it from {room}" for room in rooms if name in homes(room)), "")
            raise AttributeError(f"module {package!r} has no attribute {name!r}{at}")
        is_room = own[name] == package
        try:
            module = importlib.import_module(f"{package}.{name}" if is_room else own[name])
        except AttributeError as error:  # would read as "cp_mesh has no such name"
            raise ImportError(f"{own[name]} cannot be loaded: {error}") from error
        return vars(sys.modules[package]).setdefault(name, module if is_room else getattr(module, name))

    return get, lambda: sorted({*vars(sys.modules[package]), *public}), public


class Loaded(UserDict[str, Any]):
    """Objects by name. A value "module:name" is loaded when it is first read."""

    def __getitem__(self, key: str) -> Any:
        if isinstance(found := self.data[key], str):
            module, _, name = found.partition(":")
            self.data[key] = found = getattr(importlib.import_module(f"cp_mesh.{module}"), name)
        return found
