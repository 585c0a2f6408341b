"""The house: imports go down only, the import is light, the public names are those listed."""

from __future__ import annotations

import ast
import inspect
import json
import re
import subprocess
import sys
import tomllib
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import inside
import pytest
from inside import NAMES, homes
from test_pins import PACKAGES, SUBMODULES

import cp_mesh

CHECKOUT = Path(__file__).parent.parent

PACKAGE = Path(cp_mesh.__file__).parent

FLOORS: dict[str, int] = {
    "errors": 0,
    "_names": 0,
    "_torch": 0,
    "geometry": 1,
    "kernels": 2,
    "comm": 2,
    "sequence": 3,
    "wrap": 3,
    "call": 4,
    "flex": 5,
    "inference": 5,
    "latent": 5,
    "mixers": 5,
    "tensor_parallel": 5,
    "training": 6,
    "tools": 7,
    "integrations": 7,
    "__main__": 8,
}
"""Floors of rooms: folders and files at the top. Files of one folder may import one another."""


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


@pytest.mark.parametrize("folder", ("cp_mesh", "tests", "examples", "docs"))
def test_every_import_is_of_a_module(folder: str) -> None:
    """Another checkout that is installed too would hide that one is gone."""
    known = {"cp_mesh", *(f"cp_mesh.{name}" for name in FILES)}
    for path in (CHECKOUT / folder).rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            names = [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            names += [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if names == ["cp_mesh"] and isinstance(node, ast.ImportFrom):
                here = (hasattr(cp_mesh, x.name) or f"cp_mesh.{x.name}" in known for x in node.names)
                assert all(here), path
            unknown = [name for name in names if name.partition(".")[0] == "cp_mesh" and name not in known]
            assert not unknown, f"{path} imports {unknown}"


def test_every_module_has_a_floor() -> None:
    assert {room(module) for module in FILES} == set(FLOORS)


@pytest.mark.parametrize("module", FILES)
def test_imports_go_down_only(module: str) -> None:
    own = room(module)
    for name in imported(FILES[module]):
        other = room(name)
        if other == own:
            continue
        assert FLOORS[other] < FLOORS[own], f"{module} imports {name}, which is not of a lower floor"
    source = FILES[module].read_text()
    assert "import cp_mesh\n" not in source and "from cp_mesh import" not in source, "import from the module itself"


def test_no_circles() -> None:
    graph = {module: imported(path) - {module} for module, path in FILES.items()}
    while leaves := [module for module, names in graph.items() if not names & set(graph)]:
        graph = {module: names for module, names in graph.items() if module not in leaves}
    assert not graph, f"these import one another: {graph}"


def test_the_reference_stands_alone() -> None:
    """It is the specification: a kernel that imported it would share its errors."""
    assert not [module for module in FILES if "kernels.reference" in imported(FILES[module])]


def inner_names(path: Path) -> set[str]:
    """What a test reads of the inside by itself: all but public names, and those of modules that the documents name."""
    documented = {f"cp_mesh.{module}.{name}" for module, names in SUBMODULES.items() for name in names}
    documented |= {f"{package.__name__}.{name}" for package in PACKAGES.values() for name in package.__all__}
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names if alias.name.startswith("cp_mesh.")}
        elif isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "cp_mesh":
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "cp_mesh":
            found |= {f"cp_mesh.{node.attr}"} if node.attr in FLOORS else set()
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value.startswith("cp_mesh."):
            found |= {node.value} if node.value.removeprefix("cp_mesh.") in FILES else set()
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):  # a program
            found |= {f"cp_mesh.{name}" for name in re.findall(r"^(?:from|import) cp_mesh\.([\w.]+)", node.value, re.M)}
    public = {f"cp_mesh.{name}" for name in (*cp_mesh.__all__, *SUBMODULES, *PACKAGES)}
    return found - public - documented


def remembering(path: Path) -> set[str]:
    """Names of functions of a file that keep results."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        names = {ast.unparse(x).rpartition(".")[2].partition("(")[0] for x in getattr(node, "decorator_list", ())}
        if names & {"lru_cache", "cache"}:
            found.add(node.name)  # type: ignore[attr-defined]
        elif isinstance(node, ast.Assign) and re.search(r"\b(lru_)?cache\(", ast.unparse(node.value)):
            parts = [*ast.walk(node.targets[0])]
            found |= {x.id for x in parts if isinstance(x, ast.Name) and isinstance(x.ctx, ast.Store)}
            found |= {x.attr for x in parts if isinstance(x, ast.Attribute)}
    return found


def test_every_cache_has_a_reason() -> None:
    """In the second table of the page, and none that is gone."""
    page = (CHECKOUT / "docs" / "caches.md").read_text()
    rows = page.partition("## Functions that remember\n")[2].split("\n| ")[2:]
    told = {name for row in rows for name in re.findall(r"`([\w/.]+)`", row.partition(" |")[0])}
    files = {path.relative_to(PACKAGE).with_suffix("").as_posix(): path for path in PACKAGE.rglob("*.py")}
    assert told == {f"{file}.{name}" for file, path in files.items() for name in remembering(path)}


def test_one_door_to_the_inside() -> None:
    """Else each move of a file would change many tests."""
    folder = Path(__file__).parent
    found = {path.name: inner_names(path) for path in folder.rglob("*.py") if path.name != "inside.py"}
    assert not {name: names for name, names in found.items() if names}
    named = [name for names in NAMES.values() for name in names]
    assert len(named) == len(set(named)) <= 120
    assert all(getattr(inside, name) is not None for name in named)


def test_warnings_go_through_one_function() -> None:
    """`errors.warn`, which finds the user's line."""
    assert [path.name for path in PACKAGE.rglob("*.py") if "warnings.warn(" in path.read_text()] == ["errors.py"]


