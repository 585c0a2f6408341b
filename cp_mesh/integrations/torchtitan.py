"""`context_parallel`: attention of cp_mesh in torchtitan 0.3, with its Trainer.

torchtitan still shards tokens, labels and positions, scales losses and reduces gradients. Only the inner attention of
the model becomes another class, by its override mechanism (`torchtitan_attention.py`); for layout="auto" a subclass of
the Trainer orders each batch before torchtitan cuts it.
Nothing of torchtitan is patched: a copy of the model's parallelize function runs with some of its globals replaced.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, fields, is_dataclass, replace
from types import FunctionType
from typing import Any, Literal, NoReturn, TypeVar

import torch
from torch import Tensor, nn

from cp_mesh.call.plan import choose_method
from cp_mesh.call.spec import EXECUTION, make_spec
from cp_mesh.errors import UnsupportedError, refuse
from cp_mesh.geometry.batch_mask import batch_mask
from cp_mesh.geometry.layouts import Contiguous, Layout, ZigZag
from cp_mesh.geometry.mask import Mask
from cp_mesh.sequence.sharded_sequence import ShardedSequence
from cp_mesh.wrap import asks_for, with_names

BALANCERS: dict[str | None, Layout] = {"headtail": ZigZag(), None: Contiguous()}
"""Layouts by torchtitan's context_parallel_load_balancer."""
ATTENTION = "cp_mesh.integrations.torchtitan_attention"
_HINT = "the dataloader must give positions, as torchtitan's own do"
_SETTING = "parallelism.context_parallel_load_balancer"
_SpecT = TypeVar("_SpecT")


def context_parallel(spec: _SpecT, *, layout: Literal["auto"] | None = None, **options: Any) -> _SpecT:
    """Use cp_mesh attention in a model of torchtitan if ``parallelism.context_parallel_degree`` is above 1.

    Everything else stays torchtitan's: configuration, data, sharding (``context_parallel_load_balancer`` is "headtail",
    here `ZigZag`, or None, here `Contiguous`), loss, tensor parallelism, checkpointing, compile and FSDP2.

    Args:
        spec: the `Trainer.Config` of a model. It is not changed.
        layout: "auto": each batch has its own, as in `ShardedSequence`, and ``context_parallel_load_balancer`` becomes
            None. None: that of the load balancer.
        **options: kernel, method, transport, ulysses_degree, head_chunks, deterministic, as in `cp_mesh.attention`.

    Returns:
        A copy of the spec with another ``parallelize_fn``, and entries in ``override.imports``.

    Raises:
        ArgumentError, UnsupportedError: here or when the Trainer is built, on every rank, if a model or a setting would
            not be exact (the message names the setting to change); in the first forward, if torchtitan sharded the rows
            in another layout.

    Example:
        >>> config = context_parallel(llama3_debugmodel())  # doctest: +SKIP
    """
    if unknown := sorted(options.keys() - set(EXECUTION)):
        refuse("context_parallel", f"options among {', '.join(EXECUTION)}", unknown[0], "set it in torchtitan's config")
    if layout not in (None, "auto"):
        refuse("context_parallel: layout", '"auto" or None', layout, f"leave it out, and set {_SETTING}")
    make_spec(**options)
    choose_method(options.get("method", "auto"))
    model_spec = getattr(spec, "model_spec", None)
    if not is_dataclass(spec) or isinstance(spec, type) or model_spec is None or not hasattr(spec, "override"):
        hint = "pass what a function of config_registry returns"
        refuse("context_parallel", "a Trainer.Config of torchtitan 0.3 with a model_spec", spec, hint)
    imports = [f"{ATTENTION}.{name}" for name in ("flex", "varlen", "selective")]
    changed: dict[str, Any] = {
        "model_spec": replace(model_spec, parallelize_fn=_with_sequence(model_spec, layout == "auto", options)),
        "override": replace(spec.override, imports=[*spec.override.imports, *imports]),
    }
    kind: Any = type(spec)
    if layout == "auto":
        changed["parallelism"] = replace(spec.parallelism, context_parallel_load_balancer=None)  # type: ignore[attr-defined]
        kind = _ordering(kind)
    return kind(**{x.name: getattr(spec, x.name) for x in fields(spec)} | changed)


