"""Rows on their way between tp ranks while matmuls run: gathered, or summed and scattered to their owners.

A `FunctionalMoves`, or a `SymmetricMoves` of `symmetric_moves`, is one pass whose products begin before all rows have
arrived, or before all are computed; its shards are equal. What the first one's methods say holds for both. Shapes: B
batch rows, n rows of a rank or a part of them, D features.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from typing import Literal

import torch
from torch import Tensor

from cp_mesh._torch import funcol
from cp_mesh.comm.shards import Shards
from cp_mesh.geometry.layouts import chunk_bounds

Whole = Literal["lent", "kept"]
"""How long the rows of a gather stay valid: until the end of the pass, or as long as the caller keeps them."""
Write = Callable[[slice, Tensor], None]
"""Computes rows of the sequence into a buffer [B, n, D]."""


class FunctionalMoves:
    """One pass over functional collectives: an all-gather, and an all-to-all per chunk instead of a reduce-scatter.

    Attributes:
        out: [B, rows of this rank, D], the sums of the other ranks' parts.
        chunks: parts of a rank's rows, which travel one after the other as sums.
    """

    out: Tensor
    chunks: list[slice]
    _every: Tensor | None = None

    def __init__(self, shards: Shards) -> None:
        self._shards, self._under_way = shards, deque[tuple[Tensor, Tensor]]()

    def gather(self, x: Tensor, whole: Whole | None) -> None:
        """Start to gather x [B, n, D], for `parts`, and for `whole` if it is to be called; once per pass."""
        self._x, self._wait = x, self._shards.gather(x)

    def parts(self) -> Iterator[tuple[slice, Tensor]]:
        """Yield this rank's rows, then those of others as they arrive, [B, n, D], with their place in the sequence."""
        own = self._shards.of(self._shards.group.rank())
        yield own, self._x
        for rows in (slice(0, own.start), slice(own.stop, self._shards.num_rows)):
            if rows.start < rows.stop:
                yield rows, self.whole()[:, rows]

    def whole(self) -> Tensor:
        """Return all rows, [B, rows, D]."""
        if self._every is None:
            self._every = self._wait()
        return self._every

    def sums(self, like: Tensor, features: int, num_chunks: int) -> None:
        """Prepare sums of rows [B, *, features] with the dtype, device and B of ``like``; once per pass."""
        self.out = like.new_empty(len(like), self._shards.own, features)
        self.chunks = chunks_of(self._shards.own, num_chunks)

    def send(self, chunk: slice, write: Write) -> None:
        """Compute this chunk of all other ranks' rows by ``write``, and start to send it; chunk after chunk."""
        shards, group = self._shards, self._shards.group
        batch, _, features = self.out.shape
        others = [rank for rank in range(group.size()) if rank != group.rank()]
        sent = self.out.new_empty(len(others), batch, chunk.stop - chunk.start, features)
        for rank, buffer in zip(others, sent, strict=True):
            write(shards.of(rank, chunk), buffer)
        counts = [sent[0].numel() * (rank != group.rank()) for rank in range(group.size())]
        started = funcol.all_to_all_single(sent.view(-1), counts, counts, shards.group_name)
        self._under_way.append((started, sent))

    def receive(self, chunk: slice) -> Tensor:
        """Return this chunk of ``out`` once the other ranks' parts have arrived; in the order of the sends."""
        started, sent = self._under_way.popleft()
        received = self._shards.wait(started, sent).view(sent.shape)
        return torch.sum(received, 0, out=self.out[:, chunk])

    def close(self) -> None:
        """End the pass, also after an exception."""


def chunks_of(num_rows: int, num_chunks: int) -> list[slice]:
    """Return slices of rows, none of them empty."""
    bounds = (chunk_bounds(num_rows, num_chunks, chunk) for chunk in range(num_chunks))
    return [slice(begin, end) for begin, end in bounds if begin < end]
