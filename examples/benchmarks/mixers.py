"""Recurrent layers over two or more GPUs: exact to the kernel's rounding, and how fast, against one GPU and FLA's own.

    torchrun --nproc-per-node 2 examples/benchmarks/mixers.py --csv mixers.csv

First the gate: outputs and gradients of the rules in bfloat16 against the recurrence in float64, whose error may be
1.5 times that of the kernel on one GPU. Then forward and backward of the operator, in turns: cp_mesh with states and
with heads, flash-linear-attention's ``cp_context`` (contiguous), and the kernel on one GPU with all tokens.
"""

from __future__ import annotations

import argparse
import csv
import os
import subprocess
import sys
from collections.abc import Callable
from datetime import date
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT)]

from cp_mesh import Contiguous, Mask, ShardedSequence, ZigZag, mixers  # noqa: E402
from cp_mesh.mixers.kernels import _fla  # noqa: E402
from cp_mesh.mixers.reference import recurrence  # noqa: E402

NAMES = ("q", "k", "v", "g", "beta")


def inputs(S: int, H: int, HV: int, D: int, seed: int = 0) -> dict[str, Tensor]:
    made = torch.Generator("cuda").manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(1, S, *shape, device="cuda", generator=made)

    found = {"q": F.normalize(normal(H, D), dim=-1), "k": F.normalize(normal(H, D), dim=-1), "v": normal(HV, D)}
    found = {name: x.bfloat16() for name, x in found.items()}
    return found | {"g": -F.softplus(normal(HV)), "beta": normal(HV).sigmoid()}


RULES: dict[str, tuple[Callable[..., Any], tuple[str, ...]]] = {
    "gated_delta_rule": (mixers.gated_delta_rule, NAMES),
    "gla": (mixers.gla, NAMES[:4]),
}


def direct(run: Any, x: dict[str, Tensor], names: tuple[str, ...], lens: list[int], grad: Tensor) -> list[Tensor]:
    """Output and gradients of all tokens on this GPU."""
    given = {name: x[name].detach().requires_grad_() if name in names else None for name in NAMES}
    flat = [None if y is None else y[0] for y in given.values()]
    (HV, V), K = flat[2].shape[1:], flat[1].shape[2]
    initial = torch.zeros(len(lens), HV, K, V, device="cuda", dtype=torch.promote_types(flat[2].dtype, torch.float32))
    out, _ = run(*flat, initial, lens, K**-0.5)
    return [out[None], *torch.autograd.grad(out, [given[name] for name in names], grad[0].to(out.dtype))]


