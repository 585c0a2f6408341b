"""The mutation gate: bugs that this field is known for, planted in the package, must turn a check red.

The bugs are in the folder planted. A check is a test of this suite, or a few of its cases, run on ranks on which a bug
is planted, and later another one. The quick form has one bug of each area, the full form all, and the nightly form all
in the other order. Each check is green without a bug: in the full form, or in the nightly one if it is a test that the
full form has anyway. A bug is planted at a name of the package. If that
name is gone, the test of the bug fails and says so, and so does `test_every_seam_exists`, in the quick and the full
form.
"""

from __future__ import annotations

import csv
import io
import math
import tempfile
from collections.abc import Callable, Iterable, Iterator
from functools import wraps
from itertools import islice
from pathlib import Path
from typing import Any

import planted
import pytest
import test_agreement
import test_allocations
import test_auto_layout
import test_balancing
import test_batches
import test_blocks
import test_boundaries
import test_changing_layouts
import test_checkpointed
import test_clipping
import test_copies
import test_decoding
import test_faults
import test_first_steps
import test_flash_attn
import test_flash_attn_4
import test_flex
import test_flex_cores
import test_flex_kernel
import test_flex_sharded
import test_flex_sources
import test_fuzz
import test_gradients
import test_hybrid
import test_known
import test_log_probs
import test_loss
import test_loss_terms
import test_masks
import test_mistakes
import test_mixers
import test_op
import test_parity
import test_probe
import test_reached
import test_recurrent_style
import test_seeds
import test_segments
import test_sequence
import test_styles
import test_symmetric_memory
import test_tensor_parallel
import test_tiled
import test_traffic
import test_verify
import test_verify_model
import test_watching
import torch
from checks import GQA, MHA, MQA, Case, parity_on_ranks, report
from inside import path_of
from interpreted import require_interpreter
from mistaken import MISTAKES
from mistakes import attempt
from planted import MUTATIONS, Mutation, SeamLost
from planted.pools import Bug, infected_pools
from planted.ranks import (
    every_coverage,
    every_fact,
    every_layout,
    every_segments,
    in_triton,
    kernel_steps,
    outcomes,
)
from planted.seams import modules, with_arguments
from set_ups import SET_UPS

from cp_mesh import ZigZag

FEW = [
    Case("zigzag", "full", 12),
    Case("contiguous", "causal", 13),
    Case("zigzag", "causal", 13, MQA, 1),
    Case("striped", "causal", 13, GQA, 0),
    Case("zigzag", "window", 13),
    Case("contiguous", "two-sided window", 13),
    Case("contiguous", "window", 13, MHA),
    Case("zigzag", "causal", 13, MHA),
    Case("shuffled", "causal", 13),
    Case("striped", "key padding", 13),
    Case("contiguous", "everything", 13, GQA, 1),
    Case("zigzag", "scattered documents", 13),
    Case("zigzag", "causal", 13, GQA, 2, "cpu_flash"),
    Case("striped", "causal", 13, MQA, 2, "cpu_flash"),
    Case("zigzag", "causal", 13, GQA, scale=0.7, head_chunks=3),
]

SCORED = [
    Case("zigzag", "causal", 13, GQA, 0, scores="softcap"),
    Case("zigzag", "key padding", 13, GQA, scores="sinks", head_chunks=3),
    Case("striped", "causal", 13, MHA, scores="softcap and sinks"),
    Case("contiguous", "causal", 13, scores="sinks"),
    Case("zigzag", "causal", 13, MHA, scores="softcap and alibi"),
    Case("contiguous", "window", 13, GQA, 1, scores="every score", head_chunks=3),
    Case("zigzag", "causal", 13, MHA, scores="bias"),
    Case("shuffled", "full", 13, GQA, scores="bias of all rows", head_chunks=3),
    Case("striped", "causal", 13, MHA, scores="dropout, sinks and alibi", head_chunks=3),
    Case("zigzag", "documents", 13, GQA, scores="dropout, a seed and an offset"),
    Case("striped", "causal", 13, GQA, 2, "cpu_flash", scores="sinks"),
]


GATHERED = [
    Case("zigzag", mask, 12, GQA, kernel=kernel, method="all_gather")
    for mask, kernel in (
        ("full", "reference"),
        ("full", "cpu_flash"),
    )
]

