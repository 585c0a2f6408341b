"""Label smoothing, z-loss and a teacher, in chunks and over shards, against `F.cross_entropy` of whole logits."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from inside import inner, room
from ranks import REFUSALS, mesh, on_ranks
from test_log_probs import LAYOUTS, B, C, S, V, head, rows
from test_loss import peak_of
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

from cp_mesh import (
    ArgumentError,
    RankMismatchError,
    ShardedSequence,
    UnsupportedError,
    cross_entropy,
    parallelize,
    sum_gradients,
)
from cp_mesh.tensor_parallel import VocabParallelHead

ops, prepare_losses = room("losses_in_chunks"), inner("token_losses", "prepare_losses")
TERMS: dict[str, tuple[float, float, bool]] = {
    "label smoothing": (0.2, 0.0, False),
    "z-loss": (0.0, 3e-2, False),
    "teacher": (0.0, 0.0, True),
    "all": (0.2, 3e-2, True),
}
"""label_smoothing, z_loss, and whether there is a teacher."""
EXACT = {"rtol": 1e-12, "atol": 1e-13}


def teacher_of(bias: bool = True) -> tuple[Tensor, ...]:
    """Hidden states [B, S, 4], weight [V, 4] and bias [V]."""
    made = torch.Generator().manual_seed(2)
    shapes = [(B, S, 4), (V, 4), *[(V,)] * bias]
    return tuple(2 * torch.randn(shape, generator=made, dtype=torch.float64) for shape in shapes)


def whole(logits: Tensor, labels: Tensor, terms: str, soft: Tensor) -> Tensor:
    """The sum of the losses of valid tokens, from whole logits of the student and of the teacher."""
    label_smoothing, z_loss, taught = TERMS[terms]
    valid = labels != -100
    targets = soft.softmax(-1)[valid] if taught else labels[valid]
    total = F.cross_entropy(logits[valid], targets, label_smoothing=label_smoothing, reduction="sum")
    return total + z_loss * logits[valid].logsumexp(-1).square().sum()


def arguments(terms: str, teacher: Any) -> dict[str, Any]:
    label_smoothing, z_loss, taught = TERMS[terms]
    return {"label_smoothing": label_smoothing, "z_loss": z_loss, "teacher": teacher if taught else None}


def assert_same(found: Any, want: Any, **tolerance: float) -> None:
    for x, y in zip(found, want, strict=True):
        torch.testing.assert_close(x, y, **(tolerance or EXACT))


def step(total: Tensor, *leaves: Tensor) -> list[Tensor]:
    return [total.detach(), *torch.autograd.grad(0.7 * total, leaves)]


def losses(x: Tensor, labels: Tensor, **given: Any) -> Tensor:
    """The sum of the losses, as `cross_entropy` takes it."""
    return prepare_losses("cross_entropy", x, labels, -100, **given)().sum()


@pytest.mark.parametrize(("terms", "num_rows"), [*((terms, 7) for terms in TERMS), ("all", 46)])
def test_hidden_states(terms: str, num_rows: int) -> None:
    """Of both models, with a temperature and biases, in chunks of 46 rows."""
    (hidden, labels), linear, teacher = rows(), head(), teacher_of()
    leaves = [hidden.requires_grad_(), linear.weight, linear.bias]
    logits, soft = F.linear(*leaves) / 1.7, F.linear(*teacher) / 1.7
    want = step(whole(logits, labels, terms, soft), *leaves)
    with mock.patch.object(ops, "CHUNK_BYTES", num_rows * V * 8):
        options = {"weight": linear.weight, "bias": linear.bias, "temperature": 1.7}
        assert_same(step(losses(hidden, labels, **options, **arguments(terms, teacher)), *leaves), want)
    plain = losses(hidden, labels, **options)
    assert not torch.isclose(plain, want[0], rtol=1e-3)  # the terms count


def test_large_logits_under_a_temperature() -> None:
    """Integers near a million, which float32 holds, but not their share of the temperature."""
    (hidden, labels), linear, teacher = rows(), head(), teacher_of()
    leaves = [x.detach().round() for x in (hidden, linear.weight, linear.bias)]
    both = [[x, weight, bias + 1e6] for x, weight, bias in (leaves, [x.round() for x in teacher])]
    given = [x.float().requires_grad_() for x in both[0]]
    options = {"weight": given[1], "bias": given[2], "temperature": 1.7, "teacher": [x.float() for x in both[1]]}
    found = step(losses(given[0], labels, **options), *given)
    exact = [x.requires_grad_() for x in both[0]]
    want = step(whole(F.linear(*exact) / 1.7, labels, "teacher", F.linear(*both[1]) / 1.7), *exact)
    assert_same(found, [x.float() for x in want], rtol=3e-6, atol=1e-5)


@pytest.mark.parametrize("terms", TERMS)
def test_logits(terms: str) -> None:
    (hidden, labels), teacher = rows(), teacher_of()
    logits, soft = F.linear(hidden, head().weight).detach().requires_grad_(), F.linear(*teacher)
    with mock.patch.object(ops, "CHUNK_BYTES", 7 * V * 8):
        found = step(losses(logits, labels, **arguments(terms, soft)), logits)
    assert_same(found, step(whole(logits, labels, terms, soft), logits))


def test_a_padded_vocabulary() -> None:
    """Whose logits are -inf in both models, and a teacher that is NaN where tokens are ignored."""
    (hidden, labels), soft = rows(), F.linear(*teacher_of())
    logits = F.linear(hidden, head().weight).detach().requires_grad_()
    labels, padded = labels.clamp(max=V - 2), torch.arange(V) == V - 1
    want = step(whole(logits[..., :-1], labels, "teacher", soft[..., :-1]), logits)
    soft = soft.masked_fill(padded, -torch.inf).where(labels[..., None] != -100, torch.nan)
    assert_same(step(losses(logits.masked_fill(padded, -torch.inf), labels, teacher=soft), logits), want)


@pytest.mark.parametrize("fused", [False, True])
def test_recomputed_and_differentiated_twice(fused: bool) -> None:
    """Saved tensors are unpacked once, as a checkpoint wants; a second derivative is refused."""
    (hidden, labels), linear, teacher = rows(), head(bias=False), teacher_of(bias=False)
    hidden.requires_grad_()

    def total(hidden: Tensor) -> Tensor:
        if fused:
            return losses(hidden, labels, weight=linear.weight, **arguments("all", teacher))
        return losses(linear(hidden), labels, **arguments("all", F.linear(*teacher)))

    leaves = [hidden, linear.weight]
    assert_same(step(checkpoint(total, hidden, use_reentrant=False), *leaves), step(total(hidden), *leaves))
    found = torch.autograd.grad(total(hidden), leaves, create_graph=True)
    assert_same([x.detach() for x in found], torch.autograd.grad(total(hidden), leaves))
    with pytest.raises(UnsupportedError, match="no second derivative"):
        sum(x.square().sum() for x in found).backward()


@on_ranks(2)
def test_evaluated_first(axis: Any) -> None:
    """An evaluation is no first step, whose labels are checked: these are shifted after they were sharded."""
    linear = head(bias=False)
    sequence = ShardedSequence(axis, LAYOUTS["zigzag"], length=S)
    tokens = torch.arange(B * S).view(B, S) % V
    labels = F.pad(tokens[:, 1:], (0, 1), value=-100)
    own = sequence.shard({"input_ids": tokens, "labels": labels})
    hidden = F.one_hot(own["input_ids"], V)[..., :C].double()
    with torch.no_grad():
        cross_entropy(hidden, own["labels"], axis, weight=linear.weight)
    own = sequence.shard({"input_ids": tokens})
    wrong = F.pad(own["input_ids"][:, 1:], (0, 1), value=-100)
    with pytest.raises(REFUSALS, match="the next tokens of this rank's rows"):
        cross_entropy(hidden, wrong, axis, weight=linear.weight)


def test_half_precision() -> None:
    """Losses in float32, and gradients that are rounded once."""
    (hidden, labels), teacher = rows(), teacher_of()
    logits = F.linear(hidden, head().weight).detach().bfloat16().requires_grad_()
    soft = F.linear(*teacher).bfloat16()
    found = step(losses(logits, labels, **arguments("all", soft)), logits)
    assert [x.dtype for x in found] == [torch.float32, torch.bfloat16]
    want = step(whole(logits.double(), labels, "all", soft.double()), logits)
    torch.testing.assert_close(found[0].double(), want[0], rtol=1e-5, atol=0.0)
    torch.testing.assert_close(found[1], want[1], rtol=2**-7, atol=1e-5)


class Student(nn.Module):
    """Its forward returns this rank's share, since FSDP2 has the weight whole there."""

    def __init__(self, axis: Any, terms: str) -> None:
        super().__init__()
        self.linear, self.axis, self.terms = head(bias=False), axis, terms

    def forward(self, x: Tensor, labels: Tensor, teacher: tuple[Tensor, ...]) -> Tensor:
        given = {"weight": self.linear.weight, "temperature": 1.7}
        return cross_entropy(x, labels, self.axis, **given, **arguments(self.terms, teacher))


