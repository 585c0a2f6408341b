"""The tensors of a call: their shapes, dtypes and devices, and DTensors, of which each rank computes its part.

The first tensor of a call leads: a mesh axis shards its rows, its heads (or channels), its batch, or nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from torch import Tensor
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from cp_mesh.call.dtensor import check_chunks, check_placements, cp_axes_of, local_part, num_shards, wrap
from cp_mesh.call.formats import FORMATS
from cp_mesh.call.spec import check_dense
from cp_mesh.errors import UnsupportedError, refuse, written
from cp_mesh.sequence.sharded_sequence import ShardedSequence

Tensors = Mapping[str, Tensor | None]
_OF_HEADS = {"A": 0, "D": 0, "weight": 0, "bias": 0, "initial_state": 1}
"""Tensors without rows, and their dim of heads or channels."""

_OPTIONAL = ("D", "bias", "initial_state")


def check(what: str, tensors: Tensors, shapes: Mapping[str, str], alike: Sequence[str]) -> dict[str, int]:
    """Refuse tensors of other shapes, devices and dtypes.

    Args:
        what: the call, for messages.
        tensors: by name; None is left out.
        shapes: the dims of each by name; equal names are equal sizes.
        alike: those that have the first one's dtype.

    Returns:
        The sizes by name.
    """
    sizes: dict[str, int] = {}
    first = next(iter(tensors))
    for name, x in tensors.items():
        if x is None and name in _OPTIONAL:
            continue
        check_dense(**{f"{what}: {name}": x})
        assert x is not None
        dims, lead = shapes[name].split(), tensors[first]
        if x.ndim != len(dims) or any(sizes.get(dim, n) != n for dim, n in zip(dims, x.shape, strict=True)):
            known = [sizes.get(dim, dim) for dim in dims]
            expected = f"[{', '.join(dims)}] = [{', '.join(map(str, known))}]"
            refuse(f"{what}: {name}", expected, [*x.shape], "tokens are dim 1 and heads dim 2, as in FLA")
        sizes |= dict(zip(dims, x.shape, strict=True))
        assert lead is not None
        if x.device != lead.device:
            refuse(f"{what}: {name}", f"a tensor on {lead.device}, as {first}", x.device, "move it there")
        if not x.is_floating_point() or (name in alike and x.dtype != lead.dtype):
            expected = str(lead.dtype) if name in alike and lead.is_floating_point() else "floating-point numbers"
            refuse(f"{what}: {name}", expected, x.dtype, "cast it")
    return sizes


class Wrap(NamedTuple):
    """Makes DTensors of the results of one call, as its first tensor ``lead`` is; None: all are local."""

    lead: DTensor | None

    def rows(self, x: Tensor) -> Tensor:
        """Of [B, rows, heads, ...]."""
        return x if self.lead is None else _wrapped(x, self.lead, {0: 0, 1: 1, 2: 2}, self.lead.shape[:2])

    def states(self, x: Tensor | None) -> Tensor | None:
        """Of [N, heads, ...]."""
        return x if x is None or self.lead is None else _wrapped(x, self.lead, {2: 1}, x.shape[:1])


def _wrapped(x: Tensor, lead: DTensor, dims: Mapping[int, int], begins: Sequence[int]) -> DTensor:
    mesh, placements = lead.device_mesh, lead.placements
    shape, at = [*begins, *x.shape[len(begins) :]], dims[2]
    shape[at] *= num_shards(mesh, placements, 2)
    placed = [Shard(dims[p.dim]) if isinstance(p, Shard) else p for p in placements]
    return wrap(x, mesh, placed, shape)


def to_local(
    what: str, tensors: Tensors, sequence: ShardedSequence | None, states: bool
) -> tuple[dict[str, Tensor | None], Wrap]:
    """This rank's part of each tensor, and what makes DTensors of results if these are.

    Args:
        what: the call, for messages.
        tensors: the first is [B, T, heads, ...].
        sequence: over whose mesh rows may be sharded.
        states: whether the call takes or returns states.

    Raises:
        ArgumentError, UnsupportedError: on placements that do not fit those of the first tensor.
    """
    given = {name: x for name, x in tensors.items() if x is not None}
    if not any(isinstance(x, DTensor) for x in given.values()):
        return dict(tensors), Wrap(None)
    name, lead = next(iter(given.items()))
    if others := [name for name, x in given.items() if not isinstance(x, DTensor)]:
        refuse(what, "all DTensors or all local tensors", f"local {', '.join(others)}", "wrap these, or to_local() all")
    assert isinstance(lead, DTensor)
    if lead.ndim < 3:
        hint = "pass to_local(), and wrap what is returned"
        refuse(f"{what}: {name}", "a DTensor [B, T, heads, ...]", [*lead.shape], hint, UnsupportedError)
    mesh, form = lead.device_mesh, FORMATS[1]
    axes = [] if sequence is None else cp_axes_of(lead, sequence.mesh, 1)
    check_placements(lead, lead, lead, axes, form)
    if axes and sequence is not None:
        check_chunks(lead.shape[1], [mesh.size(axis) for axis in axes], sequence.layout)
    if states and any(isinstance(p, Shard) and p.dim != 2 for p in lead.placements):
        hint = "pass DTensors over the axes of heads alone, or to_local() of all"
        refuse(f"{what}: states", "tensors sharded by heads", written(lead.placements), hint, UnsupportedError)
    found = {name: _local(what, name, x, lead) for name, x in given.items() if isinstance(x, DTensor)}
    return {name: found.get(name) for name in tensors}, Wrap(lead)


def _local(what: str, name: str, x: DTensor, lead: DTensor) -> Tensor:
    mesh = lead.device_mesh
    dims = {"heads": _OF_HEADS[name]} if name in _OF_HEADS else FORMATS[1].dims
    parts = [FORMATS[1].part(placement) for placement in lead.placements]
    wanted = [Shard(dims[part]) if part in dims else Replicate() for part in parts]
    grads: list[Placement] = [*x.placements]
    for axis, part in enumerate(parts if x.device_mesh == mesh else ()):
        if mesh.size(axis) > 1 and part not in ("whole", *dims):
            grads[axis] = Partial()
    apart = [i for i, (has, needs) in enumerate(zip(x.placements, wanted, strict=False)) if has != needs]
    if x.device_mesh != mesh or any(mesh.size(axis) > 1 for axis in apart):
        expected = f"{written(tuple(wanted))} on {written(mesh)}"
        refuse(f"{what}: {name}", expected, f"{written(x.placements)} on {written(x.device_mesh)}", "redistribute it")
    dim = dims["heads"]
    if dim < x.ndim and x.shape[dim] % (num := num_shards(mesh, wanted, dim)):
        refuse(f"{what}: {name}", f"a multiple of {num} in dim {dim}", x.shape[dim], "use fewer ranks of tp")
    return local_part(x, grads)
