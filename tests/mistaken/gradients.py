"""Gradients, and how they are reduced."""

from __future__ import annotations

import contextlib
from typing import Any, ClassVar

import torch
import torch.distributed as dist
import torch.nn.functional as F
from model import C
from set_ups import RATE, Net, Training, local
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

from mistaken.labels import OfGathered, another_model, evaluate, over_cp, plain_loss
from mistaken.listing import RIGHT, by_hand, every, few, made, mistake, plain_logits

GRADIENTS = "Gradients"
averaged: dict[str, Any] = {"sums": False}
over_dp = property(lambda self: self.grid["dp"])


def average_by_hand(self: Training) -> None:
    Training.reduce(self)
    for x in self.model.parameters():
        local(x.grad).div_(self.reduced.size())


mistake(GRADIENTS, "gradients over cp alone", plain_logits, dp=True, reduced=over_cp)
mistake(GRADIENTS, "gradients over dp alone", plain_logits, dp=True, reduced=over_dp)
mistake(GRADIENTS, "gradients that are averaged", lambda set_up: set_up.by != "hand", **averaged)
mistake(GRADIENTS, "gradients that are averaged by hand", by_hand, reduce=average_by_hand)
unreduced: dict[str, Any] = {"reduce": lambda self: None}
mistake(GRADIENTS, "gradients that nobody reduces", by_hand, **unreduced)


@made(GRADIENTS, "an optimizer in the backward", by_hand)
class InBackward(Training):
    """Its steps are before the sum; gradients are kept to be looked at."""

    def reduce(self) -> None:
        pass

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


def other_weights(self: Training, model: Net) -> None:
    generator = torch.Generator().manual_seed(self.rank)
    for x in model.layers.parameters():
        x.data += 0.1 * torch.randn(x.shape, generator=generator)


def freeze_on_one(self: Training, model: Net) -> None:
    """Every weight before the keys of the first layer: their attention wants no gradient of q, k and v there."""
    for name, x in model.named_parameters():
        x.requires_grad_(not (self.cp_rank and name.startswith(("embedding", "layers.0.norm", "layers.0.w"))))


def once_more(self: Training, loss: Tensor) -> None:
    loss.backward(retain_graph=self.cp_rank == 0)
    if self.cp_rank == 0:
        loss.backward()


mistake(GRADIENTS, "other weights on each rank", by_hand, prepare=other_weights)
waits: dict[str, Any] = {"slow": ("probe", "verify")}  # and in other set-ups too
mistake(GRADIENTS, "weights frozen on one rank", few, prepare=freeze_on_one, **waits)
mistake(GRADIENTS, "one backward more on one rank", "eager, cores, FSDP2", backward=once_more, **waits)


@made(GRADIENTS, "two models of which one has a mean", every(plain_logits, by_hand))
class TwoModels(Training):
    """The sum of their losses has one backward."""

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


def reduce_all_but_one(self: Training) -> None:
    head = [*self.model.parameters()][-1]
    grad = None if head.grad is None else head.grad.clone()
    Training.reduce(self)
    head.grad = grad


mistake(GRADIENTS, "one parameter that nobody reduces", by_hand, reduce=reduce_all_but_one)
mistake(  # the degree of parallelism is ignored, and gradients are summed
    GRADIENTS, "every rank computes all rows", "eager", watch=False,
    plan=lambda self: {}, labels=lambda self, batch: batch["labels"], loss=plain_loss,
)  # fmt: skip


@made(GRADIENTS, "gradients summed in the first steps alone", few)
class SummedAtFirst(Training):
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


mistake(RIGHT, "a critic with steps of its own", few, Critic)
mistake(GRADIENTS, "gradients that are averaged, beside a critic", "FSDP2", Critic, **averaged)
by_wrapper = "FSDP2, DDP"
mistake(GRADIENTS, "gradients that are averaged, after an evaluation", by_wrapper, before=evaluate, **averaged)


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


