"""Triton kernels of `cp_mesh.inference.split_kv`: attention over splits of the keys, one program each, and their merge.

Rows of a kv head's group are packed: row r is query row r % num_q of query head kv_head * GROUP + r // num_q. Keys are
read once for all of them. ``scores`` and ``numbers`` are as in `cp_mesh.kernels.triton_tiles`; ``pairs`` = (positions
of queries, positions of keys), int64, or None where all rows see all keys; ``reaches`` are the mask's, flattened.
"""

# Triton reads annotations as code, and accepts only its own.
# mypy: disallow-untyped-defs=False

from __future__ import annotations

import triton
import triton.language as tl

from cp_mesh.kernels.triton_tiles import LOG2_E, exact_tanh


@triton.jit(
    do_not_specialize=["num_heads", "num_q", "num_k", "num_splits", "reaches"],
)
def splits_kernel(
    q,
    k,
    v,
    outs,
    lses,
    q_strides,
    k_strides,
    v_strides,
    num_kept,
    pairs,
    softcap,
    slopes,
    num_heads,
    num_q,
    num_k,
    num_splits,
    reaches,
    scale,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    V_HEAD_DIM: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
    BLOCK_V_DIM: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Write outs [num_splits, B, H, Sq, Dv] and lses [num_splits, B, H, Sq], fp32, contiguous, of one split of keys."""
    split, block = tl.program_id(0) % num_splits, tl.program_id(0) // num_splits
    num_blocks, num_kv_heads = tl.cdiv(GROUP * num_q, BLOCK_Q), num_heads // GROUP
    row_block, kv_head = block % num_blocks, block // num_blocks % num_kv_heads
    batch = (block // num_blocks // num_kv_heads).to(tl.int64)
    packed = row_block * BLOCK_Q + tl.arange(0, BLOCK_Q)
    inside, rows, heads = packed < GROUP * num_q, packed % num_q, kv_head * GROUP + packed // num_q
    cols, v_cols = tl.arange(0, BLOCK_DIM), tl.arange(0, BLOCK_V_DIM)
    q += batch * q_strides[0] + heads.to(tl.int64)[:, None] * q_strides[1] + rows.to(tl.int64)[:, None] * q_strides[2]
    queries = tl.load(q + cols[None, :], mask=inside[:, None] & (cols < HEAD_DIM)[None, :], other=0.0)
    k += batch * k_strides[0] + kv_head.to(tl.int64) * k_strides[1]
    v += batch * v_strides[0] + kv_head.to(tl.int64) * v_strides[1]

    kept = num_k
    if num_kept is not None:
        kept = tl.minimum(tl.load(num_kept), num_k).to(tl.int32)
    length_of_split = tl.cdiv(tl.cdiv(kept, BLOCK_K), num_splits) * BLOCK_K
    begin = split * length_of_split
    end = tl.minimum(begin + length_of_split, kept)
    if pairs is not None:
        at = tl.load(pairs[0] + rows, mask=inside, other=0)
    if slopes is not None:
        slope = tl.load(slopes + heads, mask=inside, other=0.0)
    acc = tl.zeros([BLOCK_Q, BLOCK_V_DIM], tl.float32)
    largest = tl.full([BLOCK_Q], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_Q], tl.float32)
    for first in tl.range(begin, end, BLOCK_K):
        others = first + tl.arange(0, BLOCK_K)
        seen = others < end
        if pairs is not None:
            t = tl.load(pairs[1] + others, mask=seen, other=0)
            distance = at[:, None] - t[None, :]
            nearest, farthest = tl.full([BLOCK_K], 0, tl.int32), tl.full([BLOCK_K], -1, tl.int32)  # no row sees it
            for n in tl.static_range(0, len(reaches), 4):
                inside_reach = (t >= reaches[n]) & (t < reaches[n + 1])
                nearest = tl.where(inside_reach, reaches[n + 2], nearest)
                farthest = tl.where(inside_reach, reaches[n + 3], farthest)
            allowed = (distance >= nearest[None, :]) & (distance <= farthest[None, :]) & seen[None, :]
            seen = tl.max((allowed & inside[:, None]).to(tl.int32), 0) > 0  # keys that no row sees are not read
        else:
            allowed = seen[None, :]
        places = others.to(tl.int64)[:, None]
        keys = tl.load(k + places * k_strides[2] + cols[None, :], mask=seen[:, None] & (cols < HEAD_DIM), other=0.0)
        x = tl.dot(queries, keys.T, input_precision="ieee") * scale
        if softcap is not None:
            x = exact_tanh(x / softcap) * softcap
        if slopes is not None:
            x -= slope[:, None] * tl.abs(distance).to(tl.float32)
        x = tl.where(allowed, x * LOG2_E, float("-inf"))
        new = tl.maximum(largest, tl.max(x, 1))
        base = tl.where(new == float("-inf"), 0.0, new)  # no key so far: -inf - -inf is NaN
        weights, decay = tl.exp2(x - base[:, None]), tl.exp2(largest - base)
        total = total * decay + tl.sum(weights, 1)
        values = tl.load(
            v + places * v_strides[2] + v_cols[None, :], mask=seen[:, None] & (v_cols < V_HEAD_DIM), other=0.0
        )
        acc = tl.dot(weights.to(values.dtype), values, acc * decay[:, None], input_precision="ieee")
        largest = new
    alone = total == 0
    total = tl.where(alone, 1.0, total)
    num_batches = tl.num_programs(0) // num_splits // num_blocks // num_kv_heads
    place = ((split * num_batches + batch) * num_heads + heads) * num_q + rows
    tl.store(
        outs + place[:, None] * V_HEAD_DIM + v_cols[None, :],
        acc / total[:, None],
        mask=inside[:, None] & (v_cols < V_HEAD_DIM)[None, :],
    )
    tl.store(lses + place, tl.where(alone, float("-inf"), (largest + tl.log2(total)) / LOG2_E), mask=inside)


@triton.jit(do_not_specialize=["num_splits", "num_rows"])
def merge_splits_kernel(
    outs,
    lses,
    out,
    lse,
    num_splits,
    num_rows,
    V_HEAD_DIM: tl.constexpr,
    BLOCK_V_DIM: tl.constexpr,
    SPLITS: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """Write one row of out [num_rows, Dv] and lse [num_rows], fp32, contiguous, from the results of all splits."""
    row, splits, cols = tl.program_id(0), tl.arange(0, SPLITS), tl.arange(0, BLOCK_V_DIM)
    each = tl.load(lses + splits * num_rows + row, mask=splits < num_splits, other=float("-inf"))
    largest = tl.max(each, 0)
    largest = tl.where(largest == float("-inf"), 0.0, largest)
    total = tl.sum(tl.exp(each - largest), 0)
    merged = tl.zeros([BLOCK_V_DIM], tl.float32)
    for first in range(0, num_splits, CHUNK):
        some = first + tl.arange(0, CHUNK)
        inside = some < num_splits
        weight = tl.exp(tl.load(lses + some * num_rows + row, mask=inside, other=float("-inf")) - largest)
        x = outs + (some * num_rows + row).to(tl.int64)[:, None] * V_HEAD_DIM + cols[None, :]
        x = tl.load(x, mask=inside[:, None] & (cols < V_HEAD_DIM)[None, :], other=0.0)
        merged += tl.sum(weight[:, None] * x, 0)
    alone = total == 0
    total = tl.where(alone, 1.0, total)
    tl.store(out + row.to(tl.int64) * V_HEAD_DIM + cols, merged / total, mask=cols < V_HEAD_DIM)
    tl.store(lse + row, tl.where(alone, float("-inf"), largest + tl.log(total)))


@triton.jit(debug=True, do_not_specialize=["num_heads", "num_new", "num_places"])  # device_assert costs nothing here
def append_kernel(
    key,
    value,
    to_key,
    to_value,
    key_strides,
    value_strides,
    to_key_strides,
    to_value_strides,
    rows,
    counts,
    taken,
    num_keys,
    ticket,
    num_heads,
    num_new,
    num_places,
    DIM: tl.constexpr,
    V_DIM: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
    BLOCK_V_DIM: tl.constexpr,
):
    """Copy the new rows of one batch row and head to their places; the last program updates the counts.

    A program is one warp, so it loads ``taken`` before its atomic add to ``ticket``.
    """
    batch, head = (tl.program_id(0) // num_heads).to(tl.int64), (tl.program_id(0) % num_heads).to(tl.int64)
    begin = tl.load(taken)
    tl.device_assert(begin + num_new <= num_places, "ShardedCache: more tokens than its capacity")
    cols, v_cols = tl.arange(0, BLOCK_DIM), tl.arange(0, BLOCK_V_DIM)
    for n in range(num_new):
        row = tl.load(rows + begin + n)
        x = tl.load(
            key + batch * key_strides[0] + head * key_strides[1] + n * key_strides[2] + cols * key_strides[3],
            mask=cols < DIM,
        )
        to = to_key + batch * to_key_strides[0] + head * to_key_strides[1] + row * to_key_strides[2] + cols
        tl.store(to, x, mask=cols < DIM)
        x = tl.load(
            value
            + batch * value_strides[0]
            + head * value_strides[1]
            + n * value_strides[2]
            + v_cols * value_strides[3],
            mask=v_cols < V_DIM,
        )
        to = to_value + batch * to_value_strides[0] + head * to_value_strides[1] + row * to_value_strides[2] + v_cols
        tl.store(to, x, mask=v_cols < V_DIM)
    if tl.atomic_add(ticket, 1) == tl.num_programs(0) - 1:
        tl.store(ticket, 0)
        tl.store(taken, begin + num_new)
        tl.store(num_keys, tl.load(counts + begin + num_new))
