"""Kernels of optional packages: FlashAttention-3 and FlashAttention-2 (flash-attn), and helpers for FlashAttention-4.

A package is imported when the first CUDA call that it could serve is planned. All take [B, S, H, D] views with unit
last stride and rows aligned to 16 bytes, and write gradients into such views. Their lse follows `contract`; given the
global out and lse they return a tile's share of the gradients, rounded to the inputs' dtype. No kernel here waits for
the device. FlashAttention-4 is in `flash_attn_4`.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import lru_cache, partial
from importlib import import_module
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from cp_mesh.geometry.mask import CAUSAL, Band
from cp_mesh.kernels.contract import Capability, Pairs
from cp_mesh.kernels.merge import BackwardTile, merging_kernel
from cp_mesh.kernels.scores import Scores

HALF = (torch.bfloat16, torch.float16)

# Parameters that the calls below pass by name: other releases, and other packages of that name, may lack them.
_FA2_CALLS = {
    "_flash_attn_forward": {"softmax_scale", "causal", "window_size_left", "softcap", "return_softmax"},
    "_flash_attn_backward": {"softmax_scale", "causal", "window_size_left", "softcap", "deterministic"},
}


@lru_cache
def import_once(name: str) -> ModuleType | str:
    """Import a module once per process; if that fails, return the error as text."""
    try:
        return import_module(name)
    except Exception as error:  # a broken build can raise anything
        return f"{type(error).__name__}: {error}"


def lacks(name: str, calls: dict[str, set[str]], install: str) -> str | None:
    """What a module lacks, in words, or None. Imports it, since an installed package may still be broken."""
    module = import_once(name)
    if isinstance(module, str):
        return f"package {name} ({install}; {module})"
    for function, needed in calls.items():
        has = inspect.signature(getattr(module, function)).parameters if hasattr(module, function) else {}
        if any(parameter.kind is parameter.VAR_KEYWORD for parameter in has.values()):
            continue  # a torch.library op hides its parameters
        if missing := needed - set(has):
            return f"parameters {', '.join(sorted(missing))} of {name}.{function} ({install})"
    return None


_fa2: Callable[[], Any] = partial(import_once, "flash_attn.flash_attn_interface")


def _fa3_registered() -> bool:
    return hasattr(torch.ops.flash_attn_3, "fwd") and hasattr(torch.ops.flash_attn_3, "bwd")


def _fa3_lacks() -> str | None:
    if _fa3_registered():
        return None
    missing = lacks("flash_attn_interface", {}, "FlashAttention-3")
    return missing or (None if _fa3_registered() else "operators torch.ops.flash_attn_3 (FlashAttention-3)")


def _fa2_lacks() -> str | None:
    return lacks("flash_attn.flash_attn_interface", _FA2_CALLS, "pip install flash-attn>=2.7")


def bshd(x: Tensor) -> Tensor:
    """A view of [B, H, S, D] as [B, S, H, D], or back."""
    return x.transpose(1, 2)


def writable(buffer: Tensor | None, like: Tensor) -> Tensor:
    """The caller's buffer, or a new one if the buffer's rows are not aligned to 16 bytes, which no kernel checks."""
    if buffer is not None and buffer.shape == like.shape:
        unit = 16 // buffer.element_size()
        if buffer.data_ptr() % 16 == 0 and all(stride % unit == 0 for stride in buffer.stride()[:-1]):
            return buffer
    return torch.empty_like(like)


def _fa3_forward(q: Tensor, k: Tensor, v: Tensor, cover: Band | Pairs, scores: Scores) -> tuple[Tensor, Tensor]:
    # num_splits=0 would let it split the keys, at the cost of a second kernel and fp32 partial outputs
    out, lse, *_ = torch.ops.flash_attn_3.fwd(
        bshd(q), bshd(k), bshd(v), softmax_scale=scores.scale, is_causal=cover == CAUSAL,
        softcap=scores.softcap or 0.0, num_splits=1,
    )  # fmt: skip
    return bshd(out), lse


def _fa3_backward(t: BackwardTile) -> tuple[Tensor, Tensor, Tensor]:
    assert t.out is not None, "uses_delta is not set"
    # All three are passed: some releases return the gradients first, others do not return them.
    dq, dk, dv = torch.empty_like(t.q), writable(t.dk, t.k), writable(t.dv, t.v)
    # the kernel reads lse as contiguous
    torch.ops.flash_attn_3.bwd(
        bshd(t.dout), bshd(t.q), bshd(t.k), bshd(t.v), bshd(t.out), t.lse.contiguous(), dq=bshd(dq),
        dk=bshd(dk), dv=bshd(dv), softmax_scale=t.scores.scale, is_causal=t.cover == CAUSAL,
        softcap=t.scores.softcap or 0.0,
    )  # fmt: skip
    return dq, dk, dv


def _fa2_forward(q: Tensor, k: Tensor, v: Tensor, cover: Band | Pairs, scores: Scores) -> tuple[Tensor, Tensor]:
    out, lse, *_ = _fa2()._flash_attn_forward(
        bshd(q), bshd(k), bshd(v), dropout_p=0.0, softmax_scale=scores.scale, causal=cover == CAUSAL,
        window_size_left=-1, window_size_right=-1, softcap=scores.softcap or 0.0, alibi_slopes=None,
        return_softmax=False,
    )  # fmt: skip
    return bshd(out), lse


def _fa2_backward(t: BackwardTile) -> tuple[Tensor, Tensor, Tensor]:
    assert t.out is not None, "uses_delta is not set"
    dq, dk, dv = torch.empty_like(t.q), writable(t.dk, t.k), writable(t.dv, t.v)
    # the kernel reads lse as contiguous
    _fa2()._flash_attn_backward(
        bshd(t.dout), bshd(t.q), bshd(t.k), bshd(t.v), bshd(t.out), t.lse.contiguous(), bshd(dq), bshd(dk),
        bshd(dv), dropout_p=0.0, softmax_scale=t.scores.scale, causal=t.cover == CAUSAL, window_size_left=-1,
        window_size_right=-1, softcap=t.scores.softcap or 0.0, alibi_slopes=None, deterministic=False,
    )  # fmt: skip
    return dq, dk, dv


FA3 = merging_kernel(
    "fa3",
    Capability(
        devices=("cuda",),
        dtypes=HALF,
        compute_capability=(9, 0),
        only_on=((9, 0),),
        max_head_dim=256,
        head_dim_multiple=8,
        deterministic=False,
        features=frozenset({"softcap"}),
        lacking=_fa3_lacks,
    ),
    _fa3_forward,
    _fa3_backward,
    # only squares: a window bound of -1 means unlimited, so negative bounds cannot be passed
    squares=True,
)
FA2_PACKAGE = merging_kernel(
    "fa2_package",
    Capability(
        devices=("cuda",),
        dtypes=HALF,
        compute_capability=(8, 0),
        max_head_dim=256,
        wide_heads_on=((8, 0), (9, 0), (10, 0)),
        head_dim_multiple=8,
        deterministic=False,
        features=frozenset({"softcap"}),
        lacking=_fa2_lacks,
    ),
    _fa2_forward,
    _fa2_backward,
    squares=True,
)
