"""Stages of torch.distributed.pipelining, pp x cp x tp: loss and every gradient are those of one rank, in fp64."""

from __future__ import annotations

import functools
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
from ranks import mesh, on_ranks, refused
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
from torch.distributed.tensor import DTensor

import cp_mesh
from cp_mesh import ArgumentError, ContextParallel, Mask, ShardedModel, ShardedSequence, cross_entropy

sys.path.append(str(Path(__file__).resolve().parent.parent / "examples"))

import llama
import parallel_llama

SCHEDULES = {"GPipe": ScheduleGPipe, "1F1B": Schedule1F1B}
CONFIG = llama.LlamaConfig(vocab_size=32, dim=32, num_layers=4, num_heads=4, num_kv_heads=2)
B, S, MICROBATCHES, CLIP = 4, 22, 2, 0.5
"""Rows of a batch; tokens, of which cp ranks need padding; the largest norm, which gradients exceed."""


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
    tokens, labels = text[:, :-1].clone(), text[:, 1:].clone()
    labels[torch.rand(B, S, generator=numbers) < torch.linspace(0, 0.6, B)[:, None]] = -100
    return {"tokens": tokens, "labels": labels, "positions": positions, "documents": starts.cumsum(1)}


@functools.cache
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


def planned(
    number: int, grid: DeviceMesh, sequence: ShardedSequence,
    mask: Callable[..., Mask] = lambda q, k, v, documents: Mask(documents=documents),
) -> llama.Stage:  # fmt: skip
    """One of two stages under its plan, or all of a model: the first takes whole tokens, the second one rows."""
    model = model_of(llama.CoreAttention)
    if "tp" in grid.mesh_dim_names:
        parallel_llama.apply_tensor_parallel(model, grid["tp"], False)
    of_stage = 4 // grid["pp"].size()
    stage = llama.Stage(model, range(of_stage * number, of_stage * (number + 1)))
    plan = {
        "": ShardedModel(sequence, inputs=("x",) if number == 0 else ()),
        "layers.*.attention.core": ContextParallel(sequence, mask=mask),
    }
    return cp_mesh.parallelize(stage, grid["cp"], plan)


def run(
    shape: tuple[int, ...], schedule: str, packed: bool, how: str = "", check: Callable[..., None] | None = None
) -> list[str]:
    """One step, whose loss and gradients may be checked before the optimizer's; what the library warned of."""
    grid = mesh(shape, ("pp", "cp", "tp")[: len(shape)])
    number, batch = grid.get_local_rank("pp"), batch_of()
    sequence = ShardedSequence(grid["cp"], length=S)
    stage = planned(number, grid, sequence)
    for part in {"compiled": [stage], "compiled layers": stage.layers.values()}.get(how, ()):
        part.compile(backend="aot_eager")
    if how in ("fsdp", "averaged"):
        fully_shard(stage, mesh=grid["cp"])
    if how == "fsdp":
        cp_mesh.sum_gradients(stage)
    if how == "averaged":
        for part in stage.modules():
            if hasattr(part, "set_force_sum_reduction_for_comms"):
                part.set_force_sum_reduction_for_comms(True)
    count = (batch["labels"] != -100).sum()
    pipe = SCHEDULES[schedule](
        PipelineStage(stage, number, 2, torch.device("cpu"), group=grid["pp"].get_group()), MICROBATCHES,
        loss_fn=lambda logits, labels: cross_entropy(logits, labels, grid["cp"], count=count), scale_grads=False,
    )  # fmt: skip
    given = {name: batch[name] for name in ("positions", "documents")} if packed else {}
    optimizer, losses = torch.optim.SGD(stage.parameters(), 0.1), []

    def step() -> None:
        if number == 0:
            pipe.step(batch["tokens"], **given)
        else:
            pipe.step(target=sequence.shard({"labels": batch["labels"]})["labels"], losses=losses, **given)
        for x in () if how in ("fsdp", "averaged", "unreduced") else stage.parameters():
            dist.all_reduce(x.grad.to_local() if isinstance(x.grad, DTensor) else x.grad, group=grid["cp"].get_group())
        if check is not None:
            check(grid, stage, losses, packed)
        optimizer.step()

    return warned(step)


def as_one_rank(grid: DeviceMesh, stage: nn.Module, losses: list[Tensor], packed: bool) -> None:
    numbers, gradients = of_one_rank(packed)
    largest = cp_mesh.clip_grad_norm(stage.parameters(), math.inf, math.inf, over=grid["pp"])
    norms = torch.stack([cp_mesh.clip_grad_norm(stage.parameters(), CLIP, over=grid["pp"]), largest])
    torch.testing.assert_close(norms, numbers[1:])
    last = grid.get_local_rank("pp") == 1
    if last:
        assert len(losses) == MICROBATCHES
        loss = torch.stack([x.detach() for x in losses]).sum()
        dist.all_reduce(loss, group=grid["cp"].get_group())
        torch.testing.assert_close(loss, numbers[0])
    found = dict(stage.named_parameters())
    assert len(found) == len(gradients) // 2 + last and set(found) < set(gradients)
    for name, x in found.items():
        grad = x.grad.full_tensor() if isinstance(x.grad, DTensor) else x.grad
        torch.testing.assert_close(grad, gradients[name], rtol=1e-7, atol=1e-9, msg=lambda m, name=name: f"{name}: {m}")


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.quick("1F1B-False")
@on_ranks(4)
def test_two_stages_over_cp(schedule: str, packed: bool) -> None:
    assert not run((2, 2), schedule, packed, check=as_one_rank)


NIGHTLY = pytest.mark.nightly("compiled")


@pytest.mark.parametrize("how", ["fsdp", *(pytest.param(x, marks=NIGHTLY) for x in ("compiled", "compiled layers"))])
@on_ranks(4)
def test_two_stages_otherwise(how: str) -> None:
    assert not run((2, 2), "1F1B", True, how, as_one_rank)


@pytest.mark.full
@pytest.mark.parametrize("schedule", SCHEDULES)
@on_ranks(8)
def test_two_stages_over_cp_and_tp(schedule: str) -> None:
    assert not run((2, 2, 2), schedule, True, check=as_one_rank)


@on_ranks(4)
def test_every_stage_is_told_of_averages() -> None:
    (said,) = run((2, 2), "GPipe", False, "averaged")
    assert "call cp_mesh.sum_gradients(model) after fully_shard" in said


@on_ranks(4)
def test_every_stage_is_told_of_gradients_that_nobody_reduced() -> None:
    with pytest.raises(ArgumentError, match="equal on all ranks before the optimizer steps"):
        run((2, 2), "GPipe", False, "unreduced")


@on_ranks(2)
def test_a_mask_is_not_cut_in_microbatches() -> None:
    """A pipeline cuts tensors alone, so every microbatch would have the `Mask` of the whole batch."""
    grid, batch = mesh((1, 2), ("pp", "cp")), batch_of()
    stage = planned(0, grid, ShardedSequence(grid["cp"], length=S), lambda q, k, v, documents: documents)
    stage = PipelineStage(stage, 0, 1, torch.device("cpu"), group=grid["pp"].get_group())
    with pytest.raises(ArgumentError, match="documents"):
        ScheduleGPipe(stage, MICROBATCHES).step(batch["tokens"], documents=Mask(documents=batch["documents"]))


@on_ranks(2)
def test_a_later_stage_needs_a_length(axis: Any) -> None:
    with refused(r"ShardedModel\(inputs=\(\)\): expected a sequence with a length"):
        ShardedModel(ShardedSequence(axis), inputs=())
