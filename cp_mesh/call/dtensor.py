"""DTensors of a call: find the cp axis, give the placements of each tensor, and check them.

The placements of q determine those of every tensor of an op: a mesh axis shards the sequence, heads or batch, or
nothing. `Format.rows` and `score_placements` give them for one axis. The sharding rules of the ops, the checks of
`attention` and the code that wraps plain tensors use these two.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from cp_mesh._torch import local_tensor
from cp_mesh.call.formats import FORMATS, Format
from cp_mesh.call.spec import GRADED, check_dense, check_tensors
from cp_mesh.comm.group_state import state_of
from cp_mesh.comm.groups import flat, is_cp_axis, names_of_axes
from cp_mesh.errors import UnsupportedError, as_int, refuse, written
from cp_mesh.geometry.layouts import Layout, chunk_bounds
from cp_mesh.geometry.mask import TENSORS
from cp_mesh.kernels.combine import dense_strides
from cp_mesh.kernels.scores import TERMS

ONE_AXIS = "the 1-D DeviceMesh of the cp axis"
TWO_AXES = 'a 2-D one of two whose names begin with "cp", mesh["cp_ring", "cp_ulysses"]'
_WHOLE = (*TENSORS, "layout_index")  # tensors that hold the whole sequence, on the host or the device
MOST_KINDS = 256
UNSHARDED = "an unsharded sequence needs no context parallelism: shard it, or call SDPA"


class CPAxis(NamedTuple):
    """The cp axis of one call. ``mesh_dims``: its index in the DTensors' mesh, or the two indices of an outer and an
    inner axis that together are the cp axis; empty for local tensors."""

    group: dist.ProcessGroup
    size: int
    seq_dim: int
    mesh_dims: tuple[int, ...]


def find_cp_axis(
    qkv: tuple[Tensor, Tensor, Tensor], mesh: DeviceMesh | dist.ProcessGroup | None, seq_dim: int | None
) -> CPAxis:
    """The cp axis and the sequence dim, from the placements of DTensors or from the arguments."""
    check_dense(query=qkv[0], key=qkv[1], value=qkv[2])
    for name, x in zip(("query", "key", "value"), qkv, strict=True):
        if x.is_meta:
            hint = "give its module memory, to_empty(device=...), or run it under FakeTensorMode for shapes alone"
            refuse(name, "a tensor with content", "one on meta", hint)
    if not (mesh is None or isinstance(mesh, DeviceMesh) or isinstance(mesh, dist.ProcessGroup)):  # noqa: SIM101 - for Dynamo
        refuse("mesh", f"{ONE_AXIS}, or its ProcessGroup", type(mesh).__name__, 'pass mesh["cp"]')
    if isinstance(mesh, DeviceMesh) and mesh.ndim != 1 and not is_cp_axis(mesh):
        got = f"{mesh.ndim} axes, {mesh.mesh_dim_names}"
        refuse("mesh", f"{ONE_AXIS}, or {TWO_AXES}", got, 'pass one axis, mesh["cp"]', UnsupportedError)
    if seq_dim is not None and type(seq_dim) is not int:
        seq_dim = as_int(seq_dim)
    if seq_dim is not None and (type(seq_dim) is not int or seq_dim not in FORMATS):
        known = "2 [B, H, S, D], 1 [B, S, H, D] or 0 [T, H, D]"
        refuse("seq_dim", known, seq_dim, "seq_dim=2 is SDPA's format")
    query, key, value = qkv
    num = isinstance(query, DTensor) + isinstance(key, DTensor) + isinstance(value, DTensor)
    if num not in (0, 3):
        hint = "wrap the others with DTensor.from_local, or unwrap with to_local()"
        refuse("q, k, v", "all DTensors or all local tensors", ", ".join(type(x).__name__ for x in qkv), hint)
    if not isinstance(query, DTensor):
        if mesh is None:
            hint = 'local tensors have no mesh: after init_process_group, pass mesh=mesh["cp"]'
            refuse("mesh", ONE_AXIS, None, hint)
        if isinstance(mesh, DeviceMesh) and mesh.get_coordinate() is None:
            refuse("mesh", "a mesh that holds this rank", mesh, "call attention on the ranks of the mesh only")
        group = _group_of(mesh)
        return CPAxis(group, group.size(), 2 if seq_dim is None else seq_dim, ())

    whole, placements, axes = query.device_mesh, query.placements, cp_axes_of(query, mesh, seq_dim)
    if not axes and mesh is not None:
        refuse("mesh", f"an axis of the DTensors' mesh, {written(whole)}", mesh, "leave mesh out")
    if not axes and seq_dim is None:
        got, hint = f"axes {whole.mesh_dim_names or whole.ndim}", 'pass mesh=mesh["your cp axis"]'
        refuse("cp axis", 'an axis named "cp", or mesh= or seq_dim=', got, hint)
    if not axes:
        refuse("query's placements", f"Shard({seq_dim}) on the cp axis", placements, UNSHARDED)
    if len(axes) > 1 and mesh is None:
        expected, hint = "the sequence sharded on one axis", 'pass both, mesh=mesh["cp_ring", "cp_ulysses"], or flatten'
        refuse("query's placements", expected, placements, hint, UnsupportedError)
    for axis in axes if seq_dim is None else ():
        if (placement := placements[axis]) != Shard(2):
            hint = UNSHARDED
            if placement in (Shard(0), Shard(1)):  # another format, or heads or batch on the wrong axis
                hint = f"pass seq_dim={placement.dim} if it is {FORMATS[placement.dim].name}; "
                hint += "the cp axis shards the sequence, not heads or batch"
            expected = f"Shard(2), the sequence of {FORMATS[2].name}"
            refuse("query's placement on the cp axis", expected, placement, hint)
    group = whole.get_group(axes[0]) if mesh is None or len(axes) == 1 else _group_of(mesh)
    return CPAxis(group, group.size(), 2 if seq_dim is None else seq_dim, tuple(axes))


def _group_of(mesh: DeviceMesh | dist.ProcessGroup) -> dist.ProcessGroup:
    if not isinstance(mesh, DeviceMesh):
        return mesh
    return (mesh if mesh.ndim == 1 else flat(mesh)).get_group()


def cp_axes_of(query: DTensor, mesh: DeviceMesh | dist.ProcessGroup | None, seq_dim: int | None) -> list[int]:
    """The axes of query's mesh that can be the cp axis by these arguments, or the two that together are."""
    whole, names = query.device_mesh, query.device_mesh.mesh_dim_names or ()
    if mesh is not None:
        wanted = _group_of(mesh).group_name
        axes = axes_in(whole, wanted)
        if len(axes) > 1 and isinstance(mesh, DeviceMesh):  # axes of one rank may share one group, but not a name
            axes = [i for i in axes if names and mesh.mesh_dim_names == (names[i],)] or axes
        if axes:
            return axes[:1]
        pairs = [[i for name in pair for i in axes_in(whole, name)[:1]] for pair in names_of_axes(wanted)]
        return next((axes for axes in pairs if len(axes) == 2), [])
    if seq_dim is not None:
        return [i for i, placement in enumerate(query.placements) if placement == Shard(seq_dim)]
    if "cp" in names:
        return [names.index("cp")]
    return [0] if whole.ndim == 1 and not names else []


