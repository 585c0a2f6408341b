"""Row-parallel linears: the input features of the weight are sharded over tp, and outputs are summed over tp.

A linear with sharded output rows is two autograd nodes: the first saves the tensors for the backward. `sum_rows` is one
collective without overlap: the sum with all rows on every rank, and that of an embedding. `matmul.py` has the shapes.
"""

from itertools import chain
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from cp_mesh.call.operators import Operator
from cp_mesh.call.spec import autocast
from cp_mesh.comm.shards import Shards
from cp_mesh.errors import refuse
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


def row_linear(
    x: Tensor, weight: Tensor, bias: Tensor | None, group_name: str, most_features: int, transport: str
) -> Tensor:
    """`F.linear` of this rank's features, reduce-scattered over tp: each rank gets its own rows of the sum.

    Args:
        x: [..., S, C of this rank].
        weight: this rank's part [O, C of this rank], plain or as the local part of a DTensor over tp.
        bias: [O], equal on all ranks, or None; plain or a DTensor, like the weight.
        group_name: of the tp group, which has two ranks or more.
        most_features: the largest C of a rank.
        transport: as in `Columns`.

    Returns:
        [..., rows of this rank, O].
    """
    graded = graded_names(["input", "weight", "bias"], [x, weight, bias])
    x, weight, *rest = cast_alike(x, weight, *([] if bias is None else [bias]))
    call, parameters = (group_name, most_features, transport), (weight, *rest, *[None] * (1 - len(rest)))
    if not torch.is_grad_enabled() or not any(y.requires_grad for y in (x, weight, *rest)):
        plain: Tensor = _row_linear(x, *map(part_of, parameters), *call, graded)
        return plain
    awaited = _RowGradients.apply(call, weight.requires_grad, x.requires_grad, x, *parameters)
    given = (None if y is None else part_of(y).detach() for y in (x, *parameters))
    out: Tensor = _RowLinear.apply((*call, graded), awaited, *given)
    return out


def _compute(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    group_name: str,
    most_features: int,
    transport: str,
    graded: str,
) -> Tensor:
    from cp_mesh.tensor_parallel.overlap import chosen_transport, moving  # loads the transports

    num_rows = x.shape[-2]
    options: dict[str, Any] = {"graded": graded, "features": len(weight), "transport": transport}
    check_rows("row linear", x, num_rows, group_name, False, "sharded", **options)
    shards, matrix = Shards(num_rows, group_name, "row linear"), weight.t()
    if chosen := chosen_transport(shards, transport, x, (len(weight), most_features), 2):
        rows, rank = as_batch(x), shards.group.rank()
        with moving(chosen, shards, x.device) as moves:
            sums = moves.sums(rows, len(weight), 2)
            for chunk in sums.chunks:
                sums.send(chunk, lambda part, buffer: write_product(rows[:, part], matrix, buffer))
            for chunk in sums.chunks:
                add_product(sums.receive(chunk), rows[:, shards.of(rank, chunk)], matrix)
        out = sums.out.view(*x.shape[:-2], *sums.out.shape[1:])
    else:
        out = shards.scatter_sum(F.linear(x, weight))()
    return out if bias is None else out + bias


def _differentiate(
    dout: Tensor,
    x: Tensor | None,
    weight: Tensor | None,
    wants_bias: bool,
    num_rows: int,
    group_name: str,
    most_features: int,
    transport: str,
) -> list[Tensor]:
    """Gradients of the input, if the weight is given; of the weight, if the input is given; and of the bias."""
    from cp_mesh.tensor_parallel.overlap import chosen_transport, moving  # loads the transports

    shards = Shards(num_rows, group_name, "backward of a row linear")
    if x is None and weight is None:
        return [shards.all_sum(flat_rows(dout).sum(0))()]

    def of_parameters(whole: Tensor) -> list[Tensor]:
        return gradients_of_parameters([whole], x, [x is not None, wants_bias])

    if weight is None:
        return of_parameters(shards.gather(dout)())
    chosen = chosen_transport(shards, transport, dout, (len(weight), most_features), 1)
    if chosen is None:
        whole = shards.gather(dout)()
        return [whole @ weight, *of_parameters(whole)]
    rows = as_batch(dout)
    dx = dout.new_empty(len(rows), num_rows, weight.shape[1])
    with moving(chosen, shards, dout.device) as moves:
        gather = moves.gather(rows, None if x is None and not wants_bias else "lent")
        for part, its_rows in chain([(shards.of(shards.group.rank()), rows)], gather.parts()):
            write_product(its_rows, weight, dx[:, part])
        grads = of_parameters(gather.whole()) if x is not None or wants_bias else []
    return [dx.view(*dout.shape[:-2], *dx.shape[1:]), *grads]


def _single_zero(x: Tensor, features: int, group_name: str) -> Tensor:
    """A single zero expanded to the shape of the output; an op, as traced code cannot ask a group for its rank."""
    return x.new_zeros(()).expand(*x.shape[:-2], Shards(x.shape[-2], group_name).own, features)


