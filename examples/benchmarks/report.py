"""Output of the benchmark: the columns of its CSV, a row for each contestant, and a table on the screen."""

from __future__ import annotations

import argparse
import csv
import statistics
import subprocess
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from contestants import Case, Contestant, Run

PASSES = ("fwd", "bwd", "fwdbwd")
FLOPS = {"fwd": 1.0, "bwd": 2.5, "fwdbwd": 3.5}  # of the forward's
RESULTS = ("out", "dq", "dk", "dv")

COLUMNS = (
    *("date", "commit", "gpu", "world_size", "torch", "cuda", "cudnn", "nccl", "packages"),
    *("contestant", "kernel", "heads_q", "heads_kv", "head_dim", "dtype", "mask", "local_len", "seq_len"),
    *("mode", "repeats", "calls_per_time", "regions"),  # regions: "apart" or "one" for forward and backward
    *(f"{name}_ms{part}" for name in PASSES for part in ("", "_min", "_max")),
    *(f"tflops_{name}" for name in PASSES),  # per GPU
    *(f"ratio_floor_{name}" for name in PASSES),  # time of floor/best over this time
    *(f"ratio_own_floor_{name}" for name in PASSES),  # the same with the floor of this contestant's kernel
    "over_floor_ms",  # fwdbwd less that of its kernel's floor: no less than the communication that is not hidden
    *("extra_mem_gib", "symmetric_mem_gib"),  # peak beyond inputs, out, lse and gradients; the part in symmetric memory
    *("host_us_fwd", "host_us_bwd"),  # until the call returns
    *(f"err_{name}" for name in RESULTS),  # RMS error over RMS of the exact result, at --gate-len
    "status",
)


SHOWN = ("contestant", "heads_q", "heads_kv", "mask", "local_len", "mode", *(f"tflops_{name}" for name in PASSES))
SHOWN += ("ratio_own_floor_fwdbwd", "extra_mem_gib", "host_us_fwd", "host_us_bwd", "err_dq", "status")
"""Columns that are printed."""


@dataclass
class Entrant:
    """A contestant on a case: its errors in the gate, its run and graph while it has them, and what became of it."""

    contestant: Contestant
    errors: list[float]
    run: Run | None = None
    graph: Any = None
    status: str = "ok"
    extra_bytes: float = 0.0
    symmetric_bytes: float = 0.0


@dataclass
class Times:
    """Of one contestant: [repeats, 5] of fwd, bwd, fwdbwd in ms, and host time of fwd and bwd in us."""

    samples: list[list[float]] = field(default_factory=list)
    calls: int = 1
    apart: bool = True


