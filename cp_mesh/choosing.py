"""Choosing: the method that "auto" takes for a call, by predicted times (`cp_mesh.costs`); the same on every rank.

It reads nothing that is measured in the call and nothing that one rank sees alone: shapes, layout, mask, kernel, the
schedules of chosen ranks, and the numbers of a machine that all ranks agreed on (`cp_mesh.machines`). The rule:

    the ring    where times are not known: of this machine, of this transport, of the kernel, or of the scores
    else        the least time of forward and backward, each the longer of device and host, of the slowest rank; but the
                ring, unless another takes at most `FASTER` of its time and holds at most `MORE_BYTES` more at its peak

The ranks that are looked at are the first, the middle one, the last, and the one that fetches most. Masks and layouts
with tensors are new in every batch: of these only the one that fetches most is looked at.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

from cp_mesh.call import Operand, Options
from cp_mesh.costs import Machine
from cp_mesh.errors import ArgumentError, UnsupportedError
from cp_mesh.kernels.contract import Kernel
from cp_mesh.layouts import Layout
from cp_mesh.masks import Mask
from cp_mesh.memory import Sizes
from cp_mesh.methods import METHODS, Method
from cp_mesh.schedule import Schedule

FASTER = 0.97
MORE_BYTES = 1 << 30
DEFAULT = "ring"

Resolve = Callable[[Callable[[bool], Schedule]], tuple[Schedule, Kernel]]


@dataclass(frozen=True, eq=False)
class Problem:
    """A call without its method.

    Attributes:
        q, k, v: of one rank.
        options, features, layout, mask, seq_len, cp_size: of the call.
        transport: "symmetric_memory" or "functional", as the call will take it.
        machine: of all ranks, or None.
        resolve: a schedule, from a function that makes it with or without tiles by documents, and its kernel.
    """

    q: Operand
    k: Operand
    v: Operand
    options: Options
    features: Collection[str]
    layout: Layout
    mask: Mask
    seq_len: int
    cp_size: int
    transport: str
    machine: Machine | None
    resolve: Resolve


class Estimate(NamedTuple):
    """Of a method: seconds of both passes in a row, and bytes at the peak, of the slowest rank and the fullest one."""

    seconds: float
    memory: int


@dataclass(frozen=True)
class Choice:
    """What "auto" takes.

    Attributes:
        method: its name.
        why: in a few words.
        estimates: of all methods that can serve the call, by name; none where times are not known.
    """

    method: str
    why: str
    estimates: Mapping[str, Estimate]


def choose(problem: Problem, schedule: Schedule) -> Choice:
    """The method for a call; ``schedule`` is the ring's, of any rank."""
    unknown = _unknown(problem)
    if unknown is not None:
        return Choice(DEFAULT, unknown, {})
    ranks = ranks_to_look_at(problem, schedule)
    found = {name: estimate(problem, method, ranks) for name, method in METHODS.items()}
    return best_of({name: each for name, each in found.items() if each is not None})


def best_of(estimates: Mapping[str, Estimate]) -> Choice:
    """By the rule above, of those that are known."""
    ring = estimates.get(DEFAULT)
    if ring is None:
        return Choice(DEFAULT, "its kernel was not measured", {})
    fit = {name: each for name, each in estimates.items() if each.memory <= ring.memory + MORE_BYTES}
    name, least = min(fit.items(), key=lambda item: item[1].seconds)
    if least.seconds <= FASTER * ring.seconds:
        return Choice(name, f"{least.seconds / ring.seconds:.2f} of the ring's time", estimates)
    return Choice(DEFAULT, "no other is faster by 3 %", estimates)


def ranks_to_look_at(problem: Problem, schedule: Schedule) -> Sequence[int]:
    """Equal on all ranks, as ``schedule.route.needed`` is."""
    most = int(schedule.route.needed.sum(1).argmax())
    if problem.layout.tensor is not None or problem.mask.documents is not None or problem.mask.key_padding is not None:
        return (most,)
    return sorted({0, most, problem.cp_size // 2, problem.cp_size - 1})


def estimate(problem: Problem, method: Method, ranks: Sequence[int]) -> Estimate | None:
    """None where the method cannot serve the call, or its times are not known."""
    machine, q, k, v = problem.machine, problem.q, problem.k, problem.v
    if method.costs is None or method.memory is None or machine is None:
        return None
    make_of = partial(method.make_schedule, problem.layout, problem.mask, problem.seq_len, problem.cp_size)
    first, *others = ranks[:1] if method.alike else ranks
    try:
        schedule, kernel = problem.resolve(partial(make_of, first))
        settings = method.settle(problem.options, q, k, v, schedule, kernel, problem.features, problem.cp_size)
    except (ArgumentError, UnsupportedError):  # heads that ranks or chunks do not divide; tiles that no kernel takes
        return None
    if kernel.name not in machine.kernels:
        return None
    chunks = settings.head_chunks
    sizes = Sizes(
        q.shape[0], q.shape[1], k.shape[1], q.shape[3], v.shape[3], q.dtype.itemsize, settings.gradient_dtype.itemsize
    )
    schedules = [schedule, *(make_of(rank, "segments" in schedule.covers) for rank in others)]
    costs = [method.costs(each, problem.cp_size, sizes, machine, kernel.name, chunks) for each in schedules]
    of_call = chunks, problem.transport, kernel, problem.features
    held = [method.memory(each, problem.cp_size, sizes, *of_call) for each in schedules]
    seconds = sum(max(cost.queued for cost in of_pass) for of_pass in zip(*costs, strict=True))
    return Estimate(seconds, max(memory.peak for memory in held))


def _unknown(problem: Problem) -> str | None:
    machine = problem.machine
    if machine is None:
        return "this machine was not measured"
    if machine.transport != problem.transport:
        return f"{machine.name} was measured over {machine.transport}, not {problem.transport}"
    if problem.q.dtype.itemsize != 2 and machine.on_gpu:
        return f"times of {problem.q.dtype} were not measured"
    if problem.features:
        return f"times of scores with {', '.join(sorted(problem.features))} were not measured"
    return None
