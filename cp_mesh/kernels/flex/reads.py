"""Users' functions rewritten for PyTorch's flex templates: each read of a captured tensor becomes its own argument.

The templates scatter one gradient per tensor, by atomics in float32. So a tensor that is read at two places becomes two
arguments. If many pairs read the same element, it gets copies, and pairs spread their gradients over these.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Node

from cp_mesh._torch import OpOverload, indexing, schema_of, to_copy
from cp_mesh.kernels.flex.bounds import MOST, bounds_of, may_leave_32_bits
from cp_mesh.kernels.functions import ScalarFunction

COPIES, MOST_COPIES = 64, 4096
"""Maximum number of copies of an element that many pairs read; and of an element of a small tensor."""
OF_SMALL, OF_ALL = 1 << 22, 1 << 25
"""Maximum size of a read with its copies: if there are more than `COPIES` or pairs read it; else. Two always fit."""
SHARED, CHAINED = 1 << 17, 1 << 19
"""Maximum size of a tensor that is read per pair and still gets copies: at a computed index, and at an index that is
itself read. Pairs are assumed to read different elements of larger tensors."""
LENGTHS = 64
"""Number of sequence lengths for which a function's rewritten graph is cached."""
OTHERS = (1 << 17) - 1
"""Assumed maximum index of a batch row or head, unless the caller's is larger."""
MOST_COPIED = 1 << 24
"""Maximum size, with pads, of a tensor that is copied for each tile and pass to pad it."""
aten = torch.ops.aten
_index = aten.index.Tensor
_FILLS = (aten.full_like.default, aten.new_full.default)  # their number cannot be a tensor
_SUMS = {
    *(aten.add.Tensor, aten.sub.Tensor, aten.rsub.Scalar, aten.neg.default, aten.detach.default),
    *(to_copy, aten.where.self),  # the gradient of the value not chosen is 0
}
_TIMES = {aten.mul.Tensor, aten.div.Tensor}
"""Products of a tensor and a number. Here and in `_SUMS` NaN stays NaN, and no other gradient depends on the value: it
would be 0 * NaN if the mask hides the pair."""


class Read(NamedTuple):
    """One place at which a function reads a captured tensor.

    The argument is a padded copy of the tensor. So an index whose bounds are within the tensor, negative ones included,
    needs no test of its sign per pair, and one that may be past the end needs no test of the value that was read.

    Attributes:
        source: the index of the captured tensor.
        of_pairs: whether its index depends on both query and key.
        chained: whether part of its index was itself read at a query or a key.
        copies: of each element, along a last dim, each with its own gradient. Pairs that read the same element take
            turns at these, so that fewer atomics meet. 0: no such dim.
        pads: for each dim, how many of its last elements are repeated before it, and how many NaN follow it.
    """

    source: int
    of_pairs: bool
    chained: bool
    copies: int
    pads: tuple[tuple[int, int], ...]

    def of(self, x: Tensor) -> Tensor:
        """The graph's argument for a captured tensor."""
        x = x.detach()
        for dim, (before, after) in enumerate(self.pads):
            if before or after:
                first, filled = x.narrow(dim, x.shape[dim] - before, before), [*x.shape]
                filled[dim] = after
                x = torch.cat([first, x, x.new_full(filled, math.nan)], dim) if after else torch.cat([first, x], dim)
        return x.unsqueeze(-1).expand(*x.shape, self.copies) if self.copies else x

    def home(self, grad: Tensor) -> Tensor:
        """The gradient of the captured tensor, given that of `of`, which is overwritten."""
        grad = grad.sum(-1) if self.copies else grad
        for dim, (before, after) in enumerate(self.pads):
            size = grad.shape[dim] - before - after
            own = grad.narrow(dim, before, size)
            if before:
                own.narrow(dim, size - before, before).add_(grad.narrow(dim, 0, before))
            grad = own
        return grad


@dataclass(frozen=True, eq=False)
class Reads:
    """A rewritten function, which reads each of its tensor arguments at one place.

    Attributes:
        graph: as `ScalarFunction.graph`, with reads in place of captured tensors.
        reads: in the order of the graph's arguments.
        looked_at: for each computed index, whether the graph wraps it if negative, and whether it compares it with the
            size of the dim.
        wide: whether the graph converts indices to int64, as in the user's function; the templates' indices are int32,
            in which its integers may overflow.
    """

    graph: GraphModule
    reads: tuple[Read, ...]
    looked_at: tuple[tuple[bool, bool], ...]
    wide: bool

    @classmethod
    def of(cls, function: ScalarFunction, seq_len: int, others: int = OTHERS) -> Reads:
        """Rewrite a function for positions below ``seq_len``, and heads and batch rows up to ``others``."""
        return _Rewriting(function, seq_len, others).result()

    def of_captured(self, captured: Sequence[Tensor]) -> list[Tensor]:
        """The graph's arguments for the captured tensors."""
        return [read.of(captured[read.source]) for read in self.reads]

    @property
    def key(self) -> Hashable:
        """All that the graph depends on, besides the function."""
        return self.reads, self.looked_at, self.wide


