"""Tiles of tensors that span 2**31 elements and more, computed a few heads at a time.

Kernels that count elements in 32 bits are wrong there without an error: the backward of cuDNN 9.19 on an H200 (found by
test_large_tensors), FlashAttention-4's of packed documents (Dao-AILab/flash-attention#2611), PyTorch's flex_attention
(pytorch/pytorch#190857). Others of these kernels were not tried there. A part is a copy, large enough to keep a GPU
busy (docs/log.md).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from cp_mesh.errors import UnsupportedError, refuse
from cp_mesh.kernels.combine import dense_strides
from cp_mesh.kernels.scores import ScoreGradients, Scores

FAR, PART = 2**31, 2**29
"""Elements that a tensor spans from which on it is computed in parts; and about those of a part."""


def forward_of_parts(
    forward: Callable[..., tuple[Tensor, Tensor]], q: Tensor, k: Tensor, v: Tensor, cover: Any, scores: Scores
) -> tuple[Tensor, Tensor]:
    """The results of a kernel's tile function on all heads."""
    whole: list[Tensor] = []
    for of_q, of_kv in _parts(q, v):
        given = _part(q, of_q), _part(k, of_kv), _part(v, of_kv)
        parts = forward(*given, cover, scores.heads(of_q.start, of_q.stop))
        if not whole:
            shape = *q.shape[:3], v.shape[3]
            whole = [parts[0].new_empty_strided(shape, dense_strides(shape, q.stride())), parts[1].new_empty(shape[:3])]
        for x, part in zip(whole, parts, strict=True):
            x[:, of_q] = part
    return whole[0], whole[1]


def backward_of_parts(backward: Callable[[Any], Any], t: Any) -> tuple[Tensor, Tensor, Tensor, ScoreGradients]:
    """As `forward_of_parts`, of a `BackwardTile`; gradients of keys that several parts read are summed in fp32."""
    sums: list[Tensor] = []
    of_scores = ScoreGradients.zeros(t.scores, t.lse.dtype)
    parts = _parts(t.q, t.v)
    for of_q, of_kv in parts:
        heads = dict.fromkeys(("dout", "q", "out", "lse", "delta"), of_q) | dict.fromkeys("kv", of_kv)
        given = {name: _part(x, at) for name, at in heads.items() if (x := getattr(t, name)) is not None}
        scores = t.scores.heads(of_q.start, of_q.stop)
        *grads, found = (*backward(t._replace(**given, scores=scores, dk=None, dv=None)), None)[:4]
        dtypes = [x.dtype for x in grads]
        if not sums:
            added = torch.promote_types(dtypes[1], t.lse.dtype) if len(parts) > t.k.shape[1] else dtypes[1]
            likes = zip((t.q, t.k, t.v), (dtypes[0], added, added), strict=True)
            sums = [torch.zeros_like(like, dtype=dtype) for like, dtype in likes]
        for x, part, at in zip(sums, grads, (of_q, of_kv, of_kv), strict=True):
            x[:, at] += part
        if found:
            of_scores.part(heads=(of_q.start, of_q.stop)).add_(found)
    dq, dk, dv = (x.to(dtype) for x, dtype in zip(sums, dtypes, strict=True))
    return dq, dk, dv, of_scores


def _part(x: Tensor, heads: slice) -> Tensor:
    part = x[:, heads].contiguous()
    return part.clone() if part.data_ptr() % 16 else part  # as `dense_rows`, here also for lse and delta


def are_far(q: Tensor, k: Tensor, v: Tensor, *others: Tensor | None) -> bool:
    """Whether a tile is computed in parts."""
    spans = [q.shape[1] * _of_head(q, v)]
    for x in (q, k, v, *others):
        spans += [] if x is None else [sum((n - 1) * step for n, step in zip(x.shape, x.stride(), strict=True))]
    return max(spans) >= FAR


def _of_head(q: Tensor, v: Tensor) -> int:
    """Elements of a head in the largest tensor; some kernels repeat keys for each query head, or pad head dims."""
    return q.shape[0] * max(q.shape[2], v.shape[2]) * max(q.shape[3], v.shape[3])


def _parts(q: Tensor, v: Tensor) -> list[tuple[slice, slice]]:
    """Equal ranges of query heads and the kv heads that they read: several kv heads, or some query heads of one."""
    group, of_head = q.shape[1] // v.shape[1], _of_head(q, v)
    if of_head >= FAR:  # on all ranks of equal shapes alike, but in a tile: few GPUs could hold that
        hint = "take more ranks, or kernel='triton'"
        refuse("attention", f"less than {FAR} elements in a head", of_head, hint, UnsupportedError)
    most = max(1, PART // of_head)
    if group * of_head < FAR:
        step = max(1, most // group) * group
    else:
        step = max(n for n in range(1, most + 1) if group % n == 0)
    heads = [(i, min(i + step, q.shape[1])) for i in range(0, q.shape[1], step)]
    return [(slice(i, j), slice(i // group, -(-j // group))) for i, j in heads]
