"""Time attention layers on batches that all differ, planning included: does anything stall, does balancing pay?

    torchrun --nproc-per-node 2 examples/benchmarks/batches.py --csv batches.csv --steps-csv steps.csv

A step does what a trainer does with a new batch: make the mask of its document ids, choose the layout, shard tokens,
labels and positions, run ``--layers`` attention layers forward and backward, and wait for the device. Its time is host
time from a barrier to the end of that wait, on the slowest rank. Then the same batch runs again with the same mask and
layout, to compare a new batch with a repeated one of equal work. Layouts take turns, each with its own mask.

Masks, all causal: "documents" of lognormal lengths (median ``--median``, sigma 1.5, cut at the end of the sequence);
"window", the same with ``--window``; "causal", one document, whose length varies from half of ``--seq-len`` to all.

A trainer does not wait for the device after every step: the host plans the next batch meanwhile. So after the steps
come ``--blocks`` blocks of 20 further batches for each layout in turn, with one wait at the end of a block, and then
the same batches again.

The correctness gate runs after the steps, on short batches: before them it would compile kernels whose compilation
belongs to the first step. If a layout fails the gate, its row has only a status.

Garbage collection: by default as in trainers, on all ranks before every 50th batch, outside of the steps' time. ``--gc
auto`` leaves it to Python.

Columns of ``--csv``, one row per layout; "later steps" are all but the first 5:

    start                 with ``--caches DIR``: "cold" if DIR was empty, else "second"
    first_s, first5_s     the first step, and the first five together, with all compilation
    median_s, worst_s     of later steps
    worst_over_median     and `above_median`: how many later steps took more than 1.3 times the median. Batches differ
                          in work, so these say little if documents are long
    worst_stall           the same without differences in work, and `stalls`: by the ratio of a step's time to the time
                          of its batch again
    tokens_per_s          over all later steps; `tokens_per_s_again` of the repeated batches, `rate_ratio` the first
                          over the second
    ahead_tokens_per_s    and `ahead_ratio`: the same for the blocks
    tflops, ahead_tflops  per rank, for both passes of attention on the pairs that the masks allow, over the same times:
                          these also contain the rest of a step
    triton, fa4           variants compiled or loaded until the end of these steps, on the rank with most; layouts that
                          take turns share them. `late`: those after the first 5 steps
    fa4_caches            variants by FlashAttention-4's caches, of rank 0, before any gate
"""

from __future__ import annotations

import argparse
import gc
import math
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(Path(__file__).parent)]  # a checkout that is not installed

from attention import Gate, Ranks, random_inputs  # noqa: E402
from contestants import LAYOUTS, Case, CPMesh, Inputs, document_lengths, pairs_of_window  # noqa: E402
from report import FLOPS, append, machine  # noqa: E402
from tables import markdown  # noqa: E402

from cp_mesh import Mask, ShardedSequence  # noqa: E402

WARM = 5  # steps in which everything may be compiled
SLOW = 1.3  # times the median
COLLECT = 50  # steps between collections of garbage
BLOCK = 20  # batches without a wait between them