SWAPPED = [
    Case("contiguous", "causal", 13, GQA, method="ulysses"),
    Case("zigzag", "causal", 13, GQA, method="ulysses"),
    Case("striped", "causal", 13, MQA, kernel="cpu_flash", method="ulysses"),
    Case("shuffled", "everything", 13, (12, 4), head_chunks=4, method="ulysses"),
    Case("zigzag", "causal", 13, (12, 6), head_chunks=2, method="ulysses"),
    Case("zigzag", "causal", 13, GQA, scores="every score", method="ulysses"),
    Case("zigzag", "causal", 13, GQA, scores="bias of all rows", method="ulysses"),
    Case("contiguous", "full", 13, GQA, scores="dropout, sinks and alibi", method="ulysses"),
]

GROUPED = [
    Case(layout, mask, 13, heads, scores=scores, method="hybrid", options={"ulysses_degree": 2})
    for layout, mask, heads, scores in (
        ("zigzag", "causal", GQA, "plain"),
        ("striped", "full", (4, 2), "every score"),
        ("shuffled", "everything", (4, 2), "dropout, sinks and alibi"),
    )
]

SEQUENCES = [
    Case(
        layout,
        {"documents": torch.tensor([[0] * 4 + [1] * 17 + [2] * 3, [0] * 12 + [1] * 12])},
        24,
        GQA,
        kernel="fa4",
        sizes=(2, 8, 8),
    )
    for layout in ("zigzag", "striped", "balanced")
]


def of(test: Callable[..., None], *arguments: Any) -> Callable[[Any], None]:
    """A test with these arguments, under its own name."""
    return wraps(test)(lambda pool: test(pool, *arguments))


def each(test: Callable[..., None], cases: Iterable[Any]) -> Callable[[Any], None]:
    """A test with each of these as its one argument, up to the first that fails."""
    return lambda pool: [test(pool, case) for case in cases]


def on(num_ranks: int, *given: Any, **options: Any) -> Callable[[Any], None]:
    """What a function finds on ranks."""
    return lambda pool: report(pool(num_ranks).run(*given, **options))


def alone(*tests: tuple[Callable[..., None], tuple[Any, ...]]) -> Callable[[Any], None]:
    """Tests that need no other rank, with their arguments."""
    return on(1, outcomes, tests)


def mistake(name: str, set_up: str = "eager") -> Callable[[Any], None]:
    """What the guard says of a mistake, or of what is right, on every rank; see mistakes.py."""
    training, cell = MISTAKES[name], test_mistakes.CELLS[name, set_up]
    size, want, says = math.prod(training.axes(SET_UPS[set_up])[0]), cell["guard"], cell["guard_says"][:40]

    def check(pool: Any) -> None:
        found = pool(size).run(attempt, name, set_up, "guard", False)
        report([[f"{want} became {said}"] for said in found if said.found != want])
        if not any(" ".join(said.message.split()).startswith(says) for said in found):
            report([[f"nobody says {says}: {found}"]])

    return check


def few(pool: Any, cases: list[Case], num_ranks: int = 3) -> None:
    """One after the other, up to the first that fails, on a group that delivers at the wait; see recording.py."""
    for case in cases:
        report(pool(num_ranks).run(parity_on_ranks, (num_ranks,), ("cp",), [case], True, timeout=20.0))


def every_disagreement(pool: Any) -> None:
    raised = pool(3).run(test_agreement.disagree, True, timeout=20.0)
    for name in test_agreement.CASES:
        test_agreement.test_every_rank_raises(name, raised)


def in_folder(test: Callable[..., None], *arguments: Any) -> Callable[[Any], None]:
    """A test with these arguments and a folder of its own."""

    def check(pool: Any) -> None:
        with tempfile.TemporaryDirectory() as folder:
            test(pool, *arguments, Path(folder))

    return check


def race(pool: Any, **options: Any) -> None:
    """Over the double of symmetric memory; naps on the ranks give a race room, and calls that were met before: ranks
    wait for one another to compare others."""
    cases = [(name, "causal", 31 + i % 4, options) for i, name in enumerate(("zigzag", "striped", "contiguous") * 12)]
    with tempfile.TemporaryDirectory() as folder:
        report(pool(3).run(test_symmetric_memory.on_files, folder, cases, timeout=120.0))


