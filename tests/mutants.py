"""Mutation score: random small changes of cp_mesh, and the share of them that tests find.

    python tests/mutants.py cp_mesh/call cp_mesh/geometry --tests tests/test_parity.py --number 20 --out /tmp/x.csv

A mutant is one change in a copy of the repository: another operator or number, a negated condition, or a statement
left out. The tests run in their order until the first that fails; a mutant that they do not end in time is found, too.
`--at` names another commit whose tests are judged on the mutants of this one, to compare a net before and after.
"""

from __future__ import annotations

import argparse
import ast
import csv
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SWAPS: dict[type, type] = {ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Add, ast.FloorDiv: ast.Mult}
SWAPS |= {ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq}
SWAPS |= {ast.And: ast.Or, ast.Or: ast.And, ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In}


def changes(node: ast.AST) -> Iterator[str]:
    """Source of what may take the place of a node."""
    if isinstance(node, ast.BinOp | ast.BoolOp) and type(node.op) in SWAPS:
        yield f"({ast.unparse(type(node)(**{**vars(node), 'op': SWAPS[type(node.op)]()}))})"
    elif isinstance(node, ast.Compare) and len(node.ops) == 1 and type(node.ops[0]) in SWAPS:
        yield f"({ast.unparse(ast.Compare(node.left, [SWAPS[type(node.ops[0])]()], node.comparators))})"
    elif isinstance(node, ast.Constant) and type(node.value) in (int, bool):
        yield repr(not node.value if isinstance(node.value, bool) else node.value + 1)
    elif isinstance(node, ast.IfExp):
        yield f"({ast.unparse(ast.IfExp(ast.UnaryOp(ast.Not(), node.test), node.body, node.orelse))})"
    elif isinstance(node, ast.AugAssign) or (isinstance(node, ast.Expr) and isinstance(node.value, ast.Call)):
        yield "pass"


def mutants(path: Path) -> Iterator[tuple[int, str, str]]:
    """Line, what is there, and the whole source with one change, for every place of a file."""
    source = path.read_text()
    starts = [0]
    for line in source.encode().splitlines(keepends=True):
        starts.append(starts[-1] + len(line))
    todo: list[ast.AST] = [ast.parse(source)]
    while todo:
        node = todo.pop()
        skipped = {"annotation", "returns", "decorator_list", "type_params", "msg"}  # nothing that a result shows
        for name, child in ast.iter_fields(node):
            if name not in skipped and not isinstance(node, ast.Raise | ast.JoinedStr):
                todo += [x for x in (child if isinstance(child, list) else [child]) if isinstance(x, ast.AST)]
        for change in changes(node):
            a, b = (
                starts[y - 1] + x for y, x in ((node.lineno, node.col_offset), (node.end_lineno, node.end_col_offset))
            )  # type: ignore[attr-defined]
            raw = source.encode()
            what = f"{' '.join(raw[a:b].decode().split())} -> {' '.join(change.split())}"
            yield node.lineno, what, (raw[:a] + change.encode() + raw[b:]).decode()  # type: ignore[attr-defined]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("paths", nargs="+", help="files and folders of cp_mesh")
    parser.add_argument("--tests", nargs="+", required=True, help="arguments of pytest, the likeliest to find first")
    parser.add_argument("--number", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--timeout", type=float, default=600, help="seconds of tests for a mutant")
    parser.add_argument("--at", default="HEAD", help="the commit whose tests run")
    parser.add_argument("--only", nargs="*", type=int, default=[], help="numbers of mutants to run")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    files = sorted(
        x for path in options.paths for x in ([ROOT / path] if path.endswith(".py") else (ROOT / path).rglob("*.py"))
    )
    every = [(path, *mutant) for path in files for mutant in mutants(path)]
    chosen = random.Random(options.seed).sample(every, min(options.number, len(every)))
    with tempfile.TemporaryDirectory() as folder, options.out.open("w", newline="") as out:
        copy = Path(folder) / "copy"
        subprocess.run(["git", "clone", "-q", "-s", str(ROOT), str(copy)], check=True)
        subprocess.run(["git", "-C", str(copy), "checkout", "-q", options.at], check=True)
        subprocess.run(
            ["git", "-C", str(copy), "checkout", "-q", git("rev-parse", "HEAD"), "--", "cp_mesh"], check=True
        )
        writer = csv.writer(out)
        writer.writerow(["number", "file", "line", "change", "found", "seconds", "by"])
        for number, (path, line, what, source) in enumerate(chosen):
            if options.only and number not in options.only:
                continue
            target, begin = copy / path.relative_to(ROOT), time.monotonic()
            before = target.read_text()
            target.write_text(source)
            found, by = outcome(copy, options.tests, options.timeout)
            target.write_text(before)
            row = [number, path.relative_to(ROOT), line, what[:120], found, round(time.monotonic() - begin), by]
            writer.writerow(row)
            print(*row, flush=True)
            out.flush()


def outcome(copy: Path, tests: list[str], timeout: float) -> tuple[str, str]:
    """Whether tests find a mutant, and the first that does."""
    words = [sys.executable, "-m", "pytest", "-x", "-q", "--no-header", "-p", "no:cacheprovider", *tests]
    environment = os.environ | {"PYTHONPATH": str(copy), "OMP_NUM_THREADS": "1"}
    try:
        done = subprocess.run(words, cwd=copy, env=environment, capture_output=True, text=True, timeout=timeout)
    except subprocess.TimeoutExpired:
        return "in time", ""
    last = [line for line in done.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))]
    return ("no" if done.returncode == 0 else "yes"), (last or [""])[0][:100]


def git(*words: str) -> str:
    return subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()


if __name__ == "__main__":
    main()
