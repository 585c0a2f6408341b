"""PyTorch's own context_parallel: rows as PyTorch cuts them, results of one rank, or refused."""

from __future__ import annotations

import contextlib
import contextvars
import functools
import inspect
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from dense import dense_attention, dense_mask, make_qkv
from inside import room
from model import Model, batch
from ranks import mesh, num_collectives
from scripts import run_script
from test_guard import raised
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.experimental import _attention as theirs
from torch.nn.attention.flex_attention import flex_attention
from torch.utils.checkpoint import checkpoint

from cp_mesh.integrations.torch_api import context_parallel, context_parallel_unshard, set_rotate_method

compat = room("torch_api")

CLOSE = {"rtol": 1e-10, "atol": 1e-10}
SCRIPT = Path(__file__).parent.parent / "examples" / "context_parallel.py"


def cp() -> DeviceMesh:
    return mesh((dist.get_world_size(),), ("cp",))


# The functions.


@pytest.mark.parametrize("name", ["context_parallel", "context_parallel_unshard", "set_rotate_method"])
def test_arguments_are_those_of_pytorch(name: str) -> None:
    own, other = (inspect.signature(getattr(module, name)).parameters for module in (compat, theirs))
    assert [(x.name, x.kind, x.default) for x in own.values()] == [(x.name, x.kind, x.default) for x in other.values()]


def rows_of_both(rank: int, length: int, balanced: bool) -> None:
    """Buffers within the context and behind it, and whole tensors again, are PyTorch's, bit by bit."""
    whole = torch.randn(2, length, 3, generator=torch.Generator().manual_seed(0))
    held = []
    with mock.patch.object(theirs._cp_options, "enable_load_balance", balanced):
        for module in (theirs, compat):
            x, y = whole.clone(), whole.transpose(0, 1).contiguous()
            with module.context_parallel(cp(), buffers=[x, y], buffer_seq_dims=[1, 0], no_restore_buffers={y}):
                local = x.clone()
                held.append([local, y.clone(), *module.context_parallel_unshard(cp(), [local], [1]), x, y])
    for own, other in zip(*held, strict=True):
        assert torch.equal(own, other) and own.is_contiguous()
    assert torch.equal(held[1][2], whole) and torch.equal(held[1][3], whole) and held[1][0].shape != whole.shape


@pytest.mark.parametrize("num_ranks", [2, 3, 4])
def test_rows_are_those_of_pytorch(pool: Any, num_ranks: int) -> None:
    for length, balanced in ((4 * num_ranks, True), (4 * num_ranks, False), (5 * num_ranks, True)):
        pool(num_ranks).run(rows_of_both, length, balanced)


def attend_as_pytorch(rank: int, length: int, causal: bool) -> None:
    q, k, v, dout = make_qkv(2, 4, 2, length, 6)
    parts = [x.clone() for x in (q, k, v, dout)]
    with context_parallel(cp(), buffers=parts, buffer_seq_dims=[2] * 4):
        for x in parts[:3]:
            x.requires_grad_()
        out = F.scaled_dot_product_attention(*parts[:3], is_causal=causal, scale=0.3, enable_gqa=True)
        out.backward(parts[3])
        found = [out, *(x.grad for x in parts[:3])]
        for x in parts[:3]:
            x.requires_grad_(False)
    whole = [x.requires_grad_() for x in (q, k, v)]
    wanted, _ = dense_attention(*whole, dense_mask(length, causal=causal), scale=0.3)
    for own, one in zip(
        context_parallel_unshard(cp(), found, [2] * 4),
        [wanted, *torch.autograd.grad(wanted, whole, dout)],
        strict=True,
    ):
        torch.testing.assert_close(own, one.detach(), **CLOSE)
        assert not own.requires_grad


@pytest.mark.parametrize("num_ranks", [2, 3, 4])
def test_attention_is_that_of_one_rank(pool: Any, num_ranks: int) -> None:
    for length in (4 * num_ranks, 5 * num_ranks):
        for causal in (True, False):
            pool(num_ranks).run(attend_as_pytorch, length, causal)


def methods_asked(rank: int) -> list[str]:
    asked = []

    def spy(*args: Any, **kwargs: Any) -> Any:
        asked.append(kwargs["method"])
        return attention(*args, **kwargs)

    attention = compat.attention
    for name in (None, "allgather", "alltoall"):
        if name is not None:
            set_rotate_method(name)
        x = make_qkv(1, 2, 2, 8, 4)[0]
        with mock.patch.object(compat, "attention", spy), context_parallel(cp(), buffers=[x], buffer_seq_dims=[2]):
            F.scaled_dot_product_attention(x, x, x)
    return asked


