"""Which losses gave which models their first gradients.

Several models may be trained in one process, in turn or in one backward, and each has a first optimizer step. While a
model waits for it, every backward of a loss is followed to its end: models whose gradients it changed have this loss.
So nothing of the graph is read, and compiled code and FSDP2 are followed as eager code is. Once no model waits, a loss
pays for one look-up.

The state is of the process and not of a context: backwards run in threads of their own.
"""

from __future__ import annotations

import itertools
import weakref
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from cp_mesh._torch import active_ddp, at_end_of_backward, backward_number, local_tensor, times_written
from cp_mesh.comm.agreement import capturing

LOOKS = 100
"""Rounds of optimizer steps after which nothing more is expected of a model that had no gradients, as a teacher."""
_count = itertools.count()


@dataclass
class Loss:
    """A trained `cross_entropy`.

    Attributes:
        mesh: its ranks; None if it ran in compiled code alone.
        of_whole: whether its logits were gathered, so that all ranks of cp computed it alike.
        labels: "next" if they are the next tokens of this rank's rows, "other" if hardly one is; "" if nobody knows.
        tokens: their fingerprint, those of the whole batch; "" if nobody knows.
        factor: with which its backward began; None of compiled code.
        number: of losses and plans in the order in which they were made.
        counted: whether it was divided by a count that it was given; None if nobody knows.
    """

    mesh: DeviceMesh | dist.ProcessGroup | None = None
    of_whole: bool = False
    labels: str = ""
    tokens: str = ""
    factor: Tensor | None = None
    number: int = field(default_factory=_count.__next__)
    counted: bool | None = None

    def begin(self, grad: Tensor) -> None:
        """A hook of the loss."""
        self.factor = grad.detach().clone()  # read when a step asks for it, so that nothing waits for the device here
        _follow(self)


@dataclass
class Planned:
    """A model under a plan, until the first optimizer step that takes its gradients.

    Attributes:
        group: the cp group.
        number: how many plans that group had before.
        looks: rounds of optimizer steps that are left.
        losses: whose backwards changed its gradients.
        made: as `Loss.number`.
    """

    group: dist.ProcessGroup
    number: int
    looks: int = LOOKS
    losses: list[Loss] = field(default_factory=list)
    made: int = field(default_factory=_count.__next__)


@dataclass
class _Backward:
    """One that runs: its number, the losses that it began with, all models' gradients before it, and whether an
    optimizer took some while it ran."""

    number: int
    losses: list[Loss]
    before: list[tuple[weakref.ref[nn.Module], Any]]
    stepped: bool = False


WAITING: weakref.WeakKeyDictionary[nn.Module, Planned] = weakref.WeakKeyDictionary()
LOOKED_AT: weakref.WeakSet[nn.Module] = weakref.WeakSet()
WRAPPERS: weakref.WeakSet[DistributedDataParallel] = weakref.WeakSet()
"""In whose forwards attention was called while a model was waiting."""
MOST_LOSSES = 1024
"""That a model's first step is waited for."""
_running: list[_Backward] = []  # at most one, the last that began
_nobodys: list[Loss] = []  # whose backward changed no gradients, such as those of torch.autograd.grad


def note_trained(loss: Tensor, found: Loss) -> None:
    """Of a loss whenever it runs in eager mode; follows its backward if a model waits."""
    if WAITING and loss.requires_grad and not capturing():
        loss.register_hook(found.begin)


def note_compiled_backward() -> None:
    """Of the backward of a loss, in compiled code too, where it has no hook."""
    if WAITING and _current() is None:
        _follow(Loss())


def note_wrapper() -> None:
    """Of attention, whenever it runs."""
    if WAITING and (wrapper := active_ddp()) is not None:
        WRAPPERS.add(wrapper)


def losses_of(planned: Planned) -> list[Loss]:
    """The losses of a model that has gradients, as far as they are known.

    In a backward these are its own. After it, if the model has none, they may be nobody's that are younger than its
    plan: those of torch.autograd.grad, whose results the trainer made its gradients.
    """
    if planned.losses:
        return planned.losses
    if is_backward():
        return [] if (backward := _current()) is None else backward.losses
    return [loss for loss in _nobodys if loss.number > planned.made]


def note_step() -> bool:
    """Of an optimizer, before it takes gradients. Whether it is in a backward, as those in hooks of parameters are."""
    if (backward := _current()) is not None:
        backward.stepped = True
    return is_backward()


def is_backward() -> bool:
    """Whether a backward runs in this thread."""
    return backward_number() != -1


def forget_nobodys() -> None:
    """After an optimizer step."""
    _nobodys.clear()


def _current() -> _Backward | None:
    """The backward that runs, if a loss began it; one that raised has no end, and stays the last."""
    return _running[0] if _running and _running[0].number == backward_number() else None


def _follow(loss: Loss) -> None:
    backward = _current()
    if backward is None:
        before = [(weakref.ref(module), _gradients(module)) for module in {*WAITING, *LOOKED_AT}]
        backward = _Backward(backward_number(), [], before)
        _running[:] = [backward]
        # behind the callbacks of FSDP2, which reduces the root's gradients in one of them
        at_end_of_backward(lambda: at_end_of_backward(partial(_settle, backward)))
    backward.losses.append(loss)


def _settle(backward: _Backward) -> None:
    """At the end of a backward, in which another one may have run."""
    _running[:] = [x for x in _running if x is not backward]
    is_theirs = backward.stepped
    for reference, before in backward.before:
        module = reference()
        if module is not None and _gradients(module) != before:
            is_theirs = True
            if module in WAITING:
                WAITING[module].losses += backward.losses
                if len(WAITING[module].losses) > MOST_LOSSES:  # no optimizer of PyTorch steps it in eager mode
                    del WAITING[module]
    if not is_theirs:
        _nobodys[:] = [*_nobodys, *backward.losses][-MOST_LOSSES:]


def _gradients(module: nn.Module) -> list[tuple[int, int]]:
    """What a backward changes of a model's gradients: which tensors they are, and how often they were written to."""
    grads = [x.grad for x in module.parameters() if x.grad is not None]
    return [(id(x), times_written(local_tensor(x) if isinstance(x, DTensor) else x)) for x in grads]
