"""The memory formulas against what calls allocate, of every method and both transports.

On CPU ranks, with a kernel that allocates what FlashAttention does and computes nothing.
"""

from __future__ import annotations

import random
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from inside import (
    KERNELS,
    AttentionSpec,
    Backward,
    BackwardTile,
    Call,
    Capability,
    ExtraMemory,
    Kernel,
    Operand,
    Plan,
    Scores,
    Sizes,
    Tensors,
    extra_memory,
    inner,
    make_plan,
    make_schedule,
    path_of,
    room,
)
from ranks import mesh, on_ranks
from test_symmetric_memory import double
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from cp_mesh import Contiguous, Layout, Mask, Striped, ZigZag

combine = room("combine")
ulysses = room("ulysses")
Setup, memory, sizes_of = inner("predict.methods", "Setup", "memory", "sizes_of")
of_latents, LatentScores = inner("latent_passes", "_of_latents", "LatentScores")
without_rows = inner("op", "without_rows")
choose_head_chunks = inner("ring_loop", "choose_head_chunks")
symmetric = room("symmetric_memory")

LAYOUTS: dict[str, Layout] = {"zigzag": ZigZag(), "contiguous": Contiguous(), "striped": Striped()}


class Case(NamedTuple):
    """A call of ``local`` rows a rank; ``latent``: features of latents and rotary keys that it sends, or none."""

    method: str
    layout: str = "zigzag"
    heads: tuple[int, int] = (8, 4)
    degree: int = 0
    head_chunks: int = 1
    local: int = 128
    causal: bool = True
    latent: tuple[int, ...] = ()


class Live(TorchDispatchMode):
    """Bytes of tensors that were made while it is on and still are; and the most of them at any time."""

    def __init__(self) -> None:
        super().__init__()
        self._refs: dict[StorageWeakRef, int] = {}
        self._before: set[StorageWeakRef] = set()
        self.peak = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for x in tree_leaves((args, kwargs)):
            if isinstance(x, Tensor) and (ref := StorageWeakRef(x.untyped_storage())) not in self._refs:
                self._before.add(ref)
        result = func(*args, **(kwargs or {}))
        if func is torch.ops._c10d_functional.wait_tensor.default:
            time.sleep(0.01)  # gloo's thread gives back what it sent
        for x in tree_leaves(result):
            if isinstance(x, Tensor) and (ref := StorageWeakRef(x.untyped_storage())) not in self._before:
                self._refs[ref] = x.untyped_storage().nbytes()
        self._refs = {ref: size for ref, size in self._refs.items() if not ref.expired()}
        self.peak = max(self.peak, sum(self._refs.values()))
        return result


def forward_tile(q: Tensor, k: Tensor, v: Tensor, cover: Any, scores: Any) -> tuple[Tensor, Tensor]:
    return q.new_zeros((*q.shape[:3], v.shape[3])), q.new_zeros(q.shape[:3], dtype=torch.float32)


def backward_tile(t: BackwardTile) -> tuple[Tensor, Tensor, Tensor]:
    sums = [torch.zeros_like(t.q, dtype=torch.float32)]
    if t.q.shape[1] > t.k.shape[1]:
        sums += [torch.zeros_like(x, dtype=torch.float32) for x in (t.k, t.v)]
    dk, dv = (torch.zeros_like(x) if into is None else into for x, into in ((t.k, t.dk), (t.v, t.dv)))
    return torch.zeros_like(t.q), dk, dv


STAND_IN = Kernel(
    "stand_in",
    Capability(("cpu",), (torch.bfloat16,), covers=("full", "causal", "window")),
    forward_tile,
    backward_tile,
)


@contextmanager
def allocating_alone() -> Iterator[None]:
    """The kernel that computes nothing, and sums as those of Triton: with no memory of their own."""
    module = ModuleType("combine_triton")
    module.merge_pieces = lambda pieces, out, lse, sinks: (out.zero_(), lse.zero_())  # type: ignore[attr-defined]
    module.sum_pieces = lambda sums: [into.zero_() for _, into in sums]  # type: ignore[attr-defined]
    with (
        mock.patch.dict(KERNELS, stand_in=STAND_IN),
        mock.patch.dict(sys.modules, {path_of("combine_triton"): module}),
        mock.patch.object(combine, "fused", lambda *_: True),
    ):
        yield


