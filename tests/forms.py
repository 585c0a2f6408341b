"""Parts of the nightly form, and the record of when each ran."""

from __future__ import annotations

import csv
import subprocess
from datetime import date
from pathlib import Path

PARTS = ("parity", "geometry", "compiled", "interpreted", "benchmarks", "runs", "random")


def commit_of(folder: Path) -> str:
    command = ["git", "describe", "--always", "--dirty", "--abbrev=7", "--exclude=*"]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True).stdout.strip()


def add_part(commit: str, part: str, seconds: float, outcome: str) -> None:
    """A row of docs/results/nightly.csv: when and at which commit a part ran, how long, and how."""
    file = Path(__file__).resolve().parent.parent / "docs" / "results" / "nightly.csv"
    with file.open("a", newline="") as out:
        row = (commit, f"{date.today()}", part, f"{seconds:.0f}", outcome)
        csv.writer(out, lineterminator="\n").writerow(row)
