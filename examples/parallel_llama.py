"""The plans that parallelize a plain Llama over a mesh, in the order in which they are applied."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
from llama import Llama, Stage
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

import cp_mesh

LAYOUTS = {
    "auto": "auto",  # zigzag, and a new layout for every batch of documents
    "contiguous": cp_mesh.Contiguous(),
    "zigzag": cp_mesh.ZigZag(),
    "striped": cp_mesh.Striped(),
}


def check_sizes(model: Llama, tp: DeviceMesh, *sizes: str) -> None:
    """Raise on every rank if the tp axis does not divide these sizes of the model."""
    for size in sizes:
        if getattr(model.config, size) % tp.size():
            raise ValueError(f"{size} = {getattr(model.config, size)} does not divide over tp = {tp.size()}")


def apply_tensor_parallel(model: Llama, tp: DeviceMesh, sequence_parallel: bool) -> None:
    """Split heads, hidden units and vocabulary over the tp axis.

    Args:
        model: The plain model; changed in place.
        tp: 1-D mesh.
        sequence_parallel: Also split the sequence over tp between the matmuls, which saves memory of the norms.
    """
    check_sizes(model, tp, "num_heads", "num_kv_heads", "vocab_size")
    stream = Shard(1) if sequence_parallel else Replicate()  # placement of the residual stream on tp
    plan = {
        "tok_embeddings": RowwiseParallel(input_layouts=Replicate(), output_layouts=stream),
        "layers.*.attention": PrepareModuleInput(
            input_layouts=(stream, None, None), desired_input_layouts=(Replicate(), None, None)
        ),
        "layers.*.attention.w[qkv]": ColwiseParallel(),
        "layers.*.attention.wo": RowwiseParallel(output_layouts=stream),
        "layers.*.feed_forward": PrepareModuleInput(input_layouts=(stream,), desired_input_layouts=(Replicate(),)),
        "layers.*.feed_forward.w[13]": ColwiseParallel(),
        "layers.*.feed_forward.w2": RowwiseParallel(output_layouts=stream),
        "output": ColwiseParallel(input_layouts=stream, output_layouts=Replicate()),
    }
    if sequence_parallel:
        plan |= {f"layers.*.{name}_norm": SequenceParallel() for name in ("attention", "feed_forward")}
        plan["norm"] = SequenceParallel()
    parallelize_module(model, tp, plan)
    # FSDP warns that the logits are a view of a gathered tensor; nothing writes into them.
    warnings.filterwarnings("ignore", "FSDP2-wrapped module .* returned a view tensor")
    # An asynchronous collective must not enter a compiled block: the block would silently drop its gradient.
    model.tok_embeddings.register_forward_hook(lambda module, inputs, output: output.clone())


def apply_overlapped(model: Llama, tp: DeviceMesh, sequence_parallel: bool) -> None:
    """Like `apply_tensor_parallel`, by the linears of cp_mesh, which overlap communication with matmuls.

    The model returns deferred logits, which `cp_mesh.cross_entropy` computes in chunks.
    """
    mode = "reduce_scatter" if sequence_parallel else "all_reduce"
    cp_mesh.parallelize(model, tp, cp_mesh.tensor_parallel.tensor_parallel_plan(model, tp, mode=mode))


def apply_context_parallel(model: Llama, cp: DeviceMesh, sequence: cp_mesh.ShardedSequence) -> None:
    """Shard the sequence over the cp axis: the root takes whole batches, and attention cores see all tokens.

    The model then takes a mask as its documents: FSDP2 would move a tensor to the device, away from the host.

    Args:
        model: The model, tensor parallel or not; changed in place.
        cp: 1-D mesh.
        sequence: Which rank holds which tokens.
    """

    def mask(q, k, v, documents):  # called with the arguments of the core
        return documents

    plan = {
        "": cp_mesh.ShardedModel(sequence, probe=True),
        "layers.*.attention.core": cp_mesh.ContextParallel(sequence, mask=mask),
    }
    cp_mesh.parallelize(model, cp, plan)


def stage_of(model: Llama, pp: DeviceMesh) -> Stage:
    """The pipeline stage of this rank; stages differ by at most one layer.

    Args:
        model: The model, tensor parallel or not.
        pp: 1-D mesh.
    """
    edges = [len(model.layers) * number // pp.size() for number in range(pp.size() + 1)]
    return Stage(model, range(*edges[pp.get_local_rank() :][:2]))


def apply_context_parallel_to_stage(stage: Stage, cp: DeviceMesh, sequence: cp_mesh.ShardedSequence) -> None:
    """Like `apply_context_parallel`, for a stage. Documents are a tensor, cut into microbatches; later stages get rows.

    Args:
        stage: What `stage_of` returned; changed in place.
        cp: 1-D mesh.
        sequence: Which rank holds which tokens.
    """

    def mask(q, k, v, documents):
        return cp_mesh.Mask(documents=documents)

    is_first = isinstance(stage.tok_embeddings, nn.Embedding)
    plan = {
        "": cp_mesh.ShardedModel(sequence, inputs=("x",) if is_first else (), probe=is_first),
        "layers.*.attention.core": cp_mesh.ContextParallel(sequence, mask=mask),
    }
    cp_mesh.parallelize(stage, cp, plan)


def pipeline(
    stage: Stage,
    pp: DeviceMesh,
    sequence: cp_mesh.ShardedSequence,
    data: DeviceMesh,
    device: torch.device,
    microbatches: int,
) -> Callable[[dict[str, Tensor]], Tensor]:
    """Return a function of a batch that runs all stages, with the backward if gradients are enabled.

    Args:
        stage: This rank's stage, after every other plan.
        pp: 1-D mesh.
        sequence: Which rank holds which tokens.
        data: 1-D mesh, dp x cp flattened.
        device: Device of the stage.
        microbatches: Number of microbatches per batch.

    Returns:
        A function that returns this rank's part of the loss; it is 0 in all stages but the last.
    """
    number, counts = pp.get_local_rank(), []

    def share(logits: Tensor, labels: Tensor) -> Tensor:
        return cp_mesh.cross_entropy(logits, labels, data, count=counts[-1])

    stages = PipelineStage(stage, number, pp.size(), device, group=pp.get_group())
    schedule = Schedule1F1B(stages, microbatches, loss_fn=share, scale_grads=False)

    def run(batch: dict[str, Tensor]) -> Tensor:
        batch = {name: tensor.to(device) for name, tensor in batch.items()}
        tokens, labels = batch.pop("tokens"), sequence.shard({"labels": batch.pop("labels")})["labels"]
        counts[:], losses = [cp_mesh.training.valid_tokens(labels, data)], []
        first = [tokens] if number == 0 else []
        last = {"target": labels, "losses": losses} if number == pp.size() - 1 else {}
        step = schedule.step if torch.is_grad_enabled() else schedule.eval
        step(*first, **last, **batch)
        return sum((loss.detach() for loss in losses), torch.zeros((), device=device))

    return run


def apply_fsdp(model: Llama | Stage, data: DeviceMesh, precision: str, *, summed: bool = True, **options: Any) -> None:
    """Shard parameters, gradients and optimizer state over all ranks that hold different tokens.

    Args:
        model: The model after every other plan; changed in place.
        data: 1-D mesh, dp x cp flattened.
        precision: "fp32", or "bf16" for bf16 compute, fp32 master weights and fp32 gradient sums.
        summed: Whether a rank's loss is a share of the mean over all tokens, so that gradients are summed over ranks.
        options: Others of `fully_shard`, such as ``offload_policy``.
    """
    policy = MixedPrecisionPolicy()
    if precision == "bf16":
        # Inputs are not cast: the rotary cosines and sines stay fp32.
        policy = MixedPrecisionPolicy(
            param_dtype=torch.bfloat16, reduce_dtype=torch.float32, output_dtype=None, cast_forward_inputs=False
        )
    module: nn.Module
    for module in (*model.layers.children(), model):
        fully_shard(module, mesh=data, mp_policy=policy, **options)
    if summed:
        cp_mesh.sum_gradients(model)  # a sum, since the loss already divides by the tokens of all ranks
