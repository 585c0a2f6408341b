"""Every check that needs GPUs, one after the other: `python3 tests/gpu.py --gpus 2 --logs DIR`; a line each.

``--one-gpu --gpus 4`` has four ranks share one GPU, which takes longer. The checks run with the packages of this
Python; FlashAttention-4 and 3 take part where they are installed, and so does Transformers' Trainer with accelerate.
Logs hold what each printed. Exits with 1 if any failed or ran past its time.
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

TESTS = Path(__file__).resolve().parent
ROOT = TESTS.parent
GRACE = 40.0  # seconds in which torchrun ends its ranks: it gives them 30


def commands(gpus: int, one_gpu: bool = False) -> dict[str, tuple[list[str], dict[str, str], int]]:
    """By name: the command, what it adds to the environment, and how many seconds it may take."""
    shared, longer = (["--one-gpu"], 2) if one_gpu else ([], 1)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node"]
    races, gate = str(TESTS / "test_symmetric_memory.py"), str(TESTS / "test_gpu.py")
    sanitizer = {"TORCH_CUDA_SANITIZER": "1"}
    # verbose, so that a run which is ended has said what failed
    alone = [sys.executable, "-m", "pytest", "-v", "-p", "no:cacheprovider", "-m", "gpu"]
    # most of the time kernels are being compiled
    workers = ["-n", str(min(16, os.cpu_count() or 1))] if importlib.util.find_spec("xdist") else []
    pytest = [*alone, *workers]
    # PyTorch probes the driver with calls that fail and are handled: they are no errors of memory.
    memcheck = ["compute-sanitizer", "--tool", "memcheck", "--report-api-errors", "no", "--target-processes", "all"]
    memcheck += ["--error-exitcode", "9"]
    by_part = {
        "FlashAttention": ["test_flash_attn.py", "test_segments.py"],
        "Triton": ["test_triton_attention.py", "test_triton_scores.py"],
        "flex": ["test_flex_gpu.py"],
    }
    files = {part: [str(TESTS / name) for name in names] for part, names in by_part.items()}
    others = [f"--ignore={name}" for names in files.values() for name in names]
    found: dict[str, tuple[list[str], dict[str, str], int]] = {
        "kernels on one GPU": ([*pytest, str(TESTS), *others, "-k", "not large_tensors"], {}, 400),
        # they skip where another process leaves too little memory
        "large tensors": ([*alone, str(TESTS / "test_kernels_gpu.py"), "-k", "large_tensors"], {}, 200),
        "FlashAttention on one GPU": ([*pytest, *files["FlashAttention"]], {}, 600),
        "Triton on one GPU": ([*pytest, *files["Triton"]], {}, 600),
        # each process compiles one kernel at a time
        "flex on one GPU": ([*pytest, *files["flex"]], {"TORCHINDUCTOR_COMPILE_THREADS": "1"}, 900),
        "races": ([*torchrun, str(gpus), races, *shared], {}, 200 * longer),
        "stream sanitizer": ([*torchrun, str(gpus), races, "--only", "stalled", *shared], sanitizer, 60 * longer),
        "memcheck": ([*memcheck, *torchrun, "2", races, "--only", "exceptions", *shared], {}, 240 * longer),
        "low precision": ([*torchrun, str(gpus), gate, *shared], {}, 300 * longer),
        "masks and scores": ([*torchrun, str(gpus), gate, "--scores", *shared], {}, 400 * longer),
        "functions of users": ([*torchrun, str(gpus), gate, "--flex", *shared], {}, 300 * longer),
    }
    if not one_gpu:
        rest = [str(TESTS / f"test_{name}.py") for name in ("changing_layouts", "decoding", "ranks", "warming")]
        found["other tests on several GPUs"] = ([*alone[:-1], "multigpu", *rest], {}, 300)
    if importlib.util.find_spec("fla"):
        found["fla-core on one GPU"] = ([sys.executable, str(TESTS / "fla_on_gpu.py")], {}, 1500)
    if not one_gpu and all(map(importlib.util.find_spec, ("transformers", "accelerate"))):
        trainer = str(TESTS / "integrations" / "gpu_trainer.py")
        found["trainer"] = ([sys.executable, trainer, "--gpus", str(gpus)], {}, 400)
    return found


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
    parser.add_argument("--only", nargs="+", choices=commands(2))
    args = parser.parse_args()
    logs = args.logs or Path(tempfile.mkdtemp(prefix="cp_mesh_gpu_"))
    logs.mkdir(parents=True, exist_ok=True)
    print(f"logs in {logs}")
    path = os.pathsep.join([str(TESTS.parent), str(TESTS), os.environ.get("PYTHONPATH", "")])
    end_with_commands()
    failed = False
    for name, (command, extra, seconds) in commands(args.gpus, args.one_gpu).items():
        if args.only and name not in args.only:
            continue
        begin, log = time.perf_counter(), logs / f"{name.replace(' ', '_')}.log"
        verdict = finish(command, seconds, log, {"PYTHONPATH": path} | extra)
        failed |= verdict != "ok"
        lines = log.read_text().splitlines()
        said = lines[-1].strip("= ") if lines and verdict == "ok" else ""  # how many passed, and were skipped
        print(f"{name:27} {verdict} ({time.perf_counter() - begin:.0f} s) {said}", flush=True)
        if verdict != "ok":
            print("\n".join([line for line in lines[:-15] if "FAILED" in line][:40] + lines[-15:]))
    sys.exit(failed)


if __name__ == "__main__":
    main()
