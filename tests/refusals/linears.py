"""Linears, embeddings and losses over tp: what all ranks refuse, and what one rank of tp alone does."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from model import Joined
from torch import Tensor, nn
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle

from cp_mesh import cross_entropy, parallelize
from cp_mesh.tensor_parallel import OverlappedColwise, OverlappedRowwise, VocabParallelEmbedding, VocabParallelHead
from refusals.calls import ARGUMENT, UNSUPPORTED, Cases, cp_tp, place

C, V = 6, 11
COL, ROW, EMBED, HEAD = OverlappedColwise, OverlappedRowwise, VocabParallelEmbedding, VocabParallelHead


def tp_rank() -> int:
    return cp_tp()["tp"].get_local_rank()


def over_tp(module: nn.Module, style: ParallelStyle, at: str = "") -> Any:
    style.src_data_rank = None  # nothing is scattered
    return parallelize(module, cp_tp()["tp"], {at: style})


def linear(bias: bool = True) -> nn.Module:
    return nn.Linear(C, 4, bias)


def call(style: Any, module: nn.Module | None = None, x: Tensor | None = None) -> None:
    rows = torch.ones(2, 4, C // 2) if isinstance(style, ROW) else torch.ones(2, 3, C)
    over_tp(module or linear(), style)(rows if x is None else x)


def both(m: Any, x: Tensor) -> Tensor:
    return m.a(x) + m.b(x)


def written_between(m: Any, x: Tensor) -> Tensor:
    out = m.a(x)
    return out + m.b(x.add_(1))


def columns(*names: str, calls: Any = both, **linears: nn.Module) -> None:
    call(COL(*(names or "ab")), Joined(calls, **{"a": linear(), "b": linear()} | linears))


class Own(nn.Linear):
    def forward(self, input: Tensor) -> Tensor:
        return 2 * super().forward(input)


def embedded(tokens: Tensor, compiled: bool = False, **options: Any) -> None:
    module = over_tp(nn.Embedding(**{"num_embeddings": V, "embedding_dim": C} | options), EMBED())
    (torch.compile(module, backend="eager", fullgraph=True) if compiled else module)(tokens)


def loss_of(labels: Tensor, over: str = "cp", evaluated: bool = False) -> None:
    """Over a vocabulary of 4, of 6 rows."""
    head = over_tp(linear(False), HEAD())
    if evaluated:
        with torch.no_grad():
            cross_entropy(head(torch.ones(3, C)), torch.arange(6) % 4, cp_tp()["cp"])
    cross_entropy(head(torch.ones(3, C)), labels, cp_tp()[over])


def odd_bias(**options: Any) -> None:
    module = linear()
    module.bias = nn.Parameter(module.bias.double())
    call(ROW(**options), module)


def sharded_elsewhere() -> None:
    call(ROW(), over_tp(linear(), ColwiseParallel()))


OF_CPUS = "it joins CUDA devices, the tensors are on cpu|transport='functional' works"
CASES: Cases = {
    "a mode of linears": (ARGUMENT, "mode='reduce_scatter' works", lambda: COL(mode="scatter")),
    "nothing to gather": (ARGUMENT, "False in mode", lambda: COL(mode="all_reduce", recompute_all_gather=True)),
    "a transport of linears": (ARGUMENT, "transport='functional'", lambda: ROW(transport="nvlink")),
    "copies of a sum": (ARGUMENT, "'auto' or 'functional' in mode 'all_reduce', got 'symmetric_memory'",
        lambda: COL(mode="all_reduce", transport="symmetric_memory")),
    "symmetric memory of columns": (UNSUPPORTED, OF_CPUS, lambda: call(COL(transport="symmetric_memory"))),
    "symmetric memory of rows": (UNSUPPORTED, OF_CPUS, lambda: call(ROW(transport="symmetric_memory"))),
    "a name of no linear": (ARGUMENT, "names of linears in the module, got 'c'|it has a, b", lambda: columns("a", "c")),
    "no linear": (ARGUMENT, "expected nn.Linear, got Identity", lambda: columns(b=nn.Identity())),
    "a forward of its own": (UNSUPPORTED, "Own, which has a forward of its own", lambda: columns(b=Own(C, 4))),
    "two inputs": (ARGUMENT, "b called with another tensor, one written",
        lambda: columns(calls=lambda m, x: m.a(x) + m.b(x + 1))),
    "an input that is written": (ARGUMENT, "b called with another tensor", lambda: columns(calls=written_between)),
    "called twice": (ARGUMENT, "a called with another tensor|or twice",
        lambda: columns(calls=lambda m, x: m.a(x) + m.a(x))),
    "not called": (ARGUMENT, "got no call of b|leave it out of the names", lambda: columns(calls=lambda m, x: m.a(x))),
    "in_features": (ARGUMENT, "one in_features and dtype", lambda: columns(b=nn.Linear(C + 1, 4))),
    "two dtypes": (ARGUMENT, "one dtype, got", lambda: columns(a=linear().double(), b=linear().double())),
    "a bias of another dtype": (ARGUMENT, "inputs and weights of one dtype", lambda: odd_bias(mode="all_reduce")),
    "one of sharded rows": (ARGUMENT, "inputs and weights of one dtype", odd_bias),
    "an embedding": (UNSUPPORTED, "max_norm=1.0", lambda: embedded(torch.zeros(1, 4), max_norm=1.0)),
    "a small vocabulary": (ARGUMENT, "a vocabulary of 1", lambda: embedded(torch.zeros(1, 4), num_embeddings=1)),
    "another placement": (ARGUMENT, "a DTensor (Shard(1),) over tp", sharded_elsewhere),
    "linears in vmap": (UNSUPPORTED, "expected no transform of torch.func, got vmap",
        lambda: torch.func.vmap(over_tp(linear(), COL()))(torch.ones(2, 3, C))),
    "a loss over tp": (ARGUMENT, "ranks that hold distinct tokens, got ranks|of one tp group|leave tp out",
        lambda: loss_of(torch.arange(6) % 4, "tp")),
}  # fmt: skip


# What one rank of tp alone refuses: the others hear of it before their first collective.


def dtype_of_rank(style: Any) -> None:
    """Of inputs and weights alike, which no rank refuses alone."""
    dtype = torch.float64 if tp_rank() else torch.float32
    over_tp(linear(), style).to(dtype)(torch.ones(2, 4, C // 2 if isinstance(style, ROW) else C, dtype=dtype))


def placement_of_rank() -> None:
    call(COL(), x=place((2, 6, C), cp_tp()["tp"], Replicate() if tp_rank() else Shard(1)).float())


def call_left_out() -> None:
    module = over_tp(Joined((lambda m, x: m.a(x)) if tp_rank() else both, a=linear(), b=linear()), COL("a", "b"))
    row = over_tp(linear(), ROW())
    module(torch.ones(2, 3, C))
    row(torch.ones(2, 4, C // 2))


def frozen_on_a_rank(
    what: str, style: Any, compiled: bool = False, evaluated: bool = False, module: Any = None
) -> Callable[[], None]:
    """The weight, the bias or the input of a linear needs no gradient on one rank."""

    def run() -> None:
        is_first = tp_rank() == 0
        rows, features = (4, C // 2) if isinstance(style, ROW) else (3, C)
        made = module() if module else linear(not isinstance(style, HEAD))
        call = over_tp(nn.Sequential(made, nn.Identity()), style, "0")
        x = torch.ones(2, rows, features, requires_grad=what != "input" or is_first)
        if isinstance(style, EMBED):
            x = torch.arange(4)[None]
        if evaluated:
            with torch.no_grad():
                call(x)
        if what != "input":
            made.get_parameter(what).requires_grad_(is_first)
        found = torch.compile(call, backend="eager", fullgraph=True)(x) if compiled else call(x)
        if isinstance(style, HEAD):
            cross_entropy(found, torch.zeros(2, 6, dtype=torch.int64), cp_tp()["cp"])

    return run


def unlike(what: str, first: str, second: str) -> str:
    """What is said of tensors that require a gradient on one rank, and on the other."""
    every = "expected the same tensors that require a gradient on every tp rank, got"
    return f"{what}: {every} tp rank 0: {first}; tp rank 1: {second}; give"


EVERY, OF_TOKENS = (
    "input, weight, bias",
    "VocabParallelEmbedding: expected the same tokens on every tp rank, got tp rank 0: ",
)
ALONE: dict[str, tuple[Callable[[], Any], str]] = {
    # only its dp ranks hear of it in the loss's own sum
    "a label outside": (lambda: loss_of(torch.tensor([4 * (dist.get_rank() == 3), 1, 2, 3, 0, 1])),
        "expected 0 <= label < 4, or ignore_index=-100, got"),
    "one after an evaluation": (
        lambda: loss_of(torch.tensor([4 * (dist.get_rank() == 3), 1, 2, 3, 0, 1]), evaluated=True),
        "expected 0 <= label < 4, or ignore_index=-100"),
    "the shape of labels": (lambda: loss_of(torch.zeros(6 + tp_rank(), dtype=torch.int64)),
        "labels: expected shape (6,), got (7,)"),
    "labels": (lambda: loss_of((torch.arange(6) + tp_rank()) % 4),
        "cross_entropy: expected the same labels on every tp rank, got tp rank 0"),
    "rows of a column linear": (lambda: call(COL(), x=torch.ones(3 + tp_rank(), C)), "rows of the sequence"),  # packed
    "the dtype of an input": (
        lambda: call(COL(), x=torch.ones(2, 3, C, dtype=torch.float64 if tp_rank() else torch.float32)),
        "inputs and weights of one dtype"),
    "the dtype of column linears": (lambda: dtype_of_rank(COL()), "column linears: expected the same dtype on every"),
    "the dtype of row linears": (lambda: dtype_of_rank(ROW()), "row linear: expected the same dtype on every"),
    "a placement": (placement_of_rank, "a DTensor (Shard(1),) over tp"),
    "rows that tp does not divide": (lambda: call(ROW(), x=torch.ones(2, 4 + tp_rank(), C // 2)),
        "a multiple of 2 rows"),
    "rows of a row linear": (lambda: call(ROW(), x=torch.ones(2, 4 + 2 * tp_rank(), C // 2)),
        "expected the same rows of the sequence"),
    "a call left out": (call_left_out, "got no call of b"),
    "tokens": (lambda: embedded(torch.arange(4)[None] + tp_rank()), OF_TOKENS),
    "tokens, compiled": (lambda: embedded(torch.arange(4)[None] + tp_rank(), compiled=True), OF_TOKENS),
    "a token outside": (lambda: embedded(torch.tensor([[0, V * tp_rank()]])), "out of range"),
    # where one rank would run another backward
    "no gradient: columns": (frozen_on_a_rank("b.weight", COL("a", "b"),
        module=lambda: Joined(both, a=linear(), b=linear())),
        unlike("column linears", "input, a.weight, b.weight, a.bias, b.bias", "input, a.weight, a.bias, b.bias")),
    "no gradient: an input of columns": (frozen_on_a_rank("input", COL(mode="all_reduce")),
        unlike("column linears", EVERY, "weight, bias")),
    "no gradient: rows after an evaluation": (frozen_on_a_rank("weight", ROW(), evaluated=True),
        unlike("row linear", EVERY, "input, bias")),
    "no gradient: a sum of rows": (frozen_on_a_rank("bias", ROW(mode="all_reduce")),
        unlike("row linear", EVERY, "input, weight")),
    "no gradient: columns, compiled": (frozen_on_a_rank("weight", COL(), compiled=True),
        unlike("column linears", EVERY, "input, bias")),
    "no gradient: rows, compiled": (frozen_on_a_rank("input", ROW(), compiled=True),
        unlike("row linear", EVERY, "weight, bias")),
    "no gradient: an embedding": (frozen_on_a_rank("weight", EMBED(), module=lambda: nn.Embedding(V, C)),
        unlike("VocabParallelEmbedding", "weight", "none")),
    "no gradient: a head": (frozen_on_a_rank("weight", HEAD()), unlike("cross_entropy", "input, weight", "input")),
}  # fmt: skip
