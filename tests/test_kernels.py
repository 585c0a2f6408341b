"""Kernels that run on the CPU, through their contract, against the oracle; and how a kernel is chosen."""

import csv
import importlib
import math
import re
from dataclasses import replace
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from cases import gap
from checks import band_tile
from dense import dense_attention, make_qkv
from inside import (
    CAUSAL,
    FULL,
    KERNELS,
    BackwardTile,
    Band,
    Capability,
    Distances,
    Kernel,
    KernelTile,
    MergingForward,
    Request,
    Scores,
    SummingBackward,
    inner,
    make_delta,
    name_of_captured,
    room,
    shortfalls,
)
from torch import Tensor

from cp_mesh import ArgumentError, UnsupportedError

flex = room("kernel")
choose_kernel = inner("table", "choose_kernel")
accumulation_dtype = inner("combine", "accumulation_dtype")
VECTORS = inner("scores", "VECTORS")
RECORDED, warn_of_choice = inner("kernels.contract", "RECORDED"), inner("call.plan", "warn_of_choice")
kept_weights, philox = inner("dropout", "kept_weights", "philox")

SCALE = 0.3
SCORES = Scores(SCALE)
HEADS = ((3, 3), (6, 3), (3, 1))
BANDS = {
    "full": Distances(),
    "causal": Distances(0, None),
    "strictly causal": Distances(1, None),
    "causal with older keys": Distances(-3, None),
    "one pair": Distances(4, None),
    "window": Distances(0, 2),
    "window of one": Distances(0, 0),
    "two-sided window": Distances(-2, 1),
    "lower triangle": Distances(-4, None),
    "upper triangle": Distances(None, 0),
}
SHAPES = ((5, 5), (7, 4), (4, 7), (1, 6), (6, 1))

each_kernel = pytest.mark.parametrize(
    "kernel", [KERNELS["reference"], KERNELS["cpu_flash"]], ids=lambda kernel: kernel.name
)


def band_pairs(at: Distances, num_q: int, num_k: int) -> Tensor:
    """bool [num_q, num_k] of a band, pair by pair."""
    lo, hi = -num_k if at.lo is None else at.lo, num_q if at.hi is None else at.hi
    return torch.tensor([[lo <= i - j <= hi for j in range(num_k)] for i in range(num_q)])


