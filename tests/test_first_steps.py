"""The first optimizer step of each model: of several ones, of accumulated gradients, of optimizers of all kinds."""

from __future__ import annotations

import contextlib
import functools
import threading
from datetime import timedelta
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from inside import path_of, room
from ranks import mesh
from test_guard import MaskedModel, Model, compare_with_one_rank, next_tokens, raised, tokens_of, warned
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounter
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.nn.parallel import DistributedDataParallel

import cp_mesh
from cp_mesh import ContextParallel, Mask, ShardedModel, ShardedSequence

agreement = room("agreement")
trained = room("sequence.losses")

UNREDUCED = "equal on all ranks before the optimizer steps, got different ones on the ranks"


def cp(size: int = 2) -> DeviceMesh:
    return mesh((size,), ("cp",))


def planned(axis: DeviceMesh, root: bool = True, seed: int = 0) -> Model:
    sequence, model = ShardedSequence(axis), Model(seed)
    plan = {"": ShardedModel(sequence, positions=None)} if root else {}
    return cp_mesh.parallelize(model, axis, plan | {"core": ContextParallel(sequence)})


def logits_of(run: nn.Module, tokens: Tensor, axis: DeviceMesh, root: bool = True) -> Tensor:
    return run(tokens if root else ShardedSequence(axis).shard({"tokens": tokens})["tokens"])


def labels_of(tokens: Tensor, axis: DeviceMesh) -> Tensor:
    return ShardedSequence(axis).shard({"labels": next_tokens(tokens)})["labels"]


def reduce(model: nn.Module) -> None:
    for x in model.parameters():
        dist.all_reduce(x.grad)


# Several models.


def in_turn(rank: int, how: str, root: bool, compiled: bool) -> list[list[str]]:
    """Warnings of the first steps of two models, both planned before; the first one is right."""
    axis, tokens = cp(), tokens_of(16)
    models = [planned(axis, root, seed) for seed in (0, 1)]
    steps = [torch.optim.SGD(model.parameters(), 0.1) for model in models]

    def step(number: int) -> None:
        model, mistake = models[number], how if number == 1 else "right"
        if compiled:
            model.compile(backend="aot_eager")
        logits, labels = logits_of(model, tokens, axis, root), labels_of(tokens, axis)
        if mistake == "mean":
            loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten())
        else:
            labels = next_tokens(tokens).chunk(2, dim=1)[rank] if mistake == "chunk" else labels
            loss = cp_mesh.cross_entropy(logits, labels, axis)
        loss.backward()
        if mistake != "unreduced":
            reduce(model)
        if mistake == "right" and number == 0:
            compare_with_one_rank(model, (0,), 16)
        steps[number].step()
        steps[number].zero_grad()

    return [warned(functools.partial(step, number)) for number in (0, 1, 0, 1)]


TURNS = [(root, compiled) for root in (True, False) for compiled in (False, True)]


@pytest.mark.parametrize(
    ("root", "compiled"), [TURNS[0], *(pytest.param(*x, marks=pytest.mark.full) for x in TURNS[1:])]
)
@pytest.mark.full
def test_models_in_turn_have_a_first_step_each(pool: Any, root: bool, compiled: bool) -> None:
    for first, second, *later in pool(2).run(in_turn, "mean", root, compiled):
        assert first == [] and later == [[], []]
        assert len(second) == 1 and "a loss that is not cp_mesh.cross_entropy" in second[0]
    for how, says in (("chunk", "the labels of contiguous rows, beside tokens in zigzag"), ("unreduced", UNREDUCED)):
        for error in raised(pool, 2, in_turn, how, root, compiled):
            assert error.type == "ArgumentError" and says in error.message, error.message
    assert pool(2).run(in_turn, "right", root, compiled) == [[[]] * 4] * 2


