"""`flex_attention`: attention whose scores and mask are functions of users, on the global indices of a pair.

A function is traced in every call, as what it reads may be another tensor each time, or another number: its operators
are written down as a graph, and captured tensors become arguments of the op, with gradients. The graph goes by its
handle (`cp_mesh.kernels.functions`).
"""

from __future__ import annotations

import operator
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._compile import _disable_dynamo
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.fx import Graph, Node
from torch.fx.node import map_aggregate
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_map_only

from cp_mesh.agreement import announce_refusal
from cp_mesh.attention import Asked, attend, check_format
from cp_mesh.errors import UnsupportedError, refuse
from cp_mesh.formats import FORMATS
from cp_mesh.kernels.combine import accumulation_dtype
from cp_mesh.kernels.functions import ScalarFunction
from cp_mesh.layouts import Layout, ZigZag
from cp_mesh.masks import Mask
from cp_mesh.owned import Content
from cp_mesh.placements import find_cp_axis, group_that_waits

ScoreMod = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]
MaskMod = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True, eq=False)
class PairMask:
    """What `create_block_mask` returns: a mask_mod, and the sizes for which it was meant. Nothing is computed of it.

    Its other attributes are what PyTorch's flex_attention asks for in a core of `ContextParallel`.
    """

    mask_mod: MaskMod
    batch: int | None
    heads: int | None
    seq_len: int

    @property
    def BLOCK_SIZE(self) -> tuple[int, int]:
        """As of a mask without blocks, whose length is not compared."""
        from torch.nn.attention import flex_attention

        return (flex_attention._LARGE_SPARSE_BLOCK_SIZE,) * 2

    @property
    def kv_num_blocks(self) -> _Anywhere:
        return _Anywhere()

    def as_tuple(self) -> tuple[PairMask]:
        return (self,)


class _Anywhere:
    """Has each device."""

    @property
    def device(self) -> _Anywhere:
        return self

    def __eq__(self, other: object) -> bool:
        return isinstance(other, torch.device)

    __hash__ = None  # type: ignore[assignment]


def create_block_mask(mask_mod: MaskMod, B: int | None, H: int | None, Q_LEN: int, KV_LEN: int) -> PairMask:
    """A mask for `flex_attention`, as torch's function of this name; it has no blocks and takes no memory.

    Args:
        mask_mod: (b, h, q_idx, kv_idx) -> bool: whether the query sees the key, of global indices.
        B, H: batch rows and query heads, or None or 1 where the mask is the same for all.
        Q_LEN, KV_LEN: tokens of the whole sequence.

    Raises:
        UnsupportedError: if the lengths differ.
    """
    if Q_LEN != KV_LEN:
        hint = "keys are those of the same sequence"
        refuse("create_block_mask", "Q_LEN and KV_LEN that are equal", (Q_LEN, KV_LEN), hint, UnsupportedError)
    return PairMask(mask_mod, B, H, Q_LEN)


