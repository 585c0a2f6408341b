"""Linears over tp, whose communication runs beside their products.

Column linears that read one input are one node of autograd: the input is gathered once, and in the backward its
gradient is summed once. There the gather runs beside the product for the input's gradient, and that gradient is summed
while the products for the weights run. Both are functional collectives, which have a stream of their own and are waited
for where their result is read.

They are ops, so that compiled code keeps this order, and neither merges the backward's gather with the forward's nor
keeps what a policy of memory let go.

Shapes: S rows of the sequence, C features of the input, O features of an output on this rank.
"""

from collections.abc import Hashable, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.distributed_c10d import _resolve_process_group

from cp_mesh.agreement import agree_once, announce_refusal
from cp_mesh.agreement.contents import fingerprint
from cp_mesh.call import autocast
from cp_mesh.errors import UnsupportedError, refuse
from cp_mesh.transport.shards import Shards


class Columns(NamedTuple):
    """How column linears read their input.

    Attributes:
        num_rows: S of the whole sequence.
        group_name: of the tp group.
        sharded: whether each rank has its own rows of the input, or all of them.
        recompute: gather the input again in the backward, rather than keep what was gathered; always where tp has one
            rank, which gathers nothing.
    """

    num_rows: int
    group_name: str
    sharded: bool
    recompute: bool


def column_linears(
    x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor | None], call: Columns
) -> tuple[Tensor, ...]:
    """``F.linear`` of one input by several weights, each of which is this rank's rows of a whole weight.

    Args:
        x: [..., rows of this rank, C], or all rows [..., S, C], equal on all ranks, if the call is not sharded.
        weights: [O, C] each.
        biases: [O] or None each.
        call: how x lies.

    Returns:
        [..., S, O] for each weight.
    """
    given = [x, *weights, *(bias for bias in biases if bias is not None)]
    x, *rest = autocast(*given)
    if len(dtypes := {tensor.dtype for tensor in (x, *rest)}) > 1:
        refuse(
            "linears", "inputs and weights of one dtype", sorted(map(str, dtypes)), "cast the input, or use autocast"
        )
    cast_weights, of_bias = rest[: len(weights)], iter(rest[len(weights) :])
    cast_biases = [None if bias is None else next(of_bias) for bias in biases]
    keeps = torch.is_grad_enabled() and any(weight.requires_grad for weight in weights)
    outs: tuple[Tensor, ...] = _ColumnLinears.apply(call, keeps, x, *cast_weights, *cast_biases)
    return outs


def refuse_transforms(what: str) -> None:
    """Refuse what differentiates otherwise than backward() does."""
    if not torch.compiler.is_compiling() and torch._C._are_functorch_transforms_active():
        hint = "use backward() or torch.autograd.grad"
        refuse(f"cp_mesh: {what}", "no transform of torch.func", "vmap, grad or the like", hint, UnsupportedError)


def _rows(x: Tensor) -> Tensor:
    return x.reshape(-1, x.shape[-1])


def check_rows(
    what: str, x: Tensor, num_rows: int, group_name: str, sharded: bool, *kind: Hashable, labels: Tensor | None = None
) -> None:
    """Before the first collective of a call; the first one of a kind is compared over tp, with its labels."""
    group: dist.ProcessGroup = _resolve_process_group(group_name)  # type: ignore[arg-type]
    try:
        expected = Shards(num_rows, group_name).own if sharded else num_rows
        if x.shape[-2] != expected:
            hint = "pass DTensors, whose shape says how many rows there are, where tp does not divide them"
            refuse(f"{what}: input", f"{expected} of {num_rows} rows on this rank", x.shape[-2], hint)
    except Exception as error:
        announce_refusal(group, error)
        raise
    shape, features = tuple(x.shape[:-2]), x.shape[-1]
    told = {"call": what, "rows of the sequence": f"{num_rows}", "batch": f"{shape}", "features": f"{features}"}
    agree_once(
        group,
        (what, sharded, x.ndim, features, x.dtype, *kind),
        lambda: told | {"dtype": f"{x.dtype}", "labels on tp ranks": fingerprint(labels)},
    )


