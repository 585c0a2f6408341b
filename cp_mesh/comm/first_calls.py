"""First calls of each kind over a group, and the order of calls.

First calls are compared over the ranks (`agreement`); later calls cost one look-up. Check mode also compares the order
of calls of attention.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field
from zlib import crc32

import torch.distributed as dist
from torch import Tensor

from cp_mesh._torch import backward_number, timeout_of
from cp_mesh.comm.agreement import (
    CHECK,
    Forward,
    agree,
    announce_refusal,
    capturing,
    checking,
    count_plan,
    keep_to_itself,
    note_refusals,
    plans_of,
    require_agreement,
    turned_off,
)
from cp_mesh.comm.fingerprints import fingerprint, shape_of
from cp_mesh.comm.group_state import state_of, states_of_all
from cp_mesh.comm.store_messages import store_of
from cp_mesh.errors import REFUSALS, RankMismatchError, refuse

MOST_KINDS = 256
"""Kinds of calls per group that are known and each compared. Of calls of other kinds the 1st, 2nd, 4th, 8th and so on
are, each with a digest of the calls before it: if every batch has a new length, comparisons must become rare."""


@dataclass
class Calls:
    """This rank's calls over one group: the ``kinds`` that were compared, and those that it checked alone, ``here``.

    ``later`` and ``digest`` are of calls of unknown kinds, after `MOST_KINDS`.

    ``forwards`` and ``calls`` (by direction and kind) count attention, compared or not; ``batches``: of known kinds.
    ``broken``: the error by which this rank left a pass; other ranks may still wait for its rows.
    """

    kinds: set[Hashable] = field(default_factory=set)
    here: Counter[Hashable] = field(default_factory=Counter)
    later: int = 0
    digest: int = 0
    forwards: int = 0
    batches: int = 0
    calls: dict[Hashable, list[int]] = field(default_factory=dict)
    broken: str = ""

    def count(self, direction: str, kind: Hashable) -> list[int]:
        """Return the number of passes of a kind, in a list that counts on; a new one each time for too many kinds."""
        if len(self.calls) < MOST_KINDS:
            return self.calls.setdefault((direction, kind), [0])
        return self.calls.get((direction, kind), [0])

    def count_forward(self, kind: Hashable) -> None:
        self.forwards += 1
        self.count("forward", kind)[0] += 1


def calls_of(group: dist.ProcessGroup) -> Calls:
    """Return this rank's calls over a group; refuse a group in which one of its passes broke off."""
    calls = state_of(group, Calls)
    if calls.broken:
        got = f"one in which this rank left a pass by {calls.broken}"
        hint = "other ranks may wait in that pass: restart, or destroy all groups and make new ones in a new store"
        refuse("group", "one whose passes have ended", got, hint, RankMismatchError)
    return calls


def is_first(group: dist.ProcessGroup, kind: Hashable) -> bool:
    """Return whether `agree_first` must compare a call of this kind over the group; one look-up for later calls.

    False while a CUDA graph is captured: the warm-up before it was the first call. Ranks must count kinds alike, so a
    kind is made of values that must be equal on all of them.
    """
    calls = calls_of(group)
    if kind in calls.kinds or turned_off(group) or group.size() == 1 or store_of(group) is None or capturing():
        return False
    if len(calls.kinds) < MOST_KINDS:
        return True
    calls.later, calls.digest = calls.later + 1, crc32(repr(kind).encode(), calls.digest)
    return calls.later.bit_count() == 1


def is_compared(group: dist.ProcessGroup, kind: Hashable) -> bool:
    """Return whether later calls of this kind need no comparison."""
    return group.size() == 1 or store_of(group) is None or kind in calls_of(group).kinds


def agree_first(group: dist.ProcessGroup, kind: Hashable, fields: Mapping[str, str], axis: str = "cp") -> None:
    """Call `agree` for the first call of its kind."""
    calls = state_of(group, Calls)
    agree(group, {**fields, f"calls after the first {MOST_KINDS} kinds": f"{calls.digest:08x}"}, axis)
    calls.kinds.add(kind)


