"""Time the library's kernels on single tiles, forward and backward separately, in one run on one device.

    python examples/benchmarks/tiles.py --csv tiles.csv

Tiles of ``--local-len`` rows: "full" and "causal"; "strict", all pairs below the diagonal, as between two ranks of
striped; "half", a zigzag rank's rows against half a shard of keys; "documents", packed and causal. And "window", of
``--window-len`` rows that see 1024 keys each, or a quarter of the rows if that is less.

Kernels are called as the ring calls them. A backward includes delta if the kernel reads it (``delta_ms`` is that part)
and the copy to dq, but not the sums of dk and dv over tiles. If a tile leaves rows out, as strict does, the merge into
all rows is timed too. Work that a plan does once per batch is not timed. Kernels that fail the gate, which compares
with the reference kernel in float64, are not timed. In each repeat every kernel runs several calls in sequence, queued
while the device is kept busy. A time is that of one call, the median over repeats.
"""

from __future__ import annotations

import argparse
import csv
import math
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor

sys.path[:0] = [str(Path(__file__).resolve().parents[2]), str(Path(__file__).parent)]  # a checkout not installed

from attention import RIVALS_ERROR, describe, random_inputs  # noqa: E402
from contestants import Case, Inputs, document_lengths  # noqa: E402
from planning import OneOf, document_ids, milliseconds  # noqa: E402
from raw_kernels import present_kernels, swap  # noqa: E402
from report import FLOPS, RESULTS, machine  # noqa: E402

from cp_mesh.call.plan import make_plan  # noqa: E402
from cp_mesh.call.spec import AttentionSpec, Tensors  # noqa: E402
from cp_mesh.geometry.layouts import Contiguous  # noqa: E402
from cp_mesh.geometry.mask import CAUSAL, FULL, Band, Mask  # noqa: E402
from cp_mesh.kernels.combine import make_delta  # noqa: E402
from cp_mesh.kernels.contract import KernelTile  # noqa: E402
from cp_mesh.kernels.merge import KeyGradients  # noqa: E402
from cp_mesh.kernels.table import KERNELS  # noqa: E402

TILES = ("full", "causal", "strict", "half", "documents", "window")  # full first: others are compared with it
GATE_LEN, FILL_MS, MAX_CALLS = 512, 10.0, 20
BUSY_CYCLES = 3_000_000  # some 1.5 ms: longer than the host takes for a call
COLUMNS = (
    *("date", "commit", "gpu", "torch", "cuda", "cudnn", "packages"),
    *("tile", "rows", "keys", "heads_q", "heads_kv", "head_dim", "dtype", "kernel", "deterministic", "repeats"),
    *(f"{name}_ms{part}" for name in ("fwd", "bwd") for part in ("", "_min", "_max")),
    *("delta_ms", "pairs", "tflops_fwd", "tflops_bwd"),  # 4·H·D for each allowed pair; backward 2.5 times that
    # time of the fastest other kernel, neither triton nor deterministic, over this time; and its name
    *("ratio_best_fwd", "best_fwd", "ratio_best_bwd", "best_bwd"),
    *("ratio_area_fwd", "ratio_area_bwd"),  # tflops over those of the same kernel's full tile of the nearest length
    *("ratio_default_bwd", "status"),  # of deterministic rows: time of the same kernel's default over this time
)


@dataclass(frozen=True, eq=False)
class Tile:
    """Queries against keys, and how many pairs count; ``given`` where the mask over the rows alone does not say it."""

    name: str
    rows: int
    keys: int
    num_pairs: int
    mask: Mask
    given: KernelTile | None = None


def make_tile(name: str, rows: int) -> Tile:
    if name == "documents":
        lens = document_lengths(rows)
        return Tile(name, rows, rows, sum(CAUSAL.count(n, n) for n in lens), Mask(documents=document_ids(lens)))
    full, causal, half, left = Mask(causal=False), Mask(), rows // 2, min(1023, rows // 4 - 1)
    below = KernelTile((1, rows), (0, rows - 1), CAUSAL)  # trimmed, as a schedule's tiles are
    return {
        "full": Tile(name, rows, rows, rows * rows, full),
        "causal": Tile(name, rows, rows, CAUSAL.count(rows, rows), causal),
        "strict": Tile(name, rows, rows, Band(None, -1).count(rows, rows), causal, below),
        "half": Tile(name, rows, half, rows * half, full, KernelTile((0, rows), (0, half), FULL)),
        "window": Tile(name, rows, rows, Band(left, 0).count(rows, rows), Mask(window=(left, 0))),
    }[name]


