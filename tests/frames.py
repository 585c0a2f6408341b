"""What a repeated call costs the host: Python frames, operators of PyTorch, launches and time of each pass.

    python tests/frames.py                    # prints a row of each case and pass
    python tests/frames.py --csv docs/results/frames_cpu.csv      # appends them

The calls are real: a ring of two ranks over symmetric memory with FlashAttention-4, forward and backward. Devices are
doubles that return at once: streams, events, barriers, kernels; the other rank is PyTorch's fake group. So this counts
what our code asks for, on any CPU, and not what a GPU's driver adds. Cases: "dense", a causal mask; "packed", documents
that each rank has whole; "split", documents of which one lies on both ranks.

Columns: commit, torch, case, pass; frames (Python functions called, of cp_mesh and of all); the operators of PyTorch
that our code calls, by kind; launches of Triton and of FlashAttention-4; events (recorded or waited for) and barriers;
us, the 10th percentile of many calls, which differs from machine to machine.

It changes modules of cp_mesh for good, so it runs in a process of its own.
"""

from __future__ import annotations

import argparse
import csv
import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import FrameType, SimpleNamespace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from forms import commit_of
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.profiler import ProfilerActivity, profile
from torch.testing._internal.distributed.fake_pg import FakeStore

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # of a checkout that is not installed

from inside import KERNELS, SOURCES, room

import cp_mesh
from cp_mesh import Contiguous, Mask

B, H, K, S, D = 1, 8, 2, 512, 64
CASES = ("dense", "packed", "split")
KINDS = {
    "allocations": ("empty", "empty_strided", "empty_like", "new_empty", "new_empty_strided"),
    "views": (
        "as_strided",
        "transpose",
        "select",
        "slice",
        "view",
        "unflatten",
        "narrow",
        "expand",
        "unsqueeze",
        "alias",
    ),
    "fills": ("zero_", "fill_", "zeros", "zeros_like", "full"),
    "copies": ("copy_", "clone", "contiguous", "to"),
}
"""Names of operators by what they are counted as; the others are "other operators"."""
COUNTED = ("frames", "all frames", *KINDS, "other operators", "triton", "flash", "events", "barriers")
WARM = 24
"""Calls before one is counted: the first ones are planned, compared and bound."""

done: Counter[str] = Counter()
"""What the doubles were asked for."""


class Stream:
    device_index = -1  # of the CPU

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def wait_event(self, event: Any) -> None:
        done["events"] += 1


class Event:
    def record(self, stream: Any = None) -> None:
        done["events"] += 1

    wait = record


class Handle:
    """Memory of both ranks, in this process."""

    def __init__(self, own: Tensor) -> None:
        self.of_ranks = [own, torch.empty_like(own)]

    def get_buffer(self, rank: int, shape: Sequence[int], dtype: torch.dtype, first: int) -> Tensor:
        flat = self.of_ranks[rank].view(dtype)
        return flat[first : first + shape[0] * shape[1]].view(*shape)

    def barrier(self, channel: int, timeout_ms: int) -> None:
        done["barriers"] += 1


class Compiled:
    """What a launch of Triton returns; a grid of it is what later launches run."""

    def __init__(self, *_: Any) -> None:
        pass

    def __getitem__(self, grid: Any) -> Any:
        return launch_triton


def launch_triton(*_: Any, **__: Any) -> Compiled:
    done["triton"] += 1
    return COMPILED


def launch_flash(*_: Any) -> None:
    done["flash"] += 1


COMPILED = Compiled()


class OfKinds(dict[Any, Any]):
    """Compiled kernels of FlashAttention-4, of any kind of call: as many as its pass launches."""

    def get(self, kind: tuple[Any, ...], default: Any = None) -> tuple[Callable[..., None], ...]:
        grouped = kind[5] > 1
        return (launch_flash,) * (1 if kind[0] == "_flash_attn_fwd" else 5 if grouped else 3)


class Package:
    """What is asked of FlashAttention-4's module."""

    @staticmethod
    def AuxData(*_: Any) -> None:
        pass

    @staticmethod
    def _tile_size_bwd_sm90(*_: Any) -> Any:
        return SimpleNamespace(m_block_size=64, n_block_size=128, dKV_swapAB=False)


def pretend() -> None:
    """Put doubles in the place of devices, and begin a group of which this process is the second rank."""
    here = Stream()
    cuda: dict[str, Any] = {
        "Event": Event, "Stream": Stream, "current_stream": lambda device=None: here,
        "set_stream": lambda stream: None, "stream": lambda stream: nullcontext(), "current_device": lambda: -1,
        "is_current_stream_capturing": bool, "synchronize": lambda device=None: None,
    }  # fmt: skip
    for name, double in cuda.items():
        setattr(torch.cuda, name, double)
    dist.init_process_group("fake", rank=1, world_size=2, store=FakeStore())

    def empty(num: int, dtype: torch.dtype, device: Any) -> Tensor:
        return torch.empty(num, dtype=dtype, device=device)

    memory = SimpleNamespace(empty=empty, rendezvous=lambda own, group: Handle(own))
    symmetric = room("symmetric_memory")
    symmetric.symmetric_memory = lambda: memory
    symmetric.timeout_of = lambda group, device: SimpleNamespace(total_seconds=lambda: 1.0)
    symmetric._obstacle = symmetric._local_obstacle = lambda *_: None
    room("exchange").unavailable = lambda *_: None
    dist.all_gather_object = lambda found, own, group: None
    room("call.passes").agree_first = lambda *_: None  # there is nobody to agree with

    combine, triton, flash = room("combine"), room("combine_triton"), room("flash_attn_4_package")
    combine.fused = lambda *_: True
    triton.CompiledKernel, triton.raw_stream = Compiled, int
    for name in ("merge_kernel", "sum_kernel", "dots_kernel"):
        setattr(triton, name, mock.MagicMock(__getitem__=lambda self, grid: launch_triton))
    flash._package, flash._compiled = lambda: Package, OfKinds()
    here_too = replace(KERNELS["fa4"].capability, devices=("cpu",), compute_capability=(0, 0), only_on=(),
                       lacking=lambda: None)  # fmt: skip
    KERNELS["fa4"] = replace(KERNELS["fa4"], capability=here_too)


