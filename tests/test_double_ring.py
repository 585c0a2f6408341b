"""The double ring: rows cross between hosts once, and all else is the ring's.

That its results are exact is shown where those of all methods are, as ranks.py says that hosts have two ranks.
"""

from __future__ import annotations

from itertools import product

import pytest
from cases import LAYOUTS, MASKS, make_mask
from checks import report

from cp_mesh.relays import make_relayed_schedule
from cp_mesh.schedule import Schedule, Stage

Rows = list[tuple[int, int]]  # owner, local row


def carry(buffers: list[Rows], stages: list[Stage]) -> list[Rows]:
    """What each rank of a group receives of the others' buffers; whoever serves must name the same rows."""
    for me, other in product(range(len(buffers)), repeat=2):
        assert dict(stages[me].fetch).get(other) == dict(stages[other].serve).get(me)
    return [
        [row for other, ranges in stage.fetch for begin, end in ranges for row in buffers[other][begin:end]]
        for stage in stages
    ]


def brought(schedules: list[Schedule], host_size: int) -> list[list[Rows]]:
    """The rows of each stage, [stage][rank], as they come by visits."""
    size, arrived = len(schedules), []
    shards = [[(rank, row) for row in range(n)] for rank, n in enumerate(schedules[0].shard_lens)]
    hosts = [[*range(first, first + host_size)] for first in range(0, size, host_size)]
    for visits in zip(*(schedule.route.visits for schedule in schedules), strict=True):
        buffers = shards
        if visits[0].crossing is not None:
            columns = [[*range(place, size, host_size)] for place in range(host_size)]
            crossed = {
                rank: rows
                for ranks in columns
                for rank, rows in zip(
                    ranks, carry([shards[r] for r in ranks], [visits[r].crossing for r in ranks]), strict=True
                )
            }
            buffers = [crossed[rank] for rank in range(size)]
            for rank, visit in enumerate(visits):
                assert len(buffers[rank]) == visit.num_rows == len(set(buffers[rank]))
        if visits[0].own is not None:
            stages = [visit.own for visit in visits]
            assert all(place == rank % host_size for rank, stage in enumerate(stages) for place, _ in stage.fetch)
            arrived.append(
                [x for ranks in hosts for x in carry([buffers[r] for r in ranks], [stages[r] for r in ranks])]
            )
        for stages in zip(*(visit.route.stages for visit in visits), strict=True):
            arrived.append(
                [x for ranks in hosts for x in carry([buffers[r] for r in ranks], [stages[r] for r in ranks])]
            )
    return arrived


@pytest.mark.parametrize(("cp_size", "host_size"), [(4, 2), (6, 2), (6, 3), (8, 4)])
def test_every_stage_gets_the_rows_of_its_tiles(full, cp_size, host_size):
    """The tiles are tested with the ring's: here rows come in the order in which a stage's buffer has them."""
    problems = []
    for layout, mask, S in product(LAYOUTS, MASKS, (31, 97) if full else (31,)):
        made = LAYOUTS[layout](S), make_mask(mask, 2, S), S, cp_size
        schedules = [make_relayed_schedule(*made, rank, True, host_size) for rank in range(cp_size)]
        wanted = [
            [
                [(s, row) for s, ranges in stage.fetch for begin, end in ranges for row in range(begin, end)]
                for stage in stages
            ]
            for stages in zip(*(schedule.route.stages for schedule in schedules), strict=True)
        ]
        if brought(schedules, host_size) != wanted:
            problems.append(f"{layout}, {mask}, S={S}")
    report([problems])
