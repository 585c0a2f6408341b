"""The table of refusals: each bad input raises on every rank, in words that help, before the first collective."""

from __future__ import annotations

import inspect
from collections import UserDict
from collections.abc import Callable
from dataclasses import dataclass, fields
from functools import wraps
from itertools import product
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from checks import forget_plans
from inside import Operand, inner, path_of, room
from ranks import mesh, num_collectives
from scripts import run_script
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torch.distributed.tensor.placement_types import Placement
from torch.nn.attention.flex_attention import BlockMask, flex_attention
from torch.utils.checkpoint import checkpoint

import cp_mesh
from cp_mesh import ContextParallel, Mask, ShardedModel, ShardedSequence, Striped, ZigZag, attention
from cp_mesh.geometry import Permuted
from cp_mesh.tensor_parallel import OverlappedColwise
from cp_mesh.training import ShardInput

groups = room("groups")
check_tensors = inner("spec", "check_tensors")
token_log_probs = inner("log_probs", "token_log_probs")

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


@dataclass(frozen=True)
class Case:
    """A bad call: the class that it raises, what its message must say, and collectives before it raises."""

    error: str
    says: tuple[str, ...]
    call: Callable[[], Any]
    num_collectives: int = 0


def refused(error: str, *says: str) -> Callable[[Callable[[], Any]], Case]:
    return lambda call: Case(error, says, call)


