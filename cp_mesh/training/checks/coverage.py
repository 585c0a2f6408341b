"""Refuse attention outside of the plan, in the first eager forward and whenever torch.compile traces.

The same mode warns if the model counts positions from 0 on each rank.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from types import FrameType
from typing import Any, NoReturn
from weakref import ref

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from cp_mesh._torch import COMPILED, COMPILED_CALL, constant_in_traces, function_mode, loaded_dynamo
from cp_mesh.call.op import attention_op
from cp_mesh.call.passes import check_length, length_of_call
from cp_mesh.errors import refuse, warn
from cp_mesh.training.foreign_functions import runs_alone
from cp_mesh.training.sdpa_mode import ATTENTION, CHECKPOINTS, ROWS, call_function, keep_uncompiled
from cp_mesh.wrap import STYLE, WATCH, check_classes, replace_forward, replaced

POSITION_CALLS = ("__getitem__", "narrow", "arange")
"""Names of functions by which models count positions, or slice tables of them."""


class UnplannedAttentionMode(TorchFunctionMode):
    """Refuses self-attention outside of cores, where it would see one shard only.

    Args:
        group_name, seq_len: while a root is traced, its cp group and the length of its whole sequence, to compare with
            its cores. Eager roots use `ROOT` for that.
        local_rows: the local length in an eager forward. A `ShardInput` sets it when it shards.
        counts: whether to warn of torch.arange too: False if positions are passed to the model.
        root: the module that runs, in an eager forward; errors name the calling submodule.
        tokens: the local length, to find convolutions over tokens; None: they are not looked for.
    """

    def __init__(
        self,
        group_name: str | None = None,
        seq_len: int | None = None,
        local_rows: int | None = None,
        counts: bool = True,
        root: nn.Module | None = None,
        tokens: int | None = None,
    ) -> None:
        super().__init__()
        self.group_name, self.seq_len, self.local_rows, self.root = group_name, seq_len, local_rows, root
        self.tokens = tokens
        self.position_calls = POSITION_CALLS[: 2 + counts]
        self.buffers = {id(x) for x in root.buffers()} if root is not None else set()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, name = kwargs or {}, getattr(func, "__name__", "")
        if not torch.compiler.is_compiling() and (file := runs_alone(sys._getframe(1))) is not None:
            _refuse_function(file, self.root)
        if name in ATTENTION:
            dim = ROWS[name]
            if dim is None or _rows("query", 0, dim, args, kwargs) == _rows("key", 1, dim, args, kwargs):
                _refuse(name, self.root)
        elif name in CHECKPOINTS:  # only in traces: Dynamo hides the body from modes outside of it
            body = functools.partial(run_in_mode, self.group_name, self.seq_len, self.tokens, args[0])
            return func(body, *args[1:], **kwargs)
        elif func is attention_op and self.seq_len is not None:
            group_name, seq_len = length_of_call(args)
            if seq_len is not None and group_name == self.group_name:
                check_length(seq_len, self.seq_len)
        elif name == "conv1d" and self.tokens is not None:
            _look_at_convolution(self.tokens, self.root, *args, **kwargs)
        elif name in self.position_calls:
            self.look(name, args, kwargs)
        return call_function(func, args, kwargs)

    def look(self, name: str, args: Any, kwargs: Any) -> None:
        """Warn, once, if the model counts positions from 0 up to the local length, or slices a table so."""
        rows = self.local_rows
        if rows is None or torch.compiler.is_compiling():  # the rest breaks graphs
            return
        if sys._getframe(2).f_globals.get("__name__", "").startswith("cp_mesh."):
            return  # recurrent layers count rows of documents
        if name == "arange":
            found = "counts" if _end_of_range(*args, **kwargs) == rows else ""
        else:
            is_table = isinstance(args[0], nn.Parameter) or id(args[0]) in self.buffers
            found = "cuts a table to" if is_table and _is_cut(name, rows, *args, **kwargs) else ""
        if found:
            self.local_rows = None
            warn(
                f"the model {found} {rows} positions from 0, as many as this rank holds rows: they are wrong on most "
                "ranks. Give its forward an argument for positions, and name it in ShardedModel(sequence, "
                "positions=...), or among the inputs of ShardInput; without these, pass sequence.positions(seq_len). "
                "cp_mesh.probe(model, batch) finds out whether the model is right"
            )


def _end_of_range(*given: Any, start: Any = 0, end: Any = None, step: Any = 1, **_: Any) -> Any:
    """Return the end of a torch.arange from 0 with step 1; None for other ranges."""
    bounds = given if end is None else (*given, end)
    first, last, by = (*(bounds if len(bounds) > 1 else (start, *bounds)), step)[:3]
    return last if first == 0 and by == 1 else None


def _is_cut(name: str, rows: int, table: Tensor, *given: Any, **named: Any) -> bool:
    """Whether a table of floating-point numbers is sliced to its first ``rows`` entries along some dim."""
    if not (table.is_floating_point() or table.is_complex()):
        return False
    if name == "narrow":
        dim, start, length = (*given, *named.values())[:3]
        return bool(start == 0 and length == rows < table.shape[dim])
    index = [x for x in (given[0] if isinstance(given[0], tuple) else given[:1]) if x is not None]
    cuts = ((x, size) for x, size in zip(index, table.shape, strict=False) if isinstance(x, slice))
    return any(x.start in (None, 0) and x.stop == rows < size for x, size in cuts)


def _rows(name: str, place: int, dim: int, args: Any, kwargs: Any) -> int | None:
    """Return the length of a call's query or key; None if it has another name, so the call counts as self-attention."""
    given = args[place] if len(args) > place else kwargs.get(name)
    return None if given is None else given.shape[dim]


