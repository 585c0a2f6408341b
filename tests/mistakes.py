"""What finds each mistake of a training set-up, in each set-up: makes docs/results/mistakes.csv and the page of it.

    python tests/mistakes.py                                                      # every cell of three columns
    python tests/mistakes.py --out /tmp/x.csv --only labels --set-ups eager FSDP2 --columns guard

A cell is two gloo ranks, or four. Cells that were run are replaced; others stay.
"""

from __future__ import annotations

import argparse
import contextlib
import csv
import functools
import gc
import io
import pickle
import re
import subprocess
import sys
import time
import warnings
from collections import Counter
from multiprocessing import connection
from pathlib import Path
from typing import Any, NamedTuple

import torch
from inside import inner
from mistaken import GROUPS, MISTAKES, RIGHT, TRACED
from poison import poisoning
from ranks import Pool, join_anew
from set_ups import SET_UPS

import cp_mesh

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "docs" / "results"
LOOKS = ("guard", "probe", "verify")
"""What looks for mistakes, and so the columns: the guard alone, the probe without it, and `verify_model` without it."""
FIELDS = ["mistake", "set_up", "commit", "torch", "off"] + [f"{look}{part}" for look in LOOKS for part in ("", "_says")]
TIMEOUT = 25.0
"""Seconds of the groups: a rank that waits as long, hangs."""
SAME = 1e-5
"""A relative difference from one rank that is rounding."""
PATIENCE = 20.0
"""Seconds that ranks are given after another has raised."""
ENDED = "the process ended"
PATTERNS = "positions from 0", "a convolution of"
"""What the guard says where it knows a mistake by its code alone, which the probe might find in its place."""
SKIPPED, FOUND = "cp_mesh: the probe", "cp_mesh.probe: expected the same rows"
"""How warnings begin of a probe that compared nothing, and its errors."""
QUIET = ("warned", "silent", "same", "skipped")
WAITED = re.compile("never came|[Tt]imed out|[Tt]imeout")
"""What the error of a rank says that waited for another in vain."""
REFUSALS = ("ArgumentError", "UnsupportedError", "RankMismatchError")
WORDS = {
    "found": ("F", "an error of the probe, or of `verify_model`"),
    "refused": ("R", "an error of cp_mesh in the forward or the loss; without the guard, of what is no check of it"),
    "at step": ("S", "an error of cp_mesh in the backward or at the first optimizer step"),
    "partly": ("P", "an error of cp_mesh on some ranks, and nothing on others"),
    "warned": ("W", "a warning"),
    "crashes": ("C", "an error of PyTorch, or a process that ends"),
    "hangs": ("H", "a rank waits until its group's timeout"),
    "check mode": ("M", "nothing, but an error with CP_MESH_CHECK=1"),
    "skipped": ("s", "the probe compares nothing, and says why"),
    "silent": ("o", "nothing"),
    "same": ("=", "nothing, and loss and gradients are those of one rank"),
    "-": ("-", "not run"),
}
"""Of outcomes, most telling first: the mark in the page, and what is said."""

INTRODUCTION = """Each row is a mistake in training. A small decoder is trained over two cp ranks, or over four with
dp, tp or stages of a pipeline. Each column has a mark for each of the set-ups, in this order:
{set_ups}. Each differs from the first in one thing.

- **guard**: a first step, with all [checks](../guard.md).
- **probe**: `cp_mesh.probe` with these checks turned off. It needs a `ShardedModel`.
- **verify**: [`verify_model`](../verify.md) with these checks turned off, in set-ups without compile and pipelines.

{counts}

The guard knows positions that the model counts, and convolutions over tokens, by the look of the code: {known} cells.
The probe alone finds {found} of them; it skips {skipped}, of flex, and cannot run in {others}, which have no root.
In every first forward it would also gather weights over more ranks than those of cp, be refused by compiled roots,
and take 4.6 s for a 1B Llama, 2.5 s for 8 layers of 8B (2 H100s). So the guard keeps both patterns, and the probe runs
where it is asked for.

Nothing is said of {right} set-ups that are right, which the counts include. Messages, and differences from one rank,
are in [the file](mistakes.csv). `tests/mistakes.py` makes both, from the mistakes in `tests/mistaken`, on CPUs, at
{commits}.
"""


