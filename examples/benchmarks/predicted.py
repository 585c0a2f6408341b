"""Compare predictions of `predict.time` with committed measurements in which host time did not matter.

    python examples/benchmarks/predicted.py --gpus 8                           # what runs on 8 H200s should show
    python examples/benchmarks/predicted.py --gpus 8 --measured attention.csv  # beside measurements of `attention.py`

These are replays of CUDA graphs, and calls in a row whose host time was under three quarters of the time.

With --gpus, predictions come from the formulas alone, with two exceptions. "played" is the measured time of one rank of
8 that one GPU played (docs/results/played_methods_h200.csv) plus the predicted time of links. A training step is the
measured step with the same rows per GPU on 2 GPUs, with attention's predicted time on 2 GPUs replaced by that on more.
"""

from __future__ import annotations

import argparse
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

from contestants import LAYOUTS, document_lengths, mask_of  # noqa: E402

from cp_mesh import Contiguous, Mask, ZigZag, balance, explain  # noqa: E402
from cp_mesh.call.methods import METHODS  # noqa: E402
from cp_mesh.geometry.schedule import Schedule  # noqa: E402
from cp_mesh.tools.explain.predict.memory import Sizes  # noqa: E402
from cp_mesh.tools.explain.predict.time import H200, PassCost, staged_costs, ulysses_costs  # noqa: E402

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


PLAYED = ROOT / "docs" / "results" / "played_methods_h200.csv"


@cache
def played_points(path: Path = PLAYED) -> tuple[Point, ...]:
    """The same of eight ranks of which one was played; to times the predicted ones of links and barriers are added."""
    times: dict[tuple[str, str, str, int, str, str], dict[str, float]] = defaultdict(dict)
    with path.open(newline="") as file:
        for row in csv.DictReader(file):
            kind, method, *rest = row["contestant"].split("/")
            if kind != "played" or row["status"] != "ok" or method == "auto":
                continue
            layout = rest[0]
            key = row["mask"], row["heads_q"], row["heads_kv"], int(row["local_len"]), row["mode"], layout
            times[key][method] = float(row["fwdbwd_ms"]) + float(row["wire_ms"])
    found = []
    for (mask, heads, kv_heads, rows, mode, layout), measured in times.items():
        whole, seen = 8 * rows, mask_of(mask, 8 * rows)
        laid = balance(seen, whole, 8) if layout == "balanced" else ZigZag()
        sizes: dict[str, Any] = {"num_heads": int(heads), "num_kv_heads": int(kv_heads), "dtype": torch.bfloat16}
        choice = explain(whole, 8, layout=laid, mask=seen, machine=H200, kernel="fa4", **sizes).choice
        assert choice is not None
        found.append(Point(mask, f"{heads}/{kv_heads}", rows, mode, choice.method, measured))
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


Table = tuple[Sequence[str], list[Sequence[str]]]
GRID = [(heads, rows) for heads in ("32/8", "64/8", "32/32") for rows in (1024, 4096, 16384, 65536)]
MODES = "graph", "queued"
AIMS = {1024: ("graph", 0.80), 4096: ("graph", 0.95), 16384: ("queued", 0.98), 65536: ("queued", 0.99)}
"""Of the ring, by rows a GPU: the mode, and the share of its floor that is aimed at."""


def floor_ms(heads: int, rows: int, cp_size: int) -> float:
    """Both passes of the tiles of the last zigzag rank, called one by one, as `contestants.Floor` has them."""
    total = 0.0
    for rate, forwards in zip(H200.kernels["fa4"], (1.0, 2.5), strict=True):
        total += cp_size * (rows**2 / 2 * 4 * heads * 128 * forwards / rate.rate + rate.per_call)
        total += heads * rows * (cp_size * rate.per_row + rate.per_cut_row)
    return 1e3 * total


def both_ms(method: str, heads: str, rows: int, cp_size: int, mode: str) -> float:
    """Both passes of the slowest rank, causal, zigzag; of "ulysses/fa4" that of the benchmark."""
    query_heads, kv_heads = heads.split("/")
    of = {"heads_q": query_heads, "heads_kv": kv_heads, "head_dim": "128", "mask": "causal", "commit": KEPT_AT}
    of |= {"seq_len": str(cp_size * rows), "world_size": str(cp_size)}
    of["contestant"] = method if method == "ulysses/fa4" else f"cp_mesh/{method}/zigzag/fa4/symmetric_memory"
    return 1e3 * sum(cost.device if mode == "graph" else cost.queued for cost in costs_of(of))


def taken(heads: str, rows: int, cp_size: int) -> tuple[str, float]:
    """What "auto" takes, and milliseconds of calls in a row."""
    query_heads, kv_heads = map(int, heads.split("/"))
    sizes: dict[str, Any] = {"num_heads": query_heads, "num_kv_heads": kv_heads, "dtype": torch.bfloat16}
    found = explain(cp_size * rows, cp_size, machine=H200, kernel="fa4", **sizes).found
    assert found.seconds is not None
    return found.method, 1e3 * found.seconds


