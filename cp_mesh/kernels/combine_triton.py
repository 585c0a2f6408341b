"""Triton kernels of `cp_mesh.kernels.combine`: all pieces in one pass over memory. Needs triton.

A program writes a block of rows of one head and reads, of each piece, the rows that the piece has there. Sums are fp32,
in the order of the pieces, and rounded once. How many pieces there are changes with the batch, so they are filled up
with empty ones to two or to eight: few kernels are compiled, and an empty piece reads nothing.

`row_dots` is for the begin of a backward: torch would write both factors and their product in fp32 first, which took
0.36 ms of a causal backward's 3.9 at 8K rows of 32 heads (H200).
"""

# Triton reads annotations as code, and takes none but its own.
# mypy: disallow-untyped-defs=False

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.compiler import CompiledKernel

BLOCK_ELEMENTS = 4096
FEW, MANY = 2, 8  # pieces that a kernel is compiled for; no more than `combine.MAX_PIECES` are held
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
    begin, x, piece_lse = pieces[-1]
    missing = _filled([x for _, x, _ in pieces]) - len(pieces)
    pieces = [*pieces, *[(begin, x[:, :, :0], piece_lse[:, :, :0])] * missing]
    _, outs, lses = zip(*pieces, strict=True)
    rows = tuple(_unspecialised(begin, x.shape[2], *piece_lse.stride()) for begin, x, piece_lse in pieces)
    num_blocks, sizes = _blocks(out)
    strides = tuple(x.stride() for x in outs)
    args = outs, strides, lses, rows, out, out.stride(), lse, sinks, *out.shape[1:3], *sizes
    _launch(merge_kernel, out, num_blocks, args)


