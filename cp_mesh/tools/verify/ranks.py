"""The ranks of a mesh, by what they hold, as `cp_mesh.verify_model` sums and compares over them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from cp_mesh.errors import refuse


@dataclass(frozen=True)
class Ranks:
    """The ranks, by what they hold.

    Attributes:
        mesh: None for one process without groups.
        cp: the axis whose ranks hold other tokens of the same sequences, if there is one.
        same: axes whose ranks hold the same tokens, as tensor parallelism does.
    """

    mesh: DeviceMesh | None
    cp: str | None
    same: tuple[str, ...]

    @classmethod
    def of(cls, mesh: DeviceMesh | None, cp: str, same: Sequence[str]) -> Ranks:
        if mesh is None:
            return cls(None, None, ())
        names = mesh.mesh_dim_names
        if names is None:
            refuse("verify_model: mesh", "a DeviceMesh whose axes have names", mesh, 'mesh_dim_names=("dp", "cp")')
        alone = names[0] if len(names) == 1 and names[0] not in same else None
        return cls(mesh, alone or (cp if cp in names else None), tuple(name for name in names if name in same))

    @property
    def axes(self) -> tuple[str, ...]:
        return () if self.mesh is None else tuple(self.mesh.mesh_dim_names or ())

    @property
    def dp(self) -> tuple[str, ...]:
        """Axes whose ranks hold other sequences."""
        return tuple(name for name in self.axes if name not in (self.cp, *self.same))

    @property
    def data(self) -> tuple[str, ...]:
        """Axes whose ranks hold other tokens."""
        return tuple(name for name in self.axes if name not in self.same)

    def size(self, *axes: str) -> int:
        size = 1
        for axis in axes:
            assert self.mesh is not None
            size *= self.mesh[axis].size()
        return size

    @property
    def cp_size(self) -> int:
        return self.size(self.cp) if self.cp else 1

    def group(self, axis: str) -> dist.ProcessGroup:
        assert self.mesh is not None
        return self.mesh.get_group(axis)

    def reduce(self, x: Tensor, op: Any = dist.ReduceOp.SUM, axes: Sequence[str] | None = None) -> Tensor:
        """``x`` summed, or as ``op`` says, over the ranks of some axes, all if left out; in place."""
        for axis in self.axes if axes is None else axes:
            dist.all_reduce(x, op, group=self.group(axis))
        return x

    def gather(self, x: Any, axes: Sequence[str] | None = None) -> list[Any]:
        """What every rank of some axes, all if left out, holds in ``x``."""
        found = [x]
        for axis in self.axes if axes is None else axes:
            answers: list[list[Any]] = [[] for _ in range(self.size(axis))]
            dist.all_gather_object(answers, found, group=self.group(axis))
            found = [one for answer in answers for one in answer]
        return found

    @property
    def is_first(self) -> bool:
        return self.mesh is None or dist.get_rank() == 0
