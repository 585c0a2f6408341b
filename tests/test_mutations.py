"""The mutation gate: bugs that this field is known for, planted in a copy of the package, must turn a check red.

The bugs are in the folder planted. A check is a test of this suite, or a few of its cases, run on ranks that import the
copy instead of the package; on a copy without a bug all checks are green. The quick form has one bug of each check, the
full form all. A bug is planted at a name of the package. If that name is gone, the test of the bug fails and says so,
and so does `test_every_seam_exists`, in both forms.
"""

from __future__ import annotations

import compileall
import inspect
import shutil
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import planted
import pytest
import test_agreement
import test_allocations
import test_aten_kernels
import test_balancing
import test_batches
import test_blocks
import test_boundaries
import test_calibrating
import test_changing_layouts
import test_choosing
import test_clipping
import test_copies
import test_costs
import test_decoding
import test_double_ring
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
import test_guard
import test_hybrid
import test_joint
import test_loss
import test_masks
import test_op
import test_parity
import test_reached
import test_seeds
import test_segments
import test_sequence
import test_styles
import test_symmetric_memory
import test_tensor_parallel
import test_traffic
import test_verify
import test_verify_model
import test_watching
import torch
from checks import GQA, MHA, MQA, Case, parity_on_ranks, report
from interpreted import require_interpreter
from planted import MUTATIONS, Mutation, SeamLost
from planted.ranks import (
    every_coverage,
    every_fact,
    every_layout,
    every_segments,
    in_triton,
    kernel_steps,
    origin,
    outcomes,
)
from planted.seams import with_arguments
from ranks import ImportingPool

import cp_mesh
from cp_mesh import ZigZag
from cp_mesh.masks import CAUSAL

PACKAGE = Path(cp_mesh.__file__).parent

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
    Case("zigzag", "full", 13, MHA, scores="table"),
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


def alone(pool: Any, *tests: tuple[Callable[..., None], tuple[Any, ...]]) -> None:
    """Tests that need no other rank, with their arguments."""
    report(pool(1).run(outcomes, tests))


def few(pool: Any, cases: list[Case], num_ranks: int = 3) -> None:
    """One after the other, up to the first that fails, on a group that delivers at the wait; see recording.py."""
    for case in cases:
        report(pool(num_ranks).run(parity_on_ranks, (num_ranks,), ("cp",), [case], True, timeout=20.0))


def in_folder(test: Callable[..., None], pool: Any, *arguments: Any) -> None:
    """A test that writes files."""
    with tempfile.TemporaryDirectory() as folder:
        test(pool, Path(folder), *arguments)


def every_disagreement(pool: Any) -> None:
    raised = pool(3).run(test_agreement.disagree, True)
    for name in test_agreement.CASES:
        test_agreement.test_every_rank_raises(name, raised)


def race(pool: Any, **options: Any) -> None:
    """Over the double of symmetric memory; naps on the ranks give a race room, and calls that were met before: ranks
    wait for one another to compare others."""
    cases = [(name, "causal", 31 + i % 4, options) for i, name in enumerate(("zigzag", "striped", "contiguous") * 12)]
    with tempfile.TemporaryDirectory() as folder:
        report(pool(3).run(test_symmetric_memory.on_files, folder, cases, timeout=120.0))


