"""Linears over tp, whose communication runs beside their products.

Column linears that read one input are one node of autograd: the input is gathered once, and in the backward its
gradient is summed once. There the gather runs beside the product for the input's gradient, and that gradient is summed
while the products for the weights run.

A gather for a product begins with the product of this rank's rows, which needs none; the rows of others follow as they
come. Products that are summed over tp begin with the rows of others, which travel while this rank's own are computed.
`_chosen` says where this pays, and over what rows travel: functional collectives, which have a stream of their own and
are waited for where their result is read, or symmetric memory.

They are ops, so that compiled code keeps this order, and neither merges the backward's gather with the forward's nor
keeps what a policy of memory let go.

Shapes: B batch rows, S rows of the sequence, C features of the input, O features of an output on this rank.
"""

from collections.abc import Hashable, Iterator, Sequence
from contextlib import contextmanager
from itertools import chain
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.distributed_c10d import _resolve_process_group

from cp_mesh.agreement import agree_once, announce_refusal
from cp_mesh.agreement.contents import fingerprint
from cp_mesh.call import autocast
from cp_mesh.costs import H200
from cp_mesh.errors import UnsupportedError, refuse
from cp_mesh.transport import choose_transport, make_moves
from cp_mesh.transport.shards import Moves, Shards

PRODUCT_RATE = 650e12
"""FLOP/s of long products in bf16 on an H200. Where others are slower, in fp32 too, more travels beside them."""
LINK_RATE = H200.link_rate
PER_PRODUCT = 2 * H200.per_launch
"""Seconds that a product takes longer in two parts."""


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
    x, *rest = _cast(x, *weights, *(bias for bias in biases if bias is not None))
    cast_weights, of_bias = rest[: len(weights)], iter(rest[len(weights) :])
    cast_biases = [None if bias is None else next(of_bias) for bias in biases]
    keeps = torch.is_grad_enabled() and any(weight.requires_grad for weight in weights)
    outs: tuple[Tensor, ...] = _ColumnLinears.apply(call, keeps, x, *cast_weights, *cast_biases)
    return outs


def _cast(*given: Tensor) -> tuple[Tensor, ...]:
    """As autocast does it; refuse dtypes that differ then."""
    cast = tuple(autocast(*given))
    if len(dtypes := {tensor.dtype for tensor in cast}) > 1:
        hint = "cast the input, or use autocast"
        refuse("linears", "inputs and weights of one dtype", sorted(map(str, dtypes)), hint)
    return cast


def refuse_transforms(what: str) -> None:
    """Refuse what differentiates otherwise than backward() does."""
    if not torch.compiler.is_compiling() and torch._C._are_functorch_transforms_active():
        hint = "use backward() or torch.autograd.grad"
        refuse(f"cp_mesh: {what}", "no transform of torch.func", "vmap, grad or the like", hint, UnsupportedError)


def _rows(x: Tensor) -> Tensor:
    return x.reshape(-1, x.shape[-1])


def _batch(x: Tensor) -> Tensor:
    """[B, rows, D]"""
    return x.reshape(-1, *x.shape[-2:])


def _chosen(shards: Shards, transport: str, x: Tensor, widths: tuple[int, int], num_products: int) -> str | None:
    """Over what rows travel beside the products of a rank's rows, or None: one collective before or after all products.

    Of each rank's rows of x [..., rows, D], ``widths[0]`` features travel, and ``widths[1]`` are on the other side of
    their products, on the rank that has most. What can be hidden is the shorter of a rank's products and its rows' way;
    it costs further products for each other rank, and two barriers. Symmetric memory that was asked for is taken also
    where this does not pay. Shards have to be equal.
    """
    size = shards.group.size()
    if size == 1:
        return None
    chosen = choose_transport(transport, shards.group, x.device) if transport == "symmetric_memory" else None
    if shards.num_rows % size:
        return None
    own = x.shape[:-2].numel() * shards.num_rows // size * widths[0]
    hidden = min(2 * own * widths[1] / PRODUCT_RATE, (size - 1) * own * x.itemsize / LINK_RATE)
    if chosen is None and hidden > (size - 1) * num_products * PER_PRODUCT + 2 * H200.per_barrier:
        chosen = choose_transport(transport, shards.group, x.device)
    return chosen


@contextmanager
def _moving(chosen: str, shards: Shards, device: torch.device) -> Iterator[Moves]:
    moves = make_moves(chosen, shards, device)
    try:
        yield moves
    finally:
        moves.close()


def _product(x: Tensor, matrix: Tensor, out: Tensor, bias: Tensor | None = None) -> None:
    """out [B, n, M] = x [B, n, K] @ matrix [K, M] + bias [M]."""
    if len(x) > 1:
        torch.bmm(x, matrix.expand(len(x), -1, -1), out=out)
        if bias is not None:
            out += bias
    elif bias is None:
        torch.mm(x[0], matrix, out=out[0])
    else:
        torch.addmm(bias, x[0], matrix, out=out[0])


