"""Scores: what happens to q·k before the softmax.

`TERMS` lists the tensors that change scores, with their dims: one rule for all terms checks, slices and shards them. A
term's file here, of the same name, has its formula and its gradient, which the reference kernel uses; a fast kernel has
its own code for the terms in its `Capability.features`. To add one, see "Add a score term" in docs/extending.md.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from importlib import import_module
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from cp_mesh.kernels.functions import ScalarFunction


class Where(NamedTuple):
    """Positions of scores [B, H, rows, keys]: of their queries [rows] and keys [keys]."""

    q_pos: Tensor
    k_pos: Tensor

    @property
    def distance(self) -> Tensor:
        """int64 [rows, keys]: query position minus key position."""
        return self.q_pos[:, None] - self.k_pos


@dataclass(frozen=True)
class Term:
    """A tensor that changes scores.

    Attributes:
        name: the name of the argument, of the field of `Scores` and of the file.
        dims: of the tensor: "batch", "heads", "rows" of q, "keys" by position.
        broadcasts: whether the batch, heads and rows dims may have size 1.
        of_keys: whether it is added to scores, by positions; else the pass applies it at its end.
    """

    name: str
    dims: tuple[str, ...]
    broadcasts: bool = False
    of_keys: bool = True

    @cached_property
    def file(self) -> ModuleType:
        """The module of a term with ``of_keys``. Its added(x, where) returns what is added to scores, broadcast to
        [B, H, rows, keys], from x of these heads and rows; add_gradient(total, x, dscores, where) adds x's gradient.
        """
        return import_module(f"{__name__}.{self.name}")  # lazily, in the first call that uses it

    def sizes(self, of_q: dict[str, int]) -> tuple[tuple[int, ...], ...]:
        """The allowed sizes of each dim, given q's sizes and the number of keys."""
        one = (1,) if self.broadcasts else ()
        return tuple((of_q[dim],) if dim == "keys" else (*one, of_q[dim]) for dim in self.dims)

    def dim_of(self, what: str, shape: Sequence[int]) -> int | None:
        """The dim of this shape for "batch", "heads" or "rows"; None if it is missing, or of size 1 by broadcasting."""
        dim = self.dims.index(what) if what in self.dims else len(shape)
        return None if dim >= len(shape) or (self.broadcasts and shape[dim] == 1) else dim

    def narrow(self, x: Tensor, what: str, begin: int, end: int) -> Tensor:
        """The part of ``x`` for a range of heads or rows of q; ``x`` itself if it has no such dim."""
        dim = self.dim_of(what, x.shape)
        return x if dim is None else x.narrow(dim, begin, end - begin)


TERMS: dict[str, Term] = {
    "sinks": Term("sinks", ("heads",), of_keys=False),
    "alibi_slopes": Term("alibi_slopes", ("heads",)),
    "bias": Term("bias", ("batch", "heads", "rows", "keys"), broadcasts=True),
}
"""In the order of the ops' arguments and of their gradients."""
ADDED = tuple(name for name, term in TERMS.items() if term.of_keys)
"""Terms that are added to scores, by positions."""
OF_ROWS = tuple(name for name, term in TERMS.items() if "rows" in term.dims)
"""Terms that are sharded by query rows."""
FUNCTIONS = ("score_mod", "mask_mod")
"""Users' functions of the global indices of batch row, head, query and key."""
VECTORS = "vectors in functions"
"""The feature of functions that compute with vectors, or read more than single elements of captured tensors."""
POSITIONAL = frozenset({*ADDED, *FUNCTIONS, "dropout"})
"""Features that depend on positions; with any of them every tile's cover is a `Pairs`."""


