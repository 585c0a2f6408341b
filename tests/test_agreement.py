"""Check mode: what must be equal on all ranks and is not raises on every rank, and none waits for another."""

from __future__ import annotations

import functools
import itertools
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from checks import forget_kept, forget_plans
from inside import MergingForward, SummingBackward, inner, room
from ranks import mesh, num_collectives
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.utils.checkpoint import checkpoint

import cp_mesh
from cp_mesh import ContextParallel, Contiguous, Mask, ShardedSequence, Striped, attention, check_mode, mixers
from cp_mesh.geometry import Permuted
from cp_mesh.training import document_sums

agreement = room("agreement")
passes = room("passes")
fingerprint = inner("fingerprints", "fingerprint")

WORLD_SIZE = 3
B, H, K, S, D = 2, 4, 2, 24, 8
ROWS = S // WORLD_SIZE
ODD = 1  # the rank that differs


def tensors(B: int = B, H: int = H, K: int = K, rows: int = ROWS, D: int = D, dtype: torch.dtype = torch.float64):
    q, k, v = torch.randn(B, H, rows, D), torch.randn(B, K, rows, D), torch.randn(B, K, rows, D)
    return {"query": q.to(dtype), "key": k.to(dtype), "value": v.to(dtype)}


def documents(first: int, dtype: torch.dtype = torch.int64) -> Tensor:
    """Two documents of ``first`` and the other tokens, in every row of the batch."""
    return (torch.arange(S) >= first).to(dtype).expand(B, S)


@dataclass(frozen=True)
class Case:
    """Arguments that all ranks share and those of the odd one, and what every rank says.

    Where the odd rank refuses its own arguments, ``odd_error`` is its class and ``odd_says`` its words; the other ranks
    say ``says``.
    """

    says: tuple[str, ...]
    odd: Callable[[], dict[str, Any]]
    shared: Callable[[], dict[str, Any]] = field(default=dict)
    odd_error: str = "RankMismatchError"
    odd_says: tuple[str, ...] = ()