def axes_in(mesh: DeviceMesh, group_name: str) -> list[int]:
    """The axes of a mesh whose group has this name."""
    return [i for i in range(mesh.ndim) if mesh.get_group(i).group_name == group_name]


def group_that_waits(query: Any, mesh: Any, seq_dim: Any) -> dist.ProcessGroup | None:
    """The cp group whose ranks wait for a call whose arguments were refused, or None if these do not show it."""
    if isinstance(mesh, dist.ProcessGroup) or (isinstance(mesh, DeviceMesh) and is_cp_axis(mesh)):
        return _group_of(mesh)
    if not isinstance(query, DTensor):
        return None
    axes = cp_axes_of(query, None, seq_dim) or cp_axes_of(query, None, 2)
    return query.device_mesh.get_group(axes[0]) if len(axes) == 1 else None


def score_placements(name: str, shape: Sequence[int], part: str) -> tuple[Placement, Placement]:
    """The placements of a tensor of `spec.Tensors` and of its gradient, on a mesh axis that shards ``part`` of q
    ("whole": nothing)."""
    dim = TERMS[name].dim_of("rows" if part == "sequence" else part, shape) if name in TERMS else None
    if dim is not None:
        return Shard(dim), Shard(dim)
    return Replicate(), Replicate() if part == "whole" else Partial()


