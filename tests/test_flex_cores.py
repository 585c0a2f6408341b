"""Flex in cores: a module that calls PyTorch's flex_attention computes under `ContextParallel` what one rank does."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from cases import gap
from checks import TOLERANCE, report
from dense import make_qkv
from flex_uses import MASKS, SCORES, dense, numbers
from inside import ScalarFunction, inner, room
from ranks import mesh, num_collectives
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.nn.attention import flex_attention as of_torch
from torch.nn.attention.flex_attention import AuxRequest, flex_attention
from torch.utils.checkpoint import checkpoint

import cp_mesh
from cp_mesh import (
    ArgumentError,
    ContextParallel,
    Mask,
    OverlappedColwise,
    ShardedSequence,
    UnsupportedError,
    ZigZag,
    create_block_mask,
    parallelize,
)

block_masks = room("block_mask")
check_hidden = inner("block_mask", "check_hidden")
Functions = inner("flex.function", "Functions")

B, H, K, D = 2, 4, 2, 5
ALL = Mask(causal=False)


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


class Compiled(Core):
    """By what torch.compile makes of it, also in a way that Dynamo may not leave."""

    lazily, fully = torch.compile(flex_attention), torch.compile(flex_attention, fullgraph=True)

    def attend(self, *args: Any, **options: Any) -> Any:
        return (Compiled.lazily if self.mask == "causal" else Compiled.fully)(*args, **options)


class LatelyCompiled(Core):
    """Not yet in its first forward."""

    calls = 0

    def attend(self, *args: Any, **options: Any) -> Any:
        self.calls += 1
        return (torch.compile(flex_attention) if self.calls > 1 else flex_attention)(*args, **options)


def style(axis: Any, mask: Mask = ALL, **options: Any) -> ContextParallel:
    of_sequence = {name: options.pop(name) for name in ("length", "pad") if name in options}
    return ContextParallel(ShardedSequence(axis, ZigZag(), **of_sequence), mask=mask, **options)


def expected(core: Core, scale: float | None = None) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """out, lse, dq, dk, dv by name, and gradients of what is captured by name, of the whole sequence."""
    *qkv, dout = make_qkv(B, H, K, core.S, D)
    leaves = [x.clone().requires_grad_() for x in qkv]
    t = {
        name: x.detach().clone().requires_grad_(x.requires_grad) for name, x in core.state_dict(keep_vars=True).items()
    }
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
    "another method": (lambda: Core("scale of a head", "windows of heads"), {"method": "all_gather"}, {}),
    "beside a mask of the style": (lambda: Core("ALiBi", "dilated", of_torch=True), {"mask": Mask()}, {}),
    "a scale": (lambda: Core("relative table", "causal"), {}, {"scale": 0.3}),
    "padding": (lambda: Core("pair bias", "neighborhood", 21), {"length": 21}, {}),
    "padding, causal": (
        lambda: Core("relative table", "causal", 21, of_torch=True),
        {"length": 21, "mask": Mask()},
        {},
    ),
    "unequal shards": (lambda: Core("pair bias", "neighborhood", 21), {"length": 21, "pad": False}, {}),
    "compiled": (lambda: Compiled("ALiBi", "causal", of_torch=True), {}, {}),
    "compiled, all of it": (lambda: Compiled("none", "documents", of_torch=True), {}, {}),
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


@pytest.mark.parametrize("cp_size", (2, pytest.param(3, marks=pytest.mark.full)))
def test_cores(pool: Any, cp_size: int) -> None:
    report(pool(cp_size).run(as_one, [*USES], timeout=300))


def without_pairs(rank: int) -> None:
    """No batch row, or no token: there is nothing to compare a mask of the style with."""
    axis = mesh((2,), ("cp",))
    for batch, S in ((0, 24), (B, 0)):
        ids = torch.zeros(batch, S, dtype=torch.int64)
        core = Core("gate", S=S)
        core.gate = nn.Parameter(numbers(batch, S))
        made = create_block_mask(lambda b, h, i, j, ids=ids: ids[b, i] == ids[b, j], None, None, S, S)
        core.block_mask = lambda made=made: made
        parallelize(core, axis, {"": style(axis, Mask(window=(4, 0)))})
        leaves = [torch.zeros(batch, heads, S // 2, D, requires_grad=True).double() for heads in (H, K, K)]
        out = core(*leaves)
        grads = torch.autograd.grad(out.sum(), [*leaves, core.gate])
        assert out.shape == leaves[0].shape
        assert [x.shape for x in grads] == [x.shape for x in (*leaves, core.gate)] and not grads[-1].any()


def test_a_core_without_pairs(pool: Any) -> None:
    pool(2).run(without_pairs)


def hides(rank: int) -> list[str]:
    """A style that hides no more than the block mask, until ids that the mask reads are written; and one that does."""
    axis, problems = mesh((2,), ("cp",)), []
    image = torch.zeros(24, dtype=torch.int64)

    def mask_mod(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return (q_idx >= kv_idx) | ((image[q_idx] == image[kv_idx]) & (image[q_idx] > 0))

    of = {"device": "cpu", "BLOCK_SIZE": 8}
    qkv = [x[:, :, :12] for x in make_qkv(B, K, K, 24, D)[:3]]
    for make in (create_block_mask, functools.partial(of_torch.create_block_mask, **of)):
        image.zero_()
        core, made = Core(), make(mask_mod, None, None, 24, 24)
        core.block_mask = lambda made=made: made
        parallelize(core, axis, {"": style(axis, Mask())})
        core(*qkv)
        image[3:9] = 1
        before = num_collectives()
        try:
            core(*qkv)
            problems.append(f"rank {rank}: {make} is hidden in silence")
        except (ArgumentError, UnsupportedError) as error:
            words = "hides no pair which" if make is create_block_mask else "follow from its mask_mod"
            if words not in str(error) or num_collectives() > before:
                problems.append(f"rank {rank}: {error}")
    return problems


def test_a_style_hides_no_more_than_the_mask(pool: Any) -> None:
    report(pool(2).run(hides))


def maxima(rank: int) -> list[str]:
    """PyTorch refuses these by itself on CPUs."""
    axis = mesh((1,), ("cp",))
    core, applied, q = Core(), style(axis), numbers(1, 1, 24, D)
    call = applied.of_call(core, q, q, q)
    with pytest.raises(UnsupportedError, match=r"return_aux: expected no maxima .*lse=True"):
        applied.sharded_flex(call, q, q, q, None, None, None, False, False, None, AuxRequest(max_scores=True))
    out, aux = parallelize(core, axis, {"": applied})(q, q, q, return_aux=AuxRequest(lse=True))
    want = cp_mesh.attention(q, q, q, mesh=axis, mask=ALL, return_lse=True)
    return [] if max(gap(out, want[0]), gap(aux.lse, want[1])) <= TOLERANCE else [f"{out} or {aux.lse} is off"]


def test_other_results(pool: Any) -> None:
    report(pool(1).run(maxima))


def over_tp(rank: int) -> list[str]:
    """DTensors over tp alone: functions see global heads, and parameters get the share of this rank's heads."""
    grid = mesh((2, 2), ("cp", "tp"))
    core, problems = Core("scale of a head", "windows of heads"), []
    want, of_captured = expected(core)
    applied = style(grid["cp"])
    parallelize(core, grid["cp"], {"": applied})
    *qkv, dout = (
        distribute_tensor(applied.sequence.shard(x, dim=2), grid["tp"], [Shard(1)], src_data_rank=None)
        for x in make_qkv(B, H, K, core.S, D)
    )
    leaves = [x.requires_grad_() for x in qkv]
    out, lse = core(*leaves, return_lse=True)
    assert isinstance(out, DTensor) and isinstance(lse, DTensor) and out.placements == lse.placements == (Shard(1),)
    out.backward(dout)
    got = dict(zip(("out", "lse", "dq", "dk", "dv"), (out, lse, *(x.grad for x in leaves)), strict=True))
    for name, x in got.items():
        with torch.no_grad():
            whole = applied.sequence.unshard(x.full_tensor(), dim=2)
        if not (off := gap(whole, want[name])) <= TOLERANCE:
            problems.append(f"rank {rank}: {name} is off by {off:.1e}")
    share = core.get_parameter("scale").grad
    dist.all_reduce(share)
    if not (off := gap(share, of_captured["scale"])) <= TOLERANCE:
        problems.append(f"rank {rank}: the gradient of scale is off by {off:.1e}")
    return problems


