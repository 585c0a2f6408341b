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
from ranks import mesh, num_collectives
from torch import Tensor, nn
from torch._dynamo.eval_frame import _debug_get_cache_entry_list
from torch._dynamo.testing import CompileCounter
from torch.nn.attention.flex_attention import flex_attention
from torch.utils.checkpoint import checkpoint

import cp_mesh
from cp_mesh import ContextParallel, Mask, ShardedModel, ShardedSequence

words = room("store_messages")

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


def parallel(*cores: nn.Module, planned: str, sequence: ShardedSequence, watch: bool = True) -> Model:
    model = Model(*cores).double()
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


def found(
    rank: int, compiled: str, fullgraph: bool, ways: tuple[str, ...] = tuple(WAYS), modes: tuple[str, ...] = MODES
) -> list[str]:
    """What was wrong with any way of calling attention, compiled in one way."""
    sequence, wrong = ShardedSequence(mesh((2,), ("cp",))), []
    warnings.simplefilter("ignore")
    for way, planned, mode in product(ways, (True, False), modes):
        if planned and way in RIGHT:
            continue
        torch._dynamo.reset()
        cores = (WAYS[way](), Core()) if planned else (Core(), WAYS[way]())
        model = parallel(*cores, planned="layers.0.core", sequence=sequence, watch=not planned)
        model.train(mode != "eval and no_grad")
        run = compile_parts(model, compiled, backend="eager", fullgraph=fullgraph)
        says = "ContextParallel" if planned else "every self-attention in a ContextParallel module"
        before, outcome = num_collectives(), "no error"
        try:
            with contextlib.nullcontext() if mode == "train" else torch.no_grad():
                run(tokens_of())
        except Exception as error:
            outcome = f"{type(error).__name__}: {error}"
        issued = num_collectives() - before
        if _debug_get_cache_entry_list(words.Words.__init__.__code__):
            wrong.append(f"{way}, {planned=}, {mode}: Dynamo has traced what leaves words in the store")
        # the planned core before the forgotten one has run by then, on every rank
        if says not in outcome or (planned and issued):
            if way.startswith("flex") and "FlexAttention does not support backward on CPU" in outcome:
                continue
            wrong.append(f"{way}, {planned=}, {mode}: {issued} collectives, {outcome[:300]}")
    return wrong


@pytest.mark.parametrize(
    "compiled",
    [
        pytest.param("not", marks=pytest.mark.full),
        *(pytest.param(how, marks=pytest.mark.nightly("compiled")) for how in ("blocks in place", "model in place")),
    ],
)
def test_no_way_to_call_attention_is_silent(pool: Any, compiled: str) -> None:
    for wrong in pool(2).run(found, compiled, True, timeout=300.0):
        assert not wrong, "\n".join(wrong)


@pytest.mark.full
@pytest.mark.parametrize("compiled", ["blocks", pytest.param("model", marks=pytest.mark.nightly("compiled"))])
def test_graph_breaks_hide_no_attention(pool: Any, compiled: str) -> None:
    """Dynamo takes minutes to fail, so a few of the ways, wrapped by torch.compile and with breaks allowed."""
    for wrong in pool(2).run(found, compiled, False, ("SDPA", "MHA", "encoder layer"), MODES[2:], timeout=300.0):
        assert not wrong, "\n".join(wrong)


