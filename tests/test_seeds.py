"""Bugs that were reported for other ring attentions, as tests that would have found them here."""

from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from cases import gap, pairs
from dense import dense_attention, make_qkv
from inside import FULL, KERNELS, METHODS, KernelTile, MergingForward, Scores, SummingBackward, make_delta
from model import Core, Model, V
from ranks import on_ranks
from torch import Tensor, nn

import cp_mesh
from cp_mesh import ContextParallel, Contiguous, Mask, ShardedModel, ShardedSequence, Striped, ZigZag

S, CP = 24, 4
LAYOUTS = {"contiguous": Contiguous(), "zigzag": ZigZag(), "striped": Striped()}
MASKS = {"causal": Mask(), "full": Mask(causal=False), "window": Mask(window=(5, None))}


def dense_gradients(name: str, q: Tensor, k: Tensor, v: Tensor, dout: Tensor) -> tuple[Tensor, ...]:
    qkv = [x.double().requires_grad_() for x in (q, k, v)]
    out, _ = dense_attention(*qkv, pairs(name, 1, S))
    return torch.autograd.grad(out, qkv, dout.double())


# Seed 000: a ring's backward that carries (k, v, dk, dv) around in one buffer of the inputs' dtype, takes dk and dv out
# of it after the last pass, and moves them on by a number of ranks that depends on how many passes there were.


@pytest.mark.parametrize(
    "method", [pytest.param(name, marks=[pytest.mark.full] * (name != "ring")) for name in METHODS]
)
@pytest.mark.parametrize("name", MASKS)
@pytest.mark.quick("full-ring")
@on_ranks(CP)
def test_gradients_of_keys_come_home(rank: int, axis: Any, name: str, method: str) -> None:
    """Only one rank's queries have a gradient: dk and dv of every rank must be what that rank alone contributes.

    A window takes fewer passes than there are ranks, which is where the number of last moves goes wrong.
    """
    for layout_name, layout in LAYOUTS.items():
        rows = [layout.positions(S, CP, r) for r in range(CP)]
        q, k, v, dout = make_qkv(1, 4, 2, S, 6)
        for origin in range(CP):
            one = torch.zeros_like(dout).index_copy_(2, rows[origin], dout[:, :, rows[origin]])
            wanted = dense_gradients(name, q, k, v, one)
            for kernel in ("reference", "cpu_flash") if name != "window" else ("reference",):
                local = [x[:, :, rows[rank]].requires_grad_() for x in (q, k, v)]
                out = cp_mesh.attention(
                    *local, mesh=axis, layout=layout, mask=MASKS[name], kernel=kernel, method=method
                )
                got = torch.autograd.grad(out, local, one[:, :, rows[rank]])
                for grad, a, b in zip(("dq", "dk", "dv"), got, wanted, strict=True):
                    assert gap(a, b[:, :, rows[rank]]) <= 1e-10, (layout_name, kernel, origin, grad)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float16), ids=str)
@on_ranks(CP)
def test_gradients_are_summed_in_fp32(rank: int, axis: Any, dtype: torch.dtype, method: str) -> None:
    """Sums that pass through half precision at each of four ranks differ in about half of their elements.

    In Ulysses two ranks compute with each kv head.
    """
    layout, inputs = ZigZag(), [x.to(dtype) for x in make_qkv(1, 4, 2, S * 8, 6)]
    rows = layout.positions(S * 8, CP, rank)
    q, k, v, dout = inputs
    kernel, whole = KERNELS["reference"], (0, S * 8)
    forward = MergingForward(kernel, q, 6, Scores(6**-0.5))
    forward.step(k, v, [KernelTile(whole, whole, FULL)])
    out, lse = forward.finish()
    backward = SummingBackward(kernel, dout, q, None, lse, make_delta(dout, out), Scores(6**-0.5))
    dk, dv = torch.empty_like(k), torch.empty_like(v)
    backward.step(k, v, [KernelTile(whole, whole, FULL)], (dk, dv))
    local = [x[:, :, rows].requires_grad_() for x in (q, k, v)]
    out = cp_mesh.attention(
        *local, mesh=axis, layout=layout, mask=Mask(causal=False), kernel="reference", method=method
    )
    got = torch.autograd.grad(out, local, dout[:, :, rows])
    wanted = (backward.dq.finish(torch.empty_like(q)), dk, dv)
    for a, b in zip(got, wanted, strict=True):  # rounded once, but for few elements
        assert (a != b[:, :, rows]).double().mean() < 0.05


@on_ranks(CP)
def test_calls_do_not_remember_one_another(rank: int, axis: Any) -> None:
    """The same call three times, with other memory in between: no sum goes on from where the last one stopped."""
    for layout in LAYOUTS.values():
        rows = layout.positions(S, CP, rank)
        q, k, v, dout = (x[:, :, rows].requires_grad_() for x in make_qkv(1, 4, 2, S, 6))
        results = []
        for _ in range(3):
            out = cp_mesh.attention(q, k, v, mesh=axis, layout=layout)
            results.append((out.detach(), *torch.autograd.grad(out, (q, k, v), dout)))
            del out
            _ = [torch.full(x.shape, torch.nan) for x in (q, k, v)]
        assert all(torch.equal(a, b) for other in results[1:] for a, b in zip(results[0], other, strict=True))
        for _ in range(2):
            (cp_mesh.attention(q, k, v, mesh=axis, layout=layout) * dout).sum().backward()
        assert all(gap(x.grad, 2 * first) <= 1e-12 for x, first in zip((q, k, v), results[0][1:], strict=True))


# Issues of trainers: frequencies from positions that are sharded (pytorch #152261), positions of three axes (Megatron
# #1612), heads that predict later tokens (Megatron #4495); attention called twice, with a scale, without a gradient.


