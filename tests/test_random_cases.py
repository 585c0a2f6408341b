"""Random calls of `cp_mesh.attention` on 1 to 8 ranks against dense attention, over all of its options at once.

A trial is drawn from its seed: seeds 0 to CP_MESH_CASES - 1 run, or as many from CP_MESH_FIRST_CASE on. The number of
ranks is 1 + seed % 8. The default is 400 seeds, about a minute on two cores, and in the quick form 48 without those of
5 and 7 ranks, which differ least from 6 and 8. For a longer search, and for one seed again:

    CP_MESH_CASES=20000 python3 tests/run.py tests/test_random_cases.py
    CP_MESH_FIRST_CASE=1234 CP_MESH_CASES=1 python3 tests/run.py tests/test_random_cases.py

A failure prints the seed and the `Trial`, which can be pasted into `ROWS` to be run every time. test_properties.py
draws from fewer options on at most four ranks, and has hypothesis reduce what fails.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from random import Random
from typing import Any

import pytest
import torch
from cases import pairs_of
from checks import GQA, MHA, Case, coverage, parity_on_ranks, report, serves
from test_parity import dtensors
from torch import Tensor

from cp_mesh import Mask, balance
from cp_mesh.layouts import Balanced, Layout
from cp_mesh.methods import METHODS

FIRST = int(os.environ.get("CP_MESH_FIRST_CASE", "0"))
WORLDS = range(1, 9)
BATCH = 20  # trials in one call of a pool


@dataclass(frozen=True)
class Trial:
    """A case on a mesh.

    Attributes:
        case: the call; the group of the axis "cp" computes it.
        shape, names: of the mesh. Groups of local tensors along other axes have data of their own.
        placed: None for local tensors; for DTensors what other axes shard, as `test_parity.dtensors` takes it.
        turn: how the DTensors of the call are told, as `test_parity.dtensors` takes it.
        recorded: on a group that delivers at the wait, see recording.py; local tensors only.
    """

    case: Case
    shape: tuple[int, ...]
    names: tuple[str, ...] = ("cp",)
    placed: dict[str, str] | None = None
    turn: int = 0
    recorded: bool = False


ROWS = [
    # A chunk of heads has the scale of the call.
    Trial(Case("zigzag", "causal", 13, GQA, scale=0.7, head_chunks=3), (2,)),
    # Rings of more than four ranks have three stages.
    Trial(Case("zigzag", "causal", 13, GQA), (6,)),
    Trial(Case("striped", "full", 13, MHA), (6,)),
]


# --- what is drawn


def draw_trial(seed: int) -> Trial:
    """The trial of a seed."""
    r = Random(seed)
    size = 1 + seed % 8
    shape, names = r.choice(meshes(size)) if r.random() < 0.4 else ((size,), ("cp",))
    axes = dict(zip(names, shape, strict=True))
    cp = axes["cp"]
    placed, parts = None, {"dp": "batch", "tp": "heads"}
    if r.random() < 0.3:
        placed = {name: part for name, part in parts.items() if name in axes and r.random() < 0.7}
    dp, tp = (axes[name] if name in (placed or {}) else 1 for name in ("dp", "tp"))
    seq_dim = r.choice((1, 2) if dp > 1 else (0, 1, 2))
    B = dp * r.randint(1, 3) if seq_dim else 1
    local_kv_heads = r.randint(1, 3)
    K = tp * local_kv_heads
    H, method = K * r.randint(1, 3), r.choice(("auto", *METHODS))
    if method == "ulysses":  # heads that ranks divide
        H = tp * math.lcm(local_kv_heads, cp) * r.randint(1, 2)
    hosts = {"inner_ring_size": math.gcd(cp, 2 + seed % 2)} if method == "double_ring" else {}
    S = r.randint(0, cp + 1) if r.random() < 0.25 else r.randint(0, 60)
    kind = r.choice(("contiguous", "zigzag", "striped", "permuted", *(["balanced", "runs"] if S else [])))
    if placed is not None:  # shards of DTensors have torch.chunk sizes
        S -= S % {"zigzag": 2 * cp, "striped": cp}.get(kind, 1)
    mask, scores = draw_mask(r, B, S), draw_scores(r, B, H, S)
    layout = draw_layout(r, kind, mask, S, cp)
    D = r.randint(1, 6)
    flash = kind != "permuted" and set(mask) <= {"causal"} and set(scores) <= {"sinks"} and r.random() < 0.7
    kernel = r.choice(("auto", "cpu_flash")) if flash else r.choice(("auto", "reference"))
    case = Case(
        layout=layout,
        mask=mask,
        S=S,
        heads=(H, K),
        seq_dim=seq_dim,
        kernel=kernel,
        memory=r.choice(("contiguous", "strided", "transposed", "sliced", *(["expanded"] if seq_dim else []))),
        scale=r.choice((None, round(r.uniform(0.05, 2.0), 3))),
        sizes=(B, D, D if flash else r.randint(1, 6)),
        scores=scores,
        head_chunks=r.choice([n for n in (None, 1, 2, 3) if serves(method, cp, (H // tp, local_kv_heads), n)]),
        method=method,
        lse_gradient=not flash and r.random() < 0.5,
        options=draw_options(r, placed is None and lengths_are_equal(layout, S, cp)) | hosts,
    )
    if placed is None:
        return Trial(case, shape, names, recorded=r.random() < 0.3)
    return Trial(case, shape, names, placed, turn=r.randint(0, 5))


def meshes(size: int) -> list[tuple[tuple[int, ...], tuple[str, ...]]]:
    """Meshes of so many ranks with another axis beside cp, if there is one."""
    halves = [] if size % 2 else [((2, size // 2), ("dp", "cp")), ((size // 2, 2), ("cp", "tp"))]
    eighths = [((2, 2, 2), ("dp", "cp", "tp")), ((4, 2), ("tp", "cp"))] if size == 8 else []
    return [*halves, *eighths] or [((size, 1), ("cp", "tp"))]


def draw_layout(r: Random, kind: str, mask: dict[str, Any], S: int, cp: int) -> str | list[int] | Layout:
    if kind == "permuted":
        return r.sample(range(S), S)
    if kind == "balanced":
        return balance(Mask(**{name: x for name, x in mask.items() if name != "key_padding"}), S, cp)
    if kind == "runs":
        return draw_runs(r, S, r.choice((2, 4, 20)))
    return kind


def draw_runs(r: Random, S: int, longest: int) -> Balanced:
    """Runs of at most so many positions, in any order."""
    edges = [0]
    while edges[-1] < S:
        edges.append(min(S, edges[-1] + r.randint(1, longest)))
    runs = [(begin, end - begin) for begin, end in pairwise(edges)]
    return Balanced(torch.tensor(r.sample(runs, len(runs)), dtype=torch.int64).view(-1, 2))


def draw_mask(r: Random, B: int, S: int) -> dict[str, Any]:
    """Options of a mask: any conjunction."""

    def bound() -> int | None:
        return r.choice((None, r.randint(0, 8), r.randint(0, S + 2)))

    options: dict[str, Any] = {"causal": r.random() < 0.6}
    if r.random() < 0.3:
        return options
    if r.random() < 0.35:
        options["window"] = bound(), bound()
    if options["causal"] and r.random() < 0.3:
        options["prefix"] = r.randint(0, S + 2)
    if r.random() < 0.3:
        options["length"] = r.randint(0, S + 2)
    if r.random() < 0.5:
        dtype = r.choice((torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8))
        options["documents"] = draw_rows(r, B, dtype, lambda: draw_ids(r, S))
    if r.random() < 0.25:
        kept = r.choice((0.3, 0.8, 1.0))
        options["key_padding"] = draw_rows(r, B, torch.bool, lambda: [r.random() < kept for _ in range(S)])
    return options


def draw_rows(r: Random, B: int, dtype: torch.dtype, row: Callable[[], list[Any]]) -> Tensor:
    """A tensor [S], [1, S] or [B, S] of drawn rows; what is printed of an empty one makes it again if it is [S]."""
    first, num_rows = row(), r.choice((None, 1, B))
    if num_rows is None or not first:
        return torch.tensor(first, dtype=dtype)
    return torch.tensor([first, *(row() for _ in range(num_rows - 1))], dtype=dtype)


def draw_ids(r: Random, S: int) -> list[int]:
    """Ids of S tokens: documents one after another, few or many, some that come back, or ids in any order."""
    kind = r.choice(("few", "many", "returning", "scattered"))
    if kind == "scattered":
        return [r.randint(0, 3) for _ in range(S)]
    ids: list[int] = []
    names = r.sample(range(100), 100)
    while len(ids) < S:
        ids += [r.randint(0, 2) if kind == "returning" else names.pop()] * r.randint(1, 3 if kind == "many" else 30)
    return ids[:S]


def draw_scores(r: Random, B: int, H: int, S: int) -> dict[str, Any]:
    """Options of the scores, tensors by their shapes."""
    if r.random() < 0.4:
        return {}
    drawn: dict[str, Any] = {}
    for name, value in (
        ("softcap", round(r.uniform(0.3, 3.0), 3)),
        ("sinks", (H,)),
        ("alibi_slopes", (H,)),
        ("relative_bias", (H, 2 * r.choice((0, 1, 3, S + 1)) + 1)),
        ("bias", (r.choice((1, B)), r.choice((1, H)), r.choice((1, S)), S)),
    ):
        if r.random() < 0.3:
            drawn[name] = value
    if r.random() < 0.25:
        drawn["dropout_p"] = r.choice((0.1, 0.5, 0.9))
        seed, offset = r.randrange(2**63), r.randrange(2**32)
        drawn["dropout_seed"] = r.choice((seed, torch.tensor(seed), torch.tensor([seed]), torch.tensor([seed, offset])))
    return drawn


def draw_options(r: Random, lengths_are_equal: bool) -> dict[str, Any]:
    options: dict[str, Any] = {
        "transport": r.choice(("auto", "functional")),
        "deterministic": r.choice((None, False, True)),
    }
    return options | ({"seq_len": None} if lengths_are_equal and r.random() < 0.3 else {})


def lengths_are_equal(layout: str | list[int] | Layout, S: int, cp: int) -> bool:
    made = Case(layout, {}, S).make_layout()
    return len({made.shard_len(S, cp, rank) for rank in range(cp)}) == 1


# --- on ranks


def trials_on_ranks(rank: int, trials: Sequence[int | Trial]) -> list[str]:
    """What is wrong with trials, which are given or told by their seeds."""
    problems = []
    for given in trials:
        trial = given if isinstance(given, Trial) else draw_trial(given)
        case, name = trial.case, repr(trial) if trial is given else f"seed {given}: {trial}"
        try:
            if trial.placed is None:
                found = parity_on_ranks(rank, trial.shape, trial.names, [case], trial.recorded)
            else:
                found = dtensors(rank, trial.shape, trial.names, trial.placed, [case], trial.turn)
        except Exception as error:
            raise AssertionError(f"{name} raised {type(error).__name__}") from error
        if found:
            problems.append("\n  ".join([name, *(problem.replace(f"{case}: ", "") for problem in found)]))
    return problems


@pytest.fixture
def seeds(full: bool) -> Sequence[int]:
    if (asked := os.environ.get("CP_MESH_CASES")) or full:
        return range(FIRST, FIRST + int(asked or 400))
    return [seed for seed in range(FIRST, FIRST + 48) if 1 + seed % 8 not in (5, 7)]


@pytest.mark.parametrize("size", WORLDS)
def test_random_cases(pool, seeds, size):
    trials: list[int | Trial] = [row for row in ROWS if torch.Size(row.shape).numel() == size]
    trials += [seed for seed in seeds if 1 + seed % 8 == size]
    for begin in range(0, len(trials), BATCH):
        report(pool(size).run(trials_on_ranks, trials[begin : begin + BATCH], timeout=300))


# --- without ranks


def draw_schedules(seed: int) -> tuple[int, str | Layout, dict[str, Any], int, bool]:
    """Number of ranks, layout, mask, length, and whether documents become segments."""
    r = Random(seed)
    if seed % 2:  # many ranks
        cp = r.choice((12, 16, 24, 32, 64))
        S = cp + r.randint(0, 9)
        mask = draw_mask(r, 2, S)
        return cp, draw_layout(r, r.choice(("contiguous", "zigzag", "striped", "balanced")), mask, S, cp), mask, S, True
    cp = r.randint(5, 8)
    S = 17 * cp  # every position is a piece: from 256 pairs of them on, pieces are compared as vectors
    conditions = (
        {"causal": True, "prefix": 0},
        {"causal": True, "prefix": r.randint(1, S)},
        {"window": (r.randint(0, S), None)},
        {"window": (None, r.randint(0, S))},
    )
    return cp, draw_runs(r, S, 1), draw_mask(r, 2, S) | conditions[seed // 2 % 4], S, False


def test_every_pair_once(seeds):
    problems = []
    for seed in seeds[: max(1, len(seeds) // 20)]:
        cp, layout, mask, S, segments = draw_schedules(seed)
        found = coverage(Case(layout, mask, S).make_layout(), Mask(**mask), pairs_of(mask, S), cp, segments)
        problems += [f"seed {seed}: cp={cp}, layout={layout!r}, {mask}, S={S}: {problem}" for problem in found]
    report([problems])