def sum_pieces(sums: Sequence[tuple[Sequence[tuple[int, Tensor]], Tensor]]) -> None:
    """Write sums into tensors [B, K, S, D], of any strides; rows that no piece has become 0.

    Args:
        sums: of each, at least one piece (begin, x [B, K, n, D]), rows begin to begin + n, any strides and dtypes; and
            where it is written.
    """
    block_dim = triton.next_power_of_2(max(into.shape[3] for _, into in sums))
    block_rows = max(1, BLOCK_ELEMENTS // block_dim)
    of_sums, num_blocks, filled = [], 0, max(_filled([x for _, x in pieces]) for pieces, _ in sums)
    for pieces, into in sums:
        B, H, S, D = into.shape
        pieces = [*pieces, *[(0, pieces[-1][1][:, :, :0])] * (filled - len(pieces))]
        xs = tuple(x for _, x in pieces)
        rows = tuple(_unspecialised(begin, x.shape[2]) for begin, x in pieces)
        sizes, strides = _unspecialised(num_blocks, B, H, S), into.stride()
        of_sums.append((xs, tuple(x.stride() for x in xs), rows, into, strides, sizes, D, strides[1] < strides[2]))
        num_blocks += B * H * triton.cdiv(S, block_rows)
    _launch(sum_kernel, sums[0][1], num_blocks, (*zip(*of_sums, strict=True), block_rows, block_dim))


def row_dots(a: Tensor, b: Tensor, minus: Tensor | None) -> Tensor:
    """The sum over D of a · b, less ``minus`` [B, H, S]: fp32 [B, H, S], contiguous, of [B, H, S, D], any strides."""
    dots = torch.empty(a.shape[:3], dtype=torch.float32, device=a.device)
    minus = None if minus is None else minus.float().contiguous()
    num_blocks, sizes = _blocks(a)
    _launch(dots_kernel, a, num_blocks, (a, a.stride(), b, b.stride(), minus, dots, *a.shape[1:3], *sizes))
    return dots


def _launch(kernel: Any, on: Tensor, num_blocks: int, args: tuple[Any, ...]) -> None:
    """As ``kernel[grid](*args)`` on a tensor's device, where Triton looks at every argument, for 40 us and more.

    What it compiled for the same numbers, dtypes and alignments is launched at once. Other lengths take Triton's way.
    """
    compiled = _compiled(kernel, on.device, _alike(args))
    with torch.cuda.device_of(on):
        if compiled:
            compiled[0][(num_blocks, 1, 1)](*args)
            return
        ready = kernel[(num_blocks,)](*args, num_warps=NUM_WARPS)
    if on.is_cuda and isinstance(ready, CompiledKernel):
        compiled.append(ready)


@lru_cache(maxsize=1024)
def _compiled(kernel: Any, device: torch.device, alike: Any) -> list[CompiledKernel]:
    """Where what was compiled is kept."""
    return []


def _filled(pieces: Sequence[Tensor]) -> int:
    """How many pieces, with empty ones after them, a kernel is launched for. A sum of earlier ones, whose dtype is
    another, only begins the larger number."""
    return FEW if len(pieces) <= FEW and pieces[0].dtype == pieces[-1].dtype else max(MANY, len(pieces))


def _alike(arg: Any) -> Any:
    """Equal for arguments for which Triton compiles the same."""
    if isinstance(arg, tuple) and arg and not isinstance(arg[0], int):
        return tuple(map(_alike, arg))
    return (arg.dtype, arg.data_ptr() % 16) if isinstance(arg, Tensor) else arg


def _unspecialised(*values: int) -> tuple[int, ...]:
    """Odd numbers above 1, for `_value`: Triton recompiles for 1 and for multiples of 16, which lengths may be."""
    return tuple(2 * value + 3 for value in values)


def _blocks(out: Tensor) -> tuple[int, tuple[int, int, int, bool]]:
    """How many blocks, and the compile-time sizes: HEAD_DIM, BLOCK_ROWS, BLOCK_DIM, HEADS_FIRST."""
    B, H, S, D = out.shape
    block_dim = triton.next_power_of_2(D)
    block_rows = max(1, BLOCK_ELEMENTS // block_dim)
    return B * H * triton.cdiv(S, block_rows), (D, block_rows, block_dim, out.stride(1) < out.stride(2))


@triton.jit
def _value(value):
    return (value - 3) >> 1


@triton.jit
def _block(program, num_heads, num_rows, BLOCK_ROWS: tl.constexpr, HEADS_FIRST: tl.constexpr):
    """Batch row and head, int64, and first row of a program; neighbours in memory run side by side."""
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
    batch, head, first = _block(tl.program_id(0), num_heads, num_rows, BLOCK_ROWS, HEADS_FIRST)
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


@triton.jit
def sum_kernel(
    xs,
    x_strides,
    piece_rows,
    intos,
    strides,
    sizes,
    HEAD_DIMS: tl.constexpr,
    HEADS_FIRST: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
):
    cols = tl.arange(0, BLOCK_DIM)
    for s in tl.static_range(len(intos)):
        begin, num_batches = _value(sizes[s][0]), _value(sizes[s][1])
        num_heads, num_rows = _value(sizes[s][2]), _value(sizes[s][3])
        end = begin + num_batches * num_heads * tl.cdiv(num_rows, BLOCK_ROWS)
        if (tl.program_id(0) >= begin) & (tl.program_id(0) < end):
            batch, head, first = _block(tl.program_id(0) - begin, num_heads, num_rows, BLOCK_ROWS, HEADS_FIRST[s])
            rows = first + tl.arange(0, BLOCK_ROWS)
            total = tl.zeros([BLOCK_ROWS, BLOCK_DIM], tl.float32)
            for i in tl.static_range(len(xs[s])):
                total += _piece(xs[s][i], x_strides[s][i], piece_rows[s][i], batch, head, rows, cols, HEAD_DIMS[s])
            inside = (rows < num_rows)[:, None] & (cols < HEAD_DIMS[s])[None, :]
            pointers = _pointers(intos[s], strides[s], batch, head, rows, cols)
            tl.store(pointers, total.to(intos[s].dtype.element_ty), mask=inside)


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
    batch, head, first = _block(tl.program_id(0), num_heads, num_rows, BLOCK_ROWS, HEADS_FIRST)
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
