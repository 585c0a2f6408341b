"""Bugs that were reported for other ring attentions, as tests that would have found them here."""

from collections.abc import Sequence
from functools import partial
from itertools import product
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from cases import gap, pairs
from checks import report, to_format
from dense import dense_attention, make_qkv
from inside import CAUSAL, FULL, KERNELS, METHODS, KernelTile, MergingForward, Scores, SummingBackward, make_delta
from model import Core, Model, V
from ranks import mesh
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


def homecoming(rank: int, name: str, method: str) -> list[str]:
    """Only one rank's queries have a gradient: dk and dv of every rank must be what that rank alone contributes."""
    problems = []
    for layout_name, layout in LAYOUTS.items():
        rows = [layout.positions(S, CP, r) for r in range(CP)]
        q, k, v, dout = make_qkv(1, 4, 2, S, 6)
        for origin in range(CP):
            one = torch.zeros_like(dout).index_copy_(2, rows[origin], dout[:, :, rows[origin]])
            wanted = dense_gradients(name, q, k, v, one)
            for kernel in ("reference", "cpu_flash") if name != "window" else ("reference",):
                local = [x[:, :, rows[rank]].requires_grad_() for x in (q, k, v)]
                out = cp_mesh.attention(
                    *local, mesh=mesh((CP,), ("cp",)), layout=layout, mask=MASKS[name], kernel=kernel, method=method
                )
                got = torch.autograd.grad(out, local, one[:, :, rows[rank]])
                for grad, a, b in zip(("dq", "dk", "dv"), got, wanted, strict=True):
                    if not gap(a, b[:, :, rows[rank]]) <= 1e-10:
                        problems.append(f"{layout_name}, {kernel}, queries of {origin}: {grad} of rank {rank}")
    return problems


@pytest.mark.parametrize(
    "method", [pytest.param(name, marks=[pytest.mark.full] * (name != "ring")) for name in METHODS]
)
@pytest.mark.parametrize("name", MASKS)
@pytest.mark.quick("full-ring")
def test_gradients_of_keys_come_home(pool, name, method):
    """A window takes fewer passes than there are ranks, which is where the number of last moves goes wrong."""
    report(pool(CP).run(homecoming, name, method))


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_the_data_tells_ranks_and_tensors_apart(layout):
    """Else the test above could not fail: no rank's dk is another's, nor its own dv."""
    q, k, v, dout = make_qkv(1, 4, 2, S, 6)
    rows = [layout.positions(S, CP, r) for r in range(CP)]
    _, dk, dv = dense_gradients("full", q, k, v, dout)
    shards = [x[:, :, r] for x in (dk, dv) for r in rows]
    assert all(gap(a, b) > 0.1 for i, a in enumerate(shards) for b in shards[:i])


def half_precision(rank: int, dtype: torch.dtype, method: str) -> list[float]:
    """Share of the elements of dq, dk and dv that are not the fp32 sum rounded once."""
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
        *local, mesh=mesh((CP,), ("cp",)), layout=layout, mask=Mask(causal=False), kernel="reference", method=method
    )
    got = torch.autograd.grad(out, local, dout[:, :, rows])
    wanted = (backward.dq.finish(torch.empty_like(q)), dk, dv)
    return [(a != b[:, :, rows]).double().mean().item() for a, b in zip(got, wanted, strict=True)]


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float16), ids=str)
def test_gradients_are_summed_in_fp32(pool, dtype, method):
    """Sums that pass through half precision at each of four ranks differ in about half of their elements.

    In Ulysses two ranks compute with each kv head.
    """
    for shares in pool(CP).run(half_precision, dtype, method):
        assert max(shares) < 0.05, shares


def head_order(rank: int) -> list[str]:
    """Query head h reads kv head h // G: a key that only kv head 1 holds moves query heads G to 2G - 1 alone."""
    problems, H, K = [], 6, 3
    q = torch.ones(1, H, 8, 4, dtype=torch.float64)
    k = torch.zeros(1, K, 8, 4, dtype=torch.float64)
    v = torch.zeros(1, K, 8, 4, dtype=torch.float64)
    v[:, 1] = 1.0
    for kernel in ("reference", "cpu_flash"):
        local = [x.clone().requires_grad_() for x in (q, k, v)]
        out = cp_mesh.attention(*local, mesh=mesh((CP,), ("cp",)), mask=Mask(causal=False), kernel=kernel)
        heads = out.detach()[0, :, 0, 0]
        if gap(heads, torch.tensor([0.0, 0.0, 1.0, 1.0, 0.0, 0.0], dtype=torch.float64)) > 1e-12:
            problems.append(f"{kernel}: out of the heads is {heads.tolist()}")
        weights = torch.arange(1.0, H + 1, dtype=torch.float64).view(1, H, 1, 1)
        (dv,) = torch.autograd.grad((out * weights).sum(), local[2:])
        sums = dv[0, :, 0, 0]
        if gap(sums, torch.tensor([3.0, 7.0, 11.0], dtype=torch.float64)) > 1e-12:
            problems.append(f"{kernel}: dv of the kv heads is {sums.tolist()}")
    return problems


def test_heads_are_grouped_in_torchs_order(pool):
    report(pool(CP).run(head_order))


# Seed 001: attention in chunks on one device, called from a ring. The chunk kernel's gradient buffers were not zeroed,
# or were added to by the kernel and then added again, so that only chunks with one contribution were right; and the
# log-sum-exp was kept in another layout than the backward read.

CHUNK, CHUNKS = 5, 4


