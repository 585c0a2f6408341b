"""The oracle: attention of a whole sequence on one device in fp64, sharing no code with cp_mesh.

B batch, S sequence, H query heads, K kv heads, D head dim of queries and keys, E head dim of values.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor


def dense_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    allowed: Tensor,
    scale: float | None = None,
    *,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    bias: Tensor | None = None,
    kept: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Softmax attention over the allowed pairs, differentiable in both results and in all tensors of the scores.

    Args:
        q: [B, H, Sq, D]; computed in fp64 whatever the dtype.
        k: [B, K, Sk, D]; query head h reads kv head ``h // (H // K)``.
        v: [B, K, Sk, E].
        allowed: bool [B or 1, Sq, Sk], or [B, H, Sq, Sk].
        scale: Factor of the scores; None is ``D ** -0.5``.
        softcap: Bound of the scaled scores.
        sinks: [H], a logit that each query of a head sees beside its keys, and that brings no value.
        alibi_slopes: [H], what a score loses for each token of distance.
        bias: broadcasts to [B, H, Sq, Sk], added last.
        kept: broadcasts to [B, H, Sq, Sk], factors of the normalised weights.

    Returns:
        out fp64 [B, H, Sq, E] and lse fp64 [B, H, Sq], natural log; a query without keys has out 0 and lse -inf, and
        passes no gradient.
    """
    group = q.shape[1] // k.shape[1]
    kv_head = torch.tensor([head // group for head in range(q.shape[1])], device=q.device)
    q, k, v = q.double(), k.double()[:, kv_head], v.double()[:, kv_head]
    scores = torch.einsum("bhid,bhjd->bhij", q, k) * (q.shape[-1] ** -0.5 if scale is None else scale)
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    ahead = torch.arange(scores.shape[2], device=q.device)[:, None] - torch.arange(scores.shape[3], device=q.device)
    if alibi_slopes is not None:
        scores = scores - alibi_slopes.double()[:, None, None] * ahead.abs()
    if bias is not None:
        scores = scores + bias.double()
    pairs = allowed[:, None] if allowed.ndim == 3 else allowed
    alone = ~pairs.any(-1)
    # A row of -inf alone has NaN gradients, so rows without keys compute on zeros and are replaced afterwards.
    scores = scores.masked_fill(~pairs, -torch.inf).masked_fill(alone[..., None], 0.0)
    lse = torch.logsumexp(scores, -1)
    normaliser = lse if sinks is None else torch.logaddexp(lse, sinks.double()[:, None])
    weights = (scores - normaliser[..., None]).exp().masked_fill(alone[..., None], 0.0)
    if kept is not None:
        weights = weights * kept
    return torch.einsum("bhij,bhje->bhie", weights, v), lse.masked_fill(alone, -torch.inf)


def dense_dropout(B: int, H: int, S: int, p: float, seed: int, offset: int = 0) -> Tensor:
    """fp64 [B, H, S, S], what dropout multiplies normalised weights by: 0, or 1 / (1 - p).

    Philox-4x32-10, Salmon et al. 2011, with key (seed) makes two words of a query from the counter (position, 0, head,
    batch row + offset) and one of a key from (position, 1, 0, 0). Two products mix the query's first word xor the
    key's, and between them its second one; the result is compared with p · 2³².
    """
    low, shift = np.uint64(0xFFFFFFFF), np.uint64(32)

    def words(*counter: np.ndarray) -> list[np.ndarray]:
        key = [np.uint64(seed) & low, np.uint64(seed) >> shift]
        for _ in range(10):
            first, third = np.uint64(0xD2511F53) * counter[0], np.uint64(0xCD9E8D57) * counter[2]
            counter = (
                (third >> shift) ^ counter[1] ^ key[0], third & low, (first >> shift) ^ counter[3] ^ key[1], first & low
            )  # fmt: skip
            key = [np.uint64((int(k) + add) % 2**32) for k, add in zip(key, (0x9E3779B9, 0xBB67AE85), strict=True)]
        return list(counter)

    rows, heads, i = np.meshgrid(*(np.arange(n, dtype=np.uint64) for n in (B, H, S)), indexing="ij")
    nothing = np.zeros(S, dtype=np.uint64)
    left, right, *_ = words(i, np.zeros_like(i), heads, (rows + np.uint64(offset)) & low)
    left = left[..., None] ^ words(np.arange(S, dtype=np.uint64), nothing + np.uint64(1), nothing, nothing)[0]
    mixed = np.uint64(0x7FEB352D) * left & low
    mixed = np.uint64(0x846CA68B) * (mixed ^ (mixed >> np.uint64(15)) ^ right[..., None]) & low
    return torch.from_numpy((mixed >= int(p * 2**32)) / (1 - p))


def dense_mask(
    S: int,
    causal: bool = True,
    window: tuple[int | None, int | None] | None = None,
    documents: Tensor | Sequence[Sequence[int]] | None = None,
    key_padding: Tensor | Sequence[Sequence[bool]] | None = None,
    prefix: int = 0,
    length: int | None = None,
    blocks: Tensor | Sequence[Sequence[int]] | None = None,
) -> Tensor:
    """bool [B or 1, S, S] for a sequence of S tokens, asked pair by pair; S² steps of Python.

    A query i sees a key j if all of these hold:
        causal: j is not after i, or is one of the first `prefix` tokens, or of i's block, whose id is not negative.
        window: j is at most `left` tokens before i and at most `right` after it; None is unlimited.
        documents: both carry the same id, which is not negative.
        key_padding: j is kept (True).
        length: j is one of the first `length` tokens; later ones pad the sequence.
    """
    ids = None if documents is None else torch.as_tensor(documents).tolist()
    keep = None if key_padding is None else torch.as_tensor(key_padding).tolist()
    image = None if blocks is None else torch.as_tensor(blocks).tolist()
    left, right = window or (None, None)

    def sees(b: int, i: int, j: int) -> bool:
        of_one_block = image is not None and image[b][i] == image[b][j] >= 0
        if causal and j > i and j >= prefix and not of_one_block:
            return False
        if left is not None and i - j > left:
            return False
        if right is not None and j - i > right:
            return False
        if ids is not None and (ids[b][i] != ids[b][j] or ids[b][i] < 0):
            return False
        if keep is not None and not keep[b][j]:
            return False
        return length is None or j < length

    batch = max(len(rows) if rows is not None else 1 for rows in (ids, keep, image))
    pairs = [sees(b, i, j) for b in range(batch) for i in range(S) for j in range(S)]
    return torch.tensor(pairs, dtype=torch.bool).view(batch, S, S)


def make_qkv(
    B: int,
    Hq: int,
    Hkv: int,
    S: int,
    D: int,
    Dv: int | None = None,
    seed: int = 0,
    dtype: torch.dtype = torch.float64,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Random q, k, v and dout on the CPU, unlike in every batch row, head and stretch of the sequence.

    The scale grows with the head and falls along the sequence, and each head has an offset of its own, so that swapped
    heads, shards or batch rows change the result far beyond rounding.

    Returns:
        q [B, Hq, S, D], k [B, Hkv, S, D], v [B, Hkv, S, Dv], dout [B, Hq, S, Dv].
    """
    generator = torch.Generator().manual_seed(seed)
    Dv = D if Dv is None else Dv

    def uneven(heads: int, dim: int) -> Tensor:
        noise = torch.randn(B, heads, S, dim, generator=generator, dtype=torch.float64)
        per_head = torch.arange(1, heads + 1, dtype=torch.float64).view(1, heads, 1, 1) / heads
        per_row = torch.linspace(1.5, 0.5, S, dtype=torch.float64).view(1, 1, S, 1)
        offset = 0.1 * torch.arange(1, B + 1, dtype=torch.float64).view(B, 1, 1, 1) * per_head
        return ((0.5 + per_head) * per_row * noise + offset).to(dtype)

    return uneven(Hq, D), uneven(Hkv, D), uneven(Hkv, Dv), uneven(Hq, Dv)
