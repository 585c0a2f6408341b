"""`context_parallel`: Trainers of Transformers and TRL on sequences that are sharded over accelerate's cp axis.

accelerate reads one batch for all cp ranks, and shards the model by FSDP2, which takes the mean of gradients over all
ranks. The model shards the batch and returns this rank's share of the loss (`cp_mesh/integrations/transformers/`). The
Trainer multiplies the loss by the number of ranks, so the mean becomes a sum and this module scales nothing. It checks
that each package does its part, and makes the Trainer count batches once, since they are whole on every cp rank.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from copy import copy
from inspect import signature
from typing import Any

import torch
import torch.distributed as dist
from accelerate.state import AcceleratorState, PartialState
from accelerate.utils import DistributedType, TorchContextParallelConfig
from accelerate.utils.operations import recursively_apply
from torch import Tensor, nn
from transformers import Trainer
from transformers.trainer_utils import unwrap_peft_model

from cp_mesh.errors import UnsupportedError, refuse
from cp_mesh.integrations.transformers.root import OF_IMAGES, parallelize, sequence_of
from cp_mesh.sequence.sharded_sequence import IGNORED
from cp_mesh.training.checks.config import check_adapters
from cp_mesh.training.style_helpers import SUMS
from cp_mesh.wrap import STYLE, replaced

_OWNERS = (Trainer.__module__, *("trl.trainer.sft_trainer", "trl.trainer.dpo_trainer", "axolotl.core.trainers.base"))
_PACKING = ("packing", "eval_packing")
_NO_LOGITS = ("aux_loss", "router_logits", *OF_IMAGES)
_LOSSES = ("cross_entropy", "fused_linear_cross_entropy")
"""Of Liger, which applies the second by default: it replaces the forward that shards the batch."""
_LOCAL = "leave it out: it would read logits of this rank's rows with whole labels"
_ARGUMENTS: dict[str, tuple[tuple[Any, ...], str]] = {
    "label_smoothing_factor": ((0,), f"{_LOCAL}; cp_mesh.cross_entropy takes label_smoothing= in your own loop"),
    "neftune_noise_alpha": ((None,), "leave it out: its noise depends on a sequence's length, and on the rank"),
    "torch_compile": ((False,), "compile layers instead: layer.compile() for each, before training"),
    "use_cache": ((False, None), "leave it out: a cache would hold this rank's rows"),
    "eval_use_gather_object": ((False,), "leave it out: only tensors are gathered"),
    "train_sampling_strategy": (
        ("random", "sequential", "group_by_length"),
        "leave it out: its sampler gives different batches to the cp ranks",
    ),
}
"""TrainingArguments with their supported values, and why others are not supported."""


def context_parallel(trainer: type[Trainer], **options: Any) -> type[Trainer]:
    """Return a Trainer class that shards sequences over accelerate's cp axis.

    Use it like the given class, with

    - ``parallelism_config=ParallelismConfig(cp_size=..., dp_shard_size=...)`` and ``fsdp=True`` (FSDP2) in the
      TrainingArguments;
    - whole batches of any lengths; accelerate passes the same batch to all cp ranks;
    - documents as in `cp_mesh.integrations.transformers.parallelize`: from padding-free collators, or from SFTTrainer
      with ``packing=True``.

    Losses, gradients and their norm, metrics and predictions equal those of the same Trainer without cp. Do not call
    `cp_mesh.sum_gradients`: the mean of gradients is right here.

    Args:
        trainer: `transformers.Trainer`, `trl.SFTTrainer`, `trl.DPOTrainer`, or a subclass with the same loss.
        **options: options of `cp_mesh.integrations.transformers.parallelize`: layout, dropout_seed, watch, method,
            kernel, and other options of `cp_mesh.attention`.

    Returns:
        A subclass of ``trainer`` with the same name.

    Raises:
        ArgumentError, UnsupportedError: here, for wrong options; when an object is built, for arguments that do not
            work with sharded sequences (the message names the argument); in training, if the model was replaced, or if
            its gradients are summed.

    Example:
        >>> trainer = context_parallel(Trainer)(model, args, train_dataset=dataset)  # doctest: +SKIP
        >>> trainer.train()  # doctest: +SKIP
    """
    if not (isinstance(trainer, type) and issubclass(trainer, Trainer)):
        hint = "context_parallel(Trainer)(model, args, ...) makes one"
        refuse("context_parallel", "a class of Trainers", type(trainer).__name__, hint)
    for name in ("compute_loss", "prediction_step", "_compute_loss", "compute_ref_log_probs"):
        if getattr(trainer, name, Trainer.compute_loss).__module__ not in _OWNERS:
            what = f"context_parallel({trainer.__name__}): {name}"
            hint = "it would read this rank's rows as if they were all; take one of these, or a loop of your own"
            refuse(what, "that of Trainer, SFTTrainer or DPOTrainer", "its own", hint, UnsupportedError)
    if given := sorted({"mesh", "data", "gather_output"} & options.keys()):
        refuse("context_parallel", "options of attention", ", ".join(given), "leave it out: the Trainer sets it")
    members = {"_options": options, "__module__": trainer.__module__, "__doc__": trainer.__doc__}
    return type(trainer.__name__, (_ContextParallel, trainer), members)


class _ContextParallel(Trainer):
    """Overrides methods of the given Trainer class; first in the method resolution order.

    Attributes:
        _options: options of `parallelize`.
        _packing: values of arguments that SFTTrainer would refuse, which are False until its __init__ ends.
    """

    _options: dict[str, Any]
    args: Any

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._packing: dict[str, Any] = {}
        try:
            super().__init__(*args, **kwargs)
        finally:  # the arguments are the caller's, who may use them again
            for name, value in self._packing.items():
                setattr(self.args, name, value)
        self._check()
        mesh, config = self.accelerator.torch_device_mesh, self.accelerator.parallelism_config
        own = not (self.args.average_tokens_across_devices and self.model_accepts_loss_kwargs)
        # the routers' loss is summed over dp if the Trainer multiplies the loss, and averaged in TRL
        summed = not own and not hasattr(self, "aux_loss_enabled")
        reference = getattr(self, "ref_model", None)
        for model in (self._base_model, *([] if reference is None else [self.accelerator.unwrap_model(reference)])):
            parallelize(model, mesh["cp"], data=mesh[tuple(config.dp_cp_dim_names)], **self._options)
            for part in model.modules():  # all of them, since FSDP2 may wrap only some, as with PEFT
                setattr(part, SUMS, False)  # suppresses the warning of averaged gradients, which are right here
            losses = _adapter(model).losses
            losses.shares, losses.gathered = config.cp_size if summed else 1, hasattr(self, "ref_model")
            losses.own_counts = own
        if hasattr(self, "_tp_size"):  # TRL divides its token count by it
            self._tp_size *= self.get_cp_size()

    def create_accelerator_and_postprocess(self) -> None:
        with fsdp_on_cpus() if self.args.use_cpu or not torch.cuda.is_available() else nullcontext():
            super().create_accelerator_and_postprocess()
        # SFTTrainer has packed its data by now, and would refuse packing here, since accelerate's cp drops the mask
        self._packing = {name: getattr(self.args, name) for name in _PACKING if hasattr(self.args, name)}
        for name in self._packing:
            setattr(self.args, name, False)
        self.accelerator._prepare_cp = lambda *prepared: prepared  # would drop masks and use PyTorch's context_parallel
        if self.accelerator.dispatch_batches is None:  # iterable datasets: rank 0 would send each rank another batch
            self.accelerator.dataloader_config.dispatch_batches = False
        self.accelerator.gather_for_metrics = self.gather_function = self._gather_for_metrics

    def _check(self) -> None:
        """Refuse settings that do not work with sharded sequences."""
        config, where = self.accelerator.parallelism_config, type(self).__name__
        if config is None or not config.cp_enabled:
            got = None if config is None else config.cp_size
            hint = f"pass parallelism_config=ParallelismConfig(cp_size=...), or use {where} as it is"
            refuse(f"{where}: cp_size", "2 or more", got, hint)
        if config.tp_enabled:
            hint = "tp_size=1, as accelerate does not combine tp and cp with this Transformers; write your own loop"
            refuse(f"{where}: tp_size", 1, config.tp_size, hint, UnsupportedError)
        if config.cp_handler != TorchContextParallelConfig():
            hint = "leave it out; methods are an option of context_parallel, such as method='all_gather'"
            refuse(f"{where}: cp_handler", "none", config.cp_handler, hint)
        for name, (available, hint) in _ARGUMENTS.items():
            if (value := getattr(self.args, name)) not in available:
                refuse(f"{where}: {name}", available[0], value, hint, UnsupportedError)
        if hasattr(self, "aux_loss_enabled") and not self.args.average_tokens_across_devices:
            hint = "leave it out: TRL takes a share of less than one token of a rank for one token"
            refuse(f"{where}: average_tokens_across_devices", True, False, hint, UnsupportedError)
        if self.args.use_liger_kernel:
            of_liger = self.args.liger_kernel_config or {}
            if given := [name for name in _LOSSES if of_liger.get(name)]:
                hint = "leave it out: the loss of cp_mesh covers all ranks"
                refuse(f"{where}: liger_kernel_config", f"{given[0]}=False", True, hint, UnsupportedError)
            self.args = copy(self.args)  # the caller's may serve a Trainer without cp
            self.args.liger_kernel_config = of_liger | dict.fromkeys(_LOSSES, False)
        for name, hint in {"compute_loss_func": _LOCAL, "model_init": "build the model and pass it"}.items():
            if getattr(self, name) is not None:
                refuse(f"{where}: {name}", None, "a function", hint, UnsupportedError)
        if not any(x.kind is x.VAR_KEYWORD for x in signature(self._base_model.forward).parameters.values()):
            what = "a model whose forward takes num_items_in_batch, by which its loss is divided"
            refuse(where, what, type(self.model).__name__, "give its forward **kwargs", UnsupportedError)
        check_adapters(self.model)
        if hasattr(self.model, "peft_config") and hasattr(self, "aux_loss_enabled"):
            head = self._base_model.get_output_embeddings()
            if any(x.requires_grad for x in head.parameters()):
                hint = "leave it out of modules_to_save: its gradient is not reduced under FSDP2"
                refuse(f"{where}: peft_config", "a frozen lm_head", "one that is trained", hint, UnsupportedError)
        if self.accelerator.dispatch_batches:
            hint = "leave it out: every rank then reads its own batches, with the same ones on all cp ranks"
            refuse(f"{where}: dispatch_batches", False, True, hint, UnsupportedError)

    @property
    def _base_model(self) -> Any:
        """The Transformers model inside of the wrappers of accelerate and PEFT."""
        return unwrap_peft_model(self.accelerator.unwrap_model(self.model))

    def get_batch_samples(self, *args: Any, **kwargs: Any) -> Any:
        # dropout seeds depend on the step, which is taken from the Trainer since it may resume from a checkpoint
        _adapter(self._base_model).steps = self.state.global_step * self.args.gradient_accumulation_steps
        return super().get_batch_samples(*args, **kwargs)

    def _prepare_context_parallel_inputs(self, model: nn.Module, inputs: dict[str, Any]) -> Any:
        return nullcontext, inputs  # the model shards them

    def compute_loss(
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        return_outputs: bool = False,
        num_items_in_batch: Tensor | int | None = None,
    ) -> Any:
        _adapter(self._base_model)
        inputs.pop("skip_logits", None)  # for Liger's forward
        if getattr(model, SUMS, False):
            hint = "leave sum_gradients out: the Trainer multiplies the loss by the number of ranks"
            refuse(type(self).__name__, "gradients that FSDP2 averages", "cp_mesh.sum_gradients", hint)
        steps = getattr(self, "current_gradient_accumulation_steps", 1)
        if num_items_in_batch is None and "labels" in inputs:
            count = self._count(inputs)
            if self.model_accepts_loss_kwargs or hasattr(self, "aux_loss_enabled"):
                scale = self.accelerator.num_processes if self.args.average_tokens_across_devices else 1
                num_items_in_batch = count * scale
                self.current_gradient_accumulation_steps = 1  # TRL divides the routers' loss by it if there is a count
            else:  # Trainer would neither pass the count on nor multiply the loss
                inputs = inputs | {"num_items_in_batch": count}
        try:
            return super().compute_loss(model, inputs, return_outputs, num_items_in_batch)
        finally:
            self.current_gradient_accumulation_steps = steps

    def _count(self, inputs: dict[str, Any]) -> Tensor:
        """Return the loss divisor where the Trainer has none: the mean over cp is then the mean of this batch."""
        labels = inputs["labels"][..., 1:] if self._loss_shifts_labels else inputs["labels"]
        valid = inputs.get("shift_labels", labels).ne(IGNORED).sum()
        return valid / self.get_cp_size()

    def prediction_step(
        self, model: nn.Module, inputs: dict[str, Any], prediction_loss_only: bool, ignore_keys: Any = None
    ) -> tuple[Any, Any, Any]:
        if ignore_keys is None:
            ignore_keys = getattr(self.model.config, "keys_to_ignore_at_inference", ["past_key_values", "cache"])
        ignored = [*ignore_keys, *_NO_LOGITS]
        loss, logits, labels = super().prediction_step(model, inputs, prediction_loss_only, ignored)
        if loss is not None:
            loss = loss.to(torch.float32, copy=True)  # FSDP2 may give it in bfloat16
            dist.all_reduce(loss, group=self.accelerator.torch_device_mesh["cp"].get_group())
            loss /= self.get_cp_size()
        if logits is not None:
            logits = recursively_apply(sequence_of(self._base_model).unshard, logits)
        return loss, logits, labels

    def _gather_for_metrics(self, data: Any, use_gather_object: bool = False) -> Any:
        """Replace the accelerator's method: gather each batch once, not from every cp rank; scalars from all ranks."""
        return recursively_apply(self._gather_one, data)

    def _gather_one(self, x: Tensor) -> Tensor:
        if x.ndim == 0:
            return self.accelerator.gather(x)
        for name in reversed(self.accelerator.parallelism_config.dp_dim_names):
            axis = self.accelerator.torch_device_mesh[name]
            batches = [torch.empty_like(x, memory_format=torch.contiguous_format) for _ in range(axis.size())]
            dist.all_gather(batches, x.contiguous(), group=axis.get_group())
            x = torch.cat(batches)
        state = self.accelerator.gradient_state
        return x[: state.remainder] if state.end_of_dataloader and state.remainder > 0 else x

    def _track_num_input_tokens(self, inputs: dict[str, Any]) -> None:
        before = self.state.num_input_tokens_seen
        super()._track_num_input_tokens(inputs)
        self.state.num_input_tokens_seen = before + (self.state.num_input_tokens_seen - before) // self.get_cp_size()

    def floating_point_ops(self, inputs: dict[str, Any]) -> int:
        return super().floating_point_ops(inputs) // self.get_cp_size()


