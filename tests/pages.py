"""What the hidden blocks of pages read without importing it: `test_docs.py` runs them with these names.

A hidden block is an HTML comment that begins with `<!-- run`. It gives a page what its code takes for granted, and
compares what that code made with plain PyTorch.
"""

from __future__ import annotations

import copy  # noqa: F401
from itertools import pairwise  # noqa: F401
from typing import Any
from unittest import mock  # noqa: F401

import llama  # noqa: F401
import pytest  # noqa: F401
import ranks  # noqa: F401
import torch
import torch.distributed as dist
import torch.nn.functional as F
from dense import dense_attention, dense_dropout, dense_mask  # noqa: F401
from torch import Tensor, nn

import cp_mesh
from cp_mesh import Mask  # noqa: F401


def whole(seed: int, *shape: int) -> Tensor:
    """Equal on all ranks."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def integers(high: int, *shape: int) -> Tensor:
    return torch.randint(high, shape, generator=torch.Generator().manual_seed(0))


def close(a: Any, b: Any, tolerance: float = 1e-10) -> None:
    torch.testing.assert_close(a, b, rtol=0, atol=tolerance, check_dtype=False)


def total(x: Tensor, group: Any = None) -> Tensor:
    """The sum over the ranks."""
    x = x.detach().clone()
    dist.all_reduce(x, group=group)
    return x


def same_gradients(module: nn.Module, twin: nn.Module, tolerance: float = 1e-5, group: Any = None) -> None:
    """Gradients of a twin on one rank: those of DTensors, or else the sum over ranks; relative to the largest."""
    for found, want in zip(module.parameters(), twin.parameters(), strict=True):
        grad = found.grad.full_tensor() if hasattr(found.grad, "full_tensor") else total(found.grad, group)
        close(grad, want.grad, tolerance * float(want.grad.abs().max()))


def attend(q: Tensor, k: Tensor, v: Tensor, mask: cp_mesh.Mask, **scores: Any) -> Tensor:
    """Attention of one device by the oracle of the tests."""
    options = {"causal": mask.causal, "window": mask.window, "documents": mask.documents}
    return dense_attention(q, k, v, dense_mask(q.shape[2], **options), **scores)[0]


class Attention(nn.Module):
    """Called with whatever else the model is called with."""

    def __init__(self, layer: int, sinks: bool, dropout_p: float) -> None:
        super().__init__()
        self.layer, self.dropout_p = layer, dropout_p
        self.qkv, self.out = nn.Linear(32, 96), nn.Linear(32, 32)
        self.sinks = nn.Parameter(torch.zeros(4)) if sinks else None

    def heads(self, x: Tensor) -> list[Tensor]:
        return [part.unflatten(-1, (4, 8)).transpose(1, 2) for part in self.qkv(x).chunk(3, dim=-1)]

    def forward(self, x: Tensor, first: Any = None, second: Any = None) -> Tensor:
        out = F.scaled_dot_product_attention(*self.heads(x), is_causal=True, dropout_p=self.dropout_p)
        return self.out(out.transpose(1, 2).flatten(2))


class Layer(nn.Module):
    def __init__(self, *options: Any) -> None:
        super().__init__()
        self.attention = Attention(*options)

    def forward(self, x: Tensor, *given: Any) -> Tensor:
        return x + self.attention(x, *given)


class Decoder(nn.Module):
    """Two layers of 4 heads over 64 tokens, in float64; hands on what its attention modules are called with."""

    def __init__(self, sinks: bool = False, dropout_p: float = 0.0, head: bool = True) -> None:
        super().__init__()
        self.token, self.position = nn.Embedding(64, 32), nn.Embedding(256, 32)
        self.layers = nn.ModuleList(Layer(i, sinks, dropout_p) for i in range(2))
        self.norm, self.head = nn.LayerNorm(32), nn.Linear(32, 64) if head else nn.Identity()
        self.double()
        generator = torch.Generator().manual_seed(0)
        for parameter in self.parameters():
            nn.init.normal_(parameter, std=0.6, generator=generator)

    def forward(self, tokens: Tensor, positions: Any, mask: Any = None, layout: Any = None, seed: Any = None) -> Tensor:
        x = self.token(tokens) if positions is None else self.token(tokens) + self.position(positions)
        for layer in self.layers:
            x = layer(x, *[y for y in (mask, layout, seed) if y is not None])
        return self.head(self.norm(x))

    def dense(
        self, tokens: Tensor, *masks: cp_mesh.Mask, of_layers: Any = ({}, {}), positions: Any = None, **scores: Any
    ) -> Tensor:
        """The logits of one rank; a mask for each layer. No code of the library attends."""
        x = self.token(tokens) + self.position(torch.arange(tokens.shape[1]) if positions is None else positions)
        for layer, mask, own in zip(self.layers, masks, of_layers, strict=True):
            part: Any = layer.attention
            out = attend(*part.heads(x), mask, sinks=part.sinks, **scores, **own)
            x = x + part.out(out.transpose(1, 2).flatten(2))
        return self.head(self.norm(x))
