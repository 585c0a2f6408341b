"""Verify every layout, causal and full, on the ranks of this launch: ``torchrun --nproc-per-node 8 -m cp_mesh``.

``torchrun --nproc-per-node 8 -m cp_mesh verify module:factory`` verifies a training set-up, see `verify_model`.
``python -m cp_mesh explain --seq-len 131072 --cp-size 8`` explains a configuration, in one process; with ``--model``
the memory of a training step. ``python -m cp_mesh --version`` prints the version. ``cp-mesh`` is ``python -m cp_mesh``.

The last line of each is the verdict. A rank's exit status is 0 if all is right, 2 if arguments or configurations were
refused, else 1; torchrun returns 1 for both.
"""

from __future__ import annotations

import argparse
import csv
import itertools
import os
import sys
import textwrap
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from cp_mesh.errors import ArgumentError, UnsupportedError, refuse
from cp_mesh.geometry.balance import balance
from cp_mesh.geometry.layouts import Contiguous, Layout, Striped, ZigZag, ZigZagDocuments
from cp_mesh.geometry.mask import Mask
from cp_mesh.tools.command_line import REFUSED, WIDTH, Parser, dtype, function_of, number
from cp_mesh.tools.explain.explain import explain
from cp_mesh.tools.explain.picture import check_picture
from cp_mesh.tools.explain.step import explain_step
from cp_mesh.tools.verification.report import ModelReport
from cp_mesh.tools.verification.verify import NAMES, Report, VerificationError, verify
from cp_mesh.tools.verification.verify_model import verify_model

LAYOUTS: dict[str, Layout] = {layout.spec(): layout for layout in (Contiguous(), ZigZag(), Striped())}
_OF_CALLS = ("kernel", "method", "ulysses_degree", "transport", "head_chunks", "gpus_per_host")


# python -m cp_mesh explain


def explain_command(words: Sequence[str]) -> None:
    """Print the text of `cp_mesh.explain`, or with ``--model`` that of `cp_mesh.tools.explain_step`."""
    is_step = any(word.partition("=")[0] == "--model" for word in words)
    parser = Parser("explain", "Show what an attention call will run and why, or with --model what a step takes.")
    if is_step:
        parser.add_options(explain_step)
        parser.add_options(explain, _OF_CALLS)
    else:
        others = ("layout", "mask", "compute_capability")
        parser.add_options(explain, skip=others, device="cuda", dtype=torch.bfloat16)
        parser.add_argument("--prefix", type=number, metavar="N", default=0, help="all queries see the first N tokens")
        text = "lengths of packed documents, repeated up to --seq-len"
        parser.add_argument("--documents", type=number, metavar="N", nargs="+", help=text)
        parser.add_argument("--plot", type=Path, metavar="FILE", help="also draw a picture; needs matplotlib")
        parser.add_argument("--model", metavar="NAME", help="the memory of a step; --model NAME --help lists options")
    names = [*LAYOUTS, *["zigzag_documents", "balanced"] * (not is_step)]
    parser.add_argument("--layout", choices=names, default="zigzag")
    parser.add_argument("--full", action="store_true", help="full attention instead of causal")
    parser.add_argument("--window", type=number, metavar="N", help="a query sees the last N tokens, itself included")
    given = vars(parser.parse_args(words))
    try:
        picture = given.pop("plot", None)
        if picture:
            check_picture(picture)
        given |= _mask_and_layout(given)
        if is_step:
            print(explain_step(**given))
            return
        del given["model"]
        found = explain(**given)
    except (ArgumentError, UnsupportedError) as error:
        parser.error(str(error))
    print(found, found.verdict, sep="\n")
    if picture:
        found.plot(picture)


