"""Write the tables of the documents from the committed CSV files: `python examples/benchmarks/tables.py`.

A page of tables is made from each of the larger files of figures in docs/results. A few small tables stand in README.md
and in pages of docs/, between a line `<!-- table: NAME -->` and a line `<!-- end -->`; these are written in place.
`tests/test_docs.py` makes all of them again and compares, so no figure can be edited by hand.
"""

from __future__ import annotations

import csv
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from capabilities import support_table, supported_table

from cp_mesh.tools.explain.step import ModelSizes

Row = dict[str, str]
ROOT = Path(__file__).resolve().parent.parent.parent
RESULTS = ROOT / "docs" / "results"
DOCUMENTS = (
    "README.md",
    "docs/support.md",
    "docs/performance.md",
    "docs/decoding.md",
    "docs/linears.md",
    *(f"docs/results/{name}.md" for name in ("exact_or_refused", "four_gpus")),
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
WHOLE = ModelSizes.read("llama-3-8b")
OURS = "cp_mesh/ring/zigzag/fa4/symmetric_memory"
RING_FLASH = ("ring_flash_attn/zigzag/fa4", "ring_flash_attn/stripe/fa4", "ring_flash_attn/llama3/fa4")
TORCH = ("torch/allgather", "torch/alltoall")


def read(name: str) -> list[Row]:
    with (RESULTS / name).open(newline="") as file:
        return list(csv.DictReader(file))


def commit_of(name: str) -> str:
    """Of a file whose rows do not say it: what docs/results/how_made.md says."""
    text = (RESULTS / "how_made.md").read_text()
    paragraph = re.search(rf"^\*\*\[`{re.escape(name)}`\].*?\n\n", text, re.MULTILINE | re.DOTALL)
    assert paragraph, f"docs/results/how_made.md does not say how {name} was made"
    commits = re.findall(r"\bat ([0-9a-f]{7})\b", paragraph[0])
    return commits[0] if commits else re.findall(r"at commit ([0-9a-f]{7}) where nothing else is said", text)[0]


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
        f" [How each file was made](how_made.md).\n\n{machine}.\n"
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


def batches_page(name: str) -> str:
    rows = read(name)
    parts = [head_of(name, f"{rows[0]['world_size']}x {rows[0]['gpu']}, {rows[0]['packages']}")]

    def run_of(row: Row) -> tuple[str, ...]:
        return tuple(row[name] for name in ("commit", "start", "played", "layers", "batches", "seq_len"))

    for run in dict.fromkeys(map(run_of, rows)):
        commit, start, played, layers, batches, seq_len = run
        on = (
            f"one GPU plays {'ranks' if played.startswith('all') else 'rank'} {played.replace('/', ' of ')}"
            if played
            else f"{rows[0]['world_size']} GPUs"
        )
        words = f"{on}, {layers} layer{'s' * (layers != '1')}, {batches} batches of {int(seq_len):,} tokens"
        table = batches_table([row for row in rows if run_of(row) == run])
        parts.append(
            f"## {f'{start} start' if start else 'caches as they were'}, commit {commit}\n\n{words}.\n\n{table}"
        )
    return "\n".join(parts)


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


def flex_page(name: str) -> str:
    """`flex.py`: milliseconds of forward and of both passes, and both over one GPU's, as many pairs."""
    rows, parts = read(name), []
    for commit, played, score in dict.fromkeys((row["commit"], row["played"], row["score"]) for row in rows):
        lines = [
            [row["contestant"], *(row[x] for x in ("fwd_ms", "fwdbwd_ms", "of_floor_fwd", "of_floor_fwdbwd", "status"))]
            for row in rows
            if (row["commit"], row["played"], row["score"]) == (commit, played, score)
        ]
        head = ["", "forward, ms", "both, ms", "of the floor", "both", "gate"]
        who = f"rank {played.replace('/', ' of ')}, played by one GPU" if played else "all ranks"
        parts.append(f"## {score}, {who}, at {commit}\n\n{markdown(head, lines)}")
    shape = f"{rows[0]['rows']} rows a rank, heads {rows[0]['heads_q']}/{rows[0]['heads_kv']}, {rows[0]['dtype']}"
    return "\n".join([head_of(name, f"{machine_of(rows)}; {shape}"), *parts])


def long_table(name: str = "long_2xh200.csv") -> str:
    """Of steps on long sequences: what was measured."""
    lines = [
        [
            f"{int(row['seq_len']):,}", row["layers"], row["recompute"], f"{float(row['seconds']):.2f}",
            f"{100 * float(row['mfu']):.1f} %", f"{float(row['peak_gib']):.1f}", f"{float(row['host_gib']):.1f}",
        ]
        for row in read(name)
    ]  # fmt: skip
    head = ["tokens", "layers", "recomputed", "s a step", "of peak FLOP/s", "peak memory, GiB", "in the host's"]
    return markdown(head, lines)


STATE_BYTES = 16
"""Of a parameter: fp32 weight and gradient, and two of AdamW."""


def project(
    fewer: dict[str, str], more: dict[str, str], sizes: ModelSizes = WHOLE, ranks: int = 8
) -> tuple[float, float]:
    """Seconds and peak GiB of a whole model on ``ranks``, from two measurements that differ in layers.

    Work is divided by the ratio of ranks. Memory is that of the same rows a rank. What weights and their state take is
    known, so it is scaled to the ranks. It is not proved that a larger ring hides its communication as well.
    """
    world, layers, whole = int(more["world"]), int(more["layers"]), sizes.num_hidden_layers
    each = {x: (float(more[x]) - float(fewer[x])) / (layers - int(fewer["layers"])) for x in ("seconds", "peak_gib")}
    seconds = (float(more["seconds"]) + (whole - layers) * each["seconds"]) * world / ranks
    state = STATE_BYTES * (sizes.of_ends + whole * sizes.of_block) / 2**30
    peak = float(more["peak_gib"]) + (whole - layers) * each["peak_gib"]
    return seconds, peak - (1 / world - 1 / ranks) * state


def projected_table() -> str:
    """A whole Llama-3-8B on 8 GPUs: its time from the longest sequence, its memory from that of as many rows a rank."""
    rows = [row for row in read("long_2xh200.csv") if row["recompute"] == "selective"]
    of_time, of_memory = ([row for row in rows if row["seq_len"] == n] for n in ("1048576", "262144"))
    cells = [f"{WHOLE.num_hidden_layers}", "8", f"{project(*of_time)[0]:.0f}", f"{project(*of_memory)[1]:.0f}"]
    return markdown(["layers", "GPUs", "s a step of 1,048,576 tokens", "GiB a GPU"], [cells])


def million_page(name: str) -> str:
    row = read(name)[0]
    machine = f"{row['world']}x {row['gpu']}, torch {row['torch']}, commit {row['commit']}"
    return f"{head_of(name, machine)}\n{long_table(name)}"


def long_page() -> str:
    return f"{million_page('long_2xh200.csv')}\nProjected from these:\n\n{projected_table()}"


def ladder_page(name: str) -> str:
    """Steps of `long_llama.py`, one after the other."""
    rows = read(name)
    lines = [
        [
            f"{row['world']}x {row['gpu'].split()[1]}", f"{int(row['seq_len']):,}", row["layers"],
            row["window"] or "all",
            "PyTorch" if row["plain"] == "True" else "cp_mesh",
            ("input" if row["recompute"] == "full" else "input, attention")
            + (", on the host" if row["offload_checkpoints"] == "True" else ""),
            "host" if row["offload_optimizer"] == "True" else "GPU",
            *(row[x] for x in ("predicted_gib", "peak_gib", "host_gib", "seconds", "attention_s")),
            *(row[x] for x in ("loss", "grad_norm", "commit", "status")),
        ]
        for row in rows
    ]  # fmt: skip
    head = ["GPUs", "tokens", "layers", "keys seen", "plan", "blocks keep", "optimizer on", "predicted, GiB"]
    head += ["peak, GiB", "in the host's", "s a step", "attention, s", "loss", "gradient norm", "commit", "status"]
    machine = f"torch {rows[0]['torch']}; optimizer states in bf16; GiB are those of a GPU or a rank"
    return f"{head_of(name, machine)}\n{markdown(head, lines)}"


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
    return f"{head_of(name, machine)}{RECURRENT_WORDS}" + "\n".join(parts)


RECURRENT_WORDS = """
Milliseconds of both passes. In brackets: divided by the ideal, the best time of one GPU over the GPUs. `cp_mesh` names
method, layout and kernel. `fla/contiguous` and `fla/zigzag` are flash-linear-attention's own `cp_context`. `one/fla` is
cp_mesh on one GPU with all tokens, `fla/one` the package alone. `gdn` is the gated delta rule of Qwen3.5-27B, `kda`
that of Kimi Linear 48B, `ssd` that of Nemotron 3, `gdn layer` a whole layer of Qwen3.5-9B.

- One document of 131,072 tokens, gated delta rule: cp_mesh took 33.3 ms (contiguous) and 38.9 (zigzag, 35.1 to 44.1),
  `cp_context` 52.2 and 52.8, one GPU 54.0. Both summarize a rank's tokens for the ranks behind it. `cp_context` has a
  kernel for that, whose products are sums of three in TF32. cp_mesh takes the kernel of the rows.
- Packed text needs few summaries. `cp_context` takes 11 to 14 % longer for the gated delta rule, and as long for KDA.
- `heads` gains 3 % at most for the gated delta rule, packed or not, and 11 % for others. Its backward put rows in order
  one by one, which it does no longer; times after that were not taken.
- At 8,192 tokens the host is the limit: cp_mesh took 7.5 and 8.6 ms, `cp_context` 5.7 and 4.8, one GPU 4.1.
- A whole layer took 1.06 to 1.12 of the ideal at 131,072 tokens, and 1.18 to 1.22 at 32,768, where `cp_context` took
  1.07 and 1.19 for packed text.
"""


def hybrid_page(name: str) -> str:
    """Of `hybrid_step.py`: every row."""
    rows = read(name)
    columns = ("step_ms", "of_share", "tokens_per_s", "peak_gib", "loss", "grad_norm", "status")
    lines = [
        [f"{int(row['rows']):,}" + (", packed" if row["documents"] == "packed" else ""), row["contestant"]]
        + [row[column].partition(". ")[0] for column in columns]
        for row in rows
    ]
    row = rows[0]
    machine = (
        f"{row['world_size']}x {row['gpu']}, torch {row['torch']}, Transformers {row['transformers']}, {row['dtype']}"
    )
    head = ["tokens", "", "ms a step", "of its share", "tokens/s", "GiB at its peak", "loss", "gradient norm", "status"]
    what = f"Whole training steps of {row['layers']} layers of Qwen3.5-9B. {HYBRID_WORDS}"
    return f"{head_of(name, machine)}\n{what}\n\n{markdown(head, lines)}"


HYBRID_WORDS = """`one` is a GPU alone.
The share is its time over the GPUs: two GPUs took 0.97 to 1.06 of that, and hold 262,144 tokens. One GPU runs out of
memory at 131,072 tokens of one document, and would at 262,144 of packed text. Losses and gradient norms differ by
1.1e-4 at most. Convolutions were PyTorch's at this commit."""


def torchtitan_page(name: str) -> str:
    """Of `torchtitan_training.py`: every row."""
    rows = read(name)
    columns = {"seq_len": "tokens", "variant": "attention of", "method": "method", "step_ms": "ms a step"}
    columns |= {"step_ms_min": "least", "step_ms_max": "most", "tokens_per_s": "tokens/s"}
    columns |= {"peak_gib": "GiB at its peak", "first_loss": "first loss", "last_loss": "last loss"}
    lines = [[row[column] for column in columns] for row in rows]
    row = rows[0]
    machine = f"{row['world_size']}x {row['gpu']}, torch {row['torch']}, {row['precision']}"
    what = f"{row['steps']} steps of the Trainer of torchtitan {row['torchtitan']} with {row['layers']} layers of"
    what += f" Llama-3-8B's shape, {row['checkpoint']} checkpoints, attention by cuDNN."
    return f"{head_of(name, machine)}\n{what}\n\n{markdown([*columns.values()], lines)}"


def tp_page(name: str) -> str:
    """Of `training.py --tp`: steps by commit and length."""
    rows = read(name)
    lines = [
        [
            row["commit"], f"{int(row['seq_len']):,}", TRAINERS[row["variant"]], f"{float(row['step_ms_median']):.0f}",
            f"{row['step_ms_min']} to {row['step_ms_max']}", row["peak_gib"], row["loss"], row["grad_norm"],
        ]
        for row in rows
    ]  # fmt: skip
    head = ["commit", "tokens", "linears", "ms a step", "least and most", "GiB at its peak", "loss", "gradient norm"]
    row = rows[0]
    machine = f"{row['world']}x {row['gpu']}, torch {row['torch']}, {row['precision']}, tp {row['tp']}"
    what = f"{row['layers']} layers of Llama-3-8B's shape, {row['blocks']}, {row['recompute']} recomputation."
    return f"{head_of(name, machine)}\n{what}\n\n{markdown(head, lines)}"


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


def planning_page() -> str:
    name = "planning_cpu.csv"
    rows = read(name)
    what = f"Planning on the host, `examples/benchmarks/planning.py`, CPU cores, commit {commit_of(name)}"
    return head_of(name, what) + "\n" + markdown(list(rows[0]), map(Row.values, rows))


Error = tuple[str, str, str, dict[str, float], dict[str, float]]
LINE = re.compile(r"^(\w+) +(bfloat16|float16|float32) +(.*?) +(\w+ [\d.]+/[\d.]+ .*) +(\w+)$")


def errors(name: str) -> list[Error]:
    """Of a printed table: kernel, dtype, case, sharded errors as a share of the limit's base, those of one device."""
    found = []
    for line in (RESULTS / name).read_text().splitlines():
        if match := LINE.match(line.strip()):
            kernel, dtype, case, figures, verdict = match.groups()
            assert verdict == "ok", line
            pairs = re.findall(r"(\w+) ([\d.]+)/([\d.]+)", figures)
            sharded, alone = ({x[0]: float(x[i]) for x in pairs} for i in (1, 2))
            found.append((kernel, dtype, " ".join(case.split()), sharded, alone))
    return found


def errors_table(name: str, of_sharded: str) -> str:
    groups: dict[tuple[str, str], list[Error]] = defaultdict(list)
    for error in errors(name):
        groups[error[:2]].append(error)
    lines = []
    for (kernel, dtype), own in groups.items():
        worst = [f"{max(max(error[i].values()) for error in own):.2f}" for i in (3, 4)]  # type: ignore[union-attr]
        lines.append([kernel, dtype, str(len(own)), *worst])
    return markdown(["kernel", "dtype", "cases", of_sharded, "one device, of what it may have (limit 1)"], lines)


def low_precision_table() -> str:
    return errors_table("low_precision_2xh200.csv", "sharded, of one device's (limit 1.5)")


def scores_table() -> str:
    return errors_table("scores_2xh200.csv", "sharded, of what it may have (limit 1)")


def low_precision_page() -> str:
    name = "low_precision_2xh200.csv"
    machine = f"{(RESULTS / name).read_text().splitlines()[0]}, commit {commit_of(name)}"
    what = (
        "The worst RMS error over blocks of 128 rows of a head, over all layouts, masks, heads and lengths of the file."
    )
    return f"{head_of(name, machine)}\n{what}\n\n{low_precision_table()}"


def scores_page() -> str:
    name = "scores_2xh200.csv"
    machine = f"{(RESULTS / name).read_text().splitlines()[0]}, commit {commit_of(name)}"
    runs = [line for line in (RESULTS / name).read_text().splitlines() if "deterministic runs" in line]
    equal = sum(line.endswith(": equal") for line in runs)
    what = f"Masks and scores. Deterministic backwards, 20 runs each: the same bits in {equal} of {len(runs)} cases."
    return f"{head_of(name, machine)}\n{what}\n\n{scores_table()}"


def verify_page() -> str:
    name = "verify_4xh200.csv"
    rows = read(name)
    machine = f"{rows[0]['hardware']}, torch {rows[0]['torch']}, commit {commit_of(name)}"
    return f"{head_of(name, machine)}\n{VERIFY_WORDS}\n\n{verify_table()}"


VERIFY_WORDS = (
    "What `python -m cp_mesh` measured: the worst RMS error against float64 of contiguous, zigzag and striped."
)


def verify_table() -> str:
    groups: dict[tuple[str, str, str], list[Row]] = defaultdict(list)
    for row in read("verify_4xh200.csv"):
        groups[row["dtype"], row["kernel"], row["mask"]].append(row)
    names = ("out", "lse", "dq", "dk", "dv")
    lines = []
    for key, own in groups.items():
        worst = [f"{max(float(row[f'{x}_rms_error']) for row in own):.0e}" for x in names]
        of_allowed = max(float(row[f"{x}_of_allowed"]) for row in own for x in names)
        lines.append([*key, *worst, f"{of_allowed:.2f}"])
    return markdown(["dtype", "kernel", "mask", *names, "of what is allowed"], lines)


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
        f"{stem}.md": (lambda name=f"{stem}.csv": attention_page(name))  # type: ignore[misc]
        for stem in (
            "attention_2xh100",
            "attention_2xh200",
            "attention_4xh200",
            "graphs_2xh200",
            "magi_2xh100",
            "masks_2xh200",
            "masks_4xh200",
            "methods_2xh200",
            "ulysses_2xh200",
        )
    },
    "batches_2xh200.md": lambda: batches_page("batches_2xh200.csv"),
    "decoding_2xh200.md": decoding_page,
    "flex_2xh100.md": lambda: flex_page("flex_2xh100.csv"),
    "training_2xh100.md": lambda: steps_page("training_2xh100.csv"),
    "training_2xh200.md": lambda: steps_page("training_2xh200.csv"),
    "planning_cpu.md": planning_page,
    "linears_2xh100.md": lambda: linears_page("linears_2xh100.csv"),
    "training_tp_2xh100.md": lambda: tp_page("training_tp_2xh100.csv"),
    "long_2xh200.md": long_page,
    **{
        f"{x}.md": lambda x=x: ladder_page(f"{x}.csv") for x in ("doubled_2xh200", "long_h200", "offloaded_checkpoints")
    },  # type: ignore[misc]
    "recurrent_2xh100.md": lambda: recurrent_page("recurrent_2xh100.csv"),
    "hybrid_2xh100.md": lambda: hybrid_page("hybrid_2xh100.csv"),
    "torchtitan_2xh100.md": lambda: torchtitan_page("torchtitan_2xh100.csv"),
    "low_precision_2xh200.md": low_precision_page,
    "scores_2xh200.md": scores_page,
    "verify_4xh200.md": verify_page,
}
"""Pages of docs/results by name."""

