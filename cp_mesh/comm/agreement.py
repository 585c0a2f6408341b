"""Compare arguments over the ranks of a group, and send an error of one rank to the others.

Both go through the store with which the process group was made, and need no collective: a rank that refuses its
arguments writes its error to the store and raises, without waiting. The others read it in their next comparison.

The first call of each kind is compared; later calls cost one look-up. Check mode compares every call. It is on in
`cp_mesh.tools.verify`, inside ``with check_mode():``, and if the environment sets ``CP_MESH_CHECK=1``.
``check_mode(False)`` and ``CP_MESH_CHECK=0`` turn all comparisons off. Values of the variable that are not in `VALUES`
are refused, unless a `check_mode` is active.
"""

from __future__ import annotations

import functools
import os
import weakref
from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from datetime import timedelta
from itertools import chain
from typing import Any, NamedTuple, NoReturn
from zlib import crc32

import torch
import torch.distributed as dist
from torch import Tensor

from cp_mesh._torch import StopRecomputation, backward_number, resolve_group, timeout_of, untraced
from cp_mesh.comm.fingerprints import fingerprint, shape_of
from cp_mesh.comm.group_state import state_of, states_of_all
from cp_mesh.comm.groups import linked_groups
from cp_mesh.comm.store_messages import Answers, Comparison, read_errors, store_of
from cp_mesh.errors import REFUSALS, ArgumentError, RankMismatchError, describe, refuse

PATIENCE = timedelta(minutes=10)
"""How long a first call waits for the other ranks, unless the timeout of their group is shorter."""
STEP_PATIENCE = timedelta(seconds=10)
"""How long a first optimizer step waits. Ranks whose optimizer holds no parameter of the model never take part."""
MOST_KINDS = 256
"""Kinds of calls per group that are known and each compared. Of calls of other kinds the 1st, 2nd, 4th, 8th and so on
are, each with a digest of the calls before it: if every batch has a new length, comparisons must become rare."""

GRADED_INPUT = "requires_grad of any input"
PASS, ORDER = "pass", "order of calls"
"""Names of the fields in which passes of attention compare the order of calls."""

VALUES = dict.fromkeys(("1", "true", "yes", "on"), True) | dict.fromkeys(("0", "false", "no", "off"), False)
"""Values of ``CP_MESH_CHECK``, in any case: True compares every call, False none."""

_SENT = "_cp_mesh_sent"  # attribute of an error: names of the groups that got it; None: send it to no group


class Check(NamedTuple):
    """The state of comparisons in the running code.

    Attributes:
        enabled: the argument of `check_mode`; None outside of it.
        where: in check mode, the module of a plan that calls attention.
        backward_of: in check mode, the forward whose backward runs in eager mode.
    """

    enabled: bool | None = None
    where: str = ""
    backward_of: str = ""


CHECK: ContextVar[Check] = ContextVar("cp_mesh_check", default=Check())  # noqa: B039 - frozen


@contextmanager
def checked(**fields: Any) -> Iterator[None]:
    """Set fields of `CHECK` inside the context."""
    token = CHECK.set(CHECK.get()._replace(**fields))
    try:
        yield
    finally:
        CHECK.reset(token)


def check_mode(enabled: bool = True) -> AbstractContextManager[None]:
    """Compare the arguments of every `attention` call in this context over the ranks of its cp group.

    It also compares the whole inputs of a `ShardedModel`, and the arguments of `decode` and `ShardedCache.append` that
    must be equal. Every rank raises `RankMismatchError` if anything that must agree does not, and if some ranks refused
    their arguments while others accepted theirs.

    Args:
        enabled: False turns the mode off inside the context, and the comparison of first calls too. Must be the same
            on all ranks.
    """
    return checked(enabled=enabled)


def checking(group: dist.ProcessGroup | None) -> bool | None:
    """Return whether every call is compared (True), none (False), or the first ones (None).

    An invalid ``CP_MESH_CHECK`` is refused, and the other ranks of the group get the error; without a group it is None.
    """
    enabled, value = CHECK.get().enabled, os.environ.get("CP_MESH_CHECK")
    if enabled is None and value and (enabled := VALUES.get(value.lower())) is None and group is not None:
        with refusing(group):
            hint = "without it the first call of each kind is compared"
            refuse("CP_MESH_CHECK", "1, true, yes or on; 0, false, no or off", repr(value), hint)
    return enabled


def capturing() -> bool:
    """Return whether a CUDA graph is being captured; the host may not read from the device then."""
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()


