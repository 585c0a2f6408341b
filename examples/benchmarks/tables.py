"""Write the tables of the documents from the committed CSV files: `python examples/benchmarks/tables.py`.

A few small tables stand in README.md and in pages of docs/, between a line `<!-- table: NAME -->` and a line
`<!-- end -->`; these are written in place, and `tests/test_docs.py` makes them again and compares.
"""

from __future__ import annotations

import csv
import importlib
import re
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

Row = dict[str, str]
ROOT = Path(__file__).resolve().parent.parent.parent
RESULTS = ROOT / "docs" / "results"
DOCUMENTS = (
    "README.md",
    "docs/support.md",
    "docs/kernels.md",
    "docs/trainer.md",
    "docs/performance.md",
    "docs/decoding.md",
    "docs/linears.md",
    "docs/results/README.md",
)  # which hold tables of `REGIONS`
OURS = "cp_mesh/ring/zigzag/fa4/symmetric_memory"
RING_FLASH = ("ring_flash_attn/zigzag/fa4", "ring_flash_attn/stripe/fa4", "ring_flash_attn/llama3/fa4")
TORCH = ("torch/allgather", "torch/alltoall")


def read(name: str) -> list[Row]:
    with (RESULTS / name).open(newline="") as file:
        return list(csv.DictReader(file))


def markdown(head: Sequence[str], lines: Iterable[Sequence[str]]) -> str:
    body = (f"| {' | '.join(cells)} |" for cells in (head, ["---"] * len(head), *lines))
    return "\n".join(body) + "\n"


def turned(table: str) -> str:
    """A table whose columns are the lines of another one."""
    head, _, *lines = (line[2:-2].split(" | ") for line in table.splitlines())
    first, *others = zip(head, *lines, strict=True)
    return markdown(first, others)


def short(length: int) -> str:
    return f"{length // 1024}K" if length >= 1024 and length % 1024 == 0 else str(length)


TRAINERS = {
    "cp_mesh": "cp_mesh",
    "ulysses": "Ulysses, same kernel",
    "torch_allgather": "PyTorch context_parallel, all-gather",
    "torch_linears": "cp_mesh, PyTorch's linears",
}


def steps_table(rows: Sequence[Row]) -> str:
    """Of `training.py`: milliseconds a step and GiB at most, by length."""

    def column_of(row: Row) -> tuple[str, str, str]:
        return row["blocks"], row["seq_len"], row.get("tp") or "1"

    columns = list(dict.fromkeys(map(column_of, rows)))
    cells = {(row["variant"], *column_of(row)): "refused" for row in rows}
    for row in rows:
        if row.get("step_ms_median"):
            cell = f"{float(row['step_ms_median']):.0f}" + (f" ({row['peak_gib']})" if row.get("peak_gib") else "")
            cells[row["variant"], *column_of(row)] = cell
    head = [
        f"{short(int(length))} tokens, {'eager' if blocks == 'eager' else 'compiled'}"
        + (f", tp {tp}" if tp != "1" else "")
        for blocks, length, tp in columns
    ]
    names = [name for name in TRAINERS if any(row["variant"] == name for row in rows)]
    lines = [[TRAINERS[name], *(cells.get((name, *column), "") for column in columns)] for name in names]
    return markdown(["ms a step (GiB)", *head], lines)


STEPS_OF_DECODING = {
    "sdpa flash": "one GPU, SDPA's FlashAttention",
    "sdpa flash graph": "the same in a CUDA graph",
    "alone graph": "one GPU, a `ShardedCache` of one rank, in a CUDA graph",
    "cache": "2 GPUs, a `ShardedCache` that grows",
    "capacity": "2 GPUs, one of fixed capacity",
    "graph": "the same in a CUDA graph",
}


def decoding_table() -> str:
    """Of the last commit."""
    rows = [row for row in read("decoding_2xh200.csv") if row["world_size"] == "2"]
    rows = [row for row in rows if row["commit"] == rows[-1]["commit"]]
    cells = {(row["contestant"], row["cached"]): f"{1000 * float(row['step_ms']):.0f}" for row in rows}
    lengths = list(dict.fromkeys(row["cached"] for row in rows))
    lines = [[words, *(cells[name, length] for length in lengths)] for name, words in STEPS_OF_DECODING.items()]
    return markdown(["us a step", *(f"{short(int(length))} tokens" for length in lengths)], lines)


def linears_table(commit: str = "7a01d27", length: int = 16384) -> str:
    """Both passes at one commit and length, of the contestants that people choose between."""
    names, at = ("floor", "cp_mesh", "torch", "torch async"), {"commit": commit, "rows": str(length)}
    rows = [row for row in read("linears_2xh100.csv") if at.items() <= row.items() and row["fwdbwd_ms"]]
    cells = {(row["part"], row["contestant"]): f"{float(row['fwdbwd_ms']):.3g}" for row in rows}
    parts = dict.fromkeys(part for part, _ in cells)
    return markdown(["part", "rows", *names], [[x, short(length), *(cells[x, name] for name in names)] for x in parts])


