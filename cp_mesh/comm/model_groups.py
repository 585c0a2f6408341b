"""Which groups a model has styles over: ranks of all of them hear of a refusal over one."""

from __future__ import annotations

import math
import weakref
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial

import torch.distributed as dist
from torch import nn

from cp_mesh._torch import untraced
from cp_mesh.comm.group_state import state_of


class _Beside(weakref.WeakKeyDictionary[dist.ProcessGroup, str]):
    """Groups, and the axis of each, "cp" or "tp"; kept by group those beside it, of all models together."""


_models: weakref.WeakKeyDictionary[nn.Module, _Beside] = weakref.WeakKeyDictionary()  # all modules of one share it
_running: ContextVar[_Beside | None] = ContextVar("cp_mesh_running", default=None)
# Behind a graph break Dynamo would trace the look-up by itself, in a table from which modules go meanwhile.
_axes_of = untraced(partial(_models.get))


def stand_beside(module: nn.Module, groups: Mapping[dist.ProcessGroup, str]) -> None:
    """Let ranks of all these groups, and of those known of this model, hear of a refusal over one of them.

    Args:
        module: the model, or a part of it, which has styles over each.
        groups: the axis of each, "cp" or "tp".
    """
    parts = [*module.modules()]
    known = [axes for part in parts if (axes := _models.get(part)) is not None]
    together = _Beside(groups)
    for axes in known:
        together.update(axes)
    parts += [part for part, axes in _models.items() if any(axes is each for each in known)]
    _models.update(dict.fromkeys(parts, together))
    for group in together:
        others = {other: axis for other, axis in together.items() if other is not group}
        state_of(group, _Beside).update(others)


@contextmanager
def running(module: nn.Module) -> Iterator[None]:
    """What is refused inside is of the model of this module; ranks of other models over its group do not hear of it."""
    token = _running.set(_axes_of(module, _running.get()))
    try:
        yield
    finally:
        _running.reset(token)


def beside(group: dist.ProcessGroup, of_all_models: bool = False) -> dict[dist.ProcessGroup, str]:
    """The other groups of the model that runs, or of all models over this one where it is not known.

    It is not known in compiled code that has no module with a plan around it, nor in a function or a backward.
    """
    axes = _running.get()
    if axes is None or of_all_models:
        return dict(state_of(group, _Beside))
    return {other: axis for other, axis in axes.items() if other is not group} if group in axes else {}


def ranks_of_tp(group: dist.ProcessGroup) -> int:
    """Of the groups that stand beside this one: how many ranks have other heads; 1 without styles over tp."""
    return math.prod(other.size() for other, axis in beside(group).items() if axis == "tp")