CASES = {
    "layout": Case(("same layout", "cp rank 1: striped", "cp rank 2: zigzag"), lambda: {"layout": Striped()}),
    "index of a layout": Case(
        ("same layout index",),
        lambda: {"layout": Permuted(range(S))},
        lambda: {"layout": Permuted(range(S)[::-1])},
    ),
    "causal": Case(
        ("same mask", "cp rank 0: Mask(causal=True);", "cp rank 1: Mask(causal=False);"),
        lambda: {"mask": Mask(causal=False)},
    ),
    "window": Case(
        ("same mask", "window=(4, 0))", "window=(3, 0))"),
        lambda: {"mask": Mask(window=(3, 0))},
        lambda: {"mask": Mask(window=(4, 0))},
    ),
    "prefix": Case(("same mask", "Mask(causal=True, prefix=2)"), lambda: {"mask": Mask(prefix=2)}),
    "a mask of padding": Case(("same mask", "Mask(causal=True, length=23)"), lambda: {"mask": Mask(length=S - 1)}),
    "sequence length": Case(("same seq_len", "cp rank 0: 24", "cp rank 1: 21"), lambda: tensors(rows=7)),
    "local lengths": Case(
        ("cp rank 1 raised", "ArgumentError: local sequence length", "got 7 rows"),
        lambda: tensors(rows=7),
        lambda: {"seq_len": S},
        "ArgumentError",
        ("local sequence length", "got 7 rows"),
    ),
    "content of documents": Case(
        ("same documents", "torch.int64 (2, 24)"),
        lambda: {"mask": Mask(documents=documents(7))},
        lambda: {"mask": Mask(documents=documents(8))},
    ),
    "dtype of documents": Case(
        ("same documents", "torch.int32 (2, 24)"),
        lambda: {"mask": Mask(documents=documents(8, torch.int32))},
        lambda: {"mask": Mask(documents=documents(8))},
    ),
    "documents on one rank": Case(
        ("same documents", "cp rank 0: None", "cp rank 1: torch.int64"), lambda: {"mask": Mask(documents=documents(8))}
    ),
    "content of blocks": Case(
        ("same blocks", "torch.int64 (2, 24)"),
        lambda: {"mask": Mask(blocks=documents(7))},
        lambda: {"mask": Mask(blocks=documents(8))},
    ),
    "key padding": Case(
        ("same key_padding", "torch.bool (24,)"),
        lambda: {"mask": Mask(key_padding=torch.arange(S) < S - 1)},
        lambda: {"mask": Mask(key_padding=torch.arange(S) < S)},
    ),
    "batch": Case(("same batch, heads and head dims", "[(1, 4, 8)"), lambda: tensors(B=1)),
    "query heads": Case(("same batch, heads and head dims", "[(2, 6, 8)"), lambda: tensors(H=6)),
    "kv heads": Case(("same batch, heads and head dims", "(2, 1, 8)"), lambda: tensors(K=1)),
    "head dim": Case(("same batch, heads and head dims", "(2, 4, 4)"), lambda: tensors(D=4) | {"scale": 0.5}),
    "dtype": Case(("same dtype", "cp rank 1: torch.float32"), lambda: tensors(dtype=torch.float32)),
    "scale": Case(("same options", "scale=0.5"), lambda: {"scale": 0.5}),
    "kernel": Case(("same options", "kernel=reference"), lambda: {"kernel": "reference"}),
    "degree": Case(
        ("same options", "ulysses_degree=0", "ulysses_degree=1"),
        lambda: {"method": "hybrid", "ulysses_degree": 1},
        lambda: {"method": "hybrid"},
    ),
    "determinism": Case(("same options", "deterministic=True"), lambda: {"deterministic": True}),
    "sinks": Case(
        ("same sinks", "torch.float64 (4,)"),
        lambda: {"sinks": torch.zeros(4, dtype=torch.float64)},
        lambda: {"sinks": torch.ones(4, dtype=torch.float64)},
    ),
    "sinks of bfloat16": Case(
        ("same sinks", "torch.bfloat16 (4,)"),
        lambda: {"sinks": torch.zeros(4, dtype=torch.bfloat16)},
        lambda: {"sinks": torch.ones(4, dtype=torch.bfloat16)},
    ),
    "alibi": Case(
        ("same alibi_slopes", "cp rank 0: None"), lambda: {"alibi_slopes": torch.ones(4, dtype=torch.float64)}
    ),
    "heads of a bias": Case(
        ("same bias", "(2, 1, 24)", "(2, 4, 24)"),
        lambda: {"bias": torch.zeros(2, 1, 8, S)},
        lambda: {"bias": torch.zeros(2, 4, 8, S)},
    ),
    "a bias that is trained": Case(
        ("same gradients wanted of", "cp rank 0: none", "cp rank 1: bias"),
        lambda: {"bias": torch.zeros(2, 4, 8, S, requires_grad=True)},
        lambda: {"bias": torch.zeros(2, 4, 8, S)},
    ),
    "inputs that are trained": Case(
        ("same requires_grad of any input", "cp rank 0: False", "cp rank 1: True"),
        lambda: {"query": tensors()["query"].requires_grad_()},
    ),
    "dropout": Case(
        ("same options", "dropout_p=0.5"),
        lambda: {"dropout_p": 0.5, "dropout_seed": 1},
        lambda: {"dropout_p": 0.25, "dropout_seed": 1},
    ),
    "seed": Case(
        ("same dropout_seed",),
        lambda: {"dropout_p": 0.5, "dropout_seed": 1},
        lambda: {"dropout_p": 0.5, "dropout_seed": 2},
    ),
    "softcap": Case(("same options", "softcap=30.0", "softcap=0.0"), lambda: {"softcap": 30.0}),
    "an option that cannot be": Case(
        ("cp rank 1 raised", "ArgumentError: softcap"),
        lambda: {"softcap": -30.0},
        odd_error="ArgumentError",
        odd_says=("softcap", "got -30.0"),
    ),
    "a kernel that does not exist": Case(
        ("cp rank 1 raised", "ArgumentError: kernel", "'flash'"),
        lambda: {"kernel": "flash"},
        odd_error="ArgumentError",
        odd_says=("kernel", "'flash'"),
    ),
    "a kernel that cannot": Case(
        ("cp rank 1 raised", "UnsupportedError: kernel='cudnn' lacks"),
        lambda: {"kernel": "cudnn"},
        odd_error="UnsupportedError",
        odd_says=("kernel='cudnn' lacks",),
    ),
    "heads that do not divide": Case(
        ("cp rank 1 raised", "ArgumentError: heads"),
        lambda: tensors(K=3),
        odd_error="ArgumentError",
        odd_says=("multiple of kv heads",),
    ),
}


