"""MLA layers (DeepSeek-V2 and V3, Kimi, LongCat, ...) whose latent travels in place of all heads' keys and values.

Each of these families expands the latent by a method of one text, `expand_kv`, and gives its results to attention as
they are. In a layer that is told to, the method passes latent and rotary keys on, and attention expands them.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from cp_mesh._torch import hooks_of_module
from cp_mesh.call.function import attention
from cp_mesh.errors import UnsupportedError, refuse
from cp_mesh.latent.function import latent_attention

_EXPAND = "expand_kv"
_HINT = "apply adapters and hooks before parallelize, and FSDP2 to whole layers, or pass latent_keys=False"


def _known(self: Any, kv_nope: Any, k_rot: Any) -> Any:
    """The text of `expand_kv`, with which a layer's is compared; it does not run."""
    batch_size, _, seq_length, _ = kv_nope.shape
    key_shape = (batch_size, seq_length, -1, self.qk_nope_head_dim + self.v_head_dim)
    kv_nope = self.kv_b_proj(kv_nope).view(key_shape).transpose(1, 2)
    k_nope, value_states = torch.split(kv_nope, [self.qk_nope_head_dim, self.v_head_dim], dim=-1)
    k_rot = k_rot.expand(-1, k_nope.shape[1], -1, -1)
    key_states = kv_nope.new_empty(*kv_nope.shape[:-1], self.qk_nope_head_dim + self.qk_rope_head_dim)
    key_states[..., : self.qk_nope_head_dim].copy_(k_nope)
    key_states[..., self.qk_nope_head_dim :].copy_(k_rot)
    return key_states, value_states


def _as_latent(latent: Tensor, rope: Tensor) -> tuple[Tensor, Tensor]:
    """Stands in for `expand_kv` of a layer, also of its copies: it is not bound. Only a parallel root runs these."""
    return latent, rope


def expands_latents(module: nn.Module) -> bool:
    """Whether a layer's forward and `expand_kv` are those of Transformers, and the latter's text is the known one."""
    owners = [next((x for x in type(module).__mro__ if name in vars(x)), object) for name in (_EXPAND, "forward")]
    own = vars(owners[0]).get(_EXPAND)
    return _text(own) == _text(_known) and all(
        x.__module__.startswith("transformers.models.") for x in (*owners, own, vars(owners[1])["forward"])
    )


def _text(function: Any) -> tuple[Any, ...]:
    code = getattr(function, "__code__", None)
    return () if code is None else (code.co_code, code.co_names, code.co_consts[1:])  # behind the docstring


def beside_product(linear: Any, *weights: type) -> str | None:
    """What a projection has beside the product with its weight, which may be of other types; None if nothing."""
    if type(linear) is not nn.Linear or linear.bias is not None:
        return type(linear).__name__ + " with a bias" * (getattr(linear, "bias", None) is not None)
    if type(linear.weight) not in (nn.Parameter, Tensor, *weights):
        return f"a weight that is a {type(linear.weight).__name__}"
    if "forward" in vars(linear):
        return "a forward of its own"
    hooks = [getattr(hook, "func", hook) for kind in hooks_of_module(linear) for hook in kind.values()]
    others = [hook for hook in hooks if not str(getattr(hook, "__module__", "")).startswith("cp_mesh.")]
    return f"a hook, {others[0]}" if others else None  # hooks of cp_mesh only watch


def leave_latents(model: nn.Module, degree: int, wanted: bool | None, counts: bool) -> str:
    """Let the latent travel in the MLA layers of a model: in all, in none, or where that moves fewer numbers.

    A layer whose projection is more than a product (adapters, quantization, hooks, tensor parallelism) sends keys and
    values. In layers that attend to keys that an indexer picked the latent always travels.

    Args:
        degree: ranks that exchange heads, to each of which the latent is sent; 1 for a ring.
        wanted: True, False, or None to count numbers if ``counts``.

    Returns:
        Which of the layers with a latent send it, for a comparison over the ranks.
    """
    if not isinstance(wanted, bool | None):
        refuse("parallelize: latent_keys", "True, False or None", wanted, "leave it out")
    sent, layers = list[int](), list[Any](part for part in model.modules() if expands_latents(part))
    for i, layer in enumerate(layers):
        picks = "indexer" in inspect.unwrap(type(layer).forward).__code__.co_names
        latent = layer.kv_b_proj.in_features + layer.qk_rope_head_dim
        expanded = layer.kv_b_proj.out_features + layer.num_heads * layer.qk_rope_head_dim
        fewer = wanted is None and counts and degree * latent < expanded
        if beside_product(layer.kv_b_proj) is None and (picks or wanted or fewer):
            vars(layer)[_EXPAND] = _as_latent
            sent.append(i)
    if wanted and not sent:
        expected = "a model that has layers with MLA whose kv_b_proj is a plain linear"
        refuse("parallelize: latent_keys=True", expected, type(model).__name__, "leave it out")
    return f"{sent} of {len(layers)}"


def check_latents(model: nn.Module) -> None:
    """Refuse a projection that `leave_latents` found plain and that is not now: it would be skipped."""
    for layer in model.modules():
        if vars(layer).get(_EXPAND) is _as_latent and (more := beside_product(layer.kv_b_proj, DTensor)):
            where = f"{type(layer).__name__} of layer {getattr(layer, 'layer_idx', None)}: kv_b_proj"
            refuse(where, "a plain linear, since the layer sends its latent", more, _HINT, UnsupportedError)


def attention_of(module: Any, *qkv: Tensor) -> tuple[Callable[..., Any], tuple[Tensor, ...]]:
    """The function that attends, and its tensors: for a layer whose latent travels, with its up-projection."""
    if vars(module).get(_EXPAND) is not _as_latent:
        return attention, qkv
    query, latent, rope = qkv
    return latent_attention, (query, latent, rope.to(latent.dtype), module.kv_b_proj.weight)
