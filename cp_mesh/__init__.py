"""Exact context-parallel attention on DTensor and DeviceMesh.

The import registers every op, because saved graphs refer to ops by name.
Functions, styles and tools are loaded on first access; plans, methods and kernels by the first call. docs/design.md,
"Rooms and floors", lists the folders.
"""

import importlib
import typing

from cp_mesh.comm.agreement import check_mode
from cp_mesh.errors import ArgumentError, RankMismatchError, UnsupportedError
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

if typing.TYPE_CHECKING:  # the same names as in `_HOMES`
    from cp_mesh.call.function import attention
    from cp_mesh.flex.block_mask import create_block_mask
    from cp_mesh.flex.function import flex_attention
    from cp_mesh.geometry.balance import balance
    from cp_mesh.geometry.batch_mask import batch_mask, document_positions
    from cp_mesh.inference.cache import ShardedCache
    from cp_mesh.inference.decoding import decode
    from cp_mesh.sequence.sharded_sequence import ShardedSequence
    from cp_mesh.tensor_parallel.plan import tensor_parallel_plan
    from cp_mesh.tensor_parallel.styles import (
        OverlappedColwise,
        OverlappedRowwise,
        VocabParallelEmbedding,
        VocabParallelHead,
    )
    from cp_mesh.tools.explain.explain import explain
    from cp_mesh.tools.explain.step import explain_step
    from cp_mesh.tools.verification.verify import VerificationError, verify
    from cp_mesh.tools.verification.verify_model import verify_model
    from cp_mesh.tools.warming import warm_up
    from cp_mesh.training.boundaries import GatherOutput, ShardInput
    from cp_mesh.training.checkpointed import Checkpointed
    from cp_mesh.training.clip_grad import clip_grad_norm
    from cp_mesh.training.context_parallel import ContextParallel
    from cp_mesh.training.log_probs import document_sums, token_log_probs
    from cp_mesh.training.loss import cross_entropy, valid_tokens
    from cp_mesh.training.parallelize import checkpoint_context_fn, parallelize, sum_gradients
    from cp_mesh.training.probe import probe
    from cp_mesh.training.recurrent_parallel import RecurrentParallel
    from cp_mesh.training.sharded_model import ShardedModel
    from cp_mesh.training.tiled import TiledMLP

__version__ = "0.3.0"
__all__ = [
    "ArgumentError",
    "Balanced",
    "Checkpointed",
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
    "RecurrentParallel",
    "Replicated",
    "ShardInput",
    "ShardedCache",
    "ShardedModel",
    "ShardedSequence",
    "Striped",
    "TiledMLP",
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
    "document_sums",
    "explain",
    "explain_step",
    "flex_attention",
    "parallelize",
    "probe",
    "sum_gradients",
    "tensor_parallel_plan",
    "token_log_probs",
    "valid_tokens",
    "verify",
    "verify_model",
    "warm_up",
]

_OPS = (
    "call.op",
    "tensor_parallel.colwise",
    "tensor_parallel.rowwise",
    "tensor_parallel.vocab_parallel",
    "training.compare_inputs",
    "training.token_losses",
)
"""Modules that register ops."""
_HOMES = {
    "Checkpointed": "training.checkpointed",
    "ContextParallel": "training.context_parallel",
    "GatherOutput": "training.boundaries",
    "OverlappedColwise": "tensor_parallel.styles",
    "OverlappedRowwise": "tensor_parallel.styles",
    "RecurrentParallel": "training.recurrent_parallel",
    "ShardInput": "training.boundaries",
    "ShardedCache": "inference.cache",
    "ShardedModel": "training.sharded_model",
    "ShardedSequence": "sequence.sharded_sequence",
    "TiledMLP": "training.tiled",
    "VerificationError": "tools.verification.verify",
    "VocabParallelEmbedding": "tensor_parallel.styles",
    "VocabParallelHead": "tensor_parallel.styles",
    "attention": "call.function",
    "balance": "geometry.balance",
    "batch_mask": "geometry.batch_mask",
    "checkpoint_context_fn": "training.parallelize",
    "clip_grad_norm": "training.clip_grad",
    "create_block_mask": "flex.block_mask",
    "cross_entropy": "training.loss",
    "decode": "inference.decoding",
    "document_positions": "geometry.batch_mask",
    "document_sums": "training.log_probs",
    "explain": "tools.explain.explain",
    "explain_step": "tools.explain.step",
    "flex_attention": "flex.function",
    "parallelize": "training.parallelize",
    "probe": "training.probe",
    "sum_gradients": "training.parallelize",
    "tensor_parallel_plan": "tensor_parallel.plan",
    "token_log_probs": "training.log_probs",
    "valid_tokens": "training.loss",
    "verify": "tools.verification.verify",
    "verify_model": "tools.verification.verify_model",
    "warm_up": "tools.warming",
}
"""Public name -> module that defines it; loaded on first access."""
_FOLDERS = ("flex", "inference", "integrations", "mixers", "tools", "wrap")
"""Subpackages and modules that `import cp_mesh` does not load."""

for _file in _OPS:
    importlib.import_module(f"cp_mesh.{_file}")
del _file


def __getattr__(name: str) -> typing.Any:
    if name in _HOMES:
        globals()[name] = getattr(_load(_HOMES[name]), name)
        return globals()[name]
    if name in _FOLDERS:
        return _load(name)
    raise AttributeError(f"module 'cp_mesh' has no attribute {name!r}")


def _load(file: str) -> typing.Any:
    try:
        return importlib.import_module(f"cp_mesh.{file}")
    except AttributeError as error:  # would read as "cp_mesh has no such name"
        raise ImportError(f"cp_mesh.{file} cannot be loaded: {error}") from error


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
