"""Gradients, and how they are reduced."""

from __future__ import annotations

import contextlib
from typing import Any, ClassVar

import torch
import torch.distributed as dist
import torch.nn.functional as F
from model import C
from set_ups import RATE, Batch, Net, SetUp, Training, local
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

from mistaken.labels import LossOverCp, OfGathered, OwnMean, another_model, evaluate
from mistaken.listing import (
    BLOCKS,
    DDP,
    EAGER,
    FSDP2,
    RIGHT,
    ROOTLESS,
    among,
    made,
)

GRADIENTS = "Gradients"


def by_hand(set_up: SetUp) -> bool:
    return set_up.by == "hand"


@made(GRADIENTS, "gradients over cp alone")
class OverCp(LossOverCp):
    counted = Training.counted

    @property
    def reduced(self) -> Any:
        return self.axis


@made(GRADIENTS, "gradients over dp alone")
class OverDp(OverCp):
    @property
    def reduced(self) -> Any:
        return self.grid["dp"]


@made(GRADIENTS, "gradients that are averaged")
class Averaged(Training):
    sums = False

    @classmethod
    def of(cls, set_up: SetUp) -> bool:
        return set_up.by != "hand"


@made(GRADIENTS, "gradients that are averaged by hand")
class AveragedByHand(Training):
    of = staticmethod(by_hand)

    def reduce(self) -> None:
        super().reduce()
        for x in self.model.parameters():
            local(x.grad).div_(self.reduced.size())


@made(GRADIENTS, "gradients that nobody reduces")
class Unreduced(Training):
    of = staticmethod(by_hand)

    def reduce(self) -> None:
        pass


@made(GRADIENTS, "an optimizer in the backward")
class InBackward(Unreduced):
    """Its steps are before the sum; gradients are kept to be looked at."""

    def build(self) -> None:
        super().build()
        self.optimizers = {x: torch.optim.SGD([x], RATE) for x in self.model.parameters()}
        for x in self.optimizers:
            x.register_post_accumulate_grad_hook(self.take_own_step)

    def take_own_step(self, x: Tensor) -> None:
        self.at = "step"
        self.optimizers[x].step()

    def take_step(self) -> None:
        pass


@made(GRADIENTS, "other weights on each rank")
class OtherWeights(Training):
    of = staticmethod(by_hand)

    def prepare(self, model: Net) -> None:
        generator = torch.Generator().manual_seed(self.rank)
        for x in model.layers.parameters():
            x.data += 0.1 * torch.randn(x.shape, generator=generator)


@made(GRADIENTS, "weights frozen on one rank")
class FrozenOnOne(Training):
    """Every weight before the keys of the first layer: their attention wants no gradient of q, k and v there."""

    slow = ("probe", "verify")

    @classmethod
    def of(cls, set_up: SetUp) -> bool:
        return set_up in (SetUp(), SetUp(root=False))  # it waits in others too

    def prepare(self, model: Net) -> None:
        if self.cp_rank:
            for name, x in model.named_parameters():
                x.requires_grad_(not name.startswith(("embedding", "layers.0.norm", "layers.0.w")))


@made(GRADIENTS, "one backward more on one rank")
class OneMore(Training):
    slow = ("probe", "verify")

    @classmethod
    def of(cls, set_up: SetUp) -> bool:
        return set_up in (SetUp(), SetUp(root=False), SetUp(by="FSDP2", beside="dp"))  # it waits in others too

    def backward(self, loss: Tensor) -> None:
        loss.backward(retain_graph=self.cp_rank == 0)
        if self.cp_rank == 0:
            loss.backward()