def passes(plan: Plan, group: dist.ProcessGroup, inputs: Sequence[Tensor], scores: Scores) -> tuple[int, int]:
    """Most bytes beyond inputs and results, forward and backward."""
    q, k, v, dout = inputs
    with Live() as live:
        out, lse, *kept = plan.method.forward(q, k, v, scores, plan, group)
    forward, held = live.peak - out.nbytes - lse.nbytes, sum(x.untyped_storage().nbytes() for x in kept)
    rows = None
    if kept:
        (q, k, v), (rows, out, lse) = (without_rows(x, 2) for x in (q, k, v)), kept
    with Live() as live:
        grads = plan.method.backward(Backward(dout, q, k, v, out, lse, None, rows, scores), plan, group)
    return forward, held + live.peak - sum(x.nbytes for x in grads[:3])


def formula(plan: Plan, case: Case, inputs: Sequence[Tensor], degree: int, transport: str) -> ExtraMemory:
    """With as many ranks on a host as the degree says."""
    sizes = sizes_of(*inputs[:2], inputs[3], plan.settings)
    sizes = replace(sizes, latent_dim=sum(case.latent), latent_chunks=case.head_chunks)
    setup = Setup(
        plan.method, degree, sizes, plan.settings.head_chunks, plan.kernel, frozenset(), transport,
        transport, degree,
    )  # fmt: skip
    return memory(plan.schedule, setup)


def check(case: Case, folder: Path, transport: str) -> None:
    """The formula is what is allocated, within 2 %; symmetric memory to the byte."""
    size = dist.get_world_size()
    group = mesh((size,), ("cp",)).get_group()
    random.seed(0)
    layout, seq_len = LAYOUTS[case.layout], case.local * size
    inputs = [torch.zeros(1, n, case.local, 16, dtype=torch.bfloat16) for n in (*case.heads, case.heads[1])]
    inputs.append(torch.zeros_like(inputs[0]))
    degrees = {"hybrid": {"ulysses_degree": case.degree}}
    options = AttentionSpec(
        layout.spec(), Mask(causal=case.causal).spec(), 1.0, kernel="stand_in", method=case.method,
        head_chunks=case.head_chunks, keeps=True, **degrees.get(case.method, {}),
    )  # fmt: skip
    with (
        allocating_alone(),
        double(group, tempfile.mkdtemp(dir=folder)) if transport != "functional" else nothing(),
    ):
        call = Call(Tensors(), seq_len, 2, group.group_name, options)
        plan, scores = make_plan(*inputs[:3], call, group, frozenset()), Scores(1.0)
        if case.latent:
            inputs[1:3] = [torch.zeros(1, 1, case.local, n, dtype=torch.bfloat16) for n in case.latent]
            up = torch.zeros(case.heads[0], 32, sum(case.latent), dtype=torch.bfloat16)
            plan, scores = of_latents(plan, inputs[:3]), LatentScores(1.0, up=up, chunks=case.head_chunks)
        passes(plan, group, inputs, scores)  # symmetric memory is there from now on
        forward, backward = passes(plan, group, inputs, scores)
        taken = symmetric.symmetric_memory_bytes() if transport != "functional" else 0
        degree = case.degree or (size if case.method == "ulysses" else 1)
        told = formula(plan, case, inputs, degree, transport)
    alone = len(plan.schedule.local_tiles) == 1 and not any(stage.tiles for stage in plan.schedule.route.stages)
    assert told.backward == pytest.approx(backward, rel=0.02), case
    assert alone or told.forward == pytest.approx(forward, rel=0.02), case  # the only piece may be the result itself
    assert told.symmetric == taken, case


@contextmanager
def nothing() -> Iterator[None]:
    yield


RINGS = [
    Case("ring"),
    Case("ring", "contiguous", (8, 8), causal=False),
    Case("ring", head_chunks=2),
    Case("all_gather"),
    Case("ulysses"),
    Case("ulysses", heads=(8, 8), head_chunks=2),
    Case("ulysses", "contiguous", head_chunks=1, heads=(8, 2)),
    Case("hybrid", degree=2),
    Case("hybrid", heads=(8, 1), degree=2),
    Case("hybrid", "contiguous", (8, 2), degree=2, causal=False),
    Case("hybrid", "striped", (8, 8), degree=2, head_chunks=2),
    Case("ring", heads=(8, 8), latent=(32, 8)),
    Case("ring", "contiguous", (8, 8), local=512, causal=False, latent=(32, 8)),
    Case("ring", heads=(8, 8), head_chunks=2, latent=(32, 8)),
    Case("all_gather", heads=(8, 8), head_chunks=8, latent=(32, 8)),
    Case("ulysses", heads=(8, 8), head_chunks=2, latent=(32, 8)),
    Case("hybrid", "striped", (8, 8), degree=2, latent=(32, 8)),
]


