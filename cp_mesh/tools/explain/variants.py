"""Variants: work, traffic and memory of each rank, for one layout and method.

Needs no process group and no GPU. Figures come from the schedules that a call runs; `predict` computes memory from
them. If there are many ranks, only a sample is computed, with the ranks that compute or fetch most.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from cp_mesh.call.method import takes_one_tile
from cp_mesh.call.plan import METHODS, choose_schedule, request_of
from cp_mesh.call.spec import AttentionSpec, Operand
from cp_mesh.errors import UnsupportedError, refuse
from cp_mesh.geometry.balance import PAIRS_PER_TOKEN
from cp_mesh.geometry.block_table import Array
from cp_mesh.geometry.layouts import Layout, Run
from cp_mesh.geometry.mask import TENSORS, Mask
from cp_mesh.geometry.pair_counts import pairs_between
from cp_mesh.geometry.schedule import Fetch, Schedule, enclosing, num_rows
from cp_mesh.kernels.contract import Request, shortfalls
from cp_mesh.kernels.merge import Kernel
from cp_mesh.kernels.scores import POSITIONAL
from cp_mesh.kernels.table import KERNELS
from cp_mesh.latent.expand import latent_kernel
from cp_mesh.tools.explain.predict.memory import ExtraMemory, Sizes, kv_heads_of_rank, visits
from cp_mesh.tools.explain.predict.methods import Setup, memory, sizes_of

ALL_RANKS = 36  # up to this number, figures of every rank are computed


class RankFigures(NamedTuple):
    """Figures of one rank in a call.

    Attributes:
        rank: its number; ranks of an inner group are alike, and the first stands for all.
        rows: tokens that the rank holds.
        work: query-key pairs that it computes, over the mean of all ranks.
        calls: kernel calls in a forward.
        received: key rows received in each stage.
        sources: ranks that send these rows, for each stage.
        near, far: rows received over links of the host, and over the network.
        memory: extra memory beyond inputs and results; None without ``num_heads``.
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


class OfLatent(NamedTuple):
    """Figures of `latent_attention`: bytes moved, extra memory, and products of expansion over those of a forward."""

    moved: float
    memory: int
    expansion: float


@dataclass(frozen=True, eq=False)
class Variant:
    """Figures of one layout and method.

    Attributes:
        layout, method, kernel: the configuration, and its kernel.
        degree: ranks that exchange heads for rows; 1 for other methods.
        work: query-key pairs of each rank over their mean, for all ranks.
        layer: of packed documents, each rank's time of a layer of Llama-3-8B over the mean, as `balance` counts it.
        ranks: figures of the computed ranks.
        row_bytes: bytes of a fetched row of keys and values.
        moved: bytes that a GPU receives in both passes, on average; without ``num_heads`` key rows in a forward.
        chunks: number of head chunks.
        passed_over: kernels that "auto" prefers but rejected, and what each lacks.
        steps: the ring steps of each stage.
        latent: the same call with keys and values that each rank expands; None without ``latent_dim``.
    """

    layout: Layout
    method: str
    kernel: Kernel
    degree: int
    work: NDArray[np.float64]
    layer: NDArray[np.float64] | None
    ranks: list[RankFigures]
    row_bytes: int
    moved: float
    chunks: int
    passed_over: dict[str, str]
    steps: tuple[tuple[int, ...], ...]
    latent: OfLatent | None

    @property
    def inner(self) -> int:
        """Number of ranks that exchange heads for rows (an inner group)."""
        return METHODS[self.method].inner_size(self.degree)

    @property
    def slowest(self) -> float:
        """The most time of a rank over the mean: of a layer if there are documents, else of attention."""
        return float((self.work if self.layer is None else self.layer).max())

    @property
    def memory(self) -> int | None:
        """The largest peak of a rank, in bytes."""
        return max((figures.memory.peak for figures in self.ranks if figures.memory is not None), default=None)


