"""Styles over tp for linears, embeddings and the last linear: overlapped communication, and logits in chunks.

They compose with PyTorch's styles, with the styles of this library over cp, and with FSDP2 around both. Weights are
DTensors over tp, like those of PyTorch's `ColwiseParallel` and `RowwiseParallel`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor

from cp_mesh._torch import is_view, times_written
from cp_mesh.call.dtensor import local_part
from cp_mesh.call.spec import check_choice, is_autocast
from cp_mesh.comm.agreement import announced_over, refusing
from cp_mesh.comm.exchange import TRANSPORTS
from cp_mesh.errors import ArgumentError, UnsupportedError, refuse, written
from cp_mesh.geometry.layouts import chunk_bounds
from cp_mesh.tensor_parallel.colwise import column_linears
from cp_mesh.tensor_parallel.matmul import LinearSpec, graded_names, refuse_transforms
from cp_mesh.tensor_parallel.rowwise import row_linear, sum_rows
from cp_mesh.tensor_parallel.vocab_parallel import DeferredLogits, Head, embed
from cp_mesh.wrap import LINEAR, Style, replace_forward

Mode = Literal["reduce_scatter", "all_reduce"]
"""How tp shards the rows between the linears: along the sequence, or not at all (all rows on every rank)."""
Transport = Literal["auto", "functional", "symmetric_memory"]
"""The transport of communication beside matmuls."""
_SHARD = "_cp_mesh_shard"  # attribute of a parameter: the DTensor that replaced it, for modules that share it
_TOGETHER = "_cp_mesh_together"  # of a module and its linears, so that a deep copy has its own: a `_Together`


_announced = announced_over(lambda style, where, *_: where.group_name)


class _OverTP(Style):
    """Base of the styles: their options, and the check of modules."""

    key = LINEAR
    placements: Mapping[str, Placement] = {"weight": Shard(0), "bias": Shard(0)}
    kind: type[nn.Module] = nn.Linear
    vocabulary = ""  # the attribute of a module that says how many tokens it has

    def __init__(self, mode: str, **options: Any) -> None:
        super().__init__()
        style, transport = type(self).__name__, options.get("transport", "auto")
        check_choice(f"{style}: mode", mode, ("reduce_scatter", "all_reduce"), "reduce_scatter")
        check_choice(f"{style}: transport", transport, TRANSPORTS, "functional")
        if transport == "symmetric_memory" and mode == "all_reduce":
            hint = "mode='reduce_scatter', or transport='auto', works"
            refuse(f"{style}: transport", "'auto' or 'functional' in mode 'all_reduce'", repr(transport), hint)
        self.mode = self.mode_over_tp = mode
        self.options = options
        vars(self).update(options)

    def linears(self, module: nn.Module) -> dict[str, Any]:
        """The modules whose parameters the style shards, by their names in the module."""
        return {"": module}

    def check(self, module: nn.Module, mesh: DeviceMesh, where: str = "") -> None:
        """Refuse modules of another kind, with a forward of their own, or sharded in another way."""
        super().check(module, mesh, where)
        style, kind = type(self).__name__, self.kind
        for linear in self.linears(module).values():
            if not isinstance(linear, kind):
                hint = "name the linears, or leave the module out"
                refuse(style, f"nn.{kind.__name__}", type(linear).__name__, hint)
            if type(linear).forward is not kind.forward or "forward" in vars(linear):
                got = f"{type(linear).__name__}, which has a forward of its own"
                hint = "PyTorch's styles pass DTensors to such a forward"
                refuse(style, f"the forward of nn.{kind.__name__}", got, hint, UnsupportedError)
            for name, placement in self.placements.items():
                sharded = _sharded(getattr(linear, name))
                if sharded is not None and (sharded.device_mesh != mesh or sharded.placements != (placement,)):
                    got = f"{written(sharded.placements)} on {written(sharded.device_mesh)}"
                    expected = f"a plain tensor, or a DTensor {written((placement,))} over tp"
                    hint = "apply the style to plain modules, before fully_shard"
                    refuse(f"{type(linear).__name__}.{name}", expected, got, hint)
        size, ranks = getattr(module, self.vocabulary, mesh.size()), mesh.size()
        if -(-size // ranks) * (ranks - 1) >= size:
            refuse(style, f"tokens for each of {ranks} tp ranks", f"a vocabulary of {size}", "use fewer tp ranks")

    def bind(self, module: nn.Module, mesh: DeviceMesh) -> tuple[Any, ...]:
        """Replace parameters by DTensors; modules that share a parameter share the DTensor."""
        for linear in self.linears(module).values():
            for name, placement in self.placements.items():
                parameter: Any = getattr(linear, name)
                sharded = _sharded(parameter)
                if parameter is not None and sharded is None:
                    values = distribute_tensor(parameter.detach(), mesh, [placement], src_data_rank=self.src_data_rank)
                    sharded = nn.Parameter(values, requires_grad=parameter.requires_grad)
                    setattr(parameter, _SHARD, sharded)
                linear.register_parameter(name, sharded)
        group, style, in_rows = mesh.get_group(), type(self).__name__, self.mode == "reduce_scatter"
        return (_AxisValues(mesh, group.group_name, group.size(), group.rank(), style, in_rows, **self.options),)


class OverlappedColwise(_OverTP):
    """Column-parallel linears: output features are sharded over tp, and linears of one input gather it once.

    The backward overlaps the gather of the input with the matmul for the input's gradient, and the reduction of that
    gradient over tp with the matmuls for the weights.

    Args:
        names: of linears inside of the module that read one input: ``"wq", "wk", "wv"`` of an attention module, ``"w1",
            "w3"`` of a feed-forward one. All are computed at the call of the first one, and each must be called once
            with this same tensor. Without names the module is itself a linear.
        mode: "reduce_scatter": the input is this rank's rows of the sequence, dim -2. "all_reduce": it is all rows.
        recompute_all_gather: save this rank's rows for the backward and gather them again there, instead of saving all
            rows. Only in mode "reduce_scatter".
        transport: for communication beside matmuls in mode "reduce_scatter"; it needs a number of rows that tp divides.
            "functional": collectives. "symmetric_memory": copy engines of GPUs of one NVLink host, always beside
            matmuls. "auto": symmetric memory if available, else collectives. "auto" and "functional" overlap only where
            a cost model says that it pays (`cp_mesh/tensor_parallel/overlap.py`).

    The input is a plain tensor with equally many rows on each rank, or a DTensor over tp, whose shards have
    `torch.chunk` sizes. Outputs are plain tensors [..., S, features of this rank]. Biases are sharded like the outputs.
    Frozen parameters cost no matmul, and gradients that nobody needs no communication. No second derivative.

    Raises:
        ArgumentError: if names are not linears, or differ in input features or dtype; in a forward also if a linear is
            called with another input, twice, or not at all, or if the number of rows is wrong.
        UnsupportedError: for linears with a forward of their own.

    Example:
        >>> plan = {"layers.*.attention": OverlappedColwise("wq", "wk", "wv")}  # doctest: +SKIP
        >>> parallelize(model, mesh["tp"], plan)  # doctest: +SKIP
    """

    def __init__(
        self,
        *names: str,
        mode: Mode = "reduce_scatter",
        recompute_all_gather: bool = False,
        transport: Transport = "auto",
    ) -> None:
        super().__init__(mode, transport=transport)
        if recompute_all_gather and mode == "all_reduce":
            hint = "mode='reduce_scatter' gathers"
            refuse("OverlappedColwise: recompute_all_gather", "False in mode 'all_reduce'", True, hint)
        self.names, self.recompute_all_gather = names, recompute_all_gather

    def linears(self, module: nn.Module) -> dict[str, Any]:
        return {name: _submodule(module, name) for name in self.names} or {"": module}

    def parts(self, module: nn.Module) -> list[nn.Module]:
        return [*dict.fromkeys((*self.linears(module).values(), module))]

    def check(self, module: nn.Module, mesh: DeviceMesh, where: str = "") -> None:
        super().check(module, mesh, where)
        if len(kinds := {(x.in_features, x.weight.dtype) for x in self.linears(module).values()}) > 1:
            refuse(f"OverlappedColwise{self.names}", "one in_features and dtype", kinds, "give each a style of its own")

    def apply(self, module: nn.Module, mesh: DeviceMesh) -> None:
        (where,), together = self.bind(module, mesh), _Together()
        for name, linear in self.linears(module).items():
            replace_forward(linear, LINEAR, where.style, partial(self.run, where, name))
        if self.names:
            replace_forward(module, LINEAR, where.style, partial(self._run_parent, where))
        for part in self.parts(module):
            vars(part)[_TOGETHER] = together

    @_announced
    def _run_parent(
        self, where: _AxisValues, module: nn.Module, forward: Callable[..., Any], /, *args: Any, **kwargs: Any
    ) -> Any:
        """The forward of the module whose linears are computed together."""
        together: Any = getattr(module, _TOGETHER)
        together.linears = {name: _submodule(module, name) for name in self.names}
        try:
            result = forward(*args, **kwargs)
            if together.waiting:
                got, hint = f"no call of {', '.join(together.waiting)}", "leave it out of the names"
                refuse(f"OverlappedColwise{self.names}", "a call of each in the module's forward", got, hint)
        finally:
            together.linears, together.given, together.waiting = {}, (None, 0), {}
        return result

    @_announced
    def run(self, where: _AxisValues, name: str, module: nn.Module, forward: Any, /, input: Tensor) -> Tensor:
        together: Any = getattr(module, _TOGETHER)
        if not together.linears:  # a style without names, or a call from outside of the parent's forward
            return self._compute(where, input, {"": module})[0]
        if not together.waiting:
            outs = self._compute(where, input, together.linears)
            together.given = input, _version(input)
            together.waiting = dict(zip(together.linears, outs, strict=True))
        given, version = together.given
        if input is not given or version != _version(input) or name not in together.waiting:
            got = f"{name} called with another tensor, one written to since, or twice"
            hint = "give a linear with another input a style of its own"
            refuse(f"OverlappedColwise{self.names}", "one call of each, with one tensor", got, hint)
        return together.waiting.pop(name)

    def _compute(self, where: _AxisValues, x: Tensor, linears: Mapping[str, Any]) -> tuple[Tensor, ...]:
        kinds = "weight", "bias"
        weights, biases = ([where.given(getattr(linear, kind)) for linear in linears.values()] for kind in kinds)
        names = [f"{name}.{kind}".lstrip(".") for kind in kinds for name in linears]
        spec = where.spec(where.num_rows(x), *(linear.out_features for linear in linears.values()))
        recompute = self.recompute_all_gather or where.size == 1
        return column_linears(where.read(x, where.rows(x)), weights, biases, spec, names, recompute)


@dataclass
class _Together:
    """Linears with one input, while the forward of their parent runs.

    Attributes:
        linears: by name, of the module whose forward runs; empty outside of the forward.
        given: the input on which they were computed, and its version.
        waiting: outputs that no linear has returned yet.
    """

    linears: dict[str, nn.Module] = field(default_factory=dict)
    given: tuple[Tensor | None, int] = (None, 0)
    waiting: dict[str, Tensor] = field(default_factory=dict)


def _version(x: Tensor) -> int:
    """How often a tensor was written to; 0 where PyTorch does not count that."""
    return 0 if torch.compiler.is_compiling() or x.is_inference() else times_written(x)


class OverlappedRowwise(_OverTP):
    """A row-parallel linear: input features are sharded over tp, and the output is summed over tp.

    Args:
        mode: "reduce_scatter": each rank gets its rows of the sequence, dim -2. "all_reduce": each gets all rows.
        use_local_output: True returns plain tensors; in mode "reduce_scatter" tp must then divide the number of rows.
            False returns DTensors over tp.
        transport: as in `OverlappedColwise`.

    The input is [..., S, features of this rank], plain, or a DTensor sharded along its last dim. A bias is added once,
    and its gradient is complete on every rank.

    Raises:
        ArgumentError: if tp does not divide the number of rows, with local outputs.
        UnsupportedError: for a linear with a forward of its own.
    """

    placements: Mapping[str, Placement] = {"weight": Shard(1), "bias": Replicate()}

    def __init__(
        self, *, mode: Mode = "reduce_scatter", use_local_output: bool = True, transport: Transport = "auto"
    ) -> None:
        super().__init__(mode, transport=transport, use_local_output=use_local_output)

    @_announced
    def run(self, where: _AxisValues, module: Any, forward: Any, /, input: Tensor) -> Tensor:
        num_rows, x = input.shape[-2], where.read(input, Shard(input.ndim - 1))
        where.check_output(num_rows)
        weight, bias = where.given(module.weight), where.given(module.bias)
        return where.output(row_linear(x, weight, bias, where.spec(num_rows, module.in_features)), num_rows)


class VocabParallelEmbedding(_OverTP):
    """An embedding whose vocabulary is sharded over tp.

    Args:
        mode: "reduce_scatter": each rank gets its rows of the sequence, dim -2 of the output. "all_reduce": all rows.
        use_local_output: as in `OverlappedRowwise`.

    The tokens are int64 or int32 [..., S], equal on all tp ranks.

    Raises:
        ArgumentError: if a tp rank would hold no token of the vocabulary.
        UnsupportedError: for an embedding with max_norm, scale_grad_by_freq or sparse gradients.
    """

    kind, vocabulary = nn.Embedding, "num_embeddings"
    placements: Mapping[str, Placement] = {"weight": Shard(0)}

    def __init__(self, *, mode: Mode = "reduce_scatter", use_local_output: bool = True) -> None:
        super().__init__(mode, use_local_output=use_local_output)

    def check(self, module: Any, mesh: DeviceMesh, where: str = "") -> None:
        super().check(module, mesh, where)
        if module.max_norm is not None or module.scale_grad_by_freq or module.sparse:
            got = f"max_norm={module.max_norm}, scale_grad_by_freq={module.scale_grad_by_freq}, sparse={module.sparse}"
            refuse("VocabParallelEmbedding", "none of these", got, "leave them out", UnsupportedError)

    @_announced
    def run(self, where: _AxisValues, module: Any, forward: Any, /, input: Tensor) -> Tensor:
        num_rows, tokens, weight = input.shape[-1], where.read(input, Replicate()), where.given(module.weight, True)
        where.check_output(num_rows)
        with refusing(where.group_name, IndexError):  # of a token on this rank alone
            found = embed(
                tokens, weight, where.first_token(module.num_embeddings), module.num_embeddings, module.padding_idx
            )
        graded = graded_names(["weight"], [weight])
        return where.output(sum_rows(found, tokens, graded, where.group_name, where.sharded), num_rows)


class VocabParallelHead(_OverTP):
    """The last linear, with its vocabulary sharded over tp; the loss computes the logits in chunks of rows.

    The module returns a `DeferredLogits` (`vocab_parallel.py`), which `cross_entropy` takes in place of logits, so that
    the logits of all rows never exist at once. Its ``whole()`` computes all logits.

    Args:
        mode: "reduce_scatter": the input is this rank's rows of the sequence, dim -2. "all_reduce": it is all rows.

    Raises:
        ArgumentError: if a tp rank would hold no token of the vocabulary.
        UnsupportedError: for a linear with a forward of its own.
    """

    vocabulary = "out_features"

    def __init__(self, *, mode: Mode = "reduce_scatter") -> None:
        super().__init__(mode)

    @_announced
    def run(self, where: _AxisValues, module: Any, forward: Any, /, input: Tensor) -> DeferredLogits:
        num_rows, x = where.num_rows(input), where.read(input, where.rows(input))
        weight, bias = where.given(module.weight, True), where.given(module.bias, True)
        of_other = not torch.compiler.is_compiling() and is_view(x)  # FSDP2 warns if a model returns a view
        x = _Hidden.apply(x, weight, bias) if isinstance(input, DTensor) or of_other or not x.requires_grad else x
        head = Head(weight, bias, where.first_token(module.out_features), module.out_features, where.group_name)
        return DeferredLogits(x, head, num_rows, where.sharded)


class _Hidden(torch.autograd.Function):
    """A copy that requires a gradient if a parameter does: FSDP2 skips reduction if no output requires one.

    Without the copy FSDP2 would warn of a view that the model returns.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, dx: Tensor) -> tuple[Tensor, None, None]:
        return dx, None, None


