"""Scripts as torchrun starts them, in processes forked from the server of ranks.py, which has imported torch."""

from __future__ import annotations

import multiprocessing
import os
import re
import runpy
import socket
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing import connection
from pathlib import Path
from typing import Any

from ranks import GRACE, PRELOAD


@dataclass(frozen=True)
class Done:
    """The exit code, 0 if all processes ended well, and what all of them printed."""

    returncode: int
    printed: str


def run_script(script: Path, arguments: Sequence[str], num_ranks: int | None = None, timeout: float = 240.0) -> Done:
    """Runs a Python file as `__main__`, alone or on so many ranks; when a rank fails, the others are ended."""
    context: Any = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOAD)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    with tempfile.TemporaryDirectory() as folder:
        logs = [Path(folder) / str(rank) for rank in range(num_ranks or 1)]
        told = [(str(script), [str(x) for x in arguments], rank, num_ranks, port, log) for rank, log in enumerate(logs)]
        processes = [context.Process(target=_main, args=each) for each in told]
        for process in processes:
            process.start()
        deadline = time.monotonic() + timeout
        while alive := [process for process in processes if process.exitcode is None]:
            if not connection.wait([process.sentinel for process in alive], max(0.0, deadline - time.monotonic())):
                break
            if any(process.exitcode for process in processes):
                deadline = min(deadline, time.monotonic() + GRACE)
        for process in processes:
            process.kill()
            process.join()
        failed = [process.exitcode for process in processes if process.exitcode]
        return Done(failed[0] if failed else 0, "".join(log.read_text() for log in logs))


def _main(script: str, arguments: list[str], rank: int, num_ranks: int | None, port: int, log: Path) -> None:
    with log.open("w") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    import torch
    import torch._inductor.config

    torch.set_num_threads(1)
    torch._inductor.config.compile_threads = 1  # else every rank starts compile workers of its own
    if num_ranks:
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(num_ranks)}
        os.environ |= {"LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(num_ranks)}
        if sys.platform == "linux":
            os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # as in ranks.py
    # A plain trainer is not to import what it checks, as the server of the ranks has done.
    if "--plain" in arguments and Path(script).name == "train_llama.py":
        for name in [name for name in sys.modules if name.partition(".")[0] == "cp_mesh"]:
            del sys.modules[name]
    sys.argv, sys.path[:0] = [script, *arguments], [str(Path(script).parent)]
    try:
        runpy.run_path(script, run_name="__main__")
    finally:
        sys.stdout.flush()


def blocks(page: str) -> list[str]:
    """Those of Python in a page of docs."""
    text = (Path(__file__).resolve().parent.parent / "docs" / f"{page}.md").read_text()
    return re.findall(r"^```python\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
