"""What must be equal on all ranks and is not raises on every rank, and none waits for another."""

from __future__ import annotations

import functools
import os
import time
from collections.abc import Callable
from contextlib import nullcontext
from datetime import timedelta
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from checks import forget_kept, forget_plans
from inside import MergingForward, SummingBackward, inner, room
from ranks import REFUSALS, mesh, num_collectives, on_ranks, refused
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.utils.checkpoint import checkpoint

import cp_mesh
from cp_mesh import (  # fmt: skip
    ArgumentError,
    ContextParallel,
    Contiguous,
    Mask,
    RankMismatchError,
    ShardedModel,
    ShardedSequence,
    Striped,
    ZigZag,
    attention,
    check_mode,
    mixers,
)
from cp_mesh.geometry import Permuted
from cp_mesh.inference import ShardedCache, decode
from cp_mesh.training import document_sums

agreement = room("agreement")
fingerprint = inner("fingerprints", "fingerprint")

B, H, K, S, D = 2, 4, 2, 24, 8
ROWS = S // 3
ODD = 1  # the rank that differs
Given = dict[str, Any]


def tensors(B: int = B, H: int = H, K: int = K, rows: int = ROWS, D: int = D, dtype: torch.dtype = torch.float64):
    q, k, v = torch.randn(B, H, rows, D), torch.randn(B, K, rows, D), torch.randn(B, K, rows, D)
    return {"query": q.to(dtype), "key": k.to(dtype), "value": v.to(dtype)}


def documents(first: int, dtype: torch.dtype = torch.int64, what: str = "documents") -> Given:
    """Two of ``first`` and the other tokens, in every row of the batch."""
    return {"mask": Mask(**{what: (torch.arange(S) >= first).to(dtype).expand(B, S)})}


def new_axis(**options: Any) -> DeviceMesh:
    """Over which nothing was called."""
    return DeviceMesh.from_group(dist.new_group(**options), "cpu", mesh_dim_names=("cp",))


DROPOUT, TRAINED = {"dropout_p": 0.5, "dropout_seed": 1}, torch.zeros(2, 4, 8, S, requires_grad=True)
SIZES = "same batch, heads and head dims"
CASES: dict[str, tuple[Given, Given, tuple[str, ...]]] = {
    "layout": ({"layout": Striped()}, {}, ("same layout", "cp rank 1: striped", "cp rank 2: zigzag")),
    "index": ({"layout": Permuted(range(S))}, {"layout": Permuted(range(S)[::-1])}, ("same layout index",)),
    "causal": ({"mask": Mask(causal=False)}, {}, ("same mask", "0: Mask(causal=True);", "1: Mask(causal=False);")),
    "window": ({"mask": Mask(window=(3, 0))}, {"mask": Mask(window=(4, 0))}, ("same mask", "window=(3, 0))")),
    "prefix": ({"mask": Mask(prefix=2)}, {}, ("same mask", "Mask(causal=True, prefix=2)")),
    "length of a mask": ({"mask": Mask(length=S - 1)}, {}, ("same mask", "Mask(causal=True, length=23)")),
    "sequence length": (tensors(rows=7), {}, ("same seq_len", "cp rank 0: 24", "cp rank 1: 21")),
    "documents": (documents(7), documents(8), ("same documents", "torch.int64 (2, 24)")),
    "dtype of documents": (documents(8, torch.int32), documents(8), ("same documents", "torch.int32 (2, 24)")),
    "documents on one rank": (documents(8), {}, ("same documents", "cp rank 0: None", "cp rank 1: torch.int64")),
    "blocks": (documents(7, what="blocks"), documents(8, what="blocks"), ("same blocks", "torch.int64 (2, 24)")),
    "key padding": (
        {"mask": Mask(key_padding=torch.arange(S) < S - 1)},
        {"mask": Mask(key_padding=torch.arange(S) < S)},
        ("same key_padding", "torch.bool (24,)"),
    ),
    "batch": (tensors(B=1), {}, (SIZES, "[(1, 4, 8)")),
    "query heads": (tensors(H=6), {}, (SIZES, "[(2, 6, 8)")),
    "kv heads": (tensors(K=1), {}, (SIZES, "(2, 1, 8)")),
    "head dim": (tensors(D=4) | {"scale": 0.5}, {}, (SIZES, "(2, 4, 4)")),
    "dtype": (tensors(dtype=torch.float32), {}, ("same dtype", "cp rank 1: torch.float32")),
    "scale": ({"scale": 0.5}, {}, ("same options", "scale=0.5")),
    "kernel": ({"kernel": "reference"}, {}, ("same options", "kernel=reference")),
    "degree": (
        {"method": "hybrid", "ulysses_degree": 1}, {"method": "hybrid"}, ("same options", "ulysses_degree=1"),
    ),
    "determinism": ({"deterministic": True}, {}, ("same options", "deterministic=True")),
    "sinks": ({"sinks": torch.zeros(4).bfloat16()}, {"sinks": torch.ones(4).bfloat16()}, ("same sinks", "16 (4,)")),
    "alibi": ({"alibi_slopes": torch.ones(4).double()}, {}, ("same alibi_slopes", "cp rank 0: None")),
    "bias": ({"bias": torch.zeros(2, 1, 8, S)}, {"bias": TRAINED.detach()}, ("same bias", "(2, 1, 24)", "(2, 4, 24)")),
    "trained bias": ({"bias": TRAINED}, {"bias": TRAINED.detach()}, ("same gradients wanted of", "cp rank 1: bias")),
    "trained query": ({"query": tensors()["query"].requires_grad_()}, {}, ("same requires_grad of any", "1: True")),
    "dropout": (DROPOUT, DROPOUT | {"dropout_p": 0.25}, ("same options", "dropout_p=0.5")),
    "seed": (DROPOUT, DROPOUT | {"dropout_seed": 2}, ("same dropout_seed",)),
    "softcap": ({"softcap": 30.0}, {}, ("same options", "softcap=30.0", "softcap=0.0")),
}  # fmt: skip
"""Arguments of the odd rank, of the others, and what every rank says."""

