"""The pool of ranks, the poisoned allocations and the dense oracle do what the other tests count on."""

import os
import re
import time

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from dense import dense_attention, dense_mask, make_qkv
from poison import poisoned
from ranks import Pool, RankFailure, device, mesh, on_ranks, refused
from torch import Tensor

from cp_mesh import ArgumentError


def everyone(rank: int, scale: float) -> tuple[int, Tensor]:
    total = torch.tensor([scale * rank], device=device())
    dist.all_reduce(total)
    return os.getpid(), total


def raise_on_one(rank: int) -> None:
    if rank == 1:
        raise KeyError("the second rank")
    dist.barrier()


def sleep_on_one(rank: int) -> None:
    time.sleep(60.0 * (rank == 0))


def die_on_one(rank: int) -> None:
    if rank == 1:
        os._exit(7)


def crash_on_one(rank: int) -> None:
    if rank == 1:
        os.abort()


def refuse(rank: int, num_collectives: tuple[int, ...], raising: tuple[int, ...]) -> int:
    for _ in range(num_collectives[rank]):
        dist.all_reduce(torch.ones(()), async_op=True)
    if rank in raising:
        raise NotImplementedError(f"refused on {len(raising)}")
    return os.getpid()


def column_sums(rank: int) -> Tensor:
    grid = mesh((2, 2), ("row", "column"))
    assert grid is mesh((2, 2), ("row", "column"))
    value = torch.full((3,), float(rank), device=device())
    dist.all_reduce(value, group=grid.get_group("row"))
    return value[1:]


def leaves(rank: int, x: Tensor) -> dict[str, Tensor]:
    return {"leaf": x, "view": torch.zeros(1000)[rank : rank + 2], "none": torch.zeros(0, 3), "result": x.t() * 2}


def untouched(rank: int) -> bool:
    return bool(torch.empty(5).isnan().all())


def crowd(rank: int) -> int:
    dist.barrier()
    return os.getppid()


@pytest.mark.parametrize("world_size", [1, 3, 4])
def test_every_rank_answers(pool, world_size):
    answers = pool(world_size).run(everyone, 0.5)
    assert [total.item() for _, total in answers] == [0.25 * world_size * (world_size - 1)] * world_size
    assert len({pid for pid, _ in answers} | {os.getpid()}) == world_size + 1


@on_ranks(3)
def test_a_body_has_its_rank_and_an_axis(rank, axis):
    total = torch.tensor([rank])
    dist.all_reduce(total, group=axis.get_group())
    assert (total.item(), axis.get_local_rank()) == (3, rank)


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("scale", [torch.ones(2)])
@on_ranks("size")
def test_a_body_has_the_parameters_of_its_test(scale):
    dist.all_reduce(scale)
    assert scale.tolist() == [dist.get_world_size()] * 2


@on_ranks(2)
def test_a_refusal_comes_before_collectives():
    def refuse(num_before):
        with refused("equal heads"):
            for _ in range(num_before):
                dist.all_reduce(torch.ones(()))
            raise ArgumentError("equal heads")

    refuse(0)
    with pytest.raises(AssertionError, match="a collective was issued"):
        refuse(1)
    with pytest.raises(pytest.fail.Exception, match="DID NOT RAISE"), refused("equal heads"):
        pass


@on_ranks(2)
def fails_on_one(rank, wanted):
    assert rank + 1 == wanted


def test_a_failed_assert_tells_its_values_and_its_rank(pool):
    with pytest.raises(RankFailure, match=r"fails_on_one failed on 1(?s:.*)rank 1: (?s:.*)assert \(1 \+ 1\) == 1"):
        fails_on_one(pool, 1)


def test_ranks_are_reused(pool):
    assert [pid for pid, _ in pool(2).run(everyone, 1.0)] == [pid for pid, _ in pool(2).run(everyone, 1.0)]


