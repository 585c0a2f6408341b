"""Run the tests: `python3 tests/run.py [--full] [pytest arguments]`; the first call sets up `.venv`.

Without `--full` it is the quick form: a few cases of most gates. Tests marked `full` are left out, and of those marked
`quick("a text")` all cases without this text in their names. `--full` runs both. What takes longer than the full form
may is marked `nightly("part")`, or `more("part")` where the other forms run some of its cases: `--nightly` runs all
parts one after the other, and `--nightly=PART` one; each adds a row to docs/results/nightly.csv.

Other arguments are pytest's: a file or -k runs what it names of the quick form, which may be nothing; a node id
(`file::test`) runs in any form. `pytest` without this script does the same, in an environment that has cp_mesh and its
tools.
`--integrations` runs tests/integrations in `.venv-integrations`, with other packages in pinned versions;
`--integrations-4` does with Transformers 4, `--integrations-titan-0.3` with torchtitan, `--integrations-axolotl` with
axolotl.
`--torch=2.14.1` runs any of these with that release of PyTorch, in an environment of its own.
"""

import os
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "examples"))

import environment  # noqa: E402


def nightly(asked: str, arguments: list[str]) -> int:
    """Each part in a process of its own, which goes on where one before it failed; rows are of whole parts."""
    from forms import PARTS, add_part, commit_of

    if asked and asked not in PARTS:
        sys.exit(f"--nightly: expected one of {', '.join(PARTS)}, got {asked}")
    failed, commit = False, commit_of(ROOT)
    for part in (asked,) if asked else PARTS:
        begin = time.monotonic()
        command = [sys.executable, "-m", "pytest", "-n", "2", "--dist", "worksteal", f"--nightly={part}", *arguments]
        code = subprocess.run(command, check=False).returncode
        if not arguments:
            add_part(commit, part, time.monotonic() - begin, "passed" if code == 0 else f"exit code {code}")
        failed |= code != 0
    return int(failed)


if __name__ == "__main__":
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)  # else each rank compiles what it imports
    integrations = [environment.INTEGRATIONS[name] for name in sys.argv if name in environment.INTEGRATIONS]
    chosen = (*integrations, environment.TOOLS)[0]
    releases = [argument.partition("=")[2] for argument in sys.argv if argument.startswith("--torch=")]
    environment.enter(chosen.with_torch(releases[0]) if releases else chosen)
    import pytest

    # Several ranks share the cores: more threads in each only get in one another's way.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.chdir(ROOT)
    arguments = sys.argv[1:]
    asked = [argument for argument in arguments if argument.partition("=")[0] == "--nightly"]
    if asked:
        rest = [argument for argument in arguments if argument not in asked]
        sys.exit(nightly(asked[0].partition("=")[2], rest))
    if integrations and not any(argument.startswith("tests") for argument in arguments):
        arguments.append("tests/integrations")
    if not any(Path(argument.partition("::")[0]).exists() for argument in arguments):
        # Two processes, as half of the tests leave a core idle; what is named runs in this one, which --pdb needs.
        arguments = ["-n", "2", "--dist", "worksteal", *arguments]
    sys.exit(pytest.main(arguments))
