"""Sums of partial results against softmax and sums in fp64: torch operations, Triton interpreted, Triton on a GPU.

With TRITON_INTERPRET=1 the tests of this file run the Triton kernels on CPU tensors; one test starts that run.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import product
from typing import Any
from unittest import mock

import pytest
import torch
from hopper import Hopper
from inside import inner, make_delta, path_of, room
from interpreted import INTERPRETED, Interpreted, is_that_run
from torch import Tensor

combine = room("combine")
MAX_PIECES, OutputSum, RowSum = inner("combine", "MAX_PIECES", "OutputSum", "RowSum")
copy_together, finish_sums = inner("combine", "copy_together", "finish_sums")

HALF = torch.float16 if INTERPRETED else torch.bfloat16  # numpy, which the interpreter uses, has no bfloat16
DEVICES = ["cpu"] if INTERPRETED else ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
B, H, S = 2, 3, 70

CASES: dict[str, list[tuple[int, int]]] = {  # (begin, number of rows) of pieces
    "none": [],
    "one has all": [(0, 70)],
    "one has some": [(9, 31)],
    "all have all": [(0, 70)] * 3,
    "overlapping": [(0, 40), (17, 53), (3, 5)],
    "disjoint": [(40, 30), (0, 33), (33, 7)],
    "rows that none has": [(5, 20), (50, 11), (10, 40)],
    "empty": [(0, 0), (70, 0), (3, 60), (1, 1), (30, 0)],
    "as many as are held": [(5 * i, 11 + 3 * i) for i in range(MAX_PIECES)],
    "one more than are held": [(3 * i, 20 + i) for i in range(MAX_PIECES + 1)],
    "folded twice": [(7 * i % 50, 20 - i) for i in range(2 * MAX_PIECES + 1)],
}
DTYPES = {  # of pieces, of sums, of the result
    "half": (HALF, torch.float32, HALF),
    "half to float": (HALF, torch.float32, torch.float32),
    "float to half": (torch.float32, torch.float32, HALF),
    "float": (torch.float32, torch.float32, torch.float32),
    "double": (torch.float64, torch.float64, torch.float64),
}
if INTERPRETED:  # half a second per hundred programs
    DTYPES = {name: DTYPES[name] for name in ("half", "float")}
ORDERS: dict[str, tuple[int, int, int]] = {"BHSD": (0, 1, 2), "BSHD": (0, 2, 1), "SBHD": (2, 0, 1)}

each_device = pytest.mark.parametrize("device", DEVICES)
each_case = pytest.mark.parametrize("case", CASES)
each_dtype = pytest.mark.parametrize("dtypes", DTYPES.values(), ids=DTYPES)


@pytest.fixture(autouse=True)
def _interpreted(monkeypatch: pytest.MonkeyPatch) -> None:
    if INTERPRETED:
        monkeypatch.setattr(combine, "fused", lambda dtype, device: dtype != torch.float64)


def in_order(order: str, shape: tuple[int, ...], dtype: torch.dtype, device: str, pad: int = 0) -> Tensor:
    """NaN, of a [B, H, n, D] shape, in memory of this order of dims; rows lie ``pad`` elements further apart."""
    dims = (*ORDERS[order], 3)
    memory = torch.full([shape[dim] + (pad if dim == 3 else 0) for dim in dims], float("nan"), dtype=dtype)
    inverse = [dims.index(dim) for dim in range(4)]
    return memory.to(device).permute(inverse)[..., pad // 2 : pad // 2 + shape[3]]


class Pieces:
    """Random pieces of every kind of strides; checks that nobody writes them."""

    def __init__(self, rows: list[tuple[int, int]], dim: int, dtype: torch.dtype, device: str) -> None:
        self.rows, generator = rows, torch.Generator().manual_seed(len(rows))
        lse_dtype = torch.float64 if dtype == torch.float64 else torch.float32
        self.outs, self.lses = [], []
        for index, (_, n) in enumerate(rows):
            x = torch.randn(B, H, n, dim, generator=generator, dtype=torch.float64)
            lse = 3 * torch.randn(B, H, n, generator=generator, dtype=torch.float64)
            lse[torch.rand(B, H, n, generator=generator) < 0.3] = float("-inf")
            lse[0, 1] = float("-inf")  # rows that no piece has a key for
            x[lse.isinf()] = 0
            if index % 4 == 3:  # a head dim of stride above 1, and an lse with the heads last
                out = torch.empty(B, H, dim, n, dtype=dtype, device=device).transpose(2, 3)
                place = torch.empty(B, n, H, dtype=lse_dtype, device=device).transpose(1, 2)
            else:
                out = in_order(list(ORDERS)[index % 3], x.shape, dtype, device, pad=8 * (index % 2))
                place = torch.empty(B, H, n + index % 3, dtype=lse_dtype, device=device)[..., :n]
            self.outs.append(out.copy_(x))
            self.lses.append(place.copy_(lse))
        self.storages = [x._base if x._base is not None else x for x in (*self.outs, *self.lses)]
        self.copies = [x.clone() for x in self.storages]

    def assert_unchanged(self) -> None:
        for now, before in zip(self.storages, self.copies, strict=True):
            torch.testing.assert_close(now, before, rtol=0, atol=0, equal_nan=True)

    def merged(self, dim: int) -> tuple[Tensor, Tensor]:
        """Out and lse of the formula, in fp64 on the CPU."""
        outs = torch.zeros(len(self.rows) + 1, B, H, S, dim, dtype=torch.float64)
        lses = torch.full((len(self.rows) + 1, B, H, S), float("-inf"), dtype=torch.float64)
        for index, (begin, n) in enumerate(self.rows):
            outs[index, :, :, begin : begin + n] = self.outs[index].cpu()
            lses[index, :, :, begin : begin + n] = self.lses[index].cpu()
        lse = lses.logsumexp(0)
        weights = torch.where(lse.isinf(), 0.0, (lses - lse).exp())
        return (weights[..., None] * outs).sum(0), lse

    def summed(self, dim: int) -> Tensor:
        total = torch.zeros(B, H, S, dim, dtype=torch.float64)
        for (begin, n), x in zip(self.rows, self.outs, strict=True):
            total[:, :, begin : begin + n] += x.cpu().double()
        return total


def merge(
    pieces: Pieces, dim: int, sums: torch.dtype, like: Tensor, dtype: torch.dtype, sinks: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    total = OutputSum((B, H, S, dim), sums, like.device)
    for (begin, _), out, lse in zip(pieces.rows, pieces.outs, pieces.lses, strict=True):
        total.add(begin, out, lse)
    return total.finish(like, dtype, None, sinks)


def assert_rounded_once(got: Tensor, want: Tensor, sums: torch.dtype) -> None:
    """Half a unit in the last place of got's dtype, and the rounding errors of 17 terms."""
    half_unit = 0 if got.dtype == sums else torch.finfo(got.dtype).eps / 2
    got, finite = got.cpu().double(), want.isfinite()
    assert torch.equal(got[~finite], want[~finite])
    allowed = half_unit * want[finite].abs() + 32 * torch.finfo(sums).eps
    assert ((got[finite] - want[finite]).abs() <= allowed).all()