@_disable_dynamo
def flex_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    score_mod: ScoreMod | None = None,
    block_mask: Any = None,
    scale: float | None = None,
    enable_gqa: bool = False,
    return_lse: bool = False,
    *,
    mesh: DeviceMesh | dist.ProcessGroup | None = None,
    seq_dim: int | None = None,
    seq_len: int | None = None,
    layout: Layout = ZigZag(),  # noqa: B008 - frozen
    mask: Mask = Mask(causal=False),  # noqa: B008 - frozen
    method: str = "auto",
    kernel: str = "auto",
    transport: str = "auto",
    ulysses_degree: int | None = None,
    inner_ring_size: int | None = None,
    head_chunks: int | None = None,
    deterministic: bool | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """`torch.nn.attention.flex_attention.flex_attention` over a sequence sharded on the cp axis of a mesh.

    score_mod and mask_mod are functions of scalar tensors, and see what they would see on one device: *global* indices
    of batch row, query head, query and key, whichever rank computes them. (Of local tensors, heads and batch rows count
    from 0 on this rank; of DTensors they are global.) They may read other tensors, captured ones, at any index: whole
    tensors, equal on all cp ranks, or DTensors. Captured tensors that score_mod reads get gradients: this rank's share,
    whose sum over ranks is the gradient, summed in float32 (float64) and rounded once. What mask_mod reads has none.

    A captured DTensor is on query's mesh, or beside local tensors on the cp axis alone. Sharded over cp, by its
    sequence dim in layout order, or over axes that shard heads or batch of query, it is read by global indices, and
    its gradient is that of its shard. Where it is replicated over an axis that shards query, the gradient is partial.

    Only the reference kernel serves these functions: every pair that ``mask`` leaves is computed, on the CPU.
    torch.compile leaves the call out of its graph; with fullgraph=True it raises.

    Args:
        query, key, value: local tensors or DTensors, as in `cp_mesh.attention`.
        score_mod: (score, b, h, q_idx, kv_idx) -> the score: scalars; the first is scale · q·k in float32 (float64),
            the others are int64. No branch on their values, no writes, no random numbers: what torch can trace.
            None: the score as it is.
        block_mask: of `cp_mesh.create_block_mask`, or a `BlockMask` of torch's function of this name, made of the whole
            sequence. Its mask_mod decides; blocks that say something else are refused. None: every query sees all keys.
        scale: factor on q·k; None: 1 / sqrt(D).
        enable_gqa: must be True if there are fewer kv heads than query heads, as in torch.
        return_lse: as in `cp_mesh.attention`.
        mesh, seq_dim, seq_len, layout: as in `cp_mesh.attention`.
        mask: hides pairs too. Keys that it hides from all queries of a rank do not travel, so say here what of
            the mask can be said so, such as Mask(causal=True).
        method, kernel, transport, ulysses_degree, inner_ring_size, head_chunks, deterministic: as in
            `cp_mesh.attention`.

    Returns:
        out, or with ``return_lse`` (out, lse), as `cp_mesh.attention` returns them.

    Raises:
        ArgumentError, UnsupportedError, RankMismatchError: as `cp_mesh.attention` does; also for functions that cannot
            be traced, and in first calls for functions or captured tensors that differ between ranks.

    Example:
        >>> def score_mod(score, b, h, q_idx, kv_idx):  # doctest: +SKIP
        ...     return score + table[h, q_idx - kv_idx]
        >>> out = flex_attention(q, k, v, score_mod, mesh=mesh["cp"], mask=Mask(causal=True))  # doctest: +SKIP
        >>> out.sum().backward()  # table.grad is this rank's share  # doctest: +SKIP

    Source: Dong et al. 2024, FlexAttention, arXiv:2412.05496.
    """
    try:
        for name, x in (("query", query), ("key", key), ("value", value)):
            if not isinstance(x, Tensor):
                refuse(name, "a tensor", type(x).__name__, "use torch.as_tensor")
        axis = find_cp_axis((query, key, value), mesh, seq_dim)
        form = FORMATS[axis.seq_dim]
        check_format(query, key, value, form)
        num_heads, num_kv_heads = (x.shape[form.dims["heads"]] for x in (query, key))
        if num_heads != num_kv_heads and not enable_gqa:
            got = f"{num_heads} and {num_kv_heads}"
            refuse("heads", "as many kv heads as query heads", got, "enable_gqa=True takes fewer kv heads")
        length = query.shape[axis.seq_dim]
        whole = length if isinstance(query, DTensor) else length * axis.size if seq_len is None else seq_len
        batch = query.shape[form.dims["batch"]] if "batch" in form.dims else 1
        functions = Functions.of(score_mod, block_mask, query, (batch, num_heads, whole))
    except Exception as error:
        if (group := group_that_waits(query, mesh, seq_dim)) is not None:
            announce_refusal(group, error)
        raise
    asked = Asked(
        mesh, seq_dim, seq_len, layout, mask, scale, method=method, kernel=kernel, transport=transport,
        ulysses_degree=ulysses_degree, inner_ring_size=inner_ring_size, head_chunks=head_chunks,
        deterministic=deterministic, return_lse=return_lse,
    )  # fmt: skip
    return attend(query, key, value, functions.asked(asked))


