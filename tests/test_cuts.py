"""How a call is cut: heads into chunks, equal to the bit; local tiles of the backward around its stages."""

from __future__ import annotations

from unittest import mock

import pytest
import torch
from cases import LAYOUTS
from checks import GQA, Case, band_pairs, parity_on_ranks, report
from dense import make_qkv
from ranks import mesh
from recording import recording
from torch import Tensor

import cp_mesh
from cp_mesh import ArgumentError, Mask, ZigZag, plan
from cp_mesh.masks import CAUSAL, FULL, Band
from cp_mesh.schedule import Tile

B, H, K, S, D, E = 2, 8, 4, 26, 6, 4


def local_inputs(rank: int, name: str, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    rows = LAYOUTS[name](S).positions(S, 2, rank)
    return [x[:, :, rows].requires_grad_() for x in make_qkv(B, H, K, S, D, E, dtype=dtype)]


def chunked(rank: int, name: str, chunks: list[int | None]) -> list[tuple[list[Tensor], list[int]]]:
    """out, lse, dq, dk, dv, and the bytes of every message, by number of chunks."""
    axis, results = mesh((2,), ("cp",)), []
    for num_chunks in chunks:
        q, k, v, dout = local_inputs(rank, name)
        with recording(axis) as notes:
            out, lse = cp_mesh.attention(
                q, k, v, mesh=axis, layout=LAYOUTS[name](S), seq_len=S, head_chunks=num_chunks, return_lse=True
            )
            grads = torch.autograd.grad((out, lse), (q, k, v), (dout, lse.detach()))
        assert not notes.problems, notes.problems
        assert all(x.is_contiguous() for x in (out, lse, *grads))
        results.append(([out.detach(), lse.detach(), *grads], [sent.bytes_received for sent in notes.sent]))
    return results


@pytest.mark.parametrize("name", LAYOUTS)
def test_results_are_equal_to_the_bit(pool, name):
    for results in pool(2).run(chunked, name, [1, 2, 4, None]):
        whole, bytes_of_whole = results[0]
        for (got, received), num_chunks in zip(results, (1, 2, 4, 1), strict=True):
            assert all(torch.equal(a, b) for a, b in zip(got, whole, strict=True))
            assert len(received) == num_chunks * len(bytes_of_whole)  # the option is obeyed
            assert sum(received) == sum(bytes_of_whole) and max(received) * num_chunks == max(bytes_of_whole)


def test_chunks_keep_the_sequence_of_a_chunk_within_the_budget():
    q = torch.empty(1, 8, 64, 16, dtype=torch.bfloat16)
    k = torch.empty(1, 4, 64, 16, dtype=torch.bfloat16)
    total = 128 * 4 * 32 * 2  # bytes of K and V of 128 tokens
    for budget, wanted in ((total, 1), (total - 1, 2), (total // 2, 2), (total // 2 - 1, 4), (1, 4)):
        with mock.patch.object(plan, "CHUNK_BYTES", budget):
            assert plan._head_chunks(0, q, k, k, 128) == wanted
    assert plan._head_chunks(0, q, k, k, 128) == 1
    assert plan._head_chunks(2, q, k, k, 128) == 2


def refused(rank: int) -> list[str]:
    axis, words = mesh((2,), ("cp",)), []
    for head_chunks in (3, 0, 2.0, True):
        q, k, v, _ = local_inputs(rank, "zigzag")
        try:
            cp_mesh.attention(q, k, v, mesh=axis, layout=ZigZag(), mask=Mask(), seq_len=S, head_chunks=head_chunks)
        except ArgumentError as error:
            words.append(str(error))
    return words


def test_what_cannot_be_divided_is_refused(pool):
    for words in pool(2).run(refused):
        assert len(words) == 4
        assert words[0] == "head_chunks: expected a divisor of the 4 kv heads, got 3; head_chunks=2"
        assert all(word.startswith("head_chunks: expected a positive int or None, got") for word in words[1:])


def band_count(tile: Tile, pairs: Tensor) -> None:
    rows, keys = slice(*tile.q), slice(*tile.k)
    assert isinstance(tile.cover, Band)
    pairs[rows, keys] += band_pairs(tile.cover, tile.q[1] - tile.q[0], tile.k[1] - tile.k[0]).int()


@pytest.mark.parametrize("cover", (CAUSAL, FULL, Band(0, 3), Band(2, None)), ids=str)
@pytest.mark.parametrize("length", (1, 2, 5, 8, 9))
def test_local_tiles_are_split_without_loss(cover, length):
    """Every pair once, whatever the length; nothing is split where nothing travels."""
    tile, want = Tile((3, 3 + length), (2, 2 + length), cover), torch.zeros(20, 20, dtype=torch.int)
    band_count(tile, want)
    with mock.patch.object(plan, "MIN_SPLIT_ROWS", 2):
        parts = plan.split_local(tile, stages=True)
        assert plan.split_local(tile, stages=False) == [(tile, False)]
    got = torch.zeros_like(want)
    for part, _ in parts:
        band_count(part, got)
        assert part.cover in (CAUSAL, FULL, tile.cover)
        assert part.cover != CAUSAL or part.q[1] - part.q[0] == part.k[1] - part.k[0]
    assert torch.equal(got, want)
    assert any(early for _, early in parts) == (length > 1 and cover in (CAUSAL, FULL))


def split_parity(rank: int) -> list[str]:
    cases = [
        Case(layout, mask, S, heads, kernel=kernel)
        for layout in ("zigzag", "striped", "contiguous")
        for mask in ("causal", "full", "window")
        for S in (24, 31)
        for heads, kernel in ((GQA, "reference"), (GQA, "cpu_flash"))
        if not (kernel == "cpu_flash" and mask == "window")
    ]
    real, early = plan.split_local, []

    def spied(tile: Tile, stages: bool) -> list[tuple[Tile, bool]]:
        parts = real(tile, stages)
        early.extend(part for part, first in parts if first)
        return parts

    with mock.patch.object(plan, "MIN_SPLIT_ROWS", 4), mock.patch.object(plan, "split_local", spied):
        problems = parity_on_ranks(rank, (3,), ("cp",), cases)
    return problems if early else [*problems, "no tile was split"]


def test_backward_with_split_local_tiles(pool):
    report(pool(3).run(split_parity))
