"""Every check that needs GPUs, one after the other: `python3 tests/gpu.py --gpus 2 --logs DIR`; a line each.

A part takes at most 300 seconds on two GPUs; what takes longer has several, such as "flex on one GPU 3/10", which
``--only`` names. ``--one-gpu --gpus 2`` has ranks share one GPU, which takes longer. The checks run with the packages
of this Python; FlashAttention-4 and 3 take part where they are installed, and so does Transformers' Trainer with
accelerate. Logs hold what each printed. Exits with 1 if any failed or ran past its time.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

TESTS = Path(__file__).resolve().parent
ROOT = TESTS.parent
GRACE = 40.0  # seconds in which torchrun ends its ranks: it gives them 30
LIMIT = 300.0  # seconds of a part


def commands(gpus: int, one_gpu: bool = False) -> dict[str, tuple[list[str], dict[str, str]]]:
    """By name: the command of a part, and what it adds to the environment."""
    shared = ["--one-gpu"] if one_gpu else []
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node"]
    races, gate = str(TESTS / "test_symmetric_memory.py"), str(TESTS / "test_gpu.py")
    # verbose, so that a run which is ended has said what failed
    alone = [sys.executable, "-m", "pytest", "-v", "-p", "no:cacheprovider", "-m", "gpu"]
    # most of the time kernels are being compiled
    workers = ["-n", str(min(16, os.cpu_count() or 1))] if importlib.util.find_spec("xdist") else []
    pytest = [*alone, *workers]
    # PyTorch probes the driver with calls that fail and are handled: they are no errors of memory.
    memcheck = ["compute-sanitizer", "--tool", "memcheck", "--report-api-errors", "no", "--target-processes", "all"]
    memcheck += ["--error-exitcode", "9"]
    by_part = {
        "FlashAttention": (["test_flash_attn.py", "test_segments.py"], 2),
        "Triton": (["test_triton_attention.py"], 3),
        "flex": (["test_flex_gpu.py"], 10),
    }
    files = {part: [str(TESTS / name) for name in names] for part, (names, _) in by_part.items()}
    others = [f"--ignore={name}" for names in files.values() for name in names]
    # by name: the command, what it adds to the environment, and its number of parts
    whole: dict[str, tuple[list[str], dict[str, str], int]] = {
        "kernels on one GPU": ([*pytest, str(TESTS), *others, "-k", "not large_tensors"], {}, 2),
        # they skip where another process leaves too little memory
        "large tensors": ([*alone, str(TESTS / "test_kernels_gpu.py"), "-k", "large_tensors"], {}, 1),
        "races": ([*torchrun, str(gpus), races, *shared], {}, 2),
        "stream sanitizer": (
            [*torchrun, str(gpus), races, "--only", "stalled", *shared],
            {"TORCH_CUDA_SANITIZER": "1"},
            1,
        ),
        "memcheck": ([*memcheck, *torchrun, "2", races, "--only", "exceptions", *shared], {}, 1),
        "low precision": ([*torchrun, str(gpus), gate, *shared], {}, 2),
        "masks and scores": ([*torchrun, str(gpus), gate, "--scores", *shared], {}, 2),
        "functions of users": ([*torchrun, str(gpus), gate, "--flex", *shared], {}, 3),
        "latent keys": ([*torchrun, str(gpus), str(TESTS / "latent_on_gpu.py"), *shared], {}, 1),
    }
    # of flex, each process compiles one kernel at a time
    whole |= {
        f"{part} on one GPU": ([*pytest, *files[part]], {"TORCHINDUCTOR_COMPILE_THREADS": "1"}, num)
        for part, (_, num) in by_part.items()
    }
    if not one_gpu:
        rest = [str(TESTS / f"test_{name}.py") for name in ("changing_layouts", "decoding", "ranks", "warming")]
        whole["other tests on several GPUs"] = ([*alone[:-1], "multigpu", *rest], {}, 1)
    if importlib.util.find_spec("fla"):
        whole["fla-core on one GPU"] = ([sys.executable, str(TESTS / "fla_on_gpu.py")], {}, 3)
    if not one_gpu and all(map(importlib.util.find_spec, ("transformers", "accelerate"))):
        trainer = str(TESTS / "integrations" / "gpu_trainer.py")
        whole["trainer"] = ([sys.executable, trainer, "--gpus", str(gpus)], {}, 1)
    return {
        name if num == 1 else f"{name} {i}/{num}": (command if num == 1 else [*command, "--part", f"{i}/{num}"], more)
        for name, (command, more, num) in whole.items()
        for i in range(1, num + 1)
    }


def part_of(items: Sequence[Any], part: str | None) -> list[Any]:
    """Those of a part such as "2/3"; all of them without."""
    i, num = map(int, (part or "1/1").split("/"))
    return [*items[i - 1 :: num]]


def finish(words: Sequence[str], seconds: float, log: Path, more: Mapping[str, str]) -> str:
    """Run a command from the root of the repository, its output at the end of a log: "ok", or what became of it.

    ``more``: than this process has in its environment. If time is up, or this process is told to end, it is ended with
    all that it started.
    """
    with log.open("a") as file:
        file.write(f"\n$ {shlex.join(words)}\n")
        file.flush()
        try:
            process = subprocess.Popen(
                words, cwd=ROOT, stdout=file, stderr=subprocess.STDOUT, env=os.environ | more, start_new_session=True
            )
        except FileNotFoundError as error:
            return f"FAILED, {error}"
        try:
            code = process.wait(seconds)
        except subprocess.TimeoutExpired:
            return f"FAILED, ended after {seconds:.0f} s"
        finally:
            end(process)
    return "ok" if code == 0 else f"FAILED, exit code {code}"


def end(process: subprocess.Popen[bytes]) -> None:
    """A process that leads a session, if it still runs. torchrun's ranks are in sessions of their own: it ends them."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        if process.poll() is None:
            os.killpg(process.pid, number)
            with suppress(subprocess.TimeoutExpired):
                process.wait(GRACE)


