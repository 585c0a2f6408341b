"""The hybrid: Ulysses inside, a ring outside, over one axis and a degree, and over the two axes of a mesh."""

from __future__ import annotations

import torch
from checks import Case, parity, report
from dense import make_qkv
from ranks import mesh
from torch.distributed.tensor import DTensor, Shard

from cp_mesh import ShardedSequence, ZigZag, attention


def on_two_axes(rank: int, cases: list[Case]) -> list[str]:
    grid = mesh((2, 2), ("cp_ring", "cp_ulysses"))
    problems = []
    for case in cases:
        problems += parity(case, ShardedSequence(grid).mesh, [])
    q, k, v, _ = make_qkv(2, 4, 2, 24, 6)
    rows = ZigZag().positions(24, 4, rank)
    local = [x[:, :, rows] for x in (q, k, v)]
    got = attention(*local, mesh=grid, method="hybrid")
    placed = [DTensor.from_local(x, grid, [Shard(2), Shard(2)]) for x in local]
    out = attention(*placed, mesh=grid, method="hybrid")
    ring = attention(*local, mesh=grid)
    print((got - ring).abs().max(), (out.to_local() - got).abs().max(), out.placements)
    fn = torch.compile(lambda *x: attention(*x, mesh=grid, method="hybrid"), backend="aot_eager", fullgraph=True)
    print((fn(*local) - got).abs().max())
    print((fn(*placed).to_local() - got).abs().max())
    return problems


def test_two_axes(pool):
    report(pool(4).run(on_two_axes, [Case("zigzag", "causal", 31, (4, 2), method="hybrid")]))
