"""Compare what the ranks of a group have, and tell the others what one of them refuses.

The first call of each kind (`first_calls`) is compared through the store in which the process group was made: that
needs no collective, and a rank that refuses its arguments leaves word there and raises, without waiting for anybody.

Check mode compares every call, by a collective. It is on in `cp_mesh.verify`, inside ``with check_mode():``, and where
the environment sets ``CP_MESH_CHECK=1``. ``check_mode(False)`` and ``CP_MESH_CHECK=0`` turn first calls off as well.
Any other word but those of `WORDS` is refused, where no `check_mode` decides.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from dataclasses import dataclass
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
"""How long a first call waits for the other ranks, if the timeout of their group is not shorter."""
STEP_PATIENCE = timedelta(seconds=10)
"""How long a first optimizer step does, to which ranks whose optimizer holds nothing of the model do not come."""

PASS, ORDER = "pass", "order of calls"
"""Names of what check mode compares of the order of calls."""

WORDS = dict.fromkeys(("1", "true", "yes", "on"), True) | dict.fromkeys(("0", "false", "no", "off"), False)
"""What ``CP_MESH_CHECK`` may say, in any case: whether every call is compared, or none."""

_TOLD = "_cp_mesh_told"  # of an error: names of the groups whose ranks were told, or None if none is to be


class Forward(NamedTuple):
    """A forward of attention: how many came before it over its group, and the module of a plan that called it."""

    number: int
    where: str


class Check(NamedTuple):
    """Of the code that runs: whether calls are compared, and in check mode what tells their order.

    Attributes:
        enabled: what `check_mode` says; None outside of it.
        where: the module of a plan that calls attention.
        backward_of: the forward whose backward runs, in eager mode.
    """

    enabled: bool | None = None
    where: str = ""
    backward_of: Forward | None = None


CHECK: ContextVar[Check] = ContextVar("cp_mesh_check", default=Check())  # noqa: B039 - frozen


@contextmanager
def checked(**fields: Any) -> Iterator[None]:
    """With other fields of `CHECK`."""
    token = CHECK.set(CHECK.get()._replace(**fields))
    try:
        yield
    finally:
        CHECK.reset(token)


@dataclass
class _Compared:
    """What this rank compared over one group.

    ``times`` begins anew with each of the ``plans`` over it.
    ``last``: to which all ranks came and refused nothing, and which is in the store until they come to the next one.
    """

    times: int = 0
    plans: int = 0
    last: Words | None = None

    def next_topic(self) -> str:
        self.times += 1
        return f"{self.plans} {self.times}"


@contextmanager
def check_mode(enabled: bool = True) -> Iterator[None]:
    """Compare the arguments of every `attention` call in this context over the ranks of its cp group.

    Also the whole inputs of a `ShardedModel`, and what `decode` and `ShardedCache.append` must be given alike. Every
    rank raises `RankMismatchError` if anything that must agree does not, and if any rank refused its arguments while
    others accepted theirs.

    Args:
        enabled: False turns the mode off inside the context, and the comparison of first calls too. Must be the same
            on all ranks.
    """
    with checked(enabled=enabled):
        yield


def checking(group: dist.ProcessGroup) -> bool:
    """Whether check mode is on. Ranks of the group hear of a ``CP_MESH_CHECK`` that is refused here."""
    enabled = CHECK.get().enabled
    if enabled is None and (word := os.environ.get("CP_MESH_CHECK")):
        enabled = _meaning(group, word)
    return enabled is True


def turned_off(group: dist.ProcessGroup) -> bool:
    """Whether somebody asked for no comparison at all; see `checking`."""
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
    """There is a new model over the group, whose comparisons are counted anew.

    Returns:
        How many models it had before.
    """
    own = state_of(group, _Compared)
    own.times = 0
    own.plans += 1
    return own.plans - 1


def capturing() -> bool:
    """Whether a CUDA graph is captured, in which nothing may be read."""
    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()


def agree(group: dist.ProcessGroup, fields: Mapping[str, str], axis: str, patience: timedelta | None = None) -> None:
    """Compare ``fields`` over the group through its store, and raise on every rank if they differ.

    Args:
        group: of ranks along ``axis``, "cp" or "tp".
        fields: values by name; that of "call" says what is called, if not attention.
        axis: for messages.
        patience: how long this rank waits for the others, if not as long as in a first call.

    Raises:
        RankMismatchError: also if a rank refused its arguments, or did not come.
    """
    answers = _exchange(group, fields, axis, patience)
    _require_accepted(group, answers, fields, axis)
    _require_equal(group, answers, fields, axis)


def compare_first(group: dist.ProcessGroup, fields: Mapping[str, str]) -> list[dict[str, str]]:
    """What the ranks of the group say, for whoever compares it otherwise than by equality."""
    if turned_off(group) or group.size() == 1 or store_of(group) is None:
        return [dict(fields)]
    answers = _exchange(group, fields)
    _require_accepted(group, answers, fields)
    if any(answer.keys() != fields.keys() for answer in answers):
        _require_equal(group, answers, fields)
    return answers


def compare_step(group: dist.ProcessGroup, topic: str, fields: Mapping[str, str]) -> Answers:
    """What the ranks of the group say at a first optimizer step; none if not all of them came in time.

    The first that knows decides, so that all of them have the same answers, and none raises alone.
    """
    if turned_off(group) or group.size() == 1 or store_of(group) is None:
        return {group.rank(): dict(fields)}
    words = Words(group, topic, fields)
    is_whole = len(words.wait(STEP_PATIENCE)) == words.size
    return words.read() if words.settle("when", "now" if is_whole else "never") == "now" else {}


def leave_word(text: str) -> None:
    """For ranks that learn of a refusal by a collective, and then call `read_word`."""
    if (store := store_of(dist.group.WORLD)) is not None:
        store.set("cp_mesh/word", text)


def read_word() -> str:
    """What some rank left for the others."""
    store = store_of(dist.group.WORLD)
    return "" if store is None else store.get("cp_mesh/word").decode()


@untraced  # which would trace it by itself, behind a graph break
def _exchange(
    group: dist.ProcessGroup, fields: Mapping[str, str], axis: str = "cp", patience: timedelta | None = None
) -> list[dict[str, str]]:
    """What every rank of the group left in the store for this comparison; a first call waits `PATIENCE` at most."""
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
            f"{absent} in {patience}; they ended or are late, run other code, or calls of a shape that they had before"
        )
        _raise_mismatch(group, fields, said)
    return [answers[rank] for rank in range(group.size())]


@untraced  # which would trace it by itself, behind a graph break
def announce_refusal(group: dist.ProcessGroup, error: Exception, axis: str = "cp", in_check_mode: bool = True) -> None:
    """Tell the other ranks, which may have accepted their arguments, that this one has not.

    Those of the cp group are waiting for this rank in check mode, which compares all calls of attention; else they, and
    those of tp and of the groups beside this one, find it in the store if theirs is a first call.

    Args:
        group: of ranks along ``axis``, "cp" or "tp".
        error: what this rank is about to raise. It is told to each group once, however many frames it passes through.
        axis: for how they are told.
        in_check_mode: whether check mode compares what was refused, so that ranks of cp wait for this one there.
    """
    told: set[str] | None = vars(error).get(_TOLD, set())
    if isinstance(error, StopRecomputation):
        return  # no refusal: a checkpoint ends its recomputation by it, in every step
    if told is None or (isinstance(error, RankMismatchError) and not told):
        return  # of one that nobody was told of, all ranks raise their own
    waiting = group if axis == "cp" and in_check_mode and not told else None
    said, enabled = {"error": f"{type(error).__name__}: {error}"}, CHECK.get().enabled
    if enabled is None:  # a CP_MESH_CHECK that is refused counts as none
        enabled = WORDS.get(os.environ.get("CP_MESH_CHECK", "").lower())
    for other, its_axis in (*beside(group).items(), (group, axis)):
        if other.group_name in told:
            continue
        vars(error)[_TOLD] = told = told | {other.group_name}
        if its_axis == "cp" and enabled and (in_check_mode or other is not group):
            if other is waiting:
                with suppress(RuntimeError):  # they wait for something else; the error itself must not be lost
                    require_agreement(group, said)
        elif enabled is not False and other.size() > 1 and store_of(other) is not None:
            Words(other, state_of(other, _Compared).next_topic(), said).wait(None)


def announce_error(group_name: str, error: Exception, axis: str = "cp", in_check_mode: bool = True) -> None:
    """`announce_refusal`, but not while torch.compile traces: there all ranks are to refuse alike."""
    if not torch.compiler.is_compiling():
        announce_refusal(resolve_group(group_name), error, axis, in_check_mode)


class refusing:
    """``with refusing(group_name):`` tells the other ranks of a group what is refused inside; not in a trace.

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
    """Tell no other rank of an error: they are past the comparison, and wait for rows."""
    vars(error)[_TOLD] = None