def shares_table(cp_size: int) -> Table:
    """The ring beside its floor, and what "auto" takes beside the benchmark's Ulysses: milliseconds of both passes."""
    played, lines = played_times(cp_size), []
    for heads, rows in GRID:
        mode, aim = AIMS[rows]
        floor, ring = floor_ms(int(heads.split("/")[0]), rows, cp_size), both_ms("ring", heads, rows, cp_size, mode)
        ulysses = [shown(both_ms("ulysses/fa4", heads, rows, cp_size, each)) for each in MODES]
        own = played.get((heads, rows, mode), {}).get("ring")
        shares = [f"{floor / ms:.2f}" if ms else "" for ms in (ring, own)]
        method, queued = taken(heads, rows, cp_size)
        figures = [shown(floor), shown(ring), shown(own), *shares, f"{method}, {shown(queued)}", *ulysses]
        lines.append([heads, f"{rows // 1024}K", f"{mode}, {aim:.2f}", *figures])
    head = ["heads", "rows a GPU", "aim, of the floor", "floor", "ring", "played", "ring of floor", "played of floor"]
    return [*head, "`auto` in a row", "Ulysses, graph", "Ulysses, in a row"], lines


def shown(ms: float | None) -> str:
    return "" if ms is None else f"{ms:.0f}" if ms >= 100 else f"{ms:.3g}"


def memory_table(cp_size: int) -> Table:
    """Extra memory of the ring, causal, heads 32/32, 16K rows a GPU: 128K tokens on 8."""
    sizes: dict[str, Any] = {"num_heads": 32, "num_kv_heads": 32, "dtype": torch.bfloat16, "method": "ring"}
    lines = []
    for chunks in (None, 8):
        found = explain(cp_size * 16384, cp_size, machine=H200, kernel="fa4", head_chunks=chunks, **sizes).found
        assert found.memory is not None
        lines.append([str(found.chunks), f"{found.memory / 2**30:.2f}"])
    return ["head chunks", "GiB"], lines


