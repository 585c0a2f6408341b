"""Rows of the sequence on their way between ranks, such as tp ranks: gathered, or summed and scattered to their owners.

Each function starts a collective and returns a function that waits for it; matrix products run in between. Shards have
`torch.chunk` sizes, or any others: unequal shards are padded to the largest while they travel.

A `FunctionalMoves`, or a `SymmetricMoves` of `cp_mesh.comm.symmetric_shards`, is one pass whose products begin before
all rows have arrived, or before all are computed; its shards are equal. What the first one's methods say holds for
both. Shapes: B batch rows, n rows of a rank or a part of them, D features.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Literal, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from cp_mesh._torch import funcol, resolve_group
from cp_mesh.comm.waiting import wait_for
from cp_mesh.geometry.layouts import chunk_bounds

Result = Callable[[], Tensor]
"""Waits for a collective and returns its result."""


class Shards(NamedTuple):
    """How the rows [..., rows, D] of a sequence lie on the ranks of a group.

    Attributes:
        num_rows: of all ranks together.
        group_name: of the group.
        what: the function that the user called, for errors.
        lens: rows of each rank, if they are not `torch.chunk` sizes.
        rank: this rank, if the caller knows it: code that torch.compile traces cannot ask the group.
    """

    num_rows: int
    group_name: str
    what: str = "tensor parallelism"
    lens: tuple[int, ...] = ()
    rank: int | None = None

    @property
    def group(self) -> dist.ProcessGroup:
        return resolve_group(self.group_name)

    @property
    def own(self) -> int:
        """Number of rows on this rank."""
        return self.sizes[self.group.rank() if self.rank is None else self.rank]

    @property
    def sizes(self) -> list[int]:
        """Number of rows on each rank."""
        if self.lens:
            return [*self.lens]
        size = self.group.size()
        return [end - begin for begin, end in (chunk_bounds(self.num_rows, size, rank) for rank in range(size))]

    def of(self, rank: int, part: slice | None = None) -> slice:
        """Return the rows of a rank, or a part of them, for equal shards."""
        own = self.num_rows // self.group.size()
        begin, end = (0, own) if part is None else (part.start, part.stop)
        return slice(rank * own + begin, rank * own + end)

    def gather(self, x: Tensor) -> Result:
        """Start to gather x [..., own, D] to [..., num_rows, D]."""
        sizes = self.sizes
        if len(sizes) == 1:
            return lambda: x
        lead, most = x.shape[:-2], max(sizes)
        sent = _padded(x, most).contiguous()
        started = funcol.all_gather_into_tensor(sent.view(-1), len(sizes), self.group_name)

        def result() -> Tensor:
            parts = self._wait(started, sent).view(len(sizes), *lead, most, x.shape[-1])
            if len(sizes) * most == self.num_rows:
                return parts.movedim(0, -3).reshape(*lead, self.num_rows, x.shape[-1])  # a view of one batch row
            return torch.cat([part[..., :size, :] for part, size in zip(parts, sizes, strict=True)], -2)

        return result

    def scatter_sum(self, x: Tensor) -> Result:
        """Start to sum x [..., num_rows, D] over the ranks; each rank gets its own rows."""
        sizes = self.sizes
        if len(sizes) == 1:
            return lambda: x
        own, most = self.own, max(sizes)
        if len(sizes) * most == self.num_rows:
            sent = x.unflatten(-2, (len(sizes), most)).movedim(-3, 0).contiguous()  # a view of one batch row
        else:
            sent = torch.stack([_padded(part, most) for part in x.split(sizes, -2)])
        started = funcol.reduce_scatter_tensor(sent.view(-1), "sum", len(sizes), self.group_name)
        return lambda: self._wait(started, sent).view(*x.shape[:-2], most, x.shape[-1])[..., :own, :].contiguous()

    def all_sum(self, x: Tensor) -> Result:
        """Start to sum x over the ranks; each rank gets the whole sum."""
        if len(self.sizes) == 1:
            return lambda: x
        sent = x.contiguous()
        started = funcol.all_reduce(sent, "sum", self.group_name)
        return lambda: self._wait(started, sent)

    def _wait(self, started: Tensor, sent: Tensor) -> Tensor:
        """Wait for a collective; the argument ``sent`` keeps its input alive until then."""
        return wait_for(started, f"{self.what}: rows of other ranks", self.group_name)


def _padded(x: Tensor, num_rows: int) -> Tensor:
    missing = num_rows - x.shape[-2]
    return F.pad(x, (0, 0, 0, missing)) if missing else x


Whole = Literal["lent", "kept"]
"""How long the rows of a gather stay valid: until the end of the pass, or as long as the caller keeps them."""
Write = Callable[[slice, Tensor], None]
"""Computes rows of the sequence into a buffer [B, n, D]."""


class FunctionalMoves:
    """One pass over functional collectives: an all-gather, and an all-to-all per chunk instead of a reduce-scatter.

    "Lent" memory is valid until its end.
    """

    def __init__(self, shards: Shards) -> None:
        self._shards = shards

    def gather(self, x: Tensor, whole: Whole | None) -> FunctionalGather:
        """Start to gather x [B, n, D]; once per pass."""
        return FunctionalGather(self._shards, x)

    def sums(self, like: Tensor, features: int, num_chunks: int) -> FunctionalSums:
        """Prepare sums of rows [B, *, features] with the dtype, device and B of ``like``; once per pass."""
        return FunctionalSums(self._shards, like, features, num_chunks)

    def close(self) -> None:
        """End the pass, also after an exception."""


class FunctionalGather:
    """Rows of all ranks on their way to this one."""

    def __init__(self, shards: Shards, x: Tensor) -> None:
        self._own, self._result = shards.of(shards.group.rank()), shards.gather(x)
        self._whole: Tensor | None = None

    def parts(self) -> Iterator[tuple[slice, Tensor]]:
        """Yield rows of other ranks, [B, n, D] each, as they arrive, with their place in the sequence."""
        whole = self.whole()
        for rows in (slice(0, self._own.start), slice(self._own.stop, whole.shape[1])):
            if rows.start < rows.stop:
                yield rows, whole[:, rows]

    def whole(self) -> Tensor:
        """Return all rows, [B, rows, D], if the gather was asked for them."""
        if self._whole is None:
            self._whole = self._result()
        return self._whole


class FunctionalSums:
    """Partial sums of rows, which every rank has computed, on their way to the owners of the rows.

    Attributes:
        out: [B, rows of this rank, D], the sums of the other ranks' parts.
        chunks: parts of a rank's rows, which travel one after the other.
    """

    def __init__(self, shards: Shards, like: Tensor, features: int, num_chunks: int) -> None:
        self._shards, self._under_way = shards, deque[tuple[Tensor, Tensor]]()
        self.out = like.new_empty(len(like), shards.own, features)
        self.chunks = chunks_of(shards.own, num_chunks)

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
        received = self._shards._wait(started, sent).view(sent.shape)
        return torch.sum(received, 0, out=self.out[:, chunk])


def chunks_of(num_rows: int, num_chunks: int) -> list[slice]:
    """Return slices of rows, none of them empty."""
    bounds = (chunk_bounds(num_rows, num_chunks, chunk) for chunk in range(num_chunks))
    return [slice(begin, end) for begin, end in bounds if begin < end]


def gather(x: Tensor, dim: int, lens: Sequence[int], inverse: Tensor | None, group_name: str, what: str) -> Tensor:
    """Return the whole tensor, contiguous, from each rank's shard along a dim; ``what`` names the call in an error."""
    rows = x.movedim(dim, 0)
    whole = Shards(sum(lens), group_name, what, tuple(lens)).gather(_flat(rows))()
    whole = whole if inverse is None else whole.index_select(0, inverse)
    return whole.view(len(whole), *rows.shape[1:]).movedim(0, dim).contiguous()


def scatter_sum(
    x: Tensor, dim: int, lens: Sequence[int], inverse: Tensor | None, rank: int, group_name: str, what: str
) -> Tensor:
    """Return this rank's shard of the sum of whole tensors over ranks, contiguous, summed in their dtype."""
    rows = x.movedim(dim, 0)
    rows = rows if inverse is None else rows.new_zeros(sum(lens), *rows.shape[1:]).index_copy(0, inverse, rows)
    own = Shards(sum(lens), group_name, what, tuple(lens), rank).scatter_sum(_flat(rows))()
    return own.view(len(own), *rows.shape[1:]).movedim(0, dim).contiguous()


def _flat(rows: Tensor) -> Tensor:
    """[rows, D]"""
    return rows.reshape(len(rows), rows.shape[1:].numel())
