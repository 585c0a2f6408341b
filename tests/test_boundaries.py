"""`ShardInput` and `GatherOutput`: a model that is sharded in part has the gradients of one rank."""

from __future__ import annotations

import copy
import warnings
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from model import Core, DenseCore, Model, batch
from ranks import mesh
from torch import Tensor, nn
from torch.distributed.tensor.parallel import parallelize_module
from torch.utils.checkpoint import checkpoint

import cp_mesh
from cp_mesh import (
    ArgumentError,
    ContextParallel,
    Contiguous,
    Layout,
    Mask,
    RankMismatchError,
    ShardedModel,
    ShardedSequence,
    Striped,
    ZigZag,
    check_mode,
    parallelize,
)
from cp_mesh.training import GatherOutput, ShardInput

SIZE = 3


def part_of_model(sequence: ShardedSequence, end: str, gradient: Any) -> nn.Module:
    """Whole tokens and embeddings, layers of this rank's rows, and from the end of ``end`` on whole rows again."""
    plan = {
        "layers.*.core": ContextParallel(sequence),
        "layers.0": ShardInput(sequence, (0, "rope")),
        "layers.1": ShardInput(sequence, ("rope",)),  # which the model hands to each layer
    }
    model = parallelize(Model(), sequence.mesh, plan)
    return parallelize(model, sequence.mesh, {end: GatherOutput(sequence, gradient=gradient)})


def step(rank: int, layout: Layout, length: int, end: str, gradient: str, options: dict[str, Any]) -> dict[str, Tensor]:
    """Logits, and gradients after a plain sum; every rank computes the same loss of the whole."""
    sequence = ShardedSequence(mesh((dist.get_world_size(),), ("cp",)), layout, length=length, **options)
    model = part_of_model(sequence, end, gradient)
    if options:  # recomputed in the backward, where no forward of a root runs
        for layer in model.layers:
            forward = layer.forward
            layer.forward = lambda *x, forward=forward: checkpoint(forward, *x, use_reentrant=False)
    given = batch(2, length)
    logits = model(given["tokens"], torch.arange(length))
    loss = F.cross_entropy(logits.flatten(0, 1), given["labels"].flatten())
    (loss if gradient == "mean" else loss / sequence.cp_size).backward()
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad)
    return {"logits": logits.detach()} | {name: x.grad for name, x in model.named_parameters()}


def of_one(length: int) -> dict[str, Tensor]:
    model, given = Model(DenseCore), batch(2, length)
    logits = model(given["tokens"], torch.arange(length))
    F.cross_entropy(logits.flatten(0, 1), given["labels"].flatten()).backward()
    return {"logits": logits.detach()} | {name: x.grad for name, x in model.named_parameters()}


@pytest.mark.parametrize(
    ("layout", "length", "end", "gradient", "options"),
    [
        (ZigZag(), 24, "head", "mean", {}),
        (Striped(), 23, "norm", "sum", {}),  # padded; the head computes whole rows on every rank
        (Contiguous(), 23, "layers.1", "sum", {"pad": False}),
        (ZigZag(), 22, "head", "mean", {"pad": False}),
    ],
    ids=str,
)
def test_gradients_are_those_of_one_rank(
    pool: Any, layout: Layout, length: int, end: str, gradient: str, options: dict[str, Any]
) -> None:
    want = of_one(length)
    for got in pool(SIZE).run(step, layout, length, end, gradient, options):
        assert got.keys() == want.keys()
        for name, x in want.items():
            torch.testing.assert_close(got[name], x, rtol=1e-10, atol=1e-10, msg=name)


class Counting(nn.Module):
    """Counts its rows, unless it is given their positions."""

    def __init__(self) -> None:
        super().__init__()
        self.core = Core()

    def forward(self, x: Tensor, positions: Tensor | None = None) -> Tensor:
        positions = torch.arange(x.shape[1]) if positions is None else positions
        heads = (x + positions.double()[..., None])[:, None]
        return self.core(heads, heads, heads)[:, 0]