@dataclass
class Calls:
    """This rank's calls over one group.

    Attributes:
        kinds: of calls that need no comparison any more.
        here: calls by kind that this rank checks alone.
        later, digest: of calls of unknown kinds, after `MOST_KINDS`.
        batches: of known kinds.
        broken: the error by which this rank left a pass; other ranks may still wait for its rows.
        times: comparisons since the last of the ``plans`` over the group.
        last: the latest comparison that all ranks joined without a refusal; its messages stay until the next such one.
        styles: of the latest ``model``, by their fields' names, for the next comparison.
    """

    kinds: set[Hashable] = field(default_factory=set)
    here: Counter[Hashable] = field(default_factory=Counter)
    later: int = 0
    digest: int = 0
    batches: int = 0
    broken: str = ""
    times: int = 0
    plans: int = 0
    last: Comparison | None = None
    styles: dict[str, str] = field(default_factory=dict)
    model: Callable[[], object] = lambda: None

    def write(self, group: dist.ProcessGroup, fields: Mapping[str, str]) -> Comparison:
        """Begin the next comparison."""
        self.times += 1
        return Comparison(group, f"{self.plans} {self.times}", fields)


def calls_of(group: dist.ProcessGroup) -> Calls:
    """Return this rank's calls over a group; refuse a group in which one of its passes broke off."""
    calls = state_of(group, Calls)
    if calls.broken:
        got = f"one in which this rank left a pass by {calls.broken}"
        hint = "other ranks may wait in that pass: restart, or destroy all groups and make new ones in a new store"
        refuse("group", "one whose passes have ended", got, hint, RankMismatchError)
    return calls


def look_again(group: dist.ProcessGroup) -> int:
    """Compare first calls again, for a new model; return how many models the group had before.

    Every rank of the group must call this at the same place.
    """
    for calls in states_of_all(Calls):
        calls.here.clear()
    own = state_of(group, Calls)
    own.kinds = set()  # another one, by which `call.known` sees it
    own.later = own.digest = own.batches = own.times = 0
    own.plans += 1
    return own.plans - 1


def has_calls(group: dist.ProcessGroup) -> bool:
    """Return whether a model over the group, or a call, has been compared."""
    own = state_of(group, Calls)
    return bool(own.kinds) or own.plans > 0


def note_styles(group: dist.ProcessGroup, model: object, styles: Mapping[str, str]) -> None:
    """Compare the styles of the latest model, by their fields' names, in the next comparison over the group."""
    own = state_of(group, Calls)
    if own.model() is not model:  # plans of another one may have been refused on some ranks
        own.model, own.styles = weakref.ref(model), {}
    own.styles |= styles


def is_first_here(group: dist.ProcessGroup, *kind: Hashable) -> bool:
    """Return True in this rank's 1st, 2nd, 4th, 8th, ... call of a kind over the group; no other rank takes part.

    Args:
        kind: a name and more. The name alone is of a refused call, whose kind may be another than on the other ranks:
            no call of that name came before.
    """
    here = calls_of(group).here
    full = kind not in here and len(here) >= MOST_KINDS
    if full or checking(group) is False or group.size() == 1 or capturing():
        return False
    come = len(kind) == 1 and any(known[:1] == kind for known in here)  # type: ignore[index]
    here[kind] += 1
    return here[kind].bit_count() == 1 and not come


# Comparisons.


def compare(
    group: dist.ProcessGroup, kind: Hashable, fields: Callable[[], Mapping[str, str]], axis: str = "cp"
) -> bool:
    """Compare ``fields()`` over the group in the first call of a kind, and in check mode in every call.

    Nothing is compared while a CUDA graph is captured: the warm-up before it was the first call.

    Args:
        group: of ranks along ``axis``, "cp" or "tp", for messages.
        kind: of values that must be equal on all ranks, which must count kinds alike. None: compare in check mode only.
        fields: values by name; "call" is the name of the called function, if it is not attention. Errors that it
            raises are sent to the other ranks.

    Returns:
        Whether the call was compared.

    Raises:
        RankMismatchError: on every rank, if values differ; also if a rank raised, or did not come.
    """
    calls, every = calls_of(group), checking(group)
    if every is None and (kind is None or kind in calls.kinds):
        return False
    alone = group.size() == 1 or store_of(group) is None
    if not alone:
        if every is False or capturing():
            return False
        if every is None and len(calls.kinds) >= MOST_KINDS:
            calls.later, calls.digest = calls.later + 1, crc32(repr(kind).encode(), calls.digest)
            if calls.later.bit_count() != 1:
                return False
        with refusing(group):
            own = fields()
        _require_equal(group, {**own, f"calls after the first {MOST_KINDS} kinds": f"{calls.digest:08x}"}, axis)
    if kind is not None and len(calls.kinds) < MOST_KINDS:
        calls.kinds.add(kind)
    return not alone