COLD_IMPORT = """
import json, sys
for name in ("triton", "flash_attn"):
    sys.modules[name] = None  # an import of it raises
import torch.distributed.tensor
import torch.distributed.tensor.experimental, torch.distributed.tensor.parallel
before = set(sys.modules)
import cp_mesh
print(json.dumps({
    "initialised": torch.distributed.is_initialized() or torch.cuda.is_initialized(),
    "packages": sorted({name.partition(".")[0] for name in set(sys.modules) - before} - sys.stdlib_module_names),
    "heavy": [name for name in ("torch._dynamo", "torch._inductor", "cp_mesh.tools") if name in sys.modules],
    "files": [name for name in sys.modules if name.partition(".")[0] == "cp_mesh"],
    "styles": [cp_mesh.parallelize, cp_mesh.ShardedModel, cp_mesh.ContextParallel].clear(),
    "then": [name for name in sys.modules if name.partition(".")[0] == "cp_mesh"],
}))
"""


def cold_import() -> dict[str, Any]:
    command = [sys.executable, "-c", COLD_IMPORT]
    result = subprocess.run(command, capture_output=True, text=True, timeout=120, cwd=PACKAGE.parent, check=False)
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout.splitlines()[-1])


MOST_FILES = 41
"""That the import loads: it registers the ops, and no more. This number goes down only."""
MOST_FILES_OF_A_PLAN = 74
"""That `parallelize` loads with the styles of a model without recurrent layers. This number goes down only."""


def test_cold_import() -> None:
    """Without the optional packages, and light: DTensor's own import is what it costs, and einops."""
    found = cold_import()
    assert len(found["files"]) <= MOST_FILES, found["files"]
    assert len(found["then"]) <= MOST_FILES_OF_A_PLAN, found["then"]
    assert not [name for name in found["then"] if name.endswith("mixers.rules")]
    assert not found["initialised"] and not found["heavy"]
    assert set(found["packages"]) <= {"cp_mesh", "torch", "numpy", "einops", "_remote_module_non_scriptable"}, found[
        "packages"
    ]


def test_names_are_where_the_stubs_say() -> None:
    """Each in one stub, of a package that loads what its stub names; at the top what a training script needs."""
    told = {name: home for package in PACKAGES.values() for name, home in homes(package.__name__).items()}
    assert sum(len(package.__all__) for package in PACKAGES.values()) == len(told.keys() - set(FLOORS))
    for package in PACKAGES.values():
        assert all(getattr(package, name).__module__ == told[name] for name in package.__all__ if name != "LAYOUTS")
    assert len(cp_mesh.__all__) <= 28
    with pytest.raises(AttributeError, match=r"no attribute 'decode': import it from cp_mesh\.inference$"):
        cp_mesh.__getattr__("decode")


FACTORIES = re.compile(
    r"torch\.(arange|as_tensor|empty|empty_strided|eye|full|linspace|logspace|ones|rand|randint|randn|randperm"
    r"|scalar_tensor|tensor|zeros)"
)


def test_every_new_tensor_names_its_device() -> None:
    """Else it would be made on the one of `torch.set_default_device`."""
    made, named = [], set()
    for path in FILES.values():
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and FACTORIES.fullmatch(ast.unparse(node.func)):
                made.append(where := f"{path}:{node.lineno}: {ast.unparse(node)}")
                named |= {where} if any(keyword.arg == "device" for keyword in node.keywords) else set()
    assert len(made) > 50 and not [where for where in made if where not in named]


def test_the_face() -> None:
    assert cp_mesh.__all__ == sorted(cp_mesh.__all__)
    assert all(getattr(cp_mesh, name) is not None for name in cp_mesh.__all__)  # most are loaded by it
    public = {name for name, value in vars(cp_mesh).items() if name[0] != "_" and not inspect.ismodule(value)}
    assert public == set(cp_mesh.__all__)


def test_every_folder_is_installed() -> None:
    """A checkout imports what a wheel may lack: a folder that the build settings leave out, or that is no package."""
    settings = tomllib.loads((CHECKOUT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]["find"]
    folders = {path.parent for path in (CHECKOUT / "cp_mesh").rglob("*.py")}
    names = {".".join(folder.relative_to(CHECKOUT).parts) for folder in folders if (folder / "__init__.py").exists()}
    assert len(names) == len(folders) >= 4
    assert all(any(fnmatch(name, pattern) for pattern in settings["include"]) for name in names)
