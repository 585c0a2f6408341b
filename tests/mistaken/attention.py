"""What attention is told: windows, masks, layouts."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from model import D, H
from set_ups import Batch, Core, Net, S, SetUp, Training
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

import cp_mesh
from cp_mesh import ContextParallel, Contiguous, Layout, Mask, ShardedSequence, Striped, ZigZag
from mistaken.listing import RIGHT, core, dense, every, few, made, mistake, net, plain_logits, rootless, unpiped

ATTENTION = "Attention and its styles"


@made(ATTENTION, "a layer left out of the plan")
class LeftOut(Training):
    deep = True

    def plan(self) -> dict[str, Any]:
        plan = super().plan()
        del plan[next(name for name in plan if name.endswith("core"))]
        return plan

    def forward(self, given: dict[str, Any]) -> Any:
        with torch.set_grad_enabled(not self.set_up.flex):  # PyTorch's flex_attention has no backward on CPUs
            return super().forward(given)

    def backward(self, loss: Tensor) -> None:
        if not self.set_up.flex:
            loss.backward()


def stating(**fields: Any) -> type[Core]:
    return type("Core", (Core,), {"window": 4, **fields})


core(ATTENTION, "a window that the style does not state", stating(sliding_window=4), dense)
core(ATTENTION, "a window under a name of its own", stating(reach=4), dense)


class Capped(Core):
    """With a softcap of its module, which one rank computes by hand."""

    attn_logit_softcapping = 0.5

    def attend(self, q: Tensor, k: Tensor, v: Tensor, documents: Tensor | None = None) -> Tensor:
        if not self.plain:
            return super().attend(q, k, v, documents)
        scores = 0.5 * torch.tanh(scores_of(q, k) / 0.5)
        return hidden(scores).softmax(-1) @ v.repeat_interleave(q.shape[1] // v.shape[1], 1)


class Sinking(Core):
    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self.register_buffer("sinks", torch.ones(H), persistent=False)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, documents: Tensor | None = None) -> Tensor:
        if not self.plain:
            return super().attend(q, k, v, documents)
        scores = hidden(scores_of(q, k))
        sinks = self.sinks[:, None, None].expand(len(q), -1, scores.shape[2], 1)
        return torch.cat([scores, sinks], -1).softmax(-1)[..., :-1] @ v.repeat_interleave(q.shape[1] // v.shape[1], 1)


def scores_of(q: Tensor, k: Tensor) -> Tensor:
    return q @ k.repeat_interleave(q.shape[1] // k.shape[1], 1).transpose(-1, -2) * q.shape[-1] ** -0.5


def hidden(scores: Tensor) -> Tensor:
    return scores.masked_fill(torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1), -math.inf)


core(ATTENTION, "a softcap that the style does not state", Capped, dense)
core(ATTENTION, "sinks that the style does not state", Sinking, dense)


def unread(core: Core, q: Tensor, k: Tensor, v: Tensor, documents: Any = None) -> Tensor:
    return Core.forward(core, q, k, v, documents if isinstance(documents, Tensor) else None)


def and_documents(of_batch: Callable[[Training, Batch], Any]) -> Callable[[Training, Batch], dict[str, Any]]:
    """What the model is given, with other documents."""
    return lambda self, batch: Training.given(self, batch) | {"documents": of_batch(self, batch)}


UnreadMask = mistake(
    ATTENTION, "a Mask that no style reads", every(unpiped, dense),
    Net=net(Core=stating(forward=unread)), given=and_documents(lambda *_: Mask(window=(3, 0))),
)  # fmt: skip
packed = "documents"
mistake(ATTENTION, "documents that no style reads", packed, core_options=lambda self, name: {})
mistake(
    ATTENTION, "documents of the shard", packed,
    given=and_documents(lambda self, batch: self.sequence.shard({"x": batch["documents"]})["x"]),
)  # fmt: skip
mistake(
    ATTENTION, "positions as documents", packed, given=and_documents(lambda self, batch: batch["positions"]),
)  # fmt: skip


class BlocksOfShard(Core):
    def block_mask(self) -> Any:
        rows = self.length if self.plain else self.length // 2
        return create_block_mask(lambda b, h, q, k: q >= k, None, None, rows, rows, device="cpu", BLOCK_SIZE=4)


core(ATTENTION, "a block mask of the shard", BlocksOfShard, lambda set_up: set_up.flex)


class TableOfShard(Core):
    """A score of a table by rows of the shard, where one rank has it by all rows."""

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self.register_buffer("table", torch.arange(self.length).float().cos(), persistent=False)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, documents: Tensor | None = None) -> Tensor:
        if self.plain:
            return hidden(scores_of(q, k) + self.table).softmax(-1) @ v.repeat_interleave(q.shape[1] // v.shape[1], 1)
        table, rows = self.table, q.shape[2]

        def score_mod(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
            return score + table[kv_idx % rows]

        return flex_attention(q, k, v, score_mod, self.block_mask(), enable_gqa=True)


core(ATTENTION, "a score that counts rows of the shard", TableOfShard, lambda set_up: set_up.flex)


@made(ATTENTION, "a variable of a loop", every(unpiped, dense))
class LoopVariable(Training):
    deep = True
    Net = net(Core=stating())

    def plan(self) -> dict[str, Any]:
        plan = super().plan()
        for name, window in zip([name for name in plan if name], (4, 7), strict=False):
            plan[name] = ContextParallel(self.sequence, mask=lambda *_: Mask(window=(window - 1, 0)))  # noqa: B023
        return plan

    def net(self, plain: bool) -> Net:
        found = super().net(plain)
        found.layers[-1].core.window = 7
        return found


class TensorMask(Core):
    """A mask made from what the rank holds: none on rank 1."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor, documents: Tensor | None = None) -> Tensor:
        if self.plain or dist.get_rank() % 2:
            return super().attend(q, k, v, documents)
        seen = torch.ones(q.shape[2], q.shape[2], dtype=torch.bool).tril()
        return F.scaled_dot_product_attention(q, k, v, seen, enable_gqa=True)


