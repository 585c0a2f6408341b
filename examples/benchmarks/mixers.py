"""Time recurrent layers over cp, forward and backward: cp_mesh, flash-linear-attention's own `cp_context`, one GPU.

    torchrun --nproc-per-node 2 examples/benchmarks/mixers.py --rows 8192 32768 131072 262144 --csv mixers.csv

Layers are the gated delta rule of Qwen3.5-27B, KDA of Kimi Linear 48B, and state space duality of Nemotron 3. A name is
"cp_mesh/METHOD/LAYOUT/KERNEL" or "fla/LAYOUT", which takes `cp_context`. "one/KERNEL" computes the whole sequence on
each rank by itself; ``of_share`` is a time over the cp-th part of the fastest of these, so 1 is perfect. Packed
documents are those of attention.py.

A gate runs first: outputs and gradients of ``--gate-rows`` rows against "torch" in float64 on one device. Errors may be
1.5 times those of the same kernel on one device. A contestant that fails it or cannot run has only a status. Times are
those of one call on the slowest rank: median, minimum and maximum over the repeats. fla-core tunes its kernels in the
first call of each length, for minutes: keep TRITON_CACHE_DIR between runs.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

sys.path[:0] = [str(Path(__file__).resolve().parents[2]), str(Path(__file__).parent)]  # a checkout not installed

from attention import OWN_FACTOR, OWN_ROUNDING, Ranks, in_turns  # noqa: E402
from contestants import document_lengths  # noqa: E402
from decoding import relative  # noqa: E402
from report import append, machine  # noqa: E402

from cp_mesh import Contiguous, Mask, ShardedSequence, Striped, ZigZag, mixers  # noqa: E402

COLUMNS = (
    *("date", "commit", "gpu", "world_size", "torch", "cuda", "cudnn", "nccl", "packages"),
    *("contestant", "layer", "documents", "rows", "dtype", "repeats"),  # rows of all ranks together
    *("fwd_ms", "fwdbwd_ms", "fwdbwd_ms_min", "fwdbwd_ms_max", "of_share", "peak_gib"),
    *("error", "bound", "status"),  # RMS error over RMS of the exact result, the largest of all; and what it may be
)
LAYOUTS = {"contiguous": Contiguous(), "zigzag": ZigZag(), "striped": Striped()}


class Layer(NamedTuple):
    """A rule, and its numbers of heads and channels."""

    rule: str
    H: int
    HV: int
    K: int
    V: int


LAYERS = {
    "gdn": Layer("gated_delta_rule", 16, 48, 128, 128),
    "kda": Layer("kda", 32, 32, 128, 128),
    "ssd": Layer("gla", 8, 128, 128, 64),  # in half precision, as mamba-ssm computes it
    "tiny gdn": Layer("gated_delta_rule", 2, 4, 8, 8),
    "tiny kda": Layer("kda", 2, 2, 8, 8),
}
FLA = {"gated_delta_rule": "gated_delta_rule", "kda": "kda"}  # modules of fla.ops that take cp_context


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--device", choices=("cuda", "cpu"), default="cuda" if torch.cuda.is_available() else "cpu")
    add("--layers", nargs="+", choices=tuple(LAYERS), default=list(LAYERS)[:3])
    add("--rows", type=int, nargs="+", default=[8192, 32768, 131072], help="rows of all ranks together")
    add("--documents", nargs="+", choices=("one", "packed"), default=["one"])
    add("--dtype", default="bfloat16", choices=("bfloat16", "float16", "float32"))
    add("--contestants", nargs="+", default=DEFAULT, help="names as above")
    add("--gate-rows", type=int, default=2048)
    add("--repeats", type=int, default=5)
    add("--calls", type=int, default=3)
    add("--time-limit", type=float, default=float("inf"), help="start nothing more after this many seconds")
    add("--csv", type=Path, help="append a row for each contestant")
    add("--commit", help="recorded in the rows (default: ask git)")
    return parser.parse_args(argv)


DEFAULT = [
    *("one/fla", "one/torch", "fla/contiguous", "fla/zigzag"),
    *(f"cp_mesh/states/{layout}/{kernel}" for kernel in ("fla", "torch") for layout in ("contiguous", "zigzag")),
    *("cp_mesh/heads/zigzag/fla", "cp_mesh/heads/striped/fla"),
]


def whole_inputs(layer: Layer, rows: int, device: torch.device, dtype: torch.dtype) -> list[Tensor]:
    """q, k, v, g, beta if the rule has it, and the gradient of the output: equal on every rank."""
    made = torch.Generator(device).manual_seed(0)
    normal = partial(torch.randn, generator=made, device=device)
    q, k = (F.normalize(normal(1, rows, layer.H, layer.K), dim=-1).to(dtype) for _ in range(2))
    v, grad = (normal(1, rows, layer.HV, layer.V).to(dtype) for _ in range(2))
    g = -0.1 * normal(1, rows, layer.HV, *([layer.K] if layer.rule == "kda" else [])).abs()
    beta = [] if layer.rule == "gla" else [normal(1, rows, layer.HV).sigmoid().to(dtype)]
    return [q, k, v, g, *beta, grad]


def mask_of(documents: str, rows: int) -> Mask | None:
    lengths = document_lengths(rows) if documents == "packed" else ()
    return Mask.from_cu_seqlens(torch.tensor((0, *lengths)).cumsum(0)) if lengths else None


class Run:
    """A contestant on a layer and a number of rows."""

    def __init__(self, name: str, layer: Layer, documents: str, inputs: list[Tensor], ranks: Ranks) -> None:
        kind, *words = name.split("/")
        rows = inputs[0].shape[1]
        mesh = ranks.alone if kind == "one" else ranks.mesh
        self.layout = LAYOUTS[{"one": "contiguous", "fla": words[0]}.get(kind, words[min(1, len(words) - 1)])]
        self.sequence = ShardedSequence(mesh, length=rows, layout=self.layout, pad=False)
        *given, self.grad = self.sequence.shard(inputs)
        self.given = [x.detach().contiguous().requires_grad_() for x in given]
        if kind == "fla":
            self.call = self._of_fla(layer, documents, rows, words[0], ranks)
        else:
            method, kernel = ("auto", words[0]) if kind == "one" else (words[0], words[2])
            options = {"sequence": self.sequence, "mask": mask_of(documents, rows), "method": method, "kernel": kernel}
            self.call = partial(getattr(mixers, layer.rule), **options)

    def _of_fla(self, layer: Layer, documents: str, rows: int, layout: str, ranks: Ranks) -> Any:
        if layer.rule not in FLA or self.given[0].device.type != "cuda":
            raise NotImplementedError("fla-core has cp_context for the delta rules, on GPUs")
        lengths = document_lengths(rows) if documents == "packed" else (rows,)
        bounds = torch.tensor((0, *lengths), dtype=torch.int32).cumsum(0, dtype=torch.int32)
        build = import_module("fla.ops.cp").build_cp_context
        context = build(bounds.to(ranks.device), ranks.mesh.get_group(), cu_seqlens_cpu=bounds, layout=layout)
        function = getattr(import_module(f"fla.ops.{FLA[layer.rule]}"), f"chunk_{FLA[layer.rule]}")
        return partial(function, cp_context=context, cu_seqlens=context.cu_seqlens)

    def forward(self) -> Tensor:
        return self.call(*self.given)[0]

    def both(self) -> list[Tensor]:
        """The output and the gradients of this rank's rows."""
        out = self.forward()
        return [out.detach(), *torch.autograd.grad(out, self.given, self.grad)]