CHECKS: dict[str, Callable[[Any], None]] = {
    "random uses": lambda pool: report([[*islice(test_fuzz.failures(pool, 3, 60), 1)]]),  # one failure is enough
    "random uses of two": lambda pool: report([[*test_fuzz.failures(pool, 2, 0)]]),
    "coverage": on(1, every_coverage),
    "layouts": on(1, every_layout),
    "masks": alone(
        *(
            (test_masks.test_allowed_is_the_dense_mask, (mask, 7))
            for mask in ("causal", "window", "length", "documents", "excluded tokens")
        ),
        (test_masks.test_allowed_is_the_dense_mask, ("blocks, a window and documents", 31)),
        (test_masks.test_documents_from_cumulative_lengths, ([0, 3, 5], [0, 0, 0, 1, 1], torch.int64)),
    ),
    "kernels": on(1, kernel_steps),
    "segments": on(1, every_segments),
    "sequences": of(test_segments.test_fa4_over_a_ring, 3, False, SEQUENCES),
    "planned once": alone(
        (test_segments.test_what_is_written_to_documents_is_seen, ()),
        *(
            (test_segments.test_plans_are_told_apart_by_every_element_of_a_tensor, (name,))
            for name in ("documents", "key_padding", "layout_index")
        ),
    ),
    "plans of batches": alone((test_segments.test_plans_go_with_their_batch, (None,))),
    "blocks": alone(
        (test_blocks.test_reaches_are_the_mask, ()),
        *((test_blocks.test_blocks_of_runs_are_exact, (mask, 3)) for mask in ("causal", "two-sided window", "prefix")),
    ),
    "facts": on(1, every_fact),
    "balance": alone(
        (test_balancing.test_packed_documents, (65536, 4, 1)),
        (test_balancing.test_short_documents_do_not_travel, (test_balancing.lognormal(32768, 0, 400, 1.0), 2)),
        (test_balancing.test_weights_are_the_keys_that_a_position_sees, ("excluded tokens",)),
        (test_balancing.test_weights_are_the_keys_that_a_position_sees, ("blocks",)),
    ),
    "mask of a batch": alone(
        *((test_batches.test_forms_of_a_batch, (form,)) for form in ("positions that begin anew", "padding"))
    ),
    "sequences of batches": test_batches.test_sequences_of_batches,
    "losses in parts": of(test_batches.test_losses_in_parts_share_a_mean, 1),
    "losses of routers": of(test_batches.test_a_balancing_loss_is_that_of_one_rank, ZigZag(), 24),
    "seeds of steps": test_batches.test_seeds,
    "parts of models": of(test_boundaries.test_gradients_are_those_of_one_rank, ZigZag(), 24, "head", "mean", {}),
    "layouts of parts": test_boundaries.test_the_layout_of_a_batch,
    "parity": lambda pool: few(pool, FEW),
    "scores": lambda pool: few(pool, SCORED),
    "parity on the last axis": on(4, parity_on_ranks, (2, 2), ("other", "cp"), [Case("zigzag", "causal", 13)]),
    "parity on four ranks": on(
        4, parity_on_ranks, (4,), ("cp",), [Case("zigzag", "causal", 13), Case("striped", "full", 16, GQA)]
    ),
    "parity on six ranks": on(
        6, parity_on_ranks, (6,), ("cp",), [Case("zigzag", "causal", 13, heads) for heads in (GQA, MHA)]
    ),
    "gradients come home": of(test_seeds.test_gradients_of_keys_come_home, "full", "ring"),
    "sums in fp32": of(test_seeds.test_gradients_are_summed_in_fp32, torch.bfloat16, "ring"),
    "sums of Ulysses": of(test_seeds.test_gradients_are_summed_in_fp32, torch.bfloat16, "ulysses"),
    "Ulysses": lambda pool: few(pool, SWAPPED),
    "hybrid": lambda pool: few(pool, GROUPED, 4),
    "functions": of(test_flex.test_functions, 2, "a few"),
    "captured sums in fp32": of(test_flex.test_captured_gradients_are_summed_in_fp32, "ring"),
    "functions that change": test_flex.test_a_function_that_changes,
    "functions of other numbers": alone((test_reached.test_what_changed_is_seen, ("a global",))),
    "functions of states": alone((test_reached.test_what_changed_is_seen, ("a state of torch",))),
    "functions of DTensors": of(test_flex.test_dtensors, ("cp", "tp"), 1),
    "functions that differ": of(test_flex.test_ranks_that_differ, "a value", "captured tensor 0"),
    "blocks of masks": alone((test_flex.test_blocks_that_list_too_little_or_too_much, ())),
    "tiles of flex": alone(
        (test_flex_kernel.test_tiles_are_those_of_the_reference, ("tanh chain", "dilated", "documents", "one run"))
    ),
    "indices of flex": alone(
        *((test_flex_kernel.test_indices_count_from_the_end_and_no_further, (most,)) for most in (1 << 24, 0))
    ),
    "hidden reads of flex": alone((test_flex_kernel.test_what_is_hidden_may_be_beyond_a_tensor, ("product",))),
    "pads of flex": alone((test_flex_kernel.test_pads_are_of_the_tensor_and_so_are_their_gradients, ())),
    "shards": of(test_flex_sharded.test_parts_that_are_made_whole, 2),
    "tables of flex": alone((test_flex_kernel.test_tables_of_blocks_are_of_these_heads_rows_and_tensors, ())),
    "order of captured sums": test_flex.test_deterministic,
    "heads of cores over tp": test_flex_cores.test_heads_over_tp,
    "masks of cores": test_flex_cores.test_a_mask_that_was_written_is_looked_at_again,
    "flex_attention of PyTorch in cores": test_flex_cores.test_what_is_refused_beside_it,
    "known calls": on(2, test_known.calls),
    "scores of known calls": on(2, test_known.scored),
    "padding of cores": of(test_flex_cores.test_cores, 2, "padding"),
    "masks of sequences": of(test_flex_sources.test_parity, 3),
    "traffic of masks": of(test_flex_sources.test_what_travels_by_hand, True),
    "refused masks of sequences": test_flex_sources.test_refusals,
    "masks of sequences that differ": of(
        test_flex_sources.test_ranks_that_differ, "other sources", "sources of block_mask"
    ),
    "degrees": of(test_hybrid.test_the_degree_is_used, (8, 4), 2, 3),
    "head order": test_seeds.test_heads_are_grouped_in_torchs_order,
    "kinds of DTensors": test_op.test_dtensors_of_each_kind_are_looked_at,
    "specs of DTensors": of(test_op.test_dtensors_are_what_their_specs_say, 2, 3, 2, "", "distributed"),
    "low precision": of(test_parity.test_low_precision, torch.bfloat16, 1.5, "reference", "ring"),
    "scores of DTensors": on(
        4,
        test_parity.dtensors,
        (2, 2),
        ("cp", "tp"),
        {"tp": "heads"},
        [Case("zigzag", "causal", 16, (8, 4), seq_dim, scores="dropout, sinks and alibi") for seq_dim in (2, 1)],
    ),
    "traffic": test_traffic.test_by_hand,
    "all-gather": lambda pool: few(pool, GATHERED),
    "overlap of all-gather": of(
        test_traffic.test_hops_are_under_way_while_tiles_are_computed, "all_gather", [1, 0], [0, 1]
    ),
    "overlap": of(test_traffic.test_hops_are_under_way_while_tiles_are_computed, "ring", [1, 1, 0], [1, 1, 1]),
    "recompute": test_traffic.test_selective_recompute_does_not_replay_the_ring,
    "kernels launched directly": alone(
        (test_flash_attn_4.test_kinds_have_kernels_of_their_own, ()),
        (test_flash_attn_4.test_a_release_that_differs_keeps_its_python, ()),
        (test_flash_attn_4.test_a_release_that_takes_keys_for_values_keeps_its_python, ()),
    ),
    "deterministic": of(test_flash_attn.test_a_deterministic_call_has_the_reproducible_backward, True),
    "changing layouts": of(test_changing_layouts.test_whole_model, 24, False),
    "packed steps": of(test_auto_layout.test_steps_are_those_of_one_rank, 2, "plain"),
    "labels of batches": test_auto_layout.test_labels_and_outputs_of_another_layout_are_refused,
    "ranks with layouts": of(test_auto_layout.test_ranks_with_other_layouts_are_refused, True),
    "layouts agree": test_changing_layouts.test_a_core_in_another_layout_than_its_root_is_refused,
    "outside of the plan": on(2, test_watching.found, "not", False, ("MHA",)),
    "outside of the plan, compiled": on(2, test_watching.found, "blocks in place", True, ("SDPA",)),
    "checkpoints in cores": of(test_styles.test_checkpoint_inside_a_core_is_refused, False),
    "allocations": in_folder(test_allocations.test_formulas_are_what_is_allocated, "functional"),
    "release": test_symmetric_memory.test_release_gives_back_the_memory_of_groups_within_a_group,
    "decoding": test_decoding.test_a_few,
    "sharded queries": of(test_decoding.test_sharded_queries, False),
    "cache": test_decoding.test_a_few_caches,
    "what a core asks": test_watching.test_what_a_core_asks_that_is_not_traced,
    "rows of the root": mistake("half of the rows in the core", "blocks"),
    "copies": of(test_copies.test_copies_have_the_style_and_their_own_attributes, test_copies.OwnReduce, "deepcopy"),
    "compiled cores": test_watching.test_compiled_cores_of_one_class_are_told_apart,
    "symmetric memory": race,
    "symmetric memory of Ulysses": lambda pool: race(pool, method="ulysses"),
    "check mode": every_disagreement,
    "verify": of(test_verify.test_verify_finds_what_one_device_has_too, False, "a scale wrong by 2 %", "cpu_flash"),
    "patience": test_faults.test_a_first_call_waits_as_long_as_its_group,
    "NaN": of(test_faults.test_nan_reaches_what_depends_on_it_and_no_more_than_on_one_rank, "ring"),
    "first calls": of(test_agreement.test_first_calls_of_a_sequence_are_compared, "gradients"),
    "lost plans": of(test_agreement.test_a_plan_that_one_rank_lost_is_no_first_call, False),
    "labels of other rows": mistake("labels by chunk"),
    "labels of log-probabilities": test_log_probs.test_labels_of_other_rows,
    "sharded twice": mistake("inputs sharded twice", "cores"),
    "positions of a root": mistake("positions that nobody gives"),
    "unread masks": mistake("a Mask that no style reads", "cores"),
    "windows of modules": mistake("a window of its layer in a config"),
    "whole tokens": mistake("whole inputs without a root", "cores"),
    "ranks of the loss": mistake("a loss over cp alone", "FSDP2"),
    "gradients that are reduced": mistake("gradients that nobody reduces"),
    "gathered losses": mistake("a loss of gathered logits"),
    "models in turn": mistake("the mean of a second model's rows"),
    "words in the store": of(test_first_steps.test_a_word_that_nobody_came_to_read_is_taken_back, "refused"),
    "rows of cores": mistake("rows that nobody cut", "cores"),
    "tokens without a root": mistake("another batch on each rank", "cores"),
    "gradients of a step": lambda pool: (
        mistake("an optimizer in the backward, after sums")(pool),
        mistake("accumulated gradients of four ranks, averaged", "DDP")(pool),
    ),
    "verify_model": on(2, test_verify_model.looked_at, timeout=120.0),
    "runs": alone((test_changing_layouts.test_runs_that_compiled_code_did_not_read_are_checked, ())),
    "round trip": of(test_sequence.test_round_trip_and_its_gradient, "zigzag", 3),
    "loss": of(test_sequence.test_cross_entropy, "ragged", 3, 1),
    "chunks of the loss": alone(
        (test_loss.test_loss_and_gradient, (torch.float64, "contiguous")),
        (test_loss.test_chunks_change_nothing, (torch.float64,)),
    ),
    "log-probabilities": alone((test_log_probs.test_hidden_states, (7, 0.7, True))),
    "terms of the loss": alone((test_loss_terms.test_hidden_states, ("all", 7))),
    "terms of the loss over tp": lambda pool: [
        test_loss_terms.test_a_vocabulary_over_tp(pool, terms) for terms in ("z-loss", "label smoothing")
    ],
    "sums of documents": of(test_log_probs.test_sums_of_documents, "zigzag", "packed", 3),
    "tiles": alone((test_tiled.test_outputs_and_gradients, ("MLP", {"tiles": 3}))),
    "dropout of tiles": alone((test_tiled.test_dropout, ())),
    "copies to the host": alone((test_checkpointed.test_buffers_go_on_while_copies_are_under_way, ())),
    "who is on the device": alone((test_checkpointed.test_what_is_in_the_memory_of_the_device, ())),
    "writes in checkpoints": alone(
        (test_checkpointed.test_writes_to_what_is_saved, ({"offload": False, "keep_attention": False}, "stream"))
    ),
    "tiles of what mixes tokens": alone((test_tiled.test_modules_that_mix_tokens_are_refused, ("a mean", 13))),
    "linears": of(test_tensor_parallel.test_loss_and_gradients_are_those_of_one_rank, 3),
    "traffic of linears": each(test_tensor_parallel.test_what_travels_and_what_is_computed, test_tensor_parallel.PARTS),
    "order of linears": of(test_tensor_parallel.test_products_run_while_rows_travel, *test_tensor_parallel.ORDERS[0]),
    "order of forwards": test_tensor_parallel.test_products_begin_before_all_rows_have_come,
    "order of copies": in_folder(test_tensor_parallel.test_products_run_while_copy_engines_move_rows),
    "beside products": in_folder(test_tensor_parallel.test_rows_that_travel_beside_products, 3, "functional"),
    "beside copies": in_folder(test_tensor_parallel.test_rows_that_travel_beside_products, 3, "symmetric_memory"),
    "chunks of logits": test_tensor_parallel.test_chunks_of_logits,
    "unlike tokens over tp": of(test_tensor_parallel.test_what_one_rank_alone_refuses, "tokens"),
    "unlike gradients over tp": of(test_tensor_parallel.test_what_one_rank_alone_refuses, "no gradient: columns"),
    "refusals in cores over tp": of(test_tensor_parallel.test_all_ranks_of_cp_and_tp_hear_of_a_refusal, "a core"),
    "later refusals": test_agreement.test_a_later_refusal_is_told_when_the_wait_ends,
    "a head under FSDP2": of(test_tensor_parallel.test_one_trained_part_under_fsdp, "head"),
    "plain parameters over tp": each(
        test_tensor_parallel.test_plain_parameters_on_sharded_rows, test_tensor_parallel.SETUPS
    ),
    "the probe finds": of(test_probe.test_mistakes_are_found, torch.bfloat16, False),
    "the probe is silent": of(test_probe.test_what_is_right_is_silent, torch.bfloat16),
    "nothing is left of the probe": of(test_probe.test_training_goes_on_as_without, ""),
    "skipped by all": test_probe.test_a_replica_does_not_skip_alone,
    "half precision": alone((test_probe.test_half_precision_is_computed_in_float32, ())),
    "what the probe skips": test_probe.test_what_is_skipped,
    "the guard after a probe": test_probe.test_the_guard_looks_as_without,
    "recurrent layers": of(test_mixers.some_rules, "states"),
    "recurrent layers by heads": of(test_mixers.some_rules, "heads"),
    "whole documents": of(test_mixers.test_whole_documents_are_one_local_call, "gated_delta_rule"),
    "convolutions": of(test_mixers.test_convolutions_and_shifts_are_those_of_one_rank, 2, "zigzag"),
    "states of convolutions": of(test_mixers.test_states_of_convolutions_are_those_of_one_rank, 2, "zigzag"),
    "mixers over heads": of(test_mixers.test_dtensors_over_heads, "causal_conv1d", "both"),
    "a recurrent plan": of(test_recurrent_style.test_a_hybrid_is_that_of_one_rank, 2, "zigzag"),
    "outside of recurrent plans": of(test_recurrent_style.test_what_the_style_refuses, "others outside of the plan"),
    "norm on several meshes": test_clipping.test_every_entry_counts_once,
    "gradients of one rank": of(test_gradients.test_gradients_are_those_of_one_rank, test_gradients.Setup(cp=3, S=22)),
}


