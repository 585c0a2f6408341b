"""Verify every layout, causal and full, on the ranks of this launch: ``torchrun --nproc-per-node 8 -m cp_mesh``.

``torchrun --nproc-per-node 8 -m cp_mesh verify module:factory`` verifies a training set-up, see `verify_model`.
``python -m cp_mesh explain --seq-len 131072 --cp 8`` explains a configuration, with no ranks.

Each ends with one line that says it all. A rank's exit status is 0 if all is right, 1 if something is wrong, and 2 if
something could not run; torchrun makes 1 of both.
"""

from __future__ import annotations

import argparse
import csv
import itertools
import os
import re
import shutil
import sys
import textwrap
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from fractions import Fraction
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from cp_mesh.call.methods import METHODS
from cp_mesh.comm.exchange import TRANSPORTS
from cp_mesh.errors import ArgumentError, UnsupportedError
from cp_mesh.geometry.balance import balance
from cp_mesh.geometry.layouts import Contiguous, Layout, Striped, ZigZag, ZigZagDocuments
from cp_mesh.geometry.mask import Mask
from cp_mesh.kernels.table import KERNELS
from cp_mesh.tools.explain.explain import explain
from cp_mesh.tools.explain.picture import check_picture
from cp_mesh.tools.explain.predict.machines import find_machine
from cp_mesh.tools.explain.predict.time import MACHINES
from cp_mesh.tools.verify.factory import arguments_of, split
from cp_mesh.tools.verify.report import ModelReport, Progress, show
from cp_mesh.tools.verify.verify import NAMES, Report, VerificationError, verify
from cp_mesh.tools.verify.verify_model import verify_model

LAYOUTS: tuple[Layout, ...] = (Contiguous(), ZigZag(), Striped())
DTYPES = ("bfloat16", "float16", "float32", "float64")
WIDTH = 100
OWNER_COLUMNS = WIDTH - len("owner ")
REFUSED = 2  # the exit status of what could not run; 1 is that of what is wrong
MOST = 1 << 20
"""Of any number of an option, and of tokens that are computed."""
MOST_PLANNED = 1 << 27
"""Tokens that explain plans, in 6 GB."""
MOST_RANKS = 1 << 13
"""Of explain, which has tables of pairs of ranks."""
UNITS = {"": 1, "k": 1 << 10, "m": 1 << 20}


def main() -> None:
    """One of the commands."""
    commands = {"explain": explain_command, "verify": verify_model_command}
    first = sys.argv[1] if len(sys.argv) > 1 else ""
    if first in commands:
        commands[first](sys.argv[2:])
    elif first and not first.startswith("-"):
        moved = "; the repository has it as examples/benchmarks/calibrate.py" * (first == "calibrate")
        _Parser().error(f"expected explain, verify, or options alone, got {first!r}{moved}")
    else:
        verify_command(sys.argv[1:])


