"""Compare arguments over the ranks of a group, and send an error of one rank to the others.

The first call of each kind (`first_calls`) is compared through the store with which the process group was made. That
needs no collective: a rank that refuses its arguments writes its error to the store and raises, without waiting.

Check mode compares every call, by a collective. It is on in `cp_mesh.tools.verify`, inside ``with check_mode():``, and
if the environment sets ``CP_MESH_CHECK=1``. ``check_mode(False)`` and ``CP_MESH_CHECK=0`` also turn off the comparison
of first calls. Values of the variable that are not in `WORDS` are refused, unless a `check_mode` is active.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, NamedTuple, NoReturn

import torch
import torch.distributed as dist

from cp_mesh._torch import StopRecomputation, resolve_group, timeout_of, untraced
from cp_mesh.comm.group_state import state_of
from cp_mesh.comm.model_groups import beside
from cp_mesh.comm.store_messages import Answers, Words, left_for, store_of
from cp_mesh.errors import ArgumentError, RankMismatchError, describe

PATIENCE = timedelta(minutes=10)
"""How long a first call waits for the other ranks, unless the timeout of their group is shorter."""
STEP_PATIENCE = timedelta(seconds=10)
"""How long a first optimizer step waits. Ranks whose optimizer holds no parameter of the model never take part."""

GRADED_INPUT = "requires_grad of any input"
PASS, ORDER = "pass", "order of calls"
"""Names of the fields in which check mode compares the order of calls."""

WORDS = dict.fromkeys(("1", "true", "yes", "on"), True) | dict.fromkeys(("0", "false", "no", "off"), False)
"""Values of ``CP_MESH_CHECK``, in any case: True compares every call, False none."""

_TOLD = "_cp_mesh_told"  # attribute of an error: names of the groups that got it; None: send it to no group


class Forward(NamedTuple):
    """A forward of attention: its number over its group, and the module of a plan that called it."""

    number: int
    where: str


class Check(NamedTuple):
    """The state of comparisons in the running code.

    Attributes:
        enabled: the argument of `check_mode`; None outside of it.
        where: the module of a plan that calls attention.
        backward_of: the forward whose backward runs, in eager mode.
    """

    enabled: bool | None = None
    where: str = ""
    backward_of: Forward | None = None


CHECK: ContextVar[Check] = ContextVar("cp_mesh_check", default=Check())  # noqa: B039 - frozen


@contextmanager
def checked(**fields: Any) -> Iterator[None]:
    """Set fields of `CHECK` inside the context."""
    token = CHECK.set(CHECK.get()._replace(**fields))
    try:
        yield
    finally:
        CHECK.reset(token)


@dataclass
class _Compared:
    """This rank's comparisons over one group.

    ``times`` counts comparisons since the last of the ``plans`` over the group.
    ``last``: the latest comparison that all ranks joined without a refusal; its messages stay until the next such one.
    ``styles`` are compared in the next comparison.
    """

    times: int = 0
    plans: int = 0
    last: Words | None = None
    styles: dict[str, str] = field(default_factory=dict)
    model: Callable[[], object] = lambda: None

    def next_topic(self) -> str:
        self.times += 1
        return f"{self.plans} {self.times}"


@contextmanager
def check_mode(enabled: bool = True) -> Iterator[None]:
    """Compare the arguments of every `attention` call in this context over the ranks of its cp group.

    It also compares the whole inputs of a `ShardedModel`, and the arguments of `decode` and `ShardedCache.append` that
    must be equal. Every rank raises `RankMismatchError` if anything that must agree does not, and if some ranks refused
    their arguments while others accepted theirs.

    Args:
        enabled: False turns the mode off inside the context, and the comparison of first calls too. Must be the same
            on all ranks.
    """
    with checked(enabled=enabled):
        yield


def checking(group: dist.ProcessGroup) -> bool:
    """Return whether check mode is on. An invalid ``CP_MESH_CHECK`` is refused, and the other ranks get the error."""
    enabled = CHECK.get().enabled
    if enabled is None and (word := os.environ.get("CP_MESH_CHECK")):
        enabled = _meaning(group, word)
    return enabled is True


def turned_off(group: dist.ProcessGroup) -> bool:
    """Return whether all comparisons are turned off; see `checking`."""
    enabled = CHECK.get().enabled
    if enabled is None and (word := os.environ.get("CP_MESH_CHECK")):
        enabled = _meaning(group, word)
    return enabled is False


def _meaning(group: dist.ProcessGroup, word: str) -> bool:
    if (enabled := WORDS.get(word.lower())) is not None:
        return enabled
    expected, hint = "1, true, yes or on; 0, false, no or off", "without it the first call of each kind is compared"
    error = ArgumentError(describe("CP_MESH_CHECK", expected, repr(word), hint))
    announce_error(group.group_name, error)
    raise error


def count_plan(group: dist.ProcessGroup) -> int:
    """Count a new model over the group, and restart the numbers of its comparisons.

    Returns:
        How many models the group had before.
    """
    own = state_of(group, _Compared)
    own.times = 0
    own.plans += 1
    return own.plans - 1


def note_styles(group: dist.ProcessGroup, model: object, styles: Mapping[str, str]) -> None:
    """Compare the styles of the latest model, by their fields' names, in the next comparison over the group."""
    own = state_of(group, _Compared)
    if own.model() is not model:  # plans of another one may have been refused on some ranks
        own.model, own.styles = weakref.ref(model), {}
    own.styles |= styles


