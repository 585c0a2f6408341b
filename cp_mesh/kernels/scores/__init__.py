"""Scores: what happens to q·k before the softmax, as terms that each know their tensor.

`TERMS` is the table of tensors that change scores: which dims each has, so that its shape is checked, and it is sliced
and placed on a mesh, by one rule. What a term adds to scores, and its gradient, is in the file of its name here, as the
reference kernel applies it; a fast kernel has code of its own for those that it names in `Capability.features`. How to
add one: "Add a score term" in docs/extending.md.
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
    """Where scores [B, H, rows, keys] are: the positions of their queries [rows] and keys [keys]."""

    q_pos: Tensor
    k_pos: Tensor

    @property
    def distance(self) -> Tensor:
        """int64 [rows, keys]: positions of the queries less those of the keys."""
        return self.q_pos[:, None] - self.k_pos


@dataclass(frozen=True)
class Term:
    """A tensor that changes scores.

    Attributes:
        name: its name as an argument, in `Scores`, and of its file.
        dims: what each runs over: "batch", "heads", "rows" of q, "keys" by position, or an odd number of "distances".
        broadcasts: whether dims of the batch, heads and rows may have size 1, for all.
        of_keys: whether it is added to scores of keys, by their positions; else the pass applies it when it ends.
    """

    name: str
    dims: tuple[str, ...]
    broadcasts: bool = False
    of_keys: bool = True

    @cached_property
    def file(self) -> ModuleType:
        """Of a term of keys: added(x, where) to scores, x being narrowed to these heads and rows: [B, H, rows, keys],
        broadcast; and add_gradient(total, x, dscores, where), which adds to ``total``, like x, what dscores contribute.
        """
        return import_module(f"{__name__}.{self.name}")  # by the first call that has it

    def sizes(self, of_q: dict[str, int]) -> tuple[tuple[int, ...], ...]:
        """The sizes that each dim may have, from those of q and the number of keys; none: odd ones."""
        one = (1,) if self.broadcasts else ()
        return tuple(
            () if dim == "distances" else (of_q[dim],) if dim == "keys" else (*one, of_q[dim]) for dim in self.dims
        )

    def dim_of(self, what: str, shape: Sequence[int]) -> int | None:
        """Which dim of a tensor of this shape runs over batch, heads or rows of q; None if it is the same for all."""
        dim = self.dims.index(what) if what in self.dims else len(shape)
        return None if dim >= len(shape) or (self.broadcasts and shape[dim] == 1) else dim

    def narrow(self, x: Tensor, what: str, begin: int, end: int) -> Tensor:
        """Its part for some heads or rows of q; ``x`` itself if it is the same for all."""
        dim = self.dim_of(what, x.shape)
        return x if dim is None else x.narrow(dim, begin, end - begin)


TERMS: dict[str, Term] = {
    "sinks": Term("sinks", ("heads",), of_keys=False),
    "alibi_slopes": Term("alibi_slopes", ("heads",)),
    "relative_bias": Term("relative_bias", ("heads", "distances")),
    "bias": Term("bias", ("batch", "heads", "rows", "keys"), broadcasts=True),
}
"""In the order in which the ops take them, and return their gradients."""
ADDED = tuple(name for name, term in TERMS.items() if term.of_keys)
"""Terms that are added to scores; they read positions."""
OF_ROWS = tuple(name for name, term in TERMS.items() if "rows" in term.dims)
"""Terms of which each rank holds the rows of its queries."""
FUNCTIONS = ("score_mod", "mask_mod")
"""Functions of users, which read the global indices of batch row, head, query and key."""
VECTORS = "vectors in functions"
"""Of functions that compute with more than scalars, or read captured tensors not at single elements."""
POSITIONAL = frozenset({*ADDED, *FUNCTIONS, "dropout"})
"""Features of scores that depend on positions; with any of them every tile's cover is a `Pairs`."""


