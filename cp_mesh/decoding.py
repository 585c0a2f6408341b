"""Decoding: few queries, equal on all cp ranks, against keys and values that are sharded by sequence.

Every rank attends to the keys that it holds, whichever these are. The results are merged by their lse, after one
all-gather of both: out = sum over ranks of exp(lse_r - L) · out_r, with L = logsumexp over ranks of lse_r. A rank
without a key that some query sees has lse = -inf, and weighs nothing.

A cache of fixed capacity has static shapes: how far it is filled stands in tensors on the device, and nothing waits for
the host. Rows that hold no token yet have the position `UNUSED`, which no query sees.

Legend: B batch, H query heads, K kv heads, n query rows, D head dim, Dv that of values; T tokens in all.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import lru_cache
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from cp_mesh.agreement import announce_refusal, checking, fingerprint, require_agreement
from cp_mesh.attention import Asked, make_options
from cp_mesh.call import Options, Tensors, check_scores, check_tensors, make_scores
from cp_mesh.errors import UnsupportedError, refuse
from cp_mesh.formats import FORMATS
from cp_mesh.kernels import KERNELS, choose_kernel
from cp_mesh.kernels.combine import OutputSum, accumulation_dtype
from cp_mesh.kernels.contract import Kernel, KernelTile, Pairs, Request, shortfalls
from cp_mesh.kernels.scores import ADDED, Scores
from cp_mesh.masks import FULL, NONE, Band, Mask
from cp_mesh.placements import find_cp_axis, group_that_waits
from cp_mesh.plan import compute_capability_of, warn_if_slow
from cp_mesh.sequence import ShardedSequence

UNUSED = NONE - 1
"""The position of a row of a cache that holds no token yet."""
SPLITTING = ("fa2", "fa2_package")
"""Kernels that share the keys of a few queries out over the whole GPU, and so are taken first where all keys count.
Others give all keys of a head to one processor."""

_funcol = torch.ops._c10d_functional


class Part(NamedTuple):
    """Rows ``begin`` to ``end`` of this rank's keys, which pairs of them count, and the kernel that computes them."""

    begin: int
    end: int
    cover: Band | Pairs
    kernel: Kernel


