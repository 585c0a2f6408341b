"""Seeing calls of attention: those of a core become sharded ones, those outside of the plan are refused.

Both are `TorchFunctionMode`s. Such a mode sees what Python code calls while it is active: functions of torch and
torch.nn.functional, and operators of PyTorch (torch.ops.aten), in eager mode and while torch.compile traces. It does
not see code of torch.jit.script, calls made in C++ or in another thread, attention written as matmul and softmax, or
the kernels of other packages; nor, while torch.compile traces, private functions such as
torch._scaled_dot_product_attention_math (its operator, torch.ops.aten._scaled_dot_product_attention_math, it does see),
and what is in the body of a higher-order operator, such as torch.cond.
"""

from __future__ import annotations

import functools
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from types import FrameType
from typing import Any, NoReturn

import torch
import torch.nn.functional as F
import torch.utils.checkpoint
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from cp_mesh._torch import (
    ASKS_TENSORS,
    ATTENTION_OPS,
    COMPILED,
    COMPILED_CALL,
    FLEX,
    constant_in_traces,
    function_mode,
    loaded_dynamo,
    sdpa,
)
from cp_mesh.call.op import attention_op
from cp_mesh.call.passes import check_length, length_of_call
from cp_mesh.errors import UnsupportedError, refuse
from cp_mesh.wrap import FILE, STYLE, WATCH, check_class, replace_forward, replaced

# The functions that attend, by name (torch.compile guards every look-up of a function, none of a name), and the dim of
# query and key that counts rows; None: it always is self-attention. `nn.MultiheadAttention` hands on [L, N, E].
_DIMS = {"scaled_dot_product_attention": -2, "flex_attention": -2, "multi_head_attention_forward": 0} | ATTENTION_OPS
ROWS = _DIMS | {f"{name}.default": dim for name, dim in _DIMS.items()}  # and as operators are named
ATTENTION = frozenset(ROWS)
# What torch.compile makes of torch.utils.checkpoint: an operator, in whose body the mode that sees it is not active.
CHECKPOINTS = frozenset(("tag_activation_checkpoint", "wrap_activation_checkpoint"))


def call_function(func: Any, args: Any, kwargs: Any) -> Any:
    if func is Tensor.unflatten:  # torch.compile traces a call of the method, but not what the function holds
        return args[0].unflatten(*args[1:], **kwargs)
    return func(*args, **kwargs)


PUT_BACK = (
    "what it does around the call is not known: leave it out of the core, or put PyTorch's back, "
    "F.scaled_dot_product_attention = torch._C._nn.scaled_dot_product_attention"
)


def replaced_sdpa() -> str:
    """What stands in the place of PyTorch's `F.scaled_dot_product_attention`, in words; "" where that is there."""
    found = F.scaled_dot_product_attention
    if found is sdpa:
        return ""
    code = getattr(found, "__code__", None)  # a wrapper may have the name of what it wraps
    return repr(found) if code is None else f"the function of {code.co_filename}, line {code.co_firstlineno}"


@constant_in_traces  # what it raises is no reason to try uncompiled
def _refuse_flex() -> NoReturn:
    raise UnsupportedError(
        "ContextParallel: PyTorch's flex_attention is not available in a core: it is told of this rank's rows alone. "
        "Import cp_mesh.flex_attention under its name, and call it alike in the core; in a model that is compiled it "
        "is left out of the graph"
    )


class Interception(TorchFunctionMode):
    """Lives for one forward of one core: turns its calls of SDPA into the style's, and counts them.

    Args:
        attend: called instead of `F.scaled_dot_product_attention`.
        attend_by_functions: called by `cp_mesh.flex_attention`, which finds this mode.
        announce: told of what is refused here, before it is raised.

    Attributes:
        calls: how many there were.
    """

    def __init__(
        self,
        attend: Callable[..., Any],
        attend_by_functions: Callable[..., Any],
        announce: Callable[[Exception], None],
    ) -> None:
        super().__init__()
        self.attend, self.attend_by_functions, self.announce = attend, attend_by_functions, announce
        self.calls, self.graded = 0, torch.is_grad_enabled()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        if name not in ATTENTION and name not in CHECKPOINTS and not _asked_by_flex(func, name):
            return call_function(func, args, kwargs)
        try:
            if func is not F.scaled_dot_product_attention and name not in CHECKPOINTS:
                if name not in ATTENTION or name == "flex_attention":
                    _refuse_flex()
                if func is sdpa and (wrapper := replaced_sdpa()):
                    expected = "PyTorch's own F.scaled_dot_product_attention"
                    refuse("ContextParallel", expected, f"{wrapper}, which calls it", PUT_BACK, UnsupportedError)
                raise UnsupportedError(
                    f"ContextParallel: {name} is not available in a core; call F.scaled_dot_product_attention "
                    "and say the mask as ContextParallel(mask=Mask(...)), or call cp_mesh.flex_attention"
                )
            self._count(name)
        except Exception as error:
            self.announce(error)
            raise
        return self.attend(*args, **kwargs)

    def flex_attention(self, *args: Any) -> Any:
        """`cp_mesh.flex_attention` in the core."""
        try:
            self._count("flex_attention")
        except Exception as error:
            self.announce(error)
            raise
        return self.attend_by_functions(*args)

    def _count(self, name: str) -> None:
        if name in CHECKPOINTS or (self.graded and not torch.is_grad_enabled()) or _inside_checkpoint():
            raise UnsupportedError(
                "ContextParallel: attention inside of a checkpoint, or of no_grad, that the core itself begins is "
                "not available: the backward would recompute it outside of the core, from this rank's rows alone; "
                "checkpoint the module that holds the core, checkpoint(block, x, use_reentrant=False)"
            )
        self.calls += 1


