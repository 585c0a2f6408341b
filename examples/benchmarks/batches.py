"""Time attention layers on batches that all differ, planning included: does anything stall, does balancing pay?

    torchrun --nproc-per-node 2 examples/benchmarks/batches.py --csv batches.csv

A step does what a trainer does with a new batch: make the mask of its document ids, choose the layout, shard tokens and
labels, run ``--layers`` attention layers forward and backward, and wait for the device. Its time is host time from a
barrier to the end of that wait, on the slowest rank. Then the same batch runs again with the same mask and layout, to
compare a new batch with a repeated one of equal work. Layouts take turns, each with its own mask.

Masks, all causal: "documents" of lognormal lengths (median ``--median``, sigma 1.5, cut at the end of the sequence);
"window", the same with ``--window``; "causal", one document, whose length varies from half of ``--seq-len`` to all.

A trainer does not wait for the device after every step: the host plans the next batch meanwhile. So after the steps
come ``--blocks`` blocks of 20 further batches for each layout in turn, with one wait at the end of a block, and then
the same batches again. The correctness gate runs last, on short batches: its kernels would be compiled in no step.
Garbage is collected on all ranks before every 50th batch, outside of the steps' time.

Columns, one row per layout; "later steps" are all but the first 5:

    first_s, first5_s  the first step, and the first five together, with all compilation
    median_s           of later steps
    worst_stall        the largest ratio of a step's time to the time of its batch again, over the median ratio;
                       `stalls`: how many are over 1.3
    tokens_per_s       over all later steps; `rate_ratio`: over the rate of the repeated batches
    ahead_tokens_per_s and `ahead_ratio`: the same for the blocks
    tflops             per rank, for both passes of attention on the pairs that the masks allow, over the later steps
"""

from __future__ import annotations

import argparse
import gc
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(Path(__file__).parent)]  # a checkout that is not installed

from attention import Gate, Ranks, no_garbage_collection, random_inputs  # noqa: E402
from contestants import LAYOUTS, Case, CPMesh, Inputs, document_lengths, pairs_of_window  # noqa: E402
from report import FLOPS, machine, options  # noqa: E402

from cp_mesh import Mask, ShardedSequence  # noqa: E402

WARM = 5  # steps in which everything may be compiled
SLOW = 1.3  # times the median
COLLECT = 50  # steps between collections of garbage
BLOCK = 20  # batches without a wait between them

COLUMNS = (
    *("date", "commit", "gpu", "world_size", "torch", "cuda", "cudnn", "nccl", "packages"),
    *("layout", "kernel", "heads", "head_dim", "mask", "median", "window", "seq_len", "layers", "batches"),
    *("first_s", "first5_s", "median_s", "worst_stall", "stalls", "tokens_per_s", "rate_ratio"),
    *("ahead_tokens_per_s", "ahead_ratio", "tflops", "status"),
)


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = options(__doc__)
    add = parser.add_argument
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
    add("--kernel", help="default: fa4, on CPUs reference")
    add("--transport", default="auto")
    add("--gate-len", type=int, default=256, help="rows per rank in the correctness gate")
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


