"""Old names of modules renamed since 0.1: they can be imported for one more release, with a warning."""

from __future__ import annotations

import sys
from collections.abc import Callable
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType
from typing import Any

from cp_mesh.errors import warn

ALIASES = {
    "agreement": "comm.agreement",
    "balancing": "geometry.balance",
    "batch_masks": "geometry.batch_mask",
    "block_masks": "flex.block_mask",
    "boundaries": "training.boundaries",
    "cache": "inference.cache",
    "clipping": "training.clip_grad",
    "cores": "training.context_parallel",
    "decoding": "inference.decode",
    "layouts": "geometry.layouts",
    "listed": "geometry.tensor_layouts",
    "loss": "training.loss",
    "masks": "geometry.mask",
    "parallel": "training.parallelize",
    "positions": "geometry.layout",
    "root": "training.sharded_model",
    "tp_plan": "tensor_parallel.plan",
    "transport": "comm.exchange",
    "warming": "tools.warm_up",
}
"""New module name by old name, both below `cp_mesh`, for the modules that the docs of 0.1 named."""


def find(old: str) -> ModuleType:
    """Import the module that had this name, with a warning."""
    new = f"cp_mesh.{ALIASES[old]}"
    text = f"cp_mesh.{old} is now {new}: import that; the next release removes the old name"
    warn(text, FutureWarning)
    return import_module(new)


def moved_from(package: str, module: str) -> Callable[[str], Any]:
    """``__getattr__`` of a package that was a module in 0.1: looks names up in the file ``module``, with a warning."""

    def get(name: str) -> Any:
        is_file = name.startswith("_") or find_spec(f"{package}.{name}") is not None
        if is_file or not hasattr(found := import_module(f"{package}.{module}"), name):
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        text = f"{package}.{name} is now {package}.{module}.{name}; the next release removes the old name"
        warn(text, FutureWarning)
        return getattr(found, name)

    return get


class _Finder(MetaPathFinder, Loader):
    def find_spec(self, fullname: str, path: Any, target: Any = None) -> ModuleSpec | None:
        package, _, name = fullname.partition(".")
        return ModuleSpec(fullname, self) if package == "cp_mesh" and name in ALIASES else None

    def create_module(self, spec: ModuleSpec) -> None:
        return None

    def exec_module(self, module: ModuleType) -> None:
        sys.modules[module.__name__] = find(module.__name__.partition(".")[2])  # `import` returns this module


def register() -> None:
    sys.meta_path.insert(0, _Finder())  # before finders of editable installs, which may find modules of an older tree
