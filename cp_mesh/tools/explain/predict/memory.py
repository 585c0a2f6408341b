"""Memory of a call beyond its inputs and results, by a formula over its schedule; tests compare it with allocations.

Per row, in one of n head chunks: F = B·(K/n)·(D + Dv) elements of keys and values, Q = B·(H/n)·D of queries.

    symmetric memory, kept from call to call
        local rows · F                                 K and V where other ranks can read them
        rows that other ranks fetch · F                a slot for the gradients that each of them computes. Every rank
                                                       allocates as much as the rank that serves most rows. With two
                                                       ranks both share one buffer, as large as the larger one
    forward, at its end
        rows of all tiles · B·(H/n)·(Dv elements + 4)  partial outputs and their lse, merged once
        During the first tile also all fetched rows · F. During stage s also rows fetched in stages s and later, with
        the partial outputs so far; with one head chunk minus the results, which are allocated last
    backward, during stage s; the largest over s
        rows fetched in stage s and later · F          keys that have arrived or will arrive
        rows fetched in stages s - 2 to s · F          gradients in transit to the owners
        rows of the tiles so far · Q                   partial dq, summed once
        rows of the tile · Q · 4 bytes                 the kernel's own fp32 dq, and with grouped queries
        keys of the tile · F · 4 bytes                 its fp32 dk and dv
        minus, with one head chunk, the results        dq, dk and dv are allocated after the last tile; then all partial
                                                       dq, and dk and dv of the local keys, are live

A sum holds at most `MAX_PIECES` pieces of out, dq or arrived gradients, and then folds them into one in fp32. If
gradients travel in fp32, or two tiles of a stage share keys, the kernel's gradients of that stage are live as well.

Functional collectives use no symmetric memory. They hold the keys of stage s and of the next stage, packed copies of
the rows that the next stage serves, gradients of stages s - 1 and s in transit, and the arrived gradients. In the
forward the local tiles come first, beside the rows of the first stage and the packed copies for it.

All-gather has one stage.

Ulysses holds rows of the whole sequence S for a part of a rank's heads: here H means H/(n·cp) query heads, K the kv
heads that they read, R = B·(H·D + K·(D + Dv)) elements of q, k and v, and O = B·H·(Dv elements + 4) of out and lse:

    symmetric memory                                   the largest buffer that it sends, mostly in the backward
    kept       rows · (R + O)                          all head chunks, from the forward to the backward; in training it
                                                       replaces this rank's own q, k and v
    forward    rows · 2·R                              arrived rows, and the same rows in order of positions
               rows · (R + O)                          during tiles: arrived rows, and results; with several tiles both
                                                       the kernel's results and the merged ones
               rows · (R + O + out)                    all-to-all of out: sent and received
    backward   rows · 2·B·H·Dv                         beside what is kept: dout, arrived and reordered
               rows · (B·H·Dv + R)                     during tiles, with the kernel's gradients; with several tiles
                                                       also their sums; the kernel's own fp32 sums as in the ring, and
                                                       delta
               rows · 2·R                              all-to-all of gradients: sent and received
Kv heads that are sent to several ranks are not kept, since they would exceed a rank's own: both passes hold all their
copies, lse returns with out, and the backward holds rows · 2·(R + B·H·Dv + O) when dout, q, k, v, out (or delta) and
lse have arrived. Functional collectives hold the sent buffer once more beside the received one. Contiguous needs no
reordering. The hybrid has the rows of an inner group in place of S, and a ring's memory over these rows in place of the
results of one device.

Not counted: gradients of the scores' other tensors while they are summed in fp32. A dense bias needs 4 bytes per
element beside its result. With kernel="flex" also copies of gradients of elements that many pairs read.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import NamedTuple

from cp_mesh.geometry.schedule import Schedule, Stage, Tile, enclosing
from cp_mesh.kernels.combine import MAX_PIECES
from cp_mesh.latent.expand import heads_at_once


@dataclass(frozen=True)
class Sizes:
    """Sizes of q, k and v with all heads of this rank, and bytes per element.

    ``gradient_itemsize``: of dk and dv in transit. It is 2 for half precision if the kernel rounds them and no two
    tiles of a message share rows (zigzag and striped causal, full; joined tiles), else 4; 8 for float64.
    ``home_itemsize``: of dk and dv in the all-to-all that returns exchanged heads; 0: the same.
    ``latent_dim``: features of a token's latent and rotary keys, which are then the only kv head; 0: none.
    ``latent_chunks``: parts of the heads that a tile expands one after the other; 0: as many as the bytes ask for.
    """

    batch: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    v_head_dim: int
    itemsize: int
    gradient_itemsize: int
    home_itemsize: int = 0
    latent_dim: int = 0
    latent_chunks: int = 0

    @property
    def row_dim(self) -> int:
        """Features of a kv head's key and value."""
        return self.latent_dim or self.head_dim + self.v_head_dim


