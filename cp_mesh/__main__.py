"""Verify every layout, causal and full, on the ranks of this launch: ``torchrun --nproc-per-node 8 -m cp_mesh``.

``torchrun --nproc-per-node 8 -m cp_mesh verify module:factory`` verifies a training set-up, see `verify_model`.
``python -m cp_mesh explain --seq-len 131072 --cp 8`` explains a configuration, with no ranks.
``torchrun --nproc-per-node 2 -m cp_mesh calibrate`` measures what predicted times are made of.
"""

from __future__ import annotations

import argparse
import csv
import importlib
import itertools
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from cp_mesh.balancing import balance
from cp_mesh.calibrating import Shapes, calibrate, table
from cp_mesh.costs import MACHINES
from cp_mesh.errors import ArgumentError, UnsupportedError
from cp_mesh.explaining.explain import explain
from cp_mesh.kernels import KERNELS
from cp_mesh.layouts import Contiguous, Layout, Striped, ZigZag
from cp_mesh.machines import write_machine
from cp_mesh.masks import Mask
from cp_mesh.methods import METHODS
from cp_mesh.transport import TRANSPORTS
from cp_mesh.verifying.report import ModelReport
from cp_mesh.verifying.verify import NAMES, Report, VerificationError, verify
from cp_mesh.verifying.verify_model import verify_model

LAYOUTS: tuple[Layout, ...] = (Contiguous(), ZigZag(), Striped())


def main() -> None:
    """One of the commands."""
    commands = {"explain": explain_command, "calibrate": calibrate_command, "verify": verify_model_command}
    if command := commands.get(sys.argv[1] if len(sys.argv) > 1 else ""):
        command(sys.argv[2:])
    else:
        verify_command()