@dataclass(frozen=True, eq=False)
class Functions:
    """score_mod and mask_mod of a call, traced, and what each of them reads."""

    score_mod: ScalarFunction | None
    mask_mod: ScalarFunction | None
    of_score: tuple[Tensor, ...]
    of_mask: tuple[Tensor, ...]

    @classmethod
    def of(
        cls,
        score_mod: ScoreMod | None,
        block_mask: Any,
        query: Tensor,
        sizes: tuple[int, int, int],
        last: int | None = None,
    ) -> Functions:
        """Of arguments of `flex_attention`.

        Args:
            sizes: batch rows, query heads and tokens of the whole, of which the mask must be.
            last: the last index of a token. Greater ones, of padding, are this one in functions.
        """
        score_function, of_score = _trace("score_mod", score_mod, query, last)
        if block_mask is None:
            return cls(score_function, None, of_score, ())
        mask_mod, of_mask = _read_mask(block_mask, query, sizes, last)
        return cls(score_function, mask_mod, of_score, of_mask)

    def asked(self, asked: Asked) -> Asked:
        """A call with these functions."""
        handles = ("" if x is None else x.handle for x in (self.score_mod, self.mask_mod))
        score_mod, mask_mod = handles
        return asked._replace(score_mod=score_mod, mask_mod=mask_mod, captured=(*self.of_score, *self.of_mask))

    def check_hidden(self, mask: Mask, sizes: tuple[int, int, int], device: torch.device) -> None:
        """Refuse a mask that hides pairs, other than of padding, which mask_mod shows. Looks at all, once."""
        if not (mask.causal or mask.window or mask.elementwise):
            return
        what, hint = "ContextParallel.mask", "mask=Mask(causal=False) leaves all to the functions"
        if self.mask_mod is None:
            refuse(what, "a mask that hides nothing, as flex_attention has no block_mask here", mask, hint)
        if any(isinstance(x, DTensor) for x in self.of_mask):
            refuse(what, "a mask_mod of plain tensors beside a mask", "one of DTensors", hint, UnsupportedError)
        of_mask = mask.documents, mask.key_padding, mask.blocks
        contents = (None if x is None else Content.of(x) for x in of_mask)
        key = mask.spec(), sizes, *contents, Unchanged(self.of_mask)
        if _hidden.get(self.mask_mod) == key:
            return
        mask = mask.to(device)
        b, h, every = (torch.arange(n, device=device) for n in sizes)
        for at in every.split(_ROWS):
            seen = self.mask_mod.of_pairs(None, (b, h, at, every), self.of_mask)
            if (seen & ~mask.allowed(at, every)[:, None]).any():
                refuse(what, "a mask that hides no pair which flex_attention's block_mask shows", mask, hint)
        _hidden[self.mask_mod] = key


_ROWS = 256  # queries whose pairs are looked at together
_hidden: weakref.WeakKeyDictionary[ScalarFunction, Any] = weakref.WeakKeyDictionary()


class Unchanged:
    """Tensors as they were when this was made, held weakly: equal to another of the same ones, written to since or not.

    Never equal if they are inference tensors, which do not tell of writes.
    """

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._tensors = [(weakref.ref(x), None if x.is_inference() else x._version) for x in tensors]

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Unchanged) or len(self._tensors) != len(other._tensors):
            return False
        pairs = zip(self._tensors, other._tensors, strict=True)
        return all(x() is not None and x() is y() and before == now is not None for (x, before), (y, now) in pairs)

    __hash__ = None  # type: ignore[assignment]