class Race:
    """Batches of one kind of mask, and the tensors that all of them take their rows from."""

    def __init__(self, ranks: Ranks, args: argparse.Namespace, heads: str, mask: str) -> None:
        self.ranks, self.args, self.heads, self.mask = ranks, args, heads, mask
        longest = self.batch(0, args.seq_len, "documents")
        self.x = random_inputs(longest, longest.local_len, seed=1 + ranks.rank)
        self.tokens = torch.zeros(1, args.seq_len, dtype=torch.int64, device=ranks.device)

    def batch(self, seed: int, seq_len: int | None = None, mask: str | None = None) -> Batch:
        """A batch of a seed, with no mask yet. Of a shorter sequence documents and windows are shorter too."""
        args, ranks, mask, seq_len = self.args, self.ranks, mask or self.mask, seq_len or self.args.seq_len
        heads, kv_heads = map(int, self.heads.split("/"))
        unit, part, ids = 2 * ranks.size, max(seq_len / args.seq_len, 1 / 16), None
        if mask == "causal":
            most, generator = seq_len // unit, torch.Generator().manual_seed(seed)
            seq_len = unit * int(torch.randint(most // 2, most + 1, (), generator=generator))
            lengths: tuple[int, ...] = (seq_len,)
        else:
            lengths = document_lengths(seq_len, seed, args.median * part, seq_len)
            ids = torch.repeat_interleave(torch.arange(len(lengths), dtype=torch.int32), torch.tensor(lengths))
        window = (max(1, round(args.window * part)) - 1, 0) if mask == "window" else None
        return Batch(
            heads, kv_heads, args.head_dim, torch.bfloat16, True, seq_len // ranks.size, ranks.size, ranks.rank,
            ranks.device, "" if mask == "causal" else mask, lengths, ids, window,
        )  # fmt: skip

    def step(self, contestant: CPMesh, batch: Batch) -> None:
        sequence = ShardedSequence(self.ranks.mesh, contestant.layout(batch), length=batch.seq_len)
        sequence.shard({name: self.tokens[:, : batch.seq_len] for name in ("tokens", "labels")})
        rows, x = len(sequence.positions().to(self.ranks.device)), self.x
        local = Inputs(x.q[:, :rows], x.k[:, :rows], x.v[:, :rows], x.dout[:, :rows])
        contestant.setup(batch, local).layers(self.args.layers)

    def seconds(self, steps: Sequence[Callable[[], None]]) -> float:
        """On this rank, until the device is done with all of them."""
        self.ranks.line_up()
        begin = time.perf_counter()
        for each in steps:
            each()
        self.ranks.synchronize()
        return time.perf_counter() - begin

    @no_garbage_collection()
    def times(self, contestants: Sequence[CPMesh], blocks: Sequence[range]) -> dict[str, Tensor]:
        """By name, [2, blocks]: seconds of each block of batches, first and again, of the slowest rank."""
        found: dict[str, list[tuple[float, float]]] = {contestant.name: [] for contestant in contestants}
        for i, seeds in enumerate(blocks):
            if i % (COLLECT // len(seeds)) == 0:
                gc.collect()
            for contestant in contestants:
                steps = [partial(self.step, contestant, self.batch(seed)) for seed in seeds]
                found[contestant.name].append((self.seconds(steps), self.seconds(steps)))
        return {name: self.ranks.largest(rows).reshape(-1, 2).T for name, rows in found.items()}

    def gate(self, contestant: CPMesh) -> str:
        """The status: "ok", or what is wrong with the contestant's results on two short batches."""
        cases = [self.batch(seed, self.args.gate_len * self.ranks.size) for seed in (0, 1)]
        problems = [Gate(self.ranks, case).try_out(contestant).problem for case in cases]
        return next((problem for problem in problems if problem), "ok")

    def figures(self, times: Tensor, ahead: Tensor, blocks: Sequence[range]) -> dict[str, Any]:
        """The figures of COLUMNS from what `times` returns of steps and of blocks."""
        batches = [self.batch(seed) for seed in range(WARM, times.shape[1])]
        seconds, again = times[:, WARM:]
        stalls = seconds / again
        stalls /= statistics.median(stalls.tolist())
        rates = [sum(batch.seq_len for batch in batches) / float(x.sum()) for x in (seconds, again)]
        of_pair = 4 * batches[0].heads * self.args.head_dim * FLOPS["fwdbwd"] * self.args.layers / self.ranks.size
        found = {
            "first_s": f"{times[0, 0]:.3f}", "first5_s": f"{times[0, :WARM].sum():.3f}",
            "median_s": f"{statistics.median(seconds.tolist()):.5f}", "worst_stall": f"{stalls.max():.3f}",
            "stalls": int((stalls > SLOW).sum()), "tokens_per_s": f"{rates[0]:.0f}",
            "rate_ratio": f"{rates[0] / rates[1]:.4f}",
            "tflops": f"{of_pair * sum(batch.num_pairs for batch in batches) / float(seconds.sum()) / 1e12:.5g}",
        }  # fmt: skip
        if blocks:
            tokens, (seconds, again) = sum(self.batch(seed).seq_len for block in blocks for seed in block), ahead.sum(1)
            found |= {"ahead_tokens_per_s": f"{tokens / seconds:.0f}", "ahead_ratio": f"{again / seconds:.4f}"}
        return found


def main(argv: Sequence[str] | None = None) -> None:
    args = parse_arguments(argv)
    ranks = Ranks(args.device)
    contestants = {layout: CPMesh(ranks.mesh, "ring", layout, args.kernel, args.transport) for layout in args.layouts}
    steps = [range(seed, seed + 1) for seed in range(args.batches)]
    begins = [args.batches + BLOCK * i for i in range(args.blocks)]  # others than those of the steps
    blocks = [range(begin, begin + BLOCK) for begin in begins]
    races = [Race(ranks, args, heads, mask) for heads in args.heads for mask in args.mask]
    found = [[race.times(list(contestants.values()), of) for of in (steps, blocks)] for race in races]
    about, failed = vars(args) | machine(ranks.device, ranks.size, args.commit), False
    for race, (times, ahead) in zip(races, found, strict=True):
        for layout, contestant in contestants.items():
            status = race.gate(contestant)
            failed |= status != "ok"
            row = about | {"layout": layout, "heads": race.heads, "mask": race.mask, "status": status}
            row |= race.figures(times[contestant.name], ahead[contestant.name], blocks) if status == "ok" else {}
            row = {name: str(row.get(name, "")) for name in COLUMNS}
            ranks.print(", ".join(f"{name} {row[name]}" for name in COLUMNS[9:] if row[name]))
            ranks.append(args.csv, COLUMNS, [row])
    ranks.end(failed)


if __name__ == "__main__":
    main()
