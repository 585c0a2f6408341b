"""One GPU plays one rank of many: the ring's loop, copies and memory without wires, beside its floor.

    python examples/benchmarks/played.py --ranks 8 --csv played.csv

For machines with fewer GPUs than the ring has ranks. The GPU runs what one rank of a symmetric-memory ring runs, with
peers whose memory is its own: they publish the rows that it publishes, its gradients for them land beside it, and they
send none. Kernel calls, copies, sums, launches and memory are those of a rank. NVLink's speed, barriers and waiting for
slower ranks are not in it, so a figure is what a rank reaches at most. The gate compares out, dq, dk and dv with those
of that very attention in float64: own queries, and own keys at the positions of every rank.
"""

from __future__ import annotations

import argparse
import gc
import sys
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(Path(__file__).parent)]  # a checkout that is not installed

from attention import Gate, Ranks, T, Verdict, describe, random_inputs, run_case  # noqa: E402
from contestants import Case, Contestant, CPMesh, Floor, Inputs  # noqa: E402
from raw_kernels import RAW_KERNELS  # noqa: E402
from report import Report, machine  # noqa: E402

from cp_mesh.transport import symmetric_memory as symmetric  # noqa: E402
from cp_mesh.transport.packing import Packing  # noqa: E402


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
            workspace = self._workspaces[purpose] = PlayedWorkspace(self._rank, purpose, nbytes, self._device)
        return workspace


class PlayedRank(Ranks):
    """One rank, alone."""

    def __init__(self, rank: int, size: int, device: torch.device) -> None:
        self.device, self.rank, self.size = device, rank, size
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


class PlayedGate(Gate):
    """Own queries, and no others; own keys at the positions of every rank."""

    def __init__(self, ranks: Ranks, case: Case, contestant: Contestant) -> None:
        self._ranks, self._case = ranks, case
        # the error of one device is that of this rank's rows: others have no queries, so theirs is smaller
        x, layout = random_inputs(case, case.local_len, seed=0), contestant.layout(case)
        whole = Inputs(*(y.new_zeros(1, case.seq_len, *y.shape[2:]) for y in (x.q, x.k, x.v, x.dout)))
        for rank in range(case.cp_size):
            rows = layout.positions(case.seq_len, case.cp_size, rank).to(case.device)
            for name in ("q", "k", "v", "dout"):
                if name in "kv" or rank == case.cp_rank:
                    getattr(whole, name)[:, rows] = getattr(x, name)
        self._judged = layout.positions(case.seq_len, case.cp_size, case.cp_rank).to(case.device)
        self._set_up(whole)


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=8, help="of the ring")
    parser.add_argument("--rank", type=int, default=0, help="the one that is played")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--local-len", type=int, nargs="+", default=[1024, 4096, 16384, 65536])
    parser.add_argument("--gate-len", type=int, default=512, help="rows per rank in the correctness gate")
    parser.add_argument("--head-dim", type=int, default=128)
    parser.add_argument("--heads", nargs="+", default=["32/8"], help="query heads/kv heads")
    parser.add_argument("--layouts", nargs="+", default=["zigzag"])
    parser.add_argument("--kernel", default="fa4", choices=list(RAW_KERNELS))
    parser.add_argument("--head-chunks", type=int, help="default: as many as the library chooses")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--min-repeats", type=int, default=2)
    parser.add_argument("--seconds-per-case", type=float, default=5.0)
    parser.add_argument("--graph-max-len", type=int, default=16384)
    parser.add_argument("--csv", type=Path)
    parser.add_argument("--commit")
    args = parser.parse_args(argv)
    args.graph, args.queued, args.graph_all = True, True, False
    return args


class Played(CPMesh):
    """A ring of which one rank is there."""

    def __init__(self, ranks: PlayedRank, layout: str, kernel: str, head_chunks: int | None) -> None:
        super().__init__(ranks.mesh, "ring", layout, kernel, "symmetric_memory")
        self.name, self._options["head_chunks"] = f"played/ring/{layout}/{kernel}", head_chunks
        if head_chunks:
            self.name += f"/head_chunks={head_chunks}"


def main(argv: Sequence[str] | None = None) -> None:
    args = parse_arguments(argv)
    device = torch.device("cpu")
    if args.device == "cuda":
        device = torch.device("cuda", 0)
        torch.cuda.set_device(device)
    ranks = PlayedRank(args.rank, args.ranks, device)
    group = ranks.mesh.get_group()
    report = Report(args.csv, machine(ranks.device, 1, args.commit))
    ours: list[Contestant] = [Played(ranks, layout, args.kernel, args.head_chunks) for layout in args.layouts]
    chosen: list[Contestant] = [Floor(args.kernel), *ours]
    ranks.print(f"rank {args.rank} of {args.ranks}, played by one GPU")
    for heads in args.heads:
        num_heads, num_kv_heads = map(int, heads.split("/"))
        shape = num_heads, num_kv_heads, args.head_dim, torch.bfloat16
        gate_case = Case(*shape, True, args.gate_len, args.ranks, args.rank, device, "")
        symmetric._MEMORY[group] = PlayedMemory(args.rank, device)
        verdicts = {x.name: PlayedGate(ranks, gate_case, x).try_out(x) for x in ours}
        for local_len in args.local_len:
            symmetric._MEMORY[group] = PlayedMemory(args.rank, device)
            case = replace(gate_case, local_len=local_len)
            run_case(ranks, case, chosen, {chosen[0].name: Verdict(), **verdicts}, args, report)
            gc.collect()
            if device.type == "cuda":
                torch.cuda.empty_cache()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