mistake(RIGHT, "a teacher before the loss", "eager, cores, FSDP2, DDP", Teacher)
mistake(GRADIENTS, "gradients that are averaged, with a teacher", "DDP", Teacher, **averaged)


class Accumulated(Training):
    """A batch four times, reduced with the last; ``factor``: of each loss."""

    blind = ("verify",)  # which calls the backward
    sums = False
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


mistake(GRADIENTS, "accumulated gradients that are averaged", "DDP", Accumulated, factor=0.25)
mistake(RIGHT, "accumulated gradients of four ranks, averaged", "DDP", Accumulated)
unseen: dict[str, Any] = {"blind": ("verify",)}  # which calls the backward
mistake(
    RIGHT, "a loss times the number of ranks, averaged", by_wrapper,
    backward=lambda self, loss: (self.reduced.size() * loss).backward(), **averaged, **unseen,
)  # fmt: skip


def sum_over_cp(self: Training, loss: Tensor) -> None:
    (2 * loss).backward()
    for x in self.model.parameters():
        dist.all_reduce(local(x.grad), group=self.axis.get_group())


mistake(
    RIGHT, "FSDP2 over dp, with sums over cp by hand", "FSDP2", dp=True, reduced=over_dp, backward=sum_over_cp,
    **averaged, **unseen,
)  # fmt: skip


@made(RIGHT, "an optimizer in the backward, after sums", "eager, cores, FSDP2")
class SumsInBackward(InBackward):
    blind = ("verify",)  # which calls no optimizer

    def take_own_step(self, x: Tensor) -> None:
        if self.set_up.by == "hand":
            dist.all_reduce(x.grad, group=self.reduced.get_group())
        super().take_own_step(x)


mistake(GRADIENTS, "the mean of rows, an optimizer in the backward", few, SumsInBackward, loss=plain_loss)
mistake(GRADIENTS, "averages by FSDP2, an optimizer in the backward", "FSDP2", SumsInBackward, **averaged)
few_more = "eager, cores, blocks"
mistake(GRADIENTS, "gradients that nobody reduces, of a second model", few_more, before=another_model, **unreduced)


def steps_of_another(self: Training) -> None:
    """Rounds of steps are counted, and not those of optimizers of one parameter each."""
    other = Training(self.rank, self.set_up)
    other.build()
    optimizers = {x: torch.optim.SGD([x], RATE) for x in other.model.parameters()}
    for _ in range(40):
        for x, optimizer in optimizers.items():
            x.grad = torch.zeros_like(x)
            optimizer.step()


mistake(
    GRADIENTS, "gradients that nobody reduces, after steps of another model", few, before=steps_of_another, **unreduced
)


@made(GRADIENTS, "averages by FSDP1", "FSDP2")
class ByFSDP1(Training):
    steps, sums = 3, False

    def distribute(self) -> nn.Module:
        policy = ModuleWrapPolicy({nn.Linear, nn.Embedding})
        group, cpu = self.reduced.get_group(), torch.device("cpu")
        return FullyShardedDataParallel(self.model, group, auto_wrap_policy=policy, device_id=cpu)

    def compare(self, number: int, losses: list[Tensor]) -> float:
        return 1.0


mistake(GRADIENTS, "averages of gathered outputs", by_wrapper, OfGathered, loss=plain_loss, **averaged)


@made(GRADIENTS, "adapters that begin at 0, others on each rank", few)
class Adapters(Training):
    """A gradient of 0 proves nothing: the weights differ, and are not refused."""

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


def of_replica(self: Training) -> None:
    """A step of a model that every cp group has for itself."""
    other = type("OfReplica", (Training,), {"reduced": over_cp, "counted": over_cp})(self.rank, self.set_up)
    other.build()
    other.at = "step"
    batch = other.batch(0, 0)
    other.loss(other.forward(other.given(batch)), other.labels(batch)).backward()
    other.take_step()


mistake(RIGHT, "a second model, of each replica", "FSDP2", before=of_replica)
