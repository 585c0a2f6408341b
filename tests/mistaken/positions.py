"""Positions that are wrong."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, ClassVar

import torch
from model import C, D, rotate
from set_ups import B, Batch, Core, Net, S, Training, turns
from torch import Tensor, nn

from mistaken.batches import OtherLengths
from mistaken.listing import RIGHT, core, every, mistake, net, rooted, unpacked, unpiped

POSITIONS = "Positions"


def given(positions: Callable[[Training], Tensor | None]) -> Callable[[Training, Batch], dict[str, Any]]:
    """What the model is given, with other positions, or none."""

    def of_batch(self: Training, batch: Batch) -> dict[str, Any]:
        found = Training.given(self, batch) | {"positions": positions(self)}
        return {name: x for name, x in found.items() if x is not None}

    return of_batch


def without_positions(self: Training) -> dict[str, Any]:
    return Training.root_options(self) | {"positions": None}


def from_0(self: Training) -> Tensor:
    return torch.arange(S // 2) if unpiped(self.set_up) else torch.arange(S // 2).expand(B, -1)


# Counted by the model from 0, as the caller leaves them out and the root supplies none.
mistake(
    POSITIONS, "positions that nobody gives", unpacked,
    root_options=without_positions, given=given(lambda self: None),
)  # fmt: skip
mistake(POSITIONS, "positions counted from 0 by the caller", unpacked, given=given(from_0))


class Short(Net):
    def extend(self) -> None:
        self.table = nn.Embedding(21, C)

    def embed(self, tokens: Tensor, positions: Tensor | None) -> Tensor:
        return self.embedding(tokens) + self.table(torch.arange(tokens.shape[1]) if positions is None else positions)


padded: dict[str, Any] = {"length": 21, "batch": Training.batch}
mistake(
    POSITIONS, "a table of positions too short for padding", "", OtherLengths, Net=Short, slow=("probe", "verify"),
    **padded,
)  # fmt: skip


class Counting(Net):
    """Its forward takes no positions: it counts them, from 0 in each shard."""

    def forward(self, tokens: Tensor, documents: Tensor | None = None) -> Tensor:
        return self.compute(tokens, None, documents)

    def extend(self) -> None:
        self.table, self.parameter = nn.Embedding(64, C), nn.Parameter(torch.zeros(1, 64, C))
        self.register_buffer("ids", torch.arange(64)[None], persistent=False)
        self.register_buffer("turns", turns(torch.arange(64)), persistent=False)
        unused = {"table", "parameter"} - {self.uses}
        for name in unused:
            delattr(self, name)

    uses: ClassVar[str] = ""


def unturned(net: Net, x: Tensor, positions: Tensor | None) -> Tensor:
    return torch.stack((torch.ones(1, D // 2), torch.zeros(1, D // 2)))


def counting(name: str, uses: str, **parts: Callable[..., Any]) -> None:
    """Lists a model that counts its positions: as a learned table, of which each rank then reads the same rows."""
    mistake(POSITIONS, name, Net=net(Counting, uses=uses, **parts), positioned=False)


def learned(name: str, read: Callable[[Any, Tensor], Tensor], uses: str = "table") -> None:
    def embed(self: Any, tokens: Tensor, positions: Tensor | None) -> Tensor:
        return self.embedding(tokens) + read(self, tokens)

    counting(name, uses, embed=embed, rope=unturned)


learned("counted: learned, arange", lambda net, x: net.table(torch.arange(x.shape[1])))
learned("counted: learned, a buffer of ids", lambda net, x: net.table(net.ids[:, : x.shape[1]]))
learned("counted: learned, its weight sliced", lambda net, x: net.table.weight[: x.shape[1]])
learned("counted: learned, a parameter sliced", lambda net, x: net.parameter[:, : x.shape[1]], "parameter")
learned("counted: learned, cumsum", lambda net, x: net.table(torch.ones_like(x).cumsum(1) - 1))
learned(
    "counted: learned, linspace", lambda net, x: net.table(torch.linspace(0, x.shape[1] - 1, x.shape[1]).round().int())
)
learned("counted: learned, a range of Python", lambda net, x: net.table(torch.tensor([*range(x.shape[1])])))
counting("counted: rotary, arange", "", rope=lambda self, x, positions: turns(torch.arange(x.shape[1])))
counting("counted: rotary, a table sliced", "", rope=lambda self, x, positions: self.turns[:, : x.shape[1]])


class TurningCore(Core):
    """Turns q and k itself; a subclass says by what."""

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self.register_buffer("turns", turns(torch.arange(64)), persistent=False)
        self.kept: dict[int, Tensor] = {}

    def attend(self, q: Tensor, k: Tensor, v: Tensor, documents: Tensor | None = None) -> Tensor:
        return super().attend(self.turned(q), self.turned(k), v, documents)

    def turned(self, x: Tensor) -> Tensor:
        return rotate(x, self.rope(x.shape[2]))

    def rope(self, rows: int) -> Tensor:
        raise NotImplementedError


def turning(name: str, **parts: Callable[..., Any]) -> None:
    counting(name, "", Core=type("Core", (TurningCore,), parts), rope=unturned)


def _kept(core: Any, rows: int) -> Tensor:
    if rows not in core.kept:
        core.kept[rows] = turns(torch.arange(rows))
    return core.kept[rows]


def _complex(core: Any, x: Tensor) -> Tensor:
    table = torch.complex(*core.turns.float())[: x.shape[2]]
    return torch.view_as_real(torch.view_as_complex(x.unflatten(-1, (-1, 2))) * table).flatten(-2)


turning("counted: in the core, a table sliced", rope=lambda core, rows: core.turns[:, :rows])
turning("counted: in the core, arange", rope=lambda core, rows: turns(torch.arange(rows)))
turning("counted: in the core, kept by length", rope=_kept)
turning("counted: in the core, narrow", rope=lambda core, rows: core.turns.narrow(1, 0, rows))
turning("counted: in the core, complex", turned=_complex)


class Ignoring(Net):
    def extend(self) -> None:
        self.register_buffer("turns", turns(torch.arange(64)), persistent=False)

    def rope(self, x: Tensor, positions: Tensor) -> Tensor:
        return self.turns[:, : positions.shape[-1]]


mistake(POSITIONS, "positions taken and ignored", Net=Ignoring)
# As that of dynamic NTK does.
by_largest = net(rope=lambda self, x, positions: turns(positions, 0.3 / (1 + positions.max() / 8.0)))
mistake(POSITIONS, "a base from the largest position", Net=by_largest)
by_length = net(rope=lambda self, x, positions: turns(positions, 0.3 / (1 + positions.shape[-1] / 8.0)))
mistake(POSITIONS, "a base from the number of rows", Net=by_length)


class Logarithmic(Core):
    def attend(self, q: Tensor, k: Tensor, v: Tensor, documents: Tensor | None = None) -> Tensor:
        return super().attend(q * math.log(q.shape[2]), k, v, documents)


core(POSITIONS, "a scale from the number of rows", Logarithmic)
whole = every(rooted, unpacked, unpiped)
unnamed: dict[str, Any] = {"root_options": without_positions}
shards = given(lambda self: torch.arange(S // 2))
mistake(POSITIONS, "positions of a shard to a root without any", whole, given=shards, **unnamed)
turning("counted: in the core, a slice of a view", rope=lambda core, rows: core.turns[None, :, :rows][0])
turning("counted: in the core, a table cut in two steps", rope=lambda core, rows: core.turns[:, : 2 * rows][:, :rows])
mistake(RIGHT, "positions that the caller gives", whole, given=given(lambda self: torch.arange(S)))
rows = given(lambda self: self.sequence.positions(S))
mistake(RIGHT, "positions of its rows to a root without any", whole, given=rows, **unnamed)


class LongEnough(Short):
    def extend(self) -> None:
        self.table = nn.Embedding(24, C)


mistake(RIGHT, "a table of positions as long as the padding", "", OtherLengths, Net=LongEnough, **padded)