IN_TRITON = {f"{what} in Triton": what for what in ("a band", "documents", "scores", "sums", "few queries")}
CHECKS |= {
    check: lambda pool, what=what: report(pool(1).run(in_triton, what, timeout=120.0))
    for check, what in IN_TRITON.items()
}


FIRST = {mutation.area: mutation for mutation in reversed(MUTATIONS.values())}
"""Of each area, from the last to the first; they are the quick form."""


FOUND_BY = Path(__file__).parent / "pins" / "planted_bugs.csv"


def in_quick_form(mutation: Mutation, check: str) -> bool:
    return mutation is FIRST[mutation.area] and check == mutation.checks[0]


def bugs() -> Iterator[Any]:
    """All of them, and for the nightly form in the other order."""
    every = [(mutation, check) for mutation in MUTATIONS.values() for check in mutation.checks]
    for mutation, check in every:
        marks = [pytest.mark.full] * (not in_quick_form(mutation, check))
        yield pytest.param(mutation, check, id=f"{mutation.name}, seen by {check}", marks=marks)
    for mutation, check in reversed(every):
        name = f"{mutation.name}, seen by {check} again"
        yield pytest.param(mutation, check, id=name, marks=pytest.mark.nightly("bugs"))


@pytest.fixture(scope="module")
def plant() -> Iterator[Callable[[str | None, str], Bug]]:
    """Gives ranks with a bug of this name, or without; those in whose processes Triton interprets are others."""
    with infected_pools() as pools, infected_pools() as in_triton:
        healthy = {each: Bug(each, None) for each in (pools, in_triton)}

        def give(name: str | None, check: str) -> Bug:
            of_kind = in_triton if check in IN_TRITON else pools
            return Bug(of_kind, name) if name else healthy[of_kind]

        yield give


