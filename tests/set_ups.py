"""Set-ups of training that are right: a small decoder in fp32 under each way of running it, one way at a time.

Each class of `tests/mistaken` changes one part of a set-up. Three things look for it: the guard in a first step, the
probe with the guard off, and `verify_model` with the guard off. `mistakes.py` runs all of them and writes the table.

B batch, S sequence, T rows that a module is given, H query heads, K kv heads, D head dim, C model dim, V vocabulary.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar
from unittest import mock

import model as decoder
import torch
import torch.distributed as dist
import torch.nn.functional as F
from inside import path_of
from model import C, D, V, overlapped_plan
from ranks import mesh
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe
from torch.nn.attention.flex_attention import create_block_mask
from torch.nn.parallel import DistributedDataParallel

import cp_mesh
from cp_mesh import ContextParallel, Mask, ShardedModel, ShardedSequence

B, S, MICROBATCHES = 2, 24, 2
RATE = 1e-30
"""Of learning: steps change no weight, but are not those of rate 0, which load a checkpoint."""


@dataclass(frozen=True)
class SetUp:
    """One way of training. ``compiled``: "blocks" or "whole"; ``by``: who sums gradients; ``beside``: dp, tp or pp."""

    root: bool = True
    compiled: str = ""
    by: str = "hand"
    beside: str = ""
    documents: bool = False
    flex: bool = False
    moe: bool = False


SET_UPS = {
    "eager": SetUp(),
    "blocks": SetUp(compiled="blocks"),
    "compiled": SetUp(compiled="whole"),
    "cores": SetUp(root=False),
    "cores compiled": SetUp(root=False, compiled="whole"),
    "FSDP2": SetUp(by="FSDP2", beside="dp"),
    "DDP": SetUp(by="DDP", beside="dp"),
    "tp": SetUp(beside="tp"),
    "pipeline": SetUp(beside="pp"),
    "documents": SetUp(documents=True),
    "flex": SetUp(flex=True),
    "MoE": SetUp(moe=True),
}


class Core(nn.Module):
    """Causal attention; ``plain``: of one rank, with its documents and its window as a tensor mask."""

    window: int | None = None

    def __init__(self, set_up: SetUp, plain: bool, length: int) -> None:
        super().__init__()
        self.plain, self.flex, self.length = plain, set_up.flex, length

    def forward(self, q: Tensor, k: Tensor, v: Tensor, documents: Tensor | None = None) -> Tensor:
        return self.attend(q, k, v, documents)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, documents: Tensor | None = None) -> Tensor:
        if self.plain and (documents is not None or self.window is not None):
            at = torch.arange(q.shape[2])
            ahead = at[:, None] - at
            seen = (ahead >= 0) & (ahead < (self.window or len(at)))
            if documents is not None:
                seen = seen & (documents[:, None, :, None] == documents[:, None, None, :])
            return F.scaled_dot_product_attention(q, k, v, seen, enable_gqa=True)
        if self.flex and not self.plain:
            return cp_mesh.flex_attention(q, k, v, None, self.block_mask(), enable_gqa=True)
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)

    def block_mask(self) -> Any:
        return causal_blocks(self.length)


@functools.cache
def causal_blocks(length: int) -> Any:
    def causal(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return q_idx >= kv_idx

    return create_block_mask(causal, None, None, length, length, device="cpu", BLOCK_SIZE=8)


class Experts(nn.Module):
    """The two best of four, for each token."""

    def __init__(self) -> None:
        super().__init__()
        self.router, self.experts = nn.Linear(C, 4, bias=False), nn.ModuleList(nn.Linear(C, C) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        weights = self.weigh(self.router(x).softmax(-1))
        return sum(weights[..., i, None] * F.silu(expert(x)) for i, expert in enumerate(self.experts))

    def weigh(self, scores: Tensor) -> Tensor:
        return scores * (scores >= scores.topk(2, dim=-1).values[..., -1:])


class Net(decoder.Model):
    """Tokens, or rows of the stage before, to logits, or rows; a mistake of models overrides a part."""

    Core: ClassVar[Callable[..., nn.Module]] = Core
    Experts: ClassVar[Callable[..., nn.Module]] = Experts

    def __init__(self, set_up: SetUp, plain: bool, length: int) -> None:
        super().__init__(functools.partial(type(self).Core, set_up, plain, length), dtype=torch.float32)
        for layer in self.layers:
            if set_up.moe:
                layer.ff = type(self).Experts()
        self.extend()
        generator = torch.Generator().manual_seed(0)
        for parameter in self.parameters():
            nn.init.normal_(parameter, 0.5 * (parameter.ndim == 1), 0.4, generator=generator)

    def extend(self) -> None:
        """Modules and buffers of a mistake."""

    def stage(self, number: int) -> Net:
        """This stage of two: a layer each, the embedding in the first and the head in the last."""
        self.layers = nn.ModuleDict({str(number): self.layers[number]})
        if number == 0:
            del self.norm, self.head
        else:
            del self.embedding
        return self

    def forward(self, tokens: Tensor, positions: Tensor | None = None, documents: Tensor | None = None) -> Tensor:
        return self.compute(tokens, positions, documents)

    def compute(self, x: Tensor, positions: Tensor | None, documents: Tensor | None) -> Tensor:
        rope = self.rope(x, positions)
        if hasattr(self, "embedding"):
            x = self.embed(x, positions)
        for i, layer in enumerate(self.layers.values() if isinstance(self.layers, nn.ModuleDict) else self.layers):
            x = layer(x, rope, documents)
            x = x if i else self.mix(x)
        return self.head(self.norm(x)) if hasattr(self, "head") else x

    def embed(self, tokens: Tensor, positions: Tensor | None) -> Tensor:
        return self.embedding(tokens)

    def rope(self, x: Tensor, positions: Tensor | None) -> Tensor:
        return turns(torch.arange(x.shape[1]) if positions is None else positions)

    def mix(self, x: Tensor) -> Tensor:
        """Between the layers."""
        return x


def turns(positions: Tensor, base: float | Tensor = 0.3) -> Tensor:
    """Cosines and sines of rotary positions, [2, ..., D / 2]."""
    angles = positions.double()[..., None] * base ** torch.arange(D // 2)
    return torch.stack((angles.cos(), angles.sin()))


Batch = dict[str, Any]


class Training:
    """Steps of a set-up done right. A mistake is a subclass that overrides one part.

    Attributes:
        watch: False with the guard off.
        at: what runs: "forward", which includes the plan, "backward" or "step".
        off: how far loss and gradients of the last step are from those of one rank, relative to the largest.
    """

    Net: ClassVar[Callable[..., Net]] = Net
    dp: ClassVar[bool] = False  # the mistake is one of replicas: two of them, also where the set-up has none
    steps: ClassVar[int] = 1
    length: ClassVar[int | None] = None  # of the sequence object
    sums: ClassVar[bool] = True
    unlike: ClassVar[bool] = False  # ranks make calls of attention that do not belong together
    blind: ClassVar[tuple[str, ...]] = ()  # what cannot look at it
    slow: ClassVar[tuple[str, ...]] = ()  # what looks for it in the first set-up alone
    deep: ClassVar[bool] = False  # two layers where one is compiled, which takes half the time

    @classmethod
    def of(cls, set_up: SetUp) -> bool:
        """Whether the mistake can be made in a set-up."""
        return True

    @classmethod
    def axes(cls, set_up: SetUp) -> tuple[tuple[int, ...], tuple[str, ...]]:
        if set_up.beside in ("tp", "pp"):
            return (2, 2), ("cp", "tp") if set_up.beside == "tp" else ("pp", "cp")
        return (2 if cls.dp or set_up.beside else 1, 2), ("dp", "cp")

    def __init__(self, rank: int, set_up: SetUp) -> None:
        shape, names = self.axes(set_up)
        self.rank, self.set_up, self.at, self.off, self.grid = rank, set_up, "forward", 0.0, mesh(shape, names)
        places = dict(zip(names, self.grid.get_coordinate() or (), strict=True))
        self.axis, self.cp_rank, self.number = self.grid["cp"], places["cp"], places.get("pp")
        self.replica, self.replicas = places.get("dp", 0), shape[0] if "dp" in names else 1
        self.data = self.grid["dp", "cp"]._flatten("data") if "dp" in names else self.axis
        self.first, self.last = self.number in (None, 0), self.number in (None, 1)

    # What looks for mistakes.

    def guard(self) -> None:
        self.build()
        self.before()
        for number in range(self.steps):
            self.at = "forward"
            self.step(number)

    def before(self) -> None:
        """What is done after the plan and before the first step."""

    def probe(self) -> None:
        with guard_off(self):
            self.build()
            cp_mesh.probe(self.model, self.given(self.batch(0, self.replica)))

    def verify(self, **options: Any) -> None:
        with guard_off(self):
            self.sequence = self.make_sequence()
            given: dict[str, Any] = {
                "loss": lambda _, data: self.loss(self.forward(self.given(data)), self.labels(data)),
                "reduce_gradients": lambda _: self.reduce(),
                "total": "sum",
                "make_reference": functools.partial(self.net, plain=True),
                "reference_loss": self.loss_of_one_rank,
                "probes": False,
            }
            batch = {name: x for name, x in self.batch(0, self.replica).items() if x is not None}
            make = functools.partial(self.net, plain=False)
            cp_mesh.verify_model(make, self.spread, batch, self.grid, **given | options)

    # What is trained.

    watch: bool = True

    def build(self) -> None:
        self.sequence = self.make_sequence()
        self.spread(self.net(plain=False))
        self.optimizer = torch.optim.SGD(self.model.parameters(), RATE)

    def spread(self, model: nn.Module) -> nn.Module:
        """All of the trainer's parallelism, as in `verify_model`."""
        assert isinstance(model, Net)
        self.model = model
        if self.number is not None:
            self.model.stage(self.number)
        self.prepare(self.model)
        if self.set_up.beside == "tp":
            cp_mesh.parallelize(self.model, self.grid["tp"], self.tp_plan())
        cp_mesh.parallelize(self.model, self.axis, self.plan(), watch=self.watch)
        self.module = self.distribute()
        for part in {"blocks": self.model.layers, "whole": [self.model]}.get(self.set_up.compiled, ()):
            part.compile(backend="eager")
        return self.module

    def make_sequence(self) -> ShardedSequence:
        return ShardedSequence(self.axis, length=S if self.number is not None else self.length)

    def net(self, plain: bool) -> Net:
        net = self.Net(self.set_up, plain, -(-(self.length or S) // 4) * 4)
        if self.set_up.compiled and not self.deep:
            net.layers = net.layers[:1]
        return net

    def prepare(self, model: Net) -> None:
        """Change the model that is trained, and not that of one rank."""

    def tp_plan(self) -> dict[str, Any]:
        return overlapped_plan("all_reduce")

    def plan(self) -> dict[str, Any]:
        cores = [name for name, x in self.model.named_modules() if name.endswith("core")]
        plan: dict[str, Any] = {name: ContextParallel(self.sequence, **self.core_options(name)) for name in cores}
        if self.set_up.root:
            plan[""] = ShardedModel(self.sequence, **self.root_options())
        return plan

    def core_options(self, name: str) -> dict[str, Any]:
        if self.set_up.documents:
            return {"mask": lambda q, k, v, documents: Mask(documents=documents)}
        return {"mask": Mask(causal=False)} if self.set_up.flex else {}

    def root_options(self) -> dict[str, Any]:
        positions = "positions" if self.positioned else None
        return {"inputs": ("tokens",) if self.first else (), "positions": positions, "watch": self.watch}

    positioned: ClassVar[bool] = True  # the model's forward takes positions

    @property
    def reduced(self) -> Any:
        """The mesh over which gradients are summed."""
        return self.data

    @property
    def counted(self) -> Any:
        """The mesh over which the loss is a mean."""
        return self.data

    def distribute(self) -> nn.Module:
        model = self.model
        if self.set_up.by == "FSDP2":
            for layer in model.layers:
                fully_shard(layer, mesh=self.reduced)
            fully_shard(model, mesh=self.reduced)
        module: nn.Module = model
        if self.set_up.by == "DDP":
            module = DistributedDataParallel(model, process_group=self.reduced.get_group())
        if self.set_up.by != "hand" and self.sums:
            cp_mesh.sum_gradients(module)
        return module

    # A step.

    def batch(self, number: int, replica: int) -> Batch:
        """Whole tensors of a replica."""
        return self.right(number, replica)

    def right(self, number: int, replica: int) -> Batch:
        return batch_of(self.length or S, 100 * number + replica, self.set_up.documents)

    def given(self, batch: Batch) -> dict[str, Any]:
        """What the model is called with."""
        given = {name: batch[name] for name in ("tokens", "documents", "positions") if batch.get(name) is not None}
        if not self.set_up.root:
            given["tokens"] = self.sequence.shard({"tokens": batch["tokens"]})["tokens"]
            if self.positioned:
                given["positions"] = self.sequence.positions(batch["tokens"].shape[1])
        if not self.positioned:
            given.pop("positions", None)
        return given

    def labels(self, batch: Batch) -> Tensor:
        return self.sequence.shard({"labels": batch["labels"]})["labels"]

    def loss(self, logits: Any, labels: Tensor, **options: Any) -> Tensor:
        return cp_mesh.cross_entropy(logits, labels, self.counted, **options)

    def step(self, number: int) -> None:
        batch = self.batch(number, self.replica)
        if self.number is None:
            losses = [self.loss(self.forward(self.given(batch)), self.labels(batch))]
            self.at = "backward"
            self.backward(losses[0])
        else:
            losses = self.pipe(batch)
        self.reduce()
        self.at = "step"
        self.take_step()
        self.off = self.compare(number, losses)
        self.optimizer.zero_grad()

    def forward(self, given: dict[str, Any]) -> Any:
        return self.module(**given)

    def backward(self, loss: Tensor) -> None:
        loss.backward()

    def pipe(self, batch: Batch) -> list[Tensor]:
        losses: list[Tensor] = []
        given, count = self.given(batch), (batch["labels"] != -100).sum()
        stage = PipelineStage(self.module, self.number or 0, 2, torch.device("cpu"), group=self.grid["pp"].get_group())
        share = functools.partial(self.loss, **self.pipe_count(count))
        self.schedule = pipe = ScheduleGPipe(stage, MICROBATCHES, loss_fn=share, scale_grads=self.scales)
        tokens = given.pop("tokens")
        if self.first:
            pipe.step(tokens, **given)
        else:
            pipe.step(target=self.labels(batch), losses=losses, **given)
        return losses

    scales: ClassVar[bool] = False

    def pipe_count(self, count: Tensor) -> dict[str, Any]:
        return {"count": count}

    def reduce(self) -> None:
        for x in self.model.parameters() if self.set_up.by == "hand" else ():
            if x.grad is not None:
                dist.all_reduce(local(x.grad), group=self.reduced.get_group())

    def take_step(self) -> None:
        self.optimizer.step()

    # What one rank does.

    def compare(self, number: int, losses: list[Tensor]) -> float:
        plain = self.net(plain=True)
        batches = [self.right(number, replica) for replica in range(self.replicas)]
        whole = {name: torch.cat([x[name] for x in batches]) for name, x in batches[0].items() if x is not None}
        want = self.loss_of_one_rank(plain, whole)
        want.backward()
        off = 0.0
        if self.last and losses:
            got = torch.stack([x.detach() for x in losses]).sum()
            dist.all_reduce(got, group=self.data.get_group())
            off = abs(got / want - 1).item()
        if not all(x.requires_grad for x in losses):
            return off
        wanted = dict(plain.named_parameters())
        for name, x in self.model.named_parameters():
            grad = whole_of(torch.zeros_like(x) if x.grad is None else x.grad)
            right = wanted[name].grad
            right = torch.zeros_like(wanted[name]) if right is None else right
            apart = (grad - right).abs().max() / right.abs().max().clamp(min=1e-3)
            off = max(off, apart.nan_to_num(math.inf).item())
        return off

    def loss_of_one_rank(self, plain: Any, whole: dict[str, Any]) -> Tensor:
        whole = dict(whole)
        labels = whole.pop("labels")
        whole.setdefault("positions", torch.arange(labels.shape[1]))
        if not self.positioned:
            del whole["positions"]
        return F.cross_entropy(self.of_one_rank(plain, whole).flatten(0, 1), labels.flatten())

    def of_one_rank(self, plain: Net, whole: dict[str, Any]) -> Tensor:
        return plain(**whole)


GUARD = {
    "context_parallel": ("check_mask_read", "check_reach", "check_scores_stated", "check_rows"),
    "training.sharded_model": ("_check_masks", "ShardedModel._check_inputs"),
    "sharded_sequence": ("is_cut",),
    "call.passes": ("check_mark",),
    "training.loss": ("check_labels",),
}
"""Checks of the guard that `check_mode(False)` and ``watch=False`` do not turn off, or that `verify_model` turns on."""


@contextmanager
def guard_off(training: Training) -> Iterator[None]:
    """All checks of the guard pass, so that what comes is found by something else."""
    training.watch = False
    with ExitStack() as stack:
        stack.enter_context(cp_mesh.check_mode(False))
        for room, names in GUARD.items():
            for name in names:
                stack.enter_context(mock.patch(f"{path_of(room)}.{name}", lambda *_, **__: None))
        yield


def local(x: Any) -> Tensor:
    return x.to_local() if hasattr(x, "to_local") else x


def whole_of(x: Any) -> Tensor:
    return x.full_tensor() if hasattr(x, "full_tensor") else x


def batch_of(length: int, seed: int, documents: bool) -> Batch:
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(V, (B, length), generator=generator)
    labels = torch.cat([tokens[:, 1:], torch.full((B, 1), -100)], 1)
    if not documents:
        return {"tokens": tokens, "labels": labels}
    starts = torch.zeros(B, length, dtype=torch.bool)
    starts[0, [0, 7, 15]] = starts[1, [0, 10]] = True
    rows = torch.arange(length).expand(B, length)
    positions = rows - rows.where(starts, torch.zeros(())).cummax(1).values.long()
    labels[:, :-1][starts[:, 1:]] = -100
    return {"tokens": tokens, "labels": labels, "documents": starts.cumsum(1) - 1, "positions": positions}
