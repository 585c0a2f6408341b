"""One sequence of the batches of all ranks: a document takes as many ranks as it needs, FSDP2 shards over all."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from model import C, Core, DenseCore, Model, V, overlapped_plan
from ranks import mesh
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import cp_mesh
from cp_mesh import ContextParallel, Contiguous, Mask, ShardedModel, ShardedSequence, batch_mask
from cp_mesh.training import valid_tokens

EXPERTS, AUXILIARY = 4, 0.01
TOLERANCE = 1e-10  # relative to the largest entry of each parameter's gradient


@dataclass(frozen=True)
class Case:
    """A step: micro-batches of rows of documents, by their lengths. ``padding``: tokens at the end of each row."""

    batches: tuple[tuple[tuple[int, ...], ...], ...]
    axes: str = "one"
    padding: int = 0
    pad: bool = True
    tp: int = 1


LONG, SHORT = ((36,), (12, 6, 9, 7, 2)), ((16,), (4, 12), (8, 8), (3, 3, 10))
CASES = {
    "one axis": Case((LONG,)),
    "dp 2 x cp 2 as one": Case((LONG,), "dp and cp"),
    "dp 4": Case((SHORT,)),
    "accumulation": Case((LONG, SHORT)),
    "fewer tokens than ranks": Case((((3,),),), pad=False),
    "a rank with padding only": Case((((3,),),)),
    "padding in rows": Case((((11, 4), (15,)),), padding=3),
    "tp": Case((LONG,), tp=2),
}


class Routed(nn.Module):
    """The two best experts of each token, and the loss that balances them: a product of means over all tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(C, EXPERTS, bias=False)
        self.experts = nn.ModuleList(nn.Linear(C, C) for _ in range(EXPERTS))
        self.total = lambda x: x  # over all ranks

    def forward(self, x: Tensor) -> Tensor:
        weights = self.router(x).softmax(-1)
        hits = torch.zeros_like(weights).scatter(-1, weights.topk(2).indices, 1.0)
        sums = [self.total((of * self.kept).sum((0, 1))) for of in (hits, weights)]
        self.balancing = EXPERTS * (sums[0] * sums[1]).sum() / self.total(self.kept.sum()) ** 2
        return sum((weights * hits)[..., i, None] * expert(x) for i, expert in enumerate(self.experts))


def model_of(core: type[nn.Module], routed: bool) -> Model:
    model = Model(core)
    for layer in model.layers if routed else ():
        layer.ff = Routed().double()
    generator = torch.Generator().manual_seed(1)
    for parameter in model.layers.parameters():
        nn.init.normal_(parameter, 0.5 * (parameter.ndim == 1), 0.4, generator=generator)
    return model


def batch_of(rows: tuple[tuple[int, ...], ...], padding: int, seed: int) -> dict[str, Tensor]:
    """Rows of equal length; the last tokens of a document have no label, nor has a third of the others."""
    documents = torch.stack([torch.repeat_interleave(torch.arange(len(row)), torch.tensor(row)) for row in rows])
    documents = F.pad(documents, (0, padding), value=-1)
    generator = torch.Generator().manual_seed(seed)
    tokens, labels = torch.randint(V, (2, *documents.shape), generator=generator)
    last = F.pad(documents.diff(dim=1) != 0, (0, 1), value=True)
    labels[last | (documents < 0) | (torch.rand(labels.shape, generator=generator) < 0.3)] = -100
    return {"tokens": tokens, "labels": labels, "documents": documents}


def spread(case: Case, axes: DeviceMesh, sequence: ShardedSequence) -> nn.Module:
    model = model_of(Core, routed=case.tp == 1)
    if case.tp > 1:
        cp_mesh.parallelize(model, axes["tp"], overlapped_plan("all_reduce"))
    plan = {
        "": ShardedModel(sequence),
        "layers.*.core": ContextParallel(sequence, mask=lambda q, k, v, mask: mask),
    }
    cp_mesh.parallelize(model, sequence.mesh, plan)
    for module in (*model.layers, model):
        fully_shard(module, mesh=sequence.mesh)
    cp_mesh.sum_gradients(model)
    return model


