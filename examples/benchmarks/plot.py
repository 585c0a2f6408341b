"""Draw the results of `attention.py`: python examples/benchmarks/plot.py FILE.csv ... --out DIR

There is a picture for each machine, number of GPUs, mask and mode, with a row of axes for each pair of head counts:
speed on the left, the share of the floor on the right. If a point was measured more than once, the last one counts.
`python examples/benchmarks/plot.py --page` draws the pictures of docs/performance.md from the committed files.
"""

from __future__ import annotations

import argparse
import csv
import hashlib
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import tables

Row = dict[str, str]


def read(paths: Sequence[Path]) -> list[Row]:
    """Rows with a time."""
    rows = []
    for path in paths:
        with path.open(newline="") as file:
            rows += [row for row in csv.DictReader(file) if row["fwdbwd_ms"]]
    return sorted(rows, key=lambda row: row["date"])


def series(rows: list[Row], column: str) -> dict[str, list[tuple[int, float]]]:
    """Of each contestant, by name: (sequence length, value), by length."""
    points: dict[str, dict[int, float]] = defaultdict(dict)
    for row in rows:
        if row[column]:
            points[row["contestant"]][int(row["seq_len"])] = float(row[column])
    return {name: sorted(values.items()) for name, values in sorted(points.items())}


def short(length: int) -> str:
    return f"{length // 1024}K" if length >= 1024 and length % 1024 == 0 else str(length)


def draw(rows: list[Row], names: list[str], title: str, path: Path, pass_name: str) -> None:
    """``names``: of all pictures, so that a contestant has one color in all."""
    from matplotlib import colormaps
    from matplotlib.figure import Figure

    heads = sorted({(int(row["heads_q"]), int(row["heads_kv"])) for row in rows})
    colors = {name: colormaps["tab20"](i % 20) for i, name in enumerate(names)}
    figure = Figure(figsize=(12, 1 + 3.6 * len(heads)), layout="constrained")
    grid = figure.subplots(len(heads), 2, squeeze=False)
    for (num_heads, num_kv_heads), (speed, share) in zip(heads, grid, strict=True):
        own = [row for row in rows if (int(row["heads_q"]), int(row["heads_kv"])) == (num_heads, num_kv_heads)]
        lengths = sorted({int(row["seq_len"]) for row in own})
        for axes, column in ((speed, f"tflops_{pass_name}"), (share, f"ratio_floor_{pass_name}")):
            for name, points in series(own, column).items():
                ours, yardstick = name.startswith("cp_mesh/"), name.startswith(("floor/", "single_gpu/"))
                style = {"color": colors[name], "linewidth": 2.4 if ours else 1.2, "marker": "o", "markersize": 3}
                axes.plot(*zip(*points, strict=True), "--" if yardstick else "-", label=name, **style)
            axes.set_xscale("log", base=2)
            axes.set_xticks(lengths, [short(length) for length in lengths])
            axes.minorticks_off()
            axes.set_ylim(bottom=0)
            axes.grid(alpha=0.3)
            axes.set_xlabel("tokens in the whole sequence")
        speed.set_ylabel(f"heads {num_heads}/{num_kv_heads}\nTFLOP/s per GPU")
        share.set_ylabel("share of the floor's speed")
        share.axhline(1, color="black", linewidth=0.8)
    lines = {label: line for axes in grid.flat for line, label in zip(*axes.get_legend_handles_labels(), strict=True)}
    figure.legend(lines.values(), lines.keys(), loc="outside lower center", ncols=3, fontsize=8)
    figure.suptitle(title)
    _save(figure, path)


PAGE = {  # what the pictures of docs/performance.md compare: contestants, colour and form of the line
    "the same tiles on one GPU": (("floor/fa4",), "#222222", ":"),
    "cp_mesh": ((tables.OURS,), "#0072B2", "-"),
    "Ulysses": (("ulysses/fa4",), "#D55E00", "-"),
    "ring-flash-attention": (tables.RING_FLASH, "#009E73", "-"),
    "PyTorch context_parallel": (tables.TORCH, "#CC79A7", "-"),
}
MACHINES = (("attention_2xh200.csv", "5f7ddfa", ("queued",)), ("attention_4xh200.csv", "a916445", ("queued", "eager")))
ALL_HEADS = "attention_2xh200.csv", "3225b69", ("queued",)
"""File, commit and modes: where calls in a row were not measured, single ones."""


