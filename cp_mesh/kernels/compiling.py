"""Kernels that are compiled when first met: one rank of a host, or of a device, compiles, and the others load what it
wrote to disk."""

from __future__ import annotations

import getpass
import os
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

PATIENCE = 60.0
"""Seconds to wait for another rank's compilation, which takes 1 to 10; a rank that waited in vain compiles it too."""


@contextmanager
def one_rank_compiles(number: int | None = None) -> Iterator[None]:
    """Hold a lock of this user on this host, while something is compiled. Where there are no locks, none is held.

    ``number``: of the device, if what is compiled for another is of no use to it; only its own ranks wait then.

    Compilers that look for others' results before they begin, and write their own, then compile once a host, or once a
    device. What is done inside must not wait for other ranks, nor for the device, which may wait for other ranks.
    """
    try:
        import fcntl  # not on Windows

        folder = Path(tempfile.gettempdir()) / getpass.getuser() / "cp_mesh"
        folder.mkdir(parents=True, exist_ok=True)
        name = "compiling.lock" if number is None else f"compiling_{number}.lock"
        file = os.open(folder / name, os.O_WRONLY | os.O_CREAT, 0o600)
    except (ImportError, OSError, KeyError):
        yield
        return
    deadline = time.monotonic() + PATIENCE
    try:
        while time.monotonic() < deadline:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                time.sleep(0.02)
            except OSError:  # a file system without locks
                break
        yield
    finally:
        with suppress(OSError):
            fcntl.flock(file, fcntl.LOCK_UN)  # a process that was forked meanwhile has the file open too
        os.close(file)
