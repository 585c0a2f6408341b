"""Passes that persist: what a pass does with tensors, written down once and then done again without the Python around.

A pass of a plan does the same each time: it cuts the same rows, allocates as much, launches the same kernels with the
same numbers, in the same order on the same streams. Only the tensors that it is given are others. So its second call
is recorded, as lines of Python with those tensors as arguments, and later calls run these lines: no tile, transport or
sum is made anew.

What is recorded: operators of PyTorch, functional collectives among these, as a dispatch mode sees them; and what the
mode cannot see, launches of Triton and FlashAttention-4, events, streams, barriers, which are made by `call`. A tensor
dies in the lines where it died in the recorded call, so that memory is used again at the same points, which the waits
between streams count on. Tensors that are neither given nor made in the pass belong to the plan or to the memory of a
group (`Memory.hold`), and are constants of the lines.

A call that does what no tape can tell (`give_up`) is not recorded. Nor is one inside the capture of a CUDA graph.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from functools import partial
from typing import Any
from weakref import WeakSet, ref

import torch
from torch import Tensor

from cp_mesh._torch import DispatchMode, schema_of

MOST_TAPES = 16  # of one plan: layers may differ in strides
MOST_LINES = 20_000
TRIES = 3  # after which a pass that could not be recorded is always computed
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
    """``function(*args, **named)``, and a line of the tape; for what no dispatch mode sees. Returns tensors or None."""
    recorder = _recorder.get()
    return function(*args, **named) if recorder is None else recorder.call(function, args, named)


def told(function: Callable[..., Any], *args: Any, **named: Any) -> None:
    """A line of the tape, of what was done already in another way."""
    if (recorder := _recorder.get()) is not None:
        recorder.note(function, None, args, named)


def give_up(why: str) -> None:
    """What follows no tape can tell."""
    if (recorder := _recorder.get()) is not None:
        recorder.obstacle = why


def on_error(recover: Callable[[], None]) -> None:
    """To be called where a recorded pass ends with an exception."""
    if (recorder := _recorder.get()) is not None:
        recorder.recover.append(recover)


def repeat(
    tapes: dict[Any, Tape | int],
    what: tuple[Any, ...],
    compute: Callable[..., Any],
    inputs: Sequence[Tensor | None],
) -> Any:
    """``compute(*inputs)``, by a tape if there is one.

    Args:
        tapes: of one plan; written here.
        what: tells passes of the plan apart, and streams.
        compute: depends on nothing but the inputs, the plan and the memory of its group; returns tensors, in tuples
            and dicts.
        inputs: tensors that are not written.
    """
    key = *what, *[None if x is None else (x.shape, x.stride(), x.dtype, x.data_ptr() % 16) for x in inputs]
    found = tapes.get(key, 0)
    if isinstance(found, Tape):
        if found.play is not None:
            return found.play(*inputs)
        found = 0
    if not 0 < found <= TRIES or len(tapes) > MOST_TAPES or not _are_unlike(inputs):
        tapes[key] = found + 1
        return compute(*inputs)
    recorder = _Recorder(inputs)
    token = _recorder.set(recorder)
    try:
        with recorder:
            results = compute(*inputs)
    finally:
        _recorder.reset(token)
        recorder.end()
    tapes[key] = recorder.tape(results) if recorder.is_whole else found + 1
    return results


def _are_unlike(inputs: Sequence[Tensor | None]) -> bool:
    """Whether no tensor is given twice: the lines would not tell which of the two they read."""
    given = [id(x) for x in inputs if x is not None]
    return len({*given}) == len(given)


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
        self._views: dict[str, str] = {}  # of what was given, which are made once
        self._made: list[ref[Tensor]] = []
        self._paused = False

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self._paused:
            return function(*args, **kwargs)
        result = self._within(function, args, kwargs)
        if not _UNTOLD.isdisjoint(function.tags) and not (function is _aten.index.Tensor and _by_numbers(args[1])):
            self.obstacle = str(function)
        if function in _ALLOCATES:
            like = {"dtype": result.dtype, "device": result.device}
            self.note(torch.empty_strided, result, (tuple(result.shape), result.stride()), like)
        else:
            self.note(_FASTER.get(function, function), result, args, kwargs, schema_of(function).is_mutable)
        return result

    def call(self, function: Callable[..., Any], args: tuple[Any, ...], named: dict[str, Any]) -> Any:
        if self._paused:
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
        if is_view and names == {None}:
            return  # of a constant: it is one
        said = [*map(self._said, args), *(f"{key}={self._said(x)}" for key, x in named.items())]
        line = f"{self._constant(function)}({', '.join(said)})"
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
        if type(x) in _PLAIN or (type(x) is float and math.isfinite(x)):
            return repr(x)
        if type(x) in (tuple, torch.Size):
            return f"({''.join(f'{self._said(y)}, ' for y in x)})"
        if type(x) is list:
            return f"[{', '.join(map(self._said, x))}]"
        if isinstance(x, dict):
            return f"{{{', '.join(f'{key!r}: {self._said(y)}' for key, y in x.items())}}}"
        return self._constant(x)

    def _constant(self, x: Any) -> str:
        name = self._known.setdefault(id(x), f"c{len(self._known)}")
        self._constants[name] = x  # which keeps it, so that its id stays its own
        return name

    @property
    def is_whole(self) -> bool:
        return self.obstacle is None and len(self._lines) <= MOST_LINES

    def end(self) -> None:
        """What dies from now on is no part of the call."""
        self._made.clear()

    def tape(self, results: Any) -> Tape:
        """The lines as a function."""
        recover = [f"        {self._constant(x)}()" for x in self.recover]
        source = "\n".join(
            [
                f"def play({', '.join(self._arguments)}):",
                "    try:",
                *(f"        {line}" for line in self._lines),
                f"        return {self._said(results)}",
                "    except BaseException:",
                *recover,
                "        raise",
            ]
        )
        exec(compile(source, __file__.replace("tape.py", "<a recorded pass>"), "exec"), self._constants)
        tape = Tape(self._constants.pop("play"))
        for memory in self.memories:
            memory.named_by(tape)
        return tape


def _same_memory(x: Tensor, given: Sequence[Tensor]) -> bool:
    return any(x.untyped_storage().data_ptr() == y.untyped_storage().data_ptr() for y in given)


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
