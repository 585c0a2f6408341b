"""What attention is told: windows, masks, layouts."""

from __future__ import annotations

import copy
import math
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from model import D, H
from set_ups import Batch, Core, Net, S, SetUp, Training
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

import cp_mesh
from cp_mesh import ContextParallel, Contiguous, Mask, ShardedSequence, Striped, ZigZag
from mistaken.listing import (
    BLOCKS,
    EAGER,
    RIGHT,
    ROOTLESS,
    among,
    core,
    dense,
    made,
    rootless,
    unpiped,
    with_flex,
)

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


class MaskedCore(Core):
    def forward(self, q: Tensor, k: Tensor, v: Tensor, documents: Any = None) -> Tensor:
        return Core.forward(self, q, k, v, documents if isinstance(documents, Tensor) else None)


@made(ATTENTION, "a Mask that no style reads")
class UnreadMask(Training):
    """Of the documents, or of a window."""

    Net = type("Net", (Net,), {"Core": stating(forward=MaskedCore.forward)})

    @classmethod
    def of(cls, set_up: SetUp) -> bool:
        return unpiped(set_up) and dense(set_up)

    def given(self, batch: Batch) -> dict[str, Any]:
        return super().given(batch) | {"documents": Mask(window=(3, 0))}


@made(ATTENTION, "documents that no style reads")
class UnreadDocuments(Training):
    @classmethod
    def of(cls, set_up: SetUp) -> bool:
        return set_up.documents

    def core_options(self, name: str) -> dict[str, Any]:
        return {}


@made(ATTENTION, "documents of the shard")
class ShardedDocuments(UnreadDocuments):
    core_options = Training.core_options

    def given(self, batch: Batch) -> dict[str, Any]:
        return super().given(batch) | {"documents": self.sequence.shard({"x": batch["documents"]})["x"]}


@made(ATTENTION, "positions as documents")
class PositionsAsDocuments(ShardedDocuments):
    def given(self, batch: Batch) -> dict[str, Any]:
        return Training.given(self, batch) | {"documents": batch["positions"]}


class BlocksOfShard(Core):
    def block_mask(self) -> Any:
        rows = self.length if self.plain else self.length // 2
        return create_block_mask(lambda b, h, q, k: q >= k, None, None, rows, rows, device="cpu", BLOCK_SIZE=4)


core(ATTENTION, "a block mask of the shard", BlocksOfShard, with_flex)


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


core(ATTENTION, "a score that counts rows of the shard", TableOfShard, with_flex)


@made(ATTENTION, "a variable of a loop")
class LoopVariable(Training):
    deep = True
    Net = type("Net", (Net,), {"Core": stating()})

    @classmethod
    def of(cls, set_up: SetUp) -> bool:
        return dense(set_up) and unpiped(set_up)

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


class Waits(Training):
    """Ranks wait for one another without the guard."""

    slow = ("probe", "verify")


class WaitsForProbe(Waits):
    """Without the guard, a rank waits for the other's rows, and the other in the probe's vote, both until timeouts."""

    blind = ("probe",)


core(ATTENTION, "a tensor mask on one rank", TensorMask, dense, WaitsForProbe)


@made(ATTENTION, "another window on each rank")
class OtherWindows(Waits):
    of = staticmethod(dense)

    def core_options(self, name: str) -> dict[str, Any]:
        return {"mask": Mask(window=(3 + 2 * self.cp_rank, 0))}


@made(ATTENTION, "another layout on each rank")
class OtherLayouts(Waits):
    def make_sequence(self) -> ShardedSequence:
        length = super().make_sequence().length
        return ShardedSequence(self.axis, Striped() if self.cp_rank else ZigZag(), length=length)


@made(ATTENTION, "layers in another order on one rank")
class OtherOrder(Waits):
    deep = unlike = True

    class Net(Net):
        def compute(self, x: Tensor, positions: Tensor | None, documents: Tensor | None) -> Tensor:
            rope = self.rope(x, positions)
            x = self.embed(x, positions)
            layers = [*self.layers]
            if self.layers[0].core.plain or dist.get_rank() % 2:
                outs = [layer(x, rope, documents) for layer in layers]
            else:
                outs = [layer(x, rope, documents) for layer in layers[::-1]][::-1]
            return self.head(self.norm(outs[0] + 2 * outs[1]))

    @classmethod
    def of(cls, set_up: SetUp) -> bool:
        return unpiped(set_up) and set_up.beside != "tp"


