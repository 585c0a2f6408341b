"""Play one rank of many on one GPU: a method's loop, copies and memory without links, beside the ring's floor.

    python examples/benchmarks/played.py --ranks 8 --csv played.csv
    python examples/benchmarks/played.py --rank 3 --methods ring all_gather ulysses hybrid2 hybrid4 auto --no-floor ...

For machines with fewer GPUs than ranks. The GPU runs what one rank of an NVLink host runs over symmetric memory. The
memory of its peers is its own: they publish the same rows, gradients for them land beside it, and they send none. In an
all-to-all of heads every peer sends this rank's rows for this rank's heads, and gets the same back. Kernel calls,
copies, sums, launches and memory are those of a rank. The speed of NVLink, barriers and waiting for slower ranks are
missing, so figures are upper bounds of a rank's speed; ``wire_ms`` of the CSV is the cost model's time for links and
barriers. The gate compares out, dq, dk and dv with float64 results of the same attention: queries of the ranks that
exchange heads, and keys at the positions of every rank, all equal to this rank's own.

"hybrid2" is the hybrid with inner groups of 2 ranks. On one host the double ring is the ring. The gate of "auto" is
that of the method that it chooses.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import math
import os
import re
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(Path(__file__).parent)]  # a checkout that is not installed

from attention import MASKS, Gate, Ranks, T, Verdict, describe, random_inputs, run_case  # noqa: E402
from contestants import Case, Contestant, CPMesh, Floor, Inputs, chunks, named  # noqa: E402
from report import COLUMNS, Report, machine  # noqa: E402

from cp_mesh.call.joined_layout import join, pieces_of_rank  # noqa: E402
from cp_mesh.call.method import Plan  # noqa: E402
from cp_mesh.comm import symmetric_memory as symmetric  # noqa: E402
from cp_mesh.comm.group_state import state_of  # noqa: E402
from cp_mesh.comm.groups import known_parts, parts_of  # noqa: E402
from cp_mesh.comm.packing import Packing  # noqa: E402
from cp_mesh.kernels.table import KERNELS  # noqa: E402
from cp_mesh.tools.explain.predict.methods import Setup, costs, sizes_of  # noqa: E402
from cp_mesh.tools.explain.predict.time import MACHINES, Machine  # noqa: E402


class PlayedWorkspace:
    """What `symmetric_memory` asks of a workspace. What is pushed to peers goes to memory that nobody reads."""

    captured = False

    def __init__(self, rank: int, purpose: str, nbytes: int, device: torch.device) -> None:
        self.nbytes, self._rank = nbytes, rank
        empty: Callable[..., Tensor] = torch.empty
        if device.type == "cuda":  # as a group's memory is: beside the caching allocator, which counts neither
            import torch.distributed._symmetric_memory as symm_mem

            empty = symm_mem.empty
        self._own = empty(nbytes, dtype=torch.uint8, device=device).zero_()
        self._peers = empty(nbytes, dtype=torch.uint8, device=device) if purpose == "gradients" else self._own
        self._views: dict[Any, tuple[Tensor, tuple[Tensor, ...]]] = {}

    def rows(self, rank: int, offset: int, num_rows: int, packing: Packing) -> tuple[Tensor, tuple[Tensor, ...]]:
        key = rank, offset, num_rows, packing
        if key not in self._views:
            memory = self._own if rank == self._rank else self._peers
            part = memory[offset : offset + num_rows * packing.row_bytes].view(packing.dtype)
            buffer = part.view(num_rows, packing.features)
            self._views[key] = buffer, packing.views(buffer)
        return self._views[key]

    def barrier(self, channel: int) -> None:
        pass


class HostLane:
    """On the CPU, where there are no streams: all is done at once."""

    def entered(self) -> AbstractContextManager[None]:
        return nullcontext()

    def fork(self, *_: Any) -> None:
        pass

    begin = wait = mark = join = fork


class PlayedMemory(symmetric.GroupMemory):
    """A group's memory that needs no group."""

    def __init__(self, rank: int, device: torch.device) -> None:
        self._device, self._rank, self.obstacle = device, rank, None
        self._workspaces, self._kept, self._done, self._current = {}, [], None, None
        self.pulls, self.pushes = (
            symmetric._CudaLane(device) if device.type == "cuda" else HostLane() for _ in range(2)
        )

    def begin(self) -> None:
        if self._device.type == "cuda":
            super().begin()

    def end(self) -> None:
        if self._device.type == "cuda":
            super().end()

    def workspace(self, purpose: str, nbytes: int, group: dist.ProcessGroup) -> Any:
        workspace: Any = self._workspaces.get(purpose)
        if workspace is None or workspace.nbytes < nbytes:
            if self._device.type == "cuda":  # copies of what is given back may be under way
                torch.cuda.synchronize(self._device)
            workspace = self._workspaces[purpose] = PlayedWorkspace(self._rank, purpose, nbytes, self._device)
        return workspace


