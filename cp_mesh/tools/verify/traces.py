"""Traces: what goes into and comes out of every module in one forward and backward, row by row, in little memory.

A row is all that a tensor holds of one position. Kept of it are its products with a few random vectors, the same on all
ranks: two rows have the same products if they are the same, and the distance of products is that of rows, within a
factor of about two. So the reference's trace of a whole sequence is small, and any rank compares its own rows with it.

Shapes: S positions, n rows of this rank, P random vectors.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from cp_mesh._torch import COMPILED_CALL, WRAPPED, loaded_dynamo, tree_leaves, unwrapped

NUM_VECTORS = 8
PART = 1 << 24  # elements of a large tensor that are looked at together


class Place(NamedTuple):
    """Where a tensor was seen: the ``call``-th call of a module, and which of its arguments or outputs it was."""

    module: str
    what: str
    call: int

    def __str__(self) -> str:
        again = f" (call {self.call + 1})" if self.call else ""
        return f"{self.module or 'the model'}{again}, {self.what}"


class Rows(NamedTuple):
    """What is kept of a tensor.

    Attributes:
        shape: the tensor's.
        by_dim: products [its length, P] of each dim that may be that of the sequence.
        positions: of this rank's rows, int64 [n].
    """

    shape: tuple[int, ...]
    by_dim: dict[int, Tensor]
    positions: Tensor


class Trace:
    """The rows of one run.

    Args:
        seq_len: S.
        positions: says, while the model runs, which positions this rank's rows have, int64 [n].

    Attributes:
        forward: arguments and outputs of modules, in the order in which these were entered and left.
        backward: gradients of outputs, in the order in which they came.
    """

    def __init__(self, seq_len: int, positions: Callable[[], Tensor]) -> None:
        self.seq_len, self.positions = seq_len, positions
        self.forward: dict[Place, Rows] = {}
        self.backward: dict[Place, Rows] = {}
        self._calls: dict[str, int] = {}

    @contextmanager
    def of(self, model: nn.Module, gradients: bool = True) -> Iterator[None]:
        """Record the forward of ``model`` that runs inside, and its backward whenever it runs.

        Modules that are compiled, and those inside of them, are left alone.
        """
        handles = []
        for name, module in traced_modules(model):
            handles.append(module.register_forward_pre_hook(functools.partial(self._before, name), with_kwargs=True))
            handles.append(module.register_forward_hook(functools.partial(self._after, name, gradients)))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _before(self, name: str, module: nn.Module, args: Any, kwargs: Any) -> None:
        call = self._calls[name] = self._calls.get(name, -1) + 1
        for argument, value in named_arguments(module, args, kwargs).items():
            for i, x in enumerate(tree_leaves(value)):
                place = Place(name, f"argument {argument}" + f"[{i}]" * (i > 0), call)
                if (rows := self._rows(x)) is not None:
                    self.forward[place] = rows

    def _after(self, name: str, gradients: bool, module: nn.Module, args: Any, output: Any) -> None:
        call = self._calls[name]
        for i, x in enumerate(tree_leaves(output)):
            place = Place(name, "output" + f" {i}" * (i > 0), call)
            if (rows := self._rows(x)) is None:
                continue
            self.forward[place] = rows
            if gradients and x.requires_grad and not isinstance(x, DTensor):
                x.register_hook(functools.partial(self._note_gradient, place, rows.positions))

    def _note_gradient(self, place: Place, positions: Tensor, grad: Tensor) -> None:
        if (rows := self._rows(grad, positions)) is not None:
            self.backward[place] = rows

    def _rows(self, x: Any, positions: Tensor | None = None) -> Rows | None:
        if not isinstance(x, Tensor) or x.ndim == 0 or x.is_sparse:
            return None
        return rows_of(x, self.seq_len, self.positions() if positions is None else positions)


@torch.no_grad()
def rows_of(x: Tensor, seq_len: int, positions: Tensor) -> Rows:
    """What is kept of a tensor that holds the rows of these positions, or all."""
    x = x.detach()
    if isinstance(x, DTensor):
        x = x.full_tensor()
    if x.is_complex():
        x = torch.view_as_real(x)
    dims = [dim for dim, length in enumerate(x.shape) if length in (seq_len, len(positions))]
    return Rows(tuple(x.shape), {dim: products(x, dim) for dim in dims}, positions)


def products(x: Tensor, dim: int) -> Tensor:
    """[length of dim, P] of a tensor: what is kept of its rows."""
    rows = x.movedim(dim, 0).flatten(1) if x.ndim > 1 else x[:, None]
    generator = torch.Generator().manual_seed(rows.shape[1])
    vectors = torch.randn(rows.shape[1], NUM_VECTORS, generator=generator, dtype=torch.float64).to(x.device)
    return torch.cat([part.double() @ vectors for part in rows.split(max(1, PART // max(1, rows.shape[1])))])


def traced_modules(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """All modules that run in eager mode, with their names; what wraps a module is left out."""
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
    """The arguments of a call by their names, as far as the signature has them."""
    try:
        names = list(inspect.signature(module.forward).parameters)
    except (TypeError, ValueError):
        names = []
    names += [str(i) for i in range(len(names), len(args))]
    return dict(zip(names, args, strict=False)) | dict(kwargs)


class Pair(NamedTuple):
    """Products of this rank's rows [n, P], those of the reference, their positions, and the reference's RMS."""

    got: Tensor
    want: Tensor
    positions: Tensor
    size: Tensor


def pair(got: Rows | None, want: Rows, seq_len: int) -> Pair | None:
    """The rows of this rank and of the reference at the same positions; None where shapes cannot be compared."""
    if got is None or len(got.shape) != len(want.shape):
        return None
    for dim, theirs in want.by_dim.items():
        others = got.shape[:dim] + got.shape[dim + 1 :], want.shape[:dim] + want.shape[dim + 1 :]
        if want.shape[dim] != seq_len or others[0] != others[1] or (mine := got.by_dim.get(dim)) is None:
            continue
        positions = got.positions
        if got.shape[dim] == seq_len != len(positions):  # whole on this rank
            positions = torch.arange(seq_len, device=positions.device)
        if len(mine) != len(positions):
            continue
        real = positions < seq_len  # the others are padding
        size = theirs.nan_to_num(0, 0, 0).square().sum(1).mean().sqrt().clamp(min=1e-300)
        return Pair(mine[real], theirs[positions[real]], positions[real], size)
    return None


def gaps(found: Pair, seq_len: int, scale: float = 1.0) -> Tensor:
    """How far rows of this rank are from ``scale`` times those of the reference.

    Returns:
        float64 [S], relative to the RMS of the reference's rows; 0 where this rank has none.
    """
    off = found.got - scale * found.want
    off = off.masked_fill(found.got.isnan() & found.want.isnan(), 0)
    errors = off.norm(dim=1).nan_to_num(float("inf"), float("inf")) / (found.size * max(abs(scale), 1e-300))
    return errors.new_zeros(seq_len).index_put((found.positions,), errors)