def test_an_error_arrives_with_its_traceback_and_its_waiting_peer(pool, monkeypatch):
    monkeypatch.setattr("ranks.GRACE", 0.5)
    before = pool(2).run(everyone, 1.0)
    with pytest.raises(RankFailure) as failure:
        pool(2).run(raise_on_one)
    text = str(failure.value)
    assert re.search(r"rank 1: Traceback(?s:.*)raise_on_one\n.*\n.*KeyError: 'the second rank'", text)
    assert re.search(r"rank 0: still running in raise_on_one(?s:.*)in barrier", text)
    after = pool(2).run(everyone, 1.0)
    assert not {pid for pid, _ in before} & {pid for pid, _ in after}
    assert after[0][1].item() == 1.0


def test_a_hang_is_reported_soon(pool):
    pool(2).run(everyone, 1.0)
    begin = time.monotonic()
    with pytest.raises(
        RankFailure, match=r"rank 0: still running in sleep_on_one after 0\.5(?s:.*)in sleep_on_one"
    ) as failure:
        pool(2).run(sleep_on_one, timeout=0.5)
    assert time.monotonic() - begin < 5.0
    assert "rank 1" not in str(failure.value)
    assert pool(2).run(everyone, 1.0)[1][1].item() == 1.0


def test_a_dead_rank_is_reported(pool):
    with pytest.raises(RankFailure, match="rank 1: process died with exit code 7"):
        pool(2).run(die_on_one)
    pool(2).run(everyone, 1.0)


def test_a_crash_is_reported_with_its_stack(pool):
    with pytest.raises(RankFailure, match=r"rank 1: process died with exit code -6\nFatal(?s:.*)in crash_on_one"):
        pool(2).run(crash_on_one)


def test_equal_errors_are_told_once():
    assert str(RankFailure("f", 3, {2: "a", 0: "a", 1: "b"})).endswith("rank 0, 2: a\nrank 1: b")


@pytest.mark.parametrize(
    ("num_collectives", "raising", "survives"),
    [((0, 0), (0, 1), True), ((2, 2), (0, 1), True), ((1, 0), (0, 1), False), ((0, 0), (1,), False)],
)
def test_expected_errors(pool, num_collectives, raising, survives):
    before = [pid for pid, _ in pool(2).run(everyone, 1.0)]
    errors = pool(2).run_expecting_error(refuse, num_collectives, raising)
    assert [error is not None for error in errors] == [rank in raising for rank in range(2)]
    for rank in raising:
        assert (errors[rank].type, errors[rank].message) == ("NotImplementedError", f"refused on {len(raising)}")
        assert "RuntimeError" in errors[rank].kinds
        assert errors[rank].num_collectives == num_collectives[rank]
    assert ([pid for pid, _ in pool(2).run(everyone, 1.0)] == before) == survives


def test_subgroups(pool):
    for _ in range(2):
        results = pool(4).run(column_sums)
        assert [result.tolist() for result in results] == [[2.0] * 2, [4.0] * 2, [2.0] * 2, [4.0] * 2]


def test_tensors_travel_by_value(pool):
    x = torch.arange(6.0).view(2, 3).requires_grad_()
    for result in pool(2).run(leaves, x):
        assert result["leaf"].requires_grad and not result["result"].requires_grad
        torch.testing.assert_close(result["leaf"], x)
        torch.testing.assert_close(result["result"], 2 * x.detach().t())
        assert result["none"].shape == (0, 3)
        assert result["view"].untyped_storage().nbytes() == 8


def test_least_recent_pools_end(pool, monkeypatch):
    monkeypatch.setattr("ranks.MAX_LIVE_RANKS", 5)
    first, second = pool(3), pool(2)
    first.run(everyone, 1.0), second.run(everyone, 1.0)
    pool(3), pool(4)
    assert not second.processes and not first.processes


def test_poison_reaches_the_ranks(pool):
    assert pool(2).run(untouched) == [True, True]


@pytest.mark.unpoisoned
def test_unpoisoned_reaches_the_ranks(pool):
    assert torch.empty.__module__ != "poison"
    pool(2).run(untouched)


