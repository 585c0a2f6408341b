"""Tracing a score_mod or mask_mod: a graph of what it computes for one pair, and the tensors that it reads.

A function may read other tensors or numbers in each call. So it is traced in every call, unless `flex.fingerprint`
shows that nothing it depends on has changed. Captured tensors become arguments of the graph and may then have
gradients. `cp_mesh.kernels.functions` keeps the graph under its handle.
"""

from __future__ import annotations

import operator
from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from functools import reduce
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.fx import Graph, Node
from torch.fx.node import map_aggregate
from torch.overrides import TorchFunctionMode

from cp_mesh._torch import (
    DispatchMode,
    function_modes,
    schema_of,
    set_grad_enabled,
    to_copy,
    tree_leaves,
    tree_map_only,
    without_modes,
)
from cp_mesh.errors import UnsupportedError, refuse
from cp_mesh.flex.fingerprint import Reached, reached_by
from cp_mesh.kernels.combine import accumulation_dtype
from cp_mesh.kernels.functions import ScalarFunction

TRACEABLE = "a function of one pair that torch can trace"
BY_VALUE = "torch.where chooses by value, without a branch, and x.float() converts x"
KEPT = 64
"""Traces that are kept."""
_known: OrderedDict[Hashable, tuple[ScalarFunction, tuple[int, ...]]] = OrderedDict()  # with indices of read tensors
_VALUES = frozenset((
    Tensor.__bool__, Tensor.__int__, Tensor.__float__, Tensor.__complex__, Tensor.__index__, Tensor.item, Tensor.tolist,
    Tensor.numpy, Tensor.__array__, Tensor.__dlpack__, Tensor.__repr__, Tensor.__format__, Tensor.data_ptr,
    Tensor.untyped_storage,
))  # fmt: skip
"""Functions that read values of a tensor, some without an operator: a trace would fix the values of its one pair."""
_OF_NUMBERS = frozenset((
    torch.tensor, torch.as_tensor, torch.asarray, torch.sparse_coo_tensor, Tensor.new_tensor, Tensor.new
))  # fmt: skip

_DIMS_READ: dict[Any, Callable[..., Sequence[int]]] = {
    torch.ops.aten.index.Tensor: lambda x, indices: [dim for dim, index in enumerate(indices) if index is not None],
    torch.ops.aten.index_select.default: lambda x, dim, index: [dim % x.ndim],
    torch.ops.aten.gather.default: lambda x, dim, *_: [dim % x.ndim],
    torch.ops.aten.take.default: lambda x, index: range(x.ndim),
    torch.ops.aten.embedding.default: lambda x, *_: [0],
}
"""Operators that read a tensor at an index, and the dims that they index."""
_SUMS = (torch.ops.aten.add, torch.ops.aten.sub, torch.ops.aten.rsub)


def trace(
    what: str,
    function: Callable[..., Tensor] | None,
    query: Tensor,
    last: int | None = None,
    has_pairs: bool = True,
) -> tuple[ScalarFunction | None, tuple[Tensor, ...]]:
    """Trace a function of scalars: its graph, and the tensors that it reads.

    ``has_pairs``: the call has pairs of query and key. Without any (no tokens) captured tensors may be empty.
    """
    if function is None:
        return None, ()
    if not callable(function):
        refuse(what, "a function of scalars", type(function).__name__, "def score_mod(score, b, h, q_idx, kv_idx): ...")
    reached = reached_by(function)
    key = None if reached is None else _key(what, reached, query, last, has_pairs)
    if reached is not None and key in _known:
        _known.move_to_end(key)
        known, places = _known[key]
        return known, tuple(reached.tensors[i] for i in places)
    names, dtypes = ["b", "h", "q_idx", "kv_idx"], [torch.int64] * 4
    dtype = torch.bool
    if what == "score_mod":
        dtype = accumulation_dtype(query.dtype)
        names, dtypes = ["score", *names], [dtype, *dtypes]
    with without_modes():  # such as the mode of selective checkpointing, which counts operators
        scalars = [torch.zeros((), dtype=x, device=query.device) for x in dtypes]
        recorder = _Recorder(what, dict(zip(names, scalars, strict=True)), has_pairs)
        with torch.no_grad(), _Reading(what), recorder:
            if last is not None:
                scalars[-2:] = (x.clamp(max=last) for x in scalars[-2:])
            result = function(*scalars)
        if not isinstance(result, Tensor) or result.ndim or (what == "mask_mod" and result.dtype != dtype):
            is_tensor = isinstance(result, Tensor)
            got = f"{result.dtype} {list(result.shape)}" if is_tensor else type(result).__name__
            refuse(what, f"a scalar tensor{' of bool' if what == 'mask_mod' else ''}", got, "index every dim")
        graph, captured = recorder.finish(result)
    for x in captured:
        if x.device != query.device:
            refuse(f"{what}: a captured tensor", f"a tensor on {query.device}", x.device, "move it there")
    found = ScalarFunction.of(what, graph, captured)
    if reached is not None and key is not None:
        at = {id(x): i for i, x in enumerate(reached.tensors)}
        if all(id(x) in at for x in captured):
            _known[key] = found, tuple(at[id(x)] for x in captured)
            if len(_known) > KEPT:
                _known.popitem(last=False)
    return found, captured


