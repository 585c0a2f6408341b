"""What `cp_mesh.tools.verify` compares with, and that a bug which one device has too is found in every dtype."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import dense as oracle
import pytest
import torch
from cases import MASKS, SCORES, gap, pairs
from checks import forget_plans
from inside import KERNELS, METHODS, BackwardTile, Kernel, Scores, dense_attention, inner, make_scores, path_of
from ranks import on_ranks, refused
from scripts import run_script
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

import cp_mesh
from cp_mesh import Contiguous, Mask, Striped, UnsupportedError
from cp_mesh.tools import VerificationError

Dense, compare = inner("tools.verification.verify", "Dense", "_compare")
TERMS = inner("scores", "TERMS")

B, H, K, S, D, E = 2, 6, 3, 17, 5, 4
BY_NAME = ("out", "lse", "dq", "dk", "dv")


def scores_of(name: str, dtype: torch.dtype = torch.float64) -> Scores:
    given = SCORES[name](B, H, S)
    if (seed := given.get("dropout_seed")) is not None:
        given["dropout_seed"] = seed if isinstance(seed, Tensor) else torch.tensor([seed, 0])
    floats = {key: x.to(dtype) for key, x in given.items() if isinstance(x, Tensor) and x.is_floating_point()}
    return Scores(0.3, **given | floats)


def by_oracle(mask: str, scores: Scores, tensors: list[Tensor], wanted: list[str]) -> dict[str, Tensor]:
    """The same results by the tests' own dense attention and autograd."""
    q, k, v, dout = tensors
    leaves = {"dq": q, "dk": k, "dv": v} | {name: getattr(scores, name) for name in wanted}
    leaves = {name: x.clone().requires_grad_() for name, x in leaves.items()}
    given = {name: leaves.get(name, getattr(scores, name)) for name in TERMS}
    kept = None
    if scores.dropout_p:
        assert scores.dropout_seed is not None
        kept = oracle.dense_dropout(B, H, S, scores.dropout_p, *scores.dropout_seed.tolist())
    out, lse = oracle.dense_attention(
        leaves["dq"], leaves["dk"], leaves["dv"], pairs(mask, B, S), scores.scale, softcap=scores.softcap, kept=kept,
        **given,
    )  # fmt: skip
    grads = torch.autograd.grad(out, list(leaves.values()), dout)
    return {"out": out, "lse": lse, **dict(zip(leaves, grads, strict=True))}


@pytest.mark.parametrize("num_scores", [1 << 25, 2 * B * H * S * 3], ids=["at once", "by blocks of rows"])
@pytest.mark.parametrize(
    ("mask", "score"),
    [
        *(("everything", score) for score in SCORES),
        *((x, "every score") for x in ("causal", "window", "no key at all")),
    ],
)
def test_float64_is_dense_attention(mask: str, score: str, num_scores: int) -> None:
    tensors, scores = list(oracle.make_qkv(B, H, K, S, D, E)), scores_of(score)
    wanted = [name for name in TERMS if getattr(scores, name) is not None]
    with mock.patch(f"{path_of('dense')}.MAX_SCORES", num_scores):
        got = dense_attention(*tensors, Mask(**MASKS[mask](B, S)), scores, wanted)
    assert list(got.of_scores) == sorted(wanted)
    for name, want in by_oracle(mask, scores, tensors, wanted).items():
        assert gap(got.of_scores[name] if name in wanted else getattr(got, name), want) <= 1e-12, name


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_lower_precision_rounds_each_product_and_nothing_else(dtype: torch.dtype) -> None:
    """Errors are those of the dtype: products in a lower or a higher one would be a power of two away."""
    tensors = [x.to(dtype) for x in oracle.make_qkv(B, H, K, S, D, E)]
    mask, scores = Mask(), scores_of("every score", torch.float32)
    exact = dense_attention(*(x.double() for x in tensors), mask, scores_of("every score"))
    precision = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("medium")
    try:
        got = dense_attention(*tensors, mask, scores)
        assert torch.get_float32_matmul_precision() == "medium"  # the user's setting is back
    finally:
        torch.set_float32_matmul_precision(precision)
    for name in BY_NAME:
        x, want = getattr(got, name), getattr(exact, name)
        assert x.dtype == (torch.float32 if name == "lse" else dtype)
        error = ((x.double() - want).norm() / want.norm()).item() / torch.finfo(dtype).eps
        assert (0.001 if name == "lse" else 0.1) < error < 3.0, (name, error)  # lse is of scores that softcap bounds


