"""Linears, embeddings and losses over tp: every number is that of one rank, and nothing travels that need not."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import product
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from ranks import mesh
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from cp_mesh import cross_entropy, parallelize
from cp_mesh.tensor_parallel import OverlappedColwise, OverlappedRowwise, VocabParallelEmbedding, VocabParallelHead

V, C, O, HIDDEN = 11, 6, 10, 7  # of which tp = 2, 3 and 4 divide few
IGNORED = -100


class Mixer(nn.Module):
    """In the place of attention: three linears of one input, and one that joins the features again."""

    def __init__(self, bias: bool) -> None:
        super().__init__()
        self.wq, self.wk, self.wv = (nn.Linear(C, O, bias=bias) for _ in range(3))
        self.wo = nn.Linear(O, C, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.wo(self.wq(x) * self.wk(x).sigmoid() + self.wv(x))


class FeedForward(nn.Module):
    def __init__(self, bias: bool) -> None:
        super().__init__()
        self.w1, self.w2, self.w3 = nn.Linear(C, HIDDEN, bias), nn.Linear(HIDDEN, C, bias), nn.Linear(C, HIDDEN, bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


class Net(nn.Module):
    """Tokens [..., S] to logits [..., S, V], in float64."""

    def __init__(self, bias: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding, self.mixer, self.feed_forward = nn.Embedding(V, C, padding_idx=3), Mixer(bias), FeedForward(bias)
        self.head = nn.Linear(C, V, bias=False)
        self.to(torch.float64)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        x = x + self.mixer(x.tanh())
        return self.head((x + self.feed_forward(x.tanh())).tanh())


def plan(mode: Any = "reduce_scatter", recompute: bool = False, local: bool = True) -> dict[str, Any]:
    row = {"mode": mode, "use_local_output": local}
    column = {"mode": mode, "recompute_all_gather": recompute}
    return {
        "embedding": VocabParallelEmbedding(**row),
        "mixer": OverlappedColwise("wq", "wk", "wv", **column),
        "mixer.wo": OverlappedRowwise(**row),
        "feed_forward": OverlappedColwise("w1", "w3", **column),
        "feed_forward.w2": OverlappedRowwise(**row),
        "head": VocabParallelHead(mode=mode),
    }


def tokens_and_labels(shape: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(8)
    tokens, labels = (torch.randint(V, shape, generator=generator) for _ in range(2))
    labels.flatten()[1::5] = IGNORED
    return tokens, labels


def gradients(model: nn.Module) -> dict[str, Tensor]:
    """The whole ones."""
    found = {name: x.grad for name, x in model.named_parameters() if x.grad is not None}
    return {name: x.full_tensor() if isinstance(x, DTensor) else x for name, x in found.items()}


def expected(model: nn.Module, tokens: Tensor, labels: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    """The loss of one rank, and its gradients."""
    loss = F.cross_entropy(model(tokens).flatten(0, -2), labels.flatten(), ignore_index=IGNORED)
    loss.backward()
    return loss.detach(), gradients(model)


def alone_and_tp() -> tuple[DeviceMesh, DeviceMesh]:
    """An axis of this rank alone, and tp over all ranks."""
    axes = mesh((1, dist.get_world_size()), ("dp", "tp"))
    return axes["dp"], axes["tp"]


@dataclass(frozen=True)
class Case:
    mode: str = "reduce_scatter"
    recompute: bool = False
    local: bool = True
    bias: bool = False
    shape: tuple[int, ...] = (2, 12)
    frozen: tuple[str, ...] = ()


CASES = [
    Case(),
    Case(recompute=True, bias=True),
    Case(mode="all_reduce", bias=True, shape=(2, 7)),
    Case(mode="all_reduce", local=False, shape=(13,)),
    Case(local=False, bias=True, shape=(3, 7)),
    Case(local=False, recompute=True, shape=(13,), bias=True),
    Case(local=False, shape=(1, 5), bias=True),
    Case(local=False, shape=(2, 1)),  # rows for one rank alone
    Case(shape=(24,), bias=True),
    Case(bias=True, frozen=("mixer.wq.weight", "mixer.wv.weight", "mixer.wv.bias", "feed_forward.w2.weight")),
    Case(bias=True, recompute=True, frozen=("weight",)),  # biases alone
    Case(mode="all_reduce", bias=True, frozen=("weight",)),
    Case(frozen=("embedding.weight",)),
]


def run_cases(rank: int, cases: list[Case]) -> list[str]:
    """What is not as on one rank."""
    problems, (alone, tp) = [], alone_and_tp()
    for case in cases:
        tokens, labels = tokens_and_labels(case.shape)
        model = Net(case.bias)
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(not name.endswith(case.frozen or "none"))
        loss, grads = expected(copy.deepcopy(model), tokens, labels)
        parallelize(model, tp, plan(case.mode, case.recompute, case.local))
        found = cross_entropy(model(tokens), labels, alone)
        found.backward()
        every = {"loss": loss} | grads
        own = {"loss": found.detach()} | gradients(model)
        if every.keys() != own.keys():
            problems.append(f"{case}: gradients of {own.keys()}, expected {every.keys()}")
        for name in every.keys() & own.keys():
            error = (own[name] - every[name]).abs().max() / every[name].abs().max()
            if not error <= 1e-12:
                problems.append(f"{case}: {name} off by {error}")
        for name, parameter in model.named_parameters():
            if isinstance(parameter.grad, DTensor) and parameter.grad.placements != parameter.placements:
                problems.append(f"{case}: gradient of {name} is {parameter.grad.placements}")
    return problems


@pytest.mark.parametrize("tp_size", [1, 2, 3, 4])
def test_loss_and_gradients_are_those_of_one_rank(pool: Any, tp_size: int) -> None:
    cases = [case for case in CASES if not case.local or case.mode == "all_reduce" or case.shape[-1] % tp_size == 0]
    assert len(cases) == len(CASES)
    problems = pool(tp_size).run(run_cases, cases)
    assert not any(problems), "\n".join(sum(problems, []))
