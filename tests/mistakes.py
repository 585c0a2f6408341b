"""What finds each mistake of a training set-up, in each set-up: makes docs/results/mistakes.csv and the page of it.

    python tests/mistakes.py --label before                     # every cell, two files in docs/results
    python tests/mistakes.py --label before --probe             # the same with the probe, into columns of its own
    python tests/mistakes.py --label trial --out /tmp/x.csv --only labels --set-ups eager FSDP2

A cell is two gloo ranks, or four. Rows of the same label and cell are replaced; others stay.
"""

from __future__ import annotations

import argparse
import contextlib
import csv
import functools
import io
import pickle
import re
import subprocess
import sys
import time
import warnings
from multiprocessing import connection
from pathlib import Path
from typing import Any, NamedTuple

import torch
from mistaken import GROUPS, MISTAKES, TRACED
from poison import poisoning
from ranks import Pool, join_anew
from set_ups import SET_UPS

import cp_mesh

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "docs" / "results"
COLUMNS = ["label", "commit", "torch", "mistake", "set_up", "found", "class", "message", "off"]
COLUMNS += ["probe", "probe_class", "probe_message"]
TIMEOUT = 25.0
"""Seconds of the groups: a rank that waits as long, hangs."""
SAME = 1e-5
"""A relative difference from one rank that is rounding."""
PATIENCE = 20.0
"""Seconds that ranks are given after another has raised."""
ENDED = "the process ended"
SKIPPED = "cp_mesh: the probe"
"""How warnings begin of a probe that compared nothing, which is nothing found."""
QUIET = ("warned", "silent", "same")
WAITED = re.compile("never came|[Tt]imed out|[Tt]imeout")
"""What the error of a rank says that waited for another in vain."""
REFUSALS = ("ArgumentError", "UnsupportedError", "RankMismatchError")
WORDS = {
    "refused": "an error of cp_mesh in the forward or the loss",
    "at step": "an error of cp_mesh in the backward or at the first optimizer step",
    "warned": "a warning",
    "crashes": "an error of PyTorch, or a process that ends",
    "hangs": "a rank waits until its group's timeout",
    "check mode": "nothing is said, but an error with CP_MESH_CHECK=1",
    "silent": "nothing is said, and the loss or gradients are wrong",
    "same": "nothing is said, and loss and gradients are those of one rank",
    "-": "does not exist in the set-up, or is run in others",
}

INTRODUCTION = """Each row is a mistake of a training set-up, each column a set-up that is otherwise right. A small
decoder is trained over two cp ranks, or over four with dp, tp or stages of a pipeline; each column differs from the
first in one thing. Messages and differences from one rank are in [the file](mistakes.csv). `tests/mistakes.py` makes
both, from the mistakes in `tests/mistaken.py` and the set-ups in `tests/set_ups.py`."""


class Said(NamedTuple):
    """What a rank said of a cell."""

    found: str
    kind: str
    message: str
    off: float


def attempt(rank: int, mistake: str, set_up: str, probe: bool, check: bool) -> Said:
    """One cell on a rank, whose groups are new."""
    join_anew(rank)
    said, training, checking = io.StringIO(), None, cp_mesh.check_mode() if check else contextlib.nullcontext()
    with warnings.catch_warnings(record=True) as caught, contextlib.redirect_stderr(said), checking:
        warnings.simplefilter("always")
        try:
            training = MISTAKES[mistake](rank, SET_UPS[set_up])
            training.run(probe)
            error = None
        except Exception as raised:
            error = raised
    warned = [str(x.message) for x in caught if str(x.message).startswith("cp_mesh:")]
    skipped = next((text for text in warned if text.startswith(SKIPPED)), "")
    warned = [text for text in warned if not text.startswith(SKIPPED)]
    while (
        error and error.__cause__ and type(error).__name__ not in REFUSALS
    ):  # as a pipeline's error holds that of a stage
        error = error.__cause__
    kind, message = (type(error).__name__, str(error)) if error else ("", "")
    if kind not in REFUSALS:  # of the library, as Dynamo quotes it
        kind = next((x for x in REFUSALS if f"{x}(" in message), kind)
    if error and WAITED.search(message):
        return Said("hangs", kind, message, 0.0)
    if kind in REFUSALS:
        return Said("refused" if training is None or training.at == "forward" else "at step", kind, message, 0.0)
    if error:
        return Said("crashes", kind, message, 0.0)
    if warned:
        return Said("warned", "UserWarning", warned[0], training.off)
    return Said("silent" if not training.off <= SAME else "same", "", skipped, training.off)


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

    def run(self, mistake: str, set_up: str, probe: bool = False) -> Said:
        """What is said of a cell; in check mode too if that is silent and ranks do unlike things."""
        said = self.run_once(mistake, set_up, probe, False)
        if said.found != "silent" or not MISTAKES[mistake].unlike:
            return said
        checked = self.run_once(mistake, set_up, probe, True)
        return checked._replace(found="check mode", off=said.off) if checked.kind in REFUSALS else said

    def run_once(self, mistake: str, set_up: str, probe: bool, check: bool) -> Said:
        training, whole = MISTAKES[mistake], SET_UPS[set_up].compiled == "whole"
        if not training.of(SET_UPS[set_up]) or (whole and mistake not in TRACED):
            return Said("-", "", "", 0.0)
        (a, b), _ = training.axes(SET_UPS[set_up])
        pool = self.pools[a * b]
        answers = pool.cell(mistake, set_up, probe, check)
        said = [x for x in answers if x is not None]
        if len({x and x.found for x in answers}) > 1 or not {x.found for x in said} <= {*QUIET, "refused", "at step"}:
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
        return found._replace(off=max(x.off for x in said), found="hangs" if hung else found.found)


