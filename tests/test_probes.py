"""Probes for wrongness without an error, as other context-parallel attentions had it: change one thing, see what moves.

A tolerance hides a leak: one pair too many moves an output by less than a low-precision kernel rounds. So what must not
depend on a change is compared bit by bit, and what must depend on it has to move.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.distributed as dist
from checks import report
from dense import dense_attention, dense_mask, make_qkv
from model import Core
from ranks import mesh
from recording import recording
from torch import Tensor, nn

import cp_mesh
from cp_mesh import ContextParallel, Contiguous, Mask, ShardedSequence, Striped, ZigZag, parallelize

CP, S, H, K, D = 3, 29, 4, 2, 6  # shards of unequal length
LAYOUTS = {"contiguous": Contiguous(), "zigzag": ZigZag(), "striped": Striped()}
LENGTHS = (1, 5, 7, 2, 13, 1)  # of documents: one token, 2 * cp - 1, primes, over all shards, a last one of one token
NAMES = ("out", "dq", "dk", "dv")


def sharded(layout: Any, mask: Mask, whole: list[Tensor]) -> list[Tensor]:
    """out, dq, dk, dv of the whole sequence, in original order, on every rank."""
    rank, rows = dist.get_rank(), [layout.positions(S, CP, rank) for rank in range(CP)]
    q, k, v, dout = (x[:, :, rows[rank]] for x in whole)
    q, k, v = (x.requires_grad_() for x in (q, k, v))
    out = cp_mesh.attention(q, k, v, mesh=mesh((CP,), ("cp",)), layout=layout, mask=mask, seq_len=S)
    shards: list[Any] = [None] * CP
    dist.all_gather_object(shards, [out.detach(), *torch.autograd.grad(out, (q, k, v), dout)])
    order = torch.cat(rows).argsort()
    return [torch.cat(parts, dim=2)[:, :, order] for parts in zip(*shards, strict=True)]


def moved(a: list[Tensor], b: list[Tensor]) -> dict[str, Tensor]:
    """bool [S] by name: the rows in which any bit differs."""
    return {name: (x != y).any(dim=(0, 1, 3)) for name, x, y in zip(NAMES, a, b, strict=True)}


def document_leaks(rank: int) -> list[str]:
    problems, ids = [], torch.arange(len(LENGTHS)).repeat_interleave(torch.tensor(LENGTHS))
    for name, layout in LAYOUTS.items():
        whole = list(make_qkv(1, H, K, S, D))
        before = sharded(layout, Mask(documents=ids), whole)
        for document in range(len(LENGTHS)):
            inside = ids == document
            other = [torch.where(inside[:, None], x.flip(3) + 1, x) for x in whole]
            for what, rows in moved(before, sharded(layout, Mask(documents=ids), other)).items():
                if rows[~inside].any():
                    problems.append(f"{name}: {what} of other documents moved with document {document}")
                if not rows[inside].all() and (what in ("out", "dv") or LENGTHS[document] > 1):
                    problems.append(f"{name}: {what} of document {document} did not move with it")
    return problems


def test_packed_documents_do_not_leak(pool: Any) -> None:
    """TRL 6843, axolotl 3608: packed documents that attended across their boundaries."""
    report(pool(CP).run(document_leaks))


def distances(rank: int) -> list[str]:
    """Which rows see token 0, and which the last one: those whose output moves with its value."""
    problems, p = [], torch.arange(S)
    last = S - 1
    masks = [(Mask(), p >= 0, p == last), (Mask(window=(4, 0)), p <= 4, p == last)]
    masks.append((Mask(causal=False, window=(None, 3)), p >= 0, p >= last - 3))
    for name, layout in LAYOUTS.items():
        for mask, *expected in masks:
            q, k, v, dout = make_qkv(1, H, K, S, D)
            before = sharded(layout, mask, [q, k, v, dout])
            for token, seen in zip((0, last), expected, strict=True):
                other = v.index_add(2, torch.tensor([token]), torch.ones(1, K, 1, D, dtype=v.dtype))
                rows = moved(before, sharded(layout, mask, [q, k, other, dout]))["out"]
                if not torch.equal(rows, seen):
                    problems.append(f"{name}, {mask.spec()}: {rows.nonzero().flatten().tolist()} see token {token}")
    return problems


def test_every_row_sees_as_far_as_its_mask_says(pool: Any) -> None:
    """torchtitan 723, Automodel: each rank attended to its own rows; accelerate 4177: a window was ignored."""
    report(pool(CP).run(distances))


def last_tokens(rank: int) -> list[str]:
    problems, ids = [], torch.arange(len(LENGTHS)).repeat_interleave(torch.tensor(LENGTHS))
    ends = torch.tensor(LENGTHS).cumsum(0) - 1
    q, k, v, dout = make_qkv(1, H, K, S, D)
    only_last = torch.zeros_like(dout).index_copy_(2, ends, dout[:, :, ends])
    qkv = [x.requires_grad_() for x in (q, k, v)]
    out, _ = dense_attention(*qkv, dense_mask(S, documents=ids[None]))
    want = [out.detach(), *torch.autograd.grad(out, qkv, only_last)]
    for name, layout in LAYOUTS.items():
        got = sharded(layout, Mask(documents=ids), [*(x.detach() for x in qkv), only_last])
        for what, a, b in zip(NAMES, got, want, strict=True):
            if not (a - b).abs().max() <= 1e-10:
                problems.append(f"{name}: {what}")
        if not (got[3] != 0).any(dim=(0, 1, 3)).all():  # every key is seen by the last token of its document
            problems.append(f"{name}: a document's last token gave no gradient to some of its values")
    return problems


def test_last_tokens_of_odd_documents_count(pool: Any) -> None:
    """TransformerEngine 1930: the last token of documents of odd length was ignored."""
    report(pool(CP).run(last_tokens))


class Layers(nn.Module):
    """Attention after attention, as a model without anything else."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Core() for _ in range(count))

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        for layer in self.layers:
            q = q + layer(q, k, v)
        return q


