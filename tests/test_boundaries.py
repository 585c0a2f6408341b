"""`ShardInput` and `GatherOutput`: a model that is sharded in part has the gradients of one rank."""

from __future__ import annotations

import copy
import functools
import pickle
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from model import Core, DenseCore, Model, batch
from ranks import on_ranks, refused
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


def plan_of(sequence: ShardedSequence) -> dict[str, Any]:
    return {
        "layers.*.core": ContextParallel(sequence),
        "layers.0": ShardInput(sequence, (0, "rope")),
        "layers.1": ShardInput(sequence, ("rope",)),  # which the model hands to each layer
    }


def part_of_model(sequence: ShardedSequence, end: str, gradient: Any) -> Any:
    """Whole tokens and embeddings, layers of this rank's rows, and from the end of ``end`` on whole rows again."""
    model = parallelize(Model(), sequence.mesh, plan_of(sequence))
    return parallelize(model, sequence.mesh, {end: GatherOutput(sequence, gradient=gradient)})


@functools.cache
def of_one(length: int) -> dict[str, Tensor]:
    """Logits and gradients of one rank."""
    model, given = Model(DenseCore), batch(2, length)
    logits = model(given["tokens"], torch.arange(length))
    F.cross_entropy(logits.flatten(0, 1), given["labels"].flatten()).backward()
    return {"logits": logits.detach()} | {name: x.grad for name, x in model.named_parameters()}


def near(got: Tensor, want: Tensor, what: str = "") -> None:
    torch.testing.assert_close(got, want, rtol=1e-10, atol=1e-10, msg=lambda text: f"{what}: {text}")


@pytest.mark.parametrize(
    ("layout", "length", "end", "gradient", "options"),
    [
        (ZigZag(), 24, "head", "mean", {}),
        (Striped(), 23, "norm", "sum", {}),  # padded; the head computes whole rows on every rank
        (Contiguous(), 23, "layers.1", "sum", {"pad": False}),
        (ZigZag(), 22, "head", "mean", {"pad": False}),
        pytest.param(ZigZag(), 24, "norm", "sum", {"compiled": True}, marks=pytest.mark.full),
    ],
    ids=str,
)
@on_ranks(SIZE)
def test_gradients_are_those_of_one_rank(
    axis: Any, layout: Layout, length: int, end: str, gradient: str, options: dict[str, Any]
) -> None:
    """Logits, and gradients after a plain sum; every rank computes the same loss of the whole."""
    sequence = ShardedSequence(axis, layout, length=length, pad=options.get("pad", True))
    model, given = part_of_model(sequence, end, gradient), batch(2, length)
    for layer in model.layers:
        if "pad" in options:  # recomputed in the backward, where no forward of a root runs
            layer.forward = functools.partial(checkpoint, layer.forward, use_reentrant=False)
        if "compiled" in options:
            layer.compile(backend="aot_eager")
    logits = model(given["tokens"], torch.arange(length))
    loss = F.cross_entropy(logits.flatten(0, 1), given["labels"].flatten())
    (loss if gradient == "mean" else loss / sequence.cp_size).backward()
    want = of_one(length)
    near(logits.detach(), want["logits"])
    for name, parameter in model.named_parameters():
        dist.all_reduce(parameter.grad)
        near(parameter.grad, want[name.replace("_orig_mod.", "")], name)


def warned(fn: Callable[[], Any]) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        fn()
    return [str(x.message) for x in caught if "cp_mesh" in str(x.message)]


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


@on_ranks(SIZE)
def test_counted_positions_are_warned_of(axis: Any) -> None:
    for given in (False, True):
        plan = {
            "block": ShardInput(ShardedSequence(axis), (0, "positions")),
            "block.core": ContextParallel(ShardedSequence(axis)),
        }
        model = parallelize(AroundCounting(), axis, plan)
        said = warned(lambda: model(torch.zeros(1, 24, 4, dtype=torch.float64), given))  # noqa: B023
        if given:
            assert not said
        else:
            assert len(said) == 1 and "counts 8 positions from 0" in said[0] and "the inputs of ShardInput" in said[0]


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


@on_ranks(SIZE)
def test_entries_of_arguments_and_of_outputs(axis: Any) -> None:
    sequence = ShardedSequence(axis, Striped(), length=10)
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
    another_dim = parallelize(nn.Identity(), axis, {"": GatherOutput(sequence, gradient="sum", dim=1)})
    with refused("local rows: expected 4, got 2"):  # dim 1 of the output has rows here
        another_dim(torch.zeros(4, 2))


class Plain(nn.Module):
    def forward(self, x: Tensor, y: Tensor | None = None) -> Any:
        return x, 1


