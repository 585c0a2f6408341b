"""Pools of rank processes that live through a pytest session, for tests of code that communicates.

The body of a test runs on every rank, and its assertions are the test::

    @on_ranks(3)
    def test_total(rank: int) -> None:
        value = torch.tensor([rank])
        dist.all_reduce(value)
        assert value.item() == 3

What compares numbers of ranks calls a function of the top level, ``pool(3).run(fn, *args)``, and gets each rank's
result of ``fn(rank, *args)``.

Ranks are forked from a server that has imported torch once, so a pool starts in a tenth of a second; CUDA ranks are
spawned, since a process that touched CUDA cannot be forked safely. Arguments and results travel by value through
pipes; tensors arrive on the CPU, and only leaves keep `requires_grad`.
"""

from __future__ import annotations

import faulthandler
import functools
import gc
import inspect
import io
import multiprocessing
import os
import pickle
import shutil
import signal
import sys
import tempfile
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing import connection
from operator import attrgetter
from pathlib import Path
from types import SimpleNamespace, TracebackType
from typing import Any
from unittest import mock

import pytest
import torch
import torch._dynamo
import torch._inductor.config
import torch.distributed as dist
from inside import room
from poison import poisoned, poisoning
from torch._dynamo.utils import counters
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from cp_mesh import ArgumentError, RankMismatchError, UnsupportedError

REFUSALS = (ArgumentError, UnsupportedError, RankMismatchError)
START_TIMEOUT = 120.0  # seconds; a spawned rank imports torch and creates a CUDA context
MAX_LIVE_RANKS = 12
GRACE = 5.0  # seconds the other ranks get to report after the first one failed
STACK_SIGNAL = signal.SIGVTALRM  # LLVM, and so Triton, takes SIGUSR1 and SIGUSR2 for itself
__tracebackhide__ = True  # pytest then shows the line of the test, not of this module
# What ranks would import one by one: a second each.
PRELOAD = [
    *("torch.distributed.tensor.parallel", "torch.distributed.fsdp", "torch._dynamo.trace_rules", "torch.export"),
    *("torch._inductor.compile_fx", "torch._dynamo.testing", "functorch.compile", "triton", "einops", "numpy.typing"),
    *("torch.distributed.tensor.experimental._attention", "pytest", "hypothesis", "cp_mesh", "preloaded"),
]


@dataclass(frozen=True)
class Raised:
    """An exception on a rank: class names from `type` up to its bases, text, and collectives issued before it."""

    kinds: tuple[str, ...]
    message: str
    traceback: str
    num_collectives: int

    @property
    def type(self) -> str:
        return self.kinds[0]


class RankFailure(Exception):
    """Some rank raised, died or hung; the text holds each one's traceback or stack, ranks of equal text together."""

    def __init__(self, what: str, world_size: int, failures: dict[int, str], is_lost: bool = False) -> None:
        self.is_lost = is_lost  # whether a rank died or hung
        ranks_of: dict[str, list[int]] = {}
        for rank in sorted(failures):
            ranks_of.setdefault(failures[rank], []).append(rank)
        parts = [f"rank {', '.join(map(str, ranks))}: {text}" for text, ranks in ranks_of.items()]
        super().__init__(f"{what} failed on {len(failures)} of {world_size} ranks\n\n" + "\n".join(parts))


