"""A small decoder in fp64 and the plans that spread it over a mesh; its single-rank twin shares no code with cp_mesh.

B batch, S sequence, H query heads, K kv heads, D head dim, C model dim, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from dense import dense_attention, dense_mask
from torch import Tensor, nn
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
)

from cp_mesh.tensor_parallel import OverlappedColwise, OverlappedRowwise, VocabParallelEmbedding, VocabParallelHead

V, C, H, K, D, LAYERS = 24, 32, 8, 4, 4, 2


class Core(nn.Module):
    """What a plan names: nothing but the attention call. `documents` is for whoever takes it over."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, documents: Tensor | None = None) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)


class DenseCore(nn.Module):
    """The oracle in the core's place."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, documents: Tensor | None = None) -> Tensor:
        return dense_attention(q, k, v, dense_mask(q.shape[2], documents=documents))[0]


class ScoredCore(Core):
    """With learnable tensors of the scores, of this rank's heads."""

    def __init__(self) -> None:
        super().__init__()
        self.sinks, self.slopes = nn.Parameter(torch.empty(H)), nn.Parameter(torch.empty(H))

    def scores(self) -> dict[str, Any]:
        """Options of `cp_mesh.attention` and of `dense_attention`."""
        return {"sinks": self.sinks, "alibi_slopes": self.slopes, "softcap": 2.0}


class DenseScoredCore(ScoredCore):
    """The oracle in its place."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, documents: Tensor | None = None) -> Tensor:
        return dense_attention(q, k, v, dense_mask(q.shape[2], documents=documents), **self.scores())[0]


class Block(nn.Module):
    def __init__(self, core: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.norm, self.ff_norm = nn.RMSNorm(C), nn.RMSNorm(C)
        self.wq, self.wk, self.wv = (nn.Linear(C, heads * D, bias=False) for heads in (H, K, K))
        self.wo = nn.Linear(H * D, C, bias=False)
        self.core = core()
        self.ff = nn.Sequential(nn.Linear(C, 2 * C), nn.SiLU(), nn.Linear(2 * C, C))

    def forward(self, x: Tensor, rope: Tensor, documents: Tensor | None) -> Tensor:
        normed = self.norm(x)
        q, k, v = (w(normed).unflatten(-1, (-1, D)).transpose(1, 2) for w in (self.wq, self.wk, self.wv))
        out = self.core(rotate(q, rope), rotate(k, rope), v, documents)
        x = x + self.wo(out.transpose(1, 2).flatten(-2))
        return x + self.ff(self.ff_norm(x))


class Model(nn.Module):
    """tokens [B, S], positions [S] or [B, S] and documents [B, S] to logits [B, S, V]."""

    def __init__(self, core: Callable[[], nn.Module] = Core, seed: int = 0, dtype: torch.dtype = torch.float64) -> None:
        super().__init__()
        self.embedding = nn.Embedding(V, C)
        self.layers = nn.ModuleList(Block(core) for _ in range(LAYERS))
        self.norm = nn.RMSNorm(C)
        self.head = nn.Linear(C, V, bias=False)
        self.to(dtype)
        generator = torch.Generator().manual_seed(seed)
        for parameter in self.parameters():
            nn.init.normal_(parameter, 0.5 * (parameter.ndim == 1), 0.4, generator=generator)

    def forward(self, tokens: Tensor, positions: Tensor, documents: Tensor | None = None) -> Tensor:
        angles = positions.double()[..., None] * 0.3 ** torch.arange(D // 2, device=positions.device)
        rope = torch.stack((angles.cos(), angles.sin()))
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x, rope, documents)
        return self.head(self.norm(x))


class Joined(nn.Module):
    """Linears by name, of one input, which ``calls`` joins."""

    def __init__(self, calls: Callable[[Any, Tensor], Any], **linears: nn.Module) -> None:
        super().__init__()
        self.calls = calls
        for name, linear in linears.items():
            self.add_module(name, linear)

    def forward(self, x: Tensor) -> Any:
        return self.calls(self, x)


def rotate(x: Tensor, rope: Tensor) -> Tensor:
    cos, sin = rope.unsqueeze(-3).to(x.dtype)
    a, b = x.chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, a * sin + b * cos), dim=-1)


def tensor_parallel_plan(sequence_parallel: bool = False, use_local_output: bool = True) -> dict[str, Any]:
    """PyTorch's styles for `Model`; without `use_local_output` the core's q, k and v are DTensors."""
    stream = Shard(1) if sequence_parallel else Replicate()
    plan: dict[str, Any] = {
        "embedding": RowwiseParallel(input_layouts=Replicate(), output_layouts=stream),
        "layers.*.w[qkv]": ColwiseParallel(input_layouts=stream, use_local_output=use_local_output),
        "layers.*.wo": RowwiseParallel(output_layouts=stream),
        "layers.*.ff": PrepareModuleInput(input_layouts=(stream,), desired_input_layouts=(Replicate(),)),
        "layers.*.ff.0": ColwiseParallel(),
        "layers.*.ff.2": RowwiseParallel(output_layouts=stream),
        "head": ColwiseParallel(input_layouts=stream, output_layouts=Replicate()),
    }
    if sequence_parallel:
        plan |= {
            "layers.*.norm": SequenceParallel(),
            "layers.*.ff_norm": SequenceParallel(),
            "norm": SequenceParallel(),
        }
    return plan


def overlapped_plan(mode: Any, recompute: bool = False) -> dict[str, Any]:
    """The styles of cp_mesh over tp for `Model`."""
    columns = {"mode": mode, "recompute_all_gather": recompute}
    plan: dict[str, Any] = {
        "embedding": VocabParallelEmbedding(mode=mode),
        "layers.*": OverlappedColwise("wq", "wk", "wv", **columns),
        "layers.*.wo": OverlappedRowwise(mode=mode),
        "layers.*.ff.0": OverlappedColwise(**columns),
        "layers.*.ff.2": OverlappedRowwise(mode=mode),
        "head": VocabParallelHead(mode=mode),
    }
    if mode == "reduce_scatter":
        plan |= {name: SequenceParallel() for name in ("layers.*.norm", "layers.*.ff_norm", "norm")}
    return plan


def batch(B: int, S: int, seed: int = 0) -> dict[str, Tensor]:
    """Tokens, labels with ragged ignored tokens, documents unlike in every row, and positions that restart in each."""
    generator = torch.Generator().manual_seed(seed)
    tokens, labels = torch.randint(V, (2, B, S), generator=generator)
    labels[torch.rand(B, S, generator=generator) < 0.3] = -100
    starts = torch.rand(B, S, generator=generator) < 3 / S
    starts[:, 0] = True
    rows = torch.arange(S).expand(B, S)
    positions = rows - rows.where(starts, torch.zeros(())).cummax(1).values.long()
    return {"tokens": tokens, "labels": labels, "documents": starts.cumsum(1) - 1, "positions": positions}