def _trace(
    what: str, function: Callable[..., Tensor] | None, query: Tensor, last: int | None = None
) -> tuple[ScalarFunction | None, tuple[Tensor, ...]]:
    """A function of scalars as a graph, and the tensors that it reads."""
    if function is None:
        return None, ()
    if not callable(function):
        refuse(what, "a function of scalars", type(function).__name__, "def score_mod(score, b, h, q_idx, kv_idx): ...")
    names, dtypes = ["b", "h", "q_idx", "kv_idx"], [torch.int64] * 4
    dtype = torch.bool
    if what == "score_mod":
        dtype = accumulation_dtype(query.dtype)
        names, dtypes = ["score", *names], [dtype, *dtypes]
    with _disable_current_modes():  # such as those of selective checkpoints, which count operators
        scalars = [torch.zeros((), dtype=x, device=query.device) for x in dtypes]
        recorder = _Recorder(what, dict(zip(names, scalars, strict=True)))
        functions = _Functions(what, recorder)
        with torch.no_grad(), functions, recorder:
            if last is not None:
                scalars[-2:] = (x.clamp(max=last) for x in scalars[-2:])
            result = function(*scalars)
        if not isinstance(result, Tensor) or result.ndim or (what == "mask_mod" and result.dtype != dtype):
            is_tensor = isinstance(result, Tensor)
            got = f"{result.dtype} {list(result.shape)}" if is_tensor else type(result).__name__
            refuse(what, f"a scalar tensor{' of bool' if what == 'mask_mod' else ''}", got, "index every dim")
        graph, captured = recorder.finish(result)
    captured = tuple(functions.dtensors.get(id(x), x) for x in captured)
    for x in captured:
        if x.device != query.device:
            refuse(f"{what}: a captured tensor", f"a tensor on {query.device}", x.device, "move it there")
    return ScalarFunction.of(getattr(function, "__name__", what), graph, captured), captured


class _Functions(TorchFunctionMode):
    """While a function is traced: reads at tensors are reads of all pairs at once, and no grad mode is lost.

    Attributes:
        dtensors: those that were read, by the id of the plain tensor of their global shape that the trace has instead.
    """

    def __init__(self, what: str, recorder: _Recorder) -> None:
        super().__init__()
        self._what, self._recorder = what, recorder
        self._stand_ins: dict[int, Tensor] = {}
        self.dtensors: dict[int, DTensor] = {}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        args, kwargs = tree_map_only(DTensor, self._stand_in, (args, kwargs))
        if func is torch._C._set_grad_enabled:
            hint = "x.detach() has no gradient"
            refuse(self._what, "a function in one grad mode", "torch.no_grad or the like", hint, UnsupportedError)
        if func is Tensor.__getitem__:
            index = args[1] if isinstance(args[1], tuple) else (args[1],)
            if any(isinstance(i, Tensor) for i in index) or (
                len(index) == args[0].ndim and set(map(type, index)) == {int}
            ):
                return torch.ops.aten.index.Tensor(args[0], [self._index(args[0], i) for i in index])
        return func(*args, **(kwargs or {}))

    def _stand_in(self, x: DTensor) -> Tensor:
        if id(x) not in self._stand_ins:
            if self._recorder.knows(x._local_tensor):
                hint = "make it outside: of this one no gradient would come back"
                refuse(self._what, "DTensors that were there before", "a DTensor made in it", hint, UnsupportedError)
            with _disable_current_modes():
                self._stand_ins[id(x)] = torch.zeros(x.shape, dtype=x.dtype, device=x.device)  # they may be indices
            self.dtensors[id(self._stand_ins[id(x)])] = x
        return self._stand_ins[id(x)]

    def _index(self, x: Tensor, i: Any) -> Tensor | None:
        """As aten.index takes it; PyTorch would read the number in a scalar tensor."""
        if isinstance(i, Tensor) and not i.is_floating_point() and i.dtype != torch.bool:
            return i
        if type(i) is int:
            return torch.scalar_tensor(i, dtype=torch.int64, device=x.device)
        if i == slice(None):
            return None
        got, hint = getattr(i, "dtype", i), "torch.where chooses by value"
        refuse(f"{self._what}: an index beside tensors", "integers, or a full slice", got, hint, UnsupportedError)


