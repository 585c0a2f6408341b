"""The gradient contract: parameter gradients on many ranks are those of one rank, in value and in scale."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from dense import make_qkv
from model import Core, DenseCore, DenseScoredCore, Model, ScoredCore, batch, overlapped_plan, tensor_parallel_plan
from ranks import mesh, on_ranks
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.utils.checkpoint import checkpoint

import cp_mesh
from cp_mesh import (
    Checkpointed,
    ContextParallel,
    Contiguous,
    Layout,
    Mask,
    ShardedModel,
    ShardedSequence,
    Striped,
    TiledMLP,
    ZigZag,
)
from cp_mesh.geometry import Balanced

B = 4  # rows of all data-parallel ranks
TOLERANCE = 1e-10  # relative to the largest entry of each parameter's gradient
LARGEST_NORM = 0.01


@dataclass(frozen=True)
class Setup:
    """One way to spread the model; the default is context parallelism alone, summed by hand."""

    dp: int = 1
    cp: int = 1
    tp: int = 1
    layout: Any = ZigZag()  # noqa: RUF009 - frozen
    fsdp: bool = True
    sequence_parallel: bool = False
    overlapped: str = ""  # the mode of cp_mesh's own linears over tp
    documents: bool = False
    S: int = 24
    none_on_first_half: bool = False
    checkpoint: str = "none"
    scores: bool = False
    packed: bool = False  # documents in a layout that is balanced for the batch
    tiles: int = 0  # of each MLP
    reshard: bool = True  # FSDP2 frees the weights between the passes

    @property
    def size(self) -> int:
        return self.dp * self.cp * self.tp

    def __str__(self) -> str:
        flags = ("fsdp", "sequence_parallel", "documents", "none_on_first_half", "scores", "packed")
        words = [f"dp{self.dp}-cp{self.cp}-tp{self.tp}", self.layout.spec(), f"S{self.S}"]
        words += [flag for flag in flags if getattr(self, flag)]
        words += [f"tiles{self.tiles}"] * bool(self.tiles) + ["kept"] * (not self.reshard)
        words += [f"overlapped_{self.overlapped}"] * bool(self.overlapped)
        return "-".join(words + [self.checkpoint] * (self.checkpoint != "none"))


SETUPS = [
    # Layouts, and the library alone: gradients of replicated parameters are partial sums that the trainer adds up.
    *(Setup(cp=4, fsdp=False, layout=layout) for layout in (Contiguous(), ZigZag(), Striped())),
    *(Setup(cp=3, layout=layout, documents=True) for layout in (Contiguous(), ZigZag(), Striped())),
    # Padding, a rank without a valid label, data parallel rows with unlike label counts.
    Setup(cp=3, S=22, documents=True),
    Setup(cp=2, layout=Contiguous(), none_on_first_half=True),
    Setup(dp=2, cp=2, documents=True, S=22),
    Setup(dp=4, cp=1, documents=True),
    # Tensor parallelism without, with FSDP, and with the sequence between the matrices split over tp too.
    Setup(tp=2),
    Setup(cp=2, tp=2, fsdp=False),
    Setup(cp=2, tp=2, layout=Striped(), documents=True),
    Setup(dp=2, tp=2),
    Setup(cp=2, tp=2, fsdp=False, sequence_parallel=True),
    Setup(cp=2, tp=2, sequence_parallel=True, documents=True, S=22),
    Setup(dp=2, cp=2, tp=2, sequence_parallel=True, documents=True),
    # The same by cp_mesh's own linears, embedding and loss over the vocabulary.
    Setup(tp=2, overlapped="reduce_scatter"),
    Setup(cp=2, tp=2, overlapped="all_reduce", documents=True),
    Setup(cp=2, tp=2, overlapped="reduce_scatter", fsdp=False),
    Setup(dp=2, cp=2, tp=2, overlapped="reduce_scatter", documents=True, S=22),
    Setup(cp=2, tp=2, overlapped="reduce_scatter", checkpoint="full", documents=True),
    Setup(cp=2, tp=2, overlapped="reduce_scatter", checkpoint="selective", S=22),
    # Recomputation.
    Setup(cp=2, tp=2, checkpoint="full", documents=True),
    Setup(cp=2, tp=2, checkpoint="selective"),
    # Every batch of a dp rank in a layout of its own; padding, recomputation.
    Setup(cp=3, S=21, documents=True, packed=True, fsdp=False),
    Setup(dp=2, cp=2, documents=True, packed=True, checkpoint="full"),
    # Parameters inside the attention: what a rank finds of their gradients is a sum over its own queries.
    Setup(cp=4, fsdp=False, scores=True),
    Setup(dp=2, cp=2, documents=True, scores=True),
    Setup(cp=2, tp=2, layout=Striped(), S=22, checkpoint="full", scores=True),
    # MLPs in tiles, also of unequal numbers of rows.
    Setup(cp=3, fsdp=False, tiles=3),
    Setup(dp=2, cp=2, tiles=4, S=22),
    Setup(cp=2, tiles=5, reshard=False, checkpoint="full"),
    Setup(cp=2, tp=2, tiles=4, checkpoint="selective"),
    Setup(cp=2, tp=2, tiles=3, overlapped="all_reduce"),
    # Blocks whose inputs wait in host memory.
    Setup(cp=3, fsdp=False, checkpoint="offloaded"),
    Setup(dp=2, cp=2, documents=True, packed=True, checkpoint="offloaded"),
    Setup(cp=2, tp=2, sequence_parallel=True, S=22, checkpoint="offloaded_all"),
    Setup(cp=2, tp=2, overlapped="reduce_scatter", checkpoint="offloaded", reshard=False),
    Setup(dp=2, cp=2, documents=True, scores=True, checkpoint="offloaded", tiles=2),
]

QUICK = (
    Setup(cp=3, S=22, documents=True),
    Setup(cp=2, tp=2, sequence_parallel=True, documents=True, S=22),
    Setup(cp=2, tp=2, overlapped="reduce_scatter", checkpoint="selective", S=22),
    Setup(dp=2, cp=2, documents=True, packed=True, checkpoint="full"),
    Setup(dp=2, cp=2, documents=True, scores=True),
)
"""Those of the quick form."""


def make_batch(setup: Setup) -> dict[str, Tensor]:
    whole = batch(B, setup.S)
    if setup.none_on_first_half:
        whole["labels"][:, : setup.S // 2] = -100
    if not setup.documents:
        del whole["documents"], whole["positions"]
    return whole


@dataclass(frozen=True)
class Packed:
    """What travels through the model in the documents' place: FSDP2 leaves it where it is."""

    mask: Mask
    layout: Layout


