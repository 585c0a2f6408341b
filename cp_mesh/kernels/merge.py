"""The adapter for kernels that return partial results: it merges (out, lse) and sums gradients, in fp32 or fp64.

A tile kernel is a pair of functions on one tile; `merging_kernel` turns it into a `Kernel`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from cp_mesh.kernels.contract import Capability, Kernel, KernelTile, Pairs, accumulation_dtype
from cp_mesh.masks import CAUSAL, FULL, Band
from cp_mesh.schedule import split_causal

# (q, k, v, cover, scale) -> the tile's own (out, lse); lse in the units of `contract`
TileForward = Callable[[Tensor, Tensor, Tensor, Band | Pairs, float], tuple[Tensor, Tensor]]
# -> the tile's contribution to (dq, dk, dv)
TileBackward = Callable[["BackwardTile"], tuple[Tensor, Tensor, Tensor]]
Prepare = Callable[[Sequence[KernelTile]], list[KernelTile]]


@dataclass(frozen=True, eq=False)
class BackwardTile:
    """What a tile's gradients depend on; out, lse and delta are those of all keys, for the tile's rows.

    delta = rowsum(dout · out) - dlse, float32 (float64), is None for kernels that compute their own.
    """

    dout: Tensor
    q: Tensor
    k: Tensor
    v: Tensor
    out: Tensor
    lse: Tensor
    delta: Tensor | None
    cover: Band | Pairs
    scale: float


def merging_kernel(
    name: str, capability: Capability, forward: TileForward, backward: TileBackward, *, stock: bool = False
) -> Kernel:
    """A `Kernel` from two functions that compute single tiles.

    ``stock`` functions are given nothing but full tiles and square causal ones, and compute delta themselves.
    """
    prepare = _squares if stock else list

    def begin_forward(q: Tensor, v_head_dim: int, scale: float) -> MergingForward:
        return MergingForward(forward, prepare, q, v_head_dim, scale)

    def begin_backward(
        dout: Tensor, q: Tensor, out: Tensor, lse: Tensor, dlse: Tensor | None, scale: float
    ) -> SummingBackward:
        return SummingBackward(backward, prepare, not stock, dout, q, out, lse, dlse, scale)

    return Kernel(name, capability, begin_forward, begin_backward)


def _squares(tiles: Sequence[KernelTile]) -> list[KernelTile]:
    parts = []
    for tile in tiles:
        assert isinstance(tile.cover, Band), "the chooser gives tensor masks to kernels that read them"
        split = split_causal(tile.cover, tile.q[1] - tile.q[0], tile.k[1] - tile.k[0])
        assert split is not None, "the chooser gives windows to kernels that have them"
        for q, k, causal in split:
            q_rows, k_rows = (tile.q[0] + q[0], tile.q[0] + q[1]), (tile.k[0] + k[0], tile.k[0] + k[1])
            parts.append(KernelTile(q_rows, k_rows, CAUSAL if causal else FULL))
    return parts


def merge_(out: Tensor, lse: Tensor, tile_out: Tensor, tile_lse: Tensor) -> None:
    """Fold a tile's (out, lse) into the running pair, in place. Rows with no key yet have lse = -inf and out = 0."""
    merged = torch.logaddexp(lse, tile_lse)
    # -inf - -inf is NaN; a row that has no key on either side keeps weight 0 on both
    finite = torch.where(merged == float("-inf"), 0.0, merged)
    out.mul_(torch.exp(lse - finite)[..., None])
    out.addcmul_(tile_out.to(out.dtype), torch.exp(tile_lse.to(lse.dtype) - finite)[..., None])
    lse.copy_(merged)


def _dense_rows(x: Tensor) -> Tensor:
    """With unit stride in the head dim and, on CUDA, rows that start at multiples of 16 bytes.

    SDPA checks this before it calls a stock kernel; called through aten, kernels read other memory instead.
    """
    unit = 16 // x.element_size()
    aligned = not x.is_cuda or (x.data_ptr() % 16 == 0 and all(stride % unit == 0 for stride in x.stride()[:-1]))
    return x if aligned and x.stride(-1) == 1 else x.contiguous()


