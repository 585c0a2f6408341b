"""FlashAttention-4 (package flash-attn-4): which variants it compiles, and calls that skip its Python.

The package is imported when the first CUDA call that it could serve is planned. It takes [B, S, H, D] views with unit
last stride and rows aligned to 16 bytes, and writes gradients into such views. Its lse follows `contract`; given the
global out and lse it returns a tile's share of the gradients, rounded to the inputs' dtype. Its softcap computes tanh
with a relative error of 2⁻¹¹.

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

import inspect
import math
import os
import threading
import warnings
from collections.abc import Callable, Iterator
from functools import lru_cache, partial
from importlib import import_module
from itertools import accumulate
from operator import mul
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from cp_mesh._torch import FakeTensorMode
from cp_mesh.errors import UnsupportedError, refuse, warn
from cp_mesh.geometry.mask import Band
from cp_mesh.geometry.varlen import Segments
from cp_mesh.kernels.combine import accumulation_dtype
from cp_mesh.kernels.compiling import one_rank_compiles, own_folder
from cp_mesh.kernels.contract import Capability, KernelTile, Pairs
from cp_mesh.kernels.merge import BackwardTile, Kernel
from cp_mesh.kernels.scores import Scores

LONGEST = 1024
MOST_SEQUENCES = 256  # its BIN_BATCH_SEARCH_THRESH
_CACHES, _CACHE_DIR = "FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED", "FLASH_ATTENTION_CUTE_DSL_CACHE_DIR"
SHORT = 256  # up to so many rows or keys a tile may fit in one block, for which the package compiles other kernels

_PACKED = {f"{name}_{side}" for name in ("cu_seqlens", "seqused", "max_seqlen") for side in "qk"}
_BOTH = {"softmax_scale", "softcap", "window_size_left", "window_size_right"} | _PACKED
# Parameters that the calls below pass by name: other releases, and other packages of that name, may lack them.
_CALLS = {
    "_flash_attn_fwd": _BOTH | {"return_lse", "out", "lse"},
    "_flash_attn_bwd": _BOTH | {"dq", "dk", "dv", "deterministic"},
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


def _package() -> Any:
    # The package reads these when imported. Its default is no cache on disk, so that every process compiles; and a
    # folder that another user may have made, from which it would load code.
    if _CACHES not in os.environ:
        os.environ[_CACHES] = "1"
        try:
            if _CACHE_DIR not in os.environ:
                os.environ[_CACHE_DIR] = f"{own_folder() / 'flash_attention_4'}"
        except (OSError, AttributeError) as error:  # there is no geteuid on Windows
            os.environ[_CACHES] = "0"
            warn(f"every process compiles FlashAttention-4: {error}")
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
Kernels = tuple[Callable[..., Any], ...]
_compiled: dict[tuple[Any, ...], Kernels] = {}
"""By kind, the kernels to launch directly; empty for kinds that run the package's Python."""
_recording = threading.Lock()


def _run(
    call: Call,
    kind: tuple[Any, ...],
    keeps_python: bool,
    name: str,
    keywords: Callable[[], dict[str, Any]],
    launches: Callable[[], Launches],
) -> Kernels:
    """Launch the recorded kernels of this kind, or call the package's function of that name; return the kernels."""
    compiled = _compiled.get(kind)
    if compiled:
        for kernel, arguments in zip(compiled, launches(), strict=True):
            kernel(*arguments)
        return compiled
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
    return _compiled[kind]


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
            "run one forward and backward with these shapes before the capture, or cp_mesh.tools.warm_up",
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


def _numbers_of_forward(call: Call) -> tuple[Any, ...]:
    """The arguments of the forward's one kernel after q, k, v, out and lse, as in release 4.0.0b36 on Hopper."""
    left, right = (None, None) if call.causal else (call.left, call.right)
    packed = call.packed[:4] if call.packed else (None,) * 4
    return call.scale, *packed, None, left, right, None, None, _package().AuxData(None, None), None, None