def end_with_commands() -> None:
    """Let SIGTERM end what `finish` runs as well."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gpus", type=int, default=2)
    parser.add_argument("--one-gpu", action="store_true", help="as many ranks on the first GPU")
    parser.add_argument("--logs", type=Path, help="default: a new folder, which is named")
    parser.add_argument("--only", nargs="+", metavar="NAME", help="parts, or all parts of a check")
    args = parser.parse_args()
    logs = args.logs or Path(tempfile.mkdtemp(prefix="cp_mesh_gpu_"))
    logs.mkdir(parents=True, exist_ok=True)
    print(f"logs in {logs}")
    path = os.pathsep.join([str(TESTS.parent), str(TESTS), os.environ.get("PYTHONPATH", "")])
    end_with_commands()
    failed = False
    parts = commands(args.gpus, args.one_gpu)
    if unknown := [x for x in args.only or () if not any(name == x or name.startswith(f"{x} ") for name in parts)]:
        parser.error(f"--only: {unknown} are none of {list(parts)}")
    for name, (command, extra) in parts.items():
        if args.only and not any(name == x or name.startswith(f"{x} ") for x in args.only):
            continue
        begin, log = time.perf_counter(), logs / f"{name.replace(' ', '_').replace('/', '_of_')}.log"
        verdict = finish(command, LIMIT * (2 if args.one_gpu else 1), log, {"PYTHONPATH": path} | extra)
        failed |= verdict != "ok"
        lines = log.read_text().splitlines()
        said = lines[-1].strip("= ") if lines and verdict == "ok" else ""  # how many passed, and were skipped
        print(f"{name:27} {verdict} ({time.perf_counter() - begin:.0f} s) {said}", flush=True)
        if verdict != "ok":
            print("\n".join([line for line in lines[:-15] if "FAILED" in line][:40] + lines[-15:]))
    sys.exit(failed)


if __name__ == "__main__":
    main()
