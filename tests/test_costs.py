"""The model of costs against what was measured, and what it must say by itself."""

from __future__ import annotations

import dataclasses
import sys
from dataclasses import replace
from functools import lru_cache
from pathlib import Path

import pytest
from inside import H200, METHODS, KernelRate, Machine, Schedule, Sizes, make_schedule, staged_costs, ulysses_costs

from cp_mesh import Contiguous, Mask, Striped, ZigZag

sys.path.append(str(Path(__file__).parents[1] / "examples" / "benchmarks"))

import predicted
from inside import inner

PassCost = inner("time", "PassCost")

LAYOUTS = {"zigzag": ZigZag(), "striped": Striped(), "contiguous": Contiguous()}
Costs = tuple[PassCost, PassCost]


@lru_cache
def schedules(layout: str, seq_len: int, cp_size: int, method: str = "ring") -> list[Schedule]:
    make = METHODS[method].make_schedule
    return [make(LAYOUTS[layout], Mask(), seq_len, cp_size, rank, False) for rank in range(cp_size)]


def slowest(layout: str, sizes: Sizes, seq_len: int, cp_size: int, **options: object) -> Costs:
    machine, chunks = options.pop("machine", H200), options.pop("head_chunks", 1)
    ranks = schedules(layout, seq_len, cp_size, **options)
    costs = [staged_costs(schedule, sizes, machine, "fa4", chunks) for schedule in ranks]
    return tuple(max(both, key=lambda cost: cost.device) for both in zip(*costs, strict=True))


def heads(num: int, num_kv: int) -> Sizes:
    return Sizes(1, num, num_kv, 128, 128, 2, 2)


@pytest.mark.parametrize("group", predicted.GROUPS)
def test_device_time_is_what_was_measured(group: str) -> None:
    """Graphs from 1K rows a GPU on, within 15 %; in calls in a row some forwards took longer than in graphs.

    Less near are windows, and Ulysses in a layout that needs no other order.
    """
    apart = {"queued": (0.19, 60), "stages": (0.17, 50), "short_bands": (0.24, 12), "own_contiguous": (0.22, 25)}
    apart["kept"] = (0.27, 35)
    within, least = apart.get(group, (0.15, 14))
    entries = [entry for entry in predicted.passes() if entry.group == group and entry.device_counts]
    for x in entries:
        words = (x.row[name] for name in ("contestant", "mask", "heads_q", "heads_kv", "local_len", "mode"))
        assert abs(x.ratio - 1) <= within, f"{' '.join(words)} {x.column}: {x.ratio:.2f} of {x.measured} ms"
    assert len(entries) >= least


def test_host_time_is_near_what_was_measured() -> None:
    """Machines and runs differ by a half, so the model may too: 2 GPUs, calls in a row of 1K and 4K rows.

    Today's Ulysses is predicted to take the host 1.6 to 2.4 times as long, where the ring does so 1.5 times.
    """
    entries = [x for x in predicted.passes() if x.row["mode"] == "queued" and int(x.row["local_len"]) <= 4096]
    entries = [x for x in entries if x.row["world_size"] == "2" and x.row["contestant"].startswith("cp_mesh")]
    entries = [x for x in entries if x.group != "kept"]
    for x in entries:
        assert 1 / 1.5 <= x.host_ratio <= 1.5, (x.row["contestant"], x.column, x.host_ratio)
    assert len(entries) >= 20


def test_auto_takes_what_was_fastest() -> None:
    """Within 5 %, at all points but two: there all-gather was faster, which on 2 ranks is what the ring is."""
    far = {(x.mask, x.heads, x.rows, x.mode) for x in predicted.points() if x.over_best > 1.05}
    assert far == {("causal", "32/32", 4096, "queued"), ("causal", "32/8", 1024, "queued")}
    assert len(predicted.points()) >= 40
    for layout in LAYOUTS:
        ring, gathered = (schedules(layout, 8192, 2, method)[1] for method in ("ring", "all_gather"))
        assert ring.route.stages == gathered.route.stages


