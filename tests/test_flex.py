"""Flex: functions of users see global indices in every layout and method, and what they capture gets its gradient."""

from __future__ import annotations

import functools
import linecache
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import product
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist
from cases import LAYOUTS, gap
from checks import TOLERANCE, to_format
from covering import Row, covering_array
from dense import make_qkv
from flex_uses import ALL, MASKS, PARTS, SCORES, Case, expected, graded, integers, leaves_of, mask_of, numbers
from inside import NUM_TENSORS, AttentionSpec, inner, room, trace
from ranks import mesh, on_ranks, refused
from torch import Tensor
from torch.autograd import forward_ad
from torch.distributed.tensor import DTensor, Partial, Shard, distribute_tensor
from torch.nn.attention import flex_attention as of_torch
from torch.utils.checkpoint import checkpoint

import cp_mesh
from cp_mesh import ArgumentError, Mask, RankMismatchError, ShardedSequence, UnsupportedError, ZigZag, flex_attention
from cp_mesh.flex import create_block_mask
from cp_mesh.training import checkpoint_context_fn

ops = room("op")
read_mask = inner("block_mask", "read_mask")
functions = room("functions")

B, D, E, S = 2, 5, 4, 12
HEADS = {2: (4, 2), 3: (6, 3), 4: (4, 2)}
METHODS = {
    "ring": {}, "all_gather": {}, "ulysses": {}, "hybrid": {"ulysses_degree": 2},
    "heads in chunks": {"method": "ring", "head_chunks": 1},
}  # fmt: skip
FACTORS: dict[str, Sequence[Any]] = {
    "cp_size": (2, 3, 4),
    "layout": ("contiguous", "zigzag", "striped", "shuffled", "joint"),
    "method": tuple(METHODS),
    "score": tuple(name for name in SCORES if "causal" not in name),
    "mask": tuple(MASKS),
}


def goes_together(row: Row) -> bool:
    """Of three ranks there is no group of two."""
    return not (row.get("cp_size") == 3 and row.get("method") == "hybrid")


def options_of(method: str, num_kv_heads: int) -> dict[str, Any]:
    options = {"method": method} | METHODS[method]
    return options | ({"head_chunks": num_kv_heads} if "head_chunks" in options else {})


def check(case: Case) -> None:
    """This rank's part of a call is that of dense attention in fp64."""
    cp_size, rank = dist.get_world_size(), dist.get_rank()
    axis, heads, layout = mesh((cp_size,), ("cp",)), HEADS[cp_size], LAYOUTS[case.layout](case.S)
    *qkv, dout = make_qkv(B, *heads, case.S, D, E)
    dlse, rows = numbers(B, heads[0], case.S), layout.positions(case.S, cp_size, rank)
    want = expected(qkv, dout, dlse, case.score, case.mask, case.options.get("scale"), case.beside)

    local = [to_format(x[:, :, rows], case.seq_dim).clone().requires_grad_() for x in qkv]
    t, mask = leaves_of(SCORES[case.score].tensors(B, heads[0], case.S)), mask_of(case.mask)
    block_mask, mask_mod = None, mask.make(mask.tensors(B, heads[0], case.S))
    if mask_mod is not None and case.of == "torch":
        block_mask = of_torch.create_block_mask(mask_mod, B, heads[0], case.S, case.S, device="cpu", BLOCK_SIZE=8)
    elif mask_mod is not None:
        sequence = ShardedSequence(axis, layout, length=case.S, pad=False) if case.of == "sequence" else None
        block_mask = create_block_mask(mask_mod, B, heads[0], case.S, case.S, sequence)
    options = {"mesh": axis, "layout": layout, "seq_dim": case.seq_dim, "enable_gqa": True, "mask": case.beside}
    options |= options_of(case.method, heads[1]) | case.options | ({} if case.sharded else {"seq_len": case.S})
    given = [DTensor.from_local(x, axis, [Shard(case.seq_dim)]) for x in local] if case.sharded else local
    out, lse = flex_attention(*given, SCORES[case.score].make(t), block_mask, return_lse=True, **options)
    out, lse = (x.to_local() if case.sharded else x for x in (out, lse))
    found = torch.autograd.grad(
        (out, lse), [*local, *graded(t).values()], (to_format(dout[:, :, rows], case.seq_dim), dlse[:, :, rows])
    )
    for (name, whole), got in zip(want.items(), (out, lse, *found), strict=True):
        if name in ("out", "lse", "dq", "dk", "dv"):
            whole = whole[:, :, rows] if name == "lse" else to_format(whole[:, :, rows], case.seq_dim)
        else:
            got = got.detach().clone()
            dist.all_reduce(got)
        assert gap(got, whole) <= TOLERANCE, (case, name)


