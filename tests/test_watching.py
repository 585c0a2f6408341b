"""Every way to call attention, in cores and outside of them, eager and compiled: right or refused, and at what cost."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable
from itertools import product
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from faults import remover
from inside import room
from ranks import mesh, num_collectives, on_ranks
from torch import Tensor, nn
from torch._dynamo.eval_frame import _debug_get_cache_entry_list
from torch._dynamo.testing import CompileCounter
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.attention.flex_attention import flex_attention
from torch.utils.checkpoint import checkpoint

import cp_mesh
from cp_mesh import ArgumentError, ContextParallel, Mask, RankMismatchError, ShardedModel, ShardedSequence

messages = room("store_messages")

H, S, D = 2, 16, 8
C = H * D


class Core(nn.Module):
    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)


class ByHeads(nn.Module):
    """A core that calls a function of q, k and v."""

    def __init__(self, attend: Callable[..., Tensor]) -> None:
        super().__init__()
        self.attend = attend

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return self.attend(q, k, v)


class ByRows(nn.Module):
    """A core that calls a module on [B, S, C]."""

    def __init__(self, attend: nn.Module, how: str) -> None:
        super().__init__()
        self.attend, self.how = attend, how

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (x.transpose(1, 2).flatten(2) for x in (q, k, v))
        if self.how == "layer":
            x = self.attend(q)
        elif self.how == "rows first":
            x = self.attend(*(x.transpose(0, 1) for x in (q, k, v)), need_weights=False)[0].transpose(0, 1)
        elif self.how == "one":
            x = self.attend(q, q, q, need_weights=False)[0]
        else:
            x = self.attend(q, k, v)[0]
        return x.unflatten(2, (H, D)).transpose(1, 2)


def encoder() -> nn.Module:
    return nn.TransformerEncoderLayer(C, H, C, dropout=0.0, batch_first=True)


def causal(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
    return torch.where(i >= j, score, -float("inf"))


def compiled_flex(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return torch.compile(flex_attention, backend="eager")(q, k, v, score_mod=causal)


def sdpa_of_c(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return torch._C._nn.scaled_dot_product_attention(query=q, key=k, value=v, is_causal=True)


aten = torch.ops.aten
WAYS: dict[str, Callable[[], nn.Module]] = {
    "SDPA": Core,
    "SDPA of torch._C": lambda: ByHeads(sdpa_of_c),
    "SDPA of aten": lambda: ByHeads(aten.scaled_dot_product_attention),
    "SDPA of aten, overload": lambda: ByHeads(aten.scaled_dot_product_attention.default),
    "SDPA as math": lambda: ByHeads(lambda *qkv: aten._scaled_dot_product_attention_math(*qkv)[0]),
    "flash kernel": lambda: ByHeads(lambda *qkv: aten._scaled_dot_product_flash_attention_for_cpu(*qkv)[0]),
    "flex": lambda: ByHeads(lambda *qkv: flex_attention(*qkv, score_mod=causal)),
    "flex, compiled": lambda: ByHeads(compiled_flex),
    "MHA": lambda: ByRows(nn.MultiheadAttention(C, H, batch_first=True), "three"),
    "MHA of one tensor": lambda: ByRows(nn.MultiheadAttention(C, H, batch_first=True), "one"),
    "MHA, rows first": lambda: ByRows(nn.MultiheadAttention(C, H), "rows first"),
    "encoder layer": lambda: ByRows(encoder(), "layer"),
    "encoder": lambda: ByRows(nn.TransformerEncoder(encoder(), 2), "layer"),
}
RIGHT = ("SDPA", "SDPA of torch._C")  # in a core
COMPILED = ("not", "blocks in place", "blocks", "model in place", "model")
MODES = ("train", "no_grad", "eval and no_grad")
OUTSIDE = "every self-attention in a ContextParallel module"
NIGHTLY = pytest.mark.nightly("compiled")


class Block(nn.Module):
    def __init__(self, core: nn.Module) -> None:
        super().__init__()
        self.qkv, self.core, self.out = nn.Linear(C, 3 * C), core, nn.Linear(C, C)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, H, D)).permute(2, 0, 3, 1, 4)
        return x + self.out(self.core(q, k, v).transpose(1, 2).flatten(2))


class Model(nn.Module):
    def __init__(self, *cores: nn.Module) -> None:
        super().__init__()
        self.embedding, self.layers = nn.Embedding(7, C), nn.ModuleList(Block(core) for core in cores)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x)
        return x


def parallel(*cores: nn.Module, planned: str, watch: bool = True) -> Model:
    model, sequence = Model(*cores).double(), ShardedSequence(mesh((2,), ("cp",)))
    plan = {"": ShardedModel(sequence, positions=None, watch=watch), planned: ContextParallel(sequence)}
    return cp_mesh.parallelize(model, sequence.mesh, plan)


def compile_parts(model: nn.Module, how: str, **options: Any) -> nn.Module:
    if how == "model in place":
        model.compile(**options)
    elif how == "model":
        return torch.compile(model, **options)
    elif how == "blocks in place":
        for layer in model.layers:
            layer.compile(**options)
    elif how == "blocks":
        for i, layer in enumerate(model.layers):
            model.layers[i] = torch.compile(layer, **options)
    return model


def tokens_of(length: int = S) -> Tensor:
    return torch.arange(2 * length).view(2, length) % 7


def wrong_ways(compiled: str, fullgraph: bool, ways: tuple[str, ...], modes: tuple[str, ...]) -> list[str]:
    """What was wrong with any way of calling attention, compiled in one way."""
    wrong = []
    warnings.simplefilter("ignore")
    for way, planned, mode in product(ways, (True, False), modes):
        if planned and way in RIGHT:
            continue
        torch._dynamo.reset()
        cores = (WAYS[way](), Core()) if planned else (Core(), WAYS[way]())
        model = parallel(*cores, planned="layers.0.core", watch=not planned)
        model.train(mode != "eval and no_grad")
        run = compile_parts(model, compiled, backend="eager", fullgraph=fullgraph)
        says = "ContextParallel" if planned else OUTSIDE
        before, outcome = num_collectives(), "no error"
        try:
            with contextlib.nullcontext() if mode == "train" else torch.no_grad():
                run(tokens_of())
        except Exception as error:
            outcome = f"{type(error).__name__}: {error}"
        issued = num_collectives() - before
        if _debug_get_cache_entry_list(messages.Comparison.__init__.__code__):
            wrong.append(f"{way}, {planned=}, {mode}: Dynamo has traced what writes to the store")
        # the planned core before the forgotten one has run by then, on every rank
        if says not in outcome or (planned and issued):
            if way.startswith("flex") and "FlexAttention does not support backward on CPU" in outcome:
                continue
            wrong.append(f"{way}, {planned=}, {mode}: {issued} collectives, {outcome[:300]}")
    return wrong


@pytest.mark.full
@pytest.mark.parametrize(
    ("compiled", "fullgraph"),
    [
        ("not", True),
        *(pytest.param(how, True, marks=NIGHTLY) for how in ("blocks in place", "model in place")),
        ("blocks", False),
        pytest.param("model", False, marks=NIGHTLY),
    ],
)
@on_ranks(2, timeout=300.0)
def test_no_way_to_call_attention_is_silent(compiled: str, fullgraph: bool) -> None:
    """Where graphs may break, Dynamo takes minutes to fail: a few of the ways."""
    few = ("SDPA", "MHA", "encoder layer"), MODES[2:]
    wrong = wrong_ways(compiled, fullgraph, *((tuple(WAYS), MODES) if fullgraph else few))
    assert not wrong, "\n".join(wrong)


class Asking(Core):
    """Cannot be traced, and asks several things of a tensor."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if torch.compiler.is_compiling():
            raise ValueError
        assert (q.ndim, q.is_nested, q.requires_grad, q.is_cuda) == (4, False, True, False)
        return super().forward(q, k, v)


