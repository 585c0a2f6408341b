"""Write the tables of the documents from the committed CSV files: `python examples/benchmarks/tables.py`.

A few small tables stand in README.md and in pages of docs/, between a line `<!-- table: NAME -->` and a line
`<!-- end -->`; these are written in place, and `tests/test_docs.py` makes them again and compares. Whole files of
figures become pages of the site when `docs/build.py` builds it.
"""

from __future__ import annotations

import csv
import importlib
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path

Row = dict[str, str]
ROOT = Path(__file__).resolve().parent.parent.parent
RESULTS = ROOT / "docs" / "results"
DOCUMENTS = (
    "README.md",
    "docs/support.md",
    "docs/kernels.md",
    "docs/performance.md",
    "docs/decoding.md",
    "docs/linears.md",
    "docs/exact_or_refused.md",
    "docs/results/README.md",
)  # which hold tables of `REGIONS`
MODES = {
    "queued": "calls that follow one another, as in training",
    "eager": "single calls, the device idle before each",
    "graph": "replays of a CUDA graph of forward and backward",
}
METHODS = {
    "auto": "auto",
    "all_gather": "all-gather",
    "ulysses": "Ulysses",
    "hybrid": "hybrid",
}
KERNELS = {"fa4": "FlashAttention-4", "fa2": "FlashAttention-2", "cudnn": "cuDNN", "triton": "Triton"}
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


def label(contestant: str) -> str:
    """What a contestant of the benchmark is, in words."""
    contestant, _, count = contestant.partition("/head_chunks=")
    kind, *rest = contestant.split("/")
    kernel, parts = KERNELS.get(rest[-1], rest[-1]), f", {count} head chunks" if count else ""
    match kind:
        case "cp_mesh":
            method, layout, name, transport = rest
            over = ", over NCCL" if transport == "functional" else ""
            return f"cp_mesh, {by_method(method)}{layout}, {KERNELS.get(name, name)}{over}{parts}"
        case "floor":
            return f"floor: the same tiles on one GPU, {kernel}"
        case "single_gpu":
            return f"one GPU, its own rows alone, {kernel}"
        case "ulysses":
            return f"Ulysses, {kernel}"
        case "torch":
            return f"PyTorch context_parallel, {rest[0]}, cuDNN"
        case _:
            return f"ring-flash-attention, {rest[0]}, {kernel}"


def by_method(method: str) -> str:
    """In words; "hybrid4" has inner groups of 4."""
    name = method.rstrip("0123456789")
    of = f" of {method[len(name) :]}" if name != method else ""
    return "" if method == "ring" else f"{METHODS[name]}{of}, "


RANKS = ("floor", "cp_mesh", "ulysses", "torch", "ring_flash_attn", "single_gpu")


def order(contestant: str) -> tuple[int, str]:
    return RANKS.index(contestant.split("/")[0]), contestant


def compared(rows: Sequence[Row], column: str, digits: int) -> str:
    """A line for each contestant, a column for each number of rows a GPU."""
    lengths = sorted({int(row["local_len"]) for row in rows})
    cells = {(row["contestant"], int(row["local_len"])): row[column] for row in rows if row[column]}
    names = sorted({name for name, _ in cells}, key=order)
    lines = []
    for name in names:
        figures = [cells.get((name, length)) for length in lengths]
        lines.append([label(name), *(f"{float(x):.{digits}f}" if x else "" for x in figures)])
    return markdown(["rows a GPU", *map(short, lengths)], lines)


def attention_page(name: str) -> str:
    """TFLOP/s of every mask, heads, commit and mode of a file of `attention.py`, and memory."""
    rows = [row for row in read(name) if row["fwdbwd_ms"] and row["contestant"] != "floor/best"]
    cases: dict[tuple[str, str, str], dict[str, list[Row]]] = defaultdict(lambda: defaultdict(list))
    for row in rows:
        key = row["mask"], f"{row['heads_q']}/{row['heads_kv']}", row["commit"]
        cases[key][row["mode"]].append(row)
    parts = [
        head_of(name, machine_of(rows)),
        "TFLOP/s per GPU, forward and backward together; medians of the slowest rank. The last run of a case counts.\n",
    ]
    for (mask, heads, commit), modes in cases.items():
        parts.append(f"## {mask}, heads {heads}, commit {commit}\n")
        for mode, words in MODES.items():
            if mode in modes:
                parts.append(f"*{mode}*: {words}\n\n{compared(modes[mode], 'tflops_fwdbwd', 0)}")
        if any(row["extra_mem_gib"] for row in modes["eager"]):
            table = compared(modes["eager"], "extra_mem_gib", 2)
            parts.append(f"Extra memory, GiB beyond inputs and results, single calls\n\n{table}")
    return "\n".join(parts)


