"""Wait for a functional collective; an error names the data that was waited for, and the ranks.

Only gloo reports an error to the host; NCCL ends the process, and prints the name of the collective.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from cp_mesh._torch import funcol, resolve_group


def wait_for(
    started: Tensor, what: str, group_name: str, peers: Sequence[Sequence[int]] = (), sent: Tensor | None = None
) -> Tensor:
    """Return the result of a functional collective.

    Args:
        started: what the collective returned.
        what: the data, and the name of the function that the user called, for errors.
        group_name: of its group.
        peers: lists of one number per rank of the group, 0 for no data; empty: all ranks take part.
        sent: memory that a partial of this function keeps until the collective has read it.

    Raises:
        RuntimeError: if a rank ended, or did not come within the group's timeout.
    """
    if torch.compiler.is_compiling():
        return funcol.wait_tensor(started)
    try:
        return funcol.wait_tensor(started)
    except RuntimeError as error:
        group = resolve_group(group_name)
        ranks = dist.get_process_group_ranks(group)
        others = [x for i, x in enumerate(ranks) if i != group.rank() and (not peers or any(n[i] for n in peers))]
        raise RuntimeError(
            f"{what} never came: rank {ranks[group.rank()]} waited for ranks {others}, of which one has ended, raised, "
            f"or exceeded the timeout of their group; the first error that a rank printed shows the cause ({error})"
        ) from error
