"""Choosing: the method that "auto" takes for a call, by predicted times (`predict.time`); the same on every rank.

It reads nothing that is measured in the call and nothing that one rank sees alone: shapes, layout, mask, kernel, the
schedules of chosen ranks, and the numbers of a machine that all ranks agreed on (`cp_mesh.predict.machines`). The rule:

    the ring    where times are not known: of this machine, of this transport, of the kernel, or of the scores
    else        the least time of forward and backward, each the longer of device and host, of the slowest rank; but the
                ring, unless another takes at most `FASTER` of its time and holds at most `MORE_BYTES` more at its peak

The hybrid and the double ring are looked at with the degrees that fit the hosts (`Method.degrees`). If one is taken,
the groups that it needs are made at that call; where ranks are in unequally many groups that cannot be done, and the
choice is made again without them. For packed documents none are made, so they get a degree whose groups there were at
the first call: documents differ between the cp groups of a job, which would then be in unequally many groups, and later
ones could wait for each other. The ranks that are looked at are the first, the middle one, the last, and
the one that fetches most. A choice takes some milliseconds, and is kept. Packed documents are new in every batch, so
they are chosen for as documents of one length, in which each token sees as many keys in the mean, to the next of
`STEPS` an octave: a few choices serve all.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from cp_mesh.call.joined_layout import pieces_of_rank
from cp_mesh.call.method import Setup
from cp_mesh.call.methods import METHODS, Method
from cp_mesh.call.spec import Operand, Options
from cp_mesh.errors import ArgumentError, UnsupportedError
from cp_mesh.geometry.balance import balance
from cp_mesh.geometry.layouts import Balanced, Layout, ZigZagDocuments
from cp_mesh.geometry.mask import Mask, parse_mask
from cp_mesh.geometry.schedule import Schedule
from cp_mesh.kernels.merge import Kernel
from cp_mesh.predict.memory import Sizes
from cp_mesh.predict.time import Machine

FASTER = 0.97
MORE_BYTES = 1 << 30
STEPS = 4
DEFAULT = "ring"


@dataclass(frozen=True)
class Problem:
    """A call without its method and its tensors.

    Attributes:
        q, k, v: of one rank.
        options, features, seq_len, cp_size: of the call.
        layout: None: balanced for the documents. One of zigzag documents is that of documents of one length.
        documents: tokens of each, or None.
        kernel: that of the ring, or what is like it.
        transport: "symmetric_memory" or "functional", as the call will take it among all ranks.
        within: that among ranks of one host.
        machine: of all ranks, or None.
        inner_sizes: of the groups within the cp group that there are, which methods with a degree need; None: any can
            be made.
        resolve: of a call and a function that makes a schedule with or without tiles by documents, the schedule and its
            kernel.
    """

    q: Operand
    k: Operand
    v: Operand
    options: Options
    features: frozenset[str]
    seq_len: int
    cp_size: int
    layout: Layout | None
    documents: int | None
    kernel: str
    transport: str
    within: str
    machine: Machine | None
    inner_sizes: frozenset[int] | None
    resolve: Callable[[Problem, Callable[[bool], Schedule]], tuple[Schedule, Kernel]]


class Estimate(NamedTuple):
    """Of a method: seconds of both passes in a row, and bytes at the peak, of the slowest rank and the fullest one.

    ``degree`` is that of the hybrid or the double ring, 0 of a method without one.
    """

    seconds: float
    memory: int
    degree: int = 0


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

    @property
    def degree(self) -> int:
        """As in `Estimate`."""
        return self.estimates[self.method].degree if self.estimates else 0

    def options(self, options: Options) -> Options:
        """With the method, and its degree if it has one."""
        return METHODS[self.method].with_degree(options._replace(method=self.method), self.degree)


def layout_and_documents(layout: Layout, mask: Mask) -> tuple[Layout | None, int | None]:
    """As a `Problem` has them."""
    length = None
    if mask.documents is not None:
        length = _typical(np.concatenate([np.diff(row.edges)[row.labels >= 0] for row in mask.runs()]))
    if isinstance(layout, ZigZagDocuments):
        edges = layout.tensor.numpy()
        layout = ZigZagDocuments([*range(0, edges[-1], length or _typical(np.diff(edges))), edges[-1]])
    return None if isinstance(layout, Balanced) else layout, length


def _typical(lengths: NDArray[np.int64]) -> int:
    """One of few lengths, near the mean over tokens."""
    mean = float((lengths.astype(float) ** 2).sum() / max(1, lengths.sum()))
    return round(2 ** (round(math.log2(max(1.0, mean)) * STEPS) / STEPS))


@lru_cache(maxsize=256)
def choose(problem: Problem) -> Choice:
    """The method for a call."""
    unknown = _unknown(problem)
    if unknown is not None:
        return Choice(DEFAULT, unknown, {})
    documents, seq_len, cp_size = problem.documents, problem.seq_len, problem.cp_size
    mask = parse_mask(
        problem.options.mask,
        None if documents is None else torch.arange(seq_len) // min(documents, seq_len),
        None,
        None,
    )
    layout = problem.layout or balance(mask, seq_len, cp_size)
    problem = replace(problem, layout=layout)
    make = {name: partial(x.make_schedule, layout, mask, seq_len, cp_size) for name, x in METHODS.items()}
    needed = problem.resolve(problem, partial(make[DEFAULT], 0))[0].route.needed
    ranks = sorted({0, int(needed.sum(1).argmax()), cp_size // 2, cp_size - 1})
    found: dict[str, list[Estimate]] = {}
    for name, method in METHODS.items():
        tried = (estimate(problem, method, make[name], ranks, degree) for degree in degrees_of(problem, method))
        found[name] = [each for each in tried if each is not None]
    most = min((x.memory for x in found[DEFAULT]), default=0) + MORE_BYTES
    best = {name: min(own, key=lambda x: (x.memory > most, x.seconds)) for name, own in found.items() if own}
    return best_of(best)


def degrees_of(problem: Problem, method: Method) -> list[int]:
    """Those to try, 0 for a method without degrees; those alone whose groups there are, or can be made."""
    if not method.degree_option:
        return [0]
    assert problem.machine is not None
    degrees, there = method.degrees(problem.cp_size, problem.machine.gpus_per_host), problem.inner_sizes
    return [degree for degree in degrees if there is None or degree in there]


def best_of(estimates: Mapping[str, Estimate]) -> Choice:
    """By the rule above, of those that are known."""
    ring = estimates.get(DEFAULT)
    if ring is None:
        return Choice(DEFAULT, "nothing is known of it", {})
    fit = {name: each for name, each in estimates.items() if each.memory <= ring.memory + MORE_BYTES}
    name, least = min(fit.items(), key=lambda item: item[1].seconds)
    if least.seconds <= FASTER * ring.seconds:
        return Choice(name, f"{least.seconds / ring.seconds:.2f} of the ring's time", estimates)
    return Choice(DEFAULT, "no other is faster by 3 %", estimates)


def estimate(
    problem: Problem, method: Method, make: Callable[..., Schedule], ranks: list[int], degree: int
) -> Estimate | None:
    """Of the slowest of these ranks; None where the method cannot serve the call, or its times are not known."""
    machine, q, k, v, cp_size = problem.machine, problem.q, problem.k, problem.v, problem.cp_size
    assert machine is not None and problem.layout is not None
    options = method.with_degree(problem.options, degree)
    try:
        chosen = method.choose_degree(options, q, k, cp_size)
        make = partial(make, degree=chosen)
        first, kernel = problem.resolve(problem, partial(make, ranks[0]))
        settings = method.settle(options, q, k, v, first, kernel, problem.features, chosen)
    except (ArgumentError, UnsupportedError):  # heads that ranks or chunks do not divide; tiles that no kernel takes
        return None
    if kernel.name not in machine.kernels:
        return None
    setup = Setup(
        cp_size, chosen, sizes_of(q, k, v, settings), settings.head_chunks, kernel, problem.features,
        problem.transport, problem.within, machine.gpus_per_host,
        pieces_of_rank(problem.layout, problem.seq_len, cp_size),
    )  # fmt: skip
    first_of = [*{rank // method.inner_size(chosen): rank for rank in ranks[::-1]}.values()]  # others are like these
    schedules = [first if rank == ranks[0] else make(rank, "segments" in first.covers) for rank in first_of]
    costs = [method.costs(each, setup, machine) for each in schedules]
    held = [method.memory(each, setup) for each in schedules]
    seconds = sum(max(cost.queued for cost in of_pass) for of_pass in zip(*costs, strict=True))
    return Estimate(seconds, max(memory.peak for memory in held), degree)


def sizes_of(q: Operand, k: Operand, v: Operand, settings: Any) -> Sizes:
    """Of the tensors of a call, with the settings of its method."""
    home = getattr(settings, "home_dtype", settings.gradient_dtype)  # of those that exchange heads
    itemsizes = q.dtype.itemsize, settings.gradient_dtype.itemsize, home.itemsize
    return Sizes(q.shape[0], q.shape[1], k.shape[1], q.shape[3], v.shape[3], *itemsizes)


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
    if problem.kernel not in machine.kernels:
        return f"kernel {problem.kernel} was not measured"
    return None
