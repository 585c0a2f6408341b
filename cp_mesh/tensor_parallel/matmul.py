"""Linears over tp are two functions, `gather_matmul` and `matmul_scatter`; the backward of each is the other.

Gather and matmul: this rank's rows are multiplied first, while the rows of other ranks arrive; those follow in order of
arrival. Matmul and reduce-scatter: the rows of other ranks are multiplied first and sent while this rank's own are
computed. `overlap.py` decides where this pays, and over which transport: functional collectives, which have a stream of
their own and are waited for where their result is read, or symmetric memory. Elsewhere one collective runs before or
after all matmuls.

`colwise` and `rowwise` make them ops, so that compiled code keeps this order. It then neither merges the backward's
gather with the forward's nor saves tensors that a checkpointing policy dropped.

Shapes: B batch rows, S rows of the sequence, C features of the input, O features of an output on this rank.
"""

import copy
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from cp_mesh._torch import in_transform, resolve_group, spec_of_dtensor
from cp_mesh.call.spec import autocast
from cp_mesh.comm.agreement import compare, refusing
from cp_mesh.comm.fingerprints import fingerprint
from cp_mesh.comm.shards import Shards
from cp_mesh.errors import UnsupportedError, refuse

Use = Callable[[Any], list[Tensor]]
"""Computes tensors of all rows of an input, [..., S, K]."""


class LinearSpec(NamedTuple):
    """How linears over tp read and write rows; the last arguments of their ops.

    Attributes:
        num_rows: S of the whole sequence.
        group_name: of the tp group.
        sharded: True if rows are sharded outside of the linears, False if all ranks have all rows.
        most_features: features that are sharded over tp, on the rank that has most, so that all ranks decide alike.
        transport: "auto", "functional" or "symmetric_memory", for communication beside matmuls.
    """

    num_rows: int
    group_name: str
    sharded: bool
    most_features: int = 0
    transport: str = "auto"

    def shards(self, what: str) -> Shards:
        return Shards(self.num_rows, self.group_name, what)

    def whole(self, x: Tensor, features: int) -> Tensor:
        """Empty [..., S, features] like x [..., rows, D]."""
        return x.new_empty((*x.shape[:-2], self.num_rows, features))

    @property
    def num_own(self) -> int:
        """Rows of this rank outside of the linears."""
        return Shards(self.num_rows, self.group_name).own if self.sharded else self.num_rows

    def own(self, x: Tensor, features: int) -> Tensor:
        """Empty [..., rows of this rank, features] like x [..., rows, D]."""
        return x.new_empty((*x.shape[:-2], self.num_own, features))


def cast_alike(*given: Tensor | None) -> list[Any]:
    """The tensors in the autocast dtype, and None; refuses dtypes that still differ then."""
    cast = autocast(*(x for x in given if x is not None))
    if len(dtypes := {x.dtype for x in cast}) > 1:
        hint = "cast the input, or use autocast"
        refuse("linears", "inputs and weights of one dtype", sorted(map(str, dtypes)), hint)
    found = iter(cast)
    return [None if x is None else next(found) for x in given]


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


def graded_names(names: Sequence[str], tensors: Sequence[Tensor | None]) -> str:
    """Names of the tensors that require a gradient, on which the collectives of the backward depend."""
    given = zip(names, tensors, strict=True) if torch.is_grad_enabled() else ()
    return ", ".join([name for name, x in given if x is not None and x.requires_grad]) or "none"


def check_rows(
    what: str, x: Tensor, spec: LinearSpec, *kind: Hashable, graded: str, alike: Mapping[str, Tensor] | None = None,
    features: int | None = None,
) -> None:  # fmt: skip
    """Check the rows of a call before its first collective; the first call of a kind is compared over tp.

    ``graded``: `graded_names` of the call's tensors. ``alike``: tensors that must be equal on all ranks.
    ``features``: compared instead of x's feature count, for calls in which that may differ between ranks.
    """
    group, num_rows = resolve_group(spec.group_name), spec.num_rows
    with refusing(group):
        if x.shape[-2] != spec.num_own:
            hint = "pass DTensors, whose shape has the number of rows, if tp does not divide it"
            refuse(f"{what}: input", f"{spec.num_own} of {num_rows} rows on this rank", x.shape[-2], hint)
    shape, features = tuple(x.shape[:-2]), x.shape[-1] if features is None else features
    compare(
        group,
        (what, spec.sharded, x.ndim, features, x.dtype, spec.transport, graded, *kind),
        lambda: {
            **{"call": what, "rows of the sequence": f"{num_rows}", "batch": f"{shape}", "features": f"{features}"},
            **{"dtype": f"{x.dtype}", "tensors that require a gradient": graded},
            **{"transport": spec.transport, "kind": f"{kind}"},
            **{name: fingerprint(y) for name, y in (alike or {}).items()},
        },
        "tp",
    )