class _BackwardLaunches:
    """The launches and buffers of the backward, as in release 4.0.0b36: preparation, main kernel, rounding fp32 sums.

    fp32 sums are dq's, cleared by the first kernel, and those of dk and dv if query heads share a kv head. Of the call
    it keeps the sizes alone.
    """

    def __init__(self, call: Call) -> None:
        q, k = call.q, call.k
        left, right = (None, None) if call.causal else (call.left, call.right)
        local = (left, right) != (None, None)
        m_block, n_block, *wide = _backward_blocks(_package(), q.shape[-1], call.v.shape[-1], call.causal, local)
        q_begins, k_begins, q_lens, k_lens = call.packed[:4] if call.packed else (None,) * 4

        def padded(x: Tensor, begins: Tensor | None, block: int) -> int:
            return (x.shape[-3] + (block if begins is None else len(begins) * block) - 1) // block * block

        rows, keys = padded(q, q_begins, m_block), padded(k, k_begins, n_block)
        before, heads, kv_heads = q.shape[:-3], q.shape[-2], k.shape[-2]
        # saves host time: one allocation for all buffers, below one launch that clears two
        sizes = [(*before, heads, rows)] * 2 + [(*before, heads, rows * wide[0])]
        if heads != kv_heads:
            sizes += [(*before, kv_heads, keys * dim) for dim in wide]
        firsts = [*accumulate(map(math.prod, sizes), initial=0)]  # all are multiples of 16 bytes
        self.num, self.first_key = firsts[-1], firsts[3]
        dense = [tuple(accumulate(size[:0:-1], mul, initial=1))[::-1] for size in sizes]
        self.views = sizes, dense, firsts[:-1]
        self.of_q, self.of_k, self.scale, self.device = (q_begins, q_lens), (k_begins, k_lens), call.scale, q.device
        aux = _package().AuxData(None, None)
        self.before = *self.of_q, None, None, None, 1.0, None, None
        self.main = call.scale, q_begins, k_begins, q_lens, k_lens, left, right, None, None, None, aux, None, None

    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor, dout: Tensor, out: Tensor, lse: Tensor, dq: Tensor, dk: Tensor,
        dv: Tensor,
    ) -> Launches:  # fmt: skip
        sums = torch.empty(self.num, dtype=torch.float32, device=self.device)
        delta, lse_log2, dq_sum, *of_keys = map(sums.as_strided, *self.views)
        after: Launches = [(dq_sum, dq, self.scale, *self.of_q, None, None)]
        dk_sum, dv_sum = dk, dv
        if of_keys:
            dk_sum, dv_sum = of_keys
            sums[self.first_key :].zero_()
            after += [(dk_sum, dk, self.scale, *self.of_k, None, None), (dv_sum, dv, 1.0, *self.of_k, None, None)]
        return [
            (out, dout, delta, lse, lse_log2, dq_sum, *self.before),
            (q, k, v, dout, lse_log2, delta, dq_sum, dk_sum, dv_sum, *self.main),
            *after,
        ]


