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


def by_heads(
    forward: Callable[..., Any], backward: Callable[..., Any]
) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """The two tile functions of a kernel; tensors that span `FAR` elements reach them a few heads at a time."""

    def forward_too(q: Tensor, k: Tensor, v: Tensor, cover: Any, scores: Scores) -> tuple[Tensor, Tensor]:
        if not are_far(q, k, v):
            return forward(q, k, v, cover, scores)
        whole: list[Tensor] = []
        for of_q, of_kv in _parts(q, v):
            given = _part(q, of_q), _part(k, of_kv), _part(v, of_kv)
            out, lse = forward(*given, cover, scores.heads(of_q.start, of_q.stop))
            if not whole:
                shape = *q.shape[:3], v.shape[3]
                whole = [out.new_empty_strided(shape, dense_strides(shape, q)), lse.new_empty(shape[:3])]
            for x, part in zip(whole, (out, lse), strict=True):
                x[:, of_q] = part
        out, lse = whole
        return out, lse

    def backward_too(t: Any) -> Any:
        if not are_far(t.q, t.k, t.v, t.dout, t.out):
            return backward(t)
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
        return *(x.to(dtype) for x, dtype in zip(sums, dtypes, strict=True)), of_scores

    return forward_too, backward_too


def _part(x: Tensor, heads: slice) -> Tensor:
    part = x[:, heads].contiguous()
    return part.clone() if part.data_ptr() % 16 else part  # as `dense_rows`, here also for lse and delta


def are_far(q: Tensor, k: Tensor, v: Tensor, *others: Tensor | None) -> bool:
    if q.shape[1] * _of_head(q, v) >= FAR:
        return True
    # each tile asks, and memory that holds less is known sooner than strides
    return any(x is not None and x.untyped_storage().nbytes() >= FAR and _span(x) >= FAR for x in (q, k, v, *others))


def _of_head(q: Tensor, v: Tensor) -> int:
    """Elements of a head in the largest tensor; some kernels repeat keys for each query head, or pad head dims."""
    (B, _, num_q, dim), (_, _, num_k, v_dim) = q.shape, v.shape
    return B * (num_q if num_q > num_k else num_k) * (dim if dim > v_dim else v_dim)


def _span(x: Tensor) -> int:
    return sum((size - 1) * stride for size, stride in zip(x.shape, x.stride(), strict=True))


def _parts(q: Tensor, v: Tensor) -> list[tuple[slice, slice]]:
    """Ranges of query heads and of the kv heads that they read: those of several kv heads, or a few of one's."""
    num_kv, group, of_head = v.shape[1], q.shape[1] // v.shape[1], _of_head(q, v)
    if of_head >= FAR:  # on all ranks of equal shapes alike, but in a tile: few GPUs could hold that
        hint = "take more ranks, or kernel='triton'"
        refuse("attention", f"less than {FAR} elements in a head", of_head, hint, UnsupportedError)
    if group * of_head >= FAR:
        step = max(1, PART // of_head)
        cuts = [
            (i, min(i + step, (kv + 1) * group))
            for kv in range(num_kv)
            for i in range(kv * group, (kv + 1) * group, step)
        ]
    else:
        step = max(1, PART // (group * of_head))
        cuts = [(kv * group, min(kv + step, num_kv) * group) for kv in range(0, num_kv, step)]
    return [(slice(i, j), slice(i // group, -(-j // group))) for i, j in cuts]