def _ordering(config: Any) -> Any:
    """Return a class of configurations whose Trainer puts each batch in the order in which ranks hold its rows.

    torchtitan then cuts it in equal chunks, and the model gets a mask that has the layout.
    """

    class Trainer(config._owner):
        @dataclass(kw_only=True, slots=True)
        class Config(config):
            pass

        def post_dataloading_process(self, input_dict: dict[str, Tensor], labels: Tensor) -> Any:
            if not self.parallel_dims.cp_enabled:
                return super().post_dataloading_process(input_dict, labels)
            if "positions" not in input_dict:
                refuse("a batch", "the positions of its tokens", [*input_dict], _HINT)
            mask = Mask(documents=_documents(input_dict["positions"]))
            axis: Any = self.parallel_dims.get_mesh("cp")
            batch = ShardedSequence(axis, "auto").for_batch(labels.shape[1], mask)  # type: ignore[arg-type]
            rows = [batch.layout.positions(labels.shape[1], axis.size(), rank) for rank in range(axis.size())]
            order = torch.cat(rows).to(labels.device)
            ordered = {name: x[:, order] if x.shape[:2] == labels.shape else x for name, x in input_dict.items()}
            tokens, labels, others = super().post_dataloading_process(ordered, labels[:, order])
            own = batch.positions(device=order.device)
            if not torch.equal(others["positions"], input_dict["positions"][:, own]):
                _refuse_rows(others["positions"])
            return tokens, labels, others | {"attention_masks": batch.mask(mask)}

    return Trainer.Config


def _with_sequence(model_spec: Any, by_batch: bool, options: dict[str, Any]) -> Callable[..., nn.Module]:
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
            if not given["training"].disable_cuda_graphs:
                refuse("training.disable_cuda_graphs", True, False, "set it: masks are read on the host in every step")
            sequence = _sequence(parallel_dims, parallelism, by_batch)
            windows = prepare(model, sequence, options)

            def masks(mask: Mask) -> dict[str, Any]:
                made = {
                    key: replace(mask, window=None if window is None else (window - 1, 0))
                    for key, window in windows.items()
                }
                return {"attention_masks": made.get(None, made)}

            _with_positions(model, sequence, masks, no_typecheck)
        return with_names(own, own.__globals__ | {name: lambda modules, mesh: None})(model, **given)

    return parallelize_fn


def _asking(function: Any, *names: str) -> FunctionType:
    """Return the function if these globals can be replaced in it; refuse others."""
    if not asks_for(function, *names):
        got = getattr(function, "__qualname__", function)
        hint = "call context_parallel with what torchtitan itself returns, and wrap that"
        refuse("parallelize_fn", f"a function of torchtitan that calls {names[0]}", got, hint, UnsupportedError)
    return function


def _sequence(parallel_dims: Any, parallelism: Any, by_batch: bool) -> ShardedSequence:
    if parallel_dims.pp_enabled:
        hint = "parallelism.pipeline_parallel_degree = 1: stages of torchtitan were not tested"
        refuse("pipeline_parallel_degree", 1, parallel_dims.pp, hint, UnsupportedError)
    balancer = parallelism.context_parallel_load_balancer
    if by_batch and balancer is not None:
        refuse(_SETTING, "None under layout='auto'", repr(balancer), "leave it out", UnsupportedError)
    if balancer not in BALANCERS:
        hint = "it balances FlexAttention's blocks; zigzag is 'headtail'"
        refuse(_SETTING, "'headtail' or None", repr(balancer), hint, UnsupportedError)
    return ShardedSequence(parallel_dims.get_mesh("cp"), BALANCERS[balancer])


def _with_positions(
    model: nn.Module,
    sequence: ShardedSequence,
    read: Callable[[Mask], dict[str, Any]],
    context: Callable[[], AbstractContextManager[Any]],
) -> None:
    """Call ``read`` with the batch's mask before every forward, and pass on its keywords.

    Without a mask in the call it is made from positions, within ``context``.
    """
    names = [*inspect.signature(model.forward).parameters]

    def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        positions = (dict(zip(names, args, strict=False)) | kwargs).get("positions")
        if positions is None:
            refuse(type(module).__name__, "the positions of this rank's rows", None, _HINT)
        mask = kwargs.get("attention_masks")
        if not isinstance(mask, Mask):
            with context():
                mask = Mask(documents=_documents(sequence.unshard(positions)))
        return args, kwargs | read(mask)

    model.register_forward_pre_hook(hook, with_kwargs=True)


def _documents(positions: Tensor) -> Tensor | None:
    """Return the documents of positions that increase by 1 or restart at 0; refuse others."""
    if not bool(((positions.diff(dim=-1) == 1) | (positions[..., 1:] == 0)).all()):
        _refuse_rows(positions)
    return batch_mask(position_ids=positions).documents


def _refuse_rows(positions: Tensor) -> NoReturn:
    hint = f"shard by torchtitan's own code, with {_SETTING} as when the model was made"
    refuse("positions of the whole sequence", "0, 1, 2, ... in every document", positions[0].tolist()[:8], hint)
