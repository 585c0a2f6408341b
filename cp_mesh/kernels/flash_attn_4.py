"""FlashAttention-4 (package flash-attn-4): which variants it compiles, and calls that skip its Python.

Tensors are as in `flash_attn`. Its softcap computes tanh with a relative error of 2⁻¹¹.

**Variants.** It compiles a kernel at the first call of each kind. A kind is the dtype, the head dims, the heads per kv
head, the softcap, which sides of the band are bounded, whether sequences are packed, and whether a sequence may be
longer than a block. Lengths, strides, the bounds themselves and the scale do not matter. Calls with packed sequences
share a kind: the maximum length passed is at least `LONGEST`, and a call takes at most `MOST_SEQUENCES` sequences,
above which the package uses another kernel. So packed documents need two variants of each pass, full and causal, for
any batch. Compiled kernels are cached on disk (unless `FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED=0` is set), and one rank
of a host compiles at a time. A variant must be compiled before a CUDA graph captures it.

**Host time.** The package's Python checks arguments and looks up compiled kernels: 73 us per forward call, 95 per
backward (Dao-AILab/flash-attention, issue 2426). So the first call of a kind runs this Python, and its launches are
recorded; if they equal `_forward_launches` or `_backward_launches`, later calls of the kind launch directly. Other
releases, short tiles, strides of 0 and deterministic calls always run the package's Python.
"""

from __future__ import annotations

import math
import os
import threading
import warnings
from collections.abc import Callable, Iterator
from functools import lru_cache, partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from cp_mesh._torch import FakeTensorMode
from cp_mesh.errors import UnsupportedError, refuse, warn
from cp_mesh.geometry.mask import Band
from cp_mesh.geometry.varlen import Segments
from cp_mesh.kernels.combine import accumulation_dtype
from cp_mesh.kernels.compiling import one_rank_compiles
from cp_mesh.kernels.contract import Capability, Pairs
from cp_mesh.kernels.flash_attn import HALF, bshd, import_once, lacks, writable
from cp_mesh.kernels.merge import BackwardTile, merging_kernel
from cp_mesh.kernels.scores import Scores
from cp_mesh.tape import call as call_kernel
from cp_mesh.tape import give_up

LONGEST = 1024
MOST_SEQUENCES = 256  # its BIN_BATCH_SEARCH_THRESH
SHORT = 256  # up to so many rows or keys a tile may fit in one block, for which the package compiles other kernels

_PACKED = {f"{name}_{side}" for name in ("cu_seqlens", "seqused", "max_seqlen") for side in "qk"}
_BOTH = {"softmax_scale", "softcap", "window_size_left", "window_size_right"} | _PACKED
# Parameters that the calls below pass by name: other releases, and other packages of that name, may lack them.
_CALLS = {
    "_flash_attn_fwd": _BOTH | {"return_lse", "out", "lse"},
    "_flash_attn_bwd": _BOTH | {"dq", "dk", "dv", "deterministic"},
}


def _package() -> Any:
    # the package reads this when imported; its default is no cache on disk, so that every process compiles
    os.environ.setdefault("FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED", "1")
    return import_once("flash_attn.cute.interface")


def _lacks() -> str | None:
    _package()
    return lacks("flash_attn.cute.interface", _CALLS, "pip install cp_mesh[flash]")


class Packed(NamedTuple):
    """Packed sequences of one call: begins [n + 1] and lengths [n] of their rows and keys, int32; maximum lengths."""

    q_begins: Tensor
    k_begins: Tensor
    q_lens: Tensor
    k_lens: Tensor
    max_q: int
    max_k: int


