"""Bugs of plans, of the op and its DTensor rules, of data, loss and styles, and of what is watched."""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

import torch
from inside import inner

from planted.seams import in_area, with_arguments, with_call, with_result

# --- plans
plant = in_area("plans that are kept")


@plant("a plan outlives the content of its mask", "host_tensors:Content.of", "planned once")
def _(of: Any) -> Any:
    known: dict[Any, Any] = {}

    def mutant(cls: Any, tensor: Any) -> Any:
        return known.setdefault((tensor.data_ptr(), tensor.shape, tensor.dtype), of(cls, tensor))

    return mutant


def read_in_part(part: Any) -> Any:
    """Of the keys of plans: made of a part of their tensor."""
    return lambda digest: lambda tensor: digest(part(tensor))


plant("plans are told apart by a sample of their tensors", "host_tensors:_digest", "planned once")(
    read_in_part(lambda tensor: tensor[..., ::3])
)
plant("plans are told apart by the first elements of their tensors", "host_tensors:_digest", "planned once")(
    read_in_part(lambda tensor: tensor[..., :128])
)
plant("plans outlive their batch", "host_tensors:Content.is_gone", "plans of batches")(
    lambda is_gone: lambda self: False
)
plant("layers that make their mask anew plan anew", "host_tensors:Content.__hash__", "plans of batches")(
    lambda _: lambda self: id(self)
)


# --- the op
plant = in_area("the op and DTensors")


def in_string(**others: Any) -> Any:
    """Of `_kept_spec`, which reads what an op carries as a string, or of what made it: these options are others."""
    return lambda parse: with_result(parse, lambda options: options._replace(**others))


PARSE = "spec:_kept_spec"
plant("the scale is lost in the op's string", PARSE, "scores of DTensors")(in_string(scale=1.0))
plant("a gradient of lse is lost in the op's string", PARSE, "scores of DTensors")(in_string(differentiable_lse=False))
plant("a call that should repeat loses that", "spec:make_spec", "deterministic")(in_string(deterministic=False))
plant("results of DTensors lie as their shards do", PARSE, "specs of DTensors")(in_string(as_inputs=True))
plant("dropout of the first heads on every tp rank", PARSE, "scores of DTensors")(in_string(first_head=0))


@plant("sinks and slopes change places among an op's arguments", "spec:Call.read", "scores of DTensors")
def _(read: Any) -> Any:
    def swapped(call: Any) -> Any:
        tensors = call.tensors
        if tensors.sinks is None or tensors.alibi_slopes is None:
            return call
        return call._replace(tensors=tensors._replace(sinks=tensors.alibi_slopes, alibi_slopes=tensors.sinks))

    return with_result(read, swapped)


@plant("DTensors' gradients of sinks pass for those of all ranks", "dtensor:score_placements", "scores of DTensors")
def _(score_placements: Any) -> Any:
    from torch.distributed.tensor import Partial, Replicate

    def whole(placements: Any) -> Any:
        given, gradient = placements
        return given, Replicate() if isinstance(gradient, Partial) else gradient

    return with_result(score_placements, whole)


plant("DTensors of any kind pass for those before", "dtensor:_Checked", "kinds of DTensors")(
    lambda checked: type("Any", (checked,), {"__contains__": lambda self, kind: len(self) > 0})
)
plant("a core may attend to other rows than its root's", "passes:check_length", "rows of the root")(
    lambda check_length: lambda seq_len, expected: None
)


# --- data and loss
plant = in_area("data and loss")


@plant("mean of the loss by rank", "loss:cross_entropy", "loss", "gradients of one rank")
def _(cross_entropy: Any) -> Any:
    import torch.nn.functional as F

    def mutant(logits: Any, labels: Any, mesh: Any, *, ignore_index: int = -100) -> Any:
        return F.cross_entropy(logits.flatten(0, -2), labels.flatten(), ignore_index=ignore_index)

    return mutant