@dataclass(frozen=True, eq=False)
class Scores:
    """What a score of head h, query position p and key position t is, before the mask:

        softcap(scale · q·k) - slope[h] · |p - t| + table[h, clip(p - t, -R, R) + R] + bias[b, h, row, t]

    with softcap(x) = cap · tanh(x / cap). If there is a ``score_mod`` it is then what that makes of it.

    Attributes:
        scale: factor on q·k.
        softcap: the bound of the scores, > 0; None: there is none.
        sinks: [H], accumulation dtype: logits that join the denominator of the head's rows and bring no value. No tile
            knows of them: `MergingForward.finish` scales out, and leaves lse as it is; a backward is given the lse that
            includes them, and so returns the right gradients.
        alibi_slopes: [H], accumulation dtype.
        relative_bias: the table [H, 2R + 1], accumulation dtype.
        bias: [1 or B, 1 or H, 1 or rows, seq_len], any floating dtype: q's rows, or the tile's, by key *position*.
        dropout_p: the probability with which a normalised weight is dropped, 0 <= p < 1; the others are scaled by
            1 / (1 - p), and lse sees none of it.
        dropout_seed: int64 [2] on q's device, (seed, offset), which tell what is dropped: see `scores/dropout.py`.
        first_head, first_batch: the global indices of q's first head and batch row, for dropout and functions.
        score_mod: score(score, b, h, q_idx, kv_idx), of global indices.
        mask_mod: (b, h, q_idx, kv_idx) -> whether the query sees the key, beside what the tile's cover says.
        captured: the tensors that score_mod reads, then those that mask_mod reads: whole ones, for all heads and rows.
            Floating point ones have at least the accumulation dtype.
        in_order: whether gradients of captured tensors must be sums in a fixed order.
        wanted: which of alibi_slopes, relative_bias and bias need a gradient, and which captured tensors, by
            `name_of_captured`.
        seq_len: positions are below it.
    """

    scale: float
    softcap: float | None = None
    sinks: Tensor | None = None
    alibi_slopes: Tensor | None = None
    relative_bias: Tensor | None = None
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
        """What a kernel must be able to do, by the names of `Capability.features`."""
        given = frozenset(name for name in ("softcap", *ADDED, *FUNCTIONS) if getattr(self, name) is not None)
        functions = [x for x in (self.score_mod, self.mask_mod) if x is not None]
        others = {"dropout": self.dropout_p > 0, VECTORS: not all(x.of_scalars for x in functions)}
        return given | {name for name, there in others.items() if there}

    @cached_property
    def needs_positions(self) -> bool:
        """Whether tiles must tell their positions."""
        return not self.features.isdisjoint(POSITIONAL)

    def heads(self, begin: int, end: int) -> Scores:
        """Those of the query heads begin to end."""
        narrowed = _narrowed(vars(self), "heads", begin, end)
        if not narrowed and self.features.isdisjoint({"dropout", *FUNCTIONS}):
            return self
        return replace(self, first_head=self.first_head + begin, **narrowed)

    def rows(self, begin: int, end: int) -> Scores:
        """Those of the query rows begin to end."""
        if self.features.isdisjoint(OF_ROWS):
            return self
        return replace(self, **_narrowed(vars(self), "rows", begin, end))

    def modified(self, x: Tensor, where: Where) -> Tensor:
        """What score_mod makes of scores [B, H, rows, keys]."""
        if self.score_mod is None:
            return x
        return self.score_mod.of_pairs(x, self._indices(x, where), self._captured_by_score_mod)

    def modified_gradient(self, dscores: Tensor, x: Tensor, where: Where, into: ScoreGradients) -> Tensor:
        """Gradients of ``x``, given those of `modified`; adds those of captured tensors to ``into``."""
        if self.score_mod is None:
            return dscores
        wanted = [i for i in range(self.score_mod.num_captured) if name_of_captured(i) in into]
        captured, indices = self._captured_by_score_mod, self._indices(x, where)
        dx, found = self.score_mod.gradients(dscores, x, indices, captured, wanted, self.in_order)
        for i, grad in zip(wanted, found, strict=True):
            into[name_of_captured(i)] += grad
        return dx

    def seen(self, x: Tensor, where: Where) -> Tensor | None:
        """bool [B, H, rows, keys] of scores ``x`` of this shape: what mask_mod says; None if there is none."""
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
    """Of a captured tensor among `Scores.wanted` and the gradients that ops are asked for."""
    return f"captured.{i}"


class ScoreGradients(dict[str, Tensor]):
    """Gradients of `Scores.wanted` by name, in the accumulation dtype: sums over some rows of queries and some keys.

    Those of captured tensors are of all heads and rows: no part of them is another tensor.
    """

    @classmethod
    def zeros(cls, scores: Scores, dtype: torch.dtype) -> ScoreGradients:
        """Of the shapes of the scores' tensors."""
        if not scores.wanted:
            return cls()
        given = vars(scores) | {name_of_captured(i): x for i, x in enumerate(scores.captured)}
        wanted = [name for name in given if name in scores.wanted]  # a set has no order that all ranks have
        return cls({name: torch.zeros_like(given[name], dtype=dtype if name in TERMS else None) for name in wanted})

    def part(self, heads: tuple[int, int] | None = None, rows: tuple[int, int] | None = None) -> ScoreGradients:
        """Views of a range of heads, or of a range of rows."""
        part = self if heads is None else ScoreGradients(self | _narrowed(self, "heads", *heads))
        return part if rows is None else ScoreGradients(part | _narrowed(part, "rows", *rows))

    def add_(self, other: ScoreGradients) -> None:
        """Add in place."""
        for name, x in self.items():
            x += other[name]


def _narrowed(tensors: Mapping[str, Any], dim: str, begin: int, end: int) -> dict[str, Any]:
    """Of the terms among them, the part for a range of heads or rows."""
    terms = (term for name, term in TERMS.items() if tensors.get(name) is not None)
    return {term.name: term.narrow(tensors[term.name], dim, begin, end) for term in terms}
