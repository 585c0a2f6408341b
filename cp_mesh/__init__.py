"""Exact context-parallel attention on DTensor and DeviceMesh.

The import registers every op, because saved graphs refer to ops by name. Public names are in `__init__.pyi`, here and
in the rooms; they are loaded on first access, plans, methods and kernels by the first call. docs/design.md, "Rooms and
floors", lists the folders.
"""

import importlib

from cp_mesh._names import lazy as _lazy

__version__ = "0.3.0"
__getattr__, __dir__, __all__ = _lazy(__name__)

_OPS = (
    "call.op",
    "latent.ops",
    "tensor_parallel.colwise",
    "tensor_parallel.rowwise",
    "tensor_parallel.losses_in_chunks",
    "training.compare_inputs",
)
"""Modules that register ops."""

for _file in _OPS:
    importlib.import_module(f"cp_mesh.{_file}")
del _file
