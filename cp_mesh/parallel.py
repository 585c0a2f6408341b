"""`parallelize`, which fails closed, and what training around the styles needs.

Order of application: tensor parallelism on ``mesh["tp"]``, then this on ``mesh["cp"]``, then checkpointing, compile and
FSDP2.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from fnmatch import fnmatchcase
from itertools import product
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ParallelStyle
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

from cp_mesh.cores import ContextParallel, cross_attention
from cp_mesh.errors import UnsupportedError, refuse
from cp_mesh.root import ShardedModel
from cp_mesh.sequence import ShardedSequence
from cp_mesh.styles import RANKS, SUMS


def parallelize(module: nn.Module, mesh: DeviceMesh, plan: Mapping[str, ParallelStyle]) -> nn.Module:
    """`torch.distributed.tensor.parallel.parallelize_module` that fails closed.

    Args:
        module: the model; changed in place.
        mesh: one axis of the mesh, 1-D; of a `ShardedSequence` over two axes its ``mesh``.
        plan: styles by module name; ``*`` and other `fnmatch` wildcards match within one part of a dotted name, and
            "" is the root. Styles of PyTorch work too.

    Returns:
        The module.

    Raises:
        ArgumentError: if a key matches no module, two keys match one module, the mesh is not 1-D, or a style is
            applied twice, the root and a core have different sequences, or one of them has a ``layout`` and the other
            none. Nothing is applied then, except that a repeated application is found on its way.
        UnsupportedError: if `ContextParallel` meets a module named as cross-attention.

    Example:
        >>> parallelize(model, mesh["cp"], {"layers.*.attention.core": ContextParallel(sequence)})  # doctest: +SKIP
    """
    if not isinstance(mesh, DeviceMesh) or mesh.ndim != 1:
        hint = 'pass mesh["cp"], one axis at a time; of a ShardedSequence over two axes, its mesh'
        refuse("parallelize: mesh", "one axis of a DeviceMesh", mesh, hint)
    _check_sequences(plan)
    modules = dict(module.named_modules())
    chosen: dict[str, tuple[str, ParallelStyle]] = {}
    for key, style in plan.items():
        if not isinstance(style, ParallelStyle):
            refuse(f"parallelize: style of {key!r}", "an instance of a ParallelStyle", style, "write Style(...)")
        matches = [name for name in modules if _matches(key, name)]
        if not matches:
            close = difflib.get_close_matches(key, modules, n=3) or list(modules)[1:4]
            refuse("parallelize: plan key", "the name of a module", repr(key), f"near it: {', '.join(close)}")
        for name in matches:
            if name in chosen:
                refuse("parallelize", "one plan key a module", f"{chosen[name][0]!r}, {key!r} for {name!r}", "drop one")
            if isinstance(style, ContextParallel) and "cross" in name.lower():
                raise UnsupportedError(cross_attention(name))
            chosen[name] = (key, style)
    for name, (_, style) in chosen.items():
        style._apply(modules[name], mesh)
    return module


def sum_gradients(model: nn.Module) -> None:
    """Make every FSDP2 module of ``model`` reduce gradients by a plain SUM, as the gradient contract wants.

    Call it after `fully_shard`. On gloo it also avoids the pre-multiplied sum that gloo does not have.

    Args:
        model: the root, with all parameters under `fully_shard` on a mesh that holds the ranks of cp.

    Raises:
        ArgumentError: if the model holds no FSDP2 module, or if the gradient of some parameter would not be summed
            over the ranks that a style of this library split the sequence over.
    """
    sharded = [module for module in model.modules() if isinstance(module, FSDPModule)]
    if not sharded:
        refuse("sum_gradients", "a model under fully_shard", type(model).__name__, "call it first")
    cp_ranks = {rank for module in model.modules() for rank in getattr(module, RANKS, ())}
    for name, parameter in model.named_parameters():
        summed = set(parameter.device_mesh.mesh.flatten().tolist()) if isinstance(parameter, DTensor) else set()
        if parameter.requires_grad and len(cp_ranks) > 1 and not cp_ranks <= summed:
            refuse(
                f"sum_gradients: parameter {name}",
                f"fully_shard over a mesh that holds the cp ranks {sorted(cp_ranks)}",
                f"ranks {sorted(summed)}" if summed else "no mesh",
                'fully_shard the root too, on mesh["dp", "cp"]._flatten()',
            )
    for module in sharded:
        module.set_gradient_divide_factor(1.0)
        module.set_force_sum_reduction_for_comms(True)
        setattr(module, SUMS, True)


def _save_attention(_ctx: Any, op: Any, *_args: Any, **_kwargs: Any) -> CheckpointPolicy:
    saved = op == torch.ops.cp_mesh.attention.default
    return CheckpointPolicy.MUST_SAVE if saved else CheckpointPolicy.PREFER_RECOMPUTE


def checkpoint_context_fn() -> Any:
    """Selective checkpointing that recomputes everything but attention, so that recompute does not replay the ring.

    If torch.compile complains of side effects in a checkpoint around a `ContextParallel` module, set
    ``torch._dynamo.config.skip_fwd_side_effects_in_bwd_under_checkpoint = True``: the mode that intercepts attention
    is a side effect to Dynamo, and it is safe to skip in the backward, where the saved result is used.

    Example:
        >>> from torch.utils.checkpoint import checkpoint
        >>> checkpoint(block, x, use_reentrant=False, context_fn=checkpoint_context_fn)  # doctest: +SKIP
    """
    return create_selective_checkpoint_contexts(_save_attention)


def _matches(key: str, name: str) -> bool:
    if not key or not name:  # the root has its own key; no wildcard means it
        return key == name
    parts, atoms = name.split("."), key.split(".")
    return len(parts) == len(atoms) and all(fnmatchcase(p, a) for p, a in zip(parts, atoms, strict=True))


def _check_sequences(plan: Mapping[str, ParallelStyle]) -> None:
    """Refuse a plan whose cores attend over another sequence than the root shards, or in a layout of other making."""
    roots = {key: style for key, style in plan.items() if isinstance(style, ShardedModel)}
    cores = {key: style for key, style in plan.items() if isinstance(style, ContextParallel)}
    for (root_key, root), (key, core) in product(roots.items(), cores.items()):
        if root.sequence != core.sequence:
            got = f"{_sequence_words(root.sequence)} at {root_key!r}, {_sequence_words(core.sequence)} in {key!r}"
            hint = "give all styles the same object; a core of another sequence goes in a plan of its own"
            refuse("sequence", "one for the root and its cores", got, hint)
        if (root.layout is None) != (core.layout is None):
            with_one, without = (key, root_key) if root.layout is None else (root_key, key)
            got = f"{with_one!r} has, {without!r} lacks it"
            hint = "give both functions that return one layout for a batch"
            refuse("layout=", "in all styles of a sequence, or in none", got, hint)


def _sequence_words(sequence: ShardedSequence) -> str:
    return f"{sequence.layout.spec()} with length={sequence.length}, pad={sequence.pad}"
