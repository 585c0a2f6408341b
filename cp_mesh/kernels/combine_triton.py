"""Triton kernels of `cp_mesh.kernels.combine`: all pieces in one pass over memory. Needs triton.

A program writes a block of rows of one head and reads, of each piece, the rows that the piece has there. Sums are fp32,
in the order of the pieces, and rounded once. `row_dots` is for the begin of a backward: torch would write both factors
and their product in fp32 first, which took 0.36 ms of a causal backward's 3.9 at 8K rows of 32 heads (H200).
"""

# Triton reads annotations as code, and takes none but its own.
# mypy: disallow-untyped-defs=False

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK_ELEMENTS = 4096
NUM_WARPS = 4


def merge_pieces(
    pieces: Sequence[tuple[int, Tensor, Tensor]], out: Tensor, lse: Tensor, sinks: Tensor | None = None
) -> None:
    """Write the merged out [B, H, S, Dv], of any strides, and lse [B, H, S], contiguous fp32.

    Args:
        pieces: at least one (begin, out [B, H, n, Dv], lse [B, H, n]): rows begin to begin + n, any strides and dtypes.
        out, lse: where the results are written.
        sinks: fp32 [H], contiguous; out is scaled by sigmoid(lse - sink).
    """
    assert lse.dtype == torch.float32 and lse.is_contiguous()
    assert sinks is None or (sinks.dtype == torch.float32 and sinks.is_contiguous())
    _, outs, lses = zip(*pieces, strict=True)
    rows = tuple(_unspecialised(begin, x.shape[2], *piece_lse.stride()) for begin, x, piece_lse in pieces)
    grid, sizes = _blocks(out)
    with torch.cuda.device_of(out):
        merge_kernel[grid](
            outs, tuple(x.stride() for x in outs), lses, rows, out, out.stride(), lse, sinks, *out.shape[1:3], **sizes
        )


def sum_pieces(pieces: Sequence[tuple[int, Tensor]], into: Tensor) -> None:
    """Write the sum into [B, K, S, D], of any strides; rows that no piece has become 0.

    Args:
        pieces: at least one (begin, x [B, K, n, D]): rows begin to begin + n, any strides and dtypes.
    """
    _, xs = zip(*pieces, strict=True)
    rows = tuple(_unspecialised(begin, x.shape[2]) for begin, x in pieces)
    grid, sizes = _blocks(into)
    with torch.cuda.device_of(into):
        sum_kernel[grid](xs, tuple(x.stride() for x in xs), rows, into, into.stride(), *into.shape[1:3], **sizes)


def row_dots(a: Tensor, b: Tensor, minus: Tensor | None) -> Tensor:
    """The sum over D of a · b, less ``minus`` [B, H, S]: fp32 [B, H, S], contiguous, of [B, H, S, D], any strides."""
    dots = torch.empty(a.shape[:3], dtype=torch.float32, device=a.device)
    minus = None if minus is None else minus.float().contiguous()
    grid, sizes = _blocks(a)
    with torch.cuda.device_of(a):
        dots_kernel[grid](a, a.stride(), b, b.stride(), minus, dots, *a.shape[1:3], **sizes)
    return dots


def _unspecialised(*values: int) -> tuple[int, ...]:
    """Odd numbers above 1, for `_value`: Triton recompiles for 1 and for multiples of 16, which lengths may be."""
    return tuple(2 * value + 3 for value in values)