def _mask_and_layout(given: dict[str, Any]) -> dict[str, Any]:
    """Take the options of the mask and the layout out of ``given``, and return what they mean."""
    full, window, layout = (given.pop(name) for name in ("full", "window", "layout"))
    lengths, prefix = given.pop("documents", None), given.pop("prefix", 0)
    seq_len, documents, layouts = given["seq_len"], None, dict(LAYOUTS)
    if layout == "zigzag_documents" and not lengths:
        refuse("--layout zigzag_documents", "--documents", None, "for example --documents 3000 5000")
    if lengths and seq_len > 0:  # else `explain` refuses it
        if min(lengths) < 1:
            refuse("--documents", "lengths of at least 1", lengths, "for example --documents 3000 5000")
        ends = torch.tensor(lengths, device="cpu").repeat(-(-seq_len // sum(lengths))).cumsum(0)
        documents = torch.bucketize(torch.arange(seq_len, device="cpu"), ends, right=True)
        layouts["zigzag_documents"] = ZigZagDocuments(torch.cat([ends.new_zeros(1), ends.clamp(max=seq_len)]))
    window = None if window is None else (window - 1, None if full else 0)
    mask = Mask(causal=not full, window=window, documents=documents, prefix=prefix)
    return {"mask": mask, "layout": layouts.get(layout) or balance(mask, seq_len, given["cp_size"])}


# python -m cp_mesh verify, and python -m cp_mesh without a command


def _init(parser: Parser, device: str, **alone: Any) -> None:
    if device == "cuda":
        if not torch.cuda.is_available():
            parser.error("argument --device: expected a GPU that PyTorch sees, got none; --device cpu works")
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK") or 0))
    dist.init_process_group("nccl" if device == "cuda" else "gloo", **alone)


def _leave(status: int) -> NoReturn:
    dist.barrier()  # gloo may still hold tensors of the last collective, which Python cannot release at exit
    dist.destroy_process_group()
    raise SystemExit(status)


def verify_model_command(words: Sequence[str]) -> None:
    """Print the report of `verify_model`; exit with 1 if anything is wrong."""
    text = (
        "Compare a training step of your model on all ranks with the same step on one rank; see cp_mesh.verify_model. "
    )
    parser = Parser("verify", text + "Start it with torchrun; without torchrun it runs on one rank.")
    text = "module:function or file.py:function; returns a dict of verify_model's arguments"
    parser.add_argument("factory", help=text)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda" if torch.cuda.is_available() else "cpu")
    text = "own: as the factory's model has it; default: that of the factory, else float64"
    kind: Any = lambda word: None if word == "own" else dtype(word)  # noqa: E731
    parser.add_argument("--dtype", type=kind, metavar="NAME", default=argparse.SUPPRESS, help=text)
    parser.add_argument("--probes", action="store_true", help="run only the probes, without the reference")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the report as JSON")
    args = parser.parse_args(words)
    alone = {"store": dist.HashStore(), "rank": 0, "world_size": 1}
    _init(parser, args.device, **({} if os.environ.get("RANK") else alone))
    try:
        given = {"progress": True} | function_of(args.factory)()
        given |= {"dtype": args.dtype} if "dtype" in args else {}
        given |= {"reference": False} if args.probes else {}
        report = verify_model(**given)
    except VerificationError as error:
        assert isinstance(error.report, ModelReport)
        report = error.report
    except (ArgumentError, UnsupportedError) as error:
        parser.error(f"factory {args.factory}: {error}")
    except SystemExit as error:  # sys.exit(0) would pass for a verdict
        raise RuntimeError(f"factory {args.factory}: expected a verdict, got exit status {error.code!r}") from error
    if dist.get_rank() == 0:
        report.print()
        if args.json:
            args.json.write_text(report.to_json() + "\n")
    _leave(not report.passed)


def verify_command(words: Sequence[str]) -> None:
    """Print a line for each configuration, and a verdict; exit with 1 if any is wrong, with 2 if any is refused."""
    cuda = torch.cuda.is_available()
    text = (
        "Compare cp_mesh with one device on the ranks of this launch: three layouts, causal and full. "
        "cp_mesh.tools.verify takes other masks and settings. Start it with torchrun. Other commands, each with "
        "--help: verify (tests your trainer), explain (shows what a call will run)."
    )
    parser = Parser("", text)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda" if cuda else "cpu")
    dtypes = [torch.bfloat16] if cuda else [torch.float64]
    parser.add_argument("--dtype", type=dtype, nargs="+", default=dtypes, help="bfloat16, float16, float32, float64")
    parser.add_argument("--kernel", nargs="+", default=["auto"], metavar="NAME", help="as in cp_mesh.attention")
    parser.add_argument("--method", nargs="+", default=["auto"], metavar="NAME", help="as in cp_mesh.attention")
    parser.add_options(verify, ("ulysses_degree",))
    text = "sequence length; default: 256 per rank"
    parser.add_argument("--seq-len", type=number, nargs="+", default=[None], metavar="N", help=text)
    text = "append the errors, a row for each configuration"
    parser.add_argument("--csv", type=Path, metavar="FILE", help=text)
    args = parser.parse_args(words)
    if not os.environ.get("RANK"):
        parser.error("no launcher: start it with torchrun --nproc-per-node 2 -m cp_mesh")
    _init(parser, args.device)
    mesh = init_device_mesh(args.device, (dist.get_world_size(),), mesh_dim_names=("cp",))
    machine = f"{mesh.size()}x {torch.cuda.get_device_name() if args.device == 'cuda' else 'cpu'}"
    say = print if dist.get_rank() == 0 else lambda *_, **__: None
    outcomes, begin, said = list[tuple[str, str]](), time.perf_counter(), ""
    for of_dtype, kernel, method, seq_len in itertools.product(args.dtype, args.kernel, args.method, args.seq_len):
        name, tokens = str(of_dtype).removeprefix("torch."), seq_len or 256 * mesh.size()
        say(f"{name}, {tokens} tokens on {mesh.size()} ranks, kernel {kernel}, method {method}:")
        say(_line("layout", "mask", "kernel", *NAMES, "limit", ""), flush=True)
        degree = {"ulysses_degree": args.ulysses_degree} if method == "hybrid" else {}
        parts = mesh.size() if method == "ulysses" else degree.get("ulysses_degree") or 1
        for (spec, layout), causal in itertools.product(LAYOUTS.items(), (True, False)):
            where = (spec, "causal" if causal else "full")
            case = " ".join((name, *where))
            settings: dict[str, Any] = {"layout": layout, "mask": Mask(causal=causal), "kernel": kernel}
            settings |= {"dtype": of_dtype, "method": method, "seq_len": seq_len, **degree}
            try:
                report = verify(mesh, num_heads=4 * parts, **settings)  # divisible
            except VerificationError as error:
                assert isinstance(error.report, Report)
                report = error.report
            except (ArgumentError, UnsupportedError) as error:
                outcomes.append((case, "refused"))
                say(_line(*where, *["-"] * 7, "refused"))
                for line in textwrap.wrap(str(error), WIDTH - 4, break_on_hyphens=False) if str(error) != said else ():
                    say(f"    {line}")
                said = str(error)
                continue
            outcomes.append((case, "exact" if report.passed else "WRONG"))
            say(_line_of(where, report), flush=True)
            if args.csv and dist.get_rank() == 0:
                ran = report.kernel if method == "auto" else f"{method}/{report.kernel}"
                row = dict(zip(_CASE, (machine, torch.__version__, name, tokens, *where, ran), strict=True))
                _append(args.csv, row | _figures(report))
    took = f"({len(outcomes)} configurations on {mesh.size()} ranks, {time.perf_counter() - begin:.1f} s)"
    for word, status in (("WRONG", 1), ("refused", REFUSED)):
        if bad := [case for case, found in outcomes if found == word]:
            say(f"{word.upper()}: {len(bad)}, the first is {bad[0]} {took}", flush=True)
            _leave(status)
    say(f"RIGHT {took}", flush=True)
    _leave(0)


_CASE = ("hardware", "torch", "dtype", "seq_len", "layout", "mask", "kernel")


def _line_of(where: tuple[str, str], report: Report) -> str:
    """Return a configuration's RMS errors against one device in float64, and the largest error over its limit."""
    most = max(report.ratios.values(), key=lambda ratio: (ratio != ratio, ratio))  # nan is the worst
    errors = [f"{report.errors[name]:.1e}" for name in NAMES]
    line = _line(*where, report.kernel, *errors, f"{100 * most:.0f} %", "exact" if report.passed else "WRONG")
    alone = [f"{name} ({100 * ratio:.0f} %)" for name, ratio in report.of_one_device.items() if not ratio <= 1]
    return f"{line}\n    the kernel is wrong on one device too: {', '.join(alone)}" if alone else line


def _line(layout: str, mask: str, kernel: str, *cells: str) -> str:
    *figures, last = cells
    return f"  {layout:10}  {mask:6}  {kernel:11}  {'  '.join(f'{cell:>7}' for cell in figures)}  {last}"


def _figures(report: Report) -> dict[str, str]:
    tables = {"rms_error": report.errors, "of_allowed": report.ratios}
    return {f"{name}_{what}": f"{table[name]:.3g}" for name in NAMES for what, table in tables.items()}


def _append(path: Path, row: Mapping[str, object]) -> None:
    is_new = not path.exists()
    with path.open("a", newline="") as file:
        writer = csv.DictWriter(file, [*row])
        if is_new:
            writer.writeheader()
        writer.writerow(row)


def main() -> None:
    """Run the command that the arguments name."""
    first, *rest = sys.argv[1:] or [""]
    commands = {"explain": explain_command, "verify": verify_model_command}
    if first == "--version":
        print(f"cp_mesh {sys.modules['cp_mesh'].__version__}")
    elif first in commands:
        commands[first](rest)
    elif first and not first.startswith("-"):
        Parser("", "").error(f"expected explain, verify, or only options, got {first!r}")
    else:
        verify_command(sys.argv[1:])


if __name__ == "__main__":
    main()
