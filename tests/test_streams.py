"""The order of streams over symmetric memory, on CPU ranks: doubles of streams know what each of them has waited for.

A stream counts its operators, and an event holds what its stream had done and waited for when it was recorded. An
operator may read what another stream wrote, and write what another stream read or wrote, only if its own stream waited
for that. So a missing wait is found whatever ran first. Memory that is freed is used again in the order of the caller's
stream, as by PyTorch's allocator, so a buffer that is freed too early is found where its memory is used again.
"""

from __future__ import annotations

import tempfile
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import test_symmetric_memory
import torch
import torch.distributed as dist
from checks import report
from inside import AttentionSpec, Backward, MergingForward, Scores, Tensors, inner, make_plan, room
from ranks import mesh
from test_symmetric_memory import FileMemory, double
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from cp_mesh import Mask, ZigZag

symmetric = room("symmetric_memory")
Call = inner("call.spec", "Call")


class Stream:
    """``seen``: how many operators of each stream are done before its next one."""

    device_index = -1  # of the CPU

    def __init__(self, *_: Any, **__: Any) -> None:
        self.seen: Counter[Stream] = Counter()


class Event:
    def record(self, stream: Stream) -> None:
        self._seen = Counter(stream.seen)

    def wait(self, stream: Stream) -> None:
        stream.seen |= self._seen


class Races(TorchDispatchMode):
    """Notes operators that do not wait for what they need; the stream of the caller is the first one."""

    def __init__(self) -> None:
        super().__init__()
        self.caller = self.stream = Stream()
        self.problems: list[str] = []
        self._writes: dict[int, tuple[Stream, int]] = {}
        self._reads: dict[int, Counter[Stream]] = {}

    def enter(self, stream: Stream) -> None:
        self.stream = stream

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        returns, name = func._schema.returns, func.overloadpacket.__name__
        is_view = any(x.alias_info is not None and not x.alias_info.is_write for x in returns)
        if is_view or "empty" in name or func.namespace == "c10d":  # a view, memory of any content, gloo's barrier
            return result
        written = [kwargs["out"]] if "out" in kwargs else [args[0]] if name.endswith("_") else tree_leaves(result)
        self.stream.seen[self.stream] += 1
        for x in _memory(args):
            self._check(name, "reads what was written", x, self._last_write(x))
            self._reads.setdefault(x, Counter())[self.stream] = self.stream.seen[self.stream]
        for x in _memory(written):
            self._check(name, "writes over what is written", x, self._last_write(x))
            others = Counter({s: n for s, n in self._reads.pop(x, Counter()).items() if s is not self.stream})
            self._check(name, "writes over what is read", x, others)
            self._writes[x] = self.stream, self.stream.seen[self.stream]
        return result

    def _last_write(self, x: int) -> Counter[Stream]:
        return Counter(dict([self._writes[x]] if x in self._writes else []))

    def _check(self, name: str, what: str, x: int, needed: Counter[Stream]) -> None:
        if not needed <= self.stream.seen:
            self.problems.append(f"{name} {what} on another stream")


def _memory(tensors: Any) -> Iterator[int]:
    return (x.untyped_storage().data_ptr() for x in tree_leaves(tensors) if isinstance(x, Tensor) and x.numel())


class StreamedMemory(FileMemory):
    """On files, with the lanes of GPUs."""

    _done, _capturing, _device = None, False, None
    begin, end = symmetric.GroupMemory.begin, symmetric.GroupMemory.end

    def __init__(self, group: dist.ProcessGroup, folder: Path) -> None:
        super().__init__(group, folder)
        self.pulls, self.pushes = symmetric._CudaLane(None), symmetric._CudaLane(None)


class Planted(Exception):
    pass


@contextmanager
def failing(fails: bool) -> Iterator[None]:
    """The tiles of the first stage raise, when pulls of later ones are under way."""
    real, steps = MergingForward.step, []

    def step(self: Any, *given: Any) -> None:
        steps.append(1)
        if fails and len(steps) == 2:
            raise Planted
        real(self, *given)

    with mock.patch.object(MergingForward, "step", step):
        yield


def races(rank: int, folder: str, method: str) -> list[str]:
    size = dist.get_world_size()
    group, found = mesh((size,), ("cp",)).get_group(), Races()
    torch.manual_seed(rank)
    cuda = {
        "Stream": Stream, "Event": Event, "current_stream": lambda device=None: found.stream,
        "set_stream": found.enter, "current_device": lambda: -1, "is_current_stream_capturing": bool,
    }  # fmt: skip
    options = AttentionSpec(ZigZag().spec(), Mask(causal=True).spec(), 1.0, kernel="reference", method=method)
    with (
        mock.patch.multiple(torch.cuda, **cuda),
        mock.patch.object(test_symmetric_memory, "FileMemory", StreamedMemory),
        double(group, folder),
    ):
        for rows in (16, 8, 32):
            q, k, v, dout = (torch.randn(1, 8, rows, 4) for _ in range(4))
            plan, scores = (
                make_plan(q, k, v, Call(Tensors(), rows * size, 2, "", options), group, frozenset()),
                Scores(1.0),
            )
            for fails in (False, True, False):
                with found, failing(fails and method == "ring"), suppress(Planted):
                    out, lse, *_ = plan.method.forward(q, k, v, scores, plan, group)
                    plan.method.backward(Backward(dout, q, k, v, out, lse, None, None, scores), plan, group)
                lanes = [s for s in found.caller.seen if s.seen[s] > found.caller.seen[s]]
                found.problems += [f"{rows} rows: a pass ends before its lanes"] * len(lanes)
    assert len(found.caller.seen) == (1 if method == "ulysses" else 3), "pulls and pushes were on lanes"
    return found.problems


@pytest.mark.parametrize(("cp_size", "method"), ((2, "ring"), (4, "ring"), (4, "ulysses"), (8, "ring")))
@pytest.mark.quick("2-ring", "4-ring")
def test_streams_wait_for_one_another(pool: Any, cp_size: int, method: str) -> None:
    """One, two and three stages, also after a pass that raised; Ulysses stays on the caller's stream."""
    with tempfile.TemporaryDirectory() as folder:
        report(pool(cp_size).run(races, folder, method))
