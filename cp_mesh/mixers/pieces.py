"""Where the documents of a sequence lie on the ranks, for layers whose state goes from token to token.

A *piece* is a run of consecutive positions of one document in the shard of one rank. All ranks know the pieces of all
ranks, from the layout and the documents, so nobody asks for what it needs: who sends which rows follows from here.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from cp_mesh.errors import UnsupportedError, refuse
from cp_mesh.geometry.host_tensors import Content, lasting
from cp_mesh.geometry.layouts import Contiguous, Layout, parse_layout
from cp_mesh.geometry.mask import EXCLUDED, Documents, Mask
from cp_mesh.sequence.sharded_sequence import ShardedSequence

Ints = NDArray[np.int64]
Index = Tensor | slice
"""Of rows that follow one another, which no copy needs, a slice."""


def index_on(device: torch.device, index: Ints) -> Index:
    """An index on a device."""
    if not len(index):
        return slice(0, 0)
    if len(index) == 1 or (np.diff(index) == 1).all():
        return slice(int(index[0]), int(index[-1]) + 1)
    return torch.from_numpy(index).to(device)


class Sent(NamedTuple):
    """Rows or states that ranks gather: ``own`` are those that this rank sends; no rank sends more than ``most``."""

    own: Ints
    most: int


class Kept:
    """Keeps what is made of it."""

    def on(self, device: torch.device, key: Any, make: Callable[[], NDArray[Any]]) -> Tensor:
        """An array as a tensor on a device, made once."""
        found: Tensor = self.once((device, key), lambda: torch.from_numpy(make()).to(device))
        return found

    def once(self, key: Any, make: Callable[[], Any]) -> Any:
        """What is made once, and kept."""
        made: dict[Any, Any] = vars(self).setdefault("_made", {})
        if key not in made:
            with lasting():
                made[key] = make()
        return made[key]


@dataclass(eq=False)
class Pieces(Kept):
    """The pieces of all ranks, ordered by batch row and position: int64 arrays [num_pieces], ``kept`` bool.

    Attributes:
        rank: who holds each.
        batch, start, end: its batch row and its positions, ``start <= p < end``.
        first, last: begin and end of its document.
        document: the number of its document among those that are kept, in this order.
        row: where it begins in the rows [B * rows] of its rank.
        kept: whether it is of a document; tokens that are excluded are of none.
        cp_rank, shard_lens, seq_len: this rank, rows of each rank, and of the whole sequence.
        owner, local: [seq_len], the rank that holds a position, and its row there.
        num_documents: those that are kept.
        digest: equal on ranks whose documents are.
        whole: the pieces of one rank that holds all, the documents; None if this is one.
    """

    rank: Ints
    batch: Ints
    start: Ints
    end: Ints
    first: Ints
    last: Ints
    document: Ints
    row: Ints
    kept: NDArray[np.bool_]
    cp_rank: int
    shard_lens: tuple[int, ...]
    seq_len: int
    owner: Ints
    local: Ints
    num_documents: int
    digest: str
    whole: Pieces | None

    @cached_property
    def own(self) -> Ints:
        """This rank's pieces in the order of its rows."""
        own = np.flatnonzero(self.rank == self.cp_rank)
        return own[np.argsort(self.row[own], kind="stable")]

    @cached_property
    def lens(self) -> Ints:
        """Rows of each of this rank's pieces."""
        return (self.end - self.start)[self.own]

    @cached_property
    def order(self) -> NDArray[np.int32]:
        """[seq_len], the positions of all ranks' rows, rank after rank."""
        return np.argsort(self.inverse).astype(np.int32)

    @cached_property
    def inverse(self) -> NDArray[np.int32]:
        """[seq_len], where each position is among the rows of all ranks."""
        return (np.r_[0, np.cumsum(self.shard_lens)][self.owner] + self.local).astype(np.int32)

    @cached_property
    def all_kept(self) -> bool:
        return bool(self.kept.all())

    @cached_property
    def sends(self) -> NDArray[np.bool_]:
        """Whether the document goes on behind a piece."""
        return self.kept & (self.end < self.last)

    @cached_property
    def receives(self) -> NDArray[np.bool_]:
        """Whether the document began before a piece."""
        return self.kept & (self.start > self.first)

    @cached_property
    def through(self) -> Ints:
        """Those of this rank whose document began before them and goes on behind them, as indices of `own`."""
        return np.flatnonzero((self.sends & self.receives)[self.own])

    def sent(self, which: NDArray[np.bool_]) -> tuple[Sent, Ints]:
        """Those pieces of this rank, as indices of `own`, and for every piece where it is among all that are sent."""
        chosen = np.flatnonzero(which)
        chosen = chosen[np.lexsort((self.row[chosen], self.rank[chosen]))]
        slots = np.zeros(len(self.rank), np.int64)
        most, slots[chosen] = self._places(self.rank[chosen])
        return Sent(np.flatnonzero(which[self.own]), most), slots

    def _places(self, ranks: Ints) -> tuple[int, Ints]:
        """The most that one rank sends, and where each is among as many of every rank; ``ranks`` are in order."""
        lens = np.bincount(ranks, minlength=len(self.shard_lens))
        most = int(lens.max())
        return most, np.arange(len(ranks)) + (np.arange(len(lens)) * most - np.cumsum(lens) + lens)[ranks]

    def beside(self, before: int, after: int) -> tuple[Sent, Ints]:
        """Rows of the same document next to each piece of this rank, [pieces, before + after], as `_gathered`."""

        def near(pieces: Ints) -> tuple[Ints, Ints]:
            left, right = self.start[pieces, None] + np.arange(-before, 0), self.end[pieces, None] + np.arange(after)
            return pieces, np.concatenate([left, right], 1)

        every = np.arange(len(self.rank))
        return self.once(("beside", before, after), lambda: self._gathered(near(every), near(self.own), before))

    def tails(self, width: int) -> tuple[Sent, Ints]:
        """The last ``width`` rows of each document that is kept, [num_documents, width], as `_gathered`."""
        opens = np.flatnonzero(self.kept & (self.start == self.first))
        last = opens, self.last[opens, None] - width + np.arange(width)
        return self.once(("tails", width), lambda: self._gathered(last, last, width))

    def _gathered(self, every: tuple[Ints, Ints], own: tuple[Ints, Ints], before: int) -> tuple[Sent, Ints]:
        """Rows that ranks gather, and what this rank reads.

        Args:
            every: pieces of all ranks, and positions that are read of the document of each.
            own: those that this rank reads.
            before: rows that are known before each document.

        Returns:
            The rows, and for each of ``own`` an index of these, of one row of zeros behind them, and of ``before`` rows
            before each document that is kept.
        """

        def found(pieces: Ints, at: Ints) -> tuple[Ints, Ints]:
            """-1 for what is in no document, less for what is before it; and a number of each row, as ranks send it."""
            first, last, kept = (x[pieces, None] for x in (self.first, self.last, self.kept))
            early = -2 - (self.document[pieces, None] * before + at - first + before)
            at = np.where((at >= first) & (at < last) & kept, at, np.where((at < first) & kept, early, -1))
            held, batch = np.maximum(at, 0), np.broadcast_to(self.batch[pieces, None], at.shape)
            return at, np.ravel_multi_index((self.owner[held], batch, held), shape)

        shape = len(self.shard_lens), int(self.batch.max(initial=0)) + 1, self.seq_len
        at, places = found(*every)
        keys = np.unique(places[at >= 0])
        owners, batch, positions = np.unravel_index(keys, shape)
        rows = batch * np.array(self.shard_lens)[owners] + self.local[positions]
        most, slots = self._places(owners)
        at, places = found(*own)
        index = np.where(at < 0, len(self.shard_lens) * most - 1 - at, np.r_[slots, 0][np.searchsorted(keys, places)])
        return Sent(rows[owners == self.cp_rank], most), index


