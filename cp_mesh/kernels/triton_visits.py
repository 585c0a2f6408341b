"""Which pairs the attention kernels compute: the mask at the rows of a tile, and the blocks to visit.

Every mask is an interval per key: query positions ``firsts[j] <= p <= lasts[j]`` of the same document see key j
(`Mask.key_intervals`). A band of local indices is the case p = i, firsts[j] = j + lo, lasts[j] = j + hi: no memory.

A program owns an outer block of rows and visits inner blocks: first the full blocks, whose pairs are all allowed and
need no mask, then the masked blocks. It skips blocks without an allowed pair. For a band, its bounds determine the
blocks; otherwise `blocks_kernel` lists them from the least and greatest position and document of each block.

Scores that read distances use blocks whose distances are affine in rows and keys and of one sign. All
other blocks count as masked: only in masked blocks do kernels read positions per row.

Legend: a "mask row" is a batch row of the mask, which may be shared by the batch; a "grain" is a fixed number of rows,
of which blocks consist; pairs = (positions of queries, firsts, lasts, q_ids, k_ids, blocks, counts, positions of keys),
or None for a band.
"""

# No annotations: Triton evaluates them, and accepts only its own types.
# mypy: disallow-untyped-defs=False

from __future__ import annotations

import triton
import triton.language as tl

NEVER = tl.constexpr(2**31 - 1)
"""Above every position: the ``first`` of a key that no query sees."""
NOWHERE = tl.constexpr(-(2**31))
"""Below every ``first``: the position of a query that sees no key."""
CHUNK = tl.constexpr(128)
"""Inner blocks that `blocks_kernel` tests at once."""
ALIGNED = tl.constexpr(8)
"""Positions, 16 bytes of a half-precision bias: block copies must begin at a multiple (H200: illegal instruction)."""


@triton.jit(debug=True, do_not_specialize=["num_rows"])  # device_assert costs nothing here
def grains_kernel(positions, firsts, lasts, ids, bounds, id_bounds, runs, num_rows, GRAIN: tl.constexpr):
    """Write bounds of the mask for each grain of rows; for queries, firsts and lasts are both their positions.

    Writes bounds [4, mask rows, grains]: least first, greatest last, greatest first, least last; id_bounds: least,
    greatest; runs [3, grains]: least and greatest position, and the step from each row to the next, or NEVER if steps
    differ.
    """
    grain, mask_row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    rows = grain * GRAIN + tl.arange(0, GRAIN)
    inside, place = rows < num_rows, mask_row * num_rows + rows
    first = tl.load(firsts + place, mask=inside, other=NEVER)
    last = tl.load(lasts + place, mask=inside, other=-NEVER)
    field = tl.num_programs(1).to(tl.int64) * tl.num_programs(0)
    bounds += mask_row * tl.num_programs(0) + grain
    tl.store(bounds, tl.min(first, 0))
    tl.store(bounds + field, tl.max(last, 0))
    tl.store(bounds + 2 * field, tl.max(first, 0))
    tl.store(bounds + 3 * field, tl.min(last, 0))
    if ids is not None:
        id, seen, greatest = tl.load(ids + place, mask=inside, other=0), first <= last, _greatest(ids.dtype.element_ty)
        id_bounds += mask_row * tl.num_programs(0) + grain
        tl.store(id_bounds, tl.min(tl.where(seen, id, greatest), 0))
        tl.store(id_bounds + field, tl.max(tl.where(seen, id, -greatest - 1), 0))
    if mask_row == 0:
        position = tl.load(positions + rows, mask=inside, other=0)
        tl.device_assert((position >= 0) & (position < NEVER), "positions must fit in 31 bits")
        _write_run(runs, grain, position, tl.load(positions + rows + 1, mask=rows + 1 < num_rows, other=-1), inside)


@triton.jit
def _write_run(runs, grain, position, following, inside):
    """Write ``runs`` of a grain; ``following``: positions of the next rows, -1 past the last one."""
    step = tl.where(following < 0, NOWHERE, following - position)
    steps = tl.max(step, 0)
    same = (tl.min(tl.where(step == NOWHERE, steps, step), 0) == steps) & (steps != NOWHERE)
    runs += grain
    tl.store(runs, tl.min(tl.where(inside, position, NEVER), 0).to(tl.int32))
    tl.store(runs + tl.num_programs(0), tl.max(tl.where(inside, position, -1), 0).to(tl.int32))
    tl.store(runs + 2 * tl.num_programs(0), tl.where(same, steps, NEVER).to(tl.int32))


