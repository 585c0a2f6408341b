"""Time recurrent layers over cp, forward and backward: cp_mesh, flash-linear-attention's own `cp_context`, one GPU.

    torchrun --nproc-per-node 2 examples/benchmarks/mixers.py --rows 8192 32768 131072 262144 --csv mixers.csv

Layers are the gated delta rule of Qwen3.5-27B, KDA of Kimi Linear 48B, and state space duality of Nemotron 3. "gdn
layer" is a whole layer of Qwen3.5-9B: projections, convolution, rule, gated norm. A name is
"cp_mesh/METHOD/LAYOUT/KERNEL" or "fla/LAYOUT", which takes `cp_context`. "one/KERNEL" and "fla/one", the package alone,
compute the whole sequence on each rank by itself; ``of_share`` is a time over the cp-th part of the fastest of these,
so 1 is perfect. One more "/KERNEL" behind ours is that of a layer's convolution. Gradients of weights are each rank's
share. Packed documents are those of attention.py.

A gate runs first: outputs and gradients of ``--gate-rows`` rows against "torch" in float64 on one device. Errors may be
1.5 times those of the same kernel on one device. A contestant that fails it or cannot run has only a status. One that
would not fit, by its peak at an eighth of the rows, is not run: a rank alone without memory would stop the others.
Times are those of one call on the slowest rank: median, minimum and maximum over the repeats.

fla-core tunes its kernels in their first calls, for minutes: keep TRITON_CACHE_DIR between runs.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from importlib import import_module
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

sys.path[:0] = [str(Path(__file__).resolve().parents[2]), str(Path(__file__).parent)]  # a checkout not installed

from attention import OWN_FACTOR, OWN_ROUNDING, Ranks, in_turns  # noqa: E402
from contestants import document_lengths  # noqa: E402
from decoding import relative  # noqa: E402
from report import machine, options, spread  # noqa: E402

from cp_mesh import Contiguous, Mask, ShardedSequence, Striped, ZigZag, mixers  # noqa: E402

COLUMNS = (
    *("date", "commit", "gpu", "world_size", "torch", "cuda", "cudnn", "nccl", "packages"),
    *("contestant", "layer", "documents", "rows", "dtype", "repeats"),  # rows of all ranks together
    *("fwd_ms", "fwdbwd_ms", "fwdbwd_ms_min", "fwdbwd_ms_max", "of_share", "peak_gib"),
    *("error", "bound", "status"),  # RMS error over RMS of the exact result, the largest of all; and what it may be
)
LAYOUTS = {"contiguous": Contiguous(), "zigzag": ZigZag(), "striped": Striped()}


class Layer(NamedTuple):
    """A rule, its numbers of heads and channels, and the features of the layer around it, 0 for the rule alone.

    ``decays``: numbers of decay a head, 1 or K.
    """

    rule: str
    H: int
    HV: int
    K: int
    V: int
    width: int = 0
    decays: int = 1


LAYERS = {
    "gdn": Layer("gated_delta_rule", 16, 48, 128, 128),
    "kda": Layer("kda", 32, 32, 128, 128, decays=128),
    "ssd": Layer("gla", 8, 128, 128, 64),  # in half precision, as mamba-ssm computes it
    "gdn layer": Layer("gated_delta_rule", 16, 32, 128, 128, 4096),
    "tiny gdn": Layer("gated_delta_rule", 2, 4, 8, 8),
    "tiny layer": Layer("gated_delta_rule", 2, 4, 8, 8, 32),
}
TAPS = 4
FLA = ("gated_delta_rule", "kda")  # modules of fla.ops that take cp_context


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = options(__doc__, time_limit=True)
    add = parser.add_argument
    add("--layers", nargs="+", choices=tuple(LAYERS), default=list(LAYERS)[:3])
    add("--rows", type=int, nargs="+", default=[8192, 32768, 131072], help="rows of all ranks together")
    add("--documents", nargs="+", choices=("one", "packed"), default=["one"])
    add("--dtype", default="bfloat16", choices=("bfloat16", "float16", "float32"))
    add("--contestants", nargs="+", default=DEFAULT, help="names as above")
    add("--gate-rows", type=int, default=2048)
    add("--repeats", type=int, default=5)
    add("--calls", type=int, default=3)
    return parser.parse_args(argv)


DEFAULT = [
    *("one/fla", "one/torch", "fla/one", "fla/contiguous", "fla/zigzag"),
    *(f"cp_mesh/states/{layout}/{kernel}" for kernel in ("fla", "torch") for layout in ("contiguous", "zigzag")),
    *("cp_mesh/heads/zigzag/fla", "cp_mesh/heads/striped/fla"),
]

Given = tuple[list[Tensor], list[Tensor]]


def whole_inputs(layer: Layer, rows: int, device: torch.device, dtype: torch.dtype) -> Given:
    """Rows and weights, equal on every rank.

    Rows are q, k, v, g and beta if the rule has them, or the input of the layer; and the gradient of the output.
    Weights of a layer: of q, k and v; gate; beta and decay; convolution; A_log, dt_bias; norm; output.
    Some heads forget within tokens, others hardly: otherwise a wrong state of another rank would show in no result.
    """
    made = torch.Generator(device).manual_seed(0)
    normal = partial(torch.randn, generator=made, device=device)
    if layer.width:
        of_v, width = layer.HV * layer.V, layer.width
        of_all = 2 * layer.H * layer.K + of_v
        shapes = (of_all, width), (of_v, width), (2 * layer.HV, width), (of_all, TAPS), (width, of_v)
        *weights, out = ((normal(shape) * shape[1] ** -0.5).to(dtype) for shape in shapes)
        A_log, dt_bias, norm = torch.linspace(-8, -1, layer.HV), torch.full((layer.HV,), 0.5), torch.ones(layer.V)
        weights += [*(x.to(device, dtype) for x in (A_log, dt_bias, norm)), out]
        return [normal(1, rows, width).to(dtype) for _ in range(2)], weights
    q, k = (F.normalize(normal(1, rows, layer.H, layer.K), dim=-1).to(dtype) for _ in range(2))
    v, grad = (normal(1, rows, layer.HV, layer.V).to(dtype) for _ in range(2))
    g = -normal(1, rows, layer.HV, layer.decays).abs() * torch.logspace(-5, -1, layer.HV, device=device)[:, None]
    decay = g.squeeze(-1) if layer.decays == 1 else g
    beta = [] if layer.rule == "gla" else [normal(1, rows, layer.HV).sigmoid().to(dtype)]
    return [q, k, v, decay, *beta, grad], []


def whole_layer(
    layer: Layer, functions: Functions, x: Tensor, qkv: Tensor, gate: Tensor, of_beta: Tensor, taps: Tensor,
    A_log: Tensor, dt_bias: Tensor, norm: Tensor, out: Tensor,
) -> Tensor:  # fmt: skip
    """As in Qwen3.5, of x [1, rows, width]."""
    of_k = layer.H * layer.K
    q, k, v = functions.convolve(F.linear(x, qkv), taps).split([of_k, of_k, layer.HV * layer.V], -1)
    q, k, v = q.unflatten(2, (-1, layer.K)), k.unflatten(2, (-1, layer.K)), v.unflatten(2, (-1, layer.V))
    b, a = F.linear(x, of_beta).chunk(2, -1)
    dtype = torch.promote_types(x.dtype, torch.float32)
    g = -A_log.to(dtype).exp() * F.softplus(a.to(dtype) + dt_bias)
    found, _ = functions.mix(q, k, v, g, b.sigmoid(), use_qk_l2norm_in_kernel=True)
    z = F.linear(x, gate).view_as(found)
    return F.linear(functions.gated_norm(found, z, norm).flatten(2), out)


def norm_by_torch(x: Tensor, z: Tensor, weight: Tensor) -> Tensor:
    return F.rms_norm(x, weight.shape, weight, 1e-6) * F.silu(z)


def norm_by_fla(x: Tensor, z: Tensor, weight: Tensor) -> Tensor:
    return import_module("fla.modules.norm.fused_norm_gate").rms_norm_gated(x, z, weight, None, "swish", eps=1e-6)


class Functions(NamedTuple):
    """Of q, k, v, g, beta to output and state; of rows and taps; of the output, the gate and a weight."""

    mix: Callable[..., Any]
    convolve: Callable[..., Tensor]
    gated_norm: Callable[..., Tensor]


def mask_of(documents: str, rows: int) -> Mask | None:
    lengths = document_lengths(rows) if documents == "packed" else ()
    return Mask.from_cu_seqlens(torch.tensor((0, *lengths)).cumsum(0)) if lengths else None


class Run:
    """A contestant on a layer and a number of rows."""

    def __init__(self, name: str, layer: Layer, documents: str, given: Given, ranks: Ranks) -> None:
        kind, *words = name.split("/")
        rows, weights = given
        mesh, at = (ranks.alone, "contiguous") if is_alone(name) else (ranks.mesh, words[kind != "fla"])
        self.sequence = ShardedSequence(mesh, length=rows[0].shape[1], layout=LAYOUTS[at], pad=False)
        *own, self.grad = self.sequence.shard(rows)
        self.given = [x.detach().contiguous().requires_grad_() for x in own]
        self.weights = [x.detach().requires_grad_() for x in weights]
        if kind == "fla":
            functions = self._of_fla(layer, documents, words[0], ranks)
        else:
            method, kernel = ("auto", words[0]) if kind == "one" else (words[0], words[2])
            options: dict[str, Any] = {"sequence": self.sequence, "mask": mask_of(documents, rows[0].shape[1])}
            convolve = partial(mixers.causal_conv1d, activation="silu", kernel=words[-1], **options)
            mix = partial(getattr(mixers, layer.rule), method=method, kernel=kernel, **options)
            functions = Functions(mix, convolve, norm_by_fla if kernel == "fla" else norm_by_torch)
        alone = lambda *given: functions.mix(*given)[0]  # noqa: E731
        self.call: Callable[..., Tensor] = partial(whole_layer, layer, functions) if layer.width else alone

    def _of_fla(self, layer: Layer, documents: str, layout: str, ranks: Ranks) -> Functions:
        interpreted = os.environ.get("TRITON_INTERPRET") == "1"
        if layer.rule not in FLA or (ranks.device.type != "cuda" and not interpreted):
            raise NotImplementedError("fla-core has cp_context for the delta rules, on GPUs")
        rows = self.sequence.seq_len
        assert rows is not None
        bounds = torch.tensor((0, *(document_lengths(rows) if documents == "packed" else (rows,)))).cumsum(
            0, dtype=torch.int32
        )
        options: dict[str, Any] = {"cu_seqlens": bounds.to(ranks.device), "cu_seqlens_cpu": bounds}
        if layout != "one":
            build, group = import_module("fla.ops.cp").build_cp_context, ranks.mesh.get_group()
            context = build(options["cu_seqlens"], group, TAPS, cu_seqlens_cpu=bounds, layout=layout)
            options = {"cp_context": context, "cu_seqlens": context.cu_seqlens}
        function = getattr(import_module(f"fla.ops.{layer.rule}"), f"chunk_{layer.rule}")
        convolution = import_module("fla.modules.causal_conv1d").causal_conv1d
        convolve = lambda x, taps: convolution(x, taps, activation="silu", **options)[0]  # noqa: E731
        return Functions(partial(function, **options), convolve, norm_by_fla)

    def forward(self) -> Tensor:
        return self.call(*self.given, *self.weights)

    def both(self) -> list[Tensor]:
        """The output, and the gradients of this rank's rows and of the weights."""
        out = self.forward()
        return [out.detach(), *torch.autograd.grad(out, [*self.given, *self.weights], self.grad)]


