"""The table of what is exact and what is refused: every cell that can run here does what it says."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from checks import BY_FUNCTIONS, Case, parity, parity_on_ranks, report
from inside import KERNELS, METHODS, Capability
from ranks import mesh, num_collectives

import cp_mesh

sys.path.append(str(Path(__file__).resolve().parent.parent / "examples" / "benchmarks"))

from capabilities import EXACT, FEATURES, RANKS, TOKENS, answer, cells, support_table

HERE = ("cpu_flash", "reference")
SCORES = {"": "plain", "alibi_slopes": "alibi", "dropout_p": "dropout"}
SCORES |= {"score_mod": "alibi", "mask_mod": "plain"}


def case_of(words: str, method: str, kernel: str) -> Case:
    """The cell as a case of the parity gate."""
    feature = FEATURES[words]
    options = dict(feature.options)
    return Case(
        feature.layout or "zigzag",
        dict(feature.mask),
        TOKENS,
        feature.heads,
        kernel=kernel,
        sizes=(2, 8, feature.v_head_dim),
        scores=SCORES.get(feature.scores, feature.scores),
        head_chunks=options.pop("head_chunks", None),
        method=method,
        lse_gradient=feature.through_lse,
        way=feature.scores if feature.scores in BY_FUNCTIONS else "eager",
        options=options,
    )


@pytest.mark.parametrize(
    ("kernel", "method"),
    [
        pytest.param(*pair, marks=[pytest.mark.nightly("parity")] * (pair[0] != "reference" and pair[1] != "ring"))
        for pair in product(HERE, METHODS)
    ],
)
@pytest.mark.quick("reference-ring")
def test_what_is_exact_is(pool: Any, kernel: str, method: str) -> None:
    """Results and all gradients equal dense attention in float64."""
    exact = [words for (words, *of), said in cells().items() if of == [method, kernel] and said == EXACT]
    assert len(exact) >= 8
    cases = [case_of(words, method, kernel) for words in exact]
    report(pool(RANKS).run(parity_on_ranks, (RANKS,), ("cp",), cases, timeout=300))


def refusals(rank: int, cases: Sequence[Case]) -> list[str]:
    """Cells that are not refused before the first collective."""
    axis, problems = mesh((dist.get_world_size(),), ("cp",)), []
    for case in cases:
        before = num_collectives()
        try:
            parity(case, axis, [])
            problems.append(f"{case} was not refused")
        except (cp_mesh.UnsupportedError, cp_mesh.ArgumentError):
            pass
        if num_collectives() > before:
            problems.append(f"{case} was refused after a collective")
    return problems


@pytest.mark.parametrize("kernel", HERE)
@pytest.mark.full
def test_what_is_refused_raises(pool: Any, kernel: str) -> None:
    refused = [cell for cell, said in cells().items() if cell[2] == kernel and said != EXACT]
    assert refused
    cases = [case_of(*cell) for cell in refused]
    for found in pool(RANKS).run(refusals, cases):
        assert not found, "\n".join(found)


@pytest.mark.full
def test_the_table_is_asked_of_the_code() -> None:
    """A kernel that says it can do more, or less, changes its cells."""
    table, flash = support_table(), KERNELS["cpu_flash"]
    ring = METHODS["ring"]
    assert answer(FEATURES["softcap"], ring, flash) == "scores with softcap"
    able: Capability = replace(flash.capability, features=frozenset({"softcap"}), covers=("full", "causal", "pairs"))
    with mock.patch.dict(KERNELS, cpu_flash=replace(flash, capability=able)):
        assert answer(FEATURES["softcap"], ring, KERNELS["cpu_flash"]) == EXACT
        assert support_table() != table
    unable = replace(flash.capability, deterministic=False)
    with mock.patch.dict(KERNELS, cpu_flash=replace(flash, capability=unable)):
        assert answer(FEATURES["deterministic"], ring, KERNELS["cpu_flash"]) == "a deterministic backward"


@pytest.mark.parametrize("kernel", KERNELS)
def test_every_kernel_is_exact_somewhere(kernel: str) -> None:
    """A table that asks what no kernel can would say of it that it computes nothing."""
    assert any(answer(feature, METHODS["ring"], KERNELS[kernel]) == EXACT for feature in FEATURES.values())


@pytest.mark.full
def test_every_kernel_and_feature_is_in_the_table() -> None:
    _, _, *rows = support_table().splitlines()
    assert [row.split("|")[1].strip() for row in rows] == list(FEATURES)
    assert {feature.scores for feature in FEATURES.values()} >= {
        "softcap", "sinks", "alibi_slopes", "bias", "dropout_p", "score_mod", "mask_mod",
    }  # fmt: skip
    assert all(torch.is_tensor(x) is False or len(x) == TOKENS for f in FEATURES.values() for x in f.mask.values())
