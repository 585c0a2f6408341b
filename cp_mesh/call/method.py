"""The contract between planning and the methods, which move rows between ranks and run kernels on tiles.

A `Method` makes its schedule, decides its own settings, and has a forward and a backward on this rank's [B, H, S, D]
tensors. All methods compute the same result with the same masks, layouts, scores and kernels.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor

from cp_mesh._torch import raw_stream
from cp_mesh.call.spec import AttentionSpec, Operand
from cp_mesh.geometry.host_tensors import lasting
from cp_mesh.geometry.layouts import Layout
from cp_mesh.geometry.mask import Band, Mask
from cp_mesh.geometry.schedule import Schedule, Stage, Tile, enclosing
from cp_mesh.geometry.varlen import Segments
from cp_mesh.kernels.contract import KernelTile, Pairs, Steps
from cp_mesh.kernels.merge import Kernel
from cp_mesh.kernels.scores import POSITIONAL, Scores

BANDS = frozenset({"full", "causal", "window"})  # tile kinds that integers describe: nothing is copied to the device
OfScores = dict[str, Tensor]


class Backward(NamedTuple):
    """What a backward is given on this rank.

    Attributes:
        dout: [B, H, S_local, Dv], the gradient of out.
        q, k, v: the forward's inputs; without rows if it kept tensors: only other sizes and strides are read then.
        out, lse: the forward's results, or those that it kept.
        dlse: [B, H, S_local] or None, the gradient of lse.
        kept: the rows that the forward kept, or None.
        scores: of the forward.
        wanted: names of the score tensors (sinks, and those of `Scores.wanted`) that need a gradient.
    """

    dout: Tensor
    q: Tensor
    k: Tensor
    v: Tensor
    out: Tensor
    lse: Tensor
    dlse: Tensor | None
    kept: Tensor | None
    scores: Scores
    wanted: Collection[str] = ()


class Method:
    """One way to compute attention over ranks. Everything that it decides is equal on all ranks.

    Subclasses have beside what follows:
        make_schedule(layout, mask, seq_len, cp_size, cp_rank, by documents, degree=, sources=) -> this rank's schedule.
        settings(options, q, k, v, schedule, kernel, features of the scores, degree) -> the plan's settings. It refuses
            options that the method cannot serve.
        forward(q, k, v, scores, plan, group) -> out [B, H, S_local, Dv] in q's dtype, `dense_like` q, and lse
            [B, H, S_local] in the accumulation dtype; if the spec ``keeps``, also the tensors of `kept_shapes`.
        backward(`Backward`, plan, group) -> dq, dk, dv in the inputs' dtype, `dense_like` the inputs; and the wanted
            gradients by name, to be summed over ranks, in the accumulation dtype.

    Attributes:
        name: as in ``cp_mesh.attention(method=)``.
    """

    make_schedule: Callable[..., Schedule]
    settings: Callable[..., Any]
    forward: Callable[..., tuple[Tensor, ...]]
    backward: Callable[..., tuple[Tensor, Tensor, Tensor, OfScores]]

    def __init__(self, name: str) -> None:
        self.name = name

    def choose_degree(self, options: AttentionSpec, q: Operand, k: Operand, cp_size: int) -> int:
        """How many ranks exchange heads for rows; refuses a degree that the method cannot serve."""
        return 1

    def inner_size(self, degree: int) -> int:
        """How many ranks count as one rank in a schedule."""
        return 1

    def kept_shapes(
        self, q: Tensor, k: Tensor, v: Tensor, seq_len: int, cp_size: int, degree: int
    ) -> list[tuple[int, ...]]:
        """The shapes of the tensors that the forward saves for the backward in place of q, k, v, out and lse, if the
        spec ``keeps``; none: it saves none."""
        return []


@dataclass(frozen=True, eq=False)
class Plan:
    """What one call does on this rank. Calls with equal shapes, options, mask and layout contents share a plan.

    Attributes:
        options: as `AttentionSpec.of_plan` leaves them.
        features: of the call's scores.
        method: how rows move and in which order tiles are computed.
        settings: the settings that the method decided for this call; see its file.
        kind: sizes and dtype that are equal on all ranks.
        v_head_dim: the head dim of out.
        prepared: tiles as passed to kernels, and masks and positions on the device, by CUDA stream. Plans of equal
            calls share it, so that a copy to the device happens once per batch, not once per layer.
    """

    options: AttentionSpec
    layout: Layout
    mask: Mask
    seq_len: int
    schedule: Schedule
    kernel: Kernel
    features: frozenset[str]
    device: torch.device
    method: Method
    settings: Any
    kind: tuple[Any, ...] = ()
    v_head_dim: int = 0
    prepared: dict[Any, Any] = field(default_factory=dict)

    def tiles(self, stage: Stage | None) -> list[KernelTile]:
        """Tiles of this rank's queries against the keys fetched in a stage; None: against its own keys."""
        stream = stream_of(self.device) if self.reads_tensors else 0
        found: list[KernelTile] | None = self.prepared.get(("tiles", stage, stream))
        return found or self.prepare(("tiles", stage), stream, lambda: self._make_tiles(stage, stream))

    def _make_tiles(self, stage: Stage | None, stream: int | None) -> list[KernelTile]:
        tiles = self.schedule.local_tiles if stage is None else stage.tiles
        tiles = enclosing(tiles) if takes_one_tile(self.kernel, self.schedule, self.features) else tiles
        return [KernelTile(tile.q, tile.k, self._cover(tile, stage, stream)) for tile in tiles]

    @cached_property
    def reads_tensors(self) -> bool:
        """Whether tiles need tensors on the device, beyond integers."""
        return not covers_of(self.schedule, self.features) <= BANDS

    def _cover(self, tile: Tile, stage: Stage | None, stream: int | None) -> Band | Pairs | Segments:
        if isinstance(tile.cover, Band) and POSITIONAL.isdisjoint(self.features):
            return tile.cover
        if isinstance(tile.cover, Segments):  # one per stream, as its tables on the device belong to a stream
            return Segments(tile.cover.blocks, tile.cover.left, tile.cover.right)
        q_pos, _, of_q = self._positions(None, stream)
        k_pos, adjacent, of_k = self._positions(stage, stream)
        mask = self.prepare(("mask",), stream, lambda: self.mask.to(self.device))
        steps = of_q and of_q.rows(*tile.q), of_k and of_k.rows(*tile.k)
        sizes = None
        if self.mask.elementwise or self.options.sources:  # which rows meet differs between batches
            rows = max(self.schedule.shard_lens)
            sources = -(-(tile.k[1] - tile.k[0]) // rows)
            sizes = rows, rows << (sources - 1).bit_length()
        return Pairs(mask, q_pos[slice(*tile.q)], k_pos[slice(*tile.k)], adjacent, steps, sizes)

    def _positions(self, stage: Stage | None, stream: int | None) -> tuple[Tensor, bool, Steps | None]:
        """Positions of a stage's buffer or this rank's rows, on the device; whether most are adjacent; as `Steps`."""

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
        """The cached result of ``make`` for this stream; uncached in a graph capture, whose memory is private."""
        if stream is None:
            return make()
        key = *what, stream
        if key not in self.prepared:
            with lasting():
                self.prepared[key] = make()
        return self.prepared[key]


def covers_of(schedule: Schedule, features: Collection[str]) -> frozenset[str]:
    """The covers of the tiles that kernels get, over all ranks."""
    positional = bool(schedule.covers) and not POSITIONAL.isdisjoint(features)
    return frozenset({"pairs"}) if positional else schedule.covers


def takes_one_tile(kernel: Kernel, schedule: Schedule, features: Collection[str]) -> bool:
    """Whether the tiles of a step are passed to the kernel as one tile with positions; equal on all ranks."""
    return kernel.one_tile and "pairs" in covers_of(schedule, features)


def stream_of(device: torch.device) -> int | None:
    """The current CUDA stream, to which memory allocated now belongs; 0 on a CPU; None during a graph capture."""
    if device.type != "cuda":
        return 0
    return None if torch.cuda.is_current_stream_capturing() else raw_stream(device.index)
