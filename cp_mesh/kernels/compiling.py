"""Compilation at a kernel's first call: one rank of a host, or of a device, compiles, and the others load the result
from disk."""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from stat import S_ISDIR

from cp_mesh.errors import warn

PATIENCE = 60.0
"""Seconds to wait for another rank to compile, which takes 1 to 10; after that a rank compiles too."""


@contextmanager
def one_rank_compiles(number: int | None = None) -> Iterator[None]:
    """Hold a lock of this user on this host while something is compiled.

    ``number``: the device, if compiled code serves one device only; then only ranks of this device wait.

    A compiler that looks for a cached result first, and writes its own, then runs once per host, or per device. Code
    inside must not wait for other ranks, nor for the device, which may wait for other ranks. On a system without locks
    none is held; if the lock's folder cannot be made or belongs to others too, a warning says so.
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
            fcntl.flock(file, fcntl.LOCK_UN)  # closing is not enough: a child forked meanwhile has the file open too
        os.close(file)


def _open(name: str) -> int:
    """Open a file in `own_folder`."""
    inside = os.open(own_folder(), os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        # nonblocking: opening a pipe would wait for its reader
        return os.open(name, os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK, 0o600, dir_fd=inside)
    finally:
        os.close(inside)


def own_folder() -> Path:
    """Return this user's folder under the shared temporary folder, where other users may create files too.

    Raises:
        OSError: if the folder belongs to another user, is open to others, is a link or cannot be made.
    """
    folder = Path(tempfile.gettempdir()) / f"cp_mesh_{os.geteuid()}"
    with suppress(FileExistsError):
        folder.mkdir(mode=0o700)
    found = folder.lstat()
    if not S_ISDIR(found.st_mode) or found.st_uid != os.geteuid() or found.st_mode & 0o077:
        raise PermissionError(f"expected {folder} to be a folder owned by and open to this user only; remove it")
    return folder
