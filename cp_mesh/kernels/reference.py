"""The specification: attention in plain PyTorch, any device, fp64-capable, every mask. No other kernel imports it.

Memory is O(ROWS x keys of the tile). With S = score_mod(softcap(X) + biases), X = scale·QKᵀ and P = exp(S - lse):
dV = PᵀdO, dS = P ∘ (dO Vᵀ - delta), dX = dS ∘ score_mod' ∘ softcap'(X), dQ = scale·dX K, dK = scale·dXᵀ Q, where
delta = rowsum(dO ∘ O) - dlse, and dropout acts on P before V and on dO Vᵀ (FlashAttention-2, arXiv:2307.08691, alg. 2).
Autograd differentiates score_mod, one tile at a time.
"""

from __future__ import annotations

import torch
from einops import rearrange
from torch import Tensor

from cp_mesh.geometry.mask import Band
from cp_mesh.geometry.varlen import Segments
from cp_mesh.kernels.combine import accumulation_dtype
from cp_mesh.kernels.contract import Capability, Pairs
from cp_mesh.kernels.merge import BackwardTile, Kernel
from cp_mesh.kernels.scores import ADDED, FUNCTIONS, TERMS, VECTORS, ScoreGradients, Scores, Where
from cp_mesh.kernels.scores.dropout import kept_weights

ROWS = 512  # query rows whose scores are in memory at a time


def _scores(
    q_bkgsd: Tensor, k: Tensor, cover: Band | Pairs | Segments, first_row: int, scores: Scores
) -> tuple[Tensor, Tensor | float]:
    """Scores [B, K, G, rows, Sk] of query rows from ``first_row`` on, and their derivatives by scale · q·k.

    The scores come before the mask and score_mod.
    """
    x = torch.einsum("bkgid,bkjd->bkgij", q_bkgsd, k) * scores.scale
    slope: Tensor | float = 1.0
    if scores.softcap is not None:
        tanh = torch.tanh(x / scores.softcap)
        x, slope = scores.softcap * tanh, 1 - tanh.square()
    if scores.needs_positions:
        x = x + _added(scores, _where(cover, first_row, q_bkgsd.shape[3]), first_row, k.shape[1]).to(x.dtype)
    return x, slope


def _masked(
    x: Tensor, cover: Band | Pairs | Segments, first_row: int, num_rows: int, scores: Scores
) -> tuple[Tensor, Tensor]:
    """`_scores` after score_mod, -inf for masked pairs; and the allowed pairs, bool, which broadcast."""
    begin = first_row + (x.shape[4] - num_rows if isinstance(cover, Band) else 0)
    rows = torch.arange(begin, begin + x.shape[3], device=x.device)
    allowed = cover.allowed(rows, torch.arange(x.shape[4], device=x.device))
    allowed = rearrange(allowed, "... i j -> ... 1 1 i j")  # [i, j] broadcasts, [B, i, j] aligns with the batch
    if not scores.features.isdisjoint(FUNCTIONS):
        where, flat = _where(cover, first_row, x.shape[3]), x.flatten(1, 2)
        x = scores.modified(flat, where).view_as(x)
        if (seen := scores.seen(flat, where)) is not None:
            allowed = allowed & seen.reshape(x.shape)
    return x.masked_fill(~allowed, float("-inf")), allowed


def _where(cover: Band | Pairs | Segments, first_row: int, num_rows: int) -> Where:
    assert isinstance(cover, Pairs), "scores that need positions get `Pairs`"
    return Where(cover.q_pos[first_row : first_row + num_rows], cover.k_pos)


def _added(scores: Scores, where: Where, first_row: int, num_kv_heads: int) -> Tensor:
    """The sum of ALiBi, relative bias and bias, as far as given; broadcasts to [B, K, G, rows, Sk]."""
    scores = scores.rows(first_row, first_row + len(where.q_pos))
    total = torch.zeros((1, 1, 1, 1), device=where.q_pos.device)
    for name in ADDED:
        if (x := getattr(scores, name)) is not None:
            total = total + TERMS[name].file.added(x, where)
    return total[:, None] if total.shape[1] == 1 else rearrange(total, "b (k g) i j -> b k g i j", k=num_kv_heads)


def _add_gradients(total: ScoreGradients, scores: Scores, dscores: Tensor, where: Where, first_row: int) -> None:
    """Add the contribution of dscores [B, H, rows, Sk], of query rows from ``first_row`` on, to ``total``."""
    rows = first_row, first_row + dscores.shape[2]
    total, scores = total.part(rows=rows), scores.rows(*rows)
    for name, grad in total.items():
        if name in ADDED:
            TERMS[name].file.add_gradient(grad, getattr(scores, name), dscores, where)


def _dropout_factors(scores: Scores, cover: Band | Pairs | Segments, first_row: int, probs: Tensor) -> Tensor:
    """Dropout factors, 0 or 1 / (1 - p), for probs [B, K, G, rows, Sk] of query rows from ``first_row`` on."""
    B, K, G, num_rows, _ = probs.shape
    kept = kept_weights(scores, B, K * G, *_where(cover, first_row, num_rows))
    return rearrange(kept, "b (k g) i j -> b k g i j", k=K).to(probs.dtype) / (1 - scores.dropout_p)


