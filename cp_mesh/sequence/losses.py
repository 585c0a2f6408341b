"""Losses since the last optimizer step of each model; `training/checks/gradients.py` reads them.

The state belongs to the process, not to a context: backwards and optimizers may run in other threads than forwards.
"""

from __future__ import annotations

import sys
import weakref
from dataclasses import dataclass, field
from types import FrameType

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import Optimizer

from cp_mesh._torch import active_ddp
from cp_mesh.comm.agreement import capturing

_FSDP1 = "torch.distributed.fsdp.fully_sharded_data_parallel"
MOST = 1024
"""Losses after which a model waits no longer for a step: perhaps no PyTorch optimizer steps it."""
LOOKS = 1024
"""Optimizer steps after which a model without gradients, such as a teacher, waits no longer."""


@dataclass
class StepLosses:
    """Losses of `cross_entropy` before a step of a model.

    Attributes:
        meshes: their ranks, where they are known.
        factors: gradients with which their backwards began, on the device.
        counted: whether some had ``count=``, so that they are parts of one mean.
        ran: whether any loss ran, in compiled code too.
    """

    meshes: list[DeviceMesh | dist.ProcessGroup] = field(default_factory=list)
    factors: list[Tensor] = field(default_factory=list)
    counted: bool = False
    ran: bool = False

    def forget(self) -> None:
        vars(self).update(vars(StepLosses()))


@dataclass
class Planned:
    """A model under a plan. Its 1st, 2nd, 4th, 8th, ... optimizer step is checked.

    Attributes:
        cp, tp: the groups of its styles; tp only if it shards the model's rows.
        number: how many plans its group had before.
        looks: optimizer steps without its gradients that are left before its first step.
        steps: of ``optimizer``, the first one that took its gradients.
        losses: since it had no gradients, of all models, as a loss does not tell which one it is of.
        wrapper: the DistributedDataParallel or FSDP1 in whose forward its attention was called, if any.
        staged: a stage of torch.distributed.pipelining called it; such a stage may have no loss.
        warned: warnings of earlier steps.
    """

    cp: dist.ProcessGroup | None = None
    tp: dist.ProcessGroup | None = None
    number: int = 0
    looks: int = LOOKS
    steps: int = 0
    optimizer: weakref.ref[Optimizer] | None = None
    losses: StepLosses = field(default_factory=StepLosses)
    wrapper: weakref.ref[nn.Module] | None = None
    staged: bool = False
    warned: set[str] = field(default_factory=set)

    @property
    def is_due(self) -> bool:
        """Whether its next step is checked."""
        return (self.steps + 1).bit_count() == 1


WAITING: weakref.WeakKeyDictionary[nn.Module, Planned] = weakref.WeakKeyDictionary()


def note_loss(
    loss: Tensor,
    mesh: DeviceMesh | dist.ProcessGroup | None,
    factor: Tensor | None = None,
    counted: bool = False,
) -> None:
    """Record a loss in eager mode.

    Args:
        loss: of this rank.
        mesh: its ranks; None if all cp ranks computed it alike, from gathered logits.
        factor: the gradient to record; None: the gradient of ``loss``.
        counted: whether it had ``count=``.
    """
    if not WAITING or not loss.requires_grad or capturing():
        return
    due = []
    for module, planned in list(WAITING.items()):
        planned.losses.ran = True
        if len(planned.losses.factors) >= MOST:
            del WAITING[module]
        elif planned.is_due:
            due.append(planned.losses)

    def keep(grad: Tensor) -> None:  # a step reads it later, so that nothing waits for the device here
        kept = grad.detach().clone() if factor is None else factor
        for own in due:
            own.ran, own.counted = True, own.counted or counted
            own.factors.append(kept)
            if mesh is not None and all(mesh is not each for each in own.meshes):
                own.meshes.append(mesh)

    if due:
        loss.register_hook(keep)


def note_compiled_backward() -> None:
    """Record that the backward of a loss ran, in compiled code too."""
    for planned in WAITING.values():
        planned.losses.ran = True


def any_ran() -> bool:
    """Return whether a loss ran since the last step of some model."""
    return any(planned.losses.ran for planned in WAITING.values())


def note_callers() -> None:
    """Record the wrapper or pipeline stage that calls the model, before a step that is checked."""
    if not any(planned.is_due for planned in WAITING.values()):
        return
    wrapper: nn.Module | None = active_ddp()
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        file = frame.f_globals.get("__name__", "")
        if file.startswith("torch.distributed.pipelining."):
            for planned in WAITING.values():
                planned.staged = True
            break
        if file == _FSDP1:
            wrapper = frame.f_locals.get("self", wrapper)
        frame = frame.f_back
    if wrapper is not None:
        parts = {*wrapper.modules()}
        for module, planned in WAITING.items():
            planned.wrapper = weakref.ref(wrapper) if module in parts else planned.wrapper
