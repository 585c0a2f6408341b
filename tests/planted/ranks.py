"""What checks of planted bugs run on a rank."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import product
from typing import Any

import pytest
import test_layouts
import torch
from cases import LAYOUTS, make_mask, pairs, pairs_of
from checks import coverage

from cp_mesh import Mask

# the second has a document that comes back; of the third the tail of a document has more rows than keys before it
DOCUMENTS = [[0] * 3 + [1] * 6 + [2] * 3, [0, 0, 1, 1, 0, 0, 0, 2, 2, 3, 3, 3], [0] * 4 + [1] * 5 + [2] * 3]
DOCUMENTS += [[-1] * 2 + [0] * 4 + [-1] * 3 + [1] * 3]


def outcomes(rank: int, tests: Sequence[tuple[Callable[..., None], tuple[Any, ...]]]) -> list[str]:
    """What fails of these tests with their arguments."""
    problems = []
    for test, arguments in tests:
        try:
            test(*arguments)
        except (AssertionError, RuntimeError, pytest.fail.Exception) as error:
            problems.append(f"{test.__name__}: {str(error)[:200]}")
    return problems


def every_coverage(rank: int) -> list[str]:
    problems = []
    masks = ("causal", "causal and length", "window", "documents", "everything")
    for S, cp_size, layout, mask in product((7, 12), (2, 3), LAYOUTS, masks):
        problems += coverage(LAYOUTS[layout](S), make_mask(mask, 2, S), pairs(mask, 2, S), cp_size)
    return problems


def every_layout(rank: int) -> list[str]:
    tests = (test_layouts.test_every_position_is_held_once, test_layouts.test_permutation_and_inverse)
    return outcomes(rank, [(test, (make, 7)) for test in tests for make in LAYOUTS.values()])


def every_segments(rank: int) -> list[str]:
    problems = []
    runs = ("contiguous", "zigzag", "striped", "balanced")
    for cp_size, layout, ids, left in product((1, 2, 3), runs, DOCUMENTS, (None, 2, 3)):
        options = {"documents": torch.tensor([ids]), "window": (left, None)}
        problems += coverage(LAYOUTS[layout](12), Mask(**options), pairs_of(options, 12), cp_size, segments=True)
    return problems
