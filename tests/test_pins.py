"""Pins: what stays as it is while the inside of cp_mesh is rebuilt, as records in tests/pins.

    python tests/run.py tests/test_pins.py --full               # compares most of them
    python tests/run.py tests/test_pins.py --full --write-pins  # writes records anew; git diff says what moved
    python tests/run.py --nightly=random tests/test_pins.py --write-pins  # the others, and with =geometry

A record is one line for each thing that can move alone. Numbers that only go down fail above their record, and below
it until it is written anew.
"""

from __future__ import annotations

import csv
import dataclasses
import hashlib
import importlib
import inspect
import json
import re
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from itertools import product
from pathlib import Path
from types import FrameType, ModuleType
from typing import Any
from unittest import mock

import checks
import pytest
import test_parity
import torch
import torch.distributed as dist
from cases import LAYOUTS, MASKS, make_mask
from checks import Case, call, report
from covering import covering_array
from dense import make_qkv
from frames import COUNTED
from inside import METHOD_NAMES, SOURCES, planned
from model import Core, Model, batch
from ranks import Pools, mesh
from scripts import run_script
from test_allocations import allocating_alone
from test_traffic import checkpointed, passes
from torch import Tensor
from torch._dynamo.testing import CompileCounter
from torch._dynamo.utils import counters
from torch.distributed.tensor import DTensor
from torch.profiler import ProfilerActivity, profile, record_function

import cp_mesh
from cp_mesh import ContextParallel, ShardedModel, ShardedSequence

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


def not_above(found: Any, kept: Any) -> bool:
    """Of numbers, or lists of as many; what else is said must be as in the record."""
    if isinstance(found, list):
        return len(found) == len(kept) and all(map(not_above, found, kept))
    return found <= kept if isinstance(found, int) else found == kept


@pytest.fixture
def pin(request: pytest.FixtureRequest) -> Callable[..., None]:
    """``pin(name, found)`` compares with the record of that name, or writes it.

    With ``made_with`` it is compared where that is as in the record, else the test is skipped. If not ``whole``, it is
    a part of the record. Numbers that ``falls`` are to go down, not up.
    """

    def compare(
        name: str, found: Record, made_with: Record | None = None, whole: bool = True, falls: bool = False
    ) -> None:
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
            fell = falls and found.keys() == kept.keys() and all(not_above(found[name], kept[name]) for name in found)
            what = "fell: let --write-pins write it" if fell else "moved; where that is meant, --write-pins writes it"
            words = [f"{len(problems)} entries of {file.name} {what} anew", *problems[:20]]
            pytest.fail("\n".join(words), pytrace=False)

    return compare


# The public API.

ROOMS = ("flex", "geometry", "inference", "mixers", "tensor_parallel", "tools", "training")
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


# Plans.

SIZES, OTHER_SIZES = ((31, 4),), ((31, 1), (31, 2), (31, 3), (31, 6), (5, 4))
"""Tokens, ranks; the others in the nightly form."""


def digest(x: Any) -> str:
    return hashlib.sha256(x if isinstance(x, bytes) else json.dumps(x).encode()).hexdigest()[:8]


@pytest.mark.more("geometry")
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.quick("zigzag", "striped")
def test_plans(pin: Any, full: bool, layout: str) -> None:
    """Of all ranks, with tiles by pairs and by documents."""
    found: Record = {}
    for mask, sizes in product(MASKS, (SIZES, OTHER_SIZES) if full else (SIZES,)):
        plans = [
            planned(LAYOUTS[layout](S), make_mask(mask, 2, S), S, cp_size, rank, by_documents)
            for by_documents, (S, cp_size) in product((False, True), sizes)
            for rank in range(cp_size)
        ]
        digests = {part: digest([plan[part] for plan in plans]) for part in plans[0]}
        name = mask if sizes == SIZES else f"{mask}, other sizes"
        found[name] = " ".join(f"{part} {said}" for part, said in digests.items())
    pin(f"plans of {layout}", found, whole=full)


# Numbers.

METHODS_ON = {"ring": (2, 3, 4), "all_gather": (3, 4), "ulysses": (2, 3, 4), "hybrid": (4,)}
"""On fewer ranks the hybrid is Ulysses."""
DEGREES = {"hybrid": {"ulysses_degree": 2}}
FACTORS: dict[str, tuple[Any, ...]] = {
    "method": METHOD_NAMES,
    "cp_size": (2, 3, 4),
    "layout": tuple(LAYOUTS),
    "mask": tuple(MASKS),
    "scores": ("plain", "softcap and sinks", "alibi", "bias", "dropout, sinks and alibi"),
    "seq_dim": (2, 1, 0),
    "heads": ((12, 12), (12, 4), (12, 1)),
    "head_chunks": (None, 2),
}
FEWER = FACTORS | {
    "cp_size": (2, 4),
    "mask": ("causal", "documents", "key padding", "blocks", "everything"),
}
UNEVEN = ("balanced", "zigzag documents", "joint")


def goes_together(row: Record) -> bool:
    """A method on ranks, and the heads that it serves in chunks."""
    if row.get("method") and row.get("cp_size", METHODS_ON[row["method"]][-1]) not in METHODS_ON[row["method"]]:
        return False
    one_kv_head = row.get("heads") == (12, 1) or (row.get("method"), row.get("cp_size")) == ("ulysses", 4)
    return not (row.get("head_chunks") and one_kv_head)


