"""Decoding: few queries, equal on all cp ranks or sharded, against keys and values that are sharded by sequence.

Every rank attends to the keys that it holds, in any layout. The results are merged by their lse, after one all-gather
of both: out = sum over ranks of exp(lse_r - L) · out_r, with L = logsumexp over ranks of lse_r. A rank without a key
that a query sees has lse = -inf and weight 0. Sharded queries are gathered first, and one all-to-all sends their
results to the ranks that hold them.

`inference.cache` keeps the keys. The number of keys may be on the device. Rows at the position `UNUSED` hold no token,
and no query sees them.

Legend: B batch, H query heads, K kv heads, n query rows, D head dim, Dv that of values; T tokens in all.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from cp_mesh._torch import funcol, untraced
from cp_mesh.call.dtensor import find_cp_axis, group_that_waits
from cp_mesh.call.plan import compute_capability_of, warn_of_choice
from cp_mesh.call.spec import AttentionSpec, Tensors, check_dense, check_scores, check_tensors, make_scores, make_spec
from cp_mesh.comm.agreement import compare, refusing
from cp_mesh.comm.fingerprints import fingerprint
from cp_mesh.comm.waiting import wait_for
from cp_mesh.errors import UnsupportedError, as_int, refuse, typed
from cp_mesh.geometry.mask import FULL, NONE, Mask
from cp_mesh.inference.split_kv import MAX_ROWS, attend_few
from cp_mesh.kernels.combine import OutputSum, accumulation_dtype
from cp_mesh.kernels.contract import KernelTile, Pairs, Request, shortfalls
from cp_mesh.kernels.merge import Kernel, MergingForward
from cp_mesh.kernels.scores import Scores
from cp_mesh.kernels.table import choose_kernel
from cp_mesh.kernels.triton_attention import TRITON

_TERMS = ("sinks", "alibi_slopes")
UNUSED = NONE - 1
"""The position of a cache row that holds no token yet."""


class Visible(NamedTuple):
    """Which pairs are allowed: the mask (None: all), positions, and the number of key rows on the device."""

    mask: Mask | None
    q_positions: Tensor | None
    k_positions: Tensor | None
    num_keys: Tensor | None


@typed
def decode(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    mesh: DeviceMesh | dist.ProcessGroup | None = None,
    q_positions: Tensor | None = None,
    k_positions: Tensor | None = None,
    num_keys: Tensor | None = None,
    q_lens: Sequence[int] | None = None,
    mask: Mask = Mask(causal=True),  # noqa: B008 - frozen
    scale: float | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    kernel: str = "auto",
    return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Compute exact attention of few queries over keys and values that are sharded over the cp ranks.

    For inference: no gradients. It costs one all-gather of B · H · n · (Dv + 1) numbers of 4 bytes (8 of float64) per
    rank, however long the sequence is. `ShardedCache` keeps the keys and calls it. Queries are the same on every rank.
    With ``q_lens`` each rank has its own queries; an all-gather of them and an all-to-all of the results replace it.

    Args:
        query: [B, H, n, D], local, the same on every cp rank unless ``q_lens``; float64, float32, bfloat16 or float16.
        key: [B, K, rows, D], this rank's keys, in any order; ranks may hold unequal numbers of keys, or none. H is a
            multiple of K.
        value: [B, K, rows, Dv]; Dv may differ from D where the kernel allows.
        mesh: as in `cp_mesh.attention`.
        q_positions: int64 [n], positions of the queries, on their device. If it and ``k_positions`` are None on every
            rank, all queries see all keys, like a query after all keys.
        k_positions: int64 [rows], positions of this rank's keys. No query sees keys at `decode.UNUSED`.
        num_keys: int64 [1] on the device of ``key``: how many of its first rows hold keys; other rows are not read.
            It may differ by rank. None on every rank: all rows hold keys.
        q_lens: number of query rows of each rank, equal on every rank; it may be 0. None: all have the same queries.
        mask: which keys each query sees; a mask without tensors.
        scale, softcap, sinks, alibi_slopes: as in `cp_mesh.attention`, equal on every cp rank.
        kernel: as in `cp_mesh.attention`.
        return_lse: also return the log-sum-exp of the scores, natural log, float32 (float64), [B, H, n]; -inf for a
            query with no key, whose output is 0. It does not include sinks.

    Returns:
        out [B, H, n, Dv] in the dtype of ``query``, for this rank's queries; with ``return_lse`` (out, lse).

    Raises:
        ArgumentError: arguments that are wrong or disagree.
        UnsupportedError: gradients, DTensors, masks with tensors, or a request that no kernel can serve.
        RankMismatchError: in check mode, if ranks disagree, the queries' content included.
        Errors that depend on this rank's own rows, the shapes of ``k_positions`` and, with ``q_lens``, of ``query``,
        are raised on that rank alone; in check mode (`cp_mesh.check_mode`) on all.

    Example:
        >>> out = decode(q, cache.key, cache.value, mesh=mesh["cp"])  # q [B, H, 1, D]  # doctest: +SKIP

    Source: tree decoding, Shyam et al. 2024, arXiv:2408.04093.
    """
    given = {"mask": mask, "scale": scale, "softcap": softcap, "kernel": kernel, "return_lse": return_lse}
    tensors = Tensors(sinks=sinks, alibi_slopes=alibi_slopes)
    where = Visible(mask, q_positions, k_positions, num_keys)
    out, lse = _decode(query, key, value, mesh, given, tensors, where, q_lens)
    return (out, lse) if return_lse else out