def note_refusals(group: dist.ProcessGroup, error: Exception) -> None:
    """Add to the error of a collective over the group what other ranks have refused: why they may not have come.

    They refused a call that is not the first of its kind here, and so was not compared.
    """
    if isinstance(error, RuntimeError) and group.size() > 1:
        compared = state_of(group, _Compared)
        for rank, said in left_for(group, f"{compared.plans} {compared.times + 1}").items():
            if "error" in said:
                error.add_note(f"cp_mesh: rank {rank} of the group has refused its arguments: {said['error']}")


def exchange(group: dist.ProcessGroup, fields: Mapping[str, str]) -> list[dict[str, str]]:
    """The fields of every rank; raises on ranks that refused nothing if another one did, see `require_agreement`."""
    answers: list[dict[str, str]] = [{} for _ in range(group.size())]
    try:
        dist.all_gather_object(answers, dict(fields), group=group)
    except RuntimeError as error:
        raise RuntimeError(
            f"attention: what check mode compares never came from all of ranks {dist.get_process_group_ranks(group)}: "
            f"one ended, raised, or came later than the timeout of their group ({error})"
        ) from error
    _require_accepted(group, answers, fields)
    return answers


def _require_accepted(
    group: dist.ProcessGroup, answers: list[dict[str, str]], fields: Mapping[str, str], axis: str = "cp"
) -> None:
    refused = {rank: answer["error"] for rank, answer in enumerate(answers) if "error" in answer}
    if refused and "error" not in fields:
        rank, error = next(iter(refused.items()))
        said = f"{axis} rank {rank} refused its arguments while this rank did not: {error}"
        _raise_mismatch(group, fields, said)


