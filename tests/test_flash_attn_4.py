"""Calls of FlashAttention-4 that skip its Python, on a stand-in that launches what release 4.0.0b36 launches.

`test_flash_attn.py` has what its Python is told, and the package itself on GPUs.
"""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch
from checks import gap
from dense import dense_attention
from inside import CAUSAL, FULL, BackwardTile, Distances, Scores, Segments, inner, room
from test_flash_attn import Calls, bottom_right, install, stand_in_backward, stand_in_forward
from torch import Tensor
from torch._guards import active_fake_mode

from cp_mesh import UnsupportedError

flash_attn_4 = room("flash_attn_4")
flash_attn_4_package = room("flash_attn_4_package")
FA4, MOST_SEQUENCES = inner("flash_attn_4", "FA4"), inner("flash_attn_4_package", "MOST_SEQUENCES")

BLOCK_Q, BLOCK_K = 48, 80


class AuxData(NamedTuple):
    tensors: Any
    scalars: Any


class Package:
    """A stand-in for flash_attn.cute.interface: Python that is counted, and compiled kernels it launches.

    Sums of dq, dk and dv pass from kernel to kernel in fp32 buffers, [heads, rows * D] in each batch row.
    """

    def __init__(self, calls: Calls, extra: bool = False, swapped: bool = False) -> None:
        self.calls, self.more, self.swapped = calls, (None,) * extra, swapped

    def functions(self) -> dict[str, Any]:
        names = ("_flash_attn_fwd", "_flash_attn_bwd", "_bwd_preprocess", "_bwd_postprocess_convert")
        functions: dict[str, Any] = {name: self.python(name) for name in names}
        for function in functions.values():
            function.compile_cache = {}
        sizes = SimpleNamespace(m_block_size=BLOCK_Q, n_block_size=BLOCK_K, dKV_swapAB=False)
        self.names = functions
        return functions | {"AuxData": AuxData, "_tile_size_bwd_sm90": lambda *arguments: sizes}

    def python(self, name: str) -> Callable:
        def call(*arguments: Any, **keywords: Any) -> Any:
            self.calls.append((name, keywords))
            return getattr(self, name.strip("_"))(*arguments, **keywords)

        return call

    def launch(self, name: str, kernel: Callable, compiled_in: tuple, *arguments: Any) -> None:
        if active_fake_mode():  # what a compiler does; nothing is launched
            return
        function = self.names[name]
        if (kernel, compiled_in) not in function.compile_cache:
            function.compile_cache[kernel, compiled_in] = partial(kernel, *compiled_in)
        function.compile_cache[kernel, compiled_in](*arguments)

    def flash_attn_fwd(self, q, k, v, softmax_scale, softcap, window_size_left, window_size_right, return_lse, out, lse,
                       cu_seqlens_q=None, cu_seqlens_k=None, seqused_q=None, seqused_k=None, max_seqlen_q=None,
                       max_seqlen_k=None):  # fmt: skip
        causal, *bounds = _resolved(window_size_left, window_size_right)
        packed = cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k
        self.launch(
            "_flash_attn_fwd",
            self.fwd_kernel,
            (causal, softcap),
            q,
            *((v, k) if self.swapped else (k, v)),
            out,
            lse,
            softmax_scale,
            *packed,
            None,
            *bounds,
            None,
            None,
            AuxData(None, None),
            None,
            None,
            *self.more,
        )
        return out, lse

    def flash_attn_bwd(self, q, k, v, out, dout, lse, softmax_scale, softcap, window_size_left, window_size_right, dq,
                       dk, dv, deterministic, cu_seqlens_q=None, cu_seqlens_k=None, seqused_q=None, seqused_k=None,
                       max_seqlen_q=None, max_seqlen_k=None):  # fmt: skip
        causal, *bounds = _resolved(window_size_left, window_size_right)
        before, heads = q.shape[:-3], q.shape[-2]

        def rows(x: Tensor, begins: Tensor | None, block: int) -> int:
            if begins is None:
                return (x.shape[-3] + block - 1) // block * block
            return (x.shape[-3] + len(begins) * block - 1) // block * block

        num_q, num_k = rows(q, cu_seqlens_q, BLOCK_Q), rows(k, cu_seqlens_k, BLOCK_K)
        wide, v_wide = (-(-x.shape[-1] // 32) * 32 for x in (q, v))
        delta, lse_log2, dq_sum = (torch.full((*before, heads, num_q * n), torch.nan) for n in (1, 1, wide))
        of_q, of_k = (cu_seqlens_q, seqused_q), (cu_seqlens_k, seqused_k)
        grouped = heads != k.shape[-2]
        dk_sum, dv_sum = (torch.zeros(*before, k.shape[-2], num_k * n) for n in (wide, v_wide)) if grouped else (dk, dv)
        self.launch(
            "_bwd_preprocess",
            self.pre_kernel,
            (),
            out,
            dout,
            delta,
            lse,
            lse_log2,
            dq_sum,
            *of_q,
            None,
            None,
            None,
            1.0,
            None,
            None,
        )
        self.launch(
            "_flash_attn_bwd",
            self.bwd_kernel,
            (causal, softcap or None, 0 in dout.stride()),
            q,
            k,
            v,
            dout,
            lse_log2,
            delta,
            dq_sum,
            dk_sum,
            dv_sum,
            softmax_scale,
            cu_seqlens_q,
            cu_seqlens_k,
            seqused_q,
            seqused_k,
            *bounds,
            None,
            None,
            None,
            AuxData(None, None),
            None,
            None,
        )
        self.launch("_bwd_postprocess_convert", self.post_kernel, (), dq_sum, dq, softmax_scale, *of_q, None, None)
        if grouped:
            self.launch("_bwd_postprocess_convert", self.post_kernel, (), dk_sum, dk, softmax_scale, *of_k, None, None)
            self.launch("_bwd_postprocess_convert", self.post_kernel, (), dv_sum, dv, 1.0, *of_k, None, None)
        return dq, dk, dv

    def fwd_kernel(self, causal, softcap, q, k, v, out, lse, scale, *others: Any) -> None:
        k, v = (v, k) if self.swapped else (k, v)
        for rows, keys in _parts(q, k, *others[:4]):
            keep = bottom_right(rows.stop - rows.start, keys.stop - keys.start, *_bounds(causal, *others[5:7]))
            x = (_batched(x)[:, part] for x, part in ((q, rows), (k, keys), (v, keys)))
            for into, part in zip((_batched(out)[:, rows], _rows_of(lse, rows)),
                                  stand_in_forward(*x, scale, softcap, keep), strict=True):  # fmt: skip
                into.copy_(part)

    def pre_kernel(self, out, dout, delta, lse, lse_log2, dq_sum, *others: Any) -> None:
        self.out, self.lse = out, lse  # the stand-in's backward takes them instead of what is prepared of them
        dq_sum.zero_()
        delta.zero_()

    def bwd_kernel(self, causal, softcap, spread, q, k, v, dout, lse_log2, delta, dq_sum, dk_sum, dv_sum, scale,
                   q_begins, k_begins, q_lens, k_lens, left, right, *others: Any) -> None:  # fmt: skip
        assert spread == (0 in dout.stride()), "compiled for other strides"
        assert not delta.any()
        for rows, keys in _parts(q, k, q_begins, k_begins, q_lens, k_lens):
            keep = bottom_right(rows.stop - rows.start, keys.stop - keys.start, *_bounds(causal, left, right))
            given = [_batched(x)[:, part] for x, part in ((dout, rows), (q, rows), (k, keys), (v, keys))]
            grads = [torch.empty_like(x, memory_format=torch.contiguous_format) for x in given[1:]]
            lse = _rows_of(self.lse, rows)
            stand_in_backward(*given, _batched(self.out)[:, rows], lse, scale, softcap, keep, *grads)
            for into, x, part, of, factor in zip((dq_sum, dk_sum, dv_sum), grads, (rows, keys, keys), (q, k, v),
                                                 (scale, scale, 1.0), strict=True):  # fmt: skip
                if into.ndim == of.ndim and into.shape == of.shape:  # no sum: written as it is
                    _batched(into)[:, part] = x
                else:
                    _as_rows(into, of)[:, part] += x / factor

    def post_kernel(self, total, into, scale, begins, lens, *others: Any) -> None:
        parts = [slice(0, into.shape[-3])]
        if begins is not None:
            parts = [slice(b, b + n) for b, n in zip(begins.tolist(), lens.tolist(), strict=False)]
        for part in parts:
            _batched(into)[:, part] = _as_rows(total, into)[:, part] * scale


def _resolved(left: int | None, right: int | None) -> tuple[bool, int | None, int | None]:
    return (True, None, None) if left is None and right == 0 else (False, left, right)


def _bounds(causal: bool, left: int | None, right: int | None) -> tuple[int | None, int | None]:
    return left, 0 if causal else right


def _batched(x: Tensor) -> Tensor:
    return x if x.ndim == 4 else x[None]


def _rows_of(lse: Tensor, rows: slice) -> Tensor:
    return (lse if lse.ndim == 3 else lse[None])[..., rows]


def _as_rows(total: Tensor, like: Tensor) -> Tensor:
    """A buffer of sums as [B, rows, heads, D]."""
    total = total if total.ndim == 3 else total[None]
    wide = -(-like.shape[-1] // 32) * 32
    return total.unflatten(-1, (-1, wide)).transpose(1, 2)[..., : like.shape[-1]]


def _parts(q: Tensor, k: Tensor, q_begins, k_begins, q_lens, k_lens) -> list[tuple[slice, slice]]:
    if q_begins is None:
        return [(slice(0, q.shape[-3]), slice(0, k.shape[-3]))]
    told = (x.tolist() for x in (q_begins, q_lens, k_begins, k_lens))
    return [(slice(b, b + n), slice(c, c + m)) for b, n, c, m in zip(*told, strict=False)]


@pytest.fixture
def calls() -> Calls:
    return Calls()


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


def draw(*shape: int) -> Tensor:
    return torch.randn(shape).transpose(1, 2)


def blocks_of(*lens: int) -> Segments:
    """Documents one after the other, with two rows between, each of which sees its own keys."""
    begins = [sum(lens[:i]) + 2 * i for i in range(len(lens))]
    return Segments((torch.tensor([[b, b + n, b, b + n] for b, n in zip(begins, lens, strict=True)]),), None, 0)


def attend(cover: Any, num_q: int, num_k: int, heads: int, kv_heads: int, deterministic: bool = False,
           softcap: float | None = None, spread: bool = False) -> None:  # fmt: skip
    """One tile in both passes, compared with the dense formula."""
    q, k, v, dout = draw(1, num_q, heads, 8), *(draw(1, num_k, kv_heads, 8) for _ in range(2)), draw(1, num_q, heads, 8)
    if spread:  # over heads, as the gradient of their sum is
        dout = dout[:, :1].expand_as(dout)
    if isinstance(cover, Segments):
        allowed = cover.allowed(torch.arange(num_q), torch.arange(num_k))
    else:
        allowed = Distances.of(cover, num_q, num_k).pairs(num_q, num_k)[None]
    leaves = [x.double().requires_grad_() for x in (q, k, v)]
    out, lse = dense_attention(*leaves, allowed, 0.3, softcap=softcap)
    want = torch.autograd.grad(out, leaves, dout.double())
    scores = Scores(0.3, softcap)
    got_out, got_lse = flash_attn_4._forward(q, k, v, cover, scores)
    tile = BackwardTile(dout, q, k, v, got_out, got_lse, None, cover, scores)
    got = flash_attn_4._backward(tile, deterministic)
    for mine, right in zip((got_out, *got), (out, *want), strict=True):
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


@pytest.mark.parametrize("heads", [(2, 2), (4, 2)], ids=str)
@pytest.mark.parametrize("name", TILES)
def test_later_calls_skip_its_python(package: None, calls: Calls, name: str, heads: tuple[int, int]) -> None:
    """With other lengths, bounds and numbers of sequences too; numbers are right before and after."""
    attend(*TILES[name], *heads)
    assert [called for called, _ in calls.compiled] == [called for called, _ in calls]  # without a launch, first
    assert [called for called, _ in calls] == ["_flash_attn_fwd", "_flash_attn_bwd"]
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


def test_a_release_that_differs_keeps_its_python() -> None:
    calls = Calls()
    flash_attn_4_package._warn_of_release.cache_clear()
    with installed(calls, extra=True), pytest.warns(UserWarning, match="own Python") as warned:
        for _ in range(2):
            attend(*TILES["causal"], 2, 2)
    assert len(warned) == 1
    assert [called for called, _ in calls] == ["_flash_attn_fwd", "_flash_attn_bwd", "_flash_attn_fwd"]


def test_a_release_that_takes_keys_for_values_keeps_its_python() -> None:
    """Tensors alike in everything but where they are."""
    calls = Calls()
    flash_attn_4_package._warn_of_release.cache_clear()
    with installed(calls, swapped=True), pytest.warns(UserWarning, match="own Python") as warned:
        for _ in range(2):
            attend(*TILES["causal"], 2, 2)
    assert len(warned) == 1
    assert [called for called, _ in calls] == ["_flash_attn_fwd", "_flash_attn_bwd", "_flash_attn_fwd"]


def test_a_gradient_that_is_spread_over_heads_has_kernels_of_its_own(package: None, calls: Calls) -> None:
    """Strides of zero are compiled for: of a sum over heads, say."""
    for spread in (True, False, True, False):
        attend(*TILES["causal"], 2, 2, spread=spread)
    passes = [called for called, _ in calls]
    assert passes.count("_flash_attn_fwd") == 1 and passes.count("_flash_attn_bwd") == 3  # never kept where spread


def test_a_kind_that_is_new_in_a_capture_is_refused(package: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with pytest.raises(UnsupportedError, match="warm_up"):
        flash_attn_4_package._refuse_in_capture(mock.Mock(is_cuda=True))
    flash_attn_4_package._refuse_in_capture(torch.zeros(1))


def test_another_block_size_keeps_its_python(package: None, calls: Calls, monkeypatch: pytest.MonkeyPatch) -> None:
    """Buffers would have other sizes than the compiled kernels take."""
    module = sys.modules["flash_attn.cute.interface"]
    other = SimpleNamespace(m_block_size=2 * BLOCK_Q, n_block_size=BLOCK_K, dKV_swapAB=False)
    monkeypatch.setattr(module, "_tile_size_bwd_sm90", lambda *arguments: other)
    for _ in range(2):
        attend(*TILES["causal"], 2, 2)
    assert [called for called, _ in calls] == ["_flash_attn_fwd", "_flash_attn_bwd", "_flash_attn_bwd"]


def test_short_tiles_and_deterministic_ones_keep_its_python(package: None, calls: Calls) -> None:
    """For short tiles it has kernels of their own; deterministic ones take buffers that are not ours to know."""
    for _ in range(2):
        attend(CAUSAL, 40, 40, 2, 2)
    assert len(calls) == 4
    for _ in range(2):
        attend(*TILES["causal"], 2, 2, deterministic=True)
    assert [called for called, _ in calls[4:]] == ["_flash_attn_fwd", "_flash_attn_bwd", "_flash_attn_bwd"]


def test_sequences_of_any_number_are_one_variant(package: None, calls: Calls) -> None:
    """The longest is said to be as long as several blocks, and more than 256 sequences take several calls."""
    cover = blocks_of(*[1] * (2 * MOST_SEQUENCES + 3))
    length = 3 * len(cover.blocks[0]) - 2
    attend(cover, length, length, 2, 2)
    (name, told), *others = calls
    assert name == "_flash_attn_fwd" and [called for called, _ in others] == ["_flash_attn_bwd"]
    for call in (told, others[0][1]):
        assert len(call["seqused_q"]) == MOST_SEQUENCES and call["max_seqlen_q"] == call["max_seqlen_k"] == 1024


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
        for x, value in given.items():
            monkeypatch.setenv(x, value)
        flash_attn_4_package._package()
        assert (os.environ[name], os.environ.get(named)) == (after, where)
    folder.chmod(0o777)
    for x in (name, named):
        monkeypatch.delenv(x)
    with pytest.warns(UserWarning, match="every process compiles FlashAttention-4: expected .* this user only"):
        flash_attn_4_package._package()
    assert (os.environ[name], os.environ.get(named)) == ("0", None)
    assert FA4.capability.lacking is flash_attn_4_package.lacks
