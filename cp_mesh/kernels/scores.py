"""Scores: what happens to q·k before the softmax, as terms that each know their tensor.

A `Term` is one tensor that changes scores: which dims it has (so its shape is checked, and it is sliced and placed on a
mesh, by one rule), what it adds to a score and what gradient it gets. The reference kernel applies terms as they are
written here; a fast kernel has code of its own for those that it names in `Capability.features`. How to add one:
"Add a score term" in docs/contributing.md.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, ClassVar, Literal, NamedTuple

import torch
from torch import Tensor

from cp_mesh.kernels.functions import ScalarFunction

Dim = Literal["batch", "heads", "rows", "keys", "distances"]
"""What a dim of a term's tensor runs over: of q, or keys by position, or an odd number of distances."""


class Where(NamedTuple):
    """Where scores [B, H, rows, keys] are: the positions of their queries [rows] and keys [keys]."""

    q_pos: Tensor
    k_pos: Tensor

    @property
    def distance(self) -> Tensor:
        """int64 [rows, keys]: positions of the queries less those of the keys."""
        return self.q_pos[:, None] - self.k_pos


class Term(ABC):
    """A tensor that is added to scores.

    Attributes:
        name: its name as an argument and in `Scores`.
        dims: what its dims run over.
        broadcasts: whether dims of the batch, heads and rows may have size 1, for all.
        of_keys: whether it is added to scores of keys; else the pass applies it when it ends.
    """

    name: ClassVar[str]
    dims: ClassVar[tuple[Dim, ...]]
    broadcasts: ClassVar[bool] = False
    of_keys: ClassVar[bool] = True

    def sizes(self, of_q: dict[str, int]) -> tuple[tuple[int, ...], ...]:
        """The sizes that each dim may have, from those of q and the number of keys; none: odd ones."""
        one = (1,) if self.broadcasts else ()
        return tuple(
            () if dim == "distances" else (of_q[dim],) if dim == "keys" else (*one, of_q[dim]) for dim in self.dims
        )

    def dim_of(self, what: Dim, shape: Sequence[int]) -> int | None:
        """Which dim of a tensor of this shape runs over batch, heads or rows of q; None if it is the same for all."""
        dim = self.dims.index(what) if what in self.dims else len(shape)
        return None if dim >= len(shape) or (self.broadcasts and shape[dim] == 1) else dim

    def narrow(self, x: Tensor, what: Dim, begin: int, end: int) -> Tensor:
        """Its part for some heads or rows of q; ``x`` itself if it is the same for all."""
        dim = self.dim_of(what, x.shape)
        return x if dim is None else x.narrow(dim, begin, end - begin)

    @abstractmethod
    def added(self, x: Tensor, where: Where) -> Tensor:
        """What it adds to scores: broadcasts to [B, H, rows, keys]; ``x`` is narrowed to these heads and rows."""

    @abstractmethod
    def add_gradient(self, total: Tensor, x: Tensor, dscores: Tensor, where: Where) -> None:
        """Add to its gradient ``total``, like ``x``, what gradients of scores [B, H, rows, keys] contribute."""


class AlibiSlopes(Term):
    """-slope[h] · |p - t| (ALiBi, Press et al. 2022, arXiv:2108.12409)."""

    name, dims = "alibi_slopes", ("heads",)

    def added(self, x: Tensor, where: Where) -> Tensor:
        return -(x[:, None, None] * where.distance.abs())

    def add_gradient(self, total: Tensor, x: Tensor, dscores: Tensor, where: Where) -> None:
        total.sub_((dscores * where.distance.abs()).sum((0, 2, 3)))


class RelativeBias(Term):
    """table[h, clip(p - t, -R, R) + R] (Raffel et al. 2020, arXiv:1910.10683, without its buckets)."""

    name, dims = "relative_bias", ("heads", "distances")

    def added(self, x: Tensor, where: Where) -> Tensor:
        reach = x.shape[1] // 2
        return x[:, where.distance.clamp(-reach, reach) + reach]

    def add_gradient(self, total: Tensor, x: Tensor, dscores: Tensor, where: Where) -> None:
        """A query's distances differ, so each has a bin of its own: no sum depends on order.

        The outermost bins, of clipped distances, are summed apart.
        """
        width, distance, dscores = total.shape[1], where.distance, dscores.sum(0)
        reach = width // 2
        bins = torch.where(distance.abs() < reach, distance + reach, width)
        of_rows = dscores.new_zeros((*dscores.shape[:2], width + 1)).scatter_(2, bins.expand_as(dscores), dscores)
        found = of_rows.sum(1)[:, :width]
        behind = distance <= -reach
        found[:, 0] += (dscores * behind).sum((1, 2))
        found[:, -1] += (dscores * ((distance >= reach) & ~behind)).sum((1, 2))
        total.add_(found)


