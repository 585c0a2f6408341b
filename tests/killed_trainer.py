"""The trainer of examples/, in which a rank kills itself: ``killed_trainer.py RANK MOMENT COUNT ARGUMENTS``.

At the call number COUNT of what is named by `MOMENTS`: before an optimizer step; when a rank has written its part of a
checkpoint; when the checkpoint is complete, but for its name.
"""

from __future__ import annotations

import os
import runpy
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.filesystem import FileSystemWriter

EXAMPLES = Path(__file__).resolve().parent.parent / "examples"
MOMENTS: dict[str, tuple[Any, str, bool]] = {
    "step": (torch.optim.AdamW, "step", False),
    "part": (FileSystemWriter, "write_data", True),
    "complete": (FileSystemWriter, "finish", True),
}
"""Owner and name of a function, and whether it runs before the end."""


def plant(owner: Any, name: str, runs: bool, count: int) -> None:
    real: Callable[..., Any] = getattr(owner, name)
    calls = []

    def last(*args: Any, **kwargs: Any) -> Any:
        calls.append(1)
        if len(calls) < count:
            return real(*args, **kwargs)
        if runs:
            result = real(*args, **kwargs)
            if hasattr(result, "wait"):
                result.wait()
        os.kill(os.getpid(), signal.SIGKILL)

    setattr(owner, name, last)


if __name__ == "__main__":
    rank, moment, count, *arguments = sys.argv[1:]
    if os.environ["RANK"] == rank:
        plant(*MOMENTS[moment], int(count))
    sys.argv[1:], sys.path[:0] = arguments, [str(EXAMPLES)]
    runpy.run_path(str(EXAMPLES / "train_llama.py"), run_name="__main__")
