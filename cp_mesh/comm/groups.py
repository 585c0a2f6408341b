"""Groups within the cp group: inner groups of consecutive ranks, and outer groups of ranks with one place in these.

Rank r of a group is ``outer_rank * inner_size + inner_rank``. Groups are made at their first use, and kept with the
group that they are part of.
"""

from __future__ import annotations

import math
import threading
import weakref
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from cp_mesh._torch import constant_in_traces, flatten_mesh, resolve_group, timeout_of, uncounted, world
from cp_mesh.comm.group_state import state_of
from cp_mesh.errors import UnsupportedError, refuse


def as_mesh(mesh: Any) -> Any:
    """Return a mesh with an axis "cp" for a ProcessGroup; return anything else unchanged."""
    if not isinstance(mesh, dist.ProcessGroup):
        return mesh
    device_type = "cuda" if "nccl" in dist.get_backend(mesh) else "cpu"
    return DeviceMesh.from_group(mesh, device_type, mesh_dim_names=("cp",))


class Parts(NamedTuple):
    """This rank's groups: ``inner`` has its neighbours, ``outer`` the ranks with its place in other inner groups."""

    outer: dist.ProcessGroup
    inner: dist.ProcessGroup


class _PartsBySize(dict[int, Parts]):
    """Parts of a group, by the size of inner groups."""


class _Axes(list[tuple[str, str]]):
    """Names of the groups of both axes, for meshes that were flattened to one group."""


_MAKING = threading.Lock()


def parts_of(group: dist.ProcessGroup, inner_size: int) -> Parts:
    """Return the outer and inner group of this rank; the first call for a group and a size is a collective.

    Args:
        group: all of its ranks must call this, for the same sizes in the same order.
        inner_size: ranks of an inner group, a divisor of the group's size that is neither 1 nor all of it.

    Raises:
        UnsupportedError: on every rank, where PyTorch would give new groups other names on some ranks, and in a CUDA
            graph capture.
    """
    known = state_of(group, _PartsBySize)
    if inner_size not in known:
        known[inner_size] = _make(group, inner_size)
    return known[inner_size]


def known_parts(group: dist.ProcessGroup) -> list[Parts]:
    """Return all parts that `parts_of` has made."""
    return [*state_of(group, _PartsBySize).values()]


@constant_in_traces  # Dynamo cannot trace the look-up
def names_of_axes(group_name: str) -> list[tuple[str, str]]:
    """Return the names of the groups of both axes, for each mesh that `flat` flattened to the group of this name."""
    return [*state_of(resolve_group(group_name), _Axes)]


def is_cp_axis(mesh: DeviceMesh) -> bool:
    """Return whether a mesh has one axis, or two that form the cp axis together: their names begin with "cp".

    Names must decide: a whole mesh of dp and cp has two axes too.
    """
    return mesh.ndim == 1 or (mesh.ndim == 2 and all(name[:2] == "cp" for name in mesh.mesh_dim_names or ("", "")))


def flat(mesh: DeviceMesh) -> DeviceMesh:
    """Return a 1-D mesh for one that `is_cp_axis`: itself, or flattened; its own groups are then parts of the new one.

    A 2-D mesh has its outer axis first and its inner axis last. The first call makes a group by
    `DeviceMesh._flatten`, on all ranks of the root mesh.

    Raises:
        ArgumentError: if its ranks do not rise along the inner axis and then along the outer one.
    """
    if mesh.ndim == 1:
        return mesh
    _keep_axes(mesh)
    return flatten_mesh(mesh)


@constant_in_traces  # Dynamo cannot trace it
def _keep_axes(mesh: DeviceMesh) -> bool:
    made, parts = flatten_mesh(mesh), Parts(mesh.get_group(0), mesh.get_group(1))
    group, names = made.get_group(), (parts.outer.group_name, parts.inner.group_name)
    if names in (axes := state_of(group, _Axes)):
        return True
    if (ranks := made.mesh.tolist()) != dist.get_process_group_ranks(group):
        got, hint = f"{ranks} in {mesh.mesh_dim_names}", "name the outer axis first, in the order of the whole mesh"
        refuse("mesh", "ranks that rise along its axes", got, hint)
    axes.append(names)
    if 1 < mesh.size(1) < len(ranks):
        state_of(group, _PartsBySize)[mesh.size(1)] = parts
    return True


