"""Labels, and the loss."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from model import V
from set_ups import RATE, Batch, Net, S, SetUp, Training, batch_of
from torch import Tensor
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

import cp_mesh
from cp_mesh import Contiguous, Mask, ShardedSequence, Striped, ZigZag
from mistaken.listing import (
    BLOCKS,
    EAGER,
    FSDP2,
    RIGHT,
    ROOTLESS,
    among,
    made,
    plain_logits,
    with_logits,
)

LABELS = "Labels and the loss"


class Labelled(Training):
    def whole_labels(self, batch: Batch) -> Tensor:
        return batch["labels"]


@made(LABELS, "labels by chunk")
class ByChunk(Labelled):
    def labels(self, batch: Batch) -> Tensor:
        return self.whole_labels(batch).chunk(2, 1)[self.cp_rank]


@made(LABELS, "labels of another layout")
class OtherLayout(Labelled):
    def labels(self, batch: Batch) -> Tensor:
        return ShardedSequence(self.axis, Striped()).shard({"labels": batch["labels"]})["labels"]


@made(LABELS, "labels of another layout, copied")
class OtherLayoutCopied(OtherLayout):
    def labels(self, batch: Batch) -> Tensor:
        return super().labels(batch).clone()


@made(LABELS, "labels of another rank")
class OtherRank(Labelled):
    def labels(self, batch: Batch) -> Tensor:
        at = ZigZag().positions(S, 2, 1 - self.cp_rank)
        return batch["labels"][:, at]


@made(LABELS, "labels shifted after sharding")
class ShiftedAfter(Labelled):
    def labels(self, batch: Batch) -> Tensor:
        tokens = self.sequence.shard({"tokens": batch["tokens"]})["tokens"]
        return torch.cat([tokens[:, 1:], torch.full_like(tokens[:, :1], -100)], 1)


@made(LABELS, "labels not shifted")
class NotShifted(Labelled):
    def labels(self, batch: Batch) -> Tensor:
        return self.sequence.shard({"labels": batch["tokens"]})["labels"]


@made(LABELS, "labels shifted twice")
class ShiftedTwice(Labelled):
    def labels(self, batch: Batch) -> Tensor:
        labels = batch["labels"]
        return self.sequence.shard({"labels": torch.cat([labels[:, 1:], labels[:, -1:]], 1)})["labels"]


@made(LABELS, "labels of another batch on one rank")
class OtherLabelsOnOne(Labelled):
    def labels(self, batch: Batch) -> Tensor:
        return super().labels(batch if self.cp_rank == 0 else batch_of(S, 7, False))


@made(LABELS, "labels of another batch on every rank")
class OtherLabels(Labelled):
    def labels(self, batch: Batch) -> Tensor:
        return super().labels(batch_of(S, 7, False))


@made(LABELS, "labels under another ignore_index")
class OtherIndex(Labelled):
    slow = ("verify",)  # a rank alone raises, and the others wait

    def loss(self, logits: Any, labels: Tensor, **options: Any) -> Tensor:
        return super().loss(logits, labels, ignore_index=-1, **options)


@made(LABELS, "the last row of a shard")
class LastRow(Labelled):
    of = staticmethod(plain_logits)

    def loss(self, logits: Any, labels: Tensor, **options: Any) -> Tensor:
        return super().loss(logits[:, -1], labels[:, -1].clamp(min=0), **options)


@made(LABELS, "the last row of a shard, by F.cross_entropy")
class LastRowAlone(Labelled):
    of = staticmethod(plain_logits)

    def loss(self, logits: Any, labels: Tensor, **options: Any) -> Tensor:
        return F.cross_entropy(logits[:, -1], labels[:, -1].clamp(min=0))


@made(LABELS, "the mean of a rank's rows")
class OwnMean(Labelled):
    of = staticmethod(with_logits)

    def loss(self, logits: Any, labels: Tensor, **options: Any) -> Tensor:
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


@made(LABELS, "a loss in the model from labels among its inputs")
class LossInModel(Labelled):
    class Net(Net):
        def forward(self, tokens: Tensor, positions: Any = None, documents: Any = None, labels: Any = None) -> Tensor:
            logits = self.compute(tokens, positions, documents)
            return logits if labels is None else F.cross_entropy(logits.flatten(0, 1), labels.flatten())

    of = staticmethod(plain_logits)

    def root_options(self) -> dict[str, Any]:
        return super().root_options() | {"inputs": ("tokens", "labels")}

    def given(self, batch: Batch) -> dict[str, Any]:
        return super().given(batch) | {"labels": batch["labels"] if self.set_up.root else self.labels(batch)}

    def loss(self, logits: Any, labels: Tensor, **options: Any) -> Tensor:
        return logits

    def of_one_rank(self, plain: Net, whole: dict[str, Any]) -> Tensor:
        return plain(**whole)


@made(LABELS, "gathered logits counted on every rank")
class Gathered(Labelled):
    of = staticmethod(plain_logits)

    def root_options(self) -> dict[str, Any]:
        return super().root_options() | {"gather_output": True}

    def forward(self, given: dict[str, Any]) -> Any:
        found = super().forward(given)
        return found if self.set_up.root else self.sequence.gather(found)

    def labels(self, batch: Batch) -> Tensor:
        return batch["labels"]


@made(LABELS, "wrong labels of a loss compiled with the model")
class CompiledLoss(ByChunk):
    @classmethod
    def of(cls, set_up: SetUp) -> bool:
        return set_up.compiled == "whole"

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


@made(LABELS, "a loss over cp alone")
class LossOverCp(Labelled):
    dp = True

    @classmethod
    def of(cls, set_up: SetUp) -> bool:
        return set_up.beside not in ("tp", "pp")

    @property
    def counted(self) -> Any:
        return self.axis


# ---- rows that are left out, or belong to no label


@made(LABELS, "labels that lack the last row")
class LacksRow(Labelled):
    """Shifted within the shard."""

    of = staticmethod(plain_logits)
    flat: ClassVar[bool] = False

    def loss(self, logits: Any, labels: Tensor, **options: Any) -> Tensor:
        tokens = self.sequence.shard({"tokens": self.batch(0, self.replica)["tokens"]})["tokens"]
        logits, labels = logits[:, :-1], tokens[:, 1:]
        return super().loss(*(x.flatten(0, 1) for x in (logits, labels)) if self.flat else (logits, labels))


made(LABELS, "labels that lack the last row, flattened")(type("LacksRow", (LacksRow,), {"flat": True}))


@made(LABELS, "a loss in two parts without a count")
class InParts(Labelled):
    of = staticmethod(plain_logits)

    def loss(self, logits: Any, labels: Tensor, **options: Any) -> Tensor:
        parts = zip(logits.tensor_split([-1], dim=1), labels.tensor_split([-1], dim=1), strict=True)
        return sum(super(InParts, self).loss(*part, **self.count(labels)) for part in parts)

    def count(self, labels: Tensor) -> dict[str, Any]:
        return {}


@made(RIGHT, "a loss in two parts with a count")
class InCountedParts(InParts):
    def count(self, labels: Tensor) -> dict[str, Any]:
        return {"count": cp_mesh.training.valid_tokens(labels, self.counted)}


@made(LABELS, "labels outside of the vocabulary on one rank")
class Outside(Labelled):
    slow = ("verify",)  # as above

    def labels(self, batch: Batch) -> Tensor:
        found = super().labels(batch)
        return found + V * (self.cp_rank == 1) * (found >= 0)


@made(RIGHT, "a striped layout")
class InStripes(Labelled):
    def make_sequence(self) -> ShardedSequence:
        return ShardedSequence(self.axis, Striped(), length=super().make_sequence().length)


@made(LABELS, "labels of later tokens in a striped layout")
class LaterTokens(InStripes):
    """Two places on is the next row of the same rank."""

    def labels(self, batch: Batch) -> Tensor:
        tokens = batch["tokens"]
        return self.sequence.shard({"labels": F.pad(tokens[:, 2:], (0, 2), value=-100)})["labels"]


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


few = among(EAGER, ROOTLESS, BLOCKS)
made(LABELS, "labels by chunk after an evaluation")(type("After", (ByChunk,), {"before": evaluate, "of": few}))
made(LABELS, "labels by chunk of a second model")(type("After", (ByChunk,), {"before": another_model, "of": few}))
made(LABELS, "the mean of a second model's rows")(type("After", (OwnMean,), {"before": another_model, "of": few}))
made(LABELS, "the mean of rows after a loss of nobody")(
    type("After", (OwnMean,), {"prepare": loss_of_nobody, "of": few})
)
made(LABELS, "the mean of rows of a resumed run")(type("After", (OwnMean,), {"before": state_of_optimizer, "of": few}))
for words, before in {
    "an evaluation before": evaluate,
    "a second model": another_model,
    "a loss of nobody before": loss_of_nobody,
    "a resumed run": state_of_optimizer,
}.items():
    made(RIGHT, words)(type("After", (Training,), {"before": before, "of": few}))


# ---- labels that may well be right


def relabelled(group: str, name: str, change: Callable[[Batch, Tensor], Tensor]) -> None:
    """Labels made from those of a batch and the rank of each token, [S], also for one rank."""

    class Other(Training):
        of = among(EAGER, ROOTLESS)

        def right(self, number: int, replica: int) -> Batch:
            batch, ranks = super().right(number, replica), torch.zeros(S, dtype=torch.int64)
            ranks[ZigZag().positions(S, 2, 1)] = 1
            return batch | {"labels": change(batch, ranks)}

    made(group, name)(Other)


def others(x: Batch) -> Tensor:
    return batch_of(S, 9, False)["labels"]


relabelled(RIGHT, "labels masked on one rank", lambda x, ranks: x["labels"].where(ranks == 0, -100))
relabelled(
    RIGHT,
    "few labels known on one rank",
    lambda x, ranks: x["labels"].where(ranks == 0, others(x).where(torch.arange(S) % 12 == 0, -100)),
)
relabelled(
    RIGHT,
    "labels of a teacher at every second token",
    lambda x, ranks: x["labels"].where(torch.arange(S) % 2 == 0, others(x)),
)
relabelled(RIGHT, "padding that counts on one rank", lambda x, ranks: x["labels"] * (ranks == 0))
relabelled(LABELS, "tokens as labels, as if masked", lambda x, ranks: x["tokens"].where(torch.arange(S) % 3 == 0, -100))


@made(RIGHT, "a loss of the rows that count")
class Counting(Labelled):
    of = staticmethod(plain_logits)

    def loss(self, logits: Any, labels: Tensor, **options: Any) -> Tensor:
        return super().loss(logits[labels != -100], labels[labels != -100], **options)


@made(RIGHT, "cross_entropy in the model")
class OurLossInModel(LossInModel):
    blind = ("probe", "verify")  # which need logits

    class Net(Net):
        counted: Any = None

        def forward(self, tokens: Tensor, positions: Any = None, documents: Any = None, labels: Any = None) -> Tensor:
            logits = self.compute(tokens, positions, documents)
            return logits if labels is None else cp_mesh.cross_entropy(logits, labels, self.counted)

    of = among(EAGER, BLOCKS, FSDP2)

    def prepare(self, model: Any) -> None:
        model.counted = self.counted


@made(RIGHT, "a loss of gathered logits")
class OfGathered(Gathered):
    """On every rank of cp, whose gradients are those of one; `verify_model` adds losses of ranks."""

    blind = ("verify",)

    @classmethod
    def of(cls, set_up: SetUp) -> bool:
        return plain_logits(set_up) and set_up.root

    def loss(self, logits: Any, labels: Tensor, **options: Any) -> Tensor:
        axis = self.grid["dp"]
        return cp_mesh.cross_entropy(logits, labels, axis, **options)

    def compare(self, number: int, losses: list[Tensor]) -> float:
        return super().compare(number, [x / 2 for x in losses])


@made(LABELS, "a share of the loss of gathered logits")
class ShareOfGathered(OfGathered):
    blind = ()

    def loss(self, logits: Any, labels: Tensor, **options: Any) -> Tensor:
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten()) / (2 * self.replicas)

    compare = Gathered.compare


@made(RIGHT, "logits gathered as a sum, counted on every rank")
class GatheredAsSum(Labelled):
    of = among(EAGER, ROOTLESS, FSDP2)

    def forward(self, given: dict[str, Any]) -> Any:
        return self.sequence.unshard(super().forward(given))

    def labels(self, batch: Batch) -> Tensor:
        return batch["labels"]


@made(RIGHT, "two forwards before their losses")
class TwoForwards(Labelled):
    blind = ("verify",)  # which traces one

    of = among(EAGER, ROOTLESS, BLOCKS)

    def forward(self, given: dict[str, Any]) -> Any:
        other = batch_of(S + 8, 3, self.set_up.documents)
        logits = super().forward(self.given(other))
        self.others = logits, Training.labels(self, other)
        return super().forward(given)

    def loss(self, logits: Any, labels: Tensor, **options: Any) -> Tensor:
        return super().loss(logits, labels) + 0 * super().loss(*self.others)


@made(RIGHT, "labels of joined batches")
class Joined(Labelled):
    """Each rank holds a document, which ends with a label of its own: that of the text that was cut off there."""

    of = among(EAGER, ROOTLESS)

    def make_sequence(self) -> ShardedSequence:
        return ShardedSequence(self.axis, Contiguous())

    def core_options(self, name: str) -> dict[str, Any]:
        return {"mask": Mask(documents=torch.arange(S) // 12)}

    def right(self, number: int, replica: int) -> Batch:
        batch, documents = super().right(number, replica), torch.arange(S) // 12
        labels = batch["labels"].clone()
        labels[:, 11::12] = (labels[:, 11::12] + 1) % V
        return batch | {"labels": labels, "documents": documents.expand(len(labels), -1)}
