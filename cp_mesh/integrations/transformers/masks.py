"""Attention and masks as Transformers asks for them: `make_mask` once for each kind of mask, `attend` in every layer.

A mask is a `Rows`, which layers hand on as their attention_mask. So a layer that is recomputed in the backward sees the
same object, and one that is compiled needs no context.
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

from cp_mesh.call.function import attention
from cp_mesh.errors import UnsupportedError, describe, refuse
from cp_mesh.geometry.mask import Mask
from cp_mesh.sequence.sharded_sequence import ROOT, Root, ShardedSequence
from cp_mesh.training.checks.coverage import Watch, unwatched, watched

NAME = "cp_mesh"
"""Of the attention implementation."""
PACKED = ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k", "seq_idx")
# Arguments of attention that change nothing about the scores, or that the mask says already.
_HARMLESS = {*PACKED, "position_ids", "position_embeddings", "use_cache", "cache_position", "output_attentions"}
_HARMLESS |= {"output_hidden_states", "output_router_logits", "return_dict", "num_items_in_batch", "deterministic"}
_LEAVE = "this model changes its masks itself, so it is not available"


class _Unreadable(UnsupportedError, AttributeError):
    """Of an attribute of `Rows`, for which `hasattr` must be False."""


@dataclass(frozen=True)
class Rows:
    """What travels as attention_mask: all that a layer's call of attention is told beside q, k and v.

    Attributes:
        sequence: of this batch, with its length.
        mask: of the padded sequence.
        options: keywords of `cp_mesh.attention`.
        seed: int64 [1], for dropout, another in every step; layers add their index.
    """

    sequence: ShardedSequence
    mask: Mask
    options: dict[str, Any]
    seed: Tensor

    def __getattr__(self, name: str) -> NoReturn:
        got = f"one that reads its {name!r}"
        raise _Unreadable(describe("Transformers", "layers that hand attention_mask on", got, _LEAVE))

    def __getitem__(self, index: Any) -> NoReturn:
        self.__getattr__("__getitem__")


class Said(NamedTuple):
    """What a mask function of Transformers says.

    Attributes:
        causal, window, chunk: None where it says nothing of it.
        blocks: ids [B, S] of the whole batch: tokens of one see each other, negative ids are of none.
        beyond: whether they do so farther than the window reaches.
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
        mask: with documents and key padding of the whole sequence.
        counted: [B, S] or [S], positions from which chunks are counted.
        options, seed: as in `Rows`.
        kept: [B, S_local], 1 of tokens that are no padding; of models with a loss of routers.
        router_logits: of all layers, where the model's output has them not.
        made: a `Rows` for each mask.
        watch: of the text tower of a model with images, while the rest of it is not watched.
        loss, version: what the model's loss function returned, and that of the tensor.
    """

    mask: Mask
    counted: Tensor
    options: dict[str, Any]
    seed: Tensor
    kept: Tensor | None = None
    router_logits: tuple[Tensor, ...] = ()
    made: list[tuple[Said, Rows]] = field(default_factory=list)
    loss: Tensor | None = None
    version: int = 0
    cores: int = 0
    watch: Watch | None = None

    @classmethod
    def now(cls) -> Batch | None:
        """The one whose forward runs in eager mode."""
        return root if isinstance(root := ROOT.get(), cls) else None

    def rows(self, said: Said) -> Rows:
        for other, rows in self.made:
            if other[:3] == said[:3] and other.blocks is said.blocks and other.beyond == said.beyond:
                return rows
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
        rows = Rows(self.sequence, self.sequence.mask(mask), self.options, self.seed)
        self.made.append((said, rows))
        return rows

    def _check_blocks(self, said: Said) -> None:
        """Refuse blocks that are not those of the batch, or of which a window would hide a part that the model sees."""
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
                hint = "the model shows all of a block, and other tokens those in the window; shorten the blocks"
                where = "Transformers: blocks beside a window"
                refuse(where, f"at most {said.window + 1} tokens in each", longest, hint, UnsupportedError)


def register() -> None:
    """Tell Transformers of the attention implementation."""
    AttentionInterface.register(NAME, attend)
    AttentionMaskInterface.register(NAME, make_mask)


def make_mask(*, mask_function: Callable[..., Any], **kwargs: Any) -> Rows:
    """What `AttentionMaskInterface` asks for: once for each kind of mask in a forward.

    Args:
        mask_function: of (batch row, head, query, key); read by its name and what it closes over, not called, since
            here its indices are those of a shard.
    """
    if (batch := Batch.now()) is None:
        hint = "call the model that cp_mesh.integrations.transformers.parallelize returned, not a part of it"
        refuse("attn_implementation='cp_mesh'", "a forward of the parallel root", "another call", hint)
    return batch.rows(read_mask(mask_function))


def read_mask(mask_function: Callable[..., Any]) -> Said:
    """What a mask function made by `transformers.masking_utils` says.

    Raises:
        UnsupportedError: of one that is not in the list, or a combination of them that is not.
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
            return Said(None)  # it reads positions of this rank's rows; those of the batch are known
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
    hint = "causal, bidirectional, sliding and chunked masks are read, and blocks that see each other"
    return refuse("Transformers: mask_function", "one of masking_utils", name, hint, UnsupportedError)