@torch.library.custom_op("cp_mesh::column_linears", mutates_args=())
def _column_linears(
    x: Tensor,
    weights: Sequence[Tensor],
    biases: Sequence[Tensor | None],
    num_rows: int,
    group_name: str,
    sharded: bool,
    keeps: bool,
) -> list[Tensor]:
    """Outputs [..., S, O], and if asked for the gathered input [..., S, C]."""
    check_rows("column linears", x, num_rows, group_name, sharded)
    whole = Shards(num_rows, group_name, "column linears").gather(x)() if sharded else x
    outs = [F.linear(_rows(whole), weight, bias) for weight, bias in zip(weights, biases, strict=True)]
    outs = [out.view(*whole.shape[:-1], out.shape[-1]) for out in outs]
    return [*outs, whole] if keeps else outs


@torch.library.custom_op("cp_mesh::column_linears_backward", mutates_args=())
def _column_linears_backward(
    douts: Sequence[Tensor],
    x: Tensor | None,
    weights: Sequence[Tensor],
    wants: Sequence[bool],
    num_rows: int,
    group_name: str,
    sharded: bool,
    gathers: bool,
) -> list[Tensor]:
    """Gradients that are wanted: of the input, of each weight, of each bias.

    ``gathers``: x is this rank's rows; else it is the whole input, and None if no weight wants a gradient.
    """
    shards, of_weights = Shards(num_rows, group_name, "backward of column linears"), wants[1 : 1 + len(weights)]
    of_biases, grads = wants[1 + len(weights) :], []
    whole = shards.gather(x) if gathers and x is not None else None
    if wants[0]:
        dx = _rows(douts[0]) @ weights[0]
        for dout, weight in zip(douts[1:], weights[1:], strict=True):
            dx.addmm_(_rows(dout), weight)
        dx = dx.view(*douts[0].shape[:-1], dx.shape[-1])
        summed = shards.scatter_sum(dx) if sharded else shards.all_sum(dx)
    if any(of_weights):
        assert x is not None
        rows = _rows(x if whole is None else whole())
        grads += [_rows(dout).t() @ rows for dout, wanted in zip(douts, of_weights, strict=True) if wanted]
    grads += [_rows(dout).sum(0) for dout, wanted in zip(douts, of_biases, strict=True) if wanted]
    return [summed(), *grads] if wants[0] else grads


@_column_linears.register_fake
def _(x, weights, biases, num_rows, group_name, sharded, keeps):  # type: ignore[no-untyped-def]
    shape = (*x.shape[:-2], num_rows)
    outs = [x.new_empty((*shape, weight.shape[0])) for weight in weights]
    return [*outs, x.new_empty((*shape, x.shape[-1]))] if keeps else outs


@_column_linears_backward.register_fake
def _(douts, x, weights, wants, num_rows, group_name, sharded, gathers):  # type: ignore[no-untyped-def]
    grads, features = [], weights[0].shape[1]
    if wants[0]:
        own = Shards(num_rows, group_name).own if sharded else num_rows
        grads.append(douts[0].new_empty((*douts[0].shape[:-2], own, features)))
    kinds = [weight.shape for weight in weights] + [weight.shape[:1] for weight in weights]
    return grads + [douts[0].new_empty(shape) for shape, wanted in zip(kinds, wants[1:], strict=True) if wanted]


