"""Record the inputs and outputs of every module in one forward, row by row.

A row is the part of a tensor at one position. A trace keeps only products of rows with a few random vectors, which are
the same on all ranks. Equal rows have equal products, and distances of products equal those of rows within a factor of
about two. So a trace of the whole sequence is small, and each rank can compare its local rows with the reference.

Shapes: S positions, n rows of this rank, P random vectors.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from cp_mesh._torch import COMPILED_CALL, WRAPPED, loaded_dynamo, tree_leaves, unwrapped

OUTPUTS = ("logits", "last_hidden_state")  # names of entries, before others
NUM_VECTORS = 8
PART = 1 << 24  # elements of a large tensor that are processed at a time


class TracedPlace(NamedTuple):
    """Where a tensor was recorded: the module, the argument or output, and the number of the module's call, from 0."""

    module: str
    what: str
    call: int

    def __str__(self) -> str:
        again = f" (call {self.call + 1})" if self.call else ""
        return f"{self.module or 'the model'}{again}, {self.what}"


class RowProducts(NamedTuple):
    """Products of the rows of a tensor.

    Attributes:
        shape: shape of the tensor.
        by_dim: for each dim that may be the sequence dim, products [length of the dim, P].
        positions: positions of this rank's rows, int64 [n].
    """

    shape: tuple[int, ...]
    by_dim: dict[int, Tensor]
    positions: Tensor


class Trace:
    """The rows of all modules in one run.

    Args:
        seq_len: S.
        positions: returns the positions of this rank's rows, int64 [n], while the model runs.

    Attributes:
        forward: arguments and outputs of modules, in order of execution.
    """

    def __init__(self, seq_len: int, positions: Callable[[], Tensor]) -> None:
        self.seq_len, self.positions = seq_len, positions
        self.forward: dict[TracedPlace, RowProducts] = {}
        self._calls: dict[str, int] = {}

    @contextmanager
    def of(self, model: nn.Module, modules: Iterable[tuple[str, nn.Module]] | None = None) -> Iterator[None]:
        """Record forwards of ``modules`` with their names inside this context; None: `traced_modules` of the model."""
        with ExitStack() as stack:
            for name, module in traced_modules(model) if modules is None else modules:
                before, after = (functools.partial(each, name) for each in (self._before, self._after))
                stack.callback(module.register_forward_pre_hook(before, with_kwargs=True).remove)
                stack.callback(module.register_forward_hook(after).remove)
            yield

    def _before(self, name: str, module: nn.Module, args: Any, kwargs: Any) -> None:
        call = self._calls[name] = self._calls.get(name, -1) + 1
        for argument, value in named_arguments(module, args, kwargs).items():
            for i, x in enumerate(tree_leaves(value)):
                place = TracedPlace(name, f"argument {argument}" + f"[{i}]" * (i > 0), call)
                if (rows := self._rows(x)) is not None:
                    self.forward[place] = rows

    def _after(self, name: str, module: nn.Module, args: Any, output: Any) -> None:
        call = self._calls[name]
        for i, x in enumerate(tree_leaves(output)):
            place = TracedPlace(name, "output" + f" {i}" * (i > 0), call)
            if (rows := self._rows(x)) is not None:
                self.forward[place] = rows

    def _rows(self, x: Any) -> RowProducts | None:
        if not isinstance(x, Tensor) or x.ndim == 0 or x.is_sparse:
            return None
        return rows_of(x, self.seq_len, self.positions())


@torch.no_grad()
def rows_of(x: Tensor, seq_len: int, positions: Tensor) -> RowProducts:
    """The `RowProducts` of a tensor that has the rows at these positions, or all rows of the sequence."""
    x = x.detach()
    if isinstance(x, DTensor):
        x = x.full_tensor()
    if x.is_complex():
        x = torch.view_as_real(x)
    dims = [dim for dim, length in enumerate(x.shape) if length in (seq_len, len(positions))]
    return RowProducts(tuple(x.shape), {dim: products(x, dim) for dim in dims}, positions)