class ThreeAxes(Model):
    """Rotary positions [3, B, S], of which each frequency takes one."""

    def forward(self, tokens: Tensor, positions: Tensor) -> Tensor:
        angles = torch.stack([positions[0] * 1.0, positions[1] * 0.3], dim=-1).double()
        return self.head(self.rows(tokens, torch.stack((angles.cos(), angles.sin()))))

    def rows(self, tokens: Tensor, rope: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x, rope, None)
        return self.norm(x)


class LaterTokens(ThreeAxes):
    """Logits of the next token and, from these rows and the tokens after them, of the one after it."""

    def forward(self, tokens: Tensor, ids: Tensor, positions: Tensor) -> Tensor:
        angles = positions.double()[..., None] * 0.3 ** torch.arange(2)
        rope = torch.stack((angles.cos(), angles.sin()))
        x = self.rows(tokens, rope)
        return self.head(torch.stack([x, self.layers[0](x + self.embedding(ids), rope, None)]))


class Variant(nn.Module):
    """Attention as models vary it."""

    def __init__(self, attend: Any) -> None:
        super().__init__()
        self.attend = attend

    def forward(self, q: Tensor, k: Tensor, v: Tensor, documents: Tensor | None = None) -> Tensor:
        return self.attend(partial(F.scaled_dot_product_attention, is_causal=True, enable_gqa=True), q, k, v)


VARIANTS = {
    "a difference": lambda sdpa, q, k, v: sdpa(q, k, v) - 0.5 * sdpa(q, v, k),
    "a scale": lambda sdpa, q, k, v: sdpa(q, k, v, scale=0.1),
    "keys without gradients": lambda sdpa, q, k, v: sdpa(q, k.detach(), v),
    "one kv head, expanded": lambda sdpa, q, k, v: sdpa(q, k[:, :1].expand_as(k), v[:, :1].expand_as(v)),
}
KINDS = {"three axes": ThreeAxes, "later tokens": LaterTokens, "a table": Model}
BATCHES = {
    "unlike": [("train", *sizes) for sizes in ((16, 2), (8, 1), (4, 3), (32, 1), (16, 2), (12, 5))],
    "evaluated": [
        (mode, 13, 2) for mode in ("inference", "no_grad", "train", "no_grad", "train", "inference", "train")
    ],
    "shorter than the ranks": [("train", 2, 2), ("train", 2, 2)],
    "of one token": [("train", 1, 2), ("train", 1, 2)],
}
MODES = {"train": torch.enable_grad, "no_grad": torch.no_grad, "inference": torch.inference_mode}


@pytest.mark.parametrize(
    ("size", "kind", "batches", "layout"),
    [
        *((2, kind, "evaluated", "zigzag") for kind in (*VARIANTS, *KINDS)),
        (2, "three axes", "evaluated", "striped"),
        (2, "a table", "unlike", "zigzag"),
        (4, "a table", "shorter than the ranks", "contiguous"),
        (4, "a table", "of one token", "zigzag"),
    ],
)
@pytest.mark.quick("2-a table", "2-later tokens", "three axes")
@on_ranks("size")
def test_models_train_as_on_one_rank(axis: Any, kind, batches, layout) -> None:
    """How far losses and parameters are from those of one rank."""
    layout_name = layout
    attend = VARIANTS.get(kind)
    core, make = (partial(Variant, attend) if attend else Core), KINDS.get(kind, Model)
    length = None if batches == "unlike" else BATCHES[batches][0][1]
    sequence = ShardedSequence(axis, LAYOUTS[layout_name], length, pad=batches != "shorter than the ranks")
    alone, model, gaps = make(core), make(core), []
    inputs = ("tokens", "ids") if kind == "later tokens" else ("tokens",)
    plan = {"": ShardedModel(sequence, inputs=inputs), "layers.*.core": ContextParallel(sequence)}
    cp_mesh.parallelize(model, axis, plan)
    optimizers = [torch.optim.SGD(x.parameters(), lr=0.1) for x in (alone, model)]
    for i, (mode, S, B) in enumerate(BATCHES[batches]):
        tokens = torch.randint(V, (B, S + 2), generator=torch.Generator().manual_seed(i))
        given, labels = {"tokens": tokens[:, :S]}, [tokens[:, 1:-1]]
        positions, rows = torch.arange(S), torch.arange(S).expand(B, S)
        if kind == "three axes":
            positions = torch.stack([rows, rows // 2, rows % 5])
        if kind == "later tokens":
            given, labels = given | {"ids": tokens[:, 1:-1]}, [*labels, tokens[:, 2:]]
        with MODES[mode]():
            logits = alone(**given, positions=positions)
            of_heads = zip(logits if kind == "later tokens" else [logits], labels, strict=True)
            want = sum(F.cross_entropy(x.flatten(0, 1), y.flatten()) for x, y in of_heads)
            own = [sequence.shard({"labels": y})["labels"] for y in labels]
            logits = model(**given, **({"positions": positions} if kind == "three axes" else {}))
            of_heads = zip(logits if kind == "later tokens" else [logits], own, strict=True)
            loss = sum(cp_mesh.cross_entropy(x, y, axis) for x, y in of_heads)
            total = loss.detach().clone()
            dist.all_reduce(total)
        gaps.append(gap(total, want))
        if mode == "train":
            for x in (want, loss):
                x.backward()
            for parameter in model.parameters():
                if parameter.grad is not None:
                    dist.all_reduce(parameter.grad)
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
            gaps += [gap(x, y) for x, y in zip(model.parameters(), alone.parameters(), strict=True)]
    assert max(gaps) <= 1e-10
