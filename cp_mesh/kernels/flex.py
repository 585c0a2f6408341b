"""PyTorch's FlexAttention as a kernel: functions of users, compiled by Inductor into its Triton templates.

Tiles are calls of two operators of PyTorch, `flex_attention` and `flex_attention_backward`. The second is given the
lse of all keys, so partial gradients add up to the whole. What differs between tiles is data, never code: positions of
rows, document ids, bounds of the mask, the first head and batch row. So a shape is compiled once, for all stages and
ranks.

A function reads tensors at single elements, and every such read is an argument of its own, with a gradient of its own:
the templates take one scatter a tensor. These are summed by atomics in float32, in no fixed order. Blocks of 128 x 128
pairs that nobody sees are skipped, and those that all see are not masked; which these are is computed on the device,
by kernels compiled from the same functions, 128 rows at a time, so that no mask is ever held whole.

Sources: Dong et al. 2024, FlexAttention, arXiv:2412.05496; torch/_higher_order_ops/flex_attention.py of PyTorch 2.11.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import Graph, GraphModule, Node

from cp_mesh.kernels.combine import accumulation_dtype
from cp_mesh.kernels.compiling import one_rank_compiles
from cp_mesh.kernels.contract import Capability, Pairs
from cp_mesh.kernels.functions import ScalarFunction
from cp_mesh.kernels.merge import BackwardTile, merging_kernel
from cp_mesh.kernels.scores import FUNCTIONS, ScoreGradients, Scores, name_of_captured
from cp_mesh.kernels.triton_attention import distances

BLOCK = 128
"""Queries and keys of a block of pairs that is skipped as a whole, as in PyTorch."""
KEPT = 256
"""Programs that are kept."""
TABLES = 16
"""What is kept for each tile: tables of blocks, of the last masks."""
COPIES = 64
"""Of the gradient of an element that a whole row of pairs reads; the square of it where all pairs do."""
PAIRS = 1 << 26
"""Pairs that are looked at together, to find blocks of them."""
aten = torch.ops.aten
_index = aten.index.Tensor
_FILLS = (aten.full_like.default, aten.new_full.default)  # which take no tensor for a number


@dataclass(frozen=True, eq=False)
class _Reads:
    """A function whose captured tensors are read at one place each.

    Attributes:
        graph: as `ScalarFunction.graph`, of the reads and then of the constants in place of captured tensors.
        sources: which captured tensor each read is of.
        copies: of each, how many copies have a gradient of their own, along a last dim: pairs that read the same
            element take turns, where their gradients are summed by atomics.
        constants: the numbers in indices, which are tensors too: PyTorch 2.11 takes an index for a scalar if a literal
            is part of it, and then cannot scatter to it.
    """

    graph: GraphModule
    sources: tuple[int, ...]
    copies: tuple[int, ...]
    constants: tuple[int, ...]

    @classmethod
    def of(cls, function: ScalarFunction) -> _Reads:
        return _Rewriting(function).result()

    def of_captured(self, captured: Sequence[Tensor], device: torch.device) -> list[Tensor]:
        """What the graph takes: views that hold each element ``copies`` times, and constants."""
        views = (captured[i].unsqueeze(-1) for i in self.sources)
        reads = [x.expand(*x.shape[:-1], copies) for x, copies in zip(views, self.copies, strict=True)]
        return [*reads, *(constant_on(device, number) for number in self.constants)]


@lru_cache(maxsize=KEPT)
def constant_on(device: torch.device, number: int) -> Tensor:
    return torch.full((2,), number, device=device)  # as kernels expect it, 16 bytes


class _Rewriting:
    """Makes the graph of a `_Reads`."""

    def __init__(self, function: ScalarFunction) -> None:
        self._function, self._graph, self._nodes = function, Graph(), dict[Node, Node]()
        inputs = function.graph.graph.find_nodes(op="placeholder")
        scalars = inputs[: len(inputs) - function.num_captured]
        self._captured = {node: i for i, node in enumerate(inputs[len(scalars) :])}
        for node in scalars:
            self._nodes[node] = self._graph.node_copy(node)
        self._score, *_ = *_, self._b, self._h, self._i, self._j = scalars
        self._depends = {node: {node} & {self._i, self._j} for node in scalars}
        self._last = self._nodes[self._j]
        self._zero = self._call(aten.bitwise_xor.Tensor, *[self._nodes[self._b]] * 2)
        self._sources, self._copies, self._constants = list[int](), list[int](), dict[int, tuple[Node, Node]]()
        self._in_indices = self._behind_indices()

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

    def result(self) -> _Reads:
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
            whole = {x: self._read(x, ()) for x in node.all_input_nodes if x in self._captured}  # which have no dims
            copied = self._graph.node_copy(node, (self._nodes | whole).__getitem__)
            if copied.target is aten.scalar_tensor.default and type(copied.args[0]) is float:
                copied.target, copied.args = aten.full_like.default, (self._nodes[self._score], copied.args[0])
                copied.kwargs = {}  # a number beside scores, of no dtype and device of its own
            self._nodes[node] = self._without_literals(copied) if node in self._in_indices else copied
        for i, (place, node) in enumerate(self._constants.values()):
            with self._graph.inserting_after(self._last):
                self._last = self._graph.placeholder(f"constant_{i}")  # after the reads
            node.replace_input_with(place, self._last)
            self._graph.erase_node(place)
        graph = GraphModule(torch.nn.Module(), self._graph)
        return _Reads(graph, tuple(self._sources), tuple(self._copies), tuple(self._constants))

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
        return self._call(mod_index, place, [*(self._nodes[n] for n in at), turn])


def _reads(function: ScalarFunction) -> _Reads:
    kept: dict[str, Any] = vars(function)
    if "_reads" not in kept:
        kept["_reads"] = _Reads.of(function)
    reads: _Reads = kept["_reads"]
    return reads


@dataclass(frozen=True, eq=False)
class _Rows:
    """What the functions read of a tile's rows beside captured tensors.

    Attributes:
        bounds: int32 [5], of `distances`.
        positions: int32 [Sq] and [Sk].
        documents: ids [Sq] and [Sk], or [B, Sq] and [B, Sk]; empty without documents.
        padding: uint8 [Sk] or [B, Sk], whether a key is kept; empty without padding.
        starts: int32 [Sk] or [B, Sk], where the block of a key begins; empty without blocks.
    """

    bounds: Tensor
    positions: tuple[Tensor, Tensor]
    documents: tuple[Tensor, ...]
    padding: tuple[Tensor, ...]
    starts: tuple[Tensor, ...]

    @classmethod
    def of(cls, cover: Pairs) -> _Rows:
        mask, positions = cover.mask, (cover.q_pos.contiguous(), cover.k_pos.contiguous())

        def at(x: Tensor | None, positions: Tensor) -> tuple[Tensor, ...]:
            if x is None:
                return ()
            x = x.squeeze(0) if x.ndim == 2 and len(x) == 1 else x
            return (x[..., positions].contiguous(),)

        documents = at(mask.documents, positions[0]) + at(mask.documents, positions[1])
        padding = at(None if mask.key_padding is None else mask.key_padding.view(torch.uint8), positions[1])
        starts = at(None if mask.blocks is None else mask.starts, positions[1])
        bounds = torch.tensor(distances(mask), dtype=torch.int32, device=positions[0].device)
        return cls(bounds, (positions[0].int(), positions[1].int()), documents, padding, starts)

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return self.bounds, *self.positions, *self.documents, *self.padding, *self.starts

    @property
    def dims(self) -> tuple[tuple[int, ...], ...]:
        """Of ids, padding and starts: which there are, and which differ between batch rows. Code depends on it."""
        return tuple(tuple(x.ndim for x in tensors) for tensors in (self.documents, self.padding, self.starts))


def _allowed(rows: _Rows) -> Callable[..., Tensor]:
    """`Mask.allowed` of scalars: of a batch row, local rows, their positions, and `_Rows.tensors` but positions."""
    of_documents, of_padding, of_starts = rows.dims

    def allowed(b: Tensor, i: Tensor, j: Tensor, p: Tensor, t: Tensor, bounds: Tensor, *tensors: Tensor) -> Tensor:
        nearest, nearest_of_prefix, farthest, prefix, end = (_index(bounds, [b * 0 + n]) for n in range(5))
        left = iter(tensors)

        def read(ndim: int, at: Tensor) -> Tensor:
            return _index(next(left), [b, at] if ndim == 2 else [at])

        ids = [read(ndim, at) for ndim, at in zip(of_documents, (i, j), strict=False)]
        kept = [read(ndim, j) != 0 for ndim in of_padding]
        least = torch.where(t < prefix, nearest_of_prefix, nearest)
        for ndim in of_starts:  # in blocks keys are seen as far ahead as those of a prefix
            least = torch.minimum(least, torch.maximum(read(ndim, j) - t, nearest_of_prefix))
        distance = p - t
        seen = (distance >= least) & (distance <= farthest) & (t < end)
        if ids:
            seen = seen & (ids[0] == ids[1]) & (ids[1] >= 0)
        return seen & kept[0] if kept else seen

    return allowed


class _Tile:
    """The functions of one tile as PyTorch's operators take them: of local indices."""

    def __init__(self, cover: Pairs, scores: Scores, dtype: torch.dtype) -> None:
        self.scores, self._dtype = scores, dtype
        self.rows = _kept(cover, ("rows",), lambda: _Rows.of(cover))
        device = cover.q_pos.device
        numbers = scores.first_batch, scores.first_head, *(cover.steps[0] or [0] * 4), *(cover.steps[1] or [0] * 4)
        key, int32 = ("numbers", numbers), torch.int32
        self._numbers = _kept(cover, key, lambda: torch.tensor(numbers, dtype=int32, device=device))
        self._stepped = tuple(steps is not None for steps in cover.steps)
        self._score, self._mask = (None if x is None else _reads(x) for x in (scores.score_mod, scores.mask_mod))
        num = 0 if scores.score_mod is None else scores.score_mod.num_captured
        self.sources = () if self._score is None else self._score.sources
        of_score = () if self._score is None else self._score.of_captured(scores.captured[:num], device)
        of_mask = () if self._mask is None else self._mask.of_captured(scores.captured[num:], device)
        self.of_score = self._numbers, *self.rows.positions, *of_score
        self.of_mask = self._numbers, *self.rows.tensors, *of_mask
        reads = tuple(name_of_captured(i) in scores.wanted for i in self.sources)
        self.wanted = reads + (False,) * (len(of_score) - len(reads))
        handles = tuple(x and x.handle for x in (scores.score_mod, scores.mask_mod))
        self.key = handles, self.rows.dims, self.wanted, self._stepped
        self._cover = cover

    def score(self, score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor, *tensors: Tensor) -> Tensor:
        if self._score is None:
            return score
        score = score.to(self._dtype)
        reads = tensors[3:]
        return self._score.graph(score, *self._globals(b, h, i, j, *tensors[:3]), *reads).to(self._dtype)

    def mask(self, b: Tensor, h: Tensor, i: Tensor, j: Tensor, *tensors: Tensor) -> Tensor:
        numbers, bounds, q_pos, k_pos = tensors[:4]
        num = 1 + len(self.rows.tensors)
        indices = self._globals(b, h, i, j, numbers, q_pos, k_pos)
        seen = _allowed(self.rows)(b, i, j, *indices[2:], bounds, *tensors[4:num])
        return seen if self._mask is None else seen & self._mask.graph(*indices, *tensors[num:])

    def _globals(
        self, b: Tensor, h: Tensor, i: Tensor, j: Tensor, numbers: Tensor, *positions: Tensor
    ) -> tuple[Tensor, ...]:
        """Global indices of local ones."""

        def number(n: int) -> Tensor:
            return _index(numbers, [b * 0 + n])

        def position(at: int, row: Tensor) -> Tensor:
            if not self._stepped[at]:
                return _index(positions[at], [row])
            split, first, second, step = map(number, range(2 + 4 * at, 6 + 4 * at))
            return torch.where(row < split, first, second) + step * row

        return b + number(0), h + number(1), position(0, i), position(1, j)

    def joint(self, dtype: torch.dtype) -> GraphModule:
        """Gradients of a score of this dtype and of `of_score`; None of those that are not wanted."""
        wanted = (False,) * (len(self.of_score) - len(self.wanted)) + self.wanted

        def joint(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor, grad: Tensor, *tensors: Tensor) -> Any:
            score = score.to(self._dtype).detach().requires_grad_()
            tensors = tuple(x.detach().requires_grad_(w) for x, w in zip(tensors, wanted, strict=True))
            value = self.score(score, b, h, i, j, *tensors)
            inputs = [score, *(x for x, w in zip(tensors, wanted, strict=True) if w)]
            if not value.requires_grad:
                return [torch.zeros_like(score), None, None, None, None, *[None] * len(tensors)]
            dscore, *found = torch.autograd.grad(value, inputs, grad.to(self._dtype), allow_unused=True)
            grads = iter(found)
            dscore = torch.zeros_like(score) if dscore is None else dscore
            return [dscore, None, None, None, None, *(next(grads) if w else None for w in wanted)]

        # Traced on the CPU: autograd's thread of a GPU may wait for this one. Each is a tensor of its own, as what is
        # traced goes by identity, and has no data.
        device, mode = self.of_score[0].device, FakeTensorMode()
        with mode:
            scalars = (torch.empty((), dtype=x) for x in (dtype, *[torch.int32] * 4, dtype))
            captured = (torch.empty_strided(x.shape, x.stride(), dtype=x.dtype) for x in self.of_score)
            inputs = *scalars, *captured
        graph = _traced(joint, inputs)
        for node in graph.graph.nodes:
            if "device" in node.kwargs:
                node.kwargs = node.kwargs | {"device": device}
        graph.recompile()
        return graph

    def with_gradients(self, of_score: Sequence[Tensor], graded: Sequence[bool]) -> tuple[Tensor, ...]:
        """Not compiled, PyTorch's operator returns gradients of those tensors that say they want one."""
        others = len(of_score) - len(self.wanted)
        if of_score[0].device.type != "cpu":
            return tuple(of_score)
        reads = (x.detach().requires_grad_(w) for x, w in zip(of_score[others:], graded, strict=True))
        return *of_score[:others], *reads

    def blocks(self, shape: tuple[int, int, int, int]) -> Any:
        """PyTorch's BlockMask of the pairs [B, H, Sq, Sk] of the tile."""
        mask_mod = self.scores.mask_mod
        read = () if mask_mod is None else self.of_mask[1 + len(self.rows.tensors) :]
        first = self.scores.first_batch, self.scores.first_head  # chunks of heads share a tile
        of_read = ((x.data_ptr(), x.stride(), x._version) for x in read)
        key = "blocks", mask_mod and mask_mod.handle, *shape, *first, *of_read
        # The tensors are kept too: an address then belongs to no other.
        return _kept(self._cover, key, lambda: (_blocks(self, shape), read))[0]


