"""Run the benchmarks that need four or eight GPUs of one host, in calls of under ten minutes, most valuable first.

    python examples/benchmarks/many_gpus.py --list                           # commands, their purpose, time limits
    python examples/benchmarks/many_gpus.py --gpus 8 --call 1 --out many     # call 1: its CSVs and log in a folder
    python examples/benchmarks/many_gpus.py --gpus 4 --only tp --out many    # some of the runs
    python examples/benchmarks/many_gpus.py --gpus 4 --device cpu --out tiny # all, in sizes that say nothing of speed

They need FlashAttention-4 and ring-flash-attention. Each run checks results before it times them. A run is stopped at
its time limit, or when `--seconds` of all runs are spent, and the next one starts; the rows that it has written stay.
Each run prints a line with its outcome; the exit code is 1 if one failed. Rows per GPU are equal on 4 and 8 GPUs, so 4
GPUs have half as many tokens. Predictions: `predicted.py --gpus 8`; add `--measured many/methods_8xh200.csv` to compare
them with measurements. `--device cpu` leaves out runs that need a GPU.
"""

from __future__ import annotations

import argparse
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
BENCHMARKS, GATES = "examples/benchmarks", "tests/gpu.py"
GRACE = 40.0  # seconds in which torchrun ends its ranks: it gives them 30


@dataclass(frozen=True)
class Run:
    """One command.

    Attributes:
        call: that it is part of.
        aim: what it is to show.
        script: a file of the repository, or "-m" and a module.
        options: of the script, {gpus} and {tokens} filled in: tokens of 16K rows a GPU.
        seconds: that it may take.
        tiny: options after these on CPUs; None: needs a GPU.
        ranks: how many; 0: no torchrun; None: as many as there are GPUs.
        csv: whether the script writes one, of the run's name.
    """

    call: int
    aim: str
    script: str
    options: str
    seconds: int
    tiny: str | None
    ranks: int | None = None
    csv: bool = True


TIMED = "--repeats 1 --min-repeats 1 --seconds-per-case 0.01"
TINY_ATTENTION = f"--device cpu --local-len 16 --gate-len 16 --heads 8/4 --head-dim 16 {TIMED}"
TINY_LAYERS = "--device cpu --dim 32 --heads 4 --kv-heads 4 --ffn 48 --vocab 64"
TINY_CONFIG = (
    '{"model_type": "llama", "hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4,'
    ' "num_key_value_heads": 4, "num_hidden_layers": 2, "vocab_size": 64}'
)
TINY_STEPS = f"{TINY_LAYERS} --layers 2 --seq-len 64 --precision fp32 --warmup 0 --steps 1"
RIVALS = "ulysses/fa4 torch/allgather torch/allgather/expanded ring_flash_attn/zigzag/fa4 ring_flash_attn/llama3/fa4"
OURS = "floor/fa4 cp_mesh/[ra]*/zigzag/fa4/symm* cp_mesh/ulysses/[cz]*/fa4/symm*"
INNER = "cp_mesh/hybrid[24]/zigzag/fa4/symm* cp_mesh/double_ring[24]/zigzag/fa4/auto"
VERIFY = "verify examples/verify_llama.py"

