"""Record a pass of a plan, and replay it without the Python around its tensor operations.

Every call of a pass slices the same rows, allocates the same sizes and launches the same kernels with the same numbers,
in the same order on the same streams. Only its input tensors change. So two calls are recorded as lines of Python, with
the inputs as arguments; if both recordings are equal, later calls run the lines. A value that changes between calls,
such as a number read from a tensor, makes the recordings differ.

A dispatch mode records PyTorch operators, functional collectives included. `call` records what the mode cannot see:
launches of Triton and FlashAttention-4, events, streams, barriers. A replay frees each tensor where the recorded call
freed it, so memory is reused at the same points: the waits between streams rely on this. A tensor that is neither an
input nor made in the pass is a constant and must be the same object in both recordings: it belongs to the plan, or to
the memory of a process group, which disables its tapes when it is released (`Memory`).

A call with a step that cannot be recorded (`give_up`), or inside a CUDA graph capture, runs without a tape.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import suppress
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import partial
from typing import Any
from weakref import WeakSet, ref

import torch
from torch import Tensor

from cp_mesh._torch import DispatchMode, schema_of

BEFORE = 16  # calls without a tape first: recording takes 2 to 6 ms, too much for a shape that never comes again
MOST_TAPES = 32  # per plan: layers may differ in strides
MOST_LINES = 20_000
TRIES = 4  # failed recordings, after which a pass is never recorded again
_UNTOLD = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}  # results may differ in the next call
_aten = torch.ops.aten
# The same operations without the schema lookup, which would double their host time.
_FASTER: dict[Any, Callable[..., Any]] = {
    _aten.transpose.int: torch.transpose,
    _aten.as_strided.default: torch.as_strided,
    _aten.view.default: Tensor.view,
    _aten.copy_.default: Tensor.copy_,
}
_ALLOCATES = {_aten.empty.memory_format, _aten.new_empty.default, _aten.empty_like.default, _aten.empty_strided.default}
_PLAIN = (int, bool, str, type(None))


class Tape:
    """``play`` takes the inputs of a pass and returns its results; None once memory that it uses is released."""

    def __init__(self, play: Callable[..., Any]) -> None:
        self.play: Callable[..., Any] | None = play


class Memory:
    """Memory that tapes use and that may be released before their plan."""

    def __init__(self) -> None:
        self._tapes: WeakSet[Tape] = WeakSet()

    def hold(self) -> None:
        """Note that the tape being recorded uses this memory."""
        if (recorder := _recorder.get()) is not None:
            recorder.memories.add(self)

    def give_back(self) -> None:
        """Release the memory: no tape that uses it runs again."""
        for tape in self._tapes:
            tape.play = None

    def named_by(self, tape: Tape) -> None:
        self._tapes.add(tape)


_recorder: ContextVar[_Recorder | None] = ContextVar("recorder", default=None)


def call(function: Callable[..., Any], *args: Any, **named: Any) -> Any:
    """Return ``function(*args, **named)``, tensors or None, and record the call, which no dispatch mode sees.

    The function, and its arguments that are not tensors, must be equal in every call.
    """
    recorder = _recorder.get()
    return function(*args, **named) if recorder is None else recorder.call(function, args, named)


def told(function: Callable[..., Any], *args: Any, **named: Any) -> None:
    """Record ``function(*args, **named)`` without calling it: the caller has done its work already."""
    if (recorder := _recorder.get()) is not None:
        recorder.note(function, None, args, named)


def give_up(why: str) -> None:
    """Give up this recording: the next step cannot be recorded."""
    if (recorder := _recorder.get()) is not None:
        recorder.obstacle = why


def on_error(recover: Callable[[], None]) -> None:
    """Have a replay call ``recover`` if it raises."""
    if (recorder := _recorder.get()) is not None:
        recorder.recover.append(recover)


def repeat(
    tapes: dict[Any, Any],
    what: tuple[Any, ...],
    compute: Callable[..., Any],
    inputs: Sequence[Tensor | None],
) -> Any:
    """Return ``compute(*inputs)``, from a tape if there is one.

    Args:
        tapes: the tapes of one plan by key, updated here.
        what: distinguishes the passes of the plan, and streams.
        compute: depends only on the inputs, the plan and the memory of its process group, and reads no values of the
            inputs on the host; returns tensors, in tuples and dicts.
        inputs: tensors, which are not written.
    """
    key = *what, *[None if x is None else (x.shape, x.stride(), x.dtype, x.data_ptr() % 16) for x in inputs]
    found = tapes.get(key)
    if isinstance(found, Tape):
        if found.play is not None:
            return found.play(*inputs)
        found = None
    if not _are_unlike(inputs) or found is _GIVEN_UP:
        return compute(*inputs)
    if found is None or found.calls < BEFORE:  # these calls compile, allocate and agree with other ranks
        results = compute(*inputs)
        if key not in tapes and len(tapes) >= MOST_TAPES:
            del tapes[next(iter(tapes))]
        tapes[key] = found = found or _Lines()
        found.calls += 1
        return results
    recorder = _Recorder(inputs)
    token = _recorder.set(recorder)
    try:
        with recorder:
            results = compute(*inputs)
    finally:
        _recorder.reset(token)
        recorder.end()
    lines = recorder.lines(results)
    if lines.source and lines.say(found):
        tapes[key] = lines.tape()
    else:
        lines.calls, lines.tries = BEFORE, found.tries + 1
        tapes[key] = lines if lines.tries < TRIES else _GIVEN_UP
    return results


def _are_unlike(inputs: Sequence[Tensor | None]) -> bool:
    """Whether no tensor is given twice: a line could not tell which of two arguments it reads."""
    given = [id(x) for x in inputs if x is not None]
    return len({*given}) == len(given)


@dataclass(eq=False)
class _Lines:
    """One recording; its source is empty if it failed."""

    source: str = ""
    constants: dict[str, Any] = field(default_factory=dict)
    recover: list[Callable[[], None]] = field(default_factory=list)
    memories: set[Memory] = field(default_factory=set)
    calls: int = 0
    tries: int = 0

    def say(self, other: _Lines) -> bool:
        """Whether another recording has equal lines, and the same tensors as constants."""
        if self._steps() != other._steps() or self.constants.keys() != other.constants.keys():
            return False
        pairs = ((x, other.constants[name]) for name, x in self.constants.items())
        return all(x is y or (type(x) is type(y) and not isinstance(x, Tensor) and x == y) for x, y in pairs)

    def _steps(self) -> list[str]:
        """All lines but ``del``: the thread of a collective may hold its tensors last, so their ends vary."""
        return [line for line in self.source.splitlines() if not line.lstrip().startswith("del ")]

    def tape(self) -> Tape:
        namespace = self.constants | {"recover": partial(_recover, self.recover)}
        exec(compile(self.source, __file__.replace("tape.py", "<a recorded pass>"), "exec"), namespace)
        tape = Tape(namespace.pop("play"))  # pop: no reference cycle
        for memory in self.memories:
            memory.named_by(tape)
        return tape


_GIVEN_UP = _Lines()


def _recover(functions: Sequence[Callable[[], None]]) -> None:
    for function in functions:
        with suppress(Exception):  # the error of the pass says more
            function()


class _Code(str):
    """Source text that becomes an argument as it is."""


class _Recorder(DispatchMode):
    """Records one call as lines. Each tensor has a variable, deleted in the line where the tensor was freed."""

    def __init__(self, inputs: Sequence[Tensor | None]) -> None:
        super().__init__()
        self.obstacle: str | None = None
        self.memories: set[Memory] = set()
        self.recover: list[Callable[[], None]] = []
        self._arguments = [f"x{i}" for i in range(len(inputs))]
        self._names = {id(x): name for x, name in zip(inputs, self._arguments, strict=True) if x is not None}
        self._lines: list[str] = []
        self._constants: dict[str, Any] = {}
        self._known: dict[int, str] = {}  # id of a constant -> its name
        self._views: dict[str, str] = {}  # line -> name: views of inputs, made once per call
        self._before: dict[str, str] = {}  # name -> line: views of constants, made with the tape
        self._made: list[ref[Tensor]] = []
        self._paused = False

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self._paused or self.obstacle is not None:
            return function(*args, **kwargs)
        result = self._within(function, args, kwargs)
        if not _UNTOLD.isdisjoint(function.tags) and not (function is _aten.index.Tensor and _by_numbers(args[1])):
            self.obstacle = str(function)
        elif function in _ALLOCATES:
            like = {"dtype": result.dtype, "device": result.device}
            self.note(torch.empty_strided, result, (tuple(result.shape), result.stride()), like)
        else:
            if function is _aten.as_strided.default and len(args) > 3:  # the next call's tensor may have another offset
                offset = args[3] - args[0].storage_offset()
                args = *args[:3], _Code(f"{self._said(args[0])}.storage_offset() + {offset}")
            writes = function.namespace != "aten" or schema_of(function).is_mutable or not _tensors(result)
            self.note(_FASTER.get(function, function), result, args, kwargs, writes)
        return result

    def call(self, function: Callable[..., Any], args: tuple[Any, ...], named: dict[str, Any]) -> Any:
        if self._paused or self.obstacle is not None:
            return function(*args, **named)
        result = self._within(function, args, named)
        self.note(function, result, args, named)
        return result

    def _within(self, function: Callable[..., Any], args: Sequence[Any], named: dict[str, Any]) -> Any:
        """Run a step without recording the operators inside it."""
        self._paused = True
        try:
            return function(*args, **named)
        finally:
            self._paused = False

    def note(self, function: Any, result: Any, args: Sequence[Any], named: dict[str, Any], writes: bool = True) -> None:
        given = _tensors((args, named))
        new = [x for x in _tensors(result) if all(x is not y for y in given)]
        if not new and not writes:
            return  # it returned its argument, as ``contiguous`` may
        is_view = len(new) == 1 and isinstance(result, Tensor) and _same_memory(result, given)
        names = {self._names.get(id(x)) for x in given}
        said = [*map(self._said, args), *(f"{key}={self._said(x)}" for key, x in named.items())]
        line = f"{self._constant(function)}({', '.join(said)})"
        if is_view and names <= {None, *self._before}:  # a view of constants is a constant
            self._before[name := f"k{len(self._made)}"] = line
            self._name(result, name, dies=False)
            return
        once = is_view and names <= {*self._arguments, *self._views.values()}
        if once and line in self._views:
            self._name(result, self._views[line], dies=False)
            return
        for x in new:
            self._name(x, f"v{len(self._made)}", dies=not once)
        if once:
            self._views[line] = self._names[id(result)]
        self._lines.append(f"{self._said_result(result, new)}{line}")

    def _name(self, x: Tensor, name: str, dies: bool) -> None:
        self._names[id(x)] = name
        self._made.append(ref(x, partial(self._end_name, id(x), name, dies)))

    def _end_name(self, own_id: int, name: str, dies: bool, _: Any) -> None:
        del self._names[own_id]
        if dies:
            self._lines.append(f"del {name}")

    def _said_result(self, result: Any, new: Sequence[Tensor]) -> str:
        """The left side of a line; empty if the line makes no tensor."""
        if not new:
            return ""
        if isinstance(result, tuple | list):
            places = [self._said_result(x, new).removesuffix(" = ") or "_" for x in result]
            return f"({', '.join(places)},) = "
        return f"{self._names[id(result)]} = " if any(result is x for x in new) else ""

    def _said(self, x: Any) -> str:
        if isinstance(x, Tensor):
            return self._names.get(id(x)) or self._constant(x)
        if isinstance(x, _Code):
            return x
        if type(x) in _PLAIN:
            return repr(x)
        if type(x) is float:
            return repr(x) if math.isfinite(x) else f"float('{x}')"
        if type(x) in (tuple, torch.Size):
            return f"({''.join(f'{self._said(y)}, ' for y in x)})"
        if type(x) is list:
            return f"[{', '.join(map(self._said, x))}]"
        if isinstance(x, dict):
            return f"{{{', '.join(f'{key!r}: {self._said(y)}' for key, y in x.items())}}}"
        if _tensors(x):
            self.obstacle = f"tensors in a {type(x).__name__}"
        return self._constant(x)

    def _constant(self, x: Any) -> str:
        name = self._known.setdefault(id(x), f"c{len(self._known)}")
        self._constants[name] = x  # holds x, so that no other object gets its id
        return name

    def end(self) -> None:
        """Stop following tensors: the call is over."""
        self._made.clear()

    def lines(self, results: Any) -> _Lines:
        """The recording; without a source if the call could not be recorded."""
        said = self._said(results)
        if self.obstacle is not None or len(self._lines) > MOST_LINES:
            return _Lines()
        body = "\n        ".join([*self._lines, f"return {said}"])
        source = "".join(f"{name} = {line}\n" for name, line in self._before.items())
        source += f"def play({', '.join(self._arguments)}):\n    try:\n        {body}\n"
        source += "    except BaseException:\n        recover()\n        raise\n"
        return _Lines(source, self._constants, self.recover, self.memories)


def _same_memory(x: Tensor, given: Sequence[Tensor]) -> bool:
    return x.numel() > 0 and any(x.untyped_storage().data_ptr() == y.untyped_storage().data_ptr() for y in given)


def _by_numbers(indices: Sequence[Tensor | None]) -> bool:
    """Whether no index is a mask: then the shape of the result follows from the shapes of its arguments."""
    return all(x is None or x.dtype not in (torch.bool, torch.uint8) for x in indices)


def _tensors(x: Any) -> list[Tensor]:
    if isinstance(x, Tensor):
        return [x]
    if isinstance(x, dict):
        x = x.values()
    elif not isinstance(x, tuple | list):
        return []
    return [tensor for y in x for tensor in _tensors(y)]