def test_heads_over_tp(pool: Any) -> None:
    report(pool(4).run(over_tp))


class Attention(nn.Module):
    """Linears over tp, whose results are plain tensors of this rank's heads, and a core."""

    def __init__(self, core: nn.Module) -> None:
        super().__init__()
        self.wq, self.core = nn.Linear(D, H * D, bias=False, dtype=torch.float64), core

    def forward(self, x: Tensor) -> Tensor:
        q = self.wq(x).unflatten(-1, (-1, D)).transpose(1, 2)
        return self.core(q, q, q)


def of_all_heads(rank: int, first: bool) -> str:
    grid = mesh((1, 2), ("cp", "tp"))
    slopes, heads = numbers(H), H // 2
    begin = grid.get_local_rank("tp") * heads if first else 0

    class ALiBi(nn.Module):
        def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return of_torch.flex_attention(
                q, k, v, lambda s, b, h, i, j: s - slopes[h + begin if first else h] * (i - j)
            )

    model = Attention(ALiBi())
    parallelize(model, grid["tp"], {"": OverlappedColwise("wq", mode="all_reduce")})
    parallelize(model, grid["cp"], {"core": style(grid["cp"])})
    try:
        model(numbers(B, 24, D))
    except ArgumentError as error:
        return str(error)
    return "accepted"


