"""Which positions a rank holds, piece by piece: the interface of all layouts.

A *position* is the index of a token in the original sequence. A rank's shard is a tuple of pieces: affine `Run`s, or an
explicit `Index`. Every other part of the library (masks, rotary embedding, labels, documents, un-permutation) reads
positions from here.
"""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor

from cp_mesh.errors import check_int


@dataclass(frozen=True)
class Run:
    """Positions ``start + stride * i`` for ``i`` in ``range(length)``; ``stride`` is 1 or more."""

    start: int
    stride: int
    length: int

    @property
    def last(self) -> int:
        return self.start + self.stride * (self.length - 1)

    def positions(self) -> Tensor:
        """int64 CPU tensor [length]."""
        return torch.arange(self.length, dtype=torch.int64, device="cpu") * self.stride + self.start

    def slice(self, begin: int, end: int) -> Run:
        return Run(self.start + self.stride * begin, self.stride, end - begin)

    def bounds(self) -> tuple[int, int]:
        """Smallest and largest position; the run must not be empty."""
        return self.start, self.last


@dataclass(frozen=True, eq=False)
class Index:
    """Positions listed one by one: a piece that is not an affine run."""

    values: Tensor

    @property
    def length(self) -> int:
        return self.values.numel()

    def positions(self) -> Tensor:
        """int64 CPU tensor [length]."""
        return self.values

    def slice(self, begin: int, end: int) -> Index:
        return Index(self.values[begin:end])

    def bounds(self) -> tuple[int, int]:
        """Smallest and largest position; the index must not be empty."""
        low, high = torch.aminmax(self.values)
        return int(low), int(high)


Piece = Run | Index


class Layout(ABC):
    """Interface of all layouts. Any ``seq_len >= 0`` and ``cp_size >= 1`` is valid; shards may be empty or unequal."""

    @abstractmethod
    def runs(self, seq_len: int, cp_size: int, cp_rank: int) -> tuple[Piece, ...]:
        """The non-empty pieces of ``cp_rank``'s shard, in local order."""

    @abstractmethod
    def spec(self) -> str:
        """A short string from which `layouts.parse_layout` rebuilds the layout, with its tensor if any."""

    @property
    def tensor(self) -> Tensor | None:
        """Data that the spec does not contain, as an int64 CPU tensor; None if the spec is complete."""
        return None

    def multiple(self, cp_size: int) -> int:
        """Return a number: sequence lengths divisible by it give all ranks equally many tokens, evenly split in runs.

        For a layout made for documents or streams, the length of each must be divisible.
        """
        return cp_size

    def shard_len(self, seq_len: int, cp_size: int, cp_rank: int) -> int:
        """Return the number of tokens that ``cp_rank`` of ``cp_size`` holds of a sequence of ``seq_len``."""
        _check_place(seq_len, cp_size, cp_rank)
        return sum(piece.length for piece in self.runs(seq_len, cp_size, cp_rank))

    def positions(self, seq_len: int, cp_size: int, cp_rank: int) -> Tensor:
        """Return the positions of the rows of ``cp_rank`` in local order: int64 CPU tensor [shard_len].

        Args:
            seq_len: tokens in the whole sequence, padding included.
            cp_size, cp_rank: number of ranks, and the rank.
        """
        _check_place(seq_len, cp_size, cp_rank)
        pieces = self.runs(seq_len, cp_size, cp_rank)
        return torch.cat([p.positions() for p in pieces]) if pieces else torch.empty(0, dtype=torch.int64, device="cpu")

    def permutation(self, seq_len: int, cp_size: int) -> Tensor:
        """Return an int64 CPU tensor [seq_len]; ``x[permutation]`` is in layout order, over ``cp_size`` ranks.

        >>> from cp_mesh.geometry.layouts import ZigZag
        >>> ZigZag().permutation(8, 2).tolist()
        [0, 1, 6, 7, 2, 3, 4, 5]
        """
        return torch.cat([self.positions(seq_len, cp_size, rank) for rank in range(cp_size)])

    def inverse(self, seq_len: int, cp_size: int) -> Tensor:
        """Return an int64 CPU tensor [seq_len]; ``x[permutation][inverse]`` is ``x``, over ``cp_size`` ranks."""
        return self.permutation(seq_len, cp_size).argsort()


def _check_place(seq_len: int, cp_size: int, cp_rank: int) -> None:
    check_int("seq_len", seq_len, 0, sys.maxsize, "tokens in the whole sequence")
    check_int("cp_rank", cp_rank, 0, check_int("cp_size", cp_size) - 1, "rank r of n is r of range(n)")


def chunk_bounds(seq_len: int, num_chunks: int, chunk: int) -> tuple[int, int]:
    """Return begin and end of a chunk of `torch.chunk` (and so of DTensor): all but the last ones have ceil(S / n)."""
    size = -(-seq_len // num_chunks)
    return min(size * chunk, seq_len), min(size * (chunk + 1), seq_len)


def non_empty(*runs: Run) -> tuple[Run, ...]:
    return tuple(run for run in runs if run.length > 0)
