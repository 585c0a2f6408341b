"""Masks against the oracle that asks pair by pair; `test_blocks.py` has what the schedule makes of them."""

import doctest
import warnings
from dataclasses import replace
from itertools import product

import pytest
import torch
from cases import MASKS, make_mask, pairs
from dense import dense_mask
from inside import Distances, inner, room

from cp_mesh import ArgumentError, Mask, UnsupportedError, batch_mask, document_positions

parse_mask = inner("mask", "parse_mask")

each_mask = pytest.mark.parametrize("name", MASKS)


def everything(S: int) -> torch.Tensor:
    return torch.arange(S)


def test_examples_of_the_docs():
    for module in (room("mask"), room("batch_mask")):
        results = doctest.testmod(module)
        assert results.attempted >= 2 and not results.failed


@each_mask
@pytest.mark.parametrize("S", (0, 1, 2, 7, 31))
def test_allowed_is_the_dense_mask(name, S):
    got = make_mask(name, 2, S).allowed(everything(S), everything(S))
    assert got.dtype == torch.bool and torch.equal(*torch.broadcast_tensors(got, pairs(name, 2, S)))


@each_mask
def test_allowed_takes_any_positions_in_any_order(name):
    want, mask = pairs(name, 2, 13), make_mask(name, 2, 13)
    generator = torch.Generator().manual_seed(0)
    for num_q, num_k in ((13, 13), (1, 5), (4, 0), (0, 3)):
        q = torch.randperm(13, generator=generator)[:num_q]
        k = torch.randperm(13, generator=generator)[:num_k]
        assert torch.equal(*torch.broadcast_tensors(mask.allowed(q, k), want[:, q][:, :, k]))


@each_mask
def test_intervals_of_keys_are_the_mask(name):
    mask, generator = make_mask(name, 2, 13), torch.Generator().manual_seed(0)
    for num_q, num_k in ((13, 13), (1, 5), (4, 0), (0, 3)):
        q, k = (torch.randperm(13, generator=generator)[:num] for num in (num_q, num_k))
        (first, last, k_ids), q_ids = mask.key_intervals(k), mask.document_ids(q)
        got = (q[:, None] >= first[:, None]) & (q[:, None] <= last[:, None])
        if mask.documents is not None:
            got = got & (q_ids[:, :, None] == k_ids[:, None])
        assert torch.equal(got, mask.allowed(q, k)) and {x.dtype for x in (first, last)} == {torch.int32}


def test_every_pair_of_bounds():
    for causal, left, right, prefix, length in product(
        (True, False), (None, 0, 1, 3, 9), (None, 0, 2), (0, 2), (None, 5)
    ):
        if prefix and not causal:
            continue
        options = {"causal": causal, "window": (left, right), "prefix": prefix, "length": length}
        got = Mask(**options).allowed(everything(7), everything(7))
        assert torch.equal(got, dense_mask(7, **options)), options
        first, last, _ = Mask(**options).key_intervals(everything(7))
        assert torch.equal((everything(7)[:, None] >= first) & (everything(7)[:, None] <= last), got[0]), options


@each_mask
def test_specs_round_trip(name):
    mask = make_mask(name, 2, 13)
    again = parse_mask(mask.spec(), mask.documents, mask.key_padding, mask.blocks)
    assert again.spec() == mask.spec()
    assert torch.equal(again.allowed(everything(13), everything(13)), mask.allowed(everything(13), everything(13)))


def test_specs_tell_masks_apart():
    options = [{}, {"causal": False}, {"window": (0, None)}, {"window": (None, 0)}, {"prefix": 1}, {"length": 0}]
    options += [{"window": (1, 11)}, {"window": (11, 1)}, {"window": (1, None), "prefix": 1}, {"length": 1}]
    assert len({Mask(**option).spec() for option in options}) == len(options)


@pytest.mark.parametrize("lo", (None, -3, -1, 0, 1, 3))
@pytest.mark.parametrize("hi", (None, -2, 0, 2, 4))
def test_band_allows_its_pairs(lo, hi):
    for num_q, num_k in product(range(6), range(6)):
        want = [
            [(lo is None or i - j >= lo) and (hi is None or i - j <= hi) for j in range(num_k)] for i in range(num_q)
        ]
        assert Distances(lo, hi).pairs(num_q, num_k).tolist() == want
        band = Distances(lo, hi).band(num_q, num_k)
        assert band.allowed(everything(num_q) + num_k - num_q, everything(num_k)).tolist() == want


