"""Rounding of fla-core's kernels on one GPU, rule by rule: `python tests/fla_on_gpu.py`, a table.

The delta rule, and gated linear attention with one decay a channel or without, may err 1.5 times as much as a rule that
computes the same of other arguments: the gated delta rule, or simple GLA, with decays of 0, or with equal channels.
Channels that differ are held against KDA, the other rule with a decay for each. Exits with 1 if any errs more.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, multiprocessing

sys.path[:0] = [str(Path(__file__).resolve().parent), str(Path(__file__).resolve().parents[1])]

from gpu import part_of  # noqa: E402
from inside import inner  # noqa: E402

H, HV, SCALE, FACTOR = 2, 4, 0.3, 1.5
NAMES = "q", "k", "v", "g", "beta", "initial"


class Case(NamedTuple):
    """Decays and whether it is a delta rule, of a rule and of that which it is held against; the decay of some rows."""

    decay: str
    delta: bool
    other: str
    other_delta: bool
    strong: float = 0.0


CASES = {
    "delta_rule": Case("none", True, "zero", True),
    "gla without decay": Case("none", False, "zero", False),
    "gla, equal channels": Case("equal", False, "heads", False),
    "gla": Case("channels", False, "channels", True),
    "gla, strong decays": Case("channels", False, "channels", True, -1e4),
    "gla, resets": Case("channels", False, "channels", True, -torch.inf),
}


class Sizes(NamedTuple):
    lens: list[int]
    dim: int
    dtype: torch.dtype
    device: str


def found(kernel: str, decay: str, delta: bool, strong: float, sizes: Sizes) -> dict[str, Tensor]:
    """Outputs, states and gradients by name, as float64. Inputs are exact in bfloat16; some heads hardly forget."""
    lens, dim, dtype, device = sizes
    made, rows = torch.Generator().manual_seed(0), sum(lens)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=made)

    q, k, v, beta = (
        normal(rows, H, dim),
        F.normalize(normal(rows, H, dim), dim=-1),
        normal(rows, HV, dim),
        normal(rows, HV),
    )
    channels = -normal(rows, HV, dim).abs() * torch.logspace(-3, 0, HV)[:, None]
    channels = channels.where(torch.rand(channels.shape, generator=made) > (0.05 if strong else 0), strong)
    heads = channels[..., 0]
    equal = heads[..., None].expand_as(channels)
    g = {"none": None, "zero": torch.zeros_like(heads), "heads": heads, "equal": equal, "channels": channels}[decay]
    states = len(lens), HV, dim, dim
    wide = torch.promote_types(dtype, torch.float32)
    given = zip(
        (q, k, v, g, beta.sigmoid() if delta else None, normal(*states)), [dtype] * 3 + [wide, dtype, wide], strict=True
    )
    inputs = [x if x is None else x.bfloat16().to(device, y).requires_grad_() for x, y in given]
    run = inner("mixers.kernels", "choose_kernel")("a rule", kernel, *inputs[:5])
    outs = run(inner("mixers.reference", "Inputs")(*inputs[:5]), inputs[5], lens, SCALE)
    wanted = {name: x for name, x in zip(NAMES, inputs, strict=True) if x is not None}
    grads = [normal(*x.shape).to(x) for x in outs]
    results = {"out": outs[0], "states": outs[1]}
    results |= zip(wanted, torch.autograd.grad(outs, [*wanted.values()], grads), strict=True)
    if decay == "equal":
        results["g"] = results["g"].sum(-1)
    return {name: x.detach().double() for name, x in results.items()}


def errors(kernel: str, decay: str, delta: bool, strong: float, sizes: Sizes) -> dict[str, float]:
    exact = found("reference", decay, delta, strong, sizes._replace(dtype=torch.float64))
    own = found(kernel, decay, delta, strong, sizes)
    return {name: float((own[name] - x).norm() / x.norm().clamp(min=1e-30)) for name, x in exact.items()}


def passes(name: str, sizes: Sizes) -> bool:
    """Whether no error is too large; prints them."""
    decay, delta, *of_other, strong = CASES[name]
    own, plain = (errors(kernel, decay, delta, strong, sizes) for kernel in ("fla", "reference"))
    other = errors("fla", *of_other, strong, sizes)
    passed = all(error <= FACTOR * other[x] + 1e-9 for x, error in own.items())
    figures = "  ".join(f"{x} {error:.1e} {other[x]:.1e} {plain[x]:.1e}" for x, error in own.items())
    print(f"{'ok' if passed else 'FAILED':6} {name:20} {sizes.lens}  {figures}", flush=True)
    return passed


def check(name: str, packings: list[list[int]], dim: int, dtype: str, device: str) -> None:
    sys.exit(not all([passes(name, Sizes(lens, dim, getattr(torch, dtype), device)) for lens in packings]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=1024)
    parser.add_argument("--dim", type=int, default=128)
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float16"))
    parser.add_argument("--part", help="1/3: one third of the rules")
    args = parser.parse_args()
    third = args.rows // 3
    packings = [args.rows], [third, 0, 1, args.rows - third - 1]
    print("errors: of the rule, of the other rule, of the specification in the same dtype", flush=True)
    # a process each: in its first calls the package tunes its kernels, for minutes
    of_all = packings, args.dim, args.dtype, "cuda"
    spawn = multiprocessing.get_context("spawn").Process
    started = [spawn(target=check, args=(name, *of_all)) for name in part_of([*CASES], args.part)]
    for process in started:
        process.start()
    for process in started:
        process.join()
    sys.exit(any(process.exitcode for process in started))


if __name__ == "__main__":
    main()
