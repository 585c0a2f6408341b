"""The house: imports go down only, nothing global changes, the import is light, names are told."""

from __future__ import annotations

import ast
import functools
import importlib
import importlib.util
import inspect
import json
import subprocess
import sys
from collections.abc import Iterator
from contextvars import ContextVar
from pathlib import Path
from types import ModuleType
from typing import Any
from weakref import WeakKeyDictionary

import pytest
import torch

import cp_mesh

PACKAGE = Path(cp_mesh.__file__).parent

FLOORS: dict[str, int] = {
    # 0: pure Python and integers
    "errors": 0,
    "layouts": 0,
    "masks": 0,
    "balancing": 0,
    "segments": 0,
    "schedule": 0,
    # 1: know one thing each, not each other
    "kernels": 1,
    "transport": 1,
    "agreement": 1,
    # 2: the loops, on local tensors and a group
    "plan": 2,
    "ring": 2,
    "memory": 2,
    # 3: the doors
    "ops": 3,
    "attention": 3,
    "sequence": 3,
    # 4: what trainers touch
    "forwards": 4,
    "watching": 4,
    "styles": 4,
    "parallel": 4,
    "dense": 4,
    "verify": 4,
    "explain": 4,
    # the door of the command line
    "__main__": 5,
}
"""Floors of modules and of subpackages, whose modules may import one another."""

NEEDS_TRITON = {
    f"kernels.{name}"
    for name in ("combine_triton", "triton_tiles", "triton_visits", "triton_forward", "triton_backward")
}

STATE: dict[str, str] = {
    "agreement._enabled": "check mode; a context variable",
    "attention.FORMATS": "a table, never written",
    "transport.symmetric_memory._MEMORY": "what outlives a call, by group, weakly",
    "kernels.combine._triton_runs": "a cache of a fact about a device",
    "kernels.combine_triton._compiled": "a cache of what Triton compiled, by what for",
    "kernels.aten._philox": "a cache of constants",
    "kernels.flash_attn._module": "a cache of which packages can be imported",
    "kernels.flash_attn._FA4_CALLS": "a table, never written",
    "kernels.flash_attn._FA2_CALLS": "a table, never written",
    "kernels.KERNELS": "the table of kernels, never written",
    "layouts._OWN": "a constant",
    "layouts.check_layout": "a cache of a pure function",
    "layouts.LAYOUTS": "the table of layouts, to which users add their own",
    "ops._FUNCTIONS": "a table, never written",
    "ops._library": "keeps the ops registered",
    "sequence.ROOT": "the root whose forward runs; a context variable",
    "forwards._subclass": "a cache of classes made for modules that have a style",
    "watching._DIMS": "a table, never written",
    "watching.ROWS": "a table, never written",
    "plan._resolve_once": "a cache of a pure function",
    "plan._resolve_contents": "a cache of a pure function, by the content of tensors",
    "schedule._cached_schedule": "a cache of a pure function",
    "transport.packing._packing": "a cache of a pure function",
    "sequence.PADDING": "a table, never written",
}
"""What module-level names may hold that could change."""


def module_files() -> dict[str, Path]:
    """Dotted names below the package, without `__init__` of the package itself."""
    files = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = path.relative_to(PACKAGE).with_suffix("").parts
        files[".".join(part for part in parts if part != "__init__")] = path
    del files[""]
    return files


FILES = module_files()


def room(module: str) -> str:
    """The module, or the subpackage that it belongs to."""
    return module.split(".")[0]


