"""The fuzzer of fuzz.py: a bounded run of it, cases that failed once, and that it can fail.

The same cases in every run; `python tests/fuzz.py` draws others, and makes those that fail simpler.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from itertools import chain
from random import Random
from typing import Any

import fuzz
import pytest
import torch
from cases import mask_of, pairs_of
from checks import GQA, MHA, WAYS, Case, coverage, report
from drawing import (
    Batch,
    Filling,
    Mixing,
    Trial,
    Use,
    draw,
    draw_layout,
    draw_mask,
    draw_runs,
    line,
    read,
)
from fuzz import Fuzzer, Outcome, Verdict, judge
from hypothesis import given
from hypothesis import strategies as st
from inside import METHODS

from cp_mesh import Layout

SIZES = range(1, 9)

ROWS: list[Use] = [
    # A chunk of heads has the scale of the call.
    Trial(Case("zigzag", "causal", 13, GQA, scale=0.7, head_chunks=3), (2,)),
    # Rings of more than four ranks have three stages.
    Trial(Case("zigzag", "causal", 13, GQA), (6,)),
    Trial(Case("striped", "full", 13, MHA), (6,)),
    # A checkpoint lets saved tensors be asked for once, and Ulysses keeps one more.
    Trial(Case("zigzag", "causal", 13, (3, 3), method="ulysses", way="selective checkpoint"), (3,)),
    # A convolution of a rank without rows.
    Mixing(2, "contiguous", 1, "causal_conv1d", pad=False, width=1),
    # Documents of bytes in a shorter sequence: -1 is 255 there.
    Mixing(2, "contiguous", 4, mask={"length": 2, "documents": torch.zeros(4, dtype=torch.uint8)}, states=True),
]
"""Cases that are run every time: what the fuzzer found."""


def failures(pool: Any, size: int, num_cases: int) -> Iterator[str]:
    """Of the rows and of so many cases that are drawn, each as soon as its batch has run."""
    fuzzer = Fuzzer(pool, timeout=300.0)
    rows = [row for row in ROWS if row.size == size]
    for use, verdict in chain(fuzzer.run(size, rows), fuzzer.run(size, [(f"0:{i}", size) for i in range(num_cases)])):
        if verdict.fails:
            yield f"{verdict.kind}:\n{line(use)}\n{verdict.words}"


@pytest.mark.parametrize("size", [pytest.param(n, marks=[pytest.mark.full] * (n in (5, 7))) for n in SIZES])
@pytest.mark.quick("1", "2", "4")
def test_random_uses(pool, full, size):
    report([[*failures(pool, size, 10 if full else 4)]])


def test_cases_are_served_and_of_all_kinds():
    """A fuzzer whose cases are refused, or all alike, finds nothing."""
    uses = [draw(f"0:{i}", 1 + i % 4) for i in range(2000)]
    refused = [use for use in uses if use.reason is not None]
    assert len(refused) < 0.15 * len(uses), Counter(use.reason for use in refused)
    assert all(sum(isinstance(use, kind) for use in uses) > 100 for kind in (Trial, Filling, Batch, Mixing))
    trials = [use for use in uses if isinstance(use, Trial) and use.reason is None]
    drawn = Counter(x for use in trials for x in (use.case.way, use.case.method, use.told, use.case.kernel, use.names))
    drawn += Counter(name for use in trials for name in (*use.case.mask, *use.case.scores, *use.case.frozen))
    drawn += Counter(use.case.dtype for use in trials) + Counter(type(use.case.layout).__name__ for use in trials)
    wanted = [*WAYS, *METHODS, "axis", "group", "axes", "reference", "cpu_flash", ("cp",), ("dp", "cp"), ("cp", "tp")]
    wanted += [
        ("cp_ring", "cp_ulysses"),
        "Balanced",
        "Backwards",
        "Dealt",
        "ZigZagDocuments",
        "Joint",
        "list",
        "q",
        "k",
        "v",
        "dropout_p",
        "bias",
        "functions",
    ]
    wanted += [torch.float32, torch.bfloat16, "window", "documents", "key_padding", "prefix", "length", "cu_seqlens"]
    assert not [name for name in wanted if drawn[name] < 2], drawn


def test_a_line_makes_the_case_again():
    for i in range(300):
        use = draw(f"0:{i}", 1 + i % 4)
        assert "\n" not in line(use) and line(read(line(use))) == line(use)


PLAIN = Trial(Case("zigzag", {}, 12), (2,))
REFUSED = Trial(Case("zigzag", {}, 12, kernel="cudnn"), (2,))


@pytest.mark.parametrize(
    ("use", "of_ranks", "kind"),
    [
        (PLAIN, [Outcome(), Outcome()], "exact"),
        (PLAIN, [Outcome(), Outcome(("dq is off",))], "is wrong"),
        (PLAIN, [Outcome(), Outcome(error="KeyError")], "raises"),
        (PLAIN, [Outcome(refusal="a"), Outcome(refusal="a")], "is refused"),
        (PLAIN, [Outcome(), None], "disagrees"),
        (REFUSED, [Outcome(refusal="a"), Outcome(refusal="a")], "refused"),
        (REFUSED, [Outcome(), Outcome()], "exact"),
        (REFUSED, [Outcome(refusal="a"), Outcome(refusal="b")], "disagrees"),
        (REFUSED, [Outcome(refusal="a"), Outcome()], "disagrees"),
    ],
)
def test_verdicts(use, of_ranks, kind):
    verdict = judge(use, of_ranks)
    assert verdict.kind == kind and verdict.fails == (kind not in ("exact", "refused"))


class Alone(Fuzzer):
    """Calls of five tokens or more with a softcap are wrong, without running them."""

    def run(self, size, uses):
        for use in uses:
            fails = isinstance(use, Trial) and use.case.S >= 5 and "softcap" in use.case.scores
            yield use, Verdict("is wrong" if fails else "exact")


@pytest.mark.parametrize("size", (3, 4))
@pytest.mark.full
def test_every_simpler_case_can_be_told(size):
    """Also after some steps, in which a part takes its default."""
    for i in range(10):
        use = draw(f"0:{i}", size)
        for _ in range(12):
            steps = list(fuzz.simpler(use))
            assert all(line(read(line(x))) == line(x) for x in steps)
            use = steps[i % len(steps)] if steps else use


def test_a_failing_case_is_made_simpler():
    found = (draw(f"0:{i}", 3) for i in range(1000))
    use = next(x for x in found if isinstance(x, Trial) and len(x.case.scores) > 3 and x.case.S > 20 and x.case.mask)
    use = replace(use, case=replace(use.case, scores=use.case.scores | {"softcap": 1.5}))
    simple, verdict = Alone(None).simplest(use, Verdict("is wrong"))
    assert simple.case.S == 5 and simple.case.scores == {"softcap": 1.5} and verdict.kind == "is wrong"
    assert not simple.case.mask and simple.case.heads == (1, 1) and simple.case.layout == "contiguous"


def test_the_command(monkeypatch, capsys):
    """It says what was refused, and how; and runs a line again."""
    monkeypatch.setattr("sys.argv", ["fuzz.py", "--cases", "4", "--ranks", "1", "--seed", "5"])
    assert fuzz.main() == 0 and "4 cases in " in capsys.readouterr().out
    monkeypatch.setattr("sys.argv", ["fuzz.py", "--case", line(replace(PLAIN, shape=(1,)))])
    assert fuzz.main() == 0 and capsys.readouterr().out.startswith("exact")
    wrong = replace(PLAIN, shape=(1,), case=replace(PLAIN.case, method="hybrid", options={"ulysses_degree": 1}))
    monkeypatch.setattr(Trial, "reason", None)
    wrong = replace(wrong, case=replace(wrong.case, kernel="cudnn"))
    monkeypatch.setattr("sys.argv", ["fuzz.py", "--case", line(wrong)])
    assert fuzz.main() == 1 and capsys.readouterr().out.startswith("is refused")


# --- without ranks


def draw_schedules(r: Random, few: bool) -> tuple[int, str | list[int] | Layout, dict[str, Any], int, bool]:
    """Number of ranks, layout, mask, length, and whether documents become segments."""
    if few:
        cp, S = r.randint(1, 9), r.randint(0, 24)
        mask = draw_mask(r, 2, S)
        kinds = ("contiguous", "zigzag", "striped", "permuted", "own", "zigzag_documents", "joint")
        kind = r.choice((*kinds, *(("balanced",) if S else ())))
        return cp, draw_layout(r, kind, mask, S, cp), mask, S, False
    if r.random() < 0.5:  # many ranks
        cp = r.choice((12, 16, 24, 32, 64))
        S = cp + r.randint(0, 9)
        mask = draw_mask(r, 2, S)
        kind = r.choice(("contiguous", "zigzag", "striped", "balanced", "zigzag_documents"))
        return cp, draw_layout(r, kind, mask, S, cp), mask, S, True
    cp = r.randint(5, 8)
    S = 17 * cp  # every position is a piece: from 256 pairs of them on, pieces are compared as vectors
    conditions = (
        {"causal": True, "prefix": 0},
        {"causal": True, "prefix": r.randint(1, S)},
        {"window": (r.randint(0, S), None)},
        {"window": (None, r.randint(0, S))},
    )
    return cp, draw_runs(r, S, 1), draw_mask(r, 2, S) | r.choice(conditions), S, False


def covered(r: Random, few: bool) -> None:
    cp, layout, mask, S, segments = draw_schedules(r, few)
    found = coverage(Case(layout, mask, S).make_layout(), mask_of(mask), pairs_of(mask, S), cp, segments)
    report([[f"cp={cp}, layout={layout!r}, {mask}, S={S}: {problem}" for problem in found]])


@given(st.randoms(use_true_random=False))
@pytest.mark.full
def test_every_pair_once(r):
    """Hypothesis draws, and makes simpler what fails."""
    covered(r, few=True)


@pytest.mark.more("random")
@pytest.mark.full
def test_every_pair_once_of_many_pieces(full):
    for seed in range(20 if full else 3):
        covered(Random(seed), few=False)
