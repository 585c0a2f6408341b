"""A cache of one attention layer's keys and values; each cp rank holds some tokens, evenly.

The host never waits for the device: with a fixed capacity shapes are static, the rows of further tokens are planned
after the prompt, and the tokens are counted on the device.

Legend: B batch, H query heads, K kv heads, n tokens or query rows, D head dim, Dv that of values.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor

from cp_mesh._torch import untraced
from cp_mesh.call.spec import check_tensors
from cp_mesh.comm.agreement import checking, compare, refusing
from cp_mesh.comm.fingerprints import fingerprint, shape_of
from cp_mesh.errors import as_int, refuse
from cp_mesh.geometry.mask import Mask
from cp_mesh.inference.decoding import UNUSED, check_tensor, decode
from cp_mesh.inference.split_kv import Further
from cp_mesh.kernels.scores import ADDED
from cp_mesh.sequence.sharded_sequence import ShardedSequence


class ShardedCache:
    """The keys and values of one attention layer with their positions; each cp rank holds some tokens.

    `prefill` takes the keys and values of a sharded forward of the prompt. `append` takes those of further tokens:
    every rank computes them alike, and the rank with the fewest tokens keeps them. `attend` computes their attention.
    If the sequence has a length, a prompt of that length is expected, and `prefill` comes first. All batch rows have
    one length. Only `attend` communicates, and in check mode `append`.

    With a ``capacity`` memory is allocated once, for ceil(capacity / cp_size) tokens per rank and one row more. Shapes
    never change, and the fill level is counted on the device: made for CUDA graphs. Their replays append too, but do
    not count in ``length``. Replays beyond the capacity raise a device-side assertion. Without a capacity, memory grows
    by a quarter when it is full.

    Args:
        sequence: the prompt's `ShardedSequence`: its mesh, layout and length.
        capacity: most tokens of the whole sequence, prompt included; None: no limit.

    Attributes:
        sequence, capacity: as given.
        length: tokens in the cache, on all ranks together.

    Raises:
        ArgumentError: on shapes, dtypes or devices that change, on more tokens than the capacity, or on calls out of
            order: `append` before the prompt of a sequence with a length, `prefill` of a cache that has tokens,
            `attend` before `append`.
        UnsupportedError: as in `decode`.

    Example:
        >>> cache = ShardedCache(sequence)  # doctest: +SKIP
        >>> cache.prefill(k, v)  # this rank's rows, [B, K, S/cp, D]  # doctest: +SKIP
        >>> cache.append(k, v)  # of the next token, [B, K, 1, D], on every rank  # doctest: +SKIP
        >>> out = cache.attend(q)  # its query and result, [B, H, 1, D]  # doctest: +SKIP
    """

    def __init__(self, sequence: ShardedSequence, capacity: int | None = None) -> None:
        if not isinstance(sequence, ShardedSequence):
            refuse("ShardedCache", "a ShardedSequence", type(sequence).__name__, 'ShardedSequence(mesh["cp"])')
        capacity = as_int(capacity)
        if capacity is not None and (type(capacity) is not int or not 0 < capacity < UNUSED):
            refuse("capacity", f"an int of 1 to {UNUSED - 1} tokens, or None", repr(capacity), "None lets it grow")
        self.sequence, self.capacity, self.length = sequence, capacity, 0
        self._rank = sequence.cp_rank
        self._memory: tuple[Tensor, Tensor, Tensor] | None = None  # keys, values and positions
        self._counts = torch.zeros(sequence.cp_size, dtype=torch.int64, device="cpu")  # tokens on each rank
        self._num_rows = self._num_new = self._begin = 0
        self._further: Further | None = None

    def __copy__(self) -> ShardedCache:
        return copy.deepcopy(self)  # with the same memory, each would write over the other's tokens

    @property
    def key(self) -> Tensor:
        """This rank's keys, a view [B, K, rows, D]; with a capacity all rows, also those that are not filled yet."""
        return self._allocated()[0][:, :, : self._num_rows]

    @property
    def value(self) -> Tensor:
        """This rank's values, a view [B, K, rows, Dv]."""
        return self._allocated()[1][:, :, : self._num_rows]

    @property
    def positions(self) -> Tensor:
        """Positions of these rows, int64 [rows]; `UNUSED` for rows that are not filled yet."""
        positions = self._allocated()[2][: self._num_rows]
        if self._further is None:
            return positions
        rows = torch.arange(len(positions), device=positions.device)
        return torch.where(rows < self._further.num_keys, positions, UNUSED)

    @untraced
    def prefill(self, key: Tensor, value: Tensor) -> None:
        """Store this rank's keys and values of the prompt, in the layout of the sequence.

        Args:
            key: [B, K, shard_len, D]; padding rows of the sequence are left out.
            value: [B, K, shard_len, Dv].
        """
        self._check(key, value)
        if self.length:
            refuse("prefill", "an empty cache", f"{self.length} tokens", "append further tokens, or make a new cache")
        sequence, size = self.sequence, self.sequence.cp_size
        seq_len = key.shape[2] * size if sequence.seq_len is None else sequence.seq_len
        length = seq_len if sequence.length is None else sequence.length
        shards = [sequence.layout.positions(seq_len, size, rank) for rank in range(size)]
        if (expected := len(shards[self._rank])) != key.shape[2]:
            refuse("prefill", f"{expected} rows of this rank's shard", key.shape[2], "set the sequence's length")
        self._check_room(length)
        counts = torch.tensor([int((positions < length).sum()) for positions in shards], device="cpu")
        positions = shards[self._rank].to(key.device)
        if counts[self._rank] < len(positions):
            rows = (shards[self._rank] < length).nonzero().flatten().to(key.device)
            key, value, positions = key.index_select(2, rows), value.index_select(2, rows), positions[rows]
        self._reserve(key, value, counts)
        num_rows = int(counts[self._rank])
        for memory, x, dim in zip(self._allocated(), (key, value, positions), (2, 2, 0), strict=True):
            memory.narrow(dim, 0, num_rows).copy_(x)
        self._counts, self.length = counts, length
        self._plan()

    @untraced
    def append(self, key: Tensor, value: Tensor) -> None:
        """Store the keys and values of the tokens that follow; one rank keeps each token.

        Args:
            key: [B, K, n, D], the same on every cp rank.
            value: [B, K, n, Dv], likewise.
        """
        with refusing(group := self.sequence.mesh.get_group()):
            self._check(key, value)
            num_new = key.shape[2]
            if num_new < 1:
                refuse("append", "at least one token", 0, "leave the call out")
            if not self.length and (prompt := self.sequence.length) is not None:
                hint = "call prefill first; for no prompt, make the cache with a ShardedSequence without length="
                refuse("append", f"the {prompt} tokens of the sequence in the cache", "an empty cache", hint)
            self._check_room(self.length + num_new)
        told = fingerprint if checking(group) else shape_of
        kind = "append", told(key), told(value)
        compare(group, kind, lambda: dict(zip(("call", "key", "value"), kind, strict=True)))
        if self.capacity is None:
            self._append_from_host(key, value)
        else:
            if self._further is None:
                self._reserve(key, value, self._counts)
                self._plan()
            self._append_on_device(key, value)
        self.length, self._num_new = self.length + num_new, num_new

    def _append_from_host(self, key: Tensor, value: Tensor) -> None:
        """Append without an index tensor on the device: the host would wait for its copy."""
        owners, rows = places(self._counts, key.shape[2])
        counts = self._counts + (owners[:, None] == torch.arange(len(self._counts), device="cpu")).sum(0)
        self._reserve(key, value, counts)  # before any change: it may run out of memory
        memory, self._counts = self._allocated(), counts
        for token, (owner, row) in enumerate(zip(owners.tolist(), rows.tolist(), strict=True)):
            if owner == self._rank:
                memory[0][:, :, row], memory[1][:, :, row] = key[:, :, token], value[:, :, token]
                memory[2][row] = self.length + token

    def _plan(self) -> None:
        """With a capacity, plan the rows of all further tokens, and their positions."""
        if self.capacity is None:
            return
        positions = self._allocated()[2]
        with torch.inference_mode(False):
            owners, rows = places(self._counts.to(positions.device), self.capacity - self.length)
            mine = owners == self._rank
            own = rows[mine]
            positions[own] = self.length + mine.nonzero().flatten()
            counts = int(self._counts[self._rank]) + torch.cat([mine.new_zeros(1), mine]).cumsum(0)
            self._further, self._begin = (
                Further.planned(torch.where(mine, rows, self._num_rows - 1), counts),
                self.length,
            )

    def _append_on_device(self, key: Tensor, value: Tensor) -> None:
        """Do the same work in every step: tokens of other ranks go to the last row, which is never read."""
        assert self._further is not None
        self._further.append((key, value), self._allocated()[:2])

    @untraced
    def attend(self, query: Tensor, *, mask: Mask = Mask(causal=True), **options: Any) -> Any:  # noqa: B008 - frozen
        """Return `decode` for the tokens that were appended last.

        Args:
            query: [B, H, n, D], of the last n tokens, all of which came by the last `append`; equal on every cp rank.
            mask: as in `decode`.
            options: scale, softcap, sinks, alibi_slopes, kernel and return_lse, as in `decode`.

        Returns:
            out [B, H, n, Dv]; with ``return_lse`` (out, lse).
        """
        with refusing(self.sequence.mesh.get_group()):
            check_tensor("query", query)
            num_rows = query.shape[2]
            if num_rows > self._num_new:
                expected, hint = f"at most {self._num_new} rows, those of the last append", "append their keys before"
                refuse("query", expected, num_rows, hint)
        positions, further = self._allocated()[2][: self._num_rows], self._further
        where: dict[str, Any] = {} if further is None else {"num_keys": further.num_keys}
        if (
            num_rows > 1
            or (isinstance(mask, Mask) and mask.hides_earlier())
            or any(options.get(name) is not None for name in ADDED)
        ):
            end = self.length if further is None else further.taken + self._begin
            where |= {"q_positions": torch.arange(-num_rows, 0, device=query.device) + end, "k_positions": positions}
        return decode(query, self.key, self.value, mesh=self.sequence.mesh, mask=mask, **where, **options)

    def _allocated(self) -> tuple[Tensor, Tensor, Tensor]:
        if self._memory is None:
            refuse("ShardedCache", "keys and values", "an empty cache", "prefill or append first")
        return self._memory

    def _check(self, key: Tensor, value: Tensor) -> None:
        """Refuse tensors that are not a pair of keys and values, or do not fit those in the cache."""
        for name, x in (("key", key), ("value", value)):
            check_tensor(name, x)
        check_tensors(key, key, value)
        if self._memory is None:
            return
        for name, x, memory in zip(("key", "value"), (key, value), self._memory, strict=False):
            expected, got = ((*y.shape[:2], y.shape[3], y.dtype, y.device) for y in (memory, x))
            if expected != got:
                what = "batch size, kv heads, head dim, dtype and device"
                refuse(name, f"{what} {expected}, as in the cache", got, "make a new cache for other sequences")

    def _check_room(self, length: int) -> None:
        most = UNUSED if self.capacity is None else self.capacity
        if length > most:
            refuse("ShardedCache", f"at most {most} tokens, its capacity", length, "make it with a larger capacity")

    def _reserve(self, key: Tensor, value: Tensor, counts: Tensor) -> None:
        """Allocate memory for ``counts`` tokens on each rank, or for the whole capacity and one row that takes other
        ranks' tokens."""
        have = 0 if self._memory is None else len(self._memory[2])
        if self.capacity is None:
            self._num_rows = int(counts[self._rank])
            wanted = max(self._num_rows, have + have // 4) if self._num_rows > have else have
        else:
            wanted = have or max(int(counts.max()), -(-self.capacity // len(counts))) + 1
            self._num_rows = wanted
        if wanted == have and self._memory is not None:
            return
        # zeros, because a weight of 0 times NaN would be NaN
        with torch.inference_mode(False):  # tensors made in inference mode could not be written outside of it
            rows = [x.new_zeros((*x.shape[:2], wanted, x.shape[3])) for x in (key, value)]
            memory = rows[0], rows[1], torch.full((wanted,), UNUSED, device=key.device)
            for new, old, dim in zip(memory, self._memory or (), (2, 2, 0), strict=False):
                new.narrow(dim, 0, have).copy_(old)
            self._memory = memory


def places(counts: Tensor, num_new: int) -> tuple[Tensor, Tensor]:
    """Return where the next tokens go: each to the rank that then has the fewest, and to the lowest of these.

    Args:
        counts: int64 [cp_size], tokens on each rank.
        num_new: how many tokens.

    Returns:
        Ranks and rows, int64 [num_new] each.

    >>> [x.tolist() for x in places(torch.tensor([3, 1, 2]), 4)]
    [[1, 1, 2, 0], [1, 2, 2, 3]]
    """
    size = len(counts)
    ranks, more = (torch.arange(n, device=counts.device) for n in (size, num_new))
    # all rows that may be filled, as row · size + rank: they are filled in this order
    order = ((counts + more[:, None]) * size + ranks).flatten().sort().values[:num_new]
    return order % size, order // size
