"""Bugs in the choice of a method, and in predicted memory."""

from __future__ import annotations

import torch.distributed as dist

from planted.seams import in_area, with_arguments, with_result

plant = in_area("the choice of a method")

plant("each rank counts other ranks", "choose:choose", "one choice")(
    lambda choose: with_arguments(choose, cp_size=lambda size: size - dist.get_rank())
)
plant("rows are those that a rank holds", "choose:choose", "the rule")(
    lambda choose: lambda q, k, *given, seq_len, **named: choose(q, k, *given, seq_len=8 * q.shape[2], **named)
)
plant("hosts that nobody tells are one", "choose:ranks_by_host", "hosts")(
    lambda count: with_result(count, lambda hosts: hosts or [1])
)
plant("rows that were fetched are held nowhere", "memory:_held_keys", "allocations")(
    lambda keys: with_result(keys, lambda found: [0] * len(found))
)


plant("groups within a group keep their memory", "symmetric_memory:release", "release")(
    lambda release: lambda group, within=(): release(group)
)
