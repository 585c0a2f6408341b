"""Layouts: which positions of the sequence each cp rank holds, and in which order.

A layout is a pure function of ``(seq_len, cp_size, cp_rank)``; it knows no process group.

To add a layout, write a frozen dataclass that subclasses `Layout`; implement `runs` and `spec` (and `multiple`, if
equal shards need more than cp_size); list it in `LAYOUTS` on every rank, and in the table of ``tests/cases.py``.
Integer fields go into ``spec`` as "name:1,2" and are read back by `parse_layout`.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from cp_mesh.errors import ArgumentError, as_int
from cp_mesh.geometry.host_tensors import Content
from cp_mesh.geometry.layout import Index, Layout, Piece, Run, chunk_bounds, non_empty
from cp_mesh.geometry.tensor_layouts import Balanced, OfTensor, Permuted, ZigZagDocuments

__all__ = [
    "LAYOUTS",
    "Balanced",
    "Contiguous",
    "Index",
    "Joint",
    "Layout",
    "Permuted",
    "Piece",
    "Run",
    "Striped",
    "ZigZag",
    "ZigZagDocuments",
    "check_layout",
    "chunk_bounds",
    "parse_layout",
    "shifted",
]


@dataclass(frozen=True)
class Contiguous(Layout):
    """Rank r holds the r-th chunk. Causal work is unbalanced: the last rank computes almost twice the mean.

    >>> [Contiguous().positions(6, 3, r).tolist() for r in range(3)]
    [[0, 1], [2, 3], [4, 5]]
    """

    def runs(self, seq_len: int, cp_size: int, cp_rank: int) -> tuple[Piece, ...]:
        begin, end = chunk_bounds(seq_len, cp_size, cp_rank)
        return non_empty(Run(begin, 1, end - begin))

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
        if head.start + head.length == tail.start:  # the last rank's chunks are adjacent: one run, one kernel call
            return non_empty(Run(head.start, 1, head.length + tail.length))
        return non_empty(head, tail)

    def multiple(self, cp_size: int) -> int:
        return 2 * cp_size

    def spec(self) -> str:
        return "zigzag"


@dataclass(frozen=True)
class Striped(Layout):
    """Rank r holds positions r, r + cp, r + 2·cp, …: balances every mask whose work changes smoothly with position.

    Striped Attention, Brandon et al. 2023 (arXiv:2311.09431).

    >>> [Striped().positions(7, 3, r).tolist() for r in range(3)]
    [[0, 3, 6], [1, 4], [2, 5]]
    """

    def runs(self, seq_len: int, cp_size: int, cp_rank: int) -> tuple[Piece, ...]:
        return non_empty(Run(cp_rank, cp_size, max(0, -(-(seq_len - cp_rank) // cp_size))))

    def spec(self) -> str:
        return "striped"


def shifted(pieces: Iterable[Piece], begin: int) -> list[Piece]:
    """Shift the pieces of a part of the sequence by the position at which the part begins."""
    return [replace(x, start=x.start + begin) if isinstance(x, Run) else Index(x.values + begin) for x in pieces]


@dataclass(frozen=True, init=False)
class Joint(Layout):
    """Streams that a model concatenates, such as text and image, each sharded in its own layout.

    Rank r holds its part of the first stream, then its part of the second, and so on, as when each stream is sharded
    alone and the model concatenates the local parts. Positions count through all streams. Streams may have any lengths:
    shards may be unequal, and calls then need ``seq_len``, the sum of the lengths.

    Args:
        *streams: for each stream its length in tokens (sharded contiguously), or (length, layout).

    Raises:
        ArgumentError: if a stream is none of these, or the layout is later used with another ``seq_len``.

    >>> [Joint(4, (8, ZigZag())).positions(12, 2, r).tolist() for r in range(2)]
    [[0, 1, 4, 5, 10, 11], [2, 3, 6, 7, 8, 9]]
    """

    streams: tuple[tuple[int, Layout], ...]

    def __init__(self, *streams: int | tuple[int, Layout]) -> None:
        object.__setattr__(self, "streams", tuple(_stream(x) for x in streams))

    @property
    def tensor(self) -> Tensor | None:
        """The tensors of all streams, flattened and concatenated, each after its shape."""
        parts = [layout.tensor for _, layout in self.streams if layout.tensor is not None]
        shapes = [torch.tensor([*x.shape, 0][:2], device="cpu") for x in parts]
        return torch.cat([x.flatten() for pair in zip(shapes, parts, strict=True) for x in pair]) if parts else None

    def runs(self, seq_len: int, cp_size: int, cp_rank: int) -> tuple[Piece, ...]:
        total = sum(length for length, _ in self.streams)
        if seq_len != total:
            raise ArgumentError(
                f"Joint: expected seq_len {total}, the sum of its streams, got {seq_len}; pass seq_len={total}, or "
                f"ShardedSequence(length={total}, pad=False); a padded stream counts with its padded length"
            )
        found, begin = [], 0
        for length, layout in self.streams:
            found += shifted(layout.runs(length, cp_size, cp_rank), begin)
            begin += length
        return tuple(found)

    def spec(self) -> str:
        return "joint:" + ";".join(f"{length}={layout.spec()}" for length, layout in self.streams)

    def __repr__(self) -> str:
        return f"Joint({', '.join(map(str, self.streams))})"

    @classmethod
    def parse(cls, fields: str, tensor: Tensor | None) -> Joint:
        """Rebuild it from the part of the spec after the name, and the tensor."""
        streams: list[Any] = []
        for stream in fields.split(";") if fields else ():
            length, _, spec = stream.partition("=")
            if (name := spec.partition(":")[0]) not in LAYOUTS:
                raise ArgumentError(
                    f"Joint: expected layouts of {', '.join(LAYOUTS)}, got {name}; the op rebuilds layouts by name:"
                    " list your class in cp_mesh.geometry.layouts.LAYOUTS, on every rank"
                )
            of_stream = None
            if issubclass(LAYOUTS.get(spec, Layout), OfTensor):
                assert tensor is not None
                rows, columns = tensor[:2].tolist()
                size = rows * (columns or 1)
                of_stream, tensor = tensor[2 : 2 + size].view(-1, columns or 1), tensor[2 + size :]
                of_stream = of_stream if columns else of_stream.flatten()
            streams.append((int(length), parse_layout(spec, of_stream)))
        return cls(*streams)


def _stream(x: Any) -> tuple[int, Layout]:
    length, layout = x if isinstance(x, tuple) and len(x) == 2 else (x, Contiguous())
    is_layout = isinstance(layout, Layout) and not isinstance(layout, Joint)
    length = as_int(length)
    if not isinstance(length, int) or isinstance(length, bool) or length < 0 or not is_layout:
        raise ArgumentError(
            f"Joint: expected a length or (length, layout) for each stream, got {x!r};"
            " Joint(512, (4096, ZigZag())) has two streams; pass the streams of a nested Joint one by one"
        )
    if layout.tensor is not None and not isinstance(layout, OfTensor):
        raise ArgumentError(
            f"Joint: expected streams in layouts of this library, or in your own layout without a tensor, got a "
            f"{type(layout).__name__} with a tensor; Permuted takes any order in equal shards"
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


_OWN = frozenset(LAYOUTS.values())  # they are partitions by construction; only users' layouts are checked


def same(a: Layout, b: Layout) -> bool:
    """Whether two layouts hold the same tokens on every rank; those of users may compare in other ways."""
    if a is b or a.spec() != b.spec():
        return a is b
    own, other = a.tensor, b.tensor
    return own is other or (own is not None and other is not None and Content.of(own) == Content.of(other))


def check_layout(layout: Layout, seq_len: int, cp_size: int) -> None:
    """Refuse a user's layout whose ranks do not hold every position once, in runs of rising positions.

    Raises:
        ArgumentError: naming a position.
    """
    for length, of_stream in layout.streams if isinstance(layout, Joint) else ():
        if isinstance(of_stream, Layout):
            check_layout(of_stream, length, cp_size)
    if type(layout) in _OWN:
        return
    shards = [layout.runs(seq_len, cp_size, rank) for rank in range(cp_size)]
    if any(isinstance(piece, Run) and piece.stride < 1 for shard in shards for piece in shard):
        raise ArgumentError(f"layout {layout.spec()}: expected runs of stride 1 or more; use an Index for other orders")
    positions = torch.cat([torch.zeros(0, device="cpu"), *(piece.positions() for shard in shards for piece in shard)])
    outside = (positions < 0) | (positions >= seq_len)
    if outside.any():
        raise ArgumentError(f"layout {layout.spec()}: there is no position {int(positions[outside][0])} in {seq_len}")
    held = torch.bincount(positions.long(), minlength=seq_len)
    if (wrong := (held != 1).nonzero().flatten()).numel():
        first = int(wrong[0])
        raise ArgumentError(
            f"layout {layout.spec()}: expected every position to be held once by the {cp_size} ranks, got position "
            f"{first} of {seq_len} held {int(held[first])} times; correct runs() of its class"
        )


def parse_layout(spec: str, index: Tensor | None = None) -> Layout:
    """Rebuild a layout from its `Layout.spec`, and from its `Layout.tensor` if it has one."""
    if spec == "permuted":
        # the caller's constructor has validated it; sorting it again in every call would cost time
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