def machine_of(rows: Sequence[Row]) -> str:
    row = rows[0]
    gpus = f"{row['world_size']}x {row['gpu']}" if "world_size" in row else row["gpu"]
    return f"{gpus}, torch {row['torch']}, {row['packages']}, {row['dtype']}, head dim {row['head_dim']}"


def head_of(name: str, machine: str) -> str:
    return (
        f"# {name.removesuffix('.csv')}\n\nMade by `examples/benchmarks/tables.py` from [{name}]({name}); do not edit."
        f" [How each file was made](README.md).\n\n{machine}.\n"
    )


def steps_page(name: str) -> str:
    rows = read(name)
    row, commits = rows[0], {row["blocks"].replace("inductor", "compiled"): row["commit"] for row in rows}
    machine = f"{row['world']}x {row['gpu']}, torch {row['torch']}, {row['precision']}, at commits "
    machine += ", ".join(f"{commit} ({blocks})" for blocks, commit in commits.items())
    losses = {TRAINERS[row["variant"]]: row["loss_function"] for row in rows}
    what = f"{row['layers']} layers of Llama-3-8B's shape, FSDP2, {row['recompute']} recomputation; the loss by"
    what += f" {', '.join(f'`{function}` ({variant})' for variant, function in losses.items())}"
    lines = [
        [
            TRAINERS[row["variant"]], row["commit"], row["blocks"], f"{int(row['seq_len']):,}", row["steps"],
            f"{row['step_ms_min']} to {row['step_ms_max']}", f"{float(row['tokens_per_s_per_gpu']):,.0f}",
            f"{100 * float(row['mfu']):.1f} %", row["loss"], row["grad_norm"], f"{float(row['grad_difference']):.1e}",
        ]
        for row in rows
    ]  # fmt: skip
    head = ["", "commit", "blocks", "tokens", "steps", "ms a step", "tokens/s of a GPU", "of peak FLOP/s", "loss"]
    head += ["gradient norm", "worst gradient's difference"]
    return f"{head_of(name, machine)}\n{what}.\n\n{steps_table(rows)}\n{markdown(head, lines)}"


