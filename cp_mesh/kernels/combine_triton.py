"""Triton kernels of `cp_mesh.kernels.combine`: all pieces in one pass over memory. Needs triton.

A program writes a block of rows of one head and reads, of each piece, the rows that the piece has there. Sums are fp32,
in the order of the pieces, and rounded once. How many pieces and sums there are changes with the batch, so they are
filled up with empty ones, which read nothing: pieces to two, or to an fp32 sum of earlier ones and eight more; sums to
three, as of dq, dk and dv. So few kernels are compiled, and none that only a rare batch needs.

`row_dots` is for the begin of a backward: torch would write both factors and their product in fp32 first, which took
0.36 ms of a causal backward's 3.9 at 8K rows of 32 heads (H200).
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
from triton.compiler import CompiledKernel

from cp_mesh._torch import raw_stream
from cp_mesh.tape import give_up, is_recording, told

BLOCK_ELEMENTS = 4096
FEW, MANY = 2, 9  # places for pieces that a kernel is compiled for; `combine.MAX_PIECES` and a sum of earlier ones
NUM_SUMS = 3
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
    outs, lses = [out for _, out, _ in pieces], [lse for *_, lse in pieces]
    places = _places([x.dtype for x in outs])
    own = [_unspecialised(begin, x.shape[2], *x_lse.stride()) for begin, x, x_lse in pieces]
    rows = tuple(_unspecialised(0, 0, *lses[-1].stride()) if i is None else own[i] for i in places)
    strides = tuple(outs[-1 if i is None else i].stride() for i in places)
    num_blocks, sizes = _blocks(out)
    pieces_there = _placed(outs, places), strides, _placed(lses, places), rows
    _launch(merge_kernel, num_blocks, out, (*pieces_there, out, out.stride(), lse, sinks, *out.shape[1:3], *sizes))


def sum_pieces(sums: Sequence[tuple[Sequence[tuple[int, Tensor]], Tensor]]) -> None:
    """Write sums into tensors [B, K, S, D], of any strides; rows that no piece has become 0.

    Args:
        sums: of each, at least one piece (begin, x [B, K, n, D]), rows begin to begin + n, any strides and dtypes; and
            where it is written.
    """
    block_dim = triton.next_power_of_2(max(into.shape[3] for _, into in sums))
    block_rows = max(1, BLOCK_ELEMENTS // block_dim)
    dtypes = [[x.dtype for _, x in pieces] for pieces, _ in sums]
    num_blocks, many = 0, max(len(_places(each)) for each in dtypes)
    arguments = []
    for i in range(max(NUM_SUMS, len(sums))):
        last = min(i, len(sums) - 1)
        pieces, into = sums[last]
        B, H, S, D = into.shape
        B = B if i == last else 0  # one that fills up has no blocks
        places = _places(dtypes[last], many)
        xs = [x for _, x in pieces]
        own = [_unspecialised(begin, x.shape[2]) for begin, x in pieces]
        rows = tuple(_unspecialised(0, 0) if j is None else own[j] for j in places)
        strides = tuple(xs[-1 if j is None else j].stride() for j in places)
        sizes = _unspecialised(num_blocks, B, H, S, int(into.stride(1) < into.stride(2)))
        arguments.append((_placed(xs, places), strides, rows, into, into.stride(), sizes, D))
        num_blocks += B * H * triton.cdiv(S, block_rows)
    _launch(sum_kernel, num_blocks, sums[0][1], (*zip(*arguments, strict=True), block_rows, block_dim))


def row_dots(a: Tensor, b: Tensor, minus: Tensor | None) -> Tensor:
    """The sum over D of a · b, less ``minus`` [B, H, S]: fp32 [B, H, S], contiguous, of [B, H, S, D], any strides."""
    dots = torch.empty(a.shape[:3], dtype=torch.float32, device=a.device)
    minus = None if minus is None else minus.float().contiguous()
    num_blocks, sizes = _blocks(a)
    _launch(dots_kernel, num_blocks, a, (a, a.stride(), b, b.stride(), minus, dots, *a.shape[1:3], *sizes))
    return dots


def _launch(kernel: Any, num_blocks: int, on: Tensor, args: tuple[Any, ...]) -> None:
    """As ``kernel[grid](*args)`` on a tensor's device; a tape calls what Triton compiled, with no look at ``args``."""
    with torch.cuda.device_of(on):
        compiled = kernel[(num_blocks,)](*args, num_warps=NUM_WARPS)
    if is_recording():
        if isinstance(compiled, CompiledKernel):
            told(compiled[(num_blocks, 1, 1)], *args, stream=raw_stream(on.get_device()))
        else:
            give_up("what Triton interprets")


Places = tuple[int | None, ...]


def _places(dtypes: Sequence[torch.dtype], num: int = 0) -> Places:
    """Which piece is at each place that a kernel reads, at least ``num``; None: an empty one. Of more than two places
    the first is for an fp32 sum of earlier pieces, which most batches do not have."""
    if len(dtypes) <= FEW and dtypes[0] == dtypes[-1] and num <= FEW:
        return tuple(i if i < len(dtypes) else None for i in range(FEW))
    filled = (*(() if dtypes[0] == torch.float32 else (None,)), *range(len(dtypes)))
    return filled + (None,) * (max(MANY, num) - len(filled))


def _placed(xs: Sequence[Tensor], places: Places) -> tuple[Tensor, ...]:
    """The pieces at their places. Empty ones have no rows: of what is named there only the dtype matters."""
    filled = tuple(xs[-1 if i is None else i] for i in places)
    return filled if places[0] is not None else (xs[0].new_empty(4, dtype=torch.float32), *filled[1:])


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
def _block(program, num_heads, num_rows, BLOCK_ROWS: tl.constexpr, heads_first):
    """Batch row and head, int64, and first row of a program; neighbours in memory run side by side."""
    num_blocks = tl.cdiv(num_rows, BLOCK_ROWS)
    if heads_first:
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
    BLOCK_ROWS: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
):
    cols = tl.arange(0, BLOCK_DIM)
    for s in tl.static_range(len(intos)):
        begin, num_batches = _value(sizes[s][0]), _value(sizes[s][1])
        num_heads, num_rows = _value(sizes[s][2]), _value(sizes[s][3])
        end = begin + num_batches * num_heads * tl.cdiv(num_rows, BLOCK_ROWS)
        if (tl.program_id(0) >= begin) & (tl.program_id(0) < end):
            heads_first = _value(sizes[s][4]) == 1
            batch, head, first = _block(tl.program_id(0) - begin, num_heads, num_rows, BLOCK_ROWS, heads_first)
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
