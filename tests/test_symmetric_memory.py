"""The transport over symmetric memory: against the functional one, bit for bit, on GPUs and on a CPU double.

    torchrun --nproc-per-node 2 tests/test_symmetric_memory.py     # all GPU checks, a line each; exits 1 on a failure
    torchrun --nproc-per-node 4 tests/test_symmetric_memory.py --one-gpu     # by ranks that share a GPU
    TORCH_CUDA_SANITIZER=1 torchrun ... --only stalled             # CUDA's stream sanitizer watches a small case
    pytest tests/test_symmetric_memory.py                          # the CPU double; the GPU checks where there are GPUs

Both transports give a kernel the same rows in the same order, so with deterministic kernels their results are equal to
the bit, and any difference is a race or a wrong address. The double puts each rank's memory into a file that all ranks
map; its barrier is gloo's.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import random
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from itertools import chain, product
from pathlib import Path
from typing import Any
from unittest import mock
from weakref import WeakKeyDictionary

import pytest
import torch
import torch.distributed as dist
from cases import LAYOUTS, make_mask
from checks import forget_kept, report
from dense import make_qkv
from gpu import part_of
from poison import poisoned
from ranks import device, join_on_gpus, mesh, on_ranks, refused
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.profiler import record_function
from torch.utils.checkpoint import checkpoint

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # torchrun of a checkout that is not installed

from inside import (
    METHODS,
    MergingForward,
    Packing,
    Sizes,
    SummingBackward,
    extra_memory,
    inner,
    make_schedule,
    path_of,
    room,
    state_of,
    states_of_all,
)

import cp_mesh
from cp_mesh import Contiguous, Mask, Striped, ZigZag

known_parts = inner("groups", "known_parts")
choose_transport = inner("exchange", "choose_transport")
Plans = inner("call.plan", "Plans")
symmetric, stages = room("symmetric_memory"), room("ring_loop")
PASSES = MergingForward, SummingBackward

TRANSPORTS = ("functional", "symmetric_memory")


class FileWorkspace:
    """A rank's memory is a file that every rank maps."""

    captured = False
    bound = symmetric.Workspace.bound

    def __init__(self, group: dist.ProcessGroup, folder: Path, name: str, nbytes: int) -> None:
        self.nbytes, self._group, self._bound = nbytes, group, WeakKeyDictionary()
        paths = [folder / f"{name}-{nbytes}-{rank}" for rank in range(group.size())]
        paths[group.rank()].write_bytes(b"\xff" * nbytes)  # NaN in every floating dtype
        dist.barrier(group)
        self._memory = [torch.from_file(str(path), shared=True, size=nbytes, dtype=torch.uint8) for path in paths]
        dist.barrier(group)

    def rows(self, rank: int, offset: int, num_rows: int, packing: Packing) -> Tensor:
        part = self._memory[rank][offset : offset + num_rows * packing.row_bytes]
        return part.view(packing.dtype).view(num_rows, packing.features)

    def barrier(self, channel: int) -> None:
        with record_function("barrier"):
            dist.barrier(self._group)
        nap()


class HostLane:
    """Work of a lane is done where it is begun, after a nap of random length: other ranks get ahead."""

    def fork(self) -> None:
        pass

    def __enter__(self) -> None:
        with record_function("copies"):
            nap()

    def __exit__(self, *_: object) -> None:
        pass

    def mark(self) -> None:
        pass

    def wait(self, mark: None) -> None:
        with record_function("wait"):
            pass


def nap() -> None:
    time.sleep(random.choice((0.0, 0.0, 0.002)))


class FileMemory:
    """`symmetric_memory.GroupMemory` on files."""

    obstacle = None

    def __init__(self, group: dist.ProcessGroup, folder: Path) -> None:
        self._group, self._folder, self._workspaces = group, folder, {}
        self.pulls, self.pushes = HostLane(), HostLane()

    def begin(self) -> None:
        pass

    def end(self) -> None:
        pass

    def workspace(self, purpose: str, nbytes: int, group: dist.ProcessGroup) -> FileWorkspace:
        workspace = self._workspaces.get(purpose)
        if workspace is None or workspace.nbytes < nbytes:
            nbytes = symmetric.aligned(nbytes)
            workspace = self._workspaces[purpose] = FileWorkspace(self._group, self._folder, purpose, nbytes)
        return workspace

    def wait(self) -> None:
        pass

    def free(self) -> None:
        self._workspaces.clear()

    @property
    def nbytes(self) -> int:
        return sum(workspace.nbytes for workspace in self._workspaces.values())