class Said(NamedTuple):
    """What a rank said of a cell."""

    found: str
    kind: str
    message: str
    off: float


def attempt(rank: int, mistake: str, set_up: str, look: str, check: bool) -> Said:
    """One cell on a rank, whose groups are new."""
    join_anew(rank)
    gc.collect()  # models of earlier cells would wait for their first steps beside this one,
    inner("sequence.losses", "WAITING").clear()  # also those that Dynamo keeps
    said, training, checking = io.StringIO(), None, cp_mesh.check_mode() if check else contextlib.nullcontext()
    with warnings.catch_warnings(record=True) as caught, contextlib.redirect_stderr(said), checking:
        warnings.simplefilter("always")
        try:
            training = MISTAKES[mistake](rank, SET_UPS[set_up])
            getattr(training, look)()
            error = None
        except Exception as raised:
            error = raised
    ours = [x for x in caught if str(x.message).startswith("cp_mesh:")]
    warned = [str(x.message) for x in ours]
    while (
        error and error.__cause__ and type(error).__name__ not in REFUSALS
    ):  # as a pipeline's error holds that of a stage
        error = error.__cause__
    if isinstance(error, cp_mesh.tools.VerificationError):
        return Said("found", "VerificationError", error.report.verdict, 0.0)
    kind, message = (type(error).__name__, str(error)) if error else ("", "")
    if kind not in REFUSALS:  # of the library, as Dynamo quotes it
        kind = next((x for x in REFUSALS if f"{x}(" in message), kind)
    if error and WAITED.search(message):
        return Said("hangs", kind, message, 0.0)
    if message.startswith(FOUND):
        return Said("found", kind, message, 0.0)
    if kind in REFUSALS:
        return Said("refused" if training is None or training.at == "forward" else "at step", kind, message, 0.0)
    if error:
        return Said("crashes", kind, message, 0.0)
    if skipped := [text for text in warned if text.startswith(SKIPPED)]:
        return Said("skipped", "", skipped[0], 0.0)
    if warned and look == "guard":
        places = {Path(x.filename).parent for x in ours}  # the user's line, through modules, hooks and modes
        inside = "from inside: " * (not places <= {Path(__file__).parent, Path(__file__).parent / "mistaken"})
        again = "repeated: " * (len({*warned}) < len(warned))
        return Said("warned", "UserWarning", inside + again + "; ".join(warned), training.off)
    return Said("silent" if look != "guard" or not training.off <= SAME else "same", "", "", training.off)


class Ranks(Pool):
    """Ranks that are not waited for where others have refused."""

    def cell(self, *cell: Any) -> list[Said | None]:
        """What each rank says; None of those that wait, or ended, when others have raised."""
        if not all(process.is_alive() for process in self.processes):
            self.close()
        if not self.processes:
            self._start()
        for conn in self.conns:
            conn.send_bytes(pickle.dumps((attempt, cell, poisoning())))
        said: list[Said | None] = [None] * self.world_size
        deadline, lost = time.monotonic() + 3 * TIMEOUT, set[int]()
        stages = [{0, 1}, {2, 3}] if cell[1] == "pipeline" else []
        while waiting := [rank for rank, x in enumerate(said) if x is None and rank not in lost]:
            raised = {rank for rank, x in enumerate(said) if x and x.kind in REFUSALS}
            left = deadline - time.monotonic()
            if left <= 0 or any(stage <= raised for stage in stages):
                break
            for ready in connection.wait([self.conns[rank] for rank in waiting], left):
                rank = self.conns.index(ready)
                try:
                    outcome = pickle.loads(self.conns[rank].recv_bytes())
                    said[rank] = pickle.loads(outcome)
                except (EOFError, OSError):
                    lost.add(rank)
                if rank in lost or said[rank].kind:
                    deadline = min(deadline, time.monotonic() + PATIENCE)
        return [Said("crashes", "", ENDED, 0.0) if rank in lost else x for rank, x in enumerate(said)]


