"""How gradients are reduced, compared before the first optimizer step with the loss that they are of.

The loss of a rank is a share of a sum, so gradients must be summed over the ranks of the loss: whether FSDP2,
DistributedDataParallel or the trainer's own code did, and over which ranks, is known when the optimizer is called. The
hook that looks is PyTorch's, for all optimizers. It looks at each model under a plan once, and gives up one that has no
gradients in the first steps, as a teacher.
"""

from __future__ import annotations

import json
import warnings
import weakref
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import register_optimizer_step_pre_hook

from cp_mesh.agreement import capturing, compare_first, look_again, turned_off
from cp_mesh.errors import ArgumentError, describe, refuse
from cp_mesh.forwards import STYLE, replaced
from cp_mesh.kernels.combine import accumulation_dtype
from cp_mesh.loss import groups_of, ranks_of
from cp_mesh.seen import CALLED, LOSS, Loss
from cp_mesh.styles import SUMS

LOOKS = 100
"""Optimizer steps after which nothing more is expected of a model that had no gradients."""
_APART = 1e-3
"""Relative: norms of gradients that were reduced are equal but for rounding."""


class _FirstSteps:
    """Models under plans whose gradients were not looked at yet; one hook of PyTorch's optimizers serves all."""

    def __init__(self) -> None:
        self.due: weakref.WeakKeyDictionary[nn.Module, tuple[dist.ProcessGroup, int]] = weakref.WeakKeyDictionary()
        self.hooked = False

    def add(self, module: nn.Module, group: dist.ProcessGroup) -> None:
        self.due[module] = group, LOOKS
        if not self.hooked:
            register_optimizer_step_pre_hook(self.before_step)
            self.hooked = True

    def before_step(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        if torch.compiler.is_compiling() or not self.due or capturing():
            return
        held = {id(x) for part in optimizer.param_groups for x in part["params"]}
        for module, (group, looks) in list(self.due.items()):
            self.due[module] = group, looks - 1
            graded = {name: x for name, x in module.named_parameters() if x.grad is not None}
            if any(id(x) in held for x in graded.values()):
                del self.due[module]
                if not turned_off():
                    check_reduction(module, group, {name: x.grad for name, x in graded.items()})
            elif looks <= 1:
                del self.due[module]


_first_steps = _FirstSteps()


def watch_first_step(module: nn.Module, mesh: DeviceMesh) -> None:
    """Look at the gradients of ``module``, which has a plan over ``mesh``, before the first step that takes them."""
    LOSS.set(None)
    CALLED.set(None)
    look_again(mesh.get_group())
    if mesh.size() > 1:
        _first_steps.add(module, mesh.get_group())


def check_reduction(module: nn.Module, group: dist.ProcessGroup, grads: dict[str, Any]) -> None:
    """Refuse gradients that are not sums over the ranks of the loss; warn where it cannot be known.

    Args:
        module: the model, or the part of it that has a plan.
        group: the cp group.
        grads: of its parameters, by name.

    Raises:
        ArgumentError: on every rank.
    """
    loss = LOSS.get()
    if loss is None and not _gathers(module):
        warnings.warn(
            "cp_mesh: an optimizer steps on gradients of a loss that is not cp_mesh.cross_entropy. A rank's loss must "
            "be its share of a sum over all ranks, not the mean of its own rows: cross_entropy(logits, labels, data), "
            "or its sum / the valid tokens of all ranks. Of a pipeline, only the last stage has the loss",
            stacklevel=3,
        )
    if (fsdp := next((part for part in module.modules() if isinstance(part, FSDPModule)), None)) is not None:
        _check_fsdp(fsdp, loss, group, grads)
    elif (wrapper := _wrapper(module)) is not None:
        _check_ranks(
            loss, dist.get_process_group_ranks(wrapper.process_group), "DistributedDataParallel", "process_group=",
            group, grads,
        )  # fmt: skip
        if loss is not None and (loss.scale is None or loss.scale <= 1) and not wrapper._comm_hooks:
            warnings.warn(
                "cp_mesh: DistributedDataParallel averages gradients, and the loss is this rank's share of a sum: call "
                f"cp_mesh.sum_gradients(ddp_model), or multiply the loss by {wrapper.process_group.size()}",
                stacklevel=3,
            )
    elif not any(type(part).__name__ == "FullyShardedDataParallel" for part in module.modules()):
        for over in [group] if loss is None or loss.mesh is None else groups_of(loss.mesh):
            _check_equal(over, grads)


def _gathers(module: nn.Module) -> bool:
    """Whether the model's output is gathered, so that a loss of the whole has the right scale."""
    style = replaced(module, STYLE)
    bound = None if style is None else getattr(style.run, "func", style.run)
    return bool(getattr(getattr(bound, "__self__", None), "gather_output", False))


def _check_fsdp(module: FSDPModule, loss: Loss | None, group: dist.ProcessGroup, grads: dict[str, Any]) -> None:
    state = module._get_fsdp_state()
    parts = getattr(state, "_fsdp_param_groups", None) or [state._fsdp_param_group]  # of older versions
    ranks = {rank for part in parts if part for rank in part.mesh_info.mesh.mesh.flatten().tolist()}
    if ranks:
        _check_ranks(loss, sorted(ranks), "fully_shard", "mesh=", group, grads)
    if not hasattr(module, SUMS) and loss is not None and (loss.scale is None or loss.scale <= 1):
        setattr(module, SUMS, False)  # warned once
        warnings.warn(
            "cp_mesh: fully_shard averages gradients over its ranks, while losses of cp_mesh.cross_entropy are shares "
            "of a sum: call cp_mesh.sum_gradients(model) after fully_shard",
            stacklevel=3,
        )


def _check_ranks(
    loss: Loss | None, ranks: list[int], by: str, option: str, group: dist.ProcessGroup, grads: dict[str, Any]
) -> None:
    """Refuse gradients that are reduced over other ranks than those of the loss.

    Over cp the trainer's own code may have summed them: then they are equal.
    """
    if loss is None or loss.mesh is None or loss.of_whole:
        return
    of_loss = ranks_of(loss.mesh)
    if set(ranks) == set(of_loss):
        return
    if set(ranks) < set(of_loss) and set(ranks).isdisjoint({*dist.get_process_group_ranks(group)} - {dist.get_rank()}):
        _check_equal(group, grads)
        return
    if set(ranks) < set(of_loss):
        got, hint = f"{by} over ranks {ranks}", f"give {by} {option} all of them, as mesh['dp', 'cp']._flatten()"
        refuse("gradients", f"a sum over the ranks of cross_entropy, {of_loss}", got, hint)
    expected, got = f"a mean over the ranks that {by} reduces over, {ranks}", f"one over ranks {of_loss}"
    hint = "give cross_entropy the mesh of all ranks with other tokens"
    if loss.scale is not None and loss.scale != 1:  # which may make it right
        warnings.warn(f"cp_mesh: {describe('cross_entropy', expected, got, hint)}", stacklevel=4)
        return
    refuse("cross_entropy", expected, got, hint)


def _wrapper(module: nn.Module) -> DistributedDataParallel | None:
    """The wrapper in whose forward the model's attention was called, if there is one."""
    loss = LOSS.get()
    found = None if loss is None or loss.wrapper is None else loss.wrapper()
    inside = found is not None and any(part is module for part in found.modules())
    return found if inside else None


def _norm(grad: Tensor) -> Tensor:
    """Without a copy of the gradient, for which there may be no memory."""
    grad = grad.coalesce().values() if grad.is_sparse else grad
    return torch.linalg.vector_norm(grad, dtype=accumulation_dtype(grad.dtype))


def _check_equal(group: dist.ProcessGroup, grads: dict[str, Any]) -> None:
    """Refuse gradients of replicated parameters that differ between ranks: nobody reduced them."""
    local = {name: x.to_local() if isinstance(x, DTensor) else x for name, x in grads.items()}
    norms = [float(_norm(x)) for x in local.values()]  # one after the other: they may be on several devices
    answers = compare_first(group, {"gradients": json.dumps(dict(zip(local, norms, strict=True)))})
    found = [json.loads(answer["gradients"]) for answer in answers]
    names = [name for name in grads if all(name in one for one in found)]
    table = torch.tensor([[one[name] for name in names] for one in found], dtype=torch.float64)
    low, high = table.amin(0), table.amax(0)
    apart = (high - low) > _APART * high
    if not apart.any():
        return
    differ = [name for name, differs in zip(names, apart.tolist(), strict=True) if differs]
    what = f"gradients of {len(differ)} of {len(names)} parameters, such as {differ[0]}"
    hint = "fully_shard and cp_mesh.sum_gradients, or all_reduce every gradient over the ranks of the loss with SUM"
    expected, got = "equal on all ranks before the optimizer steps", "another one on each rank"
    if len(differ) == len(names):
        raise ArgumentError(describe(what, expected, got, hint))
    warnings.warn(f"cp_mesh: {describe(what, expected, got, hint)}", stacklevel=4)