@dataclass(frozen=True)
class ExtraMemory:
    """Bytes beyond inputs and results on this rank: the peak of each pass, and the symmetric memory beside both."""

    forward: int
    backward: int
    symmetric: int

    @property
    def peak(self) -> int:
        """The larger of the two passes, plus ``symmetric``."""
        return max(self.forward, self.backward) + self.symmetric


def extra_memory(
    schedule: Schedule,
    sizes: Sizes,
    head_chunks: int,
    transport: str,
    one_tile: bool = False,
    rounds: bool = True,
    made_last: bool = True,
    result_itemsize: int = 0,
) -> ExtraMemory:
    """Evaluate the formula above for one rank of a method that fetches rows in stages.

    Args:
        schedule: the rank's schedule (`cp_mesh.call.method.Method.make_schedule`).
        sizes: of its tensors.
        head_chunks: number of chunks in which heads are computed.
        transport: "symmetric_memory" or "functional".
        one_tile: whether the kernel gets the tiles of a step as one tile (`cp_mesh.call.method.takes_one_tile`).
        rounds: whether the kernel returns gradients in the inputs' dtype.
        made_last: whether results are allocated after the last tile if there is one head chunk. False if there is only
            one tile, whose outputs are the results.
        result_itemsize: bytes per element of dk and dv; 0: as for the inputs.
    """
    tiles, route = visits(schedule, one_tile), schedule.route
    most_keys = max((_keys(tile) for part in tiles for tile in part), default=0)
    rows = _Rows.of(sizes, head_chunks, rounds, result_itemsize or sizes.itemsize, most_keys)
    own_rows, on_wires = schedule.shard_lens[schedule.cp_rank], _on_wires(transport)
    made_last &= head_chunks == 1
    call = _Call(own_rows, route.stages, _held_keys(route.stages, on_wires), tiles, rows, on_wires, made_last)
    symmetric = 0
    if on_wires and route.stages:
        of_group = max(schedule.shard_lens) * rows.key, route.most_served * rows.gradient
        symmetric = max(of_group) if schedule.cp_size == 2 else sum(of_group)
    return ExtraMemory(_forward(call), _backward(call), symmetric)


class _Call(NamedTuple):
    """Data of both passes of a rank: its rows and stages, the keys held, the tiles of each stage and the local ones."""

    own_rows: int
    stages: Sequence[Stage]
    keys: Sequence[int]
    tiles: Sequence[Sequence[Tile]]
    rows: _Rows
    on_wires: bool
    made_last: bool


class _Rows(NamedTuple):
    """Bytes per row, for the heads of one chunk.

    Attributes:
        key: keys and values.
        gradient, piece, sum, result: dk and dv in transit, as the kernel returns them, summed, and as results.
        out, out_sum: partial outputs with their lse, as returned and summed.
        dq, dq_sum: as returned and summed.
        own_dq, own_dkv: fp32 sums inside the kernel; of latent rows keys and values that it expands, and their
            gradients.
        own_kv, in_parts: what it expands in a forward, and whether it then joins results of parts of the heads.
    """

    key: int
    gradient: int
    piece: int
    sum: int
    result: int
    out: int
    out_sum: int
    dq: int
    dq_sum: int
    own_dq: int
    own_dkv: int
    own_kv: int
    in_parts: bool

    @classmethod
    def of(cls, sizes: Sizes, head_chunks: int, rounds: bool, result_itemsize: int, most_keys: int) -> _Rows:
        heads, kv_heads = sizes.num_heads // head_chunks, sizes.num_kv_heads // head_chunks
        row = sizes.batch * kv_heads * sizes.row_dim
        out, q, number = (sizes.batch * heads * n for n in (sizes.v_head_dim, sizes.head_dim, 1))
        wide = max(4, sizes.itemsize)
        of_head = sizes.batch * (sizes.head_dim + sizes.v_head_dim) * sizes.itemsize
        at_once = heads_at_once(heads, of_head * most_keys, sizes.latent_chunks) if sizes.latent_dim else 0
        own_kv = at_once and row * sizes.itemsize + at_once * of_head
        return cls(
            key=row * sizes.itemsize,
            gradient=row * sizes.gradient_itemsize,
            piece=row * (sizes.itemsize if rounds else wide),
            sum=row * wide,
            result=row * result_itemsize,
            out=out * sizes.itemsize + number * 4,
            out_sum=(out + number) * wide,
            dq=q * sizes.itemsize,
            dq_sum=q * wide,
            own_dq=q * 4 * (at_once or heads) // heads,
            own_dkv=own_kv + at_once * of_head or (row * 4 if heads > kv_heads else 0),
            own_kv=own_kv,
            in_parts=0 < at_once < heads,
        )