@plant("ignored tokens have a gradient", "token_losses:_TokenLosses.backward", "loss", "chunks of the loss")
def _(backward: Any) -> Any:
    def mutant(ctx: Any, dlosses: Any) -> Any:
        logits, labels, largest, sums = ctx.saved_tensors
        softmax = (logits - largest).exp() / sums * dlosses[:, None]
        dlogits, *others = backward(ctx, dlosses)
        return dlogits.where((labels != ctx.options[0])[:, None], softmax), *others

    return mutant


@plant("the gradient is not scaled after the first chunk", "token_losses:_TokenLosses.backward", "chunks of the loss")
def _(backward: Any) -> Any:
    def mutant(ctx: Any, dlosses: Any) -> Any:
        _chunks = inner("token_losses", "_chunks")

        first = next(iter(_chunks(ctx.saved_tensors[0])))
        scale = torch.ones_like(dlosses)
        scale[first] = dlosses[first]
        return backward(ctx, scale)

    return mutant


plant("rows that do not fill a chunk are left out", "token_losses:_chunks", "chunks of the loss")(
    lambda chunks: with_result(chunks, lambda rows: list(rows)[:-1])
)
plant("padding counts as tokens", "sharded_sequence:PADDING", "gradients of one rank")(
    lambda padding: {**padding, "labels": 0}
)


@plant("the last token is dropped with the padding", "sharded_sequence:ShardedSequence.unshard", "loss")
def _(unshard: Any) -> Any:
    def mutant(self: Any, x: Any, dim: int = 1) -> Any:
        whole = unshard(self, x, dim)
        return whole if self.length is None else whole.narrow(dim, 0, self.length - 1)

    return mutant


@plant("the gradient of a gathered output is that of one rank", "sharded_sequence:_Unshard.backward", "round trip")
def _(backward: Any) -> Any:
    def mutant(ctx: Any, grad: Any) -> Any:
        sequence, rows = ctx.sequence, grad.movedim(ctx.dim, 0)
        own = sequence.layout.positions(ctx.seq_len, sequence.cp_size, sequence.cp_rank)
        return rows[own].movedim(0, ctx.dim), None, None, None

    return mutant


plant("positions count from the shard's start", "sharded_sequence:ShardedSequence.positions", "gradients of one rank")(
    lambda positions: with_result(positions, lambda rows: torch.arange(len(rows), device=rows.device))
)


@plant("labels are sharded in another layout", "sharded_sequence:ShardedSequence.shard", "gradients of one rank")
def _(shard: Any) -> Any:
    def mutant(self: Any, tree: Any, *args: Any, **kwargs: Any) -> Any:
        from cp_mesh import Contiguous, Striped

        if isinstance(tree, dict) and "labels" in tree:
            layout = Striped() if self.layout == Contiguous() else Contiguous()
            return shard(replace(self, layout=layout), tree, *args, **kwargs)
        return shard(self, tree, *args, **kwargs)

    return mutant


@plant("FSDP takes the mean", "parallelize:sum_gradients", "gradients of one rank")
def _(sum_gradients: Any) -> Any:
    def mutant(model: Any) -> None:
        from torch.distributed.fsdp import FSDPModule

        sum_gradients(model)
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.set_gradient_divide_factor(3.0)

    return mutant


plant("padding of a batch is left out of its mask", "batch_mask:batch_mask", "mask of a batch")(
    lambda batch_mask: with_arguments(batch_mask, attention_mask=lambda x: None)
)
plant("positions of a batch are left out of its mask", "batch_mask:batch_mask", "mask of a batch")(
    lambda batch_mask: with_arguments(batch_mask, position_ids=lambda x: None)
)
plant("a batch is not balanced", "sharded_sequence:ShardedSequence.for_batch", "sequences of batches")(
    lambda for_batch: with_arguments(for_batch, mask=lambda mask: None)
)
plant(
    "labels have the layout of the sequence, not of the batch", "sharded_sequence:ShardedSequence.shard", "packed steps"
)(
    lambda shard: (
        lambda self, tree, *given, **named: shard(
            replace(self, layout=inner("layouts", "ZigZag")()) if isinstance(tree, dict) and "labels" in tree else self,
            tree,
            *given,
            **named,
        )
    )
)
plant("labels of another layout are not seen", "cuts:check_output", "labels of batches")(
    lambda check_output: lambda what, output, layout, group: None
)
plant("ranks do not compare layouts", "sharded_model:ShardedModel.compare", "ranks with layouts")(
    lambda compare: lambda self, arguments, layout: compare(self, arguments, inner("layouts", "ZigZag")())
)
plant("one rank's tokens count alone", "loss:_sum_over", "losses in parts")(
    lambda sum_over: lambda mesh, valid, *given: valid
)
plant(
    "the gradient of a sum over ranks is that of one rank", "sharded_sequence:_AllReduce.backward", "losses of routers"
)(lambda backward: lambda ctx, grad: (grad, None))
plant("dropout has one seed in all steps", "sharded_sequence:ShardedSequence.dropout_seed", "seeds of steps")(
    lambda dropout_seed: with_arguments(dropout_seed, step=lambda step: 0)
)
plant("dropout has one seed in all replicas", "sharded_sequence:ShardedSequence.dropout_seed", "seeds of steps")(
    lambda dropout_seed: with_arguments(dropout_seed, replica=lambda replica: 0)
)


