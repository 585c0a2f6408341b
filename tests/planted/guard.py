"""Bugs of what is looked for in the first step: a mistake of the user that passes again."""

from __future__ import annotations

import contextlib
from typing import Any

from inside import inner, room

from planted.seams import in_area, with_arguments, with_result

plant = in_area("the guard")


def nothing(result: Any = None) -> Any:
    """What finds nothing."""
    return lambda original: lambda *args, **kwargs: result


plant("an error of a wait has no note of refusals", "store_messages:left_for", "later refusals")(nothing({}))
plant("first calls are not compared", "agreement:compare", "first calls")(nothing(False))


plant("calls of unlike masks are one", "known:key_of", "known calls")(
    lambda key_of: with_result(key_of, lambda key: key and (*key[:1], 0, *key[2:]))
)
plant("autocast makes no other call", "known:key_of", "known calls")(
    lambda key_of: with_result(key_of, lambda key: key and key[:-1])
)


@plant("known calls are never compared again", "known:run_again", "known calls")
def _(run_again: Any) -> Any:
    calls = room("call.known")._calls

    def mutant(key: Any, *given: Any) -> Any:
        known = calls.get(key)
        if known is not None:
            known.ready.calls.kinds = known.kinds
        return run_again(key, *given)

    return mutant


@plant("known calls read the scores' tensors of the first one", "known:Ready.complete", "scores of known calls")
def _(complete: Any) -> Any:
    first: dict[int, Any] = {}
    return lambda self, q, scored: complete(self, q, first.setdefault(id(self), [x.detach().clone() for x in scored]))


@plant("a call whose plan is new is a first one", "agreement:compare", "lost plans")
def _(compare: Any) -> Any:
    states_of_all, Plans = inner("group_state", "states_of_all"), inner("call.plan", "Plans")
    return with_arguments(compare, kind=lambda kind: kind and (kind, *map(id, states_of_all(Plans))))


plant("labels are not compared with tokens", "labels:_of_others", "labels of other rows")(nothing())
plant("labels of log-probabilities pass", "labels:check_log_probs", "labels of log-probabilities")(nothing())
plant("rows may be sharded once more", "cuts:is_cut", "sharded twice")(nothing(False))
plant("a core takes rows that nobody cut", "cuts:check_rows", "rows of cores")(nothing())
plant("positions may be left out", "sharded_model:ShardedModel._check_inputs", "positions of a root")(nothing())
plant("a mask may reach a style that has its own", "config:check_mask_read", "unread masks")(nothing())
plant("tokens are not compared without a root", "checks.inputs:_check", "whole tokens")(nothing())
plant("the ranks of a loss are not those of its gradients", "gradients:_check_ranks", "ranks of the loss")(nothing())
plant("nobody asks whether gradients were reduced", "gradients:_compare_norms", "gradients that are reduced")(nothing())
plant("nobody asks whose rows over tp a gradient is of", "gradients:_decide_over_tp", "plain parameters over tp")(
    nothing()
)


@plant("a module's window is not read", "config:stated_reach", "windows of modules")
def _(stated_reach: Any) -> Any:
    Reach = inner("config", "Reach")

    return lambda module: Reach(0, 0)


plant(
    "gathered outputs have the sum of the ranks' gradients",
    "sharded_sequence:ShardedSequence.gather",
    "gathered losses",
)(lambda gather: lambda self, x, dim=1: self.unshard(x, dim))


plant("a loss is that of every later model", "gradients:_forget", "models in turn")(nothing())
plant("tokens are not compared in a first call", "cuts:told_of_tokens", "tokens without a root")(nothing({}))
plant("a word that nobody read stays in the store", "store_messages:_take_back", "words in the store")(nothing())
plant("an optimizer in the backward comes after it", "gradients:_check", "gradients of a step")(
    lambda check: lambda *given: check(*given[:-1], False)
)
plant("each of the accumulated losses counts alone", "gradients:_is_averaged", "gradients of a step")(
    lambda is_averaged: lambda losses, num_ranks: any(factor <= 1 for factor in losses.factors)
)
plant("a first call waits longer than its group", "_torch:timeout_of", "patience")(
    lambda timeout_of: lambda *given: 4 * timeout_of(*given)
)


# --- the probe
plant = in_area("the probe")

plant("rows may be as far apart as they like", "training.probe:_too_far", "the probe finds")(nothing(False))
plant("half precision is compared as it is", "widening:_wide", "half precision")(lambda wide: lambda x: x)
plant("the model is given the whole batch", "training.probe:_Probe._cut_tensor", "the probe is silent")(
    lambda cut: lambda self, name, x: x
)
plant("generators are left as the probe's runs leave them", "training.probe:fork_rng", "nothing is left of the probe")(
    lambda fork_rng: lambda devices: contextlib.nullcontext()
)
plant("buffers keep what the probe's runs wrote", "training.probe:_set_buffers", "nothing is left of the probe")(
    nothing()
)
plant("modules stay in eval mode after the probe", "training.probe:_set_modes", "nothing is left of the probe")(
    lambda set_modes: lambda parts, modes: set_modes(parts, [False] * len(parts))
)
plant("a replica leaves the probe alone", "training.probe:_Probe._vote", "skipped by all")(
    lambda vote: lambda self, word: word
)
plant("randomness is taken for a mistake", "training.probe:_Probe._attempt", "what the probe skips")(
    lambda attempt: lambda self, mesh, seed=0: attempt(self, mesh)
)
plant("the guard takes the probe's piece for a batch", "comm.group_state:states_of_all", "the guard after a probe")(
    lambda states_of_all: lambda kind: ()
)
