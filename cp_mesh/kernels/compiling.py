"""Compilation at a kernel's first call: one rank of a host, or of a device, compiles, and the others load the result
from disk."""

from __future__ import annotations

import os
import tempfile
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
    inside must not wait for other ranks, nor for the device, which may wait for other ranks. If the lock cannot be
    held, or its folder cannot be made or belongs to others too, a warning says so.
    """
    from filelock import FileLock, Timeout  # takes 0.15 s to import

    lock = None
    try:
        name = "compiling.lock" if number is None else f"compiling_{number}.lock"
        lock = FileLock(own_folder() / name, PATIENCE, 0o600)
        lock.acquire(poll_interval=0.02)
    except Timeout:
        pass
    except (OSError, AttributeError, NotImplementedError) as error:  # there is no geteuid on Windows
        warn(f"ranks compile without waiting for each other: {error}")
    try:
        yield
    finally:
        if lock is not None:
            lock.release()


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
