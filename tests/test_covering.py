"""Covering arrays hold what they promise, counted by brute force."""

import pytest
from covering import Row, combinations_of, covering_array
from test_parity import FACTORS, calls_of, goes_together

SMALL = {"a": (0, 1, 2), "b": "xyzw", "c": (False, True), "d": (None, 5)}


def not_together(row: Row) -> bool:
    return not (row.get("a") == 2 and row.get("b") == "w") and not (row.get("c") is True and row.get("d") == 5)


@pytest.mark.parametrize(
    ("strength", "rows", "factors", "allowed"),
    [
        *((n, covering_array(SMALL, n, not_together), SMALL, not_together) for n in (1, 2, 3, 4)),
        (2, calls_of(2), FACTORS, goes_together),  # of the parity gate
    ],
)
def test_every_combination_occurs(strength, rows, factors, allowed):
    def key(row: Row) -> str:
        return repr(sorted(row.items(), key=lambda item: item[0]))

    held = {key(part) for row in rows for part in combinations_of({n: (x,) for n, x in row.items()}, strength)}
    assert {key(part) for part in combinations_of(factors, strength) if allowed(part)} <= held
    assert all(allowed(row) for row in rows) and len(rows) < 420
