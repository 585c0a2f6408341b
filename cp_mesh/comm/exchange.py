"""Transports by name, and the choice that ``transport="auto"`` makes, once a group."""

from __future__ import annotations

import torch
import torch.distributed as dist

from cp_mesh.comm.contract import Copy, Swaps, Transport
from cp_mesh.comm.functional import FunctionalSwaps, FunctionalTransport
from cp_mesh.comm.shards import FunctionalMoves, Moves, Shards
from cp_mesh.comm.symmetric_memory import (
    SymmetricSwaps,
    SymmetricTransport,
    release,
    symmetric_memory_bytes,
    unavailable,
)
from cp_mesh.comm.symmetric_shards import SymmetricMoves
from cp_mesh.errors import UnsupportedError
from cp_mesh.geometry.schedule import Schedule

__all__ = [
    "TRANSPORTS",
    "FunctionalTransport",
    "choose_transport",
    "make_moves",
    "make_swaps",
    "make_transport",
    "release",
    "symmetric_memory_bytes",
]

TRANSPORTS = ("auto", "functional", "symmetric_memory")


def choose_transport(name: str, group: dist.ProcessGroup, device: torch.device) -> str:
    """The transport that a call over this group uses: the one asked for, or for "auto" the fastest that works.

    The first call over a group compares its ranks, which is a collective; the answer is kept with the group.

    Args:
        name: "auto", "functional" or "symmetric_memory".
        group: the cp group.
        device: of the tensors.

    Raises:
        UnsupportedError: if symmetric memory is asked for where it does not work, on every rank alike.
    """
    if name == "functional" or group.size() == 1:
        return "functional"
    reason = unavailable(group, device)
    if reason is None:
        return "symmetric_memory"
    if name == "symmetric_memory":
        raise UnsupportedError(f"transport='symmetric_memory': {reason}; transport='functional' works")
    return "functional"


def make_transport(
    chosen: str, group: dist.ProcessGroup, schedule: Schedule, device: torch.device, copy: Copy
) -> Transport:
    """A transport for one pass, that `choose_transport` has chosen."""
    if chosen == "symmetric_memory":
        return SymmetricTransport(group, max(schedule.shard_lens), device, copy)
    return FunctionalTransport(group, copy)


def make_swaps(name: str, group: dist.ProcessGroup, seq_len: int, device: torch.device) -> Swaps:
    """All-to-alls for one pass; see `choose_transport`. Where there is no row, nothing is asked."""
    if seq_len and choose_transport(name, group, device) == "symmetric_memory":
        return SymmetricSwaps(group, device)
    return FunctionalSwaps(group)


def make_moves(chosen: str, shards: Shards, device: torch.device) -> Moves:
    """One pass of rows over tp, of equal shards, by a transport that `choose_transport` has chosen."""
    return SymmetricMoves(shards, device) if chosen == "symmetric_memory" else FunctionalMoves(shards)