def compiled_losses(rank: int) -> int:
    """How many graphs a compiled loss takes in three steps, the first one with a model that waits for its step."""
    axis, model, counter = cp(), planned(cp()), CompileCounter()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    loss = torch.compile(lambda *given: cp_mesh.cross_entropy(*given, axis), backend=counter, fullgraph=True)
    for seed in range(3):
        tokens = tokens_of(16, seed=seed)
        loss(model(tokens), labels_of(tokens, axis)).backward()
        reduce(model)
        optimizer.step()
        optimizer.zero_grad()
    return counter.frame_count


def test_a_compiled_loss_is_one_graph_while_a_model_waits(pool: Any) -> None:
    assert pool(2).run(compiled_losses) == [1, 1]


def of_unlike_ranks(rank: int) -> list[str]:
    """One model over dp x cp, and one that every cp group has for itself, in one backward or in two."""
    grid, tokens = mesh((2, 2), ("dp", "cp")), tokens_of(12)
    data = [mesh((2, 2), ("dp", "cp"))._flatten("of_unlike_ranks"), grid["cp"]]
    models = [planned(grid["cp"], seed=seed) for seed in (0, 1)]
    for model, ranks in zip(models, data, strict=True):
        fully_shard(model, mesh=ranks)
        cp_mesh.sum_gradients(model)
    steps = [torch.optim.SGD(model.parameters(), 0.1) for model in models]

    def step() -> None:
        for model, ranks, optimizer in zip(models, data, steps, strict=True):
            cp_mesh.cross_entropy(model(tokens), labels_of(tokens, grid["cp"]), ranks).backward()
            optimizer.step()

    return warned(step)


@pytest.mark.full
def test_models_over_unlike_ranks(pool: Any) -> None:
    assert pool(4).run(of_unlike_ranks) == [[]] * 4


def together(rank: int, how: str) -> list[str]:
    """A student under DistributedDataParallel and a teacher, called between the student and its loss."""
    axis, tokens = cp(), tokens_of(12)
    teacher, student = planned(axis, seed=1), DistributedDataParallel(planned(axis))
    if how == "right":
        cp_mesh.sum_gradients(student)
    optimizer = torch.optim.SGD(student.parameters(), 0.1)

    def step() -> None:
        logits = student(tokens)
        with torch.no_grad():
            target = teacher(tokens)
        cp_mesh.cross_entropy(logits + 0 * target, labels_of(tokens, axis), axis).backward()
        optimizer.step()

    return warned(step)


def test_a_teacher_hides_nothing_of_its_student(pool: Any) -> None:
    for said in pool(2).run(together, "averages"):
        assert len(said) == 1 and "cp_mesh.sum_gradients(ddp_model), or multiply the loss by 2" in said[0]
    assert pool(2).run(together, "right") == [[], []]


# Accumulated gradients.


def accumulated(rank: int, factor: float, batches: int, sums: bool) -> list[str]:
    axis = cp()
    model = planned(axis)
    run = DistributedDataParallel(model, process_group=axis.get_group())
    if sums:
        cp_mesh.sum_gradients(run)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)

    def step() -> None:
        for seed in range(batches):
            with run.no_sync() if seed < batches - 1 else contextlib.nullcontext():
                tokens = tokens_of(12, seed)
                (factor * cp_mesh.cross_entropy(run(tokens), labels_of(tokens, axis), axis)).backward()
        if factor * batches == (1 if sums else 2):
            compare_with_one_rank(model, range(batches), 12)
        optimizer.step()

    return warned(step)


@pytest.mark.parametrize(("factor", "batches"), [(1, 2), (0.5, 4), (2, 1)])
@pytest.mark.quick("2-1")
def test_accumulated_gradients_that_are_right(pool: Any, factor: float, batches: int) -> None:
    """The mean over two ranks of all batches' losses, each multiplied by 2 ranks / batches; or their sum."""
    assert pool(2).run(accumulated, factor, batches, False) == [[], []]
    assert pool(2).run(accumulated, 1 / batches, batches, True) == [[], []]