class PlayedRank(Ranks):
    """One rank, alone."""

    def __init__(self, rank: int, size: int, device: torch.device) -> None:
        self.device, self.rank, self.size = device, rank, size
        os.environ["LOCAL_WORLD_SIZE"] = str(size)  # one host
        dist.init_process_group("fake", rank=rank, world_size=size, store=FakeStore())
        self.mesh = init_device_mesh(device.type, (size,), mesh_dim_names=("cp",))
        self.alone = init_device_mesh(device.type, (size, 1), mesh_dim_names=("others", "alone"))["alone"]

    def reduce(self, values: Any, op: Any) -> Tensor:
        return torch.as_tensor(values, dtype=torch.float64)

    def attempt(self, call: Callable[[], T]) -> tuple[T | None, str | None]:
        try:
            result = call()
            self.synchronize()
        except Exception as error:
            return None, describe(error)
        return result, None

    def line_up(self) -> None:
        self.synchronize()

    def print(self, *words: object) -> None:
        print(*words, flush=True)


class PlayedOutgoing(symmetric.SymmetricOutgoing):
    """Gradients for peers land beside, also of two ranks, where they would overwrite this rank's rows."""

    def __init__(self, transport: symmetric.SymmetricTransport, *of_pass: Any) -> None:
        super().__init__(transport, *of_pass)
        if self._workspace is not None:
            self._workspace = transport.memory.workspace("gradients", self._workspace.nbytes, transport.group)


class PlayedGate(Gate):
    """Queries of the ranks that exchange heads, and no others; keys at the positions of every rank.

    All of them are this rank's own, and heads of each of these ranks are those of this one.
    """

    def __init__(self, ranks: Ranks, case: Case, contestant: CPMesh) -> None:
        self._ranks, self._case = ranks, case
        layout, degree = contestant.layout(case), contestant.inner_size(case)
        # the error of one device is that of this rank's rows: others have no queries, so theirs is smaller
        x = _alike(random_inputs(case, case.local_len, seed=0), degree)
        whole = Inputs(*(y.new_zeros(1, case.seq_len, *y.shape[2:]) for y in (x.q, x.k, x.v, x.dout)))
        own = case.cp_rank // degree
        for rank in range(own * degree, (own + 1) * degree):
            rows = layout.positions(case.seq_len, case.cp_size, rank).to(case.device)
            for name in ("q", "k", "v", "dout"):
                getattr(whole, name)[:, rows] = getattr(x, name)
        joined, num_groups = join(layout, degree, case.cp_size), case.cp_size // degree
        shards = [joined.positions(case.seq_len, num_groups, group).to(case.device) for group in range(num_groups)]
        for shard in shards:
            for y in (whole.k, whole.v):
                y[:, shard] = y[:, shards[own]]
        self._judged = layout.positions(case.seq_len, case.cp_size, case.cp_rank).to(case.device)
        self._set_up(whole)


