"""Every check that needs GPUs, one after the other: `python3 tests/gpu.py --gpus 2 --logs DIR`; a line each.

They run with the packages of this Python; FlashAttention-4 and 3 take part where they are installed. Logs hold what
each printed. Exits with 1 if any failed or ran past its time.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

TESTS = Path(__file__).resolve().parent


def commands(gpus: int) -> dict[str, tuple[list[str], dict[str, str], int]]:
    """By name: the command, what it adds to the environment, and how many seconds it may take."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node"]
    races = str(TESTS / "test_symmetric_memory.py")
    pytest = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "gpu"]
    pytest += ["-n", "8"] if importlib.util.find_spec("xdist") else []  # most of the time kernels are being compiled
    # PyTorch probes the driver with calls that fail and are handled: they are no errors of memory.
    memcheck = ["compute-sanitizer", "--tool", "memcheck", "--report-api-errors", "no", "--target-processes", "all"]
    memcheck += ["--error-exitcode", "9"]
    return {
        "kernels on one GPU": ([*pytest, str(TESTS)], {}, 400),
        "races": ([*torchrun, str(gpus), races], {}, 200),
        "stream sanitizer": ([*torchrun, str(gpus), races, "--only", "stalled"], {"TORCH_CUDA_SANITIZER": "1"}, 60),
        "memcheck": ([*memcheck, *torchrun, "2", races, "--only", "exceptions"], {}, 240),
        "low precision": ([*torchrun, str(gpus), str(TESTS / "test_gpu.py")], {}, 300),
        "masks and scores": ([*torchrun, str(gpus), str(TESTS / "test_gpu.py"), "--scores"], {}, 400),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gpus", type=int, default=2)
    parser.add_argument("--logs", type=Path, help="default: a new folder, which is named")
    parser.add_argument("--only", nargs="+", choices=commands(2))
    args = parser.parse_args()
    logs = args.logs or Path(tempfile.mkdtemp(prefix="cp_mesh_gpu_"))
    logs.mkdir(parents=True, exist_ok=True)
    print(f"logs in {logs}")
    path = os.pathsep.join([str(TESTS.parent), str(TESTS), os.environ.get("PYTHONPATH", "")])
    failed = False
    for name, (command, extra, seconds) in commands(args.gpus).items():
        if args.only and name not in args.only:
            continue
        begin, log = time.perf_counter(), logs / f"{name.replace(' ', '_')}.log"
        with log.open("w") as file:
            try:
                environment = os.environ | {"PYTHONPATH": path} | extra
                done = subprocess.run(command, stdout=file, stderr=subprocess.STDOUT, env=environment, timeout=seconds)
                verdict = "ok" if done.returncode == 0 else f"FAILED, exit code {done.returncode}"
            except subprocess.TimeoutExpired:
                verdict = f"FAILED, still running after {seconds} s"
            except FileNotFoundError as error:
                verdict = f"FAILED, {error}"
        failed |= verdict != "ok"
        print(f"{name:20} {verdict} ({time.perf_counter() - begin:.0f} s)", flush=True)
        if verdict != "ok":
            print("\n".join(log.read_text().splitlines()[-15:]))
    sys.exit(failed)


if __name__ == "__main__":
    main()
