"""Stages of torch.distributed.pipelining, pp x cp x tp: loss and every gradient are those of one rank, in fp64."""

from __future__ import annotations

import math
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from ranks import mesh
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
from torch.distributed.tensor import DTensor

import cp_mesh
from cp_mesh import ContextParallel, Mask, ShardedModel, ShardedSequence, cross_entropy

sys.path.append(str(Path(__file__).resolve().parent.parent / "examples"))

import llama
import parallel_llama

SCHEDULES = {"GPipe": ScheduleGPipe, "1F1B": Schedule1F1B}
CONFIG = llama.LlamaConfig(vocab_size=32, dim=32, num_layers=4, num_heads=4, num_kv_heads=2)
B, S, MICROBATCHES, CLIP = 4, 22, 2, 0.5
"""Rows of a batch; tokens, of which cp ranks need padding; the largest norm, which gradients exceed."""


def raised(pool: Any, world_size: int, fn: Callable[..., Any], *args: Any) -> list[Any]:
    """What each rank raised; all must, and soon."""
    errors = pool(world_size).run_expecting_error(fn, *args, timeout=20.0)
    assert all(errors), errors
    return errors


def warned(fn: Callable[[], Any]) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        fn()
    return [str(x.message) for x in caught if str(x.message).startswith("cp_mesh:")]


def model_of(core: type[nn.Module]) -> llama.Llama:
    model = llama.Llama(CONFIG, core).double()
    model.init_weights(0)
    return model


def batch_of() -> dict[str, Tensor]:
    """Whole tensors: other documents in every row, positions that count in each, and unlike numbers of valid labels."""
    numbers = torch.Generator().manual_seed(0)
    text = torch.randint(CONFIG.vocab_size, (B, S + 1), generator=numbers)
    starts = torch.rand(B, S, generator=numbers) < 3 / S
    starts[:, 0] = True
    rows = torch.arange(S).expand(B, S)
    positions = rows - rows.where(starts, torch.zeros(())).cummax(1).values.long()
    labels = text[:, 1:].clone()
    labels[torch.rand(B, S, generator=numbers) < torch.linspace(0, 0.6, B)[:, None]] = -100
    return {"tokens": text[:, :-1], "labels": labels, "positions": positions, "documents": starts.cumsum(1)}


def of_one_rank(packed: bool) -> tuple[Tensor, dict[str, Tensor]]:
    """The loss, the norm and the largest of all gradients; and these clipped. No code of the library attends."""
    model, batch = model_of(llama.DenseDocumentAttention), batch_of()
    given = {name: batch[name] for name in ("positions", "documents")} if packed else {}
    loss = F.cross_entropy(model(batch["tokens"], **given).flatten(0, 1), batch["labels"].flatten())
    loss.backward()
    largest = torch.stack([x.grad.abs().max() for x in model.parameters()]).max()
    norm = nn.utils.clip_grad_norm_(model.parameters(), CLIP)
    assert norm > 2 * CLIP
    return torch.stack([loss.detach(), norm, largest]), {name: x.grad for name, x in model.named_parameters()}


def planned(number: int, grid: DeviceMesh, sequence: ShardedSequence) -> llama.Stage:
    """One of two stages under its plan: the first takes whole tokens, the second one rows."""
    model = model_of(llama.CoreAttention)
    if "tp" in grid.mesh_dim_names:
        parallel_llama.apply_tensor_parallel(model, grid["tp"], False)
    stage = llama.Stage(model, range(2 * number, 2 * number + 2))
    plan = {
        "": ShardedModel(sequence, inputs=("x",) if number == 0 else ()),
        "layers.*.attention.core": ContextParallel(sequence, mask=lambda q, k, v, documents: Mask(documents=documents)),
    }
    return cp_mesh.parallelize(stage, grid["cp"], plan)


def train(rank: int, shape: tuple[int, ...], schedule: str, packed: bool, how: str = "") -> list[str]:
    """One step; what the library warned of."""
    fsdp = how == "fsdp"
    grid = mesh(shape, ("pp", "cp", "tp")[: len(shape)])
    number, batch = grid.get_local_rank("pp"), batch_of()
    sequence = ShardedSequence(grid["cp"], length=S)
    stage = planned(number, grid, sequence)
    for part in {"compiled": [stage], "compiled layers": stage.layers.values()}.get(how, ()):
        part.compile(backend="aot_eager")
    if fsdp:
        fully_shard(stage, mesh=grid["cp"])
        cp_mesh.sum_gradients(stage)
    count = (batch["labels"] != -100).sum()

    def share(logits: Tensor, labels: Tensor) -> Tensor:
        return cross_entropy(logits, labels, grid["cp"], count=count)

    pipe = SCHEDULES[schedule](
        PipelineStage(stage, number, 2, torch.device("cpu"), group=grid["pp"].get_group()),
        MICROBATCHES, loss_fn=share, scale_grads=False,
    )  # fmt: skip
    given = {name: batch[name] for name in ("positions", "documents")} if packed else {}
    optimizer, losses = torch.optim.SGD(stage.parameters(), 0.1), []

    def step() -> None:
        if number == 0:
            pipe.step(batch["tokens"], **given)
        else:
            pipe.step(target=sequence.shard({"labels": batch["labels"]})["labels"], losses=losses, **given)
        if not fsdp:
            for x in stage.parameters():
                local = x.grad.to_local() if isinstance(x.grad, DTensor) else x.grad
                dist.all_reduce(local, group=grid["cp"].get_group())
        largest = cp_mesh.clip_grad_norm(stage.parameters(), math.inf, math.inf, over=grid["pp"])
        check(losses, torch.stack([cp_mesh.clip_grad_norm(stage.parameters(), CLIP, over=grid["pp"]), largest]))
        optimizer.step()

    def check(losses: list[Tensor], norms: Tensor) -> None:
        numbers, gradients = of_one_rank(packed)
        torch.testing.assert_close(norms, numbers[1:])
        if number == 1:
            assert len(losses) == MICROBATCHES
            loss = torch.stack([x.detach() for x in losses]).sum()
            dist.all_reduce(loss, group=grid["cp"].get_group())
            torch.testing.assert_close(loss, numbers[0])
        found = dict(stage.named_parameters())
        assert len(found) == len(gradients) // 2 + (number == 1) and set(found) < set(gradients)
        for name, x in found.items():
            grad = x.grad.full_tensor() if isinstance(x.grad, DTensor) else x.grad
            torch.testing.assert_close(
                grad, gradients[name], rtol=1e-7, atol=1e-9, msg=lambda m, name=name: f"{name}: {m}"
            )

    return warned(step)


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.quick("1F1B-False")
def test_two_stages_over_cp(pool: Any, schedule: str, packed: bool) -> None:
    assert pool(4).run(train, (2, 2), schedule, packed) == [[]] * 4