class AroundCounting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.block = Counting()

    def forward(self, x: Tensor, given: bool) -> Tensor:
        return self.block(x, torch.arange(x.shape[1])[None] if given else None)


def counted(rank: int, given: bool) -> list[str]:
    sequence = ShardedSequence(mesh((SIZE,), ("cp",)))
    plan = {"block": ShardInput(sequence, (0, "positions")), "block.core": ContextParallel(sequence)}
    model = parallelize(AroundCounting(), sequence.mesh, plan)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model(torch.zeros(1, 24, 4, dtype=torch.float64), given)
    return [str(x.message) for x in caught if "cp_mesh" in str(x.message)]


def test_counted_positions_are_warned_of(pool: Any) -> None:
    for said in pool(SIZE).run(counted, False):
        assert len(said) == 1 and "counts 8 positions from 0" in said[0] and "the inputs of ShardInput" in said[0]
    assert pool(SIZE).run(counted, True) == [[]] * SIZE


class Out(NamedTuple):
    hidden: Tensor
    lse: Tensor
    steps: int


class Entries(nn.Module):
    """Rows along another dim, arguments by place and by name alone, and an output of several entries."""

    def forward(self, *rows: Tensor, scale: Tensor | None = None, as_dict: bool = False, **others: Any) -> Any:
        found = rows[0] * (2 if scale is None else scale) + rows[1]
        shift = others.get("shift", 0)
        made = Out(found.transpose(0, 1) + shift, found.sum(), 3)
        return made._asdict() if as_dict else made


def entries(rank: int) -> None:
    sequence = ShardedSequence(mesh((SIZE,), ("cp",)), Striped(), length=10)
    module = parallelize_module(Entries(), sequence.mesh, ShardInput(sequence, (1, 0, "scale", "shift"), dim=0))
    module = parallelize_module(module, sequence.mesh, GatherOutput(sequence, gradient="mean", outputs=(0,)))
    a, b, scale = torch.arange(10.0)[:, None] * torch.ones(2), torch.ones(10, 2), torch.linspace(1, 2, 10)[:, None]
    shift, own = torch.arange(10.0), sequence.positions()
    plain = Entries()(a, b, scale=scale)
    got = module(a, b, scale=scale)
    assert type(got) is Out and got.steps == 3
    assert torch.equal(got.hidden, plain.hidden)
    padded = F.pad(a * scale + b, (0, 0, 0, 2))  # to 12 rows
    assert torch.equal(got.lse, padded[own].sum())  # what is not named is this rank's
    assert torch.equal(module(a, b, scale=None, shift=shift).hidden, (a * 2 + b).T + shift)
    # a copy has both; the class is one for all
    assert torch.equal(copy.deepcopy(module)(a, b).hidden, (a * 2 + b).T)
    by_name = parallelize_module(Entries(), sequence.mesh, ShardInput(sequence, (0, 1), dim=0))
    parallelize_module(by_name, sequence.mesh, GatherOutput(sequence, gradient="sum", outputs=("hidden",)))
    assert torch.equal(by_name(a, b, as_dict=True)["hidden"], (a * 2 + b).T)


def test_entries_of_arguments_and_of_outputs(pool: Any) -> None:
    with pytest.raises(Exception, match="local rows: expected 4, got 2"):  # dim 1 of the output has rows here
        pool(SIZE).run(entries_of_another_dim)
    pool(SIZE).run(entries)


def entries_of_another_dim(rank: int) -> None:
    sequence = ShardedSequence(mesh((SIZE,), ("cp",)), Striped(), length=10)
    module = parallelize(nn.Identity(), sequence.mesh, {"": GatherOutput(sequence, gradient="sum", dim=1)})
    module(torch.zeros(4, 2))


class Plain(nn.Module):
    def forward(self, x: Tensor, y: Tensor | None = None) -> Any:
        return x, 1


