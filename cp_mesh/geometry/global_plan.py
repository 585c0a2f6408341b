"""What all ranks must know alike of one another (`Facts`), and how it is counted from blocks."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
from numpy.lib.stride_tricks import as_strided
from numpy.typing import NDArray

from cp_mesh.geometry.block_table import (
    K_END,
    LEFT,
    MANY_KEYS,
    PAIRS,
    RECEIVER,
    RIGHT,
    Array,
    K,
    Pieces,
    block_table,
    fewest_keys,
)
from cp_mesh.geometry.mask import NONE


class Facts(NamedTuple):
    """What all ranks must know alike.

    Attributes:
        needed: int64 [receiver, source], how many of the source's rows the receiver fetches; 0 on the diagonal.
        overlapping: whether, on any rank, two kernel calls of a stage give gradients of the same row.
        covers: kinds of tile that occur on any rank, see `Schedule`.
        min_keys: fewest keys of any kernel call on any rank, or fewer: full tiles of different sources, or of pieces
            that are seen in part, count before they are joined.
    """

    needed: Array
    overlapping: bool
    covers: frozenset[str]
    min_keys: int


@dataclass
class Found:
    """`Facts`, as far as they are known."""

    needed: Array
    overlapping: bool = False
    covers: set[str] = field(default_factory=set)
    min_keys: int = MANY_KEYS

    def add(self, blocks: Array) -> Array:
        """Take in what kernel calls of these blocks are like."""
        self.covers |= kinds(blocks)
        self.min_keys = min(self.min_keys, fewest_keys(blocks))
        return blocks

    def facts(self) -> Facts:
        return Facts(self.needed, self.overlapping, frozenset(self.covers), self.min_keys)


def kinds(blocks: Array) -> set[str]:
    left, right = blocks[:, LEFT], blocks[:, RIGHT]
    pairs, above = left == PAIRS, (left < NONE) & (left != PAIRS)
    kinds = {"pairs": pairs, "window": above, "full": (left == NONE) & (right == NONE)}
    kinds["causal"] = (left == NONE) & (right < NONE)
    return {kind for kind, found in kinds.items() if found.any()}


def active_steps(needed: Array) -> tuple[int, ...]:
    """Steps >= 1 in which some rank fetches rows. Whoever needs a rank's keys in step i is i ranks ahead."""
    size = len(needed)
    twice = np.tile(needed > 0, 2)
    by_step = as_strided(twice[:, size:], (size, size), (twice.strides[0] + 1, -1))  # [receiver, step]
    return tuple(np.flatnonzero(by_step.any(0)).tolist())


def alike(q: Pieces, k: Pieces) -> tuple[Array, Array]:
    """A number for each run of queries and of keys; where their sums are equal, pairs differ in their place alone."""
    q_kind, k_kind = (_numbered(x.length, x.stride, x.nearest, x.farthest, x.whole) for x in (q, k))
    k_kinds = int(k_kind.max(initial=0)) + 1
    num_kinds = (int(q_kind.max(initial=0)) + 1) * k_kinds
    return q.low * num_kinds + q_kind * k_kinds, k_kind - k.low * num_kinds


def _numbered(*columns: Any) -> Array:
    """Small numbers, equal for rows that are equal in all columns."""
    number = np.zeros(len(columns[0]), dtype=np.int64)
    for column in columns:
        if (column[1:] != column[:-1]).any():
            values, which = np.unique(column, return_inverse=True)
            number = number * len(values) + which
    return number


def blocks_of_alike(q: Pieces, i: Array, k: Pieces, j: Array, number: Array) -> tuple[Array, Array]:
    """The blocks of pairs of pieces, one of all of the same number, and how many keys that of each pair names."""
    number = number - (number.min() if len(number) else 0)
    if (num := int(number.max(initial=-1)) + 1) > 2 * len(number):
        number, num = np.arange(len(number)), len(number)
    chosen = np.full(num, -1)
    chosen[number] = np.arange(len(number))
    chosen = chosen[chosen >= 0]
    # a rank of its own for each pair, so that its block tells which it is
    here = np.arange(len(chosen))
    blocks = block_table(q.at(i[chosen])._replace(rank=here), here, k.at(j[chosen]), here, opaque=False)
    keys = np.zeros(num, dtype=np.int64)
    keys[number[chosen[blocks[:, RECEIVER]]]] = blocks[:, K_END] - blocks[:, K]
    return blocks, keys[number]


class Groups(NamedTuple):
    """Rows that belong together, which follow one another: where each group begins, how many they are, and of whom."""

    first: Array
    num: Array
    group: Array

    @classmethod
    def of(cls, owner: Array) -> Groups:
        """From the owner of each row."""
        first = np.flatnonzero(np.r_[True, owner[1:] != owner[:-1]])
        num = np.diff(np.r_[first, len(owner)])
        return cls(first, num, np.repeat(np.arange(len(first)), num))

    def count_true(self, x: NDArray[np.bool_]) -> NDArray[Any]:
        """How many rows of each group are true: [groups, ...] of x [rows, ...]."""
        longest = int(self.num.max())
        if longest == 1:
            return x.view(np.uint8)
        total: NDArray[Any] = x[self.first].astype(np.uint8 if longest < 256 else np.int64)
        for place in range(1, longest):  # faster than `reduceat`
            more = np.flatnonzero(self.num > place)
            if len(more) == len(total):
                total += x[self.first + place]
            else:
                total[more] += x[self.first[more] + place]
        return total

    def spread(self, x: NDArray[np.bool_]) -> NDArray[np.bool_]:
        """[rows, ...] from what is said of groups, [groups, ...]."""
        return x if len(self.first) == len(self.group) else x[self.group]

    def sum_columns(self, x: Array) -> Array:
        """[n, groups] of x [n, rows]."""
        total = np.cumsum(x, axis=1)[:, self.first + self.num - 1]
        total[:, 1:] -= total[:, :-1].copy()
        return total