@untraced  # compiled code cannot keep the plans made here
def _decode(
    query: Tensor, key: Tensor, value: Tensor, mesh: DeviceMesh | dist.ProcessGroup | None, given: dict[str, Any],
    tensors: Tensors, where: Visible, q_lens: Sequence[int] | None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    q_lens = [*map(as_int, q_lens)] if isinstance(q_lens, list | tuple) else q_lens
    with refusing(lambda: group_that_waits(None, mesh, None)):
        for name, x in (("query", query), ("key", key), ("value", value)):
            check_tensor(name, x)
        axis = find_cp_axis((query, key, value), mesh, 2)
        num_rows = query.shape[2] if q_lens is None else _check_lens(q_lens, query, axis.group)
        where, kernel, scores, options = _prepare(query, key, value, given, tensors, where, num_rows)

    def told() -> dict[str, str]:
        equal = {name: getattr(tensors, name) for name in _TERMS}
        if q_lens is None:
            equal |= {"query": query, "q_positions": where.q_positions}
        return {
            "key and value": str([(x.shape[0], x.shape[1], x.shape[3], x.dtype) for x in (key, value)]),
            "options": f"{options.text()} {where.k_positions is None} {where.num_keys is None}",
            "q_lens": str(q_lens and list(q_lens)),
        } | {name: fingerprint(x) for name, x in equal.items()}

    compare(axis.group, None, told)
    without_sinks = replace(scores, sinks=None)  # they count once, not on every rank
    with torch.autocast(query.device.type, enabled=False):  # autocast would round the fp32 sums of kernels
        if q_lens is None:
            result = _attend(query, key, value, where, kernel, without_sinks)
            pieces = _from_all(result, (*query.shape[:3], value.shape[3]), axis.group)
        else:
            gathered, positions = _gather(query, where.q_positions, q_lens, axis.group)
            where = where._replace(q_positions=positions)
            result = _attend(gathered, key, value, where, kernel, without_sinks)
            pieces = _to_owners(result, (*gathered.shape[:3], value.shape[3]), q_lens, axis.group)
        return merge(pieces, query, scores.sinks)


def _check_lens(q_lens: Sequence[int], query: Tensor, group: dist.ProcessGroup) -> int:
    """Return the number of query rows on all ranks together."""
    size = group.size()
    ints = isinstance(q_lens, Sequence) and all(type(x) is int and x >= 0 for x in q_lens)
    if not ints or len(q_lens) != size or not sum(q_lens):
        refuse(
            "q_lens", f"{size} numbers of rows, one for each rank, not all 0", q_lens, "[x.shape[2] for x in queries]"
        )
    if q_lens[group.rank()] != query.shape[2]:
        refuse("query", f"{q_lens[group.rank()]} rows, as in q_lens", query.shape[2], "list its rows in q_lens")
    return sum(q_lens)


def check_tensor(name: str, x: Tensor) -> None:
    """Refuse anything but a local tensor [B, heads, rows, D] that requires no gradient."""
    check_dense(**{name: x})
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
    given: dict[str, Any],
    tensors: Tensors,
    where: Visible,
    num_rows: int,
) -> tuple[Visible, Kernel | None, Scores, AttentionSpec]:
    """Return the allowed pairs and the kernel for so many queries (None: `attend_few`), or refuse the call."""
    options = make_spec(**given)
    check_tensors(query, key, value, decoding=True)
    for name in _TERMS:
        if (x := getattr(tensors, name)) is None:
            continue
        if not isinstance(x, Tensor) or isinstance(x, DTensor):
            refuse(name, "a local tensor", type(x).__name__, "use torch.tensor, or to_local()")
        _check_ungraded(name, x)
    check_scores(query, tensors, 0)
    options = options.with_scale(query.shape[3])
    scores = make_scores(options, tensors, accumulation_dtype(query.dtype))
    mask = given["mask"]
    if mask.elementwise:
        hint = "decode sequences of one length, or one document, without them"
        refuse("mask", "a Mask without documents, key_padding and blocks", "tensors", hint, UnsupportedError)
    if num_rows < 1:
        refuse("query", "at least one row", 0, "the queries are the last tokens")
    q_positions, k_positions, num_keys = where[1:]
    by_position = mask.hides_earlier() or scores.needs_positions
    for name, x, rows in (("q_positions", q_positions, query.shape[2]), ("k_positions", k_positions, key.shape[2])):
        if x is None and (by_position or q_positions is not k_positions):
            hint = "pass q_positions and k_positions"
            refuse(name, "positions: a window, a length or scores read them, or only one is given", None, hint)
        if x is not None and (x.dtype, tuple(x.shape), x.device) != (torch.int64, (rows,), query.device):
            got = f"{x.dtype} {tuple(x.shape)} on {x.device}"
            refuse(name, f"int64 ({rows},) on {query.device}, one for each row", got, "move and cast it")
    if num_keys is not None and (
        not isinstance(num_keys, Tensor) or (num_keys.dtype, num_keys.shape) != (torch.int64, (1,))
        or num_keys.device != key.device
    ):  # fmt: skip
        refuse("num_keys", f"int64 (1,) on {key.device}", num_keys, "torch.tensor([n], device=key.device)")
    where = where._replace(mask=None if q_positions is None else without_unused(mask))
    full, group = q_positions is None, query.shape[1] // key.shape[1]
    few = options.kernel in ("auto", TRITON.name) and group * num_rows <= MAX_ROWS
    if few and not shortfalls(TRITON.capability, _request(query, value, full, scores)):
        return where, None, scores, options
    request = _request(query, value, full and num_keys is None, scores)
    return where, _choose(options.kernel, request), scores, options