class _Parser(argparse.ArgumentParser):
    """Of 100 columns; of several ranks the first one speaks."""

    def __init__(self, command: str = "", description: str = "") -> None:
        width = min(WIDTH, shutil.get_terminal_size().columns) - 2
        super().__init__(
            prog=f"python -m cp_mesh {command}".strip(),
            description=description,
            formatter_class=lambda prog: argparse.HelpFormatter(prog, width=width),
        )

    def as_typed(self, message: str) -> str:
        """What a function says of its arguments, as options are typed: of ``method='ring'`` ``--method ring``."""
        typed = self._option_string_actions
        for words, option in ALIASES.items():
            if option.split()[0] in typed:
                message = re.sub(words, option, message)
        options = {action.dest: option for option, action in typed.items()}
        names = "|".join(map(re.escape, options))
        message = re.sub(rf"\b({names})=(?:'([^']*)'|(\w+))", lambda x: f"{options[x[1]]} {x[2] or x[3]}", message)
        bare = "|".join(re.escape(name) for name in options if "_" in name)  # others are words too
        return re.sub(rf"(?<![\w-])({bare})\b", lambda x: options[x[1]], message) if bare else message

    def error(self, message: str) -> NoReturn:
        """What is wrong, and where to read on; torchrun ends all ranks when the first one leaves."""
        message = self.as_typed(message)
        if _rank():
            time.sleep(SPEAKING)
        else:
            lines = textwrap.wrap(f"{self.prog}: error: {message}", WIDTH, break_on_hyphens=False)
            print(*lines, f"see {self.prog} --help", sep="\n", file=sys.stderr, flush=True)
        if dist.is_initialized():
            dist.destroy_process_group()
        raise SystemExit(REFUSED)

    def of_launch(self, name: str, least: int, most: int) -> int:
        """A number that torchrun sets in the environment."""
        word = os.environ.get(name, "")
        if not re.fullmatch("[0-9]{1,9}", word) or not least <= int(word) <= most:
            expected = f"{name} in the environment: expected {least} to {most}, as torchrun sets it"
            self.error(f"{expected}, got {word!r}; unset RANK to run without a launcher")
        return int(word)

    @contextmanager
    def writing(self, path: Path) -> Iterator[None]:
        """What was computed is printed before."""
        try:
            yield
        except OSError as error:
            self.error(f"expected a file that can be written, got {path} ({error.strerror or error})")


def _rank() -> int:
    """Of this process, as its launcher says; one that says no number is refused, and speaks."""
    word = os.environ.get("RANK", "")
    return int(word) if re.fullmatch("[0-9]{1,9}", word) else 0


SPEAKING = 1.0  # seconds for which other ranks wait
ALIASES = {  # arguments of functions that are no options by themselves
    r"\bnum_heads=(\d+), num_kv_heads=(\d+)": r"--heads \1/\2",
    r"\bnum_kv_heads=(\d+)": r"--heads H/\1",
    r"\bnum_heads=(\d+)": r"--heads \1",
    r"\bnum_heads\b": "--heads",
    r"\bcausal=False\b": "--full",
    r"\bexplain\((\d+), (\d+)\)": r"--seq-len \1 --cp \2",
}


def _heads(text: str) -> tuple[int, int]:
    """Query and kv heads, of "32/8" or "32"."""
    try:
        query, kv = (_count(num) for num in (text.split("/") * (1 if "/" in text else 2)))
    except (ValueError, argparse.ArgumentTypeError):
        raise argparse.ArgumentTypeError(f"expected query heads/kv heads, as 32/8, got {text!r}") from None
    return query, kv


def _number(least: int = 1, most: int = MOST) -> Callable[[str], int]:
    """The type of an option: a whole number, as 131072, 131_072, 128K, 1M or 1e6; K is 1024 and M its square."""

    def number(text: str) -> int:
        parts = re.fullmatch(r"([+-]?[0-9]+(?:_[0-9]+)*(?:\.[0-9]+)?(?:e\+?[0-9]{1,3})?)([km]?)", text.lower())
        value = Fraction(parts[1]) * UNITS[parts[2]] if parts and len(text) < 100 else Fraction(1, 2)
        if value.denominator > 1:
            raise argparse.ArgumentTypeError(f"expected a whole number, as 131072, 128K or 1e6, got {text!r}")
        if value < least:
            raise argparse.ArgumentTypeError(f"expected {least} at least, got {text}")
        if value > most:
            raise argparse.ArgumentTypeError(f"expected at most {most}, got {text}")
        return int(value)

    return number


_count, _tokens = _number(), _number(most=MOST_PLANNED)


def _output(text: str) -> Path:
    """The type of an option: a file that can be written; by the first rank, whose host others may not share."""
    path, problem = Path(text), ""
    if not text or os.path.isdir(text):
        problem = f"the folder {path}"
    elif not os.path.isdir(path.parent):
        problem = f"no folder {path.parent}"
    elif not os.access(path if os.path.exists(path) else path.parent, os.W_OK):
        problem = f"no right to write {path}"
    if problem and not _rank():
        raise argparse.ArgumentTypeError(f"expected a file in a folder that is there, got {problem}")
    return path


