"""`cp_mesh.verify_model` finds the bugs that this field is known for, and passes what is right.

The catalogue is the mistakes that users of cp_mesh made without an error, and those that other libraries shipped. Each
is planted in a small model, plan, trainer or batch, by what a person would have written.
"""

from __future__ import annotations

import functools
import json
import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import test_gradients
import torch
import torch.distributed as dist
import torch.nn.functional as F
from dense import dense_attention, dense_mask
from inside import Finding, ModelReport
from model import Block, Core, D, DenseCore, DenseScoredCore, K, Model, ScoredCore, V, batch
from ranks import mesh
from scripts import run_script
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import cp_mesh
from cp_mesh import (
    ArgumentError,
    ContextParallel,
    Mask,
    ShardedModel,
    ShardedSequence,
    Striped,
    ZigZag,
    cross_entropy,
    mixers,
    parallelize,
    sum_gradients,
    verify_model,
)
from cp_mesh.tools import VerificationError

S, B = 24, 2
Kwargs = dict[str, Any]


# --- models


class Positioned(Model):
    """With positions that may be left out, as in most models."""

    def forward(self, tokens: Tensor, positions: Tensor | None = None, documents: Tensor | None = None) -> Tensor:
        positions = torch.arange(tokens.shape[1]) if positions is None else positions
        return super().forward(tokens, positions, documents)


class WindowCore(nn.Module):
    """The oracle with a window: 4 tokens, itself included."""

    window = 3

    def forward(self, q: Tensor, k: Tensor, v: Tensor, documents: Tensor | None = None) -> Tensor:
        return dense_attention(q, k, v, dense_mask(q.shape[2], window=(self.window, 0)))[0]


class WideCore(WindowCore):
    window = 7


class OwnWindow(nn.Module):
    """As in transformers: a window of 16 tokens is a mask of local shapes, and none at all where they fit into it."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, documents: Tensor | None = None) -> Tensor:
        if q.shape[2] <= 16:
            return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        seen = dense_mask(q.shape[2], window=(15, 0))
        return F.scaled_dot_product_attention(q, k, v, attn_mask=seen, enable_gqa=True)


def windows() -> nn.Module:
    """A model whose layers have windows of 4 and 8 tokens."""
    model = Positioned(WindowCore)
    model.layers[1].core = WideCore()
    return model


class Changed(torch.autograd.Function):
    """The same value; another gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, change: Callable[[Tensor], Tensor]) -> Tensor:
        ctx.change = change
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return ctx.change(grad), None


class WrongBackward(Core):
    """Attention whose gradient of v is changed."""

    change: Callable[[Tensor], Tensor]

    def forward(self, q: Tensor, k: Tensor, v: Tensor, documents: Tensor | None = None) -> Tensor:
        return super().forward(q, k, Changed.apply(v, type(self).change), documents)


class StaleKV(WrongBackward):
    change = staticmethod(lambda grad: grad.roll(1, 2))


class HalfOfV(WrongBackward):
    change = staticmethod(lambda grad: grad * 0.9)


class NaNOfV(WrongBackward):
    change = staticmethod(lambda grad: grad * float("nan"))


class LastIgnored(Core):
    """Nothing for the last row of a shard."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, documents: Tensor | None = None) -> Tensor:
        out = super().forward(q, k, v, documents)
        return torch.cat([out[:, :, :-1], torch.zeros_like(out[:, :, -1:])], 2)


class FlexCore(nn.Module):
    """Calls `cp_mesh.flex_attention` with a bias of the key; ``rows``: counted in rows of what the core is given."""

    def __init__(self, rows: bool = False) -> None:
        super().__init__()
        self.rows, self.bias = rows, nn.Parameter(torch.empty(S))

    def forward(self, q: Tensor, k: Tensor, v: Tensor, documents: Tensor | None = None) -> Tensor:
        def score_mod(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
            return score + self.bias[kv_idx % q.shape[2] if self.rows else kv_idx]

        def causal(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
            return q_idx >= kv_idx

        mask = cp_mesh.flex.create_block_mask(causal, None, None, S, S)
        out: Tensor = cp_mesh.flex_attention(q, k, v, score_mod, mask, enable_gqa=True)
        return out


class LinearCore(nn.Module):
    """Linear attention, which no plan knows: a running sum over the rows that it is given."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, documents: Tensor | None = None) -> Tensor:
        k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
        return q * (k * v).cumsum(2)


def with_linear_layer() -> nn.Module:
    model = Positioned(Core)
    model.layers[0].core = LinearCore()
    return model


class Recurrent(nn.Module):
    """A causal convolution of v and a gated delta rule, as a user calls them: over ``sequence``, or on one rank.

    Attributes:
        sequence: set on the ranks.
        told, whole: without them documents, or rows of other ranks, are forgotten where there is a sequence.
    """

    sequence: ShardedSequence | None = None

    def __init__(self, told: bool = True, whole: bool = True) -> None:
        super().__init__()
        self.told, self.whole = told, whole
        self.weight = nn.Parameter(torch.empty(K * D, 3))

    def forward(self, q: Tensor, k: Tensor, v: Tensor, documents: Tensor | None = None) -> Tensor:
        q, k, v = (x.transpose(1, 2) for x in (F.normalize(q[:, :K], dim=-1), F.normalize(k, dim=-1), v))
        g, beta = F.logsigmoid(q.sum(-1)), k.sum(-1).sigmoid()
        if (sequence := self.sequence) is None:
            v = convolved(v.flatten(2), self.weight, documents).unflatten(2, (K, D))
            out = gated_delta_rule(q, k, v, g, beta, documents)
        else:
            options: Kwargs = {"sequence": sequence, "mask": Mask(documents=documents) if self.told else None}
            x = v.flatten(2)
            x = mixers.causal_conv1d(x, self.weight, **options) if self.whole else convolved(x, self.weight, None)
            out, _ = mixers.gated_delta_rule(q, k, x.unflatten(2, (K, D)), g, beta, **options)
        return out.transpose(1, 2).repeat_interleave(2, 1)


def convolved(x: Tensor, weight: Tensor, documents: Tensor | None) -> Tensor:
    """Of the rows of one rank, [B, S, C]."""
    documents = torch.zeros(x.shape[:2]) if documents is None else documents
    out = torch.zeros_like(x)
    for j in range(weight.shape[1]):
        same = documents[:, j:] == documents[:, : documents.shape[1] - j]
        out = out + F.pad(x[:, : x.shape[1] - j] * same[..., None], (0, 0, j, 0)) * weight[:, -1 - j]
    return out


def gated_delta_rule(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, documents: Tensor | None) -> Tensor:
    """Of the rows of one rank, token by token: [B, S, H, D]."""
    state, out = torch.zeros(len(q), K, D, D, dtype=q.dtype), []
    for t in range(q.shape[1]):
        if documents is not None and t:
            state = state * (documents[:, t] == documents[:, t - 1])[:, None, None, None]
        state = state * g[:, t].exp()[..., None, None]
        u = beta[:, t, :, None] * (v[:, t] - (k[:, t, :, :, None] * state).sum(-2))
        state = state + k[:, t, :, :, None] * u[:, :, None]
        out.append((q[:, t, :, :, None] * state).sum(-2) * D**-0.5)
    return torch.stack(out, 1)