def mask(q: Tensor, k: Tensor, v: Tensor, documents: Any = None) -> Mask:
    return documents.mask if isinstance(documents, Packed) else Mask(documents=documents)


def layout_of_core(q: Tensor, k: Tensor, v: Tensor, documents: Packed) -> Layout:
    return documents.layout


def layout_of_model(documents: Packed, **others: Any) -> Layout:
    return documents.layout


def local_scores(core: ScoredCore, *arguments: Tensor | None) -> dict[str, Any]:
    """Of this rank's heads, as q is."""
    options = core.scores().items()
    return {name: value.to_local() if isinstance(value, DTensor) else value for name, value in options}


def spread(setup: Setup, axes: DeviceMesh, sequence: ShardedSequence) -> nn.Module:
    """The model over the mesh, in the order of the docs: tp, cp, checkpointing, FSDP."""
    model = Model(ScoredCore if setup.scores else Core)
    if setup.tp > 1:
        mode, recompute = setup.overlapped, setup.overlapped == "reduce_scatter"
        plan = overlapped_plan(mode, recompute) if mode else tensor_parallel_plan(setup.sequence_parallel)
        cp_mesh.parallelize(model, axes["tp"], plan)
        for layer in model.layers:
            for name, parameter in list(layer.core.named_parameters()):
                heads = distribute_tensor(parameter.detach(), axes["tp"], [Shard(0)])
                layer.core.register_parameter(name, nn.Parameter(heads))
    scores, layout = local_scores if setup.scores else None, layout_of_core if setup.packed else None
    core = ContextParallel(sequence, mask=mask, scores=scores, layout=layout)
    root = ShardedModel(sequence, layout=layout_of_model if setup.packed else None)
    styles = {"": root, "layers.*.core": core}
    if setup.tiles:
        styles["layers.*.ff"] = TiledMLP(tiles=setup.tiles)
    if setup.checkpoint.startswith("offloaded"):
        styles["layers.*"] = Checkpointed(offload=True, keep_attention="all" not in setup.checkpoint)
    cp_mesh.parallelize(model, axes["cp"], styles)
    if setup.checkpoint in ("full", "selective"):
        options = {"context_fn": cp_mesh.training.checkpoint_context_fn} if setup.checkpoint == "selective" else {}
        for layer in model.layers:
            layer.forward = recomputing(layer.forward, options)
    if setup.fsdp:
        for module in (*model.layers, model):
            fully_shard(module, mesh=data_axis(axes), reshard_after_forward=None if setup.reshard else False)
        cp_mesh.sum_gradients(model)
    return model


def recomputing(forward: Any, options: dict[str, Any]) -> Any:
    return lambda *args: checkpoint(forward, *args, use_reentrant=False, **options)


@functools.cache
def data_axis(axes: DeviceMesh) -> DeviceMesh:
    """dp x cp in one: the ranks that hold different tokens."""
    return axes["dp", "cp"]._flatten("dp_cp")


