"""The table of methods: how rows move between ranks, and in which order tiles are computed."""

from collections.abc import Callable
from importlib import import_module
from typing import Any

from cp_mesh.call.method import Method, Plan
from cp_mesh.call.ring_loop import ALL_GATHER, RING, backward_by_stages, forward_by_stages, settle
from cp_mesh.call.spec import check_choice
from cp_mesh.call.ulysses import HYBRID, ULYSSES


def _of_hosts(name: str) -> Callable[..., Any]:
    """A function of `cp_mesh.hosts.double_ring`; its first call loads that file."""
    return lambda *given, **named: getattr(import_module("cp_mesh.hosts.double_ring"), name)(*given, **named)


DOUBLE_RING = Method(
    "double_ring", _of_hosts("choose_degree"), _of_hosts("make_schedule"), settle, forward_by_stages,
    backward_by_stages, degree_option="inner_ring_size", open_transport=_of_hosts("open_transport"),
)  # fmt: skip
METHODS: dict[str, Method] = {method.name: method for method in (RING, ALL_GATHER, ULYSSES, HYBRID, DOUBLE_RING)}


def choose_method(name: str) -> Method:
    """The method with this name; for "auto" the ring, which supports every call.

    Raises:
        ArgumentError: for an unknown name.
    """
    check_choice("method", name, ("auto", *METHODS), "ring")
    return METHODS["ring" if name == "auto" else name]


__all__ = ["METHODS", "Method", "Plan", "choose_method"]
