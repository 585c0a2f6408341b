"""Plan: one call's options, validated against its tensors and resolved to a layout, mask, schedule and kernel.

`Options` is what the op carries as a string; `make_plan` is run on every rank before the first collective. What depends
on local tensors alone is refused here; `cp_mesh.attention` refuses what only it sees (types, DTensors' placements). The
checks read what a rank can see alone. What they read is equal on all ranks, so
all ranks raise alike, except for two things that only ranks together can compare: arguments that differ between
ranks, and the number of local rows where shards are unequal. Check mode finds both on every rank.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager, closing
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache, partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from cp_mesh.call import Operand, Options, Tensors, check_choice, check_scores, check_tensors, make_scores
from cp_mesh.errors import ArgumentError, UnsupportedError, describe
from cp_mesh.kernels import KERNELS, choose_kernel
from cp_mesh.kernels.combine import accumulation_dtype
from cp_mesh.kernels.contract import Kernel, KernelTile, Pairs, Request, shortfalls
from cp_mesh.kernels.scores import POSITIONAL, Scores
from cp_mesh.layouts import Layout, check_layout, parse_layout
from cp_mesh.masks import NONE, Band, Mask, parse_mask
from cp_mesh.owned import Content
from cp_mesh.schedule import Schedule, Stage, Tile, enclosing, make_schedule
from cp_mesh.segments import Segments
from cp_mesh.transport import TRANSPORTS, make_transport
from cp_mesh.transport.contract import Transport

METHODS = ("auto", "ring")
BANDS = frozenset({"full", "causal", "window"})  # tile kinds given by integers; nothing is copied to the device
CHUNK_BYTES = 512 << 20  # K and V that a rank fetches, for the heads of one chunk


@dataclass(frozen=True, eq=False)
class Plan:
    """What one call does on this rank. Calls that are alike but for the values of their tensors share one.

    Attributes:
        head_chunks: parts of the kv heads that are computed one after the other.
        gradient_dtype: in which dk and dv travel: as the kernel returned them, if it rounds them and no two of a
            message belong to one row; else the accumulation dtype, so that every sum is rounded once.
        kept: tiles as kernels are given them, and what of masks and positions is on the device, by CUDA stream; shared
            by the plans of equal calls, so that it comes to the device once a batch and not once a layer.
    """

    options: Options
    layout: Layout
    mask: Mask
    seq_len: int
    schedule: Schedule
    kernel: Kernel
    scores: Scores
    device: torch.device
    head_chunks: int
    gradient_dtype: torch.dtype
    kept: dict[Any, Any] = field(default_factory=dict)

    @property
    def local_tiles(self) -> list[KernelTile]:
        """Tiles of this rank's queries against its own keys."""
        return self._kernel_tiles(self.schedule.local_tiles, None)

    def tiles(self, stage: Stage) -> list[KernelTile]:
        """Tiles of this rank's queries against the keys fetched in a stage."""
        return self._kernel_tiles(stage.tiles, stage)

    def open_transport(self, group: dist.ProcessGroup) -> AbstractContextManager[Transport]:
        """The transport of one pass over one chunk of heads; closed also after an exception."""
        return closing(make_transport(self.options.transport, group, self.schedule, self.device))

    @cached_property
    def reads_tensors(self) -> bool:
        """Whether tiles come with tensors on the device, not as numbers alone."""
        return not covers_of(self.schedule, self.scores.features) <= BANDS

    def _kernel_tiles(self, tiles: Sequence[Tile], stage: Stage | None) -> list[KernelTile]:
        stream = _stream(self.device) if self.reads_tensors else 0

        def make() -> tuple[Sequence[Tile], list[KernelTile]]:
            given = enclosing(tiles) if as_one_tile(self.kernel, self.schedule, self.scores.features) else tiles
            # keep a reference: the key is id(tiles), which Python may give to others once these are gone
            return tiles, [KernelTile(tile.q, tile.k, self._cover(tile, stage, stream)) for tile in given]

        return self._keep(("tiles", id(tiles)), stream, make)[1]

    def _cover(self, tile: Tile, stage: Stage | None, stream: int | None) -> Band | Pairs | Segments:
        if isinstance(tile.cover, Band) and not self.scores.needs_positions:
            return tile.cover
        if isinstance(tile.cover, Segments):  # one for each stream, as its tables on the device belong to one
            return Segments(tile.cover.blocks, tile.cover.left, tile.cover.right)
        q_pos, k_pos = self._positions(None, stream), self._positions(stage, stream)
        mask = self._keep(("mask",), stream, lambda: self.mask.to(self.device))
        return Pairs(mask, q_pos[tile.q[0] : tile.q[1]], k_pos[tile.k[0] : tile.k[1]])

    def _positions(self, stage: Stage | None, stream: int | None) -> Tensor:
        """Positions of a stage's buffer, or of this rank's rows, on the device."""

        def make() -> Tensor:
            rank, size = self.schedule.cp_rank, self.schedule.cp_size
            parts = [(rank, ((0, self.schedule.shard_lens[rank]),))] if stage is None else stage.fetch
            positions = [
                self.layout.positions(self.seq_len, size, source)[begin:end]
                for source, ranges in parts
                for begin, end in ranges
            ]
            return torch.cat(positions).to(self.device)

        return self._keep(("positions", stage), stream, make)

    def _keep(self, what: tuple[Any, ...], stream: int | None, make: Callable[[], Any]) -> Any:
        """What was made before for this stream; memory of a graph that is being captured is nobody else's."""
        if stream is None:
            return make()
        key = *what, stream
        if key not in self.kept:
            self.kept[key] = make()
        return self.kept[key]


