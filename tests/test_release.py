"""The release: source and wheel install in a clean environment, and all files name one version."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Sequence
from pathlib import Path

import pytest

import cp_mesh

ROOT = Path(__file__).resolve().parent.parent
sys.path.append(str(ROOT / "examples"))
import environment  # noqa: E402

USE = """
import importlib.metadata
import cp_mesh
print(cp_mesh.__file__)
for name in cp_mesh.__all__:
    getattr(cp_mesh, name)
assert importlib.metadata.version("cp_mesh") == cp_mesh.__version__
"""


def test_files_name_this_version() -> None:
    """And the changelog has releases below it, or this one."""
    citation, changes = ((ROOT / name).read_text() for name in ("CITATION.cff", "CHANGELOG.md"))
    (version,) = re.findall(r"^version: (.*)$", citation, re.MULTILINE)
    released = re.findall(r"^## \[?([\d.]+)\]? - [\d-]{10}$", changes, re.MULTILINE)[0]
    numbers = [[int(x) for x in text.split(".")] for text in (released, version)]
    assert version == cp_mesh.__version__ and numbers == sorted(numbers)
    assert released == version or "\n## [Unreleased]\n" in changes


def run(command: Sequence[object], folder: Path) -> str:
    """What a command prints, where no variable points to this tree."""
    words = [str(word) for word in command]
    clean = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    done = subprocess.run(words, cwd=folder, env=clean, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{words}: {done.stdout}{done.stderr}"
    return done.stdout


@pytest.mark.full
def test_sdist_and_its_wheel_install(tmp_path: Path) -> None:
    """No index is asked: setuptools and PyTorch are those of this environment."""
    tree, built, clean = (tmp_path / name for name in ("tree", "built", "clean"))
    shutil.copytree(ROOT / "cp_mesh", tree / "cp_mesh", ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, tree)
    name = f"cp_mesh-{cp_mesh.__version__}"
    build(built, "sdist", tree)
    shutil.unpack_archive(built / f"{name}.tar.gz", tmp_path)
    build(built, "wheel", tmp_path / name)

    pip = environment.create(environment.Environment(clean, ""))
    python = environment.Environment(clean, "").python
    run([*pip, "install", "--no-deps", built / f"{name}-py3-none-any.whl"], tmp_path)
    purelib = Path(sysconfig.get_path("purelib", vars={"base": str(clean), "platbase": str(clean)}))
    sites = [path for path in sys.path if path.endswith(("site-packages", "dist-packages"))]
    (purelib / "host_packages.pth").write_text("\n".join(sites) + "\n")  # PyTorch, after what was installed
    assert files_of(purelib) == files_of(ROOT)
    assert Path(run([python, "-c", USE], tmp_path).strip()) == purelib / "cp_mesh" / "__init__.py"
    assert run([python, "-m", "cp_mesh", "--version"], tmp_path) == f"cp_mesh {cp_mesh.__version__}\n"


def build(folder: Path, kind: str, tree: Path) -> None:
    folder.mkdir(exist_ok=True)
    run([sys.executable, "-c", f"from setuptools import build_meta as b; b.build_{kind}({str(folder)!r})"], tree)


def files_of(folder: Path) -> list[Path]:
    files = (folder / "cp_mesh").rglob("*")
    return sorted(path.relative_to(folder) for path in files if path.suffix in (".py", ".pyi", ".typed"))
