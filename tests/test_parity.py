"""The parity gate: in fp64 over gloo, results and all gradients equal dense attention to 1e-10."""

import re
import warnings
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from itertools import product
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from cases import BANDS, LAYOUTS, MASKS, SCORES, gap
from checks import GQA, MHA, MQA, Case, call, parity_on_ranks, report, serves, to_format
from covering import Row, covering_array
from dense import dense_attention, dense_dropout, make_qkv
from inside import METHODS, inner, path_of
from ranks import mesh, on_ranks, refused
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import cp_mesh
from cp_mesh import ZigZag
from cp_mesh.geometry import ZigZagDocuments

score_placements = inner("dtensor", "score_placements")

HEADS, SEQ_DIMS = (GQA, MHA, MQA), (2, 1, 0)
MEMORIES = ("contiguous", "transposed", "sliced", "strided", "expanded", "transposed", "sliced")


FACTORS = {
    "cp_size": (1, 2, 3, 4),
    "layout": tuple(LAYOUTS),
    "mask": tuple(MASKS),
    "scores": tuple(SCORES),
    "S": (0, 1, 2, 3, 7, 31, 97),
    "heads": HEADS,
    "seq_dim": SEQ_DIMS,
    "memory": tuple(dict.fromkeys(MEMORIES)),
    "head_chunks": (None, 1, 3),
    "scale": (None, 0.7),
    "lse_gradient": (True, False),
}
"""The options of a call of the reference kernel, and the values that take part in the parity gate."""


def goes_together(row: Row) -> bool:
    """A packed call has no batch to expand, and three chunks need three kv heads."""
    is_expanded, is_packed = row.get("memory") == "expanded", row.get("seq_dim") == 0
    return not (is_expanded and is_packed) and not (row.get("heads") == MQA and row.get("head_chunks") == 3)


@cache
def calls_of(strength: int) -> list[Row]:
    """Calls in which every two options, or every three, have all of their values together."""
    return covering_array(FACTORS, strength, goes_together)


def cases_of(calls: Sequence[Row], cp_size: int, method: str = "auto") -> list[Case]:
    rows = [row for row in calls if row["cp_size"] == cp_size]
    return [Case(**{name: x for name, x in row.items() if name != "cp_size"}, method=method) for row in rows]


@pytest.mark.parametrize("cp_size", FACTORS["cp_size"])
@pytest.mark.parametrize(
    "strength", (2, pytest.param(3, marks=pytest.mark.nightly("parity"))), ids=("pairs", "triples")
)
@pytest.mark.quick("pairs-3")
def test_options_together(pool, strength, cp_size):
    cases = cases_of(calls_of(strength), cp_size)
    for begin in range(0, len(cases), 200):
        report(pool(cp_size).run(parity_on_ranks, (cp_size,), ("cp",), cases[begin : begin + 200], timeout=300))


OTHERS = tuple(name for name in METHODS if name != "ring")
OF_METHODS = FACTORS | {"heads": (*HEADS, (4, 2), (12, 3))}
OF_GROUPS = ("hybrid",)
SIZES = {name: FACTORS["cp_size"] for name in OTHERS} | {"hybrid": (4, 6)}
"""Numbers of ranks: on fewer these are the ring or Ulysses, here mostly 2 x 2, 2 x 3 or 3 x 2."""
OTHERS_ON_RANKS = [(method, size) for method, sizes in SIZES.items() for size in sizes]


@cache
def is_served(method: str, known: tuple[tuple[str, Any], ...]) -> bool:
    """Whether some call with these options is: the others of those that a method looks at may be any."""
    names = ("cp_size", "heads", "head_chunks")
    of_method = OF_METHODS | {"cp_size": SIZES[method]}
    choices = (of_method[name] if name not in dict(known) else [dict(known)[name]] for name in names)
    return any(serves(method, *values) for values in product(*choices))


