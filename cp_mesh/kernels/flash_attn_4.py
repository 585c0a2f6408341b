"""FlashAttention-4 (package flash-attn-4): what is compiled, and what a tape is told of its launches.

Calls are as in `flash_attn`. Its softcap computes tanh with a relative error of 2⁻¹¹.

**Variants.** It compiles a kernel when a kind of call is first met: dtype, head dims, heads per kv head, softcap, which
sides of the band are bounded, packed sequences or not, and whether a sequence may be longer than a block. Lengths,
strides, the bounds themselves and the scale are no part of it. Calls with packed sequences are made alike: the longest
sequence is said to be `LONGEST` at least, and `MOST_SEQUENCES` go into a call, above which another kernel is used. So
packed documents take two variants, full and causal, of each pass, whatever the batch. What is compiled is kept on disk
(`FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED=0` in the environment is respected), and one rank of a host compiles at a time.
A variant must have been compiled before it is captured in a CUDA graph.

**Host time.** Its Python checks arguments and looks for what it compiled: 73 us of a forward call and 95 of a backward
(Dao-AILab/flash-attention, issue 2426). A pass that is repeated goes without (`cp_mesh.tape`): its allocations are
operators, and its launches are told to the tape, whatever the release, unless it gives a kernel what may hold an
address.
"""

from __future__ import annotations

import os
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from cp_mesh._torch import FakeTensorMode
from cp_mesh.errors import UnsupportedError, refuse
from cp_mesh.geometry.mask import Band
from cp_mesh.geometry.varlen import Segments
from cp_mesh.kernels.combine import accumulation_dtype
from cp_mesh.kernels.compiling import one_rank_compiles
from cp_mesh.kernels.contract import Capability, Pairs
from cp_mesh.kernels.flash_attn import HALF, bshd, import_once, lacks, writable
from cp_mesh.kernels.merge import BackwardTile, merging_kernel
from cp_mesh.kernels.scores import Scores
from cp_mesh.tape import call, give_up, is_recording

LONGEST = 1024
MOST_SEQUENCES = 256  # its BIN_BATCH_SEARCH_THRESH
SHORT = 256  # rows or keys up to which one block may hold a tile, for which other kernels are compiled

_PACKED = {f"{name}_{side}" for name in ("cu_seqlens", "seqused", "max_seqlen") for side in "qk"}
_BOTH = {"softmax_scale", "softcap", "window_size_left", "window_size_right"} | _PACKED
# Parameters that the calls below pass by name: other releases, and other packages of that name, have others.
_CALLS = {
    "_flash_attn_fwd": _BOTH | {"return_lse", "out", "lse"},
    "_flash_attn_bwd": _BOTH | {"dq", "dk", "dv", "deterministic"},
}


def _package() -> Any:
    # read when the package is imported, whose default is to compile in every process anew
    os.environ.setdefault("FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED", "1")
    return import_once("flash_attn.cute.interface")


def _lacks() -> str | None:
    _package()
    return lacks("flash_attn.cute.interface", _CALLS, "pip install cp_mesh[flash]")


class Packed(NamedTuple):
    """Sequences of one call, int32: where their rows and keys begin [n + 1], how many there are [n]; and the most."""

    q_begins: Tensor
    k_begins: Tensor
    q_lens: Tensor
    k_lens: Tensor
    max_q: int
    max_k: int


_compiled: set[tuple[Any, ...]] = set()
"""Kinds of calls of which a kernel is compiled for each pass."""
_recording = threading.Lock()