@lru_cache
def _backward_blocks(package: Any, dim: int, v_dim: int, causal: bool, local: bool) -> tuple[int, int, int, int]:
    """Rows and keys of a block, and the padded head dims of its fp32 sums."""
    tile = package._tile_size_bwd_sm90(dim, v_dim, causal, local)
    step = 64 if tile.dKV_swapAB else 32
    return tile.m_block_size, tile.n_block_size, *(-(-x // step) * step for x in (dim, v_dim))


def _run_forward(call: Call, out: Tensor, lse: Tensor) -> Kernels:
    def keywords() -> dict[str, Any]:
        return call.keywords() | {"softcap": call.softcap, "return_lse": True, "out": out, "lse": lse}

    def launches() -> Launches:
        return [(call.q, call.k, call.v, out, lse, *_numbers_of_forward(call))]

    return _run(call, call.kind("forward"), False, "_flash_attn_fwd", keywords, launches)


def _run_backward(
    call: Call, dout: Tensor, out: Tensor, lse: Tensor, dq: Tensor, dk: Tensor, dv: Tensor, deterministic: bool = False
) -> Kernels:
    def keywords() -> dict[str, Any]:
        tensors = {"out": out, "dout": dout, "lse": lse, "dq": dq, "dk": dk, "dv": dv}
        return call.keywords() | tensors | {"softcap": call.softcap or 0.0, "deterministic": deterministic}

    def launches() -> Launches:
        return _BackwardLaunches(call)(call.q, call.k, call.v, dout, out, lse, dq, dk, dv)

    spread = 0 in dout.stride()  # of an expanded tensor, say: stride 0 needs a kernel of its own, as in `kind`
    kind = call.kind("backward", deterministic, spread)
    return _run(call, kind, deterministic or spread, "_flash_attn_bwd", keywords, launches)


def _head_dims(q: Tensor, k: Tensor, v: Tensor, *, backward: bool) -> tuple[int, int]:
    """The head dims to pad to: the package compiles equal ones, and (192, 128), but not all other pairs."""
    head_dim, v_head_dim, grouped = q.shape[3], v.shape[3], q.shape[1] != k.shape[1]
    if head_dim == v_head_dim or ((head_dim, v_head_dim) == (192, 128) and not (backward and grouped)):
        return head_dim, v_head_dim
    return max(head_dim, v_head_dim), max(head_dim, v_head_dim)


def writable(buffer: Tensor | None, like: Tensor) -> Tensor:
    """The caller's buffer, or a new one if the buffer's rows are not aligned to 16 bytes, which no kernel checks."""
    if buffer is not None and buffer.shape == like.shape:
        unit = 16 // buffer.element_size()
        if buffer.data_ptr() % 16 == 0 and all(stride % unit == 0 for stride in buffer.stride()[:-1]):
            return buffer
    return torch.empty_like(like)


def _widen(x: Tensor, dim: int) -> Tensor:
    """Pad the last dim with zeros, which change no score and no output."""
    return x if x.shape[3] == dim else torch.nn.functional.pad(x, (0, dim - x.shape[3]))


def _narrow(x: Tensor, dim: int) -> Tensor:
    """Undo `_widen`; the same object if nothing changes, so that the caller sees that its buffer was used."""
    return x if x.shape[3] == dim else x[..., :dim]


def _forward(q: Tensor, k: Tensor, v: Tensor, cover: Band | Pairs | Segments, scores: Scores) -> tuple[Tensor, Tensor]:
    """A tile whose head dims may have to be padded; `_BoundForward` computes the others."""
    dim, v_dim = _head_dims(q, k, v, backward=False)
    q, k, v_ = _widen(q, dim), _widen(k, dim), _widen(v, v_dim)
    tile = KernelTile((0, q.shape[2]), (0, k.shape[2]), cover)
    out, lse = _BoundForward(tile, q, k, v_, scores)(q, k, v_, scores)
    return _narrow(out, v.shape[3]), lse


def _backward(t: BackwardTile, deterministic: bool = False) -> tuple[Tensor, Tensor, Tensor]:
    """As `_forward`."""
    assert t.out is not None, "uses_delta is not set"
    dim, v_dim = _head_dims(t.q, t.k, t.v, backward=True)
    q, k, v, dout, out = *(_widen(x, dim) for x in (t.q, t.k)), *(_widen(x, v_dim) for x in (t.v, t.dout, t.out))
    tile, buffers = KernelTile((0, q.shape[2]), (0, k.shape[2]), t.cover), (t.dk, t.dv)
    run = _BoundBackward(tile, dout, q, k, v, out, t.lse, t.scores, *buffers, deterministic)
    dq, dk, dv = run(dout, q, k, v, out, t.lse, None, t.scores, *buffers)
    return _narrow(dq, t.q.shape[3]), _narrow(dk, t.q.shape[3]), _narrow(dv, t.v.shape[3])


def _view(x: Tensor, rows: tuple[int, int], batch_row: int | None) -> tuple[Any, ...]:
    """Size, stride and first element of rows of a tensor [B, H, S, D] as [B, n, H, D], or of one batch row as
    [n, H, D]; of lse [B, H, S] as [B, H, n] or [H, n]."""
    (B, H, _, *dim), (batch, head, row, *last) = x.shape, x.stride()
    num, first = rows[1] - rows[0], rows[0] * row
    size, stride = ((num, H), (row, head)) if dim else ((H, num), (head, row))
    if batch_row is not None:
        return (*size, *dim), (*stride, *last), first + batch_row * batch
    return (B, *size, *dim), (batch, *stride, *last), first


def _gaps(tile: KernelTile) -> tuple[bool, bool]:
    """Whether some rows, and some keys, of a tile are outside of all its blocks."""
    if not isinstance(tile.cover, Segments):
        return False, False
    lens = [(blocks[:, 1::2] - blocks[:, 0::2]).sum(0).tolist() for blocks in tile.cover.blocks]
    sizes = tile.q[1] - tile.q[0], tile.k[1] - tile.k[0]
    return any(rows < sizes[0] for rows, _ in lens), any(keys < sizes[1] for _, keys in lens)


class _BoundForward:
    """The forward of a tile; see `merge.BoundForward`."""

    def __init__(self, tile: KernelTile, q: Tensor, k: Tensor, v: Tensor, scores: Scores) -> None:
        (B, H, _, _), num = q.shape, tile.q[1] - tile.q[0]
        self.out, self.lse = (B, num, H, v.shape[3]), (B, H, num)
        self.lse_dtype, self.has_gaps = accumulation_dtype(q.dtype), _gaps(tile)[0]
        self.factors: Any = *_window(tile.cover), scores.scale, scores.softcap
        self.calls: list[tuple[int | None, Packed | None, list[Any]]] = []
        for row, packed in _by_batch_row(tile.cover, q):
            views = [_view(x, rows, row) for x, rows in ((q, tile.q), (k, tile.k), (v, tile.k))]
            self.calls.append((row, packed, views))
        self.kernels: Kernels = ()
        self.numbers: list[tuple[Any, ...] | None] = [None] * len(self.calls)  # of launches that skip the package

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, scores: Scores) -> tuple[Tensor, Tensor]:
        out, lse = q.new_empty(self.out), q.new_empty(self.lse, dtype=self.lse_dtype)
        if self.has_gaps:
            out.zero_(), lse.fill_(float("-inf"))  # these rows have no key
        for i, (row, packed, views) in enumerate(self.calls):
            cut: Any = []
            for x, (size, stride, first) in zip((q, k, v), views, strict=True):
                cut.append(x.as_strided(size, stride, x.storage_offset() + first))
            into = (out, lse) if row is None else (out[row], lse[row])
            if (numbers := self.numbers[i]) is not None:
                self.kernels[0](*cut, *into, *numbers)
            else:
                q_, k_, v_ = cut
                call = Call(q_, k_, v_, *self.factors, packed)  # type: ignore[call-arg]
                self.kernels = _run_forward(call, *into)
                self.numbers[i] = _numbers_of_forward(call) if self.kernels else None
        return out.transpose(1, 2), lse


class _BoundBackward:
    """The backward of a tile; see `merge.BoundBackward`."""

    def __init__(
        self, tile: KernelTile, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor | None, lse: Tensor,
        scores: Scores, dk: Tensor | None, dv: Tensor | None, deterministic: bool = False,
    ) -> None:  # fmt: skip
        assert out is not None, "uses_delta is not set"
        rows, keys = slice(*tile.q), slice(*tile.k)
        likes, buffers = (q[:, :, rows], k[:, :, keys], v[:, :, keys]), (None, dk, dv)
        grads = [
            torch.empty_like(like, device="meta") if buffer is None else writable(buffer, like)
            for buffer, like in zip(buffers, likes, strict=True)
        ]
        self.deterministic, self.gaps = deterministic, [*_gaps(tile), _gaps(tile)[1]]
        # of dq, dk and dv: size and strides of a new tensor, or None if the caller's buffer is written
        self.new = [None if x is y else (x.shape, x.stride()) for x, y in zip(grads, buffers, strict=True)]
        self.factors: Any = *_window(tile.cover), scores.scale, scores.softcap
        self.calls: list[tuple[Packed | None, list[Any]]] = []
        of_rows = (q, tile.q), (k, tile.k), (v, tile.k), (dout, tile.q), (out, tile.q), (lse, tile.q)
        for row, packed in _by_batch_row(tile.cover, q):
            views = [_view(x, rows, row) for x, rows in of_rows]
            self.calls.append((packed, views + [_view(x, (0, x.shape[2]), row) for x in grads]))
        self.kernels: Kernels = ()
        self.launches: list[_BackwardLaunches | None] = [None] * len(self.calls)  # those that skip the package

    def __call__(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, delta: Tensor | None,
        scores: Scores, dk: Tensor | None, dv: Tensor | None,
    ) -> tuple[Tensor, ...]:  # fmt: skip
        every: list[Any] = [q, k, v, dout, out, lse]
        for buffer, new, has_gaps in zip((None, dk, dv), self.new, self.gaps, strict=True):
            grad: Any = buffer if new is None else q.new_empty_strided(*new)
            every.append(grad.zero_() if has_gaps else grad)
        for i, (packed, views) in enumerate(self.calls):
            cut: Any = []
            for x, (size, stride, first) in zip(every, views, strict=True):
                cut.append(x.as_strided(size, stride, x.storage_offset() + first))
            if (launches := self.launches[i]) is not None:
                for kernel, arguments in zip(self.kernels, launches(*cut), strict=True):
                    kernel(*arguments)
            else:
                q_, k_, v_, *others = cut
                call = Call(q_, k_, v_, *self.factors, packed)  # type: ignore[call-arg]
                self.kernels = _run_backward(call, *others, self.deterministic)  # type: ignore[call-arg]
                self.launches[i] = _BackwardLaunches(call) if self.kernels else None
        return (*every[6:],)


def _binds(bound: Any, *, backward: bool, **options: bool) -> Callable[..., Any]:
    """A function that binds a tile whose head dims need no padding; None for the others."""

    def bind(tile: KernelTile, *given: Any) -> Any:
        q, k, v = given[1:4] if backward else given[:3]
        dims = q.shape[3], v.shape[3]
        return bound(tile, *given, **options) if _head_dims(q, k, v, backward=backward) == dims else None

    return bind


def _window(cover: Band | Pairs | Segments) -> tuple[int | None, int | None]:
    assert isinstance(cover, Band | Segments), "choose_kernel gives tensor masks to kernels that read them"
    assert cover.left is None or cover.right is None or cover.left + cover.right >= 0, "a schedule has no empty tiles"
    return cover.left, cover.right


def _by_batch_row(cover: Band | Pairs | Segments, x: Tensor) -> Iterator[tuple[int | None, Packed | None]]:
    """Batch row and packed sequences of each call: a call takes sequences of one batch row; None and None for a band.

    Lengths are passed beside the begins, so there may be gaps between sequences. The kernel does not read or write
    rows and keys in gaps.
    """
    if not isinstance(cover, Segments):
        yield None, None
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
    dtypes=(torch.bfloat16, torch.float16),
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
_bind = _binds(_BoundForward, backward=False), _binds(_BoundBackward, backward=True)
FA4 = Kernel(
    "fa4",
    _HAS,
    _forward,
    _backward,
    bind=_bind,
    # In squares: FlashAttention-4 treats other bands as windows, with which its deterministic backward was not tried.
    reproducible=Kernel(
        "fa4",
        _HAS,
        _forward,
        partial(_backward, deterministic=True),
        bind=(_bind[0], _binds(_BoundBackward, backward=True, deterministic=True)),
        squares=True,
    ),
)