@pytest.mark.parametrize(
    ("terms", "layout", "fsdp"), [*((terms, "zigzag", False) for terms in TERMS), ("all", "striped", True)]
)
@on_ranks(2)
def test_shards(axis: Any, terms: str, layout: str, fsdp: bool) -> None:
    """The sum of shares is the mean over valid tokens, of which one rank has more; packed rows ignore their ends."""
    (hidden, labels), linear, teacher = rows(), head(bias=False), teacher_of(bias=False)
    total = whole(F.linear(hidden.requires_grad_(), linear.weight) / 1.7, labels, terms, F.linear(*teacher) / 1.7)
    mean = total / (labels != -100).sum()
    want = [mean.detach(), *torch.autograd.grad(mean, [hidden, linear.weight])]
    soft, weight = teacher
    sequence, model = ShardedSequence(axis, LAYOUTS[layout], length=S), Student(axis, terms)
    if fsdp:
        sum_gradients(fully_shard(model, mesh=axis))
    local = sequence.shard({"hidden": hidden.detach(), "labels": labels, "soft": soft})
    share = model(local["hidden"].requires_grad_(), local["labels"], (local["soft"], weight))
    share.backward()
    grad = model.linear.weight.grad
    if not fsdp:
        dist.all_reduce(grad)
    total = share.detach().clone()
    dist.all_reduce(total)
    grad = grad.full_tensor() if isinstance(grad, DTensor) else grad
    assert_same([total, sequence.unshard(local["hidden"].grad), grad], want)