def _beside(name: str, x: Tensor, query: DTensor, form: Format) -> tuple[list[Placement], list[Placement]]:
    """The placements that a tensor of `spec.Tensors` must have beside query, and those of its gradient."""
    rows = [score_placements(name, x.shape, form.part(placement)) for placement in query.placements]
    return [row[0] for row in rows], [row[1] for row in rows]


def place_beside(tensors: Mapping[str, Tensor | None], query: DTensor, form: Format) -> list[Tensor | None]:
    """The tensors, where plain tensors of the scores, of which each rank holds its part, become DTensors.

    Tensors in `_WHOLE` stay plain: they may be on the host, from which `DTensor.from_local` would move them. DTensor's
    dispatch takes them as replicated (`implicit_replication`).
    """
    mesh, placed = query.device_mesh, dict(tensors)
    for name, x in tensors.items():
        if x is None or isinstance(x, DTensor) or name in _WHOLE:
            continue
        placements, shape = _beside(name, x, query, form)[0], list(x.shape)
        for has, of_query in zip(placements, query.placements, strict=True):
            if isinstance(has, Shard) and isinstance(of_query, Shard):
                shape[has.dim] = query.shape[of_query.dim]
        like = torch.empty(shape, device="meta")
        options: dict[str, Any] = {"run_check": False, "shape": like.shape, "stride": like.stride()}
        placed[name] = DTensor.from_local(x.detach(), mesh, placements, **options)
    return list(placed.values())


def local_scores(scores: Mapping[str, Any], query: DTensor, form: Format) -> dict[str, Any]:
    """The tensors by name, where DTensors become local tensors, whose gradients become DTensors again."""
    return {
        name: local_part(x, _beside(name, x, query, form)[1]) if isinstance(x, DTensor) else x
        for name, x in scores.items()
    }


def local_part(x: DTensor, grad_placements: Sequence[Placement]) -> Tensor:
    """``to_local``, with a gradient whose spec is equal on all ranks, and that can be differentiated again.

    PyTorch computes the spec from each rank's shard, wrongly if shards are unequal. PyTorch 2.11 then gathers the
    gradient of a leaf on those ranks alone whose spec differs from the leaf's, and cuts its graph under create_graph.
    """
    if torch.compiler.is_compiling() or not (x.requires_grad and torch.is_grad_enabled()):
        return x.to_local(grad_placements=grad_placements)
    local: Tensor = _LocalPart.apply(x, grad_placements)
    return local


class _LocalPart(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: DTensor, grad_placements: Sequence[Placement]) -> Tensor:
        ctx.kind = x.device_mesh, grad_placements, x.shape, x.stride()
        local = local_tensor(x)
        return local.view_as(local)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return wrap(grad, *ctx.kind), None


def wrap(
    local: Tensor,
    mesh: DeviceMesh,
    placements: Sequence[Placement],
    shape: Sequence[int],
    like: Sequence[int] | None = None,
) -> DTensor:
    """A DTensor with this global shape, which a rank cannot infer if shards are unequal.

    It is contiguous, or has the memory order of the strides ``like``. The spec is equal on all ranks; a shard may have
    another memory order, and one with few rows may not show any.
    """
    stride = dense_strides(shape, torch.empty(shape, device="meta").stride() if like is None else like)
    order = sorted(range(len(shape)), key=lambda dim: stride[dim], reverse=True)
    local = local.permute(order).contiguous().permute([order.index(dim) for dim in range(len(shape))])
    return DTensor.from_local(local, mesh, placements, run_check=False, shape=torch.Size(shape), stride=stride)


def wrap_results(out: Tensor, lse: Tensor, query: DTensor, form: Format) -> tuple[DTensor, DTensor]:
    """out and lse as DTensors, with the placements of the sharding rule."""
    mesh, placements, lse_shape = query.device_mesh, query.placements, [0] * lse.ndim
    for part, dim in form.lse_dims.items():
        lse_shape[dim] = query.shape[form.dims[part]]
    of_lse = [Shard(form.lse_dims[form.part(p)]) if isinstance(p, Shard) else p for p in placements]
    return wrap(out, mesh, placements, (*query.shape[:-1], out.shape[-1])), wrap(lse, mesh, of_lse, lse_shape)


