"""How gradients are reduced, compared before the first optimizer step with the loss that they are of.

The loss of a rank is a share of a sum, so gradients must be summed over the ranks of the loss: whether FSDP2,
DistributedDataParallel or the trainer's own code did, and over which ranks, is known when the optimizer is called. The
hook that looks is PyTorch's, for all optimizers. It looks at each model under a plan once (`sequence/losses.py` says
which losses are its own), and gives up one that has no gradients in the first steps, as a teacher.

Of a model whose rows are sharded over tp it compares the gradients of parameters that are no DTensors over tp: each
rank has those of its own rows, if nobody summed them.
"""

from __future__ import annotations

import functools
import gc
import json
import sys
import warnings
import weakref
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import register_optimizer_step_pre_hook

from cp_mesh._torch import PIPELINE_STAGE, comm_hooks, pipeline_schedules, ranks_of_fsdp
from cp_mesh.comm.agreement import capturing, compare_steps, turned_off
from cp_mesh.comm.first_calls import look_again
from cp_mesh.comm.store_messages import Answers
from cp_mesh.errors import ArgumentError, RankMismatchError, describe, refuse
from cp_mesh.kernels.combine import accumulation_dtype
from cp_mesh.sequence.losses import (
    LOOKED_AT,
    LOOKS,
    WAITING,
    WRAPPERS,
    Loss,
    Planned,
    forget_nobodys,
    losses_of,
    note_step,
)
from cp_mesh.sequence.rows import CALLED
from cp_mesh.training.loss import groups_of, ranks_of
from cp_mesh.training.style_helpers import SUMS, gathers

_APART = 1e-3
"""Relative: norms of gradients that were reduced are equal but for rounding."""
_OTHER_WEIGHTS = 1e-5
"""Relative: norms of one weight are equal, and of as many other random numbers they are near."""
_SAMPLE = 1024


