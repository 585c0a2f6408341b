"""What the attention kernels do with one tile in registers: read and write rows, make scores of products, drop weights.

A score is softcap(scale · q·k) - slope · abs(p - t) + table[clip(p - t, -R, R) + R] + bias, where p and t are the
positions of the query and the key. Kernels keep the products q·k as they are where a score is no more than scale · q·k.

Legend: scores = (softcap, slopes [H], table [H, 2R + 1], bias [B, H, Sq, S], (seed int64 [2], what kept weights are
multiplied by)), each or None; numbers = (R, threshold of dropout, first head, first batch row, columns of the bias, its
four strides), which are never compiled into a kernel; slopes and table are contiguous, fp32.
"""

# Triton reads annotations as code, and takes none but its own.
# mypy: disallow-untyped-defs=False

from __future__ import annotations

import triton
import triton.language as tl

LOG2_E = tl.constexpr(1.4426950408889634)

RUNTIME = ("numbers", "num_heads", "num_q", "num_k", "num_masks", "lo", "hi")
"""Never compiled into a kernel."""


@triton.jit
def load(
    x, strides, batch, head, first, num_rows, DIM: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr,
    CHECKED: tl.constexpr,
):  # fmt: skip
    """Block [ROWS, COLS] from row ``first`` on; 0 past the head dim and, if CHECKED, past the last row.

    ``x`` is a pointer, or without strides a descriptor of blocks [1, 1, ROWS, COLS], which needs fewer registers.
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
    lse, delta, batch, head, num_heads, first, num_q, PAST: tl.constexpr, ROWS: tl.constexpr, CHECKED: tl.constexpr
):
    """lse and delta of query rows; if CHECKED, rows past the end have lse = PAST and delta = 0."""
    rows = first + tl.arange(0, ROWS)
    place, inside = (batch * num_heads + head).to(tl.int64) * num_q + first + tl.arange(0, ROWS), rows < num_q
    if CHECKED:
        return tl.load(lse + place, mask=inside, other=PAST), tl.load(delta + place, mask=inside, other=0.0)
    else:
        return tl.load(lse + place), tl.load(delta + place)


@triton.jit
def scored(products, scale, batch, head, p, t, rows, num_q, scores, numbers):
    """Scores of products, and their derivative by scale · product; ``p``, ``t`` and ``rows`` broadcast to them.

    Without features that need them, ``p`` and ``t`` are not read.
    """
    x = products * scale
    derivative = 1.0
    if scores[0] is not None:
        # exact for large arguments, where exp2 gives 0 or inf
        tanh = 1.0 - 2.0 / (1.0 + tl.exp2(x * (2.0 * LOG2_E / scores[0])))
        x, derivative = tanh * scores[0], 1.0 - tanh * tanh
    if scores[1] is not None:
        x -= tl.load(scores[1] + head) * tl.abs(p - t).to(tl.float32)
    if scores[2] is not None:
        radius = numbers[0]
        table = scores[2] + head.to(tl.int64) * (2 * radius + 1) + radius
        x += tl.load(table + tl.minimum(tl.maximum(p - t, -radius), radius))
    if scores[3] is not None:
        bias = scores[3] + batch.to(tl.int64) * numbers[5] + head.to(tl.int64) * numbers[6]
        places = rows.to(tl.int64) * numbers[7] + t.to(tl.int64) * numbers[8]
        x += tl.load(bias + places, mask=(rows < num_q) & (t < numbers[4]), other=0.0).to(tl.float32)
    return x, derivative


@triton.jit
def kept(batch, head, p, t, dropout, numbers):
    """What dropout multiplies the weights by: 0, or 1 / (1 - probability)."""
    offset = tl.load(dropout[0] + 1)
    fourth = (batch + numbers[3] + offset).to(tl.uint32)
    word, _, _, _ = tl.philox(tl.load(dropout[0]), t, p, (head + numbers[2]).to(tl.uint32), fourth)
    # as signed numbers, like the threshold, which has 32 bits
    return tl.where((word ^ 0x80000000).to(tl.int32, bitcast=True) < numbers[1], 0.0, dropout[1])
