"""Variants: what a layout and a method have the ranks of a call compute, move, hold, and how long that takes.

No ranks and no device. The figures come from the schedules that a call runs, `cp_mesh.memory` and `cp_mesh.costs`. Of
many ranks only some are looked at: those that have most to compute and to fetch among them.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from cp_mesh.blocks import Array
from cp_mesh.call import Operand, Options
from cp_mesh.choosing import DEFAULT, Choice, Problem, choose, layout_and_documents
from cp_mesh.costs import Machine, PassCost
from cp_mesh.errors import UnsupportedError
from cp_mesh.kernels import KERNELS
from cp_mesh.kernels.contract import Kernel, Request, shortfalls
from cp_mesh.kernels.scores import POSITIONAL
from cp_mesh.layouts import Layout, Run
from cp_mesh.masks import Mask
from cp_mesh.memory import ExtraMemory, Sizes, kv_heads_of_rank
from cp_mesh.methods import METHODS, Method
from cp_mesh.methods.contract import as_one_tile
from cp_mesh.plan import choose_schedule, request_of
from cp_mesh.schedule import Schedule, enclosing, num_rows

ALL_RANKS = 36  # up to here every rank is looked at


class RankFigures(NamedTuple):
    """What one rank does in a call.

    Attributes:
        rank, rows: which, and how many tokens it holds.
        work: its pairs over the mean of all ranks.
        calls: of the kernel, in a forward.
        received: key rows of each stage.
        sources: ranks that they come from, of each stage.
        near, far: of all of them, those of ranks of its host and of others.
        memory: beyond inputs and results; None without ``num_heads``.
        costs: of forward and backward; None without rates.
    """

    rank: int
    rows: int
    work: float
    calls: int
    received: tuple[int, ...]
    sources: tuple[tuple[int, ...], ...]
    near: int
    far: int
    memory: ExtraMemory | None
    costs: tuple[PassCost, PassCost] | None


@dataclass(frozen=True, eq=False)
class Variant:
    """A layout and a method.

    Attributes:
        layout, method, kernel: what it is, and the kernel that "auto" chooses.
        work: pairs of each rank over their mean, of all ranks.
        ranks: figures of those that were looked at.
        moved: bytes that a GPU receives in both passes, on average; key rows of a forward without ``num_heads``.
        chunks: head chunks.
        passed_over: kernels that "auto" would have preferred, and what each lacks.
        steps: of each stage.
    """

    layout: Layout
    method: str
    kernel: Kernel
    work: NDArray[np.float64]
    ranks: list[RankFigures]
    moved: float
    chunks: int
    passed_over: dict[str, str]
    steps: tuple[tuple[int, ...], ...]

    @property
    def costs(self) -> tuple[PassCost, PassCost] | None:
        """Of the rank that is slowest in each pass."""
        known = [figures.costs for figures in self.ranks if figures.costs is not None]
        if not known:
            return None
        forward, backward = (max((costs[i] for costs in known), key=lambda cost: cost.queued) for i in (0, 1))
        return forward, backward

    @property
    def seconds(self) -> float | None:
        """Of forward and backward, of calls that follow one another."""
        return None if self.costs is None else sum(cost.queued for cost in self.costs)

    @property
    def memory(self) -> int | None:
        """The peak of the worst rank, in bytes."""
        return max((figures.memory.peak for figures in self.ranks if figures.memory is not None), default=None)


@dataclass(frozen=True, eq=False)
class Setting:
    """A call without layout and method.

    Attributes:
        seq_len, cp_size, mask: of the whole sequence.
        features: of the scores.
        q, k: of one row; v is as k.
        knows_heads: whether their sizes were given.
        kernel: as asked for.
        head_chunks: as asked for, 0 is automatic.
        compute_capability: that of the device.
        transport: "symmetric_memory" or "functional".
        gpus_per_host: ranks that share a host.
        machine: for predicted times, or None.
        seen: keys that each position sees.
    """

    seq_len: int
    cp_size: int
    mask: Mask
    features: frozenset[str]
    q: Operand
    k: Operand
    knows_heads: bool
    kernel: str
    head_chunks: int
    compute_capability: tuple[int, int]
    transport: str
    gpus_per_host: int
    machine: Machine | None
    seen: Array

    @cached_property
    def before(self) -> Array:
        """Keys that all positions before one see: int64 [seq_len + 1]."""
        return np.r_[0, self.seen.cumsum()]

    @property
    def seen_rows(self) -> int:
        """Batch rows that `seen` is the sum of."""
        return len(self.mask.runs()) if self.mask.documents is not None else 1

    def work(self, layout: Layout) -> NDArray[np.float64]:
        """Pairs of each rank over their mean; keys that are padding count."""
        pairs = np.zeros(self.cp_size)
        for rank in range(self.cp_size):
            for piece in layout.runs(self.seq_len, self.cp_size, rank):
                if isinstance(piece, Run) and piece.stride == 1:
                    pairs[rank] += self.before[piece.start + piece.length] - self.before[piece.start]
                elif isinstance(piece, Run):
                    pairs[rank] += self.seen[piece.start : piece.last + 1 : piece.stride].sum()
                else:
                    pairs[rank] += self.seen[piece.values.numpy()].sum()
        return pairs / max(1.0, pairs.mean())

    def choose(self, layout: Layout) -> Choice:
        """The method that "auto" takes."""
        if self.cp_size == 1:
            return Choice(DEFAULT, "one rank", {})
        if not self.knows_heads:
            return Choice(DEFAULT, "without num_heads no times are known", {})
        options, request = self._call(layout)
        make = partial(METHODS[DEFAULT].make_schedule, layout, self.mask, self.seq_len, self.cp_size, 0)
        kernel = self._resolve(make, request)[1].name
        sizes, of_batch = (self.seq_len, self.cp_size), layout_and_documents(layout, self.mask)
        problem = Problem(
            self.q, self.k, self.k, options, self.features, *sizes, *of_batch, kernel, self.transport, self.machine,
            lambda _, make: self._resolve(make, request),
        )  # fmt: skip
        return choose.__wrapped__(problem)

    def look_at(self, layout: Layout, method: str) -> Variant:
        """Its figures, of all ranks or of some."""
        chosen = METHODS[method]
        whole = chosen.alike  # each rank computes some heads of all rows
        options, request = self._call(layout)
        degree = self.cp_size
        if self.knows_heads or not whole:
            degree = chosen.choose_degree(options, self.q, self.k, self.cp_size)
        make_of = partial(chosen.make_schedule, layout, self.mask, self.seq_len, self.cp_size, degree=degree)
        make = partial(make_of, 0)
        first, kernel = self._resolve(make, request)
        passed_over = self._passed_over(kernel, [request(schedule) for schedule in (make(True), first)])
        chunks, gradient_itemsize = 1, self.q.dtype.itemsize
        if self.knows_heads or not whole:
            settings = chosen.settle(options, self.q, self.k, self.k, first, kernel, self.features, degree)
            of_keys = settings.home_dtype if whole else settings.gradient_dtype
            chunks, gradient_itemsize = settings.head_chunks, of_keys.itemsize
        batch, num_heads, _, dim = self.q.shape
        sizes = Sizes(batch, num_heads, self.k.shape[1], dim, dim, self.q.dtype.itemsize, gradient_itemsize)
        work = np.ones(self.cp_size) if whole else self.work(layout)
        figures = []
        for rank in range(1) if whole else self._sample(work, first.route.needed):
            schedule = make_of(rank, "segments" in first.covers)
            figures.append(self._figures(schedule, chosen, kernel, sizes, float(work[rank]), chunks))
        moved: float = first.route.num_rows / self.cp_size
        if self.knows_heads:
            moved = self._bytes_moved(sizes, moved, whole, kernel)
        steps = tuple(stage.steps for stage in first.route.stages)
        return Variant(layout, method, kernel, work, figures, moved, chunks, passed_over, steps)

    def _call(self, layout: Layout) -> tuple[Options, Callable[[Schedule], Request]]:
        """Its options, and what a schedule needs of a kernel."""
        options = Options(layout.spec(), self.mask.spec(), 1.0, head_chunks=self.head_chunks)
        capability = self.compute_capability
        return options, partial(request_of, self.q, self.q, options, self.features, compute_capability=capability)

    def _resolve(
        self, make: Callable[[bool], Schedule], request: Callable[[Schedule], Request]
    ) -> tuple[Schedule, Kernel]:
        """As a call does; but a kernel that is asked for by name counts as installed."""
        if self.kernel == "auto":
            return choose_schedule("auto", make, request, self.features)
        return named_kernel(self.kernel, make, request, self.features)

    def _passed_over(self, kernel: Kernel, requests: Sequence[Request]) -> dict[str, str]:
        """What those that "auto" prefers lack, the first of it; for the tiles, of two kinds, for which it is least."""
        found = {}
        for name, other in KERNELS.items():
            if name == kernel.name or self.kernel != "auto":
                break
            if self.q.device.type in other.capability.devices:
                missing = min((shortfalls(other.capability, request) for request in requests), key=len)
                found[name] = missing[0].partition(" (")[0]
        return found

    def _sample(self, work: NDArray[np.float64], needed: Array) -> Sequence[int]:
        """Ranks to look at: all, or the first ones, those with most work and most rows to fetch, and the last."""
        if self.cp_size <= ALL_RANKS:
            return range(self.cp_size)
        fetched, here = needed.sum(1), np.arange(self.cp_size) // self.gpus_per_host
        near = np.array([row[here == host].sum() for row, host in zip(needed, here, strict=True)])
        most = (int(x.argmax()) for x in (work, fetched, fetched - near))
        return sorted({0, 1, 2, *most, self.cp_size // 2, self.cp_size - 1})

    def _figures(
        self, schedule: Schedule, method: Method, kernel: Kernel, sizes: Sizes, work: float, chunks: int
    ) -> RankFigures:
        rank, stages = schedule.cp_rank, schedule.route.stages
        one_tile = as_one_tile(kernel, schedule, self.features)
        visits = [schedule.local_tiles, *(stage.tiles for stage in stages)]
        calls = chunks * sum(len(enclosing(tiles) if one_tile else tiles) for tiles in visits)
        parts = [(source, num_rows(ranges)) for stage in stages for source, ranges in stage.fetch]
        near = sum(rows for source, rows in parts if source // self.gpus_per_host == rank // self.gpus_per_host)
        memory = costs = None
        if self.knows_heads and method.memory is not None:
            memory = method.memory(schedule, self.cp_size, sizes, chunks, self.transport, kernel, self.features)
        if self.machine is not None and kernel.name in self.machine.kernels and method.costs is not None:
            costs = method.costs(schedule, self.cp_size, sizes, self.machine, kernel.name, chunks)
        rows = schedule.shard_lens[rank] // (self.cp_size if method.alike else 1)
        return RankFigures(
            rank, rows, work, calls, tuple(stage.num_fetched for stage in stages),
            tuple(tuple(source for source, _ in stage.fetch) for stage in stages),
            near, sum(rows for _, rows in parts) - near, memory, costs,
        )  # fmt: skip

    def _bytes_moved(self, sizes: Sizes, key_rows: float, whole: bool, kernel: Kernel) -> float:
        """In both passes, a GPU: keys twice and their gradients; or q, k, v, out, dout, dq, dk, dv.

        Of kv heads that are sent several times q, k, v and out travel again, as they are not kept.
        """
        width = sizes.batch * sizes.head_dim
        if not whole:
            return key_rows * 2 * width * sizes.num_kv_heads * (2 * sizes.itemsize + sizes.gradient_itemsize)
        of_kv = 2 * self.cp_size * kv_heads_of_rank(sizes, self.cp_size)
        rows = self.seq_len / self.cp_size * (self.cp_size - 1) / self.cp_size
        again = of_kv > 2 * sizes.num_kv_heads
        of_q = (6 - kernel.uses_delta if again else 4) * sizes.num_heads
        return rows * width * ((of_q + (1 + again) * of_kv) * sizes.itemsize + of_kv * sizes.gradient_itemsize)


def named_kernel(
    name: str, make: Callable[[bool], Schedule], request: Callable[[Schedule], Request], features: Collection[str]
) -> tuple[Schedule, Kernel]:
    """As `choose_schedule`, of a kernel that is asked for by name; its package counts as installed."""
    kernel, missing = KERNELS[name], [""]
    for by_documents in (POSITIONAL.isdisjoint(features), False):
        schedule = make(by_documents)
        missing = shortfalls(replace(kernel.capability, lacking=lambda: None), request(schedule))
        if not missing:
            return schedule, kernel
    raise UnsupportedError(f"kernel={name!r} lacks {'; '.join(missing)}; kernel='auto' works")


def owners(layout: Layout, seq_len: int, cp_size: int, position: Array) -> Array:
    """The rank that holds each of these positions, which rise: int64 [positions]."""
    owner = np.empty(len(position), dtype=np.int64)
    for rank in range(cp_size):
        for piece in layout.runs(seq_len, cp_size, rank):
            if isinstance(piece, Run):
                first, last = np.searchsorted(position, [piece.start, piece.last + 1])
                owner[first:last][(position[first:last] - piece.start) % piece.stride == 0] = rank
            else:
                owner[np.isin(position, piece.values.numpy())] = rank
    return owner


def sampled(seq_len: int, num: int) -> Array:
    """Positions at even distances, at most ``num``: int64."""
    num = max(1, min(seq_len, num))
    return np.arange(num) * seq_len // num
