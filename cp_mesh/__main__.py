"""Verify every layout, causal and full, on the ranks of this launch: ``torchrun --nproc-per-node 8 -m cp_mesh``.

``torchrun --nproc-per-node 8 -m cp_mesh verify module:factory`` verifies a training set-up, see `verify_model`.
``python -m cp_mesh explain --seq-len 131072 --cp 8`` explains a configuration, in one process; with ``--model`` the
memory of a training step.
``python -m cp_mesh --version`` prints the version.

The last line of each is the verdict. A rank's exit status is 0 if all is right, 1 if something is wrong, and 2 if
something could not run; torchrun returns 1 for both.
"""

from __future__ import annotations

import csv
import inspect
import itertools
import os
import sys
import textwrap
import time
import traceback
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from cp_mesh.call.plan import METHODS
from cp_mesh.comm.exchange import TRANSPORTS
from cp_mesh.errors import ArgumentError, UnsupportedError
from cp_mesh.geometry.balance import balance
from cp_mesh.geometry.layouts import Contiguous, Layout, Striped, ZigZag, ZigZagDocuments
from cp_mesh.geometry.mask import Mask
from cp_mesh.kernels.table import KERNELS
from cp_mesh.tools.explain.explain import MOST_RANKS, MOST_TOKENS, explain
from cp_mesh.tools.explain.picture import check_picture
from cp_mesh.tools.explain.step import PRESETS, explain_step
from cp_mesh.tools.factory import arguments_of, split
from cp_mesh.tools.terminal import (
    MOST,
    REFUSED,
    WIDTH,
    Parser,
    Progress,
    heads_of,
    number_of,
    one_of,
    option,
    output_file,
    show,
)
from cp_mesh.tools.verification.report import ModelReport
from cp_mesh.tools.verification.verify import NAMES, Report, VerificationError, verify
from cp_mesh.tools.verification.verify_model import verify_model

LAYOUTS: tuple[Layout, ...] = (Contiguous(), ZigZag(), Striped())
DTYPES = ("bfloat16", "float16", "float32", "float64")
OWNER_COLUMNS = WIDTH - len("owner ")

_KERNEL, _METHOD = one_of("auto", *KERNELS, default="auto"), one_of("auto", *METHODS, default="auto")
_DEGREE = {"--ulysses-degree": option(number_of(), text="method hybrid: ranks that exchange heads by all-to-all")}
_TOKENS = number_of(most=MOST_TOKENS)


# python -m cp_mesh explain

_EXPLAIN = {
    "--seq-len": option(_TOKENS, text="tokens of the whole sequence: 131072, 128K, 1e6", required=True),
    "--cp": option(number_of(most=MOST_RANKS), text="number of cp ranks", required=True),
    "--heads": option(heads_of, "H/K", "query heads/kv heads per rank; adds bytes and memory", default=(None, None)),
    "--head-dim": option(number_of(), text="head dim of q, k and v; default: 128", default=128),
    "--batch": option(number_of(), text="batch size per rank; default: 1", default=1),
    "--layout": {
        "choices": (*(layout.spec() for layout in LAYOUTS), "zigzag_documents", "balanced"),
        "default": "zigzag",
    },
    "--full": {"action": "store_true", "help": "full attention instead of causal"},
    "--window": option(_TOKENS, text="a query sees the last N tokens, itself included"),
    "--prefix": option(number_of(0, MOST_TOKENS), text="all queries see the first N tokens", default=0),
    "--documents": option(_TOKENS, text="lengths of packed documents, repeated up to --seq-len", nargs="+"),
    "--scores": option(str, "NAME", "score options of the call, such as alibi_slopes", nargs="+", default=()),
    "--device": {"choices": ("cpu", "cuda"), "default": "cuda"},
    "--dtype": {"choices": DTYPES, "default": "bfloat16"},
    "--kernel": _KERNEL,
    "--method": _METHOD,
    **_DEGREE,
    "--transport": {"choices": TRANSPORTS, "default": "auto"},
    "--head-chunks": option(number_of(), text="chunks in which heads are computed; default: automatic"),
    "--gpus-per-host": option(number_of(), text="GPUs per host; default: 8, all ranks on CPUs"),
    "--columns": option(
        number_of(most=OWNER_COLUMNS), text=f"width of the owner line, up to {OWNER_COLUMNS}", default=64
    ),
    "--plot": option(output_file, "FILE", "also draw a picture, .png or .svg; needs matplotlib"),
    "--model": option(str, "NAME", "instead the memory of a training step; --model NAME --help lists its options"),
}
_STEP = {
    "--model": option(str, "NAME", f"{', '.join(PRESETS)}, or a config.json of Transformers", required=True),
    **{name: _EXPLAIN[name] for name in ("--seq-len", "--cp", "--batch", "--window", "--full")},
    "--dp": option(number_of(most=MOST_RANKS), text="groups of cp ranks; FSDP2 shards over all ranks", default=1),
    "--gpu-memory": option(float, "GiB", "of a GPU; adds the longest sequence that fits"),
    "--host-memory": option(float, "GiB", "of the host, for each GPU; default: as much as it takes"),
    "--recompute": {"choices": ("selective", "full"), "default": "selective", "help": "full: attention too"},
    "--tiled-loss": {"action": "store_true", "help": "the loss is cross_entropy with weight="},
    "--mlp-rows": option(_TOKENS, text="tile_rows of TiledMLP"),
    "--offload-checkpoints": {"action": "store_true", "help": "Checkpointed(offload=True)"},
    "--offload-optimizer": {"action": "store_true", "help": "CPUOffloadPolicy of FSDP2"},
    "--optimizer-dtype": {"choices": DTYPES, "default": "float32"},
    "--layout": {"choices": tuple(layout.spec() for layout in LAYOUTS), "default": "zigzag"},
    **{name: _EXPLAIN[name] for name in ("--device", "--dtype", "--kernel", "--method", *_DEGREE, "--transport")},
    **{name: _EXPLAIN[name] for name in ("--head-chunks", "--gpus-per-host")},
}