def methods_asked_anew(rank: int) -> list[str]:
    """As if nobody had called set_rotate_method before."""
    return contextvars.Context().run(methods_asked, rank)


def test_rotate_method_is_the_method(pool: Any) -> None:
    assert pool(2).run(methods_asked_anew) == [["auto", "all_gather", "ring"]] * 2


def test_the_script_runs_as_it_is() -> None:
    """With PyTorch's names, of which it changes the import alone."""
    lines = SCRIPT.read_text().splitlines()
    theirs_of_it = "\n".join(line[2:] for line in lines if line.startswith("# from "))
    own = next(line for line in lines if line.startswith("from cp_mesh"))
    names: dict[str, Any] = {}
    exec(theirs_of_it, names)
    assert {*own.rpartition("import ")[2].split(", ")} == {*names} - {"__builtins__"}
    done = run_script(SCRIPT, [], num_ranks=2)
    assert done.returncode == 0 and done.printed.count("from one rank") == 4, done.printed


# A model.


class Decoder(nn.Module):
    """`Model` of model.py, whose positions are a table that is cut with the tokens; checkpoints if it is told to."""

    def __init__(self, reentrant: bool | None = None) -> None:
        super().__init__()
        self.model, self.reentrant = Model(), reentrant

    def forward(self, tokens: Tensor, table: Tensor) -> Tensor:
        x = self.model.embedding(tokens)
        rope = torch.stack((table.cos(), table.sin()))
        for layer in self.model.layers:
            if self.reentrant is None:
                x = layer(x, rope, None)
            else:
                x = checkpoint(layer, x, rope, None, use_reentrant=self.reentrant)
        return self.model.head(self.model.norm(x))


def inputs(length: int = 24) -> tuple[Tensor, Tensor, Tensor]:
    """Tokens and labels, which are views of one text, and a table of angles."""
    text = batch(2, length + 1)["tokens"]
    angles = torch.arange(length).double()[:, None] * 0.3 ** torch.arange(2)
    return text[:, :-1], text[:, 1:], angles