CHECKS: dict[str, Callable[[Any], None]] = {
    "random uses": lambda pool: report([[*islice(test_fuzz.failures(pool, 3, 50), 1)]]),  # one failure is enough
    "random uses of two": lambda pool: report([[*test_fuzz.failures(pool, 2, 0)]]),
    "coverage": lambda pool: report(pool(1).run(every_coverage)),
    "layouts": lambda pool: report(pool(1).run(every_layout)),
    "copied keys": lambda pool: report(
        pool(3).run(test_joint.parity, [test_joint.Copies(test_joint.LAYOUTS["text first"], "full")])
    ),
    "masks": lambda pool: alone(
        pool,
        *(
            (test_masks.test_allowed_is_the_dense_mask, (mask, 7))
            for mask in ("causal", "window", "length", "documents", "excluded tokens")
        ),
        (test_masks.test_allowed_is_the_dense_mask, ("blocks, a window and documents", 31)),
        (test_masks.test_documents_from_cumulative_lengths, ([0, 3, 5], [0, 0, 0, 1, 1], torch.int64)),
    ),
    "kernels": lambda pool: report(pool(1).run(kernel_steps)),
    "segments": lambda pool: report(pool(1).run(every_segments)),
    "sequences": lambda pool: report(pool(3).run(test_segments.fa4_on_ranks, 3, SEQUENCES)),
    "planned once": lambda pool: alone(
        pool,
        (test_segments.test_what_is_written_to_documents_is_seen, ()),
        *(
            (test_segments.test_plans_are_told_apart_by_every_element_of_a_tensor, (name,))
            for name in ("documents", "key_padding", "layout_index")
        ),
    ),
    "blocks": lambda pool: alone(
        pool,
        (test_blocks.test_reaches_are_the_mask, ()),
        *((test_blocks.test_blocks_of_runs_are_exact, (mask, 3)) for mask in ("causal", "two-sided window", "prefix")),
    ),
    "facts": lambda pool: report(pool(1).run(every_fact)),
    "heads of efficient attention": lambda pool: alone(pool, (test_aten_kernels.test_a_tile, ("GQA", CAUSAL))),
    "balance": lambda pool: alone(
        pool,
        (test_balancing.test_packed_documents, (65536, 4, 1)),
        (test_balancing.test_weights_are_the_keys_that_a_position_sees, ("excluded tokens",)),
        (test_balancing.test_weights_are_the_keys_that_a_position_sees, ("blocks",)),
    ),
    "mask of a batch": lambda pool: alone(
        pool,
        *((test_batches.test_forms_of_a_batch, (form,)) for form in ("positions that begin anew", "padding")),
    ),
    "sequences of batches": test_batches.test_sequences_of_batches,
    "losses in parts": lambda pool: test_batches.test_losses_in_parts_share_a_mean(pool, 1),
    "losses of routers": lambda pool: test_batches.test_a_balancing_loss_is_that_of_one_rank(pool, ZigZag(), 24),
    "seeds of steps": test_batches.test_seeds,
    "parts of models": lambda pool: test_boundaries.test_gradients_are_those_of_one_rank(
        pool, ZigZag(), 24, "head", "mean", {}
    ),
    "layouts of parts": test_boundaries.test_the_layout_of_a_batch,
    "parity": lambda pool: few(pool, FEW),
    "scores": lambda pool: few(pool, SCORED),
    "parity on the last axis": lambda pool: report(
        pool(4).run(parity_on_ranks, (2, 2), ("other", "cp"), [Case("zigzag", "causal", 13)])
    ),
    "parity on four ranks": lambda pool: report(
        pool(4).run(parity_on_ranks, (4,), ("cp",), [Case("zigzag", "causal", 13), Case("striped", "full", 16, GQA)])
    ),
    "parity on six ranks": lambda pool: report(
        pool(6).run(parity_on_ranks, (6,), ("cp",), [Case("zigzag", "causal", 13, heads) for heads in (GQA, MHA)])
    ),
    "gradients come home": lambda pool: test_seeds.test_gradients_of_keys_come_home(pool, "full", "ring"),
    "sums in fp32": lambda pool: test_seeds.test_gradients_are_summed_in_fp32(pool, torch.bfloat16, "ring"),
    "sums of Ulysses": lambda pool: test_seeds.test_gradients_are_summed_in_fp32(pool, torch.bfloat16, "ulysses"),
    "Ulysses": lambda pool: few(pool, SWAPPED),
    "hybrid": lambda pool: few(pool, GROUPED, 4),
    "functions": test_flex.test_a_few,
    "captured sums in fp32": lambda pool: test_flex.test_captured_gradients_are_summed_in_fp32(pool, "ring"),
    "functions that change": test_flex.test_a_function_that_changes,
    "functions of other numbers": lambda pool: alone(pool, (test_reached.test_what_changed_is_seen, ("a global",))),
    "functions of states": lambda pool: alone(pool, (test_reached.test_what_changed_is_seen, ("a state of torch",))),
    "functions of DTensors": lambda pool: test_flex.test_dtensors(pool, ("cp", "tp"), 1),
    "functions that differ": lambda pool: test_flex.test_ranks_that_differ(pool, "a value", "captured tensor 0"),
    "blocks of masks": lambda pool: alone(pool, (test_flex.test_blocks_that_list_too_little_or_too_much, ())),
    "tiles of flex": lambda pool: alone(
        pool,
        (test_flex_kernel.test_tiles_are_those_of_the_reference, ("tanh chain", "dilated", "documents", "one run")),
    ),
    "indices of flex": lambda pool: alone(
        pool, *((test_flex_kernel.test_indices_count_from_the_end_and_no_further, (most,)) for most in (1 << 24, 0))
    ),
    "hidden reads of flex": lambda pool: alone(
        pool, (test_flex_kernel.test_what_is_hidden_may_be_beyond_a_tensor, ("product",))
    ),
    "pads of flex": lambda pool: alone(
        pool, (test_flex_kernel.test_pads_are_of_the_tensor_and_so_are_their_gradients, ())
    ),
    "tables of flex": lambda pool: alone(
        pool, (test_flex_kernel.test_tables_of_blocks_are_of_these_heads_rows_and_tensors, ())
    ),
    "order of captured sums": test_flex.test_deterministic,
    "heads of cores over tp": test_flex_cores.test_heads_over_tp,
    "masks of cores": test_flex_cores.test_a_style_hides_no_more_than_the_mask,
    "padding of cores": lambda pool: report(pool(2).run(test_flex_cores.as_one, ["padding"])),
    "shards": test_flex_sharded.test_a_few_shards,
    "shards of DTensors": lambda pool: test_flex_sharded.test_shards_beside_dtensors(pool, ("cp", "tp"), {}),
    "shards summed in fp32": lambda pool: test_flex_sharded.test_shards_are_summed_in_fp32(pool, "ring"),
    "masks of sequences": lambda pool: report(pool(3).run(test_flex_sources.parity, test_flex_sources.CASES[3][:2])),
    "traffic of masks": lambda pool: test_flex_sources.test_what_travels_by_hand(pool, True),
    "refused masks of sequences": test_flex_sources.test_refusals,
    "masks of sequences that differ": lambda pool: test_flex_sources.test_ranks_that_differ(
        pool, "other sources", "sources of block_mask"
    ),
    "shards that differ": lambda pool: test_flex_sharded.test_ranks_that_differ(pool, "a gradient", "with a gradient"),
    "degrees": test_hybrid.test_the_degree_is_used,
    "head order": test_seeds.test_heads_are_grouped_in_torchs_order,
    "specs of DTensors": lambda pool: test_op.test_dtensors_are_what_their_specs_say(pool, 2, "", "distributed"),
    "low precision": lambda pool: test_parity.test_low_precision(pool, torch.bfloat16, 1.5, "reference", "ring"),
    "scores of DTensors": lambda pool: report(
        pool(4).run(
            test_parity.dtensors,
            (2, 2),
            ("cp", "tp"),
            {"tp": "heads"},
            [Case("zigzag", "causal", 16, (8, 4), seq_dim, scores="dropout, sinks and alibi") for seq_dim in (2, 1)],
        )
    ),
    "traffic": test_traffic.test_by_hand,
    "all-gather": lambda pool: few(pool, GATHERED),
    "overlap of all-gather": test_traffic.test_all_gather_hides_its_fetch_and_its_delivery,
    "overlap": test_traffic.test_hops_are_under_way_while_tiles_are_computed,
    "double ring": lambda pool: report(
        pool(6).run(test_double_ring.on_hosts, 2, test_double_ring.FEW, True, timeout=60.0)
    ),
    "sums of the double ring": lambda pool: test_seeds.test_gradients_are_summed_in_fp32(
        pool, torch.bfloat16, "double_ring"
    ),
    "network of the double ring": lambda pool: (
        test_double_ring.test_the_network_moves_what_hosts_need_not_what_ranks_do(pool, 4, 2)
    ),
    "overlap of the double ring": test_double_ring.test_both_links_are_busy_while_tiles_are_computed,
    "recompute": test_traffic.test_selective_recompute_does_not_replay_the_ring,
    "kernels launched directly": lambda pool: alone(
        pool,
        (test_flash_attn_4.test_kinds_have_kernels_of_their_own, ()),
        (test_flash_attn_4.test_a_release_that_differs_keeps_its_python, ()),
        (test_flash_attn_4.test_a_release_that_takes_keys_for_values_keeps_its_python, ()),
    ),
    "deterministic": lambda pool: test_flash_attn.test_a_deterministic_call_has_the_reproducible_backward(pool, True),
    "changing layouts": lambda pool: test_changing_layouts.test_whole_model(pool, 24, False),
    "layouts agree": test_changing_layouts.test_a_core_in_another_layout_than_its_root_is_refused,
    "outside of the plan": lambda pool: report(pool(2).run(test_watching.found, "not", False, ("MHA",))),
    "outside of the plan, compiled": lambda pool: report(
        pool(2).run(test_watching.found, "blocks in place", True, ("SDPA",))
    ),
    "checkpoints in cores": lambda pool: test_styles.test_checkpoint_inside_a_core_is_refused(pool, False),
    "tables of ranks": lambda pool: in_folder(test_choosing.test_tables_that_differ_are_refused_on_every_rank, pool),
    "one choice": lambda pool: in_folder(
        test_choosing.test_every_rank_takes_the_same, pool, "ulysses, where rank 0 fetches nothing"
    ),
    "one choice of a degree": lambda pool: in_folder(test_choosing.test_every_rank_takes_the_same, pool, "hybrid"),
    "degrees that are tried": lambda pool: alone(pool, (test_choosing.test_degrees_that_are_tried, ())),
    "groups that cannot be made": lambda pool: alone(
        pool, (test_choosing.test_what_needs_groups_is_not_tried_where_they_cannot_be_made, ())
    ),
    "times of the hybrid": lambda pool: alone(pool, (test_costs.test_a_hybrid_is_its_exchanges_and_its_ring, ())),
    "exchanges of a pass": lambda pool: alone(pool, (test_costs.test_a_hybrid_is_its_exchanges_and_its_ring, ())),
    "times of the double ring": lambda pool: alone(
        pool, (test_costs.test_the_network_moves_less_in_the_double_ring, ())
    ),
    "allocations": lambda pool: test_allocations.test_formulas_are_what_is_allocated(pool, "functional"),
    "a clock": lambda pool: alone(pool, (test_calibrating.test_a_clock_counts_seconds, ())),
    "columns of calibrate": lambda pool: alone(pool, (test_calibrating.test_columns_are_bytes_and_flops, ())),
    "a clock of ranks": test_calibrating.test_the_slowest_rank_counts,
    "release": test_symmetric_memory.test_release_gives_back_the_memory_of_groups_within_a_group,
    "decoding": lambda pool: report(
        pool(3).run(
            test_decoding.at_positions,
            [test_decoding.Case("zigzag", "window", 13, 2, "sinks"), test_decoding.Case("striped", "full", 13)],
        )
    ),
    "sharded queries": lambda pool: report(pool(3).run(test_decoding.sharded, test_decoding.SHARDED)),
    "cache": lambda pool: report(pool(3).run(test_decoding.cached, test_decoding.FEW)),
    "what a core asks": test_watching.test_what_a_core_asks_that_is_not_traced,
    "rows of the root": lambda pool: test_watching.test_cores_that_attend_to_other_rows_are_refused(
        pool, "blocks in place", test_watching.part_of_rows, False
    ),
    "copies": lambda pool: test_copies.test_copies_have_the_style_and_their_own_attributes(
        pool, test_copies.OwnReduce, "deepcopy"
    ),
    "compiled cores": test_watching.test_compiled_cores_of_one_class_are_told_apart,
    "symmetric memory": race,
    "symmetric memory of Ulysses": lambda pool: race(pool, method="ulysses"),
    "check mode": every_disagreement,
    "verify": lambda pool: test_verify.test_verify_finds_what_one_device_has_too(
        pool, False, "a scale wrong by 2 %", "cpu_flash"
    ),
    "patience": lambda pool: test_faults.test_a_first_call_waits_as_long_as_its_group(pool),
    "NaN": lambda pool: test_faults.test_nan_reaches_what_depends_on_it_and_no_more_than_on_one_rank(pool, "ring"),
    "first calls": lambda pool: test_guard.test_batches_that_differ_between_ranks(pool, "content", False),
    "labels of other rows": lambda pool: test_guard.test_labels_of_other_rows(pool, True),
    "sharded twice": lambda pool: test_guard.test_what_is_sharded_twice(pool, False),
    "positions of a root": lambda pool: test_guard.test_positions_of_a_root(pool, False),
    "variables of a loop": test_guard.test_functions_that_read_the_variable_of_a_loop,
    "unread masks": lambda pool: test_guard.test_a_mask_that_no_style_reads(pool, False),
    "windows of modules": lambda pool: test_guard.test_what_the_module_says_and_the_style_does_not(
        pool, "a window of its layer", False
    ),
    "whole tokens": lambda pool: test_guard.test_what_is_refused_without_a_root(pool, "whole", False),
    "ranks of the loss": lambda pool: test_guard.test_gradients_of_a_wrong_scale_are_refused(pool, "FSDP, loss of cp"),
    "gradients that are reduced": lambda pool: test_guard.test_gradients_of_a_wrong_scale_are_refused(pool, "none"),
    "gathered losses": lambda pool: test_guard.test_a_loss_of_gathered_logits_has_the_right_scale(pool, "cp", False),
    "models in turn": lambda pool: test_first_steps.test_models_in_turn_have_a_first_step_each(pool, True, False),
    "words in the store": lambda pool: (
        test_first_steps.test_a_word_that_nobody_came_to_read_is_taken_back(pool, "refused"),
        test_first_steps.test_batches_that_begin_to_differ(pool, False),
    ),
    "rows of ranks": lambda pool: (
        test_first_steps.test_labels_that_are_wrong_on_one_rank_alone(pool, False),
        test_first_steps.test_the_last_row_of_sharded_logits(pool),
        test_first_steps.test_padding_that_queries_see(pool),
    ),
    "gradients of a step": lambda pool: (
        test_first_steps.test_optimizers_that_step_in_the_backward(pool, False),
        test_first_steps.test_accumulated_gradients_that_are_right(pool, 1, 2),
    ),
    "verify_model": test_verify_model.look,
    "runs": lambda pool: alone(pool, (test_changing_layouts.test_runs_that_compiled_code_did_not_read_are_checked, ())),
    "round trip": lambda pool: test_sequence.test_round_trip_and_its_gradient(pool, "zigzag", 3),
    "loss": lambda pool: test_sequence.test_cross_entropy(pool, "ragged", 3, 1),
    "chunks of the loss": lambda pool: alone(
        pool,
        (test_loss.test_loss_and_gradient, (torch.float64, "contiguous")),
        (test_loss.test_chunks_change_nothing, (torch.float64,)),
    ),
    "linears": lambda pool: report(pool(3).run(test_tensor_parallel.run_cases, test_tensor_parallel.CASES)),
    "traffic of linears": test_tensor_parallel.test_what_travels_and_what_is_computed,
    "order of linears": lambda pool: test_tensor_parallel.test_products_run_while_rows_travel(
        pool, *test_tensor_parallel.ORDERS[0]
    ),
    "order of forwards": test_tensor_parallel.test_products_begin_before_all_rows_have_come,
    "order of copies": test_tensor_parallel.test_products_run_while_copy_engines_move_rows,
    "beside products": lambda pool: test_tensor_parallel.test_rows_that_travel_beside_products(pool, 3, "functional"),
    "beside copies": lambda pool: test_tensor_parallel.test_rows_that_travel_beside_products(
        pool, 3, "symmetric_memory"
    ),
    "chunks of logits": test_tensor_parallel.test_chunks_of_logits,
    "unlike tokens over tp": lambda pool: test_tensor_parallel.test_what_one_rank_alone_refuses(pool, ("tokens",)),
    "unlike gradients over tp": lambda pool: test_tensor_parallel.test_what_one_rank_alone_refuses(
        pool, ("no gradient: columns",)
    ),
    "refusals in cores over tp": lambda pool: test_tensor_parallel.test_all_ranks_of_cp_and_tp_hear_of_a_refusal(
        pool, "a core"
    ),
    "refusals in another model": lambda pool: test_tensor_parallel.test_ranks_of_one_model_do_not_hear_of_another(
        pool, "cp", False
    ),
    "later refusals": test_agreement.test_a_later_refusal_is_told_when_the_wait_ends,
    "a head under FSDP2": test_tensor_parallel.test_one_trained_part_under_fsdp,
    "plain parameters over tp": test_tensor_parallel.test_plain_parameters_on_sharded_rows,
    "norm on several meshes": test_clipping.test_every_entry_counts_once,
    "gradients of one rank": lambda pool: test_gradients.test_gradients_are_those_of_one_rank(
        pool, test_gradients.Setup(cp=3, S=22)
    ),
}


