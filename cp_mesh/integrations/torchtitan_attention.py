"""Inner attention for the config-based models of torchtitan 0.3, and the overrides that select it.

`cp_mesh.integrations.torchtitan.context_parallel` lists the overrides in ``override.imports``. torchtitan then builds
no masks: a hook of the root makes a `Mask` from the positions, and the blocks pass it on as attention_masks.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import spmd_types as spmd
import torch
from torch import Tensor
from torchtitan.config.override import derive, override
from torchtitan.distributed.activation_checkpoint import SelectiveAC
from torchtitan.models.common.attention import FlexAttention, VarlenAttention
from torchtitan.protocols.module import Module

from cp_mesh.call.function import attention
from cp_mesh.errors import UnsupportedError, refuse
from cp_mesh.geometry.mask import Mask
from cp_mesh.sequence.sharded_sequence import ShardedSequence

KNOWN = frozenset(
    f"torchtitan.models.{name}" for name in ("common.attention.GQAttention", "deepseek_v3.model.Attention")
) | {"torchtitan.models.gpt_oss.model.Attention"}
"""Attention classes whose masks consist of documents and, if in the config, ``sliding_window_size``."""
CAUSAL = (-1, 0)


class MeshAttention(Module):
    """Inner attention of this rank's queries over the whole sequence; see `context_parallel`."""

    @dataclass(kw_only=True, slots=True)
    class Config(Module.Config):
        """``window_size``: as in VarlenAttention; None for FlexAttention, whose config has no mask."""

        window_size: tuple[int, int] | None = None

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.window_size = config.window_size
        self.sequence: ShardedSequence | None = None
        self.options: dict[str, Any] = {}

    def forward(
        self,
        q_BLNH: Tensor,
        k_BLNH: Tensor,
        v_BLNH: Tensor,
        *,
        attention_masks: Mask | None = None,
        scale: float | None = None,
        enable_gqa: bool = False,
        out_transform: Callable[[Tensor, Tensor], Tensor] | None = None,
        **others: Any,
    ) -> Tensor:
        """Attend [B, S_local, heads, head dim]; ``out_transform`` gets the output and its lse [B, S_local, heads].

        Raises:
            ArgumentError: with context_parallel_degree 1, or for another mask than a `Mask`.
            UnsupportedError: for unknown arguments.
        """
        if self.sequence is None:
            hint = "set it, or train with the original config, without context_parallel"
            refuse("parallelism.context_parallel_degree", "2 or more", 1, hint)
        if given := [name for name, x in others.items() if x is not None]:
            refuse("inner_attention", "a mask, a scale and out_transform", given[0], "leave it out", UnsupportedError)
        if not isinstance(attention_masks, Mask):
            hint = "leave the masks to context_parallel"
            refuse("attention_masks", "a Mask", type(attention_masks).__name__, hint)
        sequence = self.sequence
        with spmd.no_typecheck():
            found: Any = attention(
                *(q_BLNH, k_BLNH, v_BLNH),
                mesh=sequence.mesh,
                seq_dim=1,
                layout=attention_masks.layout or sequence.layout,
                mask=attention_masks,
                scale=scale,
                return_lse=out_transform is not None,
                **self.options,
            )
            return found if out_transform is None else out_transform(found[0], found[1].transpose(1, 2))


class MeshSelectiveAC(SelectiveAC):
    """Per-op checkpointing that saves the output of cp_mesh attention, as that of torchtitan's attention."""

    @dataclass(kw_only=True, slots=True)
    class Config(SelectiveAC.Config):
        pass

    def get_save_ops(self) -> set[Any]:
        return {*super().get_save_ops(), torch.ops.cp_mesh.attention.default}


@override(target=FlexAttention.Config, exact=True, description="attention of cp_mesh")
def flex(config: Any) -> MeshAttention.Config:
    return _config(config, None)


@override(target=VarlenAttention.Config, exact=True, description="attention of cp_mesh")
def varlen(config: Any) -> MeshAttention.Config:
    return _config(config, config.window_size)


@override(target=SelectiveAC.Config, exact=True, description="keep the attention of cp_mesh")
def selective(config: Any) -> MeshSelectiveAC.Config:
    return derive(config, MeshSelectiveAC.Config)


def _config(config: Any, window_size: tuple[int, int] | None) -> MeshAttention.Config:
    """Return the config of `MeshAttention`, with keys sharded over cp, which torchtitan would gather."""
    sharding = config.sharding_config
    if sharding is not None:
        sources = sharding.in_src_shardings
        local_map = replace(sharding.local_map, in_grad_placements=tuple(sources.values()))
        sharding = replace(sharding, in_dst_shardings=sources, local_map=local_map)
    return MeshAttention.Config(sharding_config=sharding, window_size=window_size)


def prepare(model: Any, sequence: ShardedSequence, options: dict[str, Any]) -> dict[str | None, int | None]:
    """Set the sequence and options of a model's attention modules.

    Returns:
        The window of each kind of layer, by the key with which its blocks look up their mask; without keys, by None.

    Raises:
        UnsupportedError: for unknown attention, and for a window_size that differs from the layer's window.
    """
    windows: dict[str | None, int | None] = {}
    if not hasattr(model, "layers"):
        hint = "use llama3, qwen3, deepseek_v3 or gpt_oss"
        refuse("model", "a Decoder of torchtitan", type(model).__name__, hint, UnsupportedError)
    for name, block in model.layers.items():
        outer = block.attention
        kind = f"{type(outer).__module__}.{type(outer).__qualname__}"
        core = getattr(outer, "inner_attention", None)
        if kind not in KNOWN or not isinstance(core, MeshAttention):
            got = f"{kind} with {type(core).__name__}"
            hint = "use attn_backend='flex' of llama3, qwen3, deepseek_v3 or gpt_oss"
            refuse(f"layers.{name}.attention", "a known attention class", got, hint, UnsupportedError)
        window = getattr(model.config.layers[int(name)].attention, "sliding_window_size", None)
        stated = CAUSAL if window is None else (window - 1, 0)
        if core.window_size not in (None, stated):
            hint = "set the window as the layer's sliding_window_size"
            refuse(f"layers.{name}: window_size", stated, core.window_size, hint, UnsupportedError)
        windows[getattr(block, "attn_mask_key", None)] = window
        core.sequence, core.options = sequence, options
    return windows