def refusals(rank: int) -> None:
    axis = mesh((SIZE,), ("cp",))
    sequence = ShardedSequence(axis, length=12)
    with pytest.raises(ArgumentError, match=r"a tuple of argument names or positions, got x; such as"):
        ShardInput(sequence, "x")  # type: ignore[arg-type]
    with pytest.raises(ArgumentError, match=r"GatherOutput.gradient: expected 'mean' or 'sum', got 'total'"):
        GatherOutput(sequence, gradient="total")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="gradient"):
        GatherOutput(sequence)  # type: ignore[call-arg]
    with pytest.raises(ArgumentError, match=r"ShardInput.layout: expected a function that returns a Layout"):
        ShardInput(sequence, layout=ZigZag())  # type: ignore[arg-type]
    for inputs in (("z",), (2,), (-1,)):
        with pytest.raises(
            ArgumentError, match=r"ShardInput\(Plain\): expected a forward argument .* got \['x', 'y'\]"
        ):
            parallelize(Plain(), axis, {"": ShardInput(sequence, inputs)})
    module = parallelize(Plain(), axis, {"": ShardInput(sequence, ("y",))})
    with pytest.raises(ArgumentError, match="apply once"):
        parallelize(module, axis, {"": ShardInput(sequence)})
    expected = r"one of \('y',\) in the call, got 1 positional arguments and \['y'\] by name"
    with pytest.raises(ArgumentError, match=expected):
        module(torch.zeros(1, 12), y=None)
    with pytest.raises(ArgumentError, match="length of dim 1: expected 12, got 9"):
        module(torch.zeros(1, 12), torch.zeros(1, 9))
    for outputs, said in ((None, "one tensor as output, got tuple"), ((1,), r"a tensor at 1, got tensors at \[0\]")):
        module = parallelize(Plain(), axis, {"": GatherOutput(sequence, gradient="sum", outputs=outputs)})
        with pytest.raises(ArgumentError, match=said):
            module(torch.zeros(1, 4))
    model = Model()
    plan = {"layers.*.core": ContextParallel(sequence), "layers.0": ShardInput(ShardedSequence(axis, Striped()))}
    with pytest.raises(ArgumentError, match="sequence: expected one for the root and its cores"):
        parallelize(model, axis, plan)
    with pytest.raises(Exception, match="cannot be pickled"):
        import pickle

        pickle.dumps(module)


def test_refusals(pool: Any) -> None:
    pool(SIZE).run(refusals)


def unlike_inputs(rank: int, what: str) -> str:
    sequence = ShardedSequence(mesh((SIZE,), ("cp",)))
    module = parallelize(nn.Identity(), sequence.mesh, {"": ShardInput(sequence)})
    given = {"rows": torch.zeros(1, 12 + 6 * (rank == 1)), "content": torch.arange(12)[None] + (rank == 2)}.get(what)
    if given is None:  # a shape that the module had before, on one rank alone
        module(torch.zeros(1, 12)), module(torch.zeros(1, 18))
        given = torch.zeros(1, 12 + 6 * (rank == 1))
    with pytest.raises(RankMismatchError) as raised:
        module(given)
    return str(raised.value)


@pytest.mark.parametrize("what", ["rows", "content", "rows of before"])
def test_inputs_that_differ_between_ranks(pool: Any, what: str) -> None:
    for said in pool(SIZE).run(unlike_inputs, what):
        assert "the same input on every cp rank" in said


def refused_later(rank: int) -> None:
    """In check mode, and in a call of a shape that all ranks have had, one rank's layout is refused."""
    sequence, layouts = ShardedSequence(mesh((SIZE,), ("cp",))), [Striped(), Striped() if rank != 1 else None]
    style = ShardInput(sequence, layout=lambda *_: layouts.pop(0))
    module = parallelize(nn.Identity(), sequence.mesh, {"": style})
    with check_mode():
        module(torch.zeros(1, 12))
        module(torch.zeros(1, 12))


def test_a_later_refusal_is_heard_in_check_mode(pool: Any) -> None:
    errors = pool(SIZE).run_expecting_error(refused_later, timeout=20.0)
    assert [error.type for error in errors] == [
        "ArgumentError" if rank == 1 else "RankMismatchError" for rank in range(SIZE)
    ]
    assert all("a function that returns a Layout" in error.message for error in errors)