@pytest.mark.parametrize(
    ("cu_seqlens", "ids"),
    [([0, 3, 5], [0, 0, 0, 1, 1]), ([0, 1, 1, 2], [0, 2]), ([0, 4], [0] * 4), ([0, 0], []), ([0, 0, 2], [1, 1])],
)
@pytest.mark.parametrize("dtype", (torch.int32, torch.int64))
def test_documents_from_cumulative_lengths(cu_seqlens, ids, dtype):
    mask = Mask.from_cu_seqlens(torch.tensor(cu_seqlens, dtype=dtype), causal=False, window=(2, None))
    assert mask.documents.tolist() == ids and not mask.causal and mask.window == (2, None)
    S = len(ids)
    want = dense_mask(S, causal=False, window=(2, None), documents=[ids])
    assert torch.equal(mask.allowed(everything(S), everything(S)), want)


@pytest.mark.parametrize("dtype", (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64))
def test_ids_of_any_integer_type(dtype):
    ids = [[5, 5, 0, 5]]
    mask = Mask(documents=torch.tensor(ids, dtype=dtype))
    assert torch.equal(mask.allowed(everything(4), everything(4)), dense_mask(4, documents=ids))


def test_tensors_without_a_batch_dim():
    ids, keep = torch.tensor([0, 0, 1]), torch.tensor([True, False, True])
    mask = Mask(documents=ids, key_padding=keep)
    want = dense_mask(3, documents=[ids.tolist()], key_padding=[keep.tolist()])
    assert torch.equal(mask.allowed(everything(3), everything(3)), want)


def test_masks_move_with_their_tensors():
    mask = make_mask("everything", 2, 7)
    moved = mask.to(torch.device("meta"))
    tensors = moved.documents, moved.key_padding, moved.blocks, moved.starts
    assert all(x.is_meta for x in tensors) and moved.spec() == mask.spec()
    assert Mask().to(torch.device("meta")).spec() == Mask().spec()


ids, keep = torch.zeros(1, 3, dtype=torch.int64), torch.ones(1, 3, dtype=torch.bool)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"window": (-1, 0)}, r"window bounds >= 0 .*got \(-1, 0\); use None"),
        ({"window": (None, -1)}, r"window bounds >= 0 .*got \(None, -1\); use None"),
        ({"window": (-1, -1)}, r"window bounds >= 0"),
        ({"window": 4}, r"window=\(left, right\), got 4"),
        ({"window": (1, 2, 3)}, r"window=\(left, right\), got \(1, 2, 3\)"),
        ({"prefix": -1}, r"prefix >= 0 and length >= 0, got -1 and None"),
        ({"length": -2}, r"prefix >= 0 and length >= 0, got 0 and -2"),
        ({"causal": False, "prefix": 1}, r"prefix relaxes causal"),
        ({"documents": ids.float()}, r"integer documents \[B, S\] or \[S\], got torch\.float32 \(1, 3\).*cu_seqlens"),
        ({"documents": ids[None]}, r"integer documents \[B, S\] or \[S\], got torch\.int64 \(1, 1, 3\)"),
        ({"documents": keep}, r"integer documents"),
        (
            {"blocks": ids.float()},
            r"integer blocks \[B, S\] or \[S\], got torch\.float32 \(1, 3\); -1 is a token of no",
        ),
        ({"blocks": [0, 0]}, r"a tensor for blocks, got list"),
        ({"blocks": ids, "causal": False}, r"blocks relax causal"),
        ({"blocks": ids, "window": (4, 0)}, r"window=\(4, 0\); with blocks use window=\(4, None\) as a causal one"),
        ({"key_padding": ids}, r"bool key_padding \[B, S\] or \[S\] \(True = keep\), got torch\.int64"),
        ({"key_padding": keep[None]}, r"bool key_padding"),
    ],
)
def test_masks_that_must_be_refused(options, message):
    with pytest.raises(ArgumentError, match=message):
        Mask(**options)


