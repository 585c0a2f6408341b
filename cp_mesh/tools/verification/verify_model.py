"""Verify a training set-up: the user's model, plan, mesh and batch against the same model on one rank.

Every rank runs the plain model on the whole batch of its data-parallel rank, without parallelism (`reference.py`), and
then the trainer's step (`step.py`): the parallelized model, the trainer's loss, backward, and the gradient reduction.
`compare.py` compares inputs and outputs of every module (`traces.py`), logits, loss, all parameter gradients, and the
gradient norm. Probes (`probes.py`) need no reference: they test which tokens see each other, and the scale of the loss
and of gradients.

The allowed difference is measured: the reference runs a second time with differently rounded weights.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ParallelStyle
from torch.nn.parallel import DistributedDataParallel

from cp_mesh.comm.groups import as_mesh
from cp_mesh.errors import refuse, typed
from cp_mesh.geometry.mask import Mask
from cp_mesh.tools.verification.compare import (
    EXACT,
    compare_batches,
    compare_gradients,
    compare_losses,
    compare_rows,
    compare_weights,
)
from cp_mesh.tools.verification.probes import probe_gradients, probe_loss, probe_rows, probe_sinks, probe_tokens
from cp_mesh.tools.verification.reference import jitter, make_twin, run_reference
from cp_mesh.tools.verification.report import Finding, ModelReport
from cp_mesh.tools.verification.step import (
    Batch,
    Loss,
    Positions,
    Ranks,
    Step,
    StepRun,
    coarsest,
    local,
    loss_of_plan,
    run_step,
)
from cp_mesh.tools.verification.verify import VerificationError
from cp_mesh.training.parallelize import parallelize
from cp_mesh.training.probe import without_probe
from cp_mesh.training.sharded_model import POSITIONS
from cp_mesh.training.style_helpers import gathers
from cp_mesh.training.traces import Trace, TracedPlace, rows_of

Plan = Mapping[str, ParallelStyle] | Callable[[nn.Module], nn.Module | None] | None
TOO_RANDOM = 0.1
TOKENS = ("tokens", "input_ids")


@typed
def verify_model(
    make_model: Callable[[], nn.Module],
    plan: Plan,
    batch: Mapping[str, Any],
    mesh: DeviceMesh | dist.ProcessGroup | None = None,
    *,
    loss: Loss | None = None,
    reduce_gradients: Callable[[nn.Module], Any] | None = None,
    gradient_norm: Callable[[nn.Module], Any] | None = None,
    total: str | None = None,
    make_reference: Callable[[], nn.Module] | None = None,
    reference_loss: Loss | None = None,
    reference: bool = True,
    probes: bool = True,
    mask: Mask | Sequence[Mask] | None = None,
    rows: Positions | None = None,
    tokens: str | None = None,
    labels: str = "labels",
    cp: str = "cp",
    same: Sequence[str] = ("tp", "ep", "etp"),
    dtype: torch.dtype | None = torch.float64,
    progress: bool = False,
) -> ModelReport:
    """Compare one training step of a model over a mesh with the same step on one rank.

    The step runs as in the trainer, up to the optimizer, in check mode. The report names the first module, argument and
    position that differ, and parameters with wrong gradients. Probes then change single tokens and test which logits
    change. They need no reference, and also find errors that the model has on one rank.

    The reference gets the weights of the parallelized model. Switch dropout off. In float64, the default, a difference
    is an error, not rounding. In the dtype of training, a difference may be 16 times the change of the reference when
    the last bits of its weights change.

    Args:
        make_model: makes the plain model, on any device, as the trainer does before parallelizing it.
        plan: a plan of `cp_mesh.parallelize` for the cp axis; or a function that applies all of the trainer's
            parallelism to a model (tensor parallelism, plan, checkpoints, compile, FSDP2 or DistributedDataParallel),
            in place or returning it; or None for a model without parallelism.
        batch: the batch of this data-parallel rank, on its device, equal on all cp ranks: whole tensors by the names of
            the model's arguments, with int64 tokens [B, S] and shifted labels [B, S] (-100: ignored).
        mesh: all ranks. The axis ``cp`` (or the only axis) shards sequences; ranks of the axes ``same`` hold the same
            tokens; all other axes are data parallel. A ProcessGroup is the axis ``cp``. None: one process.
        loss: function of the parallelized model and the batch; returns the loss [] that the trainer calls backward on.
            None: calls the model with the batch without labels, and `cp_mesh.cross_entropy` with labels sharded like
            the tokens of the plan's `ShardedModel`.
        reduce_gradients: called with the parallelized model after backward, for trainers that sum gradients without
            FSDP2. None: a sum over the ranks that hold different tokens if ``plan`` is a mapping, else nothing.
        gradient_norm: called with the parallelized model after that; returns the norm that the trainer clips by. None:
            the norm of the gradients is compared.
        total: how losses of ranks combine: "sum", or "mean" as under DistributedDataParallel. None: "mean" for
            DistributedDataParallel, the mean over cp for ``gather_output=True``, else "sum".
        make_reference: makes the model for one rank if it differs from ``make_model``, for example with attention that
            builds its own dense mask. Its parameters must have the same names. None: ``make_model``.
        reference_loss: like ``loss``, for the whole batch on one rank; a mean over valid tokens. None: cross entropy of
            the model called with the batch without labels.
        reference: False runs only the probes: it takes seconds, and suits models that do not fit on one rank.
        probes: False runs only the comparison.
        mask: the mask that attention should have, for probes; with windows a sequence of masks, one for each layer.
            None: causal, within documents if the batch has "documents" or positions that restart.
        rows: positions of this rank's rows, int64 [n], or a function of the batch that returns them; required for
            models that cp_mesh did not shard.
        tokens, labels: names in the batch; ``tokens=None`` means "tokens" or "input_ids".
        cp, same: names of axes.
        dtype: dtype of parameters and floating-point inputs, with and without parallelism; None: as made.
        progress: print progress to stderr on rank 0.

    Returns:
        The report, equal on all ranks.

    Raises:
        VerificationError: on every rank, if anything is wrong, raises, or cannot be compared; it has the ``report``.
        ArgumentError: if the batch has no tokens, or if it has no labels and ``loss`` is None.

    Example:
        >>> report = verify_model(make_model, plan, batch, mesh)  # doctest: +SKIP
        >>> report.print()  # doctest: +SKIP
    """
    started = time.perf_counter()
    ranks = Ranks.of(as_mesh(mesh), cp, same)
    report = ModelReport(cp_size=ranks.cp_size)

    def say(what: str) -> None:
        if progress and (ranks.mesh is None or dist.get_rank() == 0):
            print(f"[{time.perf_counter() - started:6.1f} s] {what}", file=sys.stderr, flush=True)

    if total not in (None, "sum", "mean"):
        refuse("verify_model: total", '"sum" or "mean"', total, "total=None chooses by the wrapper of the model")
    if reference not in (True, False):
        hint = "reference=False runs only probes, for models that do not fit on one rank"
        refuse("verify_model: reference", "True or False", reference, hint)
    given = {name: _cast(x, dtype) for name, x in batch.items()}
    tokens = tokens or next((name for name in TOKENS if name in given), None)
    if tokens not in given or given[tokens].ndim != 2:
        refuse("verify_model: batch", f"int64 [B, S] under one of {', '.join(TOKENS)}", [*given], "or pass tokens=")
    if labels not in given and loss is None:
        refuse("verify_model: batch", f"labels [B, S] under {labels!r}", [*given], "or pass loss= and labels=")
    masks = _masks(mask, given)
    report.findings.append(compare_batches(ranks, given))
    if report.passed:
        say("building the model")
        try:
            model = spread(make_model, plan, ranks, dtype)
            without_probe(model)  # the probe's forwards would be traced
            copies = 1
            if total == "mean" or (total is None and isinstance(model, DistributedDataParallel)):
                copies = ranks.size(*ranks.data)
            elif total is None and gathers(model):
                copies = ranks.cp_size
            step = Step(model, loss or loss_of_plan(ranks, labels), ranks, given, tokens, labels, copies, rows)
            if reduce_gradients is None and isinstance(plan, Mapping):
                reduce_gradients = lambda model: sum_over(ranks, model)  # noqa: E731
            used = coarsest(model)
            if reference:
                say("building the reference")
                twin = make_twin(make_reference or make_model, model, dtype, step.device)
                report.findings.append(compare_weights(ranks, twin))
                run = _compare(report.findings, step, twin, reduce_gradients, reference_loss, gradient_norm, say)
            else:
                say("forward and backward")
                run = run_step(step, reduce_gradients)
                report.findings.append(probe_rows(step, run))
                report.findings += probe_loss(step, run, used)
            if probes:
                report.findings += probe_tokens(step, masks, used == torch.float64, say)
                say("probe: sinks and gradients")
                report.findings += probe_sinks(step)
                report.findings += probe_gradients(step, run.loss, used)
        except Exception as error:
            text = " ".join(str(error).split())
            report.findings.insert(0, Finding("runs", False, where=type(error).__name__, note=text))
            report.seconds = time.perf_counter() - started
            raise VerificationError(report) from error
    report.seconds = time.perf_counter() - started
    if not report.passed:
        raise VerificationError(report)
    return report


def spread(make_model: Callable[[], nn.Module], plan: Plan, ranks: Ranks, dtype: torch.dtype | None) -> nn.Module:
    """Make the model and apply the plan."""
    model = make_model().to(dtype)
    if plan is None:
        return model
    if callable(plan):
        return plan(model) or model
    if ranks.mesh is None or not ranks.cp:
        refuse("verify_model: plan", "a mesh with a cp axis", ranks.axes, "pass mesh=, and the name of the axis as cp=")
    return parallelize(model, ranks.mesh[ranks.cp], plan)


def sum_over(ranks: Ranks, model: nn.Module) -> None:
    """Sum the gradients of parameters over the ranks that hold different tokens."""
    for parameter in model.parameters():
        if (grad := parameter.grad) is not None:
            ranks.reduce(grad.to_local() if isinstance(grad, DTensor) else grad, axes=ranks.data)


def _compare(
    findings: list[Finding],
    step: Step,
    twin: nn.Module,
    reduce_gradients: Callable[[nn.Module], Any] | None,
    loss: Loss | None,
    gradient_norm: Callable[[nn.Module], Any] | None,
    say: Callable[[str], None],
) -> StepRun:
    """Run one step, and append its comparison with the reference ``twin`` to ``findings``."""
    dtype = coarsest(twin)
    say("reference: forward and backward")
    want = run_reference(step, twin, loss)
    say("reference: once more, with other rounding")
    jitter(twin)
    other = run_reference(step, twin, loss)
    del twin
    before, after = (x.logits.by_dim[1] for x in (want, other))
    noise = float((after - before).norm() / before.norm())
    if not all(step.ranks.gather(noise <= TOO_RANDOM)):
        note = "the reference's logits change from run to run by this share of their size; switch dropout off"
        findings.append(Finding("repeats", False, noise, TOO_RANDOM, note=note))
    say("the step: forward and backward")
    trace = Trace(step.seq_len, step.positions)
    run = run_step(step, reduce_gradients, trace)
    say("comparing")
    base = EXACT if dtype == torch.float64 else torch.finfo(dtype).eps
    three = (trace, want.trace, other.trace)
    findings.append(probe_rows(step, run))
    findings.append(compare_rows(step, "forward", [x.forward for x in three], base))
    logits = TracedPlace("", "logits", 0)
    of_logits = (rows_of(run.logits, step.seq_len, run.positions), want.logits, other.logits)
    findings.append(compare_rows(step, "logits", [{logits: x} for x in of_logits], base))
    findings += probe_loss(step, run, dtype)
    # losses of ranks, their sum and the loss of one rank may be float32: four roundings of half an eps
    of_loss = base if dtype == torch.float64 else base + torch.finfo(torch.float32).eps
    findings.append(compare_losses(step, step.total_loss(run.loss), want.loss, other.loss, of_loss))
    norm = None if gradient_norm is None else float(local(gradient_norm(step.model)))
    findings += compare_gradients(step, want.grads, other.grads, base, norm)
    return run


def _cast(x: Any, dtype: torch.dtype | None) -> Any:
    return x.to(dtype) if isinstance(x, Tensor) and x.is_floating_point() and dtype is not None else x


def _masks(mask: Mask | Sequence[Mask] | None, batch: Batch) -> list[Mask]:
    """The masks of the layers. One mask stands for any number of layers without windows."""
    if isinstance(mask, Mask):
        if mask.window is not None:
            refuse("verify_model: mask", "one for each layer if there are windows", mask, "mask=[mask] * layers works")
        return [mask]
    if mask is not None:
        return list(mask)
    documents = batch.get("documents")
    if not isinstance(documents, Tensor):
        documents = None
    ids = next((batch[name] for name in POSITIONS if isinstance(batch.get(name), Tensor)), None)
    if documents is None and ids is not None and ids.ndim == 2 and bool((ids[:, 1:] <= ids[:, :-1]).any()):
        documents = (ids[:, 1:] <= ids[:, :-1]).long().cumsum(1)
        documents = torch.cat([documents.new_zeros(len(ids), 1), documents], 1)
    return [Mask(documents=documents)]
