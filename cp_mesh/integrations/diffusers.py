"""`parallelize`: context parallelism for a transformer of diffusers, by the model's own `_cp_plan`.

`_cp_plan` lists which inputs are split along which dim, and where the output is gathered. Subclasses of diffusers'
hooks do both here, with shards of any lengths. The model's attention processors hold a `_Parallel` and call `attend`
instead of diffusers' dispatch function. diffusers itself is not changed.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from dataclasses import replace
from typing import Any, NoReturn

import torch.distributed as dist
from diffusers import ModelMixin
from diffusers.hooks.context_parallel import (
    ContextParallelGatherHook,
    ContextParallelSplitHook,
    _get_submodule_by_name,
)
from diffusers.hooks.hooks import HookRegistry
from diffusers.models.attention_dispatch import AttentionBackendName, dispatch_attention_fn
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from cp_mesh.call.function import attention
from cp_mesh.call.spec import make_spec
from cp_mesh.comm.agreement import refusing
from cp_mesh.errors import UnsupportedError, refuse
from cp_mesh.geometry.layouts import Contiguous, Joint
from cp_mesh.geometry.mask import Mask
from cp_mesh.sequence.sharded_sequence import ShardedSequence
from cp_mesh.training.checks.gradients import watch_first_step
from cp_mesh.wrap import STYLE, asks_for, check_module, replace_forward, with_names

STREAMS = {
    "FluxTransformer2DModel": ("encoder_hidden_states", "hidden_states"),
    "WanTransformer3DModel": ("hidden_states",),
}
"""Models, and the inputs that attention sees, in the order in which the processors concatenate them."""
PROCESSORS = ("FluxAttnProcessor", "WanAttnProcessor")
"""Processors that attend to the whole sequence in one call if they have a parallel config."""
CHECKPOINT = "_gradient_checkpointing_func"
_DISPATCH = dispatch_attention_fn.__name__
_WHOLE = ("controlnet_block_samples", "controlnet_single_block_samples")  # arguments that no plan splits


class _Parallel:
    """State that a parallel model shares with its hooks and attention processors. Copies of the model share it, too.

    Attributes:
        sequence: without a length, since each stream has its own.
        streams: as in `STREAMS`.
        options: keywords of `cp_mesh.attention`.
        lengths: the length of each stream in this forward, set when its input is split.
        expected, calls: the number of attention calls in a forward, and in this one so far.
        gather_output: the output is whole on every rank, for `watch_first_step`.
    """

    gather_output = True

    def __init__(self, model: nn.Module, sequence: ShardedSequence, options: dict[str, Any]) -> None:
        self.sequence, self.options, self.streams = sequence, options, STREAMS[type(model).__name__]
        self.names = list(inspect.signature(inspect.unwrap(type(model).forward)).parameters)[1:]
        attending = [module for module in model.modules() if hasattr(module, "processor")]
        self.expected = sum(not getattr(module, "is_cross_attention", False) for module in attending)
        self.lengths: dict[str, int] = {}
        self.calls = 0

    def __copy__(self) -> _Parallel:
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> _Parallel:
        return self

    def of_length(self, length: int) -> ShardedSequence:
        return replace(self.sequence, length=length, pad=False)

    def run(self, module: nn.Module, forward: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        """Run the model's forward."""
        self.lengths, self.calls = {}, 0
        given = dict(zip(self.names, args, strict=False)) | kwargs
        for name in _WHOLE:
            if given.get(name) is not None:
                self.refuse(name, "None", "tensors, which no plan splits", "leave them out", UnsupportedError)
        checkpoint = module.__dict__.get(CHECKPOINT)
        if checkpoint is not None:
            setattr(module, CHECKPOINT, functools.partial(self.checkpointed, checkpoint))
        try:
            output = forward(*args, **kwargs)
        finally:
            if checkpoint is not None:
                setattr(module, CHECKPOINT, checkpoint)
        if self.calls != self.expected:
            hint = "a processor that was set after parallelize attends to the rows of one rank: set it before"
            self.refuse(type(module).__name__, f"{self.expected} calls of attention over all ranks", self.calls, hint)
        return output

    def checkpointed(self, checkpoint: Callable[..., Any], block: Callable[..., Any], *args: Any) -> Any:
        """Checkpoint a block so that its recomputation uses the lengths of its own forward, not of a later one."""
        lengths = self.lengths

        def run(*given: Any) -> Any:
            self.lengths = lengths
            return block(*given)

        return checkpoint(run, *args)

    def refuse(self, *words: Any) -> NoReturn:
        """Raise on this rank, and on the ranks that wait for it."""
        with refusing(self.sequence.mesh.get_group):
            refuse(*words)


class _Split(ContextParallelSplitHook):
    """Splits inputs or outputs of a module in shards of any lengths; ``parallel_config`` is a `_Parallel`."""

    def _prepare_cp_input(self, x: Tensor, cp_input: Any) -> Tensor:
        own: _Parallel = self.parallel_config
        (name,) = (name for name, split in self.metadata.items() if split is cp_input)
        if x.ndim <= cp_input.split_dim:
            return x  # without a sequence dim, such as a timestep
        if x.ndim != (cp_input.expected_dims or x.ndim):
            hint = "rows that are not split would be keys on every rank"
            own.refuse(f"{name}", f"{cp_input.expected_dims} dims", tuple(x.shape), hint)
        length = x.shape[cp_input.split_dim]
        if name in own.streams:
            own.lengths[name] = length
        shard: Tensor = own.of_length(length).shard(x, dim=cp_input.split_dim, pad_value=0)
        return shard

    def post_forward(self, module: nn.Module, output: Any) -> Any:
        if not any(split.split_output for split in self.metadata.values()):
            return output  # the output of a model, which may be a dataclass
        return super().post_forward(module, output)


