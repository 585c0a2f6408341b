"""The methods: how rows move between ranks, and in which order tiles are computed. One file each."""

from cp_mesh.call.all_gather import ALL_GATHER
from cp_mesh.call.double_ring import DOUBLE_RING
from cp_mesh.call.hybrid import HYBRID
from cp_mesh.call.method import Method, Plan
from cp_mesh.call.ring import RING
from cp_mesh.call.spec import check_choice
from cp_mesh.call.ulysses import ULYSSES

METHODS: dict[str, Method] = {method.name: method for method in (RING, ALL_GATHER, ULYSSES, HYBRID, DOUBLE_RING)}


def choose_method(name: str) -> Method:
    """The method of a name; for "auto" the ring, until `cp_mesh.call.choose` has chosen.

    Raises:
        ArgumentError: for unknown names.
    """
    check_choice("method", name, ("auto", *METHODS), "ring")
    return METHODS["ring" if name == "auto" else name]


__all__ = ["METHODS", "Method", "Plan", "choose_method"]