def of_root(rank: int, same: bool) -> Tensor:
    """A root in the layout of the batch, and a part that is gathered in this or another one."""
    sequence = ShardedSequence(mesh((SIZE,), ("cp",)), length=24)
    layouts = {0: Striped(), 1: Contiguous()}
    model = parallelize(
        Model(),
        sequence.mesh,
        {
            "": ShardedModel(sequence, layout=lambda documents, **others: documents),
            "layers.*.core": ContextParallel(sequence, layout=lambda q, k, v, documents: documents),
            "layers.1": GatherOutput(
                sequence, gradient="sum", layout=lambda x, rope, documents: documents if same else layouts[1]
            ),
        },
    )
    return model(batch(2, 24)["tokens"], documents=layouts[0]).detach()


def test_the_layout_of_a_batch(pool: Any) -> None:
    want = of_one(24)["logits"]
    for got in pool(SIZE).run(of_root, True):
        torch.testing.assert_close(got, want, rtol=1e-10, atol=1e-10)
    with pytest.raises(Exception, match="got contiguous in GatherOutput, striped at the root"):
        pool(SIZE).run(of_root, False)


def first_step(rank: int, gradient: Any, end: str = "head") -> list[str]:
    """What is said of a step, also of the loss of "sum" where nobody knows whether it is a share."""
    sequence = ShardedSequence(mesh((SIZE,), ("cp",)))
    model = part_of_model(sequence, end, gradient)
    optimizer, given = torch.optim.SGD(model.parameters(), lr=0.1), batch(2, 24)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        logits = model(given["tokens"], torch.arange(24))
        F.cross_entropy(logits.flatten(0, 1), given["labels"].flatten()).backward()
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad)
        optimizer.step()
    return [str(x.message) for x in caught if "cp_mesh" in str(x.message)]


def test_the_guard_knows_them(pool: Any) -> None:
    assert pool(SIZE).run(first_step, "mean") == [[]] * SIZE
    for said in pool(SIZE).run(first_step, "sum"):
        assert len(said) == 1 and "a loss that is not cp_mesh.cross_entropy" in said[0]


def compiled(rank: int) -> list[Tensor]:
    sequence = ShardedSequence(mesh((2,), ("cp",)))
    model = part_of_model(sequence, "norm", "sum")
    for layer in model.layers:
        layer.compile(backend="aot_eager")
    model.norm.compile(backend="aot_eager")
    logits = model(batch(2, 24)["tokens"], torch.arange(24))
    (logits.square().sum() / 2).backward()
    dist.all_reduce(model.embedding.weight.grad)
    return [logits.detach(), model.embedding.weight.grad]


@pytest.mark.full
def test_compiled_parts(pool: Any) -> None:
    model = Model(DenseCore)
    logits = model(batch(2, 24)["tokens"], torch.arange(24))
    logits.square().sum().backward()
    for got in pool(2).run(compiled):
        torch.testing.assert_close(got, [logits.detach(), model.embedding.weight.grad], rtol=1e-10, atol=1e-10)


def verified(rank: int) -> str:
    sequence = ShardedSequence(mesh((2,), ("cp",)), length=24)
    plan = {
        "layers.*.core": ContextParallel(sequence),
        "layers.0": ShardInput(sequence, (0, "rope")),
        "layers.1": ShardInput(sequence, ("rope",)),
        "head": GatherOutput(sequence, gradient="mean"),
    }
    given = batch(2, 24)
    arguments = {"tokens": given["tokens"], "labels": given["labels"], "positions": torch.arange(24)}
    report = cp_mesh.verify_model(Model, plan, arguments, sequence.mesh, mask=Mask())
    return str(report) if not report.passed else ""


@pytest.mark.full
def test_verify_model_takes_such_a_plan(pool: Any) -> None:
    assert pool(2).run(verified) == ["", ""]
