"""A plain Llama, without any code for devices, meshes or parallelism.

Shapes: B batch, S sequence, H query heads, K key/value heads, D head dim, C model dim, V vocabulary.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True)
class LlamaConfig:
    """The sizes of a Llama; `num_heads` is a multiple of `num_kv_heads`."""

    vocab_size: int = 264
    dim: int = 256
    num_layers: int = 4
    num_heads: int = 8
    num_kv_heads: int = 4
    rope_theta: float = 500_000.0
    norm_eps: float = 1e-5
    ffn_dim: int | None = None
    tied: bool = False

    @classmethod
    def read(cls, model: str) -> LlamaConfig:
        """Sizes of a Llama of Transformers: a name of `PRESETS`, a config.json, its folder or its text."""
        if model in PRESETS:
            return PRESETS[model]
        path = Path(model, "config.json") if not model.startswith("{") and Path(model).is_dir() else Path(model)
        given = json.loads(model if model.startswith("{") else path.read_text())
        given = {name: value for name, value in given.items() if value is not None}  # null is what is missing
        given.setdefault("num_key_value_heads", given["num_attention_heads"])
        names = "vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads"
        tied = given.get("tie_word_embeddings", False)
        config = cls(*(given[name] for name in names), ffn_dim=given["intermediate_size"], tied=tied)
        if given.get("head_dim", config.head_dim) != config.head_dim:
            raise ValueError(f"{model}: expected heads that make up hidden_size")
        return config

    @property
    def head_dim(self) -> int:
        return self.dim // self.num_heads

    @property
    def hidden_dim(self) -> int:
        """SwiGLU's width: `ffn_dim`, or 8/3 of dim, so that three matrices weigh as much as the usual two of 4·dim."""
        return self.ffn_dim or 32 * math.ceil(8 * self.dim / 3 / 32)


PRESETS = {
    "llama-3-8b": LlamaConfig(128256, 4096, 32, 32, 8, ffn_dim=14336),
    "llama-3-70b": LlamaConfig(128256, 8192, 80, 64, 8, ffn_dim=28672),
}


class CoreAttention(nn.Module):
    """Causal softmax(q kᵀ) v and nothing else: the module that a context-parallel plan names.

    `documents` is not read here: a plan that takes over the attention call makes a mask over global positions from it.
    """

    def forward(self, q: Tensor, k: Tensor, v: Tensor, documents: Tensor | None = None) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)


