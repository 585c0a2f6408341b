"""Positions that are wrong."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, ClassVar

import torch
from model import C, D, rotate
from set_ups import B, Batch, Core, Net, S, SetUp, Training, turns
from torch import Tensor, nn

from mistaken.batches import OtherLengths
from mistaken.listing import (
    RIGHT,
    made,
    model,
    rooted,
    unpiped,
)

POSITIONS = "Positions"


@made(POSITIONS, "positions that nobody gives")
class NoPositions(Training):
    """Counted by the model from 0, as the caller leaves them out and the root supplies none."""

    @classmethod
    def of(cls, set_up: SetUp) -> bool:
        return not set_up.documents

    def root_options(self) -> dict[str, Any]:
        return super().root_options() | {"positions": None}

    def given(self, batch: Batch) -> dict[str, Any]:
        given = super().given(batch)
        given.pop("positions", None)
        return given


@made(POSITIONS, "positions counted from 0 by the caller")
class CountedPositions(Training):
    @classmethod
    def of(cls, set_up: SetUp) -> bool:
        return not set_up.documents

    def given(self, batch: Batch) -> dict[str, Any]:
        positions = torch.arange(S // 2)
        return super().given(batch) | {"positions": positions if unpiped(self.set_up) else positions.expand(B, -1)}


class Short(Net):
    def extend(self) -> None:
        self.table = nn.Embedding(21, C)

    def embed(self, tokens: Tensor, positions: Tensor | None) -> Tensor:
        return self.embedding(tokens) + self.table(torch.arange(tokens.shape[1]) if positions is None else positions)


made(POSITIONS, "a table of positions too short for padding")(
    type("OfModel", (OtherLengths,), {"Net": Short, "length": 21, "batch": Training.batch, "slow": ("probe", "verify")})
)


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
    fields = {"uses": uses, **parts}
    model(POSITIONS, name, type("Net", (Counting,), fields), positioned=False)


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
    core = type("Core", (TurningCore,), parts)
    counting(name, "", Core=core, rope=unturned)


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


model(POSITIONS, "positions taken and ignored", Ignoring)


class Largest(Net):
    """Its base depends on the largest position, as that of dynamic NTK does."""

    def rope(self, x: Tensor, positions: Tensor) -> Tensor:
        return turns(positions, 0.3 / (1 + positions.max() / 8.0))


model(POSITIONS, "a base from the largest position", Largest)


class ByLength(Net):
    def rope(self, x: Tensor, positions: Tensor) -> Tensor:
        return turns(positions, 0.3 / (1 + positions.shape[-1] / 8.0))


model(POSITIONS, "a base from the number of rows", ByLength)


class Logarithmic(Core):
    def attend(self, q: Tensor, k: Tensor, v: Tensor, documents: Tensor | None = None) -> Tensor:
        return super().attend(q * math.log(q.shape[2]), k, v, documents)


model(POSITIONS, "a scale from the number of rows", type("Net", (Net,), {"Core": Logarithmic}))


@made(POSITIONS, "positions of a shard to a root without any")
class ShardedPositions(NoPositions):
    of = staticmethod(lambda set_up: rooted(set_up) and not set_up.documents and unpiped(set_up))

    def given(self, batch: Batch) -> dict[str, Any]:
        return super().given(batch) | {"positions": torch.arange(S // 2)}


turning("counted: in the core, a slice of a view", rope=lambda core, rows: core.turns[None, :, :rows][0])
turning("counted: in the core, a table cut in two steps", rope=lambda core, rows: core.turns[:, : 2 * rows][:, :rows])


@made(RIGHT, "positions that the caller gives")
class GivenPositions(Training):
    @classmethod
    def of(cls, set_up: SetUp) -> bool:
        return rooted(set_up) and not set_up.documents and unpiped(set_up)

    def given(self, batch: Batch) -> dict[str, Any]:
        return super().given(batch) | {"positions": torch.arange(S)}


@made(RIGHT, "positions of its rows to a root without any")
class OwnPositions(ShardedPositions):
    def given(self, batch: Batch) -> dict[str, Any]:
        return super().given(batch) | {"positions": self.sequence.positions(S)}


class LongEnough(Short):
    def extend(self) -> None:
        self.table = nn.Embedding(24, C)


made(RIGHT, "a table of positions as long as the padding")(
    type("OfModel", (OtherLengths,), {"Net": LongEnough, "length": 21, "batch": Training.batch})
)
