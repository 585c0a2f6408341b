"""`clip_grad_norm`: clip by the global norm of gradients on different meshes, or on no mesh.

PyTorch's `clip_grad_norm_` takes gradients of one mesh at a time. With tensor parallelism some parameters are sharded
over dp x cp alone and others over tp as well.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from cp_mesh._torch import devices_of_group, multiply_each, norm_of_each
from cp_mesh.comm.groups import groups_of
from cp_mesh.errors import refuse, typed

Groups = tuple[dist.ProcessGroup, ...]
"""Process groups over which a parameter is sharded."""
_EPS = 1e-6  # as in PyTorch


@torch.no_grad()
@typed
def clip_grad_norm(
    parameters: Tensor | Iterable[Tensor],
    max_norm: float,
    norm_type: float = 2.0,
    *,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
    over: DeviceMesh | dist.ProcessGroup | None = None,
) -> Tensor:
    """Scale gradients to a global norm in place: `torch.nn.utils.clip_grad_norm_` for parameters on any meshes.

    Sharded gradients are reduced over their groups, with one small all-reduce for each group; replicated gradients are
    counted once. Gradients must already be reduced over the ranks with other tokens; Partial gradients of DTensors are
    reduced here, to the parameter's placements. A plain tensor is taken as replicated. Call it on all ranks that share
    the parameters, with all parameters in the same order; parameters without a gradient add nothing. It synchronizes
    with the device only with ``error_if_nonfinite``.

    Args:
        parameters: DTensors and plain tensors with gradients; one tensor or many.
        max_norm: the largest norm.
        norm_type: which norm: p > 0, `math.inf` for the largest absolute value.
        error_if_nonfinite: raise if the norm is nan or infinite, before any gradient is scaled.
        foreach: whether to handle the gradients of one device and dtype in one call; None: on GPUs.
        over: ranks that hold other parameters, such as pipeline stages: ``mesh["pp"]``. All of them must call this.

    Returns:
        The norm before clipping, the same on every rank: a plain tensor [], float64 if a gradient is, else float32.

    Raises:
        ArgumentError: if ``max_norm`` is negative or no number, or ``norm_type`` is not above 0.
        RuntimeError: on every rank, if the norm is nan or infinite and ``error_if_nonfinite`` is set.

    Example:
        >>> norm = clip_grad_norm(model.parameters(), max_norm=1.0)  # after backward  # doctest: +SKIP
    """
    if not max_norm >= 0:
        refuse("clip_grad_norm: max_norm", "a number of 0 or more", max_norm, "1.0 is usual; math.inf clips nothing")
    if not norm_type > 0:
        refuse("clip_grad_norm: norm_type", "a number above 0", norm_type, "2.0 is usual; math.inf takes the largest")
    given = [parameters] if isinstance(parameters, Tensor) else [*parameters]
    shards: dict[Groups, list[Tensor]] = defaultdict(list)
    for parameter in given:
        own = shards[_sharing(parameter)]  # also without a gradient, so that all ranks reduce over the same groups
        if parameter.grad is not None:
            own.append(_local_gradient(parameter))
    grads = [grad for own in shards.values() for grad in own]
    dtype = torch.float64 if any(grad.dtype == torch.float64 for grad in grads) else torch.float32
    device = grads[0].device if grads else given[0].device if given else torch.device("cpu")
    sums = {groups: _power_sum(own, norm_type, dtype, device, foreach) for groups, own in shards.items()}
    for group in dict.fromkeys(group for groups in sums for group in groups):
        concerned = [groups for groups in sums if group in groups]
        reduced = _all_reduce(torch.stack([sums[groups] for groups in concerned]), group, norm_type)
        sums |= dict(zip(concerned, reduced.unbind(), strict=True))
    every = torch.stack([*sums.values()]) if sums else torch.zeros(1, dtype=torch.float64, device=device)
    power = every.amax() if math.isinf(norm_type) else every.sum()
    for group in () if over is None else groups_of(over):
        power = _all_reduce(power[None], group, norm_type)[0]
    total = (power if math.isinf(norm_type) else power ** (1.0 / norm_type)).to(dtype)
    if error_if_nonfinite and not bool(total.isfinite()):
        raise RuntimeError(
            f"clip_grad_norm: expected gradients of finite norm, got {float(total)} for norm_type={norm_type}; no "
            "gradient was scaled, and error_if_nonfinite=False would scale them"
        )
    if math.isinf(max_norm):  # the factor would be NaN for an infinite norm
        return total
    factor = (max_norm / (total + _EPS)).clamp(max=1.0)
    for alike in _by_device_and_dtype(grads):
        if _at_once(alike[0], foreach):
            multiply_each(alike, factor.to(alike[0].device))
        else:
            for grad in alike:
                grad.mul_(factor.to(grad.device))
    return total


def _sharing(parameter: Tensor) -> Groups:
    if not isinstance(parameter, DTensor):
        return ()
    mesh = parameter.device_mesh
    return tuple(mesh.get_group(i) for i, placement in enumerate(parameter.placements) if not placement.is_replicate())


def _local_gradient(parameter: Tensor) -> Tensor:
    """Return this rank's shard of the fully reduced gradient, as a view of the gradient's memory."""
    grad = parameter.grad
    assert grad is not None
    if isinstance(grad, DTensor) and isinstance(parameter, DTensor):
        if grad.placements != parameter.placements:
            parameter.grad = grad = grad.redistribute(placements=parameter.placements)
        return grad.to_local()
    return grad


def _at_once(grad: Tensor, foreach: bool | None) -> bool:
    return grad.is_cuda if foreach is None else foreach


def _by_device_and_dtype(grads: list[Tensor]) -> list[list[Tensor]]:
    found: dict[tuple[torch.device, torch.dtype], list[Tensor]] = defaultdict(list)
    for grad in grads:
        found[grad.device, grad.dtype].append(grad)
    return [*found.values()]


def _power_sum(
    grads: list[Tensor], norm_type: float, dtype: torch.dtype, device: torch.device, foreach: bool | None
) -> Tensor:
    """Sum the powers of this rank's entries, or take the largest; float64 [], so that powers do not overflow."""
    norms: list[Tensor] = []
    for alike in _by_device_and_dtype([grad for grad in grads if grad.numel()]):
        if _at_once(alike[0], foreach):
            norms += norm_of_each(alike, norm_type, dtype=dtype)
        else:
            norms += [torch.linalg.vector_norm(grad, norm_type, dtype=dtype) for grad in alike]
    if not norms:
        return torch.zeros((), dtype=torch.float64, device=device)
    found = torch.stack([norm.to(device) for norm in norms]).double()
    return found.amax() if math.isinf(norm_type) else found.pow(norm_type).sum()


def _all_reduce(values: Tensor, group: dist.ProcessGroup, norm_type: float) -> Tensor:
    """All-reduce over the group: sums, or maxima for an infinite norm. NaN stays NaN."""
    device = values.device  # the CPU if FSDP2 offloads parameters, while the group is of NCCL
    if device.type not in (kinds := [kind.type for kind in devices_of_group(group)]):
        values = values.to(kinds[0])
    if not math.isinf(norm_type):
        dist.all_reduce(values, group=group)
        return values.to(device)
    both = torch.stack([values.nan_to_num(0.0, math.inf), values.isnan().double()])  # a MAX reduction may lose NaN
    dist.all_reduce(both, dist.ReduceOp.MAX, group)
    return both[0].where(both[1] == 0, math.nan).to(device)
