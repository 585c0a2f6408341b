"""Calls that rows of the tables are made of, on four ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from inside import path_of, room
from ranks import mesh
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement
from torch.nn.attention.flex_attention import BlockMask, flex_attention
from torch.utils.checkpoint import checkpoint

import cp_mesh
from cp_mesh import ContextParallel, Mask, ShardedSequence, attention
from cp_mesh.geometry import Permuted

groups = room("groups")

WORLD_SIZE = 4
B, H, K, S, D = 2, 8, 4, 24, 16  # batch, query heads, kv heads, whole sequence, head dim
DEVICES = "cpu", "cpu", "cuda"
SDPA = F.scaled_dot_product_attention
ROWS = S // WORLD_SIZE


def cp() -> DeviceMesh:
    return mesh((4,), ("cp",))


def cp_tp(cp_size: int = 2, tp_size: int = 2, names: tuple[str, ...] = ("cp", "tp")) -> DeviceMesh:
    return mesh((cp_size, tp_size), names)


def two_axes() -> DeviceMesh:
    """One dim may be sharded on two axes beside cp."""
    return mesh((2, 2, 1), ("first", "second", "cp"))


def cp_of_two_axes() -> DeviceMesh:
    return mesh((2, 2), ("cp_ring", "cp_ulysses"))


def make_meshes() -> None:
    """Create every mesh of this file, in one order on all ranks: creation is collective."""
    cp_of_two_axes()._flatten(), groups.parts_of(cp().get_group(), 2)
    cp(), cp_tp(), cp_tp(1, 4), cp_tp(names=("rows", "columns")), cp_tp(names=("dp", "cp")), two_axes()


def random(*shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(*shape).to(dtype)


def local(H: int = H, K: int = K, rows: int = ROWS, D: int = D, dtype: torch.dtype = torch.float64) -> dict[str, Any]:
    """Arguments of a call on local tensors that works."""
    q, k, v = random(B, H, rows, D, dtype=dtype), random(B, K, rows, D, dtype=dtype), random(B, K, rows, D, dtype=dtype)
    return {"query": q, "key": k, "value": v, "mesh": cp()}


def attend(**changed: Any) -> None:
    attention(**local() | changed)


def nested(layout: torch.layout) -> Tensor:
    return torch.nested.nested_tensor([random(H, ROWS, D), random(H, ROWS, D)], layout=layout)


def mapped(name: str, x: Tensor) -> None:
    given = local()
    torch.func.vmap(lambda x: attention(**given | {name: x}))(x)


def attend_captured() -> None:
    """As while a graph is captured: an index of positions would be copied to the device."""
    with mock.patch(f"{path_of('ulysses')}.stream_of", return_value=None):
        attend(method="ulysses", layout=Permuted(torch.randperm(S, generator=torch.Generator().manual_seed(0))))


def attend_dual(requires_grad: bool) -> None:
    given = local()
    with forward_ad.dual_level():
        value = forward_ad.make_dual(given["value"].requires_grad_(requires_grad), torch.ones_like(given["value"]))
        attention(**given | {"value": value})


def place(shape: tuple[int, ...], device_mesh: DeviceMesh, *placements: Placement) -> DTensor:
    """A DTensor of this global shape without communication, in chunk-sized shards."""
    x = random(*shape)
    for axis, placement in enumerate(placements):
        if isinstance(placement, Shard):
            rank, size = device_mesh.get_local_rank(axis), device_mesh.size(axis)
            chunks = x.tensor_split([-(-x.shape[placement.dim] // size) * i for i in range(1, size)], placement.dim)
            x = chunks[rank]
    stride = torch.empty(shape, device="meta").stride()
    return DTensor.from_local(x, device_mesh, placements, run_check=False, shape=torch.Size(shape), stride=stride)


def attend_placed(
    device_mesh: DeviceMesh,
    placements: tuple[Placement, ...],
    shapes: tuple[tuple[int, ...], ...] = ((B, H, S, D), (B, K, S, D), (B, K, S, D)),
    kv: tuple[Placement, ...] | None = None,
    **options: Any,
) -> None:
    q, k, v = (place(s, device_mesh, *(p or placements)) for s, p in zip(shapes, (None, kv, kv), strict=True))
    attention(q, k, v, **options)


def heads(H: int, K: int) -> tuple[tuple[int, ...], ...]:
    return (B, H, S, D), (B, K, S, D), (B, K, S, D)


class Core(nn.Module):
    """An attention core whose SDPA call takes the given keywords."""

    def __init__(self, **keywords: Any) -> None:
        super().__init__()
        self.keywords = {"is_causal": True, "enable_gqa": True} | keywords

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, **self.keywords)


class CrossAttention(Core):
    pass


class Scripted(nn.Module):
    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)


class Silent(nn.Module):
    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return q


class Flex(nn.Module):
    def __init__(self, of_torch: bool = False, **keywords: Any) -> None:
        super().__init__()
        self.keywords, self.function = {"enable_gqa": True} | keywords, cp_mesh.flex_attention
        if of_torch:
            self.function = flex_attention

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return self.function(q, k, v, **self.keywords)


class Checkpointed(Flex):
    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return checkpoint(super().forward, q.requires_grad_(), k, v, use_reentrant=False)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(7, 4)
        self.core = Core()

    def forward(self, tokens: Tensor, positions: Tensor) -> Tensor:
        return self.embedding(tokens) + positions[..., None]


def sequence(**options: Any) -> ShardedSequence:
    return ShardedSequence(cp(), **options)


def run_core(core: nn.Module, tensors: tuple[Tensor, ...] | None = None, **options: Any) -> None:
    cp_mesh.parallelize(core, cp(), {"": ContextParallel(sequence(), **options)})
    core(*(tensors or tuple(local()[name] for name in ("query", "key", "value"))))


def run_replaced(function: Callable[..., Any]) -> None:
    with mock.patch.object(F, "scaled_dot_product_attention", function):
        run_core(Core())


def of_torch() -> BlockMask:
    blocks = torch.ones(B, H, 1, dtype=torch.int32), torch.zeros(B, H, 1, 1, dtype=torch.int32)
    return BlockMask.from_kv_blocks(*blocks, mask_mod=lambda b, h, i, j: i >= j, seq_lengths=(S, S))


def run_plan(model: nn.Module | None = None, on: DeviceMesh | None = None, **plan: Any) -> None:
    cp_mesh.parallelize(model or Model(), on or cp(), {key.replace("__", "."): style for key, style in plan.items()})


def _adapted(model: nn.Module, kind: str) -> nn.Module:
    """As PEFT marks it."""
    vars(model)["peft_config"] = {"default": mock.Mock(spec=["peft_type"], peft_type=mock.Mock(value=kind))}
    return model


def run_twice() -> None:
    core = Core()
    for _ in range(2):
        cp_mesh.parallelize(core, cp(), {"": ContextParallel(sequence())})


def run_mixed_placements() -> None:
    tp = cp_tp()["tp"]
    q = DTensor.from_local(random(B, H // 2, S // 2, D), tp, [Shard(1)], run_check=False)
    kv = DTensor.from_local(random(B, K, S // 2, D), tp, [Replicate()], run_check=False)
    core = cp_mesh.parallelize(Core(), cp_tp()["cp"], {"": ContextParallel(ShardedSequence(cp_tp()["cp"]))})
    core(q, kv, kv)


def attend_plain_query() -> None:
    k, v = (place((B, K, S, D), cp(), SHARD_SEQ) for _ in range(2))
    attention(random(B, H, ROWS, D), k, v)


def run_other_length() -> None:
    """The sequence, and so the mask, is of 21 tokens, padded to 24; the tensors are of 48."""
    core, style = Core(is_causal=False), ContextParallel(sequence(length=21), mask=Mask(causal=False))
    q, k, v = (place((B, heads, 2 * S, D), cp(), SHARD_SEQ) for heads in (H, K, K))
    cp_mesh.parallelize(core, cp(), {"": style})(q, k, v)


ARGUMENT, UNSUPPORTED = "ArgumentError", "UnsupportedError"
BASES = {"ArgumentError": "ValueError", "UnsupportedError": "NotImplementedError"}
SHARD_SEQ, REPLICATE = Shard(2), Replicate()

Cases = dict[str, tuple[str, str, Callable[[], Any]]]
"""By name: the class of the error, what its words must have between bars, and the call."""
