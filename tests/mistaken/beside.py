"""Tensor parallelism and pipelines."""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F
from model import D, H, K, overlapped_plan, rotate
from set_ups import Batch, Core, Net, S, SetUp, Training, batch_of
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

import cp_mesh
from mistaken.listing import RIGHT, made, model

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


class BesideFSDP(Training):
    """Weights sharded by FSDP2 over cp, beside tp."""

    of = staticmethod(over_tp)

    def distribute(self) -> nn.Module:
        fully_shard(self.model, mesh=self.axis)
        cp_mesh.sum_gradients(self.model)
        return self.model

    def reduce(self) -> None:
        pass


made(RIGHT, "FSDP2 over cp beside tp")(BesideFSDP)
made(BESIDE, "norms without SequenceParallel, under FSDP2")(
    type("NoNorms", (BesideFSDP,), {"tp_plan": NoNorms.tp_plan})
)
