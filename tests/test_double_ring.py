"""The double ring: rows cross between hosts once, and all else is the ring's.

That its results are exact is shown where those of all methods are, as ranks.py says that hosts have two ranks.
"""

from __future__ import annotations

import itertools
import os
import random
import socket
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from cases import LAYOUTS, MASKS, gap, make_mask, pairs
from checks import GQA, MHA, MQA, Case, parity_on_ranks, report
from dense import dense_attention, make_qkv
from inside import KERNELS, Schedule, Stage, inner, parts_of, path_of
from ranks import mesh, num_collectives
from recording import recording
from test_symmetric_memory import attend, different, double
from test_traffic import Spy, in_flight
from torch import Tensor

import cp_mesh
from cp_mesh import ZigZag

DOUBLE_RING = inner("call.methods", "DOUBLE_RING")
make_relayed_schedule = inner("relay_plan", "make_relayed_schedule")
RelayedTransport = inner("relayed", "RelayedTransport")

Rows = list[tuple[int, int]]  # owner, local row
members = dist.get_process_group_ranks


def carry(buffers: list[Rows], stages: list[Stage]) -> list[Rows]:
    """What each rank of a group receives of the others' buffers; whoever serves must name the same rows."""
    for me, other in product(range(len(buffers)), repeat=2):
        assert dict(stages[me].fetch).get(other) == dict(stages[other].serve).get(me)
    return [
        [row for other, ranges in stage.fetch for begin, end in ranges for row in buffers[other][begin:end]]
        for stage in stages
    ]


def brought(schedules: list[Schedule], host_size: int) -> list[list[Rows]]:
    """The rows of each stage, [stage][rank], as they come by visits."""
    size, arrived = len(schedules), []
    shards = [[(rank, row) for row in range(n)] for rank, n in enumerate(schedules[0].shard_lens)]
    hosts = [[*range(first, first + host_size)] for first in range(0, size, host_size)]
    for visits in zip(*(schedule.route.visits for schedule in schedules), strict=True):
        buffers = shards
        if visits[0].crossing is not None:
            columns = [[*range(place, size, host_size)] for place in range(host_size)]
            crossed = {
                rank: rows
                for ranks in columns
                for rank, rows in zip(
                    ranks, carry([shards[r] for r in ranks], [visits[r].crossing for r in ranks]), strict=True
                )
            }
            buffers = [crossed[rank] for rank in range(size)]
            for rank, visit in enumerate(visits):
                assert len(buffers[rank]) == visit.num_rows == len(set(buffers[rank]))
        if visits[0].own is not None:
            stages = [visit.own for visit in visits]
            assert all(place == rank % host_size for rank, stage in enumerate(stages) for place, _ in stage.fetch)
            arrived.append(
                [x for ranks in hosts for x in carry([buffers[r] for r in ranks], [stages[r] for r in ranks])]
            )
        for stages in zip(*(visit.route.stages for visit in visits), strict=True):
            arrived.append(
                [x for ranks in hosts for x in carry([buffers[r] for r in ranks], [stages[r] for r in ranks])]
            )
    return arrived


@pytest.mark.parametrize(
    ("cp_size", "host_size"), [(6, 2), *(pytest.param(*sizes, marks=pytest.mark.full) for sizes in ((6, 3), (8, 4)))]
)
@pytest.mark.full
def test_every_stage_gets_the_rows_of_its_tiles(cp_size, host_size):
    """The tiles are tested with the ring's: here rows come in the order in which a stage's buffer has them."""
    problems = []
    for layout, mask in product(LAYOUTS, MASKS):
        made = LAYOUTS[layout](31), make_mask(mask, 2, 31), 31, cp_size
        schedules = [make_relayed_schedule(*made, rank, True, host_size) for rank in range(cp_size)]
        wanted = [
            [
                [(s, row) for s, ranges in stage.fetch for begin, end in ranges for row in range(begin, end)]
                for stage in stages
            ]
            for stages in zip(*(schedule.route.stages for schedule in schedules), strict=True)
        ]
        if brought(schedules, host_size) != wanted:
            problems.append(f"{layout}, {mask}")
    report([problems])