def chunked(causal: bool) -> list[KernelTile]:
    chunks = [(i * CHUNK, (i + 1) * CHUNK) for i in range(CHUNKS)]
    return [
        KernelTile(q, k, CAUSAL if causal and q == k else FULL) for q in chunks for k in chunks if k <= q or not causal
    ]


def one_pass(kernel_name: str, tiles: Sequence[KernelTile], calls: int) -> dict[str, Tensor]:
    """All gradients of a pass, its tiles spread over so many steps."""
    q, k, v, dout = make_qkv(2, 4, 2, CHUNK * CHUNKS, 6)
    kernel, scores = KERNELS[kernel_name], Scores(6**-0.5)
    forward = MergingForward(kernel, q, 6, scores)
    for i in range(calls):
        forward.step(k, v, tiles[i::calls])
    out, lse = forward.finish()
    delta = make_delta(dout, out) if kernel.uses_delta else None
    backward = SummingBackward(kernel, dout, q, out, lse, delta, scores)
    dk, dv = torch.zeros_like(k), torch.zeros_like(v)
    for i in range(calls):
        for begin, dk_piece, dv_piece in backward.step(k, v, tiles[i::calls]):
            dk[:, :, begin:][:, :, : dk_piece.shape[2]] += dk_piece
            dv[:, :, begin:][:, :, : dv_piece.shape[2]] += dv_piece
    return {"out": out, "lse": lse, "dq": backward.dq.finish(torch.empty_like(q)), "dk": dk, "dv": dv}


@pytest.mark.parametrize("calls", (1, 3, 8))
@pytest.mark.parametrize("causal", (True, False), ids=("causal", "full"))
@pytest.mark.parametrize("kernel", ("reference", "cpu_flash"))
def test_every_chunk_is_right(kernel, causal, calls):
    """Chunk by chunk: those with one contribution and those with many."""
    q, k, v, dout = (x.requires_grad_() for x in make_qkv(2, 4, 2, CHUNK * CHUNKS, 6))
    allowed = torch.ones(1, CHUNK * CHUNKS, CHUNK * CHUNKS, dtype=torch.bool)
    out, lse = dense_attention(q, k, v, allowed.tril() if causal else allowed)
    want = {"out": out, "lse": lse} | dict(
        zip(("dq", "dk", "dv"), torch.autograd.grad(out, (q, k, v), dout), strict=True)
    )
    for name, x in one_pass(kernel, chunked(causal), calls).items():
        errors = [gap(a, b) for a, b in zip(x.split(CHUNK, 2), want[name].split(CHUNK, 2), strict=True)]
        assert max(errors) <= 1e-12, (name, errors)


def repeated(rank: int) -> list[str]:
    """The same call three times, with other memory in between: no sum goes on from where the last one stopped."""
    axis, problems = mesh((CP,), ("cp",)), []
    for layout in LAYOUTS.values():
        rows = layout.positions(S, CP, rank)
        q, k, v, dout = (x[:, :, rows].requires_grad_() for x in make_qkv(1, 4, 2, S, 6))
        results = []
        for _ in range(3):
            out = cp_mesh.attention(q, k, v, mesh=axis, layout=layout)
            results.append((out.detach(), *torch.autograd.grad(out, (q, k, v), dout)))
            del out
            _ = [torch.full(x.shape, torch.nan) for x in (q, k, v)]
        same = all(torch.equal(a, b) for other in results[1:] for a, b in zip(results[0], other, strict=True))
        problems += [] if same else [f"{layout}: rank {rank} differs from its first call"]
        (cp_mesh.attention(q, k, v, mesh=axis, layout=layout) * dout).sum().backward()
        (cp_mesh.attention(q, k, v, mesh=axis, layout=layout) * dout).sum().backward()
        twice = all(gap(x.grad, 2 * first) <= 1e-12 for x, first in zip((q, k, v), results[0][1:], strict=True))
        problems += [] if twice else [f"{layout}: two backwards of rank {rank} do not add up in .grad"]
    return problems


def test_calls_do_not_remember_one_another(pool):
    report(pool(CP).run(repeated))


def lse_layout(rank: int) -> list[str]:
    """lse is [B, H, S] (packed [H, T]), contiguous, natural logarithm, also where S and H could be mistaken."""
    problems, layout = [], Contiguous()
    for H in (6, 3):  # six rows a rank
        q, k, v, _ = make_qkv(1, H, 3, S, 4)
        _, want = dense_attention(q, k, v, pairs("causal", 1, S))
        rows = layout.positions(S, CP, rank)
        for seq_dim, kernel in product((2, 1, 0), ("reference", "cpu_flash")):
            given = [to_format(x[:, :, rows], seq_dim) for x in (q, k, v)]
            _, lse = cp_mesh.attention(
                *given, mesh=mesh((CP,), ("cp",)), seq_dim=seq_dim, layout=layout, kernel=kernel, return_lse=True
            )
            expected = want[:, :, rows] if seq_dim else want[0][:, rows]
            if not gap(lse, expected) <= 1e-12 or not lse.is_contiguous():
                problems.append(f"rank {rank}, {H} heads, seq_dim {seq_dim}, {kernel}: {tuple(lse.shape)}")
    return problems


def test_lse_is_laid_out_as_it_is_told(pool):
    report(pool(CP).run(lse_layout))


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


def trained(rank: int, kind: str, batches: str, layout_name: str) -> float:
    """How far losses and parameters are from those of one rank."""
    axis, attend = mesh((dist.get_world_size(),), ("cp",)), VARIANTS.get(kind)
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
    return max(gaps)


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
def test_models_train_as_on_one_rank(pool, size, kind, batches, layout):
    assert max(pool(size).run(trained, kind, batches, layout)) <= 1e-10
