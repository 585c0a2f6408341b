"""Operators of torch.library that take the host little time.

`torch.library.custom_op` makes operators that look at their arguments by the schema in every call, and copy them. Those
made here are called past PyTorch's dispatcher unless autograd, a mode of its dispatch or a subclass would see the call,
such as a policy of memory. Modes of torch functions and profilers see what the operator does, and not its name. For
what is called once a step it does not matter: these stay custom_ops.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from cp_mesh._torch import (
    below_autograd,
    forward_level,
    in_transform,
    num_dispatch_modes,
    untraced,
)
from cp_mesh.errors import UnsupportedError, refuse

_PLAIN = (Tensor, torch.nn.Parameter)

library = torch.library.Library("cp_mesh", "FRAGMENT")


def is_seen(given: Iterable[Any], graded: bool = False) -> bool:
    """Whether an operator's call with these has to be dispatched: for autograd, a mode, a transform, a kind of tensor.

    Args:
        given: the arguments; of lists of tensors, the tensors.
        graded: whether the grad mode is not asked: the caller handles autograd.
    """
    if (torch.is_grad_enabled() and not graded) or num_dispatch_modes() > 0 or in_transform():
        return True
    for x in given:  # noqa: SIM110 - a generator would be a call for each
        if isinstance(x, Tensor) and (type(x) not in _PLAIN or x.is_neg()):  # which the dispatcher resolves
            return True
    return False


def refuse_tangents(what: str, given: Iterable[Any]) -> None:
    """Where nobody wants a backward, PyTorch would drop the tangents of forward-mode derivatives, and say nothing."""
    tensors = (x for x in given if isinstance(x, Tensor))
    if forward_level() >= 0 and any(forward_ad.unpack_dual(x).tangent is not None for x in tensors):
        refuse(what, "inputs without tangents", "forward-mode derivatives", "use backward()", UnsupportedError)


class Operator:
    """An operator ``torch.ops.cp_mesh.<name>``, whose results are new tensors.

    Args:
        name: of the operator.
        function: what it computes, of the annotated types that `torch.library.infer_schema` knows.
        fake: empty results, of the same arguments.
        refuse_backward: raises where somebody differentiates what it returns, as a backward of `register_autograd`.
    """

    def __init__(
        self,
        name: str,
        function: Callable[..., Any],
        fake: Callable[..., Any],
        refuse_backward: Callable[..., Any],
    ) -> None:
        schema = torch.library.infer_schema(function, mutates_args=())
        # results lie in memory as the inputs do: Inductor may not choose other strides for these than the fakes saw
        library.define(name + schema, tags=(torch.Tag.pt2_compliant_tag, torch.Tag.needs_exact_strides))
        library.impl(name, untraced(function), "CompositeExplicitAutograd")
        torch.library.register_fake(f"cp_mesh::{name}", fake, lib=library)
        torch.library.register_autograd(f"cp_mesh::{name}", refuse_backward, lib=library)
        self.function, self.overload = function, getattr(torch.ops.cp_mesh, name).default

    def __call__(self, *given: Any) -> Any:
        tensors = _tensors(given)
        if torch.compiler.is_compiling():
            return self.overload(*given)
        refuse_tangents(str(self.overload), tensors)
        if is_seen(tensors):
            return self.overload(*given)
        # Views that are made inside are nobody's: a result that is one can be written in place.
        with below_autograd():
            return self.function(*given)


def _tensors(given: Sequence[Any]) -> list[Any]:
    found: list[Any] = []
    for x in given:
        found.extend(x) if isinstance(x, list | tuple) else found.append(x)
    return found
