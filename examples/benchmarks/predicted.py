"""What `cp_mesh.costs` says beside what was measured: the passes of committed figures in which the host did not count.

These are replays of CUDA graphs, and calls in a row which took the host less than three quarters of the time.
"""

from __future__ import annotations

import csv
import sys
from collections import defaultdict
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import torch

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(Path(__file__).parent)]

from contestants import LAYOUTS, mask_of  # noqa: E402

from cp_mesh import Contiguous, ZigZag, balance, explain  # noqa: E402
from cp_mesh.costs import H200, PassCost, staged_costs, ulysses_costs  # noqa: E402
from cp_mesh.memory import Sizes  # noqa: E402
from cp_mesh.methods import METHODS  # noqa: E402
from cp_mesh.schedule import Schedule  # noqa: E402

COMMITS = {
    "attention_2xh200.csv": ("3225b69",),
    "attention_4xh200.csv": ("97e84d6", "a916445"),
    "masks_2xh200.csv": ("004bb00", "3225b69"),
    "masks_4xh200.csv": ("a916445",),
    "methods_2xh200.csv": ("048700a",),
    "ulysses_2xh200.csv": ("67202f3",),
}
FITTED = "97e84d6", "3225b69"  # commits of which rows with 32 query heads were fitted to
METHODS_AT = "048700a"  # all methods side by side
KEPT_AT = "67202f3"  # since when Ulysses keeps what it exchanged; in contiguous it is the code of today
HOST_COUNTS = 0.75
LONG = 65536  # rows of which there are no graphs
PASSES = "fwd", "bwd"
AIM = 0.15


class Pass(NamedTuple):
    """A pass that was measured; times in milliseconds, those of the slowest rank."""

    group: str
    row: dict[str, str]
    column: str
    measured: float
    predicted: PassCost

    @property
    def ratio(self) -> float:
        return 1e3 * self.predicted.device / self.measured

    @property
    def host_ratio(self) -> float:
        return 1e6 * self.predicted.host / float(self.row[f"host_us_{self.column}"])

    @property
    def device_counts(self) -> bool:
        host = float(self.row[f"host_us_{self.column}"]) / 1e3
        return self.row["mode"] == "graph" or host < HOST_COUNTS * self.measured


@cache
def schedules(layout: str, mask: str, seq_len: int, cp_size: int, method: str = "ring") -> list[Schedule]:
    seen = mask_of(mask, seq_len)
    made = LAYOUTS.get(layout) or balance(seen, seq_len, cp_size)
    return [METHODS[method].make_schedule(made, seen, seq_len, cp_size, rank, True) for rank in range(cp_size)]


def costs_of(row: dict[str, str]) -> tuple[PassCost, ...]:
    """Forward and backward of the slowest rank, in what a row of figures measured."""
    kind, *rest = row["contestant"].split("/")
    sizes = Sizes(1, int(row["heads_q"]), int(row["heads_kv"]), int(row["head_dim"]), int(row["head_dim"]), 2, 2)
    seq_len, cp_size = int(row["seq_len"]), int(row["world_size"])
    if kind == "ulysses" or rest[0] == "ulysses":
        (whole,) = schedules(Contiguous().spec(), row["mask"], seq_len, 1)
        theirs, pieces = kind == "ulysses", 1 + (rest[1:2] == ["zigzag"])
        kept = theirs or row["commit"] == KEPT_AT
        kernel = rest[0] if theirs else rest[2]
        return ulysses_costs(whole, cp_size, cp_size, sizes, H200, kernel, kept=kept, plain=theirs, pieces=pieces)
    ranks = schedules(rest[1], row["mask"], seq_len, cp_size, rest[0])
    costs = [staged_costs(schedule, sizes, H200, rest[2]) for schedule in ranks]
    return tuple(max(both, key=lambda cost: cost.device) for both in zip(*costs, strict=True))


@cache
def passes() -> tuple[Pass, ...]:
    """All passes of graphs, and of calls in a row."""
    return tuple(_passes())


def _passes() -> Iterator[Pass]:
    for name, commits in COMMITS.items():
        with (ROOT / "docs" / "results" / name).open(newline="") as file:
            rows = list(csv.DictReader(file))
        for row in rows:
            kind, *rest = row["contestant"].split("/")
            ours = kind == "cp_mesh" and rest[2] in H200.kernels and rest[3] == "symmetric_memory"
            if not (ours or kind == "ulysses") or row["mode"] == "eager" or row["commit"] not in commits:
                continue
            if row["status"] != "ok" or (row["commit"] == KEPT_AT and rest[:2] != ["ulysses", "contiguous"]):
                continue
            for column, cost in zip(PASSES, costs_of(row), strict=True):
                yield Pass(group_of(row), row, column, float(row[f"{column}_ms"]), cost)


