"""The backward of `cp_mesh.kernels.triton_attention`; legend in `triton_forward`. Needs triton.

With x the scaled products, s the scores, w the weights exp(s - lse) and m the dropout factors: dv = (m · w)ᵀ dout,
ds = w · (m · (dout vᵀ) - delta), dx = ds · ∂s/∂x, dq = scale · dx k and dk = scale · dxᵀ q. The gradients of slopes and
bias are sums of ds; the bias has its own kernel, which visits blocks in the order of its sums. ``lse`` (base 2, inf for
a row with no key) and ``delta`` are [B, H, Sq], contiguous.
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
    statistics,
    store,
)
from cp_mesh.kernels.triton_visits import (
    allowed_pairs,
    inner_block,
    key_distances,
    key_positions,
    keys_seen,
    position_of,
    program,
    queries_at,
    query_distances,
    run_at,
    visits,
)


@triton.jit(do_not_specialize=RUNTIME)
def key_gradients_kernel(
    q,
    k,
    v,
    dout,
    lse,
    delta,
    dk,
    dv,
    q_strides,
    k_strides,
    v_strides,
    dout_strides,
    dk_strides,
    dv_strides,
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
    """Write dk, dv or both for a block of keys, summed over its query heads; scores are transposed here."""
    batch, kv_head, block = program(num_heads // GROUP, tl.cdiv(num_k, BLOCK_K), LAST_FIRST=False)
    mask_row, first = (batch % num_masks).to(tl.int64), block * BLOCK_K
    keys = load(k, k_strides, batch, kv_head, first, num_k, HEAD_DIM, BLOCK_K, BLOCK_DIM, True)
    if dk is not None:
        values = load(v, v_strides, batch, kv_head, first, num_k, V_HEAD_DIM, BLOCK_K, BLOCK_V_DIM, True)
        dk_sum = tl.zeros([BLOCK_K, BLOCK_DIM], tl.float32)
    if dv is not None:
        dv_sum = tl.zeros([BLOCK_K, BLOCK_V_DIM], tl.float32)
    t = key_positions(first, num_k, pairs, BLOCK_K) if POSITIONS else first + tl.arange(0, BLOCK_K)
    first_t = position_of(pairs, first, POSITIONS, True)
    if scores[3] is not None:
        words = key_words(scores[3], first, num_k, BLOCK_K, False)
    num_partial, num_full, begin, before = visits(
        block, mask_row, num_k, num_q, -hi, -lo, pairs, BLOCK_K, BLOCK_Q, PAIRS
    )
    unit = score_unit(scale, scores, SCALED) * LOG2_E
    for masked in tl.static_range(2):
        count = num_partial if masked else num_full
        if masked:
            firsts, lasts, k_ids = keys_seen(first, num_k, mask_row, lo, hi, pairs, BLOCK_K, PAIRS, DOCUMENTS)
        # n is counted: dividing by the count would let the compiler assume that it is positive
        n = 0
        next_block = inner_block(n, count, num_q, num_full, begin, before, pairs, BLOCK_Q, PAIRS, masked)
        next_head = kv_head * GROUP
        begin_at, step_at = run_at(pairs, next_block, count > 0, BLOCK_Q, POSITIONS, not masked, False)
        for _ in range(count * GROUP):
            other, head = BLOCK_Q * next_block, next_head
            slope = slope_of(scores, head)
            n = tl.where(n + 1 == count, 0, n + 1)
            next_head += (n == 0).to(tl.int32)
            next_block = inner_block(n, count, num_q, num_full, begin, before, pairs, BLOCK_Q, PAIRS, masked)
            queries = load(q, q_strides, batch, head, other, num_q, HEAD_DIM, BLOCK_Q, BLOCK_DIM, masked)
            base, shift = statistics(
                lse, delta, batch, head, num_heads, other, num_q, 0.0, BLOCK_Q, masked,
                bias_blocks is None,
            )  # fmt: skip
            rows = other + tl.arange(0, BLOCK_Q)
            if bias_blocks is not None and not masked:
                bias = bias_block(bias_blocks, batch, head, other, first_t, numbers, BLOCK_Q, BLOCK_K).T
            else:
                bias = bias_of(scores, batch, head, t[:, None], rows[None, :], num_q, numbers, not masked)
            x = tl.dot(keys, queries.T, input_precision="ieee")
            at, ids = rows, rows
            if masked:
                at, ids = queries_at(other, num_q, mask_row, pairs, BLOCK_Q, PAIRS, DOCUMENTS)
            near, along, step, sign = query_distances(
                t, first_t, at, (begin_at, step_at), BLOCK_Q, POSITIONS, not masked
            )
            begin_at, step_at = run_at(pairs, next_block, n < count, BLOCK_Q, POSITIONS, not masked, False)
            x, of_columns, derivative = scored(
                x, scale, slope, bias, near, along, step, sign, scores, SCALED, not masked, 1, keys.dtype == tl.float32
            )
            if POSITIONS and not masked:
                base -= of_columns * unit
            weights = tl.exp2(x * unit - base[None, :])
            if masked:
                allowed = allowed_pairs(
                    at[None, :], ids[None, :], firsts[:, None], lasts[:, None], k_ids[:, None], DOCUMENTS
                )
                weights = tl.where(allowed, weights, 0.0)
            if scores[3] is not None:
                one, two = query_words(scores[3], batch, head, num_heads, other, num_q, BLOCK_Q)
                # dropped weights are marked negative, which needs no extra register
                weights = keep(weights, -weights, one[None, :], two[None, :], words[:, None], numbers)
            douts = load(dout, dout_strides, batch, head, other, num_q, V_HEAD_DIM, BLOCK_Q, BLOCK_V_DIM, masked)
            if dv is not None:
                used = tl.maximum(weights, 0.0) if scores[3] is not None else weights
                dv_sum = tl.dot(used.to(douts.dtype), douts, dv_sum, input_precision="ieee")
            if dk is not None:
                if scores[0] is not None:
                    weights *= derivative  # before the next product: then there are no registers for both
                dweights = tl.dot(values, douts.T, input_precision="ieee")
                if scores[3] is not None:
                    dweights = tl.where(weights > 0.0, dweights, 0.0) * scores[3][3]
                    weights = tl.abs(weights)
                dx = weights * (dweights - shift[None, :])
                dk_sum = tl.dot(dx.to(queries.dtype), queries, dk_sum, input_precision="ieee")
    if dk is not None:
        store(dk, dk_strides, batch, kv_head, first, num_k, dk_sum * scale, HEAD_DIM, BLOCK_K, BLOCK_DIM)
    if dv is not None:
        if scores[3] is not None:
            dv_sum *= scores[3][3]
        store(dv, dv_strides, batch, kv_head, first, num_k, dv_sum, V_HEAD_DIM, BLOCK_K, BLOCK_V_DIM)


@triton.jit(do_not_specialize=RUNTIME)
def query_gradients_kernel(
    q,
    k,
    v,
    dout,
    lse,
    delta,
    dq,
    q_strides,
    k_strides,
    v_strides,
    dout_strides,
    dq_strides,
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
    dslopes,
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
    """Write dq of one block of queries, and its part of the gradients of slopes: fp32 dslopes [B, H, blocks]."""
    num_blocks = tl.cdiv(num_q, BLOCK_Q)
    batch, head, block = program(num_heads, num_blocks, LAST_FIRST=True)
    kv_head, mask_row, first = head // GROUP, (batch % num_masks).to(tl.int64), block * BLOCK_Q
    queries = load(q, q_strides, batch, head, first, num_q, HEAD_DIM, BLOCK_Q, BLOCK_DIM, True)
    douts = load(dout, dout_strides, batch, head, first, num_q, V_HEAD_DIM, BLOCK_Q, BLOCK_V_DIM, True)
    base, shift = statistics(lse, delta, batch, head, num_heads, first, num_q, float("inf"), BLOCK_Q, True, True)
    at, ids = queries_at(first, num_q, mask_row, pairs, BLOCK_Q, PAIRS, DOCUMENTS)
    first_at = position_of(pairs, first, POSITIONS, False)
    rows = first + tl.arange(0, BLOCK_Q)
    num_partial, num_full, begin, before = visits(block, mask_row, num_q, num_k, lo, hi, pairs, BLOCK_Q, BLOCK_K, PAIRS)
    slope = slope_of(scores, head)
    unit = score_unit(scale, scores, SCALED) * LOG2_E
    if scores[3] is not None:
        one, two = query_words(scores[3], batch, head, num_heads, first, num_q, BLOCK_Q)
    dq_sum = tl.zeros([BLOCK_Q, BLOCK_DIM], tl.float32)
    if dslopes is not None:
        dslope = tl.zeros([BLOCK_Q], tl.float32)
    for masked in tl.static_range(2):
        count = num_partial if masked else num_full
        key_block = inner_block(0, count, num_k, num_full, begin, before, pairs, BLOCK_K, PAIRS, masked)
        begin_at, step_at = run_at(pairs, key_block, count > 0, BLOCK_K, POSITIONS, not masked, True)
        for n in range(count):
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
            x, of_rows, derivative = scored(
                x, scale, slope, bias, near, along, step, sign, scores, SCALED, not masked, 0,
                queries.dtype == tl.float32,
            )  # fmt: skip
            of_pairs = base - of_rows * unit if POSITIONS and not masked else base
            weights = tl.exp2(x * unit - of_pairs[:, None])
            if masked:
                firsts, lasts, k_ids = keys_seen(other, num_k, mask_row, lo, hi, pairs, BLOCK_K, PAIRS, DOCUMENTS)
                allowed = allowed_pairs(
                    at[:, None], ids[:, None], firsts[None, :], lasts[None, :], k_ids[None, :], DOCUMENTS
                )
                weights = tl.where(allowed, weights, 0.0)
            values = load(v, v_strides, batch, kv_head, other, num_k, V_HEAD_DIM, BLOCK_K, BLOCK_V_DIM, masked)
            dweights = tl.dot(douts, values.T, input_precision="ieee")
            if scores[3] is not None:
                dweights = keep(dweights, 0.0, one[:, None], two[:, None], words[None, :], numbers) * scores[3][3]
            dx = weights * (dweights - shift[:, None])
            if dslopes is not None and masked:
                dslope -= tl.sum(dx * tl.abs(near[:, None] + along[None, :] * step).to(tl.float32), 1)
            elif dslopes is not None:
                dslope -= (tl.sum(dx, 1) * near + tl.sum(dx * along.to(tl.float32)[None, :], 1) * step) * sign
            if scores[0] is not None:
                dx *= derivative
            dq_sum = tl.dot(dx.to(keys.dtype), keys, dq_sum, input_precision="ieee")
    store(dq, dq_strides, batch, head, first, num_q, dq_sum * scale, HEAD_DIM, BLOCK_Q, BLOCK_DIM)
    place = (batch * num_heads + head) * num_blocks + block
    if dslopes is not None:
        tl.store(dslopes + place, tl.sum(dslope, 0))


@triton.jit(do_not_specialize=(*RUNTIME, "dbias_strides", "num_batch"))
def bias_gradient_kernel(
    q,
    k,
    v,
    dout,
    lse,
    delta,
    dbias,
    q_strides,
    k_strides,
    v_strides,
    dout_strides,
    dbias_strides,
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
    num_batch,
    EACH_BATCH: tl.constexpr,
    EACH_HEAD: tl.constexpr,
    EACH_ROW: tl.constexpr,
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
    """Write fp32 dbias at a block of keys and, if it has query rows, of queries; sum over the dims that it broadcasts.

    EACH_BATCH, EACH_HEAD and EACH_ROW: dbias has this dim.
    """
    num_blocks = tl.cdiv(num_q, BLOCK_Q)
    outer = tl.program_id(0)  # the first dim: it may exceed 65535, the limit of a grid's other dims
    key_block = tl.program_id(1)
    first_block = outer % num_blocks if EACH_ROW else 0
    outer = outer // num_blocks if EACH_ROW else outer
    first_head = outer % num_heads if EACH_HEAD else 0
    first_batch = outer // num_heads if EACH_HEAD else outer
    blocks = 1 if EACH_ROW else num_blocks
    heads = 1 if EACH_HEAD else num_heads
    batches = 1 if EACH_BATCH else num_batch
    other = key_block * BLOCK_K
    keys_inside = other + tl.arange(0, BLOCK_K) < num_k
    t = key_positions(other, num_k, pairs, BLOCK_K)
    unit = score_unit(scale, scores, SCALED) * LOG2_E
    if scores[3] is not None:
        words = key_words(scores[3], other, num_k, BLOCK_K, False)
    total = tl.zeros([BLOCK_Q, BLOCK_K], tl.float32)
    for step in range(batches * heads * blocks):
        first = (first_block + step % blocks) * BLOCK_Q
        head = first_head + step // blocks % heads
        batch = first_batch + step // blocks // heads
        mask_row, kv_head = (batch % num_masks).to(tl.int64), head // GROUP
        at, ids = queries_at(first, num_q, mask_row, pairs, BLOCK_Q, PAIRS, DOCUMENTS)
        firsts, lasts, k_ids = keys_seen(other, num_k, mask_row, lo, hi, pairs, BLOCK_K, PAIRS, DOCUMENTS)
        allowed = allowed_pairs(at[:, None], ids[:, None], firsts[None, :], lasts[None, :], k_ids[None, :], DOCUMENTS)
        rows = first + tl.arange(0, BLOCK_Q)
        if tl.max(tl.max(allowed.to(tl.int32), 1), 0) > 0:
            queries = load(q, q_strides, batch, head, first, num_q, HEAD_DIM, BLOCK_Q, BLOCK_DIM, True)
            keys = load(k, k_strides, batch, kv_head, other, num_k, HEAD_DIM, BLOCK_K, BLOCK_DIM, True)
            x = tl.dot(queries, keys.T, input_precision="ieee")
            bias = bias_of(scores, batch, head, t[None, :], rows[:, None], num_q, numbers, False)
            x, _, _ = scored(
                x, scale, slope_of(scores, head), bias, at, t, -1, 1.0, scores, SCALED, False, 0,
                queries.dtype == tl.float32,
            )  # fmt: skip
            base, shift = statistics(
                lse, delta, batch, head, num_heads, first, num_q, float("inf"), BLOCK_Q, True, True
            )
            weights = tl.where(allowed, tl.exp2(x * unit - base[:, None]), 0.0)
            douts = load(dout, dout_strides, batch, head, first, num_q, V_HEAD_DIM, BLOCK_Q, BLOCK_V_DIM, True)
            values = load(v, v_strides, batch, kv_head, other, num_k, V_HEAD_DIM, BLOCK_K, BLOCK_V_DIM, True)
            dweights = tl.dot(douts, values.T, input_precision="ieee")
            if scores[3] is not None:
                one, two = query_words(scores[3], batch, head, num_heads, first, num_q, BLOCK_Q)
                dweights = keep(dweights, 0.0, one[:, None], two[:, None], words[None, :], numbers) * scores[3][3]
            total += weights * (dweights - shift[:, None])
    dbias += tl.cast(first_batch, tl.int64) * dbias_strides[0] + tl.cast(first_head, tl.int64) * dbias_strides[1]
    places = t.to(tl.int64)
    keys_inside = keys_inside & (t < numbers[1])
    if EACH_ROW:
        rows = first_block * BLOCK_Q + tl.arange(0, BLOCK_Q)
        places = rows.to(tl.int64)[:, None] * dbias_strides[2] + places[None, :]
        tl.store(dbias + places, total, mask=(rows < num_q)[:, None] & keys_inside[None, :])
    else:
        tl.store(dbias + places, tl.sum(total, 0), mask=keys_inside)
