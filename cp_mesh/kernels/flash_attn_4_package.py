"""The package flash-attn-4: what it lacks, which variants it compiles, and launches that skip its Python.

**Variants.** It compiles a kernel at the first call of each kind. A kind is the dtype, the head dims, the heads per kv
head, the softcap, which sides of the band are bounded, whether sequences are packed, and whether a sequence may be
longer than a block. Lengths, strides, the bounds themselves and the scale do not matter. Calls with packed sequences
share a kind: the maximum length passed is at least `LONGEST`, and a call takes at most `MOST_SEQUENCES` sequences,
above which the package uses another kernel. So packed documents need two variants of each pass, full and causal, for
any batch. Compiled kernels are cached on disk (unless `FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED=0` is set), and one rank
of a host compiles at a time. A variant must be compiled before a CUDA graph captures it.

**Host time.** The package's Python checks arguments and looks up compiled kernels: 73 us per forward call, 95 per
backward (Dao-AILab/flash-attention, issue 2426). So the first call of a kind runs this Python, and its launches are
recorded; if they equal those of `forward_launches` or `backward_launches`, later calls of the kind launch directly.
Other releases, short tiles, strides of 0 and deterministic calls always run the package's Python.
"""

from __future__ import annotations

import inspect
import math
import os
import threading
import warnings
from collections.abc import Callable
from functools import lru_cache, partial
from importlib import import_module
from itertools import accumulate
from operator import itemgetter, mul
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from cp_mesh._torch import FakeTensorMode
from cp_mesh.errors import UnsupportedError, refuse, warn
from cp_mesh.geometry.varlen import SequenceTable
from cp_mesh.kernels.compiling import one_rank_compiles, own_folder

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


def lacks() -> str | None:
    """What the package lacks, in words, or None. Imports it, since an installed package may still be broken."""
    name, module, install = "flash_attn.cute.interface", _package(), "pip install cp_mesh[flash]"
    if isinstance(module, str):
        return f"package {name} ({install}; {module})"
    for function, needed in _CALLS.items():
        has = inspect.signature(getattr(module, function)).parameters if hasattr(module, function) else {}
        if any(parameter.kind is parameter.VAR_KEYWORD for parameter in has.values()):
            continue  # a torch.library op hides its parameters
        if missing := needed - set(has):
            return f"parameters {', '.join(sorted(missing))} of {name}.{function} ({install})"
    return None


class FlashCall(NamedTuple):
    """One call of either pass; q, k and v are [B, S, H, D], or [S, H, D] of packed sequences; bounds of a `Band`."""

    q: Tensor
    k: Tensor
    v: Tensor
    left: int | None
    right: int | None
    scale: float
    softcap: float | None
    packed: SequenceTable | None = None

    @property
    def causal(self) -> bool:
        return self.left is None and self.right == 0

    @property
    def tables(self) -> tuple[Tensor | None, ...]:
        """Begins of rows and keys, lengths of rows and keys."""
        t = self.packed
        return (None,) * 4 if t is None else (t.q_begins, t.k_begins, t.q_lens, t.k_lens)

    def keywords(self) -> dict[str, Any]:
        """The arguments that both passes of the package's Python take."""
        given: dict[str, Any] = {"q": self.q, "k": self.k, "v": self.v, "softmax_scale": self.scale}
        given |= {"window_size_left": self.left, "window_size_right": self.right}
        if self.packed is not None:
            given |= zip(("cu_seqlens_q", "cu_seqlens_k", "seqused_q", "seqused_k"), self.tables, strict=True)
            given |= {"max_seqlen_q": max(self.packed.max_q, LONGEST), "max_seqlen_k": max(self.packed.max_k, LONGEST)}
        return given

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


Kernels = tuple[Callable[..., Any], ...]
_compiled: dict[tuple[Any, ...], Kernels] = {}
"""By kind, the kernels to launch directly; empty for kinds that run the package's Python."""
_recording = threading.Lock()


def run_forward(call: FlashCall, out: Tensor, lse: Tensor) -> Kernels:
    """Launch the recorded kernels of this kind, or call the package; return the kernels to launch directly."""
    given = {"softcap": call.softcap, "return_lse": True, "out": out, "lse": lse}
    return _run("_flash_attn_fwd", call, given, partial(forward_launches, call), (out, lse))


def run_backward(
    call: FlashCall,
    dout: Tensor,
    out: Tensor,
    lse: Tensor,
    dq: Tensor,
    dk: Tensor,
    dv: Tensor,
    deterministic: bool = False,
) -> Kernels:
    """As `run_forward`."""
    given = {"out": out, "dout": dout, "lse": lse, "dq": dq, "dk": dk, "dv": dv, "softcap": call.softcap or 0.0}
    given |= {"deterministic": deterministic}
    spread = 0 in dout.stride()  # of an expanded tensor, say: stride 0 needs a kernel of its own, as in `kind`
    tensors = dout, out, lse, dq, dk, dv
    return _run("_flash_attn_bwd", call, given, partial(backward_launches, call), tensors, deterministic, spread)