def test_rows_that_arrive_late_are_exposed() -> None:
    """Of 1K rows with 32 kv heads on 4 ranks, rows travel longer than the local tile takes; of 64K rows they do not."""
    short, long = (slowest("zigzag", heads(32, 32), 4 * rows, 4) for rows in (1024, 65536))
    assert 0 < short[0].exposed < short[0].device and 0 < short[1].exposed < short[1].device
    assert long[0].exposed == 0 < long[1].exposed  # the backward has nothing to do before the first rows are there


def test_one_rank_waits_for_nothing() -> None:
    for cost in slowest("contiguous", heads(8, 8), 4096, 1):
        assert cost.exposed == 0 and cost.queued == max(cost.device, cost.host)


def test_all_gather_takes_fewer_stages_of_the_host() -> None:
    ring, gathered = (slowest("zigzag", heads(32, 8), 8 * 4096, 8, method=name) for name in ("ring", "all_gather"))
    assert all(b.host < a.host for a, b in zip(ring, gathered, strict=True))


def test_other_hosts_are_slower() -> None:
    """Of 8 ranks on 2 hosts rows of the other host arrive at the network's rate, and gradients leave at it."""
    far = replace(H200, gpus_per_host=4)
    (near_forward, near_backward), (forward, backward) = (
        slowest("zigzag", heads(32, 8), 8 * 4096, 8, machine=machine) for machine in (H200, far)
    )
    assert near_forward.exposed == 0 < forward.exposed and backward.exposed > 2 * near_backward.exposed
    faster = slowest("zigzag", heads(32, 8), 8 * 4096, 8, machine=replace(far, network_rate=100e9))
    assert faster[0].device < forward.device and faster[1].device < backward.device
    whole = make_schedule(Contiguous(), Mask(), 8 * 4096, 1, 0)
    one, two = (ulysses_costs(whole, 8, 8, heads(32, 8), at_once(machine), "fa4")[0].exposed for machine in (H200, far))
    assert two > 2 * one


def test_ulysses_sends_keys_again_or_keeps_them() -> None:
    whole = make_schedule(Contiguous(), Mask(), 8 * 4096, 1, 0)
    settings = ({"kept": False}, {}, {"plain": True})
    again, kept, plain = (ulysses_costs(whole, 8, 8, heads(32, 8), H200, "fa4", **setting) for setting in settings)
    # 16 pieces are pulled of each buffer, which is packed before, and copied when it is home
    launches = [(1 + 16) + (1 + 16 + 1), (1 + 16) + (1 + 16 + 3)]
    latency = 4 * 3 * H200.per_barrier - 4 * H200.per_launch  # the benchmark has 4 launches and no barriers
    for cost, count, other in zip(kept, launches, plain, strict=True):
        assert cost.exposed == pytest.approx(other.exposed + count * H200.per_launch + latency)
    # lse comes home too, and goes back, to be told apart; q, k, v and out go once more
    assert again[0].exposed == pytest.approx(kept[0].exposed + 18 * H200.per_launch)
    more = 8 * 4096 * 10 * 128 * 2 / H200.exchange_rate  # of 4, 1, 1 and 4 heads a rank, of all rows
    assert again[1].exposed == pytest.approx(kept[1].exposed + more + 18 * H200.per_launch)
    # 2 kv heads on 8 ranks: each is sent to four, as many bytes as of 8. They are repeated before; dk and dv in fp32,
    # which are summed after, are packed one by one, and pulled beside dq
    repeated = ulysses_costs(whole, 8, 8, heads(32, 2), H200, "fa4")
    assert repeated[0].exposed == pytest.approx(again[0].exposed + 2 * H200.per_launch)
    assert repeated[1].exposed == pytest.approx(again[1].exposed + (2 + 2 + 16 + 4) * H200.per_launch)