def group_of(row: dict[str, str]) -> str:
    """The name in `GROUPS` that a row belongs to."""
    kind, *rest = row["contestant"].split("/")
    bands = row["mask"] not in ("causal", "full")
    if kind == "ulysses":
        return kind
    if row["commit"] == KEPT_AT:
        return "kept"
    if rest[0] == "ulysses":
        return "own_ulysses" if rest[1] == "zigzag" else "own_contiguous"
    if row["commit"] == METHODS_AT:
        return "short_bands" if bands else "stages"
    if bands or rest[2] != "fa4":
        return "bands" if bands else rest[2]
    fitted = row["commit"] in FITTED and row["heads_q"] == "32"
    return "queued" if row["mode"] == "queued" else "fitted" if fitted else "held"


GROUPS = {
    "fitted": "FlashAttention-4 in CUDA graphs, zigzag and striped, 32 heads",
    "held": "the same with 64 heads, and on another machine: nothing was fitted to these",
    "queued": "FlashAttention-4, calls in a row",
    "cudnn": "cuDNN, zigzag",
    "ulysses": "Ulysses of the benchmark, FlashAttention-4",
    "bands": "windows and packed documents, FlashAttention-4, calls in a row",
    "stages": "the ring and all-gather later, on another machine: nothing was fitted to these",
    "short_bands": "windows of 1K rows in CUDA graphs, the same: nothing was fitted to these",
    "kept": '`method="ulysses"`, contiguous, as today: nothing was fitted to these',
    "own_ulysses": '`method="ulysses"` before it kept what it exchanged, zigzag',
    "own_contiguous": "the same, contiguous",
}


def errors_table() -> tuple[Sequence[str], list[Sequence[str]]]:
    """By group: how many passes, and the least and most of predicted over measured."""
    ratios: dict[str, list[float]] = defaultdict(list)
    for entry in passes():
        if entry.device_counts:
            ratios[entry.group].append(entry.ratio)
    lines = []
    for group, words in GROUPS.items():
        own = ratios[group]
        far = sum(abs(ratio - 1) > AIM for ratio in own)
        lines.append([words, str(len(own)), f"{min(own):.2f} to {max(own):.2f}", str(far)])
    return ["", "passes", "predicted over measured", f"of them off by more than {100 * AIM:.0f} %"], lines


class Point(NamedTuple):
    """A point of the grid on which all methods were timed, in zigzag over symmetric memory.

    Attributes:
        method: that "auto" takes.
        times: ms of forward and backward, by method.
    """

    mask: str
    heads: str
    rows: int
    mode: str
    method: str
    times: dict[str, float]

    @property
    def over_best(self) -> float:
        return self.times[self.method] / min(self.times.values())


@cache
def points() -> tuple[Point, ...]:
    """What "auto" takes at every point, and what all methods took."""
    times: dict[tuple[str, str, str, int, str], dict[str, float]] = defaultdict(dict)
    for row in _rows_of_methods():
        key = row["mask"], row["heads_q"], row["heads_kv"], int(row["local_len"]), row["mode"]
        times[key][row["contestant"].split("/")[1]] = float(row["fwdbwd_ms"])
    found = []
    for (mask, heads, kv_heads, rows, mode), measured in times.items():
        sizes: dict[str, Any] = {"num_heads": int(heads), "num_kv_heads": int(kv_heads), "dtype": torch.bfloat16}
        choice = explain(2 * rows, 2, mask=mask_of(mask, 2 * rows), machine=H200, kernel="fa4", **sizes).choice
        assert choice is not None
        found.append(Point(mask, f"{heads}/{kv_heads}", rows, mode, choice.method, measured))
    return tuple(found)


