"""Functions that are known again: only where all that they can depend on is as it was."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from flex_uses import MASKS, SCORES
from inside import room, trace
from torch import Tensor, are_deterministic_algorithms_enabled, nn
from torch.nn.functional import logsigmoid

tracing = room("trace")

Q = torch.zeros(1)
Change = tuple[Callable[[], Any], Callable[[], None]]


def traces(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What is traced from now on."""
    seen = list[str]()
    recorder = tracing._Recorder

    def note(what: str, *args: Any) -> Any:
        seen.append(what)
        return recorder(what, *args)

    monkeypatch.setattr(tracing, "_Recorder", note)
    monkeypatch.setattr(tracing, "_known", type(tracing._known)())
    return seen


@pytest.mark.parametrize(("what", "name"), [("score_mod", x) for x in SCORES] + [("mask_mod", x) for x in MASKS])
def test_the_same_is_found_for_other_tensors(what: str, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    use = (SCORES if what == "score_mod" else MASKS)[name]
    seen = traces(monkeypatch)
    found, tensors = [], []
    for _ in range(2):
        given = {key: x.clone() for key, x in use.tensors(2, 4, 16).items()}
        tensors.append(list(given.values()))
        found.append(trace(what, use.make(given), Q))
    (first, read), (second, others) = found
    if first is None:
        return
    assert first is second
    places = [
        [next(i for i, y in enumerate(of) if y is x) for x in each]
        for of, each in zip(tensors, (read, others), strict=True)
    ]
    assert places[0] == places[1], "each reads its own"
    assert len(seen) in (1, 2)


def biased(x: Tensor, scale: Any = 1.0, *, shift: Any = 0) -> Callable[..., Tensor]:
    def inner(h: Tensor, j: Tensor) -> Tensor:
        return logsigmoid(x[h, j]) * scale

    return lambda s, b, h, i, j: torch.tanh(s) * math.pi + inner(h, j) + shift


CAP: Any = 20.0
OTHER = torch.zeros(4, 8)


def capped(s: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
    return CAP * torch.tanh(s / CAP)


def of_object(x: Any, change: Callable[[Any], None]) -> Change:
    return lambda: lambda s, b, h, i, j: s * x.scale, lambda: change(x)


def of_attribute() -> Change:
    x = torch.zeros(4)
    x.cap = 1.0  # type: ignore[attr-defined]
    return lambda: lambda s, b, h, i, j: s * x.cap + x[h], lambda: setattr(x, "cap", 2.0)  # type: ignore[attr-defined]


def of_module() -> Change:
    module = nn.Module()
    module.scale = 1.0  # type: ignore[assignment]
    return of_object(module, lambda x: setattr(x, "scale", 2.0))


def of_state() -> Change:
    def score_mod(s: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return s * (2 if torch.are_deterministic_algorithms_enabled() else 1)

    return lambda: score_mod, lambda: torch.use_deterministic_algorithms(True)


def of_imported_state() -> Change:
    def score_mod(s: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return s * (2 if are_deterministic_algorithms_enabled() else 1)

    return lambda: score_mod, lambda: torch.use_deterministic_algorithms(True)


def of_import() -> Change:
    def score_mod(s: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        from test_reached import CAP

        return s * CAP

    return lambda: score_mod, lambda: globals().__setitem__("CAP", 30.0)


def of_default() -> Change:
    def score_mod(s: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor, *, by: Any = 1.0) -> Tensor:
        return s * by

    return lambda: score_mod, lambda: score_mod.__kwdefaults__.update(by=2.0)


def of_partial() -> Change:
    given = partial(of_default()[0](), by=0.5)
    return lambda: given, lambda: given.keywords.update(by=4.5)


def of_parameter() -> Change:
    module = nn.Linear(5, 5)
    replaced = nn.Parameter(module.weight + 1)
    return lambda: lambda s, b, h, i, j: s + module.weight[i, j], lambda: setattr(module, "weight", replaced)


CHANGES: dict[str, Callable[[], Change]] = {
    "an argument of a partial": of_partial,
    "a parameter that is replaced": of_parameter,
    "an object": lambda: of_object(SimpleNamespace(scale=1.0), lambda x: setattr(x, "scale", 2.0)),
    "a module": of_module,
    "an attribute of a tensor": of_attribute,
    "a state of torch": of_state,
    "a state that was imported": of_imported_state,
    "an import": of_import,
    "a default": of_default,
    "a global": lambda: (lambda: capped, lambda: globals().__setitem__("CAP", 30.0)),
}


@pytest.mark.parametrize("name", CHANGES)
def test_what_changed_is_seen(name: str) -> None:
    make, change = CHANGES[name]()
    pair, values = (torch.tensor(0.7), *map(torch.tensor, (0, 1, 2, 3))), list[Tensor]()
    try:
        for step in range(2):
            if step:
                change()
            function, captured = trace("score_mod", make(), Q)
            assert function is not None
            values.append(function.graph(*pair, *captured))
            assert torch.equal(values[-1], make()(*pair))
    finally:
        globals()["CAP"] = 20.0
        torch.use_deterministic_algorithms(False)
    assert not torch.equal(*values)


def test_a_gradient_is_that_of_now() -> None:
    """Though the tensor that it was before is reached too."""
    x, before = torch.zeros(4, requires_grad=True), torch.ones(4)
    for grad in (before, torch.ones(4)):
        x.grad = grad
        _, read = trace("score_mod", lambda s, b, h, i, j: s + x.grad[h] * before[j], Q)  # type: ignore[index]
        assert read[0] is grad


def added(x: Tensor, y: Tensor) -> Callable[..., Tensor]:
    return lambda s, b, h, i, j: s + x[h, i] * y[h, j]


APART = {
    "-0": (biased(OTHER, 0.0), biased(OTHER, -0.0)),
    "a float": (biased(OTHER, 1), biased(OTHER, 1.0)),
    "a bool": (biased(OTHER, 1), biased(OTHER, True)),
    "a number": (biased(OTHER, 2.0), biased(OTHER, 3.0)),
    "a dtype": (biased(OTHER), biased(OTHER.double())),
    "strides": (biased(OTHER), biased(torch.zeros(8, 4).mT)),
    "a shape": (biased(OTHER), biased(OTHER[:2])),
    "a parameter": (biased(OTHER), biased(nn.Parameter(OTHER))),
    "twice the same": (added(OTHER, OTHER), added(OTHER, OTHER.clone())),
}


@pytest.mark.parametrize("name", APART)
def test_what_is_told_apart(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = traces(monkeypatch)
    for function in (*APART[name], APART[name][0]):
        trace("score_mod", function, Q)
    assert len(seen) == 2


def test_what_else_a_trace_depends_on(monkeypatch: pytest.MonkeyPatch) -> None:
    seen, score = traces(monkeypatch), biased(OTHER)
    trace("score_mod", score, Q)
    trace("score_mod", score, Q.double())
    trace("score_mod", score, Q, 5)
    with torch.autocast("cpu", torch.bfloat16):
        trace("score_mod", score, Q)
    torch.set_default_dtype(torch.float64)
    try:
        trace("score_mod", score, Q)
    finally:
        torch.set_default_dtype(torch.float32)
    with torch.device("cpu"):  # a mode that is not of this library
        trace("score_mod", score, Q)
    assert len(seen) == 6
    trace("score_mod", score, Q)
    assert len(seen) == 6