def rows_of(factors: dict[str, tuple[Any, ...]]) -> list[Record]:
    """All pairs of options; few of DTensors, with which PyTorch takes long, and where ranks have as many rows."""
    found, few = covering_array(factors, 2, goes_together), 20 if factors is FEWER else 8
    given = ("local" if i % few or row["layout"] in UNEVEN else "DTensors" for i, row in enumerate(found))
    return [row | {"given": x} for row, x in zip(found, given, strict=True)]


def case_of(row: Record) -> Case:
    named = {name: x for name, x in row.items() if name not in ("cp_size", "given")}
    S, options = 31 if row["given"] == "local" else 24, DEGREES.get(row["method"], {})
    return Case(**named, S=S, kernel="reference", dtype=torch.float32, options=options)


def numbers(rank: int, cp_size: int, rows: Sequence[Record]) -> tuple[list[str], list[dict[str, bytes]], Record]:
    """What is wrong with calls, the bytes of results and gradients of each, and what their bits may depend on."""
    found: list[dict[str, bytes]] = []

    def noted(*given: Any) -> dict[str, Tensor]:
        got = call(*given)
        local = {name: x.to_local() if isinstance(x, DTensor) else x for name, x in got.items()}
        found.append({name: x.detach().contiguous().numpy().tobytes() for name, x in local.items()})
        return got

    problems = []
    with mock.patch.object(checks, "call", noted), mock.patch.object(test_parity, "call", noted):
        for row in rows:
            if row["given"] == "local":
                problems += checks.parity_on_ranks(rank, (cp_size,), ("cp",), [case_of(row)])
            else:
                problems += test_parity.dtensors(rank, (cp_size,), ("cp",), {}, [case_of(row)])
    return problems, found, machine()


def machine() -> Record:
    """What bits may depend on beside the library: PyTorch, the CPU, and what plain products and functions give here."""
    x = torch.linspace(-3, 3, 4 * 31 * 5).view(4, 31, 5)
    products = [x[:, :n] @ x.mT[:, :, : n + 7] for n in (1, 2, 7, 24, 31)]
    functions = [f(y) for y in products for f in (torch.exp, torch.tanh, torch.log1p, torch.sum)]
    weights = [y.softmax(-1) @ x[:, : y.shape[-1]] for y in products]
    given = b"".join(y.nan_to_num().contiguous().numpy().tobytes() for y in (*products, *functions, *weights))
    return {
        "torch": torch.__version__, "cpu": torch.backends.cpu.get_cpu_capability(), "arithmetic": digest(given)
    }  # fmt: skip


@pytest.mark.parametrize(
    "factors", (FEWER, pytest.param(FACTORS, marks=pytest.mark.nightly("random"))), ids=("fewer", "all")
)
@pytest.mark.full
def test_numbers(pool: Any, pin: Any, factors: dict[str, tuple[Any, ...]]) -> None:
    """Bit for bit where PyTorch's own arithmetic is that of the record; within the bounds of parity everywhere."""
    found, made_with, rows = {}, {}, rows_of(factors)
    for cp_size in factors["cp_size"]:
        of_size = [row for row in rows if row["cp_size"] == cp_size]
        results = pool(cp_size).run(numbers, cp_size, of_size, timeout=500.0)
        report(problems for problems, _, _ in results)
        made_with = results[0][2]
        for row, *of_ranks in zip(of_size, *(x for _, x, _ in results), strict=True):
            digests = {name: digest(b"".join(x[name] for x in of_ranks)) for name in of_ranks[0]}
            found[", ".join(map(str, row.values()))] = " ".join(f"{name} {said}" for name, said in digests.items())
    pin("numbers" if factors is FEWER else "numbers of all masks", found, made_with)


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
    pin("calls", found, {"python": "{}.{}".format(*sys.version_info), "torch": VERSION}, falls=True)


def test_frames(pin: Any, tmp_path: Path) -> None:
    """Of passes over symmetric memory with FlashAttention-4, on doubles of devices: what `frames.py` counts."""
    done = run_script(FOLDER.parent / "frames.py", ["--no-times", "--csv", str(tmp_path / "frames.csv")])
    assert not done.returncode, done.printed
    rows = list(csv.DictReader((tmp_path / "frames.csv").read_text().splitlines()))
    found = {f"{row['case']}, {row['pass']}, {what}": int(row[what]) for row in rows for what in COUNTED}
    pin("frames", found, {"python": "{}.{}".format(*sys.version_info), "torch": VERSION}, falls=True)


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


@pytest.mark.parametrize("backend", (None, pytest.param("aot_eager", marks=pytest.mark.full)))
def test_recomputation(pool: Any, pin: Any, backend: str | None) -> None:
    """Collectives of a forward and backward of a block, by how it is checkpointed."""
    found = {method: pool(2).run(checkpointed, method, backend)[0] for method in ("ring", "all_gather", "ulysses")}
    pin(f"recomputation{' of compiled blocks' * bool(backend)}", found)


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
    pin("memory", found, {"torch": VERSION}, falls=True)


# Compilations.


GRAPHS = ("function", "core", "blocks", "root")


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


@pytest.mark.parametrize("what", [pytest.param(x, marks=[pytest.mark.full] * (x in ("core", "root"))) for x in GRAPHS])
@pytest.mark.quick("function")
def test_compilations(pool: Any, pin: Any, what: str) -> None:
    found, other = pool(2).run(graphs, what, timeout=300.0)
    assert found == other
    pin(f"compilations of {what}", found, {"torch": VERSION}, falls=True)