class CallsFunction(Core):
    """The function in place of a style, in another layout than `shard` cut."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor, documents: Tensor | None = None) -> Tensor:
        if self.plain:
            return super().attend(q, k, v, documents)
        return cp_mesh.attention(q, k, v, mesh=self.axis, layout=Contiguous())


@made(ATTENTION, "the function in another layout than shard's")
class OtherLayoutOfFunction(Training):
    Net = type("Net", (Net,), {"Core": CallsFunction})

    @classmethod
    def of(cls, set_up: SetUp) -> bool:
        return not set_up.root

    def plan(self) -> dict[str, Any]:
        for layer in self.model.layers:
            layer.core.axis = self.axis
        return {}


class Config:
    """Of a module, as in Transformers."""

    def __init__(self, **fields: Any) -> None:
        self.__dict__ |= fields


class OtherWindow(Training):
    def core_options(self, name: str) -> dict[str, Any]:
        return {"mask": Mask(window=(7, 0))}


SLIDING = Config(sliding_window=4, layer_types=["full_attention", "sliding_attention"])
core(ATTENTION, "another window than the module's", stating(sliding_window=4), dense, OtherWindow)
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


@made(ATTENTION, "documents of the first sequence")
class FirstDocuments(UnreadDocuments):
    def core_options(self, name: str) -> dict[str, Any]:
        return {"mask": lambda q, k, v, documents: Mask(documents=documents[0])}


@made(ATTENTION, "a layer left out of the plan, watch=False")
class LeftOutUnwatched(LeftOut):
    watch = False


@made(ATTENTION, "no layer in the plan, watch=False")
class Unplanned(LeftOutUnwatched):
    def plan(self) -> dict[str, Any]:
        return {name: style for name, style in Training.plan(self).items() if not name}


@made(ATTENTION, "no plan at all")
class NoPlan(Training):
    @classmethod
    def of(cls, set_up: SetUp) -> bool:
        return rootless(set_up)

    def plan(self) -> dict[str, Any]:
        return {}


@made(ATTENTION, "a plan in another layout than shard's, with a length")
class OtherLayoutOfPlan(NoPlan):
    def plan(self) -> dict[str, Any]:
        other = ShardedSequence(self.axis, Contiguous(), length=S)
        return {name: ContextParallel(other) for name in Training.plan(self)}


class ChangedLater(Training):
    """A right step; then a layer attends outside of the plan."""

    deep = True
    of = among(EAGER, ROOTLESS)

    def before(self) -> None:
        self.step(0)
        self.change()

    def change(self) -> None:
        self.model.layers[1].core = self.net(plain=False).layers[1].core


@made(ATTENTION, "a core replaced in a copy of the model")
class InCopy(ChangedLater):
    def change(self) -> None:
        self.module = self.model = copy.deepcopy(self.model)
        super().change()


@made(ATTENTION, "a layer added after the first step")
class AddedLayer(ChangedLater):
    def change(self) -> None:
        self.model.layers.insert(1, self.net(plain=False).layers[1])


made(ATTENTION, "a core replaced after the first step")(ChangedLater)


class InEvaluation(Core):
    """Attends by a path of its own in evaluation, outside of the core that the plan names."""

    def __init__(self, set_up: SetUp, plain: bool, length: int) -> None:
        super().__init__(set_up, plain, length)
        self.core = Core(set_up, plain, length)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, documents: Tensor | None = None) -> Tensor:
        return self.core(q, k, v, documents) if self.training else super().attend(q, k, v, documents)


@made(ATTENTION, "another path of attention in evaluation")
class OtherPath(ChangedLater):
    Net = type("Net", (Net,), {"Core": InEvaluation})

    def plan(self) -> dict[str, Any]:
        return {name: style for name, style in super().plan().items() if not name.endswith(("0.core", "1.core"))}

    def change(self) -> None:
        self.model.eval()


# ---- what is right


class WithWindow(Training):
    of = staticmethod(dense)

    def core_options(self, name: str) -> dict[str, Any]:
        return {"mask": Mask(window=(3, 0))}


def options(**given: Any) -> type[Training]:
    return type("WithOptions", (Training,), {"core_options": lambda self, name: given})


core(RIGHT, "a window that both state", stating(sliding_window=4), dense, WithWindow)
few = among(EAGER, ROOTLESS)
core(RIGHT, "a window of another layer in a config", stating(window=None, config=SLIDING, layer_idx=0), few)
core(RIGHT, "a window longer than the sequence", stating(window=None, sliding_window=64), few)
off = Config(sliding_window=4, use_sliding_window=False)
core(RIGHT, "a window of a config that is switched off", stating(window=None, config=off), few)
core(RIGHT, "no window, beside one in a config", stating(window=None, sliding_window=None, config=SLIDING), few)
core(RIGHT, "a softcap that both state", Capped, few, options(scores={"softcap": 0.5}))
core(RIGHT, "sinks that both state", Sinking, few, options(scores=lambda core, *_: {"sinks": core.sinks}))


@made(RIGHT, "a Mask that a style reads")
class ReadMask(UnreadMask):
    def core_options(self, name: str) -> dict[str, Any]:
        return {"mask": lambda q, k, v, documents=None: documents}


@made(RIGHT, "attention to another sequence beside the plan")
class ToAnother(Training):
    """Keys of another length are nobody's shard."""

    of = among(EAGER, ROOTLESS, BLOCKS)

    class Net(Net):
        def mix(self, x: Tensor) -> Tensor:
            q = x.unflatten(-1, (H, D)).transpose(1, 2)
            keys = torch.ones(len(q), H, 5, D, dtype=q.dtype)
            return x + F.scaled_dot_product_attention(q, keys, keys).transpose(1, 2).flatten(2)
