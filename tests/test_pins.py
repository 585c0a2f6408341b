"""Pins: records in tests/pins of the public API, op schemas, calls, traffic, memory and compilations.

    python tests/run.py tests/test_pins.py --full               # compares them
    python tests/run.py tests/test_pins.py --full --write-pins  # writes them anew; git diff says what moved

A record is one line for each thing that can move alone.
"""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import json
import re
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from itertools import product
from pathlib import Path
from types import FrameType, ModuleType
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from cases import LAYOUTS
from dense import make_qkv
from inside import METHOD_NAMES, SOURCES
from model import Core, Model, batch
from ranks import Pools, mesh
from test_allocations import allocating_alone
from test_traffic import passes
from torch._dynamo.testing import CompileCounter
from torch._dynamo.utils import counters
from torch.distributed.tensor import DTensor
from torch.profiler import ProfilerActivity, profile, record_function

import cp_mesh
from cp_mesh import ContextParallel, ShardedModel, ShardedSequence

DEGREES = {"hybrid": {"ulysses_degree": 2}}
FOLDER = Path(__file__).parent / "pins"
API = FOLDER.parent.parent / "docs" / "api.md"
VERSION = torch.__version__.partition("+")[0]
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
def pin(request: pytest.FixtureRequest) -> Callable[..., None]:
    """``pin(name, found)`` compares with the record of that name, or writes it.

    With ``made_with`` it is compared where that is as in the record, else the test is skipped. If not ``whole``, it is
    a part of the record.
    """

    def compare(name: str, found: Record, made_with: Record | None = None, whole: bool = True) -> None:
        file, found = FOLDER / f"{name}.json", json.loads(text_of(found))
        if made_with:
            found = {"made with": made_with} | found
        kept = json.loads(file.read_text()) if file.exists() else {}
        if request.config.getoption("--write-pins"):
            kept = found if whole else kept | found
            file.write_text(text_of(kept))
        if made_with and made_with != kept["made with"]:
            pytest.skip(f"{file.name} was made with {kept['made with']}, not with {made_with}")
        kept = kept if whole else {name: x for name, x in kept.items() if name in found}
        if problems := moved(found, kept):
            words = [f"{len(problems)} entries of {file.name} moved; where that is meant, --write-pins writes it anew"]
            words += problems[:20]
            pytest.fail("\n".join(words), pytrace=False)

    return compare


# The public API.

ROOMS = ("flex", "geometry", "inference", "latent", "mixers", "tensor_parallel", "tools", "training")
PACKAGES = {"": cp_mesh} | {room: importlib.import_module(f"cp_mesh.{room}") for room in ROOMS}
"""Packages that have public names."""
SUBMODULES = {
    "geometry.layouts": ("LAYOUTS", "Run", "chunk_bounds"),
    "comm.exchange": ("release", "symmetric_memory_bytes"),
    "integrations.diffusers": ("parallelize",),
    "integrations.torchtitan": ("context_parallel",),
    "integrations.trainer": ("context_parallel",),
    "integrations.transformers": ("parallelize", "sequence_of"),
}
"""What the documents import from elsewhere than `cp_mesh`."""
DOCUMENTED = dict(re.findall(r"::: cp_mesh\.\S*?(\w+)\n    options:\n      members: \[(.*)\]", API.read_text()))
"""The members of classes that the documents name."""
ABSENT = ("accelerate", "diffusers", "torchtitan", "transformers", "trl")


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
    if issubclass(cls, dict):
        found["keys"] = ", ".join(cls.__annotations__)
    elif not issubclass(cls, BaseException):
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
    for room, package in PACKAGES.items():
        for name in package.__all__:
            found |= described(f"{room}.{name}".removeprefix("."), getattr(package, name))
    for module, names in SUBMODULES.items():
        try:
            imported = importlib.import_module(f"cp_mesh.{module}")
        except ModuleNotFoundError:
            with mock.patch.object(sys, "meta_path", [Finder(), *sys.meta_path]), mock.patch.dict(sys.modules):
                imported = importlib.import_module(f"cp_mesh.{module}")
        for name in names:
            found |= described(f"{module}.{name}", getattr(imported, name))
    return found


