"""Measure attention to keys that an indexer picks, at the shapes of DeepSeek-V3.2 with fewer heads, in milliseconds.

On one GPU, for each length: the choice of keys ("select"), attention forward and both passes, of all rows ("one GPU")
and of those that one rank of ``--cp-size`` holds in zigzag ("a rank"), without communication. ``ratio`` is the time of
a rank over its share of one GPU's time. Gathered are 256 and 1,152 bytes a token.

    python3 examples/benchmarks/latent.py --seq-len 32768 65536 131072 --csv latent.csv

Under torchrun with ``--dense``: causal attention of expanded keys and values ("expanded", expansion included) and
`latent_attention` ("latent") over all ranks in zigzag, both passes, the slowest rank.

    torchrun --nproc-per-node 2 examples/benchmarks/latent.py --dense --heads 16 --seq-len 32768 --csv dense.csv
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch

sys.path[:0] = [str(Path(__file__).resolve().parents[2]), str(Path(__file__).parent)]  # a checkout not installed

from attention import Ranks  # noqa: E402
from report import append, machine, options  # noqa: E402

from cp_mesh import Mask, ZigZag, attention  # noqa: E402
from cp_mesh.latent import latent_attention  # noqa: E402
from cp_mesh.latent.indexed import attend_rows  # noqa: E402
from cp_mesh.latent.selection import pick  # noqa: E402

INDEX_HEADS, INDEX_DIM, TOP_K, RANK, ROPE, DIM = 64, 128, 2048, 512, 64, 192


def ms(call: Callable[[], Any], repeats: int = 3) -> float:
    times = []
    for _ in range(repeats + 1):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        call()
        torch.cuda.synchronize()
        times.append(1e3 * (time.perf_counter() - begin))
    return median(times[1:])


def dense(args: Any) -> None:
    ranks = Ranks(args.device)
    about, nope, values = machine(ranks.device, ranks.size, args.commit), DIM - ROPE, 128
    for seq_len in args.seq_len:
        shapes = (1, args.heads, -1, DIM), (1, 1, -1, RANK), (1, 1, -1, ROPE), (args.heads * (nope + values), RANK)
        rows = seq_len // ranks.size
        leaves = [
            torch.randn([rows if n < 0 else n for n in x], device=ranks.device, dtype=torch.bfloat16).requires_grad_()
            for x in shapes
        ]
        dout = torch.randn(1, args.heads, rows, values, device=ranks.device, dtype=torch.bfloat16)
        given = {"mesh": ranks.mesh, "kernel": args.kernel}

        def expanded(q: Any, latent: Any, rope: Any, up: Any, given: Any = given) -> Any:
            keys = (latent[:, 0] @ up.t()).unflatten(-1, (args.heads, -1)).transpose(1, 2)
            k = torch.cat((keys[..., :nope], rope.expand(-1, args.heads, -1, -1)), -1)
            return attention(q, k, keys[..., nope:], **given)

        for way, run in {"expanded": expanded, "latent": partial(latent_attention, **given)}.items():
            torch.cuda.reset_peak_memory_stats()
            took = ms(lambda run=run, x=leaves, dout=dout: torch.autograd.grad(run(*x), x, dout))  # type: ignore[misc]
            slowest = float(ranks.largest(took))
            row = {"seq_len": seq_len, "heads": args.heads, "kernel": args.kernel, "way": way, "both": f"{slowest:.1f}"}
            row["peak_gib"] = f"{torch.cuda.max_memory_allocated() / 2**30:.1f}"
            ranks.append(args.csv, [*about, *row], [about | row])
            ranks.print(*row.values())
    ranks.end(False)


def main(argv: Sequence[str] | None = None) -> None:
    parser = options(__doc__)
    parser.add_argument("--seq-len", type=int, nargs="+", default=[32768])
    parser.add_argument("--cp-size", type=int, default=2)
    parser.add_argument("--heads", type=int, default=16)
    parser.add_argument("--dense", action="store_true", help="latent against expanded keys, under torchrun")
    parser.add_argument("--kernel", default="auto")
    args = parser.parse_args(argv)
    if args.dense:
        return dense(args)
    device = torch.device(args.device)
    about = machine(device, 1, args.commit)
    for seq_len in args.seq_len:

        def normal(*shape: int) -> torch.Tensor:
            return torch.randn(shape, device=device, dtype=torch.bfloat16)

        keys, index_keys = normal(1, seq_len, RANK + ROPE), normal(1, seq_len, INDEX_DIM)
        of_one: dict[str, float] = {}
        ways = {"one GPU": torch.arange(seq_len)} | {"a rank": ZigZag().positions(seq_len, args.cp_size, 0)}
        for way, rows in ways.items():
            q, index_q = normal(1, len(rows), args.heads, RANK + ROPE), normal(1, len(rows), INDEX_HEADS, INDEX_DIM)
            weights, dout = normal(1, len(rows), INDEX_HEADS), normal(1, len(rows), args.heads, RANK)
            given = index_q, index_keys, weights, TOP_K, rows, Mask(), INDEX_DIM**-0.5
            picked = pick(*given)
            leaves = q.requires_grad_(), keys.requires_grad_()

            def forward(leaves: Any = leaves, picked: torch.Tensor = picked) -> torch.Tensor:
                return attend_rows(leaves[0], leaves[1], picked, None, RANK, DIM**-0.5)

            found = {
                "select": ms(lambda given=given: pick(*given)),  # type: ignore[misc]
                "forward": ms(forward),
                "both": ms(lambda leaves=leaves, dout=dout: torch.autograd.grad(forward(), leaves, dout)),  # type: ignore[misc]
            }
            of_one = of_one or found
            total = found["select"] + found["both"]
            ratio = total * args.cp_size / (of_one["select"] + of_one["both"]) if way != "one GPU" else 1.0
            row = {"seq_len": seq_len, "heads": args.heads, "cp_size": args.cp_size, "way": way}
            row |= {name: f"{x:.1f}" for name, x in found.items()} | {"ratio": f"{ratio:.3f}"}
            row["peak_gib"] = f"{torch.cuda.max_memory_allocated() / 2**30:.1f}"
            if args.csv:
                append(args.csv, [*about, *row], [about | row])
            print(*row.values(), flush=True)


if __name__ == "__main__":
    main()
