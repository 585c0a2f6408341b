"""Covering arrays hold what they promise, counted by brute force."""

import pytest
from covering import Row, combinations_of, covering_array
from test_parity import FACTORS, calls_of, goes_together

SMALL = {"a": (0, 1, 2), "b": "xyzw", "c": (False, True), "d": (None, 5)}


def not_together(row: Row) -> bool:
    return not (row.get("a") == 2 and row.get("b") == "w") and not (row.get("c") is True and row.get("d") == 5)


def absent(rows: list[Row], factors, strength, allowed) -> list[Row]:
    """Allowed combinations that no row holds."""
    held = {tuple(sorted((name, repr(row[name])) for name in part)) for row in rows for part in parts(row, strength)}
    wanted = [cells for cells in combinations_of(factors, strength) if allowed(cells)]
    return [cells for cells in wanted if tuple(sorted((name, repr(x)) for name, x in cells.items())) not in held]


def parts(row: Row, strength: int) -> list[Row]:
    return list(combinations_of({name: (value,) for name, value in row.items()}, strength))


@pytest.mark.parametrize("strength", (1, 2, 3, 4))
@pytest.mark.parametrize("allowed", (lambda row: True, not_together), ids=("all", "some"))
def test_every_combination_occurs(strength, allowed):
    rows = covering_array(SMALL, strength, allowed)
    assert not absent(rows, SMALL, strength, allowed) and all(allowed(row) for row in rows)
    assert all(list(row) == list(SMALL) for row in rows)
    assert absent(rows[1:], SMALL, strength, allowed), "the first row is there for something"


def test_rows_are_few_and_the_same_each_time():
    rows = covering_array(SMALL)
    assert len(rows) <= 14 and rows == covering_array(SMALL)
    assert rows != covering_array(SMALL, seed=1)


def test_a_combination_without_a_row_is_said():
    with pytest.raises(AssertionError, match="goes with"):
        covering_array({"a": (0, 1), "b": (0, 1)}, 1, lambda row: "b" not in row or "a" not in row)


def test_the_parity_gate_has_every_pair():
    """Of every two values of every two options, but for those that cannot go together."""
    rows = calls_of(2)
    assert not absent(rows, FACTORS, 2, goes_together) and all(goes_together(row) for row in rows)
    assert len(rows) < 420


@pytest.mark.full
def test_the_parity_gate_has_every_triple():
    assert not absent(calls_of(3), FACTORS, 3, goes_together)
