"""The one door to the inside of cp_mesh: what tests need beside the public names, and nothing else imports it.

A room here is one file of the package, named by as much of the end of its path as tells it from the others: "op",
"call.plan". Where it moves, no test changes; where it is renamed, its name changes in the tests of that room.

`NAMES` are what several tests need: they come from here, as ``from inside import make_schedule``. What the tests of
one room need of it goes through `inner` and `room`.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

import cp_mesh

SOURCES = str(Path(cp_mesh.__file__).parent)
"""The folder of our own functions."""

NAMES: dict[str, tuple[str, ...]] = {
    "block_table": ("block_table", "pieces_of"),
    "spec": ("Call", "NUM_TENSORS", "Operand", "AttentionSpec", "Tensors", "make_scores"),
    "combine": ("make_delta",),
    "decoding": ("UNUSED", "without_unused"),
    "dense": ("dense_attention",),
    "reads": ("Reads",),
    "wrap": ("replaced",),
    "functions": ("ScalarFunction",),
    "group_state": ("state_of", "states_of_all"),
    "table": ("KERNELS",),
    "kernels.contract": ("Capability", "KernelTile", "Pairs", "Request", "shortfalls"),
    "layouts": ("parse_layout",),
    "_names": ("homes",),
    "mask": ("Band", "CAUSAL", "FULL", "NONE"),
    "memory": ("ExtraMemory", "Sizes", "extra_memory"),
    "merge": ("BackwardTile", "Kernel", "MergingForward", "SummingBackward"),
    "method": ("Backward", "Plan"),
    "op": ("attention_op",),
    "packing": ("Packing",),
    "call.plan": ("METHODS", "make_plan"),
    "layout": ("Index",),
    "report": ("Finding", "ModelReport"),
    "schedule": ("Schedule", "Stage", "make_schedule", "num_rows", "split_causal", "tiles_of"),
    "scores": ("Scores", "name_of_captured"),
    "varlen": ("Segments",),
    "ring_loop": ("StageSettings", "travels_rounded"),
    "trace": ("trace",),
    "triton_attention": ("Blocks", "Config", "TRITON", "triton_kernel"),
}
"""By room."""


def __getattr__(name: str) -> Any:
    """Looked up each time, as it may have been bound anew by a planted bug."""
    for home, names in NAMES.items():
        if name in names:
            return inner(home, name)
    raise AttributeError(name)


@cache
def _paths() -> tuple[str, ...]:
    folder = Path(SOURCES)
    files = (file.relative_to(folder.parent).with_suffix("") for file in sorted(folder.rglob("*.py")))
    return tuple(".".join(file.parts).removesuffix(".__init__") for file in files)


def path_of(room: str) -> str:
    """The dotted path of a room; one of exactly this path goes before those that end in it."""
    exact = f"cp_mesh.{room}"
    found = [exact] if exact in _paths() else [path for path in _paths() if path.endswith(f".{room}")]
    if len(found) != 1:
        raise ModuleNotFoundError(f"expected one room named {room}, got {found}")
    return found[0]


def room(name: str) -> ModuleType:
    """The module, as `path_of` finds it."""
    return import_module(path_of(name))


def inner(name: str, *things: str) -> Any:
    """What a room calls so; of several a tuple."""
    found = tuple(getattr(room(name), thing) for thing in things)
    return found if len(things) > 1 else found[0]


@dataclass(frozen=True)
class Distances:
    """Pairs of local indices with ``lo <= i - j <= hi``; None is unbounded. So tests say which pairs a band allows."""

    lo: int | None = None
    hi: int | None = None

    @classmethod
    def of(cls, band: Any, num_q: int, num_k: int) -> Distances:
        """What a band means in a tile of so many rows and keys."""
        first = num_k - num_q
        lo, hi = (
            (None if band.right is None else -band.right - first),
            (None if band.left is None else band.left - first),
        )
        return cls(lo, hi)

    def band(self, num_q: int, num_k: int) -> Any:
        """The cover of a tile that means this."""
        first = num_k - num_q
        left, right = (None if self.hi is None else self.hi + first), (None if self.lo is None else -self.lo - first)
        return inner("mask", "Band")(left, right)

    def pairs(self, num_q: int, num_k: int) -> torch.Tensor:
        """bool [num_q, num_k]."""
        distance = torch.arange(num_q)[:, None] - torch.arange(num_k)
        keep = torch.ones_like(distance, dtype=torch.bool)
        if self.lo is not None:
            keep &= distance >= self.lo
        if self.hi is not None:
            keep &= distance <= self.hi
        return keep


METHOD_NAMES = tuple(inner("call.plan", "METHODS"))


def tiles_by_source(schedule: Any) -> tuple[tuple[Any, ...], ...]:
    """Tiles by source rank, [cp_size], as they would be without stages."""
    tiles_of, of_group = inner("schedule", "tiles_of", "of_group")
    by_documents = "segments" in schedule.covers
    return tuple(tiles_of(of_group(schedule.blocks, source), by_documents) for source in range(schedule.cp_size))