TRAINERS = {
    "cp_mesh": "cp_mesh",
    "ulysses": "Ulysses, same kernel",
    "torch_allgather": "PyTorch context_parallel, all-gather",
    "torch_alltoall": "PyTorch context_parallel, all-to-all",
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


def batches_table(rows: Sequence[Row]) -> str:
    """Of `batches.py`: rates, stalls and what was compiled."""
    head = ["layout", "heads", "mask", "tokens/s", "of the batch again", "no wait", "first step, s", "median, ms"]
    rated, lines = any(row.get("tflops") for row in rows), []
    for row in rows:
        line = [row["layout"], f"{row['heads_q']}/{row['heads_kv']}", row["mask"]]
        if row["status"] != "ok":
            lines.append([*line, row["status"], *[""] * (7 + rated)])
            continue
        ahead = (
            f"{float(row['ahead_tokens_per_s']):,.0f}, {float(row['ahead_ratio']):.2f}" if row["ahead_ratio"] else ""
        )
        speed = f"{float(row['tokens_per_s']):,.0f}", f"{float(row['rate_ratio']):.2f}", ahead
        stalls = f"{float(row['worst_stall']):.2f}", row["stalls"]
        variants = f"{row['triton']} + {row['fa4']}, {row['late']} late"
        times = f"{float(row['first_s']):.1f}", f"{1e3 * float(row['median_s']):.1f}"
        rate = [f"{float(row['tflops']):.0f}, {float(row['ahead_tflops'] or 'nan'):.0f}"] if rated else []
        lines.append([*line, *speed, *times, *stalls, variants, *rate])
    head += ["worst stall", "above 1.3", "compiled: Triton + FlashAttention-4"]
    return markdown([*head, *(["TFLOP/s a GPU, no wait"] if rated else [])], lines)


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


def decoding_page() -> str:
    name = "decoding_2xh200.csv"
    rows = read(name)
    lines = [
        [
            row["commit"], row["world_size"], short(int(row["cached"])), row["contestant"], row["step_ms"],
            f"{row['step_ms_min']} to {row['step_ms_max']}", row["of_best"], row["gb_per_s"],
        ]
        for row in rows
    ]  # fmt: skip
    head = ["commit", "GPUs", "tokens cached", "contestant", "ms a step", "least to most", "of the best on one GPU"]
    what = f"heads {rows[0]['heads_q']}/{rows[0]['heads_kv']}, one query. `examples/benchmarks/decoding.py` says what"
    what += " the contestants are. SDPA's default takes cuDNN here, which plans anew at every length"
    return f"{head_of(name, machine_of(rows))}\n{what}.\n\n{markdown([*head, 'GB/s a GPU'], lines)}"


def linears_page(name: str) -> str:
    """Of `linears.py`: at each commit both passes, of them what is beyond the products alone, and what is kept."""
    measured = [row for row in read(name) if row["fwdbwd_ms"]]
    machine, parts = f"{measured[0]['world_size']}x {measured[0]['gpu']}, torch {measured[0]['torch']}", []
    for commit in dict.fromkeys(row["commit"] for row in measured):
        rows = [row for row in measured if row["commit"] == commit]
        tables = (
            (linears_table(rows, column, digits), what)
            for column, digits, what in (
                ("fwdbwd_ms", 3, "ms of both passes"),
                ("exposed_ms", 2, "ms of them beyond the floor's"),
                ("kept_gib", 3, "GiB kept for the backward"),
            )
        )
        parts.append(f"## {commit}\n\n" + "\n".join(f"{what}:\n\n{table}" for table, what in tables))
    what = "Rows are those of all tp ranks together; floor: one rank's products alone."
    return "\n".join([f"{head_of(name, machine)}\n{what}\n", *parts])


def linears_table(rows: Sequence[Row], column: str, digits: int) -> str:
    cells = {(row["part"], row["rows"], row["contestant"]): row.get(column) or "" for row in rows}
    names = list(dict.fromkeys(row["contestant"] for row in rows))
    sizes = dict.fromkeys((row["part"], row["rows"]) for row in rows)
    values = {key: f"{float(cell):.{digits}g}" for key, cell in cells.items() if cell}
    lines = [[part, short(int(count)), *(values.get((part, count, x), "") for x in names)] for part, count in sizes]
    return markdown(["part", "rows", *names], lines)


def measured_linears_table(commit: str = "7a01d27", length: int = 16384) -> str:
    """Both passes at one commit and length, of the contestants that people choose between."""
    chosen = ("floor", "cp_mesh", "torch", "torch async")
    at = {"commit": commit, "rows": str(length)}
    rows = [row for row in read("linears_2xh100.csv") if at.items() <= row.items() and row["contestant"] in chosen]
    return linears_table([row for row in rows if row["fwdbwd_ms"]], "fwdbwd_ms", 3)


def recurrent_page(name: str) -> str:
    """Of `mixers.py` with several layers: both passes by tokens, of the last row of each case."""
    rows, parts = read(name), [""]
    for layer in dict.fromkeys(row["layer"] for row in rows):
        of_layer = [row for row in rows if row["layer"] == layer]
        cases = {(row["rows"], row["documents"], row["contestant"]): row for row in of_layer if row["fwdbwd_ms"]}
        names = [*dict.fromkeys(row["contestant"] for row in of_layer if row["fwdbwd_ms"])]
        lines = []
        for tokens, documents in dict.fromkeys(case[:2] for case in cases):
            of_case = {x: cases[tokens, documents, x] for x in names if (tokens, documents, x) in cases}
            ms = {x: float(row["fwdbwd_ms"]) for x, row in of_case.items()}
            alone = min((t for x, t in ms.items() if x.startswith("one/") or x == "fla/one"), default=None)
            share = {x: f" ({t * int(rows[0]['world_size']) / alone:.2f})" if alone else "" for x, t in ms.items()}
            cells = [f"{ms[x]:.1f}{share[x]}" if x in ms else "" for x in names]
            lines.append([f"{int(tokens):,}" + (", packed" if documents == "packed" else ""), *cells])
        found = {(row["contestant"], row["rows"], row["status"]) for row in of_layer if row["status"] != "ok"}
        without = "".join(f"- `{x}`, {int(n):,} tokens: {status}\n" for x, n, status in sorted(found))
        parts.append(f"## {layer}\n\n{markdown(['tokens', *names], lines)}" + (f"\n{without}" if without else ""))
    machine = f"{rows[0]['world_size']}x {rows[0]['gpu']}, torch {rows[0]['torch']}, {rows[0]['dtype']}"
    return f"{head_of(name, machine)}" + "\n".join(parts)


def training_table() -> str:
    lines = [
        [
            TRAINERS[row["variant"]],
            f"{float(row['step_ms_median']):.0f}",
            f"{100 * float(row['mfu']):.1f} %",
            f"{float(row['peak_gib']):.1f}",
            f"{float(row['loss']):.5f}",
        ]
        for row in read("training_4xh200.csv")
    ]
    return markdown(["", "ms a step", "of peak FLOP/s", "peak memory, GiB", "loss"], lines)


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


def placement_table() -> str:
    """Packed documents in balanced layouts of equal pairs and of equal time, and in zigzag."""
    found = {
        (row["commit"], row["layout"], row["documents"], row["rows"], row["ranks"]): row for row in read(PLACEMENT)
    }
    lines = []
    for commit, layout, *case in found:
        if commit == "015fed3":
            old, zigzag = found["7cb2a68", layout, *case], found["7cb2a68", "zigzag", *case]
            row, name = found[commit, layout, *case], f"{case[0]}, {short(int(case[1]))}, {case[2]}"
            moved = [f"{float(x['mib']):.1f}" for x in (zigzag, old, row)]
            lines.append([name, zigzag["time"], old["time"], row["time"], *moved, f"{100 * float(row['local']):.0f} %"])
    head = "documents, rows a GPU, GPUs", "time: zigzag", "equal pairs", "`balance`"
    return markdown([*head, "MiB: zigzag", "equal pairs", "`balance`", "ranks that move nothing"], lines)


PLACEMENT = "placement.csv"


def memory_table() -> str:
    rows = [
        row
        for row in read("attention_4xh200.csv")
        if row["extra_mem_gib"] and (row["commit"], row["mode"], row["heads_q"], row["heads_kv"]) == MEMORY_OF
    ]
    lengths = sorted({int(row["local_len"]) for row in rows})
    cells = {(row["contestant"], int(row["local_len"])): float(row["extra_mem_gib"]) for row in rows}
    names = (OURS, "ulysses/fa4", *TORCH, RING_FLASH[0])
    lines = [[label(name), *(f"{cells[name, x]:.2f}" for x in lengths)] for name in names]
    return markdown(["rows a GPU", *map(short, lengths)], lines)


MEMORY_OF = ("14bfd52", "eager", "32", "8")  # commit, mode, heads

PAGES: dict[str, Callable[[], str]] = {
    **{
        f"{stem}.md": partial(attention_page, f"{stem}.csv")
        for stem in (
            *("attention_2xh100", "attention_2xh200", "attention_4xh200", "magi_2xh100", "masks_2xh200"),
            *("masks_4xh200", "methods_2xh200"),
        )
    },
    **{f"{stem}.md": partial(steps_page, f"{stem}.csv") for stem in ("training_2xh100", "training_2xh200")},
    "decoding_2xh200.md": decoding_page,
    "linears_2xh100.md": partial(linears_page, "linears_2xh100.csv"),
    "recurrent_2xh100.md": partial(recurrent_page, "recurrent_2xh100.csv"),
}
"""Pages that `docs/build.py` makes in docs/results for the site, by name; they are not committed."""

REGIONS: dict[str, Callable[[], str]] = {
    "speed on 2 GPUs": lambda: speed_table("attention_2xh200.csv", "5f7ddfa", ("32", "8")),
    "speed on 4 GPUs": lambda: speed_table("attention_4xh200.csv", "a916445", ("32", "8"), ("queued", "eager")),
    "documents": documents_table,
    "placement": placement_table,
    "training steps": lambda: steps_table(read("training_2xh100.csv")).replace(", eager", ""),
    "memory": memory_table,
    "decoding": decoding_table,
    "linears": measured_linears_table,
    "training": training_table,
    "training on 2 GPUs": lambda: turned(steps_table(read("training_2xh200.csv"))),
}
"""Tables that stand in `DOCUMENTS`, by the name in their first line; `ASKED` has those that ask the code."""
ASKED = {"kernels": "kernel_table", "support": "support_table", "supported": "supported_table"}
"""Functions of capabilities.py, which needs PyTorch."""

REGION = re.compile(r"(<!-- table: (.+?) -->\n)(.*?)(<!-- end -->)", re.DOTALL)


def with_tables(text: str) -> str:
    """A document with its tables made anew."""

    def made(name: str) -> str:
        if name not in ASKED:
            return REGIONS[name]()
        return str(getattr(importlib.import_module("capabilities"), ASKED[name])())

    return REGION.sub(lambda match: f"{match[1]}\n{made(match[2])}\n{match[4]}", text)


def write_pages() -> None:
    """Make `PAGES`, without PyTorch."""
    for name, make in PAGES.items():
        (RESULTS / name).write_text(make())


def main() -> None:
    for name in DOCUMENTS:
        path = ROOT / name
        path.write_text(with_tables(path.read_text()))


if __name__ == "__main__":
    main()
