"""Measure what ``import cp_mesh`` loads, and how long it takes, in fresh processes.

Seconds are the minimum over ``--repeats`` processes, after one that writes bytecode: of ``import torch``; of the other
packages that cp_mesh imports, with the slowest of them; and of cp_mesh itself. Loaded files of cp_mesh are counted,
with their lines and the longest chain of imports between them.

    python examples/benchmarks/importing.py --csv docs/results/importing.csv
"""

from __future__ import annotations

import argparse
import ast
import csv
import json
import os
import platform
import subprocess
import sys
from functools import cache
from pathlib import Path

from report import git_commit

ROOT = Path(__file__).resolve().parents[2]
TIMED = """
import json, sys, time
begin = time.perf_counter()
import torch
seconds, before = {"torch": time.perf_counter() - begin}, set(sys.modules)
for name in [*sys.argv[1:], "cp_mesh"]:
    begin = time.perf_counter()
    __import__(name)
    seconds[name] = time.perf_counter() - begin
print(json.dumps([seconds, [name for name in sys.modules if name not in before]]))
"""


def run(names: list[str]) -> tuple[dict[str, float], list[str]]:
    """Seconds of each import, of these modules and then cp_mesh, and what was loaded, in a fresh process."""
    done = subprocess.run([sys.executable, "-c", TIMED, *names], cwd=ROOT, check=True, capture_output=True, text=True)
    seconds, loaded = json.loads(done.stdout.splitlines()[-1])
    return seconds, loaded


def source(name: str) -> Path:
    path = ROOT.joinpath(*name.split("."))
    return path / "__init__.py" if path.is_dir() else path.with_suffix(".py")


@cache
def imports(name: str) -> frozenset[str]:
    """What a file of cp_mesh imports at its top."""
    found = set()
    for node in ast.parse(source(name).read_text()).body:
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found |= {str(node.module), *(f"{node.module}.{alias.name}" for alias in node.names)}
    return frozenset(found)


@cache
def chain(name: str, own: frozenset[str]) -> tuple[str, ...]:
    """The longest chain of imports that begins with a file."""
    below = [chain(other, own) for other in imports(name) & own - {name}]
    return name, *max(below, key=len, default=())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--csv", type=Path, help="also write the printed figures to this file")
    args = parser.parse_args()
    _, loaded = run([])
    own = frozenset(name for name in loaded if name.partition(".")[0] == "cp_mesh")
    asked = frozenset[str]().union(*map(imports, own))
    others = [name for name in loaded if name in asked - own]  # in the order in which they were loaded
    runs = [run(others)[0] for _ in range(args.repeats)]
    least = {name: min(seconds[name] for seconds in runs) for name in runs[0]}
    torch_itself, cp_mesh_itself = least.pop("torch"), least.pop("cp_mesh")
    print(f"import torch          {torch_itself:.3f} s")
    print(f"cp_mesh itself        {cp_mesh_itself:.3f} s")
    print(f"other packages beyond {sum(least.values()):.3f} s")
    for name in sorted(least, key=least.__getitem__, reverse=True)[:5]:
        print(f"    {name:50s} {least[name]:.3f} s")
    lines = sum(len(source(name).read_text().splitlines()) for name in own)
    longest = max((chain(name, own - {"cp_mesh"}) for name in own), key=len)
    print(f"files of cp_mesh      {len(own)}, of {lines} lines")
    print(f"longest chain         {len(longest)}: {' '.join(longest)}")
    if args.csv:
        seconds = (f"{x:.3f}" for x in (torch_itself, cp_mesh_itself, sum(least.values())))
        with args.csv.open("w", newline="") as out:
            writer = csv.writer(out, lineterminator="\n")
            writer.writerow(("commit", "machine", "cores", "torch", "cp_mesh", "others", "files", "lines", "chain"))
            machine = (git_commit(), platform.machine(), os.cpu_count())
            writer.writerow((*machine, *seconds, len(own), lines, len(longest)))


if __name__ == "__main__":
    main()