def _add_product(out: Tensor, x: Tensor, matrix: Tensor) -> None:
    """out [B, n, M] += x [B, n, K] @ matrix [K, M]."""
    if len(x) > 1:
        out.baddbmm_(x, matrix.expand(len(x), -1, -1))
    else:
        out[0].addmm_(x[0], matrix)


def check_rows(
    what: str,
    x: Tensor,
    num_rows: int,
    group_name: str,
    sharded: bool,
    *kind: Hashable,
    labels: Tensor | None = None,
    features: int | None = None,
    transport: str = "auto",
) -> None:
    """Before the first collective of a call; the first one of a kind is compared over tp, with its labels.

    ``features``: in the place of those of x, where these may differ between ranks.
    """
    group: dist.ProcessGroup = _resolve_process_group(group_name)  # type: ignore[arg-type]
    try:
        expected = Shards(num_rows, group_name).own if sharded else num_rows
        if x.shape[-2] != expected:
            hint = "pass DTensors, whose shape says how many rows there are, where tp does not divide them"
            refuse(f"{what}: input", f"{expected} of {num_rows} rows on this rank", x.shape[-2], hint)
    except Exception as error:
        announce_refusal(group, error, in_check_mode=False)
        raise
    shape, features = tuple(x.shape[:-2]), x.shape[-1] if features is None else features
    agree_once(
        group,
        (what, sharded, x.ndim, features, x.dtype, transport, *kind),
        lambda: {
            **{"call": what, "rows of the sequence": f"{num_rows}", "batch": f"{shape}", "features": f"{features}"},
            **{"dtype": f"{x.dtype}", "transport": transport, "kind": f"{kind}"},
            "labels on tp ranks": fingerprint(labels),
        },
    )


@torch.library.custom_op("cp_mesh::column_linears", mutates_args=())
def _column_linears(
    x: Tensor,
    weights: Sequence[Tensor],
    biases: Sequence[Tensor | None],
    num_rows: int,
    group_name: str,
    sharded: bool,
    most_features: int,
    transport: str,
    keeps: bool,
) -> list[Tensor]:
    """Outputs [..., S, O], and if asked for the gathered input [..., S, C]."""
    check_rows("column linears", x, num_rows, group_name, sharded, transport=transport)
    shards = Shards(num_rows, group_name, "column linears")
    if sharded and (chosen := _chosen(shards, transport, x, (x.shape[-1], most_features), len(weights))):
        rows, shape = _batch(x), (*x.shape[:-2], num_rows)
        outs = [x.new_empty(len(rows), num_rows, len(weight)) for weight in weights]
        with _moving(chosen, shards, x.device) as moves:
            gather = moves.gather(rows, "kept" if keeps else None)
            for part, its_rows in chain([(shards.of(shards.group.rank()), rows)], gather.parts()):
                for out, weight, bias in zip(outs, weights, biases, strict=True):
                    _product(its_rows, weight.t(), out[:, part], bias)
            outs += [gather.whole()] if keeps else []
        return [out.view(*shape, out.shape[-1]) for out in outs]
    whole = shards.gather(x)() if sharded else x
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
    most_features: int,
    transport: str,
    gathers: bool,
) -> list[Tensor]:
    """Gradients that are wanted: of the input, of each weight, of each bias.

    ``gathers``: x is this rank's rows; else it is the whole input, and None if no weight wants a gradient.
    """
    shards = Shards(num_rows, group_name, "backward of column linears")
    widths = weights[0].shape[1], most_features
    chosen = _chosen(shards, transport, douts[0], widths, len(weights)) if sharded and wants[0] else None
    if chosen == "symmetric_memory":
        return _beside_copies(douts, x, weights, wants, shards, gathers)
    whole = shards.gather(x) if gathers and x is not None else None
    if wants[0]:
        dx = _rows(douts[0]) @ weights[0]
        for dout, weight in zip(douts[1:], weights[1:], strict=True):
            dx.addmm_(_rows(dout), weight)
        dx = dx.view(*douts[0].shape[:-1], dx.shape[-1])
        summed = shards.scatter_sum(dx) if sharded else shards.all_sum(dx)
    grads = _of_parameters(douts, x if whole is None else whole(), wants[1:])
    return [summed(), *grads] if wants[0] else grads


def _of_parameters(douts: Sequence[Tensor], whole: Tensor | None, wants: Sequence[bool]) -> list[Tensor]:
    """Gradients of each weight and of each bias, those that are wanted."""
    grads, (of_weights, of_biases) = [], (wants[: len(douts)], wants[len(douts) :])
    if any(of_weights):
        assert whole is not None
        grads += [_rows(dout).t() @ _rows(whole) for dout, wanted in zip(douts, of_weights, strict=True) if wanted]
    return grads + [_rows(dout).sum(0) for dout, wanted in zip(douts, of_biases, strict=True) if wanted]


