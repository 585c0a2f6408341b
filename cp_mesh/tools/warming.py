"""Compile the kernels for given sizes before the first step, and grow the transport's memory."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from cp_mesh.call.function import attention
from cp_mesh.comm.groups import flat
from cp_mesh.errors import refuse, typed
from cp_mesh.geometry.balance import balance
from cp_mesh.geometry.layouts import Layout, ZigZag
from cp_mesh.geometry.mask import Mask
from cp_mesh.kernels.combine import MAX_PIECES, OutputSum, RowSum, accumulation_dtype, finish_sums


@typed
def warm_up(
    mesh: DeviceMesh | dist.ProcessGroup,
    *,
    seq_len: int,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    v_head_dim: int | None = None,
    batch: int = 1,
    dtype: torch.dtype = torch.bfloat16,
    layout: Layout | str = ZigZag(),  # noqa: B008 - frozen
    mask: Mask = Mask(causal=True),  # noqa: B008 - frozen
    documents: bool = False,
    **options: Any,
) -> None:
    """Run attention of these sizes forward and backward, so that training compiles nothing; call it on every rank.

    Without it the first steps compile kernels, 1 to 10 seconds each. Triton and FlashAttention-4 cache compiled kernels
    on disk, and the next start loads them. Before capturing a CUDA graph, call this or run a step.

    Args:
        mesh: as in `cp_mesh.attention`.
        seq_len: tokens in the whole sequence.
        num_heads, num_kv_heads: heads of this rank, after tensor parallelism.
        head_dim, v_head_dim, batch, dtype: of q, k and v. Their memory order is [B, S, H, D], as after a projection.
        layout: as in `cp_mesh.attention`, or "balanced" if each batch gets a layout balanced for its documents.
        mask: the mask, without its documents.
        documents: True if batches have packed documents: then several mixes of document lengths are run.
        options: further keywords of `cp_mesh.attention`, as the model passes them.

    Raises:
        ArgumentError, UnsupportedError: as in `cp_mesh.attention`.

    Example:
        >>> warm_up(mesh["cp"], seq_len=131072, num_heads=32, num_kv_heads=8, head_dim=128, documents=True,
        ...         layout="balanced")  # doctest: +SKIP
    """
    if mask.elementwise:
        refuse("warm_up: mask", "a mask without tensors", "documents, key padding or blocks", "pass documents=True")
    if isinstance(layout, str) and layout != "balanced":
        refuse("warm_up: layout", "a layout or 'balanced'", repr(layout), "layout=ZigZag()")
    group = mesh if isinstance(mesh, dist.ProcessGroup) else flat(mesh).get_group()
    size, rank = group.size(), group.rank()
    on_gpu = torch.cuda.is_available() and "nccl" in dist.get_backend_config(group)
    device = torch.device("cuda", torch.cuda.current_device()) if on_gpu else torch.device("cpu")
    for each in _masks(mask, seq_len) if documents else [mask]:
        placed = balance(each, seq_len, size) if isinstance(layout, str) else layout
        rows = placed.shard_len(seq_len, size, rank)
        q, k, v = (
            torch.zeros(batch, rows, heads, dim, dtype=dtype, device=device).transpose(1, 2).requires_grad_()
            for heads, dim in ((num_heads, head_dim), (num_kv_heads, head_dim), (num_kv_heads, v_head_dim or head_dim))
        )
        result = attention(q, k, v, mesh=mesh, seq_len=seq_len, layout=placed, mask=each, **options)
        out = result if isinstance(result, Tensor) else result[0]
        torch.autograd.grad(out, (q, k, v), torch.zeros_like(out))
    q, k, v = (x.detach()[:, :, :64] for x in (q, k, v))
    _sums(q, k, v, options.get("sinks"))
    if on_gpu:
        torch.cuda.synchronize(device)


def _masks(mask: Mask, seq_len: int) -> Iterator[Mask]:
    """Masks with one document, two of different lengths, many of equal length, and log-normal lengths as in data."""
    tokens = torch.arange(seq_len, device="cpu")
    spread = torch.Generator().manual_seed(0)
    few = max(2, seq_len // 64)  # tokens per document
    ends = torch.empty(seq_len, device="cpu").log_normal_(math.log(few), 1.5, generator=spread).ceil().cumsum(0)
    for ids in (
        torch.zeros(seq_len, dtype=torch.int64, device="cpu"),
        (tokens >= seq_len // 3).long(),
        tokens // few,
        torch.searchsorted(ends.long(), tokens, right=True),
    ):
        yield replace(mask, documents=ids)


def _sums(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None) -> None:
    """Run the sums of 2, `MAX_PIECES` and more partial results: how many a batch will have is not known in advance."""
    sums, numbers = accumulation_dtype(q.dtype), (2, MAX_PIECES, MAX_PIECES + 1, 2 * MAX_PIECES + 1)
    sinks = None if sinks is None else sinks.detach().to(sums)
    for count, other in product(numbers, repeat=2):
        totals = [RowSum(x.shape, sums, x.device) for x in (q, k, v)]
        for total, x, num in zip(totals, (q, k, v), (count, other, other), strict=True):
            for _ in range(num):
                total.add(0, torch.zeros_like(x))
        written = [(total, torch.empty_like(x)) for total, x in zip(totals, (q, k, v), strict=True)]
        for some in (written[:1], written[1:], written):
            finish_sums(some)
    for count in numbers:
        outputs = OutputSum((*q.shape[:3], v.shape[3]), sums, q.device)
        for _ in range(count):
            outputs.add(0, q.new_zeros((*q.shape[:3], v.shape[3])), q.new_zeros(q.shape[:3], dtype=sums))
        outputs.finish(q, q.dtype, sinks=sinks)