class Runner:
    """Pools of two and four ranks; one is replaced after a cell that may have left something in flight."""

    def __init__(self) -> None:
        self.pools = {size: Ranks(size, group_timeout=TIMEOUT) for size in (2, 4)}

    def __enter__(self) -> Runner:
        return self

    def __exit__(self, *_: object) -> None:
        for pool in self.pools.values():
            pool.close()

    def run(self, mistake: str, set_up: str, look: str = "guard") -> Said:
        """What is said of a cell; in check mode too if the guard is silent and ranks do unlike things."""
        if not is_run(mistake, set_up, look):
            return Said("-", "", "", 0.0)
        said = self.run_once(mistake, set_up, look, False)
        if look != "guard" or said.found != "silent" or not MISTAKES[mistake].unlike:
            return said
        checked = self.run_once(mistake, set_up, look, True)
        return checked._replace(found="check mode", off=said.off) if checked.kind in REFUSALS else said

    def run_once(self, mistake: str, set_up: str, look: str, check: bool) -> Said:
        (a, b), _ = MISTAKES[mistake].axes(SET_UPS[set_up])
        pool = self.pools[a * b]
        answers = pool.cell(mistake, set_up, look, check)
        said = [x for x in answers if x is not None]
        whole = {*QUIET, "refused", "at step", "found"}
        if None in answers or len({x.found for x in said}) > 1 or not {x.found for x in said} <= whole:
            pool.close()
        hung = len(said) < len(answers) or any(x.found == "hangs" for x in said)
        if set_up == "pipeline" and hung:  # the other stage waits for rows, as docs/pipelining.md says
            refusing = [[x for x in stage if x and x.kind in REFUSALS] for stage in (answers[:2], answers[2:])]
            if hung := max(map(len, refusing)) < 2:
                said = said or [Said("hangs", "", "", 0.0)]
            else:
                said = max(refusing, key=len)
        order = [*WORDS]
        if not said:
            return Said("hangs", "", "", 0.0)
        if ended := next((x for x in said if x.message == ENDED), None):
            return ended
        found = min(said, key=lambda x: (x.kind not in REFUSALS, order.index(x.found), x.kind == "RankMismatchError"))
        if found.kind in REFUSALS and set_up != "pipeline" and any(x.found in QUIET for x in said):
            found = found._replace(found="partly")
        return found._replace(off=max(x.off for x in said), found="hangs" if hung else found.found)


def is_run(mistake: str, set_up: str, look: str) -> bool:
    """Whether a column has the cell."""
    one, training = SET_UPS[set_up], MISTAKES[mistake]
    if not training.of(one) or (one.compiled == "whole" and mistake not in TRACED):
        return False
    if look in training.blind or (look in training.slow and set_up != next(iter(SET_UPS))):
        return False
    return {"guard": True, "probe": one.root, "verify": not one.compiled and one.beside != "pp"}[look]


def read(path: Path) -> dict[tuple[str, str], dict[str, str]]:
    if not path.exists():
        return {}
    with path.open() as file:
        return {(row["mistake"], row["set_up"]): row for row in csv.DictReader(file)}


def write(path: Path, rows: dict[tuple[str, str], dict[str, str]]) -> None:
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, FIELDS, lineterminator="\n")
        writer.writeheader()
        writer.writerows(
            rows[cell] for mistake in MISTAKES for set_up in SET_UPS if (cell := (mistake, set_up)) in rows
        )


