"""The coverage gate: scheduled pairs are the dense mask, each exactly once; and what a schedule tells of its cost."""

from collections.abc import Iterable
from functools import cache
from itertools import cycle, product

import pytest
import torch
from cases import LAYOUTS, MASKS, make_mask, pairs
from checks import active_steps, band_tile, coverage, num_pairs, report
from covering import Row, covering_array
from dense import dense_mask
from inside import Band, Distances, Schedule, inner, make_schedule, num_rows, split_causal, tiles_by_source, tiles_of
from torch import Tensor

from cp_mesh import Contiguous, Mask, Striped, ZigZag
from cp_mesh.geometry import Permuted

Tile = inner("schedule", "Tile")

WINDOWS = (None, (2, None), (0, 0), (3, 1), (None, 2), (None, 0), (100, 0))


# Lengths below, at and just off multiples of cp and of 2 cp, and cp - 1.
SMALL = [(S, cp_size) for S in (0, 1, 2, 3, 5, 8) for cp_size in (1, 2, 3, 4)]
LARGE = [(7, 8), (8, 8), (9, 4), (12, 3), (13, 4), (13, 5), (12, 6), (6, 7)]
CONDITIONS = {
    "size": (*SMALL, *LARGE),
    "layout": ("contiguous", "zigzag", "striped", "shuffled"),
    "causal": (True, False),
    "window": WINDOWS,
    "prefix": (0, 1, 4),
    "has_length": (False, True),
    "tensors": ((), ("documents",), ("key_padding",), ("documents", "key_padding")),
}
"""Length and number of ranks, layout, distance conditions, and conditions that are tensors."""


def is_causal_if_prefixed(row: Row) -> bool:
    return row.get("causal", True) or not row.get("prefix")


