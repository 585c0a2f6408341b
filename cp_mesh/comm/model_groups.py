"""Groups of a model's styles beside a group: ranks of all of them get an error that is raised over one of them."""

from __future__ import annotations

import math
import weakref
from collections.abc import Mapping

import torch.distributed as dist

from cp_mesh.comm.group_state import state_of


class _Beside(weakref.WeakKeyDictionary[dist.ProcessGroup, str]):
    """For one group, the groups beside it and the axis of each, "cp" or "tp", for all models together."""


def stand_beside(groups: Mapping[dist.ProcessGroup, str]) -> None:
    """Connect these groups, and those known beside them: ranks of all get an error that is raised over one of them.

    Args:
        groups: the groups of a model's styles, and the axis of each, "cp" or "tp".
    """
    together = dict(groups)
    for group in groups:
        together |= state_of(group, _Beside)
    for group in together:
        state_of(group, _Beside).update({other: axis for other, axis in together.items() if other is not group})


def beside(group: dist.ProcessGroup) -> dict[dist.ProcessGroup, str]:
    """Return the other groups of models over this one."""
    return dict(state_of(group, _Beside))


def ranks_of_tp(group: dist.ProcessGroup) -> int:
    """Return the number of ranks that share the heads, from the tp groups beside this one; 1 without styles over tp."""
    return math.prod(other.size() for other, axis in beside(group).items() if axis == "tp")
