"""Host tensors that belong to a mask or a layout. What was computed from their content is cached on them.

Neither its identity nor `Tensor._version` shows that a caller's tensor is unchanged: NumPy, as in a data loader, writes
to shared memory without raising the version. So masks and layouts copy their tensors, nobody else writes to the copy,
and what planning computes from it is kept on it. A tensor that is not such a copy is read in every call.
"""

from __future__ import annotations

import hashlib
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from cp_mesh._torch import times_written
from cp_mesh.errors import refuse

T = TypeVar("T")
_NOTES = "_cp_mesh_notes"  # attribute of an owned tensor: cached results


class _Notes(dict[Any, Any]):
    """Results cached for one tensor, by function and version of the tensor; a copy of the tensor does not get them."""

    def __deepcopy__(self, memo: dict[int, Any]) -> _Notes:
        return _Notes()

    def __reduce__(self) -> tuple[Any, ...]:
        return _Notes, ()


def owned(tensor: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """Return a copy on the CPU that nobody else writes to; a meta tensor stays on meta."""
    return own(tensor.detach(), dtype or tensor.dtype) if torch.compiler.is_compiling() else _copy(tensor, dtype)


def _copy(tensor: Tensor, dtype: torch.dtype | None) -> Tensor:
    with lasting():  # others have no version
        like = tensor.detach().to(_device_of(tensor), dtype, copy=True, memory_format=torch.contiguous_format)
    setattr(like, _NOTES, _Notes())
    return like


@torch.library.custom_op("cp_mesh::own", mutates_args=())
def own(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """`owned` in compiled code, whose own copies have no notes: each layer and pass would read them anew."""
    return _copy(tensor, dtype)


@own.register_fake
def _(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.empty(tensor.shape, dtype=dtype, device=_device_of(tensor))


def _device_of(tensor: Tensor) -> str:
    return "meta" if tensor.is_meta else "cpu"


@contextmanager
def lasting() -> Iterator[None]:
    """Around what makes tensors that outlive the call: those of `torch.inference_mode` can be in no later backward."""
    with torch.inference_mode(False), torch.no_grad():
        yield


def is_owned(tensor: Tensor) -> bool:
    return hasattr(tensor, _NOTES)


def read_once(tensor: Tensor, read: Callable[[Tensor], T]) -> T:
    """Return ``read(tensor)`` for a host tensor, cached on an owned tensor until something writes to the tensor.

    Raises:
        ArgumentError: if the tensor is not on the CPU.
    """
    if tensor.device.type != "cpu":
        refuse("a tensor of a mask or layout", "one with content", tensor.device, "make it from a tensor with content")
    notes: _Notes | None = getattr(tensor, _NOTES, None)
    if notes is None:
        return read(tensor)
    key = read, times_written(tensor)
    if key not in notes:
        notes[key] = read(tensor)
    result: T = notes[key]
    return result


class Content:
    """A tensor on the host as a cache key: tensors of equal content are equal keys.

    Attributes:
        tensor: a view of an owned tensor, or a copy of another one. Keeping it keeps no tensor of a mask alive.
    """

    def __init__(self, tensor: Tensor, key: tuple[Any, ...], notes: _Notes | None = None) -> None:
        self.tensor, self._key, self._notes = tensor, key, None if notes is None else weakref.ref(notes)

    @classmethod
    def of(cls, tensor: Tensor) -> Content:
        """Return the cached key of an owned tensor; for other tensors, on any device, the key of a copy made now."""
        if is_owned(tensor):
            return read_once(tensor, _content)
        copy = owned(tensor)
        return cls(copy, read_once(copy, _digest))

    @property
    def is_gone(self) -> bool:
        """Whether the key was made for an owned tensor that no longer exists."""
        return self._notes is not None and self._notes() is None

    @property
    def number(self) -> int:
        """The digest as an integer, equal in all processes."""
        return int.from_bytes(self._key[-1])

    def __hash__(self) -> int:
        return hash(self._key)

    def __eq__(self, other: object) -> bool:
        return self is other or (isinstance(other, Content) and self._key == other._key)


def _content(tensor: Tensor) -> Content:
    view, notes = tensor.detach(), getattr(tensor, _NOTES)
    setattr(view, _NOTES, _Notes(notes))
    return Content(view, _digest(tensor), notes)


def _digest(tensor: Tensor) -> tuple[Any, ...]:
    """Return a digest that is equal for tensors of equal content, and holds no tensor: a cached result must not."""
    flat = tensor.flatten().numpy()
    # the places where values change and the new values: equivalent to the content, and short for documents and padding
    begins = np.append(0, np.flatnonzero(flat[1:] != flat[:-1]) + 1)[: len(flat)]
    digest = hashlib.blake2b(begins.tobytes() + flat[begins].tobytes(), digest_size=16)
    return tuple(tensor.shape), tensor.dtype, digest.digest()
