"""The traffic gate: hops and bytes are exactly what the mask needs, counted below the library; see recording.py."""

from collections.abc import Sequence
from itertools import product
from typing import Any
from unittest import mock

import pytest
import torch
from cases import LAYOUTS, make_mask, pairs
from dense import make_qkv
from inside import MergingForward, SummingBackward, inner, num_rows, room
from ranks import mesh, num_collectives, on_ranks
from recording import Sent, recording
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import cp_mesh
from cp_mesh import Contiguous, Mask, Striped, ZigZag

HYBRID = inner("ulysses", "HYBRID")
received_by = inner("variants", "received")

B, K, D, E = 2, 3, 5, 4
ROW = B * K * (D + E)  # elements of K and V in one row


def local_inputs(layout, S: int, cp_size: int, rank: int, dtype: torch.dtype, v_dim: int = E) -> list[Tensor]:
    rows = layout.positions(S, cp_size, rank)
    return [x[:, :, rows].requires_grad_() for x in make_qkv(B, 6, K, S, D, v_dim, dtype=dtype)]


def passes(
    rank: int,
    cases: Sequence[tuple[str, str, int]],
    dtype: torch.dtype,
    method: str = "auto",
    degree: int | None = None,
) -> list[tuple[list[Sent], list[Sent]]]:
    """What this rank sent in the forward and in the backward of each case; ``degree`` as the method takes it."""
    axis, results = mesh((cp_size := torch.distributed.get_world_size(),), ("cp",)), []
    degrees = {"hybrid": {"ulysses_degree": degree}}
    for name, mask, S in cases:
        layout = LAYOUTS[name](S)
        q, k, v, dout = local_inputs(layout, S, cp_size, rank, dtype)
        options = {"layout": layout, "mask": make_mask(mask, B, S), "method": method, **degrees.get(method, {})}
        with recording(axis, degree) as notes:
            before = num_collectives()
            out = cp_mesh.attention(q, k, v, mesh=axis, seq_len=S, **options)
            num_forward = notes.hops
            out.backward(dout)
            assert num_collectives() - before == notes.hops, "something was sent past the recording groups"
        assert not notes.problems, notes.problems
        results.append((notes.sent[:num_forward], notes.sent[num_forward:]))
    return results


def needed(name: str, mask: str, S: int, cp_size: int) -> list[list[int]]:
    """[receiver][source]: how many of the source's keys some query of the receiver may see, from the dense mask."""
    allowed, layout = pairs(mask, B, S).any(0), LAYOUTS[name](S)
    shards = [layout.positions(S, cp_size, rank) for rank in range(cp_size)]
    return [
        [0 if k is q else int(allowed[q][:, k].any(0).sum()) if len(q) and len(k) else 0 for k in shards]
        for q in shards
    ]


def stages(need: list[list[int]], method: str) -> list[list[int]]:
    """The steps in which something moves, as they are taken: one, then two, then four at a time; or all at once."""
    size = len(need)
    active = [step for step in range(1, size) if any(need[r][(r - step) % size] for r in range(size))]
    taken = (active,) if method == "all_gather" else (active[:1], active[1:3], active[3:7])
    return [steps for steps in taken if steps]


def hops(
    need: list[list[int]], method: str, rank: int, itemsize: int, home: bool
) -> list[tuple[list[int], list[int], int]]:
    """(elements to each rank, elements from each rank, itemsize) of each stage; `home` for gradients to their owner."""
    size, entries = len(need), []
    for steps in stages(need, method):
        sources, receivers = ({(rank + sign * step) % size for step in steps} for sign in (-1, 1))
        fetched = [need[rank][r] * ROW if r in sources else 0 for r in range(size)]
        served = [need[r][rank] * ROW if r in receivers else 0 for r in range(size)]
        entries.append((fetched, served, itemsize) if home else (served, fetched, itemsize))
    return entries


