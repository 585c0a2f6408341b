"""Linears, embeddings and losses over tp: every number is that of one rank, and nothing travels that need not."""

from __future__ import annotations

import copy
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import chain, product
from typing import Any
from unittest import mock

import inside
import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
import torch.nn.functional as F
from checks import forget_kept
from inside import inner, room
from ranks import mesh, num_collectives
from recording import recording
from test_loss import peak_of
from test_symmetric_memory import FileWorkspace, HostLane, double
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
    UnsupportedError,
    attention,
    check_mode,
    cross_entropy,
    parallelize,
    sum_gradients,
)
from cp_mesh.comm.exchange import release, symmetric_memory_bytes
from cp_mesh.tensor_parallel import OverlappedColwise, OverlappedRowwise, VocabParallelEmbedding, VocabParallelHead

agreement = room("agreement")
column_linears = room("colwise")
cuts = room("cuts")
overlap = room("overlap")
row_linears = room("rowwise")
vocabulary = room("vocab_parallel")
Shards = inner("shards", "Shards")

V, C, OUT, HIDDEN = 11, 6, 10, 7  # of which tp = 2, 3 and 4 divide few
IGNORED = -100


class Mixer(nn.Module):
    """In the place of attention: three linears of one input, and one that joins the features again."""

    def __init__(self, bias: bool) -> None:
        super().__init__()
        self.wq, self.wk, self.wv = (nn.Linear(C, OUT, bias=bias) for _ in range(3))
        self.wo = nn.Linear(OUT, C, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.wo(self.wq(x) * self.wk(x).sigmoid() + self.wv(x))


class FeedForward(nn.Module):
    def __init__(self, bias: bool) -> None:
        super().__init__()
        self.w1, self.w2, self.w3 = nn.Linear(C, HIDDEN, bias), nn.Linear(HIDDEN, C, bias), nn.Linear(C, HIDDEN, bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


class Net(nn.Module):
    """Tokens [..., S] to logits [..., S, V], in float64."""

    def __init__(self, bias: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding, self.mixer, self.feed_forward = (
            nn.Embedding(V, C, padding_idx=3),
            Mixer(bias),
            FeedForward(bias),
        )
        self.head = nn.Linear(C, V, bias=False)
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
    found = {name: x.grad for name, x in model.named_parameters() if x.grad is not None}
    return {name: x.full_tensor() if isinstance(x, DTensor) else x for name, x in found.items()}


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
def beside_products(transport: str, folder: str = "") -> Iterator[None]:
    """While open, rows travel beside products of any size; over symmetric memory, by its double."""
    slow = {"PRODUCT_RATE": 1e-9, "LINK_RATE": 1e-9} if transport == "functional" else {}
    with ExitStack() as stack:
        for name, rate in slow.items():
            stack.enter_context(mock.patch.object(overlap, name, rate))
        if transport == "symmetric_memory":
            stack.enter_context(double(alone_and_tp()[1].get_group(), folder))
        yield


def run_cases(rank: int, cases: list[Case], transport: str = "auto", folder: str = "") -> list[str]:
    """What is not as on one rank."""
    with beside_products(transport, folder):
        return [problem for case in cases for problem in problems_of(case, transport)]


def problems_of(case: Case, transport: str) -> list[str]:
    problems, (alone, tp) = [], alone_and_tp()
    tokens, labels = tokens_and_labels(case.shape)
    model = Net(case.bias)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not name.endswith(case.frozen or "none"))
    loss, grads = expected(copy.deepcopy(model), tokens, labels)
    whole = model.embedding(tokens)
    asked = transport if case.mode == "reduce_scatter" else "auto"
    parallelize(model, tp, plan(case.mode, case.recompute, case.local, asked))
    rows = model.embedding(tokens)
    if not case.local and not torch.equal(rows.full_tensor(), whole):  # DTensor's shards are those of torch.chunk
        problems.append(f"{case}: an embedding that is not whole")
    found = cross_entropy(model(tokens), labels, alone)
    found.backward()
    every = {"loss": loss} | grads
    own = {"loss": found.detach()} | gradients(model)
    if every.keys() != own.keys():
        problems.append(f"{case}: gradients of {own.keys()}, expected {every.keys()}")
    for name in every.keys() & own.keys():
        error = (own[name] - every[name]).abs().max() / every[name].abs().max()
        if not error <= 1e-12:
            problems.append(f"{case}: {name} off by {error}")
    for name, parameter in model.named_parameters():
        if isinstance(parameter.grad, DTensor) and parameter.grad.placements != parameter.placements:
            problems.append(f"{case}: gradient of {name} is {parameter.grad.placements}")
    return problems


@pytest.mark.parametrize("tp_size", [1, 2, 3, 4])
@pytest.mark.quick("3")
def test_loss_and_gradients_are_those_of_one_rank(pool: Any, tp_size: int) -> None:
    cases = [case for case in CASES if not case.local or case.mode == "all_reduce" or case.shape[-1] % tp_size == 0]
    assert len(cases) == len(CASES)
    problems = pool(tp_size).run(run_cases, cases)
    assert not any(problems), "\n".join(chain(*problems))


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
def test_rows_that_travel_beside_products(pool: Any, tp_size: int, transport: str) -> None:
    """Symmetric memory is a double, in which rows are NaN until they are written, and naps let ranks get ahead."""
    with tempfile.TemporaryDirectory() as folder:
        problems = pool(tp_size).run(run_cases, BESIDE, transport, folder, timeout=120.0)
    assert not any(problems), "\n".join(chain(*problems))


@pytest.mark.parametrize("transport", ["auto", "functional", "symmetric_memory"])
def test_gathering_again_changes_no_bit(pool: Any, transport: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        for first, second in pool(2).run(both_recomputations, transport, folder):
            assert first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)


def both_recomputations(rank: int, transport: str, folder: str) -> list[dict[str, Tensor]]:
    alone, tp = alone_and_tp()
    tokens, labels = tokens_and_labels((2, 7 if transport == "auto" else 8))
    found = []
    with beside_products(transport, folder):
        for recompute in (False, True):
            model = parallelize(Net(bias=True), tp, plan(recompute=recompute, local=False, transport=transport))
            cross_entropy(model(tokens), labels, alone).backward()
            found.append(gradients(model))
    return found


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
    # the numbers of each row that the loss needs: three, of all rows
    Part("head", [GATHER, ("all-gather", 3 * B * S)], [GATHER, SCATTER], (1, 3)),
    Part("head", [("all-gather", 3 * B * S)], [REDUCE], (1, 3), mode="all_reduce"),
    Part("head", [GATHER, ("all-gather", 3 * B * S)], [GATHER, SCATTER], (1, 2), frozen=("weight",)),
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


def counted(rank: int, parts: list[Part]) -> list[Any]:
    results, (alone, tp) = [], alone_and_tp()
    labels = tokens_and_labels((B, S))[1]
    for part in parts:
        model = parallelize(Net(), tp, plan(part.mode, part.recompute, local=False))
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(not name.endswith(part.frozen or "none"))
        x, module = input_of(part, tp), model.get_submodule(part.name)
        before = num_collectives()
        with recording(tp) as notes:
            with profiled() as forward:
                out = module(x)
                loss = cross_entropy(out, labels, alone) if part.name == "head" else out.sum()
            num_forward, num_other = (
                len(notes.collectives),
                int(part.name == "head"),
            )  # it counts tokens on another axis
            if isinstance(loss, DTensor):
                loss = loss.to_local()
            with profiled() as backward:
                loss.backward()
        assert not notes.problems and not notes.sent, notes.problems
        assert num_collectives() - before == len(notes.collectives) + num_other, "something was sent past the group"
        found = [(entry.kind, entry.given) for entry in notes.collectives]
        num_products = tuple(sum(name in PRODUCTS for name in names) for names in (forward, backward))
        results.append((found[:num_forward], found[num_forward:], num_products))
    return results


def test_what_travels_and_what_is_computed(pool: Any) -> None:
    for results in pool(2).run(counted, PARTS):
        for part, (forward, backward, num_products) in zip(PARTS, results, strict=True):
            assert (forward, backward) == (part.forward, part.backward), part
            assert part.name == "embedding" or num_products == part.products, part


ORDER = {
    "_c10d_functional::all_gather_into_tensor": "gather",
    "_c10d_functional::reduce_scatter_tensor": "scatter",
    "_c10d_functional::all_reduce": "reduce",
    "_c10d_functional::all_to_all_single": "swap",
    "_c10d_functional::wait_tensor": "wait",
    "aten::mm": "product",
    "aten::addmm_": "product",
}


def order_of_backward(rank: int, mode: str) -> list[str]:
    _, tp = alone_and_tp()
    columns = OverlappedColwise("w1", "w3", mode=mode, recompute_all_gather=mode == "reduce_scatter")  # type: ignore[arg-type]
    module = parallelize(Net().feed_forward, tp, {"": columns})
    with mock.patch.object(module, "w2", nn.Identity()):
        out = module(torch.randn(2, 3, C, dtype=torch.float64, requires_grad=True))
    with profiled() as names:
        out.sum().backward()
    return [ORDER[name] for name in names if name in ORDER]


ORDERS = [
    ("reduce_scatter", "gather product product scatter wait product product wait"),
    ("all_reduce", "product product reduce product product wait"),
]


@pytest.mark.parametrize(("mode", "order"), ORDERS)
def test_products_run_while_rows_travel(pool: Any, mode: str, order: str) -> None:
    """The gather is begun before the product for the input, the sum before those for the weights, and awaited after."""
    assert pool(2).run(order_of_backward, mode) == [order.split()] * 2


def order_of_collectives(rank: int) -> list[str]:
    """Of a forward and a backward whose rows travel beside products."""
    _, tp = alone_and_tp()
    columns = OverlappedColwise("w1", "w3", recompute_all_gather=True)
    module = parallelize(Net().feed_forward, tp, {"": columns, "w2": OverlappedRowwise()})
    x = torch.randn(1, 4, C, dtype=torch.float64, requires_grad=True)
    with beside_products("functional"), profiled() as names:
        module(x).sum().backward()
    return [ORDER[name] for name in names if name in ORDER]


def test_products_begin_before_all_rows_have_come(pool: Any) -> None:
    """This rank's rows first in a gather, others' first in a sum: in forwards, and for the input of a row linear."""
    columns = "gather product product wait product product"
    rows = "product swap product swap wait product wait product"
    backward = "gather product wait product product gather product product scatter wait product product wait"
    assert pool(2).run(order_of_collectives) == [f"{columns} {rows} {backward}".split()] * 2


PARTED = ("write_product", "product"), ("add_product", "add"), ("gradients_of_parameters", "weights")


def order_of_copies(rank: int, folder: str) -> list[str]:
    _, tp = alone_and_tp()
    columns = OverlappedColwise("w1", "w3", recompute_all_gather=True, transport="symmetric_memory")
    module = parallelize(Net().feed_forward, tp, {"": columns, "w2": OverlappedRowwise(transport="symmetric_memory")})
    x, names = torch.randn(1, 4, C, dtype=torch.float64, requires_grad=True), list[str]()

    def noted(stack: ExitStack, where: Any, attribute: str, name: str) -> None:
        real = getattr(where, attribute)

        def run(*args: Any, **kwargs: Any) -> Any:
            names.append(name)
            return real(*args, **kwargs)

        stack.enter_context(mock.patch.object(where, attribute, run))

    with ExitStack() as stack:
        stack.enter_context(beside_products("symmetric_memory", folder))
        for where, attribute, name in (
            *((module, *names) for module in (column_linears, row_linears) for names in PARTED),
            (FileWorkspace, "barrier", "barrier"), (HostLane, "__enter__", "copies:"), (HostLane, "wait", "wait"),
        ):  # fmt: skip
            noted(stack, where, attribute, name)
        module(x).sum().backward()
    return names


def test_products_run_while_copy_engines_move_rows(pool: Any) -> None:
    """Copies are begun before the products beside them, behind a barrier; the second is that of pushes that landed."""
    gather, product = "barrier copies: barrier", "product product"
    columns = f"{gather} {product} wait {product}"
    rows = "barrier product barrier copies: product barrier copies: wait add wait add"
    of_rows = f"{gather} product wait product wait weights"
    of_columns = f"{gather} product add barrier copies: wait weights wait add add"  # the input's gradient in one sum
    with tempfile.TemporaryDirectory() as folder:
        assert pool(2).run(order_of_copies, folder) == [f"{columns} {rows} {of_rows} {of_columns}".split()] * 2


def symmetric_bytes(rank: int, folder: str) -> list[int]:
    """Of steps of 8, of 16 and of 4 rows, and after `release`."""
    _, tp = alone_and_tp()
    module, found = parallelize(Net(), tp, plan(recompute=True, transport="symmetric_memory")).mixer, []
    with beside_products("symmetric_memory", folder):
        for rows in (8, 16, 4):
            module(torch.randn(2, rows // 2, C, dtype=torch.float64)).sum().backward()
            found.append(symmetric_memory_bytes())
        release(tp.get_group())
        found.append(symmetric_memory_bytes())
    return found


def test_symmetric_memory_is_bounded_and_given_back(pool: Any) -> None:
    """All rows of the widest input or output, and as many but one rank's; in steps of 256 bytes."""

    def expected(rows: int) -> int:
        return sum(-(-2 * count * C * 8 // 256) * 256 for count in (rows, rows // 2))

    with tempfile.TemporaryDirectory() as folder:
        wanted = [expected(8), expected(16), expected(16), 0]
        assert pool(2).run(symmetric_bytes, folder) == [wanted] * 2


def bytes_by_transport(rank: int, folder: str) -> list[int]:
    """Symmetric memory that a step takes where there is some: "auto" where it does not pay, and where it does."""
    _, tp = alone_and_tp()
    found = []
    for transport, pays in (("functional", True), ("auto", False), ("auto", True)):
        module = parallelize(Net(), tp, plan(transport=transport)).mixer
        with double(tp.get_group(), folder), beside_products("functional") if pays else nullcontext():
            module(torch.randn(2, 4, C, dtype=torch.float64)).sum().backward()
            found.append(symmetric_memory_bytes())
    return found


def test_transports_are_taken_as_they_are_asked_for(pool: Any) -> None:
    with tempfile.TemporaryDirectory() as folder:
        for functional, small, large in pool(2).run(bytes_by_transport, folder):
            assert functional == small == 0 < large


def chosen_by_size(rank: int, given: list[tuple[int, int, int]]) -> list[str | None]:
    """Over what a gather of 8192 features travels on two ranks, for rows, columns and weights; bf16."""
    _, tp = alone_and_tp()
    found = []
    for rows, columns, count in given:
        x = torch.empty(1, rows // 2, 8192, dtype=torch.bfloat16, device="meta")
        shards = Shards(rows, tp.get_group().group_name)
        found.append(overlap.chosen_transport(shards, "functional", x, (8192, columns), count))
    return found


def test_small_and_uneven_inputs_travel_at_once(pool: Any) -> None:
    """512 rows take 30 us, 4096 rows 240 us; a product with 128 columns is shorter than its parts cost.

    Products of 8192 rows with 4096 columns take 0.85 ms together, and could hide 240 us: the host would be slower.
    """
    given = [(8192, 5120, 3), (1024, 5120, 3), (8192, 128, 3), (8193, 5120, 3), (8192, 4096, 1)]
    assert pool(2).run(chosen_by_size, given) == [["functional", None, None, None, None]] * 2


def kept(rank: int) -> list[int]:
    """Elements that the first linears of an input keep of it."""
    _, tp = alone_and_tp()
    results = []
    for recompute, frozen in product((False, True), (False, True)):
        linear = nn.Linear(C, OUT, bias=False)
        linear.requires_grad_(not frozen)
        parallelize(linear, tp, {"": OverlappedColwise(recompute_all_gather=recompute)})
        numels: list[int] = []

        def note(x: Tensor, numels: list[int] = numels) -> Tensor:
            numels.append(x.numel())
            return x

        with torch.autograd.graph.saved_tensors_hooks(note, lambda x: x):
            linear(torch.randn(4, 3, C, requires_grad=True))
        results.append(sum(numels) - OUT // 2 * C)
    return results


def test_what_is_kept_for_the_backward(pool: Any) -> None:
    """All rows; none if the weight is frozen; this rank's rows if they are gathered again."""
    assert pool(2).run(kept) == [[4 * 6 * C, 0, 4 * 3 * C, 0]] * 2


def transposed(rank: int) -> list[str]:
    """Gradients of weights that lie in memory by columns: a DTensor's strides are those of its part."""
    _, tp = alone_and_tp()
    problems = []
    for style, placement in ((OverlappedColwise(), Shard(0)), (OverlappedRowwise(), Shard(1))):
        torch.manual_seed(0)
        linear = nn.Linear(C, OUT, bias=False, dtype=torch.float64)
        linear.weight = nn.Parameter(linear.weight.detach().t().contiguous().t())
        whole, x = copy.deepcopy(linear), torch.randn(4, 6, C, dtype=torch.float64)
        whole(x).square().sum().backward()
        parallelize(linear, tp, {"": style})
        linear(x.chunk(2, 1 if placement == Shard(0) else 2)[rank].contiguous()).square().sum().backward()
        grad: Any = linear.weight.grad
        of_whole, of_part = (y.stride(0) < y.stride(1) for y in (grad, grad.to_local()))
        if grad.placements != (placement,) or of_whole != of_part:
            problems.append(f"{style}: {grad.placements}, by columns: {of_whole}, its part: {of_part}")
        assert whole.weight.grad is not None
        if not torch.allclose(grad.full_tensor(), whole.weight.grad, rtol=1e-12):
            problems.append(f"{style}: another gradient")
    return problems


def test_weights_that_lie_by_columns(pool: Any) -> None:
    assert pool(2).run(transposed) == [[], []]


def on_meta(rank: int) -> tuple[int, ...]:
    model = nn.Sequential(nn.Linear(C, OUT), nn.Linear(OUT, C))
    parallelize(model, alone_and_tp()[1], {"0": OverlappedColwise(), "1": OverlappedRowwise()})
    return tuple(model.to("meta")(torch.empty(2, 3, C, device="meta")).shape)


def test_shapes_of_the_meta_device(pool: Any) -> None:
    assert pool(2).run(on_meta) == [(2, 3, C)] * 2


def frozen_and_mixed(rank: int) -> tuple[list[bool], str]:
    tp = alone_and_tp()[1]
    model = nn.Sequential(nn.LayerNorm(C), nn.Linear(C, C), nn.LayerNorm(C)).requires_grad_(False)
    model[2].requires_grad_()
    parallelize(model, tp, {"0": SequenceParallel(), "1": OverlappedColwise(), "2": SequenceParallel()})
    mixed = {"0": OverlappedColwise(mode="all_reduce"), "1": OverlappedRowwise()}
    with pytest.raises(ArgumentError) as refused:
        parallelize(nn.Sequential(nn.Linear(C, C), nn.Linear(C, C)), tp, mixed)
    return [x.requires_grad for x in model.parameters()], str(refused.value)


def test_frozen_norms_stay_so_and_modes_agree(pool: Any) -> None:
    """PyTorch's SequenceParallel makes parameters anew, which would be trained."""
    for trained, refused in pool(2).run(frozen_and_mixed):
        assert trained == [False] * 4 + [True] * 2
        assert "'all_reduce' at '0', 'reduce_scatter' at '1'" in refused


# The formulation that this began with: nanotron's, whose rows are dim 0.


def nanotron_backward(
    tensor: Tensor, weight: Tensor, grad_output: Tensor, reduce_scatter: bool, gathers: bool
) -> list[Tensor]:
    """Gradients of a column linear: of ``tensor`` [S or S / tp, B, C], of its weight and its bias."""
    group, size = dist.group.WORLD, dist.get_world_size()
    total, gather = tensor, None
    if gathers:
        total = tensor.new_empty((len(tensor) * size, *tensor.shape[1:]))
        gather = dist.all_gather_into_tensor(total, tensor.contiguous(), group=group, async_op=True)
    grad_tensor = grad_output.matmul(weight)
    sub = grad_tensor
    if reduce_scatter:
        sub = grad_tensor.new_empty((len(grad_tensor) // size, *grad_tensor.shape[1:]))
        reduction = dist.reduce_scatter_tensor(sub, grad_tensor, group=group, async_op=True)
    else:
        reduction = dist.all_reduce(grad_tensor, group=group, async_op=True)
    rows = grad_output.contiguous().view(-1, grad_output.shape[-1])
    if gather is not None:
        gather.wait()
    grad_weight = rows.t().matmul(total.reshape(-1, total.shape[-1]))
    reduction.wait()
    return [sub, grad_weight, rows.sum(0)]


def against_nanotron(rank: int, mode: Any, recompute: bool) -> None:
    """Its rows are dim 0 and ours dim -2, so that ours are no contiguous tensors here."""
    _, tp = alone_and_tp()
    sharded, size = mode == "reduce_scatter", dist.get_world_size()
    generator = torch.Generator().manual_seed(2)
    whole, dout = (torch.randn(4 * size, 3, n, generator=generator, dtype=torch.float64) for n in (C, OUT * size))
    linear = nn.Linear(C, OUT * size, dtype=torch.float64)
    parallelize(linear, tp, {"": OverlappedColwise(mode=mode, recompute_all_gather=recompute)})
    x = (whole.chunk(size)[rank] if sharded else whole).requires_grad_()
    own = dout.chunk(size, -1)[rank]
    linear(x.transpose(0, 1)).transpose(0, 1).backward(own)
    weight = linear.weight.to_local().detach()
    given = x if recompute or not sharded else whole
    theirs = nanotron_backward(given.detach(), weight, own, sharded, gathers=sharded and recompute)
    for ours, expected in zip((x.grad, linear.weight.grad, linear.bias.grad), theirs, strict=True):
        ours = ours.to_local() if isinstance(ours, DTensor) else ours
        torch.testing.assert_close(ours, expected, rtol=1e-13, atol=1e-13)


@pytest.mark.parametrize(
    ("mode", "recompute"), [("reduce_scatter", False), ("reduce_scatter", True), ("all_reduce", False)]
)
def test_gradients_are_those_of_nanotron(pool: Any, mode: str, recompute: bool) -> None:
    pool(3).run(against_nanotron, mode, recompute)


# Compiled code, checkpoints, copies.


def compiled(rank: int, backend: str) -> None:
    alone, tp = alone_and_tp()
    for mode in ("reduce_scatter", "all_reduce"):
        model = parallelize(Net(bias=True), tp, plan(mode, mode == "reduce_scatter"))
        torch._dynamo.reset()
        counter = CompileCounterWithBackend(backend)

        def loss(tokens: Tensor, labels: Tensor, model: nn.Module = model) -> Tensor:
            return cross_entropy(model(tokens), labels, alone)

        step = torch.compile(loss, backend=counter, fullgraph=True, dynamic=True)
        for length in (6, 10):
            found = []
            for run in (loss, step):
                model.zero_grad()
                run(*tokens_and_labels((2, length))).backward()
                found.append(gradients(model))
            for name, grad in found[0].items():
                torch.testing.assert_close(found[1][name], grad, rtol=1e-12, atol=1e-14)
        assert counter.frame_count == 1  # for all lengths


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.nightly("compiled"))])
@pytest.mark.full
def test_compiled_in_one_graph(pool: Any, backend: str) -> None:
    pool(2).run(compiled, backend, timeout=240.0)


def compiled_over_tp(rank: int) -> list[str]:
    """What a loss over tp says that is compiled with its model: by its axis in one graph, and among two axes."""
    axes, found = mesh((1, dist.get_world_size()), ("dp", "tp")), []
    model = parallelize(Net(), axes["tp"], plan())
    for over, fullgraph in ((axes["tp"], True), (axes, False)):
        torch._dynamo.reset()

        def loss(tokens: Tensor, labels: Tensor, over: DeviceMesh = over) -> Tensor:
            return cross_entropy(model(tokens), labels, over)

        try:
            torch.compile(loss, backend="eager", fullgraph=fullgraph)(*tokens_and_labels((2, 6)))
            found.append("nothing")
        except Exception as error:  # torch.compile puts one of its own around it
            found.append(str(error))
    return found


@pytest.mark.full
def test_a_compiled_loss_over_tp(pool: Any) -> None:
    for found in pool(2).run(compiled_over_tp, timeout=240.0):
        assert len(found) == 2
        for message in found:
            assert "ranks that hold distinct tokens, got ranks [0, 1] of one tp group; leave tp out" in message, message


def save_linears(_: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    saved = op == torch.ops.cp_mesh.column_linears.default
    return CheckpointPolicy.MUST_SAVE if saved else CheckpointPolicy.PREFER_RECOMPUTE


def checkpointed(rank: int) -> list[int]:
    """Collectives of a step without checkpoints, with them, and with a policy that keeps the linears' outputs; and
    how often ranks left words."""
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
        words += inside.state_of(tp.get_group(), agreement.Calls).times  # since the plan
    results.append(words)
    for other in grads[1:]:
        assert all(torch.equal(other[name], grads[0][name]) for name in grads[0])
    return results


def test_checkpoints(pool: Any) -> None:
    """Of gather, scatter, gather and scatter; a recomputation ends before the row linear, by an error that refuses
    nothing: the first calls of three models are compared, and no more."""
    assert pool(2).run(checkpointed) == [[4, 5, 4, 6]] * 2


def copied(rank: int) -> None:
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


def test_copies_and_tied_weights(pool: Any) -> None:
    pool(2).run(copied)


def tied(rank: int, compiled: bool) -> None:
    """A model whose embedding is its head has one weight under PyTorch's styles too, and trains as on one rank."""
    alone, tp = alone_and_tp()
    tokens, labels = tokens_and_labels((2, 7))
    models = Net(), Net()
    for model in models:
        model.head.weight = model.embedding.weight
    if compiled:
        models[1].head = torch.compile(models[1].head, backend="eager")
    styles = {
        "embedding": RowwiseParallel(input_layouts=Replicate()),
        "head": ColwiseParallel(output_layouts=Replicate()),
    }
    parallelize(models[1], tp, styles)
    assert models[1].head.weight is models[1].embedding.weight
    assert len([*models[1].parameters()]) == len([*models[0].parameters()])
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1, foreach=False) for model in models]
    for _ in range(3):
        want, wanted = expected(models[0], tokens, labels)
        loss = cross_entropy(models[1](tokens), labels, alone)
        loss.backward()
        torch.testing.assert_close(loss.detach(), want, rtol=1e-13, atol=1e-13)
        for name, grad in gradients(models[1]).items():
            torch.testing.assert_close(grad, wanted[name], rtol=1e-12, atol=1e-14)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()


@pytest.mark.parametrize("compiled", [False, True], ids=["plain", "a compiled head"])
def test_tied_weights_under_styles_of_pytorch(pool: Any, compiled: bool) -> None:
    pool(2).run(tied, compiled)


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


def untied(rank: int) -> None:
    _, tp = alone_and_tp()
    for what, (styles, words) in UNTIED.items():
        model = Net()
        model.head.weight = model.embedding.weight
        with pytest.raises(ArgumentError, match=f"in all its modules, got .*{words}; .*The plan was applied") as raised:
            parallelize(model, tp, styles)
        assert "head.weight" in str(raised.value), what
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


def test_tensors_that_a_plan_would_make_several_are_refused(pool: Any) -> None:
    pool(2).run(untied)


def trained_alone(rank: int) -> list[str]:
    """Gradients of a model under FSDP2 of which one part is trained, that are not those of one rank."""
    problems, axes = [], mesh((2, 2), ("dp", "tp"))
    dp, tp = axes["dp"], axes["tp"]
    tokens, labels = tokens_and_labels((4, 6))
    own = slice(2 * dp.get_local_rank(), 2 * dp.get_local_rank() + 2)
    for trained, parts in product(("head", "embedding", "feed_forward.w2"), (False, True)):
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
        found = {"loss": share} | gradients(model)
        for name, x in ({"loss": loss} | grads).items():
            if name not in found or not torch.allclose(found[name], x, rtol=1e-12, atol=1e-15):
                problems.append(f"{trained}, {parts=}: {name}")
    return problems


def test_one_trained_part_under_fsdp(pool: Any) -> None:
    problems = pool(4).run(trained_alone, timeout=240.0)
    assert not any(problems), "\n".join(chain(*problems))


def awaited(rank: int) -> None:
    """An input that is still under way when the linears are called."""
    _, tp = alone_and_tp()
    linear = parallelize(nn.Linear(C, OUT), tp, {"": OverlappedColwise(recompute_all_gather=True)})
    own, grads = torch.arange(3.0 * C).view(1, 3, C) + rank, []
    for under_way in (True, False):
        x = (
            funcol.all_gather_tensor(own, 1, tp.get_group())
            if under_way
            else torch.cat([own - rank, own - rank + 1], 1)
        )
        assert isinstance(x, funcol.AsyncCollectiveTensor) == under_way
        out = linear(x)
        assert type(out) is Tensor
        out.square().sum().backward()
        grads.append(linear.weight.grad.to_local())
        linear.zero_grad()
    assert torch.equal(*grads) and bool(grads[0].any())


def test_an_input_under_way(pool: Any) -> None:
    pool(2).run(awaited)


def deferred(rank: int) -> tuple[Tensor, Tensor]:
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
    with mock.patch.object(vocabulary, "CHUNK_BYTES", 3 * 6 * 8):  # three rows
        chunked = cross_entropy(model(tokens), labels, alone)
        chunked.backward()
        assert len(list(vocabulary._chunks(torch.ones(14, C, dtype=torch.float64), logits.head.weight))) == 5
    torch.testing.assert_close(chunked, at_once, rtol=1e-14, atol=0.0)
    for name, grad in gradients(model).items():
        torch.testing.assert_close(grad, grads[name], rtol=1e-12, atol=1e-15)
    return logits.whole()


def test_chunks_of_logits(pool: Any) -> None:
    """In chunks or at once the numbers are the same; all logits can be asked for."""
    pool(2).run(deferred)


def memory(rank: int) -> list[int]:
    """Bytes allocated at most by a loss and by its backward, of logits of which a rank's part is 4 MiB."""
    alone, tp = alone_and_tp()
    head = parallelize(nn.Linear(16, 2048, bias=False, dtype=torch.float64), tp, {"": VocabParallelHead()})
    x = torch.randn(1, 256, 16, dtype=torch.float64, requires_grad=True)
    labels = torch.arange(512)[None]
    cross_entropy(head(x), labels, alone).backward()  # a first call is compared, and profilers begin
    losses: list[Tensor] = []
    with mock.patch.object(vocabulary, "CHUNK_BYTES", 16 * 1024 * 8):
        return [
            peak_of(lambda: losses.append(cross_entropy(head(x), labels, alone))),
            peak_of(lambda: losses[0].backward()),
        ]


@pytest.mark.unpoisoned
def test_logits_of_all_rows_are_never_held(pool: Any) -> None:
    for forward, backward in pool(2).run(memory):
        assert max(forward, backward) < 2**20
    whole = torch.randn(512, 1024, dtype=torch.float64)
    assert peak_of(lambda: F.cross_entropy(whole, torch.arange(512))) >= 2**22  # what is measured can be seen


def half_precision(rank: int, dtype: torch.dtype) -> None:
    """Linears of a model in half precision, and under autocast: as PyTorch's own on one rank, within rounding."""
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


def test_half_precision(pool: Any) -> None:
    pool(2).run(half_precision, torch.bfloat16)


def micro_batches(rank: int, count: int) -> tuple[torch.dtype, list[float]]:
    """Gradients of 1 for each of them, which bfloat16 could sum up to 256 alone."""
    alone, tp = alone_and_tp()
    model = nn.Sequential(nn.Linear(C, C, bias=False), nn.Linear(C, C, bias=False))
    nn.init.constant_(model[0].weight, 0.5 / C)
    nn.init.constant_(model[1].weight, 1.0 / C)
    parallelize(model, tp, {"0": OverlappedColwise(), "1": OverlappedRowwise()})
    model = fully_shard(model, mesh=alone, mp_policy=MixedPrecisionPolicy(torch.bfloat16, torch.float32))
    for index in range(count):
        model.set_requires_gradient_sync(index == count - 1)
        model(torch.ones(1, C)).sum().backward()
    grad = model[1].weight.grad.full_tensor()
    return grad.dtype, grad.unique().tolist()


@pytest.mark.full
def test_micro_batches_are_summed_in_float32(pool: Any) -> None:
    """By FSDP2, as docs/linears.md says: hidden units of 1/2, two rows."""
    count = 300
    assert pool(2).run(micro_batches, count) == [(torch.float32, [float(count)])] * 2


# What is refused, on every rank, before the first collective.


class Alike(nn.Module):
    """Calls its linears as it is told to."""

    def __init__(self, calls: Callable[[Alike, Tensor], Any], **linears: nn.Module) -> None:
        super().__init__()
        self.calls = calls
        for name, linear in ({"a": nn.Linear(C, 4), "b": nn.Linear(C, 4)} | linears).items():
            self.add_module(name, linear)

    def forward(self, x: Tensor) -> Any:
        return self.calls(self, x)


class Own(nn.Linear):
    def forward(self, input: Tensor) -> Tensor:
        return 2 * super().forward(input)


def both(module: Any, x: Tensor) -> Tensor:
    return module.a(x) + module.b(x)


def twice(module: Any, x: Tensor) -> Tensor:
    return module.a(x) + module.a(x)


def written_between(module: Any, x: Tensor) -> Tensor:
    out = module.a(x)
    return out + module.b(x.add_(1))


def columns(*names: str, calls: Any = both, mode: Any = "reduce_scatter", **linears: nn.Module) -> Callable[..., Any]:
    def run(tp: DeviceMesh) -> Any:
        x = torch.ones(2, 3, C)
        return parallelize(Alike(calls, **linears), tp, {"": OverlappedColwise(*(names or ("a", "b")), mode=mode)})(x)

    return run


def alone_on(style: Any, module: nn.Module, *shape: int) -> Callable[..., Any]:
    return lambda tp: parallelize(module, tp, {"": style})(torch.ones(shape or (2, 3, C)))


def sharded_elsewhere(tp: DeviceMesh) -> None:
    parallelize(parallelize(nn.Linear(C, 4), tp, {"": ColwiseParallel()}), tp, {"": OverlappedRowwise()})


def given_replicated(tp: DeviceMesh) -> None:
    x = distribute_tensor(torch.ones(2, 3, C), tp, [Replicate()])
    parallelize(nn.Linear(C, 4), tp, {"": OverlappedColwise()})(x)


def second_backward(
    style: Any, loss: Callable[[Tensor], Tensor] = lambda out: out.square().sum(), of_weight: bool = False
) -> Callable[..., Any]:
    """A penalty on a gradient; of a ``loss`` that is linear the gradient of the output has none itself."""

    def run(tp: DeviceMesh) -> None:
        linear = parallelize(nn.Linear(C, C), tp, {"": style})
        x = torch.ones(2, 4, C // 2 if isinstance(style, OverlappedRowwise) else C, requires_grad=True)
        (grad,) = torch.autograd.grad(loss(linear(x)), linear.weight if of_weight else x, create_graph=True)
        grad = grad.to_local() if isinstance(grad, DTensor) else grad
        (grad.square().sum() + linear(x).sum()).backward()

    return run


def mapped(tp: DeviceMesh) -> None:
    torch.func.vmap(parallelize(nn.Linear(C, 4), tp, {"": OverlappedColwise()}))(torch.ones(2, 3, C))


def of_unlike_rows(tp: DeviceMesh) -> None:
    parallelize(nn.Linear(C, 4), tp, {"": OverlappedColwise()})(
        torch.ones(3 + tp.get_local_rank(), C)
    )  # packed: a first call of its kind


def of_unlike_rows_to_sum(tp: DeviceMesh) -> None:
    x = torch.ones(2 + 2 * tp.get_local_rank(), C // 2)
    parallelize(nn.Linear(C, 4), tp, {"": OverlappedRowwise()})(x)


def freed(tp: DeviceMesh) -> None:
    model = fully_shard(parallelize(Net(), tp, plan()), mesh=alone_and_tp()[0], reshard_after_forward=True)
    tokens, labels = tokens_and_labels((2, 4))
    cross_entropy(model(tokens), labels, alone_and_tp()[0])


def of_unlike_labels(tp: DeviceMesh) -> None:
    logits = parallelize(nn.Linear(C, 4, bias=False), tp, {"": VocabParallelHead()})(torch.ones(3, C))
    cross_entropy(logits, (torch.arange(6) + tp.get_local_rank()) % 4, alone_and_tp()[0])


def over_tp(tp: DeviceMesh) -> None:
    logits = parallelize(nn.Linear(C, 4, bias=False), tp, {"": VocabParallelHead()})(torch.ones(3, C))
    cross_entropy(logits, torch.arange(6) % 4, tp)


def bias_of_another_dtype(mode: Any, tp: DeviceMesh) -> None:
    linear = nn.Linear(C, 4)
    linear.bias = nn.Parameter(linear.bias.double())
    parallelize(linear, tp, {"": OverlappedRowwise(mode=mode)})(torch.ones(2, 4, C // 2))


REFUSED: dict[str, tuple[Callable[[DeviceMesh], Any], str]] = {
    "a mode": (
        lambda tp: OverlappedColwise(mode="scatter"),
        "'scatter'; OverlappedColwise: mode='reduce_scatter' works",
    ),  # type: ignore[arg-type]
    "nothing to gather": (
        lambda tp: OverlappedColwise(mode="all_reduce", recompute_all_gather=True),
        "False in mode",
    ),
    "a transport": (
        lambda tp: OverlappedRowwise(transport="nvlink"),
        "'nvlink'; OverlappedRowwise: transport='functio",
    ),  # type: ignore[arg-type]
    "copies of a sum": (
        lambda tp: OverlappedColwise(mode="all_reduce", transport="symmetric_memory"),
        "'auto' or 'functional' in mode 'all_reduce', got 'symmetric_memory'",
    ),
    "symmetric memory of CPUs": (
        alone_on(OverlappedColwise(transport="symmetric_memory"), nn.Linear(C, 4)),
        "it joins CUDA devices, the tensors are on cpu; transport='functional' works",
    ),
    "symmetric memory of CPUs, in rows": (
        alone_on(OverlappedRowwise(transport="symmetric_memory"), nn.Linear(C, 4), 2, 4, C // 2),
        "it joins CUDA devices, the tensors are on cpu; transport='functional' works",
    ),
    "a name": (columns("a", "c"), "expected names of linears in the module, got 'c'; it has a, b"),
    "no linear": (columns("a", "b", b=nn.Identity()), "expected nn.Linear, got Identity"),
    "a forward of its own": (columns(b=Own(C, 4)), "Own, which has a forward of its own"),
    "two inputs": (columns(calls=lambda m, x: m.a(x) + m.b(x + 1)), "b called with another tensor, one written"),
    "an input that is written": (columns(calls=written_between), "b called with another tensor, one written"),
    "called twice": (columns(calls=twice), "a called with another tensor, one written to since, or twice"),
    "not called": (columns(calls=lambda m, x: m.a(x)), "got no call of b; leave it out of the names"),
    "in_features": (columns(b=nn.Linear(C + 1, 4)), "one in_features and dtype"),
    "two dtypes": (columns(a=nn.Linear(C, 4).double(), b=nn.Linear(C, 4).double()), "one dtype, got"),
    "a bias of another dtype": (
        partial(bias_of_another_dtype, "all_reduce"),
        "an output and a bias of one dtype, got torch.float32 and",
    ),
    "a bias of another dtype, of sharded rows": (
        partial(bias_of_another_dtype, "reduce_scatter"),
        "inputs and weights of one dtype, got ['torch.float32', 'torch.float64']",
    ),
    "odd rows": (alone_on(OverlappedRowwise(), nn.Linear(C, 4), 2, 3, C // 2), "a multiple of 2 rows"),
    "an embedding": (alone_on(VocabParallelEmbedding(), nn.Embedding(8, C, max_norm=1.0)), "max_norm=1.0"),
    "a small vocabulary": (alone_on(VocabParallelEmbedding(), nn.Embedding(1, C)), "a vocabulary of 1; use fewer"),
    "a head with a bias": (alone_on(VocabParallelHead(), nn.Linear(C, 8)), "a linear without a bias"),
    "another placement": (sharded_elsewhere, "a DTensor (Shard(1),) over tp"),
    "a replicated input": (given_replicated, "a DTensor (Shard(1),) over tp"),
    "double backward of columns": (second_backward(OverlappedColwise()), "can be differentiated once"),
    "double backward of columns, linear loss": (
        second_backward(OverlappedColwise(), torch.sum),
        "can be differentiated once",
    ),
    "double backward of columns, gathered again": (
        second_backward(OverlappedColwise(recompute_all_gather=True), torch.sum),
        "can be differentiated once",
    ),
    "double backward of a column weight": (
        second_backward(OverlappedColwise(), torch.sum, of_weight=True),
        "can be differentiated once",
    ),
    "double backward of rows, linear loss": (
        second_backward(OverlappedRowwise(), torch.sum),
        "can be differentiated once",
    ),
    "double backward of a row weight": (
        second_backward(OverlappedRowwise(), torch.sum, of_weight=True),
        "can be differentiated once",
    ),
    "double backward of rows": (second_backward(OverlappedRowwise()), "can be differentiated once"),
    "double backward of sums": (second_backward(OverlappedRowwise(mode="all_reduce")), "can be differentiated once"),
    "vmap": (mapped, "expected no transform of torch.func, got vmap"),
    "a weight that is freed": (freed, "got one that FSDP2 has freed; fully_shard"),
    "a loss over tp": (over_tp, "ranks that hold distinct tokens, got ranks [0, 1] of one tp group; leave tp out"),
    "labels that differ": (
        of_unlike_labels,
        "cross_entropy: expected the same labels on every tp rank, got tp rank 0: torch.int64",
    ),
    "rows that differ": (of_unlike_rows, "rows of the sequence"),
    "rows to sum that differ": (of_unlike_rows_to_sum, "rows of the sequence"),
}


def refused(rank: int, names: list[str]) -> list[str]:
    """What was raised for each, and where a collective ran before it: weights are scattered when a style is applied."""
    found, (_, tp) = [], alone_and_tp()
    forget_kept(agreement.Calls)  # other tests made calls of the same kind, of which the first alone is compared
    for name in names:
        try:
            REFUSED[name][0](tp)
            found.append("nothing")
        except (ArgumentError, UnsupportedError, RankMismatchError) as error:
            found.append(str(error))
    return found


def test_what_is_refused(pool: Any) -> None:
    for found in pool(2).run(refused, list(REFUSED)):
        for (name, (_, words)), message in zip(REFUSED.items(), found, strict=True):
            assert words in message, f"{name}: {message}"


# What one rank of tp alone refuses: the others hear of it before their first collective.


def unlike_heads(axes: DeviceMesh, evaluated: bool) -> None:
    """A label outside of the vocabulary on one rank, of which only its dp ranks hear in the loss's own sum."""
    dp, tp = axes["dp"], axes["tp"]
    head = parallelize(nn.Linear(C, 4, bias=False), tp, {"": VocabParallelHead()})
    labels = torch.arange(6) % 4
    if evaluated:
        with torch.no_grad():
            cross_entropy(head(torch.ones(3, C)), labels, dp)
    labels[0] += 4 * (dist.get_rank() == 3)
    cross_entropy(head(torch.ones(3, C)), labels, dp)


def shape_of_labels(axes: DeviceMesh) -> None:
    tp = axes["tp"]
    head = parallelize(nn.Linear(C, 4, bias=False), tp, {"": VocabParallelHead()})
    cross_entropy(head(torch.ones(3, C)), torch.zeros(6 + tp.get_local_rank(), dtype=torch.int64), axes["dp"])


def dtype_of_input(axes: DeviceMesh) -> None:
    tp = axes["tp"]
    x = torch.ones(2, 3, C, dtype=torch.float64 if tp.get_local_rank() else torch.float32)
    parallelize(nn.Linear(C, 4), tp, {"": OverlappedColwise()})(x)


def dtype_of_rank(axes: DeviceMesh, style: Any) -> None:
    """Of inputs and weights alike, which no rank refuses alone."""
    tp = axes["tp"]
    dtype = torch.float64 if tp.get_local_rank() else torch.float32
    features = C // 2 if isinstance(style, OverlappedRowwise) else C
    linear = parallelize(nn.Linear(C, 4), tp, {"": style})
    linear.to(dtype)(torch.ones(2, 4, features, dtype=dtype))


def placement_of_input(axes: DeviceMesh) -> None:
    tp = axes["tp"]
    x: Tensor = distribute_tensor(torch.ones(2, 6, C), tp, [Shard(1)])
    if tp.get_local_rank():
        x = DTensor.from_local(torch.ones(2, 6, C), tp, [Replicate()], run_check=False)
    parallelize(nn.Linear(C, 4), tp, {"": OverlappedColwise()})(x)


def rows_of_output(axes: DeviceMesh) -> None:
    tp = axes["tp"]
    parallelize(nn.Linear(C, 4), tp, {"": OverlappedRowwise()})(torch.ones(2, 4 + tp.get_local_rank(), C // 2))


def rows_of_sum(axes: DeviceMesh) -> None:
    tp = axes["tp"]
    x = torch.ones(2, 4 + 2 * tp.get_local_rank(), C // 2)
    parallelize(nn.Linear(C, 4), tp, {"": OverlappedRowwise()})(x)


def call_left_out(axes: DeviceMesh) -> None:
    tp = axes["tp"]
    calls = (lambda m, x: m.a(x)) if tp.get_local_rank() else both
    module = parallelize(Alike(calls), tp, {"": OverlappedColwise("a", "b")})
    row = parallelize(nn.Linear(C, 4), tp, {"": OverlappedRowwise()})
    module(torch.ones(2, 3, C))
    row(torch.ones(2, 4, C // 2))


def tokens_of_rank(axes: DeviceMesh) -> None:
    tp = axes["tp"]
    parallelize(nn.Embedding(V, C), tp, {"": VocabParallelEmbedding()})(torch.arange(4)[None] + tp.get_local_rank())


def frozen_on_a_rank(axes: DeviceMesh, style: Any, what: str, compiled: bool = False, evaluated: bool = False) -> None:
    """The weight, the bias or the input of a linear needs no gradient on one rank."""
    tp = axes["tp"]
    rows, features = (4, C // 2) if isinstance(style, OverlappedRowwise) else (3, C)
    module = nn.Sequential(nn.Linear(C, 4, bias=not isinstance(style, VocabParallelHead)), nn.Identity())
    parallelize(module, tp, {"0": style})
    x = torch.ones(2, rows, features, requires_grad=what != "input" or tp.get_local_rank() == 0)
    if evaluated:
        with torch.no_grad():
            module(x)
    if what != "input":
        getattr(module[0], what).requires_grad_(tp.get_local_rank() == 0)
    found = torch.compile(module, backend="eager", fullgraph=True)(x) if compiled else module(x)
    if isinstance(style, VocabParallelHead):
        cross_entropy(found, torch.zeros(2, 6, dtype=torch.int64), axes["dp"])


def frozen_among_columns(axes: DeviceMesh) -> None:
    module = parallelize(Alike(both), axes["tp"], {"": OverlappedColwise("a", "b")})
    module.b.weight.requires_grad_(axes["tp"].get_local_rank() == 0)
    module(torch.ones(2, 3, C))


def frozen_embedding(axes: DeviceMesh) -> None:
    embedding = parallelize(nn.Embedding(V, C), axes["tp"], {"": VocabParallelEmbedding()})
    embedding.weight.requires_grad_(axes["tp"].get_local_rank() == 0)
    embedding(torch.arange(4)[None])


def compiled_tokens_of_rank(axes: DeviceMesh) -> None:
    tp = axes["tp"]
    embedding = parallelize(nn.Embedding(V, C), tp, {"": VocabParallelEmbedding()})
    torch.compile(embedding, backend="eager", fullgraph=True)(torch.arange(4)[None] + tp.get_local_rank())


def token_outside(axes: DeviceMesh) -> None:
    tp = axes["tp"]
    parallelize(nn.Embedding(V, C), tp, {"": VocabParallelEmbedding()})(torch.tensor([[0, V * tp.get_local_rank()]]))


def unlike(what: str, first: str, second: str) -> str:
    """What is said of tensors that require a gradient on one rank, and on the other."""
    every = "expected the same tensors that require a gradient on every tp rank, got"
    return f"{what}: {every} tp rank 0: {first}; tp rank 1: {second}; give"


COLUMNS, ROWS = "column linears", "row linear"
WITHOUT: dict[str, tuple[Callable[[DeviceMesh], Any], str]] = {
    "columns": (
        frozen_among_columns,
        unlike(COLUMNS, "a.weight, b.weight, a.bias, b.bias", "a.weight, a.bias, b.bias"),
    ),
    "an input of columns": (
        partial(frozen_on_a_rank, style=OverlappedColwise(mode="all_reduce"), what="input"),
        unlike(COLUMNS, "input, weight, bias", "weight, bias"),
    ),
    "rows": (
        partial(frozen_on_a_rank, style=OverlappedRowwise(), what="weight"),
        unlike(ROWS, "input, weight, bias", "input, bias"),
    ),
    "rows after an evaluation": (
        partial(frozen_on_a_rank, style=OverlappedRowwise(), what="weight", evaluated=True),
        unlike(ROWS, "input, weight, bias", "input, bias"),
    ),
    "a sum of rows": (
        partial(frozen_on_a_rank, style=OverlappedRowwise(mode="all_reduce"), what="bias"),
        unlike(ROWS, "input, weight, bias", "input, weight"),
    ),
    "columns, compiled": (
        partial(frozen_on_a_rank, style=OverlappedColwise(), what="weight", compiled=True),
        unlike(COLUMNS, "input, weight, bias", "input, bias"),
    ),
    "rows, compiled": (
        partial(frozen_on_a_rank, style=OverlappedRowwise(), what="input", compiled=True),
        unlike(ROWS, "input, weight, bias", "weight, bias"),
    ),
    "an embedding": (frozen_embedding, unlike("VocabParallelEmbedding", "weight", "none")),
    "a head": (
        partial(frozen_on_a_rank, style=VocabParallelHead(), what="weight"),
        unlike("cross_entropy", "input, weight", "input"),
    ),
}
"""Where one rank would run another backward."""

ALONE: dict[str, tuple[Callable[[DeviceMesh], Any], str]] = {
    "a label outside": (partial(unlike_heads, evaluated=False), "expected 0 <= label < 4, or ignore_index=-100, got"),
    "one after an evaluation": (partial(unlike_heads, evaluated=True), "expected 0 <= label < 4, or ignore_index=-100"),
    "the shape of labels": (shape_of_labels, "labels: expected shape (6,), got (7,)"),
    "the dtype of an input": (dtype_of_input, "inputs and weights of one dtype"),
    "the dtype of column linears": (
        partial(dtype_of_rank, style=OverlappedColwise()),
        "column linears: expected the same dtype on every tp rank, got tp rank 0: ",
    ),
    "the dtype of row linears": (
        partial(dtype_of_rank, style=OverlappedRowwise()),
        "row linear: expected the same dtype on every tp rank, got tp rank 0: ",
    ),
    "a placement": (placement_of_input, "a DTensor (Shard(1),) over tp"),
    "rows that tp does not divide": (rows_of_output, "a multiple of 2 rows"),
    "rows of a row linear": (rows_of_sum, "expected the same rows of the sequence"),
    "a call left out": (call_left_out, "got no call of b"),
    "tokens": (tokens_of_rank, "VocabParallelEmbedding: expected the same tokens on every tp rank, got tp rank 0: "),
    "tokens, compiled": (compiled_tokens_of_rank, "VocabParallelEmbedding: expected the same tokens on every tp rank"),
    "a token outside": (token_outside, "out of range"),
    **{f"no gradient: {name}": row for name, row in WITHOUT.items()},
}


def refused_alone(rank: int, names: tuple[str, ...], checked: bool = False) -> list[tuple[str, float]]:
    """What was raised for each, and after how many seconds."""
    with check_mode(True) if checked else nullcontext():
        return _refused_alone(names)


def _refused_alone(names: tuple[str, ...]) -> list[tuple[str, float]]:
    found, axes = [], mesh((2, 2), ("dp", "tp"))
    for name in names:
        forget_kept(agreement.Calls)
        dist.barrier()
        begin = time.monotonic()
        try:
            ALONE[name][0](axes)
            found.append(("nothing", 0.0))
        except (ArgumentError, UnsupportedError, RankMismatchError, IndexError) as error:
            found.append((str(error), time.monotonic() - begin))
    return found


@pytest.mark.full
def test_what_one_rank_alone_refuses(pool: Any, names: tuple[str, ...] = tuple(ALONE)) -> None:
    for found in pool(4).run(refused_alone, names):
        for name, (message, seconds) in zip(names, found, strict=True):
            assert ALONE[name][1] in message and seconds < 20, f"{name}: {message}, after {seconds} s"


def other_tokens_later(rank: int) -> None:
    tp = mesh((1, 2), ("dp", "tp"))["tp"]
    module = parallelize(nn.Embedding(V, C), tp, {"": VocabParallelEmbedding()})
    with check_mode():
        for shift in (0, rank):
            module(torch.arange(4)[None] + shift)


def test_check_mode_compares_all_calls_over_tp(pool: Any) -> None:
    for error in pool(2).run_expecting_error(other_tokens_later):
        assert error is not None and error.type == "RankMismatchError", error
        assert "VocabParallelEmbedding: expected the same tokens on every tp rank" in error.message


def test_what_one_rank_alone_refuses_in_check_mode(pool: Any) -> None:
    names = ("rows that tp does not divide", "the shape of labels")
    for found in pool(4).run(refused_alone, names, True):
        for name, (message, seconds) in zip(names, found, strict=True):
            assert ALONE[name][1] in message and seconds < 20, f"{name}: {message}, after {seconds} s"


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


def refused_among(rank: int, setup: str) -> tuple[str, float, tuple[int, ...]]:
    with check_mode(True) if setup == "in check mode" else nullcontext():
        return _refused_among(rank, setup)


def _refused_among(rank: int, setup: str) -> tuple[str, float, tuple[int, ...]]:
    """What was raised, after how many seconds, and the shape of what a right call then returns."""
    forget_kept(agreement.Calls, cuts.Cuts)  # cuts of other tests, too
    torch._dynamo.reset()
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
    wrong, *_ = AMONG[setup]
    model[0].core.wrong = wrong * (rank == 1)
    x = torch.ones(1, 4, C)
    dist.barrier()
    begin, said = time.monotonic(), "nothing"
    try:
        model(x)
    except Exception as error:
        said = f"{type(error).__name__}: {error}"
    seconds = time.monotonic() - begin
    dist.barrier()
    model[0].core.wrong = ""
    torch._dynamo.reset()
    return said, seconds, tuple(model(x).shape)


@pytest.mark.parametrize("setup", AMONG)
@pytest.mark.quick(without="trace")
def test_all_ranks_of_cp_and_tp_hear_of_a_refusal(pool: Any, setup: str) -> None:
    _, words, heard = AMONG[setup]
    by_rank = pool(4).run(refused_among, setup, timeout=120.0)
    for said, seconds, shape in by_rank:
        assert seconds < 50 and shape == (1, 4, C), by_rank  # the timeout of groups is 60
        assert words in said, by_rank
    others = [said for rank, (said, *_) in enumerate(by_rank) if rank != 1]
    for said, place in zip(others, heard, strict=True):
        assert said.startswith(f"RankMismatchError: {place} rank"), by_rank


def planned_elsewhere(rank: int) -> tuple[int, ...]:
    axes = mesh((2, 2), ("dp", "tp"))
    row = parallelize(nn.Linear(C, 4), axes["tp"], {"": OverlappedRowwise()})
    for _ in range(2):
        found = row(torch.ones(2, 4, C // 2))
        if axes.get_local_rank("tp") == 0:  # another model, of these ranks alone
            agreement.look_again(axes["dp"].get_group())
    return tuple(found.shape)


def test_a_plan_of_some_ranks_over_another_axis(pool: Any) -> None:
    assert pool(4).run(planned_elsewhere) == [(2, 2, 4)] * 4


# A plain parameter on rows that are sharded.


class Normed(Net):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(C, dtype=torch.float64)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        return self.head(self.norm(x + self.mixer(x.tanh())))


SETUPS = {
    "plain": True,
    "plain, FSDP2": True,
    "all_reduce": False,
    "SequenceParallel": False,
    "SequenceParallel, FSDP2": False,
    "summed": False,
    "values of each rank": False,
}
"""Of parameters on rows over tp, and whether the first two steps refuse them."""


def stepped(rank: int, setups: list[str]) -> list[str]:
    """What the first optimizer step said, and the second one."""
    found, axes = [], mesh((2, 2), ("dp", "tp"))
    dp, tp = axes["dp"], axes["tp"]
    tokens, labels = tokens_and_labels((2, 6))
    for setup in setups:
        model = Normed()
        if setup == "values of each rank":
            nn.init.uniform_(model.norm.weight, 1 + tp.get_local_rank(), 2 + tp.get_local_rank())
            nn.init.constant_(model.norm.bias, 1 + tp.get_local_rank())
        styles = plan("all_reduce" if setup == "all_reduce" else "reduce_scatter")
        parallelize(model, tp, styles | ({"norm": SequenceParallel()} if "SequenceParallel" in setup else {}))
        if "FSDP2" in setup:
            sum_gradients(fully_shard(model, mesh=dp))
        optimizer, said = torch.optim.SGD(model.parameters(), lr=0.1), ""
        for _ in range(2):
            optimizer.zero_grad()
            cross_entropy(model(tokens), labels, dp).backward()
            if setup == "summed":
                for parameter in model.norm.parameters():
                    dist.all_reduce(parameter.grad, group=tp.get_group())
            try:
                optimizer.step()
            except ArgumentError as error:
                said += str(error)
        found.append(said)
    return found


def test_plain_parameters_on_sharded_rows(pool: Any) -> None:
    for found in pool(4).run(stepped, list(SETUPS), timeout=120.0):
        for (setup, wrong), said in zip(SETUPS.items(), found, strict=True):
            words = "parameters that tp does not shard, such as norm.weight: expected equal on the ranks of a tp group"
            assert said.count(words) == 2 * wrong and ("SequenceParallel()" in said) == wrong, f"{setup}: {said}"


def tokens_outside(rank: int) -> list[str]:
    alone, tp = alone_and_tp()
    model, found = parallelize(Net(), tp, plan("all_reduce")), []
    for token, label in ((V, 0), (-1, 0)):
        try:
            cross_entropy(model(torch.tensor([[1, token]])), torch.tensor([[0, label]]), alone)
        except IndexError as error:
            found.append(str(error))
    with check_mode(False):  # a later call, which is not looked at
        try:
            cross_entropy(model(torch.tensor([[1, 2]])), torch.tensor([[0, V]]), alone)
        except (IndexError, RuntimeError) as error:
            found.append(str(error))
    return found


def test_tokens_outside_of_the_vocabulary(pool: Any) -> None:
    for found in pool(2).run(tokens_outside):
        assert len(found) == 3 and all("out of" in message for message in found), found


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
