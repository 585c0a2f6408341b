"""What a fault of one rank does to the others: the result is right, or there is an error in time, and nothing hangs.

Ranks that are lost are those of pools of their own, with short timeouts.
"""

from __future__ import annotations

import ctypes
import gc
import os
import random
import re
import sys
import threading
import time
import weakref
from collections.abc import Iterator, MutableMapping
from contextlib import nullcontext
from datetime import timedelta
from itertools import product
from pathlib import Path
from typing import Any
from unittest import mock

import faults
import pytest
import torch
import torch.distributed as dist
from faults import LENGTH, MOMENTS, ODD, TIMEOUT, Trainer, late, new_mesh, new_world, out_of_memory, step_with
from inside import inner
from model import Core
from ranks import GRACE, Pool, RankFailure, mesh, on_ranks

import cp_mesh
from cp_mesh import Contiguous, Mask, RankMismatchError, Striped, ZigZag, attention, check_mode

full = pytest.mark.full


@pytest.fixture
def lost() -> Iterator[Any]:
    """``lost(size)``: a pool of its own, as its ranks are lost."""
    assert TIMEOUT < GRACE, "ranks that time out must have the time to say so"
    pools: list[Pool] = []

    def make(world_size: int) -> Pool:
        pools.append(Pool(world_size))
        return pools[-1]

    yield make
    for pool in pools:
        pool.close()


def lose_one(rank: int, how: str, moment: str, method: str) -> None:
    """The odd rank is lost in the second step, or in the first call of all."""
    trainer = Trainer(new_mesh(), method=method)
    if moment != "first call":
        trainer.step(0)
    step_with(trainer, moment, getattr(faults, how) if rank == ODD else faults.impatient, 1)


def of_ranks(failure: RankFailure, size: int) -> dict[int, str]:
    """What each rank said."""
    parts = re.split(r"^rank ([\d, ]+): ", str(failure), flags=re.MULTILINE)[1:]
    texts = {int(rank): text for ranks, text in zip(parts[::2], parts[1::2], strict=True) for rank in ranks.split(",")}
    assert texts.keys() == set(range(size)), f"only ranks {[*texts]} failed: {failure}"
    return texts


@pytest.mark.parametrize(
    ("how", "moment", "method"),
    [
        ("killed", "forward", "ring"),
        pytest.param("killed", "first call", "ring", marks=full),
        pytest.param("raising", "first call", "ring", marks=full),
        pytest.param("raising", "backward", "ring", marks=full),
        pytest.param("killed", "loss", "ulysses", marks=full),
        pytest.param("killed", "backward", "hybrid", marks=full),
    ],
)
def test_a_rank_is_lost(lost: Any, how: str, moment: str, method: str) -> None:
    """The others say for whom they waited, long before the default timeouts."""
    size = 3 if method == "ring" else 4
    with pytest.raises(RankFailure) as failure:
        lost(size).run(lose_one, how, moment, method)
    told = of_ranks(failure.value, size)
    assert {"killed": "exit code -9", "raising": "KeyError: 'in the middle of user code'"}[how] in told.pop(ODD)
    for rank, text in told.items():
        says = f"never came: rank {rank} waited for ranks ["
        if moment == "first call":  # in the store
            says = f"got none from ranks [{ODD}] in 0:00:0{TIMEOUT:.0f}"
        assert says in text, f"rank {rank}: {text}"


@pytest.mark.full
@on_ranks(3)
def test_a_late_rank_changes_nothing(rank: int, axis: Any) -> None:
    trainers = [Trainer(axis) for _ in range(2)]
    losses = [trainers[0].step(seed) for seed in range(len(MOMENTS))]
    act = late if rank == ODD else lambda: None
    assert [step_with(trainers[1], moment, act, seed) for seed, moment in enumerate(MOMENTS)] == losses
    assert len({*losses}) == len(MOMENTS)


# NaN.

METHODS = {"ring": {}, "all_gather": {}, "ulysses": {}, "hybrid": {"ulysses_degree": 2}}
DOCUMENTS = torch.tensor([[0] * 7 + [1] * 9 + [2] * 8])
MASKS = {"causal": Mask(), "documents": Mask(documents=DOCUMENTS)}
NAN_AT = 10
Rows = set[tuple[int, int]]
"""Heads and positions."""


