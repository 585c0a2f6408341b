"""Captured DTensors of flex: sharded ones are read whole by global indices, and their gradients are the shards'."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from cases import LAYOUTS, gap
from checks import TOLERANCE, report
from dense import make_qkv
from flex_uses import MASKS, SCORES, dense, integers, numbers
from inside import NUM_TENSORS, AttentionSpec, room, trace
from ranks import mesh, num_collectives
from recording import recording
from test_flex import HEADS, METHODS, options_of
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement
from torch.nn.attention import flex_attention as of_torch
from torch.utils.checkpoint import checkpoint

import cp_mesh
from cp_mesh import (
    ArgumentError,
    Joint,
    Layout,
    Mask,
    RankMismatchError,
    Replicated,
    UnsupportedError,
    ZigZag,
    create_block_mask,
    explain,
    flex_attention,
)

ops = room("op")

B, D = 2, 5
REPLICATED = {"a replicated stream": lambda S: Joint(Replicated(S // 4), (S - S // 4, ZigZag()))}
SHARDED = {
    "a bias of queries, one of keys": {"of_q": 0, "of_k": 1},
    "gate": {"gate": 1},
    "through an integer map": {"bias": 0, "offset": 0},
    "one tensor twice": {"x": 0},
    "pair bias of low rank": {"of_q": 1, "of_k": 1},
    "two through each other": {"b": 0, "which": 0},
    "bias of documents": {"ids": 1},
}
"""The dims of tokens of what scores read; other tensors of theirs are whole."""
SHARDED_IN_MASKS = {"causal": {}, "causal or of one image": {"image": 1}, "some queries without keys": {"keep": 0}}


@dataclass(frozen=True)
class Case:
    """A call of `flex_attention` on local tensors, of which functions read shards."""

    layout: str
    method: str
    score: str
    mask: str = "causal"
    S: int = 21


def cut(x: Tensor, axis: DeviceMesh, dim: int, rows: Tensor) -> tuple[Tensor, DTensor]:
    """This rank's rows as a leaf, and the DTensor of them that functions read."""
    local = x.detach().index_select(dim, rows).requires_grad_(x.is_floating_point())
    whole = torch.empty(x.shape, device="meta")
    return local, DTensor.from_local(
        local, axis, [Shard(dim)] * axis.ndim, run_check=False, shape=whole.shape, stride=whole.stride()
    )


def total(local: Tensor, shape: Sequence[int], at: Sequence[Tensor]) -> Tensor:
    """The sum over all ranks of tensors of this shape that are zero but for a part: this rank's at these indices."""
    whole = local.new_zeros(shape)
    whole[torch.meshgrid(*at, indexing="ij")] = local
    dist.all_reduce(whole)
    return whole