@triton.jit
def _greatest(dtype: tl.constexpr):
    return tl.full([], (1 << (dtype.primitive_bitwidth - 1)) - 1, dtype)


@triton.jit(do_not_specialize=["num_outer", "num_inner", "num_inner_rows", "step"])
def blocks_kernel(
    outer,
    outer_ids,
    inner,
    inner_ids,
    runs,
    blocks,
    counts,
    num_outer,
    num_inner,
    num_inner_rows,
    step,
    INNER_KEYS: tl.constexpr,
    OUTER: tl.constexpr,
    INNER: tl.constexpr,
    INNER_ROWS: tl.constexpr,
):
    """List the inner blocks that each outer block visits: blocks int32 [mask rows, outer blocks, inner blocks].

    Masked blocks are listed from the front, full blocks from the back; counts [.., 2] are the numbers of both. An outer
    block is OUTER grains, an inner one INNER grains or INNER_ROWS rows; ``num_outer`` and ``num_inner`` count grains.
    If ``runs`` of outer and inner rows are given, a full block is listed as masked unless its distances are affine and
    of one sign, not 0, and its keys pass the test of `_run` for ``step``.
    """
    block, mask_row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    num_masks = tl.num_programs(1).to(tl.int64)
    grains = block * OUTER + tl.arange(0, OUTER)[None, :]
    first, last, late_first, early_last = _bounds(outer, grains, mask_row, num_masks, num_outer)
    least, greatest = first, last
    if outer_ids is not None:
        least, greatest = _id_bounds(outer_ids, grains, mask_row, num_masks, num_outer)
    if runs is not None:
        lowest, highest, affine = _run(runs[0], grains, num_outer, 0 if INNER_KEYS else step)
    num_blocks = tl.cdiv(num_inner, INNER)
    place = mask_row * tl.num_programs(0) + block
    blocks += place * num_blocks
    num_partial = tl.zeros([], tl.int32)
    num_full = tl.zeros([], tl.int32)
    for begin in range(0, num_blocks, CHUNK):
        other = begin + tl.arange(0, CHUNK)
        places = other[:, None] * INNER + tl.arange(0, INNER)[None, :]
        other_first, other_last, other_late, other_early = _bounds(inner, places, mask_row, num_masks, num_inner)
        visit = (other < num_blocks) & (other_first <= last) & (other_last >= first)
        if INNER_KEYS:
            full = (first >= other_late) & (last <= other_early)
        else:
            full = (other_first >= late_first) & (other_last <= early_last)
        if outer_ids is not None:
            other_least, other_greatest = _id_bounds(inner_ids, places, mask_row, num_masks, num_inner)
            visit = visit & (other_least <= greatest) & (other_greatest >= least)
            full = full & (other_least == other_greatest) & (least == greatest)
        if runs is not None:
            other_lowest, other_highest, other_affine = _run(runs[1], places, num_inner, step if INNER_KEYS else 0)
            full = full & affine & other_affine & ((lowest > other_highest) | (other_lowest > highest))
        full = visit & full & ((other + 1) * INNER_ROWS <= num_inner_rows)
        partial = visit & (full == 0)
        index = num_partial + tl.cumsum(partial.to(tl.int32), 0) - 1
        tl.store(blocks + index, other, mask=partial)
        index = num_blocks - num_full - tl.cumsum(full.to(tl.int32), 0)
        tl.store(blocks + index, other, mask=full)
        num_partial += tl.sum(partial.to(tl.int32), 0)
        num_full += tl.sum(full.to(tl.int32), 0)
    tl.store(counts + 2 * place, num_partial)
    tl.store(counts + 2 * place + 1, num_full)


@triton.jit
def _bounds(bounds, grains, mask_row, num_masks, num_grains):
    """Least first, greatest last, greatest first and least last over rows of grains."""
    pointers = bounds + mask_row * num_grains + grains
    field, inside = num_masks * num_grains, grains < num_grains
    return (
        tl.min(tl.load(pointers, mask=inside, other=NEVER), 1),
        tl.max(tl.load(pointers + field, mask=inside, other=-NEVER), 1),
        tl.max(tl.load(pointers + 2 * field, mask=inside, other=-NEVER), 1),
        tl.min(tl.load(pointers + 3 * field, mask=inside, other=NEVER), 1),
    )