def _kept(cover: Pairs, key: tuple[Hashable, ...], make: Callable[[], Any]) -> Any:
    """What was prepared of a tile before; the oldest goes where there is too much."""
    name = "flex", *key
    if name not in cover.kept:
        of_flex = [k for k in cover.kept if isinstance(k, tuple) and k[:1] == ("flex",)]
        if len(of_flex) >= TABLES:
            del cover.kept[of_flex[0]]
        cover.kept[name] = make()
    return cover.kept[name]


def _blocks(tile: _Tile, shape: tuple[int, int, int, int]) -> Any:
    from torch.nn.attention.flex_attention import BlockMask

    B, H, Sq, Sk = shape
    mask_mod = tile.scores.mask_mod
    indices = [] if mask_mod is None else mask_mod.graph.graph.find_nodes(op="placeholder")[:2]
    by_batch, by_head = (bool(index.users) for index in indices) if indices else (False, False)
    B, H = B if by_batch or any(2 in dims for dims in tile.rows.dims) else 1, H if by_head else 1
    device, num_k = tile.rows.bounds.device, -(-Sk // BLOCK)
    num_q = min(-(-Sq // BLOCK), max(1, PAIRS // (num_k * BLOCK**2)))  # of a part of the rows

    def of_rows(b: Tensor, h: Tensor, i: Tensor, j: Tensor, *tensors: Tensor) -> tuple[Tensor, Tensor]:
        call: Callable[..., Tensor] = tile.mask
        for dim in (3, 2, 1, 0):
            call = torch.vmap(call, in_dims=(*(0 if at == dim else None for at in range(4)), *[None] * len(tensors)))
        inside = (i < Sq)[:, None] & (j < Sk)
        seen = call(b, h, i.clamp(max=Sq - 1), j.clamp(max=Sk - 1), *tensors) & inside
        seen = seen.unflatten(3, (num_k, BLOCK)).unflatten(2, (num_q, BLOCK))
        return seen.any(-1).any(-2), seen.all(-1).all(-2)

    b, h, j = (torch.arange(n, device=device) for n in (B, H, num_k * BLOCK))
    parts = [torch.arange(num_q * BLOCK, device=device) + begin for begin in range(0, Sq, num_q * BLOCK)]
    run = _program(("blocks", tile.key, Sq, Sk), (b, h, parts[0], j, *tile.of_mask), lambda options: of_rows)
    found = zip(*(run(b, h, i, j, *tile.of_mask) for i in parts), strict=True)
    some, every = (torch.cat(x, 2)[:, :, : -(-Sq // BLOCK)] for x in found)
    listed = [_in_order(x) for x in (some & ~every, every)]
    return BlockMask.from_kv_blocks(
        *listed[0], *listed[1], BLOCK_SIZE=(BLOCK, BLOCK), mask_mod=tile.mask, seq_lengths=(Sq, Sk)
    )


def _in_order(x: Tensor) -> tuple[Tensor, Tensor]:
    """How many blocks of each row are listed, and which, ahead of those that are not: int32."""
    return x.sum(-1, dtype=torch.int32), x.int().argsort(dim=-1, descending=True, stable=True).int().contiguous()


_programs: OrderedDict[Hashable, Callable[..., Any]] = OrderedDict()  # the last KEPT


def _program(
    key: Hashable, inputs: Sequence[Tensor], make: Callable[[dict[str, int]], Callable[..., Any]]
) -> Callable[..., Any]:
    """What ``make`` returns, compiled for tensors like these; on the CPU as it is: PyTorch compiles no backward there.

    It is given options of PyTorch's kernels: those that read more in a loop may need shared memory for fewer stages.
    Inductor must not pad strides: the templates take rows of lse and delta to follow each other.
    """
    key = key, tuple((x.shape, x.stride(), x.dtype, x.device) for x in inputs)
    if key not in _programs:
        on_cpu, device = inputs[0].device.type == "cpu", inputs[0].device

        def compiled() -> Callable[..., Any]:
            if on_cpu:
                return make({})
            torch.cuda.set_device(device)
            for options in FEWER_STAGES:
                try:
                    graph = _traced(make(options), inputs)
                    return torch._inductor.compile(graph, list(inputs), {"comprehensive_padding": False})
                except Exception as error:
                    if "out of resource" not in str(error) or options == FEWER_STAGES[-1]:
                        raise
            raise AssertionError("the last options return or raise")

        # In a thread: this one may be below autograd, in an op, or under modes, such as those of checkpoints.
        with nullcontext() if on_cpu else one_rank_compiles(), ThreadPoolExecutor(1) as beside:
            _programs[key] = beside.submit(compiled).result()
        if len(_programs) > KEPT:
            _programs.popitem(last=False)
    _programs.move_to_end(key)
    return _programs[key]


def _traced(function: Callable[..., Any], inputs: Sequence[Tensor]) -> GraphModule:
    from torch.fx.experimental.proxy_tensor import make_fx

    return make_fx(function, tracing_mode="fake")(*inputs)


FEWER_STAGES: tuple[dict[str, int], ...] = ({}, {"num_stages": 2}, {"num_stages": 1})
_OPTIONS: dict[str, Any] = {
    "PRESCALE_QK": False, "ROWS_GUARANTEED_SAFE": False, "BLOCKS_ARE_CONTIGUOUS": False, "WRITE_DQ": True,
    "OUTPUT_LOGSUMEXP": True, "OUTPUT_MAX": False, "BACKEND": "TRITON",
}  # fmt: skip


def _apart(blocks: Any) -> tuple[tuple[Tensor, ...], Callable[[Sequence[Tensor], Any], tuple[Any, ...]]]:
    """The tensors of a BlockMask, and what makes the operators' argument of such tensors and a mask_mod."""
    whole = blocks.as_tuple()
    at = [i for i, x in enumerate(whole) if isinstance(x, Tensor)]

    def together(tensors: Sequence[Tensor], mask_mod: Any) -> tuple[Any, ...]:
        parts = [*whole[:-1], mask_mod]
        for i, x in zip(at, tensors, strict=True):
            parts[i] = x
        return tuple(parts)

    return tuple(whole[i] for i in at), together


def _forward(q: Tensor, k: Tensor, v: Tensor, cover: Pairs, scores: Scores) -> tuple[Tensor, Tensor]:
    from torch._higher_order_ops.flex_attention import flex_attention

    tile = _Tile(cover, scores, accumulation_dtype(q.dtype))
    of_blocks, together = _apart(tile.blocks((*q.shape[:3], k.shape[2])))
    ends = len(of_blocks), len(of_blocks) + len(tile.of_score)

    def make(options: dict[str, int]) -> Callable[..., Any]:
        def function(q: Tensor, k: Tensor, v: Tensor, *tensors: Tensor) -> tuple[Tensor, Tensor]:
            blocks = together(tensors[: ends[0]], tile.mask)
            given = tuple(tensors[ends[0] : ends[1]]), tuple(tensors[ends[1] :])
            out, lse, *_ = flex_attention(q, k, v, tile.score, blocks, scores.scale, _OPTIONS | options, *given)
            return out, lse * math.log(2)

        return function

    inputs = q, k, v, *of_blocks, *tile.of_score, *tile.of_mask
    out, lse = _program(("forward", tile.key, scores.scale), inputs, make)(*inputs)
    return out, lse


def _backward(tile: BackwardTile) -> tuple[Tensor, Tensor, Tensor, ScoreGradients]:
    from torch._higher_order_ops.flex_attention import flex_attention_backward

    assert isinstance(tile.cover, Pairs) and tile.delta is not None
    q, k, v, scores = tile.q, tile.k, tile.v, tile.scores
    of = _Tile(tile.cover, scores, tile.delta.dtype)
    of_blocks, together = _apart(of.blocks((*q.shape[:3], k.shape[2])))
    ends = len(of_blocks), len(of_blocks) + len(of.of_score)

    def make(options: dict[str, int]) -> Callable[..., Any]:
        joint = of.joint(q.dtype)
        outputs = joint.graph.output_node().args[0]
        graded = [x is not None for x in outputs[len(outputs) - len(of.wanted) :]]  # type: ignore[arg-type,index,union-attr]

        def function(
            q: Tensor, k: Tensor, v: Tensor, lse: Tensor, delta: Tensor, dout: Tensor, *tensors: Tensor
        ) -> Any:
            blocks = together(tensors[: ends[0]], of.mask)
            given = of.with_gradients(tensors[ends[0] : ends[1]], graded), tuple(tensors[ends[1] :])
            # It computes rowsum(dout * out) - dlse / log 2, which is delta.
            out, dlse = dout.new_zeros(()).expand(dout.shape), delta * -math.log(2)
            graphs = of.score, joint
            *grads, found = flex_attention_backward(
                q, k, v, out, lse / math.log(2), dout, dlse, *graphs, blocks, scores.scale, _OPTIONS | options, *given
            )
            reads = found[len(found) - len(of.wanted) :]
            own = (x if there else None for x, there in zip(reads, graded, strict=True))
            return *grads, *(x for x, wanted in zip(own, of.wanted, strict=True) if wanted)

        return function

    inputs = q, k, v, tile.lse, tile.delta, tile.dout, *of_blocks, *of.of_score, *of.of_mask
    dq, dk, dv, *found = _program(("backward", of.key, scores.scale), inputs, make)(*inputs)
    grads = ScoreGradients.zeros(scores, tile.delta.dtype)
    sources = (i for i, wanted in zip(of.sources, of.wanted, strict=False) if wanted)
    for source, grad in zip(sources, found, strict=True):
        if grad is not None:  # as of what is detached, or compared alone
            grads.captured[source] += grad.sum(-1)
    return dq, dk, dv, grads


FLEX = merging_kernel(
    "flex",
    Capability(
        devices=("cuda",),
        dtypes=(torch.bfloat16, torch.float16, torch.float32),
        compute_capability=(8, 0),
        covers=("pairs",),
        max_head_dim=256,
        v_head_dim=True,
        differentiable_lse=True,
        features=frozenset(FUNCTIONS),
        deterministic_features=frozenset({"mask_mod"}),
    ),
    _forward,
    _backward,
    uses_delta=True,
    one_tile=True,
)