class Pool:
    """`world_size` processes in one default process group; started on first use, replaced after a failure."""

    def __init__(self, world_size: int, backend: str = "gloo", group_timeout: float = 60.0) -> None:
        self.world_size, self.backend, self.group_timeout = world_size, backend, group_timeout
        self.processes: list[Any] = []
        self.conns: list[connection.Connection] = []
        self.folder = Path()
        self.store: dist.Store | None = None  # of this process, whose ranks may die; a file would be polled

    def run(self, fn: Callable[..., Any], *args: Any, timeout: float = 60.0) -> list[Any]:
        """Calls ``fn(rank, *args)`` on every rank at once and returns one result per rank.

        Raises:
            RankFailure: A rank raised, died, or was still running after `timeout` seconds. The pool is then replaced,
                as other ranks may have collectives in flight.
        """
        return [pickle.loads(outcome) for outcome in self._call(fn, args, timeout, expecting_error=False)]

    def run_expecting_error(self, fn: Callable[..., Any], *args: Any, timeout: float = 60.0) -> list[Raised | None]:
        """Like `run` for a call that every rank must refuse: what each rank raised, None where it did not.

        The pool lives on if every rank raised after the same number of collectives, so that none waits for a peer.
        """
        outcomes = self._call(fn, args, timeout, expecting_error=True)
        raised = [outcome if isinstance(outcome, Raised) else None for outcome in outcomes]
        if len({r.num_collectives if r else None for r in raised}) > 1:
            self._part(True)
        return raised

    def close(self) -> None:
        for process in self.processes:
            process.kill()
        for process in self.processes:
            process.join()
        for conn in self.conns:
            conn.close()
        if self.processes:
            shutil.rmtree(self.folder, ignore_errors=True)
        self.processes, self.conns, self.store = [], [], None

    def _call(self, fn: Callable[..., Any], args: tuple, timeout: float, expecting_error: bool) -> list[Any]:
        request = _dumps((fn, args, poisoning()))
        try:
            if not self.processes:
                self._start()
            for conn in self.conns:
                conn.send_bytes(request)
            return self._collect(fn.__name__, timeout, expecting_error)
        except BaseException as error:  # KeyboardInterrupt too: an answer left in a pipe would be the next call's
            self._part(isinstance(error, RankFailure) and not error.is_lost)
            raise

    def _part(self, is_alive: bool) -> None:
        """Of ranks that may have collectives in flight; that are alive if all of them answered."""
        self.close()

    def _start(self) -> None:
        context: Any = multiprocessing.get_context("spawn" if self.backend == "nccl" else "forkserver")
        if self.backend != "nccl":
            context.set_forkserver_preload(PRELOAD)
        self.folder = Path(tempfile.mkdtemp(prefix="ranks_"))
        self.store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        settings = self.world_size, self.backend, self.folder, self.store.port, self.group_timeout
        self.conns, theirs = map(list, zip(*(context.Pipe() for _ in range(self.world_size)), strict=True))
        for rank, conn in enumerate(theirs):
            process = context.Process(target=_serve, args=(conn, rank, *settings), daemon=True, name=f"rank{rank}")
            with mock.patch.dict(os.environ, PYTHONPATH=os.pathsep.join(sys.path)):  # of the server, for `preloaded`
                process.start()
            self.processes.append(process)
        for conn in theirs:
            conn.close()  # else a dead rank's pipe would not read as closed
        self._collect("start", START_TIMEOUT)

    def _collect(self, what: str, timeout: float, expecting_error: bool = False) -> list[bytes | Raised]:
        outcomes: dict[int, bytes | Raised] = {}
        lost: dict[int, str] = {}
        begin = time.monotonic()
        deadline = begin + timeout
        while waiting := [rank for rank in range(self.world_size) if rank not in outcomes | lost]:
            ready = connection.wait([self.conns[rank] for rank in waiting], max(0.0, deadline - time.monotonic()))
            if not ready:
                seconds = time.monotonic() - begin
                lost |= {r: f"still running in {what} after {seconds:.1f} s\n{self._stack(r)}" for r in waiting}
            for rank in (rank for rank in waiting if self.conns[rank] in ready):
                try:
                    outcomes[rank] = pickle.loads(self.conns[rank].recv_bytes())
                except (EOFError, OSError):
                    self.processes[rank].join(GRACE)
                    lost[rank] = f"process died with exit code {self.processes[rank].exitcode}\n{self._dumped(rank)}"
                if not isinstance(outcomes.get(rank), bytes):
                    deadline = min(deadline, time.monotonic() + GRACE)
        raised = {rank: o.traceback for rank, o in outcomes.items() if isinstance(o, Raised)}
        if lost or (raised and not expecting_error):
            raise RankFailure(what, self.world_size, raised | lost, bool(lost))
        return [outcomes[rank] for rank in range(self.world_size)]

    def _stack(self, rank: int) -> str:
        os.kill(self.processes[rank].pid, STACK_SIGNAL)
        time.sleep(0.2)  # the dump comes from a signal handler and has no end mark
        return self._dumped(rank) or "(no stack)\n"

    def _dumped(self, rank: int) -> str:
        """The stacks that a rank wrote when it was asked to, or when it crashed."""
        file = self.folder / f"stack{rank}"
        return file.read_text() if file.exists() else ""


