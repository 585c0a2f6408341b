"""What checks of first steps cost and leave behind, and what other ranks hear; `mistaken` has what they find."""

from __future__ import annotations

import contextlib
from datetime import timedelta
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from inside import path_of, room
from ranks import mesh, on_ranks
from set_ups import SET_UPS, Core, SetUp, Training, batch_of
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounter
from torch.distributed.device_mesh import DeviceMesh

import cp_mesh
from cp_mesh import ArgumentError, ContextParallel, Contiguous, ShardedModel, ShardedSequence

agreement = room("agreement")


def built(rank: int, set_up: SetUp = SET_UPS["eager"]) -> Training:
    training = Training(rank, set_up)
    training.build()
    return training


def new_axis() -> DeviceMesh:
    """Over which nothing was called."""
    return DeviceMesh.from_group(dist.new_group(), "cpu", mesh_dim_names=("cp",))


@on_ranks(2)
def test_the_store_does_not_grow_with_steps(rank: int) -> None:
    training, counts = built(rank), []
    given = training.given(training.batch(0, 0))
    store = dist.distributed_c10d._world.pg_map[dist.group.WORLD][1]
    for _ in range(2):
        for _ in range(10):
            training.forward(given)
        dist.barrier()
        counts.append(store.num_keys())
        dist.barrier()
    assert counts[0] == counts[1]


@on_ranks(2)
def test_a_compiled_loss_is_one_graph_while_a_model_waits(rank: int) -> None:
    training, counter = built(rank), CompileCounter()
    loss = torch.compile(
        lambda *given: cp_mesh.cross_entropy(*given, training.counted), backend=counter, fullgraph=True
    )
    for number in range(3):
        batch = training.batch(number, 0)
        loss(training.forward(training.given(batch)), training.labels(batch)).backward()
        training.reduce()
        training.take_step()
        training.optimizer.zero_grad()
    assert counter.frame_count == 1


# Losses that one rank refuses.

LOGITS, LABELS = torch.zeros(2, 7, 9), torch.ones(2, 7, dtype=torch.int64)
WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "short": ({"labels": LABELS[:, 1:]}, "labels: expected shape (2, 7), got (2, 6)"),
    "none": ({"labels": None}, "labels: expected a local tensor, int64, got NoneType"),
    "tuple": ({"logits": (LOGITS,)}, "logits: expected a tensor, got tuple"),
    "float": ({"labels": LABELS.double()}, "labels: expected a local tensor, int64, got torch.float64"),
}


@pytest.mark.parametrize(
    ("what", "count"), [("short", None), ("short", 5), ("none", None), ("tuple", None), ("float", 5)]
)
@on_ranks(3)
def test_a_loss_that_one_rank_refuses(rank: int, what: str, count: int | None) -> None:
    """With a count rank 1 alone raises in later ones, at once."""
    axis, (wrong, said) = new_axis(), WRONG[what]
    given: dict[str, Any] = {"logits": LOGITS, "labels": LABELS} | (wrong if rank == 1 else {})
    with pytest.raises(ArgumentError) as error:
        cp_mesh.cross_entropy(**given, mesh=axis, count=count)
    assert str(error.value).startswith(f"cross_entropy: {said}" if rank == 1 else "on 1 other ranks of the mesh: ")
    assert said in str(error.value)
    if count is None:
        cp_mesh.cross_entropy(LOGITS, LABELS, axis)
    if rank == 1 or count is None:
        with pytest.raises(ArgumentError, match=r"cross_entropy: (labels|logits): expected"):
            cp_mesh.cross_entropy(**given, mesh=axis, count=count)


@on_ranks(3)
def test_a_count_that_one_rank_refuses(rank: int, axis: DeviceMesh) -> None:
    with pytest.raises(ArgumentError, match="valid_tokens: labels: expected"):
        cp_mesh.training.valid_tokens(None if rank == 1 else LABELS, axis)  # type: ignore[arg-type]


@on_ranks(4)
def test_refusals_of_two_losses_at_once(rank: int) -> None:
    """One rank of each of two replicas has a label outside of the vocabulary, in a loss over its replica."""
    labels = torch.full((1, 4), 100 + rank if rank % 2 else 1)
    with pytest.raises(ArgumentError, match=rf"got {101 + rank // 2 * 2}; pass ignore_index="):
        cp_mesh.cross_entropy(torch.zeros(1, 4, 8), labels, mesh((2, 2), ("dp", "cp"))["cp"])


@on_ranks(3)
def test_the_loss_takes_a_process_group(rank: int, axis: DeviceMesh) -> None:
    assert cp_mesh.cross_entropy(LOGITS, LABELS, axis) == cp_mesh.cross_entropy(LOGITS, LABELS, axis.get_group()) > 0
    with pytest.raises(ArgumentError, match="mesh: expected a DeviceMesh or a ProcessGroup, got 3"):
        cp_mesh.cross_entropy(LOGITS, LABELS, 3)  # type: ignore[arg-type]