def _key(what: str, reached: Reached, query: Tensor, last: int | None, has_pairs: bool) -> Hashable:
    """The cache key of a trace: all that it depends on except the captured tensors; None if a mode may change it."""
    device = query.device.type
    autocast = torch.is_autocast_enabled(device) and torch.get_autocast_dtype(device)
    if any(not type(x).__module__.startswith("cp_mesh.") for x in function_modes()):
        return None
    return what, reached.key, query.dtype, query.device, last, has_pairs, torch.get_default_dtype(), autocast


class _Reading(TorchFunctionMode):
    """Function mode of a trace: makes indexing by scalar tensors traceable, refuses DTensors and grad modes."""

    def __init__(self, what: str) -> None:
        super().__init__()
        self._what = what

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for x in tree_leaves((args, kwargs)):
            if isinstance(x, DTensor):
                hint = "make it whole before the call: x.full_tensor(grad_placements=[Partial()]), or of rows in layout"
                hint += " order sequence.unshard(part, dim)"
                refuse(self._what, "plain captured tensors", f"a DTensor, {x.placements}", hint, UnsupportedError)
        if func is set_grad_enabled:
            hint = "x.detach() has no gradient"
            refuse(self._what, "a function in one grad mode", "torch.no_grad or the like", hint, UnsupportedError)
        if func in _VALUES:
            got = f"an operation that depends on values, Tensor.{func.__name__}"
            refuse(self._what, TRACEABLE, got, BY_VALUE, UnsupportedError)
        if func in _OF_NUMBERS:
            lists = [x for x in (*args, *(kwargs or {}).values()) if isinstance(x, list | tuple)]
            if any(isinstance(x, Tensor) for x in tree_leaves(lists)):
                got = f"an operation that depends on values, {func.__name__} of tensors in a list"
                refuse(self._what, TRACEABLE, got, "torch.stack joins tensors", UnsupportedError)
        if func is Tensor.__getitem__:
            index = args[1] if isinstance(args[1], tuple) else (args[1],)
            if any(isinstance(i, Tensor) for i in index) or (
                len(index) == args[0].ndim and set(map(type, index)) == {int}
            ):
                return torch.ops.aten.index.Tensor(args[0], [self._index(args[0], i) for i in index])
        return func(*args, **(kwargs or {}))

    def _index(self, x: Tensor, i: Any) -> Tensor | None:
        """An index as aten.index takes it; PyTorch's indexing would read the value of a scalar tensor."""
        if isinstance(i, Tensor) and not i.is_floating_point() and i.dtype != torch.bool:
            return i
        if type(i) is int:
            return torch.scalar_tensor(i, dtype=torch.int64, device=x.device)
        if i == slice(None):
            return None
        got, hint = getattr(i, "dtype", i), "torch.where chooses by value"
        refuse(f"{self._what}: an index beside tensors", "integers, or a full slice", got, hint, UnsupportedError)


