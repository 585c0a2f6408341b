"""The loss in chunks of rows: `F.cross_entropy` of float logits in its results, and one chunk of them in its memory."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from inside import inner, room
from ranks import REFUSALS, on_ranks
from torch import Tensor
from torch.autograd import forward_ad

from cp_mesh import UnsupportedError, cross_entropy

ops, prepare_losses = room("losses_in_chunks"), inner("token_losses", "prepare_losses")

N, V = 50, 33
IGNORED = -7
INF, NAN = float("inf"), float("nan")


def labelled(dtype: torch.dtype, num_tokens: int = N, vocab: int = V, device: str = "cpu") -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(num_tokens)
    logits = 5 * torch.randn(num_tokens, vocab, generator=generator, dtype=torch.float64)
    labels = torch.randint(vocab, (num_tokens,), generator=generator)
    labels[::7] = IGNORED
    return logits.to(device, dtype), labels.to(device)


def ours(logits: Tensor, labels: Tensor) -> Tensor:
    return prepare_losses("cross_entropy", logits, labels, IGNORED)().sum()


def torchs(logits: Tensor, labels: Tensor) -> Tensor:
    """In float32, or in float64 for float64."""
    logits = logits if logits.dtype == torch.float64 else logits.float()
    return F.cross_entropy(logits, labels, ignore_index=IGNORED, reduction="sum")


def step(fn: Callable[[Tensor, Tensor], Tensor], logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """The loss, and the gradient of a part of it."""
    logits = logits.detach().requires_grad_()
    total = fn(logits, labels)
    (0.37 * total).backward()
    assert logits.grad is not None
    return total.detach(), logits.grad


def units(x: Tensor, y: Tensor) -> Tensor:
    """How many numbers of their half precision lie between two tensors, entry by entry."""
    assert x.dtype == y.dtype
    first, second = (torch.where(b < 0, -32768 - b, b) for b in (z.view(torch.int16).int() for z in (x, y)))
    return (first - second).abs()


def in_chunks_of(rows: int, logits: Tensor) -> Any:
    return mock.patch.object(ops, "CHUNK_BYTES", rows * logits.shape[1] * (8 if logits.dtype == torch.float64 else 4))


LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "contiguous": lambda x: x,
    "a part of a longer vocabulary": lambda x: torch.cat([x, x.new_full((len(x), 2), NAN)], 1)[:, :V],
    "transposed": lambda x: x.t().contiguous().t(),
}


DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]


@pytest.mark.parametrize(
    ("dtype", "lies"), [*((x, "contiguous") for x in DTYPES), *((torch.float16, x) for x in [*LAYOUTS][1:])]
)
def test_loss_and_gradient(dtype: torch.dtype, lies: str) -> None:
    """Those of `F.cross_entropy` in float64; in half precision, rounded once, so that nearly all entries are equal."""
    logits, labels = labelled(dtype)
    with in_chunks_of(7, logits):
        total, grad = step(ours, LAYOUTS[lies](logits), labels)
        again = step(ours, LAYOUTS[lies](logits), labels)
    assert torch.equal(total, again[0]) and torch.equal(grad, again[1])
    assert total.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    exact, exact_grad = step(torchs, logits.double(), labels)
    tolerance = 1e-12 if dtype == torch.float64 else 1e-6
    torch.testing.assert_close(total.double(), exact, rtol=tolerance, atol=tolerance)
    assert grad.dtype == dtype and not grad[labels == IGNORED].any()
    if dtype.itemsize == 2:
        for expected in (exact_grad.to(dtype), step(torchs, logits, labels)[1]):
            apart = units(grad, expected)
            assert apart.max() <= 1 and (apart == 0).double().mean() > 0.99
    else:
        torch.testing.assert_close(grad.double(), exact_grad, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_chunks_change_nothing(dtype: torch.dtype) -> None:
    logits, labels = labelled(dtype)
    whole = step(ours, logits, labels)
    for rows in (0, 1, 7, 25, N - 1, N):  # a row that is larger than a chunk is one
        with in_chunks_of(rows, logits):
            assert len(list(ops._chunks(logits, None))) == -(-N // max(1, rows))
            chunked = step(ours, logits, labels)
        for x, y in zip(chunked, whole, strict=True):
            torch.testing.assert_close(x, y, rtol=1e-15, atol=1e-15)


def test_large_logits_lose_no_digits() -> None:
    logits, labels = labelled(torch.float64)
    for shift in (1e4, -1e4):
        shifted = (logits + shift).float()
        total, grad = step(ours, shifted, labels)
        exact, exact_grad = step(torchs, shifted.double(), labels)
        torch.testing.assert_close(total.double(), exact, rtol=1e-6, atol=0.0)
        torch.testing.assert_close(grad.double(), exact_grad, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("label", [0, 1, IGNORED])
@pytest.mark.parametrize(
    "row",
    [[INF, 0.0, 1.0], [-INF, 0.0, 1.0], [NAN, 0.0, 1.0], [-INF] * 3, [INF, -INF, INF], [1e30, -1e30, 0.0]],
    ids=str,
)
def test_what_is_not_finite(row: list[float], label: int) -> None:
    """Beside a finite row, which keeps its gradient."""
    logits, labels = torch.tensor([row, [1.0, 2.0, 3.0]]), torch.tensor([label, 2])
    for x, y in zip(step(ours, logits, labels), step(torchs, logits, labels), strict=True):
        torch.testing.assert_close(x, y, equal_nan=True, rtol=1e-6, atol=1e-7)


def test_no_token_counts() -> None:
    logits, labels = labelled(torch.bfloat16)
    total, grad = step(ours, logits, torch.full_like(labels, IGNORED))
    assert total == 0 and not grad.any()
    total, grad = step(ours, logits[:0], labels[:0])
    assert total == 0 and grad.shape == (0, V)


@pytest.mark.parametrize("label", [V, -1, -100])
def test_labels_outside_of_the_vocabulary(label: int) -> None:
    logits, labels = labelled(torch.bfloat16)
    labels[3] = label
    for fn in (ours, torchs):
        with pytest.raises(IndexError, match=f"Target {label} is out of bounds"):
            fn(logits, labels)


def test_derivatives_that_there_are_not() -> None:
    logits, labels = labelled(torch.float64)
    logits.requires_grad_()
    (grad,) = torch.autograd.grad(ours(logits, labels), logits, create_graph=True)
    with pytest.raises(UnsupportedError, match="no second derivative"):
        grad.square().sum().backward()
    logits = logits.detach()
    with pytest.raises(UnsupportedError, match=r"cross_entropy: expected no transform of torch\.func"):
        torch.func.grad(ours)(logits, labels)
    with forward_ad.dual_level(), pytest.raises(NotImplementedError, match="forward mode"):
        ours(forward_ad.make_dual(logits, logits), labels)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_autocast_changes_nothing(dtype: torch.dtype) -> None:
    logits, labels = labelled(dtype)
    expected = step(ours, logits, labels)
    with torch.autocast("cpu", torch.bfloat16):
        found = step(ours, logits, labels)
    assert all(torch.equal(x, y) and x.dtype == y.dtype for x, y in zip(found, expected, strict=True))


def peak_of(fn: Callable[[], Any]) -> int:
    """Bytes that the CPU's allocator gave out at most at a time, beyond those before."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        fn()
    events = sorted(
        (event for event in profile.profiler.kineto_results.events() if event.name() == "[memory]"),
        key=lambda event: event.start_ns(),
    )
    held = torch.tensor([event.nbytes() for event in events]).cumsum(0)
    return int(held.max())


