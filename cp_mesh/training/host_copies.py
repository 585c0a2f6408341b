"""Tensors that wait in host memory between the passes of a block, copied on a stream of their own.

A block's tensors are copied to the host while the block computes, and leave the GPU when the next block begins. In the
backward they come back while the block behind is computed again. Two rules make this safe. The stream that computes
waits for a copy before it uses the target, or lets others use the memory of either side (`_OffloadedTensor.evict`); the
copying stream waits for the computing one before each copy. All copies of a device are in one stream, so a buffer of
the host may be given to the next tensor while it is still read.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext, suppress
from functools import partial
from typing import Any
from weakref import finalize, ref

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from cp_mesh._torch import dispatching, local_tensor, times_written
from cp_mesh.errors import UnsupportedError, refuse


class _NoStreams(nullcontext[None]):
    """In the place of `torch.cuda` and its streams on the CPU, where a copy is done when it returns."""

    def current_stream(self, _: Any = None) -> Any:
        return self

    Stream = stream = wait_stream = wait_event = record_event = current_stream


def streams_of(device: torch.device) -> Any:
    return torch.cuda if device.type == "cuda" else _NoStreams()


_pinned: dict[int, int] = {}  # bytes by address


def pinned_bytes() -> int:
    """Host memory that `pinned` holds, in bytes; it is not in `torch.cuda.host_memory_stats`."""
    return sum(_pinned.values())


def pinned(size: int, stream: Any) -> Tensor:
    """Pinned memory of ``size`` bytes; ``stream``: the one that copies from and to it.

    `torch.empty(pin_memory=True)` takes the next power of two, up to twice as many bytes as asked for. Small buffers
    come from there: little is lost, and registering would pin whole pages.
    """
    if size < 2**20:
        return torch.empty(size, dtype=torch.uint8, pin_memory=True, device="cpu")
    x = torch.empty(size, dtype=torch.uint8, device="cpu")
    pointer = x.data_ptr()
    error = int(torch.cuda.cudart().cudaHostRegister(pointer, size, 0))
    if error:
        with suppress(RuntimeError):  # takes the error, which PyTorch's next launch would raise
            torch.ones((), device=stream.device)
        hint = "take more ranks, or Checkpointed(offload=True, keep_attention=False)"
        raise MemoryError(f"Checkpointed(offload=True): cannot pin {size} bytes, CUDA error {error}; {hint}")
    _pinned[pointer] = size
    finalize(x, _unpin, pointer, stream).atexit = False
    return x


def _unpin(pointer: int, stream: Any) -> None:
    stream.synchronize()  # copies of this memory may be under way
    torch.cuda.cudart().cudaHostUnregister(pointer)
    del _pinned[pointer]


class CopyStream:
    """Of one device: the stream that copies, free buffers of the host, and which blocks have tensors on the device."""

    def __init__(self, device: torch.device) -> None:
        self.device, self.streams = device, streams_of(device)
        self.stream = self.streams.Stream(device)
        self.free: list[Tensor] = []
        self.blocks_on_device: list[ref[OffloadedBlock]] = []

    def buffer(self, size: int) -> Tensor:
        """Host memory of at least ``size`` bytes; not of far more, or lse would take a buffer of hidden states."""
        if fits := [i for i, x in enumerate(self.free) if size <= x.numel() <= 8 * size]:
            return self.free.pop(min(fits, key=lambda i: self.free[i].numel()))
        del self.free[:1]  # so their number stays that of the tensors kept at a time
        on_gpu = self.device.type == "cuda"
        return pinned(size, self.stream) if on_gpu else torch.empty(size, dtype=torch.uint8, device="cpu")

    def keep_on_device(self, *blocks: OffloadedBlock | None) -> None:
        """Make the tensors of all other blocks leave the device."""
        for block in [each() for each in self.blocks_on_device]:
            if block is not None and block not in blocks:
                block.evict()
        self.blocks_on_device = [ref(block) for block in blocks if block is not None]


class OffloadedBlock:
    """What one call of a block keeps, until the graph that holds the results of `keep` goes."""

    def __init__(self, what: str, copies: CopyStream) -> None:
        self.what, self.copies, self.tensors = what, copies, list[_OffloadedTensor]()
        self.before = copies.blocks_on_device[-1] if copies.blocks_on_device else lambda: None  # of the block before
        copies.keep_on_device(self)

    def keep(self, x: Tensor) -> partial[Tensor]:
        """Start to copy a tensor to the host; the result returns it on the device."""
        local: Any = local_tensor(x) if isinstance(x, DTensor) else x
        if hasattr(local, "trigger_wait"):  # an AsyncCollectiveTensor, which the copying stream would wait for
            local = local.trigger_wait()
        with dispatching("ADInplaceOrView"):
            local = local.detach()  # without its graph, which holds this; writes to x count
        if type(local) is not Tensor:
            refuse(self.what, "a Tensor or DTensor", type(local).__name__, "Checkpointed()", UnsupportedError)
        if not local.nbytes:  # a result of attention that was not asked for
            return partial(lambda wrap: wrap(local.detach()), _wrap(x))
        self.tensors.append(_OffloadedTensor(self.copies, local))
        return partial(self._get, len(self.tensors) - 1, _wrap(x))

    def _get(self, number: int, wrap: Callable[[Tensor], Tensor]) -> Tensor:
        if number == 0:  # the backward of the block begins
            before = self.before()
            self.copies.keep_on_device(self, before)
            for each in (*self.tensors, *(before.tensors if before else ())):
                each.prefetch()
        return wrap(self.tensors[number].get(self.what))

    def evict(self) -> None:
        for each in self.tensors:
            each.evict()

    def __del__(self) -> None:
        self.evict()
        self.copies.free += [each.buffer for each in self.tensors]


def _wrap(x: Tensor) -> Callable[[Tensor], Tensor]:
    """Makes a DTensor like ``x`` of a local tensor."""
    if not isinstance(x, DTensor):
        return lambda local: local
    like: dict[str, Any] = {"shape": x.shape, "stride": x.stride(), "run_check": False}
    return partial(DTensor.from_local, device_mesh=x.device_mesh, placements=x.placements, **like)


class _OffloadedTensor:
    """A tensor in host memory, and for a while as ``device_copy`` on its device.

    ``done`` ends a copy between them. ``computing``: the stream that computed when it began, in whose order the memory
    of ``device_copy`` is used.
    """

    def __init__(self, copies: CopyStream, x: Tensor) -> None:
        self.copies, self.like, self.written = copies, torch.empty_like(x, device="meta"), False
        self.buffer = copies.buffer(x.nbytes)
        flat = self.buffer[: x.nbytes].view(x.dtype)
        self.host_copy = flat.as_strided(self.like.shape, self.like.stride())
        self.device_copy: Tensor | None = None
        self._copy(x, self.host_copy, x)

    def _copy(self, device_copy: Tensor, to: Tensor, source: Tensor) -> None:
        streams, stream = self.copies.streams, self.copies.stream
        self.device_copy, self.computing = device_copy, streams.current_stream(self.copies.device)
        stream.wait_stream(self.computing)  # until the source is computed, and the memory of the target no longer used
        with streams.stream(stream):
            to.copy_(source, non_blocking=True)
        self.done, self.times = stream.record_event(), times_written(device_copy)

    def prefetch(self) -> None:
        """Start to copy the tensor to the device, if it is not there."""
        if self.device_copy is None or self.computing != self.copies.streams.current_stream(self.copies.device):
            self.evict()
            x = torch.empty_like(self.like, device=self.copies.device)
            self._copy(x, x, self.host_copy)

    def get(self, what: str) -> Tensor:
        """The tensor on the device. Its memory is the caller's, who uses it in the current stream."""
        self.prefetch()
        x = self.device_copy
        self.evict()
        if x is None or self.written:
            hint = "write out of place, x = x + y, not x += y"
            refuse(what, "an input and results of attention that stay", "a write in place", hint, UnsupportedError)
        return x

    def evict(self) -> None:
        """Leave the device, and let its memory be used for what is computed after the copy."""
        if self.device_copy is not None:
            self.written |= times_written(self.device_copy) != self.times
            self.computing.wait_event(self.done)
            self.device_copy = None