@each_device
@each_dtype
@each_case
@pytest.mark.parametrize("sinks", [False, True], ids=["", "sinks"])
def test_outputs_merge(case: str, sinks: bool, dtypes: tuple[torch.dtype, ...], device: str) -> None:
    """Into the memory order of the queries. Sinks scale outputs once, however many pieces were folded before, and leave
    lse; -inf is no sink, and rows without keys stay 0."""
    dtype, sums, result = dtypes
    dim = 5 if sinks else 80
    pieces, order = Pieces(CASES[case], dim, dtype, device), list(ORDERS)[len(case) % 3]
    logits = torch.tensor([-2.0, 1.5, -math.inf], dtype=sums) if sinks else None
    like = in_order(order, (B, H, S, 7), result, device, pad=6 * sinks)
    out, lse = merge(pieces, dim, sums, like, result, None if logits is None else logits.to(device))
    want_out, want_lse = pieces.merged(dim)
    if logits is not None:
        want_out *= 1 / (1 + (logits.double()[:, None] - want_lse.nan_to_num(neginf=0.0)).exp())[..., None]
    assert out.dtype == result and lse.dtype == sums and lse.is_contiguous()
    assert_rounded_once(out, want_out, sums)
    assert_rounded_once(lse, want_lse, sums)
    assert (out[lse.isinf()] == 0).all() and out.stride() == in_order(order, out.shape, result, device).stride()
    pieces.assert_unchanged()