class Call(NamedTuple):
    """One call of either pass; q, k and v are [B, S, H, D], or [S, H, D] with packed sequences.

    Attributes:
        left, right: bounds of the `Band`.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    left: int | None
    right: int | None
    scale: float
    softcap: float | None
    packed: Packed | None = None

    @property
    def causal(self) -> bool:
        return self.left is None and self.right == 0

    def keywords(self) -> dict[str, Any]:
        """The arguments that both passes of the package's Python take."""
        given: dict[str, Any] = {
            "softmax_scale": self.scale,
            "window_size_left": self.left,
            "window_size_right": self.right,
        }
        if self.packed is not None:
            given |= {"cu_seqlens_q": self.packed.q_begins, "cu_seqlens_k": self.packed.k_begins}
            given |= {"seqused_q": self.packed.q_lens, "seqused_k": self.packed.k_lens}
            given |= {"max_seqlen_q": max(self.packed.max_q, LONGEST), "max_seqlen_k": max(self.packed.max_k, LONGEST)}
        return {"q": self.q, "k": self.k, "v": self.v} | given

    def kind(self, name: str, *more: Any) -> tuple[Any, ...]:
        """A key that is equal for calls that launch the same compiled kernels."""
        tensors = (self.q, self.k, self.v)
        return (
            name, self.q.device, self.q.dtype, self.q.shape[-1], self.v.shape[-1], self.q.shape[-2] // self.k.shape[-2],
            self.left is None, self.right is None, self.causal, self.softcap, self.packed is None,
            self.packed is None and (self.q.shape[1] <= SHORT, self.k.shape[1] <= SHORT),
            tuple(0 in x.stride() for x in tensors), *more,
        )  # fmt: skip

    @property
    def may_be_direct(self) -> bool:
        longer = self.packed is not None or min(self.q.shape[1], self.k.shape[1]) > SHORT
        return longer and not any(0 in x.stride() for x in (self.q, self.k, self.v))


Launches = list[tuple[Any, ...]]  # the arguments of each compiled kernel, in order
_compiled: dict[tuple[Any, ...], tuple[Callable[..., Any], ...]] = {}
"""By kind, the kernels to launch directly; empty for kinds that run the package's Python."""
_recording = threading.Lock()


def _run(
    call: Call,
    kind: tuple[Any, ...],
    keeps_python: bool,
    name: str,
    keywords: Callable[[], dict[str, Any]],
    launches: Callable[[], Launches],
) -> None:
    """Launch the recorded kernels of this kind, or call the package's function of that name."""
    compiled = _compiled.get(kind)
    if compiled:
        for kernel, arguments in zip(compiled, launches(), strict=True):
            call_kernel(kernel, *arguments)
        return
    give_up("FlashAttention-4's own Python, whose launches no mode sees")
    if compiled is None:
        given = keywords()
        _refuse_in_capture(given["q"])
        _compile(name, given)
        with _recording:
            recorded = _recorded(name, given)
        pointers = {x.data_ptr() for x in given.values() if isinstance(x, Tensor)}
        may_be_direct = call.may_be_direct and not keeps_python
        direct = may_be_direct and _same([arguments for _, arguments in recorded], launches, pointers)
        _compiled[kind] = tuple(kernel for kernel, _ in recorded) if direct else ()
        if may_be_direct and not direct:
            _warn_of_release()
    else:
        getattr(_package(), name)(**keywords())


@lru_cache
def _warn_of_release() -> None:
    warn(
        "this release of flash-attn-4 launches its kernels differently from 4.0.0b36, so every call runs the "
        "package's own Python: exact, with more host time. To avoid it: pip install flash-attn-4==4.0.0b36"
    )


def _refuse_in_capture(x: Tensor) -> None:
    if x.is_cuda and torch.cuda.is_current_stream_capturing():
        refuse(
            "CUDA graph capture",
            "kernels that are compiled already",
            "a FlashAttention-4 call whose kernel is not compiled",
            "run one forward and backward with these shapes before the capture, or cp_mesh.warm_up",
            UnsupportedError,
        )


def _compile(name: str, given: dict[str, Any]) -> None:
    """Compile a call's kernels on one rank of the host, without a launch; only if the package caches them on disk.

    A launch under the lock could wait for a peer: the device may be in a barrier, and loading code waits for the
    device. With fake tensors the package only compiles; if that fails, the call itself compiles.
    """
    if not getattr(import_once("flash_attn.cute.cache_utils"), "CUTE_DSL_CACHE_ENABLED", False):
        return
    mode = FakeTensorMode()  # outside of the lock: its first use imports for a second
    fakes = {key: mode.from_tensor(x) if isinstance(x, Tensor) else x for key, x in given.items()}
    try:
        with one_rank_compiles(), mode, warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the package warns of fake tensors, which no user can change
            getattr(_package(), name)(**fakes)
    except Exception as error:
        warn(
            f"FlashAttention-4 does not compile with fake tensors, so every rank compiles for itself:"
            f" {type(error).__name__}: {error}"
        )


