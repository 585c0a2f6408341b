"""How mistakes are listed, and set-ups in which they can be made."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from set_ups import Core, Net, SetUp, Training

MISTAKES: dict[str, type[Training]] = {}
GROUPS: dict[str, list[str]] = {}
RIGHT = "Right"


def made(group: str, name: str) -> Callable[[type[Training]], type[Training]]:
    """Lists a mistake under its group."""

    def listed(training: type[Training]) -> type[Training]:
        assert name not in MISTAKES, name
        MISTAKES[name] = training
        GROUPS.setdefault(group, []).append(name)
        return training

    return listed


def model(group: str, name: str, net: type[Net], **fields: Any) -> None:
    """Lists a mistake that is one of the model alone."""
    made(group, name)(type("OfModel", (Training,), {"Net": net, **fields}))


def core(group: str, name: str, kind: type[Core], of: Callable[[SetUp], bool], base: type[Training] = Training) -> None:
    """Lists a mistake that is one of the attention core alone."""
    fields = {"Net": type("Net", (Net,), {"Core": kind}), "of": staticmethod(of)}
    made(group, name)(type("OfCore", (base,), fields))


EAGER, ROOTLESS = SetUp(), SetUp(root=False)
BLOCKS, FSDP2 = SetUp(compiled="blocks"), SetUp(by="FSDP2", beside="dp")
DDP = SetUp(by="DDP", beside="dp")


def among(*set_ups: SetUp) -> Callable[[SetUp], bool]:
    """Set-ups that show it all; others would take minutes, or wait."""
    return staticmethod(lambda set_up: set_up in set_ups)  # type: ignore[return-value]


def dense(set_up: SetUp) -> bool:
    """Calls of `F.scaled_dot_product_attention` on whole sequences."""
    return not set_up.documents and not set_up.flex


def with_flex(set_up: SetUp) -> bool:
    return set_up.flex


def rootless(set_up: SetUp) -> bool:
    return not set_up.root


def rooted(set_up: SetUp) -> bool:
    return set_up.root


def with_logits(set_up: SetUp) -> bool:
    """The model returns logits, not what a head over tp computes them from."""
    return set_up.beside != "tp"


def unpiped(set_up: SetUp) -> bool:
    return set_up.beside != "pp"


def plain_logits(set_up: SetUp) -> bool:
    return with_logits(set_up) and unpiped(set_up)
