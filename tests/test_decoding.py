"""Decoding: few queries over keys of all ranks equal one device, in every layout, for one small all-gather."""

from __future__ import annotations

import copy
import re
import sys
from collections.abc import Callable
from functools import partial
from itertools import chain, product
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from cases import LAYOUTS, MASKS, SCORES, gap, make_mask, make_scores, pairs
from checks import GQA, MHA, MQA, dense_scores
from dense import dense_attention, make_qkv
from inside import UNUSED
from ranks import mesh, num_collectives, on_ranks, refused
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from cp_mesh import Mask, ShardedSequence, ZigZag, check_mode
from cp_mesh.inference import ShardedCache, decode

EXAMPLES = Path(__file__).resolve().parent.parent / "examples"
sys.path.append(str(EXAMPLES))

import generate  # noqa: E402
import llama  # noqa: E402
from inside import inner  # noqa: E402

places = inner("cache", "places")

TOLERANCE = 1e-10
SAID = [name for name in MASKS if not ({"documents", "key_padding", "blocks"} & set(MASKS[name](1, 8)))]
"""Masks without tensors."""
SERVED = [name for name in SCORES if not ({"bias", "dropout_p"} & set(SCORES[name](1, 1, 8)))]
HEADS = (GQA, MHA, MQA)
B = 2


class Case(NamedTuple):
    """A whole sequence of S tokens, of which the last ``num_rows`` are the queries, and what is asked."""

    layout: str
    mask: str
    S: int
    num_rows: int = 1
    scores: str = "plain"
    heads: tuple[int, int] = GQA
    dims: tuple[int, int] = (6, 4)
    kernel: str = "auto"
    scale: float | None = None

    def options(self) -> dict[str, Any]:
        given = make_scores(self.scores, B, self.heads[0], self.S)
        return given | {"mask": make_mask(self.mask, B, self.S), "kernel": self.kernel, "scale": self.scale}

    def whole(self, end: int | None = None) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """The last queries, all keys and values, and what one device computes of them: out and lse.

        ``end``: of a sequence that ends there.
        """
        q, k, v = (x[:, :, :end] for x in make_qkv(B, *self.heads, self.S, *self.dims)[:3])
        given = dense_scores(make_scores(self.scores, B, self.heads[0], self.S), B, self.heads[0], self.S)
        out, lse = dense_attention(q, k, v, pairs(self.mask, B, self.S)[:, :end, :end], self.scale, **given)
        rows = slice(-self.num_rows, None)
        return q[:, :, rows], k, v, out[:, :, rows], lse[:, :, rows]


def compare(got: tuple[Tensor, Tensor], want: Any, what: Any) -> None:
    for name, x, y in zip(("out", "lse"), got, want, strict=True):
        assert gap(x, y) <= TOLERANCE, (name, what)


def at_positions(case: Case) -> None:
    """`decode` by positions."""
    axis = mesh((dist.get_world_size(),), ("cp",))
    q, k, v, *want = case.whole()
    rows = LAYOUTS[case.layout](case.S).positions(case.S, axis.size(), axis.get_local_rank())
    given = [q, k[:, :, rows], v[:, :, rows], torch.arange(case.S - case.num_rows, case.S), rows]
    before, calls = [x.clone() for x in given], num_collectives()
    where = {"q_positions": given[3], "k_positions": given[4]}
    got = decode(*given[:3], mesh=axis, return_lse=True, **where, **case.options())
    assert num_collectives() - calls == (axis.size() > 1), case
    compare(got, want, case)
    assert all(map(torch.equal, given, before)), f"{case}: wrote its input"


