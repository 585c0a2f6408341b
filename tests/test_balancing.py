"""Balanced layouts: equal tokens, layers that take all ranks equally long, whole documents where that is so."""

import doctest
import tracemalloc
from itertools import combinations, pairwise, product

import numpy as np
import pytest
import torch
from cases import LAYOUTS, MASKS, gap
from checks import num_pairs
from dense import dense_mask
from hypothesis import given, settings
from hypothesis import strategies as st
from inside import make_schedule, room

from cp_mesh import ArgumentError, Mask, UnsupportedError, ZigZag, balance
from cp_mesh.geometry import Balanced
from cp_mesh.geometry.layouts import Run, chunk_bounds


def lognormal(S: int, seed: int, median: float = 512, sigma: float = 1.5) -> list[int]:
    """Lengths of documents that fill S tokens, none longer than a quarter of it."""
    generator, lens = torch.Generator().manual_seed(seed), []
    while (left := S - sum(lens)) > 0:
        drawn = round(median * float((sigma * torch.randn((), generator=generator)).exp()))
        lens.append(min(left, S // 4, max(1, drawn)))
    return lens


PER_TOKEN = 15_000  # pairs, as in `balance`


def ids_of(lens: list[int]) -> torch.Tensor:
    return torch.repeat_interleave(torch.arange(len(lens)), torch.tensor(lens))[None]


def schedules(layout, mask: Mask, S: int, cp_size: int) -> list:
    return [make_schedule(layout, mask, S, cp_size, rank, segments=True) for rank in range(cp_size)]


def times(pairs: list[int], S: int, per_token: float = PER_TOKEN) -> float:
    """A layer's time on the slowest rank, over the mean."""
    mean = sum(pairs) / len(pairs)
    return (per_token * S / len(pairs) + max(pairs)) / (per_token * S / len(pairs) + mean)


@pytest.mark.parametrize(("S", "cp_size"), [(1048576, 2), (1048576, 4), (1048576, 8), (131072, 16), (1 << 20, 8)])
@pytest.mark.parametrize("seed", range(6))
def test_packed_documents(S, cp_size, seed):
    """A layer's time within 2 % of even, equal shards, and hardly more rows fetched than in zigzag, which is uneven."""
    mask = Mask(documents=ids_of(lognormal(S, seed)))
    layout = balance(mask, S, cp_size)
    ranks = schedules(layout, mask, S, cp_size)
    assert ranks[0].shard_lens == (S // cp_size,) * cp_size
    assert times([num_pairs(schedule) for schedule in ranks], S) <= 1.02
    zigzag = make_schedule(ZigZag(), mask, S, cp_size, 0, segments=True)
    assert ranks[0].route.num_rows <= zigzag.route.num_rows + S * cp_size // 8
    assert not ranks[0].overlapping
    for schedule in ranks:
        assert len(schedule.local_tiles) == 1
        assert sum(len(stage.tiles) for stage in schedule.route.stages) <= 2 * len(schedule.route.stages)


@pytest.mark.parametrize("seed", range(4))
def test_most_documents_stay_whole(seed):
    S, cp_size = 1048576, 8
    lens = lognormal(S, seed)
    layout = balance(Mask(documents=ids_of(lens)), S, cp_size)
    owner = torch.empty(S, dtype=torch.int64)
    for rank in range(cp_size):
        owner[layout.positions(S, cp_size, rank)] = rank
    cut = sum(len(part.unique()) > 1 for part in owner.split(lens))
    assert cut <= 2 * cp_size and cut < len(lens) / 2
    assert sum(len(part.unique()) - 1 for part in owner.split(lens) if len(part) < 100) < cp_size


@pytest.mark.parametrize(("lens", "cp_size"), [([400] * 40, 2), (lognormal(32768, 0, 400, 1.0), 2), ([512] * 64, 8)])
def test_short_documents_do_not_travel(lens, cp_size):
    """Whole documents fill the shards exactly, and each rank has one call."""
    S, mask = sum(lens), Mask(documents=ids_of(lens))
    ranks = schedules(balance(mask, S, cp_size), mask, S, cp_size)
    assert ranks[0].shard_lens == (S // cp_size,) * cp_size
    assert not ranks[0].route.stages and all(len(schedule.local_tiles) == 1 for schedule in ranks)
    assert times([num_pairs(schedule) for schedule in ranks], S) <= 1.02


@pytest.mark.parametrize("mean", (1000, 2000, 4000))
@pytest.mark.parametrize("cp_size", (2, 8))
def test_lengths_of_training_data(mean, cp_size):
    """Layers take all ranks as long within 2 %, and less travels than with equal pairs."""
    S = 65536
    mask = Mask(documents=ids_of(lognormal(S, 0, mean / 1.65, 1.0)))
    moved = []
    for per_token in (PER_TOKEN, 0):
        layout = balance(mask, S, cp_size, pairs_per_token=per_token)
        ranks = schedules(layout, mask, S, cp_size)
        assert times([num_pairs(schedule) for schedule in ranks], S, per_token) <= 1.02
        moved.append(ranks[0].route.num_rows)
    assert moved[0] <= moved[1]


def test_excluded_tokens_are_cut_first():
    """They cost nothing, so all documents stay whole."""
    ids = torch.cat([ids_of([600, 300, 500, 150, 450])[0], torch.full((560,), -1)])
    for cp_size in (2, 4):
        assert not make_schedule(
            balance(Mask(documents=ids), 2560, cp_size), Mask(documents=ids), 2560, cp_size, 0, True
        ).route.stages


def test_rows_with_short_documents_are_cut_in_order():
    """Batch rows share a layout, and few documents lie at its bounds."""
    rows = torch.cat([ids_of(lognormal(32768, seed, 400, 1.0)) for seed in range(4)])
    assert [len(balance(Mask(documents=rows), 32768, 2).runs(32768, 2, rank)) for rank in range(2)] == [1, 1]


@pytest.mark.parametrize("numbers", [[], [3], [5, 5, 7], [1, 2, 4, 8, 16], [6, 10, 15, 21], [2, 2, 2, 9]])
def test_numbers_that_add_up(numbers):
    sums = {sum(some) for n in range(len(numbers) + 1) for some in combinations(numbers, n)}
    for total in range(sum(numbers) + 3):
        found = room("balance")._adding_up(numbers, total)
        assert sum(numbers[i] for i in found) == (total if total in sums else 0)


@given(
    st.lists(st.integers(1, 300), min_size=1, max_size=40),
    st.integers(1, 9),
    st.sampled_from((0, 40, 15_000)),
    st.sampled_from(({}, {"causal": False}, {"window": (20, 0)}, {"prefix": 50}, {"length": 200})),
    st.booleans(),
)
@settings(max_examples=150, deadline=None, derandomize=True, database=None)
def test_any_documents(lens, cp_size, per_token, options, excluded):
    """Every position is held once, in shards of `torch.chunk` sizes."""
    S, ids = sum(lens), ids_of(lens)
    if excluded:
        ids[ids % 3 == 1] = -1
    layout = balance(Mask(documents=ids, **options), S, cp_size, pairs_per_token=per_token)
    shards = [layout.positions(S, cp_size, rank) for rank in range(cp_size)]
    assert torch.cat(shards).sort().values.tolist() == list(range(S))
    assert [len(shard) for shard in shards] == [e - b for b, e in (chunk_bounds(S, cp_size, i) for i in range(cp_size))]


def test_planning_needs_no_array_of_the_sequence():
    mask = Mask(documents=ids_of([1 << 14] * 64))
    mask.runs()
    tracemalloc.start()
    balance(mask, 1 << 20, 8)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 1 << 18


@pytest.mark.parametrize("name", MASKS)
def test_weights_are_the_keys_that_a_position_sees(name):
    S = 31
    options = MASKS[name](2, S)
    if "key_padding" in options or "scattered" in name:
        return
    want = dense_mask(S, **options).sum((0, 2))
    assert room("pair_counts").pairs_between(np.arange(S + 1), Mask(**options), S).tolist() == want.tolist()


@pytest.mark.parametrize("name", [name for name in MASKS if "padding" not in name and name != "everything"])
@pytest.mark.parametrize("S", (0, 1, 7, 96, 97))
def test_any_mask_and_length(name, S):
    """Shards of `torch.chunk` sizes, of runs in order; ids that come back are only less well balanced."""
    for cp_size in (1, 2, 3, 8):
        layout = balance(Mask(**MASKS[name](2, S)), S, cp_size)
        for rank in range(cp_size):
            begin, end = chunk_bounds(S, cp_size, rank)
            positions = layout.positions(S, cp_size, rank)
            assert len(positions) == end - begin and torch.equal(positions, positions.sort().values)
            runs = layout.runs(S, cp_size, rank)
            assert all(isinstance(a, Run) and a.last + 1 < b.start for a, b in pairwise(runs))


@pytest.mark.parametrize(
    ("options", "tolerance"),
    [({}, 0.01), ({"window": (64, None)}, 0.02), ({"causal": False}, 0.0), ({"causal": False, "window": (40, 8)}, 0.02),
     ({"prefix": 100}, 0.02), ({"documents": torch.stack([torch.arange(960) // 7, torch.arange(960) // 480])}, 0.01)],
)  # fmt: skip
def test_other_masks(options, tolerance):
    """With equal pairs as the aim; windows, which cost little beside linears, are even in a layer's time."""
    S, per_token = 960, 1000 if "window" in options else 0
    want = dense_mask(S, **options).sum((0, 2)).double()
    for cp_size in (2, 4, 8):
        layout = balance(Mask(**options), S, cp_size, pairs_per_token=per_token)
        work = torch.stack([want[layout.positions(S, cp_size, rank)].sum() for rank in range(cp_size)])
        work += per_token * S / cp_size
        assert gap(work / work.mean(), torch.ones(cp_size)) <= tolerance


def test_one_document_is_zigzag_and_a_full_mask_contiguous():
    for S, cp_size in product((24, 96), (2, 3, 4)):
        for rank in range(cp_size):
            layout = balance(Mask(), S, cp_size, pairs_per_token=0)
            assert layout.runs(S, cp_size, rank) == ZigZag().runs(S, cp_size, rank)
            assert len(balance(Mask(causal=False), S, cp_size).runs(S, cp_size, rank)) == 1
    for rank in range(4):  # attention of a long document takes most of a layer
        assert balance(Mask(), 65536, 4).runs(65536, 4, rank) == ZigZag().runs(65536, 4, rank)


def test_example_of_the_docs():
    results = doctest.testmod(room("balance"))
    assert results.attempted == 3 and not results.failed


def test_many_runs_are_scheduled_in_bounded_work():
    """A block is made where pieces may meet, not for every pair of runs."""
    S, cp_size = 4096, 8
    mask = Mask(documents=(torch.arange(S) // 16)[None])
    order = torch.arange(0, S, 16).view(32, 8).T.flatten()
    layout = Balanced(torch.stack([order, torch.full_like(order, 16)], dim=1))
    schedule = make_schedule(layout, mask, S, cp_size, 0)
    assert len(schedule.blocks[0]) == 32  # of 8192


@pytest.mark.parametrize(
    "table", [[[0, 4], [5, 3]], [[0, 4], [3, 5]], [[1, 4]], [[0, 0], [0, 4]], [0, 4], [[0, 4, 1]], [[0, -1], [-1, 5]]]
)
def test_tables_that_must_be_refused(table):
    with pytest.raises(ArgumentError, match=r"Balanced: expected runs \[num_runs, 2\].*cp_mesh\.balance makes valid"):
        Balanced(table)


def test_no_batch_row_and_no_token():
    empty = Mask(documents=torch.zeros(0, 8, dtype=torch.int64))
    assert sorted(balance(empty, 8, 2).permutation(8, 2).tolist()) == list(range(8))
    assert balance(Mask(documents=torch.zeros(1, 0, dtype=torch.int64)), 0, 2).permutation(0, 2).tolist() == []


def test_another_length_is_refused():
    with pytest.raises(ArgumentError, match=r"Balanced: expected seq_len 4, the length of its runs, got 5"):
        Balanced([[0, 4]]).positions(5, 2, 0)


@pytest.mark.parametrize("cp_size", [0, -1, 1.5, 2**70])
def test_ranks_that_do_not_exist_are_refused(cp_size):
    with pytest.raises(ArgumentError, match=r"balance: cp_size: expected an int of 1 to 1048576"):
        balance(Mask(), 16, cp_size)


@pytest.mark.parametrize("price", [-1, float("nan"), float("inf")])
def test_prices_that_do_not_exist_are_refused(price):
    with pytest.raises(ArgumentError, match=r"balance: pairs_per_token: expected a number of 0 to"):
        balance(Mask(), 16, 2, pairs_per_token=price)


def test_masks_that_are_not_read_are_refused():
    with pytest.raises(UnsupportedError, match=r"balance: expected a mask of positions"):
        balance(Mask(key_padding=torch.ones(1, 8, dtype=torch.bool)), 8, 2)
    with pytest.raises(UnsupportedError, match=r"got meta"):
        balance(Mask(documents=torch.zeros(1, 8, dtype=torch.int64, device="meta")), 8, 2)


def test_balanced_is_a_frozen_value_with_a_table_of_its_own():
    table = torch.tensor([[4, 2], [0, 4]])
    layout = Balanced(table)
    table.zero_()
    assert layout.positions(6, 1, 0).tolist() == [4, 5, 0, 1, 2, 3] and layout == Balanced([[4, 2], [0, 4]])
    assert layout != Balanced([[0, 4], [4, 2]]) and layout != LAYOUTS["zigzag"](6)
