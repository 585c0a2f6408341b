"""Make a `Mask` from a batch's documents and padding, given under the names that trainers use."""

from __future__ import annotations

import torch
from torch import Tensor

from cp_mesh.errors import refuse, typed
from cp_mesh.geometry.mask import EXCLUDED, Mask


@typed
def batch_mask(
    *,
    position_ids: Tensor | None = None,
    attention_mask: Tensor | None = None,
    cu_seq_lens: Tensor | None = None,
    cu_seq_lens_padded: Tensor | None = None,
    documents: Tensor | None = None,
    causal: bool = True,
    window: tuple[int | None, int | None] | None = None,
    prefix: int = 0,
    blocks: Tensor | None = None,
) -> Mask:
    """Return the mask of a whole batch from the tensors of trainers and collators; call it before the batch is sharded.

    All tensors are those of the whole batch, equal on all cp ranks, and are read on the host. Padding becomes excluded
    tokens, as in `Mask`: their rows see nothing and have output 0, as when FlashAttention gets the batch unpadded. The
    mask of a batch with one document and no padding has no documents.

    Args:
        position_ids: integers [B, S] or [S]. A document begins wherever they do not rise by 1, as in Transformers, TRL
            and torchtitan. With ``documents`` or ``cu_seq_lens`` they may count on from one document to the next.
        attention_mask: bool or integers [B, S] or [S]: 0 is padding, 1 a token.
        cu_seq_lens: integers [num_docs + 1], cumulative lengths of the documents of one batch row, as in
            Transformers' ``cu_seq_lens_q`` and in Megatron's ``PackedSeqParams``.
        cu_seq_lens_padded: integers [num_docs + 1], where the documents of ``cu_seq_lens`` begin if each of them is
            padded, as Megatron's ``cu_seqlens_q_padded``; S is then its last entry.
        documents: integer ids [B, S] or [S], as in `Mask`; a negative id excludes the token.
        causal, window, prefix, blocks: as in `Mask`.

    Returns:
        The mask, with documents [B, S] or [S] if the batch has any.

    Raises:
        ArgumentError: if two of them contradict each other, or a shape or dtype is wrong. A pairwise mask
            [B, 1, S, S] is not accepted: pass a dense ``bias`` of 0 and -inf instead, which is exact.

    Example:
        >>> positions = torch.tensor([[0, 1, 2, 0, 1, 0]])
        >>> padding = torch.tensor([[1, 1, 1, 1, 1, 0]])
        >>> batch_mask(position_ids=positions, attention_mask=padding).documents.tolist()
        [[0, 0, 0, 1, 1, -1]]
    """
    if documents is not None and cu_seq_lens is not None:
        hint = "pass only one: cu_seq_lens are turned into documents"
        refuse("batch_mask", "documents or cu_seq_lens", "both", hint)
    if cu_seq_lens is not None:
        documents = _documents_of(cu_seq_lens, cu_seq_lens_padded)
    elif cu_seq_lens_padded is not None:
        refuse("batch_mask", "cu_seq_lens beside cu_seq_lens_padded", None, "also pass the lengths without padding")
    named = "documents" if cu_seq_lens is None else "documents of cu_seq_lens"
    given = {named: documents, "position_ids": position_ids, "attention_mask": attention_mask}
    _check_whole({name: x for name, x in (given | {"blocks": blocks}).items() if x is not None})
    documents, position_ids, kept = (None if x is None else x.to("cpu", torch.int64) for x in given.values())
    if position_ids is not None:
        begins = position_ids.diff(dim=-1) != 1
        if documents is None:
            documents = torch.nn.functional.pad(begins.cumsum(-1), (1, 0))
        elif bool((begins & (documents.diff(dim=-1) == 0) & (documents[..., 1:] >= 0)).any()):
            hint = "leave position_ids out of batch_mask, or give these documents different ids"
            refuse("batch_mask: position_ids", "ids that rise by 1 within a document", "ids that start again", hint)
    if kept is not None:
        if bool(((kept != 0) & (kept != 1)).any()):
            hint = "if it holds document ids from 1 on and 0 for padding, pass documents=attention_mask - 1"
            refuse("batch_mask: attention_mask", "0 and 1", kept.unique().tolist()[:8], hint)
        documents = torch.where(kept == 1, 0 if documents is None else documents, EXCLUDED)
    if documents is not None and bool((documents.diff(dim=-1) == 0).all() and (documents >= 0).all()):
        documents = None
    return Mask(causal, window, documents, prefix=prefix, blocks=blocks)


def _documents_of(cu_seq_lens: Tensor, padded: Tensor | None) -> Tensor | None:
    documents = Mask.from_cu_seqlens(cu_seq_lens if padded is None else padded).documents
    if padded is None or documents is None:
        return documents
    Mask.from_cu_seqlens(cu_seq_lens)  # checks them
    ids, lens, begins = documents.cpu(), cu_seq_lens.cpu().diff(), padded.cpu()
    if len(lens) + 1 != len(begins) or bool((lens > begins.diff()).any()):
        hint = "both have one entry more than there are documents"
        refuse("batch_mask: cu_seq_lens_padded", "room for the documents of cu_seq_lens", padded.tolist()[:8], hint)
    return ids.where(torch.arange(len(ids), device="cpu") - begins[ids] < lens[ids], EXCLUDED)


_OF_SEVERAL_DIMS = {
    "attention_mask": "for a pairwise mask use attention(..., bias=) of 0 and -inf with Mask(causal=False), exactly",
    "position_ids": "of mRoPE positions with four dims pass position_ids[0], which counts tokens; with three dims none "
    "counts tokens: pass documents= instead",
}


def _check_whole(given: dict[str, Tensor]) -> None:
    """Refuse tensors that do not all have the shape [B, S] or [S] of one batch."""
    for name, x in given.items():
        if not isinstance(x, Tensor):
            refuse(f"batch_mask: {name}", "a tensor", type(x).__name__, "use torch.tensor")
        if x.ndim not in (1, 2) or x.is_floating_point():
            expected, got = "integers [B, S] or [S]", f"{x.dtype} {list(x.shape)}"
            hint = "cast it to integers" if x.ndim in (1, 2) else _OF_SEVERAL_DIMS.get(name, "pass one id per token")
            refuse(f"batch_mask: {name}", expected, got, hint)
    shapes = {name: list(x.shape) for name, x in given.items()}
    rows, lengths = {x[0] for x in shapes.values() if len(x) == 2} - {1}, {x[-1] for x in shapes.values()}
    if len(rows) > 1 or len(lengths) > 1:
        hint = "pass tensors of the whole batch, before it is sharded; cu_seq_lens describe one batch row"
        refuse("batch_mask", "tensors of one batch", ", ".join(f"{x} {name}" for name, x in shapes.items()), hint)


@typed
def document_positions(documents: Tensor) -> Tensor:
    """Position ids int64 [..., S] that count from 0 in every run of equal document ids [..., S]."""
    rows = torch.arange(documents.shape[-1], device=documents.device).expand_as(documents)
    begins = torch.nn.functional.pad(documents.diff(dim=-1) != 0, (1, 0), value=True)
    return rows - rows.where(begins, 0).cummax(-1).values
