"""Test files run anew with TRITON_INTERPRET=1, where Triton's interpreter runs kernels on CPU tensors.

Such a run is one thread that takes minutes: those that a session will ask for start together, before its first test.
Of several processes that share the tests (pytest-xdist) each starts a run when it comes to it.
"""

from __future__ import annotations

import functools
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
is_that_run = pytest.mark.skipif(INTERPRETED, reason="this is that run")


def require_interpreter() -> None:
    """Skip the test where Triton's interpreter is not there, or does not work."""
    triton, numpy = pytest.importorskip("triton"), pytest.importorskip("numpy")
    versions = [tuple(int(part) for part in module.__version__.split(".")[:2]) for module in (triton, numpy)]
    if versions[0] < (3, 7) and versions[1] >= (2, 4):
        pytest.skip("this interpreter cannot count to a tensor with this NumPy")


@functools.cache  # once a process
def speed_up_interpreter() -> None:
    """Keep the interpreter from work of no effect: half of its time.

    At each call of a device function it looks through triton.language, of which the launch has replaced what is in
    there. Of sums and products it computes whether they overflow, but says so with its option `debug` alone.
    """
    from triton.runtime import interpreter

    patch_lang, launch, patched = interpreter._patch_lang, interpreter.GridExecutor.__call__, set()

    def launch_anew(self: Any, *args: Any, **kwargs: Any) -> None:
        patched.clear()
        launch(self, *args, **kwargs)

    def patch_new(fn: Any) -> Any:
        languages = (interpreter.tl, interpreter.tl.core)
        seen = tuple(any(value is language for value in fn.__globals__.values()) for language in languages)
        if seen in patched:
            return interpreter._LangPatchScope()
        patched.add(seen)
        return patch_lang(fn)

    interpreter._patch_lang, interpreter.GridExecutor.__call__ = patch_new, launch_anew
    options = interpreter.interpreter_builder.options
    interpreter.interpreter_builder.options = replace(options, sanitize_overflow=options.debug)


class Interpreted:
    """Runs of test files; calling it with a file waits for that one's."""

    def __init__(self) -> None:
        self._runs: dict[Path, tuple[subprocess.Popen, Any]] = {}

    def start(self, files: Iterable[Path]) -> None:
        for file in files:
            log = tempfile.TemporaryFile("w+")  # noqa: SIM115 - read when the run has ended
            command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--full", str(file)]
            environment = os.environ | {"TRITON_INTERPRET": "1"}
            self._runs[file] = subprocess.Popen(command, stdout=log, stderr=log, env=environment), log

    def __call__(self, file: str) -> int:
        """The number of tests that passed; those of this file, which must not have failed."""
        require_interpreter()
        path = Path(file).resolve()
        if path not in self._runs:
            self.start([path])
        run, log = self._runs[path]
        status = run.wait(timeout=1200)
        log.seek(0)
        output = log.read()
        assert status == 0, output
        passed = re.search(r"(\d+) passed", output)
        return int(passed[1]) if passed else 0

    def close(self) -> None:
        for run, log in self._runs.values():
            run.kill()
            run.wait()
            log.close()
