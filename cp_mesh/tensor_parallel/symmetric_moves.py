"""Rows of the sequence between tp ranks over symmetric memory: copy engines move them while products run.

    barrier                     all ranks are done with the memory of the pass before
    gather: push this rank's rows into each other rank's memory, a barrier after each (side stream)
        ... products: of this rank's rows, then of each other rank's rows as they arrive, read in place ...
    sums: products for the rows of other ranks, written into this rank's memory; a barrier
          pull the other ranks' results for this rank's rows (side stream), and add this rank's own product
        ... products for the next chunk, or others ...

Pushed rows need no copy before they travel, and pulled sums no copy afterwards. The barriers of a gather are on its
side stream, where they wait for copies alone. The barriers of sums are on the caller's stream: a kernel that fills the
GPU could delay a barrier on another stream, and the copies after it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from cp_mesh.comm.packing import make_packing
from cp_mesh.comm.shards import Shards
from cp_mesh.comm.symmetric_memory import group_memory
from cp_mesh.tensor_parallel.moves import Whole, Write, chunks_of

_MAIN, _PUSHED = 0, 1  # barrier channels


class SymmetricMoves:
    """One pass of a group's memory; see `FunctionalMoves`."""

    out: Tensor
    chunks: list[slice]

    def __init__(self, shards: Shards, device: torch.device) -> None:
        self.shards, self.group, self.memory = shards, shards.group, group_memory(shards.group, device)
        self.rank, self.size, self.own = self.group.rank(), self.group.size(), shards.own
        self.is_clear, self._marks, self._under_way = False, list[Any](), deque[Any]()
        self.memory.begin()

    def gather(self, x: Tensor, whole: Whole | None) -> None:
        """Every rank's memory has a slot for each rank's rows."""
        self._x, rank, lane = x, self.rank, self.memory.pulls
        sent = self._sent = x.contiguous()  # until the end of the pass: the side stream reads it
        slots = self._rows = _Slots(self, "rows", self.size, x, x.shape[2])
        self._kept = x.new_empty(len(x), self.shards.num_rows, x.shape[2]) if whole == "kept" else None
        lane.fork()
        with lane:
            for step in range(1, self.size):
                slots.at((rank + step) % self.size, rank * self.own, self.own)[0].copy_(sent)
                slots.workspace.barrier(channel=_PUSHED)
                self._marks.append(lane.mark())
            if whole == "lent":
                slots.at(rank, rank * self.own, self.own)[0].copy_(sent)
            if self._kept is not None:
                for source in range(self.size):
                    theirs = sent if source == rank else slots.at(rank, source * self.own, self.own)[0]
                    self._kept[:, self.shards.of(source)] = theirs
            self._complete = lane.mark()

    def parts(self) -> Iterator[tuple[slice, Tensor]]:
        yield self.shards.of(self.rank), self._x
        for step, mark in enumerate(self._marks, 1):
            self.memory.pulls.wait(mark)
            source = (self.rank - step) % self.size
            yield self.shards.of(source), self._rows.at(self.rank, source * self.own, self.own)[0]

    def whole(self) -> Tensor:
        self.memory.pulls.wait(self._complete)
        if self._kept is not None:
            return self._kept
        return self._rows.at(self.rank, 0, self.own, self.size).movedim(0, 1).flatten(1, 2)  # a view of one batch row

    def sums(self, like: Tensor, features: int, num_chunks: int) -> None:
        """Every rank's memory has a slot for each other rank, in the order of `_slot`, chunk after chunk."""
        self.out = like.new_empty(len(like), self.own, features)
        self.chunks = chunks_of(self.own, num_chunks)
        self._sums = _Slots(self, "gradients", self.size - 1, self.out, features)
        self._pulled = like.new_empty(self.size - 1, *self.out.shape) if self.size > 2 else None

    def _slot(self, rank: int, step: int, chunk: slice) -> Tensor:
        """Return [B, n, D] in a rank's memory, for the rank that is ``step`` ranks ahead of it."""
        return self._sums.at(rank, (step - 1) * self.own + chunk.start, chunk.stop - chunk.start)[0]

    def send(self, chunk: slice, write: Write) -> None:
        for step in range(1, self.size):
            write(self.shards.of((self.rank + step) % self.size, chunk), self._slot(self.rank, step, chunk))
        self._sums.workspace.barrier(channel=_MAIN)
        out, lane = self.out[:, chunk], self.memory.pushes
        lane.fork()
        with lane:
            for step in range(1, self.size):
                pulled = out if self._pulled is None else self._pulled[step - 1, :, chunk]
                slot = self._slot((self.rank - step) % self.size, step, chunk)
                for rows, theirs in zip(pulled, slot, strict=True):  # contiguous, as copy engines require
                    rows.copy_(theirs)
            if self._pulled is not None:
                torch.sum(self._pulled[:, :, chunk], 0, out=out)
            self._under_way.append(lane.mark())

    def receive(self, chunk: slice) -> Tensor:
        self.memory.pushes.wait(self._under_way.popleft())
        return self.out[:, chunk]

    def close(self) -> None:
        self.memory.end()


class _Slots:
    """Slots of this pass, each for the rows [B, n, D] of a rank, in every rank's memory; no rank uses it any more."""

    def __init__(self, moves: SymmetricMoves, purpose: str, count: int, like: Tensor, features: int) -> None:
        self._batch, self._features = len(like), features
        self.workspace = moves.memory.workspace(purpose, count * like.numel() * like.itemsize, moves.group)
        self._packing = make_packing(((1, 1, features),), like.dtype, like.device)
        if not moves.is_clear:
            self.workspace.barrier(channel=_MAIN)
            moves.is_clear = True

    def at(self, rank: int, first: int, num_rows: int, count: int = 1) -> Tensor:
        """Return [count, B, num_rows, D], ``first`` rows of B after the begin of a rank's memory."""
        offset, total = first * self._batch * self._packing.row_bytes, count * self._batch * num_rows
        rows = self.workspace.rows(rank, offset, total, self._packing)
        return rows.view(count, self._batch, num_rows, self._features)