@pytest.mark.parametrize(
    ("method", "cp_size"),
    [*product(["ring"], (1, 2, 3, 4)), pytest.param("all_gather", 3, marks=pytest.mark.full), ("all_gather", 4)],
)
@pytest.mark.quick("ring-3", "ring-1")
@on_ranks("cp_size", timeout=120.0)
def test_only_rows_that_are_needed_move(rank: int, method: str, cp_size: int) -> None:
    """Forward: K and V once. Backward: again, and their gradients home in fp32, or fp64 of fp64 inputs."""
    masks = ("causal", "full", "window", "window of one token", "two-sided window", "window ahead", "prefix", "length",
             "length, prefix and window", "no key at all")  # fmt: skip
    cases = [
        *product(("contiguous", "zigzag", "striped"), masks, (31,)),
        ("zigzag", "causal", 0),
        ("striped", "full", 2),
    ]
    for dtype, itemsize, grad_itemsize in ((torch.bfloat16, 2, 4), (torch.float64, 8, 8)):
        for case, (forward, backward) in zip(cases, passes(rank, cases, dtype, method), strict=True):
            need = needed(*case, cp_size)
            fetches = hops(need, method, rank, itemsize, home=False)
            assert [(sent.to, sent.origin, sent.itemsize) for sent in forward] == fetches, case
            both = fetches + hops(need, method, rank, grad_itemsize, home=True)
            assert sorted((x.to, x.origin, x.itemsize) for x in backward) == sorted(both), case


def swaps(S: int, cp_size: int, rank: int, itemsize: int, sums: int) -> list[tuple[list[int], list[int], int]]:
    """(elements to each rank, from each, itemsize) of Ulysses' all-to-alls, of 6 query heads that read 3 kv heads.

    On two ranks each computes 3 of these, the first or the last two by one kv head and the other by another: equal
    groups take 3 kv heads, which is more than a rank holds of its own. So these are not kept, and travel again. On
    three ranks a rank's 2 heads read one kv head: all is kept, and nobody needs lse at home.
    """
    rows = [len(ZigZag().positions(S, cp_size, r)) for r in range(cp_size)]
    heads, kv_heads = 6 // cp_size, {2: 3, 3: 1}[cp_size]

    def hop(features: int, size: int, home: bool = False) -> tuple[list[int], list[int], int]:
        own, whole = [rows[rank] * B * features] * cp_size, [n * B * features for n in rows]
        return (whole, own, size) if home else (own, whole, size)

    def by_dtype(*features: tuple[int, int], home: bool = False) -> list[tuple[list[int], list[int], int]]:
        """What travels together, in messages of one dtype."""
        sizes = dict.fromkeys(size for _, size in features)
        return [hop(sum(n for n, other in features if other == size), size, home) for size in sizes]

    q, kv, out, number = heads * D, kv_heads * (D + E), heads * E, heads
    if cp_size == 3:
        to_heads = [hop(q + kv, itemsize), hop(out, itemsize, home=True)]
        return [*to_heads, hop(out, itemsize), hop(q + kv, itemsize, home=True)]
    return [
        *by_dtype((q + kv, itemsize)),
        *by_dtype((out, itemsize), (number, sums), home=True),
        *by_dtype((out + q + kv, itemsize), (2 * number, sums)),
        *by_dtype((q, itemsize), (kv, sums), home=True),
    ]


@pytest.mark.parametrize("cp_size", (2, 3))
@on_ranks("cp_size")
def test_ulysses_swaps_heads_for_rows(rank: int, cp_size: int) -> None:
    """q, k and v out, out home; dout out, and the gradients home.

    Of kv heads that are sent twice nothing is kept: lse comes home too, q, k and v travel again with dout, lse and
    delta, and gradients in fp32, to be summed in it.
    """
    for dtype, itemsize, sums in ((torch.bfloat16, 2, 4), (torch.float64, 8, 8)):
        cases = [("zigzag", "causal", 31), ("zigzag", "window", 12)]
        for (_, _, S), (forward, backward) in zip(cases, passes(rank, cases, dtype, "ulysses"), strict=True):
            sent = [(x.to, x.origin, x.itemsize) for x in forward + backward]
            assert sent == swaps(S, cp_size, rank, itemsize, sums)
    assert passes(rank, [("zigzag", "causal", 0)], torch.float64, "ulysses") == [([], [])]


