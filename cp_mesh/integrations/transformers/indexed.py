"""Sparse attention by an indexer, as in DeepSeek-V3.2: the indexer picks of the whole sequence, the core attends to it.

A model's indexer computes queries, keys and weights itself and then meets `_IndexKeys` in place of its keys, which know
the steps from keys to scores to the choice, and refuse any other step. Attention gets the latent, by `latents`.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from cp_mesh._torch import apply_style, untraced
from cp_mesh.errors import UnsupportedError, refuse
from cp_mesh.integrations.transformers.latents import beside_product, expands_latents
from cp_mesh.integrations.transformers.masks import BatchAttention
from cp_mesh.latent.selection import select_keys
from cp_mesh.sequence.sharded_sequence import ShardedSequence
from cp_mesh.training.style_helpers import OverCP, announced


def is_indexer(module: nn.Module) -> bool:
    """Whether this picks keys."""
    return {"update_indexer", "topk"} <= _names(module)


def unknown_core(module: nn.Module) -> str | None:
    """Why attention to keys that an indexer picked is not supported; None if it is, or if this is no such module."""
    if "indexer" not in _names(module):
        return None
    if not expands_latents(module):
        return "attends to picked keys that are not expanded from a latent"
    more = beside_product(module.kv_b_proj)
    return more and f"has a kv_b_proj that is no plain linear: {more}"


def _names(module: nn.Module) -> set[str]:
    code = getattr(inspect.unwrap(type(module).forward), "__code__", None)
    return set() if code is None else {*code.co_names}


def apply(model: nn.Module, sequence: ShardedSequence) -> None:
    """Let indexers pick keys of the whole sequence."""
    style = Indexer(sequence, None)
    for module in model.modules():
        if is_indexer(module):
            apply_style(style, module, sequence.mesh)


class Indexer(OverCP):
    """The style of indexers, whose keys and mask are then those of the whole sequence."""

    @untraced
    @announced
    def run(self, module: nn.Module, forward: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        """Run the indexer's own forward with other keys and another mask."""
        found = [x for x in (*args, *kwargs.values()) if isinstance(x, BatchAttention)]
        if not found:
            hint = "call the parallel model, not a part of it"
            refuse(type(module).__name__, "the mask of the batch", "none", hint, UnsupportedError)
        shown = _Shown()
        args = tuple(shown if x is found[0] else x for x in args)
        kwargs = {name: shown if x is found[0] else x for name, x in kwargs.items()}
        return forward(*args, **kwargs | {"cache": _Cache(found[0])})


@dataclass(frozen=True)
class _Shown:
    """The mask, of which an indexer asks the dtype and the negation."""

    is_negated: bool = False
    dtype = torch.bool

    def __invert__(self) -> _Shown:
        return _Shown(not self.is_negated)


class _Cache(NamedTuple):
    """In place of a cache, which indexers give their keys."""

    attention: BatchAttention

    def update_indexer(self, keys: Tensor, layer: int) -> _IndexKeys:
        return _IndexKeys(self.attention, keys)


@dataclass(frozen=True)
class _IndexKeys:
    """Index keys of all ranks on their way to a choice; each step of an indexer returns the next state.

    Attributes:
        attention: of the batch.
        keys: of this rank's rows, [B, S_local, D].
        q: [B, S_local, H, D]; None until the products with them.
        scale: of the products.
        is_positive: whether ReLU was applied.
        weights: of the heads, [B, S_local, H]; None until the sum over heads.
        is_masked: whether hidden keys were excluded.
    """

    attention: BatchAttention
    keys: Tensor
    q: Tensor | None = None
    scale: float = 1.0
    is_positive: bool = False
    weights: Tensor | None = None
    is_masked: bool = False

    def __getattr__(self, name: str) -> Any:
        self._refuse(name)

    def _refuse(self, what: str) -> Any:
        hint = "this indexer chooses in another way, so its model is not supported"
        refuse(
            "Transformers: an indexer",
            "relu scores of keys, their weighted sum, a mask, topk",
            what,
            hint,
            UnsupportedError,
        )

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any, kwargs: Any = None) -> Any:
        own = next(x for x in (*args, *(kwargs or {}).values()) if isinstance(x, cls))
        if function in (torch.matmul, Tensor.matmul) and args[1] is own:
            if own.q is None:
                return replace(own, q=args[0])
            if own.is_positive and own.weights is None and args[0].shape[-2] == 1:
                return replace(own, weights=args[0].squeeze(-2))
        if function in (F.relu, torch.relu) and own.q is not None and own.weights is None:
            return replace(own, is_positive=True)
        return own._refuse(getattr(function, "__name__", str(function)))

    @property
    def shape(self) -> tuple[int, ...]:
        if self.weights is None:
            self._refuse("shape")
        length = self.attention.sequence.length
        assert length is not None
        return (*self.keys.shape[:2], length)

    def transpose(self, *dims: int) -> _IndexKeys:
        return self if self.q is None and dims == (-1, -2) else self._refuse(f"transpose{dims}")

    def float(self) -> _IndexKeys:
        return self if self.q is None else self._refuse("float")

    def unsqueeze(self, dim: int) -> _IndexKeys:
        return self if self.q is None and dim == 1 else self._refuse(f"unsqueeze({dim})")

    def squeeze(self, dim: int) -> _IndexKeys:
        return self if self.weights is not None and dim == -2 else self._refuse(f"squeeze({dim})")

    def __mul__(self, scale: Any) -> _IndexKeys:
        """ReLU lets positive factors through."""
        known = self.q is not None and self.weights is None and isinstance(scale, int | float) and scale > 0
        return replace(self, scale=self.scale * scale) if known else self._refuse(f"a product with {scale}")

    def masked_fill(self, mask: Any, value: Any) -> _IndexKeys:
        known = self.weights is not None and isinstance(mask, _Shown) and mask.is_negated and value == -torch.inf
        return replace(self, is_masked=True) if known else self._refuse("masked_fill with another mask")

    def topk(self, k: int, dim: int = -1) -> _Picked:
        if not self.is_masked or dim != -1:
            self._refuse("topk before the mask")
        assert self.q is not None and self.weights is not None
        is_half = self.keys.dtype in (torch.float16, torch.bfloat16)  # float() of q was exact then
        dtype = self.keys.dtype if is_half else self.q.dtype
        sequence, mask = self.attention.sequence, self.attention.mask
        q, keys = self.q.to(dtype), self.keys.to(dtype)
        return _Picked(select_keys(q, keys, self.weights, k, sequence=sequence, mask=mask, scale=self.scale))


@dataclass(frozen=True)
class _Picked:
    """What topk returns, without the scores."""

    indices: Tensor
