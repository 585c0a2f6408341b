"""Flex in cores: a module that calls `cp_mesh.flex_attention` computes under `ContextParallel` what one rank does.

What is refused beside it: `refusals/styles.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from cases import gap
from checks import TOLERANCE
from dense import make_qkv
from flex_uses import ALL, SCORES, expected, mask_of, numbers
from ranks import mesh, on_ranks, refused
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.nn.attention import flex_attention as of_torch
from torch.utils.checkpoint import checkpoint

from cp_mesh import (
    ArgumentError,
    ContextParallel,
    Mask,
    ShardedSequence,
    UnsupportedError,
    ZigZag,
    flex_attention,
    parallelize,
)
from cp_mesh.flex import create_block_mask
from cp_mesh.tensor_parallel import OverlappedColwise

B, H, K, D, S = 2, 4, 2, 5, 24


class Core(nn.Module):
    """Calls a function, by default ours, with a score of `flex_uses` whose tensors are its parameters and buffers."""

    def __init__(
        self, score: str = "none", mask: str = "none", S: int = S, of: str = "", function: Any = flex_attention
    ) -> None:
        super().__init__()
        self.score, self.mask, self.S, self.function = score, mask, S, function
        for name, x in SCORES[score].tensors(B, H, S).items():
            if x.is_floating_point():
                self.register_parameter(name, nn.Parameter(x.clone()))
            else:
                self.register_buffer(name, x)
        mask_mod = mask_of(mask).make(mask_of(mask).tensors(B, H, S))
        make = create_block_mask if of != "torch" else of_torch.create_block_mask
        options = {"device": "cpu", "BLOCK_SIZE": 8} if of == "torch" else {}
        self.block_mask = None if mask_mod is None else make(mask_mod, B, H, S, S, **options)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Any:
        score_mod = SCORES[self.score].make(dict(self.named_parameters()) | dict(self.named_buffers()))
        return self.function(q, k, v, score_mod, self.block_mask, enable_gqa=True, **options)

    def inputs(self) -> tuple[list[Tensor], Tensor]:
        *qkv, dout = make_qkv(B, H, K, self.S, D)
        return qkv, dout

    def expected(self, scale: float | None = None) -> dict[str, Tensor]:
        return expected(*self.inputs(), None, self.score, self.mask, scale)

    def check(self, got: dict[str, Tensor], scale: float | None = None) -> None:
        """Whole results, and this rank's share of gradients of parameters."""
        for name, want in self.expected(scale).items():
            if name not in got:
                got[name] = self.get_parameter(name[1:]).grad
                dist.all_reduce(got[name])
            assert gap(got[name], want) <= TOLERANCE, name


def style(axis: Any, mask: Mask = ALL, **options: Any) -> ContextParallel:
    of_sequence = {name: options.pop(name) for name in ("length", "pad") if name in options}
    return ContextParallel(ShardedSequence(axis, ZigZag(), **of_sequence), mask=mask, **options)


USES: dict[str, tuple[Callable[[], Core], dict[str, Any], dict[str, Any]]] = {
    "a score": (lambda: Core("two through each other"), {}, {}),
    "a mask": (lambda: Core("none", "causal or of one image"), {}, {}),
    "another method": (lambda: Core("scale of a head", "windows of heads"), {"method": "all_gather"}, {}),
    "a mask of order": (lambda: Core("ALiBi", "dilated", of="torch"), {}, {}),
    "a scale": (lambda: Core("relative table", "causal"), {}, {"scale": 0.3}),
    "padding": (lambda: Core("pair bias", "neighborhood", 21), {"length": 21}, {}),
    "padding, causal": (lambda: Core("relative table", "causal", 21, "torch"), {"length": 21}, {}),
    "unequal shards": (lambda: Core("pair bias", "neighborhood", 21), {"length": 21, "pad": False}, {}),
    "compiled": (lambda: Core("ALiBi", "causal", of="torch", function=torch.compile(flex_attention)), {}, {}),
}


