"""Attention of each query to the keys that it has picked, in latent space.

The up-projections go to the queries and to the outputs, so that one row of the latent and the rotary part is the key
and the value of all heads. `_Attend` is both specification and implementation, in plain PyTorch: a tile of rows gathers
its keys, and one batched matmul a row has all heads. Keys of all ranks are gathered, since any query may pick any key;
gradients of rows that several ranks picked are summed by a reduce-scatter.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from cp_mesh._torch import untraced
from cp_mesh.call.spec import autocast
from cp_mesh.comm.agreement import compare, refusing
from cp_mesh.errors import refuse, typed
from cp_mesh.kernels.combine import accumulation_dtype
from cp_mesh.latent.selection import check_local
from cp_mesh.sequence.sharded_sequence import ShardedSequence

NUMBERS = 1 << 27
"""Of a tile: gathered numbers of keys, and scores of heads and keys."""


@typed
@untraced
def indexed_attention(
    query: Tensor,
    latent: Tensor,
    rope: Tensor,
    up_projection: Tensor,
    indices: Tensor,
    *,
    sequence: ShardedSequence,
    scale: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Attend from each query to the keys that ``indices`` names, exactly over the whole sequence.

    For head h the keys are (Wk[h] · latent, rope) and the values Wv[h] · latent, where the rows of ``up_projection``
    are Wk[0], Wv[0], Wk[1], ... This is the sparse attention of DeepSeek-V3.2 (arXiv 2512.02556): it is computed in
    latent space, with one key of R + P numbers for all heads. With e bytes a number, a rank of n receives (n - 1) / n
    of the B · S · (R + P) · e bytes of keys in a forward, and sends as many in a backward, where their gradients take
    4 bytes a number (8 in float64). A tile of picked rows takes some 10 bytes for each of at most `NUMBERS` numbers.

    Args:
        query: [B, H, S_local, D], this rank's rows; the last P features are rotary.
        latent: [B, 1, S_local, R].
        rope: [B, 1, S_local, P], the rotary part of the keys. Both are gathered from all ranks, R + P numbers a token,
            and kept whole between the passes.
        up_projection: [H · (D - P + Dv), R], the weight of a linear such as kv_b_proj. Its gradient is partial, as that
            of any weight: the sum over cp ranks is the gradient.
        indices: int32 or int64 [B, S_local, K], positions in the whole sequence, as `select_keys` returns them; others,
            such as -1, are no key. A key that is named twice counts twice. A query without keys has output 0.
        sequence: how the whole sequence is sharded.
        scale: of the scores; None: D ** -0.5.
        sinks: [H], logits that take part in each softmax without a key. Their gradient is partial, too.

    Returns:
        [B, H, S_local, Dv], in query's dtype, or under autocast in its dtype. Gradients of ``latent`` and ``rope`` are
        summed in float32 on each rank, between ranks in their dtype. On GPUs they are bitwise reproducible under
        ``torch.use_deterministic_algorithms`` alone.

    Raises:
        ArgumentError: on other shapes, dtypes or devices.
        RankMismatchError: in a first call, if ranks disagree.
    """
    group = sequence.mesh.get_group()
    with refusing(group):
        query, latent, rope, up_projection = autocast(query, latent, rope, up_projection)
        given = {"query": (query, "B H S D"), "latent": (latent, "B 1 S R"), "rope": (rope, "B 1 S P")}
        given |= {"indices": (indices, "B S K"), "up_projection": (up_projection, "F R")}
        check_local("indexed_attention", **given, **({} if sinks is None else {"sinks": (sinks, "H")}))
        heads, dim = query.shape[1], query.shape[-1]
        nope, of_head = dim - rope.shape[-1], len(up_projection) // heads
        if nope < 0 or len(up_projection) % heads or of_head <= nope:
            expected = f"{heads} heads · ({nope} + head dim of values) rows"
            refuse("indexed_attention: up_projection", expected, len(up_projection), "pass the weight of kv_b_proj")
        if indices.dtype not in (torch.int32, torch.int64):
            refuse("indexed_attention: indices", "int32 or int64", indices.dtype, "pass what select_keys returns")
        for name, x in {"latent": latent, "rope": rope, "up_projection": up_projection}.items():
            if x.dtype != query.dtype:
                refuse(f"indexed_attention: {name}", f"{query.dtype}, as query", x.dtype, "convert it")
    scale = dim**-0.5 if scale is None else float(scale)
    kind = {"call": "indexed_attention", "scale": str(scale)}
    compare(group, (*kind.values(),), lambda: kind)
    keys = sequence.unshard(torch.cat((latent, rope), -1), 2).squeeze(1)
    of_keys, of_values = up_projection.view(heads, of_head, -1).split([nope, of_head - nope], 1)
    q = torch.cat((query[..., :nope] @ of_keys, query[..., nope:]), -1).transpose(1, 2)
    return attend_rows(q, keys, indices, sinks, latent.shape[-1], scale).transpose(1, 2) @ of_values.transpose(1, 2)


