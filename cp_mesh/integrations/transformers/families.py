"""Checks which models of Transformers are supported, by their classes, configs and modules."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import ParallelStyle
from transformers import PreTrainedModel, masking_utils

from cp_mesh._torch import Convolution
from cp_mesh.errors import UnsupportedError, refuse
from cp_mesh.geometry.layouts import Striped
from cp_mesh.integrations.transformers.indexed import is_indexer, unknown_core
from cp_mesh.integrations.transformers.mixers import is_mixer, unknown_functions
from cp_mesh.sequence.sharded_sequence import ShardedSequence
from cp_mesh.tensor_parallel.plan import tensor_parallel_plan
from cp_mesh.training.checks.config import check_adapters

KINDS = frozenset(
    (
        "full_attention",
        "sliding_attention",
        "chunked_attention",
        "indexed_attention",
        "linear_attention",
        "conv",
        "hybrid",
    )
)
"""Layer types, by their names in configs, that mix tokens by attention or by functions of `mixers`."""
ALONE = frozenset(("moe", "mlp"))
"""Layer types that mix no tokens."""
HEADS = ("ForCausalLM", "LMHeadModel", "ForMaskedLM", "Model")
"""Suffixes of class names whose outputs are rows of the sequence."""
_CAUSAL = (*HEADS[:2], "ForConditionalGeneration")
IMAGES = (
    *("gemma3", "gemma4", "got_ocr2", "internvl", "llava", "mistral3", "paligemma"),
    *("qwen2_5_vl", "qwen2_vl", "qwen3_5", "qwen3_5_moe", "qwen3_vl"),
)
"""Models with images, by the model_type of their config: they insert image features into the token embeddings and pass
these to a text tower, whose rows are sharded."""
_PLAIN_HEAD = frozenset(
    (
        *("model", "last_hidden_state", "slice_logits_to_keep", "lm_head", "loss_function", "config", "vocab_size"),
        *("CausalLMOutputWithPast", "past_key_values", "cache", "hidden_states", "attentions"),
    )
)
"""Names that a forward may read if it passes the logits of lm_head to loss_function unchanged."""
_LINEARS = ("mode", "recompute_all_gather", "transport")
_MIXERS = (Convolution, nn.RNNBase)
_WORDS = ("mamba", "rwkv", "recurrent", "deltanet", "linearattention", "shortconv", "indexer", "ngram", "hyena")


class Facts:
    """Facts about a model's forward, from its class, config and modules.

    Attributes:
        text: the text tower, which gets embeddings of tokens and images; None for text models.
        name: the name of the class.
        names: the names of the forward's arguments, in order.
        accepted: these names, and the arguments of the inner forward that gets its keywords.
        causal: whether the model predicts the next token.
        has_loss: whether the forward calls loss_function.
        rotates_by_several: whether positions have several dims (mRoPE); those of text models are equal in all dims.
        counted: the class name of a module that computes positions from tokens, or None.
        layers: the number of layers that mix tokens, by the config, or None.
        attending: the part of the model that mixes rows of the sequence.
        num_mixers: modules that are recurrent or convolutions.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self.name, forward = type(model).__name__, inspect.unwrap(type(model).forward)
        self.names = [name for name in inspect.signature(forward).parameters if name != "self"]
        self.text: nn.Module | None = model.base_model.language_model if has_images(model.config) else None
        inner = inspect.unwrap(type(getattr(model, "base_model", model)).forward)
        self.accepted = {*self.names, *inspect.signature(inner).parameters}
        self.rotates_by_several = self.text is not None and "mrope_section" in _rope(self.text.config)
        self.causal, self.has_loss = self.name.endswith(_CAUSAL), "loss_function" in forward.__code__.co_names
        self.attending = self.text or model
        counts = (
            type(x).__name__ for x in self.attending.modules() if "create_position_ids_from_input_ids" in _used(x)
        )
        self.counted = next(counts, None)
        config = model.config.get_text_config()
        self.layers: int | None = getattr(config, "num_hidden_layers", None)
        self.num_mixers = sum(map(is_mixer, self.attending.modules()))
        if self.layers is not None:
            self.layers -= sum(kind in ALONE for kind in getattr(config, "layer_types", None) or ())


