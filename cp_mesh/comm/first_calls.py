"""Which calls over a group are the first of their kind, and in which order calls come.

First calls are compared over the ranks (`agreement`), later ones pay for one look-up. In check mode the order of calls
of attention is compared too.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field

import torch.distributed as dist
from torch import Tensor

from cp_mesh._torch import backward_number, timeout_of
from cp_mesh.comm.agreement import (
    CHECK,
    Forward,
    agree,
    capturing,
    checking,
    count_plan,
    require_agreement,
    turned_off,
)
from cp_mesh.comm.fingerprints import fingerprint, shape_of
from cp_mesh.comm.group_state import state_of, states_of_all
from cp_mesh.comm.store_messages import store_of

MOST_KINDS = 256
"""Of calls on one group that are compared; where every batch has another length, a step must not pay for ever."""


@dataclass
class _Calls:
    """What this rank called over one group: which kinds were compared, and which it looked at alone, ``here``.

    ``forwards`` and ``calls`` (by direction and kind) count attention, compared or not.
    """

    kinds: set[Hashable] = field(default_factory=set)
    here: set[Hashable] = field(default_factory=set)
    forwards: int = 0
    calls: Counter[Hashable] = field(default_factory=Counter)


def is_first(group: dist.ProcessGroup, kind: Hashable) -> bool:
    """Whether a call of this kind is to be compared over the group, by `agree_first`; one look-up for later calls.

    Not while a CUDA graph is captured: its first call is the warm-up before. Ranks must count kinds alike, so a kind is
    made of what must be equal on all of them.
    """
    kinds = state_of(group, _Calls).kinds
    if kind in kinds or len(kinds) >= MOST_KINDS:
        return False
    if turned_off(group) or group.size() == 1 or store_of(group) is None:
        return False
    return not capturing()


def agree_first(group: dist.ProcessGroup, kind: Hashable, fields: Mapping[str, str], axis: str = "cp") -> None:
    """`agree` of a call that is the first of its kind."""
    agree(group, fields, axis)
    state_of(group, _Calls).kinds.add(kind)


def agree_on_shapes(
    group: dist.ProcessGroup,
    kind: Hashable,
    tensors: Mapping[str, Tensor | None],
    contents: Callable[[Tensor | None], str] = fingerprint,
) -> bool:
    """Compare shapes and dtypes of a batch in every call, and in the first of a kind what ``contents`` says of each.

    A call is a few requests to the store. Ranks that went on with rows of unlike numbers would end within gloo. In
    check mode contents are compared in every call, by a collective, as other ranks tell what they refuse.

    Returns:
        Whether contents were compared.

    Raises:
        RankMismatchError: as `agree`.
    """
    if checking(group):
        require_agreement(group, {name: contents(x) for name, x in tensors.items()})
        return True
    is_new = is_first(group, kind)
    if is_new:
        agree_first(group, kind, {name: contents(x) for name, x in tensors.items()})
    elif backward_number() != -1:
        return False  # what a checkpoint computes again was compared before
    elif not (turned_off(group) or group.size() == 1 or store_of(group) is None or capturing()):
        agree(group, {name: shape_of(x) for name, x in tensors.items()}, "cp", timeout_of(group))
    return is_new


def agree_once(
    group: dist.ProcessGroup, kind: Hashable, fields: Callable[[], Mapping[str, str]], axis: str = "cp"
) -> None:
    """`agree_first` of a kind that is new since the last plan over this group; one look-up for later calls.

    Raises:
        RankMismatchError: as `agree`.
    """
    if is_first(group, kind):
        agree_first(group, kind, fields(), axis)


def look_again(group: dist.ProcessGroup) -> int:
    """Compare first calls once more: there is a new model. Every rank of the group says so at the same place.

    Returns:
        How many models it had before.
    """
    for calls in states_of_all(_Calls):
        calls.here.clear()
    state_of(group, _Calls).kinds.clear()
    return count_plan(group)


def is_first_here(group: dist.ProcessGroup, kind: Hashable) -> bool:
    """Whether this rank is yet to look at this kind over the group, which it does now; no other rank hears of it."""
    here = state_of(group, _Calls).here
    if kind in here or len(here) >= MOST_KINDS or turned_off(group) or group.size() == 1 or capturing():
        return False
    here.add(kind)
    return True


def last_forward(group: dist.ProcessGroup) -> Forward:
    """The one that has just run over the group."""
    return Forward(state_of(group, _Calls).forwards - 1, CHECK.get().where)


def order_of(group: dist.ProcessGroup, direction: str, kind: Hashable) -> str:
    """What tells the place of a call of attention among the calls over its group, for check mode.

    A backward in compiled code knows no forward: there it is how many calls were of this kind and direction.
    """
    calls, of = state_of(group, _Calls), CHECK.get().backward_of
    if direction == "forward":
        of = Forward(calls.forwards, CHECK.get().where)
    told = "" if of is None else f" {of.number + 1}{of.where and f' in {of.where}'}"
    return f"{direction}{told}, after {calls.calls[direction, kind]} like it"


def note_call(group: dist.ProcessGroup, direction: str, kind: Hashable) -> None:
    """Of attention, in every call that was not refused."""
    own = state_of(group, _Calls)
    own.forwards += direction == "forward"
    if len(own.calls) < MOST_KINDS or (direction, kind) in own.calls:
        own.calls[direction, kind] += 1