RUNS = {
    "methods": Run(
        1, "ring >= 0.80, 0.95, 0.98 of its floor at 1K, 4K (graph), 16K rows (in a row); `auto` ahead of every rival;"
        " every method, the hybrid and the double ring on 2 x 2 and 2 x 4",
        f"{BENCHMARKS}/attention.py", "--queued --graph --mask causal --heads 32/8 64/8 32/32 --local-len 1024 4096"
        f" 16384 --repeats 7 --seconds-per-case 0.9 --time-limit 270 --contestants {OURS} {INNER} {RIVALS}",
        320, TINY_ATTENTION,
    ),
    "memory": Run(
        1, "128K tokens on 8, heads 32/32: at most 1.3 GiB extra memory, 0.65 in eight chunks",
        f"{BENCHMARKS}/attention.py", f"--mask causal --heads 32/32 --local-len 16384 --head-chunks 8 {TIMED}"
        " --contestants cp_mesh/ring/zigzag/fa4/symm*",
        60, f"{TINY_ATTENTION} --head-chunks 4",
    ),
    "batches": Run(
        1, "packed documents of 64K tokens, heads 64/8: >= 450 TFLOP/s a GPU on batches that change (ahead_tflops)",
        f"{BENCHMARKS}/batches.py", "--heads 64/8 --layers 2 --layouts balanced zigzag --batches 40 --time-limit 15",
        130, "--device cpu --heads 4/2 --head-dim 16 --seq-len 192 --median 10 --layers 1 --batches 6 --blocks 1"
        " --gate-len 16",
    ),
    "rows_64k": Run(
        2, "ring >= 0.99 of its floor at 64K rows in a row; `auto` ahead of every rival",
        f"{BENCHMARKS}/attention.py", "--queued --mask causal --heads 32/8 32/32 64/8 --local-len 65536 --repeats 2"
        " --min-repeats 1 --seconds-per-case 1 --time-limit 180 --contestants floor/fa4 cp_mesh/ring/zigzag/fa4/symm*"
        " cp_mesh/auto/zigzag/fa4/symm* cp_mesh/ulysses/contiguous/fa4/symm* ulysses/fa4 torch/allgather"
        " ring_flash_attn/zigzag/fa4",
        270, TINY_ATTENTION,
    ),
    "documents": Run(
        2, "packed documents: every method and `auto`, balanced; rivals of this script have none",
        f"{BENCHMARKS}/attention.py", "--queued --mask documents --heads 64/8 32/8 32/32 --local-len 1024 4096 16384"
        " 65536 --repeats 5 --seconds-per-case 0.6 --time-limit 100 --contestants cp_mesh/[ra]*/balanced/fa4/symm*"
        " cp_mesh/hybrid[24]/balanced/fa4/symm* cp_mesh/ring/zigzag/fa4/symm* cp_mesh/ulysses/contiguous/fa4/symm*",
        140, f"{TINY_ATTENTION} --contestants cp_mesh/[ra]*/balanced/reference/functional"
        " cp_mesh/hybrid2/balanced/reference/functional",
    ),
    "steps": Run(
        2, "steps of 32K and 128K tokens (on 8), ahead of PyTorch's context_parallel and Ulysses",
        f"{BENCHMARKS}/training.py", "--layers 6 --seq-len {tokens_4k} {tokens_16k} --warmup 1 --steps 5 --seconds 12",
        100, TINY_STEPS,
    ),
    "steps_512k": Run(
        3, "a step of 512K tokens (on 8), 6 layers",
        f"{BENCHMARKS}/training.py", "--layers 6 --seq-len {tokens_64k} --warmup 1 --steps 1",
        160, TINY_STEPS,
    ),
    "steps_1m": Run(
        3, "a step of 1M tokens (on 8), 2 layers",
        f"{BENCHMARKS}/training.py", "--layers 2 --seq-len {tokens_128k} --warmup 1 --steps 1",
        190, TINY_STEPS,
    ),
    "tp_2": Run(
        3, "cp 4 x tp 2 (on 8): cp_mesh's linears ahead of PyTorch's",
        f"{BENCHMARKS}/training.py", "--tp 2 --layers 6 --seq-len {tokens_16k} --warmup 1 --steps 5 --seconds 12",
        80, TINY_STEPS,
    ),
    "tp_4": Run(
        3, "cp 2 x tp 4 (on 8): the same",
        f"{BENCHMARKS}/training.py", "--tp 4 --layers 6 --seq-len {tokens_16k} --warmup 1 --steps 5 --seconds 12",
        80, f"{TINY_STEPS} --seq-len 128",
    ),
    "million": Run(
        4, "one step of a whole Llama-3-8B on a million tokens; on 4 GPUs half as many",
        "examples/long_llama.py", "--seq-len {tokens_128k} --tiled-loss --mlp-rows 16384 --offload-checkpoints"
        " --head-chunks 8 --gate 16384",
        330, f"--device cpu --model '{TINY_CONFIG}' --seq-len 160 --gate 112 --mlp-rows 7 --head-chunks 4",
    ),
    "played": Run(
        4, "rank 0 of 8 played on one of these GPUs, for the figures beside the measured ones",
        f"{BENCHMARKS}/played.py", "--ranks 8 --rank 0 --methods ring all_gather ulysses hybrid2 hybrid4 --gate-len 256"
        " --heads 32/8 64/8 32/32 --local-len 1024 4096 16384 --seconds-per-case 0.5 --repeats 5 --time-limit 60",
        70, None, ranks=0,
    ),
    "verify_trainer": Run(
        4, "`verify_model` on the trainer: packed documents, balanced, all ranks of one cp group",
        "-m cp_mesh", f"{VERIFY}:one_group", 55, "--device cpu", csv=False,
    ),
    "verify_tp": Run(
        4, "the same with linears over tp 2, cp 2",
        "-m cp_mesh", f"{VERIFY}:overlapped", 55, "--device cpu", csv=False,
    ),
    "gates": Run(
        5, "races with stalled streams, and low precision, on 4 ranks",
        GATES, "--gpus 4 --only races 'low precision'", 512, None, ranks=0, csv=False,
    ),
    "sanitizer": Run(
        6, "CUDA's stream sanitizer on 4 ranks",
        GATES, "--gpus 4 --only 'stream sanitizer'", 70, None, ranks=0, csv=False,
    ),
    "scores": Run(
        6, "masks and scores on 4 ranks",
        GATES, "--gpus 4 --only 'masks and scores'", 410, None, ranks=0, csv=False,
    ),
    "graphs": Run(
        7, "CUDA graphs of rivals over NCCL too, which may end the process",
        f"{BENCHMARKS}/attention.py", "--graph-all --mask causal --heads 32/8 --local-len 1024 4096 16384 --repeats 7"
        " --seconds-per-case 1 --contestants floor/fa4 cp_mesh/ring/zigzag/fa4/symm* cp_mesh/auto/zigzag/fa4/symm*"
        " ulysses/fa4 ring_flash_attn/zigzag/fa4",
        110, TINY_ATTENTION,
    ),
    "linears": Run(
        7, "linears over tp of all GPUs: cp_mesh's beside PyTorch's and the products alone",
        f"{BENCHMARKS}/linears.py", "--rows 4096 16384 65536 --time-limit 200",
        250, "--device cpu --parts 'tiny mlp' --rows 16 --gate-rows 16 --repeats 1 --calls 1 --contestants cp_mesh"
        " torch",
    ),
    "calibrate": Run(
        7, "links and barriers of this machine, beside the numbers that predictions are made of",
        f"{BENCHMARKS}/calibrate.py", "", 100, None, csv=False,
    ),
    "functions": Run(
        8, "functions of users on 4 ranks",
        GATES, "--gpus 4 --only 'functions of users'", 310, None, ranks=0, csv=False,
    ),
}  # fmt: skip
"""By name, in the order in which they run; CSVs are NAME_8xh200.csv."""


