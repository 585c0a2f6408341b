"""Memory: what a call needs beyond its inputs and results, from its schedule. A formula, held to measurements.

Per row, in one of n head chunks: F = B·(K/n)·(D + Dv) elements of keys and values, Q = B·(H/n)·D of queries.

    symmetric memory, kept from call to call
        local rows · F                                 K and V where others can read them
        rows that others fetch · F                     a slot for the gradients that each of them computes; every rank
                                                       allocates what the rank that serves most needs. On two ranks it
                                                       lies where the rows did, and the larger of the two counts
    forward, at its end
        rows of all tiles · B·(H/n)·(Dv elements + 4)  partial outputs and their lse, merged once
        and, while the first tile is computed, all rows fetched · F; while stage s is, those fetched in it and later,
        with the partial outputs so far, less, in one chunk, the results, which are made last
    backward, while stage s is computed, the largest over s
        rows fetched in stage s and later · F          keys that arrived or will
        rows fetched in stages s - 2 to s · F          gradients on their way to the owners
        rows of the tiles so far · Q                   partial dq, summed once
        rows of the tile · Q · 4 bytes                 the kernel's own fp32 dq, and with grouped queries
        keys of the tile · F · 4 bytes                 its fp32 dk and dv
        less, in one chunk, the results                dq, dk and dv, made after the last tile; at that time all partial
                                                       dq are held, and dk and dv of the local keys

Functional collectives have no symmetric memory. They hold the keys of stage s and of the next, packed copies of the
rows that the next one serves, gradients of stages s - 1 and s on their way, and those that arrived. In the forward the
local tiles come first, beside the rows of the first stage and the copies that it serves.

All-gather has one stage; for the hybrid there is no formula yet. Ulysses holds rows of the whole sequence S, of a
part of a rank's heads, here H/(n·cp) and K as many as these read, R = B·(H·D + K·(D + Dv)) elements of q, k and v, O
= B·H·(Dv elements + 4) of out and lse:

    symmetric memory                                   the largest buffer that it sends: in the backward, mostly
    kept       rows · (R + O)                          of all parts, from the forward to the backward; in training it is
                                                       in the place of this rank's own q, k and v
    forward    rows · 2·R                              what arrived, and the same in the order of positions
               rows · (R + O)                          while tiles are computed: what arrived, and results; of several
                                                       tiles as the kernel gives them, and merged
               rows · (R + O + out)                    out on its way home: what was computed, what arrived
    backward   rows · 2·B·H·Dv                         beside what is kept: dout, as above
               rows · (B·H·Dv + R)                     while tiles are computed, with gradients as the kernel gives
                                                       them, of several tiles also summed, its own fp32 sums as in the
                                                       ring, and delta
               rows · 2·R                              gradients on their way home
Kv heads that are sent several times are not kept, as they would be more than a rank's own: they, as often as they are
sent, are held in both passes, lse comes home with out, and the backward holds rows · 2·(R + B·H·Dv + O) when dout, q,
k, v, out (or delta) and lse have arrived. Over functional collectives what is sent is held once more where what arrived
is. Contiguous needs no other order.

Not counted: gradients of the scores' tensors while they are summed in fp32. That of a dense bias is 4 bytes an element
of the bias, on top of the result.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from cp_mesh.schedule import Schedule, Tile, enclosing


@dataclass(frozen=True)
class Sizes:
    """What the formula reads of q, k and v: of all heads of this rank, and bytes of an element.

    ``gradient_itemsize`` is that of dk and dv as they travel: 2 for half precision where the kernel rounds them and no
    two tiles of a message share rows (zigzag and striped causal, full; joined tiles), else 4; 8 for float64.
    """

    batch: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    v_head_dim: int
    itemsize: int
    gradient_itemsize: int


@dataclass(frozen=True)
class ExtraMemory:
    """Bytes beyond inputs and results, on this rank: the peaks of the two passes, and what is kept between them."""

    forward: int
    backward: int
    symmetric: int

    @property
    def peak(self) -> int:
        """The larger of the two passes, plus ``symmetric``."""
        return max(self.forward, self.backward) + self.symmetric


def extra_memory(
    schedule: Schedule, sizes: Sizes, head_chunks: int, transport: str, one_tile: bool = False
) -> ExtraMemory:
    """The formula above for one rank.

    Args:
        schedule: the rank's, as the method makes it (`cp_mesh.methods.Method.make_schedule`).
        sizes: of its tensors.
        head_chunks: number of parts that the kv heads are computed in.
        transport: "symmetric_memory" or "functional".
        one_tile: whether the kernel is given the tiles of a step as one (`cp_mesh.methods.contract.as_one_tile`).
    """
    route = schedule.route
    heads, kv_heads = sizes.num_heads // head_chunks, sizes.num_kv_heads // head_chunks
    row = sizes.batch * kv_heads * (sizes.head_dim + sizes.v_head_dim)
    key_row, gradient_row = row * sizes.itemsize, row * sizes.gradient_itemsize
    out_row = sizes.batch * heads * (sizes.v_head_dim * sizes.itemsize + 4)
    dq_row = sizes.batch * heads * sizes.head_dim * sizes.itemsize
    own_row = sizes.batch * heads * sizes.head_dim * 4
    key_sum_row = row * 4 if heads > kv_heads else 0
    on_wires = transport == "symmetric_memory"
    fetched = [stage.num_fetched for stage in route.stages]
    served = [sum(end - begin for _, ranges in stage.serve for begin, end in ranges) for stage in route.stages]

    # One visit is a stage, and the local tiles at the end; keys, gradients and partial results at that time.
    visits = [*(stage.tiles for stage in route.stages), schedule.local_tiles]
    visits = [enclosing(tiles) for tiles in visits] if one_tile else visits
    keys_held = [
        sum(fetched[i:]) if on_wires else sum(fetched[i : i + 2]) + sum(served[i + 1 : i + 2])
        for i in range(len(visits))
    ]
    num_rows, tile_rows = schedule.shard_lens[schedule.cp_rank], sum(map(_rows, visits[-1]))
    results = num_rows * out_row if head_chunks == 1 else 0
    forward = (sum(fetched) if on_wires else sum(fetched[:1]) + sum(served[:1])) * key_row + tile_rows * out_row
    for keys, tiles in zip(keys_held, visits[:-1], strict=False):
        tile_rows += sum(map(_rows, tiles))
        forward = max(forward, keys * key_row + tile_rows * out_row - results)
    forward = max(forward, tile_rows * out_row)
    backward, tile_rows, arrived = 0, 0, 0
    for i, tiles in enumerate(visits):
        tile_rows += sum(map(_rows, tiles))
        sent = sum(fetched[max(0, i - (2 if on_wires else 1)) : i + 1])
        own = max((_rows(tile) * own_row + _keys(tile) * key_sum_row for tile in tiles), default=0)
        local = sum(map(_keys, tiles)) * gradient_row if i == len(fetched) else 0
        pieces = tile_rows * dq_row + arrived * gradient_row + local
        backward = max(backward, keys_held[i] * key_row + sent * gradient_row + pieces + own)
        arrived += served[i] if i < len(served) and not on_wires else 0
    if head_chunks == 1:
        backward = max(backward - num_rows * (dq_row + key_row), pieces)
    symmetric = 0
    if on_wires and route.stages:
        parts = max(schedule.shard_lens) * key_row, route.most_served * gradient_row
        symmetric = max(parts) if schedule.cp_size == 2 else sum(parts)
    return ExtraMemory(forward, backward, symmetric)


def ulysses_memory(
    whole: Schedule,
    cp_size: int,
    sizes: Sizes,
    head_chunks: int,
    transport: str,
    one_tile: bool = False,
    uses_delta: bool = True,
) -> ExtraMemory:
    """The formula above of Ulysses, where ranks hold equally many rows: all are alike.

    Args:
        whole: the schedule of one device that holds the whole sequence.
        cp_size: number of ranks.
        sizes, transport, one_tile: as in `extra_memory`.
        head_chunks: parts of a rank's heads that are computed one after the other.
        uses_delta: whether the kernel's backward is given delta instead of out.
    """
    rows, of_kv = whole.shard_lens[0], kv_heads_of_rank(sizes, cp_size)
    B, H, K = sizes.batch, sizes.num_heads // cp_size // head_chunks, of_kv // head_chunks
    tiles = enclosing(whole.local_tiles) if one_tile else whole.local_tiles
    tile_rows, tile_keys = sum(map(_rows, tiles)), sum(map(_keys, tiles))
    q, out, kv = (B * n for n in (H * sizes.head_dim, H * sizes.v_head_dim, K * (sizes.head_dim + sizes.v_head_dim)))
    e, lse = sizes.itemsize, B * H * 4
    ways = 2 if transport == "symmetric_memory" or cp_size == 1 else 3  # computed, arrived, and sent
    is_kept = of_kv * cp_size == sizes.num_kv_heads and cp_size > 1

    qkv, result, home = (q + kv) * e, out * e + lse, q * e + kv * sizes.gradient_itemsize
    given = out * e if is_kept else (q + kv + out) * e + (lse if uses_delta else out * e) + lse
    of_home = out * e if is_kept else result
    once = len(tiles) == 1 and (tile_rows, tile_keys) == (rows, rows)  # the kernel's results are those of the pass
    forward = max(rows * 2 * qkv, rows * (qkv + result * (not once)) + tile_rows * result)
    sent_home = rows * (result + (ways - 1) * of_home + (qkv if is_kept and head_chunks == 1 else 0))
    own = max((_rows(tile) * q * 4 + (_keys(tile) * kv * 4 if H > K else 0) for tile in tiles), default=0)
    computing = rows * (given + home * (not once)) + tile_rows * q * e + tile_keys * kv * e + own
    computing += rows * lse * (uses_delta if is_kept else 1 + uses_delta)
    forward, backward = max(forward, sent_home), max(rows * 2 * given, computing, rows * ways * home)
    if is_kept:
        kept = rows * head_chunks * (qkv + result)
        forward, backward = forward + (kept if head_chunks > 1 else 0), backward + kept
    elif cp_size > 1:
        repeated = rows // cp_size * kv * cp_size * head_chunks
        forward += repeated * e
        backward += repeated * (e + sizes.gradient_itemsize) + (rows * lse * head_chunks if uses_delta else 0)
    symmetric = rows * max(qkv, of_home, given, home) if transport == "symmetric_memory" and cp_size > 1 else 0
    return ExtraMemory(forward, backward, symmetric)


def kv_heads_of_rank(sizes: Sizes, cp_size: int) -> int:
    """Of Ulysses: those that a rank's query heads read, in groups that are equal on all ranks."""
    heads = sizes.num_heads // cp_size
    return heads // math.gcd(sizes.num_heads // sizes.num_kv_heads, heads)


def _rows(tile: Tile) -> int:
    return tile.q[1] - tile.q[0]


def _keys(tile: Tile) -> int:
    return tile.k[1] - tile.k[0]
