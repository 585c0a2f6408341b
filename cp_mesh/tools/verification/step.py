"""One step of a trainer, as `cp_mesh.verify_model` runs it: ranks, model, batch, loss, and positions of local rows."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from cp_mesh._torch import COMPILED_CALL
from cp_mesh.comm.agreement import check_mode, compare, refusing
from cp_mesh.errors import refuse
from cp_mesh.geometry.mask import Mask
from cp_mesh.sequence.auto import is_by_batch
from cp_mesh.sequence.sharded_sequence import IGNORED, ROOT, ShardedSequence
from cp_mesh.training.loss import cross_entropy
from cp_mesh.training.sharded_model import ShardedModel
from cp_mesh.training.style_helpers import gathers, styles_of
from cp_mesh.training.traces import Trace, output_of, traced_modules

Batch = dict[str, Any]
Loss = Callable[[nn.Module, Batch], Tensor]
Positions = Tensor | Callable[[Batch], Tensor]


class Ranks(NamedTuple):
    """The axes of a mesh, by the tokens that their ranks hold.

    Attributes:
        mesh: None for one process without process groups.
        axes: all of them.
        same: those whose ranks hold the same tokens, such as tensor parallelism.
        data: those whose ranks hold different tokens: ``cp`` and ``dp``.
        cp: that whose ranks hold different tokens of the same sequences, if there is one.
        dp: those whose ranks hold different sequences.
    """

    mesh: DeviceMesh | None = None
    axes: tuple[str, ...] = ()
    same: tuple[str, ...] = ()
    data: tuple[str, ...] = ()
    cp: tuple[str, ...] = ()
    dp: tuple[str, ...] = ()

    @classmethod
    def of(cls, mesh: DeviceMesh | None, cp: str, same: Sequence[str]) -> Ranks:
        if mesh is None:
            return cls()
        axes = mesh.mesh_dim_names
        if axes is None:
            refuse("verify_model: mesh", "a DeviceMesh whose axes have names", mesh, 'mesh_dim_names=("dp", "cp")')
        held, data = (tuple(name for name in axes if (name in same) == is_same) for is_same in (True, False))
        of_cp = data if len(axes) == 1 else tuple(name for name in axes if name == cp)
        return cls(mesh, axes, held, data, of_cp, tuple(name for name in data if name not in of_cp))

    @property
    def cp_size(self) -> int:
        return self.size(*self.cp)

    def group(self, axis: str) -> dist.ProcessGroup:
        assert self.mesh is not None
        return self.mesh.get_group(axis)

    def size(self, *axes: str) -> int:
        return math.prod(self.group(axis).size() for axis in axes)

    def reduce(self, x: Tensor, op: Any = dist.ReduceOp.SUM, axes: Sequence[str] | None = None) -> Tensor:
        """All-reduce ``x`` in place over the given axes (default: all); return it."""
        for axis in self.axes if axes is None else axes:
            dist.all_reduce(x, op, group=self.group(axis))
        return x

    def gather(self, x: Any, axes: Sequence[str] | None = None) -> list[Any]:
        """All-gather the object ``x`` over the given axes (default: all)."""
        found = [x]
        for axis in self.axes if axes is None else axes:
            answers: list[list[Any]] = [[] for _ in range(self.size(axis))]
            dist.all_gather_object(answers, found, group=self.group(axis))
            found = [one for answer in answers for one in answer]
        return found


class StepRun(NamedTuple):
    """Results of one forward on this rank: loss, logits [B, n, V], and positions of the logits, int64 [n]."""

    loss: Tensor
    logits: Tensor
    positions: Tensor


@dataclass
class Step:
    """The trainer's step.

    Attributes:
        model: the model after the plan is applied.
        loss: returns this rank's loss, on which the trainer calls backward.
        batch: this rank's batch, with whole sequences.
        tokens, labels: names of tokens and labels in the batch.
        copies: the sum of losses over data ranks, divided by this number, is the loss of all ranks.
        rows: positions of this rank's rows, if the user passed them.
        seen: positions that the model's root used in the current run.
    """

    model: nn.Module
    loss: Loss
    ranks: Ranks
    batch: Batch
    tokens: str
    labels: str
    copies: int = 1
    rows: Positions | None = None
    seen: Tensor | None = field(default=None, init=False)

    @property
    def seq_len(self) -> int:
        return int(self.batch[self.tokens].shape[1])

    @property
    def device(self) -> torch.device:
        device: torch.device = self.batch[self.tokens].device
        return device

    @functools.cached_property
    def sequence(self) -> ShardedSequence | None:
        """The sharded sequence of the plan, or None."""
        return sequence_of(self.model)

    def positions(self) -> Tensor:
        """Positions of this rank's rows, int64 [n]; during or after a run those of its batch."""
        root = ROOT.get()
        if self.rows is not None:
            return (self.rows(self.batch) if callable(self.rows) else self.rows).to(self.device)
        if self.seen is None and root is not None:
            own = root.sequence
            self.seen = own.layout.positions(root.seq_len, own.cp_size, own.cp_rank).to(self.device)
        if self.seen is not None:
            return self.seen
        if self.sequence is not None:
            is_open = self.sequence.length is None or is_by_batch(self.sequence.layout)
            own = self.sequence.for_batch(self.seq_len) if is_open else self.sequence
            return own.positions(device=self.device)
        return torch.arange(self.seq_len, device=self.device)

    def run(self, batch: Batch | None = None, trace: Trace | None = None) -> StepRun:
        """Run one forward with the trainer's loss."""
        self.seen = None
        outputs: list[Any] = []
        model = inner(self.model)
        with _outputs_of(model, outputs), self._watched(model) if trace is None else trace.of(model):
            loss = self.loss(self.model, dict(batch or self.batch))
        if not outputs:
            refuse("verify_model: loss", "a call of the model", "none", "loss(model, batch) has to call model")
        logits = logits_of(outputs[-1])
        if not torch.is_grad_enabled():
            for module in self.model.modules():
                if isinstance(module, FSDPModule):  # the root's parameters stay unsharded until a backward
                    module.reshard()
        positions = self.positions()
        if logits.shape[1] == self.seq_len != len(positions):  # gathered
            positions = torch.arange(self.seq_len, device=self.device)
        if logits.shape[1] != len(positions):
            hint = "pass the positions of this rank's rows as rows=, int64 [n]"
            refuse("verify_model: rows of the logits", len(positions), logits.shape[1], hint)
        return StepRun(loss, logits, positions)

    @contextmanager
    def _watched(self, model: nn.Module) -> Iterator[None]:
        """Read the positions of this batch from the root while it runs; they are not available later."""

        def read(*_: Any) -> None:
            self.positions()

        handles = [module.register_forward_pre_hook(read) for name, module in traced_modules(model) if name]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def total_loss(self, loss: Tensor) -> float:
        """The loss of all ranks, from this rank's ``loss``."""
        whole = self.ranks.reduce(local(loss.detach()).double().clone(), axes=self.ranks.data)
        return float(whole) / self.copies

    @contextmanager
    def agreed(self) -> Iterator[None]:
        """If one cp rank raises inside, raise on all cp ranks.

        In check mode attention compares its arguments over the ranks, and the end of this context compares once more. A
        rank that raises joins the next comparison to announce its error.
        """
        if not self.ranks.cp:
            yield
            return
        group = self.ranks.group(*self.ranks.cp)
        with check_mode():
            with refusing(group):
                yield
            compare(group, None, lambda: {"step": "done"})


