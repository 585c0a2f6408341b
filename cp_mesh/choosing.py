"""Choosing: the method that "auto" takes for a call, by predicted times (`cp_mesh.costs`); the same on every rank.

It reads nothing that is measured in the call and nothing that one rank sees alone: shapes, layout, mask, kernel, the
schedules of chosen ranks, and the numbers of a machine that all ranks agreed on (`cp_mesh.machines`). The rule:

    the ring    where times are not known: of this machine, of this transport, of the kernel, or of the scores
    else        the least time of forward and backward, each the longer of device and host, of the slowest rank; but the
                ring, unless another takes at most `FASTER` of its time and holds at most `MORE_BYTES` more at its peak

The ranks that are looked at are the first, the middle one, the last, and the one that fetches most. A choice takes a
few milliseconds, and is kept. Packed documents are new in every batch, so they are chosen for as documents of one
length, in which each token sees as many keys in the mean, to the next of `STEPS` an octave: a few choices serve all.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import NamedTuple

import numpy as np
import torch

from cp_mesh.balancing import balance
from cp_mesh.call import Operand, Options
from cp_mesh.costs import Machine
from cp_mesh.errors import ArgumentError, UnsupportedError
from cp_mesh.kernels.contract import Kernel
from cp_mesh.layouts import Balanced, Layout
from cp_mesh.masks import Mask, parse_mask
from cp_mesh.memory import Sizes
from cp_mesh.methods import METHODS, Method
from cp_mesh.schedule import Schedule

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
        layout: None: balanced for the documents.
        documents: tokens of each, or None.
        kernel: that of the ring, or what is like it.
        transport: "symmetric_memory" or "functional", as the call will take it.
        machine: of all ranks, or None.
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
    machine: Machine | None
    resolve: Callable[[Problem, Callable[[bool], Schedule]], tuple[Schedule, Kernel]]


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


def layout_and_documents(layout: Layout, mask: Mask) -> tuple[Layout | None, int | None]:
    """As a `Problem` has them."""
    length = None
    if mask.documents is not None:
        lengths = np.concatenate([np.diff(row.edges) for row in mask.runs()]).astype(float)
        mean = float((lengths**2).sum() / max(1.0, lengths.sum()))  # over tokens
        length = round(2 ** (round(math.log2(max(1.0, mean)) * STEPS) / STEPS))
    return None if isinstance(layout, Balanced) else layout, length


@lru_cache(maxsize=256)
def choose(problem: Problem) -> Choice:
    """The method for a call."""
    unknown = _unknown(problem)
    if unknown is not None:
        return Choice(DEFAULT, unknown, {})
    documents, seq_len, cp_size = problem.documents, problem.seq_len, problem.cp_size
    mask = parse_mask(
        problem.options.mask, None if documents is None else torch.arange(seq_len) // min(documents, seq_len), None
    )
    layout = problem.layout or balance(mask, seq_len, cp_size)
    make = {name: partial(x.make_schedule, layout, mask, seq_len, cp_size) for name, x in METHODS.items()}
    needed = problem.resolve(problem, partial(make[DEFAULT], 0))[0].route.needed
    ranks = sorted({0, int(needed.sum(1).argmax()), cp_size // 2, cp_size - 1})
    found = {
        name: estimate(problem, method, make[name], ranks[:1] if method.alike else ranks)
        for name, method in METHODS.items()
    }
    return best_of({name: each for name, each in found.items() if each is not None})


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


def estimate(problem: Problem, method: Method, make: Callable[..., Schedule], ranks: list[int]) -> Estimate | None:
    """Of the slowest of these ranks; None where the method cannot serve the call, or its times are not known."""
    machine, q, k, v, cp_size = problem.machine, problem.q, problem.k, problem.v, problem.cp_size
    if method.costs is None or method.memory is None or machine is None:
        return None
    try:
        degree = method.choose_degree(problem.options, q, k, cp_size)
        make = partial(make, degree=degree)
        first, kernel = problem.resolve(problem, partial(make, ranks[0]))
        settings = method.settle(problem.options, q, k, v, first, kernel, problem.features, degree)
    except (ArgumentError, UnsupportedError):  # heads that ranks or chunks do not divide; tiles that no kernel takes
        return None
    if kernel.name not in machine.kernels:
        return None
    chunks, of_keys = settings.head_chunks, settings.home_dtype if method.alike else settings.gradient_dtype
    sizes = Sizes(q.shape[0], q.shape[1], k.shape[1], q.shape[3], v.shape[3], q.dtype.itemsize, of_keys.itemsize)
    schedules = [first, *(make(rank, "segments" in first.covers) for rank in ranks[1:])]
    costs = [method.costs(each, cp_size, sizes, machine, kernel.name, chunks) for each in schedules]
    of_call = chunks, problem.transport, kernel, problem.features
    held = [method.memory(each, cp_size, sizes, *of_call) for each in schedules]
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
    if problem.kernel not in machine.kernels:
        return f"kernel {problem.kernel} was not measured"
    return None