@each_device
@each_dtype
@each_case
@pytest.mark.parametrize("dim", [5, 80])
def test_rows_sum(case: str, dim: int, dtypes: tuple[torch.dtype, ...], device: str) -> None:
    """Into part of a packed buffer, whose other part is left alone."""
    dtype, sums, result = dtypes
    pieces = Pieces(CASES[case], dim, dtype, device)
    into = in_order(list(ORDERS)[len(case) % 3], (B, H, S, dim), result, device, pad=16)
    total = RowSum((B, H, S, dim), sums, device)
    for (begin, _), x in zip(pieces.rows, pieces.outs, strict=True):
        total.add(begin, x)
    assert total.finish(into) is into
    assert_rounded_once(into, pieces.summed(dim), sums)
    assert into._base.isnan().sum() == B * H * S * 16
    pieces.assert_unchanged()


@each_device
@each_dtype
def test_several_sums_at_once(dtypes: tuple[torch.dtype, ...], device: str) -> None:
    """As one by one, to the bit: other heads, head dims, lengths, orders and numbers of pieces beside each other."""
    dtype, sums, result = dtypes
    together, alone = [], []
    for i, case in enumerate(CASES):
        pieces, dim = Pieces(CASES[case], (5, 80, 16)[i % 3], dtype, device), (5, 80, 16)[i % 3]
        heads, length = 1 + i % H, S + 7 * (i % 4)
        total = RowSum((B, heads, length, dim), sums, device)
        for (begin, _), x in zip(pieces.rows, pieces.outs, strict=True):
            total.add(begin + i % 3, x[:, :heads, : length - begin - i % 3])
        into = [in_order(list(ORDERS)[i % 3], (B, heads, length, dim), result, device, pad=16) for _ in range(2)]
        together.append((total, into[0]))
        alone.append(total.finish(into[1]))
    finish_sums(together)
    for (_, into), one in zip(together, alone, strict=True):
        assert torch.equal(into, one)
        assert into._base.isnan().sum() == into.numel() // into.shape[3] * 16


@each_device
@pytest.mark.parametrize("dtype", (torch.float32, HALF, torch.float64))
def test_copies_together(dtype: torch.dtype, device: str) -> None:
    """Every value of rows that lie apart, into rows side by side; nothing beside them is written."""
    generator = torch.Generator(device).manual_seed(0)
    sources = [torch.randn(B, S, H, 2 * dim, generator=generator, device=device).to(dtype) for dim in (16, 8)]
    sources = [x.transpose(1, 2)[..., ::2] for x in sources]
    buffer = torch.full((S, B * H * 24 + 5), 7.0, dtype=dtype, device=device)
    widths = [B * H * dim for dim in (16, 8)]
    *parts, rest = buffer.split([*widths, 5], 1)
    places = [x.view(S, B, H, -1).permute(1, 2, 0, 3) for x in parts]
    copy_together(list(zip(sources, places, strict=True)))
    assert all(torch.equal(x, place) for x, place in zip(sources, places, strict=True)) and (rest == 7).all()


