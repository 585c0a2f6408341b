"""Measure host time of the guard after the first step: in a small call of attention, and in a small training step.

- "on": the default;
- "off": under ``check_mode(False)``;
- "without": the look-ups themselves are replaced by functions that do nothing.

In each repeat every contestant makes ``--calls`` calls in sequence, forward and backward. A step is a `ShardedModel` of
one layer with `cross_entropy`, backward, a sum of its gradients and SGD. "look-ups" are only those of one call of
attention. The first steps, in which the guard checks, run before. Figures are microseconds of CPU time of the calling
thread, since waiting for the other rank takes longer than everything else. ``--csv`` gets medians and minima over the
repeats, of the slowest rank.

    torchrun --nproc-per-node 2 examples/benchmarks/guard.py --csv guard_cpu.csv
"""

from __future__ import annotations

import argparse
import csv
import sys
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from pathlib import Path
from statistics import median
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

sys.path[:0] = [str(Path(__file__).resolve().parents[2]), str(Path(__file__).parent)]  # a checkout not installed

from report import machine  # noqa: E402

from cp_mesh import (  # noqa: E402
    ContextParallel,
    ShardedModel,
    ShardedSequence,
    attention,
    check_mode,
    cross_entropy,
)
from cp_mesh import parallelize as apply  # noqa: E402
from cp_mesh.call import passes  # noqa: E402

LOOK_UPS = {
    "call.op": {"checking": False},
    "call.passes": {"checking": False, "is_first": False},
    "training.sharded_model": {"kind_of": None, "agree_on_shapes": True},
    "training.compare_inputs": {"kind_of": None, "agree_on_shapes": True, "note_cut": None},
    "sequence.sharded_sequence": {"note_cut": None, "is_cut": False},
    "training.loss": {"is_first_here": False, "note_loss": None},
    "training.token_losses": {"note_compiled_backward": None},
    "training.checks.gradients": {"capturing": True},
}
"""By module: what each is replaced by a function to return."""


class Core(nn.Module):
    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.core, self.head = nn.Embedding(64, 64), Core(), nn.Linear(64, 64)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens).unflatten(-1, (2, 32)).transpose(1, 2)
        return self.head(self.core(x, x, x).transpose(1, 2).flatten(-2))


@contextmanager
def without() -> Any:
    with ExitStack() as stack:
        for module, names in LOOK_UPS.items():
            for name, result in names.items():
                stack.enter_context(mock.patch(f"cp_mesh.{module}.{name}", lambda *_, result=result, **__: result))
        yield


CONTESTANTS: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "on": nullcontext,
    "off": lambda: check_mode(False),
    "without": without,
}


def of_attention(axis: DeviceMesh) -> Callable[[], None]:
    q, k, v = (torch.randn(1, 2, 32, 32, requires_grad=True) for _ in range(3))
    return lambda: attention(q, k, v, mesh=axis).sum().backward()


def of_steps(axis: DeviceMesh) -> Callable[[], None]:
    torch.manual_seed(0)
    sequence, model = ShardedSequence(axis), Model()
    apply(model, axis, {"": ShardedModel(sequence, positions=None), "core": ContextParallel(sequence)})
    optimizer, batch = torch.optim.SGD(model.parameters(), 0.1), torch.randint(64, (1, 65))
    tokens, labels = batch[:, :-1], sequence.shard({"labels": batch[:, 1:]})["labels"]

    def step() -> None:
        cross_entropy(model(tokens), labels, axis).backward()
        for x in model.parameters():
            dist.all_reduce(x.grad)
        optimizer.step()
        optimizer.zero_grad()

    return step


def of_look_ups(axis: DeviceMesh) -> Callable[[], None]:
    """What a call of attention asks of the guard, without the call."""
    given: dict[str, Any] = {}

    def keep(name: str) -> Any:
        original = getattr(passes, name)
        return lambda *arguments: (given.__setitem__(name, arguments), original(*arguments))[1]

    with ExitStack() as stack:
        for name in ("is_first", "note_callers"):
            stack.enter_context(mock.patch.object(passes, name, keep(name)))
        of_attention(axis)()
    group = axis.get_group()

    def run() -> None:
        passes.checking(group)
        passes.is_first(*given["is_first"])
        passes.note_callers(*given["note_callers"])

    return run


WORK = {"attention": of_attention, "step": of_steps, "look-ups": of_look_ups}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--calls", type=int, default=50, help="calls per repeat and contestant")
    parser.add_argument("--what", nargs="+", choices=WORK, default=[*WORK])
    parser.add_argument("--commit", default="", help="recorded in the rows (default: ask git)")
    parser.add_argument("--csv", type=Path, required=True)
    options = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    axis = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("cp",))
    found: dict[tuple[str, str], list[float]] = {}
    for what in options.what:
        run = WORK[what](axis)
        for _ in range(5):
            run()
        for _ in range(options.repeats):
            for name, context in CONTESTANTS.items():
                with context():
                    dist.barrier()
                    begin = time.thread_time()
                    for _ in range(options.calls):
                        run()
                    took = torch.tensor((time.thread_time() - begin) / options.calls * 1e6)
                dist.all_reduce(took, dist.ReduceOp.MAX)
                found.setdefault((what, name), []).append(took.item())
    if dist.get_rank() == 0:
        about = machine(torch.device("cpu"), dist.get_world_size(), options.commit)
        about |= {"repeats": options.repeats, "calls": options.calls}
        with options.csv.open("a", newline="") as file:
            writer = csv.writer(file)
            if file.tell() == 0:
                writer.writerow([*about, "what", "guard", "us", "us_min"])
            for (what, name), times in found.items():
                row = [what, name, f"{median(times):.1f}", f"{min(times):.1f}"]
                writer.writerow([*about.values(), *row])
                print(",".join(row))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