@made(GRADIENTS, "two models of which one has a mean")
class TwoModels(Training):
    """The sum of their losses has one backward."""

    @classmethod
    def of(cls, set_up: SetUp) -> bool:
        return set_up.beside not in ("tp", "pp") and set_up.by == "hand"

    def build(self) -> None:
        super().build()
        self.other = Training(self.rank, self.set_up)
        self.other.build()

    def backward(self, loss: Tensor) -> None:
        batch = self.batch(0, self.replica)
        logits = self.other.forward(self.other.given(batch))
        (loss + F.cross_entropy(logits.flatten(0, 1), self.labels(batch).flatten())).backward()

    def take_step(self) -> None:
        self.other.reduce()
        self.other.optimizer.step()
        super().take_step()

    def compare(self, number: int, losses: list[Tensor]) -> float:
        return self.other.compare(number, [])


@made(GRADIENTS, "one parameter that nobody reduces")
class OneUnreduced(Training):
    of = staticmethod(by_hand)

    def reduce(self) -> None:
        head = [*self.model.parameters()][-1]
        grad = None if head.grad is None else head.grad.clone()
        super().reduce()
        head.grad = grad


@made(GRADIENTS, "every rank computes all rows")
class Replicated(Training):
    """The degree of parallelism is ignored, and gradients are summed."""

    of = among(EAGER)
    watch = False

    def plan(self) -> dict[str, Any]:
        return {}

    def labels(self, batch: Batch) -> Tensor:
        return batch["labels"]

    def loss(self, logits: Any, labels: Tensor, **options: Any) -> Tensor:
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


@made(GRADIENTS, "gradients summed in the first steps alone")
class SummedAtFirst(Training):
    of = among(EAGER, ROOTLESS)
    steps = 5
    sums_by_hand = True

    def step(self, number: int) -> None:
        self.sums_by_hand = number < 3
        super().step(number)

    def reduce(self) -> None:
        if self.sums_by_hand:
            super().reduce()


class Critic(Training):
    """Another model has steps of its own in each step."""

    steps = 5

    def take_step(self) -> None:
        critic = nn.Linear(1, 1)
        critic(torch.ones(1, 1)).sum().backward()
        torch.optim.SGD(critic.parameters(), 0.1).step()
        super().take_step()


made(RIGHT, "a critic with steps of its own")(type("Critic", (Critic,), {"of": among(EAGER, ROOTLESS)}))
made(GRADIENTS, "gradients that are averaged, beside a critic")(
    type("Critic", (Critic, Averaged), {"of": among(FSDP2)})
)
made(GRADIENTS, "gradients that are averaged, after an evaluation")(type("After", (Averaged,), {"before": evaluate}))


class Teacher(Training):
    """Is called between the student and its loss."""

    teacher: Training | None = None

    def forward(self, given: dict[str, Any]) -> Any:
        logits = super().forward(given)
        if self.teacher is None:
            self.teacher = Training(self.rank, self.set_up)
            self.teacher.build()
        with torch.no_grad():
            target = self.teacher.forward(given)
        return logits + 0 * target


made(RIGHT, "a teacher before the loss")(type("Teacher", (Teacher,), {"of": among(EAGER, ROOTLESS, FSDP2, DDP)}))
made(GRADIENTS, "gradients that are averaged, with a teacher")(type("Teacher", (Teacher, Averaged), {"of": among(DDP)}))


class Accumulated(Averaged):
    """A batch four times, reduced with the last; ``factor``: of each loss."""

    blind = ("verify",)  # which calls the backward
    of = among(DDP)
    factor: ClassVar[float] = 1.0

    def step(self, number: int) -> None:
        batch = self.batch(number, self.replica)
        for i in range(4):
            with contextlib.nullcontext() if i == 3 else self.module.no_sync():  # type: ignore[operator]
                loss = self.loss(self.forward(self.given(batch)), self.labels(batch))
                (self.factor * loss).backward()
        self.at = "step"
        self.take_step()
        self.off = self.compare(number, [loss])


made(GRADIENTS, "accumulated gradients that are averaged")(type("Accumulated", (Accumulated,), {"factor": 0.25}))
made(RIGHT, "accumulated gradients of four ranks, averaged")(Accumulated)


@made(RIGHT, "a loss times the number of ranks, averaged")
class Times(Averaged):
    blind = ("verify",)  # which calls the backward

    def backward(self, loss: Tensor) -> None:
        (self.reduced.size() * loss).backward()


