"""Layouts defined by a tensor: any permutation, runs in any order, and zigzag within packed documents."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate, repeat
from typing import Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from cp_mesh.errors import ArgumentError
from cp_mesh.geometry.host_tensors import Content, owned
from cp_mesh.geometry.layout import Index, Layout, Piece, Run, chunk_bounds, non_empty


class OfTensor(Layout):
    """Base of layouts defined by a tensor: the tensor is their only field, and they are equal if its content is."""

    _field: ClassVar[str]

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state | {self._field: owned(state[self._field])})  # in a copy, or in another process

    @property
    def tensor(self) -> Tensor:
        """The field, an int64 CPU tensor."""
        tensor: Tensor = getattr(self, self._field)
        return tensor

    def __repr__(self) -> str:
        return f"{type(self).__name__}({_listed(self.tensor)})"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, type(self)) and Content.of(self.tensor) == Content.of(other.tensor)

    def __hash__(self) -> int:
        return hash((self.spec(), Content.of(self.tensor)))

    def _check_length(self, seq_len: int, length: int, what: str, hint: str) -> None:
        if seq_len != length:
            raise ArgumentError(f"{type(self).__name__}: expected seq_len {length}, {what}, got {seq_len}; {hint}")


@dataclass(frozen=True, eq=False, repr=False)
class Permuted(OfTensor):
    """An arbitrary permutation, cut in `torch.chunk` sizes: rank r holds the r-th chunk of ``index``.

    Args:
        index: int64 tensor or sequence [seq_len], a permutation of ``range(seq_len)``. Copied to the CPU.

    Raises:
        ArgumentError: if ``index`` is not a permutation, or is later used with another ``seq_len``.

    >>> Permuted([2, 0, 1]).positions(3, 3, 0).tolist()
    [2]
    """

    _field = "index"
    index: Tensor | Sequence[int] = field()

    def __post_init__(self) -> None:
        given = torch.as_tensor(self.index, device=None if isinstance(self.index, Tensor) else "cpu")
        if given.numel() and (given.is_floating_point() or given.is_complex() or given.dtype == torch.bool):
            raise ArgumentError(f"Permuted: expected integers as an index, got {given.dtype}; torch.argsort gives them")
        index = owned(given, torch.int64)
        if index.ndim != 1 or not torch.equal(index.sort().values, torch.arange(index.numel(), device="cpu")):
            raise ArgumentError(
                f"Permuted: expected a permutation of range(seq_len) as a 1-D index, got shape {tuple(index.shape)}"
                " with repeated, missing or out-of-range entries; torch.argsort of any key gives a valid one"
            )
        object.__setattr__(self, "index", index)

    def runs(self, seq_len: int, cp_size: int, cp_rank: int) -> tuple[Piece, ...]:
        hint = "make the layout from an index of the sequence's (padded) length"
        self._check_length(seq_len, self.tensor.numel(), "the length of its index", hint)
        begin, end = chunk_bounds(seq_len, cp_size, cp_rank)
        return (Index(self.tensor[begin:end]),) if end > begin else ()

    def spec(self) -> str:
        return "permuted"


@dataclass(frozen=True, eq=False, repr=False)
class Balanced(OfTensor):
    """Runs of positions in any order, cut in `torch.chunk` sizes; `cp_mesh.balance` makes one for a mask.

    Args:
        table: int64 tensor or sequence [num_runs, 2], first position and length of each run in layout order; every
            position of the sequence is in one run. Copied to the CPU.

    Raises:
        ArgumentError: if the runs do not hold every position once, or are later used with another ``seq_len``.

    >>> [Balanced([[0, 1], [5, 2], [1, 4]]).positions(7, 2, r).tolist() for r in range(2)]
    [[0, 5, 6, 1], [2, 3, 4]]
    """

    _field = "table"
    table: Tensor | Sequence[Sequence[int]] = field()

    def __post_init__(self) -> None:
        given = self.table if isinstance(self.table, Tensor) else torch.tensor(self.table, device="cpu")
        table = owned(given, torch.int64)
        object.__setattr__(self, "table", table)
        if torch.compiler.is_compiling():
            return  # a trace has no content; `parse_layout` checks it at run time
        begins, order = table[:, 0].sort() if table.ndim == 2 and table.shape[1] == 2 else (None, None)
        if begins is None or not torch.equal(begins, (lens := table[order, 1]).cumsum(0) - lens) or (lens <= 0).any():
            raise ArgumentError(
                f"Balanced: expected runs [num_runs, 2] of first position and length that hold every position once, got"
                f" shape {tuple(table.shape)} with gaps, overlaps or lengths below 1; cp_mesh.balance makes valid ones"
            )

    @cached_property
    def _runs(self) -> tuple[list[Run], list[int]]:
        """The runs in layout order, and the number of rows before each of them."""
        rows = [Run(begin, 1, length) for begin, length in self.tensor.tolist()]
        return rows, list(accumulate((run.length for run in rows), initial=0))

    def runs(self, seq_len: int, cp_size: int, cp_rank: int) -> tuple[Piece, ...]:
        rows, before = self._runs
        hint = "make the layout for the sequence's (padded) length"
        self._check_length(seq_len, before[-1], "the length of its runs", hint)
        begin, end = chunk_bounds(seq_len, cp_size, cp_rank)
        first, last = bisect_right(before, begin) - 1, bisect_left(before, end)
        found = rows[first:last]
        if found:  # shards may begin and end within a run
            found[-1] = found[-1].slice(0, end - before[last - 1])
            found[0] = found[0].slice(begin - before[first], found[0].length)
        return non_empty(*found)

    def shard_len(self, seq_len: int, cp_size: int, cp_rank: int) -> int:
        if torch.compiler.is_compiling():
            begin, end = chunk_bounds(seq_len, cp_size, cp_rank)
            return end - begin
        return super().shard_len(seq_len, cp_size, cp_rank)

    def positions(self, seq_len: int, cp_size: int, cp_rank: int) -> Tensor:
        num, (first, end) = self.shard_len(seq_len, cp_size, cp_rank), chunk_bounds(seq_len, cp_size, cp_rank)
        starts, lens = self.tensor.unbind(1)
        after = lens.cumsum(0)  # rows of all ranks
        held = after.clamp(first, end) - (after - lens).clamp(first, end)
        shift = (starts - (after - lens)).repeat_interleave(held, output_size=num)
        return shift + torch.arange(first, end, device="cpu")

    def spec(self) -> str:
        return "balanced"


@dataclass(frozen=True, eq=False, repr=False)
class ZigZagDocuments(OfTensor):
    """`ZigZag` within every packed document: rank r holds chunks r and 2·cp-1-r of 2·cp of the first, then of the next.

    Megatron-LM and TransformerEngine shard packed sequences (the THD format) in this order, with documents padded to
    multiples of 2·cp. Here they may have any length; shards are then unequal, and calls need ``seq_len``.

    Args:
        cu_seqlens: int64 tensor or sequence [num_docs + 1], cumulative lengths from 0 to the sequence's length, each
            document with its padding (``cu_seqlens_padded``); a repeated entry is an empty document. All rows of a
            batch are cut alike. Copied to the CPU.

    Raises:
        ArgumentError: if ``cu_seqlens`` does not have that form, or is later used with another ``seq_len``.

    >>> [ZigZagDocuments([0, 8, 12]).positions(12, 2, r).tolist() for r in range(2)]
    [[0, 1, 6, 7, 8, 11], [2, 3, 4, 5, 9, 10]]
    """

    _field = "cu_seqlens"
    cu_seqlens: Tensor | Sequence[int] = field()

    def __post_init__(self) -> None:
        given = self.cu_seqlens if isinstance(self.cu_seqlens, Tensor) else torch.tensor(self.cu_seqlens, device="cpu")
        edges = owned(given, torch.int64)
        object.__setattr__(self, "cu_seqlens", edges)
        if torch.compiler.is_compiling():
            return  # as in `Balanced`
        is_list = edges.ndim == 1 and len(edges) > 0 and not (given.is_floating_point() or given.dtype == torch.bool)
        if not is_list or edges[0] != 0 or (edges.diff() < 0).any():
            raise ArgumentError(
                f"ZigZagDocuments: expected integers [num_docs + 1] that start at 0 and do not fall, got {given.dtype}"
                f" {tuple(given.shape)}; pass the cumulative lengths that Mask.from_cu_seqlens takes"
            )

    @cached_property
    def _edges(self) -> NDArray[np.int64]:
        edges: NDArray[np.int64] = self.tensor.numpy()
        return edges

    def runs(self, seq_len: int, cp_size: int, cp_rank: int) -> tuple[Piece, ...]:
        hint = "pass it the cumulative lengths of the padded documents, or use ShardedSequence(pad=False)"
        self._check_length(seq_len, int(self._edges[-1]), "the last of its cumulative lengths", hint)
        chunks = np.array([cp_rank, 2 * cp_size - 1 - cp_rank])
        first, lens = self._edges[:-1, None], np.diff(self._edges)[:, None]
        begin, end = ((first + lens * x // (2 * cp_size)).reshape(-1) for x in (chunks, chunks + 1))
        begin, end = begin[end > begin], end[end > begin]
        apart = begin[1:] != end[:-1]  # adjacent chunks are one run
        begin, end = begin[np.r_[True, apart][: len(begin)]], end[np.r_[apart, True][: len(end)]]
        return tuple(map(Run, begin.tolist(), repeat(1), (end - begin).tolist()))

    def multiple(self, cp_size: int) -> int:
        return 2 * cp_size

    def spec(self) -> str:
        return "zigzag_documents"


def _listed(entries: Tensor) -> str:
    """Write entries as Python does, but leave out the middle of long lists."""
    if len(entries) <= 8:
        return str(entries.tolist())
    return f"[{', '.join(map(str, entries[:3].tolist()))}, ..., {entries[-1].tolist()}]"