@pytest.mark.full
@on_ranks(2, timeout=240.0)
def test_what_a_core_asks_that_is_not_traced() -> None:
    model = parallel(Asking(), planned="layers.*.core")
    eager = model(tokens_of())
    torch.testing.assert_close(compile_parts(model, "blocks", backend="eager")(tokens_of()), eager)


@pytest.mark.parametrize("compiled", ["not", "blocks in place", pytest.param("model", marks=pytest.mark.full)])
@pytest.mark.quick("not")
@on_ranks(2)
def test_attention_to_another_length_passes(compiled: str) -> None:
    """Attention to keys of another length is nobody's shard."""

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        k, v = (torch.ones(2, H, 5, D, dtype=q.dtype) for _ in range(2))
        return F.scaled_dot_product_attention(q, k, v)

    def attend_by_module(module: nn.Module, q: Tensor) -> Tensor:
        keys = torch.ones(2, 5, C, dtype=q.dtype)
        return module(q.transpose(1, 2).flatten(2), keys, keys)[0].unflatten(2, (H, D)).transpose(1, 2)

    multihead = nn.MultiheadAttention(C, H, batch_first=True).double()
    cores = Core(), ByHeads(attend), ByHeads(lambda q, k, v: attend_by_module(multihead, q))
    model = parallel(*cores, planned="layers.0.core")
    compile_parts(model, compiled, backend="eager", fullgraph=True)(tokens_of())