def reached(which: str, allowed: torch.Tensor) -> dict[str, Rows]:
    """What depends on row `NAN_AT` of the first kv head of one input, by the mask alone [S, S]: two query heads."""
    queries = {"q": [NAN_AT]}.get(which, allowed[:, NAN_AT].nonzero().flatten().tolist())
    keys = allowed[queries].any(0).nonzero().flatten().tolist()
    heads = (0,) if which == "q" else (0, 1)
    of_queries = {(head, i) for head in heads for i in queries}
    of_keys = {(0, j) for j in keys}
    return {"out": of_queries, "dq": of_queries, "dk": of_keys, "dv": set() if which == "v" else of_keys}


def with_nan(axis: Any, which: str, mask: str, layout: Any, **options: Any) -> dict[str, Rows]:
    """Heads and positions of NaN in this rank's results and gradients."""
    generator = torch.Generator().manual_seed(0)
    shapes = {"q": 4, "k": 2, "v": 2, "dout": 4}
    whole = {name: torch.randn(1, n, LENGTH, 4, generator=generator).double() for name, n in shapes.items()}
    whole[which][0, 0, NAN_AT, 1] = torch.nan
    rows = layout.positions(LENGTH, axis.size(), axis.get_local_rank())
    q, k, v, dout = (x[:, :, rows].clone().requires_grad_(name != "dout") for name, x in whole.items())
    options |= {"mesh": axis, "layout": layout, "mask": MASKS[mask], "kernel": "reference"}
    out = attention(q, k, v, **options)
    grads = torch.autograd.grad(out, (q, k, v), dout)
    found = {}
    for name, x in zip(("out", "dq", "dk", "dv"), (out, *grads), strict=True):
        heads, local = x[0].isnan().any(-1).nonzero(as_tuple=True)
        found[name] = {*zip(heads.tolist(), rows[local].tolist(), strict=True)}
    return found


@pytest.mark.parametrize("method", ["ring", *(pytest.param(x, marks=full) for x in [*METHODS][1:])])
@on_ranks(4)
def test_nan_reaches_what_depends_on_it_and_no_more_than_on_one_rank(method: str) -> None:
    """A kernel multiplies what its mask hides by 0, so more rows are NaN than depend on it; on a mesh no others are."""
    grid = mesh((4, 1), ("cp", "alone"))
    for which, mask, layout in product("qkv", MASKS, (ZigZag(), Striped())):
        parts: list[Any] = [None] * 4
        dist.all_gather_object(parts, with_nan(grid["cp"], which, mask, layout, method=method, **METHODS[method]))
        dense = with_nan(grid["alone"], which, mask, Contiguous())
        want = reached(which, MASKS[mask].allowed(*[torch.arange(LENGTH)] * 2)[-1])
        for name, rows in want.items():
            got = set().union(*(part[name] for part in parts))
            assert rows <= got <= dense[name], (which, mask, name, got, rows)
        # of these the reference kernel on one rank leaks nothing to other documents' outputs
        assert which == "v" or dense["out"] == want["out"], (which, mask)


@on_ranks(3)
def test_the_loss_of_a_nan_is_nan_on_every_rank(rank: int) -> None:
    """Of one token's embedding: whether the loss is NaN on this rank, and whether it all comes to an end."""
    trainer = Trainer(mesh((3,), ("cp",)))
    first = faults.batch(2, LENGTH, 0)["tokens"][:, 0]
    with torch.no_grad():
        weight = trainer.model.embedding.weight.to_local()
        begin = trainer.model.embedding.weight.shape[0] // 3 * rank
        weight[[int(token) - begin for token in first if 0 <= token - begin < len(weight)]] = torch.nan
    loss = trainer.loss(0)
    assert [bool(loss.isnan()), trainer.finish(loss) != 0, trainer.step(1) != 0] == [True] * 3


# Out of memory, and new groups.


def without_memory(rank: int, folder: Path, wheres: list[str], check: bool) -> list[str]:
    """What this rank raises when the odd one is out of memory, and whether all is as before with new groups."""
    problems, want = [], None
    for i, where in enumerate([None, *wheres, None]):
        new_world(rank, folder / f"{where} {i}")
        trainer = Trainer(new_mesh(), method="hybrid" if i % 2 else "ring")
        with check_mode() if check else nullcontext():
            first = trainer.step(0)
            want = want or first
            if first != pytest.approx(want, rel=1e-12):
                problems.append(f"before {where}: the loss is {first}, not {want}")
            if where is None:
                continue
            loss = trainer.loss(1) if where.endswith("backward") else None
            begin, error = time.monotonic(), None
            faults.impatient()
            try:
                with out_of_memory(where, 1 + i % 2) if rank == ODD else nullcontext():
                    trainer.finish(trainer.loss(1) if loss is None else loss)
            except torch.OutOfMemoryError as caught:
                error = caught
            except RuntimeError as caught:
                error = caught
            kinds = (torch.OutOfMemoryError,) if rank == ODD else (RuntimeError, RankMismatchError)[: 1 + check]
            said = ("as planted",) if rank == ODD else ("never came", "got none from ranks")[: 1 + check]
            if type(error) not in kinds or not any(text in str(error) for text in said):
                problems.append(f"{where}: {error!r}")
            if time.monotonic() - begin > 4 * TIMEOUT:
                problems.append(f"{where}: after {time.monotonic() - begin:.1f} s")
        del error, loss
    return problems


