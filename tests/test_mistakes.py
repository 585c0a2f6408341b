"""The catalogue of mistakes is what docs/results/mistakes.csv says of it: outcomes, and how messages begin."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest
from mistaken import GROUPS, MISTAKES, RIGHT, TRACED
from mistakes import LOOKS, RESULTS, WORDS, Runner, is_run, page, read
from set_ups import SET_UPS

CELLS = read(RESULTS / "mistakes.csv")
ROWS = {
    mistake: {set_up: CELLS[mistake, set_up] for set_up in SET_UPS if (mistake, set_up) in CELLS}
    for mistake in MISTAKES
}
TOLD = ("found", "refused", "at step", "warned")
NIGHTLY = pytest.mark.nightly("compiled")


def quick_set_up(mistake: str) -> str | None:
    """One in which the guard says something, or nothing of what is right: another one for the next mistake."""
    row, number = ROWS[mistake], [*MISTAKES].index(mistake)
    found = [x for x, cell in row.items() if cell["guard"] in (*TOLD, "same") and not SET_UPS[x].compiled]
    few = [x for x in found if SET_UPS[x].beside == ""] or found
    return few[number % len(few)] if few else None


@pytest.fixture(scope="module")
def runner() -> Iterator[Runner]:
    with Runner() as found:
        yield found


def alike(message: str, written: str) -> bool:
    """Whether a message begins as what is written, or expects the same, whichever rank says it.

    Numbers may differ, but not those of layers. Which of several parameters is named is chance.
    """
    message, written = (re.sub(r"such as \S+", "such as one", text) for text in (message, written))
    message, written = (re.sub(r"(?<!layers\.)\d+", "N", " ".join(text.split())) for text in (message, written))
    if "cp rank N: missing" in written:  # which argument of a call that a rank lacks is named is chance
        return " on every cp rank, got cp rank N: " in message
    wanted = written.partition("expected ")[2]
    return written[:75] in message or (len(wanted) >= 20 and wanted[:75] in message)


def look(runner: Runner, mistake: str, set_up: str, column: str) -> None:
    """Messages are compared with those of the last `python tests/mistakes.py`: read their changes in its file."""
    said, row = runner.run(mistake, set_up, column), ROWS[mistake][set_up]
    assert said.found == row[column], f"{set_up}, {column}: {row[column]} became {said}; run python tests/mistakes.py"
    if said.found in TOLD:
        assert alike(said.message, row[f"{column}_says"]), f"{set_up}, {column}: {said.message}"


def test_the_file_has_every_cell() -> None:
    assert {*CELLS} == {(mistake, set_up) for mistake in MISTAKES for set_up in SET_UPS}
    for (mistake, set_up), row in CELLS.items():
        for column in LOOKS:
            assert row[column] in WORDS and (row[column] == "-") != is_run(mistake, set_up, column), (mistake, set_up)
            assert row[f"{column}_says"] or row[column] not in TOLD, (mistake, set_up)
    assert (RESULTS / "mistakes.md").read_text() == page(CELLS), "run python tests/mistakes.py"


def test_what_is_right_is_silent() -> None:
    for name in GROUPS[RIGHT]:
        for set_up, row in ROWS[name].items():
            found = {row[column] for column in LOOKS} - {"-", "same", "silent", "skipped"}
            assert not found, (name, set_up, found)


def is_slow(mistake: str, set_up: str) -> bool:
    """Whether it takes seconds: blocks are compiled one by one, or a rank waits in vain, as in a set-up before."""
    waiting = [x for x, row in ROWS[mistake].items() if row["guard"] == "hangs"]
    return set_up in waiting[1:] or (set_up == "blocks" and mistake not in TRACED and is_run(mistake, set_up, "guard"))


@pytest.mark.parametrize(
    "mistake", [name if quick_set_up(name) else pytest.param(name, marks=pytest.mark.full) for name in MISTAKES]
)
def test_the_guard(runner: Runner, full: bool, mistake: str) -> None:
    """In one set-up, and in the full form in all that are not slow."""
    quick = quick_set_up(mistake)
    for set_up in [quick] if quick and not full else [x for x in SET_UPS if not is_slow(mistake, x)]:
        look(runner, mistake, set_up, "guard")


@NIGHTLY
@pytest.mark.parametrize("mistake", [name for name in MISTAKES if any(is_slow(name, x) for x in SET_UPS)])
def test_the_guard_in_slow_set_ups(runner: Runner, mistake: str) -> None:
    for set_up in [x for x in SET_UPS if is_slow(mistake, x)]:
        look(runner, mistake, set_up, "guard")


def first_set_up(mistake: str, column: str) -> str | None:
    return next((set_up for set_up in SET_UPS if is_run(mistake, set_up, column)), None)


OTHERS = [(name, column, first) for name in MISTAKES for column in LOOKS[1:] if (first := first_set_up(name, column))]


def waits(mistake: str, column: str, set_up: str) -> bool:
    """Whether a rank waits in vain, and nothing is found."""
    return column in MISTAKES[mistake].slow and ROWS[mistake][set_up][column] in ("hangs", "crashes")


@pytest.mark.parametrize(
    ("mistake", "column", "set_up"),
    [pytest.param(*cell, marks=NIGHTLY if waits(*cell) else pytest.mark.full) for cell in OTHERS],
)
def test_other_columns(runner: Runner, mistake: str, column: str, set_up: str) -> None:
    """In the first set-up that has them; in all by python tests/mistakes.py."""
    look(runner, mistake, set_up, column)
