"""Documents as segments: every pair once, in calls that kernels of unequal sequences can take, planned once a mask."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from dataclasses import replace
from itertools import cycle, product
from typing import Any
from unittest import mock

import pytest
import torch
from cases import LAYOUTS, gap
from checks import GQA, Case, coverage, forget_plans, num_pairs, parity_on_ranks, report
from dense import dense_attention, dense_mask, make_qkv
from hypothesis import given, settings
from hypothesis import strategies as st
from inside import KERNELS, AttentionSpec, Call, Request, Segments, Tensors, inner, make_schedule, room
from ranks import on_ranks, refused
from recording import recording
from test_flash_attn import Calls, fa4_functions, install
from test_kernels_gpu import block_rms, play_ring
from torch import Tensor

import cp_mesh
from cp_mesh import Contiguous, Mask, Striped, ZigZag
from cp_mesh.geometry import Permuted

plan = room("call.plan")
flash_attn_4 = room("flash_attn_4")
flash_attn_4_package = room("flash_attn_4_package")
contract = room("method")
choose_schedule = inner("call.plan", "choose_schedule")

RUNS = ("contiguous", "zigzag", "striped", "balanced", "zigzag documents")


def ids_of(*rows: list[int]) -> Tensor:
    """Ids [B, S] from the lengths of the documents of each batch row."""
    return torch.stack([torch.repeat_interleave(torch.arange(len(row)), torch.tensor(row)) for row in rows])


DOCUMENTS = {
    "one": ids_of([24]),
    "single tokens": ids_of([1] * 24),
    "primes": ids_of([2, 3, 5, 7, 1, 5, 1]),
    "one longer than a shard": ids_of([3, 17, 4]),
    "an empty tail": ids_of([5, 6, 13]),
    "at the edges of shards": ids_of([6, 6, 6, 6]),
    "unlike in every batch row": ids_of([1, 22, 1], [8, 8, 8], [24]),
    "of any order": torch.tensor([[5] * 9 + [1] * 2 + [3] * 13]),
    "excluded tokens beside them": torch.tensor([[-1] + [0] * 4 + [-1] * 4 + [1] * 9 + [-2] * 2 + [2] * 4, [-1] * 24]),
}
QUICK = "one longer than a shard", "excluded tokens beside them"
each_documents = pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in QUICK else pytest.mark.nightly("geometry")) for name in DOCUMENTS]
)
CONDITIONS: dict[str, dict[str, Any]] = {
    "causal": {},
    "full": {"causal": False},
    "window": {"window": (3, None)},
    "two-sided window": {"causal": False, "window": (4, 1)},
    "window ahead": {"causal": False, "window": (None, 2)},
    "length": {"causal": False, "length": 20},
    "causal and length": {"length": 20},
    "prefix": {"prefix": 9},
    "prefix of a window": {"prefix": 9, "window": (4, None)},
    "prefix that sees ahead": {"prefix": 9, "window": (None, 3)},
}


@pytest.mark.more("geometry")
@pytest.mark.parametrize("layout", RUNS)
@each_documents
@pytest.mark.quick("one longer than a shard")
def test_every_pair_once(full, layout, name):
    problems = []
    for i, (what, options) in enumerate(CONDITIONS.items()):
        mask = Mask(documents=DOCUMENTS[name], **options)
        want = dense_mask(24, documents=DOCUMENTS[name], **options)
        often = what in ("causal", "two-sided window")
        for cp_size in range(1, 9) if full and often else (i or 3, 8) if full or often else (i,):
            assert "segments" in make_schedule(LAYOUTS[layout](24), mask, 24, cp_size, 0, True).covers
            found = coverage(LAYOUTS[layout](24), mask, want, cp_size, segments=True)
            problems += [f"{what}, cp={cp_size}: {problem}" for problem in found]
    report([problems])


@settings(max_examples=60, deadline=None)
@given(
    lens=st.lists(st.lists(st.integers(1, 30), min_size=1, max_size=8), min_size=1, max_size=2),
    S=st.integers(1, 60),
    cp_size=st.integers(1, 8),
    layout=st.sampled_from(RUNS),
    condition=st.sampled_from(list(CONDITIONS)),
)
@pytest.mark.full
def test_any_documents(lens, S, cp_size, layout, condition):
    rows = [ids_of([*row, S])[0, :S] for row in lens]
    options = {"documents": torch.stack(rows), **CONDITIONS[condition]}
    report([coverage(LAYOUTS[layout](S), Mask(**options), dense_mask(S, **options), cp_size, segments=True)])


def blocks_of(layout, ids: Tensor, cp_size: int, rank: int, **options) -> list[tuple]:
    """(left, right, blocks) of the local tiles, then of each stage."""
    schedule = make_schedule(layout, Mask(documents=ids, **options), ids.shape[-1], cp_size, rank, True)
    visits = [schedule.local_tiles, *(stage.tiles for stage in schedule.route.stages)]
    described = []
    for tiles in visits:
        assert all(isinstance(tile.cover, Segments) for tile in tiles)
        offsets = [torch.tensor([tile.q[0], tile.q[0], tile.k[0], tile.k[0]]) for tile in tiles]
        described.append(
            [
                (tile.cover.left, tile.cover.right, (tile.cover.blocks[0] + offset).tolist())
                for tile, offset in zip(tiles, offsets, strict=True)
            ]
        )
    return described


def test_blocks_by_hand():
    """Twelve tokens on two ranks, three each run of zigzag: documents of 2, 8 and 2 tokens."""
    ids = ids_of([2, 8, 2])
    # rank 0 has 0 1 2 and 9 10 11: causal squares of all its documents in one call, then the long one against rank 1
    local, stage = blocks_of(ZigZag(), ids, 2, 0)
    assert local == [(None, 0, [[0, 2, 0, 2], [2, 4, 2, 4], [4, 6, 4, 6]])]
    assert stage == [(None, None, [[3, 4, 0, 6]])]
    local, stage = blocks_of(ZigZag(), ids, 2, 1)
    assert local == [(None, 0, [[0, 6, 0, 6]])]
    assert stage == [(None, None, [[0, 6, 0, 1]])]
    # a stripe against a later one: the diagonal is ahead of it, so one row and one key less
    local, stage = blocks_of(Striped(), ids, 2, 0)
    assert local == [(None, 0, [[0, 1, 0, 1], [1, 5, 1, 5], [5, 6, 5, 6]])]
    assert stage == [(None, 0, [[2, 5, 0, 3]])]


@pytest.mark.parametrize("cp_size", (2, 4, 8))
def test_a_stage_is_one_call(cp_size):
    """However many documents there are: causal, in layouts of runs; only what lies across an edge is fetched."""
    generator = torch.Generator().manual_seed(cp_size)
    ids = torch.randint(0, 2, (1, 960), generator=generator).cumsum(1)
    for layout, rank in product((Contiguous(), ZigZag()), range(cp_size)):
        for tiles in blocks_of(layout, ids, cp_size, rank):
            assert len(tiles) <= 1


STAY = {
    "an id that comes back": {"documents": torch.tensor([[0, 0, 1, 1, 0, 0, 0, 0]])},
    "key padding": {"documents": ids_of([4, 4]), "key_padding": torch.ones(1, 8, dtype=torch.bool)},
    "no documents": {},
}


@pytest.mark.parametrize("name", STAY)
def test_what_stays_as_it_is(name):
    mask = Mask(**STAY[name])
    for layout, rank in product((Contiguous(), ZigZag()), range(2)):
        assert "segments" not in make_schedule(layout, mask, 8, 2, rank, True).covers
    documents = Mask(documents=ids_of([4, 4]))
    assert "segments" not in make_schedule(Permuted(range(7, -1, -1)), documents, 8, 2, 0, True).covers


def test_too_many_bands_stay_as_they_are():
    """A window gives every edge of a run, in a long document, a band of its own."""
    ids, mask = ids_of([5] * 19 + [5]), {"causal": False, "window": (2, 2)}
    few = make_schedule(Contiguous(), Mask(documents=ids, **mask), 100, 5, 0, True)
    assert "segments" in few.covers
    with mock.patch.object(room("survey"), "MAX_BANDS", 0):
        many = make_schedule(Contiguous(), Mask(documents=ids, **mask), 100, 5, 0, True)
    assert many.covers == {"pairs"}


def test_striped_documents_of_too_many_pieces_are_tiles_of_pairs():
    """Three documents of four ranks are 48 pairs of pieces, and four runs 16."""
    S, options = 24, {"documents": ids_of([9, 10, 5])}
    with mock.patch.object(room("survey"), "MAX_PAIRS", 47):
        assert make_schedule(Striped(), Mask(**options), S, 4, 0, True).covers == {"pairs"}
        assert make_schedule(ZigZag(), Mask(**options), S, 4, 0, True).covers == {"segments"}
        report([coverage(Striped(), Mask(**options), dense_mask(S, **options), 4, segments=True)])
    assert make_schedule(Striped(), Mask(**options), S, 4, 0, True).covers == {"segments"}


# --- a kernel of unequal sequences, whose package a stand-in plays


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Iterator[Calls]:
    calls = Calls()
    install(monkeypatch, "flash_attn.cute.interface", **fa4_functions(calls))
    yield calls
    flash_attn_4_package.import_once.cache_clear()


def whole(mask: Mask, q, k, v, dout, options: dict[str, Any]) -> list[Tensor]:
    S = q.shape[2]
    allowed = dense_mask(S, **options, documents=torch.atleast_2d(mask.documents))
    qkv = [x.clone().requires_grad_() for x in (q, k, v)]
    out, lse = dense_attention(*qkv, allowed)
    return [out.detach(), lse.detach(), *torch.autograd.grad(out, qkv, dout)]


@pytest.mark.more("geometry")
@each_documents
@pytest.mark.parametrize("layout", RUNS)
@pytest.mark.quick("one longer than a shard")
def test_fa4_is_given_sequences(calls, full, layout, name):
    ids = DOCUMENTS[name]
    B = max(2, len(ids))
    q, k, v, dout = make_qkv(B, 4, 2, 24, 8, 8)
    for (what, options), cp_size in product(CONDITIONS.items(), (1, 2, 3, 4) if full else (3,)):
        mask = Mask(documents=ids, **options)
        got = play_ring(KERNELS["fa4"], LAYOUTS[layout](24), mask, cp_size, q, k, v, dout, segments=True)
        for result, a, b in zip(
            ("out", "lse", "dq", "dk", "dv"), got, whole(mask, q, k, v, dout, options), strict=True
        ):
            assert gap(a, b) <= 1e-10, (what, cp_size, result)
    assert all(arguments["cu_seqlens_q"] is not None for _, arguments in calls)


@pytest.mark.parametrize(("heads", "dims"), [((2, 2), (8, 8)), ((3, 1), (8, 8)), ((2, 2), (8, 16)), ((4, 2), (16, 8))])
def test_fa4_heads_and_head_dims(calls, heads, dims):
    ids = ids_of([3, 17, 4])
    q, k, v, dout = make_qkv(1, *heads, 24, *dims)
    mask = Mask(documents=ids)
    got = play_ring(KERNELS["fa4"], ZigZag(), mask, 3, q, k, v, dout, segments=True)
    for a, b in zip(got, whole(mask, q, k, v, dout, {}), strict=True):
        assert gap(a, b) <= 1e-10


def test_bounds_that_are_not_there_are_none(calls):
    """A bound is part of what the package compiles for; documents of a causal mask take two variants."""
    q, k, v, dout = make_qkv(1, 2, 2, 24, 8)
    for layout in (Contiguous(), ZigZag(), Striped()):
        play_ring(KERNELS["fa4"], layout, Mask(documents=ids_of([2, 13, 1, 8])), 4, q, k, v, dout, segments=True)
    bounds = {(arguments["window_size_left"], arguments["window_size_right"]) for _, arguments in calls}
    assert bounds == {(None, None), (None, 0)}


def fa4_on_cpu(**changes: Any) -> Any:
    """FA4 as a kernel of the CPU in float64, for the length of a `with`."""
    capability = replace(
        KERNELS["fa4"].capability, devices=("cpu",), dtypes=(torch.float64,), compute_capability=(0, 0), only_on=(),
        head_dim_multiple=1, **changes,
    )  # fmt: skip
    return mock.patch.dict(KERNELS, fa4=replace(KERNELS["fa4"], capability=capability))


@pytest.mark.parametrize("cp_size", (2, *(pytest.param(size, marks=pytest.mark.full) for size in (1, 4))))
@pytest.mark.more("geometry")
@on_ranks("cp_size", timeout=300.0)
def test_fa4_over_a_ring(rank: int, cp_size: int, full: bool, cases: list[Case] | None = None) -> None:
    """Communication and all: what a kernel of sequences computes is dense attention, in every format."""
    calls, found = Calls(), []
    with pytest.MonkeyPatch.context() as patch, fa4_on_cpu():
        install(patch, "flash_attn.cute.interface", **fa4_functions(calls))
        forget_plans()
        found = parity_on_ranks(rank, (cp_size,), ("cp",), cases or cases_of(full))
        forget_plans()
    flash_attn_4_package.import_once.cache_clear()
    assert not found and calls, found


def cases_of(full: bool) -> list[Case]:
    documents = DOCUMENTS if full else ("primes", "unlike in every batch row", *QUICK)
    conditions = ("causal", "two-sided window")
    masks = [{"documents": DOCUMENTS[name], **CONDITIONS[c]} for name, c in product(documents, conditions)]
    return [
        Case(layout, mask, 24, GQA, seq_dim, kernel="fa4", sizes=(max(len(mask["documents"]), 1), 8, 8))
        for (layout, mask), seq_dim in zip(product(RUNS, masks), cycle((0, 1, 2)))
        if seq_dim or len(mask["documents"]) == 1
    ]


@pytest.mark.parametrize("method", ("ring", "all_gather", "ulysses"))
@on_ranks(3)
def test_excluded_tokens_are_nothing(rank: int, axis: Any, method) -> None:
    """Exact zeros of excluded tokens, whose rows hold numbers that no mask could multiply away."""
    for ids in (torch.tensor([0] * 7 + [room("mask").EXCLUDED] * 9 + [1] * 8), torch.full((24,), -5)):
        mask = Mask(documents=ids)
        for name in (*RUNS, "shuffled"):
            layout = cp_mesh.balance(mask, 24, 3) if name == "balanced" else LAYOUTS[name](24)
            rows = layout.positions(24, 3, rank)
            out_of = ids[rows] < 0
            q, k, v, dout = (x[:, :, rows] for x in make_qkv(1, 3, 3, 24, 4))
            q, k, v = (x.masked_fill(out_of[:, None], 1e200).requires_grad_() for x in (q, k, v))
            out, lse = cp_mesh.attention(
                q, k, v, mesh=axis, seq_len=24, layout=layout, mask=mask, method=method, return_lse=True
            )
            grads = torch.autograd.grad(out, (q, k, v), dout)
            is_zero = all((x[:, :, out_of] == 0).all() and x.isfinite().all() for x in (out, *grads))
            assert is_zero and (lse[:, :, out_of] == -torch.inf).all(), (name, ids)


def test_excluded_tokens_cost_nothing():
    """No pair and no row that travels; a balanced layout shares out what is left."""
    ids = torch.cat([torch.arange(600) // 200, torch.full((360,), -1)])
    for make in (
        *(LAYOUTS[name] for name in RUNS[:3]),
        lambda S: cp_mesh.balance(Mask(documents=ids), S, 4, pairs_per_token=0),
    ):
        ranks = [make_schedule(make(960), Mask(documents=ids), 960, 4, rank, True) for rank in range(4)]
        assert sum(num_pairs(schedule) for schedule in ranks) == 3 * 200 * 201 // 2
        assert all(schedule.covers == {"segments"} for schedule in ranks)
    work = [num_pairs(schedule) for schedule in ranks]
    assert max(work) <= 1.01 * min(work)


# --- which schedule a kernel is given

H200 = Request("cuda", (9, 0), torch.bfloat16, frozenset(), 128, 128, False, False)


def chosen(name: str = "auto", request: Request = H200) -> tuple[str, bool]:
    """The kernel, and whether it is given segments."""
    mask = Mask(documents=ids_of([3, 17, 4]))
    schedule, kernel = choose_schedule(
        name,
        lambda segments: make_schedule(ZigZag(), mask, 24, 2, 0, segments),
        lambda schedule: replace(request, covers=schedule.covers),
        (),
    )
    return kernel.name, "segments" in schedule.covers


def test_segments_for_who_takes_them(calls):
    assert chosen() == chosen("fa4") == ("fa4", True)
    assert chosen("reference") == ("reference", True)
    assert chosen(request=replace(H200, device="cpu", compute_capability=(0, 0))) == ("reference", True)


def test_pairs_for_who_takes_those():
    pairs = replace(KERNELS["fa2"].capability, covers=("full", "causal", "pairs"))
    absent = replace(KERNELS["fa4"].capability, lacking=lambda: "absent")
    fa2, fa4 = replace(KERNELS["fa2"], capability=pairs), replace(KERNELS["fa4"], capability=absent)
    with mock.patch.dict(KERNELS, fa2=fa2, fa4=fa4):
        assert chosen() == chosen("fa2") == ("fa2", False)
    with pytest.raises(cp_mesh.UnsupportedError, match="'pairs' tiles"):
        chosen("cudnn")


# --- planned once


class Group:
    """What planning reads of a process group."""

    def size(self) -> int:
        return 2

    def rank(self) -> int:
        return 1


GROUP = Group()  # its plans are kept


@pytest.fixture
def no_collector() -> Iterator[None]:
    """Trainers turn it off."""
    gc.disable()
    yield
    gc.enable()


def planned(documents: Tensor, spec: str = "1,,,0,") -> plan.Plan:
    return planned_with(24, "zigzag", spec, documents=documents)


def planned_with(seq_len: int, layout: str = "zigzag", spec: str = "1,,,0,", **tensors: Tensor) -> plan.Plan:
    q, k, v, _ = make_qkv(1, 2, 2, seq_len // 2, 8)
    call = Call(Tensors(**tensors), seq_len, 2, "", AttentionSpec(layout, spec, 1.0, method="ring"))
    return plan.make_plan(q, k, v, call, GROUP, call.scores(q).features)


def test_a_mask_is_planned_once():
    ids = ids_of([3, 17, 4])
    first = planned(ids)
    assert planned(ids).schedule is first.schedule and planned(ids.clone()).schedule is first.schedule
    assert planned(ids, "0,,,0,").schedule is not first.schedule
    assert planned(ids.int()).schedule is not first.schedule and planned(ids[0]).schedule is not first.schedule


def test_what_is_written_to_documents_is_seen():
    """By torch or by NumPy, which leaves no trace in the tensor; and what was planned does not change."""
    numbers = ids_of([3, 17, 4]).numpy().copy()
    ids = torch.from_numpy(numbers)
    first = planned(ids)
    numbers[0, 10:] = 7
    second = planned(ids)
    assert second.schedule is not first.schedule and torch.equal(second.mask.documents, ids)
    assert torch.equal(first.mask.documents, ids_of([3, 17, 4]))
    ids[0, :2] = 9
    assert planned(ids).schedule not in (first.schedule, second.schedule)
    assert planned(ids_of([3, 17, 4])).schedule is first.schedule


@pytest.mark.parametrize("name", ("documents", "key_padding", "layout_index"))
def test_plans_are_told_apart_by_every_element_of_a_tensor(name):
    """Of 160 elements, more than go into the hash by which a plan is looked up."""
    first = {
        "documents": ids_of([50, 110]),
        "key_padding": torch.ones(1, 160, dtype=torch.bool),
        "layout_index": torch.arange(160),
    }[name]
    layout = "permuted" if name == "layout_index" else "zigzag"
    for i in range(160):
        other = first.clone()
        if name == "layout_index":
            other[[i, i - 1]] = first[[i - 1, i]]
        else:
            other[0, i] = 1 - first[0, i].long()
        for tensor in (first, other):
            made = planned_with(160, layout, **{name: tensor})
            held = made.layout.tensor if name == "layout_index" else getattr(made.mask, name)
            assert torch.equal(held, tensor), f"element {i}"


def batch(number: int) -> Mask:
    """Another one for each number; its tiles are pairs."""
    return Mask(documents=ids_of([3, 17, 4]), key_padding=torch.arange(24)[None] != number)


def planned_for(mask: Mask) -> plan.Plan:
    return planned_with(24, documents=mask.documents, key_padding=mask.key_padding)


def test_plans_go_with_their_batch(no_collector: None) -> None:
    """With the first plan of another one: until then layers find it that each make the mask anew, and keep none."""
    mask = batch(0)
    made = planned_for(mask)
    tiles = made.tiles(None)
    kept = [weakref.ref(x) for x in (made, made.schedule, made.mask, made.mask.documents, tiles[0].cover)]
    assert isinstance(tiles[0].cover, contract.Pairs) and planned_for(batch(0)) is planned_for(batch(0)) is made
    del made, tiles
    planned_for(batch(1))
    assert planned_for(mask) is kept[0]()
    del mask
    planned_for(batch(2))
    assert [x() for x in kept] == [None] * len(kept)


def test_plans_of_batches_that_live_are_few(no_collector: None) -> None:
    """Those of two that take turns stay, as of parts of a batch under pipelining."""
    masks = [batch(number) for number in range(20)]
    kept = [weakref.ref(planned_for(mask)) for mask in masks]
    assert [x() is not None for x in kept] == [False] * 4 + [True] * 16
    assert all(planned_for(masks[-1 - i % 2]) is kept[-1 - i % 2]() for i in range(50))


@on_ranks(4)
def test_only_rows_that_some_query_sees_travel(rank: int, axis: Any) -> None:
    """Rows of documents that lie within a shard, or behind every query of another, do not travel."""
    S = 24
    for layout, ids in product((Contiguous(), ZigZag(), Striped()), DOCUMENTS.values()):
        allowed = dense_mask(S, documents=ids).any(0)
        shards = [layout.positions(S, 4, r) for r in range(4)]
        need = [[0 if i == j else int(allowed[a][:, b].any(0).sum()) for j, b in enumerate(shards)]
                for i, a in enumerate(shards)]  # fmt: skip
        active = [step for step in (1, 2, 3) if any(need[r][(r - step) % 4] for r in range(4))]
        q, k, v, dout = (x[:, :, shards[rank]].requires_grad_() for x in make_qkv(len(ids), 2, 1, S, 4, 3))
        with recording(axis) as notes:
            out = cp_mesh.attention(q, k, v, mesh=axis, layout=layout, mask=Mask(documents=ids))
            out.backward(dout)
        stages = [steps for steps in (active[:1], active[1:3], active[3:]) if steps]
        want = [[need[rank][r] if (rank - r) % 4 in steps else 0 for r in range(4)] for steps in stages]
        row = len(ids) * (4 + 3)
        got = [[n // row for n in sent.origin] for sent in notes.sent[: len(stages)]]
        assert (got, len(notes.sent)) == (want, 3 * len(stages)), (layout, ids)


@pytest.mark.gpu
@pytest.mark.parametrize("heads", [(8, 2), (4, 4)], ids=str)
@pytest.mark.parametrize("condition", ["causal", "window", "two-sided window", "length"])
@pytest.mark.parametrize("layout", RUNS)
def test_fa4_on_gpu(layout: str, condition: str, heads: tuple[int, int]) -> None:
    """Sequences that leave rows and keys out; the error is that of one device that sees everything."""
    if problem := KERNELS["fa4"].capability.lacking():
        pytest.skip(problem)
    S, generator = 1030, torch.Generator("cuda").manual_seed(1)
    ids = ids_of([1, 400, 7, 131, 129, 300, 62], [1029, 1])
    options = CONDITIONS[condition] | ({"length": 1000} if condition == "length" else {})
    mask = Mask(documents=ids, **options)
    shapes = [(2, n, S, 64) for n in (heads[0], heads[1], heads[1], heads[0])]
    inputs = [torch.randn(shape, generator=generator, device="cuda").bfloat16() for shape in shapes]
    exact = play_ring(KERNELS["reference"], LAYOUTS["contiguous"](S), mask, 1, *(x.double() for x in inputs))
    alone = play_ring(KERNELS["fa4"], LAYOUTS["contiguous"](S), mask, 1, *inputs, segments=True)
    got = play_ring(KERNELS["fa4"], LAYOUTS[layout](S), mask, 4, *inputs, segments=True)
    for name, want, single, x in zip(("out", "lse", "dq", "dk", "dv"), exact, alone, got, strict=True):
        blind = want.isneginf() if name == "lse" else torch.zeros_like(want, dtype=torch.bool)
        assert torch.equal(x.isneginf(), blind), f"{name}: rows without a key"
        want, single, x = (y.double().masked_fill(blind, 0) for y in (want, single, x))
        assert x.isfinite().all() and block_rms(single - want).max() <= 2e-2 * block_rms(want).max(), name
        # a block that one device rounded by luck counts as the head's mean, as in `cp_mesh.tools.verify`
        signal, relative = block_rms(want), block_rms(single - want, S) / block_rms(want, S).clamp(min=1e-30)
        allowed = 1.5 * torch.maximum(block_rms(single - want), relative * signal) + 1e-6 * signal + 1e-30
        assert (block_rms(x - want) / allowed).max() <= 1, f"{name}: {(block_rms(x - want) / allowed).max():.2f}"


def test_balance_wants_all_tokens() -> None:
    with pytest.raises(cp_mesh.ArgumentError, match="128 tokens, got 24"):
        cp_mesh.balance(Mask(documents=ids_of([24])), 128, 2)


def test_planning_stays_on_the_host() -> None:
    """Whatever the default device is."""
    mask = Mask(documents=ids_of([5, 6, 13]), length=20)
    with torch.device("meta"):
        layout = cp_mesh.balance(mask, 24, 2)
        for each in (ZigZag(), layout):
            schedule = make_schedule(each, mask, 24, 2, 1, True)
            assert schedule.covers and schedule.route.num_rows <= 24


def test_each_stream_has_its_own_tables(monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory of the device belongs to a stream; a graph's own memory to that graph, so a capture is refused."""
    ids = ids_of([3, 17, 4])
    first, again = planned(ids), planned(ids)
    assert first.tiles(None) is again.tiles(None)
    monkeypatch.setattr(contract, "stream_of", lambda device: 9)
    other = planned(ids).tiles(None)
    monkeypatch.setattr(contract, "stream_of", lambda device: 0)
    ours = planned(ids).tiles(None)
    assert all(a.cover is not b.cover for a, b in zip(ours, other, strict=True)) and len(ours)
    monkeypatch.setattr(plan, "stream_of", lambda device: None)
    with pytest.raises(cp_mesh.UnsupportedError, match="capture"):
        planned(ids)


@on_ranks(2)
def test_a_backward_that_is_captured_alone_is_refused(axis: Any) -> None:
    """Its plan comes from a forward before the capture."""
    q, k, v = (x.requires_grad_() for x in make_qkv(1, 2, 2, 12, 8)[:3])
    out = cp_mesh.attention(q, k, v, mesh=axis, mask=Mask(documents=ids_of([3, 17, 4])))
    with mock.patch.object(plan, "stream_of", lambda device: None), refused("capture", cp_mesh.UnsupportedError):
        out.sum().backward()
