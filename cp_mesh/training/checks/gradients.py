"""Check how gradients are reduced, before the 1st, 2nd, 4th, 8th, ... optimizer step of each model.

The loss of a rank is a share of a sum, so gradients must be summed over the ranks of the loss. FSDP2 and
DistributedDataParallel show over which ranks they reduce, and whether they average. If neither is used, or neither
reduces over cp, replicated parameters and their gradients must be equal on all ranks, so ranks compare norms; over tp
too, for parameters that tp does not shard, if rows are. The check is PyTorch's global pre-hook of optimizer steps.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any
from weakref import ref

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import register_optimizer_step_pre_hook

from cp_mesh._torch import backward_number, comm_hooks, ranks_of_fsdp
from cp_mesh.comm.agreement import capturing, checking, exchange_in_time, look_again
from cp_mesh.comm.group_state import state_of
from cp_mesh.comm.groups import groups_of, ranks_of
from cp_mesh.errors import ArgumentError, describe, refuse, warn
from cp_mesh.kernels.combine import accumulation_dtype
from cp_mesh.sequence.cuts import Cuts
from cp_mesh.sequence.losses import WAITING, Planned, StepLosses
from cp_mesh.training.style_helpers import SUMS, gathers

_APART = 1e-3
"""Relative tolerance for norms of reduced gradients, which are equal except for rounding."""
_OTHER_WEIGHTS = 1e-5
"""Relative tolerance for norms of weights. It is small, since norms of two random initializations are close."""
_SAMPLE = 1024
_hooked: list[Any] = []


def watch_first_step(
    module: nn.Module, cp: dist.ProcessGroup | None = None, tp: dist.ProcessGroup | None = None, rows: bool = True
) -> None:
    """Check the gradients of ``module`` before its first optimizer step, and again before each 2^n-th.

    Args:
        module: the model, or the part of it that has a plan.
        cp, tp: the process groups of the plan's styles.
        rows: whether the styles over tp shard rows.
    """
    before = WAITING.get(module)
    planned = Planned() if before is None else Planned(before.cp, before.tp)
    for group in (cp, tp):
        if group is not None:
            planned.number = look_again(group)
            if planned.number:  # a batch that was sharded before the first plan may belong to that model
                vars(state_of(group, Cuts)).update(vars(Cuts()))
    planned.cp = cp if cp is not None and cp.size() > 1 else planned.cp
    planned.tp = tp if tp is not None and rows and tp.size() > 1 else planned.tp
    if planned.cp or planned.tp:
        WAITING[module] = planned
        if not _hooked:
            _hooked.append(register_optimizer_step_pre_hook(_before_step))


def _before_step(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    if torch.compiler.is_compiling() or not WAITING or capturing():
        return
    inside = backward_number() != -1
    # to load a checkpoint, PyTorch creates the optimizer's state by a step with lr 0, which changes nothing
    idle = all(isinstance(rate := part.get("lr"), int | float) and rate == 0 for part in optimizer.param_groups)
    held: set[int] = set()
    for module, planned in list(WAITING.items()):
        clock = None if planned.optimizer is None else planned.optimizer()
        if clock is not None and (clock is not optimizer or (not planned.is_due and not idle)):
            if clock is optimizer:
                planned.steps += 1
                _forget(planned)
            continue
        held = held or {id(x) for part in optimizer.param_groups for x in part["params"]}
        graded = {name: x for name, x in module.named_parameters() if x.grad is not None}
        taken = {name: x for name, x in graded.items() if id(x) in held}
        if taken and not idle:
            planned.steps, planned.optimizer = planned.steps + 1, ref(optimizer)
            if planned.cp is not None and any(each.steps == 0 for each in WAITING.values()):
                state_of(planned.cp, Cuts).done = False  # the next loss may belong to another waiting model
            # in a backward, gradients of other optimizers' parameters may not be complete yet
            _check(module, planned, taken if inside else graded, inside)
            _forget(planned)
        elif taken and not inside:
            planned.losses.forget()
        elif not idle and planned.steps == 0:
            planned.looks -= 1
            if planned.looks <= 0:
                del WAITING[module]


def _forget(stepped: Planned) -> None:
    """Forget the losses of a model that stepped, and of models without gradients, of which no loss ran backward."""
    for module, planned in WAITING.items():
        if planned is stepped or (planned.losses.ran and all(x.grad is None for x in module.parameters())):
            planned.losses.forget()


def _check(module: nn.Module, planned: Planned, graded: Mapping[str, Tensor], inside: bool) -> None:
    """Refuse gradients that are not summed over the ranks of the loss, or weights that differ; warn if unsure.

    Args:
        module: the model.
        planned: the groups of the model.
        graded: parameters with a gradient, by name.
        inside: whether the optimizer steps in the backward, before DistributedDataParallel reduces.

    Raises:
        ArgumentError: on every rank.
    """
    tp, cp = planned.tp, planned.cp
    if tp is not None and graded and checking(tp) is not False and not (inside and _over(tp, graded.values())):
        _compare_norms(tp, planned, {name: x for name, x in graded.items() if not _over(tp, [x])}, over_tp=True)
    if cp is None or not graded or checking(cp) is False:
        return
    gathered, losses = gathers(module), planned.losses
    if not losses.ran and not gathered and not planned.staged:
        _warn_once(
            planned,
            "an optimizer steps on gradients of a loss that is not cp_mesh.cross_entropy. A rank's loss must "
            "be its share of a sum over all ranks, not the mean of its own rows: cross_entropy(logits, labels, data), "
            "or the sum of its losses / the valid tokens of all ranks",
        )
    meshes = {tuple(ranks_of(mesh)): mesh for mesh in losses.meshes}
    # with gathered logits all cp ranks compute the same loss; compiled code does not note its mesh
    of_loss, mesh = next(iter(meshes.items())) if len(meshes) == 1 and not gathered else ((), None)
    wrapper: Any = None if planned.wrapper is None else planned.wrapper()
    parts = {kind: part for part in module.modules() for kind in _WRAPPERS if isinstance(part, kind)}
    wrapper = wrapper or parts.get(FullyShardedDataParallel)
    if (fsdp := parts.get(FSDPModule)) is not None:
        ranks = sorted(ranks_of_fsdp(fsdp))
        averages = _is_averaged(losses, len(ranks)) if losses.ran else planned.staged or gathered
        if averages and not hasattr(fsdp, SUMS):
            _warn_of_averages(planned, "fully_shard", len(ranks), "call cp_mesh.sum_gradients(model) after fully_shard")
        _check_ranks(planned, ranks, of_loss, graded, "fully_shard", "mesh=")
    elif wrapper is not None and not inside:
        ranks, name = dist.get_process_group_ranks(wrapper.process_group), type(wrapper).__name__
        is_ddp = isinstance(wrapper, DistributedDataParallel)
        averages = _is_averaged(losses, len(ranks)) if losses.ran else gathered
        if averages and not comm_hooks(wrapper):
            call = "cp_mesh.sum_gradients(ddp_model)" if is_ddp else "fully_shard, then cp_mesh.sum_gradients(model)"
            _warn_of_averages(planned, name, len(ranks), f"call {call}")
        if is_ddp:  # FSDP1 may have a second group, of its replicas
            _check_ranks(planned, ranks, of_loss, graded, name, "process_group=")
    else:
        for group in [cp] if mesh is None else groups_of(mesh):
            _compare_norms(group, planned, graded)


_WRAPPERS = FSDPModule, FullyShardedDataParallel


def _warn_of_averages(planned: Planned, by: str, num_ranks: int, hint: str) -> None:
    _warn_once(
        planned,
        f"{by} averages gradients over its ranks, while losses of cp_mesh.cross_entropy, and of gathered outputs, are "
        f"shares of a sum: {hint}, or multiply the loss by {num_ranks}",
    )


def _warn_once(planned: Planned, text: str) -> None:
    if text not in planned.warned:
        planned.warned.add(text)
        warn(text)


def _is_averaged(losses: StepLosses, num_ranks: int) -> bool:
    """Whether the mean of gradients over this number of ranks is too small, since no loss was scaled up.

    Trainers compensate for the mean by a factor on the loss, the number of ranks: on each accumulated loss or in total.
    """
    factors = [x.item() for x in losses.factors]
    total = sum(factors)
    plain = all(x == 1 for x in factors)
    # without factors, as in compiled code, nothing is known
    return bool(factors) and (total < 1 + _APART or (plain and (losses.counted or abs(total - num_ranks) > _APART)))


def _check_ranks(
    planned: Planned, ranks: list[int], of_loss: Iterable[int], graded: Mapping[str, Tensor], by: str, option: str
) -> None:
    """Refuse gradients that are reduced over other ranks than the ranks of the loss.

    The trainer's own code may have summed them over cp; then they are equal, which ranks compare.
    """
    assert planned.cp is not None
    ranks_of_cp = dist.get_process_group_ranks(planned.cp)
    wanted, found = {*of_loss} or {*ranks_of_cp, *ranks}, {*ranks}
    if found == wanted or not found:
        return
    if found < wanted:
        if found.isdisjoint({*ranks_of_cp} - {dist.get_rank()}):
            _compare_norms(planned.cp, planned, graded)
            return
        got, hint = f"{by} over ranks {ranks}", f"give {by} {option} of all these ranks, mesh['dp', 'cp']._flatten()"
        refuse("gradients", f"a sum over the ranks of cross_entropy, {sorted(wanted)}", got, hint)
    expected, got = f"a mean over the ranks that {by} reduces over, {ranks}", f"one over ranks {sorted(wanted)}"
    hint = "give cross_entropy the mesh of all ranks with other tokens"
    if any(x.item() != 1 for x in planned.losses.factors):  # a factor on the loss may correct this
        warn(describe("cross_entropy", expected, got, hint))
        return
    refuse("cross_entropy", expected, got, hint)


def _over(group: dist.ProcessGroup, tensors: Iterable[Tensor]) -> bool:
    """Whether any is a DTensor over these ranks. Ranks are compared because its mesh may be another object."""
    ranks = dist.get_process_group_ranks(group)
    meshes = (x.device_mesh for x in tensors if isinstance(x, DTensor))
    return any(
        dist.get_process_group_ranks(mesh.get_group(axis)) == ranks for mesh in meshes for axis in range(mesh.ndim)
    )


def _norm(x: Tensor) -> float:
    """Return the norm of the local tensor without a copy of it, for which memory may not suffice."""
    x = x.to_local() if isinstance(x, DTensor) else x
    x = x.coalesce().values() if x.is_sparse else x
    return float(torch.linalg.vector_norm(x, dtype=accumulation_dtype(x.dtype)))


def _some(x: Tensor) -> Tensor:
    """Return a sample of a weight's entries, because norms of two large weights may be equal by chance."""
    x = x.to_local() if isinstance(x, DTensor) else x
    while x.ndim > 1 and x.numel():
        x = x[0]
    return x.flatten()[:_SAMPLE]


