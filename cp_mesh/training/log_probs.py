"""Log-probabilities of tokens, and their sums over documents, for DPO, GRPO and other losses beside the mean.

`token_losses` has the computation in chunks; `mixers/pieces` has the documents of all ranks.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from cp_mesh.call.spec import autocast
from cp_mesh.errors import refuse
from cp_mesh.geometry.mask import Mask
from cp_mesh.kernels.combine import accumulation_dtype
from cp_mesh.mixers.rules import agreed_pieces
from cp_mesh.sequence.sharded_sequence import ShardedSequence
from cp_mesh.training.token_losses import LazyLogits, linear_losses, token_losses


def token_log_probs(
    x: Tensor | LazyLogits,
    labels: Tensor,
    *,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    temperature: float = 1.0,
    ignore_index: int = -100,
) -> Tensor:
    """Return the log-probability of each label; with ``weight``, without the whole logits in memory.

    Logits are then computed in chunks of rows, and again in the backward. The rows are this rank's, or any others:
    nothing is communicated, except over tp under `VocabParallelHead`.

    Args:
        x: logits [..., V], the output of a linear under `VocabParallelHead`, or hidden states [..., C] with ``weight``.
        labels: int64 [...], shifted before sharding, as in `cross_entropy`.
        weight: [V, C] of the last linear. Under FSDP2, call this within the forward of the module that holds it.
        bias: [V] of the last linear.
        temperature: divides the logits; only with ``weight``.
        ignore_index: the label of tokens that get 0.

    Returns:
        [...], float32 (float64 for float64).

    Raises:
        ArgumentError: on DTensors, wrong shapes, a weight that FSDP2 has freed, or a temperature without ``weight``.
        IndexError: on the CPU, for a label outside of the vocabulary; on CUDA a device assertion.

    Example:
        >>> logp = token_log_probs(hidden, labels, weight=head.weight, temperature=0.7)  # doctest: +SKIP
    """
    what, given = "token_log_probs", [y for y in (x, labels, weight, bias) if isinstance(y, Tensor)]
    if any(isinstance(y, DTensor) for y in given):
        hint = "under FSDP2 call it within the forward of the module; over tp take VocabParallelHead, without weight="
        refuse(what, "local tensors", "DTensors", hint)
    if x.shape[:-1] != labels.shape:
        refuse(f"{what}: labels", tuple(x.shape[:-1]), tuple(labels.shape), "shard both with one sequence")
    if weight is None:
        if temperature != 1 or bias is not None:
            got = f"temperature={temperature}, bias={None if bias is None else tuple(bias.shape)}"
            refuse(what, "neither temperature nor bias without weight=", got, "write logits / temperature + bias")
        if not isinstance(x, Tensor):
            losses = x.losses(labels.flatten(), ignore_index)
        else:
            losses = token_losses(x.flatten(0, -2), labels.flatten(), ignore_index)
        return -losses.view(labels.shape)
    if (
        not isinstance(x, Tensor)
        or weight.shape[1:] != x.shape[-1:]
        or (bias is not None and bias.shape != weight.shape[:1])
    ):
        shapes = [tuple(y.shape) for y in (x, weight, bias) if y is not None]
        refuse(what, "hidden states [..., C], weight [V, C] and bias [V]", shapes, "VocabParallelHead needs no weight=")
    if not torch.compiler.is_compiling() and weight.numel() and not weight.untyped_storage().size():
        hint = "call it within the forward of the module that holds it"
        refuse(f"{what}: weight", "one that is there", "one that FSDP2 has freed", hint)
    if not temperature > 0:
        refuse(f"{what}: temperature", "a positive number", temperature, "1.0 leaves the logits as they are")
    hidden, weight = autocast(x, weight)
    flat = hidden.flatten(0, -2), weight, None if bias is None else bias.to(weight.dtype), labels.flatten()
    return -linear_losses(*flat, ignore_index, 1 / temperature).view(labels.shape)


def document_sums(x: Tensor, *, sequence: ShardedSequence, mask: Mask | None = None) -> Tensor:
    """Return the sum of a sharded tensor over each document, equal on every cp rank.

    Differentiable, by the gradient contract: a loss that all cp ranks compute alike from the sums must be divided by
    the number of ranks, as with `ShardedSequence.all_reduce`. Sums of ones, 0 where a label is ignored, count tokens.

    Args:
        x: this rank's rows, [B, T] or [B, T, ...], such as log-probabilities.
        sequence: how it is sharded.
        mask: its documents, key padding and length; nothing else is read. None: each row is a document.

    Returns:
        [num_documents, ...], those of the first row, then of the second, in order of position; float32 or float64.

    Raises:
        ArgumentError, UnsupportedError: on rows that are not those of the sequence, documents whose tokens do not
            follow one another, and layouts with tokens that every rank holds.
        RankMismatchError: in a first call, on every rank, if documents differ between ranks.
    """
    pieces = agreed_pieces("document_sums", x, sequence, mask)
    number = np.where(pieces.kept, pieces.document, pieces.num_documents)  # others go into a sum that is dropped
    rows = pieces.on(x.device, "document", lambda: np.repeat(number[pieces.own], pieces.lens))
    flat = x.flatten(0, 1).to(accumulation_dtype(x.dtype))
    sums = flat.new_zeros(pieces.num_documents + 1, *flat.shape[1:]).index_add(0, rows, flat)[:-1]
    return sequence.all_reduce(sums)
