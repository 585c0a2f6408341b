"""Linears, embeddings and losses over tp: every number is that of one rank, and nothing travels that need not."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
import torch.nn.functional as F
from checks import forget_kept
from inside import inner, room, state_of
from model import Joined
from ranks import REFUSALS, mesh, num_collectives, on_ranks, refused
from recording import recording
from refusals.linears import ALONE
from set_ups import local, whole_of
from test_loss import peak_of
from test_symmetric_memory import double
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel, SequenceParallel
from torch.utils._pytree import tree_map
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from cp_mesh import (
    ArgumentError,
    ContextParallel,
    RankMismatchError,
    ShardedSequence,
    attention,
    check_mode,
    cross_entropy,
    parallelize,
    sum_gradients,
)
from cp_mesh.comm.exchange import release, symmetric_memory_bytes
from cp_mesh.tensor_parallel import OverlappedColwise, OverlappedRowwise, VocabParallelEmbedding, VocabParallelHead

agreement = room("agreement")
cuts = room("cuts")
overlap = room("overlap")
vocabulary, in_chunks = room("vocab_parallel"), room("losses_in_chunks")
Shards = inner("shards", "Shards")

V, C, OUT, HIDDEN = 11, 6, 10, 7  # of which tp = 2, 3 and 4 divide few
IGNORED = -100
EXACT = {"rtol": 1e-12, "atol": 1e-14}


class Net(nn.Module):
    """Tokens [..., S] to logits [..., S, V], in float64; in the place of attention are three linears of one input."""

    def __init__(self, bias: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding, self.head = nn.Embedding(V, C, padding_idx=3), nn.Linear(C, V, bias=False)
        mixer = {name: nn.Linear(C, OUT, bias) for name in ("wq", "wk", "wv")} | {"wo": nn.Linear(OUT, C, bias)}
        self.mixer = Joined(lambda m, x: m.wo(m.wq(x) * m.wk(x).sigmoid() + m.wv(x)), **mixer)
        feed_forward = {name: nn.Linear(C, HIDDEN, bias) for name in ("w1", "w3")} | {"w2": nn.Linear(HIDDEN, C, bias)}
        self.feed_forward = Joined(lambda m, x: m.w2(F.silu(m.w1(x)) * m.w3(x)), **feed_forward)
        self.to(torch.float64)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        x = x + self.mixer(x.tanh())
        return self.head((x + self.feed_forward(x.tanh())).tanh())


def plan(
    mode: Any = "reduce_scatter", recompute: bool = False, local: bool = True, transport: Any = "auto"
) -> dict[str, Any]:
    row = {"mode": mode, "use_local_output": local}
    column = {"mode": mode, "recompute_all_gather": recompute, "transport": transport}
    return {
        "embedding": VocabParallelEmbedding(**row),
        "mixer": OverlappedColwise("wq", "wk", "wv", **column),
        "mixer.wo": OverlappedRowwise(**row, transport=transport),
        "feed_forward": OverlappedColwise("w1", "w3", **column),
        "feed_forward.w2": OverlappedRowwise(**row, transport=transport),
        "head": VocabParallelHead(mode=mode),
    }


def tokens_and_labels(shape: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(8)
    tokens, labels = (torch.randint(V, shape, generator=generator) for _ in range(2))
    labels.flatten()[1::5] = IGNORED
    return tokens, labels


def gradients(model: nn.Module) -> dict[str, Tensor]:
    """The whole ones."""
    return {name: whole_of(x.grad) for name, x in model.named_parameters() if x.grad is not None}


def expected(model: nn.Module, tokens: Tensor, labels: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    """The loss of one rank, and its gradients."""
    loss = F.cross_entropy(model(tokens).flatten(0, -2), labels.flatten(), ignore_index=IGNORED)
    loss.backward()
    return loss.detach(), gradients(model)


def alone_and_tp() -> tuple[DeviceMesh, DeviceMesh]:
    """An axis of this rank alone, and tp over all ranks."""
    axes = mesh((1, dist.get_world_size()), ("dp", "tp"))
    return axes["dp"], axes["tp"]


@dataclass(frozen=True)
class Case:
    mode: str = "reduce_scatter"
    recompute: bool = False
    local: bool = True
    bias: bool = False
    shape: tuple[int, ...] = (2, 12)
    frozen: tuple[str, ...] = ()


CASES = [
    Case(),
    Case(recompute=True, bias=True),
    Case(mode="all_reduce", bias=True, shape=(2, 7)),
    Case(mode="all_reduce", local=False, shape=(13,)),
    Case(local=False, bias=True, shape=(3, 7)),
    Case(local=False, recompute=True, shape=(13,), bias=True),
    Case(local=False, shape=(1, 5), bias=True),
    Case(local=False, shape=(2, 1)),  # rows for one rank alone
    Case(shape=(24,), bias=True),
    Case(bias=True, frozen=("mixer.wq.weight", "mixer.wv.weight", "mixer.wv.bias", "feed_forward.w2.weight")),
    Case(bias=True, recompute=True, frozen=("weight",)),  # biases alone
    Case(mode="all_reduce", bias=True, frozen=("weight",)),
    Case(frozen=("embedding.weight",)),
]


@contextmanager
def beside_products(transport: str, folder: Any = "") -> Iterator[None]:
    """While open, rows travel beside products of any size; over symmetric memory, by its double."""
    slow = {"PRODUCT_RATE": 1e-9, "LINK_RATE": 1e-9} if transport == "functional" else {}
    with ExitStack() as stack:
        for name, rate in slow.items():
            stack.enter_context(mock.patch.object(overlap, name, rate))
        if transport == "symmetric_memory":
            stack.enter_context(double(alone_and_tp()[1].get_group(), folder))
        yield


def check(case: Case, transport: str) -> None:
    """Numbers are those of one rank."""
    alone, tp = alone_and_tp()
    tokens, labels = tokens_and_labels(case.shape)
    model = Net(case.bias)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not name.endswith(case.frozen or "none"))
    loss, grads = expected(copy.deepcopy(model), tokens, labels)
    whole = model.embedding(tokens)
    asked = transport if case.mode == "reduce_scatter" else "auto"
    parallelize(model, tp, plan(case.mode, case.recompute, case.local, asked))
    rows = model.embedding(tokens)  # DTensor's shards are those of torch.chunk
    assert case.local or torch.equal(rows.full_tensor(), whole), case
    found = cross_entropy(model(tokens), labels, alone)
    found.backward()
    every, own = {"loss": loss} | grads, {"loss": found.detach()} | gradients(model)
    assert every.keys() == own.keys(), case
    for name, wanted in every.items():
        assert (own[name] - wanted).abs().max() <= 1e-12 * wanted.abs().max(), (case, name)
    for parameter in model.parameters():
        assert not isinstance(parameter.grad, DTensor) or parameter.grad.placements == parameter.placements, case


@pytest.mark.parametrize("tp_size", [1, 2, 3, 4])
@pytest.mark.quick("3")
@on_ranks("tp_size")
def test_loss_and_gradients_are_those_of_one_rank() -> None:
    for case in CASES:
        check(case, "auto")


BESIDE = [case for case in CASES if case.mode == "reduce_scatter"] + [
    Case(recompute=True, shape=(1, 24), bias=True),
    Case(recompute=True, shape=(3, 36), frozen=("weight",), bias=True),
    Case(recompute=True, shape=(2, 12), frozen=("mixer.wo.weight", "w2.weight", "embedding.weight"), bias=True),
    Case(shape=(2, 48), frozen=("mixer.wq.weight", "mixer.wk.weight", "mixer.wv.weight")),
]
"""Lengths that tp divides, and some that it does not, which travel as ever."""


@pytest.mark.parametrize("transport", ["functional", "symmetric_memory"])
@pytest.mark.parametrize(
    "tp_size", [pytest.param(1, marks=pytest.mark.full), 2, 3, pytest.param(4, marks=pytest.mark.full)]
)
@pytest.mark.quick("2-")
@on_ranks("tp_size", timeout=120.0)
def test_rows_that_travel_beside_products(transport: str, tmp_path: Path) -> None:
    """Symmetric memory is a double, in which rows are NaN until they are written, and naps let ranks get ahead."""
    with beside_products(transport, tmp_path):
        for case in BESIDE:
            check(case, transport)


@pytest.mark.parametrize("transport", ["auto", "functional", "symmetric_memory"])
@on_ranks(2)
def test_gathering_again_changes_no_bit(transport: str, tmp_path: Path) -> None:
    alone, tp = alone_and_tp()
    tokens, labels = tokens_and_labels((2, 7 if transport == "auto" else 8))
    found = []
    with beside_products(transport, tmp_path):
        for recompute in (False, True):
            model = parallelize(Net(bias=True), tp, plan(recompute=recompute, local=False, transport=transport))
            cross_entropy(model(tokens), labels, alone).backward()
            found.append(gradients(model))
    first, second = found
    assert first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)


# What travels, what is computed, and what is kept: of one module, counted below the library.

S, B = 5, 2  # rows of the sequence, of which two ranks hold three and two; three travel


@dataclass(frozen=True)
class Part:
    """A module of `Net` alone: elements of each collective that this rank gives, and products, of both passes."""

    name: str
    forward: list[tuple[str, int]]
    backward: list[tuple[str, int]]
    products: tuple[int, int] = (0, 0)
    mode: str = "reduce_scatter"
    recompute: bool = False
    frozen: tuple[str, ...] = ()
    input_frozen: bool = False


QV = "q.weight", "v.weight"
GATHER, GATHER_AGAIN = ("all-gather", B * 3 * C), ("all-gather", B * 3 * C)
SCATTER = ("reduce-scatter", 2 * B * 3 * C)
REDUCE = ("all-reduce", B * S * C)
PARTS = [
    Part("mixer", [GATHER, SCATTER], [GATHER, SCATTER], (4, 8)),
    Part("mixer", [GATHER, SCATTER], [GATHER, GATHER_AGAIN, SCATTER], (4, 8), recompute=True),
    Part("mixer", [REDUCE], [REDUCE], (4, 8), mode="all_reduce"),
    # frozen weights: nothing is gathered for them again, and no product made
    Part("mixer", [GATHER, SCATTER], [GATHER, SCATTER], (4, 4), recompute=True, frozen=("weight",)),
    Part("mixer", [GATHER, SCATTER], [GATHER, GATHER, SCATTER], (4, 6), recompute=True, frozen=QV),
    # an input that needs no gradient: none is computed, and none travels
    Part("mixer", [GATHER, SCATTER], [GATHER], (4, 5), input_frozen=True),
    Part("mixer", [REDUCE], [], (4, 5), mode="all_reduce", input_frozen=True),
    # the numbers of each row that the loss needs: four, of all rows
    Part("head", [GATHER, ("all-gather", 4 * B * S)], [GATHER, SCATTER], (1, 3)),
    Part("head", [("all-gather", 4 * B * S)], [REDUCE], (1, 3), mode="all_reduce"),
    Part("head", [GATHER, ("all-gather", 4 * B * S)], [GATHER, SCATTER], (1, 2), frozen=("weight",)),
    Part("embedding", [SCATTER], [GATHER]),
    Part("embedding", [REDUCE], [], mode="all_reduce"),
]  # fmt: skip


def input_of(part: Part, tp: DeviceMesh) -> Tensor:
    if part.name == "embedding":
        return tokens_and_labels((B, S))[0]
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(B, S, C, generator=generator, dtype=torch.float64)
    if part.mode == "reduce_scatter":
        x = distribute_tensor(x, tp, [Shard(1)])
    return x.requires_grad_(not part.input_frozen)


@contextmanager
def profiled() -> Iterator[list[str]]:
    """Names of what the CPU runs, in order; complete once the context is left."""
    names: list[str] = []
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        yield names
    names += [event.name for event in sorted(profile.events(), key=lambda event: event.time_range.start)]


PRODUCTS = ("aten::mm", "aten::addmm", "aten::addmm_", "aten::baddbmm", "aten::bmm")


@pytest.mark.parametrize("part", PARTS, ids=lambda part: f"{part.name}, {part.mode}")
@on_ranks(2)
def test_what_travels_and_what_is_computed(part: Part) -> None:
    alone, tp = alone_and_tp()
    model = parallelize(Net(), tp, plan(part.mode, part.recompute, local=False))
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not name.endswith(part.frozen or "none"))
    x, module, before = input_of(part, tp), model.get_submodule(part.name), num_collectives()
    with recording(tp) as notes:
        with profiled() as forward:
            out = module(x)
            loss = cross_entropy(out, tokens_and_labels((B, S))[1], alone) if part.name == "head" else out.sum()
        num_forward = len(notes.collectives)
        with profiled() as backward:
            local(loss).backward()
    assert not notes.problems and not notes.sent, notes.problems
    num_other = int(part.name == "head")  # it counts tokens on another axis
    assert num_collectives() - before == len(notes.collectives) + num_other, "something was sent past the group"
    found = [(entry.kind, entry.given) for entry in notes.collectives]
    assert (found[:num_forward], found[num_forward:]) == (part.forward, part.backward)
    products = tuple(sum(name in PRODUCTS for name in names) for names in (forward, backward))
    assert part.name == "embedding" or products == part.products


ORDER = {
    "_c10d_functional::all_gather_into_tensor": "gather",
    "_c10d_functional::reduce_scatter_tensor": "scatter",
    "_c10d_functional::all_reduce": "reduce",
    "_c10d_functional::all_to_all_single": "swap",
    "_c10d_functional::wait_tensor": "wait",
    "aten::mm": "product",
    "aten::addmm_": "product",
    **{name: name for name in ("barrier", "copies", "wait")},  # of the double of symmetric memory
}


def in_order(names: list[str]) -> str:
    return " ".join(ORDER[name] for name in names if name in ORDER)


ORDERS = [
    ("reduce_scatter", "gather product product scatter wait product product wait"),
    ("all_reduce", "product product reduce product product wait"),
]


@pytest.mark.parametrize(("mode", "order"), ORDERS)
@on_ranks(2)
def test_products_run_while_rows_travel(mode: Any, order: str) -> None:
    """The gather is begun before the product for the input, the sum before those for the weights, and awaited after."""
    _, tp = alone_and_tp()
    columns = OverlappedColwise("w1", "w3", mode=mode, recompute_all_gather=mode == "reduce_scatter")
    module = parallelize(Net().feed_forward, tp, {"": columns})
    with mock.patch.object(module, "w2", nn.Identity()):
        out = module(torch.randn(2, 3, C, dtype=torch.float64, requires_grad=True))
    with profiled() as names:
        out.sum().backward()
    assert in_order(names) == order


@on_ranks(2)
def test_products_begin_before_all_rows_have_come() -> None:
    """This rank's rows first in a gather, others' first in a sum: in forwards, and for the input of a row linear."""
    _, tp = alone_and_tp()
    columns = OverlappedColwise("w1", "w3", recompute_all_gather=True)
    module = parallelize(Net().feed_forward, tp, {"": columns, "w2": OverlappedRowwise()})
    x = torch.randn(1, 4, C, dtype=torch.float64, requires_grad=True)
    with beside_products("functional"), profiled() as names:
        module(x).sum().backward()
    of_columns = "gather product product wait product product"
    of_rows = "product swap product swap wait product wait product"
    backward = "gather product wait product product gather product product scatter wait product product wait"
    assert in_order(names) == f"{of_columns} {of_rows} {backward}"


@on_ranks(2)
def test_products_run_while_copy_engines_move_rows(tmp_path: Path) -> None:
    """Copies are begun before the products beside them, behind a barrier; the second is that of pushes that landed."""
    _, tp = alone_and_tp()
    columns = OverlappedColwise("w1", "w3", recompute_all_gather=True, transport="symmetric_memory")
    module = parallelize(Net().feed_forward, tp, {"": columns, "w2": OverlappedRowwise(transport="symmetric_memory")})
    x = torch.randn(1, 4, C, dtype=torch.float64, requires_grad=True)
    with beside_products("symmetric_memory", tmp_path), profiled() as names:
        module(x).sum().backward()
    gather = "barrier copies barrier"
    of_columns = f"{gather} product product wait product product"
    of_rows = "barrier product barrier copies product barrier copies wait product wait product"
    backward = f"{gather} product wait product wait product"
    backward += f" {gather} product product barrier copies wait product product wait product product"
    assert in_order(names) == f"{of_columns} {of_rows} {backward}"


@on_ranks(2)
def test_symmetric_memory_is_taken_where_asked_for_bounded_and_given_back(tmp_path: Path) -> None:
    """All rows of the widest input or output, and as many but one rank's; in steps of 256 bytes."""
    _, tp = alone_and_tp()

    def taken(module: nn.Module, rows: int) -> int:
        module(torch.randn(2, rows // 2, C, dtype=torch.float64)).sum().backward()
        return symmetric_memory_bytes()

    module = parallelize(Net(), tp, plan(recompute=True, transport="symmetric_memory")).mixer
    with beside_products("symmetric_memory", tmp_path):
        for rows, largest in ((8, 8), (16, 16), (4, 16)):
            wanted = sum(-(-2 * count * C * 8 // 256) * 256 for count in (largest, largest // 2))
            assert taken(module, rows) == wanted
        release(tp.get_group())
        assert symmetric_memory_bytes() == 0
    for transport, pays in (("functional", True), ("auto", False), ("auto", True)):
        module = parallelize(Net(), tp, plan(transport=transport)).mixer
        with double(tp.get_group(), tmp_path), beside_products("functional") if pays else nullcontext():
            assert bool(taken(module, 8)) == (transport == "auto" and pays)


@on_ranks(2)
def test_small_and_uneven_inputs_travel_at_once() -> None:
    """Over what a gather of 8192 features travels, for rows, columns and weights; bf16.

    512 rows take 30 us, 4096 rows 240 us; a product with 128 columns is shorter than its parts cost. Products of 8192
    rows with 4096 columns take 0.85 ms together, and could hide 240 us: the host would be slower.
    """
    group = alone_and_tp()[1].get_group().group_name
    given = [(8192, 5120, 3), (1024, 5120, 3), (8192, 128, 3), (8193, 5120, 3), (8192, 4096, 1)]
    for (rows, columns, count), wanted in zip(given, ["functional", None, None, None, None], strict=True):
        x = torch.empty(1, rows // 2, 8192, dtype=torch.bfloat16, device="meta")
        assert overlap.chosen_transport(Shards(rows, group), "functional", x, (8192, columns), count) == wanted


@pytest.mark.parametrize(
    ("recompute", "frozen", "elements"),
    [(False, False, 4 * 6 * C), (False, True, 0), (True, False, 4 * 3 * C), (True, True, 0)],
)
@on_ranks(2)
def test_what_is_kept_for_the_backward(recompute: bool, frozen: bool, elements: int) -> None:
    """All rows; none if the weight is frozen; this rank's rows if they are gathered again."""
    linear = nn.Linear(C, OUT, bias=False).requires_grad_(not frozen)
    parallelize(linear, alone_and_tp()[1], {"": OverlappedColwise(recompute_all_gather=recompute)})
    numels: list[int] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: numels.append(x.numel()) or x, lambda x: x):
        linear(torch.randn(4, 3, C, requires_grad=True))
    assert sum(numels) == elements + OUT // 2 * C


@pytest.mark.parametrize("mode", ["reduce_scatter", "all_reduce"])
@on_ranks(2)
def test_weights_and_inputs_that_lie_by_columns(rank: int, mode: Any) -> None:
    """A DTensor's strides are those of its part; an input's rows may be its first dim in memory."""
    _, tp = alone_and_tp()
    for style, shard in ((OverlappedColwise(mode=mode), Shard(0)), (OverlappedRowwise(mode=mode), Shard(1))):
        linear = nn.Linear(C, OUT, bias=False, dtype=torch.float64)
        linear.weight = nn.Parameter(torch.linspace(-1, 1, C * OUT, dtype=torch.float64).view(C, OUT).t())
        whole = copy.deepcopy(linear)
        x = torch.linspace(-1, 1, 24 * C, dtype=torch.float64).view(6, 4, C).transpose(0, 1)
        whole(x).square().sum().backward()
        parallelize(linear, tp, {"": style})
        own = x.chunk(2, 2)[rank] if shard == Shard(1) else x if mode == "all_reduce" else x.chunk(2, 1)[rank]
        linear(own).square().sum().backward()
        grad: Any = linear.weight.grad
        of_whole, of_part = (y.stride(0) < y.stride(1) for y in (grad, grad.to_local()))
        assert grad.placements == (shard,) and of_whole == of_part
        torch.testing.assert_close(grad.full_tensor(), whole.weight.grad, rtol=1e-12, atol=1e-12)


@on_ranks(2)
def test_shapes_of_the_meta_device() -> None:
    model = nn.Sequential(nn.Linear(C, OUT), nn.Linear(OUT, C))
    parallelize(model, alone_and_tp()[1], {"0": OverlappedColwise(), "1": OverlappedRowwise()})
    assert model.to("meta")(torch.empty(2, 3, C, device="meta")).shape == (2, 3, C)


@on_ranks(2)
def test_frozen_norms_stay_so_and_modes_agree() -> None:
    """PyTorch's SequenceParallel makes parameters anew, which would be trained."""
    tp = alone_and_tp()[1]
    model = nn.Sequential(nn.LayerNorm(C), nn.Linear(C, C), nn.LayerNorm(C)).requires_grad_(False)
    model[2].requires_grad_()
    parallelize(model, tp, {"0": SequenceParallel(), "1": OverlappedColwise(), "2": SequenceParallel()})
    assert [x.requires_grad for x in model.parameters()] == [False] * 4 + [True] * 2
    mixed = {"0": OverlappedColwise(mode="all_reduce"), "1": OverlappedRowwise()}
    with refused("'all_reduce' at '0', 'reduce_scatter' at '1'"):
        parallelize(nn.Sequential(nn.Linear(C, C), nn.Linear(C, C)), tp, mixed)


# Compiled code, checkpoints, copies.


@pytest.mark.parametrize("mode", ["reduce_scatter", "all_reduce"])
@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.nightly("compiled"))])
@pytest.mark.full
@on_ranks(2, timeout=240.0)
def test_compiled_in_one_graph(mode: str, backend: str) -> None:
    alone, tp = alone_and_tp()
    model = parallelize(Net(bias=True), tp, plan(mode, mode == "reduce_scatter"))
    counter = CompileCounterWithBackend(backend)

    def loss(tokens: Tensor, labels: Tensor) -> Tensor:
        return cross_entropy(model(tokens), labels, alone)

    step = torch.compile(loss, backend=counter, fullgraph=True, dynamic=True)
    for length in (6, 10):
        found = []
        for run in (loss, step):
            model.zero_grad()
            run(*tokens_and_labels((2, length))).backward()
            found.append(gradients(model))
        torch.testing.assert_close(found[1], found[0], **EXACT)
    assert counter.frame_count == 1  # for all lengths


@pytest.mark.parametrize("fullgraph", [True, False])
@pytest.mark.full
@on_ranks(2, timeout=240.0)
def test_a_compiled_loss_over_tp(fullgraph: bool) -> None:
    """By its axis in one graph, and among two axes."""
    axes = mesh((1, dist.get_world_size()), ("dp", "tp"))
    model = parallelize(Net(), axes["tp"], plan())
    over = axes["tp"] if fullgraph else axes
    loss = torch.compile(
        lambda *given: cross_entropy(model(given[0]), given[1], over), backend="eager", fullgraph=fullgraph
    )
    with pytest.raises(Exception, match=r"distinct tokens, got ranks \[0, 1\] of one tp group; leave tp out"):
        loss(*tokens_and_labels((2, 6)))  # torch.compile puts an error of its own around ours


def save_linears(_: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    saved = op == torch.ops.cp_mesh.column_linears.default
    return CheckpointPolicy.MUST_SAVE if saved else CheckpointPolicy.PREFER_RECOMPUTE


@on_ranks(2)
def test_checkpoints() -> None:
    """Collectives of a step without checkpoints, with them, and with a policy that keeps the linears' outputs.

    Of gather, scatter, gather and scatter; a recomputation ends before the row linear, by PyTorch's
    StopRecomputation, which is no refusal: the first calls of three models are compared, and no more.
    """
    _, tp = alone_and_tp()
    results, grads, words = [], [], 0
    policy = partial(create_selective_checkpoint_contexts, save_linears)
    for options in (None, {}, {"context_fn": policy}):
        module = parallelize(Net(bias=True), tp, plan()).feed_forward
        x = torch.linspace(-1, 1, 2 * 3 * C, dtype=torch.float64).view(2, 3, C).requires_grad_()
        before = num_collectives()
        out = module(x) if options is None else checkpoint(module, x, use_reentrant=False, **options)
        out.square().sum().backward()
        results.append(num_collectives() - before)
        grads.append({"x": x.grad, **gradients(module)})
        words += state_of(tp.get_group(), agreement.Calls).times  # since the plan
    assert (results, words) == ([4, 5, 4], 6)
    for other in grads[1:]:
        assert all(torch.equal(other[name], grads[0][name]) for name in grads[0])


@on_ranks(2)
def test_copies_and_tied_weights() -> None:
    """A deep copy has weights of its own, and so do linears that are shared."""
    _, tp = alone_and_tp()
    model = Net()
    model.head.weight = model.embedding.weight
    parallelize(model, tp, plan())
    assert model.head.weight is model.embedding.weight
    twin = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in twin.parameters():
            parameter.zero_()
    x = torch.ones(2, 3, C, dtype=torch.float64)
    found: list[Tensor] = []  # of the copy, while the forward of the model's module runs
    model.mixer.wq.register_forward_pre_hook(lambda *_: found.append(twin.mixer.wq(x)))
    assert not twin.mixer(x).any() and model.mixer(x).any() and not found[0].any()


@pytest.mark.parametrize("compiled", [False, True], ids=["plain", "a compiled head"])
@on_ranks(2)
def test_tied_weights_under_styles_of_pytorch(compiled: bool) -> None:
    """A model whose embedding is its head has one weight under PyTorch's styles too, and its gradient is right."""
    alone, tp = alone_and_tp()
    tokens, labels = tokens_and_labels((2, 7))
    models = Net(), Net()
    for model in models:
        model.head.weight = model.embedding.weight
    if compiled:
        models[1].head = torch.compile(models[1].head, backend="eager")
    head = ColwiseParallel(output_layouts=Replicate())
    parallelize(models[1], tp, {"embedding": RowwiseParallel(input_layouts=Replicate()), "head": head})
    assert models[1].head.weight is models[1].embedding.weight
    assert len([*models[1].parameters()]) == len([*models[0].parameters()])
    want, wanted = expected(models[0], tokens, labels)
    loss = cross_entropy(models[1](tokens), labels, alone)
    loss.backward()
    found = {"loss": loss.detach()} | gradients(models[1])
    torch.testing.assert_close(
        found, {"loss": want} | {name: wanted[name] for name in found if name != "loss"}, **EXACT
    )


class Scaled(nn.RMSNorm):
    """With a buffer that another module may share."""

    def __init__(self, scale: Tensor) -> None:
        super().__init__(C)
        self.register_buffer("scale", scale)


class Whole(ParallelStyle):
    """A style of users: it replaces a tensor by a plain one."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        module.weight = nn.Parameter(module.weight.detach().clone())
        return module


UNTIED: dict[str, tuple[dict[str, Any], str]] = {
    "one of two": ({"embedding": VocabParallelEmbedding()}, r"embedding.weight \(Shard\(0\),\), head.weight plain"),
    "one of two, PyTorch's": ({"head": ColwiseParallel()}, r"embedding.weight plain, head.weight \(Shard\(0\),\)"),
    "sharded unlike": (
        {"embedding": ColwiseParallel(), "head": ColwiseParallel()},
        r"embedding.weight \(Shard\(1\),\), head.weight \(Shard\(0\),\)",
    ),
    "a plain copy": ({"embedding": Whole()}, "embedding.weight plain, head.weight plain"),
}


@on_ranks(2)
def test_tensors_that_a_plan_would_make_several_are_refused() -> None:
    _, tp = alone_and_tp()
    for what, (styles, words) in UNTIED.items():
        model = Net()
        model.head.weight = model.embedding.weight
        with pytest.raises(ArgumentError, match=f"in all its modules, got .*{words}; ") as raised:
            parallelize(model, tp, styles)
        ours = what == "one of two"
        assert "head.weight" in str(raised.value) and ("The plan was applied" in str(raised.value)) != ours, what
        assert not ours or type(model.embedding.weight) is nn.Parameter
    # in both by one plan, by styles of both kinds, and buffers
    model = Net()
    model.head.weight = model.embedding.weight
    parallelize(model, tp, {"embedding": VocabParallelEmbedding(), "head": ColwiseParallel()})
    assert model.head.weight is model.embedding.weight and isinstance(model.head.weight, DTensor)
    scale = torch.ones(C)
    norms = nn.ModuleList([Scaled(scale), Scaled(scale)])
    parallelize(norms, tp, {"*": SequenceParallel()})
    assert norms[0].scale is norms[1].scale and isinstance(norms[0].scale, DTensor)
    with pytest.raises(ArgumentError, match=r"0\.scale .*, 1\.scale plain"):
        parallelize(nn.ModuleList([Scaled(scale), Scaled(scale)]), tp, {"0": SequenceParallel()})


@pytest.mark.parametrize("trained", ["head", "embedding", "feed_forward.w2"])
@on_ranks(4, timeout=240.0)
def test_one_trained_part_under_fsdp(trained: str) -> None:
    axes = mesh((2, 2), ("dp", "tp"))
    dp, tp = axes["dp"], axes["tp"]
    tokens, labels = tokens_and_labels((4, 6))
    own = slice(2 * dp.get_local_rank(), 2 * dp.get_local_rank() + 2)
    for parts in (False, True):
        model = Net()
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(name.startswith(trained))
        loss, grads = expected(copy.deepcopy(model), tokens, labels)
        parallelize(model, tp, plan())
        if parts:
            for part in (model.embedding, model.mixer, model.feed_forward):
                fully_shard(part, mesh=dp)
            fully_shard(model.head, mesh=dp, reshard_after_forward=False)
        sum_gradients(fully_shard(model, mesh=dp))
        share = cross_entropy(model(tokens[own]), labels[own], dp)
        share.backward()
        dist.all_reduce(share.detach_(), group=dp.get_group())
        torch.testing.assert_close({"loss": share} | gradients(model), {"loss": loss} | grads, rtol=1e-12, atol=1e-15)


@on_ranks(2)
def test_an_input_under_way(rank: int) -> None:
    """An input that is still under way when the linears are called."""
    _, tp = alone_and_tp()
    linear = parallelize(nn.Linear(C, OUT), tp, {"": OverlappedColwise(recompute_all_gather=True)})
    own, grads = torch.arange(3.0 * C).view(3, C) + rank, []
    for under_way in (True, False):
        x = torch.cat([own - rank, own - rank + 1])
        x = funcol.all_gather_tensor(own, 0, tp.get_group()) if under_way else x
        assert isinstance(x, funcol.AsyncCollectiveTensor) == under_way
        out = linear(x)
        assert type(out) is Tensor
        out.square().sum().backward()
        grads.append(local(linear.weight.grad))
        linear.zero_grad()
    assert torch.equal(*grads) and bool(grads[0].any())


@on_ranks(2)
def test_chunks_of_logits() -> None:
    """In chunks or at once the numbers are the same; all logits can be asked for."""
    alone, tp = alone_and_tp()
    tokens, labels = tokens_and_labels((2, 7))
    whole = Net()(tokens)
    model = parallelize(Net(), tp, plan(local=False))
    logits = model(tokens)
    assert logits.shape == whole.shape
    torch.testing.assert_close(logits.whole(), whole, rtol=1e-12, atol=1e-12)
    at_once = cross_entropy(logits, labels, alone)
    at_once.backward()
    grads = gradients(model)
    model.zero_grad()
    with mock.patch.object(in_chunks, "CHUNK_BYTES", 3 * 6 * 8):  # three rows
        chunked = cross_entropy(model(tokens), labels, alone)
        chunked.backward()
        assert len(list(in_chunks._chunks(torch.ones(14, C, dtype=torch.float64), logits.head.weight))) == 5
    torch.testing.assert_close(chunked, at_once, rtol=1e-14, atol=0.0)
    torch.testing.assert_close(gradients(model), grads, rtol=1e-12, atol=1e-15)


@pytest.mark.unpoisoned
@on_ranks(2)
def test_logits_of_all_rows_are_never_held() -> None:
    """Bytes allocated at most by a loss and by its backward, of logits of which a rank's part is 4 MiB."""
    alone, tp = alone_and_tp()
    head = parallelize(nn.Linear(16, 2048, bias=False, dtype=torch.float64), tp, {"": VocabParallelHead()})
    x = torch.randn(1, 256, 16, dtype=torch.float64, requires_grad=True)
    labels, losses = torch.arange(512)[None], list[Tensor]()
    cross_entropy(head(x), labels, alone).backward()  # a first call is compared, and profilers begin
    with mock.patch.object(in_chunks, "CHUNK_BYTES", 16 * 1024 * 8):
        assert peak_of(lambda: losses.append(cross_entropy(head(x), labels, alone))) < 2**20
        assert peak_of(lambda: losses[0].backward()) < 2**20
    whole = torch.randn(512, 1024, dtype=torch.float64)
    assert peak_of(lambda: F.cross_entropy(whole, torch.arange(512))) >= 2**22  # what is measured can be seen


@on_ranks(2)
def test_half_precision() -> None:
    """Linears of a model in half precision, and under autocast: as PyTorch's own on one rank, within rounding."""
    dtype = torch.bfloat16
    alone, tp = alone_and_tp()
    tokens, labels = tokens_and_labels((2, 12))
    for autocast in (False, True):
        plain = Net(bias=True).to(torch.float32 if autocast else dtype)
        model = parallelize(copy.deepcopy(plain), tp, plan(recompute=True))
        with torch.autocast("cpu", dtype, enabled=autocast):
            expected_loss, expected_grads = expected(plain, tokens, labels)
            loss = cross_entropy(model(tokens), labels, alone)
            loss.backward()
        torch.testing.assert_close(loss, expected_loss.float(), rtol=2e-2, atol=0.0)
        for name, grad in gradients(model).items():
            assert grad.dtype == expected_grads[name].dtype
            assert (grad - expected_grads[name]).norm() <= 4e-2 * expected_grads[name].norm(), name


# Refusals; `refusals.linears` has those of all ranks.


@pytest.mark.parametrize(
    ("style", "square", "of_weight"),
    [
        (OverlappedColwise(), False, False),
        (OverlappedRowwise(), True, False),
        (OverlappedColwise(recompute_all_gather=True), False, True),
        (OverlappedRowwise(mode="all_reduce"), True, True),
        (VocabParallelEmbedding(mode="all_reduce"), True, True),
    ],
)
@on_ranks(2)
def test_second_backwards_are_refused(style: Any, square: bool, of_weight: bool) -> None:
    """A penalty on a gradient; where a loss is linear the gradient of the output has none itself."""
    kind, x = nn.Linear, torch.ones(2, 4, C // 2 if isinstance(style, OverlappedRowwise) else C, requires_grad=True)
    if isinstance(style, VocabParallelEmbedding):
        kind, x = nn.Embedding, torch.arange(4)
    module: Any = parallelize(kind(C, C), alone_and_tp()[1], {"": style})
    out = module(x).square() if square else module(x)
    (grad,) = torch.autograd.grad(out.sum(), module.weight if of_weight else x, create_graph=True)
    with pytest.raises(REFUSALS, match="can be differentiated once"):
        (local(grad).square().sum() + module(x).sum()).backward()


@on_ranks(2)
def test_a_head_that_is_freed_is_refused() -> None:
    alone, tp = alone_and_tp()
    model = fully_shard(parallelize(Net(), tp, plan()), mesh=alone, reshard_after_forward=True)
    tokens, labels = tokens_and_labels((2, 4))
    with pytest.raises(REFUSALS, match="got one that FSDP2 has freed; fully_shard"):
        cross_entropy(model(tokens), labels, alone)


@pytest.mark.full
@on_ranks(4, timeout=200.0)
def test_what_one_rank_alone_refuses(name: str = "", checked: bool = False) -> None:
    """The others hear of it before their first collective."""
    for each in [name] if name else ALONE:
        forget_kept(agreement.Calls)
        dist.barrier()
        begin, (run, words) = time.monotonic(), ALONE[each]
        with check_mode() if checked else nullcontext(), pytest.raises((*REFUSALS, IndexError)) as raised:
            run()
        assert words in str(raised.value) and time.monotonic() - begin < 20, each


@pytest.mark.parametrize("name", ["rows that tp does not divide", "the shape of labels"])
def test_what_one_rank_alone_refuses_in_check_mode(pool: Any, name: str) -> None:
    test_what_one_rank_alone_refuses(pool, name, checked=True)


@on_ranks(2)
def test_check_mode_compares_all_calls_over_tp(rank: int) -> None:
    module = parallelize(nn.Embedding(V, C), mesh((1, 2), ("dp", "tp"))["tp"], {"": VocabParallelEmbedding()})
    with check_mode():
        module(torch.arange(4)[None])
        with refused("VocabParallelEmbedding: expected the same tokens on every tp rank", RankMismatchError):
            module(torch.arange(4)[None] + rank)


# What a rank refuses in cp x tp: it is of one group of each, and all others hear of it in one or two steps.


class Attends(nn.Module):
    """A core on one head; ``wrong`` says what it does on this rank alone."""

    wrong = ""

    def forward(self, x: Tensor) -> Tensor:
        q, (k, v) = x[:, None], 2 * (x[:, None].to(torch.float64 if self.wrong == "a dtype" else x.dtype),)
        return F.scaled_dot_product_attention(q, k, v, is_causal=self.wrong != "a mask")[:, 0]


class Calls(Attends):
    """The same by the function, with no style over cp."""

    def __init__(self, cp: DeviceMesh) -> None:
        super().__init__()
        self.cp = cp

    def forward(self, x: Tensor) -> Tensor:
        kernel = "flash" if self.wrong == "a kernel" else "auto"
        return attention(*3 * [x[:, None]], mesh=self.cp, kernel=kernel)[:, 0]


class Block(nn.Module):
    def __init__(self, core: Attends, features: int) -> None:
        super().__init__()
        self.wq, self.core, self.wo = nn.Linear(C, features), core, nn.Linear(features, C)

    def forward(self, x: Tensor) -> Tensor:
        odd = self.core.wrong == "rows"
        return self.wo(self.core(self.wq(x))[:, odd:])


AMONG: dict[str, tuple[str, str, tuple[str, str, str]]] = {
    "a core": ("a mask", "is_causal: expected True", ("row linear: tp", "row linear: tp", "attention: cp")),
    "in check mode": ("a mask", "is_causal: expected True", ("row linear: tp", "row linear: tp", "attention: cp")),
    "the op in a core": ("a dtype", "expected one", ("row linear: tp", "row linear: tp", "attention: cp")),
    "the function": ("a kernel", "kernel: expected one of", ("row linear: tp", "row linear: tp", "attention: cp")),
    "a trace, then eager": ("a mask", "is_causal: expected", ("row linear: tp", "row linear: tp", "attention: cp")),
    "a row linear": ("rows", "a multiple of 2 rows", ("row linear: tp", "attention: cp", "attention: cp")),
}
"""What rank 1 does, what it then says, and where ranks 0, 2 and 3 hear of it; rank 2 is in no group with it.

Of a trace of the whole graph nothing is told: the others wait as for a rank that ended.
"""


@pytest.mark.parametrize("setup", AMONG)
@pytest.mark.quick(without="trace")
@on_ranks(4, timeout=120.0)
def test_all_ranks_of_cp_and_tp_hear_of_a_refusal(rank: int, setup: str) -> None:
    """And a right call then returns."""
    forget_kept(agreement.Calls, cuts.Cuts)  # cuts of other tests, too
    axes = mesh((2, 2), ("cp", "tp"))
    cp, tp = axes["cp"], axes["tp"]
    cores = [Calls(cp) if setup == "the function" else Attends() for _ in range(2)]
    model = nn.Sequential(Block(cores[0], 4), Block(cores[1], 8))  # so that those of the second are first calls, too
    of_parent, alone = {"*": OverlappedColwise("wq")}, {"*.wq": OverlappedColwise()}
    columns = of_parent if setup in ("the function", "a trace, then eager") else alone  # a parent is around the core
    parallelize(model, tp, columns | {"*.wo": OverlappedRowwise()})
    if setup != "the function":
        parallelize(model, cp, {"*.core": ContextParallel(ShardedSequence(cp))}, watch=False)
    if setup == "a trace, then eager" and rank == 1:
        model[0].core.compile(backend="eager")
    wrong, words, heard = AMONG[setup]
    model[0].core.wrong = wrong * (rank == 1)
    with check_mode() if setup == "in check mode" else nullcontext():
        x = torch.ones(1, 4, C)
        dist.barrier()
        begin = time.monotonic()
        with pytest.raises(Exception, match=words) as raised:
            model(x)
        assert time.monotonic() - begin < 50  # the timeout of groups is 60
        said = f"{raised.type.__name__}: {raised.value}"
        assert rank == 1 or said.startswith(f"RankMismatchError: {heard[rank - (rank > 1)]} rank"), said
        dist.barrier()
        model[0].core.wrong = ""
        torch._dynamo.reset()
        assert model(x).shape == (1, 4, C)


@on_ranks(4)
def test_a_plan_of_some_ranks_over_another_axis() -> None:
    axes = mesh((2, 2), ("dp", "tp"))
    row = parallelize(nn.Linear(C, 4), axes["tp"], {"": OverlappedRowwise()})
    for _ in range(2):
        assert row(torch.ones(2, 4, C // 2)).shape == (2, 2, 4)
        if axes.get_local_rank("tp") == 0:  # another model, of these ranks alone
            agreement.look_again(axes["dp"].get_group())


# A plain parameter on rows that are sharded.


class Normed(Net):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(C, dtype=torch.float64)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        return self.head(self.norm(x + self.mixer(x.tanh())))


SETUPS = {"plain": True, "plain, FSDP2": True}
SETUPS |= dict.fromkeys(
    ("all_reduce", "SequenceParallel", "SequenceParallel, FSDP2", "summed", "values of each rank"), False
)
"""Of parameters on rows over tp, and whether the first two steps refuse them."""


@pytest.mark.parametrize("setup", SETUPS)
@on_ranks(4, timeout=120.0)
def test_plain_parameters_on_sharded_rows(setup: str) -> None:
    axes = mesh((2, 2), ("dp", "tp"))
    dp, tp = axes["dp"], axes["tp"]
    tokens, labels = tokens_and_labels((2, 6))
    model = Normed()
    if setup == "values of each rank":
        nn.init.uniform_(model.norm.weight, 1 + tp.get_local_rank(), 2 + tp.get_local_rank())
        nn.init.constant_(model.norm.bias, 1 + tp.get_local_rank())
    styles = plan("all_reduce" if setup == "all_reduce" else "reduce_scatter")
    parallelize(model, tp, styles | ({"norm": SequenceParallel()} if "SequenceParallel" in setup else {}))
    if "FSDP2" in setup:
        sum_gradients(fully_shard(model, mesh=dp))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    words = (
        "parameters that tp does not shard, such as norm.weight: expected equal on the ranks of a tp group.*Sequence"
    )
    for _ in range(2):
        optimizer.zero_grad()
        cross_entropy(model(tokens), labels, dp).backward()
        if setup == "summed":
            for parameter in model.norm.parameters():
                dist.all_reduce(parameter.grad, group=tp.get_group())
        with pytest.raises(ArgumentError, match=words) if SETUPS[setup] else nullcontext():
            optimizer.step()


@on_ranks(2)
def test_tokens_outside_of_the_vocabulary() -> None:
    alone, tp = alone_and_tp()
    model = parallelize(Net(), tp, plan("all_reduce"))
    for token, label, later in ((V, 0, False), (-1, 0, False), (2, V, True)):
        with check_mode(False) if later else nullcontext():  # a later call, which is not looked at
            with pytest.raises((IndexError, RuntimeError) if later else IndexError, match="out of"):
                cross_entropy(model(torch.tensor([[1, token]])), torch.tensor([[0, label]]), alone)


def test_deferred_logits_name_what_takes_them() -> None:
    logits = vocabulary.DeferredLogits(torch.zeros(2, 3, C), None, 3, False)  # type: ignore[arg-type]
    with pytest.raises(AttributeError, match=r"no 'flatten': .* cp_mesh.cross_entropy\(logits, labels, mesh\), or by"):
        logits.flatten(0, 1)
    uses: list[Callable[[Any], Any]] = [
        *(lambda x: x[0], lambda x: x[:, -1], lambda x: x * 2, lambda x: 2 * x, lambda x: x / 30, lambda x: x + 1),
        *(lambda x: 1 + x, lambda x: x - 1, lambda x: 1 - x),
    ]
    for use in uses:  # a tuple's own would take the hidden states for logits, or count attributes
        with pytest.raises(ArgumentError, match=r"logits as the head returned them, .* cp_mesh.cross_entropy"):
            use(logits)
    copied = tree_map(lambda x: x, logits)
    assert type(copied) is type(logits) and copied.hidden is logits.hidden and copied.num_rows == 3


@pytest.mark.full
@on_ranks(2)
def test_micro_batches_are_summed_in_float32() -> None:
    """By FSDP2, as docs/linears.md says: 300 gradients of 1, which bfloat16 could sum up to 256 alone."""
    alone, tp = alone_and_tp()
    model, count = nn.Sequential(nn.Linear(C, C, bias=False), nn.Linear(C, C, bias=False)), 300
    nn.init.constant_(model[0].weight, 0.5 / C)  # hidden units of 1/2, two rows
    nn.init.constant_(model[1].weight, 1.0 / C)
    parallelize(model, tp, {"0": OverlappedColwise(), "1": OverlappedRowwise()})
    model = fully_shard(model, mesh=alone, mp_policy=MixedPrecisionPolicy(torch.bfloat16, torch.float32))
    for index in range(count):
        model.set_requires_gradient_sync(index == count - 1)
        model(torch.ones(1, C)).sum().backward()
    grad = model[1].weight.grad.full_tensor()
    assert (grad.dtype, grad.unique().tolist()) == (torch.float32, [float(count)])
