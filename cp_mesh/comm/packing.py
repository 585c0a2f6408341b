"""Packing: rows of several tensors side by side in one buffer, so that one transfer moves all data of a row.

A buffer is [rows, features]: row by row, the heads of the first tensor for every batch entry, then those of the next.
Any range of rows is one contiguous piece of memory. Each tensor is a strided view [B, H, rows, D] of the buffer with
last stride 1, which kernels require.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache

import torch
from torch import Tensor


@dataclass(frozen=True, eq=False)
class Packing:
    """The features of a row; made by `make_packing`.

    Attributes:
        shapes: (B, H, D) of each tensor, without its rows.
        dtype: of all of them.
        device: of the buffers.
    """

    shapes: tuple[tuple[int, int, int], ...]
    dtype: torch.dtype
    device: torch.device

    @classmethod
    def of(cls, tensors: Sequence[Tensor], dtype: torch.dtype | None = None) -> Packing:
        """Return the packing of [B, H, S, D] tensors."""
        shapes = []
        for x in tensors:
            batch, heads, _, head_dim = x.shape
            shapes.append((batch, heads, head_dim))
        return make_packing(tuple(shapes), dtype or tensors[0].dtype, tensors[0].device)

    @cached_property
    def features(self) -> int:
        """Number of elements in a row."""
        return sum(batch * heads * head_dim for batch, heads, head_dim in self.shapes)

    @cached_property
    def row_bytes(self) -> int:
        return self.features * self.dtype.itemsize

    def empty(self, num_rows: int) -> Tensor:
        """Return a new buffer [num_rows, features]."""
        return torch.empty(num_rows, self.features, dtype=self.dtype, device=self.device)

    def views(self, buffer: Tensor) -> tuple[Tensor, ...]:
        """Return the tensors [B, H, rows, D] that lie in a buffer."""
        views, offset = [], buffer.storage_offset()
        num_rows, row = buffer.shape[0], buffer.stride(0)
        for batch, heads, head_dim in self.shapes:
            size, stride = (batch, heads, num_rows, head_dim), (heads * head_dim, head_dim, row, 1)
            views.append(buffer.as_strided(size, stride, offset))  # one call: this runs on the host, for every stage
            offset += batch * heads * head_dim
        return tuple(views)


make_packing = lru_cache(maxsize=256)(Packing)
"""Makes a `Packing`, the same one for the same rows."""