@dataclass(frozen=True)
class _AxisValues:
    """A style on the tp axis as plain values, since torch.compile traces a module's forward."""

    mesh: DeviceMesh
    group_name: str
    size: int
    rank: int
    style: str
    sharded: bool
    use_local_output: bool = True
    transport: str = "auto"

    def rows(self, x: Tensor) -> Shard | Replicate:
        """How rows, dim -2, lie between linears."""
        return Shard(x.ndim - 2) if self.sharded else Replicate()

    def num_rows(self, x: Tensor) -> int:
        """Rows of the whole sequence of an input that lies as `rows`."""
        return x.shape[-2] if isinstance(x, DTensor) or not self.sharded else x.shape[-2] * self.size

    def read(self, x: Tensor, expected: Shard | Replicate) -> Tensor:
        """The local tensor of an input."""
        if not isinstance(x, DTensor):
            return x
        if x.device_mesh != self.mesh or x.placements != (expected,):
            got, hint = f"{written(x.placements)} on {written(x.device_mesh)}", "redistribute it, or pass a plain one"
            refuse(f"{self.style}: input", f"a DTensor {written((expected,))} over tp", got, hint)
        return local_part(x, x.placements)

    def given(self, parameter: Any, local: bool = False) -> Any:
        """This rank's part of a weight or bias; a DTensor for autograd nodes that take the local part themselves.

        That costs less host time. It is the local part with ``local``, and under torch.compile and autocast, where the
        gradient passes a cast.
        """
        refuse_transforms("linears over tp")
        if parameter is None:
            return None
        if not isinstance(parameter, DTensor) or parameter.device_mesh != self.mesh:
            got = f"{type(parameter).__name__} on {written(getattr(parameter, 'device_mesh', 'no mesh'))}"
            hint = "call fully_shard on the block, or on the module that holds all linears of one input"
            refuse("linears over tp: a weight", "a DTensor over tp", got, hint)
        local = local or torch.compiler.is_compiling() or is_autocast(parameter.device.type)
        return local_part(parameter, parameter.placements) if local else parameter

    def spec(self, num_rows: int, *features: int) -> LinearSpec:
        """``features``: those of each linear that are sharded over tp."""
        most = sum(-(-count // self.size) for count in features)
        return LinearSpec(num_rows, self.group_name, self.sharded, most, self.transport)

    def check_output(self, num_rows: int) -> None:
        if self.sharded and self.use_local_output and num_rows % self.size:
            hint = "use_local_output=False returns DTensors, which carry the sequence length"
            refuse(self.style, f"a multiple of {self.size} rows, for local outputs", num_rows, hint)

    def output(self, out: Tensor, num_rows: int) -> Tensor:
        if self.use_local_output:
            return out
        shape = torch.Size((*out.shape[:-2], num_rows, out.shape[-1]))
        options: dict[str, Any] = {"shape": shape, "stride": torch.empty(shape, device="meta").stride()}
        return DTensor.from_local(out, self.mesh, [self.rows(out)], run_check=False, **options)

    def first_token(self, size: int) -> int:
        """The first token of this rank, of a vocabulary of ``size`` tokens."""
        return chunk_bounds(size, self.size, self.rank)[0]


def _submodule(module: nn.Module, name: str) -> nn.Module:
    try:
        return module.get_submodule(name)
    except AttributeError:
        names = ", ".join(key for key, part in module.named_modules() if isinstance(part, nn.Linear)) or "none"
        refuse("OverlappedColwise", "names of linears in the module", repr(name), f"it has {names}", ArgumentError)


def _sharded(parameter: Any) -> Any:
    """The DTensor that a parameter is, or that replaced it in another module."""
    return parameter if isinstance(parameter, DTensor) else getattr(parameter, _SHARD, None)