IN_TRITON = {f"{what} in Triton": what for what in ("a band", "documents", "scores", "sums", "few queries")}
CHECKS |= {
    check: lambda pool, what=what: report(pool(1).run(in_triton, what, timeout=120.0))
    for check, what in IN_TRITON.items()
}


def bugs() -> Iterator[Any]:
    """The first bug of each check is part of the quick form."""
    checks: set[str] = set()
    for mutation in MUTATIONS.values():
        for check in mutation.checks:
            name = mutation.name if len(mutation.checks) == 1 else f"{mutation.name}, seen by {check}"
            yield pytest.param(mutation, check, id=name, marks=[pytest.mark.full] * (check in checks))
            checks.add(check)


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the package in byte code, so that each rank compiles the file alone in which a bug is planted."""
    folder = tmp_path_factory.mktemp("compiled") / "cp_mesh"
    shutil.copytree(PACKAGE, folder, ignore=shutil.ignore_patterns("__pycache__"))
    compileall.compile_dir(folder, quiet=1)
    return folder


@pytest.fixture
def copy(compiled: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of the package, which ranks that start from now on import."""
    shutil.copytree(compiled, tmp_path / "cp_mesh")
    monkeypatch.syspath_prepend(tmp_path)
    return tmp_path / "cp_mesh"


