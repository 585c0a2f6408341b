"""Features of scores in the Triton kernels against a dense oracle: interpreted on CPU tensors, or on a GPU."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations
from typing import Any
from unittest import mock

import pytest
import torch
from cases import gap
from dense import dense_attention
from inside import (
    TRITON,
    AttentionSpec,
    BackwardTile,
    Band,
    Call,
    Distances,
    Pairs,
    Scores,
    Tensors,
    inner,
    make_delta,
    make_plan,
    room,
)
from interpreted import INTERPRETED, Interpreted, is_that_run
from test_kernels import inputs
from test_triton_attention import DEVICE, DTYPES, SMALL, TOLERANCE, computes
from torch import Tensor

from cp_mesh import Mask

triton_attention = room("triton_attention")
kept_weights = inner("dropout", "kept_weights")

CONFIG = SMALL if INTERPRETED else None
NUM_Q, NUM_K, S = (20, 40, 44) if INTERPRETED else (300, 333, 350)
FP32_ROUNDING = 1e-6
LEARNED = ("alibi_slopes", "bias")
BIAS = (2, 2, NUM_Q, S)


def draw(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


FEATURES: dict[str, dict[str, Any]] = {
    "softcap": {"softcap": 0.7},
    "alibi_slopes": {"alibi_slopes": draw(2) / 8},
    "bias": {"bias": draw(*BIAS)},
    "dropout": {"dropout_p": 0.3, "dropout_seed": torch.tensor([-(2**40) + 77, 2**33 + 5])},
}
assert TRITON.capability.features == set(FEATURES)


def dense(tensors: list[Tensor], allowed: Tensor, p: Tensor, t: Tensor, scores: Scores) -> dict[str, Tensor]:
    """Everything in fp64 by autograd; of -inf in a bias, too, by heads."""
    q, k, v, dout, dlse = (x.double() for x in tensors)
    learned = {name: x.double() for name in LEARNED if (x := getattr(scores, name)) is not None}
    leaves = {"dq": q, "dk": k, "dv": v} | learned
    for x in leaves.values():
        x.requires_grad_()
    (B, H), distance = q.shape[:2], p[:, None] - t
    raw = torch.zeros(B, H, len(p), len(t), dtype=torch.float64)
    if "alibi_slopes" in learned:
        raw = raw - learned["alibi_slopes"][:, None, None] * distance.abs()
    if "bias" in learned:
        raw = raw + learned["bias"][..., t]
    raw = raw if raw.requires_grad else raw.requires_grad_()
    kept = None
    if scores.dropout_p:
        kept = kept_weights(scores, B, H, p, t) / (1 - scores.dropout_p)
    pairs = allowed[:, None] & (raw > -torch.inf)
    out, lse = dense_attention(q, k, v, pairs, scores.scale, softcap=scores.softcap, bias=raw, kept=kept)
    *gradients, of_scores = torch.autograd.grad((out, lse), [*leaves.values(), raw], (dout, dlse))
    results = {"out": out, "lse": lse} | dict(zip(leaves, gradients, strict=True))
    return results | {"terms of alibi_slopes": (of_scores * distance).square().sum((0, 2, 3)).sqrt()}


def triton(tensors: list[Tensor], cover: Band | Pairs, scores: Scores) -> dict[str, Tensor]:
    def move(x: Any) -> Any:
        return x.to(DEVICE) if isinstance(x, Tensor) else x

    scores = replace(scores, **{name: move(value) for name, value in vars(scores).items()})
    scores = replace(scores, wanted=frozenset(name for name in LEARNED if getattr(scores, name) is not None))
    q, k, v, dout, dlse = (x.to(DEVICE) for x in tensors)
    if isinstance(cover, Pairs):
        cover = Pairs(cover.mask.to(torch.device(DEVICE)), move(cover.q_pos), move(cover.k_pos), cover.adjacent)
    out, lse = triton_attention._forward(CONFIG, q, k, v, cover, scores)
    tile = BackwardTile(dout, q, k, v, None, lse, make_delta(dout, out, dlse), cover, scores)
    dq, dk, dv, *more = triton_attention._backward(CONFIG, tile)
    got = {"out": out, "lse": lse, "dq": dq, "dk": dk, "dv": dv}
    assert len(more) == bool(scores.wanted)
    for name in scores.wanted:
        got[name] = more[0][name]
        assert got[name].dtype == torch.float32 and got[name].shape == getattr(scores, name).shape
    return {name: x.cpu() for name, x in got.items()}


def check(
    scores: Scores, cover: Distances | Pairs, dtype: torch.dtype = torch.float32, heads: tuple[int, int] = (2, 1)
) -> None:
    num_q, num_k = (len(cover.q_pos), len(cover.k_pos)) if isinstance(cover, Pairs) else (NUM_Q, NUM_K)
    tensors = [x.to(dtype) if i < 4 else x.float() for i, x in enumerate(inputs(heads, num_q, num_k, v_dim=4))]
    rows, columns = torch.arange(num_q), torch.arange(num_k)
    p, t = (cover.q_pos, cover.k_pos) if isinstance(cover, Pairs) else (rows, columns)
    allowed = cover.allowed(rows, columns) if isinstance(cover, Pairs) else cover.pairs(num_q, num_k)
    want = dense(tensors, allowed if allowed.ndim == 3 else allowed[None], p, t, scores)
    given = cover if isinstance(cover, Pairs) else cover.band(num_q, num_k)
    for name, x in triton(tensors, given, scores).items():
        finite = want[name][want[name].isfinite()].abs()
        largest = max(1.0, finite.max().item() if finite.numel() else 0.0)
        # scores of 15 and more have probabilities that are exact to 1e-6 in fp32, and these terms cancel
        terms = FP32_ROUNDING * want["terms of alibi_slopes"].max().item() if name == "alibi_slopes" else 0.0
        assert gap(x, want[name]) <= TOLERANCE[dtype] * largest + terms, name


def shuffled(mask: Mask) -> Pairs:
    order = torch.randperm(S, generator=torch.Generator().manual_seed(3))
    return Pairs(mask, order[:NUM_Q], order.flip(0)[:NUM_K])


def in_order(mask: Mask) -> Pairs:
    return Pairs(mask, torch.arange(S)[-NUM_Q:], torch.arange(S)[:NUM_K])


TOGETHER = [names for n in (1, 2) for names in combinations(FEATURES, n)] + [tuple(FEATURES)]


@computes
@pytest.mark.parametrize("names", TOGETHER, ids="+".join)
@pytest.mark.parametrize("dtype", DTYPES if not INTERPRETED else [torch.float32], ids=str)
def test_features_alone_and_together(names: tuple[str, ...], dtype: torch.dtype) -> None:
    """Masked and unmasked blocks; rows without a key; documents that differ along the batch."""
    scores = Scores(0.3)
    for name in names:
        scores = replace(scores, **FEATURES[name])
    ids = torch.stack([torch.arange(S) // 15, torch.zeros(S).long()])
    check(scores, in_order(Mask()) if len(names) == 2 else shuffled(Mask(documents=ids)), dtype)


@computes
@pytest.mark.parametrize("shape", [(b, h, r, S) for b in (1, 2) for h in (1, 2) for r in (1, NUM_Q)], ids=str)
def test_a_bias_of_any_dims(shape: tuple[int, ...]) -> None:
    """-inf excludes a pair, and here whole rows and blocks; columns that no key has get a gradient of 0."""
    bias = draw(*shape).transpose(2, 3).contiguous().transpose(2, 3)
    bias[..., 7] = -torch.inf
    bias[:, :1, -1:] = -torch.inf
    check(Scores(0.3, bias=bias), in_order(Mask(causal=False, window=(20, 9))))


@computes
@pytest.mark.parametrize("scale", [0.3, 0.0, -0.3])
def test_scales_and_a_softcap_without_positions(scale: float) -> None:
    check(Scores(scale), Distances(-3, 20))
    check(Scores(scale, softcap=0.5), Distances(-3, 20))


@computes
def test_heads_and_batch_rows_are_global() -> None:
    """For dropout; and each head has its slope."""
    scores = Scores(0.3, dropout_p=0.5, dropout_seed=torch.tensor([3, 2**32 - 8]), first_head=70000, first_batch=7)
    check(scores, in_order(Mask()))
    scores = Scores(0.3, alibi_slopes=draw(4) / 8, bias=draw(1, 4, NUM_Q, S))
    check(scores, shuffled(Mask()), heads=(4, 2))
    part = scores.heads(2, 4)
    assert part.first_head == 2 and all(getattr(part, name).shape[name == "bias"] == 2 for name in LEARNED)


@computes
def test_large_positions() -> None:
    """Distances that fp32 tells apart, at positions that it does not."""
    start = 2**31 - 200 if INTERPRETED else 2**31 - 2000
    at = start + torch.arange(max(NUM_Q, NUM_K))
    cover = Pairs(Mask(), at[:NUM_Q], at[:NUM_K])
    check(Scores(0.3, alibi_slopes=draw(2) / 8, **FEATURES["dropout"]), cover)


def in_runs(step: int, q_block: int, k_block: int, causal: bool = True) -> Pairs:
    """Two runs of keys, which share a block, then a run of queries at another step and one before most keys."""
    k_pos = torch.cat([torch.arange(k_block + 4) * step, torch.arange(2 * k_block) + 2 * k_block * step])
    q_pos = torch.cat([torch.arange(q_block + 6) * 2 + k_pos[-3], torch.arange(q_block) + 3])
    return Pairs(Mask(causal=causal), q_pos, k_pos)


@computes
@pytest.mark.parametrize(
    "names", [*((name,) for name in FEATURES if name != "softcap"), ("softcap", *LEARNED)], ids="+".join
)
@pytest.mark.parametrize(("step", "causal"), [(1, False), (3, True)], ids=["full", "causal"])
def test_blocks_of_runs(names: tuple[str, ...], step: int, causal: bool) -> None:
    """Blocks whose distances are told by two numbers, of either sign, in every kernel; and others beside them."""
    cover = in_runs(step, 32 if INTERPRETED else 128, 32 if INTERPRETED else 128, causal)
    scores = Scores(0.3)
    for name in names:
        scores = replace(scores, **FEATURES[name])
    if "bias" in names:
        scores = replace(scores, bias=draw(2, 2, len(cover.q_pos), int(cover.k_pos.max()) + 1))
    check(scores, cover)


@computes
@pytest.mark.parametrize("shift", (0, 3))
@pytest.mark.parametrize("whole", [(2, 2), (1, 2), (1, 1)], ids=str)
def test_blocks_of_a_bias(whole: tuple[int, int], shift: int) -> None:
    """Where keys are neighbours its blocks are copied whole, in every kernel; beside others, which are not.

    Nor are those that do not begin at 16 bytes: an H200 ended with "an illegal instruction" on them.
    """
    block = 32 if INTERPRETED else 128
    k_pos = torch.cat([torch.arange(block) * 2, torch.arange(3 * block) + 2 * block + shift])
    q_pos = torch.cat([torch.arange(block + 8) + 4 * block, torch.arange(block + 5)])
    cover = Pairs(Mask(), q_pos, k_pos, adjacent=True)
    scores = Scores(0.3, bias=draw(*whole, len(q_pos), 5 * block + 8).half())
    with mock.patch.object(triton_attention, "_descriptor", wraps=triton_attention._descriptor) as described:
        check(scores, cover, torch.float16)
        copied = [call for call in described.call_args_list if len(call.args) == 3]
        assert len(copied) == 3, "forward, dk and dv, dq"
        described.reset_mock()
        check(scores, replace(cover, adjacent=False), torch.float16)
        assert all(len(call.args) == 2 for call in described.call_args_list)


class First:
    """What planning reads of a process group."""

    def size(self) -> int:
        return 2

    def rank(self) -> int:
        return 0


@pytest.mark.parametrize(("layout", "adjacent"), [("contiguous", True), ("zigzag", True), ("striped", False)])
def test_plans_tell_whether_keys_are_neighbours(layout: str, adjacent: bool) -> None:
    q, k, v = (torch.zeros(1, 2, 32, 8) for _ in range(3))
    tensors = Tensors(bias=torch.zeros(1, 2, 32, 64))
    call = Call(tensors, 64, 2, "", AttentionSpec(layout, Mask().spec(), 1.0, method="ring"))
    plan = make_plan(q, k, v, call, First(), call.scores(q).features)  # type: ignore[arg-type]
    covers = [tile.cover for tile in plan.tiles(None)]
    covers += [tile.cover for stage in plan.schedule.route.stages for tile in plan.tiles(stage)]
    assert covers and all(isinstance(cover, Pairs) and cover.adjacent == adjacent for cover in covers)


@pytest.mark.gpu
@pytest.mark.skipif(INTERPRETED, reason="for a GPU")
@pytest.mark.parametrize("name", sorted(FEATURES))
def test_gradients_repeat_as_declared(name: str) -> None:
    tensors = [x.float() for x in inputs((2, 1), NUM_Q, NUM_K, v_dim=4)]
    runs = [triton(tensors, shuffled(Mask()), replace(Scores(0.3), **FEATURES[name])) for _ in range(5)]
    reproducible = TRITON.capability.deterministic_features
    assert reproducible is not None
    for run in runs[1:]:
        for key, x in run.items():
            assert key not in reproducible | {"out", "lse", "dq", "dk", "dv"} or torch.equal(x, runs[0][key]), key


@pytest.mark.nightly("interpreted")
@is_that_run
def test_interpreted(interpreted: Interpreted) -> None:
    """The tests above, on CPU tensors."""
    assert interpreted(__file__) > 2 * len(FEATURES)