# What the watch costs.


class Recomputed(nn.Module):
    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.layer, x, use_reentrant=False)


@pytest.mark.parametrize(
    ("compiled", "recompute"),
    [
        ("blocks in place", False),
        ("blocks in place", True),
        *(pytest.param(how, False, marks=NIGHTLY) for how in COMPILED[2:]),
        pytest.param("blocks", True, marks=NIGHTLY),
    ],
)
@pytest.mark.full
@on_ranks(2)
def test_a_watch_compiles_nothing_twice(compiled: str, recompute: bool) -> None:
    """Two graphs of three steps, of two lengths, and no mode is left behind."""
    for watch in (True, False):
        torch._dynamo.reset()
        counter = CompileCounter()
        model, plain = (parallel(Core(), Core(), planned="layers.*.core", watch=x) for x in (watch, True))
        plain.load_state_dict(model.state_dict())
        run = compile_parts(model, compiled, backend=counter, fullgraph=True)
        if recompute:
            for i, layer in enumerate(model.layers):
                model.layers[i] = Recomputed(layer)
        for length in (S, S, 2 * S):
            out = run(tokens_of(length))
            torch.testing.assert_close(out, plain(tokens_of(length)), rtol=1e-11, atol=1e-11)
            out.sum().backward()
        assert (counter.frame_count, torch._C._len_torch_function_stack()) == (2, 0)


class Odd(nn.Module):
    """What a traced function mode could trip over."""

    def forward(self, x: Tensor) -> Tensor:
        heads, rows = x.unflatten(-1, (H, D)), 1 - x**2
        return heads.flatten(-2) + rows.split(D, -1)[0].norm(dim=-1, keepdim=True) + (2.0**x).unique().sum()


@pytest.mark.full
@on_ranks(2)
def test_what_compiles_without_a_watch_compiles_with_it() -> None:
    for watch in (True, False):
        torch._dynamo.reset()
        model = parallel(Core(), planned="layers.0.core", watch=watch)
        model.layers[0].out = Odd()
        want = model(tokens_of())
        torch._dynamo.config.capture_dynamic_output_shape_ops = True
        torch.testing.assert_close(torch.compile(model, backend="eager", fullgraph=True)(tokens_of()), want)