def rotating() -> dict[int, list[Case]]:
    """Every score and every mask, with the other factors in turn; by number of ranks."""
    cases: dict[int, list[Case]] = {2: [], 3: [], 4: []}
    layouts, masks, scores = FACTORS["layout"], FACTORS["mask"], FACTORS["score"]
    uses = [(score, masks[i % len(masks)]) for i, score in enumerate(scores)]
    uses += [(scores[3 * i % len(scores)], mask) for i, mask in enumerate(masks)]
    for i, (score, mask) in enumerate(uses):
        cp_size = (4, 2, 3)[i % 3]
        methods = [m for m in METHODS if goes_together({"cp_size": cp_size, "method": m})]
        case = Case(layouts[i % len(layouts)], methods[i // 3 % len(methods)], score, mask, (21, 13)[i % 2])
        cases[cp_size].append(
            replace(case, of=("", "torch")[i // 4 % 2], seq_dim=(2, 1)[i // 2 % 2], beside=(ALL, Mask())[i // 5 % 2])
        )
    return cases


FEW = [
    Case("zigzag", "ring", "pair bias", "causal"),
    Case("striped", "ring", "relative table", "documents"),
    Case("contiguous", "ulysses", "scale of a head", "windows of heads"),
    Case("zigzag", "heads in chunks", "ALiBi", "windows of heads"),
    Case("striped", "ring", "no number where a causal mask hides", "causal"),
    Case("shuffled", "all_gather", "two through each other", "prefix", seq_dim=1, options={"scale": 0.7}),
]
"""Those that planted bugs meet."""


def few_tokens() -> list[Case]:
    """Ranks and inner groups without a token, and no token at all: functions read tensors that have no elements."""
    scores = [name for name in SCORES if name not in ("relative table", "read from the end", "through an integer map")]
    scores, masks = [name for name in scores if "causal" not in name], list(MASKS)
    cases = []
    for i, (method, S) in enumerate(product(METHODS, (0, 1, 2, 0, 3, 0))):
        layout, score, mask = ("contiguous", "shuffled")[i % 2], scores[i % len(scores)], masks[i % len(masks)]
        cases.append(Case(layout, method, score, mask, S, seq_dim=(2, 1)[i % 2]))
    cases += [Case("zigzag", score=score, S=0) for score in scores]
    cases += [Case("zigzag", mask=mask, S=0) for mask in masks]
    return [*cases, Case("zigzag", mask="documents", S=0, of="torch")]


def pairs_of_factors(cp_size: int) -> list[Case]:
    rows = [row for row in covering_array(FACTORS, 2, goes_together) if row["cp_size"] == cp_size]
    return [Case(**{name: x for name, x in row.items() if name != "cp_size"}) for row in rows]


OF_PARTS = [*PARTS, "causal", "windows of heads"]
OF_SEQUENCES = {
    2: [
        *(Case(("striped", "joint")[i % 2], ("ulysses", "ring")[i % 2], mask=mask) for i, mask in enumerate(OF_PARTS)),
        Case("contiguous", "ring", "relative table", "causal", 24, sharded=True),
    ],
    3: [
        *(
            Case(layout, ("ring", "all_gather")[i % 2], "relative table", mask)
            for i, (mask, layout) in enumerate(product(OF_PARTS, ("contiguous", "zigzag")))
        ),
        Case("contiguous", mask="long documents", beside=Mask(window=(4, 0))),
        Case("zigzag", mask="short documents", beside=Mask(documents=torch.arange(21) // 5)),
    ],
    4: [Case("contiguous", "hybrid", mask="long documents"), Case("zigzag", "hybrid", mask="later ones")],
}
"""With masks that were made for the sequence, which spare what they hide."""


def every_mask_of_a_sequence(cp_size: int) -> list[Case]:
    methods = {2: ("ring", "ulysses", "all_gather"), 3: ("ring", "all_gather"), 4: [*METHODS][:4]}[cp_size]
    layouts = ("contiguous", "zigzag", "striped", "shuffled", "balanced")
    uses = enumerate(product(OF_PARTS, layouts))
    return [Case(layout, methods[i % len(methods)], mask=mask, of="sequence") for i, (mask, layout) in uses]


NIGHTLY = pytest.mark.nightly("parity")
GROUPS: dict[str, tuple[int, Callable[[int], list[Case]], tuple[Any, ...]]] = {
    "a few": (2, lambda n: FEW, ()),
    **{f"every function on {n}": (n, lambda n: rotating()[n], (pytest.mark.full,) * (n != 3)) for n in HEADS},
    "few tokens": (3, lambda n: [Case("contiguous", "ring", "relative table", "causal", S=S) for S in (1, 2, 3)], ()),
    "few tokens by every method": (4, lambda n: few_tokens(), (pytest.mark.full,)),
    **{f"each two of all factors on {n}": (n, pairs_of_factors, (NIGHTLY,)) for n in HEADS},
    **{
        f"masks of sequences on {n}": (n, lambda n: [replace(x, of="sequence") for x in OF_SEQUENCES[n]], ())
        for n in HEADS
    },
    **{f"every mask of a sequence on {n}": (n, every_mask_of_a_sequence, (pytest.mark.full,)) for n in HEADS},
}
"""By name: ranks, cases, and the forms that run them."""


@pytest.mark.parametrize(
    ("cp_size", "group"), [pytest.param(n, name, marks=marks) for name, (n, _, marks) in GROUPS.items()]
)
@on_ranks("cp_size", timeout=600)
def test_functions(cp_size: int, group: str) -> None:
    for case in GROUPS[group][1](cp_size):
        check(case)


WAYS_TO_READ: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "index": lambda x, i: x[i].sum(),
    "a computed index": lambda x, i: x[(i + 1) % 2].sum(),
    "a number": lambda x, i: x[0, 0],
    "index_select": lambda x, i: x.index_select(-2, i).sum(),
    "gather": lambda x, i: x.gather(0, i.expand(1, 3)).sum(),
    "take": lambda x, i: x.take(i),
    "embedding": lambda x, i: torch.nn.functional.embedding(i, x).sum(),
    "of what is computed": lambda x, i: x.cumsum(0)[i].sum(),
    "of all": lambda x, i: x.flatten()[i],
    "no features": lambda x, i: x[:, :0][i].sum(),
}


@pytest.mark.full
@on_ranks(2)
def test_tensors_without_elements(axis: Any) -> None:
    """Ways to read a tensor of no tokens, whose gradient has no elements, and one of some tokens."""
    for (name, way), S, of in product(WAYS_TO_READ.items(), (0, 2), (None, ShardedSequence(axis))):
        q, x = torch.zeros(1, 1, S // 2, 4, requires_grad=True), numbers(S, 3).requires_grad_()
        read = functools.partial(way, x)
        mask = create_block_mask(lambda b, h, i, j, read=read: read(i) > -9, None, None, S, S, of)
        out = flex_attention(q, q, q, lambda s, b, h, i, j, r=read: s + r(i) * r(j), mask, mesh=axis, seq_len=S)
        grads = torch.autograd.grad(out.sum(), (q, x))
        assert [y.shape for y in (out, *grads)] == [q.shape, q.shape, x.shape], (name, S)


@pytest.mark.full
@on_ranks(4)
def test_captured_tensors_of_any_stride(rank: int, axis: Any) -> None:
    """Captured tensors of one element, with a stride that is not 1, are those that follow each other."""
    *qkv, dout = (x[:, :, 3 * rank : 3 * rank + 3] for x in make_qkv(B, 8, 8, S, D))
    for method in METHODS:
        found = []
        for x in (torch.tensor([0.5, 0.25]).double()[::2], torch.tensor([0.5]).double()):
            leaves = [*(y.clone().requires_grad_() for y in qkv), x.requires_grad_()]
            mask = create_block_mask(lambda b, h, i, j, x=x: x[h * 0] * i >= x[0] * j, None, None, S, S)
            options = {"mesh": axis, "layout": cp_mesh.Contiguous()} | options_of(method, 8)
            with cp_mesh.check_mode():
                out = flex_attention(*leaves[:3], lambda s, b, h, i, j, x=x: s * x[h * 0] - i * x[0], mask, **options)
            found.append([out, *torch.autograd.grad(out, leaves, dout)])
        assert all(gap(a, b) == 0 for a, b in zip(*found, strict=True)), method


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@on_ranks(1, timeout=300)
def test_as_torchs_function(axis: Any) -> None:
    """One rank against torch's own function, forward: it has no backward on CPUs."""
    q, k, v, _ = make_qkv(B, 4, 2, 24, 8)
    for i, (score, use) in enumerate((name, x) for name, x in SCORES.items() if "causal" not in name):
        mask = [*MASKS.values()][i % len(MASKS)]
        score_mod, mask_mod = (x.make(x.tensors(B, 4, 24)) for x in (use, mask))
        block_mask = of_torch.create_block_mask(mask_mod, B, 4, 24, 24, device="cpu") if mask_mod else None
        with mock.patch.object(of_torch, "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG", True):
            want = of_torch.flex_attention(q, k, v, score_mod, block_mask, enable_gqa=True)
        got = flex_attention(q, k, v, score_mod, block_mask, enable_gqa=True, mesh=axis)
        assert gap(got, want) <= TOLERANCE, (score, mask)


# --- what is captured
@on_ranks(3)
def test_parameters_views_and_constants(rank: int, axis: Any) -> None:
    """Of a detached view, a constant and what has no use there is no gradient."""
    S = 24
    q, k, v, dout = make_qkv(B, 4, 4, S, D)
    weight, gain = numbers(2 * S, 4).requires_grad_(), numbers().requires_grad_()
    i, j = torch.arange(S)[:, None], torch.arange(S)
    x = q @ k.mT * D**-0.5 + weight.T[:, i - j + S] * gain + numbers(S) + weight[:S, 0].detach()[:, None] + 0.5
    want = torch.autograd.grad(x.softmax(-1) @ v, (weight, gain), dout)
    q, k, v, dout = (x[:, :, ZigZag().positions(S, axis.size(), rank)] for x in (q, k, v, dout))
    table = torch.nn.Embedding.from_pretrained(numbers(2 * S, 4), freeze=False)
    gain, unused, fixed = torch.nn.Parameter(numbers()), torch.nn.Parameter(numbers(2)), numbers(S)

    def score_mod(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        unused[0]  # read, and of no use
        mine = table.weight.T[h, q_idx - kv_idx + S] * gain
        return score + mine + fixed[kv_idx] + table.weight.detach()[q_idx, 0] + torch.tensor(0.5)

    (flex_attention(q, k, v, score_mod, mesh=axis) * dout).sum().backward()
    assert unused.grad is None and fixed.grad is None
    for x, y in zip((table.weight.grad, gain.grad), want, strict=True):
        dist.all_reduce(x)
        assert gap(x, y) <= TOLERANCE


@pytest.mark.parametrize("method", ("ring", "ulysses"))
@on_ranks(2)
def test_captured_gradients_are_summed_in_fp32(rank: int, axis: Any, method: str) -> None:
    """bfloat16 against the same call whose captured tensors came as float32, of which all sums are float32."""
    q, k, v, dout = (x[:, :, ZigZag().positions(48, 2, rank)].bfloat16() for x in make_qkv(B, 4, 2, 48, D))
    grads = []
    for cast in (lambda x: x, Tensor.float):
        t = {"bias": cast(numbers(4).bfloat16()), "slope": cast(numbers().bfloat16())}
        leaves = [x.requires_grad_() for x in t.values()]
        call = {"mesh": axis, "enable_gqa": True, "method": method}
        out = flex_attention(q, k, v, lambda s, b, h, i, j, t=t: s * (1 + t["slope"]) + t["bias"][(i + j) % 4], **call)
        grads.append(torch.autograd.grad(out, leaves, dout))
    for got, want in zip(*grads, strict=True):
        assert got.dtype == torch.bfloat16 and torch.equal(got, want.bfloat16()), "not rounded once"


@pytest.mark.parametrize("cp_size", (2, pytest.param(3, marks=pytest.mark.full)))
@on_ranks("cp_size")
def test_parts_that_are_made_whole(rank: int, axis: Any, cp_size: int) -> None:
    """Captured tensors of which each rank holds a part: results, and gradients of parts."""
    H, S = 4, 24
    *qkv, dout = make_qkv(B, H, H, S, D)
    gate, table = numbers(B, H, S).requires_grad_(), numbers(12, S).requires_grad_()
    scores = qkv[0] @ qkv[1].mT * D**-0.5 + gate[:, :, None]
    want = (scores + table.unflatten(0, (3, H))[0][:, :, None]).softmax(-1) @ qkv[2]
    grads = torch.autograd.grad(want, (gate, table), dout)
    for name in ("zigzag", "striped", "contiguous", "shuffled"):
        sequence = ShardedSequence(axis, layout=LAYOUTS[name](S), length=S)
        rows = sequence.positions()
        part = gate.detach()[:, :, rows].requires_grad_()
        sharded = DTensor.from_local(table.detach().chunk(cp_size)[rank], axis, [Shard(0)]).requires_grad_()
        keys, heads = sequence.unshard(part, 2), sharded.full_tensor(grad_placements=[Partial()])

        def score_mod(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor, x: Any = keys, y: Any = heads) -> Any:
            return score + x[b, h, j] + y[h, i]

        local = [x[:, :, rows] for x in qkv]
        out = flex_attention(*local, score_mod, mesh=axis, layout=sequence.layout, seq_len=S)
        of_part, of_table = torch.autograd.grad(out, (part, sharded), dout[:, :, rows])
        found = {"out": (out, want[:, :, rows]), "gate": (of_part, grads[0][:, :, rows])}
        for what, pair in (found | {"table": (of_table.full_tensor(), grads[1])}).items():
            assert gap(*pair) <= TOLERANCE, (name, what)


@pytest.mark.parametrize(("names", "dim"), [(("cp", "tp"), 1), (("dp", "cp"), 0)])
@on_ranks(4)
def test_dtensors(rank: int, names: tuple[str, str], dim: int) -> None:
    """q, k and v over a mesh of cp and another axis, by which indices of heads or batch rows are global."""
    grid, S = mesh((2, 2), names), 16
    *qkv, dout = make_qkv(4, 4, 4, S, D)
    mask = ("windows of heads", "causal or of one image")[dim == 0]
    want = expected(qkv, dout, None, "pair bias", mask)
    placements = [Shard(2) if name == "cp" else Shard(dim) for name in names]
    local = [distribute_tensor(x, grid, placements).requires_grad_() for x in qkv]
    t, use = leaves_of(SCORES["pair bias"].tensors(4, 4, S)), MASKS[mask]
    block_mask, score_mod = create_block_mask(use.make(use.tensors(4, 4, S)), 4, 4, S, S), SCORES["pair bias"].make(t)
    out, lse = flex_attention(*local, score_mod, block_mask, layout=cp_mesh.Contiguous(), return_lse=True)
    assert all(isinstance(x, DTensor) and x.placements == tuple(placements) for x in (out, lse))
    *grads, share = torch.autograd.grad(out, [*local, t["bias"]], distribute_tensor(dout, grid, placements))
    got = [
        *(x.full_tensor() for x in (out, lse, *grads)),
        DTensor.from_local(share, grid, [Partial()] * 2).full_tensor(),
    ]
    assert all(gap(x, y) <= TOLERANCE for x, y in zip(got, want.values(), strict=True))


# --- how it is called
@pytest.mark.unpoisoned  # opcheck compares two runs bit by bit
@on_ranks(1)
def test_opcheck() -> None:
    """PyTorch's own checks of the ops: fakes, autograd, schemas, and compiled code."""
    S = 6
    q, k, v, dout = make_qkv(B, 4, 2, S, D)
    bias, ids = numbers(S).requires_grad_(), integers(2, S)
    score_mod, captured = trace("score_mod", lambda s, b, h, i, j: s + bias[i] * bias[j], q)
    mask_mod, of_mask = trace("mask_mod", lambda b, h, i, j: ids[i] == ids[j], q)
    handles = {"score_mod": score_mod.handle, "mask_mod": mask_mod.handle}
    options = AttentionSpec("zigzag", Mask(causal=False).spec(), 0.3, differentiable_lse=True, **handles)
    tail = (*[None] * NUM_TENSORS, [*captured, *of_mask], S, 2, dist.group.WORLD.group_name, options.text())
    torch.library.opcheck(ops.attention_op, (q.requires_grad_(), k, v, *tail))
    q = q.detach()
    tail = (*tail[:NUM_TENSORS], [x.detach() for x in (*captured, *of_mask)], *tail[NUM_TENSORS + 1 :])
    out, lse, *_ = ops.attention_op(q, k, v, *tail)
    torch.library.opcheck(ops.attention_backward_op, (dout, q, k, v, out, lse, None, None, *tail, "captured.0"))


@on_ranks(2)
def test_ways_to_call(rank: int, axis: Any) -> None:
    """The same step in a checkpoint, beside other options of checkpoints, in check mode, and compiled around."""
    q, k, v, dout = (x[:, :, ZigZag().positions(24, 2, rank)] for x in make_qkv(B, 4, 4, 24, D))
    bias = numbers(4, 24).requires_grad_()

    def step(q: Tensor) -> Tensor:
        def score_mod(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
            return score + bias[h, q_idx] * bias[h, kv_idx]

        return flex_attention(2 * q, k, v, score_mod, mesh=axis, mask=Mask()) * 3

    of = {
        "eager": step,
        "checkpoint": lambda q: checkpoint(step, q, use_reentrant=False),
        "selective": lambda q: checkpoint(step, q, use_reentrant=False, context_fn=checkpoint_context_fn),
        "check mode": cp_mesh.check_mode()(step),
        "compiled": torch.compile(step, backend="aot_eager"),
    }
    found = {}
    for name, call in of.items():
        x = q.clone().requires_grad_()
        out = call(x)
        found[name] = [out, *torch.autograd.grad(out, (x, bias), dout)]
        assert all(torch.equal(a, b) for a, b in zip(found[name], found["eager"], strict=True)), name
    with pytest.raises(Exception, match="flex_attention"):
        torch.compile(step, backend="eager", fullgraph=True)(q)
    (grad,) = torch.autograd.grad(step(x), bias, dout, create_graph=True)
    with pytest.raises(UnsupportedError, match="differentiated once"):
        grad.sum().backward()


@on_ranks(2)
def test_a_function_that_changes(rank: int, axis: Any) -> None:
    """The same function object in two steps, with another number and another tensor: what it says now counts."""
    rows = ZigZag().positions(S, axis.size(), rank)
    q, k, v, _ = make_qkv(B, 2, 2, S, D)
    state: dict[str, Any] = {}

    def score_mod(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return state["factor"] * score + state["bias"][kv_idx]

    pending = []
    for step in range(3):
        state |= {"factor": step + 0.5, "bias": numbers(S) * (step + 1)}
        x, whole = q[:, :, rows].clone().requires_grad_(), q.clone().requires_grad_()
        out = flex_attention(x, k[:, :, rows], v[:, :, rows], score_mod, mesh=axis)
        scores = state["factor"] * (whole @ k.mT * D**-0.5) + state["bias"]
        pending.append((out, x, scores.softmax(-1) @ v, whole))
    for step, (out, x, want, whole) in enumerate(pending):  # all backwards after all forwards
        (dq,), (of_want,) = (torch.autograd.grad(y.square().sum(), z) for y, z in ((out, x), (want, whole)))
        assert max(gap(out, want[:, :, rows]), gap(dq, of_want[:, :, rows])) <= TOLERANCE, step


TABLE = numbers(S)
WRITTEN: dict[str, Callable[..., Tensor]] = {
    "constants": lambda s, b, h, i, j: s * torch.tensor(0.5) + torch.tensor([0.3, 2.0], dtype=s.dtype)[j % 2],
    "copies of tensors": lambda s, b, h, i, j: (
        s + torch.tensor(s) + torch.as_tensor(i, dtype=s.dtype) + torch.tensor(TABLE)[j]
    ),
    "multiples in indices": lambda s, b, h, i, j: (
        s + TABLE[torch.rsub(i, 3, alpha=-2) % S] + TABLE[torch.rsub(i, j, alpha=2) % S]
        + TABLE[torch.sub(i, 5, alpha=3) % S] + TABLE[torch.add(i, j, alpha=4) % S]
    ),
    "multiples in scores": lambda s, b, h, i, j: (
        torch.add(torch.rsub(torch.sub(s, i, alpha=0.3), 0.5, alpha=0.7), (i > j).double(), alpha=0.1)
        + torch.rsub(s, TABLE[j], alpha=0.2) + torch.add(s, 0.6, alpha=1 / 3)
    ),
}  # fmt: skip


@pytest.mark.filterwarnings("ignore:To copy construct")
@pytest.mark.parametrize("name", WRITTEN)
def test_ways_to_write_a_function(name: str) -> None:
    """As broadcasting computes them, and so their gradients by the score."""
    x, rows, one = numbers(1, 1, S, S).requires_grad_(), torch.arange(S), torch.zeros(1, dtype=torch.int64)
    function, captured = trace("score_mod", WRITTEN[name], x)
    want = WRITTEN[name](x, 0, 0, rows[:, None], rows)
    assert gap(function.of_pairs(x, (one, one, rows, rows), captured), want) <= TOLERANCE
    (of_want,) = torch.autograd.grad(want.sum(), x)
    got, _ = function.gradients(torch.ones_like(x), x, (one, one, rows, rows), captured, (), False)
    assert gap(got, of_want) <= TOLERANCE


@on_ranks(1)
def test_functions_live_until_their_backward(axis: Any) -> None:
    """However many others are traced between."""
    q, k, v, _ = make_qkv(1, 1, 1, 4, D)
    q.requires_grad_()
    texts, many = len(linecache.cache), functions.KEPT + 30
    outs = [flex_attention(q, k, v, lambda s, b, h, i, j, n=n: s * (n + 1), mesh=axis) for n in range(many)]
    first = torch.autograd.grad(outs[0].sum(), q)[0]
    want = torch.autograd.grad((torch.softmax(q @ k.mT * D**-0.5, -1) @ v).sum(), q)[0]
    del outs
    known, plans = len(functions._known), 16
    assert gap(first, want) <= TOLERANCE and known <= functions.KEPT + plans
    assert len(linecache.cache) - texts < functions.KEPT  # each traced function had a text of its own


@on_ranks(1)
def test_deterministic(axis: Any) -> None:
    """Captured gradients are taken where sums have an order, if that was asked for."""
    seen, differentiate = [], torch.autograd.grad
    q, k, v, _ = make_qkv(1, 2, 2, 8, D)
    bias = torch.zeros(8, requires_grad=True)

    def grad(*args: Any, **options: Any) -> Any:
        seen.append(torch.are_deterministic_algorithms_enabled())
        return differentiate(*args, **options)

    for deterministic in (True, None):
        out = flex_attention(q, k, v, lambda s, b, h, i, j: s + bias[i], mesh=axis, deterministic=deterministic)
        with mock.patch.object(torch.autograd, "grad", grad):
            out.sum().backward()
    assert seen == [True, False] and not torch.are_deterministic_algorithms_enabled()


# --- refusals
COUNTER, META, NOTHING = torch.zeros(3), torch.zeros((), device="meta"), torch.zeros(0)
SHORT, THREE, ONE = numbers(4, S - 1), torch.arange(3), torch.tensor(1)
A, U = ArgumentError, UnsupportedError


def branches(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
    return score if q_idx > kv_idx else 2 * score


def without_gradients(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
    with torch.no_grad():
        return score * 2


def placed() -> DTensor:
    return DTensor.from_local(torch.zeros(S // 2), mesh((2,), ("cp",)), [Shard(0)])


def causal(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
    return q_idx >= kv_idx


def other_blocks() -> Any:
    """Blocks of documents beside a mask_mod that is causal, as some trainers make them."""
    num, indices = torch.ones(1, 1, 3, dtype=torch.int32), torch.arange(3, dtype=torch.int32).expand(1, 1, 3, 3)
    indices = torch.stack([indices[0, 0].roll(-n, 1)[n] for n in range(3)])[None, None]
    return of_torch.BlockMask.from_kv_blocks(num, indices, BLOCK_SIZE=4, mask_mod=causal, seq_lengths=(S, S))


def scored(score_mod: Any, **options: Any) -> Callable[[], dict[str, Any]]:
    return lambda: {"score_mod": score_mod, **options}


def masked(mask_mod: Any = causal, Q_LEN: int = S, KV_LEN: int = S, B: int = 1, H: int = 1, **options: Any) -> Any:
    return lambda: {"block_mask": create_block_mask(mask_mod, B, H, Q_LEN, KV_LEN), **options}


READING: dict[str, Callable[[Tensor], Any]] = {
    "float": float, "int": int, "bool": bool, "complex": complex, "item": Tensor.item, "tolist": Tensor.tolist,
    "numpy": Tensor.numpy, "asarray": np.asarray, "from_dlpack": np.from_dlpack, "str": str, "format": "{}".format,
    "data_ptr": Tensor.data_ptr, "storage": Tensor.untyped_storage, "range": range, "index": [7].__getitem__,
    "tensor": lambda x: torch.tensor([x, 1]), "tensor by name": lambda x: torch.tensor(data=[[x]]),
    "as_tensor": lambda x: torch.as_tensor((x,)), "torch.asarray": lambda x: torch.asarray([x]),
    "new_tensor": lambda x: TABLE.new_tensor([x]), "new": lambda x: TABLE.new([x]),
    "LongTensor": lambda x: torch.LongTensor([x]), "Tensor": lambda x: torch.Tensor([x]),
    "sparse": lambda x: torch.sparse_coo_tensor([[0]], [x], (1,)), "full": lambda x: torch.full((), x),
}  # fmt: skip
"""Ways to numbers of a tensor; a trace would keep that of one pair, and of a captured tensor an old one."""


def numbers_of(name: str, tensor: str) -> Callable[[], dict[str, Any]]:
    """A call with a function that reads numbers of an index, of a score, or of a captured tensor."""
    read = READING[name]
    if tensor == "index":
        return masked(lambda b, h, i, j: (read(j), i >= j)[1])
    return scored(lambda s, b, h, i, j: (read({"score": s, "captured": ONE}[tensor]), s)[1])


BLOCKS_FOLLOW = "blocks that follow from its mask_mod"
NO_ELEMENT = r"read at an index: expected 1 element or more of each dim, got \(0,\)"
NOT_WHOLE = r"got a DTensor, .*full_tensor\(grad.*sequence\.unshard\(part, dim"
REFUSED: dict[str, tuple[type[Exception], str, Callable[[], dict[str, Any]]]] = {
    "a branch": (U, "depends on values", scored(branches)),
    "a write": (U, "a write, aten.add_", scored(lambda s, b, h, i, j: (COUNTER.add_(1), s)[1])),
    "random numbers": (U, "random numbers", scored(lambda s, b, h, i, j: s + torch.rand(()))),
    "no_grad": (U, "one grad mode", scored(without_gradients)),
    "a DTensor of parts": (U, NOT_WHOLE, scored(lambda s, b, h, i, j: s + placed()[i])),
    "a mask of a DTensor": (U, NOT_WHOLE, masked(lambda b, h, i, j: placed()[i] >= i)),
    "a DTensor that is made whole inside": (
        U, "call x.full_tensor.* before", scored(lambda s, b, h, i, j: s + placed().full_tensor()[i])
    ),
    "a vector": (A, r"a scalar tensor, got torch.float64 \[12\]", scored(lambda s, b, h, i, j: s + TABLE)),
    "a number": (A, "a scalar tensor, got float", scored(lambda s, b, h, i, j: 0.0)),
    "a mask of integers": (A, "a scalar tensor of bool", masked(lambda b, h, i, j: i - j)),
    "a part of a range": (
        U, "integers, or a full slice", scored(lambda s, b, h, i, j: s + TABLE[:, None][i, 0:1].sum())
    ),
    "no function": (A, "a function of scalars", scored(TABLE)),
    "a function for a mask": (A, "create_block_mask", lambda: {"block_mask": causal}),
    "a mask without a function": (A, "a mask with a mask_mod", masked(None)),
    "a mask of a part": (A, "the whole sequence", masked(Q_LEN=6, KV_LEN=6)),
    "a mask of other heads": (A, "the whole sequence", masked(H=3)),
    "a mask of another batch": (A, "the whole sequence", masked(B=4)),
    "a mask of cross-attention": (U, "equal", masked(Q_LEN=6)),
    "a sliced mask": (
        A, "a whole mask, got a slice",
        lambda: {"block_mask": of_torch.create_block_mask(causal, 1, 1, S, S, device="cpu", BLOCK_SIZE=4)[:, :, :3]},
    ),
    "other blocks": (U, BLOCKS_FOLLOW, lambda: {"block_mask": other_blocks()}),
    "blocks alone": (U, BLOCKS_FOLLOW, lambda: {"block_mask": of_torch.BlockMask.from_kv_blocks(
        *other_blocks().as_tuple()[2:4], BLOCK_SIZE=4, seq_lengths=(S, S)
    )}),
    "heads without enable_gqa": (A, "enable_gqa=True", lambda: {"enable_gqa": False}),
    "a kernel that has none": (
        U, "scores with score_mod", scored(lambda s, b, h, i, j: 2 * s, kernel="cpu_flash")
    ),
    "a kernel without masks": (U, "scores with mask_mod", masked(kernel="cpu_flash")),
    "a tensor that ends before the keys": (
        A, "read at kv_idx: expected 12 elements, got 11", scored(lambda s, b, h, i, j: s + SHORT[h, j])
    ),
    "a tensor that ends before the last token that is cut at": (
        A, "read at q_idx: expected 12 elements, got 11", scored(lambda s, b, h, i, j: s + SHORT[h, i.clamp(max=S - 1)])
    ),
    "a tensor without elements": (A, NO_ELEMENT, scored(lambda s, b, h, i, j: s + NOTHING[i - j])),
    "a mask of a tensor without elements": (A, NO_ELEMENT, masked(lambda b, h, i, j: NOTHING[i] > 0)),
    "a mask that ends before the heads": (
        A, "read at h: expected 4 elements, got 3", masked(lambda b, h, i, j: i >= j + THREE[h], B=B, H=4)
    ),
    "another device": (A, "a tensor on cpu", scored(lambda s, b, h, i, j: s + META)),
}  # fmt: skip
REFUSED |= {
    f"{name} of a {tensor}": (U, "depends on values", numbers_of(name, tensor))
    for name, tensor in product(READING, ("index", "captured", "score"))
    if tensor != "score" or name not in ("range", "index")
}


@on_ranks(2)
def test_refusals(axis: Any) -> None:
    q, k, v, _ = (x[:, :, :6] for x in make_qkv(B, 4, 2, S, D))
    for kind, words, make in REFUSED.values():
        with refused(words, kind):
            flex_attention(q, k, v, **{"enable_gqa": True, "mesh": axis} | make())
    assert not COUNTER.any(), "a captured tensor was written"


def test_blocks_that_list_too_little_or_too_much() -> None:
    """Of the same mask_mod: one block missing; one full that is not; more than needed, which is right."""
    q = numbers(1, 1, S, D)
    every, none = torch.arange(3, dtype=torch.int32).expand(1, 1, 3, 3), torch.zeros(1, 1, 3, dtype=torch.int32)

    def read(*lists: Tensor) -> None:
        given = {"BLOCK_SIZE": 4, "mask_mod": causal, "seq_lengths": (S, S)}
        read_mask(of_torch.BlockMask.from_kv_blocks(*lists, **given), q, (1, 1, S))

    read_mask(of_torch.create_block_mask(causal, 1, 1, S, S, device="cpu", BLOCK_SIZE=4), q, (1, 1, S))
    read(none + 3, every)
    for wrong in ((none + 2, every), (none, every, none + 3, every)):
        with pytest.raises(UnsupportedError, match="follow from its mask_mod"):
            read(*wrong)


@pytest.mark.parametrize(
    ("what", "words"),
    [
        ("a number", "the same score_mod on every cp rank"),
        ("code", "the same score_mod on every cp rank"),
        ("a shape", r"score_mod of captured \[float64\[12\]\]"),
        ("a value", "the same captured tensor 0 of score_mod and mask_mod"),
        ("a mask", "the same mask_mod on every cp rank"),
        ("a refusal", "cp rank 1 raised"),
        *((f"no score_mod on rank {rank}", f"the same score_mod.* cp rank {rank}: missing") for rank in (0, 1)),
        *((f"no mask_mod on rank {rank}", f"the same mask_mod.* cp rank {rank}: missing") for rank in (0, 1)),
    ],
)
@on_ranks(2)
def test_ranks_that_differ(rank: int, axis: Any, what: str, words: str) -> None:
    q, k, v, _ = (x[:, :, :6] for x in make_qkv(B, 4, 4, S, D))
    factor = 2.0 + rank * (what == "a number")
    table = numbers(S + rank * (what == "a shape")) + rank * (what == "a value")

    def score_mod(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        if what == "code" and rank:
            return factor * score - table[kv_idx]
        return factor * score + table[kv_idx]

    refuses = what == "a refusal" and rank == 1
    given = {
        "score_mod": branches if refuses else score_mod,
        "block_mask": create_block_mask(lambda b, h, i, j: i - j >= rank * (what == "a mask"), 1, 1, S, S),
    }
    given = {
        name: x for name, x in given.items() if what != f"no {name.replace('block_mask', 'mask_mod')} on rank {rank}"
    }
    with refused(*(("depends on values", U) if refuses else (words, RankMismatchError))):
        flex_attention(q, k, v, mesh=axis, **given)


@on_ranks(1)
def test_other_derivatives_of_what_is_read_are_refused(axis: Any) -> None:
    """Over what a function reads, which PyTorch would take for a tensor without a derivative."""
    q, k, v, _ = make_qkv(B, 4, 4, S, D)

    def loss(table: Tensor) -> Tensor:
        return flex_attention(q, k, v, lambda score, b, h, i, j: score + table[i - j + S], mesh=axis).sum()

    table = numbers(2 * S)
    for derived in (torch.func.grad(loss), lambda x: torch.func.jvp(loss, (x,), (x,))):
        with pytest.raises(UnsupportedError, match=r"no transform of torch.func around functions.*backward\(\)"):
            derived(table)
    with forward_ad.dual_level(), pytest.raises(UnsupportedError, match="no transform"):
        loss(forward_ad.make_dual(table, table))
    loss(table)


@on_ranks(2)
def test_names_of_equal_functions_are_not_compared(rank: int, axis: Any) -> None:
    """Rank 0 knows the functions already, by other names."""
    q, k, v, _ = (x[:, :, :6] for x in make_qkv(B, 4, 4, S, D))
    others = [("score_mod", lambda score, b, h, q, kv: 1.25 * score), ("mask_mod", lambda *pair: causal(*pair))]
    known = [trace(*other, q) for other in others if rank == 0]

    def score_mod(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return 1.25 * score

    flex_attention(q, k, v, score_mod, create_block_mask(causal, 1, 1, S, S), mesh=axis)
    assert len(known) == 2 * (rank == 0)
