"""Flex: functions of users see global indices in every layout and method, and what they capture gets its gradient."""

from __future__ import annotations

import functools
import linecache
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
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
from flex_uses import MASKS, SCORES, Use, dense, integers, numbers
from inside import NUM_TENSORS, AttentionSpec, inner, room, trace
from ranks import mesh, on_ranks, refused
from recording import recording
from torch import Tensor
from torch.autograd import forward_ad
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.nn.attention import flex_attention as of_torch
from torch.utils.checkpoint import checkpoint

import cp_mesh
from cp_mesh import ArgumentError, Mask, RankMismatchError, UnsupportedError, ZigZag, flex_attention
from cp_mesh.flex import create_block_mask
from cp_mesh.training import checkpoint_context_fn

ops = room("op")
read_mask = inner("block_mask", "read_mask")
functions = room("functions")

B, D, E = 2, 5, 4
HEADS = {2: (4, 2), 3: (6, 3), 4: (4, 2)}
METHODS = {
    "ring": {},
    "all_gather": {},
    "ulysses": {},
    "hybrid": {"ulysses_degree": 2},
    "heads in chunks": {"method": "ring", "head_chunks": 1},
}
FACTORS: dict[str, Sequence[Any]] = {
    "cp_size": (2, 3, 4),
    "layout": ("contiguous", "zigzag", "striped", "shuffled", "joint"),
    "method": tuple(METHODS),
    "score": tuple(name for name in SCORES if "causal" not in name),
    "mask": tuple(MASKS),
}


@dataclass(frozen=True)
class Case:
    """A call of `flex_attention`."""

    layout: str
    method: str
    score: str
    mask: str
    S: int = 21
    seq_dim: int = 2
    of_block_mask: bool = False
    options: dict[str, Any] = field(default_factory=dict)


def goes_together(row: Row) -> bool:
    """Of three ranks there is no group of two."""
    return not (row.get("cp_size") == 3 and row.get("method") == "hybrid")


def options_of(method: str, num_kv_heads: int) -> dict[str, Any]:
    options = {"method": method} | METHODS[method]
    return options | ({"head_chunks": num_kv_heads} if "head_chunks" in options else {})


def leaves_of(use: Use, *sizes: int) -> dict[str, Tensor]:
    return {name: x.clone().requires_grad_() if x.is_floating_point() else x for name, x in use.tensors(*sizes).items()}


def check(case: Case) -> None:
    """This rank's part of a call is that of dense attention in fp64."""
    cp_size, rank = dist.get_world_size(), dist.get_rank()
    axis = mesh((cp_size,), ("cp",))
    heads = HEADS[cp_size]
    *qkv, dout = make_qkv(B, *heads, case.S, D, E)
    dlse = numbers(B, heads[0], case.S)
    score, mask = SCORES[case.score], MASKS[case.mask]
    layout = LAYOUTS[case.layout](case.S)
    rows = layout.positions(case.S, cp_size, rank)

    whole = [x.clone().requires_grad_() for x in qkv]
    t, of_mask = leaves_of(score, B, heads[0], case.S), mask.tensors(B, heads[0], case.S)
    graded = {name: x for name, x in t.items() if x.requires_grad}
    out, lse = dense(*whole, case.score, case.mask, t, of_mask, case.options.get("scale"))
    found = torch.autograd.grad((out, lse), [*whole, *graded.values()], (dout, dlse), materialize_grads=True)
    want = dict(zip(("out", "lse", "dq", "dk", "dv"), (out, lse, *found), strict=False))
    of_captured = dict(zip(graded, found[3:], strict=True))

    local = [to_format(x[:, :, rows], case.seq_dim).clone().requires_grad_() for x in qkv]
    t = leaves_of(score, B, heads[0], case.S)
    block_mask, mask_mod = None, mask.make(of_mask)
    if mask_mod is not None:
        make = of_torch.create_block_mask if case.of_block_mask else create_block_mask
        device = {"device": "cpu", "BLOCK_SIZE": 8} if case.of_block_mask else {}
        block_mask = make(mask_mod, B, heads[0], case.S, case.S, **device)
    options = {"mesh": axis, "layout": layout, "seq_len": case.S, "seq_dim": case.seq_dim, "enable_gqa": True}
    options |= options_of(case.method, heads[1]) | case.options
    out, lse = flex_attention(*local, score.make(t), block_mask, return_lse=True, **options)
    graded = {name: x for name, x in t.items() if x.requires_grad}
    found = torch.autograd.grad(
        (out, lse), [*local, *graded.values()], (to_format(dout[:, :, rows], case.seq_dim), dlse[:, :, rows])
    )
    got = dict(zip(("out", "lse", "dq", "dk", "dv"), (out, lse, *found), strict=False))
    for name, x in got.items():
        expected = want[name][:, :, rows]
        expected = expected if name == "lse" else to_format(expected, case.seq_dim)
        assert gap(x, expected) <= TOLERANCE, (case, name)
    for name, share in zip(graded, found[3:], strict=True):
        total = share.detach().clone()
        dist.all_reduce(total)
        assert gap(total, of_captured[name]) <= TOLERANCE, (case, name)