WINDOWS = ((2, 0), (9, 0), None)  # lookbacks in tokens, local to global


def local_to_global(rank: int) -> tuple[list[str], list[int]]:
    """Problems, and the rows that this rank received in each layer's forward."""
    length, layout, problems, received = 24, Contiguous(), [], []
    axis = mesh((CP,), ("cp",))
    sequence = ShardedSequence(axis, layout, length=length)
    model, whole = Layers(len(WINDOWS)), make_qkv(1, H, K, length, D)
    plan = {f"layers.{i}": ContextParallel(sequence, mask=Mask(window=window)) for i, window in enumerate(WINDOWS)}
    parallelize(model, axis, plan)
    qkv = [sequence.shard(x, dim=2).requires_grad_() for x in whole[:3]]
    with recording(axis) as notes:
        x = qkv[0]
        for layer in model.layers:
            begin = len(notes.sent)
            x = x + layer(x, *qkv[1:])
            received.append(sum(sum(sent.origin) for sent in notes.sent[begin:]) // (K * 2 * D))
        grads = torch.autograd.grad(x, qkv, sequence.shard(whole[3], dim=2))
    got = [sequence.unshard(y, dim=2) for y in (x.detach(), *grads)]
    dense = [y.clone().requires_grad_() for y in whole[:3]]
    y = dense[0]
    for window in WINDOWS:
        y = y + dense_attention(y, *dense[1:], dense_mask(length, window=window))[0]
    for name, a, b in zip(NAMES, got, (y.detach(), *torch.autograd.grad(y, dense, whole[3])), strict=True):
        if not (a - b).abs().max() <= 1e-10:
            problems.append(name)
    return problems, received


def test_lookback_of_each_layer(pool: Any) -> None:
    """Local to global: a mask for each layer in one plan, exact to the token, and each layer's halo is what travels."""
    results = pool(CP).run(local_to_global)
    report([problems for problems, _ in results])
    shard = 24 // CP
    for rank, (_, received) in enumerate(results):
        halos = [min(window[0] if window else rank * shard, rank * shard) for window in WINDOWS]
        assert received == halos, f"rank {rank}"
    assert all(a <= b for a, b in pairwise(results[-1][1])) and results[-1][1][0] == 2


@pytest.mark.parametrize("lengths", [(0, 29), (0, 0, 29), (0, 1, 2, 29)])
def test_cu_seqlens_with_empty_documents(pool: Any, lengths: tuple[int, ...]) -> None:
    """An empty document changes nothing; a tail that belongs to one long document is whole."""
    report(pool(CP).run(cu_seqlens, lengths))


def cu_seqlens(rank: int, bounds: tuple[int, ...]) -> list[str]:
    whole = list(make_qkv(1, H, K, S, D))
    ids = torch.repeat_interleave(torch.arange(len(bounds) - 1), torch.tensor(bounds).diff())
    want, _ = dense_attention(*whole[:3], dense_mask(S, documents=ids[None]))
    got = sharded(ZigZag(), Mask.from_cu_seqlens(torch.tensor(bounds)), whole)[0]
    return [] if (got - want).abs().max() <= 1e-10 else [f"{bounds}"]


def sinks_count(rank: int) -> list[str]:
    """A sink takes weight from every row, and its gradient, summed over ranks, is that of one device."""
    problems = []
    q, k, v, dout = make_qkv(1, H, K, S, D)
    sinks = torch.linspace(-1, 2, H, dtype=q.dtype)
    dense = sinks.clone().requires_grad_()
    out, lse = dense_attention(q, k, v, dense_mask(S))
    (out * torch.sigmoid(lse - dense[:, None])[..., None]).backward(dout)
    assert dense.grad is not None
    for name, layout in LAYOUTS.items():
        rows = layout.positions(S, CP, rank)
        mine = sinks.clone().requires_grad_()
        options = {"mesh": mesh((CP,), ("cp",)), "layout": layout, "seq_len": S}
        plain = cp_mesh.attention(*(x[:, :, rows] for x in (q, k, v)), **options)
        out = cp_mesh.attention(*(x[:, :, rows] for x in (q, k, v)), sinks=mine, **options)
        out.backward(dout[:, :, rows])
        assert mine.grad is not None
        if not (out.abs() < plain.abs()).all():
            problems.append(f"{name}: some rows did not move")
        share = mine.grad.clone()
        dist.all_reduce(mine.grad)
        if not (share != 0).all() or not (mine.grad - dense.grad).abs().max() <= 1e-10:
            problems.append(f"{name}: gradient of the sinks")
    return problems


def test_sinks_are_not_dropped(pool: Any) -> None:
    """prime-rl 3397: sinks that took no part, and got no gradient, in a ring."""
    report(pool(CP).run(sinks_count))