@pytest.mark.full
@pytest.mark.parametrize("check", [False, True])
def test_out_of_memory_on_one_rank(lost: Any, check: bool, tmp_path: Path) -> None:
    wheres = ["kernel, forward"] if check else [*faults.OUT_OF_MEMORY]
    assert lost(4).run(without_memory, tmp_path, wheres, check, timeout=120.0) == [[]] * 4


# New groups in one process, several models, threads.


def anew(rank: int, folder: Path) -> list[str]:
    """All groups are destroyed and made again; what is known of old ones must not be read, nor kept."""
    problems, want, old = [], None, []
    for world in range(4):
        new_world(rank, folder / str(world))
        axis = new_mesh()
        trainers = [Trainer(axis, method=method) for method in ("ring", "hybrid")]
        losses = [trainer.step(0) for trainer in trainers]
        want = want or losses
        if losses != want:
            problems.append(f"world {world}: {losses}, not {want}")
        # a batch whose loss never comes, in a layout that the next world has not
        sequence = cp_mesh.ShardedSequence(axis, Striped(), length=LENGTH)
        sequence.shard({"tokens": faults.batch(2, LENGTH, 0)["tokens"]})
        old.append([weakref.ref(group) for group in dist.distributed_c10d._world.pg_map])
        del trainers, sequence, axis
    new_world(rank, folder / "end")
    gc.collect()
    kept = [ref() for refs in old[1:-1] for ref in refs if ref() is not None]  # PyTorch keeps the first and the last
    if kept or len(old[1]) < 3:
        problems.append(f"groups are kept: {kept}")
    return problems


@pytest.mark.full
def test_groups_that_are_made_anew(lost: Any, tmp_path: Path) -> None:
    assert lost(4).run(anew, tmp_path) == [[]] * 4


def of_other_group(rank: int, folder: Path) -> None:
    """Tokens of a group that was destroyed are not compared with the labels of the next loss, nor looked for."""
    tokens = faults.batch(2, LENGTH, 0)["tokens"] % 8
    labels = torch.nn.functional.pad(tokens[:, 1:], (0, 1), value=-100)
    new_world(rank, folder / "before")
    group = [dist.new_group() for _ in range(3)][-1]  # whose name the next world has not
    cp_mesh.ShardedSequence(group, Striped(), length=LENGTH).shard({"tokens": tokens})
    new_world(rank, folder / "after")
    sequence = cp_mesh.ShardedSequence(new_mesh(), ZigZag(), length=LENGTH)
    rows = sequence.positions()
    x = torch.randn(2, 2, len(rows), 4, requires_grad=True)
    logits = attention(x, x, x, mesh=sequence.mesh).transpose(1, 2).flatten(2)
    own = labels[:, rows].clone()  # without a mark
    cp_mesh.cross_entropy(logits, own, sequence.mesh).backward()


def test_tokens_of_a_group_that_is_gone(lost: Any, tmp_path: Path) -> None:
    lost(2).run(of_other_group, tmp_path)


SETTINGS = {"a": (ZigZag(), "ring"), "b": (Striped(), "ulysses"), "c": (Contiguous(), "hybrid")}