@contextmanager
def double(group: dist.ProcessGroup, folder: Path) -> Iterator[None]:
    """While open, this group of CPU ranks has symmetric memory, and so have groups within it."""

    group_memory = symmetric.group_memory  # in which bugs are planted

    def memory(group: dist.ProcessGroup, device: torch.device) -> Any:
        if state_of(group, symmetric.Held).memory is None:
            own = Path(folder) / "-".join(map(str, dist.get_process_group_ranks(group)))
            own.mkdir(exist_ok=True)
            state_of(group, symmetric.Held).memory = FileMemory(group, own)
        return group_memory(group, device)

    with (
        mock.patch(f"{path_of('exchange')}.unavailable", return_value=None),
        mock.patch(f"{path_of('exchange')}.group_memory", memory),
        mock.patch.object(symmetric, "group_memory", memory),
        mock.patch(f"{path_of('symmetric_moves')}.group_memory", memory),
    ):
        memory(group, torch.device("cpu"))
        forget_kept(Plans)  # which chose their transports before
        try:
            yield
        finally:
            forget_kept(symmetric.Held, Plans)


def attend(inputs: list[Tensor], axis: Any, transport: str, **options: Any) -> list[Tensor]:
    """out, lse or None, dq, dk, dv of local inputs."""
    q, k, v = (x.detach().requires_grad_() for x in inputs[:3])
    out = cp_mesh.attention(q, k, v, mesh=axis, transport=transport, **options)
    return [out.detach(), *torch.autograd.grad(out, (q, k, v), inputs[3])]


def compare(what: str, inputs: list[Tensor], axis: Any, **options: Any) -> list[str]:
    """A forward of other rows, then a forward and backward, with no other collective between them."""
    results = []
    for transport in TRANSPORTS:
        with torch.no_grad():
            others = [-2 * x for x in inputs[:3]]
            before = cp_mesh.attention(*others, mesh=axis, transport=transport, **options)
        results.append([before, *attend(inputs, axis, transport, **options)])
    return different(what, *results)


def different(what: str, wanted: list[Tensor], got: list[Tensor]) -> list[str]:
    names = (*("out before",) * (len(wanted) - 4), "out", "dq", "dk", "dv")
    return [
        f"{what}: {name} differs at {(a != b).sum()} of {a.numel()} elements, by {(a - b).abs().max():.1e}"
        for name, a, b in zip(names, wanted, got, strict=False)
        if not (close(a, b) if by_atomics(name, a) else torch.equal(a, b)) or not a.isfinite().all()
    ]


def by_atomics(name: str, x: Tensor) -> bool:
    """Whether a CUDA kernel may sum it in any order: dq of its blocks of keys, dk and dv of heads that share them."""
    return x.is_cuda and name in ("dq", "dk", "dv") and not torch.are_deterministic_algorithms_enabled()


def close(a: Tensor, b: Tensor) -> bool:
    """Sums by atomics, in any order: some elements round the other way.

    These change the norm by 1e-5; one wrong row of thousands, by 1e-2.
    """
    return bool((a - b).double().norm() <= 1e-3 * a.double().norm())


def on_files(rank: int, folder: Path, cases: list[tuple[str, str, int, dict[str, Any]]]) -> list[str]:
    size = dist.get_world_size()
    axis, problems = mesh((size,), ("cp",)), []
    random.seed(rank)
    with double(axis.get_group(), folder):
        for name, mask, S, options in cases:
            layout = LAYOUTS[name](S)
            rows = layout.positions(S, size, rank)
            inputs = [x[:, :, rows] for x in make_qkv(2, *options.get("heads", (6, 3)), S, 5, 4)]
            extra = {key: value for key, value in options.items() if key != "heads"}
            problems += compare(
                f"{name}, {mask}, S={S}, {options}", inputs, axis, layout=layout, mask=make_mask(mask, 2, S), seq_len=S,
                **extra,
            )  # fmt: skip
    return problems


