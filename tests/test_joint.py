"""Streams that every rank holds whole: queries on each, keys that count once, gradients that are shares."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from cases import MASKS, gap, make_mask, make_scores, mask_of, pairs, pairs_of
from checks import TOLERANCE, coverage, dense_scores, num_pairs, report, staged_pairs
from dense import dense_attention, make_qkv
from inside import make_schedule, num_rows
from ranks import mesh, num_collectives
from torch import Tensor, nn

from cp_mesh import (
    ArgumentError,
    ContextParallel,
    Contiguous,
    Layout,
    ShardedSequence,
    Striped,
    UnsupportedError,
    ZigZag,
    attention,
    cross_entropy,
    explain,
    parallelize,
)
from cp_mesh.geometry import Joint, Permuted, Replicated
from cp_mesh.inference import ShardedCache
from cp_mesh.tools import verify

B, H, K, D = 2, 6, 3, 4
LAYOUTS = {
    "text first": Joint(Replicated(4), 13),
    "text last": Joint((9, ZigZag()), Replicated(5)),
    "between": Joint(3, Replicated(2), (8, Striped())),
    "two of them": Joint(Replicated(3), (7, ZigZag()), Replicated(1)),
    "text alone": Joint(Replicated(6)),
}


@dataclass(frozen=True)
class Copies:
    """A call with copies, which is compared with one rank's."""

    layout: Layout
    mask: str
    scores: str = "plain"
    method: str = "ring"
    kernel: str = "reference"


def length(layout: Layout) -> int:
    assert isinstance(layout, Joint)
    return sum(n for n, _ in layout.streams)


def parity(rank: int, calls: list[Copies]) -> list[str]:
    """What is wrong with out and lse of each rank's rows, and with the sums of all gradients over the ranks.

    Each rank has a gradient of its own of the rows that it holds; a token's gradient is the sum over its copies.
    """
    size, axis, problems = dist.get_world_size(), mesh((dist.get_world_size(),), ("cp",)), []
    for call in calls:
        S, mask = length(call.layout), make_mask(call.mask, B, length(call.layout))
        *inputs, _ = make_qkv(B, H, K, S, D)
        douts = [torch.randn(B, H, S, D, generator=torch.Generator().manual_seed(r)).double() for r in range(size)]
        held = [call.layout.positions(S, size, r) for r in range(size)]
        given = make_scores(call.scores, B, H, S)
        named = [name for name, x in given.items() if isinstance(x, torch.Tensor) and x.is_floating_point()]
        local = [x[:, :, held[rank]].requires_grad_() for x in inputs]
        tensors = {name: x.clone().requires_grad_() for name, x in given.items() if name in named}
        rows = {name: x[:, :, held[rank]] if name == "bias" and x.shape[2] > 1 else x for name, x in tensors.items()}
        options: dict[str, Any] = {"layout": call.layout, "mask": mask, "method": call.method, "kernel": call.kernel}
        options |= {"mesh": axis, "seq_len": S} | given | rows
        out = attention(*local, **options)
        with torch.no_grad():
            _, lse = attention(*local, **options, return_lse=True)
        grads = torch.autograd.grad(out, [*local, *tensors.values()], douts[rank][:, :, held[rank]])
        whole = [torch.zeros_like(x).index_add_(2, held[rank], grad) for x, grad in zip(inputs, grads[:3], strict=True)]
        summed = [*whole, *(x.contiguous() for x in grads[3:])]
        for x in summed:
            dist.all_reduce(x)
        dout = sum(torch.zeros_like(x).index_add_(2, at, x[:, :, at]) for x, at in zip(douts, held, strict=True))
        dense = [x.detach().clone().requires_grad_() for x in inputs]
        leaves = {name: x.detach().clone().requires_grad_() for name, x in tensors.items()}
        want, want_lse = dense_attention(*dense, pairs(call.mask, B, S), None, **dense_scores(given | leaves, B, H, S))
        wanted = torch.autograd.grad((want * dout).sum(), [*dense, *leaves.values()])
        found = zip(
            ("out", "lse", "dq", "dk", "dv", *(f"d{name}" for name in named)),
            (out, lse, *summed),
            (want[:, :, held[rank]], want_lse[:, :, held[rank]], *wanted),
            strict=True,
        )
        problems += [f"{call}: {name} is off by {gap(x, y):.1e}" for name, x, y in found if gap(x, y) > TOLERANCE]
    return problems


def calls(size: int, full: bool) -> list[Copies]:
    found = [Copies(layout, mask) for layout in LAYOUTS.values() for mask in MASKS]
    found = found if full else found[:: 3 if size > 2 else 2]
    first = LAYOUTS["text first"]
    found += [Copies(first, "full", scores) for scores in ("sinks", "every score", "dropout, sinks and alibi")]
    found += [Copies(first, mask, kernel="cpu_flash") for mask in ("full", "causal", "length")]
    found += [Copies(x, mask, method="all_gather") for x in LAYOUTS.values() for mask in ("full", "prefix and window")]
    return found


