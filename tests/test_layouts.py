"""Layouts place every token once, in the sizes they promise, for any length and any number of ranks."""

import doctest
from itertools import pairwise

import pytest
import torch
from cases import LAYOUTS

import cp_mesh.layouts
from cp_mesh.errors import ArgumentError
from cp_mesh.layouts import Contiguous, Index, Layout, Permuted, Run, Striped, ZigZag, parse_layout

LENGTHS = (0, 1, 2, 7, 31, 97)
SIZES = range(1, 9)

each_layout = pytest.mark.parametrize("make", LAYOUTS.values(), ids=LAYOUTS)


def test_the_table_holds_every_layout():
    assert {type(make(3)) for make in LAYOUTS.values()} == set(cp_mesh.layouts.LAYOUTS.values())
    assert set(cp_mesh.layouts.LAYOUTS.values()) == {
        c for c in Layout.__subclasses__() if c.__module__ == Layout.__module__
    }


def test_examples_of_the_docs():
    results = doctest.testmod(cp_mesh.layouts)
    assert results.attempted >= 6 and not results.failed


@each_layout
@pytest.mark.parametrize("S", LENGTHS)
def test_every_position_is_held_once(make, S):
    layout = make(S)
    for cp_size in SIZES:
        shards = [layout.positions(S, cp_size, rank) for rank in range(cp_size)]
        assert all(shard.dtype == torch.int64 and shard.device.type == "cpu" for shard in shards)
        assert sorted(torch.cat(shards).tolist()) == list(range(S))
        assert [len(shard) for shard in shards] == [layout.shard_len(S, cp_size, rank) for rank in range(cp_size)]


@each_layout
@pytest.mark.parametrize("S", LENGTHS)
def test_runs_are_the_positions(make, S):
    layout = make(S)
    for cp_size in SIZES:
        for rank in range(cp_size):
            pieces = layout.runs(S, cp_size, rank)
            listed = []
            for piece in pieces:
                assert piece.length > 0
                if isinstance(piece, Run):
                    own = [piece.start + piece.stride * i for i in range(piece.length)]
                    assert piece.last == own[-1]
                else:
                    own = piece.values.tolist()
                assert piece.positions().tolist() == own and piece.bounds() == (min(own), max(own))
                middle = piece.length // 2
                halves = piece.slice(0, middle), piece.slice(middle, piece.length)
                assert [*halves[0].positions().tolist(), *halves[1].positions().tolist()] == own
                listed += own
            assert layout.positions(S, cp_size, rank).tolist() == listed


@each_layout
@pytest.mark.parametrize("S", LENGTHS)
def test_permutation_and_inverse(make, S):
    layout, x = make(S), torch.randn(S)
    for cp_size in SIZES:
        permutation, inverse = layout.permutation(S, cp_size), layout.inverse(S, cp_size)
        assert torch.equal(x[permutation][inverse], x) and torch.equal(x[inverse][permutation], x)
        shards = x[permutation].split([layout.shard_len(S, cp_size, rank) for rank in range(cp_size)])
        for rank, shard in enumerate(shards):
            assert torch.equal(shard, x[layout.positions(S, cp_size, rank)])


@each_layout
def test_multiples_are_shared_equally(make):
    for cp_size in SIZES:
        multiple = make(1).multiple(cp_size)
        for S in (multiple, 3 * multiple):
            lens = {make(S).shard_len(S, cp_size, rank) for rank in range(cp_size)}
            assert lens == {S // cp_size}


@pytest.mark.parametrize("S", LENGTHS)
def test_contiguous_and_permuted_shards_are_those_of_torch_chunk(S):
    for cp_size in SIZES:
        chunks = torch.arange(S).chunk(cp_size) if S else ()
        for rank in range(cp_size):
            want = chunks[rank].tolist() if rank < len(chunks) else []
            assert Contiguous().positions(S, cp_size, rank).tolist() == want
            assert Permuted(range(S)).positions(S, cp_size, rank).tolist() == want


def test_97_over_4_is_cut_as_dtensor_cuts():
    assert [Contiguous().shard_len(97, 4, rank) for rank in range(4)] == [25, 25, 25, 22]


@pytest.mark.parametrize("S", LENGTHS)
def test_zigzag_pairs_a_head_with_its_tail(S):
    for cp_size in SIZES:
        lens = [ZigZag().shard_len(S, cp_size, rank) for rank in range(cp_size)]
        assert max(lens) - min(lens) <= 2
        for rank in range(cp_size):
            own = ZigZag().positions(S, cp_size, rank).tolist()
            assert own == sorted(own)
            others = [p for r in range(rank + 1, cp_size) for p in ZigZag().positions(S, cp_size, r).tolist()]
            heads = [p for p in own if not others or p < min(others)]
            tails = [p for p in own if others and p > max(others)]
            assert len(heads) + len(tails) == len(own)  # outside of all that inner ranks hold
            if S % (2 * cp_size) == 0 and others:
                assert len(heads) == len(tails)


def test_zigzag_is_one_run_where_its_chunks_touch():
    assert [len(ZigZag().runs(24, 3, rank)) for rank in range(3)] == [2, 2, 1]


@pytest.mark.parametrize("S", LENGTHS)
def test_striped_deals_out_tokens_in_turn(S):
    for cp_size in SIZES:
        for rank in range(cp_size):
            assert Striped().positions(S, cp_size, rank).tolist() == list(range(S))[rank::cp_size]


@each_layout
def test_specs_round_trip(make):
    layout = make(7)
    again = parse_layout(layout.spec(), layout.tensor)
    assert again == layout and hash(again) == hash(layout) and again.spec() == layout.spec()


def test_permuted_compares_by_content():
    assert Permuted([1, 0, 2]) == Permuted(torch.tensor([1, 0, 2])) != Permuted([1, 2, 0])
    assert Permuted([1, 0]) != Permuted([1, 0, 2]) and Permuted([0, 1]) != Contiguous()


def test_permuted_keeps_its_own_index():
    index = torch.tensor([2, 0, 1])
    layout = Permuted(index)
    index.zero_()
    assert layout.positions(3, 1, 0).tolist() == [2, 0, 1]
    assert isinstance(layout.runs(3, 1, 0)[0], Index)


@pytest.mark.parametrize("index", [[0, 0], [1, 2], [-1, 0], [[0, 1]], [0, 3, 1]])
def test_permuted_refuses_what_is_no_permutation(index):
    with pytest.raises(ArgumentError, match=r"Permuted: expected a permutation of range\(seq_len\).*torch\.argsort"):
        Permuted(index)


def test_permuted_refuses_another_length():
    with pytest.raises(ArgumentError, match=r"Permuted: expected seq_len 3, the length of its index, got 4"):
        Permuted([2, 0, 1]).positions(4, 2, 0)


def test_layouts_are_frozen_values():
    for left, right in pairwise([Contiguous(), ZigZag(), Striped()]):
        assert left != right and left == type(left)() and hash(left) == hash(type(left)())
    with pytest.raises(AttributeError):
        Permuted([0]).index = [0]  # type: ignore[misc]
