"""Operators of torch.library with little host overhead.

Operators of `torch.library.custom_op` check and copy their arguments by the schema in every call. Those made here
bypass PyTorch's dispatcher unless autograd, a dispatch mode (such as a checkpoint policy) or a tensor subclass would
intercept the call. Torch function modes and profilers then see the calls inside of the operator, but not its name.
Operators that are called once a step stay custom_ops, as their overhead does not matter.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from cp_mesh._torch import OpOverload, below_autograd, forward_level, in_transform, num_dispatch_modes, untraced
from cp_mesh.errors import UnsupportedError, refuse

PLAIN = (Tensor, torch.nn.Parameter)

library = torch.library.Library("cp_mesh", "FRAGMENT")


def is_seen(given: Iterable[Any], graded: bool = False) -> bool:
    """Whether a call with these arguments must be dispatched: for autograd, a mode, a transform or a subclass.

    Args:
        given: the arguments, with the tensors of lists in place of the lists.
        graded: True ignores the grad mode, for a caller that handles autograd itself.
    """
    if (torch.is_grad_enabled() and not graded) or num_dispatch_modes() > 0 or in_transform():
        return True
    for x in given:  # noqa: SIM110 - a generator would be a call for each
        if isinstance(x, Tensor) and (type(x) not in PLAIN or x.is_neg()):  # the dispatcher resolves neg bits
            return True
    return False


def refuse_tangents(what: str, given: Iterable[Any]) -> None:
    """Refuse inputs with forward-mode tangents: if no input requires a gradient, PyTorch would drop them silently."""
    tensors = (x for x in given if isinstance(x, Tensor))
    if forward_level() >= 0 and any(forward_ad.unpack_dual(x).tangent is not None for x in tensors):
        refuse(what, "inputs without tangents", "forward-mode derivatives", "use backward()", UnsupportedError)


def register(schema: str, function: Callable[..., Any], fake: Callable[..., Any]) -> OpOverload:
    """Register an operator by its schema; ``fake`` returns empty results for the same arguments."""
    name = schema.partition("(")[0]
    # results have the memory order of the inputs, so Inductor must not give inputs other strides than the fakes saw
    library.define(schema, tags=(torch.Tag.pt2_compliant_tag, torch.Tag.needs_exact_strides))
    library.impl(name, untraced(function), "CompositeExplicitAutograd")
    torch.library.register_fake(f"cp_mesh::{name}", fake, lib=library)
    return getattr(torch.ops.cp_mesh, name).default


class Operator:
    """An operator ``torch.ops.cp_mesh.<name>``, whose results are new tensors.

    Args:
        name: of the operator.
        function: computes the results; annotated with types that `torch.library.infer_schema` supports.
        fake: returns empty results for the same arguments.
        refuse_backward: raises if the results are differentiated; a backward for `register_autograd`.
    """

    def __init__(
        self, name: str, function: Callable[..., Any], fake: Callable[..., Any], refuse_backward: Callable[..., Any]
    ) -> None:
        schema = torch.library.infer_schema(function, mutates_args=())
        self.function, self.overload = function, register(name + schema, function, fake)
        torch.library.register_autograd(f"cp_mesh::{name}", refuse_backward, lib=library)

    def __call__(self, *given: Any) -> Any:
        tensors = _tensors(given)
        if torch.compiler.is_compiling():
            return self.overload(*given)
        refuse_tangents(str(self.overload), tensors)
        if is_seen(tensors):
            return self.overload(*given)
        # Autograd tracks no view that is made inside, so a result that is a view can be written in place.
        with below_autograd():
            return self.function(*given)


def _tensors(given: Sequence[Any]) -> list[Any]:
    found: list[Any] = []
    for x in given:
        found.extend(x) if isinstance(x, list | tuple) else found.append(x)
    return found
