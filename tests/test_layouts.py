"""Layouts place every token once, in the sizes they promise, for any length and any number of ranks."""

import doctest
import inspect
from itertools import accumulate, pairwise

import pytest
import torch
from cases import LAYOUTS
from inside import Index, parse_layout, room

from cp_mesh import ArgumentError, Contiguous, Layout, Striped, ZigZag
from cp_mesh.geometry import Balanced, Joint, Permuted, ZigZagDocuments
from cp_mesh.geometry.layouts import LAYOUTS as BY_NAME
from cp_mesh.geometry.layouts import Run

LENGTHS = (0, 1, 2, 7, 31, 97)
SIZES = range(1, 9)

each_layout = pytest.mark.parametrize("make", LAYOUTS.values(), ids=LAYOUTS)


def test_the_table_holds_every_layout():
    assert {type(make(3)) for make in LAYOUTS.values()} == set(BY_NAME.values())
    assert set(BY_NAME.values()) == {
        c
        for c in vars(room("layouts")).values()
        if isinstance(c, type) and issubclass(c, Layout) and not inspect.isabstract(c)
    }


def test_examples_of_the_docs():
    results = [doctest.testmod(module) for module in (room("layout"), room("tensor_layouts"), room("layouts"))]
    assert all(of_module.attempted >= 2 and not of_module.failed for of_module in results)


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


@pytest.mark.parametrize("name", [name for name in LAYOUTS if name not in ("zigzag documents", "joint")])
def test_multiples_are_shared_equally(name):
    make = LAYOUTS[name]
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


def test_zigzag_documents_are_zigzag_in_each():
    """The order of TransformerEngine's THD format: of each sequence in turn, the slices r and 2 cp - 1 - r."""
    for cp_size in SIZES:
        lens = [2 * cp_size * n for n in (3, 0, 1, 4)]
        edges = [0, *accumulate(lens)]
        layout = ZigZagDocuments(edges)
        assert layout.multiple(cp_size) == 2 * cp_size
        for rank in range(cp_size):
            want = []
            for begin, length in zip(edges, lens, strict=False):
                size = length // (2 * cp_size)
                for i in (rank, 2 * cp_size - 1 - rank):
                    want += range(begin + size * i, begin + size * (i + 1))
            assert layout.positions(edges[-1], cp_size, rank).tolist() == want
            assert len(want) == edges[-1] // cp_size
    assert ZigZagDocuments([0, 31]).permutation(31, 3).equal(ZigZag().permutation(31, 3))


@pytest.mark.parametrize("edges", [[], [1, 4], [0, 4, 3], [[0, 4]], [0.0, 4.0], 4])
def test_zigzag_documents_refuse_what_are_no_cumulative_lengths(edges):
    given = edges if edges == [] else torch.tensor(edges)
    with pytest.raises(ArgumentError, match=r"ZigZagDocuments: expected integers \[num_docs \+ 1\].*from_cu_seqlens"):
        ZigZagDocuments(given)


@pytest.mark.parametrize("layout", [Contiguous(), ZigZag(), Striped()])
@pytest.mark.parametrize(
    ("place", "says"),
    [
        ((16, 2, 2), "cp_rank: expected an int of 0 to 1, got 2"),
        ((16, 2, -1), "cp_rank: expected an int of 0 to 1, got -1"),
        ((-16, 2, 0), "seq_len: expected an int of 0 to"),
        ((16, 1.5, 0), "cp_size: expected an int of 1 to"),
        ((16, 2**70, 0), "cp_size: expected an int of 1 to"),
    ],
)
def test_places_that_do_not_exist(layout, place, says):
    for of in (layout.positions, layout.shard_len):
        with pytest.raises(ArgumentError, match=says):
            of(*place)


def test_zigzag_documents_refuse_another_length():
    with pytest.raises(ArgumentError, match=r"ZigZagDocuments: expected seq_len 8, .* cumulative lengths, got 9"):
        ZigZagDocuments([0, 8]).positions(9, 2, 0)


INNER = {
    "lengths alone": (Joint(4, 6), (Contiguous(), Contiguous())),
    "layouts": (Joint((5, Striped()), (7, ZigZag())), (Striped(), ZigZag())),
    "tensors": (
        Joint((4, Permuted([2, 0, 1, 3])), (9, Balanced([[4, 5], [0, 4]])), (3, ZigZagDocuments([0, 2, 3])), 2),
        (Permuted([2, 0, 1, 3]), Balanced([[4, 5], [0, 4]]), ZigZagDocuments([0, 2, 3]), Contiguous()),
    ),
    "empty streams": (Joint(0, (4, Striped()), 0), (Contiguous(), Striped(), Contiguous())),
}


@pytest.mark.parametrize("name", INNER)
def test_joint_shards_are_those_of_the_streams(name):
    """What a rank has when each stream is sharded alone and its parts are concatenated."""
    layout, inner = INNER[name]
    lens = [length for length, _ in layout.streams]
    streams = torch.arange(sum(lens)).split(lens)
    for cp_size in SIZES:
        for rank in range(cp_size):
            parts = [x[of.positions(len(x), cp_size, rank)] for x, of in zip(streams, inner, strict=True)]
            assert layout.positions(sum(lens), cp_size, rank).equal(torch.cat(parts))
    again = parse_layout(layout.spec(), layout.tensor)
    assert again == layout and hash(again) == hash(layout) and (layout.tensor is None) == (name != "tensors")


@pytest.mark.parametrize(
    "streams",
    [
        ("4",),
        (-1,),
        (True,),
        ((4, "zigzag"),),
        ((4, ZigZag),),
        (Joint(4, 4),),
        ((8, Joint(4, 4)),),
        ((4,),),
    ],
)
def test_joint_refuses_what_is_no_stream(streams):
    with pytest.raises(ArgumentError, match=r"Joint: expected a length or \(length, layout\) for .*one by one"):
        Joint(*streams)


def test_joint_refuses_another_length():
    with pytest.raises(ArgumentError, match=r"Joint: expected seq_len 12, the sum of its streams, got 13.*seq_len=12"):
        Joint(4, 8).positions(13, 2, 0)


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
