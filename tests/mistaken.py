"""Mistakes of training set-ups: each overrides one part of what `set_ups.Training` does right.

Their names, by group, are rows of docs/results/mistakes.md: what docs/guard.md says is caught, what it says is not, and
what users' models did in trials.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, ClassVar

import torch
import torch.distributed as dist
import torch.nn.functional as F
from model import C, D, H, K, overlapped_plan, rotate
from set_ups import RATE, B, Batch, Core, Experts, Net, S, SetUp, Training, batch_of, local, turns
from torch import Tensor, nn
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

import cp_mesh
from cp_mesh import ContextParallel, Contiguous, Mask, ShardedSequence, Striped, ZigZag

MISTAKES: dict[str, type[Training]] = {"right": Training}
GROUPS: dict[str, list[str]] = {}


def made(group: str, name: str) -> Callable[[type[Training]], type[Training]]:
    """Lists a mistake under its group."""

    def listed(training: type[Training]) -> type[Training]:
        assert name not in MISTAKES, name
        MISTAKES[name] = training
        GROUPS.setdefault(group, []).append(name)
        return training

    return listed


def model(group: str, name: str, net: type[Net], **fields: Any) -> None:
    """Lists a mistake that is one of the model alone."""
    made(group, name)(type("OfModel", (Training,), {"Net": net, **fields}))


def core(group: str, name: str, kind: type[Core], of: Callable[[SetUp], bool], base: type[Training] = Training) -> None:
    """Lists a mistake that is one of the attention core alone."""
    fields = {"Net": type("Net", (Net,), {"Core": kind}), "of": staticmethod(of)}
    made(group, name)(type("OfCore", (base,), fields))


def dense(set_up: SetUp) -> bool:
    """Calls of `F.scaled_dot_product_attention` on whole sequences."""
    return not set_up.documents and not set_up.flex


def with_flex(set_up: SetUp) -> bool:
    return set_up.flex


def rootless(set_up: SetUp) -> bool:
    return not set_up.root


def rooted(set_up: SetUp) -> bool:
    return set_up.root


def with_logits(set_up: SetUp) -> bool:
    """The model returns logits, not what a head over tp computes them from."""
    return set_up.beside != "tp"


def unpiped(set_up: SetUp) -> bool:
    return set_up.beside != "pp"


def plain_logits(set_up: SetUp) -> bool:
    return with_logits(set_up) and unpiped(set_up)


# ---- batches

BATCHES = "Batches"


@made(BATCHES, "another batch on each rank")
class OtherBatches(Training):
    def batch(self, number: int, replica: int) -> Batch:
        return batch_of(S, self.cp_rank, self.set_up.documents)


@made(BATCHES, "batches that differ later")
class LaterBatches(Training):
    """The digest of a 64th batch is compared 64 to 192 batches later."""

    @classmethod
    def of(cls, set_up: SetUp) -> bool:  # minutes in all others
        return set_up in (SetUp(), SetUp(root=False), SetUp(compiled="whole"), SetUp(by="FSDP2", beside="dp"))

    def run(self, probe: bool = False) -> None:
        super().run(probe)
        self.at = "forward"
        with torch.no_grad():
            for number in range(1, 200):
                self.forward(self.given(batch_of(S, 2 * number + self.cp_rank, self.set_up.documents)))
        self.off = 1.0  # unlike batches in one step


@made(BATCHES, "another length on each rank")
class OtherLengths(Training):
    @classmethod
    def of(cls, set_up: SetUp) -> bool:
        return dense(set_up) and unpiped(set_up)

    def batch(self, number: int, replica: int) -> Batch:
        return batch_of(S + 8 * self.cp_rank, 0, self.set_up.documents)


@made(BATCHES, "another length later, one that was before")
class KnownLength(OtherLengths):
    steps = 3

    def batch(self, number: int, replica: int) -> Batch:
        return batch_of((S, S + 8, S + 8 * self.cp_rank)[number], 0, self.set_up.documents)

    def right(self, number: int, replica: int) -> Batch:
        return batch_of((S, S + 8, S)[number], 0, self.set_up.documents)


@made(BATCHES, "a replica without rows in the first step")
class EmptyReplica(Training):
    dp = True

    @classmethod
    def of(cls, set_up: SetUp) -> bool:
        return set_up.beside not in ("tp", "pp")

    def right(self, number: int, replica: int) -> Batch:
        whole = super().right(number, replica)
        return {name: x[: len(x) * (replica == 0)] for name, x in whole.items()}


@made(BATCHES, "whole inputs without a root")
class WholeInputs(Training):
    of = staticmethod(rootless)

    def given(self, batch: Batch) -> dict[str, Any]:
        return {"tokens": batch["tokens"], "positions": torch.arange(S)}


@made(BATCHES, "inputs sharded twice")
class ShardedTwice(Training):
    @classmethod
    def of(cls, set_up: SetUp) -> bool:
        return not set_up.documents

    def given(self, batch: Batch) -> dict[str, Any]:
        given = super().given(batch)
        return given | {"tokens": self.sequence.shard({"tokens": given["tokens"]})["tokens"]}


@made(BATCHES, "chunks of the tokens given to the root")
class Chunked(Training):
    @classmethod
    def of(cls, set_up: SetUp) -> bool:
        return set_up.root and not set_up.documents and unpiped(set_up)

    def given(self, batch: Batch) -> dict[str, Any]:
        return {"tokens": batch["tokens"].chunk(2, 1)[self.cp_rank]}


# ---- what attention is told

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
        documents = documents if isinstance(documents, Tensor) else None
        return super().forward(q, k, v, documents)


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


core(ATTENTION, "a tensor mask on one rank", TensorMask, dense)


@made(ATTENTION, "another window on each rank")
class OtherWindows(Training):
    of = staticmethod(dense)

    def core_options(self, name: str) -> dict[str, Any]:
        return {"mask": Mask(window=(3 + 2 * self.cp_rank, 0))}


@made(ATTENTION, "another layout on each rank")
class OtherLayouts(Training):
    def make_sequence(self) -> ShardedSequence:
        length = super().make_sequence().length
        return ShardedSequence(self.axis, Striped() if self.cp_rank else ZigZag(), length=length)


@made(ATTENTION, "layers in another order on one rank")
class OtherOrder(Training):
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


# ---- positions

POSITIONS = "Positions"


@made(POSITIONS, "positions that nobody gives")
class NoPositions(Training):
    """Counted by the model from 0, as the caller leaves them out and the root supplies none."""

    @classmethod
    def of(cls, set_up: SetUp) -> bool:
        return not set_up.documents

    def root_options(self) -> dict[str, Any]:
        return super().root_options() | {"positions": None}

    def given(self, batch: Batch) -> dict[str, Any]:
        given = super().given(batch)
        given.pop("positions", None)
        return given


@made(POSITIONS, "positions counted from 0 by the caller")
class CountedPositions(Training):
    @classmethod
    def of(cls, set_up: SetUp) -> bool:
        return not set_up.documents

    def given(self, batch: Batch) -> dict[str, Any]:
        positions = torch.arange(S // 2)
        return super().given(batch) | {"positions": positions if unpiped(self.set_up) else positions.expand(B, -1)}


class Short(Net):
    def extend(self) -> None:
        self.table = nn.Embedding(21, C)

    def embed(self, tokens: Tensor, positions: Tensor | None) -> Tensor:
        return self.embedding(tokens) + self.table(torch.arange(tokens.shape[1]) if positions is None else positions)


made(POSITIONS, "a table of positions too short for padding")(
    type("OfModel", (OtherLengths,), {"Net": Short, "length": 21, "batch": Training.batch})
)


class Counting(Net):
    """Its forward takes no positions: it counts them, from 0 in each shard."""

    def forward(self, tokens: Tensor, documents: Tensor | None = None) -> Tensor:
        return self.compute(tokens, None, documents)

    def extend(self) -> None:
        self.table, self.parameter = nn.Embedding(64, C), nn.Parameter(torch.zeros(1, 64, C))
        self.register_buffer("ids", torch.arange(64)[None], persistent=False)
        self.register_buffer("turns", turns(torch.arange(64)), persistent=False)
        unused = {"table", "parameter"} - {self.uses}
        for name in unused:
            delattr(self, name)

    uses: ClassVar[str] = ""


def unturned(net: Net, x: Tensor, positions: Tensor | None) -> Tensor:
    return torch.stack((torch.ones(1, D // 2), torch.zeros(1, D // 2)))


def counting(name: str, uses: str, **parts: Callable[..., Any]) -> None:
    """Lists a model that counts its positions: as a learned table, of which each rank then reads the same rows."""
    fields = {"uses": uses, **parts}
    model(POSITIONS, name, type("Net", (Counting,), fields), positioned=False)


def learned(name: str, read: Callable[[Any, Tensor], Tensor], uses: str = "table") -> None:
    def embed(self: Any, tokens: Tensor, positions: Tensor | None) -> Tensor:
        return self.embedding(tokens) + read(self, tokens)

    counting(name, uses, embed=embed, rope=unturned)


learned("counted: learned, arange", lambda net, x: net.table(torch.arange(x.shape[1])))
learned("counted: learned, a buffer of ids", lambda net, x: net.table(net.ids[:, : x.shape[1]]))
learned("counted: learned, its weight sliced", lambda net, x: net.table.weight[: x.shape[1]])
learned("counted: learned, a parameter sliced", lambda net, x: net.parameter[:, : x.shape[1]], "parameter")
learned("counted: learned, cumsum", lambda net, x: net.table(torch.ones_like(x).cumsum(1) - 1))
learned(
    "counted: learned, linspace", lambda net, x: net.table(torch.linspace(0, x.shape[1] - 1, x.shape[1]).round().int())
)
learned("counted: learned, a range of Python", lambda net, x: net.table(torch.tensor([*range(x.shape[1])])))
counting("counted: rotary, arange", "", rope=lambda self, x, positions: turns(torch.arange(x.shape[1])))
counting("counted: rotary, a table sliced", "", rope=lambda self, x, positions: self.turns[:, : x.shape[1]])


class TurningCore(Core):
    """Turns q and k itself; a subclass says by what."""

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self.register_buffer("turns", turns(torch.arange(64)), persistent=False)
        self.kept: dict[int, Tensor] = {}

    def attend(self, q: Tensor, k: Tensor, v: Tensor, documents: Tensor | None = None) -> Tensor:
        return super().attend(self.turned(q), self.turned(k), v, documents)

    def turned(self, x: Tensor) -> Tensor:
        return rotate(x, self.rope(x.shape[2]))

    def rope(self, rows: int) -> Tensor:
        raise NotImplementedError


def turning(name: str, **parts: Callable[..., Any]) -> None:
    core = type("Core", (TurningCore,), parts)
    counting(name, "", Core=core, rope=unturned)


def _kept(core: Any, rows: int) -> Tensor:
    if rows not in core.kept:
        core.kept[rows] = turns(torch.arange(rows))
    return core.kept[rows]


def _complex(core: Any, x: Tensor) -> Tensor:
    table = torch.complex(*core.turns.float())[: x.shape[2]]
    return torch.view_as_real(torch.view_as_complex(x.unflatten(-1, (-1, 2))) * table).flatten(-2)


turning("counted: in the core, a table sliced", rope=lambda core, rows: core.turns[:, :rows])
turning("counted: in the core, arange", rope=lambda core, rows: turns(torch.arange(rows)))
turning("counted: in the core, kept by length", rope=_kept)
turning("counted: in the core, narrow", rope=lambda core, rows: core.turns.narrow(1, 0, rows))
turning("counted: in the core, complex", turned=_complex)


class Ignoring(Net):
    def extend(self) -> None:
        self.register_buffer("turns", turns(torch.arange(64)), persistent=False)

    def rope(self, x: Tensor, positions: Tensor) -> Tensor:
        return self.turns[:, : positions.shape[-1]]


model(POSITIONS, "positions taken and ignored", Ignoring)


class Largest(Net):
    """Its base depends on the largest position, as that of dynamic NTK does."""

    def rope(self, x: Tensor, positions: Tensor) -> Tensor:
        return turns(positions, 0.3 / (1 + positions.max() / 8.0))


model(POSITIONS, "a base from the largest position", Largest)


class ByLength(Net):
    def rope(self, x: Tensor, positions: Tensor) -> Tensor:
        return turns(positions, 0.3 / (1 + positions.shape[-1] / 8.0))


model(POSITIONS, "a base from the number of rows", ByLength)


class Logarithmic(Core):
    def attend(self, q: Tensor, k: Tensor, v: Tensor, documents: Tensor | None = None) -> Tensor:
        return super().attend(q * math.log(q.shape[2]), k, v, documents)


model(POSITIONS, "a scale from the number of rows", type("Net", (Net,), {"Core": Logarithmic}))


# ---- other means of mixing tokens

MIXING = "Tokens mixed outside of the plan"


def mixing(name: str, mix: Callable[[Any, Tensor], Tensor], extend: Callable[[Any], None] = lambda self: None) -> None:
    model(MIXING, name, type("Net", (Net,), {"mix": mix, "extend": extend}))


def _attention(net: Any, x: Tensor) -> Tensor:
    q = x.unflatten(-1, (H, D)).transpose(1, 2)
    return x + (hidden(scores_of(q, q)).softmax(-1) @ q).transpose(1, 2).flatten(2)


def _linear_attention(net: Any, x: Tensor) -> Tensor:
    q = x.unflatten(-1, (H, D)).transpose(1, 2)
    mapped = F.elu(q) + 1
    weights = (mapped @ mapped.transpose(-1, -2)).tril()
    return x + ((weights @ q) / weights.sum(-1, keepdim=True)).transpose(1, 2).flatten(2)


def _conv(net: Any, x: Tensor) -> Tensor:
    return x + net.conv(F.pad(x.transpose(1, 2), (2, 0))).transpose(1, 2)


def _batch_norm(net: Any, x: Tensor) -> Tensor:
    return net.bn(x.flatten(0, 1)).view_as(x)


mixing("matmul and softmax", _attention)
mixing("linear attention", _linear_attention)
mixing("a convolution", _conv, lambda net: setattr(net, "conv", nn.Conv1d(C, C, 3, groups=C)))
mixing("the mean of tokens", lambda net, x: x - x.mean(1, keepdim=True))
mixing("the first token", lambda net, x: x + x[:, :1])
mixing("cumsum", lambda net, x: x + x.cumsum(1) / 8)
mixing("a GRU", lambda net, x: x + net.gru(x)[0], lambda net: setattr(net, "gru", nn.GRU(C, C, batch_first=True)))
mixing("a root mean square of rows", lambda net, x: x / x.square().mean(1, keepdim=True).sqrt())
mixing("roll", lambda net, x: x + x.roll(1, 1))
mixing("a shift by padding", lambda net, x: x + F.pad(x, (0, 0, 1, 0))[:, :-1])
mixing("batch norm", _batch_norm, lambda net: setattr(net, "bn", nn.BatchNorm1d(C)))


class ExpertChoice(Experts):
    """Each expert takes the tokens that it likes best, of those that it is given."""

    def weigh(self, scores: Tensor) -> Tensor:
        return scores * (scores >= scores.topk(max(1, scores.shape[1] // 2), dim=1).values[:, -1:])


class Capacity(Experts):
    """An expert drops the tokens that come after its first ones."""

    def weigh(self, scores: Tensor) -> Tensor:
        weights = super().weigh(scores)
        return weights * ((weights > 0).cumsum(1) <= scores.shape[1] // 3)


model(MIXING, "expert choice", type("Net", (Net,), {"Experts": ExpertChoice}), of=staticmethod(lambda s: s.moe))
model(MIXING, "a capacity of experts", type("Net", (Net,), {"Experts": Capacity}), of=staticmethod(lambda s: s.moe))


class Shifted(Core):
    def attend(self, q: Tensor, k: Tensor, v: Tensor, documents: Tensor | None = None) -> Tensor:
        return super().attend(q, F.pad(k, (0, 0, 1, 0))[:, :, :-1], v, documents)


class Registers(Core):
    """Rows in front of q, k and v, which are cut off again."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor, documents: Tensor | None = None) -> Tensor:
        q, k, v = (torch.cat([torch.ones_like(x[:, :, :3]), x], 2) for x in (q, k, v))
        return super().attend(q, k, v)[:, :, 3:]


