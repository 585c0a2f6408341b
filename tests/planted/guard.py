"""Bugs of what is looked for in the first step: a mistake of the user that passes again."""

from __future__ import annotations

from typing import Any

from planted.seams import in_area

plant = in_area("the guard")


def nothing(result: Any = None) -> Any:
    """What finds nothing."""
    return lambda original: lambda *args, **kwargs: result


plant("first calls are not compared", "agreement:is_first", "first calls")(nothing(False))
plant("labels are not compared with tokens", "seen:_unlike_tokens", "labels of other rows")(nothing())
plant("what shard returns has no mark", "seen:marked", "sharded twice")(nothing())
plant("positions may be left out", "root:ShardedModel._check_positions", "positions of a root")(nothing())
plant("variables of a loop are not compared", "guard.stated:check_variables", "variables of a loop")(nothing())
plant("a mask may reach a style that has its own", "guard.stated:check_mask_read", "unread masks")(nothing())
plant("tokens are not compared without a root", "guard.rootless:_check", "whole tokens")(nothing())
plant("the ranks of a loss are not those of its gradients", "guard.reductions:_check_ranks", "ranks of the loss")(
    nothing()
)
plant("nobody asks whether gradients were reduced", "guard.reductions:_check_equal", "gradients that are reduced")(
    nothing()
)


@plant("a module's window is not read", "guard.stated:stated_reach", "windows of modules")
def _(stated_reach: Any) -> Any:
    from cp_mesh.guard.stated import Reach

    return lambda module: Reach(0, 0)


@plant("gathered outputs have the sum of the ranks' gradients", "sequence:ShardedSequence.gather", "gathered losses")
def _(gather: Any) -> Any:
    return lambda self, x, dim=1: self.unshard(x, dim)
