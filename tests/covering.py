"""Covering arrays: few rows in which all pairs (or triples) of values of different factors occur.

Most bugs of options that meet are bugs of two of them. All pairs fit into about as many rows as the two largest factors
have pairs, where the product of all factors has millions of rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import combinations, product
from random import Random
from typing import Any

Row = dict[str, Any]
CANDIDATES = 3  # rows that are built before the best one is taken


def covering_array(
    factors: Mapping[str, Sequence[Any]],
    strength: int = 2,
    allowed: Callable[[Row], bool] = lambda row: True,
    seed: int = 0,
) -> list[Row]:
    """Rows that hold all allowed combinations of values of any `strength` factors, the same for the same arguments.

    Args:
        factors: the values of each factor, all different.
        strength: 2 for pairs, 3 for triples.
        allowed: whether values go together. It is asked about parts of rows, and must allow what has no forbidden part.
            Each allowed combination must have a row.
        seed: another seed gives other rows.
    """
    names, random = list(factors), Random(seed)
    sizes = [len(factors[name]) for name in names]

    def may_be(cells: Mapping[int, int]) -> bool:
        return allowed({names[i]: factors[names[i]][cells[i]] for i in sorted(cells)})

    # What is still to be covered: combinations of cells (index of the factor, index of the value).
    missing = {
        cells
        for places in combinations(range(len(names)), strength)
        for cells in product(*([(i, value) for value in range(sizes[i])] for i in places))
        if may_be(dict(cells))
    }
    todo = sorted(missing)
    random.shuffle(todo)
    rows = []
    while todo:
        if todo[-1] not in missing:
            todo.pop()
            continue
        best: tuple[int, dict[int, int]] | None = None
        for _ in range(CANDIDATES):
            row = dict(todo[-1])
            gained = 1
            others = [i for i in range(len(names)) if i not in row]
            random.shuffle(others)
            for i in others:
                choices = [value for value in range(sizes[i]) if may_be(row | {i: value})]
                assert choices, f"no value of {names[i]} goes with {row}"
                random.shuffle(choices)
                parts = list(combinations(sorted(row.items()), strength - 1))
                gains = [sum(tuple(sorted((*part, (i, value)))) in missing for part in parts) for value in choices]
                row[i] = choices[gains.index(max(gains))]
                gained += max(gains)
            if best is None or gained > best[0]:
                best = gained, row
        assert best is not None
        missing -= set(combinations(sorted(best[1].items()), strength))
        rows.append({name: factors[name][best[1][i]] for i, name in enumerate(names)})
    return rows


def combinations_of(factors: Mapping[str, Sequence[Any]], strength: int) -> Iterator[Row]:
    """Every combination of values of any `strength` factors."""
    for names in combinations(factors, strength):
        for values in product(*(factors[name] for name in names)):
            yield dict(zip(names, values, strict=True))
