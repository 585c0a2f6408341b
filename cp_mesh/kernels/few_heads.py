"""Tiles of tensors that span 2**31 elements and more, computed a few heads at a time.

Kernels that count elements in 32 bits are wrong there without an error: the backward of cuDNN 9.19 on an H200 (found by
test_large_tensors), FlashAttention-4's of packed documents (Dao-AILab/flash-attention#2611), PyTorch's flex_attention
(pytorch/pytorch#190857). A part is a copy, large enough to keep a GPU busy (docs/log.md).
"""

from __future__ import annotations

from collections.abc import Callable
from operator import mul
from typing import Any

import torch
from torch import Tensor

from cp_mesh.errors import UnsupportedError, refuse
from cp_mesh.kernels.scores import ScoreGradients, Scores

FAR, PART = 2**31, 2**29
"""Elements that a tensor spans from which on it is computed in parts; and about those of a part."""


def by_heads(
    forward: Callable[..., Any], backward: Callable[..., Any]
) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """The two tile functions of a kernel; tensors that span `FAR` elements reach them a few heads at a time."""

    def forward_too(q: Tensor, k: Tensor, v: Tensor, cover: Any, scores: Scores) -> tuple[Tensor, Tensor]:
        if not _are_far(q, k, v):
            return forward(q, k, v, cover, scores)
        whole: list[Tensor] = []
        for of_q, of_kv in _parts(q, k):
            q_part, k_part, v_part = (x[:, at].contiguous() for x, at in ((q, of_q), (k, of_kv), (v, of_kv)))
            parts = forward(q_part, k_part, v_part, cover, scores.heads(of_q.start, of_q.stop))
            whole = whole or [x.new_empty(*q.shape[:2], *x.shape[2:]) for x in parts]
            for x, part in zip(whole, parts, strict=True):
                x[:, of_q] = part
        out, lse = whole
        return out, lse

    def backward_too(t: Any) -> Any:
        if not _are_far(t.dout, t.q, t.k, t.v, t.out):
            return backward(t)
        sums: list[Tensor] = []
        of_scores = ScoreGradients.zeros(t.scores, t.lse.dtype)
        parts = _parts(t.q, t.k)
        added = torch.promote_types(t.k.dtype, t.lse.dtype) if len(parts) > t.k.shape[1] else None
        for of_q, of_kv in parts:
            heads = dict.fromkeys(("dout", "q", "out", "lse", "delta"), of_q) | dict.fromkeys("kv", of_kv)
            given = {name: x[:, at].contiguous() for name, at in heads.items() if (x := getattr(t, name)) is not None}
            scores = t.scores.heads(of_q.start, of_q.stop)
            *grads, found = (*backward(t._replace(**given, scores=scores, dk=None, dv=None)), None)[:4]
            dtypes = [x.dtype for x in grads]
            sums = sums or [
                x.new_zeros(like.shape, dtype=added) for x, like in zip(grads, (t.q, t.k, t.v), strict=True)
            ]
            for x, part, at in zip(sums, grads, (of_q, of_kv, of_kv), strict=True):
                x[:, at] += part
            if found:
                of_scores.part(heads=(of_q.start, of_q.stop)).add_(found)
        return *(x.to(dtype) for x, dtype in zip(sums, dtypes, strict=True)), of_scores

    return forward_too, backward_too


def _are_far(*tensors: Tensor | None) -> bool:
    for x in tensors:  # each tile asks: memory that holds less is known sooner than strides
        if x is not None and x.untyped_storage().nbytes() >= FAR and max(map(mul, x.shape, x.stride())) >= FAR:
            return True
    return False


def _parts(q: Tensor, k: Tensor) -> list[tuple[slice, slice]]:
    """Ranges of query heads and of the kv heads that they read: those of several kv heads, or a few of one's."""
    num_kv, group = k.shape[1], q.shape[1] // k.shape[1]
    of_q, of_k = q[:, 0].numel(), k[:, 0].numel()
    if max(of_q, of_k) >= FAR:
        refuse("attention", f"less than {FAR} elements in a head", max(of_q, of_k), "take more ranks", UnsupportedError)
    if group * of_q >= FAR:
        step = max(1, PART // of_q)
        cuts = [
            (i, min(i + step, (kv + 1) * group))
            for kv in range(num_kv)
            for i in range(kv * group, (kv + 1) * group, step)
        ]
    else:
        step = max(1, PART // max(group * of_q, of_k))
        cuts = [(kv * group, min(kv + step, num_kv) * group) for kv in range(0, num_kv, step)]
    return [(slice(i, j), slice(i // group, -(-j // group))) for i, j in cuts]
