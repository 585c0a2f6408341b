"""Captured tensors of `cp_mesh.flex_attention` that are DTensors: gather them, and scatter their gradients.

A function may read any element, at an index that it computes, so it needs the whole tensor. A tensor of S tokens and H
heads is small beside keys and values: the op gathers it in the order of positions, in both passes, and reduce-scatters
its gradient over ranks in the accumulation dtype. Methods and kernels see whole tensors and global indices.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from cp_mesh._torch import resolve_group
from cp_mesh.call.dtensor import CPAxis, cp_axes_of
from cp_mesh.call.formats import FORMATS
from cp_mesh.call.method import Plan, stream_of
from cp_mesh.call.spec import Call
from cp_mesh.comm.fingerprints import fingerprint
from cp_mesh.comm.whole import gather, scatter_sum
from cp_mesh.errors import UnsupportedError, refuse, written
from cp_mesh.kernels.scores import name_of_captured


class Cut(NamedTuple):
    """A sharded dim of a captured tensor: in equal parts over a group, or by the layout over the cp group ("")."""

    dim: int
    group_name: str = ""


Cuts = tuple[Cut, ...]
WHAT = "flex_attention"


# --- before the op
def place_captured(
    captured: Sequence[Tensor], query: Tensor, axis: CPAxis, seq_len: int
) -> tuple[tuple[Tensor, ...], str]:
    """Local tensors for captured DTensors, whose gradients become DTensors again; and their cuts, as text for the spec.

    Args:
        captured: in the order in which functions read them.
        query: of the call, local or a DTensor.
        axis: the call's cp axis.
        seq_len: tokens of the whole sequence.

    Raises:
        ArgumentError, UnsupportedError: for a wrong mesh or placements, or a tensor too large to gather.
    """
    local: list[Tensor] = []
    spec: list[str] = []
    for i, x in enumerate(captured):
        if not isinstance(x, DTensor):
            local.append(x)
            continue
        cuts, of_gradient = _cuts(x, query, axis, seq_len)
        others = (size for dim, size in enumerate(query.shape) if dim != axis.seq_dim)
        if cuts and x.numel() > (most := math.prod(others) * seq_len):
            hint = "it would be gathered; cp_mesh.attention(bias=) takes a bias sharded by rows and gathers nothing"
            expected = f"at most {most} elements, as query has"
            refuse("a captured DTensor that is sharded", expected, x.numel(), hint, UnsupportedError)
        local.append(x.to_local(grad_placements=of_gradient).contiguous())  # as the trace assumed
        spec += [f"{i}:{cut.dim}@{cut.group_name}" for cut in cuts]
    return tuple(local), ",".join(spec)


def _cuts(x: DTensor, query: Tensor, axis: CPAxis, seq_len: int) -> tuple[Cuts, list[Placement]]:
    """The cuts of a DTensor, and the placements of its gradient."""
    mesh, what = x.device_mesh, "a captured DTensor"
    if isinstance(query, DTensor):
        cp_axes, form = axis.mesh_dims, FORMATS[axis.seq_dim]
        apart = [form.part(placement) != "whole" for placement in query.placements]  # ranks compute different parts
        if mesh != query.device_mesh:
            refuse(f"{what}'s mesh", f"{written(query.device_mesh)}, as query's", mesh, "redistribute it there")
    else:
        cp_axes, apart = tuple(cp_axes_of(x, axis.group, None)), [True] * mesh.ndim
        if len(cp_axes) != mesh.ndim:
            hint = 'with local q, k and v wrap its local part: DTensor.from_local(part, mesh["cp"], [Shard(dim)])'
            refuse(f"{what}'s mesh", "the mesh of the cp axis", mesh, hint)
    dims = [p.dim if isinstance(p, Shard) and type(p) is Shard else None for p in x.placements]
    allowed = all(p == Replicate() or dim is not None for p, dim in zip(x.placements, dims, strict=True))
    allowed &= len({x.placements[i] for i in cp_axes}) == 1
    seq_dim = dims[cp_axes[0]]
    cuts = [] if seq_dim is None else [Cut(seq_dim)]
    for i, dim in enumerate(dims):
        if dim is None or i in cp_axes or mesh.size(i) == 1:
            continue
        allowed &= apart[i] and dim not in [cut.dim for cut in cuts]
        if x.shape[dim] % mesh.size(i):
            expected = f"a multiple of {mesh.size(i)}, its shards"
            refuse(f"{what}'s dim {dim}", expected, x.shape[dim], "replicate it there")
        cuts.append(Cut(dim, mesh.get_group(i).group_name))
    if not allowed:
        hint = "redistribute it, or read x.full_tensor()"
        expected = "Replicate; or Shard, of the sequence on the cp axis, and of other dims where query is sharded"
        refuse(f"{what}'s placements", expected, x.placements, hint)
    if seq_dim is not None and x.shape[seq_dim] != seq_len:
        hint = "shard only the padded sequence over cp; for unequal shards give from_local the whole shape= and stride="
        refuse(f"{what}'s dim {seq_dim}, which cp shards", f"{seq_len}, the whole sequence", x.shape[seq_dim], hint)
    return tuple(cuts), [Partial() if p == Replicate() and apart[i] else p for i, p in enumerate(x.placements)]


# --- within the op
def cuts_of(spec: str) -> dict[int, Cuts]:
    """The cuts of captured tensors by their index, parsed from the text of `place_captured`."""
    found: dict[int, Cuts] = {}
    for text in spec.split(",") if spec else ():
        i, cut = text.split(":", 1)
        dim, name = cut.split("@", 1)
        found[int(i)] = (*found.get(int(i), ()), Cut(int(dim), name))
    return found


def told(x: Tensor, cuts: Cuts = ()) -> str:
    """The part of a captured tensor that cp ranks compare: its content; if cp shards it, its dtype and other dims."""
    dims = [cut.dim for cut in cuts if not cut.group_name]
    if not dims:
        return fingerprint(x)
    shape = ["rows" if dim in dims else size for dim, size in enumerate(x.shape)]
    return f"{x.dtype} {shape} on {x.device.type}, with{'' if x.requires_grad else 'out'} a gradient"


def check_rows(plan: Plan, call: Call) -> None:
    """Refuse captured shards with another number of rows than this rank has in the call's layout."""
    rank = call.group.rank()
    expected = plan.layout.shard_len(plan.seq_len, call.group.size(), rank)
    for i, cuts in cuts_of(call.options.captured_cuts).items():
        for cut in cuts:
            if not cut.group_name and (rows := call.captured[i].shape[cut.dim]) != expected:
                hint = f"shard it in the layout of the call, {plan.options.layout}"
                refuse(f"a captured DTensor's dim {cut.dim} on cp rank {rank}", f"{expected} rows", rows, hint)


