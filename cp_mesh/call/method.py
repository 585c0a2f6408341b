"""The contract between planning and the methods, which move rows between ranks and have kernels compute tiles.

A `Method` is one file beside this one. It says which schedule it runs, decides what only it needs (its settings), and
has a forward and a backward on this rank's [B, H, S, D] tensors. What it computes does not depend on it: the same
masks, layouts, scores and kernels in every method.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from cp_mesh._torch import raw_stream
from cp_mesh.call.spec import AttentionSpec, Operand
from cp_mesh.comm.contract import Transport
from cp_mesh.geometry.layouts import Layout
from cp_mesh.geometry.mask import Band, Mask
from cp_mesh.geometry.schedule import Schedule, Stage, Tile, enclosing
from cp_mesh.geometry.varlen import Segments
from cp_mesh.kernels.contract import KernelTile, Pairs, Steps
from cp_mesh.kernels.merge import Kernel
from cp_mesh.kernels.scores import POSITIONAL, TERMS, Scores
from cp_mesh.tape import repeat

BANDS = frozenset({"full", "causal", "window"})  # tile kinds given by integers; nothing is copied to the device
OfScores = dict[str, Tensor]


@dataclass(frozen=True, eq=False)
class Method:
    """One way to compute attention over ranks. Everything that it decides is equal on all ranks.

    Attributes:
        name: as in ``cp_mesh.attention(method=)``.
        choose_degree: (options, q, k, cp_size) -> how many ranks exchange heads for rows, or share a host; 1 if neither
            matters. Refuses those that it cannot serve.
        make_schedule: (layout, mask, seq_len, cp_size, cp_rank, by documents, degree=, sources=) -> this rank's
            schedule.
        settle: (options, q, k, v, schedule, kernel, features of the scores, degree) -> the plan's settings; refuses
            options that it cannot serve.
        forward: (q, k, v, plan, group) -> out [B, H, S_local, Dv] and lse [B, H, S_local]; and where the
            spec ``keeps``, what ``kept_shapes`` says.
        backward: (dout, q, k, v, out, lse, dlse, plan, group, wanted) -> dq, dk, dv, and the gradients of the scores'
            tensors named in wanted, this rank's share. Of a method that kept something, ``kept`` and others in the
            place of out and lse; q, k and v have no rows then.
        kept_shapes: (q, k, v, seq_len, cp_size, degree) -> of the tensors that the forward makes for the backward, if
            the spec ``keeps``: they take the place of q, k, v, out and lse. None or no shape: nothing does.
        swaps: whether ranks exchange heads for rows, as many as the degree: these are one rank of a schedule.
        degree_option: the name of the option that says the degree, if there is one.
        open_transport: (plan, group) -> of one pass over some heads in which rows travel; None: one over the group.
    """

    name: str
    choose_degree: Callable[[AttentionSpec, Operand, Operand, int], int]
    make_schedule: Callable[..., Schedule]
    settle: Callable[[AttentionSpec, Operand, Operand, Operand, Schedule, Kernel, Collection[str], int], Any]
    forward: Callable[[Tensor, Tensor, Tensor, Plan, dist.ProcessGroup], tuple[Tensor, ...]]
    backward: Callable[..., tuple[Tensor, Tensor, Tensor, OfScores]]
    kept_shapes: Callable[[Tensor, Tensor, Tensor, int, int, int], list[tuple[int, ...]]] | None = None
    swaps: bool = False
    degree_option: str = ""
    open_transport: Callable[[Plan, dist.ProcessGroup], Transport] | None = None

    def with_degree(self, options: AttentionSpec, degree: int) -> AttentionSpec:
        """Options that ask for this degree, of a method that has them."""
        asked: dict[str, Any] = {self.degree_option: degree} if self.degree_option else {}
        return options._replace(**asked)

    def inner_size(self, degree: int) -> int:
        """How many ranks are one rank of a schedule."""
        return degree if self.swaps else 1


@dataclass(frozen=True, eq=False)
class Plan:
    """What one call does on this rank. Calls that are alike but for the values of their tensors share one.

    Attributes:
        method: how rows move and in which order tiles are computed.
        settings: what the method decided for this call, see its file.
        kind: what it has in common with the calls of which the first alone is compared; the same on all ranks.
        has_tensors: whether there are any beside q, k and v.
        of_call: whether its scores hold tensors of one call, so that no other may have it.
        prepared: tiles as kernels are given them, and what of masks and positions is on the device, by CUDA stream;
            shared by the plans of equal calls, so that it comes to the device once a batch and not once a layer.
        tapes: of its passes, by `cp_mesh.tape`; shared likewise.
    """

    options: AttentionSpec
    layout: Layout
    mask: Mask
    seq_len: int
    schedule: Schedule
    kernel: Kernel
    scores: Scores
    device: torch.device
    method: Method
    settings: Any
    kind: tuple[Any, ...] = ()
    has_tensors: bool = False
    of_call: bool = False
    prepared: dict[Any, Any] = field(default_factory=dict)
    tapes: dict[Any, Any] = field(default_factory=dict)

    def tiles(self, stage: Stage | None) -> list[KernelTile]:
        """Tiles of this rank's queries against the keys fetched in a stage; None: against its own keys."""
        stream = stream_of(self.device) if self.reads_tensors else 0
        key = "tiles", id(stage), stream
        if stream is None or key not in self.prepared:
            tiles = self.schedule.local_tiles if stage is None else stage.tiles
            given = enclosing(tiles) if as_one_tile(self.kernel, self.schedule, self.scores.features) else tiles
            found = [KernelTile(tile.q, tile.k, self._cover(tile, stage, stream)) for tile in given]
            if stream is None:
                return found
            self.prepared[key] = stage, found  # the stage too: its id may be another's once it is gone
        of_stage: list[KernelTile] = self.prepared[key][1]
        return of_stage

    def run(self, what: tuple[Any, ...], compute: Callable[..., Any], inputs: Sequence[Tensor | None]) -> Any:
        """``compute(*inputs)``, a pass of the method, by its tape where it has one."""
        stream = stream_of(self.device)
        if stream is None or not self._is_taped:
            return compute(*inputs)
        if self.device.type == "cuda" and torch.cuda.current_device() != self.device.index:  # of launches and streams
            return compute(*inputs)
        if self.of_call:
            inputs = *inputs, *(getattr(self.scores, name) for name in (*TERMS, "dropout_seed"))
        return repeat(self.tapes, (*what, stream), compute, inputs)

    @cached_property
    def _is_taped(self) -> bool:
        # A plan of one batch is not worth it: to record it takes the host longer than the layers of a model gain.
        of_batch = self.mask.elementwise or self.layout.tensor is not None
        return self.kernel.taped and not (of_batch or self.scores.score_mod or self.scores.mask_mod)

    @cached_property
    def reads_tensors(self) -> bool:
        """Whether tiles come with tensors on the device, not as numbers alone."""
        return not covers_of(self.schedule, self.scores.features) <= BANDS

    def _cover(self, tile: Tile, stage: Stage | None, stream: int | None) -> Band | Pairs | Segments:
        if isinstance(tile.cover, Band) and not self.scores.needs_positions:
            return tile.cover
        if isinstance(tile.cover, Segments):  # one for each stream, as its tables on the device belong to one
            return Segments(tile.cover.blocks, tile.cover.left, tile.cover.right)
        q_pos, _, of_q = self._positions(None, stream)
        k_pos, adjacent, of_k = self._positions(stage, stream)
        mask = self.prepare(("mask",), stream, lambda: self.mask.to(self.device))
        steps = of_q and of_q.rows(*tile.q), of_k and of_k.rows(*tile.k)
        sizes = None
        if self.mask.elementwise or self.options.sources:  # which rows meet differs from batch to batch
            rows = max(self.schedule.shard_lens)
            sources = -(-(tile.k[1] - tile.k[0]) // rows)
            sizes = rows, rows << (sources - 1).bit_length()
        return Pairs(mask, q_pos[slice(*tile.q)], k_pos[slice(*tile.k)], adjacent, steps, sizes)

    def _positions(self, stage: Stage | None, stream: int | None) -> tuple[Tensor, bool, Steps | None]:
        """Positions of a stage's buffer, or of this rank's rows: on the device; if most are neighbours; as steps."""

        def make() -> tuple[Tensor, bool, Steps | None]:
            rank, size = self.schedule.cp_rank, self.schedule.cp_size
            parts = [(rank, ((0, self.schedule.shard_lens[rank]),))] if stage is None else stage.fetch
            parts_at = [
                self.layout.positions(self.seq_len, size, source)[begin:end]
                for source, ranges in parts
                for begin, end in ranges
            ]
            positions = torch.cat(parts_at)
            adjacent = 2 * int((positions.diff() == 1).sum()) >= len(positions)
            return positions.to(self.device), adjacent, Steps.of(positions)

        found: tuple[Tensor, bool, Steps | None] = self.prepare(("positions", stage), stream, make)
        return found

    def prepare(self, what: tuple[Any, ...], stream: int | None, make: Callable[[], Any]) -> Any:
        """What was made before for this stream; memory of a graph that is being captured is nobody else's."""
        if stream is None:
            return make()
        key = *what, stream
        if key not in self.prepared:
            self.prepared[key] = make()
        return self.prepared[key]


def covers_of(schedule: Schedule, features: Collection[str]) -> frozenset[str]:
    """The covers of the tiles that a kernel will see, on all ranks."""
    positional = bool(schedule.covers) and not POSITIONAL.isdisjoint(features)
    return frozenset({"pairs"}) if positional else schedule.covers


def as_one_tile(kernel: Kernel, schedule: Schedule, features: Collection[str]) -> bool:
    """Whether the kernel is given the tiles of a step as one that tells its positions; equal on all ranks."""
    return kernel.one_tile and "pairs" in covers_of(schedule, features)


def stream_of(device: torch.device) -> int | None:
    """The CUDA stream that device memory made now belongs to; None if it belongs to a graph that is being captured."""
    if device.type != "cuda":
        return 0
    return None if torch.cuda.is_current_stream_capturing() else raw_stream(device.index)
