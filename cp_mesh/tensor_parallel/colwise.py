"""Column linears over tp: the output features of the weights are sharded.

Those that read one input are one node of autograd: the input is gathered once, and in the backward its gradient is
summed once. There the gather runs beside the product for the input's gradient, and that gradient is summed while the
products for the weights run. `matmul.py` has the shapes.
"""

from collections.abc import Sequence
from itertools import chain
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from cp_mesh.call.operators import Operator
from cp_mesh.comm.shards import Shards
from cp_mesh.tensor_parallel.matmul import (
    add_product,
    as_batch,
    cast_alike,
    check_rows,
    flat_rows,
    graded_names,
    gradients_of_parameters,
    part_of,
    placed_as,
    refuse_second_backward,
    spec_of,
    write_product,
)


class Columns(NamedTuple):
    """How column linears read their input.

    Attributes:
        num_rows: S of the whole sequence.
        group_name: of the tp group.
        sharded: whether each rank has its own rows of the input, or all of them.
        most_features: of all outputs together, on the rank that has most, so that all ranks choose alike.
        transport: "auto", "functional" or "symmetric_memory", for rows that travel beside products.
        recompute: gather the input again in the backward, rather than keep what was gathered; always where tp has one
            rank, which gathers nothing.
    """

    num_rows: int
    group_name: str
    sharded: bool
    most_features: int
    transport: str
    recompute: bool

    @property
    def fixed(self) -> tuple[int, str, bool, int, str]:
        """What both ops are told."""
        return self[:-1]


def column_linears(
    x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor | None], call: Columns, names: Sequence[str]
) -> tuple[Tensor, ...]:
    """``F.linear`` of one input by several weights, each of which is this rank's rows of a whole weight.

    Args:
        x: [..., rows of this rank, C], or all rows [..., S, C], equal on all ranks, if the call is not sharded.
        weights: [O, C] each, or DTensors over tp, of which this is the rank's part.
        biases: [O] or None each; as weights.
        call: how x lies.
        names: of the weights and then of the biases, for messages.

    Returns:
        [..., S, O] for each weight.
    """
    graded = graded_names(["input", *names], [x, *weights, *biases])
    x, *rest = cast_alike(x, *weights, *(bias for bias in biases if bias is not None))
    cast_weights, of_bias = rest[: len(weights)], iter(rest[len(weights) :])
    cast_biases = [None if bias is None else next(of_bias) for bias in biases]
    keeps = torch.is_grad_enabled() and any(weight.requires_grad for weight in weights)
    outs: tuple[Tensor, ...] = _ColumnLinears.apply(call, keeps, graded, x, *cast_weights, *cast_biases)
    return outs


def _compute(
    x: Tensor,
    weights: Sequence[Tensor],
    biases: Sequence[Tensor | None],
    num_rows: int,
    group_name: str,
    sharded: bool,
    most_features: int,
    transport: str,
    keeps: bool,
    graded: str,
) -> list[Tensor]:
    """Outputs [..., S, O], and if asked for the gathered input [..., S, C]."""
    from cp_mesh.tensor_parallel.overlap import chosen_transport, moving  # with the transports

    check_rows("column linears", x, num_rows, group_name, sharded, graded=graded, transport=transport)
    shards = Shards(num_rows, group_name, "column linears")
    if sharded and (chosen := chosen_transport(shards, transport, x, (x.shape[-1], most_features), len(weights))):
        rows, shape = as_batch(x), (*x.shape[:-2], num_rows)
        outs = [x.new_empty(len(rows), num_rows, len(weight)) for weight in weights]
        with moving(chosen, shards, x.device) as moves:
            gather = moves.gather(rows, "kept" if keeps else None)
            for part, its_rows in chain([(shards.of(shards.group.rank()), rows)], gather.parts()):
                for out, weight, bias in zip(outs, weights, biases, strict=True):
                    write_product(its_rows, weight.t(), out[:, part], bias)
            outs += [gather.whole()] if keeps else []
        return [out.view(*shape, out.shape[-1]) for out in outs]
    whole = shards.gather(x)() if sharded else x
    outs = [F.linear(flat_rows(whole), weight, bias) for weight, bias in zip(weights, biases, strict=True)]
    outs = [out.view(*whole.shape[:-1], out.shape[-1]) for out in outs]
    return [*outs, whole] if keeps else outs


def _differentiate(
    douts: Sequence[Tensor],
    x: Tensor | None,
    weights: Sequence[Tensor],
    wants: Sequence[bool],
    num_rows: int,
    group_name: str,
    sharded: bool,
    most_features: int,
    transport: str,
    gathers: bool,
) -> list[Tensor]:
    """Gradients that are wanted: of the input, of each weight, of each bias.

    ``gathers``: x is this rank's rows; else it is the whole input, and None if no weight wants a gradient.
    """
    from cp_mesh.tensor_parallel.overlap import chosen_transport  # with the transports

    shards = Shards(num_rows, group_name, "backward of column linears")
    widths = weights[0].shape[1], most_features
    chosen = chosen_transport(shards, transport, douts[0], widths, len(weights)) if sharded and wants[0] else None
    if chosen == "symmetric_memory":
        return _beside_copies(douts, x, weights, wants, shards, gathers)
    whole = shards.gather(x) if gathers and x is not None else None
    if wants[0]:
        dx = flat_rows(douts[0]) @ weights[0]
        for dout, weight in zip(douts[1:], weights[1:], strict=True):
            dx.addmm_(flat_rows(dout), weight)
        dx = dx.view(*douts[0].shape[:-1], dx.shape[-1])
        summed = shards.scatter_sum(dx) if sharded else shards.all_sum(dx)
    grads = gradients_of_parameters(douts, x if whole is None else whole(), wants[1:])
    return [summed(), *grads] if wants[0] else grads


