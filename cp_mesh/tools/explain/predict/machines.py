"""Read and write `Machine` tables as JSON files; examples/benchmarks/calibrate.py measures them."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

from cp_mesh._torch import tree_leaves
from cp_mesh.errors import refuse
from cp_mesh.tools.explain.predict.time import MACHINES, HostTime, KernelRate, Machine


def find_machine(name: str) -> Machine:
    """Return the machine with this name in `MACHINES`, or read it from the file with this name."""
    return MACHINES[name] if name in MACHINES else read_machine(name)


def read_machine(path: str | Path) -> Machine:
    """Read a table that `write_machine` wrote; it must have exactly the fields of `Machine`.

    Raises:
        ArgumentError: if the file is missing or is not such a table.
    """
    try:
        given = dict(json.loads(Path(path).read_text()))
        if set(given) != {field.name for field in fields(Machine)}:
            raise ValueError(f"its fields are {', '.join(sorted(given))}")
        given["compute_capability"] = tuple(given["compute_capability"])
        given["kernels"] = {name: _pair(KernelRate, rates) for name, rates in given["kernels"].items()}
        given["host_forward"], given["host_backward"] = _pair(HostTime, (given["host_forward"], given["host_backward"]))
        machine = Machine(**given)
        numbers = [x for x in tree_leaves(asdict(machine)) if not isinstance(x, str)]
        if wrong := [x for x in numbers if not (math.isfinite(x) and x >= 0)]:
            raise ValueError(f"{float(wrong[0])} is neither a time nor a rate")
        return machine
    except (OSError, ValueError, KeyError, TypeError) as error:
        expected = f"one of {', '.join(MACHINES)}, or the file of a machine table"
        refuse("machine", expected, f"{path} ({error})", "examples/benchmarks/calibrate.py writes one")


def write_machine(machine: Machine, path: str | Path) -> None:
    """Write the table as JSON, in seconds, bytes/s and FLOP/s."""
    Path(path).write_text(json.dumps(asdict(machine), indent=1, sort_keys=True) + "\n")


def _pair(kind: Any, of_passes: Sequence[Mapping[str, float]]) -> Any:
    forward, backward = of_passes
    return kind(**forward), kind(**backward)
