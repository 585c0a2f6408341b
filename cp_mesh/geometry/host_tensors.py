"""Tensors on the host that belong to a mask or a layout: what was read of them is remembered, not read again.

Neither identity nor `Tensor._version` tells that a caller's tensor is what it was: NumPy, as in a data loader, writes
unseen to memory that it shares with a tensor. So masks and layouts copy their tensors, nobody else writes to the copy,
and what planning reads of it is kept on it. A tensor that nobody owns is read in every call.
"""

from __future__ import annotations

import hashlib
import weakref
from collections.abc import Callable
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from cp_mesh._torch import times_written
from cp_mesh.errors import refuse

T = TypeVar("T")
_NOTES = "_cp_mesh_notes"  # on an owned tensor: what was read of it


class _Notes(dict[Any, Any]):
    """What was read of one tensor, by what reads it and the version of the tensor; no part of a copy of the tensor."""

    def __deepcopy__(self, memo: dict[int, Any]) -> _Notes:
        return _Notes()

    def __reduce__(self) -> tuple[Any, ...]:
        return _Notes, ()


def owned(tensor: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """A copy on the CPU that nobody else writes to; a meta tensor stays one."""
    device = "meta" if tensor.is_meta else "cpu"
    if torch.compiler.is_compiling():
        return tensor.detach().to(device, dtype or tensor.dtype, copy=True, memory_format=torch.contiguous_format)
    with torch.inference_mode(False):  # tensors of inference have no version
        copy = tensor.detach().to(device, dtype or tensor.dtype, copy=True, memory_format=torch.contiguous_format)
    setattr(copy, _NOTES, _Notes())
    return copy


def is_owned(tensor: Tensor) -> bool:
    return hasattr(tensor, _NOTES)


def read_once(tensor: Tensor, read: Callable[[Tensor], T]) -> T:
    """What ``read`` says of a tensor on the host, remembered on it if it is owned and nothing wrote to it since.

    Raises:
        ArgumentError: if the tensor has no content.
    """
    if tensor.device.type != "cpu":
        refuse("a tensor of a mask or layout", "one with content", tensor.device, "make it of a tensor with content")
    notes: _Notes | None = getattr(tensor, _NOTES, None)
    if notes is None:
        return read(tensor)
    key = read, times_written(tensor)
    if key not in notes:
        notes[key] = read(tensor)
    result: T = notes[key]
    return result


class Content:
    """A tensor on the host as a key of a cache: tensors of equal content are equal keys.

    Attributes:
        tensor: a view of an owned one, or a copy of another: it may be kept, and keeps no tensor of a mask alive.
    """

    def __init__(self, tensor: Tensor, key: tuple[Any, ...], notes: _Notes | None = None) -> None:
        self.tensor, self._key, self._notes = tensor, key, None if notes is None else weakref.ref(notes)

    @classmethod
    def of(cls, tensor: Tensor) -> Content:
        """Of an owned tensor what is known of it; of others, also on a device, what a copy holds now."""
        if is_owned(tensor):
            return read_once(tensor, _content)
        copy = owned(tensor)
        return cls(copy, read_once(copy, _digest))

    @property
    def is_gone(self) -> bool:
        """Whether it is of an owned tensor, which is no more."""
        return self._notes is not None and self._notes() is None

    def __hash__(self) -> int:
        return hash(self._key)

    def __eq__(self, other: object) -> bool:
        return self is other or (isinstance(other, Content) and self._key == other._key)


def _content(tensor: Tensor) -> Content:
    view, notes = tensor.detach(), getattr(tensor, _NOTES)
    setattr(view, _NOTES, _Notes(notes))
    return Content(view, _digest(tensor), notes)


def _digest(tensor: Tensor) -> tuple[Any, ...]:
    """Equal for tensors of equal content. No part of the tensor: what is noted on it must not keep it alive."""
    flat = tensor.flatten().numpy()
    # where values change, and to what: all there is, and little for documents and padding
    begins = np.flatnonzero(np.r_[np.ones(min(1, len(flat)), dtype=bool), flat[1:] != flat[:-1]])
    digest = hashlib.blake2b(begins.tobytes() + flat[begins].tobytes(), digest_size=16)
    return tuple(tensor.shape), tensor.dtype, digest.digest()
