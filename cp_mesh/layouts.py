"""Layouts: which positions of the sequence each cp rank holds, and in which order.

A layout is a pure function of ``(seq_len, cp_size, cp_rank)``; it knows no process group. A *position* is the index
of a token in the original sequence. A rank's shard is a tuple of pieces: affine `Run`s, or an explicit `Index`.
Every other part of the library (masks, rotary embedding, labels, documents, un-permutation) reads positions from here.

To add a layout, write a frozen dataclass that subclasses `Layout`; implement `runs` and `spec` (and `multiple`, if
equal shards need more than cp_size); list it in `LAYOUTS` on every rank, and in the table of ``tests/cases.py``.
Integer fields go into ``spec`` as "name:1,2" and are read back by `parse_layout`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from itertools import accumulate, repeat
from typing import Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from cp_mesh.errors import ArgumentError
from cp_mesh.owned import Content, owned


@dataclass(frozen=True)
class Run:
    """Positions ``start + stride * i`` for ``i`` in ``range(length)``; ``stride`` is 1 or more.

    ``copied``: every rank holds these positions, and its queries see its own copy of their keys, once.
    """

    start: int
    stride: int
    length: int
    copied: bool = False

    @property
    def last(self) -> int:
        return self.start + self.stride * (self.length - 1)

    def positions(self) -> Tensor:
        """int64 CPU tensor [length]."""
        return torch.arange(self.length, dtype=torch.int64, device="cpu") * self.stride + self.start

    def slice(self, begin: int, end: int) -> Run:
        return replace(self, start=self.start + self.stride * begin, length=end - begin)

    def bounds(self) -> tuple[int, int]:
        """Smallest and largest position; the run must not be empty."""
        return self.start, self.last


@dataclass(frozen=True, eq=False)
class Index:
    """Positions listed one by one: the piece of a layout that no affine run describes."""

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
        """A short string from which `parse_layout` rebuilds the layout (together with its index, if it has one)."""

    @property
    def tensor(self) -> Tensor | None:
        """What travels beside the spec, an int64 CPU tensor; None if the spec says all."""
        return None

    @property
    def replicated(self) -> bool:
        """Whether some positions are held by every rank."""
        return False

    def multiple(self, cp_size: int) -> int:
        """Sequence lengths divisible by this give every rank equally many tokens, evenly split in runs.

        Of a layout made for documents or streams, if the length of each is such a multiple.
        """
        return cp_size

    def shard_len(self, seq_len: int, cp_size: int, cp_rank: int) -> int:
        """Number of tokens that ``cp_rank`` of ``cp_size`` holds of a sequence of ``seq_len``."""
        return sum(piece.length for piece in self.runs(seq_len, cp_size, cp_rank))

    def positions(self, seq_len: int, cp_size: int, cp_rank: int) -> Tensor:
        """Positions of the rows of ``cp_rank`` (of ``cp_size``) in local order: int64 CPU tensor [shard_len].

        Args:
            seq_len: tokens in the whole sequence, padding included.
            cp_size, cp_rank: number of ranks, and which.
        """
        pieces = self.runs(seq_len, cp_size, cp_rank)
        return torch.cat([p.positions() for p in pieces]) if pieces else torch.empty(0, dtype=torch.int64, device="cpu")

    def permutation(self, seq_len: int, cp_size: int) -> Tensor:
        """int64 CPU tensor [seq_len]; ``x[permutation]`` is the sequence in layout order, over ``cp_size`` ranks.

        It is longer where every rank holds some positions.

        >>> ZigZag().permutation(8, 2).tolist()
        [0, 1, 6, 7, 2, 3, 4, 5]
        """
        return torch.cat([self.positions(seq_len, cp_size, rank) for rank in range(cp_size)])

    def inverse(self, seq_len: int, cp_size: int) -> Tensor:
        """int64 CPU tensor [seq_len]; ``x[permutation][inverse]`` is ``x``, over ``cp_size`` ranks.

        Of positions that every rank holds, the rows of the first one.
        """
        held, rows = self.permutation(seq_len, cp_size).sort(stable=True)
        return rows[held.diff(prepend=held.new_tensor([-1])) > 0] if self.replicated else rows


def chunk_bounds(seq_len: int, num_chunks: int, chunk: int) -> tuple[int, int]:
    """Begin and end of one chunk as `torch.chunk` (and so DTensor) cuts: all of size ceil(S / n) but the last ones."""
    size = -(-seq_len // num_chunks)
    return min(size * chunk, seq_len), min(size * (chunk + 1), seq_len)


def _listed(entries: Tensor) -> str:
    """As Python, but for those in the middle of many."""
    if len(entries) <= 8:
        return str(entries.tolist())
    return f"[{', '.join(map(str, entries[:3].tolist()))}, ..., {entries[-1].tolist()}]"


def _non_empty(*runs: Run) -> tuple[Run, ...]:
    return tuple(run for run in runs if run.length > 0)


@dataclass(frozen=True)
class Contiguous(Layout):
    """Rank r holds the r-th chunk. Causal work is unbalanced: the last rank does almost twice the mean.

    >>> [Contiguous().positions(6, 3, r).tolist() for r in range(3)]
    [[0, 1], [2, 3], [4, 5]]
    """

    def runs(self, seq_len: int, cp_size: int, cp_rank: int) -> tuple[Piece, ...]:
        begin, end = chunk_bounds(seq_len, cp_size, cp_rank)
        return _non_empty(Run(begin, 1, end - begin))

    def spec(self) -> str:
        return "contiguous"


@dataclass(frozen=True)
class ZigZag(Layout):
    """Rank r holds chunks r and 2·cp-1-r of 2·cp: causal work is equal on all ranks.

    Known as head-tail in PyTorch and as 2·cp chunks in Megatron-LM and Llama 3 (arXiv:2407.21783, section 3.3.2).

    >>> [ZigZag().positions(8, 2, r).tolist() for r in range(2)]
    [[0, 1, 6, 7], [2, 3, 4, 5]]
    """

    def runs(self, seq_len: int, cp_size: int, cp_rank: int) -> tuple[Piece, ...]:
        def chunk(i: int) -> Run:
            begin, end = seq_len * i // (2 * cp_size), seq_len * (i + 1) // (2 * cp_size)
            return Run(begin, 1, end - begin)

        head, tail = chunk(cp_rank), chunk(2 * cp_size - 1 - cp_rank)
        if head.start + head.length == tail.start:  # the last rank's chunks touch: one run, one kernel call
            return _non_empty(Run(head.start, 1, head.length + tail.length))
        return _non_empty(head, tail)

    def multiple(self, cp_size: int) -> int:
        return 2 * cp_size

    def spec(self) -> str:
        return "zigzag"


@dataclass(frozen=True)
class Striped(Layout):
    """Rank r holds positions r, r + cp, r + 2·cp, …: every mask that is smooth in position is balanced.

    Striped Attention, Brandon et al. 2023 (arXiv:2311.09431).

    >>> [Striped().positions(7, 3, r).tolist() for r in range(3)]
    [[0, 3, 6], [1, 4], [2, 5]]
    """

    def runs(self, seq_len: int, cp_size: int, cp_rank: int) -> tuple[Piece, ...]:
        return _non_empty(Run(cp_rank, cp_size, max(0, -(-(seq_len - cp_rank) // cp_size))))

    def spec(self) -> str:
        return "striped"


class _OfTensor(Layout):
    """What layouts that a tensor says have in common: the tensor is their only field, and they compare by content."""

    _field: ClassVar[str]

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state | {self._field: owned(state[self._field])})  # of a copy, or in another process

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
class Permuted(_OfTensor):
    """An arbitrary permutation, cut in `torch.chunk` sizes: rank r holds the r-th chunk of ``index``.

    Args:
        index: int64 tensor or sequence [seq_len], a permutation of ``range(seq_len)``. Kept on the CPU.

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
        hint = "build the layout from an index of the sequence's (padded) length"
        self._check_length(seq_len, self.tensor.numel(), "the length of its index", hint)
        begin, end = chunk_bounds(seq_len, cp_size, cp_rank)
        return (Index(self.tensor[begin:end]),) if end > begin else ()

    def spec(self) -> str:
        return "permuted"


