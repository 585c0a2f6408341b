"""Groups within the cp group: neighbours in inner groups, and ranks with one place in these in outer groups.

Rank r of a group is ``outer_rank * inner_size + inner_rank``. Groups are made when they are first asked for, and kept
with the group that they are part of.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.distributed_c10d import _resolve_process_group

from cp_mesh.errors import UnsupportedError, refuse


class Parts(NamedTuple):
    """This rank's groups: ``inner`` has the ranks beside it, ``outer`` those with its rank in other inner groups."""

    outer: dist.ProcessGroup
    inner: dist.ProcessGroup


# No value holds its key, so an entry goes with its group.
_PARTS: WeakKeyDictionary[dist.ProcessGroup, dict[int, Parts]] = WeakKeyDictionary()
_AXES: WeakKeyDictionary[dist.ProcessGroup, Parts] = WeakKeyDictionary()


def parts_of(group: dist.ProcessGroup, inner_size: int) -> Parts:
    """The outer and inner group of this rank; the first question about a group and a size is a collective.

    Args:
        group: of which every rank asks, for the same sizes in the same order.
        inner_size: ranks of an inner group, a divisor of the group's size that is neither 1 nor all of it.

    Raises:
        UnsupportedError: on every rank, where PyTorch would give new groups other names on some ranks, and in a CUDA
            graph capture.
    """
    axes = _AXES.get(group)
    if axes is not None and axes.inner.size() == inner_size:
        return axes
    known = _PARTS.setdefault(group, {})
    if inner_size not in known:
        known[inner_size] = _make(group, inner_size)
    return known[inner_size]


def axes_of(group: dist.ProcessGroup) -> Parts | None:
    """The groups of both axes, if this is the `group_of_mesh` of a mesh."""
    return _AXES.get(group)


def made_of(group: dist.ProcessGroup) -> Iterator[dist.ProcessGroup]:
    """The groups that `parts_of` made of this one, in the order in which it was asked for them."""
    for parts in _PARTS.get(group, {}).values():
        yield from parts


def flat(mesh: DeviceMesh) -> DeviceMesh:
    """The mesh itself if it is 1-D; a 2-D mesh flattened, whose own groups are then `axes_of` the flat one's.

    A 2-D mesh has its outer axis first and its inner one last. The first question about it makes a group, by
    `DeviceMesh._flatten`: on all ranks of the root mesh.

    Raises:
        ArgumentError: if its ranks do not rise along the inner axis and then along the outer one.
    """
    if mesh.ndim == 1:
        return mesh
    _keep_axes(mesh)
    return mesh._flatten()


@torch.compiler.assume_constant_result  # Dynamo would trace it, and cannot
def _keep_axes(mesh: DeviceMesh) -> bool:
    made = mesh._flatten()
    group = made.get_group()
    if group in _AXES:
        return True
    if (ranks := made.mesh.tolist()) != dist.get_process_group_ranks(group):
        names = ", ".join(mesh.mesh_dim_names or ())
        hint = "name the outer axis first and the inner one last, in the order of the whole mesh"
        refuse(f"mesh[{names}]", "ranks that rise along its axes", ranks, hint)
    _AXES[group] = Parts(mesh.get_group(0), mesh.get_group(1))
    return True


@torch.compiler.assume_constant_result
def axes_names(group_name: str) -> tuple[str, ...]:
    """Names of the group's `axes_of`, none if it has none."""
    return tuple(group.group_name for group in axes_of(_resolve_process_group(group_name)) or ())  # type: ignore[arg-type]


def _make(group: dist.ProcessGroup, inner_size: int) -> Parts:
    if torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing():
        hint = "run one forward and backward before the capture"
        refuse("CUDA graph capture", "groups that are there", "a first call, which makes them", hint, UnsupportedError)
    size = group.size()
    inner = [[*range(begin, begin + inner_size)] for begin in range(0, size, inner_size)]
    outer = [[*range(begin, size, inner_size)] for begin in range(inner_size)]
    # A new group's name counts the groups that a rank is in, and ranks with other names would never meet.
    counts: list[int] = [0] * size
    dist.all_gather_object(counts, len(dist.distributed_c10d._world.pg_names), group)
    if len(set(counts)) > 1:
        hint = 'pass a mesh of two axes, mesh=mesh["cp_ring", "cp_ulysses"], whose groups are used'
        got = f"ranks that are in {counts} groups"
        refuse("groups within the cp group", "ranks that are in equally many groups", got, hint, UnsupportedError)
    return Parts(_split(group, outer), _split(group, inner))


def _split(group: dist.ProcessGroup, parts: list[list[int]]) -> dist.ProcessGroup:
    """The new group of this rank, of several that have all ranks of a group between them."""
    if dist.distributed_c10d._get_default_group().bound_device_id is not None:
        # NCCL then splits communicators, which all ranks of the one that is split must do together.
        made = dist.split_group(group, parts)
        assert made is not None, "every rank is in a part"
        return made
    ranks = dist.get_process_group_ranks(group)
    (own,) = ([ranks[i] for i in part] for part in parts if group.rank() in part)
    options = getattr(group._get_backend(group._device_types[0]), "options", None)
    timeout, backend = getattr(options, "_timeout", None), dist.get_backend(group)
    return dist.new_group(own, timeout, backend, use_local_synchronization=True)
