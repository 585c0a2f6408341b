"""Attention of few queries by split keys: against the reference, interpreted or on a GPU, and compiled for Hopper."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import torch
from hopper import Hopper
from inside import FULL, Pairs, Scores, inner, room, without_unused
from interpreted import INTERPRETED, Interpreted, is_that_run
from torch import Tensor

from cp_mesh import Mask

few_queries = room("split_kv")
Further, attend_few = inner("split_kv", "Further", "attend_few")
reference = inner("kernels.reference", "_forward")

DEVICE = "cpu" if INTERPRETED else "cuda"
TOLERANCE = {torch.float32: 1e-5, torch.float16: 5e-3, torch.bfloat16: 3e-2}
computes = (lambda test: test) if INTERPRETED else pytest.mark.gpu

SHAPES = [(4, 2, 1, 150, 20, 12), (6, 1, 3, 70, 16, 16), (8, 1, 20, 40, 8, 8), (2, 2, 2, 0, 8, 8)]
"""H, K, query rows, keys, D, Dv."""
MASKS = [None, Mask(), Mask(window=(9, 0)), Mask(window=(5, 3), causal=False), Mask(prefix=4, window=(30, None))]
SCORES: list[dict[str, Any]] = [{}, {"softcap": 2.0}, {"alibi_slopes": 0.5}]


def inputs(shape: tuple[int, ...], dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    H, K, num_q, num_k, D, Dv = shape
    generator = torch.Generator().manual_seed(0)
    sizes = ((H, num_q, D), (K, num_k, D), (K, num_k, Dv))
    q, k, v = (torch.randn(2, *size, generator=generator).to(DEVICE, dtype) for size in sizes)
    return q, k, v


def scores_of(given: dict[str, Any], H: int) -> Scores:
    made = dict(given)
    generator = torch.Generator().manual_seed(1)
    if "alibi_slopes" in made:
        made["alibi_slopes"] = torch.rand(H, generator=generator).to(DEVICE)
    return Scores(0.3, **made)


def cases() -> list[Any]:
    found = [
        (shape, mask, scores, num_keys)
        for i, (shape, mask, scores) in enumerate(product(SHAPES, MASKS, SCORES))
        for num_keys in ((None, 17, 0)[i % 3],)
        if mask is not None or "alibi_slopes" not in scores
    ]
    typed = [(*case, torch.float16 if i % 4 == 3 else torch.float32) for i, case in enumerate(found)]
    return typed[::3] if INTERPRETED else typed


@computes
@pytest.mark.parametrize(("shape", "mask", "scores", "num_keys", "dtype"), cases())
def test_few_queries(shape, mask, scores, num_keys, dtype) -> None:
    """Any mask and score, keys in any order; those behind ``num_keys`` are no numbers, and not read."""
    H, _, num_q, num_k, _, Dv = shape
    q, k, v = inputs(shape, dtype)
    positions = torch.randperm(num_k, generator=torch.Generator().manual_seed(2)).to(DEVICE)
    kept = num_k if num_keys is None else min(num_keys, num_k)
    k[:, :, kept:], v[:, :, kept:] = torch.nan, torch.nan
    at = torch.arange(num_k - num_q, num_k, device=DEVICE).clamp(min=0)
    pairs = None if mask is None else Pairs(without_unused(mask), at, positions)
    out, lse = torch.full((2, H, num_q, Dv), torch.nan, device=DEVICE), torch.full((2, H, num_q), 7.0, device=DEVICE)
    given = scores_of(scores, H)
    attend_few(q, k, v, pairs, None if num_keys is None else torch.tensor([kept], device=DEVICE), given, (out, lse))
    if not kept:
        assert (out == 0).all() and (lse == -torch.inf).all()
        return
    cover = FULL if pairs is None else Pairs(pairs.mask, at, positions[:kept])
    want = reference(q.float(), k[:, :, :kept].float(), v[:, :, :kept].float(), cover, given)
    for got, exact in zip((out, lse), want, strict=True):
        assert torch.equal(got == -torch.inf, exact == -torch.inf)
        assert (got - exact)[exact > -torch.inf].abs().max() <= TOLERANCE[dtype] if (exact > -torch.inf).any() else True


@computes
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_appended_rows(dtype: torch.dtype) -> None:
    """Rows, numbers and what is counted, in one launch as in several, also of tensors that are views."""
    generator = torch.Generator().manual_seed(0)
    rows, mine = torch.tensor([3, 9, 4, 5, 9, 9, 6]), torch.tensor([0, 1, 1, 2, 3, 3, 3, 4])
    ours, theirs = (
        (
            Further.planned(rows.to(DEVICE), 3 + mine.to(DEVICE)),
            [torch.zeros(2, 3, 10, n, dtype=dtype) for n in (20, 8)],
        )
        for _ in range(2)
    )
    for num_new in (1, 3, 1, 2):
        new = [torch.randn(2, num_new, 3, n, generator=generator).to(DEVICE, dtype).transpose(1, 2) for n in (20, 8)]
        for (further, memory), call in ((ours, Further.append_fused), (theirs, None)):
            memory[:] = [x.to(DEVICE) for x in memory]
            if call is not None:
                call(further, *new, *memory)
                continue
            at = rows[int(further.taken) : int(further.taken) + num_new].tolist()
            for n, row in enumerate(at):
                for to, x in zip(memory, new, strict=True):
                    to[:, :, row] = x[:, :, n]
            further.taken.add_(num_new)
            further.num_keys.copy_(further.counts[further.taken])
        assert all(torch.equal(x, y) for x, y in zip(ours[0], theirs[0], strict=True))
        assert all(torch.equal(x[:, :, :9], y[:, :, :9]) for x, y in zip(ours[1], theirs[1], strict=True))


@pytest.mark.nightly("interpreted")
@is_that_run
def test_interpreted(interpreted: Interpreted) -> None:
    assert interpreted(__file__) == len(cases()[::3]) + 2


@is_that_run
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("scored", [False, True])
@pytest.mark.full
def test_nothing_spills_on_hopper(hopper: Hopper, dtype: torch.dtype, scored: bool) -> None:
    """All registers hold what they should, and two programs fit in a processor."""
    few_queries_triton = room("split_kv_triton")

    q, k, v = (torch.empty(1, heads, n, 128, dtype=dtype) for heads, n in ((32, 1), (8, 4096), (8, 4096)))
    into = torch.empty(1, 32, 1, 128), torch.empty(1, 32, 1)
    pairs = Pairs(without_unused(Mask()), torch.zeros(1, dtype=torch.int64), torch.arange(4096))
    scores = Scores(1.0, softcap=2.0, alibi_slopes=torch.ones(32)) if scored else Scores(1.0)

    def launch() -> None:
        attend_few(q, k, v, pairs if scored else None, torch.tensor([4000]), scores, into)
        Further.planned(torch.arange(5), torch.arange(6)).append_fused(k[:, :, :1], v[:, :, :1], k, v)

    compiled = hopper(launch, few_queries_triton)
    assert set(compiled.kernels) == {"splits_kernel", "merge_splits_kernel", "append_kernel"}
    is_of_3_9 = torch.__version__.startswith("2.15.")  # with Triton 3.9, which spills one register
    assert max(compiled.spills) <= 4 * (is_of_3_9 and scored and dtype == torch.float32)
    assert all(
        kernel.metadata.shared * few_queries.PROGRAMS_PER_PROCESSOR <= 227 << 10
        for kernel in compiled.kernels["splits_kernel"]
    )