def compare_batch(
    group: dist.ProcessGroup,
    kind: Hashable,
    tensors: Mapping[str, Tensor | None],
    contents: Callable[[Tensor | None], str] = fingerprint,
    **others: str,
) -> None:
    """Compare shapes and dtypes of a batch in every call, and ``contents`` as `compare` does, and in each 2^n-th call.

    ``others`` are compared in every call.

    A comparison takes a few requests to the store. Without it, unequal numbers of rows would end the process in gloo.
    """

    def fields(text_of: Callable[[Tensor | None], str] = contents) -> dict[str, str]:
        return {"call": "batch"} | others | {name: text_of(x) for name, x in tensors.items()}

    if compare(group, kind, fields) or backward_number() != -1:
        return  # in a backward a checkpoint recomputes; its forward was compared
    if group.size() > 1 and store_of(group) is not None and checking(group) is None and not capturing():
        own = calls_of(group)
        own.batches += 1
        _require_equal(group, fields(contents if own.batches.bit_count() == 1 else shape_of), "cp", timeout_of(group))


def exchange(group: dist.ProcessGroup, fields: Mapping[str, str]) -> list[dict[str, str]]:
    """Return the fields of all ranks of the group, for comparisons other than equality; raises as `compare`."""
    if checking(group) is False or group.size() == 1 or store_of(group) is None:
        return [dict(fields)]
    answers = _exchange(group, fields)
    if any(answer.keys() != fields.keys() for answer in answers):
        _judge(group, answers, fields)
    return answers


def exchange_in_time(group: dist.ProcessGroup, topic: str, fields: Mapping[str, str]) -> Answers:
    """Return the fields of all ranks at a first optimizer step; empty if some rank did not come in time.

    The first rank that has waited decides for all: all ranks return the same answers, and none raises alone.
    """
    if checking(group) is False or group.size() == 1 or store_of(group) is None:
        return {group.rank(): dict(fields)}
    messages = Comparison(group, topic, fields)
    is_whole = len(messages.wait(STEP_PATIENCE)) == messages.size
    return messages.read() if messages.first_value("when", "now" if is_whole else "never") == "now" else {}


def order_of(direction: str) -> str:
    """Return a string for the place of a pass among the calls over its group, for check mode.

    A backward in compiled code does not know its forward.
    """
    _, where, forward = CHECK.get()
    return direction + (where and f" in {where}" if direction == "forward" else forward and f" of {forward}")


def last_forward(group: dist.ProcessGroup) -> str:
    """Return a name of the forward that has just run over the group, in check mode."""
    where = CHECK.get().where
    return f"forward {state_of(group, Calls).times}{where and f' in {where}'}"


def _require_equal(
    group: dist.ProcessGroup, fields: Mapping[str, str], axis: str = "cp", patience: timedelta | None = None
) -> None:
    own = state_of(group, Calls)
    fields = {**fields, **own.styles}
    _judge(group, _exchange(group, fields, axis, patience), fields, axis)
    own.styles = {}


@untraced  # else it would be traced as a graph of its own, behind a graph break
def _exchange(
    group: dist.ProcessGroup, fields: Mapping[str, str], axis: str = "cp", patience: timedelta | None = None
) -> list[dict[str, str]]:
    """Return every rank's fields in this comparison through the store; a first call waits `PATIENCE` at most."""
    own, patience = state_of(group, Calls), patience or min(PATIENCE, timeout_of(group))
    messages = own.write(group, fields)
    answers = messages.wait(patience)
    if absent := sorted({*range(messages.size)} - answers.keys()):
        message = (
            f"expected every {axis} rank in the first call of a kind, in each batch of a model, or in check mode, got "
            f"none from ranks {absent} in {patience}; they have ended, are late, run other code, or call with a shape "
            "they had before"
        )
        _raise_mismatch(group, fields, message)
    for rank, answer in answers.items():
        if "error" in answer:
            _raise_mismatch(group, fields, f"{axis} rank {rank} raised while this rank did not: {answer['error']}")
    before, own.last = own.last, messages
    if before is not None:
        before.delete()
    return [*answers.values()]


