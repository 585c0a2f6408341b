"""Attention settings of a module (window, chunks, softcap, sinks), compared with its style; adapters of PEFT.

`F.scaled_dot_product_attention` has no arguments for them: models hold them in attributes or in a config, and build a
mask tensor or call another kernel. In a core only the settings of the style have an effect.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from torch import Tensor, nn

from cp_mesh.errors import UnsupportedError, refuse
from cp_mesh.geometry.mask import Mask

_WINDOWS = ("sliding_window", "window_size", "attention_window")
_CHUNKS = ("attention_chunk_size",)
_ADAPTERS = ("LORA", "BOFT", "FOURIERFT", "HRA", "IA3", "LN_TUNING", "LOHA", "LOKR", "MISS", "VERA")
_WHOLE = {"alora_invocation_tokens": "ALORA", "velora_config": "VELORA"}  # of LORA: reads whole rows
_SOFTCAPS = ("attn_logit_softcapping", "attn_softcap", "logits_soft_cap", "softcap")


class StatedReach(NamedTuple):
    """The number of keys that queries see, by the settings of a module. 0: all."""

    window: float
    chunk: float


def stated_reach(module: nn.Module) -> StatedReach:
    """Read window and chunk size from the module's attributes or its config, under the names of Transformers."""
    window, chunk = _own_number(module, _WINDOWS), _own_number(module, _CHUNKS)
    config = getattr(module, "config", None)
    if config is None:
        return StatedReach(window or 0, chunk or 0)
    kinds, layer = getattr(config, "layer_types", None), getattr(module, "layer_idx", None)
    kind = kinds[layer] if kinds and isinstance(layer, int) and layer < len(kinds) else None
    if window is None and (kind == "sliding_attention" if kinds else getattr(config, "use_sliding_window", True)):
        window = _own_number(config, ("sliding_window",))
    if chunk is None and kind == "chunked_attention":
        chunk = _own_number(config, ("attention_chunk_size",))
    return StatedReach(window or 0, chunk or 0)


def _own_number(owner: Any, names: tuple[str, ...]) -> Any:
    """Return the first attribute with one of these names, 0 if it is no positive number; None if there is none."""
    for name in names:
        if hasattr(owner, name):
            found = getattr(owner, name)
            return found if type(found) in (int, float) and found > 0 else 0
    return None


def check_reach(name: str, reach: StatedReach, mask: Mask, seq_len: int) -> None:
    """Refuse a mask without the window or chunks of its module, if the sequence is longer than these."""
    if 0 < reach.window < seq_len and (mask.window is None or mask.window[0] not in (reach.window - 1, reach.window)):
        hint = f"ContextParallel(sequence, mask=Mask(window=({reach.window - 1}, 0)))"
        got = "a mask without a window" if mask.window is None else f"window={mask.window}"
        refuse(f"ContextParallel({name})", f"the module's window of {reach.window} keys", got, hint)
    if 0 < reach.chunk < seq_len and mask.documents is None:
        hint = f"chunks are documents: mask=Mask(documents=positions // {reach.chunk})"
        refuse(f"ContextParallel({name})", f"the module's chunks of {reach.chunk} keys", "a mask without them", hint)


def check_scores_stated(module: nn.Module, scores: Mapping[str, Any]) -> None:
    """Refuse score options without the softcap, sinks or slopes that the module holds."""
    name, config = f"ContextParallel({type(module).__name__})", getattr(module, "config", None)
    softcap = _own_number(module, _SOFTCAPS)
    if softcap is None and config is not None:
        softcap = _own_number(config, _SOFTCAPS[:1])
    if softcap and scores.get("softcap") != softcap:
        hint = f'ContextParallel(sequence, scores={{"softcap": {softcap}}})'
        refuse(name, f"the module's softcap of {softcap}", scores.get("softcap"), hint)
    for term in ("sinks", "alibi_slopes"):
        if isinstance(getattr(module, term, None), Tensor) and term not in scores:
            hint = f'ContextParallel(sequence, scores=lambda core, *_, **__: {{"{term}": core.{term}}})'
            refuse(name, f"the module's {term} in scores", [*scores] or "none", hint)


def check_mask_read(module: nn.Module, mask: Mask, given: tuple[Any, ...]) -> None:
    """Refuse a `Mask` among a core's arguments if its style has another, fixed mask."""
    for x in given:
        if isinstance(x, Mask) and x is not mask and x != mask:
            what, hint = f"ContextParallel({type(module).__name__})", "mask=lambda q, k, v, mask: mask reads it"
            refuse(what, "a style that reads the Mask in the core's arguments", "mask=Mask(...)", hint)


def check_adapters(model: nn.Module) -> None:
    """Refuse adapters of PEFT, unless each token is adapted alone and the loss stays as it is."""
    for module in model.modules():
        found = getattr(module, "peft_config", None)
        for adapter in found.values() if isinstance(found, Mapping) else ():
            kinds = [name for field, name in _WHOLE.items() if getattr(adapter, field, None)]
            if (kind := [*kinds, adapter.peft_type.value][0]) not in _ADAPTERS:
                hint = "others may read the whole sequence, or add a loss"
                refuse("peft_config", f"adapters among {', '.join(_ADAPTERS)}", kind, hint, UnsupportedError)
