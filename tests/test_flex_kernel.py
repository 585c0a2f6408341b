"""The kernel of functions, by PyTorch's flex_attention: on the CPU its operators run uncompiled, in float64."""

from __future__ import annotations

import math
import os
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from shutil import which
from typing import Any
from unittest import mock

import pytest
import torch
from cases import gap
from flex_uses import MASKS, SCORES
from inside import KERNELS, BackwardTile, Pairs, Reads, ScalarFunction, Scores, inner, name_of_captured, room, trace
from ranks import on_ranks, refused
from torch import Tensor
from torch._dynamo.utils import counters
from torch.nn.attention import flex_attention as of_torch

from cp_mesh import Mask, ShardedSequence, Striped, UnsupportedError, ZigZag, flex_attention
from cp_mesh.flex import create_block_mask

compiling, flex, flex_programs, flex_reads = (room(x) for x in ("compiling", "kernel", "programs", "reads"))
blocks_of = inner("kernels.flex.blocks", "blocks_of")
reference = room("kernels.reference")
Steps, FLEX, Tile = inner("kernels.contract", "Steps"), inner("kernel", "FLEX"), inner("tiles", "FlexTile")

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
COMPILED = pytest.mark.skipif(which("g++") is None, reason="Inductor compiles for CPUs by g++")


def near(got: Tensor, want: Tensor) -> bool:
    return gap(got, want) <= 1e-13 * max(10.0, want.abs().max().item())


def scores_of(score_mod: Any, mask_mod: Any = None, scale: float = D**-0.5, **options: Any) -> Scores:
    q = torch.zeros(1).double()
    (score, captured), (mask, read) = trace("score_mod", score_mod, q), trace("mask_mod", mask_mod, q)
    wanted = frozenset(name_of_captured(i) for i, x in enumerate(captured) if x.is_floating_point())
    return Scores(scale, score_mod=score, mask_mod=mask, captured=(*captured, *read), wanted=wanted, **options)


def scores_by_name(score: str, mask: str) -> Scores:
    return scores_of(
        *(table[name].make(table[name].tensors(B, H, S)) for table, name in ((SCORES, score), (MASKS, mask)))
    )


def agree(cover: Pairs, scores: Scores, dims_turned: bool = False) -> None:
    """Both passes of a tile are those of the reference; the backward is of other keys as well, and of lse."""
    torch.manual_seed(0)
    of_rows = ((H, cover.q_pos), (K, cover.k_pos), (K, cover.k_pos))
    q, k, v = (torch.randn(B, heads, len(at), D).double() for heads, at in of_rows)
    if dims_turned:
        q, k, v = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k, v))
    (out, lse), (want, want_lse) = (kernel._forward(q, k, v, cover, scores) for kernel in (flex, reference))
    assert near(out, want) and torch.equal(lse.isinf(), want_lse.isinf())
    assert near(lse.nan_to_num(neginf=0.0), want_lse.nan_to_num(neginf=0.0))
    lse, delta = torch.logaddexp(want_lse, torch.randn_like(want_lse)), torch.randn_like(want_lse)
    tile = BackwardTile(torch.randn_like(want), q, k, v, None, lse, delta, cover, scores)
    (*grads, of_scores), (*wants, want_of_scores) = (kernel._backward(tile) for kernel in (flex, reference))
    assert all(map(near, grads, wants)) and of_scores.keys() == want_of_scores.keys()
    assert all(near(of_scores[i], x) for i, x in want_of_scores.items())


@pytest.mark.parametrize(
    ("score", "mask", "of_mask", "positions"),
    [
        *((score, "none", "all", "two runs") for score in SCORES if "causal" not in score),
        *(("tanh chain", mask, "documents", "one run") for mask in MASKS),
        *(("relative table", "none", mask, positions) for mask in OF_MASK for positions in POSITIONS),
    ],
)
@pytest.mark.quick("none-all-two runs")
def test_tiles_are_those_of_the_reference(score: str, mask: str, of_mask: str, positions: str) -> None:
    q_pos, k_pos = POSITIONS[positions]
    scores = scores_by_name(score, mask)
    if "vectors in functions" in scores.features:
        pytest.skip("no function of scalars")
    steps = Steps.of(q_pos), Steps.of(k_pos)
    assert (None in steps) == (positions == "in any order")
    agree(Pairs(OF_MASK[of_mask], q_pos, k_pos, steps=steps), scores)


