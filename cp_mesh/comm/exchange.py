"""Transports by name, and the choice for ``transport="auto"``, made once per group."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
import torch.distributed as dist

from cp_mesh.comm.functional import FunctionalTransport
from cp_mesh.comm.symmetric_memory import (
    SymmetricTransport,
    group_memory,
    release,
    symmetric_memory_bytes,
    unavailable,
)
from cp_mesh.errors import UnsupportedError

__all__ = ["TRANSPORTS", "choose_transport", "release", "symmetric_memory_bytes", "transport_maker"]

Transport = FunctionalTransport | SymmetricTransport
"""One pass of a group; see `cp_mesh.comm.contract`."""
MakeTransport = Callable[[dist.ProcessGroup], Transport]
TRANSPORTS = ("auto", "functional", "symmetric_memory")


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
    if name == "functional" or group.size() == 1:
        return "functional"
    if (reason := unavailable(group, device)) is None:
        return "symmetric_memory"
    if name == "auto":
        return "functional"
    raise UnsupportedError(f"transport={name!r}: {reason}; transport='functional' works")


def transport_maker(name: str, group: dist.ProcessGroup, device: torch.device) -> MakeTransport:
    """Return what makes the transport of a pass over this group, as `choose_transport` names it. It holds no group."""
    if choose_transport(name, group, device) == "functional":
        return FunctionalTransport
    return partial(SymmetricTransport, group_memory(group, device))
