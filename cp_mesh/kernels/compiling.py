"""Kernels that are compiled when first met: one rank of a host, or of a device, compiles, and the others load what it
wrote to disk."""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from cp_mesh.errors import warn

PATIENCE = 60.0
"""Seconds to wait for another rank's compilation, which takes 1 to 10; a rank that waited in vain compiles it too."""


@contextmanager
def one_rank_compiles(number: int | None = None) -> Iterator[None]:
    """Hold a lock of this user on this host, while something is compiled. Where there are no locks, none is held, and
    a warning says so where the folder is missing or is not of this user alone.

    ``number``: of the device, if what is compiled for another is of no use to it; only its own ranks wait then.

    Compilers that look for others' results before they begin, and write their own, then compile once a host, or once a
    device. What is done inside must not wait for other ranks, nor for the device, which may wait for other ranks.
    """
    try:
        import fcntl
    except ImportError:  # on Windows
        yield
        return
    try:
        file = _open("compiling.lock" if number is None else f"compiling_{number}.lock")
    except OSError as error:
        warn(f"ranks compile without waiting for each other: {error}")
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


def _open(name: str) -> int:
    """A file of this user's own folder, which lies where everybody may write: others may have put something there.

    Raises:
        OSError: if the folder is another user's, open to others, or a link; if there is none; if the file is no file.
    """
    folder = Path(tempfile.gettempdir()) / f"cp_mesh_{os.geteuid()}"
    with suppress(FileExistsError):
        folder.mkdir(mode=0o700)
    inside = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        found = os.fstat(inside)
        if found.st_uid != os.geteuid() or found.st_mode & 0o077:
            raise PermissionError(f"expected {folder} of this user alone, got one of others too; remove it")
        # nonblocking, as opening a pipe would wait for its reader
        return os.open(name, os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK, 0o600, dir_fd=inside)
    finally:
        os.close(inside)