def best_of(rows: list[Row], heads: tuple[str, str], modes: Sequence[str]) -> dict[str, dict[int, float]]:
    """By name of `PAGE` and rows a GPU: TFLOP/s of the best of its contestants."""
    found: dict[str, dict[int, float]] = {name: {} for name in PAGE}
    own = [row for row in rows if (row["heads_q"], row["heads_kv"]) == heads]
    for mode in reversed(modes):
        for name, (contestants, _, _) in PAGE.items():
            speeds: dict[int, float] = {}
            for row in own:
                if row["mode"] == mode and row["contestant"] in contestants:
                    length = int(row["local_len"])
                    speeds[length] = max(float(row["tflops_fwdbwd"]), speeds.get(length, 0.0))
            found[name] |= speeds
    return {name: dict(sorted(speeds.items())) for name, speeds in found.items()}


def page_rows(name: str, commit: str) -> list[Row]:
    return [row for row in read([tables.RESULTS / name]) if (row["commit"], row["mask"]) == (commit, "causal")]


def draw_page(out: Path) -> list[Path]:
    """The pictures of docs/performance.md: speed, speed relative to the others, memory."""
    from matplotlib.figure import Figure

    speed = Figure(figsize=(10, 4), layout="constrained")
    for axes, (name, commit, modes) in zip(speed.subplots(1, 2, sharey=True), MACHINES, strict=True):
        rows = page_rows(name, commit)
        for words, points in best_of(rows, ("32", "8"), modes).items():
            _, color, line = PAGE[words]
            axes.plot(list(points), list(points.values()), line, color=color, marker="o", markersize=4, label=words)
        graph = best_of(rows, ("32", "8"), ("graph",))["cp_mesh"]
        axes.plot(list(graph), list(graph.values()), "--", color="#0072B2", label="cp_mesh in a CUDA graph")
        axes.set_title(f"{rows[0]['world_size']}x {rows[0]['gpu']}, commit {commit}", fontsize=10)
        _lengths_below(axes, rows)
    speed.axes[0].set_ylabel("TFLOP/s per GPU")
    speed.legend(*speed.axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=3, fontsize=9)
    speed.suptitle("causal attention, heads 32/8, bf16, forward and backward, calls in a row")

    against = Figure(figsize=(12, 3.6), layout="constrained")
    panels = [(ALL_HEADS, heads) for heads in (("32", "8"), ("32", "32"), ("64", "8"))] + [(MACHINES[1], ("32", "8"))]
    for axes, ((name, commit, modes), heads) in zip(against.subplots(1, 4, sharey=True), panels, strict=True):
        rows = page_rows(name, commit)
        found = best_of(rows, heads, modes)
        for words in ("Ulysses", "ring-flash-attention", "PyTorch context_parallel"):
            ratios = {length: found["cp_mesh"][length] / x for length, x in found[words].items()}
            axes.plot(list(ratios), list(ratios.values()), color=PAGE[words][1], marker="o", label=f"over {words}")
        axes.axhline(1, color="black", linewidth=0.8)
        axes.set_title(f"{rows[0]['world_size']} GPUs, heads {'/'.join(heads)}, {commit}", fontsize=10)
        _lengths_below(axes, rows)
    against.axes[0].set_ylabel("speed of cp_mesh / of the other")
    against.legend(*against.axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=3, fontsize=9)
    against.suptitle(f"below 1 cp_mesh loses: {rows[0]['gpu']}, causal, forward and backward, calls in a row")

    memory = Figure(figsize=(6, 3.6), layout="constrained")
    axes, commit = memory.subplots(), tables.MEMORY_OF[0]
    rows = page_rows("attention_4xh200.csv", commit)
    for words, (contestants, color, line) in PAGE.items():
        own = [row for row in rows if row["contestant"] in contestants[:1] and row["extra_mem_gib"]]
        own = [row for row in own if (row["commit"], row["mode"], row["heads_q"], row["heads_kv"]) == tables.MEMORY_OF]
        points = {int(row["local_len"]): float(row["extra_mem_gib"]) for row in own}
        if points:
            axes.plot(list(points), list(points.values()), line, color=color, marker="o", markersize=4, label=words)
    _lengths_below(axes, rows)
    axes.set_ylabel("GiB beyond inputs and results")
    axes.legend(fontsize=9)
    axes.set_title(f"extra memory, heads 32/8, 4x {rows[0]['gpu']}, commit {commit}", fontsize=10)

    written = []
    for name, figure in (("speed", speed), ("against", against), ("memory", memory)):
        for axes in figure.axes:  # once all lines are there: it ends the scaling by what is drawn
            axes.set_ylim(bottom=0)
        written.append(_save(figure, out / f"{name}.svg", figures_drawn()))
    return written