def gate(layer: Layer, documents: str, args: argparse.Namespace, ranks: Ranks) -> dict[str, tuple[float, float, str]]:
    """Of each contestant the largest error over results and ranks, what it may be, and what became of it."""
    inputs = whole_inputs(layer, args.gate_rows, ranks.device, getattr(torch, args.dtype))
    want = Run("one/torch", layer, documents, [x.double() for x in inputs], ranks).both()
    found: dict[str, tuple[float, float, str]] = {}

    def error_of(name: str) -> tuple[float, str | None]:
        def error() -> float:
            run = Run(name, layer, documents, inputs, ranks)
            pairs = zip(run.both(), run.sequence.shard(want), strict=True)
            return max(relative(x.double(), y) for x, y in pairs)

        error, problem = ranks.attempt(error)
        return float(ranks.largest(torch.inf if error is None else error)), problem

    of_kernels: dict[str, float] = {}
    for name in args.contestants:
        kernel = "fla" if name.startswith("fla/") else name.rpartition("/")[2]
        if kernel not in of_kernels:
            of_kernels[kernel] = error_of(f"one/{kernel}")[0]
        bound = OWN_FACTOR * of_kernels[kernel] + OWN_ROUNDING
        error, problem = error_of(name)
        failed = "" if error <= bound else f"failed the gate: {error:.1e} > {bound:.1e}"
        found[name] = error, bound, problem or failed or "ok"
    return found


