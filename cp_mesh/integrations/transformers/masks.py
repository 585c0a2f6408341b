"""Attention and masks for the interfaces of Transformers: `make_mask` for each kind of mask, `attend` in each layer.

A mask is a `BatchAttention`, which layers pass on as attention_mask. So a layer that is recomputed in the backward gets
the same object, and a compiled layer needs no context variable.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, NoReturn

import torch
import torch.nn.functional as F
import transformers
from torch import Tensor, nn
from transformers import AttentionInterface
from transformers.masking_utils import AttentionMaskInterface

from cp_mesh.errors import UnsupportedError, describe, refuse
from cp_mesh.geometry.mask import Mask
from cp_mesh.integrations.transformers.latents import attention_of
from cp_mesh.latent.indexed import indexed_attention
from cp_mesh.sequence.sharded_sequence import ROOT, Root, ShardedSequence
from cp_mesh.training.checks.coverage import UnplannedAttentionMode, current_mode, suspended

NAME = "cp_mesh"
"""Name of the attention implementation."""
PACKED = ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k", "seq_idx")
# Arguments of attention that do not change the scores, or that the mask includes already.
_HARMLESS = {*PACKED, "position_ids", "position_embeddings", "use_cache", "cache_position", "output_attentions"}
_HARMLESS |= {"output_hidden_states", "output_router_logits", "return_dict", "num_items_in_batch", "deterministic"}
_LEAVE = "this model changes its masks itself, so it is not supported"


class _Unreadable(UnsupportedError, AttributeError):
    """An unknown attribute of `BatchAttention` was read; an AttributeError, so that `hasattr` returns False."""


@dataclass(frozen=True)
class BatchAttention:
    """The attention_mask that layers get: the arguments of their attention calls except q, k and v.

    Attributes:
        sequence: the sequence of this batch, with its length.
        mask: the mask of the padded sequence.
        options: keywords of `cp_mesh.attention`.
        seed: int64 [1], the dropout seed, which differs in every step; layers add their index.
    """

    sequence: ShardedSequence
    mask: Mask
    options: dict[str, Any]
    seed: Tensor

    def __getattr__(self, name: str) -> NoReturn:
        got = f"one that reads its {name!r}"
        raise _Unreadable(describe("Transformers", "layers that pass attention_mask on", got, _LEAVE))

    def __getitem__(self, index: Any) -> BatchAttention:
        parts = index if isinstance(index, tuple) else (index,)
        if len(parts) > 1 and parts[1] == 0:
            parts = (parts[0], *parts[2:])  # of [B, 1, S, S], as layers give it to their indexer
        if all(isinstance(x, slice) and (x.start or 0, x.stop, x.step) == (0, None, None) for x in parts):
            return self  # all rows, as Gemma-4 keeps them before layers that share keys and values
        self.__getattr__("__getitem__")


class Said(NamedTuple):
    """The settings of a mask function of Transformers.

    Attributes:
        causal, window, chunk: None if the function does not set it.
        blocks: block ids [B, S] of the whole batch: tokens of one block see each other; negative ids are in no block.
        beyond: whether tokens of a block see each other beyond the window.
    """

    causal: bool | None
    window: int | None = None
    chunk: int | None = None
    blocks: Tensor | None = None
    beyond: bool = False


@dataclass(kw_only=True)
class Batch(Root):
    """One forward of a parallel model; ``cores`` counts calls of attention in eager layers.

    Attributes:
        mask: the mask with documents and key padding of the whole sequence.
        counted: [B, S] or [S], positions from which chunk indices are computed.
        options, seed: as in `BatchAttention`.
        kept: [B, S_local], 1 for tokens that are not padding; only in models with a routers' loss.
        router_logits: logits of all layers, if the model's output lacks them.
        made: the `BatchAttention` of each mask.
        watch: in a model with images, the watch for the text tower; the rest of the model is not watched.
        loss, version: the result of the model's loss function, and its version counter then.
    """

    mask: Mask
    counted: Tensor
    options: dict[str, Any]
    seed: Tensor
    kept: Tensor | None = None
    router_logits: tuple[Tensor, ...] = ()
    made: list[tuple[Said, BatchAttention]] = field(default_factory=list)
    loss: Tensor | None = None
    version: int = 0
    cores: int = 0
    watch: UnplannedAttentionMode | None = None

    @classmethod
    def now(cls) -> Batch | None:
        """Return the batch whose forward runs in eager mode, else None."""
        return root if isinstance(root := ROOT.get(), cls) else None

    def attention(self, said: Said) -> BatchAttention:
        for other, made in self.made:
            if other[:3] == said[:3] and other.blocks is said.blocks and other.beyond == said.beyond:
                return made
        documents = self.mask.documents
        if said.chunk is not None:
            chunks = self.counted.div(said.chunk, rounding_mode="floor").cpu()
            chunks -= chunks.min()
            inside = chunks if documents is None else documents * (int(chunks.max()) + 1) + chunks
            documents = inside if documents is None else inside.where(documents >= 0, Mask.EXCLUDED)
        if said.blocks is not None:
            self._check_blocks(said)
        ahead = None if said.blocks is not None else 0 if said.causal else said.window
        window = None if said.window is None else (said.window, ahead)
        mask = replace(self.mask, causal=bool(said.causal), window=window, documents=documents, blocks=said.blocks)
        made = BatchAttention(self.sequence, self.sequence.mask(mask), self.options, self.seed)
        self.made.append((said, made))
        return made

    def _check_blocks(self, said: Said) -> None:
        """Refuse blocks of another length than the batch, and blocks that the model sees beyond its window."""
        assert said.blocks is not None
        length = self.counted.shape[-1]
        if said.blocks.shape[-1] != length:
            refuse("Transformers: blocks", f"ids of {length} tokens", said.blocks.shape[-1], _LEAVE)
        if said.chunk is not None:
            refuse("Transformers: mask_function", "blocks or chunks", "both", _LEAVE, UnsupportedError)
        if said.window is not None and said.beyond:
            documents = said.blocks if self.mask.documents is None else self.mask.documents.to(said.blocks.device)
            begins = F.pad((said.blocks.diff() != 0) | (documents.diff() != 0), (1, 0), value=True)
            longest = int(begins.flatten().cumsum(0)[(said.blocks >= 0).flatten()].bincount(minlength=1).max())
            if longest > said.window + 1:
                hint = "the model shows whole blocks, also beyond the window; shorten the blocks"
                where = "Transformers: blocks with a window"
                refuse(where, f"at most {said.window + 1} tokens in each", longest, hint, UnsupportedError)


def register() -> None:
    """Register the attention implementation with Transformers."""
    AttentionInterface.register(NAME, attend)
    AttentionMaskInterface.register(NAME, make_mask)


def make_mask(*, mask_function: Callable[..., Any], **kwargs: Any) -> BatchAttention | None:
    """Make the mask for `AttentionMaskInterface`, which asks once for each kind of mask in a forward.

    Args:
        mask_function: a function of (batch row, head, query, key). It is read by its name and its closure and not
            called, since its indices here are indices within a shard.

    Returns:
        The mask; None for a window of no tokens, which Qwen2-MoE asks for and no layer uses: `attend` refuses it.
    """
    if (batch := Batch.now()) is None:
        hint = "call the model that cp_mesh.integrations.transformers.parallelize returned, not a part of it"
        refuse("attn_implementation='cp_mesh'", "a forward of the parallel root", "another call", hint)
    said = read_mask(mask_function)
    return None if said.window == -1 else batch.attention(said)


def read_mask(mask_function: Callable[..., Any]) -> Said:
    """Read the settings of a mask function that `transformers.masking_utils` made.

    Raises:
        UnsupportedError: for an unknown function or combination of functions.
    """
    said = _read(mask_function)
    if said.causal is None:
        refuse("Transformers: mask_function", "causal or bidirectional pairs", said, _LEAVE, UnsupportedError)
    return said


def _read(function: Any) -> Said:
    name, held = _name(function)
    match name:
        case "causal_mask_function":
            return Said(True)
        case "bidirectional_mask_function":
            return Said(False)
        case "sliding_window_overlay":
            return Said(None, held["sliding_window"] - 1)
        case "sliding_window_bidirectional_overlay":
            return Said(None, held["sliding_window"])
        case "chunked_overlay":
            return Said(None, None, held["chunk_size"])
        case "packed_sequence_mask_function":
            return Said(None)  # its documents are of this rank's rows; `Batch.mask` has those of the whole batch
        case "remap_positions_for_packed_sequence":
            return _read(held["mask_function"])
        case "and_masks":
            return _all_of([_read(part) for part in held["mask_functions"]])
        case "or_masks":
            part, *others = held["mask_functions"]
            blocks = [held for name, held in map(_name, others) if name == "blockwise_overlay"]
            said = _read(part)
            if len(blocks) == len(others) == 1 and said.causal and said.blocks is None:
                return said._replace(blocks=blocks[0]["block_sequence_ids"], beyond=said.window is not None)
    hint = "causal, bidirectional, sliding and chunked masks, and blocks that see each other, are supported"
    return refuse("Transformers: mask_function", "one of masking_utils", name, hint, UnsupportedError)


def _all_of(parts: list[Said]) -> Said:
    """Combine mask settings by "and"; refuse parts that set the same thing twice."""
    found = [{x for x in field if x is not None} for field in list(zip(*parts, strict=True))[:3]]
    blocks = [said for said in parts if said.blocks is not None]
    if max(map(len, found)) > 1 or (blocks and sum(said.causal is not None for said in parts) > 1):
        refuse("Transformers: mask_function", "one window, chunk or kind of blocks at most", parts, _LEAVE)
    causal, window, chunk = (next(iter(x), None) for x in found)
    said = Said(causal, window, chunk)
    return said._replace(blocks=blocks[0].blocks, beyond=blocks[0].beyond) if blocks else said


def _name(function: Any) -> tuple[str, dict[str, Any]]:
    """Return the name of a mask function, with its module if that is not masking_utils, and its closure variables."""
    module = getattr(function, "__module__", "")
    name = getattr(function, "__qualname__", repr(function)).partition(".")[0]
    code, cells = getattr(function, "__code__", None), getattr(function, "__closure__", None) or ()
    held = dict(zip(code.co_freevars, (cell.cell_contents for cell in cells), strict=True)) if code else {}
    return name if module == transformers.masking_utils.__name__ else f"{module}.{name}", held


def attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: BatchAttention | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    indices: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attend over the whole sequence; `AttentionInterface` calls this in every layer.

    Args:
        query, key, value: [B, H or K, S_local, D]; of a layer whose latent travels, query, latent and rotary keys.
        attention_mask: the result of `make_mask`.
        dropout, scaling, is_causal, sliding_window, softcap, s_aux: as Transformers passes them.
        indices: [B, S_local, K], keys that an indexer picked (`indexed`); ``key`` is then the latent, ``value`` its
            rotary part.

    Returns:
        [B, S_local, H, D], and None for the attention weights.
    """
    layer = getattr(module, "layer_idx", None)
    where = type(module).__name__ + ("" if layer is None else f" of layer {layer}")
    if not isinstance(attention_mask, BatchAttention):
        hint = "this layer uses no mask of masking_utils, so its mask is not known"
        refuse(where, "the mask of the batch", type(attention_mask).__name__, hint, UnsupportedError)
    sequence, mask = attention_mask.sequence, attention_mask.mask
    if unknown := sorted(name for name, x in kwargs.items() if x is not None and name not in _HARMLESS):
        hint = "their effect on the scores is not known, or they hold local rows; this model is not supported"
        refuse(where, "known arguments of attention", ", ".join(unknown), hint, UnsupportedError)
    if query.shape[2] != key.shape[2]:
        got = f"{query.shape[2]} queries, {key.shape[2]} keys"
        refuse(where, "self-attention", got, "a cache or cross-attention is not available", UnsupportedError)
    stated = is_causal or getattr(module, "is_causal", None)  # is_causal=False may mean that the mask decides
    if stated is not None and bool(stated) != mask.causal and mask.blocks is None:  # blocks fit neither value
        refuse(f"{where}: is_causal", mask.causal, stated, "the model's mask differs from it; change the config")
    if (sliding_window is None) != (mask.window is None):
        got, hint = f"{mask.window} in its mask", "set the same window in the config, by sliding_window or layer_types"
        refuse(f"{where}: sliding_window", sliding_window, got, hint)
    seed = None
    if dropout:
        if layer is None:
            refuse(where, "a layer_idx, for the seed of its dropout", None, "set attention_dropout = 0 in the config")
        seed = attention_mask.seed + layer
    if not torch.compiler.is_compiling() and (batch := Batch.now()) is not None:
        batch.cores += 1
    if indices is not None and (dropout or softcap):
        hint = "set attention_dropout = 0 in the config"
        refuse(where, "plain scores of picked keys", "dropout or softcap", hint, UnsupportedError)
    with suspended() if current_mode() else nullcontext():
        run, tensors = attention_of(module, query, key, value)
        if indices is not None:
            query, latent, rope, up = tensors  # `unknown_core` refuses other layers
            given = query, latent, rope, up, indices
            return indexed_attention(*given, sequence=sequence, scale=scaling, sinks=s_aux).transpose(1, 2), None
        out = run(
            *tensors, mesh=sequence.mesh, seq_dim=2, seq_len=sequence.seq_len, layout=sequence.layout,
            mask=mask, scale=scaling, softcap=softcap, sinks=s_aux, dropout_p=dropout, dropout_seed=seed,
            **attention_mask.options,
        )  # fmt: skip
    assert isinstance(out, Tensor)
    return out.transpose(1, 2).contiguous(), None