def _look_at_convolution(
    tokens: int, root: nn.Module | None, input: Tensor, weight: Tensor, *_: Any, **__: Any
) -> None:
    """Refuse a convolution over the rows of this rank alone, with or without padding."""
    width = weight.shape[-1]
    if width > 1 and tokens <= input.shape[-1] < tokens + width:
        where = "" if root is None or torch.compiler.is_compiling() else f", in {_calling(root)!r}"
        _refuse_convolution(width, tokens, where)


def _refuse_function(file: str, root: nn.Module | None) -> NoReturn:
    hint = "call it by a name that the module's file imports, in a RecurrentParallel module; watch=False if these are "
    got = f"one of {file} on the tokens of this rank{'' if root is None else f', in {_calling(root)!r}'}"
    refuse("plan", "functions of other packages that RecurrentParallel replaces", got, f"{hint}no tokens")


@constant_in_traces  # so that Dynamo raises the error, and does not fall back to eager code
def _refuse_convolution(width: int, tokens: int, where: str) -> NoReturn:
    hint = "name its module in the plan, RecurrentParallel(sequence), where it calls nn.Conv1d(D, D, W, groups=D, "
    hint += "padding=W - 1) or cp_mesh.mixers.causal_conv1d; watch=False if these are no tokens"
    got = f"a convolution of {width} over the {tokens} of this rank{where}"
    refuse("plan", "every convolution over tokens in a RecurrentParallel module", got, hint)


def _refuse(name: str, root: nn.Module | None = None) -> NoReturn:
    caller = "" if root is None or torch.compiler.is_compiling() else _calling(root)
    hint = f"add {caller!r}: ContextParallel(sequence)" if caller else "name the module that calls it in the plan"
    refuse(
        "plan",
        "every self-attention in a ContextParallel module",
        f"{name} outside of one{f', in {caller!r}' if caller else ''}, where each rank attends to its shard alone",
        f"{hint}; watch=False (of ShardedModel, or of parallelize without one) if this attends to another sequence "
        "that is not sharded",
    )


def _calling(root: nn.Module) -> str:
    """Return the name, in ``root``, of the innermost module on the call stack."""
    names = {id(module): name for name, module in root.named_modules()}
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if name := names.get(id(frame.f_locals.get("self"))):
            return name
        frame = frame.f_back
    return ""


