"""Read the arguments of a call for the *whole* batch: tokens, labels, documents, padding and positions."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from cp_mesh.errors import UnsupportedError, refuse
from cp_mesh.geometry.batch_mask import batch_mask, document_positions
from cp_mesh.geometry.mask import Mask
from cp_mesh.integrations.transformers.families import Facts
from cp_mesh.integrations.transformers.masks import PACKED
from cp_mesh.sequence.sharded_sequence import IGNORED

ROWS = ("input_ids", "inputs_embeds", "token_type_ids")
COMPARED = (*ROWS, "attention_mask", "documents", "cu_seq_lens_q", "shift_labels")
"""Arguments that must be equal on all cp ranks."""
_TAKEN = {*COMPARED, *PACKED, "position_ids", "labels", "num_items_in_batch"}
_TAKEN |= {"output_hidden_states", "output_router_logits", "fused_lm_head"}
_REFUSED = {
    **dict.fromkeys(
        ("cache", "past_key_values"), "a cache of this rank's rows; cp_mesh.inference.decode reads sharded ones"
    ),
    "use_cache": "pass use_cache=False: a cache would hold this rank's rows",
    "logits_to_keep": "leave it out: the last rows of a shard are not those of the sequence",
    "output_attentions": "leave it out: attention weights are never stored",
    "cache_position": "leave it out: pass position_ids of the whole batch",
}


def read(facts: Facts, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments of a call by name; shift labels, and add documents and positions that follow from others.

    Raises:
        ArgumentError, UnsupportedError: for tensors that are not of the whole batch, and unknown arguments.
    """
    where, named = facts.name, dict(zip(facts.names, args, strict=False)) | kwargs
    given = {name: x for name, x in named.items() if x is not None}
    for name, hint in _REFUSED.items():
        if isinstance(x := given.pop(name, None), Tensor) or x not in (None, False, 0):
            refuse(where, f"no {name}", x if isinstance(x, int | float | str) else type(x).__name__, hint)
    if given.pop("return_dict", True) is not True:
        refuse(where, "return_dict=True", False, "leave it out: outputs are read by name")
    if unknown := sorted(given.keys() - _TAKEN - {*(facts.names if facts.text else ())}):
        hint = "whether they hold rows of the sequence is not known; leave them out"
        refuse(where, f"arguments among {', '.join(sorted(_TAKEN))}", ", ".join(unknown), hint, UnsupportedError)
    tokens = [given[name] for name in ROWS[:2] if name in given]
    if len(tokens) != 1:
        refuse(where, "either input_ids or inputs_embeds", f"{len(tokens)} of them", "pass one, of the whole batch")
    size, device = tokens[0].shape[:2], tokens[0].device
    for name in ("attention_mask", "documents", "labels", "shift_labels", "token_type_ids"):
        if name in given and given[name].shape != size:
            hint = "pass the whole batch; a mask of pairs cannot be read, documents=ids [B, S] can"
            refuse(f"{where}: {name}", f"[B, S] = {list(size)}", list(given[name].shape), hint)
    ids = given.get("position_ids")
    several = facts.text is not None and ids is not None and ids.ndim == 3  # of time, height and width (mRoPE)
    if ids is not None and (ids[0] if several else ids).shape not in (size, (1, size[1])):
        hint = "pass those of the whole batch; only models with images take positions of several dims (mRoPE)"
        refuse(f"{where}: position_ids", f"[B, S] = {list(size)}, or [1, S]", list(ids.shape), hint)
    labels = given.pop("labels", None)
    if labels is not None and "shift_labels" not in given:
        given["shift_labels"] = F.pad(labels, (0, 1), value=IGNORED)[:, 1:] if facts.causal else labels
    if (cu_seqlens := given.get("cu_seq_lens_q")) is not None:
        documents = Mask.from_cu_seqlens(cu_seqlens).documents
        if size[0] != 1 or documents is None or documents.shape[-1] != size[1]:
            got = f"an end at {int(cu_seqlens[-1])}, in {size[0]} batch row{'s' * (size[0] != 1)}"
            refuse(f"{where}: cu_seq_lens_q", f"an end at {size[1]}, in one batch row", got, "or pass documents=ids")
        given.setdefault("documents", documents[None].to(device))
    if "documents" in given:
        if ids is None and facts.rotates_by_several:
            hint = "pass position_ids of the whole batch, [3, B, S], which restart in each document"
            refuse(f"{where}: documents", "position_ids with documents", None, hint)
        given.setdefault("position_ids", document_positions(given["documents"]))
    elif ids is not None and "attention_mask" not in given and (not several or len(ids) == 4):
        # as in Transformers, of [4, B, S] the first row counts tokens; [3, B, S] has no such row
        given["documents"] = batch_mask(position_ids=ids[0] if several else ids).documents
    if facts.counted and "position_ids" not in given:
        hint = "pass position_ids of the whole batch, [B, S], as the model would compute them"
        refuse(where, f"position_ids, which {facts.counted} would compute from this rank's tokens", None, hint)
    if facts.text is None:  # models with images compute their own
        given.setdefault("position_ids", torch.arange(size[1], device=device)[None])
    return given


def visible(facts: Facts, whole: dict[str, Any]) -> tuple[Mask, Tensor]:
    """Return the mask (documents and padding) of arguments from `read`, and positions [B, S] or [S] for chunks.

    Padding tokens are excluded and attend to nothing. If some have valid labels, padding is hidden as keys only; models
    with recurrent layers refuse them, since what such layers return for padding differs between families and kernels.

    Raises:
        UnsupportedError: if a padding token of a model with recurrent layers has a valid label.
    """
    padding, documents = whole.get("attention_mask"), whole.get("documents")
    tokens = next(whole[name] for name in ROWS if name in whole)
    counted = torch.arange(tokens.shape[1], device=tokens.device) if documents is None else whole["position_ids"]
    if padding is None:
        return Mask(documents=documents), counted
    padding = padding.long()
    if documents is None and not bool(padding[:, 0].all()):  # chunks are counted from the end of left padding
        counted = counted - (padding.cumsum(-1) == 0).sum(-1, keepdim=True)
    labels = whole.get("shift_labels")
    if labels is not None and bool((at := (labels != IGNORED) & (padding == 0)).any()):
        if facts.num_mixers:
            row, place = at.nonzero()[0].tolist()
            got = f"{int(labels[row, place])} at position {place} of row {row}"
            hint = "set labels of padding, and of the first token after padding on the left, to -100"
            refuse(facts.name, f"{IGNORED} as the next token of padding", got, hint, UnsupportedError)
        return Mask(documents=documents, key_padding=padding.bool()), counted
    return batch_mask(attention_mask=padding, documents=documents), counted