def is_alone(name: str) -> bool:
    return name.startswith("one/") or name == "fla/one"


def gate(
    layer: Layer, documents: str, args: argparse.Namespace, ranks: Ranks, report: Callable[..., None]
) -> dict[str, dict[str, Any]]:
    """Of each contestant the largest error over results and ranks, what it may be, and what became of it."""
    inputs = whole_inputs(layer, args.gate_rows, ranks.device, getattr(torch, args.dtype))
    exact = [x.double() for x in inputs[0]], [x.double() for x in inputs[1]]
    want, problem = ranks.attempt(lambda: Run("one/torch", layer, documents, exact, ranks).both())
    found: dict[str, dict[str, Any]] = {}
    if want is None:
        ranks.print(f"no gate: {problem}")
        return found

    def error_of(name: str) -> tuple[float, str | None]:
        def error() -> float:
            run = Run(name, layer, documents, inputs, ranks)
            own, rows = run.both(), 1 + len(run.given)
            pairs = [*zip(own[:rows], run.sequence.shard(want[:rows]), strict=True)]
            pairs += [(run.sequence.all_reduce(x.double()), y) for x, y in zip(own[rows:], want[rows:], strict=True)]
            return max(relative(x.double(), y) for x, y in pairs)

        error, problem = ranks.attempt(error)
        return float(ranks.largest(torch.inf if error is None else error)), problem

    of_kernels: dict[str, float] = {}
    for name in args.contestants:
        kernel = "fla" if name.startswith("fla/") else name.split("/")[1 if name.startswith("one/") else 3]
        if kernel not in of_kernels:
            of_kernels[kernel] = error_of(f"one/{kernel}")[0]
        bound = OWN_FACTOR * of_kernels[kernel] + OWN_ROUNDING
        error, problem = error_of(name)
        failed = "" if error <= bound < torch.inf else f"failed the gate: {error:.1e} > {bound:.1e}"
        found[name] = {"error": f"{error:.1e}", "bound": f"{bound:.1e}", "status": problem or failed or "ok"}
        report(args.gate_rows, name, found[name])
    return found