@pytest.mark.parametrize("score", ["relative table", "pair bias", "one tensor twice"])
@pytest.mark.parametrize("of_mask", OF_MASK)
@pytest.mark.quick("padding")
def test_padded_tiles_are_those_of_the_reference(score: str, of_mask: str) -> None:
    """Of fewer rows than a program takes, in dims of any order."""
    q_pos, k_pos = POSITIONS["two runs"]
    cover = Pairs(OF_MASK[of_mask], q_pos, k_pos, steps=(Steps.of(q_pos), Steps.of(k_pos)), sizes=(256, 384))
    agree(cover, scores_by_name(score, "causal"), dims_turned=True)


BYTES, SIGNED = (ROWS * 9).to(torch.uint8), (ROWS * 9).to(torch.int8)
FAR_OFF, THIRD = torch.tensor(2**33), torch.tensor(2**25 + 1).double()
OFFSET, TABLE = torch.tensor(3), torch.linspace(-1, 1, 700, dtype=torch.float64).sin()
LARGE = torch.linspace(-1, 1, 2**17 + 1, dtype=torch.float64).sin()
OF_ONE = TABLE[: H * 64].view(1, H, 1, 64)
UNUSUAL = {
    "a fraction in an index": lambda s, b, h, i, j: s + TABLE[(torch.where(i > j, (i - j) * 0.5, 1.5) * 2).long()],
    "a filled tensor in an index": lambda s, b, h, i, j: s + TABLE[torch.minimum(j, torch.full_like(i, 31))],
    "an index that is captured": lambda s, b, h, i, j: s + (j * TABLE[OFFSET]),
    "a tensor without copies": lambda s, b, h, i, j: s + LARGE[i - j] * LARGE[i * j],
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
    "dims of one": lambda s, b, h, i, j: s * OF_ONE[0, h, 0, j],
    "compared alone": lambda s, b, h, i, j: torch.where(TABLE[j] > 0, s, s * 2),
    "of what is read alone, detached": lambda s, b, h, i, j: TABLE[j].detach(),
    "large numbers in an index": lambda s, b, h, i, j: s + TABLE[(i + 2**40 - 2**40) % 8 + (j - 7 + 7) % 8],
    "what 32 bits do not hold": lambda s, b, h, i, j: torch.where(j.to(torch.int32) < FAR_OFF, s, -s),
    "a limit that 32 bits do not hold": lambda s, b, h, i, j: (
        s + (torch.minimum(FAR_OFF + 1, i.to(torch.int32) + FAR_OFF) - FAR_OFF)
    ),
    "a fraction of 64 bits": lambda s, b, h, i, j: s + (i.float() + THIRD - 2**25),
    "one of two of 64 bits": lambda s, b, h, i, j: (
        torch.where(i > 2 * j, i.float(), THIRD) - torch.where(i > 2 * j, 0, 2**25)
    ),
}


@pytest.mark.parametrize("name", UNUSUAL)
def test_unusual_functions(name: str) -> None:
    agree(Pairs(Mask(), *[ROWS[:64]] * 2), scores_of(UNUSUAL[name]))


def test_numbers_of_heads_may_leave_32_bits() -> None:
    for first in ({}, {"first_head": 1 << 22}, {"first_batch": 1 << 22}):
        scores = scores_of(lambda s, b, h, i, j: s + (h * 2**10 + b * 2**10) % 1009, seq_len=8, **first)
        agree(Pairs(Mask(), *[ROWS[:8]] * 2), scores)


