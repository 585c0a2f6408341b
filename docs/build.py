"""Build the site of the documents: `python3 docs/build.py`; it is written to build/site.

The tools are the packages of the extra `docs` in pyproject.toml, in an environment of their own, `.venv-docs`, which is
made where it is missing or stale. PyTorch is not needed: docstrings are read from the source. Any warning fails.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
VENV = ROOT / ".venv-docs"
PYTHON = VENV / "bin" / "python"
STAMP = VENV / "cp_mesh.stamp"


def install(packages: list[str]) -> None:
    """Make the environment, without a pip of its own where this Python has no ensurepip."""
    shutil.rmtree(VENV, ignore_errors=True)
    own_pip = importlib.util.find_spec("ensurepip") is not None
    subprocess.run([sys.executable, "-m", "venv", *([] if own_pip else ["--without-pip"]), str(VENV)], check=True)
    pip = [str(PYTHON), "-m", "pip"] if own_pip else [sys.executable, "-m", "pip", "--python", str(PYTHON)]
    subprocess.run([*pip, "install", "--quiet", "--disable-pip-version-check", *packages], check=True)


def main() -> int:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    stamp = hashlib.sha256(repr((sys.version, sys.prefix, str(ROOT), extras["docs"])).encode()).hexdigest()
    if not STAMP.exists() or STAMP.read_text() != stamp:
        install(extras["docs"])
        STAMP.write_text(stamp)  # last: an installation that was cut short is made anew
    command = [str(PYTHON), "-m", "mkdocs", "build", "--strict", "--clean", *sys.argv[1:]]
    quiet = {"NO_MKDOCS_2_WARNING": "1"}  # an advertisement
    return subprocess.call(command, cwd=ROOT, env=os.environ | quiet)


if __name__ == "__main__":
    sys.exit(main())
