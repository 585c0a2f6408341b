"""The adapter of FlashAttention-4, and calls that skip the package's Python.

On the CPU a stand-in follows the conventions of the package, and launches what release 4.0.0b36 launches, in plain
PyTorch; on a GPU the package itself is asked the same questions. `test_segments.py` has packed sequences.
"""

from __future__ import annotations

import math
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from importlib.machinery import ModuleSpec
from itertools import product
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch
from cases import gap
from checks import forget_plans
from dense import dense_attention
from inside import CAUSAL, FULL, KERNELS, BackwardTile, Band, Distances, Request, Scores, Segments, room, shortfalls
from ranks import mesh, on_ranks
from torch import Tensor
from torch._guards import active_fake_mode

from cp_mesh import Mask, UnsupportedError, attention

flash_attn_4 = room("flash_attn_4")
flash_attn_4_package = room("flash_attn_4_package")

PAIR = flash_attn_4._forward, flash_attn_4._backward
SCALE = 0.3


# --- the question asked of a kernel: one tile, next to a second tile that holds other keys of the same queries


@dataclass(frozen=True)
class Tile:
    """Sizes of a tile: ``num_q`` queries of ``heads``, ``num_k`` keys of ``kv_heads``, head dims of k and of v."""

    cover: Band
    num_q: int
    num_k: int
    heads: int
    kv_heads: int
    dim: int
    v_dim: int

    def allowed(self, device: torch.device) -> Tensor:
        return Distances.of(self.cover, self.num_q, self.num_k).pairs(self.num_q, self.num_k)[None].to(device)


@dataclass(frozen=True)
class Inputs:
    """Memory as the loops give it: q in [B, S, H, D] order, k and v in one packed buffer [S, B, K, D + Dv]."""

    q: Tensor
    k: Tensor
    v: Tensor
    dout: Tensor


def packed(num_k: int, tile: Tile, like: Tensor) -> tuple[Tensor, Tensor]:
    """Views [B, K, S, D] and [B, K, S, Dv] of rows 8.. of one buffer, which are not dense in any dim but the last."""
    buffer = like.new_full((num_k + 8, 2, tile.kv_heads, tile.dim + tile.v_dim), math.nan)
    views = buffer[8:].permute(1, 2, 0, 3)
    return views[..., : tile.dim], views[..., tile.dim :]


def draw(tile: Tile, num_k: int, dtype: torch.dtype, device: str) -> Inputs:
    generator = torch.Generator().manual_seed(num_k)
    like = torch.empty(0, dtype=dtype, device=device)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(device, dtype)

    q = normal(2, tile.num_q + 8, tile.heads, tile.dim)[:, 8:].transpose(1, 2)
    dout = normal(2, tile.num_q, tile.heads, tile.v_dim).transpose(1, 2)
    k, v = packed(num_k, tile, like)
    k.copy_(normal(*k.shape))
    v.copy_(normal(*v.shape))
    return Inputs(q, k, v, dout)


