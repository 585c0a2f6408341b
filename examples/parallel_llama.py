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
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

import cp_mesh
from cp_mesh.comm.exchange import symmetric_memory_bytes
from cp_mesh.training.host_copies import pinned_bytes

LARGE_NORMS = 2**32  # elements of an input from which on PyTorch 2.11 computes them wrong (pytorch/pytorch#181555)
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


def apply_context_parallel(
    model: Llama,
    cp: DeviceMesh,
    sequence: cp_mesh.ShardedSequence,
    *,
    probe: bool = True,
    head_chunks: int | None = None,
    saving: dict[str, ParallelStyle] | None = None,
) -> None:
    """Shard the sequence over the cp axis: the root takes whole batches, and attention cores see all tokens.

    The model then takes a mask as its documents: FSDP2 would move a tensor to the device, away from the host.

    Args:
        model: The model, tensor parallel or not; changed in place.
        cp: 1-D mesh.
        sequence: Which rank holds which tokens.
        probe: Whether the first forward runs the plan on few tokens, on one rank too; not with a loss in the forward.
        head_chunks: In how many parts attention computes its heads.
        saving: What `saving_plan` returned.
    """

    def mask(q, k, v, documents):  # called with the arguments of the core
        return documents

    plan = {
        "": cp_mesh.ShardedModel(sequence, probe=probe),
        "layers.*.attention.core": cp_mesh.ContextParallel(sequence, mask=mask, head_chunks=head_chunks),
    }
    cp_mesh.parallelize(model, cp, plan | (saving or {}))


def saving_plan(
    recompute: str = "none", offload: bool = False, mlp_rows: int | None = None, elements: int = 0
) -> dict[str, ParallelStyle]:
    """Lines of a plan that save memory and change no result; docs/long.md explains them.

    Args:
        recompute: What blocks compute again in the backward: "none", "selective" for all but attention, or "full".
        offload: Whether what blocks keep waits in host memory.
        mlp_rows: How many rows of an MLP are computed at a time.
        elements: Of a norm's input.
    """
    plan: dict[str, ParallelStyle] = {}
    if recompute != "none":
        plan["layers.*"] = cp_mesh.Checkpointed(offload=offload, keep_attention=recompute == "selective")
    if mlp_rows:
        plan["layers.*.feed_forward"] = cp_mesh.TiledMLP(tile_rows=mlp_rows)
    if elements >= LARGE_NORMS:
        norms = "layers.*.attention_norm", "layers.*.feed_forward_norm", "norm"
        plan |= dict.fromkeys(norms, cp_mesh.TiledMLP(tile_rows=mlp_rows or 8192))
    return plan


def stage_of(model: Llama, pp: DeviceMesh) -> Stage:
    """The pipeline stage of this rank; stages differ by at most one layer.

    Args:
        model: The model, tensor parallel or not.
        pp: 1-D mesh.
    """
    edges = [len(model.layers) * number // pp.size() for number in range(pp.size() + 1)]
    return Stage(model, range(*edges[pp.get_local_rank() :][:2]))


def apply_context_parallel_to_stage(
    stage: Stage, cp: DeviceMesh, sequence: cp_mesh.ShardedSequence, saving: dict[str, ParallelStyle] | None = None
) -> None:
    """Like `apply_context_parallel`, for a stage of `stage_of`.

    Documents are a tensor, which is cut into microbatches; later stages get local rows.
    """

    def mask(q, k, v, documents):
        return cp_mesh.Mask(documents=documents)

    is_first = isinstance(stage.tok_embeddings, nn.Embedding)
    plan = {
        "": cp_mesh.ShardedModel(sequence, inputs=("x",) if is_first else (), probe=is_first),
        "layers.*.attention.core": cp_mesh.ContextParallel(sequence, mask=mask),
    }
    cp_mesh.parallelize(stage, cp, plan | (saving or {}))


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


def apply_fsdp(model: Llama | Stage, data: DeviceMesh, precision: str, **options: Any) -> None:
    """Shard parameters, gradients and optimizer state over all ranks that hold different tokens.

    Args:
        model: The model after every other plan; changed in place.
        data: 1-D mesh, dp x cp flattened.
        precision: "fp32", or "bf16" for bf16 compute, fp32 master weights and fp32 gradient sums.
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
    cp_mesh.sum_gradients(model)  # a sum, since the loss already divides by the tokens of all ranks


def memory(optimizer: torch.optim.Optimizer) -> tuple[float, float]:
    """Peak bytes on this rank's GPU, with symmetric memory; in host memory those pinned, and the optimizer's states."""
    states = (x for state in optimizer.state.values() for x in state.values() if isinstance(x, DTensor))
    host = torch.cuda.host_memory_stats()["allocated_bytes.peak"] + pinned_bytes()
    host += sum(x.to_local().nbytes for x in states if not x.is_cuda)
    return torch.cuda.max_memory_allocated() + symmetric_memory_bytes(), host