def whole(x: Tensor) -> Tensor:
    return x.full_tensor() if isinstance(x, DTensor) else x


def gradients(rank: int, setup: Setup) -> dict[str, Any]:
    """One step: the loss of all ranks, whole gradients before and after clipping, and the norm."""
    axes = mesh((setup.dp, setup.cp, setup.tp), ("dp", "cp", "tp"))
    data = data_axis(axes)
    sequence = ShardedSequence(axes["cp"], setup.layout, length=setup.S)
    model = spread(setup, axes, sequence)
    rows = slice(axes.get_local_rank("dp") * B // setup.dp, (axes.get_local_rank("dp") + 1) * B // setup.dp)
    arguments = {name: tensor[rows] for name, tensor in make_batch(setup).items()}
    if setup.packed:
        given = Mask(documents=arguments["documents"])
        sequence = sequence.balanced(given)
        assert isinstance(sequence.layout, Balanced) and sequence.seq_len == -(-setup.S // setup.cp) * setup.cp
        arguments["documents"] = Packed(given, sequence.layout)
    labels = sequence.shard({"labels": arguments.pop("labels")})["labels"]
    loss = cp_mesh.cross_entropy(model(**arguments), labels, data)
    loss.backward()
    for parameter in model.parameters():
        if not setup.fsdp:
            if isinstance(parameter.grad, DTensor):  # PyTorch 2.11 does not clip partial sums
                parameter.grad = parameter.grad.redistribute(placements=parameter.placements)
            grad = parameter.grad.to_local() if isinstance(parameter.grad, DTensor) else parameter.grad
            dist.all_reduce(grad, group=data.get_group())
    before = {name: whole(parameter.grad).clone() for name, parameter in model.named_parameters()}
    norm = cp_mesh.clip_grad_norm(model.parameters(), LARGEST_NORM)
    after = {name: whole(parameter.grad) for name, parameter in model.named_parameters()}
    loss = loss.detach()
    dist.all_reduce(loss, group=data.get_group())
    return {"loss": loss, "before": before, "after": after, "norm": norm}


def gradients_of_one(setup: Setup) -> dict[str, Any]:
    """The same step of one rank, which imports nothing of cp_mesh."""
    model, arguments = Model(DenseScoredCore if setup.scores else DenseCore), make_batch(setup)
    labels = arguments.pop("labels")
    logits = model(**{"positions": torch.arange(setup.S)} | arguments)
    loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten())
    loss.backward()
    before = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}
    norm = nn.utils.clip_grad_norm_(model.parameters(), LARGEST_NORM)
    after = {name: parameter.grad for name, parameter in model.named_parameters()}
    return {"loss": loss.detach(), "before": before, "after": after, "norm": norm}


@pytest.mark.parametrize(
    "setup", [pytest.param(setup, marks=[] if setup in QUICK else pytest.mark.full) for setup in SETUPS], ids=str
)
@pytest.mark.quick("dp1-cp3-tp1-zigzag-S22-fsdp-documents", "scores")
@on_ranks("setup.size")
def test_gradients_are_those_of_one_rank(rank: int, setup: Setup) -> None:
    want, got = gradients_of_one(setup), gradients(rank, setup)
    assert want["norm"] > 10 * LARGEST_NORM  # else clipping would leave the gradients as they are
    torch.testing.assert_close(got["loss"], want["loss"], rtol=TOLERANCE, atol=0.0)
    torch.testing.assert_close(got["norm"], want["norm"], rtol=TOLERANCE, atol=0.0)
    for when in ("before", "after"):
        assert list(got[when]) == list(want[when])
        for name, grad in got[when].items():
            error = (grad - want[when][name]).abs().max() / want[when][name].abs().max()
            assert error <= TOLERANCE, f"gradient of {name} {when} clipping is off by {error:.1e}"


class Undefined(torch.autograd.Function):
    """Passes no gradient on: that of its input is undefined, not zero."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        return None


@on_ranks(2, timeout=20.0)
def test_a_rank_without_gradient_serves_the_others(rank: int) -> None:
    """dk of this rank, and as it would be if rank 0's gradient of out were zero."""
    rows, found = cp_mesh.ZigZag().positions(16, 2, rank), []
    for undefined in (True, False):
        q, k, v, dout = (x[:, :, rows].clone() for x in make_qkv(1, 2, 1, 16, 4))
        leaves = [x.requires_grad_() for x in (q, k, v)]
        out = cp_mesh.attention(*leaves, mesh=mesh((2,), ("cp",)))
        if rank == 0:
            out = Undefined.apply(out) if undefined else out * 0.0
        (out * dout).sum().backward()
        found.append(k.grad)
    got, want = tuple(found)
    assert got is not None and torch.equal(got, want) and (rank == 1 or bool((got != 0).any()))
