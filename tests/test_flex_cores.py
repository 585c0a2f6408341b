"""Flex in cores: a module that calls PyTorch's flex_attention computes under `ContextParallel` what one rank computes."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from cases import gap
from checks import TOLERANCE, report
from dense import make_qkv
from flex_uses import MASKS, SCORES, dense, integers, numbers
from ranks import mesh, num_collectives
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.nn.attention import flex_attention as of_torch
from torch.nn.attention.flex_attention import flex_attention
from torch.utils.checkpoint import checkpoint

import cp_mesh
from cp_mesh import (
    ArgumentError,
    ContextParallel,
    Mask,
    ShardedSequence,
    UnsupportedError,
    ZigZag,
    create_block_mask,
    parallelize,
)

B, H, K, D = 2, 4, 2, 5
ALL = Mask(causal=False)
NAMED = torch.compile(flex_attention, fullgraph=True)


class Core(nn.Module):
    """Calls flex_attention with a score of `flex_uses` whose tensors are its parameters and buffers."""

    def __init__(self, score: str = "none", mask: str = "none", S: int = 24, of_torch: bool = False) -> None:
        super().__init__()
        self.score, self.mask, self.S, self.of_torch = score, mask, S, of_torch
        for name, x in SCORES[score].tensors(B, H, S).items():
            if x.is_floating_point():
                self.register_parameter(name, nn.Parameter(x.clone()))
            else:
                self.register_buffer(name, x)

    def block_mask(self) -> Any:
        mask_mod = MASKS[self.mask].make(MASKS[self.mask].tensors(B, H, self.S))
        if mask_mod is None:
            return None
        if self.of_torch:
            return of_torch.create_block_mask(mask_mod, B, H, self.S, self.S, device="cpu", BLOCK_SIZE=8)
        return create_block_mask(mask_mod, B, H, self.S, self.S)

    def attend(self, *args: Any, **options: Any) -> Any:
        return flex_attention(*args, **options)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Any:
        score_mod = SCORES[self.score].make(dict(self.named_parameters()) | dict(self.named_buffers()))
        return self.attend(q, k, v, score_mod, self.block_mask(), enable_gqa=True, **options)


class CompiledAttribute(Core):
    compiled = torch.compile(flex_attention)

    def attend(self, *args: Any, **options: Any) -> Any:
        return CompiledAttribute.compiled(*args, **options)


class CompiledGlobal(Core):
    def forward(self, q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Any:
        return NAMED(q, k, v, None, self.block_mask(), enable_gqa=True, **options)


class CompiledInside(Core):
    def attend(self, *args: Any, **options: Any) -> Any:
        return torch.compile(flex_attention, backend="eager")(*args, **options)


def style(axis: Any, mask: Mask = ALL, **options: Any) -> ContextParallel:
    of_sequence = {name: options.pop(name) for name in ("length", "pad") if name in options}
    return ContextParallel(ShardedSequence(axis, ZigZag(), **of_sequence), mask=mask, **options)


def expected(core: Core, scale: float | None = None) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """out, lse, dq, dk, dv by name, and gradients of what is captured by name, of the whole sequence."""
    *qkv, dout = make_qkv(B, H, K, core.S, D)
    leaves = [x.clone().requires_grad_() for x in qkv]
    t = {name: x.detach().clone().requires_grad_(x.requires_grad) for name, x in core.state_dict(keep_vars=True).items()}
    out, lse = dense(*leaves, core.score, core.mask, t, MASKS[core.mask].tensors(B, H, core.S), scale)
    graded = {name: x for name, x in t.items() if x.requires_grad}
    found = torch.autograd.grad(out, [*leaves, *graded.values()], dout)
    return dict(zip(("out", "lse", "dq", "dk", "dv"), (out, lse, *found), strict=False)), dict(
        zip(graded, found[3:], strict=True)
    )


USES: dict[str, tuple[Callable[[], Core], dict[str, Any], dict[str, Any]]] = {
    "a score": (lambda: Core("two through each other"), {}, {}),
    "a mask": (lambda: Core("none", "causal or of one image"), {}, {}),
    "a mask of PyTorch": (lambda: Core("pair bias", "documents", of_torch=True), {}, {}),
    "heads and Ulysses": (lambda: Core("scale of a head", "windows of heads"), {"method": "all_gather"}, {}),
    "beside a mask of the style": (lambda: Core("ALiBi", "dilated", of_torch=True), {"mask": Mask()}, {}),
    "a scale": (lambda: Core("relative table", "causal"), {}, {"scale": 0.3}),
    "padding": (lambda: Core("pair bias", "neighborhood", 21), {"length": 21}, {}),
    "padding, causal": (lambda: Core("relative table", "causal", 21, of_torch=True), {"length": 21, "mask": Mask()}, {}),
    "unequal shards": (lambda: Core("pair bias", "neighborhood", 21), {"length": 21, "pad": False}, {}),
    "compiled, an attribute": (lambda: CompiledAttribute("ALiBi", "documents", of_torch=True), {}, {}),
    "compiled, a global": (lambda: CompiledGlobal("none", "documents", of_torch=True), {}, {}),
}


def as_one(rank: int, names: list[str]) -> list[str]:
    axis, problems = mesh((dist.get_world_size(),), ("cp",)), []
    for name in names:
        make, options, call = USES[name]
        core = make()
        want, of_captured = expected(core, **call)
        applied = style(axis, **options)
        core = parallelize(core, axis, {"": applied})
        *qkv, dout = (applied.sequence.shard(x, dim=2) for x in make_qkv(B, H, K, core.S, D))
        leaves = [x.clone().requires_grad_() for x in qkv]
        torch._dynamo.reset()
        out, lse = core(*leaves, return_lse=True, **call)
        grads = torch.autograd.grad(out, leaves, dout, retain_graph=True)
        out.backward(dout)
        for key, x in zip(("out", "lse", "dq", "dk", "dv"), (out, lse, *grads), strict=True):
            with torch.no_grad():
                whole = applied.sequence.unshard(x, dim=2)
            if not (off := gap(whole, want[key])) <= TOLERANCE:
                problems.append(f"rank {rank}: {name}: {key} is off by {off:.1e}")
        for key, wanted in of_captured.items():
            share = core.get_parameter(key).grad
            dist.all_reduce(share)
            if not (off := gap(share, wanted)) <= TOLERANCE:
                problems.append(f"rank {rank}: {name}: the gradient of {key} is off by {off:.1e}")
    return problems


@pytest.mark.parametrize("cp_size", (2, 3))
def test_cores(pool: Any, cp_size: int) -> None:
    report(pool(cp_size).run(as_one, [*USES], timeout=300))