@each_device
def test_a_single_piece_is_the_result(device: str) -> None:
    """If its memory is in the order of the result; rows of one piece beside others are not changed."""
    piece = in_order("BSHD", (B, H, S, 5), HALF, device).fill_(0.7)
    lse = torch.full((B, H, S), 1000.1, device=device)
    total = OutputSum((B, H, S, 5), torch.float32, device)
    total.add(0, piece, lse)
    same, same_lse = total.finish(in_order("BSHD", (B, H, S, 7), HALF, device, pad=2), HALF)
    assert same is piece and same_lse is lse
    wider, _ = total.finish(piece, torch.float32)
    assert wider.dtype == torch.float32 and wider.stride() == piece.stride() and torch.equal(wider, piece.float())
    other, _ = total.finish(in_order("BHSD", (B, H, S, 7), HALF, device), HALF)
    assert other.is_contiguous() and torch.equal(other, piece)
    pieces = Pieces(CASES["disjoint"], 80, torch.float32, device)
    like = in_order("BHSD", (B, H, S, 80), torch.float32, device)
    for whole, parts in zip(
        merge(pieces, 80, torch.float32, like, torch.float32), (pieces.outs, pieces.lses), strict=True
    ):
        for (begin, n), part in zip(pieces.rows, parts, strict=True):
            assert torch.equal(whole[:, :, begin : begin + n], part)


def test_a_lone_piece_that_is_the_result_is_not_copied() -> None:
    """It has all rows, the dtype and the memory order of the result; strides of dims of one element do not matter."""
    like = torch.empty(1, 6, 2, 8, dtype=HALF).transpose(1, 2)
    exact = torch.empty_like(like)
    others = [exact.float(), exact.contiguous(), torch.empty(1, 6, 2, 16, dtype=HALF)[..., :8].transpose(1, 2)]
    for pieces, is_result in (
        ([exact], True),
        ([exact.as_strided(like.shape, (7, *like.stride()[1:]))], True),
        *(([x], False) for x in others),
        ([exact[:, :, :4]], False),
        ([exact, exact], False),
        ([], False),
    ):
        total = RowSum(like.shape, torch.float32, "cpu")
        for x in pieces:
            total.add(0, x.fill_(2))
        into = total.ready(like)
        assert total.finish(into) is into and (into is (pieces or [None])[0]) == is_result
        assert into.dtype == HALF and into.stride()[1:] == like.stride()[1:]
        assert into[0, 0, :, 0].tolist() == [2.0 * len(pieces)] * 4 + [2.0 * sum(x.shape[2] == 6 for x in pieces)] * 2


@each_device
@pytest.mark.parametrize("sums", [torch.float32, torch.float64])
def test_merge_row_by_row(sums: torch.dtype, device: str) -> None:
    """Both, one, the other, none, and lse whose exponential overflows or vanishes."""
    inf, rows = float("inf"), {}
    rows["lse"] = [[0.0, -inf, 1.5, -inf, 900.0, -900.0, 1e3], [0.5, 2.0, -inf, -inf, 901.0, -901.0, -3e3]]
    rows["out"] = [[1.0, 0.0, 3.0, 0.0, 5.0, 6.0, 9.0], [2.0, 4.0, 0.0, 0.0, 7.0, 8.0, 2.0]]
    total = OutputSum((1, 1, 7, 1), sums, device)
    for out, lse in zip(rows["out"], rows["lse"], strict=True):
        total.add(0, torch.tensor(out, device=device).view(1, 1, 7, 1), torch.tensor(lse, device=device).view(1, 1, 7))
    out, lse = total.finish(torch.empty(1, 1, 7, 1, device=device), sums)
    weights = [1 / (1 + math.exp(-0.5)), 1.0, 0.0, 0.0, 1 / (1 + math.exp(-1)), 1 / (1 + math.exp(1)), 0.0]
    want = [x + w * (y - x) for w, x, y in zip(weights, *rows["out"], strict=True)]
    of_lse = [math.log1p(math.exp(0.5)), 2.0, 1.5, -inf, 900 + math.log1p(math.e), -901 + math.log1p(math.e), 1e3]
    tolerance = {"rtol": 8 * torch.finfo(sums).eps, "atol": 0.0}
    torch.testing.assert_close(out.flatten().cpu(), torch.tensor(want, dtype=sums), **tolerance)
    torch.testing.assert_close(lse.flatten().cpu(), torch.tensor(of_lse, dtype=sums), **tolerance)