# What a model is given.


class OfEmbeddings(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.core = Core(SetUp(), False, 16)

    def forward(self, x: Tensor, documents: Tensor) -> Tensor:
        return self.core(x[:, None], x[:, None], x[:, None])


@on_ranks(2)
def test_documents_are_whole_on_every_rank(rank: int, axis: DeviceMesh) -> None:
    model = cp_mesh.parallelize(OfEmbeddings(), axis, {"core": ContextParallel(ShardedSequence(axis))})
    model(torch.randn(2, 8, 4), documents=batch_of(16, 0, True)["documents"])


class Padded(nn.Module):
    def forward(self, x: Tensor, targets: Tensor, label_weights: Tensor, y: Tensor | None = None) -> Any:
        return x, targets, label_weights


@on_ranks(2)
def test_inputs_of_a_root_are_padded_by_their_whole_names(rank: int, axis: DeviceMesh) -> None:
    sequence, ones = ShardedSequence(axis, Contiguous(), length=5), torch.ones(1, 5, dtype=torch.int64)
    names = ("x", "targets", "label_weights")
    model = cp_mesh.parallelize(Padded(), axis, {"": ShardedModel(sequence, inputs=names, positions=None)})
    found = [rows[0, 1:].tolist() for rows in model(ones, ones, ones.double())]
    assert found == ([[1, 0], [1, -100], [1.0, 0.0]] if rank else [[1, 1]] * 3)
    model = cp_mesh.parallelize(Padded(), axis, {"": ShardedModel(sequence, inputs=(*names, "y"), positions=None)})
    with pytest.raises(ArgumentError, match=r"shard\(y\): expected a pad_value for an integer.* or pad=False"):
        model(ones, ones, ones.double(), ones)


# Ranks that do not come, and words in the store.


@pytest.mark.full
@on_ranks(2, timeout=20.0)
def test_ranks_whose_optimizer_holds_nothing_keep_nobody_waiting(rank: int) -> None:
    training = built(rank)
    if rank == 1:
        training.optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))], 0.1)
    with mock.patch.object(agreement, "STEP_PATIENCE", timedelta(seconds=0.5)):
        training.step(0)
    training.forward(training.given(batch_of(32, 0, False)))  # a first call of another length, which all ranks compare


@on_ranks(3, timeout=20.0)
def test_all_have_the_same_answers(rank: int) -> None:
    """All come; then one of them comes when the others have decided without it."""
    group, said = dist.new_group(), []
    for topic in ("all", "two"):
        if rank == 2 and topic == "two":
            dist.barrier(group)
        with mock.patch.object(agreement, "STEP_PATIENCE", timedelta(seconds=5 if topic == "all" else 0.2)):
            said.append([*agreement.exchange_in_time(group, topic, {})])
        if rank < 2 and topic == "two":
            dist.barrier(group)
    assert said == [[0, 1, 2], []]


def under_the_name_of(group: dist.ProcessGroup, store: dist.Store) -> None:
    """A group finds the keys that another one left, as one that is made anew under its name and over its store does."""
    known = dist.distributed_c10d._world.pg_map
    known[group] = known[group][0], dist.PrefixStore("of_both", store)


@pytest.mark.parametrize("how", ["refused", "waited"])
@on_ranks(2)
def test_a_word_that_nobody_came_to_read_is_taken_back(rank: int, how: str) -> None:
    store = dist.distributed_c10d._world.pg_map[dist.group.WORLD][1]
    for times in range(3):
        group = dist.new_group()
        under_the_name_of(group, store)
        if rank == 1 and how == "refused":
            with contextlib.suppress(ValueError), agreement.refusing(group):
                raise ValueError("only here")
        if rank == 1 and how == "waited":
            with mock.patch.object(agreement, "PATIENCE", timedelta(seconds=0.1)):
                with pytest.raises(cp_mesh.RankMismatchError, match=r"got none from ranks \[0\]"):
                    agreement.compare(group, 0, lambda: {"seq_len": "1"})
        if times == 1:
            agreement.look_again(group)  # what a plan counts is of its group too
        dist.destroy_process_group(group)
        dist.barrier()
    group = dist.new_group()
    under_the_name_of(group, store)
    with mock.patch.object(agreement, "PATIENCE", timedelta(seconds=5)):
        for kind in range(2):
            agreement.compare(group, kind, lambda kind=kind: {"seq_len": str(kind)})


@on_ranks(2)
def test_a_model_that_no_optimizer_steps_is_given_up(rank: int) -> None:
    training = built(rank)
    losses, waiting = room("sequence.losses"), []
    with mock.patch(f"{path_of('sequence.losses')}.MOST", 2):
        for number in range(4):
            batch = training.batch(number, 0)
            training.loss(training.forward(training.given(batch)), training.labels(batch)).backward()
            waiting.append(training.model in losses.WAITING)
    assert waiting == [True, True, False, False]
