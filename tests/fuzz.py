"""Random uses of cp_mesh on ranks of gloo, against the tests' own oracle, until one is wrong, hangs or is refused.

    python tests/fuzz.py --seed 1 --cases 500 --ranks 3       # so many, drawn from this seed, on three ranks
    python tests/fuzz.py --minutes 30                         # as long, on 1 to 4 ranks in turn
    python tests/fuzz.py --case "Trial(case=Case(...), ...)"  # one that was printed, again
    TRITON_INTERPRET=1 python tests/fuzz.py --cases 20        # calls of the Triton kernel, in its interpreter

drawing.py draws the cases. A case fails if a result or a gradient is off by more than parity tests allow; if it raises
anything but an error of cp_mesh, or that not on every rank with the same words; if it is refused though the documents
say that it works; if a rank dies or hangs. A failing case is made simpler as long as it fails in the same way, and
printed as a line of Python that makes it again; in `ROWS` of test_fuzz.py it is run every time. The verdict says how
many cases were refused. The exit status is 1 if a case failed.
"""

from __future__ import annotations

import argparse
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, fields, is_dataclass, replace
from functools import partial
from itertools import count
from typing import Any

from drawing import Trial, Use, draw, line, read
from interpreted import INTERPRETED
from ranks import Pool, Pools, RankFailure

from cp_mesh import ArgumentError, UnsupportedError

BATCH = 20  # cases in one call of a pool
SECONDS = 600.0 if INTERPRETED else 60.0  # for one batch; most cases take a few hundredths of one
SIMPLER = 300  # tries to make a failing case simpler
RANKS = (1, 2, 3, 4)


@dataclass(frozen=True)
class Outcome:
    """Of a case on one rank: what is wrong with its results, or what was raised."""

    problems: tuple[str, ...] = ()
    refusal: str = ""
    error: str = ""


def outcomes(rank: int, uses: Sequence[tuple[str, int] | Use]) -> list[Outcome]:
    """Of cases, given or told by seed and size, up to the first that may have left collectives behind."""
    found = []
    for given in uses:
        try:
            use = draw(*given) if isinstance(given, tuple) else given
            found.append(Outcome(tuple(use.run(rank))))
        except (ArgumentError, UnsupportedError) as error:
            found.append(Outcome(refusal=f"{type(error).__name__}: {error}"))
        except Exception as error:
            found.append(Outcome(error="".join(traceback.format_exception(error))))
            break
    return found


@dataclass(frozen=True)
class Verdict:
    """Of a case on all ranks. ``kind``: "exact", "refused", or how it fails; ``words``: why."""

    kind: str
    words: str = ""

    @property
    def fails(self) -> bool:
        return self.kind not in ("exact", "refused")


def judge(use: Use, of_ranks: Sequence[Outcome | None]) -> Verdict:
    """From what each rank has to say; None of one that came to no end."""
    done = [x for x in of_ranks if x is not None]
    if errors := [x.error for x in done if x.error]:
        return Verdict("raises", errors[0])
    refusals = {x.refusal for x in of_ranks if x is not None}
    if len(done) < len(of_ranks) or len(refusals) > 1:
        return Verdict("disagrees", f"of {len(of_ranks)} ranks {len(done)} came to an end: {sorted(refusals)}")
    if refusals != {""}:
        return Verdict("is refused" if use.reason is None else "refused", refusals.pop())
    problems = [problem for x in done for problem in x.problems]
    return Verdict("is wrong", "\n".join(problems[:5])) if problems else Verdict("exact")


