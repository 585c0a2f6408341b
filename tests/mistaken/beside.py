"""Tensor parallelism and pipelines."""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F
from model import D, H, K, overlapped_plan, rotate
from set_ups import Core, Net, S, Training, batch_of
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

import cp_mesh
from mistaken.listing import RIGHT, core, made, mistake, net, over_tp, piped

BESIDE = "Tensor parallelism and pipelines"


def without_norms(self: Training) -> dict[str, Any]:
    return {name: style for name, style in overlapped_plan("reduce_scatter").items() if "norm" not in name}


mistake(BESIDE, "norms without SequenceParallel", over_tp, tp_plan=without_norms)
mistake(
    BESIDE, "styles in two modes", over_tp,
    tp_plan=lambda self: overlapped_plan("all_reduce") | {"head": overlapped_plan("reduce_scatter")["head"]},
)  # fmt: skip
of_rank = lambda self, number, replica: batch_of(S, self.rank % 2, False)  # noqa: E731
mistake(BESIDE, "other tokens on ranks of tp", over_tp, batch=of_rank)


def reads_all_heads(self: Net) -> None:
    """The features of this rank are read as all heads, each of a smaller head dim, which rotary positions allow."""
    for layer in self.layers:
        layer.__class__ = type("Block", (type(layer),), {"forward": all_heads})
        layer.head_dim = D


def all_heads(layer: Any, x: Tensor, rope: Tensor, documents: Tensor | None) -> Tensor:
    normed = layer.norm(x)
    pairs = ((layer.wq, H), (layer.wk, K), (layer.wv, K))
    q, k, v = (w(normed).unflatten(-1, (heads, -1)).transpose(1, 2) for w, heads in pairs)
    rope = rope[..., : q.shape[-1] // 2]
    out = layer.core(rotate(q, rope), rotate(k, rope), v, documents)
    x = x + layer.wo(out.transpose(1, 2).flatten(-2))
    return x + layer.ff(layer.ff_norm(x))


class NormedCore(Core):
    """A norm without parameters over the features of this rank."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor, documents: Tensor | None = None) -> Tensor:
        out = super().attend(q, k, v, documents)
        return F.rms_norm(out.transpose(1, 2).flatten(2), (out.shape[1] * D,)).unflatten(-1, (-1, D)).transpose(1, 2)


mistake(BESIDE, "features of a rank as all heads", over_tp, Net=net(extend=reads_all_heads))
core(BESIDE, "a norm over the heads of a rank", NormedCore, over_tp)
mistake(BESIDE, "a schedule that divides again", piped, scales=True)
mistake(BESIDE, "a schedule that sums means", piped, pipe_count=lambda self, count: {})


@made(RIGHT, "FSDP2 over cp beside tp", over_tp)
class BesideFSDP(Training):
    def distribute(self) -> nn.Module:
        fully_shard(self.model, mesh=self.axis)
        cp_mesh.sum_gradients(self.model)
        return self.model

    def reduce(self) -> None:
        pass


mistake(BESIDE, "norms without SequenceParallel, under FSDP2", "", BesideFSDP, tp_plan=without_norms)