@each_device
@pytest.mark.parametrize("before", [0, MAX_PIECES - 1])
def test_pieces_are_summed_in_the_order_of_adding(before: int, device: str) -> None:
    for parts, want in (((1e8, 1.0, -1e8), 0.0), ((1e8, -1e8, 1.0), 1.0)):
        total = RowSum((1, 1, 3, 8), torch.float32, device)
        for part in (*[0.0] * before, *parts):
            total.add(0, torch.full((1, 1, 3, 8), part, device=device))
        assert (total.finish(torch.empty(1, 1, 3, 8, device=device)) == want).all()


@each_device
@pytest.mark.unpoisoned  # reserves gigabytes, of which a few pages are touched
def test_offsets_beyond_31_bits(device: str) -> None:
    row = 2**30 + 16

    def far() -> Tensor:
        return torch.empty(2 * row + 8, dtype=HALF, device=device).as_strided((1, 1, 3, 8), (row, row, row, 1))

    x, out, into = far().fill_(2), far(), far()
    like = torch.empty(1, 1, 3, 8, device=device)
    outputs, rows = OutputSum((1, 1, 3, 8), torch.float32, device), RowSum((1, 1, 3, 8), torch.float32, device)
    for begin in (0, 1):
        piece = x[:, :, begin:]
        outputs.add(begin, piece, torch.zeros(piece.shape[:3], device=device))
        rows.add(begin, piece)
    assert (outputs.finish(like, HALF, (out, torch.empty(1, 1, 3, device=device)))[0] == 2).all()
    assert rows.finish(into)[0, 0, :, 0].tolist() == [2, 4, 4]


@each_device
@each_dtype
@pytest.mark.parametrize("orders", list(product(ORDERS, ORDERS)), ids="-".join)
@pytest.mark.parametrize("dim", [5, 80])
def test_delta(dim: int, orders: tuple[str, str], dtypes: tuple[torch.dtype, ...], device: str) -> None:
    """Factors of other strides, and of two dtypes; a gradient of lse with the heads last."""
    generator = torch.Generator().manual_seed(dim)
    drawn = [torch.randn(B, H, S, dim, generator=generator, dtype=torch.float64) for _ in range(2)]
    pads = zip(orders, dtypes[::2], (6, 0), strict=True)
    a, b = (
        in_order(order, x.shape, dtype, device, n).copy_(x) for (order, dtype, n), x in zip(pads, drawn, strict=True)
    )
    dlse = torch.randn(B, S, H, generator=generator, dtype=dtypes[1]).to(device).transpose(1, 2)
    products = a.cpu().double() * b.cpu().double()
    allowed = 8 * torch.finfo(dtypes[1]).eps * (products.abs().sum(-1) + dlse.cpu().abs())
    for given in (None, dlse):
        got = make_delta(a, b, given)
        want = products.sum(-1) - (0 if given is None else given.cpu().double())
        assert got.dtype == dtypes[1] and got.shape == (B, H, S) and got.is_contiguous()
        assert ((got.cpu() - want).abs() <= allowed).all()