def explain_command(argv: Sequence[str]) -> None:
    """Print what `cp_mesh.explain` says."""
    parser = argparse.ArgumentParser(
        prog="python -m cp_mesh explain",
        description="What a call will run and why, with predicted times; see cp_mesh.explain. No ranks, no GPU.",
    )
    parser.add_argument("--seq-len", type=int, required=True, help="tokens of the whole sequence")
    parser.add_argument("--cp", type=int, required=True, help="ranks")
    parser.add_argument("--heads", metavar="H/K", help="query heads/kv heads of a rank: memory and times are told")
    parser.add_argument("--head-dim", type=int, default=128)
    parser.add_argument("--batch", type=int, default=1)
    names = [layout.spec() for layout in LAYOUTS]
    parser.add_argument("--layout", choices=(*names, "balanced"), default="zigzag")
    parser.add_argument("--full", action="store_true", help="not causal")
    parser.add_argument("--window", type=int, metavar="N", help="a query sees N tokens back, itself included")
    parser.add_argument("--prefix", type=int, default=0, metavar="N", help="all queries see the first N tokens")
    parser.add_argument(
        "--documents", type=int, nargs="+", metavar="N", help="lengths of packed documents, again and again"
    )
    parser.add_argument("--scores", nargs="+", default=(), help="names of options of the scores, as alibi_slopes")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda")
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float16", "float32", "float64"))
    parser.add_argument("--kernel", default="auto", choices=("auto", *KERNELS))
    parser.add_argument("--method", default="auto", choices=("auto", *METHODS))
    parser.add_argument("--transport", default="auto", choices=TRANSPORTS)
    parser.add_argument("--head-chunks", type=int)
    parser.add_argument("--machine", help=f"{', '.join(MACHINES)}, or a file that calibrate wrote")
    parser.add_argument("--gpus-per-host", type=int)
    parser.add_argument("--columns", type=int, default=64, help="width of the strip of owners")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="also draw a picture, as a .png or .svg; matplotlib")
    args = parser.parse_args(argv)
    heads = [int(num) for num in args.heads.split("/")] if args.heads else [None]
    documents = None
    if args.documents:
        ends = torch.tensor(args.documents).repeat(-(-args.seq_len // max(1, sum(args.documents)))).cumsum(0)
        documents = torch.bucketize(torch.arange(args.seq_len), ends, right=True)
    window = None if args.window is None else (args.window - 1, None if args.full else 0)
    try:
        mask = Mask(causal=not args.full, window=window, documents=documents, prefix=args.prefix)
        layouts = {layout.spec(): layout for layout in LAYOUTS}
        layout = layouts.get(args.layout) or balance(mask, args.seq_len, args.cp)
        found = explain(
            args.seq_len,
            args.cp,
            layout=layout,
            mask=mask,
            scores=args.scores,
            device=args.device,
            dtype=getattr(torch, args.dtype),
            head_dim=args.head_dim,
            batch=args.batch,
            num_heads=heads[0],
            num_kv_heads=heads[-1],
            head_chunks=args.head_chunks,
            kernel=args.kernel,
            method=args.method,
            transport=args.transport,
            machine=args.machine,
            gpus_per_host=args.gpus_per_host,
            columns=args.columns,
        )
        print(found)
        if args.plot:
            found.plot(args.plot)
    except (ArgumentError, UnsupportedError) as error:
        parser.error(str(error))


def calibrate_command(argv: Sequence[str]) -> None:
    """Measure the machine, print its numbers beside those that come with cp_mesh, and write them to a file."""
    cuda = torch.cuda.is_available()
    parser = argparse.ArgumentParser(
        prog="python -m cp_mesh calibrate",
        description="Measure what predicted times are made of, in about a minute, and write it to a file. Without "
        "torchrun: the kernels alone. CP_MESH_MACHINE=FILE has method='auto' and explain read it.",
    )
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda" if cuda else "cpu")
    parser.add_argument("--dtype", default="bfloat16" if cuda else "float32")
    parser.add_argument("--heads", metavar="H/K", default="32/8", help="query heads/kv heads of a rank")
    parser.add_argument("--head-dim", type=int, default=128)
    parser.add_argument("--rows", type=int, nargs="+", default=[1024, 2048, 4096, 8192, 16384], help="of a rank")
    parser.add_argument("--kernel", nargs="+", default=[], choices=tuple(KERNELS), help="default: all that can")
    parser.add_argument("--calls", type=int, default=10, help="that are timed together")
    parser.add_argument("--out", type=Path, default=Path("machine.json"), help="the file that is written")
    args = parser.parse_args(argv)
    group, rank = None, 0
    device = torch.device(args.device)
    if "RANK" in os.environ:
        if cuda and args.device == "cuda":
            device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
            torch.cuda.set_device(device)
        dist.init_process_group("nccl" if args.device == "cuda" else "gloo")
        mesh = init_device_mesh(args.device, (dist.get_world_size(),), mesh_dim_names=("cp",))
        group, rank = mesh.get_group(), dist.get_rank()
    elif args.device == "cuda":
        device = torch.device("cuda", torch.cuda.current_device())
    heads, *kv_heads = (int(num) for num in args.heads.split("/"))
    dtype = getattr(torch, args.dtype)
    shapes = Shapes(sorted(args.rows), heads, kv_heads[0] if kv_heads else heads, args.head_dim, dtype, args.calls)
    try:
        found = calibrate(shapes, device, args.kernel, group)
    except (ArgumentError, UnsupportedError) as error:
        parser.error(str(error))
    if rank == 0:
        write_machine(found.machine, args.out)
        print(table(found))
        print(f"written to {args.out}; CP_MESH_MACHINE={args.out} has method='auto' and explain read it")
    if group is not None:
        dist.barrier()
        dist.destroy_process_group()


def verify_model_command(argv: Sequence[str]) -> None:
    """Print the report of `verify_model`; exit with 1 if anything is wrong."""
    cuda = torch.cuda.is_available()
    parser = argparse.ArgumentParser(
        prog="python -m cp_mesh verify",
        description="Compare a training step of your model on the ranks of this launch with one rank; see "
        "cp_mesh.verifying.verify_model. Start it with torchrun; without, it runs on one rank.",
    )
    parser.add_argument("factory", help="module:function or file.py:function; returns verify_model's arguments, a dict")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda" if cuda else "cpu")
    parser.add_argument(
        "--dtype", choices=("float64", "float32", "bfloat16", "float16", "own"), help="default: float64"
    )
    parser.add_argument("--probes", action="store_true", help="probes alone, without the reference")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the report there too")
    args = parser.parse_args(argv)
    where, _, name = args.factory.rpartition(":")
    if not where:
        parser.error(f"{args.factory}: expected module:function, as in my_trainer:verification")
    alone: dict[str, Any] = {} if "RANK" in os.environ else {"store": dist.HashStore(), "rank": 0, "world_size": 1}
    if args.device == "cuda":
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", 0)))
    dist.init_process_group("nccl" if args.device == "cuda" else "gloo", **alone)
    given = dict(getattr(_module(where), name)())
    if args.dtype is not None:
        given["dtype"] = None if args.dtype == "own" else getattr(torch, args.dtype)
    if args.probes:
        given["reference"] = False
    try:
        report = verify_model(**{"progress": True, **given})
    except VerificationError as error:
        assert isinstance(error.report, ModelReport)
        report = error.report
    if dist.get_rank() == 0:
        if args.json:
            args.json.write_text(report.to_json() + "\n")
        report.print()
    _leave(not report.passed)


def _module(where: str) -> ModuleType:
    """A module by its name, or a file by its path, beside which its own imports are found."""
    if not where.endswith(".py"):
        return importlib.import_module(where)
    path = Path(where).resolve()
    sys.path.insert(0, str(path.parent))
    return importlib.import_module(path.stem)


def _leave(failed: bool) -> NoReturn:
    dist.barrier()  # gloo may still hold tensors of the last collective, which an exiting Python cannot release
    dist.destroy_process_group()
    raise SystemExit(int(failed))


def verify_command() -> None:
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
        args.dtype, args.kernel, args.method, args.seq_len, LAYOUTS, (True, False)
    ):
        try:
            report = verify(
                mesh,
                layout=layout,
                mask=Mask(causal=causal),
                dtype=getattr(torch, dtype),
                kernel=kernel,
                method=method,
                num_heads=4 * (mesh.size() if method == "ulysses" else 1),  # heads that the ranks divide
                seq_len=seq_len,
            )
        except VerificationError as error:
            assert isinstance(error.report, Report)
            report, failed = error.report, True
        if dist.get_rank() == 0:
            case = [dtype, seq_len or 256 * mesh.size(), layout.spec(), "causal" if causal else "full"]
            by = report.kernel if method == "auto" else f"{method}/{report.kernel}"
            print(*case, report if method == "auto" else f"{method}  {report}", sep="  ", flush=True)
            if args.csv:
                figures = [f"{table[name]:.3g}" for name in NAMES for table in (report.errors, report.ratios)]
                _append(args.csv, [f"{mesh.size()}x {hardware}", torch.__version__, *case, by, *figures])
    _leave(failed)


def _append(path: Path, row: list[object]) -> None:
    header = ["hardware", "torch", "dtype", "seq_len", "layout", "mask", "kernel"]
    header += [f"{name}_{what}" for name in NAMES for what in ("rms_error", "of_allowed")]
    new = not path.exists()
    with path.open("a", newline="") as file:
        csv.writer(file).writerows([header, row] if new else [row])


if __name__ == "__main__":
    main()
