"""State kept by process group, for all parts of the library: one table."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

import torch.distributed as dist

T = TypeVar("T")

# Keyed by the group itself, as names are reused after a group is destroyed. No value holds its group, so that an entry
# is dropped with the group.
_STATES: WeakKeyDictionary[dist.ProcessGroup, dict[Callable[[], Any], Any]] = WeakKeyDictionary()


def state_of(group: dist.ProcessGroup, kind: Callable[[], T]) -> T:
    """Return the group's state of this kind: one instance, made by ``kind()`` in the first call."""
    if (kinds := _STATES.get(group)) is None:
        kinds = _STATES.setdefault(group, {})
    if (own := kinds.get(kind)) is None:
        own = kinds.setdefault(kind, kind())
    return own


def groups_with(kind: Callable[[], T]) -> list[tuple[dist.ProcessGroup, T]]:
    """Return the groups that have an instance, with the instance."""
    found = []
    for ref in _STATES.keyrefs():  # a copy: other threads may add groups
        if (group := ref()) is not None and kind in (kinds := _STATES.get(group, {})):
            found.append((group, kinds[kind]))
    return found


def states_of_all(kind: Callable[[], T]) -> list[T]:
    """Return the instances of all groups."""
    return [own for _, own in groups_with(kind)]
