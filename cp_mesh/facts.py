"""Facts: the little that all ranks must know alike of one another, and how it is counted from blocks."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
from numpy.lib.stride_tricks import as_strided
from numpy.typing import NDArray

from cp_mesh.blocks import LEFT, MANY_KEYS, PAIRS, RIGHT, Array, fewest_keys
from cp_mesh.masks import NONE


class Facts(NamedTuple):
    """What all ranks must know alike.

    Attributes:
        needed: int64 [receiver, source], how many of the source's rows the receiver fetches; 0 on the diagonal.
        active_steps: steps >= 1 in which some rank fetches rows.
        overlapping: whether, on any rank, two kernel calls of a stage give gradients of the same row.
        covers: kinds of tile that occur on any rank, see `Schedule`.
        min_keys: fewest keys of any kernel call on any rank, before neighbouring full tiles are joined.
    """

    needed: Array
    active_steps: tuple[int, ...]
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
        return Facts(self.needed, active_steps(self.needed), self.overlapping, frozenset(self.covers), self.min_keys)


def kinds(blocks: Array) -> set[str]:
    left, right = blocks[:, LEFT], blocks[:, RIGHT]
    pairs, above = left == PAIRS, (left < NONE) & (left != PAIRS)
    kinds = {"pairs": pairs, "window": above, "full": (left == NONE) & (right == NONE)}
    kinds["causal"] = (left == NONE) & (right < NONE)
    return {kind for kind, found in kinds.items() if found.any()}


def active_steps(needed: Array) -> tuple[int, ...]:
    """Steps in which some rank fetches rows. Whoever needs a rank's keys in step i is i ranks ahead."""
    size = len(needed)
    twice = np.tile(needed > 0, 2)
    by_step = as_strided(twice[:, size:], (size, size), (twice.strides[0] + 1, -1))  # [receiver, step]
    return tuple(np.flatnonzero(by_step.any(0)).tolist())


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