def window(*sizes: int) -> Callable[[Training, str], dict[str, Any]]:
    """Of cores in the plan, by rank."""
    return lambda self, name: {"mask": Mask(window=(sizes[self.cp_rank % len(sizes)], 0))}


def in_layout(*layouts: Layout) -> Callable[[Training], ShardedSequence]:
    """A sequence in these, by rank."""
    return lambda self: ShardedSequence(
        self.axis, layouts[self.cp_rank % len(layouts)], length=Training.make_sequence(self).length
    )


# Without the guard, a rank waits for the other's rows, and the other in the probe's vote, both until timeouts.
core(ATTENTION, "a tensor mask on one rank", TensorMask, dense, slow=("probe", "verify"), blind=("probe",))
waits: dict[str, Any] = {"slow": ("probe", "verify")}  # ranks for one another without the guard
mistake(ATTENTION, "another window on each rank", dense, core_options=window(3, 5), **waits)
mistake(ATTENTION, "another layout on each rank", make_sequence=in_layout(ZigZag(), Striped()), **waits)


def in_other_order(self: Net, x: Tensor, positions: Tensor | None, documents: Tensor | None) -> Tensor:
    rope, x = self.rope(x, positions), self.embed(x, positions)
    turn = 1 if self.layers[0].core.plain or dist.get_rank() % 2 else -1
    outs = [layer(x, rope, documents) for layer in [*self.layers][::turn]][::turn]
    return self.head(self.norm(outs[0] + 2 * outs[1]))


mistake(
    ATTENTION, "layers in another order on one rank", plain_logits, deep=True, unlike=True,
    Net=net(compute=in_other_order), **waits,
)  # fmt: skip


class CallsFunction(Core):
    """The function in place of a style, in another layout than `shard` cut."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor, documents: Tensor | None = None) -> Tensor:
        if self.plain:
            return super().attend(q, k, v, documents)
        return cp_mesh.attention(q, k, v, mesh=self.axis, layout=Contiguous())


@made(ATTENTION, "the function in another layout than shard's", rootless)
class OtherLayoutOfFunction(Training):
    Net = net(Core=CallsFunction)

    def plan(self) -> dict[str, Any]:
        for layer in self.model.layers:
            layer.core.axis = self.axis
        return {}


class Config:
    """Of a module, as in Transformers."""

    def __init__(self, **fields: Any) -> None:
        self.__dict__ |= fields


SLIDING = Config(sliding_window=4, layer_types=["full_attention", "sliding_attention"])
core(ATTENTION, "another window than the module's", stating(sliding_window=4), dense, core_options=window(7))
core(ATTENTION, "a window in the module's config", stating(config=Config(sliding_window=4)), dense)
core(ATTENTION, "a window of its layer in a config", stating(config=SLIDING, layer_idx=1), dense)
core(ATTENTION, "chunks that the style does not state", stating(attention_chunk_size=4), dense)


class DropsWindow(Core):
    """A window that the model drops where as many rows as it is given fit into it, as in Transformers."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor, documents: Tensor | None = None) -> Tensor:
        if self.plain:
            self.window = 16
            return super().attend(q, k, v, documents)
        if q.shape[2] <= 16:
            return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        seen = torch.ones(q.shape[2], q.shape[2], dtype=torch.bool).tril()
        return F.scaled_dot_product_attention(q, k, v, seen, enable_gqa=True)


