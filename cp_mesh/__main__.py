"""Verify every layout, causal and full, on the ranks of this launch: ``torchrun --nproc-per-node 8 -m cp_mesh``."""

from __future__ import annotations

import argparse
import csv
import itertools
import os
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from cp_mesh.layouts import Contiguous, Striped, ZigZag
from cp_mesh.masks import Mask
from cp_mesh.verify import NAMES, VerificationError, verify


def main() -> None:
    """Print one line a configuration; exit with 1 if any is wrong."""
    cuda = torch.cuda.is_available()
    parser = argparse.ArgumentParser(
        prog="python -m cp_mesh",
        description="Prove cp_mesh on the ranks of this launch: three layouts, causal and full. "
        "`cp_mesh.verify` proves other masks and settings. Start it with torchrun.",
    )
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda" if cuda else "cpu")
    parser.add_argument("--dtype", nargs="+", default=["bfloat16"] if cuda else ["float64"])
    parser.add_argument("--kernel", nargs="+", default=["auto"])
    parser.add_argument("--method", nargs="+", default=["auto"])
    parser.add_argument("--seq-len", nargs="+", type=int, default=[None], help="tokens; default 256 a rank")
    parser.add_argument("--csv", type=Path, help="append the figures, one row a configuration")
    args = parser.parse_args()
    if "RANK" not in os.environ:
        parser.error("no ranks: start it with torchrun --nproc-per-node 2 -m cp_mesh")
    if args.device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl" if args.device == "cuda" else "gloo")
    mesh = init_device_mesh(args.device, (dist.get_world_size(),), mesh_dim_names=("cp",))
    hardware = torch.cuda.get_device_name() if args.device == "cuda" else "cpu"
    failed = False
    for dtype, kernel, method, seq_len, layout, causal in itertools.product(
        args.dtype, args.kernel, args.method, args.seq_len, (Contiguous(), ZigZag(), Striped()), (True, False)
    ):
        try:
            report = verify(
                mesh,
                layout=layout,
                mask=Mask(causal=causal),
                dtype=getattr(torch, dtype),
                kernel=kernel,
                method=method,
                seq_len=seq_len,
            )
        except VerificationError as error:
            report, failed = error.report, True
        if dist.get_rank() == 0:
            case = [dtype, seq_len or 256 * mesh.size(), layout.spec(), "causal" if causal else "full"]
            by = report.kernel if method == "auto" else f"{method}/{report.kernel}"
            print(*case, report if method == "auto" else f"{method}  {report}", sep="  ", flush=True)
            if args.csv:
                figures = [f"{table[name]:.3g}" for name in NAMES for table in (report.errors, report.ratios)]
                _append(args.csv, [f"{mesh.size()}x {hardware}", torch.__version__, *case, by, *figures])
    dist.barrier()  # gloo may still hold tensors of the last collective, which an exiting Python cannot release
    dist.destroy_process_group()
    raise SystemExit(int(failed))


def _append(path: Path, row: list[object]) -> None:
    header = ["hardware", "torch", "dtype", "seq_len", "layout", "mask", "kernel"]
    header += [f"{name}_{what}" for name in NAMES for what in ("rms_error", "of_allowed")]
    new = not path.exists()
    with path.open("a", newline="") as file:
        csv.writer(file).writerows([header, row] if new else [row])


if __name__ == "__main__":
    main()