def on_ranks(rank: int, case: Case) -> dict[str, Any]:
    """Loss and whole gradients of a step; rows, valid tokens, and documents that lie on one rank and on several."""
    if case.axes == "dp and cp":
        axes = mesh((2, 2), ("dp", "cp"))
        everyone = axes["dp", "cp"]._flatten("everyone")
    else:
        axes = mesh((4, case.tp), ("cp", "tp"))
        everyone = axes["cp"]
    given = [batch_of(rows, case.padding, seed) for seed, rows in enumerate(case.batches)]
    lengths = {x["tokens"].numel() for x in given}  # those of several batches are multiples of the ranks
    sequence = ShardedSequence(everyone, "auto", length=min(lengths) if len(lengths) == 1 else None, pad=case.pad)
    model = spread(case, axes, sequence)
    batches, held = [], list[list[int]]()
    for x in given:
        positions, kept = cp_mesh.document_positions(x["documents"]), (x["documents"] >= 0).long()
        tokens, labels, positions, kept = (x.flatten()[None] for x in (x["tokens"], x["labels"], positions, kept))
        mask = batch_mask(position_ids=positions, attention_mask=kept)
        of_batch = sequence.for_batch(tokens.shape[1], mask)
        local = of_batch.shard({"labels": labels, "attention_mask": kept})
        batches.append((tokens, positions, mask, local))
        held.append(of_batch.positions().tolist())
    count = sum(valid_tokens(local["labels"], everyone) for *_, local in batches)
    losses, routers = [], [layer.ff for layer in model.layers if case.tp == 1]
    for i, (tokens, positions, mask, local) in enumerate(batches):
        for router in routers:
            router.kept, router.total = local["attention_mask"][..., None], sequence.all_reduce
        model.set_requires_gradient_sync(i == len(batches) - 1)
        logits = model(tokens, positions, mask)
        loss = cp_mesh.cross_entropy(logits, local["labels"], everyone, count=count)
        for router in routers:
            loss = loss + AUXILIARY * router.balancing / len(batches) / everyone.size()
        loss.backward()
        losses.append(loss.detach())
    loss = sum(losses)
    dist.all_reduce(loss, group=everyone.get_group())
    gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    return {
        "loss": loss,
        "gradients": {name: x.full_tensor() if isinstance(x, DTensor) else x for name, x in gradients.items()},
        "positions": held[0],
        "valid": [int((local["labels"] != -100).sum()) for *_, local in batches],
    }


def on_one(case: Case) -> dict[str, Any]:
    """The same step of one process, rows beside each other, without cp_mesh."""
    model = model_of(DenseCore, routed=case.tp == 1)
    batches = [batch_of(rows, case.padding, seed) for seed, rows in enumerate(case.batches)]
    count, total = sum(int((given["labels"] != -100).sum()) for given in batches), torch.zeros(())
    for given in batches:
        kept = (given["documents"] >= 0)[..., None]
        positions = torch.zeros_like(given["documents"])
        for row, ids in enumerate(given["documents"]):
            for at in range(1, len(ids)):
                positions[row, at] = positions[row, at - 1] + 1 if ids[at] == ids[at - 1] else 0
        for layer in model.layers:
            layer.ff.kept = kept
        logits = model(given["tokens"], positions, given["documents"])
        loss = F.cross_entropy(logits.flatten(0, 1), given["labels"].flatten(), reduction="sum") / count
        for layer in model.layers if case.tp == 1 else ():
            loss = loss + AUXILIARY * layer.ff.balancing / len(batches)
        loss.backward()
        total = total + loss.detach()
    return {"loss": total, "gradients": {name: parameter.grad for name, parameter in model.named_parameters()}}


@pytest.mark.parametrize("name", CASES)
def test_a_step_is_that_of_one_process(pool: Any, name: str) -> None:
    case = CASES[name]
    want, found = on_one(case), pool(4 * case.tp).run(on_ranks, case)
    assert want["loss"] > 0 and len({tuple(got["valid"]) for got in found}) > 1  # unequal numbers of valid tokens
    assert name != "fewer tokens than ranks" or [] in [got["positions"] for got in found]
    if case.batches[0] == LONG:  # the document that is longer than a shard is cut, the others are not
        shards = {frozenset(got["positions"]) for got in found}  # ranks of a tp group hold the same
        ends = torch.tensor([0, *(length for row in LONG for length in row)]).cumsum(0).tolist()
        counts = [sum(not shard.isdisjoint(range(*edges)) for shard in shards) for edges in pairwise(ends)]
        assert counts[0] > 1 and set(counts[1:]) == {1}
    for rank, got in enumerate(found):
        torch.testing.assert_close(got["loss"], want["loss"], rtol=TOLERANCE, atol=0.0)
        for key, gradient in want["gradients"].items():
            error, largest = (got["gradients"][key] - gradient).abs().max(), gradient.abs().max()
            assert error <= TOLERANCE * largest, (
                f"rank {rank}: gradient of {key} is off by {error:.1e} of {largest:.1e}"
            )


def step_with_labels_at_ends(rank: int, compiled: bool) -> float:
    """A first loss where each rank holds a document, whose last label is not a token of this batch's next document."""
    axis = mesh((3,), ("cp",))
    sequence, tokens = ShardedSequence(axis, Contiguous()), torch.arange(2 * 312).view(2, 312) ** 2 % V
    labels = tokens.roll(-1, 1)
    labels[:, 103::104] = (labels[:, 103::104] + 1) % V
    core = ContextParallel(sequence, mask=lambda q, k, v, mask: mask)
    model = cp_mesh.parallelize(Model(), axis, {"": ShardedModel(sequence), "layers.*.core": core})
    for layer in model.layers if compiled else ():
        layer.compile(backend="aot_eager", fullgraph=True)
    logits = model(tokens, documents=Mask(documents=torch.arange(312) // 104))
    return float(cp_mesh.cross_entropy(logits, sequence.shard({"labels": labels})["labels"], axis))


@pytest.mark.parametrize("compiled", [False, True])
def test_labels_at_the_ends_of_documents_may_be_any(pool: Any, compiled: bool) -> None:
    assert min(pool(3).run(step_with_labels_at_ends, compiled)) > 0