class _Recorder(TorchDispatchMode):
    """While a function is traced: writes down its operators as a graph of which tensors that it reads are arguments.

    Refuses what is no function of a pair, before it is done. `make_fx` would write the same graph, in ten times the
    time: a function is traced in every call.
    """

    def __init__(self, what: str, scalars: dict[str, Tensor]) -> None:
        super().__init__()
        self._what, self._graph, self._captured = what, Graph(), list[Tensor]()
        self._nodes: dict[int, Node] = {}
        self._alive: list[Tensor] = []  # so that no other tensor has their id
        for name, x in scalars.items():
            self._note(x, self._graph.placeholder(name))
        self._last_argument = next(iter(reversed(self._graph.nodes)))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        tags, got, hint = func.tags, "", ""
        if func._schema.is_mutable:
            got, hint = f"a write, {func}", "x = x + 1 makes a new tensor"
        elif torch.Tag.nondeterministic_seeded in tags:
            got, hint = f"random numbers, {func}", "make them outside, as a tensor that the function reads"
        elif torch.Tag.data_dependent_output in tags or (
            torch.Tag.dynamic_output_shape in tags and func is not torch.ops.aten.index.Tensor
        ):
            got, hint = f"what depends on values, {func}", "torch.where chooses by value, without a branch"
        elif "c10d" in func.namespace:
            got, hint = f"communication, {func}", "read the DTensor itself, or x.full_tensor() of before"
        if got:
            refuse(self._what, "a function of one pair that torch can trace", got, hint, UnsupportedError)
        if func is torch.ops.aten.log_sigmoid_forward.default:
            with self:
                return _log_sigmoid(*args)
        kwargs = kwargs or {}
        node = self._graph.call_function(func, *map_aggregate((args, kwargs), self._node))
        found = func(*args, **kwargs)
        if isinstance(found, Tensor):
            self._note(found, node)
        else:
            for i, x in enumerate(found):
                self._note(x, self._graph.call_function(operator.getitem, (node, i)))
        return found

    def knows(self, x: Tensor) -> bool:
        """Whether it was read, or made."""
        return id(x) in self._nodes

    def _node(self, x: Any) -> Any:
        """A tensor's; others as they are."""
        if not isinstance(x, Tensor):
            return x
        if id(x) not in self._nodes:
            if type(x) not in (Tensor, torch.nn.Parameter, torch.nn.Buffer):
                got, hint = type(x).__name__, "use tensors and their operators"
                refuse(self._what, "a function that reads plain tensors", got, hint, UnsupportedError)
            with self._graph.inserting_after(self._last_argument):
                self._last_argument = self._graph.placeholder(f"captured_{len(self._captured)}")
            self._captured.append(x)
            self._note(x, self._last_argument)
        return self._nodes[id(x)]

    def _note(self, x: Tensor, node: Node) -> None:
        self._nodes[id(x)] = node
        self._alive.append(x)
        node.meta["val"] = torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="meta")

    def finish(self, result: Tensor) -> tuple[Graph, tuple[Tensor, ...]]:
        """The graph, and what it reads of what it uses."""
        self._graph.output(self._node(result))
        self._graph.eliminate_dead_code()
        read = [node for node in self._graph.find_nodes(op="placeholder") if node.name.startswith("captured_")]
        used = list[Tensor]()
        for node, x in zip(read, self._captured, strict=True):
            if node.users:
                node.name = node.target = f"captured_{len(used)}"
                used.append(x)
            else:
                self._graph.erase_node(node)
        return self._graph, tuple(used)


