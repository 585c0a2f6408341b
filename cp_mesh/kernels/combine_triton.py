"""Triton kernels of `cp_mesh.kernels.combine`: combine all pieces in one pass over memory. Needs triton.

A program writes a block of rows of one head, and reads these rows of each piece that has them. Sums are fp32, in the
order of the pieces, and rounded once. The numbers of pieces and sums change with the batch, so both are padded with
empty ones, which read nothing: pieces to two, or to nine (an fp32 sum of earlier ones and eight more); sums to three
(dq, dk and dv). So few variants are compiled, and none for rare batches only.

`row_dots` computes delta for a backward: torch would first write both factors and their product in fp32, which took
0.36 ms of a causal backward's 3.9 ms at 8K rows and 32 heads (H200).
"""

# No annotations: Triton evaluates them, and accepts only its own types.
# mypy: disallow-untyped-defs=False

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache, reduce
from operator import attrgetter, itemgetter, or_
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.compiler import CompiledKernel

from cp_mesh._torch import raw_stream
from cp_mesh.geometry.host_tensors import lasting

BLOCK_ELEMENTS = 4096
FEW, MANY = 2, 9  # numbers of pieces that kernels are compiled for; 9 is `combine.MAX_PIECES` and a sum of earlier ones
NUM_SUMS = 3
NUM_WARPS = 4


def merge_pieces(
    pieces: Sequence[tuple[int, Tensor, Tensor]], out: Tensor, lse: Tensor, sinks: Tensor | None = None
) -> None:
    """Merge pieces into out [B, H, S, Dv], any strides, and lse [B, H, S], contiguous fp32.

    Args:
        pieces: one or more (begin, out [B, H, n, Dv], lse [B, H, n]): rows begin to begin + n, any strides and dtypes.
        out, lse: buffers for the results.
        sinks: fp32 [H], contiguous; out is scaled by sigmoid(lse - sink).
    """
    assert lse.dtype == torch.float32 and lse.is_contiguous()
    assert sinks is None or (sinks.dtype == torch.float32 and sinks.is_contiguous())
    begins, outs, lses = zip(*pieces, strict=True)
    num = len(begins)
    bound, given, nothing = _bind(_merge, begins, [*outs, *lses, out, lse, *(() if sinks is None else (sinks,))])
    rows, strides, sizes = bound.numbers
    of_outs, of_lses = bound.pick((*given[:num], nothing)), bound.pick((*given[num : 2 * num], nothing))
    results = given[2 * num], out.stride(), given[2 * num + 1], None if sinks is None else given[-1]
    _launch(merge_kernel, bound, out, (of_outs, strides, of_lses, rows, *results, *out.shape[1:3], *sizes))


def sum_pieces(sums: Sequence[tuple[Sequence[tuple[int, Tensor]], Tensor]]) -> None:
    """Write sums of pieces into tensors [B, K, S, D], any strides; rows that no piece has become 0.

    Args:
        sums: (pieces, buffer for the result) of each sum; one or more pieces (begin, x [B, K, n, D]), rows begin to
            begin + n, any strides and dtypes.
    """
    begins: list[tuple[int, ...]] = []
    xs: list[Tensor] = []
    intos: list[Tensor] = []
    for pieces, into in sums:
        of_sum, tensors = zip(*pieces, strict=True)
        begins.append(of_sum)
        xs += tensors
        intos.append(into)
    num = len(xs)
    bound, given, nothing = _bind(_sums, (*begins,), xs + intos)
    num_places, strides, rows, *numbers = bound.numbers
    results = (*given[num:], *given[-1:] * (NUM_SUMS - len(sums)))
    placed, of_sums = bound.pick((*given[:num], nothing)), []
    for first in range(0, len(placed), num_places):
        of_sums.append(placed[first : first + num_places])
    _launch(sum_kernel, bound, intos[0], ((*of_sums,), strides, rows, results, *numbers))


def row_dots(a: Tensor, b: Tensor, minus: Tensor | None) -> Tensor:
    """rowsum(a · b) - minus, contiguous fp32 [B, H, S], from a, b [B, H, S, D] and minus [B, H, S], any strides."""
    dots = torch.empty(a.shape[:3], dtype=torch.float32, device=a.device)
    more = () if minus is None else (minus.float().contiguous(),)
    bound, (of_a, of_b, into, *less), _ = _bind(_dots, (), [a, b, dots, *more])
    args = of_a, a.stride(), of_b, b.stride(), less[0] if less else None, into, *a.shape[1:3], *bound.numbers
    _launch(dots_kernel, bound, a, args)
    return dots