def make_plan(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    tensors: Tensors,
    seq_len: int,
    group: dist.ProcessGroup,
    options: Options,
) -> Plan:
    """Validate a call on local tensors and resolve it.

    Args:
        q: [B, H, S_local, D]; k: [B, K, S_local, D]; v: [B, K, S_local, Dv].
        tensors: documents and key_padding [B or 1, seq_len] or [seq_len], the `Layout.tensor` of the layout, and the
            scores' as in `check_scores`.
        seq_len: length of the whole sequence, in tokens.
        group: the cp group.
        options: the call's static options.

    Raises:
        ArgumentError, UnsupportedError: see the messages, and above for which are raised on every rank.
    """
    of_mask = {"Mask.documents": tensors.documents, "Mask.key_padding": tensors.key_padding}
    for name, x in of_mask.items():
        if x is not None and x.is_meta:
            raise ArgumentError(describe(name, "a tensor with content", "one on meta", "keep it on the CPU"))
    read = tensors.documents, tensors.key_padding, tensors.layout_index
    contents = [None if x is None else Content.of(x) for x in read]
    resolve: Callable[..., Plan] = _resolve_once
    scores = None
    if any(x is not None for x in tensors):
        check_tensors(q, k, v)
        check_scores(q, tensors, seq_len)
        if any(x is not None for x in tensors[len(read) :]):
            scores = make_scores(options, tensors, accumulation_dtype(q.dtype))
        if any(x is not None for x in read) or (scores is not None and scores.needs_positions):
            resolve = _resolve_few  # they hold memory of the device
    shapes = Operand.of(q), Operand.of(k), Operand.of(v)
    features = None if scores is None else scores.features
    plan = resolve(*shapes, *contents, features, seq_len, group.size(), group.rank(), options)
    if scores is not None:
        plan = replace(plan, scores=scores)
    if plan.reads_tensors and _stream(q.device) is None:
        raise UnsupportedError(
            describe(
                "CUDA graph capture",
                "a mask and scores that are said without tensors",
                "documents, key padding, a Permuted layout, or scores that read positions",
                "these are copied to the device, which a capture cannot do: leave attention out of the graph",
            )
        )
    return plan


def covers_of(schedule: Schedule, features: Collection[str]) -> frozenset[str]:
    """The covers of the tiles that a kernel will see, on all ranks."""
    positional = bool(schedule.covers) and not POSITIONAL.isdisjoint(features)
    return frozenset({"pairs"}) if positional else schedule.covers


def as_one_tile(kernel: Kernel, schedule: Schedule, features: Collection[str]) -> bool:
    """Whether the kernel is given the tiles of a step as one that tells its positions; equal on all ranks."""
    return kernel.one_tile and "pairs" in covers_of(schedule, features)


def travels_rounded(kernel: Kernel, schedule: Schedule, features: Collection[str]) -> bool:
    """Whether dk and dv travel as the kernel rounded them: no two of a message belong to one row."""
    return kernel.rounds and (as_one_tile(kernel, schedule, features) or not schedule.overlapping)


def _stream(device: torch.device) -> int | None:
    """The CUDA stream that device memory made now belongs to; None if it belongs to a graph that is being captured."""
    if device.type != "cuda":
        return 0
    return None if torch.cuda.is_current_stream_capturing() else torch.cuda.current_stream(device).cuda_stream