def on_hosts(rank: int, host_size: int, cases: Sequence[Case], recorded: bool) -> list[str]:
    """`parity_on_ranks` on hosts of so many ranks."""
    size = dist.get_world_size()
    cases = [replace(case, method="double_ring", options={"inner_ring_size": host_size}) for case in cases]
    return parity_on_ranks(rank, (size,), ("cp",), cases, recorded)


FEW = [
    Case("zigzag", "causal", 31, GQA, 2, "cpu_flash"),
    Case("contiguous", "full", 24, MQA, 1),
    Case("striped", "documents", 31, GQA, 0),
    Case("shuffled", "everything", 31, MHA),
    Case("contiguous", "window", 31, MHA),
    Case("zigzag", "causal", 31, MHA, scores="every score", head_chunks=3),
    Case("zigzag", "full", 3),
    Case("zigzag", "causal", 31, MHA, scores="dropout, sinks and alibi"),
]


@pytest.mark.parametrize(
    ("size", "host_size"),
    [(4, 2), pytest.param(6, 2, marks=pytest.mark.full), pytest.param(6, 3, marks=pytest.mark.full)],
)
def test_nothing_is_read_before_it_is_there_nor_written_while_it_is_sent(pool, size, host_size):
    """On groups that deliver at the wait, NaN until then, and compare what was sent with what is there then."""
    report(pool(size).run(on_hosts, host_size, FEW, True, timeout=120.0))


B, K, D, E = 2, 3, 5, 4
ROW = B * K * (D + E)  # elements of K and V in one row


def passes(rank: int, cases: Sequence[tuple[str, str, int]], dtype: torch.dtype, host_size: int | None) -> list[Any]:
    """What this rank sent in forward and backward of each case: (over which group, to each rank, from each, itemsize).

    By the double ring, or without ``host_size`` by the ring.
    """
    axis, results = mesh((size := dist.get_world_size(),), ("cp",)), []
    parts = parts_of(axis.get_group(), host_size) if host_size else ()
    names = {tuple(members(group)): name for group, name in zip(parts, ("far", "near"), strict=False)}
    options = {"method": "double_ring", "inner_ring_size": host_size} if host_size else {"method": "ring"}
    for name, mask, S in cases:
        layout = LAYOUTS[name](S)
        rows = layout.positions(S, size, rank)
        q, k, v, dout = (x[:, :, rows].requires_grad_() for x in make_qkv(B, 6, K, S, D, E, dtype=dtype))
        before = num_collectives()
        with recording(axis, host_size) as notes:
            given = {"mesh": axis, "seq_len": S, "layout": layout, "mask": make_mask(mask, B, S)}
            out = cp_mesh.attention(q, k, v, **given, **options)
            num_forward = notes.hops
            out.backward(dout)
        assert not notes.problems and num_collectives() - before == notes.hops, notes.problems
        sent = [(names.get(tuple(x.ranks), "all"), x.to, x.origin, x.itemsize) for x in notes.sent]
        results.append((sent[:num_forward], sent[num_forward:]))
    return results


def seen(name: str, mask: str, S: int, size: int) -> list[list[Tensor]]:
    """[receiver][source]: which of the source's keys some query of the receiver may see, from the dense mask."""
    allowed, layout = pairs(mask, B, S).any(0), LAYOUTS[name](S)
    shards = [layout.positions(S, size, rank) for rank in range(size)]
    return [
        [torch.zeros(len(k), dtype=torch.bool) if k is q else allowed[q][:, k].any(0) for k in shards] for q in shards
    ]