def _judge(
    group: dist.ProcessGroup, answers: list[dict[str, str]], fields: Mapping[str, str], axis: str = "cp"
) -> None:
    if answers.count(answers[0]) == len(answers):
        return
    for name in dict.fromkeys(chain(*answers)):  # also fields that this rank lacks
        values = [answer.get(name, "missing") for answer in answers]
        is_unknown = name in ("tokens", GRADED_INPUT) and "" in values  # on some ranks
        if len(set(values)) > 1 and not is_unknown:
            shown = "; ".join(f"{axis} rank {rank}: {value}" for rank, value in enumerate(values))
            hint = f"give every rank of a {axis} group the same batch and options"
            if name in (PASS, ORDER):
                hint = "call modules and losses in one order on all ranks; the order of a set differs by process"
            _raise_mismatch(group, fields, f"expected the same {name} on every {axis} rank, got {shown}; {hint}")


def _raise_mismatch(group: dist.ProcessGroup, fields: Mapping[str, str], message: str) -> NoReturn:
    """Raise on every rank of the group, and send the error to the groups beside it."""
    error = RankMismatchError(f"{fields.get('call', 'attention')}: {message}")
    vars(error)[_SENT] = {group.group_name}
    _send(group, error)
    raise error


# Refusals.


class refusing:
    """``with refusing(group):`` sends errors raised inside to the other ranks, which may have accepted their arguments.

    The ranks of the group, and of the groups beside it, read the error in their next comparison. Each group gets it
    once, however many contexts it passes through. In a trace all ranks must refuse alike, and nothing is sent.

    Args:
        group: its name, or a function that finds it or None; None: nobody else takes part.
        errors: classes of errors that are sent. Around code of users, which may skip other errors on all ranks: those
            of `REFUSALS`.
        known: every rank raises the error, or gets it in another way: no context around this one sends it.
    """

    def __init__(
        self,
        group: dist.ProcessGroup | str | Callable[[], dist.ProcessGroup | None] | None,
        errors: type[Exception] | tuple[type[Exception], ...] = Exception,
        known: bool = False,
    ) -> None:
        self.group, self.errors, self.known = group, errors, known

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: Any, error: Any, traceback: Any) -> None:
        if not isinstance(error, self.errors) or torch.compiler.is_compiling():
            return
        group = self.group() if callable(self.group) else self.group
        if self.known:
            vars(error)[_SENT] = None
        elif group is not None:
            _send(resolve_group(group) if isinstance(group, str) else group, error)


def announced_over(group_of: Callable[..., Any]) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Decorate methods of styles: their refusals are sent to the group that ``group_of`` finds in their arguments."""

    def decorate(run: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(run)
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            try:
                return run(*args, **kwargs)
            except REFUSALS:  # all ranks may skip an error of the user's own
                with refusing(lambda: group_of(*args)):
                    raise
            except RuntimeError as error:
                if dist.is_initialized():
                    raise
                hint = "run the model before destroy_process_group, or build it anew after init_process_group"
                raise ArgumentError(describe("the plan's process group", "one that exists", "none", hint)) from error

        return wrapper

    return decorate


@untraced  # else it would be traced as a graph of its own, behind a graph break
def _send(group: dist.ProcessGroup, error: Exception) -> None:
    sent: set[str] | None = vars(error).get(_SENT, set())
    ends = isinstance(error, StopRecomputation)  # raised by checkpoints in every step, to end a recomputation
    if ends or sent is None or (isinstance(error, RankMismatchError) and not sent):
        return  # all ranks raise their own RankMismatchError
    message, off = {"error": f"{type(error).__name__}: {error}"}, checking(None) is False
    for other in (*linked_groups(group), group):
        if not (other.group_name in sent or off or other.size() == 1 or store_of(other) is None):
            vars(error)[_SENT] = sent = sent | {other.group_name}
            state_of(other, Calls).write(other, message).wait(None)


def end_by(group: dist.ProcessGroup, error: BaseException) -> None:
    """Note that a pass of attention ended by an error.

    If it is no refusal, this rank refuses calls over the group from now on; other ranks find the error in the store. An
    error of a collective gets a note with their refusals, which may be why they did not come: of calls that are not the
    first of their kind on this rank, so they were not compared.
    """
    if isinstance(error, REFUSALS):
        vars(error)[_SENT] = None  # raised on every rank, before the first collective of the pass
    elif group.size() > 1:
        own = state_of(group, Calls)
        own.broken = f"{type(error).__name__}: {error}"  # the error would keep tensors
        errors = read_errors(group, f"{own.plans} {own.times + 1}") if isinstance(error, RuntimeError) else {}
        for rank, text in errors.items():
            error.add_note(f"cp_mesh: rank {rank} of the group has raised: {text}")
        if isinstance(error, Exception):
            _send(group, error)