def race(
    name: str, layer: Layer, documents: str, rows: int, args: argparse.Namespace, ranks: Ranks
) -> tuple[list[list[float]], dict[str, str]]:
    """Milliseconds of forwards and of both passes on the slowest rank, by repeat; peak or problem for its row."""
    cuda, dtype = ranks.device.type == "cuda", getattr(torch, args.dtype)

    def first(rows: int) -> tuple[Run | None, float, float, str | None]:
        """A run after its first call; bytes of its inputs, and of all that any rank allocated at most; its problem."""
        ranks.release()
        before = torch.cuda.memory_allocated() if cuda else 0
        if cuda:
            torch.cuda.reset_peak_memory_stats()
        given = partial(whole_inputs, layer, rows, ranks.device, dtype)
        run, problem = ranks.attempt(lambda: Run(name, layer, documents, given(), ranks))
        inputs = torch.cuda.memory_allocated() - before if cuda else 0
        if run is not None:
            _, problem = ranks.attempt(lambda: run.both() and None)
        most = torch.cuda.max_memory_allocated() - before if cuda else 0
        inputs, most = ranks.largest([inputs, most]).tolist()
        return run if problem is None else None, inputs, most, problem

    if cuda and rows >= SCALED * args.gate_rows:
        most, problem = first(rows // SCALED)[2:]
        ranks.release()
        free, needs = -float(ranks.largest(-torch.cuda.mem_get_info()[0])), SCALED * most
        if problem is None and needs > 0.97 * free:
            problem = f"out of memory: needs about {needs / 2**30:.0f} GiB of {free / 2**30:.0f}"
        if problem is not None:
            return [], {"status": problem}
    run, inputs, most, problem = first(rows)
    if run is None:
        return [], {"status": problem or "error"}
    calls = {name: (run.forward, run.both)}
    times, problem = ranks.attempt(lambda: in_turns(ranks, calls, args.repeats, args.calls)[name])
    found = {"peak_gib": f"{(most - inputs) / 2**30:.4f}"} if cuda else {}
    return ([], {"status": problem or "error"}) if times is None else (times, found)


SCALED = 8
"""By how much fewer rows are run first, to know what memory all need."""


def main(argv: Sequence[str] | None = None) -> None:
    args = parse_arguments(argv)
    args.contestants.sort(key=lambda name: not is_alone(name))  # the others are compared with those alone
    ranks = Ranks(args.device)
    about = machine(ranks.device, ranks.size, args.commit) | {"dtype": args.dtype, "repeats": args.repeats}
    began, failed = time.monotonic(), False
    for key, documents in product(args.layers, args.documents):

        def report(rows: int, name: str, found: dict[str, Any], of: tuple[str, str] = (key, documents)) -> None:
            row = about | {"contestant": name, "layer": of[0], "documents": of[1], "rows": rows} | found
            figures = " ".join(f"{row.get(x, ''):>10}" for x in ("fwd_ms", "fwdbwd_ms", "of_share", "error"))
            what = f"{of[0]:8} {of[1]:6} {rows:>7} {name:32} fwd, both, of share, error:"
            ranks.print(f"{what} {figures}  {row['status']}")
            ranks.append(args.csv, COLUMNS, [row])

        verdicts = gate(LAYERS[key], documents, args, ranks, report)
        failed |= not verdicts or any(found["status"].startswith("failed") for found in verdicts.values())
        for rows in args.rows:
            best = float("inf")
            for name, verdict in verdicts.items():
                if verdict["status"] != "ok":
                    continue
                if ranks.largest(time.monotonic() - began) > args.time_limit:
                    report(rows, name, {"status": "left out: the time limit"})
                    continue
                times, found = race(name, LAYERS[key], documents, rows, args, ranks)
                if times:
                    forward, both = times
                    ms = statistics.median(both)
                    best = min(best, ms) if is_alone(name) else best
                    found |= {"fwd_ms": f"{statistics.median(forward):.4f}"} | spread("fwdbwd", both)
                    found |= {"of_share": f"{ms * ranks.size / best:.4g}"} if best < float("inf") else {}
                report(rows, name, verdict | found)
    ranks.end(failed)


if __name__ == "__main__":
    main()