@pytest.mark.parametrize("cp_size", (2, pytest.param(3, marks=pytest.mark.full)))
@pytest.mark.parametrize("name", USES)
@on_ranks("cp_size", timeout=300.0)
def test_cores(axis: Any, name: str) -> None:
    make, options, call = USES[name]
    core, applied = make(), style(axis, **options)
    core = parallelize(core, axis, {"": applied})
    qkv, dout = core.inputs()
    leaves, dout = [applied.sequence.shard(x, dim=2).requires_grad_() for x in qkv], applied.sequence.shard(dout, dim=2)
    out, lse = core(*leaves, return_lse=True, **call)
    grads = torch.autograd.grad(out, leaves, dout, retain_graph=True)
    out.backward(dout)
    got = zip(("out", "lse", "dq", "dk", "dv"), (out, lse, *grads), strict=True)
    core.check({name: applied.sequence.unshard(x.detach(), dim=2) for name, x in got}, **call)


@on_ranks(2)
def test_a_core_without_pairs(axis: Any) -> None:
    """No batch row, or no token."""
    for batch, S in ((0, 24), (B, 0)):
        ids, core = torch.zeros(batch, S, dtype=torch.int64), Core("gate", S=S)
        core.gate = nn.Parameter(numbers(batch, S))
        core.block_mask = create_block_mask(lambda b, h, i, j, ids=ids: ids[b, i] == ids[b, j], None, None, S, S)
        parallelize(core, axis, {"": style(axis)})
        leaves = [torch.zeros(batch, heads, S // 2, D, requires_grad=True).double() for heads in (H, K, K)]
        out = core(*leaves)
        grads = torch.autograd.grad(out.sum(), [*leaves, core.gate])
        assert out.shape == leaves[0].shape
        assert [x.shape for x in grads] == [x.shape for x in (*leaves, core.gate)] and not grads[-1].any()


@on_ranks(2)
def test_a_mask_that_was_written_is_looked_at_again(axis: Any) -> None:
    """A core whose BlockMask reads ids that are written after the first call: its blocks are those of before."""
    image = torch.zeros(S, dtype=torch.int64)

    def mask_mod(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return (q_idx >= kv_idx) | ((image[q_idx] == image[kv_idx]) & (image[q_idx] > 0))

    core, qkv = Core(), [x[:, :, :12] for x in make_qkv(B, K, K, S, D)[:3]]
    core.block_mask = of_torch.create_block_mask(mask_mod, None, None, S, S, device="cpu", BLOCK_SIZE=8)
    parallelize(core, axis, {"": style(axis)})
    core(*qkv)
    image[3:9] = 1
    with refused("follow from its mask_mod", UnsupportedError):
        core(*qkv)


# --- beside other axes
@on_ranks(4)
def test_heads_over_tp() -> None:
    """DTensors over tp alone: functions see global heads, and parameters get the share of this rank's heads."""
    grid, core = mesh((2, 2), ("cp", "tp")), Core("scale of a head", "windows of heads")
    applied = style(grid["cp"])
    parallelize(core, grid["cp"], {"": applied})
    qkv, dout = core.inputs()
    *leaves, dout = (
        distribute_tensor(applied.sequence.shard(x, dim=2), grid["tp"], [Shard(1)], src_data_rank=None)
        for x in (*qkv, dout)
    )
    out, lse = core(*(x.requires_grad_() for x in leaves), return_lse=True)
    assert isinstance(out, DTensor) and isinstance(lse, DTensor) and out.placements == lse.placements == (Shard(1),)
    out.backward(dout)
    got = zip(("out", "lse", "dq", "dk", "dv"), (out, lse, *(x.grad for x in leaves)), strict=True)
    core.check({name: applied.sequence.unshard(x.detach().full_tensor(), dim=2) for name, x in got})


@on_ranks(2)
def test_batch_rows_over_dp(rank: int) -> None:
    """DTensors over dp alone: functions see global batch rows."""
    grid, rows, core = mesh((1, 2), ("cp", "dp")), slice(rank, rank + 1), Core("gate", "documents")
    want = core.expected()["out"]
    parallelize(core, grid["cp"], {"": style(grid["cp"])})
    qkv = (DTensor.from_local(x[rows], grid["dp"], [Shard(0)], run_check=False) for x in core.inputs()[0])
    assert gap(core(*qkv).to_local().detach(), want[rows]) <= TOLERANCE


class Attention(nn.Module):
    """Linears over tp, whose results are plain tensors of this rank's heads, and a core."""

    def __init__(self, core: nn.Module) -> None:
        super().__init__()
        self.wq, self.core = nn.Linear(D, H * D, bias=False, dtype=torch.float64), core

    def forward(self, x: Tensor) -> Tensor:
        q = self.wq(x).unflatten(-1, (-1, D)).transpose(1, 2)
        return self.core(q, q, q)


@pytest.mark.parametrize("first", [False, True])
@on_ranks(2)
def test_a_tensor_of_all_heads_beside_plain_tensors_over_tp(first: bool) -> None:
    """h counts this rank's: a slope for each head of the model would be another head's on later ranks."""
    grid, slopes, heads = mesh((1, 2), ("cp", "tp")), numbers(H), H // 2
    begin = grid.get_local_rank("tp") * heads if first else 0

    class ALiBi(nn.Module):
        def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return flex_attention(q, k, v, lambda s, b, h, i, j: s - slopes[h + begin if first else h] * (i - j))

    model = Attention(ALiBi())
    parallelize(model, grid["tp"], {"": OverlappedColwise("wq", mode="all_reduce")})
    parallelize(model, grid["cp"], {"core": style(grid["cp"])})
    words = f"read at h: expected {heads} elements, the heads of this tp rank, which h counts, got {H}"
    with nullcontext() if first else pytest.raises(ArgumentError, match=words):
        model(numbers(B, S, D))


# --- in models
class Model(nn.Module):
    def __init__(self, core: nn.Module) -> None:
        super().__init__()
        self.core = core

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return 2 * self.core(q.sin(), k, v).cos()


@on_ranks(2)
def test_models_around_a_core(axis: Any) -> None:
    """In a checkpoint, and compiled but for the call."""
    found = {}
    for way in ("eager", "checkpoint", "compiled"):
        torch._dynamo.reset()
        core, applied = Core("pair bias", "causal", of="torch"), style(axis)
        parallelize(core, axis, {"": applied})
        model: Any = Model(core)
        run = torch.compile(model, backend="aot_eager") if way == "compiled" else model
        q, k, v, dout = (applied.sequence.shard(x, dim=2) for x in make_qkv(B, H, K, S, D))
        q.requires_grad_()
        out = checkpoint(run, q, k, v, use_reentrant=False) if way == "checkpoint" else run(q, k, v)
        out.backward(dout)
        found[way] = [out.detach(), q.grad, core.get_parameter("bias").grad]
        assert all(gap(x, y) <= TOLERANCE for x, y in zip(found[way], found["eager"], strict=True)), way


@on_ranks(2)
def test_pytorchs_compiled_function_is_refused(axis: Any) -> None:
    core = Core(function=torch.compile(of_torch.flex_attention), of="torch")
    with refused("Import cp_mesh.flex_attention under its name", Exception):
        parallelize(core, axis, {"": style(axis)})(*[x[:, :, :12] for x in make_qkv(B, H, K, S, D)[:3]])


@pytest.mark.parametrize("fullgraph", [True, False])
@pytest.mark.full
@on_ranks(2)
def test_pytorchs_function_is_refused_in_compiled_models(axis: Any, fullgraph: bool) -> None:
    qkv = [x[:, :, :12] for x in make_qkv(B, H, K, S, D)[:3]]
    model = parallelize(Model(Core(function=of_torch.flex_attention)), axis, {"core": style(axis)}, watch=False)
    with refused("PyTorch's flex_attention is not available in a core", Exception):
        torch.compile(model, backend="eager", fullgraph=fullgraph)(*qkv)


class Breaks(nn.Module):
    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        torch._dynamo.graph_break()
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)


@pytest.mark.full
@on_ranks(2)
def test_a_core_that_is_not_traced_in_compiled_code(axis: Any) -> None:
    """It is run while Dynamo waits for frames, and may then not be told to leave them."""
    torch._dynamo.reset()
    model = parallelize(Model(Breaks()), axis, {"core": style(axis, Mask())}, watch=False)
    qkv = [x[:, :, :12] for x in make_qkv(B, H, K, S, D)[:3]]
    assert gap(torch.compile(model, backend="eager")(*qkv), model(*qkv)) <= TOLERANCE
