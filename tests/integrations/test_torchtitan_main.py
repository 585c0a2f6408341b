"""Attention for the seam of torchtitan's main branch, against a copy of that interface (titan_main.py)."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from dense import dense_attention
from titan_main import (
    ContextParallelTransform,
    VarlenAttentionMetadata,
    VarlenInnerAttention,
    torchtitan_main,
)
from torch import Tensor

from cp_mesh import Contiguous, Layout, Permuted, ZigZag

T, HEADS, KV_HEADS, DIM = 48, 4, 2, 8
ENDS = [0, 11, 30, 31, T, T]  # the last document is empty, as where their number is fixed
SHUFFLED = torch.randperm(T, generator=torch.Generator().manual_seed(3))


def rescaled(out: Tensor, lse: Tensor) -> Tensor:
    """What sinks of gpt_oss do: out [T, H, D], lse [T, H]."""
    return out * torch.sigmoid(lse - torch.linspace(-1, 1, out.shape[1], dtype=lse.dtype))[..., None]


def metadata(ends: list[int] = ENDS) -> VarlenAttentionMetadata:
    cumulative = torch.tensor(ends, dtype=torch.int32)
    return VarlenAttentionMetadata(cumulative, cumulative, T, T)


def permutation_of(layout: str, size: int) -> Tensor | None:
    if layout == "contiguous":
        return None
    return (SHUFFLED if layout == "shuffled" else ZigZag().permutation(T, size))[None]


def tensors() -> list[Tensor]:
    numbers = torch.Generator().manual_seed(0)
    shapes = (T, HEADS, DIM), (T, KV_HEADS, DIM), (T, KV_HEADS, DIM), (T, HEADS, DIM)
    return [torch.randn(*shape, generator=numbers, dtype=torch.float64) for shape in shapes]


def on_ranks(rank: int, layout: str, window: tuple[int, int], sinks: bool) -> tuple[Layout, list[Tensor]]:
    """The layout, and this rank's rows of the result and the gradients of q, k, v."""
    group, size = dist.group.WORLD, dist.get_world_size()
    with torchtitan_main(group) as main:
        core = main.MeshVarlenInnerAttention(main.MeshVarlenInnerAttention.Config(window_size=window))
        assert isinstance(core, VarlenInnerAttention)
        permutation = permutation_of(layout, size)
        local = core.prepare_cp_metadata(metadata(), permutation=permutation)
        local.annotate_spmd_types()
        order = torch.arange(T) if permutation is None else permutation[0]
        mine = order.chunk(size)[rank]
        q, k, v, dout = (x[mine] for x in tensors())
        leaves = [x.clone().requires_grad_() for x in (q, k, v)]
        transform = rescaled if sinks else None
        out = core(*leaves, attention_metadata=local, scale=0.3, out_transform=transform, enable_gqa=True)
        out.backward(dout)
        return local.layout, [mine, out.detach(), *(x.grad for x in leaves)]


@pytest.mark.parametrize("num_ranks", [2, 3])
@pytest.mark.parametrize("window", [(-1, 0), (7, 0), (-1, -1)])
@pytest.mark.parametrize("layout", ["contiguous", "zigzag", "shuffled"])
def test_parity(pool: Any, layout: str, window: tuple[int, int], num_ranks: int) -> None:
    sinks = window == (7, 0)
    kinds = {"contiguous": Contiguous, "zigzag": ZigZag, "shuffled": Permuted}
    ranks = pool(num_ranks).run(on_ranks, layout, window, sinks)
    q, k, v, dout = tensors()
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    ids = torch.bucketize(torch.arange(T), torch.tensor(ENDS[1:]), right=True)
    distance = torch.arange(T)[:, None] - torch.arange(T)
    mask = ids[:, None] == ids
    if window[1] == 0:
        mask &= distance >= 0
    if window[0] >= 0:
        mask &= distance <= window[0]
    out, lse = dense_attention(*(x.transpose(0, 1)[None] for x in leaves), mask[None], 0.3)
    out, lse = out[0].transpose(0, 1), lse[0].transpose(0, 1)
    out = rescaled(out, lse) if sinks else out
    out.backward(dout)
    for found, (mine, *parts) in ranks:
        assert type(found) is kinds[layout]
        for part, whole in zip(parts, (out, *(x.grad for x in leaves)), strict=True):
            assert (part - whole[mine]).abs().max() < 1e-10 * whole.abs().max()


def refused(rank: int, case: str) -> None:
    with torchtitan_main(None if case == "no axis" else dist.group.WORLD) as main:
        kind = main.MeshVarlenInnerAttention
        if case == "window":
            kind(kind.Config(window_size=(3, 2)))
        if case == "method":
            kind(kind.Config(method="rings"))
        core = kind(kind.Config(**{case: "other"} if case in ("kernel", "transport") else {}))
        given = metadata()
        if case == "keys":
            given = given._replace(cu_seq_k=torch.tensor([0, T], dtype=torch.int32))
        permutation = torch.stack([SHUFFLED, SHUFFLED]) if case == "rows" else None
        local = core.prepare_cp_metadata(given, permutation=permutation)
        q, k, v, _ = (x[: T // 2] for x in tensors())
        arguments = {"block_mask": local} if case == "argument" else {}
        core(q, k, v, attention_metadata=given if case == "metadata" else local, **arguments)


@pytest.mark.parametrize(
    ("case", "words"),
    [
        ("window", "window_size: expected a causal window, or none, got (3, 2); (-1, 0) is causal"),
        ("method", "rings"),
        ("kernel", "kernel: expected"),
        ("transport", "transport: expected"),
        ("keys", "expected cu_seq_k equal to cu_seq_q"),
        ("rows", "permutation: expected [1, 48], of packed tokens, got [2, 48]"),
        ("argument", "got block_mask; leave it out"),
        ("metadata", "attention_metadata: expected MeshVarlenMetadata, got VarlenAttentionMetadata"),
        ("no axis", "a cp axis of 2 or more ranks, got None; leave the transform out"),
    ],
)
def test_refusals(pool: Any, case: str, words: str) -> None:
    for raised in pool(2).run_expecting_error(refused, case):
        assert raised is not None and raised.kinds[0] in ("ArgumentError", "UnsupportedError")
        assert words in raised.message and raised.num_collectives == 0


def test_the_page_runs() -> None:
    text = (Path(__file__).resolve().parents[2] / "docs" / "torchtitan.md").read_text()
    (block,) = re.findall(r"^```python\n(# torchtitan's main branch.*?)^```", text, re.MULTILINE | re.DOTALL)
    names = {"ContextParallelTransform": ContextParallelTransform, "VarlenInnerAttention": VarlenInnerAttention}
    with torchtitan_main(None) as main:
        exec(block, names)
        kinds = names["transform"].inner_attention_map  # type: ignore[attr-defined]
        assert kinds == {VarlenInnerAttention: main.MeshVarlenInnerAttention}