@cache
def played_points() -> tuple[Point, ...]:
    """The same of eight ranks of which one was played; to times the predicted ones of links and barriers are added."""
    times: dict[tuple[str, str, str, int, str, str], dict[str, float]] = defaultdict(dict)
    with (ROOT / "docs" / "results" / "played_methods_h200.csv").open(newline="") as file:
        for row in csv.DictReader(file):
            _, method, layout, _ = row["contestant"].split("/")
            if row["status"] != "ok" or method == "auto":
                continue
            key = row["mask"], row["heads_q"], row["heads_kv"], int(row["local_len"]), row["mode"], layout
            times[key][method] = float(row["fwdbwd_ms"]) + float(row["wire_ms"])
    found = []
    for (mask, heads, kv_heads, rows, mode, layout), measured in times.items():
        whole, seen = 8 * rows, mask_of(mask, 8 * rows)
        laid = balance(seen, whole, 8) if layout == "balanced" else ZigZag()
        sizes: dict[str, Any] = {"num_heads": int(heads), "num_kv_heads": int(kv_heads), "dtype": torch.bfloat16}
        choice = explain(whole, 8, layout=laid, mask=seen, machine=H200, kernel="fa4", **sizes).choice
        assert choice is not None
        method = choice.method + (str(choice.degree) if choice.method == "hybrid" else "")
        found.append(Point(mask, f"{heads}/{kv_heads}", rows, mode, method, measured))
    return tuple(found)


def choices_table(of: Sequence[Point]) -> tuple[Sequence[str], list[Sequence[str]]]:
    """By mask and mode: at how many points "auto" is the fastest or within 5 %, and the farthest."""
    cells: dict[tuple[str, str], list[Point]] = defaultdict(list)
    for point in of:
        cells[point.mask, point.mode].append(point)
    lines = []
    for (mask, mode), own in cells.items():
        near, worst = sum(x.over_best <= 1.05 for x in own), max(own, key=lambda x: x.over_best)
        taken = ", ".join(sorted({x.method for x in own}))
        where = f"{worst.over_best:.2f}, heads {worst.heads}, {worst.rows // 1024}K rows"
        lines.append([mask, mode, taken, f"{near} of {len(own)}", where])
    return ["", "", "`auto` takes", "within 5 % of the fastest", "farthest"], lines


def bands_table() -> tuple[Sequence[str], list[Sequence[str]]]:
    """Windows and documents of 1K rows: measured / predicted ms of forward and backward, by method."""
    cells: dict[tuple[str, str, str], dict[str, str]] = defaultdict(dict)
    for row in _rows_of_methods():
        if row["mask"] == "causal" or row["mode"] == "eager":
            continue
        in_row = row["mode"] == "queued"
        predicted = sum(1e3 * (cost.queued if in_row else cost.device) for cost in costs_of(row))
        measured = sum(float(row[f"{column}_ms"]) for column in PASSES)
        key = row["mask"], f"{row['heads_q']}/{row['heads_kv']}", "in a row" if in_row else "graph"
        method = row["contestant"].split("/")[1]
        cells[key][method] = f"{measured:.3g} / {predicted:.3g} ({predicted / measured:.2f})"
    methods = ["ring", "all_gather", "ulysses"]
    return ["", "heads", "", *methods], [[*key, *(line.get(x, "") for x in methods)] for key, line in cells.items()]


def _rows_of_methods() -> Iterator[dict[str, str]]:
    """All methods side by side, in zigzag over symmetric memory."""
    with (ROOT / "docs" / "results" / "methods_2xh200.csv").open(newline="") as file:
        for row in csv.DictReader(file):
            kind, *rest = row["contestant"].split("/")
            if kind == "cp_mesh" and rest[1:] == ["zigzag", "fa4", "symmetric_memory"] and row["status"] == "ok":
                yield row


def times_table(contestant: str) -> tuple[Sequence[str], list[Sequence[str]]]:
    """Measured / predicted milliseconds of forward and backward, by GPUs, heads and rows; later commits count."""
    cells: dict[tuple[str, str], dict[int, list[Pass]]] = defaultdict(lambda: defaultdict(list))
    for entry in passes():
        row = entry.row
        key, length = (row["world_size"], f"{row['heads_q']}/{row['heads_kv']}"), int(row["local_len"])
        if row["contestant"] == contestant and row["mask"] == "causal" and (row["mode"] == "graph" or length == LONG):
            kept = [x for x in cells[key][length] if x.column != entry.column]
            cells[key][length] = [*kept, entry]
    lengths = sorted({length for line in cells.values() for length in line})
    lines = []
    for (gpus, heads), line in sorted(cells.items()):
        figures = []
        for length in lengths:
            found = line.get(length, [])
            sums = sum(x.measured for x in found), sum(1e3 * x.predicted.device for x in found)
            figures.append(" / ".join(f"{x:.3g}" for x in sums) if len(found) == len(PASSES) else "")
        lines.append([f"{gpus} H200s", heads, *figures])
    return ["", "heads", *(f"{length // 1024}K" for length in lengths)], lines