def _run(
    name: str, call: FlashCall, given: dict[str, Any], launches: Callable[[], Launches], tensors: tuple[Tensor, ...],
    *keeps_python: bool,
) -> Kernels:  # fmt: skip
    kind, given, every = call.kind(name, *keeps_python), call.keywords() | given, [*call[:3], *tensors]
    compiled = _compiled.get(kind)
    if compiled:
        for kernel, arguments in zip(compiled, launches()(every), strict=True):
            kernel(*arguments)
    elif compiled is None:
        _refuse_in_capture(call.q)
        _compile(name, given)
        with _recording:
            recorded = _recorded(name, given)
        pointers = {x.data_ptr() for x in every + [x for x in call.tables if x is not None]}
        may_be_direct = call.may_be_direct and not any(keeps_python)
        direct = may_be_direct and _same([x for _, x in recorded], lambda: launches()(every), pointers)
        compiled = _compiled[kind] = tuple(kernel for kernel, _ in recorded) if direct else ()
        if may_be_direct and not direct:
            _warn_of_release()
    else:
        getattr(_package(), name)(**given)
    return compiled


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


def _same(recorded: list[tuple[Any, ...]], launches: Callable[[], list[tuple[Any, ...]]], given: set[int]) -> bool:
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


class Launches(NamedTuple):
    """The launches of a call, as in release 4.0.0b36 on Hopper.

    Attributes:
        kernels: for each compiled kernel, picks its tensors from those of the call and then the buffers; and numbers.
        buffers: sizes, strides and first elements of fp32 buffers, which are one allocation: this saves host time.
        num_elements, first_sum: of the allocation; its elements from ``first_sum`` on are cleared.
    """

    kernels: list[tuple[Callable[[list[Tensor]], tuple[Tensor, ...]], tuple[Any, ...]]]
    buffers: tuple[list[Any], list[Any], list[int]] = ([], [], [])
    num_elements: int = 0
    first_sum: int = 0

    def __call__(self, tensors: list[Tensor]) -> list[tuple[Any, ...]]:
        """The arguments of each kernel, from the call's tensors; buffers are new."""
        if self.num_elements:
            memory = tensors[0].new_empty(self.num_elements, dtype=torch.float32)
            tensors = [*tensors, *map(memory.as_strided, *self.buffers)]
            if self.first_sum < self.num_elements:
                memory[self.first_sum :].zero_()
        arguments = []
        for pick, numbers in self.kernels:
            arguments.append((*pick(tensors), *numbers))
        return arguments


def forward_launches(call: FlashCall) -> Launches:
    """Of tensors q, k, v, out, lse."""
    bounds, aux = (None, None) if call.causal else (call.left, call.right), _package().AuxData(None, None)
    return Launches([(itemgetter(*range(5)), (call.scale, *call.tables, None, *bounds, None, None, aux, None, None))])


def backward_launches(call: FlashCall) -> Launches:
    """Of tensors q, k, v, dout, out, lse, dq, dk, dv: preparation, the main kernel, and rounding of fp32 sums.

    fp32 sums are dq's, cleared by the first kernel, and those of dk and dv if query heads share a kv head.
    """
    (q, k, v), bounds = call[:3], (None, None) if call.causal else (call.left, call.right)
    tile = _package()._tile_size_bwd_sm90(q.shape[-1], v.shape[-1], call.causal, bounds != (None, None))
    step = 64 if tile.dKV_swapAB else 32
    wide, v_wide = (-(-x.shape[-1] // step) * step for x in (q, v))  # padded head dims of sums
    q_begins, k_begins, q_lens, k_lens = call.tables

    def padded(x: Tensor, begins: Tensor | None, block: int) -> int:
        return (x.shape[-3] + (block if begins is None else len(begins) * block) - 1) // block * block

    rows, keys = padded(q, q_begins, tile.m_block_size), padded(k, k_begins, tile.n_block_size)
    before, heads, kv_heads = q.shape[:-3], q.shape[-2], k.shape[-2]
    of_q, of_k, aux = (q_begins, q_lens, None, None), (k_begins, k_lens, None, None), _package().AuxData(None, None)
    sizes, rounded = [(*before, heads, rows)] * 2 + [(*before, heads, rows * wide)], [(11, 6, call.scale, of_q)]
    sums = 11, 7, 8  # places of what the main kernel adds to: dk and dv themselves
    if heads != kv_heads:
        sizes += [(*before, kv_heads, keys * dim) for dim in (wide, v_wide)]
        sums, rounded = (11, 12, 13), [*rounded, (12, 7, call.scale, of_k), (13, 8, 1.0, of_k)]
    firsts = [*accumulate(map(math.prod, sizes), initial=0)]  # all are multiples of 16 bytes
    strides = [tuple(accumulate(size[:0:-1], mul, initial=1))[::-1] for size in sizes]
    main = call.scale, *call.tables, *bounds, None, None, None, aux, None, None
    kernels: list[Any] = [(itemgetter(4, 3, 9, 5, 10, 11), (*of_q, None, 1.0, None, None))]
    kernels.append((itemgetter(0, 1, 2, 3, 10, 9, *sums), main))
    kernels += [(itemgetter(total, into), (scale, *tables)) for total, into, scale, tables in rounded]
    return Launches(kernels, (sizes, strides, firsts[:-1]), firsts[-1], firsts[3])