class Cuts(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * x[..., :1] * torch.arange(1, 1 + x.shape[1])[:, None]


@on_ranks(2)
def test_compiled_forwards_of_a_watched_root_are_one_graph() -> None:
    """Else a checkpoint around one would save other tensors than its recomputation, which nothing watches."""
    model = parallel(Core(), planned="layers.0.core")
    model.layers[0].out = Cuts()
    model.layers[0].forward = torch.compile(model.layers[0].forward, backend="eager", fullgraph=True)
    model(tokens_of())


class Named(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = torch.compile(Entry(), backend="eager", fullgraph=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(**dict.fromkeys(("tokens", "module", "forward", "body", "call"), x))


class Entry(nn.Module):
    def forward(self, **given: Tensor) -> Tensor:
        return given["tokens"]


@on_ranks(2)
def test_arguments_of_compiled_modules_have_any_names() -> None:
    model = parallel(Core(), planned="layers.0.core")
    want = model(tokens_of())
    model.layers[0].out = nn.Sequential(model.layers[0].out, Named())
    torch.testing.assert_close(model(tokens_of()), want)


# Cores whose rows are not those of the root.


def part_of_rows(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    n = q.shape[2] // 2
    out = F.scaled_dot_product_attention(q[:, :, :n], k[:, :, :n], v[:, :, :n], is_causal=True)
    return torch.cat([out, q[:, :, n:]], 2)


@on_ranks(2)
def test_a_core_of_another_sequence_says_its_length(axis: DeviceMesh) -> None:
    """A core of a sequence with a length of its own, in a plan of its own, is not the root's."""
    model = parallel(Core(), ByHeads(part_of_rows), planned="layers.0.core")
    half = ShardedSequence(axis, length=S // 2)
    cp_mesh.parallelize(model, axis, {"layers.1.core": ContextParallel(half)})(tokens_of())


# Checkpoints inside of compiled cores; compiled cores of one class.


@pytest.mark.parametrize("use_reentrant", [False, True])
@pytest.mark.parametrize("fullgraph", [pytest.param(False, marks=pytest.mark.full), True])
@on_ranks(2)
def test_a_checkpoint_inside_a_compiled_core_is_right_or_refused(use_reentrant: bool, fullgraph: bool) -> None:
    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return checkpoint(Core(), q, k, v, use_reentrant=use_reentrant)

    grads = []
    for core in (ByHeads(attend), Core()):
        torch.manual_seed(0)
        model = parallel(core, planned="layers.0.core")
        if not grads:
            model.layers[0].compile(backend="aot_eager", fullgraph=fullgraph)
        try:
            model(tokens_of()).sum().backward()
        except Exception as error:
            assert "checkpoint the module that holds the core" in str(error), error
            return
        grads.append(model.layers[0].qkv.weight.grad)
    torch.testing.assert_close(*grads, rtol=1e-11, atol=1e-11)


class CheckpointedBlock(Block):
    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(super().forward, x, use_reentrant=False)


@pytest.mark.parametrize("skips", [False, pytest.param(True, marks=pytest.mark.full)], ids="skips={}".format)
@pytest.mark.parametrize("compiled", ["not", "blocks in place", pytest.param("model", marks=pytest.mark.full)])
@pytest.mark.quick(without="blocks")
@on_ranks(2)
def test_a_watch_sees_into_checkpoints(compiled: str, skips: bool) -> None:
    """Whatever Dynamo's setting, whose default is False."""
    for planned in ("layers.*.core", "layers.0.core"):
        torch._dynamo.reset()
        model = parallel(Core(), Core(), planned=planned)
        for layer in model.layers:
            layer.__class__ = CheckpointedBlock
        run = compile_parts(model, compiled, backend="aot_eager", fullgraph=True)
        refused = contextlib.nullcontext() if "*" in planned else pytest.raises(Exception, match=OUTSIDE)
        with torch._dynamo.config.patch(skip_fwd_side_effects_in_bwd_under_checkpoint=skips), refused:
            run(tokens_of()).sum().backward()


@pytest.mark.parametrize("how", ["outside", "no attention"])
@on_ranks(2, timeout=10.0)
def test_in_check_mode_the_others_hear_of_it(rank: int, how: str) -> None:
    """Rank 1 alone is refused by the watch, or by a core without attention."""
    idle = ByHeads(lambda q, k, v: q)
    core = idle if (rank == 1) == (how == "no attention") else Core()
    model = parallel(core, Core(), planned="layers.1.core" if how == "outside" else "layers.*.core")
    with cp_mesh.check_mode(), pytest.raises(ArgumentError if rank else RankMismatchError):
        model(tokens_of())


@on_ranks(2, timeout=20.0)
def test_an_error_of_the_user_that_all_ranks_skip(rank: int) -> None:
    """All ranks leave out a batch in which one of them raises in code of its own; then all go on as before."""
    model = parallel(Core(), planned="layers.*.core")
    raising = mock.Mock(side_effect=RuntimeError("of the user") if rank == 0 else None, return_value=None)
    with remover(model.layers[0].out.register_forward_hook(raising)):
        with pytest.raises(RuntimeError, match="of the user") if rank == 0 else contextlib.nullcontext():
            model(tokens_of())
    dist.barrier()
    model(tokens_of())
    model(tokens_of(2 * S))


@on_ranks(2)
def test_compiled_cores_of_one_class_are_told_apart(axis: DeviceMesh) -> None:
    """Of unlike masks, and with forwards of instances: none may run code that was compiled for another."""
    sequence, qkv, want = ShardedSequence(axis), torch.randn(3, 1, H, S, D), None
    for compiled in (False, True):
        cores = [Core(), Core(), Core()]
        cores[2].forward = lambda *qkv, forward=cores[2].forward: 3 * forward(*qkv)
        for core, mask in zip(cores, (Mask(), Mask(window=(2, 0)), Mask()), strict=True):
            cp_mesh.parallelize(core, axis, {"": ContextParallel(sequence, mask=mask)})
            if compiled:
                core.compile(backend="eager", fullgraph=True)
        outs = [core(*qkv) for core in cores]
        torch.testing.assert_close(outs[2], 3 * outs[0])
        assert not torch.allclose(outs[0], outs[1])
        torch.testing.assert_close(outs, want or outs)
        want = outs
