"""Mistakes around attention that were silent once: each is caught with a root and without, eager and compiled, under
FSDP2, under DistributedDataParallel and with gradients summed by hand; or `docs/guard.md` says that it is not."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from ranks import mesh
from test_guard import C, Core, D, H, Masked, Model, next_tokens, tokens_of
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import cp_mesh
from cp_mesh import ContextParallel, Mask, ShardedModel, ShardedSequence, Striped

S = 16
UNREDUCED = "equal on all ranks before the optimizer steps"


class Trained(Model):
    """Takes positions, a mask, a tensor mask and labels where the mistake is about them."""

    def __init__(self, mistake: str) -> None:
        super().__init__()
        self.core, self.other, self.table = Masked(), Core(), nn.Embedding(64, C)
        self.mistake = mistake

    def forward(self, tokens: Tensor, extra: Any = None) -> Tensor:
        return self.attend(self.embedding(tokens), extra)

    def attend(self, x: Tensor, extra: Any) -> Tensor:
        x = x.unflatten(-1, (H, D)).transpose(1, 2)
        read = "Mask" in self.mistake or "tensor mask" in self.mistake
        x = x + (self.core(x, x, x, extra) if read else self.core(x, x, x))
        return self.head((x + self.other(x, x, x)).transpose(1, 2).flatten(-2))


class Positioned(Trained):
    def forward(self, tokens: Tensor, position_ids: Tensor | None = None) -> Tensor:  # type: ignore[override]
        if position_ids is None:
            position_ids = torch.arange(tokens.shape[1])
        return self.attend(self.embedding(tokens) + self.table(position_ids), None)


class Labelled(Trained):
    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:  # type: ignore[override]
        return F.cross_entropy(super().forward(tokens).flatten(0, 1), labels.flatten())


class Mistake:
    """What each rank says; which set-ups it is of, and in which of these nobody finds it."""

    def __init__(
        self,
        *says: str,
        ranks: int = 2,
        of: Callable[..., bool] = lambda root, compiled, by: True,
        not_found: Callable[..., bool] = lambda root, compiled, by: False,
    ) -> None:
        self.says, self.ranks, self.of, self.not_found = says, ranks, of, not_found


def rootless_compiled(root: bool, compiled: bool, by: str) -> bool:
    return compiled and not root


MISTAKES = {
    "a layer left out": Mistake("every self-attention in a ContextParallel module"),
    "a window": Mistake("the module's window of 4 keys"),
    "positions=None": Mistake("a source of the forward's position_ids", of=lambda root, compiled, by: root),
    "positions left out": Mistake("call leaves them out", of=lambda root, *_: not root, not_found=rootless_compiled),
    "positions of the shard": Mistake("position_ids: expected", not_found=rootless_compiled),
    "the mean of rows": Mistake("a loss that is not cp_mesh.cross_entropy"),
    "a gathered output": Mistake("of the whole sequence, on every cp rank"),
    "a loss over cp alone": Mistake(
        "a mean over the ranks that", ranks=4, not_found=lambda root, compiled, by: by == "hand"
    ),
    "gradients over cp alone": Mistake("a sum over the ranks of cross_entropy", UNREDUCED, ranks=4),
    "averages": Mistake("averages gradients", of=lambda root, compiled, by: by != "hand"),
    "no reduction": Mistake(UNREDUCED, of=lambda root, compiled, by: by == "hand"),
    "other weights": Mistake("whose gradients are summed", of=lambda root, compiled, by: by == "hand"),
    "labels by chunk": Mistake("labels of contiguous rows"),
    "labels shifted after": Mistake("next tokens within this rank's shard"),
    "labels of another layout": Mistake("labels of striped rows"),
    "labels in the model": Mistake("not cp_mesh.cross_entropy"),
    "other batches": Mistake("give every rank of a cp group the same batch", "those of one batch on every rank"),
    "whole inputs": Mistake(
        "this rank's rows of the tokens", of=lambda root, *_: not root, not_found=rootless_compiled
    ),
    "sharded twice": Mistake("got rows that shard has returned", "the same tokens on every cp rank"),
    "other lengths": Mistake("on every cp rank"),
    "an unread Mask": Mistake("a style that reads the Mask", "a core that reads extra"),
    # a rank that refuses while it is traced leaves no word: the others wait as long as their group
    "a tensor mask on one rank": Mistake(
        "a tensor attn_mask cannot be read", of=lambda root, compiled, by: not compiled
    ),
}


def attempt(rank: int, mistake: str, root: bool, compiled: bool, by: str) -> str:
    """What two steps warned of and raised."""
    grid = mesh((2, 2), ("dp", "cp")) if MISTAKES[mistake].ranks == 4 else mesh((1, 2), ("dp", "cp"))
    axis = grid["cp"]
    data = grid._get_root_mesh()["dp", "cp"]._flatten("mistakes")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            make(rank, mistake, root, compiled, by, grid, axis, data)
            raised = ""
        except Exception as error:
            raised = str(error).replace("\\'", "'")
    return raised + "".join(text for x in caught if (text := str(x.message)).startswith("cp_mesh:"))


def make(rank: int, mistake: str, root: bool, compiled: bool, by: str, grid: Any, axis: Any, data: Any) -> None:
    sequence = ShardedSequence(axis)
    kinds = {"positions": Positioned, "labels in": Labelled}
    model = next((kind for word, kind in kinds.items() if mistake.startswith(word)), Trained)(mistake)
    if mistake == "a tensor mask on one rank":
        model.core = Core()
    if mistake == "other weights":
        model.head.weight.data += rank
    if mistake == "a window":
        model.core.sliding_window = 4
    plan: dict[str, Any] = {}
    for name in ("core", "other"):
        plan[name] = ContextParallel(sequence)
    if mistake == "a layer left out":
        del plan["other"]
    if root:
        inputs = ("tokens", "labels") if mistake == "labels in the model" else ("tokens",)
        positions = "position_ids" if mistake == "positions of the shard" else None
        gathers = mistake == "a gathered output"
        plan[""] = ShardedModel(sequence, inputs=inputs, positions=positions, gather_output=gathers)
    cp_mesh.parallelize(model, axis, plan)
    run: nn.Module = model
    reduced = axis if mistake == "gradients over cp alone" else data
    if by == "FSDP2":
        fully_shard(model, mesh=reduced)
    elif by == "DDP":
        run = DistributedDataParallel(model, process_group=reduced.get_group(), find_unused_parameters=True)
    if by != "hand" and mistake != "averages":
        cp_mesh.sum_gradients(run)
    if compiled:
        model.compile(backend="eager")
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for _ in range(2):
        seed = rank if mistake == "other batches" else grid.get_local_rank("dp")
        step(rank, mistake, root, run, sequence, axis if mistake == "a loss over cp alone" else data, seed)
        if by == "hand" and mistake != "no reduction":
            for x in model.parameters():
                if x.grad is not None:
                    dist.all_reduce(x.grad, group=reduced.get_group())
        optimizer.step()
        optimizer.zero_grad()


def step(rank: int, mistake: str, root: bool, run: nn.Module, sequence: ShardedSequence, data: Any, seed: int) -> None:
    tokens = tokens_of(2 * S if mistake == "other lengths" and rank else S, seed)
    whole, rows = next_tokens(tokens), tokens.shape[1] // 2
    sharded = sequence.shard({"tokens": tokens})["tokens"]
    labels = sequence.shard({"labels": whole})["labels"]
    given: Tensor = tokens if root or mistake == "whole inputs" else sharded
    if mistake == "sharded twice":
        given = sharded if root else sequence.shard({"tokens": sharded})["tokens"]
    extra: dict[str, Any] = {
        "positions of the shard": {"position_ids": torch.arange(rows)},
        "an unread Mask": {"extra": Mask(window=(3, 0))},
        "a tensor mask on one rank": {"extra": torch.ones(rows, rows).bool() if rank == 0 else None},
    }.get(mistake, {})
    if mistake == "labels in the model":
        run(given, labels=whole if root else labels).backward()
        return
    logits = run(given, **extra)
    if mistake == "a gathered output":
        logits, labels = logits if root else sequence.gather(logits), whole
    elif mistake == "labels by chunk":
        labels = whole.chunk(2, dim=1)[rank]
    elif mistake == "labels shifted after":
        labels = torch.cat([sharded[:, 1:], torch.full_like(sharded[:, :1], -100)], 1)
    elif mistake == "labels of another layout":
        labels = ShardedSequence(sequence.mesh, Striped()).shard({"labels": whole})["labels"]
    if mistake == "the mean of rows":
        F.cross_entropy(logits.flatten(0, 1), labels.flatten()).backward()
    else:
        cp_mesh.cross_entropy(logits, labels, data).backward()


def setups(number: int) -> list[tuple[bool, bool, str]]:
    """Three for each mistake, (root, compiled, by), other ones for the next; one of them is compiled."""
    found = [((number + i) % 2 == 0, i == number % 3, by) for i, by in enumerate(("FSDP2", "DDP", "hand"))]
    either = [(root, compiled, by) for _, compiled, by in found for root in (True, False)]
    of = list(MISTAKES.values())[number].of
    return [x for x in found if of(*x)] if any(of(*x) for x in found) else [x for x in either if of(*x)]


@pytest.mark.more("runs")
@pytest.mark.parametrize("number", range(len(MISTAKES)), ids=[*MISTAKES])
@pytest.mark.quick(without="other weights")
def test_what_was_silent_is_found(pool: Any, number: int, full: bool) -> None:
    mistake, told = list(MISTAKES.items())[number]
    rows = sorted(setups(number), key=lambda x: x[1])
    for setup in rows if full else rows[:1]:
        for said in pool(told.ranks).run(attempt, mistake, *setup):
            assert any(word in said for word in told.says) != told.not_found(*setup), f"{setup}: {said}"


def test_set_ups_hold_all_pairs() -> None:
    found = {(*x, name) for i, name in enumerate(MISTAKES) for x in setups(i)}
    for pick in ((0, 1), (0, 2), (1, 2)):
        assert len({tuple(x[i] for i in pick) for x in found}) == (4 if 2 not in pick else 6)
    assert all({x[2] for x in found if x[3] == name} for name in MISTAKES)