@triton.jit
def _id_bounds(bounds, grains, mask_row, num_masks, num_grains):
    """Least and greatest id over rows of grains."""
    pointers = bounds + mask_row * num_grains + grains
    inside, greatest = grains < num_grains, _greatest(bounds.dtype.element_ty)
    least_id = tl.min(tl.load(pointers, mask=inside, other=greatest), 1)
    return least_id, tl.max(tl.load(pointers + num_masks * num_grains, mask=inside, other=-greatest - 1), 1)


@triton.jit
def _run(runs, grains, num_grains, step):
    """Least and greatest position of rows of grains, and whether neighbours are a constant step apart.

    If ``step`` is not 0, it must be this step, and the least position a multiple of ALIGNED.
    """
    pointers, inside = runs + grains, grains < num_grains
    steps = pointers + 2 * num_grains
    slowest = tl.min(tl.load(steps, mask=inside, other=NEVER), 1)
    least = tl.min(tl.load(pointers, mask=inside, other=NEVER), 1)
    wanted = (slowest != NEVER) & ((step == 0) | ((slowest == step) & (least % ALIGNED == 0)))
    return (
        least,
        tl.max(tl.load(pointers + num_grains, mask=inside, other=-1), 1),
        (slowest == tl.max(tl.load(steps, mask=inside, other=NOWHERE), 1)) & wanted,
    )


@triton.jit
def visits(
    outer, mask_row, num_outer, num_inner, lo, hi, pairs, OUTER: tl.constexpr, INNER: tl.constexpr, PAIRS: tl.constexpr
):
    """The inner blocks of an outer block, for `inner_block`: the counts of masked and full ones, and where they begin.

    A band allows the inner rows ``outer - hi`` to ``outer - lo`` of an outer row.
    """
    if PAIRS:
        place = mask_row * tl.cdiv(num_outer, OUTER) + outer
        num_partial, num_full = tl.load(pairs[6] + 2 * place), tl.load(pairs[6] + 2 * place + 1)
        return num_partial, num_full, place * tl.cdiv(num_inner, INNER), num_partial
    else:
        first = outer * OUTER
        last = tl.minimum(first + OUTER, num_outer) - 1
        begin_row, end_row = tl.maximum(first - hi, 0), tl.minimum(last - lo + 1, num_inner)
        begin = begin_row // INNER
        end = tl.where(begin_row < end_row, tl.cdiv(end_row, INNER), begin)
        full_begin = tl.minimum(tl.cdiv(tl.maximum(last - hi, 0), INNER), end)
        full_end = tl.minimum(tl.maximum(first - lo + 1, 0), num_inner) // INNER
        num_full = tl.maximum(full_end - full_begin, 0)
        return end - begin - num_full, num_full, begin, full_begin - begin


@triton.jit
def inner_block(
    n, count, num_inner, num_full, begin, num_before, pairs, INNER: tl.constexpr, PAIRS: tl.constexpr,
    MASKED: tl.constexpr,
):  # fmt: skip
    """The n-th of ``count`` masked or full blocks, from the results of `visits`; any number past the last one.

    Loops load it one block ahead: an address that depends on another load would shorten their pipelines.
    """
    if PAIRS:
        place = begin + (n if MASKED else tl.cdiv(num_inner, INNER) - 1 - n)
        return tl.load(pairs[5] + place, mask=n < count, other=0)
    elif MASKED:
        return begin + n + tl.where(n >= num_before, num_full, 0)
    else:
        return begin + num_before + n


@triton.jit
def program(num_heads, num_blocks, LAST_FIRST: tl.constexpr):
    """Batch row, head and block of this program; the blocks of a head run together."""
    program = tl.program_id(0)
    block = program % num_blocks
    if LAST_FIRST:  # with a causal mask the last queries have most keys: start the longest programs first
        block = num_blocks - 1 - block
    head = program // num_blocks % num_heads
    return program // num_blocks // num_heads, head, block


@triton.jit
def queries_at(first, num_q, mask_row, pairs, ROWS: tl.constexpr, PAIRS: tl.constexpr, DOCUMENTS: tl.constexpr):
    """Positions and document ids of query rows; rows past the end see no key."""
    rows = first + tl.arange(0, ROWS)
    ids, inside = rows, rows < num_q
    if PAIRS:
        place = mask_row * num_q + rows
        positions = tl.load(pairs[0] + place, mask=inside, other=NOWHERE)
        if DOCUMENTS:
            ids = tl.load(pairs[3] + place, mask=inside, other=0)
    else:
        positions = tl.where(inside, rows, NOWHERE)
    return positions, ids