def plans_of(group: dist.ProcessGroup) -> int:
    """Return how many models the group has had."""
    return state_of(group, _Compared).plans


def capturing() -> bool:
    """Return whether a CUDA graph is being captured; the host may not read from the device then."""
    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()


def agree(group: dist.ProcessGroup, fields: Mapping[str, str], axis: str, patience: timedelta | None = None) -> None:
    """Compare ``fields`` over the group through its store, and raise on every rank if they differ.

    Args:
        group: of ranks along ``axis``, "cp" or "tp".
        fields: values by name; "call" is the name of the called function, if it is not attention.
        axis: for messages.
        patience: how long this rank waits for the others; None: as long as in a first call.

    Raises:
        RankMismatchError: also if a rank raised, or did not come.
    """
    own = state_of(group, _Compared)
    answers = _exchange(group, {**fields, **own.styles}, axis, patience)
    _require_accepted(group, answers, fields, axis)
    _require_equal(group, answers, fields, axis)
    own.styles = {}


def compare_first(group: dist.ProcessGroup, fields: Mapping[str, str]) -> list[dict[str, str]]:
    """Return the fields of all ranks of the group, for comparisons other than equality."""
    if turned_off(group) or group.size() == 1 or store_of(group) is None:
        return [dict(fields)]
    answers = _exchange(group, fields)
    _require_accepted(group, answers, fields)
    if any(answer.keys() != fields.keys() for answer in answers):
        _require_equal(group, answers, fields)
    return answers


def compare_step(group: dist.ProcessGroup, topic: str, fields: Mapping[str, str]) -> Answers:
    """Return the fields of all ranks at a first optimizer step; empty if some rank did not come in time.

    The first rank that has waited decides for all: all ranks return the same answers, and none raises alone.
    """
    if turned_off(group) or group.size() == 1 or store_of(group) is None:
        return {group.rank(): dict(fields)}
    words = Words(group, topic, fields)
    is_whole = len(words.wait(STEP_PATIENCE)) == words.size
    return words.read() if words.settle("when", "now" if is_whole else "never") == "now" else {}


def leave_word(text: str) -> None:
    """Write an error to the store, for ranks that learn of a refusal by a collective and then call `read_word`."""
    if (store := store_of(dist.group.WORLD)) is not None:
        store.set("cp_mesh/word", text)


def read_word() -> str:
    """Return the text that some rank wrote by `leave_word`."""
    store = store_of(dist.group.WORLD)
    return "" if store is None else store.get("cp_mesh/word").decode()


@untraced  # else it would be traced as a graph of its own, behind a graph break
def _exchange(
    group: dist.ProcessGroup, fields: Mapping[str, str], axis: str = "cp", patience: timedelta | None = None
) -> list[dict[str, str]]:
    """Return every rank's fields in this comparison through the store; a first call waits `PATIENCE` at most."""
    patience = patience or min(PATIENCE, timeout_of(group))
    compared = state_of(group, _Compared)
    words = Words(group, compared.next_topic(), fields)
    answers = words.wait(patience)
    if len(answers) == words.size and not any("error" in answer for answer in answers.values()):
        before, compared.last = compared.last, words
        if before is not None:
            before.forget()
    if absent := [rank for rank in range(group.size()) if rank not in answers]:
        said = (
            f"expected every {axis} rank in the first call of a kind, or in each batch of a model, got none from ranks "
            f"{absent} in {patience}; they have ended, are late, run other code, or call with a shape they had before"
        )
        _raise_mismatch(group, fields, said)
    return [answers[rank] for rank in range(group.size())]


@untraced  # else it would be traced as a graph of its own, behind a graph break
def announce_refusal(group: dist.ProcessGroup, error: Exception, axis: str = "cp", in_check_mode: bool = True) -> None:
    """Send an error of this rank to the other ranks, which may have accepted their arguments.

    In check mode, which compares all calls of attention, the ranks of cp wait in a collective, and get it there.
    Otherwise they, and the ranks of tp and of the groups beside this one, read it from the store in their first call.

    Args:
        group: of ranks along ``axis``, "cp" or "tp".
        error: what this rank is about to raise. Each group gets it once, however many frames it passes through.
        axis: decides how it is sent.
        in_check_mode: whether check mode compares the refused call, so that ranks of cp wait for this one.
    """
    told: set[str] | None = vars(error).get(_TOLD, set())
    if isinstance(error, StopRecomputation):
        return  # no refusal: checkpoints raise it in every step to end a recomputation
    if told is None or (isinstance(error, RankMismatchError) and not told):
        return  # all ranks raise their own RankMismatchError
    waiting = group if axis == "cp" and in_check_mode and not told else None
    said, enabled = {"error": f"{type(error).__name__}: {error}"}, CHECK.get().enabled
    if enabled is None:  # an invalid CP_MESH_CHECK counts as unset
        enabled = WORDS.get(os.environ.get("CP_MESH_CHECK", "").lower())
    for other, its_axis in (*beside(group).items(), (group, axis)):
        if other.group_name in told:
            continue
        vars(error)[_TOLD] = told = told | {other.group_name}
        if its_axis == "cp" and enabled and (in_check_mode or other is not group):
            if other is waiting:
                with suppress(RuntimeError):  # they wait in another collective; this rank must still raise the error
                    require_agreement(group, said)
        elif enabled is not False and other.size() > 1 and store_of(other) is not None:
            Words(other, state_of(other, _Compared).next_topic(), said).wait(None)