@pytest.mark.full
@on_ranks(4)
def test_models_that_take_turns(axis: Any) -> None:
    """Losses and parameters of models that take turns, pass by pass, equal to the bit those of each one alone."""
    seeds = {name: i for i, name in enumerate(SETTINGS)}
    alone, together = ({name: Trainer(axis, *SETTINGS[name], seed=seeds[name]) for name in SETTINGS} for _ in range(2))
    want = {name: [trainer.step(seeds[name] + step) for step in range(2)] for name, trainer in alone.items()}
    got: dict[str, list[float]] = {name: [] for name in SETTINGS}
    for step, order in enumerate((["a", "b", "c"], ["c", "a", "b"])):
        losses = {name: together[name].loss(seeds[name] + step) for name in SETTINGS}
        for name in order:
            got[name].append(together[name].finish(losses[name]))
    problems = [f"{name}: {got[name]}, not {want[name]}" for name in SETTINGS if got[name] != want[name]]
    for name in SETTINGS:
        pairs = zip(alone[name].model.parameters(), together[name].model.parameters(), strict=True)
        problems += [name for x, y in pairs if not torch.equal(x.to_local(), y.to_local())]
    assert problems == []


def calls_of(group: dist.ProcessGroup, number: int, results: list[Any]) -> None:
    """Calls of many shapes, forward and backward; what differs between threads is all of it."""
    random_, generator = random.Random(number), torch.Generator().manual_seed(number)
    for _ in range(12):
        length, layout = random_.randrange(4, 40, 4), random_.choice([ZigZag(), Striped(), Contiguous()])
        mask = Mask(window=(random_.randrange(1, 9), 0))
        qkv = [torch.randn(1, 2, length, 4, generator=generator).requires_grad_() for _ in range(3)]
        with check_mode() if random_.random() < 0.3 else nullcontext():
            out = attention(*qkv, mesh=group, layout=layout, mask=mask, method=random_.choice(["ring", "ulysses"]))
        results += [out.detach(), *torch.autograd.grad(out.square().sum(), qkv)]