def page(rows: dict[tuple[str, str], dict[str, str]]) -> str:
    """The table as Markdown."""
    counts = {look: Counter(row[look] for row in rows.values()) for look in LOOKS}
    lines = ["| mark | what is said | " + " | ".join(LOOKS) + " |", "|---" * (2 + len(LOOKS)) + "|"]
    for word, (mark, text) in WORDS.items():
        if word != "-":
            lines.append(f"|`{mark}`|{text}|" + "|".join(str(counts[look][word]) for look in LOOKS) + "|")
    commits = sorted({f"{row['commit']} with torch {row['torch']}" for row in rows.values() if row["commit"]})
    known = Counter(row["probe"] for row in rows.values() if any(text in row["guard_says"] for text in PATTERNS))
    given = {
        "known": known.total(),
        "found": known["found"],
        "skipped": known["skipped"],
        "others": known["-"],
        "set_ups": ", ".join(SET_UPS),
        "counts": "\n".join(lines),
        "commits": ", ".join(commits),
        "right": len(GROUPS[RIGHT]),
    }
    lines = ["# What finds which mistake", "", INTRODUCTION.format(**given)]
    lines += ["| | " + " | ".join(LOOKS) + " |", "|---" * (1 + len(LOOKS)) + "|"]
    for group, names in ((group, names) for group, names in GROUPS.items() if group != RIGHT):
        lines.append(f"|**{group}**|" + "|" * len(LOOKS))
        for name in names:
            found = [(rows.get((name, set_up)) or dict.fromkeys(LOOKS, "-")) for set_up in SET_UPS]
            marks = ["".join(WORDS[row[look] or "-"][0] for row in found) for look in LOOKS]
            lines.append(f"|{name}|" + "|".join(f"`{x}`" for x in marks) + "|")
    return "\n".join(lines) + "\n"


@functools.cache
def commit() -> str:
    """The last one that changed the library."""
    words = ["git", "log", "-1", "--format=%h", "--abbrev=7", "--", "cp_mesh"]
    return subprocess.run(words, cwd=ROOT, capture_output=True, text=True).stdout.strip() or "?"


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=RESULTS / "mistakes.csv", help="gets rows; a page beside it")
    parser.add_argument("--only", nargs="*", default=[""], help="mistakes with one of these texts in their names")
    parser.add_argument("--set-ups", nargs="*", default=[*SET_UPS], choices=[*SET_UPS])
    parser.add_argument("--columns", nargs="*", default=[*LOOKS], choices=LOOKS)
    options = parser.parse_args(arguments)
    rows = {key: row for key, row in read(options.out).items() if key[0] in MISTAKES}
    begin = time.monotonic()
    with Runner() as runner:
        for mistake in (name for name in MISTAKES if any(text in name for text in options.only)):
            line = []
            for set_up in options.set_ups:
                start, row = time.monotonic(), rows.setdefault((mistake, set_up), dict.fromkeys(FIELDS, ""))
                row |= {"mistake": mistake, "set_up": set_up, "commit": commit(), "torch": torch.__version__}
                for look in options.columns:
                    said = runner.run(mistake, set_up, look)
                    row |= {look: said.found, f"{look}_says": " ".join(said.message.split())[:100]}
                    if look == "guard":
                        row["off"] = f"{said.off:.0e}" if said.found in ("silent", "warned") else ""
                found = " ".join(WORDS[row[look]][0] for look in options.columns)
                line.append(f"{set_up} {found} {time.monotonic() - start:.1f}s")
            print(f"{time.monotonic() - begin:5.0f} s  {mistake}: {', '.join(line)}", flush=True)
            write(options.out, rows)
    options.out.with_suffix(".md").write_text(page(rows))


if __name__ == "__main__":
    sys.modules.pop("mistakes", None)
    from mistakes import main as run  # ranks look its functions up by the name of the module

    run()
