"""Masks of flex that were made for a sequence: sources that mask_mod hides neither travel nor are computed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import product
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from cases import LAYOUTS, gap
from checks import TOLERANCE
from dense import make_qkv
from flex_uses import numbers
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

passes = room("passes")
sources = room("rank_mask")
parse_sources, say_sources = inner("survey", "parse_sources", "say_sources")

B, H, K, D, E = 2, 4, 2, 5, 4
ROW = B * K * (D + E)
ALL = Mask(causal=False)
MaskMod = Callable[..., Tensor]


def documents(ids: Tensor) -> MaskMod:
    return lambda b, h, i, j: (ids[i] == ids[j]) & (i >= j)


def by_rows(ids: Tensor) -> MaskMod:
    return lambda b, h, i, j: ids[b, i] == ids[b, j]


def by_heads(width: Tensor) -> MaskMod:
    return lambda b, h, i, j: (i - j).abs() < width[h]


MASKS: dict[str, Callable[[int], MaskMod]] = {
    "causal": lambda S: lambda b, h, i, j: i >= j,
    "short documents": lambda S: documents(torch.arange(S) // 3),
    "long documents": lambda S: documents(torch.arange(S) // (S // 2)),
    "documents of rows": lambda S: by_rows((torch.arange(S) + 2 * torch.arange(B)[:, None]) // (S // 3)),
    "windows of heads": lambda S: by_heads(1 + 2 * torch.arange(H)),
    "the other half": lambda S: lambda b, h, i, j: (i < S // 2) != (j < S // 2),
    "later ones": lambda S: lambda b, h, i, j: j > i + S // 2,
    "nothing": lambda S: lambda b, h, i, j: (i < 0) & (j < 0),
}
METHODS: dict[str, dict[str, Any]] = {
    "ring": {}, "all_gather": {}, "ulysses": {}, "hybrid": {"ulysses_degree": 2},
}  # fmt: skip


def values_of(mask_mod: MaskMod, S: int) -> Tensor:
    """bool [B, H, S, S]."""
    b, h, i, j = (torch.arange(n).view([-1 if k == d else 1 for k in range(4)]) for d, n in enumerate((B, H, S, S)))
    return mask_mod(b, h, i, j).expand(B, H, S, S)


def dense(q: Tensor, k: Tensor, v: Tensor, table: Tensor, seen: Tensor) -> Tensor:
    S = q.shape[2]
    scores = q @ k.repeat_interleave(H // K, 1).mT * D**-0.5 + table[torch.arange(S)[:, None] - torch.arange(S) + S]
    alone = ~seen.any(-1, keepdim=True)
    weights = scores.masked_fill(~seen & ~alone, -torch.inf).softmax(-1).masked_fill(alone, 0.0)
    return weights @ v.repeat_interleave(H // K, 1)


@dataclass(frozen=True)
class Case:
    mask: str
    layout: str
    method: str = "ring"
    S: int = 21
    beside: Mask = ALL
    sharded: bool = False  # q, k and v are DTensors


def check(case: Case) -> None:
    """This rank's part of a call with a mask of the sequence is that of dense attention."""
    size, rank = dist.get_world_size(), dist.get_rank()
    axis = mesh((size,), ("cp",))
    S, layout, mask_mod = case.S, LAYOUTS[case.layout](case.S), MASKS[case.mask](case.S)
    rows = layout.positions(S, size, rank)
    seen = values_of(mask_mod, S) & case.beside.allowed(torch.arange(S), torch.arange(S))[:, None]
    *qkv, dout = make_qkv(B, H, K, S, D, E)
    whole = [x.clone().requires_grad_() for x in (*qkv, numbers(2 * S))]
    want = dense(*whole, seen)
    want = want, *torch.autograd.grad(want, whole, dout)
    sequence = ShardedSequence(axis, layout, length=S, pad=False)
    local = [x[:, :, rows].clone().requires_grad_() for x in qkv]
    table = numbers(2 * S).requires_grad_()
    given = [DTensor.from_local(x, axis, [Shard(2)]) for x in local] if case.sharded else local
    options = {"method": case.method, "mask": case.beside, "enable_gqa": True, "mesh": axis, "layout": layout}
    options |= METHODS[case.method] | ({} if case.sharded else {"seq_len": S})
    block_mask = create_block_mask(mask_mod, B, H, S, S, sequence)
    out = flex_attention(*given, lambda s, b, h, i, j, t=table, S=S: s + t[i - j + S], block_mask, **options)
    out = out.to_local() if case.sharded else out
    *found, share = torch.autograd.grad(out, [*local, table], dout[:, :, rows])
    dist.all_reduce(share)
    expected = [*(x[:, :, rows] for x in want[:4]), want[4]]
    for i, (x, y) in enumerate(zip((out, *found, share), expected, strict=True)):
        assert gap(x, y) <= TOLERANCE, (case, i)


