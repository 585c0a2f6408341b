"""Arguments of `cp_mesh.verify_model` for the Llama trainer: its model, parallelism, batch and loss.

    torchrun --nproc-per-node 4 -m cp_mesh verify examples/verify_llama.py:packed

Each function at the end is one set-up, on all ranks of the launch.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import parallel_llama as parallel
import torch
import torch.distributed as dist
from data import Corpus, read_text, tokenize
from llama import CoreAttention, DenseDocumentAttention, Llama, LlamaConfig
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.checkpoint import checkpoint

import cp_mesh
from cp_mesh.training import checkpoint_context_fn

SEQ_LEN, ROWS = 125, 2  # a length that few numbers of ranks divide; batch rows per data-parallel rank


def make_model(core: type[nn.Module], device: torch.device) -> Llama:
    model = Llama(LlamaConfig(dim=64, num_layers=2), core)
    model.init_weights(0)
    return model.to(device)


def setup(
    layout: str = "auto",
    cp: int = 2,
    tp: int = 1,
    documents: bool = False,
    sequence_parallel: bool = False,
    overlapped: bool = False,
    checkpoint_activations: bool = False,
    seq_len: int = SEQ_LEN,
) -> dict[str, Any]:
    """The arguments of `cp_mesh.verify_model`; the dp size is the number of ranks over cp times tp."""
    kind = "cuda" if "nccl" in dist.get_backend() else "cpu"
    device = torch.device(kind, torch.cuda.current_device()) if kind == "cuda" else torch.device(kind)
    cp = min(cp, dist.get_world_size() // tp)
    dp = dist.get_world_size() // (cp * tp)
    mesh = init_device_mesh(kind, (dp, cp, tp), mesh_dim_names=("dp", "cp", "tp"))
    data = mesh["dp", "cp"]._flatten("dp_cp")
    sequence = cp_mesh.ShardedSequence(mesh["cp"], parallel.LAYOUTS[layout], length=seq_len)

    def spread(model: Llama) -> None:
        if tp > 1:
            apply = parallel.apply_overlapped if overlapped else parallel.apply_tensor_parallel
            apply(model, mesh["tp"], sequence_parallel)
        parallel.apply_context_parallel(model, mesh["cp"], sequence)
        if checkpoint_activations:
            for block in model.layers:
                block.checkpoint = partial(checkpoint, use_reentrant=False, context_fn=checkpoint_context_fn)
        parallel.apply_fsdp(model, data, "fp32")

    def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        mask = cp_mesh.Mask(documents=batch.pop("documents", None))
        labels = sequence.for_batch(seq_len, mask).shard({"labels": batch.pop("labels")})["labels"]
        return cp_mesh.cross_entropy(model(**batch, documents=mask), labels, data)

    corpus = Corpus(tokenize(read_text(None)), seq_len, ROWS * dp, documents, restart_positions=documents)
    first = ROWS * mesh.get_local_rank("dp")
    batch = corpus.batch(0, slice(first, first + ROWS))
    return {
        "make_model": partial(make_model, CoreAttention, device),
        "make_reference": partial(make_model, DenseDocumentAttention, device),
        "plan": spread,
        "batch": {name: tensor.to(device) for name, tensor in batch.items()},
        "mesh": mesh,
        "loss": loss,
    }


zigzag = setup
packed = partial(setup, documents=True)
one_group = partial(setup, cp=1024, documents=True)  # each sequence is sharded over all ranks
checkpointed = partial(setup, "contiguous", checkpoint_activations=True)
tensor_parallel = partial(setup, "striped", tp=2, documents=True)
overlapped = partial(setup, tp=2, sequence_parallel=True, overlapped=True, seq_len=128)
sequence_parallel = partial(setup, tp=2, sequence_parallel=True, seq_len=128)  # tp divides the rows of a rank
