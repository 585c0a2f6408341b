"""Ways to go wrong without an error, each held shut by a test that fails if it opens again."""

from __future__ import annotations

import copy
from dataclasses import dataclass

import pytest
import torch
import torch.nn.functional as F
from dense import dense_attention, dense_mask, make_qkv
from inside import NUM_TENSORS, AttentionSpec, attention_op, room
from ranks import mesh, on_ranks
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard

import cp_mesh
from cp_mesh import ContextParallel, Contiguous, Layout, Mask, ShardedModel, ShardedSequence, Striped, ZigZag, attention
from cp_mesh.geometry.layouts import Run

layouts_module = room("layouts")

B, H, K, S, D = 2, 4, 2, 16, 8


@on_ranks(2)
def test_backward_inside_autocast_sums_in_fp32(rank: int, axis: DeviceMesh) -> None:
    q, k, v, dout = (x[:, :, rank::2].float() for x in make_qkv(B, H, K, S, D))
    grads = []
    for autocast in (False, True):
        leaves = [x.clone().requires_grad_() for x in (q, k, v)]
        out = attention(*leaves, mesh=axis, layout=Striped(), mask=Mask(window=(3, 0)), kernel="reference")
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            grads.append(torch.autograd.grad(out, leaves, dout))
    torch.testing.assert_close(*grads, rtol=0, atol=0)


@on_ranks(4)
def test_gradients_of_a_sum_of_dtensors(rank: int) -> None:
    whole = make_qkv(B, H, K, S, D)[:3]
    leaves = [x.clone().requires_grad_() for x in whole]
    dense_attention(*leaves, dense_mask(S, True))[0].sum().backward()
    grid, placements = mesh((2, 2), ("cp", "tp")), [Shard(2), Replicate()]
    inverse = ZigZag().inverse(S, 2)
    local = [x[:, :, ZigZag().positions(S, 2, grid.get_local_rank("cp"))] for x in whole]
    tensors = [DTensor.from_local(x, grid, placements).requires_grad_() for x in local]
    attention(*tensors).sum().backward()
    for leaf, tensor in zip(leaves, tensors, strict=True):
        assert tensor.grad.placements == tuple(placements)
        torch.testing.assert_close(tensor.grad.full_tensor()[:, :, inverse], leaf.grad, rtol=0, atol=1e-10)


def test_a_layout_of_ones_own_works_once_listed(monkeypatch: pytest.MonkeyPatch) -> None:
    class Mine(Contiguous):
        def spec(self) -> str:
            return "mine"

    monkeypatch.setitem(layouts_module.LAYOUTS, "mine", Mine)
    assert layouts_module.parse_layout("mine") == Mine()


@on_ranks(2)
def test_padding_of_a_sequence(rank: int, axis: DeviceMesh) -> None:
    padded = ShardedSequence(axis, length=5)
    assert padded.mask(Mask(causal=False, length=0)).length == 0
    rows = padded.shard({"lm_labels": torch.zeros(1, 5, dtype=torch.int64)}, pad_value=-100)["lm_labels"]
    assert rank == 1 or (rows == -100).any()  # zigzag: rank 0 holds the tail


@on_ranks(1)
def test_the_op_drops_no_gradient_of_lse(rank: int) -> None:
    group = mesh((1,), ("cp",)).get_group()
    q, k, v = (x.requires_grad_() for x in make_qkv(B, H, K, S, D)[:3])
    spec = AttentionSpec("zigzag", Mask().spec(), 0.3, kernel="cpu_flash").text()
    _, lse, *_ = attention_op(q, k, v, *[None] * NUM_TENSORS, [], S, 2, group.group_name, spec)
    assert not lse.requires_grad


