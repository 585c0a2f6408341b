"""Kernels of optional packages: FlashAttention-4 (flash-attn-4), FlashAttention-3, and FlashAttention-2 (flash-attn).

No package is imported before its kernel computes. All take [B, S, H, D] views with unit last stride and rows that start
at multiples of 16 bytes, and write gradients into such views. Their lse is as in `contract`; given the global out and
lse they return a tile's share of the gradients, rounded to the inputs' dtype. None of them waits for the device.

FlashAttention-4 compiles at the first call of each variant: dtype, head dims, heads per kv head, which sides of the
band are bounded, one block of rows or more. Lengths, strides, the bounds themselves and the scale are no part of it, so
the tiles of a ring share a few variants. A variant must have been compiled before it is captured in a CUDA graph.
"""

from __future__ import annotations

import sys
from functools import lru_cache
from importlib import import_module
from importlib.machinery import PathFinder
from importlib.util import find_spec

import torch
from torch import Tensor

from cp_mesh.kernels.contract import Capability, Pairs
from cp_mesh.kernels.merge import BackwardTile, merging_kernel
from cp_mesh.masks import CAUSAL, Band

_HALF = (torch.bfloat16, torch.float16)


def _installed(name: str) -> bool:
    """Whether a module is imported or can be found."""
    return sys.modules.get(name) is not None or _can_be_found(name)


@lru_cache
def _can_be_found(name: str) -> bool:
    """As find_spec tells, but without importing the packages around it; asked at every call, so kept."""
    top, *parts = name.split(".")
    spec = find_spec(top)
    for part in parts:
        if spec is None or spec.submodule_search_locations is None:
            return False
        spec = PathFinder.find_spec(f"{spec.name}.{part}", list(spec.submodule_search_locations))
    return spec is not None


def _fa4_lacks() -> str | None:
    return None if _installed("flash_attn.cute") else "package flash_attn.cute (pip install cp_mesh[flash])"


def _fa3_registered() -> bool:
    return hasattr(torch.ops.flash_attn_3, "fwd") and hasattr(torch.ops.flash_attn_3, "bwd")


def _fa3_lacks() -> str | None:
    if _fa3_registered() or _installed("flash_attn_interface"):
        return None
    return "operators torch.ops.flash_attn_3 (install FlashAttention-3, whose flash_attn_interface registers them)"


def _fa2_lacks() -> str | None:
    found = _installed("flash_attn.flash_attn_interface")
    return None if found else "package flash_attn.flash_attn_interface (pip install flash-attn)"


def _bshd(x: Tensor) -> Tensor:
    """[B, H, S, D] as [B, S, H, D], or back: a view."""
    return x.transpose(1, 2)


def _window(cover: Band | Pairs, num_q: int, num_k: int) -> tuple[int | None, int | None]:
    """(left, right) of a band for kernels that align to the bottom right: -left <= j - (i + num_k - num_q) <= right."""
    assert isinstance(cover, Band), "the chooser gives tensor masks to kernels that read them"
    assert cover.lo is None or cover.hi is None or cover.lo <= cover.hi, "a schedule has no empty tiles"
    shift = num_k - num_q
    return None if cover.hi is None else cover.hi + shift, None if cover.lo is None else -cover.lo - shift


def _writable(buffer: Tensor | None, like: Tensor) -> Tensor:
    """The caller's buffer, or a new one if a kernel could not store 16 bytes at a time there: none of them checks."""
    if buffer is not None and buffer.shape == like.shape:
        unit = 16 // buffer.element_size()
        if buffer.data_ptr() % 16 == 0 and all(stride % unit == 0 for stride in buffer.stride()[:-1]):
            return buffer
    return torch.empty_like(like)


def _fa4_head_dims(q: Tensor, k: Tensor, v: Tensor, *, backward: bool) -> tuple[int, int]:
    """The head dims to call it with: of the pairs that differ, some do not compile; (192, 128) has its own kernels."""
    head_dim, v_head_dim, grouped = q.shape[3], v.shape[3], q.shape[1] != k.shape[1]
    if head_dim == v_head_dim or ((head_dim, v_head_dim) == (192, 128) and not (backward and grouped)):
        return head_dim, v_head_dim
    return max(head_dim, v_head_dim), max(head_dim, v_head_dim)


def _widen(x: Tensor, dim: int) -> Tensor:
    """With zeros after the end of the last dim, which change no score and no output."""
    return x if x.shape[3] == dim else torch.nn.functional.pad(x, (0, dim - x.shape[3]))


def _narrow(x: Tensor, dim: int) -> Tensor:
    """The first ``dim`` of the last dim; the same object if that is all, which tells the caller its buffer was used."""
    return x if x.shape[3] == dim else x[..., :dim]


def _fa4_forward(q: Tensor, k: Tensor, v: Tensor, cover: Band | Pairs, scale: float) -> tuple[Tensor, Tensor]:
    left, right = _window(cover, q.shape[2], k.shape[2])
    dim, v_dim = _fa4_head_dims(q, k, v, backward=False)
    # by keyword, and the first two outputs: both lists have grown between releases
    out, lse = import_module("flash_attn.cute.interface")._flash_attn_fwd(
        q=_bshd(_widen(q, dim)), k=_bshd(_widen(k, dim)), v=_bshd(_widen(v, v_dim)), softmax_scale=scale,
        window_size_left=left, window_size_right=right, return_lse=True,
    )[:2]  # fmt: skip
    return _narrow(_bshd(out), v.shape[3]), lse