def test_blocks_begin_where_their_document_does():
    blocks = torch.tensor([[0, 0, -1, -1, 2, 2, 2, 2], [5, 5, 5, 5, 5, 6, 5, -9]], dtype=torch.int8)
    documents = torch.tensor([0, 0, 0, 0, 0, 0, 1, 1])
    assert Mask(blocks=blocks[:1]).starts.tolist() == [[0, 0, 2, 3, 4, 4, 4, 4]]
    assert Mask(blocks=blocks[0, :0]).starts.tolist() == [[]]
    both = Mask(blocks=blocks, documents=documents)
    assert both.starts.tolist() == [[0, 0, 2, 3, 4, 4, 6, 6], [0, 0, 0, 0, 0, 5, 6, 7]]
    assert Mask(blocks=blocks[1], documents=documents - 1).starts.tolist() == both.starts[1:].tolist()  # none sees it


@pytest.mark.parametrize(
    ("documents", "message"),
    [
        (None, r"Mask\.blocks: expected adjacent tokens in each block, got block 5 comes back; give each"),
        (torch.tensor([3, 3, 3, 3, 4, 4, 4, 4]), r"got block 5 comes back in document 4"),
        (torch.tensor([3, 3, 4, 3, 3, 4, -1, -1]), r"got block 5 comes back in document 3"),
    ],
    ids=str,
)
def test_blocks_that_come_back_are_refused(documents, message):
    blocks = torch.tensor([[0, -1, -1, 0, -1, -1, 0, 1], [5, 5, 5, 5, 5, 6, 5, -9]])[1:]
    mask = Mask(blocks=blocks, documents=documents)
    with pytest.raises(UnsupportedError, match=message):
        _ = mask.starts


@pytest.mark.parametrize(
    ("cu_seqlens", "message"),
    [
        (torch.tensor([1, 3]), r"non-decreasing tensor starting at 0"),
        (torch.tensor([0, 3, 2]), r"non-decreasing tensor starting at 0"),
        (torch.tensor([0]), r"integer tensor \[num_docs \+ 1\], got torch\.int64 \(1,\)"),
        (torch.tensor([0.0, 2.0]), r"integer tensor \[num_docs \+ 1\], got torch\.float32 \(2,\)"),
        (torch.tensor([[0, 2]]), r"integer tensor \[num_docs \+ 1\], got torch\.int64 \(1, 2\)"),
    ],
)
def test_cumulative_lengths_that_must_be_refused(cu_seqlens, message):
    with pytest.raises(ArgumentError, match=message):
        Mask.from_cu_seqlens(cu_seqlens)


def test_documents_of_positions() -> None:
    positions = torch.tensor([[0, 1, 2, 0, 1, 5, 6], [0, 1, 2, 3, 4, 5, 6]])
    found = batch_mask(position_ids=positions).documents
    assert found is not None and found.tolist() == [[0, 0, 0, 1, 1, 2, 2], [0] * 7]
    assert batch_mask(position_ids=positions[1:]).documents is None
    assert document_positions(found).tolist() == [[0, 1, 2, 0, 1, 0, 1], [0, 1, 2, 3, 4, 5, 6]]
    assert document_positions(torch.tensor([4, 4, -1, 4])).tolist() == [0, 1, 0, 0]


def test_positions_for_documents_are_warned_of():
    positions = torch.cat([torch.arange(5), torch.arange(7)])
    for given in (positions, torch.stack([positions, torch.arange(12)])):
        with pytest.warns(UserWarning, match="batch_mask"):
            Mask(documents=given)
    ids = batch_mask(position_ids=positions).documents
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for right in (ids, ids + 1, torch.tensor([0, 1, 2, 3, 3, 3, 3, 3]), torch.tensor([0, 1, 2, 0, 1, 1, 0, 2])):
            replace(Mask(documents=right), window=(3, 0))


def test_a_number_of_a_later_release_is_refused():
    """A mask that drops a condition would be another one; a text without the last numbers is an earlier release's."""
    spec = Mask(prefix=3, length=9).spec()
    assert parse_mask(spec.rpartition(",")[0], None, None, None).spec() == Mask(prefix=3).spec()
    with pytest.raises(UnsupportedError, match="2 numbers, got 3"):
        parse_mask(f"{spec},4", None, None, None)
