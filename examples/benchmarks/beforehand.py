"""Compile what a benchmark will run in processes beside each other, which fill the caches of compilers on disk."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

OF_LAUNCHERS = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def run_beside(script: Path, cases: Sequence[Sequence[str]], seconds: float, at_once: int) -> list[float | None]:
    """Run ``script`` with each case's arguments, at most ``at_once`` together, each in a process of its own.

    Args:
        seconds: after which what still runs is ended, and nothing more begins.

    Returns:
        Of each case the seconds after which it ended, of one that failed too, whose last words are printed; None where
        it found no time.
    """
    environment = {name: value for name, value in os.environ.items() if name not in OF_LAUNCHERS}
    environment["TORCHINDUCTOR_COMPILE_THREADS"] = "1"  # no pools of processes beside these
    began, waiting = time.monotonic(), list(range(len(cases)))
    running = dict[int, tuple[subprocess.Popen[bytes], float]]()
    taken: list[float | None] = [None] * len(cases)
    with tempfile.TemporaryDirectory() as folder:
        while waiting or running:
            while waiting and len(running) < at_once:
                i = waiting.pop(0)
                with (Path(folder) / str(i)).open("wb") as printed:
                    command = [sys.executable, str(script), *cases[i]]
                    process = subprocess.Popen(command, env=environment, stdout=printed, stderr=subprocess.STDOUT)
                running[i] = process, time.monotonic()
            time.sleep(0.05)
            for i, (process, since) in list(running.items()):
                if process.poll() is not None:
                    del running[i]
                    taken[i] = time.monotonic() - since
                    if process.returncode:
                        print(*cases[i], "failed:", *(Path(folder) / str(i)).read_text().splitlines()[-3:], sep="\n  ")
            if time.monotonic() - began > seconds:
                waiting.clear()
                for process, _ in running.values():
                    process.kill()
                    process.wait()
                break
    return taken