def _grouped(x: Tensor, num_kv_heads: int, dtype: torch.dtype) -> Tensor:
    """Reshape [B, H, S, D] to [B, K, G, S, D] and convert it to the accumulation dtype."""
    return rearrange(x.to(dtype), "b (k g) s d -> b k g s d", k=num_kv_heads)


def _forward(q: Tensor, k: Tensor, v: Tensor, cover: Band | Pairs | Segments, scores: Scores) -> tuple[Tensor, Tensor]:
    dtype = accumulation_dtype(q.dtype)
    q_bkgsd, k, v = _grouped(q, k.shape[1], dtype), k.to(dtype), v.to(dtype)
    outs, lses = [], []
    for begin in range(0, q.shape[2], ROWS):
        x, _ = _scores(q_bkgsd[:, :, :, begin : begin + ROWS], k, cover, begin, scores)
        x, _ = _masked(x, cover, begin, q.shape[2], scores)
        lse = torch.logsumexp(x, dim=-1)
        finite = torch.where(lse == float("-inf"), 0.0, lse)  # a row with no key: all weights exp(-inf) = 0
        probs = torch.exp(x - finite[..., None])
        if scores.dropout_p:
            probs = probs * _dropout_factors(scores, cover, begin, probs)
        outs.append(torch.einsum("bkgij,bkjd->bkgid", probs, v))
        lses.append(lse)
    return (
        rearrange(torch.cat(outs, dim=3), "b k g s d -> b (k g) s d"),
        rearrange(torch.cat(lses, dim=3), "b k g s -> b (k g) s"),
    )


def _backward(tile: BackwardTile) -> tuple[Tensor, Tensor, Tensor, ScoreGradients]:
    dtype, num_kv_heads = accumulation_dtype(tile.q.dtype), tile.k.shape[1]
    q_bkgsd, dout_bkgsd = (_grouped(x, num_kv_heads, dtype) for x in (tile.q, tile.dout))
    assert tile.delta is not None
    lse = rearrange(tile.lse, "b (k g) s -> b k g s 1", k=num_kv_heads)
    delta = rearrange(tile.delta, "b (k g) s -> b k g s 1", k=num_kv_heads)
    k, v = tile.k.to(dtype), tile.v.to(dtype)
    finite = torch.where(lse == float("-inf"), 0.0, lse)
    dqs_bkgsd, dk, dv = [], torch.zeros_like(k), torch.zeros_like(v)
    of_scores = ScoreGradients.zeros(tile.scores, dtype)
    for begin in range(0, tile.q.shape[2], ROWS):
        rows = slice(begin, begin + ROWS)
        q_rows, dout_rows = q_bkgsd[:, :, :, rows], dout_bkgsd[:, :, :, rows]
        x, slope = _scores(q_rows, k, tile.cover, begin, tile.scores)
        masked, allowed = _masked(x, tile.cover, begin, tile.q.shape[2], tile.scores)
        probs = torch.exp(masked - finite[:, :, :, rows])
        dprobs, used = torch.einsum("bkgid,bkjd->bkgij", dout_rows, v), probs
        if tile.scores.dropout_p:
            kept = _dropout_factors(tile.scores, tile.cover, begin, probs)
            dprobs, used = dprobs * kept, probs * kept
        dscores = probs * (dprobs - delta[:, :, :, rows])
        if tile.scores.score_mod is not None:
            of_tile = dscores.flatten(1, 2), x.flatten(1, 2), _where(tile.cover, begin, q_rows.shape[3])
            dx = tile.scores.modified_gradient(*of_tile, of_scores).view_as(x)
            dscores = dx.masked_fill(~allowed, 0.0)  # score_mod may have no derivative at masked pairs
        if tile.scores.wanted:
            where = _where(tile.cover, begin, q_rows.shape[3])
            _add_gradients(of_scores, tile.scores, dscores.flatten(1, 2), where, begin)
        dx = dscores * slope * tile.scores.scale
        dqs_bkgsd.append(torch.einsum("bkgij,bkjd->bkgid", dx, k))
        dk += torch.einsum("bkgij,bkgid->bkjd", dx, q_rows)
        dv += torch.einsum("bkgij,bkgid->bkjd", used, dout_rows)
    return rearrange(torch.cat(dqs_bkgsd, dim=3), "b k g s d -> b (k g) s d"), dk, dv, of_scores


REFERENCE = Kernel(
    "reference",
    Capability(
        devices=("cpu", "cuda"),
        dtypes=(torch.float64, torch.float32, torch.bfloat16, torch.float16),
        covers=("full", "causal", "window", "pairs", "segments"),
        v_head_dim=True,
        differentiable_lse=True,
        features=frozenset({"softcap", *ADDED, *FUNCTIONS, VECTORS, "dropout"}),
    ),
    _forward,
    _backward,
    int64_offsets=True,
    uses_delta=True,
    rounds=False,
)