def announce_error(group_name: str, error: Exception, axis: str = "cp", in_check_mode: bool = True) -> None:
    """Call `announce_refusal`, except while torch.compile traces: all ranks must refuse alike there."""
    if not torch.compiler.is_compiling():
        announce_refusal(resolve_group(group_name), error, axis, in_check_mode)


class refusing:
    """``with refusing(group_name):`` sends errors raised inside to the other ranks of a group, except in a trace.

    Args:
        group_name: of ranks along ``axis``, "cp" or "tp".
        in_check_mode: as in `announce_refusal`.
    """

    def __init__(self, group_name: str, axis: str = "cp", in_check_mode: bool = True) -> None:
        self.group_name, self.how = group_name, (axis, in_check_mode)

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: Any, error: Any, traceback: Any) -> None:
        if isinstance(error, Exception):
            announce_error(self.group_name, error, *self.how)


def keep_to_itself(error: Exception) -> None:
    """Do not send this error to other ranks: they have passed the comparison, and wait for rows."""
    vars(error)[_TOLD] = None


def note_refusals(group: dist.ProcessGroup, error: Exception) -> None:
    """Add to the error of a collective a note with the refusals of other ranks, which may be why they did not come.

    They refused a call that is not the first of its kind on this rank, so it was not compared.
    """
    if isinstance(error, RuntimeError) and group.size() > 1:
        compared = state_of(group, _Compared)
        for rank, said in left_for(group, f"{compared.plans} {compared.times + 1}").items():
            if "error" in said:
                error.add_note(f"cp_mesh: rank {rank} of the group has raised: {said['error']}")


def exchange(group: dist.ProcessGroup, fields: Mapping[str, str]) -> list[dict[str, str]]:
    """Return the fields of every rank; raise on ranks without a refusal if another refused, see `require_agreement`."""
    answers: list[dict[str, str]] = [{} for _ in range(group.size())]
    try:
        dist.all_gather_object(answers, dict(fields), group=group)
    except RuntimeError as error:
        raise RuntimeError(
            f"attention: arguments for check mode never came from all of ranks {dist.get_process_group_ranks(group)}: "
            f"one has ended, raised, or exceeded the timeout of their group ({error})"
        ) from error
    _require_accepted(group, answers, fields)
    return answers


def _require_accepted(
    group: dist.ProcessGroup, answers: list[dict[str, str]], fields: Mapping[str, str], axis: str = "cp"
) -> None:
    raised = {rank: answer["error"] for rank, answer in enumerate(answers) if "error" in answer}
    if raised and "error" not in fields:
        rank, error = next(iter(raised.items()))
        said = f"{axis} rank {rank} raised while this rank did not: {error}"
        _raise_mismatch(group, fields, said)


def require_agreement(group: dist.ProcessGroup, fields: Mapping[str, str]) -> None:
    """Exchange ``fields`` over the group and raise on every rank if they differ.

    Args:
        group: the cp group.
        fields: values by name; a rank that raised has its error under the name "error".
    """
    answers = exchange(group, fields)
    _require_equal(group, answers, fields)


def _require_equal(
    group: dist.ProcessGroup, answers: list[dict[str, str]], fields: Mapping[str, str], axis: str = "cp"
) -> None:
    if "error" in fields:
        return  # this rank raises its own error
    for name in dict.fromkeys(name for answer in answers for name in answer):  # also fields that this rank lacks
        values = [answer.get(name, "missing") for answer in answers]
        if name in ("tokens", GRADED_INPUT) and "" in values:  # unknown on some ranks
            continue
        if len(set(values)) > 1:
            shown = "; ".join(f"{axis} rank {rank}: {value}" for rank, value in enumerate(values))
            hint = f"give every rank of a {axis} group the same batch and options"
            if name in (PASS, ORDER):
                hint = "call modules and losses in one order on all ranks; the order of a set differs by process"
            said = f"expected the same {name} on every {axis} rank, got {shown}; {hint}"
            _raise_mismatch(group, fields, said)


def _raise_mismatch(group: dist.ProcessGroup, fields: Mapping[str, str], said: str) -> NoReturn:
    """Raise on every rank of the group, and send the error to the groups beside it."""
    error = RankMismatchError(f"{fields.get('call', 'attention')}: {said}")
    vars(error)[_TOLD] = {group.group_name}
    announce_refusal(group, error)
    raise error
