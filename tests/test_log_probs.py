"""Log-probabilities of tokens in chunks, and sums over documents, against log_softmax of whole logits on one rank."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from inside import inner, room
from ranks import REFUSALS, mesh, on_ranks, refused
from test_loss import peak_of
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from cp_mesh import (
    ArgumentError,
    Contiguous,
    Mask,
    RankMismatchError,
    ShardedSequence,
    Striped,
    ZigZag,
    cross_entropy,
    parallelize,
    sum_gradients,
    token_log_probs,
)
from cp_mesh.tensor_parallel import VocabParallelHead
from cp_mesh.training import document_sums

ops = room("losses_in_chunks")
Cuts, state_of = inner("cuts", "Cuts"), inner("group_state", "state_of")
V, C, B, S = 19, 6, 2, 23


def head(dtype: torch.dtype = torch.float64, bias: bool = True) -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(C, V, bias).to(dtype)


def rows(dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    made = torch.Generator().manual_seed(1)
    labels = torch.randint(V, (B, S), generator=made)
    labels[:, ::5] = -100
    return torch.randn(B, S, C, generator=made, dtype=torch.float64).to(dtype), labels


def direct(hidden: Tensor, labels: Tensor, linear: nn.Linear, temperature: float = 1.0) -> Tensor:
    logits = F.linear(hidden, linear.weight, linear.bias)
    logp = (logits.to(torch.promote_types(logits.dtype, torch.float32)) / temperature).log_softmax(-1)
    return logp.gather(-1, labels.clamp(min=0)[..., None])[..., 0].masked_fill(labels < 0, 0)


def step(logp: Tensor, *inputs: Any) -> list[Tensor]:
    weights = torch.linspace(-1, 2, logp.numel(), dtype=logp.dtype).view_as(logp)
    return [logp.detach(), *torch.autograd.grad((logp * weights).sum(), [x for x in inputs if x is not None])]


def assert_same(found: Any, want: Any) -> None:
    for x, y in zip(found, want, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize(("num_rows", "temperature", "bias"), [(1, 1.0, False), (7, 0.7, True), (46, 0.7, True)])
def test_hidden_states(num_rows: int, temperature: float, bias: bool) -> None:
    """46 rows, in chunks."""
    (hidden, labels), linear = rows(), head(bias=bias)
    hidden.requires_grad_()
    leaves = hidden, linear.weight, linear.bias
    want = step(direct(hidden, labels, linear, temperature), *leaves)
    with mock.patch.object(ops, "CHUNK_BYTES", num_rows * V * 8):
        options = {"weight": linear.weight, "bias": linear.bias, "temperature": temperature}
        assert_same(step(token_log_probs(hidden, labels, **options), *leaves), want)


def test_logits_and_frozen_tensors() -> None:
    (hidden, labels), linear = rows(), head()
    logits = F.linear(hidden, linear.weight, linear.bias).detach().requires_grad_()
    want = step(logits.log_softmax(-1).gather(-1, labels.clamp(min=0)[..., None])[..., 0] * (labels >= 0), logits)
    assert_same(step(token_log_probs(logits, labels), logits), want)
    linear.requires_grad_(False)
    hidden.requires_grad_()
    found = step(token_log_probs(hidden, labels, weight=linear.weight, bias=linear.bias), hidden)
    assert_same(found, step(direct(hidden, labels, linear), hidden))
    ignored = token_log_probs(hidden, torch.full_like(labels, -7), weight=linear.weight, ignore_index=-7)
    assert not ignored.any() and not torch.autograd.grad(ignored.sum(), hidden)[0].any()
    assert token_log_probs(hidden[:, :0], labels[:, :0], weight=linear.weight).shape == (B, 0)


@pytest.mark.parametrize("how", ["bfloat16", "autocast"])
def test_half_precision(how: str) -> None:
    """Logits round as those of the linear; sums over chunks are in float32, so gradients round once."""
    dtype = torch.bfloat16 if how == "bfloat16" else torch.float32
    (hidden, labels), linear = rows(dtype), head(dtype, bias=False)
    hidden.requires_grad_()
    with mock.patch.object(ops, "CHUNK_BYTES", 5 * V * 4), torch.autocast("cpu", enabled=how == "autocast"):
        found = step(token_log_probs(hidden, labels, weight=linear.weight), hidden, linear.weight)
        want = step(direct(hidden, labels, linear), hidden, linear.weight)
    assert [x.dtype for x in found] == [torch.float32, dtype, dtype]
    torch.testing.assert_close(found[0], want[0], rtol=1e-6, atol=1e-6)
    wide = [x.detach().to(torch.bfloat16).double().requires_grad_() for x in (hidden, linear.weight)]
    twin = head(bias=False)
    twin.weight = nn.Parameter(wide[1])
    exact = step(direct(wide[0], labels, twin), wide[0], twin.weight)
    for x, y in zip(found[1:], exact[1:], strict=True):
        assert (x.double() - y).abs().max() <= 2**-7 * y.abs().max()


@pytest.mark.unpoisoned
def test_memory() -> None:
    """A few chunks of logits, never the whole."""
    made = torch.Generator().manual_seed(0)
    hidden, weight = torch.randn(1, 1024, 8, generator=made), torch.randn(512, 8, generator=made).requires_grad_()
    labels = torch.randint(512, (1, 1024), generator=made)
    whole = 1024 * 512 * 4
    with mock.patch.object(ops, "CHUNK_BYTES", whole // 32):
        peak = peak_of(lambda: token_log_probs(hidden, labels, weight=weight).sum().backward())
    assert peak <= whole // 4
    assert peak_of(lambda: (hidden @ weight.t()).log_softmax(-1).sum().backward()) >= 2 * whole


def test_compiled() -> None:
    """It is left out of the graph."""
    (hidden, labels), linear = rows(), head()

    def both(x: Tensor) -> Tensor:
        return token_log_probs(x * 2, labels, weight=linear.weight).sum() * 3

    hidden.requires_grad_()
    want = torch.autograd.grad(both(hidden), hidden)
    found = torch.autograd.grad(torch.compile(both, backend="aot_eager")(hidden), hidden)
    torch.testing.assert_close(found, want, rtol=1e-12, atol=1e-13)


DOCUMENTS = {
    "one": None,
    "packed": torch.tensor([0] * 4 + [1] + [2] * 9 + [3] * 9),
    "excluded, of each row": torch.tensor([[-1] * 2 + [0] * 9 + [1] * 12, [5] * 3 + [7] * 17 + [-1] * 3]),
}
LAYOUTS = {"contiguous": Contiguous(), "zigzag": ZigZag(), "striped": Striped()}


def runs(documents: Tensor | None) -> list[Tensor]:
    """For each document, which of [B, S] it has."""
    ids = torch.zeros(B, S, dtype=torch.int64) if documents is None else documents.expand(B, S)
    return [
        (ids == i) & (torch.arange(B)[:, None] == b)
        for b in range(B)
        for i in ids[b].unique_consecutive().tolist()
        if i >= 0
    ]


def dpo(sums: Tensor) -> Tensor:
    """A loss of all documents that is no sum over tokens."""
    return F.softplus(-0.3 * (sums - 0.5 * sums.flip(0)).cumsum(0)).mean()


class WithHead(nn.Module):
    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.linear = linear

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        return token_log_probs(x, labels, weight=self.linear.weight, bias=self.linear.bias, temperature=1.3)


@pytest.mark.parametrize(
    ("layout", "documents", "size"),
    [
        ("zigzag", "packed", 3),
        ("striped", "excluded, of each row", 3),
        ("contiguous", "one", 3),
        ("zigzag", "packed", 2),
    ],
)
@on_ranks("size")
def test_sums_of_documents(axis: Any, layout: str, documents: str, size: int) -> None:
    """With padding, and FSDP2 on two ranks; equal bit by bit on all ranks."""
    (hidden, labels), linear = rows(), head()
    logp = direct(hidden.requires_grad_(), labels, linear, 1.3)
    want = torch.stack([logp[which].sum() for which in runs(DOCUMENTS[documents])])
    wanted = torch.autograd.grad(dpo(want), [hidden, *linear.parameters()])
    sequence, model = ShardedSequence(axis, LAYOUTS[layout], length=S), WithHead(linear)
    if size == 2:
        sum_gradients(fully_shard(model, mesh=axis))
    local = sequence.shard({"hidden": hidden.detach(), "labels": labels})
    mask = None if documents == "one" else Mask(documents=DOCUMENTS[documents])
    logp = model(local["hidden"].requires_grad_(), local["labels"])
    sums = document_sums(logp, sequence=sequence, mask=mask)
    (dpo(sums) / size).backward()
    every = [torch.empty_like(sums) for _ in range(size)]
    dist.all_gather(every, sums.detach())
    assert all(torch.equal(x, sums) for x in every)
    grads = [x.grad.full_tensor() if size == 2 else dist.all_reduce(x.grad) or x.grad for x in linear.parameters()]
    assert_same([sums, sequence.unshard(local["hidden"].grad), *grads], [want, *wanted])


@on_ranks(2)
def test_a_vocabulary_over_tp() -> None:
    (hidden, labels), linear = rows(), head()
    want = step(direct(hidden.requires_grad_(), labels, linear, 1.3), hidden, *linear.parameters())
    axis, model = mesh((2,), ("tp",)), nn.Sequential(head())
    parallelize(model, axis, {"0": VocabParallelHead(mode="all_reduce")})
    found = step(token_log_probs(model(hidden), labels, temperature=1.3), hidden, *model.parameters())
    assert_same([x.full_tensor() if isinstance(x, DTensor) else x for x in found], want)
    with pytest.raises(ArgumentError, match="neither temperature nor bias"):
        token_log_probs(model(hidden), labels, bias=linear.bias)
    with pytest.raises(ArgumentError, match="VocabParallelHead, without weight="):
        token_log_probs(hidden, labels, weight=model[0].weight)


@on_ranks(2)
def test_labels_of_other_rows(rank: int, axis: Any) -> None:
    """In the first step, after a reference model: rank 1 learns why rank 0 does not come."""
    sequence, length = ShardedSequence(axis), 28
    whole = torch.randint(V, (B, length + 1), generator=torch.Generator().manual_seed(length))
    labels = sequence.shard({"tokens": whole[:, :-1], "labels": whole[:, 1:]})["labels"]
    x, cuts = torch.randn(*labels.shape, V, requires_grad=True), state_of(axis.get_group(), Cuts)
    token_log_probs(x.detach(), labels)
    labels = labels if rank else whole[:, 1:].chunk(2, 1)[0]
    mask = Mask(documents=torch.zeros(length, dtype=torch.long))
    told = "cp rank 0 raised.*" * rank + "the labels of contiguous rows" + ", beside tokens in zigzag" * (rank == 0)
    with pytest.raises(REFUSALS, match=f"(?s){told}"):
        document_sums(token_log_probs(x, labels), sequence=sequence, mask=mask)
    cuts.done = False  # for tests after this one


@on_ranks(2)
def test_right_labels(rank: int, axis: Any) -> None:
    """Parts of the rows, gathered completions of as many rows, tokens at their own positions, evaluations.

    A first trained call with right labels ends the check, so wrong labels pass after it.
    """
    sequence, cuts = ShardedSequence(axis), state_of(axis.get_group(), Cuts)
    whole = torch.randint(V, (B, 33), generator=torch.Generator().manual_seed(3))
    labels = sequence.shard({"tokens": whole[:, :-1], "labels": whole[:, 1:]})["labels"]
    x = torch.randn(*labels.shape, V, requires_grad=True)
    token_log_probs(x[:, 1:], labels[:, 1:])
    assert cuts.tokens is not None and not cuts.done
    token_log_probs(sequence.gather(x)[:, 16:], whole[:, 17:])
    assert cuts.tokens is not None and not cuts.done
    own = sequence.shard({"tokens": whole[:, :-1]})["tokens"]
    with pytest.warns(UserWarning, match="which suits masked tokens"):
        token_log_probs(x.detach(), own)
    first = cuts.tokens
    sequence.shard({"tokens": whole[:, :-1]})
    assert cuts.tokens is not first  # after an evaluation the next batch is kept
    token_log_probs(x, labels)
    assert cuts.tokens is None and cuts.done
    sequence.shard({"tokens": whole[:, :-1]})
    token_log_probs(x, whole[:, 1:].chunk(2, 1)[rank])
    cuts.done = False  # for tests after this one


@on_ranks(2)
def test_documents_that_differ_are_refused(rank: int, axis: Any) -> None:
    mask = Mask(documents=torch.tensor([0] * (3 + rank) + [1] * (5 - rank)))
    with refused("documents", RankMismatchError):
        document_sums(torch.ones(1, 4), sequence=ShardedSequence(axis, length=8), mask=mask)


@on_ranks(2)
def test_weights_that_are_away_are_refused(axis: Any) -> None:
    linear = head(bias=False)
    model = nn.Sequential(linear)
    for part in (linear, model):
        fully_shard(part, mesh=axis)
    hidden, labels = rows()
    weights = []
    linear.register_forward_hook(lambda module, *_: weights.append(module.weight), prepend=True)
    model(hidden)
    with pytest.raises(ArgumentError, match="got DTensors"):
        token_log_probs(hidden, labels, weight=linear.weight)
    with pytest.raises(ArgumentError, match="got one that FSDP2 has freed"):
        token_log_probs(hidden, labels, weight=weights[0])
    given: dict[str, Any] = {"weight": linear.weight.full_tensor().detach(), "mesh": axis}
    with pytest.raises(ArgumentError, match=r"teacher: expected local tensors, got DTensors; under FSDP2 call unshard"):
        cross_entropy(hidden, labels, **given, teacher=(hidden, linear.weight.detach()))
    with pytest.raises(ArgumentError, match=r"teacher's weight: .* FSDP2 has freed; under FSDP2 call unshard"):
        cross_entropy(hidden, labels, **given, teacher=(hidden, weights[0].detach()))
    linear.unshard()
    assert cross_entropy(hidden, labels, **given, teacher=(hidden, linear.weight.detach())) > 0


def test_what_is_refused() -> None:
    (hidden, labels), linear = rows(), head()
    for match, given in {
        "labels": {"x": hidden[:, 1:], "weight": linear.weight},
        r"hidden states \[..., C\]": {"x": hidden[..., 1:], "weight": linear.weight},
        "weight.*and bias": {"x": hidden, "weight": linear.weight, "bias": linear.bias[1:]},
        "a positive number": {"x": hidden, "weight": linear.weight, "temperature": 0.0},
        "neither temperature nor bias": {"x": hidden, "temperature": 2.0},
    }.items():
        with pytest.raises(ArgumentError, match=match):
            token_log_probs(labels=labels, **given)
    with pytest.raises(IndexError, match="out of bounds"):
        token_log_probs(hidden, labels + V, weight=linear.weight)