OVER_TP = [*((terms, "all_reduce", V) for terms in TERMS), ("all", "reduce_scatter", V)]


@pytest.mark.parametrize(
    ("terms", "mode", "num_tokens"), [*OVER_TP, ("z-loss", "all_reduce", 10), ("teacher", "reduce_scatter", 10)]
)
@on_ranks(2)
def test_a_vocabulary_over_tp(rank: int, terms: str, mode: Any, num_tokens: int) -> None:
    """19 tokens, 10 on rank 0; those of rank 1 may all be padding, whose biases are -inf in both models."""
    (hidden, labels), linear, (soft, *last) = rows(), head(), teacher_of()
    hidden, labels = hidden[:, :22].requires_grad_(), labels[:, :22].clamp(max=num_tokens - 1)
    logits, taught = (x[..., :num_tokens] / 1.7 for x in (linear(hidden), F.linear(soft[:, :22], *last)))
    want = step(whole(logits, labels, terms, taught) / (labels != -100).sum(), hidden, *linear.parameters())
    axes, (model, teacher) = mesh((1, 2), ("cp", "tp")), [nn.Sequential(x) for x in (linear, nn.Linear(4, V).double())]
    teacher[0].load_state_dict(dict(zip(("weight", "bias"), last, strict=True)))
    for x in (model, teacher):
        x[0].bias.data[num_tokens:] = -torch.inf
        parallelize(x, axes["tp"], {"0": VocabParallelHead(mode=mode)})
    given, soft = (x[:, :22] if mode == "all_reduce" else x[:, :22].chunk(2, 1)[rank] for x in (hidden, soft))
    with torch.no_grad():
        options = {"temperature": 1.7, **arguments(terms, teacher(soft))}
    with mock.patch.object(ops, "CHUNK_BYTES", 7 * 10 * 8):
        found = step(cross_entropy(model(given), labels, axes["cp"], **options), hidden, *model.parameters())
    found = [x.full_tensor() if isinstance(x, DTensor) else x for x in found]
    if mode == "reduce_scatter":  # rows of this rank
        dist.all_reduce(found[1], group=axes["tp"].get_group())
    assert_same(found, want)