def _empty_output(x, weight, bias, group_name, *_):  # type: ignore[no-untyped-def]
    return x.new_empty((*x.shape[:-2], Shards(x.shape[-2], group_name).own, weight.shape[0]))


def _empty_gradients(dout, x, weight, wants_bias, num_rows, *_):  # type: ignore[no-untyped-def]
    grads = [] if weight is None else [dout.new_empty((*dout.shape[:-2], num_rows, weight.shape[1]))]
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
        ctx: Any, call: tuple[str, int, str], keeps: bool, keeps_weight: bool, x: Tensor, weight: Any, bias: Any
    ) -> Tensor:
        ctx.call, ctx.num_rows, ctx.specs = call, x.shape[-2], (None, spec_of(weight), spec_of(bias))
        weight = part_of(weight)
        ctx.save_for_backward(x if keeps else None, weight if keeps_weight else None)
        return _awaited(x, weight.shape[0], call[0])

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> tuple[Any, ...]:
        wants = ctx.needs_input_grad[3:]
        found = iter(_row_linear_backward(dout, *ctx.saved_tensors, wants[2], ctx.num_rows, *ctx.call))
        each = zip(wants, ctx.specs, strict=True)
        return None, None, None, *(placed_as(next(found), spec) if wanted else None for wanted, spec in each)


class _RowLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, call: tuple[str, int, str, str], awaited: Tensor, *given: Any) -> Tensor:
        return _row_linear(*given, *call)

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> tuple[Any, ...]:
        return None, dout, None, None, None


def sum_rows(
    what: str,
    x: Tensor,
    bias: Tensor | None,
    group_name: str,
    sharded: bool,
    graded: str,
    tokens: Tensor | None = None,
) -> Tensor:
    """The sum over tp ranks of x [..., S, O], plus a bias [O] that is equal on all ranks.

    The backward gathers rows that the forward scattered. First calls compare ``what``, the `graded_names` of their
    tensors, and the tokens of an embedding.

    Returns:
        [..., rows of this rank, O] if ``sharded``, else [..., S, O].
    """
    if bias is not None:
        x, bias = autocast(x, bias)
        if x.dtype != bias.dtype:
            got, hint = f"{x.dtype} and {bias.dtype}", "cast the bias, or use autocast"
            refuse(what, "an output and a bias of one dtype", got, hint)
    out: Tensor = _SumRows.apply(x, bias, group_name, sharded, what, graded, tokens)
    return out


def _sum(
    x: Tensor,
    bias: Tensor | None,
    group_name: str,
    sharded: bool,
    what: str,
    graded: str,
    tokens: Tensor | None,
) -> Tensor:
    alike = None if tokens is None else {"tokens": tokens}
    check_rows(what, x, x.shape[-2], group_name, False, sharded, graded=graded, alike=alike)
    shards = Shards(x.shape[-2], group_name, what)
    summed = (shards.scatter_sum(x) if sharded else shards.all_sum(x))()
    if bias is not None:
        return summed + bias
    return summed.clone() if summed is x else summed


def _gather(x: Tensor, num_rows: int, group_name: str) -> Tensor:
    whole = Shards(num_rows, group_name, "backward of a row linear").gather(x)()
    return whole.clone() if whole is x else whole


def _empty_sum(x, bias, group_name, sharded, *_):  # type: ignore[no-untyped-def]
    own = Shards(x.shape[-2], group_name).own if sharded else x.shape[-2]
    return x.new_empty((*x.shape[:-2], own, x.shape[-1]))


def _empty_rows(x, num_rows, group_name):  # type: ignore[no-untyped-def]
    return x.new_empty((*x.shape[:-2], num_rows, x.shape[-1]))


_sum_rows = Operator("sum_rows", _sum, _empty_sum, refuse_second_backward)
_gather_rows = Operator("gather_rows", _gather, _empty_rows, refuse_second_backward)


class _SumRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, bias: Tensor | None, group_name: str, sharded: bool, *compared: Any) -> Tensor:
        ctx.num_rows, ctx.group_name, ctx.sharded = x.shape[-2], group_name, sharded
        return _sum_rows(x, bias, group_name, sharded, *compared)

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> tuple[Any, ...]:
        of_x, of_bias, *_ = ctx.needs_input_grad
        whole = _gather_rows(dout, ctx.num_rows, ctx.group_name) if ctx.sharded and of_x else _once(dout)
        dbias = flat_rows(whole).sum(0) if of_bias else None
        return whole if of_x else None, dbias, None, None, None, None, None


def _once(dout: Tensor) -> Tensor:
    return _Once.apply(dout) if torch.is_grad_enabled() and not torch.compiler.is_compiling() else dout


class _Once(torch.autograd.Function):
    """A gradient without a gradient, for ``create_graph`` where no op is called: a second backward raises."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *_: Any) -> Any:
        return refuse_second_backward(ctx)