def require_agreement(group: dist.ProcessGroup, fields: Mapping[str, str]) -> None:
    """Exchange ``fields`` over the group and raise on every rank if they differ.

    Args:
        group: the cp group.
        fields: values by name; a rank that refused its arguments says so under the name "error".
    """
    answers = exchange(group, fields)
    _require_equal(group, answers, fields)


def _require_equal(
    group: dist.ProcessGroup, answers: list[dict[str, str]], fields: Mapping[str, str], axis: str = "cp"
) -> None:
    if "error" in fields:
        return  # this rank raises its own error
    for name in dict.fromkeys(name for answer in answers for name in answer):  # what this rank does not have, too
        values = [answer.get(name, "missing") for answer in answers]
        if name == "tokens" and "" in values:  # which not all ranks know
            continue
        if len(set(values)) > 1:
            shown = "; ".join(f"{axis} rank {rank}: {value}" for rank, value in enumerate(values))
            hint = f"give every rank of a {axis} group the same batch and options"
            if name in (PASS, ORDER):
                hint = "call modules and losses in one order on all ranks; a set has another one in each process"
            said = f"expected the same {name} on every {axis} rank, got {shown}; {hint}"
            _raise_mismatch(group, fields, said)


def _raise_mismatch(group: dist.ProcessGroup, fields: Mapping[str, str], said: str) -> NoReturn:
    """On every rank of the group; those of the groups beside it hear of it."""
    error = RankMismatchError(f"{fields.get('call', 'attention')}: {said}")
    vars(error)[_TOLD] = {group.group_name}
    announce_refusal(group, error)
    raise error