class Passes:
    """A kernel on a tile; raises if it cannot serve it."""

    def __init__(self, kernel: str, deterministic: bool, tile: Tile, scale: float, x: Inputs) -> None:
        self._dout, self._q, k, v = (swap(y) for y in (x.dout, x.q, x.k, x.v))
        options = AttentionSpec(
            Contiguous().spec(), tile.mask.spec(), scale, kernel=kernel, deterministic=deterministic
        )
        plan = make_plan(self._q, k, v, Tensors(tile.mask.documents), tile.rows, OneOf(1), options)
        self._kernel, self._scores = plan.kernel, plan.scores
        self._tiles = plan.tiles(None) if tile.given is None else [tile.given]
        self._k, self._v = k[:, :, : tile.keys], v[:, :, : tile.keys]
        self._out, self._lse = self.forward()
        self.calls: dict[str, Callable[[], object]] = {"fwd": self.forward, "bwd": self.backward}
        if self._kernel.uses_delta:
            self.calls["delta"] = self.delta

    def forward(self) -> tuple[Tensor, Tensor]:
        running = self._kernel.begin_forward(self._q, self._v.shape[3], self._scores)
        running.step(self._k, self._v, self._tiles)
        return running.finish()

    def delta(self) -> Tensor:
        return make_delta(self._dout, self._out)

    def backward(self) -> tuple[Tensor, list[KeyGradients]]:
        out, delta = (None, self.delta()) if self._kernel.uses_delta else (self._out, None)
        running = self._kernel.begin_backward(self._dout, self._q, out, self._lse, delta, self._scores)
        pieces = running.step(self._k, self._v, self._tiles)
        return running.finish(torch.empty_like(self._q)), pieces

    def results(self) -> tuple[Tensor, ...]:
        """out, dq, dk, dv as [1, heads, S, D]."""
        dq, pieces = self.backward()
        dk, dv = (torch.zeros_like(x, dtype=torch.float64) for x in (self._k, self._v))
        for piece in pieces:
            rows = slice(piece.begin, piece.begin + piece.dk.shape[2])
            dk[:, :, rows] += piece.dk
            dv[:, :, rows] += piece.dv
        return self._out, dq, dk, dv


@dataclass(eq=False)
class Entry:
    """A kernel on a tile: its times [repeats] by pass, and what became of it."""

    kernel: str
    deterministic: bool
    status: str = "ok"
    ms: dict[str, list[float]] = field(default_factory=dict)


def run_gate(case: Case, name: str, entries: Sequence[Entry]) -> None:
    """Correctness before speed, on few rows: the status of those that may not be timed tells why."""
    tile, x = make_tile(name, GATE_LEN), random_inputs(case, GATE_LEN, seed=0)
    exactly = Inputs(*(y.double() for y in (x.q, x.k, x.v, x.dout)))
    exact = Passes("reference", False, tile, case.scale, exactly).results()
    for entry in entries:
        if entry.kernel == "reference":
            entry.status = "not run: the gate compares with it"
            continue
        try:
            results = Passes(entry.kernel, entry.deterministic, tile, case.scale, x).results()
            errors = [float((a.double() - b).norm() / b.norm()) for a, b in zip(results, exact, strict=True)]
        except Exception as error:
            entry.status = describe(error)
            continue
        named = zip(RESULTS, errors, strict=True)
        if wrong := [f"{result} {error:.1e}" for result, error in named if not error <= RIVALS_ERROR]:
            entry.status = f"failed the gate: {', '.join(wrong)} > {RIVALS_ERROR:.1e}"


def measure(call: Callable[[], object], num_calls: int, device: torch.device) -> float:
    """ms of each of some calls that follow one another."""

    def batch() -> None:
        for _ in range(num_calls):
            call()

    if device.type == "cpu":
        return milliseconds(batch) / num_calls
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    torch.cuda._sleep(BUSY_CYCLES * num_calls)  # else the device would wait for the host to launch short calls
    begin.record()
    batch()
    end.record()
    torch.cuda.synchronize()
    return begin.elapsed_time(end) / num_calls


def race(case: Case, tile: Tile, entries: Sequence[Entry], repeats: int) -> None:
    """Time those whose status is ok, everyone in turn in each repeat."""
    x = random_inputs(case, tile.rows, seed=1)
    running: list[tuple[list[float], Callable[[], object], int]] = []
    for entry in (entry for entry in entries if entry.status == "ok"):
        try:
            calls = Passes(entry.kernel, entry.deterministic, tile, case.scale, x).calls
            for call in calls.values():  # compiles
                measure(call, 1, case.device)
            fill = [math.ceil(FILL_MS / measure(call, 1, case.device)) for call in calls.values()]
        except Exception as error:
            entry.status = describe(error)
            continue
        entry.ms = {name: [] for name in calls}
        running += zip(entry.ms.values(), calls.values(), (min(n, MAX_CALLS) for n in fill), strict=True)
    for _ in range(repeats):
        for samples, call, num_calls in running:
            samples.append(measure(call, num_calls, case.device))