def gradients_of_parameters(douts: Sequence[Tensor], wants: Sequence[bool], whole: Tensor | None) -> list[Tensor]:
    """The wanted gradients of each weight and of each bias; ``whole``: all rows of the input, which weights need."""
    grads, rows = [], [*map(flat_rows, douts)]
    for dout, wanted in zip(rows, wants[: len(rows)], strict=True):
        if wanted:
            assert whole is not None
            grads.append(dout.t() @ flat_rows(whole))
    return grads + [dout.sum(0) for dout, wanted in zip(rows, wants[len(rows) :], strict=True) if wanted]


def gather_matmul(
    x: Tensor, matrices: Sequence[Tensor], biases: Sequence[Tensor | None], spec: LinearSpec, what: str,
    whole: Literal["lent", "kept"] | None, use: Use = lambda every: [every],
) -> list[Tensor]:  # fmt: skip
    """All ranks' rows of x [..., rows, K] times each matrix [K, M], plus its bias [M].

    With ``whole`` also the tensors that ``use`` returns for all rows of x, which are valid in ``use`` alone if "lent".
    """
    from cp_mesh.tensor_parallel.overlap import chosen_transport, moving  # loads the transports

    shards, chosen, given = spec.shards(what), None, [*zip(matrices, biases, strict=True)]
    if spec.sharded and given:
        chosen = chosen_transport(shards, spec.transport, x, (x.shape[-1], spec.most_features), len(given))
    if chosen is None:
        every = shards.gather(x)() if spec.sharded else x
        flat = flat_rows(every)
        outs = [flat @ matrix if bias is None else torch.addmm(bias, flat, matrix) for matrix, bias in given]
        found = [] if whole is None else use(every)
    else:
        rows, outs = as_batch(x), [spec.whole(as_batch(x), matrix.shape[1]) for matrix in matrices]
        with moving(chosen, shards, x.device) as moves:
            moves.gather(rows, whole)
            for part, its_rows in moves.parts():
                for out, (matrix, bias) in zip(outs, given, strict=True):
                    write_product(its_rows, matrix, out[:, part], bias)
            found = [] if whole is None else use(moves.whole().view(*x.shape[:-2], spec.num_rows, x.shape[-1]))
    return [out.view(*x.shape[:-2], spec.num_rows, out.shape[-1]) for out in outs] + found


def matmul_scatter(
    xs: Sequence[Tensor], matrices: Sequence[Tensor], spec: LinearSpec, what: str,
    num_chunks: int = 2, gathered: Tensor | None = None, use: Use | None = None,
) -> list[Tensor]:  # fmt: skip
    """The sum over ranks, and over i, of xs[i] [..., S, K] @ matrices[i] [K, M]: this rank's rows of it, or all rows.

    With ``use`` also the tensors that it returns while the sum travels, for all rows of ``gathered``, or None.
    """
    from cp_mesh.tensor_parallel.overlap import chosen_transport, moving  # loads the transports

    shards, chosen, lead = spec.shards(what), None, xs[0].shape[:-2]
    if spec.sharded:
        widths = matrices[0].shape[1], spec.most_features
        chosen = chosen_transport(shards, spec.transport, xs[0], widths, num_chunks * len(matrices))
    if chosen is None or (chosen == "functional" and use is not None):  # one collective is beside ``use``
        whole = None if gathered is None else shards.gather(gathered)
        out = flat_rows(xs[0]) @ matrices[0]
        for x, matrix in zip(xs[1:], matrices[1:], strict=True):
            out.addmm_(flat_rows(x), matrix)
        out = out.view(*lead, spec.num_rows, out.shape[-1])
        summed = shards.scatter_sum(out) if spec.sharded else shards.all_sum(out)
        found = [] if use is None else use(None if whole is None else whole())
        return [summed(), *found]
    rows = [as_batch(x) for x in xs]

    def add(part: slice, out: Tensor, first: int = 0) -> None:
        for x, matrix in zip(rows[first:], matrices[first:], strict=True):
            add_product(out, x[:, part], matrix)

    def write(part: slice, out: Tensor) -> None:
        write_product(rows[0][:, part], matrices[0], out)
        add(part, out, 1)

    with moving(chosen, shards, xs[0].device) as moves:
        if gathered is not None:
            moves.gather(as_batch(gathered), "lent")
        moves.sums(rows[0], matrices[0].shape[1], num_chunks)
        for chunk in moves.chunks:
            moves.send(chunk, write)
        found = [] if use is None else use(None if gathered is None else moves.whole())
        for chunk in moves.chunks:
            add(shards.of(shards.group.rank(), chunk), moves.receive(chunk))
    return [moves.out.view(*lead, *moves.out.shape[1:]), *found]


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


def refuse_second_backward(ctx: Any, *_: Any) -> None:
    raise UnsupportedError("cp_mesh: linears over tp can be differentiated once; use PyTorch's ColwiseParallel")