@pytest.mark.unpoisoned
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_memory(dtype: torch.dtype) -> None:
    """The gradient, and a few chunks: the CPU copies what it casts, CUDA does not."""
    logits, labels = labelled(dtype, 512, 1024)
    whole = logits.numel() * (8 if dtype == torch.float64 else 4)
    logits.requires_grad_()
    with in_chunks_of(16, logits):  # of 32
        forward = peak_of(lambda: ours(logits, labels))
        total = ours(logits, labels)
        backward = peak_of(total.backward)
    chunk, of_rows = whole // 32, 512 * 8 * 10
    assert forward <= 3 * chunk + of_rows
    assert backward <= logits.nbytes + 3 * chunk + of_rows
    assert peak_of(lambda: torchs(logits, labels).backward()) >= 2 * whole  # what is measured can be seen


@pytest.mark.unpoisoned
def test_a_chunk_is_bounded() -> None:
    """256 MiB of float32, or one row."""
    chunks = list(ops._chunks(torch.empty(65536, 32768, device="meta"), None))
    assert [(rows.stop - rows.start, len(x)) for rows, x in chunks] == [(2048, 2048)] * 32
    chunks = list(ops._chunks(torch.empty(2, 1 << 27, device="meta"), None))
    assert [rows for rows, _ in chunks] == [slice(0, 1), slice(1, 2)]


