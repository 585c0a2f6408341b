"""Batches of ranks, and their lengths."""

from __future__ import annotations

import threading
from typing import Any, ClassVar

import torch
from set_ups import Batch, S, SetUp, Training, batch_of
from torch import Tensor

import cp_mesh
from mistaken.listing import (
    BLOCKS,
    EAGER,
    FSDP2,
    RIGHT,
    ROOTLESS,
    among,
    dense,
    made,
    rootless,
    unpiped,
)

BATCHES = "Batches"


@made(BATCHES, "another batch on each rank")
class OtherBatches(Training):
    def batch(self, number: int, replica: int) -> Batch:
        return batch_of(S, self.cp_rank, self.set_up.documents)


@made(BATCHES, "batches that differ later")
class LaterBatches(Training):
    """The digest of a 64th batch is compared 64 to 192 batches later."""

    @classmethod
    def of(cls, set_up: SetUp) -> bool:  # minutes in all others
        return set_up in (SetUp(), SetUp(root=False), SetUp(compiled="whole"), SetUp(by="FSDP2", beside="dp"))

    def guard(self) -> None:
        super().guard()
        self.at = "forward"
        with torch.no_grad():
            for number in range(1, 200):
                self.forward(self.given(batch_of(S, 2 * number + self.cp_rank, self.set_up.documents)))
        self.off = 1.0  # unlike batches in one step


@made(BATCHES, "another length on each rank")
class OtherLengths(Training):
    @classmethod
    def of(cls, set_up: SetUp) -> bool:
        return dense(set_up) and unpiped(set_up)

    def batch(self, number: int, replica: int) -> Batch:
        return batch_of(S + 8 * self.cp_rank, 0, self.set_up.documents)


@made(BATCHES, "another length later, one that was before")
class KnownLength(OtherLengths):
    steps = 3

    def batch(self, number: int, replica: int) -> Batch:
        return batch_of((S, S + 8, S + 8 * self.cp_rank)[number], 0, self.set_up.documents)

    def right(self, number: int, replica: int) -> Batch:
        return batch_of((S, S + 8, S)[number], 0, self.set_up.documents)


@made(BATCHES, "a replica without rows in the first step")
class EmptyReplica(Training):
    dp = True
    slow = ("verify",)

    @classmethod
    def of(cls, set_up: SetUp) -> bool:
        return set_up.beside not in ("tp", "pp")

    def right(self, number: int, replica: int) -> Batch:
        whole = super().right(number, replica)
        return {name: x[: len(x) * (replica == 0)] for name, x in whole.items()}


@made(BATCHES, "whole inputs without a root")
class WholeInputs(Training):
    of = staticmethod(rootless)

    def given(self, batch: Batch) -> dict[str, Any]:
        return {"tokens": batch["tokens"], "positions": torch.arange(S)}


@made(BATCHES, "inputs sharded twice")
class ShardedTwice(Training):
    @classmethod
    def of(cls, set_up: SetUp) -> bool:
        return not set_up.documents

    def given(self, batch: Batch) -> dict[str, Any]:
        given = super().given(batch)
        return given | {"tokens": self.sequence.shard({"tokens": given["tokens"]})["tokens"]}


@made(BATCHES, "chunks of the tokens given to the root")
class Chunked(Training):
    @classmethod
    def of(cls, set_up: SetUp) -> bool:
        return set_up.root and not set_up.documents and unpiped(set_up)

    def given(self, batch: Batch) -> dict[str, Any]:
        return {"tokens": batch["tokens"].chunk(2, 1)[self.cp_rank]}


@made(BATCHES, "another length later, a new one")
class NewLength(KnownLength):
    of = among(EAGER, BLOCKS, FSDP2)  # without a root a rank ends, as with one that was before

    def batch(self, number: int, replica: int) -> Batch:
        return batch_of((S, S + 8, S + 16 * self.cp_rank)[number], 0, self.set_up.documents)


@made(BATCHES, "fewer sequences later on one rank")
class FewerSequences(NewLength):
    def batch(self, number: int, replica: int) -> Batch:
        whole = self.right(number, replica)
        return {name: x[:1] for name, x in whole.items()} if number == 2 and self.cp_rank else whole


@made(BATCHES, "rows that nobody cut")
class Uncut(WholeInputs):
    def given(self, batch: Batch) -> dict[str, Any]:
        return {name: x[..., :-2] for name, x in Training.given(self, batch).items()}


@made(BATCHES, "another style on one rank")
class OtherStyle(Training):
    of = among(EAGER, ROOTLESS, FSDP2)

    def plan(self) -> dict[str, Any]:
        return super().plan() | {"layers.0.ff": cp_mesh.TiledMLP(tiles=2, dim=(-2, -3)[self.cp_rank])}


class Later(Training):
    """A mistake of the fifth step and of those that come: digests of batches are compared in losses."""

    steps = 9
    of = among(EAGER, ROOTLESS)
    counts: ClassVar[bool] = False

    def batch(self, number: int, replica: int) -> Batch:
        self.late = number >= 5
        return self.right(number, replica)

    def loss(self, logits: Any, labels: Tensor, **options: Any) -> Tensor:
        count = {"count": cp_mesh.training.valid_tokens(labels, self.counted)} if self.counts else {}
        return super().loss(logits, labels, **options, **count)

    def compare(self, number: int, losses: list[Tensor]) -> float:
        return super().compare(number, losses) if number == self.steps - 1 else 0.0


class BatchLater(Later):
    def batch(self, number: int, replica: int) -> Batch:
        return self.right(number + 100 * self.cp_rank * (number >= 5), replica)


class DocumentsLater(Later):
    of = among(SetUp(documents=True))

    def batch(self, number: int, replica: int) -> Batch:
        whole = self.right(number, replica)
        apart = (number >= 5) * self.cp_rank * (torch.arange(S) >= 10)
        return whole | {"documents": whole["documents"] + apart}


class LabelsLater(Later):
    def labels(self, batch: Batch) -> Tensor:
        return super().labels(batch | {"labels": batch["tokens"]} if self.late else batch)


for words, kind in {
    "a batch that differs from the fifth step on": BatchLater,
    "documents that differ from the fifth step on": DocumentsLater,
    "labels not shifted from the fifth step on": LabelsLater,
}.items():
    made(BATCHES, words)(kind)
    made(BATCHES, f"{words}, with a count")(type(kind.__name__, (kind,), {"counts": True}))


@made(RIGHT, "a loader's thread that shards ahead on one rank")
class Ahead(Later):
    def batch(self, number: int, replica: int) -> Batch:
        if self.cp_rank == 0:
            thread = threading.Thread(target=self.sequence.shard, args=(self.right(number + 1, replica),))
            thread.start()
            thread.join()
        return super().batch(number, replica)
