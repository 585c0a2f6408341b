"""Labels, and the loss."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from model import V
from set_ups import RATE, Batch, Net, S, Training, batch_of
from torch import Tensor
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

import cp_mesh
from cp_mesh import Contiguous, Mask, ShardedSequence, Striped, ZigZag
from mistaken.attention import in_layout
from mistaken.listing import RIGHT, every, few, made, mistake, plain_logits, rooted, with_logits

LABELS = "Labels and the loss"


def tokens_of(self: Training, batch: Batch) -> Tensor:
    return self.sequence.shard({"tokens": batch["tokens"]})["tokens"]


def plain_loss(self: Training, logits: Any, labels: Tensor, **options: Any) -> Tensor:
    """PyTorch's, of this rank's rows."""
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


def whole_labels(self: Training, batch: Batch) -> Tensor:
    return batch["labels"]


def by_chunk(self: Training, batch: Batch) -> Tensor:
    return batch["labels"].chunk(2, 1)[self.cp_rank]


def shifted_after(self: Training, batch: Batch) -> Tensor:
    tokens = tokens_of(self, batch)
    return torch.cat([tokens[:, 1:], torch.full_like(tokens[:, :1], -100)], 1)


def shifted_twice(self: Training, batch: Batch) -> Tensor:
    labels = batch["labels"]
    return Training.labels(self, {"labels": torch.cat([labels[:, 1:], labels[:, -1:]], 1)})


def other_batch(self: Training, batch: Batch) -> Tensor:
    return Training.labels(self, batch_of(S, 7, False))


def striped(self: Training, batch: Batch) -> Tensor:
    return ShardedSequence(self.axis, Striped()).shard({"labels": batch["labels"]})["labels"]


for words, labels in {
    "labels by chunk": by_chunk,
    "labels of another layout": striped,
    "labels of another layout, copied": lambda self, batch: striped(self, batch).clone(),
    "labels of another rank": lambda self, batch: batch["labels"][:, ZigZag().positions(S, 2, 1 - self.cp_rank)],
    "labels shifted after sharding": shifted_after,
    "labels not shifted": lambda self, batch: Training.labels(self, {"labels": batch["tokens"]}),
    "labels shifted twice": shifted_twice,
    "labels of another batch on one rank": lambda self, x: (Training.labels, other_batch)[self.cp_rank](self, x),
    "labels of another batch on every rank": other_batch,
}.items():
    mistake(LABELS, words, labels=labels)
mistake(
    LABELS, "labels under another ignore_index", slow=("verify",),  # a rank alone raises, and the others wait
    loss=lambda self, logits, labels, **options: Training.loss(self, logits, labels, ignore_index=-1, **options),
)  # fmt: skip


def of_last_row(loss: Callable[..., Tensor]) -> Callable[..., Tensor]:
    return lambda self, logits, labels, **_: loss(self, logits[:, -1], labels[:, -1].clamp(min=0))


mistake(LABELS, "the last row of a shard", plain_logits, loss=of_last_row(Training.loss))
alone = of_last_row(lambda self, *given: F.cross_entropy(*given))
mistake(LABELS, "the last row of a shard, by F.cross_entropy", plain_logits, loss=alone)
mistake(LABELS, "the mean of a rank's rows", with_logits, loss=plain_loss)


@made(LABELS, "a loss in the model from labels among its inputs", plain_logits)
class LossInModel(Training):
    class Net(Net):
        def forward(self, tokens: Tensor, positions: Any = None, documents: Any = None, labels: Any = None) -> Tensor:
            logits = self.compute(tokens, positions, documents)
            return logits if labels is None else F.cross_entropy(logits.flatten(0, 1), labels.flatten())

    def root_options(self) -> dict[str, Any]:
        return super().root_options() | {"inputs": ("tokens", "labels")}

    def given(self, batch: Batch) -> dict[str, Any]:
        return super().given(batch) | {"labels": batch["labels"] if self.set_up.root else self.labels(batch)}

    def loss(self, logits: Any, labels: Tensor, **options: Any) -> Tensor:
        return logits

    def of_one_rank(self, plain: Net, whole: dict[str, Any]) -> Tensor:
        return plain(**whole)


@made(LABELS, "gathered logits counted on every rank", plain_logits)
class Gathered(Training):
    labels = whole_labels

    def root_options(self) -> dict[str, Any]:
        return super().root_options() | {"gather_output": True}

    def forward(self, given: dict[str, Any]) -> Any:
        found = super().forward(given)
        return found if self.set_up.root else self.sequence.gather(found)


@made(LABELS, "wrong labels of a loss compiled with the model", lambda set_up: set_up.compiled == "whole")
class CompiledLoss(Training):
    labels = by_chunk

    def step(self, number: int) -> None:
        plain = Training.loss

        def both(given: dict[str, Any], labels: Tensor) -> Tensor:
            return plain(self, self.module(**given), labels)

        compiled = torch.compile(both, backend="eager")
        batch = self.batch(number, self.replica)
        loss = compiled(self.given(batch), self.labels(batch))
        self.at = "backward"
        loss.backward()
        self.reduce()
        self.at = "step"
        self.take_step()
        self.off = self.compare(number, [loss])


over_cp = property(lambda self: self.axis)
mistake(LABELS, "a loss over cp alone", plain_logits, dp=True, counted=over_cp)


# ---- rows that are left out, or belong to no label


@made(LABELS, "labels that lack the last row", plain_logits)
class LacksRow(Training):
    """Shifted within the shard."""

    flat: ClassVar[bool] = False

    def loss(self, logits: Any, labels: Tensor, **options: Any) -> Tensor:
        tokens = tokens_of(self, self.batch(0, self.replica))
        logits, labels = logits[:, :-1], tokens[:, 1:]
        return super().loss(*(x.flatten(0, 1) for x in (logits, labels)) if self.flat else (logits, labels))


mistake(LABELS, "labels that lack the last row, flattened", "", LacksRow, flat=True)


@made(LABELS, "a loss in two parts without a count", plain_logits)
class InParts(Training):
    def loss(self, logits: Any, labels: Tensor, **options: Any) -> Tensor:
        parts = zip(logits.tensor_split([-1], dim=1), labels.tensor_split([-1], dim=1), strict=True)
        return sum(super(InParts, self).loss(*part, **self.count(labels)) for part in parts)

    def count(self, labels: Tensor) -> dict[str, Any]:
        return {}


mistake(
    RIGHT, "a loss in two parts with a count", "", InParts,
    count=lambda self, labels: {"count": cp_mesh.training.valid_tokens(labels, self.counted)},
)  # fmt: skip


def outside(self: Training, batch: Batch) -> Tensor:
    found = Training.labels(self, batch)
    return found + V * (self.cp_rank == 1) * (found >= 0)


def later_tokens(self: Training, batch: Batch) -> Tensor:
    """Two places on is the next row of the same rank."""
    return Training.labels(self, {"labels": F.pad(batch["tokens"][:, 2:], (0, 2), value=-100)})


mistake(LABELS, "labels outside of the vocabulary on one rank", slow=("verify",), labels=outside)  # as above
stripes: dict[str, Any] = {"make_sequence": in_layout(Striped())}
mistake(RIGHT, "a striped layout", **stripes)
mistake(LABELS, "labels of later tokens in a striped layout", labels=later_tokens, **stripes)


# ---- after other forwards and losses


def evaluate(self: Training) -> None:
    batch = batch_of(S, 5, self.set_up.documents)
    with torch.no_grad():
        Training.loss(self, self.forward(self.given(batch)), Training.labels(self, batch))


def another_model(self: Training) -> None:
    """A right step of one, both planned before."""
    other = Training(self.rank, self.set_up)
    other.build()
    other.step(0)


def loss_of_nobody(self: Training, model: Any = None) -> None:
    """Whose gradients go to no parameter; before a model has a plan, or after."""
    other, batch = Training(self.rank, self.set_up), self.right(0, self.replica)
    other.build()
    loss = other.loss(other.forward(other.given(batch)), other.labels(batch))
    torch.autograd.grad(loss, [*other.model.parameters()])


def state_of_optimizer(self: Training) -> None:
    """A checkpoint's, which PyTorch makes by a step with learning rate 0."""
    self.optimizer = torch.optim.AdamW(self.model.parameters(), RATE, weight_decay=0.0)
    get_optimizer_state_dict(self.model, self.optimizer)


