"""Building blocks of the attention kernels, on blocks in registers: load and store rows, compute scores from products.

A score is softcap(scale · q·k) - slope · abs(p - t) + bias, where p and t are the
positions of the query and the key. To save operations, kernels keep scores in a unit: a score is `score_unit` times the
result of `scored`, which is q·k, or its tanh, plus the added terms divided by the unit.

A distance is a part of its row plus a part of its column. In full blocks the columns are one constant step apart and
all distances have one sign (`cp_mesh.kernels.triton_visits`), so two numbers give all columns.

Legend: scores = (softcap, slopes [H], bias [B, H, Sq, S], dropout), each may be None; dropout = (first words of queries
[B, H, Sq], second words, words of keys [Sk], the factor 1 / (1 - p) of kept weights); numbers = (threshold of dropout,
columns of the bias, its four strides, whether it has batch rows, whether it has heads), which are never compiled into a
kernel; slopes are contiguous, fp32.
"""

# No annotations: Triton evaluates them, and accepts only its own types.
# mypy: disallow-untyped-defs=False

from __future__ import annotations

import triton
import triton.language as tl
from triton import knobs

LOG2_E = tl.constexpr(1.4426950408889634)

RUNTIME = ("numbers", "num_heads", "num_q", "num_k", "num_masks", "lo", "hi")
"""Arguments that Triton must not specialize on."""


@triton.jit
def load(
    x, strides, batch, head, first, num_rows, DIM: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr,
    CHECKED: tl.constexpr,
):  # fmt: skip
    """Load a block [ROWS, COLS] from row ``first`` on; 0 past the head dim and, if CHECKED, past the last row.

    ``x`` is a pointer or, if strides is None, a descriptor of blocks [1, 1, ROWS, COLS], which needs fewer registers.
    """
    if strides is None:
        return x.load([batch, head, first, 0]).reshape(ROWS, COLS)
    else:
        rows, cols = tl.arange(0, ROWS), tl.arange(0, COLS)
        x += batch.to(tl.int64) * strides[0] + head.to(tl.int64) * strides[1] + first.to(tl.int64) * strides[2]
        pointers = x + rows.to(tl.int64)[:, None] * strides[2] + cols[None, :]
        if CHECKED and COLS != DIM:
            return tl.load(pointers, mask=(first + rows < num_rows)[:, None] & (cols < DIM)[None, :], other=0.0)
        elif CHECKED:
            return tl.load(pointers, mask=(first + rows < num_rows)[:, None], other=0.0)
        elif COLS != DIM:
            return tl.load(pointers, mask=(cols < DIM)[None, :], other=0.0)
        else:
            return tl.load(pointers)


@triton.jit
def store(x, strides, batch, head, first, num_rows, block, DIM: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr):
    rows, cols = tl.arange(0, ROWS), tl.arange(0, COLS)
    x += batch.to(tl.int64) * strides[0] + head.to(tl.int64) * strides[1] + first.to(tl.int64) * strides[2]
    pointers = x + rows.to(tl.int64)[:, None] * strides[2] + cols[None, :]
    inside = (first + rows < num_rows)[:, None] & (cols < DIM)[None, :]
    tl.store(pointers, block.to(x.dtype.element_ty), mask=inside)


@triton.jit
def statistics(
    lse, delta, batch, head, num_heads, first, num_q, PAST: tl.constexpr, ROWS: tl.constexpr, CHECKED: tl.constexpr,
    STAGED: tl.constexpr,
):  # fmt: skip
    """Load lse and delta of query rows; if CHECKED, rows past the end have lse = PAST and delta = 0.

    Unless STAGED or CHECKED, delta uses no shared memory.
    """
    rows = first + tl.arange(0, ROWS)
    place, inside = (batch * num_heads + head).to(tl.int64) * num_q + first + tl.arange(0, ROWS), rows < num_q
    if CHECKED:
        return tl.load(lse + place, mask=inside, other=PAST), tl.load(delta + place, mask=inside, other=0.0)
    elif STAGED:
        return tl.load(lse + place), tl.load(delta + place)
    else:
        return tl.load(lse + place), gather(delta + place)


if knobs.runtime.interpret:  # the interpreter cannot run assembly

    @triton.jit
    def fast_tanh(x):
        return exact_tanh(x)

    @triton.jit
    def gather(pointers):
        return tl.load(pointers)

    @triton.jit
    def choose(words, threshold, x, other):
        return tl.where(words >= threshold, x, other)

