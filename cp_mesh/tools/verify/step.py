"""One step of a trainer, as `cp_mesh.verify_model` runs it: the model, the batch, the loss, whose rows."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from cp_mesh.comm.agreement import announce_refusal, check_mode, require_agreement
from cp_mesh.errors import RankMismatchError, refuse
from cp_mesh.sequence.sharded_sequence import ROOT, ShardedSequence
from cp_mesh.tools.verify.models import captured, inner, local, logits_of, sequence_of
from cp_mesh.tools.verify.ranks import Ranks
from cp_mesh.tools.verify.traces import Trace, traced_modules
from cp_mesh.training.loss import cross_entropy
from cp_mesh.training.style_helpers import gathers

Batch = dict[str, Any]
Loss = Callable[[nn.Module, Batch], Tensor]
Positions = Tensor | Callable[[Batch], Tensor]
IGNORED = -100


class Run(NamedTuple):
    """What one forward gave on this rank: its loss, its logits [B, n, V], and their positions, int64 [n]."""

    loss: Tensor
    logits: Tensor
    positions: Tensor


@dataclass
class Step:
    """The trainer's step.

    Attributes:
        model: after the plan.
        loss: returns this rank's loss, on which the trainer calls backward.
        batch: this rank's, whole sequences.
        tokens, labels: their names in the batch.
        copies: of the ranks that hold other tokens, how many count each part of the loss.
        rows: the user's own word on which positions this rank has.
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
        """That of the plan."""
        return sequence_of(self.model)

    def positions(self) -> Tensor:
        """Of this rank's rows, int64 [n]; while the model runs, of its batch."""
        root = ROOT.get()
        if self.rows is not None:
            return (self.rows(self.batch) if callable(self.rows) else self.rows).to(self.device)
        if self.seen is None and root is not None:
            own = root.sequence
            self.seen = own.layout.positions(root.seq_len, own.cp_size, own.cp_rank).to(self.device)
        if self.seen is not None:
            return self.seen
        if self.sequence is not None:
            return self.sequence.positions(self.seq_len, self.device)
        return torch.arange(self.seq_len, device=self.device)

    def run(self, batch: Batch | None = None, trace: Trace | None = None) -> Run:
        """One forward, with the trainer's loss."""
        self.seen = None
        outputs: list[Any] = []
        model = inner(self.model)
        with captured(model, outputs), self.watched(model) if trace is None else trace.of(model):
            loss = self.loss(self.model, dict(batch or self.batch))
        if not outputs:
            refuse("verify_model: loss", "a call of the model", "none", "loss(model, batch) runs the model it is given")
        logits = logits_of(outputs[-1])
        if not torch.is_grad_enabled():
            for module in self.model.modules():
                if isinstance(module, FSDPModule):  # whose parameters are whole until a backward
                    module.reshard()
        positions = self.positions()
        if logits.shape[1] == self.seq_len != len(positions):  # gathered
            positions = torch.arange(self.seq_len, device=self.device)
        if logits.shape[1] != len(positions):
            hint = "rows= says the positions of this rank's rows, int64 [n]"
            refuse("verify_model: rows of the logits", len(positions), logits.shape[1], hint)
        return Run(loss, logits, positions)

    @contextmanager
    def watched(self, model: nn.Module) -> Iterator[None]:
        """Read the positions of this batch, which the root tells while it runs."""

        def read(*_: Any) -> None:
            self.positions()

        handles = [module.register_forward_pre_hook(read) for name, module in traced_modules(model) if name]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def total_loss(self, loss: Tensor) -> float:
        """The loss of all ranks."""
        axes = self.ranks.data
        whole = self.ranks.reduce(local(loss.detach()).double().clone(), axes=axes)
        return float(whole) / self.copies

    @contextmanager
    def agreed(self) -> Iterator[None]:
        """If a rank raises in here, all cp ranks do.

        Attention compares its arguments over the ranks in check mode, and so does the end of this; whoever raises
        takes part once more, to say so.
        """
        if self.ranks.cp is None:
            yield
            return
        group = self.ranks.group(self.ranks.cp)
        with check_mode():
            try:
                yield
            except RankMismatchError:
                raise  # all have heard of it
            except Exception as error:
                announce_refusal(group, error)
                raise
            require_agreement(group, {"step": "done"})


def run_step(step: Step, reduce_gradients: Callable[[nn.Module], Any] | None, trace: Trace | None = None) -> Run:
    """Forward, backward, and what the trainer does to gradients then."""
    with step.agreed():
        run = step.run(trace=trace)
        run.loss.backward()
    if reduce_gradients is not None:
        reduce_gradients(step.model)
    return run


def loss_of_plan(ranks: Ranks, labels: str) -> Loss:
    """What README says: the model takes the whole batch, labels are sharded as its rows are."""

    def loss(model: nn.Module, batch: Batch) -> Tensor:
        given = dict(batch)
        whole = given.pop(labels)
        logits = logits_of(model(**given))
        sequence, axes = sequence_of(model), ranks.dp if gathers(model) else ranks.data
        mine = whole
        if sequence is not None and logits.shape[1] != whole.shape[1]:
            mine = sequence.shard({"labels": whole})["labels"]
        if ranks.mesh is None or not axes:
            return mean_loss(logits, mine)
        return cross_entropy(logits, mine, ranks.mesh[axes])

    return loss


def mean_loss(logits: Tensor, labels: Tensor) -> Tensor:
    """The mean over valid tokens, at least in float32."""
    wide = logits if logits.dtype == torch.float64 else logits.float()
    return F.cross_entropy(wide.flatten(0, -2), labels.flatten(), ignore_index=IGNORED)