def _blocks(out: Tensor) -> tuple[tuple[int], dict[str, Any]]:
    """The grid, and the compile-time sizes."""
    B, H, S, D = out.shape
    block_dim = triton.next_power_of_2(D)
    block_rows = max(1, BLOCK_ELEMENTS // block_dim)
    sizes = {
        "HEAD_DIM": D,
        "BLOCK_ROWS": block_rows,
        "BLOCK_DIM": block_dim,
        "HEADS_FIRST": out.stride(1) < out.stride(2),
        "num_warps": NUM_WARPS,
    }
    return (B * H * triton.cdiv(S, block_rows),), sizes


@triton.jit
def _value(value):
    return (value - 3) >> 1


@triton.jit
def _block(num_heads, num_rows, BLOCK_ROWS: tl.constexpr, HEADS_FIRST: tl.constexpr):
    """Batch row and head, int64, and first row of this program; neighbours in memory run side by side."""
    program = tl.program_id(0)
    num_blocks = tl.cdiv(num_rows, BLOCK_ROWS)
    if HEADS_FIRST:
        head = program % num_heads
        block = program // num_heads % num_blocks
    else:
        block = program % num_blocks
        head = program // num_blocks % num_heads
    batch = program // num_heads // num_blocks
    return batch.to(tl.int64), head.to(tl.int64), block * BLOCK_ROWS


@triton.jit
def _pointers(x, strides, batch, head, rows, cols):
    """Of a block [rows, cols]; in int64, as tensors may have more than 2**31 elements."""
    start = batch * strides[0] + head * strides[1]
    return x + start + rows.to(tl.int64)[:, None] * strides[2] + cols.to(tl.int64)[None, :] * strides[3]


@triton.jit(do_not_specialize=["num_heads", "num_rows"])
def merge_kernel(
    outs,
    out_strides,
    lses,
    piece_rows,
    out,
    strides,
    lse,
    sinks,
    num_heads,
    num_rows,
    HEAD_DIM: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
    HEADS_FIRST: tl.constexpr,
):
    batch, head, first = _block(num_heads, num_rows, BLOCK_ROWS, HEADS_FIRST)
    rows = first + tl.arange(0, BLOCK_ROWS)
    cols = tl.arange(0, BLOCK_DIM)
    largest = tl.full([BLOCK_ROWS], float("-inf"), tl.float32)
    for i in tl.static_range(len(outs)):
        largest = tl.maximum(largest, _piece_lse(lses[i], piece_rows[i], batch, head, rows))
    # -inf - -inf is NaN; all pieces of a row with no key have weight 0
    largest = tl.where(largest == float("-inf"), 0.0, largest)
    total = tl.zeros([BLOCK_ROWS], tl.float32)
    merged = tl.zeros([BLOCK_ROWS, BLOCK_DIM], tl.float32)
    for i in tl.static_range(len(outs)):
        weight = tl.exp(_piece_lse(lses[i], piece_rows[i], batch, head, rows) - largest)
        total += weight
        merged += weight[:, None] * _piece(outs[i], out_strides[i], piece_rows[i], batch, head, rows, cols, HEAD_DIM)
    no_key = total == 0
    total = tl.where(no_key, 1.0, total)
    merged *= (1 / total)[:, None]
    merged_lse = tl.where(no_key, float("-inf"), largest + tl.log(total))
    if sinks is not None:
        # finite where there is no key: -inf - -inf is NaN, and these rows are 0
        merged *= (1 / (1 + tl.exp(tl.load(sinks + head) - tl.where(no_key, 0.0, merged_lse))))[:, None]
    inside = (rows < num_rows)[:, None] & (cols < HEAD_DIM)[None, :]
    tl.store(_pointers(out, strides, batch, head, rows, cols), merged.to(out.dtype.element_ty), mask=inside)
    tl.store(lse + (batch * num_heads + head) * num_rows + rows, merged_lse, mask=rows < num_rows)


@triton.jit(do_not_specialize=["num_heads", "num_rows"])
def sum_kernel(
    xs,
    x_strides,
    piece_rows,
    into,
    strides,
    num_heads,
    num_rows,
    HEAD_DIM: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
    HEADS_FIRST: tl.constexpr,
):
    batch, head, first = _block(num_heads, num_rows, BLOCK_ROWS, HEADS_FIRST)
    rows = first + tl.arange(0, BLOCK_ROWS)
    cols = tl.arange(0, BLOCK_DIM)
    total = tl.zeros([BLOCK_ROWS, BLOCK_DIM], tl.float32)
    for i in tl.static_range(len(xs)):
        total += _piece(xs[i], x_strides[i], piece_rows[i], batch, head, rows, cols, HEAD_DIM)
    inside = (rows < num_rows)[:, None] & (cols < HEAD_DIM)[None, :]
    tl.store(_pointers(into, strides, batch, head, rows, cols), total.to(into.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["num_heads", "num_rows"])
def dots_kernel(
    a,
    a_strides,
    b,
    b_strides,
    minus,
    dots,
    num_heads,
    num_rows,
    HEAD_DIM: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
    HEADS_FIRST: tl.constexpr,
):
    batch, head, first = _block(num_heads, num_rows, BLOCK_ROWS, HEADS_FIRST)
    rows = first + tl.arange(0, BLOCK_ROWS)
    cols = tl.arange(0, BLOCK_DIM)
    inside = (rows < num_rows)[:, None] & (cols < HEAD_DIM)[None, :]
    x = tl.load(_pointers(a, a_strides, batch, head, rows, cols), mask=inside, other=0.0).to(tl.float32)
    y = tl.load(_pointers(b, b_strides, batch, head, rows, cols), mask=inside, other=0.0).to(tl.float32)
    total = tl.sum(x * y, 1)
    place = (batch * num_heads + head) * num_rows + rows
    if minus is not None:
        total -= tl.load(minus + place, mask=rows < num_rows, other=0.0)
    tl.store(dots + place, total, mask=rows < num_rows)


@triton.jit
def _piece(x, strides, piece_rows, batch, head, rows, cols, HEAD_DIM: tl.constexpr):
    """fp32 block of a piece [B, H, n, D]; 0, and nothing read, in rows that it does not have."""
    own = rows - _value(piece_rows[0])
    inside = (own >= 0) & (own < _value(piece_rows[1]))
    mask = inside[:, None] & (cols < HEAD_DIM)[None, :]
    return tl.load(_pointers(x, strides, batch, head, own, cols), mask=mask, other=0.0).to(tl.float32)


@triton.jit
def _piece_lse(lse, piece_rows, batch, head, rows):
    """fp32 lse of a piece; -inf in rows that it does not have."""
    own = rows - _value(piece_rows[0])
    inside = (own >= 0) & (own < _value(piece_rows[1]))
    start = batch * _value(piece_rows[2]) + head * _value(piece_rows[3])
    pointers = lse + start + own.to(tl.int64) * _value(piece_rows[4])
    return tl.load(pointers, mask=inside, other=float("-inf")).to(tl.float32)
