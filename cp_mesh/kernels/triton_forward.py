"""The forward of `cp_mesh.kernels.triton_attention`. Needs triton.

Legend, here and in the backward: q [B, H, Sq, D], k [B, K, Sk, D], v [B, K, Sk, Dv], unit last stride; GROUP = H / K;
lse in natural log; ``pairs`` as in `triton_visits`, ``scores`` and ``numbers`` as in `triton_tiles`. POSITIONS: scores
depend on positions or rows. SCALED: products are multiplied by scale first.
"""

# No annotations: Triton evaluates them, and accepts only its own types.
# mypy: disallow-untyped-defs=False

from __future__ import annotations

import triton
import triton.language as tl

from cp_mesh.kernels.triton_dropout import keep, key_words, query_words
from cp_mesh.kernels.triton_tiles import (
    LOG2_E,
    RUNTIME,
    bias_block,
    bias_of,
    load,
    score_unit,
    scored,
    slope_of,
    store,
)
from cp_mesh.kernels.triton_visits import (
    allowed_pairs,
    inner_block,
    key_distances,
    keys_seen,
    position_of,
    program,
    queries_at,
    run_at,
    visits,
)


@triton.jit(do_not_specialize=RUNTIME)
def forward_kernel(
    q,
    k,
    v,
    out,
    lse,
    q_strides,
    k_strides,
    v_strides,
    out_strides,
    pairs,
    scores,
    numbers,
    num_heads,
    num_q,
    num_k,
    num_masks,
    lo,
    hi,
    scale,
    bias_blocks,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    V_HEAD_DIM: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
    BLOCK_V_DIM: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PAIRS: tl.constexpr,
    DOCUMENTS: tl.constexpr,
    SCALED: tl.constexpr,
    POSITIONS: tl.constexpr,
):
    """Write out and lse (fp32 [B, H, Sq], contiguous) of one block of queries."""
    batch, head, block = program(num_heads, tl.cdiv(num_q, BLOCK_Q), LAST_FIRST=True)
    kv_head, mask_row, first = head // GROUP, (batch % num_masks).to(tl.int64), block * BLOCK_Q
    queries = load(q, q_strides, batch, head, first, num_q, HEAD_DIM, BLOCK_Q, BLOCK_DIM, True)
    at, ids = queries_at(first, num_q, mask_row, pairs, BLOCK_Q, PAIRS, DOCUMENTS)
    first_at = position_of(pairs, first, POSITIONS, False)
    rows = first + tl.arange(0, BLOCK_Q)
    num_partial, num_full, begin, before = visits(block, mask_row, num_q, num_k, lo, hi, pairs, BLOCK_Q, BLOCK_K, PAIRS)
    slope = slope_of(scores, head)
    unit = score_unit(scale, scores, SCALED) * LOG2_E
    if scores[3] is not None:
        one, two = query_words(scores[3], batch, head, num_heads, first, num_q, BLOCK_Q)
    acc = tl.zeros([BLOCK_Q, BLOCK_V_DIM], tl.float32)
    largest = tl.full([BLOCK_Q], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_Q], tl.float32)
    for masked in tl.static_range(2):
        count = num_partial if masked else num_full
        key_block = inner_block(0, count, num_k, num_full, begin, before, pairs, BLOCK_K, PAIRS, masked)
        begin_at, step_at = run_at(pairs, key_block, count > 0, BLOCK_K, POSITIONS, not masked, True)
        # fewer stages if more than keys and values is loaded: a second program must fit on the multiprocessor
        for n in tl.range(count, num_stages=2 if (masked and PAIRS) or bias_blocks is not None else None):
            other = BLOCK_K * key_block
            key_block = inner_block(n + 1, count, num_k, num_full, begin, before, pairs, BLOCK_K, PAIRS, masked)
            near, along, step, sign, t = key_distances(
                at, first_at, other, (begin_at, step_at), num_k, pairs, BLOCK_K, POSITIONS, not masked
            )
            keys = load(k, k_strides, batch, kv_head, other, num_k, HEAD_DIM, BLOCK_K, BLOCK_DIM, masked)
            if bias_blocks is not None and not masked:
                bias = bias_block(bias_blocks, batch, head, first, begin_at, numbers, BLOCK_Q, BLOCK_K)
            else:
                bias = bias_of(scores, batch, head, t[None, :], rows[:, None], num_q, numbers, not masked)
            begin_at, step_at = run_at(pairs, key_block, n + 1 < count, BLOCK_K, POSITIONS, not masked, True)
            if scores[3] is not None:
                words = key_words(scores[3], other, num_k, BLOCK_K, not masked)
            x = tl.dot(queries, keys.T, input_precision="ieee")
            x, of_rows, _ = scored(
                x, scale, slope, bias, near, along, step, sign, scores, SCALED, not masked, 0,
                queries.dtype == tl.float32,
            )  # fmt: skip
            if masked:
                firsts, lasts, k_ids = keys_seen(other, num_k, mask_row, lo, hi, pairs, BLOCK_K, PAIRS, DOCUMENTS)
                allowed = allowed_pairs(
                    at[:, None], ids[:, None], firsts[None, :], lasts[None, :], k_ids[None, :], DOCUMENTS
                )
                x = tl.where(allowed, x, float("-inf"))
            highest = tl.max(x, 1)
            if POSITIONS and not masked:
                highest += of_rows
            new = tl.maximum(largest, highest * unit)
            # for a row with no key so far, -inf - -inf would be NaN
            base = tl.where(new == float("-inf"), 0.0, new) if masked or POSITIONS else new
            decay = tl.exp2(largest - base)
            if POSITIONS and not masked:
                base -= of_rows * unit
            weights = tl.exp2(x * unit - base[:, None])
            total = total * decay + tl.sum(weights, 1)
            if scores[3] is not None:
                weights = keep(weights, 0.0, one[:, None], two[:, None], words[None, :], numbers)
            acc = acc * decay[:, None]
            values = load(v, v_strides, batch, kv_head, other, num_k, V_HEAD_DIM, BLOCK_K, BLOCK_V_DIM, masked)
            acc = tl.dot(weights.to(values.dtype), values, acc, input_precision="ieee")
            largest = new
    alone = total == 0
    total = tl.where(alone, 1.0, total)
    acc /= total[:, None]
    if scores[3] is not None:
        acc *= scores[3][3]
    store(out, out_strides, batch, head, first, num_q, acc, V_HEAD_DIM, BLOCK_Q, BLOCK_V_DIM)
    natural = tl.where(alone, float("-inf"), (largest + tl.log2(total)) / LOG2_E)
    tl.store(lse + (batch * num_heads + head).to(tl.int64) * num_q + rows, natural, mask=rows < num_q)