def shards(rank: int, cases: Sequence[Case]) -> list[str]:
    """What is wrong with results, and with gradients of shards, against dense attention in fp64."""
    cp_size, problems = dist.get_world_size(), []
    axis = mesh((cp_size,), ("cp",))
    for case in cases:
        heads = HEADS[cp_size]
        *qkv, dout = make_qkv(B, *heads, case.S, D)
        layout = (LAYOUTS | REPLICATED)[case.layout](case.S)
        rows = layout.positions(case.S, cp_size, rank)
        held = [layout.positions(case.S, cp_size, other) for other in range(rank)]
        is_first = ~torch.isin(rows, torch.cat([*held, rows[:0]]))  # of copies one gives a gradient
        of_score, of_mask = (use.tensors(B, heads[0], case.S) for use in (SCORES[case.score], MASKS[case.mask]))
        t = {name: x.requires_grad_() if x.is_floating_point() else x for name, x in of_score.items()}
        whole = [x.clone().requires_grad_() for x in qkv]
        out, _ = dense(*whole, case.score, case.mask, t, of_mask)
        graded = {name: x for name, x in t.items() if x.requires_grad}
        want = torch.autograd.grad(out, [*whole, *graded.values()], dout)

        read, leaves = {}, {}
        for name, x in t.items():
            dim = SHARDED[case.score].get(name)
            leaves[name], read[name] = (x, x) if dim is None else cut(x, axis, dim, rows)
        in_mask = {
            name: x if (dim := SHARDED_IN_MASKS[case.mask].get(name)) is None else cut(x, axis, dim, rows)[1]
            for name, x in of_mask.items()
        }
        local = [x[:, :, rows].clone().requires_grad_() for x in qkv]
        block_mask = create_block_mask(MASKS[case.mask].make(in_mask), B, heads[0], case.S, case.S)
        options = {"mesh": axis, "layout": layout, "seq_len": case.S, "enable_gqa": True}
        got = flex_attention(
            *local, SCORES[case.score].make(read), block_mask, **options, **options_of(case.method, heads[1])
        )
        inputs = [*local, *(leaves[name] for name in graded)]
        found = torch.autograd.grad(got, inputs, dout[:, :, rows] * is_first[:, None])
        off = {"out": gap(got, out[:, :, rows])}
        for i, name in enumerate(("dq", "dk", "dv", *graded)):
            every, cut_dim = [torch.arange(n) for n in want[i].shape], {"dq": 2, "dk": 2, "dv": 2}.get(name)
            if cut_dim is None:
                cut_dim = SHARDED[case.score].get(name)
            if cut_dim is not None:
                every[cut_dim] = rows
            off[name] = gap(total(found[i], want[i].shape, every), want[i])
        problems += [f"rank {rank}: {case}: {name} is off by {x:.1e}" for name, x in off.items() if not x <= TOLERANCE]
    return problems


def rotating() -> dict[int, list[Case]]:
    """Every score with every number of ranks, with the other factors in turn."""
    cases: dict[int, list[Case]] = {2: [], 3: [], 4: []}
    layouts, masks = ("zigzag", "striped", "contiguous", "shuffled", "a replicated stream"), [*SHARDED_IN_MASKS]
    for i, score in enumerate(SHARDED):
        for cp_size, of_size in cases.items():
            methods = [m for m in METHODS if cp_size != 3 or m != "hybrid"]
            at = i + cp_size
            methods = (
                methods[:2] if layouts[at % 5] in REPLICATED else methods
            )  # ranks may not exchange heads of copies
            case = Case(layouts[at % 5], methods[at % len(methods)], score, masks[at % 3], S=(21, 16)[at % 2])
            of_size.append(case)
    return cases


@pytest.mark.full
@pytest.mark.parametrize(
    "cp_size", (pytest.param(2, marks=pytest.mark.full), 3, pytest.param(4, marks=pytest.mark.full))
)
def test_shards_of_local_tensors(pool: Any, cp_size: int) -> None:
    report(pool(cp_size).run(shards, rotating()[cp_size], timeout=300))


FEW = [
    Case("zigzag", "ring", "a bias of queries, one of keys", "some queries without keys"),
    Case("striped", "ring", "through an integer map"),
    Case("contiguous", "ulysses", "gate", "causal or of one image"),
]


def test_a_few_shards(pool: Any) -> None:
    """Those that planted bugs meet."""
    report(pool(2).run(shards, FEW))


def test_a_rank_without_rows(pool: Any) -> None:
    scores = ("gate", "through an integer map", "two through each other")
    methods = ("ring", "all_gather", "ulysses")
    cases = [Case("contiguous", method, score, S=4) for score, method in zip(scores, methods, strict=True)]
    assert LAYOUTS["contiguous"](4).shard_len(4, 3, 2) == 0
    report(pool(3).run(shards, cases, timeout=120))