# Bugs that the kernel, or the schedule, has on one device as well as on many.


def rescaled(kernel: Kernel, of_forward: float, of_backward: float) -> Kernel:
    """One whose passes have another scale."""

    def forward(*given: Any) -> Any:
        *others, scores = given
        return kernel.forward(*others, replace(scores, scale=of_forward * scores.scale))

    def backward(tile: BackwardTile) -> Any:
        return kernel.backward(tile._replace(scores=replace(tile.scores, scale=of_backward * tile.scores.scale)))

    return replace(kernel, forward=forward, backward=backward)


def near_sighted(self: Mask, seq_len: int, reaches: Callable[..., Any] = Mask.reaches) -> Any:
    """A window that ends 10 tokens early between runs of positions."""
    window = self.window and (self.window[0] - 10, self.window[1])
    return reaches(replace(self, window=window), seq_len)


BUGS: dict[str, tuple[dict[str, Any], Callable[[Kernel], Any]]] = {
    "a window too short": ({"mask": Mask(window=(20, 0))}, lambda _: mock.patch.object(Mask, "reaches", near_sighted)),
    "twice the scale in the backward": ({}, lambda kernel: rescaled(kernel, 1.0, 2.0)),
    "a scale wrong by 2 %": ({}, lambda kernel: rescaled(kernel, 1.02, 1.02)),
    "no softcap": (
        {"scores": {"softcap": 1.0}},
        lambda _: mock.patch(
            f"{path_of('spec')}.make_scores", lambda *x, make=make_scores: replace(make(*x), softcap=None)
        ),
    ),
}


@contextmanager
def planted(bug: str, kernel: str) -> Iterator[None]:
    """With the bug in this process, and nothing kept of calls without it."""
    made = BUGS[bug][1](KERNELS[kernel])
    patch = mock.patch.dict(KERNELS, {kernel: made}) if isinstance(made, Kernel) else made

    forget_plans()
    try:
        with patch:
            yield
    finally:
        forget_plans()


SCALED = ["twice the scale in the backward", "a scale wrong by 2 %"]


@pytest.mark.parametrize(
    ("bug", "kernel"),
    [(bug, "cpu_flash") for bug in SCALED]
    + [pytest.param(bug, "reference", marks=[pytest.mark.full] * (bug in SCALED)) for bug in BUGS],
)
@pytest.mark.quick("a scale wrong by 2 %-cpu_flash", "a window too short-reference")
@on_ranks(2)
def test_verify_finds_what_one_device_has_too(rank: int, axis: DeviceMesh, bug: str, kernel: str) -> None:
    for dtype in (torch.float64, torch.bfloat16):
        call = partial(
            cp_mesh.tools.verify, axis, seq_len=384, num_heads=2, num_kv_heads=1, head_dim=32, dtype=dtype,
            kernel=kernel, **BUGS[bug][0],
        )  # fmt: skip
        assert call().passed
        with planted(bug, kernel), pytest.raises(VerificationError) as error:
            call()
        report = error.value.report
        assert not report.passed and any(not ratio <= 1 for ratio in report.ratios.values())
        if dtype != torch.float64 and bug in SCALED:
            assert any(not ratio <= 1 for ratio in report.of_one_device.values())
            assert "the kernel is wrong on one device too" in str(error.value)
        assert call().passed