@pytest.mark.parametrize(("factor", "batches"), [(0.5, 2), (1, 4)])
def test_accumulated_gradients_that_are_averaged_over_ranks(pool: Any, factor: float, batches: int) -> None:
    for said in pool(2).run(accumulated, factor, batches, False):
        assert len(said) == 1 and "DistributedDataParallel averages gradients" in said[0]


# Optimizers of one parameter each, which step in the backward.


def in_backward(rank: int, how: str, compiled: bool = False) -> list[str]:
    axis, tokens = cp(), tokens_of(12)
    model = planned(axis)
    run: nn.Module = DistributedDataParallel(model) if "DDP" in how else model
    if "FSDP" in how:
        fully_shard(model, mesh=axis)
        if "averages" not in how:
            cp_mesh.sum_gradients(model)
    if compiled:
        model.compile(backend="aot_eager")
    optimizers = {x: torch.optim.SGD([x], 0.1) for x in model.parameters()}

    def take(x: nn.Parameter) -> None:
        if "by hand" in how:
            dist.all_reduce(x.grad)
        optimizers[x].step()
        x.grad = None

    for x in optimizers:
        x.register_post_accumulate_grad_hook(take)

    def step() -> None:
        logits, labels = run(tokens), labels_of(tokens, axis)
        if "mean" in how:
            F.cross_entropy(logits.flatten(0, 1), labels.flatten()).backward()
        else:
            cp_mesh.cross_entropy(logits, labels, axis).backward()

    return warned(step) + warned(step)


def after_losses_of_others(rank: int) -> list[str]:
    """Warnings of a model whose loss is the mean of its own rows, in a process where `cross_entropy` had no owner."""
    axis, tokens = cp(), tokens_of(12)

    def of_nobody(model: nn.Module) -> None:
        loss = cp_mesh.cross_entropy(logits_of(model, tokens, axis), labels_of(tokens, axis), axis)
        torch.autograd.grad(loss, [*model.parameters()])

    of_nobody(planned(axis))
    model = planned(axis, seed=1)
    F.cross_entropy(model(tokens).flatten(0, 1), labels_of(tokens, axis).flatten()).backward()
    reduce(model)
    return warned(torch.optim.SGD(model.parameters(), 0.1).step)


def test_a_loss_of_nobody_is_not_that_of_a_later_model(pool: Any) -> None:
    for said in pool(2).run(after_losses_of_others):
        assert len(said) == 1 and "is not cp_mesh.cross_entropy" in said[0], said


def with_state_first(rank: int, how: str) -> list[str]:
    """What a resumed run warns of: PyTorch makes the state of an optimizer by a step with learning rate 0."""
    axis, tokens = cp(), tokens_of(12)
    model = planned(axis)
    optimizer = torch.optim.AdamW(model.parameters(), 0.1)

    def step() -> None:
        get_optimizer_state_dict(model, optimizer)
        logits, labels = logits_of(model, tokens, axis), labels_of(tokens, axis)
        if how == "mean":
            F.cross_entropy(logits.flatten(0, 1), labels.flatten()).backward()
        else:
            cp_mesh.cross_entropy(logits, labels, axis).backward()
        reduce(model)
        optimizer.step()

    return warned(step)


def never_stepped(rank: int) -> list[bool]:
    """Whether a model waits for its first step, after each loss."""
    axis, tokens, waiting = cp(), tokens_of(12), []
    model = planned(axis)
    with mock.patch(f"{path_of('sequence.losses')}.MOST", 2):
        for _ in range(4):
            cp_mesh.cross_entropy(logits_of(model, tokens, axis), labels_of(tokens, axis), axis).backward()
            waiting.append(model in trained.WAITING)
    return waiting


def test_a_model_that_no_optimizer_steps_is_given_up(pool: Any) -> None:
    assert pool(2).run(never_stepped) == [[True, True, False, False]] * 2


