"""Attention kernels of this machine, called without a library around them: one table for all benchmarks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache
from importlib import import_module

import torch
from torch import Tensor

from cp_mesh.kernels.table import KERNELS

_aten = torch.ops.aten

Forward = Callable[[Tensor, Tensor, Tensor, bool, float], tuple[Tensor, Tensor]]
Backward = Callable[..., tuple[Tensor, Tensor, Tensor]]
Cuts = tuple[Tensor, Tensor, int, int]  # cumulative lengths of packed documents in q and in k, int32; the longest ones


@dataclass(frozen=True)
class RawKernel:
    """One attention kernel without any library around it, on [1, S, heads, D] views; lse [1, H, S] natural log, fp32.

    Attributes:
        forward: (q, k, v, causal, scale) -> (out, lse).
        backward: (dout, q, k, v, out, lse, causal, scale, into) -> (dq, dk, dv), written to the three tensors ``into``
            unless that is None. Given the global out and lse it returns a tile's share of the gradients.
        bottom_right: how a causal mask lies on a tile with more keys than queries; else it lies top-left.
        writes_into: whether the kernel itself writes to ``into``; else it takes copies.
        packed: forward and backward of packed documents, causal masks bottom-right, with a last argument ``cuts``; None
            if there are none here.
    """

    name: str
    forward: Forward
    backward: Backward
    bottom_right: bool
    writes_into: bool = True
    packed: tuple[Forward, Backward] | None = None


def swap(x: Tensor) -> Tensor:
    """[B, S, H, D] as [B, H, S, D], or back; a view."""
    return x.transpose(1, 2)


def _store(gradients: tuple[Tensor, ...], into: tuple[Tensor, ...] | None) -> tuple[Tensor, ...]:
    if into is None:
        return gradients
    for target, gradient in zip(into, gradients, strict=True):
        target.copy_(gradient)
    return into


@lru_cache
def _no_philox(device: torch.device) -> Tensor:
    """The random-number state of calls without dropout: asked for, never read."""
    return torch.zeros(2, dtype=torch.int64, device=device)


def _cudnn_forward(q, k, v, causal, scale):
    out, lse, *_ = _aten._scaled_dot_product_cudnn_attention(
        swap(q), swap(k), swap(v), None, True, 0.0, causal, False, scale=scale
    )
    return swap(out), lse.reshape(q.shape[0], q.shape[2], q.shape[1])


def _cudnn_backward(dout, q, k, v, out, lse, causal, scale, into=None):
    seed = _no_philox(q.device)
    gradients = _aten._scaled_dot_product_cudnn_attention_backward(
        swap(dout), swap(q), swap(k), swap(v), swap(out), lse.contiguous()[..., None], seed[0], seed[1], None,
        None, None, q.shape[1], k.shape[1], 0.0, causal, scale=scale,
    )  # fmt: skip
    return _store(tuple(swap(x) for x in gradients), into)


def _fa2_forward(q, k, v, causal, scale):
    out, lse, *_ = _aten._scaled_dot_product_flash_attention(swap(q), swap(k), swap(v), 0.0, causal, False, scale=scale)
    return swap(out), lse


def _fa2_backward(dout, q, k, v, out, lse, causal, scale, into=None):
    seed = _no_philox(q.device)
    gradients = _aten._scaled_dot_product_flash_attention_backward(
        swap(dout), swap(q), swap(k), swap(v), swap(out), lse.contiguous(), None, None, q.shape[1], k.shape[1],
        0.0, causal, seed, seed, scale=scale,
    )  # fmt: skip
    return _store(tuple(swap(x) for x in gradients), into)


def _fa4_forward(q, k, v, causal, scale):
    # by keyword, and the first two results: both lists have grown between releases
    interface = import_module("flash_attn.cute.interface")
    return interface._flash_attn_fwd(q=q, k=k, v=v, softmax_scale=scale, causal=causal, return_lse=True)[:2]


def _fa4_backward(dout, q, k, v, out, lse, causal, scale, into=None):
    dq, dk, dv = into or (None, None, None)
    return import_module("flash_attn.cute.interface")._flash_attn_bwd(
        q=q, k=k, v=v, out=out, dout=dout, lse=lse.contiguous(), softmax_scale=scale, causal=causal, dq=dq, dk=dk, dv=dv
    )[:3]


def _fa4_packed_forward(q, k, v, causal, scale, cuts):
    keywords = _fa4_keywords(q, k, v, causal, scale, cuts)
    out, lse = import_module("flash_attn.cute.interface")._flash_attn_fwd(**keywords, return_lse=True)[:2]
    return out[None], lse[None]


def _fa4_packed_backward(dout, q, k, v, out, lse, causal, scale, into=None, *, cuts):
    dq, dk, dv = (x[0] for x in into) if into else (None, None, None)
    gradients = import_module("flash_attn.cute.interface")._flash_attn_bwd(
        **_fa4_keywords(q, k, v, causal, scale, cuts), out=out[0], dout=dout[0], lse=lse[0].contiguous(), dq=dq, dk=dk,
        dv=dv,
    )  # fmt: skip
    return into or tuple(x[None] for x in gradients[:3])


def _fa4_keywords(q, k, v, causal, scale, cuts):
    names = ("cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k")
    return {"q": q[0], "k": k[0], "v": v[0], "softmax_scale": scale, "causal": causal} | dict(
        zip(names, cuts, strict=True)
    )


def _cpu_forward(q, k, v, causal, scale):
    q, k, v = (swap(x).float() for x in (q, k, v))
    out, lse = _aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, causal, scale=scale)
    return swap(out), lse


def _cpu_backward(dout, q, k, v, out, lse, causal, scale, into=None):
    tensors = [swap(x).float() for x in (dout, q, k, v, out)]
    gradients = _aten._scaled_dot_product_flash_attention_for_cpu_backward(*tensors, lse, 0.0, causal, scale=scale)
    return _store(tuple(swap(x) for x in gradients), into)


def _rounded(forward: Forward, backward: Backward) -> tuple[Forward, Backward]:
    """As a half-precision kernel rounds: out and gradients in the inputs' dtype."""

    def forward_(q, k, v, causal, scale):
        out, lse = forward(q, k, v, causal, scale)
        return out.to(q.dtype), lse

    def backward_(dout, q, k, v, out, lse, causal, scale, into=None):
        gradients = backward(dout, q, k, v, out, lse, causal, scale, into)
        return gradients if into else tuple(x.to(q.dtype) for x in gradients)

    return forward_, backward_