@pytest.mark.parametrize(
    ("seq_len", "wrong"),
    [
        *((seq_len, "nothing") for seq_len in (32, 127, 130, 512)),
        (32, "everywhere"),
        (32, "a head of small values"),
        *((seq_len, "a head of rank 2") for seq_len in (130, 511, 512)),
    ],
)
@pytest.mark.quick("32-", "512-a head")
@on_ranks(4)
def test_errors_of_few_rows_may_scatter_and_no_head_hides(
    rank: int, axis: DeviceMesh, seq_len: int, wrong: str
) -> None:
    """Of 20 results, whose errors are independent of one device's, and as large where not wrong."""
    rows = [Striped().positions(seq_len, 4, i) for i in range(4)]
    times = torch.ones(1, 4, seq_len, dtype=torch.float64)
    if wrong == "everywhere":
        times *= 2.5
    elif wrong == "a head of rank 2":
        times[:, 1, rows[2]] = 2.2 if seq_len == 512 else 4.0
    elif wrong == "a head of small values":
        times[:, 3] = 10.0
    for seed in range(20):
        draw = partial(torch.randn, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)

        def with_error(x: Tensor, size: Tensor | float, draw: Any = draw) -> Tensor:
            # all elements of a row have one error: what a rounded `out` of the forward does to its gradients
            error = size * x.flatten(2).square().mean(2, keepdim=True).sqrt() * draw(x.shape[:3])
            return x + error.view(*error.shape, *[1] * (x.ndim - 3))

        exact = [draw(1, 4, seq_len, 8), draw(1, 4, seq_len), *(draw(1, heads, seq_len, 8) for heads in (4, 2, 2))]
        exact[0][:, 3] *= 1e-3
        alone, plain = ([with_error(x, size) for x in exact] for size in (0.01, 0.02))
        sharded = [with_error(exact[0], 0.01 * times), *(with_error(x, 0.01) for x in exact[1:])]
        own = Dense(*(x[:, :, rows[rank]] for x in sharded), {})
        whole = (Dense(*results, {}) for results in (exact, plain, alone))
        assert compare("any", own, *whole, rows[rank], axis.get_group()).passed == (wrong == "nothing"), seed


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@on_ranks(4)
def test_a_rank_may_have_no_rows(rank: int, axis: DeviceMesh, dtype: torch.dtype) -> None:
    scores = {"bias": torch.randn(1, 4, 3, 3, generator=torch.Generator().manual_seed(0))}
    options: Any = {"seq_len": 3, "scores": scores, "dtype": dtype, "head_dim": 8}
    assert cp_mesh.tools.verify(axis, layout=Contiguous(), **options).passed


@on_ranks(2)
def test_a_kernel_of_short_shards_alone_is_refused(rank: int, axis: DeviceMesh) -> None:
    with refused("got 2, with window tiles.*dtype=torch.float64", UnsupportedError):
        cp_mesh.tools.verify(axis, mask=Mask(window=(0, 0)), seq_len=2, dtype=torch.float32)


@on_ranks(2)
def test_lse_of_rows_that_see_no_key_is_compared(rank: int, axis: DeviceMesh) -> None:
    """A rank has no other rows."""
    rows, lse = torch.arange(2) + 2 * rank, torch.full((1, 1, 4), -torch.inf, dtype=torch.float64)
    x = torch.zeros(1, 1, 4, 2, dtype=torch.float64)
    exact = Dense(x, lse, x, x, x, {})
    for got in (lse, torch.zeros_like(lse)):
        own = Dense(*(each[:, :, rows] for each in (x, got, x, x, x)), {})
        assert compare("any", own, exact, None, None, rows, axis.get_group()).passed == (got is lse)


@pytest.mark.full
def test_the_command_line_takes_methods():
    """Three ranks do not divide the four heads that the others are proved with."""
    script = Path(cp_mesh.__file__).parent / "__main__.py"
    done = run_script(script, ["--device", "cpu", "--seq-len", "50", "--method", *METHODS], num_ranks=3)
    assert done.returncode == 0, done.printed
    for method in METHODS:
        _, _, lines = done.printed.partition(f"kernel auto, method {method}:\n")
        assert lines.split("\nfloat64, ")[0].count("  exact") == 6, done.printed  # three layouts, causal and full