@dataclass
class Fuzzer:
    """Runs cases on pools of ranks.

    Attributes:
        pool: gives the pool of a size.
        timeout: seconds for a batch.
        counts: of cases, by what became of them.
        reasons: of refusals.
    """

    pool: Callable[[int], Pool]
    timeout: float = SECONDS
    counts: Counter[str] = field(default_factory=Counter)
    reasons: Counter[str] = field(default_factory=Counter)

    def run(self, size: int, uses: Sequence[tuple[str, int] | Use]) -> Iterator[tuple[Use, Verdict]]:
        """The verdict of each, in order; after a failure that may have left ranks apart the others have new ones."""
        todo = list(uses)
        while todo:
            pool, lost = self.pool(size), ""
            try:
                found: list[list[Outcome]] = pool.run(outcomes, todo[:BATCH], timeout=self.timeout)
            except RankFailure as failure:
                found, lost = [[] for _ in range(size)], str(failure)
            if lost and len(todo[:BATCH]) > 1:  # which of them it was
                for each in todo[:BATCH]:
                    yield from self.run(size, [each])
                todo = todo[BATCH:]
                continue
            num_done = min(len(todo), BATCH) if lost else max(map(len, found))
            for i, given in enumerate(todo[:num_done]):
                use = draw(*given) if isinstance(given, tuple) else given
                of_ranks = [x[i] if i < len(x) else None for x in found]
                verdict = Verdict("is lost", lost) if lost else judge(use, of_ranks)
                if verdict.kind in ("raises", "disagrees"):
                    pool.close()
                yield use, verdict
            todo = todo[num_done:]

    def search(self, seed: int, sizes: Sequence[int], num_cases: int | None, seconds: float | None) -> Iterator[str]:
        """What each failing case is, and of how many cases."""
        begin = time.monotonic()
        for block in count():
            uses = range(block * BATCH, min((block + 1) * BATCH, num_cases or sys.maxsize))
            size = sizes[block % len(sizes)]
            if not uses or (seconds is not None and time.monotonic() - begin > seconds):
                return
            for i, (use, verdict) in zip(uses, self.run(size, [(f"{seed}:{i}", size) for i in uses]), strict=True):
                self.counts[verdict.kind] += 1
                if verdict.kind == "refused":
                    self.reasons[use.reason or ""] += 1
                if verdict.fails:
                    yield self.told(f"{seed}:{i}", use, verdict)

    def told(self, seed: str, use: Use, verdict: Verdict) -> str:
        simple, verdict = self.simplest(use, verdict)
        return f"{seed} on {use.size} ranks {verdict.kind}:\n{line(simple)}\n{verdict.words.strip()}\n"

    def simplest(self, use: Use, verdict: Verdict) -> tuple[Use, Verdict]:
        """A case that fails in the same way and of which no simpler one does, as far as the tries go."""
        left, seen = SIMPLER if verdict.kind != "is lost" else 0, {line(use)}
        while True:
            for each in simpler(use):
                if line(each) in seen:
                    continue
                if left == 0:
                    return use, verdict
                left -= 1
                seen.add(line(each))
                try:
                    ((_, found),) = self.run(each.size, [each])
                except Exception:  # of a reason that cannot be told
                    continue
                if found.kind == verdict.kind:
                    use, verdict = each, found
                    break
            else:
                return use, verdict


def simpler(use: Use) -> Iterator[Use]:
    """Cases that differ in one thing; not all of them can be run."""
    yield from simpler_parts(use)
    if isinstance(use, Trial):
        yield from (use.cut(S) for S in (use.case.S // 4, use.case.S // 2, use.case.S - 1) if 0 <= S < use.case.S)


def simpler_parts(x: Any) -> Iterator[Any]:
    """Of a dataclass, dict, tuple or number: with one part left out, or as by default, or smaller."""
    if is_dataclass(x):
        for of in fields(x):
            value, default = getattr(x, of.name), of.default
            if of.name in ("shape", "names", "size", "S"):
                continue
            if of.name in ("scores", "heads"):  # a default that is a name, or larger
                default = {} if of.name == "scores" else value
            if of.name == "layout":
                parts: Any = {"contiguous": (), "zigzag": ("contiguous",)}.get(str(value), ("contiguous", "zigzag"))
            else:
                parts = [] if line(value) == line(default) or repr(default).startswith("<dataclasses") else [default]
                parts = [*parts, *simpler_parts(value)]
            for part in parts:
                yield replace(x, **{of.name: part})
    elif isinstance(x, dict):
        for name in x:
            yield {key: value for key, value in x.items() if key != name}
        for name, value in x.items():
            yield from ({**x, name: part} for part in simpler_parts(value))
    elif isinstance(x, tuple):
        for i, value in enumerate(x):
            yield from ((*x[:i], part, *x[i + 1 :]) for part in simpler_parts(value))
    elif isinstance(x, int) and not isinstance(x, bool) and 1 < x < 1000:
        yield from {1: None, x // 2: None, x - 1: None}


def summary(fuzzer: Fuzzer, seconds: float) -> str:
    exact, refused, total = fuzzer.counts["exact"], fuzzer.counts["refused"], fuzzer.counts.total()
    reasons = ", ".join(f"{number} {reason}" for reason, number in fuzzer.reasons.most_common())
    return (
        f"{total} cases in {seconds:.0f} s: {exact} exact, {total - exact - refused} failed, {refused} refused as"
        f" documented ({refused / max(1, total):.1%}: {reasons or 'none'})"
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0, help="of all cases")
    parser.add_argument("--cases", type=int, help="how many; 500 without --minutes")
    parser.add_argument("--minutes", type=float, help="how long")
    parser.add_argument("--ranks", type=int, nargs="+", default=list(RANKS), help="numbers of ranks, in turn")
    parser.add_argument("--case", help="a line that was printed, to run again")
    given = parser.parse_args()
    begin, failed = time.monotonic(), False
    with Pools(partial(Pool, group_timeout=15.0)) as pools:  # which gives up on a lost collective soon
        fuzzer = Fuzzer(pools)
        if given.case:
            use = read(given.case)
            ((_, verdict),) = fuzzer.run(use.size, [use])
            print(f"{verdict.kind}\n{verdict.words}")
            return int(verdict.fails)
        num_cases = given.cases or (None if given.minutes else 500)
        for words in fuzzer.search(given.seed, given.ranks, num_cases, given.minutes and 60 * given.minutes):
            failed = True
            print(words, flush=True)
    print(summary(fuzzer, time.monotonic() - begin))
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