@triton.jit
def keys_seen(first, num_k, mask_row, lo, hi, pairs, ROWS: tl.constexpr, PAIRS: tl.constexpr, DOCUMENTS: tl.constexpr):
    """First and last query position that see each key row, and document ids; no query sees rows past the end."""
    rows = first + tl.arange(0, ROWS)
    inside = rows < num_k
    ids = rows
    if PAIRS:
        place = mask_row * num_k + rows
        firsts = tl.load(pairs[1] + place, mask=inside, other=NEVER)
        lasts = tl.load(pairs[2] + place, mask=inside, other=-NEVER)
        if DOCUMENTS:
            ids = tl.load(pairs[4] + place, mask=inside, other=0)
    else:
        firsts, lasts = tl.where(inside, rows + lo, NEVER), rows + hi
    return firsts, lasts, ids


@triton.jit
def allowed_pairs(positions, q_ids, firsts, lasts, k_ids, DOCUMENTS: tl.constexpr):
    """Whether pairs are allowed, bool; arguments broadcast."""
    allowed = (positions >= firsts) & (positions <= lasts)
    if DOCUMENTS:
        allowed = allowed & (q_ids == k_ids)
    return allowed


@triton.jit
def key_positions(first, num_k, pairs, ROWS: tl.constexpr):
    """Positions of key rows of a `Pairs`; any number past the end."""
    rows = first + tl.arange(0, ROWS)
    return tl.load(pairs[7] + rows, mask=rows < num_k, other=0).to(tl.int32)


@triton.jit
def position_of(pairs, row, POSITIONS: tl.constexpr, KEYS: tl.constexpr):
    """Position of a row of keys or of queries; any number without POSITIONS."""
    return tl.load(pairs[7 if KEYS else 0] + row).to(tl.int32) if POSITIONS else row


@triton.jit
def run_at(
    pairs, block, any_block, ROWS: tl.constexpr, POSITIONS: tl.constexpr, ONE_SIGN: tl.constexpr, KEYS: tl.constexpr
):
    """Position of the first row of a block, and the step to the next; any numbers without ``any_block``.

    Only ONE_SIGN blocks are runs. Loops load it one block ahead, like `inner_block`.
    """
    if POSITIONS and ONE_SIGN:
        return _steps(pairs[7 if KEYS else 0], block * ROWS, any_block)
    else:
        return 0, 0


@triton.jit
def key_distances(
    at, first_at, other, run, num_k, pairs, ROWS: tl.constexpr, POSITIONS: tl.constexpr, ONE_SIGN: tl.constexpr
):
    """Distances of queries at positions ``at``, the first at ``first_at``, from keys at row ``other`` on, with ``run``.

    Returns near, along, step and sign, with distances near + along · step, all of this sign if ONE_SIGN; and the
    positions of the keys. Without POSITIONS these are any numbers.
    """
    along = tl.arange(0, ROWS)
    if not POSITIONS:
        return at, along, 1, 1.0, along
    elif ONE_SIGN:
        begin, step = run
        return at - begin, along, -step, _sign(first_at, begin), begin + along * step
    else:
        t = key_positions(other, num_k, pairs, ROWS)
        return at, t, -1, 1.0, t


@triton.jit
def query_distances(t, first_t, at, run, ROWS: tl.constexpr, POSITIONS: tl.constexpr, ONE_SIGN: tl.constexpr):
    """near, along, step and sign, as in `key_distances`, of keys at positions ``t`` and queries ``at`` with ``run``."""
    along = tl.arange(0, ROWS)
    if not POSITIONS:
        return t, along, 1, 1.0
    elif ONE_SIGN:
        begin, step = run
        return begin - t, along, step, _sign(begin, first_t)
    else:
        return -t, at, 1, 1.0


@triton.jit
def _steps(positions, first, any_block):
    begin = tl.load(positions + first, mask=any_block, other=0).to(tl.int32)
    return begin, tl.load(positions + first + 1, mask=any_block, other=0).to(tl.int32) - begin


@triton.jit
def _sign(p, t):
    return tl.where(p > t, 1.0, -1.0)