# --- beside q, k and v that are DTensors
PLACED: dict[str, tuple[tuple[int, ...], dict[str, int]]] = {
    "of_keys": ((4, 4, 16), {"dp": 0, "tp": 1, "cp": 2}),
    "of_queries": ((16,), {"cp": 0}),
    "of_rows": ((16, 4), {"cp": 0, "tp": 1}),
    "of_heads": ((4,), {"tp": 0}),
    "of_all": ((4,), {}),
}
"""Of each tensor that is read: its shape, and the dim that an axis shards."""


def place(x: Tensor, grid: DeviceMesh, dims: dict[str, int], rows: Tensor) -> tuple[DTensor, list[Tensor]]:
    """A leaf of which this rank holds the rows, and its part of what other axes shard; and the indices of its part."""
    at, placements = [torch.arange(n) for n in x.shape], list[Placement]()
    for i, name in enumerate(grid.mesh_dim_names or ()):
        placements.append(Shard(dims[name]) if name in dims else Replicate())
        if name in dims:
            dim = dims[name]
            at[dim] = rows if name[:2] == "cp" else at[dim].chunk(grid.size(i))[grid.get_local_rank(i)]
    local = x.detach()[torch.meshgrid(*at, indexing="ij")]
    whole = torch.empty(x.shape, device="meta")
    made = DTensor.from_local(local, grid, placements, run_check=False, shape=whole.shape, stride=whole.stride())
    return made.requires_grad_(x.is_floating_point()), at