def decode(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    mesh: DeviceMesh | dist.ProcessGroup | None = None,
    q_positions: Tensor | None = None,
    k_positions: Tensor | None = None,
    num_seen: int | None = None,
    mask: Mask = Mask(causal=True),  # noqa: B008 - frozen
    scale: float | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    relative_bias: Tensor | None = None,
    kernel: str = "auto",
    return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Exact attention of few queries, equal on all cp ranks, over keys and values of which each rank holds some rows.

    For inference: no gradients. It costs one all-gather of B · H · n · (Dv + 1) numbers of 4 bytes (8 of float64) a
    rank, twice that with ``num_seen``, however long the sequence is. `ShardedCache` keeps the keys and calls it.

    Args:
        query: [B, H, n, D], local, the same on every cp rank; float64, float32, bfloat16 or float16.
        key: [B, K, rows, D], this rank's keys, in any order; ranks may hold unequal numbers of them, or none. H is a
            multiple of K.
        value: [B, K, rows, Dv]; Dv may differ from D where the kernel allows.
        mesh: as in `cp_mesh.attention`.
        q_positions: int64 [n], positions of the queries, on their device. None, with ``k_positions``, on every rank:
            all queries see all keys, as one does that comes after them.
        k_positions: int64 [rows], positions of this rank's keys. No query sees keys at ``cp_mesh.decoding.UNUSED``.
        num_seen: so many rows of ``key``, the first ones, are seen by all queries: fast kernels take them, and only the
            others are read at their positions. An int on every rank, which may differ, or None on every rank.
        mask: who may attend to whom, said without tensors.
        scale, softcap, sinks, alibi_slopes, relative_bias: as in `cp_mesh.attention`, equal on every cp rank.
        kernel: as in `cp_mesh.attention`.
        return_lse: also return the log-sum-exp of the scores, natural log, float32 (float64), [B, H, n]; -inf for a
            query with no key, whose output is 0. It leaves out sinks.

    Returns:
        out [B, H, n, Dv] in the dtype of ``query``, the same on every rank; with ``return_lse`` (out, lse).

    Raises:
        ArgumentError: arguments that are wrong or disagree.
        UnsupportedError: gradients, DTensors, masks with tensors, or what no kernel can serve.
        RankMismatchError: in check mode, if ranks disagree, the queries' content included.
        What depends on this rank's own rows, the shape of ``k_positions`` and ``num_seen``, is raised on that rank
        alone; in check mode (`cp_mesh.check_mode`) on all.

    Example:
        >>> out = decode(q, cache.key, cache.value, mesh=mesh["cp"])  # q [B, H, 1, D]  # doctest: +SKIP

    Source: tree decoding, Shyam et al. 2024, arXiv:2408.04093.
    """
    asked = Asked(
        mesh=mesh, mask=mask, scale=scale, softcap=softcap, sinks=sinks, alibi_slopes=alibi_slopes,
        relative_bias=relative_bias, kernel=kernel, return_lse=return_lse,
    )  # fmt: skip
    out, lse = _decode(query, key, value, asked, q_positions, k_positions, num_seen)
    return (out, lse) if return_lse else out


@torch._disable_dynamo  # what is planned here no compiled code could keep
def _decode(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    asked: Asked,
    q_positions: Tensor | None,
    k_positions: Tensor | None,
    num_seen: int | None,
) -> tuple[Tensor, Tensor]:
    with _announcing(asked.mesh):
        for name, x in (("query", query), ("key", key), ("value", value)):
            _check_tensor(name, x)
        group = find_cp_axis((query, key, value), asked.mesh, 2).group
        parts, scores, options = _prepare(query, key, value, asked, q_positions, k_positions, num_seen)
    if checking():
        given = {"query": query, **{name: getattr(asked, name) for name in ("sinks", "alibi_slopes", "relative_bias")}}
        alike = {
            "key and value": str([(x.shape[0], x.shape[1], x.shape[3], x.dtype) for x in (key, value)]),
            "options": f"{options.spec()} {k_positions is None} {num_seen is None}",
            "q_positions": fingerprint(q_positions),
        }
        require_agreement(group, alike | {name: fingerprint(x) for name, x in given.items()})
    with torch.autocast(query.device.type, enabled=False):  # it would round the fp32 sums of kernels
        return _attend(query, key, value, parts, scores, group)


@contextmanager
def _announcing(mesh: Any) -> Iterator[None]:
    """In check mode, tell the other ranks what is refused inside."""
    try:
        yield
    except Exception as error:
        if checking() and (group := group_that_waits(None, mesh, None)) is not None:
            announce_refusal(group, error)
        raise


def _check_tensor(name: str, x: object) -> None:
    """A local tensor [B, heads, rows, D] that asks for no gradient."""
    if not isinstance(x, Tensor):
        refuse(name, "a tensor", type(x).__name__, "use torch.as_tensor")
    if isinstance(x, DTensor):
        refuse(name, "a local tensor", "a DTensor", "pass to_local()", UnsupportedError)
    if x.ndim != 4:
        refuse(name, "[B, heads, rows, head dim]", tuple(x.shape), "transpose other formats")
    _check_ungraded(name, x)


def _check_ungraded(name: str, x: Tensor) -> None:
    if torch.is_grad_enabled() and x.requires_grad:
        hint = "decode under torch.no_grad(), or train with cp_mesh.attention"
        refuse(name, "a tensor that requires no gradient", "requires_grad", hint, UnsupportedError)


def _prepare(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    asked: Asked,
    q_positions: Tensor | None,
    k_positions: Tensor | None,
    num_seen: int | None,
) -> tuple[list[Part], Scores, Options]:
    """The parts of a call, as many on every rank, each with its kernel; what cannot be computed is refused."""
    options = make_options(query, key, value, asked, FORMATS[2])
    check_tensors(query, key, value, decoding=True)
    tensors = Tensors(sinks=asked.sinks, alibi_slopes=asked.alibi_slopes, relative_bias=asked.relative_bias)
    for name in ("sinks", "alibi_slopes", "relative_bias"):
        if (x := getattr(tensors, name)) is None:
            continue
        if not isinstance(x, Tensor) or isinstance(x, DTensor):
            refuse(name, "a local tensor", type(x).__name__, "use torch.tensor, or to_local()")
        _check_ungraded(name, x)
    check_scores(query, tensors, 0)
    scores = make_scores(options, tensors, accumulation_dtype(query.dtype))
    mask = asked.mask
    if mask.elementwise:
        hint = "decode sequences of one length, or one document, without them"
        refuse("mask", "a Mask without documents and key_padding", "tensors", hint, UnsupportedError)
    if query.shape[2] < 1:
        refuse("query", "at least one row", 0, "the queries are the last tokens")
    by_position = _hides(mask) or scores.needs_positions
    for name, x, rows in (("q_positions", q_positions, query.shape[2]), ("k_positions", k_positions, key.shape[2])):
        if x is None and (by_position or q_positions is not k_positions):
            hint = "pass q_positions and k_positions"
            refuse(name, "positions: a window, a length or scores read them, or the others are given", None, hint)
        if x is not None and (x.dtype, tuple(x.shape), x.device) != (torch.int64, (rows,), query.device):
            got = f"{x.dtype} {tuple(x.shape)} on {x.device}"
            refuse(name, f"int64 ({rows},) on {query.device}, one for each row", got, "move and cast it")
    if num_seen is not None and (k_positions is None or by_position or not 0 <= num_seen <= key.shape[2]):
        expected = f"0 to {key.shape[2]} rows, beside positions, that no window, length or score reads"
        refuse("num_seen", expected, num_seen, "leave it out")

    if q_positions is None or k_positions is None:
        covers: list[tuple[int, int, Band | Pairs]] = [(0, key.shape[2], FULL)]
    else:
        seen = 0 if num_seen is None else num_seen
        covers = [] if num_seen is None else [(0, seen, FULL)]
        covers.append((seen, key.shape[2], Pairs(without_unused(mask), q_positions, k_positions[seen:])))
    parts = [Part(*part, _choose(query, value, asked.kernel, part[2], scores)) for part in covers]
    return parts, scores, options


def without_unused(mask: Mask) -> Mask:
    """The mask, by which no query sees keys at `UNUSED`."""
    return replace(mask, length=UNUSED if mask.length is None else min(mask.length, UNUSED))


def _hides(mask: Mask) -> bool:
    """Whether it may hide a key from queries that come after it."""
    return mask.window is not None or mask.length is not None


def _choose(query: Tensor, value: Tensor, name: str, cover: Band | Pairs, scores: Scores) -> Kernel:
    """The kernel of a part, from what is equal on all ranks."""
    request = Request(
        device=query.device.type,
        compute_capability=compute_capability_of(query.device),
        dtype=query.dtype,
        covers=frozenset({"full" if cover == FULL else "pairs"}),
        head_dim=query.shape[3],
        v_head_dim=value.shape[3],
        differentiable_lse=False,
        deterministic=False,
        min_keys=1,
        features=scores.features,
    )
    return _choose_once(name, request)


@lru_cache(maxsize=64)  # every step asks alike
def _choose_once(name: str, request: Request) -> Kernel:
    if name == "auto" and request.covers == {"full"}:
        for splitting in SPLITTING:
            if not shortfalls(KERNELS[splitting].capability, request):
                return KERNELS[splitting]
    kernel = choose_kernel(name, request)
    warn_if_slow(kernel, name, request)
    return kernel


def _attend(
    query: Tensor, key: Tensor, value: Tensor, parts: list[Part], scores: Scores, group: dist.ProcessGroup
) -> tuple[Tensor, Tensor]:
    """(out, lse) of all ranks' keys."""
    shape, dtype = (*query.shape[:3], value.shape[3]), accumulation_dtype(query.dtype)
    num_rows, without_sinks = query.shape[:3].numel(), replace(scores, sinks=None)
    results = query.new_empty((len(parts), num_rows * (shape[3] + 1)), dtype=dtype)  # of each part: out, then lse

    def views(of_part: Tensor) -> tuple[Tensor, Tensor]:
        out, lse = of_part.split([num_rows * shape[3], num_rows])
        return out.view(shape), lse.view(shape[:3])

    for part, of_part in zip(parts, results, strict=True):
        running = part.kernel.begin_forward(query, shape[3], without_sinks)  # sinks count once, not on every rank
        if part.end > part.begin:
            tile = KernelTile((0, shape[2]), (0, part.end - part.begin), part.cover)
            running.step(key[:, :, part.begin : part.end], value[:, :, part.begin : part.end], [tile])
        running.finish(views(of_part))
    gathered = _funcol.wait_tensor(_funcol.all_gather_into_tensor(results, group.size(), group.group_name))
    return merge([views(of_part) for of_part in gathered], query, scores.sinks)


def merge(pieces: Sequence[tuple[Tensor, Tensor]], query: Tensor, sinks: Tensor | None) -> tuple[Tensor, Tensor]:
    """(out, lse) of all keys from those of all parts of all ranks, in their order; out in the dtype of ``query``."""
    total = OutputSum(pieces[0][0].shape, pieces[0][0].dtype, query.device)
    for out, lse in pieces:
        total.add(0, out, lse)
    return total.finish(query, query.dtype, sinks=sinks)


class ShardedCache:
    """The keys and values of one attention layer, of which each cp rank holds some tokens, and their positions.

    `prefill` takes what a sharded forward of the prompt computed, `append` the keys and values of further tokens, which
    every rank computes alike and one rank keeps: the one that has fewest. `attend` is their attention. All batch rows
    have one length. Nothing is communicated but by `attend`, and in check mode by `append`.

    With a ``capacity`` memory is allocated once, for ceil(capacity / cp_size) tokens a rank and one row more, shapes
    never change, and how far it is filled is counted in tensors on the device: made for CUDA graphs, whose replays
    append too, and do not count in ``length``. Replays beyond the capacity raise a device-side assertion. Without one,
    memory grows by a quarter when it is full.

    Args:
        sequence: the prompt's `ShardedSequence`: its mesh, layout and length.
        capacity: the most tokens of the whole sequence, prompt included; None: there is no bound.

    Attributes:
        sequence, capacity: as given.
        length: tokens in the cache, on all ranks together.

    Raises:
        ArgumentError: on shapes, dtypes or devices that change, on more tokens than the capacity, or on calls out of
            order.
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
        if capacity is not None and (type(capacity) is not int or not 0 < capacity < UNUSED):
            refuse("capacity", f"an int of 1 to {UNUSED - 1} tokens, or None", repr(capacity), "None grows")
        self.sequence, self.capacity, self.length = sequence, capacity, 0
        self._group, self._rank = sequence.mesh.get_group(), sequence.cp_rank
        self._memory: tuple[Tensor, Tensor, Tensor] | None = None  # of keys, values and positions
        with torch.inference_mode(False):
            self._counts = torch.zeros(sequence.cp_size, dtype=torch.int64, device="cpu")  # tokens on each rank
        self._num_rows = self._num_seen = self._num_new = 0

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
        """Positions of these rows, int64 [rows]; `UNUSED` of rows that are not filled yet."""
        return self._allocated()[2][: self._num_rows]

    @torch._disable_dynamo
    def prefill(self, key: Tensor, value: Tensor) -> None:
        """Take this rank's keys and values of the prompt, in the layout of the sequence.

        Args:
            key: [B, K, shard_len, D]; rows of the sequence's padding are left out.
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
        self._counts += counts.to(self._counts.device)
        self.length, self._num_seen = length, num_rows

    @torch._disable_dynamo
    def append(self, key: Tensor, value: Tensor) -> None:
        """Take the keys and values of the tokens that follow, each of which one rank keeps.

        Args:
            key: [B, K, n, D], the same on every cp rank.
            value: [B, K, n, Dv], likewise.
        """
        with _announcing(self.sequence.mesh):
            self._check(key, value)
            num_new = key.shape[2]
            if num_new < 1:
                refuse("append", "at least one token", 0, "leave the call out")
            self._check_room(self.length + num_new)
        if checking():
            require_agreement(self._group, {"key": fingerprint(key), "value": fingerprint(value)})
        if self.capacity is None:
            self._append_from_host(key, value)
        else:
            self._append_on_device(key, value)
        self.length, self._num_new = self.length + num_new, num_new

    def _append_from_host(self, key: Tensor, value: Tensor) -> None:
        """Without an index on the device: a copy of one would be waited for."""
        owners, rows = places(self._counts, key.shape[2])
        counts = self._counts + (owners[:, None] == torch.arange(len(self._counts), device="cpu")).sum(0)
        self._reserve(key, value, counts)  # before anything changes: it may find no memory
        self._num_seen, memory = int(self._counts[self._rank]), self._allocated()
        self._counts.copy_(counts)
        for token, (owner, row) in enumerate(zip(owners.tolist(), rows.tolist(), strict=True)):
            if owner == self._rank:
                memory[0][:, :, row], memory[1][:, :, row] = key[:, :, token], value[:, :, token]
                memory[2][row] = self.length + token

    def _append_on_device(self, key: Tensor, value: Tensor) -> None:
        """Alike in every step: what is not this rank's goes to the last row, whose position stays `UNUSED`."""
        assert self.capacity is not None
        self._reserve(key, value, self._counts)
        (owners, rows), memory = places(self._counts, key.shape[2]), self._allocated()
        mine, positions = owners == self._rank, self._counts.sum() + torch.arange(len(rows), device=rows.device)
        self._counts += (owners[:, None] == torch.arange(len(self._counts), device=rows.device)).sum(0)
        torch._assert_async(self._counts.sum() <= self.capacity, "ShardedCache: more tokens than its capacity")
        rows = torch.where(mine, rows, self._num_rows - 1)
        written = key, value, torch.where(mine, positions, UNUSED)
        for to, x, dim in zip(memory, written, (2, 2, 0), strict=True):
            to.index_copy_(dim, rows, x)

    @torch._disable_dynamo
    def attend(self, query: Tensor, *, mask: Mask = Mask(causal=True), **options: Any) -> Any:  # noqa: B008 - frozen
        """`decode` of the tokens that were appended last.

        Args:
            query: [B, H, n, D], of the last n tokens, all of which came by the last `append`; equal on every cp rank.
            mask: as in `decode`.
            options: scale, softcap, sinks, alibi_slopes, relative_bias, kernel and return_lse, as in `decode`.

        Returns:
            out [B, H, n, Dv]; with ``return_lse`` (out, lse).
        """
        with _announcing(self.sequence.mesh):
            _check_tensor("query", query)
            num_rows = query.shape[2]
            if num_rows > self._num_new:
                expected, hint = f"at most {self._num_new} rows, those of the last append", "append their keys first"
                refuse("query", expected, num_rows, hint)
        by_position = (isinstance(mask, Mask) and _hides(mask)) or any(options.get(name) is not None for name in ADDED)
        where: dict[str, Any] = {}
        if by_position or num_rows > 1 or self.capacity is not None:
            end = self.length if self.capacity is None else self._counts.sum()
            q_positions = torch.arange(-num_rows, 0, device=query.device) + end
            where = {"q_positions": q_positions, "k_positions": self.positions}
            where["num_seen"] = None if by_position else self._num_seen
        return decode(query, self.key, self.value, mesh=self.sequence.mesh, mask=mask, **where, **options)

    def _allocated(self) -> tuple[Tensor, Tensor, Tensor]:
        if self._memory is None:
            refuse("ShardedCache", "keys and values", "an empty cache", "prefill or append first")
        return self._memory

    def _check(self, key: Tensor, value: Tensor) -> None:
        """Refuse what is no pair of keys and values, and what does not fit those in the cache."""
        for name, x in (("key", key), ("value", value)):
            _check_tensor(name, x)
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
        """Have memory for so many tokens on each rank, or for all of the capacity and a row that takes what is not
        this rank's."""
        have = 0 if self._memory is None else len(self._memory[2])
        if self.capacity is None:
            self._num_rows = int(counts[self._rank])
            wanted = max(self._num_rows, have + have // 4) if self._num_rows > have else have
        else:
            wanted = have or max(int(counts.max()), -(-self.capacity // len(counts))) + 1
            self._num_rows = wanted
        if wanted == have and self._memory is not None:
            return
        # zeros: a weight of 0 times a value that is no number would be none
        with torch.inference_mode(False):  # tensors made in inference mode could not be written outside of it
            rows = [x.new_zeros((*x.shape[:2], wanted, x.shape[3])) for x in (key, value)]
            memory = rows[0], rows[1], torch.full((wanted,), UNUSED, device=key.device)
            for new, old, dim in zip(memory, self._memory or (), (2, 2, 0), strict=False):
                new.narrow(dim, 0, have).copy_(old)
            self._memory = memory
            if self.capacity is not None:
                self._counts = self._counts.to(key.device)


def places(counts: Tensor, num_new: int) -> tuple[Tensor, Tensor]:
    """Where the next tokens go, each to the rank that then has fewest, and of these to the lowest.

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
    # all rows that may be filled, as row · size + rank: in this order they are
    order = ((counts + more[:, None]) * size + ranks).flatten().sort().values[:num_new]
    return order % size, order // size
