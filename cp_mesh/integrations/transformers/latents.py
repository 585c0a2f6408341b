"""MLA layers (DeepSeek-V2 and V3, Kimi, LongCat, ...) whose latent travels in place of all heads' keys and values.

Each of these families expands the latent by a method of one text, `expand_kv`, and gives its results to attention as
they are. In a layer that is told to, the method passes latent and rotary keys on, and attention expands them.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from cp_mesh._torch import has_forward_hooks
from cp_mesh.call.function import attention
from cp_mesh.latent.function import latent_attention

_EXPAND = "expand_kv"
_READS = frozenset(
    (
        *("kv_b_proj", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim", "torch", "split"),
        *("shape", "view", "transpose", "expand", "new_empty", "copy_"),
    )
)
"""All names that the known method reads."""


def _as_latent(latent: Tensor, rope: Tensor) -> tuple[Tensor, Tensor]:
    """Stands in for `expand_kv` of a layer. Not bound to it, so that copies of the layer have it too."""
    return latent, rope


def expands_latents(module: nn.Module) -> bool:
    """Whether a layer has the known method."""
    code = getattr(getattr(type(module), _EXPAND, None), "__code__", None)
    return code is not None and {*code.co_names} == _READS


def is_plain(linear: Any) -> bool:
    """Whether a projection is a product with its weight, and nothing more."""
    known = type(linear) is nn.Linear and linear.bias is None and not isinstance(linear.weight, DTensor)
    return known and not has_forward_hooks(linear)


def leave_latents(model: nn.Module, degree: int, wanted: bool | None) -> None:
    """Let the latent travel in the MLA layers of a model: in all, in none, or where that moves fewer numbers.

    In layers that attend to keys that an indexer picked it always does.

    Args:
        degree: ranks that exchange heads, to each of which the latent is sent; 1 for a ring.
        wanted: True, False, or None to count numbers.
    """
    for part in model.modules():
        if not expands_latents(part):
            continue
        layer: Any = part
        picks = "indexer" in inspect.unwrap(type(part).forward).__code__.co_names
        latent = layer.kv_b_proj.in_features + layer.qk_rope_head_dim
        expanded = layer.kv_b_proj.out_features + layer.num_heads * layer.qk_rope_head_dim
        if picks or wanted or (wanted is None and degree * latent < expanded):
            vars(part)[_EXPAND] = _as_latent


def attention_of(module: Any, *qkv: Tensor) -> tuple[Callable[..., Any], tuple[Tensor, ...]]:
    """The function that attends, and its tensors: for a layer whose latent travels, with its up-projection.

    A projection that is more than a product with a plain weight (adapters, quantization, hooks, tensor parallelism,
    FSDP2 of this linear alone) is called as ever, and keys and values travel.
    """
    if vars(module).get(_EXPAND) is not _as_latent:
        return attention, qkv
    (query, latent, rope), linear = qkv, module.kv_b_proj
    if not is_plain(linear):
        return attention, (query, *getattr(type(module), _EXPAND)(module, latent, rope))
    return latent_attention, (query, latent, rope.to(latent.dtype), linear.weight)
