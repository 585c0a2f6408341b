"""Run the tests: `python3 tests/run.py [pytest arguments]`; the first call sets up `.venv`."""

import os
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "examples"))

import environment  # noqa: E402

if __name__ == "__main__":
    environment.enter()
    import pytest

    # Several ranks share the cores: more threads in each only get in one another's way.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.chdir(ROOT)
    sys.exit(pytest.main(sys.argv[1:]))