class _RecordingCache:
    """Wraps a cache of compiled kernels, and records its kernels when this thread launches them."""

    def __init__(self, cache: Any, recorded: list[tuple[Callable[..., Any], tuple[Any, ...]]]) -> None:
        self._cache, self._recorded, self._thread = cache, recorded, threading.get_ident()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._cache, name)

    def __contains__(self, key: Any) -> bool:
        return key in self._cache

    def __setitem__(self, key: Any, kernel: Any) -> None:
        self._cache[key] = kernel

    def __getitem__(self, key: Any) -> Callable[..., Any]:
        kernel = self._cache[key]

        def launch(*arguments: Any) -> Any:
            if threading.get_ident() == self._thread:
                self._recorded.append((kernel, arguments))
            return kernel(*arguments)

        return launch


def _recorded(name: str, given: dict[str, Any]) -> list[tuple[Callable[..., Any], tuple[Any, ...]]]:
    """Call the package's function, and return the compiled kernels that it launched, with their arguments."""
    recorded: list[tuple[Callable[..., Any], tuple[Any, ...]]] = []
    functions = [x for x in vars(_package()).values() if hasattr(x, "compile_cache")]
    caches = [function.compile_cache for function in functions]
    try:
        for function, cache in zip(functions, caches, strict=True):
            function.compile_cache = _RecordingCache(cache, recorded)
        getattr(_package(), name)(**given)
    finally:
        for function, cache in zip(functions, caches, strict=True):
            function.compile_cache = cache
    return recorded


def _same(recorded: Launches, launches: Callable[[], Launches], given: set[int]) -> bool:
    """Whether our launches equal the recorded ones: the ``given`` tensors are identical, other buffers are alike."""
    try:
        ours = launches()
    except (AttributeError, TypeError):  # another release
        return False
    if [len(x) for x in recorded] != [len(x) for x in ours]:
        return False
    buffers: dict[int, int] = {}
    for theirs, own in zip(sum(recorded, ()), sum(ours, ()), strict=True):
        if isinstance(theirs, Tensor) and isinstance(own, Tensor):
            alike = (theirs.shape, theirs.stride(), theirs.dtype) == (own.shape, own.stride(), own.dtype)
            # the package may have copied begins of sequences, to align them to 16 bytes
            swapped = theirs.data_ptr() in given and theirs.data_ptr() != own.data_ptr()
            if not alike or swapped or buffers.setdefault(own.data_ptr(), theirs.data_ptr()) != theirs.data_ptr():
                return False
        elif isinstance(theirs, Tensor) or isinstance(own, Tensor) or type(theirs) is not type(own) or theirs != own:
            return False
    return True


def _forward_launches(call: Call, out: Tensor, lse: Tensor) -> Launches:
    """The launch of the forward, one kernel, as in release 4.0.0b36 on compute capability 9.0."""
    left, right = (None, None) if call.causal else (call.left, call.right)
    aux = _package().AuxData(None, None)
    packed = call.packed[:4] if call.packed else (None,) * 4
    return [(call.q, call.k, call.v, out, lse, call.scale, *packed, None, left, right, None, None, aux, None, None)]