@pytest.mark.full
@on_ranks(1)
def test_compiled_calls_follow_their_window_and_scale(rank: int) -> None:
    axis = mesh((1,), ("cp",))
    q, k, v = make_qkv(B, H, K, S, D)[:3]

    @torch.compile(fullgraph=True, backend="aot_eager")
    def call(q: Tensor, k: Tensor, v: Tensor, left: int, scale: float) -> Tensor:
        return attention(q, k, v, mesh=axis, mask=Mask(window=(left, 0)), scale=scale)

    worst = 0.0
    for left, scale in ((3, 0.3), (5, 0.5), (7, 0.7)):
        want, _ = dense_attention(q, k, v, dense_mask(S, True, window=(left, 0)), scale)
        worst = max(worst, (call(q, k, v, left, scale) - want).abs().max().item())
    assert worst < 1e-10


class Core(nn.Module):
    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)


class Tiny(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.core, self.head = nn.Embedding(7, H * D), Core(), nn.Linear(H * D, 7)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens).unflatten(-1, (H, D)).transpose(1, 2)
        return self.head(self.core(x, x, x).transpose(1, 2).flatten(-2))


@on_ranks(2)
def test_a_whole_model_can_be_copied(rank: int) -> None:
    axis = mesh((2,), ("cp",))
    model = Tiny()
    sequence = ShardedSequence(axis)
    plan = {"": ShardedModel(sequence, positions=None, gather_output=True), "core": ContextParallel(sequence)}
    cp_mesh.parallelize(model, axis, plan)
    tokens = torch.arange(S)[None] % 7
    twin = copy.deepcopy(model)
    torch.testing.assert_close(twin(tokens), model(tokens))
    with torch.no_grad():
        twin.embedding.weight.zero_()
    assert not torch.equal(twin(tokens), model(tokens))


@dataclass(frozen=True)
class Cyclic(Layout):
    """Blocks of tokens dealt round robin; a layout with a parameter."""

    block: int = 4
    in_spec: bool = True

    def runs(self, seq_len: int, cp_size: int, cp_rank: int) -> tuple:
        starts = range(cp_rank * self.block, seq_len, cp_size * self.block)
        return tuple(Run(start, 1, min(self.block, seq_len - start)) for start in starts)

    def spec(self) -> str:
        return f"cyclic:{self.block}" if self.in_spec else "cyclic"


@on_ranks(2)
def test_a_layout_keeps_its_parameters(rank: int, axis: DeviceMesh) -> None:
    layouts_module.LAYOUTS["cyclic"] = Cyclic
    try:
        assert cp_mesh.tools.verify(axis, layout=Cyclic(2), seq_len=21).passed
        q = torch.randn(1, 1, 8, 4)
        with pytest.raises(cp_mesh.ArgumentError, match="from its spec"):
            attention(q, q, q, mesh=axis, layout=Cyclic(2, in_spec=False))
    finally:
        del layouts_module.LAYOUTS["cyclic"]


class SinkCore(Core):
    def __init__(self) -> None:
        super().__init__()
        self.sinks = nn.Parameter(torch.zeros(H))


@on_ranks(2)
def test_check_mode_under_fsdp_and_of_tokens(rank: int) -> None:
    """FSDP2 frees parameters after their use: check mode must not hold on to one that it compared."""
    axis, tokens = mesh((2,), ("cp",)), torch.arange(S)[None] % 7
    model, sequence = Tiny(), ShardedSequence(axis)
    model.core = SinkCore()
    core = ContextParallel(sequence, scores=lambda core, *_: {"sinks": core.sinks})
    cp_mesh.parallelize(model, axis, {"": ShardedModel(sequence, positions=None), "core": core})
    fully_shard(model, mesh=axis)
    cp_mesh.sum_gradients(model)
    with cp_mesh.check_mode():
        for _ in range(2):
            model(tokens).sum().backward()
        with pytest.raises(cp_mesh.RankMismatchError, match="the same tokens on every cp rank"):
            model(tokens + rank)


@on_ranks(2)
def test_verify_follows_its_scale(rank: int, axis: DeviceMesh) -> None:
    for scale in (0.5, None):
        assert cp_mesh.tools.verify(axis, scores={"scale": scale}, seq_len=24).passed