def steps_table(cp_size: int) -> Table:
    """Steps of `training.py`, eager, of cp_mesh and Ulysses; the last has twice the rows of any measured on 2 GPUs."""
    with (ROOT / "docs" / "results" / "training_2xh200.csv").open(newline="") as file:
        rows = [row for row in csv.DictReader(file) if row["blocks"] == "eager"]
    rows = [row for row in rows if row["commit"] == rows[-1]["commit"] and row["variant"] != "torch_allgather"]
    wanted = [(row, int(row["seq_len"]) // 2, int(row["layers"])) for row in rows]
    last, local, _ = next(each for each in wanted[::-1] if each[0]["variant"] == "cp_mesh")
    lines = []
    for row, rows_a_gpu, layers in [*wanted, (last, 2 * local, 2)]:
        method = "ring" if row["variant"] == "cp_mesh" else "ulysses/fa4"
        measured, before = float(row["step_ms_median"]), int(row["seq_len"]) // 2
        rest = measured - int(row["layers"]) * both_ms(method, "32/8", before, 2, "graph")
        rest *= rows_a_gpu / before * matrices(layers) / matrices(int(row["layers"]))
        ms = rest + layers * both_ms(method, "32/8", rows_a_gpu, cp_size, "graph")
        same = row["step_ms_median"] if rows_a_gpu == before else ""
        lines.append([row["variant"], str(layers), f"{rows_a_gpu * cp_size:,}", same, f"{ms:.0f}"])
    return ["", "layers", "tokens", "ms with as many rows on 2", f"ms on {cp_size}"], lines


def matrices(layers: int) -> int:
    """Parameters that are multiplied with, in `training.py`: of layers, and 32,768 of the vocabulary's."""
    return layers * (2 * 4096 * (4096 + 1024) + 3 * 4096 * 14336) + 32768 * 4096


def documents_table(cp_size: int, seeds: Sequence[int] = range(40, 48)) -> Table:
    """Batches of `batches.py`, 64K tokens, heads 64/8: TFLOP/s a GPU of calls in a row, attention alone."""
    sizes: dict[str, Any] = {"num_heads": 64, "num_kv_heads": 8, "dtype": torch.bfloat16, "method": "ring"}
    found: dict[str, list[tuple[float, float, float]]] = defaultdict(list)
    for seed in seeds:
        lengths = document_lengths(65536, seed, longest=65536)
        mask = Mask.from_cu_seqlens(torch.tensor((0, *lengths)).cumsum(0))
        flops = 3.5 * 4 * 64 * 128 * sum(n * (n + 1) // 2 for n in lengths) / cp_size
        for name, layout in (("balanced", balance(mask, 65536, cp_size)), ("zigzag", ZigZag())):
            of = explain(65536, cp_size, layout=layout, mask=mask, machine=H200, kernel="fa4", **sizes).found
            assert of.costs is not None
            found[name].append((flops, *(sum(getattr(cost, kind) for cost in of.costs) for kind in ("device", "host"))))
    lines = []
    for name, each in found.items():
        work, device, host = (sum(column) for column in zip(*each, strict=True))
        means = (f"{1e3 * seconds / len(each):.2f}" for seconds in (device, host))
        lines.append([name, f"{work / device / 1e12:.0f}", *means])
    return ["layout", "TFLOP/s where the device decides", "ms of the device", "ms of the host"], lines


def played_times(cp_size: int, path: Path = PLAYED) -> dict[tuple[str, int, str], dict[str, float]]:
    """Of causal calls, by heads, rows and mode; none of other numbers of ranks than 8."""
    points = played_points(path) if cp_size == 8 else ()
    return {(x.heads, x.rows, x.mode): x.times for x in points if x.mask == "causal"}


def beside_table(cp_size: int, rows: Sequence[dict[str, str]], path: Path = PLAYED) -> Table:
    """Causal rows of `attention.py`, cp_mesh in zigzag: measured, predicted, and played with the predicted wires."""
    played, lines = played_times(cp_size, path), []
    for row in rows:
        kind, method, *rest = row["contestant"].split("/")
        if kind != "cp_mesh" or rest != ["zigzag", "fa4", "symmetric_memory"] or row["mask"] != "causal":
            continue
        heads, length, mode = f"{row['heads_q']}/{row['heads_kv']}", int(row["local_len"]), row["mode"]
        if mode not in MODES or not row["fwdbwd_ms"]:
            continue
        ms, own = float(row["fwdbwd_ms"]), played.get((heads, length, mode), {}).get(method)
        model = both_ms(method, heads, length, cp_size, mode) if method in ("ring", "all_gather", "ulysses") else None
        told = [f"{shown(x)} ({x / ms:.2f})" if x else "" for x in (model, own)]
        aimed, aim = AIMS.get(length, ("", 0.0))
        share = row["ratio_own_floor_fwdbwd"] and f"{float(row['ratio_own_floor_fwdbwd']):.2f}"
        share += f", aim {aim:.2f}" if (method, mode) == ("ring", aimed) else ""
        lines.append([heads, f"{length // 1024}K", mode, method, shown(ms), share, *told])
    head = ["heads", "rows a GPU", "", "method", "measured, ms", "of its floor", "predicted (over measured)"]
    return [*head, "played (over measured)"], lines


def rivals_table(rows: Sequence[dict[str, str]]) -> Table:
    """What "auto" takes beside the fastest rival, in each case and mode of `attention.py`."""
    cells: dict[tuple[str, ...], dict[str, float]] = defaultdict(dict)
    for row in rows:
        auto = row["contestant"].startswith("cp_mesh/auto/")
        if row["fwdbwd_ms"] and (auto or not row["contestant"].startswith(("cp_mesh/", "floor/", "single_gpu/"))):
            key = row["mask"], f"{row['heads_q']}/{row['heads_kv']}", row["local_len"], row["mode"]
            name = row["status"].removeprefix("ok: ") if auto else row["contestant"]
            cells[key]["auto " + name if auto else name] = float(row["fwdbwd_ms"])
    lines = []
    for key, times in cells.items():
        own, rivals = ([name for name in times if name.startswith("auto ") == ours] for ours in (True, False))
        if own and rivals:
            best = min(rivals, key=lambda name: times[name])
            ratio = times[best] / times[own[0]]
            told = f"{own[0]}, {shown(times[own[0]])}", f"{best}, {shown(times[best])}", f"{ratio:.2f}"
            lines.append([*key, *told, "ahead" if ratio > 1 else "BEHIND"])
    return ["mask", "heads", "rows a GPU", "", "`auto`, ms", "fastest rival, ms", "over `auto`", ""], lines


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gpus", type=int, choices=(4, 8), default=8, help="number of GPUs, on one host")
    parser.add_argument("--measured", type=Path, help="CSV of attention.py on as many GPUs")
    parser.add_argument("--played", type=Path, default=PLAYED, help="CSV of played.py for one rank of 8")
    args = parser.parse_args(argv)
    from tables import markdown  # which imports this module

    if args.measured is not None:
        with args.measured.open(newline="") as file:
            rows = [row for row in csv.DictReader(file) if row["world_size"] == str(args.gpus)]
        for table in (beside_table(args.gpus, rows, args.played), rivals_table(rows)):
            print(markdown(*table))
        return
    for make in (shares_table, memory_table, steps_table, documents_table):
        print(f"{' '.join((make.__doc__ or '').split())}\n\n{markdown(*make(args.gpus))}", flush=True)


if __name__ == "__main__":
    main()