REFUSED: dict[str, tuple[Given, Given, tuple[str, ...]]] = {
    "local lengths": (tensors(rows=7), {"seq_len": S}, ("ArgumentError: local sequence length", "got 7 rows")),
    "an option that cannot be": ({"softcap": -30.0}, {}, ("ArgumentError: softcap", "got -30.0")),
    "a kernel that does not exist": ({"kernel": "flash"}, {}, ("ArgumentError: kernel", "'flash'")),
    "a kernel that cannot": ({"kernel": "cudnn"}, {}, ("UnsupportedError: kernel='cudnn' lacks",)),
    "heads": (tensors(K=3), {}, ("ArgumentError: heads", "multiple of kv heads")),
    "a dim, before the group is known": ({"seq_dim": 3}, {}, ("ArgumentError: ",)),
}
"""As above of what the odd rank refuses itself, of which the others hear."""


@pytest.mark.parametrize("always", [True, False], ids=["check mode", "first call"])
@on_ranks(3)
def test_every_rank_raises(rank: int, always: bool) -> None:
    group = {"mesh": dist.new_group()}
    with check_mode() if always else nullcontext():
        for name, (odd, others, says) in (CASES | REFUSED).items():
            with pytest.raises(REFUSALS) as raised:
                attention(**tensors() | group | others | (odd if rank == ODD else {}))
            said, own = f"{raised.type.__name__}: {raised.value}", rank == ODD and name in REFUSED
            assert own or raised.type is RankMismatchError, (name, said)
            assert name in CASES or own or "cp rank 1 raised" in said, (name, said)
            assert all(part in said for part in says), (name, said)
        attention(**tensors() | group)  # the ranks are in step, and equal arguments pass


DIFFERENT: dict[str, tuple[Callable[[ShardedSequence, ShardedCache, int], Any], str]] = {
    "dim": (lambda sequence, cache, i: sequence.unshard(torch.ones(8, 8), i), "unshard: expected the same shape"),
    "shape": (lambda sequence, cache, i: sequence.gather(torch.ones(2, 8, 3 + i)), "gather: expected the same shape"),
    "function": (
        lambda sequence, cache, i: (sequence.gather if i else sequence.unshard)(torch.ones(2, 8)),
        "expected the same call on every cp rank",
    ),
    "gradients": (
        lambda sequence, cache, i: sequence.unshard(torch.ones(2, 8, requires_grad=i == 1)),
        "unshard: expected the same requires_grad",
    ),
    "dtype": (
        lambda sequence, cache, i: sequence.all_reduce(torch.ones(4).double() if i else torch.ones(4)),
        "all_reduce: expected the same dtype",
    ),
    "tokens": (
        lambda sequence, cache, i: cache.append(*[torch.ones(1, 2, 1 + i, 4)] * 2),
        "append: expected the same key on every cp rank",
    ),
}