COLUMNS = (
    *("commit", "gpu", "world_size", "torch", "cuda", "cudnn", "nccl", "packages"),
    *("start", "layout", "kernel", "heads_q", "heads_kv", "head_dim", "mask", "median", "window", "seq_len"),
    *("layers", "batches", "gc", "first_s", "first5_s", "median_s", "worst_s", "worst_over_median", "above_median"),
    *("worst_stall", "stalls", "tokens_per_s", "tokens_per_s_again", "rate_ratio", "ahead_tokens_per_s", "ahead_ratio"),
    *("tflops", "ahead_tflops"),
    *("triton", "fa4", "late", "fa4_caches", "status"),
)
STEP_COLUMNS = (
    *("commit", "gpu", "world_size", "start", "layout", "heads_q", "heads_kv", "mask", "step", "documents"),
    *("tokens", "pairs", "seconds", "again_s", "triton", "fa4"),
)
SECONDS, AGAIN, TRITON, FA4, LATE = range(5)  # rows of what `race` returns


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--device", choices=("cuda", "cpu"), default="cuda" if torch.cuda.is_available() else "cpu")
    add("--layouts", nargs="+", choices=("balanced", *LAYOUTS), default=["balanced", "zigzag", "contiguous"])
    add("--mask", nargs="+", choices=("documents", "window", "causal"), default=["documents"])
    add("--heads", nargs="+", default=["64/8"], help="query heads/kv heads")
    add("--head-dim", type=int, default=128)
    add("--seq-len", type=int, default=65536, help="tokens of the whole sequence")
    add("--median", type=float, default=512, help="median document length")
    add("--window", type=int, default=1024, help="keys that a query sees, its own included")
    add("--layers", type=int, default=4)
    add("--batches", type=int, default=200)
    add("--blocks", type=int, default=2, help="number of blocks of batches without a wait between them")
    add(
        "--time-limit",
        type=float,
        default=math.inf,
        help="start no batch later than this many seconds after the first steps",
    )
    add("--gc", choices=("trainer", "auto"), default="trainer")
    add("--kernel", help="default: fa4, on CPUs reference")
    add("--transport", default="auto")
    add("--gate-len", type=int, default=256, help="rows per rank in the correctness gate")
    add("--caches", type=Path, metavar="DIR", help="folder of the compilation caches of Triton and FlashAttention-4")
    add("--csv", type=Path, help="append a row for each layout")
    add("--steps-csv", type=Path, help="append a row for each layout and step")
    add("--commit", help="recorded in the rows (default: ask git)")
    args = parser.parse_args(argv)
    if args.batches <= WARM:
        parser.error(f"--batches: expected more than the {WARM} warm-up steps")
    args.kernel = args.kernel or ("fa4" if args.device == "cuda" else "reference")
    return args


@dataclass(frozen=True, eq=False)
class Batch(Case):
    """A case with documents of its own. Its mask is made when it is first asked for, and then kept."""

    lengths: tuple[int, ...] = ()
    ids: Tensor | None = None  # [S] on the host, as a data loader gives them; None for one document
    window: tuple[int, int] | None = None

    @property
    def mask(self) -> Mask:
        return self._mask

    @cached_property
    def _mask(self) -> Mask:
        return Mask(documents=self.ids, window=self.window)

    @property
    def num_pairs(self) -> int:
        return sum(pairs_of_window(n, self.window[0] if self.window else n) for n in self.lengths)