@on_ranks(2)
def test_refused_over_tp() -> None:
    axes, (hidden, labels), model = mesh((1, 2), ("cp", "tp")), rows(), nn.Sequential(head(bias=False))
    parallelize(model, axes["tp"], {"0": VocabParallelHead(mode="all_reduce")})
    with torch.no_grad():
        soft = model(hidden)
    for given in (
        {"logits": model(hidden), "teacher": torch.zeros(B, S, V, dtype=torch.float64)},
        {"logits": hidden @ head().weight.detach().mT, "teacher": soft},
        {"logits": model(hidden), "teacher": (soft,)},
        {"logits": model(hidden), "teacher": soft._replace(sharded=True)},
    ):
        with pytest.raises(ArgumentError, match="teacher: expected logits of VocabParallelHead in both models or in"):
            cross_entropy(labels=labels, mesh=axes["cp"], **given)
    smoothing = 0.1 * (1 + axes["tp"].get_local_rank())  # other losses on the ranks of one vocabulary
    with pytest.raises(RankMismatchError, match="label_smoothing, z_loss and temperature"):
        cross_entropy(model(hidden), labels, axes["cp"], label_smoothing=smoothing)


@on_ranks(2)
def test_compiled(axis: Any) -> None:
    (hidden, labels), teacher = rows(), teacher_of()
    soft = F.linear(*teacher)

    def share(logits: Tensor) -> Tensor:
        return cross_entropy(2 * logits, labels, axis, **arguments("all", soft))

    logits = F.linear(hidden, head().weight).detach().requires_grad_()
    want = step(share(logits), logits)
    found = step(torch.compile(share, backend="aot_eager", fullgraph=True)(logits), logits)
    assert_same(found, want)


@pytest.mark.unpoisoned
def test_memory() -> None:
    """Whole logits of neither model."""
    made = torch.Generator().manual_seed(0)
    hidden, weight = torch.randn(1024, 8, generator=made), torch.randn(512, 8, generator=made)
    labels, logits_bytes = torch.randint(512, (1024,), generator=made), 1024 * 512 * 4
    given = {"weight": weight.clone().requires_grad_(), "teacher": (hidden, weight), "label_smoothing": 0.1}
    with mock.patch.object(ops, "CHUNK_BYTES", logits_bytes // 32):
        assert peak_of(lambda: losses(hidden, labels, z_loss=0.1, **given).backward()) <= logits_bytes // 4


def test_what_is_refused() -> None:
    (hidden, labels), linear, (soft, weight, bias) = rows(), head(bias=False), teacher_of()
    linear.requires_grad_(False)
    logits = F.linear(hidden, linear.weight)
    for match, given in {
        "label_smoothing from 0 to 1": {"x": logits, "label_smoothing": 1.1},
        "a z_loss of 0 or more, got label_smoothing=0.0, z_loss=-1": {"x": logits, "z_loss": -1.0},
        "z_loss=nan": {"x": logits, "z_loss": float("nan")},
        "without a gradient": {"x": logits, "teacher": logits.clone().requires_grad_()},
        "teacher: expected logits": {"x": logits, "teacher": (soft, weight)},
        r"of hidden states \[..., C\].*asks for the tuple": {"x": hidden, "weight": linear.weight, "teacher": logits},
        "are those of the student": {"x": hidden, "weight": linear.weight, "teacher": (soft[:, 1:], weight)},
        "rows and V are": {"x": hidden, "weight": linear.weight, "teacher": (soft, weight[1:], bias[1:])},
        "perhaps bias": {"x": hidden, "weight": linear.weight, "teacher": (soft, weight, bias[1:])},
        "got tuple; of an output": {"x": logits, "teacher": ()},
        "got dict; of an output": {"x": logits, "teacher": {"logits": 1}},
        "a number, got Parameter": {"x": hidden, "weight": weight, "temperature": nn.Parameter(weight[0, 0])},
        "a number, got Tensor": {"x": logits, "z_loss": logits[0, 0, 0]},
    }.items():
        with pytest.raises(ArgumentError, match=match):
            losses(labels=labels, **given)
    given = {"weight": linear.weight, "teacher": (soft, weight, None)}  # a linear without a bias has bias None
    assert torch.equal(losses(hidden, labels, **given), losses(hidden, labels, **given | {"teacher": (soft, weight)}))
    assert soft.shape[-1] != C  # the models may have other widths
