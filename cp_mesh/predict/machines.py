"""Machines: whose numbers of `cp_mesh.predict.time` hold for the ranks of a group, and tables of numbers as files.

The numbers are those of ``CP_MESH_MACHINE``, a file that ``python -m cp_mesh calibrate`` wrote, or those that come with
cp_mesh for a GPU of this name. Ranks tell each other their GPU, their host and the content of the file, once a group.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from cp_mesh.comm.agreement import exchange_first
from cp_mesh.comm.group_state import state_of
from cp_mesh.comm.groups import known_parts, num_groups, parts_of
from cp_mesh.comm.symmetric_memory import host_name
from cp_mesh.errors import ArgumentError, RankMismatchError, UnsupportedError, refuse
from cp_mesh.predict.time import MACHINES, HostTime, KernelRate, Machine

VARIABLE = "CP_MESH_MACHINE"


@dataclass(frozen=True, eq=False)
class Known:
    """What the ranks of a group told each other; the same on every rank.

    Attributes:
        machine: theirs, with the ranks that share a host: neighbours, as many on each; None if it was not measured.
        inner_sizes: of the groups within this one that there were at the first question (`groups.parts_of`).
        divided: by inner size, whether `may_divide`.
    """

    machine: Machine | None
    inner_sizes: frozenset[int]
    divided: dict[int, bool] = field(default_factory=dict)


def machine_of(group: dist.ProcessGroup, device: torch.device) -> Known | None:
    """The machine of a group's ranks, the same on every rank; None on CPUs without a table.

    The first question about a group of CUDA ranks is a collective, and of CPU ranks if ``CP_MESH_MACHINE`` is set, on
    all of them or on none; the answer is kept.

    Raises:
        ArgumentError: if the file is not such a table, or not of these GPUs; on every rank.
        RankMismatchError: if the files of the ranks differ; on every rank.
        UnsupportedError: in a CUDA graph capture, if it is the first question.
    """
    path = os.environ.get(VARIABLE, "")
    if device.type != "cuda" and not path:
        return None
    answer = state_of(group, _Answer)
    if path not in answer:
        if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            raise UnsupportedError(
                "attention: the first call over a group chooses its method, which a CUDA graph capture cannot do; "
                "run one forward and backward with these shapes before the capture"
            )
        known = _agreed(group, device, path)
        answer.clear()
        answer[path] = known
        return known
    return answer[path]


def may_divide(group: dist.ProcessGroup, known: Known, inner_size: int) -> bool:
    """Whether there are groups within a group, of so many ranks, which are made now if they can be.

    The first question about a size is a collective; its answer is kept, for the backward of this call and for others.

    Raises:
        RankMismatchError: if not all ranks ask.
    """
    if inner_size not in known.divided:
        there = any(parts.inner.size() == inner_size for parts in known_parts(group))
        known.divided[inner_size] = there or _divide(group, inner_size)
    return known.divided[inner_size]


def _divide(group: dist.ProcessGroup, inner_size: int) -> bool:
    answers = exchange_first(group, {"groups": str(num_groups())})
    if any("groups" not in answer for answer in answers):
        raise RankMismatchError(
            "attention: expected method='auto' to take the same method on every rank, but not all chose one that needs "
            "groups within the cp group; give every rank of a cp group the same batch and options"
        )
    if len({answer["groups"] for answer in answers}) > 1:  # PyTorch would give new ones other names on some ranks
        return False
    parts_of(group, inner_size)
    return True


class _Answer(dict[str, Known]):
    """Of a group: the last one, by the file that it was asked for."""


def _agreed(group: dist.ProcessGroup, device: torch.device, path: str) -> Known:
    problem, table = "", ""
    try:
        table = to_text(read_machine(path, VARIABLE)) if path else ""
    except ArgumentError as error:
        problem = str(error)
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
    said = {"machine": table, "problem": problem, "device": name, "host": host_name()}
    answers = exchange_first(group, said)
    if any("machine" not in answer for answer in answers):  # in check mode another rank compares its arguments already
        raise RankMismatchError(
            f"attention: expected method='auto' on all ranks or on none, and {VARIABLE} set on all or on none"
        )
    for rank, answer in enumerate(answers):
        if answer["problem"]:
            raise ArgumentError(f"{answer['problem']} (cp rank {rank})")
    names, tables = [answer["device"] for answer in answers], {answer["machine"] for answer in answers}
    if len(tables) > 1:
        raise RankMismatchError(
            f"{VARIABLE}: expected the same table on every cp rank, got {len(tables)} that differ; copy one file to all"
        )
    machine = from_text(table) if table else next((x for x in MACHINES.values() if {x.name} == set(names)), None)
    inner_sizes = frozenset(parts.inner.size() for parts in known_parts(group))
    if machine is None:
        return Known(None, inner_sizes)
    if {machine.name} != set(names):
        hint = "python -m cp_mesh calibrate measures these"
        refuse(VARIABLE, f"numbers of {', '.join(sorted(set(names)))}", machine.name, hint)
    hosts = [answer["host"] for answer in answers]
    ends = [rank for rank in range(1, len(hosts)) if hosts[rank] != hosts[rank - 1]]
    return Known(replace(machine, gpus_per_host=math.gcd(len(hosts), *ends)), inner_sizes)


def find_machine(name: str) -> Machine:
    """The machine of a name of `MACHINES`, or of a file."""
    return MACHINES[name] if name in MACHINES else read_machine(name)


def read_machine(path: str | Path, what: str = "machine") -> Machine:
    """A table that `write_machine` wrote; ``what`` names its path: `VARIABLE`, or an argument that takes names too.

    Raises:
        ArgumentError: if it is not one.
    """
    try:
        return from_text(Path(path).read_text())
    except (OSError, ValueError, KeyError, TypeError) as error:
        names = "" if what == VARIABLE else f"one of {', '.join(MACHINES)}, or "
        refuse(what, f"{names}the file of a table", f"{path} ({error})", "python -m cp_mesh calibrate writes one")


def write_machine(machine: Machine, path: str | Path) -> None:
    """As JSON: seconds, bytes/s, FLOP/s."""
    Path(path).write_text(to_text(machine) + "\n")


def to_text(machine: Machine) -> str:
    return json.dumps(asdict(machine), indent=1, sort_keys=True)


def from_text(text: str) -> Machine:
    """The inverse of `to_text`; every number must be there, and none beside them."""
    given = dict(json.loads(text))
    if set(given) != {field.name for field in fields(Machine)}:
        raise ValueError(f"it has {', '.join(sorted(given))}")
    given["compute_capability"] = tuple(given["compute_capability"])
    given["kernels"] = {name: _pair(KernelRate, rates) for name, rates in given["kernels"].items()}
    given["host_forward"], given["host_backward"] = _pair(HostTime, (given["host_forward"], given["host_backward"]))
    machine = Machine(**given)
    numbers = [x for x in _numbers(asdict(machine)) if not (math.isfinite(x) and x >= 0)]
    if numbers:
        raise ValueError(f"{numbers[0]} is no time and no rate")
    return machine


def _pair(kind: Any, of_passes: Sequence[Mapping[str, float]]) -> Any:
    forward, backward = of_passes
    return kind(**forward), kind(**backward)


def _numbers(x: Any) -> list[float]:
    """All numbers of a tree, rates and times."""
    if isinstance(x, Mapping | list | tuple):
        return [number for part in (x.values() if isinstance(x, Mapping) else x) for number in _numbers(part)]
    return [] if isinstance(x, str) else [float(x)]
