"""Select the formulas of `memory`: exchanges for Ulysses and the hybrid, stages for other methods."""

from __future__ import annotations

import math
from typing import NamedTuple

from cp_mesh.call.method import Method, takes_one_tile
from cp_mesh.call.ring_loop import StageSettings
from cp_mesh.call.spec import Operand
from cp_mesh.geometry.schedule import Schedule
from cp_mesh.kernels.merge import Kernel
from cp_mesh.tools.explain.predict.memory import ExtraMemory, Sizes, extra_memory, ulysses_memory


class Setup(NamedTuple):
    """Inputs of the formulas besides a rank's schedule.

    Attributes:
        method, degree: of the call; the degree is that of `Method.choose_degree`.
        sizes, head_chunks: of its tensors on one rank.
        kernel, features: its kernel, and the score features that it uses.
        transport, within: transports between all ranks, and between ranks of one host.
        gpus_per_host: ranks that share a host.
    """

    method: Method
    degree: int
    sizes: Sizes
    head_chunks: int
    kernel: Kernel
    features: frozenset[str]
    transport: str
    within: str
    gpus_per_host: int

    @property
    def exchanges(self) -> bool:
        """Whether heads are exchanged for rows."""
        return self.method.inner_size(self.degree) > 1

    @property
    def inner_transport(self) -> str:
        """Transport of an inner group."""
        return self.transport if self.gpus_per_host % self.degree else self.within


def memory(schedule: Schedule, setup: Setup) -> ExtraMemory:
    """Memory beyond inputs and results on the schedule's rank."""
    one_tile, kernel = takes_one_tile(setup.kernel, schedule, setup.features), setup.kernel
    if not setup.exchanges:
        return extra_memory(schedule, setup.sizes, setup.head_chunks, setup.transport, one_tile, kernel.rounds)
    of_call = setup.degree, setup.sizes, setup.head_chunks, setup.inner_transport
    return ulysses_memory(schedule, *of_call, one_tile, kernel.uses_delta, kernel.rounds, outer=setup.transport)


def degrees(cp_size: int, gpus_per_host: int) -> list[int]:
    """Degrees of the hybrid to compare: inner groups within a host."""
    common = math.gcd(cp_size, gpus_per_host)
    return [degree for degree in range(2, min(common + 1, cp_size)) if common % degree == 0]


def sizes_of(q: Operand, k: Operand, v: Operand, settings: StageSettings) -> Sizes:
    """`Sizes` of the tensors of a call, with the settings of its method."""
    home = settings.home_dtype or settings.gradient_dtype
    itemsizes = q.dtype.itemsize, settings.gradient_dtype.itemsize, home.itemsize
    return Sizes(q.shape[0], q.shape[1], k.shape[1], q.shape[3], v.shape[3], *itemsizes)
