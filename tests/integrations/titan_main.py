"""A copy of the interface of torchtitan's main branch that `cp_mesh.integrations.torchtitan_main` is written against.

Names, signatures and what they mean are those of pytorch/torchtitan at 1bef8b42 (models/common/attention/attention.py
and cp_attention.py, distributed/spmd_types.py and parallelism_context.py); the bodies are written here, as little as a
test needs. It says nothing about that branch's Trainer.
"""

from __future__ import annotations

import sys
import types
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar, Generic, NamedTuple, TypeVar

import torch.distributed as dist
from inside import path_of
from torch import Tensor, nn

GlobalMetadata, LocalMetadata = TypeVar("GlobalMetadata"), TypeVar("LocalMetadata")


class MeshAxisName:
    CP = "cp"


class VarlenAttentionMetadata(NamedTuple):
    cu_seq_q: Tensor
    cu_seq_k: Tensor
    max_q: int
    max_k: int


class VarlenInnerAttention(nn.Module):
    @dataclass(kw_only=True, slots=True)
    class Config:
        window_size: tuple[int, int] = (-1, 0)

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.window_size = config.window_size


class CPAttention(ABC, Generic[GlobalMetadata, LocalMetadata]):
    @dataclass(kw_only=True, slots=True)
    class Config:
        pass

    @staticmethod
    @abstractmethod
    def prepare_cp_metadata(attention_metadata: GlobalMetadata, *, permutation: Tensor | None) -> LocalMetadata: ...


@dataclass(kw_only=True)
class ContextParallelTransform:
    inner_attention_map: dict[type, type]

    def __post_init__(self) -> None:
        if not all(issubclass(kind, CPAttention) for kind in self.inner_attention_map.values()):
            raise ValueError("must inherit CPAttention")


class Mesh:
    """The cp group of the mesh that is current, None outside of one."""

    groups: ClassVar[dict[str, dist.ProcessGroup]] = {}


def spmd_mesh_group(axis: str) -> dist.ProcessGroup | None:
    return Mesh.groups.get(axis)


def no_typecheck(out_types: Any = None) -> Any:
    return lambda function: function


@contextmanager
def torchtitan_main(group: dist.ProcessGroup | None) -> Iterator[Any]:
    """The module under test, imported with this interface in the place of torchtitan, and ``group`` as its cp axis."""
    interface: dict[str, dict[str, Any]] = {
        "spmd_types": {"no_typecheck": no_typecheck, "PartitionSpec": lambda *axes: axes},
        "torchtitan": {},
        "torchtitan.distributed": {},
        "torchtitan.distributed.parallelism_context": {"MeshAxisName": MeshAxisName},
        "torchtitan.distributed.spmd_types": {"spmd_mesh_group": spmd_mesh_group},
        "torchtitan.models": {},
        "torchtitan.models.common": {},
        "torchtitan.models.common.attention": {},
        "torchtitan.models.common.attention.attention": {
            "VarlenAttentionMetadata": VarlenAttentionMetadata,
            "VarlenInnerAttention": VarlenInnerAttention,
        },
        "torchtitan.models.common.attention.cp_attention": {"CPAttention": CPAttention},
    }
    tested = path_of("torchtitan_main")
    before = {name: sys.modules.pop(name, None) for name in (*interface, tested)}
    for name, content in interface.items():
        sys.modules[name] = types.ModuleType(name)
        vars(sys.modules[name]).update(content)
    Mesh.groups = {} if group is None else {MeshAxisName.CP: group}
    try:
        __import__(tested)
        yield sys.modules[tested]
    finally:
        Mesh.groups = {}
        for name, module in before.items():
            sys.modules.pop(name, None)
            if module is not None:
                sys.modules[name] = module
