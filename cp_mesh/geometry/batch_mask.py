"""A `Mask` from what a batch says of its documents and padding, under the names that trainers use."""

from __future__ import annotations

import torch
from torch import Tensor

from cp_mesh.errors import refuse
from cp_mesh.geometry.mask import EXCLUDED, Mask


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
    """The mask of a whole batch, from what trainers and collators say of it; call it before the batch is sharded.

    All tensors are those of the whole batch, equal on all cp ranks, and are read on the host. Padding becomes excluded
    tokens, as in `Mask`: their rows see nothing and have output 0, as where FlashAttention is given the batch without
    its padding. A batch of one document without padding has no documents in its mask.

    Args:
        position_ids: integers [B, S] or [S]; where they do not go on by 1 a document begins, as in Transformers, TRL
            and torchtitan. Beside ``documents`` or ``cu_seq_lens`` they may go on from one document to the next.
        attention_mask: bool or integers [B, S] or [S]: 0 is padding, 1 a token.
        cu_seq_lens: integers [num_docs + 1], cumulative lengths of the documents of one batch row, as in
            Transformers' ``cu_seq_lens_q`` and in Megatron's ``PackedSeqParams``.
        cu_seq_lens_padded: integers [num_docs + 1], where the documents of ``cu_seq_lens`` begin if they are padded
            one by one, as Megatron's ``cu_seqlens_q_padded``; then S is its last entry.
        documents: integer ids [B, S] or [S], as in `Mask`; a negative one is excluded.
        causal, window, prefix, blocks: as in `Mask`.

    Returns:
        The mask, with documents [B, S] or [S] if the batch has any.

    Raises:
        ArgumentError: if two of them contradict each other, or are of another shape or dtype. A mask of pairs
            [B, 1, S, S] cannot be read: it is, exactly, a dense ``bias`` of 0 and -inf.

    Example:
        >>> positions = torch.tensor([[0, 1, 2, 0, 1, 0]])
        >>> padding = torch.tensor([[1, 1, 1, 1, 1, 0]])
        >>> batch_mask(position_ids=positions, attention_mask=padding).documents.tolist()
        [[0, 0, 0, 1, 1, -1]]
    """
    if documents is not None and cu_seq_lens is not None:
        hint = "pass one of them: cu_seq_lens are read as documents"
        refuse("batch_mask", "documents or cu_seq_lens", "both", hint)
    if cu_seq_lens is not None:
        documents = _documents_of(cu_seq_lens, cu_seq_lens_padded)
    elif cu_seq_lens_padded is not None:
        refuse("batch_mask", "cu_seq_lens beside cu_seq_lens_padded", None, "pass the lengths without padding too")
    named = "documents" if cu_seq_lens is None else "documents of cu_seq_lens"
    given = {named: documents, "position_ids": position_ids, "attention_mask": attention_mask}
    _check_whole({name: x for name, x in (given | {"blocks": blocks}).items() if x is not None})
    documents, position_ids, kept = (None if x is None else x.to("cpu", torch.int64) for x in given.values())
    if position_ids is not None:
        begins = position_ids.diff(dim=-1) != 1
        if documents is None:
            documents = torch.nn.functional.pad(begins.cumsum(-1), (1, 0))
        elif bool((begins & (documents.diff(dim=-1) == 0) & (documents[..., 1:] >= 0)).any()):
            hint = "leave position_ids out of batch_mask, or give these documents ids of their own"
            refuse("batch_mask: position_ids", "that go on by 1 within a document", "some that begin anew", hint)
    if kept is not None:
        if bool(((kept != 0) & (kept != 1)).any()):
            hint = "ids of documents from 1 on, with 0 for padding, are documents=attention_mask - 1"
            refuse("batch_mask: attention_mask", "0 and 1", kept.unique().tolist()[:8], hint)
        documents = torch.where(kept == 1, 0 if documents is None else documents, EXCLUDED)
    if documents is not None and bool((documents.diff(dim=-1) == 0).all() and (documents >= 0).all()):
        documents = None
    return Mask(causal, window, documents, prefix=prefix, blocks=blocks)


def _documents_of(cu_seq_lens: Tensor, padded: Tensor | None) -> Tensor | None:
    ids = Mask.from_cu_seqlens(cu_seq_lens if padded is None else padded).documents
    if padded is None or ids is None:
        return ids
    Mask.from_cu_seqlens(cu_seq_lens)  # which looks at them
    lens, begins = cu_seq_lens.cpu().diff(), padded.cpu()
    if len(lens) + 1 != len(begins) or bool((lens > begins.diff()).any()):
        hint = "both have an entry more than there are documents"
        refuse("batch_mask: cu_seq_lens_padded", "room for the documents of cu_seq_lens", padded.tolist()[:8], hint)
    return ids.where(torch.arange(len(ids)) - begins[ids] < lens[ids], EXCLUDED)


_OF_SEVERAL_DIMS = {
    "attention_mask": "a mask of pairs is, exactly, attention(..., bias=) of 0 and -inf with Mask(causal=False)",
    "position_ids": "of positions of several dims (mRoPE) the first of four counts tokens, position_ids[0]; of three "
    "none does: leave them out, and say documents=",
}


def _check_whole(given: dict[str, Tensor]) -> None:
    """Refuse tensors that are not of one batch [B, S], or [S]."""
    for name, x in given.items():
        if not isinstance(x, Tensor):
            refuse(f"batch_mask: {name}", "a tensor", type(x).__name__, "use torch.tensor")
        if x.ndim not in (1, 2) or x.is_floating_point():
            expected, got = "integers [B, S] or [S]", f"{x.dtype} {list(x.shape)}"
            hint = "cast it to integers" if x.ndim in (1, 2) else _OF_SEVERAL_DIMS.get(name, "one id for each token")
            refuse(f"batch_mask: {name}", expected, got, hint)
    shapes = {name: list(x.shape) for name, x in given.items()}
    rows, lengths = {x[0] for x in shapes.values() if len(x) == 2} - {1}, {x[-1] for x in shapes.values()}
    if len(rows) > 1 or len(lengths) > 1:
        hint = "pass all of the whole batch, before it is sharded; cu_seq_lens are those of one batch row"
        refuse("batch_mask", "tensors of one batch", ", ".join(f"{x} {name}" for name, x in shapes.items()), hint)


def document_positions(documents: Tensor) -> Tensor:
    """Position ids int64 [..., S] that count from 0 in every run of equal document ids [..., S]."""
    rows = torch.arange(documents.shape[-1], device=documents.device).expand_as(documents)
    begins = torch.nn.functional.pad(documents.diff(dim=-1) != 0, (1, 0), value=True)
    return rows - rows.where(begins, 0).cummax(-1).values