Like = tuple[torch.Size, tuple[int, ...], torch.dtype]
_shape, _dtype = attrgetter("shape"), attrgetter("dtype")


@dataclass(eq=False)
class _BoundLaunch:
    """What integers decide in a launch: the number of blocks, which piece is at which place, and all numbers.

    Attributes:
        pick: takes the pieces and an empty one, and returns them at their places.
        is_aligned: to multiples of 16 bytes, for which Triton compiles kernels of their own.
        runner: the compiled kernel. Calling it directly skips Triton's inspection of every argument (host time).
    """

    num_blocks: int
    numbers: tuple[Any, ...]
    pick: Callable[[tuple[Any, ...]], tuple[Any, ...]]
    is_aligned: bool
    nothing: Tensor
    runner: Callable[..., Any] | None = None


@lru_cache(maxsize=2048)
@lasting()
def _bound(
    make: Callable[..., Any], of_pieces: Any, likes: tuple[Like, ...], is_aligned: bool, device: torch.device
) -> _BoundLaunch:
    num_blocks, numbers, pick = make(of_pieces, likes)
    return _BoundLaunch(num_blocks, numbers, pick, is_aligned, torch.empty(4, dtype=torch.float32, device=device))


def _bind(make: Callable[..., Any], of_pieces: Any, tensors: list[Tensor]) -> tuple[_BoundLaunch, list[Any], Any]:
    """What integers decide, and what a launch is given of the tensors and of an empty piece. A compiled kernel takes
    pointers, which saves host time: Triton's launcher would ask the driver where each tensor lies."""
    pointers = [*map(Tensor.data_ptr, tensors)]
    likes = tuple(zip(map(_shape, tensors), map(Tensor.stride, tensors), map(_dtype, tensors), strict=True))
    bound = _bound(make, of_pieces, likes, not reduce(or_, pointers) % 16, tensors[0].device)
    return (bound, tensors, bound.nothing) if bound.runner is None else (bound, pointers, bound.nothing.data_ptr())


def _launch(kernel: Any, bound: _BoundLaunch, on: Tensor, args: tuple[Any, ...]) -> None:
    """Run ``kernel[grid](*args)`` on the device of ``on``."""
    if bound.runner is None:
        with torch.cuda.device_of(on):
            compiled = kernel[(bound.num_blocks,)](*args, num_warps=NUM_WARPS)
            if bound.is_aligned and isinstance(compiled, CompiledKernel):
                bound.runner = compiled[(bound.num_blocks, 1, 1)]
    elif torch.cuda.current_device() == on.get_device():  # entering a device takes host time
        bound.runner(*args, stream=raw_stream(on.get_device()))
    else:
        with torch.cuda.device_of(on):
            bound.runner(*args, stream=raw_stream(on.get_device()))


def _merge(begins: tuple[int, ...], likes: tuple[Like, ...]) -> tuple[Any, ...]:
    """Rows and strides of all pieces, padding included, and sizes. ``likes``: of outs, lses, and results."""
    num = len(begins)
    outs, lses, out = likes[:num], likes[num : 2 * num], likes[2 * num]
    places = _places([dtype for _, _, dtype in outs])
    rows = [_unspecialised(begin, x[0][2], *lse[1]) for begin, x, lse in zip(begins, outs, lses, strict=True)]
    rows = [_unspecialised(0, 0, *lses[-1][1]) if i is None else rows[i] for i in places]
    strides = [outs[-1 if i is None else i][1] for i in places]
    num_blocks, sizes = _blocks(out)
    return num_blocks, (tuple(rows), tuple(strides), sizes), itemgetter(*_indices(places, num, num))