class _Recorder(DispatchMode):
    """Dispatch mode of a trace: records operators in a graph whose arguments include the tensors that it reads.

    Refuses writes, random numbers, collectives and operators that depend on values, before they run. `make_fx` would
    make the same graph but takes ten times as long, and a function may be traced in every call.
    """

    def __init__(self, what: str, scalars: dict[str, Tensor], has_pairs: bool) -> None:
        super().__init__()
        self._what, self._graph, self._captured, self._has_pairs = what, Graph(), list[Tensor](), has_pairs
        self._nodes: dict[int, Node] = {}
        self._alive: list[Tensor] = []  # keeps tensors alive, as `_nodes` has them by id
        for name, x in scalars.items():
            self._note(x, self._graph.placeholder(name))
        self._last_argument = next(iter(reversed(self._graph.nodes)))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        tags, got, hint = func.tags, "", ""
        if schema_of(func).is_mutable:
            got, hint = f"a write, {func}", "x = x + 1 makes a new tensor"
        elif torch.Tag.nondeterministic_seeded in tags:
            got, hint = f"random numbers, {func}", "make them outside, as a tensor that the function reads"
        elif torch.Tag.data_dependent_output in tags or (
            torch.Tag.dynamic_output_shape in tags and func is not torch.ops.aten.index.Tensor
        ):
            got, hint = f"an operation that depends on values, {func}", BY_VALUE
        elif "c10d" in func.namespace:
            got, hint = f"communication, {func}", "call x.full_tensor(grad_placements=[Partial()]) before"
        if got:
            refuse(self._what, TRACEABLE, got, hint, UnsupportedError)
        if func is torch.ops.aten.lift_fresh.default:  # its constant is captured as it is
            return args[0]
        if func is torch.ops.aten.log_sigmoid_forward.default:
            with self:
                return _log_sigmoid(*args)
        kwargs = kwargs or {}
        if func.overloadpacket in _SUMS and (alpha := [*args[2:], *kwargs.values()]):
            dtype = func(*args, **kwargs).dtype  # PyTorch refuses an alpha of another dtype here
            if dtype != torch.bool:
                with self:
                    return _sum(func.overloadpacket, args[0], args[1], alpha[0], dtype)
        if torch.Tag.pointwise in tags and (dtype := _dtype_of_mixed(args)) is not None:
            with self:
                args = tuple(_converted(x, dtype) for x in args)
        node = self._graph.call_function(func, *map_aggregate((args, kwargs), self._node))
        found = func(*self._readable(func, args), **kwargs)
        if isinstance(found, Tensor):
            self._note(found, node)
        else:
            for i, x in enumerate(found):
                self._note(x, self._graph.call_function(operator.getitem, (node, i)))
        return found

    def _readable(self, func: Any, args: tuple[Any, ...]) -> tuple[Any, ...]:
        """Arguments that can be read: zeros of one element or more in place of an empty tensor that is indexed."""
        if func not in _DIMS_READ or args[0].numel():
            return args
        x, dims = args[0], _DIMS_READ[func](*args)
        if self._has_pairs and any(x.shape[dim] == 0 for dim in dims):
            what, hint = f"{self._what}: a tensor that is read at an index", "a tensor by token has the whole sequence"
            refuse(what, "1 element or more of each dim", tuple(x.shape), hint)
        filled = x.new_zeros([max(1, n) if dim in dims else n for dim, n in enumerate(x.shape)])
        return filled, *tree_map_only(Tensor, torch.zeros_like, args[1:])

    def knows(self, x: Tensor) -> bool:
        """Whether the function read or made this tensor."""
        return id(x) in self._nodes

    def _node(self, x: Any) -> Any:
        """The graph node of a tensor, which is captured if it is new; other values unchanged."""
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
        """The graph without unused arguments, and the captured tensors that it uses."""
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


def _kind(of: Tensor | torch.dtype) -> tuple[bool, bool]:
    dtype = of.dtype if isinstance(of, Tensor) else of
    return dtype == torch.bool, dtype.is_floating_point


def _converted(x: Any, dtype: torch.dtype) -> Any:
    """A tensor converted to a dtype of the same kind; other values unchanged."""
    if not isinstance(x, Tensor) or x.dtype == dtype or _kind(x) != _kind(dtype):
        return x
    return to_copy(x, dtype=dtype)


def _dtype_of_mixed(args: Sequence[Any]) -> torch.dtype | None:
    """The dtype in which PyTorch computes with scalars of several dtypes of one kind; None for other arguments.

    For all pairs at once some of these have dims, and PyTorch would then take the dtype of those with dims.
    """
    tensors = [x for x in args if isinstance(x, Tensor) and x.dtype != torch.bool]
    if any(x.ndim for x in tensors) or len({_kind(x) for x in tensors}) != 1 or len({x.dtype for x in tensors}) == 1:
        return None
    return reduce(torch.promote_types, (x.dtype for x in tensors))


def _sum(packet: Any, x: Any, y: Any, alpha: float, dtype: torch.dtype) -> Tensor:
    """The sum without alpha: kernels turn numbers into tensors, and alpha has no overload that takes a tensor."""
    if packet is torch.ops.aten.rsub:
        x, y = y, x
    if isinstance(y, Tensor) and y.dtype != dtype:
        y = y.to(dtype)
    found: Tensor = x + y * alpha if packet is torch.ops.aten.add else x - y * alpha
    return found


def _log_sigmoid(x: Tensor) -> tuple[Tensor, Tensor]:
    """PyTorch's operator in others, as vmap cannot batch it on CUDA, where its second result is empty."""
    return torch.minimum(x, torch.zeros_like(x)) - (-x.abs()).exp().log1p(), x
