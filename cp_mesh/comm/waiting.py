"""Waiting for a functional collective, so that an error of it says what was waited for, and for which ranks.

An error comes to the host over gloo alone; NCCL's ends the process, with the name of the collective.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from cp_mesh._torch import funcol, resolve_group


def wait_for(started: Tensor, what: str, group_name: str, peers: Sequence[Sequence[int]] = ()) -> Tensor:
    """The result of a functional collective.

    Args:
        started: what the collective returned.
        what: the rank waits for, with the name of the function that the user called.
        group_name: of its group.
        peers: for each rank of the group what it takes part in, 0 for nothing, list after list; none: all do.

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
            f"{what} never came: rank {ranks[group.rank()]} waited for ranks {others}, of which one ended, raised, or "
            f"came later than the timeout of their group; the rank that printed an error first tells why ({error})"
        ) from error
