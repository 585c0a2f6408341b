"""The kernel of functions, by PyTorch's flex_attention: on the CPU its operators run uncompiled, in float64."""

from __future__ import annotations

import gc
import math
import os
import signal
import tempfile
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from importlib import import_module
from pathlib import Path
from shutil import which
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from cases import gap
from flex_uses import MASKS, SCORES
from inside import KERNELS, BackwardTile, Pairs, Reads, ScalarFunction, Scores, inner, name_of_captured, room, trace
from ranks import mesh, on_ranks
from torch._dynamo.utils import counters
from torch._inductor.codecache import FxGraphCache

from cp_mesh import Mask, ShardedSequence, Striped, UnsupportedError, ZigZag, flex_attention
from cp_mesh.flex import create_block_mask

compiling = room("compiling")
flex = room("kernel")
flex_blocks = room("blocks")
flex_programs = room("programs")
flex_reads = room("reads")
flex_tiles = room("tiles")
reference = room("kernels.reference")
Steps = inner("kernels.contract", "Steps")
FLEX = inner("kernel", "FLEX")
bounds_of = inner("bounds", "bounds_of")
Tile = inner("tiles", "Tile")

B, H, K, S, D = 2, 4, 2, 300, 8
ROWS = torch.arange(S)
IDS = torch.stack([ROWS // 37, ROWS // 50 - 1])
OF_MASK = {
    "all": Mask(causal=False),
    "prefix": Mask(prefix=40, length=250, window=(90, 0)),
    "documents": Mask(documents=IDS),
    "padding": Mask(causal=False, key_padding=ROWS % 3 > 0),
    "blocks": Mask(blocks=IDS, window=(120, 20)),
    "blocks in documents, padding": Mask(blocks=ROWS // 20, documents=IDS, key_padding=ROWS % 3 > 0),
}
POSITIONS = {
    "in any order": (ROWS.flip(0)[:200], (ROWS * 7 % S)[:170]),
    "two runs": (torch.cat([ROWS[10:110], ROWS[190:290]]), torch.cat([ROWS[:120], ROWS[150:200]])),
    "one run": (ROWS[3:203], ROWS[100:270:2]),
}
CASES = [
    *((score, "none", "all", "two runs") for score in SCORES if "causal" not in score),
    *(("tanh chain", mask, "documents", "one run") for mask in MASKS),
    *(("relative table", "none", mask, positions) for mask in OF_MASK for positions in POSITIONS),
]


def near(got: torch.Tensor, want: torch.Tensor) -> bool:
    return gap(got, want) <= 1e-13 * max(10.0, want.abs().max().item())


def scores_of(score: str, mask: str, q: torch.Tensor) -> Scores:
    of_score, of_mask = (table[name].tensors(B, H, S) for table, name in ((SCORES, score), (MASKS, mask)))
    score_mod, captured = trace("score_mod", SCORES[score].make(of_score), q)
    mask_mod, read = trace("mask_mod", MASKS[mask].make(of_mask), q)
    wanted = frozenset(name_of_captured(i) for i, x in enumerate(captured) if x.is_floating_point())
    return Scores(D**-0.5, score_mod=score_mod, mask_mod=mask_mod, captured=(*captured, *read), wanted=wanted)


@pytest.mark.parametrize(("score", "mask", "of_mask", "positions"), CASES)
@pytest.mark.quick("none-all-two runs")
def test_tiles_are_those_of_the_reference(score: str, mask: str, of_mask: str, positions: str) -> None:
    torch.manual_seed(0)
    q_pos, k_pos = POSITIONS[positions]
    q, k, v = (torch.randn(B, heads, len(at), D).double() for heads, at in ((H, q_pos), (K, k_pos), (K, k_pos)))
    scores = scores_of(score, mask, q)
    if "vectors in functions" in scores.features:
        pytest.skip("no function of scalars")
    steps = Steps.of(q_pos), Steps.of(k_pos)
    assert (None in steps) == (positions == "in any order")
    cover = Pairs(OF_MASK[of_mask], q_pos, k_pos, steps=steps)
    (out, lse), (want, want_lse) = (kernel._forward(q, k, v, cover, scores) for kernel in (flex, reference))
    assert near(out, want) and torch.equal(lse.isinf(), want_lse.isinf())
    assert near(lse.nan_to_num(neginf=0.0), want_lse.nan_to_num(neginf=0.0))
    # of other keys as well: a global lse, and a delta with a gradient of lse
    lse, delta = torch.logaddexp(want_lse, torch.randn_like(want_lse)), torch.randn_like(want_lse)
    tile = BackwardTile(torch.randn_like(want), q, k, v, None, lse, delta, cover, scores)
    (*grads, of_scores), (*wants, want_of_scores) = (kernel._backward(tile) for kernel in (flex, reference))
    assert all(map(near, grads, wants))
    for i, want in want_of_scores.items():
        assert near(of_scores[i], want)


@pytest.mark.parametrize("score", ["relative table", "pair bias", "one tensor twice", "through an integer map"])
def test_tiles_without_copies_of_gradients(score: str) -> None:
    with mock.patch.object(flex_reads, "SHARED", 0):
        test_tiles_are_those_of_the_reference(score, "none", "all", "two runs")


@pytest.mark.parametrize(
    ("num_elements", "num_depends", "chained", "copies"),
    [
        (1, 0, False, 4096),
        (0, 1, False, 4096),
        (1 << 30, 0, False, 2),
        (32 * 512, 1, False, 256),
        (32 * 16384, 1, False, 64),
        (32 * 16385, 1, False, 32),
        (32 << 20, 1, False, 2),
        (16 * 16, 2, True, 4096),
        (32 * 257, 2, False, 256),
        (1 << 17, 2, False, 32),
        ((1 << 17) + 1, 2, False, 0),
        ((1 << 17) + 1, 2, True, 16),
        (1 << 19, 2, True, 8),
        ((1 << 19) + 1, 2, True, 0),
    ],
)
def test_number_of_copies_of_gradients(num_elements: int, num_depends: int, chained: bool, copies: int) -> None:
    """A small tensor, which many pairs read at one element, has more; a large one that pairs read has none."""
    assert flex_reads._copies(num_elements, num_depends, chained) == copies


@pytest.mark.parametrize("num_elements", [300, 1 << 14, 1 << 16, 1 << 19, 1 << 22, 1 << 25])
@pytest.mark.parametrize("read_at", ["neither", "query", "key", "both"])
def test_pairs_that_read_one_element_take_turns(read_at: str, num_elements: int) -> None:
    """In a block of the backward they share copies about equally, and use all that they can."""
    index = {
        "neither": lambda i, j: 0,
        "query": lambda i, j: i,
        "key": lambda i, j: j,
        "both": lambda i, j: (i - j) * 0,
    }
    table, last = torch.zeros(num_elements), list[torch.Tensor]()
    score_mod, _ = trace("score_mod", lambda s, b, h, i, j: s + table[index[read_at](i, j)], torch.zeros(1))
    assert score_mod is not None
    reads = Reads.of(score_mod, S)
    copies = reads.reads[0].copies
    assert (copies == 0) == (read_at == "both" and num_elements > 1 << 17)
    if not copies:
        return

    class Turns(torch.fx.Interpreter):
        def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
            last.extend([args[1][-1].expand(128, 64)] if "apply" in str(target) else [])
            return super().call_function(target, args, kwargs)

    b, i, j = torch.tensor(0), torch.arange(128)[:, None], torch.arange(64)
    Turns(reads.graph).run(torch.zeros(128, 64), b, b, i, j, torch.zeros(1).expand(num_elements, copies))
    turns = last[0]
    of_elements = {"query": list(turns), "key": list(turns.T)}.get(read_at, [turns])
    for of_element in of_elements:
        counts = of_element.unique(return_counts=True)[1]
        assert len(counts) == min(copies, of_element.numel())
        assert counts.max() <= max(1, 2 * of_element.numel() / copies)
    of_warp = turns[:8, :8:2]  # as tensor cores lay out their results
    if read_at in ("neither", "both") and copies >= 64:
        assert of_warp.unique(return_counts=True)[1].max() <= 2


def test_what_has_copies_of_its_gradient() -> None:
    """Indices that depend on no pair do not compile, so most have them; not integers and masks that pairs read."""
    x, ids, number = torch.zeros(9), torch.arange(9), torch.tensor(2.0)

    def copies(name: str, function: Callable[..., torch.Tensor]) -> list[int]:
        made, _ = trace(name, function, torch.zeros(1))
        assert made is not None
        return [read.copies for read in Reads.of(made, 9).reads]

    assert copies("score_mod", lambda s, b, h, i, j: s + x[i - j] + ids[i - j] * 0.5 + number) == [4096, 0, 4096]
    assert copies("score_mod", lambda s, b, h, i, j: s + x[ids[i]] + x[h]) == [4096] * 3
    assert copies("mask_mod", lambda b, h, i, j: (x[i - j] > 0) & (ids[i] > 0)) == [0, 4096]


BYTES, SIGNED = (ROWS * 9).to(torch.uint8), (ROWS * 9).to(torch.int8)
OFFSET, TABLE = torch.tensor(3), torch.linspace(-1, 1, 700, dtype=torch.float64).sin()
UNUSUAL = {
    "a fraction in an index": lambda s, b, h, i, j: s + TABLE[(torch.where(i > j, (i - j) * 0.5, 1.5) * 2).long()],
    "a filled tensor in an index": lambda s, b, h, i, j: s + TABLE[torch.minimum(j, torch.full_like(i, 31))],
    "an index that is captured": lambda s, b, h, i, j: s + (j * TABLE[OFFSET]),
    "constants": lambda s, b, h, i, j: (
        s * torch.tensor(0.5, dtype=s.dtype) + torch.tensor([0.3, 2.0], dtype=s.dtype)[i % 2]
    ),
    "a constant in an index": lambda s, b, h, i, j: s + TABLE[i + torch.tensor(3)] * TABLE[torch.as_tensor(j)],
    "multiples in an index": lambda s, b, h, i, j: s + TABLE[torch.rsub(i, 200, alpha=2)] * TABLE[j.add(3, alpha=5)],
    "a number that wraps beside bytes": lambda s, b, h, i, j: (
        s + TABLE[(BYTES[i] > -3).long()] + TABLE[(SIGNED[j] > -3).long()]
    ),
    "bytes that wrap": lambda s, b, h, i, j: s + TABLE[(BYTES[i] - 250).long() + ((BYTES[i] + 100) // 8).long() * 2],
    "signed bytes": lambda s, b, h, i, j: s + TABLE[(SIGNED[i] * 20 + 1).long()],
    "limits of two kinds": lambda s, b, h, i, j: s + TABLE[(i - j).clamp(0, 7.5).long()],
    "no tensor for a limit": lambda s, b, h, i, j: s + TABLE[torch.nn.functional.hardtanh(i - j, 3, 5) + i],
    "an index of the score": lambda s, b, h, i, j: s + TABLE[(s.tanh() * 8).long()],
    "detached": lambda s, b, h, i, j: s + TABLE[i + j].detach() * TABLE[j],
    "compared alone": lambda s, b, h, i, j: torch.where(TABLE[j] > 0, s, s * 2),
    "of what is read alone, detached": lambda s, b, h, i, j: TABLE[j].detach(),
}


@pytest.mark.parametrize("name", UNUSUAL)
def test_unusual_functions(name: str) -> None:
    torch.manual_seed(0)
    q, k, v = (torch.randn(B, heads, 64, D).double() for heads in (H, K, K))
    score_mod, captured = trace("score_mod", UNUSUAL[name], q)
    wanted = frozenset(name_of_captured(i) for i, x in enumerate(captured) if x.is_floating_point())
    scores, cover = Scores(0.5, score_mod=score_mod, captured=captured, wanted=wanted), Pairs(Mask(), *[ROWS[:64]] * 2)
    (out, lse), (want, want_lse) = (kernel._forward(q, k, v, cover, scores) for kernel in (flex, reference))
    assert near(out, want) and near(lse, want_lse)
    tile = BackwardTile(torch.randn_like(want), q, k, v, None, lse, torch.randn_like(lse), cover, scores)
    (*grads, of_scores), (*wants, want_of_scores) = (kernel._backward(tile) for kernel in (flex, reference))
    assert all(map(near, grads, wants)) and wanted
    assert all(near(of_scores[i], x) for i, x in want_of_scores.items())


def check_tables(cover: Pairs, scores: Scores) -> tuple[int, int]:
    """Blocks that are listed, and those that are not masked, are those of the mask; returns their first dims."""
    num_q, num_k = len(cover.q_pos), len(cover.k_pos)
    seen = cover.allowed(torch.arange(num_q), torch.arange(num_k))[:, None].expand(B, H, -1, -1)
    b, h = (torch.arange(n) + first for n, first in ((B, scores.first_batch), (H, scores.first_head)))
    if scores.mask_mod is not None:
        seen = seen & scores.mask_mod.of_pairs(None, (b, h, cover.q_pos, cover.k_pos), scores.captured)
    parts = [x.split(flex_blocks.BLOCK, 3) for x in seen.split(flex_blocks.BLOCK, 2)]
    blocks = flex_blocks.blocks_of(Tile(cover, scores, torch.float64), (B, H, num_q, num_k))
    listed = blocks.to_dense().bool()
    of_full = blocks.full_kv_num_blocks, blocks.full_kv_indices
    whole = blocks.from_kv_blocks(*of_full, BLOCK_SIZE=blocks.BLOCK_SIZE).to_dense().bool()
    of_rows = blocks.kv_num_blocks, blocks.kv_indices, *of_full
    expected = blocks.from_kv_blocks(*of_rows, BLOCK_SIZE=blocks.BLOCK_SIZE, seq_lengths=(num_q, num_k)).as_tuple()[:-1]
    for x, want in zip(blocks.as_tuple()[:-1], expected, strict=True):
        if isinstance(x, torch.Tensor):
            assert torch.equal(x, want) and x.dtype == want.dtype and x.is_contiguous()
        else:
            assert x == want
    for row, of_row in enumerate(parts):
        for column, x in enumerate(of_row):
            assert torch.equal(listed[:, :, row, column].expand(B, H), x.any(-1).any(-1))
            is_whole = x.all(-1).all(-1) & (x.shape[2:] == (flex_blocks.BLOCK, flex_blocks.BLOCK))
            assert torch.equal(whole[:, :, row, column].expand(B, H), is_whole)
    return tuple(listed.shape[:2])


@pytest.mark.parametrize("of_mask", OF_MASK)
def test_tables_of_blocks_are_those_of_the_mask(of_mask: str) -> None:
    check_tables(Pairs(OF_MASK[of_mask], ROWS, ROWS.flip(0)), Scores(1.0))


def test_tables_of_blocks_are_of_these_heads_rows_and_tensors() -> None:
    """Calls that share a tile: chunks of heads, batch rows of other ranks, tensors at one address, and written ones."""
    cover = Pairs(Mask(causal=False), ROWS, ROWS)
    allow = (ROWS[:, None] // 128 == 0) & (ROWS < 128)
    allow[:, 0] = True

    def tables(mask_mod: Callable[..., torch.Tensor], **first: int) -> tuple[int, int]:
        function, captured = trace("mask_mod", mask_mod, torch.zeros(1))
        return check_tables(cover, Scores(1.0, mask_mod=function, captured=captured, **first))

    for first in (0, 2):
        assert tables(lambda b, h, i, j: (h < 2) | (i // 128 == j // 128), first_head=first) == (1, H)
        assert tables(lambda b, h, i, j: (b < 1) | (i // 128 == j // 128), first_batch=first) == (B, 1)
    for x in (allow, allow.t()):
        assert tables(lambda b, h, i, j, x=x: x[i, j]) == (1, 1)
    allow[:, 128:] = True
    tables(lambda b, h, i, j: allow[i, j])


@pytest.mark.parametrize("reads_heads", [False, True])
def test_chunks_of_heads_share_tables_of_blocks(reads_heads: bool) -> None:
    """Unless the mask is one of heads, however many heads a chunk has."""
    made, cover, real = [], Pairs(Mask(), ROWS, ROWS), flex_blocks._made
    mask_mod, read = trace("mask_mod", lambda b, h, i, j: (h if reads_heads else i) + j < S, torch.zeros(1))

    def make(*args: Any) -> Any:
        made.append(args)
        return real(*args)

    with mock.patch.object(flex_blocks, "_made", make):
        for first, heads in ((0, H), (H, H), (2 * H, 1)):
            scores = Scores(1.0, mask_mod=mask_mod, captured=read, first_head=first)
            flex_blocks.blocks_of(Tile(cover, scores, torch.float64), (B, heads, S, S))
    assert len(made) == (3 if reads_heads else 1)


def test_tables_of_blocks_keep_no_copies_of_what_is_read() -> None:
    """A plan keeps its tables; a tile has copies of captured tensors, with pads."""
    cover, scores = Pairs(Mask(), ROWS, ROWS), scores_of("relative table", "causal", torch.zeros(1).double())
    with mock.patch.object(flex_programs, "_programs", type(flex_programs._programs)()):
        tile = Tile(cover, scores, torch.float64)
        blocks = flex_blocks.blocks_of(tile, (B, H, S, S))
    of_tile = weakref.ref(tile)
    del tile
    gc.collect()
    assert blocks.kv_num_blocks.any() and of_tile() is None


def test_handles_are_equal_on_all_devices() -> None:
    """Each rank of a host has a device of its own, which is part of a constant; a graph is that of its device."""
    found = []
    for device in (torch.device("cuda", 0), torch.device("cuda", 1), torch.device("cpu")):
        graph = torch.fx.Graph()
        graph.output(graph.call_function(torch.ops.aten.scalar_tensor.default, (0.0,), {"device": device}))
        found.append(ScalarFunction.of("score_mod", graph, ()))
        assert f"index={device.index}" in found[-1].graph.code or device.type == "cpu"
    first, second, of_cpu = (function.handle for function in found)
    assert first == second != of_cpu


def on_the_cpu() -> mock._patch_dict:
    of_cpu = replace(FLEX.capability, devices=("cpu",), dtypes=(torch.float64,), compute_capability=(0, 0))
    of_cpu = replace(of_cpu, min_head_dim=1, lacking=lambda: None)
    return mock.patch.dict(KERNELS, flex=replace(FLEX, capability=of_cpu))


def ring(rank: int, layout: ZigZag | Striped, method: str) -> float:
    """The largest gap between the two kernels, of out and of gradients."""
    found, size = [], 256
    of_mask = MASKS["causal or of one image"].tensors(B, H, size)
    at = layout.positions(size, 2, mesh((2,), ("cp",)).get_local_rank())
    with on_the_cpu():
        for kernel in ("flex", "reference"):
            torch.manual_seed(0)
            whole = (torch.randn(B, heads, size, D).double() for heads in (H, K, K))
            q, k, v = (x[:, :, at].clone().requires_grad_() for x in whole)
            tensors = SCORES["one tensor twice"].tensors(B, H, size)
            x = tensors["x"].requires_grad_()
            mask = create_block_mask(MASKS["causal or of one image"].make(of_mask), B, H, size, size)
            score_mod = SCORES["one tensor twice"].make(tensors)
            options = {
                "mesh": mesh((2,), ("cp",)),
                "layout": layout,
                "method": method,
                "kernel": kernel,
                "enable_gqa": True,
            }
            out = flex_attention(q, k, v, score_mod, mask, **options)
            out.square().sum().backward()
            found.append([out, q.grad, k.grad, v.grad, x.grad])
    return max(gap(a, b) for a, b in zip(*found, strict=True))


@pytest.mark.parametrize("layout", [ZigZag(), Striped()], ids=str)
@pytest.mark.parametrize("method", ["ring", "ulysses"])
def test_it_serves_every_method(pool, layout: ZigZag | Striped, method: str) -> None:
    assert max(pool(2).run(ring, layout, method)) <= 1e-12


def test_tables_of_inference_tensors_are_made_again() -> None:
    """Such tensors do not tell of writes."""
    cover = Pairs(Mask(causal=False), ROWS, ROWS)
    with torch.inference_mode():
        allow = torch.ones(S, dtype=torch.bool)
        function, captured = trace("mask_mod", lambda b, h, i, j: allow[j + 0 * 3], torch.zeros(1))
        for _ in range(2):
            check_tables(cover, Scores(1.0, mask_mod=function, captured=captured))
            allow[:200] = False


def inferred(rank: int) -> float:
    """A forward in inference mode, of the kernel and of the reference."""
    found = []
    with on_the_cpu(), torch.inference_mode():
        q, bias, ids = (torch.arange(n).double().sin() for n in (B * H * 8 * D, 16, 16))
        q = q.view(B, H, 8, D)
        for kernel in ("flex", "reference"):
            mask = create_block_mask(lambda b, h, i, j: ids[i] * ids[j] >= 0, None, None, 16, 16)
            score_mod = lambda score, b, h, i, j: score + bias[i - j] * bias[j]  # noqa: E731
            found.append(flex_attention(q, q, q, score_mod, mask, mesh=mesh((2,), ("cp",)), kernel=kernel))
    return gap(*found)


def test_inference_mode(pool) -> None:
    assert max(pool(2).run(inferred)) <= 1e-12


@on_ranks(2)
def test_functions_of_vectors_are_refused() -> None:
    q, u = torch.randn(1, 2, 4, 4).double(), torch.randn(8, 3).double()
    with on_the_cpu(), pytest.raises(UnsupportedError, match="kernel='flex' lacks scores with vectors in functions"):
        score_mod = lambda score, b, h, i, j: score + (u[i] * u[j]).sum()  # noqa: E731
        flex_attention(q, q, q, score_mod, mesh=mesh((2,), ("cp",)), kernel="flex")


def test_a_shape_is_compiled_once_for_all_tiles() -> None:
    """What differs between sources and ranks is data: the keys of programs are equal."""
    torch.manual_seed(0)
    q = torch.randn(B, H, 64, D).double()
    scores, made = scores_of("relative table", "causal", q), set()
    for begin in (0, 64, 128):
        at = ROWS[begin : begin + 64]
        with mock.patch.object(flex_programs, "_programs", type(flex_programs._programs)()) as programs:
            for mask in (Mask(documents=IDS), Mask(documents=IDS + 1, window=(begin, 0))):
                flex._forward(q, q[:, :K], q[:, :K], Pairs(mask, at, at, steps=(Steps.of(at),) * 2), scores)
            assert len(programs) == 2, "one for the tile, one for its blocks"
            made |= set(programs)
    assert len(made) == 2


@pytest.mark.skipif(which("g++") is None, reason="Inductor compiles for CPUs by g++")
@pytest.mark.full
def test_one_tensor_given_twice_is_compiled_as_two(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As keys that are the values too, in a first call; later ones of the same shape have others."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    x, y = torch.arange(4.0), torch.arange(4.0) + 1
    compiled = flex_programs.compiled_of(lambda x, y: x - 2 * y, (x, x))
    assert torch.equal(compiled(x, x), -x) and torch.equal(compiled(x, y), x - 2 * y)


def test_each_device_has_a_lock_of_its_own() -> None:
    """What Inductor keeps on disk is of one device."""
    numbers = list[int | None]()

    @contextmanager
    def one_rank_compiles(number: int | None = None) -> Iterator[None]:
        numbers.append(number)
        yield

    x = SimpleNamespace(shape=(), stride=tuple, dtype=torch.float32, device=torch.device("cuda", 3))
    with (
        mock.patch.object(flex_programs, "one_rank_compiles", one_rank_compiles),
        mock.patch.object(flex_programs, "_programs", type(flex_programs._programs)()),
        mock.patch.object(flex_programs, "with_fewer_stages", lambda *_: len),
        mock.patch.object(torch.cuda, "set_device"),
    ):
        assert flex_programs.program("key", [x], lambda options: len) is len  # type: ignore[list-item]
    assert numbers == [3]


def test_ranks_of_a_device_compile_one_after_the_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiling, "PATIENCE", 0.5)

    def seconds(*number: int) -> float:
        began = time.monotonic()
        with compiling.one_rank_compiles(*number):
            return time.monotonic() - began

    with compiling.one_rank_compiles(7), compiling.one_rank_compiles():
        assert seconds(7) >= 0.5 and seconds() >= 0.5
        assert seconds(8) < 0.5


PLANTED: dict[str, tuple[str, Callable[[Path], Any]]] = {
    "a pipe for the folder": ("", os.mkfifo),
    "a file for the folder": ("", Path.touch),
    "a link for the folder": ("", lambda folder: folder.symlink_to(folder.parent)),
    "a folder of all": ("", lambda folder: os.mkdir(folder) or folder.chmod(0o777)),
    "another user's folder": ("", lambda folder: folder.mkdir(0o700)),
    "a link for the file": ("compiling.lock", lambda file: file.symlink_to(file.parent / "elsewhere")),
}


@pytest.mark.parametrize("planted", PLANTED)
def test_what_others_left_for_the_lock_is_not_opened(
    planted: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The temporary folder is everybody's: ranks then compile without a lock, and say so, and do not wait."""
    user, (file, plant) = os.geteuid() + (planted == "another user's folder"), PLANTED[planted]
    folder = tmp_path / f"cp_mesh_{user}"
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(os, "geteuid", lambda: user)
    if file:
        folder.mkdir(0o700)
    plant(folder / file)
    there = sorted(tmp_path.rglob("*"))
    before = signal.signal(signal.SIGALRM, lambda *_: pytest.fail("it waits"))
    signal.alarm(20)
    try:
        with pytest.warns(UserWarning, match="cp_mesh: ranks compile without waiting for each other: "):
            with compiling.one_rank_compiles(), compiling.one_rank_compiles():
                pass
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)
    assert sorted(tmp_path.rglob("*")) == there


def test_the_folder_of_the_lock_is_of_this_user_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    before = os.umask(0)
    try:
        with compiling.one_rank_compiles(), compiling.one_rank_compiles(3):
            (folder,) = tmp_path.iterdir()
    finally:
        os.umask(before)
    assert folder.stat().st_mode & 0o777 == 0o700
    assert {path.name: path.stat().st_mode & 0o777 for path in folder.iterdir()} == {
        "compiling.lock": 0o600,
        "compiling_3.lock": 0o600,
    }


@pytest.mark.skipif(which("g++") is None, reason="Inductor compiles for CPUs by g++")
@pytest.mark.full
def test_programs_are_found_on_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As another process would find them; not those of another number."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    x, y = torch.arange(8.0), torch.arange(4.0)

    def function(number: float, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return x[:, None] * number + y

    for number, found in ((2.0, "miss"), (2.0, "hit"), (3.0, "miss"), (3.0, "hit")):
        counters.clear()
        compiled = flex_programs.compiled_of(partial(function, number), (x, y))
        assert torch.equal(compiled(x, y), function(number, x, y))
        assert {key for key in counters["inductor"] if "fxgraph" in key} == {f"fxgraph_cache_{found}"}


def key_on_disk(function: Callable[..., Any], inputs: Sequence[torch.Tensor]) -> str:
    """By which Inductor looks for a program, before it compiles one."""
    found = list[str]()

    class Found(Exception):
        pass

    def prepare_key(*args: Any, **options: Any) -> Any:
        key, about = exact(*args, **options)
        assert key is not None, about  # why Inductor keeps none
        found.append(key[0])
        raise Found

    exact = FxGraphCache.prepare_key
    with mock.patch.object(FxGraphCache, "prepare_key", prepare_key), pytest.raises(Found):
        flex_programs.compiled_of(function, inputs)
    return found[0]


@pytest.mark.full
def test_each_function_of_users_is_another_program_on_disk() -> None:
    torch.manual_seed(0)
    q, cover, keys = torch.randn(B, H, 64, D), Pairs(Mask(), *[ROWS[:64]] * 2), list[str]()

    def program(key: Any, inputs: Sequence[torch.Tensor], make: Callable[..., Any], *stages: Any) -> Callable[..., Any]:
        if key[0] != "blocks":
            keys.append(key_on_disk(make({}), inputs))
        return make({})

    def look(score_mod: Callable[..., torch.Tensor]) -> list[str]:
        keys.clear()
        handle, captured = trace("score_mod", score_mod, q)
        scores = Scores(0.5, score_mod=handle, captured=captured)
        flex._forward(q, q[:, :K], q[:, :K], cover, scores)
        lse = torch.randn_like(q[..., 0])
        flex._backward(BackwardTile(q, q, q[:, :K], q[:, :K], None, lse, lse, cover, scores))
        return [*keys]

    table = torch.randn(H, S)
    functions = [lambda score, b, h, i, j, cap=cap: cap * torch.tanh(score / cap) for cap in (20.0, 30.0)]
    functions.append(lambda score, b, h, i, j: score + table[h, i - j])
    with mock.patch.object(flex, "program", program):
        found = [look(function) for function in functions]
        assert [look(function) for function in functions] == found
    rounded = {x: y for x, y in flex._OPTIONS.items() if x != "RESULTS_IN_FLOAT32"}
    with mock.patch.object(flex, "program", program), mock.patch.object(flex, "_OPTIONS", rounded):
        found += [look(function) for function in functions]
    assert len({key for of_function in found for key in of_function}) == 12


def test_positions_are_computed_in_the_forward_and_read_in_the_backward() -> None:
    """Here the two differ, which tells them apart."""
    at, q = ROWS[:64], torch.randn(B, H, 64, D).double()
    table = torch.arange(200.0).double().requires_grad_()
    score_mod, captured = trace("score_mod", lambda score, b, h, i, j: table[i], q)
    scores = Scores(0.5, score_mod=score_mod, captured=captured, wanted=frozenset({name_of_captured(0)}))
    cover, found = Pairs(Mask(), at, at, steps=(Steps.of(at + 100),) * 2), list[float]()
    for computed in (True, False):
        tile = Tile(cover, scores, torch.float64, computed=computed)
        of_pair = torch.zeros(()).double(), *torch.tensor([0, 0, 7, 3], dtype=torch.int32)
        found.append(float(tile.score(*of_pair, *tile.of_score)))
        grad = tile.joint(torch.float64)(*of_pair, torch.ones(()).double(), *tile.of_score)[-1]
        assert grad.sum(-1).nonzero().tolist() == [[found[-1]]]
    assert found == [107, 7]


def test_forward_and_backward_say_which() -> None:
    q = torch.randn(B, H, 64, D).double()
    scores, cover, made = scores_of("relative table", "causal", q), Pairs(Mask(), *[ROWS[:64]] * 2), list[bool]()

    def tile(*args: Any, computed: bool = True) -> Tile:
        made.append(computed)
        return Tile(*args, computed=computed)

    with mock.patch.object(flex, "Tile", tile):
        out, lse = flex._forward(q, q, q, cover, scores)
        flex._backward(BackwardTile(out, q, q, q, None, lse, lse, cover, scores))
    assert made == [True, False]


@pytest.mark.parametrize(
    ("score", "learned", "stages"),
    [
        (None, True, None),
        (lambda s, b, h, i, j: s * 2, True, None),
        (lambda s, b, h, i, j: s + TABLE[i] * h, True, None),
        (lambda s, b, h, i, j: s + TABLE[i - j], True, None),
        (lambda s, b, h, i, j: s + TABLE[IDS[0, i] - IDS[1, j]], True, 1),
        (lambda s, b, h, i, j: s + TABLE[IDS[0, i] - IDS[1, j]], False, 1),
        (lambda s, b, h, i, j: s + TABLE[IDS[0, i]], False, None),
    ],
)
@pytest.mark.parametrize("is_tuned", [True, False])
def test_stages_are_of_what_is_read(
    score: Callable[..., torch.Tensor] | None, learned: bool, stages: int | None, is_tuned: bool
) -> None:
    """They reach PyTorch's operators, and are part of a program's key."""
    operators = import_module("torch._higher_order_ops.flex_attention")
    q, found, keys = torch.randn(B, H, 64, D).double(), dict[str, Any](), list[tuple[Any, ...]]()
    score_mod, captured = trace("score_mod", score, q)
    wanted = frozenset(name_of_captured(i) for i, x in enumerate(captured) if learned and x.is_floating_point())
    scores, cover = Scores(0.5, score_mod=score_mod, captured=captured, wanted=wanted), Pairs(Mask(), *[ROWS[:64]] * 2)

    def noting(name: str, at: int) -> mock._patch[Any]:
        whole = getattr(operators, name)
        return mock.patch.object(operators, name, lambda *args: (found.setdefault(name, args[at]), whole(*args))[1])

    def program(
        key: tuple[Any, ...], inputs: tuple[torch.Tensor, ...], make: Callable[..., Any], num_stages: int | None
    ) -> Callable[..., Any]:
        keys.append(key)
        assert num_stages == (stages if is_tuned else None)
        return make({})

    with (
        mock.patch.object(flex, "is_tuned", lambda q, v: is_tuned),
        mock.patch.object(flex, "program", program),
        noting("flex_attention", 6),
        noting("flex_attention_backward", 11),
    ):
        out, lse = flex._forward(q, q, q, cover, scores)
        flex._backward(BackwardTile(out, q, q, q, None, lse, lse, cover, scores))
    for options, key in zip(found.values(), keys, strict=True):
        assert options == flex._OPTIONS | ({"num_stages": stages} if is_tuned and stages else {})
        assert set(options.items()) <= set(key)


@pytest.mark.parametrize(
    ("chosen", "fit", "tried"),
    [(None, 3, [None]), (None, 1, [None, 2, 1]), (None, 0, [None, 2, 1]), (2, 1, [2, 1]), (1, 1, [1]), (1, 0, [1])],
)
def test_fewer_stages_are_compiled_where_memory_is_too_small(chosen: int | None, fit: int, tried: list[Any]) -> None:
    found = []

    def compiled(options: dict[str, int]) -> Callable[..., Any]:
        found.append(options.get("num_stages", chosen))
        if (found[-1] or 3) > fit:
            raise RuntimeError("out of resource: shared memory")
        return len

    with nullcontext() if fit else pytest.raises(RuntimeError, match="out of resource"):
        assert flex_programs.with_fewer_stages(compiled, chosen) is len
    assert found == tried


def test_other_errors_of_compilers_are_raised_at_once() -> None:
    def compiled(options: dict[str, int]) -> Callable[..., Any]:
        assert not options
        raise ValueError("something else")

    with pytest.raises(ValueError, match="something else"):
        flex_programs.with_fewer_stages(compiled, None)


@pytest.mark.parametrize(
    ("capability", "dims", "dtype", "tuned"),
    [
        ((9, 0), (128, 128), torch.bfloat16, True),
        ((9, 0), (128, 128), torch.float16, True),
        ((10, 0), (128, 128), torch.bfloat16, False),
        ((9, 0), (64, 64), torch.bfloat16, False),
        ((9, 0), (128, 64), torch.bfloat16, False),
        ((9, 0), (128, 128), torch.float32, False),
    ],
)
def test_what_stages_were_measured_for(
    capability: tuple[int, int], dims: tuple[int, int], dtype: torch.dtype, tuned: bool
) -> None:
    q, v = (SimpleNamespace(is_cuda=True, device=0, shape=(1, 1, 1, dim), dtype=dtype) for dim in dims)
    with mock.patch.object(torch.cuda, "get_device_capability", lambda device: capability):
        assert flex.is_tuned(q, v) == tuned
        assert not flex.is_tuned(torch.zeros(1, 1, 1, 128).bfloat16(), torch.zeros(1, 1, 1, 128).bfloat16())


def test_lse_is_given_to_the_backward_as_its_template_reads_it() -> None:
    torch.manual_seed(0)
    q, found = torch.randn(B, H, 64, D).double(), list[torch.Tensor]()

    def program(
        key: tuple[Any, ...], inputs: tuple[torch.Tensor, ...], make: Callable[..., Any], num_stages: int | None
    ) -> Callable[..., Any]:
        found.append(inputs[3])
        return make({})

    lse, scores = torch.randn(B, 64, H).double().mT, scores_of("relative table", "causal", q)
    cover = Pairs(Mask(), *[ROWS[:64]] * 2)
    tile = BackwardTile(torch.randn_like(q), q, q[:, :K], q[:, :K], None, lse, torch.randn_like(lse), cover, scores)
    with mock.patch.object(flex, "program", program):
        flex._backward(tile)
    assert found[0].is_contiguous() and torch.equal(found[0], lse)


class Indices(torch.fx.Interpreter):
    """Runs the graph of `Reads`, and notes the indices at which tensors are read."""

    def __init__(self, reads: Reads) -> None:
        super().__init__(reads.graph)
        self.found: list[list[int]] = []

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        if "apply" in str(target):
            self.found.append([int(x) for x in args[1]])
        return super().call_function(target, args, kwargs)


@pytest.mark.parametrize("most_copied", [1 << 24, 0])
def test_indices_count_from_the_end_and_no_further(most_copied: int) -> None:
    """PyTorch's templates read memory before and after a tensor."""
    table, offset = torch.arange(8.0), torch.tensor([3, 100])
    score_mod, captured = trace("score_mod", lambda s, b, h, i, j: s + table[i - j] + offset[i + 0 * j], torch.zeros(1))
    assert score_mod is not None
    with mock.patch.multiple(flex_reads, MOST_COPIED=most_copied, SHARED=0):
        reads = Reads.of(score_mod, S)
    assert [read.pads for read in reads.reads] == [((0, int(most_copied > 0)),), ((0, 0),)]
    tensors = reads.of_captured(captured)

    def at(i: int, j: int) -> tuple[float, list[list[int]]]:
        running = Indices(reads)
        result = running.run(torch.tensor(0.5), *(torch.tensor(n, dtype=torch.int32) for n in (0, 0, i, j)), *tensors)
        return result.item(), running.found

    value, found = at(1, 2)
    assert value == 0.5 + 7 + 100 and found == [[7], [1]], "-1 is the last"
    value, found = at(0, 0)
    assert value == 0.5 + 3 and found == [[0], [0]]
    for i, j in ((1, 10), (0, 9), (8, 8)):  # beyond the table, and beyond the integers
        value, found = at(i, j)
        assert math.isnan(value) and all(0 <= n < len(x) for (n,), x in zip(found, tensors, strict=True))


def test_pads_are_of_the_tensor_and_so_are_their_gradients() -> None:
    x = torch.randn(3, 4, dtype=torch.float64, requires_grad=True)
    for copies in (0, 2):
        read = flex_reads.Read(0, True, False, copies, ((2, 0), (1, 1)))
        rows, columns = torch.tensor([1, 2, 0, 1, 2]), torch.tensor([3, 0, 1, 2, 3])
        want = x[rows][:, columns]
        got = read.of(x)
        assert (got.shape[2:] == (copies,)) if copies else got.ndim == 2
        assert got[:, -1].isnan().all() and torch.equal(got[:, :-1, 0] if copies else got[:, :-1], want)
        weights = torch.randn(got.shape, dtype=torch.float64)
        of_want = (weights.sum(-1) if copies else weights)[:, :-1]
        assert torch.allclose(read.home(weights.clone()), torch.autograd.grad(want, x, of_want)[0], atol=1e-14)


@pytest.mark.parametrize(
    ("score", "after"),
    [
        (lambda s, b, h, i, j: torch.where(EIGHT[i - j] > 0, s, s * 2), 0),
        (lambda s, b, h, i, j: s * (EIGHT[i - j] == 0) + EIGHT[i - j], 1),
        (lambda s, b, h, i, j: s + EIGHT[(WIDE[i] * 3 + EIGHT[i - j]).long() % 8], 0),
        (lambda s, b, h, i, j: s + EIGHT[i - j].nan_to_num(), 0),
        (lambda s, b, h, i, j: s + EIGHT[i - j].clamp(-1, 1).tanh(), 0),
        (lambda s, b, h, i, j: ((s + EIGHT[i - j].half().detach()) / 20).tanh() * 20, 0),
        (lambda s, b, h, i, j: torch.maximum(s, EIGHT[i - j]).sigmoid(), 0),
        (lambda s, b, h, i, j: (s - torch.where(i > j, -EIGHT[i - j].half().detach(), s)) / 3 * 2, 1),
        (lambda s, b, h, i, j: s + EIGHT[i - j] * WIDE[h], 0),
        (lambda s, b, h, i, j: s * EIGHT[i - j], 0),
    ],
)
def test_nothing_makes_a_number_of_what_is_beyond(score: Callable[..., torch.Tensor], after: int) -> None:
    """NaN beyond a tensor tells where the score is a sum with it, and nowhere else."""
    score_mod, captured = trace("score_mod", score, torch.zeros(1))
    assert score_mod is not None
    reads = Reads.of(score_mod, 15)
    assert sum(read.pads[0][1] for read in reads.reads) == after
    for i, beyond in ((7, False), (8, True)):
        scalars = (torch.tensor(n, dtype=torch.int32) for n in (0, 0, i, 0))
        result = torch.fx.Interpreter(reads.graph).run(torch.tensor(0.5), *scalars, *reads.of_captured(captured))
        assert result.isnan().item() == beyond


@pytest.mark.parametrize("form", ["sum", "product"])
def test_what_is_hidden_may_be_beyond_a_tensor(form: str) -> None:
    """A table as long as the window: gradients are those of a longer one."""
    torch.manual_seed(0)
    long, scale = torch.randn(S).double(), torch.randn(H).double()
    q, k, v, dout = (torch.randn(B, heads, 64, D).double() for heads in (H, K, K, H))
    cover, found = Pairs(Mask(window=(15, 0)), *[ROWS[:64]] * 2), []
    for table in (long[:16], long):

        def score(s: Any, b: Any, h: Any, i: Any, j: Any, table: torch.Tensor = table) -> torch.Tensor:
            return s * table[i - j] * scale[h] if form == "product" else s * scale[h] + table[i - j]

        score_mod, captured = trace("score_mod", score, q)
        wanted = frozenset(map(name_of_captured, range(2)))
        scores = Scores(0.5, score_mod=score_mod, captured=captured, wanted=wanted)
        out, lse = flex._forward(q, k, v, cover, scores)
        *grads, of_scores = flex._backward(BackwardTile(dout, q, k, v, None, lse, torch.zeros_like(lse), cover, scores))
        by_size = sorted(of_scores.values(), key=len)
        found.append([out, *grads, by_size[0], by_size[1][:16]])
    assert all(near(x, y) and x.isfinite().all() and x.any() for x, y in zip(*found, strict=True))


def test_masks_count_from_the_end_too() -> None:
    seen = torch.tensor([True, False, False])
    mask_mod, captured = trace("mask_mod", lambda b, h, i, j: seen[i - j], torch.zeros(1))
    assert mask_mod is not None
    reads = Reads.of(mask_mod, S)
    running = Indices(reads)
    tensors = reads.of_captured(captured)
    assert not running.run(*(torch.tensor(n, dtype=torch.int32) for n in (0, 0, 0, 2)), *tensors)
    assert running.found == [[1]]
    assert tensors[0].data_ptr() == seen.data_ptr(), "by which its tables of blocks are kept"


@pytest.mark.parametrize(
    ("score", "of_pairs", "chained"),
    [
        (lambda s, b, h, i, j: s + EIGHT[i] * h, [False], [False]),
        (lambda s, b, h, i, j: s + EIGHT[i - j], [True], [False]),
        (lambda s, b, h, i, j: s + EIGHT[s.long()], [True], [False]),
        (lambda s, b, h, i, j: s + WIDE[IDS_OF_ROWS[i] - j], [False, True], [False, True]),
        (lambda s, b, h, i, j: s + WIDE[OFFSET + IDS_OF_ROWS[h] + i - j], [False, False, True], [False, False, False]),
        (lambda s, b, h, i, j: s + WIDE[OFFSET], [False, False], [False, False]),
    ],
)
def test_what_is_known_of_a_read(score: Callable[..., torch.Tensor], of_pairs: list[bool], chained: list[bool]) -> None:
    score_mod, _ = trace("score_mod", score, torch.zeros(1))
    assert score_mod is not None
    reads = Reads.of(score_mod, 8).reads
    assert [x.of_pairs for x in reads] == of_pairs and [x.chained for x in reads] == chained


@pytest.mark.parametrize("number", [0, 1, 2, 3, 63, 64, 2**31 - 1, 2**31, 2**40 + 5, -1, -7, -(2**31)])
def test_numbers_in_indices_are_computed_exactly(number: int) -> None:
    function, captured = trace("score_mod", lambda s, b, h, i, j: s + EIGHT[(i + number - number) % 8], torch.zeros(1))
    assert function is not None
    reads = Reads.of(function, 8)
    running = Indices(reads)
    running.run(
        torch.tensor(0.5), *(torch.tensor(n, dtype=torch.int32) for n in (0, 0, 5, 0)), *reads.of_captured(captured)
    )
    assert running.found[0][0] == 5


@pytest.mark.parametrize("score", ["relative table", "one temperature", "two through each other", "tanh chain"])
def test_no_literal_is_part_of_an_index(score: str) -> None:
    """PyTorch 2.11 takes an index with one for a scalar, and fails to compile its gradient on GPUs."""
    of_score = SCORES[score].tensors(B, H, S)
    score_mod, _ = trace("score_mod", SCORES[score].make(of_score), torch.zeros(1))
    assert score_mod is not None
    reads = Reads.of(score_mod, S)
    nodes, seen = [x for node in reads.graph.graph.nodes if "apply" in str(node.target) for x in node.args[1]], set()
    while nodes:
        node = nodes.pop()
        if node not in seen:
            seen.add(node)
            nodes += node.all_input_nodes
    assert seen
    for node in seen:
        assert not any(type(x) in (int, float) for x in node.args), node.format_node()


EIGHT, WIDE, IDS_OF_ROWS = torch.zeros(8), torch.zeros(15), torch.zeros(8, dtype=torch.int64)


@pytest.mark.parametrize(
    ("score", "looked_at", "before"),
    [
        (lambda s, b, h, i, j: s + EIGHT[j], (), 0),
        (lambda s, b, h, i, j: s + EIGHT[i - j], ((False, False),), 7),
        (lambda s, b, h, i, j: s + WIDE[i - j + 7], ((False, False),), 0),
        (lambda s, b, h, i, j: s + EIGHT[(i - j).abs()], ((False, False),), 0),
        (lambda s, b, h, i, j: s + EIGHT[(i - j).clamp(0, 7)], ((False, False),), 0),
        (lambda s, b, h, i, j: s + EIGHT[(i - j).clamp(max=3)], ((False, False),), 7),
        (lambda s, b, h, i, j: s + EIGHT[(i - 2 * j).clamp(max=3)], ((True, True),), 0),
        (lambda s, b, h, i, j: s + EIGHT[(9 * i + h) % 8], ((False, False),), 0),
        (lambda s, b, h, i, j: s + EIGHT[torch.minimum(i, j) & 3], ((False, False),), 0),
        (lambda s, b, h, i, j: s + EIGHT[torch.maximum(i, j) // 2], ((False, False),), 0),
        (lambda s, b, h, i, j: s + EIGHT[7 - i], ((False, False),), 0),
        (lambda s, b, h, i, j: s + EIGHT[-i], ((False, False),), 7),
        (lambda s, b, h, i, j: s + EIGHT[torch.where(i > j, i, 0)], ((False, False),), 0),
        (lambda s, b, h, i, j: s + EIGHT[i.clamp_min(2) + 1], ((False, True),), 0),
        (lambda s, b, h, i, j: s + EIGHT[i.clamp_max(6) + 1], ((False, False),), 0),
        (lambda s, b, h, i, j: s + EIGHT[IDS_OF_ROWS[i]], ((True, True),), 0),
        (lambda s, b, h, i, j: s + EIGHT[h], (), 0),
        (lambda s, b, h, i, j: s + EIGHT[h + 1], ((False, True),), 0),
        (lambda s, b, h, i, j: s + EIGHT[i * 2**30 * 4 % 8], ((False, False),), 0),
        (lambda s, b, h, i, j: s + EIGHT[i.float().sqrt().long()], ((True, True),), 0),
        (lambda s, b, h, i, j: s + EIGHT[((i * 0.5) % 3 * 3).long()], ((True, True),), 0),  # 7 of 2.5
    ],
)
def test_an_index_is_looked_at_where_its_bounds_say_nothing(
    score: Callable[..., torch.Tensor], looked_at: tuple[tuple[bool, bool], ...], before: int
) -> None:
    score_mod, captured = trace("score_mod", score, torch.zeros(1))
    assert score_mod is not None
    reads = Reads.of(score_mod, 8)
    assert reads.looked_at == looked_at
    assert sum(pads[0] for read in reads.reads for pads in read.pads) == before
    for i in range(8):
        for j in range(8):
            running = Indices(reads)
            tensors = reads.of_captured(captured)
            running.run(torch.tensor(0.5), *(torch.tensor(n, dtype=torch.int32) for n in (0, 0, i, j)), *tensors)


THIRDS = ROWS.double() / 3


@pytest.mark.parametrize(
    "index",
    [
        lambda i, j: ((BYTES[i] & 7) - 8).long(),
        lambda i, j: (3 - BYTES[i] % 5).long(),
        lambda i, j: (BYTES[i].to(torch.int8) & 15).mul(16).long(),
        lambda i, j: (THIRDS[i] % 3 * 7).long(),
        lambda i, j: ((THIRDS[i] * 0 - 1e-20) % 3).long(),
        lambda i, j: 5 - i,
        lambda i, j: torch.sub(i, j, alpha=3),
        lambda i, j: (i - j) // 4 + (i - j) % 7,
        lambda i, j: (i - j).clamp(6, -2) - ((j - i) & 5),
        lambda i, j: (i - 5) * (j - 7) - (2 * j - i).abs(),
        lambda i, j: (i >= j) * (i - 2 * j),
        lambda i, j: (i > 3).to(torch.int32) * (j > 3),
        lambda i, j: (i - 30) ** 2 - (j - 30) ** 3 + (i + 1) ** 0,
        lambda i, j: torch.div(i - 30, 7, rounding_mode="trunc"),
        lambda i, j: torch.div(i - 64, 7, rounding_mode="trunc"),
        lambda i, j: torch.div(i - 30, 7, rounding_mode="floor"),
        lambda i, j: ((i - 30) << 2) - torch.bitwise_left_shift(j - 30, 3),
        lambda i, j: ((i - 30) >> 2) - torch.bitwise_right_shift(j - 30, 3),
        lambda i, j: torch.zeros_like(i) + 3 * torch.ones_like(j) + torch.full_like(i, -4),
    ],
)
def test_no_integer_is_beyond_its_bounds(index: Callable[..., torch.Tensor]) -> None:
    """Bytes wrap, and remainders of fractions are no integers."""
    function, captured = trace("score_mod", lambda s, b, h, i, j: index(i, j) + 0 * s, torch.zeros(1).double())
    assert function is not None
    graph, (zero, at) = function.graph.graph, (torch.zeros(1, dtype=torch.int64), ROWS[:64])
    values = function.of_pairs(torch.zeros(1, 1, 64, 64).double(), (zero, zero, at, at), captured)
    sum_of = graph.output_node().args[0]
    bounds = bounds_of(graph, dict.fromkeys(graph.find_nodes(op="placeholder")[3:5], (0, 63)))[sum_of.args[0]]
    assert bounds is None or bounds[0] <= values.min() <= values.max() <= bounds[1]


INT32, FAR = torch.arange(-(2**31), 2**31, 2**29, dtype=torch.int32), 2**20 - 1
INT64 = INT32.long()


@pytest.mark.parametrize(
    ("index", "wide"),
    [
        (lambda b, h, i, j: i * j, True),
        (lambda b, h, i, j: (i - j) * (i - j) % 97, True),
        (lambda b, h, i, j: i**2, True),
        (lambda b, h, i, j: i << 12, True),
        (lambda b, h, i, j: i * 2**20 * j // 2**20, True),
        (lambda b, h, i, j: (i ^ j) * 4096, True),
        (lambda b, h, i, j: h * 2**20 + i, True),
        (lambda b, h, i, j: i.long() * i, True),
        (lambda b, h, i, j: i % 2**40, True),
        (lambda b, h, i, j: (i < 2**40) * 1.0, True),
        (lambda b, h, i, j: i.clamp(max=2**40), True),
        (lambda b, h, i, j: torch.where(i > j, i, 2**40), True),
        (lambda b, h, i, j: (~(2**31 - 1 - (j >> 20))).abs(), True),
        (lambda b, h, i, j: ~(2**31 - 1 - (j >> 20)) // -1, True),
        (lambda b, h, i, j: ~(2**31 - 1 - (j >> 20)) // (i >> 20).clamp(max=-1), True),
        (lambda b, h, i, j: i**3 % 1000003, True),
        (lambda b, h, i, j: ~(2**31 - 1 - (j >> 20)) // 3, False),
        (lambda b, h, i, j: (i >= j) * (i - j), False),
        (lambda b, h, i, j: (i << 2) + torch.bitwise_right_shift(j, 3), False),
        (lambda b, h, i, j: (i >> 12) ** 3, False),
        (
            lambda b, h, i, j: torch.div(i, 14, rounding_mode="floor") * 14 - torch.div(j, 3, rounding_mode="trunc"),
            False,
        ),
        (lambda b, h, i, j: torch.ones_like(i) + i - torch.zeros_like(j) + torch.full_like(j, -9), False),
        (lambda b, h, i, j: INT64[i & 7] * i, False),
        (lambda b, h, i, j: INT32[(i & 7)] + i, False),  # one of 64 bits is made of the first
        (lambda b, h, i, j: INT32[i & 7] * 3, False),
        (lambda b, h, i, j: i - j, False),
        (lambda b, h, i, j: i // 14 * 14 + (j >> 3) + i % 5, False),
        (lambda b, h, i, j: (i & 7) * 2**20 + h // 4, False),
        (lambda b, h, i, j: torch.where(i > j, i, 0) | (~j), False),
        (lambda b, h, i, j: i.float() * j, False),
    ],
)
def test_integers_are_those_of_64_bits(index: Callable[..., torch.Tensor], wide: bool) -> None:
    """The templates' indices have 32: where what is computed may be too large, it is computed with 64."""
    query, indices = torch.zeros(1).double(), (1, 3, FAR, FAR - 1)
    function, captured = trace("score_mod", lambda s, b, h, i, j: s + index(b, h, i, j), query)
    assert function is not None
    reads = Reads.of(function, FAR + 1)
    assert reads.wide == wide
    run, score = torch.fx.Interpreter(reads.graph).run, torch.zeros(()).double()
    found = run(score, *(torch.tensor(n, dtype=torch.int32) for n in indices), *reads.of_captured(captured))
    want = function.of_pairs(score.view(1, 1, 1, 1), tuple(torch.tensor([n]) for n in indices), captured)
    assert found == want and want != 0
    of_integers = not index(*map(torch.tensor, indices)).is_floating_point()
    for at_least in (int(want) - 1, int(want), int(want) + 1):
        threshold = torch.tensor(at_least)
        mask, captured = trace("mask_mod", lambda b, h, i, j, x=threshold: index(b, h, i, j) >= x, query)
        assert mask is not None
        reads = Reads.of(mask, FAR + 1)
        assert reads.wide == wide
        tensors = *(torch.tensor(n, dtype=torch.int32) for n in indices), *reads.of_captured(captured)
        found = bool(torch.fx.Interpreter(reads.graph).run(*tensors))
        assert found == (want.long().item() >= at_least) or not of_integers


def test_large_numbers_of_heads_are_of_64_bits() -> None:
    """Numbers of heads and batch rows are small, unless the first one of a tile is large."""
    q = torch.zeros(1, 1, 8, 8)
    score_mod, _ = trace("score_mod", lambda s, b, h, i, j: s + h * 2**10, q)
    cover, found = Pairs(Mask(), *[ROWS[:8]] * 2), list[bool]()
    for first in ({}, {"first_head": 1 << 22}, {"first_batch": 1 << 22}):
        tile = Tile(cover, Scores(1.0, score_mod=score_mod, seq_len=8, **first), torch.float32)
        assert tile._score is not None
        found.append(tile._score.wide)
        h = int(tile.score(torch.zeros(()), *torch.tensor([0, 5, 0, 0], dtype=torch.int32), *tile.of_score))
        assert h == (first.get("first_head", 0) + 5) << 10
    assert found == [False, True, True]


def test_bounds_are_of_the_length() -> None:
    """A longer sequence of the same function is another program."""
    score_mod, _ = trace("score_mod", lambda s, b, h, i, j: s + WIDE[i - j + 7], torch.zeros(1))
    assert score_mod is not None
    keys = []
    for seq_len in (8, 8, 16):
        cover, scores = (
            Pairs(Mask(), *[ROWS[:8]] * 2),
            Scores(1.0, score_mod=score_mod, captured=(WIDE,), seq_len=seq_len),
        )
        keys.append(Tile(cover, scores, torch.float32).key)
    assert keys[0] == keys[1] != keys[2]


def test_results_are_wide_in_one_thread_alone() -> None:
    """Inductor's own buffers of integers, and what another thread compiles meanwhile, are as they are."""
    from torch._inductor.kernel.flex import flex_attention as lowering

    before, of_types = lowering.FixedLayout, (torch.bfloat16, torch.float16, torch.float32, torch.float64, torch.int32)

    def dtypes() -> list[torch.dtype]:
        return [lowering.FixedLayout(torch.device("cpu"), dtype, [2]).dtype for dtype in of_types]

    with ThreadPoolExecutor(1) as beside, pytest.raises(KeyError), flex_programs._results_in_float32():
        assert dtypes() == [torch.float32] * 3 + [torch.float64, torch.int32]
        assert beside.submit(dtypes).result() == [*of_types]
        raise KeyError
    assert lowering.FixedLayout is before and dtypes() == [*of_types]


def of_batches(rank: int, kind: str, num_batches: int) -> tuple[list[int], float]:
    """How many programs there are after each batch, and the largest gap to the reference."""
    size, programs, gaps = 256, list[int](), list[float]()
    cp_mesh = mesh((4,), ("cp",))
    with on_the_cpu(), mock.patch.object(flex_programs, "_programs", type(flex_programs._programs)()) as made:
        for batch in range(num_batches):
            torch.manual_seed(batch)
            lengths = torch.randint(1, 100, (size,))
            ids = torch.repeat_interleave(torch.arange(size), lengths)[:size]
            layout = ShardedSequence(cp_mesh, ZigZag(), size).balanced(Mask(documents=ids)).layout
            layout = layout if kind == "balanced" else ZigZag()
            at, found = layout.positions(size, 4, cp_mesh.get_local_rank()), []
            whole = [torch.randn(B, heads, size, D).double() for heads in (H, K, K)]
            slopes = torch.rand(H).double().requires_grad_()
            if kind == "sources":
                sequence = ShardedSequence(cp_mesh, layout, size)
                seen = lambda b, h, i, j, ids=ids: (ids[i] == ids[j]) & (i >= j)  # noqa: E731
                options = {"mask": Mask(), "block_mask": create_block_mask(seen, None, None, size, size, sequence)}
            else:
                options = {"mask": Mask(documents=ids)}
            for kernel in ("flex", "reference"):
                q, k, v = (x[:, :, at].clone().requires_grad_() for x in whole)
                slopes.grad = None
                out = flex_attention(
                    q, k, v, lambda score, b, h, i, j, slopes=slopes: score - slopes[h] * (i - j),
                    mesh=cp_mesh, layout=layout, kernel=kernel, enable_gqa=True, **options,
                )  # fmt: skip
                out.square().sum().backward()
                found.append([out, q.grad, k.grad, v.grad, slopes.grad])
            gaps.append(max(gap(a, b) for a, b in zip(*found, strict=True)))
            programs.append(len(made))
    return programs, max(gaps)


@pytest.mark.parametrize("kind", ["Mask", "balanced", "sources"])
@pytest.mark.full
def test_no_batch_has_programs_of_its_own(pool, kind: str) -> None:
    """Tiles of documents have other rows in each batch. They are padded to the rows of one rank, or of two where more
    arrive: a forward, a backward and a table of blocks for each, and one that looks which sources are seen."""
    for programs, error in pool(4).run(of_batches, kind, 8):
        assert error <= 1e-10
        assert set(programs) <= ({4, 7} if kind == "sources" else {3, 6})


@pytest.mark.parametrize("score", ["relative table", "pair bias", "one tensor twice"])
@pytest.mark.parametrize("of_mask", OF_MASK)
@pytest.mark.quick("padding")
def test_padded_tiles_are_those_of_the_reference(score: str, of_mask: str) -> None:
    """Of fewer rows than a program takes, in dims of any order."""
    torch.manual_seed(0)
    (q_pos, k_pos), sizes = POSITIONS["two runs"], (256, 384)
    of_rows = ((H, q_pos), (K, k_pos), (K, k_pos))
    q, k, v = (torch.randn(B, len(at), heads, D).double().transpose(1, 2) for heads, at in of_rows)
    scores = scores_of(score, "causal", q)
    cover = Pairs(OF_MASK[of_mask], q_pos, k_pos, steps=(Steps.of(q_pos), Steps.of(k_pos)), sizes=sizes)
    (out, lse), (want, want_lse) = (kernel._forward(q, k, v, cover, scores) for kernel in (flex, reference))
    assert near(out, want) and torch.equal(lse.isinf(), want_lse.isinf())
    tile = BackwardTile(torch.randn_like(want), q, k, v, None, want_lse, torch.randn_like(lse), cover, scores)
    (*grads, of_scores), (*wants, want_of_scores) = (kernel._backward(tile) for kernel in (flex, reference))
    assert all(map(near, grads, wants))
    assert of_scores.keys() == want_of_scores.keys() and of_scores
    assert all(near(of_scores[i], x) for i, x in want_of_scores.items())


def test_a_copy_of_the_last_row_pads() -> None:
    """Of another row functions might make what is no number, whose gradient hides nothing."""
    cover = Pairs(Mask(), ROWS[:3], ROWS[:5], sizes=(4, 8))
    x = torch.randn(2, 3, 5, 7)
    for given, of_keys in ((x[:, :, :3], False), (x[:, :, :3].transpose(0, 1), False), (x, True), (x.mT.mT, True)):
        found, rows = flex_tiles.padded(cover, given, of_keys), given.shape[2]
        assert found.shape[2] == (8 if of_keys else 4)
        assert torch.equal(found[:, :, :rows], given)
        assert torch.equal(found[:, :, rows:], given[:, :, -1:].expand_as(found[:, :, rows:]))
    whole = torch.randn(1, 5, 8, 7)
    for given in (
        whole,
        whole.transpose(1, 3)[:, :, :, ::2].transpose(1, 3),
        whole[:, :, :8].as_strided(whole.shape, (999, 56, 7, 1)),
    ):
        found = flex_tiles.padded(cover, given, True)
        assert torch.equal(found, given) and found.stride() == torch.empty(given.shape).stride()


FAR_OFF, THIRD = torch.tensor(2**33), torch.tensor(2**25 + 1).double()


@pytest.mark.parametrize(
    "score",
    [
        lambda s, b, h, i, j: torch.where(j.to(torch.int32) < FAR_OFF, s, -s),
        lambda s, b, h, i, j: s + (torch.minimum(FAR_OFF + 1, i.to(torch.int32) + FAR_OFF) - FAR_OFF),
        lambda s, b, h, i, j: s + (i.float() + THIRD - 2**25),
        lambda s, b, h, i, j: torch.where(i >= j, i.float(), THIRD) - j,
    ],
)
def test_scalars_of_two_dtypes(score: Callable[..., torch.Tensor]) -> None:
    """Of all pairs at once, as of one, with what 32 bits do not hold."""
    function, captured = trace("score_mod", score, torch.zeros(1).double())
    assert function is not None
    zero, at = torch.zeros(1, dtype=torch.int64), torch.arange(4)
    found = function.of_pairs(torch.ones(1, 1, 4, 4).double(), (zero, zero, at, at), captured)
    for i in range(4):
        for j in range(4):
            of_pair = torch.ones(()).double(), *(torch.tensor(n) for n in (0, 0, i, j))
            assert found[0, 0, i, j] == score(*of_pair)
