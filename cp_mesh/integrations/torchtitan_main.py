"""Inner attention for the interface of torchtitan's main branch: varlen attention of packed tokens, [T, H, D].

It is written against the unreleased pytorch/torchtitan at 1bef8b42. A transform of the configuration replaces
VarlenInnerAttention with it, ``ContextParallelTransform(inner_attention_map={VarlenInnerAttention:
MeshVarlenInnerAttention})``, and the trainer calls `prepare_cp_metadata` for each batch. It is tested against a copy of
that interface, not with that Trainer.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import spmd_types as spmd
import torch
from torch import Tensor
from torchtitan.distributed.parallelism_context import MeshAxisName
from torchtitan.distributed.spmd_types import spmd_mesh_group
from torchtitan.models.common.attention.attention import VarlenAttentionMetadata, VarlenInnerAttention
from torchtitan.models.common.attention.cp_attention import CPAttention

from cp_mesh.call.function import attention
from cp_mesh.call.methods import choose_method
from cp_mesh.call.spec import settle
from cp_mesh.errors import UnsupportedError, refuse
from cp_mesh.geometry.layouts import Contiguous, Layout, Permuted, ZigZag
from cp_mesh.geometry.mask import Mask

_TOKENS, _HEADS = ("dp", "cp"), "tp"


@dataclass(frozen=True)
class MeshVarlenMetadata:
    """Metadata of one batch for attention, equal on every rank.

    Attributes:
        layout: the layout of the packed tokens over the cp ranks.
        documents: int64 [T], document ids of the whole sequence in original order.
    """

    layout: Layout
    documents: Tensor

    def annotate_spmd_types(self) -> None:
        """Do nothing, since every rank reads the same documents."""


class MeshVarlenInnerAttention(CPAttention, VarlenInnerAttention):
    """VarlenInnerAttention of tokens that are sharded over cp in any permutation, without gathering all keys."""

    @dataclass(kw_only=True, slots=True)
    class Config(CPAttention.Config, VarlenInnerAttention.Config):
        """``method``, ``kernel``, ``transport``: as in `cp_mesh.attention`."""

        method: str = "auto"
        kernel: str = "auto"
        transport: str = "auto"

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        left, right = config.window_size
        if left < -1 or (right != 0 and (left, right) != (-1, -1)):
            hint = "(-1, 0) is causal, (n, 0) a causal window, (-1, -1) full attention"
            refuse("window_size", "a causal window, or none", config.window_size, hint, UnsupportedError)
        self.window = None if left < 0 else (left, 0)
        self.causal = right == 0
        self.options = {name: getattr(config, name) for name in ("method", "kernel", "transport")}
        settle(**self.options)
        choose_method(config.method)

    @staticmethod
    def prepare_cp_metadata(
        attention_metadata: VarlenAttentionMetadata, *, permutation: Tensor | None
    ) -> MeshVarlenMetadata:
        """Return the layout and documents of a batch.

        Args:
            attention_metadata: metadata of the whole sequence, with the same documents for queries and keys.
            permutation: [1, T], applied to the tokens before they were split into equal parts; None: no permutation.

        Raises:
            ArgumentError, UnsupportedError: if queries and keys differ in documents, or ``permutation`` is not [1, T].
        """
        ends = attention_metadata.cu_seq_q
        if attention_metadata.cu_seq_k is not ends and not torch.equal(attention_metadata.cu_seq_k, ends):
            hint = "cross-attention is not available"
            refuse("VarlenAttentionMetadata", "cu_seq_k equal to cu_seq_q", "another", hint, UnsupportedError)
        documents = Mask.from_cu_seqlens(ends.cpu()).documents
        assert documents is not None
        return MeshVarlenMetadata(_layout(permutation, documents.numel()), documents)

    def forward(
        self,
        q_THK: Tensor,
        k_THK: Tensor,
        v_THV: Tensor,
        *,
        attention_metadata: MeshVarlenMetadata,
        scale: float | None = None,
        out_transform: Callable[[Tensor, Tensor], Tensor] | None = None,
        enable_gqa: bool = False,
        **others: Any,
    ) -> Tensor:
        """Attend this rank's tokens, [T_local, H, D]; ``out_transform`` gets the output and its lse [T_local, H].

        Raises:
            ArgumentError: without a cp axis, or for metadata that `prepare_cp_metadata` did not make.
            UnsupportedError: for unknown arguments.
        """
        if given := [name for name, x in others.items() if x is not None]:
            refuse("inner attention", "metadata, a scale and out_transform", given[0], "leave it out", UnsupportedError)
        if not isinstance(attention_metadata, MeshVarlenMetadata):
            got = type(attention_metadata).__name__
            refuse("attention_metadata", "MeshVarlenMetadata", got, "map VarlenInnerAttention to this class")
        group = spmd_mesh_group(MeshAxisName.CP)
        if group is None:
            refuse("MeshVarlenInnerAttention", "a cp axis of 2 or more ranks", None, "leave the transform out")
        mask = Mask(causal=self.causal, window=self.window, documents=attention_metadata.documents)
        asked = {"mesh": group, "seq_dim": 0, "layout": attention_metadata.layout, "mask": mask, "scale": scale}
        if out_transform is None:
            return _attention(q_THK, k_THK, v_THV, **asked, **self.options)
        out, lse = _attention_with_lse(q_THK, k_THK, v_THV, **asked, **self.options)
        return out_transform(out, lse.transpose(0, 1))


def _layout(permutation: Tensor | None, length: int) -> Layout:
    """Return the layout of permuted and split tokens. `ZigZag` and `Contiguous` are recognized: they run faster."""
    if permutation is None:
        return Contiguous()
    if permutation.ndim != 2 or permutation.shape[0] != 1 or permutation.shape[1] != length:
        got = list(permutation.shape)
        refuse("permutation", f"[1, {length}], of packed tokens", got, "a load balancer for [T, H, D]")
    group = spmd_mesh_group(MeshAxisName.CP)
    index = permutation[0].cpu()
    if group is not None and torch.equal(index, ZigZag().permutation(length, group.size())):
        return ZigZag()
    return Permuted(index)


@spmd.no_typecheck(out_types=spmd.PartitionSpec(_TOKENS, _HEADS, None))
def _attention(*args: Any, **asked: Any) -> Any:
    return attention(*args, **asked)


@spmd.no_typecheck(out_types=(spmd.PartitionSpec(_TOKENS, _HEADS, None), spmd.PartitionSpec(_HEADS, _TOKENS)))
def _attention_with_lse(*args: Any, **asked: Any) -> Any:
    return attention(*args, return_lse=True, **asked)
