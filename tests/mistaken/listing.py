"""How mistakes are listed, and set-ups in which they can be made."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from set_ups import SET_UPS, Core, Net, SetUp, Training

MISTAKES: dict[str, type[Training]] = {}
GROUPS: dict[str, list[str]] = {}
RIGHT = "Right"
Where = Callable[[SetUp], bool] | str
"""Set-ups in which a mistake can be made; names of those that show it all, as others would take minutes, or wait."""


def made(group: str, name: str, of: Where = "") -> Callable[[type[Training]], type[Training]]:
    """Lists a mistake under its group; ``of`` where it can be made, if not where its base can."""

    def listed(training: type[Training]) -> type[Training]:
        assert name not in MISTAKES, name
        if of:
            training.of = staticmethod(among(of) if isinstance(of, str) else of)  # type: ignore
        MISTAKES[name] = training
        GROUPS.setdefault(group, []).append(name)
        return training

    return listed


def mistake(group: str, name: str, of: Where = "", *bases: type[Training], **parts: Any) -> type[Training]:
    """Lists a mistake that has these parts, and all others of its bases, or of what is right."""
    return made(group, name, of)(type("Mistake", bases or (Training,), parts))


def core(group: str, name: str, kind: type[Core], of: Where = "", **parts: Any) -> None:
    """Lists a mistake that is one of the attention core."""
    mistake(group, name, of, Net=net(Core=kind), **parts)


def net(base: type[Net] = Net, **parts: Any) -> type[Net]:
    """A model that has these parts."""
    return type("Net", (base,), parts)


def among(names: str) -> Callable[[SetUp], bool]:
    chosen = [SET_UPS[name] for name in names.split(", ")]
    return lambda set_up: set_up in chosen


few = "eager, cores"


def every(*conditions: Callable[[SetUp], bool]) -> Callable[[SetUp], bool]:
    return lambda set_up: all(condition(set_up) for condition in conditions)


def dense(set_up: SetUp) -> bool:
    """Calls of `F.scaled_dot_product_attention` on whole sequences."""
    return not set_up.documents and not set_up.flex


def rooted(set_up: SetUp) -> bool:
    return set_up.root


def rootless(set_up: SetUp) -> bool:
    return not set_up.root


def unpacked(set_up: SetUp) -> bool:
    return not set_up.documents


def over_tp(set_up: SetUp) -> bool:
    return set_up.beside == "tp"


def with_logits(set_up: SetUp) -> bool:
    """The model returns logits, not what a head over tp computes them from."""
    return set_up.beside != "tp"


def piped(set_up: SetUp) -> bool:
    return set_up.beside == "pp"


def unpiped(set_up: SetUp) -> bool:
    return set_up.beside != "pp"


plain_logits = every(with_logits, unpiped)


def by_hand(set_up: SetUp) -> bool:
    return set_up.by == "hand"
