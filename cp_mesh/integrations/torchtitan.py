"""`context_parallel`: attention of cp_mesh in torchtitan 0.2 and 0.3, with torchtitan's Trainers.

torchtitan still shards tokens, labels and positions, scales losses and reduces gradients. Only the inner attention of
the model changes: 0.2 gets a style on it, 0.3 another class by its override mechanism (`torchtitan_attention.py`).
Nothing of torchtitan is patched: a copy of the model's parallelize function runs with some of its globals replaced.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import is_dataclass, replace
from types import FunctionType
from typing import Any, NoReturn, TypeVar

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import parallelize_module

from cp_mesh.call.methods import choose_method
from cp_mesh.call.spec import EXECUTION, settle
from cp_mesh.errors import UnsupportedError, refuse
from cp_mesh.geometry.batch_mask import batch_mask
from cp_mesh.geometry.layouts import Contiguous, Layout, ZigZag
from cp_mesh.geometry.mask import Mask
from cp_mesh.integrations.renamed import asks_for, with_names
from cp_mesh.sequence.sharded_sequence import ShardedSequence
from cp_mesh.training.checks.inputs import watch_rootless
from cp_mesh.training.context_parallel import ContextParallel

BALANCERS: dict[str | None, Layout] = {"headtail": ZigZag(), None: Contiguous()}
"""Layouts by torchtitan's context_parallel_load_balancer."""
ATTENTION = "cp_mesh.integrations.torchtitan_attention"
_SETTING = "parallelism.context_parallel_load_balancer"
_SpecT = TypeVar("_SpecT")


def context_parallel(spec: _SpecT, **options: Any) -> _SpecT:
    """Use cp_mesh attention in a model of torchtitan if ``parallelism.context_parallel_degree`` is above 1.

    Everything else stays torchtitan's: configuration, data, sharding (``context_parallel_load_balancer`` is "headtail",
    here `ZigZag`, or None, here `Contiguous`), loss, tensor parallelism, checkpointing, compile and FSDP2.

    Args:
        spec: in torchtitan 0.2 the `TrainSpec` of a model, in 0.3 the `Trainer.Config`. It is not changed.
        **options: kernel, method, transport, ulysses_degree, inner_ring_size, head_chunks, deterministic, as in
            `cp_mesh.attention`.

    Returns:
        A copy of the spec with another ``parallelize_fn``, and in 0.3 with entries in ``override.imports``.

    Raises:
        ArgumentError, UnsupportedError: here or when the Trainer is built, on every rank, if a model or a setting would
            not be exact (the message names the setting to change); in the first forward, if torchtitan sharded the rows
            in another layout.

    Example:
        >>> register_train_spec("llama3_cp", context_parallel(get_train_spec("llama3")))  # 0.2  # doctest: +SKIP
        >>> config = context_parallel(llama3_debugmodel())  # 0.3  # doctest: +SKIP
    """
    if unknown := sorted(options.keys() - set(EXECUTION)):
        refuse("context_parallel", f"options among {', '.join(EXECUTION)}", unknown[0], "set it in torchtitan's config")
    settle(**options)
    choose_method(options.get("method", "auto"))
    if not is_dataclass(spec) or isinstance(spec, type):
        refuse("context_parallel", "a TrainSpec of torchtitan 0.2 or a Trainer.Config of 0.3", spec, "pass one")
    if hasattr(spec, "model_args"):
        return replace(spec, parallelize_fn=_of_0_2(spec.parallelize_fn, options))  # type: ignore[attr-defined]
    model_spec = getattr(spec, "model_spec", None)
    if model_spec is None or not hasattr(spec, "override"):
        hint = "for 0.3 pass the Trainer.Config that a function of config_registry returns"
        refuse("context_parallel", "a TrainSpec, or a Trainer.Config with a model_spec", type(spec).__name__, hint)
    imports = [f"{ATTENTION}.{name}" for name in ("flex", "varlen", "selective")]
    return replace(
        spec,
        model_spec=replace(model_spec, parallelize_fn=_of_0_3(model_spec, options)),
        override=replace(spec.override, imports=[*spec.override.imports, *imports]),  # type: ignore[attr-defined]
    )


def _of_0_2(function: Callable[..., nn.Module], options: dict[str, Any]) -> Callable[..., nn.Module]:
    """Return a parallelize function of a TrainSpec that applies `ContextParallel` to inner attention."""
    names = "apply_cp_to_attention_module", "_op_sac_save_list"
    own = _asking(function, *names)

    def parallelize_fn(model: nn.Module, parallel_dims: Any, job_config: Any) -> nn.Module:
        if not parallel_dims.cp_enabled:
            return own(model, parallel_dims, job_config)
        compiled = job_config.compile.enable and "model" in job_config.compile.components
        if compiled and parallel_dims.tp_enabled:
            got = "both: torchtitan 0.2 itself loses gradients of the embedding then"
            hint = "compile.enable = False, or torchtitan 0.3"
            refuse("compile.enable, tensor_parallel_degree", "one of them", got, hint, UnsupportedError)
        sequence = _sequence(parallel_dims, job_config.parallelism)

        def apply(modules: list[nn.Module], mesh: DeviceMesh, attention_type: str) -> None:
            if attention_type != "sdpa":
                hint = "attn_type='sdpa' in the model's args; packed documents are available in torchtitan 0.3"
                refuse("attn_type", "'sdpa'", repr(attention_type), hint, UnsupportedError)
            for module in modules:
                parallelize_module(module, mesh, ContextParallel(sequence, **options))
            watch_rootless(model)  # without the gradient checks of `cp_mesh.parallelize`: torchtitan computes the loss

        _with_positions(model, sequence, _counted, once=True)
        saved = own.__globals__["_op_sac_save_list"] | {torch.ops.cp_mesh.attention.default}
        return with_names(own, dict(zip(names, (apply, saved), strict=True)))(model, parallel_dims, job_config)

    return parallelize_fn


