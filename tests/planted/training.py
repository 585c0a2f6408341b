"""Bugs of plans that are kept, of the op, of data, loss and layouts by batch, and of what ranks compare."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from inside import inner, room
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import Partial, Replicate

from planted.seams import in_area, with_arguments, with_result

# --- bound passes
plant = in_area("bound passes")


@plant("a plan outlives the content of its mask", "host_tensors:Content.of", "planned once")
def _(of: Any) -> Any:
    known: dict[Any, Any] = {}

    def mutant(cls: Any, tensor: Any) -> Any:
        return known.setdefault((tensor.data_ptr(), tensor.shape, tensor.dtype), of(cls, tensor))

    return mutant


plant("plans are told apart by a sample of their tensors", "host_tensors:_digest", "planned once")(
    lambda digest: lambda tensor: digest(tensor[..., ::3])
)
plant("plans outlive their batch", "host_tensors:Content.is_gone", "plans of batches")(
    lambda is_gone: lambda self: False
)
plant("calls of unlike masks are one", "known:key_of", "known calls")(
    lambda key_of: with_result(key_of, lambda key: key and (*key[:1], 0, *key[2:]))
)


@plant("known calls are never compared again", "known:run_again", "known calls")
def _(run_again: Any) -> Any:
    def mutant(key: Any, *given: Any) -> Any:
        known = room("call.known")._calls.get(key)
        if known is not None:
            known.ready.calls.kinds = known.kinds
        return run_again(key, *given)

    return mutant


@plant("known calls read the scores' tensors of the first one", "known:Ready.complete", "scores of known calls")
def _(complete: Any) -> Any:
    first: dict[int, Any] = {}
    return lambda self, q, scored: complete(self, q, first.setdefault(id(self), [x.detach().clone() for x in scored]))


plant("the scale is lost in the op's string", "spec:_cached_spec", "scores of DTensors")(
    lambda parse: with_result(parse, lambda options: options._replace(scale=1.0))
)


@plant("DTensors' gradients of sinks pass for those of all ranks", "dtensor:score_placements", "scores of DTensors")
def _(score_placements: Any) -> Any:
    def whole(placements: Any) -> Any:
        given, gradient = placements
        return given, Replicate() if isinstance(gradient, Partial) else gradient

    return with_result(score_placements, whole)


# --- data and loss
plant = in_area("data and loss")


@plant("mean of the loss by rank", "loss:cross_entropy", "loss", "gradients of one rank")
def _(cross_entropy: Any) -> Any:
    def mutant(logits: Any, labels: Any, mesh: Any, *, ignore_index: int = -100) -> Any:
        return F.cross_entropy(logits.flatten(0, -2), labels.flatten(), ignore_index=ignore_index)

    return mutant


plant("positions count from the shard's start", "sharded_sequence:ShardedSequence.positions", "gradients of one rank")(
    lambda positions: with_result(positions, lambda rows: torch.arange(len(rows), device=rows.device))
)


@plant("FSDP takes the mean", "parallelize:sum_gradients", "gradients of one rank")
def _(sum_gradients: Any) -> Any:
    def mutant(model: Any) -> None:
        sum_gradients(model)
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.set_gradient_divide_factor(3.0)

    return mutant


plant("one rank's tokens count alone", "loss:_sum_over", "losses in parts")(
    lambda sum_over: lambda mesh, valid, *given: valid
)
plant("labels are not compared with tokens", "labels:_of_others", "labels of other rows")(
    lambda of_others: lambda *given: None
)


# --- layouts by batch
plant = in_area("layouts by batch")


@plant(
    "labels have the layout of the sequence, not of the batch", "sharded_sequence:ShardedSequence.shard", "packed steps"
)
def _(shard: Any) -> Any:
    def mutant(self: Any, tree: Any, *given: Any, **named: Any) -> Any:
        if isinstance(tree, dict) and "labels" in tree:
            self = replace(self, layout=inner("layouts", "ZigZag")())
        return shard(self, tree, *given, **named)

    return mutant


plant("labels of another layout are not seen", "cuts:check_output", "labels of batches")(
    lambda check_output: lambda what, output, layout, group: None
)
plant("ranks do not compare layouts", "sharded_model:ShardedModel.compare", "ranks with layouts")(
    lambda compare: lambda self, arguments, layout: compare(self, arguments, inner("layouts", "ZigZag")())
)


@plant("positions in the layout of another batch", "sharded_model:ShardedModel.shard_inputs", "changing layouts")
def _(shard_inputs: Any) -> Any:
    def mutant(self: Any, arguments: Any) -> Any:
        root, given = shard_inputs(self, arguments)
        if self.positions is not None and arguments.get(self.positions) is None:
            given[self.positions] = self.sequence.positions(root.seq_len)
        return root, given

    return mutant


plant("an output gathered in the layout of another batch", "sharded_model:ShardedModel.gather", "changing layouts")(
    lambda gather: lambda self, sequence, output: gather(self, self.sequence, output)
)


# --- what ranks compare
plant = in_area("what ranks compare")


plant("tensors are compared by their shapes", "fingerprints:fingerprint", "check mode")(
    lambda fingerprint: lambda tensor: "None" if tensor is None else str(tuple(tensor.shape))
)
plant("only the first of the arguments is compared", "agreement:_require_equal", "check mode")(
    lambda require_equal: with_arguments(require_equal, fields=lambda fields: dict(list(fields.items())[:1]))
)
plant("first calls are not compared", "agreement:compare", "first calls")(lambda compare: lambda *given: False)
plant("verify passes whatever it measured", "verification.verify:Report.passed", "verify")(
    lambda passed: lambda self: True
)
plant("verify_model leaves out the last parameter", "compare:compare_gradients", "verify_model")(
    lambda compare: with_arguments(compare, want=lambda want: dict(list(want.items())[:-1]))
)
plant("rows may be as far apart as they like", "training.probe:_too_far", "the probe finds")(
    lambda too_far: lambda *given: False
)
