"""Operators that are called past the dispatcher, where nothing would see the call."""

from typing import Any

import pytest
import torch
from inside import inner
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import forward_ad
from torch.utils._python_dispatch import TorchDispatchMode

from cp_mesh import UnsupportedError

Operator = inner("operators", "Operator")

ran: list[Tensor] = []


def double(x: Tensor, others: list[Tensor], times: int) -> list[Tensor]:
    ran.append(x)
    return [(y * (2 * times)).view(-1) for y in (x, *others)]


def empty(x: Tensor, others: list[Tensor], times: int) -> list[Tensor]:
    return [torch.empty_like(y).view(-1) for y in (x, *others)]


def refuse(ctx: Any, *_: Any) -> Any:
    raise RuntimeError("no gradient")


double_op = Operator("double_in_tests", double, empty, refuse)


class Seen(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.ops: list[Any] = []

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.ops.append(op)
        return op(*args, **(kwargs or {}))


@pytest.fixture
def through_dispatcher(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Calls that went the whole way."""
    calls: list[Any] = []
    overload = double_op.overload
    monkeypatch.setattr(double_op, "overload", lambda *given: calls.append(given) or overload(*given))
    return calls


def call(x: Tensor) -> list[Tensor]:
    found: list[Tensor] = double_op(x, [x + 1], 3)
    return found


@pytest.mark.parametrize("graded", [False, True])
def test_tangents_are_refused_and_not_dropped(graded: bool) -> None:
    with forward_ad.dual_level(), torch.set_grad_enabled(graded):
        x = torch.arange(3.0)
        call(x)
        with pytest.raises(UnsupportedError, match=r"double_in_tests.*inputs without tangents.*backward\(\)"):
            double_op(x, [forward_ad.make_dual(x, torch.ones_like(x))], 3)


def test_nothing_sees_a_plain_call(through_dispatcher: list[Any]) -> None:
    x = torch.arange(3.0, requires_grad=True)
    with torch.no_grad():
        outs = call(x)
    assert not through_dispatcher
    assert [y.tolist() for y in outs] == [[0, 6, 12], [6, 12, 18]]


def test_a_result_is_nobodys_view() -> None:
    """Of a view that is made in a node of autograd, writing in place would be refused."""

    class Node(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> tuple[Tensor, ...]:
            return tuple(call(x))

        @staticmethod
        def backward(ctx: Any, *grads: Tensor) -> Tensor:
            return grads[0] * 6 + grads[1] * 6

    x = torch.ones(2, requires_grad=True)
    out, _ = Node.apply(x)
    out.mul_(2).sum().backward()
    assert x.grad is not None and x.grad.tolist() == [12, 12]


def test_a_mode_sees_the_operator(through_dispatcher: list[Any]) -> None:
    with torch.no_grad(), Seen() as seen:
        call(torch.ones(2))
    assert through_dispatcher and torch.ops.cp_mesh.double_in_tests.default in seen.ops


def test_fake_tensors_run_the_fake() -> None:
    ran.clear()
    with torch.no_grad(), FakeTensorMode():
        assert call(torch.ones(2, 5))[1].shape == (10,)
    assert not ran


def test_a_list_is_looked_into(through_dispatcher: list[Any]) -> None:
    """A kind of tensor among others, as a weight that is a DTensor."""

    class Kind(Tensor):
        pass

    with torch.no_grad():
        double_op(torch.ones(2), [torch.ones(2).as_subclass(Kind)], 1)
    assert through_dispatcher


def test_gradients_are_refused(through_dispatcher: list[Any]) -> None:
    out, _ = call(torch.ones(2, requires_grad=True))
    with pytest.raises(RuntimeError, match="no gradient"):
        out.sum().backward()


def test_compiled_code_holds_the_operator() -> None:
    graphs: list[Any] = []

    def backend(graph: Any, inputs: Any) -> Any:
        graphs.extend(node.target for node in graph.graph.nodes)
        return graph.forward

    with torch.no_grad():
        out = torch.compile(lambda x: call(x)[0], backend=backend, fullgraph=True)(torch.ones(2))
    assert out.tolist() == [6, 6] and torch.ops.cp_mesh.double_in_tests.default in graphs


def test_torch_checks_it() -> None:
    given = torch.ones(3, requires_grad=True), [torch.ones(2)], 2
    torch.library.opcheck(double_op.overload, given, test_utils=("test_schema", "test_faketensor"))