@each_device
@pytest.mark.parametrize("sums", (torch.float32, torch.float64))
def test_which_route_is_taken(sums: torch.dtype, device: str) -> None:
    """One launch for all pieces where sums are fp32 and the device has Triton; none elsewhere."""
    route = pytest.importorskip(path_of("combine_triton"), exc_type=ImportError)
    pieces, into = Pieces(CASES["overlapping"], 5, torch.float32, device), torch.empty(B, H, S, 5, device=device)
    launches = [getattr(route, name) for name in ("merge_pieces", "sum_pieces", "row_dots")]
    with mock.patch.multiple(route, **{x.__name__: mock.Mock(wraps=x) for x in launches}):
        merge(pieces, 5, sums, into, torch.float32)
        total = RowSum((B, H, S, 5), sums, device)
        for (begin, _), x in zip(pieces.rows, pieces.outs, strict=True):
            total.add(begin, x)
        total.finish(into)
        make_delta(*torch.ones(2, B, H, S, 5, dtype=sums, device=device))
        counts = [getattr(route, x.__name__).call_count for x in launches]
    assert counts == [int(sums == torch.float32 and (INTERPRETED or device == "cuda"))] * 3


@pytest.mark.nightly("interpreted")
@is_that_run
def test_triton_interpreted(interpreted: Interpreted) -> None:
    """The tests above, on CPU tensors, by the Triton kernels."""
    assert interpreted(__file__) > 2 * 2 * 2 * len(CASES)


@pytest.mark.skipif(INTERPRETED, reason="interpreted kernels are not compiled")
@pytest.mark.parametrize(
    ("count", "dim"),
    [(2, 128), *(pytest.param(MAX_PIECES, dim, marks=pytest.mark.full) for dim in (128, 256, 80))],
)
@pytest.mark.parametrize("kernel", ["merge_kernel", "merge_kernel with sinks", "sum_kernel", "dots_kernel"])
@pytest.mark.full
def test_compiles_without_spills(kernel: str, count: int, dim: int, hopper: Hopper) -> None:
    combine_triton = room("combine_triton")

    def empty(num_rows: int) -> Tensor:
        return torch.empty(1, num_rows, 8, dim, dtype=torch.bfloat16).transpose(1, 2)

    pieces = [(7 * i, empty(100 + i), torch.empty(1, 8, 100 + i)) for i in range(count)]

    def launch() -> None:
        if kernel == "dots_kernel":
            combine_triton.row_dots(empty(200), empty(200), None)
        elif kernel == "sum_kernel":
            rows = [piece[:2] for piece in pieces]
            combine_triton.sum_pieces([(rows, empty(200)), (rows[:2], empty(200)), (rows[:2], empty(200))])
        else:
            sinks = torch.empty(8) if "sinks" in kernel else None
            combine_triton.merge_pieces(pieces, empty(200), torch.empty(1, 8, 200), sinks)

    done = hopper(launch, combine_triton)
    ((compiled,),) = done.kernels.values()
    ptx = compiled.asm["ptx"]
    assert done.spills == [0], done.log
    # All of bf16 moves 16 bytes at a time: 128 threads cover 4096 elements with four loads each.
    # The place for an fp32 sum of earlier pieces, of the larger kernels, takes twice as many.
    places = count + 2 * (count > 2)
    num_read, num_written = {"dots_kernel": (2, 0), "sum_kernel": (3 * places, 3)}.get(kernel, (places, 1))
    assert len(re.findall(r"ld\.global[.\w]*\.v4\.b32", ptx)) == 4 * num_read
    assert len(re.findall(r"st\.global[.\w]*\.v4\.b32", ptx)) == 4 * num_written
    assert not re.search(r"(ld|st)\.global[.\w]*b16", ptx)