@cache
def calls_by(method: str, strength: int) -> list[Row]:
    """As `calls_of`, by another method than the ring."""

    def go_together(row: Row) -> bool:
        known = tuple((name, row[name]) for name in ("cp_size", "heads", "head_chunks") if name in row)
        return goes_together(row) and is_served(method, known)

    return covering_array(OF_METHODS | {"cp_size": SIZES[method]}, strength, go_together)


@pytest.mark.parametrize(("method", "cp_size"), OTHERS_ON_RANKS)
@pytest.mark.parametrize("strength", (1, pytest.param(2, marks=pytest.mark.nightly("parity"))), ids=("each", "pairs"))
@pytest.mark.quick("each-ulysses-4", "each-hybrid-4")
def test_options_of_other_methods(pool, method, strength, cp_size):
    """Every mask, score, layout, format and so on; in the nightly form every two of them."""
    cases = cases_of(calls_by(method, strength), cp_size, method)
    for begin in range(0, len(cases), 200):
        report(pool(cp_size).run(parity_on_ranks, (cp_size,), ("cp",), cases[begin : begin + 200], timeout=300))


METHODS_OF_FOUR: dict[str, dict[str, Any]] = {
    "ring": {}, "all_gather": {}, "ulysses": {}, "hybrid": {"ulysses_degree": 2}
}  # fmt: skip
"""Options of all methods on 4 ranks, by which inner groups are of two."""
ONE_TOKEN_EACH = ZigZagDocuments(range(21))
"""Of 20 documents: the first of 4 ranks holds all tokens."""


@pytest.mark.parametrize("method", METHODS_OF_FOUR)
@pytest.mark.quick("ring", "hybrid")
def test_heads_in_chunks_where_ranks_hold_no_row(pool, method):
    """Up to whole inner groups, and all ranks."""
    sequences = ((0, "zigzag"), (1, "contiguous"), (2, "shuffled"), (3, "striped"), (20, ONE_TOKEN_EACH))
    cases = [
        Case(layout, "causal", S, (8, 8), scores=scores, head_chunks=2, lse_gradient=through_lse, way=way)
        for S, layout in sequences
        for scores, through_lse, way in (("plain", False, "eager"), ("every score", True, "checkpoint"))
    ]
    cases = [replace(case, method=method, options=METHODS_OF_FOUR[method]) for case in cases]
    report(pool(4).run(parity_on_ranks, (4,), ("cp",), cases))


