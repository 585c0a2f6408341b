"""`--durations-csv=FILE`: appends what each test file took, with set-up and teardown, and the whole run in a last row.

Columns: commit, form ("quick" or "full"), file, seconds, tests (those that ran; skipped ones are not counted). The
seconds of files add up to less than the whole, which also has collection and the end of pools.
"""

from __future__ import annotations

import csv
import subprocess
import time
from collections import Counter
from pathlib import Path

import pytest


class Durations:
    """A pytest plugin that writes the rows of one run."""

    def __init__(self, path: Path, form: str) -> None:
        self.path, self.form, self.begin = path.resolve(), form, time.monotonic()
        self.seconds: Counter[str] = Counter()
        self.tests: Counter[str] = Counter()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        file = Path(report.nodeid.partition("::")[0]).name
        self.seconds[file] += report.duration
        self.tests[file] += report.when == "call" and not report.skipped

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        command = ["git", "describe", "--always", "--dirty", "--abbrev=7", "--exclude=*"]
        commit = subprocess.run(command, cwd=session.config.rootpath, capture_output=True, text=True).stdout.strip()
        files = sorted(file for file in self.tests if self.tests[file])
        rows = [(commit, self.form, file, f"{self.seconds[file]:.1f}", self.tests[file]) for file in files]
        rows.append((commit, self.form, "all", f"{time.monotonic() - self.begin:.1f}", self.tests.total()))
        is_new = not self.path.exists()
        with self.path.open("a", newline="") as out:
            writer = csv.writer(out, lineterminator="\n")
            writer.writerows([("commit", "form", "file", "seconds", "tests")] * is_new + rows)
