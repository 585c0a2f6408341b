"""Row-parallel linears: the input features of the weight are sharded over tp, and outputs are summed over tp.

A linear is two autograd nodes: the first saves the tensors for the backward. `sum_rows` is the sum of an embedding, one
collective without overlap. `matmul.py` has the shapes.
"""

from typing import Any

import torch
from torch import Tensor

from cp_mesh.call.operators import Operator
from cp_mesh.comm.shards import Shards
from cp_mesh.tensor_parallel.matmul import (
    LinearSpec,
    cast_alike,
    check_rows,
    flat_rows,
    gather_matmul,
    graded_names,
    gradients_of_parameters,
    matmul_scatter,
    part_of,
    placed_as,
    refuse_second_backward,
    spec_of,
)


def row_linear(x: Tensor, weight: Tensor, bias: Tensor | None, spec: LinearSpec) -> Tensor:
    """`F.linear` of this rank's features, summed over tp: each rank gets its own rows of the sum, or all rows.

    Args:
        x: [..., S, C of this rank].
        weight: this rank's part [O, C of this rank], plain or as the local part of a DTensor over tp.
        bias: [O], equal on all ranks, or None; plain or a DTensor, like the weight.
        spec: whether the output is sharded.

    Returns:
        [..., rows of this rank, O].
    """
    graded = graded_names(["input", "weight", "bias"], [x, weight, bias])
    given = cast_alike(x, weight, bias)
    local = [None if y is None else part_of(y).detach() for y in given]
    if graded == "none":
        out: Tensor = _row_linear(*local, graded, *spec)
    else:
        awaited = _RowGradients.apply(spec, weight.requires_grad, x.requires_grad, *given)
        out = _RowLinear.apply((graded, *spec), awaited, *local)
    return out


def _compute(
    x: Tensor, weight: Tensor, bias: Tensor | None, graded: str,
    num_rows: int, group_name: str, sharded: bool, most_features: int, transport: str,
) -> Tensor:  # fmt: skip
    what, spec = "row linear", LinearSpec(num_rows, group_name, sharded, most_features, transport)
    check_rows(what, x, spec._replace(sharded=False), sharded, graded=graded, features=len(weight))
    (out,) = matmul_scatter([x], [weight.t()], spec, what)
    return out if bias is None else out + bias


def _differentiate(
    dout: Tensor, x: Tensor | None, weight: Tensor | None, wants_bias: bool,
    num_rows: int, group_name: str, sharded: bool, most_features: int, transport: str,
) -> list[Tensor]:  # fmt: skip
    """Gradients of the input, if the weight is given; of the weight, if the input is given; and of the bias."""
    what, spec = "backward of a row linear", LinearSpec(num_rows, group_name, sharded, most_features, transport)
    if x is None and weight is None and sharded:
        return [spec.shards(what).all_sum(flat_rows(dout).sum(0))()]
    wants, matrices = [x is not None, wants_bias], [] if weight is None else [weight]

    def use(whole: Tensor) -> list[Tensor]:
        return gradients_of_parameters([whole], wants, x)

    return gather_matmul(dout, matrices, [None] * len(matrices), spec, what, "lent" if any(wants) else None, use)


def _single_zero(
    x: Tensor, features: int, num_rows: int, group_name: str, sharded: bool, most_features: int, transport: str
) -> Tensor:
    """A single zero expanded to the shape of the output; an op, as traced code cannot ask a group for its rank."""
    spec = LinearSpec(num_rows, group_name, sharded, most_features, transport)
    return x.new_zeros(()).expand(*x.shape[:-2], spec.num_own, features)


def _empty_output(x, weight, bias, graded, *spec):  # type: ignore[no-untyped-def]
    return LinearSpec(*spec).own(x, weight.shape[0])