@on_ranks(SIZE)
def test_refusals(axis: Any) -> None:
    sequence = ShardedSequence(axis, length=12)
    with refused(r"a tuple of argument names or positions, got x; such as"):
        ShardInput(sequence, "x")  # type: ignore[arg-type]
    with refused(r"GatherOutput.gradient: expected 'mean' or 'sum', got 'total'"):
        GatherOutput(sequence, gradient="total")  # type: ignore[arg-type]
    with refused("gradient", TypeError):
        GatherOutput(sequence)  # type: ignore[call-arg]
    with refused(r"ShardInput.layout: expected a function that returns a Layout"):
        ShardInput(sequence, layout=ZigZag())  # type: ignore[arg-type]
    for inputs in (("z",), (2,), (-1,)):
        with refused(r"ShardInput\(Plain\): expected a forward argument .* got \['x', 'y'\]"):
            parallelize(Plain(), axis, {"": ShardInput(sequence, inputs)})
    module = parallelize(Plain(), axis, {"": ShardInput(sequence, ("y",))})
    with refused("apply once"):
        parallelize(module, axis, {"": ShardInput(sequence)})
    with refused(r"one of \('y',\) in the call, got 1 positional arguments and \['y'\] by name"):
        module(torch.zeros(1, 12), y=None)
    with refused("length of dim 1: expected 12, got 9"):
        module(torch.zeros(1, 12), torch.zeros(1, 9))
    for outputs, said in ((None, "one tensor as output, got tuple"), ((1,), r"a tensor at 1, got tensors at \[0\]")):
        module = parallelize(Plain(), axis, {"": GatherOutput(sequence, gradient="sum", outputs=outputs)})
        with refused(said):
            module(torch.zeros(1, 4))
    plan = {"layers.*.core": ContextParallel(sequence), "layers.0": ShardInput(ShardedSequence(axis, Striped()))}
    with refused("sequence: expected one for the root and its cores"):
        parallelize(Model(), axis, plan)
    with refused("cannot be pickled", Exception):
        pickle.dumps(module)


@pytest.mark.parametrize("what", ["rows", "content", "rows of before"])
@on_ranks(SIZE)
def test_inputs_that_differ_between_ranks(rank: int, axis: Any, what: str) -> None:
    module = parallelize(nn.Identity(), axis, {"": ShardInput(ShardedSequence(axis))})
    if what == "rows of before":  # a shape that the module had before, on one rank alone
        module(torch.zeros(1, 12)), module(torch.zeros(1, 18))
    given = torch.arange(12)[None] + (rank == 2) if what == "content" else torch.zeros(1, 12 + 6 * (rank == 1))
    with pytest.raises(RankMismatchError, match="the same input on every cp rank"):
        module(given)


@on_ranks(SIZE)
def test_a_later_refusal_is_heard_in_check_mode(rank: int, axis: Any) -> None:
    """In a call of a shape that all ranks have had, one rank's layout is refused."""
    layouts: list[Any] = [Striped(), Striped() if rank != 1 else None]
    style = ShardInput(ShardedSequence(axis), layout=lambda *_: layouts.pop(0))
    module = parallelize(nn.Identity(), axis, {"": style})
    with check_mode():
        module(torch.zeros(1, 12))
        error = ArgumentError if rank == 1 else RankMismatchError
        with pytest.raises(error, match="a function that returns a Layout"):
            module(torch.zeros(1, 12))


@on_ranks(SIZE)
def test_the_layout_of_a_batch(axis: Any) -> None:
    """A root in the layout of the batch, and a part that is gathered in this or another one."""
    sequence = ShardedSequence(axis, length=24)
    for same in (True, False):
        of_part = lambda x, rope, documents: documents if same else Contiguous()  # noqa: B023, E731
        plan = {
            "": ShardedModel(sequence, layout=lambda documents, **others: documents),
            "layers.*.core": ContextParallel(sequence, layout=lambda q, k, v, documents: documents),
            "layers.1": GatherOutput(sequence, gradient="sum", layout=of_part),
        }
        model = parallelize(Model(), axis, plan)
        if same:
            near(model(batch(2, 24)["tokens"], documents=Striped()).detach(), of_one(24)["logits"])
        else:
            with pytest.raises(ArgumentError, match="got contiguous in GatherOutput, striped at the root"):
                model(batch(2, 24)["tokens"], documents=Striped())


@on_ranks(SIZE)
def test_the_guard_knows_them(axis: Any) -> None:
    """Nothing is said of a step, but of the loss of "sum", of which nobody knows whether it is a share."""
    for gradient in ("mean", "sum"):
        model = part_of_model(ShardedSequence(axis), "head", gradient)
        optimizer, given = torch.optim.SGD(model.parameters(), lr=0.1), batch(2, 24)

        def step() -> None:
            logits = model(given["tokens"], torch.arange(24))  # noqa: B023
            F.cross_entropy(logits.flatten(0, 1), given["labels"].flatten()).backward()  # noqa: B023
            for parameter in model.parameters():  # noqa: B023
                dist.all_reduce(parameter.grad)
            optimizer.step()  # noqa: B023

        said = warned(step)
        assert len(said) == (gradient == "sum") and all("not cp_mesh.cross_entropy" in text for text in said)


@pytest.mark.full
@on_ranks(2)
def test_verify_model_takes_such_a_plan(axis: Any) -> None:
    sequence, given = ShardedSequence(axis, length=24), batch(2, 24)
    arguments = {"tokens": given["tokens"], "labels": given["labels"], "positions": torch.arange(24)}
    plan = plan_of(sequence) | {"head": GatherOutput(sequence, gradient="mean")}
    report = cp_mesh.verify_model(Model, plan, arguments, axis, mask=Mask())
    assert report.passed, report