class Asking(Core):
    """Cannot be traced, and asks several things of a tensor."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if torch.compiler.is_compiling():
            raise ValueError
        assert (q.ndim, q.is_nested, q.requires_grad, q.is_cuda) == (4, False, True, False)
        return super().forward(q, k, v)


def asking(rank: int) -> tuple[Tensor, Tensor]:
    sequence = ShardedSequence(mesh((2,), ("cp",)))
    model = parallel(Asking(), planned="layers.*.core", sequence=sequence)
    eager = model(tokens_of())
    return eager, compile_parts(model, "blocks", backend="eager")(tokens_of())


@pytest.mark.full
def test_what_a_core_asks_that_is_not_traced(pool: Any) -> None:
    for eager, compiled in pool(2).run(asking, timeout=240.0):
        torch.testing.assert_close(compiled, eager)


def across(rank: int, compiled: str) -> None:
    """Attention to keys of another length is nobody's shard, and passes."""

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        k, v = (torch.ones(2, H, 5, D, dtype=q.dtype) for _ in range(2))
        return F.scaled_dot_product_attention(q, k, v)

    def attend_by_module(module: nn.Module, q: Tensor) -> Tensor:
        keys = torch.ones(2, 5, C, dtype=q.dtype)
        return module(q.transpose(1, 2).flatten(2), keys, keys)[0].unflatten(2, (H, D)).transpose(1, 2)

    multihead = nn.MultiheadAttention(C, H, batch_first=True).double()
    cores = Core(), ByHeads(attend), ByHeads(lambda q, k, v: attend_by_module(multihead, q))
    model = parallel(*cores, planned="layers.0.core", sequence=ShardedSequence(mesh((2,), ("cp",))))
    compile_parts(model, compiled, backend="eager", fullgraph=True)(tokens_of())


@pytest.mark.parametrize("compiled", ["not", "blocks in place", pytest.param("model", marks=pytest.mark.full)])
@pytest.mark.quick("not")
def test_attention_to_another_length_passes(pool: Any, compiled: str) -> None:
    pool(2).run(across, compiled)


# What the watch costs.


def compilations(rank: int, compiled: str, watch: bool, recompute: bool) -> tuple[int, int]:
    """Graphs of three steps, of two lengths, and modes that were left behind."""
    sequence, counter = ShardedSequence(mesh((2,), ("cp",))), CompileCounter()
    model = parallel(Core(), Core(), planned="layers.*.core", sequence=sequence, watch=watch)
    run = compile_parts(model, compiled, backend=counter, fullgraph=True)
    if recompute:
        for i, layer in enumerate(model.layers):
            model.layers[i] = Recomputed(layer)
    plain = parallel(Core(), Core(), planned="layers.*.core", sequence=sequence)
    plain.load_state_dict({name.replace("_orig_mod.", "").replace("layer.", "") if recompute else
                           name.replace("_orig_mod.", ""): x for name, x in model.state_dict().items()})  # fmt: skip
    for length in (S, S, 2 * S):
        out = run(tokens_of(length))
        torch.testing.assert_close(out, plain(tokens_of(length)), rtol=1e-11, atol=1e-11)
        out.sum().backward()
    return counter.frame_count, torch._C._len_torch_function_stack()


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
        *(pytest.param(how, False, marks=pytest.mark.nightly("compiled")) for how in COMPILED[2:]),
        pytest.param("blocks", True, marks=pytest.mark.nightly("compiled")),
    ],
)
@pytest.mark.full
def test_a_watch_compiles_nothing_twice(pool: Any, compiled: str, recompute: bool) -> None:
    with_watch, without = (pool(2).run(compilations, compiled, watch, recompute) for watch in (True, False))
    assert with_watch == without == [(2, 0)] * 2


class Odd(nn.Module):
    """What a traced function mode could trip over."""

    def forward(self, x: Tensor) -> Tensor:
        heads, rows = x.unflatten(-1, (H, D)), 1 - x**2
        return heads.flatten(-2) + rows.split(D, -1)[0].norm(dim=-1, keepdim=True) + (2.0**x).unique().sum()


def traced_twice(rank: int) -> None:
    for watch in (True, False):
        torch._dynamo.reset()
        model = parallel(Core(), planned="layers.0.core", sequence=ShardedSequence(mesh((2,), ("cp",))), watch=watch)
        model.layers[0].out = Odd()
        want = model(tokens_of())
        torch._dynamo.config.capture_dynamic_output_shape_ops = True
        torch.testing.assert_close(torch.compile(model, backend="eager", fullgraph=True)(tokens_of()), want)


