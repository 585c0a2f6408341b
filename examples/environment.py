"""Create `.venv` in this repository with cp_mesh and its tools, then continue inside it. Standard library only.

`.venv-integrations` has the packages of the extra `integrations`, in the tested versions. `.venv-integrations-NAME` has
those of the extra `integrations-NAME`: "4" for Transformers 4, "titan-0.3" for torchtitan, "axolotl". Each may be
made with another release of PyTorch, in a folder of its own (`Environment.with_torch`).

If the running interpreter has PyTorch 2.11 or later, that PyTorch is used; otherwise the version in `constraints.txt`
is installed. On Linux it may include gigabytes of CUDA. To avoid them without a GPU, install PyTorch's CPU build first,
or point pip at its index (PIP_EXTRA_INDEX_URL). A second call finds a stamp and returns quickly.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
CONSTRAINTS = ROOT / "examples" / "constraints.txt"
OLDEST_TORCH = (2, 11)


class Environment(NamedTuple):
    """A virtual environment: its folder, extras of cp_mesh to install, and PyTorch's version if one is asked for."""

    folder: Path
    extras: str
    torch: str = ""

    def with_torch(self, version: str) -> Environment:
        """The same packages with this release of PyTorch, whatever the running interpreter has."""
        return Environment(self.folder.with_name(f"{self.folder.name}-torch-{version}"), self.extras, version)

    @property
    def python(self) -> Path:
        return self.folder / ("Scripts/python.exe" if os.name == "nt" else "bin/python")

    @property
    def stamp(self) -> Path:
        return self.folder / "cp_mesh.stamp"


TOOLS = Environment(ROOT / ".venv", "dev,mixers,train")  # mixers: Transformers would call its kernels on CPUs too
INTEGRATIONS = {
    f"--{name}": Environment(ROOT / f".venv-{name}", f"dev,{name.replace('.', '-')}")
    for name in ("integrations", "integrations-4", "integrations-titan-0.3", "integrations-axolotl")
}
"""Environments by the option of tests/run.py."""


def enter(chosen: Environment = TOOLS) -> None:
    """Return inside the environment; outside, create it if it is missing or stale, and restart the script in it."""
    if sys.version_info < (3, 11):  # noqa: UP036 - older interpreters read this file too
        sys.exit(f"cp_mesh needs Python 3.11 or later; this is {sys.version.split()[0]} ({sys.executable})")
    if Path(sys.prefix).resolve() == chosen.folder:
        return
    host_torch = None if chosen.torch else find_torch()
    stamp = fingerprint(host_torch)
    if not chosen.stamp.exists() or chosen.stamp.read_text() != stamp:
        install(chosen, host_torch)
        chosen.stamp.write_text(stamp)  # last, so that an interrupted installation starts again
    command = [str(chosen.python), *sys.argv]
    sys.exit(subprocess.call(command)) if os.name == "nt" else os.execv(chosen.python, command)


def find_torch() -> str | None:
    """The version of PyTorch in the running interpreter; None if it is missing or too old."""
    try:
        version = importlib.metadata.version("torch")
    except importlib.metadata.PackageNotFoundError:
        return None
    numbers = tuple(int(number) for number in re.findall(r"\d+", version)[:2])
    return version if numbers >= OLDEST_TORCH else None


def fingerprint(host_torch: str | None) -> str:
    """The inputs of an environment, as text: if they change, the environment is created again."""
    digest = hashlib.sha256((ROOT / "pyproject.toml").read_bytes() + CONSTRAINTS.read_bytes())
    for fact in (sys.version, sys.prefix, str(host_torch), str(ROOT)):
        digest.update(fact.encode())
    return digest.hexdigest()


def install(chosen: Environment, host_torch: str | None) -> None:
    """Create the environment and install the package in it, editable, with its extras."""
    folder = chosen.folder
    if folder.exists() and not chosen.stamp.exists():
        sys.exit(f"{folder} is not of this script's making: activate it to use it, or remove it")
    found = f"with the PyTorch {host_torch} of {sys.prefix}" if host_torch else "PyTorch included; this takes minutes"
    print(f"setting up {folder} ({found})", flush=True)
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    chosen.stamp.write_text("unfinished")
    pip = create(chosen)
    command = [*pip, "install", "--quiet", "--disable-pip-version-check", "--editable", f"{ROOT}[{chosen.extras}]"]
    if host_torch:
        # A plain path entry also works if the running interpreter is itself a virtual environment.
        purelib = Path(sysconfig.get_path("purelib", vars={"base": str(folder), "platbase": str(folder)}))
        sites = {sysconfig.get_path("purelib"), sysconfig.get_path("platlib"), str(torch_home())}
        (purelib / "host_packages.pth").write_text("\n".join(sorted(sites)) + "\n")
    elif chosen.torch:
        command.append(f"torch=={chosen.torch}")
    else:
        command += ["--constraint", str(CONSTRAINTS)]
    run(command, "pip could not install cp_mesh and its tools; its message is above")


def create(chosen: Environment) -> list[str]:
    """Create an empty environment; return the command that is its pip."""
    hint = "Debian and Ubuntu: apt install python3-venv; elsewhere: a Python from python.org"
    if importlib.util.find_spec("venv") is None:
        sys.exit(f"this Python has no module venv, so it cannot make {chosen.folder}. {hint}")
    create = [sys.executable, "-m", "venv", str(chosen.folder)]
    if importlib.util.find_spec("ensurepip"):
        run(create, f"could not create {chosen.folder}. {hint}")
        return [str(chosen.python), "-m", "pip"]
    if importlib.util.find_spec("pip") is None:
        sys.exit(f"this Python has neither ensurepip nor pip, so it cannot fill {chosen.folder}. {hint}")
    run([*create, "--without-pip"], f"could not create {chosen.folder}. {hint}")
    return [sys.executable, "-m", "pip", "--python", str(chosen.python)]


def torch_home() -> Path:
    """The folder on the path that holds the running interpreter's torch, without importing it."""
    return Path(str(importlib.metadata.distribution("torch").locate_file("")))


def run(command: list[str], failure: str) -> None:
    """Run a command; print what it says only if it fails: pip warns of indexes even if all is well."""
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=False)
    if done.returncode != 0:
        sys.exit(f"{done.stdout.decode(errors='replace')}{failure}")