def shortened(text: str) -> str:
    return " ".join(text.split())[:100]


def read(path: Path) -> list[dict[str, str]]:
    if not path.exists():
        return []
    with path.open() as file:
        return list(csv.DictReader(file))


def write(path: Path, rows: list[dict[str, str]]) -> None:
    labels, names, columns = [*dict.fromkeys(row["label"] for row in rows)], [*MISTAKES], [*SET_UPS]
    rows.sort(key=lambda row: (labels.index(row["label"]), names.index(row["mistake"]), columns.index(row["set_up"])))
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)


def page(rows: list[dict[str, str]]) -> str:
    """The table as Markdown: what each label says where they differ, and the probe where it says something else."""
    labels = [*dict.fromkeys(row["label"] for row in rows)]
    cells = {(row["mistake"], row["set_up"], row["label"]): row for row in rows}
    lines = ["# What finds which mistake", "", INTRODUCTION, ""]
    for label in labels:
        commits = sorted({f"{row['commit']}, torch {row['torch']}" for row in rows if row["label"] == label})
        found = [row["found"] for row in rows if row["label"] == label]
        counts = ", ".join(f"{word} {found.count(word)}" for word in WORDS if word != "-")
        lines.append(f"- {label}, at {'; '.join(commits)}: {counts}")
    lines += ["", "| word | meaning |", "|---|---|", *(f"| {shown(word)} | {text} |" for word, text in WORDS.items())]
    for group, names in {"Right": ["right"], **GROUPS}.items():
        lines += ["", f"## {group}", "", "| | " + " | ".join(SET_UPS) + " |", "|---" * (1 + len(SET_UPS)) + "|"]
        for name in names:
            said = [summary([cells.get((name, set_up, label)) for label in labels]) for set_up in SET_UPS]
            lines.append(f"| {name} | " + " | ".join(said) + " |")
    return "\n".join(lines) + "\n"


def summary(rows: list[dict[str, str] | None]) -> str:
    """Of one cell, oldest label first."""
    found = [row["found"] for row in rows if row and row["found"]]
    words = [x for i, x in enumerate(found) if i == 0 or x != found[i - 1]]
    text = " → ".join(map(shown, words))
    probe = next((row["probe"] for row in reversed(rows) if row and row["probe"]), "")
    return text if probe in ("", found[-1] if found else "") else f"{text}; probe: {shown(probe)}"


def shown(word: str) -> str:
    return f"**{word}**" if word == "silent" else word


@functools.cache
def commit() -> str:
    """The last one that changed the library."""
    words = ["git", "log", "-1", "--format=%h", "--abbrev=7", "--", "cp_mesh"]
    return subprocess.run(words, cwd=ROOT, capture_output=True, text=True).stdout.strip() or "?"


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=RESULTS / "mistakes.csv", help="gets rows; a page beside it")
    parser.add_argument("--label", default="trial", help="of the library that runs, such as before or after")
    parser.add_argument("--probe", action="store_true", help="run cells with the probe, into columns of their own")
    parser.add_argument("--only", nargs="*", default=[""], help="mistakes with one of these texts in their names")
    parser.add_argument("--set-ups", nargs="*", default=[*SET_UPS], choices=[*SET_UPS])
    options = parser.parse_args(arguments)
    if options.probe and not hasattr(cp_mesh, "probe"):
        parser.error("this cp_mesh has no probe")
    rows = {(x["label"], x["mistake"], x["set_up"]): x for x in read(options.out)}
    begin = time.monotonic()
    with Runner() as runner:
        for mistake in (name for name in MISTAKES if any(text in name for text in options.only)):
            line = []
            for set_up in options.set_ups:
                start = time.monotonic()
                said = runner.run(mistake, set_up, options.probe)
                row = rows.setdefault((options.label, mistake, set_up), dict.fromkeys(COLUMNS, ""))
                row |= {"label": options.label, "mistake": mistake, "set_up": set_up}
                row |= {"commit": commit(), "torch": torch.__version__}
                if options.probe:
                    row |= {"probe": said.found, "probe_class": said.kind, "probe_message": shortened(said.message)}
                else:
                    row |= {"found": said.found, "class": said.kind, "message": shortened(said.message)}
                    row["off"] = f"{said.off:.0e}" if said.found in ("silent", "warned") else ""
                line.append(f"{set_up}: {said.found}({time.monotonic() - start:.1f}s {said.off:.0e})")
            print(f"{time.monotonic() - begin:5.0f} s  {mistake}: {', '.join(line)}", flush=True)
            write(options.out, [*rows.values()])
    options.out.with_suffix(".md").write_text(page([*rows.values()]))


if __name__ == "__main__":
    sys.modules.pop("mistakes", None)
    from mistakes import main as run  # ranks look its functions up by the name of the module

    run()