def _beside_copies(
    douts: Sequence[Tensor],
    x: Tensor | None,
    weights: Sequence[Tensor],
    wants: Sequence[bool],
    shards: Shards,
    gathers: bool,
) -> list[Tensor]:
    """As `_differentiate`, where sums that arrive can be added to: this rank's own rows come last."""
    from cp_mesh.tensor_parallel.overlap import moving  # with the transports

    rank, of_weights = shards.group.rank(), wants[1 : 1 + len(weights)]
    batches = [as_batch(dout) for dout in douts]
    with moving("symmetric_memory", shards, douts[0].device) as moves:
        gather = moves.gather(as_batch(x), "lent") if gathers and x is not None else None
        sums = moves.sums(batches[0], weights[0].shape[1], 1 if any(of_weights) else 2)

        def write(part: slice, buffer: Tensor) -> None:
            write_product(batches[0][:, part], weights[0], buffer)
            for dout, weight in zip(batches[1:], weights[1:], strict=True):
                add_product(buffer, dout[:, part], weight)

        for chunk in sums.chunks:
            sums.send(chunk, write)
        grads = gradients_of_parameters(douts, x if gather is None else gather.whole(), wants[1:])
        for chunk in sums.chunks:
            out, part = sums.receive(chunk), shards.of(rank, chunk)
            for dout, weight in zip(batches, weights, strict=True):
                add_product(out, dout[:, part], weight)
    return [sums.out.view(*douts[0].shape[:-2], *sums.out.shape[1:]), *grads]


def _empty_outputs(x, weights, biases, num_rows, group_name, sharded, most_features, transport, keeps, graded):  # type: ignore[no-untyped-def]
    shape = (*x.shape[:-2], num_rows)
    outs = [x.new_empty((*shape, weight.shape[0])) for weight in weights]
    return [*outs, x.new_empty((*shape, x.shape[-1]))] if keeps else outs


def _empty_gradients(douts, x, weights, wants, num_rows, group_name, sharded, most_features, transport, gathers):  # type: ignore[no-untyped-def]
    grads, features = [], weights[0].shape[1]
    if wants[0]:
        own = Shards(num_rows, group_name).own if sharded else num_rows
        grads.append(douts[0].new_empty((*douts[0].shape[:-2], own, features)))
    kinds = [weight.shape for weight in weights] + [weight.shape[:1] for weight in weights]
    return grads + [douts[0].new_empty(shape) for shape, wanted in zip(kinds, wants[1:], strict=True) if wanted]


_column_linears = Operator("column_linears", _compute, _empty_outputs, refuse_second_backward)
_column_linears_backward = Operator("column_linears_backward", _differentiate, _empty_gradients, refuse_second_backward)


class _ColumnLinears(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, call: Columns, keeps: bool, graded: str, x: Tensor, *parameters: Any) -> tuple[Tensor, ...]:
        ctx.specs, parts = [*map(spec_of, parameters)], [*map(part_of, parameters)]
        ctx.graded = [y.requires_grad for y in parameters[: len(parameters) // 2]]
        weights, biases = parts[: len(parts) // 2], parts[len(parts) // 2 :]
        ctx.call, ctx.gathers, ctx.graded_input = call, call.sharded and call.recompute, x.requires_grad
        keeps_whole = keeps and call.sharded and not call.recompute
        outs = _column_linears(x, weights, biases, *call.fixed, keeps_whole, graded)
        ctx.save_for_backward((outs[-1] if keeps_whole else x) if keeps else None, *weights)
        return tuple(outs[: len(weights)])

    @staticmethod
    def backward(ctx: Any, *douts: Tensor) -> tuple[Any, ...]:
        (x, *weights), wants = ctx.saved_tensors, list(ctx.needs_input_grad[3:])
        if torch.is_grad_enabled():  # by create_graph: gradients depend on weights, and on x by its gathered rows
            weights = [y.detach().requires_grad_(graded) for y, graded in zip(weights, ctx.graded, strict=True)]
            x = x if x is None else x.detach().requires_grad_(ctx.graded_input)
        found = iter(_column_linears_backward(list(douts), x, weights, wants, *ctx.call.fixed, ctx.gathers))
        grads = [next(found) if wanted else None for wanted in wants]
        placed = [y if y is None else placed_as(y, spec) for y, spec in zip(grads[1:], ctx.specs, strict=True)]
        return None, None, None, grads[0], *placed
