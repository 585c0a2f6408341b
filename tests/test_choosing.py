"""What method="auto" takes: by predicted times, the same on every rank, and the ring where they are not known."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch
from checks import forget_kept, forget_plans
from inside import H200, KernelRate, Machine, Options, inner, parts_of, path_of, read_machine, room, write_machine
from ranks import mesh, num_collectives
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from cp_mesh import (
    ArgumentError,
    Contiguous,
    Layout,
    Mask,
    RankMismatchError,
    Striped,
    ZigZag,
    ZigZagDocuments,
    attention,
    balance,
    check_mode,
    explain,
)

choosing = room("choose")
machines = room("machines")
plan = room("call.plan")
Choice, Estimate, best_of = inner("choose", "Choice", "Estimate", "best_of")
HostTime = inner("time", "HostTime")
VARIABLE, _agreed, find_machine = inner("machines", "VARIABLE", "_agreed", "find_machine")
from_text, to_text = inner("machines", "from_text", "to_text")

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
SLOW_NETWORK = replace(SLOW_LINKS, link_rate=1e15, network_rate=1e3)


class Winner(NamedTuple):
    """A machine on which a method is fastest for so many heads on 4 ranks, ``per_host`` on each host.

    ``collectives`` are those of a call, ``degree`` what the method's option says.
    """

    machine: Machine
    collectives: int
    heads: int = 4
    per_host: int = 4
    degree: int = 0
    layout: Layout = ZigZag()


WINNERS = {
    "ring": Winner(SLOW_EXCHANGE, 6),
    "all_gather": Winner(SLOW_STAGES, 3),
    "ulysses": Winner(SLOW_LINKS, 4),
    "ulysses, where rank 0 fetches nothing": Winner(SLOW_LINKS, 4, layout=Contiguous()),
    "hybrid": Winner(SLOW_LINKS, 7, heads=2, degree=2),
    "double_ring": Winner(SLOW_NETWORK, 9, heads=1, per_host=2, degree=2),
}


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


@pytest.mark.parametrize("mask", (Mask(), Mask(window=(1023, 0))), ids=str)
@pytest.mark.parametrize("gpus_per_host", (8, 4))
def test_estimates_are_those_of_the_table(gpus_per_host: int, mask: Mask) -> None:
    """Of the slowest rank among those that are looked at; of all methods as explain tells them."""
    on_gpu = {"dtype": torch.bfloat16, "num_heads": 32, "num_kv_heads": 8, "kernel": "fa4", "mask": mask}
    machine = replace(H200, transport="symmetric_memory" if gpus_per_host == 8 else "functional")
    found = explain(8192, 8, machine=machine, gpus_per_host=gpus_per_host, **on_gpu)
    told = [x for x in (found.found, *found.others) if x.layout == ZigZag()]
    (ring,) = (x for x in told if x.method == "ring")
    most = max(ring.ranks, key=lambda x: x.near + x.far).rank
    for x in told:
        estimate = found.choice.estimates[x.method]
        looked_at = {rank // x.inner for rank in (0, most, 4, 7)}
        costs = [each.costs for each in x.ranks if each.rank // x.inner in looked_at]
        slowest = sum(max(cost.queued for cost in of_pass) for of_pass in zip(*costs, strict=True))
        assert estimate.degree in (0, x.degree) and estimate.seconds == pytest.approx(slowest)
        assert 0.95 * x.seconds <= estimate.seconds and 0.9 * x.memory <= estimate.memory
    assert {x.method for x in told} == {*choosing.METHODS} - ({"double_ring"} if gpus_per_host == 8 else set())


def test_degrees_that_are_tried() -> None:
    """Inner groups within a host, of which heads and ranks are multiples; hosts that are full."""
    hybrid, double_ring = (choosing.METHODS[name].degrees for name in ("hybrid", "double_ring"))
    assert [hybrid(*sizes) for sizes in ((8, 8), (16, 8), (12, 8), (4, 2), (8, 1), (2, 8), (6, 8))] == [
        [2, 4], [2, 4, 8], [2, 4], [2], [], [], [2],
    ]  # fmt: skip
    assert [double_ring(*sizes) for sizes in ((16, 8), (8, 8), (12, 8), (8, 1))] == [[8], [], [], []]
    slow = replace(H200, transport="functional", link_rate=1e6)
    for heads, degree in ((32, 4), (6, 2), (3, None)):
        sizes = {"num_heads": heads, "num_kv_heads": heads, "machine": slow, "gpus_per_host": 4}
        found = chosen(8192, 8, **sizes).estimates.get("hybrid")
        assert (found and found.degree) == degree


def test_what_needs_groups_is_not_tried_where_they_cannot_be_made() -> None:
    """Of documents, by which cp groups of a job would differ, and where ranks are in unequally many groups."""
    looked = []
    real = choosing.choose.__wrapped__
    slow = replace(H200, link_rate=1e6)
    with mock.patch.object(choosing.choose, "__wrapped__", lambda problem: looked.append(problem) or real(problem)):
        assert "hybrid" in chosen(8192, 8, machine=slow).estimates
        packed = chosen(8192, 8, machine=slow, mask=Mask(documents=torch.arange(8192) // 1000))
    assert "hybrid" not in packed.estimates and "ulysses" in packed.estimates
    assert "hybrid" not in real(replace(looked[0], inner_sizes=frozenset())).estimates
    for problem in looked:
        found = real(replace(problem, inner_sizes=frozenset({2}))).estimates["hybrid"]
        assert found.degree == 2 and found.seconds < real(problem).estimates["ring"].seconds


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
    edges = [torch.tensor([0, *lengths]).cumsum(0) for lengths in ([1040, 960, 1000], [1000, 1040, 960])]
    for documents in (None, torch.arange(3000) // 1000):
        several = {choosing.layout_and_documents(ZigZagDocuments(x), Mask(documents=documents)) for x in edges}
        ((layout, found),) = several
        assert (found is None) == (documents is None) and layout.tensor.tolist()[1] == pytest.approx(1000, rel=0.1)
    many, few = (chosen(65536, 8, mask=Mask(documents=torch.arange(65536) // n)) for n in (500, 50000))
    assert many.estimates["ring"].seconds < 0.5 * few.estimates["ring"].seconds


# ---- calls on ranks


def checkpointed(**options: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    return lambda attend: lambda *args: checkpoint(attend, *args, **options)


SAVED = partial(create_selective_checkpoint_contexts, [torch.ops.cp_mesh.attention.default])
WITHIN: dict[str, Callable[[Callable[..., Any]], Callable[..., Any]]] = {
    "": lambda attend: attend,
    "compiled": partial(torch.compile, backend="aot_eager", fullgraph=True),
    "checkpointed": checkpointed(use_reentrant=False),
    "checkpointed, reentrant": checkpointed(use_reentrant=True),
    "checkpointed, but for attention": checkpointed(use_reentrant=False, context_fn=SAVED),
}


def call(
    rank: int,
    table: str,
    options: dict[str, Any],
    heads: int = 4,
    checking: bool = False,
    per_host: int = 4,
    within: str = "",
) -> tuple[str, Options, int, list[torch.Tensor]]:
    """The method that a call took, its options, its collectives after the first, and its results.

    ``within`` is what it is called in, one of `WITHIN`.
    """
    forget_plans()
    forget_kept(machines._Answer)
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
    on_host = mock.patch(f"{path_of('machines')}.host_name", return_value=f"host {rank // per_host}")
    with (
        mock.patch.dict(os.environ, {VARIABLE: table}),
        mock.patch(f"{path_of('passes')}.make_plan", make_plan),
        on_host,
    ):
        if not table:
            del os.environ[VARIABLE]
        group, count = mesh((size,), ("cp",)), 0
        attend = WITHIN[within](partial(attention, mesh=group, **options))
        with check_mode(checking):
            for _ in range(2):
                q, k, v = (x[:, :, own].clone().requires_grad_() for x in whole)
                before = num_collectives()
                out = attend(q, k, v)
                out.square().sum().backward()
                count = num_collectives() - before
    (method,) = {x.method.name for x in made}  # of the forward, computed again too, and the backward
    return method, made[-1].options, count, [out.detach(), *(x.grad for x in (q, k, v))]


@pytest.mark.parametrize("words", WINNERS)
@pytest.mark.quick("ring", "hybrid")
def test_every_rank_takes_the_same(pool: Any, tmp_path: Path, words: str) -> None:
    """By the table that the environment names; results are those of the ring, and explain says the same."""
    table, winner, method = tmp_path / "machine.json", WINNERS[words], words.partition(",")[0]
    write_machine(winner.machine, table)
    given = {"layout": winner.layout}
    found = pool(4).run(call, str(table), given, winner.heads, False, winner.per_host)
    plain = pool(4).run(call, "", given | {"method": "ring"}, winner.heads)
    for (name, options, count, tensors), (_, _, _, want) in zip(found, plain, strict=True):
        assert (name, count) == (method, winner.collectives)
        assert options.ulysses_degree + options.inner_ring_size == winner.degree
        for x, y in zip(tensors, want, strict=True):
            torch.testing.assert_close(x, y, rtol=1e-12, atol=1e-12)
    sizes = {"num_heads": winner.heads, "head_dim": 8, "gpus_per_host": winner.per_host}
    told = explain(24, 4, machine=str(table), dtype=torch.float64, layout=winner.layout, **sizes)
    assert told.choice.method == told.found.method == method and f"method auto = {method}" in str(told)
    assert told.choice.degree == winner.degree and (not winner.degree or told.found.degree == winner.degree)


@pytest.mark.parametrize("within", [x for x in WITHIN if x])
@pytest.mark.parametrize(("method", "size"), (("ulysses", 2), ("ulysses", 4), ("hybrid", 4)))
@pytest.mark.quick(without="compiled")
def test_forward_and_backward_take_the_same(pool: Any, tmp_path: Path, method: str, size: int, within: str) -> None:
    """Of methods that keep tensors for the backward, where "auto" may only know in the call whether one does."""
    table, winner = tmp_path / "machine.json", WINNERS[method]
    write_machine(winner.machine, table)
    found = pool(size).run(call, str(table), {}, winner.heads, False, winner.per_host, within)
    plain = pool(size).run(call, "", {"method": "ring"}, winner.heads)
    for (name, options, _, tensors), (_, _, _, want) in zip(found, plain, strict=True):
        assert (name, options.ulysses_degree) == (method, winner.degree)
        for x, y in zip(tensors, want, strict=True):
            torch.testing.assert_close(x, y, rtol=1e-12, atol=1e-12)


def test_without_a_table_a_cpu_takes_the_ring(pool: Any) -> None:
    assert [(name, x.method, n) for name, x, n, _ in pool(4).run(call, "", {})] == [("ring", "auto", 6)] * 4


def test_a_method_that_is_named_is_taken(pool: Any, tmp_path: Path) -> None:
    write_machine(SLOW_STAGES, tmp_path / "machine.json")
    found = pool(4).run(call, str(tmp_path / "machine.json"), {"method": "ring"})
    assert [(name, x.method, n) for name, x, n, _ in found] == [("ring", "ring", 6)] * 4


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


def with_groups(rank: int, table: str, made: str) -> list[tuple[str, float]]:
    """Methods of calls over a new group, by heads, and their distance from the ring's result."""
    group, found = torch.distributed.new_group(), []
    forget_plans()
    mask = Mask(documents=torch.arange(24) // 13) if "documents" in made else Mask()
    if "there" in made:
        parts_of(group, 2)
    own = ZigZag().positions(24, 4, rank)
    with mock.patch.dict(os.environ, {VARIABLE: table}):
        for heads in (4, 2):
            torch.manual_seed(0)
            q, k, v = (torch.randn(1, heads, 24, 8, dtype=torch.float64)[:, :, own].requires_grad_() for _ in range(3))
            with mock.patch(f"{path_of('call.plan')}._choice", wraps=plan._choice) as asked:
                out = attention(q, k, v, mesh=group, mask=mask, kernel="reference")
                grads = torch.autograd.grad(out.square().sum(), (q, k, v))
            names = {plan._choice(*each.args).method for each in asked.call_args_list}
            want = attention(q, k, v, mesh=group, mask=mask, kernel="reference", method="ring")
            wanted = torch.autograd.grad(want.square().sum(), (q, k, v))
            far = max(float((x - y).abs().max()) for x, y in zip((out, *grads), (want, *wanted), strict=True))
            found.append((",".join(names), far))
            if "alone" in made and heads == 4:
                torch.distributed.new_group([0, 1])  # the others are in one group less
    return found


@pytest.mark.parametrize(
    ("made", "want"),
    (
        ("", "hybrid"),
        ("one on some ranks alone", "ring"),
        ("those there, and one on some ranks alone", "hybrid"),
        ("documents", "ring"),
        ("documents, and those there", "hybrid"),
    ),
)
@pytest.mark.quick("documents-ring")
def test_groups_are_made_on_all_ranks_or_not_needed(pool: Any, tmp_path: Path, made: str, want: str) -> None:
    """After a group that some ranks made alone, no other can be made: "auto" takes what needs none, on every rank."""
    write_machine(replace(SLOW_LINKS, kernels={"reference": H200.kernels["fa4"]}), tmp_path / "machine.json")
    found = pool(4).run(with_groups, str(tmp_path / "machine.json"), made)
    if "alone" in made:
        pool(4).close()
    assert [[name for name, _ in each] for each in found] == [["ulysses", want]] * 4
    assert max(far for each in found for _, far in each) < 1e-12


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
        (["h200"] * 2, ArgumentError, "CP_MESH_MACHINE: expected the file of a table, got h200 ("),
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
        (["NVIDIA H200"] * 4, ["a", "a", "a", "b"], 1),
        (["NVIDIA H200"] * 4, ["a", "b", "a", "b"], 1),
        (["NVIDIA H200", "NVIDIA H100 80GB HBM3"] * 2, ["a"] * 4, None),
        (["NVIDIA H100 80GB HBM3"] * 4, ["a"] * 4, None),
    ),
)
def test_the_machine_is_that_of_all_ranks(names: list[str], hosts: list[str], per_host: int | None) -> None:
    """Numbers of a GPU hold where all ranks have it; which neighbours share a host they tell each other."""
    said = {"machine": "", "problem": ""}
    answers = [said | {"device": x, "host": y} for x, y in zip(names, hosts, strict=True)]
    with (
        mock.patch(f"{path_of('machines')}.exchange_first", return_value=answers),
        mock.patch("torch.cuda.get_device_name", return_value=names[0]),
    ):
        machine = _agreed(mock.Mock(), torch.device("cuda", 0), "").machine
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
    with mock.patch.dict(os.environ, {VARIABLE: "h200"}):
        with pytest.raises(ArgumentError, match="CP_MESH_MACHINE: expected the file of a table, got h200"):
            chosen(8192, 8)
    assert chosen(8192, 8).method != "ulysses"
