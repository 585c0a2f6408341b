"""Which keys each query picks: the best of an indexer's scores among the keys that the mask shows.

`index_scores` and `best` are the specification. Any query may pick any key, so index keys are gathered, not rotated:
[S, D] of one head is small beside keys and values. Local queries are scored in tiles, each against the interval of keys
that its rows may see.

Ties go to the lower position, in every layout: ReLU gives many scores of exactly 0, and `torch.topk` leaves their order
open.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from cp_mesh._torch import untraced
from cp_mesh.comm.agreement import compare, refusing
from cp_mesh.errors import check_int, refuse, typed
from cp_mesh.geometry.layouts import same
from cp_mesh.geometry.mask import TENSORS, Mask
from cp_mesh.kernels.combine import accumulation_dtype
from cp_mesh.sequence.sharded_sequence import ShardedSequence

NO_KEY = -1
"""In place of a key, where a query sees fewer than it may pick."""
PAIRS = 1 << 23
"""Pairs of a query and a key in a tile of scores: some 200 MB with what the selection computes from them."""
BLOCK = 32
"""Rows of a tile, at least."""
PRODUCTS = 1 << 25
"""Products of a query head and a key in a piece of a tile, in plain PyTorch."""


@typed
@untraced
@torch.no_grad()
def select_keys(
    q: Tensor,
    k: Tensor,
    weights: Tensor,
    top_k: int,
    *,
    sequence: ShardedSequence,
    mask: Mask = Mask(),  # noqa: B008 - frozen
    scale: float = 1.0,
) -> Tensor:
    """Pick the ``top_k`` keys of each query with the highest index scores, of those that the mask shows.

    The score of a pair is ``sum_h weights[h] * relu(scale * q[h] @ k)``, as in DeepSeek-V3.2 (arXiv 2512.02556). It is
    computed in float32, in float64 for float64 inputs. Of equal scores the key of the lower position is picked; nan is
    the highest score, as in `torch.topk`. The choice has no gradient. With e bytes a number, (n - 1) / n of the
    B · S · D · e bytes of keys come from the other n - 1 ranks; a tile of scores takes some 24 bytes for each of its
    pairs, of which `PAIRS` bounds the number.

    Args:
        q: index queries of this rank's rows, [B, S_local, H, D].
        k: index keys, [B, S_local, D]; they are gathered from all ranks, 2 D bytes a token in half precision.
        weights: of the heads, [B, S_local, H].
        top_k: keys to pick, equal on all ranks.
        sequence: how the whole sequence is sharded.
        mask: which keys a query may pick, of the whole sequence; it applies before the choice.
        scale: of the products.

    Returns:
        int32 [B, S_local, top_k], positions in the whole sequence in ascending order; behind them -1, where a query
        sees fewer keys.

    Raises:
        ArgumentError: on other shapes, dtypes or devices.
        RankMismatchError: in a first call, if ranks disagree.
    """
    group = sequence.mesh.get_group()
    with refusing(group):
        top_k = check_int("select_keys: top_k", top_k)
        check_local("select_keys", q=(q, "B S H D"), k=(k, "B S D"), weights=(weights, "B S H"))
        if k.dtype != q.dtype or not q.is_floating_point():
            refuse("select_keys: k", f"{q.dtype}, as q, of floating point", k.dtype, "convert one of them")
        if mask.layout is not None and not same(mask.layout, sequence.layout):
            hint = "pass the sequence of its batch, sequence.for_batch(length, mask)"
            refuse("select_keys: sequence", f"{mask.layout.spec()}, as the mask's", sequence.layout.spec(), hint)
        seq_len, whole = sequence.len_of_local(k.shape[1]), sequence.mask(mask)
        for name in TENSORS:
            x = getattr(whole, name)
            if x is not None and (x.shape[-1] != seq_len or (x.ndim == 2 and len(x) not in (1, len(q)))):
                hint = "pass the tensor of the whole sequence; it is never sharded"
                refuse(f"select_keys: Mask.{name}", f"shape {[len(q), seq_len]}", [*x.shape], hint)
    kind = {"call": "select_keys", "top_k": str(top_k), "scale": str(scale), "mask": mask.spec()}
    compare(group, (*kind.values(),), lambda: kind)
    keys = sequence.unshard(k)
    rows = sequence.positions(sequence.length or keys.shape[1])
    with torch.autocast(q.device.type, enabled=False):  # it would round the scores
        return pick(q, keys, weights, top_k, rows, whole, scale)


def pick(q: Tensor, keys: Tensor, weights: Tensor, top_k: int, rows: Tensor, mask: Mask, scale: float) -> Tensor:
    """`select_keys` from the keys of the whole sequence, [B, S, D]; ``rows``: positions of the queries, on the host."""
    on_device = mask.to(q.device)
    found = [q.new_empty((len(q), 0, top_k), dtype=torch.int32)]
    for begin, end, first, last in _tiles(mask, rows, keys.shape[1], len(q)):
        scores = index_scores(q[:, begin:end], keys[:, first:last], weights[:, begin:end], scale)
        positions = torch.arange(first, last, device=q.device)
        hidden = ~on_device.allowed(rows[begin:end].to(q.device), positions)
        scores.nan_to_num_(torch.inf, torch.inf, -torch.inf).masked_fill_(hidden, -torch.inf)
        found.append(best(scores, top_k, first))
    return torch.cat(found, 1)


def index_scores(q: Tensor, k: Tensor, weights: Tensor, scale: float) -> Tensor:
    """The index scores [B, L, T], float32 (float64 for float64), from q [B, L, H, D], k [B, T, D], weights [B, L, H].

    On GPUs a kernel of Triton computes half precision; the products of single heads are never in memory there.
    """
    if q.is_cuda and q.dtype in (torch.float16, torch.bfloat16):
        from cp_mesh.latent.scores_triton import index_scores_triton

        return index_scores_triton(q, k, weights, scale)
    dtype = accumulation_dtype(q.dtype)
    batch, num_q, heads, _ = q.shape
    scores = torch.empty((batch, num_q, k.shape[1]), dtype=dtype, device=q.device)
    q, weights = q.to(dtype), weights.to(dtype).transpose(1, 2)[..., None]
    step = max(1, PRODUCTS // max(1, batch * num_q * heads))
    for begin in range(0, k.shape[1], step):
        keys = k[:, None, begin : begin + step].to(dtype)
        products = torch.matmul(q.transpose(1, 2), keys.transpose(-1, -2))  # [B, H, L, T]
        scores[..., begin : begin + step] = (products.mul_(scale).relu_() * weights).sum(1)
    return scores


def best(scores: Tensor, top_k: int, first: int) -> Tensor:
    """Positions of the ``top_k`` highest scores above -inf, ascending, then `NO_KEY`; ``first`` is that of column 0.

    Args:
        scores: [B, L, T].

    Returns:
        int32 [B, L, top_k].
    """
    chosen = scores > -torch.inf
    if scores.shape[-1] > top_k:
        least = scores.topk(top_k, sorted=False).values.amin(-1, keepdim=True)
        above = scores > least
        tied = chosen & (scores == least)
        room = top_k - above.sum(-1, keepdim=True)
        chosen = above | (tied & (tied.cumsum(-1, dtype=torch.int32) <= room))
    slots = (chosen.cumsum(-1) - 1).where(chosen, top_k)  # the slot behind the last is dropped
    positions = torch.arange(first, first + scores.shape[-1], dtype=torch.int32, device=scores.device)
    found = torch.full((*scores.shape[:-1], top_k + 1), NO_KEY, dtype=torch.int32, device=scores.device)
    return found.scatter_(-1, slots, positions.expand_as(slots))[..., :top_k]


def _tiles(mask: Mask, rows: Tensor, seq_len: int, batch: int) -> Iterator[tuple[int, int, int, int]]:
    """Begin and end of local rows, and of the positions of keys that some of them may see."""
    first, last = (x.split(BLOCK) for x in _seen(mask, rows, seq_len))
    blocks = [(int(lo.min()), int(hi.max())) for lo, hi in zip(first, last, strict=True) if len(lo)]
    begin = end = 0
    lo, hi = blocks[0] if blocks else (0, 0)
    for number, (low, high) in enumerate(blocks):
        if end > begin and batch * (end + BLOCK - begin) * (max(hi, high) - min(lo, low)) > PAIRS:
            yield begin, end, lo, max(lo, hi)
            begin, lo, hi = end, low, high
        lo, hi, end = min(lo, low), max(hi, high), min((number + 1) * BLOCK, len(rows))
    if end > begin:
        yield begin, end, lo, max(lo, hi)


def _seen(mask: Mask, rows: Tensor, seq_len: int) -> tuple[Tensor, Tensor]:
    """An interval of positions for each row, int64 [S_local] on the host, that holds all keys that the row sees."""
    first, last = torch.zeros_like(rows), torch.full_like(rows, seq_len)
    left, right = mask.window or (None, None)
    if mask.causal and mask.blocks is None:
        last = last.minimum((rows + 1).clamp(min=mask.prefix))
    if left is not None:
        first = (rows - left).clamp(0, seq_len)
    if right is not None:
        last = last.minimum(rows + right + 1)
    if mask.documents is not None:
        ids = torch.atleast_2d(mask.documents)
        begins, ends = zip(*(_extents(x, rows) for x in ids), strict=True)
        first = first.maximum(torch.stack(begins).amin(0)).clamp(max=seq_len)
        last = last.minimum(torch.stack(ends).amax(0))
    return first, last


def _extents(ids: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
    """Of each row: where its document begins for the first time, and ends for the last."""
    _, which = ids.unique(return_inverse=True)
    positions = torch.arange(len(ids), device=ids.device)
    begins = torch.full_like(positions, len(ids)).scatter_reduce(0, which, positions, "amin")
    ends = torch.zeros_like(positions).scatter_reduce(0, which, positions + 1, "amax")
    return begins[which[rows]], ends[which[rows]]


def check_local(what: str, **tensors: tuple[Tensor, str]) -> None:
    """Refuse tensors whose dims differ where their letters agree, and tensors that are not local and plain."""
    sizes: dict[str, tuple[int, str]] = {}
    kind = None
    for name, (x, dims) in tensors.items():
        if type(x) is not Tensor and not isinstance(x, torch.nn.Parameter):
            refuse(
                f"{what}: {name}", "a local tensor", type(x).__name__, "pass to_local(); apply FSDP2 to whole layers"
            )
        if x.ndim != len(dims.split()):
            refuse(f"{what}: {name}", f"[{', '.join(dims.split())}]", tuple(x.shape), "rows of this rank")
        for letter, size in zip(dims.split(), x.shape, strict=True):
            expected, by = (1, "one head") if letter == "1" else sizes.setdefault(letter, (size, name))
            if size != expected:
                of = f"[{', '.join(dims.split())}] with {letter} = {expected}, as of {by}"
                refuse(f"{what}: {name}", of, tuple(x.shape), "rows of this rank")
        kind = kind or (x.device, name)
        if x.device != kind[0]:
            refuse(f"{what}: {name}", f"{kind[0]}, as {kind[1]}", x.device, "move it")