def pieces_of(sequence: ShardedSequence | None, mask: Mask | None, batch: int, rows: int) -> Pieces:
    """The pieces of a batch.

    Args:
        sequence: how it is sharded; None: this rank has all tokens.
        mask: its documents, its padding and its length, if it has any; nothing else is read.
        batch, rows: of this rank's tensors.

    Raises:
        ArgumentError: on rows that are not those of the sequence.
        UnsupportedError: on a document whose tokens do not follow one another.
    """
    mask = Mask() if mask is None else mask
    if sequence is None:
        return pieces_in(Contiguous(), mask, rows, rows if mask.length is None else min(mask.length, rows), 1, 0, batch)
    seq_len, mask = sequence.len_of_local(rows), sequence.mask(mask)
    length = min(x for x in (mask.length, sequence.length, seq_len) if x is not None)
    return pieces_in(sequence.layout, mask, seq_len, length, sequence.cp_size, sequence.cp_rank, batch)


def pieces_in(layout: Layout, mask: Mask, seq_len: int, length: int, cp_size: int, cp_rank: int, batch: int) -> Pieces:
    """The same, of a mask of the whole sequence whose tokens from ``length`` on are padding."""
    contents = []
    for name in ("documents", "key_padding"):
        x = getattr(mask, name)
        if x is not None and (x.shape[-1] != seq_len or x.shape[:-1] not in ((), (1,), (batch,))):
            expected = f"{seq_len} tokens of 1 or {batch} batch rows"
            refuse(f"mask.{name}", expected, tuple(x.shape), "pass that of the whole sequence")
        contents.append(None if x is None else Content.of(x))
    tensor = None if layout.tensor is None else Content.of(layout.tensor)
    return _find(layout.spec(), tensor, seq_len, length, cp_size, cp_rank, batch, *contents)


