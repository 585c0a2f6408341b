"""Losses that ran while a model waits for its first optimizer step; `training/checks/gradients.py` reads them.

The state belongs to the process, not to a context: backwards and optimizers may run in other threads than forwards.
"""

from __future__ import annotations

import sys
import weakref
from dataclasses import dataclass, field

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import DistributedDataParallel

from cp_mesh._torch import active_ddp
from cp_mesh.comm.agreement import capturing

MOST = 1024
"""Losses after which models wait no longer for a first step: perhaps no PyTorch optimizer steps them."""
LOOKS = 1024
"""Optimizer steps after which a model without gradients, such as a teacher, waits no longer."""


@dataclass
class Planned:
    """A model under a plan, until the first optimizer step that takes its gradients.

    Attributes:
        cp, tp: the groups of its styles; tp only if it shards the model's rows.
        number: how many plans its group had before.
        looks: optimizer steps that are left.
        wrapper: the DistributedDataParallel in whose forward its attention was called, if any.
        staged: a stage of torch.distributed.pipelining called it; such a stage may have no loss.
    """

    cp: dist.ProcessGroup | None = None
    tp: dist.ProcessGroup | None = None
    number: int = 0
    looks: int = LOOKS
    wrapper: weakref.ref[DistributedDataParallel] | None = None
    staged: bool = False


@dataclass
class Losses:
    """Losses of `cross_entropy` since the last optimizer step.

    Attributes:
        meshes: their ranks, where they are known.
        factors: gradients with which their backwards began, on the device.
        ran: whether any loss ran, in compiled code too.
    """

    meshes: list[DeviceMesh | dist.ProcessGroup] = field(default_factory=list)
    factors: list[Tensor] = field(default_factory=list)
    ran: bool = False


WAITING: weakref.WeakKeyDictionary[nn.Module, Planned] = weakref.WeakKeyDictionary()
LOSSES = Losses()


def note_loss(loss: Tensor, mesh: DeviceMesh | dist.ProcessGroup | None, factor: Tensor | None = None) -> None:
    """Record a loss in eager mode.

    Args:
        loss: of this rank.
        mesh: its ranks; None if all cp ranks computed it alike, from gathered logits.
        factor: the gradient to record; None: the gradient of ``loss``.
    """
    if WAITING and loss.requires_grad and not capturing():
        LOSSES.ran = True
        if len(LOSSES.factors) >= MOST:
            WAITING.clear()
            forget_losses()
            return
        if mesh is not None and all(mesh is not each for each in LOSSES.meshes):
            LOSSES.meshes.append(mesh)
        # a step reads it later, so that nothing waits for the device here
        loss.register_hook(lambda grad: LOSSES.factors.append(grad.detach().clone() if factor is None else factor))


def note_compiled_backward() -> None:
    """Record that the backward of a loss ran, in compiled code too."""
    if WAITING:
        LOSSES.ran = True


def note_callers() -> None:
    """Record, in a first call of attention, the wrapper or pipeline stage that called the model."""
    frame = sys._getframe(1) if WAITING else None
    while frame is not None:
        if frame.f_globals.get("__name__", "").startswith("torch.distributed.pipelining."):
            for planned in WAITING.values():
                planned.staged = True
            break
        frame = frame.f_back
    if WAITING and (wrapper := active_ddp()) is not None:
        parts = {*wrapper.modules()}
        for module, planned in WAITING.items():
            planned.wrapper = weakref.ref(wrapper) if module in parts else planned.wrapper


def forget_losses() -> None:
    """Drop the losses after an optimizer step."""
    LOSSES.ran = False
    LOSSES.meshes.clear()
    LOSSES.factors.clear()