few_more = "eager, cores, blocks"
mistake(LABELS, "labels by chunk after an evaluation", few_more, before=evaluate, labels=by_chunk)
mistake(LABELS, "labels by chunk of a second model", few_more, before=another_model, labels=by_chunk)
mistake(LABELS, "the mean of a second model's rows", few_more, before=another_model, loss=plain_loss)
mistake(LABELS, "the mean of rows after a loss of nobody", few_more, prepare=loss_of_nobody, loss=plain_loss)
mistake(LABELS, "the mean of rows of a resumed run", few_more, before=state_of_optimizer, loss=plain_loss)
for words, before in {
    "an evaluation before": evaluate,
    "a second model": another_model,
    "a loss of nobody before": loss_of_nobody,
    "a resumed run": state_of_optimizer,
}.items():
    mistake(RIGHT, words, few_more, before=before)


# ---- labels that may well be right


def relabelled(group: str, name: str, change: Callable[[Batch, Tensor], Tensor]) -> None:
    """Labels made from those of a batch and the rank of each token, [S], also for one rank."""

    def right(self: Training, number: int, replica: int) -> Batch:
        batch, ranks = Training.right(self, number, replica), torch.zeros(S, dtype=torch.int64)
        ranks[ZigZag().positions(S, 2, 1)] = 1
        return batch | {"labels": change(batch, ranks)}

    mistake(group, name, few, right=right)