def _beside_copies(
    douts: Sequence[Tensor],
    x: Tensor | None,
    weights: Sequence[Tensor],
    wants: Sequence[bool],
    shards: Shards,
    gathers: bool,
) -> list[Tensor]:
    """As `_column_linears_backward`, where sums that arrive can be added to: this rank's own rows come last."""
    rank, of_weights = shards.group.rank(), wants[1 : 1 + len(weights)]
    batches = [_batch(dout) for dout in douts]
    with _moving("symmetric_memory", shards, douts[0].device) as moves:
        gather = moves.gather(_batch(x), "lent") if gathers and x is not None else None
        sums = moves.sums(batches[0], weights[0].shape[1], 1 if any(of_weights) else 2)

        def write(part: slice, buffer: Tensor) -> None:
            _product(batches[0][:, part], weights[0], buffer)
            for dout, weight in zip(batches[1:], weights[1:], strict=True):
                _add_product(buffer, dout[:, part], weight)

        for chunk in sums.chunks:
            sums.send(chunk, write)
        grads = _of_parameters(douts, x if gather is None else gather.whole(), wants[1:])
        for chunk in sums.chunks:
            out, part = sums.receive(chunk), shards.of(rank, chunk)
            for dout, weight in zip(batches, weights, strict=True):
                _add_product(out, dout[:, part], weight)
    return [sums.out.view(*douts[0].shape[:-2], *sums.out.shape[1:]), *grads]


@_column_linears.register_fake
def _(x, weights, biases, num_rows, group_name, sharded, most_features, transport, keeps):  # type: ignore[no-untyped-def]
    shape = (*x.shape[:-2], num_rows)
    outs = [x.new_empty((*shape, weight.shape[0])) for weight in weights]
    return [*outs, x.new_empty((*shape, x.shape[-1]))] if keeps else outs


@_column_linears_backward.register_fake
def _(douts, x, weights, wants, num_rows, group_name, sharded, most_features, transport, gathers):  # type: ignore[no-untyped-def]
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
        outs = _column_linears(x, weights, biases, *call.fixed, keeps_whole)
        ctx.save_for_backward((outs[-1] if keeps_whole else x) if keeps else None, *weights)
        return tuple(outs[: len(weights)])

    @staticmethod
    def backward(ctx: Any, *douts: Tensor) -> tuple[Any, ...]:
        (x, *weights), wants = ctx.saved_tensors, list(ctx.needs_input_grad[2:])
        found = iter(_column_linears_backward(list(douts), x, weights, wants, *ctx.call.fixed, ctx.gathers))
        return None, None, *(next(found) if wanted else None for wanted in wants)


def row_linear(
    x: Tensor, weight: Tensor, bias: Tensor | None, group_name: str, most_features: int, transport: str
) -> Tensor:
    """`F.linear` of this rank's features, summed over tp ranks, each of which gets its own rows.

    Args:
        x: [..., S, C of this rank].
        weight: [O, C of this rank].
        bias: [O], which all ranks hold, or None.
        group_name: of the tp group, of two ranks at least.
        most_features: C of the rank that has most.
        transport: as in `Columns`.

    Returns:
        [..., rows of this rank, O].
    """
    x, weight, *rest = _cast(x, weight, *([] if bias is None else [bias]))
    call, parameters = (group_name, most_features, transport), (weight, *rest, *[None] * (1 - len(rest)))
    if not torch.is_grad_enabled() or not any(y.requires_grad for y in (x, weight, *rest)):
        plain: Tensor = _row_linear(x, *parameters, *call)
        return plain
    awaited = _RowGradients.apply(call, weight.requires_grad, x.requires_grad, x, *parameters)
    out: Tensor = _RowLinear.apply(call, awaited, *(None if y is None else y.detach() for y in (x, *parameters)))
    return out


@torch.library.custom_op("cp_mesh::row_linear", mutates_args=())
def _row_linear(
    x: Tensor, weight: Tensor, bias: Tensor | None, group_name: str, most_features: int, transport: str
) -> Tensor:
    num_rows = x.shape[-2]
    check_rows("row linear", x, num_rows, group_name, False, "sharded", features=len(weight), transport=transport)
    shards, matrix = Shards(num_rows, group_name, "row linear"), weight.t()
    if chosen := _chosen(shards, transport, x, (len(weight), most_features), 2):
        rows, rank = _batch(x), shards.group.rank()
        with _moving(chosen, shards, x.device) as moves:
            sums = moves.sums(rows, len(weight), 2)
            for chunk in sums.chunks:
                sums.send(chunk, lambda part, buffer: _product(rows[:, part], matrix, buffer))
            for chunk in sums.chunks:
                _add_product(sums.receive(chunk), rows[:, shards.of(rank, chunk)], matrix)
        out = sums.out.view(*x.shape[:-2], *sums.out.shape[1:])
    else:
        out = shards.scatter_sum(F.linear(x, weight))()
    return out if bias is None else out + bias


