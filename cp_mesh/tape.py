"""A pass of a plan, recorded and then replayed without the Python around its tensor operations.

A pass does the same in each call: it cuts the same rows, allocates as much, launches the same kernels with the same
numbers, in the same order on the same streams. Only the tensors that it is given are others. So two of its calls are
recorded, as lines of Python with those tensors as arguments; if both say the same, later calls run the lines. What
would be another thing in the next call, such as a number that was read from a tensor, differs between the two.

What is recorded: operators of PyTorch, functional collectives among these, which a dispatch mode sees; and what the
mode cannot see, launches of Triton and FlashAttention-4, events, streams, barriers, which are made by `call`. A tensor
dies in the lines where it died in the recorded call, so that memory is used again at the same points: the waits between
streams count on it. A tensor that is neither given nor made in the pass is a constant, and must be the same object in
both recordings: the plan has it, or the memory of a group, which ends its tapes when it goes (`Memory`).

A call with steps that cannot be recorded (`give_up`), or inside the capture of a CUDA graph, is computed.
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

BEFORE = (
    16  # calls that are computed first: to record takes 2 to 6 ms, which a shape that does not come again must not pay
)
MOST_TAPES = 32  # of one plan: layers may differ in strides
MOST_LINES = 20_000
TRIES = 4  # recordings, after which a pass is computed in each call
_UNTOLD = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}  # the next call's may be others
_aten = torch.ops.aten
# The same without the look at a schema, which takes the host as long again.
_FASTER: dict[Any, Callable[..., Any]] = {
    _aten.transpose.int: torch.transpose,
    _aten.as_strided.default: torch.as_strided,
    _aten.view.default: Tensor.view,
    _aten.copy_.default: Tensor.copy_,
}
_ALLOCATES = {_aten.empty.memory_format, _aten.new_empty.default, _aten.empty_like.default, _aten.empty_strided.default}
_PLAIN = (int, bool, str, type(None))


class Tape:
    """``play`` takes the tensors of a pass and returns its results; None once the memory that it names is gone."""

    def __init__(self, play: Callable[..., Any]) -> None:
        self.play: Callable[..., Any] | None = play


class Memory:
    """What tapes may name that does not live as long as their plan."""

    def __init__(self) -> None:
        self._tapes: WeakSet[Tape] = WeakSet()

    def hold(self) -> None:
        """The tape that is being recorded names this memory."""
        if (recorder := _recorder.get()) is not None:
            recorder.memories.add(self)

    def give_back(self) -> None:
        """It is used no more: no tape runs again that names it."""
        for tape in self._tapes:
            tape.play = None

    def named_by(self, tape: Tape) -> None:
        self._tapes.add(tape)


_recorder: ContextVar[_Recorder | None] = ContextVar("recorder", default=None)


def call(function: Callable[..., Any], *args: Any, **named: Any) -> Any:
    """``function(*args, **named)``, and a line of the tape; for what no dispatch mode sees. Returns tensors or None.

    The function, and arguments that are no tensors, must be equal in each call.
    """
    recorder = _recorder.get()
    return function(*args, **named) if recorder is None else recorder.call(function, args, named)


def told(function: Callable[..., Any], *args: Any, **named: Any) -> None:
    """Add a line of the tape without executing it: its work was done in another way."""
    if (recorder := _recorder.get()) is not None:
        recorder.note(function, None, args, named)


def give_up(why: str) -> None:
    """What follows cannot be recorded."""
    if (recorder := _recorder.get()) is not None:
        recorder.obstacle = why


def on_error(recover: Callable[[], None]) -> None:
    """To be called where a replayed pass ends with an exception."""
    if (recorder := _recorder.get()) is not None:
        recorder.recover.append(recover)


def repeat(
    tapes: dict[Any, Any],
    what: tuple[Any, ...],
    compute: Callable[..., Any],
    inputs: Sequence[Tensor | None],
) -> Any:
    """``compute(*inputs)``, by a tape if there is one.

    Args:
        tapes: of one plan; written here.
        what: tells passes of the plan apart, and streams.
        compute: depends on nothing but the inputs, the plan and the memory of its group; returns tensors, in tuples
            and dicts. It reads no values of the inputs on the host.
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
    if found is None or found.calls < BEFORE:  # what is compiled, allocated or agreed upon is so after them
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
    """Whether no tensor is given twice: the lines would not tell which of the two they read."""
    given = [id(x) for x in inputs if x is not None]
    return len({*given}) == len(given)


