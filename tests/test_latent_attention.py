"""`latent_attention` against attention of keys and values that are expanded head by head on one device, in float64.

B batch, S tokens, H heads; R features of the latent, P of the rotary part, N of a head's keys without it, E of values.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from itertools import product
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from cases import LAYOUTS, MASKS, SCORES, gap, make_mask, make_scores, pairs
from checks import TOLERANCE, dense_scores, local_scores, to_format
from dense import dense_attention
from inside import room
from ranks import mesh, on_ranks, refused
from recording import recording
from test_traffic import needed
from torch import Tensor
from torch._subclasses import FakeTensorMode
from torch.distributed.tensor import DTensor, Shard
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import cp_mesh
from cp_mesh import Mask, Striped, UnsupportedError, ZigZag
from cp_mesh.latent import latent_attention

B, H, S, R, P, N, E = 2, 4, 29, 7, 2, 3, 5
NAMES = ("query", "latent", "rope", "up")
DEGREES = {"hybrid": {"ulysses_degree": 2}}
METHODS = (("ring", 1), ("ring", 2), ("ring", 3), ("ring", 4), ("all_gather", 3), ("ulysses", 2), ("hybrid", 4))


def whole_inputs(
    S: int = S, batch: int = B, dtype: torch.dtype = torch.float64, sizes: Any = (H, N, E)
) -> list[Tensor]:
    """query, latent, rope and the up-projection, and the gradient of out, of the whole sequence."""
    H, N, E = sizes
    shapes = (batch, H, S, N + P), (batch, 1, S, R), (batch, 1, S, P), (H * (N + E), R), (batch, H, S, E)
    generator = torch.Generator().manual_seed(S)
    return [torch.randn(x, dtype=torch.float64, generator=generator).to(dtype) for x in shapes]


def expanded(latent: Tensor, rope: Tensor, up: Tensor, num_heads: int = H, nope: int = N) -> tuple[Tensor, Tensor]:
    """Keys [B, H, S, N + P] and values [B, H, S, E], head by head, from [B, 1, S, R] and [B, 1, S, P]."""
    keys, values = [], []
    for of_head in up.chunk(num_heads):
        keys.append(torch.cat([latent[:, 0] @ of_head[:nope].t(), rope[:, 0]], -1))
        values.append(latent[:, 0] @ of_head[nope:].t())
    return torch.stack(keys, 1), torch.stack(values, 1)


@cache
def dense(mask: str, scores: str, S: int, batch: int) -> dict[str, Tensor]:
    """Results of the whole sequence: out, lse, and gradients of out · dout + lse · dlse."""
    *inputs, dout = whole_inputs(S, batch)
    leaves = dict(zip(NAMES, (x.requires_grad_() for x in inputs), strict=True))
    terms = dense_scores(make_scores(scores, batch, H, S), batch, H, S)
    leaves |= {name: x.requires_grad_() for name, x in terms.items() if isinstance(x, Tensor) and name != "kept"}
    out, lse = dense_attention(inputs[0], *expanded(*inputs[1:]), pairs(mask, batch, S), **terms)
    grads = torch.autograd.grad((out, lse), [*leaves.values()], (dout, lse.detach().sin().nan_to_num()))
    found = {"out": out, "lse": lse} | {f"d{name}": x for name, x in zip(leaves, grads, strict=True)}
    return {name: x.detach() for name, x in found.items()}


def problems(
    rank: int, axis: Any, layout: str, mask: str, scores: str = "plain", S: int = S, seq_dim: int = 2, **options: Any
) -> list[str]:
    """What differs from the dense results by more than the tolerance."""
    batch, made = B if seq_dim else 1, LAYOUTS[layout](S)
    rows = made.positions(S, axis.size(), rank)
    *whole, dout = whole_inputs(S, batch)
    local = [to_format(x[:, :, rows], seq_dim) if x.ndim == 4 else x.clone() for x in whole]
    leaves = dict(zip(NAMES, (x.requires_grad_() for x in local), strict=True))
    terms = local_scores(make_scores(scores, batch, H, S), rows)
    leaves |= {name: x for name, x in terms.items() if isinstance(x, Tensor) and x.requires_grad}
    out, lse = latent_attention(
        *local, mesh=axis, seq_dim=seq_dim, seq_len=S, layout=made, mask=make_mask(mask, batch, S), return_lse=True,
        **terms, **options,
    )  # fmt: skip
    dlse = lse.detach().sin().nan_to_num()
    grads = torch.autograd.grad((out, lse), [*leaves.values()], (to_format(dout[:, :, rows], seq_dim), dlse))
    found = {"out": out, "lse": lse} | {f"d{name}": x for name, x in zip(leaves, grads, strict=True)}
    wrong = []
    for name, want in dense(mask, scores, S, batch).items():
        got = found[name].detach()
        if name in ("out", "lse", "dquery", "dlatent", "drope"):
            want = to_format(want[:, :, rows], seq_dim)
        elif name != "dbias" or want.shape[2] == 1:  # of what all ranks have, partial
            dist.all_reduce(got)
        else:
            want = want[:, :, rows]
        if got.shape != want.shape or not (want.isinf() == got.isinf()).all() or not gap(got, want) <= TOLERANCE:
            wrong.append(f"{name} of {layout}, {mask}, {scores}, {options}")
    return wrong


def report(found: Sequence[str]) -> None:
    assert not found, "\n".join(found)


@pytest.mark.parametrize(("method", "cp_size"), METHODS)
@pytest.mark.quick("ring-3")
@on_ranks("cp_size", timeout=120.0)
def test_every_layout(rank: int, axis: Any, method: str, cp_size: int) -> None:
    masks = ("causal", "two-sided window", "documents", "everything")
    cases = [("zigzag", "no key at all"), *product(LAYOUTS, masks)]
    options = {"method": method, **DEGREES.get(method, {})}
    report([x for layout, mask in cases for x in problems(rank, axis, layout, mask, **options)])


def few(rank: int) -> list[str]:
    """A case for each of the bugs that are planted."""
    axis = mesh((3,), ("cp",))
    layouts = "zigzag", "zigzag documents"
    return [x for name in layouts for x in problems(rank, axis, name, "documents", head_chunks=2)]


@pytest.mark.full
@pytest.mark.parametrize("layout", ["zigzag", "striped"])
@on_ranks(3, timeout=120.0)
def test_every_mask(rank: int, axis: Any, layout: str) -> None:
    report([x for mask in MASKS for x in problems(rank, axis, layout, mask)])


@pytest.mark.parametrize(("method", "cp_size"), [("ring", 3), ("hybrid", 4)])
@pytest.mark.quick("ring")
@on_ranks("cp_size", timeout=120.0)
def test_every_score(rank: int, axis: Any, method: str, cp_size: int) -> None:
    """In two chunks of heads, which draw the dropout of their own heads."""
    options = {"method": method, "head_chunks": 2, **DEGREES.get(method, {})}
    report([x for name in SCORES for x in problems(rank, axis, "zigzag", "causal", name, **options)])


@on_ranks(3)
def test_formats_and_lengths(rank: int, axis: Any) -> None:
    cases = product((0, 1, 2), (29, 2, 0))
    report([x for dim, S in cases for x in problems(rank, axis, "zigzag", "causal", seq_dim=dim, S=S)])


@on_ranks(2)
def test_chunks_by_bytes(rank: int, axis: Any) -> None:
    """Each tile expands as few heads at a time as the budget asks for."""
    kernel, expanded_heads = room("latent.expand"), list[int]()

    def noting(rows: Tensor, up: Tensor, *others: Any) -> Any:
        expanded_heads.append(len(up))
        return expand(rows, up, *others)

    expand = kernel._expand
    row = (N + P + E) * 8 * B  # bytes of a head's key and value
    for budget, most in ((1 << 30, 4), (15 * 2 * row, 2), (1, 1)):
        with mock.patch.object(kernel, "EXPANDED_BYTES", budget), mock.patch.object(kernel, "_expand", noting):
            report(problems(rank, axis, "contiguous", "causal"))
        assert max(expanded_heads) == most
        expanded_heads.clear()


@pytest.mark.parametrize(("method", "cp_size"), [("ring", 1), ("ring", 3), ("all_gather", 3)])
@on_ranks("cp_size")
def test_traffic(rank: int, axis: Any, method: str, cp_size: int) -> None:
    """Rows of the latent and rope that a query may see, in the forward and again in the backward; gradients in fp32."""
    for layout, mask, dtype in product(("zigzag", "contiguous"), ("causal", "window"), (torch.bfloat16, torch.float64)):
        rows = LAYOUTS[layout](S).positions(S, cp_size, rank)
        given = [(x[:, :, rows] if x.ndim == 4 else x).requires_grad_() for x in whole_inputs(dtype=dtype)[:4]]
        with recording(axis) as notes:
            out = latent_attention(
                *given, mesh=axis, seq_len=S, layout=LAYOUTS[layout](S), mask=make_mask(mask, B, S), method=method
            )
            num_forward = notes.hops
            out.sum().backward()
        assert not notes.problems, notes.problems
        need, row = needed(layout, mask, S, cp_size), B * (R + P)
        fetched, served = (sum(need[rank]) * row, sum(x[rank] for x in need) * row)
        size, home = dtype.itemsize, max(dtype.itemsize, 4)
        forward, backward = notes.sent[:num_forward], notes.sent[num_forward:]
        assert sum(x.bytes_received for x in forward) == fetched * size
        assert sum(x.bytes_sent for x in forward) == served * size
        assert sum(x.bytes_received for x in backward) == fetched * size + served * home
        assert sum(x.bytes_sent for x in backward) == served * size + fetched * home


@pytest.mark.parametrize(("method", "cp_size"), METHODS)
@pytest.mark.quick("ring-3", "hybrid")
@on_ranks("cp_size")
def test_explain_says_traffic_and_expansion(rank: int, axis: Any, method: str, cp_size: int) -> None:
    """The bytes that all ranks receive, and rows times heads that they expand in a forward, over pairs and heads."""
    kernel, num_expanded = room("latent.expand"), 0

    def noting(rows: Tensor, up: Tensor, *others: Any) -> Any:
        nonlocal num_expanded
        num_expanded += len(rows) * len(up)
        return expand(rows, up, *others)

    expand = kernel._expand
    S, options = 32, {"method": method, **DEGREES.get(method, {})}
    for layout, mask, dtype in product(("zigzag", "contiguous"), ("causal", "window"), (torch.bfloat16, torch.float64)):
        made, of_mask = LAYOUTS[layout](S), make_mask(mask, B, S)
        rows = made.positions(S, cp_size, rank)
        given = [(x[:, :, rows] if x.ndim == 4 else x).requires_grad_() for x in whole_inputs(S, dtype=dtype)[:4]]
        with recording(axis, options.get("ulysses_degree")) as notes:
            num_expanded = 0
            with mock.patch.object(kernel, "_expand", noting):
                out = latent_attention(*given, mesh=axis, seq_len=S, layout=made, mask=of_mask, **options)
            out.sum().backward()
        received = sum(x.bytes_received - x.origin[x.ranks.index(rank)] * x.itemsize for x in notes.sent)
        dist.all_reduce(counts := torch.tensor([received, num_expanded]))
        sizes = {"batch": B, "num_heads": H, "head_dim": N + P, "v_head_dim": E, "latent_dim": R + P}
        found = cp_mesh.explain(S, cp_size, layout=made, mask=of_mask, dtype=dtype, **sizes, **options).found
        assert found.latent.moved * cp_size == counts[0]
        num_pairs = int(pairs(mask, B, S).expand(B, S, S).sum()) * H
        assert found.latent.expansion == pytest.approx(int(counts[1]) * (R + P) / num_pairs)


def low_precision(rank: int, dtype: torch.dtype, kernel: str, method: str) -> list[str]:
    """What has more than 1.5 times the RMS error of expansion and attention on one device, by 16 features."""
    axis, alone, S, sizes = mesh((4,), ("cp",)), mesh((4, 1), ("all", "cp"))["cp"], 512, (4, 16, 16)
    *inputs, dout = whole_inputs(S, 1, dtype, sizes)
    inputs[0] = inputs[0][..., : 16 + P]
    exact_inputs = [x.double().requires_grad_() for x in inputs]
    k, v = expanded(*exact_inputs[1:], 4, 16)
    allowed = torch.ones(1, S, S, dtype=torch.bool).tril()
    exact = [(out := dense_attention(exact_inputs[0], k, v, allowed)[0]).detach()]
    exact += torch.autograd.grad(out, exact_inputs, dout.double())

    single_inputs = [x.clone().requires_grad_() for x in inputs]
    k, v = expanded(*single_inputs[1:], 4, 16)
    out = cp_mesh.attention(single_inputs[0], k, v, mesh=alone, kernel=kernel)
    single = [out.detach(), *torch.autograd.grad(out, single_inputs, dout)]

    rows = ZigZag().positions(S, 4, rank)
    local = [(x[:, :, rows] if x.ndim == 4 else x.clone()).requires_grad_() for x in inputs]
    out = latent_attention(*local, mesh=axis, kernel=kernel, method=method, **DEGREES.get(method, {}))
    sharded = [out.detach(), *torch.autograd.grad(out, local, dout[:, :, rows])]
    dist.all_reduce(total := sharded.pop().float())
    wrong = []
    for name, got, other, want in zip(("out", *NAMES), [*sharded, total.to(dtype)], single, exact, strict=True):
        rows_of = slice(None) if want.ndim == 2 else rows
        errors = [(x.double() - y[..., rows_of, :]).square().mean().sqrt() for x, y in (
            (got, want), (other[..., rows_of, :], want),
        )]  # fmt: skip
        if got.dtype != dtype or not errors[0] <= 1.5 * errors[1]:
            wrong.append(f"{name}: {errors[0] / errors[1]:.2f} times the error of one device")
    return wrong


@pytest.mark.parametrize("method", ["ring", "hybrid"])
@pytest.mark.parametrize(("dtype", "kernel"), [(torch.bfloat16, "reference"), (torch.float16, "reference")], ids=str)
def test_low_precision(pool: Callable[..., Any], dtype: torch.dtype, kernel: str, method: str) -> None:
    report([x for found in pool(4).run(low_precision, dtype, kernel, method) for x in found])


@on_ranks(2)
def test_equal_layers_share_a_plan_and_not_the_projection(rank: int, axis: Any) -> None:
    """What was bound for a tile by the first layer must not hold its weight."""
    rows = ZigZag().positions(28, 2, rank)
    q, latent, rope, up = ((x[:, :, rows] if x.ndim == 4 else x) for x in whole_inputs(28)[:4])
    first, second, again = (latent_attention(q, latent, rope, x, mesh=axis) for x in (up, -up, up.clone()))
    assert torch.equal(first, again) and gap(first, second) > 0.1


@on_ranks(2)
def test_frozen_and_checkpointed(rank: int, axis: Any) -> None:
    """A frozen projection gets no gradient, nor does a frozen latent; a checkpoint computes the same."""
    rows = ZigZag().positions(28, 2, rank)
    given = [(x[:, :, rows] if x.ndim == 4 else x) for x in whole_inputs(28)]
    *inputs, dout = [x.clone().requires_grad_() for x in given]

    def attend(*x: Tensor) -> Tensor:
        return latent_attention(*x, mesh=axis)

    want = torch.autograd.grad(attend(*inputs), inputs, dout)
    for contexts, num_forwards in ((None, 2), (cp_mesh.training.checkpoint_context_fn, 1)):
        with recording(axis) as notes:
            kept = {} if contexts is None else {"context_fn": contexts}
            out = checkpoint(attend, *inputs, use_reentrant=False, **kept)
            num = notes.hops
            assert all(map(torch.equal, torch.autograd.grad(out, inputs, dout), want))
        assert notes.hops == num * (num_forwards + 2), "a backward fetches, and sends home"
    for frozen in range(4):
        some = [x.detach().requires_grad_(i != frozen) for i, x in enumerate(inputs)]
        attend(*some).backward(dout)
        for i, x in enumerate(some):
            assert x.grad is None if i == frozen else torch.equal(x.grad, want[i])


@on_ranks(2)
def test_compiled(rank: int, axis: Any) -> None:
    """In one graph, both passes."""
    rows = ZigZag().positions(28, 2, rank)
    given = [(x[:, :, rows] if x.ndim == 4 else x) for x in whole_inputs(28)]
    *inputs, dout = [x.clone().requires_grad_() for x in given]

    def twice(*x: Tensor) -> Tensor:
        return 2 * latent_attention(x[0] + 1, *x[1:], mesh=axis)

    compiled = torch.compile(twice, backend="aot_eager", fullgraph=True)
    found, want = ((out := f(*inputs), *torch.autograd.grad(out, inputs, dout)) for f in (compiled, twice))
    assert max(map(gap, found, want)) <= TOLERANCE


@on_ranks(2)
def test_op(rank: int, axis: Any) -> None:
    """Its fakes have the shapes, strides and dtypes of its results, and its gradients are differentiated once."""
    rows = ZigZag().positions(28, 2, rank)
    given = [(x[:, :, rows] if x.ndim == 4 else x).requires_grad_() for x in whole_inputs(28)[:4]]
    calls: list[Any] = []

    class Noting(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            results = func(*args, **(kwargs or {}))
            if "latent_attention" in str(func):
                calls.append((func, args, results))
            return results

    for dim in (2, 1):
        tensors = [x.transpose(1, 2) if dim == 1 and x.ndim == 4 else x for x in given]
        with Noting():
            out = latent_attention(*tensors, mesh=axis, seq_dim=dim)
            grads = torch.autograd.grad(out.square().sum(), given, create_graph=True)
        with pytest.raises(UnsupportedError, match="differentiated once"):
            sum(x.sum() for x in grads).backward()
    assert len(calls) == 4
    for func, args, results in calls:
        with FakeTensorMode(allow_non_fake_inputs=True) as mode:
            fakes = func(*(mode.from_tensor(x.detach()) if isinstance(x, Tensor) else x for x in args))
        for fake, x in zip(fakes, results, strict=True):
            assert (fake.shape, fake.stride(), fake.dtype) == (x.shape, x.stride(), x.dtype), func


REFUSED: dict[str, tuple[Callable[[list[Tensor]], Any], str]] = {
    "two heads": (lambda x: (x[0], x[1].expand(-1, 2, -1, -1), x[2], x[3]), r"latent_attention: latent: .*\[2, 1, 14"),
    "other rows": (lambda x: (x[0], x[1], x[2][:, :, 1:], x[3]), "latent_attention: rope"),
    "another dtype": (lambda x: (x[0], x[1], x[2], x[3].float()), "up_projection: expected torch.float64"),
    "another rank": (lambda x: (x[0], x[1][..., 1:], x[2], x[3]), r"up_projection: expected \[4 heads"),
    "no values": (lambda x: (x[0], x[1], x[2], x[3][: H * N]), "up_projection: expected"),
    "rows that no head has": (lambda x: (x[0], x[1], x[2], x[3][1:]), "up_projection: expected"),
    "rotary alone": (lambda x: (x[0][..., :P], x[1], x[2], x[3]), "latent_attention: query"),
    "no dims": (lambda x: (x[0][0], x[1], x[2], x[3]), r"query: expected \[B, H, S, D\]"),
}


@on_ranks(2)
def test_refusals(rank: int, axis: Any) -> None:
    rows = ZigZag().positions(28, 2, rank)
    given = [(x[:, :, rows] if x.ndim == 4 else x) for x in whole_inputs(28)[:4]]
    for change, match in REFUSED.values():
        with refused(match):
            latent_attention(*change(given), mesh=axis)
    with refused("up_projection: expected a tensor"):
        latent_attention(*given[:3], None, mesh=axis)
    with refused("latent: expected a tensor"):
        latent_attention(given[0], None, *given[2:], mesh=axis)
    with refused("a local tensor, got a DTensor"):
        q, latent, rope = (DTensor.from_local(x, axis, [Shard(2)]) for x in given[:3])
        latent_attention(q, latent, rope, given[3], mesh=axis)
    with refused("head_chunks: expected a divisor of the 4 kv heads"):
        latent_attention(*given, mesh=axis, head_chunks=3)
    with refused("local sequence length: expected 9 rows"):
        latent_attention(*given, mesh=axis, seq_len=18)
    with pytest.raises(TypeError, match="unexpected keyword"):
        latent_attention(*given, mesh=axis, score=1)
    with pytest.raises(TypeError, match="unexpected keyword argument 'keeps'"):
        latent_attention(*given, mesh=axis, keeps=True)


@pytest.mark.parametrize("kernel", ("reference", "cpu_flash"))
@on_ranks(2)
def test_no_batch_rows(axis: Any, kernel: str) -> None:
    *given, _ = (x[:0] if x.ndim == 4 else x for x in whole_inputs(14))
    given = [x.float().requires_grad_() for x in given]
    out = latent_attention(*given, mesh=axis, kernel=kernel)
    assert out.shape == (0, H, 14, E)
    out.sum().backward()
    assert given[1].grad is not None and not given[3].grad.any()


@on_ranks(2)
def test_ranks_are_compared(rank: int, axis: Any) -> None:
    rows = Striped().positions(28, 2, rank)
    given = [(x[:, :, rows] if x.ndim == 4 else x) for x in whole_inputs(28)[:4]]
    if rank:
        given[1], given[3] = given[1][..., 1:], given[3][:, 1:]
    with refused("expected the same latent and rope on every cp rank, got cp rank 0: 7 and 2 features; cp rank 1: 6"):
        latent_attention(*given, mesh=axis, layout=Striped(), mask=Mask(causal=False))