class OwnPools:
    """Pools of ranks that import the copy, and give up on a lost collective soon."""

    def __init__(self, copy: Path) -> None:
        self.file, self.pools = str(copy / "__init__.py"), {}

    def __call__(self, world_size: int) -> ImportingPool:
        if world_size not in self.pools:
            pool = ImportingPool(world_size, group_timeout=5.0)
            try:
                assert set(pool.run(origin)) == {self.file}
            except BaseException:
                pool.close()
                raise
            self.pools[world_size] = pool
        return self.pools[world_size]

    def close(self) -> None:
        while self.pools:
            self.pools.popitem()[1].close()


@pytest.fixture
def own_pool(copy: Path) -> Iterator[OwnPools]:
    made = OwnPools(copy)
    yield made
    made.close()


def test_the_table_counts_the_bugs():
    found = Counter(mutation.area for mutation in MUTATIONS.values())
    table = "\n".join(f"{area:<26}{count:>4}" for area, count in found.items())
    assert f"{table}\n{'in all':<26}{len(MUTATIONS):>4}\n" in inspect.getdoc(planted)
    assert {check for mutation in MUTATIONS.values() for check in mutation.checks} == set(CHECKS)


def test_every_seam_exists():
    """In the package as it is, so that a refactoring which moves one learns of it in the quick form."""
    lost = []
    for mutation in MUTATIONS.values():
        try:
            assert mutation.made() is not mutation.find()[2], f"{mutation.name!r} plants nothing"
        except SeamLost as error:
            lost.append(str(error))
    assert not lost, "\n".join(lost)