@made(RIGHT, "FSDP2 over dp, with sums over cp by hand")
class SummedOverCp(OverDp):
    blind = ("verify",)  # which calls the backward
    of = among(FSDP2)
    sums = False

    def backward(self, loss: Tensor) -> None:
        (2 * loss).backward()
        for x in self.model.parameters():
            dist.all_reduce(local(x.grad), group=self.axis.get_group())


@made(RIGHT, "an optimizer in the backward, after sums")
class SumsInBackward(InBackward):
    blind = ("verify",)  # which calls no optimizer

    of = among(EAGER, ROOTLESS, FSDP2)

    def take_own_step(self, x: Tensor) -> None:
        if self.set_up.by == "hand":
            dist.all_reduce(x.grad, group=self.reduced.get_group())
        super().take_own_step(x)


@made(GRADIENTS, "the mean of rows, an optimizer in the backward")
class MeanInBackward(SumsInBackward):
    of = among(EAGER, ROOTLESS)
    loss = OwnMean.loss


@made(GRADIENTS, "averages by FSDP2, an optimizer in the backward")
class AveragesInBackward(SumsInBackward):
    of = among(FSDP2)
    sums = False


@made(GRADIENTS, "gradients that nobody reduces, of a second model")
class SecondUnreduced(Unreduced):
    of = among(EAGER, ROOTLESS, BLOCKS)
    before = another_model


@made(GRADIENTS, "gradients that nobody reduces, after steps of another model")
class UnreducedLater(Unreduced):
    """Rounds of steps are counted, and not those of optimizers of one parameter each."""

    of = among(EAGER, ROOTLESS)

    def before(self) -> None:
        other = Training(self.rank, self.set_up)
        other.build()
        optimizers = {x: torch.optim.SGD([x], RATE) for x in other.model.parameters()}
        for _ in range(40):
            for x, optimizer in optimizers.items():
                x.grad = torch.zeros_like(x)
                optimizer.step()


@made(GRADIENTS, "averages by FSDP1")
class ByFSDP1(Averaged):
    of = among(FSDP2)
    steps = 3

    def distribute(self) -> nn.Module:
        policy = ModuleWrapPolicy({nn.Linear, nn.Embedding})
        group, cpu = self.reduced.get_group(), torch.device("cpu")
        return FullyShardedDataParallel(self.model, group, auto_wrap_policy=policy, device_id=cpu)

    def compare(self, number: int, losses: list[Tensor]) -> float:
        return 1.0


@made(GRADIENTS, "averages of gathered outputs")
class AveragesOfGathered(OfGathered):
    of = among(FSDP2, DDP)
    sums = False

    def loss(self, logits: Any, labels: Tensor, **options: Any) -> Tensor:
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


@made(GRADIENTS, "adapters that begin at 0, others on each rank")
class Adapters(Training):
    """A gradient of 0 proves nothing: the weights differ, and are not refused."""

    of = among(EAGER, ROOTLESS)

    class Net(Net):
        def extend(self) -> None:
            self.down, self.up = nn.Linear(C, 2, bias=False), nn.Linear(2, C, bias=False)

        def mix(self, x: Tensor) -> Tensor:
            return x + self.up(self.down(x))

    def net(self, plain: bool) -> Net:
        found: Any = super().net(plain)
        found.up.weight.data.zero_()
        found.down.weight.data += 0.0 if plain else float(self.cp_rank)
        return found


class OfReplica(Training):
    """A model that every cp group has for itself."""

    @property
    def reduced(self) -> Any:
        return self.axis

    @property
    def counted(self) -> Any:
        return self.axis


@made(RIGHT, "a second model, of each replica")
class SecondOfReplica(Training):
    of = among(FSDP2)

    def before(self) -> None:
        other = OfReplica(self.rank, self.set_up)
        other.build()
        other.at = "step"
        batch = other.batch(0, 0)
        other.loss(other.forward(other.given(batch)), other.labels(batch)).backward()
        other.take_step()