def _empty_gradients(dout, x, weight, wants_bias, *spec):  # type: ignore[no-untyped-def]
    grads = [] if weight is None else [LinearSpec(*spec).whole(dout, weight.shape[1])]
    grads += [] if x is None else [dout.new_empty((dout.shape[-1], x.shape[-1]))]
    return [*grads, dout.new_empty(dout.shape[-1])] if wants_bias else grads


_row_linear = Operator("row_linear", _compute, _empty_output, refuse_second_backward)
_row_linear_backward = Operator("row_linear_backward", _differentiate, _empty_gradients, refuse_second_backward)
_awaited = Operator("row_linear_awaited", _single_zero, _single_zero, refuse_second_backward)


class _RowGradients(torch.autograd.Function):
    """Receives the gradient of `_RowLinear`'s output. A checkpoint's recomputation ends at the last saved tensor, which
    is saved here, so that it repeats neither the matmul nor the sum."""

    @staticmethod
    def forward(
        ctx: Any, spec: LinearSpec, keeps: bool, keeps_weight: bool, x: Tensor, weight: Any, bias: Any
    ) -> Tensor:
        ctx.spec, ctx.specs, weight = spec, (None, spec_of(weight), spec_of(bias)), part_of(weight)
        ctx.save_for_backward(x if keeps else None, weight if keeps_weight else None)
        return _awaited(x, weight.shape[0], *spec)

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> tuple[Any, ...]:
        wants = ctx.needs_input_grad[3:]
        found = iter(_row_linear_backward(dout, *ctx.saved_tensors, wants[2], *ctx.spec))
        each = zip(wants, ctx.specs, strict=True)
        return None, None, None, *(placed_as(next(found), spec) if wanted else None for wanted, spec in each)


class _RowLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, call: tuple[Any, ...], awaited: Tensor, *given: Any) -> Tensor:
        return _row_linear(*given, *call)

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> tuple[Any, ...]:
        return None, dout, None, None, None


def sum_rows(x: Tensor, tokens: Tensor, graded: str, group_name: str, sharded: bool) -> Tensor:
    """The sum over tp ranks of embeddings x [..., S, C]; the backward gathers rows that the forward scattered.

    First calls compare the tokens, and the `graded_names` of the weight.

    Returns:
        [..., rows of this rank, C] if ``sharded``, else [..., S, C].
    """
    out: Tensor = _SumRows.apply(x, tokens, graded, group_name, sharded)
    return out


def _sum(x: Tensor, tokens: Tensor, graded: str, group_name: str, sharded: bool) -> Tensor:
    what, spec = "VocabParallelEmbedding", LinearSpec(x.shape[-2], group_name, False)
    check_rows(what, x, spec, sharded, graded=graded, alike={"tokens": tokens})
    shards = spec.shards(what)
    summed = (shards.scatter_sum(x) if sharded else shards.all_sum(x))()
    return summed.clone() if summed is x else summed


def _gather(x: Tensor, num_rows: int, group_name: str, sharded: bool) -> Tensor:
    whole = Shards(num_rows, group_name, "backward of VocabParallelEmbedding").gather(x)() if sharded else x
    return whole.clone() if whole is x else whole


def _empty_sum(x, tokens, graded, group_name, sharded):  # type: ignore[no-untyped-def]
    return LinearSpec(x.shape[-2], group_name, sharded).own(x, x.shape[-1])


def _empty_rows(x, num_rows, group_name, sharded):  # type: ignore[no-untyped-def]
    return LinearSpec(num_rows, group_name, sharded).whole(x, x.shape[-1])


_sum_rows = Operator("sum_rows", _sum, _empty_sum, refuse_second_backward)
_gather_rows = Operator("gather_rows", _gather, _empty_rows, refuse_second_backward)


class _SumRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, tokens: Tensor, graded: str, group_name: str, sharded: bool) -> Tensor:
        ctx.call = x.shape[-2], group_name, sharded
        return _sum_rows(x, tokens, graded, group_name, sharded)

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> tuple[Any, ...]:
        return _gather_rows(dout, *ctx.call), None, None, None, None