def products(x: Tensor, dim: int) -> Tensor:
    """Products [length of dim, P] of the rows of a tensor with the random vectors."""
    rows = x.movedim(dim, 0).flatten(1) if x.ndim > 1 else x[:, None]
    generator = torch.Generator().manual_seed(rows.shape[1])
    vectors = torch.randn(rows.shape[1], NUM_VECTORS, generator=generator, dtype=torch.float64, device="cpu").to(
        x.device
    )
    return torch.cat([part.double() @ vectors for part in rows.split(max(1, PART // max(1, rows.shape[1])))])


def traced_modules(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """All modules that run in eager mode, with their names; wrappers of modules are skipped."""
    dynamo = loaded_dynamo()
    compiled: list[str] = []
    for name, module in model.named_modules():
        if any(name.startswith(prefix) for prefix in compiled):
            continue
        in_place = module.__dict__.get(COMPILED_CALL) is not None
        if in_place or (dynamo is not None and isinstance(module, dynamo.OptimizedModule)):
            compiled.append(f"{name}." if name else "")
            continue
        if not any(child in WRAPPED for child, _ in module.named_children()):
            yield unwrapped(name), module


def named_arguments(module: nn.Module, args: Any, kwargs: Any) -> dict[str, Any]:
    """The arguments of a call by name; positional arguments without a name in the signature get their index."""
    try:
        names = list(inspect.signature(module.forward).parameters)
    except (TypeError, ValueError):
        names = []
    names += [str(i) for i in range(len(names), len(args))]
    return dict(zip(names, args, strict=False)) | dict(kwargs)


def output_of(output: Any, num_dims: int) -> Tensor | None:
    """The logits in what a model returns, or its first tensor with that many dims or more; whole if tp shards it."""
    entries = output if isinstance(output, Mapping) else {name: getattr(output, name, None) for name in OUTPUTS}
    found: Any = next((entries[name] for name in OUTPUTS if entries.get(name) is not None), output)
    if hasattr(type(found), "whole"):  # logits that the loss computes in chunks
        found = found.whole()
    if not isinstance(found, Tensor):
        found = next((x for x in tree_leaves(found) if isinstance(x, Tensor) and x.ndim >= num_dims), None)
    return found.full_tensor() if isinstance(found, DTensor) else found


class Pair(NamedTuple):
    """Products of this rank's rows and of the reference, [n, P] each, positions, and the RMS of the whole reference."""

    got: Tensor
    want: Tensor
    positions: Tensor
    size: Tensor


def pair(got: RowProducts | None, want: RowProducts, seq_len: int) -> Pair | None:
    """Pair rows of this rank and of the reference at equal positions; None if shapes cannot be compared."""
    if got is None or len(got.shape) != len(want.shape):
        return None
    for dim, theirs in want.by_dim.items():
        others = got.shape[:dim] + got.shape[dim + 1 :], want.shape[:dim] + want.shape[dim + 1 :]
        if want.shape[dim] != seq_len or others[0] != others[1] or (mine := got.by_dim.get(dim)) is None:
            continue
        positions = got.positions
        if got.shape[dim] == seq_len != len(positions):  # this rank has the whole sequence
            positions = torch.arange(seq_len, device=positions.device)
        if len(mine) != len(positions):
            continue
        real = positions < seq_len  # larger positions are padding
        size = theirs.nan_to_num(0, 0, 0).square().sum(1).mean().sqrt().clamp(min=1e-300)
        return Pair(mine[real], theirs[positions[real]], positions[real], size)
    return None


def gaps(found: Pair, seq_len: int) -> Tensor:
    """Distances of this rank's rows from the rows of the reference.

    Returns:
        float64 [S], relative to the RMS of the reference's rows; 0 at positions that this rank does not have.
    """
    off = found.got - found.want
    off = off.masked_fill(found.got.isnan() & found.want.isnan(), 0)
    errors = off.norm(dim=1).nan_to_num(float("inf"), float("inf")) / found.size
    return errors.new_zeros(seq_len).index_put((found.positions,), errors)
