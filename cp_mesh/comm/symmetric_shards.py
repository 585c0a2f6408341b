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
from cp_mesh.comm.shards import Shards, Whole, Write, chunks_of
from cp_mesh.comm.symmetric_memory import Workspace, group_memory

_MAIN, _PUSHED = 0, 1  # barrier channels


class SymmetricMoves:
    """One pass of a group's memory; see `cp_mesh.comm.shards.FunctionalMoves`."""

    def __init__(self, shards: Shards, device: torch.device) -> None:
        self.shards, self.group, self.memory = shards, shards.group, group_memory(shards.group, device)
        self.memory.begin()
        self._is_clear = False

    def workspace(self, purpose: str, nbytes: int) -> Workspace:
        """Return memory for this pass that no rank uses any more."""
        workspace = self.memory.workspace(purpose, nbytes, self.group)
        if not self._is_clear:
            workspace.barrier(channel=_MAIN)
            self._is_clear = True
        return workspace

    def gather(self, x: Tensor, whole: Whole | None) -> SymmetricGather:
        return SymmetricGather(self, x, whole)

    def sums(self, like: Tensor, features: int, num_chunks: int) -> SymmetricSums:
        return SymmetricSums(self, like, features, num_chunks)

    def close(self) -> None:
        self.memory.end()


class _Slots:
    """Pieces [B, n, D] of a workspace, of every rank."""

    def __init__(self, workspace: Workspace, like: Tensor, features: int) -> None:
        self._workspace, self._batch, self._features = workspace, len(like), features
        self._packing = make_packing(((1, 1, features),), like.dtype, like.device)

    def at(self, rank: int, first: int, num_rows: int, count: int = 1) -> Tensor:
        """Return [count, B, num_rows, D], ``first`` rows of B after the begin of a rank's memory."""
        offset, total = first * self._batch * self._packing.row_bytes, count * self._batch * num_rows
        rows = self._workspace.rows(rank, offset, total, self._packing)
        return rows.view(count, self._batch, num_rows, self._features)


class SymmetricGather:
    """A gather: every rank's memory has a slot for each rank's rows."""

    def __init__(self, moves: SymmetricMoves, x: Tensor, whole: Whole | None) -> None:
        self._shards, self._lane, self._size = moves.shards, moves.memory.pulls, moves.group.size()
        self._rank, self._x, self._own = moves.group.rank(), x.contiguous(), x.shape[1]
        workspace = moves.workspace("rows", self._size * x.numel() * x.itemsize)
        self._slots, self._marks = _Slots(workspace, x, x.shape[2]), list[Any]()
        self._kept = x.new_empty(len(x), self._size * self._own, x.shape[2]) if whole == "kept" else None
        self._lane.fork()
        with self._lane:
            for step in range(1, self._size):
                to = (self._rank + step) % self._size
                self._slots.at(to, self._rank * self._own, self._own)[0].copy_(self._x)
                workspace.barrier(channel=_PUSHED)
                self._marks.append(self._lane.mark())
            if whole == "lent":
                self._slots.at(self._rank, self._rank * self._own, self._own)[0].copy_(self._x)
            if self._kept is not None:
                self._kept[:, self._shards.of(self._rank)] = self._x
                for rank in range(self._size):
                    if rank != self._rank:
                        self._kept[:, self._shards.of(rank)] = self._slots.at(self._rank, rank * self._own, self._own)[
                            0
                        ]
            self._complete = self._lane.mark()

    def parts(self) -> Iterator[tuple[slice, Tensor]]:
        for step, mark in enumerate(self._marks, 1):
            self._lane.wait(mark)
            source = (self._rank - step) % self._size
            yield self._shards.of(source), self._slots.at(self._rank, source * self._own, self._own)[0]

    def whole(self) -> Tensor:
        self._lane.wait(self._complete)
        if self._kept is not None:
            return self._kept
        lent = self._slots.at(self._rank, 0, self._own, self._size)
        return lent.movedim(0, 1).flatten(1, 2)  # a view of one batch row


class SymmetricSums:
    """Sums: every rank's memory has a slot for each other rank, in the order of `_slot`, chunk after chunk."""

    def __init__(self, moves: SymmetricMoves, like: Tensor, features: int, num_chunks: int) -> None:
        self._shards, self._lane, self._size = moves.shards, moves.memory.pushes, moves.group.size()
        self._rank, self._own = moves.group.rank(), moves.shards.own
        self.out = like.new_empty(len(like), self._own, features)
        self.chunks = chunks_of(self._own, num_chunks)
        self._workspace = moves.workspace("gradients", (self._size - 1) * self.out.numel() * like.itemsize)
        self._slots, self._under_way = _Slots(self._workspace, like, features), deque[Any]()
        self._pulled = like.new_empty(self._size - 1, *self.out.shape) if self._size > 2 else None

    def _slot(self, rank: int, step: int, chunk: slice) -> Tensor:
        """Return [B, n, D] in a rank's memory, for the rank that is ``step`` ranks ahead of it."""
        return self._slots.at(rank, (step - 1) * self._own + chunk.start, chunk.stop - chunk.start)[0]

    def send(self, chunk: slice, write: Write) -> None:
        for step in range(1, self._size):
            write(self._shards.of((self._rank + step) % self._size, chunk), self._slot(self._rank, step, chunk))
        self._workspace.barrier(channel=_MAIN)
        self._lane.fork()
        out = self.out[:, chunk]
        with self._lane:
            for step in range(1, self._size):
                pulled = out if self._pulled is None else self._pulled[step - 1, :, chunk]
                slot = self._slot((self._rank - step) % self._size, step, chunk)
                for rows, theirs in zip(pulled, slot, strict=True):  # contiguous, as copy engines require
                    rows.copy_(theirs)
            if self._pulled is not None:
                torch.sum(self._pulled[:, :, chunk], 0, out=out)
            self._under_way.append(self._lane.mark())

    def receive(self, chunk: slice) -> Tensor:
        self._lane.wait(self._under_way.popleft())
        return self.out[:, chunk]