def dtensors(rank: int, names: tuple[str, str], layout: Layout, options: dict[str, Any]) -> list[str]:
    """Over a mesh of cp and another axis, or of two axes that are cp together; indices of all are global."""
    grid, S, problems = mesh((2, 2), names), 16, []
    is_pair = names == ("cp_ring", "cp_ulysses")
    cp_size = 4 if is_pair else 2
    cp_rank = rank if is_pair else grid.get_local_rank("cp")
    rows = layout.positions(S, cp_size, cp_rank)
    q, k, v, dout = make_qkv(4, 4, 4, S, D)
    t = {name: numbers(*shape).requires_grad_() for name, (shape, _) in PLACED.items()}
    window = 2 + integers(S, 4, S)

    whole = [x.clone().requires_grad_() for x in (q, k, v)]
    i, j = torch.arange(S)[:, None], torch.arange(S)
    scores = whole[0] @ whole[1].mT * D**-0.5 * (1 + t["of_heads"][:, None, None]) + t["of_keys"][:, :, None]
    scores = scores * t["of_queries"][:, None] + t["of_rows"].T[:, :, None] + t["of_all"][:, None, None, None]
    scores = scores.tanh().masked_fill((i - j).abs() >= window[:, :, None], -torch.inf)
    out = scores.softmax(-1) @ whole[2]
    want = torch.autograd.grad(out, (*whole, *t.values()), dout)

    def dims(of: dict[str, int]) -> dict[str, int]:
        return {name: of["cp" if name[:2] == "cp" else name] for name in names if name[:2] in of}

    of_q = dims({"cp": 2, "tp": 1, "dp": 0})
    read = {name: place(x, grid, dims(PLACED[name][1]), rows) for name, x in t.items()}
    (in_mask, _), placed = (
        place(window, grid, dims({"cp": 1, "tp": 0}), rows),
        [place(x, grid, of_q, rows) for x in (q, k, v)],
    )
    x = {name: leaf for name, (leaf, _) in read.items()}

    def score_mod(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        score = score * (1 + x["of_heads"][h]) + x["of_keys"][b, h, kv_idx]
        return (score * x["of_queries"][q_idx] + x["of_rows"].T[h, q_idx] + x["of_all"][b]).tanh()

    block_mask = create_block_mask(lambda b, h, i, j: (i - j).abs() < in_mask[h, i], 4, 4, S, S)
    on = grid if is_pair else None
    got = flex_attention(*(leaf for leaf, _ in placed), score_mod, block_mask, mesh=on, layout=layout, **options)
    found = torch.autograd.grad(got, [leaf for leaf, _ in (*placed, *read.values())], place(dout, grid, of_q, rows)[0])
    for (leaf, at), name, grad, expected in zip(
        (*placed, *read.values()), ("q", "k", "v", *t), found, want, strict=True
    ):
        # a sum is owed over axes of which each rank computes a part; over others all have the same
        owed = [name[:2] == "cp" or name in of_q for name in names]
        expected_at = [
            Partial() if p == Replicate() and sums else p for p, sums in zip(leaf.placements, owed, strict=True)
        ]
        copies = 1 if all(owed) else 2
        if list(grad.placements) != expected_at:
            problems.append(f"rank {rank}: {names}: the gradient of {name} is {grad.placements}, not {expected_at}")
        if not (off := gap(total(grad.to_local(), expected.shape, at) / copies, expected)) <= TOLERANCE:
            problems.append(f"rank {rank}: {names}: the gradient of {name} is off by {off:.1e}")
    return problems


@pytest.mark.parametrize(
    ("names", "options"),
    [
        (("cp", "tp"), {}),
        (("tp", "cp"), {"method": "ulysses"}),
        (("dp", "cp"), {}),
        (("cp", "other"), {}),
        (("cp_ring", "cp_ulysses"), {"method": "hybrid"}),
    ],
)
def test_shards_beside_dtensors(pool: Any, names: tuple[str, str], options: dict[str, Any]) -> None:
    report(pool(4).run(dtensors, names, ZigZag(), options))


def local_heads(rank: int) -> list[str]:
    """Local tensors under tp: heads count from 0, and those of a captured shard are the local ones."""
    grid, S, layout = mesh((2, 2), ("cp", "tp")), 16, ZigZag()
    rows, heads = layout.positions(S, 2, grid.get_local_rank(0)), torch.arange(4).chunk(2)[grid.get_local_rank(1)]
    q, k, v, dout = make_qkv(B, 4, 4, S, D)
    bias = numbers(4, S).requires_grad_()
    want = torch.autograd.grad((q @ k.mT * D**-0.5 + bias[:, None]).softmax(-1) @ v, bias, dout)[0]
    part = [x[:, heads][:, :, rows] for x in (q, k, v, dout)]
    local, read = cut(bias[heads], grid["cp"], 1, rows)
    out = flex_attention(*part[:3], lambda s, b, h, i, j: s + read[h, j], mesh=grid["cp"], layout=layout)
    off = gap(torch.autograd.grad(out, local, part[3])[0], want[heads][:, rows])
    return [] if off <= TOLERANCE else [f"rank {rank}: off by {off:.1e}"]


def test_shards_of_local_heads(pool: Any) -> None:
    report(pool(4).run(local_heads))


# --- how much moves, and how it is summed
def moved(rank: int, dtype: torch.dtype) -> list[list[tuple[str, int, int]]]:
    """Kind, elements given and bytes of an element, of what the tensors that a function reads add to each pass."""
    axis, S, H, layout = mesh((dist.get_world_size(),), ("cp",)), 24, 4, ZigZag()
    rows, found = layout.positions(S, axis.size(), rank), []
    q, k, v, dout = (x[:, :, rows].to(dtype) for x in make_qkv(B, H, 2, S, D))
    (bias, read), (_, of_mask) = (
        cut(numbers(H, S).to(dtype), axis, 1, rows),
        cut(integers(3, S).to(dtype), axis, 0, rows),
    )
    block_mask = create_block_mask(lambda b, h, i, j: of_mask.detach()[i] >= of_mask.detach()[j], None, None, S, S)
    leaves = [q.requires_grad_(), bias]
    before = num_collectives()
    with recording(axis) as notes:
        options = {"mesh": axis, "method": "ring", "enable_gqa": True, "layout": layout}
        out = flex_attention(q, k, v, lambda s, b, h, i, j: s + read[h, i], block_mask, **options)
        num_forward = len(notes.collectives)
        torch.autograd.grad(out, leaves, dout)
    assert not notes.problems, notes.problems
    assert num_collectives() - before == notes.hops + len(notes.collectives), "something was sent past the recording"
    for part in (notes.collectives[:num_forward], notes.collectives[num_forward:]):
        found.append([(x.kind, x.given, x.itemsize) for x in part])
    return found


def test_traffic(pool: Any) -> None:
    """Shards move as they are given, once a pass, and gradients as sums in fp32, of what has one."""
    cp_size, S, H = 3, 24, 4
    gathered = [("all-gather", size * S // cp_size, 2) for size in (H, 1)]
    home = ("reduce-scatter", H * S, 4)
    for forward, backward in pool(cp_size).run(moved, torch.bfloat16):
        assert forward == gathered and backward == [*gathered, home]
    sizes = {"num_heads": H, "num_kv_heads": 2, "head_dim": D, "batch": B, "dtype": torch.bfloat16}
    predicted = [explain(S, cp_size, captured_shards=n * H * S, **sizes).found.moved for n in (1, 2)]
    gathered_twice, summed = 2 * (cp_size - 1) * gathered[0][1] * 2, (cp_size - 1) / cp_size * home[1] * 4
    assert predicted[1] - predicted[0] == gathered_twice + summed


def half(rank: int, method: str) -> list[str]:
    """bfloat16 against the same call whose captured shards came as float32, of which all sums are float32."""
    axis, S, grads, problems = mesh((dist.get_world_size(),), ("cp",)), 48, [], []
    rows = ZigZag().positions(S, axis.size(), rank)
    q, k, v, dout = (x[:, :, rows].bfloat16() for x in make_qkv(B, 4, 2, S, D))
    for dtype in (torch.bfloat16, torch.float32):
        leaves = [cut(numbers(*shape).bfloat16().to(dtype), axis, 0, rows) for shape in ((S,), (S, 4))]
        (_, of_q), (_, of_k) = leaves
        out = flex_attention(
            q, k, v, lambda s, b, h, i, j, x=of_q, y=of_k: s * (1 + x[i]) + y[j, h], mesh=axis, enable_gqa=True,
            method=method,
        )  # fmt: skip
        grads.append(torch.autograd.grad(out, [leaf for leaf, _ in leaves], dout))
    for got, want in zip(*grads, strict=True):
        if got.dtype != torch.bfloat16 or not torch.equal(got, want.bfloat16()):
            problems.append(f"rank {rank}: {got} is not {want}, rounded once")
    return problems


@pytest.mark.parametrize("method", ("ring", "ulysses"))
def test_shards_are_summed_in_fp32(pool: Any, method: str) -> None:
    report(pool(2).run(half, method))


# --- how it is called
def ways(rank: int) -> dict[str, list[Tensor]]:
    """The same step in a checkpoint, in check mode, and compiled around; the shard is a result of a projection."""
    axis, S = mesh((dist.get_world_size(),), ("cp",)), 24
    rows = ZigZag().positions(S, axis.size(), rank)
    q, k, v, dout = (x[:, :, rows] for x in make_qkv(B, 4, 4, S, D))
    weight = numbers(D).requires_grad_()

    def step(q: Tensor) -> Tensor:
        gate = DTensor.from_local(k @ weight, axis, [Shard(2)])  # [B, H, S]
        return flex_attention(2 * q, k, v, lambda s, b, h, i, j: s + gate[b, h, j] * gate[b, h, i], mesh=axis) * 3

    def checked(q: Tensor) -> Tensor:
        with cp_mesh.check_mode():
            return step(q)

    of = {
        "eager": step,
        "checkpoint": lambda q: checkpoint(step, q, use_reentrant=False),
        "selective": lambda q: checkpoint(step, q, use_reentrant=False, context_fn=cp_mesh.checkpoint_context_fn),
        "check mode": checked,
        "compiled": torch.compile(step, backend="aot_eager"),
    }
    found = {}
    for name, call in of.items():
        x = q.clone().requires_grad_()
        out = call(x)
        found[name] = [out, *torch.autograd.grad(out, (x, weight), dout)]
    return found


def test_ways_to_call(pool: Any) -> None:
    for found in pool(2).run(ways):
        for name, results in found.items():
            assert all(torch.equal(x, y) for x, y in zip(results, found["eager"], strict=True)), name


def by_op(rank: int) -> None:
    """PyTorch's own checks of the ops, of shards whose gradients are smaller than what was read."""
    S, rows = 8, ZigZag().positions(8, 2, rank)
    q, k, v, dout = (x[:, :, rows] for x in make_qkv(B, 4, 2, S, D))
    bias = numbers(S)
    score_mod, _ = trace("score_mod", lambda s, b, h, i, j: s + bias[i] * bias[j], q)
    options = AttentionSpec("zigzag", Mask(causal=False).spec(), 0.3, score_mod=score_mod.handle, captured_cuts="0:0@")
    tail = (*[None] * NUM_TENSORS, [bias[rows]], S, 2, dist.group.WORLD.group_name, options.text())
    out, lse, *_ = ops.attention_op(q, k, v, *tail)
    checked = "test_schema", "test_faketensor", "test_aot_dispatch_dynamic"
    given = dout, q, k, v, out, lse, None, None, *tail, "captured.0"
    torch.library.opcheck(ops.attention_op, (q, k, v, *tail), test_utils=checked)
    torch.library.opcheck(ops.attention_backward_op, given, test_utils=checked)


@pytest.mark.unpoisoned  # opcheck compares two runs bit by bit
def test_opcheck(pool: Any) -> None:
    pool(2).run(by_op)


# --- refusals
S = 16


def of(x: Tensor, grid: DeviceMesh, *placements: Placement, size: int | None = None) -> DTensor:
    """A DTensor of this local part; its first dim has ``size``, else what DTensor makes of it."""
    if size is None:
        return DTensor.from_local(x, grid, placements, run_check=False)
    whole = torch.empty(size, *x.shape[1:], device="meta")
    return DTensor.from_local(x, grid, placements, run_check=False, shape=whole.shape, stride=whole.stride())


def made_within() -> Callable[..., Tensor]:
    part, axis = numbers(S // 4), mesh((4,), ("cp",))
    return lambda s, b, h, i, j: s + DTensor.from_local(part, axis, [Shard(0)])[i]


Make = Callable[[DeviceMesh], DTensor]
REFUSED: dict[str, tuple[type[Exception], str, bool, Make]] = {
    "another mesh": (
        ArgumentError, r"mesh: expected the mesh of the cp axis, got DeviceMesh\(tp=2\)", False,
        lambda grid: of(numbers(S // 2), grid["tp"], Shard(0)),
    ),
    "more axes": (
        ArgumentError, "mesh: expected the mesh of the cp axis", False,
        lambda grid: of(numbers(S // 2), grid, Shard(0), Replicate()),
    ),
    "fewer axes": (
        ArgumentError, r"mesh: expected DeviceMesh\(cp=2, tp=2\), as query's", True,
        lambda grid: of(numbers(S // 2), grid["cp"], Shard(0)),
    ),
    "a sum": (
        ArgumentError, "placements: expected Replicate; or Shard", False,
        lambda grid: of(numbers(S), grid["cp"], Partial()),
    ),
    "a sum over tp": (
        ArgumentError, "placements: expected Replicate; or Shard", True,
        lambda grid: of(numbers(S // 2), grid, Shard(0), Partial()),
    ),
    "one dim twice": (
        ArgumentError, "placements: expected Replicate; or Shard", True,
        lambda grid: of(numbers(S // 4), grid, Shard(0), Shard(0)),
    ),
    "another length": (
        ArgumentError, "dim 0, which cp shards: expected 16, the whole sequence, got 18", False,
        lambda grid: of(numbers(9), grid["cp"], Shard(0)),
    ),
    "unequal heads": (
        ArgumentError, "dim 0: expected a multiple of 2, its shards, got 17", True,
        lambda grid: of(numbers(8 + (grid.get_local_rank("tp") == 0)), grid, Replicate(), Shard(0), size=17),
    ),
    "too large": (
        UnsupportedError, r"at most 640 elements, as query has, got 1024; .*attention\(bias=\)", False,
        lambda grid: of(numbers(S // 2, S, 4), grid["cp"], Shard(0)),
    ),
    "other rows": (
        ArgumentError, "on cp rank [01]: expected 8 rows, got [79]", False,
        lambda grid: of(numbers(7 + 2 * grid.get_local_rank("cp")), grid["cp"], Shard(0), size=S),
    ),
}  # fmt: skip


def refuse_all(rank: int) -> list[str]:
    grid, problems = mesh((2, 2), ("cp", "tp")), []
    rows = ZigZag().positions(S, 2, grid.get_local_rank("cp"))
    qkv = make_qkv(B, 4, 4, S, D)[:3]
    local = {"mesh": grid["cp"]}, [x[:, :, rows] for x in qkv]
    placed = {}, [place(x, grid, {"cp": 2, "tp": 1}, rows)[0] for x in qkv]
    for name, (kind, words, beside_dtensors, make) in REFUSED.items():
        (options, inputs), x = placed if beside_dtensors else local, make(grid)
        before = num_collectives()
        with pytest.raises(kind, match=words):
            flex_attention(*inputs, lambda s, b, h, i, j, x=x: s + x.flatten()[i], **options)
        if num_collectives() > before:
            problems.append(f"{name}: refused after a collective")
    before = num_collectives()
    with pytest.raises(UnsupportedError, match="a DTensor made in it; make it outside"):
        flex_attention(*local[1], made_within(), **local[0])
    read = of(numbers(S // 2), grid["cp"], Shard(0))
    with pytest.raises(
        UnsupportedError, match=r"got communication, _c10d_functional\.all_gather.*; read the DTensor itself"
    ):
        flex_attention(*local[1], lambda s, b, h, i, j: s + read.full_tensor()[i], **local[0])
    whole = integers(3, S)
    block_mask = of_torch.create_block_mask(lambda b, h, i, j: whole[i] == whole[j], 1, 1, S, S, device="cpu")
    block_mask.mask_mod = lambda b, h, i, j: read[i] == read[j]
    with pytest.raises(UnsupportedError, match=r"a mask_mod of DTensors; cp_mesh.create_block_mask"):
        flex_attention(*local[1], None, block_mask, **local[0])
    return problems + ["refused after a collective"] * (num_collectives() > before)


def test_refusals(pool: Any) -> None:
    report(pool(4).run(refuse_all))


def differ(rank: int, what: str) -> None:
    axis = mesh((2,), ("cp",))
    q, k, v, _ = (x[:, :, :8] for x in make_qkv(B, 4, 4, S, D))
    whole = what == "placements" and rank
    part = numbers(S)[: S if whole else 8].clone().requires_grad_(not (what == "a gradient" and rank))
    x = of(part, axis, Replicate() if whole else Shard(0))
    flex_attention(q, k, v, lambda s, b, h, i, j: s + x[i], mesh=axis)


@pytest.mark.parametrize(
    ("what", "words"),
    [
        ("placements", r"0 of score_mod and mask_mod .* torch.float64 \['rows'\] on cpu, with a gradient; cp rank 1"),
        ("a gradient", r"0 of score_mod and mask_mod .* with a gradient; .* without a gradient"),
    ],
)
def test_ranks_that_differ(pool: Any, what: str, words: str) -> None:
    for error in pool(2).run_expecting_error(differ, what):
        assert error is not None and error.type == RankMismatchError.__name__, error
        assert re.search(words, error.message), error.message