@pytest.mark.parametrize(("pieces", "fewer"), ((1, (16, 16)), (0, (15, 14))))
def test_rows_of_one_piece_are_pulled_at_once(pieces: int, fewer: tuple[int, int]) -> None:
    """8 copies a buffer in place of 16; of many pieces one more puts rows in order, but out, which is packed so."""
    whole = make_schedule(Contiguous(), Mask(), 8 * 4096, 1, 0)
    two, other = (ulysses_costs(whole, 8, 8, heads(32, 8), H200, "fa4", pieces=n) for n in (2, pieces))
    saved = [(a.device - b.device) / H200.per_launch for a, b in zip(two, other, strict=True)]
    assert saved == pytest.approx(fewer)
    moved = ulysses_costs(whole, 8, 8, heads(32, 8), H200, "fa4", pieces=1, collective=True)
    assert [(a.device - b.device) / H200.per_launch for a, b in zip(other, moved, strict=True)] == pytest.approx(
        (14 + (pieces == 0), 14 + 2 * (pieces == 0))
    )


def test_a_chunk_of_heads_is_a_pass() -> None:
    whole, half = (slowest("zigzag", heads(32, 8), 8 * 4096, 8, head_chunks=n) for n in (1, 2))
    of_half = slowest("zigzag", heads(16, 4), 8 * 4096, 8)
    ulysses = make_schedule(Contiguous(), Mask(), 8 * 4096, 1, 0)
    whole += ulysses_costs(ulysses, 4, 4, heads(32, 8), H200, "fa4")
    half += ulysses_costs(ulysses, 4, 4, heads(32, 8), H200, "fa4", head_chunks=2)
    of_half += ulysses_costs(ulysses, 4, 4, heads(16, 4), H200, "fa4")
    for a, b, c in zip(whole, half, of_half, strict=True):
        assert (b.device, b.exposed, b.host) == (2 * c.device, 2 * c.exposed, 2 * c.host)
        assert b.device > a.device and b.host == 2 * a.host


@pytest.mark.parametrize(("cp_size", "rounds"), ((2, 1), (4, 2), (8, 3)))
def test_barriers_take_longer_of_more_ranks(cp_size: int, rounds: int) -> None:
    """Two around what is published, one more when gradients have arrived."""
    schedule, more = make_schedule(ZigZag(), Mask(), cp_size * 4096, cp_size, 0), replace(H200, per_barrier=1.0)
    costs, slower = (staged_costs(schedule, heads(32, 8), machine, "fa4") for machine in (H200, more))
    added = [b.device - a.device for a, b in zip(costs, slower, strict=True)]
    assert added == pytest.approx([2 * rounds, 3 * rounds], rel=1e-4)


def at_once(machine: Machine) -> Machine:
    return replace(machine, per_launch=0.0, per_barrier=0.0)


def test_a_hybrid_is_its_exchanges_and_its_ring() -> None:
    """With the links of its hosts; of all ranks it is Ulysses, and of one the ring."""
    ring = make_schedule(ZigZag(), Mask(), 8 * 4096, 4, 0)
    of_rank, machine = heads(16, 4), at_once(replace(H200, gpus_per_host=4))
    hybrid = ulysses_costs(ring, 2, 8, heads(32, 8), machine, "fa4")
    alone = staged_costs(ring, of_rank, replace(machine, gpus_per_host=2), "fa4")
    whole = ulysses_costs(make_schedule(Contiguous(), Mask(), 8 * 4096, 1, 0), 8, 8, heads(32, 8), H200, "fa4")
    bytes_of = 8 * 4096 * 128 * 2 / 8  # of one head of a rank's rows
    moved = [bytes_of * n / H200.exchange_rate for n in (2 * 32 + 2 * 8, 2 * 32 + 2 * 8)]
    for cost, of_ring, more, host in zip(hybrid, alone, moved, (H200.host_forward, H200.host_backward), strict=True):
        assert cost.device == pytest.approx(of_ring.device + more) and cost.exposed >= more
        assert cost.host == of_ring.host + 2 * host.per_exchange
    assert whole[0].exposed > moved[0]  # as many bytes, and launches
    far = ulysses_costs(ring, 2, 8, heads(32, 8), replace(machine, gpus_per_host=1), "fa4")
    assert far[0].exposed > 1.5 * hybrid[0].exposed  # half of each exchange is over the network, and all of the ring


