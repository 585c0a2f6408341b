"""Column-parallel linears: the output features of the weights are sharded over tp.

Linears that read one input are one autograd node: the forward gathers the input once, and the backward reduces its
gradient once. In the backward the gather overlaps with the matmul for the input's gradient, and the reduction of that
gradient with the matmuls for the weights. `matmul.py` defines the shapes.
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
        sharded: True if the input is this rank's rows, False if it is all rows.
        most_features: features of all outputs together on the rank that has most, so that all ranks decide alike.
        transport: "auto", "functional" or "symmetric_memory", for communication beside matmuls.
        recompute: gather the input again in the backward instead of saving the gathered rows; always True if tp has
            one rank, which gathers nothing.
    """

    num_rows: int
    group_name: str
    sharded: bool
    most_features: int
    transport: str
    recompute: bool

    @property
    def fixed(self) -> tuple[int, str, bool, int, str]:
        """The arguments of both ops."""
        return self[:-1]


def column_linears(
    x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor | None], call: Columns, names: Sequence[str]
) -> tuple[Tensor, ...]:
    """``F.linear`` of one input by several weights, each of which is this rank's rows of a whole weight.

    Args:
        x: [..., rows of this rank, C]; if the call is not sharded, all rows [..., S, C], equal on all ranks.
        weights: this rank's part [O, C] of each, plain or as the local part of a DTensor over tp.
        biases: [O] or None each, like the weights.
        call: how x is sharded.
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
    """Outputs [..., S, O], and with ``keeps`` also the gathered input [..., S, C]."""
    from cp_mesh.tensor_parallel.overlap import chosen_transport, moving  # loads the transports

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
    """The wanted gradients: of the input, of each weight, of each bias.

    ``gathers``: x is this rank's rows; else it is the whole input. x is None if no weight needs a gradient.
    """
    from cp_mesh.tensor_parallel.overlap import chosen_transport  # loads the transports

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
    """`_differentiate` over symmetric memory: this rank's own rows are computed last, onto the sums that arrived."""
    from cp_mesh.tensor_parallel.overlap import moving  # loads the transports

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
        if torch.is_grad_enabled():  # create_graph: gradients depend on weights, and on x through its gathered rows
            weights = [y.detach().requires_grad_(graded) for y, graded in zip(weights, ctx.graded, strict=True)]
            x = x if x is None else x.detach().requires_grad_(ctx.graded_input)
        found = iter(_column_linears_backward(list(douts), x, weights, wants, *ctx.call.fixed, ctx.gathers))
        grads = [next(found) if wanted else None for wanted in wants]
        placed = [y if y is None else placed_as(y, spec) for y, spec in zip(grads[1:], ctx.specs, strict=True)]
        return None, None, None, grads[0], *placed
