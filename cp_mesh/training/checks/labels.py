"""A check of the labels in the first loss: are they the next tokens of this rank's rows?"""

from __future__ import annotations

from contextlib import ExitStack

import torch
from torch import Tensor

from cp_mesh._torch import without_function_modes, world
from cp_mesh.comm.agreement import has_calls, refusing
from cp_mesh.comm.group_state import groups_with
from cp_mesh.errors import ArgumentError, describe, warn
from cp_mesh.geometry.layouts import Contiguous, Striped, ZigZag
from cp_mesh.sequence.cuts import Cuts, Tokens

LEAST_KNOWN = 4
"""Labels that must match other rows before they are refused: fewer may be equal by chance."""
_MOST = 0.9
"""Share of valid labels above which unshifted labels are refused: with fewer, masked-token training is possible."""
_LATER = 8
"""Most places by which labels of later tokens are shifted, as in multi-token prediction."""
_SHIFT_ONCE = "shift the whole labels by one, and then shard them"
_SHIFT = "shift the whole labels and then shard them: the token after a shard's last row is another rank's"
_CUT = 'cut them with sequence.shard({"labels": labels}), not by chunk or another layout'
_WHOLE = 'for gathered logits take F.cross_entropy, or cross_entropy over mesh["dp"], without the cp ranks'


def check_labels(
    labels: Tensor, vocab: int, ignore_index: int, ranks: set[int] | None, in_parts: bool, trained: bool
) -> ArgumentError | None:
    """Return an error if this rank's labels are wrong, else None.

    Args:
        labels: labels of this rank's rows, any shape.
        vocab: vocabulary size.
        ignore_index: the label of tokens without a loss.
        ranks: the ranks of the loss; None: it has no sum, and is compared with tokens of as many rows.
        in_parts: whether the loss has ``count=``; it may then cover only some of the rows.
        trained: whether the loss has a gradient; if so, later losses are not checked.
    """
    outside = labels[(labels != ignore_index) & ((labels < 0) | (labels >= vocab))]
    if len(outside):
        hint = f"pass ignore_index={int(outside[0])}, or pad with shard(..., pad_value={ignore_index})"
        expected = f"0 <= label < {vocab}, or ignore_index={ignore_index}"
        return ArgumentError(describe("labels", expected, int(outside[0]), hint))
    found = None
    for group, own in groups_with(Cuts):
        if group not in world().pg_map:  # the group was destroyed
            continue
        if own.tokens is not None and _covers(ranks, own, labels, trained):
            with without_function_modes():  # a watch may be active, and would report torch.arange calls of this check
                found = found or _wrong(labels, ignore_index, own, in_parts, scores=ranks is None)
            if not (own.evaluated or own.gathered or has_calls(group)):
                warn(
                    "tokens were sharded, but nothing mixed them over the ranks: each attends to its own rows alone. "
                    "Call cp_mesh.parallelize, or cp_mesh.attention in the model, before the loss"
                )
            own.evaluated, own.done = True, trained
            if trained or found:
                own.tokens = None
    return ArgumentError(describe("labels", "the next tokens of this rank's rows", *found)) if found else None


def check_log_probs(labels: Tensor, vocab: int, ignore_index: int, trained: bool) -> None:
    """Refuse the labels of log-probabilities, which have no sum over ranks; cp ranks in a first call get the error."""
    cuts = ((group, own) for group, own in groups_with(Cuts) if own.tokens is not None and group in world().pg_map)
    waiting = [group for group, own in cuts if _covers(None, own, labels, trained)]
    if waiting and (error := check_labels(labels, vocab, ignore_index, None, True, trained)) is not None:
        with ExitStack() as stack:
            for group in waiting:
                stack.enter_context(refusing(group))
            raise error


def _covers(ranks: set[int] | None, own: Cuts, labels: Tensor, trained: bool) -> bool:
    """Whether a loss is compared with the tokens: if it is over their ranks, or if it may be of this rank's rows."""
    tokens = own.tokens
    assert tokens is not None
    if own.evaluated and not trained:
        return False
    if ranks is not None:
        return ranks.issuperset(tokens.ranks)
    return not own.gathered and labels.numel() == len(tokens.whole) * tokens.num_rows


def _wrong(labels: Tensor, ignore_index: int, own: Cuts, in_parts: bool, scores: bool) -> tuple[str, str] | None:
    """Return what the labels are and a hint for the fix; None if they may be right."""
    tokens = own.tokens
    assert tokens is not None
    (batch, length), device = tokens.whole.shape, tokens.whole.device
    if labels.is_floating_point() or labels.device != device or labels.ndim > 2:
        return None
    if own.gathered and labels.shape == (batch, own.gathered):
        return f"{own.gathered} rows, of the whole sequence, on every cp rank", _WHOLE
    local = tokens.rows(0)
    rows = local.shape[1]
    if 1 < rows < length and not in_parts and labels.shape in ((batch, rows - 1), (batch * (rows - 1),)):
        short, after = labels.reshape(batch, rows - 1), local[:, 1:]
        if bool(((short == after) | (short == ignore_index)).all()):
            return f"{rows - 1} rows of {rows}", _SHIFT
        return None
    fits = labels.numel() == batch * rows
    return _of_others(labels.reshape(batch, rows), ignore_index, tokens, scores) if fits else None


def _of_others(labels: Tensor, ignore_index: int, tokens: Tokens, scores: bool) -> tuple[str, str] | None:
    """`_wrong` by content: find labels [B, rows] that are tokens at other positions than next to this rank's rows."""

    def are(found: Tensor) -> bool:
        if found.shape != labels.shape:
            return False
        known = (labels != ignore_index) & (found != ignore_index)
        return bool(known.sum() >= LEAST_KNOWN) and bool((labels == found).masked_select(known).all())

    if are(tokens.rows(1, fill=ignore_index)):
        return None
    # in the striped layout these may also be labels that were shifted after sharding, which look alike
    if later := next((shift for shift in range(2, _LATER + 1) if are(tokens.rows(shift, fill=ignore_index))), 0):
        warn(f"labels are tokens {later} places after their rows, as for a later head; for next tokens {_SHIFT_ONCE}")
        return None
    local = tokens.rows(0, fill=ignore_index)
    if are(torch.cat([local[:, 1:], torch.full_like(local[:, :1], ignore_index)], 1)):
        return "the next tokens within this rank's shard", _SHIFT
    for layout in (Contiguous(), ZigZag(), Striped()):
        if layout != tokens.layout and are(tokens.rows(1, layout, fill=ignore_index)):
            return f"the labels of {layout.spec()} rows, beside tokens in {tokens.layout.spec()}", _CUT
    if are(local):
        if not scores and (labels != ignore_index).double().mean() > _MOST:
            return "the tokens themselves, not the next ones", _SHIFT_ONCE
        warn(f"labels equal the tokens of their rows, which suits masked tokens; for next tokens, {_SHIFT_ONCE}")
        return None
    for rank in range(len(tokens.ranks)):
        if rank != tokens.rank and are(tokens.rows(1, rank=rank, fill=ignore_index)):
            return f"the labels of rank {rank}, on cp rank {tokens.rank}", _CUT
    return None