@pytest.mark.parametrize(
    "how", ["fsdp", *(pytest.param(x, marks=pytest.mark.nightly("compiled")) for x in ("compiled", "compiled layers"))]
)
def test_two_stages_otherwise(pool: Any, how: str) -> None:
    assert pool(4).run(train, (2, 2), "1F1B", True, how) == [[]] * 4


@pytest.mark.full
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_two_stages_over_cp_and_tp(pool: Any, schedule: str) -> None:
    assert pool(8).run(train, (2, 2, 2), schedule, True) == [[]] * 8


# The guard.


def mistaken(rank: int, how: str) -> list[str]:
    """A step of two stages that is wrong; what the library warned of."""
    grid, batch = mesh((2, 2), ("pp", "cp")), batch_of()
    number, sequence = grid.get_local_rank("pp"), ShardedSequence(grid["cp"], length=S)
    stage = planned(number, grid, sequence)
    if how == "averaged":
        fully_shard(stage, mesh=grid["cp"])
        for part in stage.modules():
            if hasattr(part, "set_force_sum_reduction_for_comms"):
                part.set_force_sum_reduction_for_comms(True)
    count = (batch["labels"] != -100).sum()

    def share(logits: Tensor, labels: Tensor) -> Tensor:
        return cross_entropy(logits, labels, grid["cp"], count=count)

    pipe = ScheduleGPipe(
        PipelineStage(stage, number, 2, torch.device("cpu"), group=grid["pp"].get_group()),
        MICROBATCHES, loss_fn=share, scale_grads=False,
    )  # fmt: skip
    optimizer = torch.optim.SGD(stage.parameters(), 0.1)

    def step() -> None:
        if number == 0:
            pipe.step(batch["tokens"])
        else:
            pipe.step(target=sequence.shard({"labels": batch["labels"]})["labels"])
        for x in stage.parameters():
            if how not in ("averaged", "unreduced"):
                dist.all_reduce(x.grad, group=grid["cp"].get_group())
        optimizer.step()

    return warned(step)


def test_every_stage_is_told_of_averages(pool: Any) -> None:
    for said in pool(4).run(mistaken, "averaged"):
        assert len(said) == 1 and "call cp_mesh.sum_gradients(model) after fully_shard" in said[0]


def test_every_stage_is_told_of_gradients_that_nobody_reduced(pool: Any) -> None:
    for error in raised(pool, 4, mistaken, "unreduced"):
        assert error.type == "ArgumentError" and "equal on all ranks before the optimizer steps" in error.message


# What is refused.


def whole_mask(rank: int) -> None:
    """A `Mask` among the arguments: a pipeline cuts tensors alone, so every microbatch has that of the whole batch."""
    grid, batch = mesh((1, 2), ("pp", "cp")), batch_of()
    axis, alone = grid["cp"], grid["pp"].get_group()
    sequence = ShardedSequence(axis, length=S)
    stage = llama.Stage(model_of(llama.CoreAttention), range(4))
    plan = {
        "": ShardedModel(sequence, inputs=("x",)),
        "layers.*.attention.core": ContextParallel(sequence, mask=lambda q, k, v, documents: documents),
    }
    cp_mesh.parallelize(stage, axis, plan)
    mask = Mask(documents=batch["documents"])
    stage = PipelineStage(stage, 0, 1, torch.device("cpu"), group=alone)
    ScheduleGPipe(stage, MICROBATCHES).step(batch["tokens"], documents=mask)


def test_a_mask_is_not_cut_in_microbatches(pool: Any) -> None:
    for error in raised(pool, 2, whole_mask):
        assert error.type == "ArgumentError" and "documents" in error.message, error.message


def without_a_length(rank: int) -> None:
    ShardedModel(ShardedSequence(mesh((2,), ("cp",))), inputs=())


def test_a_later_stage_needs_a_length(pool: Any) -> None:
    for error in raised(pool, 2, without_a_length):
        assert "ShardedModel(inputs=()): expected a sequence with a length" in error.message