def others(x: Batch) -> Tensor:
    return batch_of(S, 9, False)["labels"]


every_12th, every_2nd, every_3rd = (torch.arange(S) % n == 0 for n in (12, 2, 3))
for words, change in {
    "labels masked on one rank": lambda x, ranks: x["labels"].where(ranks == 0, -100),
    "few labels known on one rank": lambda x, ranks: x["labels"].where(ranks == 0, others(x).where(every_12th, -100)),
    "labels of a teacher at every second token": lambda x, ranks: x["labels"].where(every_2nd, others(x)),
    "padding that counts on one rank": lambda x, ranks: x["labels"] * (ranks == 0),
}.items():
    relabelled(RIGHT, words, change)
relabelled(LABELS, "tokens as labels, as if masked", lambda x, ranks: x["tokens"].where(every_3rd, -100))


def of_counted_rows(self: Training, logits: Any, labels: Tensor, **options: Any) -> Tensor:
    return Training.loss(self, logits[labels != -100], labels[labels != -100], **options)


mistake(RIGHT, "a loss of the rows that count", plain_logits, loss=of_counted_rows)


@made(RIGHT, "cross_entropy in the model", "eager, blocks, FSDP2")
class OurLossInModel(LossInModel):
    blind = ("probe", "verify")  # which need logits

    class Net(Net):
        counted: Any = None

        def forward(self, tokens: Tensor, positions: Any = None, documents: Any = None, labels: Any = None) -> Tensor:
            logits = self.compute(tokens, positions, documents)
            return logits if labels is None else cp_mesh.cross_entropy(logits, labels, self.counted)

    def prepare(self, model: Any) -> None:
        model.counted = self.counted


@made(RIGHT, "a loss of gathered logits", every(plain_logits, rooted))
class OfGathered(Gathered):
    """On every rank of cp, whose gradients are those of one; `verify_model` adds losses of ranks."""

    blind = ("verify",)

    def loss(self, logits: Any, labels: Tensor, **options: Any) -> Tensor:
        return cp_mesh.cross_entropy(logits, labels, self.grid["dp"], **options)

    def compare(self, number: int, losses: list[Tensor]) -> float:
        return super().compare(number, [x / 2 for x in losses])


mistake(
    LABELS, "a share of the loss of gathered logits", every(plain_logits, rooted), Gathered,
    loss=lambda self, *given, **options: plain_loss(self, *given) / (2 * self.replicas),
)  # fmt: skip
mistake(
    RIGHT, "logits gathered as a sum, counted on every rank", "eager, cores, FSDP2", labels=whole_labels,
    forward=lambda self, given: self.sequence.unshard(Training.forward(self, given)),
)  # fmt: skip


@made(RIGHT, "two forwards before their losses", few_more)
class TwoForwards(Training):
    blind = ("verify",)  # which traces one

    def forward(self, given: dict[str, Any]) -> Any:
        other = batch_of(S + 8, 3, self.set_up.documents)
        logits = super().forward(self.given(other))
        self.others = logits, Training.labels(self, other)
        return super().forward(given)

    def loss(self, logits: Any, labels: Tensor, **options: Any) -> Tensor:
        return super().loss(logits, labels) + 0 * super().loss(*self.others)


@made(RIGHT, "labels of joined batches", few)
class Joined(Training):
    """Each rank holds a document, which ends with a label of its own: that of the text that was cut off there."""

    def make_sequence(self) -> ShardedSequence:
        return ShardedSequence(self.axis, Contiguous())

    def core_options(self, name: str) -> dict[str, Any]:
        return {"mask": Mask(documents=torch.arange(S) // 12)}

    def right(self, number: int, replica: int) -> Batch:
        batch, documents = super().right(number, replica), torch.arange(S) // 12
        labels = batch["labels"].clone()
        labels[:, 11::12] = (labels[:, 11::12] + 1) % V
        return batch | {"labels": labels, "documents": documents.expand(len(labels), -1)}