class Pools:
    """Gives the pool of a size and backend; beyond MAX_LIVE_RANKS the least recently used ones are ended."""

    def __init__(self, make: Callable[..., Pool] = Pool) -> None:
        self._make, self._pools = make, dict[tuple[int, str], Pool]()

    def __call__(self, world_size: int, backend: str = "gloo") -> Any:
        pool = self._pools.pop((world_size, backend), None) or self._make(world_size, backend)
        live = world_size
        for other in reversed(self._pools.values()):
            live += len(other.processes)
            if live > MAX_LIVE_RANKS:
                other.close()
        self._pools[world_size, backend] = pool
        return pool

    def __enter__(self) -> Pools:
        return self

    def __exit__(self, *_: object) -> None:
        for pool in self._pools.values():
            pool.close()


@functools.cache
def mesh(shape: tuple[int, ...], names: tuple[str, ...]) -> DeviceMesh:
    """The DeviceMesh of this shape on this rank, created once; every rank must ask for new ones in the same order."""
    return init_device_mesh(device().type, shape, mesh_dim_names=names)


@contextmanager
def group_of_one() -> Iterator[None]:
    """A group of this process, for tests without ranks."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def alone() -> DeviceMesh:
    """A mesh of this process."""
    return init_device_mesh("cpu", (1,), mesh_dim_names=("cp",))


def device() -> torch.device:
    """This rank's device: its own GPU under nccl, or one that ranks share, else the CPU."""
    on_gpu = dist.is_initialized() and (_shares_gpu or "nccl" in dist.get_backend_config())
    return torch.device("cuda", torch.cuda.current_device()) if on_gpu else torch.device("cpu")


_shares_gpu = False


def join_on_gpus(one_gpu: bool) -> None:
    """Joins the default group of torchrun, each rank on its own GPU; or all on the first, over gloo, as NCCL refuses.

    Ranks that share a GPU take turns on it, so that a barrier takes milliseconds: nothing can be learned of speed.
    """
    global _shares_gpu
    torch.cuda.set_device(0 if one_gpu else int(os.environ["LOCAL_RANK"]))
    torch.cuda.init()  # else a mesh would choose the device
    if one_gpu:
        symmetric_memory = room("symmetric_memory")

        def obstacle_of_hosts(answers: Sequence[tuple[str, int, str | None]]) -> str | None:
            return of_devices([(host, rank, problem) for rank, (host, _, problem) in enumerate(answers)])

        of_devices, symmetric_memory._obstacle = symmetric_memory._obstacle, obstacle_of_hosts
        os.environ["TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"] = "1"  # PyTorch's own switch, for its tests
        _shares_gpu = True
    dist.init_process_group("cpu:gloo,cuda:gloo" if one_gpu else "cpu:gloo,cuda:nccl")


