"""The Triton attention kernel and its features of scores against the dense oracle: interpreted on CPU tensors, on a
GPU, and compiled for Hopper.

With TRITON_INTERPRET=1 these tests run the kernels on CPU tensors, in small blocks; one test awaits that run.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations, product
from typing import Any
from unittest import mock

import pytest
import torch
from cases import LAYOUTS, MASKS, gap, make_mask, pairs
from dense import dense_attention, make_qkv
from hopper import Compiled, Hopper
from inside import (
    CAUSAL,
    FULL,
    TRITON,
    UNUSED,
    AttentionSpec,
    BackwardTile,
    Band,
    Blocks,
    Call,
    Config,
    Distances,
    KernelTile,
    MergingForward,
    Pairs,
    Scores,
    Tensors,
    inner,
    make_delta,
    make_plan,
    room,
    triton_kernel,
    without_unused,
)
from interpreted import INTERPRETED, Interpreted, is_that_run
from test_kernels import BANDS, band_pairs, dense, inputs, run
from test_kernels_gpu import block_rms, play_ring
from torch import Tensor

from cp_mesh import Mask

triton_attention = room("triton_attention")
config_for, kept_weights = inner("triton_attention", "config_for"), inner("dropout", "kept_weights")

SMALL = Config(Blocks(16, 32), Blocks(32, 16), Blocks(16, 16))
FEW = Config(Blocks(16, 32), Blocks(32, 32), Blocks(32, 16))  # fewer programs, for the largest table
KERNEL = triton_kernel(SMALL) if INTERPRETED else TRITON
DEVICE = "cpu" if INTERPRETED else "cuda"
DTYPES = (torch.float32, torch.float16) if INTERPRETED else (torch.float32, torch.float16, torch.bfloat16)
TOLERANCE = {torch.float32: 1e-5, torch.float16: 6e-3, torch.bfloat16: 5e-2}  # of the largest value
NAMES = ("out", "lse", "dq", "dk", "dv")

computes = (lambda test: test) if INTERPRETED else pytest.mark.gpu
for_a_gpu = pytest.mark.skipif(INTERPRETED, reason="for a GPU") if INTERPRETED else pytest.mark.gpu
each_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)


def assert_near(got: dict[str, Tensor], want: dict[str, Tensor], dtype: torch.dtype) -> None:
    for name, x in got.items():
        finite = want[name][want[name].isfinite()].double().abs()
        largest = max(1.0, finite.max().item() if finite.numel() else 0.0)
        assert gap(x.cpu(), want[name].cpu()) <= TOLERANCE[dtype] * largest, name


def on_device(tensors: tuple[Tensor, ...], dtype: torch.dtype) -> list[Tensor]:
    """q, k, v, dout in this dtype, and dlse in fp32, if there is one."""
    return [x.to(DEVICE, dtype if i < 4 else torch.float32) for i, x in enumerate(tensors)]


def whole(tensors: list[Tensor], cover: Band | Pairs, kernel: Any = None) -> dict[str, Tensor]:
    """One tile, its dk and dv returned."""
    q, k = tensors[:2]
    tile = KernelTile((0, q.shape[2]), (0, k.shape[2]), cover)
    return run(kernel or KERNEL, *tensors, [(slice(0, k.shape[2]), [tile])])


@computes
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("mask", MASKS)
def test_every_mask_in_every_layout(mask: str, layout: str) -> None:
    """All ranks of a ring in turn; on a GPU in blocks of the table, so with more tokens."""
    S, cp_size, heads = (33, 2, (1, 1)) if INTERPRETED else (413, 4, (4, 2))
    B = 2 if make_mask(mask, 2, S).elementwise else 1
    q, k, v, dout = make_qkv(B, *heads, S, 20, 12)
    qkv = [x.requires_grad_() for x in (q, k, v)]
    out, lse = dense_attention(*qkv, pairs(mask, B, S))
    want = (out, lse, *torch.autograd.grad(out, qkv, dout))
    args = on_device((q.detach(), k.detach(), v.detach(), dout), torch.float32)
    kernel = triton_kernel(FEW) if INTERPRETED else TRITON
    got = play_ring(kernel, LAYOUTS[layout](S), make_mask(mask, B, S), cp_size, *args)
    assert_near(dict(zip(NAMES, got, strict=True)), dict(zip(NAMES, want, strict=True)), torch.float32)


BAND_DTYPES = [(name, dtype) for name in BANDS for dtype in DTYPES if not INTERPRETED or dtype == torch.float32]
BAND_DTYPES += [("causal with older keys", torch.float16), ("two-sided window", torch.float16)] if INTERPRETED else []


@computes
@pytest.mark.parametrize(("name", "dtype"), BAND_DTYPES, ids=str)
def test_every_band(name: str, dtype: torch.dtype) -> None:
    """Untrimmed bands, odd lengths, grouped heads, another head dim of v, a gradient of lse."""
    num_q, num_k, heads = (35, 40, (2, 1)) if INTERPRETED else (300, 333, (6, 2))
    tensors = on_device(inputs(heads, num_q, num_k, v_dim=4), dtype)
    want = dense(*(x.double().cpu() for x in tensors), band_pairs(BANDS[name], num_q, num_k)[None])
    assert_near(whole(tensors, BANDS[name].band(num_q, num_k)), want, dtype)


@computes
@pytest.mark.parametrize("at", [Distances(3, 1), Distances(100, None), Distances(None, -100)], ids=str)
def test_a_band_of_no_pair(at: Distances) -> None:
    got = whole(on_device(inputs((2, 1), 20, 40), torch.float32), at.band(20, 40))
    assert (got["lse"] == -torch.inf).all() and all((got[name] == 0).all() for name in ("out", "dq", "dk", "dv"))


@computes
@each_dtype
@pytest.mark.parametrize(
    ("dim", "v_dim", "heads"),
    [(16, 16, (4, 1)), (80, 80, (2, 2)), (96, 33, (3, 1)), (24, 256, (2, 1)), (256, 16, (1, 1))],
)
def test_head_dims_and_groups(dim: int, v_dim: int, heads: tuple[int, int], dtype: torch.dtype) -> None:
    S = 40 if INTERPRETED else 300
    positions = torch.arange(S)
    mask = Mask(window=(S // 2, None), key_padding=torch.arange(S) % 7 != 3)
    tensors = on_device((*make_qkv(1, *heads, S, dim, v_dim), torch.randn(1, heads[0], S)), dtype)
    want = dense(*(x.double().cpu() for x in tensors), mask.allowed(positions, positions))
    at = positions.to(DEVICE)
    assert_near(whole(tensors, Pairs(mask.to(torch.device(DEVICE)), at, at)), want, dtype)


def padded(x: Tensor, order: tuple[int, ...]) -> Tensor:
    """The same values in memory of this order of dims, as every other row of a buffer of NaN, head dims apart."""
    shape = [x.shape[dim] * (2 if dim == 2 else 1) + (8 if dim == 3 else 0) for dim in order]
    memory = torch.full(shape, torch.nan, dtype=x.dtype, device=x.device)
    view = memory.permute([order.index(dim) for dim in range(4)])[:, :, ::2, : x.shape[3]]
    return view.copy_(x)


@computes
@pytest.mark.parametrize("order", [(0, 1, 2, 3), (0, 2, 1, 3), (2, 0, 1, 3)], ids=str)
@pytest.mark.parametrize("cover", ["band", "pairs"])
def test_strides_and_gradients_in_place(order: tuple[int, ...], cover: str) -> None:
    """Inputs, dk and dv are parts of larger buffers, lse and delta have strides; nothing beside them is touched."""
    q, k, v, dout, dlse = on_device(inputs((2, 1), 37, 21, v_dim=4), torch.float32)
    at = torch.arange(74, device=DEVICE)[::2]  # the positions have a stride too
    what = Pairs(Mask(window=(9, 2), causal=False), at[:37], at[:21])
    allowed = what.allowed(*(torch.arange(n, device=DEVICE) for n in (37, 21))).cpu()
    if cover == "band":
        what, allowed = Distances(-2, 9).band(37, 21), Distances(-2, 9).pairs(37, 21)[None]
    want = dense(*(x.double().cpu() for x in (q, k, v, dout, dlse)), allowed)
    q_, k_, v_, dout_ = (padded(x, order) for x in (q, k, v, dout))
    out, lse = triton_attention._forward(SMALL if INTERPRETED else None, q_, k_, v_, what, Scores(0.3))
    assert (out.stride(1) < out.stride(2)) == (q_.stride(1) < q_.stride(2))
    columns = torch.full((2, 37, 2, 3), torch.nan, device=DEVICE).transpose(1, 2)
    lse_, delta_ = columns[..., 0].copy_(lse), columns[..., 2].copy_(make_delta(dout, out, dlse))
    dk, dv = (padded(torch.full_like(x, 7.0), order) for x in (k, v))
    tile = BackwardTile(dout_, q_, k_, v_, None, lse_, delta_, what, Scores(0.3), dk, dv)
    dq, *same = triton_attention._backward(SMALL if INTERPRETED else None, tile)
    assert same[0] is dk and same[1] is dv
    assert_near(dict(zip(NAMES, (out, lse, dq, dk, dv), strict=True)), want, torch.float32)
    for x in (dk, dv):
        assert x._base.isfinite().sum() == x.numel()


MASKED = {  # of which every excluded block is known from the least and greatest position and document of blocks
    "causal": lambda S: Mask(),
    "window": lambda S: Mask(window=(9, None)),
    "two-sided window": lambda S: Mask(causal=False, window=(3, 20)),
    "prefix and window": lambda S: Mask(prefix=20, window=(40, None)),
    "length": lambda S: Mask(causal=False, length=30),
    "documents": lambda S: Mask(causal=False, documents=torch.arange(S) // 23),
    "documents and window": lambda S: Mask(window=(11, None), documents=(torch.arange(S) // 40).int() - 1),
    "key padding": lambda S: Mask(causal=False, key_padding=(torch.arange(S) < 10) | (torch.arange(S) > 33)),
    "blocks, window and documents": lambda S: Mask(
        window=(30, None), blocks=torch.arange(S) // 37, documents=torch.arange(S) // 111
    ),
}  # fmt: skip


def excluded(allowed: Tensor, q: int, k: int) -> Tensor:
    """Of the first batch row, by blocks: bool [q blocks, k blocks], that no pair is allowed."""
    num_q, num_k = allowed.shape[1:]
    padded = torch.nn.functional.pad(allowed[0].float(), (0, -num_k % k, 0, -num_q % q))
    return padded.unflatten(1, (-1, k)).unflatten(0, (-1, q)).sum((1, 3)) == 0


@computes
@pytest.mark.filterwarnings("ignore:All-NaN slice:RuntimeWarning")  # of NumPy, where all that is read is NaN
@pytest.mark.parametrize("name", [*BANDS, *(f"pairs: {name}" for name in MASKED)])
def test_excluded_blocks_are_not_read(name: str) -> None:
    """Batch row b has NaN in all blocks that share no pair with its b-th block, whose results then are those of all."""
    config = SMALL if INTERPRETED else config_for(torch.float32, 16)
    num_q, num_k = 40, 49
    if name in BANDS:
        cover: Band | Pairs = BANDS[name].band(num_q, num_k)
        allowed = band_pairs(BANDS[name], num_q, num_k)[None]
    else:
        mask, at = MASKED[name.removeprefix("pairs: ")](150), torch.arange(150)
        cover = Pairs(mask.to(torch.device(DEVICE)), at[50 : 50 + num_q].to(DEVICE), at[:num_k].to(DEVICE))
        allowed = mask.allowed(at[50 : 50 + num_q], at[:num_k])
    q, k, v, dout = (x.to(DEVICE) for x in make_qkv(1, 1, 1, 80, 8, dtype=torch.float32))
    q, dout, k, v = q[:, :, :num_q], dout[:, :, :num_q], k[:, :, :num_k], v[:, :, :num_k]
    clean_out, lse = triton_attention._forward(config, q, k, v, cover, Scores(0.3))
    delta = make_delta(dout, clean_out)
    clean = triton_attention._backward(config, BackwardTile(dout, q, k, v, None, lse, delta, cover, Scores(0.3)))

    def poisoned(x: Tensor, size: int, empty: Tensor) -> Tensor:
        """[blocks, 1, S, D]: batch row b lacks the blocks of ``size`` rows that ``empty`` [blocks, others] names."""
        rows = empty.to(DEVICE).repeat_interleave(size, 1)[:, None, : x.shape[2], None]
        return torch.where(rows, torch.nan, x.expand(len(empty), *x.shape[1:]))

    def check(got: Tensor, want: Tensor, size: int) -> None:
        for b, parts in enumerate(zip(got.split(size, 2), want.split(size, 2), strict=True)):
            assert torch.equal(parts[0][b], parts[1][0])

    for blocks, gradients in ((config.forward, False), (config.query_gradients, True)):
        empty = excluded(allowed, blocks.q, blocks.k)
        n = len(empty)
        keys, values = poisoned(k, blocks.k, empty), poisoned(v, blocks.k, empty)
        many = [x.expand(n, *x.shape[1:]) for x in (q, dout, lse, delta)]
        if gradients:
            tile = BackwardTile(many[1], many[0], keys, values, None, many[2], many[3], cover, Scores(0.3))
            check(triton_attention._backward(config, tile)[0], clean[0], blocks.q)
        else:
            check(triton_attention._forward(config, many[0], keys, values, cover, Scores(0.3))[0], clean_out, blocks.q)
    blocks = config.key_gradients
    empty = excluded(allowed, blocks.q, blocks.k).T
    queries, douts = poisoned(q, blocks.q, empty), poisoned(dout, blocks.q, empty)
    many = [x.expand(len(empty), *x.shape[1:]) for x in (k, v, lse, delta)]
    tile = BackwardTile(douts, queries, *many[:2], None, *many[2:], cover, Scores(0.3))
    for got, want in zip(triton_attention._backward(config, tile)[1:], clean[1:], strict=True):
        check(got, want, blocks.k)


@computes
def test_large_positions_and_ids() -> None:
    """Positions near 2**31, beyond what fp32 tells apart, and ids that differ in the upper 32 bits alone."""
    mask = Mask(window=(7, None), prefix=3)
    at = torch.arange(2**31 - 60, 2**31 - 10)
    tensors = on_device(inputs((2, 1), 50, 50), torch.float32)
    want = dense(*(x.double().cpu() for x in tensors), mask.allowed(at, at))
    assert_near(whole(tensors, Pairs(mask, at.to(DEVICE), at.to(DEVICE))), want, torch.float32)
    ids = Mask(documents=(torch.arange(50) // 11) * 2**32 + 5)
    at = torch.arange(50)
    want = dense(*(x.double().cpu() for x in tensors), ids.allowed(at, at))
    got = whole(tensors, Pairs(ids.to(torch.device(DEVICE)), at.to(DEVICE), at.to(DEVICE)))
    assert_near(got, want, torch.float32)


@computes
@pytest.mark.parametrize("slopes", [False, True], ids=["", "alibi"])
@pytest.mark.parametrize("mask", ["causal", "full", "window", "window ahead", "prefix and window", "length"])
def test_rows_of_a_cache_that_hold_no_token(mask: str, slopes: bool) -> None:
    """Few queries in any place; keys in any order, among them blocks and single rows at `UNUSED`, of any content."""
    q, k, v, _ = (x.to(DEVICE) for x in make_qkv(2, 4, 2, 60, 16, dtype=torch.float32))
    q_pos, order = torch.tensor([59, 30, 0]), torch.randperm(60, generator=torch.Generator().manual_seed(0))
    rows = torch.full((130,), UNUSED)
    rows[:20], rows[40:64], rows[65:81:2], rows[100:108] = order[:20], order[20:44], order[44:52], order[52:]
    content = torch.where(rows == UNUSED, 0, rows)
    keys, values = (x[:, :, content] for x in (k, v))
    given = {"alibi_slopes": torch.tensor([0.1, 0.2, 0.3, 0.4], device=DEVICE)} if slopes else {}
    cover = Pairs(without_unused(make_mask(mask, 2, 60)), q_pos.to(DEVICE), rows.to(DEVICE))
    running = MergingForward(KERNEL, q[:, :, q_pos], 16, Scores(0.25, **given))
    running.step(keys, values, [KernelTile((0, 3), (0, 130), cover)])
    out, lse = running.finish()
    whole = dense_attention(q.cpu(), k.cpu(), v.cpu(), pairs(mask, 2, 60), **{n: x.cpu() for n, x in given.items()})
    for got, want in zip((out, lse), whole, strict=True):
        assert gap(got.cpu(), want[:, :, q_pos]) <= 1e-5


@computes
def test_shapes_without_rows() -> None:
    q, k, v, dout, dlse = on_device(inputs((2, 1), 6, 6), torch.float32)
    at = torch.arange(6, device=DEVICE)
    for cover in (CAUSAL, Pairs(Mask(), at, at[:0])):
        got = whole([q, k[:, :, :0], v[:, :, :0], dout, dlse], cover)
        assert (got["out"] == 0).all() and (got["lse"] == -torch.inf).all() and (got["dq"] == 0).all()
    for cover in (CAUSAL, Pairs(Mask(), at[:0], at)):
        got = whole([q[:, :, :0], k, v, dout[:, :, :0], dlse[:, :, :0]], cover)
        assert got["out"].numel() == 0 and (got["dk"] == 0).all() and (got["dv"] == 0).all()


# --- features of scores
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


def dense_scored(tensors: list[Tensor], allowed: Tensor, p: Tensor, t: Tensor, scores: Scores) -> dict[str, Tensor]:
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
    want = dense_scored(tensors, allowed if allowed.ndim == 3 else allowed[None], p, t, scores)
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


@for_a_gpu
@pytest.mark.parametrize("name", sorted(FEATURES))
def test_gradients_repeat_as_declared(name: str) -> None:
    tensors = [x.float() for x in inputs((2, 1), NUM_Q, NUM_K, v_dim=4)]
    runs = [triton(tensors, shuffled(Mask()), replace(Scores(0.3), **FEATURES[name])) for _ in range(5)]
    assert TRITON.capability.deterministic_features is None  # every feature's gradient
    for other in runs[1:]:
        for key, x in other.items():
            assert torch.equal(x, runs[0][key]), key


@pytest.mark.nightly("interpreted")
@is_that_run
def test_interpreted(interpreted: Interpreted) -> None:
    """The tests above, on CPU tensors."""
    assert interpreted(__file__) > len(MASKS) * len(LAYOUTS) + 2 * len(FEATURES)


COVERS = {
    "band": lambda at: CAUSAL,
    "positions": lambda at: Pairs(Mask(), at, at),
    "documents": lambda at: Pairs(Mask(documents=torch.zeros(1, 300).long(), key_padding=at >= 0), at, at, True),
}


COMPILED: dict[str, Any] = {
    "none": {},
    "softcap": {"softcap": 30.0},
    "alibi_slopes": {"alibi_slopes": torch.ones(8)},
    "bias": {"bias": torch.ones(1, 8, 300, 300, dtype=torch.bfloat16)},
    "bias by blocks": {"bias": torch.ones(1, 8, 300, 304, dtype=torch.bfloat16)},
    "dropout": {"dropout_p": 0.1, "dropout_seed": torch.zeros(2).long()},
}
WITH_A_KERNEL = ("bias", "blocks", "dropout")
HEAD_DIMS = ((64, 64), (128, 128), (192, 128), (256, 256))
SPILLED = {64: 0, 128: 72 if torch.__version__.startswith("2.11.") else 32, 192: 128, 256: 160}
"""Bytes that kernels without features may spill, by head dim: bases of addresses, read once a block or outside loops.

