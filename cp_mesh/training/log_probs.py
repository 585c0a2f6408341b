"""Log-probabilities of tokens, and their sums over documents, for DPO, GRPO and other losses beside the mean.

`losses_in_chunks` has the computation; `mixers/pieces` has the documents of all ranks.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from cp_mesh.comm.agreement import capturing
from cp_mesh.errors import typed
from cp_mesh.geometry.mask import Mask
from cp_mesh.kernels.combine import accumulation_dtype
from cp_mesh.mixers.rules import agreed_pieces
from cp_mesh.sequence.cuts import check_loss
from cp_mesh.sequence.sharded_sequence import ShardedSequence
from cp_mesh.tensor_parallel.vocab_parallel import DeferredLogits
from cp_mesh.training.checks.labels import check_log_probs
from cp_mesh.training.token_losses import prepare_losses


@typed
def token_log_probs(
    x: Tensor | DeferredLogits,
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
        temperature: divides the logits; only with ``weight`` or `VocabParallelHead`.
        ignore_index: the label of tokens that get 0.

    Returns:
        [...], float32 (float64 for float64).

    Raises:
        ArgumentError: on DTensors, wrong shapes, a weight that FSDP2 has freed, or a temperature without ``weight``; in
            the first step also on labels outside of the vocabulary or of other rows, as in `cross_entropy`. The other
            ranks get this error in their next first call of cp_mesh.
        IndexError: on the CPU, for a label outside of the vocabulary; on CUDA a device assertion.

    Example:
        >>> logp = token_log_probs(hidden, labels, weight=head.weight, temperature=0.7)  # doctest: +SKIP
    """
    if not torch.compiler.is_compiling():
        check_loss(x, labels)
    losses = prepare_losses("token_log_probs", x, labels, ignore_index, weight, bias, temperature)
    if not (torch.compiler.is_compiling() or capturing()):
        inputs = [y for y in (x, weight) if y is not None]
        trained = torch.is_grad_enabled() and any(y.requires_grad for y in inputs)
        check_log_probs(labels, x.shape[-1] if weight is None else len(weight), ignore_index, trained)
    return -losses().view(labels.shape)


@typed
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