def ask(
    forward: Callable,
    backward: Callable,
    tile: Tile,
    dtype: torch.dtype,
    device: str = "cpu",
    scale: float = SCALE,
    softcap: float | None = None,
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Results of a kernel on the tile, and those of the dense formula.

    Gradients are those of attention over the tile's keys *and* 24 others that all queries see: the tile is given the
    out and lse of all keys. Its dq is compared with the whole dq less that of the other keys, from the formula.
    """
    own, other = draw(tile, tile.num_k, dtype, device), draw(tile, 24, dtype, device)
    allowed = tile.allowed(own.q.device)
    everything = torch.cat([allowed, allowed.new_ones(1, tile.num_q, 24)], dim=2)

    want = dict(zip(("out", "lse"), dense_attention(own.q, own.k, own.v, allowed, scale, softcap=softcap), strict=True))
    of_all = (own.q.clone(), torch.cat([own.k, other.k], 2), torch.cat([own.v, other.v], 2))
    q, k, v = (x.double().requires_grad_() for x in of_all)
    out, lse = dense_attention(q, k, v, everything, scale, softcap=softcap)
    dq, dk, dv = torch.autograd.grad(out, (q, k, v), own.dout.double())
    out, lse = out.detach(), lse.detach()
    group = tile.heads // tile.kv_heads
    other_k, other_v = (x.double().repeat_interleave(group, 1) for x in (other.k, other.v))
    x = scale * q.detach() @ other_k.mT
    tanh = torch.tanh(x / softcap) if softcap else torch.zeros_like(x)
    probs = torch.exp((softcap * tanh if softcap else x) - lse[..., None])
    dscores = own.dout.double() @ other_v.mT - (own.dout.double() * out).sum(-1, keepdim=True)
    want |= {
        "dq": dq - scale * (probs * dscores * (1 - tanh**2)) @ other_k,
        "dk": dk[:, :, : tile.num_k],
        "dv": dv[:, :, : tile.num_k],
    }

    got = dict(zip(("out", "lse"), forward(own.q, own.k, own.v, tile.cover, Scores(scale, softcap)), strict=True))
    # the row slice of a larger lse, as for the second half of a rank's queries
    lse_dtype = torch.float64 if dtype == torch.float64 else torch.float32
    rows = torch.full((2, tile.heads, tile.num_q + 3), math.nan, dtype=lse_dtype, device=device)
    rows[:, :, 3:] = lse
    dk_view, dv_view = packed(tile.num_k, tile, own.q)
    question = BackwardTile(
        own.dout, own.q, own.k, own.v, out.to(dtype).transpose(1, 2).contiguous().transpose(1, 2), rows[:, :, 3:], None,
        tile.cover, Scores(scale, softcap), dk_view, dv_view,
    )  # fmt: skip
    got |= dict(zip(("dq", "dk", "dv"), backward(question), strict=True))
    got["buffers used"] = torch.tensor([got["dk"] is dk_view, got["dv"] is dv_view])
    return got, want


def check(got: dict[str, Tensor], want: dict[str, Tensor], buffers_used: tuple[bool, bool] = (True, True)) -> None:
    assert got["buffers used"].tolist() == list(buffers_used)
    for name, x in want.items():
        assert got[name].shape == x.shape, name
        assert gap(got[name], x) <= 1e-12, name


# --- stand-ins


class Calls(list):
    """Arguments of every call, by name; apart, of those with fake tensors, which only compile."""

    def __init__(self) -> None:
        super().__init__()
        self.compiled: list[tuple[str, dict]] = []

    def append(self, call: tuple[str, dict]) -> None:
        (self.compiled if active_fake_mode() else super()).append(call)

    def of(self, name: str) -> list[dict]:
        return [arguments for called, arguments in self if called == name]


def bottom_right(num_q: int, num_k: int, left: int | None, right: int | None) -> Tensor:
    """bool [num_q, num_k], said as the packages say it."""
    rows, columns = torch.arange(num_q)[:, None] + num_k - num_q, torch.arange(num_k)[None]
    keep = torch.ones(num_q, num_k, dtype=torch.bool)
    if left is not None:
        keep &= columns >= rows - left
    if right is not None:
        keep &= columns <= rows + right
    return keep


def stand_in_forward(
    q: Tensor, k: Tensor, v: Tensor, scale: float, softcap: float | None, keep: Tensor
) -> tuple[Tensor, Tensor]:
    """(out [B, S, H, Dv], lse [B, H, S]) of [B, S, H, D] inputs."""
    assert all(x.stride(-1) == 1 for x in (q, k, v))
    out, lse = dense_attention(*(x.transpose(1, 2) for x in (q, k, v)), keep[None], scale, softcap=softcap or None)
    return out.transpose(1, 2), lse


def stand_in_backward(
    dout, q, k, v, out, lse, scale: float, softcap: float, keep: Tensor, dq: Tensor, dk: Tensor, dv: Tensor
) -> None:
    """Writes dq, dk, dv [B, S, H, D], from the out and lse it is given."""
    assert all(x.stride(-1) == 1 for x in (dout, q, k, v, out, dq, dk, dv))
    assert lse.shape == (q.shape[0], q.shape[2], q.shape[1])
    group = q.shape[2] // k.shape[2]
    keys, values = (x.repeat_interleave(group, 2) for x in (k, v))
    scores = torch.einsum("bihd,bjhd->bhij", q, keys) * scale
    tanh = torch.tanh(scores / softcap) if softcap else torch.zeros_like(scores)
    scores = softcap * tanh if softcap else scores
    probs = torch.exp(scores.masked_fill(~keep, -math.inf) - lse[..., None])
    delta = torch.einsum("bihd,bihd->bhi", dout, out)
    dscores = probs * (torch.einsum("bihd,bjhd->bhij", dout, values) - delta[..., None]) * (1 - tanh**2) * scale
    dq.copy_(torch.einsum("bhij,bjhd->bihd", dscores, keys))
    dk.copy_(torch.einsum("bhij,bihd->bjhd", dscores, q).unflatten(2, (-1, group)).sum(3))
    dv.copy_(torch.einsum("bhij,bihd->bjhd", probs, dout).unflatten(2, (-1, group)).sum(3))


def install(monkeypatch: pytest.MonkeyPatch, name: str, **functions: Any) -> None:
    """Put a module of that name, and the packages around it, where import finds them."""
    flash_attn_4_package.import_once.cache_clear()
    parts = name.split(".")
    for end in range(1, len(parts) + 1):
        module = ModuleType(".".join(parts[:end]))
        module.__spec__, module.__path__ = ModuleSpec(module.__name__, None, is_package=True), []
        monkeypatch.setitem(sys.modules, module.__name__, module)
    for key, function in functions.items():
        setattr(module, key, function)


def sequences(q_begins, k_begins, q_lens, k_lens, longest_q, longest_k, num_q, num_k) -> list:
    """(rows, keys) of each sequence, as slices."""
    n = len(q_lens)
    assert all(x.dtype == torch.int32 for x in (q_begins, k_begins, q_lens, k_lens))
    assert len(q_begins) == len(k_begins) == n + 1 and len(k_lens) == n
    found = []
    for begins, lens, longest, total in (
        (q_begins.tolist(), q_lens.tolist(), longest_q, num_q), (k_begins.tolist(), k_lens.tolist(), longest_k, num_k)
    ):  # fmt: skip
        # what the backward pads by the number of a sequence must not meet the next
        assert all(begin + length <= after for begin, length, after in zip(begins, lens, begins[1:], strict=False))
        assert max(lens) <= longest and begins[-2] + lens[-1] <= begins[-1] <= total and min(lens) > 0
        found.append([slice(begin, begin + length) for begin, length in zip(begins, lens, strict=False)])
    return list(zip(*found, strict=True))


def batched(x: Tensor) -> Tensor:
    """[B, S, H, D], of packed rows too."""
    return x if x.ndim == 4 else x[None]


def run_forward(q, k, v, out, lse, scale, softcap, left, right, told) -> None:
    """Writes out and lse of each sequence; ``told``: the arguments of `sequences` before the last two, or none."""
    whole = [(slice(0, q.shape[-3]), slice(0, k.shape[-3]))]
    for rows, keys in sequences(*told, len(q), len(k)) if told else whole:
        keep = bottom_right(rows.stop - rows.start, keys.stop - keys.start, left, right)
        given = (batched(x)[:, part] for x, part in ((q, rows), (k, keys), (v, keys)))
        found = stand_in_forward(*given, scale, softcap, keep)
        batched(out)[:, rows], (lse if told is None else lse[None])[..., rows] = found


def run_backward(dout, q, k, v, out, lse, scale, softcap, left, right, told, dq, dk, dv) -> None:
    whole = [(slice(0, q.shape[-3]), slice(0, k.shape[-3]))]
    for rows, keys in sequences(*told, len(q), len(k)) if told else whole:
        keep = bottom_right(rows.stop - rows.start, keys.stop - keys.start, left, right)
        places = ((dout, rows), (q, rows), (k, keys), (v, keys), (out, rows))
        given = (batched(x)[:, part] for x, part in places)
        grads = (batched(x)[:, part] for x, part in ((dq, rows), (dk, keys), (dv, keys)))
        stand_in_backward(*given, (lse if told is None else lse[None])[..., rows], scale, softcap, keep, *grads)


def window(causal: bool, left: int | None, right: int | None) -> tuple[int | None, int | None]:
    if left is not None and right is not None and left < 0 and right < 0:
        left = right = None  # so the package says: both negative is no window at all
    return left, 0 if causal else right


def fa4_functions(calls: Calls) -> dict[str, Callable]:
    """What the adapter calls, with no kernels to be launched by others."""

    def forward(q, k, v, qv=None, *, cu_seqlens_q=None, cu_seqlens_k=None, seqused_q=None, seqused_k=None,
                max_seqlen_q=None, max_seqlen_k=None, softmax_scale, causal=False, softcap=None, window_size_left=None,
                window_size_right=None, return_lse=False, out=None, lse=None):  # fmt: skip
        calls.append(("fwd", locals()))
        told = (cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k, max_seqlen_q, max_seqlen_k)
        told = None if cu_seqlens_q is None else told
        bounds = window(causal, window_size_left, window_size_right)
        run_forward(q, k, v, out, lse, softmax_scale, softcap, *bounds, told)
        return out, lse if return_lse else None, None, None, None

    def backward(q, k, v, out, dout, lse, softmax_scale=None, causal=False, softcap=0.0, window_size_left=None,
                 window_size_right=None, cu_seqlens_q=None, cu_seqlens_k=None, seqused_q=None, seqused_k=None,
                 max_seqlen_q=None, max_seqlen_k=None, *, deterministic=False, dq=None, dk=None,
                 dv=None):  # fmt: skip
        calls.append(("bwd", locals()))
        assert q.shape[-2] == k.shape[-2] or q.shape[-1] == v.shape[-1], "GQA backward requires equal head dims"
        told = (cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k, max_seqlen_q, max_seqlen_k)
        told = None if cu_seqlens_q is None else told
        grads = [torch.empty_like(x) if dx is None else dx for x, dx in ((q, dq), (k, dk), (v, dv))]
        bounds = window(causal, window_size_left, window_size_right)
        run_backward(dout, q, k, v, out, lse, softmax_scale, softcap, *bounds, told, *grads)
        return tuple(grads)

    return {"_flash_attn_fwd": forward, "_flash_attn_bwd": backward}


class AuxData(NamedTuple):
    tensors: Any
    scalars: Any


BLOCK_Q, BLOCK_K = 48, 80


class Package:
    """flash_attn.cute.interface whose Python is counted, and launches compiled kernels.

    Sums of dq, dk and dv pass from kernel to kernel in fp32 buffers, [heads, rows * D] in each batch row.
    """

    def __init__(self, calls: Calls, extra: bool = False, swapped: bool = False) -> None:
        self.calls, self.more, self.swapped = calls, (None,) * extra, swapped

    def functions(self) -> dict[str, Any]:
        names = ("_flash_attn_fwd", "_flash_attn_bwd", "_bwd_preprocess", "_bwd_postprocess_convert")
        self.names: dict[str, Any] = {name: self.python(name) for name in names}
        for function in self.names.values():
            function.compile_cache = {}
        sizes = SimpleNamespace(m_block_size=BLOCK_Q, n_block_size=BLOCK_K, dKV_swapAB=False)
        return self.names | {"AuxData": AuxData, "_tile_size_bwd_sm90": lambda *arguments: sizes}

    def python(self, name: str) -> Callable:
        def call(*arguments: Any, **keywords: Any) -> Any:
            self.calls.append((name, keywords))
            return getattr(self, name.strip("_"))(*arguments, **keywords)

        return call

    def launch(self, name: str, kernel: Callable, compiled_in: tuple, *arguments: Any) -> None:
        if active_fake_mode():  # what a compiler does; nothing is launched
            return
        cache = self.names[name].compile_cache
        cache.setdefault((kernel, compiled_in), partial(kernel, *compiled_in))
        cache[kernel, compiled_in](*arguments)

    def flash_attn_fwd(self, q, k, v, softmax_scale, softcap, window_size_left, window_size_right, return_lse, out, lse,
                       cu_seqlens_q=None, cu_seqlens_k=None, seqused_q=None, seqused_k=None, max_seqlen_q=None,
                       max_seqlen_k=None):  # fmt: skip
        causal, *bounds = resolved(window_size_left, window_size_right)
        packed, aux = (cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k), AuxData(None, None)
        kv = (v, k) if self.swapped else (k, v)
        self.launch("_flash_attn_fwd", self.fwd_kernel, (causal, softcap), q, *kv, out, lse, softmax_scale, *packed,
                    None, *bounds, None, None, aux, None, None, *self.more)  # fmt: skip
        return out, lse

    def flash_attn_bwd(self, q, k, v, out, dout, lse, softmax_scale, softcap, window_size_left, window_size_right, dq,
                       dk, dv, deterministic, cu_seqlens_q=None, cu_seqlens_k=None, seqused_q=None, seqused_k=None,
                       max_seqlen_q=None, max_seqlen_k=None):  # fmt: skip
        causal, *bounds = resolved(window_size_left, window_size_right)
        before, heads, aux = q.shape[:-3], q.shape[-2], AuxData(None, None)
        of_q, of_k = (cu_seqlens_q, seqused_q), (cu_seqlens_k, seqused_k)
        rows, keys = (
            (x.shape[-3] + (1 if begins is None else len(begins)) * block - 1) // block * block
            for x, begins, block in ((q, cu_seqlens_q, BLOCK_Q), (k, cu_seqlens_k, BLOCK_K))
        )
        wide, v_wide = (-(-x.shape[-1] // 32) * 32 for x in (q, v))
        delta, lse_log2, dq_sum = (torch.full((*before, heads, rows * n), torch.nan) for n in (1, 1, wide))
        grouped = heads != k.shape[-2]
        dk_sum, dv_sum = (torch.zeros(*before, k.shape[-2], keys * n) for n in (wide, v_wide)) if grouped else (dk, dv)
        self.launch("_bwd_preprocess", self.pre_kernel, (), out, dout, delta, lse, lse_log2, dq_sum, *of_q, None, None,
                    None, 1.0, None, None)  # fmt: skip
        self.launch("_flash_attn_bwd", self.bwd_kernel, (causal, softcap or None, 0 in dout.stride()), q, k, v, dout,
                    lse_log2, delta, dq_sum, dk_sum, dv_sum, softmax_scale, cu_seqlens_q, cu_seqlens_k, seqused_q,
                    seqused_k, *bounds, None, None, None, aux, None, None)  # fmt: skip
        sums = [(dq_sum, dq, softmax_scale, of_q)]
        sums += [(dk_sum, dk, softmax_scale, of_k), (dv_sum, dv, 1.0, of_k)] if grouped else []
        for total, into, scale, told in sums:
            self.launch("_bwd_postprocess_convert", self.post_kernel, (), total, into, scale, *told, None, None)
        return dq, dk, dv

    def fwd_kernel(self, causal, softcap, q, k, v, out, lse, scale, *others: Any) -> None:
        k, v = (v, k) if self.swapped else (k, v)
        run_forward(q, k, v, out, lse, scale, softcap, *window(causal, *others[5:7]), told_by(*others[:4]))

    def pre_kernel(self, out, dout, delta, lse, lse_log2, dq_sum, *others: Any) -> None:
        self.out, self.lse = out, lse  # the stand-in's backward takes them instead of what is prepared of them
        dq_sum.zero_()
        delta.zero_()

    def bwd_kernel(self, causal, softcap, spread, q, k, v, dout, lse_log2, delta, dq_sum, dk_sum, dv_sum, scale,
                   q_begins, k_begins, q_lens, k_lens, left, right, *others: Any) -> None:  # fmt: skip
        assert spread == (0 in dout.stride()), "compiled for other strides"
        assert not delta.any()
        grads = [torch.zeros_like(x, memory_format=torch.contiguous_format) for x in (q, k, v)]
        told = told_by(q_begins, k_begins, q_lens, k_lens)
        run_backward(dout, q, k, v, self.out, self.lse, scale, softcap, *window(causal, left, right), told, *grads)
        for into, x, factor in zip((dq_sum, dk_sum, dv_sum), grads, (scale, scale, 1.0), strict=True):
            if into.shape == x.shape:  # no sum: written as it is, where there are keys
                for _, keys in sequences(*told, len(q), len(k)) if told else [(None, slice(None))]:
                    batched(into)[:, keys] = batched(x)[:, keys]
            else:
                as_rows(into, x)[:, : x.shape[-3]] += batched(x) / factor

    def post_kernel(self, total, into, scale, begins, lens, *others: Any) -> None:
        parts = [slice(0, into.shape[-3])]
        if begins is not None:
            parts = [slice(b, b + n) for b, n in zip(begins.tolist(), lens.tolist(), strict=False)]
        for part in parts:
            batched(into)[:, part] = as_rows(total, into)[:, part] * scale


def resolved(left: int | None, right: int | None) -> tuple[bool, int | None, int | None]:
    return (True, None, None) if left is None and right == 0 else (False, left, right)


def told_by(*packed: Any) -> Any:
    """Arguments of `sequences` that say nothing of the longest."""
    return None if packed[0] is None else (*packed, math.inf, math.inf)


def as_rows(total: Tensor, like: Tensor) -> Tensor:
    """A buffer of sums as [B, rows, heads, D]."""
    total = total if total.ndim == 3 else total[None]
    wide = -(-like.shape[-1] // 32) * 32
    return total.unflatten(-1, (-1, wide)).transpose(1, 2)[..., : like.shape[-1]]


@pytest.fixture
def calls() -> Calls:
    return Calls()


@pytest.fixture
def fa4(monkeypatch: pytest.MonkeyPatch, calls: Calls) -> None:
    install(monkeypatch, "flash_attn.cute.interface", **fa4_functions(calls))


@pytest.fixture(autouse=True)
def _forget_what_is_installed() -> Iterator[None]:
    yield
    flash_attn_4_package.import_once.cache_clear()


@contextmanager
def fa4_on_cpu(calls: Calls) -> Iterator[None]:
    """FA4 as a kernel of the CPU in float64, by the stand-in."""
    options: dict[str, Any] = {"devices": ("cpu",), "dtypes": (torch.float64,), "compute_capability": (0, 0)}
    here = replace(flash_attn_4.FA4, capability=replace(flash_attn_4.FA4.capability, only_on=(), **options))
    with pytest.MonkeyPatch.context() as patch, mock.patch.dict(KERNELS, fa4=here):
        install(patch, "flash_attn.cute.interface", **fa4_functions(calls))
        forget_plans()
        yield
        forget_plans()
    flash_attn_4_package.import_once.cache_clear()


# --- what the package is told

BANDS = {
    "full": Distances(),
    "causal": Distances(0, None),
    "strict": Distances(1, None),
    "causal with older keys": Distances(-5, None),
    "rows without keys": Distances(9, None),
    "window": Distances(0, 3),
    "window around": Distances(-2, 4),
    "window before": Distances(2, 6),
    "window after": Distances(-7, -3),
    "upper triangle": Distances(None, 0),
    "last rows without keys": Distances(None, -9),
}


@pytest.mark.parametrize("heads", [(2, 2), (4, 2), (3, 1)], ids=str)
@pytest.mark.parametrize("softcap", [None, 0.7])
def test_fa4_takes_every_band(fa4, calls, heads, softcap) -> None:
    for at, (num_q, num_k) in product(BANDS.values(), ((16, 16), (16, 11), (11, 16), (1, 16), (16, 1))):
        tile = Tile(at.band(num_q, num_k), num_q, num_k, *heads, 16, 16)
        if tile.allowed(torch.device("cpu")).any():
            check(*ask(*PAIR, tile, torch.float64, softcap=softcap))
    assert {arguments["softcap"] or None for _, arguments in calls} == {softcap}
    assert len(calls.of("fwd")) == len(calls.of("bwd")) >= len(BANDS)
    with pytest.raises(AssertionError, match="no empty tiles"):  # two negative bounds are no window to the package
        ask(*PAIR, Tile(Distances(3, 1).band(8, 8), 8, 8, 1, 1, 8, 8), torch.float64)


def test_fa4_is_told_the_fewest_bounds(fa4, calls) -> None:
    """A bound that is not there must be None: it is part of what the package compiles for."""
    cases = {(None, None): (None, None), (0, None): (None, -5), (-5, None): (None, 0), (1, 3): (8, -6)}
    for at, window in cases.items():
        tile = Tile(Distances(*at).band(11, 16), 11, 16, 2, 2, 8, 8)
        check(*ask(*PAIR, tile, torch.float64))
        for name, arguments in calls[-2:]:
            assert (arguments["window_size_left"], arguments["window_size_right"]) == window, (at, name)
            assert arguments["causal"] is False


@pytest.mark.parametrize(
    ("heads", "dims", "widths"),
    [
        ((2, 2), (192, 128), [(192, 128), (192, 128)]),
        ((4, 2), (192, 128), [(192, 128), (192, 192)]),
        ((4, 2), (24, 16), [(24, 24), (24, 24)]),
        ((4, 2), (16, 24), [(24, 24), (24, 24)]),
    ],
    ids=str,
)
def test_fa4_head_dims_that_differ(fa4, calls, heads, dims, widths) -> None:
    """Pairs of head dims for which the package has no kernel are widened with zeros."""
    tile = Tile(Distances(-2, 6).band(9, 12), 9, 12, *heads, *dims)
    used = (dims[0] == widths[1][0], dims[1] == widths[1][1])  # a buffer that is as wide as what is written
    check(*ask(*PAIR, tile, torch.float64), used)
    assert [(a["q"].shape[3], a["v"].shape[3]) for _, a in calls] == widths


def test_inputs_are_passed_as_views(fa4, calls) -> None:
    """No kernel needs a copy of q, k, v, out or dout, however they lie in memory."""
    tile, seen = Tile(CAUSAL, 12, 12, 4, 2, 16, 16), {}

    def spy(question: BackwardTile) -> tuple[Tensor, Tensor, Tensor]:
        seen.update(question._asdict())
        return PAIR[1](question)

    ask(PAIR[0], spy, tile, torch.float64, softcap=0.7)
    for called, arguments in calls:
        for tensor in ("q", "k", "v") if called == "fwd" else ("q", "k", "v", "out", "dout", "dk", "dv"):
            assert arguments[tensor].data_ptr() == seen[tensor].data_ptr(), tensor
            assert arguments[tensor].stride() == seen[tensor].transpose(1, 2).stride(), tensor
        assert arguments["softcap"] == 0.7


def test_buffers_that_cannot_be_written(fa4) -> None:
    """None given, rows off the 16-byte grid, a start off it: the kernel's own tensors come back, and are right."""
    tile = Tile(CAUSAL, 6, 6, 2, 1, 16, 16)
    changes: list[Callable[[Tensor], Any]] = [
        lambda view: None,
        lambda view: view.new_empty(view.numel() + 1)[1:].view(view.shape),
        lambda view: view.new_empty(*view.shape[:-1], 17)[..., :16],
    ]
    for change in changes:

        def with_buffers(t: BackwardTile, change=change) -> tuple[Tensor, Tensor, Tensor]:
            return PAIR[1](t._replace(dk=change(t.dk), dv=change(t.dv)))

        check(*ask(PAIR[0], with_buffers, tile, torch.float64), buffers_used=(False, False))


# --- when it is chosen

REQUEST = Request("cuda", (9, 0), torch.bfloat16, frozenset({"full", "causal"}), 128, 128, False, False)


def test_what_it_lacks(fa4) -> None:
    """A deterministic backward only of the tiles for which it was tried."""

    def lacks(**changes: Any) -> list[str]:
        return shortfalls(flash_attn_4.FA4.capability, replace(REQUEST, **changes))

    assert lacks() == lacks(deterministic=True) == lacks(covers=frozenset({"window"})) == lacks(v_head_dim=64) == []
    for cover in ("window", "segments"):
        of_tiles = f"a deterministic backward of '{cover}' tiles"
        assert lacks(covers=frozenset({"full", cover}), deterministic=True) == [of_tiles]
    assert lacks(compute_capability=(8, 0)) and lacks(compute_capability=(10, 0))


def test_an_absent_package_is_named(monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "flash_attn", None)
    flash_attn_4_package.import_once.cache_clear()
    (lacking,) = shortfalls(flash_attn_4.FA4.capability, REQUEST)
    assert lacking.startswith("package flash_attn.cute.interface (pip install cp_mesh[flash]; ")


@pytest.mark.parametrize("deterministic", [False, True])
@on_ranks(2)
def test_a_deterministic_call_has_the_reproducible_backward(rank: int, deterministic: bool) -> None:
    """Of full and of causal tiles, which are those that it was tried for: any other band is a window there."""
    calls, axis = Calls(), mesh((2,), ("cp",))
    with fa4_on_cpu(calls):
        for mask in (Mask(), Mask(length=13), Mask(causal=False, window=(None, 4))):
            q, k, v = (torch.randn(1, 2, 8, 8, dtype=torch.float64, requires_grad=True) for _ in range(3))
            attention(q, k, v, mesh=axis, mask=mask, kernel="fa4", deterministic=deterministic).sum().backward()
    asked = calls.of("bwd")
    windows = {(given["window_size_left"], given["window_size_right"]) for given in asked}
    assert asked and {given["deterministic"] for given in asked} == {deterministic}
    if deterministic or rank == 1:
        assert (windows <= {(None, None), (None, 0)}) == deterministic, windows


CHOOSE = """
import torch, cp_mesh
from inside import Request, inner
choose_kernel = inner("table", "choose_kernel")
def chosen(device, capability):
    covers = frozenset({"full", "causal"})
    return choose_kernel("auto", Request(device, capability, torch.bfloat16, covers, 64, 64, False, False)).name
"""


def run_with(folder: Path, text: str, program: str) -> None:
    """A program of a package whose module holds nothing but this text."""
    for package in ("flash_attn", "flash_attn/cute"):
        (folder / package).mkdir()
        (folder / package / "__init__.py").write_text("")
    (folder / "flash_attn/cute/interface.py").write_text(text)
    program = f"import sys; sys.path[:0] = [{str(folder)!r}, {str(Path(__file__).parent)!r}]\n{CHOOSE}\n{program}"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


@pytest.mark.full
def test_nothing_is_imported_for_calls_that_it_cannot_serve(tmp_path) -> None:
    asked = "assert chosen('cpu', (0, 0)) == 'cpu_flash' and chosen('cuda', (7, 5)) == 'reference'"
    run_with(tmp_path, "raise SystemExit('imported')", asked)


BROKEN = ["import cutlass_that_is_not_there", "raise RuntimeError('another ABI')", "def _flash_attn_fwd(q, k, v): pass"]


@pytest.mark.parametrize("text", BROKEN)
@pytest.mark.full
def test_packages_that_do_not_work_are_passed_over(tmp_path, text) -> None:
    """As flash-attn 2.8.3 brings a flash_attn.cute that lacks its needs, and other parameters."""
    run_with(tmp_path, text, "assert chosen('cuda', (9, 0)) == 'cudnn', chosen('cuda', (9, 0))")


# --- calls that skip its Python


@contextmanager
def installed(calls: Calls, **options: bool) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        install(patch, "flash_attn.cute.cache_utils", CUTE_DSL_CACHE_ENABLED=True)
        kept = sys.modules["flash_attn.cute.cache_utils"]
        install(patch, "flash_attn.cute.interface", **Package(calls, **options).functions())
        patch.setitem(sys.modules, "flash_attn.cute.cache_utils", kept)
        flash_attn_4_package._compiled.clear()
        yield
    flash_attn_4_package._compiled.clear()
    flash_attn_4_package.import_once.cache_clear()


@pytest.fixture
def package(calls: Calls) -> Iterator[None]:
    with installed(calls):
        yield


def blocks_of(*lens: int) -> Segments:
    """Documents one after the other, with two rows between, each of which sees its own keys."""
    begins = [sum(lens[:i]) + 2 * i for i in range(len(lens))]
    return Segments((torch.tensor([[b, b + n, b, b + n] for b, n in zip(begins, lens, strict=True)]),), None, 0)


def attend(cover: Any, num_q: int, num_k: int, heads: int, kv_heads: int, deterministic: bool = False,
           softcap: float | None = None, spread: bool = False) -> None:  # fmt: skip
    """One tile in both passes, compared with the dense formula."""
    shapes = (num_q, heads), (num_k, kv_heads), (num_k, kv_heads), (num_q, heads)
    q, k, v, dout = (torch.randn(1, n, num, 8).transpose(1, 2) for n, num in shapes)
    if spread:  # over heads, as the gradient of their sum is
        dout = dout[:, :1].expand_as(dout)
    if isinstance(cover, Segments):
        allowed = cover.allowed(torch.arange(num_q), torch.arange(num_k))
    else:
        allowed = Distances.of(cover, num_q, num_k).pairs(num_q, num_k)[None]
    leaves = [x.double().requires_grad_() for x in (q, k, v)]
    out, lse = dense_attention(*leaves, allowed, SCALE, softcap=softcap)
    want = torch.autograd.grad(out, leaves, dout.double())
    got_out, got_lse = flash_attn_4._forward(q, k, v, cover, Scores(SCALE, softcap))
    tile = BackwardTile(dout, q, k, v, got_out, got_lse, None, cover, Scores(SCALE, softcap))
    for mine, right in zip((got_out, *flash_attn_4._backward(tile, deterministic)), (out, *want), strict=True):
        assert gap(mine, right) <= 1e-5
    seen = ~torch.isneginf(lse)
    assert torch.equal(torch.isneginf(got_lse), ~seen) and gap(got_lse[seen], lse[seen]) <= 1e-5


TILES = {
    "full": (FULL, 300, 290), "causal": (CAUSAL, 320, 320), "window": (Distances(0, 30).band(300, 300), 300, 300),
    "documents": (blocks_of(5, 90, 30), 129, 129),
}  # fmt: skip
OTHERS = {
    "full": (FULL, 270, 400), "causal": (CAUSAL, 280, 280), "window": (Distances(0, 50).band(310, 310), 310, 310),
    "documents": (blocks_of(*[3] * 7, 50), 85, 85),
}  # fmt: skip
FORWARD, BACKWARD = "_flash_attn_fwd", "_flash_attn_bwd"


@pytest.mark.parametrize("heads", [(2, 2), (4, 2)], ids=str)
@pytest.mark.parametrize("name", TILES)
def test_later_calls_skip_its_python(package: None, calls: Calls, name: str, heads: tuple[int, int]) -> None:
    """With other lengths, bounds and numbers of sequences too; numbers are right before and after."""
    attend(*TILES[name], *heads)
    assert [called for called, _ in calls.compiled] == [called for called, _ in calls]  # without a launch, first
    assert [called for called, _ in calls] == [FORWARD, BACKWARD]
    for tile in (OTHERS[name], TILES[name]):
        attend(*tile, *heads)
    assert len(calls) == 2


def test_kinds_have_kernels_of_their_own() -> None:
    """Numbers are right whatever else was launched before."""
    calls = Calls()
    with installed(calls):
        for tile in (*TILES.values(), *OTHERS.values()):
            for heads in ((2, 2), (4, 2)):
                attend(*tile, *heads)
                attend(*tile, *heads, softcap=1.5)
    assert len(calls) == 2 * len(TILES) * 2 * 2


@pytest.mark.parametrize("how", ["extra", "swapped"])
def test_a_release_that_differs_keeps_its_python(how: str) -> None:
    """One with another argument, and one that takes keys for values, alike in everything but where they are."""
    calls = Calls()
    flash_attn_4_package._warn_of_release.cache_clear()
    with installed(calls, **{how: True}), pytest.warns(UserWarning, match="own Python") as warned:
        for _ in range(2):
            attend(*TILES["causal"], 2, 2)
    assert len(warned) == 1
    assert [called for called, _ in calls] == [FORWARD, BACKWARD, FORWARD]


def test_calls_that_keep_its_python(package: None, calls: Calls, monkeypatch: pytest.MonkeyPatch) -> None:
    """Gradients spread over heads have strides of zero, which are compiled for; short tiles have kernels of their own;
    deterministic ones take buffers that are not ours to know, and other block sizes other buffers."""
    for spread in (True, False, True, False):
        attend(*TILES["causal"], 2, 2, spread=spread)
    assert sorted(called for called, _ in calls) == [BACKWARD] * 3 + [FORWARD]  # never kept where spread
    del calls[:]
    for _ in range(2):
        attend(CAUSAL, 40, 40, 2, 2)
    assert len(calls) == 4
    for _ in range(2):
        attend(*TILES["causal"], 2, 2, deterministic=True)
    assert [called for called, _ in calls[4:]] == [BACKWARD, BACKWARD]
    del calls[:]
    other = SimpleNamespace(m_block_size=2 * BLOCK_Q, n_block_size=BLOCK_K, dKV_swapAB=False)
    monkeypatch.setattr(sys.modules["flash_attn.cute.interface"], "_tile_size_bwd_sm90", lambda *arguments: other)
    flash_attn_4_package._compiled.clear()
    for _ in range(2):
        attend(*TILES["causal"], 2, 2)
    assert [called for called, _ in calls] == [FORWARD, BACKWARD, BACKWARD]


def test_a_kind_that_is_new_in_a_capture_is_refused(package: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with pytest.raises(UnsupportedError, match="warm_up"):
        flash_attn_4_package._refuse_in_capture(mock.Mock(is_cuda=True))
    flash_attn_4_package._refuse_in_capture(torch.zeros(1))


def test_sequences_of_any_number_are_one_variant(package: None, calls: Calls) -> None:
    """The longest is said to be as long as several blocks, and more than 256 sequences take several calls."""
    most = flash_attn_4_package.MOST_SEQUENCES
    cover = blocks_of(*[1] * (2 * most + 3))
    length = 3 * len(cover.blocks[0]) - 2
    attend(cover, length, length, 2, 2)
    assert [called for called, _ in calls] == [FORWARD, BACKWARD]
    for _, told in calls:
        assert len(told["seqused_q"]) == most and told["max_seqlen_q"] == told["max_seqlen_k"] == 1024


@mock.patch.dict(os.environ)  # restores it
def test_results_are_cached_on_disk_by_default(monkeypatch: pytest.MonkeyPatch, package: None, tmp_path: Path) -> None:
    """Unless the environment says something else, in a folder of this user alone; the package reads both at import."""
    name, named = (f"FLASH_ATTENTION_CUTE_DSL_CACHE_{x}" for x in ("ENABLED", "DIR"))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    folder = tmp_path / f"cp_mesh_{os.geteuid()}"
    for given, after, where in (
        ({}, "1", f"{folder}/flash_attention_4"), ({name: "0"}, "0", None), ({named: "/mine"}, "1", "/mine"),
    ):  # fmt: skip
        for x in (name, named):
            monkeypatch.delenv(x, raising=False)
        os.environ |= given
        flash_attn_4_package._package()
        assert (os.environ[name], os.environ.get(named)) == (after, where)
    folder.chmod(0o777)
    for x in (name, named):
        monkeypatch.delenv(x)
    with pytest.warns(UserWarning, match="every process compiles FlashAttention-4: expected .* this user only"):
        flash_attn_4_package._package()
    assert (os.environ[name], os.environ.get(named)) == ("0", None)


# --- on a GPU

GPU_BANDS = {
    **{name: BANDS[name] for name in ("full", "causal", "strict")},
    "strict with older keys": Distances(-40, None),
    "blocks of rows without keys": Distances(170, None),
    "window": Distances(0, 70),
    "window before": Distances(5, 40),
    "window after": Distances(-90, -3),
    "wide window": Distances(-100, 200),
    "upper triangle": Distances(None, 0),
    "last blocks of rows without keys": Distances(None, -170),
}
GPU_SHAPES = ((300, 300), (300, 190), (190, 301), (1, 129))


def gpu_pair() -> tuple[Callable, Callable]:
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    here = replace(REQUEST, compute_capability=torch.cuda.get_device_capability())
    if missing := shortfalls(flash_attn_4.FA4.capability, here):
        pytest.skip(f"fa4 lacks {', '.join(missing)}")
    return PAIR


def close(got: dict[str, Tensor], want: dict[str, Tensor], what: object) -> None:
    """RMS errors of each head's blocks of 64 rows, against 2⁻⁸ of rounding in each of P, out, dS and the result."""
    assert got["buffers used"].all()
    assert torch.equal(got["lse"] == -math.inf, want["lse"] == -math.inf), what
    for name, exact in want.items():
        x = got[name].double()
        if name == "lse":
            seen = exact > -math.inf
            assert ((x - exact)[seen].abs() <= 1e-4 * (1 + exact[seen].abs())).all(), (what, name)
            continue
        assert x.isfinite().all(), (what, name)
        if name == "out":
            assert (x[want["lse"] == -math.inf] == 0).all(), what
        for part, part_exact in zip(x.split(64, 2), exact.split(64, 2), strict=True):
            error, signal = ((y.square().mean(dim=(2, 3)).sqrt()) for y in (part - part_exact, part_exact))
            assert (error <= 2**-6 * signal + 2**-8 * exact.square().mean().sqrt()).all(), (what, name)


@pytest.mark.gpu
@pytest.mark.parametrize("at", GPU_BANDS.values(), ids=GPU_BANDS)
@pytest.mark.parametrize("heads", [(4, 4), (8, 2)], ids=str)
def test_fa4_on_gpu_takes_every_band(at, heads) -> None:
    pair = gpu_pair()
    for num_q, num_k in GPU_SHAPES:
        tile = Tile(at.band(num_q, num_k), num_q, num_k, *heads, 128, 128)
        if tile.allowed(torch.device("cpu")).any():
            close(*ask(*pair, tile, torch.bfloat16, "cuda", tile.dim**-0.5), tile)


@pytest.mark.gpu
@pytest.mark.parametrize("heads", [(4, 4), (8, 2)], ids=str)
def test_fa4_on_gpu_is_launched_directly(heads) -> None:
    """All kinds of a causal model, after their first call; a gradient that was spread over heads leaves no trace."""
    gpu_pair()
    blocks = torch.tensor([[b, e, b, e] for b, e in ((0, 100), (100, 500), (510, 1024))])
    q, k, v, dout = (
        torch.randn(1, 1024, n, 64, device="cuda", dtype=torch.bfloat16).transpose(1, 2)
        for n in (heads[0], heads[1], heads[1], heads[0])
    )
    scores = Scores(64**-0.5)
    for cover in (FULL, CAUSAL, Segments((blocks,), None, None), Segments((blocks,), None, 0)):
        flash_attn_4_package._compiled.clear()
        out, lse = flash_attn_4._forward(q, k, v, cover, scores)
        found = []
        for given in (dout[:, :1].expand_as(dout), dout, dout):
            found.append(flash_attn_4._backward(BackwardTile(given, q, k, v, out, lse, None, cover, scores)))
        again = flash_attn_4._forward(q, k, v, cover, scores)
        assert torch.equal(out, again[0]) and torch.equal(lse, again[1])
        assert all(gap(x, y.double()) <= 2**-7 for x, y in zip(found[1], found[2], strict=True))
        kept = {kind[0]: len(kernels) for kind, kernels in flash_attn_4_package._compiled.items() if kernels}
        assert kept == {"_flash_attn_fwd": 1, "_flash_attn_bwd": 3 if heads[0] == heads[1] else 5}


@pytest.mark.gpu
@pytest.mark.parametrize("dims", [(64, 64), (256, 256), (192, 128), (64, 128)], ids=str)
@pytest.mark.parametrize("heads", [(2, 2), (4, 2)], ids=str)
def test_fa4_on_gpu_takes_head_dims(dims, heads) -> None:
    forward, backward = gpu_pair()
    for band in (CAUSAL, Distances(-40, 100).band(200, 200)):
        tile = Tile(band, 200, 200, *heads, *dims)
        got, want = ask(forward, backward, tile, torch.float16, "cuda", tile.dim**-0.5)
        got["buffers used"] = torch.ones(2)  # not where head dims are widened
        close(got, want, tile)


@pytest.mark.gpu
def test_softcap_on_gpu() -> None:
    pair = gpu_pair()
    for cover, num_k in ((FULL, 190), (CAUSAL, 300)):
        tile = Tile(cover, 300, num_k, 8, 2, 128, 128)
        close(*ask(*pair, tile, torch.bfloat16, "cuda", 4 * tile.dim**-0.5, softcap=3.0), tile)


@pytest.mark.gpu
def test_a_call_can_be_captured() -> None:
    """No call waits for the device or copies to it from the host, once its variant is compiled."""
    forward, backward = gpu_pair()
    tile = Tile(CAUSAL, 256, 256, 4, 2, 128, 128)
    question: dict[str, BackwardTile] = {}

    def remember(t: BackwardTile) -> tuple[Tensor, Tensor, Tensor]:
        question["tile"] = t
        return backward(t)

    got, want = ask(forward, remember, tile, torch.bfloat16, "cuda", tile.dim**-0.5)
    t = question["tile"]
    t.dk.zero_(), t.dv.zero_()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, lse = forward(t.q, t.k, t.v, t.cover, t.scores)
        dq, dk, dv = backward(t)
    graph.replay()
    torch.cuda.synchronize()
    captured = {"out": out, "lse": lse, "dq": dq, "dk": dk, "dv": dv, "buffers used": got["buffers used"]}
    close(captured, want, "fa4")
