"""FlashAttention-2's interface on a kernel of `RAW_KERNELS`, for packages that call flash-attn.

This module stands for `flash_attn.flash_attn_interface`: its functions have the names and the order of arguments of
flash-attn 2, and call the kernel that `on` has named. They have plain attention only.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from raw_kernels import Cuts, RawKernel, bottom_right
from torch import Tensor

_kernels: list[RawKernel] = []


@contextmanager
def on(kernel: RawKernel) -> Iterator[None]:
    _kernels.append(bottom_right(kernel))
    yield
    _kernels.pop()


def of_documents(kernel: RawKernel, cuts: Cuts | None) -> RawKernel:
    """The kernel on packed documents; itself, where there is one."""
    if cuts is None or cuts[0].numel() == 2:
        return kernel
    assert kernel.packed is not None
    forward, backward = (partial(call, cuts=cuts) for call in kernel.packed)
    return replace(kernel, forward=forward, backward=backward)


class Attend(torch.autograd.Function):
    """(q, k, v, kernel, causal, scale) -> (out, lse), tensors as of `RawKernel`; lse has no gradient."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, kernel: RawKernel, causal: bool, scale: float
    ) -> tuple[Tensor, Tensor]:
        out, lse = kernel.forward(q, k, v, causal, scale)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.mark_non_differentiable(lse)
        ctx.given = kernel, causal, scale
        return out, lse

    @staticmethod
    def backward(ctx: Any, dout: Tensor, _: Any) -> tuple[Tensor | None, ...]:
        kernel, causal, scale = ctx.given
        return *kernel.backward(dout, *ctx.saved_tensors, causal, scale), None, None, None


def flash_attn_func(q, k, v, dropout_p=0.0, softmax_scale=None, causal=False, return_attn_probs=False):
    assert dropout_p == 0
    out, lse = Attend.apply(q, k, v, _kernels[-1], causal, softmax_scale)
    return (out, lse, None) if return_attn_probs else out


def flash_attn_varlen_func(
    q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p=0.0, softmax_scale=None, causal=False
):  # fmt: skip
    assert dropout_p == 0
    kernel = of_documents(_kernels[-1], (cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k))
    return Attend.apply(q[None], k[None], v[None], kernel, causal, softmax_scale)[0][0]


# ring-flash-attn reads these signatures, ringmaster gives arguments by position.
def _flash_attn_forward(
    q, k, v, dropout_p, softmax_scale, causal, window_size_left, window_size_right, softcap, alibi_slopes,
    return_softmax,
):  # fmt: skip
    _only_plain(dropout_p, window_size_left, window_size_right, softcap, alibi_slopes)
    return (*_kernels[-1].forward(q, k, v, causal, softmax_scale), None, None)


def _flash_attn_backward(
    dout, q, k, v, out, softmax_lse, dq, dk, dv, dropout_p, softmax_scale, causal, window_size_left,
    window_size_right, softcap, alibi_slopes, deterministic, rng_state=None,
):  # fmt: skip
    _only_plain(dropout_p, window_size_left, window_size_right, softcap, alibi_slopes)
    _kernels[-1].backward(dout, q, k, v, out, softmax_lse, causal, softmax_scale, (dq, dk, dv))


def _flash_attn_varlen_forward(
    q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p, softmax_scale, causal,
    window_size_left=-1, window_size_right=-1, softcap=0.0, alibi_slopes=None, return_softmax=False,
):  # fmt: skip
    _only_plain(dropout_p, window_size_left, window_size_right, softcap, alibi_slopes)
    kernel = of_documents(_kernels[-1], (cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k))
    out, lse = kernel.forward(q[None], k[None], v[None], causal, softmax_scale)
    return out[0], lse[0], None, None


def _flash_attn_varlen_backward(
    dout, q, k, v, out, softmax_lse, dq, dk, dv, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k,
    dropout_p, softmax_scale, causal, window_size_left, window_size_right, softcap, alibi_slopes,
    deterministic, rng_state=None,
):  # fmt: skip
    _only_plain(dropout_p, window_size_left, window_size_right, softcap, alibi_slopes)
    dout, q, k, v, out, lse, dq, dk, dv = (x[None] for x in (dout, q, k, v, out, softmax_lse, dq, dk, dv))
    kernel = of_documents(_kernels[-1], (cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k))
    kernel.backward(dout, q, k, v, out, lse, causal, softmax_scale, (dq, dk, dv))


def _only_plain(dropout: float, left: int, right: int, softcap: float, alibi: Tensor | None) -> None:
    assert (dropout, left, right, softcap, alibi) == (0, -1, -1, 0.0, None), "plain attention only"
