"""Draw what `attention.py` measured: python examples/benchmarks/plot.py FILE.csv ... --out docs [--table]

One picture for each machine, number of GPUs, mask and mode: a row of axes for each pair of head counts; speed on the
left, the share of the floor on the right. Where a point was measured more than once, the last one counts.
"""

from __future__ import annotations

import argparse
import csv
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

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
    from matplotlib import colormaps, rc_context
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
    # No date and no random ids: the same table gives the same file.
    with rc_context({"svg.hashsalt": "cp_mesh"}):
        figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)


TABLE = (
    ("floor", "floor/fa4"),
    ("zigzag", "cp_mesh/ring/zigzag/fa4/symmetric_memory"),
    ("striped", "cp_mesh/ring/striped/fa4/symmetric_memory"),
    ("zigzag, NCCL", "cp_mesh/ring/zigzag/fa4/functional"),
    ("zigzag, cuDNN", "cp_mesh/ring/zigzag/cudnn/symmetric_memory"),
    ("Ulysses", "ulysses/fa4"),
    ("torch, all-gather", "torch/allgather"),
    ("torch, all-to-all", "torch/alltoall"),
    ("ring-flash-attn zigzag", "ring_flash_attn/zigzag/fa4"),
    ("ring-flash-attn stripe", "ring_flash_attn/stripe/fa4"),
)
"""Heads of the columns, and the contestants in them."""


def print_tables(rows: list[Row]) -> None:
    """TFLOP/s per GPU, forward and backward, of some contestants; for each mask and mode a table in Markdown."""
    for mask, mode in sorted({(row["mask"], row["mode"]) for row in rows}):
        own = [row for row in rows if (row["mask"], row["mode"]) == (mask, mode)]
        speeds = {(row["contestant"], row["heads_q"], row["heads_kv"], row["local_len"]): row for row in own}
        names = {row["contestant"] for row in own}
        columns = [(head, name) for head, name in TABLE if name in names] or [(name, name) for name in sorted(names)]
        print(f"\n{mask}, {mode}\n\n| heads | local length | {' | '.join(head for head, _ in columns)} |")
        print("|---" * (len(columns) + 2) + "|")
        for _, *shape in sorted(speeds, key=lambda key: (int(key[1]), int(key[2]), int(key[3]))):
            if (columns[0][1], *shape) not in speeds:
                continue
            cells = [speeds.get((name, *shape)) for _, name in columns]
            speeds = {key: row for key, row in speeds.items() if list(key[1:]) != shape}
            texts = [f"{float(cell['tflops_fwdbwd']):.0f}" if cell else "" for cell in cells]
            print(f"| {shape[0]}/{shape[1]} | {shape[2]} | {' | '.join(texts)} |")


def main(argv: Sequence[str] | None = None) -> list[Path]:
    """Draw; returns the files written."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("csv", type=Path, nargs="+")
    parser.add_argument("--out", type=Path, default=Path("docs"))
    parser.add_argument("--pass", dest="pass_name", choices=("fwd", "bwd", "fwdbwd"), default="fwdbwd")
    parser.add_argument("--format", choices=("svg", "png"), default="svg")
    parser.add_argument("--table", action="store_true", help="print Markdown tables instead")
    parser.add_argument("--commit", help="rows of this commit alone")
    args = parser.parse_args(argv)
    if args.table:
        print_tables([row for row in read(args.csv) if args.commit in (None, row["commit"])])
        return []
    args.out.mkdir(parents=True, exist_ok=True)
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