def _resolve(
    q: Operand,
    k: Operand,
    v: Operand,
    ids: Content | None,
    padding: Content | None,
    index: Content | None,
    of_tensors: frozenset[str] | None,
    seq_len: int,
    cp_size: int,
    cp_rank: int,
    options: Options,
) -> Plan:
    """The plan; its scores are those without tensors. ``of_tensors`` are the features of those that it will have."""
    scores = make_scores(options, Tensors(), accumulation_dtype(q.dtype))
    features = scores.features if of_tensors is None else of_tensors
    check_choice("method", options.method, METHODS, "ring", later=("all_gather", "ulysses", "hybrid"))
    check_choice("transport", options.transport, TRANSPORTS, "functional", later=())
    check_tensors(q, k, v)
    documents, key_padding = (None if x is None else x.tensor for x in (ids, padding))
    layout = parse_layout(options.layout, None if index is None else index.tensor)
    if seq_len >= NONE:
        raise UnsupportedError(describe("seq_len", f"fewer than {NONE} tokens", seq_len, "split the sequence"))
    check_layout(layout, seq_len, cp_size)
    mask = parse_mask(options.mask, documents, key_padding)
    expected = layout.shard_len(seq_len, cp_size, cp_rank)
    if q.shape[2] != expected:
        raise ArgumentError(
            describe(
                "local sequence length",
                f"{expected} rows (rank {cp_rank} of {cp_size}, {options.layout} layout, seq_len={seq_len})",
                f"{q.shape[2]} rows",
                f"shard with this layout, or pass the seq_len that was sharded (shards of unequal length need it; "
                f"equal ones would mean seq_len={q.shape[2] * cp_size})",
            )
        )
    for name, tensor in (("documents", documents), ("key_padding", key_padding)):
        if tensor is None:
            continue
        if tensor.shape[-1] != seq_len or (tensor.ndim == 2 and tensor.shape[0] not in (1, q.shape[0])):
            raise ArgumentError(
                describe(
                    f"Mask.{name}",
                    f"shape [{q.shape[0]}, {seq_len}] of the whole sequence in original order",
                    tuple(tensor.shape),
                    "give the same whole-sequence tensor on every cp rank; it is never sharded",
                )
            )

    def request(schedule: Schedule) -> Request:
        return Request(
            device=q.device.type,
            compute_capability=_compute_capability(q.device),
            dtype=q.dtype,
            covers=covers_of(schedule, features),
            head_dim=q.shape[3],
            v_head_dim=v.shape[3],
            differentiable_lse=options.differentiable_lse,
            deterministic=options.deterministic,
            min_keys=schedule.min_keys,
            features=features,
        )

    make = partial(make_schedule, layout, mask, seq_len, cp_size, cp_rank)
    schedule, kernel = choose_schedule(options.kernel, make, request, features)
    if kernel.name == "reference" and options.kernel == "auto" and q.device.type == "cuda":
        fast = [name for name, other in KERNELS.items() if other.capability.devices == ("cuda",)]
        lacks = "; ".join(
            f"{name}: {', '.join(shortfalls(KERNELS[name].capability, request(schedule)))}" for name in fast
        )
        warnings.warn(
            f"cp_mesh: no fast kernel can serve this call ({lacks}); the reference kernel runs, exact but slow. "
            "kernel='reference' asks for it without this warning",
            stacklevel=2,
        )
    head_chunks = choose_head_chunks(options.head_chunks, q, k, v, schedule)
    gradient_dtype = q.dtype if travels_rounded(kernel, schedule, features) else accumulation_dtype(q.dtype)
    kernel = kernel.reproducible if options.deterministic and kernel.reproducible else kernel
    return Plan(options, layout, mask, seq_len, schedule, kernel, scores, q.device, head_chunks, gradient_dtype)


_resolve_once = lru_cache(maxsize=256, typed=True)(_resolve)


_resolve_few = lru_cache(maxsize=16, typed=True)(_resolve)


def choose_schedule(
    name: str, make: Callable[[bool], Schedule], request: Callable[[Schedule], Request], features: Collection[str]
) -> tuple[Schedule, Kernel]:
    """The schedule and its kernel: with tiles by documents where a fast kernel takes them, else where none takes pairs.

    Args:
        name: of the kernel, or "auto".
        make: the schedule, with ``True`` by documents, where they are known.
        request: what a schedule needs of its kernel.
        features: of the scores; those that read positions need tiles which tell theirs.
    """
    schedule = make(POSITIONAL.isdisjoint(features))
    if "segments" in schedule.covers:
        wanted = request(schedule)
        able = [x for x in KERNELS.values() if name in ("auto", x.name) and not shortfalls(x.capability, wanted)]
        if able and able[0].name != "reference":
            return schedule, able[0]
        pairs = make(False)
        if not able or choose_kernel(name, request(pairs)).name != "reference":
            schedule = pairs
    return schedule, choose_kernel(name, request(schedule))


def choose_head_chunks(wanted: int, q: Operand, k: Operand, v: Operand, schedule: Schedule) -> int:
    """The number of chunks asked for, or the fewest in which no rank fetches more than `CHUNK_BYTES` of K and V."""
    num_kv_heads = k.shape[1]
    if wanted:
        if num_kv_heads % wanted:
            near = max(n for n in range(1, wanted + 1) if num_kv_heads % n == 0)
            raise ArgumentError(
                describe(
                    "head_chunks", f"a divisor of the {num_kv_heads} kv heads", wanted, f"head_chunks={near} works"
                )
            )
        return wanted
    total = q.shape[0] * schedule.route.most_fetched * num_kv_heads * (k.shape[3] + v.shape[3]) * k.dtype.itemsize
    return next((n for n in range(1, num_kv_heads) if num_kv_heads % n == 0 and total <= n * CHUNK_BYTES), num_kv_heads)


def _compute_capability(device: torch.device) -> tuple[int, int]:
    """(0, 0) where the numbers do not mean NVIDIA's: no stock CUDA kernel is chosen there."""
    return torch.cuda.get_device_capability(device) if device.type == "cuda" and not torch.version.hip else (0, 0)