class _Rewriting:
    """Builds the graph of a `Reads`."""

    def __init__(self, function: ScalarFunction, seq_len: int, others: int) -> None:
        self._function, self._graph, self._nodes = function, Graph(), dict[Node, Node]()
        inputs = function.graph.graph.find_nodes(op="placeholder")
        scalars = inputs[: len(inputs) - function.num_captured]
        self._captured = {node: i for i, node in enumerate(inputs[len(scalars) :])}
        for node in scalars:
            self._nodes[node] = self._graph.node_copy(node)
        *score, self._b, self._h, self._i, self._j = scalars
        self._first, self._scores = scalars[0], bool(score)
        self._depends = {node: {node} & {self._i, self._j} for node in scalars}
        self._depends |= {node: {self._i, self._j} for node in score}
        self._last = self._nodes[self._j]
        self._zero = self._call(aten.bitwise_xor.Tensor, *[self._nodes[self._b]] * 2)
        self._reads, self._from_reads = list[Read](), set[Node]()
        self._constants, self._last_constant = {0: self._zero}, self._zero
        self._in_indices, self._summed = self._behind_indices(), self._all_summed()
        self._inside: Node | None = None  # whether indices without NaN pads are within their dims, so far
        known = {self._b: (0, others), self._h: (0, others), self._i: (0, seq_len - 1), self._j: (0, seq_len - 1)}
        self._looked_at = list[tuple[bool, bool]]()
        self._bounds = bounds_of(function.graph.graph, known)
        self._of_32_bits = {node: self._nodes[node] for node in known}
        self._wide = may_leave_32_bits(function.graph.graph, known.keys(), self._bounds)
        if self._wide:
            for node, index in self._of_32_bits.items():
                self._nodes[node] = self._graph.call_function(to_copy, (index,), {"dtype": torch.int64})

    def _behind_indices(self) -> set[Node]:
        found, left = set[Node](), [n for node in self._function.graph.graph.nodes for n in self._index_of(node)]
        while left:
            node = left.pop()
            if node not in found:
                found.add(node)
                left += node.all_input_nodes
        return found

    def _all_summed(self) -> set[Node]:
        """Nodes that reach the output only through `_SUMS`, `_TIMES` and reads: a NaN there makes the score NaN."""
        found = set[Node]()
        for node in reversed(self._function.graph.graph.nodes):
            keeps = node.target in _SUMS or (node.target in _TIMES and len(node.all_input_nodes) == 1)
            keeps = (keeps and node.meta["val"].is_floating_point()) or node.target is _index
            if node.op == "output" or (keeps and found.issuperset(node.users)):
                found.add(node)
        return found

    def _index_of(self, node: Node) -> Sequence[Node]:
        reads = node.op == "call_function" and node.target is _index and node.args[0] in self._captured
        return node.args[1] if reads else ()  # type: ignore[return-value]

    def result(self) -> Reads:
        for node in self._function.graph.graph.nodes:
            if node.op == "placeholder":
                continue
            self._depends[node] = set().union(*(self._depends.get(x, set()) for x in node.all_input_nodes))
            if not self._from_reads.isdisjoint(node.all_input_nodes) or (self._index_of(node) and self._depends[node]):
                self._from_reads.add(node)
            if at := self._index_of(node):
                for x in at:
                    if x in self._captured:  # an index that is a captured 0-dim tensor
                        self._depends[x], self._nodes[x] = set(), self._read(x, ())
                self._nodes[node] = self._read(node.args[0], at, node in self._summed)
                continue
            if node.op == "output" and self._scores and self._inside is not None:
                nothing = self._call(aten.full_like.default, self._nodes[self._first], math.nan)
                self._graph.output(self._call(aten.where.self, self._inside, self._nodes[node.args[0]], nothing))
                continue
            whole = {x: self._read(x, ()) for x in node.all_input_nodes if x in self._captured}  # 0-dim tensors
            copied = self._graph.node_copy(node, (self._nodes | whole).__getitem__)
            if copied.target is aten.scalar_tensor.default and type(number := copied.args[0]) is float:
                copied.target, copied.args = aten.full_like.default, (self._nodes[self._first], number)
                # on the inputs' device; in float32, as scores are, if that is the same number
                as_score = self._scores and (number != number or torch.tensor(number, device="cpu").item() == number)
                copied.kwargs = {} if as_score else {"dtype": copied.kwargs.get("dtype", torch.float32)}
            self._nodes[node] = self._without_literals(copied, node) if node in self._in_indices else copied
        graph = GraphModule(torch.nn.Module(), self._graph)
        return Reads(graph, tuple(self._reads), tuple(self._looked_at), self._wide)

    def _call(self, target: Any, *args: Any) -> Node:
        return self._graph.call_function(target, args)

    def _constant(self, number: int) -> Node:
        """A number, computed from an index: PyTorch 2.11 treats an index with a literal in it as a scalar, and then
        cannot scatter to it. Compilers fold the computation."""
        if number not in self._constants:
            self._constants[number] = self._computed(number)
        return self._constants[number]

    def _computed(self, number: int) -> Node:
        if number < 0:
            return self._early(aten.neg.default, self._constant(-number))
        if number == 1:
            return self._early(aten.neg.default, self._early(aten.bitwise_not.default, self._zero))
        half, one = self._constant(number // 2), self._constant(1)
        if number == 2:
            return self._early(aten.add.Tensor, one, one)
        if number > MOST >= number // 2:
            half = self._early(to_copy, half, dtype=torch.int64)
        twice = self._early(aten.mul.Tensor, half, self._constant(2))
        return self._early(aten.add.Tensor, twice, one) if number % 2 else twice

    def _early(self, target: Any, *args: Any, **options: Any) -> Node:
        """Insert a call before all others, after the numbers so far."""
        with self._graph.inserting_after(self._last_constant):
            self._last_constant = self._graph.call_function(target, args, options)
        return self._last_constant

    def _without_literals(self, node: Node, like: Node) -> Node:
        """Replace integer literals of ``node`` by computed numbers; ``like`` is its original, with dtypes."""
        if node.target in (aten.scalar_tensor.default, aten.full.default):
            number = node.args[-1] if node.target is aten.full.default else node.args[0]
            if type(number) is not int:
                return node
            self._graph.erase_node(node)
            return self._constant(number)
        if not isinstance(node.target, OpOverload) or node.target in _FILLS:
            return node
        numbers = [i for i, x in enumerate(node.args) if type(x) is int and self._is_number(node.target, i)]
        beside = any(type(x) is float for x in node.args)  # no operator takes a tensor beside a float
        if numbers and not beside and _takes_tensors(node.target, numbers):
            # the dtype of the arguments: a comparison returns bool
            dtypes = [x.meta["val"].dtype for x in like.all_input_nodes]
            dtype = reduce(torch.promote_types, dtypes, torch.bool)
            with self._graph.inserting_before(node):
                args = [self._constant(x) if i in numbers else x for i, x in enumerate(node.args)]  # type: ignore[arg-type]
                if dtype in (torch.uint8, torch.int8, torch.int16):  # numbers wrap, as literals do
                    options: dict[str, Any] = {"dtype": dtype}
                    for i in numbers:
                        args[i] = self._graph.call_function(to_copy, (args[i],), options)
            node.args, node.target = tuple(args), node.target.overloadpacket
        return node

    def _is_number(self, target: Any, i: int) -> bool:
        """Whether argument i of an operator is a number or a tensor, not a dim or the like."""
        return str(schema_of(target).arguments[i].type) in ("Tensor", "number", "Optional[number]")

    def _read(self, x: Any, at: Sequence[Node], summed: bool = False) -> Node:
        with self._graph.inserting_after(self._last):
            self._last = self._graph.placeholder(f"read_{len(self._reads)}")
        place, value = self._last, x.meta["val"]
        over = set().union(*(self._depends[n] for n in at))
        pads = self._pads(value, at, summed)
        chained = not self._from_reads.isdisjoint(at)
        num_elements = math.prod(size + sum(pad) for size, pad in zip(value.shape, pads, strict=True))
        has_gradient = self._scores and value.is_floating_point()
        # without a gradient too, unless pairs read it: an index that depends on no scalar does not compile
        copies = _copies(num_elements, len(over), chained) if has_gradient or len(over) < 2 else 0
        self._reads.append(Read(self._captured[x], len(over) == 2, chained, copies, pads))
        indices = [self._counted(*dim) for dim in zip(at, value.shape, pads, strict=True)]
        if copies:
            row, key = self._of_32_bits[self._i], self._of_32_bits[self._j]
            turn = row if over == {self._j} else key
            if len(over) != 1:  # neighbours in a row or in a column use different copies
                step = self._constant(max(8, copies // COPIES) + 1)
                turn = self._call(aten.add.Tensor, self._call(aten.mul.Tensor, row, step), key)
            indices.append(self._call(aten.bitwise_and.Tensor, turn, self._constant(copies - 1)))
        return self._call(indexing().mod_index, place, indices)

    def _pads(self, x: Tensor, at: Sequence[Node], summed: bool) -> tuple[tuple[int, int], ...]:
        pads = []
        for node, size in zip(at, x.shape, strict=True):
            before = after = 0
            # no pads for a mask_mod: tables of blocks are cached by its tensors
            if self._scores and not self._is_row(node):
                least, greatest = self._bounds[node] or (-MOST, MOST)
                if -size <= least <= greatest < size:
                    before = max(0, -least)
                else:
                    after = int(summed and x.is_floating_point())
            pads.append((before, after))
        num_elements = math.prod(size + before + after for size, (before, after) in zip(x.shape, pads, strict=True))
        return tuple(pads if num_elements <= MOST_COPIED else [(0, 0)] * len(pads))

    def _is_row(self, at: Node) -> bool:
        """Whether an index is b, h, q_idx or kv_idx itself; `ScalarFunction.check` covers these."""
        return at.op == "placeholder" and at not in self._captured

    def _counted(self, at: Node, size: int, pads: tuple[int, int]) -> Node:
        """An index as the templates need it: they do not wrap negative indices, and do not check bounds.

        The score of a pair that reads past the end becomes NaN. For a mask_mod, computing its tables of blocks fails.
        """
        if self._is_row(at):
            return self._of_32_bits[at]
        index, (before, after) = self._nodes[at], pads
        least, greatest = self._bounds[at] or (-MOST, MOST)
        is_compared = self._scores and not -size <= least <= greatest < size
        self._looked_at.append((least < 0 and not before, is_compared))
        if before:
            return self._call(aten.add.Tensor, index, self._constant(before))
        zero, end = self._zero, self._constant(size)
        if least < 0:
            from_end = self._call(aten.lt.Tensor, index, zero)
            index = self._call(aten.where.self, from_end, self._call(aten.add.Tensor, index, end), index)
        if not is_compared:
            return index
        ends = ((aten.ge.Tensor, zero), (aten.lt.Tensor, end))
        inside = self._call(aten.bitwise_and.Tensor, *(self._call(target, index, to) for target, to in ends))
        if after:
            return self._call(aten.where.self, inside, index, end)
        self._inside = inside if self._inside is None else self._call(aten.bitwise_and.Tensor, self._inside, inside)
        return self._call(aten.where.self, inside, index, zero)


def _copies(num_elements: int, num_depends: int, chained: bool) -> int:
    """The number of copies of each element, a power of 2; the index depends on ``num_depends`` of query and key."""
    if num_depends == 2 and num_elements > (CHAINED if chained else SHARED):
        return 0
    small, whole = (most // max(1, num_elements) for most in (OF_SMALL, OF_ALL))
    fit = max(small, 2 if num_depends == 2 else min(COPIES, max(2, whole)))
    return min(MOST_COPIES, 1 << fit.bit_length() - 1)


def _takes_tensors(target: Any, at: Sequence[int]) -> bool:
    """Whether an overload takes tensors as these arguments; ``hardtanh``, for example, does not."""
    packet = target.overloadpacket
    schemas = (schema_of(getattr(packet, name)).arguments for name in packet.overloads())
    return any(all(i < len(x) and "Tensor" in str(x[i].type) for i in at) for x in schemas)


def reads_of(function: ScalarFunction, seq_len: int, first: int) -> Reads:
    """The `Reads` of a function, cached with it; ``first``: the larger index of the first head and first batch row."""
    kept: dict[tuple[int, int], Reads] = vars(function).setdefault("_reads", {})
    key = seq_len, OTHERS if first <= OTHERS // 2 else MOST  # a tile has at most 2^16 more: a limit of grids
    if key not in kept:
        if len(kept) >= LENGTHS:
            kept.clear()
        kept[key] = Reads.of(function, *key)
    return kept[key]