# --- tables of blocks
def check_tables(cover: Pairs, scores: Scores) -> tuple[int, int]:
    """Those that PyTorch makes of all pairs; returns their first dims."""
    num_q, num_k = len(cover.q_pos), len(cover.k_pos)
    seen = cover.allowed(torch.arange(num_q), torch.arange(num_k))[:, None].expand(B, H, -1, -1)
    b, h = (torch.arange(n) + first for n, first in ((B, scores.first_batch), (H, scores.first_head)))
    if scores.mask_mod is not None:
        seen = seen & scores.mask_mod.of_pairs(None, (b, h, cover.q_pos, cover.k_pos), scores.captured)
    found = blocks_of(Tile(cover, scores, torch.float64), (B, H, num_q, num_k))
    sizes = found.kv_num_blocks.shape[:2]
    assert torch.equal(seen[: sizes[0], : sizes[1]].expand(seen.shape), seen)
    want = of_torch.create_block_mask(lambda b, h, i, j: seen[b, h, i, j], *sizes, num_q, num_k, device="cpu")
    for x, y in zip(found.as_tuple()[:-1], want.as_tuple()[:-1], strict=True):
        if isinstance(x, Tensor):
            assert torch.equal(x, y) and x.dtype == y.dtype and x.is_contiguous()
        else:
            assert x == y
    return tuple(sizes)


@pytest.mark.parametrize("of_mask", OF_MASK)
def test_tables_of_blocks_are_those_of_the_mask(of_mask: str) -> None:
    check_tables(Pairs(OF_MASK[of_mask], ROWS, ROWS.flip(0)), Scores(1.0))


