"""Groups within a group: who is in them, that they are made once, and that no rank waits for one that never comes."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
import torch.distributed as dist
from inside import room, states_of_all
from ranks import mesh, on_ranks

from cp_mesh import UnsupportedError

groups = room("groups")

RANKS = dist.get_process_group_ranks


@pytest.mark.parametrize(("size", "inner_size"), [(4, 2), (6, 2), (6, 3)])
@on_ranks("size")
def test_ranks_of_the_groups(rank: int, size, inner_size) -> None:
    """Ranks of the outer and inner group, and sums of all ranks over them."""
    parts = groups.parts_of(mesh((dist.get_world_size(),), ("cp",)).get_group(), inner_size)
    first = rank // inner_size * inner_size
    assert RANKS(parts.outer) == [*range(rank % inner_size, size, inner_size)]
    assert RANKS(parts.inner) == [*range(first, first + inner_size)]
    for group in parts:
        value = torch.tensor(2.0**rank)
        dist.all_reduce(value, group=group)
        assert value == sum(2.0**r for r in RANKS(group))


@on_ranks(8)
def test_other_ranks_need_not_come(rank: int) -> None:
    """Only one of two cp groups asks; the other has nothing to do with it."""
    group = mesh((2, 4), ("dp", "cp"))["cp"].get_group()
    if rank >= 4:
        parts = groups.parts_of(group, 2)
        value = torch.tensor(1.0)
        dist.all_reduce(value, group=parts.inner)
        assert value == 2
        assert RANKS(parts.outer) == [4 + rank % 2, 6 + rank % 2]
        assert RANKS(parts.inner) == [rank // 2 * 2, rank // 2 * 2 + 1]


@on_ranks(4)
def test_groups_are_made_once_and_go_with_theirs() -> None:
    """Made once; kept as long as the group is."""
    group = dist.new_group(range(4))
    ours = groups.parts_of(group, 2)
    again = groups.parts_of(group, 2) is ours and groups.known_parts(group) == [ours]
    gone = weakref.ref(group)
    timeouts = [x._get_backend(torch.device("cpu")).options._timeout for x in (group, *ours)]
    dist.destroy_process_group(group)
    del group
    gc.collect()
    assert again and len(set(timeouts)) == 1 and gone() is None
    assert not any(
        parts.inner is ours.inner for known in states_of_all(groups._PartsBySize) for parts in known.values()
    )


def uneven(rank: int) -> None:
    dist.new_group([0, 1])  # the others are in one group less
    with pytest.raises(UnsupportedError, match=r"equally many groups.*a mesh of two axes"):
        groups.parts_of(mesh((4,), ("cp",)).get_group(), 2)


def test_names_that_would_differ_are_refused(pool):
    pool(4).run(uneven)
    pool(4).close()  # ranks are in unequal numbers of groups now


@on_ranks(8)
def test_a_mesh_of_two_axes_has_its_groups(rank: int) -> None:
    grid = mesh((2, 2, 2), ("dp", "cp_ring", "cp_ulysses"))
    group = groups.flat(grid["cp_ring", "cp_ulysses"]).get_group()
    parts = groups.parts_of(group, 2)
    assert parts.outer is grid.get_group("cp_ring") and parts.inner is grid.get_group("cp_ulysses")
    assert groups.flat(grid["cp_ring", "cp_ulysses"]).get_group() is group
    assert RANKS(group) == [*range(rank // 4 * 4, rank // 4 * 4 + 4)]