def test_the_table_is_whole():
    assert f"There are {len(MUTATIONS)} in {len(FIRST)} areas" in planted.__doc__
    assert {check for mutation in MUTATIONS.values() for check in mutation.checks} == set(CHECKS)


def test_which_form_plants_which(request):
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(("bug", "area", "check", "forms"))
    for mutation in MUTATIONS.values():
        for check in mutation.checks:
            forms = "quick, full, nightly" if in_quick_form(mutation, check) else "full, nightly"
            writer.writerow((mutation.name, mutation.area, check, forms))
    if request.config.getoption("--write-pins"):
        FOUND_BY.write_text(text.getvalue())
    assert FOUND_BY.read_text() == text.getvalue(), "--write-pins writes it anew"


def test_every_seam_exists():
    """In the package as it is, so that a refactoring which moves one learns of it in the quick form."""
    lost = []
    for mutation in MUTATIONS.values():
        try:
            assert mutation.made() is not mutation.find()[2], f"{mutation.name!r} plants nothing"
        except SeamLost as error:
            lost.append(str(error))
    assert not lost, "\n".join(lost)


def held() -> dict[tuple[str, ...], int]:
    """What modules, their classes and their tables hold, by identity."""
    found = {}
    for module in modules():
        for name, x in vars(module).items():
            found[module.__name__, name] = id(x)
            items = vars(x) if isinstance(x, type) else x if isinstance(x, dict) and name[:2] != "__" else {}
            found |= {(module.__name__, name, str(key)): id(value) for key, value in items.items()}
    return found