def run_step(step: Step, reduce_gradients: Callable[[nn.Module], Any] | None, trace: Trace | None = None) -> StepRun:
    """Run forward and backward, then the trainer's reduction of gradients."""
    with step.agreed():
        run = step.run(trace=trace)
        run.loss.backward()
    if reduce_gradients is not None:
        reduce_gradients(step.model)
    return run


def loss_of_plan(ranks: Ranks, labels: str) -> Loss:
    """Return the loss of the README: the model gets the whole batch, labels are sharded like the model's rows."""

    def loss(model: nn.Module, batch: Batch) -> Tensor:
        given = dict(batch)
        mine = given.pop(labels)
        logits = logits_of(model(**given))
        sequence, axes = sequence_of(model), ranks.dp if gathers(model) else ranks.data
        if sequence is not None and logits.shape[1] != mine.shape[1]:
            if is_by_batch(sequence.layout):
                masks = [x for x in given.values() if isinstance(x, Mask)]
                sequence = sequence.for_batch(mine.shape[1], masks[0] if masks else None)
            mine = sequence.shard({"labels": mine})["labels"]
        if ranks.mesh is None or not axes:
            return mean_loss(logits, mine)
        return cross_entropy(logits, mine, ranks.mesh[axes])

    return loss


def mean_loss(logits: Tensor, labels: Tensor) -> Tensor:
    """Cross entropy as a mean over valid tokens, in float32 or float64."""
    wide = logits if logits.dtype == torch.float64 else logits.float()
    return F.cross_entropy(wide.flatten(0, -2), labels.flatten(), ignore_index=IGNORED)


def inner(model: nn.Module) -> nn.Module:
    """The model without its DistributedDataParallel wrapper."""
    return model.module if isinstance(model, DistributedDataParallel) else model


@contextmanager
def _outputs_of(model: nn.Module, outputs: list[Any]) -> Iterator[None]:
    """Append the outputs of the model to a list; also works for compiled models."""
    compiled = model.__dict__.get(COMPILED_CALL)
    if compiled is None:
        undo = model.register_forward_hook(lambda module, args, output: outputs.append(output)).remove
    else:
        undo = functools.partial(model.__dict__.__setitem__, COMPILED_CALL, compiled)

        def call(*args: Any, **kwargs: Any) -> Any:
            outputs.append(compiled(*args, **kwargs))
            return outputs[-1]

        model.__dict__[COMPILED_CALL] = call
    try:
        yield
    finally:
        undo()


def logits_of(output: Any) -> Tensor:
    """The logits [B, n, V] in a model's output: see `output_of`."""
    found = output_of(output, 3)
    if found is None or found.ndim != 3:
        got = type(output).__name__ if found is None else tuple(found.shape)
        refuse("verify_model: output of the model", "logits [B, S, V]", got, "return logits, alone or as .logits")
    return found


def local(x: Tensor) -> Tensor:
    """The whole tensor; for a DTensor this is a collective."""
    return x.full_tensor() if isinstance(x, DTensor) else x


def whole_gradient(parameter: Tensor) -> Tensor:
    """The gradient that the optimizer uses, with all shards; zeros if there is none. A collective for DTensors."""
    return torch.zeros_like(local(parameter.detach())) if parameter.grad is None else local(parameter.grad)


def coarsest(model: nn.Module) -> torch.dtype:
    """The parameter dtype with the lowest precision."""
    dtypes = {parameter.dtype for parameter in model.parameters() if parameter.is_floating_point()}
    return max(dtypes, key=lambda dtype: torch.finfo(dtype).eps)


def root_of(model: nn.Module) -> ShardedModel | None:
    """The `ShardedModel` style applied to a model or a part of it, or None."""
    return next((style for style in styles_of(model) if isinstance(style, ShardedModel)), None)


def sequence_of(model: nn.Module) -> ShardedSequence | None:
    """The sharded sequence of the styles applied to a model: that of the root if there is one."""
    style = root_of(model) or next(styles_of(model), None)
    return None if style is None else style.sequence