@torch.library.custom_op("cp_mesh::row_linear_backward", mutates_args=())
def _row_linear_backward(
    dout: Tensor,
    x: Tensor | None,
    weight: Tensor | None,
    wants_bias: bool,
    num_rows: int,
    group_name: str,
    most_features: int,
    transport: str,
) -> list[Tensor]:
    """Gradients of the input, if the weight is given; of the weight, if the input is; and of the bias."""
    shards = Shards(num_rows, group_name, "backward of a row linear")
    if x is None and weight is None:
        return [shards.all_sum(_rows(dout).sum(0))()]

    def of_parameters(whole: Tensor) -> list[Tensor]:
        return _of_parameters([whole], x, [x is not None, wants_bias])

    if weight is None:
        return of_parameters(shards.gather(dout)())
    chosen = _chosen(shards, transport, dout, (len(weight), most_features), 1)
    if chosen is None:
        whole = shards.gather(dout)()
        return [whole @ weight, *of_parameters(whole)]
    rows = _batch(dout)
    dx = dout.new_empty(len(rows), num_rows, weight.shape[1])
    with _moving(chosen, shards, dout.device) as moves:
        gather = moves.gather(rows, None if x is None and not wants_bias else "lent")
        for part, its_rows in chain([(shards.of(shards.group.rank()), rows)], gather.parts()):
            _product(its_rows, weight, dx[:, part])
        grads = of_parameters(gather.whole()) if x is not None or wants_bias else []
    return [dx.view(*dout.shape[:-2], *dx.shape[1:]), *grads]


@torch.library.custom_op("cp_mesh::row_linear_awaited", mutates_args=())
def _awaited(x: Tensor, features: int, group_name: str) -> Tensor:
    """A single zero in the shape of the output: groups have no ranks in traced code."""
    return x.new_zeros(()).expand(*x.shape[:-2], Shards(x.shape[-2], group_name).own, features)


@_awaited.register_fake
def _(x, features, group_name):  # type: ignore[no-untyped-def]
    return x.new_zeros(()).expand(*x.shape[:-2], Shards(x.shape[-2], group_name).own, features)


@_row_linear.register_fake
def _(x, weight, bias, group_name, *_):  # type: ignore[no-untyped-def]
    return x.new_empty((*x.shape[:-2], Shards(x.shape[-2], group_name).own, weight.shape[0]))


@_row_linear_backward.register_fake
def _(dout, x, weight, wants_bias, num_rows, *_):  # type: ignore[no-untyped-def]
    grads = [] if weight is None else [dout.new_empty((*dout.shape[:-2], num_rows, weight.shape[1]))]
    grads += [] if x is None else [dout.new_empty((dout.shape[-1], x.shape[-1]))]
    return [*grads, dout.new_empty(dout.shape[-1])] if wants_bias else grads


class _RowGradients(torch.autograd.Function):
    """Takes the gradient of what `_RowLinear` computes. A checkpoint's recomputation ends where the last tensor was
    saved, which is here: before the product and its sum."""

    @staticmethod
    def forward(
        ctx: Any, call: tuple[str, int, str], keeps: bool, keeps_weight: bool, x: Tensor, weight: Tensor, _: Any
    ) -> Tensor:
        ctx.call, ctx.num_rows = call, x.shape[-2]
        ctx.save_for_backward(x if keeps else None, weight if keeps_weight else None)
        return _awaited(x, weight.shape[0], call[0])

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> tuple[Any, ...]:
        wants = ctx.needs_input_grad[3:]
        found = iter(_row_linear_backward(dout, *ctx.saved_tensors, wants[2], ctx.num_rows, *ctx.call))
        return None, None, None, *(next(found) if wanted else None for wanted in wants)


class _RowLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, call: tuple[str, int, str], awaited: Tensor, *given: Any) -> Tensor:
        return _row_linear(*given, *call)

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> tuple[Any, ...]:
        return None, dout, None, None, None


def sum_rows(x: Tensor, bias: Tensor | None, group_name: str, sharded: bool) -> Tensor:
    """The sum over tp ranks of x [..., S, O], plus a bias [O] that all of them hold, if all rows are given to all.

    Its backward gathers what the forward scattered.

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
_row_linear_backward.register_autograd(_refuse_second_backward)
_gather_rows.register_autograd(_refuse_second_backward)