class Bias(Term):
    """bias[b, h, row, t], by row of q and position of the key."""

    name, dims, broadcasts = "bias", ("batch", "heads", "rows", "keys"), True

    def added(self, x: Tensor, where: Where) -> Tensor:
        return x.index_select(3, where.k_pos)

    def add_gradient(self, total: Tensor, x: Tensor, dscores: Tensor, where: Where) -> None:
        total[..., where.k_pos] += dscores.sum_to_size((*total.shape[:3], dscores.shape[3]))


class Sinks(Term):
    """A logit of each head that joins the softmax's denominator. Tiles do not see it: see `Scores.sinks`."""

    name, dims, of_keys = "sinks", ("heads",), False

    def added(self, x: Tensor, where: Where) -> Tensor:
        raise NotImplementedError("sinks are no scores of keys: the pass applies them when it ends")

    def add_gradient(self, total: Tensor, x: Tensor, dscores: Tensor, where: Where) -> None:
        raise NotImplementedError("see `cp_mesh.call.ring_loop.gradient_of_sinks`")


TERMS: dict[str, Term] = {term.name: term for term in (Sinks(), AlibiSlopes(), RelativeBias(), Bias())}
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
        dropout_seed: int64 [2] on q's device, (seed, offset). Whether the weight of (batch row b, h, p, t) is dropped
            is a function of these numbers alone: it is if a word of the pair is below floor(dropout_p * 2**32). With
            Philox-4x32-10 of Salmon et al. 2011, doi:10.1145/2063384.2063405, and key = (low, high 32 bits of seed),
            a query has the first two words, x and y, of the counter (p, 0, h, b + offset), modulo 2**32, and a key the
            first word z of (t, 1, 0, 0). The pair's is (u ^ u >> 15 ^ y) · 0x846CA68B with u = (x ^ z) · 0x7FEB352D,
            modulo 2**32: one step of a published hash, lowbias32 (github.com/skeeto/hash-prospector).
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
        narrowed = _narrowed(self, TERMS, "heads", begin, end)
        if not narrowed and self.features.isdisjoint({"dropout", *FUNCTIONS}):
            return self
        return replace(self, first_head=self.first_head + begin, **narrowed)

    def rows(self, begin: int, end: int) -> Scores:
        """Those of the query rows begin to end."""
        if self.features.isdisjoint(OF_ROWS):
            return self
        return replace(self, **_narrowed(self, OF_ROWS, "rows", begin, end))

    def modified(self, x: Tensor, where: Where) -> Tensor:
        """What score_mod makes of scores [B, H, rows, keys]."""
        if self.score_mod is None:
            return x
        return self.score_mod.of_pairs(x, self._indices(x, where), self._captured_by_score_mod)

    def modified_gradient(self, dscores: Tensor, x: Tensor, where: Where, into: ScoreGradients) -> Tensor:
        """Gradients of ``x``, given those of `modified`; adds those of captured tensors to ``into``."""
        if self.score_mod is None:
            return dscores
        wanted = sorted(into.captured)
        captured, indices = self._captured_by_score_mod, self._indices(x, where)
        dx, found = self.score_mod.gradients(dscores, x, indices, captured, wanted, self.in_order)
        for i, grad in zip(wanted, found, strict=True):
            into.captured[i] += grad
        return dx

    def seen(self, x: Tensor, where: Where) -> Tensor | None:
        """bool [B, H, rows, keys] of scores ``x`` of this shape: what mask_mod says; None if there is none."""
        if self.mask_mod is None:
            return None
        captured = self.captured[len(self._captured_by_score_mod) :]
        return self.mask_mod.of_pairs(None, self._indices(x, where), captured)

    @property
    def _captured_by_score_mod(self) -> tuple[Tensor, ...]:
        return self.captured[: self.score_mod.num_captured] if self.score_mod is not None else ()

    def _indices(self, x: Tensor, where: Where) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        b, h = (
            torch.arange(first, first + num, device=x.device)
            for first, num in zip((self.first_batch, self.first_head), x.shape, strict=False)
        )
        return b, h, where.q_pos, where.k_pos