@pytest.mark.more("parity")
@pytest.mark.parametrize("cp_size", (1, 2, 3, 4))
@pytest.mark.quick("3")
def test_keys_of_copies_count_once(pool: Any, full: bool, cp_size: int) -> None:
    report(pool(cp_size).run(parity, calls(cp_size, full), timeout=300))


def test_copies_do_not_travel() -> None:
    layout, mask = Joint(Replicated(8), (12, Contiguous())), make_mask("full", 1, 20)
    for rank in range(3):
        schedule = make_schedule(layout, mask, 20, 3, rank)
        assert schedule.shard_lens == (12, 12, 12)
        assert all(rows == ((8, 12),) for source, rows in enumerate(schedule.fetch) if source != rank)
        assert num_pairs(schedule) == 12 * 20 and "pairs" not in schedule.covers


def through_the_sequence(rank: int) -> list[str]:
    """Whole tensors that are sharded, attended, and whole again: each token's gradient is counted once."""
    axis = mesh((dist.get_world_size(),), ("cp",))
    layout = LAYOUTS["between"]
    S = length(layout)
    sequence = ShardedSequence(axis, layout, S, pad=False)
    *inputs, dout = make_qkv(B, H, K, S, D)
    whole = [x.clone().requires_grad_() for x in inputs]
    mask = make_mask("full", B, S)
    out = attention(*(sequence.shard(x, dim=2) for x in whole), mesh=axis, seq_len=S, layout=layout, mask=mask)
    again = sequence.gather(out, dim=2)
    grads = [x.contiguous() for x in torch.autograd.grad((again * dout).sum(), whole)]
    for x in grads:
        dist.all_reduce(x)
    dense = [x.clone().requires_grad_() for x in inputs]
    want, _ = dense_attention(*dense, pairs("full", B, S))
    wanted = torch.autograd.grad((want * dout).sum(), dense)
    found = zip(("out", "dq", "dk", "dv"), (again, *grads), (want, *wanted), strict=True)
    return [f"{name} is off by {gap(x, y):.1e}" for name, x, y in found if gap(x, y) > TOLERANCE]


@pytest.mark.parametrize("cp_size", (2, 3))
def test_unshard_takes_one_copy(pool: Any, cp_size: int) -> None:
    report(pool(cp_size).run(through_the_sequence))


def labels_of_copies(rank: int) -> dict[str, Tensor]:
    """This rank's labels, under names that say that they are some and under others; and its share of a loss."""
    sequence = ShardedSequence(mesh((2,), ("cp",)), Joint(Replicated(3), 4), length=7, pad=False)
    labels, logits = torch.arange(7)[None], torch.randn(1, 7, 9, generator=torch.Generator().manual_seed(0)).double()
    found = {name: sequence.shard({name: labels})[name] for name in ("labels", "position_ids")}
    found |= {"padded": sequence.shard(labels, pad_value=-100), "other": sequence.shard(labels, pad_value=0)}
    found["ignored"] = sequence.shard({"labels": labels}, pad_value=-1)["labels"]
    found["loss"] = cross_entropy(sequence.shard(logits), found["labels"], sequence.mesh)
    assert torch.equal(labels, torch.arange(7)[None])
    return found | {"wanted": F.cross_entropy(logits[0], labels[0])}


def test_labels_of_copies_count_once(pool: Any) -> None:
    first, second = pool(2).run(labels_of_copies)
    every = ("labels", "padded", "ignored", "position_ids", "other")
    assert all(first[name].tolist() == [[0, 1, 2, 3, 4]] for name in every)
    for name, copy in zip(every, ([-100] * 3, [-100] * 3, [-1] * 3, [0, 1, 2], [0, 1, 2]), strict=True):
        assert second[name].tolist() == [[*copy, 5, 6]], name
    torch.testing.assert_close(first["loss"] + second["loss"], first["wanted"], rtol=1e-12, atol=0)


def refusals(rank: int) -> list[str]:
    axis, problems = mesh((2,), ("cp",)), []
    layout = Joint(Replicated(4), 8)
    q, k, v, _ = make_qkv(1, 2, 2, 8, 4)
    sequence = ShardedSequence(axis, layout, 12, pad=False)
    tries: list[tuple[str, type[Exception], Any]] = [
        ("method='ring'", UnsupportedError, lambda: attention(q, k, v, mesh=axis, seq_len=12, layout=layout,
                                                             method="ulysses")),
        ("method='ring'", UnsupportedError, lambda: attention(q, k, v, mesh=axis, seq_len=12, layout=layout,
                                                             method="hybrid", ulysses_degree=2)),
        ("pass seq_len=12", ArgumentError, lambda: attention(q, k, v, mesh=axis, layout=layout)),
        ("in place of Replicated", UnsupportedError, lambda: verify(axis, layout=layout, seq_len=12)),
        ("without Replicated", UnsupportedError, lambda: ShardedCache(sequence).prefill(k, v)),
    ]  # fmt: skip
    for words, kind, call in tries:
        before, said = num_collectives(), "nothing"
        try:
            call()
        except kind as error:
            said = str(error)
        if words not in said or num_collectives() > before:
            problems.append(f"{words}: {said}")
    return problems