@contextmanager
def fsdp_on_cpus() -> Iterator[None]:
    """Let accelerate use FSDP2 on CPU ranks within the context, to try a script and in tests."""
    as_it_was = AcceleratorState.__init__

    def init(self: AcceleratorState, *args: Any, fsdp_plugin: Any = None, **kwargs: Any) -> None:
        as_it_was(self, *args, fsdp_plugin=fsdp_plugin, **kwargs)
        if self.distributed_type == DistributedType.MULTI_CPU and fsdp_plugin is not None:
            self.distributed_type, self.fsdp_plugin = DistributedType.FSDP, fsdp_plugin
            if self._mixed_precision != "no":
                fsdp_plugin.set_mixed_precision(self._mixed_precision)
            PartialState._shared_state["distributed_type"] = self.distributed_type  # read by later states

    AcceleratorState.__init__ = init
    try:
        yield
    finally:
        AcceleratorState.__init__ = as_it_was


def _adapter(model: nn.Module) -> Any:
    """Return the `_Adapter` that runs the forward of a parallel model."""
    style = replaced(model, STYLE)
    adapter = None if style is None else getattr(style.run, "__self__", None)
    if adapter is None:
        hint = "pass the model to the Trainer's __init__, and do not replace it"
        refuse("context_parallel", "the model that it made parallel", type(model).__name__, hint)
    return adapter