@on_ranks(2)
def test_two_threads_with_groups_of_their_own() -> None:
    results: list[list[Any]] = [[] for _ in range(4)]
    made = [dist.new_group() for _ in results]
    calls_of(made[0], 0, results[0])
    calls_of(made[1], 1, results[1])
    errors: list[Any] = []
    with mock.patch.object(threading, "excepthook", errors.append):
        threads = [threading.Thread(target=calls_of, args=(made[i], i - 2, results[i])) for i in (2, 3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert not errors, errors[0].exc_value
    same = [torch.equal(x, y) for i in (0, 1) for x, y in zip(results[i], results[i + 2], strict=True)]
    assert len(same) == 96 and all(same)


def crossing(rank: int, store: Path) -> list[float]:
    """Each rank's thread of its own number waits for the other rank before that rank's thread begins."""
    server = dist.TCPStore("localhost", 0, 2, is_master=True, wait_for_workers=False) if rank == 0 else None
    file = dist.FileStore(str(store), 2)
    if server is not None:
        file.set("port", str(server.port))
    new_world(rank, server or dist.TCPStore("localhost", int(file.get("port")), 2), timeout=10.0)
    made, errors, results = [dist.new_group(timeout=timedelta(seconds=10)) for _ in range(2)], [], []

    def call(number: int) -> None:
        time.sleep(0.0 if number == rank else 1.0)
        x = torch.ones(1, 2, 4, 4)
        results.append(attention(x, x, x, mesh=made[number]).sum().item())

    with mock.patch.object(threading, "excepthook", errors.append):
        threads = [threading.Thread(target=call, args=(number,)) for number in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert not errors, errors[0].exc_value
    return results


def test_a_thread_that_waits_does_not_keep_another_from_its_word(lost: Any, tmp_path: Path) -> None:
    """Over a TCPStore, whose client is locked while it waits."""
    assert lost(2).run(crossing, tmp_path / "store") == [[32.0, 32.0]] * 2


def on_two_streams(rank: int) -> list[bool]:
    """Calls of one plan, whose masks are made on the device, on streams that nothing orders."""
    axis = mesh((1,), ("cp",))
    generator = torch.Generator().manual_seed(0)
    ids = torch.arange(512) // 100
    results = []
    for round_ in range(6):
        inputs = [torch.randn(1, 4, 512, 64, generator=generator).half().cuda().requires_grad_() for _ in range(3)]
        mask = Mask(documents=ids + (ids > round_))  # a new plan
        torch.cuda.synchronize()
        outs = []
        for stream in [torch.cuda.Stream() for _ in range(3)]:
            with torch.cuda.stream(stream):
                torch.cuda._sleep(1_000_000)
                out = attention(*inputs, mesh=axis, mask=mask, alibi_slopes=torch.ones(4, device="cuda"))
                outs.append([out, *torch.autograd.grad(out.sum(), inputs)])
        torch.cuda.synchronize()
        results += [torch.allclose(x, y, atol=1e-2) for other in outs[1:] for x, y in zip(outs[0], other, strict=True)]
    return results


@pytest.mark.gpu
def test_streams_of_the_callers(pool: Any) -> None:
    assert all(pool(1, "nccl").run(on_two_streams)[0])


# Memory.


def cached() -> dict[str, Any]:
    """All functions of the package that keep results, and all tables of its modules."""
    found: dict[str, Any] = {}
    assert all(hasattr(cp_mesh, name) for name in cp_mesh.__all__)  # which loads the modules
    for name, module in [*sys.modules.items()]:
        if name.partition(".")[0] != "cp_mesh" or module.__name__ != name:  # an old name of a module
            continue
        owners = [module, *(x for x in vars(module).values() if isinstance(x, type) and x.__module__ == name)]
        for owner in owners:
            for key, member in vars(owner).items():
                value = getattr(member, "__func__", member)
                own = getattr(value, "__module__", name) == name
                table = isinstance(value, MutableMapping) and not type(value).__module__.startswith("transformers")
                if (hasattr(value, "cache_info") and own) or (owner is module and table):
                    of = "" if owner is module else f"{owner.__name__}."
                    found[f"{name.removeprefix('cp_mesh.')}.{of}{key}"] = value
    return {name: x for name, x in found.items() if not name.rpartition(".")[2].startswith("__")}


def test_every_cache_is_bounded() -> None:
    """By a number of entries; of others a page says what ends an entry."""
    page = (Path(__file__).parent.parent / "docs" / "caches.md").read_text()
    first = "".join(re.findall(r"^\| `.*?` \|", page, re.MULTILINE))
    found, loaded = cached(), inner("_names", "Loaded")
    told = [found.get(name.replace("/", ".")) for name in re.findall(r"`([\w/.]+)`", first)]
    for name, cache in found.items():
        is_constant = type(cache) in (dict, loaded) and name.rpartition(".")[2].isupper()
        bound = cache.cache_parameters()["maxsize"] if hasattr(cache, "cache_parameters") else None
        assert is_constant or bound is not None or any(x is cache for x in told), name


@on_ranks(1)
def test_classes_of_modules_under_a_plan_go_with_them(axis: Any) -> None:
    class Planned(Core):
        pass

    modules = [Planned() for _ in range(2)]
    for module in modules:
        cp_mesh.parallelize(module, axis, {"": cp_mesh.ContextParallel(cp_mesh.ShardedSequence(axis))})
    assert type(modules[0]) is type(modules[1]) is not Planned
    left = [weakref.ref(Planned), weakref.ref(type(modules[0]))]
    del Planned, modules, module
    gc.collect()
    assert [x() for x in left] == [None, None]


def resident() -> float:
    """Of this process, in MiB, without what is free."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20


GROWTH = 8.0  # MiB


@pytest.mark.more("runs")
@pytest.mark.full
@on_ranks(2, timeout=600.0)
def test_memory_does_not_grow_with_shapes(axis: Any, full: bool) -> None:
    """In 600 steps, once caches are full: 4 MiB. With lengths to 400 a cache of geometry without a bound grew 9 and 16,
    one of plans 14."""
    steps, begin = (1000, 400) if full else (120, 60)
    random_ = random.Random(0)
    sizes = []
    for step in range(steps + 1):
        if step in (begin, steps):
            sizes.append(resident())
        length = random_.randrange(8, 300)
        layout = random_.choice([ZigZag(), Striped(), Contiguous()])
        ids = torch.randint(0, length // 8, (1, length), generator=torch.Generator().manual_seed(step)).sort().values
        documents, method = random_.choice([None, ids]), random_.choice(["ring", "all_gather", "ulysses"])
        mask = Mask(documents=documents, window=(random_.randrange(1, length), 0))
        if step % 3 == 0:
            layout = cp_mesh.balance(Mask(documents=ids), length, 2)
        sequence = cp_mesh.ShardedSequence(axis, layout, length=length, pad=False)
        x = sequence.shard({"x": torch.ones(1, length, 8)})["x"].requires_grad_()
        q = x.unflatten(-1, (2, 4)).transpose(1, 2)
        options = {"mask": mask, "layout": layout, "seq_len": length, "method": method}
        attention(q, q, q, mesh=axis, **options).sum().backward()
    before, after = sizes
    assert all((x.cache_info().currsize if hasattr(x, "cache_info") else len(x)) <= 1024 for x in cached().values())
    assert after - before < GROWTH, f"{before:.1f} to {after:.1f} MiB"
