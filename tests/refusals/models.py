"""Models: cores over tp, styles and sequences that do not belong together, layouts of one's own."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
from inside import room
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

import cp_mesh
from cp_mesh import ContextParallel, Layout, Mask, ShardedModel, ShardedSequence, Striped, ZigZag
from cp_mesh.geometry.layouts import Run
from refusals.calls import (
    ARGUMENT,
    UNSUPPORTED,
    B,
    Cases,
    Core,
    D,
    H,
    S,
    attend,
    cp,
    cp_tp,
    place,
    random,
    run_core,
    sequence,
)


def core_over_tp(*tensors: DTensor) -> None:
    axis = cp_tp()["cp"]
    cp_mesh.parallelize(Core(), axis, {"": ContextParallel(ShardedSequence(axis))})(*tensors)


def heads_over_tp(placement: Any, shape: tuple[int, ...] = (B, H, S, D)) -> None:
    core_over_tp(*(DTensor.from_local(random(*shape), cp_tp()["tp"], [placement]) for _ in range(3)))


def uneven_heads() -> None:
    tp, shape = cp_tp()["tp"], torch.Size((B, 3, S, D))
    x = random(B, 2 - tp.get_local_rank(), S, D)
    core_over_tp(*[DTensor.from_local(x, tp, [Shard(1)], shape=shape, stride=(3 * S * D, S * D, D, 1))] * 3)


class WithMultihead(Core):
    def __init__(self) -> None:
        super().__init__()
        self.other = nn.MultiheadAttention(D, 1, batch_first=True, dtype=torch.float64)

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return self.other(q[:, 0], q[:, 0], q[:, 0])[0][:, None] + super().forward(q, k, v)


class Tiny(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.core, self.head, self.scale = Core(), nn.Linear(D, 4), nn.Parameter(torch.ones(1))

    def forward(self, tokens: Tensor) -> Tensor:
        x = tokens.double().view(1, 1, -1, 1).expand(1, H, -1, D)
        return self.core(x, x, x)


def spread(core: ShardedSequence | None = None, *, root: ShardedSequence | None = None) -> nn.Module:
    plan = {"": ShardedModel(root or sequence(), positions=None), "core": ContextParallel(core or sequence())}
    return cp_mesh.parallelize(Tiny(), cp(), plan)


def sums_partly(alone: bool) -> None:
    """Gradients are reduced over dp alone, or those of the head alone."""
    grid = cp_tp(names=("dp", "cp"))
    model = cp_mesh.parallelize(Tiny(), grid["cp"], {"core": ContextParallel(ShardedSequence(grid["cp"]))})
    fully_shard(model.head, mesh=grid["cp"]) if alone else fully_shard(model, mesh=grid["dp"])
    cp_mesh.sum_gradients(model)


def root_later() -> None:
    model = cp_mesh.parallelize(Tiny(), cp(), {"core": ContextParallel(sequence(layout=Striped()))})
    cp_mesh.parallelize(model, cp(), {"": ShardedModel(sequence(length=S), positions=None)})(torch.ones(1, S).long())


class Backwards(ZigZag):
    def runs(self, seq_len: int, cp_size: int, cp_rank: int) -> tuple:
        return super().runs(seq_len, cp_size, cp_size - 1 - cp_rank)


@dataclass(frozen=True)
class Broken(Layout):
    """Not every position is held once."""

    how: int

    def runs(self, seq_len: int, cp_size: int, cp_rank: int) -> tuple:
        rows = seq_len // cp_size
        return {
            0: (Run(0, 1, rows),),
            1: (Run(rows * cp_rank + rows - 1, -1, rows),),
            2: (Run(rows * cp_rank + cp_rank, 1, rows),),
            3: (Run(rows * cp_rank, 1, rows),),
        }[self.how]

    def spec(self) -> str:
        return f"broken:{self.how % 3}"


def attend_broken(how: int) -> None:
    with mock.patch.dict(room("layouts").LAYOUTS, {"broken": Broken}):
        attend(layout=Broken(how))


CASES: Cases = {
    "a core on rows over tp": (UNSUPPORTED, "placement on mesh axis 'tp'", lambda: heads_over_tp(Shard(2))),
    "a core on head dims over tp": (UNSUPPORTED, "placement on mesh axis 'tp'", lambda: heads_over_tp(Shard(3))),
    "a core on partial sums over tp": (UNSUPPORTED, "placement on mesh axis 'tp'", lambda: heads_over_tp(Partial())),
    "a core on uneven heads over tp": (ARGUMENT, "the size of axis 'tp'", uneven_heads),
    "multi-head attention in a core": (UNSUPPORTED, "multi_head_attention", lambda: run_core(WithMultihead())),
    "gradients summed over dp alone": (ARGUMENT, "holds the cp ranks", lambda: sums_partly(False)),
    "gradients summed of a part": (ARGUMENT, "holds the cp ranks", lambda: sums_partly(True)),
    "heads on an axis without a name": (ARGUMENT, 'an axis named "cp"', lambda: cp_mesh.attention(
        *[place((B, H, S, D), cp_tp(names=("rows", "columns"))["columns"], Shard(1))] * 3)),
    "a root and a core of other layouts": (ARGUMENT, "sequence: expected one for the root and its cores, got zigzag",
        lambda: spread(sequence(layout=Striped(), length=S), root=sequence(length=S))),
    "a root and a core of other lengths": (ARGUMENT, "sequence: expected one for the root and its cores, got zigzag",
        lambda: spread(sequence(length=S - 1), root=sequence(length=S))),
    "a root of another layout, later": (ARGUMENT, "got striped in the core, zigzag at the root", root_later),
    "a layout that is not listed": (ARGUMENT, "LAYOUTS", lambda: attend(layout=Backwards())),
    "a layout that holds a token twice": (ARGUMENT, "position 0 of 24 held 4 times", lambda: attend_broken(0)),
    "a layout of a negative stride": (ARGUMENT, "runs of stride 1 or more", lambda: attend_broken(1)),
    "a layout beyond the sequence": (ARGUMENT, "no position 2", lambda: attend_broken(2)),
    "a layout whose spec loses its parameter": (ARGUMENT, "from its spec", lambda: attend_broken(3)),
    "a negative scale": (ARGUMENT, "scale|a positive number", lambda: attend(scale=-1.0)),
    "labels of another name without a padding": (ARGUMENT, "pad_value",
        lambda: sequence(length=5).shard({"lm_labels": torch.zeros(1, 5, dtype=torch.int64)})),
    "positions of another length": (ARGUMENT, "this sequence's length",
        lambda: sequence(length=7, pad=False).positions(9)),
    "DTensors for logits": (ARGUMENT, "DTensors", lambda: cp_mesh.cross_entropy(
        DTensor.from_local(torch.zeros(1, 4, 7), cp(), [Replicate()]), torch.zeros(1, 4).long(), cp())),
    "a misspelt method of a style": (ARGUMENT, "method: expected one of auto|got 'rnig'",
        lambda: ContextParallel(sequence(), method="rnig")),
    "a misspelt kernel of a style": (ARGUMENT, "kernel: expected one of auto|got 'rnig'",
        lambda: ContextParallel(sequence(), kernel="rnig")),
    "a misspelt transport of a style": (ARGUMENT, "transport: expected one of auto|got 'rnig'",
        lambda: ContextParallel(sequence(), transport="rnig")),
    "a mask function of other arguments": (ARGUMENT, "a function of the core's call arguments, "
        "(Tensor, Tensor, Tensor)|got one of (q); take *args, **kwargs",
        lambda: run_core(Core(), mask=lambda q: Mask())),
}  # fmt: skip