CASES: dict[int, list[Case]] = {
    2: [Case(mask, ("striped", "joint")[i % 2], ("ulysses", "ring")[i % 2]) for i, mask in enumerate(MASKS)],
    3: [Case(mask, layout, ("ring", "all_gather")[i % 2]) for i, (mask, layout) in enumerate(
        product(MASKS, ("contiguous", "zigzag"))
    )],
    4: [Case("long documents", "contiguous", "hybrid"), Case("later ones", "zigzag", "hybrid")],
}  # fmt: skip
CASES[2] += [Case("causal", "contiguous", S=24, sharded=True)]
CASES[3] += [
    Case("long documents", "contiguous", beside=Mask(window=(4, 0))),
    Case("short documents", "zigzag", beside=Mask(documents=torch.arange(21) // 5)),
]


@pytest.mark.parametrize("cp_size", CASES)
@on_ranks("cp_size", timeout=300.0)
def test_parity(cp_size: int) -> None:
    for case in CASES[cp_size]:
        check(case)


@pytest.mark.full
@pytest.mark.parametrize("cp_size", [2, 3, 4])
@on_ranks("cp_size", timeout=600.0)
def test_every_mask_in_every_layout(cp_size: int) -> None:
    """The methods in turn."""
    methods = {2: ("ring", "ulysses", "all_gather"), 3: ("ring", "all_gather"), 4: tuple(METHODS)}[cp_size]
    layouts = ("contiguous", "zigzag", "striped", "shuffled", "balanced")
    for i, (mask, layout) in enumerate(product(MASKS, layouts)):
        check(Case(mask, layout, methods[i % len(methods)]))


# --- what travels
def moved(
    length: int, method: str = "ring", beside: Mask = ALL, is_known: bool = True, in_core: bool = False
) -> list[Sent]:
    """What this rank sends and receives for documents of a length, of 24 tokens, contiguous."""
    axis, S = mesh((dist.get_world_size(),), ("cp",)), 24
    mask_mod = documents(torch.arange(S) // length)
    sequence = ShardedSequence(axis, Contiguous())
    local = [x[:, :, sequence.positions(S)].requires_grad_() for x in make_qkv(B, H, K, S, D, E)[:3]]
    block_mask = create_block_mask(mask_mod, B, H, S, S, sequence if is_known else None)
    options = {"method": method, **METHODS[method]}
    with recording(axis, 2 if METHODS[method] else None) as notes:
        if in_core:
            core = parallelize(Core(), axis, {"": ContextParallel(sequence, mask=beside, **options)})
            core(*local, block_mask).sum().backward()
        else:
            given = {"mesh": axis, "layout": Contiguous(), "mask": beside, "enable_gqa": True}
            flex_attention(*local, None, block_mask, **options, **given).sum().backward()
    assert not notes.problems, notes.problems
    return notes.sent


class Core(nn.Module):
    def forward(self, q: Tensor, k: Tensor, v: Tensor, block_mask: Any) -> Tensor:
        return flex_attention(q, k, v, block_mask=block_mask, enable_gqa=True)


@pytest.mark.parametrize("in_core", (False, True))
@on_ranks(3)
def test_what_travels_by_hand(rank: int, in_core: bool) -> None:
    """8 rows on each of 3 ranks: fetched in the forward, fetched again and delivered in the backward."""

    def rows(*given: Any) -> list[int]:
        return [sum(sent.origin) // ROW for sent in moved(*given, in_core)]

    assert rows(8, "ring", ALL, True) == []
    assert rows(8, "ring", ALL, False) == [8, 8, 8, 8, 8, 8]
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
    """Of two documents on four ranks nothing goes from half to half, by a hybrid of two."""
    sent = moved(12, "hybrid", ALL, is_known)
    across = [each for each in sent if sorted(each.ranks) == [rank % 2, rank % 2 + 2]]
    assert sent and (not across) == is_known


@on_ranks(2)
def test_what_travels_by_heads() -> None:
    of_known, others = (moved(12, "ulysses", ALL, is_known) for is_known in (True, False))
    assert [x.origin for x in of_known] == [x.origin for x in others] != []


# --- how it is found
def test_which_sources_are_seen() -> None:
    """As all pairs at once tell, though few are looked at together, and those of a source until one is seen."""
    S, counted, of_pairs = 31, list[int](), ScalarFunction.of_pairs

    def counting(self: Any, *args: Any) -> Tensor:
        counted.append((found := of_pairs(self, *args)).numel())
        return found

    layouts = {name: LAYOUTS[name](S) for name in ("contiguous", "zigzag", "striped", "shuffled")}
    with mock.patch.object(sources, "PAIRS", 64), mock.patch.object(ScalarFunction, "of_pairs", counting):
        for (name, layout), (mask, make), size in product(layouts.items(), MASKS.items(), (2, 3, 40)):
            function, read = trace("mask_mod", make(S), torch.empty(0))
            seen = values_of(make(S), S).any(0).any(0)
            for rank in {0, size // 2, size - 1}:
                keys = [layout.positions(S, size, source) for source in range(size)]
                own = layout.positions(S, size, rank)
                found = sources._seen(function, read, function.sizes(B, H), own, keys)
                assert found == [bool(seen[own][:, x].any()) for x in keys], (name, mask, size, rank)
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
    masks = {
        "product of float32": lambda b, h, i, j: ((tenth[i] * 10.0 > 1.0) | (i // 12 == j // 12)) & (i >= j),
        "product of float64": lambda b, h, i, j: ((tenth[i] * 10.0 <= 1.0) | (i // 12 == j // 12)) & (i >= j),
        "product of bfloat16": lambda b, h, i, j: ((low[i] * 10.0 > 1.0) | (i // 12 == j // 12)) & (i >= j),
    }
    found = []
    for dtype in (torch.float32, torch.float64):
        local = [x[:, :, sequence.positions(S)].to(dtype) for x in make_qkv(B, H, H, S, D)[:3]]
        options = {"mesh": axis, "layout": Contiguous()}
        outs = [
            [
                flex_attention(*local, None, create_block_mask(mask_mod, B, H, S, S, of), **options)
                for of in (sequence, None)
            ]
            for mask_mod in masks.values()
        ]
        assert not torch.equal(outs[0][1], outs[1][1]) or rank == 0  # they do differ
        found.append([torch.equal(*pair) for pair in outs])
    assert found == [[True] * 3] * 2


@pytest.mark.parametrize("size", (1, 3, 9))
def test_tables_are_written(size: int) -> None:
    table = torch.rand(size, size, generator=torch.Generator().manual_seed(size)).numpy() < 0.5
    assert (parse_sources(say_sources(table), size) == table).all()
    assert parse_sources("", size) is None


# --- in cores
@on_ranks(2)
def test_cores(axis: Any) -> None:
    for S, of_sequence in ((24, {}), (21, {"length": 21}), (21, {"length": 21, "pad": False})):
        sequence, mask_mod = ShardedSequence(axis, ZigZag(), **of_sequence), MASKS["long documents"](S)
        *qkv, dout = make_qkv(B, H, K, S, D, E)
        whole = [x.clone().requires_grad_() for x in qkv]
        want = dense(*whole, numbers(2 * S) * 0, values_of(mask_mod, S))
        found = torch.autograd.grad(want, whole, dout)
        local = [sequence.shard(x, dim=2).detach().requires_grad_() for x in qkv]
        core = parallelize(Core(), axis, {"": ContextParallel(sequence, mask=ALL)})
        out = core(*local, create_block_mask(mask_mod, None, None, S, S, sequence))
        got = [out, *torch.autograd.grad(out, local, sequence.shard(dout, dim=2))]
        for x, y in zip(got, (want, *found), strict=True):
            assert gap(sequence.unshard(x.detach(), dim=2), y) <= TOLERANCE, (S, of_sequence)


# --- refusals
S = 12


@on_ranks(2)
def test_refusals(axis: Any) -> None:
    sequence, ids, number = ShardedSequence(axis, ZigZag()), torch.arange(S) // 4, 3
    q, k, v, _ = (x[:, :, : S // 2] for x in make_qkv(B, H, K, S, D))
    others, to_replace = dist.new_group([0, 1]), [torch.arange(S) // 4]

    def made(mask_mod: MaskMod, heads: int | None = H, length: int = S, of: Any = sequence) -> Any:
        return create_block_mask(mask_mod, B, heads, length, length, of)

    def of_number(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return i - j < number

    def after(change: Callable[[], Any], mask_mod: MaskMod) -> Any:
        block_mask = made(mask_mod)
        change()
        return block_mask

    def rebind() -> None:
        nonlocal number
        number += 1

    inferred = torch.arange(S)
    with torch.inference_mode():
        inferred = inferred + 0
    placed = DTensor.from_local(torch.arange(S // 2), axis, [Shard(0)])
    long, short = ShardedSequence(axis, ZigZag(), length=15), torch.arange(S - 1)
    in_calls: dict[str, tuple[str, Callable[[], Any], dict[str, Any]]] = {
        "another layout": ("group, layout and length", lambda: made(documents(ids)), {"layout": Contiguous()}),
        "another group": ("group, layout and length", lambda: made(documents(ids)), {"mesh": others}),
        "another length": ("the whole sequence", lambda: made(documents(ids), length=8), {}),
        "a write": ("written to since", lambda: after(lambda: ids.add_(1), documents(ids)), {}),
        "a write to a view": ("written to since", lambda: after(lambda: ids[:2].fill_(7), documents(ids)), {}),
        "another tensor": (
            "written to since",
            lambda: after(
                lambda: to_replace.__setitem__(0, to_replace[0] + 1), lambda b, h, i, j: to_replace[0][i] >= j
            ),
            {},
        ),
        "another number": ("written to since", lambda: after(rebind, of_number), {}),
        "one head of several": ("B and H as they were", lambda: made(lambda b, h, i, j: i >= j + h, 1), {}),
    }  # fmt: skip
    for words, make, options in in_calls.values():
        block_mask = make()
        with refused(words, ArgumentError):
            flex_attention(q, k, v, None, block_mask, **{"enable_gqa": True, "mesh": axis} | options)
    making: dict[str, tuple[type[Exception], str, Callable[[], Any]]] = {
        "no sequence": (ArgumentError, "a ShardedSequence", lambda: made(documents(ids), of=axis)),
        "heads unknown": (ArgumentError, "H: expected a number", lambda: made(lambda b, h, i, j: i >= h, None)),
        "another length": (ArgumentError, "Q_LEN: expected 15", lambda: made(documents(ids), of=long)),
        "a DTensor": (UnsupportedError, "plain captured tensors", lambda: made(lambda b, h, i, j: placed[i] >= j)),
        "an inference tensor": (UnsupportedError, "count writes", lambda: made(lambda b, h, i, j: inferred[i] >= j)),
        "a tensor that is short": (
            ArgumentError,
            "q_idx: expected 12 e",
            lambda: made(lambda b, h, i, j: short[i] >= j),
        ),
        "a tensor of its own": (
            ArgumentError,
            "make it outside",
            lambda: made(lambda b, h, i, j: torch.tensor([0, 4, 8] * 4)[i] >= j),
        ),
        "no mask": (ArgumentError, "a function of scalars", lambda: made(3)),
        "an index that is not there": (Exception, "out of", lambda: made(lambda b, h, i, j: ids[i + S] >= j)),
    }
    for kind, words, make in making.values():
        with refused(words, kind):
            make()


@pytest.mark.parametrize(
    ("what", "words"),
    [
        ("a function", "the same mask_mod on every cp rank"),
        ("what is read", "the same captured tensor 0 of mask_mod"),
        ("a refusal", "cp rank 1 raised"),
        (
            "one without sources",
            "the same sources of block_mask on every cp rank, got cp rank 0: [0-9a-f]+; cp rank 1: all",
        ),
        ("other sources", "the same sources of block_mask on every cp rank"),
    ],
)
@on_ranks(2)
def test_ranks_that_differ(rank: int, axis: Any, what: str, words: str) -> None:
    sequence, ids = ShardedSequence(axis, Contiguous()), torch.arange(S) // (4 + rank * (what == "what is read"))
    number, heads = rank * (what == "a function"), None if what == "a refusal" and rank else H

    def mask_mod(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return (ids[i] - number <= ids[j]) & (i + 0 * h >= j)

    own = ("H: expected a number", ArgumentError) if what == "a refusal" and rank else (words, RankMismatchError)
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
    assert len(tables) == 2
    assert compared.call_count == 1
