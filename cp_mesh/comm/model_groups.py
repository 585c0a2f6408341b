"""Which groups models have styles over beside a group: ranks of all of them hear of a refusal over one."""

from __future__ import annotations

import math
import weakref
from collections.abc import Mapping

import torch.distributed as dist

from cp_mesh.comm.group_state import state_of


class _Beside(weakref.WeakKeyDictionary[dist.ProcessGroup, str]):
    """Groups, and the axis of each, "cp" or "tp"; kept by group those beside it, of all models together."""


def stand_beside(groups: Mapping[dist.ProcessGroup, str]) -> None:
    """Let ranks of all these groups, and of those known beside them, hear of a refusal over one of them.

    Args:
        groups: those that a model has styles over, and the axis of each, "cp" or "tp".
    """
    together = dict(groups)
    for group in groups:
        together |= state_of(group, _Beside)
    for group in together:
        state_of(group, _Beside).update({other: axis for other, axis in together.items() if other is not group})


def beside(group: dist.ProcessGroup) -> dict[dist.ProcessGroup, str]:
    """The other groups of models over this one."""
    return dict(state_of(group, _Beside))


def ranks_of_tp(group: dist.ProcessGroup) -> int:
    """Of the groups that stand beside this one: how many ranks have other heads; 1 without styles over tp."""
    return math.prod(other.size() for other, axis in beside(group).items() if axis == "tp")