def attend_rows(q: Tensor, keys: Tensor, indices: Tensor, sinks: Tensor | None, value_dim: int, scale: float) -> Tensor:
    """Attention in latent space: [B, L, H, value_dim] from q [B, L, H, D], keys of the whole sequence [B, S, D] whose
    first ``value_dim`` features are the values, and indices [B, L, K]."""
    offsets = torch.arange(len(q), device=q.device)[:, None, None] * keys.shape[1]
    found = torch.where((indices < 0) | (indices >= keys.shape[1]), -1, indices + offsets).flatten(0, 1)
    out: Tensor = _Attend.apply(q.flatten(0, 1), keys.flatten(0, 1), found, sinks, value_dim, scale)
    return out.unflatten(0, q.shape[:2])


def _without_autocast(run: Callable[..., Any]) -> Callable[..., Any]:
    """A pass whose products autocast does not round."""

    def wrapped(ctx: Any, x: Tensor, *others: Any) -> Any:
        with torch.autocast(x.device.type, enabled=False):
            return run(ctx, x, *others)

    return wrapped


class _Attend(torch.autograd.Function):
    """q [N, H, D], keys [T, D], indices [N, K], sinks [H] or None -> [N, H, value_dim], in tiles of rows."""

    @staticmethod
    @_without_autocast
    def forward(
        ctx: Any, q: Tensor, keys: Tensor, indices: Tensor, sinks: Tensor | None, value_dim: int, scale: float
    ) -> Tensor:
        ctx.value_dim, ctx.scale = value_dim, scale
        out = q.new_empty((*q.shape[:2], value_dim))
        lse = torch.empty(q.shape[:2], dtype=accumulation_dtype(q.dtype), device=q.device)
        for tile in _tiles(q, indices):
            picked, scores = _scores(q[tile], keys, indices[tile], scale)
            lse[tile] = scores.logsumexp(-1) if sinks is None else scores.logsumexp(-1).logaddexp(sinks.to(lse.dtype))
            p = _probabilities(scores, lse[tile])
            out[tile] = torch.bmm(p.to(q.dtype), picked[..., :value_dim])
        ctx.save_for_backward(q, keys, indices, sinks, out, lse)
        return out

    @staticmethod
    @torch.autograd.function.once_differentiable
    @_without_autocast
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        q, keys, indices, sinks, out, lse = ctx.saved_tensors
        dq, mean = torch.empty_like(q), torch.empty_like(lse)
        dkeys = torch.zeros(keys.shape, dtype=lse.dtype, device=keys.device)
        for tile in _tiles(q, indices):
            picked, scores = _scores(q[tile], keys, indices[tile], ctx.scale)
            p = _probabilities(scores, lse[tile])
            dout = grad[tile]
            dp = _product(dout, picked[..., : ctx.value_dim].transpose(1, 2))
            mean[tile] = (dout.to(lse.dtype) * out[tile].to(lse.dtype)).sum(-1)
            ds = (p * (dp - mean[tile][..., None]) * ctx.scale).to(q.dtype)
            dq[tile] = torch.bmm(ds, picked)
            dpicked = _product(ds.transpose(1, 2), q[tile])
            dpicked[..., : ctx.value_dim] += _product(p.to(q.dtype).transpose(1, 2), dout)
            dkeys.index_add_(0, indices[tile].clamp(min=0).flatten(), dpicked.flatten(0, 1))
        dsinks = None
        if sinks is not None:
            dsinks = -(mean * (sinks.to(lse.dtype) - lse).exp()).sum(0).to(sinks.dtype)
        return dq, dkeys.to(keys.dtype), None, dsinks, None, None


def _tiles(q: Tensor, indices: Tensor) -> list[slice]:
    """Slices of rows."""
    heads, dim = q.shape[1:]
    step = max(1, NUMBERS // (max(1, indices.shape[1]) * (dim + 2 * heads)))
    return [slice(begin, begin + step) for begin in range(0, len(q), step)]


def _scores(q: Tensor, keys: Tensor, indices: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """The keys that the rows picked, [N, K, D], and their scores [N, H, K], -inf for no key."""
    picked = keys.index_select(0, indices.clamp(min=0).flatten()).view(*indices.shape, -1)
    scores = _product(q, picked.transpose(1, 2)).mul_(scale)
    return picked, scores.masked_fill_((indices < 0)[:, None], -torch.inf)


def _probabilities(scores: Tensor, lse: Tensor) -> Tensor:
    """exp(scores - lse); 0 in rows without a key."""
    return scores.sub_(lse.masked_fill(lse == -torch.inf, 0)[..., None]).exp_()


def _product(x: Tensor, y: Tensor) -> Tensor:
    """x @ y in the accumulation dtype: float32 for half precision, which `torch.bmm` would round."""
    if x.is_cuda and x.dtype in (torch.float16, torch.bfloat16):
        return torch.bmm(x, y, out_dtype=torch.float32)
    dtype = accumulation_dtype(x.dtype)
    return torch.bmm(x.to(dtype), y.to(dtype))
