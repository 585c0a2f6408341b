"""The hybrid: what inner groups hold together, its degree, and the two axes of a mesh as one cp axis.

That it is exact is shown with the other methods in test_parity.py, and what it sends in test_traffic.py.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from cases import LAYOUTS, gap
from dense import dense_attention, dense_mask, make_qkv
from inside import inner
from model import Core
from ranks import mesh, num_collectives, on_ranks
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


RING, TWO, ULYSSES = 2, 3, 2  # two stages of 1 and 2 steps; of two groups a swap, a stage and a swap; two swaps


@pytest.mark.parametrize(
    ("heads", "degree", "count"),
    [
        *(((8, 4), degree, count) for degree, count in ((1, RING), (2, TWO), (4, ULYSSES), (None, ULYSSES))),
        ((8, 2), None, TWO),  # as many as divide the kv heads
        ((6, 1), None, TWO),  # or the query heads
        ((3, 1), None, RING),
    ],
)
@pytest.mark.full
@on_ranks(4)
def test_the_degree_is_used(rank: int, axis: Any, heads: tuple[int, int], degree: int | None, count: int) -> None:
    """By the collectives of a forward, after a first one that makes the groups."""
    q, k, v, _ = (x[:, :, ZigZag().positions(S, 4, rank)] for x in make_qkv(1, *heads, S, 4))
    for _ in range(2):
        before = num_collectives()
        attention(q, k, v, mesh=axis, method="hybrid", ulysses_degree=degree)
    assert num_collectives() - before == count


# Two axes of a mesh.


@pytest.mark.parametrize(
    ("size", "shape", "compiled"),
    [
        (4, (2, 2), False),
        (8, (2, 2, 2), False),
        *(pytest.param(4, shape, False, marks=pytest.mark.full) for shape in ((1, 4), (4, 1))),
        pytest.param(4, (2, 2), True, marks=pytest.mark.nightly("compiled")),
    ],
    ids=str,
)
@pytest.mark.quick("(2, 2)-False")
@on_ranks("size", timeout=180.0)
def test_two_axes_are_one(shape: tuple[int, ...], compiled: bool) -> None:
    """Local tensors, DTensors and a core, over a mesh of two cp axes, and of tp beside them.

    Their own groups are used: to make others would be a collective.
    """
    grid = mesh(shape, ("cp_ring", "cp_ulysses", "tp")[: len(shape)])
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
        assert all(gap(x, y) <= 1e-10 for x, y in zip(all_of, results, strict=True)), words
        stages, swaps = {1: 0, 2: 1, 4: 2}[shape[0]], 2 * (shape[1] > 1)
        assert count == 3 * stages + 2 * swaps, words  # fetch, fetch again and deliver; there and home in both passes


@on_ranks(4)
def test_axes_in_another_order_are_refused() -> None:
    """Ranks of a group are in the order of their numbers, so that of the mesh must be the same."""
    grid = DeviceMesh("cpu", torch.tensor([[0, 2], [1, 3]]), mesh_dim_names=("cp_ring", "cp_ulysses"))
    with pytest.raises(ArgumentError, match=r"ranks that rise along its axes.*name the outer axis first"):
        ShardedSequence(grid)


@on_ranks(4)
def test_verify_proves_it(axis: DeviceMesh) -> None:
    grid = mesh((2, 2), ("cp_ring", "cp_ulysses"))
    sinks = {"sinks": torch.linspace(-1, 1, 4)}
    assert str(verify(grid, seq_len=37, method="hybrid", scores=sinks)).startswith("exact")
    of_two = verify(axis, seq_len=37, method="hybrid", ulysses_degree=2, layout=Striped())
    assert str(of_two).startswith("exact")