def explain_command(argv: Sequence[str]) -> None:
    """Print what `cp_mesh.explain` says."""
    parser = _Parser(
        "explain", "What a call will run and why, with predicted times; see cp_mesh.explain. No ranks, no GPU."
    )
    parser.add_argument(
        "--seq-len", type=_tokens, metavar="N", required=True, help="tokens of the whole sequence, as 131072, 128K, 1e6"
    )
    parser.add_argument("--cp", type=_number(most=MOST_RANKS), metavar="N", required=True, help="ranks")
    parser.add_argument(
        "--heads", type=_heads, metavar="H/K", help="query heads/kv heads of a rank: memory and times are told"
    )
    parser.add_argument("--head-dim", type=_count, metavar="N", default=128)
    parser.add_argument("--batch", type=_count, metavar="N", default=1)
    names = [layout.spec() for layout in LAYOUTS]
    parser.add_argument("--layout", choices=(*names, "zigzag_documents", "balanced"), default="zigzag")
    parser.add_argument("--full", action="store_true", help="not causal")
    parser.add_argument("--window", type=_tokens, metavar="N", help="a query sees N tokens back, itself included")
    parser.add_argument(
        "--prefix", type=_number(0, MOST_PLANNED), default=0, metavar="N", help="all queries see the first N tokens"
    )
    parser.add_argument(
        "--documents", type=_tokens, nargs="+", metavar="N", help="lengths of packed documents, again and again"
    )
    parser.add_argument(
        "--scores", nargs="+", metavar="NAME", default=(), help="names of options of the scores, as alibi_slopes"
    )
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda")
    parser.add_argument("--dtype", default="bfloat16", choices=DTYPES)
    _add_names(parser, "--kernel", ("auto", *KERNELS), default="auto")
    _add_names(parser, "--method", ("auto", *METHODS), default="auto")
    _add_degrees(parser)
    parser.add_argument("--transport", default="auto", choices=TRANSPORTS)
    parser.add_argument("--head-chunks", type=_count, metavar="N")
    parser.add_argument("--machine", metavar="NAME", help=f"{', '.join(MACHINES)}, or a file that calibrate.py wrote")
    parser.add_argument("--gpus-per-host", type=_count, metavar="N")
    parser.add_argument(
        "--captured-shards",
        type=_number(most=1 << 40),
        metavar="N",
        help="elements of DTensors over cp that a score_mod reads",
    )
    parser.add_argument(
        "--columns",
        type=_number(most=OWNER_COLUMNS),
        metavar="N",
        default=64,
        help=f"of the strip of owners, up to {OWNER_COLUMNS}",
    )
    parser.add_argument(
        "--plot", type=_output, metavar="FILE", help="also draw a picture, as a .png or .svg; matplotlib"
    )
    args = parser.parse_args(argv)
    if os.environ.get("RANK"):
        parser.of_launch("RANK", 0, MOST - 1)
    heads = args.heads or (None, None)
    documents, layouts = None, {layout.spec(): layout for layout in LAYOUTS}
    if args.layout == "zigzag_documents" and not args.documents:
        parser.error("argument --layout: expected --documents beside zigzag_documents, got none")
    if args.documents:
        rounds = -(-args.seq_len // sum(args.documents))
        if (number := rounds * len(args.documents)) > MOST:
            parser.error(f"argument --documents: expected at most {MOST} in the sequence, got {number}")
        ends = torch.tensor(args.documents).repeat(rounds).cumsum(0)
        documents = torch.bucketize(torch.arange(args.seq_len), ends, right=True)
        edges = torch.cat([ends.new_zeros(1), ends.clamp(max=args.seq_len)])
        layouts["zigzag_documents"] = ZigZagDocuments(edges)
    window = None if args.window is None else (args.window - 1, None if args.full else 0)
    try:
        if args.plot:
            check_picture(args.plot)
        machine = None if args.machine is None else find_machine(args.machine)
        with Progress()("planning"):
            mask = Mask(causal=not args.full, window=window, documents=documents, prefix=args.prefix)
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
                num_kv_heads=heads[1],
                head_chunks=args.head_chunks,
                kernel=args.kernel,
                method=args.method,
                ulysses_degree=args.ulysses_degree,
                inner_ring_size=args.inner_ring_size,
                transport=args.transport,
                machine=machine,
                gpus_per_host=args.gpus_per_host,
                captured_shards=args.captured_shards,
                columns=args.columns,
            )
    except (ArgumentError, UnsupportedError) as error:
        parser.error(str(error))
    print(found)
    show(found.verdict, True)
    if args.plot:
        with parser.writing(args.plot):
            found.plot(args.plot)


