"""The kernel of functions, by PyTorch's flex_attention: on the CPU its operators run uncompiled, in float64."""

from __future__ import annotations

import math
import os
import signal
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
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
from torch._dynamo.utils import counters

from cp_mesh import Mask, ShardedSequence, Striped, UnsupportedError, ZigZag, flex_attention
from cp_mesh.flex import create_block_mask

compiling = room("compiling")
flex = room("kernel")
flex_blocks = room("blocks")
flex_programs = room("programs")
flex_reads = room("reads")
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


@pytest.mark.parametrize(("score", "mask", "of_mask", "positions"), CASES)
@pytest.mark.quick("none-all-two runs")
def test_tiles_are_those_of_the_reference(score: str, mask: str, of_mask: str, positions: str) -> None:
    q_pos, k_pos = POSITIONS[positions]
    scores = scores_of(score, mask, torch.zeros(1).double())
    if "vectors in functions" in scores.features:
        pytest.skip("no function of scalars")
    steps = Steps.of(q_pos), Steps.of(k_pos)
    assert (None in steps) == (positions == "in any order")
    agree(Pairs(OF_MASK[of_mask], q_pos, k_pos, steps=steps), scores)


@pytest.mark.parametrize("score", ["relative table", "pair bias", "one tensor twice", "through an integer map"])
def test_tiles_without_copies_of_gradients(score: str) -> None:
    with mock.patch.object(flex_reads, "SHARED", 0):
        test_tiles_are_those_of_the_reference(score, "none", "all", "two runs")


@pytest.mark.parametrize("score", ["relative table", "pair bias", "one tensor twice"])
@pytest.mark.parametrize("of_mask", OF_MASK)
@pytest.mark.quick("padding")
def test_padded_tiles_are_those_of_the_reference(score: str, of_mask: str) -> None:
    """Of fewer rows than a program takes, in dims of any order."""
    q_pos, k_pos = POSITIONS["two runs"]
    cover = Pairs(OF_MASK[of_mask], q_pos, k_pos, steps=(Steps.of(q_pos), Steps.of(k_pos)), sizes=(256, 384))
    agree(cover, scores_of(score, "causal", torch.zeros(1).double()), dims_turned=True)


BYTES, SIGNED = (ROWS * 9).to(torch.uint8), (ROWS * 9).to(torch.int8)
FAR_OFF, THIRD = torch.tensor(2**33), torch.tensor(2**25 + 1).double()
OFFSET, TABLE = torch.tensor(3), torch.linspace(-1, 1, 700, dtype=torch.float64).sin()
OF_ONE = TABLE[: H * 64].view(1, H, 1, 64)
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
    score_mod, captured = trace("score_mod", UNUSUAL[name], torch.zeros(1).double())
    wanted = frozenset(name_of_captured(i) for i, x in enumerate(captured) if x.is_floating_point())
    agree(Pairs(Mask(), *[ROWS[:64]] * 2), Scores(0.5, score_mod=score_mod, captured=captured, wanted=wanted))


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


def compare(run: Callable[[str], list[torch.Tensor]], atol: float = 1e-12) -> None:
    """Results by this kernel are those of the reference."""
    with on_the_cpu():
        for found, want in zip(run("flex"), run("reference"), strict=True):
            assert gap(found, want) <= atol


@pytest.mark.parametrize("layout", [ZigZag(), Striped()], ids=str)
@pytest.mark.parametrize("method", ["ring", "ulysses"])
@on_ranks(2)
def test_it_serves_every_method(axis: Any, layout: ZigZag | Striped, method: str) -> None:
    size = 256
    at = layout.positions(size, 2, axis.get_local_rank())
    mask_mod = MASKS["causal or of one image"].make(MASKS["causal or of one image"].tensors(B, H, size))

    def run(kernel: str) -> list[torch.Tensor]:
        torch.manual_seed(0)
        q, k, v = (torch.randn(B, n, size, D).double()[:, :, at].clone().requires_grad_() for n in (H, K, K))
        tensors = SCORES["one tensor twice"].tensors(B, H, size)
        x = tensors["x"].requires_grad_()
        mask, score_mod = create_block_mask(mask_mod, B, H, size, size), SCORES["one tensor twice"].make(tensors)
        options: dict[str, Any] = {"mesh": axis, "layout": layout, "method": method, "enable_gqa": True}
        out = flex_attention(q, k, v, score_mod, mask, kernel=kernel, **options)
        out.square().sum().backward()
        return [out, q.grad, k.grad, v.grad, x.grad]

    compare(run)