def make_batch(args: argparse.Namespace, ranks: Ranks, heads: str, mask: str, seed: int, seq_len: int) -> Batch:
    """A batch of a seed, with no mask yet. Of a shorter sequence documents and windows are shorter too."""
    num_heads, num_kv_heads = map(int, heads.split("/"))
    unit, part = 2 * ranks.size, max(seq_len / args.seq_len, 1 / 16)
    if mask == "causal":
        most, generator = seq_len // unit, torch.Generator().manual_seed(seed)
        seq_len = unit * int(torch.randint(most // 2, most + 1, (), generator=generator))
        lengths: tuple[int, ...] = (seq_len,)
    else:
        lengths = document_lengths(seq_len, seed, args.median * part, seq_len)
    ids = None
    if mask != "causal":
        ids = torch.repeat_interleave(torch.arange(len(lengths), dtype=torch.int32), torch.tensor(lengths))
    return Batch(
        num_heads, num_kv_heads, args.head_dim, torch.bfloat16, True, seq_len // ranks.size, ranks.size, ranks.rank,
        ranks.device, "" if mask == "causal" else mask, lengths, ids,
        (max(1, round(args.window * part)) - 1, 0) if mask == "window" else None,
    )  # fmt: skip


def step(ranks: Ranks, contestant: CPMesh, batch: Batch, data: dict[str, Tensor], x: Inputs, num_layers: int) -> None:
    """``data``: [1, S] tensors of the whole sequence; ``x`` has rows for the longest shard."""
    sequence = ShardedSequence(ranks.mesh, contestant.layout(batch), length=batch.seq_len)
    sequence.shard({name: tensor[:, : batch.seq_len] for name, tensor in data.items()})
    rows = len(sequence.positions().to(ranks.device))
    run = contestant.setup(batch, Inputs(x.q[:, :rows], x.k[:, :rows], x.v[:, :rows], x.dout[:, :rows]))
    run.layers(num_layers)


def seconds_of(ranks: Ranks, steps: Sequence[Callable[[], None]]) -> float:
    """On this rank, until the device is done with all of them."""
    ranks.line_up()
    begin = time.perf_counter()
    for each in steps:
        each()
    ranks.synchronize()
    return time.perf_counter() - begin


@contextmanager
def garbage_as(how: str) -> Iterator[None]:
    if how == "trainer":
        gc.disable()
    try:
        yield
    finally:
        gc.enable()


def operands(ranks: Ranks, args: argparse.Namespace, heads: str) -> tuple[Inputs, dict[str, Tensor]]:
    """Rows for the longest shard, and tokens of the whole sequence."""
    longest = make_batch(args, ranks, heads, "documents", 0, args.seq_len)
    tokens = torch.zeros(1, args.seq_len, dtype=torch.int64, device=ranks.device)
    return random_inputs(longest, longest.local_len, seed=1 + ranks.rank), {"tokens": tokens, "labels": tokens}


def race(
    ranks: Ranks, args: argparse.Namespace, heads: str, mask: str, contestants: Sequence[CPMesh]
) -> dict[str, Tensor]:
    """By name of the contestant, [5, batches]: `SECONDS`, `AGAIN`, `TRITON`... of the rank that has most."""
    x, data = operands(ranks, args, heads)
    found: dict[str, list[tuple[float, ...]]] = {contestant.name: [] for contestant in contestants}
    begin = 0.0
    with garbage_as(args.gc):
        for seed in range(args.batches):
            if seed == WARM:
                begin = time.perf_counter()
            if seed > WARM and float(ranks.largest([time.perf_counter() - begin])) > args.time_limit:
                break
            if args.gc == "trainer" and seed % COLLECT == 0:
                gc.collect()
            for contestant in contestants:
                batch = make_batch(args, ranks, heads, mask, seed, args.seq_len)
                run = partial(step, ranks, contestant, batch, data, x, args.layers)
                first = seconds_of(ranks, [run])
                variants = triton_variants(), sum(fa4_variants().values())
                early = variants if seed < WARM else found[contestant.name][WARM - 1][TRITON:LATE]
                again = seconds_of(ranks, [run])
                found[contestant.name].append((first, again, *variants, sum(variants) - sum(early)))
    return {name: ranks.largest(rows).T for name, rows in found.items()}


def seeds_ahead(args: argparse.Namespace) -> list[range]:
    """Of the batches of each block: others than those of the steps."""
    begins = [args.batches + BLOCK * i for i in range(args.blocks)]
    return [range(begin, begin + BLOCK) for begin in begins]


def race_ahead(
    ranks: Ranks, args: argparse.Namespace, heads: str, mask: str, contestants: Sequence[CPMesh]
) -> dict[str, Tensor]:
    """By name of the contestant, [2, blocks]: `SECONDS` and `AGAIN` of blocks whose batches do not wait."""
    x, data = operands(ranks, args, heads)
    found: dict[str, list[tuple[float, ...]]] = {contestant.name: [] for contestant in contestants}
    with garbage_as(args.gc):
        for seeds in seeds_ahead(args):
            gc.collect()
            for contestant in contestants:
                batches = [make_batch(args, ranks, heads, mask, seed, args.seq_len) for seed in seeds]
                steps = [partial(step, ranks, contestant, batch, data, x, args.layers) for batch in batches]
                found[contestant.name].append((seconds_of(ranks, steps), seconds_of(ranks, steps)))
    return {name: ranks.largest(rows).T for name, rows in found.items()}


def triton_variants() -> int:
    """Of the kernels of cp_mesh, that Triton compiled or loaded in this process."""
    modules = [module for name, module in list(sys.modules.items()) if name.startswith("cp_mesh.kernels.")]
    kernels = {id(kernel): kernel for module in modules for kernel in vars(module).values()}
    by_device = [getattr(kernel, "device_caches", None) for kernel in kernels.values()]
    # the first of what Triton keeps of a device are compiled kernels
    return sum(len(kept[0]) for caches in by_device if isinstance(caches, dict) for kept in caches.values())


def fa4_variants() -> dict[str, int]:
    """What FlashAttention-4 compiled or loaded in this process, by the function that keeps it."""
    interface = sys.modules.get("flash_attn.cute.interface")
    caches = {name: getattr(function, "compile_cache", None) for name, function in vars(interface or object).items()}
    sizes = {name: len(getattr(cache, "cache", cache)) for name, cache in caches.items() if cache is not None}
    return {name.strip("_"): size for name, size in sizes.items() if size}


def summarize(times: Tensor, tokens: Sequence[int], ahead: Tensor, ahead_tokens: int) -> dict[str, Any]:
    """The figures of COLUMNS from what `race` and `race_ahead` return of a contestant, and its batches' tokens."""
    seconds, again = times[SECONDS, WARM:], times[AGAIN, WARM:]
    median, num_tokens = statistics.median(seconds.tolist()), sum(tokens[WARM:])
    rates = num_tokens / float(seconds.sum()), num_tokens / float(again.sum())
    stalls = seconds / again
    stalls /= statistics.median(stalls.tolist())
    return {
        "first_s": f"{times[SECONDS, 0]:.3f}",
        "first5_s": f"{times[SECONDS, :WARM].sum():.3f}",
        "median_s": f"{median:.5f}",
        "worst_s": f"{seconds.max():.5f}",
        "worst_over_median": f"{seconds.max() / median:.3f}",
        "above_median": int((seconds > SLOW * median).sum()),
        "worst_stall": f"{stalls.max():.3f}",
        "stalls": int((stalls > SLOW).sum()),
        "tokens_per_s": f"{rates[0]:.0f}",
        "tokens_per_s_again": f"{rates[1]:.0f}",
        "rate_ratio": f"{rates[0] / rates[1]:.4f}",
        "ahead_tokens_per_s": f"{ahead_tokens / float(ahead[SECONDS].sum()):.0f}" if ahead_tokens else "",
        "ahead_ratio": f"{float(ahead[AGAIN].sum() / ahead[SECONDS].sum()):.4f}" if ahead_tokens else "",
        **{name: int(times[row, -1]) for name, row in (("triton", TRITON), ("fa4", FA4), ("late", LATE))},
    }


def tflops(args: argparse.Namespace, batches: Sequence[Batch], seconds: Tensor) -> str:
    """Of each rank, in so many seconds of steps."""
    of_pair = 4 * batches[0].heads * args.head_dim * FLOPS["fwdbwd"] * args.layers / batches[0].cp_size
    return f"{of_pair * sum(batch.num_pairs for batch in batches) / float(seconds.sum()) / 1e12:.5g}"


def gate(ranks: Ranks, args: argparse.Namespace, heads: str, mask: str, contestant: CPMesh) -> str:
    """The status: "ok", or what is wrong with the contestant's results on two short batches."""
    for seed in (0, 1):
        case = make_batch(args, ranks, heads, mask, seed, args.gate_len * ranks.size)
        if problem := Gate(ranks, case).try_out(contestant).problem:
            return problem
    return "ok"


def contestants_of(ranks: Ranks, args: argparse.Namespace) -> dict[str, CPMesh]:
    """By layout."""
    return {layout: CPMesh(ranks.mesh, "ring", layout, args.kernel, args.transport) for layout in args.layouts}


def written(
    args: argparse.Namespace,
    ranks: Ranks,
    about: dict[str, Any],
    mask: str,
    times: Tensor,
    ahead: Tensor,
    status: str,
) -> dict[str, str]:
    """The row of one layout, after it and those of its steps are in the files."""
    batches = [make_batch(args, ranks, about["heads"], mask, seed, args.seq_len) for seed in range(times.shape[1])]
    about = about | {"mask": mask}
    about["heads_q"], about["heads_kv"] = about["heads"].split("/")
    seeds = [seed for block in seeds_ahead(args) for seed in block]
    later = [make_batch(args, ranks, about["heads"], mask, seed, args.seq_len) for seed in seeds]
    figures: dict[str, Any] = {}
    if status == "ok":
        lengths = [batch.seq_len for batch in batches]
        figures = summarize(times, lengths, ahead, sum(batch.seq_len for batch in later))
        figures["tflops"] = tflops(args, batches[WARM:], times[SECONDS, WARM:])
        figures["ahead_tflops"] = tflops(args, later, ahead[SECONDS]) if later else ""
    settings = {name: getattr(args, name) for name in ("head_dim", "median", "window", "seq_len", "layers")}
    settings["batches"] = len(batches)
    facts = about | settings | figures | {"gc": args.gc, "kernel": args.kernel, "status": status}
    row = {name: str(facts.get(name, "")) for name in COLUMNS}
    if args.csv:
        append(args.csv, COLUMNS, [row])
    if args.steps_csv and status == "ok":
        rows = []
        for i, (batch, (seconds, again, triton, fa4)) in enumerate(zip(batches, times[:LATE].T.tolist(), strict=True)):
            facts = about | {"step": i, "documents": len(batch.lengths), "tokens": batch.seq_len}
            facts |= {"pairs": batch.num_pairs, "seconds": f"{seconds:.5f}", "again_s": f"{again:.5f}"}
            facts |= {"triton": int(triton), "fa4": int(fa4)}
            rows.append({name: facts[name] for name in STEP_COLUMNS})
        append(args.steps_csv, STEP_COLUMNS, rows)
    return row


def main(argv: Sequence[str] | None = None) -> None:
    args = parse_arguments(argv)
    start = use_caches(args.caches)
    times: dict[tuple[str, str, str], Tensor] = {}
    ahead: dict[tuple[str, str, str], Tensor] = {}
    status: dict[tuple[str, str, str], str] = {}
    ranks = Ranks(args.device)
    contestants = contestants_of(ranks, args)
    cases = [(heads, mask) for heads in args.heads for mask in args.mask]
    for heads, mask in cases:
        found = race(ranks, args, heads, mask, list(contestants.values()))
        blocks = race_ahead(ranks, args, heads, mask, list(contestants.values()))
        for layout, contestant in contestants.items():
            times[heads, mask, layout], ahead[heads, mask, layout] = found[contestant.name], blocks[contestant.name]
    caches = " ".join(f"{name}={size}" for name, size in fa4_variants().items())
    for heads, mask in cases:
        for layout, contestant in contestants.items():
            status[heads, mask, layout] = gate(ranks, args, heads, mask, contestant)
    dist.destroy_process_group()
    if ranks.rank == 0:
        about = machine(ranks.device, ranks.size, args.commit) | {"start": start}
        rows = []
        for (heads, mask, layout), figures in times.items():
            facts = about | {"heads": heads, "layout": layout, "fa4_caches": caches}
            case = heads, mask, layout
            rows.append(written(args, ranks, facts, mask, figures, ahead[case], status[case]))
        shown = [
            "layout",
            "mask",
            "tokens_per_s",
            "ahead_ratio",
            "first_s",
            "median_s",
            "worst_stall",
            "late",
            "status",
        ]
        print(markdown(shown, [[str(row.get(column, "")) for column in shown] for row in rows]), flush=True)
    if any(text != "ok" for text in status.values()):
        sys.exit(1)


def use_caches(directory: Path | None) -> str:
    """Keep what is compiled there; asked before any rank can have written to it."""
    if directory is None:
        return ""
    start = "second" if directory.exists() and any(directory.iterdir()) else "cold"
    os.environ["TRITON_CACHE_DIR"] = str(directory / "triton")
    os.environ["FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED"] = "1"
    os.environ["FLASH_ATTENTION_CUTE_DSL_CACHE_DIR"] = str(directory / "fa4")
    return start


if __name__ == "__main__":
    main()