def test_a_tensor_of_all_heads_beside_plain_tensors_over_tp(pool: Any) -> None:
    """h counts this rank's: a slope for each head of the model would be another head's on later ranks."""
    expected = f"read at h: expected {H // 2} elements, the heads of this rank of tp, from which h counts, got {H}"
    assert all(expected in said for said in pool(2).run(of_all_heads, False))
    assert pool(2).run(of_all_heads, True) == ["accepted"] * 2


def over_dp(rank: int) -> float:
    """DTensors over dp alone: functions see global batch rows."""
    grid, rows = mesh((1, 2), ("cp", "dp")), slice(rank, rank + 1)
    core = Core("of a batch row and a head", "documents")
    want = expected(core)[0]["out"].detach()
    applied = parallelize(core, grid["cp"], {"": style(grid["cp"])})
    qkv = (
        DTensor.from_local(x[rows], grid["dp"], [Shard(0)], run_check=False) for x in make_qkv(B, H, K, core.S, D)[:3]
    )
    return gap(applied(*qkv).to_local().detach(), want[rows])


def test_batch_rows_over_dp(pool: Any) -> None:
    assert max(pool(2).run(over_dp)) <= TOLERANCE


def test_blocks_of_another_batch_are_looked_at_again() -> None:
    ids, q = torch.arange(24) // 6, torch.zeros(1, H, 24, D)
    block_mask = create_block_mask(lambda b, h, i, j: (i >= j) | (ids[i] == ids[j]), 1, H, 24, 24)
    functions = Functions.of(None, block_mask, q, (1, H, 24))
    about = functions.mask_mod, functions.of_mask, (1, H, 24), q.device
    check_hidden(Mask(blocks=ids), *about)
    with pytest.raises(ArgumentError, match="a mask that hides no pair"):
        check_hidden(Mask(blocks=torch.arange(24) // 3), *about)


def test_at_how_many_pairs_a_mask_is_looked_at() -> None:
    """Once, in batch rows and heads that differ; at none if the function says causal itself; and not at any number."""
    S, counted, of_pairs = 24, list[int](), ScalarFunction.of_pairs
    ids, by_head = torch.arange(S) // 6, torch.arange(H)

    def counting(self: Any, *args: Any) -> Tensor:
        counted.append((found := of_pairs(self, *args)).numel())
        return found

    def look(mask_mod: Any, mask: Mask = Mask(), last: int | None = None) -> int:  # noqa: B008 - frozen
        counted.clear()
        block_mask = create_block_mask(mask_mod, B, H, S, S)
        functions = Functions.of(None, block_mask, torch.zeros(B, H, S, D), (B, H, S), last)
        for _ in range(2):
            check_hidden(mask, functions.mask_mod, functions.of_mask, (B, H, S), torch.device("cpu"))
        return sum(counted)

    said = {
        "alone": lambda b, h, i, j: i >= j,
        "turned": lambda b, h, i, j: j <= i,
        "joined": lambda b, h, i, j: (ids[i] == ids[j]) & ((by_head[h] >= 0) & (i >= j)),
        "joined by a function": lambda b, h, i, j: torch.logical_and(i >= j, ids[i] == ids[j]),
    }
    others = {
        "later": (lambda b, h, i, j: i > j, S * S),
        "in each head": (lambda b, h, i, j: i >= j + 0 * by_head[h], H * S * S),
        "in each row": (lambda b, h, i, j: i >= j + 0 * b, B * S * S),
    }
    with mock.patch.object(ScalarFunction, "of_pairs", counting):
        assert all(look(mask_mod) == look(mask_mod, last=S - 1) == 0 for mask_mod in said.values())
        assert look(said["alone"], Mask(length=S + 1)) == look(said["alone"], Mask(causal=False, length=9)) == 0
        with mock.patch.object(block_masks, "MOST", S * S), pytest.raises(UnsupportedError, match="576 pairs at most"):
            look(others["in each row"][0])
        assert all(look(mask_mod) == num for mask_mod, num in others.values())
        for mask, mask_mod in (
            (Mask(), lambda b, h, i, j: (i >= j) | (ids[i] == ids[j])),
            (Mask(), lambda b, h, i, j: i.clamp(max=9) >= j.clamp(max=9)),
            (Mask(), lambda b, h, i, j: j >= i),
            (Mask(window=(4, 0)), said["alone"]),
            (Mask(length=S - 1), said["alone"]),
            (Mask(documents=ids), said["alone"]),
        ):
            with pytest.raises(ArgumentError, match="a mask that hides no pair"):
                look(mask_mod, mask)


class Model(nn.Module):
    def __init__(self, core: nn.Module) -> None:
        super().__init__()
        self.core = core

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return 2 * self.core(q.sin(), k, v).cos()


def around(rank: int) -> dict[str, list[Tensor]]:
    """A model around the core: in a checkpoint, and compiled but for the core."""
    axis, found = mesh((2,), ("cp",)), {}
    for way in ("eager", "checkpoint", "compiled"):
        torch._dynamo.reset()
        core = Core("pair bias", "causal", of_torch=True)
        applied = style(axis, Mask())
        parallelize(core, axis, {"": applied})
        core = torch.compiler.disable(core) if way == "compiled" else core
        model: Any = Model(core)
        run = torch.compile(model, backend="aot_eager") if way == "compiled" else model
        q, k, v, dout = (applied.sequence.shard(x, dim=2) for x in make_qkv(B, H, K, core.S, D))
        q.requires_grad_()
        out = checkpoint(run, q, k, v, use_reentrant=False) if way == "checkpoint" else run(q, k, v)
        out.backward(dout)
        found[way] = [out.detach(), q.grad, core.get_parameter("bias").grad]
    return found


def test_models_around_a_core(pool: Any) -> None:
    for found in pool(2).run(around):
        for way, results in found.items():
            assert all(gap(x, y) <= TOLERANCE for x, y in zip(results, found["eager"], strict=True)), way


class Projected(nn.Module):
    """Of views that it computes Dynamo gives up the core, and runs it while it waits for frames."""

    def __init__(self, core: nn.Module) -> None:
        super().__init__()
        self.projection, self.core = nn.Linear(D, (H + 2 * K) * D, dtype=torch.float64), core

    def forward(self, q: Tensor, *_: Tensor) -> Tensor:
        parts = self.projection(q[:, 0]).unflatten(-1, (-1, D)).transpose(1, 2).split((H, K, K), 1)
        out: Tensor = self.core(*parts)
        return out


def traced(rank: int, fullgraph: bool) -> list[str]:
    """What a core says that torch.compile traces, and one that is found to be compiled too late."""
    axis, said = mesh((2,), ("cp",)), []
    torch._dynamo.reset()
    late = parallelize(LatelyCompiled(of_torch=True), axis, {"": style(axis)})
    model = parallelize(Model(Core(of_torch=True)), axis, {"core": style(axis)}, watch=False)
    projected = parallelize(Projected(Core(of_torch=True)), axis, {"core": style(axis)})
    qkv = [x[:, :, :12] for x in make_qkv(B, H, K, 24, D)[:3]]
    late(*qkv)
    models = (model,) if fullgraph else (model, projected)  # Dynamo says by itself why there is no graph
    for run in (late, *(torch.compile(x, backend="eager", fullgraph=fullgraph) for x in models)):
        before = num_collectives()
        try:
            run(*qkv)
            said.append("nothing")
        except Exception as error:
            said.append(str(error))
        assert num_collectives() == before
    return said


@pytest.mark.parametrize("fullgraph", (True, False))
@pytest.mark.full
def test_what_torch_compile_traces_is_refused_by_name(pool: Any, fullgraph: bool) -> None:
    for said in pool(2).run(traced, fullgraph):
        assert all("flex_attention that torch.compile traces is not available" in words for words in said), said


class Breaks(nn.Module):
    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        torch._dynamo.graph_break()
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)


def broken(rank: int) -> float:
    axis = mesh((2,), ("cp",))
    torch._dynamo.reset()
    model = parallelize(Model(Breaks()), axis, {"core": style(axis, Mask())}, watch=False)
    qkv = [x[:, :, :12] for x in make_qkv(B, H, K, 24, D)[:3]]
    return gap(torch.compile(model, backend="eager")(*qkv), model(*qkv))


@pytest.mark.full
def test_a_core_that_is_not_traced_in_compiled_code(pool: Any) -> None:
    """It is run while Dynamo waits for frames, and may then not be told to leave them."""
    assert max(pool(2).run(broken)) <= TOLERANCE