def inputs(heads: tuple[int, int], num_q: int, num_k: int, v_dim: int = 5, **options) -> tuple[Tensor, ...]:
    """q, k, v, dout of 2 batch rows, and dlse."""
    q, _, _, dout = make_qkv(2, *heads, num_q, 5, v_dim, seed=1, **options)
    _, k, v, _ = make_qkv(2, *heads, num_k, 5, v_dim, seed=2, **options)
    dlse = torch.randn(q.shape[:3], dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    return q, k, v, dout, dlse.to(accumulation_dtype(q.dtype))


def run(kernel: Kernel, q, k, v, dout, dlse, steps: list[tuple[slice, list[KernelTile]]]) -> dict[str, Tensor]:
    """Forward and backward of one pass; each step takes rows of k and v, and tiles in coordinates of these rows."""
    forward = MergingForward(kernel, q, v.shape[3], SCORES)
    for rows, tiles in steps:
        forward.step(k[:, :, rows], v[:, :, rows], tiles)
    out, lse = forward.finish()
    dtype = accumulation_dtype(q.dtype)
    assert lse.dtype == dtype
    backward = SummingBackward(kernel, dout, q, out, lse, delta_for(kernel, dout, out, dlse), SCORES)
    dk, dv = torch.zeros_like(k, dtype=dtype), torch.zeros_like(v, dtype=dtype)
    for i, (rows, tiles) in enumerate(steps):
        k_s, v_s = k[:, :, rows], v[:, :, rows]
        if i % 2:
            written = tuple(torch.full_like(x, torch.nan, dtype=dtype) for x in (k_s, v_s))
            assert backward.step(k_s, v_s, tiles, written) == []
            pieces = [(0, *written)]
        else:
            pieces = backward.step(k_s, v_s, tiles)
        for first, dk_piece, dv_piece in pieces:
            assert dk_piece.dtype == dv_piece.dtype == (q.dtype if kernel.rounds else dtype)
            begin = (rows.start or 0) + first
            dk[:, :, begin:][:, :, : dk_piece.shape[2]] += dk_piece
            dv[:, :, begin:][:, :, : dv_piece.shape[2]] += dv_piece
    return {"out": out, "lse": lse, "dq": backward.dq.finish(torch.full_like(q, torch.nan)), "dk": dk, "dv": dv}


def delta_for(kernel: Kernel, dout: Tensor, out: Tensor, dlse: Tensor | None) -> Tensor | None:
    assert kernel.uses_delta or dlse is None
    return make_delta(dout, out, dlse) if kernel.uses_delta else None


def dense(q, k, v, dout, dlse, allowed: Tensor) -> dict[str, Tensor]:
    qkv = [x.detach().clone().requires_grad_() for x in (q, k, v)]
    out, lse = dense_attention(*qkv, allowed, SCALE)
    results, gradients = ((out,), (dout,)) if dlse is None else ((out, lse), (dout, dlse))
    return {"out": out, "lse": lse} | dict(
        zip(("dq", "dk", "dv"), torch.autograd.grad(results, qkv, gradients), strict=True)
    )


def check(got: dict[str, Tensor], want: dict[str, Tensor], tolerance: float = 1e-12) -> None:
    for name, x in got.items():
        assert gap(x, want[name]) <= tolerance, name


def serves(kernel: Kernel, at: Distances) -> bool:
    return kernel.name == "reference" or at.hi is None


@each_kernel
@pytest.mark.parametrize("at", BANDS.values(), ids=BANDS)
def test_every_band(kernel, at):
    for (num_q, num_k), heads in product(SHAPES, HEADS):
        allowed = band_pairs(at, num_q, num_k)
        if not allowed.any():
            continue
        tile = band_tile(at, num_q, num_k)
        if not serves(kernel, Distances.of(tile.cover, tile.q[1] - tile.q[0], tile.k[1] - tile.k[0])):
            continue
        q, k, v, dout, dlse = inputs(heads, num_q, num_k)
        dlse = dlse if kernel.name == "reference" else None
        want, tiles = dense(q, k, v, dout, dlse, allowed[None]), [KernelTile(tile.q, tile.k, tile.cover)]
        if kernel.name == "reference":  # which takes bands that are not trimmed, too
            tiles.append(KernelTile((0, num_q), (0, num_k), at.band(num_q, num_k)))
        for each in tiles:
            check(run(kernel, q, k, v, dout, dlse, [(slice(0, num_k), [each])]), want)


@each_kernel
@pytest.mark.parametrize("heads", HEADS, ids=str)
def test_partial_results_add_up(kernel, heads):
    """A causal square of 9 by 9 in steps and tiles of all kinds; the backward sees the lse of all keys."""
    q, k, v, dout, _ = inputs(heads, 9, 9)
    allowed = band_pairs(BANDS["causal"], 9, 9)[None]
    causal, full = CAUSAL, FULL
    steps = [
        (slice(4, 7), [KernelTile((4, 7), (0, 3), causal), KernelTile((7, 9), (0, 3), full)]),
        (slice(0, 4), [KernelTile((0, 4), (0, 4), causal), KernelTile((4, 9), (1, 4), full)]),
        (slice(7, 9), [KernelTile((7, 9), (0, 2), causal)]),
        (slice(0, 4), [KernelTile((4, 9), (0, 1), full)]),
        (slice(7, 9), []),
    ]
    check(run(kernel, q, k, v, dout, None, steps), dense(q, k, v, dout, None, allowed))


@each_kernel
def test_each_step_returns_gradients_of_its_own(kernel):
    """New tensors that hold this source's gradient alone, however often a source is visited."""
    q, k, v, dout, _ = inputs((6, 3), 5, 5)
    out, lse = dense_attention(q, k, v, torch.ones(1, 5, 5, dtype=torch.bool), SCALE)
    backward = SummingBackward(kernel, dout, q, out, lse, delta_for(kernel, dout, out, None), SCORES)
    tiles = [KernelTile((0, 5), (0, 5), FULL)]
    ((_, *first),) = backward.step(k, v, tiles)
    kept = [x.clone() for x in first]
    ((_, *second),) = backward.step(k, v, tiles)
    written = torch.full_like(k, torch.nan), torch.full_like(v, torch.nan)
    backward.step(k, v, tiles, written)
    for a, b, c, d in zip(first, second, kept, written, strict=True):
        assert torch.equal(a, b) and torch.equal(a, c) and torch.equal(a, d) and a.data_ptr() != b.data_ptr()


def test_the_reference_computes_more_rows_than_it_holds_at_once():
    q, k, v, dout, dlse = inputs((2, 1), 1030, 9)
    steps = [(slice(0, 9), [KernelTile((0, 1030), (0, 9), Distances(3, None).band(1030, 9))])]
    allowed = torch.arange(1030)[:, None] - torch.arange(9) >= 3
    check(run(KERNELS["reference"], q, k, v, dout, dlse, steps), dense(q, k, v, dout, dlse, allowed[None]))


def test_philox_is_that_of_its_authors():
    """The known answers of Random123's kat_vectors."""
    full = 0xFFFFFFFF
    for key, counter, words in (
        ((0, 0), (0, 0, 0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        ((full, full), (full, full, full, full), (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    ):
        assert tuple(map(int, philox([torch.tensor(x) for x in key], [torch.tensor(x) for x in counter]))) == words


@pytest.mark.parametrize("p", [0.1, 0.5])
def test_dropped_weights_are_as_even_as_independent_ones(p):
    """Of rows, columns and heads of a mask: counts, correlations, the largest one, and the largest singular value."""
    n = 768
    scores = Scores(1.0, dropout_p=p, dropout_seed=torch.tensor([11, 3]))
    at = torch.arange(n)
    dropped = (~kept_weights(scores, 1, 2, at, at)[0]).double()
    first, second = (dropped - p) / math.sqrt(p * (1 - p))
    assert abs(first.sum().item()) < 4 * n  # n² terms of variance 1
    for x, y in ((first, first), (first.T, first.T), (first, second), (first[:, :-1], first[:, 1:])):
        products = x @ y.T / math.sqrt(x.shape[1])
        if x is y or x.data_ptr() == y.data_ptr():
            assert abs(x.sum(1).square().mean().item() / x.shape[1] - 1) < 0.2
            products.fill_diagonal_(0.0)
        assert abs(products.square().mean().item() - 1) < 0.02
        assert products.abs().max().item() < 7.5
    assert abs(torch.linalg.svdvals(first)[0].item() / math.sqrt(n) - 2) < 0.05


# --- which kernel is taken
CPU = Request("cpu", (0, 0), torch.float32, frozenset({"full", "causal"}), 64, 64, False, False)
H200 = replace(CPU, device="cuda", compute_capability=(9, 0), dtype=torch.bfloat16)
OLD, B200 = (replace(H200, compute_capability=x) for x in ((7, 5), (10, 0)))


def covers(wanted: Request, *names: str) -> Request:
    return replace(wanted, covers=frozenset(names))


@pytest.mark.parametrize(
    ("wanted", "name"),
    [
        (CPU, "cpu_flash"),
        (replace(CPU, dtype=torch.float64, deterministic=True), "cpu_flash"),
        (covers(CPU), "cpu_flash"),
        (replace(CPU, head_dim=5, v_head_dim=5), "cpu_flash"),
        (replace(CPU, v_head_dim=32), "reference"),
        (replace(CPU, differentiable_lse=True), "reference"),
        (covers(CPU, "window"), "reference"),
        (covers(CPU, "full", "pairs"), "reference"),
        (H200, "cudnn"),
        (replace(H200, dtype=torch.float16), "cudnn"),
        (replace(H200, head_dim=256, v_head_dim=256), "fa2"),
        (replace(H200, compute_capability=(8, 0)), "fa2"),
        (B200, "fa2"),
        (replace(B200, head_dim=256, v_head_dim=256), "fa2"),
        (replace(B200, compute_capability=(12, 0)), "fa2"),
        (covers(B200, "full", "pairs"), "triton"),
        (replace(H200, dtype=torch.float32), "triton"),
        (replace(OLD, dtype=torch.float32), "reference"),
        (replace(H200, dtype=torch.float64), "reference"),
        (OLD, "reference"),
        (covers(H200, "full", "pairs"), "triton"),
        (covers(H200, "causal", "window"), "triton"),
        (replace(H200, features=frozenset({"bias"}), deterministic=True), "triton"),
        (replace(H200, deterministic=True), "triton"),
        (replace(H200, differentiable_lse=True), "triton"),
        (replace(H200, v_head_dim=128), "triton"),
        (replace(H200, head_dim=60, v_head_dim=60), "triton"),
    ],
)
def test_auto_is_a_static_table(wanted: Request, name: str) -> None:
    """Without FlashAttention-4, whether or not it is installed here."""
    if name == "triton" and KERNELS[name].capability.lacking():
        name = "reference"
    absent = replace(KERNELS["fa4"].capability, lacking=lambda: "absent")
    with mock.patch.dict(KERNELS, fa4=replace(KERNELS["fa4"], capability=absent)):
        assert choose_kernel("auto", wanted) is KERNELS[name]
        assert choose_kernel(name, wanted) is KERNELS[name]


@pytest.mark.parametrize(
    ("wanted", "name", "lack"),
    [
        (CPU, "cudnn", "device cpu (has cuda)"),
        (H200, "cpu_flash", "device cuda (has cpu)"),
        (replace(H200, compute_capability=(8, 0)), "cudnn", "compute capability (8, 0) (needs (9, 0))"),
        (OLD, "fa2", "compute capability (7, 5) (needs (8, 0))"),
        (replace(H200, dtype=torch.float32), "fa2", "torch.float32 (has torch.bfloat16, torch.float16)"),
        (covers(CPU, "window"), "cpu_flash", "'window' tiles (has full, causal)"),
        (replace(H200, head_dim=136), "cudnn", "head dim 136 (needs a multiple of 8 up to 128)"),
        (replace(H200, v_head_dim=60), "fa2", "v head dim 60 (needs a multiple of 8 up to 256)"),
        (replace(CPU, v_head_dim=32), "cpu_flash", "v head dim 32 other than head dim 64"),
        (replace(CPU, differentiable_lse=True), "cpu_flash", "a gradient through lse"),
        (replace(H200, deterministic=True), "fa2", "a deterministic backward"),
    ],
)
def test_a_kernel_that_cannot_serve_is_refused_with_one_that_can(wanted: Request, name: str, lack: str) -> None:
    assert lack in shortfalls(KERNELS[name].capability, wanted)
    lacks = "; ".join(shortfalls(KERNELS[name].capability, wanted))
    message = f"kernel={name!r} lacks {lacks}; kernel={choose_kernel('auto', wanted).name!r} can serve this call"
    with pytest.raises(UnsupportedError, match=f"^{re.escape(message)}$"):
        choose_kernel(name, wanted)


def test_cudnn_is_taken_by_name_where_no_run_is_recorded() -> None:
    assert choose_kernel("cudnn", B200) is KERNELS["cudnn"]
    (lack,) = shortfalls(KERNELS["cudnn"].capability, B200)
    assert lack == "a trial on compute capability (10, 0) (by name it runs)"


GPUS = {"NVIDIA H100 80GB HBM3": (9, 0), "NVIDIA H200": (9, 0)}


def test_recorded_gpus_are_those_of_the_records() -> None:
    found = set()
    for path in (Path(__file__).parent.parent / "docs" / "results").glob("*.csv"):
        with path.open(newline="") as file:
            found |= {row["gpu"] for row in csv.DictReader(file) if row.get("gpu")}
    assert {GPUS[name] for name in found} == set(RECORDED)


@pytest.mark.parametrize(
    ("name", "wanted", "warned"),
    [
        ("fa2", B200, "fa2' was not tried on a GPU of compute capability (10, 0)"),
        ("cudnn", H200, ""),
        ("cpu_flash", CPU, ""),
        ("reference", OLD, "no fast kernel can serve this call"),
    ],
)
def test_what_auto_warns_of(name: str, wanted: Request, warned: str, recwarn: pytest.WarningsRecorder) -> None:
    """Of a kernel that nobody tried on this GPU, and of a slow one; a name is a choice."""
    warn_of_choice(KERNELS[name], name, wanted)
    assert not recwarn
    warn_of_choice(KERNELS[name], "auto", wanted)
    assert [warned in str(x.message) for x in recwarn] == [True] * bool(warned)


@pytest.mark.parametrize(
    ("rows", "keys", "cover", "forward", "backward"),
    [
        (65, 128, FULL, "cudnn", "cudnn"),
        (128, 192, FULL, "cudnn", "flash"),
        (192, 192, CAUSAL, "cudnn", "cudnn"),
        (1, 128, FULL, "flash", "flash"),
        (128, 1, FULL, "flash", "flash"),
    ],
)
def test_tiles_that_cudnn_computes_wrongly_are_not_its(
    rows: int, keys: int, cover: Band, forward: str, backward: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    q, k = torch.zeros(1, 2, rows, 8), torch.zeros(1, 2, keys, 8)
    lse, called = torch.zeros(1, 2, rows), []
    for name in ("cudnn", "flash"):

        def record(*given: Any, scale: float, name: str = name) -> tuple[Tensor, ...]:
            called.append(name)
            return q, lse, k

        monkeypatch.setattr(room("aten"), name, SimpleNamespace(forward=record, backward=record))
    KERNELS["cudnn"].forward(q, k, k, cover, SCORES)
    KERNELS["cudnn"].backward(BackwardTile(q, q, k, k, q, lse, None, cover, SCORES))
    assert called == [forward, backward]


def test_all_shortfalls_are_told():
    lacking = Capability(devices=("cuda",), dtypes=(torch.float16,), max_head_dim=32, deterministic=False)
    wanted = replace(covers(CPU, "window", "pairs"), v_head_dim=48, differentiable_lse=True, deterministic=True)
    assert len(shortfalls(lacking, wanted)) == 9
    with pytest.raises(UnsupportedError, match=r"^kernel='auto': no kernel can serve this call: ") as error:
        choose_kernel("auto", replace(CPU, device="tpu"))
    assert all(re.search(f"{name} lacks [^;]*device tpu", str(error.value)) for name in KERNELS)
    with pytest.raises(UnsupportedError, match=r"^kernel='reference' lacks device tpu .*; no kernel can serve this"):
        choose_kernel("reference", replace(CPU, device="tpu"))
    with pytest.raises(ArgumentError, match=r"one of auto, fa4, .*flex, cpu_flash, reference, got 'x'; kernel='auto'"):
        choose_kernel("x", CPU)


FUNCTION = Request("cuda", (9, 0), torch.bfloat16, frozenset({"pairs"}), 128, 128, False, False)


@pytest.mark.parametrize(
    ("features", "changed", "chosen"),
    [
        ({"score_mod"}, {}, "flex"),
        ({"score_mod", "mask_mod"}, {"dtype": torch.float32, "differentiable_lse": True, "v_head_dim": 64}, "flex"),
        ({"mask_mod"}, {"deterministic": True}, "flex"),
        ({"score_mod"}, {"deterministic": True}, "reference"),
        ({"score_mod", VECTORS}, {}, "reference"),
        ({"score_mod"}, {"head_dim": 8, "v_head_dim": 8}, "reference"),
        ({"score_mod"}, {"dtype": torch.float64}, "reference"),
        ({"score_mod"}, {"device": "cpu"}, "reference"),
        (set(), {}, "triton"),
    ],
)
def test_functions_on_gpus_are_compiled(
    features: set[str], changed: dict[str, Any], chosen: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As far as the compiled kernel goes; and it is for them alone."""
    for name in ("flex", "triton"):
        capability = replace(KERNELS[name].capability, lacking=lambda: None)
        monkeypatch.setitem(KERNELS, name, replace(KERNELS[name], capability=capability))
    assert choose_kernel("auto", replace(FUNCTION, features=frozenset(features), **changed)).name == chosen


@pytest.mark.parametrize(
    ("there", "words"), [(True, "the operators of flex_attention .*found"), (False, "package triton")]
)
def test_what_flex_attention_of_pytorch_lacks(there: bool, words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a release whose private parts are others, or without triton."""
    monkeypatch.setattr(flex, "find_spec", lambda _: there or None)
    monkeypatch.delattr(importlib.import_module("torch._inductor.kernel.flex.flex_attention"), "FixedLayout")
    wanted = replace(FUNCTION, features=frozenset({"score_mod"}))
    assert choose_kernel("auto", wanted).name == "reference"
    with pytest.raises(UnsupportedError, match=f"kernel='flex' lacks {words}.*kernel='reference' can"):
        choose_kernel("flex", wanted)


def test_the_table_is_keyed_by_name_and_the_reference_can_do_everything():
    assert all(kernel.name == name for name, kernel in KERNELS.items())
    assert list(KERNELS)[-1] == "reference"
    wanted = replace(covers(CPU, "full", "causal", "window", "pairs"), head_dim=3, v_head_dim=517)
    wanted = replace(wanted, differentiable_lse=True, deterministic=True)
    for device, dtype in product(("cpu", "cuda"), (torch.float64, torch.float32, torch.bfloat16, torch.float16)):
        older = replace(wanted, device=device, dtype=dtype, compute_capability=(5 * (device == "cuda"), 0))
        assert not shortfalls(KERNELS["reference"].capability, older)


def test_gradients_of_scores_have_one_order_on_all_ranks():
    """A set of names has another one in each process."""
    names = [name_of_captured(i) for i in range(9)]
    wanted = frozenset({"alibi_slopes", *names})
    scores = Scores(1.0, alibi_slopes=torch.zeros(2), captured=(torch.zeros(1),) * 9, wanted=wanted)
    assert [*inner("scores", "ScoreGradients").zeros(scores, torch.float32)] == ["alibi_slopes", *names]
