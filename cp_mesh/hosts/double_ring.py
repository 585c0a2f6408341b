"""The double ring, Gu et al. 2024 (LoongTrain, arXiv:2406.18485): a ring within each host, and one between hosts.

A rank visits the ranks of its own host, then those of the host before, and so on. Rows of another host travel to this
host once, between ranks with the same place, however many ranks of the host need them; the ranks of the host read them
there over its own links. Gradients are summed at that place and go back once. So the network moves the rows that the
hosts need, not those that each rank needs, while the links of the host move the rest. Tiles and masks are those of the
ring, and so are the stages with one host, or with one rank per host.
"""

from __future__ import annotations

import torch.distributed as dist

from cp_mesh.call.method import Plan
from cp_mesh.call.ring_loop import RING
from cp_mesh.call.spec import AttentionSpec, Operand
from cp_mesh.comm.contract import Transport
from cp_mesh.comm.exchange import FunctionalTransport, choose_transport, make_transport
from cp_mesh.comm.groups import parts_of
from cp_mesh.errors import UnsupportedError, refuse
from cp_mesh.geometry.layouts import Layout
from cp_mesh.geometry.mask import Mask
from cp_mesh.geometry.schedule import Schedule
from cp_mesh.geometry.survey import Seen
from cp_mesh.hosts.relay_plan import RelayedRoute, make_relayed_schedule
from cp_mesh.hosts.relayed import RelayedTransport
from cp_mesh.kernels.combine import copy_together


def choose_degree(options: AttentionSpec, q: Operand, k: Operand, cp_size: int) -> int:
    """Return the number of ranks on a host; see `Method.choose_degree`."""
    wanted = options.inner_ring_size
    if cp_size % wanted:
        near = max(n for n in range(1, min(wanted, cp_size) + 1) if cp_size % n == 0)
        expected = f"a divisor of the {cp_size} cp ranks"
        refuse("inner_ring_size", expected, wanted, f"inner_ring_size={near} works, or method='ring'")
    if options.transport == "symmetric_memory" and wanted < cp_size:  # not all hosts may have it
        expected, hint = (
            "auto or functional, on several hosts",
            "transport='auto' uses it within each host that has it",
        )
        refuse("method='double_ring': transport", expected, repr(options.transport), hint, UnsupportedError)
    return wanted


def make_schedule(
    layout: Layout, mask: Mask, seq_len: int, cp_size: int, cp_rank: int, segments: bool = False, *, degree: int,
    sources: Seen | None = None,
) -> Schedule:  # fmt: skip
    """See `Method.make_schedule`; ``degree``: number of ranks on a host."""
    given = layout, mask, seq_len, cp_size, cp_rank, segments
    if degree in (1, cp_size):
        return RING.make_schedule(*given, sources=sources)
    return make_relayed_schedule(*given, degree, sources)


def open_transport(plan: Plan, group: dist.ProcessGroup) -> Transport:
    """See `Method.open_transport`."""
    route = plan.schedule.route
    outer, inner = parts_of(group, route.host_size) if isinstance(route, RelayedRoute) else (group, group)
    chosen = choose_transport(plan.options.transport, inner, plan.device)
    within = make_transport(chosen, inner, plan.schedule, plan.device, copy_together)
    return RelayedTransport(FunctionalTransport(outer, copy_together), within) if outer is not inner else within