def _compare_norms(
    group: dist.ProcessGroup, planned: Planned, graded: Mapping[str, Tensor], over_tp: bool = False
) -> None:
    """Refuse gradients of replicated parameters that differ between ranks, since nothing reduced them.

    Only ranks that arrive in time are compared: an optimizer may hold parameters of the model on some ranks alone.
    """
    own = {
        "gradients": {name: _norm(x.grad) for name, x in graded.items() if x.grad is not None},
        "weights": {name: _norm(x.detach()) for name, x in graded.items()},
        "samples": {name: _norm(_some(x.detach())) for name, x in graded.items()},
    }
    topic = f"gradients {planned.number} {planned.steps}{' over tp' * over_tp}"
    if answers := exchange_in_time(group, topic, {field: json.dumps(norms) for field, norms in own.items()}):
        decide = _decide_over_tp if over_tp else _decide
        norms = [{field: json.loads(x[field]) for field in own} for x in answers.values()]
        decide([*graded], norms, partial(_warn_once, planned))
    else:
        planned.cp = planned.tp = None  # do not wait again


Norms = list[dict[str, dict[str, float]]]
"""Norms of each rank, by field and parameter."""


def _apart(field: str, names: list[str], answers: Norms, by: float) -> list[str]:
    """Return the parameters whose norms differ between ranks."""
    table = torch.tensor([[x[field][name] for name in names] for x in answers], dtype=torch.float64, device="cpu")
    low, high = table.amin(0), table.amax(0)
    return [name for name, differs in zip(names, ((high - low) > by * high).tolist(), strict=True) if differs]


