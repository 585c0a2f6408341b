"""Refusals by room: each bad input raises on every rank, in words that help, before the first collective.

A row is a name, the class of the error, words that its message must have, between bars, and the call.
"""

from importlib import import_module

from refusals.calls import Cases

ROOMS = ("tensors", "masks", "options", "placements", "sequences", "styles", "linears", "models", "written")
CASES: Cases = {}
for room in ROOMS:
    found: Cases = import_module(f"refusals.{room}").CASES
    assert not CASES.keys() & found.keys(), CASES.keys() & found.keys()
    CASES |= found
