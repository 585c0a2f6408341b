"""Which weights dropout keeps, in Triton: random words of queries and keys, made once per call, and mixed per pair.

`scores/dropout.py` has the definition. Philox for every pair would take longer than attention; for rows only, it takes
almost no time, and two multiplications mix the words of a pair.
"""

# No annotations: Triton evaluates them, and accepts only its own types.
# mypy: disallow-untyped-defs=False

from __future__ import annotations

import triton
import triton.language as tl

from cp_mesh.kernels.triton_tiles import choose, gather


@triton.jit(do_not_specialize=["num_rows", "num_heads", "first_head", "first_batch"])
def words_kernel(
    seed, positions, words, num_rows, num_heads, first_head, first_batch, KEYS: tl.constexpr, ROWS: tl.constexpr
):
    """Write int32 words of keys [num_rows], or of queries [2, B, H, num_rows]; a program writes ROWS rows of a head."""
    program, count = tl.program_id(1), tl.num_programs(1).to(tl.int64)
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    inside = rows < num_rows
    position = tl.load(positions + rows, mask=inside, other=0).to(tl.int32)
    if KEYS:
        word, _, _, _ = tl.philox(tl.load(seed), position, 1, 0, 0)
        tl.store(words + rows, word.to(tl.int32, bitcast=True), mask=inside)
    else:
        head, batch = (program % num_heads + first_head).to(tl.uint32), program // num_heads + first_batch
        fourth = (batch + tl.load(seed + 1)).to(tl.uint32)
        first, second, _, _ = tl.philox(tl.load(seed), position, 0, head, fourth)
        words += program.to(tl.int64) * num_rows + rows
        tl.store(words, first.to(tl.int32, bitcast=True), mask=inside)
        tl.store(words + count * num_rows, second.to(tl.int32, bitcast=True), mask=inside)


@triton.jit
def query_words(dropout, batch, head, num_heads, first, num_q, ROWS: tl.constexpr):
    """Both words of query rows; any words past the end."""
    rows = first + tl.arange(0, ROWS)
    place, inside = (batch * num_heads + head).to(tl.int64) * num_q + rows, rows < num_q
    one, two = tl.load(dropout[0] + place, mask=inside, other=0), tl.load(dropout[1] + place, mask=inside, other=0)
    return one.to(tl.uint32, bitcast=True), two.to(tl.uint32, bitcast=True)


@triton.jit
def key_words(dropout, first, num_k, ROWS: tl.constexpr, ALL: tl.constexpr):
    """Words of key rows; any words past the end. ALL: no row is past the end, and the load uses no shared memory."""
    if ALL:
        return gather(dropout[2] + first + tl.arange(0, ROWS)).to(tl.uint32, bitcast=True)
    else:
        rows = first + tl.arange(0, ROWS)
        return tl.load(dropout[2] + rows, mask=rows < num_k, other=0).to(tl.uint32, bitcast=True)


@triton.jit
def keep(x, other, one, two, key, numbers):
    """fp32 x for kept weights, else ``other``; the words broadcast."""
    word = (one ^ key) * 0x7FEB352D
    word = (word ^ (word >> 15) ^ two) * 0x846CA68B
    # the threshold is passed as int32 minus 2^31, since Triton compiles 32-bit numbers as signed
    return choose(word, numbers[0].to(tl.uint32, bitcast=True) ^ 0x80000000, x, other)