class DenseDocumentAttention(nn.Module):
    """The core of a model without parallelism: it builds the [B, 1, S, S] document mask itself."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, documents: Tensor | None = None) -> Tensor:
        if documents is None:
            return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        same_document = documents[:, None, :, None] == documents[:, None, None, :]
        return F.scaled_dot_product_attention(q, k, v, attn_mask=same_document.tril(), enable_gqa=True)


class Attention(nn.Module):
    """Grouped-query attention with rotary embedding."""

    def __init__(self, config: LlamaConfig, core: type[nn.Module]):
        super().__init__()
        self.head_dim = config.head_dim
        self.wq = nn.Linear(config.dim, config.num_heads * config.head_dim, bias=False)
        self.wk = nn.Linear(config.dim, config.num_kv_heads * config.head_dim, bias=False)
        self.wv = nn.Linear(config.dim, config.num_kv_heads * config.head_dim, bias=False)
        self.wo = nn.Linear(config.num_heads * config.head_dim, config.dim, bias=False)
        self.core = core()

    def forward(self, x: Tensor, rope: Tensor, documents: Tensor | None) -> Tensor:
        # The head count is read off the projections: a tensor-parallel rank holds only some of the heads.
        q, k, v = (w(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for w in (self.wq, self.wk, self.wv))
        out = self.core(rotate(q, rope), rotate(k, rope), v, documents)
        return self.wo(out.transpose(1, 2).flatten(-2))


class FeedForward(nn.Module):
    """SwiGLU."""

    def __init__(self, config: LlamaConfig):
        super().__init__()
        self.w1 = nn.Linear(config.dim, config.hidden_dim, bias=False)
        self.w2 = nn.Linear(config.hidden_dim, config.dim, bias=False)
        self.w3 = nn.Linear(config.dim, config.hidden_dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


class Block(nn.Module):
    """One pre-norm transformer layer.

    `checkpoint` may be set to a function like `torch.utils.checkpoint.checkpoint`, which then calls `compute`.
    """

    checkpoint: Callable[..., Tensor] | None = None

    def __init__(self, config: LlamaConfig, core: type[nn.Module]):
        super().__init__()
        self.attention_norm = nn.RMSNorm(config.dim, eps=config.norm_eps)
        self.attention = Attention(config, core)
        self.feed_forward_norm = nn.RMSNorm(config.dim, eps=config.norm_eps)
        self.feed_forward = FeedForward(config)

    def forward(self, x: Tensor, rope: Tensor, documents: Tensor | None) -> Tensor:
        if self.checkpoint is None:
            return self.compute(x, rope, documents)
        return self.checkpoint(self.compute, x, rope, documents)

    def compute(self, x: Tensor, rope: Tensor, documents: Tensor | None) -> Tensor:
        x = x + self.attention(self.attention_norm(x), rope, documents)
        return x + self.feed_forward(self.feed_forward_norm(x))


class Llama(nn.Module):
    """Tokens [B, S] to logits [B, S, V]; only `core` mixes tokens.

    Args:
        config: The sizes.
        core: The attention core. The default applies documents on one device. A plan that sets the mask needs
            `CoreAttention`.
    """

    def __init__(self, config: LlamaConfig, core: type[nn.Module] = DenseDocumentAttention):
        super().__init__()
        self.config = config
        self.tok_embeddings = nn.Embedding(config.vocab_size, config.dim)
        self.layers = nn.ModuleList(Block(config, core) for _ in range(config.num_layers))
        self.norm = nn.RMSNorm(config.dim, eps=config.norm_eps)
        self.output = nn.Linear(config.dim, config.vocab_size, bias=False)
        if config.tied:
            self.output.weight = self.tok_embeddings.weight

    def forward(
        self,
        tokens: Tensor,
        positions: Tensor | None = None,
        documents: Tensor | None = None,
        loss: Callable[[Tensor, Tensor], Tensor] | None = None,
    ) -> Tensor:
        """Compute next-token logits.

        Args:
            tokens: [B, S] int64.
            positions: [S] or [B, S] int64, for the rotary embedding; default 0 .. S-1.
            documents: [B, S] int64 ids; a token sees only tokens of its own document.
            loss: Called instead of the head, with what the head reads, [B, S, C], and the head's weight.

        Returns:
            Logits [B, S, V], or what `loss` returns.
        """
        if positions is None:
            positions = torch.arange(tokens.shape[1], device=tokens.device)
        rope = rotary(positions, self.config.head_dim, self.config.rope_theta)
        x = self.tok_embeddings(tokens)
        for layer in self.layers:
            x = layer(x, rope, documents)
        x = self.norm(x)
        return self.output(x) if loss is None else loss(x, self.output.weight)

    @torch.no_grad()
    def init_weights(self, seed: int) -> None:
        """Fill the weights from a seed: the same whole model on every rank, for any mesh.

        Weights are drawn on their device: those on CUDA differ from those on the CPU.
        """
        generator = torch.Generator(self.output.weight.device).manual_seed(seed)
        residual_writers = 2 * len(self.layers)
        for name, parameter in self.named_parameters():
            if parameter.ndim == 1:
                parameter.fill_(1.0)
                continue
            std = 0.02 if name.endswith(("tok_embeddings.weight", "output.weight")) else parameter.shape[1] ** -0.5
            if name.endswith(("wo.weight", "w2.weight")):
                std /= math.sqrt(residual_writers)
            parameter.normal_(0.0, std, generator=generator)


class Stage(nn.Module):
    """Some layers of a Llama as a pipeline stage; parameters keep the model's names.

    Args:
        model: The whole model; the stage shares its modules.
        layers: Which layers. The stage with the first layer has the embedding, the one with the last has the head.
    """

    def __init__(self, model: Llama, layers: range):
        super().__init__()
        self.config = model.config
        self.layers = nn.ModuleDict({str(i): model.layers[i] for i in layers})
        self.tok_embeddings = model.tok_embeddings if 0 in layers else nn.Identity()
        is_last = len(model.layers) - 1 in layers
        self.norm, self.output = (model.norm, model.output) if is_last else (nn.Identity(), nn.Identity())

    def forward(self, x: Tensor, positions: Tensor | None = None, documents: Tensor | None = None) -> Tensor:
        """Tokens [B, S], or the output [B, S, C] of the previous stage, to logits or to the input of the next stage."""
        if positions is None:
            positions = torch.arange(x.shape[1], device=x.device)
        rope = rotary(positions, self.config.head_dim, self.config.rope_theta)
        x = self.tok_embeddings(x)
        for layer in self.layers.values():
            x = layer(x, rope, documents)
        return self.output(self.norm(x))


def rotary(positions: Tensor, head_dim: int, theta: float) -> Tensor:
    """Cosines and sines [2, ..., S, D/2] in fp32 of the angles at `positions` [..., S]."""
    # fp32 angles would be off by 0.03 rad at position one million.
    exponent = torch.arange(0, head_dim, 2, device=positions.device, dtype=torch.float64) / head_dim
    angles = positions.double()[..., None] * theta**-exponent
    return torch.stack((angles.cos(), angles.sin())).float()


def rotate(x: Tensor, rope: Tensor) -> Tensor:
    """Rotate the pairs (i, i + D/2) of each head of x [B, H, S, D]."""
    cos, sin = rope.unsqueeze(-3)  # [1 or B, 1, S, D/2], the same for every head
    first, second = x.float().chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).type_as(x)
