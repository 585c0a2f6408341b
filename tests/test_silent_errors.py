"""Ways to go wrong without an error, each held shut by a test that fails if it opens again."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from dense import dense_attention, dense_mask, make_qkv
from inside import NUM_TENSORS, AttentionSpec, attention_op, room
from ranks import mesh
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

import cp_mesh
from cp_mesh import ContextParallel, Contiguous, Layout, Mask, ShardedModel, ShardedSequence, Striped, ZigZag, attention
from cp_mesh.geometry.layouts import Run

layouts_module = room("layouts")

B, H, K, S, D = 2, 4, 2, 16, 8


class Core(nn.Module):
    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)


def backward_inside_autocast(rank: int, mask_window: tuple[int, int] | None) -> float:
    q, k, v, dout = (x[:, :, rank::2].float() for x in make_qkv(B, H, K, S, D))
    grads = []
    for autocast in (False, True):
        leaves = [x.clone().requires_grad_() for x in (q, k, v)]
        mask = Mask(window=mask_window)
        out = attention(*leaves, mesh=mesh((2,), ("cp",)), layout=Striped(), mask=mask, kernel="reference")
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            grads.append(torch.autograd.grad(out, leaves, dout))
    return max((a - b).abs().max().item() for a, b in zip(*grads, strict=True))


def test_backward_inside_autocast_sums_in_fp32(pool: Any) -> None:
    assert pool(2).run(backward_inside_autocast, (3, 0)) == [0.0, 0.0]


def sum_of_dtensors(rank: int) -> None:
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


def test_gradients_of_a_sum_of_dtensors(pool: Any) -> None:
    pool(4).run(sum_of_dtensors)


def core_on_tp(rank: int, placement: Any, num_heads: int) -> None:
    grid = mesh((2, 2), ("cp", "tp"))
    core = Core()
    ContextParallel(ShardedSequence(grid["cp"]))._apply(core, grid["cp"])
    q = torch.randn(B, num_heads, S, D)
    core(*(DTensor.from_local(q, grid["tp"], [placement]) for _ in range(3)))


@pytest.mark.parametrize("placement", [Shard(2), Shard(3), Partial()], ids=str)
def test_cores_on_tp_refuse_placements_they_cannot_have(pool: Any, placement: Any) -> None:
    for error in pool(4).run_expecting_error(core_on_tp, placement, H):
        assert error is not None and error.type in ("ArgumentError", "UnsupportedError")
        assert "placement on mesh axis 'tp'" in error.message and error.num_collectives == 0


def uneven_heads(rank: int) -> None:
    grid = mesh((2, 2), ("cp", "tp"))
    core = Core()
    ContextParallel(ShardedSequence(grid["cp"]))._apply(core, grid["cp"])
    heads = 2 if grid.get_local_rank("tp") == 0 else 1
    q = torch.randn(B, heads, S, D)
    shape, stride = torch.Size((B, 3, S, D)), (3 * S * D, S * D, D, 1)
    core(*(DTensor.from_local(q, grid["tp"], [Shard(1)], shape=shape, stride=stride) for _ in range(3)))


def test_cores_on_tp_refuse_uneven_heads_on_every_rank(pool: Any) -> None:
    for error in pool(4).run_expecting_error(uneven_heads):
        assert error is not None and error.type == "ArgumentError" and "the size of axis 'tp'" in error.message


class WithMultihead(Core):
    def __init__(self) -> None:
        super().__init__()
        self.other = nn.MultiheadAttention(D, 1, batch_first=True)

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        x = q[:, 0]
        return self.other(x, x, x)[0][:, None] + super().forward(q, k, v)


def beside_multihead(rank: int) -> None:
    axis = mesh((2,), ("cp",))
    core = WithMultihead()
    ContextParallel(ShardedSequence(axis))._apply(core, axis)
    core(*(torch.randn(B, H, S, D) for _ in range(3)))


def test_multihead_attention_in_a_core_is_refused(pool: Any) -> None:
    for error in pool(2).run_expecting_error(beside_multihead):
        assert error is not None and error.type == "UnsupportedError" and "multi_head_attention" in error.message


class Tiny(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.core, self.head = nn.Embedding(7, H * D), Core(), nn.Linear(H * D, 7)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens).unflatten(-1, (H, D)).transpose(1, 2)
        return self.head(self.core(x, x, x).transpose(1, 2).flatten(-2))


def partly_summed(rank: int, how: str) -> None:
    grid = mesh((2, 2), ("dp", "cp"))
    model = Tiny()
    sequence = ShardedSequence(grid["cp"])
    plan = {"": ShardedModel(sequence, positions=None), "core": ContextParallel(sequence)}
    cp_mesh.parallelize(model, grid["cp"], plan)
    if how == "dp alone":
        fully_shard(model, mesh=grid["dp"])
    elif how == "head alone":
        fully_shard(model.head, mesh=grid["dp", "cp"]._flatten("dp_cp"))
    else:
        fully_shard(model, mesh=grid["dp", "cp"]._flatten("dp_cp"))
    cp_mesh.sum_gradients(model)


@pytest.mark.parametrize("how", ["dp alone", "head alone"])
def test_sum_gradients_refuses_a_sum_without_cp(pool: Any, how: str) -> None:
    for error in pool(4).run_expecting_error(partly_summed, how):
        assert error is not None and error.type == "ArgumentError" and "holds the cp ranks" in error.message


def test_sum_gradients_accepts_dp_x_cp(pool: Any) -> None:
    pool(4).run(partly_summed, "dp x cp")


class Backwards(ZigZag):
    def runs(self, seq_len: int, cp_size: int, cp_rank: int) -> tuple:
        return super().runs(seq_len, cp_size, cp_size - 1 - cp_rank)


def refused_arguments(rank: int) -> list[str]:
    axis = mesh((2,), ("cp",))
    q, k, v = (x[:, :, ::2] for x in make_qkv(B, H, K, S, D)[:3])
    texts = []
    for changed in (
        {"layout": Backwards()},
        {"scale": -1.0},
        {"scale": float("nan")},
        {"scale": torch.tensor(1.0, requires_grad=True)},
    ):
        with pytest.raises(cp_mesh.ArgumentError) as caught:
            attention(q, k, v, mesh=axis, **changed)
        texts.append(str(caught.value))
    columns = mesh((2,), ("tp",))
    heads = [DTensor.from_local(x, columns, [Shard(1)]) for x in (q, k, v)]
    with pytest.raises(cp_mesh.ArgumentError) as caught:
        attention(*heads)
    texts.append(str(caught.value))
    return texts


def test_arguments_that_would_be_replaced_or_guessed(pool: Any) -> None:
    for texts in pool(2).run(refused_arguments):
        assert "LAYOUTS" in texts[0] and all("a positive number" in text for text in texts[1:4])
        assert 'an axis named "cp"' in texts[4]


def test_a_layout_of_ones_own_works_once_listed(monkeypatch: pytest.MonkeyPatch) -> None:
    class Mine(Contiguous):
        def spec(self) -> str:
            return "mine"

    monkeypatch.setitem(layouts_module.LAYOUTS, "mine", Mine)
    assert layouts_module.parse_layout("mine") == Mine()


def sequence_traps(rank: int) -> None:
    axis = mesh((2,), ("cp",))
    padded = ShardedSequence(axis, length=5)
    assert padded.mask(Mask(causal=False, length=0)).length == 0
    with pytest.raises(cp_mesh.ArgumentError, match="pad_value"):
        padded.shard({"lm_labels": torch.zeros(1, 5, dtype=torch.int64)})
    rows = padded.shard({"lm_labels": torch.zeros(1, 5, dtype=torch.int64)}, pad_value=-100)["lm_labels"]
    assert rank == 1 or (rows == -100).any()  # zigzag: rank 0 holds the tail
    with pytest.raises(cp_mesh.ArgumentError, match="this sequence's length"):
        ShardedSequence(axis, length=7, pad=False).positions(9)
    logits = DTensor.from_local(torch.zeros(1, 4, 7), axis, [Replicate()])
    with pytest.raises(cp_mesh.ArgumentError, match="DTensors"):
        cp_mesh.cross_entropy(logits, torch.zeros(1, 4, dtype=torch.int64), axis)


def test_padding_and_positions_of_another_sequence(pool: Any) -> None:
    pool(2).run(sequence_traps)


def lse_of_the_op(rank: int) -> None:
    group = mesh((1,), ("cp",)).get_group()
    q, k, v = (x.requires_grad_() for x in make_qkv(B, H, K, S, D)[:3])
    spec = AttentionSpec("zigzag", Mask().spec(), 0.3, kernel="cpu_flash").text()
    _, lse, *_ = attention_op(q, k, v, *[None] * NUM_TENSORS, [], S, 2, group.group_name, spec)
    assert not lse.requires_grad


def test_the_op_drops_no_gradient_of_lse(pool: Any) -> None:
    pool(1).run(lse_of_the_op)


def changing_scalars(rank: int) -> float:
    axis = mesh((1,), ("cp",))
    q, k, v = make_qkv(B, H, K, S, D)[:3]

    @torch.compile(fullgraph=True, backend="aot_eager")
    def call(q: Tensor, k: Tensor, v: Tensor, left: int, scale: float) -> Tensor:
        return attention(q, k, v, mesh=axis, mask=Mask(window=(left, 0)), scale=scale)

    worst = 0.0
    for left, scale in ((3, 0.3), (5, 0.5), (7, 0.7)):
        want, _ = dense_attention(q, k, v, dense_mask(S, True, window=(left, 0)), scale)
        worst = max(worst, (call(q, k, v, left, scale) - want).abs().max().item())
    return worst


@pytest.mark.full
def test_compiled_calls_follow_their_window_and_scale(pool: Any) -> None:
    assert pool(1).run(changing_scalars)[0] < 1e-10


def copied(rank: int) -> None:
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


def test_a_whole_model_can_be_copied(pool: Any) -> None:
    pool(2).run(copied)


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


def layout_with_a_parameter(rank: int) -> None:
    layouts_module.LAYOUTS["cyclic"] = Cyclic
    try:
        axis = mesh((2,), ("cp",))
        assert cp_mesh.tools.verify(axis, layout=Cyclic(2), seq_len=21).passed
        q = torch.randn(1, 1, 8, 4)
        with pytest.raises(cp_mesh.ArgumentError, match="from its spec"):
            attention(q, q, q, mesh=axis, layout=Cyclic(2, in_spec=False))
    finally:
        del layouts_module.LAYOUTS["cyclic"]


def test_a_layout_keeps_its_parameters(pool: Any) -> None:
    pool(2).run(layout_with_a_parameter)


class NamedArguments(Core):
    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(query=q, key=k, value=v, is_causal=True, enable_gqa=True)


class TwoCores(Tiny):
    def __init__(self, forgotten: nn.Module) -> None:
        super().__init__()
        self.forgotten = forgotten

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens).unflatten(-1, (H, D)).transpose(1, 2)
        return self.head((self.core(x, x, x) + self.forgotten(x, x, x)).transpose(1, 2).flatten(-2))


def forgotten_core(rank: int, named: bool, watch: bool) -> None:
    axis = mesh((2,), ("cp",))
    model, sequence = TwoCores(NamedArguments() if named else Core()), ShardedSequence(axis)
    root = ShardedModel(sequence, positions=None, watch=watch)
    cp_mesh.parallelize(model, axis, {"": root, "core": ContextParallel(sequence)})
    model(torch.arange(S)[None] % 7)


@pytest.mark.parametrize("named", [False, True])
def test_attention_outside_the_plan_is_refused(pool: Any, named: bool) -> None:
    for error in pool(2).run_expecting_error(forgotten_core, named, True):
        assert error is not None and error.type == "ArgumentError"
        assert "every self-attention in a ContextParallel module" in error.message


def test_attention_to_other_sequences_can_be_allowed(pool: Any) -> None:
    pool(2).run(forgotten_core, True, False)


def two_sequences(rank: int) -> None:
    axis = mesh((2,), ("cp",))
    one, tokens = ShardedSequence(axis, ZigZag(), length=S), torch.arange(S)[None] % 7
    for other in (ShardedSequence(axis, Striped(), length=S), ShardedSequence(axis, ZigZag(), length=S - 1)):
        root = ShardedModel(one, positions=None)
        with pytest.raises(
            cp_mesh.ArgumentError, match="sequence: expected one for the root and its cores, got zigzag"
        ):
            cp_mesh.parallelize(Tiny(), axis, {"": root, "core": ContextParallel(other)})
    model = cp_mesh.parallelize(Tiny(), axis, {"core": ContextParallel(ShardedSequence(axis, Striped()))})
    cp_mesh.parallelize(model, axis, {"": ShardedModel(one, positions=None)})
    with pytest.raises(cp_mesh.ArgumentError, match="got striped in the core, zigzag at the root"):
        model(tokens)


def test_a_root_and_cores_of_unlike_sequences_are_refused(pool: Any) -> None:
    pool(2).run(two_sequences)


@dataclass(frozen=True)
class Broken(Layout):
    """Not every position is held once."""

    how: int

    def runs(self, seq_len: int, cp_size: int, cp_rank: int) -> tuple:
        half = seq_len // 2
        return {
            0: (Run(0, 1, half),),
            1: (Run(half * cp_rank + half - 1, -1, half),),
            2: (Run(half * cp_rank + cp_rank, 1, half),),
        }[self.how]

    def spec(self) -> str:
        return f"broken:{self.how}"


def broken_layouts(rank: int) -> None:
    axis, q = mesh((2,), ("cp",)), torch.randn(1, 1, 8, 4)
    words = ("position 0 of 16 held 2 times", "runs of stride 1 or more", "no position 16 in 16")
    for how, message in enumerate(words):
        with pytest.raises(cp_mesh.ArgumentError, match=message):
            attention(q, q, q, mesh=axis, layout=Broken(how))


def test_layouts_that_lose_tokens_are_refused(pool: Any) -> None:
    pool(2).run(with_broken_layouts)


def with_broken_layouts(rank: int) -> None:
    layouts_module.LAYOUTS["broken"] = Broken
    try:
        broken_layouts(rank)
    finally:
        del layouts_module.LAYOUTS["broken"]


class SinkCore(Core):
    def __init__(self) -> None:
        super().__init__()
        self.sinks = nn.Parameter(torch.zeros(H))


def checked_fsdp(rank: int) -> None:
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


def test_check_mode_under_fsdp_and_of_tokens(pool: Any) -> None:
    pool(2).run(checked_fsdp)


def other_scales(rank: int) -> None:
    for scale in (0.5, None):
        assert cp_mesh.tools.verify(mesh((2,), ("cp",)), scores={"scale": scale}, seq_len=24).passed


def test_verify_follows_its_scale(pool: Any) -> None:
    pool(2).run(other_scales)
