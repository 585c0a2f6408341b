"""Shared by the tensor-parallel linears: split matmuls that overlap communication, and checks before a collective.

Gather and matmul: this rank's rows are multiplied first, while the rows of other ranks arrive; those follow in order of
arrival. Matmul and reduce-scatter: the rows of other ranks are multiplied first and sent while this rank's own are
computed. `overlap.py` decides where this pays, and over which transport: functional collectives, which have a stream of
their own and are waited for where their result is read, or symmetric memory.

The linears are ops, so that compiled code keeps this order. It then neither merges the backward's gather with the
forward's nor saves tensors that a checkpointing policy dropped.

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
from cp_mesh.comm.agreement import compare, refusing
from cp_mesh.comm.fingerprints import fingerprint
from cp_mesh.comm.shards import Shards
from cp_mesh.errors import UnsupportedError, refuse


def cast_alike(*given: Tensor) -> tuple[Tensor, ...]:
    """The tensors in the autocast dtype; refuses dtypes that still differ then."""
    cast = tuple(autocast(*given))
    if len(dtypes := {tensor.dtype for tensor in cast}) > 1:
        hint = "cast the input, or use autocast"
        refuse("linears", "inputs and weights of one dtype", sorted(map(str, dtypes)), hint)
    return cast


def part_of(parameter: Any) -> Any:
    """This rank's part of a DTensor, without autograd; other values unchanged."""
    if not isinstance(parameter, DTensor):
        return parameter
    with torch.no_grad():
        return parameter.to_local()


def placed_as(grad: Tensor, spec: Any) -> Tensor:
    """The gradient of a parameter's `part_of`, as a DTensor with the parameter's spec; unchanged without a spec.

    ``to_local()`` and its backward do the same, but take more host time than the linear.
    """
    if spec is None:
        return grad
    stride = (spec.shape[-1], 1)[-len(spec.shape) :]  # contiguous, for a weight or a bias
    if torch.is_grad_enabled() or spec.stride != stride:  # create_graph, or a transposed weight
        options: dict[str, Any] = {"run_check": False, "shape": spec.shape, "stride": stride}
        return DTensor.from_local(grad, spec.mesh, spec.placements, **options)
    return DTensor(grad, copy.copy(spec), requires_grad=False)  # a copy, as in PyTorch, which may write to specs


def spec_of(parameter: Any) -> Any:
    """The spec of a DTensor parameter, for `placed_as`, which then need not keep the parameter; else None."""
    return spec_of_dtensor(parameter) if isinstance(parameter, DTensor) else None


def refuse_transforms(what: str) -> None:
    """Refuse transforms of torch.func."""
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
    """Names of the tensors that require a gradient, on which the collectives of the backward depend."""
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
    """Check the rows of a call before its first collective; the first call of a kind is compared over tp.

    ``graded``: `graded_names` of the call's tensors. ``alike``: tensors that must be equal on all ranks.
    ``features``: compared instead of x's feature count, for calls in which that may differ between ranks.
    """
    group: dist.ProcessGroup = resolve_group(group_name)
    with refusing(group):
        expected = Shards(num_rows, group_name).own if sharded else num_rows
        if x.shape[-2] != expected:
            hint = "pass DTensors, whose shape has the number of rows, if tp does not divide it"
            refuse(f"{what}: input", f"{expected} of {num_rows} rows on this rank", x.shape[-2], hint)
    shape, features = tuple(x.shape[:-2]), x.shape[-1] if features is None else features
    compare(
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
    """The wanted gradients of each weight and of each bias."""
    grads, (of_weights, of_biases) = [], (wants[: len(douts)], wants[len(douts) :])
    if any(of_weights):
        assert whole is not None
        grads += [
            flat_rows(dout).t() @ flat_rows(whole) for dout, wanted in zip(douts, of_weights, strict=True) if wanted
        ]
    return grads + [flat_rows(dout).sum(0) for dout, wanted in zip(douts, of_biases, strict=True) if wanted]


def refuse_second_backward(ctx: Any, *_: Any) -> None:
    raise UnsupportedError("cp_mesh: linears over tp can be differentiated once; use PyTorch's ColwiseParallel")