class MergingForward:
    """`contract.ForwardPass` over a tile kernel."""

    def __init__(self, tile_forward: TileForward, prepare: Prepare, q: Tensor, v_head_dim: int, scale: float) -> None:
        self._tile_forward, self._prepare, self._q, self._scale = tile_forward, prepare, _dense_rows(q), scale
        self._shape, self._dtype = (*q.shape[:3], v_head_dim), accumulation_dtype(q.dtype)
        self._running: tuple[Tensor, Tensor] | None = None

    def step(self, k: Tensor, v: Tensor, tiles: Sequence[KernelTile]) -> None:
        k, v = _dense_rows(k), _dense_rows(v)
        for tile in self._prepare(tiles):
            q_rows, k_rows = slice(*tile.q), slice(*tile.k)
            out, lse = self._tile_forward(
                self._q[:, :, q_rows], k[:, :, k_rows], v[:, :, k_rows], tile.cover, self._scale
            )
            if self._running is None and out.shape == self._shape:  # covers all rows: nothing to merge with yet
                self._running = out.to(self._dtype), lse.to(self._dtype)
                continue
            self._running = self._running or self._no_keys()
            merge_(self._running[0][:, :, q_rows], self._running[1][:, :, q_rows], out, lse)

    def finish(self) -> tuple[Tensor, Tensor]:
        out, lse = self._running or self._no_keys()
        return out.to(self._q.dtype), lse

    def _no_keys(self) -> tuple[Tensor, Tensor]:
        out = torch.zeros(self._shape, dtype=self._dtype, device=self._q.device)
        return out, torch.full(self._shape[:3], float("-inf"), dtype=self._dtype, device=self._q.device)


class SummingBackward:
    """`contract.BackwardPass` over a tile kernel; delta is computed once, for kernels that use it."""

    def __init__(
        self,
        tile_backward: TileBackward,
        prepare: Prepare,
        uses_delta: bool,
        dout: Tensor,
        q: Tensor,
        out: Tensor,
        lse: Tensor,
        dlse: Tensor | None,
        scale: float,
    ) -> None:
        dtype = accumulation_dtype(q.dtype)
        self._tile_backward, self._prepare, self._scale = tile_backward, prepare, scale
        self._dout, self._q, self._out, self._lse = *map(_dense_rows, (dout, q, out)), lse
        assert uses_delta or dlse is None, "a kernel that computes its own delta takes no gradient of lse"
        self._delta = (dout.to(dtype) * out.to(dtype)).sum(-1) if uses_delta else None
        if self._delta is not None and dlse is not None:
            self._delta -= dlse
        self._dq = torch.zeros(q.shape, dtype=dtype, device=q.device)

    def step(self, k: Tensor, v: Tensor, tiles: Sequence[KernelTile]) -> tuple[Tensor, Tensor]:
        # Zeroed here, at every step: these hold one source's gradient, and tiles below add to them.
        dk, dv = (torch.zeros(x.shape, dtype=self._dq.dtype, device=x.device) for x in (k, v))
        k, v = _dense_rows(k), _dense_rows(v)
        for tile in self._prepare(tiles):
            q_rows, k_rows = slice(*tile.q), slice(*tile.k)
            dout, q, out, lse = (x[:, :, q_rows] for x in (self._dout, self._q, self._out, self._lse))
            delta = None if self._delta is None else self._delta[:, :, q_rows]
            tile_dq, tile_dk, tile_dv = self._tile_backward(
                BackwardTile(dout, q, k[:, :, k_rows], v[:, :, k_rows], out, lse, delta, tile.cover, self._scale)
            )
            self._dq[:, :, q_rows] += tile_dq
            dk[:, :, k_rows] += tile_dk
            dv[:, :, k_rows] += tile_dv
        return dk, dv

    def finish(self) -> Tensor:
        return self._dq.to(self._q.dtype)