def without_unused(mask: Mask) -> Mask:
    """Return the mask with keys at `UNUSED` hidden from all queries."""
    return replace(mask, length=UNUSED if mask.length is None else min(mask.length, UNUSED))


def _request(query: Tensor, value: Tensor, full: bool, scores: Scores) -> Request:
    """Return the request for a kernel, from values that are equal on all ranks."""
    return Request(
        device=query.device.type,
        compute_capability=compute_capability_of(query.device),
        dtype=query.dtype,
        covers=frozenset({"full" if full else "pairs"}),
        head_dim=query.shape[3],
        v_head_dim=value.shape[3],
        differentiable_lse=False,
        deterministic=False,
        features=scores.features,
    )


@lru_cache(maxsize=64)  # every step makes the same request
def _choose(name: str, request: Request) -> Kernel:
    kernel = choose_kernel(name, request)
    warn_of_choice(kernel, name, request)
    return kernel


def _attend(query: Tensor, key: Tensor, value: Tensor, where: Visible, kernel: Kernel | None, scores: Scores) -> Tensor:
    """Return out [B, H, n, Dv] and then lse [B, H, n] over this rank's keys, flat."""
    shape = (*query.shape[:3], value.shape[3])
    result = query.new_empty(math.prod(shape[:3]) * (shape[3] + 1), dtype=accumulation_dtype(query.dtype))
    into, pairs = _views(result, shape), None
    if where.mask is not None:
        assert where.q_positions is not None and where.k_positions is not None
        pairs = Pairs(where.mask, where.q_positions, where.k_positions)
    if kernel is None:
        attend_few(query, key, value, pairs, where.num_keys, scores, into)
        return result
    if where.num_keys is not None:
        pairs = _without_others(pairs, where.num_keys, shape[2], key.shape[2])
    running = MergingForward(kernel, query, shape[3], scores)
    if key.shape[2]:
        running.step(key, value, [KernelTile((0, shape[2]), (0, key.shape[2]), pairs or FULL)])
    running.finish(into)
    return result


