"""Draw the pictures of docs/performance.md from the committed files: `python examples/benchmarks/plot.py`."""

from __future__ import annotations

import argparse
import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import tables
from tables import Row, short

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
MEMORY_OF = ("14bfd52", "eager", "32", "8")  # commit, mode, heads


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
    rows = sorted((row for row in tables.read(name) if row["fwdbwd_ms"]), key=lambda row: row["date"])
    return [row for row in rows if (row["commit"], row["mask"]) == (commit, "causal")]


def draw_page(out: Path) -> list[Path]:
    """The pictures of docs/performance.md: speed, speed relative to the others, memory."""
    from matplotlib import rc_context
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
    axes, commit = memory.subplots(), MEMORY_OF[0]
    rows = page_rows("attention_4xh200.csv", commit)
    for words, (contestants, color, line) in PAGE.items():
        own = [row for row in rows if row["contestant"] in contestants[:1] and row["extra_mem_gib"]]
        own = [row for row in own if (row["commit"], row["mode"], row["heads_q"], row["heads_kv"]) == MEMORY_OF]
        points = {int(row["local_len"]): float(row["extra_mem_gib"]) for row in own}
        if points:
            axes.plot(list(points), list(points.values()), line, color=color, marker="o", markersize=4, label=words)
    _lengths_below(axes, rows)
    axes.set_ylabel("GiB beyond inputs and results")
    axes.legend(fontsize=9)
    axes.set_title(f"extra memory, heads 32/8, 4x {rows[0]['gpu']}, commit {commit}", fontsize=10)

    written = []
    out.mkdir(parents=True, exist_ok=True)
    for name, figure in (("speed", speed), ("against", against), ("memory", memory)):
        for axes in figure.axes:  # once all lines are there: it ends the scaling by what is drawn
            axes.set_ylim(bottom=0)
        written.append(out / f"{name}.svg")
        with rc_context({"svg.hashsalt": "cp_mesh"}):  # no date and no random ids: the same table gives the same file
            figure.savefig(written[-1], metadata={"Date": None, "Description": figures_drawn()})
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


def main(argv: Sequence[str] | None = None) -> list[Path]:
    """Draw; returns the files written."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=tables.RESULTS)
    return draw_page(parser.parse_args(argv).out)


if __name__ == "__main__":
    main()