def has_images(config: Any) -> bool:
    """Whether a model is one of `IMAGES`, in a version of Transformers with block masks (blockwise_overlay)."""
    return getattr(config, "model_type", None) in IMAGES and hasattr(masking_utils, "blockwise_overlay")


def check_model(model: nn.Module) -> None:
    """Refuse a model in which a layer mixes rows by anything but attention of AttentionInterface."""
    if not isinstance(model, PreTrainedModel):
        hint = "pass the wrapped model, such as peft_model.base_model.model"
        refuse("parallelize", "a PreTrainedModel", type(model).__name__, hint)
    forward = vars(model).get("forward") or type(model).forward
    if str(forward.__module__).startswith("liger_kernel."):
        hint = "apply Liger with fused_linear_cross_entropy=False; its loss would shift labels within this rank's rows"
        refuse("parallelize", "a forward of Transformers", "Liger's fused_linear_cross_entropy", hint, UnsupportedError)
    check_adapters(model)
    check_config(model.config, type(model).__name__)
    _refuse_first(type(model).__name__, _against_modules(model))


def check_config(config: Any, name: str) -> None:
    """Refuse a model by its config and the name of its class."""
    _refuse_first(name, _against_config(config, name))


def _refuse_first(name: str, reasons: Iterator[tuple[str, str]]) -> None:
    for got, hint in reasons:
        refuse(f"parallelize({name})", "attention alone to mix rows, in every layer", got, hint, UnsupportedError)


def _against_config(config: Any, name: str) -> Iterator[tuple[str, str]]:
    """Yield reasons to refuse a model, with hints."""
    if config.is_encoder_decoder or getattr(config, "add_cross_attention", False):
        yield "attention of a decoder to an encoder", "cross-attention is not available"
    text = config.get_text_config()
    hint = f"use the text model alone; supported models with images: {', '.join(IMAGES)}"
    if not has_images(config):
        if found := [x for x in vars(config) if x.endswith(("vision_config", "audio_config", "vq_config"))]:
            yield f"{found[0]}: images or sounds among the tokens", hint
        if text is not config:
            yield f"a {type(config).__name__}, of more than text", hint
    elif not name.endswith(_CAUSAL[2]):
        yield "a part of a model with images", f"classes named ...{_CAUSAL[2]} are available"
    if found := sorted(set(getattr(text, "layer_types", None) or ()) - KINDS - ALONE):
        yield f"layer_types {', '.join(found)}", f"{', '.join(sorted(KINDS))} are supported"
    if pools := [x for x in ("index_kpool", "indexer_compress_ratio") if hasattr(text, x)]:
        yield f"{pools[0]}: an indexer that pools keys", "documents and shards would have to begin with a pool"
    if not name.endswith(HEADS) and not has_images(config):
        yield "a class whose outputs may not be rows", f"classes named ...{', ...'.join(HEADS)} are available"


def _against_modules(model: PreTrainedModel) -> Iterator[tuple[str, str]]:
    facts, attending = Facts(model), 0
    parts, inside = [*facts.attending.named_modules()], set[nn.Module]()
    if "position_ids" not in facts.accepted and not facts.num_mixers:
        yield "a forward without position_ids, which counts this rank's rows from 0", "this model is not supported"
    kinds = {*(getattr(model.config.get_text_config(), "layer_types", None) or ())}
    if facts.num_mixers and (found := sorted(kinds & {"sliding_attention", "chunked_attention"})):
        yield f"{found[0]} beside recurrent layers or convolutions", "this model is not supported"
    for path, module in parts:
        kind = type(module).__name__
        if is_mixer(module):
            inside.update(module.modules())
            attending += 1
            if unknown := unknown_functions(module):
                hint = "cp_mesh has no such function; this model is not supported"
                yield f"{path}, a {kind} that calls {unknown[0]}", hint
        if module in inside:
            continue
        if why := unknown_core(module):
            yield f"{path}, a {kind} that {why}", "this model is not supported"
        named = any(word in kind.lower() for word in _WORDS) and "norm" not in kind.lower()
        named = named and "ALL_ATTENTION_FUNCTIONS" not in _used(module)
        named = named and not any(map(is_mixer, module.modules())) and not is_indexer(module)
        if isinstance(module, _MIXERS) or named:
            yield f"{path or 'the model'}, a {kind}", "it mixes rows of one shard only; this model is not supported"
        if getattr(module, "layerdrop", 0):
            yield f"layerdrop={module.layerdrop}", "layerdrop=0 in the config: each rank would drop others"
        if path.rpartition(".")[2] == "pooler":
            yield f"{path}, a {kind}", "it reads the first row: pass add_pooling_layer=False"
        attending += "ALL_ATTENTION_FUNCTIONS" in _used(module)
    if facts.layers is None or attending < facts.layers:
        got = f"{attending} modules that mix rows in a known way, and {facts.layers} layers"
        yield got, "the other layers mix tokens by code of their own, or not at all; this model is not supported"


