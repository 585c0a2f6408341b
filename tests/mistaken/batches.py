"""Batches of ranks, and their lengths."""

from __future__ import annotations

import threading
from typing import Any, ClassVar

import torch
from set_ups import Batch, S, Training, batch_of
from torch import Tensor

import cp_mesh
from mistaken.listing import RIGHT, dense, every, few, made, mistake, plain_logits, rooted, rootless, unpacked, unpiped

BATCHES = "Batches"


def batch(self: Training, extra: int, seed: int = 0) -> Batch:
    return batch_of(S + extra, seed, self.set_up.documents)


mistake(BATCHES, "another batch on each rank", batch=lambda self, number, replica: batch(self, 0, self.cp_rank))


@made(BATCHES, "batches that differ later", "eager, cores, compiled, FSDP2")  # minutes in all others
class LaterBatches(Training):
    """The digest of a 64th batch is compared 64 to 192 batches later."""

    def guard(self) -> None:
        super().guard()
        self.at = "forward"
        with torch.no_grad():
            for number in range(1, 200):
                self.forward(self.given(batch(self, 0, 2 * number + self.cp_rank)))
        self.off = 1.0  # unlike batches in one step


OtherLengths = mistake(
    BATCHES, "another length on each rank", every(dense, unpiped),
    batch=lambda self, number, replica: batch(self, 8 * self.cp_rank),
)  # fmt: skip
KnownLength = mistake(
    BATCHES, "another length later, one that was before", "", OtherLengths, steps=3,
    batch=lambda self, number, replica: batch(self, (0, 8, 8 * self.cp_rank)[number]),
    right=lambda self, number, replica: batch(self, (0, 8, 0)[number]),
)  # fmt: skip
mistake(
    BATCHES, "a replica without rows in the first step", plain_logits, dp=True, slow=("verify",),
    right=lambda self, number, replica: {
        name: x[: len(x) * (replica == 0)] for name, x in Training.right(self, number, replica).items()
    },
)  # fmt: skip
mistake(
    BATCHES, "whole inputs without a root", rootless,
    given=lambda self, batch: {"tokens": batch["tokens"], "positions": torch.arange(S)},
)  # fmt: skip


@made(BATCHES, "inputs sharded twice", unpacked)
class ShardedTwice(Training):
    def given(self, batch: Batch) -> dict[str, Any]:
        given = super().given(batch)
        return given | {"tokens": self.sequence.shard({"tokens": given["tokens"]})["tokens"]}


mistake(
    BATCHES, "chunks of the tokens given to the root", every(rooted, unpacked, unpiped),
    given=lambda self, batch: {"tokens": batch["tokens"].chunk(2, 1)[self.cp_rank]},
)  # fmt: skip
NewLength = mistake(
    BATCHES, "another length later, a new one",
    "eager, blocks, FSDP2",  # without a root a rank ends, as with one that was before
    KnownLength, batch=lambda self, number, replica: batch(self, (0, 8, 16 * self.cp_rank)[number]),
)  # fmt: skip


@made(BATCHES, "fewer sequences later on one rank")
class FewerSequences(NewLength):  # type: ignore[valid-type, misc]
    def batch(self, number: int, replica: int) -> Batch:
        whole = self.right(number, replica)
        return {name: x[:1] for name, x in whole.items()} if number == 2 and self.cp_rank else whole


mistake(
    BATCHES, "rows that nobody cut", rootless,
    given=lambda self, batch: {name: x[..., :-2] for name, x in Training.given(self, batch).items()},
)  # fmt: skip
mistake(
    BATCHES, "another style on one rank", "eager, cores, FSDP2",
    plan=lambda self: Training.plan(self) | {"layers.0.ff": cp_mesh.TiledMLP(tiles=2, dim=(-2, -3)[self.cp_rank])},
)  # fmt: skip


class Later(Training):
    """A mistake of the fifth step and of those that come: digests of batches are compared in losses."""

    steps = 9
    counts: ClassVar[bool] = False

    def batch(self, number: int, replica: int) -> Batch:
        self.late = number >= 5
        return self.right(number, replica)

    def loss(self, logits: Any, labels: Tensor, **options: Any) -> Tensor:
        count = {"count": cp_mesh.training.valid_tokens(labels, self.counted)} if self.counts else {}
        return super().loss(logits, labels, **options, **count)

    def compare(self, number: int, losses: list[Tensor]) -> float:
        return super().compare(number, losses) if number == self.steps - 1 else 0.0


def documents_later(self: Training, number: int, replica: int) -> Batch:
    whole = self.right(number, replica)
    apart = (number >= 5) * self.cp_rank * (torch.arange(S) >= 10)
    return whole | {"documents": whole["documents"] + apart}


def labels_later(self: Any, batch: Batch) -> Tensor:
    return Training.labels(self, batch | {"labels": batch["tokens"]} if self.late else batch)


for words, of, parts in (
    (
        "a batch that differs from the fifth step on", few,
        {"batch": lambda self, number, replica: self.right(number + 100 * self.cp_rank * (number >= 5), replica)},
    ),
    ("documents that differ from the fifth step on", "documents", {"batch": documents_later}),
    ("labels not shifted from the fifth step on", few, {"labels": labels_later}),
):  # fmt: skip
    mistake(BATCHES, words, of, Later, **parts)
    mistake(BATCHES, f"{words}, with a count", of, Later, **parts, counts=True)


@made(RIGHT, "a loader's thread that shards ahead on one rank", few)
class Ahead(Later):
    def batch(self, number: int, replica: int) -> Batch:
        if self.cp_rank == 0:
            thread = threading.Thread(target=self.sequence.shard, args=(self.right(number + 1, replica),))
            thread.start()
            thread.join()
        return super().batch(number, replica)