def hybrid(core: Callable[[], nn.Module], **recurrent: Any) -> nn.Module:
    """A recurrent layer and one of attention."""
    model = Positioned(core)
    model.layers[0].core = Recurrent(**recurrent)
    for parameter in model.layers[0].core.parameters():
        nn.init.normal_(parameter, generator=torch.Generator().manual_seed(1))
    return model


class Leaky(Positioned):
    """A model that was told of documents and attends across them, as eager gpt-oss in transformers 5.24 does."""

    def forward(self, tokens: Tensor, positions: Tensor, documents: Tensor | None = None) -> Tensor:
        return super().forward(tokens, positions)


class OneLayer(Positioned):
    """Without the residual stream around attention, so that a row shows what its attention saw."""

    def forward(self, tokens: Tensor, positions: Tensor | None = None, documents: Tensor | None = None) -> Tensor:
        x = self.embedding(tokens)
        x = torch.stack([x[..., :16], x[..., 16:]], 1)
        return self.head(self.layers[0].core(x, x, x).transpose(1, 2).flatten(-2))


class OwnLoss(Positioned):
    """Computes its loss from labels that it shifts itself, inside of what it is given."""

    def forward(self, tokens: Tensor, labels: Tensor, positions: Tensor | None = None) -> Any:  # type: ignore[override]
        logits = super().forward(tokens, positions)
        return {"logits": logits, "loss": F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())}


# --- what is right


def whole(names: str = "tokens labels", rows: int = B, length: int = S) -> dict[str, Tensor]:
    found = batch(rows, length)
    return {name: found[name] for name in names.split()}


def plan_of(sequence: ShardedSequence, root: Kwargs | None = None, **core: Any) -> Kwargs:
    return {"": ShardedModel(sequence, **(root or {})), "layers.*.core": ContextParallel(sequence, **core)}


def documents_of(q: Tensor, k: Tensor, v: Tensor, documents: Tensor | None = None) -> Mask:
    return Mask(documents=documents)


def right(axis: DeviceMesh, **others: Any) -> Kwargs:
    """A set-up without a mistake, on one axis; ``others`` are those of the catalogue."""
    sequence = ShardedSequence(axis)
    given = {"make_model": Positioned, "plan": plan_of(sequence), "batch": whole(), "mesh": axis}
    return given | others


def shard(axis: DeviceMesh, **tensors: Tensor) -> dict[str, Tensor]:
    return ShardedSequence(axis).shard(tensors)


def own_rows(axis: DeviceMesh) -> Callable[[nn.Module, Kwargs], Tensor]:
    """The loss of a trainer that shards its data itself."""

    def loss(model: nn.Module, data: Kwargs) -> Tensor:
        sequence = ShardedSequence(axis)
        mine = sequence.shard({"tokens": data["tokens"], "labels": data["labels"]})
        return cross_entropy(model(mine["tokens"], sequence.positions(S)), mine["labels"], axis)

    return loss


def loss_with(labels: Callable[[Tensor], Tensor], axis: DeviceMesh) -> Callable[[nn.Module, Kwargs], Tensor]:
    """A trainer that makes this rank's labels from the whole ones in this way."""
    return lambda model, data: cross_entropy(model(data["tokens"]), labels(data["labels"]), axis)


# --- the catalogue


@dataclass(frozen=True)
class Bug:
    """A mistake: what the verdict has to name, and the arguments of `verify_model` on a mesh.

    Where the library itself may refuse the mistake, the pattern has that refusal as its second half.
    """

    verdict: str
    setup: Callable[[DeviceMesh], Kwargs]
    ranks: tuple[int, ...] = (2,)


def left_out(axis: DeviceMesh) -> Kwargs:
    sequence = ShardedSequence(axis)
    plan = {"": ShardedModel(sequence, watch=False), "layers.0.core": ContextParallel(sequence)}
    return right(axis, plan=plan)


def left_out_of_compiled(axis: DeviceMesh) -> Kwargs:
    def spread(model: nn.Module) -> None:
        sequence = ShardedSequence(axis)
        plan = {"": ShardedModel(sequence, watch=False), "layers.0.core": ContextParallel(sequence)}
        parallelize(model, axis, plan)
        for layer in model.layers:
            layer.compile(backend="eager")

    return right(axis, plan=spread)


def left_out_without_root(axis: DeviceMesh) -> Kwargs:
    return right(axis, plan={"layers.0.core": ContextParallel(ShardedSequence(axis))}, loss=own_rows(axis))


def nothing_planned(axis: DeviceMesh) -> Kwargs:
    return right(axis, plan={"": ShardedModel(ShardedSequence(axis), watch=False)})


def late_binding(axis: DeviceMesh) -> Kwargs:
    sequence, plan = ShardedSequence(axis), {}
    for i, window in enumerate(((3, 0), (7, 0))):
        plan[f"layers.{i}.core"] = ContextParallel(sequence, mask=lambda *_: Mask(window=window))  # noqa: B023
    return right(axis, plan={"": ShardedModel(sequence), **plan}, make_reference=windows)


def without_positions(axis: DeviceMesh) -> Kwargs:
    def loss(model: nn.Module, data: Kwargs) -> Tensor:
        mine = shard(axis, **data)
        return cross_entropy(model(mine["tokens"]), mine["labels"], axis)

    return right(axis, plan={"layers.*.core": ContextParallel(ShardedSequence(axis))}, loss=loss)


