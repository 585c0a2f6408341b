"""Log-probabilities of tokens in chunks, and sums over documents, against log_softmax of whole logits on one rank."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from inside import inner, room
from ranks import mesh, on_ranks
from test_loss import peak_of
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from cp_mesh import (
    ArgumentError,
    Contiguous,
    Mask,
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

ops = room("token_losses")
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


@pytest.mark.parametrize("num_rows", [1, 7, 45, 46, 100])
@pytest.mark.parametrize(("temperature", "bias"), [(1.0, False), (0.7, True)])
def test_hidden_states(num_rows: int, temperature: float, bias: bool) -> None:
    """46 rows, in chunks."""
    (hidden, labels), linear = rows(), head(bias=bias)
    hidden.requires_grad_()
    leaves = hidden, linear.weight, linear.bias
    want = step(direct(hidden, labels, linear, temperature), *leaves)
    with mock.patch.object(ops, "CHUNK_BYTES", num_rows * V * 8):
        options = {"weight": linear.weight, "bias": linear.bias, "temperature": temperature}
        found = step(token_log_probs(hidden, labels, **options), *leaves)
    for x, y in zip(found, want, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-12, atol=1e-13)


def test_logits_and_frozen_tensors() -> None:
    (hidden, labels), linear = rows(), head()
    logits = F.linear(hidden, linear.weight, linear.bias).detach().requires_grad_()
    want = step(logits.log_softmax(-1).gather(-1, labels.clamp(min=0)[..., None])[..., 0] * (labels >= 0), logits)
    for x, y in zip(step(token_log_probs(logits, labels), logits), want, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-12, atol=1e-13)
    linear.requires_grad_(False)
    hidden.requires_grad_()
    found = step(token_log_probs(hidden, labels, weight=linear.weight, bias=linear.bias), hidden)
    for x, y in zip(found, step(direct(hidden, labels, linear), hidden), strict=True):
        torch.testing.assert_close(x, y, rtol=1e-12, atol=1e-13)
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


def of_ranks(rank: int, size: int, layout: str, documents: str, fsdp: bool) -> tuple[Tensor, list[Tensor]]:
    axis, (hidden, labels), linear = mesh((size,), ("cp",)), rows(), head()
    sequence = ShardedSequence(axis, LAYOUTS[layout], length=S)
    mask = None if documents == "one" else Mask(documents=DOCUMENTS[documents])
    model = WithHead(linear)
    if fsdp:
        fully_shard(model, mesh=axis)
        sum_gradients(model)
    local = sequence.shard({"hidden": hidden, "labels": labels})
    local["hidden"].requires_grad_()
    sums = document_sums(model(local["hidden"], local["labels"]), sequence=sequence, mask=mask)
    (dpo(sums) / size).backward()
    if not fsdp:
        for x in linear.parameters():
            dist.all_reduce(x.grad)
    grads = [x.grad.full_tensor() if isinstance(x.grad, DTensor) else x.grad for x in linear.parameters()]
    return sums.detach(), [sequence.unshard(local["hidden"].grad), *grads]


class WithHead(nn.Module):
    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.linear = linear

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        return token_log_probs(x, labels, weight=self.linear.weight, bias=self.linear.bias, temperature=1.3)


@pytest.mark.parametrize("documents", DOCUMENTS)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.quick("zigzag-packed", "striped-excluded")
def test_sums_of_documents(pool: Any, layout: str, documents: str) -> None:
    """With padding; equal bit by bit on all ranks."""
    assert_documents(pool, 3, layout, documents, fsdp=False)


def test_sums_under_fsdp(pool: Any) -> None:
    assert_documents(pool, 2, "zigzag", "packed", fsdp=True)


def assert_documents(pool: Any, size: int, layout: str, documents: str, fsdp: bool) -> None:
    (hidden, labels), linear = rows(), head()
    hidden.requires_grad_()
    logp = direct(hidden, labels, linear, 1.3)
    want = torch.stack([logp[which].sum() for which in runs(DOCUMENTS[documents])])
    grads = torch.autograd.grad(dpo(want), [hidden, *linear.parameters()])
    found = pool(size).run(of_ranks, size, layout, documents, fsdp)
    for sums, of_rank in found:
        assert torch.equal(sums, found[0][0])
        torch.testing.assert_close(sums, want.detach(), rtol=1e-12, atol=1e-13)
        for x, y in zip(of_rank, grads, strict=True):
            torch.testing.assert_close(x, y, rtol=1e-12, atol=1e-13)


def over_tp(rank: int) -> list[Tensor]:
    axis, (hidden, labels), model = mesh((2,), ("tp",)), rows(), nn.Sequential(head(bias=False))
    parallelize(model, axis, {"0": VocabParallelHead(mode="all_reduce")})
    hidden.requires_grad_()
    logp = token_log_probs(model(hidden), labels)
    step_of = step(logp, hidden, model[0].weight)
    with pytest.raises(ArgumentError, match="neither temperature nor bias"):
        token_log_probs(model(hidden), labels, temperature=0.5)
    with pytest.raises(ArgumentError, match="VocabParallelHead, without weight="):
        token_log_probs(hidden, labels, weight=model[0].weight)
    return [x.full_tensor() if isinstance(x, DTensor) else x for x in step_of]


def test_a_vocabulary_over_tp(pool: Any) -> None:
    (hidden, labels), linear = rows(), head(bias=False)
    hidden.requires_grad_()
    want = step(direct(hidden, labels, linear), hidden, linear.weight)
    for found in pool(2).run(over_tp):
        for x, y in zip(found, want, strict=True):
            torch.testing.assert_close(x, y, rtol=1e-12, atol=1e-13)


def labels_of_other_rows(rank: int, length: int) -> None:
    """In the first step, after a reference model: rank 1 learns why rank 0 does not come."""
    sequence = ShardedSequence(mesh((2,), ("cp",)))
    whole = torch.randint(V, (B, length + 1), generator=torch.Generator().manual_seed(length))
    batch = sequence.shard({"tokens": whole[:, :-1], "labels": whole[:, 1:]})
    labels, cuts = batch["labels"], state_of(sequence.mesh.get_group(), Cuts)
    x = torch.randn(*labels.shape, V, requires_grad=True)
    token_log_probs(x.detach(), labels)
    if rank == 0:
        labels = whole[:, 1:].chunk(2, 1)[0]
    mask = Mask(documents=torch.zeros(length, dtype=torch.long))
    try:
        document_sums(token_log_probs(x, labels), sequence=sequence, mask=mask)
    finally:
        cuts.done = False  # for tests after this one


def test_labels_of_other_rows(pool: Any) -> None:
    first, second = pool(2).run_expecting_error(labels_of_other_rows, 28, timeout=20.0)
    assert first is not None and "got the labels of contiguous rows, beside tokens in zigzag" in first.message
    assert second is not None and "cp rank 0 raised" in second.message
    assert "the labels of contiguous rows" in second.message


@on_ranks(2)
def test_right_labels(rank: int) -> None:
    """Parts of the rows, gathered completions of as many rows, tokens at their own positions, evaluations.

    A first trained call with right labels ends the check, so wrong labels pass after it.
    """
    sequence = ShardedSequence(mesh((2,), ("cp",)))
    cuts = state_of(sequence.mesh.get_group(), Cuts)
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


def differing(rank: int) -> None:
    sequence = ShardedSequence(mesh((2,), ("cp",)), length=8)
    mask = Mask(documents=torch.tensor([0] * (3 + rank) + [1] * (5 - rank)))
    document_sums(torch.ones(1, 4), sequence=sequence, mask=mask)


def test_documents_that_differ_are_refused(pool: Any) -> None:
    for raised in pool(2).run_expecting_error(differing):
        assert raised is not None and raised.type == "RankMismatchError" and "documents" in raised.message


@on_ranks(2)
def test_weights_that_are_away_are_refused() -> None:
    linear = head(bias=False)
    model = nn.Sequential(linear)
    fully_shard(linear, mesh=mesh((2,), ("cp",)))
    fully_shard(model, mesh=mesh((2,), ("cp",)))
    hidden, labels = rows()
    weights = []
    linear.register_forward_hook(lambda module, *_: weights.append(module.weight), prepend=True)
    model(hidden)
    with pytest.raises(ArgumentError, match="got DTensors"):
        token_log_probs(hidden, labels, weight=linear.weight)
    with pytest.raises(ArgumentError, match="got one that FSDP2 has freed"):
        token_log_probs(hidden, labels, weight=weights[0])
    given: dict[str, Any] = {"weight": linear.weight.full_tensor().detach(), "mesh": mesh((2,), ("cp",))}
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