def arguments(rank: int, case: Case) -> dict[str, Any]:
    return tensors() | {"mesh": mesh((3,), ("cp",))} | case.shared() | (case.odd() if rank == ODD else {})


def disagree(rank: int, always: bool) -> dict[str, tuple[str, str] | None]:
    """What each case raised on this rank, in check mode or in a first call on a new group."""
    raised: dict[str, tuple[str, str] | None] = {}
    new = {"mesh": dist.new_group()}
    with check_mode() if always else nullcontext():
        for name, case in CASES.items():
            raised[name] = None
            try:
                attention(**arguments(rank, case) | new)
            except Exception as error:
                raised[name] = type(error).__name__, str(error)
        attention(**arguments(rank, Case((), dict)) | new)  # the ranks are in step, and equal arguments pass
    return raised


@pytest.fixture(scope="module", params=[True, False], ids=["check mode", "first call"])
def raised(pool: Any, request: pytest.FixtureRequest) -> list[dict[str, tuple[str, str] | None]]:
    return pool(WORLD_SIZE).run(disagree, request.param)


@pytest.mark.parametrize("name", CASES)
def test_every_rank_raises(name: str, raised: list[dict[str, tuple[str, str] | None]]) -> None:
    case = CASES[name]
    for rank in range(WORLD_SIZE):
        is_odd = rank == ODD and case.odd_error != "RankMismatchError"
        expected, says = (case.odd_error, case.odd_says) if is_odd else ("RankMismatchError", case.says)
        outcome = raised[rank][name]
        assert outcome is not None, f"rank {rank} did not raise"
        assert outcome[0] == expected, f"rank {rank}: {outcome}"
        missing = [part for part in says if part not in outcome[1]]
        assert not missing, f"rank {rank} does not say {missing}: {outcome[1]}"


def differ(rank: int, name: str) -> None:
    sequence = ShardedSequence(dist.new_group(), length=16)
    cache = cp_mesh.inference.ShardedCache(sequence)
    key = torch.ones(1, 2, 8, 4)
    cache.prefill(key, key)
    DIFFERENT[name][0](sequence, cache, rank)