def explain_step_command(argv: Sequence[str]) -> None:
    """Print the text of `cp_mesh.tools.explain_step`."""
    text = "Predict the memory of a training step, and the longest sequence that fits; see cp_mesh.tools.explain_step."
    parser = Parser("explain", text, _STEP)
    args = vars(parser.parse_args(argv))
    causal, window = not args.pop("full"), args.pop("window")
    given = {"cp_size": args.pop("cp"), "dp_size": args.pop("dp")}
    given["layout"] = {layout.spec(): layout for layout in LAYOUTS}[args.pop("layout")]
    given |= {name: getattr(torch, args.pop(name)) for name in ("dtype", "optimizer_dtype")}
    try:
        window = None if window is None else (window - 1, 0 if causal else None)
        with Progress()("planning"):
            print(explain_step(**args, **given, mask=Mask(causal=causal, window=window)))
    except (ArgumentError, UnsupportedError) as error:
        parser.error(str(error))


def explain_command(argv: Sequence[str]) -> None:
    """Print the text of `cp_mesh.explain`, or with ``--model`` that of `cp_mesh.tools.explain_step`."""
    if any(word.partition("=")[0] == "--model" for word in argv):
        return explain_step_command(argv)
    text = "Show what an attention call will run and why; see cp_mesh.explain. Needs no GPU."
    parser = Parser("explain", text, _EXPLAIN)
    args = parser.parse_args(argv)
    if os.environ.get("RANK"):
        parser.of_launch("RANK", 0, MOST - 1)
    documents, layouts = None, {layout.spec(): layout for layout in LAYOUTS}
    if args.layout == "zigzag_documents" and not args.documents:
        parser.error("argument --layout: expected --documents with zigzag_documents, got none")
    if args.documents:
        rounds = -(-args.seq_len // sum(args.documents))
        if (number := rounds * len(args.documents)) > MOST:
            parser.error(f"argument --documents: expected at most {MOST} in the sequence, got {number}")
        ends = torch.tensor(args.documents, device="cpu").repeat(rounds).cumsum(0)
        documents = torch.bucketize(torch.arange(args.seq_len, device="cpu"), ends, right=True)
        layouts["zigzag_documents"] = ZigZagDocuments(torch.cat([ends.new_zeros(1), ends.clamp(max=args.seq_len)]))
    window = None if args.window is None else (args.window - 1, None if args.full else 0)
    try:
        if args.plot:
            check_picture(args.plot)
        with Progress()("planning"):
            mask = Mask(causal=not args.full, window=window, documents=documents, prefix=args.prefix)
            layout = layouts.get(args.layout) or balance(mask, args.seq_len, args.cp)
            given = {name: x for name, x in vars(args).items() if name in inspect.signature(explain).parameters}
            given |= {"layout": layout, "mask": mask, "dtype": getattr(torch, args.dtype)}
            found = explain(cp_size=args.cp, num_heads=args.heads[0], num_kv_heads=args.heads[1], **given)
    except (ArgumentError, UnsupportedError) as error:
        parser.error(str(error))
    print(found)
    show(found.verdict, True)
    if args.plot:
        with parser.writing(args.plot):
            found.plot(args.plot)


# python -m cp_mesh verify, and python -m cp_mesh without a command


def _check_launch(parser: Parser, device: str) -> bool:
    """Refuse a missing device and wrong launch variables; return whether a launcher started this process."""
    if device == "cuda" and not torch.cuda.is_available():
        parser.error("argument --device: expected a GPU that PyTorch sees, got none; --device cpu works")
    if not os.environ.get("RANK"):
        return False
    parser.of_launch("WORLD_SIZE", parser.of_launch("RANK", 0, MOST - 1) + 1, MOST)
    parser.of_launch("MASTER_PORT", 1, (1 << 16) - 1)
    if not os.environ.get("MASTER_ADDR"):
        parser.error("MASTER_ADDR in the environment: expected the host of rank 0, as torchrun sets it, got none")
    if device == "cuda":
        told = [name for name in ("LOCAL_WORLD_SIZE", "LOCAL_RANK") if os.environ.get(name)]
        ranks = max([parser.of_launch(name, 0, MOST) + (name == "LOCAL_RANK") for name in told], default=1)
        if ranks > (count := torch.cuda.device_count()):
            parser.error(f"argument --device: expected a GPU for each of {ranks} ranks of a host, got {count}")
    return True


def _init(device: str, **alone: Any) -> None:
    if device == "cuda":
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK") or 0))
    dist.init_process_group("nccl" if device == "cuda" else "gloo", **alone)


def _leave(status: int) -> NoReturn:
    dist.barrier()  # gloo may still hold tensors of the last collective, which Python cannot release at exit
    dist.destroy_process_group()
    raise SystemExit(int(status))


def verify_model_command(argv: Sequence[str]) -> None:
    """Print the report of `verify_model`; exit with 1 if anything is wrong."""
    text = (
        "Compare a training step of your model on all ranks with the same step on one rank; see cp_mesh.verify_model. "
        "Start it with torchrun; without torchrun it runs on one rank."
    )
    options = {
        "factory": {"help": "module:function or file.py:function; returns a dict of verify_model's arguments"},
        "--device": {"choices": ("cpu", "cuda"), "default": "cuda" if torch.cuda.is_available() else "cpu"},
        "--dtype": {"choices": (*DTYPES, "own"), "help": "default: float64; own: as the factory's model has it"},
        "--probes": {"action": "store_true", "help": "run only the probes, without the reference"},
        "--json": option(output_file, "FILE", "also write the report as JSON"),
    }
    parser = Parser("verify", text, options)
    args = parser.parse_args(argv)
    is_launched = _check_launch(parser, args.device)
    try:
        split(args.factory)
        _init(args.device, **({} if is_launched else {"store": dist.HashStore(), "rank": 0, "world_size": 1}))
        given = arguments_of(args.factory)
    except ArgumentError as error:
        if error.__cause__ and dist.get_rank() == 0:
            traceback.print_exception(error.__cause__)
        parser.error(str(error))
    if args.dtype is not None:
        given["dtype"] = None if args.dtype == "own" else getattr(torch, args.dtype)
    if args.probes:
        given["reference"] = False
    try:
        report = verify_model(**{"progress": True, **given})
    except VerificationError as error:
        assert isinstance(error.report, ModelReport)
        report = error.report
    except (ArgumentError, UnsupportedError) as error:
        parser.error(f"factory {args.factory}: {error}")
    except SystemExit as error:
        parser.error(f"factory {args.factory}: expected a verdict, got SystemExit({error.code!r}) of its own code")
    if dist.get_rank() == 0:
        report.print()
        if args.json:
            with parser.writing(args.json):
                args.json.write_text(report.to_json() + "\n")
    _leave(not report.passed)


def verify_command(argv: Sequence[str]) -> None:
    """Print a line for each configuration, and a verdict; exit with 1 if any is wrong, with 2 if any is refused."""
    cuda = torch.cuda.is_available()
    text = (
        "Compare cp_mesh with one device on the ranks of this launch: three layouts, causal and full. "
        "cp_mesh.tools.verify takes other masks and settings. Start it with torchrun. Other commands, each with "
        "--help: verify (tests your trainer), explain (shows what a call will run)."
    )
    options = {
        "--device": {"choices": ("cpu", "cuda"), "default": "cuda" if cuda else "cpu"},
        "--dtype": one_of(*DTYPES, nargs="+", default=["bfloat16"] if cuda else ["float64"]),
        "--kernel": _KERNEL | {"nargs": "+", "default": ["auto"]},
        "--method": _METHOD | {"nargs": "+", "default": ["auto"]},
        **_DEGREE,
        "--seq-len": option(number_of(), text="sequence length; default: 256 per rank", nargs="+", default=[None]),
        "--csv": option(output_file, "FILE", "append the errors, a row for each configuration"),
    }
    parser = Parser("", text, options)
    args = parser.parse_args(argv)
    if not _check_launch(parser, args.device):
        parser.error("no launcher: start it with torchrun --nproc-per-node 2 -m cp_mesh")
    _init(args.device)
    mesh = init_device_mesh(args.device, (dist.get_world_size(),), mesh_dim_names=("cp",))
    hardware = torch.cuda.get_device_name() if args.device == "cuda" else "cpu"
    is_first = dist.get_rank() == 0
    progress, tried, said = Progress(is_first), 0, ""
    wrong: list[str] = []
    refused: list[str] = []
    say = show if is_first else lambda *_: None
    for dtype, kernel, method, seq_len in itertools.product(args.dtype, args.kernel, args.method, args.seq_len):
        tokens = seq_len or 256 * mesh.size()
        say(f"{dtype}, {tokens} tokens on {mesh.size()} ranks, kernel {kernel}, method {method}:")
        say(_row("layout", "mask", "kernel", *NAMES, "of limit", ""))
        degree = {"ulysses_degree": args.ulysses_degree} if method == "hybrid" else {}
        parts = mesh.size() if method == "ulysses" else degree.get("ulysses_degree") or 1
        for layout, causal in itertools.product(LAYOUTS, (True, False)):
            where, tried = (layout.spec(), "causal" if causal else "full"), tried + 1
            settings: dict[str, Any] = {"layout": layout, "mask": Mask(causal=causal), "kernel": kernel}
            settings |= {"dtype": getattr(torch, dtype), "method": method, "seq_len": seq_len, **degree}
            try:
                with progress(f"{' '.join(where)}, configuration {tried}"):
                    report = verify(mesh, num_heads=4 * parts, **settings)  # divisible
            except VerificationError as error:
                assert isinstance(error.report, Report)
                report = error.report
                wrong.append(f"{dtype} {' '.join(where)}")
            except (ArgumentError, UnsupportedError) as error:
                refused.append(f"{dtype} {' '.join(where)}")
                say(_row(*where, *["-"] * 7, "refused"), False)
                for line in textwrap.wrap(str(error), WIDTH - 4, break_on_hyphens=False) if str(error) != said else ():
                    say(f"    {line}", False)
                said = str(error)
                continue
            for line in _lines_of(where, report):
                say(line, report.passed)
            if is_first and args.csv:
                case = [dtype, tokens, *where, report.kernel if method == "auto" else f"{method}/{report.kernel}"]
                figures = [f"{table[name]:.3g}" for name in NAMES for table in (report.errors, report.ratios)]
                with parser.writing(args.csv):
                    _append(args.csv, [f"{mesh.size()}x {hardware}", torch.__version__, *case, *figures])
    took = f"({tried} configurations on {mesh.size()} ranks, {time.perf_counter() - progress.started:.1f} s)"
    bad, word = (wrong, "WRONG") if wrong else (refused, "REFUSED")
    say(f"{word}: {len(bad)}, the first is {bad[0]} {took}" if bad else f"RIGHT {took}", not bad)
    _leave(1 if wrong else REFUSED if refused else 0)


def _lines_of(where: tuple[str, str], report: Report) -> Iterator[str]:
    """Lines of a configuration: RMS errors against one device in float64, and the largest error over its limit."""
    errors = [f"{report.errors[name]:.1e}" for name in NAMES]
    verdict = "exact" if report.passed else "WRONG"
    most = max(report.ratios.values(), key=lambda ratio: (ratio != ratio, ratio))  # nan is the worst
    yield _row(*where, report.kernel, *errors, f"{100 * most:.0f} %", verdict)
    alone = [f"{name} ({100 * ratio:.0f} %)" for name, ratio in report.of_one_device.items() if not ratio <= 1]
    if alone:
        yield f"    the kernel is wrong on one device too: {', '.join(alone)}"


def _row(layout: str, mask: str, kernel: str, *figures: str) -> str:
    *errors, share, verdict = figures
    cells = [f"{layout:10}", f"{mask:6}", f"{kernel:11}", *(f"{x:>7}" for x in errors), f"{share:>8}", verdict]
    return f"  {'  '.join(cells)}".rstrip()


def _append(path: Path, row: list[object]) -> None:
    header = ["hardware", "torch", "dtype", "seq_len", "layout", "mask", "kernel"]
    header += [f"{name}_{what}" for name in NAMES for what in ("rms_error", "of_allowed")]
    rows: list[Any] = [row] if path.exists() else [header, row]
    with path.open("a", newline="") as file:
        csv.writer(file).writerows(rows)


def main() -> None:
    """Run the command that the arguments name."""
    first = sys.argv[1] if len(sys.argv) > 1 else ""
    if first == "--version":
        print(f"cp_mesh {sys.modules['cp_mesh'].__version__}")
    elif first == "explain":
        explain_command(sys.argv[2:])
    elif first == "verify":
        verify_model_command(sys.argv[2:])
    elif first and not first.startswith("-"):
        Parser("", "", {}).error(f"expected explain, verify, or only options, got {first!r}")
    else:
        verify_command(sys.argv[1:])


if __name__ == "__main__":
    main()
