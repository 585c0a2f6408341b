"""The table of methods: how rows move between ranks, and in which order tiles are computed."""

from cp_mesh.call.method import Method, Plan
from cp_mesh.call.ring_loop import ALL_GATHER, RING
from cp_mesh.call.spec import check_choice
from cp_mesh.call.ulysses import HYBRID, ULYSSES

METHODS: dict[str, Method] = {method.name: method for method in (RING, ALL_GATHER, ULYSSES, HYBRID)}


def choose_method(name: str) -> Method:
    """The method with this name; for "auto" the ring, which supports every call.

    Raises:
        ArgumentError: for an unknown name.
    """
    check_choice("method", name, ("auto", *METHODS), "ring")
    return METHODS["ring" if name == "auto" else name]


__all__ = ["METHODS", "Method", "Plan", "choose_method"]
