"""What the documents say is what the code does: their code runs, their commands exist, their figures are the files'."""

from __future__ import annotations

import ast
import contextlib
import inspect
import io
import os
import re
import shlex
import sys
import tomllib
from collections.abc import Callable
from fnmatch import fnmatch
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import pytest
import ranks
import torch.distributed as dist
from test_pins import PACKAGES
from test_structure import FLOORS

import cp_mesh
from cp_mesh import explain
from cp_mesh.geometry.layouts import LAYOUTS
from cp_mesh.tools import explain_step

ROOT = Path(__file__).resolve().parent.parent
sys.path += [str(ROOT / "examples"), str(ROOT / "examples" / "benchmarks"), str(ROOT / "docs")]

import draw  # noqa: E402
import pages  # noqa: E402
import plot  # noqa: E402
import tables  # noqa: E402

DOCUMENTS = (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")))
NAMES = {str(path.relative_to(ROOT)): path for path in DOCUMENTS}
NEEDS_A_GPU = "# needs a GPU"
HIDDEN = "hidden"


class Block(NamedTuple):
    """A fenced block of a document; ``line`` is that of its first line."""

    language: str
    line: int
    code: str


BLOCK = re.compile(r"^( *)```(\w*)\n(.*?)^\1```$|^<!-- run(?: on \d ranks)?\n(.*?)^-->$", re.MULTILINE | re.DOTALL)


def blocks(path: Path, *languages: str) -> list[Block]:
    """All fenced blocks of these languages; `HIDDEN` are comments that begin with `<!-- run`."""
    found, text = [], path.read_text()
    for match in BLOCK.finditer(text):
        indent, language, code, hidden = match.groups()
        line = text.count("\n", 0, match.start()) + 2
        code = re.sub(f"^{indent}", "", code, flags=re.MULTILINE) if hidden is None else hidden
        found.append(Block(HIDDEN if hidden is not None else language, line, code))
    assert text.count("```") == 2 * sum(x.language != HIDDEN for x in found), f"{path.name}: a block has no end"
    return [block for block in found if block.language in languages]


def visible(path: Path) -> str:
    """A page without its comments."""
    return re.sub(r"<!--.*?-->", "", path.read_text(), flags=re.DOTALL)


def test_links_and_names_in_the_documents_exist() -> None:
    for document in DOCUMENTS:
        text = visible(document)
        for target in re.findall(r"\]\(([^)#:]+)\)", text):
            assert (document.parent / target).exists(), f"{document.name} links to {target}"
        for name in re.findall(r"`(?:cp_mesh|tests|examples|docs)/[\w./]+\.(?:py|md|csv)", text):
            assert (ROOT / name.strip("`")).exists(), f"{document.name} names {name}"
        for name in re.findall(r"`cp_mesh\.(\w+)", text):
            assert hasattr(cp_mesh, name), f"{document.name} names cp_mesh.{name}"


def test_every_public_name_is_in_the_api() -> None:
    listed = re.findall(r"^::: cp_mesh\.([\w.]+)\.(\w+)$", (ROOT / "docs" / "api.md").read_text(), re.MULTILINE)
    public = {(getattr(package, name).__module__, name) for package in PACKAGES.values() for name in package.__all__}
    assert sorted((f"cp_mesh.{module}", name) for module, name in listed) == sorted(public)


def navigation() -> list[str]:
    """Names of the site's pages."""
    nav = (ROOT / "mkdocs.yml").read_text().partition("\nnav:\n")[2].partition("theme:")[0]
    return [f"docs/{name}" for name in re.findall(r"[\w/]+\.md", nav)]


def test_every_page_is_in_the_site() -> None:
    """In the navigation, or outside of it and linked by another page."""
    (patterns,) = re.findall(r"^not_in_nav: \|\n((?:  .+\n)+)", (ROOT / "mkdocs.yml").read_text(), re.MULTILINE)
    pages = {name for name in NAMES if name.startswith("docs/")}
    outside = {name for name in pages if any(fnmatch(name, f"docs/{pattern}") for pattern in patterns.split())}
    assert set(navigation()) == pages - outside
    linked = {
        (document.parent / target).resolve()
        for document in DOCUMENTS
        for target in re.findall(r"\]\(([^)#:]+\.md)[)#]", document.read_text())
        if (document.parent / target).resolve() != document
    }
    assert not {name for name in outside if NAMES[name] not in linked}


def test_every_file_of_figures_is_explained() -> None:
    made = (tables.RESULTS / "README.md").read_text()
    assert not {path.name for path in tables.RESULTS.glob("*.csv") if f"[`{path.name}`]({path.name})" not in made}


def test_every_module_is_in_its_place() -> None:
    """On its floor."""
    design = NAMES["docs/design.md"].read_text()
    for name, floor in FLOORS.items():
        file = f"{name}/" if (ROOT / "cp_mesh" / name).is_dir() else f"{name}.py"
        row = re.search(rf"^\| L{floor} \|.*$", design, re.MULTILINE)
        assert row and f"`{file.removesuffix('.py')}`" in row[0], f"docs/design.md lacks {name} on floor {floor}"


# ---- pictures and tables


def test_pictures_are_those_of_the_library() -> None:
    drawn = draw.pictures()
    assert {path.name for path in draw.FOLDER.iterdir()} == set(drawn)
    for name, text in drawn.items():
        assert (draw.FOLDER / name).read_text() == text, f"{name}: run python docs/draw.py"


@pytest.mark.full
def test_tables_are_those_of_the_files() -> None:
    shown = []
    for name in tables.DOCUMENTS:
        text = (ROOT / name).read_text()
        assert tables.with_tables(text) == text, f"{name}: run python examples/benchmarks/tables.py"
        shown += re.findall(r"<!-- table: (.+?) -->", text)
    assert set(shown) == {*tables.REGIONS, *tables.ASKED}


def test_pictures_of_speed_are_of_the_files() -> None:
    for name in ("speed", "against", "memory"):
        text = (tables.RESULTS / f"{name}.svg").read_text()
        assert plot.figures_drawn() in text, f"{name}.svg: run python examples/benchmarks/plot.py"


@pytest.mark.full
def test_pictures_of_speed_are_drawn(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    written = plot.main(["--out", str(tmp_path)])
    assert [path.name for path in written] == ["speed.svg", "against.svg", "memory.svg"]
    assert all("</svg>" in path.read_text() for path in written)


# ---- commands


READERS_OWN = {"train.py", "FILE.csv"}  # what a reader writes


def commands(path: Path) -> list[list[str]]:
    """Commands of the shell blocks, and inline code that begins like one; the page's own variables are filled in."""
    variables: dict[str, str] = {}
    found = []
    texts = re.findall(r"`((?:python3?|torchrun|pip) [^`]+)`", path.read_text())
    inline = [Block("", 0, " ".join(text.split()) + "\n") for text in texts]
    for block in blocks(path, "sh") + inline:
        for line in re.sub(r"\\?\n +", " ", block.code.replace("\\\n", " ")).splitlines():
            line = re.sub(r"^(?:[A-Z_]+=\w+ )+", "", line.strip())  # of the environment
            for name, value in variables.items():
                line = line.replace(f"${name}", value)
            if setting := re.match(r'^(\w+)="(.*)"$', line.strip()):
                variables[setting[1]] = setting[2]
            elif words := shlex.split(line, comments=True):
                found.append(words)
    return found


def options_of(script: Path) -> str:
    """Where a script's options are defined."""
    if script.name == "run.py":  # of pytest
        return (ROOT / "tests" / "conftest.py").read_text()
    functions = (explain, explain_step) if script.name == "__main__.py" else ()
    given = (
        f'"--{name.replace("_", "-")}"' for function in functions for name in inspect.signature(function).parameters
    )
    text = script.read_text()
    shared = (script.parent / "report.py").read_text() if "options(__doc__" in text else ""
    return " ".join([text, shared, *given])


@pytest.mark.parametrize("name", NAMES)
def test_commands_exist(name: str) -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    for words in commands(NAMES[name]):
        program, script, rest = words[0], None, words[1:]
        if program == "pip":
            assert rest[0] == "install", words
            for extra in re.findall(r"^(?:\.|cp_mesh)\[(\w+)\]$", rest[1]):
                assert extra in extras, words
            continue
        if program == ".ci/run":
            assert (ROOT / program).exists()
            continue
        assert program in ("python", "python3", "torchrun", "accelerate"), words
        for i, word in enumerate(rest):
            if word == "-m":
                assert rest[i + 1] == "cp_mesh", words
                script = ROOT / "cp_mesh" / "__main__.py"
            elif word.endswith(".py") and script is None and word not in READERS_OWN:
                script = ROOT / word
                assert script.exists(), words
            elif word.startswith("--"):
                option = word.split("=")[0]
                if program == "torchrun" and script is None:
                    assert option in ("--nproc-per-node", "--standalone"), words
                elif script is not None:
                    of_script = options_of(script)
                    if "BooleanOptionalAction" in of_script:
                        option = option.replace("--no-", "--")
                    assert f'"{option}"' in of_script, f"{option} of {script.name}: {words}"
            elif re.match(r"^(tests|docs|examples)/", word):
                assert (ROOT / word.partition(":")[0]).exists(), words


# ---- code

ONE_RANK = {f"docs/{name}.md" for name in ("concepts", "kernels", "performance", "api")}
"""Pages whose code needs nothing: no hidden block."""
ELSEWHERE = {"docs/transformers.md", "docs/trainer.md", "docs/diffusers.md", "docs/torchtitan.md"}
"""Pages of other packages, whose code runs in tests/integrations."""
NOT_RUN = [("docs/kernels.md", "warm_up"), ("docs/performance.md", "CUDAGraph")]
"""Blocks that need a GPU: page and a word of each. `test_warming.py` and `test_symmetric_memory.py` do the same."""
PAGES = {name for name, path in NAMES.items() if blocks(path, "python")} - ELSEWHERE


def ranks_of(name: str) -> int:
    """On how many ranks a page runs: its first hidden block says it."""
    found = re.search(r"^<!-- run on (\d) ranks$", NAMES[name].read_text(), re.MULTILINE)
    return int(found[1]) if found else 1


def run_page(rank: int, name: str) -> None:
    """Run the blocks of a page in order, in one namespace; what they print is what the page shows.

    Hidden blocks run in a namespace of their own, which has the names of the page and of `pages`. What they assign or
    define becomes the page's, what they import does not: a page states its own imports.
    """
    path, known, printed = NAMES[name], dict(LAYOUTS), ""
    names: dict[str, Any] = {"__name__": "__main__"}
    hidden = dict(vars(pages))
    environment = mock.patch.dict(os.environ, {"WORLD_SIZE": str(ranks_of(name))})  # as torchrun sets it
    # The processes live on: a script that ends its group, as scripts do, must not end that of the tests.
    with environment, mock.patch.object(dist, "destroy_process_group"):
        try:
            for block in blocks(path, "python", "text", HIDDEN):
                lined = "\n" * (block.line - 1) + block.code  # lines as in the document, for tracebacks
                if block.language == "text":
                    if printed:
                        assert block.code == printed, f"{name}:{block.line} shows something else than is printed"
                    printed = ""
                elif block.language == HIDDEN:
                    hidden |= names
                    exec(compile(lined, str(path), "exec"), hidden)
                    names |= {key: hidden[key] for key in given_by(block.code)}
                elif not block.code.startswith(NEEDS_A_GPU):
                    with contextlib.redirect_stdout(io.StringIO()) as out:
                        exec(compile(lined, str(path), "exec"), names)
                    printed = out.getvalue()
        finally:
            LAYOUTS.clear()
            LAYOUTS.update(known)


def given_by(code: str) -> set[str]:
    """The names that a block assigns or defines at its top."""
    compiled = compile(code, "", "exec")
    made = {x.id for x in ast.walk(ast.parse(code)) if isinstance(x, ast.Name) and isinstance(x.ctx, ast.Store)}
    made |= {x.name for x in ast.parse(code).body if isinstance(x, ast.ClassDef | ast.FunctionDef)}
    return made & {*compiled.co_names}


def test_every_page_with_code_is_run() -> None:
    hidden = {name for name in PAGES if blocks(NAMES[name], HIDDEN)}
    assert hidden == PAGES - ONE_RANK
    assert not {name for name in NAMES if blocks(NAMES[name], HIDDEN)} - PAGES
    left_out = [
        (name, x.code) for name in sorted(PAGES) for x in blocks(NAMES[name], "python") if NEEDS_A_GPU in x.code
    ]
    assert len(left_out) == len(NOT_RUN)
    for (name, code), (page, word) in zip(left_out, NOT_RUN, strict=True):
        assert name == page and word in code
        compile(code, name, "exec")


@pytest.mark.parametrize("name", sorted(PAGES))
@pytest.mark.quick(
    "docs/index.md", "docs/masks.md", "README.md", "docs/decoding.md", "docs/linears.md", "docs/kernels.md"
)
def test_code_of_the_documents_runs(name: str, pool: Callable[..., ranks.Pool]) -> None:
    pool(ranks_of(name)).run(run_page, name, timeout=120)


def test_symbols_are_names_of_the_code() -> None:
    """Of the table of docs/mathematics.md; an empty cell is that of the line before."""
    rows = re.findall(
        r"^\| .*? \| (`.*?) \| .*? \| `(cp_mesh/.*?)` \|$", NAMES["docs/mathematics.md"].read_text(), re.M
    )
    assert len(rows) > 8
    for names, file in rows:
        text = (ROOT / file).read_text()
        for name in re.findall(r"`(\w+)`", names):
            assert re.search(rf"\b{name}\b", text), f"docs/mathematics.md: {file} has no {name}"


def test_pages_are_short() -> None:
    """In words, as ``wc -w`` counts them, without hidden blocks."""
    words = {name: len(visible(ROOT / name).split()) for name in ("README.md", *navigation())}
    assert words.pop("README.md") <= 500
    assert sum(words.values()) <= 17_000, words


@pytest.mark.parametrize("name", ["README.md", *navigation()])
def test_code_lines_fit(name: str) -> None:
    """In the site's column, which 88 characters fill."""
    inside, wide = False, []
    for number, line in enumerate((ROOT / name).read_text().splitlines(), 1):
        if line.lstrip().startswith("```"):
            inside = not inside
        elif inside and len(line) > 88:
            wide.append(f"{name}:{number}: {len(line)} columns")
    assert not wide


def test_example_of_readme_is_a_file() -> None:
    example = (ROOT / "examples" / "minimal.py").read_text()
    assert [block.code for block in blocks(ROOT / "README.md", "python")] == [example]
    assert sum(bool(line) for line in example.splitlines()) <= 30