def _make(group: dist.ProcessGroup, inner_size: int) -> Parts:
    if torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing():
        hint = "run one forward and backward before the capture"
        refuse("CUDA graph capture", "existing groups", "a first call, which makes them", hint, UnsupportedError)
    if not _MAKING.acquire(blocking=False):
        hint = "call attention once over each group, one after the other, before threads call it"
        got = "two, which would mix up group names"
        refuse("groups within the cp group", "one thread at a time", got, hint, UnsupportedError)
    try:
        size = group.size()
        inner = [[*range(begin, begin + inner_size)] for begin in range(0, size, inner_size)]
        outer = [[*range(begin, size, inner_size)] for begin in range(inner_size)]
        # PyTorch names a new group by the number of groups that a rank has; ranks with different names never connect.
        counts: list[int] = [0] * size
        dist.all_gather_object(counts, len(world().pg_names), group)
        if len(set(counts)) > 1:
            hint = 'pass a mesh of two axes, mesh=mesh["cp_ring", "cp_ulysses"], whose groups are used'
            got, expected = f"ranks that are in {counts} groups", "ranks that are in equally many groups"
            refuse("groups within the cp group", expected, got, hint, UnsupportedError)
        return Parts(_split(group, outer), _split(group, inner))
    finally:
        _MAKING.release()


def _split(group: dist.ProcessGroup, parts: list[list[int]]) -> dist.ProcessGroup:
    """Make the new group of this rank; ``parts`` contain all ranks of a group."""
    if dist.group.WORLD.bound_device_id is not None:  # type: ignore[union-attr]
        # NCCL then splits communicators, which all ranks of the parent must do together.
        with uncounted():
            made = dist.split_group(group, parts)
        assert made is not None, "every rank is in a part"
        return made
    ranks = dist.get_process_group_ranks(group)
    (own,) = ([ranks[i] for i in part] for part in parts if group.rank() in part)
    with uncounted():
        return dist.new_group(own, timeout_of(group), dist.get_backend(group), use_local_synchronization=True)


def groups_of(mesh: DeviceMesh | dist.ProcessGroup) -> list[dist.ProcessGroup]:
    """Return the process groups of a mesh's axes: a sum over one after the other is the sum over all ranks."""
    if isinstance(mesh, dist.ProcessGroup):
        return [mesh]
    if not isinstance(mesh, DeviceMesh):
        refuse("mesh", "a DeviceMesh or a ProcessGroup", mesh, 'pass mesh["dp", "cp"]._flatten("dp_cp")')
    return [mesh.get_group(axis) for axis in range(mesh.ndim)]


def ranks_of(mesh: DeviceMesh | dist.ProcessGroup) -> list[int]:
    """Return all ranks of a mesh, sorted."""
    if isinstance(mesh, dist.ProcessGroup):
        return sorted(dist.get_process_group_ranks(mesh))
    return sorted(mesh.mesh.flatten().tolist())


class _Linked(weakref.WeakKeyDictionary[dist.ProcessGroup, str]):
    """For one group, the groups beside it and the axis of each, "cp" or "tp", for all models together."""


def link_groups(groups: Mapping[dist.ProcessGroup, str]) -> None:
    """Connect these groups, and those known beside them: ranks of all get an error that is raised over one of them.

    Args:
        groups: the groups of a model's styles, and the axis of each, "cp" or "tp".
    """
    together = dict(groups)
    for group in groups:
        together |= state_of(group, _Linked)
    for group in together:
        state_of(group, _Linked).update({other: axis for other, axis in together.items() if other is not group})


def linked_groups(group: dist.ProcessGroup) -> dict[dist.ProcessGroup, str]:
    """Return the other groups of models over this one."""
    return dict(state_of(group, _Linked))


def ranks_of_tp(group: dist.ProcessGroup) -> int:
    """Return the number of ranks that share the heads, from the tp groups beside this one; 1 without styles over tp."""
    return math.prod(other.size() for other, axis in linked_groups(group).items() if axis == "tp")