def _sums(begins: tuple[tuple[int, ...], ...], likes: tuple[Like, ...]) -> tuple[Any, ...]:
    """Number of places of a sum; for each sum strides and rows of its pieces, strides of the result, sizes, head dim.

    ``likes``: of the pieces of all sums, and of the results.
    """
    num = len(likes) - len(begins)
    pieces, intos = [*likes[:num]], likes[num:]
    of_sums = [[pieces.pop(0) for _ in each] for each in begins]
    block_dim = triton.next_power_of_2(max(shape[3] for shape, *_ in intos))
    block_rows = max(1, BLOCK_ELEMENTS // block_dim)
    dtypes = [[dtype for _, _, dtype in xs] for xs in of_sums]
    num_blocks, many = 0, max(len(_places(each)) for each in dtypes)
    numbers, indices = [], []
    for i in range(max(NUM_SUMS, len(begins))):
        last = min(i, len(begins) - 1)
        xs, ((B, H, S, D), into_strides, _) = of_sums[last], intos[last]
        B = B if i == last else 0  # a padding sum has no blocks
        places = _places(dtypes[last], many)
        rows = [_unspecialised(begin, shape[2]) for begin, (shape, *_) in zip(begins[last], xs, strict=True)]
        rows = [_unspecialised(0, 0) if j is None else rows[j] for j in places]
        strides = [xs[-1 if j is None else j][1] for j in places]
        sizes = _unspecialised(num_blocks, B, H, S, int(into_strides[1] < into_strides[2]))
        numbers.append((tuple(strides), tuple(rows), into_strides, sizes, D))
        first = sum(map(len, begins[:last]))
        indices += [num if j == num else first + j for j in _indices(places, len(xs), num)]
        num_blocks += B * H * triton.cdiv(S, block_rows)
    every = (len(places), *zip(*numbers, strict=True), block_rows, block_dim)
    return num_blocks, every, itemgetter(*indices)


def _dots(_: tuple[()], likes: tuple[Like, ...]) -> tuple[Any, ...]:
    return *_blocks(likes[0]), tuple


Places = tuple[int | None, ...]


def _places(dtypes: Sequence[torch.dtype], num: int = 0) -> Places:
    """The index of the piece at each of a kernel's places, ``num`` or more; None for an empty piece. With more than two
    places, the first is reserved for an fp32 sum of earlier pieces, which few batches have."""
    if len(dtypes) <= FEW and dtypes[0] == dtypes[-1] and num <= FEW:
        return tuple(i if i < len(dtypes) else None for i in range(FEW))
    filled = (*(() if dtypes[0] == torch.float32 else (None,)), *range(len(dtypes)))
    return filled + (None,) * (max(MANY, num) - len(filled))


def _indices(places: Places, num: int, nothing: int) -> list[int]:
    """The index of the piece at each place, of ``num``. An empty place holds any of the right dtype, which is not read:
    the last piece, or the tensor of index ``nothing``."""
    first = nothing if places[0] is None else places[0]
    return [first, *(num - 1 if i is None else i for i in places[1:])]


def _unspecialised(*values: int) -> tuple[int, ...]:
    """Encode values as odd numbers above 1 (`_value` decodes): Triton specializes on 1 and on multiples of 16."""
    return tuple(2 * value + 3 for value in values)


def _blocks(out: Like) -> tuple[int, tuple[int, int, int, bool]]:
    """The number of blocks, and the compile-time sizes HEAD_DIM, BLOCK_ROWS, BLOCK_DIM, HEADS_FIRST."""
    (B, H, S, D), strides, *_ = out
    block_dim = triton.next_power_of_2(D)
    block_rows = max(1, BLOCK_ELEMENTS // block_dim)
    return B * H * triton.cdiv(S, block_rows), (D, block_rows, block_dim, strides[1] < strides[2])


@triton.jit
def _value(value):
    return (value - 3) >> 1


@triton.jit
def _block(program, num_heads, num_rows, BLOCK_ROWS: tl.constexpr, heads_first):
    """Batch row and head (int64) and first row of a program; neighbouring programs work on neighbouring memory."""
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
    """Pointers to a block [rows, cols], in int64: tensors may have more than 2**31 elements."""
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
    # -inf - -inf would be NaN; in a row with no key all pieces get weight 0
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
        # finite lse for rows with no key, which are 0: -inf - -inf would be NaN
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
    """fp32 block of a piece [B, H, n, D]; rows that it does not have are 0 and not read."""
    own = rows - _value(piece_rows[0])
    inside = (own >= 0) & (own < _value(piece_rows[1]))
    mask = inside[:, None] & (cols < HEAD_DIM)[None, :]
    return tl.load(_pointers(x, strides, batch, head, own, cols), mask=mask, other=0.0).to(tl.float32)


@triton.jit
def _piece_lse(lse, piece_rows, batch, head, rows):
    """fp32 lse of a piece; -inf for rows that it does not have."""
    own = rows - _value(piece_rows[0])
    inside = (own >= 0) & (own < _value(piece_rows[1]))
    start = batch * _value(piece_rows[2]) + head * _value(piece_rows[3])
    pointers = lse + start + own.to(tl.int64) * _value(piece_rows[4])
    return tl.load(pointers, mask=inside, other=float("-inf")).to(tl.float32)