def _add_names(parser: argparse.ArgumentParser, option: str, names: Sequence[str], **options: Any) -> None:
    """An option that takes one of many names, which its help lists."""
    parser.add_argument(option, metavar="NAME", choices=names, help=", ".join(names), **options)


def _add_degrees(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--ulysses-degree", type=_count, metavar="N", help="of the hybrid: ranks that exchange heads")
    parser.add_argument("--inner-ring-size", type=_count, metavar="N", help="of the double ring: ranks of a host")


def _check_launch(parser: _Parser, device: str) -> bool:
    """Refuse a device that is not there, and what torchrun would set otherwise; whether this is a rank of a launch."""
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


def _mesh(device: str) -> DeviceMesh:
    """All ranks of this launch."""
    _init(device)
    return init_device_mesh(device, (dist.get_world_size(),), mesh_dim_names=("cp",))


def _init(device: str, **alone: Any) -> None:
    if device == "cuda":
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK") or 0))
    dist.init_process_group("nccl" if device == "cuda" else "gloo", **alone)


def verify_model_command(argv: Sequence[str]) -> None:
    """Print the report of `verify_model`; exit with 1 if anything is wrong."""
    cuda = torch.cuda.is_available()
    parser = _Parser(
        "verify",
        "Compare a training step of your model on the ranks of this launch with one rank; see cp_mesh.verify_model. "
        "Start it with torchrun; without, it runs on one rank.",
    )
    parser.add_argument("factory", help="module:function or file.py:function; returns verify_model's arguments, a dict")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda" if cuda else "cpu")
    parser.add_argument("--dtype", choices=(*DTYPES, "own"), help="default: float64")
    parser.add_argument("--probes", action="store_true", help="probes alone, without the reference")
    parser.add_argument("--json", type=_output, metavar="FILE", help="write the report there too")
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
    if dist.get_rank() == 0:
        report.print()
        if args.json:
            with parser.writing(args.json):
                args.json.write_text(report.to_json() + "\n")
    _leave(not report.passed)


def _leave(status: int) -> NoReturn:
    dist.barrier()  # gloo may still hold tensors of the last collective, which an exiting Python cannot release
    dist.destroy_process_group()
    raise SystemExit(int(status))


def verify_command(argv: Sequence[str]) -> None:
    """Print one line a configuration, and a verdict; exit with 1 if any is wrong, with 2 if any was refused."""
    cuda = torch.cuda.is_available()
    parser = _Parser(
        description="Prove cp_mesh on the ranks of this launch: three layouts, causal and full. cp_mesh.verify proves "
        "other masks and settings. Start it with torchrun. Other commands, each with --help: verify (your trainer), "
        "explain (what will run, without ranks)."
    )
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda" if cuda else "cpu")
    _add_names(parser, "--dtype", DTYPES, nargs="+", default=["bfloat16"] if cuda else ["float64"])
    _add_names(parser, "--kernel", ("auto", *KERNELS), nargs="+", default=["auto"])
    _add_names(parser, "--method", ("auto", *METHODS), nargs="+", default=["auto"])
    _add_degrees(parser)
    parser.add_argument(
        "--seq-len", nargs="+", type=_count, metavar="N", default=[None], help="tokens; default 256 a rank"
    )
    parser.add_argument("--csv", type=_output, metavar="FILE", help="append the figures, one row a configuration")
    args = parser.parse_args(argv)
    if not _check_launch(parser, args.device):
        parser.error("no ranks: start it with torchrun --nproc-per-node 2 -m cp_mesh")
    mesh = _mesh(args.device)
    hardware = torch.cuda.get_device_name() if args.device == "cuda" else "cpu"
    is_first = dist.get_rank() == 0
    progress, tried, said = Progress(is_first), 0, ""
    wrong: list[str] = []
    refused: list[str] = []
    for dtype, kernel, method, seq_len in itertools.product(args.dtype, args.kernel, args.method, args.seq_len):
        tokens = seq_len or 256 * mesh.size()
        if is_first:
            show(f"{dtype}, {tokens} tokens on {mesh.size()} ranks, kernel {kernel}, method {method}:")
            show(_row("layout", "mask", "kernel", *NAMES, "of limit", ""))
        given = {name: getattr(args, name) for name in ("ulysses_degree", "inner_ring_size")}
        degree = {
            name: size for name, size in given.items() if method in METHODS and METHODS[method].degree_option == name
        }
        parts = mesh.size() if method == "ulysses" else degree.get("ulysses_degree") or 1
        for layout, causal in itertools.product(LAYOUTS, (True, False)):
            where, tried = (layout.spec(), "causal" if causal else "full"), tried + 1
            try:
                with progress(f"{' '.join(where)}, configuration {tried}"):
                    report = verify(
                        mesh,
                        layout=layout,
                        mask=Mask(causal=causal),
                        dtype=getattr(torch, dtype),
                        kernel=kernel,
                        method=method,
                        num_heads=4 * parts,  # divisible
                        **degree,
                        seq_len=seq_len,
                    )
            except VerificationError as error:
                assert isinstance(error.report, Report)
                report = error.report
                wrong.append(f"{dtype} {' '.join(where)}")
            except (ArgumentError, UnsupportedError) as error:
                refused.append(f"{dtype} {' '.join(where)}")
                if is_first:
                    show(_row(*where, *["-"] * 7, "refused"), False)
                    text = parser.as_typed(str(error))
                    for line in textwrap.wrap(text, WIDTH - 4, break_on_hyphens=False) if text != said else ():
                        show(f"    {line}", False)
                    said = text
                continue
            if is_first:
                for line in _lines_of(where, report):
                    show(line, report.passed)
                if args.csv:
                    case = [dtype, tokens, *where, report.kernel if method == "auto" else f"{method}/{report.kernel}"]
                    figures = [f"{table[name]:.3g}" for name in NAMES for table in (report.errors, report.ratios)]
                    with parser.writing(args.csv):
                        _append(args.csv, [f"{mesh.size()}x {hardware}", torch.__version__, *case, *figures])
    if is_first:
        took = f"({tried} configurations on {mesh.size()} ranks, {progress.seconds:.1f} s)"
        bad, word = (wrong, "WRONG") if wrong else (refused, "REFUSED")
        show(f"{word}: {len(bad)}, the first is {bad[0]} {took}" if bad else f"RIGHT {took}", not bad)
    _leave(1 if wrong else REFUSED if refused else 0)


def _lines_of(where: tuple[str, str], report: Report) -> Iterator[str]:
    """RMS errors against one device in float64, and the largest share of what is allowed."""
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
    new = not path.exists()
    with path.open("a", newline="") as file:
        csv.writer(file).writerows([header, row] if new else [row])


if __name__ == "__main__":
    main()
