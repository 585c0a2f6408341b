"""Tokens that are mixed outside of the plan."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from model import C, D, H, K
from set_ups import Core, Experts, Net, S, SetUp, Training
from torch import Tensor, nn

import cp_mesh
from cp_mesh import Mask, ShardedSequence
from mistaken.attention import hidden, scores_of
from mistaken.listing import RIGHT, core, dense, every, few, made, mistake, net, with_logits

MIXING = "Tokens mixed outside of the plan"


def mixing(name: str, mix: Callable[[Any, Tensor], Tensor], extend: Callable[[Any], None] = lambda self: None) -> None:
    mistake(MIXING, name, Net=net(mix=mix, extend=extend))


def _attention(model: Any, x: Tensor) -> Tensor:
    q = x.unflatten(-1, (H, D)).transpose(1, 2)
    return x + (hidden(scores_of(q, q)).softmax(-1) @ q).transpose(1, 2).flatten(2)


def _linear_attention(model: Any, x: Tensor) -> Tensor:
    q = x.unflatten(-1, (H, D)).transpose(1, 2)
    mapped = F.elu(q) + 1
    weights = (mapped @ mapped.transpose(-1, -2)).tril()
    return x + ((weights @ q) / weights.sum(-1, keepdim=True)).transpose(1, 2).flatten(2)


mixing("matmul and softmax", _attention)
mixing("linear attention", _linear_attention)
mixing(
    "a convolution", lambda net, x: x + net.conv(F.pad(x.transpose(1, 2), (2, 0))).transpose(1, 2),
    lambda net: setattr(net, "conv", nn.Conv1d(C, C, 3, groups=C)),
)  # fmt: skip
mixing("the mean of tokens", lambda net, x: x - x.mean(1, keepdim=True))
mixing("the first token", lambda net, x: x + x[:, :1])
mixing("cumsum", lambda net, x: x + x.cumsum(1) / 8)
mixing("a GRU", lambda net, x: x + net.gru(x)[0], lambda net: setattr(net, "gru", nn.GRU(C, C, batch_first=True)))
mixing("a root mean square of rows", lambda net, x: x / x.square().mean(1, keepdim=True).sqrt())
mixing("roll", lambda net, x: x + x.roll(1, 1))
mixing("a shift by padding", lambda net, x: x + F.pad(x, (0, 0, 1, 0))[:, :-1])
mixing(
    "batch norm", lambda net, x: net.bn(x.flatten(0, 1)).view_as(x), lambda net: setattr(net, "bn", nn.BatchNorm1d(C))
)


class ExpertChoice(Experts):
    """Each expert takes the tokens that it likes best, of those that it is given."""

    def weigh(self, scores: Tensor) -> Tensor:
        return scores * (scores >= scores.topk(max(1, scores.shape[1] // 2), dim=1).values[:, -1:])


class Capacity(Experts):
    """An expert drops the tokens that come after its first ones."""

    def weigh(self, scores: Tensor) -> Tensor:
        weights = super().weigh(scores)
        return weights * ((weights > 0).cumsum(1) <= scores.shape[1] // 3)


mistake(MIXING, "expert choice", "MoE", Net=net(Experts=ExpertChoice))
mistake(MIXING, "a capacity of experts", "MoE", Net=net(Experts=Capacity))

Attend = Callable[[Core, Tensor, Tensor, Tensor, Any], Tensor]


def attending(attend: Attend, **fields: Any) -> type[Core]:
    """A core that attends so; each reads `Core.attend` of what it makes of q, k and v."""
    return type("Core", (Core,), {"attend": lambda self, q, k, v, ids=None: attend(self, q, k, v, ids), **fields})


def registers(self: Core, q: Tensor, k: Tensor, v: Tensor, documents: Tensor | None) -> Tensor:
    """Rows in front of q, k and v, which are cut off again."""
    return Core.attend(self, *(torch.cat([torch.ones_like(x[:, :, :3]), x], 2) for x in (q, k, v)))[:, :, 3:]


def chunks(self: Core, q: Tensor, k: Tensor, v: Tensor, documents: Tensor | None) -> Tensor:
    """Attention within four rows, by a reshape."""
    cut = (x.unflatten(2, (-1, 4)).transpose(1, 2).flatten(0, 1) for x in (q, k, v))
    return Core.attend(self, *cut).unflatten(0, (len(q), -1)).transpose(1, 2).flatten(2, 3)


def over_heads(self: Core, q: Tensor, k: Tensor, v: Tensor, documents: Tensor | None) -> Tensor:
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    return Core.attend(self, *(x.transpose(1, 2) for x in (q, k, v))).transpose(1, 2)


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


def shifted(self: Core, q: Tensor, k: Tensor, v: Tensor, documents: Tensor | None) -> Tensor:
    return Core.attend(self, q, F.pad(k, (0, 0, 1, 0))[:, :, :-1], v, documents)


def half_of_rows(self: Core, q: Tensor, k: Tensor, v: Tensor, documents: Tensor | None) -> Tensor:
    q, k, v = (x[:, :, : x.shape[2] // 2] for x in (q, k, v))
    return torch.cat([Core.attend(self, q, k, v), q.new_zeros(q.shape)], 2)


core(MIXING, "keys shifted in the core", attending(shifted))
core(MIXING, "registers before q, k and v in the core", attending(registers), dense)
core(MIXING, "chunks by a reshape in the core", attending(chunks), dense)
core(MIXING, "a forgotten transpose in the core", attending(over_heads), dense)
crossing: dict[str, Any] = {"core_options": lambda self, name: {"mask": Mask(causal=False)}}
core(MIXING, "a context in the core", type("Context", (Context,), {"num": 5}), dense, **crossing)
equal = every(dense, with_logits)  # ranks of tp have other heads of it
core(MIXING, "a context as long as the shard in the core", Context, equal, **crossing)
core(MIXING, "half of the rows in the core", attending(half_of_rows), dense)


class WrongGradient(torch.autograd.Function):
    """The same value; another gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, change: Callable[[Tensor], Tensor]) -> Tensor:
        ctx.change = change
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return ctx.change(grad), None


