"""Transports by name, and the choice for ``transport="auto"``, made once per group."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.distributed as dist

from cp_mesh.comm.contract import Copy, Swaps, Transport
from cp_mesh.comm.functional import FunctionalSwaps, FunctionalTransport
from cp_mesh.comm.symmetric_memory import (
    SymmetricSwaps,
    SymmetricTransport,
    release,
    symmetric_memory_bytes,
    unavailable,
)
from cp_mesh.errors import UnsupportedError
from cp_mesh.geometry.schedule import Schedule

__all__ = [
    "TRANSPORTS",
    "FunctionalTransport",
    "choose_transport",
    "make_swaps",
    "make_transport",
    "release",
    "symmetric_memory_bytes",
]


class Way(NamedTuple):
    """A way to move rows between ranks.

    Attributes:
        lacks: (group, device) -> why it does not work on these ranks, the same on all of them; None if it works.
        transport: (group, most rows of a rank, device, copy function) -> one pass of the ring or of all-gather.
        swaps: (group, device) -> the all-to-alls of one pass of Ulysses.
    """

    lacks: Callable[[dist.ProcessGroup, torch.device], str | None]
    transport: Callable[[dist.ProcessGroup, int, torch.device, Copy], Transport]
    swaps: Callable[[dist.ProcessGroup, torch.device], Swaps]


WAYS = {
    "functional": Way(
        lambda *_: None,
        lambda group, most_rows, device, copy: FunctionalTransport(group, copy),
        lambda group, device: FunctionalSwaps(group),
    ),
    "symmetric_memory": Way(lambda group, device: unavailable(group, device), SymmetricTransport, SymmetricSwaps),
}
"""By name; "auto" takes the last one that works."""
TRANSPORTS = ("auto", *WAYS)


def choose_transport(name: str, group: dist.ProcessGroup, device: torch.device) -> str:
    """Return the transport of a call over this group: the one asked for, or for "auto" the fastest that works.

    The first call over a group compares its ranks by a collective; the answer is kept with the group.

    Args:
        name: one of `TRANSPORTS`.
        group: the cp group.
        device: of the tensors.

    Raises:
        UnsupportedError: on every rank, if the named transport does not work.
    """
    if group.size() == 1:
        return "functional"
    for chosen in (*reversed(WAYS),) if name == "auto" else (name,):
        if (reason := WAYS[chosen].lacks(group, device)) is None:
            return chosen
    raise UnsupportedError(f"transport={name!r}: {reason}; transport='functional' works")


def make_transport(
    chosen: str, group: dist.ProcessGroup, schedule: Schedule, device: torch.device, copy: Copy
) -> Transport:
    """Make a transport for one pass; `choose_transport` has chosen it."""
    return WAYS[chosen].transport(group, max(schedule.shard_lens), device, copy)


def make_swaps(name: str, group: dist.ProcessGroup, seq_len: int, device: torch.device) -> Swaps:
    """Make the all-to-alls for one pass; see `choose_transport`. Without rows it asks for no transport."""
    return WAYS[choose_transport(name, group, device) if seq_len else "functional"].swaps(group, device)
