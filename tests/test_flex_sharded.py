"""Captured tensors of flex that ranks hold in parts: made whole before the call, with gradients; DTensors refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from cases import LAYOUTS, gap
from checks import TOLERANCE, report
from dense import make_qkv
from flex_uses import numbers
from ranks import mesh, num_collectives
from torch import Tensor
from torch.distributed.tensor import DTensor, Partial, Shard

from cp_mesh import Contiguous, ShardedSequence, UnsupportedError, flex_attention
from cp_mesh.flex import create_block_mask

B, H, S, D = 2, 4, 24, 5


def made_whole(rank: int, cp_size: int) -> list[str]:
    """What is wrong with results, and with gradients of parts, against dense attention in fp64."""
    axis, problems = mesh((cp_size,), ("cp",)), []
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
        problems += [f"{name}, {what}: {off:.1e}" for what, xs in found.items() if not (off := gap(*xs)) <= TOLERANCE]
    return problems


@pytest.mark.parametrize("cp_size", (2, 3, 4))
def test_parts_that_are_made_whole(pool: Any, cp_size: int) -> None:
    report(pool(cp_size).run(made_whole, cp_size))


def refused(rank: int) -> list[str]:
    axis = mesh((2,), ("cp",))
    q, k, v, _ = (x[:, :, Contiguous().positions(S, 2, rank)] for x in make_qkv(B, H, H, S, D))
    x, before = DTensor.from_local(numbers(S // 2), axis, [Shard(0)]), num_collectives()
    block_mask = create_block_mask(lambda b, h, i, j: x[i] >= x[j], None, None, S, S)
    for given in ((lambda s, b, h, i, j: s + x[i], None), (None, block_mask)):
        with pytest.raises(UnsupportedError, match=r"got a DTensor, .*full_tensor\(grad.*sequence\.unshard\(part, dim"):
            flex_attention(q, k, v, *given, mesh=axis)
    with pytest.raises(UnsupportedError, match=r"call x.full_tensor.* before"):
        flex_attention(q, k, v, lambda s, b, h, i, j: s + x.full_tensor()[i], mesh=axis)
    return ["refused after a collective"] * (num_collectives() > before)


def test_dtensors_are_refused(pool: Any) -> None:
    report(pool(2).run(refused))