@dataclass(frozen=True, eq=False)
class Setting:
    """The arguments of a call, except its layout and method.

    Attributes:
        seq_len, cp_size, mask: of the whole sequence.
        options: its spec; `_call` adds the layout.
        features: score features that the kernel has to support.
        q, k, v: operands with one row.
        latent_dim: features of a token's latent and rotary keys; 0: keys and values are not expanded from any.
        knows_heads: whether the caller gave the numbers of heads.
        kernel: as requested.
        compute_capability: of the device.
        transport, within: "symmetric_memory" or "functional", between all ranks and between ranks of a host.
        gpus_per_host: ranks that share a host.
    """

    seq_len: int
    cp_size: int
    mask: Mask
    options: AttentionSpec
    features: frozenset[str]
    q: Operand
    k: Operand
    v: Operand
    latent_dim: int
    knows_heads: bool
    kernel: str
    compute_capability: tuple[int, int]
    transport: str
    within: str
    gpus_per_host: int

    @cached_property
    def _seen(self) -> Array:
        """Number of keys that each position sees, summed over batch rows: int64 [seq_len]."""
        first, last, ids = self.mask.key_intervals(torch.arange(self.seq_len, device="cpu"))
        ids, seen = torch.zeros_like(first) if ids is None else ids, np.zeros(self.seq_len, dtype=np.int64)
        for row in range(max(len(first), len(ids))):
            document = np.unique(ids[row % len(ids)].numpy(), return_inverse=True)[1] * self.seq_len
            order = document.argsort(kind="stable")  # a document's positions lie together
            at = (document + np.arange(self.seq_len))[order]
            begin = at.searchsorted(document + first[row % len(first)].numpy().clip(max=self.seq_len))
            end = at.searchsorted(document + last[row % len(last)].numpy().clip(-1, self.seq_len - 1), side="right")
            counts = (np.bincount(x, minlength=self.seq_len + 1) for x in (begin, np.maximum(begin, end)))
            seen[order] += np.subtract(*counts).cumsum()[:-1]
        return seen

    def pairs(self, layout: Layout) -> NDArray[np.float64]:
        """Query-key pairs of each rank; padding keys count."""
        come_back = self.mask.documents is not None and any(row.come_back for row in self.mask.runs())
        held = [(rank, x) for rank in range(self.cp_size) for x in layout.runs(self.seq_len, self.cp_size, rank)]
        ranks = [rank for rank, _ in held]
        if not come_back and all(isinstance(x, Run) and x.stride == 1 for _, x in held):  # few positions tell
            ends = np.array([(x.start, x.last + 1) for _, x in held if isinstance(x, Run)]).reshape(-1, 2)
            points = np.unique(ends)
            before = np.append(0, pairs_between(points, self.mask, self.seq_len).cumsum())
            of_pieces = np.diff(before[points.searchsorted(ends)])[:, 0]
        else:
            at = (slice(x.start, x.last + 1, x.stride) if isinstance(x, Run) else x.values.numpy() for _, x in held)
            of_pieces = np.array([self._seen[rows].sum() for rows in at])
        return np.bincount(ranks, of_pieces, self.cp_size).astype(np.float64)

    def held(self, layout: Layout, rank: int) -> tuple[int, list[str]]:
        """Return how many documents a rank holds whole, and the numbers of those of which it holds a part.

        A document that comes back is one. Numbers count from 0 in each batch row, whose number goes before them.
        """
        at, whole, cut = layout.positions(self.seq_len, self.cp_size, rank).numpy(), 0, list[str]()
        for row, documents in enumerate(self.mask.runs()):
            labels, of_run = np.unique(documents.labels, return_inverse=True)
            lens = np.bincount(of_run, np.diff(documents.edges))
            held = np.bincount(of_run[documents.edges[1:].searchsorted(at, side="right")], minlength=len(labels))
            held, lens = held[labels >= 0], lens[labels >= 0]
            whole += int((held == lens).sum())
            cut += [
                f"{row}:{i}" if len(self.mask.runs()) > 1 else f"{i}"
                for i in np.flatnonzero((held > 0) & (held < lens))
            ]
        return whole, cut

    def look_at(self, layout: Layout, method: str, degree: int = 0) -> Variant:
        """Compute the figures of a layout and method; ``degree`` 0: as requested, or as `cp_mesh.attention` chooses."""
        chosen = METHODS[method]
        options, request = self._call(layout)
        options = options._replace(method=method, ulysses_degree=degree or options.ulysses_degree)
        if method == "hybrid" and not self.knows_heads:
            refuse("explain: method='hybrid'", "num_heads, which ranks exchange", None, "num_heads=32, num_kv_heads=8")
        no_heads = method == "ulysses" and not self.knows_heads  # assume that heads divide by cp_size
        degree = self.cp_size if no_heads else chosen.choose_degree(options, self.q, self.k, self.cp_size)
        whole = self.seq_len, self.cp_size
        make_of = partial(chosen.make_schedule, layout, self.mask, *whole, degree=degree)
        make, inner = partial(make_of, 0), chosen.inner_size(degree)
        of_kernel = make, request, self.features
        is_auto = self.kernel == "auto"  # a kernel given by name counts as installed
        first, kernel = choose_schedule("auto", *of_kernel) if is_auto else named_kernel(self.kernel, *of_kernel)
        passed_over = self._passed_over(kernel, [request(schedule) for schedule in (make(True), first)])
        batch, num_heads, _, dim = self.q.shape
        sizes, chunks = Sizes(batch, num_heads, self.k.shape[1], dim, self.v.shape[3], *[self.q.dtype.itemsize] * 2), 1
        if not no_heads:
            settings = chosen.settings(options, self.q, self.k, self.v, first, kernel, self.features, degree)
            sizes, chunks = sizes_of(self.q, self.k, self.v, settings), settings.head_chunks
        setup = Setup(
            chosen, degree, sizes, chunks, kernel, self.features, self.transport, self.within, self.gpus_per_host
        )
        pairs = np.repeat(self.pairs(layout).reshape(-1, inner).mean(1), inner)
        work, layer = pairs / max(1.0, pairs.mean()), None
        if self.mask.documents is not None:
            rows_of_ranks = np.array([layout.shard_len(*whole, rank) for rank in range(self.cp_size)])
            layer = pairs + PAIRS_PER_TOKEN * len(self.mask.runs()) * rows_of_ranks
            layer = layer / layer.mean()
        figures, ranks = [], [inner * number for number in self._sample(work[::inner], first.route.needed, inner)]
        schedules = [make_of(rank, "segments" in first.covers) for rank in ranks]
        for rank, schedule in zip(ranks, schedules, strict=True):
            rows = layout.shard_len(*whole, rank)
            figures.append(self._figures(schedule, setup, rank, rows, float(work[rank])))
        kv_heads = sizes.num_kv_heads if no_heads else kv_heads_of_rank(sizes, inner)
        row_bytes = batch * kv_heads * sizes.row_dim * sizes.itemsize
        moved: float = first.route.num_rows / len(first.route.needed)
        if self.knows_heads:
            moved = self._bytes_moved(sizes, moved, inner, kernel)
        steps = tuple(stage.steps for stage in first.route.stages)
        of_latent = None
        if self.latent_dim:
            of_latent = self._of_latent(setup, options, first, schedules, inner * float(pairs[ranks].sum()))
        of_layout = layout, method, kernel, degree, work, layer, figures
        return Variant(*of_layout, row_bytes, moved, chunks, passed_over, steps, of_latent)

    def _of_latent(
        self, setup: Setup, options: AttentionSpec, first: Schedule, schedules: Sequence[Schedule], num_pairs: float
    ) -> OfLatent:
        """Figures of `latent_attention`, from the schedules of some ranks: a row of the latent is its only kv head."""
        row, inner = self.k._replace(shape=torch.Size((self.k.shape[0], 1, 1, self.latent_dim))), setup.degree
        kernel, whole = latent_kernel(setup.kernel), options._replace(head_chunks=0)  # as `latent_passes` plans it
        settings = setup.method.settings(whole, self.q, row, row, first, kernel, self.features, inner)
        sizes = replace(sizes_of(self.q, row, self.v, settings), latent_dim=self.latent_dim)
        sizes = replace(sizes, latent_chunks=options.head_chunks)
        setup = setup._replace(kernel=kernel, sizes=sizes, head_chunks=1)
        parts = [part for x in schedules for part in visits(x, takes_one_tile(kernel, x, self.features))]
        rows = [len(torch.atleast_2d(x)) for x in map(partial(getattr, self.mask), TENSORS) if x is not None]
        products = self.latent_dim * sum(x.k[1] - x.k[0] for part in parts for x in part) * max(rows, default=1)
        moved = self._bytes_moved(sizes, first.route.num_rows / len(first.route.needed), inner, kernel)
        return OfLatent(moved, max(memory(x, setup).peak for x in schedules), products / max(1.0, num_pairs))

    def _call(self, layout: Layout) -> tuple[AttentionSpec, Callable[[Schedule], Request]]:
        """The spec of the call, and a function from a schedule to what it requires of a kernel."""
        options, capability = self.options._replace(layout=layout.spec()), self.compute_capability
        return options, partial(request_of, self.q, self.v, options, self.features, compute_capability=capability)

    def _passed_over(self, kernel: Kernel, requests: Sequence[Request]) -> dict[str, str]:
        """Kernels that "auto" prefers to ``kernel``, and the first thing each lacks, for the request it lacks least."""
        found = {}
        for name, other in KERNELS.items():
            if name == kernel.name or self.kernel != "auto":
                break
            if self.q.device.type in other.capability.devices:
                missing = min((shortfalls(other.capability, request) for request in requests), key=len)
                found[name] = missing[0].partition(" (")[0]
        return found

    def _sample(self, work: NDArray[np.float64], needed: Array, inner: int) -> Sequence[int]:
        """Ranks or inner groups to compute: all, or a sample with those that compute or fetch most."""
        size = len(needed)
        if size * inner <= ALL_RANKS:
            return range(size)
        fetched, here = needed.sum(1), np.arange(size) * inner // self.gpus_per_host
        near = np.array([row[here == host].sum() for row, host in zip(needed, here, strict=True)])
        most = (int(x.argmax()) for x in (work, fetched, fetched - near))
        return sorted({*range(min(3, size)), *most, size // 2, size - 1})

    def _figures(self, schedule: Schedule, setup: Setup, rank: int, rows: int, work: float) -> RankFigures:
        stages, kernel = schedule.route.stages, setup.kernel
        one_tile = takes_one_tile(kernel, schedule, self.features)
        visits = [schedule.local_tiles, *(stage.tiles for stage in stages)]
        calls = setup.head_chunks * sum(len(enclosing(tiles) if one_tile else tiles) for tiles in visits)
        moves = received(schedule, setup.method.inner_size(setup.degree))
        by_host = [(source // self.gpus_per_host, num_rows(ranges)) for move in moves for source, ranges in move]
        near = sum(rows for host, rows in by_host if host == rank // self.gpus_per_host)
        held = None
        if self.knows_heads:
            held = memory(schedule, setup)
        return RankFigures(
            rank, rows, work, calls, tuple(stage.num_fetched for stage in stages),
            tuple(tuple(source for source, _ in stage.fetch) for stage in stages),
            near, sum(rows for _, rows in by_host) - near, held,
        )  # fmt: skip

    def _bytes_moved(self, sizes: Sizes, rows: float, inner: int, kernel: Kernel) -> float:
        """Bytes that a GPU receives in both passes.

        Fetched key rows count twice, plus their gradients. Exchanges of heads move q, k, v, out, dout, dq,
        dk and dv. If kv heads go to several ranks, q, k, v and out (or delta) are not kept and travel twice, with lse.
        """
        kv_heads, q, out = kv_heads_of_rank(sizes, inner), sizes.head_dim, sizes.v_head_dim
        fetched = sizes.batch * sizes.row_dim * kv_heads * rows * (2 * sizes.itemsize + sizes.gradient_itemsize)
        of_kv = inner * kv_heads * sizes.row_dim
        own = self.seq_len / self.cp_size * (inner - 1) / inner
        again = inner * kv_heads > sizes.num_kv_heads
        of_q = sizes.num_heads * (2 * (q + out) + again * (q + (not kernel.uses_delta) * out))
        of_lse = again * sizes.num_heads * max(4, sizes.itemsize) * (2 + kernel.uses_delta)  # with delta
        home = sizes.home_itemsize or sizes.gradient_itemsize
        return fetched + own * sizes.batch * ((of_q + (1 + again) * of_kv) * sizes.itemsize + of_kv * home + of_lse)


def received(schedule: Schedule, degree: int = 1) -> list[Fetch]:
    """All rows that a rank receives, by cp rank; ``degree``: cp ranks per rank of the schedule."""
    return [tuple((degree * source, ranges) for source, ranges in stage.fetch) for stage in schedule.route.stages]


def named_kernel(
    name: str, make: Callable[[bool], Schedule], request: Callable[[Schedule], Request], features: Collection[str]
) -> tuple[Schedule, Kernel]:
    """Like `choose_schedule`, for a kernel given by name; its package counts as installed."""
    kernel, missing = KERNELS[name], [""]
    for by_documents in (POSITIONAL.isdisjoint(features), False):
        schedule = make(by_documents)
        missing = shortfalls(replace(kernel.capability, lacking=lambda: None), request(schedule), named=True)
        if not missing:
            return schedule, kernel
    raise UnsupportedError(f"kernel={name!r} lacks {'; '.join(missing)}; kernel='auto' works")


def owners(layout: Layout, seq_len: int, cp_size: int, position: Array) -> Array:
    """The rank that holds each of these ascending positions: int64 [positions]."""
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
    """At most ``num`` evenly spaced positions: int64."""
    num = max(1, min(seq_len, num))
    return np.arange(num) * seq_len // num
