"""Masks of flex that were made for a sequence: sources that mask_mod hides do not travel. Results: `test_flex.py`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import product
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from cases import LAYOUTS, gap
from checks import TOLERANCE
from dense import make_qkv
from flex_uses import ALL, PARTS, expected, mask_of
from inside import ScalarFunction, inner, room, trace
from ranks import mesh, on_ranks, refused
from recording import Sent, recording
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard

from cp_mesh import (
    ArgumentError,
    ContextParallel,
    Contiguous,
    Mask,
    RankMismatchError,
    ShardedSequence,
    UnsupportedError,
    ZigZag,
    flex_attention,
    parallelize,
)
from cp_mesh.flex import create_block_mask

passes, sources = room("passes"), room("rank_mask")
parse_sources, say_sources = inner("survey", "parse_sources", "say_sources")

B, H, K, D, E, S = 2, 4, 2, 5, 4, 12
ROW = B * K * (D + E)
A, U = ArgumentError, UnsupportedError
MaskMod = Callable[..., Tensor]


class Core(nn.Module):
    def forward(self, q: Tensor, k: Tensor, v: Tensor, block_mask: Any) -> Tensor:
        return flex_attention(q, k, v, block_mask=block_mask, enable_gqa=True)


def documents(ids: Tensor) -> MaskMod:
    return lambda b, h, i, j: (ids[i] == ids[j]) & (i >= j)


def moved(
    length: int, method: str = "ring", beside: Mask = ALL, is_known: bool = True, in_core: bool = False
) -> list[Sent]:
    """What this rank sends and receives for documents of a length, of 24 tokens, contiguous."""
    axis, S = mesh((dist.get_world_size(),), ("cp",)), 24
    sequence = ShardedSequence(axis, Contiguous())
    local = [x[:, :, sequence.positions(S)].requires_grad_() for x in make_qkv(B, H, K, S, D, E)[:3]]
    mask_mod = documents(torch.arange(S) // length)
    block_mask = create_block_mask(mask_mod, B, H, S, S, sequence if is_known else None)
    options = {"method": method} | ({"ulysses_degree": 2} if method == "hybrid" else {})
    with recording(axis, options.get("ulysses_degree")) as notes:
        if in_core:
            core = parallelize(Core(), axis, {"": ContextParallel(sequence, mask=beside, **options)})
            core(*local, block_mask).sum().backward()
        else:
            given = {"mesh": axis, "layout": Contiguous(), "mask": beside, "enable_gqa": True}
            flex_attention(*local, None, block_mask, **options, **given).sum().backward()
    assert not notes.problems, notes.problems
    return notes.sent


@pytest.mark.parametrize("in_core", (False, True))
@on_ranks(3)
def test_what_travels_by_hand(rank: int, in_core: bool) -> None:
    """8 rows on each of 3 ranks: fetched in the forward, fetched again and delivered in the backward."""

    def rows(*given: Any) -> list[int]:
        return [sum(sent.origin) // ROW for sent in moved(*given, in_core)]

    assert rows(8, "ring", ALL, True) == []
    assert rows(8, "ring", ALL, False) == [8] * 6
    # of 10 tokens: a document lies across each edge of a shard, and none across both
    for method in ("ring", "all_gather"):
        assert rows(10, method, ALL, True) == [[0, 0, 8], [8, 8, 8], [8, 8, 0]][rank]
    if not in_core:  # whose own mask may hide nothing more
        # beside a mask of their own, of which the window leaves 3 rows, and the documents those of one rank
        window = Mask(window=(3, 0))
        assert rows(16, "ring", window, False) == [[0, 0, 3], [3, 3, 3], [3, 3, 0]][rank]
        assert rows(16, "ring", window, True) == [[0, 0, 3], [3, 3, 0], [0, 0, 0]][rank]


@pytest.mark.parametrize("is_known", [False, True])
@on_ranks(4)
def test_what_travels_between_groups(rank: int, is_known: bool) -> None:
    """Of two documents on four ranks nothing goes from half to half, by a hybrid of two; by heads all of them go."""
    sent = moved(12, "hybrid", ALL, is_known)
    across = [each for each in sent if sorted(each.ranks) == [rank % 2, rank % 2 + 2]]
    assert sent and (not across) == is_known
    assert [x.origin for x in moved(12, "ulysses", ALL, is_known)] == [x.origin for x in moved(24, "ulysses")] != []


# --- how it is found
def test_which_sources_are_seen() -> None:
    """As all pairs at once tell, though few are looked at together, and those of a source until one is seen."""
    S, counted, of_pairs, at = 31, list[int](), ScalarFunction.of_pairs, torch.arange(31)

    def counting(self: Any, *args: Any) -> Tensor:
        counted.append((found := of_pairs(self, *args)).numel())
        return found

    layouts = {name: LAYOUTS[name](S) for name in ("contiguous", "zigzag", "striped", "shuffled")}
    with mock.patch.object(sources, "PAIRS", 64), mock.patch.object(ScalarFunction, "of_pairs", counting):
        for layout, mask, size in product(layouts, (*PARTS, "causal", "windows of heads"), (2, 3, 40)):
            use, positions = mask_of(mask), layouts[layout].positions
            tensors = use.tensors(B, H, S)
            function, read = trace("mask_mod", use.make(tensors), torch.empty(0))
            seen = use.dense(tensors, at[:, None], at).expand(B, H, S, S).any(0).any(0)
            for rank in {0, size // 2, size - 1}:
                own, keys = positions(S, size, rank), [positions(S, size, source) for source in range(size)]
                found = sources._seen(function, read, function.sizes(B, H), own, keys)
                assert found == [bool(seen[own][:, x].any()) for x in keys], (layout, mask, size, rank)
        assert max(counted) <= 64
        counted.clear()
        function, read = trace("mask_mod", lambda b, h, i, j: i >= 0, torch.empty(0))
        sources._seen(function, read, (1, 1), torch.arange(16), [*torch.arange(48).split(16)])
        assert counted == [64] * 3


@on_ranks(2)
def test_numbers_are_read_as_calls_read_them(rank: int, axis: Any) -> None:
    """Whether calls are those without a sequence, by dtype, where products see other pairs in another dtype."""
    S, tenth = 24, torch.full((24,), 0.1)
    sequence, low = ShardedSequence(axis, Contiguous()), tenth.bfloat16()
    masks = (
        lambda b, h, i, j: ((tenth[i] * 10.0 > 1.0) | (i // 12 == j // 12)) & (i >= j),  # in float32
        lambda b, h, i, j: ((tenth[i] * 10.0 <= 1.0) | (i // 12 == j // 12)) & (i >= j),
        lambda b, h, i, j: ((low[i] * 10.0 > 1.0) | (i // 12 == j // 12)) & (i >= j),
    )
    for dtype in (torch.float32, torch.float64):
        local = [x[:, :, sequence.positions(S)].to(dtype) for x in make_qkv(B, H, H, S, D)[:3]]
        outs = [
            [
                flex_attention(*local, None, create_block_mask(x, B, H, S, S, of), mesh=axis, layout=Contiguous())
                for of in (sequence, None)
            ]
            for x in masks
        ]
        assert not torch.equal(outs[0][1], outs[1][1]) or rank == 0  # they do differ
        assert all(torch.equal(*pair) for pair in outs)


@pytest.mark.parametrize("size", (1, 3, 9))
def test_tables_are_written(size: int) -> None:
    table = torch.rand(size, size, generator=torch.Generator().manual_seed(size)).numpy() < 0.5
    assert (parse_sources(say_sources(table), size) == table).all()
    assert parse_sources("", size) is None


@on_ranks(2)
def test_cores(axis: Any) -> None:
    for S, of_sequence in ((24, {}), (21, {"length": 21}), (21, {"length": 21, "pad": False})):
        sequence, use = ShardedSequence(axis, ZigZag(), **of_sequence), PARTS["long documents"]
        *qkv, dout = make_qkv(B, H, K, S, D, E)
        want = expected(qkv, dout, None, "none", "long documents")
        local = [sequence.shard(x, dim=2).detach().requires_grad_() for x in qkv]
        core = parallelize(Core(), axis, {"": ContextParallel(sequence, mask=ALL)})
        out = core(*local, create_block_mask(use.make(use.tensors(B, H, S)), None, None, S, S, sequence))
        got = [out, *torch.autograd.grad(out, local, sequence.shard(dout, dim=2))]
        for x, name in zip(got, ("out", "dq", "dk", "dv"), strict=True):
            assert gap(sequence.unshard(x.detach(), dim=2), want[name]) <= TOLERANCE, (S, of_sequence)


# --- refusals
@on_ranks(2)
def test_refusals(axis: Any) -> None:
    sequence, ids, state = ShardedSequence(axis, ZigZag()), torch.arange(S) // 4, {"number": 3, "x": torch.arange(S)}
    q, k, v, _ = (x[:, :, : S // 2] for x in make_qkv(B, H, K, S, D))
    others = dist.new_group([0, 1])

    def made(mask_mod: Any = None, heads: int | None = H, length: int = S, of: Any = sequence) -> Any:
        return create_block_mask(mask_mod or documents(ids), B, heads, length, length, of)

    def after(mask_mod: MaskMod, change: Callable[[], Any]) -> Any:
        block_mask = made(mask_mod)
        change()
        return block_mask

    in_calls: list[tuple[str, Callable[[], Any], dict[str, Any]]] = [
        ("group, layout and length", made, {"layout": Contiguous()}),
        ("group, layout and length", made, {"mesh": others}),
        ("the whole sequence", lambda: made(length=8), {}),
        ("written to since", lambda: after(documents(ids), lambda: ids.add_(1)), {}),
        ("written to since", lambda: after(documents(ids), lambda: ids[:2].fill_(7)), {}),
        ("written to since", lambda: after(
            lambda b, h, i, j: state["x"][i] >= j, lambda: state.update(x=state["x"] + 1)
        ), {}),
        ("written to since", lambda: after(
            lambda b, h, i, j: i - j < state["number"], lambda: state.update(number=4)
        ), {}),
        ("B and H as they were", lambda: made(lambda b, h, i, j: i >= j + h, 1), {}),
    ]  # fmt: skip
    for words, make, options in in_calls:
        block_mask = make()
        with refused(words, A):
            flex_attention(q, k, v, None, block_mask, **{"enable_gqa": True, "mesh": axis} | options)
    with torch.inference_mode():
        inferred = torch.arange(S) + 0
    placed, short = DTensor.from_local(torch.arange(S // 2), axis, [Shard(0)]), torch.arange(S - 1)
    making: list[tuple[type[Exception], str, Callable[[], Any]]] = [
        (A, "a ShardedSequence", lambda: made(of=axis)),
        (A, "H: expected a number", lambda: made(lambda b, h, i, j: i >= h, None)),
        (A, "Q_LEN: expected 15", lambda: made(of=ShardedSequence(axis, ZigZag(), length=15))),
        (U, "plain captured tensors", lambda: made(lambda b, h, i, j: placed[i] >= j)),
        (U, "count writes", lambda: made(lambda b, h, i, j: inferred[i] >= j)),
        (A, "q_idx: expected 12 e", lambda: made(lambda b, h, i, j: short[i] >= j)),
        (A, "make it outside", lambda: made(lambda b, h, i, j: torch.tensor([0, 4, 8] * 4)[i] >= j)),
        (A, "a function of scalars", lambda: made(3)),
        (Exception, "out of", lambda: made(lambda b, h, i, j: ids[i + S] >= j)),
    ]
    for kind, words, make in making:
        with refused(words, kind):
            make()


@pytest.mark.parametrize(
    ("what", "words"),
    [
        ("a function", "the same mask_mod on every cp rank"),
        ("what is read", "the same captured tensor 0 of mask_mod"),
        ("a refusal", "cp rank 1 raised"),
        ("one without sources", "the same sources of block_mask.* cp rank 0: [0-9a-f]+; cp rank 1: all"),
        ("other sources", "the same sources of block_mask on every cp rank"),
    ],
)
@on_ranks(2)
def test_ranks_that_differ(rank: int, axis: Any, what: str, words: str) -> None:
    sequence, ids = ShardedSequence(axis, Contiguous()), torch.arange(S) // (4 + rank * (what == "what is read"))
    number, heads = rank * (what == "a function"), None if what == "a refusal" and rank else H

    def mask_mod(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return (ids[i] - number <= ids[j]) & (i + 0 * h >= j)

    own = ("H: expected a number", A) if heads is None else (words, RankMismatchError)
    q, k, v, _ = (x[:, :, : S // 2] for x in make_qkv(B, H, H, S, D))
    with pytest.raises(own[1], match=own[0]):
        block_mask = create_block_mask(mask_mod, B, heads, S, S, sequence)
        if what == "one without sources" and rank:
            block_mask = create_block_mask(mask_mod, B, H, S, S)
        if what == "other sources" and rank:
            table = say_sources(torch.ones(2, 2).bool().numpy())
            block_mask = replace(block_mask, sources=replace(block_mask.sources, table=table))
        flex_attention(q, k, v, None, block_mask, mesh=axis, layout=Contiguous())


@on_ranks(2)
def test_a_rank_that_fails_later_keeps_nobody_waiting(rank: int, axis: Any) -> None:
    """The second mask of a kind is not compared: its first query of rank 1 reads a row that there is not."""
    sequence, first = ShardedSequence(axis, Contiguous()), torch.arange(S)

    def make(beyond: int) -> None:
        rows = first.clone()
        rows[S // 2] += beyond
        create_block_mask(lambda b, h, i, j: first[rows[i]] >= j, None, None, S, S, sequence)

    make(0)
    told = (IndexError, "") if rank else (RankMismatchError, "(?s)cp rank 1 raised while.*IndexError")
    with pytest.raises(told[0], match=told[1] or None):
        make(3 * S)


@on_ranks(2)
def test_batches_are_no_kinds_of_call(axis: Any) -> None:
    """How many kinds of call are compared, of four batches of documents."""
    sequence = ShardedSequence(axis, Contiguous())
    local = [x[:, :, : S // 2] for x in make_qkv(B, H, H, S, D)[:3]]
    with mock.patch.object(passes, "_what_must_agree", wraps=passes._what_must_agree) as compared:
        tables = set()
        for length in (2, 4, 6, 12):
            block_mask = create_block_mask(documents(torch.arange(S) // length), None, None, S, S, sequence)
            flex_attention(*local, None, block_mask, mesh=sequence.mesh, layout=Contiguous())
            tables.add(block_mask.sources.table)
    assert len(tables) == 2 and compared.call_count == 1
