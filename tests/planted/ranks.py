"""What the checks run on ranks."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from importlib import import_module, reload
from itertools import product
from typing import Any
from unittest import mock

import pytest
import torch
from inside import room


def origin(rank: int) -> str:
    import cp_mesh

    return cp_mesh.__file__


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
    from cases import LAYOUTS, make_mask, pairs
    from checks import coverage

    problems = []
    masks = ("causal", "causal and length", "window", "documents", "everything")
    for S, cp_size, layout, mask in product((7, 12), (2, 3), LAYOUTS, masks):
        problems += coverage(LAYOUTS[layout](S), make_mask(mask, 2, S), pairs(mask, 2, S), cp_size)
    return problems


def every_layout(rank: int) -> list[str]:
    import test_layouts
    from cases import LAYOUTS

    tests = (test_layouts.test_every_position_is_held_once, test_layouts.test_permutation_and_inverse)
    each: list[Any] = [(test, (make, 7)) for test in tests for make in LAYOUTS.values()]
    each += [(test_layouts.test_joint_shards_are_those_of_the_streams, (name,)) for name in test_layouts.INNER]
    return outcomes(rank, [*each, (test_layouts.test_zigzag_documents_are_zigzag_in_each, ())])


def every_fact(rank: int) -> list[str]:
    from cases import LAYOUTS
    from test_blocks import facts_of_all_blocks

    from cp_mesh import Mask

    survey = room("survey")

    problems = []
    masks = ({}, {"window": (5, 0)}, {"window": (17, 0)}, {"prefix": 9}, {"causal": False})
    packed = torch.arange(31) // 13
    for options, layout, cp_size, documents in product(
        masks, ("contiguous", "zigzag", "striped"), (2, 3, 5), (None, packed)
    ):
        given = LAYOUTS[layout](31), Mask(**options, documents=documents), 31, cp_size
        by_documents = documents is not None
        want = facts_of_all_blocks(*given, by_documents)
        with mock.patch.object(survey, "CHUNK", 30):  # less than pairs of all ranks
            found = survey.survey(*given, 0, by_documents)
        if found.needed.tolist() != want["needed"] or found.overlapping != want["overlapping"]:
            got = found.needed.tolist(), found.overlapping
            problems.append(f"{layout}, {options}, {cp_size} ranks: {got}, not {want}")
    return problems


def every_segments(rank: int) -> list[str]:
    from cases import LAYOUTS, pairs_of
    from checks import coverage

    from cp_mesh import Mask

    problems = []
    runs = ("contiguous", "zigzag", "striped", "balanced")
    # the second has a document that comes back; of the third the tail of a document has more rows than keys before it
    documents = [[0] * 3 + [1] * 6 + [2] * 3, [0, 0, 1, 1, 0, 0, 0, 2, 2, 3, 3, 3], [0] * 4 + [1] * 5 + [2] * 3]
    documents += [[-1] * 2 + [0] * 4 + [-1] * 3 + [1] * 3]
    for cp_size, layout, ids, left in product((1, 2, 3), runs, documents, (None, 2, 3)):
        options = {"documents": torch.tensor([ids]), "window": (left, None)}
        problems += coverage(LAYOUTS[layout](12), Mask(**options), pairs_of(options, 12), cp_size, segments=True)
    return problems


def kernel_steps(rank: int) -> list[str]:
    import test_kernels
    from checks import GQA
    from inside import KERNELS

    return outcomes(
        rank,
        [
            (test_kernels.test_each_step_returns_gradients_of_its_own, (KERNELS["reference"],)),
            (test_kernels.test_partial_results_add_up, (KERNELS["cpu_flash"], GQA)),
        ],
    )


def in_triton(rank: int, what: str) -> list[str]:
    """Triton's kernels in its interpreter, on CPU tensors; that takes seconds, so tiles are few and small."""
    with mock.patch.dict(os.environ, TRITON_INTERPRET="1"):  # read where kernels are defined, and where they run
        for module in ("triton.language.standard", "triton.language.random", "triton.language"):
            reload(import_module(module))  # torch imported them to be compiled
        import test_combine
        import test_triton_scores as scores
        from interpreted import speed_up_interpreter

        combine = room("combine")

        speed_up_interpreter()
        fused = mock.patch.object(combine, "fused", lambda dtype, device: dtype != torch.float64)
        with fused, mock.patch.multiple(scores, NUM_Q=18):  # two blocks of queries, and two of keys
            if what == "sums":
                half, single = (test_combine.DTYPES[name] for name in ("half", "float"))
                return outcomes(
                    rank,
                    [
                        (test_combine.test_outputs_merge, ("overlapping", 5, half, "cpu")),
                        (test_combine.test_rows_sum, ("overlapping", 5, single, "cpu")),
                        (test_combine.test_sinks_scale_outputs_and_leave_lse, ("overlapping", single, "cpu")),
                        (test_combine.test_delta, (5, ("BHSD", "BSHD"), single, "cpu")),
                    ],
                )
            if what == "few queries":
                import test_few_queries as few

                given = few.SHAPES[0], few.MASKS[2], few.SCORES[1], 17, torch.float32
                return outcomes(rank, [(few.test_few_queries, given), (few.test_appended_rows, (torch.float32,))])
            return outcomes(rank, [(scores.check, triton_tile(what))])


def triton_tile(what: str) -> tuple[Any, Any]:
    """Scores and cover; blocks of which all pairs, some and none are allowed."""
    import test_triton_scores as scores
    from inside import Distances, Pairs, Scores

    from cp_mesh import Mask

    if what == "a band":
        return Scores(0.3), Distances(-15, 12)
    if what == "documents":
        ids = torch.stack([torch.arange(scores.S) // 15, torch.zeros(scores.S, dtype=torch.int64)])
        ids[1, 20:27] = -1
        blocks = torch.arange(scores.S) // 10  # of which some lie in two documents
        return Scores(0.3), scores.in_order(Mask(documents=ids, window=(17, None), blocks=blocks))
    options = {name: x for feature in scores.FEATURES.values() for name, x in feature.items()}
    # the second block of keys is of two runs; the third has keys that some queries precede
    cover = Pairs(Mask(), torch.arange(34) * 2 + 75, torch.cat([torch.arange(20) * 3, torch.arange(60, 80)]))
    options |= {"bias": scores.draw(2, 2, 34, 80)}
    return Scores(0.3, first_head=7, first_batch=3, **options), cover