def on_ranks(world_size: int | str, timeout: float = 60.0) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Makes a test of a body that runs on every rank of a pool, for `timeout` seconds at most.

    Args:
        world_size: number of ranks, or the parameter that holds it, as "cp_size" or "case.cp_size".
        timeout: seconds.

    The body may ask for `rank`, and for `axis`, the mesh axis "cp" of all ranks; its other parameters are those of the
    test, and arrive by value.
    """

    def decorate(body: Callable[..., None]) -> Callable[..., None]:
        names = dict(inspect.signature(body).parameters)
        taken = {name: parameter for name, parameter in names.items() if name not in ("rank", "axis")}
        if isinstance(world_size, str) and (root := world_size.partition(".")[0]) not in taken:
            taken = {root: inspect.Parameter(root, inspect.Parameter.POSITIONAL_OR_KEYWORD)} | taken
        pool = inspect.Parameter("pool", inspect.Parameter.POSITIONAL_OR_KEYWORD)

        @functools.wraps(body)
        def test(pool: Any, *args: Any, **given: Any) -> None:
            given |= dict(zip(taken, args, strict=False))
            size = world_size if isinstance(world_size, int) else attrgetter(world_size)(SimpleNamespace(**given))
            pool(size).run(on_rank, given, timeout=timeout)

        @functools.wraps(body)
        def on_rank(rank: int, given: dict[str, Any]) -> None:
            given["rank"] = rank
            if "axis" in names:
                given["axis"] = mesh((dist.get_world_size(),), ("cp",))
            body(**{name: given[name] for name in names if name in given})

        on_rank.__qualname__ += ".on_rank"  # by which it is found on the ranks
        test.on_rank = on_rank  # type: ignore[attr-defined]
        test.__signature__ = inspect.Signature([pool, *taken.values()])  # type: ignore[attr-defined]
        return test

    return decorate


@contextmanager
def refused(match: str, error: type[Exception] | tuple[type[Exception], ...] = REFUSALS) -> Iterator[Any]:
    """What is inside raises this error on this rank, before any collective."""
    begin = num_collectives()
    with pytest.raises(error, match=match) as raised:
        yield raised
    assert num_collectives() == begin, "a collective was issued before the refusal"


def num_collectives() -> int:
    """Collectives and sends issued by this rank so far, in all its groups that communicate."""
    groups = dist.distributed_c10d._world.pg_map.items()
    return sum(group._get_sequence_number_for_group() for group, (backend, _) in groups if backend != "fake")


def _serve(conn: Any, rank: int, world_size: int, backend: str, folder: Path, port: int, group_timeout: float) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for pytest, which ends the pool
    stacks = (folder / f"stack{rank}").open("w")
    faulthandler.enable(stacks)  # a crash tells where the rank was
    faulthandler.register(STACK_SIGNAL, stacks, all_threads=True)
    parent: Any = multiprocessing.parent_process()
    threading.Thread(target=lambda: (parent.join(), os._exit(1)), daemon=True).start()  # nobody left to kill this rank
    if sys.platform == "linux":
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # else gloo resolves the host's name, which may not exist
    torch._inductor.config.compile_threads = 1  # else every rank starts compile workers of its own
    torch.set_num_threads(1)
    gc.freeze()  # what was imported stays: else each collection looks at all of it
    warnings.filterwarnings("error", "Dynamo detected a call", UserWarning)  # of a cache of ours: users would read it
    os.environ["LOCAL_WORLD_SIZE"] = str(2 - world_size % 2)  # hosts of two ranks, or of one where ranks are odd
    request = _dumps((_join, (world_size, backend, port, group_timeout), False))
    while True:
        conn.send_bytes(pickle.dumps(_outcome(rank, request)))
        request = conn.recv_bytes()


def join_anew(rank: int) -> None:
    """Leave all groups, and what is in flight there, for a default group of the same ranks."""
    dist.destroy_process_group()
    rejoin(rank)


def rejoin(rank: int) -> None:
    """Join again after the groups were destroyed."""
    mesh.cache_clear()
    _join(rank, *_joined[-1])


_joined: list[tuple[int, str, int, float]] = []


def _join(rank: int, world_size: int, backend: str, port: int, group_timeout: float) -> None:
    if backend == "nccl":
        torch.cuda.set_device(rank)
    store = dist.PrefixStore(str(len(_joined)), dist.TCPStore("127.0.0.1", port, wait_for_workers=False))
    _joined.append((world_size, backend, port, group_timeout))
    name, timeout = "cpu:gloo,cuda:nccl" if backend == "nccl" else backend, timedelta(seconds=group_timeout)
    dist.init_process_group(name, store=store, rank=rank, world_size=world_size, timeout=timeout)


def _outcome(rank: int, request: bytes) -> bytes | Raised:
    begin = num_collectives()
    try:
        fn, args, poison = pickle.loads(request)  # imports the test module
        torch.manual_seed(rank)
        with poisoned(poison):
            return _dumps(fn(rank, *args))
    except BaseException as error:
        while error.__traceback__ and error.__traceback__.tb_next and _is_here(error.__traceback__):
            error.__traceback__ = error.__traceback__.tb_next
        kinds = tuple(kind.__name__ for kind in type(error).__mro__)
        return Raised(kinds, str(error), "".join(traceback.format_exception(error)), num_collectives() - begin)
    finally:
        # else compiled graphs of one test count against the next one's recompile limit; full graphs count no frames
        if counters["frames"] or counters["stats"]:
            torch._dynamo.reset()
            counters.clear()
        sys.stdout.flush()


def _is_here(at: TracebackType) -> bool:
    return at.tb_frame.f_code.co_filename == __file__


class _ByValue(pickle.Pickler):
    """Tensors as compact copies: torch's own reductions pass file descriptors, or whole storages for a view."""

    def reducer_override(self, obj: Any) -> Any:
        if not isinstance(obj, torch.Tensor):
            return NotImplemented
        if type(obj) not in (torch.Tensor, torch.nn.Parameter):
            raise TypeError(f"only plain tensors travel between processes, got {type(obj).__name__}")
        copy = torch.clone(obj.detach(), memory_format=torch.contiguous_format).cpu()
        return copy.requires_grad_(obj.requires_grad and obj.is_leaf).__reduce_ex__(pickle.HIGHEST_PROTOCOL)


def _dumps(obj: Any) -> bytes:
    buffer = io.BytesIO()
    _ByValue(buffer, pickle.HIGHEST_PROTOCOL).dump(obj)
    return buffer.getvalue()