@pytest.mark.parametrize("transport", ("functional", "symmetric_memory"))
@pytest.mark.quick("functional")
@on_ranks(4, timeout=120.0)
def test_formulas_are_what_is_allocated(transport: str, tmp_path: Path) -> None:
    for case in RINGS:
        check(case, tmp_path, transport)


@pytest.mark.full
@pytest.mark.parametrize("transport", ("functional", "symmetric_memory"))
@on_ranks(8, timeout=120.0)
def test_formulas_of_many_ranks(transport: str, tmp_path: Path) -> None:
    """Of more pieces than a sum holds at once."""
    for layout in LAYOUTS:
        check(Case("hybrid", layout, degree=2), tmp_path, transport)


GIB = 1 << 30


def worst_rank(heads: int, kv_heads: int, seq_len: int, cp_size: int, head_chunks: int, transport: str) -> ExtraMemory:
    sizes = Sizes(1, heads, kv_heads, 128, 128, 2, 2)
    ranks = [make_schedule(ZigZag(), Mask(), seq_len, cp_size, rank) for rank in range(cp_size)]
    return max((extra_memory(schedule, sizes, head_chunks, transport) for schedule in ranks), key=lambda m: m.peak)


def test_128k_of_32_kv_heads_on_8_ranks() -> None:
    """What was promised of 131,072 tokens: at most 2.5 GiB by itself, at most 1 GiB in eight chunks."""
    shape, schedule = torch.Size((1, 32, 131072 // 8, 128)), make_schedule(ZigZag(), Mask(), 131072, 8, 0)
    q = Operand(shape, torch.bfloat16, torch.device("cpu"))
    assert (chosen := choose_head_chunks(0, q, q, q, schedule)) == 4
    assert worst_rank(32, 32, 131072, 8, chosen, "symmetric_memory").peak <= 2.5 * GIB
    assert worst_rank(32, 32, 131072, 8, 8, "symmetric_memory").peak <= 1.0 * GIB
    alone = worst_rank(8, 8, 1024, 1, 1, "symmetric_memory")
    assert (alone.symmetric, alone.forward) == (0, 1024 * 8 * (128 * 2 + 4))


class Copied(TorchDispatchMode):
    """Bytes that copies write while it is on, and how many launches they and sums are."""

    OPS = ("copy_", "cat", "index_copy_", "index_select", "index")

    def __init__(self) -> None:
        super().__init__()
        self.nbytes = self.launches = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        self.launches += name in (*self.OPS, "clone", "sum")
        if name in self.OPS:
            self.nbytes += result.numel() * result.element_size()
        return result


@pytest.mark.parametrize("transport", ("functional", "symmetric_memory"))
@pytest.mark.parametrize("layout", LAYOUTS)
@on_ranks(4)
def test_ulysses_puts_rows_to_their_places_on_arrival(transport: str, layout: str, tmp_path: Path) -> None:
    """In any layout but contiguous.

    What goes there is written when it is sent, dout once more before a kernel reads it; what comes home is written when
    it is sent, whatever its order, and among the other heads. Ranks that pull rows write them once more; those of a
    collective are not counted. What went there is put to its places then.
    """
    head = 128 * 16 * 2
    there, home = (8 + 4 + 4 + 8) * head, (8 + 8 + 4 + 4) * head
    arrived = there * (layout != "contiguous") + (there + home) * (transport == "symmetric_memory")
    size = dist.get_world_size()
    group = mesh((size,), ("cp",)).get_group()
    inputs = [torch.zeros(1, n, 128, 16, dtype=torch.bfloat16) for n in (8, 4, 4, 8)]
    options = AttentionSpec(LAYOUTS[layout].spec(), Mask().spec(), 1.0, kernel="stand_in", method="ulysses", keeps=True)
    doubled = nothing() if transport == "functional" else double(group, tempfile.mkdtemp(dir=tmp_path))
    with allocating_alone(), doubled:
        plan = make_plan(*inputs[:3], Call(Tensors(), 128 * size, 2, "", options), group, frozenset())
        passes(plan, group, inputs, Scores(1.0))  # which makes orders of rows
        with Copied() as count:
            passes(plan, group, inputs, Scores(1.0))
    assert count.nbytes == there + 8 * head + 2 * home + arrived