class _Gather(ContextParallelGatherHook):
    """Gathers the output of a module, for a loss that is the same on every rank."""

    def post_forward(self, module: nn.Module, output: Tensor) -> Tensor:
        own: _Parallel = self.parallel_config
        return own.of_length(own.lengths["hidden_states"]).gather(output, dim=self.metadata.gather_dim)


def parallelize(
    model: ModelMixin, mesh: DeviceMesh | dist.ProcessGroup, *, watch: bool = True, **options: Any
) -> ModelMixin:
    """Make a transformer of diffusers take whole batches and compute this rank's rows of them.

    Inputs are whole and equal on all ranks of ``mesh``, and the output is whole on every rank. Text and image may have
    any lengths. If every rank computes the same loss from the output, the *sum* of gradients over the ranks is the
    gradient (`cp_mesh.sum_gradients`).

    Checkpointing works as before. Apply FSDP2 after this.

    Args:
        model: a FluxTransformer2DModel or WanTransformer3DModel, changed in place.
        mesh: the cp axis, as in `cp_mesh.ShardedSequence`.
        watch: compare gradients over the ranks before the first optimizer step.
        **options: kernel, method, transport, ulysses_degree, head_chunks, deterministic, as in `cp_mesh.attention`.

    Returns:
        The model.

    Raises:
        ArgumentError, UnsupportedError: here, for other models and attention processors, and models that are parallel
            already; in the forward, for masks, causal attention, dropout, and inputs that are not split.

    Example:
        >>> transformer = parallelize(pipeline.transformer, mesh["cp"])  # doctest: +SKIP
    """
    sequence = ShardedSequence(mesh, Contiguous(), pad=False)  # type: ignore[arg-type]
    processors = check_model(model)
    make_spec(**options)
    own = _Parallel(model, sequence, options)
    check_module("parallelize", model, STYLE)
    for processor in processors:
        kind: Any = type(processor)
        call = with_names(kind.__call__, kind.__call__.__globals__ | {_DISPATCH: attend})
        members = {"__call__": call, "__module__": kind.__module__}
        processor.__class__ = type(kind.__name__, (kind,), members)
        processor._parallel_config = own
    for name, plan in model._cp_plan.items():
        found = _get_submodule_by_name(model, name)
        for module in found if isinstance(found, list) else [found]:
            hook = _Split(plan, own) if isinstance(plan, dict) else _Gather(plan, own)
            HookRegistry.check_if_exists_or_initialize(module).register_hook(hook, f"cp_mesh---{name}")
    model._parallel_config = own  # so that diffusers refuses enable_parallelism
    replace_forward(model, STYLE, "cp_mesh.integrations.diffusers.parallelize", own.run)
    if watch:
        watch_first_step(model, sequence.mesh.get_group())
    return model


def check_model(model: nn.Module) -> list[Any]:
    """Return the attention processors of a model; refuse models and processors that are not known."""
    what, name = f"parallelize({type(model).__name__})", type(model).__name__
    if name not in STREAMS:
        refuse(what, f"one of {', '.join(STREAMS)}", name, "other models were not tested", UnsupportedError)
    if model._parallel_config is not None:
        hint = "call parallelize alone, and once"
        refuse(what, "a model without enable_parallelism", "one with a parallel config", hint)
    processors = [module.processor for module in model.modules() if hasattr(module, "processor")]
    for processor in processors:
        if (kind := type(processor).__name__) not in PROCESSORS or not asks_for(type(processor).__call__, _DISPATCH):
            hint = "IP adapters and processors of other packages attend to keys that are not split"
            refuse(what, f"attention processors {' or '.join(PROCESSORS)}", kind, hint, UnsupportedError)
        if processor._attention_backend not in (None, AttentionBackendName.NATIVE):
            hint = "reset_attention_backend() and parallelize(..., kernel=)"
            refuse(what, "attention backend native", processor._attention_backend, hint, UnsupportedError)
    return processors


def attend(query: Tensor, key: Tensor, value: Tensor, **asked: Any) -> Tensor:
    """Replace diffusers' `dispatch_attention_fn`: attend over all ranks if ``parallel_config`` is a `_Parallel`.

    Args:
        query, key, value: [B, rows, heads, D]; in parallel models the rows of this rank.
        **asked: as in diffusers.

    Raises:
        UnsupportedError: in parallel models, for masks, causal attention, dropout and lse.
    """
    own = asked.get("parallel_config")
    if not isinstance(own, _Parallel):
        whole: Tensor = dispatch_attention_fn(query, key, value, **asked)
        return whole
    asked |= asked.get("attention_kwargs") or {}
    for name in ("attn_mask", "dropout_p", "is_causal", "return_lse"):
        x = asked.get(name)
        if x is not None and (isinstance(x, Tensor) or x):
            got, hint = "a tensor of this rank's keys" if isinstance(x, Tensor) else x, "full attention is available"
            own.refuse(name, "None" if name == "attn_mask" else "none", got, hint, UnsupportedError)
    if missing := [name for name in own.streams if name not in own.lengths]:
        hint = "the keys of an input that is whole on every rank would count once per rank: let _cp_plan split it"
        own.refuse("_cp_plan", f"{' and '.join(own.streams)} to be split", f"{missing[0]} whole", hint)
    lengths = [own.lengths[name] for name in own.streams]
    own.calls += 1
    out = attention(
        query, key, value, mesh=own.sequence.mesh, seq_dim=1, seq_len=sum(lengths), layout=Joint(*lengths),
        mask=Mask(causal=False), scale=asked.get("scale"), **own.options,
    )  # fmt: skip
    assert isinstance(out, Tensor)
    return out