def _other_weights(names: list[str], answers: Norms) -> set[str]:
    """Return the parameters whose weights differ between ranks."""
    return {name for field in ("weights", "samples") for name in _apart(field, names, answers, _OTHER_WEIGHTS)}


def _nonzero(field: str, answers: Norms) -> set[str]:
    """Return the parameters whose norm is not 0 on some rank."""
    return {name for x in answers for name, norm in x[field].items() if norm != 0}


def _decide(own: list[str], answers: Norms, tell: Callable[[str], None] = warn) -> None:
    names = [name for name in own if all(name in x["gradients"] for x in answers)]
    differ = _apart("gradients", names, answers, _APART)
    if differ:
        what = f"gradients of {len(differ)} of {len(names)} parameters, such as {differ[0]}"
        hint = "fully_shard and cp_mesh.sum_gradients, or all_reduce every gradient over the ranks of the loss with SUM"
        text = describe(what, "equal on all ranks before the optimizer steps", "different ones on the ranks", hint)
        if len(differ) == len(names):
            raise ArgumentError(text)
        tell(text)
    graded = _nonzero("gradients", answers)  # a gradient of 0, as before a weight that starts at 0, proves nothing
    # expert parameters, whose gradients differ too, are not compared
    if other := [name for name in _other_weights(names, answers) if name in graded and name not in differ]:
        hint = "build the model with one seed on all ranks, or broadcast its parameters before the first step"
        what = f"weights of {len(other)} of {len(names)} parameters whose gradients are summed, such as {other[0]}"
        raise ArgumentError(describe(what, "equal on all ranks", "different ones on some", hint))


def _decide_over_tp(own: list[str], answers: Norms, tell: Callable[[str], None] = warn) -> None:
    names = [name for name in own if all(name in x["gradients"] for x in answers)]
    cut = {name.rpartition(".")[0] for name in _other_weights(names, answers)}  # modules with sharded weights
    differ = [name for name in _apart("gradients", names, answers, _APART) if name.rpartition(".")[0] not in cut]
    if differ:
        what = f"gradients of {len(differ)} of {len(names)} parameters that tp does not shard, such as {differ[0]}"
        hint = (
            "give a norm on rows that are sharded over tp the style SequenceParallel(); for a parameter that acts on "
            "this rank's heads, all_reduce the gradient over tp with SUM; make a sharded parameter a DTensor over tp"
        )
        text = describe(what, "equal on the ranks of a tp group", "different ones on the ranks", hint)
        if _nonzero("weights", answers).intersection(differ):  # weights of 0 may be shards, which look equal
            raise ArgumentError(text)
        tell(text)
