"""Models of Transformers over cp x tp with the linears of this library, against one rank: loss and every gradient, fp64."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

pytest.importorskip("transformers")

import oracle  # noqa: E402
from families import FAMILIES, OLD, build  # noqa: E402
from ranks import mesh  # noqa: E402
from test_transformers import apart, batch, documents_of  # noqa: E402
from torch import Tensor, nn  # noqa: E402
from torch.distributed.fsdp import fully_shard  # noqa: E402
from torch.distributed.tensor import DTensor  # noqa: E402

from cp_mesh import ArgumentError, Striped, UnsupportedError, ZigZag, sum_gradients, vocabulary  # noqa: E402
from cp_mesh.integrations.transformers import parallelize, sequence_of  # noqa: E402

pytestmark = pytest.mark.skipif(OLD, reason="forwards of Transformers 4 read other names")
BOUND = 1e-6


@dataclass(frozen=True)
class Case:
    """``changes``: of the family's config."""

    family: str
    batch: str = "plain"
    linears: dict[str, Any] = field(default_factory=dict)
    fsdp: bool = False
    changes: dict[str, Any] = field(default_factory=dict)


def over(axis: Any, x: Tensor) -> Tensor:
    x = x.detach().clone()
    dist.all_reduce(x, group=axis.get_group())
    return x


def compare(case: Case, cp_size: int) -> dict[str, float]:
    """How far a model on cp x tp ranks is from one rank."""
    axes, given = mesh((cp_size, dist.get_world_size() // cp_size), ("cp", "tp")), batch(case.batch)
    reference = build(case.family, oracle.NAME, **case.changes)
    logits, loss = oracle.whole_loss(reference, documents_of(given), **given)
    model = build(case.family, "eager", **case.changes)
    parallelize(model, axes["cp"], tp=axes["tp"], linears=case.linears, layout=Striped())
    if case.fsdp:
        for layer in model.model.layers:
            fully_shard(layer, mesh=axes["cp"])
        sum_gradients(fully_shard(model, mesh=axes["cp"]))
    output = model(**given)
    found = {"loss": apart(over(axes["cp"], output.loss), loss)}
    found["logits"] = apart(sequence_of(model).unshard(output.logits.whole()), logits)
    output.loss.backward()
    wanted = dict(reference.named_parameters())
    for name, x in model.named_parameters():
        assert isinstance(x, DTensor) or case.linears.get("mode") == "all_reduce", name
        grad = x.grad.full_tensor() if isinstance(x.grad, DTensor) else x.grad
        found[name] = apart(grad if case.fsdp else over(axes["cp"], grad), wanted[name].grad)
    return found


def run(rank: int, cases: list[Case], cp_size: int) -> list[dict[str, float]]:
    return [compare(case, cp_size) for case in cases]
