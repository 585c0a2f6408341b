"""Plan: one call's options, validated against its tensors and resolved to a layout, mask, schedule and kernel.

`Options` is what the op carries as a string; `make_plan` is run on every rank before the first collective and is the
one place where a call is refused. Its checks read what a rank can see alone. What they read is equal on all ranks, so
all ranks raise alike, except for two things that only ranks together can compare: arguments that differ between
ranks, and the number of local rows where shards are unequal. Check mode finds both on every rank.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass, fields
from functools import cached_property

import torch
import torch.distributed as dist
from torch import Tensor

from cp_mesh.errors import ArgumentError, UnsupportedError, describe
from cp_mesh.kernels import KERNELS, choose_kernel
from cp_mesh.kernels.contract import Kernel, KernelTile, Pairs, Request, shortfalls
from cp_mesh.layouts import Layout, parse_layout
from cp_mesh.masks import Band, Mask, parse_mask
from cp_mesh.schedule import Rows, Schedule, Tile, make_schedule

METHODS = ("auto", "ring")
TRANSPORTS = ("auto", "functional")


@dataclass(frozen=True)
class Options:
    """The static options of a call; `spec` and `parse` are inverse to each other."""

    layout: str
    mask: str
    scale: float
    method: str = "auto"
    kernel: str = "auto"
    transport: str = "auto"
    deterministic: bool = False
    differentiable_lse: bool = False

    def spec(self) -> str:
        return "|".join(str(getattr(self, field.name)) for field in fields(self))

    @classmethod
    def parse(cls, spec: str) -> Options:
        layout, mask, scale, method, kernel, transport, *flags = spec.split("|")
        deterministic, differentiable_lse = (flag == "True" for flag in flags)
        return cls(layout, mask, float(scale), method, kernel, transport, deterministic, differentiable_lse)


@dataclass(frozen=True, eq=False)
class Plan:
    """What one call does on this rank."""

    options: Options
    layout: Layout
    mask: Mask
    seq_len: int
    schedule: Schedule
    kernel: Kernel
    group: dist.ProcessGroup
    device: torch.device

    def tiles(self, source: int) -> list[KernelTile]:
        """Tiles against the rows fetched from ``source`` (all rows, if it is this rank), in fetched coordinates."""
        schedule = self.schedule
        ranges = schedule.fetch[source] if source != schedule.cp_rank else ((0, schedule.shard_lens[source]),)
        return [self._kernel_tile(tile, source, ranges) for tile in schedule.tiles[source]]

    def _kernel_tile(self, tile: Tile, source: int, ranges: tuple[Rows, ...]) -> KernelTile:
        offset = 0
        for begin, end in ranges:
            if begin <= tile.k[0] and tile.k[1] <= end:
                k_rows = (tile.k[0] - begin + offset, tile.k[1] - begin + offset)
                return KernelTile(tile.q, k_rows, self._cover(tile, source))
            offset += end - begin
        raise AssertionError("a tile lies within one fetched range")

    def _cover(self, tile: Tile, source: int) -> Band | Pairs:
        if isinstance(tile.cover, Band):
            return tile.cover
        q_pos = self._positions(self.schedule.cp_rank)[tile.q[0] : tile.q[1]]
        return Pairs(self._device_mask, q_pos, self._positions(source)[tile.k[0] : tile.k[1]])

    @cached_property
    def _device_mask(self) -> Mask:
        return self.mask.to(self.device)

    @cached_property
    def _device_positions(self) -> dict[int, Tensor]:
        return {}

    def _positions(self, rank: int) -> Tensor:
        """Positions of a rank's rows on the device, copied once a call."""
        if rank not in self._device_positions:
            positions = self.layout.positions(self.seq_len, self.schedule.cp_size, rank)
            self._device_positions[rank] = positions.to(self.device)
        return self._device_positions[rank]


