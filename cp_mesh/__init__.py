"""Exact context-parallel attention on DTensor and DeviceMesh.

Importing it registers every op but that of `cp_mesh.integrations.torch_api`. `verify`, `explain` and other tools are
loaded when they are asked for. docs/design.md, "Rooms and floors", lists the folders.
"""

import importlib
import typing

from cp_mesh import _aliases
from cp_mesh.call.function import attention
from cp_mesh.comm.agreement import check_mode
from cp_mesh.errors import ArgumentError, RankMismatchError, UnsupportedError
from cp_mesh.flex.block_mask import create_block_mask
from cp_mesh.flex.function import flex_attention
from cp_mesh.geometry.balance import balance
from cp_mesh.geometry.batch_mask import batch_mask, document_positions
from cp_mesh.geometry.layouts import (
    Balanced,
    Contiguous,
    Joint,
    Layout,
    Permuted,
    Replicated,
    Striped,
    ZigZag,
    ZigZagDocuments,
)
from cp_mesh.geometry.mask import Mask
from cp_mesh.inference.cache import ShardedCache
from cp_mesh.inference.decode import decode
from cp_mesh.sequence.sharded_sequence import ShardedSequence
from cp_mesh.tensor_parallel.plan import tensor_parallel_plan
from cp_mesh.tensor_parallel.styles import (
    OverlappedColwise,
    OverlappedRowwise,
    VocabParallelEmbedding,
    VocabParallelHead,
)
from cp_mesh.training.boundaries import GatherOutput, ShardInput
from cp_mesh.training.clip_grad import clip_grad_norm
from cp_mesh.training.context_parallel import ContextParallel
from cp_mesh.training.loss import cross_entropy, valid_tokens
from cp_mesh.training.parallelize import checkpoint_context_fn, parallelize, sum_gradients
from cp_mesh.training.sharded_model import ShardedModel

if typing.TYPE_CHECKING:
    from cp_mesh.tools.explain.explain import explain
    from cp_mesh.tools.verify.verify import VerificationError, verify
    from cp_mesh.tools.verify.verify_model import verify_model
    from cp_mesh.tools.warm_up import warm_up

_aliases.register()

__all__ = [
    "ArgumentError",
    "Balanced",
    "ContextParallel",
    "Contiguous",
    "GatherOutput",
    "Joint",
    "Layout",
    "Mask",
    "OverlappedColwise",
    "OverlappedRowwise",
    "Permuted",
    "RankMismatchError",
    "Replicated",
    "ShardInput",
    "ShardedCache",
    "ShardedModel",
    "ShardedSequence",
    "Striped",
    "UnsupportedError",
    "VerificationError",
    "VocabParallelEmbedding",
    "VocabParallelHead",
    "ZigZag",
    "ZigZagDocuments",
    "attention",
    "balance",
    "batch_mask",
    "check_mode",
    "checkpoint_context_fn",
    "clip_grad_norm",
    "create_block_mask",
    "cross_entropy",
    "decode",
    "document_positions",
    "explain",
    "flex_attention",
    "parallelize",
    "sum_gradients",
    "tensor_parallel_plan",
    "valid_tokens",
    "verify",
    "verify_model",
    "warm_up",
]

_TOOLS = {
    "VerificationError": "tools.verify.verify",
    "explain": "tools.explain.explain",
    "verify": "tools.verify.verify",
    "verify_model": "tools.verify.verify_model",
    "warm_up": "tools.warm_up",
}


def __getattr__(name: str) -> typing.Any:
    if name in _TOOLS:
        globals()[name] = getattr(importlib.import_module(f"cp_mesh.{_TOOLS[name]}"), name)
        return globals()[name]
    if name in _aliases.ALIASES:
        return _aliases.find(name, 2)
    raise AttributeError(f"module 'cp_mesh' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