@pytest.mark.full
def test_what_compiles_without_a_watch_compiles_with_it(pool: Any) -> None:
    pool(2).run(traced_twice)


class Cuts(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * x[..., :1] * torch.arange(1, 1 + x.shape[1])[:, None]


def cut_in_a_graph(rank: int) -> None:
    model = parallel(Core(), planned="layers.0.core", sequence=ShardedSequence(mesh((2,), ("cp",))))
    model.layers[0].out = Cuts()
    model.layers[0].forward = torch.compile(model.layers[0].forward, backend="eager", fullgraph=True)
    model(tokens_of())


def test_compiled_forwards_of_a_watched_root_are_one_graph(pool: Any) -> None:
    """Else a checkpoint around one would save other tensors than its recomputation, which nothing watches."""
    pool(2).run(cut_in_a_graph)


# Cores whose rows are not those of the root.


def part_of_rows(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    n = q.shape[2] // 2
    out = F.scaled_dot_product_attention(q[:, :, :n], k[:, :, :n], v[:, :, :n], is_causal=True)
    return torch.cat([out, q[:, :, n:]], 2)


def two_lengths(rank: int) -> None:
    """A core of a sequence with a length of its own, in a plan of its own, is not the root's."""
    axis = mesh((2,), ("cp",))
    model = Model(Core(), ByHeads(part_of_rows)).double()
    sequence, half = ShardedSequence(axis), ShardedSequence(axis, length=S // 2)
    plan = {"": ShardedModel(sequence, positions=None), "layers.0.core": ContextParallel(sequence)}
    cp_mesh.parallelize(cp_mesh.parallelize(model, axis, plan), axis, {"layers.1.core": ContextParallel(half)})
    model(tokens_of())


def test_a_core_of_another_sequence_says_its_length(pool: Any) -> None:
    pool(2).run(two_lengths)


# Checkpoints inside of compiled cores; compiled cores of one class.


def checkpointed_inside(rank: int, use_reentrant: bool, fullgraph: bool) -> str:
    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return checkpoint(Core(), q, k, v, use_reentrant=use_reentrant)

    sequence = ShardedSequence(mesh((2,), ("cp",)))
    cores = ByHeads(attend), Core()
    grads = []
    for core in cores:
        torch.manual_seed(0)
        model = parallel(core, planned="layers.0.core", sequence=sequence)
        if core is cores[0]:
            model.layers[0].compile(backend="aot_eager", fullgraph=fullgraph)
        try:
            model(tokens_of()).sum().backward()
        except Exception as error:
            return f"{type(error).__name__}: {error}"
        grads.append(model.layers[0].qkv.weight.grad)
    torch.testing.assert_close(*grads, rtol=1e-11, atol=1e-11)
    return "right"


@pytest.mark.parametrize("use_reentrant", [False, True])
@pytest.mark.parametrize("fullgraph", [pytest.param(False, marks=pytest.mark.full), True])
def test_a_checkpoint_inside_a_compiled_core_is_right_or_refused(
    pool: Any, use_reentrant: bool, fullgraph: bool
) -> None:
    for outcome in pool(2).run(checkpointed_inside, use_reentrant, fullgraph):
        assert outcome == "right" or "checkpoint the module that holds the core" in outcome, outcome


class CheckpointedBlock(Block):
    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(super().forward, x, use_reentrant=False)


def checkpointed_blocks(rank: int, compiled: str, planned: str, skips: bool) -> None:
    sequence = ShardedSequence(mesh((2,), ("cp",)))
    model = Model(Core(), Core()).double()
    for layer in model.layers:
        layer.__class__ = CheckpointedBlock
    plan = {"": ShardedModel(sequence, positions=None), planned: ContextParallel(sequence)}
    cp_mesh.parallelize(model, sequence.mesh, plan)
    with torch._dynamo.config.patch(skip_fwd_side_effects_in_bwd_under_checkpoint=skips):
        compile_parts(model, compiled, backend="aot_eager", fullgraph=True)(tokens_of()).sum().backward()


@pytest.mark.parametrize("skips", [False, pytest.param(True, marks=pytest.mark.full)], ids="skips={}".format)
@pytest.mark.parametrize("compiled", ["not", "blocks in place", pytest.param("model", marks=pytest.mark.full)])
@pytest.mark.quick(without="blocks")
def test_a_watch_sees_into_checkpoints(pool: Any, compiled: str, skips: bool) -> None:
    """Whatever Dynamo's setting, whose default is False."""
    pool(2).run(checkpointed_blocks, compiled, "layers.*.core", skips)
    for error in pool(2).run_expecting_error(checkpointed_blocks, compiled, "layers.0.core", skips):
        assert error is not None and "every self-attention in a ContextParallel module" in error.message


def announced(rank: int, how: str) -> None:
    """In check mode: rank 1 alone is refused by the watch, or by a core without attention."""
    sequence = ShardedSequence(mesh((2,), ("cp",)))
    idle = ByHeads(lambda q, k, v: q)
    model = Model(idle if (rank == 1) == (how == "no attention") else Core(), Core()).double()
    planned = "layers.1.core" if how == "outside" else "layers.*.core"
    plan = {"": ShardedModel(sequence, positions=None), planned: ContextParallel(sequence)}
    cp_mesh.parallelize(model, sequence.mesh, plan)
    with cp_mesh.check_mode():
        model(tokens_of())


@pytest.mark.parametrize("how", ["outside", "no attention"])
def test_in_check_mode_the_others_hear_of_it(pool: Any, how: str) -> None:
    for rank, error in enumerate(pool(2).run_expecting_error(announced, how, timeout=10.0)):
        assert error is not None and error.type == ("ArgumentError" if rank else "RankMismatchError"), error


def skipped(rank: int) -> None:
    """All ranks leave out a batch in which one of them raises in code of its own; then all go on as before."""
    sequence = ShardedSequence(mesh((2,), ("cp",)))
    model = parallel(Core(), planned="layers.*.core", sequence=sequence)
    raising = mock.Mock(side_effect=RuntimeError("of the user") if rank == 0 else None, return_value=None)
    with remover(model.layers[0].out.register_forward_hook(raising)):
        with pytest.raises(RuntimeError, match="of the user") if rank == 0 else contextlib.nullcontext():
            model(tokens_of())
    dist.barrier()
    model(tokens_of())
    model(tokens_of(2 * S))


def test_an_error_of_the_user_that_all_ranks_skip(pool: Any) -> None:
    pool(2).run(skipped, timeout=20.0)


def tripled(core: nn.Module) -> nn.Module:
    forward = core.forward
    core.forward = lambda *qkv: 3 * forward(*qkv)
    return core


def cores_of_one_class(rank: int) -> None:
    """Of unlike masks, and with forwards of instances: none may run code that was compiled for another."""
    axis = mesh((2,), ("cp",))
    sequence, qkv = ShardedSequence(axis), torch.randn(3, 1, H, S, D)
    for compiled in (False, True):
        cores = [Core(), Core(), tripled(Core())]
        for core, mask in zip(cores, (Mask(), Mask(window=(2, 0)), Mask()), strict=True):
            cp_mesh.parallelize(core, axis, {"": ContextParallel(sequence, mask=mask)})
            if compiled:
                core.compile(backend="eager", fullgraph=True)
        outs = [core(*qkv) for core in cores]
        torch.testing.assert_close(outs[2], 3 * outs[0])
        assert not torch.allclose(outs[0], outs[1])
        want = outs if not compiled else want  # noqa: F821
        torch.testing.assert_close(outs, want)


def test_compiled_cores_of_one_class_are_told_apart(pool: Any) -> None:
    pool(2).run(cores_of_one_class)
