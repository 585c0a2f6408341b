"""Prove a training set-up: the user's own model, plan, mesh and batch against the same model on one rank.

Every rank runs the plain model on the whole batch of its data-parallel rank, without any collective (`reference.py`),
and then the trainer's step (`step.py`): the spread model, the trainer's loss, backward, and whatever reduces gradients.
What goes in and out of every module (`traces.py`), the logits, the loss, every parameter's gradient, and their norm are
compared (`compare.py`). Probes need no reference (`probes.py`): who sees whom, and whether loss and gradients have the
right scale.

How far both may be apart is measured, not guessed: the reference runs once more with its weights rounded otherwise.
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
from cp_mesh.errors import refuse
from cp_mesh.geometry.mask import Mask
from cp_mesh.tools.verify.compare import (
    EXACT,
    compare_batches,
    compare_gradients,
    compare_losses,
    compare_rows,
    compare_weights,
)
from cp_mesh.tools.verify.probes import probe_gradients, probe_loss, probe_rows, probe_sinks, probe_tokens
from cp_mesh.tools.verify.reference import jitter, make_twin, run_reference
from cp_mesh.tools.verify.report import Finding, ModelReport
from cp_mesh.tools.verify.step import (
    Batch,
    Loss,
    Positions,
    Ranks,
    Run,
    Step,
    coarsest,
    local,
    loss_of_plan,
    run_step,
)
from cp_mesh.tools.verify.traces import Place, Trace, rows_of
from cp_mesh.tools.verify.verify import VerificationError
from cp_mesh.training.parallelize import parallelize
from cp_mesh.training.probe import without_probe
from cp_mesh.training.style_helpers import gathers

Plan = Mapping[str, ParallelStyle] | Callable[[nn.Module], nn.Module | None] | None
TOO_RANDOM = 0.1
TOKENS, POSITIONS = ("tokens", "input_ids"), ("positions", "position_ids")


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
    """Compare one training step of a model over a mesh with that of the same model on one rank.

    The step is run as the trainer runs it, up to the optimizer, in check mode. The report names the first module,
    argument and position at which both part, and parameters whose gradients are wrong. Probes then change single tokens
    and see which logits move; they need no reference, and find what the model itself does wrong on one rank.

    The weights are those of the spread model, which the reference is given. Dropout is to be off. In float64, the
    default, a difference is a mistake, not rounding; with the dtype of training it is allowed 16 times what other last
    bits of the weights do to the reference.

    Args:
        make_model: makes the plain model, on any device, as the trainer does before it is parallelized.
        plan: a plan of `cp_mesh.parallelize` for the cp axis; or a function of the model that does all that the trainer
            does to it (tensor parallelism, plan, checkpoints, compile, FSDP2 or DistributedDataParallel), in place or
            returning it; or None for a model that is not spread.
        batch: of this data-parallel rank, on its device, the same on all cp ranks: whole tensors by the names of
            the model's arguments, among them int64 tokens [B, S], and labels [B, S] that are shifted (-100: ignored).
        mesh: all ranks. The axis ``cp`` (or the only one) splits sequences, those of ``same`` hold the same tokens, all
            others are data parallel. A ProcessGroup is the axis ``cp``. None for one process.
        loss: called with the spread model and the batch, returns the loss that the trainer calls backward on, [].
            None: the model is called with the batch but its labels, and `cp_mesh.cross_entropy` with the labels sharded
            as the plan's `ShardedModel` shards tokens.
        reduce_gradients: called with the spread model after backward, as a trainer without FSDP2 sums gradients. None:
            nothing, or where ``plan`` is a mapping a sum over the ranks that hold other tokens.
        gradient_norm: called with the spread model then, returns the norm that the trainer clips by. None: that of the
            gradients is compared.
        total: what makes the loss of all ranks of each rank's: "sum", or "mean" as under DistributedDataParallel;
            None: whichever of them fits the wrapper; of ``gather_output=True`` the mean over cp.
        make_reference: makes the model for one rank where it is another, as with an attention that builds its own dense
            mask; its parameters have the same names. None: ``make_model``.
        reference_loss: as ``loss``, for the whole batch on one rank: the mean over valid tokens. None: cross entropy of
            the model called with the batch but its labels.
        reference: False: probes alone, in seconds, and for models that one rank cannot hold.
        probes: False: the comparison alone.
        mask: what attention is to see, for probes; a sequence of masks, one for each layer, where there are windows.
            None: causal, within documents if the batch has "documents" or positions that restart.
        rows: positions of this rank's rows, int64 [n], or a function of the batch that returns them; needed of models
            that cp_mesh did not shard.
        tokens, labels: their names in the batch; None: tokens or input_ids.
        cp, same: names of axes.
        dtype: of the model's parameters and floating-point inputs, on both sides; None: as ``make_model`` makes them.
        progress: print what is being done to stderr, on the first rank.

    Returns:
        The report, equal on all ranks.

    Raises:
        VerificationError: on every rank, if anything is wrong, or was refused or raised on the way, or cannot be
            compared; it has the ``report``.
        ArgumentError: if the batch has no tokens, or no labels where ``loss`` is left out.

    Example:
        >>> report = verify_model(make_model, plan, batch, mesh)  # doctest: +SKIP
        >>> report.print()  # doctest: +SKIP
    """
    started = time.perf_counter()
    ranks = Ranks.of(as_mesh(mesh), cp, same)
    report = ModelReport(cp_size=ranks.cp_size)

    def say(what: str) -> None:
        if progress and ranks.is_first:
            print(f"[{time.perf_counter() - started:6.1f} s] {what}", file=sys.stderr, flush=True)

    if total not in (None, "sum", "mean"):
        refuse("verify_model: total", '"sum" or "mean"', total, "how the losses of ranks make the loss")
    if reference not in (True, False):
        hint = "reference=False, probes alone, is for models that one rank cannot hold"
        refuse("verify_model: reference", "True or False", reference, hint)
    given = {name: _cast(x, dtype) for name, x in batch.items()}
    tokens = tokens or next((name for name in TOKENS if name in given), None)
    if tokens not in given or given[tokens].ndim != 2:
        refuse("verify_model: batch", f"int64 [B, S] under one of {', '.join(TOKENS)}", [*given], "or say tokens=")
    if labels not in given and loss is None:
        refuse("verify_model: batch", f"labels [B, S] under {labels!r}", [*given], "or say loss= and labels=")
    masks = _masks(mask, given)
    report.findings.append(compare_batches(ranks, given))
    if report.passed:
        say("building the model")
        try:
            model = spread(make_model, plan, ranks, dtype)
            without_probe(model)  # whose runs would be traced
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
    """The model after the plan."""
    model = make_model().to(dtype)
    if plan is None:
        return model
    if callable(plan):
        return plan(model) or model
    if ranks.mesh is None or ranks.cp is None:
        refuse("verify_model: plan", "a mesh with an axis for it", ranks.axes, "pass mesh=, and cp= its name")
    return parallelize(model, ranks.mesh[ranks.cp], plan)


def sum_over(ranks: Ranks, model: nn.Module) -> None:
    """Sum the gradients of parameters over the ranks that hold other tokens."""
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
) -> Run:
    """One step; add to ``findings`` what it gives against the reference ``twin``."""
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
        note = "share of their size by which the reference's logits move from run to run; switch dropout off"
        findings.append(Finding("repeats", False, noise, TOO_RANDOM, note=note))
    say("the step: forward and backward")
    trace = Trace(step.seq_len, step.positions)
    run = run_step(step, reduce_gradients, trace)
    say("comparing")
    base = EXACT if dtype == torch.float64 else torch.finfo(dtype).eps
    three = (trace, want.trace, other.trace)
    findings.append(probe_rows(step, run))
    findings.append(compare_rows(step, "forward", [x.forward for x in three], base))
    logits = Place("", "logits", 0)
    of_logits = (rows_of(run.logits, step.seq_len, run.positions), want.logits, other.logits)
    findings.append(compare_rows(step, "logits", [{logits: x} for x in of_logits], base))
    agree = findings[-1].passed
    findings.append(compare_rows(step, "backward", [x.backward for x in three], base, fit=True, logits_agree=agree))
    findings += probe_loss(step, run, dtype)
    # shares of ranks, their sum and the loss of one rank are float32 at most: four roundings of half a step
    of_loss = base if dtype == torch.float64 else base + torch.finfo(torch.float32).eps
    findings.append(compare_losses(step, step.total_loss(run.loss), want.loss, other.loss, of_loss))
    norm = None if gradient_norm is None else float(local(gradient_norm(step.model)))
    findings += compare_gradients(step, want.grads, other.grads, base, norm)
    return run


def _cast(x: Any, dtype: torch.dtype | None) -> Any:
    return x.to(dtype) if isinstance(x, Tensor) and x.is_floating_point() and dtype is not None else x


def _masks(mask: Mask | Sequence[Mask] | None, batch: Batch) -> list[Mask]:
    """What each layer is to see. One mask stands for any number of layers that have no window."""
    if isinstance(mask, Mask):
        if mask.window is not None:
            refuse("verify_model: mask", "one for each layer where there are windows", mask, "mask=[mask] * layers")
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
