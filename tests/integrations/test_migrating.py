"""What docs/migrating.md says is the same in other packages, against these, where they run on CPUs."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from ranks import mesh
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from cp_mesh import Contiguous, ShardedSequence, attention

CLOSE = {"rtol": 1e-10, "atol": 1e-10}


def whole(seed: int, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def rows_of_megatron(rank: int) -> None:
    from megatron.core.utils import get_batch_on_this_cp_rank

    axis = mesh((dist.get_world_size(),), ("cp",))
    batch = {"tokens": torch.arange(2 * 24).reshape(2, 24), "labels": torch.arange(2 * 24).reshape(2, 24) + 1}
    own = ShardedSequence(axis).shard(dict(batch))
    theirs = get_batch_on_this_cp_rank(dict(batch), cp_group=axis.get_group())
    assert own["tokens"].shape[1] < 24 and all(torch.equal(own[name], theirs[name]) for name in batch)


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_rows_are_those_of_megatron(pool: Any, num_ranks: int) -> None:
    pytest.importorskip("megatron.core")
    pool(num_ranks).run(rows_of_megatron)


def local_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Of [B, S, H, D], causal."""
    return scaled_dot_product_attention(*(x.transpose(1, 2) for x in (q, k, v)), is_causal=True).transpose(1, 2)


def ulysses_of_deepspeed(rank: int) -> None:
    import deepspeed
    from deepspeed.sequence.layer import DistributedAttention

    with mock.patch("deepspeed.comm.torch.build_shm_op", lambda: None):  # which would be compiled by every rank
        deepspeed.init_distributed("gloo", auto_mpi_discovery=False, dist_init_required=False)
    size = dist.get_world_size()
    group = mesh((size,), ("cp",)).get_group()
    *parts, dout = (whole(i, 2, 8 * size, 2 * size, 4).chunk(size, dim=1)[rank] for i in range(4))
    found = []
    for theirs in (True, False):
        q, k, v = (x.clone().requires_grad_() for x in parts)
        if theirs:
            out = DistributedAttention(local_attention, group, scatter_idx=2, gather_idx=1)(q, k, v, 0)
        else:
            out = attention(q, k, v, mesh=group, seq_dim=1, layout=Contiguous(), method="ulysses")
        assert isinstance(out, Tensor)
        found.append([out, *torch.autograd.grad(out, (q, k, v), dout)])
    for own, other in zip(*found, strict=True):
        torch.testing.assert_close(own, other, **CLOSE)


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_ulysses_is_that_of_deepspeed(pool: Any, num_ranks: int) -> None:
    pytest.importorskip("deepspeed")
    pool(num_ranks).run(ulysses_of_deepspeed)