def wrong_gradient(change: Callable[[Tensor], Tensor]) -> type[Core]:
    return attending(
        lambda self, q, k, v, documents: Core.attend(
            self, q, k, v if self.plain else WrongGradient.apply(v, change), documents
        )
    )


def last_ignored(self: Core, q: Tensor, k: Tensor, v: Tensor, documents: Tensor | None) -> Tensor:
    out = Core.attend(self, q, k, v, documents)
    return out if self.plain else torch.cat([out[:, :, :-1], 0 * out[:, :, -1:]], 2)


core(MIXING, "the last row of a shard ignored", attending(last_ignored), few)
core(MIXING, "gradients of stale keys", wrong_gradient(lambda grad: grad.roll(1, 2)), few)
core(MIXING, "a part of the gradient of v", wrong_gradient(lambda grad: 0.9 * grad), few)
core(MIXING, "NaN for the gradient of v", wrong_gradient(lambda grad: grad * float("nan")), few)


class Recurrent(nn.Module):
    """A causal convolution of v and a gated delta rule, as a user calls them; ``told``: of the documents."""

    sequence: ShardedSequence | None = None
    told: ClassVar[bool] = True

    def __init__(self, set_up: SetUp, plain: bool, length: int) -> None:
        super().__init__()
        self.plain, self.weight = plain, nn.Parameter(torch.zeros(K * D, 3))

    def forward(self, q: Tensor, k: Tensor, v: Tensor, documents: Tensor | None = None) -> Tensor:
        q, k, v = (x.transpose(1, 2) for x in (F.normalize(q[:, :K], dim=-1), F.normalize(k, dim=-1), v))
        given = (F.logsigmoid(q.sum(-1)), k.sum(-1).sigmoid())
        if self.plain:
            v = convolved(v.flatten(2), self.weight, documents).unflatten(2, (K, D))
            out = gated_delta_rule(q, k, v, *given, documents)
        else:
            options: Any = {"sequence": self.sequence, "mask": Mask(documents=documents) if self.told else None}
            v = self.convolved(v.flatten(2), options).unflatten(2, (K, D))
            out, _ = cp_mesh.mixers.gated_delta_rule(q, k, v, *given, **options)
        return out.transpose(1, 2).repeat_interleave(H // K, 1)

    def convolved(self, x: Tensor, options: Any) -> Tensor:
        return cp_mesh.mixers.causal_conv1d(x, self.weight, **options)


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


@made(RIGHT, "recurrent layers", "eager, cores, FSDP2, documents")
class Hybrid(Training):
    """Layer 0 is recurrent, and named in no plan: its calls say the sequence."""

    deep = True
    Layer: ClassVar[type[Recurrent]] = Recurrent

    def net(self, plain: bool) -> Net:
        found = super().net(plain)
        found.layers[0].core = layer = self.Layer(self.set_up, plain, self.length or S)
        layer.sequence = None if plain else self.sequence
        nn.init.normal_(layer.weight, generator=torch.Generator().manual_seed(1))
        return found

    def plan(self) -> dict[str, Any]:
        return {name: style for name, style in super().plan().items() if name != "layers.0.core"}


def of_layers(**parts: Any) -> dict[str, Any]:
    return {"Layer": type("Recurrent", (Recurrent,), parts)}


mistake(MIXING, "documents that a recurrent layer is not given", "documents", Hybrid, **of_layers(told=False))
own = of_layers(convolved=lambda self, x, options: convolved(x, self.weight, None))
mistake(MIXING, "a convolution of the shard before a recurrent layer", "", Hybrid, **own)