def allocate(x: Tensor) -> tuple[Tensor, ...]:
    return (
        torch.empty(3),
        torch.empty_like(x),
        torch.empty_strided((2, 2), (1, 2)),
        x.new_empty(2, 2),
        x.new_empty((4,)),
    )


def fill(x: Tensor) -> Tensor:
    for memory in allocate(x):
        x = x + memory.zero_().sum()
    return x


def test_poison_is_complete():
    assert all(memory.isnan().all() for memory in allocate(torch.ones(3)))
    assert all(memory.isnan().all() for memory in allocate(torch.ones(3, dtype=torch.bfloat16)))
    assert (torch.empty(3, dtype=torch.int64) > 2**60).all() and torch.empty(3, dtype=torch.bool).all()
    assert torch.empty(3, requires_grad=True).requires_grad


@pytest.mark.parametrize("backend", ["eager", pytest.param("aot_eager", marks=pytest.mark.full)])
def test_poison_is_inert_under_compile(backend):
    x = torch.ones(3, requires_grad=True)
    for on in (True, False, True):
        torch._dynamo.reset()
        with poisoned(on):
            out = torch.compile(fill, backend=backend, fullgraph=True)(x)
        torch.testing.assert_close(out, x)
    assert torch.empty(3, device="meta").is_meta


def test_dense_attention_equals_torch():
    q, k, v, dout = (x.requires_grad_() for x in make_qkv(2, 6, 2, 11, 4, 3))
    allowed = dense_mask(11)
    out, lse = dense_attention(q, k, v, allowed)
    expected = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    torch.testing.assert_close(out, expected)
    inputs = (q, k, v)
    torch.testing.assert_close(torch.autograd.grad(out, inputs, dout), torch.autograd.grad(expected, inputs, dout))
    assert lse[:, :, 0].isfinite().all()


def test_dense_attention_of_rows_without_keys():
    q, k, v, dout = (x.requires_grad_() for x in make_qkv(2, 2, 1, 5, 4))
    out, lse = dense_attention(q, k, v, dense_mask(5, key_padding=[[0, 0, 1, 1, 1], [1, 1, 1, 1, 1]]))
    assert (out[0, :, :2] == 0).all() and (lse[0, :, :2] == -torch.inf).all() and lse[1].isfinite().all()
    dq, dk, dv = torch.autograd.grad(out.mul(dout).sum() + lse[lse.isfinite()].sum(), (q, k, v))
    assert all(grad.isfinite().all() for grad in (dq, dk, dv))
    assert (dq[0, :, :2] == 0).all() and (dk[0, :, :2] == 0).all() and (dv[0, :, :2] == 0).all()


def test_dense_mask_by_hand():
    def rows(*args: object, **kwargs: object) -> list[str]:
        return ["".join("x" if pair else "." for pair in row) for row in dense_mask(*args, **kwargs)[-1].tolist()]

    assert rows(3) == ["x..", "xx.", "xxx"]
    assert rows(4, window=(1, 0)) == ["x...", "xx..", ".xx.", "..xx"]
    assert rows(4, causal=False, window=(0, 2)) == ["xxx.", ".xxx", "..xx", "...x"]
    assert rows(4, window=(None, 1), prefix=2) == ["xx..", "xx..", "xxx.", "xxxx"]
    assert rows(3, causal=False, length=2) == ["xx.", "xx.", "xx."]
    assert rows(3, documents=[[0, 0, 0], [1, 1, 0]]) == ["x..", "xx.", "..x"]
    assert rows(3, documents=[[0, 1, 0]], key_padding=[[True] * 3, [False, True, True]][:1]) == ["x..", ".x.", "x.x"]
    assert dense_mask(0).shape == (1, 0, 0)


@pytest.mark.multigpu
def test_nccl(pool):
    assert [total.item() for _, total in pool(2, "nccl").run(everyone, 2.0)] == [2.0, 2.0]


def test_a_pool_of_its_own_ends_with_close():
    alone = Pool(2)
    pids = alone.run(crowd) and [process.pid for process in alone.processes]
    alone.close()
    assert not any(os.path.exists(f"/proc/{pid}") for pid in pids) and not alone.folder.exists()
