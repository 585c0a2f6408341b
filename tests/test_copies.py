"""Copies of modules that have a style: with the style, on the copy's own attributes, or refused."""

from __future__ import annotations

import copy
import inspect
import io
import pickle
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from inside import inner, replaced
from ranks import mesh, on_ranks
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.nn.utils import parametrize

import cp_mesh
from cp_mesh import ArgumentError, ContextParallel, Mask, ShardedModel, ShardedSequence, UnsupportedError, parallelize

WATCH = inner("wrap", "WATCH")

H, S, D = 2, 16, 4


class Core(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale, self.gain = nn.Parameter(torch.ones(1)), 1.0

    def forward(self, q: Tensor, k: Tensor, v: Tensor, more: int = 0) -> Tensor:
        """A core."""
        return self.gain * self.scale * F.scaled_dot_product_attention(q, k, v, is_causal=True)


class OwnState(Core):
    """Pickled and copied through a state that leaves out what it does not know."""

    def __getstate__(self) -> dict[str, Any]:
        return {"parameters": self._parameters, "gain": self.gain}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__()
        self.gain, self.scale = state["gain"], nn.Parameter(state["parameters"]["scale"].detach().clone())


class OwnReduce(Core):
    def __reduce__(self) -> Any:
        return OwnReduce, (), {"gain": self.gain}


class OwnCopies(Core):
    def __copy__(self) -> OwnCopies:
        twin = OwnCopies()
        twin.gain, twin.scale = self.gain, self.scale
        return twin

    def __deepcopy__(self, memo: dict[int, Any]) -> OwnCopies:
        twin = OwnCopies()
        twin.gain = self.gain
        return twin


class Model(nn.Module):
    def __init__(self, core: nn.Module) -> None:
        super().__init__()
        self.embedding, self.core = nn.Embedding(7, H * D), core

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens).unflatten(-1, (H, D)).transpose(1, 2)
        return self.core(x, x, x).transpose(1, 2).flatten(2)


def make(core: nn.Module) -> Model:
    axis = mesh((2,), ("cp",))
    torch.manual_seed(0)
    sequence, model = ShardedSequence(axis), Model(core)
    return parallelize(model, axis, {"": ShardedModel(sequence, positions=None), "core": ContextParallel(sequence)})


KINDS = (Core, OwnState, OwnReduce, OwnCopies)
TOKENS = torch.arange(2 * S).view(2, S) % 7
REFUSED = "apply once"


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("how", ["copy", "deepcopy"])
@on_ranks(2)
def test_copies_have_the_style_and_their_own_attributes(kind: type[Core], how: str) -> None:
    model = make(kind())
    want = model(TOKENS)
    assert want.shape[1] == S // 2
    twin = getattr(copy, how)(model)
    if how == "copy":
        twin._modules = dict(twin._modules)
        twin.core = copy.copy(model.core)
    torch.testing.assert_close(twin(TOKENS), want)
    twin.core.gain = 3.0
    torch.testing.assert_close(twin(TOKENS), 3 * want)
    torch.testing.assert_close(model(TOKENS), want)
    assert (twin.core.scale is model.core.scale) == (how == "copy" and kind in (Core, OwnCopies))
    for again in (twin, copy.deepcopy(twin)):
        with pytest.raises(ArgumentError, match=REFUSED):
            parallelize(again, mesh((2,), ("cp",)), {"core": ContextParallel(ShardedSequence(mesh((2,), ("cp",))))})


@pytest.mark.parametrize("kind", KINDS)
@on_ranks(2)
def test_pickling_is_refused(kind: type[Core]) -> None:
    model = make(kind())
    for module in (model, model.core):
        for save in (pickle.dumps, lambda x: torch.save(x, io.BytesIO())):
            with pytest.raises(UnsupportedError, match=r"holds process groups; save model.state_dict\(\), then build"):
                save(module)
    state = io.BytesIO()
    torch.save(model.state_dict(), state)
    state.seek(0)
    assert list(torch.load(state)) == list(Model(kind()).state_dict())


@on_ranks(2)
def test_a_style_does_not_show() -> None:
    """What other code sees of a module is what it saw before."""
    plain, core = Model(Core()), Core()
    model = make(core)
    assert isinstance(core, Core) and isinstance(model, Model) and model.core is core
    for mine, theirs in ((model, plain), (core, plain.core)):
        assert inspect.signature(mine.forward) == inspect.signature(theirs.forward)
        for name in ("__name__", "__qualname__", "__module__", "__doc__"):
            assert getattr(type(mine), name) == getattr(type(theirs), name)
        assert repr(mine) == repr(theirs) and mine.forward.__doc__ == theirs.forward.__doc__
    assert type(make(Core()).core) is type(core)  # one class for torch.compile to know
    assert list(model.state_dict()) == list(plain.state_dict())
    assert [name for name, _ in model.named_modules()] == [name for name, _ in plain.named_modules()]
    assert "forward" not in vars(core)


@on_ranks(2)
def test_forwards_of_instances_still_run() -> None:
    """Set before the style, and after it, as hooks of other libraries do."""
    want = make(Core())(TOKENS)
    before, after = Core(), Core()
    forward = before.forward
    before.forward = lambda *args: 2 * forward(*args)
    first, second = make(before), make(after)
    inner = after.forward
    after.forward = lambda *args: 2 * inner(*args)
    for model in (first, second, copy.deepcopy(first)):
        torch.testing.assert_close(model(TOKENS), 2 * want)


@on_ranks(2)
def test_classes_on_top_and_in_place_of_the_styles(axis: Any) -> None:
    """Other code that changes a module's class, after the style: on top of its class, or in its place."""
    model = make(Core())
    want = model(TOKENS)
    parametrize.register_parametrization(model.core, "scale", nn.Identity())
    torch.testing.assert_close(model(TOKENS), want)
    fully_shard(model.core, mesh=axis)
    fully_shard(model, mesh=axis)
    cp_mesh.sum_gradients(model)
    assert isinstance(model, FSDPModule) and isinstance(model, Model)
    torch.testing.assert_close(model(TOKENS), want)
    with pytest.raises(AssertionError, match="deepcopy"):
        copy.deepcopy(model)
    replaced = make(Core())
    replaced.core.__class__ = OwnState
    with pytest.raises(ArgumentError, match="OwnState with ContextParallel: expected the class that the style gave it"):
        replaced(TOKENS)
    steps = nn.Sequential(Core())
    parallelize(steps, axis, {"": ContextParallel(ShardedSequence(axis), mask=Mask())})
    with pytest.raises(ArgumentError, match="expected a module to which a style was applied"):
        steps[:1](*torch.ones(3, 1, H, S, D))


@on_ranks(2)
def test_what_is_only_watched_can_be_pickled() -> None:
    """A module that has no style, but was compiled below a root, can be pickled: it is read back as a plain one."""
    model = make(Core())
    model.head = nn.Linear(3, 3)
    model.head.compile(backend="eager")
    model(TOKENS)
    assert replaced(model.head, WATCH) is not None
    x = torch.randn(2, 3)
    plain = pickle.loads(pickle.dumps(model.head))
    assert type(plain) is nn.Linear and replaced(plain, WATCH) is None
    torch.testing.assert_close(plain(x), model.head(x))
    twin = copy.deepcopy(model.head)
    assert replaced(twin, WATCH) is not None
    with pytest.raises(UnsupportedError, match="cannot be pickled"):
        pickle.dumps(model)
