"""Recurrent layers and convolutions of Transformers' hybrids: their modules run with other functions.

The modules call functions of their file by name, such as ``torch_chunk_gated_delta_rule``. A planned module runs the
same code with names of its own, so nothing changes for other models. The batch comes as attention_mask, a `Rows`, which
layers hand on; so layers that are recomputed see the same one.
"""

from __future__ import annotations

import dis
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache, partial
from types import CodeType, FunctionType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.activations import ACT2FN

from cp_mesh._torch import untraced
from cp_mesh.errors import UnsupportedError, refuse
from cp_mesh.integrations.transformers.masks import Batch, Rows
from cp_mesh.mixers.rules import causal_conv1d, gated_delta_rule, gla, kda, ssd
from cp_mesh.sequence.sharded_sequence import ShardedSequence
from cp_mesh.wrap import INPUT, STYLE, replace_forward

LIGHTNING = "MiniMaxLightningAttention"
"""A class that computes its recurrence inline."""
_OF_ONE_TOKEN = {
    *("causal_conv1d_update", "torch_recurrent_gated_delta_rule", "recurrent_kimi_delta_attention"),
    "mamba2_selective_state_update",
}
"""What modules call with a cache alone, which a parallel model has not."""


def _no_state(given: Tensor | None, returned: bool) -> None:
    if given is not None or returned:
        refuse("Transformers", "a model without a cache", "a state of a cache", "pass use_cache=False")


def _convolution(
    rows: Rows, hidden_states: Tensor, weight: Tensor, bias: Any = None, activation: str | None = None, **_: Any
) -> Tensor:
    x = hidden_states.transpose(1, 2).to(weight.dtype)
    out = causal_conv1d(x, weight, bias, sequence=rows.sequence, mask=rows.mask)
    return (out if activation is None else ACT2FN[activation](out)).to(hidden_states.dtype).transpose(1, 2)


def _delta(
    rule: Callable[..., Any],
    rows: Rows,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    g: Tensor,
    beta: Tensor,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    **_: Any,
) -> tuple[Tensor, None]:
    _no_state(initial_state, output_final_state)
    options: dict[str, Any] = {"sequence": rows.sequence, "mask": rows.mask}
    out, _state = rule(query, key, value, g, beta, use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel, **options)
    return out, None


def _scan(
    rows: Rows,
    hidden_states: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None = None,
    dt_bias: Tensor | None = None,
    initial_states: Tensor | None = None,
    dt_softplus: bool = False,
    dt_limit: tuple[float, float] = (0.0, float("inf")),
    return_final_states: bool = False,
    **_: Any,
) -> Tensor:
    _no_state(initial_states, return_final_states)
    dt = dt if dt_bias is None else dt + dt_bias.to(dt.dtype)
    dt = (F.softplus(dt) if dt_softplus else dt).clamp(*dt_limit)
    wide = torch.promote_types(hidden_states.dtype, torch.float32)  # as in Transformers
    x, dt, B, C = (x.to(wide) for x in (hidden_states, dt, B, C))
    return ssd(x, dt, A, B, C, D=D, sequence=rows.sequence, mask=rows.mask)[0]


FUNCTIONS: dict[str, Callable[..., Any]] = {
    "causal_conv1d_fn": _convolution,
    "torch_chunk_gated_delta_rule": partial(_delta, gated_delta_rule),
    "chunk_kimi_delta_attention": partial(_delta, kda),
    "mamba2_chunk_scan": _scan,
    "mamba2_split_conv1d_scan_combined": lambda rows, *args, **kwargs: None,  # a kernel of the shard alone
    "apply_mask_to_padding_states": lambda rows, hidden_states, mask: hidden_states,  # padding is in no document
}
"""What takes the place of functions of Transformers; each is given the batch first."""
_MAIN = FUNCTIONS.keys() - {"apply_mask_to_padding_states"}
_RULES = _MAIN - {"causal_conv1d_fn", "mamba2_split_conv1d_scan_combined"}


def _names(module: nn.Module) -> tuple[str, ...]:
    """Globals that a module's forward reads, as its class wrote it; attributes of these names are not replaced."""
    return _globals_in(getattr(_own_forward(module), "__code__", None))


@lru_cache(maxsize=1024)
def _globals_in(code: CodeType | None) -> tuple[str, ...]:
    return () if code is None else tuple(x.argval for x in dis.get_instructions(code) if x.opname == "LOAD_GLOBAL")