def test_a_lost_seam_is_told():
    """And where its name is now."""
    combine = "cp_mesh.kernels.combine"
    for seam, home in {
        "nowhere:forward_by_stages": "cp_mesh.methods.stages",
        "methods.ring:nothing": "no module",
        "kernels.combine:RowSum.nothing": combine,
        "methods.stages:RowSum.add": combine,  # which is imported there
    }.items():
        with pytest.raises(SeamLost, match=rf"'a bug' is planted at {seam}, which does not .* is in {home}\)"):
            Mutation("a bug", "nothing", seam, ("parity",), lambda original: original).find()
    seam = "methods.stages:forward_by_stages"
    lost = Mutation("a bug", "nothing", seam, ("parity",), lambda f: with_arguments(f, nothing=id))
    with pytest.raises(SeamLost, match=r"'a bug', in test_mutations: .*forward_by_stages has no argument nothing"):
        lost.made()


@pytest.mark.full  # the quick form runs most of them as the tests that they are
def test_checks_are_green_without_a_bug(own_pool):
    for name, check in CHECKS.items():
        if name not in IN_TRITON:
            check(own_pool)


@pytest.mark.full
def test_checks_in_triton_are_green_without_a_bug(own_pool):
    require_interpreter()
    for name in IN_TRITON:
        CHECKS[name](own_pool)


BROKEN = ("NameError", "SyntaxError", "ImportError", "TypeError", "AttributeError", "SeamLost")


@pytest.mark.parametrize(("mutation", "check"), list(bugs()))
def test_bug_is_found(mutation, check, copy, own_pool, monkeypatch):
    monkeypatch.setattr("ranks.GRACE", 0.5)
    if check in IN_TRITON:
        require_interpreter()
    mutation.find()
    planted.infect(copy, mutation)
    with pytest.raises((Exception, pytest.fail.Exception)) as found:
        CHECKS[check](own_pool)
    assert own_pool.pools, "a mutant that cannot be imported proves nothing"
    words = str(found.value)
    print(words)  # shown by -rP
    assert not any(error in words for error in BROKEN), words