CASES: dict[str, Case] = {
    # What local tensors show.
    "dtypes differ": refused(ARGUMENT, "q, k, v", "one dtype", "torch.float32", "cast them")(
        lambda: attend(key=random(B, K, ROWS, D, dtype=torch.float32))
    ),
    "integer dtype": refused(ARGUMENT, "float64, float32, bfloat16 or float16", "torch.int64", "cast them to bfloat16")(
        lambda: attention(**local(dtype=torch.int64))
    ),
    "devices differ": refused(ARGUMENT, "one device", "cpu, cpu, cuda", "move them to one device")(
        lambda: check_tensors(*(Operand(torch.Size((B, H, ROWS, D)), torch.float64, torch.device(x)) for x in DEVICES))
    ),
    "a nested query": refused(UNSUPPORTED, "query", "a dense tensor", "a nested one", "from_cu_seqlens(x.offsets())")(
        lambda: attend(query=nested(torch.jagged))
    ),
    "a nested key": refused(UNSUPPORTED, "key", "a nested one", "x.values()")(
        lambda: attend(key=nested(torch.strided))
    ),
    "a nested query of flex_attention": refused(UNSUPPORTED, "query", "a nested one")(
        lambda: cp_mesh.flex_attention(*[nested(torch.jagged)] * 3, mesh=cp())
    ),
    "nested tensors in a core": refused(UNSUPPORTED, "query", "a nested one")(
        lambda: run_core(Core(), (nested(torch.strided),) * 3)
    ),
    "a nested query of decode": refused(UNSUPPORTED, "query", "a nested one")(
        lambda: cp_mesh.inference.decode(*[nested(torch.strided)] * 3, mesh=cp())
    ),
    "nested sinks": refused(UNSUPPORTED, "sinks", "a nested one")(lambda: attend(sinks=nested(torch.strided))),
    "a sparse value": refused(UNSUPPORTED, "value", "layout torch.sparse_coo", "x.to_dense() makes one")(
        lambda: attend(value=random(B, K, ROWS, D).to_sparse())
    ),
    "a query without content": refused(ARGUMENT, "query", "with content", "one on meta", "to_empty(device=")(
        lambda: attention(**{name: x.to("meta") for name, x in local().items() if name != "mesh"}, mesh=cp())
    ),
    "a value without content": refused(ARGUMENT, "value", "with content", "one on meta")(
        lambda: attend(value=random(B, K, ROWS, D).to("meta"))
    ),
    "a query under vmap": refused(UNSUPPORTED, "query", "torch.func.vmap", "flattened into the batch")(
        lambda: mapped("query", local()["query"].expand(3, B, H, ROWS, D))
    ),
    "a value under vmap": refused(UNSUPPORTED, "value", "torch.func.vmap")(
        lambda: mapped("value", local()["value"].expand(3, B, K, ROWS, D))
    ),
    "slopes under vmap": refused(UNSUPPORTED, "alibi_slopes", "torch.func.vmap")(
        lambda: mapped("alibi_slopes", torch.ones(3, H))
    ),
    "heads do not divide": refused(ARGUMENT, "multiple of kv heads", "8 and 3", "equal number")(
        lambda: attention(**local(K=3))
    ),
    "no kv heads": refused(ARGUMENT, "multiple of kv heads", "8 and 0")(lambda: attention(**local(K=0))),
    "k and v heads differ": refused(ARGUMENT, "equal heads and lengths", "only the head dim may differ")(
        lambda: attend(value=random(B, 2, ROWS, D))
    ),
    "batch sizes differ": refused(ARGUMENT, "one batch size", "(2, 1, 1)", "expand the smaller batch")(
        lambda: attend(key=random(1, K, ROWS, D), value=random(1, K, ROWS, D))
    ),
    "q and k head dims differ": refused(ARGUMENT, "one head dim", "(16, 8)", "only v's may differ")(
        lambda: attend(key=random(B, K, ROWS, 8))
    ),
    "cross-attention lengths": refused(UNSUPPORTED, "self-attention", "(6, 5)", "out of the plan")(
        lambda: attend(key=random(B, K, 5, D), value=random(B, K, 5, D))
    ),
    "another format, with sinks": refused(UNSUPPORTED, "self-attention", "(8, 3)", "seq_dim=1 for [B, S, H, D]")(
        lambda: attend(
            query=random(B, ROWS, H, D), key=random(B, ROWS, 3, D), value=random(B, ROWS, 3, D), sinks=random(H)
        )
    ),
    "heads do not divide, with sinks": refused(ARGUMENT, "multiple of kv heads", "8 and 3", "equal number")(
        lambda: attention(**local(K=3), sinks=random(3))
    ),
    "an array": refused(ARGUMENT, "key", "a tensor", "ndarray", "torch.as_tensor")(
        lambda: attend(key=random(B, K, ROWS, D).numpy())
    ),
    "three dims for seq_dim 2": refused(ARGUMENT, "query", "[B, H, S, D] for seq_dim=2", "(8, 6, 16)")(
        lambda: attend(query=random(H, ROWS, D))
    ),
    "four dims for packed": refused(ARGUMENT, "query", "[T, H, D] for seq_dim=0", "seq_dim selects the format")(
        lambda: attend(seq_dim=0)
    ),
    "seq_dim 3": refused(ARGUMENT, "seq_dim", "2 [B, H, S, D], 1 [B, S, H, D] or 0 [T, H, D]", "got 3")(
        lambda: attend(seq_dim=3)
    ),
    "seq_dim -2": refused(ARGUMENT, "seq_dim", "got -2", "seq_dim=2 is SDPA's format")(lambda: attend(seq_dim=-2)),
    "no mesh": refused(ARGUMENT, "mesh", "1-D DeviceMesh of the cp axis", "got None", 'mesh=mesh["cp"]')(
        lambda: attend(mesh=None)
    ),
    "2-D mesh": refused(UNSUPPORTED, "mesh", "1-D DeviceMesh", "2 axes", 'mesh["cp"]')(lambda: attend(mesh=cp_tp())),
    "a name for a mesh": refused(ARGUMENT, "mesh", "1-D DeviceMesh", "or its ProcessGroup", "str", 'mesh["cp"]')(
        lambda: attend(mesh="cp")
    ),
    "a group of another axis": refused(ARGUMENT, "mesh", "an axis of the DTensors' mesh", "leave mesh out")(
        lambda: attend_placed(cp_tp(), (SHARD_SEQ, Shard(1)), mesh=cp().get_group())
    ),
    "seq_len of other shards": refused(ARGUMENT, "local sequence length", "seq_len=32", "got 6 rows", "seq_len=24")(
        lambda: attend(seq_len=32)
    ),
    "a sequence of a billion tokens": refused(UNSUPPORTED, "seq_len", "fewer than 1073741824 tokens", "split")(
        lambda: attend(seq_len=1 << 30)
    ),
    "a float for a length": refused(ARGUMENT, "seq_len", "24.0")(lambda: attend(seq_len=float(S))),
    "unequal shards unsaid": refused(ARGUMENT, "local sequence length", "striped", "seq_len=")(
        lambda: attend(layout=Striped(), seq_len=S + 4)
    ),
    "no features": refused(ARGUMENT, "query", "head dim of 1 or more", "(2, 8, 6, 0)")(lambda: attention(**local(D=0))),
    "no features, as DTensors": refused(ARGUMENT, "query", "head dim of 1 or more", "(2, 8, 24, 0)")(
        lambda: attend_placed(cp(), (SHARD_SEQ,), ((B, H, S, 0), (B, K, S, 0), (B, K, S, D)))
    ),
    # Masks and layouts.
    "a word for causal": refused(ARGUMENT, "Mask", "True or False for causal", "'x'")(
        lambda: attend(mask=Mask(causal="x"))
    ),
    "an index of fractions": refused(ARGUMENT, "Permuted", "integers", "torch.float32", "torch.argsort")(
        lambda: attend(layout=Permuted([0.5, 1.5]))
    ),
    "documents of a shard": refused(ARGUMENT, "Mask.documents", "[2, 24]", "(2, 6)", "never sharded")(
        lambda: attend(mask=Mask(documents=torch.zeros(B, ROWS, dtype=torch.int64)))
    ),
    "documents of another batch": refused(ARGUMENT, "Mask.documents", "[2, 24]", "(3, 24)", "every cp rank")(
        lambda: attend(mask=Mask(documents=torch.zeros(3, S, dtype=torch.int64)))
    ),
    "key padding of a shard": refused(ARGUMENT, "Mask.key_padding", "[2, 24]", "(6,)", "original order")(
        lambda: attend(mask=Mask(key_padding=torch.ones(ROWS, dtype=torch.bool)))
    ),
    "blocks of a shard": refused(ARGUMENT, "Mask.blocks", "[2, 24]", "(2, 6)", "never sharded")(
        lambda: attend(mask=Mask(blocks=torch.zeros(B, ROWS, dtype=torch.int64)))
    ),
    "a block that comes back": refused(UNSUPPORTED, "Mask.blocks", "block 0 comes back", "its own id")(
        lambda: attend(mask=Mask(blocks=torch.arange(S) // 5 % 2))
    ),
    "blocks and a causal window": refused(ARGUMENT, "window=(5, 0)", "window=(5, None)")(
        lambda: attend(mask=Mask(window=(5, 0), blocks=torch.zeros(S, dtype=torch.int64)))
    ),
    "float documents": refused(ARGUMENT, "integer documents", "torch.float32 (2, 24)", "from_cu_seqlens")(
        lambda: attend(mask=Mask(documents=torch.zeros(B, S)))
    ),
    "additive key padding": refused(ARGUMENT, "bool key_padding", "torch.float32", "`mask == 0`")(
        lambda: attend(mask=Mask(key_padding=torch.zeros(B, S)))
    ),
    "negative window": refused(ARGUMENT, "window bounds >= 0", "(-1, 0)", "None for an unlimited side")(
        lambda: attend(mask=Mask(window=(-1, 0)))
    ),
    "window of one number": refused(ARGUMENT, "window=(left, right)", "got 4")(lambda: attend(mask=Mask(window=4))),
    "a fraction for a prefix": refused(ARGUMENT, "prefix", "2.5")(lambda: attend(mask=Mask(prefix=2.5))),
    "prefix without causal": refused(ARGUMENT, "prefix relaxes causal", "leave prefix at 0")(
        lambda: attend(mask=Mask(causal=False, prefix=3))
    ),
    "negative prefix": refused(ARGUMENT, "prefix >= 0", "got -1")(lambda: attend(mask=Mask(prefix=-1))),
    "cu_seqlens from 1": refused(ARGUMENT, "from_cu_seqlens", "starting at 0")(
        lambda: attend(mask=Mask.from_cu_seqlens(torch.tensor([1, S])))
    ),
    "cu_seqlens of another length": refused(ARGUMENT, "Mask.documents", "[2, 24]", "(23,)", "cu_seqlens end at 24")(
        lambda: attend(mask=Mask.from_cu_seqlens(torch.tensor([0, 5, S - 1])))
    ),
    "cu_seqlens of another length in a layout": refused(
        ARGUMENT, "mask.documents", "24 tokens", "got 23", "the last entry of cu_seqlens"
    )(lambda: sequence(length=24).balanced(Mask.from_cu_seqlens(torch.tensor([0, 5, S - 1])))),
    "cu_seqlens of another length than a padded sequence": refused(
        ARGUMENT, "Mask.documents", "21, or 24 with padding", "got 23", "the last entry of cu_seqlens"
    )(lambda: sequence(length=21).mask(Mask.from_cu_seqlens(torch.tensor([0, 5, S - 1])))),
    "a tensor for a mask": refused(ARGUMENT, "mask", "Mask", "Tensor", "batch_mask reads", "bias= of 0 and -inf")(
        lambda: attend(mask=torch.ones(S, S, dtype=torch.bool))
    ),
    "a name for a layout": refused(ARGUMENT, "layout", "zigzag")(lambda: attend(layout="zigzag")),
    "index of another length": refused(ARGUMENT, "Permuted", "seq_len 20", "got 24", "(padded) length")(
        lambda: attend(layout=Permuted(range(20)))
    ),
    "index with repeats": refused(ARGUMENT, "Permuted", "permutation of range(seq_len)", "torch.argsort")(
        lambda: attend(layout=Permuted([0, 0, *range(2, S)]))
    ),
    # Options.
    "a learned scale": refused(ARGUMENT, "scale", "got 0.5, which requires a gradient", "multiply q by a learned")(
        lambda: attend(scale=nn.Parameter(torch.tensor(0.5)))
    ),
    "a fraction for the length of a sequence": refused(ARGUMENT, "ShardedSequence.length", "an int", "got 21.5")(
        lambda: sequence(length=21.5)
    ),
    "a word for the scale": refused(ARGUMENT, "scale", "a positive number", "'1'")(lambda: attend(scale="1")),
    "a scale that is not a number": refused(ARGUMENT, "scale", "a positive number", "nan")(
        lambda: attend(scale=float("nan"))
    ),
    "a word for dropout": refused(ARGUMENT, "dropout_p", "a probability", "'0.1'")(
        lambda: attend(dropout_p="0.1", dropout_seed=1)
    ),
    "a number for deterministic": refused(ARGUMENT, "deterministic", "True, False or None", "got 1")(
        lambda: attend(deterministic=1)
    ),
    "a quote in a kernel's name": refused(
        ARGUMENT, "kernel", "one of auto", 'a"b', "kernel='auto' picks one that works"
    )(lambda: attend(kernel='a"b')),
    "a method in other letters": refused(
        ARGUMENT, "method", "one of auto, ring, all_gather, ulysses", "'All-Gather'", "method='all_gather' works"
    )(lambda: attend(method="All-Gather")),
    "no transport": refused(ARGUMENT, "transport", "a name", "None", "transport='auto' works")(
        lambda: attend(transport=None)
    ),
    "a gradient by torch.func": refused(UNSUPPORTED, "no transform of torch.func", "backward()")(
        lambda: torch.func.grad(lambda q: attention(**local() | {"query": q}).sum())(local()["query"])
    ),
    "dropout without a seed": refused(ARGUMENT, "dropout_seed", "None", "equal on all cp ranks")(
        lambda: attend(dropout_p=0.1)
    ),
    "dropout of everything": refused(ARGUMENT, "dropout_p", "a probability in [0, 1)", "got 1.0")(
        lambda: attend(dropout_p=1.0, dropout_seed=1)
    ),
    "negative dropout": refused(ARGUMENT, "dropout_p", "got -0.1")(lambda: attend(dropout_p=-0.1, dropout_seed=1)),
    "a negative seed": refused(ARGUMENT, "dropout_seed", "0 <= seed < 2**63", "got -1")(
        lambda: attend(dropout_p=0.1, dropout_seed=-1)
    ),
    "a fraction for a seed": refused(ARGUMENT, "dropout_seed", "an int or an int64 tensor", "0.5")(
        lambda: attend(dropout_p=0.1, dropout_seed=0.5)
    ),
    "three seeds": refused(ARGUMENT, "dropout_seed", "int64 [1] or [2]", "(3,)")(
        lambda: attend(dropout_p=0.1, dropout_seed=torch.zeros(3, dtype=torch.int64))
    ),
    "a seed of int32": refused(ARGUMENT, "dropout_seed", "int64 [1] or [2]", "torch.int32")(
        lambda: attend(dropout_p=0.1, dropout_seed=torch.zeros(1, dtype=torch.int32))
    ),
    "a kernel without dropout": refused(UNSUPPORTED, "scores with dropout", "kernel='reference'")(
        lambda: attend(kernel="cpu_flash", dropout_p=0.1, dropout_seed=1)
    ),
    "a softcap of zero": refused(ARGUMENT, "softcap", "a positive number or None", "got 0.0")(
        lambda: attend(softcap=0.0)
    ),
    "a negative softcap": refused(ARGUMENT, "softcap", "a positive number or None", "got -3")(
        lambda: attend(softcap=-3)
    ),
    "a learned softcap": refused(ARGUMENT, "softcap", "a positive number", "got 3.0")(
        lambda: attend(softcap=torch.tensor(3.0, requires_grad=True))
    ),
    "a kernel without softcap": refused(UNSUPPORTED, "kernel='cpu_flash'", "scores with softcap", "kernel='reference'")(
        lambda: attend(kernel="cpu_flash", softcap=30.0)
    ),
    "sinks of other heads": refused(ARGUMENT, "sinks", "shape [8] with the query heads on this rank", "(4,)")(
        lambda: attend(sinks=random(K))
    ),
    "sinks of every row": refused(ARGUMENT, "sinks", "shape [8]", "(2, 8, 6)")(
        lambda: attend(sinks=random(B, H, ROWS))
    ),
    "integer sinks": refused(ARGUMENT, "sinks", "floating point", "torch.int64")(
        lambda: attend(sinks=torch.zeros(H, dtype=torch.int64))
    ),
    "numbers for sinks": refused(ARGUMENT, "sinks", "a tensor", "list", "torch.as_tensor")(
        lambda: attend(sinks=[0.0] * H)
    ),
    "forward-mode derivatives": refused(UNSUPPORTED, "without tangents", "forward-mode", "backward()")(
        lambda: torch.func.jvp(lambda q: attention(**local() | {"query": q}), *[(local()["query"],)] * 2)
    ),
    "dual tensors that require gradients": refused(UNSUPPORTED, "without tangents", "forward-mode", "backward()")(
        lambda: attend_dual(True)
    ),
    "dual tensors": refused(UNSUPPORTED, "without tangents", "forward-mode", "backward()")(lambda: attend_dual(False)),
    "documents without content": refused(ARGUMENT, "Mask.documents", "with content", "meta")(
        lambda: attend(mask=Mask(documents=torch.zeros(B, S, dtype=torch.int64, device="meta")))
    ),
    "sinks elsewhere": refused(ARGUMENT, "sinks", "a tensor on cpu", "meta")(
        lambda: attend(sinks=torch.zeros(H, device="meta"))
    ),
    "sinks elsewhere than DTensors": refused(ARGUMENT, "sinks", "a tensor on cpu", "meta", "move it there")(
        lambda: attend_placed(cp(), (SHARD_SEQ,), sinks=torch.zeros(H, device="meta"))
    ),
    "sinks of all heads beside heads on tp": refused(ARGUMENT, "sinks", "shape [4]", "(8,)", "heads or rows sharded")(
        lambda: attend_placed(cp_tp(), (SHARD_SEQ, Shard(1)), sinks=random(H))
    ),
    "sinks replicated beside heads on tp": refused(ARGUMENT, "sinks's placements", "Shard(0)", "Replicate()")(
        lambda: attend_placed(cp_tp(), (SHARD_SEQ, Shard(1)), sinks=place((H,), cp_tp(), REPLICATE, REPLICATE))
    ),
    "sinks sharded on cp": refused(ARGUMENT, "sinks's placements", "Replicate()", "redistribute it")(
        lambda: attend_placed(cp(), (SHARD_SEQ,), sinks=place((H,), cp(), Shard(0)))
    ),
    "sinks of another mesh": refused(ARGUMENT, "sinks's placements", "(Replicate(), Shard(0)) on", "cp=2")(
        lambda: attend_placed(cp_tp(), (SHARD_SEQ, Shard(1)), sinks=place((H,), cp_tp()["tp"], Shard(0)))
    ),
    "a DTensor of sinks beside local tensors": refused(ARGUMENT, "sinks's placements", "a local tensor, as query is")(
        lambda: attend(sinks=place((H,), cp(), REPLICATE))
    ),
    "slopes of the kv heads": refused(ARGUMENT, "alibi_slopes", "shape [8]", "(4,)")(
        lambda: attend(alibi_slopes=random(K))
    ),
    "bias of local keys": refused(ARGUMENT, "bias", "shape [1 or 2, 1 or 8, 1 or 6, 24]", "(2, 8, 6, 6)")(
        lambda: attend(bias=random(B, H, ROWS, ROWS))
    ),
    "bias of all rows": refused(ARGUMENT, "bias", "1 or 6, 24]", "(2, 8, 24, 24)", "rows sharded")(
        lambda: attend(bias=random(B, H, S, S))
    ),
    "bias without heads": refused(ARGUMENT, "bias", "1 or 6, 24]", "(6, 24)")(lambda: attend(bias=random(ROWS, S))),
    "a mask for a bias": refused(ARGUMENT, "bias", "floating point", "torch.bool")(
        lambda: attend(bias=torch.ones(1, 1, ROWS, S, dtype=torch.bool))
    ),
    "bias of all heads beside heads on tp": refused(ARGUMENT, "bias", "1 or 4, 1 or 12, 24]", "(2, 8, 12, 24)")(
        lambda: attend_placed(cp_tp(), (SHARD_SEQ, Shard(1)), bias=random(B, H, S // 2, S))
    ),
    "a DTensor of a bias with replicated rows": refused(ARGUMENT, "bias's placements", "Shard(2)")(
        lambda: attend_placed(cp(), (SHARD_SEQ,), bias=place((B, H, S, S), cp(), REPLICATE))
    ),
    "a kernel without positions": refused(UNSUPPORTED, "'pairs' tiles", "scores with alibi_slopes", "'reference'")(
        lambda: attend(kernel="cpu_flash", alibi_slopes=random(H))
    ),
    "a kernel without bias": refused(UNSUPPORTED, "scores with bias", "kernel='reference'")(
        lambda: attend(kernel="cpu_flash", bias=random(B, H, ROWS, S))
    ),
    "ulysses of heads that ranks do not divide": refused(
        UNSUPPORTED, "method='ulysses'", "a multiple of the 4 cp ranks, got 6", "method='ring' works, or 3 cp ranks"
    )(lambda: attend(method="ulysses", **local(H=6, K=3))),
    "ulysses over symmetric memory": refused(
        UNSUPPORTED, "transport='symmetric_memory'", "transport='functional' works"
    )(lambda: attend(method="ulysses", transport="symmetric_memory")),
    "ulysses in too many chunks": refused(
        ARGUMENT,
        "method='ulysses': head_chunks",
        "a divisor of the 1 kv heads of a rank, got 4",
        "head_chunks=1",
        "method='ring'",
    )(lambda: attend(method="ulysses", head_chunks=4)),
    "an order of rows that a CUDA graph cannot hold": refused(
        UNSUPPORTED, "CUDA graph capture with method='ulysses'", "permuted", "method='ring'"
    )(attend_captured),
    "ulysses explained": refused(
        UNSUPPORTED, "method='ulysses'", "a multiple of the 2 cp ranks, got 3", "method='ring'"
    )(lambda: cp_mesh.explain(64, 2, method="ulysses", num_heads=3)),
    "a degree that ranks do not divide by": refused(
        ARGUMENT,
        "method='hybrid': ulysses_degree",
        "a divisor of the 4 cp ranks and of the 8 query heads, got 3",
        "ulysses_degree=2 works, or method='ring'",
    )(lambda: attend(method="hybrid", ulysses_degree=3)),
    "a degree that heads do not divide by": refused(
        ARGUMENT, "ulysses_degree", "of the 6 query heads, got 4", "ulysses_degree=2 works, or method='ring'"
    )(lambda: attend(method="hybrid", ulysses_degree=4, **local(H=6, K=3))),
    "a degree larger than the axis": refused(ARGUMENT, "ulysses_degree", "got 8", "ulysses_degree=4 works")(
        lambda: attend(method="hybrid", ulysses_degree=8)
    ),
    "a degree of no hybrid": refused(
        ARGUMENT,
        "ulysses_degree",
        "None, but with method='hybrid'",
        "2 with method='ulysses'",
        "method='hybrid' takes it",
    )(lambda: attend(method="ulysses", ulysses_degree=2)),
    "a degree of the method that auto takes": refused(ARGUMENT, "ulysses_degree", "2 with method='auto'")(
        lambda: attend(ulysses_degree=2)
    ),
    "a degree unlike that of the mesh": refused(
        ARGUMENT, "ulysses_degree", "2, as the mesh's second axis has, got 4", "leave it out"
    )(lambda: attend(mesh=cp_of_two_axes(), method="hybrid", ulysses_degree=4)),
    "hybrid in too many chunks": refused(
        ARGUMENT, "method='hybrid': head_chunks", "of the 2 kv heads of a rank, got 4", "head_chunks=2", "method='ring'"
    )(lambda: attend(method="hybrid", ulysses_degree=2, head_chunks=4)),
    "hybrid over symmetric memory": refused(
        UNSUPPORTED, "transport='symmetric_memory'", "transport='functional' works"
    )(lambda: attend(method="hybrid", ulysses_degree=2, transport="symmetric_memory")),
    "hybrid explained": refused(ARGUMENT, "explain: method='hybrid'", "expected num_heads", "None", "num_heads=32")(
        lambda: cp_mesh.explain(64, 2, method="hybrid")
    ),
    "unknown method": refused(ARGUMENT, "method", "all_gather, ulysses, hybrid", "'rings'", "method='ring' works")(
        lambda: attend(method="rings")
    ),
    "symmetric memory": refused(UNSUPPORTED, "transport='symmetric_memory'", "transport='functional' works")(
        lambda: attend(transport="symmetric_memory")
    ),
    "unknown transport": refused(ARGUMENT, "transport", "auto, functional", "'mpi'")(lambda: attend(transport="mpi")),
    "unknown kernel": refused(ARGUMENT, "kernel", "auto, fa4, cudnn, fa2", "'flash'", "kernel='auto' picks")(
        lambda: attend(kernel="flash")
    ),
    "a kernel of another device": refused(UNSUPPORTED, "kernel='cudnn'", "device cpu", "can serve this call")(
        lambda: attend(kernel="cudnn")
    ),
    "a kernel without windows": refused(UNSUPPORTED, "kernel='cpu_flash'", "'window' tiles", "kernel='reference'")(
        lambda: attend(kernel="cpu_flash", mask=Mask(window=(3, 0)))
    ),
    "a kernel without documents": refused(UNSUPPORTED, "kernel='cpu_flash'", "'pairs' tiles", "kernel='reference'")(
        lambda: attend(kernel="cpu_flash", mask=Mask(documents=torch.zeros(B, S, dtype=torch.int64)))
    ),
    "a kernel of one head dim": refused(UNSUPPORTED, "kernel='cpu_flash'", "v head dim 8", "kernel='reference'")(
        lambda: attend(kernel="cpu_flash", value=random(B, K, ROWS, 8))
    ),
    "a kernel without gradients of lse": refused(UNSUPPORTED, "cpu_flash", "gradient through lse", "'reference'")(
        lambda: attend(kernel="cpu_flash", query=random(B, H, ROWS, D).requires_grad_(), return_lse=True)
    ),
    # Placements of DTensors.
    "some DTensors": refused(ARGUMENT, "all DTensors or all local tensors", "Tensor, DTensor, DTensor", "from_local")(
        attend_plain_query
    ),
    "sequence not sharded": refused(ARGUMENT, "cp", "Shard(2), the sequence", "shard it, or call SDPA")(
        lambda: attend_placed(cp_tp(), (REPLICATE, Shard(1)))
    ),
    "sequence not sharded, seq_dim given": refused(ARGUMENT, "query's placements", "unsharded sequence")(
        lambda: attend_placed(cp_tp(), (REPLICATE, Shard(1)), seq_dim=2)
    ),
    "sequence not sharded, mesh and seq_dim given": refused(ARGUMENT, "axis 'cp'", "Shard(2), the sequence")(
        lambda: attend_placed(cp_tp(), (REPLICATE, Shard(1)), seq_dim=2, mesh=cp_tp()["cp"])
    ),
    "sequence on the wrong axis": refused(ARGUMENT, "cp", "Shard(2), the sequence", "unsharded sequence")(
        lambda: attend_placed(cp_tp(), (REPLICATE, SHARD_SEQ))
    ),
    "sequence on two axes": refused(UNSUPPORTED, "axis 'tp'", "no second shard of the sequence", "gather")(
        lambda: attend_placed(cp_tp(), (SHARD_SEQ, SHARD_SEQ))
    ),
    "sequence on two axes, seq_dim given": refused(UNSUPPORTED, "the sequence sharded on one axis", "or flatten")(
        lambda: attend_placed(cp_tp(), (SHARD_SEQ, SHARD_SEQ), seq_dim=2)
    ),
    "partial": refused(UNSUPPORTED, "axis 'tp'", "Shard of heads or batch, or Replicate", "redistribute it")(
        lambda: attend_placed(cp_tp(), (SHARD_SEQ, Partial()))
    ),
    "head dim sharded": refused(UNSUPPORTED, "axis 'tp'", "Shard(3)", "shard heads or batch instead")(
        lambda: attend_placed(cp_tp(), (SHARD_SEQ, Shard(3)))
    ),
    "head dim sharded on cp": refused(ARGUMENT, "placement on the cp axis", "Shard(3)", "Shard(2)")(
        lambda: attend_placed(cp_tp(), (Shard(3), Shard(1)))
    ),
    "kv replicated, q by head": refused(ARGUMENT, "key's placements", "expected query's", "shard q, k and v alike")(
        lambda: attend_placed(cp_tp(), (SHARD_SEQ, Shard(1)), kv=(SHARD_SEQ, REPLICATE))
    ),
    "kv heads that tp cannot divide": refused(
        ARGUMENT, "kv heads", "4, the size of axis 'tp'", "got 2", "together divide 8 and 2"
    )(lambda: attend_placed(cp_tp(1, 4), (SHARD_SEQ, Shard(1)), heads(8, 2))),
    "query heads that tp cannot divide": refused(ARGUMENT, "query heads", "4, the size of axis 'tp'", "got 6")(
        lambda: attend_placed(cp_tp(1, 4), (SHARD_SEQ, Shard(1)), heads(6, 6))
    ),
    "batch that dp cannot divide": refused(
        ARGUMENT, "batch", "multiple of 2", "axis 'dp'", "got 3", "regroup the batch"
    )(
        lambda: attend_placed(
            cp_tp(names=("dp", "cp")), (Shard(0), SHARD_SEQ), ((3, H, S, D), (3, K, S, D), (3, K, S, D))
        )
    ),
    "kv heads that two axes divide, but not their product": refused(
        ARGUMENT, "kv heads", "4, the size of axes 'first' x 'second'", "got 6", "together divide 24 and 6"
    )(lambda: attend_placed(two_axes(), (Shard(1), Shard(1), SHARD_SEQ), heads(24, 6))),
    "fewer kv heads than the product of two axes": refused(ARGUMENT, "kv heads", "multiple of 4", "got 2")(
        lambda: attend_placed(two_axes(), (Shard(1), Shard(1), SHARD_SEQ), heads(4, 2))
    ),
    "query heads that two axes divide, but not their product": refused(
        ARGUMENT, "query heads", "multiple of 4", "got 6"
    )(lambda: attend_placed(two_axes(), (Shard(1), Shard(1), SHARD_SEQ), heads(6, 6))),
    "batch that two axes divide, but not their product": refused(
        ARGUMENT, "batch", "multiple of 4", "got 6", "regroup"
    )(lambda: attend_placed(two_axes(), (Shard(0), Shard(0), SHARD_SEQ), ((6, H, S, D), (6, K, S, D), (6, K, S, D)))),
    "heads on the cp axis": refused(
        ARGUMENT, "Shard(2), the sequence of [B, H, S, D]", "Shard(1)", "pass seq_dim=1 if"
    )(lambda: attend_placed(cp(), (Shard(1),), heads(H, H))),
    "[B, S, H, D] unsaid": refused(ARGUMENT, "Shard(2), the sequence", "Shard(1)", "seq_dim=1 if it is [B, S, H, D]")(
        lambda: attend_placed(cp(), (Shard(1),), ((B, S, H, D), (B, S, K, D), (B, S, K, D)))
    ),
    "packed unsaid": refused(ARGUMENT, "Shard(2), the sequence", "Shard(0)", "seq_dim=0 if it is [T, H, D]")(
        lambda: attend_placed(cp(), (Shard(0),), ((S, H, D), (S, K, D), (S, K, D)))
    ),
    "no axis named cp": refused(ARGUMENT, "cp axis", 'an axis named "cp", or mesh= or seq_dim=', "rows", "columns")(
        lambda: attend_placed(cp_tp(names=("rows", "columns")), (SHARD_SEQ, Shard(1)))
    ),
    "an axis of another mesh": refused(ARGUMENT, "mesh", "an axis of the DTensors' mesh", "leave mesh out")(
        lambda: attend_placed(cp_tp(), (SHARD_SEQ, Shard(1)), mesh=cp())
    ),
    "seq_len beside DTensors": refused(ARGUMENT, "seq_len", "24, the DTensors' length", "got 32", "leave it out")(
        lambda: attend_placed(cp_tp(), (SHARD_SEQ, Shard(1)), seq_len=32)
    ),
    "striped DTensor of length 97": refused(
        UNSUPPORTED, "DTensor length", "multiples of 4", "got 97", "ShardedSequence"
    )(lambda: attend_placed(cp(), (SHARD_SEQ,), ((B, H, 97, D), (B, K, 97, D), (B, K, 97, D)), layout=Striped())),
    "zigzag DTensor of length 21": refused(
        UNSUPPORTED, "DTensor length", "multiples of 8", "got 21", "pad the sequence"
    )(lambda: attend_placed(cp(), (SHARD_SEQ,), ((B, H, 21, D), (B, K, 21, D), (B, K, 21, D)), layout=ZigZag())),
    # The sequence kit.
    "sequence over two axes": refused(ARGUMENT, "ShardedSequence.mesh", "1-D DeviceMesh", 'mesh["cp"]')(
        lambda: ShardedSequence(cp_tp())
    ),
    "sequence of another degree than its mesh": refused(
        ARGUMENT, "ShardedSequence.ulysses_degree", "2, as the mesh's second axis has, got 4", "leave it out"
    )(lambda: ShardedSequence(cp_of_two_axes(), ulysses_degree=4)),
    "sequence without mesh": refused(ARGUMENT, "ShardedSequence.mesh", "1-D DeviceMesh", "None")(
        lambda: ShardedSequence(None)
    ),
    "empty sequence": refused(ARGUMENT, "ShardedSequence.length", "at least 1 token", "got 0")(
        lambda: sequence(length=0)
    ),
    "length that does not divide": refused(ARGUMENT, "sequence length", "multiple of 8", "got 21", "length=21) pads")(
        lambda: sequence().shard({"tokens": torch.zeros(B, 21)})
    ),
    "length other than the sequence's": refused(ARGUMENT, "length", "21, or 24 with padding", "got 20")(
        lambda: sequence(length=21).shard({"tokens": torch.zeros(B, 20)})
    ),
    "unequal length other than the sequence's": refused(ARGUMENT, "length", "21", "got 24")(
        lambda: sequence(length=21, pad=False).shard({"tokens": torch.zeros(B, 24)})
    ),
    "cu_seqlens other than the sequence's": refused(ARGUMENT, "cu_seqlens", "21", "20")(
        lambda: sequence(length=21).shard({"cu_seqlens": torch.tensor([0, 5, 20])})
    ),
    "documents other than the sequence's": refused(ARGUMENT, "length", "21, or 24 with padding", "got 20")(
        lambda: sequence(length=21).mask(Mask(documents=torch.zeros(B, 20, dtype=torch.int64)))
    ),
    "shard of a DTensor": refused(ARGUMENT, "shard(tokens)", "local tensors", "DTensor", "full_tensor()")(
        lambda: sequence().shard({"tokens": place((B, S), cp(), Shard(1))})
    ),
    "a leaf that is no tensor": refused(ARGUMENT, "shard(tokens)", "ndarray")(
        lambda: sequence().shard({"tokens": torch.zeros(B, S).numpy()})
    ),
    "a container that hides tensors": refused(ARGUMENT, "UserDict")(
        lambda: sequence().shard(UserDict(tokens=torch.zeros(B, S)))
    ),
    "leaf without a sequence": refused(ARGUMENT, "shard(scale)", "a sequence dim 1", "(24,)", "pass dim=")(
        lambda: sequence().shard({"scale": torch.zeros(S)})
    ),
    "unshard of other rows": refused(ARGUMENT, "local rows", "expected 6", "got 5", "shard with this ShardedSequence")(
        lambda: sequence(length=21).unshard(random(B, 5))
    ),
    "positions of no length": refused(ARGUMENT, "seq_len", "length of the whole sequence", "length=")(
        lambda: sequence().positions()
    ),
    "labels of other logits": Case(
        ARGUMENT,
        ("labels", "shape (2, 6)", "got (2, 24)", "shard both"),
        lambda: cp_mesh.cross_entropy(random(B, ROWS, 7), torch.zeros(B, S, dtype=torch.int64), cp()),
        num_collectives=1,  # the sum in which ranks wait that refuse nothing
    ),
    # Styles and plans.
    "a tensor attn_mask": refused(UNSUPPORTED, "a tensor attn_mask", "Mask(causal=, window=, documents=", "batch_mask")(
        lambda: run_core(Core(is_causal=False, attn_mask=torch.ones(ROWS, ROWS, dtype=torch.bool)))
    ),
    "is_causal, a mask that is not": refused(ARGUMENT, "is_causal", "expected False", "got True", "agree")(
        lambda: run_core(Core(), mask=Mask(causal=False))
    ),
    "a causal mask, a call that is not": refused(ARGUMENT, "is_causal", "expected True", "got False", "agree")(
        lambda: run_core(Core(is_causal=False))
    ),
    "dropout inside without a seed": refused(ARGUMENT, "dropout_seed", "None")(lambda: run_core(Core(dropout_p=0.1))),
    "dropout_p in the style": refused(ARGUMENT, "ContextParallel.scores", "'dropout_p'")(
        lambda: run_core(Core(dropout_p=0.1), scores={"dropout_p": 0.1, "dropout_seed": 1})
    ),
    "fewer kv heads unsaid": refused(ARGUMENT, "heads", "8 kv heads", "got 4", "enable_gqa=True")(
        lambda: run_core(Core(enable_gqa=False))
    ),
    "no attention call inside": refused(ARGUMENT, "ContextParallel(Silent)", "F.scaled_dot_product_attention", "none")(
        lambda: run_core(Silent())
    ),
    "flex_attention inside, of a causal style": refused(
        ARGUMENT, "ContextParallel.mask", "hides nothing, with flex", "Mask(causal=True)", "Mask(causal=False)"
    )(lambda: run_core(Flex())),
    "PyTorch's flex_attention inside": refused(
        UNSUPPORTED, "PyTorch's flex_attention", "Import cp_mesh.flex_attention under its name"
    )(lambda: run_core(Flex(of_torch=True), mask=Mask(causal=False))),
    "flex_attention with scores of the style": refused(ARGUMENT, "ContextParallel.scores", "softcap", "score_mod")(
        lambda: run_core(Flex(), mask=Mask(causal=False), scores={"softcap": 30.0})
    ),
    "flex_attention by options of the style": refused(ARGUMENT, "flex_attention in a core", "kernel", "leave it out")(
        lambda: run_core(Flex(kernel="reference"), mask=Mask(causal=False))
    ),
    "a wrapper in place of SDPA": refused(
        UNSUPPORTED, "PyTorch's own F.scaled_dot_product_attention", f"{__file__}, line", "restore PyTorch's function"
    )(lambda: run_replaced(wraps(SDPA)(lambda *args, **keywords: SDPA(*args, **keywords)))),
    "another function in place of SDPA": refused(
        ARGUMENT,
        "none, and the function of",
        f"{__file__}, line",
        "restore PyTorch's function, F.scaled",
    )(lambda: run_replaced(lambda q, k, v, **_: q)),
    "a slice of a BlockMask": refused(ARGUMENT, "block_mask", "a whole mask", "a slice of one, block_mask[...]")(
        lambda: cp_mesh.flex_attention(**local(), block_mask=of_torch()[:, 0:1], enable_gqa=True)
    ),
    "flex_attention with a slice of a BlockMask": refused(ARGUMENT, "block_mask", "a slice of one, block_mask[...]")(
        lambda: run_core(Flex(block_mask=of_torch()[:, :, 0:1]), mask=Mask(causal=False))
    ),
    "flex_attention with a mask of the shard": refused(ARGUMENT, "block_mask", "whole sequence", "global length")(
        lambda: run_core(
            Flex(block_mask=cp_mesh.flex.create_block_mask(lambda b, h, i, j: i >= j, None, None, ROWS, ROWS)),
            mask=Mask(causal=False),
        )
    ),
    "flex_attention in a checkpoint of the core": refused(UNSUPPORTED, "inside of a checkpoint", "checkpoint(block")(
        lambda: run_core(Checkpointed(), mask=Mask(causal=False))
    ),
    "a mask function without a mask": refused(ARGUMENT, "mask", "Mask", "None")(
        lambda: run_core(Core(), mask=lambda q, k, v: None)
    ),
    "an unknown option of the scores": refused(ARGUMENT, "ContextParallel.scores", "sinks, softcap", "'cap'")(
        lambda: run_core(Core(), scores={"cap": 30.0})
    ),
    "scores that are no options": refused(ARGUMENT, "ContextParallel.scores", "NoneType")(
        lambda: run_core(Core(), scores=lambda core, q, k, v: None)
    ),
    "a negative softcap inside": refused(ARGUMENT, "softcap", "got -1.0")(
        lambda: run_core(Core(), scores={"softcap": -1.0})
    ),
    "a tp plan of no model": refused(ARGUMENT, "tensor_parallel_plan: model", "Module", "DeviceMesh")(
        lambda: cp_mesh.tensor_parallel.tensor_parallel_plan(cp(), cp())  # type: ignore[arg-type]
    ),
    "linears of no transport": refused(ARGUMENT, "OverlappedColwise: transport", "None", "functional")(
        lambda: OverlappedColwise(transport=None)  # type: ignore[arg-type]
    ),
    "a bad option of explain": refused(ARGUMENT, "explain: scores", "softcap, sinks", "'cap'")(
        lambda: cp_mesh.explain(64, 2, scores=["cap"])
    ),
    "an unknown kernel inside": refused(ARGUMENT, "kernel", "'flash'")(lambda: run_core(Core(), kernel="flash")),
    "a degree inside": refused(ARGUMENT, "ulysses_degree", "of the 8 query heads, got 3")(
        lambda: run_core(Core(), method="hybrid", ulysses_degree=3)
    ),
    "heads placed unlike": refused(ARGUMENT, "expected query's", "shard q, k and v alike")(run_mixed_placements),
    "keys of another length inside": refused(UNSUPPORTED, "self-attention", "out of the plan")(
        lambda: run_core(Core(), tensors=(random(B, H, ROWS, D), random(B, K, 5, D), random(B, K, 5, D)))
    ),
    "DTensors other than the sequence's": refused(ARGUMENT, "24", "48")(run_other_length),
    "repeated application": refused(ARGUMENT, "ContextParallel", "Core with ContextParallel", "apply once")(run_twice),
    "a cross-attention module": refused(UNSUPPORTED, "'CrossAttention' is cross-attention", "out of the plan")(
        lambda: run_core(CrossAttention())
    ),
    "a core of torch.jit": refused(UNSUPPORTED, "ContextParallel at 'core'", "one of torch.jit", "the plain module")(
        lambda: run_plan(nn.ModuleDict({"core": torch.jit.script(Scripted())}), core=ContextParallel(sequence()))
    ),
    "a list of blocks": refused(ARGUMENT, "Checkpointed", "a ModuleList, which is never called", "'layers.*'")(
        lambda: run_plan(nn.ModuleDict({"core": nn.ModuleList([Core()])}), core=cp_mesh.Checkpointed())
    ),
    "an input of torch.jit": refused(UNSUPPORTED, "ShardInput at 'core'", "one of torch.jit", "the plain module")(
        lambda: run_plan(nn.ModuleDict({"core": torch.jit.script(Scripted())}), core=ShardInput(sequence()))
    ),
    "PyTorch's function on a compiled core": refused(ARGUMENT, "torch.compile made", "cp_mesh.parallelize applies it")(
        lambda: parallelize_module(torch.compile(Core()), cp(), ContextParallel(sequence()))
    ),
    "PyTorch's function on a core of torch.jit": refused(UNSUPPORTED, "ContextParallel", "one of torch.jit")(
        lambda: parallelize_module(torch.jit.script(Scripted()), cp(), ContextParallel(sequence()))
    ),
    "a compiled linear of several": refused(ARGUMENT, "OverlappedColwise", "compile the module that holds all")(
        lambda: run_plan(
            nn.ModuleDict({"both": nn.ModuleList([torch.compile(nn.Linear(4, 4)), nn.Linear(4, 4)])}),
            both=OverlappedColwise("0", "1"),
        )
    ),
    "a cross-attention name": refused(UNSUPPORTED, "'cross_attn' is cross-attention", "replicated over cp")(
        lambda: run_plan(nn.ModuleDict({"cross_attn": Core()}), cross_attn=ContextParallel(sequence()))
    ),
    "adapters of PEFT that read whole rows": refused(UNSUPPORTED, "peft_config", "LORA", "got LILY", "whole sequence")(
        lambda: run_plan(_adapted(Model(), "LILY"), core=ContextParallel(sequence()))
    ),
    "a sequence of another axis": refused(ARGUMENT, "the axis of the ShardedSequence", "apply the style to that axis")(
        lambda: run_plan(on=cp_tp()["cp"], core=ContextParallel(sequence()))
    ),
    "a key that matches nothing": refused(ARGUMENT, "plan key", "'cores'", "near it: core")(
        lambda: run_plan(cores=ContextParallel(sequence()))
    ),
    "two keys for one module": refused(ARGUMENT, "one plan key a module", "'c*', 'core'", "drop one")(
        lambda: cp_mesh.parallelize(
            Model(), cp(), {"c*": ContextParallel(sequence()), "core": ContextParallel(sequence())}
        )
    ),
    "a plan over two axes": refused(ARGUMENT, "parallelize: mesh", "one axis", "one axis at a time")(
        lambda: run_plan(on=cp_tp(), core=ContextParallel(sequence()))
    ),
    "a plan over no mesh": refused(ARGUMENT, "parallelize: mesh", "one axis of a DeviceMesh", "got cp;")(
        lambda: run_plan(on="cp", embedding=ColwiseParallel())
    ),
    "a style that is none": refused(ARGUMENT, "'core'", "ParallelStyle")(lambda: run_plan(core=ContextParallel)),
    "a plan that is a list": refused(ARGUMENT, "parallelize: plan", "Mapping[str, ParallelStyle]", "got list")(
        lambda: cp_mesh.parallelize(Model(), cp(), [("core", ContextParallel(sequence()))])  # type: ignore[arg-type]
    ),
    "a key that is no name": refused(ARGUMENT, "plan key", "the name of a module, got 0", "write '0'")(
        lambda: cp_mesh.parallelize(nn.Sequential(Core()), cp(), {0: ContextParallel(sequence())})  # type: ignore[dict-item]
    ),
    "a mesh for a sequence": refused(ARGUMENT, "ContextParallel: sequence", "a ShardedSequence", "(mesh) makes one")(
        lambda: run_plan(core=ContextParallel(cp()))  # type: ignore[arg-type]
    ),
    "inputs that are no tuple": refused(ARGUMENT, "ShardedModel.inputs", "argument names, got tokens", '("tokens",)')(
        lambda: ShardedModel(sequence(), inputs="tokens")  # type: ignore[arg-type]
    ),
    "an index that is None": refused(ARGUMENT, "token_log_probs: ignore_index: expected an int, got NoneType", "-100")(
        lambda: token_log_probs(random(2, 3, 4), torch.zeros(2, 3).long(), ignore_index=None)
    ),
    "a sum of a number": refused(ARGUMENT, "ShardedSequence.all_reduce: x: expected Tensor, got int", "help(cp_mesh.")(
        lambda: sequence().all_reduce(3)  # type: ignore[arg-type]
    ),
    "a norm that is None": refused(ARGUMENT, "clip_grad_norm: max_norm: expected float, got NoneType")(
        lambda: cp_mesh.clip_grad_norm([], None)  # type: ignore[arg-type]
    ),
    "tokens without a batch dim": refused(ARGUMENT, "tokens", "[B, S, ...], got (24,)", "tokens[None]")(
        lambda: cp_mesh.parallelize(Model(), cp(), {"": ShardedModel(sequence())})(torch.zeros(S, dtype=torch.int64))
    ),
    "a length that changes": refused(ARGUMENT, "sequence length", "of 8, got 9", "at their end, labels with -100")(
        lambda: cp_mesh.parallelize(Model(), cp(), {"": ShardedModel(sequence())})(torch.zeros(1, 9).long())
    ),
    "a length that changes, of several": refused(ARGUMENT, "expected 8, got 9", "leave length= out, and pad")(
        lambda: cp_mesh.parallelize(Model(), cp(), {"": ShardedModel(sequence(length=8))})(torch.zeros(1, 9).long())
    ),
    "an input that the model lacks": refused(ARGUMENT, "ShardedModel(Model)", "named 'ids'", "['tokens', 'positions']")(
        lambda: cp_mesh.parallelize(Model(), cp(), {"": ShardedModel(sequence(), inputs=("ids",))})
    ),
    "positions that the model lacks": refused(ARGUMENT, "ShardedModel(Model)", "named 'position_ids'", "positions=")(
        lambda: cp_mesh.parallelize(Model(), cp(), {"": ShardedModel(sequence(), positions="position_ids")})
    ),
    "gradients without fully_shard": refused(ARGUMENT, "sum_gradients", "a model under fully_shard", "Model")(
        lambda: cp_mesh.sum_gradients(Model())
    ),
}


"""Cases that cp_mesh does not yet refuse as it should, and what it does."""

Outcome = tuple[tuple[str, ...], str, int] | None
"""Class names of an exception up to its bases, its text, and the collectives issued before it."""


def refuse(rank: int) -> tuple[int, dict[str, Outcome]]:
    make_meshes()
    before = num_collectives()
    attend()
    by_valid_call = num_collectives() - before
    outcomes: dict[str, Outcome] = {}
    for name, case in CASES.items():
        before = num_collectives()
        outcomes[name] = None
        try:
            case.call()
        except Exception as error:
            kinds = tuple(kind.__name__ for kind in type(error).__mro__)
            outcomes[name] = kinds, str(error), num_collectives() - before
        forget_plans()  # see test_a_refused_call_leaves_nothing_behind
    return by_valid_call, outcomes


@pytest.fixture(scope="module")
def outcomes(pool: Any) -> list[dict[str, Outcome]]:
    results = pool(WORLD_SIZE).run(refuse, timeout=120.0)
    # The count sees the ring of a call that is not refused; else a count of zero would say nothing.
    assert all(by_valid_call == 2 for by_valid_call, _ in results)  # stages of one and of two steps
    return [outcomes for _, outcomes in results]


@pytest.mark.parametrize("name", CASES)
def test_every_rank_refuses(name: str, outcomes: list[dict[str, Outcome]]) -> None:
    case = CASES[name]
    for rank in range(WORLD_SIZE):
        outcome = outcomes[rank][name]
        assert outcome is not None, f"rank {rank} did not raise"
        kinds, message, num_collectives = outcome
        assert kinds[0] == case.error, f"rank {rank}: {kinds[0]}: {message}"
        assert BASES[case.error] in kinds
        missing = [part for part in case.says if part not in message]
        assert not missing, f"rank {rank} does not say {missing}: {message}"
        assert num_collectives == case.num_collectives


# Options of other types and values than those of the table above. A call with them is refused in words of this library,
# or computes: what would be taken for something else is none of both.
JUNK: dict[str, Any] = {
    "None": None, "True": True, "0": 0, "1": 1, "-1": -1, "a fraction": 0.5, "nan": float("nan"), "inf": float("inf"),
    "a word": "x", "words": "a|b,c:d", "no word": "", "bytes": b"1", "a list": [1], "a dict": {}, "an object": object(),
    "a type": int, "a tensor": torch.ones(3), "a bool tensor": torch.ones(1, dtype=torch.bool),
    "a complex number": 1j, "a meta tensor": torch.ones(8, device="meta"), "a numpy number": np.float32(0.5),
    "a numpy integer": np.int64(1), "a tensor of 1": torch.tensor(1), "a tensor of a fraction": torch.tensor(0.5),
}  # fmt: skip
ONE, FRACTION = {"1", "a numpy integer", "a tensor of 1"}, {"a fraction", "a numpy number", "a tensor of a fraction"}
MEANINGFUL = {  # what may pass: by option, names of values
    "scale": {"None", *ONE, *FRACTION},
    "softcap": {"None", *ONE, *FRACTION},
    "dropout_p": {"0", *FRACTION},  # with a seed
    "dropout_seed": {"None", "0", *ONE},
    "ulysses_degree": {"None"},
    "head_chunks": {"None", *ONE},
    "deterministic": {"None", "True"},
    "seq_dim": {"None"},
    "seq_len": {"None"},
    "causal": {"True"},
    "prefix": {"0", *ONE},
    "length": {"None", "0", *ONE},
}
OPTIONAL_TENSORS = {"sinks", "alibi_slopes", "bias", "documents", "key_padding", "blocks"}


def junk(rank: int) -> list[str]:
    """Options and values that were neither refused in this library's words nor meant anything."""
    make_meshes()
    of_masks = [field.name for field in fields(Mask)]
    public = [name for name in inspect.signature(attention).parameters if not name.startswith("_")]
    options = [*public, *of_masks]
    problems = []
    for option, (name, value) in product(options, JUNK.items()):
        seed = {"dropout_seed": 1} if option == "dropout_p" else {"dropout_p": 0.5} if option == "dropout_seed" else {}
        before = num_collectives()
        try:
            given = {"mask": Mask(**{option: value})} if option in of_masks else {option: value}
            attention(**local() | seed | given)
        except (cp_mesh.ArgumentError, cp_mesh.UnsupportedError) as error:
            if num_collectives() != before or not str(error):
                problems.append(f"{option}={name}: refused after a collective: {error}")
            continue
        except Exception as error:
            problems.append(f"{option}={name}: {type(error).__name__}: {error}")
            continue
        allowed = MEANINGFUL.get(option, set()) | ({"None"} if option in OPTIONAL_TENSORS else set())
        if option == "return_lse":
            allowed = {"True"}
        if name not in allowed and not (option == "window" and name == "None"):
            problems.append(f"{option}={name} computed something")
    return problems


def test_nothing_is_taken_for_something_else(pool: Any) -> None:
    for problems in pool(WORLD_SIZE).run(junk, timeout=120.0):
        assert not problems, "\n".join(problems)


def other_numbers(rank: int) -> None:
    """Results of numbers of Python, NumPy and tensors are the same."""
    make_meshes()
    arguments = local()
    for method in ({"head_chunks": 2}, {"method": "hybrid", "ulysses_degree": 2}):
        plain: dict[str, Any] = {"seq_dim": 2, "seq_len": S, "scale": 0.5, "softcap": 3.0} | method
        want = attention(**arguments, **plain, mask=Mask(window=(7, 0), prefix=3, length=20))
        for kind in (np.asarray, torch.tensor):
            given = {name: x if isinstance(x, str) else kind(x)[()] for name, x in plain.items()}
            mask = Mask(window=(kind(7)[()], kind(0)[()]), prefix=kind(3)[()], length=kind(20)[()])
            assert torch.equal(attention(**arguments, **given, mask=mask), want)
    for kind in (np.int64, torch.tensor):
        whole = sequence(length=kind(21))
        assert whole == sequence(length=21) and whole.seq_len == 24 and whole.for_batch(kind(5)).length == 5
        assert cp_mesh.geometry.Joint(kind(4), (kind(12), ZigZag())) == cp_mesh.geometry.Joint(4, (12, ZigZag()))
        assert type(cp_mesh.inference.ShardedCache(whole, kind(9)).capacity) is int
        run_core(Core(scale=kind(1)), ulysses_degree=kind(2), method="hybrid")
    q, k, v = (local()[name] for name in ("query", "key", "value"))
    want = cp_mesh.inference.decode(q, k, v, mesh=cp(), q_lens=[ROWS] * WORLD_SIZE)
    assert torch.equal(cp_mesh.inference.decode(q, k, v, mesh=cp(), q_lens=[np.int64(ROWS)] * WORLD_SIZE), want)
    assert cp_mesh.tools.verify(cp(), seq_len=np.int64(64), scores={"scale": torch.tensor(0.5)}).passed


def test_numbers_of_other_kinds_are_taken_as_they_are(pool: Any) -> None:
    pool(WORLD_SIZE).run(other_numbers)


def refused_then_right(rank: int) -> Tensor:
    forget_plans()
    arguments = local()
    try:
        with pytest.raises((ValueError, RuntimeError)):
            attention(**arguments, seq_len=float(S))
        return attention(**arguments, seq_len=S)
    finally:
        forget_plans()


def test_a_refused_call_leaves_nothing_behind(pool: Any) -> None:
    assert pool(WORLD_SIZE).run(refused_then_right)[0].shape == (B, H, ROWS, D)


NO_PROCESS_GROUP = """
import torch, cp_mesh
q = torch.randn(1, 2, 8, 4)
for call in (lambda: cp_mesh.attention(q, q, q), lambda: cp_mesh.ShardedSequence(None)):
    try:
        call()
    except cp_mesh.ArgumentError as error:
        print(error)
"""


def test_no_process_group(tmp_path: Path) -> None:
    script = tmp_path / "no_process_group.py"
    script.write_text(NO_PROCESS_GROUP)
    said = run_script(script, []).printed.splitlines()
    assert len(said) == 2
    assert 'after init_process_group, pass mesh=mesh["cp"]' in said[0]
    assert said[1].startswith("ShardedSequence.mesh: expected a 1-D DeviceMesh, or a 2-D one")
