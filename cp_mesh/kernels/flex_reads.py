"""Functions of users as PyTorch's flex templates take them: every read of a captured tensor is an argument of its own.

The templates scatter one gradient to a tensor, by atomics in float32. So a tensor that is read at two places is two
arguments, and one of which many pairs read the same element has copies, which take turns.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Node

from cp_mesh.kernels.flex_bounds import MOST, bounds_of
from cp_mesh.kernels.functions import ScalarFunction

COPIES = 64
"""Of the gradient of an element that a whole row of pairs reads; the square of it where all pairs do."""
LENGTHS = 64
"""Of the whole sequence, for which what is made of a function is kept."""
aten = torch.ops.aten
_index = aten.index.Tensor
_FILLS = (aten.full_like.default, aten.new_full.default)  # which take no tensor for a number


@dataclass(frozen=True, eq=False)
class Reads:
    """A function whose captured tensors are read at one place each.

    Attributes:
        graph: as `ScalarFunction.graph`, of the reads and then of the constants in place of captured tensors.
        sources: which captured tensor each read is of.
        copies: of each, how many copies have a gradient of their own, along a last dim: pairs that read the same
            element take turns, where their gradients are summed by atomics.
        constants: the numbers in indices, which are tensors too: PyTorch 2.11 takes an index for a scalar if a literal
            is part of it, and then cannot scatter to it.
        looked_at: of each index that is computed, whether it may count from the end, and whether it may be beyond it.
    """

    graph: GraphModule
    sources: tuple[int, ...]
    copies: tuple[int, ...]
    constants: tuple[int, ...]
    looked_at: tuple[tuple[bool, bool], ...]

    @classmethod
    def of(cls, function: ScalarFunction, seq_len: int) -> Reads:
        """Of positions below ``seq_len``."""
        return _Rewriting(function, seq_len).result()

    def of_captured(self, captured: Sequence[Tensor], device: torch.device) -> list[Tensor]:
        """What the graph takes: views that hold each element ``copies`` times, and constants."""
        views = (captured[i].unsqueeze(-1) for i in self.sources)
        reads = [x.expand(*x.shape[:-1], copies) for x, copies in zip(views, self.copies, strict=True)]
        return [*reads, *(constant_on(device, number) for number in self.constants)]


@lru_cache(maxsize=256)
def constant_on(device: torch.device, number: int) -> Tensor:
    with torch.inference_mode(False):  # other calls have it too
        narrow = -MOST <= number <= MOST  # as positions are: an index of 64 bits takes several instructions
        dtype = torch.int32 if narrow else torch.int64
        return torch.full((16 // dtype.itemsize,), number, dtype=dtype, device=device)  # as kernels expect it, 16 bytes


class _Rewriting:
    """Makes the graph of a `Reads`."""

    def __init__(self, function: ScalarFunction, seq_len: int) -> None:
        self._function, self._graph, self._nodes = function, Graph(), dict[Node, Node]()
        inputs = function.graph.graph.find_nodes(op="placeholder")
        scalars = inputs[: len(inputs) - function.num_captured]
        self._captured = {node: i for i, node in enumerate(inputs[len(scalars) :])}
        for node in scalars:
            self._nodes[node] = self._graph.node_copy(node)
        *score, self._b, self._h, self._i, self._j = scalars
        self._first, self._scores = scalars[0], bool(score)
        self._depends = {node: {node} & {self._i, self._j} for node in scalars}
        self._last = self._nodes[self._j]
        self._zero = self._call(aten.bitwise_xor.Tensor, *[self._nodes[self._b]] * 2)
        self._sources, self._copies, self._constants = list[int](), list[int](), dict[int, tuple[Node, Node]]()
        self._in_indices = self._behind_indices()
        self._inside: Node | None = None  # whether all indices so far are of elements that there are
        of_rows = dict.fromkeys((self._i, self._j), (0, seq_len - 1))
        self._looked_at = list[tuple[bool, bool]]()
        self._bounds = bounds_of(function.graph.graph, of_rows)

    def _behind_indices(self) -> set[Node]:
        found, left = set[Node](), [n for node in self._function.graph.graph.nodes for n in self._index_of(node)]
        while left:
            node = left.pop()
            if node not in found:
                found.add(node)
                left += node.all_input_nodes
        return found

    def _index_of(self, node: Node) -> Sequence[Node]:
        reads = node.op == "call_function" and node.target is _index and node.args[0] in self._captured
        return node.args[1] if reads else ()  # type: ignore[return-value]

    def result(self) -> Reads:
        for node in self._function.graph.graph.nodes:
            if node.op == "placeholder":
                continue
            self._depends[node] = set().union(*(self._depends.get(x, set()) for x in node.all_input_nodes))
            if at := self._index_of(node):
                for x in at:
                    if x in self._captured:  # an index that is captured itself, which has no dims
                        self._depends[x], self._nodes[x] = set(), self._read(x, ())
                self._nodes[node] = self._read(node.args[0], at)
                continue
            if node.op == "output" and self._scores and self._inside is not None:
                nothing = self._call(aten.full_like.default, self._nodes[self._first], math.nan)
                self._graph.output(self._call(aten.where.self, self._inside, self._nodes[node.args[0]], nothing))
                continue
            whole = {x: self._read(x, ()) for x in node.all_input_nodes if x in self._captured}  # which have no dims
            copied = self._graph.node_copy(node, (self._nodes | whole).__getitem__)
            if copied.target is aten.scalar_tensor.default and type(number := copied.args[0]) is float:
                copied.target, copied.args = aten.full_like.default, (self._nodes[self._first], number)
                # not on a device of its own; in float32 where that is the same number: scores are computed so
                as_score = self._scores and (number != number or torch.tensor(number).item() == number)
                copied.kwargs = {} if as_score else {"dtype": copied.kwargs.get("dtype", torch.float32)}
            self._nodes[node] = self._without_literals(copied) if node in self._in_indices else copied
        for i, (place, node) in enumerate(self._constants.values()):
            with self._graph.inserting_after(self._last):
                self._last = self._graph.placeholder(f"constant_{i}")  # after the reads
            node.replace_input_with(place, self._last)
            self._graph.erase_node(place)
        graph = GraphModule(torch.nn.Module(), self._graph)
        looked_at = tuple(self._looked_at)
        return Reads(graph, tuple(self._sources), tuple(self._copies), tuple(self._constants), looked_at)

    def _call(self, target: Any, *args: Any) -> Node:
        return self._graph.call_function(target, args)

    def _constant(self, number: int) -> Node:
        if number not in self._constants:
            with self._graph.inserting_after(self._last):
                place = self._graph.placeholder("place")
            with self._graph.inserting_after(self._zero):
                self._constants[number] = place, self._call(_index, place, [self._zero])
        return self._constants[number][1]

    def _without_literals(self, node: Node) -> Node:
        if node.target in (aten.scalar_tensor.default, aten.full.default):
            number = node.args[-1] if node.target is aten.full.default else node.args[0]
            if type(number) is not int:
                return node
            self._graph.erase_node(node)
            return self._constant(number)
        if not isinstance(node.target, torch._ops.OpOverload) or node.target in _FILLS:
            return node
        numbers = [i for i, x in enumerate(node._args) if type(x) is int and self._is_number(node.target, i)]
        if numbers:
            with self._graph.inserting_before(node):
                args = [self._constant(x) if i in numbers else x for i, x in enumerate(node._args)]  # type: ignore[arg-type]
            node.args, node.target = tuple(args), node.target.overloadpacket
        return node

    def _is_number(self, target: Any, i: int) -> bool:
        """Not a dim or the like."""
        return str(target._schema.arguments[i].type) in ("Tensor", "number", "Optional[number]")

    def _read(self, x: Any, at: Sequence[Node]) -> Node:
        from torch._dynamo._trace_wrapped_higher_order_op import mod_index  # its backward is what the templates scatter

        with self._graph.inserting_after(self._last):
            self._last = self._graph.placeholder(f"read_{len(self._sources)}")
        place = self._last
        over = set().union(*(self._depends[n] for n in at))
        row, key = self._nodes[self._i], self._nodes[self._j]
        self._sources.append(self._captured[x])
        self._copies.append({0: COPIES**2, 1: COPIES, 2: 1}[len(over)])
        if len(over) == 0:
            turn = self._call(aten.add.Tensor, self._call(aten.mul.Tensor, row, self._constant(COPIES)), key)
        elif len(over) == 1:
            turn = key if self._i in over else row
        else:
            turn = self._call(aten.bitwise_xor.Tensor, key, key)
        turn = self._call(aten.bitwise_and.Tensor, turn, self._constant(self._copies[-1] - 1))
        of_dims = (self._counted(n, size) for n, size in zip(at, x.meta["val"].shape, strict=True))
        return self._call(mod_index, place, [*of_dims, turn])

    def _counted(self, at: Node, size: int) -> Node:
        """An index as the templates take it. They count none from the end, and read memory beyond it.

        A score that reads beyond the end is no number. A mask_mod's tables of blocks stop there.
        """
        index, zero = self._nodes[at], self._zero
        if at.op == "placeholder" and at not in self._captured:
            return index  # of rows, which `ScalarFunction.check` looks at
        least, greatest = self._bounds[at] or (-MOST, MOST)
        may_be_beyond = self._scores and not -size <= least <= greatest < size
        self._looked_at.append((least < 0, may_be_beyond))
        if least < 0:
            from_end = self._call(aten.lt.Tensor, index, zero)
            counted = self._call(aten.add.Tensor, index, self._constant(size))
            index = self._call(aten.where.self, from_end, counted, index)
        if not may_be_beyond:
            return index
        end = self._constant(size)
        ends = ((aten.ge.Tensor, zero), (aten.lt.Tensor, end))
        inside = self._call(aten.bitwise_and.Tensor, *(self._call(target, index, to) for target, to in ends))
        before = self._inside
        self._inside = inside if before is None else self._call(aten.bitwise_and.Tensor, before, inside)
        return self._call(aten.where.self, inside, index, zero)


def reads_of(function: ScalarFunction, seq_len: int) -> Reads:
    kept: dict[int, Reads] = vars(function).setdefault("_reads", {})
    if seq_len not in kept:
        if len(kept) >= LENGTHS:
            kept.clear()
        kept[seq_len] = Reads.of(function, seq_len)
    return kept[seq_len]