def _run(
    name: str,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cover: Band | Pairs | Segments,
    scores: Scores,
    packed: Packed | None,
    **of_pass: Any,
) -> None:
    """Call the package's function of that name; q, k and v are [B, S, H, D], or [S, H, D] with packed sequences."""
    left, right = _window(cover)
    given = {
        "q": q, "k": k, "v": v, "softmax_scale": scores.scale, "window_size_left": left, "window_size_right": right,
    } | of_pass  # fmt: skip
    if packed is not None:
        given |= {"cu_seqlens_q": packed.q_begins, "cu_seqlens_k": packed.k_begins}
        given |= {"seqused_q": packed.q_lens, "seqused_k": packed.k_lens}
        given |= {"max_seqlen_q": max(packed.max_q, LONGEST), "max_seqlen_k": max(packed.max_k, LONGEST)}
    tensors = [x for x in given.values() if isinstance(x, Tensor)]
    kind = (
        name, q.device, q.dtype, q.shape[-1], v.shape[-1], q.shape[-2] // k.shape[-2], left is None, right is None,
        left is None and right == 0, packed is None and (q.shape[1] <= SHORT, k.shape[1] <= SHORT), packed is None,
        scores.softcap, of_pass.get("deterministic"), tuple(0 in x.stride() for x in tensors),
    )  # fmt: skip
    if kind not in _compiled:
        _refuse_in_capture(q)
        _compile(name, given)
        _compiled.add(kind)
    with _told_launches() if is_recording() else nullcontext():
        getattr(_package(), name)(**given)


def _refuse_in_capture(x: Tensor) -> None:
    if x.is_cuda and torch.cuda.is_current_stream_capturing():
        refuse(
            "CUDA graph capture",
            "kernels that are compiled",
            "a call of FlashAttention-4 of a new kind",
            "run one forward and backward with these shapes before the capture, or cp_mesh.warm_up",
            UnsupportedError,
        )


def _compile(name: str, given: dict[str, Any]) -> None:
    """Where the package keeps results on disk: have one rank of the host compile a call's kernels, and launch nothing.

    A launch under the lock could wait for a peer: the device may be in a barrier, and loading code waits for the
    device. With fake tensors the package compiles alone; where it cannot, the call itself compiles.
    """
    if not getattr(import_once("flash_attn.cute.cache_utils"), "CUTE_DSL_CACHE_ENABLED", False):
        return
    mode = FakeTensorMode()  # whose first use imports for a second, outside of the lock
    fakes = {key: mode.from_tensor(x) if isinstance(x, Tensor) else x for key, x in given.items()}
    try:
        with one_rank_compiles(), mode, warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the package's, of fake tensors: nothing that a user could change
            getattr(_package(), name)(**fakes)
    except Exception as error:
        warnings.warn(
            f"FlashAttention-4 does not compile with fake tensors, so every rank compiles for itself:"
            f" {type(error).__name__}: {error}",
            stacklevel=2,
        )


class _TellingCache:
    """Stands for a cache of compiled kernels: those taken from it by this thread tell a tape what they are given."""

    def __init__(self, cache: Any) -> None:
        self._cache, self._thread = cache, threading.get_ident()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._cache, name)

    def __contains__(self, key: Any) -> bool:
        return key in self._cache

    def __setitem__(self, key: Any, kernel: Any) -> None:
        self._cache[key] = kernel

    def __getitem__(self, key: Any) -> Callable[..., Any]:
        kernel = self._cache[key]
        return partial(_launch, kernel) if threading.get_ident() == self._thread else kernel


def _launch(kernel: Callable[..., Any], *arguments: Any) -> Any:
    if not all(map(_is_told, arguments)):
        give_up("what FlashAttention-4 gives its kernels")
    return call(kernel, *arguments)


def _is_told(x: Any) -> bool:
    """Whether a tape sees what a kernel is given: a tensor, or a number that is no address; not what holds either."""
    if isinstance(x, tuple):
        return all(_is_told(y) and not isinstance(y, Tensor) for y in x)
    return x is None or isinstance(x, Tensor | float | str) or (isinstance(x, int) and abs(x) < 1 << 31)


@contextmanager
def _told_launches() -> Iterator[None]:
    functions = [x for x in vars(_package()).values() if hasattr(x, "compile_cache")]
    with _recording:
        caches = [function.compile_cache for function in functions]
        try:
            for function, cache in zip(functions, caches, strict=True):
                function.compile_cache = _TellingCache(cache)
            yield
        finally:
            for function, cache in zip(functions, caches, strict=True):
                function.compile_cache = cache


