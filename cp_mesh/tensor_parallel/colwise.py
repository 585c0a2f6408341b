"""Column-parallel linears: the output features of the weights are sharded over tp.

Linears that read one input are one autograd node: the forward gathers the input once, and the backward reduces its
gradient once. In the backward the gather overlaps with the matmul for the input's gradient, and the reduction of that
gradient with the matmuls for the weights. `matmul.py` defines the shapes.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from cp_mesh.call.operators import Operator
from cp_mesh.tensor_parallel.matmul import (
    LinearSpec,
    cast_alike,
    check_rows,
    gather_matmul,
    graded_names,
    gradients_of_parameters,
    matmul_scatter,
    part_of,
    placed_as,
    refuse_second_backward,
    spec_of,
)


def column_linears(
    x: Tensor,
    weights: Sequence[Tensor],
    biases: Sequence[Tensor | None],
    spec: LinearSpec,
    names: Sequence[str],
    recompute: bool = True,
) -> tuple[Tensor, ...]:
    """``F.linear`` of one input by several weights, each of which is this rank's rows of a whole weight.

    Args:
        x: [..., rows of this rank, C]; if the call is not sharded, all rows [..., S, C], equal on all ranks.
        weights: this rank's part [O, C] of each, plain or as the local part of a DTensor over tp.
        biases: [O] or None each, like the weights.
        spec: ``most_features`` are those of all outputs together.
        names: of the weights and then of the biases, for messages.
        recompute: gather the input again in the backward instead of saving the gathered rows; as always where nothing
            is gathered.

    Returns:
        [..., S, O] for each weight.
    """
    graded = graded_names(["input", *names], [x, *weights, *biases])
    keeps = torch.is_grad_enabled() and any(weight.requires_grad for weight in weights)
    keeps_whole = keeps and spec.sharded and not recompute
    outs: tuple[Tensor, ...] = _ColumnLinears.apply(spec, keeps, keeps_whole, graded, *cast_alike(x, *weights, *biases))
    return outs


def _compute(
    x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor | None], keeps: bool, graded: str,
    num_rows: int, group_name: str, sharded: bool, most_features: int, transport: str,
) -> list[Tensor]:  # fmt: skip
    """Outputs [..., S, O], and with ``keeps`` also the gathered input [..., S, C]."""
    what, spec = "column linears", LinearSpec(num_rows, group_name, sharded, most_features, transport)
    check_rows(what, x, spec, graded=graded)
    return gather_matmul(x, [weight.t() for weight in weights], biases, spec, what, "kept" if keeps else None)


def _differentiate(
    douts: Sequence[Tensor], x: Tensor | None, weights: Sequence[Tensor], wants: Sequence[bool], gathers: bool,
    num_rows: int, group_name: str, sharded: bool, most_features: int, transport: str,
) -> list[Tensor]:  # fmt: skip
    """The wanted gradients: of the input, of each weight, of each bias.

    ``gathers``: x is this rank's rows; else it is the whole input. x is None if no weight needs a gradient.
    """
    what, spec = "backward of column linears", LinearSpec(num_rows, group_name, sharded, most_features, transport)
    gathered = x if gathers else None

    def use(whole: Tensor | None) -> list[Tensor]:
        return gradients_of_parameters(douts, wants[1:], x if whole is None else whole)

    if not wants[0]:
        return use(None if gathered is None else spec.shards(what).gather(gathered)())
    num_chunks = 1 if any(wants[1 : 1 + len(weights)]) else 2
    return matmul_scatter(douts, weights, spec, what, num_chunks, gathered, use)


def _empty_outputs(x, weights, biases, keeps, graded, *spec):  # type: ignore[no-untyped-def]
    features = [weight.shape[0] for weight in weights] + [x.shape[-1]] * keeps
    return [LinearSpec(*spec).whole(x, count) for count in features]


def _empty_gradients(douts, x, weights, wants, gathers, *spec):  # type: ignore[no-untyped-def]
    kinds = [weight.shape for weight in weights] + [weight.shape[:1] for weight in weights]
    grads = [douts[0].new_empty(shape) for shape, wanted in zip(kinds, wants[1:], strict=True) if wanted]
    return [LinearSpec(*spec).own(douts[0], weights[0].shape[1])] * wants[0] + grads


_column_linears = Operator("column_linears", _compute, _empty_outputs, refuse_second_backward)
_column_linears_backward = Operator("column_linears_backward", _differentiate, _empty_gradients, refuse_second_backward)


class _ColumnLinears(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, spec: LinearSpec, keeps: bool, keeps_whole: bool, graded: str, x: Tensor, *parameters: Any
    ) -> tuple[Tensor, ...]:
        ctx.specs, parts = [*map(spec_of, parameters)], [*map(part_of, parameters)]
        ctx.graded = [y.requires_grad for y in parameters[: len(parameters) // 2]]
        weights, biases = parts[: len(parts) // 2], parts[len(parts) // 2 :]
        ctx.spec, ctx.gathers, ctx.graded_input = spec, spec.sharded and not keeps_whole, x.requires_grad
        outs = _column_linears(x, weights, biases, keeps_whole, graded, *spec)
        ctx.save_for_backward((outs[-1] if keeps_whole else x) if keeps else None, *weights)
        return tuple(outs[: len(weights)])

    @staticmethod
    def backward(ctx: Any, *douts: Tensor) -> tuple[Any, ...]:
        (x, *weights), wants = ctx.saved_tensors, list(ctx.needs_input_grad[4:])
        if torch.is_grad_enabled():  # create_graph: gradients depend on weights, and on x through its gathered rows
            weights = [y.detach().requires_grad_(graded) for y, graded in zip(weights, ctx.graded, strict=True)]
            x = x if x is None else x.detach().requires_grad_(ctx.graded_input)
        found = iter(_column_linears_backward(list(douts), x, weights, wants, ctx.gathers, *ctx.spec))
        grads = [next(found) if wanted else None for wanted in wants]
        placed = [y if y is None else placed_as(y, spec) for y, spec in zip(grads[1:], ctx.specs, strict=True)]
        return None, None, None, None, grads[0], *placed