def _of_0_3(model_spec: Any, options: dict[str, Any]) -> Callable[..., nn.Module]:
    """Return a parallelize function of a ModelSpec that sets sequence and options in its attention modules."""
    name = "apply_cp_to_forward"
    own = _asking(model_spec.parallelize_fn, name)

    def parallelize_fn(model: nn.Module, **given: Any) -> nn.Module:
        parallel_dims, parallelism = given["parallel_dims"], given["parallelism"]
        if parallel_dims.cp_enabled:
            from spmd_types import no_typecheck

            from cp_mesh.integrations.torchtitan_attention import prepare

            if parallelism.spmd_backend == "full_dtensor":
                hint = "parallelism.spmd_backend = 'spmd_types' or 'partial_dtensor'"
                refuse("spmd_backend", "plain tensors", "'full_dtensor'", hint, UnsupportedError)
            sequence = _sequence(parallel_dims, parallelism)
            windows = prepare(model, sequence, options)

            def masks(positions: Tensor) -> dict[str, Any]:
                documents = _documents(positions)
                made = {
                    key: Mask(window=None if window is None else (window - 1, 0), documents=documents)
                    for key, window in windows.items()
                }
                return {"attention_masks": made.get(None, made)}

            _with_positions(model, sequence, masks, no_typecheck)
        return with_names(own, {name: lambda modules, mesh: None})(model, **given)

    return parallelize_fn


def _asking(function: Any, *names: str) -> FunctionType:
    """Return the function if these globals can be replaced in it; refuse others."""
    if not asks_for(function, *names):
        got = getattr(function, "__qualname__", function)
        hint = "call context_parallel with what torchtitan itself returns, and wrap that"
        refuse("parallelize_fn", f"a function of torchtitan that calls {names[0]}", got, hint, UnsupportedError)
    return function


def _sequence(parallel_dims: Any, parallelism: Any) -> ShardedSequence:
    if parallel_dims.pp_enabled:
        hint = "parallelism.pipeline_parallel_degree = 1: stages of torchtitan were not tested"
        refuse("pipeline_parallel_degree", 1, parallel_dims.pp, hint, UnsupportedError)
    balancer = parallelism.context_parallel_load_balancer
    if balancer not in BALANCERS:
        hint = "it balances FlexAttention's blocks; zigzag is 'headtail'"
        refuse(_SETTING, "'headtail' or None", repr(balancer), hint, UnsupportedError)
    return ShardedSequence(parallel_dims.get_mesh("cp"), BALANCERS[balancer])


def _with_positions(
    model: nn.Module,
    sequence: ShardedSequence,
    read: Callable[[Tensor], dict[str, Any]],
    context: Callable[[], AbstractContextManager[Any]] = nullcontext,
    once: bool = False,
) -> None:
    """Call ``read`` with the positions [B, S] of the whole sequence before every forward, and pass on its keywords.

    ``context`` is the context manager of that call. ``once``: only before the first forward.
    """
    names = [*inspect.signature(model.forward).parameters]

    def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        positions = (dict(zip(names, args, strict=False)) | kwargs).get("positions")
        if positions is None:
            hint = "the dataloader must give positions, as torchtitan's own do"
            refuse(type(module).__name__, "the positions of this rank's rows", None, hint)
        if once:
            handle.remove()
        with context():
            return args, kwargs | read(sequence.unshard(positions))

    handle = model.register_forward_pre_hook(hook, with_kwargs=True)


def _counted(positions: Tensor) -> dict[str, Any]:
    """Refuse positions other than 0, 1, 2, ..., in torchtitan 0.2."""
    if not bool((positions == torch.arange(positions.shape[-1], device=positions.device)).all()):
        _refuse_rows(positions)
    return {}


def _documents(positions: Tensor) -> Tensor | None:
    """Return the documents of positions that increase by 1 or restart at 0, in torchtitan 0.3; refuse others."""
    if not bool(((positions.diff(dim=-1) == 1) | (positions[..., 1:] == 0)).all()):
        _refuse_rows(positions)
    return batch_mask(position_ids=positions).documents


def _refuse_rows(positions: Tensor) -> NoReturn:
    hint = f"shard by torchtitan's own code, with {_SETTING} as when the model was made"
    refuse("positions of the whole sequence", "0, 1, 2, ... in every document", positions[0].tolist()[:8], hint)