def gate(rule: str, S: int, packed: bool, rank: int, group: Any) -> list[float]:
    """Errors relative to those of the kernel on one GPU, of the output and of each gradient."""
    function, names = RULES[rule]
    x, lens = inputs(S, 2, 4, 128), [S // 3, S // 2, S - S // 3 - S // 2] if packed else [S]
    grad = torch.randn(1, S, 4, 128, device="cuda", generator=torch.Generator("cuda").manual_seed(9)).bfloat16()
    truth = direct(recurrence, {name: y.double() for name, y in x.items()}, names, lens, grad.double())
    kernel = direct(_fla, x, names, lens, grad)
    sequence = ShardedSequence(group, layout=ZigZag(), length=S)
    ids = torch.repeat_interleave(torch.arange(len(lens)), torch.tensor(lens))
    mask = Mask(documents=ids) if packed else None
    local = {name: y.requires_grad_() for name, y in sequence.shard({n: x[n] for n in names}).items()}
    out, _ = function(*local.values(), sequence=sequence, mask=mask, method="states")
    grads = torch.autograd.grad(out, [*local.values()], sequence.shard(grad))
    found = [sequence.unshard(y) for y in (out.detach(), *grads)]
    return [
        float((ours.double() - t).norm() / (theirs.double() - t).norm())
        for ours, theirs, t in zip(found, kernel, truth, strict=True)
    ]


def timed(step: Callable[[], Any], repeats: int) -> float:
    """Median ms of the slowest rank."""
    for _ in range(2):
        step()
    times = []
    for _ in range(repeats):
        dist.barrier()
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        step()
        end.record()
        torch.cuda.synchronize()
        took = torch.tensor(begin.elapsed_time(end), device="cuda")
        dist.all_reduce(took, dist.ReduceOp.MAX)
        times.append(float(took))
    return sorted(times)[len(times) // 2]


def contestants(S: int, H: int, HV: int, D: int, mesh: Any) -> dict[str, Callable[[], Any]]:
    x, function = inputs(S, H, HV, D), mixers.gated_delta_rule
    grad = torch.randn_like(x["v"])

    def ours(layout: Any, method: str) -> Callable[[], Any]:
        sequence = ShardedSequence(mesh, layout=layout, length=S)
        local = [y.requires_grad_() for y in sequence.shard(x).values()]
        own = sequence.shard(grad)

        def step() -> None:
            out, _ = function(*local, sequence=sequence, method=method)
            torch.autograd.grad(out, local, own)

        return step

    def one_gpu() -> None:
        direct(_fla, x, NAMES, [S], grad)

    found = {
        "states, zigzag": ours(ZigZag(), "states"),
        "states, contiguous": ours(Contiguous(), "states"),
        "heads, zigzag": ours(ZigZag(), "heads"),
        "one GPU": one_gpu,
    }
    try:
        from fla.ops.cp import build_cp_context
        from fla.ops.gated_delta_rule import chunk_gated_delta_rule

        cu = torch.tensor([0, S], device="cuda")
        context = build_cp_context(cu, group=mesh.get_group())
        sequence = ShardedSequence(mesh, layout=Contiguous(), length=S)
        local, own = [y.requires_grad_() for y in sequence.shard(x).values()], sequence.shard(grad)

        def theirs() -> None:
            out, _ = chunk_gated_delta_rule(*local, cp_context=context)
            torch.autograd.grad(out, local, own)

        found["fla cp_context"] = theirs
    except Exception as error:
        print("fla cp_context:", repr(error)[:300], flush=True)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--csv", type=Path)
    parser.add_argument("--seq-len", type=int, nargs="+", default=[8192, 32768, 131072])
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--gate", type=int, default=2048, help="tokens of the gate")
    parser.add_argument("--rules", nargs="+", default=[*RULES])
    args = parser.parse_args()
    dist.init_process_group("nccl")
    rank = dist.get_rank()
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    mesh = dist.init_device_mesh("cuda", (dist.get_world_size(),), mesh_dim_names=("cp",))
    commit = (
        os.environ.get("COMMIT") or subprocess.check_output(["git", "rev-parse", "--short", "HEAD"], text=True).strip()
    )
    common = {
        "date": str(date.today()),
        "commit": commit,
        "gpu": torch.cuda.get_device_name(),
        "world": dist.get_world_size(),
    }
    common["torch"] = torch.__version__
    rows: list[dict[str, Any]] = []

    def save(**row: Any) -> None:
        rows.append(common | {"kind": "", "rule": "", "tokens": "", "contestant": "", "ms": "", "ratio": ""} | row)
        if rank == 0:
            print(*row.values(), flush=True)
            if args.csv:
                with args.csv.open("w", newline="") as file:
                    writer = csv.DictWriter(file, [*rows[0]])
                    writer.writeheader()
                    writer.writerows(rows)

    for rule in args.rules:
        for packed in (False, True):
            ratios = gate(rule, args.gate, packed, rank, mesh)
            save(kind="gate packed" if packed else "gate", rule=rule, tokens=args.gate, ratio=round(max(ratios), 3))
            assert max(ratios) < 1.5, ratios
    for tokens in args.seq_len:
        for name, step in contestants(tokens, 16, 48, 128, mesh).items():
            save(
                kind="time",
                rule="gated_delta_rule",
                tokens=tokens,
                contestant=name,
                ms=round(timed(step, args.repeats), 3),
            )
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