@pytest.mark.parametrize(
    "cp_size", (pytest.param(2, marks=pytest.mark.full), 3, pytest.param(4, marks=pytest.mark.full))
)
@pytest.mark.more("parity")
def test_every_layout_and_mask(pool, full, cp_size, tmp_path):
    """On the double. Shapes shrink and grow from call to call, so stale rows of a call before would be read."""
    masks = ("causal", "documents", "no key at all", *(("full", "window", "prefix") if full else ()))
    cases = [(layout, mask, S, {}) for layout in LAYOUTS for mask in masks for S in (31, 0, 47)]
    # Chunks: one pass each, through the same memory.
    cases += [(layout, "causal", 29, {"heads": (4, 4)}) for layout in LAYOUTS]
    cases += [("zigzag", "causal", 29, {"heads": (8, 4), "head_chunks": chunks}) for chunks in (1, 2, 4)]
    for method in METHODS:
        heads: dict[str, Any] = {"heads": (12, 6 // cp_size)} if method == "ulysses" else {}
        cases += [(layout, "documents", S, {"method": method} | heads) for layout in LAYOUTS for S in (31, 2, 47)]
    random.Random(cp_size).shuffle(cases)
    report(pool(cp_size).run(on_files, tmp_path, cases if full else cases[::5], timeout=120.0))


@on_ranks(3)
def test_a_rank_with_documents_of_its_own_only_computes(rank, axis, tmp_path):
    """One call of the kernel in each pass; it copies nothing, although the other ranks move rows."""
    mask, done = Mask(documents=torch.tensor([0] * 5 + [1] * 3 + [2] * 16)), list[str]()  # the last one is cut
    inputs = [torch.randn(1, heads, 8, 4, dtype=torch.float64) for heads in (4, 2, 2, 4)]

    def noted(owner: Any, name: str) -> Any:
        real = getattr(owner, name)
        return mock.patch.object(owner, name, lambda *given: (done.append(name), real(*given))[1])

    with double(axis.get_group(), tmp_path), ExitStack() as notes:
        for owner, name in ((stages, "copy_together"), (stages, "dense_like"), *((x, "step") for x in PASSES)):
            notes.enter_context(noted(owner, name))
        report([compare("own documents", inputs, axis, layout=Contiguous(), mask=mask)])
        for transport in TRANSPORTS:
            del done[:]
            attend(inputs, axis, transport, layout=Contiguous(), mask=mask)
            if rank < 2:
                assert done == ["step", "step"] if rank == 0 else {"copy_together", "dense_like"} <= set(done)


@on_ranks(3)
def test_calls_in_a_row_on_the_double(rank, axis, tmp_path):
    """Calls with other numbers in each; then memory grows, and they come again."""
    with double(axis.get_group(), tmp_path):
        for rows, call in product((24, 96, 24), range(3)):
            torch.manual_seed(1000 * rows + 10 * call + rank)
            inputs = [torch.randn(1, heads, rows, 8) for heads in (4, 2, 2, 4)]
            report([compare(f"call {call} of {rows} rows", inputs, axis)])


@pytest.mark.parametrize(("cp_size", "dtype"), ((2, torch.bfloat16), (3, torch.float32)))
@on_ranks("cp_size")
def test_the_memory_of_a_group_is_what_the_formula_says(rank, axis, cp_size, dtype, tmp_path):
    """On the double: rows in the inputs' dtype, and gradients that travel in fp32; of two ranks in one place."""
    H, S_local, D = 2, 16, 32
    schedule = make_schedule(ZigZag(), Mask(causal=True), cp_size * S_local, cp_size, rank)
    sizes = Sizes(1, H, H, D, D, dtype.itemsize, torch.float32.itemsize)
    with double(axis.get_group(), tmp_path):
        inputs = [torch.randn(1, H, S_local, D).to(dtype) for _ in range(4)]
        report([compare("", inputs, axis, kernel="reference")])
        formula = extra_memory(schedule, sizes, 1, TRANSPORTS[1]).symmetric
        assert symmetric.symmetric_memory_bytes() == formula > 0


@on_ranks(3)
def test_views_of_memory_go_with_their_plan(rank, axis, tmp_path):
    """A route has views of its rows and of its slots, in the memory for each; Ulysses has two all-to-alls."""
    inputs = [x[:, :, ZigZag().positions(24, 3, rank)] for x in make_qkv(2, 6, 3, 24, 5, 4)]
    with double(axis.get_group(), tmp_path):
        for method in ("ring", "ulysses", "ring", "ulysses"):
            attend(inputs, axis, TRANSPORTS[1], method=method)
        workspaces = state_of(axis.get_group(), symmetric.Held).memory._workspaces.values()
        assert sum(len(workspace._bound) for workspace in workspaces) == 4
        forget_kept(Plans)
        gc.collect()
        assert not any(workspace._bound for workspace in workspaces)


@on_ranks(4)
def test_release_gives_back_the_memory_of_groups_within_a_group(rank, axis, tmp_path):
    """Of the ring, of inner and outer groups; another group of the same ranks keeps its own, and later calls work."""
    inputs = [x[:, :, ZigZag().positions(24, 4, rank)] for x in make_qkv(2, 8, 4, 24, 5, 4)]
    hybrid = {"method": "hybrid", "ulysses_degree": 2}
    with double(axis.get_group(), tmp_path):
        other = dist.new_group([*range(4)])
        state_of(other, symmetric.Held).memory = FileMemory(other, tmp_path)
        state_of(other, symmetric.Held).memory.workspace("rows", 256, other)
        for each in (*({"method": name} for name in METHODS), hybrid):
            attend(inputs, axis, **{"transport": TRANSPORTS[1], **each})
        memory = state_of(axis.get_group(), symmetric.Held).memory
        assert symmetric.symmetric_memory_bytes() > 256
        symmetric.release(axis.get_group(), chain(*known_parts(axis.get_group())))
        assert symmetric.symmetric_memory_bytes() == 256
        report([compare("after release", inputs, axis, **hybrid)])
        assert symmetric.symmetric_memory_bytes() > 256
        assert state_of(axis.get_group(), symmetric.Held).memory is memory, "whether there can be memory is asked again"


@on_ranks(2)
def test_cpu_ranks_have_none(axis):
    asked = axis.get_group(), torch.device("cpu")
    with refused("symmetric_memory': it joins CUDA devices, the tensors are on cpu; transport='functional' works"):
        choose_transport("symmetric_memory", *asked)
    assert choose_transport("auto", *asked) == "functional"


@on_ranks(2)
def test_memory_goes_with_its_group(rank):
    group = dist.new_group()
    with (
        mock.patch.object(symmetric, "_CudaLane", return_value=mock.Mock()),
        mock.patch("torch.cuda.is_current_stream_capturing", return_value=False),
        mock.patch.object(symmetric, "_local_obstacle", return_value="none in this test"),
    ):
        symmetric.group_memory(group, torch.device("cpu", rank))
    assert len(states_of_all(symmetric.Held)) == 1
    dist.barrier()
    dist.destroy_process_group(group)
    del group
    gc.collect()
    assert not states_of_all(symmetric.Held)


def test_what_hinders_a_group():
    assert symmetric._obstacle([("a", 0, None), ("a", 1, None)]) is None
    assert symmetric._obstacle([("a", 0, None), ("b", 0, None)]) == "the group's ranks are on 2 hosts"
    assert "share a device index" in symmetric._obstacle([("a", 0, None), ("a", 0, None)])
    assert symmetric._obstacle([("a", 0, None), ("a", 1, "no peer access")]) == "no peer access"


@pytest.mark.full
@on_ranks(4, timeout=240.0)
def test_methods_on_the_double(axis, tmp_path):
    """What GPUs run below."""
    with double(axis.get_group(), tmp_path):
        report([check_methods()])


@pytest.mark.full
@on_ranks(3, timeout=120.0)
def test_linears_on_the_double(tmp_path):
    """What GPUs run below."""
    with double(linears_axis().get_group(), tmp_path), mock.patch("torch.cuda._sleep"):
        report([check_linears()])


# GPU checks. Each returns what is wrong, on every rank.

S, D = 1024, 64


def local_inputs(S_local: int, heads: tuple[int, int] = (8, 2), seed: int = 0) -> list[Tensor]:
    generator = torch.Generator(device()).manual_seed(1000 * seed + dist.get_rank())
    shapes = [(1, n, S_local, D) for n in (heads[0], heads[1], heads[1], heads[0])]
    return [torch.randn(s, generator=generator, device=device(), dtype=torch.bfloat16) for s in shapes]


def gpu_axis() -> Any:
    return mesh((dist.get_world_size(),), ("cp",))


def check_two_hundred_calls() -> list[str]:
    """Back to back, of changing shapes, layouts and heads, no wait between them; results compared at the end."""
    axis, problems, pending = gpu_axis(), [], []
    draw = random.Random(7)
    for call in range(200):
        heads, method = draw.choice([(8, 2), (4, 4), (6, 3)]), draw.choice([*METHODS])
        method = "ring" if heads[0] % dist.get_world_size() else method
        layout = draw.choice([ZigZag(), Striped(), Contiguous()])
        seq_len = dist.get_world_size() * 128 * draw.randint(1, 16) - draw.choice([0, 0, 1, 77])  # unequal shards too
        length = layout.shard_len(seq_len, dist.get_world_size(), dist.get_rank())
        options = {"layout": layout, "mask": Mask(causal=draw.random() < 0.7), "head_chunks": draw.choice([None, 1])}
        options |= {"seq_len": seq_len, "method": method}
        inputs = local_inputs(length, heads, seed=call)
        got = attend(inputs, axis, TRANSPORTS[1], **options)
        pending.append((f"call {call}: {length} {heads} {options}", inputs, options, got))
    for what, inputs, options, got in pending:
        problems += different(what, attend(inputs, axis, TRANSPORTS[0], **options), got)
    return problems


def sleeping_lanes(cycles: Callable[[], int]) -> Any:
    """Work on side streams begins after a sleep."""
    enter = symmetric._CudaLane.__enter__

    def slow(lane: Any) -> None:
        enter(lane)
        torch.cuda._sleep(cycles())

    return mock.patch.object(symmetric._CudaLane, "__enter__", slow)


def check_stalled() -> list[str]:
    """Sleeps of random length on the caller's stream and on both side streams, different on every rank."""
    axis, problems = gpu_axis(), []
    draw = random.Random(dist.get_rank())
    attend(local_inputs(S), axis, TRANSPORTS[1])

    def cycles() -> int:
        return draw.choice([0, 100_000, 2_000_000])

    with sleeping_lanes(cycles):
        for call in range(8):
            inputs = local_inputs(S // (1 + call % 3), seed=call)
            others = [x.roll(1, dims=2) * 2 for x in inputs]
            results = []
            for transport in TRANSPORTS:
                # Two forwards of unlike rows: a backward between them would bring the ranks together.
                with torch.no_grad():
                    forwards = []
                    for q, k, v, _ in (inputs, others):
                        torch.cuda._sleep(cycles())
                        forwards.append(cp_mesh.attention(q, k, v, mesh=axis, transport=transport))
                torch.cuda._sleep(cycles())
                results.append([*forwards, *attend(inputs, axis, transport)])
            problems += different(f"stalled call {call}", *results)
    return problems


def check_layers_and_checkpointing() -> list[str]:
    """Three layers of different heads in flight, their backwards in reverse; with recompute in the backward."""
    axis, problems = gpu_axis(), []

    def model(x: Tensor, transport: str, recompute: bool) -> Tensor:
        for heads in ((8, 2), (8, 8), (8, 4)):

            def layer(x: Tensor, heads: tuple[int, int] = heads) -> Tensor:
                k, v = x[:, : heads[1]] * 0.5, x[:, : heads[1]] * 0.25
                return x + cp_mesh.attention(x, k, v, mesh=axis, transport=transport)

            x = checkpoint(layer, x, use_reentrant=False) if recompute else layer(x)
        return x

    for recompute in (False, True):
        x, *_, dout = local_inputs(S, (8, 8))
        results = []
        for transport in TRANSPORTS:
            leaf = x.detach().requires_grad_()
            out = model(leaf, transport, recompute)
            results.append([out.detach(), *torch.autograd.grad(out, leaf, dout)])
        problems += different(f"layers, recompute={recompute}", *results)
    return problems


def check_graph() -> list[str]:
    """A captured forward and backward, replayed on new inputs, between eager calls of other shapes that grow memory."""
    axis, problems = gpu_axis(), []
    for method, heads in product(METHODS, ((8, 2), (8, 8))):
        static = local_inputs(S, heads)
        attend(static, axis, TRANSPORTS[1], method=method)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            results = attend(static, axis, TRANSPORTS[1], method=method)
        for replay in range(4):
            fresh = local_inputs(S, heads, seed=replay + 1)
            for x, new in zip(static, fresh, strict=True):
                x.copy_(new)
            graph.replay()
            got = [x.clone() for x in results]
            wanted = attend(fresh, axis, TRANSPORTS[0], method=method)
            problems += different(f"replay {replay} by {method}, {heads}", wanted, got)
            other = local_inputs(S + 256 * replay, heads, seed=replay)
            problems += compare(f"eager after replay {replay}", other, axis)
    return problems


class Block(torch.nn.Module):
    """[1, S, 8 D] to the same: projections around attention, and a residual."""

    def __init__(self, axis: Any, transport: str) -> None:
        super().__init__()
        options: dict[str, Any] = {"bias": False, "device": device(), "dtype": torch.bfloat16}
        self.project, self.merge = torch.nn.Linear(8 * D, 12 * D, **options), torch.nn.Linear(8 * D, 8 * D, **options)
        self.options: dict[str, Any] = {"mesh": axis, "seq_dim": 1, "transport": transport}

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.project(x).unflatten(-1, (12, D)).split([8, 2, 2], dim=2)
        return x + self.merge(cp_mesh.attention(q, k, v, **self.options).flatten(2))


def check_graphed_blocks() -> list[str]:
    """Two blocks captured by `torch.cuda.make_graphed_callables`: steps on new inputs, gradients of weights too."""
    axis, problems = gpu_axis(), []
    eager = [Block(axis, TRANSPORTS[0]) for _ in range(2)]
    graphed = [Block(axis, TRANSPORTS[1]) for _ in range(2)]
    for ours, theirs in zip(graphed, eager, strict=True):
        ours.load_state_dict(theirs.state_dict())

    def inputs(seed: int) -> Tensor:
        return local_inputs(S, seed=seed)[0].transpose(1, 2).flatten(2).requires_grad_()

    weights = [[weight for block in blocks for weight in block.parameters()] for blocks in (eager, graphed)]
    replayed = torch.cuda.make_graphed_callables(tuple(graphed), tuple((inputs(0),) for _ in graphed))
    for step in range(3):
        results = []
        for blocks, params in zip((eager, replayed), weights, strict=True):
            x = inputs(step + 1)
            out = blocks[1](blocks[0](x))
            results.append([x.clone() for x in (out, *torch.autograd.grad(out, [x, *params], out.detach()))])
        pairs = enumerate(zip(*results, strict=True))  # out, and the gradients of x and of the weights
        problems += [f"step {step} of graphed blocks: result {i} differs" for i, (a, b) in pairs if not close(a, b)]
        problems += compare(f"eager after step {step}", local_inputs(S - 128 * step, seed=step), axis)
    return problems


def check_streams() -> list[str]:
    """Calls on streams of the caller's, one after the other in turns, with nothing but the memory to order them."""
    axis, problems, pending = gpu_axis(), [], []
    streams = [torch.cuda.Stream() for _ in range(2)]
    many = [local_inputs(S - 128 * (call % 3), seed=call) for call in range(8)]
    torch.cuda.synchronize()
    with torch.cuda.stream(streams[0]):  # which makes the memory
        attend(many[0], axis, TRANSPORTS[1])
    torch.cuda.synchronize()
    for call, inputs in enumerate(many):
        with torch.cuda.stream(streams[call % 2]):
            torch.cuda._sleep(1_000_000 * (call % 3))
            pending.append((inputs, attend(inputs, axis, TRANSPORTS[1])))
    torch.cuda.synchronize()
    for call, (inputs, got) in enumerate(pending):
        problems += different(f"stream call {call}", attend(inputs, axis, TRANSPORTS[0]), got)
    return problems


def check_exceptions() -> list[str]:
    """A kernel that raises on all ranks in mid-call: the group refuses what follows, and other groups are right."""
    from inside import MergingForward, SummingBackward

    problems = []
    for target in (MergingForward, SummingBackward):
        for fails_at in (1, 2):
            group = dist.new_group()
            axis = DeviceMesh.from_group(group, "cuda", mesh_dim_names=("cp",))
            inputs, steps, real = local_inputs(S, seed=fails_at), [], target.step

            def step(self: Any, *args: Any, steps: list[int] = steps, real: Any = real, at: int = fails_at) -> Any:
                steps.append(1)
                if len(steps) == at:
                    raise RuntimeError("planted")
                return real(self, *args)

            with mock.patch.object(target, "step", step):
                try:
                    attend(inputs, axis, TRANSPORTS[1])
                    problems.append("the planted error was swallowed")
                except RuntimeError as error:
                    if "planted" not in str(error):
                        raise
            try:
                attend(inputs, axis, TRANSPORTS[1])
                problems.append(f"after an exception in {target.__name__}, the group could be used again")
            except cp_mesh.RankMismatchError as error:
                if "left a pass by RuntimeError: planted" not in str(error):
                    raise
            problems += compare(f"after an exception in {target.__name__}", inputs, gpu_axis())
    return problems


def check_capture_refusals() -> list[str]:
    """A capture that would have to grow the memory is refused with the way out."""
    axis, problems = gpu_axis(), []
    large = local_inputs(16 * S)
    attend(local_inputs(S), axis, TRANSPORTS[1])
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph):
            attend(large, axis, TRANSPORTS[1])
        problems.append("a capture that grows memory was not refused")
    except Exception as error:  # the capture's own error may wrap it
        text = f"{error} {error.__cause__} {error.__context__}"
        if "must grow" not in text or "run one forward and backward" not in text:
            problems.append(f"refused with other words: {text}")
    torch.cuda.synchronize()
    return problems + compare("after a refused capture", local_inputs(S), axis)


def check_methods() -> list[str]:
    """Every method, with groups of half of the ranks where it has any, in each layout."""
    axis, problems = gpu_axis(), []
    size, rank = axis.size(), axis.get_local_rank()
    half = max(1, size // 2)
    degrees = {"hybrid": {"ulysses_degree": half}}
    for method, name in product(METHODS, ("contiguous", "zigzag", "striped")):
        for heads, mask, seq_len in (((8, 8), "causal", 256 * size - 3), ((8, 2), "documents", 256 * size)):
            layout = LAYOUTS[name](seq_len)
            inputs = local_inputs(layout.shard_len(seq_len, size, rank), heads, seed=seq_len)
            options = {"layout": layout, "mask": make_mask(mask, 1, seq_len), "seq_len": seq_len, "method": method}
            options |= degrees.get(method, {})
            wanted, got = (attend(inputs, axis, each, **options) for each in TRANSPORTS)
            problems += different(f"{method}, {name}, {heads}, {mask}", wanted, got)
    return problems


class Linears(torch.nn.Module):
    """[..., C] to the same: two column linears of one input, and a row linear. Weights are small integers."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = (torch.nn.Linear(256, 256, bias=name != "a") for name in "abc")
        for seed, weight in enumerate(self.parameters()):
            weight.data.random_(-1, 2, generator=torch.Generator().manual_seed(seed))
        self.to(device())

    def forward(self, x: Tensor) -> Tensor:
        return self.c(self.a(x) + self.b(x))


def over_tp(axis: Any, transport: Any, recompute: bool) -> torch.nn.Module:
    columns = cp_mesh.tensor_parallel.OverlappedColwise("a", "b", recompute_all_gather=recompute, transport=transport)
    styles = {"": columns, "c": cp_mesh.tensor_parallel.OverlappedRowwise(transport=transport)}
    for style in styles.values():
        style.src_data_rank = None  # every rank has made the same weights
    return cp_mesh.parallelize(Linears(), axis, styles)


def step_of_linears(model: torch.nn.Module, x: Tensor, dout: Tensor) -> list[Tensor]:
    """An output of other inputs, for nothing else to bring the ranks together between two forwards; and gradients."""
    leaf = x.detach().requires_grad_()
    with torch.no_grad():
        before = model(-2 * x)
    out = model(leaf)
    grads = torch.autograd.grad(out, [leaf, *model.parameters()], dout)
    return [before, out.detach(), *(y.to_local() if isinstance(y, DTensor) else y for y in grads)]


def integers(seed: int, *shape: int) -> list[Tensor]:
    """Input and gradient of all ranks together, float32."""
    generator = torch.Generator(device()).manual_seed(seed)
    return [torch.randint(-1, 2, (*shape, 256), generator=generator, device=device()).float() for _ in range(2)]


def compare_linears(what: str, whole: list[Tensor], got: list[Tensor]) -> list[str]:
    """Against one rank; sums of integers are exact in any order."""
    rank, size = dist.get_rank(), dist.get_world_size()
    names = ("before", "out", "dx", "da", "db", "bias", "dc", "bias")
    dims = {**dict.fromkeys(names, 0), "before": -2, "out": -2, "dx": -2, "dc": 1}
    problems = []
    for i, (name, x, y) in enumerate(zip(names, step_of_linears(Linears(), *whole), got, strict=True)):
        wanted = x if i == len(names) - 1 else x.chunk(size, dims[name])[rank]
        if not torch.equal(wanted, y):
            problems.append(f"{what}: {name} differs at {(wanted != y).sum()} of {y.numel()} elements")
    return problems


def of_rank(whole: list[Tensor]) -> list[Tensor]:
    return [x.chunk(dist.get_world_size(), -2)[dist.get_rank()].contiguous() for x in whole]


def linears_axis() -> Any:
    return mesh((dist.get_world_size(),), ("tp",))


def check_linears() -> list[str]:
    """Linears over tp, of lengths that grow and shrink, with sleeps of random length on all three streams."""
    axis, problems, draw = linears_axis(), [], random.Random(dist.get_rank())
    models = {recompute: over_tp(axis, TRANSPORTS[1], recompute) for recompute in (False, True)}
    size = axis.size()

    def cycles() -> int:
        return draw.choice([0, 100_000, 2_000_000])

    step_of_linears(models[True], *of_rank(integers(0, 1, 64 * size)))
    pending: list[Any] = []
    with sleeping_lanes(cycles):
        for call, shape in enumerate([(1, 512), (2, 384), (1024,), (1, 3), (3, 1), (1, 2048), (1, 512)]):
            whole = integers(call, *shape[:-1], shape[-1] * size)
            for recompute, model in models.items():
                torch.cuda._sleep(cycles())
                pending.append((f"{shape}, {recompute=}", whole, step_of_linears(model, *of_rank(whole))))
    for call in pending:
        problems += compare_linears(*call)
    return problems


def check_linears_in_graphs() -> list[str]:
    """A captured step of linears over tp, replayed on new inputs between eager steps of other lengths."""
    axis, problems = linears_axis(), []
    model, size = over_tp(axis, TRANSPORTS[1], True), axis.size()
    static = of_rank(integers(0, 1, 512 * size))
    step_of_linears(model, *static)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = step_of_linears(model, *static)
    for replay in range(4):
        whole = integers(replay + 1, 1, 512 * size)
        for x, new in zip(static, of_rank(whole), strict=True):
            x.copy_(new)
        graph.replay()
        problems += compare_linears(f"replay {replay}", whole, results)
        whole = integers(replay, 1, 256 * (replay + 1) * size)
        problems += compare_linears(f"eager after {replay}", whole, step_of_linears(model, *of_rank(whole)))
    return problems


CHECKS: dict[str, Callable[[], list[str]]] = {
    "linears": check_linears,
    "linears in graphs": check_linears_in_graphs,
    "methods": check_methods,
    "two hundred calls": check_two_hundred_calls,
    "stalled": check_stalled,
    "layers and checkpointing": check_layers_and_checkpointing,
    "graph": check_graph,
    "graphed blocks": check_graphed_blocks,
    "streams": check_streams,
    "exceptions": check_exceptions,
    "capture refusals": check_capture_refusals,
}


HOW = ("deterministic", "by atomics")


def on_gpus(rank: int, name: str, how: str) -> list[str]:
    """Deterministic kernels give results that are equal to the bit; the others are what users run."""
    gc.collect()  # a graph of an earlier check that goes while this one captures would end the capture
    torch.use_deterministic_algorithms(how == HOW[0], warn_only=True)  # of other ops it only warns
    torch.utils.deterministic.fill_uninitialized_memory = False  # a launch more for every buffer hides races
    try:
        with poisoned():
            problems = CHECKS[name]()
            symmetric.release(gpu_axis().get_group(), chain(*known_parts(gpu_axis().get_group())))
    finally:
        torch.use_deterministic_algorithms(False)
    return problems


@pytest.mark.multigpu
@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("name", CHECKS)
def test_on_gpus(pool, name, how):
    report(pool(2, "nccl").run(on_gpus, name, how, timeout=300.0))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=CHECKS, default=list(CHECKS))
    parser.add_argument("--how", nargs="+", choices=HOW, default=list(HOW))
    parser.add_argument("--one-gpu", action="store_true", help="all ranks on the first GPU")
    parser.add_argument("--part", help="1/2: one half of the checks")
    args = parser.parse_args()
    join_on_gpus(args.one_gpu)
    failed = False
    for name, how in part_of([*itertools.product(args.only, args.how)], args.part):
        begin = time.perf_counter()
        problems = on_gpus(dist.get_rank(), name, how)
        everyone: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(everyone, problems)
        wrong = [f"rank {rank}: {problem}" for rank, some in enumerate(everyone) for problem in some]
        failed |= bool(wrong)
        if dist.get_rank() == 0:
            verdict = f"WRONG, {len(wrong)} problems, first: {wrong[:3]}" if wrong else "ok"
            print(f"{name}, {how}: {verdict} ({time.perf_counter() - begin:.1f} s)", flush=True)
    dist.barrier()
    dist.destroy_process_group()
    sys.exit(failed)


if __name__ == "__main__":
    main()
