"""Streams that a model concatenates, each in its own layout."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from cases import gap, make_mask, mask_of, pairs, pairs_of
from checks import TOLERANCE, coverage, report
from dense import dense_attention, make_qkv
from inside import make_schedule
from ranks import on_ranks
from torch import Tensor, nn

from cp_mesh import ArgumentError, ContextParallel, Contiguous, ShardedSequence, Striped, ZigZag, parallelize
from cp_mesh.geometry import Joint, Permuted

B, H, K, D = 2, 6, 3, 4


class Listed(Contiguous):
    """A layout of a user's, with a tensor."""

    @property
    def tensor(self) -> Tensor:
        return torch.arange(4)


def test_a_tensor_of_a_users_layout_is_refused_in_a_stream() -> None:
    with pytest.raises(ArgumentError, match="got a Listed with a tensor; Permuted takes any order"):
        Joint(3, (4, Listed()))


@pytest.mark.parametrize("cp_size", (2, 3, 5))
@pytest.mark.parametrize("mask", ("causal", "full", "window", "prefix and window", "everything"))
def test_streams_of_unlike_strides_are_covered(mask: str, cp_size: int) -> None:
    """Blocks between them are no bands: every pair is computed once, though more rows may travel than are needed."""
    S = 23
    layout = Joint((9, Striped()), 5, (9, ZigZag()))
    report([coverage(layout, make_mask(mask, B, S), pairs(mask, B, S), cp_size)])


def test_a_listed_piece_is_fetched_whole() -> None:
    """Of the listed positions 6 and 7 of rank 0, the queries of ranks without such a list see only 6."""
    layout, mask = Joint(6, (7, Permuted(range(7)))), {"causal": True, "prefix": 7}
    report([coverage(layout, mask_of(mask), pairs_of(mask, 13), 6)])
    for rank in (4, 5):
        assert make_schedule(layout, mask_of(mask), 13, 6, rank).fetch[0] == ((0, 3),)


class Full(nn.Module):
    """An attention core without a mask."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, enable_gqa=True)


@pytest.mark.parametrize("compiled", (False, pytest.param(True, marks=pytest.mark.full)))
@on_ranks(2)
def test_in_a_plan(axis: Any, compiled: bool) -> None:
    """Cores of a plan whose sequence is of several streams; text and image are sharded each by itself."""
    joint = ShardedSequence(axis, Joint(9, (14, ZigZag())), length=23, pad=False)
    image = ShardedSequence(axis, ZigZag(), length=14, pad=False)
    first = ShardedSequence(axis, Contiguous(), length=9, pad=False)
    core: Any = parallelize(Full(), axis, {"": ContextParallel(joint, mask=make_mask("full", B, 23))})
    core = torch.compile(core, backend="aot_eager", fullgraph=True) if compiled else core
    *inputs, _ = make_qkv(B, H, K, 23, D)
    parts = [x.split([9, 14], dim=2) for x in inputs]
    out = core(*(torch.cat([first.shard(t, dim=2), image.shard(i, dim=2)], dim=2) for t, i in parts))
    assert gap(joint.unshard(out, dim=2), dense_attention(*inputs, pairs("full", B, 23))[0]) <= TOLERANCE