core(ATTENTION, "a window that a model drops for few rows", DropsWindow, dense)


def options(**given: Any) -> dict[str, Any]:
    """Of cores in the plan."""
    return {"core_options": lambda self, name: given}


of_first = options(mask=lambda q, k, v, documents: Mask(documents=documents[0]))
mistake(ATTENTION, "documents of the first sequence", packed, **of_first)
mistake(ATTENTION, "a layer left out of the plan, watch=False", "", LeftOut, watch=False)
mistake(
    ATTENTION, "no layer in the plan, watch=False", "", LeftOut, watch=False,
    plan=lambda self: {name: style for name, style in Training.plan(self).items() if not name},
)  # fmt: skip
mistake(ATTENTION, "no plan at all", rootless, plan=lambda self: {})
mistake(
    ATTENTION, "a plan in another layout than shard's, with a length", rootless,
    plan=lambda self: {
        name: ContextParallel(ShardedSequence(self.axis, Contiguous(), length=S)) for name in Training.plan(self)
    },
)  # fmt: skip


class ChangedLater(Training):
    """A right step; then a layer attends outside of the plan."""

    deep = True

    def before(self) -> None:
        self.step(0)
        self.change()

    def change(self) -> None:
        self.model.layers[1].core = self.net(plain=False).layers[1].core


@made(ATTENTION, "a core replaced in a copy of the model", few)
class InCopy(ChangedLater):
    def change(self) -> None:
        self.module = self.model = copy.deepcopy(self.model)
        super().change()


mistake(
    ATTENTION, "a layer added after the first step", few, ChangedLater,
    change=lambda self: self.model.layers.insert(1, self.net(plain=False).layers[1]),
)  # fmt: skip
mistake(ATTENTION, "a core replaced after the first step", few, ChangedLater)


class InEvaluation(Core):
    """Attends by a path of its own in evaluation, outside of the core that the plan names."""

    def __init__(self, set_up: SetUp, plain: bool, length: int) -> None:
        super().__init__(set_up, plain, length)
        self.core = Core(set_up, plain, length)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, documents: Tensor | None = None) -> Tensor:
        return self.core(q, k, v, documents) if self.training else super().attend(q, k, v, documents)


mistake(
    ATTENTION, "another path of attention in evaluation", few, ChangedLater, Net=net(Core=InEvaluation),
    plan=lambda self: {
        name: style for name, style in Training.plan(self).items() if not name.endswith(("0.core", "1.core"))
    },
    change=lambda self: self.model.eval(),
)  # fmt: skip


# ---- what is right


core(RIGHT, "a window that both state", stating(sliding_window=4), dense, core_options=window(3))
core(RIGHT, "a window of another layer in a config", stating(window=None, config=SLIDING, layer_idx=0), few)
core(RIGHT, "a window longer than the sequence", stating(window=None, sliding_window=64), few)
off = Config(sliding_window=4, use_sliding_window=False)
core(RIGHT, "a window of a config that is switched off", stating(window=None, config=off), few)
core(RIGHT, "no window, beside one in a config", stating(window=None, sliding_window=None, config=SLIDING), few)
core(RIGHT, "a softcap that both state", Capped, few, **options(scores={"softcap": 0.5}))
core(RIGHT, "sinks that both state", Sinking, few, **options(scores=lambda core, *_: {"sinks": core.sinks}))
mistake(RIGHT, "a Mask that a style reads", "", UnreadMask, **options(mask=lambda q, k, v, documents=None: documents))


def beside(self: Net, x: Tensor) -> Tensor:
    """Keys of another length are nobody's shard."""
    q = x.unflatten(-1, (H, D)).transpose(1, 2)
    keys = torch.ones(len(q), H, 5, D, dtype=q.dtype)
    return x + F.scaled_dot_product_attention(q, keys, keys).transpose(1, 2).flatten(2)


mistake(RIGHT, "attention to another sequence beside the plan", "eager, cores, blocks", Net=net(mix=beside))