def look_of(root: nn.Module) -> tuple[Any, ...]:
    """Return what a watch depends on: the module, its modes, and the classes of all modules in it, styled or not."""
    return ref(root), root.training, torch.is_grad_enabled(), hash(tuple(map(type, root.modules())))


def watch_encoders(root: nn.Module) -> None:
    """Refuse calls of `nn.TransformerEncoderLayer` in evaluation that torch.compile traces.

    They may take PyTorch's fast path, an operator that Dynamo hides from function modes.
    """
    for module in root.modules():
        if isinstance(module, nn.TransformerEncoderLayer) and replaced(module, WATCH) is None:
            replace_forward(module, WATCH, "Watch", _encode)


def _encode(module: nn.Module, forward: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    if torch.compiler.is_compiling() and not module.training:
        _refuse("nn.TransformerEncoderLayer")
    return forward(*args, **kwargs)


@contextmanager
def first_forward(
    root: nn.Module, local_rows: int | None = None, counts: bool = True, tokens: int | None = None
) -> Iterator[None]:
    """Refuse attention outside of the plan in one eager forward of ``root``.

    Compiled submodules are traced inside of a watch of their own, in this forward and in later traces. They are called
    without this watch, since torch.compile would compile them for this forward and again for the next one. A traced
    watch costs nothing at run time.
    """
    keep_uncompiled(UnplannedAttentionMode.__torch_function__, UnplannedAttentionMode.look)
    watch = UnplannedAttentionMode(local_rows=local_rows, counts=counts, root=root, tokens=tokens)
    check_classes(root)
    with ExitStack() as stack:
        for part, entry in _compiled_parts(root):
            inner = part.get_submodule(COMPILED) if entry == "forward" else part
            assert isinstance(inner, nn.Module)
            if replaced(inner, WATCH) is None and replaced(inner, STYLE) is None:
                replace_forward(inner, WATCH, "Watch", functools.partial(_run_traced, tokens))
            stack.callback(part.__dict__.__setitem__, entry, part.__dict__[entry])
            part.__dict__[entry] = functools.partial(_run_suspended, part.__dict__[entry])
        stack.enter_context(watch)
        yield


def current_mode() -> UnplannedAttentionMode | None:
    """Return the watch of an eager root if it is the innermost mode, else None."""
    mode = None if torch.compiler.is_compiling() else function_mode()
    return mode if isinstance(mode, UnplannedAttentionMode) else None


def suspended() -> AbstractContextManager[None]:
    """Suspend the watch of an eager root if it is the innermost mode: in a core, which intercepts its attention."""
    return nullcontext() if (watch := current_mode()) is None else _outside_of(watch)


@contextmanager
def _outside_of(watch: UnplannedAttentionMode) -> Iterator[None]:
    watch.__exit__(None, None, None)
    try:
        yield
    finally:
        watch.__enter__()


def run_in_mode(
    group_name: str | None, seq_len: int | None, tokens: int | None, body: Callable[..., Any], /,
    *args: Any, **kwargs: Any,
) -> Any:  # fmt: skip
    """Call ``body`` in an `UnplannedAttentionMode`, while torch.compile traces it."""
    with UnplannedAttentionMode(group_name, seq_len, tokens=tokens):
        return body(*args, **kwargs)


def _run_traced(tokens: int | None, _: nn.Module, forward: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    return run_in_mode(None, None, tokens, forward, *args, **kwargs)


def _run_suspended(call: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    with suspended():
        return call(*args, **kwargs)


def _compiled_parts(module: nn.Module) -> Iterator[tuple[nn.Module, str]]:
    """Yield the outermost compiled modules below ``module`` that are in no core, and the attribute that calls them."""
    dynamo = loaded_dynamo()
    for part in module.children():
        if part.__dict__.get(COMPILED_CALL) is not None:
            yield part, COMPILED_CALL
        elif dynamo is not None and isinstance(part, dynamo.OptimizedModule):
            yield part, "forward"
        elif replaced(part, STYLE) is None:
            yield from _compiled_parts(part)
