"""The catalogue of mistakes is what docs/results/mistakes.csv says of it, in words that name each mistake."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest
from mistaken import GROUPS, MISTAKES, RIGHT
from mistaken.says import SAYS
from mistakes import LOOKS, RESULTS, WORDS, Runner, is_run, page, read
from set_ups import SET_UPS

CELLS = read(RESULTS / "mistakes.csv")
ROWS = {
    mistake: {set_up: CELLS[mistake, set_up] for set_up in SET_UPS if (mistake, set_up) in CELLS}
    for mistake in MISTAKES
}
TOLD = ("found", "refused", "at step", "warned")


def quick_set_up(number: int) -> str | None:
    """One in which the guard says something, or nothing of what is right: another one for the next mistake."""
    row = ROWS[[*MISTAKES][number]]
    found = [x for x, cell in row.items() if cell["guard"] in (*TOLD, "same") and not SET_UPS[x].compiled]
    few = [x for x in found if SET_UPS[x].beside == ""] or found
    return few[number % len(few)] if few else None


@pytest.fixture(scope="module")
def runner() -> Iterator[Runner]:
    with Runner() as found:
        yield found


def look(runner: Runner, mistake: str, set_up: str, column: str) -> None:
    said, want = runner.run(mistake, set_up, column), ROWS[mistake][set_up][column]
    assert said.found == want, f"{set_up}, {column}: {want} became {said}; run python tests/mistakes.py"
    if want in TOLD:
        words = SAYS[mistake][LOOKS.index(column)]
        assert re.search(words, said.message), f"{set_up}, {column}: expected {words}, got {said.message}"


def test_the_file_has_every_cell() -> None:
    assert {*CELLS} == {(mistake, set_up) for mistake in MISTAKES for set_up in SET_UPS}
    for (mistake, set_up), row in CELLS.items():
        for column in LOOKS:
            assert row[column] in WORDS and (row[column] == "-") != is_run(mistake, set_up, column), (mistake, set_up)
    assert {*SAYS} == {*MISTAKES} - {*GROUPS[RIGHT]}
    assert (RESULTS / "mistakes.md").read_text() == page(CELLS), "run python tests/mistakes.py"


def test_each_mistake_says_what_finds_it() -> None:
    """Words for the columns that say something in some set-up, and for no others."""
    for mistake, words in SAYS.items():
        for column, text in zip(LOOKS, words, strict=True):
            says = any(cell[column] in TOLD for cell in ROWS[mistake].values())
            assert bool(text) == says, (mistake, column)


def test_what_is_right_is_silent() -> None:
    for name in GROUPS[RIGHT]:
        for set_up, row in ROWS[name].items():
            found = {row[column] for column in LOOKS} - {"-", "same", "silent", "skipped"}
            assert not found, (name, set_up, found)


@pytest.mark.parametrize("mistake", [name for i, name in enumerate(MISTAKES) if quick_set_up(i)])
def test_the_guard_in_one_set_up(runner: Runner, mistake: str) -> None:
    look(runner, mistake, quick_set_up([*MISTAKES].index(mistake)) or "", "guard")


@pytest.mark.full
@pytest.mark.parametrize("mistake", MISTAKES)
def test_every_set_up(runner: Runner, mistake: str) -> None:
    for set_up in SET_UPS:
        look(runner, mistake, set_up, "guard")


@pytest.mark.parametrize("column", LOOKS[1:])
@pytest.mark.parametrize("mistake", MISTAKES)
@pytest.mark.full
def test_other_columns(runner: Runner, mistake: str, column: str) -> None:
    """In the first set-up that has them; in all by python tests/mistakes.py."""
    set_ups = [set_up for set_up in SET_UPS if is_run(mistake, set_up, column)]
    for set_up in set_ups[:1]:
        look(runner, mistake, set_up, column)