def hops(need: list[list[Tensor]], host_size: int, rank: int, itemsize: int, sums: int) -> tuple[list[Any], list[Any]]:
    """Hops between hosts and within this one: of rows, and of their gradients home, which cross in ``sums`` bytes."""
    size, (host, place) = len(need), divmod(rank, host_size)
    hosts, rows, gradients = size // host_size, [], []

    def count(x: Tensor) -> int:
        return int(x.sum()) * ROW

    for away in range(hosts):
        other, to = (host - away) % hosts, (host + away) % hosts
        at, sources, receivers = ([h * host_size + p for p in range(host_size)] for h in (host, other, to))
        steps = [
            step
            for step in range(host_size)
            if (away or step)
            and any(
                need[h * host_size + p][(h - away) % hosts * host_size + (p - step) % host_size].any()
                for h in range(hosts)
                for p in range(host_size)
            )
        ]
        if away and steps:
            arrives = count(torch.stack([need[r][sources[place]] for r in at]).any(0))
            leaves = count(torch.stack([need[r][rank] for r in receivers]).any(0))
            served, fetched = [leaves * (h == to) for h in range(hosts)], [arrives * (h == other) for h in range(hosts)]
            rows.append(("far", served, fetched, itemsize))
            gradients.append(("far", fetched, served, sums))
        within = [step for step in steps if step]
        for group in (within[:1], within[1:3], within[3:7]):
            fetched, served = [0] * host_size, [0] * host_size
            for step in group:
                source, receiver = (place - step) % host_size, (place + step) % host_size
                fetched[source] = count(need[rank][sources[source]])
                served[receiver] = count(need[at[receiver]][sources[place]])
            if group:
                rows.append(("near", served, fetched, itemsize))
                gradients.append(("near", fetched, served, sums))
    return rows, gradients


@pytest.mark.parametrize(("size", "host_size"), [(4, 2), *(pytest.param(6, n, marks=pytest.mark.full) for n in (2, 3))])
def test_rows_cross_once_and_only_those_that_a_host_needs(pool, size, host_size):
    """Forward: rows cross, and go on within the host. Backward: again, and gradients go home, in fp32 of bf16 rows."""
    masks = ("causal", "full", "window", "window of one token", "window ahead", "prefix", "no key at all")
    cases = [*product(("contiguous", "zigzag", "striped"), masks, (31,)), ("striped", "full", 2)]
    for dtype, itemsize, sums in ((torch.bfloat16, 2, 4), (torch.float64, 8, 8)):
        problems = []
        for rank, results in enumerate(pool(size).run(passes, cases, dtype, host_size)):
            for case, (forward, backward) in zip(cases, results, strict=True):
                rows, gradients = hops(seen(*case, size), host_size, rank, itemsize, sums)
                if sorted(forward) != sorted(rows):
                    problems.append(f"rank {rank}, {case}, forward: sent {forward}, expected {rows}")
                if sorted(backward) != sorted(rows + gradients):
                    problems.append(f"rank {rank}, {case}, backward: sent {backward}, expected {rows + gradients}")
        report([problems])