def test_the_public_api(pool: Any, pin: Any) -> None:
    """On a rank, as packages that are absent are imported."""
    pin("api", pool(2).run(public_names)[0])


# The ops.


def ops() -> Record:
    """Schemas, tags and what is registered of the ops in saved graphs: fakes, autograd, autocast, sharding."""
    schemas = [x for x in torch._C._jit_get_all_schemas() if re.fullmatch(r"cp_mesh::.*(?<!_in_tests)", x.name)]
    by_name = {schema.name: schema for schema in schemas}
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


# Calls of our functions.


class Calls:
    """Counts calls of functions of cp_mesh while it is on; a generator that goes on is called again."""

    def __init__(self) -> None:
        self.number = 0

    def __enter__(self) -> Calls:
        sys.setprofile(self.note)
        return self

    def __exit__(self, *error: object) -> None:
        sys.setprofile(None)

    def note(self, frame: FrameType, event: str, arg: Any) -> None:
        self.number += event == "call" and frame.f_code.co_filename.startswith(SOURCES)


def calls(rank: int) -> Record:
    """Of the last call, and the last training step of a model of one layer, when all that is kept is there."""
    axis, found = mesh((2,), ("cp",)), {}
    options: dict[str, Any] = {"method": "ring", "kernel": "reference"}
    q, k, v = (torch.randn(1, heads, 16, 8, requires_grad=True) for heads in (4, 2, 2))
    for _ in range(24):
        with Calls() as forward:
            out = cp_mesh.attention(q, k, v, mesh=axis, **options)
        with Calls() as backward:
            out.backward(torch.ones_like(out))
    found |= {"forward": forward.number, "backward": backward.number}

    sequence, model = ShardedSequence(axis), Model(dtype=torch.float32)
    model.layers = model.layers[:1]
    plan = {"": ShardedModel(sequence), "layers.*.core": ContextParallel(sequence, **options)}
    cp_mesh.parallelize(model, axis, plan)
    optimizer, given = torch.optim.SGD(model.parameters(), lr=0.1), batch(2, 32)
    for _ in range(24):
        with Calls() as step:
            optimizer.zero_grad()
            labels = sequence.shard({"labels": given["labels"]})["labels"]
            loss = cp_mesh.cross_entropy(model(given["tokens"]), labels, axis)
            loss.backward()
            for parameter in model.parameters():
                dist.all_reduce(parameter.grad)
            optimizer.step()
    return found | {"training step": step.number}


def test_calls(pin: Any) -> None:
    """On new ranks: as long as a model of an earlier test waits for its first step, each step looks for it."""
    with Pools() as pools:
        of_ranks = pools(2).run(calls)
    found = {f"{what}, rank {i}": x for i, of_rank in enumerate(of_ranks) for what, x in of_rank.items()}
    pin("calls", found, {"python": "{}.{}".format(*sys.version_info), "torch": VERSION})


# What moves between ranks.


def test_traffic(pool: Any, pin: Any, full: bool) -> None:
    """Of each rank, the number of collectives and the bytes that it sends in them, forward and backward."""
    found: Record = {}
    cases = [*product(LAYOUTS, ("causal", "window", "documents") if full else ("causal",), (31,))]
    for method in METHOD_NAMES:
        degree = 2 if method in DEGREES else None
        cp_size = 2 if method == "ulysses" else 4
        results = pool(cp_size).run(passes, cases, torch.bfloat16, method, degree)
        for (layout, mask, _), *of_ranks in zip(cases, *results, strict=True):
            for i, of_pass in enumerate(("forward", "backward")):
                sent = [x[i] for x in of_ranks]
                found[f"{method}, {layout}, {mask}, {of_pass}"] = {
                    "collectives": [len(x) for x in sent],
                    "bytes": [sum(entry.bytes_sent for entry in x) for x in sent],
                }
    pin("traffic", found, whole=full)