def decode_cases(full: bool) -> list[Case]:
    """All layouts and masks, with scores, heads and numbers of rows that take turns; lengths of few tokens leave ranks
    without keys."""
    cases = []
    for i, (layout, mask) in enumerate(product(LAYOUTS, SAID)):
        for S in (1, 2, 13, 31) if full else ((2, 13)[i % 2],):
            scores, heads, num_rows = SERVED[i % len(SERVED)], HEADS[i % 3], min((1, 3, S)[i // 2 % 3], S)
            cases.append(Case(layout, mask, S, num_rows, scores, heads, (6, (4, 6)[i % 2])))
    cases += [Case("zigzag", "causal", 1), Case("striped", "full", 1, scores="sinks", dims=(6, 6))]
    return [*cases, Case("zigzag", "window", 13, 2, "softcap", kernel="reference", scale=0.3)]


FORM = pytest.mark.nightly("parity")


@pytest.mark.more("parity")
@pytest.mark.parametrize("size", [3, *(pytest.param(n, marks=FORM) for n in (1, 2, 4))])
@on_ranks("size", timeout=300.0)
def test_decode_equals_one_device(full: bool) -> None:
    for case in [*decode_cases(full), *(Case("zigzag", "causal", 13, 2, scores, MHA) for scores in SERVED)]:
        at_positions(case)


@on_ranks(3)
def test_a_few() -> None:
    """Those that planted bugs meet."""
    for case in (Case("zigzag", "window", 13, 2, "sinks"), Case("striped", "full", 13)):
        at_positions(case)


@on_ranks(3)
def test_keys_that_all_queries_see(rank: int, axis: Any) -> None:
    """Without positions all keys count, and with ``num_keys`` the first ones."""
    for case in (
        Case("zigzag", "causal", 13),
        Case("zigzag", "causal", 13, 1, "softcap and sinks", MHA, (6, 6)),
        Case("contiguous", "full", 13, 3, kernel="cpu_flash", dims=(6, 6)),
        Case("striped", "full", 2, 2, dims=(6, 6), scale=0.7),
    ):
        q, k, v, *want = case.whole()
        rows = LAYOUTS[case.layout](case.S).positions(case.S, 3, rank)
        got = decode(q, k[:, :, rows], v[:, :, rows], mesh=axis.get_group(), return_lse=True, **case.options())
        compare(got, want, case)
    for case in (Case("striped", "window", 13, 3, "sinks"), Case("zigzag", "full", 13, 2), Case("striped", "full", 5)):
        q, k, v, *want = case.whole()
        rows = LAYOUTS[case.layout](case.S).positions(case.S, 3, rank)
        num_keys = torch.tensor([len(rows)])
        rows = torch.cat([rows, rows[: rank + 1]])  # more rows than there are keys
        where = {"q_positions": torch.arange(case.S - case.num_rows, case.S), "k_positions": rows}
        for positions in (where, {} if case.mask == "full" else where):
            call = partial(decode, q, k[:, :, rows], v[:, :, rows], mesh=axis, **positions, **case.options())
            compare(call(num_keys=num_keys, return_lse=True), want, case)
            assert gap(call(), want[0]) >= 1e-3, f"{case}: num_keys is not read"


SHARDED = [
    (Case("zigzag", "window", 13, 4, "softcap and sinks", dims=(6, 6)), (1, 0, 3)),
    (Case("striped", "full", 13, 5), (2, 2, 1)),
]


@on_ranks(3)
def test_sharded_queries(rank: int, axis: Any, full: bool) -> None:
    """Each rank has queries of its own, of any numbers of rows, with all masks and scores that are served."""
    lens = [(1, 0, 3), (0, 0, 2), (1, 1, 1), (3, 2, 1), (4, 0, 0)]
    served = [(mask, SERVED[i % len(SERVED)]) for i, mask in enumerate(SAID)] + [("causal", x) for x in SERVED]
    cases = list(SHARDED)
    for i, (mask, scores) in enumerate(served):
        q_lens, layout = lens[i % len(lens)], list(LAYOUTS)[i % len(LAYOUTS)]
        cases.append((Case(layout, mask, 13, sum(q_lens), scores, HEADS[i % 3], (6, (4, 6)[i % 2])), q_lens))
    for case, q_lens in cases if full else cases[::2]:
        q, k, v, *want = case.whole()
        rows = LAYOUTS[case.layout](case.S).positions(case.S, 3, rank)
        mine = slice(sum(q_lens[:rank]), sum(q_lens[: rank + 1]))
        where = {"q_positions": torch.arange(case.S - case.num_rows, case.S)[mine], "k_positions": rows}
        for positions in (where, {}) if case.mask == "full" and case.scores == "plain" else (where,):
            calls, given = num_collectives(), (q[:, :, mine], k[:, :, rows], v[:, :, rows])
            got = decode(*given, mesh=axis, q_lens=q_lens, return_lse=True, **positions, **case.options())
            assert num_collectives() - calls == 2, case
            assert all(x.shape[:3] == (B, case.heads[0], q_lens[rank]) for x in got), case
            compare(got, [x[:, :, mine] for x in want], (case, q_lens))


@pytest.mark.parametrize("dtype", (torch.float64, torch.float32, torch.bfloat16))
@on_ranks(3)
def test_sharded_queries_of_odd_rows(rank: int, axis: Any, dtype) -> None:
    """Rows of any number of bytes, few of them, with odd strides: bit by bit as queries that all ranks have."""
    sizes = ((1, 1, 1, 1), (1, 1, 1, 3), (1, 3, 3, 5), (2, 3, 1, 5), (3, 2, 1, 33), (0, 2, 2, 5))  # B, H, K, D
    for (*of_batch, D), q_lens in product(sizes, ((0, 1, 0), (1, 0, 0), (0, 2, 1))):
        q, k, v, _ = (x[..., ::2] for x in make_qkv(*of_batch, 13, 2 * D, dtype=dtype))
        q, positions = q[:, :, -sum(q_lens) :], torch.arange(13)[:, None].expand(-1, 2).clone()[-sum(q_lens) :, 0]
        rows, mine = ZigZag().positions(13, 3, rank), slice(sum(q_lens[:rank]), sum(q_lens[: rank + 1]))
        for where in ({"q_positions": positions, "k_positions": rows}, {}):
            given = k[:, :, rows], v[:, :, rows]
            in_rows = q.permute(2, 0, 1, 3).contiguous().permute(1, 2, 0, 3)  # as products read those that are gathered
            want = decode(in_rows, *given, mesh=axis, return_lse=True, **where)
            where = where | {"q_positions": positions[mine]} if where else {}
            got = decode(q[:, :, mine], *given, mesh=axis, return_lse=True, q_lens=q_lens, **where)
            assert all(torch.equal(x, y[:, :, mine]) for x, y in zip(got, want, strict=True)), (of_batch, D, q_lens)


# ---- the reduction


class Tape(TorchDispatchMode):
    """What is computed inside, operation by operation; `replay` computes it again, into the same memory, as the replay
    of a CUDA graph does: no Python runs, and shapes and numbers are those of the first time."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, tuple[Any, ...], dict[str, Any], Any]] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        self.calls.append((func, args, kwargs or {}, out))
        return out

    def collectives(self) -> list[tuple[str, int]]:
        """And how many bytes this rank gives to each."""
        of_c10d = [(func._opname, args[1].nbytes) for func, args, *_ in self.calls if func.namespace == "c10d"]
        others = [call for call in self.calls if call[0].namespace == "_c10d_functional"]
        return of_c10d + [(x._opname, args[0].nbytes) for x, args, *_ in others if x._opname != "wait_tensor"]

    def replay(self) -> None:
        for func, args, kwargs, out in self.calls:
            again = func(*args, **kwargs)
            if func.namespace == "c10d":
                again[-1].wait()
            for new, old in zip(tree_leaves(again), tree_leaves(out), strict=True):
                if isinstance(new, Tensor) and new.data_ptr() != old.data_ptr():
                    old.copy_(new)


@pytest.mark.parametrize("S", [12, 96])
@pytest.mark.parametrize(("dtype", "width"), [(torch.bfloat16, 4), (torch.float32, 4), (torch.float64, 8)])
@on_ranks(3)
def test_one_small_all_gather(rank: int, axis: Any, dtype: torch.dtype, width: int, S: int) -> None:
    """Of out and lse, whatever the length."""
    q, k, v, _ = make_qkv(B, *GQA, S, 6, 4, dtype=dtype)
    rows, calls = ZigZag().positions(S, 3, rank), num_collectives()
    with Tape() as tape:
        given = {"q_positions": torch.tensor([S - 1]), "k_positions": rows}
        decode(q[:, :, -1:], k[:, :, rows], v[:, :, rows], mesh=axis, **given)
    assert num_collectives() - calls == 1
    assert tape.collectives() == [("_allgather_base_", B * GQA[0] * (4 + 1) * width)]


@pytest.mark.parametrize("with_positions", [False, True])
@on_ranks(3)
def test_traffic_of_sharded_queries(rank: int, axis: Any, with_positions) -> None:
    """The most queries that a rank has, with their positions, and all queries' results."""
    gathered, sent = 2 * (B * GQA[0] * 6 * 2 + 8 * with_positions), 3 * B * GQA[0] * (4 + 1) * 4
    want = [("all_gather_into_tensor", gathered), ("all_to_all_single", sent)]
    q, k, v, _ = make_qkv(B, *GQA, 12, 6, 4, dtype=torch.bfloat16)
    rows, mine = ZigZag().positions(12, 3, rank), slice(*((9, 10), (10, 10), (10, 12))[rank])
    where = {"q_positions": torch.arange(12)[mine], "k_positions": rows} if with_positions else {}
    with Tape() as tape:
        decode(q[:, :, mine], k[:, :, rows], v[:, :, rows], mesh=axis, q_lens=[1, 0, 2], **where)
    assert tape.collectives() == want


@pytest.mark.parametrize("dims", [(16, 16), (16, 8)])
@pytest.mark.parametrize(
    ("dtype", "casting"), [*((x, False) for x in (torch.bfloat16, torch.float16, torch.float32)), (torch.float32, True)]
)
@on_ranks(3)
def test_partial_results_are_merged_in_fp32(
    rank: int, axis: Any, dtype: torch.dtype, casting: bool, dims: tuple[int, int]
) -> None:
    q, k, v, _ = make_qkv(B, *GQA, 96, *dims, dtype=dtype)
    rows = ZigZag().positions(96, 3, rank)
    want = dense_attention(q, k, v, pairs("causal", B, 96))[0][:, :, -1:]
    with torch.autocast("cpu", torch.bfloat16, enabled=casting):
        got, lse = decode(q[:, :, -1:], k[:, :, rows], v[:, :, rows], mesh=axis, return_lse=True)
    assert (got.dtype, lse.dtype) == (dtype, torch.float32)
    # of a result that was rounded once: half a unit in the last place, and what fp32 sums cost
    assert ((got.double() - want).abs() <= want.abs() * torch.finfo(dtype).eps / 2 * 1.001 + 1e-5).all()


# ---- the cache


def test_places_are_those_of_the_rank_with_fewest():
    for counts, num_new in (([0, 0, 0], 7), ([5, 0, 2], 9), ([1, 4], 1), ([3], 4), ([2, 2, 2, 1], 6)):
        expected, now = [], list(counts)
        for _ in range(num_new):
            owner = min(range(len(now)), key=lambda r: (now[r], r))
            expected.append((owner, now[owner]))
            now[owner] += 1
        assert list(zip(*(x.tolist() for x in places(torch.tensor(counts), num_new)), strict=True)) == expected


class Steps(NamedTuple):
    """A prompt that is prefilled, and the numbers of tokens that are appended together."""

    case: Case  # of the whole sequence; its rows are not read
    prompt: int
    steps: tuple[int, ...] = (1, 3, 2, 1, 1)
    pad: bool = True
    capacity: int | None = None


def filled(axis: Any, run: Steps) -> ShardedCache:
    """A cache with the prompt."""
    sequence = ShardedSequence(axis, LAYOUTS[run.case.layout](run.prompt), length=run.prompt or None, pad=run.pad)
    cache = ShardedCache(sequence, run.capacity)
    _, k, v, *_ = run.case.whole()
    if run.prompt:
        cache.prefill(*(sequence.shard(x[:, :, : run.prompt], dim=2) for x in (k, v)))
    return cache


def positions_held(cache: ShardedCache) -> list[list[int]]:
    """By all ranks."""
    held: list[Any] = [None] * cache.sequence.cp_size
    own = cache.positions[cache.positions < UNUSED].tolist() if cache.length else []
    dist.all_gather_object(held, own)
    return held


def check(run: Steps) -> None:
    """A cache that is filled step by step, and attended to at each step."""
    axis, case, end = mesh((dist.get_world_size(),), ("cp",)), run.case, run.prompt
    _, k, v, *_ = case.whole()
    cache, options = filled(axis, run), case.options()
    most = max(map(len, positions_held(cache)))
    for i, num_new in enumerate(run.steps):
        begin, end = end, end + num_new
        twin, before = (copy.copy, copy.deepcopy)[i % 2](cache), num_collectives()
        cache.append(k[:, :, begin:end], v[:, :, begin:end])
        twin.append(0 * k[:, :, begin:end], 0 * v[:, :, begin:end])  # into memory of its own
        assert num_collectives() == before, f"{run}: append communicates"
        num_rows = num_new if i % 3 < 2 else 1  # all that came, or the last token alone
        q, _, _, *want = case._replace(num_rows=num_rows).whole(end)
        compare(cache.attend(q, return_lse=True, **options), want, (run, end))
        held, most = positions_held(cache), max(most, -(-end // axis.size()))
        assert cache.length == end and sorted(chain(*held)) == list(range(end)), (run, held)
        assert max(map(len, held)) <= most, f"{run}: unbalanced, {held}"


OF_ONE_LENGTH = ("shuffled", "balanced", "reversed", "zigzag documents", "joint")
"""Layouts that are made for a length, which cannot be padded."""


def cache_runs(full: bool) -> list[Steps]:
    masks = ("causal", "window", "full", "prefix", "window of one token", "length")
    runs = []
    for i, (layout, mask) in enumerate(product(LAYOUTS, masks if full else masks[:3])):
        prompt, capacity, dims = (13, 12)[i % 2], (None, 21, 40)[(i + i // 3) % 3], (6, (4, 6)[i // 2 % 2])
        scores = ("plain", "softcap and sinks", "alibi")[(i + i // 6) % 3]
        case = Case(layout, mask, prompt + 8, 1, scores, HEADS[i // 3 % 3], dims)
        runs.append(Steps(case, prompt, pad=layout not in OF_ONE_LENGTH, capacity=capacity))
    plain = Case("zigzag", "causal", 8)
    runs += [Steps(plain, 0, capacity=capacity) for capacity in (None, 8)]  # nothing is prefilled
    runs += [Steps(plain._replace(S=9), 1, capacity=capacity) for capacity in (None, 9)]  # ranks without keys
    runs.append(Steps(Case("contiguous", "causal", 90), 82, capacity=None))
    return runs


@pytest.mark.more("parity")
@pytest.mark.parametrize("size", [3, *(pytest.param(n, marks=FORM) for n in (1, 2, 4))])
@on_ranks("size", timeout=300.0)
def test_cache_equals_one_device(size: int, full: bool) -> None:
    for run in cache_runs(full):
        if size == 3 or run.case.layout != "balanced":  # that of tests/cases.py is of three ranks
            check(run)


@on_ranks(3)
def test_a_few_caches() -> None:
    """Those that planted bugs meet."""
    check(Steps(Case("zigzag", "window", 21), 13))
    check(Steps(Case("zigzag", "causal", 19), 11, capacity=20))


@on_ranks(2)
def test_memory_of_a_capacity_stays(rank: int, axis: Any) -> None:
    cache, growing = ShardedCache(ShardedSequence(axis), 10), ShardedCache(ShardedSequence(axis))
    x, pointers, sizes = torch.ones(1, 1, 1, 2), [], []
    for _ in range(10):
        for each in (cache, growing):
            each.append(x, x)
        pointers.append((cache.key.data_ptr(), cache.value.data_ptr(), cache.key.shape))
        sizes.append(growing.key.shape[2])
    assert sizes == [(i + 2 - rank) // 2 for i in range(10)], sizes
    assert len(set(pointers)) == 1 and cache.key.shape[2] == 6, "the memory of a capacity moves"


@pytest.mark.parametrize("capacity", (None, 12))
@on_ranks(2)
def test_a_cache_leaves_inference_mode(axis: Any, capacity: int | None) -> None:
    """A prompt in `torch.inference_mode`, further tokens without it."""
    case = Case("contiguous", "causal", 12, 1)
    _, k, v, *_ = case.whole()
    with torch.inference_mode():
        cache = filled(axis, Steps(case, 8, capacity=capacity))
        cache.append(k[:, :, 8:9], v[:, :, 8:9])
    with torch.no_grad():
        for token in range(9, 12):
            cache.append(k[:, :, token : token + 1], v[:, :, token : token + 1])
        q, _, _, *want = case.whole(12)
        compare(cache.attend(q, return_lse=True, **case.options()), want, case)


@on_ranks(2)
def test_an_append_without_memory_changes_nothing(rank: int, axis: Any) -> None:
    """An append that finds no memory on one rank, and is tried again."""
    case = Case("contiguous", "causal", 12, 1)
    _, k, v, *_ = case.whole()
    cache = filled(axis, Steps(case, 8))
    if rank == 1:
        with mock.patch.object(torch, "full", side_effect=MemoryError):
            for _ in range(2):
                with pytest.raises(MemoryError):
                    cache.append(k[:, :, 8:], v[:, :, 8:])
    cache.append(k[:, :, 8:], v[:, :, 8:])
    assert sorted(chain(*positions_held(cache))) == list(range(12))


@pytest.mark.parametrize(
    ("scores", "mask"), [("plain", "causal"), ("softcap and sinks", "window"), ("alibi", "causal")]
)
@on_ranks(3)
def test_a_step_of_a_capacity_can_be_replayed(axis: Any, scores, mask) -> None:
    """What a CUDA graph needs: no number that the host reads, no shape and no address changes from step to step."""
    case = Case("zigzag", mask, 26, 26, scores, GQA, (6, 6))
    q, k, v, *want = case.whole()
    cache = filled(axis, Steps(case, 13, capacity=26))
    given = [x[:, :, :1].clone() for x in (q, k, v)]
    options = case.options()

    def step() -> tuple[Tensor, Tensor]:
        cache.append(*given[1:])
        return cache.attend(given[0], return_lse=True, **options)

    def give(token: int) -> None:
        for x, of in zip(given, (q, k, v), strict=True):
            x.copy_(of[:, :, token : token + 1])

    give(13)
    with Tape() as tape:
        got = step()
    assert not {func._opname for func, *_ in tape.calls} & {"_local_scalar_dense", "nonzero", "_unique2"}, "it waits"
    for token in range(13, 26):
        if token > 13:
            give(token)
            tape.replay()
        compare(got, [x[:, :, token : token + 1] for x in want], (case, token))
    with pytest.raises(IndexError, match="out of range"):  # beyond the capacity
        tape.replay()


def on_gpus(rank: int, capacity: int | None, mask: str) -> float:
    """The error of steps in bfloat16, replays of a CUDA graph from the second one on if there is a capacity."""
    axis, far = mesh((2,), ("cp",)), list[float]()
    sequence = ShardedSequence(axis, length=300)
    q, k, v, _ = (x.cuda() for x in make_qkv(B, *GQA, 320, 64, dtype=torch.bfloat16))
    want, _ = dense_attention(q, k, v, pairs(mask, B, 320).cuda())
    cache = ShardedCache(sequence, capacity)
    cache.prefill(*(sequence.shard(x[:, :, :300], dim=2) for x in (k, v)))
    given = [x[:, :, :1].clone() for x in (q, k, v)]
    graph = torch.cuda.CUDAGraph()

    def step() -> Tensor:
        cache.append(*given[1:])
        return cache.attend(given[0], mask=make_mask(mask, B, 320))

    for token in range(300, 320):
        for x, of in zip(given, (q, k, v), strict=True):
            x.copy_(of[:, :, token : token + 1])
        if capacity is None or token == 300:
            out = step()
        else:
            if token == 301:
                torch.cuda.synchronize()
                with torch.cuda.graph(graph):
                    out = step()
            graph.replay()
        far.append(gap(out, want[:, :, token : token + 1]))
    return max(far)


@pytest.mark.multigpu
@pytest.mark.parametrize("mask", ["causal", "window"])
@pytest.mark.parametrize("capacity", [None, 320])
def test_on_gpus(pool, capacity, mask):
    assert max(pool(2, "nccl").run(on_gpus, capacity, mask, timeout=300.0)) <= 2e-2


@pytest.mark.parametrize("capacity", [None, 16])
@on_ranks(2)
def test_a_compiled_step(axis: Any, capacity) -> None:
    """Steps inside of a function that torch.compile compiles, but for attention."""
    case = Case("zigzag", "causal", 16, 16, dims=(6, 6))
    q, k, v, out, _ = case.whole()
    cache = filled(axis, Steps(case, 8, capacity=capacity))

    @torch.compile(backend="eager")
    def step(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        cache.append(k * 2, v * 2)
        return cache.attend(q * 2) * 2

    for token in range(8, 16):
        rows = slice(token, token + 1)
        got = step(*(x[:, :, rows] / 2 for x in (q, k, v)))
        assert gap(got, 2 * out[:, :, rows]) <= TOLERANCE, token


# ---- what is refused


def small(rank: int) -> tuple[Tensor, Tensor, dict[str, Any]]:
    where = {"q_positions": torch.tensor([7]), "k_positions": torch.arange(4) + 4 * rank}
    return torch.ones(1, 2, 1, 4), torch.ones(1, 1, 4, 4), {"mesh": mesh((2,), ("cp",)), **where}


def refused_calls(rank: int) -> dict[str, tuple[Callable[[], Any], str]]:
    """Calls of `decode` that every rank refuses, and words of the message."""
    q, k, where = small(rank)
    axis = where["mesh"]

    def call(query=q, key=k, value=k, **options):
        return lambda: decode(query, key, value, **where | options)

    ids = torch.zeros(8, dtype=torch.int64)
    return {
        "no mesh": (call(mesh=None), "mesh"),
        "DTensor": (call(DTensor.from_local(q, axis)), "local tensor"),
        "no tensor": (call([1.0]), "use torch.as_tensor"),
        "gradient": (call(q.clone().requires_grad_()), "torch.no_grad"),
        "gradient of keys": (call(key=k.clone().requires_grad_()), "torch.no_grad"),
        "gradient of sinks": (call(sinks=torch.zeros(2).requires_grad_()), "torch.no_grad"),
        "three dims": (call(q[0]), "transpose other formats"),
        "no row": (call(q[:, :, :0], q_positions=torch.arange(0)), "at least one row"),
        "dtypes": (call(q.double()), "one dtype"),
        "heads": (call(q.repeat(1, 2, 1, 1)[:, 1:], k.repeat(1, 2, 1, 1), k.repeat(1, 2, 1, 1)), "multiple of kv"),
        "head dims": (call(q[..., :2]), "one head dim"),
        "documents": (call(mask=Mask(documents=ids)), "without documents"),
        "key padding": (call(mask=Mask(key_padding=ids == 0)), "without documents, key_padding"),
        "blocks": (call(mask=Mask(blocks=ids)), "key_padding and blocks"),
        "no mask": (call(mask=None), "a Mask"),
        "positions in a list": (call(q_positions=[7]), "decode: q_positions: expected Tensor | None, got list"),
        "scale": (call(scale=-1.0), "positive"),
        "softcap": (call(softcap=0.0), "positive"),
        "sinks": (call(sinks=torch.zeros(3)), "sinks"),
        "slopes": (call(alibi_slopes=[1.0, 2.0]), "a local tensor"),
        "kernel": (call(kernel="none"), "one of auto"),
        "kernel of other devices": (call(kernel="fa2"), "lacks device cpu"),
        "kernel without pairs": (call(kernel="cpu_flash"), "'pairs' tiles"),
        "positions of keys alone": (call(q_positions=None), "q_positions"),
        "positions of queries alone": (call(k_positions=None), "k_positions"),
        "a window without positions": (call(q_positions=None, k_positions=None, mask=Mask(window=(3, 0))), "a window"),
        "slopes without positions": (call(q_positions=None, k_positions=None, alibi_slopes=torch.ones(2)), "positions"),
        "dtype of positions": (call(q_positions=torch.tensor([7.0])), "int64"),
        "too few positions": (call(k_positions=torch.arange(3)), "int64 (4,)"),
        "as many lengths as ranks": (call(q_lens=[1]), "2 numbers of rows"),
        "lengths that are no ints": (call(q_lens=[1.0, 1]), "2 numbers of rows"),
        "a number of lengths": (call(q_lens=1), "2 numbers of rows"),
        "no query at all": (call(q[:, :, :0], q_positions=torch.arange(0), q_lens=[0, 0]), "not all 0"),
        "other lengths": (call(q_lens=[2, 2]), "2 rows, as in q_lens, got 1"),
        "number of keys": (call(num_keys=4), "int64 (1,)"),
        "dtype of the number of keys": (call(num_keys=torch.tensor([4.0])), "int64 (1,)"),
    }  # fmt: skip


def refused_by_caches(rank: int) -> dict[str, tuple[Callable[[], Any], str]]:
    axis = mesh((2,), ("cp",))
    x, q = torch.ones(1, 1, 1, 4), torch.ones(1, 2, 1, 4)

    def cache(num_tokens: int = 1, capacity: int | None = 4, **options: Any) -> ShardedCache:
        made = ShardedCache(ShardedSequence(axis, **options), capacity)
        for _ in range(num_tokens):
            made.append(x, x)
        return made

    return {
        "no sequence": (lambda: ShardedCache(axis), "a ShardedSequence"),
        "capacity": (lambda: cache(0, 0), "capacity"),
        "overflow": (lambda: cache(4).append(x, x), "larger capacity"),
        "overflow at once": (lambda: cache(2).append(x.expand(1, 1, 3, 4), x.expand(1, 1, 3, 4)), "larger capacity"),
        "a long prompt": (lambda: cache(0, length=6).prefill(*[x.expand(1, 1, 4, 4)] * 2), "larger capacity"),
        "a second prompt": (lambda: cache().prefill(x, x), "an empty cache"),
        "rows of another layout": (lambda: cache(0, length=4).prefill(x, x), "2 rows"),
        "appended before the prompt": (lambda: cache(length=4), "the 4 tokens of the sequence in the cache"),
        "attended before an append": (lambda: cache(0).attend(q), "at most 0 rows, those of the last append"),
        "nothing appended": (lambda: cache().append(x[:, :, :0], x[:, :, :0]), "at least one token"),
        "dtype": (lambda: cache().append(x.double(), x.double()), "as in the cache"),
        "batch": (lambda: cache().append(x.expand(2, 1, 1, 4), x.expand(2, 1, 1, 4)), "as in the cache"),
        "kv heads": (lambda: cache().append(x.expand(1, 2, 1, 4), x.expand(1, 2, 1, 4)), "as in the cache"),
        "head dim": (lambda: cache().append(x[..., :2], x), "as in the cache"),
        "v head dim": (lambda: cache().append(x, x[..., :2]), "as in the cache"),
        "keys and values": (lambda: cache().append(x, x.expand(1, 1, 2, 4)), "equal heads and lengths"),
        "gradient": (lambda: cache().append(x.clone().requires_grad_(), x), "torch.no_grad"),
        "an empty cache": (lambda: cache(0).key, "prefill or append first"),
        "more queries than came": (lambda: cache(2).attend(q.expand(1, 2, 2, 4)), "at most 1 rows"),
        "an option of training": (lambda: cache().attend(q, dropout_p=0.1), "unexpected keyword"),
    }  # fmt: skip


@on_ranks(2)
def test_what_cannot_be_is_refused_before_the_first_collective(rank: int) -> None:
    for call, words in (refused_calls(rank) | refused_by_caches(rank)).values():
        with refused(re.escape(words), (ValueError, NotImplementedError, TypeError)):
            call()


@on_ranks(2)
def test_ranks_that_disagree_are_told_in_check_mode(rank: int) -> None:
    q, k, where = small(rank)
    cache = ShardedCache(ShardedSequence(where["mesh"]))
    x = torch.ones(1, 1, 1, 4)
    calls = {
        "query": lambda: decode(q + rank, k, k, **where),
        "options": lambda: decode(q, k, k, **where, softcap=1.0 + rank),
        "sinks": lambda: decode(q, k, k, **where, sinks=torch.zeros(2) + rank),
        "q_positions": lambda: decode(q, k, k, **where | {"q_positions": torch.tensor([7 + rank])}),
        "q_lens": lambda: decode(q, k, k, **where, q_lens=[1, 1] if rank == 0 else [2, 1]),
        "raised": lambda: decode(q, k, k, **where | {"k_positions": torch.arange(4 - rank)}),
        "value": lambda: cache.append(x, x + rank),
        "raised to append": lambda: cache.append(x, x[..., : 4 - rank, :][:, : 1 - rank]),
        "raised: no tensor": lambda: decode(q if rank == 0 else None, k, k, **where),
    }
    with check_mode():
        for words, call in calls.items():
            own = rank == 1 and words.startswith("raised")
            with pytest.raises((RuntimeError, ValueError), match=None if own else words.split(" to ")[0].split(":")[0]):
                call()
        decode(q, k, k, **where)
        cache.append(x, x)
        cache.attend(q)


# ---- a model


@pytest.mark.parametrize(
    ("size", "layout", "S", "capacity"),
    [(2, "zigzag", 25, False), (3, "zigzag", 20, True), (3, "shuffled", 22, False), (2, "zigzag", 1, False)],
)
@on_ranks("size")
def test_generated_tokens_are_those_of_one_device(axis: Any, layout, S, capacity) -> None:
    """Tokens that a model of random weights generates on all ranks, and on one device."""
    config = llama.LlamaConfig(64, 32, 2, 4, 2)
    models = [
        llama.Llama(config, core=core).double() for core in (generate.CachedAttention, llama.DenseDocumentAttention)
    ]
    for model in models:
        model.init_weights(0)
        for name, weight in model.named_parameters():
            if "wq" in name or "wk" in name or "output" in name:
                weight.data.mul_(8.0)  # peaked attention and logits: tokens depend on positions
    prompt = torch.randint(64, (B, S), generator=torch.Generator().manual_seed(S))
    made = LAYOUTS[layout](S - 1)
    options = {} if layout == "zigzag" else {"layout": made}
    sharded = generate.generate(models[0], prompt, 12, axis, **options, fixed=capacity)
    alone = generate.generate_alone(models[1], prompt, 12)
    assert sharded.shape == (B, 12) and len(set(alone.flatten().tolist())) > 8, "a text that tells nothing"
    assert torch.equal(sharded, alone)
