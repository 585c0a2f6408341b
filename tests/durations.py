"""`--durations-csv=FILE`: appends what each test file took, with set-up and teardown, and the whole run in a last row.

Columns: commit, form ("quick", "full" or a part of the nightly one), file, seconds, tests (those that ran; skipped ones
are not counted), cpu_seconds (of all processes that the tests began, from /proc; empty elsewhere). The seconds of files
add up to less than the whole, which also has collection and the end of pools. CPU seconds say what tests cost where
others use the cores too.
"""

from __future__ import annotations

import csv
import os
import subprocess
import time
from collections import Counter, defaultdict
from collections.abc import Iterator
from datetime import date
from pathlib import Path
from typing import Any

import pytest


def commit_of(folder: Path) -> str:
    command = ["git", "describe", "--always", "--dirty", "--abbrev=7", "--exclude=*"]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True).stdout.strip()


PARTS = ("parity", "geometry", "compiled", "interpreted", "bugs", "benchmarks", "runs", "random")
"""Of the nightly form."""


def add_part(commit: str, part: str, seconds: float, outcome: str) -> None:
    """A row of docs/results/nightly.csv: when and at which commit a part of the nightly form ran, how long, and how."""
    root = Path(__file__).resolve().parent.parent
    file = root / "docs" / "results" / "nightly.csv"
    with file.open("a", newline="") as out:
        row = (commit, f"{date.today()}", part, f"{seconds:.0f}", outcome)
        csv.writer(out, lineterminator="\n").writerow(row)


def cpu_seconds() -> float:
    """Of this process and of all that descend from it, also of those that have ended and were waited for."""
    spent, children = {}, defaultdict(list)
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
        except OSError:  # it has ended
            continue
        pid = int(stat.parent.name)
        spent[pid] = sum(map(int, fields[11:15]))  # user and system time of its own and of its children
        children[int(fields[1])].append(pid)
    found = [os.getpid()]
    for pid in found:
        found += children[pid]
    return sum(spent[pid] for pid in found) / os.sysconf("SC_CLK_TCK")


class CpuSeconds:
    """A pytest plugin, of each process that runs tests, which reports what every test took."""

    def __init__(self) -> None:
        self.before = cpu_seconds()

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, call: pytest.CallInfo) -> Iterator[None]:
        report: Any = yield
        if call.when == "teardown":
            now = cpu_seconds()
            report.user_properties.append(("cpu_seconds", now - self.before))
            self.before = now
        return report


class Durations:
    """A pytest plugin that writes the rows of one run."""

    def __init__(self, path: Path, form: str) -> None:
        self.path, self.form, self.begin = path.resolve(), form, time.monotonic()
        self.seconds: Counter[str] = Counter()
        self.tests: Counter[str] = Counter()
        self.cpu: dict[str, float] = defaultdict(float)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        file = Path(report.nodeid.partition("::")[0]).name
        self.seconds[file] += report.duration
        self.tests[file] += report.when == "call" and not report.skipped
        self.cpu[file] += dict(report.user_properties).get("cpu_seconds", 0.0) if report.when == "teardown" else 0.0

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        commit = commit_of(session.config.rootpath)
        files = sorted(file for file in self.tests if self.tests[file])
        rows = [(file, self.seconds[file], self.tests[file], self.cpu[file]) for file in files]
        rows.append(("all", time.monotonic() - self.begin, self.tests.total(), sum(self.cpu.values())))
        is_new = not self.path.exists()
        with self.path.open("a", newline="") as out:
            writer = csv.writer(out, lineterminator="\n")
            if is_new:
                writer.writerow(("commit", "form", "file", "seconds", "tests", "cpu_seconds"))
            for file, seconds, tests, cpu in rows:
                writer.writerow((commit, self.form, file, f"{seconds:.1f}", tests, f"{cpu:.1f}" if cpu else ""))