def _all_of(parts: list[Said]) -> Said:
    """The conjunction; each part says something else."""
    found = [{x for x in field if x is not None} for field in list(zip(*parts, strict=True))[:3]]
    blocks = [said for said in parts if said.blocks is not None]
    if max(map(len, found)) > 1 or (blocks and sum(said.causal is not None for said in parts) > 1):
        refuse("Transformers: mask_function", "one window, chunk or kind of blocks at most", parts, _LEAVE)
    causal, window, chunk = (next(iter(x), None) for x in found)
    said = Said(causal, window, chunk)
    return said._replace(blocks=blocks[0].blocks, beyond=blocks[0].beyond) if blocks else said


def _name(function: Any) -> tuple[str, dict[str, Any]]:
    """The name of a mask function, with that of its module where it is another one, and what it closes over."""
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
    attention_mask: Rows | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """What `AttentionInterface` calls in every layer.

    Args:
        query, key, value: [B, H or K, S_local, D].
        attention_mask: what `make_mask` returned.
        dropout, scaling, is_causal, sliding_window, softcap, s_aux: as Transformers passes them.

    Returns:
        [B, S_local, H, D], and no weights.
    """
    layer = getattr(module, "layer_idx", None)
    where = type(module).__name__ + ("" if layer is None else f" of layer {layer}")
    if not isinstance(attention_mask, Rows):
        hint = "this layer takes no mask of masking_utils, so what it sees is not known"
        refuse(where, "the mask of the batch", type(attention_mask).__name__, hint, UnsupportedError)
    sequence, mask = attention_mask.sequence, attention_mask.mask
    if unknown := sorted(name for name, x in kwargs.items() if x is not None and name not in _HARMLESS):
        hint = "what these do to the scores is not known, or is said of this rank's rows"
        refuse(where, "arguments of attention that are known", ", ".join(unknown), hint, UnsupportedError)
    if query.shape[2] != key.shape[2]:
        got = f"{query.shape[2]} queries, {key.shape[2]} keys"
        refuse(where, "self-attention", got, "a cache or cross-attention is not available", UnsupportedError)
    stated = is_causal or getattr(module, "is_causal", None)  # an argument False may mean that the mask says it
    if stated is not None and bool(stated) != mask.causal and mask.blocks is None:  # which are neither
        refuse(f"{where}: is_causal", mask.causal, stated, "as the model's mask says; change the config")
    if (sliding_window is None) != (mask.window is None):
        got, hint = f"{mask.window} in its mask", "say one in the config, in sliding_window or layer_types"
        refuse(f"{where}: sliding_window", sliding_window, got, hint)
    seed = None
    if dropout:
        if layer is None:
            refuse(where, "a layer_idx, for the seed of its dropout", None, "set attention_dropout = 0 in the config")
        seed = attention_mask.seed + layer
    if not torch.compiler.is_compiling() and (batch := Batch.now()) is not None:
        batch.cores += 1
    with unwatched() if watched() else nullcontext():
        out = attention(
            query, key, value, mesh=sequence.mesh, seq_dim=2, seq_len=sequence.seq_len, layout=sequence.layout,
            mask=mask, scale=scaling, softcap=softcap, sinks=s_aux, dropout_p=dropout, dropout_seed=seed,
            **attention_mask.options,
        )  # fmt: skip
    assert isinstance(out, Tensor)
    return out.transpose(1, 2).contiguous(), None
