"""What errors print: masks, layouts, meshes and placements as users write them."""

from __future__ import annotations

import re
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from inside import inner
from ranks import mesh
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

import cp_mesh
from cp_mesh import ContextParallel, Contiguous, Mask, ShardedSequence, Striped, ZigZag, attention
from cp_mesh.geometry import Balanced, Joint, Permuted, ZigZagDocuments

warn, written = inner("errors", "warn", "written")

DOCUMENTS = torch.tensor([[0, 0, 1, 1]], dtype=torch.int32)


@pytest.mark.parametrize(
    "value",
    [
        *(Contiguous(), ZigZag(), Striped(), Permuted([2, 0, 1]), Balanced([[4, 2], [0, 4]]), ZigZagDocuments([0, 4])),
        Joint(4, (3, Permuted([2, 0, 1]))),
        *(Mask(), Mask(causal=False), Mask(window=(1023, 0)), Mask(causal=False, window=(None, 3))),
        *(Mask(prefix=7), Mask(length=0), Mask(window=(5, None), prefix=3, length=9)),
    ],
    ids=str,
)
def test_what_is_printed_makes_it_again(value: Any) -> None:
    for text in (str(value), repr(value), written(value)):
        again = eval(text, globals())
        assert type(again) is type(value) and again.spec() == value.spec()
        assert isinstance(value, Mask) or again == value


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (Mask(), "Mask(causal=True)"),
        (Mask(documents=DOCUMENTS), "Mask(causal=True, documents=int32[1, 4])"),
        (Mask(causal=False, key_padding=DOCUMENTS > 0), "Mask(causal=False, key_padding=bool[1, 4])"),
        (Permuted(range(4096)), "Permuted([0, 1, 2, ..., 4095])"),
        (Balanced([[i, 1] for i in range(9)]), "Balanced([[0, 1], [1, 1], [2, 1], ..., [8, 1]])"),
        (torch.bfloat16, "torch.bfloat16"),
        ((Shard(2), Replicate(), Partial()), "(Shard(2), Replicate(), Partial(sum))"),
        ((Shard(2),), "(Shard(2),)"),
        (Shard(1), "Shard(1)"),
        (torch.Size([2, 3]), "(2, 3)"),
        (["a name", ZigZag()], "['a name', ZigZag()]"),
        ("words", "words"),
        (ZigZag, "ZigZag"),
        (ContextParallel, "ContextParallel"),
    ],
    ids=str,
)
def test_written(value: Any, text: str) -> None:
    assert written(value) == text


def rows(*shape: int) -> Tensor:
    return torch.zeros(shape or (1, 2, 4, 8))


def dtensors(*placements: Any) -> list[Tensor]:
    axes = mesh((2, 2), ("cp", "tp"))
    return [DTensor.from_local(rows(), axes, each, run_check=False) for each in placements]


def style(axes: Any, **options: Any) -> ContextParallel:
    return ContextParallel(ShardedSequence(axes["cp"]), **options)


class Core(nn.Module):
    def forward(self, x: Tensor, is_causal: bool = True) -> Tensor:
        return torch.nn.functional.scaled_dot_product_attention(x, x, x, is_causal=is_causal)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Core(), Core()

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block()])

    def forward(self, x: Tensor) -> Tensor:
        return self.blocks[0](x)


def call_of_core(axes: Any, plan: str = "blocks.*.*", length: int | None = None) -> Model:
    core = ContextParallel(ShardedSequence(axes["cp"], length=length), mask=Mask(window=(3, 0)))
    return cp_mesh.parallelize(Model(), axes["cp"], {plan: core})


