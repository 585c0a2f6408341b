"""What method="auto" takes: by predicted times, the same on every rank, and the ring where they are not known."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from checks import forget_plans
from ranks import mesh, num_collectives

import cp_mesh.choosing as choosing
import cp_mesh.plan as plan
from cp_mesh import Contiguous, Mask, Striped, ZigZag, attention, balance, check_mode, explain
from cp_mesh.choosing import Choice, Estimate, best_of
from cp_mesh.costs import H200, HostTime, KernelRate, Machine
from cp_mesh.errors import ArgumentError, RankMismatchError
from cp_mesh.machines import VARIABLE, _agreed, find_machine, from_text, read_machine, to_text, write_machine

CPU = replace(
    H200,
    name="cpu",
    compute_capability=(0, 0),
    kernels={"cpu_flash": H200.kernels["fa4"], "reference": H200.kernels["fa4"]},
    transport="functional",
)
NO_TIME = HostTime(0.0, 0.0, 0.0, 0.0)
SLOW_STAGES = replace(CPU, host_forward=HostTime(0.0, 0.0, 1.0, 1.0), host_backward=HostTime(0.0, 0.0, 1.0, 1.0))
SLOW_LINKS = replace(CPU, host_forward=NO_TIME, host_backward=NO_TIME, link_rate=1e3)
AT_ONCE = KernelRate(1e18, 0.0, 0.0, 0.0, 0.0)
SLOW_EXCHANGE = replace(  # all-gather is as fast as the ring
    SLOW_LINKS, kernels={"cpu_flash": (AT_ONCE, AT_ONCE)}, link_rate=1e15, exchange_rate=1e3, per_launch=0.0
)
WINNERS = {"ring": SLOW_EXCHANGE, "all_gather": SLOW_STAGES, "ulysses": SLOW_LINKS}
COLLECTIVES = {"ring": 6, "all_gather": 3, "ulysses": 4}  # of a call on 4 ranks


# ---- the rule


def test_the_rule() -> None:
    ring, faster, near = Estimate(1.0, 100), Estimate(0.96, 100), Estimate(0.98, 100)
    assert best_of({"ring": ring, "all_gather": faster}).method == "all_gather"
    assert best_of({"ring": ring, "all_gather": near, "ulysses": ring}).method == "ring"  # less than 3 %
    full = faster._replace(memory=100 + choosing.MORE_BYTES)
    assert best_of({"ring": ring, "ulysses": full}).method == "ulysses"
    assert best_of({"ring": ring, "ulysses": full._replace(memory=full.memory + 1)}).method == "ring"
    assert best_of({"ring": ring, "all_gather": near, "ulysses": faster}).method == "ulysses"
    assert best_of({"ulysses": faster}).method == "ring"  # of the ring nothing is known


def chosen(seq_len: int, cp_size: int, **options: Any) -> Choice:
    on_gpu = {"device": "cuda", "dtype": torch.bfloat16, "num_heads": 32, "num_kv_heads": 8, "kernel": "fa4"}
    found = explain(seq_len, cp_size, **on_gpu | options).choice
    assert found is not None
    return found


def test_what_is_not_known_goes_to_the_ring() -> None:
    assert "not measured" in chosen(8192, 8, device="cpu", dtype=torch.float32, kernel="auto").why
    slow = replace(H200, host_forward=HostTime(0.0, 0.0, 1.0, 1.0), host_backward=HostTime(0.0, 0.0, 1.0, 1.0))
    assert chosen(8192, 8, machine=slow).method == "all_gather"
    for options, words in (
        ({"transport": "functional"}, "measured over symmetric_memory"),
        ({"dtype": torch.float32, "kernel": "triton"}, "not measured"),
        ({"kernel": "triton"}, "kernel triton was not measured"),
        ({"scores": ["softcap"]}, "scores with softcap"),
        ({"num_heads": None}, "num_heads"),
    ):
        choice = chosen(8192, 8, **{"machine": slow} | options)
        assert choice.method == "ring" and words in choice.why, (options, choice)
    assert explain(8192, 8, method="ring").choice is None and explain(8192, 1).choice.method == "ring"


def test_heads_that_ranks_do_not_divide() -> None:
    links = replace(H200, link_rate=1e6)
    assert chosen(8192, 8, machine=links).method == "ulysses"
    assert "ulysses" not in chosen(8192, 6, machine=links).estimates
    assert "ulysses" not in chosen(8192, 8, machine=links, head_chunks=4).estimates  # 2 kv heads a rank


def test_estimates_are_those_of_the_table() -> None:
    """Of the slowest rank among those that are looked at; of all-gather and Ulysses as explain tells them."""
    found = explain(8192, 4, device="cuda", dtype=torch.bfloat16, num_heads=32, num_kv_heads=8, kernel="fa4")
    for x in (found.found, *found.others):
        if x.layout == ZigZag():
            estimate = found.choice.estimates[x.method]
            assert estimate.seconds == pytest.approx(x.seconds, rel=1e-2) and 0.9 * x.memory <= estimate.memory


def test_few_ranks_are_looked_at() -> None:
    """The one that fetches most among them."""
    looked: list[int] = []
    real = choosing.METHODS["ring"]

    def make(*given: Any, **named: Any) -> Any:
        looked.append(given[4])
        return real.make_schedule(*given, **named)

    methods = {**choosing.METHODS, "ring": replace(real, make_schedule=make)}
    with mock.patch.object(choosing, "METHODS", methods):
        assert chosen(16384, 16, mask=Mask(window=(100, 0)), layout=Contiguous(), gpus_per_host=16).estimates
    assert sorted(set(looked)) == [0, 1, 8, 15]


def test_documents_of_like_lengths_share_a_choice() -> None:
    """What the mean token sees counts, to a fifth; so a new batch costs no plans."""
    for lengths, same in (([1000] * 4, 1000), ([1040] * 4, 1000), ([3000, 1000], 2500), ([10] * 400, 10)):
        mask = Mask(documents=torch.repeat_interleave(torch.tensor(lengths)))
        layout, found = choosing.layout_and_documents(ZigZag(), mask)
        assert layout == ZigZag() and found == pytest.approx(same, rel=0.1)
    assert choosing.layout_and_documents(balance(mask, 4000, 4), mask)[0] is None
    assert choosing.layout_and_documents(ZigZag(), Mask()) == (ZigZag(), None)
    many, few = (chosen(65536, 8, mask=Mask(documents=torch.arange(65536) // n)) for n in (500, 50000))
    assert many.estimates["ring"].seconds < 0.5 * few.estimates["ring"].seconds


# ---- calls on ranks


def call(
    rank: int, table: str, options: dict[str, Any], heads: int = 4, checking: bool = False
) -> tuple[str, str, int, list[torch.Tensor]]:
    """The method that a call took, what it was told, its collectives after the first, and its results."""
    forget_plans()
    made: list[Any] = []
    real = plan.make_plan

    def make_plan(*given: Any) -> Any:
        made.append(real(*given))
        return made[-1]

    torch.manual_seed(0)
    size = torch.distributed.get_world_size()
    whole = [torch.randn(1, n, 24, 8, dtype=torch.float64) for n in (heads, heads, heads)]
    layout = options.get("layout", ZigZag())
    own = layout.positions(24, size, rank)
    with mock.patch.dict(os.environ, {VARIABLE: table}), mock.patch("cp_mesh.ops.make_plan", make_plan):
        if not table:
            del os.environ[VARIABLE]
        group, count = mesh((size,), ("cp",)), 0
        with check_mode(checking):
            for _ in range(2):
                q, k, v = (x[:, :, own].clone().requires_grad_() for x in whole)
                before = num_collectives()
                out = attention(q, k, v, mesh=group, **options)
                grads = torch.autograd.grad(out.square().sum(), (q, k, v))
                count = num_collectives() - before
    return made[-1].method.name, made[-1].options.method, count, [out.detach(), *grads]


@pytest.mark.parametrize("method", WINNERS)
def test_every_rank_takes_the_same(pool: Any, tmp_path: Path, method: str) -> None:
    """By the table that the environment names; results are those of the ring, and explain says the same."""
    table = tmp_path / "machine.json"
    write_machine(WINNERS[method], table)
    found = pool(4).run(call, str(table), {})
    plain = pool(4).run(call, "", {"method": "ring"})
    for (name, _, count, tensors), (_, _, _, want) in zip(found, plain, strict=True):
        assert (name, count) == (method, COLLECTIVES[method])
        for x, y in zip(tensors, want, strict=True):
            torch.testing.assert_close(x, y, rtol=1e-12, atol=1e-12)
    told = explain(24, 4, machine=str(table), dtype=torch.float64, num_heads=4, head_dim=8)
    assert told.choice.method == told.found.method == method and f"method auto = {method}" in str(told)


def test_without_a_table_a_cpu_takes_the_ring(pool: Any) -> None:
    assert [found[:3] for found in pool(4).run(call, "", {})] == [("ring", "auto", 6)] * 4


def test_a_method_that_is_named_is_taken(pool: Any, tmp_path: Path) -> None:
    write_machine(SLOW_STAGES, tmp_path / "machine.json")
    found = pool(4).run(call, str(tmp_path / "machine.json"), {"method": "ring"})
    assert [x[:3] for x in found] == [("ring", "ring", 6)] * 4


@pytest.mark.parametrize("layout", (ZigZag(), Striped(), "balanced"), ids=str)
def test_documents(pool: Any, tmp_path: Path, layout: Any) -> None:
    """All ranks choose alike of masks and layouts with tensors, whichever rank fetches most."""
    write_machine(SLOW_STAGES, tmp_path / "machine.json")
    mask = Mask(documents=torch.arange(24) // 13)
    placed = balance(mask, 24, 4) if layout == "balanced" else layout
    options = {"mask": mask, "layout": placed, "kernel": "reference"}
    found = pool(4).run(call, str(tmp_path / "machine.json"), options)
    plain = pool(4).run(call, "", options)
    assert len({x[0] for x in found}) == 1
    assert found[0][0] == "all_gather"
    for x, y in zip(found, plain, strict=True):
        for a, b in zip(x[3], y[3], strict=True):
            torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


def differing(rank: int, tables: list[str]) -> None:
    call(rank, tables[rank], {})


def refused_in_check_mode(rank: int, tables: list[str]) -> str:
    try:
        call(rank, tables[rank], {}, checking=True)
    except RankMismatchError as error:
        return str(error)
    return ""


def test_tables_that_differ_are_refused_on_every_rank(pool: Any, tmp_path: Path) -> None:
    paths = [tmp_path / "a.json", tmp_path / "b.json", tmp_path / "broken.json", tmp_path / "gpu.json"]
    write_machine(CPU, paths[0])
    write_machine(replace(CPU, link_rate=1e9), paths[1])
    paths[2].write_text('{"name": "cpu"}')
    write_machine(H200, paths[3])
    a, b, broken, gpu = map(str, paths)
    for tables, error, words in (
        ([a, b], RankMismatchError, "same table on every cp rank"),
        ([a, broken], ArgumentError, "calibrate writes one (cp rank 1)"),
        ([str(tmp_path / "none.json")] * 2, ArgumentError, "none.json"),
        ([gpu, gpu], ArgumentError, "expected numbers of cpu, got NVIDIA H200"),
    ):
        raised = pool(2).run_expecting_error(differing, tables)
        for each in raised:
            assert each is not None and each.type == error.__name__ and words in str(each), (tables, each)


def test_check_mode_finds_a_table_on_some_ranks(pool: Any, tmp_path: Path) -> None:
    """Without check mode CPU ranks would wait: the variable is set on all of them or on none."""
    write_machine(CPU, tmp_path / "a.json")
    first, second = pool(2).run(refused_in_check_mode, [str(tmp_path / "a.json"), ""])
    assert "CP_MESH_MACHINE set on all or on none" in first and "on every cp rank" in second


def refused_on_one_rank(rank: int, table: str) -> None:
    group, q = torch.distributed.new_group(), torch.randn(1, 2, 7 if rank else 6, 8)
    with mock.patch.dict(os.environ, {VARIABLE: table}):
        attention(q, q, q, mesh=group, seq_len=12)


def test_a_first_call_that_one_rank_refuses(pool: Any, tmp_path: Path) -> None:
    """The others ask for the machine then, and do not wait for it."""
    write_machine(CPU, tmp_path / "a.json")
    first, second = pool(2).run_expecting_error(refused_on_one_rank, str(tmp_path / "a.json"), timeout=20.0)
    assert first.type == "RankMismatchError" and "cp rank 1 refused its arguments" in str(first)
    assert second.type == "ArgumentError" and "local sequence length" in str(second)


@pytest.mark.parametrize(
    ("names", "hosts", "per_host"),
    (
        (["NVIDIA H200"] * 4, ["a"] * 4, 4),
        (["NVIDIA H200"] * 4, ["a", "a", "b", "b"], 2),
        (["NVIDIA H200", "NVIDIA H100 80GB HBM3"] * 2, ["a"] * 4, None),
        (["NVIDIA H100 80GB HBM3"] * 4, ["a"] * 4, None),
    ),
)
def test_the_machine_is_that_of_all_ranks(names: list[str], hosts: list[str], per_host: int | None) -> None:
    """Numbers of a GPU hold where all ranks have it; how many ranks share a host they tell each other."""
    answers = [{"machine": "", "problem": "", "device": x, "host": y} for x, y in zip(names, hosts, strict=True)]
    with (
        mock.patch("cp_mesh.machines.exchange_first", return_value=answers),
        mock.patch("torch.cuda.get_device_name", return_value=names[0]),
    ):
        machine = _agreed(mock.Mock(), torch.device("cuda", 0), "")
    assert machine == (None if per_host is None else replace(H200, gpus_per_host=per_host))


# ---- tables as files


def test_a_table_is_read_as_it_was_written(tmp_path: Path) -> None:
    for machine in (H200, CPU):
        write_machine(machine, tmp_path / "machine.json")
        assert read_machine(tmp_path / "machine.json") == machine == from_text(to_text(machine))
    assert find_machine("h200") is H200


@pytest.mark.parametrize(
    "change",
    (
        {"link_rate": None},
        {"link_rate": -1.0},
        {"link_rate": float("nan")},
        {"more": 1.0},
        {"kernels": {"fa4": []}},
        {"host_forward": {"per_pass": 1.0}},
    ),
    ids=str,
)
def test_a_table_that_is_none_is_refused(tmp_path: Path, change: dict[str, Any]) -> None:
    given: dict[str, Any] = json.loads(to_text(CPU)) | change
    given = {name: x for name, x in given.items() if x is not None}
    path = tmp_path / "machine.json"
    path.write_text(json.dumps(given))
    with pytest.raises(ArgumentError, match="calibrate writes one"):
        read_machine(path)
    with pytest.raises(ArgumentError, match="h200"):
        explain(96, 2, machine=str(path))


def test_explain_reads_the_table_of_the_environment(tmp_path: Path) -> None:
    slow: Machine = replace(H200, link_rate=1e6)
    write_machine(slow, tmp_path / "slow.json")
    with mock.patch.dict(os.environ, {VARIABLE: str(tmp_path / "slow.json")}):
        assert chosen(8192, 8).method == "ulysses"
        assert chosen(8192, 8, machine="h200").method != "ulysses"
        assert explain(8192, 8).choice.method == "ring"  # a CPU, of which the table is not
    assert chosen(8192, 8).method != "ulysses"