def _tiles_of_backward(tiles: Sequence[Tile], rows: _Rows, dq: _Pieces, is_local: bool) -> int:
    """Peak of dq, the kernel's sums, and those gradients of keys that are not written to the send buffer directly."""
    apart, most = 0, dq.held
    overlapping = _overlap(tile.k for tile in tiles)
    for tile in tiles:
        piece = _keys(tile) * rows.piece if is_local or rows.gradient > rows.key else 0
        own = _rows(tile) * rows.own_dq + _keys(tile) * rows.own_dkv
        if rows.own_kv:  # a part's gradient of latent rows; then parts of dq, and dq
            joined = rows.in_parts * (_rows(tile) * rows.dq + _keys(tile) * rows.key)
            own = max(own, _keys(tile) * (rows.own_dkv + rows.key), joined)
        most = max(most, dq.held + _rows(tile) * rows.dq + own + apart + piece)
        most = max(most, dq.add([_rows(tile) * rows.dq]) + apart + piece)
        apart += piece if is_local or overlapping else 0
    return most


class _Pieces:
    """Bytes that a sum holds: at most `MAX_PIECES` partial results, which it then folds into ``folded`` bytes."""

    def __init__(self, folded: int) -> None:
        self._folded, self._pieces = folded, list[int]()

    @property
    def held(self) -> int:
        return sum(self._pieces)

    def add(self, pieces: Iterable[int]) -> int:
        """Add partial results; return the peak of held bytes meanwhile."""
        most = self.held
        for piece in pieces:
            if piece and len(self._pieces) == MAX_PIECES:
                most = max(most, self.held + piece + self._folded)
                self._pieces = [self._folded]
            self._pieces += [piece] if piece else []
            most = max(most, self.held)
        return most


def _forward(call: _Call) -> int:
    own_rows, _, keys, tiles, rows, _, made_last = call
    out, results, most = _Pieces(own_rows * rows.out_sum), own_rows * rows.out if made_last else 0, 0
    for num, of_stage in zip(keys, [tiles[-1], *tiles[:-1]], strict=True):
        most = max(most, num * rows.key + out.held - results)
        for tile in of_stage:
            joined = rows.in_parts * (_rows(tile) * rows.out + _keys(tile) * rows.key)
            own, pieces = max(joined, _keys(tile) * rows.own_kv), out.add([_rows(tile) * rows.out])
            most = max(most, num * rows.key + pieces + own - results)
    return max(most, out.held)


def _backward(call: _Call) -> int:
    own_rows, stages, keys, tiles, rows, on_wires, made_last = call
    most, dq, arrived = 0, _Pieces(own_rows * rows.dq_sum), _Pieces(own_rows * rows.sum)
    fetched = [stage.num_fetched for stage in stages]
    for i, (num, of_stage) in enumerate(zip([*keys[1:], 0], tiles, strict=True)):
        sent = sum(fetched[max(0, i - (2 if on_wires else 1)) : i + 1]) * rows.gradient
        held = num * rows.key + sent + arrived.held
        most = max(most, held + _tiles_of_backward(of_stage, rows, dq, is_local=i == len(stages)))
        if i < len(stages) and not on_wires:
            arrived.add([num * rows.gradient for num in _ranges(stages[i])])
    if made_last:
        at_end = dq.held + arrived.held + sum(map(_keys, tiles[-1])) * rows.piece
        most = max(most - own_rows * (rows.dq + rows.result), at_end)
    return most


def _held_keys(stages: Sequence[Stage], on_wires: bool) -> list[int]:
    """Rows of keys that a rank holds beside its local rows: during the forward's local tiles, then in each stage."""
    fetched, served = [stage.num_fetched for stage in stages], [stage.num_served for stage in stages]
    if on_wires:
        return [sum(fetched), *(sum(fetched[i:]) for i in range(len(stages)))]
    ahead = [sum(fetched[i : i + 2]) + sum(served[i + 1 : i + 2]) for i in range(len(stages))]
    return [sum(fetched[:1]) + sum(served[:1]), *ahead]