@pytest.mark.full
def test_a_bug_leaves_nothing_behind():
    before = held()
    for mutation in FIRST.values():
        undo = mutation.plant()
        assert held() != before, mutation.name
        undo()
        assert held() == before, mutation.name


def test_a_lost_seam_is_told():
    """And where its name is now."""
    combine, stages = path_of("combine"), path_of("ring_loop")
    for seam, home in {
        "nowhere:forward_of_heads": stages,
        "ring_loop:nothing": "no module",
        "combine:RowSum.nothing": combine,
        "ring_loop:RowSum.add": combine,  # which is imported there
    }.items():
        with pytest.raises(SeamLost, match=rf"'a bug' is planted at {seam}, which does not .* is in {home}\)"):
            Mutation("a bug", "nothing", seam, ("parity",), lambda original: original).find()
    seam = "ring_loop:forward_of_heads"
    lost = Mutation("a bug", "nothing", seam, ("parity",), lambda f: with_arguments(f, nothing=id))
    with pytest.raises(SeamLost, match=r"'a bug', in test_mutations: .*forward_of_heads has no argument nothing"):
        lost.made()


@pytest.mark.parametrize(
    "check",
    # the full form runs the others as the tests that they are
    [
        pytest.param(name, marks=pytest.mark.nightly("bugs") if check.__name__[:5] == "test_" else pytest.mark.full)
        for name, check in CHECKS.items()
    ],
)
def test_check_is_green_without_a_bug(check, plant):
    if check in IN_TRITON:
        require_interpreter()
    CHECKS[check](plant(None, check))


BROKEN = ("NameError", "SyntaxError", "ImportError", "TypeError", "AttributeError", "SeamLost")


@pytest.mark.parametrize(("mutation", "check"), list(bugs()))
def test_bug_is_found(mutation, check, plant, monkeypatch):
    monkeypatch.setattr("ranks.GRACE", 0.5)
    if check in IN_TRITON:
        require_interpreter()
    mutation.find()
    bug = plant(mutation.name, check)
    with pytest.raises((Exception, pytest.fail.Exception)) as found:
        CHECKS[check](bug)
    words = str(found.value)
    print(words)  # shown by -rP
    assert bug.is_planted, "a bug that cannot be planted proves nothing"
    assert not any(error in words for error in BROKEN), words