ERRORS: dict[str, tuple[Callable[[Any], Any], str]] = {
    "a layout by name": (
        lambda axes: attention(rows(), rows(), rows(), mesh=axes["cp"], layout="zigzag"),
        "layout: expected a Layout, got 'zigzag'; ZigZag(), ",
    ),
    "a layout's class": (
        lambda axes: attention(rows(), rows(), rows(), mesh=axes["cp"], layout=ZigZag),
        "layout: expected a Layout, got ZigZag; ZigZag(), ",
    ),
    "a layout for a mask": (
        lambda axes: attention(rows(), rows(), rows(), mesh=axes["cp"], mask=Permuted(range(99))),
        "mask: expected a Mask, got Permuted([0, 1, 2, ..., 98]); ",
    ),
    "the layout of a sequence by name": (
        lambda axes: ShardedSequence(axes["cp"], "striped"),
        "ShardedSequence.layout: expected a Layout, got 'striped'; pass an instance: ZigZag(), with parentheses",
    ),
    "a whole mesh for a sequence": (lambda axes: ShardedSequence(axes), "got DeviceMesh(cp=2, tp=2); pass the cp axis"),
    "a whole mesh for a plan": (
        lambda axes: cp_mesh.parallelize(nn.Sequential(Core()), axes, {"0": style(axes)}),
        "parallelize: mesh: expected one axis of a DeviceMesh, got DeviceMesh(cp=2, tp=2); pass",
    ),
    "another axis for a plan": (
        lambda axes: cp_mesh.parallelize(nn.Sequential(Core()), axes["tp"], {"0": style(axes)}),
        "expected the axis of the ShardedSequence, DeviceMesh(cp=2), got DeviceMesh(tp=2); ",
    ),
    "a style's class": (
        lambda axes: cp_mesh.parallelize(nn.Sequential(Core()), axes["cp"], {"0": ContextParallel}),
        "expected an instance of a ParallelStyle, got ContextParallel; ",
    ),
    "a layout in a style": (
        lambda axes: style(axes, layout=Striped()),
        "ContextParallel.layout: expected a function that returns a Layout, got Striped(); ",
    ),
    "a call and a mask": (
        lambda axes: call_of_core(axes).blocks[0].first(rows(), is_causal=False),
        "is_causal: expected True, as in the style's Mask(causal=True, window=(3, 0)), got False; ",
    ),
    "dtypes": (
        lambda axes: attention(rows(), rows().bfloat16(), rows(), mesh=axes["cp"]),
        "q, k, v: expected one dtype, got torch.float32, torch.bfloat16, torch.float32; ",
    ),
    "rows of a layout": (
        lambda axes: attention(rows(), rows(), rows(), mesh=axes["cp"], seq_len=12),
        "of 2, zigzag layout, seq_len=12), got 4 rows; ",
    ),
    "whole tokens": (
        lambda axes: attention(rows(1, 2, 8, 8), rows(1, 2, 8, 8), rows(1, 2, 8, 8), mesh=axes["cp"], seq_len=8),
        "got 8 rows; these look like whole sequences: shard them, sequence.shard({...}), or let a ShardedModel do it",
    ),
    "whole tokens of a padded sequence": (
        lambda axes: call_of_core(axes, length=7)(rows(1, 2, 7, 8)),
        "got 7 rows; these look like whole sequences: shard them",
    ),
    "a layer outside of the plan, without a root": (
        lambda axes: call_of_core(axes, "blocks.*.first")(rows(1, 2, 4, 8)),
        "plan: expected every self-attention in a ContextParallel module, got scaled_dot_product_attention outside of "
        "one, in 'blocks.0.second', where each rank attends to its shard alone; add 'blocks.0.second': ContextPara",
    ),
    "a misspelt method": (
        lambda axes: attention(rows(), rows(), rows(), mesh=axes["cp"], method="all-gahter"),
        "method: expected one of auto, ring, all_gather, ulysses, hybrid, got 'all-gahter'; method='all_gather' works",
    ),
    "a layout as a method": (
        lambda axes: attention(rows(), rows(), rows(), mesh=axes["cp"], method="zigzag"),
        "got 'zigzag'; method='ring' works",
    ),
    "placements": (
        lambda axes: attention(*dtensors([Shard(2), Replicate()], [Shard(2), Partial()], [Shard(2), Partial()])),
        "key's placements: expected query's, (Shard(2), Replicate()) on DeviceMesh(cp=2, tp=2), "
        "got (Shard(2), Partial(sum)) on DeviceMesh(cp=2, tp=2); ",
    ),
    "the group of all ranks": (
        lambda axes: attention(*dtensors(*[[Shard(2), Replicate()]] * 3), mesh=dist.group.WORLD),
        "expected an axis of the DTensors' mesh, DeviceMesh(cp=2, tp=2), got ProcessGroup of ranks [0, 1, 2, 3]; ",
    ),
}


def messages(rank: int) -> dict[str, str]:
    axes, found = mesh((2, 2), ("cp", "tp")), {}
    for name, (call, _) in ERRORS.items():
        with pytest.raises((ValueError, NotImplementedError)) as raised:
            call(axes)
        found[name] = str(raised.value)
    dist.barrier()
    return found


@pytest.fixture(scope="module")
def printed(pool: Any) -> list[dict[str, str]]:
    return pool(4).run(messages)


@pytest.mark.parametrize("name", ERRORS)
def test_an_error_prints_what_users_write(printed: list[dict[str, str]], name: str) -> None:
    for found in printed:
        assert ERRORS[name][1] in found[name], found[name]
        assert not re.search(r"<|object at|tensor\(|stride=|Shard\(dim=|\bS\(|torch\.Size", found[name]), found[name]


class Warns(nn.Module):
    forward = staticmethod(warn)


def with_hook() -> Tensor:
    x = torch.ones((), requires_grad=True)
    x.register_hook(warn)
    return x


WARNINGS: dict[str, Callable[[], Any]] = {
    "function": lambda: warn("text"),
    "module": lambda: Warns()("text"),
    "backward": lambda: torch.autograd.backward(with_hook()),
    "context manager": lambda: contextmanager(warn)("text"),
    "dataclass": lambda: Mask(documents=torch.arange(8)),
    "dataclasses.replace": lambda: replace(Mask(), documents=torch.arange(8)),
}


@pytest.mark.parametrize("name", WARNINGS)
def test_a_warning_names_the_line_of_the_user(name: str) -> None:
    call = WARNINGS[name]
    with pytest.warns(UserWarning, match="^cp_mesh: ") as warned:
        call()
    assert [(x.filename, x.lineno) for x in warned] == [(__file__, call.__code__.co_firstlineno)]
