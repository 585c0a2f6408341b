"""Blocks of a mask between any two pieces of a layout, and what all ranks must know, against dense masks."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
from cases import LAYOUTS, MASKS, make_mask, pairs
from dense import dense_mask
from hypothesis import example, given, settings
from hypothesis import strategies as st
from inside import NONE, Distances, Index, block_table, inner, make_schedule, num_rows, pieces_of, room

from cp_mesh import Contiguous, Layout, Mask, Striped, ZigZag, balance
from cp_mesh.geometry import Balanced
from cp_mesh.geometry.layouts import Run

survey = room("survey")
K_END, LEFT, PAIRS, Q_END = inner("block_table", "K_END", "LEFT", "PAIRS", "Q_END")
RIGHT, K, Q, keys_of = inner("block_table", "RIGHT", "K", "Q", "keys_of")
Piece = inner("layout", "Piece")

each_mask = pytest.mark.parametrize("name", MASKS)


@dataclass(frozen=True)
class Given(Layout):
    """A shard for each piece: of any pieces, which need not be a partition."""

    pieces: tuple[Piece, ...]

    def runs(self, seq_len: int, cp_size: int, cp_rank: int) -> tuple[Piece, ...]:
        return (self.pieces[cp_rank],)

    def spec(self) -> str:
        return "given"


def times(pieces: list[Piece], mask: Mask, S: int) -> tuple[np.ndarray, torch.Tensor]:
    """The blocks of all pairs of pieces; and how often they name a query of any piece with a key of any piece."""
    q = pieces_of(Given(tuple(pieces)), S, len(pieces))
    k = keys_of(q, mask, S)
    i, j = (x.flatten() for x in np.meshgrid(np.arange(q.num), np.arange(k.num), indexing="ij"))
    blocks = block_table(q, i, k, j, mask.elementwise)
    begins = np.r_[0, np.cumsum([piece.length for piece in pieces])]
    counts = torch.zeros(begins[-1], begins[-1], dtype=torch.int)
    for receiver, source, q_begin, q_end, k_begin, k_end, left, right in blocks.tolist():
        shape = q_end - q_begin, k_end - k_begin
        shift = shape[1] - shape[0]
        at = Distances(None if right == NONE else -right - shift, None if left == NONE else left - shift)
        rows = slice(begins[receiver] + q_begin, begins[receiver] + q_end)
        keys = slice(begins[source] + k_begin, begins[source] + k_end)
        counts[rows, keys] += 1 if left == PAIRS else at.pairs(*shape).int()
        if left != PAIRS:
            named = at.pairs(*shape)
            assert named.any(0).all() and named.any(1).all()  # no row or key for nothing
    return blocks, counts


def check(pieces: list[Piece], name: str, S: int) -> np.ndarray:
    mask, want = make_mask(name, 2, S), pairs(name, 2, S).any(0)
    blocks, counts = times(pieces, mask, S)
    positions = torch.cat([piece.positions() for piece in pieces])
    want = want[positions][:, positions].int()
    if (blocks[:, LEFT] == PAIRS).any():  # whole pieces, of which `Mask.allowed` tells the pairs
        assert (counts >= want).all() and (counts <= 1).all()
    else:
        assert torch.equal(counts, want)
    return blocks


@each_mask
@pytest.mark.parametrize("stride", (1, 3))
def test_blocks_of_runs_are_exact(name, stride):
    S = 13
    runs = [Run(start, stride, n) for start in range(S) for n in (1, 2, 4) if start + stride * (n - 1) < S]
    blocks = check(runs, name, S)
    assert make_mask(name, 2, S).elementwise or not (blocks[:, LEFT] == PAIRS).any()


@each_mask
def test_blocks_of_listed_positions_and_unlike_strides(name):
    check(
        [Run(0, 1, 5), Run(1, 3, 4), Run(12, 7, 1), Index(torch.tensor([9, 2, 4])), Index(torch.tensor([0]))], name, 13
    )


@pytest.mark.parametrize("layout", ("contiguous", "zigzag", "balanced"))
@pytest.mark.parametrize("window", (None, (6, None), (None, 2), (4, 3)), ids=str)
def test_keys_that_no_block_needs_do_not_travel(layout, window):
    """Of an image that goes on in the next shard, the rest alone; of batch rows, what any of them needs."""
    S, cp_size = 97, 3
    blocks = torch.stack([torch.arange(S) // 13, torch.arange(S) // 29 % 2 * (torch.arange(S) // 29 + 1) - 1])
    rows = [LAYOUTS[layout](S).positions(S, cp_size, rank) for rank in range(cp_size)]
    for ids in (blocks, blocks[:1], blocks[1]):
        mask = Mask(blocks=ids, window=window)
        seen = dense_mask(S, blocks=torch.atleast_2d(ids), window=window).any(0)
        want = [[int(seen[q][:, k].any(0).sum()) * (q is not k) for k in rows] for q in rows]
        assert survey.survey(LAYOUTS[layout](S), mask, S, cp_size, 0, False).needed.tolist() == want


def bands(pieces: list[Run], **options: Any) -> list[tuple[int, ...]]:
    blocks, _ = times(pieces, Mask(**options), 12)
    return [tuple(row) for row in blocks.tolist()]


def test_blocks_by_hand():
    first, second = Run(0, 1, 4), Run(4, 1, 4)
    causal, full = (NONE, 0), (NONE, NONE)
    assert bands([first, second]) == [
        (0, 0, 0, 4, 0, 4, *causal),
        (1, 0, 0, 4, 0, 4, *full),
        (1, 1, 0, 4, 0, 4, *causal),
    ]
    later, sooner = Run(1, 3, 4), Run(0, 3, 4)
    # a stripe against a later one: the diagonal lies ahead, so one row and one key less
    assert bands([sooner, later])[1] == (0, 1, 1, 4, 0, 3, *causal)
    assert bands([first], window=(1, 0)) == [(0, 0, 0, 4, 0, 4, 1, 0)]
    assert bands([first, second], window=(1, 0))[1] == (1, 0, 0, 1, 3, 4, *full)


def test_reaches_are_the_mask():
    S = 12
    for causal, left, right, prefix, length in product((True, False), (None, 0, 3), (None, 0, 2), (0, 2), (None, 0, 5)):
        if prefix and not causal:
            continue
        options = {"causal": causal, "window": (left, right), "prefix": prefix, "length": length}
        distance = torch.arange(S)[:, None] - torch.arange(S)
        seen, end = torch.zeros(S, S, dtype=torch.bool), 0
        for reach in Mask(**options).reaches(S):
            assert reach.begin == end < reach.end
            keys, end = slice(reach.begin, reach.end), reach.end
            seen[:, keys] = (distance[:, keys] >= reach.nearest) & (distance[:, keys] <= reach.farthest)
        assert torch.equal(seen, dense_mask(S, **options)[0]), options


# --- what all ranks must know alike


def facts_of_all_blocks(layout: Layout, mask: Mask, S: int, cp_size: int, documents: bool) -> dict[str, Any]:
    """From the schedules of all ranks, one after the other."""
    ranks = [make_schedule(layout, mask, S, cp_size, rank, documents) for rank in range(cp_size)]
    needed = [[sum(end - begin for begin, end in rows) for rows in schedule.fetch] for schedule in ranks]
    calls = []
    for schedule in ranks:
        for source in range(cp_size):
            if source == schedule.cp_rank:
                continue
            for table in schedule.blocks:
                rows = table[table[:, 1] == source]
                causal = (rows[:, LEFT] == NONE) & (rows[:, RIGHT] > 0) & (rows[:, RIGHT] < NONE)
                twice = np.concatenate([rows, rows[causal]])  # as a square and the rows after it
                calls.append(np.sort(twice[:, K] * NONE + twice[:, K_END]))
    shared = any((x[:-1] % NONE > x[1:] // NONE).any() for x in calls)
    return {"needed": needed, "overlapping": bool(shared)}


@settings(max_examples=80, deadline=None)
@example("zigzag", 13, 5, {"window": (5, 0)}, False, 0)  # rows that see a piece in full, and a row of the next run
@given(
    layout=st.sampled_from(("contiguous", "zigzag", "striped", "balanced", "runs")),
    S=st.integers(1, 64),
    cp_size=st.integers(1, 9),
    mask=st.sampled_from(
        (
            {},
            {"window": (5, 0)},
            {"causal": False, "window": (4, 2)},
            {"causal": False, "window": (None, 2)},
            {"prefix": 9},
            {"length": 20},
            {"causal": False},
        )
    ),
    documents=st.booleans(),
    seed=st.integers(0, 3),
)
@pytest.mark.full
def test_facts_are_those_of_the_blocks(layout, S, cp_size, mask, documents, seed):
    generator = torch.Generator().manual_seed(seed)
    if layout == "runs":
        lens = torch.randint(1, 6, (S,), generator=generator)
        lens = lens[: int((lens.cumsum(0) < S).sum())].tolist()
        lens.append(S - sum(lens))
        begins = torch.tensor([0, *lens]).cumsum(0)[:-1]
        order = torch.randperm(len(lens), generator=generator)
        chosen: Layout = Balanced(torch.stack([begins, torch.tensor(lens)], 1)[order])
    else:
        chosen = LAYOUTS[layout](S)
    ids = (torch.rand(1, S, generator=generator) > 0.8).cumsum(1)
    whole = Mask(**mask, documents=ids if documents else None)
    for segments in {False, documents}:
        want = facts_of_all_blocks(chosen, whole, S, cp_size, segments)
        found = survey.survey(chosen, whole, S, cp_size, cp_size // 2, segments)
        assert found.needed.tolist() == want["needed"]
        assert found.overlapping == want["overlapping"]


@pytest.mark.parametrize("chunk", (1, 7, 30))
@pytest.mark.parametrize("name", ("zigzag", "striped", "balanced"))
def test_a_survey_does_not_depend_on_how_much_is_looked_at_together(monkeypatch, name, chunk):
    S = 60
    ids = torch.repeat_interleave(torch.arange(4), torch.tensor([3, 40, 11, 6]))
    for options in (
        {},
        {"prefix": 20},
        {"window": (7, None)},
        {"causal": False},
        {"causal": False, "window": (None, 2)},
    ):
        mask, layout = Mask(documents=ids, **options), LAYOUTS[name](S)
        for segments, cp_size in product((False, True), (3, 5)):
            each = [survey.survey(layout, mask, S, cp_size, rank, segments) for rank in range(cp_size)]
            with monkeypatch.context() as patch, survey.of_many_ranks():
                patch.setattr(survey, "CHUNK", chunk)
                together = [survey.survey(layout, mask, S, cp_size, rank, segments) for rank in range(cp_size)]
            for got, want in zip(together, each, strict=True):
                assert got.needed.tolist() == want.needed.tolist()
                assert (got.overlapping, got.covers) == (want.overlapping, want.covers)
                assert all(map(np.array_equal, got.blocks, want.blocks))
                assert all(map(np.array_equal, got.asked, want.asked))


SIZES = {64: (0, 1, 31, 63), 256: (0, 100, 255), 1024: (0, 511, 1023)}
LARGE = {
    "causal": {},
    "window": {"window": (4095, 0)},
    "two-sided window": {"causal": False, "window": (700, 300)},
    "prefix": {"prefix": 5000},
    "length": {"causal": False, "length": (1 << 20) - 777},
}


def sampled(schedule, layout: Layout, mask: Mask, S: int, queries: int) -> None:
    """Some queries of a rank: the keys that its blocks name are those of `Mask.allowed`, each once."""
    rank, cp_size = schedule.cp_rank, schedule.cp_size
    generator = torch.Generator().manual_seed(rank)
    own = layout.positions(S, cp_size, rank)
    held = layout.permutation(S, cp_size)
    begins = np.cumsum([0, *schedule.shard_lens])
    rows = torch.cat([torch.tensor([0, len(own) - 1]), torch.randint(len(own), (queries,), generator=generator)])
    (table,) = schedule.blocks
    for row in rows.tolist():
        counts = torch.zeros(S, dtype=torch.int)
        for _, source, q, q_end, k, k_end, left, right in table[
            (table[:, Q] <= row) & (row < table[:, Q_END])
        ].tolist():
            # -left <= j - i - (num_k - num_q) <= right
            place = (row - q) + (k_end - k) - (q_end - q)
            first = max(k, k + place - left) if left < NONE else k
            last = min(k_end, k + place + right + 1) if right < NONE else k_end
            counts[begins[source] + first : begins[source] + max(first, last)] += 1
        want = torch.zeros(S, dtype=torch.int)
        want[held] = counts  # in original order
        assert torch.equal(want, mask.allowed(own[row : row + 1], torch.arange(S))[0, 0].int()), (rank, row)


@pytest.mark.parametrize("cp_size", [64, *(pytest.param(size, marks=pytest.mark.full) for size in (256, 1024))])
@pytest.mark.parametrize("name", LARGE)
@pytest.mark.quick("causal-64")
def test_sampled_ranks_of_many(cp_size, name):
    """A million tokens: some ranks' queries see what the mask allows, and both ends of a hop know the same rows."""
    S, mask = 1 << 20, Mask(**LARGE[name])
    for layout in (ZigZag(), Striped(), Contiguous()):
        for rank in SIZES[cp_size]:
            schedule = make_schedule(layout, mask, S, cp_size, rank)
            sampled(schedule, layout, mask, S, 2)
            of_rank = [sum(e - b for b, e in rows) for rows in schedule.fetch]
            to_others = [sum(e - b for b, e in rows) for rows in schedule.serve]
            assert schedule.route.needed[rank].tolist() == of_rank
            assert schedule.route.needed[:, rank].tolist() == to_others


def test_packed_documents_of_many_ranks():
    S, cp_size = 1 << 18, 128
    generator = torch.Generator().manual_seed(0)
    lens = torch.randint(100, 4000, (200,), generator=generator)
    lens = lens[: int((lens.cumsum(0) < S).sum())].tolist()
    ids = torch.repeat_interleave(torch.arange(len(lens) + 1), torch.tensor([*lens, S - sum(lens)]))
    mask = Mask(documents=ids)
    for layout in (balance(mask, S, cp_size), ZigZag(), Striped()):
        for rank in (0, 77, 127):
            schedule = make_schedule(layout, mask, S, cp_size, rank, True)
            assert schedule.covers == {"pairs" if layout == Striped() else "segments"}
            assert schedule.route.needed[rank].tolist() == [num_rows(rows) for rows in schedule.fetch]
            assert schedule.route.needed[:, rank].tolist() == [num_rows(rows) for rows in schedule.serve]
            if layout != Striped():
                sampled(schedule, layout, mask, S, 4)