def test_tables_of_blocks_are_of_these_heads_rows_and_tensors() -> None:
    """Calls that share a tile: chunks of heads, batch rows of other ranks, tensors at one address, and written ones."""
    cover = Pairs(Mask(causal=False), ROWS, ROWS)
    allow = (ROWS[:, None] // 128 == 0) & (ROWS < 128)
    allow[:, 0] = True

    def tables(mask_mod: Callable[..., Tensor], **first: int) -> tuple[int, int]:
        return check_tables(cover, scores_of(None, mask_mod, **first))

    for first in (0, 2):
        assert tables(lambda b, h, i, j: (h < 2) | (i // 128 == j // 128), first_head=first) == (1, H)
        assert tables(lambda b, h, i, j: (b < 1) | (i // 128 == j // 128), first_batch=first) == (B, 1)
    for x in (allow, allow.t()):
        assert tables(lambda b, h, i, j, x=x: x[i, j]) == (1, 1)
    allow[:, 128:] = True
    tables(lambda b, h, i, j: allow[i, j])
    with torch.inference_mode():  # such tensors do not tell of writes
        allow = torch.ones(S, dtype=torch.bool)
        for _ in range(2):
            tables(lambda b, h, i, j: allow[j + 0 * 3])
            allow[:200] = False


# --- in calls
def on_the_cpu() -> mock._patch_dict:
    of_cpu = replace(FLEX.capability, devices=("cpu",), dtypes=(torch.float64,), compute_capability=(0, 0))
    of_cpu = replace(of_cpu, min_head_dim=1, lacking=lambda: None)
    return mock.patch.dict(KERNELS, flex=replace(FLEX, capability=of_cpu))


def compare(run: Callable[[str], list[Tensor]], atol: float = 1e-12) -> None:
    """Results by this kernel are those of the reference."""
    with on_the_cpu():
        for found, want in zip(run("flex"), run("reference"), strict=True):
            assert gap(found, want) <= atol


def step(kernel: str, at: Tensor, seed: int, x: Tensor, score_mod: Any, **options: Any) -> list[Tensor]:
    """Results and gradients of rows of a call; ``score_mod``: of what it captures."""
    torch.manual_seed(seed)
    q, k, v = (torch.randn(B, n, 256, D).double()[:, :, at].clone().requires_grad_() for n in (H, K, K))
    x = x.clone().requires_grad_()
    out = flex_attention(q, k, v, score_mod(x), kernel=kernel, enable_gqa=True, **options)
    return [out, *torch.autograd.grad(out.square().sum(), (q, k, v, x))]


@pytest.mark.parametrize("layout", [ZigZag(), Striped()], ids=str)
@pytest.mark.parametrize("method", ["ring", "ulysses"])
@on_ranks(2)
def test_it_serves_every_method(axis: Any, layout: ZigZag | Striped, method: str) -> None:
    at, mask = layout.positions(256, 2, axis.get_local_rank()), MASKS["causal or of one image"]
    score, x = SCORES["one tensor twice"], SCORES["one tensor twice"].tensors(B, H, 256)["x"]
    options = {"mesh": axis, "layout": layout, "method": method}
    options["block_mask"] = create_block_mask(mask.make(mask.tensors(B, H, 256)), B, H, 256, 256)
    compare(lambda kernel: step(kernel, at, 0, x, lambda x: score.make({"x": x}), **options))


@on_ranks(2)
def test_inference_mode_and_functions_of_vectors(axis: Any) -> None:
    with torch.inference_mode():
        q, bias, ids = (torch.arange(n).double().sin() for n in (B * H * 8 * D, 16, 16))
        q = q.view(B, H, 8, D)
        mask = create_block_mask(lambda b, h, i, j: ids[i] * ids[j] >= 0, None, None, 16, 16)
        score_mod = lambda score, b, h, i, j: score + bias[i - j] * bias[j]  # noqa: E731
        compare(lambda kernel: [flex_attention(q, q, q, score_mod, mask, mesh=axis, kernel=kernel)])
    q, u = torch.randn(1, 2, 4, 4).double(), torch.randn(8, 3).double()
    with on_the_cpu(), refused("kernel='flex' lacks scores with vectors in functions", UnsupportedError):
        flex_attention(q, q, q, lambda s, b, h, i, j: s + (u[i] * u[j]).sum(), mesh=axis, kernel="flex")


@pytest.mark.parametrize("kind", ["Mask", "balanced", "sources"])
@pytest.mark.full
@on_ranks(4)
def test_no_batch_has_programs_of_its_own(axis: Any, kind: str) -> None:
    """Tiles of documents have other rows in each batch. They are padded to the rows of one rank, or of two where more
    arrive: a forward, a backward and a table of blocks for each, and one that looks which sources are seen."""
    size, programs = 256, set[int]()
    with mock.patch.object(flex_programs, "_programs", type(flex_programs._programs)()) as made:
        for batch in range(8):
            torch.manual_seed(batch)
            ids = torch.repeat_interleave(torch.arange(size), torch.randint(1, 100, (size,)))[:size]
            sequence = ShardedSequence(axis, ZigZag(), size)
            layout = sequence.balanced(Mask(documents=ids)).layout if kind == "balanced" else ZigZag()
            at = layout.positions(size, 4, axis.get_local_rank())
            options: dict[str, Any] = {"mask": Mask(documents=ids), "mesh": axis, "layout": layout}
            if kind == "sources":
                seen = lambda b, h, i, j, ids=ids: (ids[i] == ids[j]) & (i >= j)  # noqa: E731
                options |= {"mask": Mask(), "block_mask": create_block_mask(seen, None, None, size, size, sequence)}
            slopes, alibi = torch.rand(H).double(), lambda x: lambda score, b, h, i, j: score - x[h] * (i - j)
            compare(lambda kernel, given=(at, batch, slopes, alibi), o=options: step(kernel, *given, **o), 1e-10)
            programs.add(len(made))
    assert programs <= ({4, 7} if kind == "sources" else {3, 6})


# --- what functions read beyond a tensor
EIGHT, WIDE = torch.zeros(8), torch.zeros(15)


@pytest.mark.parametrize(
    ("score", "after"),
    [
        (lambda s, b, h, i, j: torch.where(EIGHT[i - j] > 0, s, s * 2), 0),
        (lambda s, b, h, i, j: s * (EIGHT[i - j] == 0) + EIGHT[i - j], 1),
        (lambda s, b, h, i, j: s + EIGHT[(WIDE[i] * 3 + EIGHT[i - j]).long() % 8], 0),
        (lambda s, b, h, i, j: s + EIGHT[i - j].clamp(-1, 1).tanh(), 0),
        (lambda s, b, h, i, j: (s - torch.where(i > j, -EIGHT[i - j].half().detach(), s)) / 3 * 2, 1),
        (lambda s, b, h, i, j: s + EIGHT[i - j] * WIDE[h], 0),
        (lambda s, b, h, i, j: s * EIGHT[i - j], 0),
    ],
)
def test_nothing_makes_a_number_of_what_is_beyond(score: Callable[..., Tensor], after: int) -> None:
    """NaN beyond a tensor tells where the score is a sum with it, and nowhere else."""
    score_mod, captured = trace("score_mod", score, torch.zeros(1))
    assert score_mod is not None
    reads = Reads.of(score_mod, 15)
    assert sum(read.pads[0][1] for read in reads.reads) == after
    for i, beyond in ((7, False), (8, True)):
        scalars = (torch.tensor(n, dtype=torch.int32) for n in (0, 0, i, 0))
        result = torch.fx.Interpreter(reads.graph).run(torch.tensor(0.5), *scalars, *reads.of_captured(captured))
        assert result.isnan().item() == beyond


class Indices(torch.fx.Interpreter):
    """Runs the graph of `Reads`, and notes the indices at which tensors are read."""

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        if "apply" in str(target):
            self.found.append([int(x) for x in args[1]])
        return super().call_function(target, args, kwargs)

    def at(self, given: tuple[list[Tensor], list[Tensor]], i: int, j: int) -> tuple[float, list[list[int]]]:
        self.found = list[list[int]]()
        indices = (torch.tensor(n, dtype=torch.int32) for n in (0, 0, i, j))
        return self.run(*given[0], *indices, *given[1]).item(), self.found


@pytest.mark.parametrize("most_copied", [1 << 24, 0])
def test_indices_count_from_the_end_and_no_further(most_copied: int) -> None:
    """PyTorch's templates read memory before and after a tensor."""
    table, offset, seen = torch.arange(8.0), torch.tensor([3, 100]), torch.tensor([True, False, False])
    score_mod, captured = trace("score_mod", lambda s, b, h, i, j: s + table[i - j] + offset[i + 0 * j], torch.zeros(1))
    mask_mod, of_mask = trace("mask_mod", lambda b, h, i, j: seen[i - j], torch.zeros(1))
    assert score_mod is not None and mask_mod is not None
    with mock.patch.multiple(flex_reads, MOST_COPIED=most_copied, SHARED=0):
        reads = Reads.of(score_mod, S)
    assert [read.pads for read in reads.reads] == [((0, int(most_copied > 0)),), ((0, 0),)]
    running, given = Indices(reads.graph), ([torch.tensor(0.5)], reads.of_captured(captured))
    assert running.at(given, 1, 2) == (0.5 + 7 + 100, [[7], [1]]), "-1 is the last"
    assert running.at(given, 0, 0) == (0.5 + 3, [[0], [0]])
    for pair in ((1, 10), (0, 9), (8, 8)):  # beyond the table, and beyond the integers
        value, found = running.at(given, *pair)
        assert math.isnan(value) and all(0 <= n < len(x) for (n,), x in zip(found, given[1], strict=True))
    reads = Reads.of(mask_mod, S)
    tensors = reads.of_captured(of_mask)
    assert Indices(reads.graph).at(([], tensors), 0, 2) == (False, [[1]])
    assert tensors[0].data_ptr() == seen.data_ptr(), "by which tables of blocks are kept"


@pytest.mark.parametrize("form", ["sum", "product"])
def test_what_is_hidden_may_be_beyond_a_tensor(form: str) -> None:
    """A table as long as the window: gradients are those of a longer one. In a sequence as long, nothing is beyond it,
    and the function has another program there."""
    torch.manual_seed(0)
    long, scale = torch.randn(S).double(), torch.randn(H).double()
    q, k, v, dout = (torch.randn(B, heads, 32, D).double() for heads in (H, K, K, H))
    for rows, seq_len in ((ROWS[:16].repeat(2), 16), (torch.cat([ROWS[:16], ROWS[40:56]]), 64)):
        cover, found = Pairs(Mask(window=(15, 0)), rows, rows), []
        for table in (long[:16], long):

            def score(s: Any, b: Any, h: Any, i: Any, j: Any, table: Tensor = table) -> Tensor:
                return s * table[i - j] * scale[h] if form == "product" else s * scale[h] + table[i - j]

            scores = scores_of(score, scale=0.5, seq_len=seq_len)
            out, lse = flex._forward(q, k, v, cover, scores)
            tile = BackwardTile(dout, q, k, v, None, lse, torch.zeros_like(lse), cover, scores)
            *grads, of_scores = flex._backward(tile)
            by_size = sorted(of_scores.values(), key=len)
            found.append([out, *grads, by_size[0], by_size[1][:16]])
        assert all(near(x, y) and x.isfinite().all() and x.any() for x, y in zip(*found, strict=True))


# --- compilation
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


@COMPILED
@pytest.mark.full
def test_programs_are_found_on_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As another process would find them; not those of another number. A tensor that is given twice, as keys that are
    the values too, is two."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    x, y = torch.arange(8.0), torch.arange(8.0) + 1
    for number, found in ((2.0, "miss"), (2.0, "hit"), (3.0, "miss"), (3.0, "hit")):
        counters.clear()
        compiled = flex_programs.compiled_of(partial(lambda number, x, y: x - number * y, number), (x, x))
        assert torch.equal(compiled(x, x), x - number * x) and torch.equal(compiled(x, y), x - number * y)
        assert {key for key in counters["inductor"] if "fxgraph" in key} == {f"fxgraph_cache_{found}"}


def test_fewer_stages_are_compiled_where_memory_is_too_small() -> None:
    def tried(chosen: int | None, fit: int, words: str = "out of resource: shared memory") -> tuple[bool, list[Any]]:
        found = list[Any]()

        def compiled(options: dict[str, int]) -> int:
            found.append(options.get("num_stages", chosen))
            if (found[-1] or 3) > fit:
                raise RuntimeError(words)
            return fit

        with suppress(RuntimeError):
            return flex_programs.with_fewer_stages(compiled, chosen) == fit, found
        return False, found

    assert [tried(None, n) for n in (3, 1, 0)] == [(True, [None]), (True, [None, 2, 1]), (False, [None, 2, 1])]
    assert [tried(2, 1), tried(1, 0)] == [(True, [2, 1]), (False, [1])]
    assert tried(None, 1, "something else") == (False, [None])


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


# --- the lock of ranks that compile
def test_ranks_of_a_device_compile_one_after_the_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By files of this user alone."""
    monkeypatch.setattr(compiling, "PATIENCE", 0.5)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    before = os.umask(0)

    def seconds(*number: int) -> float:
        began = time.monotonic()
        with compiling.one_rank_compiles(*number):
            return time.monotonic() - began

    try:
        with compiling.one_rank_compiles(7), compiling.one_rank_compiles():
            assert seconds(7) >= 0.5 and seconds() >= 0.5 and seconds(8) < 0.5
    finally:
        os.umask(before)
    (folder,) = tmp_path.iterdir()
    modes = {path.name: path.stat().st_mode & 0o777 for path in (folder, *folder.iterdir())}
    assert modes == {folder.name: 0o700} | dict.fromkeys(
        ("compiling.lock", "compiling_7.lock", "compiling_8.lock"), 0o600
    )


PLANTED: dict[str, Callable[[Path], Any]] = {
    "a file": Path.touch,
    "a link": lambda folder: folder.symlink_to(folder.parent),
    "a folder of all": lambda folder: os.mkdir(folder) or folder.chmod(0o777),
    "another user's folder": lambda folder: folder.mkdir(0o700),
    "a link for the file": lambda folder: (folder.mkdir(0o700), (folder / "compiling.lock").symlink_to(folder / "x")),
}


@pytest.mark.parametrize("planted", PLANTED)
def test_what_others_left_for_the_lock_is_not_opened(
    planted: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The temporary folder is everybody's: ranks then compile without a lock, and say so, and do not wait."""
    user = os.geteuid() + (planted == "another user's folder")
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(os, "geteuid", lambda: user)
    PLANTED[planted](tmp_path / f"cp_mesh_{user}")
    there = sorted(tmp_path.rglob("*"))
    with pytest.warns(UserWarning, match="cp_mesh: ranks compile without waiting for each other: "):
        with compiling.one_rank_compiles(), compiling.one_rank_compiles():
            pass
    assert sorted(tmp_path.rglob("*")) == there


def test_pads_are_of_the_tensor_and_so_are_their_gradients() -> None:
    x = torch.randn(3, 4, dtype=torch.float64, requires_grad=True)
    rows, columns = torch.tensor([1, 2, 0, 1, 2]), torch.tensor([3, 0, 1, 2, 3])
    read, want = flex_reads.Read(0, True, False, 0, ((2, 0), (1, 1))), x[rows][:, columns]
    got = read.of(x)
    assert got[:, -1].isnan().all() and torch.equal(got[:, :-1], want)
    weights = torch.randn(got.shape, dtype=torch.float64)
    wanted = torch.autograd.grad(want, x, weights[:, :-1])[0]
    assert torch.allclose(read.home(weights.clone()), wanted, atol=1e-14)