def test_state_of_an_optimizer_is_no_step(pool: Any) -> None:
    assert pool(2).run(with_state_first, "right") == [[], []]
    for said in pool(2).run(with_state_first, "mean"):
        assert len(said) == 1 and "is not cp_mesh.cross_entropy" in said[0], said


@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=pytest.mark.full)])
@pytest.mark.full
def test_optimizers_that_step_in_the_backward(pool: Any, compiled: bool) -> None:
    for how in ("by hand", "FSDP"):
        assert pool(2).run(in_backward, how, compiled) == [[], []], how
    for how, says in {"by hand, mean": "is not cp_mesh.cross_entropy", "FSDP, averages": "after fully_shard"}.items():
        for said in pool(2).run(in_backward, how, compiled):
            assert len(said) == 1 and says in said[0], said
    for how in ("none", "DDP"):  # whose hooks reduce a gradient after these took it
        for error in raised(pool, 2, in_backward, how, compiled):
            assert UNREDUCED in error.message, error.message


def after_many_steps(rank: int) -> None:
    """A model that waits while another one, of an optimizer a parameter, makes many steps."""
    axis, tokens = cp(), tokens_of(8)
    models = [planned(axis, seed=seed) for seed in (0, 1)]
    optimizers = [torch.optim.SGD([x], 0.1) for x in models[0].parameters()]
    for _ in range(40):
        for x, optimizer in zip(models[0].parameters(), optimizers, strict=True):
            x.grad = torch.zeros_like(x)
            optimizer.step()
    cp_mesh.cross_entropy(models[1](tokens), labels_of(tokens, axis), axis).backward()
    torch.optim.SGD(models[1].parameters(), 0.1).step()


def test_rounds_of_steps_are_counted_and_not_optimizers(pool: Any) -> None:
    for error in raised(pool, 2, after_many_steps):
        assert UNREDUCED in error.message, error.message


# Ranks that do not come.


def on_one_rank_alone(rank: int) -> list[str]:
    """The optimizer of the last rank holds nothing of the model."""
    axis, tokens = cp(3), tokens_of(24)
    model = planned(axis)
    other = nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([other] if rank == 2 else [*model.parameters()], 0.1)

    def step() -> None:
        cp_mesh.cross_entropy(model(tokens), labels_of(tokens, axis), axis).backward()
        reduce(model)
        optimizer.step()

    with mock.patch.object(agreement, "STEP_PATIENCE", timedelta(seconds=0.5)):
        said = warned(step)
    model(tokens_of(30))  # a first call of another length, which all ranks compare
    return said


@pytest.mark.full
def test_ranks_whose_optimizer_holds_nothing_keep_nobody_waiting(pool: Any) -> None:
    assert pool(3).run(on_one_rank_alone, timeout=20.0) == [[]] * 3


def test_all_have_the_same_answers(pool: Any) -> None:
    assert pool(3).run(the_same_answers, timeout=20.0) == [[[0, 1, 2], []]] * 3


def the_same_answers(rank: int) -> list[list[int]]:
    """All come; then one of them comes when the others have decided without it."""
    group, said = dist.new_group(), []
    for topic in ("all", "two"):
        if rank == 2 and topic == "two":
            dist.barrier(group)
        with mock.patch.object(agreement, "STEP_PATIENCE", timedelta(seconds=5 if topic == "all" else 0.2)):
            said.append([*agreement.exchange_in_time(group, topic, {})])
        if rank < 2 and topic == "two":
            dist.barrier(group)
    return said


def under_the_name_of(group: dist.ProcessGroup, store: dist.Store) -> None:
    """A group finds the keys that another one left, as one that is made anew under its name and over its store does."""
    known = dist.distributed_c10d._world.pg_map
    known[group] = known[group][0], dist.PrefixStore("of_both", store)


def left_alone(rank: int, how: str) -> None:
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