@plant("the norm counts what ranks hold alike once for each", "clip_grad:_sharing", "norm on several meshes")
def _(sharing: Any) -> Any:
    def mutant(parameter: Any) -> Any:
        mesh = getattr(parameter, "device_mesh", None)
        return () if mesh is None else tuple(mesh.get_group(i) for i in range(mesh.ndim))

    return mutant


plant("the norm of a shard passes for that of all", "clip_grad:_all_reduce", "norm on several meshes")(
    lambda all_reduce: lambda values, group, norm_type: values
)


@plant("a tile's gradients of weights are dropped", "tiled:_gradients", "tiles")
def _(gradients: Any) -> Any:
    calls = iter(range(1 << 30))

    def mutant(pairs: Any, inputs: Any) -> Any:
        drops = next(calls) % 3 == 1
        found = gradients(pairs, inputs)
        kept = [isinstance(x, torch.nn.Parameter) and drops for x in inputs]
        return [None if dropped else x for x, dropped in zip(found, kept, strict=True)]

    return mutant


@plant("the backward of a tile draws anew", "tile_call:drawing", "dropout of tiles")
def _(drawing: Any) -> Any:
    from contextlib import nullcontext

    return lambda random: nullcontext()  # not the class itself, which much holds: undoing would bind it, too


plant("modules that mix tokens pass", "tile_call:Call.look", "tiles of what mixes tokens")(
    lambda look: lambda self, rows: None
)
plant("copies from and to the host are not waited for", "host_copies:_Stored.leave", "copies to the host")(
    lambda leave: lambda self: setattr(self, "near", None)
)
plant("what nobody took stays on the device", "host_copies:Lane.let_stay", "who is on the device")(
    lambda let_stay: lambda self, *blocks: None
)
plant("hidden states that do not fill a chunk are left out", "token_losses:_logits", "log-probabilities")(
    lambda logits: with_result(logits, lambda chunks: list(chunks)[:-1])
)
plant(
    "the backward of log-probabilities has no temperature", "token_losses:_LinearLosses.backward", "log-probabilities"
)(lambda backward: lambda ctx, dlosses: (*(x if x is None else x / ctx.scale for x in backward(ctx, dlosses)),))
plant("a teacher's logits are not divided by the temperature", "token_losses:_logits", "terms of the loss")(
    lambda logits: (
        lambda scale, *heads: ((rows, own, *(x / scale for x in soft)) for rows, own, *soft in logits(scale, *heads))
    )
)
plant("the backward has no z-loss", "vocab_parallel:add_terms", "terms of the loss", "terms of the loss over tp")(
    lambda add_terms: with_arguments(add_terms, z_loss=lambda z_loss: 0.0)
)
plant("smoothed labels are spread over this rank's tokens", "vocab_parallel:add_terms", "terms of the loss over tp")(
    lambda add_terms: lambda x, largest, sums, size, *terms: add_terms(x, largest, sums, x.shape[1], *terms)
)
plant("the first token of a document counts for the one before", "log_probs:document_sums", "sums of documents")(
    lambda sums: with_arguments(sums, x=lambda x: x.roll(-1, 1))
)


