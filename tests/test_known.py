"""Repeated calls that are one look-up: what they skip, and what they still see."""

from __future__ import annotations

import gc
import os
from functools import partial
from itertools import product
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from checks import forget_plans, report
from dense import dense_attention, make_qkv
from inside import room
from ranks import mesh
from torch.autograd import forward_ad
from torch.utils.checkpoint import checkpoint

from cp_mesh import Contiguous, Mask, UnsupportedError, ZigZag, attention


def calls(rank: int) -> list[str]:
    known, function, problems = room("call.known"), room("call.function"), []
    axis, S = mesh((2,), ("cp",)), 24
    q, k, v, dout = make_qkv(1, 4, 2, S, 8)
    rows = ZigZag().positions(S, 2, rank)
    documents = [torch.arange(S) // n for n in (5, 7)]

    def call(mask: Mask, dtype: torch.dtype = q.dtype, **options: Any) -> list[torch.Tensor]:
        at = options.get("layout", ZigZag()).positions(S, 2, rank)
        inputs = [x[:, :, at].to(dtype).requires_grad_() for x in (q, k, v)]
        out = attention(*inputs, mesh=axis, mask=mask, **options)
        return [out, *torch.autograd.grad(out, inputs, dout[:, :, at].to(out.dtype))]

    def compare(what: str, mask: Mask, is_known: bool, **options: Any) -> None:
        with mock.patch.object(function, "make_call", wraps=function.make_call) as made:
            out, *_ = call(mask, **options)
        want, _ = dense_attention(q, k, v, mask.allowed(torch.arange(S), torch.arange(S)), scale=8**-0.5)
        at = options.get("layout", ZigZag()).positions(S, 2, rank)
        if not torch.allclose(out.double(), want[:, :, at], atol=1e-10):
            problems.append(f"rank {rank}: {what}: wrong")
        if made.called is is_known:
            problems.append(f"rank {rank}: {what}: {'looked up' if is_known else 'not looked up'} expected")

    masks = [Mask(documents=x) for x in documents]
    for i, mask in enumerate(masks):
        compare(f"first call of mask {i}", mask, False)
    for i, mask in enumerate(masks * 2):
        compare(f"mask {i} again", mask, True)
    compare("another layout", masks[0], False, layout=Contiguous())
    compare("the same layout, made anew", masks[0], True, layout=Contiguous())
    compare("an equal mask, made anew", Mask(documents=documents[0]), False)
    with torch.no_grad():  # no gradient is wanted: another kind of call
        attention(*(x[:, :, rows] for x in (q, k, v)), mesh=axis, mask=masks[0])
    compare("after a call without gradients", masks[0], True)
    room("agreement").look_again(axis.get_group())
    compare("first calls are compared again", masks[0], False)
    compare("and then known", masks[0], True)
    with mock.patch.dict(os.environ, CP_MESH_CHECK="1"):
        compare("the environment turns check mode on", masks[0], False)
    compare("and off", masks[0], True)
    call(masks[0], torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        lower = [call(masks[0], torch.float32)[0] for _ in range(2)]
    if any(x.dtype != torch.bfloat16 for x in lower) or not torch.equal(*lower):
        problems.append(f"rank {rank}: autocast is not of a known call")
    with torch.autocast("cpu", torch.bfloat16):  # q has the dtype already
        mixed = [x[:, :, rows].to(y) for x, y in zip((q, k, v), (torch.bfloat16, *[torch.float32] * 2), strict=True)]
        outs = [attention(*mixed, mesh=axis, mask=masks[0]) for _ in range(3)]
    if not all(torch.equal(outs[0], x) for x in outs):
        problems.append(f"rank {rank}: autocast leaves keys of a known call as they are")
    for method in ("ring", "ulysses"):  # the recomputation finds the call that the forward made known
        inputs = [x[:, :, rows].requires_grad_() for x in (q, k, v)]
        of_batch = Mask(documents=documents[1])
        made = partial(attention, mesh=axis, mask=of_batch, method=method)
        grads = torch.autograd.grad(checkpoint(made, *inputs, use_reentrant=False), inputs, dout[:, :, rows])
        if not all(map(torch.equal, grads, torch.autograd.grad(made(*inputs), inputs, dout[:, :, rows]))):
            problems.append(f"rank {rank}: {method} under a checkpoint is another")
    num = len(known._calls)
    del mask, masks
    gc.collect()
    if not len(known._calls) < num:
        problems.append(f"rank {rank}: calls outlive their mask")
    return problems


def test_known_calls(pool: Any) -> None:
    report(pool(2).run(calls))


def tangents(rank: int) -> None:
    axis = mesh((2,), ("cp",))
    q, k, v = (torch.randn(1, 2, 6, 4, dtype=torch.float64) for _ in range(3))
    for _ in range(2):
        attention(q, k, v, mesh=axis)
    with forward_ad.dual_level(), pytest.raises(UnsupportedError, match="tangents"):
        attention(forward_ad.make_dual(q, q), k, v, mesh=axis)


def test_tangents_of_known_calls_are_refused(pool: Any) -> None:
    pool(2).run(tangents)


def shared_plans(rank: int) -> list[str]:
    """Twenty layers with other scales, softcaps or gradients' needs: schedules that they make, and their results."""
    ring, known, problems = room("ring_loop"), room("call.known"), []
    axis, S, layers = mesh((2,), ("cp",)), 24, 20
    q, k, v, dout = make_qkv(1, 4, 2, S, 8)
    rows, slopes = ZigZag().positions(S, 2, rank), torch.rand(4, dtype=torch.float64, generator=torch.manual_seed(0))
    documents = Mask(documents=torch.arange(S) // 9)
    options = {"scale": lambda i: {"scale": 0.1 + 0.01 * i}, "softcap": lambda i: {"softcap": 1.0 + i}}
    options["slopes"] = lambda i: {"scale": 0.1 + 0.01 * i, "alibi_slopes": slopes * i}
    forget_plans()
    for (name, of_layer), mask in product(options.items(), (documents, Mask(causal=True))):
        made = []
        for i in [*range(layers), *range(layers)]:
            inputs = [x[:, :, rows].requires_grad_() for x in (q, k, v)]
            with mock.patch.object(ring, "make_schedule", wraps=ring.make_schedule) as make:
                out = attention(*inputs, mesh=axis, mask=mask, **of_layer(i))
                grads = torch.autograd.grad(out, inputs, dout[:, :, rows])
            made.append(make.call_count)
            scores = {"scale": 8**-0.5} | of_layer(i)
            allowed = mask.allowed(torch.arange(S), torch.arange(S))
            want = [x.clone().requires_grad_() for x in (q, k, v)]
            whole, _ = dense_attention(*want, allowed, **scores)
            dq = torch.autograd.grad(whole, want, dout)[0][:, :, rows]
            if not (torch.allclose(out, whole[:, :, rows]) and torch.allclose(grads[0], dq)):
                problems.append(f"rank {rank}: layer {i} of {name} over {mask} is wrong")
        if not made[0] or any(made[1:]):
            problems.append(f"rank {rank}: layers of {name} over {mask} make {made} schedules")
    plans = {x.ready.plan for x in known._calls.values()}
    num_plans = sum(x.mask.documents is not None for x in plans)
    if num_plans > len(options):
        problems.append(f"rank {rank}: known calls hold {num_plans} plans of one mask")
    return problems


def test_layers_share_a_plan(pool: Any) -> None:
    report(pool(2).run(shared_plans))


def scored(rank: int) -> list[str]:
    """Calls whose scores read tensors are known by the tensors' shapes; each call's own tensors are read."""
    function, problems, axis, S = room("call.function"), [], mesh((2,), ("cp",)), 24
    q, k, v, dout = make_qkv(1, 4, 2, S, 8)
    rows, draw = ZigZag().positions(S, 2, rank), torch.manual_seed(1)
    shapes, mask = {"sinks": (4,), "alibi_slopes": (4,), "bias": (1, 4, S, S)}, Mask(causal=True)
    for method, (name, shape) in product(("ring", "ulysses"), shapes.items()):
        for i in range(3):
            whole = torch.rand(shape, dtype=torch.float64, generator=draw)
            own = (whole[:, :, rows] if name == "bias" else whole).clone().requires_grad_()
            inputs = [x[:, :, rows].requires_grad_() for x in (q, k, v)]
            with mock.patch.object(function, "make_call", wraps=function.make_call) as made:
                out = attention(*inputs, mesh=axis, mask=mask, method=method, **{name: own})
            *_, dv, got = torch.autograd.grad(out, [*inputs, own], dout[:, :, rows])
            wanted = [x.clone().requires_grad_() for x in (q, k, v, whole)]
            out_of_all, _ = dense_attention(
                *wanted[:3], mask.allowed(torch.arange(S), torch.arange(S)), **{name: wanted[3]}
            )
            *_, dv_of_all, want = torch.autograd.grad(out_of_all, wanted, dout)
            if name == "bias":
                want = want[:, :, rows]
            else:
                dist.all_reduce(got)
            pairs = (out, out_of_all[:, :, rows]), (dv, dv_of_all[:, :, rows]), (got, want)
            if not all(torch.allclose(*pair) for pair in pairs):
                problems.append(f"rank {rank}: call {i} with {name} over {method} is wrong")
            if made.called == bool(i):
                problems.append(f"rank {rank}: call {i} with {name} over {method}: looked up {not made.called}")
    return problems


def test_calls_with_tensors_of_scores_are_known(pool: Any) -> None:
    report(pool(2).run(scored))


def of_kept(rank: int) -> list[str]:
    """Calls of Ulysses, which keeps what has arrived: gradients of lse on one rank, and a second backward."""
    axis, S, problems = mesh((2,), ("cp",)), 16, []
    q, k, v, _ = make_qkv(1, 4, 2, S, 8)
    rows, seen = ZigZag().positions(S, 2, rank), Mask(causal=True).allowed(torch.arange(S), torch.arange(S))
    of_all = [x.clone().requires_grad_() for x in (q, k, v)]
    out, lse = dense_attention(*of_all, seen)
    of_first = ZigZag().positions(S, 2, 0)
    want = torch.autograd.grad(out.sum() + lse[:, :, of_first].sum(), of_all)
    for i in range(2):
        own = [x[:, :, rows].requires_grad_() for x in (q, k, v)]
        out, lse = attention(*own, mesh=axis, method="ulysses", kernel="reference", return_lse=True)
        found = torch.autograd.grad(out.sum() + lse.sum() if rank == 0 else out.sum(), own)
        if not all(torch.allclose(x, y[:, :, rows]) for x, y in zip(found, want, strict=True)):
            problems.append(f"rank {rank}: call {i}: gradients of lse on one rank alone are wrong")
        loss = attention(*own, mesh=axis, method="ulysses").sum()
        (dq,) = torch.autograd.grad(loss, own[0], create_graph=True)
        try:
            (loss + dq.pow(2).sum()).backward()
            problems.append(f"rank {rank}: call {i}: a second backward is dropped")
        except UnsupportedError:
            pass
    return problems


def test_what_ulysses_keeps(pool: Any) -> None:
    report(pool(2).run(of_kept))


def refused(rank: int, bias_rows: tuple[int, int], is_sparse: bool) -> None:
    axis, S = mesh((2,), ("cp",)), 16
    q, k, v, _ = make_qkv(1, 4, 2, S, 8)
    rows = ZigZag().positions(S, 2, rank)
    call = partial(attention, *(x[:, :, rows] for x in (q, k, v)), mesh=axis, method="ulysses")
    bias = q.new_zeros(1, 4, bias_rows[rank], S)
    if is_sparse:
        call(bias=bias)  # known from now on
    call(bias=bias.to_sparse() if is_sparse else bias)


@pytest.mark.parametrize(
    ("bias_rows", "is_sparse", "error"), [((8, 1), False, "RankMismatchError"), ((8, 8), True, "UnsupportedError")]
)
def test_biases_of_other_forms_are_refused(pool: Any, bias_rows: tuple[int, int], is_sparse: bool, error: str) -> None:
    for raised in pool(2).run_expecting_error(refused, bias_rows, is_sparse):
        assert raised is not None and raised.type == error, raised
