"""The mutation gate: bugs that this field is known for, planted in the package, must turn a check red.

The bugs are in the folder planted. A check is a test of this suite, or a few of its cases, run on ranks on which a bug
is planted. The quick form has the first bug of each area, the full form all. A bug is planted at a name of the package:
if that name is gone, the test of the bug fails and says so, and so does `test_every_seam_exists`.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from functools import wraps
from typing import Any

import pytest
import test_agreement
import test_auto_layout
import test_balancing
import test_batches
import test_blocks
import test_changing_layouts
import test_decoding
import test_faults
import test_gradients
import test_known
import test_latent_attention
import test_masks
import test_mixers
import test_parity
import test_probe
import test_seeds
import test_segments
import test_sequence
import test_symmetric_memory
import test_tensor_parallel
import test_traffic
import test_verify
import test_verify_model
import torch
from checks import GQA, MHA, MQA, Case, parity_on_ranks, report
from mistakes import attempt
from planted import MUTATIONS, Mutation, SeamLost, infected_pools
from planted.ranks import every_coverage, every_layout, every_segments, outcomes
from ranks import RankFailure

FEW = [
    Case("zigzag", "full", 12),
    Case("zigzag", "causal", 13, MQA, 1),
    Case("striped", "causal", 13, GQA, 0),
    Case("contiguous", "two-sided window", 13),
    Case("contiguous", "window", 13, MHA),
    Case("shuffled", "causal", 13),
    Case("striped", "key padding", 13),
    Case("zigzag", "causal", 13, GQA, 2, "cpu_flash"),
]
GATHERED = [Case("zigzag", "full", 12, GQA, kernel="cpu_flash", method="all_gather")]
SWAPPED = [
    Case("zigzag", "causal", 13, GQA, method="ulysses"),
    Case("striped", "causal", 13, MQA, kernel="cpu_flash", method="ulysses"),
    Case("zigzag", "causal", 13, (12, 6), head_chunks=2, method="ulysses"),
]
GROUPED = [Case("zigzag", "causal", 13, GQA, method="hybrid", options={"ulysses_degree": 2})]
OF_DTENSORS = [Case("zigzag", "causal", 16, (8, 4), 1, scores="dropout, sinks and alibi")]

Check = Callable[[Any], Any]


def of(test: Callable[..., None], *arguments: Any) -> Check:
    """A test with these arguments, under its own name."""
    return wraps(test)(lambda pool: test(pool, *arguments))


def on(num_ranks: int, *given: Any, **options: Any) -> Check:
    """What a function finds on ranks."""
    return lambda pool: report(pool(num_ranks).run(*given, **options))


def alone(*tests: tuple[Any, ...]) -> Check:
    """Tests that need no other rank, each with its arguments."""
    return on(1, outcomes, [(test, arguments) for test, *arguments in tests])


def few(cases: list[Case], num_ranks: int = 3) -> Check:
    """On a group that delivers at the wait; see recording.py."""
    return on(num_ranks, parity_on_ranks, (num_ranks,), ("cp",), cases, True, timeout=20.0)


def labels_by_chunk(pool: Any) -> None:
    for said in pool(2).run(attempt, "labels by chunk", "eager", "guard", False):
        assert said.found in ("found", "refused"), said


def race(pool: Any) -> None:
    """Over the double of symmetric memory; naps on the ranks give a race room, and calls that were met before: ranks
    wait for one another to compare others."""
    cases = [(name, "causal", 31 + i % 4, {}) for i, name in enumerate(("zigzag", "striped", "contiguous") * 12)]
    with tempfile.TemporaryDirectory() as folder:
        report(pool(3).run(test_symmetric_memory.on_files, folder, cases, timeout=120.0))


CHECKS: dict[str, Check] = {
    "masks": alone(
        *((test_masks.test_allowed_is_the_dense_mask, mask, 7) for mask in ("causal", "window", "documents")),
        (test_masks.test_documents_from_cumulative_lengths, [0, 3, 5], [0, 0, 0, 1, 1], torch.int64),
    ),
    "blocks": alone((test_blocks.test_reaches_are_the_mask,), (test_blocks.test_blocks_of_runs_are_exact, "causal", 3)),
    "coverage": on(1, every_coverage),
    "segments": on(1, every_segments),
    "layouts": on(1, every_layout),
    "balance": alone(
        (test_balancing.test_packed_documents, 65536, 4, 1),
        (test_balancing.test_short_documents_do_not_travel, test_balancing.lognormal(32768, 0, 400, 1.0), 2),
    ),
    "parity": few(FEW),
    "parity on the last axis": on(4, parity_on_ranks, (2, 2), ("other", "cp"), [Case("zigzag", "causal", 13)]),
    "parity on six ranks": on(6, parity_on_ranks, (6,), ("cp",), [Case("zigzag", "causal", 13, GQA)]),
    "all-gather": few(GATHERED),
    "Ulysses": few(SWAPPED),
    "hybrid": few(GROUPED, 4),
    "gradients come home": of(test_seeds.test_gradients_of_keys_come_home, "full", "ring"),
    "sums in fp32": of(test_seeds.test_gradients_are_summed_in_fp32, torch.bfloat16, "ring"),
    "sums of Ulysses": of(test_seeds.test_gradients_are_summed_in_fp32, torch.bfloat16, "ulysses"),
    "traffic": test_traffic.test_by_hand,
    "overlap": of(test_traffic.test_hops_are_under_way_while_tiles_are_computed, "ring", [1, 1, 0], [1, 1, 1]),
    "NaN": of(test_faults.test_nan_reaches_what_depends_on_it_and_no_more_than_on_one_rank, "ring"),
    "symmetric memory": race,
    "planned once": alone(
        (test_segments.test_what_is_written_to_documents_is_seen,),
        (test_segments.test_plans_are_told_apart_by_every_element_of_a_tensor, "documents"),
    ),
    "plans of batches": alone((test_segments.test_plans_go_with_their_batch, None)),
    "known calls": on(2, test_known.calls),
    "scores of known calls": on(2, test_known.scored),
    "scores of DTensors": on(4, test_parity.dtensors, (2, 2), ("cp", "tp"), {"tp": "heads"}, OF_DTENSORS),
    "loss": of(test_sequence.test_cross_entropy, "ragged", 3, 1),
    "losses in parts": of(test_batches.test_losses_in_parts_share_a_mean, 1),
    "gradients of one rank": of(test_gradients.test_gradients_are_those_of_one_rank, test_gradients.Setup(cp=3, S=22)),
    "labels of other rows": labels_by_chunk,
    "packed steps": of(test_auto_layout.test_steps_are_those_of_one_rank, 2, "plain"),
    "labels of batches": test_auto_layout.test_labels_and_outputs_of_another_layout_are_refused,
    "ranks with layouts": of(test_auto_layout.test_ranks_with_other_layouts_are_refused, True),
    "changing layouts": of(test_changing_layouts.test_whole_model, 24, False),
    "check mode": of(test_agreement.test_every_rank_raises, True),
    "first calls": of(test_agreement.test_first_calls_of_a_sequence_are_compared, "gradients"),
    "verify": of(test_verify.test_verify_finds_what_one_device_has_too, "a scale wrong by 2 %", "cpu_flash"),
    "verify_model": test_verify_model.test_a_few_mistakes,
    "the probe finds": of(test_probe.test_mistakes_are_found, 2, torch.bfloat16, test_probe.ZigZag()),
    "recurrent layers": of(test_mixers.test_a_few, "states"),
    "convolutions": of(test_mixers.test_convolutions_and_shifts_are_those_of_one_rank, 2, "zigzag"),
    "mixers over heads": of(test_mixers.test_dtensors_over_heads, test_mixers.CONVOLUTION, "both"),
    "latent keys": on(3, test_latent_attention.few),
    "latent keys of layers": test_latent_attention.test_equal_layers_share_a_plan_and_not_the_projection,
    "linears": of(test_tensor_parallel.test_loss_and_gradients_are_those_of_one_rank, 3),
    "order of linears": of(test_tensor_parallel.test_products_run_while_rows_travel, *test_tensor_parallel.ORDERS[0]),
    "decoding": test_decoding.test_a_few,
    "cache": test_decoding.test_a_few_caches,
}

FIRST = {mutation.area: mutation for mutation in reversed(MUTATIONS.values())}
"""Of each area, from the last to the first; they are the quick form."""

BUGS = [(mutation, check) for mutation in MUTATIONS.values() for check in mutation.checks]
FOUND = (AssertionError, RankFailure, pytest.fail.Exception)
BROKEN = ("NameError", "SyntaxError", "ImportError", "TypeError", "AttributeError", "SeamLost")


def test_every_seam_exists() -> None:
    """In the package as it is, so that a refactoring which moves one learns of it in the quick form."""
    assert {check for _, check in BUGS} == set(CHECKS)
    lost = []
    for mutation in MUTATIONS.values():
        try:
            assert mutation.made() is not mutation.find()[2], f"{mutation.name!r} plants nothing"
        except SeamLost as error:
            lost.append(str(error))
    assert not lost, "\n".join(lost)


@pytest.mark.full
@pytest.mark.parametrize("check", [name for name, check in CHECKS.items() if not check.__name__.startswith("test_")])
def test_check_is_green_without_a_bug(check: str) -> None:
    """The others are tests of the full form."""
    with infected_pools(None) as pools:
        CHECKS[check](pools)


@pytest.mark.parametrize(
    ("mutation", "check"),
    [
        pytest.param(mutation, check, id=f"{mutation.name}, seen by {check}", marks=[pytest.mark.full] * (not quick))
        for mutation, check in BUGS
        for quick in [mutation is FIRST[mutation.area]]
    ],
)
def test_bug_is_found(mutation: Mutation, check: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ranks.GRACE", 0.5)
    mutation.find()
    with infected_pools(mutation.name) as pools, pytest.raises(FOUND) as found:
        CHECKS[check](pools)
    words = str(found.value)
    print(words)  # shown by -rP
    assert "planting failed" not in words and not any(error in words for error in BROKEN), words