def name_of_captured(i: int) -> str:
    """Of a captured tensor among `Scores.wanted` and the gradients that ops are asked for."""
    return f"captured.{i}"


@dataclass(frozen=True, eq=False)
class ScoreGradients:
    """Gradients of `Scores.wanted`, in the accumulation dtype: the sums over some rows of queries and some keys.

    Those of captured tensors, by index, are of all heads and rows: no part of them is another tensor.
    """

    alibi_slopes: Tensor | None = None
    relative_bias: Tensor | None = None
    bias: Tensor | None = None
    captured: dict[int, Tensor] = field(default_factory=dict)

    @classmethod
    def zeros(cls, scores: Scores, dtype: torch.dtype) -> ScoreGradients:
        """Of the shapes of the scores' tensors."""
        if not scores.wanted:
            return cls()
        given = {name: getattr(scores, name) for name in scores.wanted if name in ADDED}
        captured = {i: x for i, x in enumerate(scores.captured) if name_of_captured(i) in scores.wanted}
        return cls(
            **{name: torch.zeros_like(x, dtype=dtype) for name, x in given.items()},
            captured={i: torch.zeros_like(x) for i, x in captured.items()},
        )

    def named(self) -> dict[str, Tensor]:
        """All of them, by the names of `Scores.wanted`."""
        of_terms = {name: x for name in ADDED if (x := getattr(self, name)) is not None}
        return of_terms | {name_of_captured(i): x for i, x in self.captured.items()}

    def part(self, heads: tuple[int, int] | None = None, rows: tuple[int, int] | None = None) -> ScoreGradients:
        """Views of a range of heads, or of a range of rows."""
        part = self if heads is None else replace(self, **_narrowed(self, ADDED, "heads", *heads))
        return part if rows is None else replace(part, **_narrowed(part, ADDED, "rows", *rows))

    def add_(self, other: ScoreGradients) -> None:
        """Add in place."""
        others = other.named()
        for name, x in self.named().items():
            x += others[name]


def _narrowed(of: Scores | ScoreGradients, names: Iterable[str], dim: Dim, begin: int, end: int) -> dict[str, Any]:
    given = {name: x for name in names if (x := getattr(of, name)) is not None}
    return {name: TERMS[name].narrow(x, dim, begin, end) for name, x in given.items()}


def philox(key: Sequence[Tensor], counter: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Philox-4x32-10, by which dropout is decided: four words of 32 bits from a key of two and a counter of four.

    Of each int64 the low 32 bits count; all broadcast.
    """
    low = 0xFFFFFFFF
    k0, k1 = (x & low for x in key)
    c0, c1, c2, c3 = (x & low for x in counter)
    for _ in range(10):
        # 64 bits of unsigned products: the same bits as those of int64
        a, b = 0xD2511F53 * c0, 0xCD9E8D57 * c2
        c0, c1, c2, c3 = (b >> 32) & low ^ c1 ^ k0, b & low, (a >> 32) & low ^ c3 ^ k1, a & low
        k0, k1 = (k0 + 0x9E3779B9) & low, (k1 + 0xBB67AE85) & low
    return c0, c1, c2, c3


def kept_weights(scores: Scores, num_batch: int, num_heads: int, q_pos: Tensor, k_pos: Tensor) -> Tensor:
    """bool [B, H, rows, keys]: which weights dropout keeps; `Scores.dropout_seed` says how that is decided."""
    assert scores.dropout_seed is not None
    low, zero = 0xFFFFFFFF, torch.zeros((), dtype=torch.int64, device=q_pos.device)
    seed, offset = scores.dropout_seed.unbind()
    heads = torch.arange(scores.first_head, scores.first_head + num_heads, device=q_pos.device)[:, None, None]
    batches = torch.arange(scores.first_batch, scores.first_batch + num_batch, device=q_pos.device)
    key = seed, seed >> 32
    x, y, *_ = philox(key, (q_pos[:, None], zero, heads, batches[:, None, None, None] + offset))
    z, *_ = philox(key, (k_pos, zero + 1, zero, zero))
    word = (x ^ z) * 0x7FEB352D & low
    word = (word ^ word >> 15 ^ y) * 0x846CA68B & low
    return word >= math.floor(scores.dropout_p * 2**32)