class _ColumnLinears(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, call: Columns, keeps: bool, x: Tensor, *parameters: Any) -> tuple[Tensor, ...]:
        weights, biases = parameters[: len(parameters) // 2], parameters[len(parameters) // 2 :]
        ctx.call, ctx.gathers = call, call.sharded and call.recompute
        keeps_whole = keeps and call.sharded and not call.recompute
        outs = _column_linears(x, weights, biases, call.num_rows, call.group_name, call.sharded, keeps_whole)
        ctx.save_for_backward((outs[-1] if keeps_whole else x) if keeps else None, *weights)
        return tuple(outs[: len(weights)])

    @staticmethod
    def backward(ctx: Any, *douts: Tensor) -> tuple[Any, ...]:
        (x, *weights), wants = ctx.saved_tensors, list(ctx.needs_input_grad[2:])
        call = ctx.call
        found = iter(
            _column_linears_backward(
                list(douts), x, weights, wants, call.num_rows, call.group_name, call.sharded, ctx.gathers
            )
        )
        return None, None, *(next(found) if wanted else None for wanted in wants)


def sum_rows(x: Tensor, bias: Tensor | None, group_name: str, sharded: bool) -> Tensor:
    """The sum over tp ranks of x [..., S, O], plus a bias [O] that all of them hold.

    Its backward gathers what the forward scattered, so a gradient of the bias is complete on every rank.

    Returns:
        [..., rows of this rank, O] if ``sharded``, else [..., S, O].
    """
    if bias is not None:
        x, bias = autocast(x, bias)
        if x.dtype != bias.dtype:
            got, hint = f"{x.dtype} and {bias.dtype}", "cast the bias, or use autocast"
            refuse("row linear", "an output and a bias of one dtype", got, hint)
    out: Tensor = _SumRows.apply(x, bias, group_name, sharded)
    return out


@torch.library.custom_op("cp_mesh::sum_rows", mutates_args=())
def _sum_rows(x: Tensor, bias: Tensor | None, group_name: str, sharded: bool) -> Tensor:
    check_rows("row linear", x, x.shape[-2], group_name, False, sharded)
    shards = Shards(x.shape[-2], group_name, "row linear")
    summed = (shards.scatter_sum(x) if sharded else shards.all_sum(x))()
    if bias is not None:
        return summed + bias
    return summed.clone() if summed is x else summed


@torch.library.custom_op("cp_mesh::gather_rows", mutates_args=())
def _gather_rows(x: Tensor, num_rows: int, group_name: str) -> Tensor:
    whole = Shards(num_rows, group_name, "backward of a row linear").gather(x)()
    return whole.clone() if whole is x else whole


@_sum_rows.register_fake
def _(x, bias, group_name, sharded):  # type: ignore[no-untyped-def]
    own = Shards(x.shape[-2], group_name).own if sharded else x.shape[-2]
    return x.new_empty((*x.shape[:-2], own, x.shape[-1]))


@_gather_rows.register_fake
def _(x, num_rows, group_name):  # type: ignore[no-untyped-def]
    return x.new_empty((*x.shape[:-2], num_rows, x.shape[-1]))


class _SumRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, bias: Tensor | None, group_name: str, sharded: bool) -> Tensor:
        ctx.num_rows, ctx.group_name, ctx.sharded = x.shape[-2], group_name, sharded
        return _sum_rows(x, bias, group_name, sharded)

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> tuple[Any, ...]:
        of_x, of_bias, *_ = ctx.needs_input_grad
        whole = _gather_rows(dout, ctx.num_rows, ctx.group_name) if ctx.sharded and of_x else _once(dout)
        dbias = _rows(whole).sum(0) if of_bias else None
        if dbias is not None and ctx.sharded and not of_x:  # the weight is frozen: nothing was gathered
            dbias = _sum_rows(dbias[None], None, ctx.group_name, False)[0]
        return whole if of_x else None, dbias, None, None


def _once(dout: Tensor) -> Tensor:
    return _Once.apply(dout) if torch.is_grad_enabled() and not torch.compiler.is_compiling() else dout


class _Once(torch.autograd.Function):
    """What ``create_graph`` asks for where no op is called: a gradient that has none."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *_: Any) -> Any:
        return _refuse_second_backward(ctx)


def _refuse_second_backward(ctx: Any, *_: Any) -> None:
    raise UnsupportedError("cp_mesh: linears over tp can be differentiated once; use PyTorch's ColwiseParallel")


_column_linears_backward.register_autograd(_refuse_second_backward)
_gather_rows.register_autograd(_refuse_second_backward)
