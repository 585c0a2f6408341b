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

All-gather has one stage. For Ulysses and the hybrid there is no formula here: they hold a copy of q, k, v and out, of
a rank's heads and the rows of its inner group.

Not counted: gradients of the scores' tensors while they are summed in fp32. That of a dense bias is 4 bytes an element
of the bias, on top of the result.
"""

from __future__ import annotations

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


def _rows(tile: Tile) -> int:
    return tile.q[1] - tile.q[0]


def _keys(tile: Tile) -> int:
    return tile.k[1] - tile.k[0]