def command(name: str, gpus: int, device: str, out: Path, commit: str | None = None) -> list[str]:
    """What is run, from the root of the repository."""
    run, ranks = RUNS[name], RUNS[name].ranks
    tokens = {f"tokens_{rows}k": str(gpus * rows * 1024) for rows in (4, 16, 64, 128)}
    words = shlex.split(run.options.format(**tokens))
    if device == "cpu":
        assert run.tiny is not None, f"{name} needs a GPU"
        words = [word.replace("/fa4", "/cpu_flash").replace("/symm*", "/functional*") for word in words]
        words += shlex.split(run.tiny)
    if run.csv:
        words += ["--csv", str(out / f"{name}_{gpus}x{'h200' if device == 'cuda' else 'cpu'}.csv")]
        words += ["--commit", commit] if commit else []
    launch = [] if ranks == 0 else ["-m", "torch.distributed.run", "--nproc-per-node", str(ranks or gpus)]
    return [sys.executable, *launch, *run.script.split(), *words]


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


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gpus", type=int, default=8, choices=(4, 8), help="number of ranks, on one host")
    parser.add_argument("--call", type=int, nargs="+", choices=sorted({run.call for run in RUNS.values()}))
    parser.add_argument("--only", nargs="+", choices=tuple(RUNS))
    parser.add_argument("--seconds", type=float, default=555.0, help="time limit of all runs together")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--out", type=Path, default=Path("many"))
    parser.add_argument("--commit", help="recorded in the rows (default: ask git)")
    parser.add_argument("--list", action="store_true", help="print the commands and exit")
    args = parser.parse_args(argv)
    args.names = [
        name
        for name, run in RUNS.items()
        if (not args.call or run.call in args.call)
        and (not args.only or name in args.only)
        and (args.device == "cuda" or run.tiny is not None)
    ]
    return args


def main(argv: Sequence[str] | None = None) -> None:
    args = parse_arguments(argv)
    out = args.out.resolve()
    if args.list:
        for name in args.names:
            run, words = RUNS[name], command(name, args.gpus, args.device, args.out, args.commit)
            print(f"call {run.call}, {name}, at most {run.seconds} s: {run.aim}\n  {shlex.join(words)}")
        return
    out.mkdir(parents=True, exist_ok=True)
    end_with_commands()
    more = {"PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    more |= {"OMP_NUM_THREADS": "1"} if args.device == "cpu" else {}
    begin, failed = time.monotonic(), False
    for name in args.names:
        left = args.seconds - (time.monotonic() - begin)
        if left <= GRACE:
            print(f"{name:16} left out: the time is spent", flush=True)
            failed = True
            continue
        started = time.monotonic()
        words = command(name, args.gpus, args.device, out, args.commit)
        seconds = RUNS[name].seconds if args.device == "cuda" else left
        became = finish(words, min(left - GRACE, seconds), out / "log.txt", more)
        failed |= became != "ok"
        print(f"{name:16} {became} ({time.monotonic() - started:.0f} s)", flush=True)
    sys.exit(failed)


if __name__ == "__main__":
    main()
