"""Combine partial results: (out, lse) of tiles, and partial gradients; and compute delta for backwards.

Stock kernels return a partial result per tile. A running fp32 sum would be read and written once per tile; here one
kernel reads all pieces once, writes the result once and rounds once. So a piece must keep its values until `finish`
returns. A piece may lie in a communication buffer and is never written here.

CUDA tensors summed in fp32 use Triton (`cp_mesh.kernels.combine_triton`); all others use torch operations.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from importlib.util import find_spec

import torch
from torch import Tensor

FEW_BYTES = 32 << 20  # of a tensor; docs/log.md
MAX_PIECES = 8
"""Maximum number of pieces held, to bound memory; then they are folded into one in the accumulation dtype."""


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype of sums: fp64 for fp64 inputs, else fp32."""
    return torch.float64 if dtype == torch.float64 else torch.float32


class OutputSum:
    """(out, lse) of one rank's queries from tiles' (out, lse): sum_i exp(lse_i - L) out_i, with L = logsumexp_i lse_i.

    Pieces are summed in the order of `add`. A row with no key has lse = -inf and out = 0, in pieces and in the result.

    Args:
        shape: [B, H, S, Dv] of out.
        dtype: the accumulation dtype, float32 or float64.
        device: of all pieces.
    """

    def __init__(self, shape: Sequence[int], dtype: torch.dtype, device: torch.device | str) -> None:
        self._shape, self._dtype, self._device = tuple(shape), dtype, torch.device(device)
        self._pieces: list[tuple[int, Tensor, Tensor]] = []

    def add(self, begin: int, out: Tensor, lse: Tensor) -> None:
        """Add rows begin to begin + n: out [B, H, n, Dv], lse [B, H, n] in natural log, any dtype and strides."""
        (batch, heads, num_rows, dim), n = self._shape, out.shape[2]
        assert out.shape == (batch, heads, n, dim) and 0 <= begin <= num_rows - n, (begin, out.shape)
        assert lse.shape == out.shape[:3], f"lse {tuple(lse.shape)} of out {tuple(out.shape)}"
        if not n:
            return
        if len(self._pieces) == MAX_PIECES:
            self._pieces = [(0, *self._merged(self._pieces[0][1], self._dtype, None))]
        self._pieces.append((begin, out, lse))

    def finish(
        self,
        like: Tensor,
        dtype: torch.dtype,
        into: tuple[Tensor, Tensor] | None = None,
        sinks: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Return out [B, H, S, Dv] and lse [B, H, S].

        Args:
            like: [B, H, S, any]; out is dense, with like's memory order of batch, heads and rows, head dim last.
            dtype: of out; lse is contiguous, in the accumulation dtype.
            into: out and lse to write and return instead, of any strides; lse in the accumulation dtype.
            sinks: [H] in the accumulation dtype: out is scaled by sigmoid(lse - sink); lse does not change.

        Returns:
            out and lse; without ``into``, these may be a piece itself if a single piece has all rows.
        """
        if into is not None:
            out, lse = into
            dense = lse if lse.is_contiguous() else torch.empty_like(lse, memory_format=torch.contiguous_format)
            self._merge(out, dense, sinks)
            return out, dense if dense is lse else lse.copy_(dense)
        if sinks is None and len(self._pieces) == 1 and self._pieces[0][1].shape == self._shape:
            _, out, lse = self._pieces[0]
            strides = _dense_strides(self._shape, like.stride())
            if out.dtype != dtype or (out.stride() != strides and _differ(out, strides)):
                out = dense_like(like, self._shape[3], dtype=dtype).copy_(out)
            return out, lse.to(self._dtype).contiguous()
        return self._merged(like, dtype, sinks)

    def _merged(self, like: Tensor, dtype: torch.dtype, sinks: Tensor | None) -> tuple[Tensor, Tensor]:
        out = dense_like(like, self._shape[3], self._shape[2], dtype)
        lse = torch.empty(self._shape[:3], dtype=self._dtype, device=self._device)
        self._merge(out, lse, sinks)
        return out, lse

    def _merge(self, out: Tensor, lse: Tensor, sinks: Tensor | None) -> None:
        if self._pieces and fused(self._dtype, self._device):
            from cp_mesh.kernels.combine_triton import merge_pieces

            merge_pieces(self._pieces, out, lse, sinks)
            return
        running = torch.zeros_like(out, dtype=self._dtype)
        total, largest = torch.zeros_like(lse), lse.fill_(float("-inf"))
        pieces = [(slice(begin, begin + x.shape[2]), x, x_lse.to(self._dtype)) for begin, x, x_lse in self._pieces]
        for rows, _, piece_lse in pieces:
            largest[:, :, rows] = torch.maximum(largest[:, :, rows], piece_lse)
        # -inf - -inf would be NaN; in a row with no key all pieces get weight 0
        largest.masked_fill_(largest == float("-inf"), 0.0)
        for rows, piece, piece_lse in pieces:
            weight = torch.exp(piece_lse - largest[:, :, rows])
            total[:, :, rows] += weight
            running[:, :, rows].addcmul_(piece.to(self._dtype), weight[..., None])
        running.div_(torch.where(total == 0, 1.0, total)[..., None])
        largest.add_(total.log_())  # largest is lse, written in place
        if sinks is not None:
            # NaN if lse and sink are -inf; the row is 0
            running.mul_(torch.sigmoid(lse - sinks[:, None]).nan_to_num_(0.0)[..., None])
        out.copy_(running)


class RowSum:
    """Sum of partial gradients: dq of tiles, dk and dv of ranks; summed in the order of `add`.

    Args:
        shape: [B, K, S, D] of the sum.
        dtype: the accumulation dtype, float32 or float64.
        device: of all pieces.
    """

    def __init__(self, shape: Sequence[int], dtype: torch.dtype, device: torch.device | str) -> None:
        self._shape, self._dtype, self._device = tuple(shape), dtype, torch.device(device)
        self._pieces: list[tuple[int, Tensor]] = []

    def add(self, begin: int, x: Tensor) -> None:
        """Add rows begin to begin + n: x [B, K, n, D], any dtype and strides."""
        (batch, heads, num_rows, dim), n = self._shape, x.shape[2]
        assert x.shape == (batch, heads, n, dim) and 0 <= begin <= num_rows - n, (begin, x.shape)
        if not n:
            return
        if len(self._pieces) == MAX_PIECES:
            self._pieces = [(0, self.finish(dense_like(self._pieces[0][1], None, self._shape[2], self._dtype)))]
        self._pieces.append((begin, x))

    def finish(self, into: Tensor) -> Tensor:
        """Write the sum, rounded once, into [B, K, S, D] of any dtype and strides; rows without a piece become 0."""
        finish_sums([(self, into)])
        return into

    def result(self, like: Tensor, dtype: torch.dtype) -> Tensor:
        """The sum, rounded once to ``dtype``, in dense memory like ``like``; or a single piece of all rows itself."""
        if len(self._pieces) == 1 and self._pieces[0][1].shape == self._shape:
            return self._pieces[0][1]
        return self.finish(dense_like(like, dtype=dtype))

    def ready(self, like: Tensor) -> Tensor:
        """A tensor for `finish`, as `dense_like`: a single piece that is the result already, or an empty one."""
        strides = _dense_strides(self._shape, like.stride())
        for _, x in self._pieces if len(self._pieces) == 1 else ():
            if x.shape == self._shape and x.dtype == like.dtype and (x.stride() == strides or not _differ(x, strides)):
                return x
        return torch.empty_strided(self._shape, strides, dtype=like.dtype, device=like.device)

    def _write(self, into: Tensor) -> None:
        total = torch.zeros(self._shape, dtype=self._dtype, device=self._device)
        for begin, x in self._pieces:
            total[:, :, begin : begin + x.shape[2]] += x
        into.copy_(total)


def finish_sums(sums: Sequence[tuple[RowSum, Tensor]]) -> None:
    """`RowSum.finish` of several sums on one device in one launch, which costs the host more than a small sum."""
    together = []
    for total, into in sums:
        pieces = total._pieces
        assert into.shape == total._shape, f"{tuple(into.shape)}, expected {total._shape}"
        if len(pieces) == 1 and pieces[0][1].shape == into.shape:
            if pieces[0][1] is not into:
                into.copy_(pieces[0][1])
        elif pieces and fused(total._dtype, total._device):
            together.append((pieces, into))
        else:
            total._write(into)
    if together:
        from cp_mesh.kernels.combine_triton import sum_pieces

        sum_pieces(together)


def copy_together(copies: Sequence[tuple[Tensor, Tensor]]) -> None:
    """Copy tensors [B, K, S, D] into others of the same shape and dtype, any strides; many bytes in a launch of Triton.

    A launch is faster than torch's copies on the device, where rows are strided, but takes the host longer. -0 may
    become 0.
    """
    x = copies[0][0]
    if x.numel() * x.element_size() > FEW_BYTES and fused(x.dtype, x.device):
        from cp_mesh.kernels.combine_triton import sum_pieces

        sum_pieces([([(0, x)], into) for x, into in copies])
        return
    for x, into in copies:
        into.copy_(x)


def make_delta(dout: Tensor, out: Tensor, dlse: Tensor | None = None) -> Tensor:
    """Compute delta = rowsum(dout · out) - dlse, [B, H, S] in the accumulation dtype, from [B, H, S, Dv] tensors."""
    dtype = accumulation_dtype(out.dtype)
    if out.numel() and fused(dtype, out.device):
        from cp_mesh.kernels.combine_triton import row_dots

        return row_dots(dout, out, dlse)
    delta = (dout.to(dtype) * out.to(dtype)).sum(-1)
    return delta if dlse is None else delta - dlse


@lru_cache
def fused(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether Triton sums tensors of a dtype: on CUDA from compute capability 7.5 on, except float64."""
    if device.type != "cuda" or dtype == torch.float64 or find_spec("triton") is None:
        return False
    return torch.cuda.get_device_capability(device) >= (7, 5)


def dense_like(
    x: Tensor, head_dim: int | None = None, num_rows: int | None = None, dtype: torch.dtype | None = None
) -> Tensor:
    """An empty dense [B, H, S, D] tensor with x's memory order of dims, except that the head dim is last."""
    B, H, S, D = x.shape
    shape = B, H, S if num_rows is None else num_rows, D if head_dim is None else head_dim
    try:
        strides = _dense_strides(shape, x.stride())
    except TypeError:  # symbols of a trace have no hash
        strides = dense_strides(shape, x.stride())
    return torch.empty_strided(shape, strides, dtype=dtype or x.dtype, device=x.device)


def dense_strides(shape: Sequence[int], like: Sequence[int]) -> tuple[int, ...]:
    """Strides of dense memory in the order of dims of the strides ``like``, with the last dim last, as kernels need."""
    strides, step = [1] * len(shape), shape[-1]
    for dim in sorted(range(len(shape) - 2, -1, -1), key=like.__getitem__):
        strides[dim] = step
        step *= shape[dim]
    return tuple(strides)


_dense_strides = lru_cache(maxsize=1024)(dense_strides)


def _differ(x: Tensor, strides: Sequence[int]) -> bool:
    """Whether x has other strides in a dim of more than one element."""
    return any(size > 1 and a != b for size, a, b in zip(x.shape, x.stride(), strides, strict=True))
