"""The formats of a caller's tensors: which dim of q, k, v, out and lse is which."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.placement_types import Placement


@dataclass(frozen=True)
class Format:
    """Which dims are batch, heads and sequence. The last dim of q, k, v and out is the head dim; lse has none.

    Attributes:
        name: as in messages and docs.
        dims: dims of q, k, v and out by part, "batch", "heads" or "sequence"; packed tensors have no batch.
        lse_dims: the dims of lse by part.
    """

    name: str
    dims: dict[str, int]
    lse_dims: dict[str, int]

    def to_bhsd(self, *tensors: Tensor) -> Sequence[Tensor]:
        """q, k, v or out as [B, H, S, D]: the tensor itself, or a view."""
        if "batch" not in self.dims:  # packed
            return [x.transpose(0, 1)[None] for x in tensors]
        return tensors if self.dims["heads"] == 1 else [x.transpose(1, 2) for x in tensors]

    def from_bhsd(self, *tensors: Tensor) -> Sequence[Tensor]:
        """[B, H, S, D] tensors in this format: the tensors themselves, or views."""
        if "batch" not in self.dims:  # packed
            return [x[0].transpose(0, 1) for x in tensors]
        return tensors if self.dims["heads"] == 1 else [x.transpose(1, 2) for x in tensors]

    def lse_to_bhs(self, lse: Tensor) -> Tensor:
        """lse as [B, H, S]: the tensor itself, or a view."""
        return lse if "batch" in self.dims else lse[None]

    def lse_from_bhs(self, lse: Tensor) -> Tensor:
        """A [B, H, S] lse in this format: the tensor itself, or a view."""
        return lse if "batch" in self.dims else lse[0]

    def part(self, placement: Placement) -> str:
        """The part of q that a mesh axis with this placement shards, or "whole" if none."""
        return next((part for part, dim in self.dims.items() if placement == Shard(dim)), "whole")

    def rows(self) -> list[tuple[str, Placement, Placement]]:
        """All ways to place q on a mesh axis: the sharded part, the placement of q, and the placement of lse."""
        sharded = [(part, Shard(dim), Shard(self.lse_dims[part])) for part, dim in self.dims.items()]
        return [*sharded, ("whole", Replicate(), Replicate())]


FORMATS = {
    2: Format("[B, H, S, D]", {"batch": 0, "heads": 1, "sequence": 2}, {"batch": 0, "heads": 1, "sequence": 2}),
    1: Format("[B, S, H, D]", {"batch": 0, "sequence": 1, "heads": 2}, {"batch": 0, "heads": 1, "sequence": 2}),
    0: Format("[T, H, D]", {"sequence": 0, "heads": 1}, {"heads": 0, "sequence": 1}),
}
"""Formats by their sequence dim."""