def _without_others(pairs: Pairs | None, num_keys: Tensor, num_q: int, num_k: int) -> Pairs:
    """Return these pairs (None: all) without keys in rows after the first ``num_keys``."""
    rows = torch.arange(num_k, device=num_keys.device)
    if pairs is None:
        zeros = torch.zeros(num_q, dtype=torch.int64, device=num_keys.device)
        pairs = Pairs(without_unused(Mask(causal=False)), zeros, torch.zeros_like(rows))
    return replace(pairs, k_pos=torch.where(rows < num_keys, pairs.k_pos, UNUSED), kept={})


Pieces = Sequence[tuple[Tensor, Tensor]]
"""(out, lse) of each rank's keys."""


def _views(result: Tensor, shape: Sequence[int]) -> tuple[Tensor, Tensor]:
    num_rows = math.prod(shape[:3])
    out, lse = result.split([num_rows * shape[3], num_rows])
    return out.view(*shape), lse.view(*shape[:3])


def _from_all(result: Tensor, shape: Sequence[int], group: dist.ProcessGroup) -> Pieces:
    """Return the results of all ranks for all queries."""
    if group.size() == 1:
        return [_views(result, shape)]
    gathered = result.new_empty((group.size(), len(result)))
    # not asynchronous, so NCCL uses the current stream: two events less in a step of 0.1 ms
    all_gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)  # the name before torch 2.13
    all_gather(gathered.view(-1), result, group)
    return [_views(x, shape) for x in gathered]


def _gather(
    query: Tensor, q_positions: Tensor | None, q_lens: Sequence[int], group: dist.ProcessGroup
) -> tuple[Tensor, Tensor | None]:
    """Return the queries and positions of all ranks, in rank order; both travel as bytes in one buffer."""
    (B, H, num_rows, D), most = query.shape, max(q_lens)
    parts = [query.permute(2, 0, 1, 3).reshape(num_rows, B * H * D)]
    parts += [] if q_positions is None else [q_positions[:, None]]
    own = torch.cat([_dense(x).view(torch.uint8) for x in parts], 1)
    own = torch.cat([own, own.new_zeros((most - num_rows, own.shape[1]))])
    gathered = funcol.all_gather_into_tensor(own, group.size(), group.group_name)
    gathered = wait_for(gathered, "decode: queries of other ranks", group.group_name)
    rows = torch.cat([x[:n] for x, n in zip(gathered.view(group.size(), most, -1), q_lens, strict=True)])
    of_queries, of_positions = rows.tensor_split([B * H * D * query.element_size()], dim=1)
    queries = _dense(of_queries).view(-1).view(query.dtype).view(len(rows), B, H, D).permute(1, 2, 0, 3)
    return queries, None if q_positions is None else _dense(of_positions).view(-1).view(torch.int64)


def _dense(x: Tensor) -> Tensor:
    """Return a copy whose bytes can be read as any dtype; contiguous() would keep offset and stride of single rows."""
    return x.clone(memory_format=torch.contiguous_format)


def _to_owners(result: Tensor, shape: Sequence[int], q_lens: Sequence[int], group: dist.ProcessGroup) -> Pieces:
    """Return the results of all ranks for this rank's queries."""
    out, lse = _views(result, shape)
    rows = torch.cat([out, lse[..., None]], -1).permute(2, 0, 1, 3).contiguous()  # sent row by row
    own = q_lens[group.rank()]
    received = funcol.all_to_all_single(rows, [own] * group.size(), list(q_lens), group.group_name)
    received = wait_for(received, "decode: results of other ranks", group.group_name)
    pieces = received.view(group.size(), own, *rows.shape[1:]).permute(0, 2, 3, 1, 4)
    return [(x[..., :-1], x[..., -1]) for x in pieces]


def merge(pieces: Pieces, query: Tensor, sinks: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return (out, lse) over all keys from all ranks' parts, added in their order; out in the dtype of ``query``."""
    total = OutputSum(pieces[0][0].shape, pieces[0][0].dtype, query.device)
    for out, lse in pieces:
        total.add(0, out, lse)
    return total.finish(query, query.dtype, sinks=sinks)