def figures_drawn() -> str:
    """What the files of `draw_page` are marked with, so that a test sees which figures they were drawn from."""
    files = [(tables.RESULTS / name).read_bytes() for name, _, _ in MACHINES]
    return f"figures {hashlib.sha256(b''.join(files)).hexdigest()[:16]}"


def _lengths_below(axes: Any, rows: list[Row]) -> None:
    lengths = sorted({int(row["local_len"]) for row in rows})
    axes.set_xscale("log", base=2)
    axes.set_xticks(lengths, [short(length) for length in lengths])
    axes.minorticks_off()
    axes.grid(alpha=0.3)
    axes.set_xlabel("rows a GPU")


def _save(figure: Any, path: Path, description: str | None = None) -> Path:
    """No date and no random ids: the same table gives the same file."""
    from matplotlib import rc_context

    with rc_context({"svg.hashsalt": "cp_mesh"}):
        figure.savefig(path, metadata={"Date": None, "Description": description} if path.suffix == ".svg" else None)
    return path


def main(argv: Sequence[str] | None = None) -> list[Path]:
    """Draw; returns the files written."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("csv", type=Path, nargs="*")
    parser.add_argument("--page", action="store_true", help="draw the pictures of docs/performance.md instead")
    parser.add_argument("--out", type=Path, default=tables.RESULTS)
    parser.add_argument("--pass", dest="pass_name", choices=("fwd", "bwd", "fwdbwd"), default="fwdbwd")
    parser.add_argument("--format", choices=("svg", "png"), default="svg")
    parser.add_argument("--commit", help="draw only rows of this commit")
    args = parser.parse_args(argv)
    args.out.mkdir(parents=True, exist_ok=True)
    if args.page:
        return draw_page(args.out)
    if not args.csv:
        parser.error("name the files to draw, or --page")
    pictures: dict[tuple[str, ...], list[Row]] = defaultdict(list)
    table = [row for row in read(args.csv) if args.commit in (None, row["commit"])]
    names = sorted({row["contestant"] for row in table})
    for row in table:
        pictures[row["gpu"], row["world_size"], row["mask"], row["mode"]].append(row)
    written = []
    for (gpu, world_size, mask, mode), rows in sorted(pictures.items()):
        last = rows[-1]
        what = {"fwd": "forward", "bwd": "backward", "fwdbwd": "forward and backward"}[args.pass_name]
        title = f"{mask} attention, {what}, {world_size}x {gpu}, {last['dtype']}, D={last['head_dim']}, {mode}"
        title += f", commit {last['commit']}"
        machine = f"{world_size}x{gpu.split()[-1].lower()}"
        suffix = "" if args.pass_name == "fwdbwd" else f"_{args.pass_name}"
        path = args.out / f"attention_{mask}_{mode}_{machine}{suffix}.{args.format}"
        draw(rows, names, title, path, args.pass_name)
        written.append(path)
        print(path)
    return written


if __name__ == "__main__":
    main()