def _overlap(ranges: Iterable[tuple[int, int]]) -> bool:
    """Whether two of these ranges overlap."""
    return any(a[1] > b[0] for a, b in pairwise(sorted(ranges)))


def _on_wires(transport: str) -> bool:
    return transport == "symmetric_memory"


def _ranges(stage: Stage) -> list[int]:
    """Lengths of the row ranges that a rank serves in a stage; gradients of the same rows return to it."""
    return [end - begin for _, ranges in stage.serve for begin, end in ranges]


def ulysses_memory(
    schedule: Schedule,
    degree: int,
    sizes: Sizes,
    head_chunks: int,
    transport: str,
    one_tile: bool = False,
    uses_delta: bool = True,
    rounds: bool = True,
    outer: str = "functional",
) -> ExtraMemory:
    """Evaluate the formula above for Ulysses and the hybrid; all ranks hold equally many rows.

    Args:
        schedule: of a ring of inner groups; for plain Ulysses, of one device that holds the whole sequence.
        degree: ranks of an inner group.
        sizes, one_tile, rounds: as in `extra_memory`.
        head_chunks: number of chunks in which a rank's heads are computed.
        transport, outer: transports of the inner group and of the ring.
        uses_delta: whether the kernel's backward takes delta instead of out.
    """
    rows, of_kv = schedule.shard_lens[schedule.cp_rank], kv_heads_of_rank(sizes, degree)
    B, H, K = sizes.batch, sizes.num_heads // degree // head_chunks, of_kv // head_chunks
    q, out, kv = (B * n for n in (H * sizes.head_dim, H * sizes.v_head_dim, K * sizes.row_dim))
    e, lse, home_itemsize = sizes.itemsize, B * H * 4, sizes.home_itemsize or sizes.gradient_itemsize
    ways = 2 if _on_wires(transport) or degree == 1 else 3  # computed, received, and (functional) sent
    is_kept = of_kv * degree == sizes.num_kv_heads and degree > 1
    tiles = [*schedule.local_tiles, *(tile for stage in schedule.route.stages for tile in stage.tiles)]
    once = len(tiles) == 1 and (_rows(tiles[0]), _keys(tiles[0])) == (rows, rows)  # its outputs are the results
    of_heads = replace(sizes, num_heads=H, num_kv_heads=K)
    ring = extra_memory(schedule, of_heads, 1, outer, one_tile, rounds, not once, home_itemsize)

    qkv, result, home = (q + kv) * e, out * e + lse, q * e + kv * home_itemsize
    given = out * e if is_kept else (q + kv + out) * e + (lse if uses_delta else out * e) + lse
    of_home = out * e if is_kept else result
    forward = max(rows * 2 * qkv, rows * (qkv + result * (not once)) + ring.forward)
    sent_home = rows * (result + (ways - 1) * of_home + (qkv if is_kept and head_chunks == 1 else 0))
    again = lse * (uses_delta if is_kept else 1 + uses_delta)
    computing = rows * (given + home * (not once) + again) + ring.backward
    forward, backward = max(forward, sent_home), max(rows * 2 * given, computing, rows * ways * home)
    if is_kept:
        kept = rows * head_chunks * (qkv + result)
        forward, backward = forward + (kept if head_chunks > 1 else 0), backward + kept
    elif degree > 1:
        repeated = rows // degree * kv * degree * head_chunks
        forward += repeated * e
        results = rows // degree * B * sizes.num_kv_heads * sizes.row_dim * e  # made last
        backward += repeated * (e + home_itemsize) + (rows * lse * head_chunks if uses_delta else 0) - results
    symmetric = rows * max(qkv, of_home, given, home) if _on_wires(transport) and degree > 1 else 0
    return ExtraMemory(forward, backward, symmetric + ring.symmetric)


def visits(schedule: Schedule, one_tile: bool) -> list[Sequence[Tile]]:
    """The tiles of each stage, and the local ones, as a kernel gets them."""
    parts = [*(stage.tiles for stage in schedule.route.stages), schedule.local_tiles]
    return [enclosing(x) if one_tile else x for x in parts]


def kv_heads_of_rank(sizes: Sizes, cp_size: int) -> int:
    """Number of kv heads that a rank's query heads read in Ulysses, equal on all ranks."""
    heads = sizes.num_heads // cp_size
    return heads // math.gcd(sizes.num_heads // sizes.num_kv_heads, heads)


def _rows(tile: Tile) -> int:
    return tile.q[1] - tile.q[0]


def _keys(tile: Tile) -> int:
    return tile.k[1] - tile.k[0]