def is_mixer(module: nn.Module) -> bool:
    """Whether this mixes rows by functions that are replaced."""
    return type(module).__name__ == LIGHTNING or bool(_MAIN.intersection(_names(module)))


def unknown_functions(module: nn.Module) -> list[str]:
    """Functions of its file that a mixer calls and that are not replaced."""
    if hasattr(module, "A_log") and not _RULES.intersection(_names(module)):
        return ["no function for its recurrence"]
    own, forward = type(module), inspect.unwrap(type(module).forward)
    found = (name for name in _names(module) if inspect.isfunction(forward.__globals__.get(name)))
    of_file = [name for name in found if forward.__globals__[name].__module__ == own.__module__]
    return sorted({*of_file} - FUNCTIONS.keys() - _OF_ONE_TOKEN)


def apply(model: nn.Module, sequence: ShardedSequence) -> None:
    """Let the mixers of a model run over the sequence of the batch."""
    style = _Mixers(sequence)
    for module in model.modules():
        if is_mixer(module):
            replace_forward(module, STYLE, "cp_mesh.integrations.transformers.parallelize", style.run)
        elif "create_recurrent_attention_mask" in _names(module) and not _takes_masks(module):
            replace_forward(module, INPUT, "cp_mesh.integrations.transformers.parallelize", style.run_with_mask)


def masks_of_layers(model: nn.Module, rows: Rows) -> Any:
    """The attention_mask of a model with mixers: one for each kind of layer, as most take them, or the mask itself."""
    kinds = ("full_attention", "linear_attention", "conv")
    return dict.fromkeys(kinds, rows) if any(map(_takes_masks, model.modules())) else rows


def _takes_masks(module: nn.Module) -> bool:
    """Whether a model takes masks that were made before."""
    code = getattr(_own_forward(module), "__code__", None)
    return code is not None and "causal_mask_mapping" in code.co_varnames


def _own_forward(module: nn.Module) -> FunctionType:
    own: Any = inspect.unwrap(type(module).forward)
    return own


def _with(own: FunctionType, **others: Any) -> FunctionType:
    """The function with other functions for some of its file."""
    made = FunctionType(own.__code__, own.__globals__ | others, own.__name__, own.__defaults__, own.__closure__)
    made.__kwdefaults__ = own.__kwdefaults__
    return made


@dataclass(eq=False)
class _Mixers:
    """What recurrent layers of a parallel model run instead of their forwards."""

    sequence: ShardedSequence

    @untraced
    def run_with_mask(self, module: nn.Module, forward: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        """The forward of a model that has recurrent layers alone."""
        own = _with(_own_forward(module), create_recurrent_attention_mask=lambda attention_mask, **_: attention_mask)
        return own(module, *args, **kwargs)

    @untraced
    def run(self, module: nn.Module, forward: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        own = _own_forward(module)
        given = inspect.signature(own).bind(module, *args, **kwargs).arguments
        rows = given.get("attention_mask")
        if not isinstance(rows, Rows):
            hint = "call the parallel model, with attention_mask [B, S] or none"
            refuse(type(module).__name__, "the mask of the batch", type(rows).__name__, hint, UnsupportedError)
        if (batch := Batch.now()) is not None:
            batch.cores += 1
        if type(module).__name__ == LIGHTNING:
            return _lightning(module, given["hidden_states"], rows)
        of_batch = {name: partial(function, rows) for name, function in FUNCTIONS.items()}
        return _with(own, **of_batch)(module, *args, **kwargs)


def _lightning(module: Any, hidden_states: Tensor, rows: Rows) -> tuple[Tensor, None]:
    """Lightning attention: a decay for each head, the same for all tokens."""
    states = module.act_fn(module.qkv_proj(hidden_states)).unflatten(-1, (-1, 3 * module.head_dim))
    q, k, v = states.split(module.head_dim, -1)
    g = -module.slope_rate.view(-1).to(torch.promote_types(q.dtype, torch.float32)).expand(q.shape[:3])
    out, _ = gla(q, k, v, g, scale=1.0, sequence=rows.sequence, mask=rows.mask)
    gated = F.sigmoid(module.output_gate(hidden_states)) * module.norm(out.flatten(2))
    return module.out_proj(gated), None