@pytest.mark.parametrize("name", DIFFERENT)
@on_ranks(2, timeout=20.0)
def test_first_calls_of_a_sequence_are_compared(rank: int, name: str) -> None:
    sequence = ShardedSequence(dist.new_group(), length=16)
    cache, key = ShardedCache(sequence), torch.ones(1, 2, 8, 4)
    cache.prefill(key, key)
    call, says = DIFFERENT[name]
    with refused(says, RankMismatchError):
        call(sequence, cache, rank)


@on_ranks(2, timeout=20.0)
def test_rows_that_shard_cut_otherwise(rank: int) -> None:
    cases = (1, ZigZag(), "seq_dim: expected 1, the dim in which"), (2, Striped(), "layout: expected zigzag, in")
    for dim, layout, says in cases:
        sequence = ShardedSequence(dist.new_group(), length=16)
        x = sequence.shard(torch.ones(2, 16, 16, 8), dim=dim)
        with refused(says, ArgumentError):
            attention(x, x, x, mesh=sequence.mesh, layout=layout)


@on_ranks(3)
def test_dtensors(rank: int, axis: DeviceMesh) -> None:
    q, k, v = (DTensor.from_local(x, axis, [Shard(2)], run_check=False) for x in tensors().values())
    with check_mode(), refused("same layout", RankMismatchError):
        attention(q, k, v, layout=Striped() if rank == ODD else Contiguous())


@pytest.mark.full
@on_ranks(3)
def test_compiled_calls(rank: int, axis: DeviceMesh) -> None:
    call = functools.partial(attention, **tensors(), mesh=axis, mask=Mask(window=(3 + (rank == ODD), 0)))
    with check_mode(), refused("same mask", RankMismatchError):
        torch.compile(call, backend="eager", fullgraph=True)()


@pytest.mark.parametrize("told", [{"mesh": True}, {"seq_dim": 2}], ids=str)
@on_ranks(3, timeout=20.0)
def test_a_refusal_is_heard_on_an_axis_of_any_name(rank: int, told: Given) -> None:
    """Of DTensors, of one rank alone."""
    grid = mesh((1, 3), ("rest", "sequence"))
    given: Given = {name: DTensor.from_local(x, grid, (Replicate(), Shard(2))) for name, x in tensors().items()}
    given |= {"mesh": grid["sequence"]} if told.get("mesh") else told
    for odd in ({"scale": -1.0}, {"kernel": "none of them"}, {"seq_len": 7}, {"mask": None}):
        with check_mode(), refused("", ArgumentError if rank == ODD else RankMismatchError):
            attention(**given | (odd if rank == ODD else {}))


def checks_off() -> Any:
    return check_mode(False)


@pytest.mark.parametrize(
    ("context", "word", "first", "later"),
    [
        (nullcontext, None, True, False),
        (nullcontext, "1", True, True),
        (check_mode, None, True, True),
        (checks_off, None, False, False),
        (checks_off, "1", False, False),
        (check_mode, "2", True, True),
        *((nullcontext, word, True, True) for word in ("true", "Yes", "ON")),
        *((nullcontext, word, False, False) for word in ("0", "False", "no", "off")),
        (nullcontext, "", True, False),
    ],
)
@on_ranks(3)
def test_which_calls_are_compared(rank: int, context: Any, word: str | None, first: bool, later: bool) -> None:
    """Dropout's seeds, of which no kind of call depends; and no collective is added."""
    forget_plans()  # CP_MESH_CHECK is read when a plan is made
    given = {name: x.requires_grad_() for name, x in tensors().items()} | {"dropout_p": 0.5, "mesh": dist.new_group()}
    with mock.patch.dict(os.environ, {} if word is None else {"CP_MESH_CHECK": word}), context():
        for compared in (first, later):
            with refused("same dropout_seed", RankMismatchError) if compared else nullcontext():
                attention(**given, dropout_seed=int(rank == ODD))
            before = num_collectives()
            attention(**given, dropout_seed=1).sum().backward()
            assert num_collectives() - before == 3 * 2  # hops of k and v, twice as many back