def loss_of(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


@functools.cache
def of_one_rank() -> list[Tensor]:
    model, (tokens, labels, table) = Decoder(), inputs()
    loss = loss_of(model(tokens, table), labels)
    loss.backward()
    return [loss.detach(), *(x.grad for x in model.parameters() if x.grad is not None)]


def trained(rank: int, changes: Callable[[Decoder], None] | None, reentrant: bool | None, inside: bool) -> int:
    """Two steps; how many graphs torch.compile made in the second one."""
    model, (tokens, labels, table) = Decoder(reentrant), inputs()
    whole = [x.clone() for x in (tokens, labels, table)]
    if changes is not None:
        changes(model)
    graphs = 0
    for _ in range(2):
        model.zero_grad()
        graphs = counters["stats"]["unique_graphs"]
        with context_parallel(cp(), buffers=[tokens, labels, table], buffer_seq_dims=[1, 1, 0]):
            loss = loss_of(model(tokens, table), labels)
            if inside:
                loss.backward()
        if not inside:
            loss.backward()
        found = [loss.detach(), *(x.grad for x in model.parameters() if x.grad is not None)]
        for own, one in zip(found, of_one_rank(), strict=True):
            dist.all_reduce(own)
            torch.testing.assert_close(own / dist.get_world_size(), one, **CLOSE)
        for x, y in zip((tokens, labels, table), whole, strict=True):
            assert torch.equal(x, y)
    return counters["stats"]["unique_graphs"] - graphs


def compile_whole(model: Decoder) -> None:
    torch._dynamo.config.skip_fwd_side_effects_in_bwd_under_checkpoint = True
    model.compile(backend="aot_eager", fullgraph=True)


def compile_layers(model: Decoder) -> None:
    for layer in model.model.layers:
        layer.compile(backend="aot_eager", fullgraph=True)


@pytest.mark.parametrize("reentrant", [None, False])
@pytest.mark.parametrize("changes", [None, pytest.param(compile_whole, marks=pytest.mark.full), compile_layers])
@pytest.mark.quick(without="compile_layers")
def test_a_model_is_trained(pool: Any, changes: Any, reentrant: bool | None) -> None:
    assert pool(2).run(trained, changes, reentrant, True) == [0, 0]


def test_a_model_on_three_ranks(pool: Any) -> None:
    pool(3).run(trained, None, None, True)


class Toy(nn.Module):
    """x [B, S, D] to attention of its projections; nothing of autograd keeps x itself."""

    def __init__(self, reentrant: bool | None = None) -> None:
        super().__init__()
        self.linear, self.reentrant = nn.Linear(4, 12, dtype=torch.float64), reentrant
        nn.init.ones_(self.linear.bias)
        nn.init.normal_(self.linear.weight, generator=torch.Generator().manual_seed(0))

    def forward(self, x: Tensor) -> Tensor:
        h = 1.0 * x
        return self.attend(h) if self.reentrant is None else checkpoint(self.attend, h, use_reentrant=self.reentrant)

    def attend(self, h: Tensor) -> Tensor:
        q, k, v = self.linear(h)[:, None].chunk(3, dim=-1)
        return F.scaled_dot_product_attention(q, k, v, is_causal=True).sin()


def behind(rank: int, how: str) -> str:
    """The backward behind the context, or by torch.autograd.grad within: exact, or what it raises."""
    model, x = Toy(False if "checkpoint" in how else None), torch.randn(2, 16, 4, dtype=torch.float64)
    dist.broadcast(x, 0)
    one = Toy()
    one(x).square().sum().backward()
    if "compile" in how:
        model.attend = torch.compile(model.attend, backend="aot_eager", fullgraph=True)
    found = [torch.empty(())]
    try:
        with context_parallel(cp(), buffers=[x], buffer_seq_dims=[1]):
            h = x if how == "buffer" else 1.0 * x
            loss = (model(x).square() * h if how == "buffer" else model(x).square()).sum()
            if how.startswith("grad"):
                found = [*torch.autograd.grad(loss, [model.linear.weight])]
            if how.startswith("inputs"):
                loss.backward(inputs=[model.linear.weight])
        if how.startswith("inputs"):
            assert model.linear.bias.grad is None
        elif not how.startswith("grad"):
            loss.backward()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    grad = found[0] if how.startswith("grad") else model.linear.weight.grad
    dist.all_reduce(grad)
    torch.testing.assert_close(grad, one.linear.weight.grad, **CLOSE)
    return "exact"


@pytest.mark.parametrize(
    ("how", "says"),
    [
        ("eager", "exact"),
        ("grad", "exact"),
        ("grad, checkpoint", "exact"),
        ("grad, checkpoint, compile", "exact"),
        ("inputs, checkpoint", "exact"),
        ("buffer", "RuntimeError: one of the variables needed .* modified by an inplace operation"),
        ("checkpoint", "CheckpointError"),
        ("compile", "ArgumentError: context_parallel: expected a backward of compiled code .*, got one after"),
        ("checkpoint, compile", "ArgumentError: context_parallel: expected .* checkpoints .*, got one after"),
    ],
)
@pytest.mark.quick(without="compile")
def test_backward_behind_the_context(pool: Any, how: str, says: str) -> None:
    for found in pool(2).run(behind, how):
        assert re.match(says, found), found


def reentrant(rank: int) -> None:
    x = torch.ones(2, 16, 4, dtype=torch.float64)
    with context_parallel(cp(), buffers=[x], buffer_seq_dims=[1]):
        Toy(True)(x.requires_grad_())


# What is refused.


@contextlib.contextmanager
def opened(length: int = 16) -> Iterator[Tensor]:
    x = make_qkv(1, 4, 4, length, 4)[0]
    with context_parallel(cp(), buffers=[x], buffer_seq_dims=[2]):
        yield x


def within(call: Callable[[Tensor], Any]) -> Callable[[], Any]:
    def run() -> None:
        with opened() as x:
            call(x)

    return run


def enter(*buffers: Any, dims: Any = None, kept: Any = None) -> Callable[[], Any]:
    def run() -> None:
        dims_of = [0] * len(buffers) if dims is None else dims
        with context_parallel(cp(), buffers=buffers, buffer_seq_dims=dims_of, no_restore_buffers=kept):
            pass

    return run


def sdpa(*args: Any, **kwargs: Any) -> Tensor:
    return F.scaled_dot_product_attention(*args, **kwargs)


def nest(x: Tensor) -> None:
    with opened():
        pass


def refusals() -> dict[str, tuple[Callable[[], Any], str]]:
    a, b = torch.zeros(12), torch.zeros(12)
    many = make_qkv(1, 4, 4, 16, 4)[0]
    rows = make_qkv(1, 4, 4, 5, 4)[0]
    keep = torch.ones(8, 8, dtype=torch.bool)
    mha = nn.MultiheadAttention(4, 1, batch_first=True, dtype=torch.float64)
    other = mesh((2,), ("tp",))
    place = DTensor.from_local(a, cp(), [Replicate()], run_check=False)
    return {
        "attn_mask": (within(lambda x: sdpa(x, x, x, keep)), "got an attn_mask"),
        "dropout": (within(lambda x: sdpa(x, x, x, dropout_p=0.1)), "got dropout_p=0.1, which has no seed"),
        "whole rows": (within(lambda x: sdpa(many, many, many)), "expected 8, as the buffers have, got (16, 16)"),
        "cross-attention": (within(lambda x: sdpa(x, rows, rows)), "expected 8, as the buffers have, got (8, 5)"),
        "fewer heads": (within(lambda x: sdpa(x, x[:, :2], x[:, :2])), "pass enable_gqa=True"),
        "flex": (within(lambda x: flex_attention(x, x, x)), "alone, got flex_attention"),
        "module": (within(lambda x: mha(x[0], x[0], x[0])), "alone, got multi_head_attention_forward"),
        "DTensors": (within(lambda x: sdpa(*[DTensor.from_local(x, other, [Shard(1)])] * 3)), "cp"),
        "nested": (within(nest), "got another context"),
        "set within": (within(lambda x: set_rotate_method("alltoall")), "got 'alltoall' within a context"),
        "no buffers": (enter(), "a buffer or more, and a dim for each, got 0 buffers, 0 dims"),
        "dims": (enter(a, dims=[0, 0]), "a buffer or more, and a dim for each, got 1 buffers, 2 dims"),
        "a list": (enter([1, 2]), "buffers: expected plain tensors that require no grad, got list"),
        "a parameter": (enter(a, nn.Parameter(b)), "expected plain tensors that require no grad, got Parameter that"),
        "a DTensor": (enter(place), "expected plain tensors that require no grad, got DTensor"),
        "two lengths": (enter(a, b[:6]), "expected one length along buffer_seq_dims, got [12, 6]"),
        "odd": (enter(a[:11]), "expected a length that is a multiple of 2 ranks, got 11"),
        "kept": (enter(a, kept={b}), "no_restore_buffers: expected some of buffers"),
        "method": (lambda: set_rotate_method("ring"), "expected 'allgather' or 'alltoall', got 'ring'"),
        "balancer": (
            lambda: context_parallel_unshard(cp(), [a], [0], theirs._HeadTailLoadBalancer(12, 2, "cpu")),
            "load_balancer: expected None, got _HeadTailLoadBalancer",
        ),
        "unshard": (lambda: context_parallel_unshard(cp(), [place], [0]), "expected local tensors, and a dim for each"),
        "reentrant": (lambda: reentrant(0), "expected no reentrant checkpoint"),
    }  # fmt: skip


def all_refused(rank: int) -> dict[str, tuple[str, int]]:
    said = {}
    for name, (call, _) in refusals().items():
        before = num_collectives()
        try:
            call()
            said[name] = "nothing", 0
        except Exception as error:
            said[name] = f"{type(error).__mro__[:2]} {error}", num_collectives() - before
    return said


def test_what_is_refused(pool: Any) -> None:
    """On every rank, before a collective, with the tensors as they were."""
    wanted = pool(2).run(names_of_refusals)[0]
    for found in pool(2).run(all_refused):
        for name, says in wanted.items():
            text, collectives = found[name]
            assert says in text and collectives == 0, (name, text)


def names_of_refusals(rank: int) -> dict[str, str]:
    return {name: says for name, (_, says) in refusals().items()}


def unlike_buffers(rank: int, known: bool) -> None:
    if known:
        enter(torch.zeros(20))(), enter(torch.zeros(28))()
        enter(torch.zeros(20 + 8 * rank))()
    enter(torch.full((12,), float(rank)))()


def restored_after_an_error(rank: int) -> None:
    x = torch.arange(16.0).reshape(2, 8).t()  # a view that is not contiguous
    whole = x.clone()
    with pytest.raises(ZeroDivisionError), context_parallel(cp(), buffers=[x], buffer_seq_dims=[0]):
        assert x.shape == (4, 2)
        raise ZeroDivisionError
    assert torch.equal(x, whole) and x.stride() == (1, 8)
    assert sdpa(whole[None], whole[None], whole[None]).shape == (1, 8, 2)


def test_ranks_with_other_buffers_are_told(pool: Any) -> None:
    for known in (False, True):
        for error in raised(pool, 2, unlike_buffers, known):
            assert error.type == "RankMismatchError" and "buffers[0]" in error.message
            assert ("cp rank 0: torch.float32 (20,); cp rank 1: torch.float32 (28,)" in error.message) == known


def test_buffers_are_restored_after_an_error(pool: Any) -> None:
    pool(2).run(restored_after_an_error)
