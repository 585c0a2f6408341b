"""`parallelize`, which applies styles or raises, `sum_gradients` and `checkpoint_context_fn`.

Order of application: tensor parallelism on ``mesh["tp"]``, then `parallelize` on ``mesh["cp"]``, then checkpointing,
compile and FSDP2.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from fnmatch import fnmatchcase
from itertools import product
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ParallelStyle
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

from cp_mesh._torch import COMPILED, apply_style
from cp_mesh.comm.agreement import note_styles
from cp_mesh.comm.groups import as_mesh, link_groups
from cp_mesh.errors import refuse, typed, written
from cp_mesh.sequence.sharded_sequence import ShardedSequence
from cp_mesh.training.boundaries import GatherOutput, ShardInput
from cp_mesh.training.checks.config import check_adapters
from cp_mesh.training.checks.gradients import watch_first_step
from cp_mesh.training.checks.inputs import watch_rootless
from cp_mesh.training.sharded_model import ShardedModel
from cp_mesh.training.style_helpers import SUMS, Core, OverCP, groups_over_cp, groups_over_tp
from cp_mesh.wrap import Style, plain_name, replaced

_Place = tuple[str, nn.Module, str]
"""A parameter or buffer: its full name in the model, its module, and its name in the module."""


@typed
def parallelize(
    module: nn.Module,
    mesh: DeviceMesh | dist.ProcessGroup,
    plan: Mapping[str, ParallelStyle],
    *,
    watch: bool = True,
) -> nn.Module:
    """Apply styles to modules: `torch.distributed.tensor.parallel.parallelize_module` that raises on a wrong plan.

    Tied parameters stay tied; PyTorch's function unties them.

    Args:
        module: the model; changed in place.
        mesh: a 1-D mesh of one axis, or its ProcessGroup; for a `ShardedSequence` over two axes, its ``mesh``.
        plan: styles by module name; ``*`` and other `fnmatch` wildcards match within one part of a dotted name, and
            "" is the root. Styles of PyTorch work too. For a compiled module, the style goes to the module inside it.
        watch: without a `ShardedModel`, check the first eager forward of the module: refuse self-attention outside of
            the plan, tokens that are the same on every rank, and positions that every rank counts from 0. Compiled
            code is checked for attention whenever it is traced. Pass False for modules that also attend to sequences
            which are not sharded.

    Returns:
        The module.

    Raises:
        ArgumentError: if a key matches no module, two keys match one module, the mesh is not 1-D, linears over tp have
            two modes, a style is applied twice, the root and a core have different sequences, or one of them has a
            ``layout`` and the other none, or the styles shard a tied parameter in two ways.
        UnsupportedError: if `ContextParallel` matches a cross-attention module (by its name), or a style a module of
            torch.jit.

        All styles of cp_mesh check their modules before the first one is applied, so a refused plan leaves the model as
        it was. PyTorch's own styles have no check: after an error of theirs, or of a tied parameter that they shard,
        build the model again.

    Example:
        >>> parallelize(model, mesh["cp"], {"layers.*.attention.core": ContextParallel(sequence)})  # doctest: +SKIP
    """
    mesh = as_mesh(mesh)
    if not isinstance(mesh, DeviceMesh) or mesh.ndim != 1:
        hint = 'pass mesh["cp"], one axis at a time; of a ShardedSequence over two axes, its mesh'
        refuse("parallelize: mesh", "one axis of a DeviceMesh", mesh, hint)
    _check_sequences(plan)
    modules = {plain_name(path): getattr(part, COMPILED, part) for path, part in module.named_modules()}
    root = modules[""]
    chosen: dict[str, tuple[str, ParallelStyle]] = {}
    for key, style in plan.items():
        if not isinstance(key, str):
            refuse("parallelize: plan key", "the name of a module", key, f"write {str(key)!r}")
        if not isinstance(style, ParallelStyle):
            refuse(f"parallelize: style of {key!r}", "an instance of a ParallelStyle", style, "write Style(...)")
        matches = [name for name in modules if _matches(plain_name(key), name)]
        if not matches:
            close = difflib.get_close_matches(key, modules, n=3) or list(modules)[1:4]
            refuse("parallelize: plan key", "the name of a module", repr(key), f"near it: {', '.join(close)}")
        for name in matches:
            if name in chosen:
                refuse("parallelize", "one plan key a module", f"{chosen[name][0]!r}, {key!r} for {name!r}", "drop one")
            chosen[name] = (key, style)
    _check_modes(chosen)
    styles = [style for _, style in chosen.values()]
    over_cp = any(isinstance(style, OverCP) for style in styles)
    if over_cp:
        check_adapters(root)
    tied = _tied(module)
    _check({modules[name]: (name, style) for name, (_, style) in chosen.items()}, mesh, tied)
    for name, (_, style) in chosen.items():
        if isinstance(style, Style):
            style.apply(modules[name], mesh)
            if (found := replaced(modules[name], style.key)) is not None:
                found.where = name
            continue
        trained = {key: x.requires_grad for key, x in modules[name].named_parameters()}
        apply_style(style, modules[name], mesh)
        for key, parameter in modules[name].named_parameters():  # PyTorch's SequenceParallel makes new, trainable ones
            parameter.requires_grad_(trained.get(key, parameter.requires_grad))
    _check_ties(tied, {}, ". The plan was applied: build the model again")
    for (_, part, name), *others in tied:
        for _, other, key in others:
            if getattr(other, key) is not getattr(part, name):
                setattr(other, key, getattr(part, name))
    note_styles(mesh.get_group(), module, {f"style at {key!r}": _options(style) for key, style in plan.items()})
    link_groups(dict.fromkeys(groups_over_cp(module), "cp") | dict.fromkeys(groups_over_tp(module), "tp"))
    if over_cp:
        watch_first_step(root, cp=mesh.get_group())
    if modes := {mode for style in styles if (mode := _mode_over_tp(style))}:
        watch_first_step(root, tp=mesh.get_group(), rows="reduce_scatter" in modes)
    if watch and any(isinstance(style, Core) for style in styles) and "" not in chosen:
        watch_rootless(root)
    return module


@typed
def sum_gradients(model: nn.Module) -> None:
    """Make FSDP2 or DistributedDataParallel reduce gradients by a plain SUM, as `cross_entropy` requires.

    Call it after `fully_shard` (it sets every FSDP module), or on the DistributedDataParallel wrapper. With it FSDP2
    also works on gloo, which lacks the pre-multiplied sum.

    Args:
        model: the root, with all parameters under `fully_shard` on a mesh that contains the cp ranks; or a
            DistributedDataParallel over these ranks, without a communication hook.

    Raises:
        ArgumentError: if the model is neither, or if the gradient of some parameter would not be summed over the ranks
            over which a style splits the sequence.
    """
    cp_ranks = {rank for group in groups_over_cp(model) for rank in dist.get_process_group_ranks(group)}
    if isinstance(model, DistributedDataParallel):
        ranks = dist.get_process_group_ranks(model.process_group)
        if not cp_ranks <= set(ranks):
            hint = "give it the process group of dp x cp"
            refuse("sum_gradients", f"DistributedDataParallel over the cp ranks {sorted(cp_ranks)}", ranks, hint)
        model.register_comm_hook(model.process_group, lambda group, bucket: _sum(group, bucket))
        return
    sharded = [module for module in model.modules() if isinstance(module, FSDPModule)]
    if not sharded:
        refuse("sum_gradients", "a model under fully_shard", type(model).__name__, "call fully_shard first")
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


def _sum(group: dist.ProcessGroup, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    summed = dist.all_reduce(bucket.buffer(), group=group, async_op=True).get_future()
    return summed.then(lambda done: done.value()[0])


def is_attention(op: Any) -> bool:
    return str(op) in ("cp_mesh.attention.default", "cp_mesh.latent_attention.default")


def _save_attention(_ctx: Any, op: Any, *_args: Any, **_kwargs: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if is_attention(op) else CheckpointPolicy.PREFER_RECOMPUTE


def checkpoint_context_fn() -> Any:
    """Return contexts for selective checkpointing: save attention outputs, so that recomputation skips the ring.

    If torch.compile reports side effects in a checkpoint around a `ContextParallel` module, set
    ``torch._dynamo.config.skip_fwd_side_effects_in_bwd_under_checkpoint = True``. Dynamo counts the mode that
    intercepts attention as a side effect. Skipping it in the backward is safe, since that uses the saved output.

    Example:
        >>> from torch.utils.checkpoint import checkpoint
        >>> checkpoint(block, x, use_reentrant=False, context_fn=checkpoint_context_fn)  # doctest: +SKIP
    """
    return create_selective_checkpoint_contexts(_save_attention)


def _matches(key: str, name: str) -> bool:
    if not key or not name:  # only the key "" matches the root
        return key == name
    parts, atoms = name.split("."), key.split(".")
    return len(parts) == len(atoms) and all(fnmatchcase(p, a) for p, a in zip(parts, atoms, strict=True))


def _options(style: ParallelStyle) -> str:
    """The style with its options that are plain values, to compare over ranks."""
    options = {**vars(style), **getattr(style, "options", {})}
    plain = [f"{name}={x!r}" for name, x in options.items() if x is None or isinstance(x, bool | int | float | str)]
    return f"{type(style).__name__}({', '.join(plain)})"


def _check_modes(chosen: Mapping[str, tuple[str, ParallelStyle]]) -> None:
    """Refuse linears over tp with different modes."""
    modes = {mode: key for key, style in chosen.values() if (mode := _mode_over_tp(style))}
    if len(modes) > 1:
        got = ", ".join(f"{mode!r} at {key!r}" for mode, key in sorted(modes.items()))
        refuse("parallelize: mode", "one for all linears over tp", got, "give all linears of a model one mode")


def _mode_over_tp(style: ParallelStyle) -> str:
    """Return the mode of a cp_mesh linear style over tp: how it shards activations; "" for other styles."""
    return str(getattr(style, "mode_over_tp", ""))


def _tied(module: nn.Module) -> list[list[_Place]]:
    """Return the places of each tied parameter or buffer."""
    found: dict[int, list[_Place]] = {}
    for path, part in module.named_modules():
        whole = {"recurse": False, "remove_duplicate": False}
        for name, x in (*part.named_parameters(**whole), *part.named_buffers(**whole)):
            found.setdefault(id(x), []).append((plain_name(f"{path}.{name}").lstrip("."), part, name))
    return [places for places in found.values() if len(places) > 1]


def _check(plan: Mapping[nn.Module, tuple[str, ParallelStyle]], mesh: DeviceMesh, tied: list[list[_Place]]) -> None:
    """Refuse, before anything is applied, what styles of cp_mesh refuse; others have no check."""
    taken: dict[tuple[nn.Module, str], str] = {}
    planned: dict[tuple[nn.Module, str], Any] = {}
    unknown = set[nn.Module]()
    for module, (name, style) in plan.items():
        if not isinstance(style, Style):
            unknown.update(module.modules())
            continue
        style.check(module, mesh, name)
        for part in style.parts(module):
            if (other := taken.setdefault((part, style.key), name)) != name:
                refuse("parallelize", "one style for a linear", f"those of {other!r} and {name!r}", "drop one")
            planned |= {(part, key): (mesh, (placement,)) for key, placement in style.placements.items()}
    _check_ties([places for places in tied if unknown.isdisjoint(part for _, part, _ in places)], planned)


def _check_ties(tied: list[list[_Place]], planned: Mapping[tuple[nn.Module, str], Any], more: str = "") -> None:
    """Refuse a plan that shards a tied tensor in two ways."""
    for places in tied:
        found = dict[str, Any]()
        for path, part, name in places:
            x = getattr(part, name, None)
            own = (x.device_mesh, x.placements) if isinstance(x, DTensor) else id(x)
            found[path] = planned.get((part, name), own)
        if len({*found.values()}) > 1:
            words = (f"{path} {written(x[1]) if isinstance(x, tuple) else 'plain'}" for path, x in found.items())
            hint = (
                "give its modules, in one plan, styles with the same sharding, such as VocabParallelEmbedding() and "
                f"VocabParallelHead(), or leave them all out{more}"
            )
            refuse("parallelize: a tied tensor", "the same sharding in all its modules", ", ".join(words), hint)


def _check_sequences(plan: Mapping[str, ParallelStyle]) -> None:
    """Refuse a plan whose root and cores differ in their sequence, or of which only some have ``layout=``."""
    roots = {key: x for key, x in plan.items() if isinstance(x, ShardedModel | ShardInput | GatherOutput)}
    cores = {key: x for key, x in plan.items() if isinstance(x, Core | ShardInput | GatherOutput)}
    for (root_key, root), (key, core) in product(roots.items(), cores.items()):
        if root.sequence != core.sequence:
            got = f"{_sequence_words(root.sequence)} at {root_key!r}, {_sequence_words(core.sequence)} in {key!r}"
            hint = "give all styles the same object; put a core of another sequence in a plan of its own"
            refuse("sequence", "one for the root and its cores", got, hint)
        if (root.layout is None) != (core.layout is None):
            with_one, without = (key, root_key) if root.layout is None else (root_key, key)
            got = f"a layout at {with_one!r} and none at {without!r}"
            hint = "give both a function that returns the same layout for a batch"
            refuse("layout=", "in all styles of a sequence, or in none", got, hint)


def _sequence_words(sequence: ShardedSequence) -> str:
    return f"{sequence.layout.spec()} with length={sequence.length}, pad={sequence.pad}"