def plan_over_tp(
    facts: Facts, model: PreTrainedModel, tp: DeviceMesh, linears: Mapping[str, Any], gather_output: bool
) -> dict[str, ParallelStyle]:
    """Return the plan of a model's linears over tp, with DTensors between them, since batches may have any length."""
    if unknown := sorted(linears.keys() - set(_LINEARS)):
        refuse("parallelize: linears", f"options among {', '.join(_LINEARS)}", unknown[0], "leave it out")
    if gather_output:
        hint = "sequence_of(model).unshard(output.logits.whole()) returns whole logits"
        refuse("parallelize: gather_output", "False with tp, where logits are not stored", True, hint)
    if found := sorted({*_used(model)} - _PLAIN_HEAD):
        got = f"{', '.join(found)} in its forward"
        hint = "its effect on logits or losses is not known; use a tp plan of Transformers"
        refuse(f"parallelize({facts.name}): tp", "a loss of the logits of lm_head", got, hint, UnsupportedError)
    return tensor_parallel_plan(model, tp, use_local_output=linears.get("mode") == "all_reduce", **linears)


def _used(module: nn.Module) -> tuple[str, ...]:
    """Return the names that the forward of a module's class reads."""
    code = getattr(inspect.unwrap(type(module).forward), "__code__", None)
    return () if code is None else code.co_names


def _rope(config: Any) -> dict[str, Any]:
    return getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}


def check_lengths(config: Any, accepted: set[str], sequence: ShardedSequence, positions: Tensor) -> None:
    """Refuse lengths at which the model's RoPE or temperature would depend on this rank's local length.

    Args:
        config: the config of the text model.
        accepted: as in `Facts`.
        positions: [B or 1, S], positions of the whole batch.
    """
    length = positions.shape[1]
    scale = getattr(config, "floor_scale", None) if getattr(config, "attn_temperature_tuning", False) else None
    if scale and length >= scale and "cache_position" not in accepted:
        hint = "config.attn_temperature_tuning = False, or shorter batches: layers count the rows of a shard"
        refuse("attn_temperature_tuning", f"fewer than {int(scale)} tokens", length, hint, UnsupportedError)
    told, original = _rope(config), "original_max_position_embeddings"
    for rope in (told, *(x for x in told.values() if isinstance(x, dict))):
        kind, known = rope.get("rope_type", rope.get("type")), getattr(config, "max_position_embeddings", 0)
        if kind not in ("dynamic", "longrope"):  # these depend on the largest position beyond a known length
            continue
        if kind == "longrope":
            known = rope.get(original) or getattr(config, original, known)
        longest = _longest(sequence, positions)
        if max(longest) > known and (kind == "dynamic" or min(longest) <= known):
            expected, hint = f"{known} positions at most", f"documents of {known} tokens at most"
            if kind == "dynamic":
                hint += ": in every layout a rank knows only the largest position of its own rows"
            elif min(_longest(replace(sequence, layout=Striped()), positions)) > known:
                hint += "; or layout=Striped(), where every rank has later positions"
            else:
                hint += "; or longer ones" + " in layout=Striped()" * (not isinstance(sequence.layout, Striped))
            expected += ", or more on every rank" * (kind == "longrope")
            refuse(f"rope_type={kind!r}", expected, f"{longest} on the ranks", hint, UnsupportedError)


def _longest(sequence: ShardedSequence, positions: Tensor) -> list[int]:
    """Return the largest position + 1 of each rank, for positions [B or 1, S] of the whole batch."""
    assert sequence.seq_len is not None
    padded, size = F.pad(positions, (0, sequence.seq_len - positions.shape[1])), sequence.cp_size
    rows = (sequence.layout.positions(sequence.seq_len, size, rank) for rank in range(size))
    return [int(padded[:, x.to(padded.device)].max()) + 1 for x in rows]