@on_ranks(4)
def test_empty_batches(axis: Any) -> None:
    """Calls without a batch row, of which every gradient is of the shape of what it is of."""
    S = 8
    ids = torch.zeros(0, S, dtype=torch.int64)
    masks: dict[str, dict[str, Any]] = {
        "plain": {},
        "documents": {"documents": ids},
        "key_padding": {"key_padding": ids > 0},
    }
    masks |= {"blocks": {"blocks": ids}, "all": {"documents": ids, "key_padding": ids > 0, "blocks": ids}}
    for (method, options), mask, chunks in product(METHODS_OF_FOUR.items(), masks, (None, 2)):
        qkv = [torch.zeros(0, 8, S // 4, D, requires_grad=True) for D in (5, 5, 4)]
        sinks = torch.zeros(8, requires_grad=True)
        with warnings.catch_warnings(action="error"):
            made = cp_mesh.Mask(**masks[mask])
        options = {"method": method, "mask": made, "head_chunks": chunks, "sinks": sinks} | options
        out, lse = cp_mesh.attention(*qkv, mesh=axis, return_lse=True, **options)
        grads = torch.autograd.grad(out.sum() + lse.sum(), (*qkv, sinks))
        shapes = [tuple(x.shape) for x in (out, lse, *grads)]
        assert shapes == [(0, 8, 2, 4), (0, 8, 2), *(tuple(x.shape) for x in qkv), (8,)], (method, mask, chunks)
        assert not grads[-1].any()


def one_number(dtype: torch.dtype = torch.float64) -> Tensor:
    """[1] of stride 2, which pickling would lose."""
    return torch.tensor([1, 2], dtype=dtype)[::2]


@on_ranks(4)
def test_scores_of_one_number_with_any_stride(rank: int) -> None:
    """Of one head, as of a rank that holds one of several; and a seed."""
    seed = {"dropout_p": 0.3, "dropout_seed": one_number(torch.int64)}
    scores = {"sinks": one_number(), "alibi_slopes": one_number()} | seed
    cases = [
        Case("zigzag", "causal", 13, heads, scores=given, method=method, options=options, way="check mode")
        for method, options in METHODS_OF_FOUR.items()
        for heads, given in (((1, 1), scores), ((4, 4), seed))
        if heads[0] > 1 or method not in ("ulysses", "hybrid")
    ]
    report([parity_on_ranks(rank, (4,), ("cp",), cases)])


@pytest.mark.parametrize(("method", "cp_size"), [("ulysses", 2), ("hybrid", 4)])
@on_ranks("cp_size")
def test_an_order_of_runs_is_made_anew_while_a_graph_is_captured(rank: int, method) -> None:
    cases = [Case(layout, "causal", 13, method=method) for layout in ("contiguous", "zigzag", "striped")]
    with mock.patch(f"{path_of('ulysses')}.stream_of", return_value=None):
        report([parity_on_ranks(rank, (dist.get_world_size(),), ("cp",), cases)])


@pytest.mark.parametrize("cp_size", FACTORS["cp_size"])
@pytest.mark.parametrize("method", METHODS)
@on_ranks("cp_size")
def test_what_is_not_served_is_refused(axis: Any, method, cp_size) -> None:
    """Every other number of heads and chunks of the table is a call of the tests above."""
    cells = [
        (heads, head_chunks)
        for heads, head_chunks in product(OF_METHODS["heads"], FACTORS["head_chunks"])
        if not serves(method, cp_size, heads, head_chunks)
    ]
    assert cells
    for heads, head_chunks in cells:
        q, k, v, _ = make_qkv(1, *heads, 8, 4)
        with refused(
            r"(method='ring'|head_chunks=\d+) works", (cp_mesh.UnsupportedError, cp_mesh.ArgumentError)
        ) as said:
            cp_mesh.attention(q, k, v, mesh=axis, method=method, head_chunks=head_chunks)
        works = re.search(r"head_chunks=(\d+) works", str(said.value))
        nearest = {"method": method, "head_chunks": int(works[1])} if works else {"method": "ring"}
        cp_mesh.attention(q, k, v, mesh=axis, **nearest)


def table(S: int, masks: Sequence[str] = tuple(MASKS)) -> list[Case]:
    """Every layout with every mask; heads, format and memory take turns."""
    cases = []
    for i, (mask, layout) in enumerate(product(masks, LAYOUTS)):
        memory, seq_dim = MEMORIES[i % 7], SEQ_DIMS[i // 3 % 3]
        memory = "sliced" if memory == "expanded" and seq_dim == 0 else memory  # there is no batch to expand
        cases.append(Case(layout, mask, S, HEADS[i % 3], seq_dim, "reference", memory))
    return cases


@pytest.mark.parametrize(
    ("shape", "names"),
    [
        ((2, 2), ("cp", "tp")),
        pytest.param((2, 2), ("dp", "cp"), marks=pytest.mark.full),
        pytest.param((2, 2, 1), ("cp", "dp", "tp"), marks=pytest.mark.full),
        ((2, 1, 2), ("dp", "tp", "cp")),
    ],
    ids=str,
)
@pytest.mark.quick("(2, 1, 2)-('dp', 'tp', 'cp')")
def test_on_an_axis_of_a_mesh(pool, shape, names):
    """The rank in the cp group is not the global rank, and each group has data of its own."""
    cases = table(31, masks=("causal", "full", "window", "everything")) + table(3, masks=("causal", "documents"))
    report(pool(4).run(parity_on_ranks, shape, names, cases, timeout=300))


def banded(method: str, cp_size: int) -> list[Case]:
    """What a kernel of full and causal tiles can serve, runs and masks that are bands, with all that it is given."""
    layouts = [name for name in LAYOUTS if name not in ("shuffled", "reversed")]
    cases = [
        Case(
            layout, mask, S, HEADS[i % 3], SEQ_DIMS[(i // 3) % 3], "cpu_flash",
            ("contiguous", "strided", "transposed", "sliced")[i % 4], (None, 0.7)[i // 2 % 2],
            scores=("plain", "sinks")[i // 4 % 2], head_chunks=(None, 1, 3)[i % 5 % 3], method=method,
        )
        for i, (S, layout, mask) in enumerate(product((1, 3, 7, 31, 97), layouts, BANDS))
    ]  # fmt: skip
    return [case for case in cases if serves(method, cp_size, case.heads, case.head_chunks)]


@pytest.mark.parametrize(
    ("method", "cp_size"),
    [
        *(("auto", size) for size in (1, 2, 3, 4)),
        *(
            pytest.param(x, n, marks=pytest.mark.nightly("parity"))
            for x, n in OTHERS_ON_RANKS
            if (n == 4 and x in OF_GROUPS) or n in (2, 3)
        ),
    ],
)
@pytest.mark.quick("auto-4")
def test_cpu_flash(pool, method, cp_size):
    report(pool(cp_size).run(parity_on_ranks, (cp_size,), ("cp",), banded(method, cp_size), timeout=300))


def test_nothing_is_read_before_it_is_there_nor_written_while_it_is_sent(pool, full):
    """On a group that delivers at the wait, NaN until then, and compares what was sent with what is there then."""
    cases = table(13, masks=tuple(MASKS) if full else ("causal", "full", "window", "documents", "everything"))
    cases += [Case(layout, "causal", 13, kernel="cpu_flash") for layout in ("zigzag", "striped")]
    cases += [
        Case(layout, mask, 13, heads, scores=scores, method=method)
        for method in OTHERS
        for layout, mask, heads, scores in (
            ("zigzag", "causal", GQA, "every score"), ("contiguous", "documents", MHA, "plain"),
            ("shuffled", "window", MQA, "sinks"), ("striped", "everything", (12, 4), "dropout, sinks and alibi"),
        )
    ]  # fmt: skip
    report(pool(3).run(parity_on_ranks, (3,), ("cp",), cases, True, timeout=300))
    options = {"ulysses_degree": 2}
    cases = [replace(case, options=options) for case in cases if case.method == "hybrid" and not case.heads[0] % 2]
    report(pool(4).run(parity_on_ranks, (4,), ("cp",), cases, True, timeout=300))


@pytest.mark.parametrize("layout", ("contiguous", "zigzag", "striped", "shuffled"))
@pytest.mark.parametrize("cp_size", (1, 2, 4))
@on_ranks("cp_size")
def test_dropout_is_the_same_for_every_layout_and_number_of_ranks(rank: int, axis: Any, layout: str) -> None:
    """Which weights of this rank's rows are dropped: values are one-hot, so that out is the weights."""
    S, made = 24, LAYOUTS[layout](24)
    rows = made.positions(S, axis.size(), rank)
    q, k, v = torch.zeros(2, 6, len(rows), 4), torch.zeros(2, 3, len(rows), 4), torch.eye(S)[rows].expand(2, 3, -1, -1)
    options = {"dropout_p": 0.4, "dropout_seed": 99, "mask": cp_mesh.Mask(causal=False)}
    out = cp_mesh.attention(q, k, v, mesh=axis, seq_len=S, layout=made, **options)
    want = dense_dropout(2, 6, S, 0.4, 99) == 0
    assert 0.35 < want.double().mean() < 0.45 and torch.equal(out == 0, want[:, :, rows])


@on_ranks(3)
def test_calls_without_options(rank: int, axis: Any) -> None:
    """Calls as users write them: no length, the kernel left to choose, a loss that expands its gradient."""
    S = 12
    q, k, v, _ = make_qkv(2, 6, 3, S, 5)
    rows = ZigZag().positions(S, 3, rank)
    for needed in (("q", "k", "v"), ("q",), ("k",), ("v",), ("k", "v")):
        whole, local = {}, {}
        for name, x in {"q": q, "k": k, "v": v}.items():
            whole[name] = x.clone().requires_grad_(name in needed)
            local[name] = x[:, :, rows].clone().requires_grad_(name in needed)
        causal = torch.ones(S, S, dtype=torch.bool).tril()[None]
        want, _ = dense_attention(*whole.values(), causal)
        got = cp_mesh.attention(*local.values(), mesh=axis)
        want.sum().backward()
        got.sum().backward()
        assert gap(got, want[:, :, rows]) <= 1e-10
        for name, x in local.items():
            assert (x.grad is None) == (name not in needed), name
            assert x.grad is None or gap(x.grad, whole[name].grad[:, :, rows]) <= 1e-10, name


def dtensors(
    rank: int,
    shape: tuple[int, ...],
    names: tuple[str, ...],
    placed: dict[str, str],
    cases: Sequence[Case],
    turn: int = 0,
) -> list[str]:
    """DTensors over a whole mesh: the sequence on cp, or on two axes of such names, and as `placed` says heads and the
    batch on other axes.

    How the cp axis is told, and which tensors of the scores are DTensors, changes with each case, from ``turn`` on.
    """
    grid, problems = mesh(shape, names), []
    axes = tuple(name for name in names if name[:2] == "cp")
    cp_axis = grid[axes] if len(axes) > 1 else grid["cp"]
    parts = [placed.get(name, "sequence" if name in axes else "whole") for name in names]
    for i, case in enumerate(cases, turn):
        dims = {2: {"batch": 0, "heads": 1, "sequence": 2}, 1: {"batch": 0, "sequence": 1, "heads": 2}}
        dims[0] = {"sequence": 0, "heads": 1}
        lse_dims = {"heads": 0, "sequence": 1} if case.seq_dim == 0 else dims[2]
        placements, lse_placements = (
            [Replicate() if part == "whole" else Shard(dims[part]) for part in parts]
            for dims in (dims[case.seq_dim], lse_dims)
        )
        layout, mask = case.make_layout(), case.make_mask()
        order = layout.permutation(case.S, cp_axis.size())
        whole, scores = case.oracle(0), case.make_scores()
        want = {
            name: to_format(x.index_select(2, order), case.seq_dim)
            for name, x in whole.items()
            if name[1:] not in scores
        }
        q, k, v, dout, dlse = (
            distribute_tensor(want[name], grid, lse_placements if name == "dlse" else placements, src_data_rank=None)
            for name in ("q", "k", "v", "dout", "dlse")
        )
        if "batch" in parts:  # tensors of the mask are those of this rank's batch rows
            dp_rank, dp_size = 0, 1
            for part, coordinate, axis_size in zip(parts, grid.get_coordinate(), shape, strict=True):
                if part == "batch":
                    dp_rank, dp_size = dp_rank * axis_size + coordinate, dp_size * axis_size
            own = {
                name: x.chunk(dp_size)[dp_rank]
                for name in ("documents", "key_padding", "blocks")
                if (x := getattr(mask, name)) is not None and x.ndim > 1 and len(x) > 1
            }
            mask = replace(mask, **own)
        given, summed = {}, {}
        for j, (name, x) in enumerate(scores.items()):
            if not isinstance(x, Tensor) or not x.is_floating_point():
                given[name] = x
                continue
            in_order = x.ndim == 4 and x.shape[2] > 1
            x = x.index_select(2, order) if in_order else x
            want[f"d{name}"] = whole[f"d{name}"].index_select(2, order) if in_order else whole[f"d{name}"]
            own = [score_placements(name, x.shape, part)[0] for part in parts]
            placed_x = distribute_tensor(x, grid, own, src_data_rank=None)
            # Local tensors are taken too: their gradients are this rank's share.
            placed_x = placed_x if (i + j) % 2 else placed_x.to_local().clone()
            given[name] = placed_x.requires_grad_(name not in case.frozen)
            summed[f"d{name}"] = [score_placements(name, x.shape, part)[1] for part in parts]
        # Three ways to tell the cp axis; formats other than SDPA's are always said.
        options = ({}, {"mesh": cp_axis}, {"seq_dim": case.seq_dim})[i % 3 if len(axes) == 1 else 1]
        options |= {"seq_dim": case.seq_dim} if case.seq_dim != 2 else {}
        options |= {"layout": layout, "mask": mask, "kernel": case.kernel, "scale": case.scale}
        options |= {"head_chunks": case.head_chunks, "method": case.method} | given | case.options
        qkv = [x.requires_grad_(name not in case.frozen) for name, x in zip("qkv", (q, k, v), strict=True)]
        got = call(qkv, [dout, dlse], case.through_lse, options, case.way)
        for name, on in summed.items():
            if (x := got.pop(name, None)) is None:
                continue
            if isinstance(x, DTensor) and list(x.placements) != on:
                problems.append(f"rank {rank}: {case}: {name} is placed {x.placements}")
            if not isinstance(x, DTensor):  # shards may be unequal, so the shape is told
                like = want[name]
                x = DTensor.from_local(x, grid, on, run_check=False, shape=like.shape, stride=like.stride())
            if not (off := gap(x.full_tensor(), want[name])) <= 1e-10:
                problems.append(f"rank {rank}: {case}: {name} is off by {off:.1e}")
        for name, x in got.items():
            if list(x.placements) != (lse_placements if name == "lse" else placements):
                problems.append(f"rank {rank}: {case}: {name} is placed {x.placements}")
            if not (off := gap(x.full_tensor(), want[name])) <= 1e-10:
                problems.append(f"rank {rank}: {case}: {name} is off by {off:.1e}")
    return problems


HEADS_ON_TP, BATCH_ON_DP = {"tp": "heads"}, {"dp": "batch"}
TWO_AXES = [  # one dim on two axes: its shards are those of the product
    pytest.param((2, 2, 1), ("tp", "tp2", "cp"), HEADS_ON_TP | {"tp2": "heads"}, marks=pytest.mark.full),
    ((2, 1, 2), ("dp", "cp", "dp2"), BATCH_ON_DP | {"dp2": "batch"}),
    ((1, 2, 2), ("dp", "tp", "cp"), HEADS_ON_TP | {"dp": "heads"}),
]


@pytest.mark.parametrize(
    ("shape", "names", "placed"),
    [
        ((4,), ("cp",), {}),
        ((2, 2), ("cp", "tp"), HEADS_ON_TP),
        ((2, 2, 1), ("dp", "cp", "tp"), HEADS_ON_TP | BATCH_ON_DP),
        *(
            pytest.param(*setting, marks=pytest.mark.full)
            for setting in (
                ((2, 2), ("tp", "cp"), HEADS_ON_TP),
                ((2, 2), ("cp", "tp"), {}),
                ((2, 2), ("dp", "cp"), BATCH_ON_DP),
                ((1, 2, 2), ("dp", "cp", "tp"), HEADS_ON_TP | BATCH_ON_DP),
            )
        ),
    ],
    ids=str,
)
@pytest.mark.quick("(2, 2)-('cp', 'tp')-{'tp': 'heads'}")
def test_dtensors(pool, shape, names, placed):
    cases = [
        Case(layout, mask, 16, (4, 2), seq_dim, kernel)
        for seq_dim, (mask, layout, kernel) in product(
            (2, 1, 0),
            (
                ("causal", "zigzag", "cpu_flash"),
                ("causal", "striped", "reference"),
                ("window", "contiguous", "reference"),
                ("documents", "zigzag", "reference"),
                ("everything", "shuffled", "reference"),
            ),
        )
        if seq_dim or "batch" not in placed.values()
    ]
    report(pool(4).run(dtensors, shape, names, placed, cases, timeout=300))


@pytest.mark.parametrize(("shape", "names", "placed"), TWO_AXES, ids=str)
@pytest.mark.quick("dp2")
def test_one_dim_on_two_axes(pool, full, shape, names, placed):
    """What depends on global indices, as dropout does on heads and batch rows, counts the shards of both axes."""
    sizes = (4, 5, 4) if "batch" in placed.values() else None
    cases = [
        Case(layout, mask, 16, (8, 4), seq_dim, scores=scores, sizes=sizes)
        for scores, (layout, mask, seq_dim) in product(
            (*(["plain"] if full else []), "every score", "dropout, sinks and alibi"),
            (("zigzag", "causal", 2), ("contiguous", "documents", 1), ("striped", "full", 0)),
        )
        if seq_dim or "batch" not in placed.values()
    ]
    report(pool(4).run(dtensors, shape, names, placed, cases, timeout=300))


@pytest.mark.parametrize(
    ("shape", "names", "placed"),
    [
        ((2, 2), ("cp", "tp"), HEADS_ON_TP),
        ((2, 2), ("dp", "cp"), BATCH_ON_DP),
        pytest.param((1, 2, 2), ("cp", "tp", "dp"), {}, marks=pytest.mark.full),
    ],
    ids=str,
)
@pytest.mark.more("parity")
@pytest.mark.quick("'tp')")
def test_scores_of_dtensors(pool, full, shape, names, placed):
    """Layout, mask and format take turns; in the nightly form on the first mesh each score has all of them."""
    settings = (("zigzag", "causal", 2), ("contiguous", "documents", 1), ("striped", "full", 0))
    settings = [setting for setting in settings if setting[2] or "batch" not in placed.values()]
    cases = [
        Case(layout, mask, 16, (8, 4), seq_dim, scores=scores)
        for i, scores in enumerate(SCORES)
        for layout, mask, seq_dim in (settings if full and placed == HEADS_ON_TP else [settings[i % len(settings)]])
    ]
    report(pool(4).run(dtensors, shape, names, placed, cases, timeout=300))


@pytest.mark.more("parity")
@pytest.mark.parametrize(
    ("shape", "names", "placed"),
    [
        ((2, 2), ("cp", "tp"), HEADS_ON_TP),
        pytest.param((2, 2), ("dp", "cp"), BATCH_ON_DP, marks=pytest.mark.full),
        pytest.param((4,), ("cp",), {}, marks=pytest.mark.full),
    ],
    ids=str,
)
def test_dtensors_of_other_methods(pool, full, shape, names, placed):
    """As above; shards of 15 rows are unequal."""
    settings = (("zigzag", "causal", 2, 16), ("contiguous", "documents", 1, 15), ("striped", "full", 0, 16))
    settings = [setting for setting in settings if setting[2] or "batch" not in placed.values()]
    cases = [
        Case(layout, mask, S, (8, 4), seq_dim, scores=scores, method=method)
        for turn, method in enumerate(OTHERS)
        for i, scores in enumerate(SCORES, turn)
        for layout, mask, seq_dim, S in (settings if full and placed == HEADS_ON_TP else [settings[i % len(settings)]])
        if full or scores in ("plain", "every score", "dropout, sinks and alibi")
    ]
    report(pool(4).run(dtensors, shape, names, placed, cases, timeout=300))


def test_dtensors_of_unequal_shards(pool, full):
    """DTensor cuts 97 in 25, 25, 25 and 22, 5 in 2, 2, 1 and 0, and 1 and 3 leave ranks without rows; contiguous and
    permuted layouts do as well. In the quick form the formats take turns.
    """
    sequences = [*product((97, 5), ("contiguous", "shuffled"), ("causal", "full", "documents"))]
    sequences += product((1, 3), ("contiguous", "shuffled"), MASKS) if full else ()
    cases = [
        Case(layout, mask, S, (4, 2), seq_dim)
        for i, (S, layout, mask) in enumerate(sequences)
        for seq_dim in (SEQ_DIMS if full and S > 3 else SEQ_DIMS[i % 3 :][:1])
    ]
    report(pool(4).run(dtensors, (4,), ("cp",), {}, cases, timeout=300))


NAMES = ("out", "dq", "dk", "dv")


def rms(x: Tensor) -> Tensor:
    """Root mean square over 128 rows of [B, H, S, D]: [S / 128, B, H]."""
    return torch.stack([block.square().mean((2, 3)).sqrt() for block in x.split(128, dim=2)])


def inputs_of(dtype: torch.dtype, heads: tuple[int, int], S: int) -> list[Tensor]:
    return [x.to(dtype) for x in make_qkv(2, *heads, S, 16, seed=3)]


@cache  # for all methods and kernels
def exact_results(dtype: torch.dtype, heads: tuple[int, int], S: int) -> tuple[Tensor, ...]:
    """Of dense attention in fp64, out and the gradients of q, k and v."""
    *qkv, dout = (x.double() for x in inputs_of(dtype, heads, S))
    qkv = [x.requires_grad_() for x in qkv]
    out, _ = dense_attention(*qkv, torch.ones(S, S, dtype=torch.bool).tril()[None])
    return out.detach(), *torch.autograd.grad(out, qkv, dout)


def low_precision(rank: int, dtype: torch.dtype, kernel: str, limit: float, method: str) -> list[str]:
    """Errors against fp64 are at most `limit` times those of the same kernel on one device, by head and 128 rows."""
    size, S, layout, problems = dist.get_world_size(), 768, ZigZag(), []
    axis, alone = mesh((size,), ("cp",)), mesh((size, 1), ("other", "cp"))["cp"]
    heads = (6, 2) if method == "ulysses" else (4, 2)  # each kv head is sent to more ranks than one
    q, k, v, dout = inputs_of(dtype, heads, S)
    rows = layout.positions(S, size, rank)

    def results(axis: Any, *inputs: Tensor) -> dict[str, Tensor]:
        q, k, v, dout = (x.clone().requires_grad_() for x in inputs)
        out = cp_mesh.attention(q, k, v, mesh=axis, layout=layout, kernel=kernel, method=method)
        return dict(zip(NAMES, (out.detach(), *torch.autograd.grad(out, (q, k, v), dout.detach())), strict=True))

    def whole(x: Tensor) -> Tensor:
        shards = [torch.empty_like(x) for _ in range(size)]
        dist.all_gather(shards, x)
        return torch.cat(shards, dim=2)[:, :, layout.inverse(S, size)]

    exact = dict(zip(NAMES, exact_results(dtype, heads, S), strict=True))
    single, ring = results(alone, q, k, v, dout), results(axis, *(x[:, :, rows] for x in (q, k, v, dout)))
    for name, x in ring.items():
        ratio = rms(whole(x).double() - exact[name]) / rms(single[name].double() - exact[name])
        if x.dtype != dtype or not ratio.max() <= limit:
            problems.append(f"{name}: {x.dtype}, {ratio.max():.2f} times the error of one device")
    return problems


@pytest.mark.parametrize(
    ("dtype", "limit", "kernel"),
    # In fp32 no last rounding hides that a merge rounds about as much as a kernel does.
    [
        (torch.float32, 2.0, "reference"),
        (torch.bfloat16, 1.5, "cpu_flash"),
        *(
            pytest.param(*setting, marks=pytest.mark.full)
            for setting in (
                (torch.float32, 2.0, "cpu_flash"),
                (torch.bfloat16, 1.5, "reference"),
                (torch.float16, 1.5, "reference"),
                (torch.float16, 1.5, "cpu_flash"),
            )
        ),
    ],
    ids=str,
)
@pytest.mark.parametrize(
    "method", ["ring", *(pytest.param(method, marks=pytest.mark.nightly("parity")) for method in OTHERS)]
)
@pytest.mark.quick("bfloat16")
def test_low_precision(pool, dtype, limit, kernel, method):
    report(pool(4 if method in OF_GROUPS else 3).run(low_precision, dtype, kernel, limit, method))
