"""Exact context-parallel attention on DTensor and DeviceMesh."""

from cp_mesh.agreement import check_mode
from cp_mesh.attention import attention
from cp_mesh.balancing import balance
from cp_mesh.batch_masks import batch_mask, document_positions
from cp_mesh.block_masks import create_block_mask
from cp_mesh.boundaries import GatherOutput, ShardInput
from cp_mesh.cache import ShardedCache
from cp_mesh.clipping import clip_grad_norm
from cp_mesh.cores import ContextParallel
from cp_mesh.decoding import decode
from cp_mesh.errors import ArgumentError, RankMismatchError, UnsupportedError
from cp_mesh.explaining.explain import explain
from cp_mesh.flex import flex_attention
from cp_mesh.layouts import Balanced, Contiguous, Joint, Layout, Permuted, Replicated, Striped, ZigZag, ZigZagDocuments
from cp_mesh.loss import cross_entropy, valid_tokens
from cp_mesh.masks import Mask
from cp_mesh.parallel import checkpoint_context_fn, parallelize, sum_gradients
from cp_mesh.root import ShardedModel
from cp_mesh.sequence import ShardedSequence
from cp_mesh.tensor_parallel import OverlappedColwise, OverlappedRowwise, VocabParallelEmbedding, VocabParallelHead
from cp_mesh.tp_plan import tensor_parallel_plan
from cp_mesh.verifying.verify import VerificationError, verify
from cp_mesh.verifying.verify_model import verify_model
from cp_mesh.warming import warm_up

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