def hybrid_hops(
    case: tuple[str, str, int], degree: int, cp_size: int, rank: int, itemsize: int, sums: int
) -> tuple[list[Any], list[Any]]:
    """(ranks of the group, elements to each, from each, itemsize) of a forward and a backward of the hybrid, of 6 query
    heads that read 3 kv heads, of which each rank computes 3 query heads or 2.

    A rank of 3 query heads reads 2 kv heads, in groups of which 2 and 1 read one: equal groups are of one query head,
    and take 3 kv heads, with each kv head sent twice.
    """
    name, mask, S = case
    layout, allowed, first = LAYOUTS[name](S), pairs(mask, B, S).any(0), rank // degree * degree
    shards = [layout.positions(S, cp_size, r) for r in range(cp_size)]
    inner, outer = [*range(first, first + degree)], [*range(rank % degree, cp_size, degree)]
    rows = [torch.cat(shards[r - r % degree : r - r % degree + degree]) for r in outer]  # of each inner group
    need = [[0 if k is q else int(allowed[q][:, k].any(0).sum()) for k in rows] for q in rows]
    heads, kv_heads = 6 // degree, {2: 3, 3: 1}[degree]
    numbers, own = [len(shards[r]) for r in inner], len(shards[rank])

    def swap(features: int, size: int, home: bool = False) -> tuple[list[int], list[int], list[int], int]:
        mine, theirs = [own * B * features] * degree, [n * B * features for n in numbers]
        return (inner, theirs, mine, size) if home else (inner, mine, theirs, size)

    def travel(size: int, home: bool = False) -> list[tuple[list[int], list[int], list[int], int]]:
        width, me, hops = B * kv_heads * (D + E), outer.index(rank), []
        for steps in stages(need, "hybrid"):
            sources, receivers = ({(me + sign * step) % len(outer) for step in steps} for sign in (-1, 1))
            fetched = [need[me][r] * width if r in sources else 0 for r in range(len(outer))]
            served = [need[r][me] * width if r in receivers else 0 for r in range(len(outer))]
            hops.append((outer, fetched, served, size) if home else (outer, served, fetched, size))
        return hops

    q, kv, out = heads * D, kv_heads * (D + E), heads * E
    if degree == 3:  # what arrived is kept
        forward = [swap(q + kv, itemsize), *travel(itemsize), swap(out, itemsize, True)]
        there, back = [swap(out, itemsize)], [swap(q + kv, itemsize, True)]
    elif itemsize == sums:
        forward = [swap(q + kv, itemsize), *travel(itemsize), swap(out + heads, itemsize, True)]
        there, back = [swap(out + q + kv + 2 * heads, itemsize)], [swap(q + kv, itemsize, True)]
    else:
        forward = [swap(q + kv, itemsize), *travel(itemsize), swap(out, itemsize, True), swap(heads, sums, True)]
        there = [swap(out + q + kv, itemsize), swap(2 * heads, sums)]
        back = [swap(q, itemsize, True), swap(kv, sums, True)]
    return forward, [*there, *travel(itemsize), *travel(sums, True), *back]


def by_groups(sent: Sequence[Sent]) -> list[tuple[list[int], list[int], list[int], int]]:
    return [(x.ranks, x.to, x.origin, x.itemsize) for x in sent]