class Report:
    """Rows of the CSV, and the table on the screen."""

    def __init__(self, path: Path | None, about: dict[str, Any]) -> None:
        """``path``: of the CSV; ``about``: what `machine` says, empty on ranks that do not report."""
        self._path, self._about = path, about

    def add(
        self, case: Case, mode: str, entrants: list[Entrant], all_times: dict[str, Times], problems: dict[str, str]
    ) -> None:
        """The rows of a case in one mode, with their ratios to the floors of the same mode."""
        medians = {
            name: [statistics.median(column) for column in zip(*times.samples, strict=True)]
            for name, times in all_times.items()
        }
        floors = {name.removeprefix("floor/"): ms[:3] for name, ms in medians.items() if name.startswith("floor/")}
        rows = []
        if floors:
            forward, backward = (min(ms[i] for ms in floors.values()) for i in (0, 1))
            floors["best"] = [forward, backward, forward + backward]
            names = {i: min(floors, key=lambda name: floors[name][i]) for i in (0, 1)}
            status = f"ok: forward {names[0]}, backward {names[1]}, their sum"
            row = {"contestant": "floor/best", "mode": mode, "status": status}
            rows.append(row | self._speeds(floors["best"], case.forward_flops))
        for entrant in entrants:
            name, contestant = entrant.contestant.name, entrant.contestant
            status = problems.get(name, entrant.status)
            if status == "ok" and contestant.notes:
                status = f"ok: {contestant.notes}"
            row = {"contestant": name, "kernel": contestant.kernel or "", "mode": mode, "status": status}
            row |= {f"err_{key}": f"{x:.3e}" for key, x in zip(RESULTS, entrant.errors, strict=False)}
            if name in all_times:
                row |= self._figures(case, entrant, all_times[name], medians[name], floors)
            rows.append(row)
        if self._about:
            self._write(case, rows)

    def _speeds(self, ms: list[float], flops: float) -> dict[str, str]:
        row = {f"{name}_ms": f"{x:.4f}" for name, x in zip(PASSES, ms, strict=False)}
        return row | {f"tflops_{p}": f"{FLOPS[p] * flops / x / 1e9:.5g}" for p, x in zip(PASSES, ms, strict=False)}

    def _figures(
        self, case: Case, entrant: Entrant, times: Times, ms: list[float], floors: dict[str, list[float]]
    ) -> dict[str, str]:
        contestant = entrant.contestant
        row = self._speeds(ms, contestant.flops(case))
        columns = list(zip(*times.samples, strict=True))
        row |= {f"{name}_ms_min": f"{min(column):.4f}" for name, column in zip(PASSES, columns, strict=False)}
        row |= {f"{name}_ms_max": f"{max(column):.4f}" for name, column in zip(PASSES, columns, strict=False)}
        row |= {"repeats": str(len(times.samples)), "calls_per_time": str(times.calls)}
        row |= {"regions": "apart" if times.apart else "one", "host_us_fwd": f"{ms[3]:.1f}"}
        row |= {"host_us_bwd": f"{ms[4]:.1f}"}
        if not contestant.distributed:
            return row
        if case.device.type == "cuda":
            row["extra_mem_gib"] = f"{entrant.extra_bytes / 2**30:.4f}"
            row["symmetric_mem_gib"] = f"{entrant.symmetric_bytes / 2**30:.4f}"
        own = floors.get(contestant.kernel or "")
        for column, floor in (("ratio_floor", floors.get("best")), ("ratio_own_floor", own)):
            if floor:
                row |= {f"{column}_{p}": f"{a / b:.4f}" for p, a, b in zip(PASSES, floor, ms, strict=False)}
        if floor := own or floors.get("best"):
            row["over_floor_ms"] = f"{ms[2] - floor[2]:.4f}"
        return row

    def _write(self, case: Case, rows: list[dict[str, str]]) -> None:
        about = self._about | {
            "date": datetime.now(UTC).isoformat(timespec="seconds"),
            "heads_q": case.heads,
            "heads_kv": case.kv_heads,
            "head_dim": case.head_dim,
            "dtype": str(case.dtype).removeprefix("torch."),
            "mask": case.mask_name,
            "local_len": case.local_len,
            "seq_len": case.seq_len,
        }
        for row in rows:
            shown = {name: (about | row).get(name) for name in SHOWN}
            print(", ".join(f"{name} {value}" for name, value in shown.items() if value), flush=True)
        if self._path is not None:
            append(self._path, COLUMNS, [about | row for row in rows])


def append(path: Path, columns: Sequence[str], rows: Iterable[Mapping[str, Any]]) -> None:
    """Rows at the end of a CSV, which is begun if it is not there."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", newline="") as file:
        writer = csv.DictWriter(file, columns)
        if file.tell() == 0:
            writer.writeheader()
        writer.writerows(rows)


def spread(name: str, ms: Sequence[float], digits: int = 4) -> dict[str, str]:
    """Median, minimum and maximum of times, as columns of a row."""
    figures = {f"{name}_ms": statistics.median(ms), f"{name}_ms_min": min(ms), f"{name}_ms_max": max(ms)}
    return {column: f"{x:.{digits}f}" for column, x in figures.items()}


def options(description: str, time_limit: bool = False) -> argparse.ArgumentParser:
    """A parser with the options that benchmarks share."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--device", choices=("cuda", "cpu"), default="cuda" if torch.cuda.is_available() else "cpu")
    if time_limit:
        add("--time-limit", type=float, default=float("inf"), help="start nothing more after this many seconds")
    add("--csv", type=Path, help="append the rows to this file")
    add("--commit", help="recorded in the rows (default: ask git)")
    return parser


def machine(device: torch.device, world_size: int, commit: str | None) -> dict[str, Any]:
    """What the figures were measured on and with."""
    cuda = device.type == "cuda"
    versions = {}
    attention = "flash-attn-4", "flash-attn-3", "flash-attn", "nvidia-cutlass-dsl", "ring-flash-attn"
    rivals = "axolotl-ringmaster", "deepspeed", "transformers"
    for package in ("triton", "fla-core", *attention, *rivals):
        with suppress(metadata.PackageNotFoundError):
            versions[package] = metadata.version(package)
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "commit": commit or git_commit(),
        "gpu": torch.cuda.get_device_name() if cuda else "CPU",
        "world_size": world_size,
        "torch": torch.__version__,
        "cuda": torch.version.cuda or "",
        "cudnn": torch.backends.cudnn.version() if cuda else "",
        "nccl": ".".join(map(str, torch.cuda.nccl.version())) if cuda else "",
        "packages": " ".join(f"{name}={version}" for name, version in versions.items()),
    }


def git_commit() -> str:
    def git(*words: str) -> str:
        return subprocess.run(
            ["git", "-C", str(Path(__file__).parent), *words], capture_output=True, text=True
        ).stdout.strip()

    with suppress(OSError):
        if commit := git("rev-parse", "--short", "HEAD"):
            return commit + ("+changes" if git("status", "--porcelain", "--untracked-files=no") else "")
    return "unknown"