def network_bytes(results: list[Any], case: int, host_size: int) -> int:
    """Bytes that cross from host to host in both passes of a case, over all ranks."""
    total = 0
    for rank, of_rank in enumerate(results):
        for group, to, _, itemsize in itertools.chain(*of_rank[case]):
            away = [group == "far" or (group == "all" and r // host_size != rank // host_size) for r in range(len(to))]
            total += itemsize * sum(n for n, crosses in zip(to, away, strict=True) if crosses)
    return total


@pytest.mark.parametrize(("size", "host_size"), [(4, 2), pytest.param(6, 3, marks=pytest.mark.full)])
def test_the_network_moves_what_hosts_need_not_what_ranks_do(pool, size, host_size):
    """Where all see all, less by the number of ranks on a host; never more than by the ring."""
    cases = [("zigzag", "full", 48), ("zigzag", "causal", 48), ("striped", "causal", 48), ("contiguous", "window", 48)]
    ring, double = (pool(size).run(passes, cases, torch.float64, n) for n in (None, host_size))
    found = [(network_bytes(ring, i, host_size), network_bytes(double, i, host_size)) for i in range(len(cases))]
    hosts, itemsize, shard = size // host_size, 8, 48 // size
    # rows twice and gradients once, of each shard to each other host
    assert found[0] == (
        3 * ROW * itemsize * shard * size * (size - host_size),
        3 * ROW * itemsize * shard * size * (hosts - 1),
    )
    assert all(ours <= theirs for theirs, ours in found) and found[0][0] == host_size * found[0][1]
    # zigzag: a rank that computes with the later half of a shard alone needs less of it than its neighbours do
    assert found[1][0] > 1.4 * found[1][1] and found[3][1] > 0


def overlap(rank: int, host_size: int) -> list[tuple[list[str], list[str]]]:
    """For both kinds of groups, when hops begin and are waited for among the steps of forward and backward."""
    axis, real = mesh((size := dist.get_world_size(),), ("cp",)), KERNELS["cpu_flash"]
    parts, layout = parts_of(axis.get_group(), host_size), ZigZag()
    rows = layout.positions(48, size, rank)
    q, k, v, dout = (x[:, :, rows].requires_grad_() for x in make_qkv(B, 6, K, 48, D, D))
    with recording(axis, host_size) as notes:
        spied = replace(
            real,
            begin_forward=lambda *args: Spy(real.begin_forward(*args), notes.events),
            begin_backward=lambda *args: Spy(real.begin_backward(*args), notes.events),
        )
        with mock.patch.dict(KERNELS, cpu_flash=spied):
            options = {"kernel": "cpu_flash", "method": "double_ring", "inner_ring_size": host_size}
            out = cp_mesh.attention(q, k, v, mesh=axis, layout=layout, **options)
            num_forward = len(notes.events)
            out.backward(dout)
    events = notes.events[:num_forward], notes.events[num_forward:]
    return [tuple([x for x in part if x == "step" or x.ranks == members(group)] for part in events) for group in parts]


def test_both_links_are_busy_while_tiles_are_computed(pool):
    """Three hosts of two ranks: local, the other rank of the host, and twice the partner and its neighbour."""
    for far, near in pool(6).run(overlap, 2):
        # The rows of the next host are crossing while a host is visited.
        assert in_flight(far[0]) == [1, 1, 1, 1, 0, 0]
        # And when there are none, the gradients of the host before; local last, behind which the last ones hide.
        assert in_flight(far[1]) == [1, 1, 1, 1, 1, 1]
        # Within the host rows are fetched behind the local tiles and behind the partner's.
        assert in_flight(near[0]) == [1, 0, 1, 0, 1, 0]
        assert in_flight(near[1]) == [0, 1, 0, 1, 0, 0]


def within_by_memory(rank: int, folder: str, host_size: int) -> list[str]:
    """What differs when hosts have symmetric memory: nothing may, to the bit."""
    axis, problems = mesh((size := dist.get_world_size(),), ("cp",)), []
    outer, inner = parts_of(axis.get_group(), host_size)
    random.seed(rank)
    for case in (case for case in FEW * 2 if isinstance(case.scores, str) and case.scores == "plain"):
        layout = case.make_layout()
        rows = layout.positions(case.S, size, rank)
        inputs = [x[:, :, rows] for x in make_qkv(2, *case.heads, case.S, 8, 8)]
        options = {"mask": case.make_mask(), "layout": layout, "seq_len": case.S, "kernel": case.kernel}
        options |= {"method": "double_ring", "inner_ring_size": host_size}
        wanted = attend(inputs, axis, "functional", **options)
        with double(inner, f"{folder}/{rank // host_size}"), recording(axis, host_size) as notes:
            got = attend(inputs, axis, "auto", **options)
        problems += different(f"{case}", wanted, got)
        if not notes.hops or any(sent.ranks != members(outer) for sent in notes.sent):
            problems.append(f"{case}: rows moved within the host by collectives")
    return problems


@pytest.mark.parametrize(("size", "host_size"), [(4, 2), pytest.param(6, 3, marks=pytest.mark.full)])
def test_hosts_may_have_symmetric_memory(pool, tmp_path, size, host_size):
    """On the double of it, with naps that give a race room."""
    for host in range(size // host_size):
        (tmp_path / str(host)).mkdir()
    report(pool(size).run(within_by_memory, str(tmp_path), host_size, timeout=120.0))


REFUSED: dict[str, tuple[dict[str, Any], str | None, list[str]]] = {
    "a size that does not divide": (
        {"inner_ring_size": 3}, "2", ["a divisor of the 4 cp ranks, got 3", "inner_ring_size=2 works, or method='ring'"]
    ),
    "too large": ({"inner_ring_size": 8}, "2", ["a divisor of the 4 cp ranks, got 8", "inner_ring_size=4 works"]),
    "no size": ({"inner_ring_size": 0}, "2", ["inner_ring_size", "a positive int or None, got 0"]),
    "a word": ({"inner_ring_size": "2"}, "2", ["inner_ring_size", "a positive int or None, got '2'"]),
    "another method": (
        {"method": "ring", "inner_ring_size": 2}, "2",
        ["inner_ring_size", "None, but with method='double_ring'", "method='double_ring' takes it, or leave it out"],
    ),
    "hosts that nobody tells": ({}, None, ["LOCAL_WORLD_SIZE, as torchrun sets it", "got neither", "method='ring'"]),
    "hosts told wrong": ({}, "two", ["LOCAL_WORLD_SIZE='two'", "pass inner_ring_size", "method='ring'"]),
    "unequal hosts": ({}, "3", ["as many cp ranks on every host", "got 3, 1", "method='ring' works"]),
    "symmetric memory between hosts": (
        {"transport": "symmetric_memory"}, "2", ["auto or functional", "transport='auto' uses it within each host"]
    ),
}  # fmt: skip


def refusals(rank: int) -> list[str]:
    axis, problems = mesh((4,), ("cp",)), []
    q, k, v, _ = make_qkv(1, 4, 2, 8, 4)
    for name, (options, local_world_size, says) in REFUSED.items():
        told = {} if local_world_size is None else {"LOCAL_WORLD_SIZE": local_world_size}
        kept = {key: x for key, x in os.environ.items() if key != "LOCAL_WORLD_SIZE"}
        before, said = num_collectives(), "nothing"
        with mock.patch.dict(os.environ, kept | told, clear=True):
            try:
                cp_mesh.attention(q, k, v, mesh=axis, **{"method": "double_ring"} | options)
            except (cp_mesh.ArgumentError, cp_mesh.UnsupportedError) as error:
                said = str(error)
        if num_collectives() > before or not all(words in said for words in says):
            problems.append(f"{name}: {said}")
    return problems


def test_what_is_not_served_is_refused_before_the_first_collective(pool):
    report(pool(4).run(refusals))


ANOTHER_METHOD = """
import sys, torch, torch.distributed as dist, cp_mesh
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
q = torch.randn(1, 2, 8, 8, requires_grad=True)
cp_mesh.attention(q, q, q, mesh=dist.group.WORLD, method="%s").sum().backward()
print([name for name in sys.modules if name.startswith("cp_mesh.hosts")])
"""


def test_a_call_that_does_not_ask_for_it_loads_nothing_of_it():
    environment = {**os.environ, "PYTHONPATH": str(Path(cp_mesh.__file__).parents[1]), "LOCAL_WORLD_SIZE": "1"}
    for method, is_loaded in (("auto", False), ("ulysses", False), ("double_ring", True)):
        command = [sys.executable, "-c", ANOTHER_METHOD % method]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120, env=environment, check=True)
        assert (done.stdout.splitlines()[-1] != "[]") == is_loaded, done.stdout


def told(rank: int) -> list[int]:
    """Hops by the ring's groups: the ranks of a host are those of LOCAL_WORLD_SIZE, unless the call says others."""
    axis, counts = mesh((4,), ("cp",)), []
    inputs = [x[:, :, :6] for x in make_qkv(1, 4, 2, 24, 4)[:3]]
    for local_world_size, options in (("2", {}), ("4", {}), ("1", {}), ("4", {"inner_ring_size": 2})):
        with mock.patch.dict(os.environ, LOCAL_WORLD_SIZE=local_world_size), recording(axis, 2) as notes:
            cp_mesh.attention(*inputs, mesh=axis, mask=cp_mesh.Mask(causal=False), method="double_ring", **options)
        counts.append(sum(sent.ranks != [*range(4)] for sent in notes.sent))
    return counts


def test_ranks_of_a_host_are_those_of_the_launcher(pool):
    """One crossing, and a hop within the host for either host's rows; on one host, or of one rank each, the ring."""
    assert pool(4).run(told) == [[3, 0, 0, 3]] * 4


def on_two_axes(rank: int) -> list[str]:
    """As the mesh or the option says, whatever the launcher does: results, and sizes that the mesh does not have."""
    axes, axis, problems = mesh((2, 2), ("cp_outer", "cp_inner")), mesh((4,), ("cp",)), []
    whole = make_qkv(1, 4, 2, 24, 4)
    rows = ZigZag().positions(24, 4, rank)
    options = {"mesh": axes, "method": "double_ring"}
    with (
        mock.patch.dict(os.environ, LOCAL_WORLD_SIZE="4"),
        mock.patch(f"{path_of('double_ring')}.RelayedTransport", wraps=RelayedTransport) as made,
    ):
        out = cp_mesh.attention(*(x[:, :, rows] for x in whole[:3]), **options)
        others = []
        for of_cp, size in ((axes, None), (axis, 2)):
            before, options_of = made.call_count, {"method": "double_ring", "inner_ring_size": size}
            cp_mesh.verify(of_cp, dtype=torch.float64, **options_of)
            sequence, core = cp_mesh.ShardedSequence(of_cp), Core()
            cp_mesh.parallelize(core, sequence.mesh, {"": cp_mesh.ContextParallel(sequence, **options_of)})
            others.append(core(*(x[:, :, rows] for x in whole[:3])))
            if made.call_count != before + 4:  # of verify three
                problems.append(f"{of_cp}: {made.call_count - before} transports over two hosts")
        with pytest.raises(cp_mesh.ArgumentError, match="inner_ring_size: expected 2, as the mesh's second axis has"):
            cp_mesh.attention(*(x[:, :, rows] for x in whole[:3]), inner_ring_size=4, **options)
    causal = torch.ones(24, 24, dtype=torch.bool).tril()[None]
    want, _ = dense_attention(*whole[:3], causal)
    return problems + [
        f"off by {gap(x, want[:, :, rows])}" for x in (out, *others) if not gap(x, want[:, :, rows]) <= 1e-10
    ]


class Core(torch.nn.Module):
    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)


@pytest.mark.full
def test_a_mesh_of_two_axes_or_an_option_says_the_ranks_of_a_host(pool):
    report(pool(4).run(on_two_axes))


def compiled(rank: int) -> list[str]:
    axes, axis, problems = mesh((2, 2), ("cp_outer", "cp_inner")), mesh((4,), ("cp",)), []
    rows = ZigZag().positions(24, 4, rank)
    q, k, v, dout = (x[:, :, rows].requires_grad_() for x in make_qkv(1, 4, 2, 24, 4))

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        first = cp_mesh.attention(q, k, v, mesh=axes, method="double_ring")
        return cp_mesh.attention(first, k, v, mesh=axis, method="double_ring", inner_ring_size=2)

    results = []
    for call in (attend, torch.compile(attend, backend="aot_eager", fullgraph=True)):
        out = call(q, k, v)
        results.append([out, *torch.autograd.grad(out, (q, k, v), dout)])
    for eager, traced in zip(*results, strict=True):
        problems += [] if torch.equal(eager, traced) else [f"off by {gap(traced, eager)}"]
    return problems


@pytest.mark.full
def test_it_compiles_whole(pool):
    report(pool(4).run(compiled, timeout=120.0))


def disagree(rank: int) -> None:
    q, k, v, _ = make_qkv(1, 4, 2, 6, 4)
    with cp_mesh.check_mode():
        options = {"method": "double_ring", "inner_ring_size": 4 if rank == 1 else 2}
        cp_mesh.attention(q, k, v, mesh=mesh((4,), ("cp",)), seq_len=24, **options)


def test_ranks_that_know_other_hosts_are_told_in_check_mode(pool):
    for raised in pool(4).run_expecting_error(disagree):
        assert raised.type == "RankMismatchError" and "inner_ring_size=4" in raised.message


@pytest.mark.nightly("runs")
def test_two_launchers():
    """Two hosts of two ranks on this machine, each with a torchrun of its own, against one device; and with a bug."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    launch = [sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", "--nproc-per-node", "2"]
    launch += ["--master-addr", "127.0.0.1", "--master-port", str(port)]
    environment = os.environ | {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    script = str(Path(__file__).parent / "two_hosts.py")
    captured: Any = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    launchers = [
        subprocess.Popen([*launch, "--node-rank", str(host), script], env=environment, text=True, **captured)
        for host in range(2)
    ]
    try:
        printed = [launcher.communicate(timeout=240)[0] for launcher in launchers]
    finally:
        for launcher in launchers:
            launcher.kill()
    assert [launcher.returncode for launcher in launchers] == [0, 0], "\n".join(printed)
    for host, text in enumerate(printed):
        assert text.count(f"host {host} of 2: exact") == 2 * 6 and text.count("found a bug") == 2, text
