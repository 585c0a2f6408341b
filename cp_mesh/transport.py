"""Transport: moves rows of K and V to the ranks that need them, and their gradients back to the owner.

Addressed by owner, not by neighbour. In step i every rank fetches rows straight from rank ``r - i`` and serves rank
``r + i``, instead of passing on what its neighbour passed to it: the volume is that of a rotation at most, but only the
rows that the receiver's mask needs travel, steps that nobody needs are skipped, and no hop waits for the one before.
A gradient goes to its owner in one hop and is summed there in fp32, in step order, so results do not depend on timing.

Everything here is the portable route over functional collectives (gloo, NCCL across hosts): one all-to-all a hop, in
which each rank names one destination and one source. The collective is asynchronous until `wait`.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from cp_mesh.schedule import Rows, Schedule, num_rows

_funcol = torch.ops._c10d_functional


def gather_rows(x: Tensor, ranges: Sequence[Rows]) -> Tensor:
    """Rows of dim 2, range after range: [B, K, num_rows, D]; a view where one range suffices."""
    parts = [x[:, :, begin:end] for begin, end in ranges]
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=2)


class Hop:
    """Two tensors under way from one rank. `wait` returns them once; None if nothing is received."""

    def __init__(self, received: Tensor, sent: Tensor, shapes: tuple[torch.Size, torch.Size]) -> None:
        self._received, self._shapes = received, shapes
        self._sent = sent  # kept until the collective has read it

    def wait(self) -> tuple[Tensor, Tensor] | None:
        flat = _funcol.wait_tensor(self._received)
        del self._sent
        first, second = self._shapes
        if flat.numel() == 0:
            return None
        a, b = flat.split([first.numel(), second.numel()])
        return a.view(first), b.view(second)


class FunctionalTransport:
    """Hops of one call over functional collectives.

    Args:
        group: the cp group.
        schedule: this rank's schedule.
    """

    def __init__(self, group: dist.ProcessGroup, schedule: Schedule) -> None:
        self._group_name, self._schedule = group.group_name, schedule

    def fetch(self, step: int, k: Tensor, v: Tensor) -> Hop:
        """Start moving the rows of K and V that ``step`` needs: this rank's to the receiver, the source's here."""
        schedule = self._schedule
        source, receiver = schedule.source(step), schedule.receiver(step)
        sent = [gather_rows(x, schedule.serve[receiver]) for x in (k, v)] if schedule.serve[receiver] else []
        return self._exchange(sent, to=receiver, origin=source, like=(k, v), num_rows=num_rows(schedule.fetch[source]))

    def deliver(self, step: int, dk: Tensor | None, dv: Tensor | None, like: tuple[Tensor, Tensor]) -> Hop:
        """Start moving gradients of the rows fetched in ``step`` to their owner; receives those of this rank's rows."""
        schedule = self._schedule
        source, receiver = schedule.source(step), schedule.receiver(step)
        sent = [x for x in (dk, dv) if x is not None]
        return self._exchange(sent, to=source, origin=receiver, like=like, num_rows=num_rows(schedule.serve[receiver]))

    def _exchange(self, sent: list[Tensor], to: int, origin: int, like: tuple[Tensor, Tensor], num_rows: int) -> Hop:
        size = self._schedule.cp_size
        shapes = tuple(torch.Size((*x.shape[:2], num_rows, x.shape[3])) for x in like)
        flat = torch.cat([x.reshape(-1) for x in sent]) if sent else like[0].new_empty(0)
        sent_sizes, received_sizes = [0] * size, [0] * size
        sent_sizes[to] = flat.numel()
        received_sizes[origin] = sum(shape.numel() for shape in shapes)
        received = _funcol.all_to_all_single(flat, received_sizes, sent_sizes, self._group_name)
        return Hop(received, flat, (shapes[0], shapes[1]))