def _fa4_backward(t: BackwardTile) -> tuple[Tensor, Tensor, Tensor]:
    assert t.out is not None, "uses_delta is not set"
    left, right = _window(t.cover, t.q.shape[2], t.k.shape[2])
    dim, v_dim = _fa4_head_dims(t.q, t.k, t.v, backward=True)
    q, k, v, out, dout = *(_widen(x, dim) for x in (t.q, t.k)), *(_widen(x, v_dim) for x in (t.v, t.out, t.dout))
    dk, dv = _writable(t.dk, k), _writable(t.dv, v)
    dq = import_module("flash_attn.cute.interface")._flash_attn_bwd(
        q=_bshd(q), k=_bshd(k), v=_bshd(v), out=_bshd(out), dout=_bshd(dout), lse=t.lse, softmax_scale=t.scale,
        window_size_left=left, window_size_right=right, dk=_bshd(dk), dv=_bshd(dv),
    )[0]  # fmt: skip
    return _narrow(_bshd(dq), t.q.shape[3]), _narrow(dk, t.q.shape[3]), _narrow(dv, t.v.shape[3])


def _fa3_forward(q: Tensor, k: Tensor, v: Tensor, cover: Band | Pairs, scale: float) -> tuple[Tensor, Tensor]:
    if not _fa3_registered():
        import_module("flash_attn_interface")
    # num_splits=0 lets the kernel split the keys, which costs a second kernel and fp32 partial outputs
    out, lse, *_ = torch.ops.flash_attn_3.fwd(
        _bshd(q), _bshd(k), _bshd(v), softmax_scale=scale, is_causal=cover == CAUSAL, num_splits=1
    )
    return _bshd(out), lse


def _fa3_backward(t: BackwardTile) -> tuple[Tensor, Tensor, Tensor]:
    assert t.out is not None, "uses_delta is not set"
    if not _fa3_registered():
        import_module("flash_attn_interface")
    # All three are given: some releases return gradients first, others do not return them.
    dq, dk, dv = torch.empty_like(t.q), _writable(t.dk, t.k), _writable(t.dv, t.v)
    # the kernel reads lse as packed rows
    torch.ops.flash_attn_3.bwd(
        _bshd(t.dout), _bshd(t.q), _bshd(t.k), _bshd(t.v), _bshd(t.out), t.lse.contiguous(), dq=_bshd(dq),
        dk=_bshd(dk), dv=_bshd(dv), softmax_scale=t.scale, is_causal=t.cover == CAUSAL,
    )  # fmt: skip
    return dq, dk, dv


def _fa2_forward(q: Tensor, k: Tensor, v: Tensor, cover: Band | Pairs, scale: float) -> tuple[Tensor, Tensor]:
    out, lse, *_ = import_module("flash_attn.flash_attn_interface")._flash_attn_forward(
        _bshd(q), _bshd(k), _bshd(v), dropout_p=0.0, softmax_scale=scale, causal=cover == CAUSAL, window_size_left=-1,
        window_size_right=-1, softcap=0.0, alibi_slopes=None, return_softmax=False,
    )  # fmt: skip
    return _bshd(out), lse


def _fa2_backward(t: BackwardTile) -> tuple[Tensor, Tensor, Tensor]:
    assert t.out is not None, "uses_delta is not set"
    dq, dk, dv = torch.empty_like(t.q), _writable(t.dk, t.k), _writable(t.dv, t.v)
    # the kernel reads lse as packed rows
    import_module("flash_attn.flash_attn_interface")._flash_attn_backward(
        _bshd(t.dout), _bshd(t.q), _bshd(t.k), _bshd(t.v), _bshd(t.out), t.lse.contiguous(), _bshd(dq), _bshd(dk),
        _bshd(dv), dropout_p=0.0, softmax_scale=t.scale, causal=t.cover == CAUSAL, window_size_left=-1,
        window_size_right=-1, softcap=0.0, alibi_slopes=None, deterministic=False,
    )  # fmt: skip
    return dq, dk, dv


FA4 = merging_kernel(
    "fa4",
    Capability(
        devices=("cuda",),
        dtypes=_HALF,
        compute_capability=(9, 0),
        # it has kernels for Blackwell, with other limits of head dims; nothing was run there
        only_on=((9, 0),),
        covers=("full", "causal", "window"),
        max_head_dim=256,
        head_dim_multiple=8,
        v_head_dim=True,
        deterministic=False,
        lacking=_fa4_lacks,
    ),
    _fa4_forward,
    _fa4_backward,
)
FA3 = merging_kernel(
    "fa3",
    Capability(
        devices=("cuda",),
        dtypes=_HALF,
        compute_capability=(9, 0),
        only_on=((9, 0),),
        max_head_dim=256,
        head_dim_multiple=8,
        deterministic=False,
        lacking=_fa3_lacks,
    ),
    _fa3_forward,
    _fa3_backward,
    # its window cannot be negative: -1 means unlimited
    squares=True,
)
FA2_PACKAGE = merging_kernel(
    "fa2_package",
    Capability(
        devices=("cuda",),
        dtypes=_HALF,
        compute_capability=(8, 0),
        max_head_dim=256,
        wide_heads_on=((8, 0), (9, 0), (10, 0)),
        head_dim_multiple=8,
        deterministic=False,
        lacking=_fa2_lacks,
    ),
    _fa2_forward,
    _fa2_backward,
    squares=True,
)