DIFFERENT: dict[str, tuple[Callable[[ShardedSequence, cp_mesh.inference.ShardedCache, int], Any], str]] = {
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
def test_first_calls_of_a_sequence_are_compared(pool: Any, name: str) -> None:
    for error in pool(2).run_expecting_error(differ, name, timeout=20.0):
        assert error is not None and error.type == "RankMismatchError" and DIFFERENT[name][1] in error.message, error


def cut_otherwise(rank: int, dim: int, layout: cp_mesh.Layout) -> None:
    sequence = ShardedSequence(dist.new_group(), length=16)
    x = sequence.shard(torch.ones(2, 16, 16, 8), dim=dim)
    attention(x, x, x, mesh=sequence.mesh, layout=layout)


@pytest.mark.parametrize(
    ("dim", "layout", "says"),
    [(1, cp_mesh.ZigZag(), "seq_dim: expected 1, the dim in which"), (2, Striped(), "layout: expected zigzag, in")],
)
def test_rows_that_shard_cut_otherwise(pool: Any, dim: int, layout: cp_mesh.Layout, says: str) -> None:
    for error in pool(2).run_expecting_error(cut_otherwise, dim, layout, timeout=20.0):
        assert error is not None and error.type == "ArgumentError" and says in error.message, error


def disagree_by_dtensors(rank: int) -> None:
    layout = Striped() if rank == ODD else Contiguous()
    axis = mesh((3,), ("cp",))
    q, k, v = (DTensor.from_local(x, axis, [Shard(2)], run_check=False) for x in tensors().values())
    with check_mode():
        attention(q, k, v, layout=layout)


def disagree_compiled(rank: int) -> None:
    options = arguments(rank, CASES["window"])
    with check_mode():
        torch.compile(lambda: attention(**options), backend="eager", fullgraph=True)()


@pytest.mark.parametrize("call", [disagree_by_dtensors, pytest.param(disagree_compiled, marks=pytest.mark.full)])
def test_dtensors_and_compiled_calls(pool: Any, call: Callable[..., None]) -> None:
    for error in pool(WORLD_SIZE).run_expecting_error(call):
        assert error is not None and error.type == "RankMismatchError", error


def refuse_dtensors(rank: int, told: dict[str, Any], odd: dict[str, Any]) -> None:
    """A refusal on one rank alone, of DTensors whose cp axis has another name."""
    grid = mesh((1, WORLD_SIZE), ("rest", "sequence"))
    options: dict[str, Any] = {
        name: DTensor.from_local(x, grid, (Replicate(), Shard(2))) for name, x in tensors().items()
    }
    options |= {"mesh": grid["sequence"]} if told.get("mesh") else told
    with check_mode():
        attention(**options | (odd if rank == ODD else {}))


@pytest.mark.parametrize("odd", [{"scale": -1.0}, {"kernel": "none of them"}, {"seq_len": 7}, {"mask": None}], ids=str)
@pytest.mark.parametrize("told", [{"mesh": True}, {"seq_dim": 2}], ids=str)
def test_a_refusal_is_heard_on_an_axis_of_any_name(pool: Any, told: dict[str, Any], odd: dict[str, Any]) -> None:
    errors = pool(WORLD_SIZE).run_expecting_error(refuse_dtensors, told, odd, timeout=5.0)
    for rank, error in enumerate(errors):
        assert error is not None and error.type == ("ArgumentError" if rank == ODD else "RankMismatchError"), error


def refuse_before_the_group(rank: int) -> None:
    options = arguments(rank, Case((), lambda: {"seq_dim": 3}))
    with check_mode():
        attention(**options)


def test_a_refused_seq_dim_does_not_hang(pool: Any) -> None:
    for rank, error in enumerate(pool(WORLD_SIZE).run_expecting_error(refuse_before_the_group, timeout=3.0)):
        assert error is not None and error.type == ("ArgumentError" if rank == ODD else "RankMismatchError")


def count(rank: int, context: Callable[[], Any], environment: dict[str, str]) -> tuple[list[int], list[int]]:
    """Comparisons and collectives of a forward that is not the first of its kind, and of its backward."""
    forget_plans()  # CP_MESH_CHECK is read when a plan is made
    options = arguments(rank, Case((), dict))
    for name in ("query", "key", "value"):
        options[name].requires_grad_()
    attention(**options)

    def done() -> list[int]:
        return [words.call_count, num_collectives()]

    with mock.patch.dict("os.environ", environment), context():
        with mock.patch.object(agreement, "Words", wraps=agreement.Words) as words:
            numbers = [done()]
            out = attention(**options)
            numbers.append(done())
            out.sum().backward()
            numbers.append(done())
    forward, backward = ([y - x for x, y in zip(*pair, strict=True)] for pair in itertools.pairwise(numbers))
    return forward, backward


def checks_off() -> Any:
    return check_mode(False)


@pytest.mark.parametrize(
    ("context", "environment", "exchanges"),
    [
        (nullcontext, {}, False),
        (nullcontext, {"CP_MESH_CHECK": "0"}, False),
        (nullcontext, {"CP_MESH_CHECK": "1"}, True),
        (check_mode, {}, True),
        (checks_off, {"CP_MESH_CHECK": "1"}, False),
        *[(nullcontext, {"CP_MESH_CHECK": word}, True) for word in ("true", "Yes", "ON")],
        *[(nullcontext, {"CP_MESH_CHECK": word}, False) for word in ("", "False", "no", "off")],
        (check_mode, {"CP_MESH_CHECK": "2"}, True),
    ],
)
def test_exchanges_only_where_asked(
    pool: Any, context: Callable[[], Any], environment: dict[str, str], exchanges: bool
) -> None:
    ring = WORLD_SIZE - 1  # one hop of K and V from each other rank, one of their gradients back
    for found in pool(WORLD_SIZE).run(count, context, environment):
        assert found == ([int(exchanges), ring], [int(exchanges), 2 * ring])


class Cores(nn.Module):
    """Two layers of attention alone, called in an order that is given."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleDict({name: Core() for name in ("first", "second")})

    def forward(self, x: Tensor, order: tuple[str, ...]) -> Tensor:
        for name in order:
            x = self.layers[name](x)
        return x


class Core(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(x, x, x, is_causal=True)


def backwards(order: tuple[int, ...], compiled: bool) -> None:
    """Two calls of attention, then their backwards in an order."""
    axis, losses = mesh((WORLD_SIZE,), ("cp",)), []
    for window in (3, 5 if compiled else 3):
        x = torch.randn(B, H, ROWS, D).requires_grad_()
        call = functools.partial(attention, mesh=axis, mask=Mask(window=(window, 0)))
        losses.append((torch.compile(call, backend="aot_eager") if compiled else call)(x, x, x).sum())
    for number in order:
        losses[number].backward()


def recomputed(order: tuple[int, ...], compiled: bool) -> None:
    """As `backwards`, of two checkpoints, which call attention once more in their backward."""
    axis, losses = mesh((WORLD_SIZE,), ("cp",)), []
    for window in (3, 5):
        x = torch.randn(B, H, ROWS, D).requires_grad_()
        call = functools.partial(attention, mesh=axis, mask=Mask(window=(window, 0)))
        losses.append(checkpoint(call, x, x, x, use_reentrant=False).sum())
    for number in order:
        losses[number].backward()


def in_order(rank: int, of: str, compiled: bool, whole: bool, same: bool) -> None:
    """In check mode for all of it (``whole``), by the forwards' context or by the environment alone."""
    order = (1, 0) if rank == ODD and not same else (0, 1)
    with check_mode() if whole else mock.patch.dict("os.environ", {"CP_MESH_CHECK": "1"}):
        if of == "modules":
            sequence = ShardedSequence(mesh((WORLD_SIZE,), ("cp",)))
            model = cp_mesh.parallelize(Cores(), sequence.mesh, {"layers.*": ContextParallel(sequence)})
            model(torch.randn(B, H, ROWS, D), tuple(("first", "second")[i] for i in order))
        else:
            (backwards if of == "backwards" else recomputed)(order, compiled)


@pytest.mark.parametrize("whole", [True, False])
@pytest.mark.parametrize(
    ("of", "compiled", "says"),
    [
        ("modules", False, ("order of calls", " in layers.first", " in layers.second")),
        ("backwards", False, ("order of calls", "cp rank 0: backward", "cp rank 1: backward", "of a set differs")),
        ("backwards", True, ("same mask", "window=(3, 0)", "window=(5, 0)")),
        ("recomputed", False, ("same mask", "window=(3, 0)", "window=(5, 0)")),
    ],
)
@pytest.mark.quick(without="backwards-True")
def test_check_mode_compares_the_order_of_calls(
    pool: Any, of: str, compiled: bool, says: tuple[str, ...], whole: bool
) -> None:
    ranks = pool(WORLD_SIZE)
    for error in ranks.run_expecting_error(in_order, of, compiled, whole, False):
        assert error is not None and error.type == "RankMismatchError", error
        assert all(text in error.message for text in says), error.message
    ranks.run(in_order, of, compiled, whole, True)


def one_more(rank: int) -> None:
    """The odd rank runs a compiled backward once more, where the others call attention."""
    axis, x = mesh((WORLD_SIZE,), ("cp",)), torch.randn(B, H, ROWS, D).requires_grad_()
    call = torch.compile(functools.partial(attention, mesh=axis), backend="aot_eager")
    with check_mode():
        loss = call(x, x, x).sum()
        loss.backward(retain_graph=True)
        loss.backward() if rank == ODD else call(x, x, x)


@pytest.mark.full
def test_check_mode_compares_how_many_compiled_backwards_there_are(pool: Any) -> None:
    for error in pool(WORLD_SIZE).run_expecting_error(one_more):
        assert error is not None and error.type == "RankMismatchError", error
        assert "same pass on every cp rank, got cp rank 0: forward; cp rank 1: backward" in error.message


def one_rank_forgets(rank: int, compiled: bool) -> None:
    """The odd rank has lost its plan before a second forward, and before its backward."""
    call = functools.partial(attention, mesh=mesh((WORLD_SIZE,), ("cp",)))
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


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_a_plan_that_one_rank_lost_is_no_first_call(pool: Any, compiled: bool) -> None:
    """What ranks compare goes by the kind of a call, which they know alike; plans come and go on each rank."""
    pool(WORLD_SIZE).run(one_rank_forgets, compiled, timeout=60.0)


def refused_words(rank: int) -> list[tuple[str, int]]:
    """What each call raises where the environment has a word that nobody knows, and its collectives; then of one rank.

    On the last rank alone, the others hear of it.
    """
    axis = DeviceMesh.from_group(dist.new_group(), "cpu", mesh_dim_names=("cp",))
    sequence, given = cp_mesh.ShardedSequence(axis), tensors() | {"mesh": axis}
    root = cp_mesh.ShardedModel(sequence, inputs=("input",), positions=None)
    model = cp_mesh.parallelize(torch.nn.Embedding(8, 4), axis, {"": root})
    cache = cp_mesh.inference.ShardedCache(sequence)
    row = torch.zeros(1, 1, 1, 4)
    calls: list[tuple[str, Callable[[], Any]]] = [
        *[(word, lambda: attention(**given)) for word in ("2", "ture", "1 ")],
        ("x", torch.compile(lambda: attention(**given), backend="eager", fullgraph=True)),
        ("x", lambda: model(torch.zeros(1, 6, dtype=torch.int64))),
        ("x", lambda: cp_mesh.inference.decode(row, row, row, mesh=axis)),
        ("x", lambda: cache.append(row, row)),
        ("x" if rank == ODD else "", lambda: attention(**given)),
    ]
    found = []
    for word, call in calls:
        before = num_collectives()
        with mock.patch.dict("os.environ", {"CP_MESH_CHECK": word}), pytest.raises(Exception) as raised:
            call()
        found.append((f"{raised.type.__name__}: {raised.value}", num_collectives() - before))
    attention(**given)  # ranks are in step
    return found


def test_other_words_are_refused_before_the_first_collective(pool: Any) -> None:
    words = ["'2'", "'ture'", "'1 '", "'x'", "'x'", "'x'", "'x'"]
    for rank, found in enumerate(pool(WORLD_SIZE).run(refused_words, timeout=120.0)):
        *alike, (odd, _) = found
        assert [num for _, num in found] == [0] * len(found)
        for (said, _), word in zip(alike, words, strict=True):
            assert said.startswith("ArgumentError: CP_MESH_CHECK: expected 1, true, yes or on; 0, false,"), said
            assert f"got {word}; " in said, said
        assert odd.startswith("ArgumentError: CP_MESH_CHECK" if rank == ODD else "RankMismatchError"), odd
        assert "CP_MESH_CHECK: expected 1" in odd and "got 'x'" in odd, odd


def looked_at(rank: int) -> list[int]:
    """Comparisons of a first call, of two like it and of one of another window; then with all of it turned off."""
    counts, group, real = [], dist.new_group(), dist.PrefixStore.set
    seen: list[str] = []
    with mock.patch.object(
        dist.PrefixStore, "set", lambda store, key, value: seen.append(key) or real(store, key, value)
    ):
        for mask in (Mask(), Mask(), Mask(), Mask(window=(5, 0))):
            attention(**tensors(), mesh=group, mask=mask)
            counts.append(len(seen))
        with check_mode(False):
            attention(**tensors(), mesh=group, mask=Mask(window=(4, 0)))
        with mock.patch.dict("os.environ", {"CP_MESH_CHECK": "0"}):
            attention(**tensors(), mesh=group, mask=Mask(window=(3, 0)))
        counts.append(len(seen))
    return counts


def test_later_calls_are_not_compared(pool: Any) -> None:
    assert pool(WORLD_SIZE).run(looked_at) == [[1, 1, 1, 2, 2]] * WORLD_SIZE


def never_come(rank: int) -> float:
    """One rank stays away from a first call: the others wait in the store, and not for ever."""
    begin, group = time.perf_counter(), dist.new_group()
    with mock.patch.object(agreement, "PATIENCE", timedelta(seconds=0.5)):
        if rank != ODD:
            with pytest.raises(cp_mesh.RankMismatchError, match=r"got none from ranks \[1\]"):
                attention(**tensors(), mesh=group)
    return time.perf_counter() - begin


def test_a_first_call_does_not_wait_for_ever(pool: Any) -> None:
    assert max(pool(WORLD_SIZE).run(never_come)) < 20


@pytest.mark.parametrize("dtype", (torch.float64, torch.bfloat16, torch.int64, torch.bool))
@pytest.mark.parametrize("shape", ((), (0,), (1,), (1, 1), (0, 2), (3, 1), (2, 3)), ids=str)
def test_how_a_tensor_lies_in_memory_is_not_compared(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    inside = torch.arange(100).to(dtype)
    x = inside.as_strided(shape, [7, 5][: len(shape)], 3)
    ones = inside[1].expand(shape)  # with strides of 0
    for y in (x, x.transpose(0, -1).contiguous().transpose(0, -1) if shape else x, ones):
        assert fingerprint(y) == fingerprint(torch.tensor(y.tolist(), dtype=dtype).view(shape))
    assert (fingerprint(x) == fingerprint(ones)) == torch.equal(x, ones)


def made_anew(rank: int) -> None:
    """Two comparisons of one number over one store, as when a group is destroyed and made again under its name."""
    group = mesh((2,), ("cp",)).get_group()
    for number in range(3):
        forget_kept(agreement.Calls)
        dist.barrier(group)
        time.sleep(0.2 * rank * number)  # what the other rank left before is there already
        agreement.compare(group, number, lambda number=number: {"seq_len": str(number)})


def test_a_group_that_is_made_anew_reads_nothing_old(pool: Any) -> None:
    pool(2).run(made_anew)


# Refusals that a script catches before it goes on over the same group.


def try_settings(rank: int) -> list[str]:
    """Each setting is refused by one rank alone; the last one by none."""
    group, said = dist.new_group(), []
    settings: list[dict[str, Any]] = [{"scale": 0.5}, {"kernel": "reference"}, {"softcap": 30.0}, {"scale": 0.25}]
    wrong: list[dict[str, Any]] = [{"scale": -1.0}, {"kernel": "flash"}, {"softcap": -30.0}, {}]
    for odd, (right, refused) in enumerate(zip(settings, wrong, strict=True)):
        try:
            attention(**tensors() | right | (refused if rank == odd else {}), mesh=group)
            said.append("nothing")
        except Exception as error:
            said.append(type(error).__name__)
    return said


def test_each_refusal_is_heard_once(pool: Any) -> None:
    for rank, said in enumerate(pool(WORLD_SIZE).run(try_settings)):
        assert said == ["ArgumentError" if rank == odd else "RankMismatchError" for odd in range(3)] + ["nothing"]


def refuse_later(rank: int) -> str:
    """A call that is like the first one to one rank, and that the other one refuses and goes on."""
    group = dist.new_group(timeout=timedelta(seconds=3))
    for wrong in ({}, tensors(rows=7) if rank == ODD else {}):
        try:
            attention(**tensors() | wrong, mesh=group, seq_len=2 * ROWS)
        except Exception as error:
            return "\n".join([f"{type(error).__name__}: {error}", *getattr(error, "__notes__", [])])
        finally:
            dist.barrier()
    return "nothing"


def test_a_later_refusal_is_told_when_the_wait_ends(pool: Any) -> None:
    waited, refused = pool(2).run(refuse_later)
    assert refused.startswith("ArgumentError: local sequence length"), refused
    assert waited.startswith("RuntimeError: attention: rows of other ranks never came"), waited
    assert f"rank 1 of the group has raised: {refused}" in waited, waited


def many_kinds(rank: int) -> list[str]:
    """What calls say after the most kinds that are kept, of which the third differs on the odd rank."""
    group, said = dist.new_group(), []
    with mock.patch.object(agreement, "MOST_KINDS", 1):
        for i in range(5):
            try:
                attention(**tensors(), mesh=group, scale=1 + i + (0.5 if (i, rank) == (3, ODD) else 0))
                said.append("")
            except cp_mesh.RankMismatchError as error:
                said.append(f"{error}")
    return said


def test_after_many_kinds_some_calls_are_compared(pool: Any) -> None:
    for said in pool(2).run(many_kinds):
        assert said[:4] == [""] * 4
        assert "expected the same calls after the first 1 kinds on every cp rank, got cp rank 0:" in said[4]


def leave_a_pass(rank: int, direction: str) -> list[str]:
    """What two calls say of which the odd rank leaves the first by an error, in one direction."""
    group, said = dist.new_group(timeout=timedelta(seconds=3)), []
    x = tensors(K=H)["query"].requires_grad_()
    first, out = (attention(x, x, x, mesh=group) for _ in range(2))
    first.sum().backward()
    calls = [lambda: attention(x, x, x, mesh=group), lambda: attention(x, x, x, mesh=group, scale=0.5)]
    owner = MergingForward
    if direction == "backward":
        calls[0], owner = lambda: out.sum().backward(), SummingBackward
    error = torch.OutOfMemoryError("as planted")
    with mock.patch.object(owner, "step", side_effect=error) if rank == ODD else nullcontext():
        for call in calls:
            try:
                call()
            except RuntimeError as caught:
                said.append("\n".join([f"{type(caught).__name__}: {caught}", *getattr(caught, "__notes__", [])]))
    dist.barrier()
    return said


@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_after_an_error_in_a_pass_its_rank_refuses_the_group(pool: Any, direction: str) -> None:
    others, (left, refused) = pool(2).run(leave_a_pass, direction)
    assert left == "OutOfMemoryError: as planted"
    assert refused.startswith("RankMismatchError: group: expected one whose passes have ended"), refused
    assert left in refused, refused
    assert f"rank {ODD}" in others[0] and f"raised: {left}" in others[0].replace(" while this rank did not", ""), others


class Planned(torch.nn.Module):
    def forward(self, q: Tensor) -> Tensor:
        return torch.nn.functional.scaled_dot_product_attention(q, q, q, is_causal=True)


def plan_again(rank: int) -> None:
    """What a rank refuses where the others call nothing is of no plan that comes after."""
    axis = DeviceMesh.from_group(dist.new_group(), "cpu", mesh_dim_names=("cp",))  # later calls over it would hear it
    style = cp_mesh.ContextParallel(cp_mesh.ShardedSequence(axis))
    for plans in range(2):
        attend = cp_mesh.parallelize(torch.nn.Sequential(Planned()), axis, {"0": style}, watch=False)
        attend(torch.randn(1, 2, 8, 8 + 2 * plans))
        if rank == 1:
            with pytest.raises(cp_mesh.ArgumentError, match="scale"):
                attention(**tensors(), mesh=axis, scale=-1.0)


def test_a_new_plan_hears_of_nothing_before(pool: Any) -> None:
    pool(2).run(plan_again)


def later(rank: int, what: str) -> None:
    """Of two equal calls in check mode the second has other documents, or another shape, on one rank."""
    sequence = ShardedSequence(mesh((2,), ("cp",)), length=16)
    x = torch.randn(2, 8, 2, 4, dtype=torch.float64)
    calls = {
        "document_sums": lambda mask, n: document_sums(x[..., 0, 0], sequence=sequence, mask=mask),
        "causal_conv1d": lambda mask, n: mixers.causal_conv1d(x.flatten(2), x[0, :, 0], sequence=sequence, mask=mask),
        "gated_delta_rule": lambda mask, n: mixers.gated_delta_rule(
            x, x, x, -x[..., 0].abs(), x[..., 0], sequence=sequence, mask=mask
        ),
        "gla, refused": lambda mask, n: mixers.gla(x, x[..., n:], x, sequence=sequence),
        "unshard": lambda mask, n: sequence.unshard(x[..., n:]),
    }
    with check_mode():
        for n in (0, rank):
            calls[what](Mask(documents=torch.arange(16) // (4 + n)), n)


@pytest.mark.parametrize("what", ["document_sums", "causal_conv1d", "gated_delta_rule", "gla, refused", "unshard"])
def test_check_mode_compares_all_calls(pool: Any, what: str) -> None:
    for rank, raised in enumerate(pool(2).run_expecting_error(later, what)):
        refused = rank == 1 and "refused" in what
        assert raised is not None and raised.type == ("ArgumentError" if refused else "RankMismatchError")
