"""Random uses of the public functions over ranks: each must be exact.

Hypothesis draws them, and makes simpler what fails. The quick and the full form draw the same in every run;
`--nightly=random` draws new ones, and keeps in `.hypothesis` what failed.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from cases import mask_of, pairs_of
from checks import GQA, MHA, Case, coverage, report
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from uses import PLAIN, Batch, Call, Draws, Indexed, Mixing, Use, draw_layout, draw_mask, draw_runs, run, uses

large = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
number = settings.default.max_examples


def check(pool: Any, use: Use) -> None:
    report(pool(use.size).run(run, use))


@example(Call(Case("zigzag", "causal", 13, GQA, scale=0.7, head_chunks=3), (2,)))
@example(Call(Case("zigzag", "causal", 13, GQA), (6,)))  # three stages
@example(Call(Case("striped", "full", 13, MHA), (6,)))
# A checkpoint lets saved tensors be asked for once, and Ulysses keeps one more.
@example(Call(Case("zigzag", "causal", 13, (3, 3), method="ulysses", way="selective checkpoint"), (3,)))
@example(Mixing(2, "contiguous", 1, "causal_conv1d", pad=False, width=1))  # a rank without rows
# Documents of bytes in a shorter sequence: -1 is 255 there.
@example(Mixing(2, "contiguous", 4, mask={"length": 2, "documents": torch.zeros(4, dtype=torch.uint8)}, states=True))
# Recomputed is a call that is known then, and must save as many tensors.
@example(Mixing(2, "contiguous", 4, "ssd", recomputed=True))
@example(Indexed(2, Batch(2, "contiguous", 1, pad=False), 1))  # a rank without rows
@pytest.mark.more("random")
@settings(large, max_examples=number // 5)
@given(uses(1, 2, 3, 4))
def test_random_uses(pool: Any, use: Use) -> None:
    check(pool, use)


@pytest.mark.full
@settings(large, max_examples=number // 20)
@given(uses(8))
def test_random_uses_of_many_ranks(pool: Any, use: Use) -> None:
    check(pool, use)


# --- without ranks


@st.composite
def schedules(draw: Any, many: bool) -> tuple[Any, ...]:
    """Number of ranks, layout, mask, length, and whether documents become segments.

    ``many`` ranks; or all positions are pieces, and vectors compare them.
    """
    d = Draws(draw)
    if many and d.chance(50):
        cp, S = d.number(5, 8), d.of(85, 102, 119)
        of_causal = {"causal": True, "prefix": d.of(0, d.number(1, S))}
        mask = draw_mask(d, 2, S) | d.of(
            of_causal, {"window": (d.number(0, S), None)}, {"window": (None, d.number(0, S))}
        )
        return cp, draw_runs(d, S, 1), mask, S, False
    cp = d.of(12, 16, 24, 32, 64) if many else d.number(1, 9)
    S = cp + d.number(0, 9) if many else d.number(0, 24)
    mask, kinds = draw_mask(d, 2, S), ("permuted", "own", "joint") * (not many) + ("balanced",) * (S > 0)
    return cp, draw_layout(d, d.of(*PLAIN, "documents", *kinds), S, cp, mask), mask, S, many


def covered(cp: int, layout: Any, mask: dict[str, Any], S: int, segments: bool) -> None:
    report([coverage(Case(layout, mask, S).make_layout(), mask_of(mask), pairs_of(mask, S), cp, segments)])


@pytest.mark.full
@given(schedules(many=False))
def test_every_pair_once(use: tuple[Any, ...]) -> None:
    covered(*use)


@pytest.mark.full
@settings(large, max_examples=max(3, number // 300))
@given(schedules(many=True))
def test_every_pair_once_of_many_pieces(use: tuple[Any, ...]) -> None:
    covered(*use)