@pytest.mark.gpu
def test_a_launch_is_chosen_by_all_that_was_compiled_for() -> None:
    """Pieces of the same lengths, but of other strides, dtypes and alignments, after one another and again."""
    for _ in range(2):
        for dtype, order, shift in product((torch.bfloat16, torch.float32), ORDERS, (0, 1, 8)):
            memory = torch.randn(2, 2 * 3 * 96 * 64 + shift, device="cuda").to(dtype)[:, shift:]
            xs = [x.view([(2, 3, 96)[dim] for dim in ORDERS[order]] + [64]) for x in memory]
            xs = [x.permute(*(ORDERS[order].index(dim) for dim in range(3)), 3) for x in xs]
            lses = list(torch.randn(2, 2, 3, 96, device="cuda"))
            total, rows = OutputSum(xs[0].shape, torch.float32, "cuda"), RowSum(xs[0].shape, torch.float32, "cuda")
            for x, lse in zip(xs, lses, strict=True):
                total.add(0, x, lse)
                rows.add(0, x)
            into = torch.empty_like(memory[0]).view_as(xs[0]) if shift else torch.empty_like(xs[0])
            want = (xs[0].double() + xs[1].double()).to(dtype)
            assert torch.equal(rows.finish(into), want), (dtype, order, shift)
            out, lse = total.finish(xs[0], torch.float32)
            weights = torch.stack(lses).double().softmax(0)[..., None]
            close = (out - weights[0] * xs[0].double() - weights[1] * xs[1].double()).abs().max()
            assert close < 1e-5, (dtype, order, shift, close)
            assert torch.allclose(lse, torch.stack(lses).logsumexp(0), atol=1e-5)
            got = make_delta(xs[0], xs[1])
            assert (got - (xs[0].double() * xs[1].double()).sum(-1)).abs().max() < 1e-4


@pytest.mark.parametrize("current", [-1, 3])
def test_a_launch_enters_the_device_of_its_tensors(current: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first launch compiles, later ones run what was compiled, whichever device is current."""
    combine_triton, done = pytest.importorskip(path_of("combine_triton")), list[str]()

    class Compiled:
        def __getitem__(self, grid: Any) -> Any:
            return lambda *args, stream: done.append("run")

    @contextmanager
    def entered(x: Tensor) -> Iterator[None]:
        done.append("enter")
        yield
        done.append("leave")

    kernel = mock.MagicMock(
        __getitem__=lambda self, grid: lambda *args, num_warps: done.append("compile") or Compiled()
    )
    for where, name, double in (
        (combine_triton, "CompiledKernel", Compiled), (combine_triton, "raw_stream", int),
        (combine_triton, "dots_kernel", kernel), (torch.cuda, "current_device", lambda: current),
        (torch.cuda, "device_of", entered),
    ):  # fmt: skip
        monkeypatch.setattr(where, name, double)
    a, b = torch.zeros(2, 1, 3, 40 + current, 8)
    for _ in range(3):
        combine_triton.row_dots(a, b, None)
    assert done == ["enter", "compile", "leave", *(["run"] if current == -1 else ["enter", "run", "leave"]) * 2]


@pytest.mark.gpu
def test_other_lengths_compile_nothing() -> None:
    triton = pytest.importorskip("triton")
    compiled = []

    def total(lengths: list[int]) -> None:
        shape = (2, 3, 200, 64)
        outputs, rows = OutputSum(shape, torch.float32, "cuda"), RowSum(shape, torch.float32, "cuda")
        for begin, length in enumerate(lengths):
            x = torch.zeros(2, 3, length, 64, dtype=HALF, device="cuda")
            outputs.add(begin, x, torch.zeros(2, 3, length, device="cuda"))
            rows.add(begin, x)
        outputs.finish(torch.empty(shape, device="cuda"), HALF)
        rows.finish(torch.empty(shape, dtype=HALF, device="cuda"))

    total([33, 70, 32])
    with triton.knobs.runtime.scope():
        triton.knobs.runtime.jit_cache_hook = lambda **what: compiled.append(what["repr"])
        total([1, 160, 17])
        total([1, 160, 17, 20])
    assert not compiled