def with_whole(plan: Plan, call: Call) -> Plan:
    """The plan with scores that read whole tensors: one all-gather per cut, in the dtype of the caller's tensor."""
    read = [*plan.scores.captured]
    for i, cuts in cuts_of(call.options.captured_cuts).items():
        whole = call.captured[i]
        for cut in cuts:
            group, lens, inverse = _shards(call.captured[i], cut, plan, call)
            whole = gather(whole, cut.dim, lens, inverse, group.group_name, WHAT)
        read[i] = whole.to(read[i].dtype)
    return replace(plan, scores=replace(plan.scores, captured=tuple(read)))


def to_shards(gradients: Mapping[str, Tensor], plan: Plan, call: Call) -> dict[str, Tensor]:
    """The gradients by name, where those of sharded captured tensors are reduce-scattered to this rank's shards."""
    found = dict(gradients)
    for i, cuts in cuts_of(call.options.captured_cuts).items():
        if (grad := found.get(name_of_captured(i))) is None:
            continue
        for cut in reversed(cuts):
            group, lens, inverse = _shards(call.captured[i], cut, plan, call)
            grad = scatter_sum(grad, cut.dim, lens, inverse, group.rank(), group.group_name, WHAT)
        found[name_of_captured(i)] = grad
    return found


def _shards(local: Tensor, cut: Cut, plan: Plan, call: Call) -> tuple[dist.ProcessGroup, list[int], Tensor | None]:
    """The group of a cut, the length of each rank's shard, and the index of each position among the shards."""
    if cut.group_name:
        group = resolve_group(cut.group_name)
        return group, [local.shape[cut.dim]] * group.size(), None
    size = call.group.size()
    lens = [plan.layout.shard_len(plan.seq_len, size, rank) for rank in range(size)]
    inverse: Tensor = plan.prepare(
        ("inverse",), stream_of(plan.device), lambda: plan.layout.inverse(plan.seq_len, size).to(plan.device)
    )
    return call.group, lens, inverse