def _asked_by_flex(func: Any, name: str) -> bool:
    """Whether PyTorch's flex_attention asks what a tensor is like: a function in Python, which no mode sees itself."""
    if torch.compiler.is_compiling() or (func is not Tensor.size and name != "__get__"):
        return False
    caller = sys._getframe(2)
    return caller.f_globals.get("__name__") == FLEX and caller.f_code.co_name in ASKS_TENSORS


def keep_uncompiled(*functions: Callable[..., Any]) -> None:
    """Have torch.compile trace these functions of modes, and those of this module, within other code alone.

    Where it falls back within a forward it would compile them by themselves, and of getters, such as those of
    `Tensor.ndim` and `Tensor.is_nested`, it tells none from another: each would return what the first one did.
    """
    skip_code = getattr(loaded_dynamo(), "skip_code", None)
    if skip_code is not None:
        own = Interception.__torch_function__, Watch.__torch_function__, call_function, _asked_by_flex
        for function in (*own, *functions):
            skip_code(function.__code__)


def _inside_checkpoint() -> bool:
    """Whether a checkpoint was begun between the core's forward and here; one that is traced is seen as an operator."""
    frame: FrameType | None = None if torch.compiler.is_compiling() else sys._getframe(1)
    while frame is not None and frame.f_code.co_filename != FILE:
        if frame.f_code.co_filename == torch.utils.checkpoint.__file__:
            return True
        frame = frame.f_back
    return False


class Watch(TorchFunctionMode):
    """Refuses self-attention outside of cores: it would see one shard.

    Args:
        group_name, seq_len: while a root is traced, its cp group and the tokens of its whole sequence, which are then
            compared with those of its cores. Roots in eager mode have `ROOT` for that.
        local_rows: of this rank, in an eager forward without positions: as many that are counted from 0 are warned of.
            A `ShardInput` tells them of the rows that it shards.
        root: in an eager forward the module that runs, by whose names attention outside of the plan is told.
    """

    def __init__(
        self,
        group_name: str | None = None,
        seq_len: int | None = None,
        local_rows: int | None = None,
        root: nn.Module | None = None,
    ) -> None:
        super().__init__()
        self.root = root
        self.group_name, self.seq_len, self.local_rows = group_name, seq_len, local_rows

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        if name in ATTENTION:
            dim = ROWS[name]
            if dim is None or _rows("query", 0, dim, args, kwargs) == _rows("key", 1, dim, args, kwargs):
                _refuse(name, self.root)
        elif name in CHECKPOINTS:  # traced: Dynamo does not show its body to a mode outside of it
            body = functools.partial(_watched_body, self.group_name, self.seq_len, args[0])
            return func(body, *args[1:], **kwargs)
        elif func is attention_op and self.seq_len is not None:
            group_name, seq_len = length_of_call(args)
            if seq_len is not None and group_name == self.group_name:
                check_length(seq_len, self.seq_len)
        elif name == "arange" and self.local_rows is not None and _counted(args, kwargs) == self.local_rows:
            warnings.warn(
                f"cp_mesh: the model counts {self.local_rows} positions from 0, as many as this rank holds rows: on "
                "most ranks they are others'. Give its forward an argument for positions, and name it in "
                "ShardedModel(sequence, positions=...), or among the inputs of ShardInput; without these, pass "
                "sequence.positions(seq_len)",
                stacklevel=2,
            )
            self.local_rows = None
        return call_function(func, args, kwargs)