class Chunks(Core):
    """Attention within four rows, by a reshape."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor, documents: Tensor | None = None) -> Tensor:
        cut = (x.unflatten(2, (-1, 4)).transpose(1, 2).flatten(0, 1) for x in (q, k, v))
        return super().attend(*cut).unflatten(0, (len(q), -1)).transpose(1, 2).flatten(2, 3)


class OverHeads(Core):
    def attend(self, q: Tensor, k: Tensor, v: Tensor, documents: Tensor | None = None) -> Tensor:
        k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
        return super().attend(*(x.transpose(1, 2) for x in (q, k, v))).transpose(1, 2)


class Context(Core):
    """Keys of another sequence, as many as a rank has rows, or fewer."""

    num: ClassVar[int] = S // 2

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        whole = torch.randn(1, H, self.num, D, generator=torch.Generator().manual_seed(3))
        self.register_buffer("context", whole, persistent=False)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, documents: Tensor | None = None) -> Tensor:
        context = self.context[:, : q.shape[1]].expand(len(q), -1, -1, -1)
        extra = 0 * (k.sum() + v.sum())
        return F.scaled_dot_product_attention(q, context, context + extra)


class Crossing(Training):
    of = staticmethod(dense)

    def core_options(self, name: str) -> dict[str, Any]:
        return {"mask": Mask(causal=False)}


model(MIXING, "keys shifted in the core", type("Net", (Net,), {"Core": Shifted}))
core(MIXING, "registers before q, k and v in the core", Registers, dense)
core(MIXING, "chunks by a reshape in the core", Chunks, dense)
core(MIXING, "a forgotten transpose in the core", OverHeads, dense)
core(MIXING, "a context in the core", type("Context", (Context,), {"num": 5}), dense, Crossing)
core(
    MIXING,
    "a context as long as the shard in the core",
    Context,
    lambda set_up: dense(set_up) and set_up.beside != "tp",  # whose ranks have other heads of it
    Crossing,
)


# ---- labels and the loss

LABELS = "Labels and the loss"


class Labelled(Training):
    def whole_labels(self, batch: Batch) -> Tensor:
        return batch["labels"]


@made(LABELS, "labels by chunk")
class ByChunk(Labelled):
    def labels(self, batch: Batch) -> Tensor:
        return self.whole_labels(batch).chunk(2, 1)[self.cp_rank]


@made(LABELS, "labels of another layout")
class OtherLayout(Labelled):
    def labels(self, batch: Batch) -> Tensor:
        return ShardedSequence(self.axis, Striped()).shard({"labels": batch["labels"]})["labels"]


@made(LABELS, "labels of another layout, copied")
class OtherLayoutCopied(OtherLayout):
    def labels(self, batch: Batch) -> Tensor:
        return super().labels(batch).clone()


@made(LABELS, "labels of another rank")
class OtherRank(Labelled):
    def labels(self, batch: Batch) -> Tensor:
        at = ZigZag().positions(S, 2, 1 - self.cp_rank)
        return batch["labels"][:, at]


@made(LABELS, "labels shifted after sharding")
class ShiftedAfter(Labelled):
    def labels(self, batch: Batch) -> Tensor:
        tokens = self.sequence.shard({"tokens": batch["tokens"]})["tokens"]
        return torch.cat([tokens[:, 1:], torch.full_like(tokens[:, :1], -100)], 1)


@made(LABELS, "labels not shifted")
class NotShifted(Labelled):
    def labels(self, batch: Batch) -> Tensor:
        return self.sequence.shard({"labels": batch["tokens"]})["labels"]


@made(LABELS, "labels shifted twice")
class ShiftedTwice(Labelled):
    def labels(self, batch: Batch) -> Tensor:
        labels = batch["labels"]
        return self.sequence.shard({"labels": torch.cat([labels[:, 1:], labels[:, -1:]], 1)})["labels"]


@made(LABELS, "labels of another batch on one rank")
class OtherLabelsOnOne(Labelled):
    def labels(self, batch: Batch) -> Tensor:
        return super().labels(batch if self.cp_rank == 0 else batch_of(S, 7, False))


@made(LABELS, "labels of another batch on every rank")
class OtherLabels(Labelled):
    def labels(self, batch: Batch) -> Tensor:
        return super().labels(batch_of(S, 7, False))


@made(LABELS, "labels under another ignore_index")
class OtherIndex(Labelled):
    def loss(self, logits: Any, labels: Tensor, **options: Any) -> Tensor:
        return super().loss(logits, labels, ignore_index=-1, **options)


@made(LABELS, "the last row of a shard")
class LastRow(Labelled):
    of = staticmethod(plain_logits)

    def loss(self, logits: Any, labels: Tensor, **options: Any) -> Tensor:
        return super().loss(logits[:, -1], labels[:, -1].clamp(min=0), **options)


@made(LABELS, "the last row of a shard, by F.cross_entropy")
class LastRowAlone(Labelled):
    of = staticmethod(plain_logits)

    def loss(self, logits: Any, labels: Tensor, **options: Any) -> Tensor:
        return F.cross_entropy(logits[:, -1], labels[:, -1].clamp(min=0))


@made(LABELS, "the mean of a rank's rows")
class OwnMean(Labelled):
    of = staticmethod(with_logits)

    def loss(self, logits: Any, labels: Tensor, **options: Any) -> Tensor:
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


@made(LABELS, "a loss in the model from labels among its inputs")
class LossInModel(Labelled):
    class Net(Net):
        def forward(self, tokens: Tensor, positions: Any = None, documents: Any = None, labels: Any = None) -> Tensor:
            logits = self.compute(tokens, positions, documents)
            return logits if labels is None else F.cross_entropy(logits.flatten(0, 1), labels.flatten())

    of = staticmethod(plain_logits)

    def root_options(self) -> dict[str, Any]:
        return super().root_options() | {"inputs": ("tokens", "labels")}

    def given(self, batch: Batch) -> dict[str, Any]:
        return super().given(batch) | {"labels": batch["labels"] if self.set_up.root else self.labels(batch)}

    def loss(self, logits: Any, labels: Tensor, **options: Any) -> Tensor:
        return logits

    def of_one_rank(self, plain: Net, whole: dict[str, Any]) -> Tensor:
        return plain(**whole)


@made(LABELS, "gathered logits counted on every rank")
class Gathered(Labelled):
    of = staticmethod(plain_logits)

    def root_options(self) -> dict[str, Any]:
        return super().root_options() | {"gather_output": True}

    def forward(self, given: dict[str, Any]) -> Any:
        found = super().forward(given)
        return found if self.set_up.root else self.sequence.gather(found)

    def labels(self, batch: Batch) -> Tensor:
        return batch["labels"]


@made(LABELS, "wrong labels of a loss compiled with the model")
class CompiledLoss(ByChunk):
    @classmethod
    def of(cls, set_up: SetUp) -> bool:
        return set_up.compiled == "whole"

    def step(self, number: int) -> None:
        plain = Training.loss

        def both(given: dict[str, Any], labels: Tensor) -> Tensor:
            return plain(self, self.module(**given), labels)

        compiled = torch.compile(both, backend="eager")
        batch = self.batch(number, self.replica)
        loss = compiled(self.given(batch), self.labels(batch))
        self.at = "backward"
        loss.backward()
        self.reduce()
        self.at = "step"
        self.take_step()
        self.off = self.compare(number, [loss])


@made(LABELS, "a loss over cp alone")
class LossOverCp(Labelled):
    dp = True

    @classmethod
    def of(cls, set_up: SetUp) -> bool:
        return set_up.beside not in ("tp", "pp")

    @property
    def counted(self) -> Any:
        return self.axis


# ---- gradients

GRADIENTS = "Gradients"


def by_hand(set_up: SetUp) -> bool:
    return set_up.by == "hand"


@made(GRADIENTS, "gradients over cp alone")
class OverCp(LossOverCp):
    counted = Training.counted

    @property
    def reduced(self) -> Any:
        return self.axis


@made(GRADIENTS, "gradients over dp alone")
class OverDp(OverCp):
    @property
    def reduced(self) -> Any:
        return self.grid["dp"]


@made(GRADIENTS, "gradients that are averaged")
class Averaged(Training):
    sums = False

    @classmethod
    def of(cls, set_up: SetUp) -> bool:
        return set_up.by != "hand"


@made(GRADIENTS, "gradients that are averaged by hand")
class AveragedByHand(Training):
    of = staticmethod(by_hand)

    def reduce(self) -> None:
        super().reduce()
        for x in self.model.parameters():
            local(x.grad).div_(self.reduced.size())


@made(GRADIENTS, "gradients that nobody reduces")
class Unreduced(Training):
    of = staticmethod(by_hand)

    def reduce(self) -> None:
        pass


@made(GRADIENTS, "an optimizer in the backward")
class InBackward(Unreduced):
    """Its steps are before the sum; gradients are kept to be looked at."""

    def build(self) -> None:
        super().build()
        for x in self.model.parameters():
            x.register_post_accumulate_grad_hook(self.take_own_step)

    def take_own_step(self, x: Tensor) -> None:
        self.at = "step"
        torch.optim.SGD([x], RATE).step()

    def take_step(self) -> None:
        pass


@made(GRADIENTS, "other weights on each rank")
class OtherWeights(Training):
    of = staticmethod(by_hand)

    def prepare(self, model: Net) -> None:
        generator = torch.Generator().manual_seed(self.rank)
        for x in model.layers.parameters():
            x.data += 0.1 * torch.randn(x.shape, generator=generator)


@made(GRADIENTS, "weights frozen on one rank")
class FrozenOnOne(Training):
    """Every weight before the keys of the first layer: their attention wants no gradient of q, k and v there."""

    @classmethod
    def of(cls, set_up: SetUp) -> bool:
        return set_up in (SetUp(), SetUp(root=False))  # it waits in others too

    def prepare(self, model: Net) -> None:
        if self.cp_rank:
            for name, x in model.named_parameters():
                x.requires_grad_(not name.startswith(("embedding", "layers.0.norm", "layers.0.w")))


@made(GRADIENTS, "one backward more on one rank")
class OneMore(Training):
    @classmethod
    def of(cls, set_up: SetUp) -> bool:
        return set_up in (SetUp(), SetUp(root=False), SetUp(by="FSDP2", beside="dp"))  # it waits in others too

    def backward(self, loss: Tensor) -> None:
        loss.backward(retain_graph=self.cp_rank == 0)
        if self.cp_rank == 0:
            loss.backward()


@made(GRADIENTS, "two models of which one has a mean")
class TwoModels(Training):
    """The sum of their losses has one backward."""

    @classmethod
    def of(cls, set_up: SetUp) -> bool:
        return set_up.beside not in ("tp", "pp") and set_up.by == "hand"

    def build(self) -> None:
        super().build()
        self.other = Training(self.rank, self.set_up)
        self.other.build()

    def backward(self, loss: Tensor) -> None:
        batch = self.batch(0, self.replica)
        logits = self.other.forward(self.other.given(batch))
        (loss + F.cross_entropy(logits.flatten(0, 1), self.labels(batch).flatten())).backward()

    def take_step(self) -> None:
        self.other.reduce()
        self.other.optimizer.step()
        super().take_step()

    def compare(self, number: int, losses: list[Tensor]) -> float:
        return self.other.compare(number, [])


# ---- over tp, and in pipelines

BESIDE = "Tensor parallelism and pipelines"


def over_tp(set_up: SetUp) -> bool:
    return set_up.beside == "tp"


def piped(set_up: SetUp) -> bool:
    return set_up.beside == "pp"


@made(BESIDE, "norms without SequenceParallel")
class NoNorms(Training):
    of = staticmethod(over_tp)

    def tp_plan(self) -> dict[str, Any]:
        return {name: style for name, style in overlapped_plan("reduce_scatter").items() if "norm" not in name}


@made(BESIDE, "styles in two modes")
class TwoModes(Training):
    of = staticmethod(over_tp)

    def tp_plan(self) -> dict[str, Any]:
        return overlapped_plan("all_reduce") | {"head": overlapped_plan("reduce_scatter")["head"]}


@made(BESIDE, "other tokens on ranks of tp")
class OtherTokens(Training):
    of = staticmethod(over_tp)

    def batch(self, number: int, replica: int) -> Batch:
        return batch_of(S, self.rank % 2, False)


class AllHeads(Net):
    """Reads the features of this rank as all heads, each of a smaller head dim, which rotary positions allow."""

    def extend(self) -> None:
        for layer in self.layers:
            layer.__class__ = type("Block", (type(layer),), {"forward": _all_heads})
            layer.head_dim = D


def _all_heads(layer: Any, x: Tensor, rope: Tensor, documents: Tensor | None) -> Tensor:
    normed = layer.norm(x)
    pairs = ((layer.wq, H), (layer.wk, K), (layer.wv, K))
    q, k, v = (w(normed).unflatten(-1, (heads, -1)).transpose(1, 2) for w, heads in pairs)
    rope = rope[..., : q.shape[-1] // 2]
    out = layer.core(rotate(q, rope), rotate(k, rope), v, documents)
    x = x + layer.wo(out.transpose(1, 2).flatten(-2))
    return x + layer.ff(layer.ff_norm(x))


model(BESIDE, "features of a rank as all heads", AllHeads, of=staticmethod(over_tp))


class NormOverHeads(Net):
    """A norm without parameters over the features of this rank."""

    def extend(self) -> None:
        for layer in self.layers:
            layer.core.__class__ = NormedCore


class NormedCore(Core):
    def attend(self, q: Tensor, k: Tensor, v: Tensor, documents: Tensor | None = None) -> Tensor:
        out = super().attend(q, k, v, documents)
        return F.rms_norm(out.transpose(1, 2).flatten(2), (out.shape[1] * D,)).unflatten(-1, (-1, D)).transpose(1, 2)


model(BESIDE, "a norm over the heads of a rank", NormOverHeads, of=staticmethod(over_tp))


@made(BESIDE, "a schedule that divides again")
class DividedTwice(Training):
    of = staticmethod(piped)
    scales = True


@made(BESIDE, "a schedule that sums means")
class SummedMeans(Training):
    of = staticmethod(piped)

    def pipe_count(self, count: Tensor) -> dict[str, Any]:
        return {}


TRACED = (
    *("right", "another batch on each rank", "batches that differ later", "another length on each rank"),
    *("another length later, one that was before", "a replica without rows in the first step"),
    *("whole inputs without a root", "inputs sharded twice", "chunks of the tokens given to the root"),
    *("a layer left out of the plan", "a window that the style does not state", "a Mask that no style reads"),
    *("a variable of a loop", "a tensor mask on one rank", "another window on each rank"),
    *("positions that nobody gives", "positions counted from 0 by the caller", "counted: learned, arange"),
    *("counted: learned, a buffer of ids", "counted: rotary, a table sliced", "counted: in the core, a table sliced"),
    *("positions taken and ignored", "matmul and softmax", "a convolution"),
    *("registers before q, k and v in the core", "labels by chunk", "labels shifted after sharding"),
    *("the last row of a shard", "the mean of a rank's rows", "a loss in the model from labels among its inputs"),
    *("gathered logits counted on every rank", "wrong labels of a loss compiled with the model"),
    *("gradients over cp alone", "gradients that nobody reduces", "other weights on each rank"),
)
"""Mistakes that are run in models compiled as a whole, too; each takes seconds, and others like them are left out."""
assert {*TRACED} <= {*MISTAKES}
