"""The methods: how rows move between ranks, and in which order tiles are computed. One file each."""

from cp_mesh.call import check_choice
from cp_mesh.methods.all_gather import ALL_GATHER
from cp_mesh.methods.contract import Method, Plan
from cp_mesh.methods.double_ring import DOUBLE_RING
from cp_mesh.methods.hybrid import HYBRID
from cp_mesh.methods.ring import RING
from cp_mesh.methods.ulysses import ULYSSES

METHODS: dict[str, Method] = {method.name: method for method in (RING, ALL_GATHER, ULYSSES, HYBRID, DOUBLE_RING)}


def choose_method(name: str) -> Method:
    """The method of a name; for "auto" the ring, until `cp_mesh.choosing` has chosen.

    Raises:
        ArgumentError: for unknown names.
    """
    check_choice("method", name, ("auto", *METHODS), "ring")
    return METHODS["ring" if name == "auto" else name]


__all__ = ["METHODS", "Method", "Plan", "choose_method"]
