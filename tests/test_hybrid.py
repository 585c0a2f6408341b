"""The hybrid: what inner groups hold together, its degree, and the two axes of a mesh as one cp axis.

That it is exact is shown with the other methods in test_parity.py, and what it sends in test_traffic.py.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from cases import LAYOUTS, gap
from checks import report
from dense import dense_attention, dense_mask, make_qkv
from inside import inner
from model import Core
from ranks import mesh, num_collectives
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from cp_mesh import (
    ArgumentError,
    ContextParallel,
    Contiguous,
    Layout,
    ShardedSequence,
    Striped,
    ZigZag,
    attention,
    parallelize,
)
from cp_mesh.geometry.layouts import Run
from cp_mesh.tools import verify

join, pieces_of_group, rows_of_group = inner("joined_layout", "join", "pieces_of_group", "rows_of_group")

B, H, K, S, D = 2, 8, 4, 24, 6


def wanted() -> list[Tensor]:
    """Inputs q, k, v and dout of the whole sequence, then out, dq, dk and dv."""
    q, k, v, dout = make_qkv(B, H, K, S, D)
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    out, _ = dense_attention(*leaves, dense_mask(S))
    return [q, k, v, dout, out.detach(), *torch.autograd.grad(out, leaves, dout)]


def off(got: Sequence[Tensor], want: Sequence[Tensor], words: str) -> list[str]:
    """What is wrong with out, dq, dk and dv."""
    named = zip(("out", "dq", "dk", "dv"), got, want, strict=True)
    return [f"{words}: {name} is off by {x:.1e}" for name, a, b in named if not (x := gap(a, b)) <= 1e-10]


# What inner groups hold.


@pytest.mark.parametrize(("cp_size", "degree"), [(4, 2), (6, 2), (6, 3), (4, 4)])
@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("length", [0, 3, 13, 48])
def test_an_inner_group_holds_what_its_ranks_hold(length: int, name: str, cp_size: int, degree: int) -> None:
    layout, num = LAYOUTS[name](length), cp_size // degree
    joined = join(layout, degree, cp_size)
    for group in range(num):
        whole = joined.positions(length, num, group)
        given = pieces_of_group(layout, degree, length, cp_size, group)
        ranks = [layout.positions(length, cp_size, group * degree + rank) for rank in range(degree)]
        assert torch.equal(torch.cat([*(piece.positions() for piece in given), whole[:0]]), torch.cat(ranks))
        rows = torch.cat(
            [*(piece.positions() for piece in rows_of_group(layout, degree, length, cp_size, group)), whole[:0]]
        )
        assert torch.equal(whole[rows], torch.cat(ranks))
        assert torch.equal(rows.sort().values, torch.arange(len(whole)))


@pytest.mark.parametrize(
    ("layout", "runs"),
    [
        (Contiguous(), ((Run(0, 1, 6),), (Run(6, 1, 6),))),
        (ZigZag(), ((Run(0, 1, 3), Run(9, 1, 3)), (Run(3, 1, 6),))),
        (Striped(), ((Run(0, 4, 3), Run(1, 4, 3)), (Run(2, 4, 3), Run(3, 4, 3)))),
    ],
    ids=str,
)
def test_few_runs(layout: Layout, runs: tuple[tuple[Run, ...], ...]) -> None:
    """12 tokens, 4 ranks in 2 groups: as few runs as there can be, so as few kernel calls."""
    joined = join(layout, 2, 4)
    if isinstance(layout, ZigZag):
        layout_of_two = [ZigZag().runs(12, 2, group) for group in range(2)]
        assert [joined.runs(12, 2, group) for group in range(2)] == layout_of_two
    assert tuple(joined.runs(12, 2, group) for group in range(2)) == runs


# The degree.


def collectives_by_degree(rank: int, heads: tuple[int, int], degrees: Sequence[int | None]) -> list[int]:
    """Collectives of a forward, after a first one that makes the groups."""
    axis, counts = mesh((4,), ("cp",)), []
    q, k, v, _ = (x[:, :, ZigZag().positions(S, 4, rank)] for x in make_qkv(1, *heads, S, 4))
    for degree in degrees:
        for _ in range(2):
            before = num_collectives()
            attention(q, k, v, mesh=axis, method="hybrid", ulysses_degree=degree)
        counts.append(num_collectives() - before)
    return counts


@pytest.mark.full
def test_the_degree_is_used(pool: Any) -> None:
    """Of the ring two stages, 1 and 2 steps; of two groups a swap, a stage and a swap; of one two swaps."""
    ring, two, ulysses = 2, 3, 2
    assert pool(4).run(collectives_by_degree, (8, 4), [1, 2, 4, None]) == [[ring, two, ulysses, ulysses]] * 4
    assert pool(4).run(collectives_by_degree, (8, 2), [None]) == [[two]] * 4  # as many as divide the kv heads
    assert pool(4).run(collectives_by_degree, (6, 1), [None]) == [[two]] * 4  # or the query heads
    assert pool(4).run(collectives_by_degree, (3, 1), [None]) == [[ring]] * 4


# Two axes of a mesh.


def over_two_axes(rank: int, shape: tuple[int, ...], compiled: bool) -> list[str]:
    """Local tensors, DTensors and a core, over a mesh of two cp axes, and of tp beside them."""
    grid, problems = mesh(shape, ("cp_ring", "cp_ulysses", "tp")[: len(shape)]), []
    *whole, out, dq, dk, dv = wanted()
    cp = grid["cp_ring", "cp_ulysses"]
    sequence = ShardedSequence(cp, ZigZag())
    assert sequence.mesh.ndim == 1 and sequence.cp_size == shape[0] * shape[1]

    def own(x: Tensor) -> Tensor:  # of 8 and 4 heads
        rows = sequence.shard(x, dim=2)
        return rows if len(shape) == 2 else rows.chunk(2, dim=1)[grid.get_local_rank("tp")].contiguous()

    q, k, v, dout, *results = map(own, (*whole, out, dq, dk, dv))

    def hybrid(q: Tensor, k: Tensor, v: Tensor) -> Any:
        return attention(q, k, v, mesh=cp, method="hybrid")

    function = torch.compile(hybrid, backend="aot_eager", fullgraph=True) if compiled else hybrid
    core = parallelize(Core(), sequence.mesh, {"": ContextParallel(sequence, method="hybrid")})
    everywhere = grid, [Shard(2), Shard(2), Shard(1)][: len(shape)]
    calls: list[tuple[str, Any, Any]] = [("local", function, None), ("DTensors", function, everywhere)]
    if not compiled:
        calls += [("core", core, None), ("core of DTensors", core, everywhere)]
        calls += [("core of DTensors over tp", core, (grid["tp"], [Shard(1)]))] if len(shape) == 3 else []
    for words, call, placed in calls:
        given = [x if placed is None else DTensor.from_local(x, *placed) for x in (q, k, v, dout)]
        leaves = [x.detach().requires_grad_() for x in given[:3]]
        before = num_collectives()
        got = call(*leaves)
        got.backward(given[3])
        count, all_of = num_collectives() - before, [got.detach(), *(x.grad for x in leaves)]
        if placed is not None:
            assert all(list(x.placements) == placed[1] for x in all_of)
            all_of = [x.to_local() for x in all_of]
        problems += off(all_of, results, f"{words} over {shape}")
        stages, swaps = {1: 0, 2: 1, 4: 2}[shape[0]], 2 * (shape[1] > 1)
        if count != 3 * stages + 2 * swaps:  # fetch, fetch again and deliver; there and home in both passes
            problems.append(f"{words} over {shape}: {count} collectives")
    return problems


@pytest.mark.parametrize(
    "shape", [(2, 2), (2, 2, 2), *(pytest.param(shape, marks=pytest.mark.full) for shape in ((1, 4), (4, 1)))], ids=str
)
@pytest.mark.quick("(2, 2)")
def test_two_axes_are_one(pool: Any, shape: tuple[int, ...]) -> None:
    """Their own groups are used: to make others would be a collective."""
    report(pool(math.prod(shape)).run(over_two_axes, shape, False))


@pytest.mark.nightly("compiled")
def test_two_axes_compiled(pool: Any) -> None:
    report(pool(4).run(over_two_axes, (2, 2), True, timeout=180.0))


def wrong_order(rank: int) -> str:
    grid = DeviceMesh("cpu", torch.tensor([[0, 2], [1, 3]]), mesh_dim_names=("cp_ring", "cp_ulysses"))
    with pytest.raises(ArgumentError) as raised:
        ShardedSequence(grid)
    return str(raised.value)


def test_axes_in_another_order_are_refused(pool: Any) -> None:
    """Ranks of a group are in the order of their numbers, so that of the mesh must be the same."""
    for words in pool(4).run(wrong_order):
        assert "ranks that rise along its axes" in words and "name the outer axis first" in words


def verified(rank: int) -> list[str]:
    grid = mesh((2, 2), ("cp_ring", "cp_ulysses"))
    axis = mesh((4,), ("cp",))
    sinks = {"sinks": torch.linspace(-1, 1, 4)}
    return [
        str(verify(grid, seq_len=37, method="hybrid", scores=sinks)),
        str(verify(axis, seq_len=37, method="hybrid", ulysses_degree=2, layout=Striped())),
    ]


def test_verify_proves_it(pool: Any) -> None:
    for reports in pool(4).run(verified):
        assert all(words.startswith("exact") for words in reports)
