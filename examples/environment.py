"""Make `.venv` beside this repository hold cp_mesh and its tools, then go on inside it. Standard library only.

A PyTorch that the running interpreter already has (2.11 or later) is used as it is; otherwise the version in
`constraints.txt` is installed. On Linux that one may carry gigabytes of CUDA; to spare them without a GPU, install
PyTorch's CPU build first, or point pip at its index (PIP_EXTRA_INDEX_URL). A second call finds a stamp and is quick.
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

ROOT = Path(__file__).resolve().parent.parent
VENV = ROOT / ".venv"
PYTHON = VENV / ("Scripts/python.exe" if os.name == "nt" else "bin/python")
CONSTRAINTS = ROOT / "examples" / "constraints.txt"
STAMP = VENV / "cp_mesh.stamp"
OLDEST_TORCH = (2, 11)


def enter() -> None:
    """Return inside `.venv`, made where it is missing or stale; outside it, start the running script again in it."""
    if sys.version_info < (3, 11):  # noqa: UP036 - older interpreters read this file too
        sys.exit(f"cp_mesh needs Python 3.11 or later; this is {sys.version.split()[0]} ({sys.executable})")
    if Path(sys.prefix).resolve() == VENV:
        return
    host_torch = find_torch()
    stamp = fingerprint(host_torch)
    if not STAMP.exists() or STAMP.read_text() != stamp:
        install(host_torch)
        STAMP.write_text(stamp)  # last: an installation that was cut short is made anew
    command = [str(PYTHON), *sys.argv]
    sys.exit(subprocess.call(command)) if os.name == "nt" else os.execv(PYTHON, command)


def find_torch() -> str | None:
    """The version of PyTorch in the running interpreter, None if there is none that will do."""
    try:
        version = importlib.metadata.version("torch")
    except importlib.metadata.PackageNotFoundError:
        return None
    numbers = tuple(int(number) for number in re.findall(r"\d+", version)[:2])
    return version if numbers >= OLDEST_TORCH else None


def fingerprint(host_torch: str | None) -> str:
    """What `.venv` depends on: when this changes it is made anew."""
    digest = hashlib.sha256((ROOT / "pyproject.toml").read_bytes() + CONSTRAINTS.read_bytes())
    for fact in (sys.version, sys.prefix, str(host_torch), str(ROOT)):
        digest.update(fact.encode())
    return digest.hexdigest()


def install(host_torch: str | None) -> None:
    """Create `.venv` and install the package, editable, with the extras that the examples and tests need."""
    if VENV.exists() and not STAMP.exists():
        sys.exit(f"{VENV} is not of this script's making: activate it to use it, or remove it")
    found = f"with the PyTorch {host_torch} of {sys.prefix}" if host_torch else "PyTorch included; this takes minutes"
    print(f"setting up {VENV} ({found})", flush=True)
    shutil.rmtree(VENV, ignore_errors=True)
    VENV.mkdir()
    STAMP.write_text("unfinished")
    pip = create()
    command = [*pip, "install", "--quiet", "--disable-pip-version-check", "--editable", f"{ROOT}[dev,train]"]
    if host_torch:
        # A plain path entry reaches the packages of an interpreter that is itself a virtual environment, too.
        purelib = Path(sysconfig.get_path("purelib", vars={"base": str(VENV), "platbase": str(VENV)}))
        sites = {sysconfig.get_path("purelib"), sysconfig.get_path("platlib"), str(torch_home())}
        (purelib / "host_packages.pth").write_text("\n".join(sorted(sites)) + "\n")
    else:
        command += ["--constraint", str(CONSTRAINTS)]
    run(command, "pip could not install cp_mesh and its tools; its message is above")


def create() -> list[str]:
    """Create an empty `.venv`; return the command that is its pip."""
    hint = "Debian and Ubuntu: apt install python3-venv; elsewhere: a Python from python.org"
    if importlib.util.find_spec("venv") is None:
        sys.exit(f"this Python has no module venv, so it cannot make {VENV}. {hint}")
    create = [sys.executable, "-m", "venv", str(VENV)]
    if importlib.util.find_spec("ensurepip"):
        run(create, f"could not create {VENV}. {hint}")
        return [str(PYTHON), "-m", "pip"]
    if importlib.util.find_spec("pip") is None:
        sys.exit(f"this Python has neither ensurepip nor pip, so it cannot fill {VENV}. {hint}")
    run([*create, "--without-pip"], f"could not create {VENV}. {hint}")
    return [sys.executable, "-m", "pip", "--python", str(PYTHON)]


def torch_home() -> Path:
    """The folder on the path that holds the running interpreter's torch, without importing it."""
    return Path(str(importlib.metadata.distribution("torch").locate_file("")))


def run(command: list[str], failure: str) -> None:
    if subprocess.call(command) != 0:
        sys.exit(failure)