def imported(path: Path) -> set[str]:
    """Modules of the package that a file imports, anywhere in it."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path.name}: a relative import"
            names |= {node.module or ""} | {f"{node.module}.{alias.name}" for alias in node.names}
    return {name.removeprefix("cp_mesh.") for name in names} & set(FILES)


def test_every_module_has_a_floor() -> None:
    assert {room(module) for module in FILES} == set(FLOORS)


@pytest.mark.parametrize("module", FILES)
def test_imports_go_down_only(module: str) -> None:
    own = room(module)
    for name in imported(FILES[module]):
        other = room(name)
        if other == own:
            continue
        assert FLOORS[other] <= FLOORS[own], f"{module} imports {name} of a higher floor"
        if FLOORS[own] == 1:
            assert FLOORS[other] == 0, f"{module} imports {name}: rooms of floor 1 do not know each other"
    source = FILES[module].read_text()
    assert "import cp_mesh\n" not in source and "from cp_mesh import" not in source, "import from the module itself"


def test_no_circles() -> None:
    graph = {module: imported(path) - {module} for module, path in FILES.items()}
    while leaves := [module for module, names in graph.items() if not names & set(graph)]:
        graph = {module: names for module, names in graph.items() if module not in leaves}
    assert not graph, f"these import one another: {graph}"


def test_the_reference_stands_alone() -> None:
    """It is the specification: a kernel that imported it would share its errors."""
    users = {module for module in FILES if "kernels.reference" in imported(FILES[module])}
    assert users == {"kernels"}  # the table of kernels


def modules() -> Iterator[tuple[str, ModuleType]]:
    for name in FILES:
        if name in NEEDS_TRITON and importlib.util.find_spec("triton") is None:
            continue
        yield name, importlib.import_module(f"cp_mesh.{name}")


def test_no_state_but_what_is_listed() -> None:
    containers = (list, dict, set, bytearray, WeakKeyDictionary)
    kinds = (*containers, ContextVar, torch.Tensor, torch.library.Library, functools._lru_cache_wrapper)
    holders: dict[int, list[str]] = {}  # of each changeable object, the modules that name it
    for name, module in modules():
        for key, value in vars(module).items():
            if isinstance(value, kinds) and not key.startswith("__"):
                holders.setdefault(id(value), []).append(f"{name}.{key}")
    for names in holders.values():
        # An importer names the same object; the definition is in a room below.
        assert len([name for name in names if name in STATE]) == 1, names


@pytest.mark.parametrize("module", FILES)
def test_nothing_is_patched_and_nothing_global_is_written(module: str) -> None:
    tree = ast.parse(FILES[module].read_text())
    foreign = {
        (alias.asname or alias.name).split(".")[0]
        for node in ast.walk(tree)
        if isinstance(node, (ast.Import, ast.ImportFrom))
        for alias in node.names
    }
    for node in ast.walk(tree):
        assert not isinstance(node, ast.Global), f"line {node.lineno}: global"
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        for target in targets:
            while isinstance(target, (ast.Attribute, ast.Subscript)):
                target = target.value
                if isinstance(target, ast.Name):
                    assert target.id not in foreign, f"line {node.lineno}: writes into {target.id}"
                    assert f"{module}.{target.id}" not in STATE, f"line {node.lineno}: writes into {target.id}"


COLD_IMPORT = """
import json, sys
for name in ("triton", "flash_attn", "flash_attn_interface", "flash_attn_3"):
    sys.modules[name] = None  # an import of it raises
import torch.distributed.tensor
import torch.distributed.tensor.experimental, torch.distributed.tensor.parallel
before = set(sys.modules)
import cp_mesh
print(json.dumps({
    "initialised": torch.distributed.is_initialized() or torch.cuda.is_initialized(),
    "packages": sorted({name.partition(".")[0] for name in set(sys.modules) - before} - sys.stdlib_module_names),
    "heavy": [name for name in ("torch._dynamo", "torch._inductor") if name in sys.modules],
}))
"""


def cold_import() -> dict[str, Any]:
    command = [sys.executable, "-c", COLD_IMPORT]
    result = subprocess.run(command, capture_output=True, text=True, timeout=120, cwd=PACKAGE.parent, check=False)
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout.splitlines()[-1])


def test_cold_import() -> None:
    """Without the optional packages, and light: DTensor's own import is what it costs, and einops."""
    found = cold_import()
    assert not found["initialised"] and not found["heavy"]
    assert set(found["packages"]) <= {"cp_mesh", "torch", "einops", "_remote_module_non_scriptable"}, found["packages"]


def test_the_face() -> None:
    assert cp_mesh.__all__ == sorted(cp_mesh.__all__)
    public = {name for name, value in vars(cp_mesh).items() if name[0] != "_" and not inspect.ismodule(value)}
    assert public == set(cp_mesh.__all__)
    assert all(getattr(cp_mesh, name) is not None for name in cp_mesh.__all__)


def parameters(value: Any) -> list[str]:
    if inspect.isclass(value) and issubclass(value, Exception):
        return []
    return [name for name in inspect.signature(value).parameters if name not in ("self", "cls", "args", "kwargs")]


def public_callables() -> dict[str, Any]:
    """Public functions, classes and their public methods."""
    found = {}
    for name in cp_mesh.__all__:
        value = getattr(cp_mesh, name)
        found[name] = value
        if inspect.isclass(value):
            for key, member in vars(value).items():
                member = getattr(member, "__func__", member)
                if inspect.isfunction(member) and key[0] != "_":
                    found[f"{name}.{key}"] = member
    return found


INHERITED_DOCS = {"runs", "spec", "multiple"}
"""Methods of layouts, explained once, in `Layout`."""


@pytest.mark.parametrize("name", public_callables())
def test_public_names_are_explained(name: str) -> None:
    value = public_callables()[name]
    if name.split(".")[-1] in INHERITED_DOCS:
        return
    text = value.__doc__ or ""
    assert text.strip(), "no docstring"
    assert text.strip().split("\n")[0].strip()[0].isupper() or text.startswith(("`", "local", "int64"))
    unexplained = [parameter for parameter in parameters(value) if parameter not in text]
    assert not unexplained, f"no word on {unexplained}"


RAISING = [
    "Balanced",
    "ContextParallel",
    "Mask",
    "Permuted",
    "ShardedModel",
    "ShardedSequence",
    "ShardedSequence.shard",
    "attention",
    "balance",
    "cross_entropy",
    "parallelize",
    "sum_gradients",
    "verify",
]


@pytest.mark.parametrize("name", RAISING)
def test_errors_are_announced(name: str) -> None:
    text = public_callables()[name].__doc__
    assert "Raises:" in text and "Error:" in text
    if len(parameters(public_callables()[name])) > 1:
        assert "Args:" in text