@dataclass(eq=False)
class _Lines:
    """One recording; none without a source."""

    source: str = ""
    constants: dict[str, Any] = field(default_factory=dict)
    recover: list[Callable[[], None]] = field(default_factory=list)
    memories: set[Memory] = field(default_factory=set)
    calls: int = 0
    tries: int = 0

    def say(self, other: _Lines) -> bool:
        """Whether another recording says the same, with the same tensors as constants."""
        if self._steps() != other._steps() or self.constants.keys() != other.constants.keys():
            return False
        pairs = ((x, other.constants[name]) for name, x in self.constants.items())
        return all(x is y or (type(x) is type(y) and not isinstance(x, Tensor) and x == y) for x, y in pairs)

    def _steps(self) -> list[str]:
        """All but when tensors die: of one that a collective sends, its thread may be the last that holds it."""
        return [line for line in self.source.splitlines() if not line.lstrip().startswith("del ")]

    def tape(self) -> Tape:
        namespace = self.constants | {"recover": partial(_recover, self.recover)}
        exec(compile(self.source, __file__.replace("tape.py", "<a recorded pass>"), "exec"), namespace)
        tape = Tape(namespace.pop("play"))  # else it would hold itself
        for memory in self.memories:
            memory.named_by(tape)
        return tape


_GIVEN_UP = _Lines()


def _recover(functions: Sequence[Callable[[], None]]) -> None:
    for function in functions:
        with suppress(Exception):  # the error that it follows says more
            function()


class _Code(str):
    """An argument as it stands in a line."""


class _Recorder(DispatchMode):
    """Writes down one call. Tensors are known by their names; a name ends with its tensor."""

    def __init__(self, inputs: Sequence[Tensor | None]) -> None:
        super().__init__()
        self.obstacle: str | None = None
        self.memories: set[Memory] = set()
        self.recover: list[Callable[[], None]] = []
        self._arguments = [f"x{i}" for i in range(len(inputs))]
        self._names = {id(x): name for x, name in zip(inputs, self._arguments, strict=True) if x is not None}
        self._lines: list[str] = []
        self._constants: dict[str, Any] = {}
        self._known: dict[int, str] = {}  # names of constants
        self._views: dict[str, str] = {}  # of what was given, which are made once in a call
        self._before: dict[str, str] = {}  # of constants, by name
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
            if function is _aten.as_strided.default and len(args) > 3:  # the next call's tensor may begin elsewhere
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
        """What happens inside of a line is no line of its own."""
        self._paused = True
        try:
            return function(*args, **named)
        finally:
            self._paused = False

    def note(self, function: Any, result: Any, args: Sequence[Any], named: dict[str, Any], writes: bool = True) -> None:
        given = _tensors((args, named))
        new = [x for x in _tensors(result) if all(x is not y for y in given)]
        if not new and not writes:
            return  # of a tensor that is already as it is asked to be
        is_view = len(new) == 1 and isinstance(result, Tensor) and _same_memory(result, given)
        names = {self._names.get(id(x)) for x in given}
        said = [*map(self._said, args), *(f"{key}={self._said(x)}" for key, x in named.items())]
        line = f"{self._constant(function)}({', '.join(said)})"
        if is_view and names <= {None, *self._before}:  # a view of constants is one, made with the tape
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
        """The left side of a line; nothing if the line makes no tensor."""
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
        self._constants[name] = x  # which keeps it, so that its id stays its own
        return name

    def end(self) -> None:
        """What dies from now on is no part of the call."""
        self._made.clear()

    def lines(self, results: Any) -> _Lines:
        """The lines of a function, if the call could be recorded."""
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
    """Whether the shape of what is indexed follows from shapes."""
    return all(x is None or x.dtype not in (torch.bool, torch.uint8) for x in indices)


def _tensors(x: Any) -> list[Tensor]:
    if isinstance(x, Tensor):
        return [x]
    if isinstance(x, dict):
        x = x.values()
    elif not isinstance(x, tuple | list):
        return []
    return [tensor for y in x for tensor in _tensors(y)]