@lru_cache(maxsize=2)
def _find(
    spec: str, tensor: Content | None, seq_len: int, length: int, cp_size: int, cp_rank: int, batch: int,
    *contents: Content | None,
) -> Pieces:  # fmt: skip
    layout, (documents, key_padding) = parse_layout(spec, None if tensor is None else tensor.tensor), contents
    ids = torch.zeros(1, seq_len, dtype=torch.int64, device="cpu")
    if documents is not None:
        ids = torch.atleast_2d(documents.tensor).long()
    if key_padding is not None:
        ids = torch.where(torch.atleast_2d(key_padding.tensor), ids, EXCLUDED)
    ids = ids.masked_fill(torch.arange(seq_len, device="cpu") >= length, EXCLUDED)
    of_row = [Documents.of(row) for row in ids.numpy()]
    if any(row.come_back for row in of_row):
        hint = "give each part an id of its own; padding may be before or after a document, not within it"
        expected = "documents whose tokens follow one another"
        refuse("mask.documents", expected, "an id that comes back", hint, UnsupportedError)
    positions = [layout.positions(seq_len, cp_size, rank).numpy() for rank in range(cp_size)]
    owner, local = np.zeros(seq_len, np.int64), np.zeros(seq_len, np.int64)
    for rank, held in enumerate(positions):
        owner[held], local[held] = rank, np.arange(len(held))
    columns: list[Ints] = []
    for b in range(batch):
        row = of_row[b if len(of_row) > 1 else 0]
        which = np.repeat(np.arange(len(row.labels)), np.diff(row.edges))
        for rank, held in enumerate(positions):
            new = np.r_[np.ones(min(1, len(held)), bool), (np.diff(held) != 1) | (np.diff(which[held]) != 0)]
            at = np.flatnonzero(new)
            start, run = held[at], which[held[at]]
            end = start + np.diff(np.r_[at, len(held)])
            of_rank = np.full(len(at), rank), np.full(len(at), b), start, end, row.edges[run], row.edges[run + 1]
            columns.append(np.stack([*of_rank, b * len(held) + at, row.labels[run] >= 0]))
    table = np.concatenate(columns, 1)
    table = table[:, np.lexsort((table[2], table[1]))]
    rank, of_batch, start, end, first, last, begin, kept = table
    opens = kept.astype(bool) & (start == first)
    return Pieces(
        rank, of_batch, start, end, first, last, np.cumsum(opens) - 1, begin, kept.astype(bool), cp_rank,
        tuple(map(len, positions)), seq_len, owner, local, int(opens.sum()),
        hashlib.sha256(np.stack([first, last, of_batch, kept]).tobytes()).hexdigest()[:16],
        None if cp_size == 1 else _find.__wrapped__("contiguous", None, seq_len, length, 1, 0, batch, *contents),
    )  # fmt: skip
