"""Integers that users' functions compute, of random expressions: in 32-bit indices, in the reference, in Python; and
the bounds that are known of them."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from inside import Reads, inner, trace
from torch import Tensor

bounds_of = inner("bounds", "bounds_of")

FAR, PRIME = 2**20 - 1, 1000003
CAPTURED = {
    "far": torch.tensor(2**33 + 5),
    "bytes": torch.arange(8, dtype=torch.uint8) * 31,
    "signed": (torch.arange(8) * 37 - 128).to(torch.int8),
    "of_32": torch.arange(-(2**31), 2**31, 2**29, dtype=torch.int32),
    "of_64": torch.arange(-(2**31), 2**31, 2**29),
}
NUMBERS = (0, 1, 2, 3, 7, 127, 4096, 2**20, 2**31 - 1, 2**33, -1, -3)
LEAVES = ("i", "j", "h", "b", "(i - j)", "of_32[i & 7]", "of_64[j & 7]", "far")
FORMS = (  # of two parts, tensors, and a number
    *("({x} + {y})", "({x} - {y})", "({x} * {y})", "({x} + {n})", "({n} - {x})", "({x} * {n})"),
    *("({x} // {d})", "({x} % {m})", "({x} << {s})", "({x} >> {s})", "({x} ** {p})", "({x} & {n})", "({x} ^ {y})"),
    *("({x} | {y})", "(~{x})", "(-{x})", "{x}.abs()", "torch.sign({x})", "torch.minimum({x}, {y})"),
    *("torch.div({x}, {d}, rounding_mode='floor')", "torch.div({x}, {d}, rounding_mode='trunc')"),
    *("torch.where(i >= j, {x}, {y})", "(({x} >= {y}) * {x})", "{x}.clamp(-5, {n})", "torch.full_like({x}, {n})"),
    *("{x}.to(torch.int32)", "{x}.long()", "(bytes[{x} & 7] > {n}).long()", "(signed[{x} & 7] < {n}).long()"),
    *("(bytes[{x} & 7] + {p}).long()", "(bytes[{x} & 7].to(torch.int8) & 15).mul(16).long()", "{x}.clamp(6, -{p})"),
    *("(({x} & 255) / 3 % {m} * 7).long()", "torch.sub({x}, {y}, alpha=3)", "torch.zeros_like({x})"),
)


def expression(draw: random.Random, depth: int) -> str:
    if not depth or draw.random() < 0.12:
        return draw.choice(LEAVES)
    x, y = (expression(draw, depth - 1) for _ in range(2))
    # not by -1: of the least integer PyTorch ends the process on CPUs
    n, d, m = draw.choice(NUMBERS), draw.choice((1, 2, 3, 7, -4)), draw.choice((1, 2, 3, 7, 97))
    return draw.choice(FORMS).format(x=x, y=y, n=n, d=d, m=m, s=draw.choice((0, 1, 5, 12, 30)), p=draw.randrange(5))


class Bounded(torch.fx.Interpreter):
    """Runs the graph of a function, and asserts that no integer is beyond its bounds."""

    bounds: dict[torch.fx.Node, tuple[int, int] | None]

    def run_node(self, n: torch.fx.Node) -> Any:
        result = super().run_node(n)
        if (bounds := self.bounds[n]) is not None:
            assert bounds[0] <= result <= bounds[1], n
        return result


def differs(index: Callable[..., Tensor], draw: random.Random) -> bool:
    """Whether for some pair the function is another one in a kernel's 32 bits, or in the reference, than in Python."""

    def score_mod(score: Tensor, *indices: Tensor) -> Tensor:
        return score + index(*indices) % PRIME

    zero = torch.zeros((), dtype=torch.float64)
    try:
        score_mod(zero, *map(torch.tensor, (0, 0, 0, 0)))
    except RuntimeError:  # a number of 64 bits beside a tensor of 32
        return False
    function, captured = trace("score_mod", score_mod, torch.zeros(1).double())
    assert function is not None
    reads, running = Reads.of(function, FAR + 1), Bounded(function.graph)
    indices = running.graph.find_nodes(op="placeholder")[1:5]
    running.bounds = bounds_of(running.graph, dict(zip(indices, ((0, 2), (0, 3), (0, FAR), (0, FAR)), strict=True)))
    some = draw.randrange(FAR), draw.randrange(FAR)
    for pair in ((1, 3, FAR, FAR - 1), (0, 0, 0, 0), (0, 1, 5, FAR), (2, 2, FAR, 0), (1, 0, *some)):
        want = score_mod(zero, *map(torch.tensor, pair))
        assert running.run(zero, *map(torch.tensor, pair), *captured) == want
        of_32 = (torch.tensor(n, dtype=torch.int32) for n in pair)
        found = torch.fx.Interpreter(reads.graph).run(zero, *of_32, *reads.of_captured(captured))
        (b, h, i, j) = (torch.tensor([n, n]) for n in pair)
        reference = function.of_pairs(torch.zeros(2, 2, 2, 2).double(), (b, h, i, j), captured)
        if found != want or (reference != want).any():
            return True
    return False


def wrong(num: int, seed: int) -> list[str]:
    found = []
    for at in range(num):
        draw = random.Random(f"{seed} {at}")
        said = expression(draw, 3)
        if differs(eval(f"lambda b, h, i, j: {said} + 0 * i", CAPTURED | {"torch": torch}), draw):
            found.append(said)
    return found


@pytest.mark.more("random")
@pytest.mark.parametrize(
    "seed", [0, *(pytest.param(seed, marks=pytest.mark.nightly("random")) for seed in range(1, 8))]
)
def test_random_integers(full: bool, seed: int) -> None:
    assert wrong(300 if full else 40, seed) == []