def _backward_launches(
    call: Call, dout: Tensor, out: Tensor, lse: Tensor, dq: Tensor, dk: Tensor, dv: Tensor
) -> Launches:
    """The launches and buffers of the backward, as in release 4.0.0b36: preparation, main kernel, rounding fp32 sums.

    fp32 sums are dq's, cleared by the first kernel, and those of dk and dv if query heads share a kv head.
    """
    q, k = call.q, call.k
    left, right = (None, None) if call.causal else (call.left, call.right)
    local = (left, right) != (None, None)
    m_block, n_block, *wide = _backward_blocks(_package(), q.shape[-1], call.v.shape[-1], call.causal, local)
    q_begins, k_begins, q_lens, k_lens = call.packed[:4] if call.packed else (None,) * 4

    def padded(x: Tensor, begins: Tensor | None, block: int) -> int:
        return (x.shape[-3] + (block if begins is None else len(begins) * block) - 1) // block * block

    rows, keys = padded(q, q_begins, m_block), padded(k, k_begins, n_block)
    before = q.shape[:-3]
    # saves host time: one allocation for two buffers, below one launch that clears two
    delta, lse_log2 = q.new_empty((2, *before, q.shape[-2], rows), dtype=torch.float32)
    dq_sum = q.new_empty((*before, q.shape[-2], rows * wide[0]), dtype=torch.float32)
    of_q, of_k = (q_begins, q_lens), (k_begins, k_lens)
    after: Launches = [(dq_sum, dq, call.scale, *of_q, None, None)]
    dk_sum, dv_sum = dk, dv
    if q.shape[-2] != k.shape[-2]:
        sizes = [(*before, k.shape[-2], keys * dim) for dim in wide]
        counts = [math.prod(size) for size in sizes]
        sums = k.new_zeros(sum(counts), dtype=torch.float32).split_with_sizes(counts)
        dk_sum, dv_sum = (x.view(size) for x, size in zip(sums, sizes, strict=True))
        after += [(dk_sum, dk, call.scale, *of_k, None, None), (dv_sum, dv, 1.0, *of_k, None, None)]
    return [
        (out, dout, delta, lse, lse_log2, dq_sum, *of_q, None, None, None, 1.0, None, None),
        (q, k, call.v, dout, lse_log2, delta, dq_sum, dk_sum, dv_sum, call.scale, q_begins, k_begins, q_lens, k_lens,
         left, right, None, None, None, _package().AuxData(None, None), None, None),
        *after,
    ]  # fmt: skip