class Core(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(x, x, x, is_causal=True)


class Cores(nn.Module):
    """Two layers of attention alone, called in an order that is given."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleDict({name: Core() for name in ("first", "second")})

    def forward(self, x: Tensor, order: list[str]) -> Tensor:
        for name in order:
            x = self.layers[name](x)
        return x


def modules(axis: DeviceMesh, order: tuple[int, ...]) -> None:
    sequence = ShardedSequence(axis)
    model = cp_mesh.parallelize(Cores(), axis, {"layers.*": ContextParallel(sequence)})
    model(torch.randn(B, H, ROWS, D), [("first", "second")[i] for i in order])


def backwards(axis: DeviceMesh, order: tuple[int, ...], how: str = "eager") -> None:
    """Two calls of attention, then their backwards in an order."""
    losses = []
    for window in (3, 3 if how == "eager" else 5):
        x, call = torch.randn(B, H, ROWS, D).requires_grad_(), functools.partial(attention, mesh=axis)
        call = functools.partial(call, mask=Mask(window=(window, 0)))
        if how == "compiled":
            call = torch.compile(call, backend="aot_eager")
        losses.append((checkpoint(call, x, x, x, use_reentrant=False) if how == "recomputed" else call(x, x, x)).sum())
    for number in order:
        losses[number].backward()


WINDOWS = ("same mask", "window=(3, 0)", "window=(5, 0)")


@pytest.mark.parametrize("whole", [True, False])
@pytest.mark.parametrize(
    ("run", "says"),
    [
        (modules, ("order of calls", " in layers.first", " in layers.second")),
        (backwards, ("order of calls", "cp rank 0: backward", "cp rank 1: backward", "of a set differs")),
        pytest.param(functools.partial(backwards, how="compiled"), WINDOWS, marks=pytest.mark.full),
        (functools.partial(backwards, how="recomputed"), WINDOWS),
    ],
)
@on_ranks(3)
def test_check_mode_compares_the_order_of_calls(rank: int, axis: DeviceMesh, run: Any, says: Any, whole: bool) -> None:
    """In check mode for all of it (``whole``), or by the environment."""
    with check_mode() if whole else mock.patch.dict(os.environ, {"CP_MESH_CHECK": "1"}):
        run(axis, (0, 1))
        with pytest.raises(RankMismatchError) as raised:
            run(axis, (1, 0) if rank == ODD else (0, 1))
    assert all(text in str(raised.value) for text in says), raised.value


@pytest.mark.full
@on_ranks(3)
def test_check_mode_compares_how_many_compiled_backwards_there_are(rank: int, axis: DeviceMesh) -> None:
    """The odd rank runs one once more, where the others call attention."""
    x = torch.randn(B, H, ROWS, D).requires_grad_()
    call = torch.compile(functools.partial(attention, mesh=axis), backend="aot_eager")
    with check_mode():
        loss = call(x, x, x).sum()
        loss.backward(retain_graph=True)
        with pytest.raises(RankMismatchError, match="same pass on every cp rank, got cp rank 0: forward; cp rank 1: b"):
            loss.backward() if rank == ODD else call(x, x, x)


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@on_ranks(3)
def test_a_plan_that_one_rank_lost_is_no_first_call(rank: int, axis: DeviceMesh, compiled: bool) -> None:
    """What ranks compare goes by the kind of a call, which they know alike; plans come and go on each rank."""
    call = functools.partial(attention, mesh=axis)
    call = torch.compile(call, backend="aot_eager", fullgraph=True) if compiled else call
    q, k, v = (x.requires_grad_() for x in tensors().values())
    call(q, k, v).sum().backward()
    with mock.patch.object(agreement, "_require_equal") as compared:
        for when in ("forward", "backward"):
            if rank == ODD and when == "forward":
                forget_plans()
            out = call(q, k, v)
            if rank == ODD and when == "backward":
                forget_plans()
            out.sum().backward()
    compared.assert_not_called()


@on_ranks(3, timeout=120.0)
def test_other_words_are_refused_before_the_first_collective(rank: int) -> None:
    """Words of the environment that nobody knows; of the last call on one rank alone, of which the others hear."""
    axis = new_axis()
    sequence, given = ShardedSequence(axis), tensors() | {"mesh": axis}
    root = ShardedModel(sequence, inputs=("input",), positions=None)
    model = cp_mesh.parallelize(nn.Embedding(8, 4), axis, {"": root})
    cache, row = ShardedCache(sequence), torch.zeros(1, 1, 1, 4)
    calls: list[tuple[str, Callable[[], Any]]] = [
        *[(word, lambda: attention(**given)) for word in ("2", "ture", "1 ")],
        ("x", torch.compile(lambda: attention(**given), backend="eager", fullgraph=True)),
        ("x", lambda: model(torch.zeros(1, 6, dtype=torch.int64))),
        ("x", lambda: decode(row, row, row, mesh=axis)),
        ("x", lambda: cache.append(row, row)),
        ("x" if rank == ODD else "", lambda: attention(**given)),
    ]
    for i, (word, call) in enumerate(calls):
        kind = ArgumentError if rank == ODD or i < len(calls) - 1 else RankMismatchError
        says = rf"CP_MESH_CHECK: expected 1, true, yes or on; 0, false,.*got '{word or 'x'}'"
        with mock.patch.dict(os.environ, {"CP_MESH_CHECK": word}), refused(says, kind):
            call()
    attention(**given)  # ranks are in step


@on_ranks(3)
def test_a_first_call_does_not_wait_for_ever(rank: int) -> None:
    """One rank stays away: the others wait in the store, as long as collectives of the group would."""
    group = dist.new_group()
    dist.distributed_c10d._set_pg_timeout(timedelta(seconds=0.5), group)
    if rank != ODD:
        with refused(r"got none from ranks \[1\] in 0:00:00.5", RankMismatchError):
            attention(**tensors(), mesh=group)


@pytest.mark.parametrize("dtype", (torch.float64, torch.bfloat16, torch.int64, torch.bool))
def test_how_a_tensor_lies_in_memory_is_not_compared(dtype: torch.dtype) -> None:
    inside = torch.arange(100).to(dtype)
    for shape in ((), (0,), (1,), (1, 1), (0, 2), (3, 1), (2, 3)):
        x = inside.as_strided(shape, [7, 5][: len(shape)], 3)
        ones = inside[1].expand(shape)  # with strides of 0
        for y in (x, x.transpose(0, -1).contiguous().transpose(0, -1) if shape else x, ones):
            assert fingerprint(y) == fingerprint(torch.tensor(y.tolist(), dtype=dtype).view(shape))
        assert (fingerprint(x) == fingerprint(ones)) == torch.equal(x, ones)


@on_ranks(2)
def test_a_group_that_is_made_anew_reads_nothing_old(rank: int, axis: DeviceMesh) -> None:
    """Comparisons of one number over one store, as when a group is destroyed and made again under its name."""
    group = axis.get_group()
    for number in range(3):
        forget_kept(agreement.Calls)
        dist.barrier(group)
        time.sleep(0.2 * rank * number)  # what the other rank left before is there already
        agreement.compare(group, number, lambda number=number: {"seq_len": str(number)})


# Refusals that a script catches before it goes on over the same group.


@on_ranks(3)
def test_each_refusal_is_heard_once(rank: int) -> None:
    """Each setting is refused by one rank alone; the last one by none."""
    group = dist.new_group()
    settings = ("scale", 0.5, -1.0), ("kernel", "reference", "flash"), ("softcap", 30.0, -30.0), ("scale", 0.25, 0.25)
    for odd, (name, right, wrong) in enumerate(settings):
        kind = ArgumentError if rank == odd else RankMismatchError
        with refused("", kind) if odd < 3 else nullcontext():
            attention(**tensors() | {name: wrong if rank == odd else right}, mesh=group)


def said_of(call: Callable[[], Any]) -> str:
    """The error that it raises."""
    try:
        call()
    except RuntimeError as error:
        return "\n".join([f"{type(error).__name__}: {error}", *getattr(error, "__notes__", [])])
    except ValueError as error:
        return f"{type(error).__name__}: {error}"
    return ""


@on_ranks(2)
def test_a_later_refusal_is_told_when_the_wait_ends(rank: int) -> None:
    """A call that is like the first one to one rank, and that the other one refuses and goes on."""
    group = dist.new_group(timeout=timedelta(seconds=3))
    attention(**tensors(), mesh=group, seq_len=2 * ROWS)
    wrong = tensors(rows=7) if rank == ODD else {}
    said = said_of(lambda: attention(**tensors() | wrong, mesh=group, seq_len=2 * ROWS))
    dist.barrier()
    if rank == ODD:
        assert said.startswith("ArgumentError: local sequence length"), said
    else:
        assert "RuntimeError: attention: rows of other ranks never came: rank 0 waited for ranks [1]" in said, said
        assert "rank 1 of the group has raised: ArgumentError: local sequence length" in said, said


@on_ranks(2)
def test_after_many_kinds_some_calls_are_compared(rank: int) -> None:
    """The third call after the most kinds that are kept differs."""
    group = dist.new_group()
    with mock.patch.object(agreement, "MOST_KINDS", 1):
        for i in range(4):
            attention(**tensors(), mesh=group, scale=1 + i + (0.5 if (i, rank) == (3, ODD) else 0))
        with refused("expected the same calls after the first 1 kinds on every cp rank, got cp rank 0:"):
            attention(**tensors(), mesh=group, scale=5)


@pytest.mark.parametrize("direction", ["forward", "backward"])
@on_ranks(2)
def test_after_an_error_in_a_pass_its_rank_refuses_the_group(rank: int, direction: str) -> None:
    group = dist.new_group(timeout=timedelta(seconds=3))
    x = tensors(K=H)["query"].requires_grad_()
    first, out = (attention(x, x, x, mesh=group) for _ in range(2))
    first.sum().backward()
    backward = direction == "backward"
    call = (lambda: out.sum().backward()) if backward else lambda: attention(x, x, x, mesh=group)
    owner, error = SummingBackward if backward else MergingForward, torch.OutOfMemoryError("as planted")
    with mock.patch.object(owner, "step", side_effect=error) if rank == ODD else nullcontext():
        said, later = said_of(call), said_of(lambda: attention(x, x, x, mesh=group, scale=0.5))
    dist.barrier()
    if rank == ODD:
        assert said == "OutOfMemoryError: as planted"
        assert later.startswith("RankMismatchError: group: expected one whose passes have ended"), later
        assert said in later, later
    else:
        said = (said or later).replace(" while this rank did not", "")
        assert f"rank {ODD}" in said and "raised: OutOfMemoryError: as planted" in said, said


@on_ranks(2)
def test_a_new_plan_hears_of_nothing_before(rank: int) -> None:
    """What a rank refuses where the others call nothing."""
    axis = new_axis()  # later calls over it would hear it
    style = ContextParallel(ShardedSequence(axis))
    for plans in range(2):
        attend = cp_mesh.parallelize(nn.Sequential(Core()), axis, {"0": style}, watch=False)
        attend(torch.randn(1, 2, 8, 8 + 2 * plans))
        if rank == 1:
            with refused("scale", ArgumentError):
                attention(**tensors(), mesh=axis, scale=-1.0)


@pytest.mark.parametrize("what", ["document_sums", "causal_conv1d", "gated_delta_rule", "gla, refused", "unshard"])
@on_ranks(2)
def test_check_mode_compares_all_calls(rank: int, what: str, axis: DeviceMesh) -> None:
    """Of two equal calls the second has other documents, or another shape, on one rank."""
    sequence = ShardedSequence(axis, length=16)
    x = torch.randn(2, 8, 2, 4, dtype=torch.float64)

    def call(n: int) -> Any:
        mask = Mask(documents=torch.arange(16) // (4 + n))
        calls: dict[str, Callable[[], Any]] = {
            "document_sums": lambda: document_sums(x[..., 0, 0], sequence=sequence, mask=mask),
            "causal_conv1d": lambda: mixers.causal_conv1d(x.flatten(2), x[0, :, 0], sequence=sequence, mask=mask),
            "gated_delta_rule": lambda: mixers.gated_delta_rule(
                x, x, x, -x[..., 0].abs(), x[..., 0], sequence=sequence, mask=mask
            ),
            "gla, refused": lambda: mixers.gla(x, x[..., n:], x, sequence=sequence),
            "unshard": lambda: sequence.unshard(x[..., n:]),
        }
        return calls[what]()

    with check_mode():
        call(0)
        with pytest.raises(ArgumentError if rank == 1 and "refused" in what else RankMismatchError):
            call(rank)
