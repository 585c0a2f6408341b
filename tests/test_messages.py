"""What errors print: masks, layouts, meshes and placements as users write them."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
from inside import inner
from torch import Tensor, nn
from torch.distributed.tensor import Partial, Replicate, Shard

from cp_mesh import ContextParallel, Contiguous, Mask, Striped, ZigZag
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
