"""Captured tensors of flex that ranks hold in parts: made whole before the call, with gradients; DTensors refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from cases import LAYOUTS, gap
from checks import TOLERANCE
from dense import make_qkv
from flex_uses import numbers
from ranks import on_ranks, refused
from torch import Tensor
from torch.distributed.tensor import DTensor, Partial, Shard

from cp_mesh import Contiguous, ShardedSequence, UnsupportedError, flex_attention
from cp_mesh.flex import create_block_mask

B, H, S, D = 2, 4, 24, 5


@pytest.mark.parametrize("cp_size", (2, 3, 4))
@on_ranks("cp_size")
def test_parts_that_are_made_whole(rank: int, axis: Any, cp_size: int) -> None:
    """Results, and gradients of parts, against dense attention in fp64."""
    *qkv, dout = make_qkv(B, H, H, S, D)
    gate, table = numbers(B, H, S).requires_grad_(), numbers(12, S).requires_grad_()
    scores = qkv[0] @ qkv[1].mT * D**-0.5 + gate[:, :, None]
    want = (scores + table.unflatten(0, (3, H))[0][:, :, None]).softmax(-1) @ qkv[2]
    grads = torch.autograd.grad(want, (gate, table), dout)
    for name in ("zigzag", "striped", "contiguous", "shuffled"):
        sequence = ShardedSequence(axis, layout=LAYOUTS[name](S), length=S)
        rows = sequence.positions()
        part = gate.detach()[:, :, rows].requires_grad_()
        sharded = DTensor.from_local(table.detach().chunk(cp_size)[rank], axis, [Shard(0)]).requires_grad_()
        keys, heads = sequence.unshard(part, 2), sharded.full_tensor(grad_placements=[Partial()])

        def score_mod(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor, x: Any = keys, y: Any = heads) -> Any:
            return score + x[b, h, j] + y[h, i]

        local = [x[:, :, rows] for x in qkv]
        out = flex_attention(*local, score_mod, mesh=axis, layout=sequence.layout, seq_len=S)
        of_part, of_table = torch.autograd.grad(out, (part, sharded), dout[:, :, rows])
        found = {"out": (out, want[:, :, rows]), "gate": (of_part, grads[0][:, :, rows])}
        found["table"] = of_table.full_tensor(), grads[1]
        for what, pair in found.items():
            assert gap(*pair) <= TOLERANCE, (name, what)


@on_ranks(2)
def test_dtensors_are_refused(rank: int, axis: Any) -> None:
    q, k, v, _ = (x[:, :, Contiguous().positions(S, 2, rank)] for x in make_qkv(B, H, H, S, D))
    x = DTensor.from_local(numbers(S // 2), axis, [Shard(0)])
    block_mask = create_block_mask(lambda b, h, i, j: x[i] >= x[j], None, None, S, S)
    for given in ((lambda s, b, h, i, j: s + x[i], None), (None, block_mask)):
        with refused(r"got a DTensor, .*full_tensor\(grad.*sequence\.unshard\(part, dim", UnsupportedError):
            flex_attention(q, k, v, *given, mesh=axis)
    with refused(r"call x.full_tensor.* before", UnsupportedError):
        flex_attention(q, k, v, lambda s, b, h, i, j: s + x.full_tensor()[i], mesh=axis)
