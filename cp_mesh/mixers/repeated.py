"""Calls that passed all checks: one look-up finds what they decided, and their tensors are all that is new.

Their key has what checks and plans read: keywords, shapes, dtypes, devices, and the identity of sequence and mask. They
hold none of these, and are known as long as their pieces are kept. Calls on DTensors are checked anew each time.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from functools import lru_cache, partial
from operator import is_
from typing import Any

import torch

from cp_mesh._torch import in_transform, times_written
from cp_mesh.call.operators import PLAIN
from cp_mesh.comm.agreement import compare, refusing
from cp_mesh.geometry.host_tensors import is_owned
from cp_mesh.mixers.moving import Group
from cp_mesh.mixers.pieces import Pieces
from cp_mesh.mixers.scope import Place
from cp_mesh.mixers.tensors import Tensors, Wrap, to_local
from cp_mesh.sequence.sharded_sequence import ROOT

_APART = "sequence", "mask", "initial_state"


Decided = tuple[Pieces, tuple[Any, ...], Any]
"""What checks find: the pieces, what must be equal on all ranks, and what else they decide."""


def decide(
    check: Callable[..., Decided], what: str, place: Place, tensors: Tensors, options: Any
) -> tuple[Pieces, Group, Any, Tensors, Wrap]:
    """Check a call that is not known by ``check(what, place, options, local tensors)``, and compare a first call.

    Returns:
        The pieces, the group, what was decided, local tensors, and what makes DTensors of results.
    """
    slot, written, wrap, root = _slot_of(what, place, tensors, options), _written(place), Wrap(None), ROOT.get()
    if (known := next(iter(slot), None)) is not None:
        (name, decided, kind, told, before), (pieces, group, *given) = known[0], [x() for x in known[1]]
        same = pieces is not None and (group is None) == (place.sequence is None)
        same = same and before == written and all(map(is_, given, place[:3]))
        if not same or (root is not None and root.seq_len != pieces.seq_len):
            known = None
    if known is None:
        with refusing(place.group):
            states = options.get("output_final_state") or tensors.get("initial_state") is not None
            tensors, wrap = to_local(what, tensors, place.sequence, states)
            pieces, arguments, decided = check(what, place, options, tensors)
        name, group, layout = place.name, place.group, "" if place.sequence is None else place.sequence.layout.spec()
        kind = what, *arguments, layout, pieces.seq_len
        told = partial(_told, what, pieces.digest, kind)
        alive = [type(None) if x is None else weakref.ref(x) for x in (pieces, group, *place[:3])]
        slot[:] = [((name, decided, kind, told, written), alive)]
    if group is not None:
        compare(group, kind, told)
    return pieces, (len(pieces.shard_lens), name, what), decided, tensors, wrap


def _told(what: str, documents: str, kind: tuple[Any, ...]) -> dict[str, str]:
    """What a first call compares over the ranks."""
    return {"call": what, "documents": documents, "arguments": repr(kind)}


@lru_cache(maxsize=256, typed=True)
def _slot(*key: Any) -> list[Any]:
    """Of one call what it decided, and weak references to what it read; nothing yet."""
    return []


def _slot_of(what: str, place: Place, tensors: Tensors, options: Any) -> list[Any]:
    key: list[Any] = [what, *map(id, place[:3]), *place[3:]]
    for name, option in options.items():
        if name not in _APART:
            key += name, option
    for x in tensors.values():
        if x is None:
            key.append(None)
        elif type(x) not in PLAIN or x.is_nested or x.is_meta or in_transform():
            return []
        else:
            casts = torch.is_autocast_enabled(x.device.type)
            key += x.shape, x.dtype, x.layout, x.device, torch.get_autocast_dtype(x.device.type) if casts else None
    try:
        return _slot(*key)
    except TypeError:  # a keyword without a hash
        return []


def _written(place: Place) -> list[Any]:
    """How often the tensors of masks and layout were written; of tensors that they do not own, something new."""
    sequence, *masks = place[:3]
    read = [x for mask in masks if mask is not None for x in (mask.documents, mask.key_padding)]
    read.append(None if sequence is None else sequence.layout.tensor)
    return [x if x is None else times_written(x) if is_owned(x) else object() for x in read]
