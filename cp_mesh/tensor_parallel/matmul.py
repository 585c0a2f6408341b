"""What linears over tp share: products in parts, beside which rows travel, and the checks before the first collective.

A gather for a product begins with the product of this rank's rows, which needs none; the rows of others follow as they
come. Products that are summed over tp begin with the rows of others, which travel while this rank's own are computed.
`overlap.py` says where this pays, and over what rows travel: functional collectives, which have a stream of their own
and are waited for where their result is read, or symmetric memory.

The linears are ops, so that compiled code keeps this order, and neither merges the backward's gather with the forward's
nor keeps what a policy of memory let go.

Shapes: B batch rows, S rows of the sequence, C features of the input, O features of an output on this rank.
"""

import copy
from collections.abc import Hashable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from cp_mesh._torch import in_transform, resolve_group, spec_of_dtensor
from cp_mesh.call.spec import autocast
from cp_mesh.comm.agreement import refusing
from cp_mesh.comm.fingerprints import fingerprint
from cp_mesh.comm.first_calls import agree_once
from cp_mesh.comm.shards import Shards
from cp_mesh.errors import UnsupportedError, refuse


def cast_alike(*given: Tensor) -> tuple[Tensor, ...]:
    """As autocast does it; refuse dtypes that differ then."""
    cast = tuple(autocast(*given))
    if len(dtypes := {tensor.dtype for tensor in cast}) > 1:
        hint = "cast the input, or use autocast"
        refuse("linears", "inputs and weights of one dtype", sorted(map(str, dtypes)), hint)
    return cast


def part_of(parameter: Any) -> Any:
    """This rank's part of a DTensor, below autograd; anything else is returned as it is."""
    if not isinstance(parameter, DTensor):
        return parameter
    with torch.no_grad():
        return parameter.to_local()


def placed_as(grad: Tensor, spec: Any) -> Tensor:
    """The gradient of a parameter of which `part_of` took a part, as a DTensor; without a spec as it is.

    ``to_local()`` and its backward do the same, and take the host longer than the linear.
    """
    if spec is None:
        return grad
    stride = (spec.shape[-1], 1)[-len(spec.shape) :]  # of a weight or a bias
    if torch.is_grad_enabled() or spec.stride != stride:  # by create_graph; of a weight that was transposed
        options: dict[str, Any] = {"run_check": False, "shape": spec.shape, "stride": stride}
        return DTensor.from_local(grad, spec.mesh, spec.placements, **options)
    return DTensor(grad, copy.copy(spec), requires_grad=False)  # as PyTorch does it, which may write to specs


def spec_of(parameter: Any) -> Any:
    """What `placed_as` is told of a parameter, without keeping it."""
    return spec_of_dtensor(parameter) if isinstance(parameter, DTensor) else None


def refuse_transforms(what: str) -> None:
    """Refuse what differentiates otherwise than backward() does."""
    if not torch.compiler.is_compiling() and in_transform():
        hint = "use backward() or torch.autograd.grad"
        refuse(f"cp_mesh: {what}", "no transform of torch.func", "vmap, grad or the like", hint, UnsupportedError)


def flat_rows(x: Tensor) -> Tensor:
    return x.reshape(-1, x.shape[-1])


def as_batch(x: Tensor) -> Tensor:
    """[B, rows, D]"""
    return x.reshape(-1, *x.shape[-2:])


def write_product(x: Tensor, matrix: Tensor, out: Tensor, bias: Tensor | None = None) -> None:
    """out [B, n, M] = x [B, n, K] @ matrix [K, M] + bias [M]."""
    if len(x) > 1:
        torch.bmm(x, matrix.expand(len(x), -1, -1), out=out)
        if bias is not None:
            out += bias
    elif bias is None:
        torch.mm(x[0], matrix, out=out[0])
    else:
        torch.addmm(bias, x[0], matrix, out=out[0])


def add_product(out: Tensor, x: Tensor, matrix: Tensor) -> None:
    """out [B, n, M] += x [B, n, K] @ matrix [K, M]."""
    if len(x) > 1:
        out.baddbmm_(x, matrix.expand(len(x), -1, -1))
    else:
        out[0].addmm_(x[0], matrix)


def graded_names(names: Sequence[str], tensors: Sequence[Tensor | None]) -> str:
    """Names of those that require a gradient; which collectives a backward runs depends on them."""
    given = zip(names, tensors, strict=True) if torch.is_grad_enabled() else ()
    return ", ".join([name for name, x in given if x is not None and x.requires_grad]) or "none"


def check_rows(
    what: str,
    x: Tensor,
    num_rows: int,
    group_name: str,
    sharded: bool,
    *kind: Hashable,
    graded: str,
    alike: Mapping[str, Tensor] | None = None,
    features: int | None = None,
    transport: str = "auto",
) -> None:
    """Before the first collective of a call; the first one of a kind is compared over tp.

    ``graded``: what `graded_names` returns of the call's tensors. ``alike``: tensors that must be equal on all ranks.
    ``features``: in the place of those of x, where these may differ between ranks.
    """
    group: dist.ProcessGroup = resolve_group(group_name)
    with refusing(group_name, "tp"):
        expected = Shards(num_rows, group_name).own if sharded else num_rows
        if x.shape[-2] != expected:
            hint = "pass DTensors, whose shape says how many rows there are, where tp does not divide them"
            refuse(f"{what}: input", f"{expected} of {num_rows} rows on this rank", x.shape[-2], hint)
    shape, features = tuple(x.shape[:-2]), x.shape[-1] if features is None else features
    agree_once(
        group,
        (what, sharded, x.ndim, features, x.dtype, transport, graded, *kind),
        lambda: {
            **{"call": what, "rows of the sequence": f"{num_rows}", "batch": f"{shape}", "features": f"{features}"},
            **{"dtype": f"{x.dtype}", "tensors that require a gradient": graded},
            **{"transport": transport, "kind": f"{kind}"},
            **{name: fingerprint(y) for name, y in (alike or {}).items()},
        },
        "tp",
    )


def gradients_of_parameters(douts: Sequence[Tensor], whole: Tensor | None, wants: Sequence[bool]) -> list[Tensor]:
    """Gradients of each weight and of each bias, those that are wanted."""
    grads, (of_weights, of_biases) = [], (wants[: len(douts)], wants[len(douts) :])
    if any(of_weights):
        assert whole is not None
        grads += [
            flat_rows(dout).t() @ flat_rows(whole) for dout, wanted in zip(douts, of_weights, strict=True) if wanted
        ]
    return grads + [flat_rows(dout).sum(0) for dout, wanted in zip(douts, of_biases, strict=True) if wanted]


def refuse_second_backward(ctx: Any, *_: Any) -> None:
    raise UnsupportedError("cp_mesh: linears over tp can be differentiated once; use PyTorch's ColwiseParallel")
