"""What docs/results/mistakes.csv says of a few cells is so; in the full form, of all of them."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from mistaken import GROUPS, MISTAKES
from mistakes import RESULTS, WORDS, Runner, page, read
from set_ups import SET_UPS

ROWS = read(RESULTS / "mistakes.csv")
NEWEST = ROWS[-1]["label"]
CELLS = {(row["mistake"], row["set_up"]): row for row in ROWS if row["label"] == NEWEST}
ONE_OF_EACH = {
    "refused": ("labels by chunk", "FSDP2"),
    "at step": ("gradients that nobody reduces", "eager"),
    "warned": ("the mean of a rank's rows", "cores"),
    "silent": ("matmul and softmax", "eager"),
}


@pytest.fixture(scope="module")
def runner() -> Iterator[Runner]:
    with Runner() as found:
        yield found


def test_the_file_has_every_cell() -> None:
    assert {*CELLS} == {(mistake, set_up) for mistake in MISTAKES for set_up in SET_UPS}
    assert {row["found"] for row in ROWS} <= {*WORDS}
    assert [name for names in GROUPS.values() for name in names] == [name for name in MISTAKES if name != "right"]
    assert (RESULTS / "mistakes.md").read_text() == page(ROWS), "run python tests/mistakes.py"


def test_what_is_right_is_silent() -> None:
    assert {CELLS["right", set_up]["found"] for set_up in SET_UPS} == {"same"}


@pytest.mark.parametrize("set_up", SET_UPS)
def test_set_ups_are_those_of_one_rank(runner: Runner, set_up: str) -> None:
    assert runner.run("right", set_up).found == "same"


@pytest.mark.parametrize("word", ONE_OF_EACH)
def test_one_mistake_of_each_word(runner: Runner, word: str) -> None:
    cell = ONE_OF_EACH[word]
    assert CELLS[cell]["found"] == runner.run(*cell).found == word


@pytest.mark.full
@pytest.mark.parametrize("mistake", [name for name in MISTAKES if name != "right"])
def test_every_cell(runner: Runner, mistake: str) -> None:
    """A cell that is found by something else than the newest label says: run python tests/mistakes.py."""
    found = {set_up: runner.run(mistake, set_up).found for set_up in SET_UPS}
    assert found == {set_up: CELLS[mistake, set_up]["found"] for set_up in SET_UPS}
