"""Kernels of optional packages: FlashAttention-4 (flash-attn-4), FlashAttention-3, and FlashAttention-2 (flash-attn).

No package is imported before a CUDA call that it could serve is planned. All take [B, S, H, D] views with unit last
stride and rows that start at multiples of 16 bytes, and write gradients into such views. Their lse is as in `contract`;
given the global out and lse they return a tile's share of the gradients, rounded to the inputs' dtype. None of them
waits for the device.

FlashAttention-4 compiles at the first call of each variant: dtype, head dims, heads per kv head, the softcap, which
sides of the band are bounded, one block of rows or more. Lengths, strides, the bounds themselves and the scale are no
part of it, so the tiles of a ring share a few variants. A variant must have been compiled before it is captured in a
CUDA graph. Its softcap computes tanh with a relative error of 2⁻¹¹.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from functools import lru_cache, partial
from importlib import import_module
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from cp_mesh.kernels.combine import accumulation_dtype
from cp_mesh.kernels.contract import Capability, Pairs
from cp_mesh.kernels.merge import BackwardTile, merging_kernel
from cp_mesh.kernels.scores import Scores
from cp_mesh.masks import CAUSAL, Band
from cp_mesh.segments import Segments

_HALF = (torch.bfloat16, torch.float16)


# Parameters that the calls below pass by name: other releases, and other packages of that name, have others.
_SEQUENCES = frozenset(f"{name}_{side}" for name in ("cu_seqlens", "seqused", "max_seqlen") for side in "qk")
_FA4_CALLS = {
    "_flash_attn_fwd": {"softmax_scale", "softcap", "window_size_left", "window_size_right", "return_lse", "out", "lse"}
    | _SEQUENCES,
    "_flash_attn_bwd": {
        "softmax_scale",
        "softcap",
        "window_size_left",
        "window_size_right",
        "dq",
        "dk",
        "dv",
        "deterministic",
    }
    | _SEQUENCES,
}
_FA2_CALLS = {
    "_flash_attn_forward": {"softmax_scale", "causal", "window_size_left", "softcap", "return_softmax"},
    "_flash_attn_backward": {"softmax_scale", "causal", "window_size_left", "softcap", "deterministic"},
}


@lru_cache
def _module(name: str) -> ModuleType | str:
    """The module, or in words why it cannot be imported. Asked for plans of CUDA calls, once a process."""
    try:
        return import_module(name)
    except Exception as error:  # a broken build can raise anything
        return f"{type(error).__name__}: {error}"


def _lacks(name: str, calls: dict[str, set[str]], install: str) -> str | None:
    """What of a module is missing, in words. It is imported: a package that is there may not work."""
    module = _module(name)
    if isinstance(module, str):
        return f"package {name} ({install}; {module})"
    for function, needed in calls.items():
        has = inspect.signature(getattr(module, function)).parameters if hasattr(module, function) else {}
        if any(parameter.kind is parameter.VAR_KEYWORD for parameter in has.values()):
            continue  # a torch.library op, which does not show its parameters here
        if missing := needed - set(has):
            return f"parameters {', '.join(sorted(missing))} of {name}.{function} ({install})"
    return None


_fa4: Callable[[], Any] = partial(_module, "flash_attn.cute.interface")
_fa2: Callable[[], Any] = partial(_module, "flash_attn.flash_attn_interface")


def _fa4_lacks() -> str | None:
    return _lacks("flash_attn.cute.interface", _FA4_CALLS, "pip install cp_mesh[flash]")


def _fa3_registered() -> bool:
    return hasattr(torch.ops.flash_attn_3, "fwd") and hasattr(torch.ops.flash_attn_3, "bwd")


def _fa3_lacks() -> str | None:
    if _fa3_registered():
        return None
    missing = _lacks("flash_attn_interface", {}, "FlashAttention-3")
    return missing or (None if _fa3_registered() else "operators torch.ops.flash_attn_3 (FlashAttention-3)")


def _fa2_lacks() -> str | None:
    return _lacks("flash_attn.flash_attn_interface", _FA2_CALLS, "pip install flash-attn>=2.7")


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


def _fa4_forward(
    q: Tensor, k: Tensor, v: Tensor, cover: Band | Pairs | Segments, scores: Scores
) -> tuple[Tensor, Tensor]:
    if isinstance(cover, Segments):
        return _fa4_segments_forward(q, k, v, cover, scores)
    left, right = _window(cover, q.shape[2], k.shape[2])
    dim, v_dim = _fa4_head_dims(q, k, v, backward=False)
    # by keyword, and the first two outputs: both lists have grown between releases
    out, lse = _fa4()._flash_attn_fwd(
        q=_bshd(_widen(q, dim)), k=_bshd(_widen(k, dim)), v=_bshd(_widen(v, v_dim)), softmax_scale=scores.scale,
        softcap=scores.softcap, window_size_left=left, window_size_right=right, return_lse=True,
    )[:2]  # fmt: skip
    return _narrow(_bshd(out), v.shape[3]), lse


def _fa4_backward(t: BackwardTile, deterministic: bool = False) -> tuple[Tensor, Tensor, Tensor]:
    assert t.out is not None, "uses_delta is not set"
    if isinstance(t.cover, Segments):
        return _fa4_segments_backward(t, t.out, t.cover)
    left, right = _window(t.cover, t.q.shape[2], t.k.shape[2])
    dim, v_dim = _fa4_head_dims(t.q, t.k, t.v, backward=True)
    q, k, v, out, dout = *(_widen(x, dim) for x in (t.q, t.k)), *(_widen(x, v_dim) for x in (t.v, t.out, t.dout))
    dk, dv = _writable(t.dk, k), _writable(t.dv, v)
    dq = _fa4()._flash_attn_bwd(
        q=_bshd(q), k=_bshd(k), v=_bshd(v), out=_bshd(out), dout=_bshd(dout), lse=t.lse, softmax_scale=t.scores.scale,
        softcap=t.scores.softcap or 0.0, window_size_left=left, window_size_right=right, dk=_bshd(dk), dv=_bshd(dv),
        deterministic=deterministic,
    )[0]  # fmt: skip
    return _narrow(_bshd(dq), t.q.shape[3]), _narrow(dk, t.q.shape[3]), _narrow(dv, t.v.shape[3])


def _by_batch_row(cover: Segments, x: Tensor) -> Iterator[tuple[int, dict[str, Any]]]:
    """The batch rows that have blocks, each with the arguments that say them; one call takes one batch row.

    ``seqused`` tells how long a sequence is whatever begins after it, so sequences may leave rows and keys out. Those
    the kernel neither reads nor writes.
    """
    tables = cover.on(x.device)
    for row in range(x.shape[0]):
        t = tables[row if len(tables) > 1 else 0]
        if t.max_q:
            yield row, {
                "cu_seqlens_q": t.q_begins, "cu_seqlens_k": t.k_begins, "seqused_q": t.q_lens, "seqused_k": t.k_lens,
                "max_seqlen_q": t.max_q, "max_seqlen_k": t.max_k,
                "window_size_left": cover.left, "window_size_right": cover.right,
            }  # fmt: skip


def _fa4_segments_forward(q: Tensor, k: Tensor, v: Tensor, cover: Segments, scores: Scores) -> tuple[Tensor, Tensor]:
    dim, v_dim = _fa4_head_dims(q, k, v, backward=False)
    # rows of no block keep these values: they have no key
    out = q.new_zeros((q.shape[0], q.shape[2], q.shape[1], v_dim))
    lse = q.new_full(q.shape[:3], float("-inf"), dtype=accumulation_dtype(q.dtype))
    q, k, wide_v = _bshd(_widen(q, dim)), _bshd(_widen(k, dim)), _bshd(_widen(v, v_dim))
    for row, sequences in _by_batch_row(cover, q):
        _fa4()._flash_attn_fwd(
            q=q[row], k=k[row], v=wide_v[row], softmax_scale=scores.scale, softcap=scores.softcap,
            return_lse=True, out=out[row], lse=lse[row],
            **sequences,
        )  # fmt: skip
    return _narrow(_bshd(out), v.shape[3]), lse


def _fa4_segments_backward(t: BackwardTile, out: Tensor, cover: Segments) -> tuple[Tensor, Tensor, Tensor]:
    dim, v_dim = _fa4_head_dims(t.q, t.k, t.v, backward=True)
    q, k, v, out, dout = *(_widen(x, dim) for x in (t.q, t.k)), *(_widen(x, v_dim) for x in (t.v, out, t.dout))
    dq, dk, dv = torch.zeros_like(q), _writable(t.dk, k).zero_(), _writable(t.dv, v).zero_()
    for row, sequences in _by_batch_row(cover, q):
        q_, k_, v_, out_, dout_, dq_, dk_, dv_ = (_bshd(x)[row] for x in (q, k, v, out, dout, dq, dk, dv))
        _fa4()._flash_attn_bwd(
            q=q_, k=k_, v=v_, out=out_, dout=dout_, lse=t.lse[row], softmax_scale=t.scores.scale,
            softcap=t.scores.softcap or 0.0, dq=dq_, dk=dk_, dv=dv_,
            **sequences,
        )  # fmt: skip
    return _narrow(dq, t.q.shape[3]), _narrow(dk, t.q.shape[3]), _narrow(dv, t.v.shape[3])


def _fa3_forward(q: Tensor, k: Tensor, v: Tensor, cover: Band | Pairs, scores: Scores) -> tuple[Tensor, Tensor]:
    # num_splits=0 lets the kernel split the keys, which costs a second kernel and fp32 partial outputs
    out, lse, *_ = torch.ops.flash_attn_3.fwd(
        _bshd(q), _bshd(k), _bshd(v), softmax_scale=scores.scale, is_causal=cover == CAUSAL,
        softcap=scores.softcap or 0.0, num_splits=1,
    )  # fmt: skip
    return _bshd(out), lse


def _fa3_backward(t: BackwardTile) -> tuple[Tensor, Tensor, Tensor]:
    assert t.out is not None, "uses_delta is not set"
    # All three are given: some releases return gradients first, others do not return them.
    dq, dk, dv = torch.empty_like(t.q), _writable(t.dk, t.k), _writable(t.dv, t.v)
    # the kernel reads lse as packed rows
    torch.ops.flash_attn_3.bwd(
        _bshd(t.dout), _bshd(t.q), _bshd(t.k), _bshd(t.v), _bshd(t.out), t.lse.contiguous(), dq=_bshd(dq),
        dk=_bshd(dk), dv=_bshd(dv), softmax_scale=t.scores.scale, is_causal=t.cover == CAUSAL,
        softcap=t.scores.softcap or 0.0,
    )  # fmt: skip
    return dq, dk, dv


def _fa2_forward(q: Tensor, k: Tensor, v: Tensor, cover: Band | Pairs, scores: Scores) -> tuple[Tensor, Tensor]:
    out, lse, *_ = _fa2()._flash_attn_forward(
        _bshd(q), _bshd(k), _bshd(v), dropout_p=0.0, softmax_scale=scores.scale, causal=cover == CAUSAL,
        window_size_left=-1, window_size_right=-1, softcap=scores.softcap or 0.0, alibi_slopes=None,
        return_softmax=False,
    )  # fmt: skip
    return _bshd(out), lse


def _fa2_backward(t: BackwardTile) -> tuple[Tensor, Tensor, Tensor]:
    assert t.out is not None, "uses_delta is not set"
    dq, dk, dv = torch.empty_like(t.q), _writable(t.dk, t.k), _writable(t.dv, t.v)
    # the kernel reads lse as packed rows
    _fa2()._flash_attn_backward(
        _bshd(t.dout), _bshd(t.q), _bshd(t.k), _bshd(t.v), _bshd(t.out), t.lse.contiguous(), _bshd(dq), _bshd(dk),
        _bshd(dv), dropout_p=0.0, softmax_scale=t.scores.scale, causal=t.cover == CAUSAL, window_size_left=-1,
        window_size_right=-1, softcap=t.scores.softcap or 0.0, alibi_slopes=None, deterministic=False,
    )  # fmt: skip
    return dq, dk, dv


_FA4_HAS = Capability(
    devices=("cuda",),
    dtypes=_HALF,
    compute_capability=(9, 0),
    # it has kernels for Blackwell, with other limits of head dims; nothing was run there
    only_on=((9, 0),),
    covers=("full", "causal", "window", "segments"),
    max_head_dim=256,
    head_dim_multiple=8,
    v_head_dim=True,
    # of windows and sequences it was not tried
    deterministic_covers=frozenset({"full", "causal"}),
    features=frozenset({"softcap"}),
    lacking=_fa4_lacks,
)
FA4 = merging_kernel(
    "fa4",
    _FA4_HAS,
    _fa4_forward,
    _fa4_backward,
    # In squares: any other band is a window for FlashAttention-4, and of these that backward was not tried.
    reproducible=merging_kernel(
        "fa4", _FA4_HAS, _fa4_forward, partial(_fa4_backward, deterministic=True), squares=True
    ),
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
        features=frozenset({"softcap"}),
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
        features=frozenset({"softcap"}),
        lacking=_fa2_lacks,
    ),
    _fa2_forward,
    _fa2_backward,
    squares=True,
)