@on_ranks(2)
def test_inference_mode(axis: Any) -> None:
    with torch.inference_mode():
        q, bias, ids = (torch.arange(n).double().sin() for n in (B * H * 8 * D, 16, 16))
        q = q.view(B, H, 8, D)

        def run(kernel: str) -> list[torch.Tensor]:
            mask = create_block_mask(lambda b, h, i, j: ids[i] * ids[j] >= 0, None, None, 16, 16)
            score_mod = lambda score, b, h, i, j: score + bias[i - j] * bias[j]  # noqa: E731
            return [flex_attention(q, q, q, score_mod, mask, mesh=axis, kernel=kernel)]

        compare(run)


def test_tables_of_inference_tensors_are_made_again() -> None:
    """Such tensors do not tell of writes."""
    cover = Pairs(Mask(causal=False), ROWS, ROWS)
    with torch.inference_mode():
        allow = torch.ones(S, dtype=torch.bool)
        function, captured = trace("mask_mod", lambda b, h, i, j: allow[j + 0 * 3], torch.zeros(1))
        for _ in range(2):
            check_tables(cover, Scores(1.0, mask_mod=function, captured=captured))
            allow[:200] = False


@on_ranks(2)
def test_functions_of_vectors_are_refused(axis: Any) -> None:
    q, u = torch.randn(1, 2, 4, 4).double(), torch.randn(8, 3).double()
    with on_the_cpu(), refused("kernel='flex' lacks scores with vectors in functions", UnsupportedError):
        score_mod = lambda score, b, h, i, j: score + (u[i] * u[j]).sum()  # noqa: E731
        flex_attention(q, q, q, score_mod, mesh=axis, kernel="flex")


@pytest.mark.skipif(which("g++") is None, reason="Inductor compiles for CPUs by g++")
@pytest.mark.full
def test_one_tensor_given_twice_is_compiled_as_two(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As keys that are the values too, in a first call; later ones of the same shape have others."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    x, y = torch.arange(4.0), torch.arange(4.0) + 1
    compiled = flex_programs.compiled_of(lambda x, y: x - 2 * y, (x, x))
    assert torch.equal(compiled(x, x), -x) and torch.equal(compiled(x, y), x - 2 * y)


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
    with pytest.raises(ValueError, match="something else"):
        flex_programs.with_fewer_stages(mock.Mock(side_effect=[ValueError("something else")]), None)


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


EIGHT, WIDE = torch.zeros(8), torch.zeros(15)


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
            whole, slopes = [torch.randn(B, heads, size, D).double() for heads in (H, K, K)], torch.rand(H).double()
            options: dict[str, Any] = {"mask": Mask(documents=ids)}
            if kind == "sources":
                seen = lambda b, h, i, j, ids=ids: (ids[i] == ids[j]) & (i >= j)  # noqa: E731
                options = {"mask": Mask(), "block_mask": create_block_mask(seen, None, None, size, size, sequence)}

            def run(kernel: str, options: Any = options, layout: Any = layout, given: Any = (at, whole, slopes)) -> Any:
                at, whole, slopes = given
                q, k, v = (x[:, :, at].clone().requires_grad_() for x in whole)
                slopes = slopes.clone().requires_grad_()
                out = flex_attention(
                    q, k, v, lambda score, b, h, i, j: score - slopes[h] * (i - j),
                    mesh=axis, layout=layout, kernel=kernel, enable_gqa=True, **options,
                )  # fmt: skip
                out.square().sum().backward()
                return [out, q.grad, k.grad, v.grad, slopes.grad]

            compare(run, 1e-10)
            programs.add(len(made))
    assert programs <= ({4, 7} if kind == "sources" else {3, 6})