@pytest.mark.parametrize(("cp_size", "degree"), [(4, 2), (6, 2), pytest.param(6, 3, marks=pytest.mark.full)])
@pytest.mark.quick("4-2")
@on_ranks("cp_size", timeout=120.0)
def test_the_hybrid_swaps_in_its_inner_groups_and_fetches_in_its_outer_ones(
    rank: int, cp_size: int, degree: int
) -> None:
    cases = [
        *product(("contiguous", "zigzag", "striped"), ("causal", "window", "full"), (31,)),
        ("zigzag", "causal", 6),
    ]
    for dtype, itemsize, sums in ((torch.bfloat16, 2, 4), (torch.float64, 8, 8)):
        for case, passed in zip(cases, passes(rank, cases, dtype, "hybrid", degree), strict=True):
            forward, backward = map(by_groups, passed)
            wanted, wanted_backward = hybrid_hops(case, degree, cp_size, rank, itemsize, sums)
            assert forward == wanted, case
            # In the backward the next fetch starts before the last delivery.
            assert sorted(backward) == sorted(wanted_backward), case
            assert backward[0] == wanted_backward[0] and backward[-1] == wanted_backward[-1]
    assert passes(rank, [("zigzag", "causal", 0)], torch.float64, "hybrid", degree) == [([], [])]


@on_ranks(6)
def test_explain_counts_what_the_ring_of_a_hybrid_moves(rank: int) -> None:
    """Rows of half of the heads, by the rank in this one's place in another inner group."""
    cases = [*product(("contiguous", "zigzag", "striped"), ("causal", "window", "full"), (31,))]
    width = B * 3 * (D + E)  # of the kv heads that a rank's three query heads are computed with
    results = passes(rank, cases, torch.float64, "hybrid", 2)
    for (name, mask, S), (forward, _) in zip(cases, results, strict=True):
        moves = received_by(HYBRID.make_schedule(LAYOUTS[name](S), make_mask(mask, B, S), S, 6, rank, False, 2), 2)
        rows = sum(num_rows(ranges) for move in moves for _, ranges in move)
        outer = [hop for hop in by_groups(forward) if hop[0] == [*range(rank % 2, 6, 2)]]
        assert sum(sum(origin) for _, _, origin, _ in outer) == rows * width, (name, mask)
        assert all(source % 2 == 0 for move in moves for source, _ in move)


BY_HAND: dict[tuple[str, str], list[tuple[list[int], list[int]]]] = {
    ("contiguous", "causal"): [([0, 0], [0, 0, 8, 8]), ([8, 0], [8, 0, 8, 0]), ([8, 8], [8, 8, 0, 0])],
    ("zigzag", "causal"): [([8, 8], [8, 8, 4, 4]), ([4, 8], [4, 8, 4, 8]), ([4, 4], [4, 4, 8, 8])],
    ("striped", "causal"): [([7, 7], [7, 7, 8, 8]), ([8, 7], [8, 7, 8, 7]), ([8, 8], [8, 8, 7, 7])],
    ("contiguous", "window"): [([0], [0, 5]), ([5], [5, 5]), ([5], [5, 0])],
    ("contiguous", "window of one token"): [([], [])] * 3,
    ("zigzag", "full"): [([8, 8], [8, 8, 8, 8])] * 3,
}
"""Rows that each of 3 ranks receives, hop by hop, forward and backward, of 24 tokens, 8 rows each."""