@dataclass(frozen=True, eq=False, repr=False)
class Balanced(_OfTensor):
    """Runs of positions in any order, cut in `torch.chunk` sizes; `cp_mesh.balance` makes one for a mask.

    Args:
        table: int64 tensor or sequence [num_runs, 2], first position and length of each run in layout order; every
            position of the sequence is in one of them. Kept on the CPU.

    Raises:
        ArgumentError: if the runs are no permutation of the sequence, or are later used with another ``seq_len``.

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
            return  # content is not to be had there; `parse_layout` looks at it
        begins, order = table[:, 0].sort() if table.ndim == 2 and table.shape[1] == 2 else (None, None)
        if begins is None or not torch.equal(begins, (lens := table[order, 1]).cumsum(0) - lens) or (lens <= 0).any():
            raise ArgumentError(
                f"Balanced: expected runs [num_runs, 2] of first position and length that hold every position once, got"
                f" shape {tuple(table.shape)} with gaps, overlaps or lengths below 1; cp_mesh.balance makes valid ones"
            )

    @cached_property
    def _runs(self) -> tuple[list[Run], list[int]]:
        """The runs in layout order, and how many rows come before each."""
        rows = [Run(begin, 1, length) for begin, length in self.tensor.tolist()]
        return rows, list(accumulate((run.length for run in rows), initial=0))

    def runs(self, seq_len: int, cp_size: int, cp_rank: int) -> tuple[Piece, ...]:
        rows, before = self._runs
        hint = "make the layout for the (padded) sequence"
        self._check_length(seq_len, before[-1], "the length of its runs", hint)
        begin, end = chunk_bounds(seq_len, cp_size, cp_rank)
        first, last = bisect_right(before, begin) - 1, bisect_left(before, end)
        cut = [
            rows[i].slice(max(0, begin - before[i]), min(rows[i].length, end - before[i])) for i in range(first, last)
        ]
        return _non_empty(*cut)

    def spec(self) -> str:
        return "balanced"


@dataclass(frozen=True, eq=False, repr=False)
class ZigZagDocuments(_OfTensor):
    """`ZigZag` within every packed document: rank r holds chunks r and 2·cp-1-r of 2·cp of the first, then of the next.

    The order in which Megatron-LM and TransformerEngine shard packed sequences (the THD format), whose documents are
    padded to multiples of 2·cp. Here they may have any length; shards are then unequal, and calls need ``seq_len``.

    Args:
        cu_seqlens: int64 tensor or sequence [num_docs + 1], cumulative lengths from 0 to the sequence's length, each
            document with its padding (``cu_seqlens_padded``); a repeated entry is an empty document. All rows of a
            batch are cut alike. Kept on the CPU.

    Raises:
        ArgumentError: if ``cu_seqlens`` is not of that form, or is later used with another ``seq_len``.

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
                f" {tuple(given.shape)}; cumulative lengths are those of Mask.from_cu_seqlens"
            )

    @cached_property
    def _edges(self) -> NDArray[np.int64]:
        edges: NDArray[np.int64] = self.tensor.numpy()
        return edges

    def runs(self, seq_len: int, cp_size: int, cp_rank: int) -> tuple[Piece, ...]:
        hint = "give it the cumulative lengths of the padded documents, or a ShardedSequence pad=False"
        self._check_length(seq_len, int(self._edges[-1]), "the last of its cumulative lengths", hint)
        chunks = np.array([cp_rank, 2 * cp_size - 1 - cp_rank])
        first, lens = self._edges[:-1, None], np.diff(self._edges)[:, None]
        begin, end = ((first + lens * x // (2 * cp_size)).reshape(-1) for x in (chunks, chunks + 1))
        begin, end = begin[end > begin], end[end > begin]
        apart = begin[1:] != end[:-1]  # those that touch are one run
        begin, end = begin[np.r_[True, apart][: len(begin)]], end[np.r_[apart, True][: len(end)]]
        return tuple(map(Run, begin.tolist(), repeat(1), (end - begin).tolist()))

    def multiple(self, cp_size: int) -> int:
        return 2 * cp_size

    def spec(self) -> str:
        return "zigzag_documents"


def shifted(pieces: Iterable[Piece], begin: int) -> list[Piece]:
    """The pieces of a part of the sequence that begins at this position."""
    return [replace(x, start=x.start + begin) if isinstance(x, Run) else Index(x.values + begin) for x in pieces]


@dataclass(frozen=True)
class Replicated:
    """A stream of a `Joint` that every rank holds whole, such as a prefix of text.

    Its rows are queries on every rank, and their keys count once: a query sees the copy on its own rank. So each rank
    has its share of the gradients of its copy, and the sum over ranks is the gradient.

    Args:
        length: tokens in the stream.
    """

    length: int

    @property
    def tensor(self) -> None:
        """As in `Layout`."""
        return None

    def runs(self, seq_len: int, cp_size: int, cp_rank: int) -> tuple[Piece, ...]:
        return _non_empty(Run(0, 1, seq_len, copied=True))

    def spec(self) -> str:
        return "replicated"


@dataclass(frozen=True, init=False)
class Joint(Layout):
    """Streams that a model concatenates, such as text and image, each sharded in a layout of its own.

    Rank r holds its part of the first stream, then its part of the second, and so on: what it has when each stream is
    sharded alone and the model concatenates what it has of each. Positions count through all streams. Streams of any
    lengths: shards may be unequal, and calls then need ``seq_len``, the sum of the lengths.

    Args:
        *streams: for each stream its length in tokens, which is sharded contiguously; or (length, layout); or
            `Replicated`, which every rank holds whole.

    Raises:
        ArgumentError: if a stream is none of these, or the layout is later used with another ``seq_len``.

    >>> [Joint(4, (8, ZigZag())).positions(12, 2, r).tolist() for r in range(2)]
    [[0, 1, 4, 5, 10, 11], [2, 3, 6, 7, 8, 9]]
    >>> [Joint(Replicated(2), 4).positions(6, 2, r).tolist() for r in range(2)]
    [[0, 1, 2, 3], [0, 1, 4, 5]]
    """

    streams: tuple[tuple[int, Layout | Replicated], ...]

    def __init__(self, *streams: int | tuple[int, Layout] | Replicated) -> None:
        object.__setattr__(self, "streams", tuple(_stream(x) for x in streams))

    @property
    def tensor(self) -> Tensor | None:
        """Those of the streams, one after the other, each after its shape."""
        parts = [layout.tensor for _, layout in self.streams if layout.tensor is not None]
        shapes = [torch.tensor([*x.shape, 0][:2], device="cpu") for x in parts]
        return torch.cat([x.flatten() for pair in zip(shapes, parts, strict=True) for x in pair]) if parts else None

    @property
    def replicated(self) -> bool:
        return any(isinstance(layout, Replicated) for _, layout in self.streams)

    def runs(self, seq_len: int, cp_size: int, cp_rank: int) -> tuple[Piece, ...]:
        total = sum(length for length, _ in self.streams)
        if seq_len != total:
            raise ArgumentError(
                f"Joint: expected seq_len {total}, the sum of its streams, got {seq_len}; pass seq_len={total}, or to a"
                f" ShardedSequence length={total} with pad=False; of a padded stream the padded length counts"
            )
        found, begin = [], 0
        for length, layout in self.streams:
            found += shifted(layout.runs(length, cp_size, cp_rank), begin)
            begin += length
        return tuple(found)

    def spec(self) -> str:
        return "joint:" + ";".join(f"{length}={layout.spec()}" for length, layout in self.streams)

    def __repr__(self) -> str:
        return f"Joint({', '.join(str(x[1] if isinstance(x[1], Replicated) else x) for x in self.streams)})"

    @classmethod
    def parse(cls, fields: str, tensor: Tensor | None) -> Joint:
        """From what follows the name in the spec, and the tensor."""
        streams: list[Any] = []
        for stream in fields.split(";") if fields else ():
            length, _, spec = stream.partition("=")
            if (name := spec.partition(":")[0]) not in (*LAYOUTS, "replicated"):
                raise ArgumentError(
                    f"Joint: expected layouts of {', '.join(LAYOUTS)}, got {name}; the op rebuilds layouts by name:"
                    " list your class in cp_mesh.layouts.LAYOUTS, on every rank"
                )
            of_stream = None
            if issubclass(LAYOUTS.get(spec, Layout), _OfTensor):
                assert tensor is not None
                rows, columns = tensor[:2].tolist()
                size = rows * (columns or 1)
                of_stream, tensor = tensor[2 : 2 + size].view(-1, columns or 1), tensor[2 + size :]
                of_stream = of_stream if columns else of_stream.flatten()
            layout = Replicated(int(length)) if spec == "replicated" else (int(length), parse_layout(spec, of_stream))
            streams.append(layout)
        return cls(*streams)


def _stream(x: Any) -> tuple[int, Layout | Replicated]:
    length, layout = x if isinstance(x, tuple) and len(x) == 2 else (x, Contiguous())
    is_layout = isinstance(layout, Layout) and not isinstance(layout, Joint)
    if isinstance(x, Replicated):
        length, layout = x.length, x
    if not isinstance(length, int) or isinstance(length, bool) or length < 0 or not is_layout:
        raise ArgumentError(
            f"Joint: expected a length, (length, layout) or Replicated(length) for each stream, got {x!r};"
            " Joint(512, (4096, ZigZag())) are two streams, and streams of a Joint can be given one by one"
        )
    if layout.tensor is not None and not isinstance(layout, _OfTensor):
        raise ArgumentError(
            f"Joint: expected streams in layouts of this library, or in one of yours that its spec says alone, got a "
            f"{type(layout).__name__} with a tensor; Permuted says any order in equal parts"
        )
    return length, layout


LAYOUTS: dict[str, type[Layout]] = {
    "contiguous": Contiguous,
    "zigzag": ZigZag,
    "striped": Striped,
    "permuted": Permuted,
    "balanced": Balanced,
    "zigzag_documents": ZigZagDocuments,
    "joint": Joint,
}


_OWN = frozenset((*LAYOUTS.values(), Replicated))  # partitions by construction; only users' layouts are checked


@lru_cache(maxsize=64)
def check_layout(layout: Layout, seq_len: int, cp_size: int) -> None:
    """Refuse a layout, of a class listed later, whose ranks do not hold every position once, in rising runs.

    Raises:
        ArgumentError: naming a position.
    """
    for length, of_stream in layout.streams if isinstance(layout, Joint) else ():
        check_layout(of_stream, length, cp_size)
    if type(layout) in _OWN:
        return
    shards = [layout.runs(seq_len, cp_size, rank) for rank in range(cp_size)]
    if any(isinstance(piece, Run) and piece.stride < 1 for shard in shards for piece in shard):
        raise ArgumentError(f"layout {layout.spec()}: expected runs of stride 1 or more; an Index takes any order")
    positions = torch.cat([piece.positions() for shard in shards for piece in shard]) if any(shards) else torch.zeros(0)
    outside = (positions < 0) | (positions >= seq_len)
    if outside.any():
        raise ArgumentError(f"layout {layout.spec()}: there is no position {int(positions[outside][0])} in {seq_len}")
    held = torch.bincount(positions.long(), minlength=seq_len)
    if (wrong := (held != 1).nonzero().flatten()).numel():
        first = int(wrong[0])
        raise ArgumentError(
            f"layout {layout.spec()}: expected every position to be held once by the {cp_size} ranks, got position "
            f"{first} of {seq_len} held {int(held[first])} times; see runs() of its class"
        )


def parse_layout(spec: str, index: Tensor | None = None) -> Layout:
    """Rebuild a layout from its `Layout.spec`, and from its `Layout.tensor` if it has one."""
    if spec == "permuted":
        # validated where the caller made it; sorting it again, every call, is wasted
        layout = object.__new__(Permuted)
        object.__setattr__(layout, "index", index)
        return layout
    name, _, fields = spec.partition(":")
    if name == "joint":
        return Joint.parse(fields, index)
    if index is not None:
        of_tensor: Any = LAYOUTS[name]
        return of_tensor(index)
    return LAYOUTS[name](*(int(field) for field in fields.split(",") if field))
