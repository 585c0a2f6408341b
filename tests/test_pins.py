"""Pins: what stays as it is while the inside of cp_mesh is rebuilt, as records in tests/pins.

    python tests/run.py tests/test_pins.py --write-pins  # writes the records anew; a diff in git says what moved

A record is one line for each thing that can move alone. Numbers that only go down fail above their record, and below
it until it is written anew.
"""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import json
import re
import sys
from collections.abc import Callable
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

import pytest
import torch
from torch.distributed.tensor import DTensor

import cp_mesh

FOLDER = Path(__file__).parent / "pins"
API = FOLDER.parent.parent / "docs" / "api.md"
Record = dict[str, Any]


def text_of(record: Record) -> str:
    """JSON with a line for each entry."""
    lines = (f"{json.dumps(name)}: {json.dumps(value)}" for name, value in record.items())
    return "{\n" + ",\n".join(lines) + "\n}\n"


def moved(found: Record, kept: Record) -> list[str]:
    """Entries that are not as in the record."""
    names = [name for name in found | kept if found.get(name) != kept.get(name)]
    return [f"{name}:\n  found {found.get(name, 'nothing')}\n  kept  {kept.get(name, 'nothing')}" for name in names]


@pytest.fixture
def pin(request: pytest.FixtureRequest) -> Callable[[str, Record], None]:
    """``pin(name, found)`` compares with the record of that name, or writes it."""

    def compare(name: str, found: Record) -> None:
        file = FOLDER / f"{name}.json"
        if request.config.getoption("--write-pins"):
            file.write_text(text_of(found))
        if problems := moved(json.loads(text_of(found)), json.loads(file.read_text())):
            words = [f"{len(problems)} entries of {file.name} moved; --write-pins writes it anew", *problems[:20]]
            pytest.fail("\n".join(words), pytrace=False)

    return compare


# The public API.

SUBMODULES = {
    "compat": ("context_parallel", "context_parallel_unshard", "set_rotate_method"),
    "layouts": ("LAYOUTS", "Run", "chunk_bounds"),
    "transport": ("release", "symmetric_memory_bytes"),
    "integrations.diffusers": ("parallelize",),
    "integrations.torchtitan": ("context_parallel",),
    "integrations.trainer": ("context_parallel",),
    "integrations.transformers": ("parallelize", "sequence_of"),
}
"""What the documents import from elsewhere than `cp_mesh`, but for torchtitan_main, which needs torchtitan."""
DOCUMENTED = dict(re.findall(r"::: cp_mesh\.\S*?(\w+)\n    options:\n      members: \[(.*)\]", API.read_text()))
"""The members of classes that the documents name."""
ABSENT = ("accelerate", "diffusers", "spmd_types", "torchtitan", "transformers", "trl")


class Absent(ModuleType):
    """A package of others that need not be installed: every name in it is an empty class."""

    __path__: list[str] = []  # noqa: RUF012

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (), {})


class Finder(MetaPathFinder, Loader):
    def find_spec(self, fullname: str, path: Any, target: Any = None) -> ModuleSpec | None:
        return ModuleSpec(fullname, self) if fullname.partition(".")[0] in ABSENT else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return Absent(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        pass


def signature(function: Any) -> str:
    """Names, kinds and defaults."""
    found = inspect.signature(function)
    bare = [p.replace(annotation=p.empty) for p in found.parameters.values()]
    return str(found.replace(parameters=bare, return_annotation=found.empty))


def members(cls: type) -> Record:
    """What a class is, how it is made, and those members that the documents name."""
    bases = [base.__name__ for base in cls.__mro__[1:-1] if base.__name__ in cp_mesh.__all__ or not is_ours(base)]
    found: Record = {"": f"class({', '.join(bases)})"}
    if dataclasses.is_dataclass(cls):
        found["fields"] = ", ".join(field.name for field in dataclasses.fields(cls))
    if not issubclass(cls, BaseException):
        found["__init__"] = signature(cls)
    for name in DOCUMENTED.get(cls.__name__, "").split(", "):
        member = inspect.getattr_static(cls, name) if name else None
        if isinstance(member, classmethod):
            found[name] = f"classmethod{signature(member.__func__)}"
        elif member is not None:
            found[name] = signature(member) if inspect.isfunction(member) else type(member).__name__
    return found


def is_ours(cls: type) -> bool:
    return cls.__module__.partition(".")[0] == "cp_mesh"


def described(name: str, thing: Any) -> Record:
    if isinstance(thing, type):
        return {f"{name}.{member}".rstrip("."): said for member, said in members(thing).items()}
    return {name: signature(thing) if callable(thing) else f"{type(thing).__name__} of {', '.join(thing)}"}


def public_names(rank: int) -> Record:
    found: Record = {}
    for name in cp_mesh.__all__:
        found |= described(name, getattr(cp_mesh, name))
    with mock.patch.object(sys, "meta_path", [Finder(), *sys.meta_path]), mock.patch.dict(sys.modules):
        for module, names in SUBMODULES.items():
            imported = importlib.import_module(f"cp_mesh.{module}")
            for name in names:
                found |= described(f"{module}.{name}", getattr(imported, name))
    return found


def test_the_public_api(pool: Any, pin: Any) -> None:
    """On a rank, as packages that are absent are imported."""
    pin("api", pool(1).run(public_names)[0])


# The ops.


def ops() -> Record:
    """Schemas, tags and what is registered of the ops in saved graphs: fakes, autograd, autocast, sharding."""
    importlib.import_module("cp_mesh.compat")
    by_name = {schema.name: schema for schema in torch._C._jit_get_all_schemas() if schema.name[:9] == "cp_mesh::"}
    found: Record = {}
    for name, schema in sorted(by_name.items()):
        overload = getattr(torch.ops.cp_mesh, name.partition("::")[2]).default
        found[name] = str(schema)
        found[f"{name}, tags"] = sorted(tag.name for tag in overload.tags)
        registered = [key for key in KEYS if torch._C._dispatch_has_kernel_for_dispatch_key(name, key)]
        strategies = DTensor._op_dispatcher.sharding_propagator.op_strategy_funcs
        found[f"{name}, registered"] = registered + ["sharding"] * (overload in strategies)
    return found


KEYS = ("Meta", "Autograd", "AutocastCPU", "AutocastCUDA", "CompositeExplicitAutograd")


def test_the_ops(pin: Any) -> None:
    pin("ops", ops())
