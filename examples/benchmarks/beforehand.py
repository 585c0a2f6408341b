"""Compile the kernels of a benchmark in parallel processes, which fill the compilers' caches on disk."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from many_gpus import end

OF_LAUNCHERS = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
AT_ONCE = 12
"""Processes that share a device's memory."""


def run_beside(script: Path, cases: Sequence[Sequence[str]], seconds: float, devices: int = 1) -> list[float | None]:
    """Run ``script`` with each case's arguments, in a process of its own, at most `AT_ONCE` together for each device.

    Args:
        seconds: after which what still runs is ended, and nothing more begins.
        devices: that take turns in the cases.

    Returns:
        Of each case the seconds that it took; None where it failed, whose last words are printed, or found no time.
    """
    environment = {name: value for name, value in os.environ.items() if name not in OF_LAUNCHERS}
    environment["TORCHINDUCTOR_COMPILE_THREADS"] = "1"  # no pools of processes beside these
    at_once = min(AT_ONCE * devices, max(1, len(os.sched_getaffinity(0)) - 1))
    began, waiting = time.monotonic(), list(range(len(cases)))
    running = dict[int, tuple[subprocess.Popen[bytes], float]]()
    taken: list[float | None] = [None] * len(cases)
    with tempfile.TemporaryDirectory() as folder:
        try:
            while (waiting or running) and time.monotonic() - began < seconds:
                while waiting and len(running) < at_once:
                    i = waiting.pop(0)
                    with (Path(folder) / str(i)).open("wb") as printed:
                        command = [sys.executable, str(script), *cases[i]]
                        process = subprocess.Popen(
                            command, env=environment, stdout=printed, stderr=subprocess.STDOUT, start_new_session=True
                        )
                    running[i] = process, time.monotonic()
                time.sleep(0.05)
                for i, (process, since) in list(running.items()):
                    if process.poll() is None:
                        continue
                    del running[i]
                    if process.returncode == 0:
                        taken[i] = time.monotonic() - since
                    else:
                        lines = (Path(folder) / str(i)).read_text(errors="replace").splitlines()
                        print(" ".join(cases[i]), "failed:", *lines[-3:], sep="\n  ")
        finally:
            with ThreadPoolExecutor(max(1, len(running))) as together:  # and what they started
                list(together.map(end, [process for process, _ in running.values()]))
    return taken