# Memory.


def peaks(rank: int, method: str) -> dict[str, int]:
    """Most bytes that a forward, and a forward and backward, hold at a time beyond what they are given.

    PyTorch's profiler sees below the ops. What gloo's threads free it does not see: the least of several tries counts.
    """
    axis, found = mesh((dist.get_world_size(),), ("cp",)), []

    def attend(profiled: bool) -> dict[str, int]:
        q, k, v = (torch.zeros(1, heads, 128, 16, dtype=torch.bfloat16, requires_grad=True) for heads in (8, 4, 4))
        dout = torch.zeros_like(q)
        dist.barrier()
        time.sleep(0.02)  # what gloo's threads free late is of the call before
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) if profiled else nullcontext() as notes:
            out = cp_mesh.attention(q, k, v, mesh=axis, kernel="stand_in", method=method, **DEGREES.get(method, {}))
            with record_function("backward"):
                pass
            out.backward(dout)
        held, most = 0, {"forward": 0, "forward and backward": 0}
        for event in sorted(notes.profiler.kineto_results.events() if notes else (), key=lambda x: x.start_ns()):
            if event.name() == "backward":
                most["forward"] = most["forward and backward"]
            elif event.name() == "[memory]":
                held += event.nbytes()
                most["forward and backward"] = max(most["forward and backward"], held)
        return most

    with allocating_alone():
        attend(profiled=False)
        found = [attend(profiled=True) for _ in range(5)]
    return {what: min(x[what] for x in found) for what in found[0]}


@pytest.mark.unpoisoned
def test_memory(pool: Any, pin: Any) -> None:
    """Of 128 rows a rank, with a kernel that allocates as FlashAttention does and computes nothing."""
    found: Record = {}
    for method in METHOD_NAMES:
        of_ranks = pool(4).run(peaks, method)
        found |= {f"{method}, {what}": [x[what] for x in of_ranks] for what in of_ranks[0]}
    pin("memory", found, {"torch": VERSION})


# Compilations.


def graphs(rank: int, what: str) -> dict[str, int]:
    """Graphs, and breaks between them, of steps of three lengths, where breaks are allowed."""
    axis, counter = mesh((2,), ("cp",)), CompileCounter()
    sequence = ShardedSequence(axis)
    if what in ("function", "core"):
        core = cp_mesh.parallelize(Core(), axis, {"": ContextParallel(sequence)}) if what == "core" else None
        run = torch.compile(core or partial(cp_mesh.attention, mesh=axis), backend=counter)
    else:
        plan = {"": ShardedModel(sequence), "layers.*.core": ContextParallel(sequence)}
        model = Model()
        model.layers = model.layers[: 2 if what == "blocks" else 1]
        run = cp_mesh.parallelize(model, axis, plan)
        for part in model.layers if what == "blocks" else [model]:
            part.compile(backend=counter)
    for S in (16, 16, 24, 40):
        if what in ("function", "core"):
            q, k, v, dout = (sequence.shard(x, dim=2).requires_grad_() for x in make_qkv(2, 4, 2, S, 8))
            run(q, k, v).backward(dout.detach())
        else:
            given = batch(2, S)
            labels = sequence.shard({"labels": given["labels"]})["labels"]
            cp_mesh.cross_entropy(run(given["tokens"]), labels, axis).backward()
    return {"graphs": counter.frame_count, "breaks": sum(counters["graph_break"].values())}


@pytest.mark.parametrize("what", ("function", "core", "blocks", "root"))
@pytest.mark.quick("function")
def test_compilations(pool: Any, pin: Any, what: str) -> None:
    found, other = pool(2).run(graphs, what, timeout=300.0)
    assert found == other
    pin("compilations", {what: found}, {"torch": VERSION}, whole=False)