def agree_on_shapes(
    group: dist.ProcessGroup,
    kind: Hashable,
    tensors: Mapping[str, Tensor | None],
    contents: Callable[[Tensor | None], str] = fingerprint,
) -> bool:
    """Compare shapes and dtypes of a batch in every call; in first calls of a kind, and each 2^n-th, ``contents``.

    A comparison takes a few requests to the store. Without it, unequal numbers of rows would end the process in gloo.
    In check mode every call compares contents by a collective, which also carries the refusals of other ranks.

    Returns:
        Whether contents were compared.

    Raises:
        RankMismatchError: as `agree`.
    """
    what = {"call": "batch"}  # for messages
    if checking(group):
        require_agreement(group, what | {name: contents(x) for name, x in tensors.items()})
        return True
    is_new = is_first(group, kind)
    if is_new:
        agree_first(group, kind, what | {name: contents(x) for name, x in tensors.items()})
    elif backward_number() != -1:
        return False  # a recomputation of a checkpoint; its forward was compared
    elif not (turned_off(group) or group.size() == 1 or store_of(group) is None or capturing()):
        own = state_of(group, Calls)
        own.batches += 1
        told = contents if own.batches.bit_count() == 1 else shape_of
        agree(group, what | {name: told(x) for name, x in tensors.items()}, "cp", timeout_of(group))
    return is_new


def agree_once(
    group: dist.ProcessGroup, kind: Hashable, fields: Callable[[], Mapping[str, str]], axis: str = "cp"
) -> None:
    """Call `agree_first` for a kind that is new since the last plan over this group; one look-up for later calls.

    In check mode every call over cp is compared, by a collective, which also carries the refusals of other ranks.

    Raises:
        RankMismatchError: as `agree`.
    """
    if axis == "cp" and checking(group):
        require_agreement(group, fields())
    elif is_first(group, kind):
        agree_first(group, kind, fields(), axis)


def look_again(group: dist.ProcessGroup) -> int:
    """Compare first calls again, for a new model. Every rank of the group must call this at the same place.

    Returns:
        How many models the group had before.
    """
    for calls in states_of_all(Calls):
        calls.here.clear()
    own = state_of(group, Calls)
    own.kinds = set()  # another one, by which `call.known` sees it
    own.later = own.digest = own.batches = 0
    return count_plan(group)


def has_calls(group: dist.ProcessGroup) -> bool:
    """Return whether a model over the group, or a call, has been compared."""
    return bool(state_of(group, Calls).kinds) or plans_of(group) > 0


def is_first_here(group: dist.ProcessGroup, kind: Hashable) -> bool:
    """Return True in this rank's 1st, 2nd, 4th, 8th, ... call of a kind over the group; no other rank takes part."""
    here = calls_of(group).here
    full = kind not in here and len(here) >= MOST_KINDS
    if full or turned_off(group) or group.size() == 1 or capturing():
        return False
    here[kind] += 1
    return here[kind].bit_count() == 1


def has_no_call(group: dist.ProcessGroup, name: str) -> bool:
    """Return whether this rank had no call over the group whose kind begins with this name, and note that it has one.

    For calls that are refused, whose kind may be another than on the other ranks.
    """
    here = calls_of(group).here
    if turned_off(group) or group.size() == 1 or capturing():
        return False
    known = any(isinstance(kind, tuple) and kind[0] == name for kind in here)
    here[name,] += 1
    return not known


def last_forward(group: dist.ProcessGroup) -> Forward:
    """Return the forward that has just run over the group."""
    return Forward(state_of(group, Calls).forwards - 1, CHECK.get().where)


def order_of(group: dist.ProcessGroup, direction: str, kind: Hashable) -> str:
    """Return a string for the place of a call of attention among the calls over its group, for check mode.

    A backward in compiled code does not know its forward; its string counts calls of this kind and direction.
    """
    calls, of = calls_of(group), CHECK.get().backward_of
    if direction == "forward":
        of = Forward(calls.forwards, CHECK.get().where)
    told = "" if of is None else f" {of.number + 1}{of.where and f' in {of.where}'}"
    return f"{direction}{told}, after {calls.calls.get((direction, kind), [0])[0]} like it"


def end_by(group: dist.ProcessGroup, error: BaseException) -> None:
    """Note that a pass of attention ended by an error.

    If it is no refusal, this rank refuses calls over the group from now on; other ranks find the error in the store.
    """
    if isinstance(error, REFUSALS):
        keep_to_itself(error)  # raised on every rank, before the first collective of the pass
    elif group.size() > 1:
        state_of(group, Calls).broken = f"{type(error).__name__}: {error}"  # the error would keep tensors
        if isinstance(error, Exception):
            note_refusals(group, error)
            announce_refusal(group, error, in_check_mode=False)