Blocks that spill nothing were slower. PyTorch 2.11 has Triton 3.6, which spills more.
"""


def compile_passes(hopper: Hopper, dtype: torch.dtype, cover: str, dims: tuple[int, int], feature: str) -> Compiled:
    """Forward and backward of a tile."""
    triton_backward = room("triton_backward")
    triton_dropout = room("triton_dropout")
    triton_forward = room("triton_forward")
    triton_visits = room("triton_visits")

    def empty(heads: int, last: int) -> Tensor:
        return torch.empty(1, 300, heads, last, dtype=dtype).transpose(1, 2)

    (dim, v_dim), scores = dims, Scores(0.3, **COMPILED[feature])
    scores = replace(scores, wanted=scores.features & {"alibi_slopes", "bias"})
    q, k, v, dout = empty(8, dim), empty(2, dim), empty(2, v_dim), empty(8, v_dim)
    statistics, what = torch.empty(1, 8, 300), COVERS[cover](torch.arange(300))

    def launch() -> None:
        triton_attention._forward(None, q, k, v, what, scores)
        tile = BackwardTile(dout, q, k, v, None, statistics, statistics, what, scores)
        triton_attention._backward(None, tile)

    return hopper(launch, triton_visits, triton_dropout, triton_forward, triton_backward)


@pytest.mark.skipif(INTERPRETED, reason="interpreted kernels are not compiled")
@pytest.mark.parametrize(
    ("dtype", "cover", "dims", "feature"),
    [
        (torch.bfloat16, "documents", (128, 128), "none"),
        *(
            pytest.param(torch.bfloat16, cover, dims, "none", marks=pytest.mark.nightly("compiled"))
            for cover, dims in product(COVERS, HEAD_DIMS)
            if (cover, dims) != ("documents", (128, 128))
        ),
        *(
            pytest.param(torch.float32, "documents", dims, "none", marks=pytest.mark.nightly("compiled"))
            for dims in HEAD_DIMS
        ),
        *(
            pytest.param(torch.bfloat16, "documents", (128, 128), feature, marks=pytest.mark.nightly("compiled"))
            for feature in COMPILED
            if feature != "none"
        ),
    ],
    ids=lambda x: str(x).removeprefix("torch."),
)  # fmt: skip
@pytest.mark.full
def test_compiles_for_hopper(
    dtype: torch.dtype, cover: str, dims: tuple[int, int], feature: str, hopper: Hopper
) -> None:
    """Without a feature, nearly nothing is spilled; products run on tensor cores, copies beside them.

    Programs of four warps share a processor with another, which hides what they wait for.
    """
    compiled = compile_passes(hopper, dtype, cover, dims, feature)
    assert len(compiled.kernels) == (3 if cover == "band" else 5) + feature.endswith(WITH_A_KERNEL)
    spills = compiled.spills
    if feature == "none":
        assert max(spills) <= SPILLED[dims[0]], compiled.log
    rows = compiled.kernels.get("grains_kernel")
    assert cover == "band" or "__assertfail" in rows[0].asm["ptx"], "positions above 31 bits"
    for name, kernels in compiled.kernels.items():
        for kernel in kernels:
            assert kernel.metadata.shared <= 227 << 10, name
            if dtype == torch.bfloat16 and max(dims) <= 128 and name in ("forward_kernel", "key_gradients_kernel"):
                assert 2 * (kernel.metadata.shared + (1 << 10)) <= 228 << 10, f"two programs of {name} do not fit"
            if dtype == torch.bfloat16 and name not in ("grains_kernel", "blocks_kernel", "words_kernel"):
                assert "wgmma.mma_async" in kernel.asm["ptx"], name
                assert "cp.async.bulk.tensor" in kernel.asm["ptx"], name


@pytest.mark.skipif(INTERPRETED, reason="interpreted kernels are not compiled")
@pytest.mark.parametrize(
    ("capability", "kib", "dim"),
    [
        pytest.param(*gpu, dim, marks=[pytest.mark.nightly("compiled")] * ((gpu[0], dim) != ((8, 9), 128)))
        for gpu, dim in product((((8, 0), 163), ((8, 9), 99), ((10, 0), 227), ((12, 0), 99)), (64, 128, 256))
    ],
    ids=str,
)
@pytest.mark.full
def test_other_gpus_have_the_memory(
    capability: tuple[int, int], kib: int, dim: int, hopper: Hopper, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Shared memory of a program: on an A100, an L40, a B200 and an RTX 5090."""
    hopper.driver.arch = 10 * capability[0] + capability[1]
    monkeypatch.setattr(triton_attention, "_capability", lambda x: capability)
    for feature in ("none", "bias", "dropout"):
        compiled = compile_passes(hopper, torch.bfloat16, "documents", (dim, dim), feature)
        for name, kernels in compiled.kernels.items():
            assert max(kernel.metadata.shared for kernel in kernels) <= kib << 10, (name, feature)