def make_plan(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    documents: Tensor | None,
    key_padding: Tensor | None,
    index: Tensor | None,
    seq_len: int,
    group: dist.ProcessGroup,
    options: Options,
) -> Plan:
    """Validate a call on local tensors and resolve it.

    Args:
        q: [B, H, S_local, D]; k: [B, K, S_local, D]; v: [B, K, S_local, Dv].
        documents, key_padding: the mask's tensors, [B or 1, seq_len] or [seq_len].
        index: the index of a `Permuted` layout, [seq_len].
        seq_len: length of the whole sequence, in tokens.
        group: the cp group.
        options: the call's static options.

    Raises:
        ArgumentError, UnsupportedError: see the messages, and above for which are raised on every rank.
    """
    _check_choice("method", options.method, METHODS, "ring", later=("all_gather", "ulysses", "hybrid"))
    _check_choice("transport", options.transport, TRANSPORTS, "functional", later=("symmetric_memory",))
    check_tensors(q, k, v)
    layout = parse_layout(options.layout, index)
    mask = parse_mask(options.mask, documents, key_padding)
    cp_size, cp_rank = group.size(), group.rank()
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
        ids = torch.atleast_2d(tensor)
        if ids.shape[1] != seq_len or ids.shape[0] not in (1, q.shape[0]):
            raise ArgumentError(
                describe(
                    f"Mask.{name}",
                    f"shape [{q.shape[0]}, {seq_len}] of the whole sequence in original order",
                    tuple(tensor.shape),
                    "give the same whole-sequence tensor on every cp rank; it is never sharded",
                )
            )
    schedule = make_schedule(layout, mask, seq_len, cp_size, cp_rank)
    request = Request(
        device=q.device.type,
        compute_capability=_compute_capability(q.device),
        dtype=q.dtype,
        covers=schedule.covers,
        head_dim=q.shape[3],
        v_head_dim=v.shape[3],
        differentiable_lse=options.differentiable_lse,
        deterministic=options.deterministic,
        min_keys=schedule.min_keys,
    )
    kernel = choose_kernel(options.kernel, request)
    if kernel.name == "reference" and options.kernel == "auto" and q.is_cuda:
        fast = [name for name, other in KERNELS.items() if other.capability.devices == ("cuda",)]
        lacks = "; ".join(f"{name}: {', '.join(shortfalls(KERNELS[name].capability, request))}" for name in fast)
        warnings.warn(
            f"cp_mesh: no fast kernel can serve this call ({lacks}); the reference kernel runs, exact but slow. "
            "kernel='reference' asks for it without this warning",
            stacklevel=2,
        )
    return Plan(options, layout, mask, seq_len, schedule, kernel, group, q.device)


def _compute_capability(device: torch.device) -> tuple[int, int]:
    """(0, 0) where the numbers do not mean NVIDIA's: no stock CUDA kernel is chosen there."""
    return torch.cuda.get_device_capability(device) if device.type == "cuda" and not torch.version.hip else (0, 0)


def check_tensors(q: Tensor, k: Tensor, v: Tensor) -> None:
    """Shapes, dtypes and devices of [B, H, S, D] tensors, local or global."""
    if len({q.dtype, k.dtype, v.dtype}) > 1:
        raise ArgumentError(
            describe("q, k, v", "one dtype", f"{q.dtype}, {k.dtype}, {v.dtype}", "cast them to a common dtype")
        )
    if q.dtype not in (torch.float64, torch.float32, torch.bfloat16, torch.float16):
        raise ArgumentError(
            describe("q, k, v", "float64, float32, bfloat16 or float16", q.dtype, "cast them to bfloat16")
        )
    if len({q.device, k.device, v.device}) > 1:
        raise ArgumentError(
            describe("q, k, v", "one device", f"{q.device}, {k.device}, {v.device}", "move them to one device")
        )
    if not q.shape[0] == k.shape[0] == v.shape[0]:
        raise ArgumentError(
            describe("q, k, v", "one batch size", (q.shape[0], k.shape[0], v.shape[0]), "expand the smaller batch")
        )
    if k.shape[1:3] != v.shape[1:3]:
        raise ArgumentError(
            describe(
                "k and v", "equal heads and lengths", (tuple(k.shape), tuple(v.shape)), "only the head dim may differ"
            )
        )
    if q.shape[2] != k.shape[2]:
        raise UnsupportedError(
            describe(
                "q and k",
                "equal sequence lengths (self-attention)",
                (q.shape[2], k.shape[2]),
                "pass seq_dim=1 for [B, S, H, D]; leave cross-attention out of the plan, with keys replicated over cp",
            )
        )
    if k.shape[1] == 0 or q.shape[1] % k.shape[1]:
        raise ArgumentError(
            describe(
                "heads",
                "query heads that are a multiple of kv heads",
                f"{q.shape[1]} and {k.shape[1]}",
                "each kv head serves an equal number of consecutive query heads",
            )
        )
    if q.shape[3] != k.shape[3]:
        raise ArgumentError(describe("q and k", "one head dim", (q.shape[3], k.shape[3]), "only v's may differ"))


def _check_choice(what: str, got: str, allowed: tuple[str, ...], nearest: str, later: tuple[str, ...]) -> None:
    if got in allowed:
        return
    hint = f"{what}={nearest!r} works"
    if got in later:
        raise UnsupportedError(f"{what}={got!r} does not exist yet; {hint}")
    raise ArgumentError(describe(what, f"one of {', '.join(allowed)}", repr(got), hint))