def _log_sigmoid(x: Tensor) -> tuple[Tensor, Tensor]:
    """As PyTorch's operator, which vmap cannot batch on CUDA: its second result is empty there."""
    return torch.minimum(x, torch.zeros_like(x)) - (-x.abs()).exp().log1p(), x


def _read_mask(
    block_mask: Any, query: Tensor, sizes: tuple[int, int, int], last: int | None = None
) -> tuple[ScalarFunction, tuple[Tensor, ...]]:
    """The mask_mod of a mask; refuses masks of another size than batch, heads and length."""
    from torch.nn.attention.flex_attention import BlockMask

    if isinstance(block_mask, PairMask):
        given: tuple[Any, ...] = block_mask.batch, block_mask.heads, block_mask.seq_len, block_mask.seq_len
    elif isinstance(block_mask, BlockMask):
        given = *block_mask.kv_num_blocks.shape[:2], *block_mask.seq_lengths
    else:
        hint = "cp_mesh.create_block_mask(mask_mod, B, H, S, S)"
        refuse("block_mask", "a mask of create_block_mask", type(block_mask).__name__, hint)
    batch, heads, length = sizes
    if given[0] not in (None, 1, batch) or given[1] not in (None, 1, heads) or set(given[2:]) != {length}:
        expected = f"the whole sequence: B 1 or {batch}, H 1 or {heads}, {length} queries and keys"
        hint = "make it of the global length, and never slice it; pass seq_len= where shards are of unequal lengths"
        refuse("block_mask", expected, given, hint)
    function, captured = _trace("mask_mod", block_mask.mask_mod, query, last)
    assert function is not None
    if isinstance(block_mask, BlockMask):
        if any(isinstance(x, DTensor) for x in captured):
            hint = "cp_mesh.create_block_mask(mask_mod, B, H, S, S) has none"
            refuse("block_mask", "blocks of plain tensors", "a mask_mod of DTensors", hint, UnsupportedError)
        _check_blocks(block_mask, function, captured, sizes)
    return function, captured


_checked: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()


def _check_blocks(
    block_mask: Any, function: ScalarFunction, captured: Sequence[Tensor], sizes: tuple[int, int, int]
) -> None:
    """Refuse blocks that are not those of mask_mod: it would not be the whole mask. Looks at each mask once."""
    key = function.handle, sizes, Unchanged(captured)
    if _checked.get(block_mask) == key:
        return
    device, (rows, keys) = block_mask.kv_num_blocks.device, block_mask.BLOCK_SIZE
    b, h, every = (torch.arange(n, device=device) for n in sizes)
    listed, whole = block_mask.to_dense().bool(), None
    if block_mask.full_kv_num_blocks is not None:
        of_full = block_mask.full_kv_num_blocks, block_mask.full_kv_indices
        whole = type(block_mask).from_kv_blocks(*of_full, BLOCK_SIZE=block_mask.BLOCK_SIZE).to_dense().bool()
    for i, at in enumerate(every.split(rows)):
        seen = function.of_pairs(None, (b, h, at, every), captured)
        blocks = seen.split(keys, dim=3)
        some = torch.stack([x.any(-1).any(-1) for x in blocks], -1)
        alike = not (some & ~listed[:, :, i, : len(blocks)]).any()
        if alike and whole is not None:
            all_of = torch.stack([x.all(-1).all(-1) for x in blocks], -1)
            alike = not (whole[:, :, i, : len(blocks)] & ~all_of).any()
        if not alike:
            hint = "say the whole mask in mask_mod: cp_mesh.create_block_mask(mask_mod, B, H, S, S)"
            refuse("block_mask", "blocks that follow from its mask_mod", "others", hint, UnsupportedError)
    _checked[block_mask] = key
