"""What a fault of one rank does to the others: the result is right, or there is an error in time, and nothing hangs.

Ranks that are lost are those of pools of their own, with short timeouts.
"""

from __future__ import annotations

import gc
import random
import re
import sys
import threading
import time
import weakref
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import faults
import pytest
import torch
import torch.distributed as dist
from faults import LENGTH, MOMENTS, ODD, TIMEOUT, Trainer, late, new_mesh, new_world, out_of_memory, step_with
from ranks import GRACE, Pool, RankFailure, mesh

import cp_mesh
from cp_mesh import Contiguous, Mask, Striped, ZigZag, attention, check_mode

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
        ("killed", "first call", "ring"),
        pytest.param("raising", "first call", "ring", marks=full),
        pytest.param("raising", "backward", "ring", marks=full),
        pytest.param("killed", "loss", "all_gather", marks=full),
        pytest.param("killed", "forward", "ulysses", marks=full),
        pytest.param("killed", "backward", "hybrid", marks=full),
        pytest.param("killed", "forward", "double_ring", marks=full),
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
            says = f"cp rank {ODD} refused its arguments while this rank did not: KeyError" if how == "raising" else says
        assert says in text, f"rank {rank}: {text}"


def delayed(rank: int) -> list[list[float]]:
    """Losses of two steps, without and with a rank that is late at each moment."""
    trainers = [Trainer(mesh((3,), ("cp",))) for _ in range(2)]
    losses = [[trainers[0].step(seed) for seed in range(len(MOMENTS))]]
    nothing = [late if rank == ODD else lambda: None for _ in MOMENTS]
    losses += [[step_with(trainers[1], moment, act, i) for i, (moment, act) in enumerate(zip(MOMENTS, nothing, strict=True))]]
    return losses


def test_a_late_rank_changes_nothing(pool: Any) -> None:
    results = pool(3).run(delayed)
    assert all(losses == results[0][0] for result in results for losses in result), results
    assert len({*results[0][0]}) == len(MOMENTS)


# NaN.

METHODS = {"ring": {}, "all_gather": {}, "ulysses": {}, "hybrid": {"ulysses_degree": 2}, "double_ring": {}}
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


def nans(rank: int, method: str) -> list[tuple[str, dict[str, Rows], dict[str, Rows]]]:
    """What each case makes NaN on this rank, and in the reference kernel on one."""
    grid, found = mesh((4, 1), ("cp", "alone")), []
    for which in "qkv":
        for mask in MASKS:
            for layout in (ZigZag(), Striped()):
                got = with_nan(grid["cp"], which, mask, layout, method=method, **METHODS[method])
                found.append((f"{which}, {mask}", got, with_nan(grid["alone"], which, mask, Contiguous())))
    return found


@pytest.mark.parametrize("method", ["ring", *(pytest.param(x, marks=full) for x in [*METHODS][1:])])
def test_nan_reaches_what_depends_on_it_and_no_more_than_on_one_rank(pool: Any, method: str) -> None:
    """A kernel multiplies what its mask hides by 0, so NaN is in more rows than depend on it; with a mesh in no more."""
    ranks = pool(4).run(nans, method)
    for cases in zip(*ranks, strict=True):
        name, _, dense = cases[0]
        which, mask = name.split(", ")
        want = reached(which, MASKS[mask].allowed(*[torch.arange(LENGTH)] * 2)[-1])
        for result in want:
            got = {row for _, found, _ in cases for row in found[result]}
            assert want[result] <= got <= dense[result], (name, result, got, want[result])
        if which in "qk":  # of these the reference kernel on one rank leaks nothing to other documents' outputs
            assert dense["out"] == want["out"], name


def nan_weights(rank: int) -> list[bool]:
    """Of one token's embedding: whether the loss is NaN on this rank, and whether it all comes to an end."""
    trainer = Trainer(mesh((3,), ("cp",)))
    first = faults.batch(2, LENGTH, 0)["tokens"][:, 0]
    with torch.no_grad():
        weight = trainer.model.embedding.weight.to_local()
        begin = trainer.model.embedding.weight.shape[0] // 3 * rank
        weight[[int(token) - begin for token in first if 0 <= token - begin < len(weight)]] = torch.nan
    loss = trainer.loss(0)
    return [bool(loss.isnan()), trainer.finish(loss) != 0, trainer.step(1) != 0]


def test_the_loss_of_a_nan_is_nan_on_every_rank(pool: Any) -> None:
    assert pool(3).run(nan_weights) == [[True] * 3] * 3


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
            expected = torch.OutOfMemoryError if rank == ODD else RuntimeError
            said = "as planted" if rank == ODD else "never came"
            if type(error) is not expected or said not in str(error):
                problems.append(f"{where}: {error!r}")
            if time.monotonic() - begin > 4 * TIMEOUT:
                problems.append(f"{where}: after {time.monotonic() - begin:.1f} s")
        del error, loss
    return problems


@pytest.mark.parametrize("check", [False, pytest.param(True, marks=full)])
def test_out_of_memory_on_one_rank(lost: Any, full: bool, check: bool, tmp_path: Path) -> None:
    wheres = [*faults.OUT_OF_MEMORY] if full else ["kernel, backward"]
    assert lost(4).run(without_memory, tmp_path, wheres, check, timeout=120.0) == [[]] * 4
