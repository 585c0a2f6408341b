"""What `test_faults.py` runs on ranks: a small trainer, ways to break one rank of it, and new groups in one process."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from inside import MergingForward, Packing, SummingBackward
from model import Model, batch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard

from cp_mesh import ContextParallel, Layout, ShardedModel, ShardedSequence, ZigZag, cross_entropy, parallelize
from cp_mesh import sum_gradients as sum_gradients_of

LENGTH = 24
TIMEOUT = 2.0  # seconds, of groups from the moment on in which a rank is lost; GRACE of ranks.py is longer
ODD = 1  # the rank that is lost, late or out of memory
MOMENTS = ("first call", "forward", "backward", "loss")


class Trainer:
    """A model under a plan over ``mesh``, sharded by FSDP2, and its optimizer."""

    def __init__(self, mesh: DeviceMesh, layout: Layout | None = None, method: str = "ring", seed: int = 0) -> None:
        self.mesh, self.sequence = mesh, ShardedSequence(mesh, layout or ZigZag(), length=LENGTH)
        self.model = Model(seed=seed)
        options = {"ulysses_degree": 2} if method == "hybrid" else {}
        plan = {
            "": ShardedModel(self.sequence, inputs=("tokens",), positions="positions"),
            "layers.*.core": ContextParallel(self.sequence, method=method, **options),
        }
        parallelize(self.model, mesh, plan)
        fully_shard(self.model, mesh=mesh)
        sum_gradients_of(self.model)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)

    def loss(self, seed: int, before: Callable[[], None] = lambda: None) -> Tensor:
        """This rank's share of the loss of a batch; ``before`` is called between the model and the loss."""
        whole = batch(2, LENGTH, seed)
        labels = self.sequence.shard({"labels": whole["labels"]})["labels"]
        logits = self.model(whole["tokens"])
        before()
        return cross_entropy(logits, labels, self.mesh)

    def finish(self, loss: Tensor) -> float:
        """The rest of a step, and the loss of all ranks."""
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        total = loss.detach().clone()
        dist.all_reduce(total, group=self.mesh.get_group())
        return total.item()

    def step(self, seed: int) -> float:
        return self.finish(self.loss(seed))


def new_mesh() -> DeviceMesh:
    return init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("cp",))


def new_world(rank: int, store: Path | dist.Store, timeout: float = 60.0) -> None:
    """Destroy all groups, and make the default one anew in a new store, as PyTorch asks for."""
    world_size = dist.get_world_size()
    dist.destroy_process_group()
    made = dist.FileStore(str(store), world_size) if isinstance(store, Path) else store
    dist.init_process_group("gloo", store=made, rank=rank, world_size=world_size, timeout=timedelta(seconds=timeout))


class _Backward(torch.autograd.Function):
    """Nothing in the forward; calls a function in the backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, act: Callable[[], None]) -> Tensor:
        ctx.act = act
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        ctx.act()
        return grad, None


def step_with(trainer: Trainer, moment: str, act: Callable[[], None], seed: int) -> float:
    """A step in which ``act`` is called before attention ("first call"), after it in one pass, or before the loss."""

    def hook(module: nn.Module, arguments: Any) -> Any:
        if moment == "backward":
            return (_Backward.apply(arguments[0], act),)
        return act()

    layer = trainer.model.layers[0]
    if moment == "loss":
        return trainer.finish(trainer.loss(seed, act))
    with remover((layer.norm if moment == "first call" else layer.ff).register_forward_pre_hook(hook)):
        return trainer.finish(trainer.loss(seed))


@contextmanager
def remover(handle: Any) -> Iterator[None]:
    try:
        yield
    finally:
        handle.remove()


def impatient() -> None:
    """Collectives of this rank time out soon from now on, in all of its groups."""
    for group in dist.distributed_c10d._world.pg_map:
        dist.distributed_c10d._set_pg_timeout(timedelta(seconds=TIMEOUT), group)


def killed() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def raising() -> None:
    raise KeyError("in the middle of user code")


def late() -> None:
    time.sleep(0.3)


OUT_OF_MEMORY: dict[str, tuple[type, str]] = {
    "kernel, forward": (MergingForward, "step"),
    "kernel, backward": (SummingBackward, "step"),
    "buffer": (Packing, "empty"),
}


@contextmanager
def out_of_memory(where: str, at: int) -> Iterator[None]:
    """The call number ``at`` of what is named by `OUT_OF_MEMORY` raises."""
    owner, name = OUT_OF_MEMORY[where]
    real, calls = getattr(owner, name), []

    def fails(*args: Any, **kwargs: Any) -> Any:
        calls.append(1)
        if len(calls) == at:
            raise torch.OutOfMemoryError("out of memory, as planted")
        return real(*args, **kwargs)

    with mock.patch.object(owner, name, fails):
        yield
    assert len(calls) >= at