@cache
def tensors_of(S: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(S)
    ids = torch.randint(0, 4, (2, S), generator=generator).sort(dim=1).values
    return {"documents": ids, "key_padding": torch.rand(2, S, generator=generator) > 0.3}


def covered(rows: Iterable[Row]) -> None:
    problems = []
    for row in rows:
        S, cp_size = row["size"]
        options = {name: row[name] for name in ("causal", "window", "prefix")}
        options |= {"length": max(0, S - 3) if row["has_length"] else None}
        options |= {name: tensors_of(S)[name] for name in row["tensors"]}
        found = coverage(LAYOUTS[row["layout"]](S), Mask(**options), dense_mask(S, **options), cp_size)
        problems += [f"S={S}, cp={cp_size}, {row['layout']}, {options}: {problem}" for problem in found]
    report([problems])


def test_every_pair_once(full):
    """Where every three of the conditions have all of their values together; in the quick form, every two."""
    covered(covering_array(CONDITIONS, 3 if full else 2, is_causal_if_prefixed))


@pytest.mark.nightly("geometry")
@pytest.mark.parametrize("layout", CONDITIONS["layout"])
def test_every_pair_once_under_all_conditions(layout):
    """Every combination of distance conditions, alone and with tensors that take turns."""
    names = ("size", "causal", "window", "prefix", "has_length")
    tensors, num_cases = cycle(CONDITIONS["tensors"][1:]), 0
    for values in product(*(CONDITIONS[name] for name in names)):
        row = {"layout": layout, **dict(zip(names, values, strict=True))}
        if is_causal_if_prefixed(row):
            covered([row | {"tensors": ()}, row | {"tensors": next(tensors)}])
            num_cases += 2
    assert num_cases > 3000


@pytest.mark.more("geometry")
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.quick("joint", "zigzag", "striped")
def test_every_pair_once_in_longer_sequences(layout, full):
    problems, sizes = [], ((31, 4), (40, 5), (97, 8), (97, 3), (64, 8))
    for name, (S, cp_size) in product(MASKS, sizes if full else sizes[:2]):
        found = coverage(LAYOUTS[layout](S), make_mask(name, 2, S), pairs(name, 2, S), cp_size)
        problems += [f"S={S}, cp={cp_size}, {name}: {problem}" for problem in found]
    report([problems])


def schedules(layout, mask, S: int, cp_size: int) -> list[Schedule]:
    return [make_schedule(layout, mask, S, cp_size, rank) for rank in range(cp_size)]


def kind_of(tile: Tile) -> str:
    if not isinstance(tile.cover, Band):
        return "pairs"
    at = Distances.of(tile.cover, tile.q[1] - tile.q[0], tile.k[1] - tile.k[0])
    return "window" if at.hi is not None else "full" if at.lo is None else "causal"


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", MASKS)
@pytest.mark.quick("-zigzag", "-striped", "-joint")
def test_what_all_ranks_must_know_alike(layout, name):
    """Steps and kinds of tiles are those of all ranks together, on every rank."""
    for S, cp_size in ((13, 3), (31, 4), (2, 4)):
        ranks = schedules(LAYOUTS[layout](S), make_mask(name, 2, S), S, cp_size)
        steps = {step for x in ranks for step in range(1, cp_size) if x.fetch[(x.cp_rank - step) % cp_size]}
        kinds = {
            kind_of(tile)
            for schedule in ranks
            for blocks in (schedule.blocks[0][row : row + 1] for row in range(len(schedule.blocks[0])))
            for tile in tiles_of([blocks], by_documents=False)
        }
        for schedule in ranks:
            assert schedule.cp_size == cp_size and sum(schedule.shard_lens) == S
            assert set(active_steps(schedule)) == steps and sorted(active_steps(schedule)) == list(
                active_steps(schedule)
            )
            assert schedule.covers == kinds


@pytest.mark.parametrize("cp_size", (2, 3, 4, 8))
def test_causal_work_is_balanced(cp_size):
    S, whole = 48 * cp_size, 48 * cp_size * (48 * cp_size + 1) // 2
    zigzag = [num_pairs(schedule) for schedule in schedules(ZigZag(), Mask(), S, cp_size)]
    assert zigzag == [whole // cp_size] * cp_size
    striped = [num_pairs(schedule) for schedule in schedules(Striped(), Mask(), S, cp_size)]
    assert sum(striped) == whole and max(striped) - min(striped) == (cp_size - 1) * (S // cp_size)  # less than one row
    contiguous = [num_pairs(schedule) for schedule in schedules(Contiguous(), Mask(), S, cp_size)]
    assert sum(contiguous) == whole and contiguous == sorted(contiguous)


def test_a_full_mask_takes_a_call_for_each_source():
    for layout in (Contiguous(), ZigZag(), Striped()):
        for schedule in schedules(layout, Mask(causal=False), 24, 4):
            assert [len(tiles) for tiles in tiles_by_source(schedule)] == [1, 1, 1, 1]
            assert schedule.covers == {"full"} and num_pairs(schedule) == 24 * 6


def test_a_causal_mask_takes_a_call_for_each_source():
    """One kernel call a source, none that is empty: full or causal, as ring attention is meant to be."""
    for layout in (ZigZag(), Striped()):
        for schedule in schedules(layout, Mask(), 48, 4):
            assert [len(tiles) for tiles in tiles_by_source(schedule)] == [1, 1, 1, 1]
    for rank, schedule in enumerate(schedules(Contiguous(), Mask(), 48, 4)):
        assert [len(tiles) for tiles in tiles_by_source(schedule)] == [int(source <= rank) for source in range(4)]


def fetched(schedule: Schedule) -> tuple[int, ...]:
    """Rows that this rank receives in each step, [cp_size]."""
    size = schedule.cp_size
    return tuple(num_rows(schedule.fetch[(schedule.cp_rank - step) % size]) for step in range(size))


@pytest.mark.parametrize("left", (1, 3, 6))
def test_a_window_ring_fetches_the_halo_alone(left):
    S, cp_size = 24, 4
    for rank, schedule in enumerate(schedules(Contiguous(), Mask(window=(left, None)), S, cp_size)):
        want = [()] * cp_size
        if rank:
            want[rank - 1] = ((6 - left, 6),)
        assert list(schedule.fetch) == want and active_steps(schedule) == (1,)
        assert fetched(schedule) == (0, left * (rank > 0), 0, 0)


def test_a_window_longer_than_a_shard_reaches_further():
    ranks = schedules(Contiguous(), Mask(window=(8, None)), 24, 4)
    assert ranks[3].fetch == ((), ((4, 6),), ((0, 6),), ()) and active_steps(ranks[3]) == (1, 2)


def test_a_two_sided_window_fetches_both_halos():
    ranks = schedules(Contiguous(), Mask(causal=False, window=(2, 1)), 24, 4)
    assert ranks[1].fetch == (((4, 6),), (), ((0, 1),), ()) and active_steps(ranks[1]) == (1, 3)


def test_a_window_of_one_token_needs_no_ring():
    for layout in (Contiguous(), ZigZag(), Striped()):
        for schedule in schedules(layout, Mask(window=(0, 0)), 24, 4):
            assert active_steps(schedule) == () and num_pairs(schedule) == 6


def test_causal_traffic():
    """In rows a step: contiguous serves later ranks only, zigzag half of a shard or all of it, striped nearly all."""
    S, cp_size = 24, 3
    traffic = {
        type(layout): [fetched(schedule) for schedule in schedules(layout, Mask(), S, cp_size)]
        for layout in (Contiguous(), ZigZag(), Striped())
    }
    assert traffic[Contiguous] == [(0, 0, 0), (0, 8, 0), (0, 8, 8)]
    assert traffic[ZigZag] == [(0, 8, 8), (0, 4, 8), (0, 4, 4)]
    assert traffic[Striped] == [(0, 7, 7), (0, 8, 7), (0, 8, 8)]


def test_sorted_documents_skip_sources():
    documents = torch.arange(24) // 6
    for rank, schedule in enumerate(schedules(Contiguous(), Mask(documents=documents), 24, 4)):
        assert active_steps(schedule) == () and [bool(tiles) for tiles in tiles_by_source(schedule)] == [
            r == rank for r in range(4)
        ]
    ring = schedules(Contiguous(), Mask(causal=False, documents=(torch.arange(24) + 3) // 6), 24, 4)
    assert active_steps(ring[1]) == (1, 3)


def test_schedules_with_tensors_are_not_mistaken_for_one_another():
    first, second = torch.tensor([0, 0, 1, 1]), torch.tensor([0, 0, 0, 0])
    assert active_steps(make_schedule(Contiguous(), Mask(documents=first), 4, 2, 1)) == ()
    assert active_steps(make_schedule(Contiguous(), Mask(documents=second), 4, 2, 1)) == (1,)
    forward = make_schedule(Permuted(range(4)), Mask(), 4, 2, 0)
    backward = make_schedule(Permuted(range(3, -1, -1)), Mask(), 4, 2, 0)
    assert (num_rows(forward.fetch[1]), num_rows(backward.fetch[1])) == (0, 2)


def test_a_strict_diagonal_is_trimmed_to_a_causal_one():
    assert band_tile(Distances(1, None), 4, 4) == Tile((1, 4), (0, 3), Distances(0, None).band(3, 3))
    assert band_tile(Distances(None, None), 4, 4) == Tile((0, 4), (0, 4), Distances().band(4, 4))
    assert band_tile(Distances(-3, 3), 4, 4) == Tile((0, 4), (0, 4), Distances().band(4, 4))
    assert band_tile(Distances(0, 1), 4, 9) == Tile((0, 4), (0, 4), Distances(0, 1).band(4, 4))


@pytest.mark.parametrize(
    ("at", "shape", "parts"),
    [
        (Distances(), (3, 5), [((0, 3), (0, 5), False)]),
        (Distances(0, None), (4, 4), [((0, 4), (0, 4), True)]),
        (Distances(-2, None), (3, 5), [((0, 3), (0, 2), False), ((0, 3), (2, 5), True)]),
        (Distances(0, None), (5, 3), [((0, 3), (0, 3), True), ((3, 5), (0, 3), False)]),
        (Distances(0, 2), (4, 4), None),
    ],
)
def test_split_causal_by_hand(at, shape, parts):
    assert split_causal(at.band(*shape), *shape) == parts