def make_rows(
    case: Case, tile: Tile, entries: Sequence[Entry], fulls: dict[tuple[str, bool], dict[int, dict[str, float]]]
) -> list[dict[str, Any]]:
    """Rows of the CSV; ``fulls``, tflops of full tiles by kernel, rows and pass, is given those of a full ``tile``."""
    ms = {(e.kernel, e.deterministic): {name: median(x) for name, x in e.ms.items()} for e in entries if e.ms}
    rows: list[dict[str, Any]] = []
    for entry in entries:
        key = entry.kernel, entry.deterministic
        row = {"kernel": entry.kernel, "deterministic": int(entry.deterministic), "status": entry.status}
        rows.append(row)
        if key not in ms:
            continue
        row |= {"repeats": len(entry.ms["fwd"])} | {f"{name}_ms": f"{x:.5g}" for name, x in ms[key].items()}
        tflops = {
            p: FLOPS[p] * 4 * case.heads * case.head_dim * tile.num_pairs / ms[key][p] / 1e9 for p in ("fwd", "bwd")
        }
        if tile.name == "full":
            fulls.setdefault(key, {})[tile.rows] = tflops
        for name, speed in tflops.items():
            mine, samples = ms[key][name], entry.ms[name]
            row |= {f"{name}_ms_min": f"{min(samples):.5g}", f"{name}_ms_max": f"{max(samples):.5g}"}
            row[f"tflops_{name}"] = f"{speed:.5g}"
            others = {k: x[name] for (k, fixed), x in ms.items() if not fixed and k not in ("triton", entry.kernel)}
            if others:
                best = min(others, key=others.__getitem__)
                row |= {f"ratio_best_{name}": f"{others[best] / mine:.4f}", f"best_{name}": best}
            if tile.name != "full" and key in fulls:
                near = min(fulls[key], key=lambda length: abs(length - tile.rows))
                row[f"ratio_area_{name}"] = f"{speed / fulls[key][near][name]:.4f}"
        if entry.deterministic and (default := ms.get((entry.kernel, False))):
            row["ratio_default_bwd"] = f"{default['bwd'] / ms[key]['bwd']:.4f}"
    return rows


def write(path: Path | None, about: dict[str, Any], rows: Sequence[dict[str, Any]]) -> None:
    """Print the rows of a tile and append them to the CSV."""
    shown = [name for name in COLUMNS if name.startswith(("tflops", "ratio")) or name.endswith("_ms")]
    print("\n{tile} {rows} x {keys}, heads {heads_q}/{heads_kv}".format(**about))
    print(f"{'kernel':14}" + "".join(f"{name.removeprefix('ratio_'):>12}" for name in shown))
    for row in rows:
        figures = "".join(f"{row.get(name, ''):>12}" for name in shown) if "fwd_ms" in row else ""
        print(f"{row['kernel'] + ' det' * row['deterministic']:14}{figures} {row['status'][:200]}", flush=True)
    if path is None:
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS, extrasaction="ignore")  # ranks and NCCL are no matter here
        if file.tell() == 0:
            writer.writeheader()
        writer.writerows(about | row for row in rows)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--local-len", type=int, nargs="+", default=[8192, 16384])
    parser.add_argument("--window-len", type=int, default=65536, help="rows of the window tile")
    parser.add_argument("--heads", nargs="+", default=["32/8"], help="query heads/kv heads")
    parser.add_argument("--head-dim", type=int, default=128)
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float16"))
    parser.add_argument("--kernels", nargs="+", choices=tuple(KERNELS), help="default: every fast one that is present")
    parser.add_argument("--tiles", nargs="+", choices=TILES, default=TILES)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--time-limit", type=float, default=math.inf, help="start no tile after this many seconds")
    parser.add_argument("--csv", type=Path, help="append rows to this file")
    parser.add_argument("--commit", help="recorded in the rows (default: ask git)")
    args = parser.parse_args(argv)
    began, device = time.perf_counter(), torch.device(args.device)
    kernels = args.kernels or [*present_kernels(device), *(["triton"] if args.device == "cuda" else [])]
    about = machine(device, 1, args.commit)
    order = [(name, rows) for rows in sorted(args.local_len) for name in TILES if name != "window"]
    order = [(name, rows) for name, rows in [*order, ("window", args.window_len)] if name in args.tiles]
    for heads in args.heads:
        num_heads, num_kv_heads = (int(x) for x in heads.split("/"))
        fulls: dict[tuple[str, bool], dict[int, dict[str, float]]] = {}
        for name, rows in order:
            if time.perf_counter() - began > args.time_limit:
                print(f"time limit: {name} {rows} {heads} and what follows is left out")
                return
            tile, dtype = make_tile(name, rows), getattr(torch, args.dtype)
            case = Case(num_heads, num_kv_heads, args.head_dim, dtype, name != "full", rows, 1, 0, device)
            entries = [Entry(kernel, deterministic) for kernel in kernels for deterministic in (False, True)]
            run_gate(case, name, entries)
            race(case, tile, entries, args.repeats)
            heading = {
                "date": datetime.now(UTC).isoformat(timespec="seconds"),
                "tile": name, "rows": rows, "keys": tile.keys, "pairs": tile.num_pairs,
                "heads_q": num_heads, "heads_kv": num_kv_heads, "head_dim": args.head_dim, "dtype": args.dtype,
            }  # fmt: skip
            write(args.csv, about | heading, make_rows(case, tile, entries, fulls))
            if args.device == "cuda":
                torch.cuda.empty_cache()
    print(f"{time.perf_counter() - began:.0f} s")


if __name__ == "__main__":
    main()
