"""Kernels that ship with PyTorch: CPU flash, cuDNN and FlashAttention-2, through aten.

They get only full tiles and square causal tiles, since causal alignment differs between them, and the *global* out and
lse in the backward. cuDNN's lse has a trailing dim of size 1; the others follow `contract`. In square tiles no row is
fully masked, so the kernels' different lse values for such rows (+inf, 0.0) never appear. No kernel here accepts a
gradient of lse. They round partial gradients to the input dtype; sums are fp32.
"""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

from cp_mesh._torch import cpu_flash, cudnn, flash
from cp_mesh.geometry.host_tensors import lasting
from cp_mesh.geometry.mask import CAUSAL, Band
from cp_mesh.kernels.contract import RECORDED, Capability, Pairs
from cp_mesh.kernels.merge import BackwardTile, Kernel
from cp_mesh.kernels.scores import Scores

_HALF = (torch.bfloat16, torch.float16)


@lru_cache(maxsize=64)
@lasting()
def _philox(device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """A random-number state and its two parts: the operators require them, but do not read them without dropout."""
    state = torch.zeros(2, dtype=torch.int64, device=device)
    return state, state[0], state[1]


def _full_precision(x: Tensor) -> Tensor:
    """Convert half precision to fp32: with partial dq in bfloat16, three ranks missed the low-precision tolerance."""
    return x.float() if x.dtype in _HALF else x


def _cpu_flash_forward(q: Tensor, k: Tensor, v: Tensor, cover: Band | Pairs, scores: Scores) -> tuple[Tensor, Tensor]:
    q, k, v = (_full_precision(x) for x in (q, k, v))
    return cpu_flash.forward(q, k, v, 0.0, cover == CAUSAL, scale=scores.scale)


def _cpu_flash_backward(t: BackwardTile) -> tuple[Tensor, Tensor, Tensor]:
    assert t.out is not None
    dout, q, k, v, out = (_full_precision(x) for x in (t.dout, t.q, t.k, t.v, t.out))
    return cpu_flash.backward(dout, q, k, v, out, t.lse, 0.0, t.cover == CAUSAL, scale=t.scores.scale)


def _cudnn_forward(q: Tensor, k: Tensor, v: Tensor, cover: Band | Pairs, scores: Scores) -> tuple[Tensor, Tensor]:
    # cuDNN refuses one key; of one query it is wrong on B200 (pytorch#193893) or gives NaN (cudnn-frontend#1072)
    if 1 in (q.shape[2], k.shape[2]):
        return _fa2_forward(q, k, v, cover, scores)
    out, lse, *_ = cudnn.forward(q, k, v, None, True, 0.0, cover == CAUSAL, False, scale=scores.scale)
    return out, lse.reshape(q.shape[:3])


def _cudnn_backward(t: BackwardTile) -> tuple[Tensor, Tensor, Tensor]:
    # in full tiles of such lengths dq is NaN where exp(-lse) overflows: pytorch#196678, on an H200 without a mask too
    if 1 in (t.q.shape[2], t.k.shape[2]) or (t.k.shape[2] % 128 == 64 and t.cover != CAUSAL):
        return _fa2_backward(t)
    _, seed, offset = _philox(t.q.device)
    # cuDNN reads lse as contiguous; a slice of rows of the running lse is not
    lse = t.lse.contiguous()[..., None]
    return cudnn.backward(
        t.dout, t.q, t.k, t.v, t.out, lse, seed, offset, None, None, None, t.q.shape[2], t.k.shape[2], 0.0,
        t.cover == CAUSAL, scale=t.scores.scale,
    )  # fmt: skip


def _fa2_forward(q: Tensor, k: Tensor, v: Tensor, cover: Band | Pairs, scores: Scores) -> tuple[Tensor, Tensor]:
    out, lse, *_ = flash.forward(q, k, v, 0.0, cover == CAUSAL, False, scale=scores.scale)
    return out, lse


def _fa2_backward(t: BackwardTile) -> tuple[Tensor, Tensor, Tensor]:
    state, _, _ = _philox(t.q.device)
    # the kernel reads lse as contiguous
    lse = t.lse.contiguous()
    return flash.backward(
        t.dout, t.q, t.k, t.v, t.out, lse, None, None, t.q.shape[2], t.k.shape[2], 0.0, t.cover == CAUSAL, state, state,
        scale=t.scores.scale,
    )  # fmt: skip


CPU_FLASH = Kernel(
    "cpu_flash",
    Capability(devices=("cpu",), dtypes=(torch.float64, torch.float32, *_HALF)),
    _cpu_flash_forward,
    _cpu_flash_backward,
    int64_offsets=True,
    squares=True,
    rounds=False,
)
CUDNN = Kernel(
    "cudnn",
    Capability(
        devices=("cuda",),
        dtypes=_HALF,
        compute_capability=(9, 0),
        auto_on=RECORDED,
        max_head_dim=128,
        head_dim_multiple=8,
        deterministic=False,
    ),
    _cudnn_forward,
    _cudnn_backward,
    squares=True,
)
FA2 = Kernel(
    "fa2",
    Capability(
        devices=("cuda",),
        dtypes=_HALF,
        compute_capability=(8, 0),
        max_head_dim=256,
        wide_heads_on=((8, 0), (9, 0), (10, 0)),
        head_dim_multiple=8,
        deterministic=False,
    ),
    _fa2_forward,
    _fa2_backward,
    int64_offsets=True,
    squares=True,
)