@pytest.mark.parametrize("how", ["refused", "waited"])
def test_a_word_that_nobody_came_to_read_is_taken_back(pool: Any, how: str) -> None:
    pool(2).run(left_alone, how)


# Labels of some ranks alone.


def labelled(rank: int, how: str, compiled: bool = False) -> list[str]:
    axis, tokens = cp(3), tokens_of(48)
    model = planned(axis)
    if compiled:
        model.compile(backend="aot_eager")
    whole = {
        "another batch": next_tokens(tokens_of(48, 1) if rank == 1 else tokens),
        "another batch everywhere": next_tokens(tokens_of(48, 1)),
        "masked on one rank": next_tokens(tokens) if rank != 1 else torch.full_like(tokens, -100),
        "few known on one rank": next_tokens(tokens) if rank != 1 else next_tokens(tokens_of(48, 1)).where(
            torch.arange(48) % 24 == 0, -100),
        "half of a teacher": next_tokens(tokens).where(torch.arange(48) % 2 == 0, tokens_of(48, 1)),
        "padding on one rank": torch.zeros_like(tokens) if rank != 1 else next_tokens(tokens),
    }.get(how, next_tokens(tokens))  # fmt: skip
    labels = ShardedSequence(axis).shard({"labels": whole})["labels"]
    if how == "another rank's":
        rows = cp_mesh.ZigZag().positions(48, 3, (rank + 1) % 3)
        labels = whole[:, rows]

    def step() -> None:
        cp_mesh.cross_entropy(model(tokens), labels, axis).backward()
        reduce(model)
        torch.optim.SGD(model.parameters(), 0.1).step()

    return warned(step)


def test_labels_of_another_rank(pool: Any) -> None:
    errors = raised(pool, 3, labelled, "another rank's")
    assert "got the labels of rank 1, on cp rank 0; cut them with" in errors[0].message
    assert "got the labels of rank 0, on cp rank 2; cut them with" in errors[2].message
    assert "labels: expected the next tokens of this rank's rows, got the labels of" in errors[1].message


@pytest.mark.parametrize(
    "how",
    ["right", "another batch everywhere", "masked on one rank", "few known on one rank", "half of a teacher",
     "padding on one rank"],
)  # fmt: skip
def test_labels_that_may_well_be_right(pool: Any, how: str) -> None:
    """Of tuning on answers, of masked or distilled tokens, of padding that counts."""
    assert pool(3).run(labelled, how) == [[]] * 3


def wrong_in_each_replica(rank: int) -> None:
    """One rank of each of two replicas has a label outside of the vocabulary, in a loss over its replica."""
    axis = mesh((2, 2), ("dp", "cp"))["cp"]
    labels = torch.full((1, 4), 100 + rank if rank % 2 else 1)
    cp_mesh.cross_entropy(torch.zeros(1, 4, 8), labels, axis)


def test_refusals_of_two_losses_at_once(pool: Any) -> None:
    for rank, error in enumerate(pool(4).run_expecting_error(wrong_in_each_replica)):
        assert error is not None and f"got {101 + rank // 2 * 2}; pass ignore_index=" in error.message, error.message


# Mistakes of later steps.


def mistaken_later(rank: int, what: str, counts: bool, root: bool) -> int:
    """The step in which a mistake of step 5 is found; a thread as a loader's may shard ahead."""
    axis = cp()
    sequence, model = ShardedSequence(axis), MaskedModel()
    plan: dict[str, Any] = {"": ShardedModel(sequence, positions=None)} if root else {}
    style = ContextParallel(sequence, mask=lambda q, k, v, mask: mask)
    cp_mesh.parallelize(model, axis, plan | {"core": style})
    for step in range(20):
        late = step >= 5
        seed = step + 100 * (rank if late and what == "batch" else 0)
        tokens, ids = tokens_of(20, seed), torch.arange(20) // 7 + (step % 2)
        if late and what == "documents":
            ids[10:] += rank
        labels = tokens if late and what == "labels" else next_tokens(tokens)
        if what == "ahead" and rank == 0:
            thread = threading.Thread(target=sequence.shard, args=({"tokens": tokens_of(20, step)},))
            thread.start()
            thread.join()
        whole = {"labels": labels} if root else {"tokens": tokens, "labels": labels}
        own = {"tokens": tokens} | sequence.shard(whole)
        try:
            count = cp_mesh.training.valid_tokens(own["labels"], axis) if counts else None
            logits = model(own["tokens"], Mask(causal=True, documents=ids))
            cp_mesh.cross_entropy(logits, own["labels"], axis, count=count)
        except (ValueError, RuntimeError) as error:
            assert SAYS[what] in str(error), error
            return step
    return -1