def _head_dims(q: Tensor, k: Tensor, v: Tensor, *, backward: bool) -> tuple[int, int]:
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


def _forward(q: Tensor, k: Tensor, v: Tensor, cover: Band | Pairs | Segments, scores: Scores) -> tuple[Tensor, Tensor]:
    dim, v_dim = _head_dims(q, k, v, backward=False)
    q_, k_, v_ = (bshd(_widen(x, n)) for x, n in ((q, dim), (k, dim), (v, v_dim)))
    B, Sq, H, _ = q_.shape
    out, lse = q.new_empty((B, Sq, H, v_dim)), q.new_empty((B, H, Sq), dtype=accumulation_dtype(q.dtype))
    if isinstance(cover, Segments):
        out.zero_()
        lse.fill_(float("-inf"))  # rows of no block have no key
    for row, packed in _calls(cover, q):
        _run(
            "_flash_attn_fwd", q_[row], k_[row], v_[row], cover, scores, packed,
            softcap=scores.softcap, return_lse=True, out=out[row], lse=lse[row],
        )  # fmt: skip
    return _narrow(bshd(out), v.shape[3]), lse


def _backward(t: BackwardTile, deterministic: bool = False) -> tuple[Tensor, Tensor, Tensor]:
    assert t.out is not None, "uses_delta is not set"
    dim, v_dim = _head_dims(t.q, t.k, t.v, backward=True)
    q, k, v, dout, out = *(_widen(x, dim) for x in (t.q, t.k)), *(_widen(x, v_dim) for x in (t.v, t.dout, t.out))
    grads = dq, dk, dv = torch.empty_like(q), writable(t.dk, k), writable(t.dv, v)
    q_, k_, v_, dout_, out_, dq_, dk_, dv_ = (bshd(x) for x in (q, k, v, dout, out, *grads))
    if isinstance(t.cover, Segments):
        for x in grads:  # rows and keys of no block
            x.zero_()
    for row, packed in _calls(t.cover, q):
        _run(
            "_flash_attn_bwd", q_[row], k_[row], v_[row], t.cover, t.scores, packed,
            softcap=t.scores.softcap or 0.0, deterministic=deterministic, out=out_[row], dout=dout_[row],
            lse=t.lse[row], dq=dq_[row], dk=dk_[row], dv=dv_[row],
        )  # fmt: skip
    return _narrow(dq, t.q.shape[3]), _narrow(dk, t.q.shape[3]), _narrow(dv, t.v.shape[3])


def _window(cover: Band | Pairs | Segments) -> tuple[int | None, int | None]:
    assert isinstance(cover, Band | Segments), "the chooser gives tensor masks to kernels that read them"
    assert cover.left is None or cover.right is None or cover.left + cover.right >= 0, "a schedule has no empty tiles"
    return cover.left, cover.right


def _calls(cover: Band | Pairs | Segments, x: Tensor) -> Iterator[tuple[Any, Packed | None]]:
    """Batch rows and sequences of each call: all batch rows, or one with its sequences.

    Their lengths are told beside where they begin, so sequences may leave rows and keys out. Those the kernel neither
    reads nor writes.
    """
    if not isinstance(cover, Segments):
        yield slice(None), None
        return
    tables = cover.on(x.device)
    for row in range(x.shape[0]):
        t = tables[row if len(tables) > 1 else 0]
        for i in range(0, len(t.q_lens), MOST_SEQUENCES):
            j = i + MOST_SEQUENCES
            begins = t.q_begins[i : j + 1], t.k_begins[i : j + 1]
            yield row, Packed(*begins, t.q_lens[i:j], t.k_lens[i:j], t.max_q, t.max_k)


_HAS = Capability(
    devices=("cuda",),
    dtypes=HALF,
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
    lacking=_lacks,
)
FA4 = merging_kernel(
    "fa4",
    _HAS,
    _forward,
    _backward,
    taped=True,
    # In squares: any other band is a window for FlashAttention-4, and of these that backward was not tried.
    reproducible=merging_kernel(
        "fa4", _HAS, _forward, partial(_backward, deterministic=True), squares=True, taped=True
    ),
)