def passes_of(case: str) -> tuple[Callable[[], Tensor], Callable[[Tensor], Any]]:
    """The forward and the backward of a case."""
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("cp",))
    q, k, v, dout = (torch.randn(B, S, n, D, dtype=torch.bfloat16).transpose(1, 2) for n in (H, K, K, H))
    for x in (q, k, v):
        x.requires_grad_()
    whole = [0, 100, 250, 400, S]
    begins = whole if case == "packed" else [0, 100, 250, 400]
    documents = [*begins, *[S + x for x in (whole if case == "packed" else [90, *whole[2:]])]]
    mask = Mask(causal=True) if case == "dense" else Mask.from_cu_seqlens(torch.tensor(sorted({*documents})))
    options: dict[str, Any] = {"mesh": mesh, "mask": mask, "kernel": "fa4", "transport": "symmetric_memory"}
    if case != "dense":
        options["layout"] = Contiguous()

    def forward() -> Tensor:
        return cp_mesh.attention(q, k, v, **options)

    def backward(out: Tensor) -> Any:
        return torch.autograd.grad(out, (q, k, v), dout)

    return forward, backward


def frames(run: Callable[[], Any]) -> list[str]:
    """File and name of each Python function that is called; autograd runs on this thread."""
    found: list[str] = []

    def note(frame: FrameType, event: str, _: Any) -> None:
        if event == "call" and frame.f_code.co_filename != __file__:
            found.append(f"{frame.f_code.co_filename}:{frame.f_code.co_name}")

    sys.setprofile(note)
    try:
        run()
    finally:
        sys.setprofile(None)
    return found


def operators(run: Callable[[], Any]) -> Counter[str]:
    """How often which operators are called, without those that operators call."""
    with profile(activities=[ProfilerActivity.CPU]) as recorded:
        run()
    called: Counter[str] = Counter()
    for event in recorded.events():
        inner = event.cpu_parent is not None and event.cpu_parent.name.startswith("aten::")
        if event.name.startswith("aten::") and not inner:
            name = event.name.removeprefix("aten::")
            called[next((kind for kind, names in KINDS.items() if name in names), "other operators")] += 1
    return called


def called_by(case: str) -> dict[str, tuple[Counter[str], list[str]]]:
    """Of each pass of a repeated call, what is counted beside frames, and `frames`."""
    forward, backward = passes_of(case)
    for _ in range(WARM):
        backward(forward())
    found = {}
    for name, runs in (("forward", (forward, forward)), ("backward", [partial(backward, forward()) for _ in range(2)])):
        done.clear()
        counts = operators(runs[0]) + done
        found[name] = counts, frames(runs[1])
    return found


def times_of(case: str, calls: int = 200) -> dict[str, float]:
    """The time of each pass in us; one call of ten is faster."""
    forward, backward = passes_of(case)
    taken: dict[str, list[float]] = {"forward": [], "backward": []}
    for _ in range(WARM + calls):
        begin = time.perf_counter()
        out = forward()
        middle = time.perf_counter()
        backward(out)
        for name, seconds in (("forward", middle - begin), ("backward", time.perf_counter() - middle)):
            taken[name].append(seconds * 1e6)
    return {name: statistics.quantiles(each[WARM:], n=10)[0] for name, each in taken.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--csv", type=Path, help="file to append rows to")
    parser.add_argument("--names", action="store_true", help="print which functions of cp_mesh are called too")
    parser.add_argument("--no-times", action="store_true", help="count only")
    options = parser.parse_args()
    pretend()
    about = {"commit": commit_of(Path(__file__).parent), "torch": torch.__version__}
    rows: list[dict[str, Any]] = []
    for case in CASES:
        times = {} if options.no_times else times_of(case)
        for name, (counts, called) in called_by(case).items():
            ours = Counter(x.removeprefix(SOURCES) for x in called if x.startswith(SOURCES))
            counts |= {"frames": ours.total(), "all frames": len(called)}
            counted = {column: counts[column] for column in COUNTED}
            rows.append(about | {"case": case, "pass": name, **counted, "us": f"{times.get(name, 0):.0f}"})
            if options.names:
                print(f"{case}, {name}", *(f"{count} {x}" for x, count in ours.items()), sep="\n", file=sys.stderr)
    with nullcontext(sys.stdout) if options.csv is None else options.csv.open("a", newline="") as file:
        writer = csv.DictWriter(file, rows[0], lineterminator="\n")
        if options.csv is None or not options.csv.stat().st_size:
            writer.writeheader()
        writer.writerows(rows)


if __name__ == "__main__":
    main()
