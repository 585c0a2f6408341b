"""Command-line parsing and output of ``python -m cp_mesh``."""

from __future__ import annotations

import argparse
import os
import re
import shutil
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from fractions import Fraction
from pathlib import Path
from typing import Any, NoReturn

import torch.distributed as dist

from cp_mesh.tools.verification.report import STYLES, console

WIDTH = 100
REFUSED = 2  # exit status if something could not run; 1 if something is wrong
MOST = 1 << 20  # largest number that an option takes, and most tokens that are computed
UNITS = {"": 1, "k": 1 << 10, "m": 1 << 20}
AFTER = 1.0  # seconds that an operation runs before it gets a progress line
SPEAKING = 1.0  # seconds that other ranks wait before they exit, so that rank 0 can print the error


class Parser(argparse.ArgumentParser):
    """Argument parser with at most 100 columns; only rank 0 prints errors."""

    def __init__(self, command: str, description: str, options: Mapping[str, Any]) -> None:
        width = min(WIDTH, shutil.get_terminal_size().columns) - 2
        super().__init__(
            prog=f"python -m cp_mesh {command}".strip(),
            description=description,
            formatter_class=lambda prog: argparse.HelpFormatter(prog, width=width),
        )
        for option, settings in options.items():
            self.add_argument(option, **settings)

    def error(self, message: str) -> NoReturn:
        """Print the error on rank 0 and exit; other ranks wait first, since torchrun kills all ranks when one exits."""
        if _rank():
            time.sleep(SPEAKING)
        else:
            lines = textwrap.wrap(f"{self.prog}: error: {message}", WIDTH, break_on_hyphens=False)
            print(*lines, f"see {self.prog} --help", sep="\n", file=sys.stderr, flush=True)
        if dist.is_initialized():
            dist.destroy_process_group()
        raise SystemExit(REFUSED)

    def of_launch(self, name: str, least: int, most: int) -> int:
        """Read a number that torchrun sets in the environment."""
        word = os.environ.get(name, "")
        if not re.fullmatch("[0-9]{1,9}", word) or not least <= int(word) <= most:
            expected = f"{name} in the environment: expected {least} to {most}, as torchrun sets it"
            self.error(f"{expected}, got {word!r}; unset RANK to run without a launcher")
        return int(word)

    @contextmanager
    def writing(self, path: Path) -> Iterator[None]:
        """Turn an OSError while writing ``path`` into an error of the command; print the results before."""
        try:
            yield
        except OSError as error:
            self.error(f"expected a writable file, got {path} ({error.strerror or error})")


def _rank() -> int:
    """Return RANK from the environment; 0 if it is no number, so that this process prints the error about it."""
    word = os.environ.get("RANK", "")
    return int(word) if re.fullmatch("[0-9]{1,9}", word) else 0


def show(line: str, passed: bool | None = None) -> None:
    """Print a line, colored by its outcome if stdout is a terminal and the package rich is installed."""
    screen = None if passed is None else console(soft_wrap=True)
    if screen is None or passed is None:
        print(line, flush=True)
    else:
        screen.print(line, style=STYLES[passed])


class Progress:
    """Print operations that take over a second to stderr: ``with progress("fitting"): ...``.

    Args:
        on: False prints nothing; pass True on rank 0 only.
    """

    def __init__(self, on: bool = True) -> None:
        self.on, self.started = on, time.perf_counter()
        self._timer = threading.Timer(0, lambda: None)

    def __call__(self, what: str) -> Progress:
        """Start the timer of the next operation."""
        self._timer.cancel()
        if self.on:
            self._timer = threading.Timer(AFTER, self._say, (what,))
            self._timer.daemon = True
            self._timer.start()
        return self

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *_: object) -> None:
        self._timer.cancel()

    def _say(self, what: str) -> None:
        line = f"[{time.perf_counter() - self.started:6.1f} s] {what}"
        print(line[: WIDTH - 1], file=sys.stderr, flush=True)


def number_of(least: int = 1, most: int = MOST) -> Callable[[str], int]:
    """Return a parser of whole numbers such as 131072, 131_072, 128K, 1M or 1e6; K is 1024, M is 1024 * 1024."""

    def number(text: str) -> int:
        parts = re.fullmatch(r"([+-]?[0-9]+(?:_[0-9]+)*(?:\.[0-9]+)?(?:e\+?[0-9]{1,3})?)([km]?)", text.lower())
        value = Fraction(parts[1]) * UNITS[parts[2]] if parts and len(text) < 100 else Fraction(1, 2)
        if value.denominator > 1:
            raise argparse.ArgumentTypeError(f"expected a whole number (131072, 128K, 1e6), got {text!r}")
        if not least <= value <= most:
            expected = f"at least {least}" if value < least else f"at most {most}"
            raise argparse.ArgumentTypeError(f"expected {expected}, got {text}")
        return int(value)

    return number


def heads_of(text: str) -> tuple[int, int]:
    """Parse "32/8" or "32" into numbers of query heads and kv heads."""
    try:
        query, kv = (number_of()(num) for num in (text.split("/") * (1 if "/" in text else 2)))
    except (ValueError, argparse.ArgumentTypeError):
        raise argparse.ArgumentTypeError(f"expected query heads/kv heads such as 32/8, got {text!r}") from None
    return query, kv


def output_file(text: str) -> Path:
    """Parse the path of an output file; only rank 0 checks it, since other ranks may be on other hosts."""
    path, problem = Path(text), ""
    if not text or os.path.isdir(text):
        problem = f"the folder {path}"
    elif not os.path.isdir(path.parent):
        problem = f"no folder {path.parent}"
    elif not os.access(path if os.path.exists(path) else path.parent, os.W_OK):
        problem = f"no permission to write {path}"
    if problem and not _rank():
        raise argparse.ArgumentTypeError(f"expected a file in an existing folder, got {problem}")
    return path


def option(kind: Callable[[str], Any], metavar: str = "N", text: str | None = None, **more: Any) -> dict[str, Any]:
    return {"type": kind, "metavar": metavar, "help": text, **more}


def one_of(*names: str, **more: Any) -> dict[str, Any]:
    """Option with one of these names; the help lists them instead of the usage line."""
    return {"metavar": "NAME", "choices": names, "help": ", ".join(names), **more}