def test_what_copies_are_refused_in(pool: Any) -> None:
    report(pool(2).run(refusals))


class Listed(Contiguous):
    """A layout of a user's, with a tensor."""

    @property
    def tensor(self) -> Tensor:
        return torch.arange(4)


def test_a_tensor_of_a_users_layout_is_refused_in_a_stream() -> None:
    with pytest.raises(ArgumentError, match="got a Listed with a tensor; Permuted takes any order"):
        Joint(3, (4, Listed()))


def test_joint_layouts_are_explained() -> None:
    text = str(explain(24, 2, layout=Joint(Replicated(4), 20), num_heads=4, num_kv_heads=2, head_dim=16))
    assert "joint:4=replicated;20=contiguous" in text


@pytest.mark.parametrize("cp_size", (2, 3, 5))
@pytest.mark.parametrize("mask", ("causal", "full", "window", "prefix and window", "everything"))
def test_streams_of_unlike_strides_are_covered(mask: str, cp_size: int) -> None:
    """Blocks between them are no bands: every pair is computed once, though more rows may travel than are needed."""
    S = 23
    layout = Joint((9, Striped()), 5, (9, ZigZag()))
    report([coverage(layout, make_mask(mask, B, S), pairs(mask, B, S), cp_size)])


def test_a_listed_piece_is_fetched_whole() -> None:
    """Of the listed positions 6 and 7 of rank 0, the queries of ranks without such a list see only 6."""
    layout, mask = Joint(6, (7, Permuted(range(7)))), {"causal": True, "prefix": 7}
    report([coverage(layout, mask_of(mask), pairs_of(mask, 13), 6)])
    for rank in (4, 5):
        assert make_schedule(layout, mask_of(mask), 13, 6, rank).fetch[0] == ((0, 3),)


@pytest.mark.parametrize("cp_size", (1, 2, 3, 5))
@pytest.mark.parametrize("segments", (False, True))
@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.quick("-3")
def test_schedules_of_copies(name: str, segments: bool, cp_size: int) -> None:
    """Every allowed pair of a query with this rank's copy or with a key that has one owner, once; by documents too."""
    layout = LAYOUTS[name]
    S, kinds = length(layout), set()
    order = layout.permutation(S, cp_size)
    shards = [layout.positions(S, cp_size, rank) for rank in range(cp_size)]
    owner = torch.repeat_interleave(torch.arange(cp_size), torch.tensor([len(x) for x in shards]))
    is_copy = torch.bincount(order, minlength=S)[order] > 1
    for mask in MASKS:
        want = pairs(mask, B, S)[:, order][:, :, order] & ((owner[:, None] == owner) | ~is_copy)
        found = [make_schedule(layout, make_mask(mask, B, S), S, cp_size, rank, segments) for rank in range(cp_size)]
        begins = [0, *accumulate(found[0].shard_lens)]
        assert staged_pairs(found, want.int(), begins).equal(want.int()), mask
        for schedule in found:
            fetched = [num_rows(rows) for rows in schedule.fetch]
            assert schedule.route.needed[schedule.cp_rank].tolist() == fetched
            assert [num_rows(x) for x in schedule.serve] == schedule.route.needed[:, schedule.cp_rank].tolist()
            kinds |= schedule.covers
    assert ("segments" in kinds) == segments


class Full(nn.Module):
    """An attention core without a mask."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, enable_gqa=True)


def in_a_plan(rank: int, compiled: bool) -> list[str]:
    """Cores of a plan whose sequence is of several streams; text and image are sharded each by itself."""
    axis, problems = mesh((2,), ("cp",)), []
    for text in (9, Replicated(9)):
        joint = ShardedSequence(axis, Joint(text, (14, ZigZag())), length=23, pad=False)
        image = ShardedSequence(axis, ZigZag(), length=14, pad=False)
        first = ShardedSequence(axis, Contiguous(), length=9, pad=False)
        core = parallelize(Full(), axis, {"": ContextParallel(joint, mask=make_mask("full", B, 23))})
        core = torch.compile(core, backend="aot_eager", fullgraph=True) if compiled else core
        *inputs, _ = make_qkv(B, H, K, 23, D)
        parts = [x.split([9, 14], dim=2) for x in inputs]
        rows = [(t if isinstance(text, Replicated) else first.shard(t, dim=2), image.shard(i, dim=2)) for t, i in parts]
        out = core(*(torch.cat(x, dim=2) for x in rows))
        found = gap(joint.unshard(out, dim=2), dense_attention(*inputs, pairs("full", B, 23))[0])
        problems += [f"{text}: off by {found:.1e}"] if found > TOLERANCE else []
    return problems


@pytest.mark.parametrize("compiled", (False, pytest.param(True, marks=pytest.mark.full)))
def test_in_a_plan(pool: Any, compiled: bool) -> None:
    report(pool(2).run(in_a_plan, compiled))