def first_index(x: Tensor, dim: int | None) -> int:
    """The global index at which this rank's shard begins in an evenly sharded dim; 0 for a local tensor."""
    if dim is None or not isinstance(x, DTensor):
        return 0
    index, parts = 0, 1
    for axis, placement in enumerate(x.placements):
        if placement == Shard(dim):
            index = index * x.device_mesh.size(axis) + x.device_mesh.get_local_rank(axis)
            parts *= x.device_mesh.size(axis)
    return index * (x.shape[dim] // parts)


def check_score_placements(scores: Mapping[str, Any], query: Tensor, form: Format) -> None:
    """Refuse score arguments that are no tensors, or whose device or placements do not match query's."""
    for name, x in scores.items():
        if name in GRADED and x is not None:
            check_dense(**{name: x})
        if not isinstance(x, DTensor):
            if isinstance(query, DTensor) and name not in _WHOLE and isinstance(x, Tensor) and x.device != query.device:
                refuse(name, f"a tensor on {query.device}", x.device, "move it there")  # not moved silently
            continue
        expected = "a local tensor, as query is"
        if isinstance(query, DTensor):
            mesh, wanted = query.device_mesh, _beside(name, x, query, form)[0]
            sizes = [mesh.size(axis) for axis in range(mesh.ndim)]  # on an axis of one rank all placements are equal
            pairs = zip(x.placements, wanted, sizes, strict=False)
            if x.device_mesh == mesh and all(size == 1 or has == needs for has, needs, size in pairs):
                continue
            expected = f"{written(tuple(wanted))} on {written(mesh)}"
        got = f"{written(x.placements)} on {written(x.device_mesh)}"
        hint = "redistribute it, or pass this rank's part, to_local()"
        refuse(f"{name}'s placements", expected, got, hint)


class _Checked(set[Any]):
    """The kinds that passed `check_dtensors`. It holds no mesh: a mesh would keep its process groups alive."""


def check_dtensors(query: DTensor, key: DTensor, value: DTensor, axis: CPAxis, layout: Layout) -> None:
    """Refuse q, k and v that do not fit one another, their mesh or the layout; each kind is checked once."""
    mesh, form = query.device_mesh, FORMATS[axis.seq_dim]
    remembers = not torch.compiler.is_compiling() and layout.tensor is None
    if remembers:
        checked = state_of(axis.group, _Checked)
        kind = (
            axis.mesh_dims, axis.seq_dim, mesh.shape, mesh.mesh_dim_names, key.device_mesh == mesh == value.device_mesh,
            layout.spec(), query.placements, query.shape, query.dtype, key.placements, key.shape, key.dtype,
            value.placements, value.shape, value.dtype,
        )  # fmt: skip
        if kind in checked:
            return
    check_tensors(*form.to_bhsd(query, key, value))
    check_placements(query, key, value, axis.mesh_dims, form)
    check_chunks(query.shape[axis.seq_dim], [mesh.size(dim) for dim in axis.mesh_dims], layout)
    if remembers:
        if len(checked) >= MOST_KINDS:
            checked.clear()
        checked.add(kind)


def check_placements(query: DTensor, key: Tensor, value: Tensor, cp_axes: Sequence[int], form: Format) -> None:
    """Refuse placements that would give wrong results, or make DTensor silently gather a sharded dim.

    ``cp_axes`` are the axes of the mesh that shard the sequence.
    """
    mesh, placements = query.device_mesh, query.placements
    for name, x in (("key", key), ("value", value)):
        if not isinstance(x, DTensor) or x.device_mesh != mesh or x.placements != placements:
            found = (getattr(x, "placements", "a plain tensor"), getattr(x, "device_mesh", "no mesh"))
            got = " on ".join(map(written, found))
            hint = "shard q, k and v alike; kv heads that tp cannot divide need a smaller tp, or repeated kv heads"
            refuse(f"{name}'s placements", f"query's, {written(placements)} on {written(mesh)}", got, hint)
    names = mesh.mesh_dim_names or [str(i) for i in range(mesh.ndim)]
    seq_dim, head_dim, batch_dim = form.dims["sequence"], form.dims["heads"], form.dims.get("batch")
    for i, placement in enumerate(placements):
        here = f"placement on mesh axis {names[i]!r}"
        if i in cp_axes:
            if placement != Shard(seq_dim):
                refuse(here, f"Shard({seq_dim}), the sequence", placement, "shard the sequence on the cp axis")
        elif placement == Shard(seq_dim) and mesh.size(i) > 1:
            hint = 'gather the sequence over this axis first, or pass both axes, mesh=mesh["cp_ring", "cp_ulysses"]'
            refuse(here, "no second shard of the sequence", placement, hint, UnsupportedError)
        elif not isinstance(placement, Replicate) and form.part(placement) == "whole":
            hint = "redistribute it first" if isinstance(placement, Partial) else "shard heads or batch instead"
            refuse(here, "Shard of heads or batch, or Replicate", placement, hint, UnsupportedError)
    heads, kv_heads = query.shape[head_dim], key.shape[head_dim]
    hint = f"shard heads over axes whose sizes together divide {heads} and {kv_heads}"
    sizes = [("query heads", head_dim, heads, hint), ("kv heads", head_dim, kv_heads, hint)]
    if batch_dim is not None:
        sizes.append(("batch", batch_dim, query.shape[batch_dim], "pad or regroup the batch"))
    for what, dim, size, hint in sizes:
        if size % (parts := num_shards(mesh, placements, dim)):  # unequal shards
            axes = [repr(names[i]) for i, placement in enumerate(placements) if placement == Shard(dim)]
            expected = f"a multiple of {parts}, the size of {'axis' if len(axes) == 1 else 'axes'} {' x '.join(axes)}"
            refuse(what, expected, size, hint)


def num_shards(mesh: DeviceMesh, placements: Sequence[Placement], dim: int) -> int:
    """The product of the sizes of the axes that shard a dim."""
    parts = 1
    for axis, placement in enumerate(placements):  # not math.prod, which Dynamo does not trace in torch 2.11
        if placement == Shard(dim):
            parts *= mesh.size(axis)
    return parts


def check_chunks(length: int, sizes: Sequence[int], layout: Layout) -> None:
    """Refuse a length at which the layout's shards do not have `torch.chunk` sizes, as DTensor assumes: with others
    `full_tensor()` would be silently wrong. ``sizes``: of the mesh axes that together are the cp axis, outer first.
    """
    chunks, size = [length], 1
    for parts in sizes:
        bounds = [chunk_bounds(chunk, parts, part) for chunk in chunks for part in range(parts)]
        chunks, size = [end - begin for begin, end in bounds], size * parts
    for rank, chunk in enumerate(chunks):
        if layout.shard_len(length, size, rank) != chunk:
            of_layout = f"which {layout.spec()} has for multiples of {layout.multiple(size)}"
            hint = "pad the sequence (ShardedSequence does), or pass local tensors with seq_len"
            refuse("DTensor length", f"torch.chunk shards, {of_layout}", length, hint, UnsupportedError)


def require_sharded(specs: Sequence[Any], seq_dim: int, group_name: str) -> None:
    """Refuse placements unless the cp axis (or both of its axes), and no other axis, shards the sequence. `attention`
    has better messages; this guards direct calls of the op, for which DTensor could choose other placements."""
    mesh, names = specs[0].mesh, {group_name, *chain(*names_of_axes(group_name))}
    for axis in range(mesh.ndim):
        if mesh.size(axis) == 1:
            continue  # all placements are equal there, and axes of one rank may share one group
        is_cp = mesh.get_group(axis).group_name in names
        for spec in specs:
            if (spec.placements[axis] == Shard(seq_dim)) != is_cp:
                what, expected = f"placement on mesh axis {axis}", f"Shard({seq_dim}) exactly on the cp axis"
                refuse(what, expected, tuple(spec.placements), "shard the sequence on the cp axis alone", ValueError)
    for spec in specs:
        for dim in {0, 1, 2} - {seq_dim}:
            if spec.shape[dim] % (parts := num_shards(mesh, spec.placements, dim)):
                hint = "use sizes whose product divides it"
                refuse(f"size of dim {dim}", f"a multiple of {parts}", spec.shape[dim], hint, ValueError)
