"""Where the documents of a sequence lie on the ranks, for layers whose state goes from token to token.

A *piece* is a run of consecutive positions of one document in the shard of one rank. All ranks know the pieces of all
ranks, from the layout and the documents, so nobody asks for what it needs: who sends which rows follows from here.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass, field
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


class Sent(NamedTuple):
    """Rows or states that ranks gather: ``own`` are those that this rank sends, ``lens`` how many each rank does."""

    own: Ints
    lens: tuple[int, ...]


class Chains(NamedTuple):
    """Documents whose state this rank is due somewhere.

    Attributes:
        slots: [num_chains, depth], what is folded one after another, as indices of the states that were gathered.
            What a chain does not need is any index.
        own, depths, of: of each piece of this rank that receives, its index of `own`, after how many steps, and of
            which chain.
    """

    slots: Ints
    own: Ints
    depths: Ints
    of: Ints


class Halo(NamedTuple):
    """The pieces of this rank, each with rows before and after it.

    Attributes:
        sent: rows that ranks gather.
        source: for each row of the pieces with their halos an index of this rank's rows [B * rows], then of the rows
            that were gathered, then of one row of zeros, then of ``before`` rows before each document that is kept.
        rows: where among these each row of this rank is.
    """

    sent: Sent
    source: Ints
    rows: Ints


@dataclass(eq=False)
class Pieces:
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
    _made: dict[Any, Any] = field(default_factory=dict)

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
    def order(self) -> Ints:
        """[seq_len], the positions of all ranks' rows, rank after rank."""
        return np.argsort(self.inverse)

    @cached_property
    def inverse(self) -> Ints:
        """[seq_len], where each position is among the rows of all ranks."""
        return np.r_[0, np.cumsum(self.shard_lens)][self.owner] + self.local

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
        slots[chosen] = np.arange(len(chosen))
        return Sent(np.flatnonzero(which[self.own]), self._lens_of(self.rank[chosen])), slots

    def _lens_of(self, ranks: Ints) -> tuple[int, ...]:
        """How often each rank is among these."""
        return tuple(np.bincount(ranks, minlength=len(self.shard_lens)).tolist())

    def _sent_rows(self, batch: Ints, positions: Ints) -> Sent:
        """Rows that ranks send, in the order of the ranks."""
        owners = self.owner[positions]
        rows = batch * np.array(self.shard_lens)[owners] + self.local[positions]
        return Sent(rows[owners == self.cp_rank], self._lens_of(owners))

    def chains(self, back: bool) -> tuple[Sent, Chains]:
        """Which states are sent, and how this rank folds them, from the first piece of a document or ``back``."""
        found: tuple[Sent, Chains] = self.once(("chains", back), lambda: self._chains(back))
        return found

    def _chains(self, back: bool) -> tuple[Sent, Chains]:
        sends, receives = (self.receives, self.sends) if back else (self.sends, self.receives)
        sent, slots = self.sent(sends)
        at, num = np.arange(len(self.rank)), len(self.rank)
        opens = np.flatnonzero(np.r_[True, np.diff(self.batch) != 0] | (self.start == self.first))
        lens = np.diff(np.r_[opens, num])
        depth = np.repeat(opens + lens - 1, lens) - at if back else at - np.repeat(opens, lens)
        own = np.flatnonzero(receives[self.own])
        receivers = self.own[own]
        step = -1 if back else 1
        heads, of = np.unique(receivers - step * depth[receivers], return_inverse=True)  # where each document begins
        most = int(depth[receivers].max(initial=0))
        order = np.clip(heads[:, None] + step * np.arange(most), 0, num - 1)
        return sent, Chains(slots[order], own, depth[receivers], of)

    def halo(self, before: int, after: int) -> Halo:
        """Rows of the same document next to each piece, where there are any."""

        def near(pieces: Ints) -> tuple[Ints, Ints, Ints]:
            """Positions [pieces, before + after] beside each piece; -1: none of its document, less: before it.

            Then the same with 0 for what is negative, and the batch row of each.
            """
            left = self.start[pieces, None] + np.arange(-before, 0)
            right = self.end[pieces, None] + np.arange(after)
            found = np.concatenate([left, right], 1)
            inside = (found >= self.first[pieces, None]) & (found < self.last[pieces, None])
            inside &= self.kept[pieces, None]
            opens = self.kept[pieces, None] & (found < self.first[pieces, None])
            early = -2 - (self.document[pieces, None] * before + found - self.first[pieces, None] + before)
            found = np.where(inside, found, np.where(opens, early, -1))
            return found, np.maximum(found, 0), np.broadcast_to(self.batch[pieces, None], found.shape)

        def key_of(batch: Ints, positions: Ints) -> Ints:
            """A number of each row of the sequence, in the order in which ranks send it."""
            return np.ravel_multi_index((self.owner[positions], batch, positions), shape)

        shape = len(self.shard_lens), int(self.batch.max(initial=0)) + 1, self.seq_len
        found, held, batch = near(np.arange(len(self.rank)))
        away = (found >= 0) & (self.owner[held] != self.rank[:, None])
        keys = np.unique(key_of(batch[away], held[away]))
        sent = self._sent_rows(*np.unravel_index(keys, shape)[1:])

        num_own = int(self.lens.sum())
        zero = num_own + len(keys)
        found, held, batch = near(self.own)
        here = batch * self.shard_lens[self.cp_rank] + self.local[held]
        gathered = num_own + np.searchsorted(keys, key_of(batch, held))
        source = np.where(self.owner[held] == self.cp_rank, here, gathered)
        source = np.where(found < 0, zero - 1 - found, source)

        ends = self.lens.cumsum()
        beside = np.r_[np.repeat(ends, after), np.repeat(ends - self.lens, before)]
        source = np.insert(np.arange(num_own), beside, np.r_[source[:, before:].ravel(), source[:, :before].ravel()])
        moved = before + np.arange(len(ends)) * (before + after)
        return Halo(sent, source, np.arange(num_own) + np.repeat(moved, self.lens))

    def tails(self, width: int) -> tuple[Sent, Ints]:
        """The last ``width`` rows of each document that is kept: those that this rank sends, and for each an index
        [num_documents, width] of all that are sent, then of one row of zeros, then of ``width`` rows before each.
        """
        opens = np.flatnonzero(self.kept & (self.start == self.first))
        at = self.last[opens, None] - width + np.arange(width)
        inside = at >= self.first[opens, None]
        held, batch = at[inside], np.broadcast_to(self.batch[opens, None], at.shape)[inside]
        order = np.argsort(self.owner[held], kind="stable")
        index = len(held) + 1 + (self.document[opens, None] + 1) * width + at - self.first[opens, None]
        index[np.nonzero(inside)[0][order], np.nonzero(inside)[1][order]] = np.arange(len(held))
        return self._sent_rows(batch[order], held[order]), index

    def halo_of(self, before: int, after: int) -> Halo:
        """`halo`, made once."""
        found: Halo = self.once(("halo", before, after), lambda: self.halo(before, after))
        return found

    def on(self, device: torch.device, key: Any, make: Callable[[], Ints]) -> Tensor:
        """An array as a tensor on a device, made once."""
        found: Tensor = self.once((device, key), lambda: torch.from_numpy(make()).to(device))
        return found

    def once(self, key: Any, make: Callable[[], Any]) -> Any:
        """What is made once from these pieces."""
        if key not in self._made:
            with lasting():
                self._made[key] = make()
        return self._made[key]


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
    seq_len, mask = sequence._len_of_local(rows), sequence.mask(mask)
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