SAYS = {
    "batch": "expected the same tokens and documents on all ranks of a cp group",
    "labels": "the tokens themselves",
}
SAYS |= {"documents": SAYS["batch"]}


@pytest.mark.parametrize("root", [True, False], ids=["root", "no root"])
@pytest.mark.parametrize("counts", [False, True], ids=["mean", "count"])
@pytest.mark.parametrize("what", [*SAYS, "ahead"])
@pytest.mark.quick("mean")
def test_mistakes_of_later_steps(pool: Any, what: str, counts: bool, root: bool) -> None:
    found = pool(2).run(mistaken_later, what, counts, root)
    assert found[0] == found[1] and found[0] in {"ahead": [-1], "labels": range(5, 9)}.get(what, range(5, 7)), found


def stepping(rank: int, how: str) -> list[str]:
    """Warnings of five steps of a model whose gradients are averaged, or summed by hand."""
    axis, tokens, critic = cp(), tokens_of(12), nn.Linear(1, 1)
    sequence, model = ShardedSequence(axis), Model()
    root = ShardedModel(sequence, positions=None, gather_output="gathered" in how)
    run: nn.Module = cp_mesh.parallelize(model, axis, {"": root, "core": ContextParallel(sequence)})
    if "FSDP1" in how:
        each = {"auto_wrap_policy": ModuleWrapPolicy({nn.Linear, nn.Embedding})} if "blocks" in how else {}
        run = FullyShardedDataParallel(model, axis.get_group(), device_id=torch.device("cpu"), **each)
    elif "hand" not in how:
        fully_shard(model, mesh=axis)
    steps = [torch.optim.SGD(x.parameters(), 0.1) for x in (critic, run)]

    def step(number: int) -> None:
        steps[1].zero_grad()
        labels = next_tokens(tokens) if "gathered" in how else labels_of(tokens, axis)
        for _ in range(2 if "counted" in how else 1):
            if "gathered" in how:
                loss = F.cross_entropy(run(tokens).flatten(0, 1), labels.flatten())
            else:
                count = 2 * cp_mesh.training.valid_tokens(labels, axis) if "counted" in how else None
                loss = cp_mesh.cross_entropy(run(tokens), labels, axis, count=count)
            loss.backward()
        if "hand" in how and (number < 3 or "first" not in how):
            reduce(model)
        if "critic" in how:
            critic(torch.ones(1, 1)).sum().backward()
            steps[0].step()
        steps[1].step()

    return warned(lambda: [step(number) for number in range(5)])


@pytest.mark.parametrize("how", ["counted", "a critic", "gathered", "FSDP1", "FSDP1, blocks"])
@pytest.mark.quick(without="counted")
def test_averages_are_told_of_once(pool: Any, how: str) -> None:
    for said in pool(2).run(stepping, how):
        assert len(said) == 1 and "averages gradients over its ranks" in said[0], said


def test_gradients_that_nobody_sums_any_more(pool: Any) -> None:
    assert pool(2).run(stepping, "by hand, a critic") == [[], []]
    for error in raised(pool, 2, stepping, "by hand at first"):
        assert UNREDUCED in error.message, error.message