REGIONS: dict[str, Callable[[], str]] = {
    "speed on 2 GPUs": lambda: speed_table("attention_2xh200.csv", "5f7ddfa", ("32", "8")),
    "speed on 4 GPUs": lambda: speed_table("attention_4xh200.csv", "a916445", ("32", "8"), ("queued", "eager")),
    "documents": documents_table,
    "support": support_table,
    "training steps": lambda: steps_table(read("training_2xh100.csv")).replace(", eager", ""),
    "memory": memory_table,
    "decoding": decoding_table,
    "supported": supported_table,
    "linears": measured_linears_table,
    "training": training_table,
    "training on 2 GPUs": lambda: turned(steps_table(read("training_2xh200.csv"))),
}
"""Tables that stand in `DOCUMENTS`, by the name in their first line."""

REGION = re.compile(r"(<!-- table: (.+?) -->\n)(.*?)(<!-- end -->)", re.DOTALL)


def with_tables(text: str) -> str:
    """A document with its tables made anew."""
    return REGION.sub(lambda match: f"{match[1]}\n{REGIONS[match[2]]()}\n{match[4]}", text)


def main() -> None:
    for name, make in PAGES.items():
        (RESULTS / name).write_text(make())
    for name in DOCUMENTS:
        path = ROOT / name
        path.write_text(with_tables(path.read_text()))


if __name__ == "__main__":
    main()