else:

    @triton.jit
    def fast_tanh(x):
        """tanh with a relative error of 2^-11, in one instruction."""
        return tl.inline_asm_elementwise("tanh.approx.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1)

    @triton.jit
    def gather(pointers):
        """Load read-only memory at the point of use: Triton's own load would stage single numbers in shared memory."""
        dtype: tl.constexpr = pointers.dtype.element_ty
        if dtype == tl.float32:
            return tl.inline_asm_elementwise(
                "ld.global.nc.f32 $0, [$1];", "=f,l", [pointers], dtype=tl.float32, is_pure=True, pack=1
            )
        elif dtype == tl.int32:
            return tl.inline_asm_elementwise(
                "ld.global.nc.b32 $0, [$1];", "=r,l", [pointers], dtype=tl.int32, is_pure=True, pack=1
            )
        elif dtype.primitive_bitwidth == 16:
            return tl.inline_asm_elementwise(
                "ld.global.nc.b16 $0, [$1];", "=h,l", [pointers], dtype=tl.int16, is_pure=True, pack=1
            ).to(dtype, bitcast=True)
        else:
            return tl.load(pointers)

    @triton.jit
    def choose(words, threshold, x, other):
        """fp32 x where uint32 words >= threshold, else other; in assembly, or Triton moves it past a rounding."""
        return tl.inline_asm_elementwise(
            "{ .reg .pred p; setp.ge.u32 p, $1, $2; selp.f32 $0, $3, $4, p; }", "=f,r,r,f,f",
            [words, threshold, x, other], dtype=tl.float32, is_pure=True, pack=1,
        )  # fmt: skip


@triton.jit
def exact_tanh(x):
    """tanh in fp32, right for large arguments too, for which exp2 is 0 or inf."""
    return 1.0 - 2.0 / (1.0 + tl.exp2(x * (2.0 * LOG2_E)))


@triton.jit
def score_unit(scale, scores, SCALED: tl.constexpr):
    """The unit of scores: a score divided by its `scored` value. Positive, so that both have the same maximum."""
    if scores[0] is not None:
        return scores[0]
    else:
        return 1.0 if SCALED else scale


@triton.jit
def slope_of(scores, head):
    """The ALiBi slope of the head; load it before waiting for products."""
    if scores[1] is not None:
        return tl.load(scores[1] + head)
    else:
        return 0.0


@triton.jit
def bias_of(scores, batch, head, t, rows, num_q, numbers, ALL: tl.constexpr):
    """The bias at key positions ``t`` and query ``rows``, which broadcast; load it before waiting for products.

    ALL: no key is past the end.
    """
    if scores[2] is None:
        return 0.0
    elif ALL:
        bias = scores[2] + batch.to(tl.int64) * numbers[2] + head.to(tl.int64) * numbers[3]
        places = tl.minimum(rows, num_q - 1).to(tl.int64) * numbers[4]
        return gather((bias + places) + t.to(tl.int64) * numbers[5])
    else:
        bias = scores[2] + batch.to(tl.int64) * numbers[2] + head.to(tl.int64) * numbers[3]
        places = rows.to(tl.int64) * numbers[4] + t.to(tl.int64) * numbers[5]
        return tl.load(bias + places, mask=(rows < num_q) & (t < numbers[1]), other=0.0)


@triton.jit
def bias_block(blocks, batch, head, row, column, numbers, ROWS: tl.constexpr, COLS: tl.constexpr):
    """`bias_of` for neighbouring key positions; ``blocks`` is a descriptor of blocks [1, 1, ROWS, COLS]."""
    return blocks.load([batch * numbers[6], head * numbers[7], row, column]).reshape(ROWS, COLS)


@triton.jit
def scored(
    products, scale, slope, bias, near, along, step, sign, scores,
    SCALED: tl.constexpr, ONE_SIGN: tl.constexpr, BASES: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    """Compute scores from products. Returns (x, of_bases, derivative): scores in their unit are x + of_bases.

    Products are [len(near), len(along)]; distances are near + along · step, read only if a term needs them. If ONE_SIGN
    all have sign ``sign``. Weights have one base per row (BASES = 0) or column (1): the part of the scores that a base
    can absorb is of_bases, a vector or a number, at no cost per pair. ``slope`` and ``bias`` are in natural units, the
    derivative is d score / d(scale · product). EXACT: the exact tanh, for fp32.
    """
    x, of_bases, derivative = products, 0.0, 1.0
    if scores[0] is not None:
        x = products * (scale / scores[0])
        x = exact_tanh(x) if EXACT else fast_tanh(x)
        derivative = 1.0 - x * x
    elif SCALED:
        x = products * scale
    per_unit = 1.0 / score_unit(scale, scores, SCALED)
    if scores[1] is not None:
        if ONE_SIGN:
            slope *= sign * per_unit
            of_near, of_along = near.to(tl.float32) * -slope, along.to(tl.float32) * (slope * -step)
            if BASES == 0:
                of_bases = of_near
                x += of_along[None, :]
            else:
                of_bases = of_along
                x += of_near[:, None]
        else:
            x -= tl.abs(near[:, None] + along[None, :] * step).to(tl.float32) * (slope * per_unit)
    if scores[2] is not None:
        x += bias.to(tl.float32) * per_unit
    return x, of_bases, derivative