def plain(q: Tensor, k: Tensor, v: Tensor, dout: Tensor, allowed: Tensor) -> list[Tensor]:
    """out, dq, dk, dv by torch operations in the inputs' dtype."""
    q, k, v = (x.detach().requires_grad_() for x in (q, k, v))
    group = q.shape[1] // k.shape[1]
    keys, values = (x.repeat_interleave(group, 1) for x in (k, v))
    scores = (q @ keys.mT * q.shape[3] ** -0.5).masked_fill(~allowed[:, None], -torch.inf)
    out = scores.softmax(-1) @ values
    return [out, *torch.autograd.grad(out, (q, k, v), dout)]


@for_a_gpu
@pytest.mark.parametrize("layout", ["zigzag", "striped", "shuffled"])
@pytest.mark.parametrize("mask", ["causal", "window", "documents", "key padding, both ways", "prefix"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("dim", "v_dim"), [(64, 64), (128, 128), (192, 128), (256, 256), (80, 48)])
def test_error_is_that_of_plain_operations(mask: str, layout: str, dtype: torch.dtype, dim: int, v_dim: int) -> None:
    S = 1030
    at = torch.arange(S)
    options = {"causal": Mask(), "window": Mask(window=(200, None)), "prefix": Mask(prefix=300)}
    options["documents"] = Mask(documents=torch.stack([at // 300, at // 170]))
    options["key padding, both ways"] = Mask(causal=False, key_padding=at % 5 != 2)
    allowed = options[mask].allowed(at, at).cuda()
    generator = torch.Generator().manual_seed(dim)
    shapes = ((4, dim), (2, dim), (2, v_dim), (4, v_dim))
    q, k, v, dout = (torch.randn(2, h, S, d, generator=generator).to("cuda", dtype) for h, d in shapes)
    out, *gradients = play_ring(TRITON, LAYOUTS[layout](S), options[mask], 4, q, k, v, dout)
    yardstick = plain(q, k, v, dout, allowed)
    exact = plain(*(x.double() for x in (q, k, v, dout)), allowed)
    for name, got, single, want in zip(("out", "dq", "dk", "dv"), (out, *gradients[1:]), yardstick, exact, strict=True):
        assert got.isfinite().all(), name
        limit = 1.5 * block_rms(single.double() - want) + 1e-6 * block_rms(want)
        excess = (block_rms(got.double() - want) / limit).max().item()
        assert excess <= 1, f"{name}: {excess:.2f} times the allowed error"


def gpu_call(cover: Band | Pairs, S: int, dtype: torch.dtype = torch.bfloat16) -> list[Tensor]:
    generator = torch.Generator("cuda").manual_seed(S)

    def draw(heads: int) -> Tensor:
        return torch.randn(2, heads, S, 64, device="cuda", generator=generator).to(dtype)

    q, k, v, dout = draw(4), draw(2), draw(2), draw(4)
    out, lse = triton_attention._forward(None, q, k, v, cover, Scores(0.3))
    delta = make_delta(dout, out)
    return [
        out,
        lse,
        *triton_attention._backward(None, BackwardTile(dout, q, k, v, None, lse, delta, cover, Scores(0.3))),
    ]


def gpu_pairs(S: int) -> Pairs:
    at = torch.randperm(2 * S, generator=torch.Generator().manual_seed(1))[:S].cuda()
    ids = torch.arange(2 * S) // 99
    mask = Mask(window=(S, None), documents=ids, key_padding=ids != 4)
    return Pairs(mask.to(at.device), at, at)


@for_a_gpu
def test_waits_for_nothing_repeats_and_is_captured() -> None:
    for cover in (Distances(-3, 400).band(700, 700), gpu_pairs(700)):
        want = gpu_call(cover, 700)
        torch.cuda.set_sync_debug_mode("error")
        try:
            again = gpu_call(cover, 700)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        assert all(torch.equal(a, b) for a, b in zip(want, again, strict=True))
        q, k, v = (torch.randn(2, heads, 700, 64, device="cuda", dtype=torch.bfloat16) for heads in (4, 2, 2))
        alone = triton_attention._forward(None, q, k, v, cover, Scores(0.3))
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = triton_attention._forward(None, q, k, v, cover, Scores(0.3))
        graph.replay()
        assert all(torch.equal(a, b) for a, b in zip(alone, captured, strict=True))


@for_a_gpu
def test_other_lengths_and_bounds_compile_nothing() -> None:
    triton = pytest.importorskip("triton")
    compiled = []
    for cover in (CAUSAL, gpu_pairs(97)):
        gpu_call(cover, 97)
    with triton.knobs.runtime.scope():
        triton.knobs.runtime.jit_cache_hook = lambda **what: compiled.append(what["repr"])
        for cover, S in ((FULL, 1), (Distances(1, 16).band(160, 160), 160), (gpu_pairs(1), 1), (gpu_pairs(160), 160)):
            gpu_call(cover, S)
    assert not compiled