plant("writes to what a checkpoint saved pass", "checkpointed:times_written", "writes in checkpoints")(
    lambda times_written: lambda x: 0
)


@plant("recompute replays the ring", "parallelize:checkpoint_context_fn", "recompute")
def _(context_fn: Any) -> Any:
    from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

    def everything(_ctx: Any, _op: Any, *_args: Any, **_kwargs: Any) -> Any:
        return CheckpointPolicy.PREFER_RECOMPUTE

    return lambda: create_selective_checkpoint_contexts(everything)


# --- styles
plant = in_area("styles")


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
plant("a part's output has the gradients of all losses", "boundaries:GatherOutput.__init__", "parts of models")(
    lambda init: with_arguments(init, gradient=lambda gradient: "sum")
)
plant("a part is gathered in the layout of another batch", "boundaries:_Boundary.of_call", "layouts of parts")(
    lambda of_call: lambda self, *args, **kwargs: self.sequence
)
plant("a core may have another layout than its root", "style_helpers:check_root", "layouts agree")(
    lambda check_root: lambda sequence, layout: None
)
plant("a copy that the module's class makes has no style", "wrap:_like", "copies")(
    lambda like: lambda module, twin: twin
)


@plant("compiled cores do not tell the forward of an instance", "wrap:_subclass", "compiled cores")
def _(subclass: Any) -> Any:
    def mutant(base: Any, key: str) -> Any:
        made, found = subclass(base, key), torch._dynamo.assume_constant_result(lambda self: self._cp_mesh[key])

        def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
            replacement, inner = found(self)  # which torch.compile does not guard
            if inner is None:
                inner = functools.partial(base.forward, self)
            return replacement.run(self, inner, *args, **kwargs)

        made.forward = forward
        return made

    return mutant


# --- watching
plant = in_area("watching")


plant("attention of modules outside of the plan is let through", "coverage:ATTENTION", "outside of the plan")(
    lambda attention: attention - {"multi_head_attention_forward"}
)
plant("compiled blocks are not watched", "coverage:_watched", "outside of the plan, compiled")(
    lambda watched: lambda tokens, module, forward, *args, **kwargs: forward(*args, **kwargs)
)
plant(
    "modes are compiled by themselves",
    "sdpa_mode:keep_uncompiled",
    "what a core asks",
    new_ranks="Dynamo keeps for ever what it was told of a function",
)(lambda keep_uncompiled: lambda *_: None)
plant("a core may checkpoint its attention", "wrap:inside_checkpoint", "checkpoints in cores")(
    lambda inside_checkpoint: lambda: False
)


# --- check mode and verify
plant = in_area("check mode and verify")


plant("tensors are compared by their shapes", "fingerprints:fingerprint", "check mode")(
    lambda fingerprint: lambda tensor: "None" if tensor is None else str(tuple(tensor.shape))
)
plant("only the first of the arguments is compared", "agreement:_require_equal", "check mode")(
    lambda require_equal: with_arguments(require_equal, fields=lambda fields: dict(list(fields.items())[:1]))
)
plant("a rank keeps to itself what it refuses", "agreement:_send", "check mode")(lambda send: lambda group, error: None)
plant("verify passes whatever it measured", "verification.verify:Report.passed", "verify")(
    lambda passed: lambda self: True
)
plant("verify allows what the kernel does on one device", "verification.verify:PLAIN_FACTOR", "verify")(
    lambda factor: 1e9
)
plant("verify_model passes whatever it found", "report:ModelReport.passed", "verify_model")(
    lambda passed: lambda self: True
)
plant("verify_model hears of one rank alone", "verification.step:Ranks.gather", "verify_model")(
    lambda gather: with_result(gather, lambda answers: answers[:1])
)
plant("verify_model leaves out the last parameter", "compare:compare_gradients", "verify_model")(
    lambda compare: with_arguments(compare, want=lambda want: dict(list(want.items())[:-1]))
)
plant("verify_model takes any difference for rounding", "compare:FACTOR", "verify_model")(lambda factor: 1e15)
plant("probes look for what a token does not reach alone", "probes:_judge", "verify_model")(
    lambda judge: with_call(judge, lambda moved, expected: {"moved": moved & expected})
)