def local_arange(axis: DeviceMesh) -> Kwargs:
    def loss(model: nn.Module, data: Kwargs) -> Tensor:
        mine = shard(axis, **data)
        return cross_entropy(model(mine["tokens"], torch.arange(S // 2)), mine["labels"], axis)

    return right(axis, plan={"layers.*.core": ContextParallel(ShardedSequence(axis))}, loss=loss)


class CountingBlock(Block):
    """Makes the rotary embedding itself, for positions from 0."""

    def forward(self, x: Tensor, rope: Tensor, documents: Tensor | None) -> Tensor:
        angles = torch.arange(x.shape[1]).double()[:, None] * 0.3 ** torch.arange(rope.shape[-1])
        return super().forward(x, torch.stack((angles.cos(), angles.sin())), documents)


def counting() -> nn.Module:
    model = Positioned()
    for layer in model.layers:
        layer.__class__ = CountingBlock
    return model


def own_positions(axis: DeviceMesh) -> Kwargs:
    return right(axis, make_model=counting)


def whole_inputs_without_root(axis: DeviceMesh) -> Kwargs:
    def loss(model: nn.Module, data: Kwargs) -> Tensor:
        return cross_entropy(model(data["tokens"]), data["labels"], axis)

    return right(axis, plan={"layers.*.core": ContextParallel(ShardedSequence(axis))}, loss=loss)


def sharded_twice(axis: DeviceMesh) -> Kwargs:
    def loss(model: nn.Module, data: Kwargs) -> Tensor:
        mine = shard(axis, **shard(axis, **data))
        return cross_entropy(model(shard(axis, tokens=data["tokens"])["tokens"]), mine["labels"], axis)

    return right(axis, loss=loss)


def mean_of_own_rows(axis: DeviceMesh) -> Kwargs:
    def loss(model: nn.Module, data: Kwargs) -> Tensor:
        labels = shard(axis, labels=data["labels"])["labels"]
        return F.cross_entropy(model(data["tokens"]).flatten(0, 1), labels.flatten())

    data = whole()
    data["labels"] = data["tokens"].roll(-1, 1)  # all count: each rank has as many
    return right(axis, loss=loss, batch=data)


def mean_of_own_rows_over_ranks(axis: DeviceMesh) -> Kwargs:
    def loss(model: nn.Module, data: Kwargs) -> Tensor:
        labels = shard(axis, labels=data["labels"])["labels"]
        return F.cross_entropy(model(data["tokens"]).flatten(0, 1), labels.flatten()) / axis.size()

    data = whole()
    data["labels"][:, : S // 4] = -100
    return right(axis, loss=loss, batch=data)


def gathered(axis: DeviceMesh) -> Kwargs:
    def loss(model: nn.Module, data: Kwargs) -> Tensor:
        return F.cross_entropy(model(data["tokens"]).flatten(0, 1), data["labels"].flatten())

    return right(axis, plan=plan_of(ShardedSequence(axis), {"gather_output": True}), loss=loss)


def share_of_gathered(axis: DeviceMesh) -> Kwargs:
    given = gathered(axis)
    return given | {"loss": lambda model, data: gathered(axis)["loss"](model, data) / axis.size()}


def last_logits(axis: DeviceMesh) -> Kwargs:
    def loss(model: nn.Module, data: Kwargs) -> Tensor:
        return F.cross_entropy(model(data["tokens"])[:, -1], data["labels"][:, -1])

    data = whole()
    data["labels"] = torch.full_like(data["labels"], -100)
    data["labels"][:, -1] = data["tokens"][:, 0]
    return right(axis, loss=loss, reference_loss=loss, batch=data)


def labels_of_the_model(axis: DeviceMesh) -> Kwargs:
    def loss(model: nn.Module, data: Kwargs) -> Tensor:
        return model(**data)["loss"]

    plan = plan_of(ShardedSequence(axis), {"inputs": ("tokens", "labels")})
    data = whole()
    data["labels"] = data["tokens"].clone()
    return right(axis, make_model=OwnLoss, plan=plan, loss=loss, reference_loss=loss, batch=data)


def shifted_after(axis: DeviceMesh) -> Kwargs:
    def loss(model: nn.Module, data: Kwargs) -> Tensor:
        logits = model(data["tokens"])
        own = shard(axis, tokens=data["tokens"])["tokens"]
        return cross_entropy(logits[:, :-1], own[:, 1:], axis)

    data = whole()
    data["labels"] = F.pad(data["tokens"][:, 1:], (0, 1), value=-100)
    return right(axis, loss=loss, batch=data)


def differing(axis: DeviceMesh) -> Kwargs:
    data = whole()
    data["tokens"] = (data["tokens"] + axis.get_local_rank()) % V
    return right(axis, batch=data)


def of_other_lengths(axis: DeviceMesh) -> Kwargs:
    return right(axis, batch=whole(length=S + 4 * axis.get_local_rank()))


def refused_on_one_rank(axis: DeviceMesh) -> Kwargs:
    def loss(model: nn.Module, data: Kwargs) -> Tensor:
        if axis.get_local_rank() == 0:
            raise NotImplementedError("positions are read as packed documents")
        return cross_entropy(model(data["tokens"]), shard(axis, labels=data["labels"])["labels"], axis)

    return right(axis, loss=loss)


def unread_mask(axis: DeviceMesh) -> Kwargs:
    data = whole("tokens labels documents positions")
    return right(axis, batch=data, make_reference=functools.partial(Positioned, DenseCore))


def documents_of_the_first_row(axis: DeviceMesh) -> Kwargs:
    def mask(q: Tensor, k: Tensor, v: Tensor, documents: Tensor) -> Mask:
        return Mask(documents=documents[0])

    data = whole("tokens labels documents positions")
    dense = functools.partial(Positioned, DenseCore)
    return right(axis, batch=data, plan=plan_of(ShardedSequence(axis), mask=mask), make_reference=dense)


def nothing_planned_of_compiled(axis: DeviceMesh) -> Kwargs:
    def spread(model: nn.Module) -> None:
        parallelize(model, axis, {"": ShardedModel(ShardedSequence(axis), watch=False)})
        for layer in model.layers:
            layer.compile(backend="eager")

    return right(axis, plan=spread)


def unread_sinks(axis: DeviceMesh) -> Kwargs:
    def scores(core: ScoredCore, *_: Any) -> Kwargs:
        given = core.scores()
        del given["sinks"]
        return given

    make, dense = (functools.partial(Positioned, core) for core in (ScoredCore, DenseScoredCore))
    return right(axis, make_model=make, plan=plan_of(ShardedSequence(axis), scores=scores), make_reference=dense)


def replicated(axis: DeviceMesh) -> Kwargs:
    """The degree of parallelism is ignored: every rank computes all, and gradients are summed."""

    def loss(model: nn.Module, data: Kwargs) -> Tensor:
        return F.cross_entropy(model(data["tokens"]).flatten(0, 1), data["labels"].flatten())

    return right(axis, plan={}, loss=loss, rows=torch.arange(S))


def cut_off(axis: DeviceMesh) -> Kwargs:
    """A length that ranks do not divide: the tail is dropped."""

    def loss(model: nn.Module, data: Kwargs) -> Tensor:
        cut = {name: x[:, : S - 4] for name, x in data.items()}
        return cross_entropy(model(cut["tokens"]), shard(axis, labels=cut["labels"])["labels"], axis)

    rows = ZigZag().positions(S - 4, 2, axis.get_local_rank())
    return right(axis, batch=whole(length=S - 1), loss=loss, rows=rows)


def not_reduced(axis: DeviceMesh) -> Kwargs:
    return right(axis, plan=lambda model: parallelize(model, axis, plan_of(ShardedSequence(axis))), loss=None)


def averaged_by_ddp(axis: DeviceMesh) -> Kwargs:
    def spread(model: nn.Module) -> nn.Module:
        return DistributedDataParallel(parallelize(model, axis, plan_of(ShardedSequence(axis))))

    return right(axis, plan=spread, total="sum")


def averaged_by_fsdp(axis: DeviceMesh) -> Kwargs:
    def spread(model: nn.Module) -> None:
        parallelize(model, axis, plan_of(ShardedSequence(axis)))
        fully_shard(model, mesh=axis)
        model.set_force_sum_reduction_for_comms(True)  # gloo has no other sum
        model.set_gradient_divide_factor(2.0)

    return right(axis, plan=spread)


def wrong_norm(axis: DeviceMesh) -> Kwargs:
    """Of the gradients before they are summed."""
    norms: list[float] = []

    def loss(model: nn.Module, data: Kwargs) -> Tensor:
        return cross_entropy(model(data["tokens"]), shard(axis, labels=data["labels"])["labels"], axis)

    def reduce(model: nn.Module) -> None:
        norms.append(float(nn.utils.get_total_norm([p.grad for p in model.parameters()])))
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad, group=axis.get_group())

    return right(axis, loss=loss, reduce_gradients=reduce, gradient_norm=lambda model: torch.tensor(norms[-1]))


def one_not_reduced(axis: DeviceMesh) -> Kwargs:
    def loss(model: nn.Module, data: Kwargs) -> Tensor:
        return cross_entropy(model(data["tokens"]), shard(axis, labels=data["labels"])["labels"], axis)

    def reduce(model: nn.Module) -> None:
        for parameter in list(model.parameters())[:-1]:
            dist.all_reduce(parameter.grad, group=axis.get_group())

    return right(axis, loss=loss, reduce_gradients=reduce)


def on_grid(grid: DeviceMesh, loss_axis: str = "dp_cp", data_axis: str = "dp_cp") -> Kwargs:
    both = flattened(grid)
    axes = {"dp_cp": both, "cp": grid["cp"]}
    sequence = ShardedSequence(grid["cp"])

    def spread(model: nn.Module) -> None:
        parallelize(model, grid["cp"], plan_of(sequence))
        for module in (*model.layers, model):
            fully_shard(module, mesh=axes[data_axis])
        sum_gradients(model)

    def loss(model: nn.Module, data: Kwargs) -> Tensor:
        labels = sequence.shard({"labels": data["labels"]})["labels"]
        return cross_entropy(model(data["tokens"]), labels, axes[loss_axis])

    mine = grid.get_local_rank("dp") * B
    data = {name: x[mine : mine + B] for name, x in whole(rows=2 * B).items()}
    return {"make_model": Positioned, "plan": spread, "batch": data, "mesh": grid, "loss": loss}


@functools.cache
def flattened(grid: DeviceMesh) -> DeviceMesh:
    return grid["dp", "cp"]._flatten("dp_cp_of_verify_model")


def with_core(core: type[nn.Module]) -> Callable[[DeviceMesh], Kwargs]:
    """The spread model has this core in layer 1, the reference has not."""

    def make() -> nn.Module:
        model = Positioned()
        model.layers[1].core = core()
        return model

    return lambda axis: right(axis, make_model=make, make_reference=Positioned)


def labels_by(how: Callable[[Tensor, int], Tensor]) -> Callable[[DeviceMesh], Kwargs]:
    return lambda axis: right(axis, loss=loss_with(lambda labels: how(labels, axis.get_local_rank()), axis))


GRID = (2, 2)
USERS: dict[str, Bug] = {
    "1 a layer left out of the plan": Bug(
        r"forward: layers\.1\.core, output, position 6; .*: it is not in the plan, as layers\.0\.core is", left_out
    ),
    "1 a layer left out, blocks compiled": Bug(
        r"forward: norm, argument x, position 6; .*: the plan leaves out layers\.1\.core", left_out_of_compiled
    ),
    "1 a layer left out, no root": Bug(
        r"forward: layers\.1\.core, output, position 6|plan: expected every self-attention",
        left_out_without_root,
    ),
    "2 a window that a model drops by local shapes": Bug(
        r"forward: layers\.0\.core, output, position 16; .* by another mask, window or scores",
        lambda axis: right(axis, make_model=functools.partial(Positioned, OwnWindow)),
    ),
    "3 a root that gives no positions": Bug(
        r"forward: layers\.0\.core, argument q, position 6|ShardedModel: expected a source of .* positions",
        lambda axis: right(axis, plan=plan_of(ShardedSequence(axis), {"positions": None})),
    ),
    "3 positions left out without a root": Bug(
        r"forward: layers\.0, argument rope, position 6; it differs: other positions", without_positions
    ),
    "3 positions counted from 0 on every rank": Bug(
        r"forward: layers\.0\.core, argument q, position 6|positions: expected the positions of this rank",
        local_arange,
    ),
    "3 positions that a model makes wrong": Bug(
        r"forward: layers\.0\.core, argument q, position 6; .*argument v beside it agrees: other positions",
        own_positions,
    ),
    "3 a score_mod that counts this rank's rows": Bug(
        r"forward: layers\.0\.core, output, position \d+; .* by another mask, window or scores",
        lambda axis: by_functions(axis, rows=True),
    ),
    "4 the mean over own rows": Bug(r"2 times too large, the number of ranks of cp", mean_of_own_rows),
    "4 a share of the loss of gathered logits": Bug(
        r"0.5 of the right value, one over the number of ranks of cp", share_of_gathered
    ),
    "4 the loss over cp alone": Bug(
        r"loss.*: 2\S* times too large, the number of ranks of dp", lambda grid: on_grid(grid, loss_axis="cp"), GRID
    ),
    "4 FSDP over cp alone": Bug(
        r"gradients: .*each rank has a partial gradient: nothing sums them over dp",
        lambda grid: on_grid(grid, data_axis="cp"),
        GRID,
    ),
    "4 DistributedDataParallel averages": Bug(
        r"gradients: .*all of them are 0\.5 of the right value, one over the number of ranks of cp", averaged_by_ddp
    ),
    "4 FSDP2 averages": Bug(r"gradients: .*all of them are 0\.5 of the right value", averaged_by_fsdp),
    "4 nothing sums gradients": Bug(
        r"gradients: .*each rank has a partial gradient: nothing sums them over cp", not_reduced
    ),
    "5 labels by chunk": Bug(
        r"loss of the logits: .* labels at their positions", labels_by(lambda x, r: x.chunk(2, 1)[r])
    ),
    "5 labels shifted after sharding": Bug(
        r"loss of the logits: .* labels at their positions|labels: expected the next tokens",
        shifted_after,
    ),
    "5 labels in another layout": Bug(
        r"loss of the logits: .* labels at their positions", labels_by(lambda x, r: x[:, Striped().positions(S, 2, r)])
    ),
    "5 labels that the model shifts and averages": Bug(
        r"loss of the logits: .* labels at their positions", labels_of_the_model
    ),
    "6 batches that differ between cp ranks": Bug(r"batch: tokens; differs between ranks of cp", differing),
    "6 whole inputs without a root": Bug(
        r"forward: layers\.0\.core, output, position 0|model: expected this rank's rows",
        whole_inputs_without_root,
    ),
    "6 sharded twice": Bug(
        r"runs: RankMismatchError; .*expected the same tokens on every cp rank|shard\(tokens\): expected a tensor",
        sharded_twice,
    ),
    "6 the last logits of a shard": Bug(r"loss of the logits: .* labels at their positions", last_logits),
    "6 lengths that differ between cp ranks": Bug(r"batch: tokens, labels; differs", of_other_lengths),
    "7 a mask that no style reads": Bug(
        r"forward: layers\.0\.core, output, position \d+; .* by another mask, window or scores", unread_mask
    ),
    "7 a lambda that binds late": Bug(
        r"forward: layers\.0\.core, output, position 4|ContextParallel\.mask: expected a function",
        late_binding,
    ),
    "8 refused on one rank alone": Bug(r"runs: \w+; .*positions are read as packed documents", refused_on_one_rank),
}
PEERS: dict[str, Bug] = {
    "1 TRL 6843, packed documents attend across": Bug(r"forward: layers\.0\.core, output", unread_mask),
    "2 axolotl 3608, a batch of many documents": Bug(r"forward: layers\.0\.core, output", documents_of_the_first_row),
    "3 diffusers 14265, stale keys in the backward": Bug(r"gradients: layers\.1\.wv\.weight", with_core(StaleKV)),
    "4 Automodel, each rank attends to its own rows": Bug(
        r"forward: norm, argument x, position 6; .*; no module is in the plan", nothing_planned_of_compiled
    ),
    "5 torchtitan 723, not dispatched": Bug(
        r"layers\.0\.core, output, position 6; .*: it is not in the plan", nothing_planned
    ),
    "6 prime-rl 3397, sinks dropped": Bug(
        r"forward: layers\.0\.core, output, position 0|expected the module's sinks",
        unread_sinks,
    ),
    "7 accelerate 4177, a window as full causal": Bug(
        r"forward: layers\.0\.core, output, position 4", lambda axis: right(axis, make_reference=windows)
    ),
    "8 TransformerEngine 1930, last tokens ignored": Bug(
        r"forward: layers\.1\.core, output, position (17|23)", with_core(LastIgnored)
    ),
    "9 TransformerEngine 1557, wrong gradients": Bug(r"gradients: layers\.1\.wv\.weight", with_core(HalfOfV)),
    "10 DeepSpeed 7384, a length that ranks do not divide": Bug(
        r"rows: position 20; 0 of 2 ranks have its logits", cut_off
    ),
    "11 ms-swift 10061, the degree ignored": Bug(r"2 times too large, the number of ranks of cp", replicated),
    "12 Megatron 7513, the loss normalised by rank": Bug(
        r"loss of the logits: .* labels at their positions", mean_of_own_rows_over_ranks
    ),
    "13 Megatron 7452, the norm before the sum": Bug(r"gradient norm: ", wrong_norm),
    "14 Automodel 2384, NaN gradients": Bug(r"gradients: layers\.1\.wv\.weight", with_core(NaNOfV)),
    "15 slime 1366, gradients not synchronised": Bug(
        r"each rank has a partial gradient: nothing sums them over cp", not_reduced
    ),
    "15 slime 1366, one parameter not synchronised": Bug(r"gradients: head\.weight; ", one_not_reduced),
    "16 accelerate 4177, linear attention on shards": Bug(
        r"forward: layers\.0\.core, output, position 6; .*: it is not in the plan, so if it mixes tokens",
        lambda axis: right(
            axis,
            make_model=with_linear_layer,
            plan={"": ShardedModel(ShardedSequence(axis)), "layers.1.core": ContextParallel(ShardedSequence(axis))},
        ),
    ),
}


def of_recurrent_layers(axis: DeviceMesh, names: str = "", **recurrent: Any) -> Kwargs:
    """``names``: of the batch, beside tokens and labels."""
    sequence = ShardedSequence(axis)

    def spread(model: Any) -> None:
        plan = {"": ShardedModel(sequence), "layers.1.core": ContextParallel(sequence, mask=documents_of)}
        parallelize(model, axis, plan)
        model.layers[0].core.sequence = sequence

    def reduce(model: nn.Module) -> None:
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad, group=axis.get_group())

    make, alone = functools.partial(hybrid, Core, **recurrent), functools.partial(hybrid, DenseCore)
    data = whole(f"tokens labels {names}")
    return right(axis, make_model=make, make_reference=alone, plan=spread, batch=data, reduce_gradients=reduce)


RECURRENT = {
    "documents that a mixer is not given": Bug(
        r"forward: layers\.0\.core, output, position \d+",
        lambda axis: of_recurrent_layers(axis, "documents positions", told=False),
    ),
    "a convolution of the shard": Bug(
        r"forward: layers\.0\.core, output, position [67]", lambda axis: of_recurrent_layers(axis, whole=False)
    ),
    "a convolution of the shard, of documents": Bug(
        r"forward: layers\.0\.core, output, position \d+",
        lambda axis: of_recurrent_layers(axis, "documents positions", whole=False),
    ),
}


CATALOGUES = {"users": USERS, "peers": PEERS, "recurrent": RECURRENT}


def tried(rank: int, catalogue: str, names: list[str]) -> dict[str, str]:
    """The verdict on each of these bugs."""
    found = {}
    for name in names:
        bug = CATALOGUES[catalogue][name]
        axes = mesh(bug.ranks, ("dp", "cp")[-len(bug.ranks) :])
        try:
            found[name] = verify_model(**{"probes": False} | bug.setup(axes)).verdict
        except VerificationError as error:
            found[name] = error.report.verdict
        torch._dynamo.reset()
    return found


def find(pool: Any, catalogue: str, shape: tuple[int, ...], names: list[str]) -> None:
    """Every rank says that each is wrong, and some rank names it: others may have heard of a refusal alone."""
    verdicts = pool(math.prod(shape)).run(tried, catalogue, names, timeout=120)
    for name in names:
        told = {verdict_of[name] for verdict_of in verdicts}
        assert all(text.startswith("WRONG: ") for text in told), (name, told)
        assert any(re.search(CATALOGUES[catalogue][name].verdict, text) for text in told), (name, told)


@pytest.mark.parametrize(
    ("catalogue", "shape"),
    [
        ("users", (2,)),
        *(pytest.param(*x, marks=pytest.mark.full) for x in (("users", GRID), ("peers", (2,)), ("recurrent", (2,)))),
    ],
)
@pytest.mark.full
def test_every_bug_of_the_catalogue_is_found_and_named(pool: Any, catalogue: str, shape: tuple[int, ...]) -> None:
    names = [name for name, bug in CATALOGUES[catalogue].items() if bug.ranks == shape]
    assert names
    find(pool, catalogue, shape, names)


def look(pool: Any) -> None:
    """A few of them, and probes, for bugs of `verify_model` itself."""
    find(pool, "users", (2,), ["1 a layer left out of the plan", "4 nothing sums gradients"])
    find(pool, "peers", (2,), ["15 slime 1366, one parameter not synchronised"])
    for problems in pool(2).run(probed, ["a model that leaks", "labels by chunk"]):
        assert not problems, "\n".join(problems)


def test_the_catalogue_is_whole() -> None:
    """Every numbered mistake of either list has a bug."""
    for bugs, last in ((USERS, 8), (PEERS, 16)):
        assert {int(name.split()[0]) for name in bugs} == set(range(1, last + 1))
    assert len(USERS) >= 23


# --- what is right passes


def in_windows(axis: DeviceMesh) -> Kwargs:
    sequence, plan = ShardedSequence(axis), {}
    masks = [Mask(window=(3, 0)), Mask(window=(7, 0))]
    for i, mask in enumerate(masks):
        plan[f"layers.{i}.core"] = ContextParallel(sequence, mask=mask)
    return right(axis, plan={"": ShardedModel(sequence), **plan}, make_reference=windows, mask=masks)


def packed(axis: DeviceMesh) -> Kwargs:
    plan = plan_of(ShardedSequence(axis), mask=documents_of)
    dense = functools.partial(Positioned, DenseCore)
    return right(axis, plan=plan, batch=whole("tokens labels documents positions"), make_reference=dense)


def with_scores(axis: DeviceMesh) -> Kwargs:
    make, dense = (functools.partial(Positioned, core) for core in (ScoredCore, DenseScoredCore))
    plan = plan_of(ShardedSequence(axis), scores=lambda core, *_: core.scores())
    return right(axis, make_model=make, plan=plan, make_reference=dense)


def by_functions(axis: DeviceMesh, rows: bool = False) -> Kwargs:
    make = functools.partial(Positioned, functools.partial(FlexCore, rows))
    return right(axis, make_model=make, plan=plan_of(ShardedSequence(axis), mask=Mask(causal=False)))


def under_ddp(axis: DeviceMesh) -> Kwargs:
    def spread(model: nn.Module) -> nn.Module:
        return DistributedDataParallel(parallelize(model, axis, plan_of(ShardedSequence(axis))))

    def loss(model: nn.Module, data: Kwargs) -> Tensor:
        labels = shard(axis, labels=data["labels"])["labels"]
        return axis.size() * cross_entropy(model(data["tokens"]), labels, axis)

    return right(axis, plan=spread, loss=loss)


def of_length(length: int, pad: bool) -> Callable[[DeviceMesh], Kwargs]:
    return lambda axis: right(
        axis, plan=plan_of(ShardedSequence(axis, length=length, pad=pad)), batch=whole(length=length)
    )


def compiled(axis: DeviceMesh) -> Kwargs:
    def spread(model: nn.Module) -> None:
        parallelize(model, axis, plan_of(ShardedSequence(axis)))
        for layer in model.layers:
            layer.compile(backend="eager")

    def reduce(model: nn.Module) -> None:
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad, group=axis.get_group())

    return right(axis, plan=spread, reduce_gradients=reduce)


def of_gradients(setup: test_gradients.Setup) -> Callable[[DeviceMesh], Kwargs]:
    """A set-up of tests/test_gradients.py."""

    def make(grid: DeviceMesh) -> Kwargs:
        sequence = ShardedSequence(grid["cp"], setup.layout, length=setup.S)
        rows = test_gradients.B // setup.dp
        first = rows * grid.get_local_rank("dp")
        data = {name: x[first : first + rows] for name, x in test_gradients.make_batch(setup).items()}

        def loss(model: nn.Module, data: Kwargs) -> Tensor:
            own = sequence
            if setup.packed:
                given = Mask(documents=data["documents"])
                own = sequence.balanced(given)
                data["documents"] = test_gradients.Packed(given, own.layout)
            labels = own.shard({"labels": data.pop("labels")})["labels"]
            return cross_entropy(model(**data), labels, test_gradients.data_axis(grid))

        return {
            "make_model": lambda: test_gradients.spread(setup, grid, sequence),
            "plan": None,
            "make_reference": functools.partial(Model, DenseScoredCore if setup.scores else DenseCore),
            "batch": data,
            "mesh": grid,
            "loss": loss,
        }

    return make


SETUPS = [setup for setup in test_gradients.SETUPS if setup.fsdp and setup.dp * setup.cp * setup.tp <= 4]
RIGHT: dict[str, tuple[Callable[[DeviceMesh], Kwargs], tuple[int, ...]]] = {
    "a plan": (right, (2,)),
    "one rank": (right, (1,)),
    "no root": (lambda axis: not_planned_at_the_root(axis), (2,)),
    "packed documents": (packed, (2,)),
    "windows": (in_windows, (2,)),
    "scores": (with_scores, (2,)),
    "functions": (by_functions, (2,)),
    "gathered logits": (gathered, (2,)),
    "gathered logits, its own loss": (lambda axis: gathered(axis) | {"loss": None}, (2,)),
    "DistributedDataParallel": (under_ddp, (2,)),
    "padded": (of_length(21, True), (2,)),
    "unequal shards": (of_length(21, False), (3,)),
    "compiled blocks": (compiled, (2,)),
    "FSDP2 over dp x cp": (on_grid, GRID),
    "recurrent layers": (of_recurrent_layers, (2,)),
    "recurrent layers, packed": (lambda axis: of_recurrent_layers(axis, "documents positions"), (3,)),
    **{str(setup): (of_gradients(setup), (setup.dp, setup.cp, setup.tp)) for setup in SETUPS},
}
QUICK = {name for name in RIGHT if name not in map(str, SETUPS)} | {str(x) for x in SETUPS if x.packed and x.dp == 2}


def not_planned_at_the_root(axis: DeviceMesh) -> Kwargs:
    return right(axis, plan={"layers.*.core": ContextParallel(ShardedSequence(axis))}, loss=own_rows(axis))


def passed(rank: int, names: list[str], **options: Any) -> dict[str, str]:
    """The reports of set-ups that do not pass."""
    wrong = {}
    for name in names:
        setup, shape = RIGHT[name]
        axes = mesh(shape, ("dp", "cp", "tp") if len(shape) == 3 else ("dp", "cp")[-len(shape) :])
        try:
            found = verify_model(**setup(axes) | options)
            assert found.passed and found.verdict.startswith("RIGHT") and len(found.findings) >= 8
            note = {x.check: x.note for x in found.findings}["gradients of ranks"]
            counts = re.match(r"(\d+) of (\d+) parameters", note)
            assert counts and counts[1] == counts[2] > "0"
        except VerificationError as error:
            wrong[name] = str(error)
        torch._dynamo.reset()
    return wrong


BY_RANKS = [
    pytest.param(count, quick, id=f"{count}-{'quick' if quick else 'full'}", marks=marks)
    for count in (1, 2, 3, 4)
    for quick, marks in ((True, ()), (False, pytest.mark.nightly("runs") if count == 4 else pytest.mark.full))
    if any(math.prod(RIGHT[name][1]) == count and (name in QUICK) == quick for name in RIGHT)
]


@pytest.mark.parametrize(("count", "quick"), BY_RANKS)
@pytest.mark.quick("3-quick", "1-quick")
def test_what_is_right_passes(pool: Any, count: int, quick: bool) -> None:
    names = [name for name in RIGHT if math.prod(RIGHT[name][1]) == count and (name in QUICK) == quick]
    for wrong in pool(count).run(passed, names, timeout=300):
        assert not wrong, "\n\n".join(f"{name}\n{text}" for name, text in wrong.items())


# --- probes alone


class FullCore(nn.Module):
    """Attention that is not causal."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, documents: Tensor | None = None) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, enable_gqa=True)


def on_one_rank(make: Callable[[], nn.Module], names: str = "tokens labels", **others: Any) -> Callable[..., Kwargs]:
    """A model that does not use cp_mesh."""
    return lambda axis: {"make_model": make, "plan": None, "batch": whole(names), **others}


def seen(*lookbacks: int) -> list[Mask]:
    return [Mask(window=(lookback, 0)) for lookback in lookbacks]


# What finds it, and what it says.
PROBED: dict[str, tuple[str, str, Callable[[DeviceMesh], Kwargs]]] = {
    "a model that leaks": (
        "end of a document", "packed documents leak", on_one_rank(Leaky, "tokens labels documents positions"),
    ),
    "a model that leaks, told by its positions": (
        "end of a document", "packed documents leak", on_one_rank(Positioned, "tokens labels positions"),
    ),
    "not causal": ("last token", "attention is not causal", on_one_rank(functools.partial(Positioned, FullCore))),
    "each rank attends to its own rows": ("far token", "do not change with token 0", nothing_planned),
    "a window too wide": ("window edge", "outside of the window of that", on_one_rank(windows, mask=seen(2, 7))),
    "a window too narrow": ("window edge", "do not change with", on_one_rank(windows, mask=seen(4, 7))),
    "last tokens ignored": (
        "far token",
        "logits at position 23 do not change with token 0",
        on_one_rank(functools.partial(OneLayer, LastIgnored)),
    ),
    "sinks dropped": (
        "sinks", "layers.0.core.sinks; logits do not change", on_one_rank(functools.partial(Positioned, ScoredCore)),
    ),
    "the mean over own rows": ("loss of the logits", "2 times too large, the number of ranks of cp", mean_of_own_rows),
    "labels by chunk": ("loss of the logits", "times the right value", USERS["5 labels by chunk"].setup),
    "averaged": ("scale of gradients", "0.5 of the right value, one over the number of ranks of cp", averaged_by_ddp),
    "not reduced": ("gradients of ranks", "nothing sums gradients", not_reduced),
    "wrong gradients": ("scale of gradients", "times the right value", with_core(HalfOfV)),
    "rows that nobody has": ("rows", "position 20; 0 of 2 ranks", cut_off),
}  # fmt: skip


def probed(rank: int, names: list[str]) -> list[str]:
    problems = []
    for name in names:
        check, text, setup = PROBED[name]
        try:
            verify_model(**setup(mesh((2,), ("cp",))) | {"reference": False})
            problems.append(f"{name}: passed")
        except VerificationError as error:
            wrong = {
                finding.check: f"{finding.where}; {finding.note}"
                for finding in error.report.findings
                if not finding.passed
            }
            if text not in wrong.get(check, ""):
                problems.append(f"{name}: {wrong}")
    return problems


@pytest.mark.full
def test_probes_find_it_without_a_reference(pool: Any) -> None:
    for problems in pool(2).run(probed, list(PROBED), timeout=120):
        assert not problems, "\n".join(problems)


@pytest.mark.full
def test_probes_pass_what_is_right(pool: Any) -> None:
    names = [name for name in QUICK if math.prod(RIGHT[name][1]) == 2]
    for wrong in pool(2).run(passed_probes, names, timeout=120):
        assert not wrong, "\n\n".join(f"{name}\n{text}" for name, text in wrong.items())


def passed_probes(rank: int, names: list[str]) -> dict[str, str]:
    return passed(rank, names, reference=False)


# --- what cannot be told, options, the report


class Random(Positioned):
    """With dropout that nobody switched off."""

    def forward(self, tokens: Tensor, positions: Tensor | None = None, documents: Tensor | None = None) -> Tensor:
        return F.dropout(super().forward(tokens, positions), 0.5)


def undecided(rank: int) -> dict[str, Any]:
    """Verdicts on what cannot be compared, and of options."""
    axis, found = mesh((2,), ("cp",)), {}

    def of_ranks() -> nn.Module:
        return Positioned(seed=rank)

    data = whole()
    named = {"ids": data["tokens"], "targets": data["labels"]}
    loss = lambda model, data: cross_entropy(  # noqa: E731
        model(data["ids"]), shard(axis, labels=data["targets"])["labels"], axis
    )
    of_one = lambda model, data: F.cross_entropy(model(data["ids"]).flatten(0, 1), data["targets"].flatten())  # noqa: E731
    grid = mesh((1, 2), ("data", "context"))
    sequence = ShardedSequence(grid["context"])
    setups = {
        "dropout": right(axis, make_model=Random),
        "weights": right(axis, make_model=of_ranks),
        "names": right(axis, make_reference=functools.partial(Positioned, DenseScoredCore)),
        "spread": right(
            axis, make_model=lambda: parallelize(Positioned(), axis, plan_of(ShardedSequence(axis))), plan=None
        ),
        "logits": right(axis, plan=None, loss=lambda model, data: model.head.weight.sum()),
        "a loss of its own": right(axis, batch=named, loss=loss, reference_loss=of_one, tokens="ids", labels="targets"),
        "axes of other names": right(axis, plan=plan_of(sequence), mesh=grid, cp="context"),
        "the same tokens": right(axis, plan=None, mesh=grid, same=("data", "context")),
        "float32": right(axis, dtype=torch.float32),
        "bfloat16": right(axis, dtype=torch.bfloat16),
        "a layer left out, in bfloat16": left_out(axis) | {"dtype": torch.bfloat16},
        "of its own dtype": right(axis, make_model=lambda: Positioned(dtype=torch.float32), dtype=None),
        "windows of the plan": in_windows(axis) | {"make_reference": None},
        "windows of the plan, by probes": in_windows(axis) | {"reference": False, "mask": None},
    }
    for name, setup in setups.items():
        try:
            found[name] = verify_model(**setup).verdict
        except VerificationError as error:
            found[name] = error.report.verdict
    for name, changed in {
        "no tokens": {"batch": {"x": torch.zeros(2, 3)}},
        "no labels": {"batch": {"tokens": torch.zeros(2, 8, dtype=torch.int64)}},
        "total": {"total": "max"},
        "reference": {"reference": "chunks"},
        "mask": {"mask": Mask(window=(3, 0))},
    }.items():
        with pytest.raises(ArgumentError) as caught:
            verify_model(**right(axis) | changed)
        found[name] = str(caught.value)
    return found


SAID = {
    "dropout": r"WRONG: repeats: .*switch dropout off",
    "weights": r"WRONG: weights: .*differ between ranks",
    "names": r"WRONG: runs: ArgumentError; .*the same names on one rank",
    "spread": r"WRONG: runs: ArgumentError; .*pass a make_reference= that makes the plain one",
    "logits": r"WRONG: runs: ArgumentError; .*a call of the model, got none",
    "a loss of its own": r"^RIGHT",
    "axes of other names": r"^RIGHT",
    "the same tokens": r"^RIGHT",
    "float32": r"^RIGHT",
    "bfloat16": r"^RIGHT",
    "a layer left out, in bfloat16": r"WRONG: forward: layers\.1\.core, output, position",
    "of its own dtype": r"^RIGHT",
    "no tokens": r"int64 \[B, S\] under one of tokens, input_ids",
    "no labels": r"labels \[B, S\] under 'labels'",
    "total": r'expected "sum" or "mean", got max',
    "reference": r"expected True or False, got chunks; reference=False runs only probes, for models that do not fit",
    "mask": r"one for each layer if there are windows",
    "windows of the plan": (
        r"forward: layers\.0\.core, .* window or scores; its style in the plan has mask=Mask\(causal=True, "
        r"window=\(3, 0\)\): if the model's own code does not apply it, pass a make_reference= that does"
    ),
    "windows of the plan, by probes": r"or documents, pass mask=, one for each layer.* has .*make_reference=",
}


@pytest.mark.full
def test_what_cannot_be_told_and_options(pool: Any) -> None:
    for found in pool(2).run(undecided, timeout=120):
        assert found.keys() == SAID.keys()
        for name, pattern in SAID.items():
            assert re.search(pattern, found[name]), (name, found[name])


def test_the_report_is_a_table_and_json() -> None:
    long = "position 6; " + "words that go on " * 20
    findings = [Finding("batch", True), Finding("forward", False, float("inf"), 1e-9, long, "a note")]
    report = ModelReport(findings, 1.25)
    lines = str(report).splitlines()
    assert max(map(len, lines)) < 100 and "WRONG" in lines[2] and lines[2].split()[2:] == ["inf", "1.0e-09"]
    read = json.loads(report.to_json())
    assert read["passed"] is False and read["verdict"] == report.verdict and read["findings"][1]["error"] == "inf"
    assert report.verdict.startswith("WRONG: forward: position 6; words that go on")
    assert report.verdict.endswith("a note (2 checks, 1.2 s)")
    assert ModelReport(findings[:1]).verdict.startswith("RIGHT (1 checks")
    factor = Finding("gradients", False, where="head.weight", note="0.5 of the right value", named=True)
    last = [*findings, Finding("loss", False, note="1.2 times"), factor, Finding("gradient norm", False, named=True)]
    said = ModelReport(last).verdict
    assert said.startswith("WRONG: forward: position 6") and "1.2" not in said and "gradient norm" not in said
    assert said.endswith("a note. gradients: head.weight; 0.5 of the right value (5 checks, 0.0 s)")
    assert ModelReport([factor]).verdict.count("gradients") == 1
    assert not ModelReport().passed and ModelReport().verdict.startswith("WRONG: nothing")


FACTORIES = """
import sys
sys.path.insert(0, {tests!r})
from test_verify_model import left_out, right
from torch.distributed.device_mesh import init_device_mesh

def good(): return right(init_device_mesh("cpu", (2,), mesh_dim_names=("cp",)))
def bad(): return left_out(init_device_mesh("cpu", (2,), mesh_dim_names=("cp",)))
"""


@pytest.mark.parametrize("which", ["good", pytest.param("bad", marks=pytest.mark.full)])
def test_the_command(tmp_path: Path, which: str) -> None:
    (tmp_path / "my_factories.py").write_text(FACTORIES.format(tests=str(Path(__file__).parent)))
    script, written = Path(cp_mesh.__file__).parent / "__main__.py", tmp_path / "report.json"
    arguments = ["verify", f"{tmp_path / 'my_factories.py'}:{which}", "--device", "cpu", "--json", str(written)]
    done = run_script(script, arguments, num_ranks=2)
    assert done.returncode == (which == "bad"), done.printed
    read = json.loads(written.read_text())
    assert read["passed"] == (which == "good") and read["verdict"].split(" (")[0][:40] in done.printed
    assert "] building the reference" in done.printed
    assert " s] the step: forward and backward" in done.printed and "scale of gradients" in done.printed


@pytest.mark.full
@pytest.mark.parametrize(
    ("which", "ranks"),
    [
        ("zigzag", 2),
        ("packed", 2),
        ("packed", 4),
        ("checkpointed", 2),
        ("tensor_parallel", 4),
        ("sequence_parallel", 4),
        ("overlapped", 4),
    ],
)
def test_the_llama_trainer_passes(which: str, ranks: int) -> None:
    root = Path(__file__).resolve().parent.parent
    arguments = ["verify", f"{root / 'examples' / 'verify_llama.py'}:{which}", "--device", "cpu"]
    done = run_script(Path(cp_mesh.__file__).parent / "__main__.py", arguments, num_ranks=ranks)
    assert done.returncode == 0 and "RIGHT (" in done.printed, done.printed


def test_the_leak_of_packed_gpt_oss() -> None:
    """Eager gpt-oss of transformers 5.23 and 5.24 attends across packed documents; Llama does not."""
    transformers = pytest.importorskip("transformers")
    if not transformers.__version__.startswith(("5.23.", "5.24.")):
        pytest.skip(f"transformers {transformers.__version__}, and the leak is that of 5.23 and 5.24")
    sizes = {"vocab_size": 128, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2}
    sizes |= {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 512}
    experts = {"sliding_window": 12, "num_local_experts": 4, "num_experts_per_tok": 2}
    configs = {"llama": transformers.LlamaConfig(**sizes), "gpt_oss": transformers.GptOssConfig(**sizes, **experts)}
    ids = torch.randint(128, (1, 64), generator=torch.Generator().manual_seed(0))
    positions = torch.cat([torch.arange(23), torch.arange(41)])[None]
    data = {"input_ids": ids, "position_ids": positions, "labels": ids.roll(-1, 1)}

    def loss(model: nn.Module, data: Kwargs) -> Tensor:
        logits = model(input_ids=data["input_ids"], position_ids=data["position_ids"], use_cache=False).logits
        return F.cross_entropy(logits.flatten(0, 1), data["labels"].flatten())

    verdicts = {}
    for name, config in configs.items():
        torch.manual_seed(0)
        model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager")
        try:
            found = verify_model(lambda model=model: model, None, data, loss=loss, reference=False, dtype=None)
            verdicts[name] = found.verdict
        except VerificationError as error:
            verdicts[name] = error.report.verdict
    assert verdicts["llama"].startswith("RIGHT"), verdicts
    assert "WRONG: end of a document" in verdicts["gpt_oss"] and "packed documents leak" in verdicts["gpt_oss"], (
        verdicts
    )