@pytest.mark.gpu
@pytest.mark.unpoisoned
@pytest.mark.parametrize("dtype", DTYPES)
def test_on_a_gpu(dtype: torch.dtype) -> None:
    """Results, the same each time, also where nothing else is allowed; and memory: one chunk beside the gradient."""
    logits, labels = labelled(dtype, 4096, 8192, "cuda")
    chunk = logits.numel() * (8 if dtype == torch.float64 else 4) // 16
    with in_chunks_of(4096 // 16, logits):
        torch.use_deterministic_algorithms(True)
        try:
            again = step(ours, logits, labels)
        finally:
            torch.use_deterministic_algorithms(False)
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        total, grad = step(ours, logits, labels)
        assert torch.cuda.max_memory_allocated() - before <= logits.nbytes + 1.5 * chunk
    assert torch.equal(total, again[0]) and torch.equal(grad, again[1])
    exact, exact_grad = step(torchs, logits.double(), labels)
    tolerance = 1e-12 if dtype == torch.float64 else 1e-5
    torch.testing.assert_close(total.double(), exact, rtol=tolerance, atol=tolerance)
    if dtype.itemsize == 2:
        apart = units(grad, exact_grad.to(dtype))[labels != IGNORED]
        assert apart.max() <= 1 and not grad[labels == IGNORED].any()
    else:
        torch.testing.assert_close(grad.double(), exact_grad, rtol=tolerance, atol=tolerance)


@on_ranks(2)
def test_a_count_that_is_given() -> None:
    """The sums of shares by the tokens of this call, and by a number and a tensor that are given."""
    logits, labels = labelled(torch.float64)
    total = F.cross_entropy(logits, labels, reduction="sum", ignore_index=IGNORED)
    for count, want in ((None, total / (labels != IGNORED).sum()), *((x, 2 * total / 7) for x in (7, torch.tensor(7)))):
        share = cross_entropy(logits, labels, dist.group.WORLD, count=count, ignore_index=IGNORED)
        dist.all_reduce(share)
        torch.testing.assert_close(share, want)
    nothing = torch.full_like(labels, IGNORED)
    for none in (0, torch.tensor(0)):
        assert cross_entropy(logits, nothing, dist.group.WORLD, count=none, ignore_index=IGNORED) == 0


COUNTS = [-7, 0, torch.tensor(0), torch.tensor(-1.0), math.nan, math.inf, "", [], torch.ones(3), "by rank", "of a rank"]


@pytest.mark.parametrize("count", COUNTS, ids=str)
@on_ranks(2)
def test_counts_that_divide_nothing(rank: int, count: Any) -> None:
    logits, labels = labelled(torch.float64)
    if isinstance(count, str) and count:
        count = 20.0 + rank if count == "by rank" else torch.tensor(20 + rank)
    with pytest.raises(REFUSALS, match="cross_entropy: count: expected"):
        cross_entropy(logits, labels, dist.new_group(), count=count, ignore_index=IGNORED)
