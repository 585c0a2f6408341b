"""The plan of relays: rows that several ranks of a host need travel to it once, and all of these ranks read them there.

The partner of a rank on another host is the rank with the same place. All rows of rank (g, j) that any rank of host h
needs travel to its partner (h, j), which keeps them in a buffer for the ranks of its host, like its own rows. Gradients
of these rows return the same way: (h, j) sums the gradients of the ranks of its host, and (g, j) gets the sum.

From the blocks of all ranks of its host a rank computes where rows lie in their buffers; integers only.

On hosts of n ranks, rank r is ``host * n + place``. It visits host after host, its own first: step i works on the keys
of host ``(host - i // n) mod hosts``, place ``(place - i mod n) mod n``. With one host that is the ring's step.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from cp_mesh.geometry.block_table import K_END, RECEIVER, SOURCE, Array, K, unions
from cp_mesh.geometry.layouts import Layout
from cp_mesh.geometry.mask import NONE, Mask
from cp_mesh.geometry.schedule import (
    Around,
    Fetch,
    Grouping,
    Ranges,
    Route,
    Schedule,
    Stage,
    by_rank,
    in_rising_stages,
    make_schedule,
    num_rows,
)
from cp_mesh.geometry.survey import Geometry, Seen, geometry


@dataclass(frozen=True)
class HostAfterHost(Around):
    """Visits the ranks of a host one after the other, before those of the next host."""

    host_size: int

    def active(self, needed: Array) -> tuple[int, ...]:
        host_size, hosts = self.host_size, np.arange(len(needed) // self.host_size)
        moves = (needed > 0).reshape(len(hosts), host_size, len(hosts), host_size)
        found = []
        for away in hosts.tolist():
            receiver, source = np.nonzero(moves[hosts, :, (hosts - away) % len(hosts), :].any(0))
            found += [away * host_size + place for place in np.unique((receiver - source) % host_size).tolist()]
        return tuple(found)

    def peer(self, rank: Any, sign: int, step: Any, cp_size: int) -> Any:
        hosts, places = step // self.host_size, step % self.host_size
        host, place = rank // self.host_size + sign * hosts, rank % self.host_size + sign * places
        return host % (cp_size // self.host_size) * self.host_size + place % self.host_size


def step_of(receiver: Array, source: Array, cp_size: int, host_size: int) -> Array:
    """Return the step in which receivers visit sources."""
    hosts = (receiver // host_size - source // host_size) % (cp_size // host_size)
    return hosts * host_size + (receiver - source) % host_size


@dataclass(frozen=True, eq=False)
class Visit:
    """The stages that work on the keys of one host, with the row movement within this rank's host.

    Each rank holds a buffer that the others read. When its own host is visited, it holds the rank's own rows. For
    another host it holds the partner's rows that some rank of this host fetches; they travel between the hosts once.

    Attributes:
        crossing: rows that this rank receives from its partner on that host, and sends to its partner on the host that
            visits this one; its ranks are numbers of hosts. None for the own host.
        route: the stages that move rows within this host; its ranks are places, and its rows are rows of the buffers.
        own: the rows of this rank's buffer that it reads itself, as a separate stage; None if no rank does.
        shared: the rows for which this rank's buffer collects gradients, in the owner's local indices.
        num_rows: of the buffer.
    """

    crossing: Stage | None
    route: Route
    own: Stage | None
    shared: Ranges
    num_rows: int


@dataclass(frozen=True, eq=False)
class RelayedRoute(Route):
    """The rows of a pass over several hosts: the stages as tiles read them, and how their rows arrive.

    Attributes:
        visits: in order, this rank's host first.
        host_size: ranks of a host.
    """

    visits: tuple[Visit, ...]
    host_size: int


def by_hosts(host_size: int) -> Grouping:
    """Group steps host by host; for another host the step with the partner comes first, which moves no rows inside.

    It hides the first fetch from other ranks of this host, which can begin when the rows have arrived at the host.
    """

    def groups(active: tuple[int, ...]) -> list[tuple[int, ...]]:
        found: list[tuple[int, ...]] = []
        for host in sorted({step // host_size for step in active}):
            steps = tuple(step for step in active if step // host_size == host)
            found += [(step,) for step in steps if step % host_size == 0]
            found += in_rising_stages(tuple(step for step in steps if step % host_size))
        return found

    return groups


def make_relayed_schedule(
    layout: Layout, mask: Mask, seq_len: int, cp_size: int, cp_rank: int, segments: bool, host_size: int,
    sources: Seen | None = None,
) -> Schedule:  # fmt: skip
    """Return the schedule of one rank, whose rows arrive by `Visit`; see `make_schedule`."""
    in_order = by_hosts(host_size), HostAfterHost(host_size)
    schedule = make_schedule(layout, mask, seq_len, cp_size, cp_rank, segments, *in_order, sources)
    visits = _visits(schedule, geometry(layout, mask, seq_len, cp_size, segments, sources), host_size)
    return replace(schedule, route=RelayedRoute(schedule.route.stages, schedule.route.needed, visits, host_size))


def _visits(schedule: Schedule, found: Geometry, host_size: int) -> tuple[Visit, ...]:
    size, route = schedule.cp_size, schedule.route
    hosts = size // host_size
    host, place = divmod(schedule.cp_rank, host_size)
    crossing, lying = _buffers(found, host, host_size, size)
    asked = found.of_source(schedule.cp_rank)
    leaving = by_rank(unions(asked[:, RECEIVER] // host_size, asked[:, K], asked[:, K_END]), hosts)
    visits = []
    for away in range(hosts):
        other, to = (host - away) % hosts, (host + away) % hosts
        stages = [_within(stage, place, other, host_size, lying) for stage in _of_host(route.stages, away, host_size)]
        if away and not stages:
            continue
        shared = crossing[other * host_size + place]
        of_hosts = slice(host * host_size, (host + 1) * host_size), slice(other * host_size, (other + 1) * host_size)
        needed = route.needed[of_hosts].copy()
        np.fill_diagonal(needed, 0)
        own = stages[0] if away and stages[0].steps == (0,) else None
        crosses = Stage((away,), _part(other, shared), _part(to, leaving[to]), ()) if away else None
        rows = num_rows(shared) if away else schedule.shard_lens[schedule.cp_rank]
        visits.append(Visit(crosses, Route(tuple(stages[own is not None :]), needed), own, shared, rows))
    return tuple(visits)


def _of_host(stages: tuple[Stage, ...], away: int, host_size: int) -> list[Stage]:
    return [stage for stage in stages if stage.steps[0] // host_size == away]


def _buffers(found: Geometry, host: int, host_size: int, size: int) -> tuple[list[Ranges], list[list[Ranges]]]:
    """Return which rows the ranks of a host need from each other rank, and where they lie in the buffers of that host.

    Returns:
        By source, its rows that some other rank of the host needs. By place and source, the rows that the rank with
        that place needs, counted in the buffer of the source's partner (on its own host: in the source's own rows).
    """
    tables = [np.concatenate(found.of_receiver(host * host_size + place)) for place in range(host_size)]
    every = np.concatenate(tables)
    receiver = np.repeat(np.arange(host_size), [len(table) for table in tables])
    others = every[:, SOURCE] != host * host_size + receiver
    every, receiver = every[others], receiver[others]
    source, begin, end = crossing = unions(every[:, SOURCE], every[:, K], every[:, K_END])
    before = np.cumsum(end - begin) - (end - begin)
    first = np.searchsorted(source, source)
    moved = np.where(source // host_size == host, 0, before - before[first] - begin)
    needs, k, k_end = unions(receiver * size + every[:, SOURCE], every[:, K], every[:, K_END])
    which = np.searchsorted(source * NONE + begin, needs % size * NONE + k, side="right") - 1
    lying = by_rank((needs, k + moved[which], k_end + moved[which]), host_size * size)
    return by_rank(crossing, size), [lying[place * size : (place + 1) * size] for place in range(host_size)]


def _within(stage: Stage, place: int, other: int, host_size: int, lying: list[list[Ranges]]) -> Stage:
    """Return the stage by which the ranks of this host, named by place, move its rows."""
    steps = tuple(step % host_size for step in stage.steps)
    sources, receivers = (sorted((place + sign * step) % host_size for step in steps) for sign in (-1, 1))
    fetch = [_part(source, lying[place][other * host_size + source]) for source in sources]
    serve = [_part(receiver, lying[receiver][other * host_size + place]) for receiver in receivers]
    return Stage(steps, sum(fetch, ()), sum(serve, ()), ())


def _part(rank: int, ranges: Ranges) -> Fetch:
    return ((rank, ranges),) if ranges else ()