def rotating() -> dict[int, list[Case]]:
    """Every score and every mask, with the other factors in turn; by number of ranks."""
    cases: dict[int, list[Case]] = {2: [], 3: [], 4: []}
    layouts, masks, scores = FACTORS["layout"], FACTORS["mask"], FACTORS["score"]
    uses = [(score, masks[i % len(masks)]) for i, score in enumerate(scores)]
    uses += [(scores[3 * i % len(scores)], mask) for i, mask in enumerate(masks)]
    for i, (score, mask) in enumerate(uses):
        cp_size = (4, 2, 3)[i % 3]
        methods = [m for m in METHODS if goes_together({"cp_size": cp_size, "method": m})]
        method = methods[i // 3 % len(methods)]
        case = Case(layouts[i % len(layouts)], method, score, mask, S=(21, 13)[i % 2], seq_dim=(2, 1)[i // 2 % 2])
        cases[cp_size].append(case)
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
        cases.append(Case(layout, method, score, mask, S, (2, 1)[i % 2]))
    cases += [Case("zigzag", "ring", score, "none", 0) for score in scores]
    cases += [Case("zigzag", "ring", "none", mask, 0) for mask in masks]
    return [*cases, Case("zigzag", "ring", "none", "documents", 0, of_block_mask=True)]


def pairs_of_factors(cp_size: int) -> list[Case]:
    rows = [row for row in covering_array(FACTORS, 2, goes_together) if row["cp_size"] == cp_size]
    return [Case(**{name: x for name, x in row.items() if name != "cp_size"}) for row in rows]


GROUPS: dict[str, tuple[int, Callable[[], list[Case]], tuple[Any, ...]]] = {
    "a few": (2, lambda: FEW, ()),
    **{f"every function on {n}": (n, lambda n=n: rotating()[n], (pytest.mark.full,) * (n != 3)) for n in (2, 3, 4)},
    "masks of torch": (
        2, lambda: [Case("zigzag", "ring", "none", mask, of_block_mask=True) for mask in MASKS if mask != "none"], ()
    ),
    "few tokens": (3, lambda: [Case("contiguous", "ring", "relative table", "causal", S=S) for S in (1, 2, 3)], ()),
    "few tokens by every method": (4, few_tokens, (pytest.mark.full,)),
    **{
        f"each two of all factors on {n}": (n, lambda n=n: pairs_of_factors(n), (mark,))
        for n, mark in ((3, pytest.mark.full), (2, pytest.mark.nightly("parity")), (4, pytest.mark.nightly("parity")))
    },
}  # fmt: skip
"""By name: ranks, cases, and the forms that run them."""


@pytest.mark.parametrize(
    ("cp_size", "group"), [pytest.param(n, name, marks=marks) for name, (n, _, marks) in GROUPS.items()]
)
@on_ranks("cp_size", timeout=600)
def test_functions(group: str) -> None:
    for case in GROUPS[group][1]():
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
    sequence = cp_mesh.ShardedSequence(axis)
    for (name, way), S in product(WAYS_TO_READ.items(), (0, 2)):
        q, x = torch.zeros(1, 1, S // 2, 4, requires_grad=True), numbers(S, 3).requires_grad_()
        read = functools.partial(way, x)
        for of_sequence in (None, sequence):
            mask_mod = functools.partial(lambda read, b, h, i, j: read(i) > -9, read)
            mask = create_block_mask(mask_mod, None, None, S, S, of_sequence)
            score_mod = functools.partial(lambda read, s, b, h, i, j: s + read(i) * read(j), read)
            out = flex_attention(q, q, q, score_mod, mask, mesh=axis, seq_len=S)
            grads = torch.autograd.grad(out.sum(), (q, x))
            assert [y.shape for y in (out, *grads)] == [q.shape, q.shape, x.shape], (name, S)


@pytest.mark.full
@on_ranks(4)
def test_captured_tensors_of_any_stride(rank: int, axis: Any) -> None:
    """Captured tensors of one element, with a stride that is not 1, are those that follow each other."""
    *qkv, dout = (x[:, :, 3 * rank : 3 * rank + 3] for x in make_qkv(B, 8, 8, 12, D))
    for method in METHODS:
        found = []
        for x in (torch.tensor([0.5, 0.25]).double()[::2], torch.tensor([0.5]).double()):
            leaves = [*(y.clone().requires_grad_() for y in qkv), x.requires_grad_()]
            block_mask = create_block_mask(lambda b, h, i, j, x=x: x[h * 0] * i >= x[0] * j, None, None, 12, 12)
            options = {"mesh": axis, "layout": cp_mesh.Contiguous()} | options_of(method, 8)
            with cp_mesh.check_mode():
                out = flex_attention(
                    *leaves[:3], lambda s, b, h, i, j, x=x: s * x[h * 0] - i * x[0], block_mask, **options
                )
            found.append([out, *torch.autograd.grad(out, leaves, dout)])
        assert all(gap(a, b) == 0 for a, b in zip(*found, strict=True)), method


@pytest.mark.parametrize(("size", "layout"), [(3, "zigzag"), (2, "contiguous")])
@on_ranks("size")
def test_a_mask_beside_the_functions(rank: int, axis: Any, layout: str) -> None:
    """`mask` hides pairs as mask_mod does, and what it hides does not travel."""
    S = 24
    rows = LAYOUTS[layout](S).positions(S, axis.size(), rank)
    q, k, v, _ = (x[:, :, rows] for x in make_qkv(B, 6, 6, S, D))
    options = {"mesh": axis, "layout": LAYOUTS[layout](S), "return_lse": True}

    def window(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return q_idx - kv_idx <= 3

    def both(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return (q_idx - kv_idx <= 3) & (q_idx >= kv_idx)

    calls = {
        "a mask beside": lambda: flex_attention(
            q, k, v, None, create_block_mask(window, None, None, S, S), mask=Mask(), **options
        ),
        "one function": lambda: flex_attention(q, k, v, None, create_block_mask(both, None, None, S, S), **options),
        "causal": lambda: cp_mesh.attention(q, k, v, mask=Mask(), **options),
        "no function": lambda: cp_mesh.attention(q, k, v, mask=Mask(window=(3, 0)), **options),
    }
    results, moved = {}, {}
    for name, call in calls.items():
        with recording(axis) as notes:
            results[name] = call()
        received = torch.tensor(sum(sent.bytes_received for sent in notes.sent))
        dist.all_reduce(received)
        moved[name] = int(received)
    got = results["a mask beside"]
    off = max(gap(x, y) for name in ("one function", "no function") for x, y in zip(got, results[name], strict=True))
    assert moved["a mask beside"] == moved["causal"] and (layout != "contiguous" or moved["causal"] > 0)
    assert moved["one function"] > moved["causal"] or layout != "contiguous"
    assert off <= TOLERANCE


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@on_ranks(1, timeout=300)
def test_as_torchs_function(axis: Any) -> None:
    """One rank against torch's own function, forward: it has no backward on CPUs."""
    S = 24
    q, k, v, _ = make_qkv(B, 4, 2, S, 8)
    scores = FACTORS["score"]
    for score, mask in zip([*scores[: len(MASKS)], *scores[-len(MASKS) :]], [*MASKS] * 2, strict=True):
        t, of_mask = SCORES[score].tensors(B, 4, S), MASKS[mask].tensors(B, 4, S)
        score_mod, mask_mod = SCORES[score].make(t), MASKS[mask].make(of_mask)
        of = {"device": "cpu"}
        block_mask = of_torch.create_block_mask(mask_mod, B, 4, S, S, **of) if mask_mod else None
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
    rows = ZigZag().positions(S, axis.size(), rank)
    q, k, v, dout = (x[:, :, rows] for x in (q, k, v, dout))
    table = torch.nn.Embedding(2 * S, 4, dtype=torch.float64)
    gain, unused, fixed = torch.nn.Parameter(numbers()), torch.nn.Parameter(numbers(2)), numbers(S)
    with torch.no_grad():
        table.weight.copy_(numbers(2 * S, 4))

    def score_mod(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        unused[0]  # read, and of no use
        mine = table.weight.T[h, q_idx - kv_idx + S] * gain
        return score + mine + fixed[kv_idx] + table.weight.detach()[q_idx, 0] + torch.tensor(0.5)

    out = flex_attention(q, k, v, score_mod, mesh=axis)
    (out * dout).sum().backward()
    assert unused.grad is None and fixed.grad is None
    for x, y in zip((table.weight.grad, gain.grad), want, strict=True):
        dist.all_reduce(x)
        assert gap(x, y) <= TOLERANCE


@pytest.mark.parametrize("method", ("ring", "ulysses"))
@on_ranks(2)
def test_captured_gradients_are_summed_in_fp32(rank: int, axis: Any, method: str) -> None:
    """bfloat16 against the same call whose captured tensors came as float32, of which all sums are float32."""
    S = 48
    rows = ZigZag().positions(S, axis.size(), rank)
    q, k, v, dout = (x[:, :, rows].bfloat16() for x in make_qkv(B, 4, 2, S, D))
    grads = []
    for cast in (lambda x: x, Tensor.float):
        t = {"bias": cast(numbers(4).bfloat16()), "slope": cast(numbers().bfloat16())}
        leaves = [x.requires_grad_() for x in t.values()]
        call = {"mesh": axis, "enable_gqa": True, "method": method}
        out = flex_attention(q, k, v, lambda s, b, h, i, j, t=t: s * (1 + t["slope"]) + t["bias"][(i + j) % 4], **call)
        grads.append(torch.autograd.grad(out, leaves, dout))
    for got, want in zip(*grads, strict=True):
        assert got.dtype == torch.bfloat16 and torch.equal(got, want.bfloat16()), "not rounded once"


@pytest.mark.parametrize(("names", "dim"), [(("cp", "tp"), 1), (("dp", "cp"), 0)])
@on_ranks(4)
def test_dtensors(rank: int, names: tuple[str, str], dim: int) -> None:
    """q, k and v over a mesh of cp and another axis, by which indices of heads or batch rows are global."""
    grid, S = mesh((2, 2), names), 16
    layout = cp_mesh.Contiguous()
    q, k, v, dout = make_qkv(4, 4, 4, S, D)
    whole = [x.requires_grad_() for x in (q, k, v)]
    bias = numbers(4, 4, S).requires_grad_()
    window = 2 + torch.arange(4)[:, None] + torch.arange(4)

    def score_mod(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return score + bias[b, h, kv_idx]

    def mask_mod(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return (q_idx - kv_idx).abs() < window[b, h]

    i, j = torch.arange(S)[:, None], torch.arange(S)
    x = q @ k.mT * D**-0.5 + bias[:, :, None]
    x = x.masked_fill((i - j).abs() >= window[:, :, None, None], -torch.inf)
    out, lse = x.softmax(-1) @ v, x.logsumexp(-1)
    want = [out, lse, *torch.autograd.grad(out, (*whole, bias), dout)]

    placements = [Shard(2) if name == "cp" else Shard(dim) for name in names]
    local = [distribute_tensor(x.detach(), grid, placements).requires_grad_() for x in (q, k, v)]
    of_mask = create_block_mask(mask_mod, 4, 4, S, S)
    out, lse = flex_attention(*local, score_mod, of_mask, layout=layout, return_lse=True)
    assert all(isinstance(x, DTensor) and x.placements == tuple(placements) for x in (out, lse))
    *grads, share = torch.autograd.grad(out, [*local, bias], distribute_tensor(dout, grid, placements))
    share = DTensor.from_local(share, grid, [Partial()] * 2)
    got = [x.full_tensor() for x in (out, lse, *grads, share)]
    assert all(gap(x, y) <= TOLERANCE for x, y in zip(got, want, strict=True))


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
    S = 24
    rows = ZigZag().positions(S, axis.size(), rank)
    q, k, v, dout = (x[:, :, rows] for x in make_qkv(B, 4, 4, S, D))
    bias = numbers(4, S).requires_grad_()

    def step(q: Tensor) -> Tensor:
        def score_mod(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
            return score + bias[h, q_idx] * bias[h, kv_idx]

        return flex_attention(2 * q, k, v, score_mod, mesh=axis, mask=Mask()) * 3

    def checked(q: Tensor) -> Tensor:
        with cp_mesh.check_mode():
            return step(q)

    of = {
        "eager": step,
        "checkpoint": lambda q: checkpoint(step, q, use_reentrant=False),
        "selective": lambda q: checkpoint(step, q, use_reentrant=False, context_fn=checkpoint_context_fn),
        "check mode": checked,
        "compiled": torch.compile(step, backend="aot_eager"),
    }
    found = {}
    for name, call in of.items():
        x = q.clone().requires_grad_()
        out = call(x)
        found[name] = [out, *torch.autograd.grad(out, (x, bias), dout)]
    with pytest.raises(Exception, match="flex_attention"):
        torch.compile(step, backend="eager", fullgraph=True)(q)
    out = step(x)
    (grad,) = torch.autograd.grad(out, bias, dout, create_graph=True)
    with pytest.raises(UnsupportedError, match="differentiated once"):
        grad.sum().backward()
    for name, results in found.items():
        assert all(torch.equal(x, y) for x, y in zip(results, found["eager"], strict=True)), name


@on_ranks(2)
def test_a_function_that_changes(rank: int, axis: Any) -> None:
    """The same function object in two steps, with another number and another tensor: what it says now counts."""
    S = 12
    rows = ZigZag().positions(S, axis.size(), rank)
    q, k, v, _ = make_qkv(B, 2, 2, S, D)
    state: dict[str, Any] = {}

    def score_mod(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return state["factor"] * score + state["bias"][kv_idx]

    pending = []
    for step in range(3):
        state |= {"factor": step + 0.5, "bias": numbers(S) * (step + 1)}
        x = q[:, :, rows].clone().requires_grad_()
        out = flex_attention(x, k[:, :, rows], v[:, :, rows], score_mod, mesh=axis)
        whole = q.clone().requires_grad_()
        scores = state["factor"] * (whole @ k.mT * D**-0.5) + state["bias"]
        pending.append((out, x, scores.softmax(-1) @ v, whole))
    for step, (out, x, want, whole) in enumerate(pending):  # all backwards after all forwards
        (dq,), (expected,) = (torch.autograd.grad(y.square().sum(), z) for y, z in ((out, x), (want, whole)))
        assert max(gap(out, want[:, :, rows]), gap(dq, expected[:, :, rows])) <= TOLERANCE, step


WRITTEN: dict[str, tuple[Callable[..., Tensor], Callable[[Tensor, Tensor, Tensor], Tensor]]] = {
    "constants": (
        lambda s, b, h, i, j: s * torch.tensor(0.5) + torch.tensor([0.3, 2.0], dtype=s.dtype)[j % 2],
        lambda x, i, j: x * 0.5 + torch.tensor([0.3, 2.0], dtype=x.dtype)[j % 2],
    ),
    "copies of tensors": (
        lambda s, b, h, i, j: s + torch.tensor(s) + torch.as_tensor(i, dtype=s.dtype) + torch.tensor(TABLE)[j],
        lambda x, i, j: x + x.detach() + i + TABLE[j],
    ),
    "multiples in indices": (
        lambda s, b, h, i, j: s + TABLE[torch.rsub(i, 3, alpha=-2) % S] + TABLE[torch.rsub(i, j, alpha=2) % S]
        + TABLE[torch.sub(i, 5, alpha=3) % S] + TABLE[torch.add(i, j, alpha=4) % S],
        lambda x, i, j: x + TABLE[(3 + 2 * i) % S] + TABLE[(j - 2 * i) % S]
        + TABLE[(i - 15) % S] + TABLE[(i + 4 * j) % S],
    ),
    "multiples in scores": (
        lambda s, b, h, i, j: torch.add(torch.rsub(torch.sub(s, i, alpha=0.3), 0.5, alpha=0.7), i > j, alpha=0.1)
        + torch.rsub(s, TABLE[j], alpha=0.2) + torch.add(s, 0.6, alpha=1 / 3) * torch.add(i < j, True, alpha=3),
        lambda x, i, j: 0.5 - 0.7 * (x - 0.3 * i.double()) + 0.1 * (i > j).double() + TABLE[j] - 0.2 * x
        + x + 0.6 * (1 / 3),
    ),
}  # fmt: skip


@pytest.mark.filterwarnings("ignore:To copy construct")
@pytest.mark.parametrize("name", WRITTEN)
def test_ways_to_write_a_function(name: str) -> None:
    """As broadcasting computes them, and so their gradients by the score."""
    score_mod, dense_score = WRITTEN[name]
    x, rows, one = numbers(1, 1, S, S).requires_grad_(), torch.arange(S), torch.zeros(1, dtype=torch.int64)
    function, captured = trace("score_mod", score_mod, x)
    want = dense_score(x, rows[:, None], rows)
    assert gap(function.of_pairs(x, (one, one, rows, rows), captured), want) <= TOLERANCE
    (of_want,) = torch.autograd.grad(want.sum(), x)
    got, _ = function.gradients(torch.ones_like(x), x, (one, one, rows, rows), captured, (), False)
    assert gap(got, of_want) <= TOLERANCE


@on_ranks(1)
def test_functions_live_until_their_backward(axis: Any) -> None:
    """However many others are traced between."""
    S = 4
    q, k, v, _ = make_qkv(1, 1, 1, S, D)
    q.requires_grad_()
    texts = len(linecache.cache)
    outs = [
        flex_attention(q, k, v, lambda s, b, h, i, j, n=n: s * (n + 1), mesh=axis) for n in range(functions.KEPT + 30)
    ]
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
S = 12


def branches(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
    return score if q_idx > kv_idx else 2 * score


COUNTER, META, TABLE, NOTHING = torch.zeros(3), torch.zeros((), device="meta"), numbers(S), torch.zeros(0)
SHORT, THREE, ONE = numbers(4, S - 1), torch.arange(3), torch.tensor(1)


def counts(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
    COUNTER.add_(1)
    return score


def without_gradients(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
    with torch.no_grad():
        return score * 2


def placed(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
    table = DTensor.from_local(torch.zeros(S), mesh((2,), ("cp",)), [Replicate()])
    return score + table[kv_idx]


def causal(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
    return q_idx >= kv_idx


def other_blocks() -> Any:
    """Blocks of documents beside a mask_mod that is causal, as some trainers make them."""
    num, indices = torch.ones(1, 1, 3, dtype=torch.int32), torch.arange(3, dtype=torch.int32).expand(1, 1, 3, 3)
    indices = torch.stack([indices[0, 0].roll(-n, 1)[n] for n in range(3)])[None, None]
    return of_torch.BlockMask.from_kv_blocks(num, indices, BLOCK_SIZE=4, mask_mod=causal, seq_lengths=(S, S))


def masked(**sizes: int) -> Callable[[], Any]:
    of = {"B": 1, "H": 1, "Q_LEN": S, "KV_LEN": S} | sizes
    return lambda: create_block_mask(causal, **of)


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

    def score_mod(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        READING[name]({"score": score, "captured": ONE}[tensor])
        return score

    def mask_mod(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        READING[name](kv_idx)
        return q_idx >= kv_idx

    if tensor == "index":
        return lambda: {"block_mask": create_block_mask(mask_mod, None, None, S, S)}
    return lambda: {"score_mod": score_mod}


REFUSED: dict[str, tuple[type[Exception], str, Callable[[], dict[str, Any]]]] = {
    "a branch": (UnsupportedError, "depends on values", lambda: {"score_mod": branches}),
    "a write": (UnsupportedError, "a write, aten.add_", lambda: {"score_mod": counts}),
    "random numbers": (
        UnsupportedError, "random numbers", lambda: {"score_mod": lambda s, b, h, i, j: s + torch.rand(())}
    ),
    "no_grad": (UnsupportedError, "one grad mode", lambda: {"score_mod": without_gradients}),
    "a DTensor": (UnsupportedError, "a DTensor", lambda: {"score_mod": placed}),
    "a vector": (
        ArgumentError, r"a scalar tensor, got torch.float64 \[12\]",
        lambda: {"score_mod": lambda s, b, h, i, j: s + TABLE},
    ),
    "a number": (ArgumentError, "a scalar tensor, got float", lambda: {"score_mod": lambda s, b, h, i, j: 0.0}),
    "a mask of integers": (
        ArgumentError, "a scalar tensor of bool",
        lambda: {"block_mask": create_block_mask(lambda b, h, i, j: i - j, 1, 1, S, S)},
    ),
    "a part of a range": (
        UnsupportedError, "integers, or a full slice",
        lambda: {"score_mod": lambda s, b, h, i, j: s + TABLE[:, None][i, 0:1].sum()},
    ),
    "no function": (ArgumentError, "a function of scalars", lambda: {"score_mod": numbers(S)}),
    "a function for a mask": (ArgumentError, "create_block_mask", lambda: {"block_mask": causal}),
    "a mask without a function": (
        ArgumentError, "a mask with a mask_mod", lambda: {"block_mask": create_block_mask(None, 1, 1, S, S)}
    ),
    "a mask of a part": (ArgumentError, "the whole sequence", lambda: {"block_mask": masked(Q_LEN=6, KV_LEN=6)()}),
    "a mask of other heads": (ArgumentError, "the whole sequence", lambda: {"block_mask": masked(H=3)()}),
    "a mask of another batch": (ArgumentError, "the whole sequence", lambda: {"block_mask": masked(B=4)()}),
    "a mask of cross-attention": (UnsupportedError, "equal", lambda: {"block_mask": masked(Q_LEN=6)()}),
    "a sliced mask": (
        ArgumentError, "a whole mask, got a slice",
        lambda: {"block_mask": of_torch.create_block_mask(causal, 1, 1, S, S, device="cpu", BLOCK_SIZE=4)[:, :, :3]},
    ),
    "other blocks": (UnsupportedError, "blocks that follow from its mask_mod", lambda: {"block_mask": other_blocks()}),
    "blocks alone": (
        UnsupportedError, "blocks that follow from its mask_mod",
        lambda: {
            "block_mask": of_torch.BlockMask.from_kv_blocks(
                *other_blocks().as_tuple()[2:4], BLOCK_SIZE=4, seq_lengths=(S, S)
            )
        },
    ),
    "heads without enable_gqa": (ArgumentError, "enable_gqa=True", lambda: {"enable_gqa": False}),
    "a kernel that has none": (
        UnsupportedError, "scores with score_mod",
        lambda: {"score_mod": lambda s, b, h, i, j: 2 * s, "kernel": "cpu_flash"},
    ),
    "a kernel without masks": (
        UnsupportedError, "scores with mask_mod", lambda: {"block_mask": masked()(), "kernel": "cpu_flash"}
    ),
    "a tensor that ends before the keys": (
        ArgumentError, "read at kv_idx: expected 12 elements, got 11",
        lambda: {"score_mod": lambda s, b, h, i, j: s + SHORT[h, j]},
    ),
    "a tensor that ends before the last token that is cut at": (
        ArgumentError, "read at q_idx: expected 12 elements, got 11",
        lambda: {"score_mod": lambda s, b, h, i, j: s + SHORT[h, i.clamp(max=S - 1)]},
    ),
    "a tensor without elements": (
        ArgumentError, r"read at an index: expected 1 element or more of each dim, got \(0,\)",
        lambda: {"score_mod": lambda s, b, h, i, j: s + NOTHING[i - j]},
    ),
    "a mask of a tensor without elements": (
        ArgumentError, r"read at an index: expected 1 element or more of each dim, got \(0,\)",
        lambda: {"block_mask": create_block_mask(lambda b, h, i, j: NOTHING[i] > 0, 1, 1, S, S)},
    ),
    "a mask that ends before the heads": (
        ArgumentError, "read at h: expected 4 elements, got 3",
        lambda: {"block_mask": create_block_mask(lambda b, h, i, j: i >= j + THREE[h], B, 4, S, S)},
    ),
    "another device": (ArgumentError, "a tensor on cpu", lambda: {"score_mod": lambda s, b, h, i, j, x=META: s + x}),
}  # fmt: skip
REFUSED |= {
    f"{name} of a {tensor}": (UnsupportedError, "depends on values", numbers_of(name, tensor))
    for name in READING
    for tensor in ("index", "captured", "score")
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
    right = of_torch.create_block_mask(causal, 1, 1, S, S, device="cpu", BLOCK_SIZE=4)
    read_mask(right, q, (1, 1, S))
    every, none = torch.arange(3, dtype=torch.int32).expand(1, 1, 3, 3), torch.zeros(1, 1, 3, dtype=torch.int32)

    def read(*lists: Tensor) -> None:
        given = {"BLOCK_SIZE": 4, "mask_mod": causal, "seq_lengths": (S, S)}
        read_mask(of_torch.BlockMask.from_kv_blocks(*lists, **given), q, (1, 1, S))

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
    factor, table = 2.0, numbers(S)
    factor += rank * (what == "a number")
    table = numbers(S + rank * (what == "a shape")) + rank * (what == "a value")

    def score_mod(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        if what == "code" and rank:
            return factor * score - table[kv_idx]
        return factor * score + table[kv_idx]

    block_mask = create_block_mask(lambda b, h, i, j: i - j >= rank * (what == "a mask"), 1, 1, S, S)
    if what == "a refusal" and rank:
        score_mod = branches
    of_score = None if what == f"no score_mod on rank {rank}" else score_mod
    of_mask = None if what == f"no mask_mod on rank {rank}" else block_mask
    told = ("depends on values", UnsupportedError) if what == "a refusal" and rank else (words, RankMismatchError)
    with refused(*told):
        flex_attention(q, k, v, of_score, of_mask, mesh=axis)


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
    others = [
        ("score_mod", lambda score, b, h, q_idx, kv_idx: 1.25 * score, q),
        ("mask_mod", lambda *pair: causal(*pair), q),
    ]
    known = [trace(*other) for other in others if rank == 0]

    def score_mod(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return 1.25 * score

    flex_attention(q, k, v, score_mod, create_block_mask(causal, 1, 1, S, S), mesh=axis)
    assert len(known) == 2 * (rank == 0)