def _counted(args: Any, kwargs: Any) -> Any:
    """How far torch.arange counts from 0; None for other ranges."""
    given = [*args, *(kwargs[name] for name in ("end",) if name in kwargs)]
    if kwargs.get("start", 0) != 0 or (len(given) > 1 and given[0] != 0):
        return None
    return given[min(1, len(given) - 1)] if given else None


def _rows(name: str, place: int, dim: int, args: Any, kwargs: Any) -> int | None:
    """Rows of the query or key of a call; None where it has another name, so that the call counts as self-attention."""
    given = args[place] if len(args) > place else kwargs.get(name)
    return None if given is None else given.shape[dim]


def _watched_body(
    group_name: str | None, seq_len: int | None, body: Callable[..., Any], *args: Any, **kwargs: Any
) -> Any:
    with Watch(group_name, seq_len):
        return body(*args, **kwargs)


def _refuse(name: str, root: nn.Module | None = None) -> NoReturn:
    caller = "" if root is None or torch.compiler.is_compiling() else _calling(root)
    hint = f"add {caller!r}: ContextParallel(sequence)" if caller else "name the module that calls it in the plan"
    refuse(
        "plan",
        "every self-attention in a ContextParallel module",
        f"{name} outside of one{f', in {caller!r}' if caller else ''}, where each rank attends to its shard alone",
        f"{hint}; watch=False (of ShardedModel, or of parallelize without one) if this attends to another sequence, "
        "which is whole",
    )


def _calling(root: nn.Module) -> str:
    """The name in ``root`` of the innermost of its modules whose method is running."""
    names = {id(module): name for name, module in root.named_modules()}
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if name := names.get(id(frame.f_locals.get("self"))):
            return name
        frame = frame.f_back
    return ""


def watch_encoders(root: nn.Module) -> None:
    """Refuse calls of `nn.TransformerEncoderLayer` in evaluation that torch.compile traces.

    They may take PyTorch's fast path, an operator that Dynamo does not show to function modes.
    """
    for module in root.modules():
        if isinstance(module, nn.TransformerEncoderLayer) and replaced(module, WATCH) is None:
            replace_forward(module, WATCH, "Watch", _encode)


def _encode(module: nn.Module, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    if torch.compiler.is_compiling() and not module.training:
        _refuse("nn.TransformerEncoderLayer")
    return forward(*args, **kwargs)


@contextmanager
def watching(root: nn.Module, local_rows: int | None = None) -> Iterator[None]:
    """Refuse attention outside of the plan in one eager forward of ``root``.

    Parts that are compiled are traced inside of a watch of their own, now and whenever they are traced again, and
    called without this one: torch.compile would compile them for this forward, and anew for the next one. Once traced,
    a watch costs nothing.
    """
    keep_uncompiled()
    watch = Watch(local_rows=local_rows, root=root)
    with ExitStack() as stack:
        for part in root.modules():
            check_class(part)
        for part, entry in _compiled_parts(root):
            inner = part.get_submodule(COMPILED) if entry == "forward" else part
            assert isinstance(inner, nn.Module)
            if replaced(inner, WATCH) is None and replaced(inner, STYLE) is None:
                replace_forward(inner, WATCH, "Watch", _watched)
            stack.callback(part.__dict__.__setitem__, entry, part.__dict__[entry])
            part.__dict__[entry] = functools.partial(_without, watch, part.__dict__[entry])
        stack.enter_context(watch)
        yield


def watched() -> Watch | None:
    """The watch of an eager root, if it is the innermost mode."""
    mode = None if torch.compiler.is_compiling() else function_mode()
    return mode if isinstance(mode, Watch) else None


@contextmanager
def unwatched() -> Iterator[None]:
    """Without the watch of an eager root: in a core, which sees its own attention."""
    watch = function_mode()
    assert isinstance(watch, Watch)
    watch.__exit__(None, None, None)
    try:
        yield
    finally:
        watch.__enter__()


def _watched(module: nn.Module, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    with Watch():
        return forward(*args, **kwargs)


def _without(watch: Watch, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    if function_mode() is not watch:
        return call(*args, **kwargs)
    with unwatched():
        return call(*args, **kwargs)


def _compiled_parts(module: nn.Module) -> Iterator[tuple[nn.Module, str]]:
    """Compiled modules below ``module`` that lie in no other one and in no core, and the attribute that calls them."""
    dynamo = loaded_dynamo()
    for part in module.children():
        if part.__dict__.get(COMPILED_CALL) is not None:
            yield part, COMPILED_CALL
        elif dynamo is not None and isinstance(part, dynamo.OptimizedModule):
            yield part, "forward"
        elif replaced(part, STYLE) is None:
            yield from _compiled_parts(part)