@lru_cache
def _backward_blocks(package: Any, dim: int, v_dim: int, causal: bool, local: bool) -> tuple[int, int, int, int]:
    """Rows and keys of a block, and the padded head dims of its fp32 sums."""
    tile = package._tile_size_bwd_sm90(dim, v_dim, causal, local)
    step = 64 if tile.dKV_swapAB else 32
    return tile.m_block_size, tile.n_block_size, *(-(-x // step) * step for x in (dim, v_dim))


def _run_forward(call: Call, out: Tensor, lse: Tensor) -> None:
    def keywords() -> dict[str, Any]:
        return call.keywords() | {"softcap": call.softcap, "return_lse": True, "out": out, "lse": lse}

    launches = partial(_forward_launches, call, out, lse)
    _run(call, call.kind("forward"), False, "_flash_attn_fwd", keywords, launches)


def _run_backward(
    call: Call, dout: Tensor, out: Tensor, lse: Tensor, dq: Tensor, dk: Tensor, dv: Tensor, deterministic: bool = False
) -> None:
    def keywords() -> dict[str, Any]:
        tensors = {"out": out, "dout": dout, "lse": lse, "dq": dq, "dk": dk, "dv": dv}
        return call.keywords() | tensors | {"softcap": call.softcap or 0.0, "deterministic": deterministic}

    launches = partial(_backward_launches, call, dout, out, lse, dq, dk, dv)
    spread = 0 in dout.stride()  # of an expanded tensor, say: stride 0 needs a kernel of its own, as in `kind`
    kind = call.kind("backward", deterministic, spread)
    _run(call, kind, deterministic or spread, "_flash_attn_bwd", keywords, launches)


def _head_dims(q: Tensor, k: Tensor, v: Tensor, *, backward: bool) -> tuple[int, int]:
    """The head dims to pad to: the package compiles equal ones, and (192, 128), but not all other pairs."""
    head_dim, v_head_dim, grouped = q.shape[3], v.shape[3], q.shape[1] != k.shape[1]
    if head_dim == v_head_dim or ((head_dim, v_head_dim) == (192, 128) and not (backward and grouped)):
        return head_dim, v_head_dim
    return max(head_dim, v_head_dim), max(head_dim, v_head_dim)


def _widen(x: Tensor, dim: int) -> Tensor:
    """Pad the last dim with zeros, which change no score and no output."""
    return x if x.shape[3] == dim else torch.nn.functional.pad(x, (0, dim - x.shape[3]))


def _narrow(x: Tensor, dim: int) -> Tensor:
    """Undo `_widen`; the same object if nothing changes, so that the caller sees that its buffer was used."""
    return x if x.shape[3] == dim else x[..., :dim]


def _forward(q: Tensor, k: Tensor, v: Tensor, cover: Band | Pairs | Segments, scores: Scores) -> tuple[Tensor, Tensor]:
    (dim, v_dim), (B, H, S, _) = _head_dims(q, k, v, backward=False), q.shape
    out, lse = q.new_empty((B, S, H, v_dim)), q.new_empty((B, H, S), dtype=accumulation_dtype(q.dtype))
    q_, k_, v_ = (bshd(_widen(x, to)) for x, to in ((q, dim), (k, dim), (v, v_dim)))
    if isinstance(cover, Segments):
        out.zero_(), lse.fill_(float("-inf"))  # rows outside of all blocks have no key
        for row, packed in _by_batch_row(cover, q):
            call = Call(q_[row], k_[row], v_[row], *_window(cover), scores.scale, scores.softcap, packed)
            _run_forward(call, out[row], lse[row])
    else:
        _run_forward(Call(q_, k_, v_, *_window(cover), scores.scale, scores.softcap), out, lse)
    return _narrow(bshd(out), v.shape[3]), lse


def _backward(t: BackwardTile, deterministic: bool = False) -> tuple[Tensor, Tensor, Tensor]:
    assert t.out is not None, "uses_delta is not set"
    dim, v_dim = _head_dims(t.q, t.k, t.v, backward=True)
    q, k, v, dout, out = *(_widen(x, dim) for x in (t.q, t.k)), *(_widen(x, v_dim) for x in (t.v, t.dout, t.out))
    grads = dq, dk, dv = torch.empty_like(q), writable(t.dk, k), writable(t.dv, v)
    q_, k_, v_, dout_, out_, dq_, dk_, dv_ = (bshd(x) for x in (q, k, v, dout, out, *grads))
    scale, softcap = t.scores.scale, t.scores.softcap
    if isinstance(t.cover, Segments):
        for x in grads:  # for rows and keys outside of all blocks
            x.zero_()
        for row, packed in _by_batch_row(t.cover, q):
            call = Call(q_[row], k_[row], v_[row], *_window(t.cover), scale, softcap, packed)
            _run_backward(call, dout_[row], out_[row], t.lse[row], dq_[row], dk_[row], dv_[row], deterministic)
    else:
        call = Call(q_, k_, v_, *_window(t.cover), scale, softcap)
        _run_backward(call, dout_, out_, t.lse, dq_, dk_, dv_, deterministic)
    return _narrow(dq, t.q.shape[3]), _narrow(dk, t.q.shape[3]), _narrow(dv, t.v.shape[3])


def _window(cover: Band | Pairs | Segments) -> tuple[int | None, int | None]:
    assert isinstance(cover, Band | Segments), "choose_kernel gives tensor masks to kernels that read them"
    assert cover.left is None or cover.right is None or cover.left + cover.right >= 0, "a schedule has no empty tiles"
    return cover.left, cover.right


def _by_batch_row(cover: Segments, x: Tensor) -> Iterator[tuple[int, Packed]]:
    """Batch row and packed sequences of each call: a call takes sequences of one batch row.

    Lengths are passed beside the begins, so there may be gaps between sequences. The kernel does not read or write
    rows and keys in gaps.
    """
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
    # it has Blackwell kernels too, with other limits of head dims; they were never run here
    only_on=((9, 0),),
    covers=("full", "causal", "window", "segments"),
    max_head_dim=256,
    head_dim_multiple=8,
    v_head_dim=True,
    # not tried with windows and sequences
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
    # In squares: FlashAttention-4 treats other bands as windows, with which its deterministic backward was not tried.
    reproducible=merging_kernel(
        "fa4", _HAS, _forward, partial(_backward, deterministic=True), squares=True, taped=True
    ),
)