@pytest.mark.parametrize("mask", (Mask(causal=False), Mask(), Mask(window=(6000, 0))), ids=str)
def test_the_double_ring_on_one_host_is_the_ring(mask: Mask) -> None:
    for degree in (1, 8):
        for rank in (0, 5):
            made = METHODS["double_ring"].make_schedule(ZigZag(), mask, 8 * 4096, 8, rank, degree=degree)
            ring = make_schedule(ZigZag(), mask, 8 * 4096, 8, rank)
            assert staged_costs(made, heads(32, 8), H200, "fa4") == staged_costs(ring, heads(32, 8), H200, "fa4")


def test_the_network_moves_less_in_the_double_ring() -> None:
    """Where it alone counts: of a full mask, n times less to a rank, n the ranks of a host; sums go home in fp32."""
    at_no_time = KernelRate(1e20, 0.0, 0.0, 0.0, 0.0)
    slow = at_once(replace(H200, gpus_per_host=4, network_rate=1e6, kernels={"fa4": (at_no_time, at_no_time)}))
    given = ZigZag(), Mask(causal=False), 16 * 256, 16
    ring, double = (
        staged_costs(METHODS[name].make_schedule(*given, 5, **options), heads(32, 8), slow, "fa4")
        for name, options in (("ring", {}), ("double_ring", {"degree": 4}))
    )
    row = 2 * 8 * 128 / 1e6
    assert ring[0].exposed == pytest.approx(12 * 256 * row * 2, rel=1e-3)
    assert double[0].exposed == pytest.approx(3 * 256 * row * 2, rel=1e-3)
    # gradients leave while keys come, but for those of the last stage; and sums, once the first host's keys are here
    assert ring[1].exposed == pytest.approx((12 + 4) * 256 * row * 2, rel=1e-3)
    assert double[1].exposed == pytest.approx(256 * row * 2 + 3 * 256 * row * 4, rel=1e-3)


def test_gradients_that_cross_wait_for_those_of_the_host() -> None:
    """A slower link within the host makes the double ring wait for it at the end of a host, the ring at its own end."""
    slow = at_once(replace(H200, gpus_per_host=4, link_rate=1e9))
    made = METHODS["double_ring"].make_schedule(ZigZag(), Mask(), 8 * 4096, 8, 5, degree=4)
    once, twice = (
        staged_costs(made, heads(32, 8), replace(slow, link_rate=rate), "fa4")[1].exposed for rate in (2e9, 1e9)
    )
    assert twice > 1.8 * once > 0


def fields(thing: object) -> list[str]:
    return [field.name for field in dataclasses.fields(thing) if isinstance(getattr(thing, field.name), float)]


def total(machine: Machine) -> float:
    """Of both passes, device and host: causal on 2 hosts, a window on one, Ulysses on one."""
    far, near = replace(machine, gpus_per_host=4), replace(machine, gpus_per_host=8)
    costs: list[PassCost] = []
    for of, mask in ((far, Mask()), (near, Mask(window=(2000, 0)))):
        costs += staged_costs(make_schedule(ZigZag(), mask, 8 * 1024, 8, 0), heads(32, 8), of, "fa4")
    costs += ulysses_costs(make_schedule(Contiguous(), Mask(), 8 * 1024, 1, 0), 8, 8, heads(32, 8), near, "fa4")
    return sum(cost.device + cost.host for cost in costs)


@pytest.mark.parametrize("name", fields(H200))
def test_every_number_of_a_machine_counts(name: str) -> None:
    assert total(replace(H200, **{name: 2 * getattr(H200, name)})) != total(H200)


@pytest.mark.parametrize("name", fields(H200.host_forward))
@pytest.mark.parametrize("of", ("host_forward", "host_backward"))
def test_every_number_of_the_host_counts(name: str, of: str) -> None:
    time = getattr(H200, of)
    assert total(replace(H200, **{of: replace(time, **{name: 2 * getattr(time, name)})})) > total(H200)


@pytest.mark.parametrize("name", fields(H200.kernels["fa4"][0]))
@pytest.mark.parametrize("which", (0, 1))
def test_every_number_of_a_kernel_counts(name: str, which: int) -> None:
    rates = list(H200.kernels["fa4"])
    rates[which] = replace(rates[which], **{name: 2 * getattr(rates[which], name) + 1e-9})
    assert total(replace(H200, kernels={"fa4": tuple(rates)})) != total(H200)
