"""The report of `cp_mesh.verify_model`: a row for each check, as a table or JSON, and a verdict of one line."""

from __future__ import annotations

import importlib.util
import json
import math
import sys
import textwrap
from dataclasses import asdict, dataclass, field
from typing import Any

WIDTH = 99
HEADER = ("check", "", "error", "allowed")
STYLES = {True: "green", False: "bold red"}


@dataclass(frozen=True)
class Finding:
    """The result of one check.

    Attributes:
        check: name of the check.
        passed: whether the result is right.
        error: relative to the reference; None if the check has no figure.
        allowed: the largest error that passes.
        where: the first module, argument, parameter or position that is wrong.
        note: explanation of the error, or what was compared.
        named: whether the note names the cause of a wrong factor: a number of ranks, or a missing sum.
    """

    check: str
    passed: bool
    error: float | None = None
    allowed: float | None = None
    where: str = ""
    note: str = ""
    named: bool = False


@dataclass
class ModelReport:
    """The result of `cp_mesh.verify_model`, equal on all ranks.

    Attributes:
        findings: the checks, in order; the first wrong one is nearest to the cause.
        seconds: run time.
        cp_size: number of ranks that sequences are sharded over.
    """

    findings: list[Finding] = field(default_factory=list)
    seconds: float = 0.0
    cp_size: int = 1

    @property
    def passed(self) -> bool:
        return bool(self.findings) and all(finding.passed for finding in self.findings)

    @property
    def verdict(self) -> str:
        """One line: RIGHT, or WRONG with the first failed check and the first one whose note names a cause."""
        took = f"({len(self.findings)} checks, {self.seconds:.1f} s)"
        if self.passed:
            return f"RIGHT {took}{'' if self.cp_size > 1 else ', on one cp rank: no sequence was sharded'}"
        wrong = [finding for finding in self.findings if not finding.passed]
        named = next((finding for finding in wrong if finding.named), None)
        told = [*wrong[:1], *([named] if named not in (None, *wrong[:1]) else [])]
        text = ". ".join(f"{finding.check}: {_text(finding)}" for finding in told if finding)
        return f"WRONG: {text} {took}" if wrong else "WRONG: nothing was checked"

    def to_json(self) -> str:
        """The report as JSON; non-finite numbers are strings."""
        rows = [{key: _plain(value) for key, value in asdict(finding).items()} for finding in self.findings]
        said = {"passed": self.passed, "verdict": self.verdict, "seconds": self.seconds}
        return json.dumps({**said, "findings": rows}, indent=1)

    def __str__(self) -> str:
        rows = [HEADER, *(_cells(finding) for finding in self.findings)]
        widths = [max(len(row[i]) for row in rows) for i in range(len(HEADER))]
        lines = []
        for row, finding in zip(rows, [None, *self.findings], strict=True):
            lines.append("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())
            lines += textwrap.wrap(_text(finding), WIDTH, initial_indent="    ", subsequent_indent="    ")
        return "\n".join([*lines, "", *textwrap.wrap(self.verdict, WIDTH)])

    def print(self) -> None:
        """Print the table, then the verdict; in colors if stdout is a terminal and the package rich is installed."""
        if not sys.stdout.isatty() or importlib.util.find_spec("rich") is None:
            print(self, flush=True)
            return
        screen = importlib.import_module("rich.console").Console(highlight=False, markup=False)
        table = importlib.import_module("rich.table").Table(*HEADER, "where")
        for finding in self.findings:
            table.add_row(*_cells(finding), _text(finding), style=STYLES[finding.passed])
        screen.print(table)
        screen.print(self.verdict, style=STYLES[self.passed])


def _cells(finding: Finding) -> tuple[str, ...]:
    figures = ("" if x is None else f"{x:.1e}" for x in (finding.error, finding.allowed))
    return finding.check, "right" if finding.passed else "WRONG", *figures


def _text(finding: Finding | None) -> str:
    return "" if finding is None else "; ".join(text for text in (finding.where, finding.note) if text)


def _plain(value: Any) -> Any:
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value
