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
from hypothesis import HealthCheck, Phase, example, given, settings
from hypothesis import strategies as st
from uses import PLAIN, Call, Draws, Mixing, Use, draw_layout, draw_mask, draw_runs, run, uses

large = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
number = settings.default.max_examples


def check(pool: Any, use: Use, timeout: float = 60.0) -> None:
    report(pool(use.size).run(run, use, timeout=timeout))


@example(Call(Case("zigzag", "causal", 13, GQA, scale=0.7, head_chunks=3), (2,)))
@example(Call(Case("zigzag", "causal", 13, GQA), (6,)))  # three stages
@example(Call(Case("striped", "full", 13, MHA), (6,)))
# A checkpoint lets saved tensors be asked for once, and Ulysses keeps one more.
@example(Call(Case("zigzag", "causal", 13, (3, 3), method="ulysses", way="selective checkpoint"), (3,)))
@example(Mixing(2, "contiguous", 1, "causal_conv1d", pad=False, width=1))  # a rank without rows
# Documents of bytes in a shorter sequence: -1 is 255 there.
@example(Mixing(2, "contiguous", 4, mask={"length": 2, "documents": torch.zeros(4, dtype=torch.uint8)}, states=True))
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


def look(pool: Any, size: int, most: int) -> None:
    """Uses up to the first that fails, as it was drawn: for bugs that are planted."""

    @settings(large, max_examples=most, phases=[Phase.generate], derandomize=True, database=None)
    @given(uses(size))
    def each(use: Use) -> None:
        check(pool, use, timeout=20.0)

    each()


# --- without ranks


@st.composite
def schedules(draw: Any) -> tuple[Any, ...]:
    """Number of ranks, layout, mask and length."""
    d = Draws(draw)
    cp, S = d.number(1, 9), d.number(0, 24)
    mask, kind = draw_mask(d, 2, S), d.of(*PLAIN, "permuted", "own", "documents", "joint", *["balanced"] * (S > 0))
    return cp, draw_layout(d, kind, S, cp, mask), mask, S


@st.composite
def schedules_of_many_pieces(draw: Any) -> tuple[Any, ...]:
    """And whether documents become segments. Of many ranks; or every position is a piece, and vectors compare them."""
    d = Draws(draw)
    if d.chance(50):
        cp = d.of(12, 16, 24, 32, 64)
        S = cp + d.number(0, 9)
        mask = draw_mask(d, 2, S)
        return cp, draw_layout(d, d.of(*PLAIN, "balanced", "documents"), S, cp, mask), mask, S, True
    cp = d.number(5, 8)
    S = 17 * cp
    of_causal = ({"causal": True, "prefix": 0}, {"causal": True, "prefix": d.number(1, S)})
    mask = draw_mask(d, 2, S) | d.of(*of_causal, {"window": (d.number(0, S), None)}, {"window": (None, d.number(0, S))})
    return cp, draw_runs(d, S, 1), mask, S, False


def covered(cp: int, layout: Any, mask: dict[str, Any], S: int, segments: bool = False) -> None:
    report([coverage(Case(layout, mask, S).make_layout(), mask_of(mask), pairs_of(mask, S), cp, segments)])


@pytest.mark.full
@given(schedules())
def test_every_pair_once(use: tuple[Any, ...]) -> None:
    covered(*use)


@pytest.mark.full
@settings(large, max_examples=max(3, number // 300))
@given(schedules_of_many_pieces())
def test_every_pair_once_of_many_pieces(use: tuple[Any, ...]) -> None:
    covered(*use)