def speed_table(name: str, commit: str, heads: tuple[str, str], modes: Sequence[str] = ("queued",)) -> str:
    """One number a cell: cp_mesh, the others' best variants, and the same tiles without communication."""
    rows = [
        row
        for row in read(name)
        if row["fwdbwd_ms"]
        and (row["commit"], row["mask"], row["heads_q"], row["heads_kv"]) == (commit, "causal", *heads)
    ]
    speeds = {(row["contestant"], row["mode"], int(row["local_len"])): float(row["tflops_fwdbwd"]) for row in rows}
    lengths = sorted({length for _, _, length in speeds})

    def line(words: str, contestants: Sequence[str], mode_of: Sequence[str]) -> list[str]:
        cells = [words]
        for length in lengths:
            found = [speeds.get((name, mode, length)) for mode in mode_of[:1] for name in contestants]
            if not any(found):  # where calls in a row were not measured, single ones
                found = [speeds.get((name, mode, length)) for mode in mode_of[1:] for name in contestants]
            best = max((x for x in found if x), default=None)
            cells.append("" if best is None else f"{best:.0f}")
        return cells

    return markdown(
        ["rows a GPU", *map(short, lengths)],
        [
            line("cp_mesh, zigzag, FlashAttention-4", [OURS], modes),
            line("the same in a CUDA graph", [OURS], ["graph"]),
            line("Ulysses, same kernel", ["ulysses/fa4"], modes),
            line("ring-flash-attention, same kernel, best variant", RING_FLASH, modes),
            line("PyTorch `context_parallel`, better variant", TORCH, modes),
            line("the same work on one GPU: no communication, no graph", ["floor/fa4"], modes),
        ],
    )


RIVALS = {
    "cp_mesh": "cp_mesh/",
    "Ulysses, same kernel": "ulysses/",
    "ring-flash-attention": "ring_flash_attn/",
    "ringmaster": "ringmaster/",
    "DeepSpeed": "deepspeed/",
    "PyTorch": "torch/",
}
"""Beginnings of the names of contestants, of which a line has the best."""


def rivals_table() -> str:
    """TFLOP/s of single calls, by the tokens of both GPUs."""
    columns = [("causal", 32768), ("causal", 131072), ("documents", 32768), ("documents", 131072)]
    rows = [row for row in read("rivals_2xh200.csv") if row["fwdbwd_ms"]]
    lines = []
    for words, begin in RIVALS.items():
        own = [row for row in rows if row["contestant"].startswith(begin)]
        found = [
            max((float(x["tflops_fwdbwd"]) for x in own if (x["mask"], int(x["seq_len"])) == column), default=None)
            for column in columns
        ]
        lines.append([words, *("" if x is None else f"{x:.0f}" for x in found)])
    titles = [short(length) + (" packed" if mask == "documents" else "") for mask, length in columns]
    return markdown(["tokens", *titles], lines)


def sft_table() -> str:
    """Tokens a second of both GPUs by SFTTrainer."""
    rows = {(x["contestant"], x["documents"], x["seq_len"], x["layers"]): x for x in read("sft_2xh200.csv")}
    columns = [("65536", "4"), ("131072", "4"), ("262144", "4"), ("131072", "36")]
    lines = []
    for words, *line in (
        ("cp_mesh", "cp_mesh", "one"),
        ("accelerate", "accelerate", "one"),
        ("cp_mesh, packed", "cp_mesh", "packed"),
    ):
        found = [rows.get((*line, *column)) for column in columns]
        lines.append([words, *(f"{int(x['tokens_per_s']):,}" if x else "" for x in found)])
    return markdown(["tokens/s", *(f"{short(int(x))}, {layers} layers" for x, layers in columns)], lines)


def documents_table() -> str:
    """Packed documents, FlashAttention-4: both machines, balanced against zigzag."""
    lines = []
    for name in ("masks_2xh200.csv", "masks_4xh200.csv"):
        speeds = {}
        for row in read(name):  # later commits replace earlier ones
            if row["fwdbwd_ms"] and (row["mask"], row["mode"]) == ("documents", "queued") and row["kernel"] == "fa4":
                layout = row["contestant"].split("/")[2]
                speeds[int(row["local_len"]), layout] = row
        for length in sorted({length for length, _ in speeds}):
            row = speeds[length, "balanced"]
            cells = [f"{float(speeds[length, layout]['tflops_fwdbwd']):.0f}" for layout in ("balanced", "zigzag")]
            gpus = f"{row['world_size']} H200s"
            lines.append([gpus, short(length), short(int(row["seq_len"])), *cells, row["commit"]])
    return markdown(["", "rows a GPU", "tokens", "`balance`", "zigzag", "commit"], lines)


REGIONS: dict[str, Callable[[], str]] = {
    "speed on 2 GPUs": lambda: speed_table("attention_2xh200.csv", "5f7ddfa", ("32", "8")),
    "speed on 4 GPUs": lambda: speed_table("attention_4xh200.csv", "a916445", ("32", "8"), ("queued", "eager")),
    "documents": documents_table,
    "rivals": rivals_table,
    "TRL": sft_table,
    "training steps": lambda: steps_table(read("training_2xh100.csv")).replace(", eager", ""),
    "decoding": decoding_table,
    "linears": linears_table,
    "training on 2 GPUs": lambda: turned(steps_table(read("training_2xh200.csv"))),
}
"""Tables that stand in `DOCUMENTS`, by the name in their first line; `ASKED` has those that ask the code."""
ASKED = {"kernels": "kernel_table", "support": "support_table"}
"""Functions of capabilities.py, which needs PyTorch."""

REGION = re.compile(r"(<!-- table: (.+?) -->\n)(.*?)(<!-- end -->)", re.DOTALL)


def with_tables(text: str) -> str:
    """A document with its tables made anew."""

    def made(name: str) -> str:
        if name not in ASKED:
            return REGIONS[name]()
        return str(getattr(importlib.import_module("capabilities"), ASKED[name])())

    return REGION.sub(lambda match: f"{match[1]}\n{made(match[2])}\n{match[4]}", text)


def main() -> None:
    for name in DOCUMENTS:
        path = ROOT / name
        path.write_text(with_tables(path.read_text()))


if __name__ == "__main__":
    main()