def _alike(x: Inputs, degree: int) -> Inputs:
    """With the first heads in the place of those of all ranks that exchange heads."""
    parts = (y.chunk(degree, 2)[0].repeat(1, 1, degree, 1) for y in (x.q, x.k, x.v, x.dout))
    return Inputs(*parts)


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=8, help="size of the group")
    parser.add_argument("--rank", type=int, default=0, help="rank to play")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument(
        "--methods", nargs="+", default=[("ring", 0)], type=_method, help="hybridN: hybrid with inner groups of N ranks"
    )
    parser.add_argument("--local-len", type=int, nargs="+", default=[1024, 4096, 16384, 65536])
    parser.add_argument("--gate-len", type=int, default=512, help="rows per rank in the correctness gate")
    parser.add_argument("--head-dim", type=int, default=128)
    parser.add_argument("--heads", nargs="+", default=["32/8"], help="query heads/kv heads")
    parser.add_argument("--mask", choices=MASKS, nargs="+", default=["causal"])
    parser.add_argument(
        "--layouts", nargs="+", default=["zigzag"], help='"balanced" for documents, others for other masks'
    )
    parser.add_argument("--kernel", default="fa4", choices=list(KERNELS))
    parser.add_argument("--head-chunks", type=int, help="default: chosen by the library")
    parser.add_argument(
        "--floor", action=argparse.BooleanOptionalAction, default=True, help="also time the ring's tiles"
    )
    parser.add_argument("--queued", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--min-repeats", type=int, default=2)
    parser.add_argument("--seconds-per-case", type=float, default=5.0)
    parser.add_argument("--time-limit", type=float, default=math.inf, help="start no case after this many seconds")
    parser.add_argument("--graph-max-len", type=int, default=16384)
    parser.add_argument("--csv", type=Path)
    parser.add_argument("--commit")
    args = parser.parse_args(argv)
    args.graph, args.graph_all = True, False
    return args


def _method(text: str) -> tuple[str, int]:
    """Its name and degree, 0 if it has none."""
    found = re.fullmatch(r"(hybrid)([1-9]\d*)|(auto|ring|all_gather|ulysses)", text)
    if found is None:
        raise argparse.ArgumentTypeError(f"expected ring, all_gather, ulysses, hybrid2 or another, or auto, got {text}")
    return (found[1], int(found[2])) if found[1] else (text, 0)


class Played(CPMesh):
    """A method of which one rank is there."""

    def __init__(
        self,
        ranks: PlayedRank,
        layout: str,
        kernel: str,
        head_chunks: int | None,
        method: str = "ring",
        degree: int = 0,
    ) -> None:
        super().__init__(ranks.mesh, method, layout, kernel, "symmetric_memory", degree, head_chunks)
        self.name = f"played/{named(method, degree)}/{layout}/{kernel}{chunks(head_chunks)}"

    def unsupported(self, case: Case) -> str | None:
        degree = self._degree or (case.cp_size if self._method == "ulysses" else 1)
        heads = f"{case.heads}/{case.kv_heads}"
        return f"{heads} heads are not played over {degree} ranks" if case.kv_heads % degree else None

    def inner_size(self, case: Case) -> int:
        """Ranks that exchange heads."""
        plan = self.plan(case)
        return plan.method.inner_size(self._degree_of(plan, case))

    def figures(self, case: Case) -> dict[str, str]:
        """Beside what is measured: `MORE_COLUMNS`, empty where nothing was measured of the machine."""
        plan, real = self.plan(case), machine_here(case.device)
        found = {"taken": named(plan.method.name, plan.options.ulysses_degree)}
        if real is None or plan.kernel.name not in real.kernels:
            return found
        # rows are written and read by both sides of an exchange, and pulled or pushed by one side of a ring
        here = replace(real, link_rate=real.memory_rate / 2, exchange_rate=real.memory_rate / 4, per_barrier=0.0)
        setup = Setup(
            plan.method, case.cp_size, self._degree_of(plan, case), sizes_of(*self.operands(case), plan.settings),
            plan.settings.head_chunks, plan.kernel, plan.scores.features, "symmetric_memory", "symmetric_memory",
            real.gpus_per_host, pieces_of_rank(plan.layout, case.seq_len, case.cp_size),
        )  # fmt: skip
        whole, alone = (1e3 * sum(cost.device for cost in costs(plan.schedule, setup, each)) for each in (real, here))
        return found | {"predicted_ms": f"{whole:.4f}", "wire_ms": f"{whole - alone:.4f}"}

    def _degree_of(self, plan: Plan, case: Case) -> int:
        q, k, _ = self.operands(case)
        return plan.method.choose_degree(plan.options, q, k, case.cp_size)


def machine_here(device: torch.device) -> Machine | None:
    """That of this GPU, if it comes with cp_mesh."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
    return next((machine for machine in MACHINES.values() if machine.name == name), None)


MORE_COLUMNS = ("taken", "predicted_ms", "wire_ms")
"""The method that "auto" takes; predicted device time of both passes, and how much of it wires and barriers are."""


def begin_case(ranks: PlayedRank, degrees: Sequence[int]) -> None:
    """Memory of its own for the next case, in the group and in groups of these sizes within it."""
    group = ranks.mesh.get_group()
    for degree in degrees:
        parts_of(group, degree)
    for each in (group, *itertools.chain(*known_parts(group))):
        state_of(each, symmetric.Held).memory = PlayedMemory(each.rank(), ranks.device)
    gc.collect()
    if ranks.device.type == "cuda":
        torch.cuda.empty_cache()


def judge(ranks: PlayedRank, case: Case, chosen: Sequence[Contestant]) -> dict[str, Verdict]:
    """By name; of "auto" none, as it may take another method in another case."""
    verdicts = {}
    for contestant in chosen:
        if not isinstance(contestant, Played):
            verdicts[contestant.name] = Verdict()
        elif contestant.unsupported(case):
            verdicts[contestant.name] = Verdict(problem=f"not run: {contestant.unsupported(case)}")
        elif "/auto/" not in contestant.name:
            gate, problem = ranks.attempt(partial(PlayedGate, ranks, case, contestant))
            verdicts[contestant.name] = gate.try_out(contestant) if gate else Verdict(problem=problem)
    return verdicts


def main(argv: Sequence[str] | None = None) -> None:
    args = parse_arguments(argv)
    device = torch.device("cpu")
    if args.device == "cuda":
        device = torch.device("cuda", 0)
        torch.cuda.set_device(device)
    ranks, begin = PlayedRank(args.rank, args.ranks, device), time.perf_counter()
    symmetric.SymmetricOutgoing = PlayedOutgoing  # type: ignore[misc]
    degrees = [degree for _, degree in args.methods if 1 < degree < args.ranks]
    begin_case(ranks, degrees)
    report = Report(args.csv, machine(ranks.device, 1, args.commit), (*COLUMNS, *MORE_COLUMNS))
    ours = [
        Played(ranks, layout, args.kernel, args.head_chunks, *method)
        for method in args.methods
        for layout in args.layouts
    ]
    verdicts_of = cache(lambda case, chosen: judge(ranks, case, chosen))
    ranks.print(f"rank {args.rank} of {args.ranks}, played by one GPU")
    for local_len, mask, heads in itertools.product(args.local_len, args.mask, args.heads):
        if (spent := time.perf_counter() - begin) > args.time_limit:
            ranks.print(f"time limit: {local_len} {mask} {heads} and what follows is left out after {spent:.0f} s")
            break
        num_heads, num_kv_heads = map(int, heads.split("/"))
        pattern = mask if mask not in ("causal", "full") else ""
        case = Case(
            num_heads, num_kv_heads, args.head_dim, torch.bfloat16, mask != "full", local_len, args.ranks, args.rank,
            device, pattern,
        )  # fmt: skip
        fits = [x for x in ours if ("/balanced/" in x.name) == (mask == "documents") or len(args.layouts) == 1]
        chosen = (*([Floor(args.kernel)] if args.floor and not pattern else []), *fits)
        verdicts = dict(verdicts_of(replace(case, local_len=args.gate_len), chosen))
        for x in fits:
            if x.name not in verdicts:
                passed = verdicts.get(x.name.replace("/auto/", f"/{x.taken(case)}/"))
                verdicts[x.name] = passed or Verdict(problem=f"not run: {x.taken(case)} has no gate here")
        run_case(ranks, case, list(chosen), verdicts, args, report)
        begin_case(ranks, degrees)
    ranks.print(f"{time.perf_counter() - begin:.0f} s")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