@on_ranks(3)
def test_by_hand(rank: int) -> None:
    """In the backward the next fetch starts before the last delivery."""
    results = passes(rank, [(*case, 24) for case in BY_HAND], torch.float64)
    for (case, wanted), passed in zip(BY_HAND.items(), results, strict=True):
        assert tuple([sum(sent.origin) // ROW for sent in sents] for sents in passed) == wanted[rank], case


@pytest.mark.parametrize(("length", "hops"), [(8, 0), (10, 3)])  # one step: fetch, fetch again, deliver
@on_ranks(3)
def test_documents_within_shards_need_no_ring(rank: int, axis: Any, length: int, hops: int) -> None:
    q, k, v, dout = local_inputs(Contiguous(), 24, 3, rank, torch.float64)
    mask = Mask(documents=(torch.arange(24) // length)[None])
    with recording(axis) as notes:
        cp_mesh.attention(q, k, v, mesh=axis, layout=Contiguous(), mask=mask).backward(dout)
    assert notes.hops == hops


@on_ranks(3)
def test_the_forward_alone_delivers_nothing(rank: int, axis: Any) -> None:
    q, k, v, _ = local_inputs(ZigZag(), 24, 3, rank, torch.float64)
    with torch.no_grad(), recording(axis) as notes:
        cp_mesh.attention(q, k, v, mesh=axis)
    assert notes.hops == 2


def checkpointed(rank: int, method: str = "auto", backend: str | None = None) -> dict[str, int]:
    """Hops of forward and backward of a block, compiled or not, by how it is checkpointed."""
    axis = mesh((cp_size := torch.distributed.get_world_size(),), ("cp",))
    q, k, v, dout = local_inputs(ZigZag(), 24, cp_size, rank, torch.float64)

    def block(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return cp_mesh.attention(q * 2, k * 2, v * 2, mesh=axis, method=method) * 2

    block = block if backend is None else torch.compile(block, backend=backend, fullgraph=True)
    selective = {"context_fn": cp_mesh.training.checkpoint_context_fn}
    counts, gradients = {}, []
    for name, options in (("none", None), ("full", {}), ("selective", selective)):
        with recording(axis) as notes:
            out = block(q, k, v) if options is None else checkpoint(block, q, k, v, use_reentrant=False, **options)
            gradients.append(torch.autograd.grad(out, (q, k, v), dout))
        assert not notes.problems, notes.problems
        counts[name] = notes.hops
    for other in gradients[1:]:
        assert all(torch.equal(a, b) for a, b in zip(gradients[0], other, strict=True))
    return counts


@on_ranks(3)
def test_selective_recompute_does_not_replay_the_ring(rank: int) -> None:
    """Two hops forward, four backward; full checkpointing repeats the two of the forward."""
    assert checkpointed(rank) == {"none": 6, "full": 8, "selective": 6}


class Spy:
    """A pass of a kernel that notes its steps among the events of a recording."""

    def __init__(self, inner, events: list[str]):
        self.inner, self.events = inner, events

    def step(self, *args):
        self.events.append("step")
        return self.inner.step(*args)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)


def in_flight(events: list[str]) -> list[int]:
    """Hops under way at each step."""
    counts, flying = [], 0
    for event in events:
        flying += {"start": 1, "wait": -1, "step": 0}[event]
        if event == "step":
            counts.append(flying)
    return counts


@pytest.mark.parametrize(
    ("method", "forward", "backward"),
    # Local first in forwards, then stages of one and of two steps, or all that was fetched. In the second stage of the
    # backward the delivery of the first; local last, behind which the last delivery hides.
    [("ring", [1, 1, 0], [1, 1, 1]), ("all_gather", [1, 0], [0, 1])],
)
@on_ranks(4)
def test_hops_are_under_way_while_tiles_are_computed(
    rank: int, axis: Any, method: str, forward: list[int], backward: list[int]
) -> None:
    """For causal layouts in which all ranks compute in every step."""
    for layout in (ZigZag(), Striped()):
        q, k, v, dout = local_inputs(layout, 24, 4, rank, torch.float64, v_dim=D)
        with recording(axis) as notes:
            with mock.patch.multiple(
                room("ring_loop"),
                MergingForward=lambda *args: Spy(MergingForward(*args), notes.events),
                SummingBackward=lambda *args: Spy(SummingBackward(*args), notes.events),
            ):
                out = cp_mesh.attention(q, k, v, mesh=axis, layout=layout, kernel="cpu_flash", method=method)
                num_forward = len(notes.events)
                out.backward(dout)
        assert in_flight(notes.events[:num_forward]) == forward
        assert in_flight(notes.events[num_forward:]) == backward
