"""The joined layout, in which an inner group of ranks counts as one rank and its shards as one shard.

An inner group is ``degree`` neighbours on the cp axis, so there are ``cp_size / degree`` shards. The rows of a shard
are in order of position if the positions are runs of neighbours (contiguous, zigzag, balanced) or a list. Stripes of
several ranks, which no single run describes, follow one another; each pair of stripes then has a band as its mask.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass
from itertools import accumulate

import torch

from cp_mesh.geometry.layouts import Contiguous, Index, Layout, Piece, Run


@dataclass(frozen=True)
class Joined(Layout):
    """Rank r holds what ranks r·degree, ..., r·degree + degree - 1 hold in ``layout`` on ``degree`` x the ranks."""

    layout: Layout
    degree: int

    def runs(self, seq_len: int, cp_size: int, cp_rank: int) -> tuple[Piece, ...]:
        return _joined(pieces_of_group(self.layout, self.degree, seq_len, cp_size * self.degree, cp_rank))

    def spec(self) -> str:
        return f"{self.layout.spec()}, {self.degree} ranks joined"


def join(layout: Layout, degree: int, cp_size: int) -> Layout:
    """The joined layout of inner groups of ``degree`` ranks, out of ``cp_size`` ranks."""
    if degree == 1:
        return layout
    return Contiguous() if degree == cp_size else Joined(layout, degree)


def pieces_of_group(layout: Layout, degree: int, seq_len: int, cp_size: int, group: int) -> list[Piece]:
    """The pieces of all ranks of one inner group, rank after rank."""
    ranks = range(group * degree, (group + 1) * degree)
    return [piece for rank in ranks for piece in layout.runs(seq_len, cp_size, rank)]


def rows_of_group(layout: Layout, degree: int, seq_len: int, cp_size: int, group: int) -> list[Piece]:
    """The pieces of `pieces_of_group` as rows of the joined shard."""
    whole = join(layout, degree, cp_size).runs(seq_len, cp_size // degree, group)
    before = [*accumulate((piece.length for piece in whole), initial=0)]
    starts = [piece.bounds()[0] for piece in whole]
    rows: list[Piece] = []
    for piece in pieces_of_group(layout, degree, seq_len, cp_size, group):
        at = bisect_right(starts, piece.bounds()[0]) - 1
        inside = whole[at]
        if isinstance(inside, Index):
            rows.append(Index(torch.searchsorted(inside.values, piece.positions())))
        elif isinstance(piece, Index):
            rows.append(Index(piece.values - inside.start))
        else:
            first = before[at] + (piece.start - inside.start) // inside.stride
            rows.append(Run(first, piece.stride // inside.stride, piece.length))
    return rows


def _joined(pieces: list[Piece]) -> tuple[Piece, ...]:
    bounds, length = [piece.bounds() for piece in pieces], sum(piece.length for piece in pieces)
    if not pieces:
        return ()
    low, high = min(low for low, _ in bounds), max(high for _, high in bounds)
    if high - low + 1 == length:
        return (Run(low, 1, length),)
    runs = sorted((piece for piece in pieces if isinstance(piece, Run)), key=lambda run: run.start)
    if len(runs) < len(pieces):
        return (Index(torch.cat([piece.positions() for piece in pieces]).sort().values),)
    if any(run.stride > 1 and run.length > 1 for run in runs):
        return tuple(runs)
    touching: list[Run] = []
    for run in runs:
        if touching and touching[-1].start + touching[-1].length == run.start:
            touching[-1] = Run(touching[-1].start, 1, touching[-1].length + run.length)
        else:
            touching.append(Run(run.start, 1, run.length))
    return tuple(touching)