class _FirstSteps:
    """One hook of PyTorch's optimizers, for all models whose gradients were not looked at yet."""

    def __init__(self) -> None:
        self.hooked = False
        self.stepped: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()  # in this round
        self.later: list[Callable[[], None]] = []  # comparisons to which some ranks were late
        self.over_tp: weakref.WeakKeyDictionary[nn.Module, _OverTP] = weakref.WeakKeyDictionary()

    def add(self, module: nn.Module, planned: Planned) -> None:
        WAITING[module] = planned
        LOOKED_AT.discard(module)
        self.hook()

    def hook(self) -> None:
        if not self.hooked:
            register_optimizer_step_pre_hook(self.before_step)
            self.hooked = True

    def before_step(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        if torch.compiler.is_compiling() or not (WAITING or self.later or self.over_tp) or capturing():
            return
        # of a checkpoint that is loaded PyTorch makes the optimizer's state by a step on zeros, which changes nothing
        if all(isinstance(rate := part.get("lr"), int | float) and rate == 0 for part in optimizer.param_groups):
            return
        inside = note_step()
        held = {id(x) for part in optimizer.param_groups for x in part["params"]}
        again = optimizer in self.stepped  # there may be one for each parameter, so rounds are counted, not steps
        self.stepped = weakref.WeakSet([optimizer] if again else [*self.stepped, optimizer])
        if again:
            later, self.later = self.later, []
            for decide in later:
                decide()
        for module, over_tp in list(self.over_tp.items()):
            over_tp.looks -= again
            graded = {name: x for name, x in module.named_parameters() if x.grad is not None}
            ranks = over_tp.ranks  # of what a backward has graded, DTensors over tp tell nothing
            taken = {n: x for n, x in graded.items() if id(x) in held and not (inside and ranks in _axes([x]))}
            if taken or over_tp.looks <= 0:
                del self.over_tp[module]
            if taken and not turned_off(over_tp.mesh.get_group()):
                _check_over_tp(over_tp, taken if inside else graded)
        for module, planned in list(WAITING.items()):
            planned.looks -= again
            graded = {name: x for name, x in module.named_parameters() if x.grad is not None}
            taken = {name: x for name, x in graded.items() if id(x) in held}
            if not taken and planned.looks > 0:
                continue
            del WAITING[module]
            LOOKED_AT.add(module)
            if taken and not turned_off(planned.group):
                # in a backward, gradients of parameters that other optimizers hold may still be on their way
                looked_at = taken if inside else graded
                check_reduction(module, planned, looked_at, inside)
        if not inside:
            forget_nobodys()


@dataclass
class _OverTP:
    """A model whose rows are sharded over tp, until the first optimizer step that takes its gradients.

    Attributes:
        mesh: the tp axis.
        number: how many plans it had before.
        looks: rounds of optimizer steps that are left.
    """

    mesh: DeviceMesh
    number: int
    looks: int = LOOKS

    @property
    def ranks(self) -> tuple[int, ...]:
        """By which an axis is known, not by its name: a DTensor's mesh may be an equal one, made before."""
        return (*dist.get_process_group_ranks(self.mesh.get_group()),)


_first_steps = _FirstSteps()


def watch_first_step(module: nn.Module, mesh: DeviceMesh) -> None:
    """Look at the gradients of ``module``, which has a plan over ``mesh``, before the first step that takes them."""
    CALLED.set(None)
    number = look_again(mesh.get_group())
    if mesh.size() > 1:
        _first_steps.add(module, Planned(mesh.get_group(), number))


def watch_over_tp(module: nn.Module, mesh: DeviceMesh, shards_rows: bool) -> None:
    """The same of a ``module`` with styles over ``mesh``, that of tp, if they shard its rows."""
    number = look_again(mesh.get_group())
    if mesh.size() > 1 and shards_rows:
        _first_steps.over_tp[module] = _OverTP(mesh, number)
        _first_steps.hook()


def check_reduction(module: nn.Module, planned: Planned, trained: Mapping[str, Tensor], inside: bool = False) -> None:
    """Refuse gradients that are no sums over the ranks of the loss, or are of other weights; warn if nobody can know.

    Args:
        module: the model, or the part of it that has a plan.
        planned: its losses, and the cp group.
        trained: its parameters with a gradient, by name.
        inside: whether the optimizer steps in the backward, before DistributedDataParallel reduces.

    Raises:
        ArgumentError: on every rank.
    """
    losses = losses_of(planned)
    found = _Found(planned, losses, trained)
    _compare_batches(planned, losses)
    stage = _stage_of(module)
    if stage is not None and losses:
        _check_microbatches(stage, losses)
    if not losses and not gathers(module) and (stage is None or stage.is_last):
        warnings.warn(
            "cp_mesh: an optimizer steps on gradients of a loss that is not cp_mesh.cross_entropy. A rank's loss must "
            "be its share of a sum over all ranks, not the mean of its own rows: cross_entropy(logits, labels, data), "
            "or its sum / the valid tokens of all ranks",
            stacklevel=3,
        )
    if (fsdp := next((part for part in module.modules() if isinstance(part, FSDPModule)), None)) is not None:
        _check_fsdp(fsdp, found)
    elif (wrapper := _wrapper(module)) is not None and not inside:
        ranks = dist.get_process_group_ranks(wrapper.process_group)
        _check_ranks(found, ranks, "DistributedDataParallel", "process_group=")
        if found.is_averaged(len(ranks)) and not comm_hooks(wrapper):
            warnings.warn(
                "cp_mesh: DistributedDataParallel averages gradients, and the loss is this rank's share of a sum: call "
                f"cp_mesh.sum_gradients(ddp_model), or multiply the loss by {wrapper.process_group.size()}",
                stacklevel=3,
            )
    elif not any(type(part).__name__ == "FullyShardedDataParallel" for part in module.modules()):
        for over in found.groups:
            _check_equal(over, planned, trained)
    _check_tensor_parallel(found)


@dataclass(frozen=True)
class _Found:
    """What is known of a model at its first step: its plan, its losses, and its parameters with gradients."""

    planned: Planned
    losses: list[Loss]
    trained: Mapping[str, Tensor]

    @property
    def mesh(self) -> DeviceMesh | dist.ProcessGroup | None:
        """The ranks of its losses; None if they are not known, not the same of all, or without those of cp."""
        return None if any(x.of_whole for x in self.losses) else self._mesh

    @property
    def groups(self) -> list[dist.ProcessGroup]:
        """Over which gradients that nothing else reduces must be equal."""
        return [self.planned.group] if self._mesh is None else groups_of(self._mesh)

    @property
    def _mesh(self) -> DeviceMesh | dist.ProcessGroup | None:
        of_ranks = {tuple(ranks_of(x.mesh)): x.mesh for x in self.losses if x.mesh is not None}
        return next(iter(of_ranks.values())) if len(of_ranks) == 1 else None

    @functools.cached_property
    def factors(self) -> list[float]:
        """With which the backwards of its losses began; waits for the device."""
        return [1.0 if x.factor is None else x.factor.item() for x in self.losses]

    @property
    def is_plain(self) -> bool:
        """Whether no loss was multiplied, or all together count once, as those of accumulated gradients."""
        return all(x == 1 for x in self.factors) or abs(sum(self.factors) - 1) < _APART

    def is_averaged(self, num_ranks: int) -> bool:
        """Whether a mean of gradients over so many ranks leaves too little of them.

        What makes up for it multiplies the loss by the number of ranks, of accumulated gradients all losses together.
        """
        total = sum(self.factors)
        return bool(self.losses) and (total < 1 + _APART or (self.is_plain and abs(total - num_ranks) > _APART))


def _compare_batches(planned: Planned, losses: list[Loss]) -> None:
    """Refuse tokens that are others on each rank; warn of labels that are no next tokens on some of them alone."""
    own = {name: "".join(sorted({getattr(x, name) for x in losses})) for name in ("tokens", "labels")}
    _compare(planned.group, f"batches {planned.number}", own, _decide_on_batches)


def _compare(group: dist.ProcessGroup, topic: str, own: dict[str, str], decide: Callable[[Answers], None]) -> None:
    if (later := compare_steps(group, topic, own, decide)) is not None:
        _first_steps.later.append(later)


def _decide_on_batches(answers: Answers) -> None:
    if len(found := {x["tokens"] for x in answers.values()} - {""}) > 1:
        raise RankMismatchError(
            f"cross_entropy: expected tokens that were sharded from one batch on every cp rank, got {len(found)} that "
            "differ; give every rank of a cp group the same batch, and seed the loader by dp rank"
        )
    by_kind = {kind: [rank for rank, x in answers.items() if x["labels"] == kind] for kind in ("next", "other")}
    if all(by_kind.values()):
        warnings.warn(
            f"cp_mesh: labels are the next tokens of their rows on cp ranks {by_kind['next']}, and others on "
            f"{by_kind['other']}. Expected those of one batch on every rank; are they of another batch there, or of "
            'other rows? Cut them with sequence.shard({"labels": labels}) from the batch that the tokens are from',
            stacklevel=4,
        )


def _stage_of(module: nn.Module) -> Any:
    """The stage of torch.distributed.pipelining that runs a module, if one does; only the last one has a loss.

    A stage that was made before `gc.freeze()` is not found: the collector does not tell of it.
    """
    kind = getattr(sys.modules.get("torch.distributed.pipelining.stage"), PIPELINE_STAGE, None)
    if kind is None:
        return None
    stages = (x for x in gc.get_objects() if issubclass(type(x), kind))
    return next((stage for stage in stages if any(part is module for part in stage.submod.modules())), None)


def _check_microbatches(stage: Any, losses: list[Loss]) -> None:
    """Warn of a schedule that divides what is divided already, or sums means."""
    counted = {x.counted for x in losses}
    for schedule, number in pipeline_schedules(stage):
        if number == 1 or counted != {schedule.scale_grads}:
            continue
        expected, got = "gradients that are divided once", f"{number} microbatches, scale_grads={schedule.scale_grads}"
        got += f" and cross_entropy {'with' if schedule.scale_grads else 'without'} a count"
        hint = "pass scale_grads=False, and cross_entropy(count=) the valid tokens of all microbatches and ranks"
        warnings.warn(f"cp_mesh: {describe('pipeline schedule', expected, got, hint)}", stacklevel=4)


def _check_fsdp(module: FSDPModule, found: _Found) -> None:
    ranks = ranks_of_fsdp(module)
    if ranks:
        _check_ranks(found, sorted(ranks), "fully_shard", "mesh=")
    if not hasattr(module, SUMS) and found.is_averaged(len(ranks)):
        setattr(module, SUMS, False)  # warned once
        warnings.warn(
            "cp_mesh: fully_shard averages gradients over its ranks, while losses of cp_mesh.cross_entropy are shares "
            "of a sum: call cp_mesh.sum_gradients(model) after fully_shard",
            stacklevel=3,
        )


def _check_ranks(found: _Found, ranks: list[int], by: str, option: str) -> None:
    """Refuse gradients that are reduced over other ranks than those of the loss.

    Over cp the trainer's own code may have summed them: then they are equal.
    """
    if found.mesh is None:
        return
    of_loss, cp_group = ranks_of(found.mesh), found.planned.group
    if set(ranks) == set(of_loss):
        return
    if set(ranks) < set(of_loss):
        if set(ranks).isdisjoint({*dist.get_process_group_ranks(cp_group)} - {dist.get_rank()}):
            _check_equal(cp_group, found.planned, found.trained)
            return
        got, hint = f"{by} over ranks {ranks}", f"give {by} {option} all of them, as mesh['dp', 'cp']._flatten()"
        refuse("gradients", f"a sum over the ranks of cross_entropy, {of_loss}", got, hint)
    expected, got = f"a mean over the ranks that {by} reduces over, {ranks}", f"one over ranks {of_loss}"
    hint = "give cross_entropy the mesh of all ranks with other tokens"
    if not found.is_plain:  # which may make it right
        warnings.warn(f"cp_mesh: {describe('cross_entropy', expected, got, hint)}", stacklevel=4)
        return
    refuse("cross_entropy", expected, got, hint)


def _wrapper(module: nn.Module) -> DistributedDataParallel | None:
    """The wrapper in whose forward the model's attention was called, if there is one."""
    return next((wrapper for wrapper in WRAPPERS if any(part is module for part in wrapper.modules())), None)


def _check_tensor_parallel(found: _Found) -> None:
    """Warn of parameters that tp does not shard, whose gradients differ between its ranks, which hold the same tokens.

    Such a rank's gradient is that of its rows alone, where modules between the linears see rows of their own, or of its
    heads. What a trainer cuts by hand, in plain tensors, has other weights on each rank, and is left out.
    """
    if found.mesh is None:
        return
    others = {*ranks_of(found.mesh)} - {dist.get_rank()}
    for ranks, group in _axes(found.trained.values(), sharded=True).items():
        whole = {name: x for name, x in found.trained.items() if ranks not in _axes([x])}
        if len(ranks) > 1 and others.isdisjoint(ranks) and whole:
            decide = functools.partial(_decide_on_tensor_parallel, False)
            _compare_norms(group, f"tensor parallel {found.planned.number}", whole, decide)


def _axes(tensors: Iterable[Tensor], sharded: bool = False) -> dict[tuple[int, ...], dist.ProcessGroup]:
    """The mesh axes of tensors by their ranks; with ``sharded``, those that shard some of them."""
    found = {}
    for x in (x for x in tensors if isinstance(x, DTensor)):
        for axis, placement in enumerate(x.placements):
            if placement.is_shard() or not sharded:
                group = x.device_mesh.get_group(axis)
                found[(*dist.get_process_group_ranks(group),)] = group
    return found


def _norm(x: Tensor) -> Tensor:
    """Without a copy of the gradient, for which there may be no memory."""
    x = x.to_local() if isinstance(x, DTensor) else x
    x = x.coalesce().values() if x.is_sparse else x
    return torch.linalg.vector_norm(x, dtype=accumulation_dtype(x.dtype))


def _some(x: Tensor) -> Tensor:
    """Some numbers of a weight: norms of two large ones may be equal by chance."""
    x = x.to_local() if isinstance(x, DTensor) else x
    while x.ndim > 1 and x.numel():
        x = x[0]
    return x.flatten()[:_SAMPLE]


def _check_equal(group: dist.ProcessGroup, planned: Planned, trained: Mapping[str, Tensor]) -> None:
    """Refuse gradients of replicated parameters that differ between ranks: nobody reduced them.

    Of the ranks that come: an optimizer may hold parameters of the model on some of them alone.
    """
    _compare_norms(group, f"gradients {planned.number}", trained, _decide_on_gradients)


def _compare_norms(
    group: dist.ProcessGroup,
    topic: str,
    trained: Mapping[str, Tensor],
    decide: Callable[[list[str], Answers], None],
) -> None:
    # one after the other: they may be on several devices
    own = {
        "gradients": {name: float(_norm(x.grad)) for name, x in trained.items() if x.grad is not None},
        "weights": {name: float(_norm(x.detach())) for name, x in trained.items()},
        "samples": {name: float(_norm(_some(x.detach()))) for name, x in trained.items()},
    }
    words = {field: json.dumps(norms) for field, norms in own.items()}
    _compare(group, topic, words, functools.partial(decide, list(trained)))


def _check_over_tp(over_tp: _OverTP, trained: Mapping[str, Tensor]) -> None:
    """Refuse gradients that differ between tp ranks, of parameters that are equal there and no DTensors over tp."""
    whole = {name: x for name, x in trained.items() if over_tp.ranks not in _axes([x])}
    decide = functools.partial(_decide_on_tensor_parallel, True)
    _compare_norms(over_tp.mesh.get_group(), f"gradients over tp {over_tp.number}", whole, decide)


def _apart(field: str, of_rank: list[str], answers: Answers, by: float) -> tuple[list[str], list[str]]:
    """The parameters that all ranks have, and those of them whose norms differ."""
    found = [json.loads(answer[field]) for answer in answers.values()]
    names = [name for name in of_rank if all(name in one for one in found)]
    table = torch.tensor([[one[name] for name in names] for one in found], dtype=torch.float64)
    low, high = table.amin(0), table.amax(0)
    return names, [name for name, differs in zip(names, ((high - low) > by * high).tolist(), strict=True) if differs]


def _other_weights(of_rank: list[str], answers: Answers) -> set[str]:
    """The parameters of which some ranks have other numbers."""
    return {name for field in ("weights", "samples") for name in _apart(field, of_rank, answers, _OTHER_WEIGHTS)[1]}


def _nonzero(field: str, answers: Answers) -> set[str]:
    """The parameters whose norm is not 0 on some rank."""
    return {name for answer in answers.values() for name, norm in json.loads(answer[field]).items() if norm != 0}


def _decide_on_gradients(of_rank: list[str], answers: Answers) -> None:
    names, differ = _apart("gradients", of_rank, answers, _APART)
    if differ:
        what = f"gradients of {len(differ)} of {len(names)} parameters, such as {differ[0]}"
        hint = "fully_shard and cp_mesh.sum_gradients, or all_reduce every gradient over the ranks of the loss with SUM"
        expected, got = "equal on all ranks before the optimizer steps", "another one on each rank"
        if len(differ) == len(names):
            raise ArgumentError(describe(what, expected, got, hint))
        warnings.warn(f"cp_mesh: {describe(what, expected, got, hint)}", stacklevel=4)
    graded = _nonzero("gradients", answers)  # those that are 0 yet, as before a weight that begins at 0, tell nothing
    # parameters of experts differ in both
    if other := [name for name in _other_weights(of_rank, answers) if name in graded and name not in differ]:
        hint = "build the model with one seed on all ranks, or broadcast its parameters before the first step"
        what = f"weights of {len(other)} of {len(names)} parameters whose gradients are summed, such as {other[0]}"
        raise ArgumentError(describe(what, "equal on all ranks", "others on some", hint))


def _decide_on_tensor_parallel(refuses: bool, of_rank: list[str], answers: Answers) -> None:
    names, differ = _apart("gradients", of_rank, answers, _APART)
    cut = {name.rpartition(".")[0] for name in _other_weights(of_rank, answers)}  # modules that have a part each
    if differ := [name for name in differ if name.rpartition(".")[0] not in cut]:
        what = f"gradients of {len(differ)} of {len(names)} parameters that tp does not shard, such as {differ[0]}"
        hint = (
            "give a norm on rows that are sharded over tp the style SequenceParallel(); all_reduce the gradient of "
            "what sees this rank's heads over tp with SUM; what each rank has a part of is a DTensor over tp"
        )
        text = describe(what, "equal on the ranks of a tp group", "another one on each rank", hint)
        if refuses and _nonzero("weights", answers).intersection(differ):  # zeros may be parts of their own
            raise ArgumentError(text)
        warnings.warn(f"cp_mesh: {text}", stacklevel=4)
