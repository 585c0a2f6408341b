"""What a model is made of, spread or not: its styles, its logits, its whole parameters and gradients."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from cp_mesh._torch import COMPILED_CALL, tree_leaves
from cp_mesh.errors import refuse
from cp_mesh.sequence.sharded_sequence import ShardedSequence
from cp_mesh.tensor_parallel.vocab_parallel import DeferredLogits
from cp_mesh.training.sharded_model import ShardedModel
from cp_mesh.training.style_helpers import styles_of


def inner(model: nn.Module) -> nn.Module:
    """The model without DistributedDataParallel."""
    return model.module if isinstance(model, DistributedDataParallel) else model


@contextmanager
def captured(model: nn.Module, outputs: list[Any]) -> Iterator[None]:
    """Add what the model returns inside to a list; of compiled models, too."""
    compiled = model.__dict__.get(COMPILED_CALL)
    if compiled is not None:

        def call(*args: Any, **kwargs: Any) -> Any:
            outputs.append(compiled(*args, **kwargs))
            return outputs[-1]

        model.__dict__[COMPILED_CALL] = call
        try:
            yield
        finally:
            model.__dict__[COMPILED_CALL] = compiled
        return
    handle = model.register_forward_hook(lambda module, args, output: outputs.append(output))
    try:
        yield
    finally:
        handle.remove()


def logits_of(output: Any) -> Tensor:
    """The logits [B, n, V] in what a model returns: the tensor, its "logits", or the first tensor of three dims.

    Those that a loss computes in chunks are computed whole.
    """
    if isinstance(output, DeferredLogits):
        return output.whole()
    found = output if isinstance(output, Tensor) else getattr(output, "logits", None)
    if found is None and isinstance(output, Mapping):
        found = output.get("logits")
    if found is None:
        found = next((x for x in tree_leaves(output) if isinstance(x, Tensor) and x.ndim == 3), None)
    if not isinstance(found, Tensor) or found.ndim != 3:
        got = tuple(found.shape) if isinstance(found, Tensor) else type(output).__name__
        refuse("verify_model: output of the model", "logits [B, S, V]", got, "return them, alone or as .logits")
    return local(found)


def local(x: Tensor) -> Tensor:
    return x.full_tensor() if isinstance(x, DTensor) else x


def whole_gradient(parameter: Tensor) -> Tensor:
    """The gradient as the optimizer would see it, of all shards; a collective for DTensors."""
    if parameter.grad is None:
        return torch.zeros_like(local(parameter.detach()))
    return local(parameter.grad)


def coarsest(model: nn.Module) -> torch.dtype:
    """The dtype of the parameters that have the fewest digits."""
    dtypes = {parameter.dtype for parameter in model.parameters() if parameter.is_floating_point()}
    return max(dtypes, key=lambda dtype: torch.finfo(dtype).eps)


def root_of(model: nn.Module) -> ShardedModel | None:
    """The `ShardedModel` that was applied to a model or a part of it."""
    return next((style for style in styles_of(model) if isinstance(style, ShardedModel)), None)


def sequence_of(model: nn.Module) -> ShardedSequence | None:
    """The sequence of the styles that were applied to a model; the root's, if it has one."""
    style = root_of(model) or next(styles_of(model), None)
    return None if style is None else style.sequence