@dataclass(frozen=True, eq=False)
class Scores:
    """The score of head h at query position p and key position t, before the mask:

        softcap(scale · q·k) - slope[h] · |p - t| + bias[b, h, row, t]

    with softcap(x) = cap · tanh(x / cap). A ``score_mod`` is applied to the result.

    Attributes:
        scale: factor on q·k.
        softcap: the bound cap of the scores, > 0; None: no bound.
        sinks: [H], accumulation dtype: logits that enter the softmax denominator of the head's rows without a value.
            Tile kernels ignore them: `MergingForward.finish` scales out and leaves lse unchanged, and a backward gets
            an lse that includes them or, if lse has a gradient, a dout scaled by `sinks.share_of_keys`.
        alibi_slopes: [H], accumulation dtype.
        bias: [1 or B, 1 or H, 1 or rows, seq_len], any floating dtype: rows of q or of the tile, by key *position*.
        dropout_p: the probability of dropping a normalised weight, 0 <= p < 1; other weights are scaled by
            1 / (1 - p); lse does not change.
        dropout_seed: int64 [2] on q's device, (seed, offset), which decide what is dropped: see `scores/dropout.py`.
        first_head, first_batch: the global indices of q's first head and batch row, for dropout and functions.
        score_mod: (score, b, h, q_idx, kv_idx) -> score, of global indices.
        mask_mod: (b, h, q_idx, kv_idx) -> whether the query sees the key; combined with the tile's cover by "and".
        captured: the tensors that score_mod reads, then those that mask_mod reads, unsharded. Floating-point ones have
            at least the accumulation dtype.
        in_order: whether gradients of captured tensors must be summed in a fixed order.
        wanted: which of alibi_slopes and bias need a gradient, and which captured tensors, named by `name_of_captured`.
        seq_len: an upper bound of all positions, exclusive.
    """

    scale: float
    softcap: float | None = None
    sinks: Tensor | None = None
    alibi_slopes: Tensor | None = None
    bias: Tensor | None = None
    dropout_p: float = 0.0
    dropout_seed: Tensor | None = None
    first_head: int = 0
    first_batch: int = 0
    score_mod: ScalarFunction | None = None
    mask_mod: ScalarFunction | None = None
    captured: tuple[Tensor, ...] = ()
    in_order: bool = False
    wanted: frozenset[str] = frozenset()
    seq_len: int = 2**31 - 1

    @cached_property
    def features(self) -> frozenset[str]:
        """The features that a kernel must support, as in `Capability.features`."""
        given = frozenset(name for name in ("softcap", *ADDED, *FUNCTIONS) if getattr(self, name) is not None)
        functions = [x for x in (self.score_mod, self.mask_mod) if x is not None]
        others = {"dropout": self.dropout_p > 0, VECTORS: not all(x.of_scalars for x in functions)}
        return given | {name for name, there in others.items() if there}

    @cached_property
    def needs_positions(self) -> bool:
        """Whether tiles need their positions, as a `Pairs`."""
        return not self.features.isdisjoint(POSITIONAL)

    def heads(self, begin: int, end: int) -> Scores:
        """The scores of query heads begin to end."""
        narrowed = _narrowed(vars(self), "heads", begin, end)
        if not narrowed and self.features.isdisjoint({"dropout", *FUNCTIONS}):
            return self
        return replace(self, first_head=self.first_head + begin, **narrowed)

    def rows(self, begin: int, end: int) -> Scores:
        """The scores of query rows begin to end."""
        if self.features.isdisjoint(OF_ROWS):
            return self
        return replace(self, **_narrowed(vars(self), "rows", begin, end))

    def modified(self, x: Tensor, where: Where) -> Tensor:
        """Scores [B, H, rows, keys] after score_mod."""
        if self.score_mod is None:
            return x
        return self.score_mod.of_pairs(x, self._indices(x, where), self._captured_by_score_mod)

    def modified_gradient(self, dscores: Tensor, x: Tensor, where: Where, into: ScoreGradients) -> Tensor:
        """The gradient of ``x``, given that of `modified`; adds the gradients of captured tensors to ``into``."""
        if self.score_mod is None:
            return dscores
        wanted = [i for i in range(self.score_mod.num_captured) if name_of_captured(i) in into]
        captured, indices = self._captured_by_score_mod, self._indices(x, where)
        dx, found = self.score_mod.gradients(dscores, x, indices, captured, wanted, self.in_order)
        for i, grad in zip(wanted, found, strict=True):
            into[name_of_captured(i)] += grad
        return dx

    def seen(self, x: Tensor, where: Where) -> Tensor | None:
        """mask_mod at scores ``x`` [B, H, rows, keys], bool of this shape; None without a mask_mod."""
        if self.mask_mod is None:
            return None
        return self.mask_mod.of_pairs(None, self._indices(x, where), self.captured[len(self._captured_by_score_mod) :])

    @property
    def _captured_by_score_mod(self) -> tuple[Tensor, ...]:
        return self.captured[: self.score_mod.num_captured] if self.score_mod is not None else ()

    def _indices(self, x: Tensor, where: Where) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        firsts = zip((self.first_batch, self.first_head), x.shape, strict=False)
        b, h = (torch.arange(first, first + num, device=x.device) for first, num in firsts)
        return b, h, where.q_pos, where.k_pos


def name_of_captured(i: int) -> str:
    """The name of captured tensor i in `Scores.wanted` and in the gradients requested from ops."""
    return f"captured.{i}"


class ScoreGradients(dict[str, Tensor]):
    """Partial gradients of `Scores.wanted` by name, summed over some query rows and keys, in the accumulation dtype.

    Gradients of captured tensors cover all heads and rows, and are not sliced by `part`.
    """

    @classmethod
    def zeros(cls, scores: Scores, dtype: torch.dtype) -> ScoreGradients:
        """Zeros in the shapes of the wanted tensors."""
        if not scores.wanted:
            return cls()
        given = vars(scores) | {name_of_captured(i): x for i, x in enumerate(scores.captured)}
        wanted = [name for name in given if name in scores.wanted]  # the order of a set may differ between ranks
        return cls({name: torch.zeros_like(given[name], dtype=dtype if name in TERMS else None) for name in wanted})

    def part(self, heads: tuple[int, int] | None = None, rows: tuple[int, int] | None = None) -> ScoreGradients:
        """Gradients of a range of heads, or of a range of rows, as views."""
        part = self if heads is None else ScoreGradients(self | _narrowed(self, "heads", *heads))
        return part if rows is None else ScoreGradients(part | _narrowed(part, "rows", *rows))

    def add_(self, other: ScoreGradients) -> None:
        """Add in place."""
        for name, x in self.items():
            x += other[name]


def _narrowed(tensors: Mapping[str, Any], dim: str, begin: int, end: int) -> dict[str, Any]:
    """The terms among ``tensors``, each narrowed to a range of heads or rows."""
    terms = (term for name, term in TERMS.items() if tensors.get(name) is not None)
    return {term.name: term.narrow(tensors[term.name], dim, begin, end) for term in terms}
