"""Recurrent layers and convolutions of Transformers' hybrids: `RecurrentParallel` with the batch of the model.

Its mask comes as attention_mask, a `BatchAttention`, which layers hand on; so layers that are recomputed see the same.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import partial
from types import FunctionType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.activations import ACT2FN

from cp_mesh._torch import apply_style, untraced
from cp_mesh.errors import UnsupportedError, refuse
from cp_mesh.geometry.mask import Mask
from cp_mesh.integrations.transformers.masks import BatchAttention
from cp_mesh.mixers.rules import gla
from cp_mesh.sequence.sharded_sequence import ShardedSequence
from cp_mesh.training.foreign_functions import FUNCTIONS as OF_ALL
from cp_mesh.training.foreign_functions import names_read, of_channels_first, with_names
from cp_mesh.training.recurrent_parallel import RecurrentParallel
from cp_mesh.wrap import INPUT, replace_forward

LIGHTNING = "MiniMaxLightningAttention"
"""A class that computes its recurrence inline."""
_OF_ONE_TOKEN = {
    *("causal_conv1d_update", "torch_recurrent_gated_delta_rule", "recurrent_kimi_delta_attention"),
    "mamba2_selective_state_update",
}
"""What modules call with a cache alone, which a parallel model has not."""


def _convolution(x: Tensor, weight: Tensor, bias: Any = None, activation: str | None = None) -> Tensor:
    out = of_channels_first(x, weight, bias)
    return out if activation is None else ACT2FN[activation](out)


FUNCTIONS: dict[str, Callable[..., Any]] = OF_ALL | {
    "causal_conv1d_fn": _convolution,
    "mamba2_split_conv1d_scan_combined": lambda: None,  # a kernel of the shard alone
    # padding is in no document; in Transformers, biases of padding on the left reach the tokens behind it
    "apply_mask_to_padding_states": lambda x: x,
}
"""What stands for functions of Transformers."""
_MAIN = FUNCTIONS.keys() - {"apply_mask_to_padding_states"}
_RULES = _MAIN - {"causal_conv1d_fn", "mamba2_split_conv1d_scan_combined"}


def _names(module: nn.Module) -> frozenset[str]:
    """Globals that a module's forward reads, as its class wrote it; attributes of these names are not replaced."""
    code = getattr(_own_forward(module), "__code__", None)
    return frozenset() if code is None else names_read(code)


def is_mixer(module: nn.Module) -> bool:
    """Whether this mixes rows by functions that are replaced."""
    return type(module).__name__ == LIGHTNING or bool(_MAIN.intersection(_names(module)))


def unknown_functions(module: nn.Module) -> list[str]:
    """Functions of its file that a mixer calls and that are not replaced."""
    own, forward = type(module), inspect.unwrap(type(module).forward)
    found = (name for name in _names(module) if inspect.isfunction(forward.__globals__.get(name)))
    of_file = {name for name in found if forward.__globals__[name].__module__ == own.__module__}
    has_rule = not hasattr(module, "A_log") or _RULES.intersection(_names(module))
    unknown = sorted(of_file - FUNCTIONS.keys() - _OF_ONE_TOKEN)
    return unknown if unknown or has_rule else ["no function for its recurrence"]


def apply(model: nn.Module, sequence: ShardedSequence) -> None:
    """Let the mixers of a model run over the sequence of the batch."""
    style = RecurrentLayers(sequence, mask=mask_of)
    for module in model.modules():
        if is_mixer(module):
            apply_style(style, module, sequence.mesh)
        elif "create_recurrent_attention_mask" in _names(module) and not _takes_masks(module):
            replace_forward(module, INPUT, "cp_mesh.integrations.transformers.parallelize", style.run_with_mask)


def masks_of_layers(model: nn.Module, attention: BatchAttention) -> Any:
    """The attention_mask of a model with mixers: one for each kind of layer, as most take them, or the mask itself."""
    kinds = ("full_attention", "linear_attention", "conv")
    return dict.fromkeys(kinds, attention) if any(map(_takes_masks, model.modules())) else attention


def _takes_masks(module: nn.Module) -> bool:
    """Whether a model takes masks that were made before."""
    code = getattr(_own_forward(module), "__code__", None)
    return code is not None and "causal_mask_mapping" in code.co_varnames


def _own_forward(module: nn.Module) -> FunctionType:
    own: Any = inspect.unwrap(type(module).forward)
    return own


def mask_of(*args: Any, **kwargs: Any) -> Mask:
    """The mask of the batch, among the arguments of a layer."""
    found = [x.mask for x in (*args, *kwargs.values()) if isinstance(x, BatchAttention)]
    if not found:
        hint = "call the parallel model, with attention_mask [B, S] or none"
        refuse("Transformers: recurrent layers", "the mask of the batch", "none", hint, UnsupportedError)
    return found[0]


class RecurrentLayers(RecurrentParallel):
    """The style of recurrent layers of Transformers."""

    functions = FUNCTIONS
    strict = False  # layers hand on arguments of the model, which `inputs` has read

    @untraced
    def run_with_mask(self, module: nn.Module, forward: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        """The forward of a model that has recurrent layers alone."""
        own = _own_forward(module)
        others = {"create_recurrent_attention_mask": lambda attention_mask, **_: attention_mask}
        return with_names(own, own.__globals__ | others)(module, *args, **kwargs)

    def _own(self, module: nn.Module, forward: Callable[..., Any]) -> Callable[..., Any]:
        return partial(_lightning, module) if type(module).__name__ == LIGHTNING else super()._own(module, forward)


def _lightning(module: Any, hidden_states: Tensor, *_: Any, **__: Any) -> tuple[Tensor, None]:
    """Lightning attention: a decay for each head, the same for all tokens."""
    states = module.act_fn(module.qkv_proj(hidden_states)).unflatten(-1, (-1, 3 * module.head_dim))
    q, k, v = states.split(module.head_dim, -1)
    g = -module.slope_rate.view(-1).to(torch.promote_types(q.dtype, torch.float32)).expand(q.shape[:3])
    gated = F.sigmoid(module.output_gate(hidden_states)) * module.norm(gla(q, k, v, g, scale=1.0)[0].flatten(2))
    return module.out_proj(gated), None
