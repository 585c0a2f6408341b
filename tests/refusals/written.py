"""What errors print: masks, layouts, meshes and placements as users write them."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

import cp_mesh
from cp_mesh import ContextParallel, Mask, ShardedSequence, Striped, ZigZag
from cp_mesh.geometry import Permuted
from refusals.calls import ARGUMENT, Cases, Core, cp_tp


def rows(rows: int = 4) -> Tensor:
    return torch.zeros(1, 2, rows, 8)


def attention(x: Tensor | None = None, **options: Any) -> None:
    x = rows() if x is None else x
    cp_mesh.attention(x, x, x, **{"mesh": cp_tp()["cp"]} | options)


def placed(*placements: Any, **options: Any) -> None:
    given = (DTensor.from_local(rows(), cp_tp(), each, run_check=False) for each in placements)
    cp_mesh.attention(*given, **options)


def style(**options: Any) -> ContextParallel:
    return ContextParallel(ShardedSequence(cp_tp()["cp"]), **options)


def plan(mesh: Any = None, **styles: Any) -> None:
    cp_mesh.parallelize(nn.ModuleDict({"core": Core()}), mesh or cp_tp()["cp"], styles)


class OneTensor(Core):
    def forward(self, x: Tensor, is_causal: bool = True) -> Tensor:  # type: ignore[override]
        return torch.nn.functional.scaled_dot_product_attention(x, x, x, is_causal=is_causal)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = OneTensor(), OneTensor()

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x))


def blocks(planned: str = "*.*", length: int | None = None) -> nn.Module:
    core = ContextParallel(ShardedSequence(cp_tp()["cp"], length=length), mask=Mask(window=(3, 0)))
    return cp_mesh.parallelize(nn.Sequential(Block()), cp_tp()["cp"], {planned: core})


REPLICATED = [Shard(2), Replicate()]
CASES: Cases = {
    "a layout by name": (ARGUMENT, "layout: expected a Layout, got 'zigzag'; ZigZag(), ",
        lambda: attention(layout="zigzag")),
    "a layout's class": (ARGUMENT, "layout: expected a Layout, got ZigZag; ZigZag(), ",
        lambda: attention(layout=ZigZag)),
    "a layout for a mask": (ARGUMENT, "mask: expected a Mask, got Permuted([0, 1, 2, ..., 98]); ",
        lambda: attention(mask=Permuted(range(99)))),
    "the layout of a sequence by name": (ARGUMENT, "expected a Layout or \"auto\", got 'striped'; "
        "pass an instance: ZigZag(), with parentheses", lambda: ShardedSequence(cp_tp()["cp"], "striped")),
    "a whole mesh for a sequence": (ARGUMENT, "got DeviceMesh(cp=2, tp=2); pass the cp axis",
        lambda: ShardedSequence(cp_tp())),
    "a whole mesh for a plan": (ARGUMENT, "parallelize: mesh: expected one axis of a DeviceMesh, got "
        "DeviceMesh(cp=2, tp=2); pass", lambda: plan(cp_tp(), core=style())),
    "another axis for a plan": (ARGUMENT, "expected the axis of the ShardedSequence, DeviceMesh(cp=2), got "
        "DeviceMesh(tp=2); ", lambda: plan(cp_tp()["tp"], core=style())),
    "a style's class": (ARGUMENT, "expected an instance of a ParallelStyle, got ContextParallel; ",
        lambda: plan(core=ContextParallel)),
    "a layout in a style": (ARGUMENT, "ContextParallel.layout: expected a function that returns a Layout, got "
        "Striped(); ", lambda: style(layout=Striped())),
    "a call and a mask": (ARGUMENT, "is_causal: expected True, as in the style's Mask(causal=True, window=(3, 0)), got "
        "False; ", lambda: blocks()[0].first(rows(), is_causal=False)),
    "dtypes": (ARGUMENT, "q, k, v: expected one dtype, got torch.float32, torch.bfloat16, torch.float32; ",
        lambda: cp_mesh.attention(rows(), rows().bfloat16(), rows(), mesh=cp_tp()["cp"])),
    "rows of a layout": (ARGUMENT, "of 2, zigzag layout, seq_len=12), got 4 rows; ", lambda: attention(seq_len=12)),
    "whole tokens": (ARGUMENT, "got 8 rows; these look like whole sequences: shard them, sequence.shard({...}), or let "
        "a ShardedModel do it", lambda: attention(rows(8), seq_len=8)),
    "whole tokens of a padded sequence": (ARGUMENT, "got 7 rows; these look like whole sequences: shard them",
        lambda: blocks(length=7)(rows(7))),
    "a layer outside of the plan, without a root": (ARGUMENT, "plan: expected every self-attention in a "
        "ContextParallel module, got scaled_dot_product_attention outside of one, in '0.second', where each rank "
        "attends to its shard alone; add '0.second': ContextPara", lambda: blocks("*.first")(rows())),
    "a misspelt method": (ARGUMENT, "method: expected one of auto, ring, all_gather, ulysses, hybrid, got "
        "'all-gahter'; method='all_gather' works", lambda: attention(method="all-gahter")),
    "a layout as a method": (ARGUMENT, "got 'zigzag'; method='ring' works", lambda: attention(method="zigzag")),
    "placements": (ARGUMENT, "key's placements: expected query's, (Shard(2), Replicate()) on DeviceMesh(cp=2, tp=2), "
        "got (Shard(2), Partial(sum)) on DeviceMesh(cp=2, tp=2); ",
        lambda: placed(REPLICATED, [Shard(2), Partial()], [Shard(2), Partial()])),
    "the group of all ranks": (ARGUMENT, "expected an axis of the DTensors' mesh, DeviceMesh(cp=2, tp=2), got "
        "ProcessGroup of ranks [0, 1, 2, 3]; ", lambda: placed(*[REPLICATED] * 3, mesh=dist.group.WORLD)),
}  # fmt: skip