RAW_KERNELS = {
    kernel.name: kernel
    for kernel in (
        RawKernel(
            "fa4", _fa4_forward, _fa4_backward, bottom_right=True, packed=(_fa4_packed_forward, _fa4_packed_backward)
        ),
        RawKernel("cudnn", _cudnn_forward, _cudnn_backward, bottom_right=False, writes_into=False),
        RawKernel("fa2", _fa2_forward, _fa2_backward, bottom_right=True, writes_into=False),
        RawKernel("cpu_flash", *_rounded(_cpu_forward, _cpu_backward), bottom_right=False, writes_into=False),
    )
}


def present_kernels(device: torch.device) -> list[str]:
    """Names of `RAW_KERNELS` that this machine can run, in cp_mesh's order of preference."""
    names = []
    for name, kernel in KERNELS.items():
        capability = kernel.capability
        if name not in RAW_KERNELS or device.type not in capability.devices or capability.lacking():
            continue
        if device.type == "cuda":
            ours = torch.cuda.get_device_capability(device)
            if ours < capability.compute_capability or (capability.only_on and ours not in capability.only_on):
                continue
        names.append(name)
    return names


def bottom_right(kernel: RawKernel) -> RawKernel:
    """The kernel, with a causal mask that lies bottom-right: in two tiles and a merge, if it has no such mask."""
    if kernel.bottom_right:
        return kernel

    def forward(q, k, v, causal, scale):
        before = k.shape[1] - q.shape[1]
        if not causal or before == 0:
            return kernel.forward(q, k, v, causal, scale)
        parts = [
            kernel.forward(q, k[:, :before], v[:, :before], False, scale),
            kernel.forward(q, k[:, before:], v[:, before:], True, scale),
        ]
        lse = torch.logaddexp(parts[0][1], parts[1][1])
        out = sum(part * torch.exp(part_lse - lse).transpose(1, 2)[..., None] for part, part_lse in parts)
        return out.to(q.dtype), lse

    def backward(dout, q, k, v, out, lse, causal, scale, into=None):
        before = k.shape[1] - q.shape[1]
        if not causal or before == 0:
            return kernel.backward(dout, q, k, v, out, lse, causal, scale, into)
        first = kernel.backward(dout, q, k[:, :before], v[:, :before], out, lse, False, scale)
        second = kernel.backward(dout, q, k[:, before:], v[:, before:], out, lse, True, scale)
        dk, dv = (torch.cat([first[i], second[i]], dim=1) for i in (1, 2))
        return _store((first[0] + second[0], dk, dv), into)

    return replace(kernel, forward=forward, backward=backward, bottom_right=True)