def race(
    names: Sequence[str], layer: Layer, documents: str, rows: int, args: argparse.Namespace, ranks: Ranks
) -> tuple[dict[str, Any], dict[str, float]]:
    """Of each: milliseconds of forwards and of both passes on the slowest rank, by repeat, and its peak in GiB."""
    inputs, runs, peaks = whole_inputs(layer, rows, ranks.device, getattr(torch, args.dtype)), {}, {}
    for name in names:
        run, problem = ranks.attempt(lambda name=name: Run(name, layer, documents, inputs, ranks))
        if problem is None and ranks.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            _, problem = ranks.attempt(lambda run=run: run.both() and None)
            peaks[name] = float(ranks.largest(torch.cuda.max_memory_allocated() - before)) / 2**30
        if problem is None:
            runs[name] = run
        else:
            ranks.print(f"{name}: {problem}")
    return in_turns(
        ranks, {name: (run.forward, run.both) for name, run in runs.items()}, args.repeats, args.calls
    ), peaks


def main(argv: Sequence[str] | None = None) -> None:
    args = parse_arguments(argv)
    ranks = Ranks(args.device)
    about = machine(ranks.device, ranks.size, args.commit) | {"dtype": args.dtype, "repeats": args.repeats}
    began, failed = time.monotonic(), False
    for key, documents in ((key, documents) for key in args.layers for documents in args.documents):
        verdicts = gate(LAYERS[key], documents, args, ranks)
        failed |= any(status.startswith("failed") for *_, status in verdicts.values())
        for rows in args.rows:
            if ranks.largest(time.monotonic() - began) > args.time_limit:
                ranks.print(f"{key} {rows} rows: left out, the time limit")
                continue
            names = [name for name, (*_, status) in verdicts.items() if status == "ok"]
            times, peaks = race(names, LAYERS[key], documents, rows, args, ranks)
            ms = {name: statistics.median(both) for name, (_, both) in times.items()}
            share = min((x for name, x in ms.items() if name.startswith("one/")), default=float("nan")) / ranks.size
            table = []
            for name, (error, bound, status) in verdicts.items():
                row = about | {"contestant": name, "layer": key, "documents": documents, "rows": rows, "status": status}
                row |= {"date": datetime.now(UTC).isoformat(timespec="seconds")}
                row |= {"error": f"{error:.1e}", "bound": f"{bound:.1e}"}
                if name in times:
                    forward, both = times[name]
                    row |= {"fwd_ms": f"{statistics.median(forward):.4f}", "fwdbwd_ms": f"{ms[name]:.4f}"}
                    row |= {"fwdbwd_ms_min": f"{min(both):.4f}", "fwdbwd_ms_max": f"{max(both):.4f}"}
                    row |= {"of_share": f"{ms[name] / share:.4g}"}
                    row |= {"peak_gib": f"{peaks[name]:.4f}"} if name in peaks else {}
                table.append(row)
                figures = " ".join(f"{row.get(x, ''):>10}" for x in ("fwd_ms", "fwdbwd_ms", "of_share", "error"))
                ranks.print(
                    f"{key:8} {documents:6} {rows:>7} {name:32} fwd, both, of share, error: {figures}  {status}"
                )
            if args.csv is not None and ranks.rank == 0:
                append(args.csv, COLUMNS, table)
    dist.barrier()
    dist.destroy_process_group()
    if failed:
        sys.exit(1)


if __name__ == "__main__":
    main()
