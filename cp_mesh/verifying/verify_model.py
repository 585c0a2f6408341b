"""Prove a training set-up: the user's own model, plan, mesh and batch against the same model on one rank.

Every rank runs the plain model on the whole batch of its data-parallel rank, without any collective, and then the
trainer's step: the spread model, the trainer's loss, backward, and whatever reduces gradients. What is compared is what
goes in and out of every module (`traces.py`), the logits, the loss, every parameter's gradient, and their norm.

How far both may be apart is measured, not guessed: the reference runs once more with its weights rounded otherwise.
"""

from __future__ import annotations

import inspect
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ParallelStyle
from torch.nn.parallel import DistributedDataParallel

from cp_mesh.agreement import fingerprint
from cp_mesh.errors import refuse
from cp_mesh.masks import Mask
from cp_mesh.parallel import parallelize
from cp_mesh.verifying.probes import probe_gradients, probe_loss, probe_rows, probe_sinks, probe_tokens, step_factor
from cp_mesh.verifying.report import Finding, ModelReport
from cp_mesh.verifying.step import (
    IGNORED,
    Batch,
    Loss,
    Positions,
    Ranks,
    Run,
    Step,
    gathers,
    inner,
    local,
    logits_of,
    loss_of_plan,
    mean_loss,
    root_of,
    styles_of,
)
from cp_mesh.verifying.traces import Pair, Place, Rows, Trace, clean, gaps, pair, rows_of
from cp_mesh.verifying.verify import VerificationError

Plan = Mapping[str, ParallelStyle] | Callable[[nn.Module], nn.Module | None] | None
FACTOR = 16.0  # of what other rounding of the weights does to the reference
EXACT = 1e-9  # of the signal, in float64
JITTER = 2.0**-40  # how weights are changed in float64: enough to round float32 inside of the model otherwise
OF_SMALL = 1e-3  # a small gradient is compared with this share of those of all parameters
TOO_RANDOM = 0.1
ALIKE = 1e-3  # of a gradient that is a multiple of another
TOKENS, POSITIONS = ("tokens", "input_ids"), ("positions", "position_ids")


def verify_model(
    make_model: Callable[[], nn.Module],
    plan: Plan,
    batch: Mapping[str, Any],
    mesh: DeviceMesh | None = None,
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
            others are data parallel. None for one process.
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
    ranks = Ranks.of(mesh, cp, same)
    report = ModelReport(cp_size=ranks.cp_size)

    def say(what: str) -> None:
        if progress and ranks.is_first:
            print(f"[{time.perf_counter() - started:6.1f} s] {what}", file=sys.stderr, flush=True)

    if total not in (None, "sum", "mean"):
        refuse("verify_model: total", '"sum" or "mean"', total, "how the losses of ranks make the loss")
    given = {name: _cast(x, dtype) for name, x in batch.items()}
    tokens = tokens or next((name for name in TOKENS if name in given), None)
    if tokens not in given or given[tokens].ndim != 2:
        refuse("verify_model: batch", f"int64 [B, S] under one of {', '.join(TOKENS)}", [*given], "or say tokens=")
    if loss is None and (labels not in given):
        refuse("verify_model: batch", f"labels [B, S] under {labels!r}", [*given], "or say loss= and labels=")
    masks = _masks(mask, given, len(given[tokens]))
    report.findings += _compare_batches(ranks, given)
    if report.passed:
        say("building the model")
        try:
            model = spread(make_model, plan, ranks, dtype)
            copies = 1
            if total == "mean" or (total is None and isinstance(model, DistributedDataParallel)):
                copies = ranks.size(*ranks.data)
            elif total is None and gathers(model):
                copies = ranks.cp_size
            step = Step(model, loss or loss_of_plan(ranks, labels), ranks, given, tokens, labels, copies, rows)
            if reduce_gradients is None and isinstance(plan, Mapping):
                reduce_gradients = lambda model: sum_over(ranks, model)  # noqa: E731
            if reference:
                say("building the reference")
                twin = _twin(make_reference or make_model, model, dtype, step.device)
                report.findings += _compare_weights(ranks, twin)
                run = _compare(report.findings, step, twin, reduce_gradients, reference_loss, gradient_norm, say)
            used = _coarsest(model)
            if not reference:
                say("forward and backward")
                run = run_step(step, reduce_gradients)
                report.findings += [*probe_rows(step, run), *probe_loss(step, run, used)]
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


def _coarsest(model: nn.Module) -> torch.dtype:
    """The dtype of the parameters that have the fewest digits."""
    dtypes = {parameter.dtype for parameter in model.parameters() if parameter.is_floating_point()}
    return max(dtypes, key=lambda dtype: torch.finfo(dtype).eps)


def sum_over(ranks: Ranks, model: nn.Module) -> None:
    """Sum the gradients of parameters over the ranks that hold other tokens."""
    for parameter in model.parameters():
        if parameter.grad is not None:
            grad = parameter.grad
            ranks.reduce(grad.to_local() if isinstance(grad, DTensor) else grad, axes=ranks.data)


class _Reference(NamedTuple):
    """A run of the whole batch on this rank; ``loss`` and ``grads`` are those of all data-parallel ranks."""

    trace: Trace
    logits: Tensor
    loss: float
    grads: dict[str, Tensor]


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
    dtype = _coarsest(twin)
    loss = loss or _loss_of_one_rank(step)
    one_rank = Step(twin, loss, Ranks(None, None, ()), step.batch, step.tokens, step.labels)
    say("reference: forward and backward")
    want = _run_reference(step.ranks, one_rank)
    say("reference: once more, with other rounding")
    _jitter(twin)
    other = _run_reference(step.ranks, one_rank)
    del twin, one_rank
    noise = float((other.logits - want.logits).norm() / want.logits.norm())
    if not all(step.ranks.gather(noise <= TOO_RANDOM)):
        note = "share of their size by which the reference's logits move from run to run; switch dropout off"
        findings.append(Finding("repeats", False, noise, TOO_RANDOM, note=note))
    say("the step: forward and backward")
    trace = Trace(step.seq_len, step.positions)
    run = run_step(step, reduce_gradients, trace)
    say("comparing")
    base = EXACT if dtype == torch.float64 else torch.finfo(dtype).eps
    three = (trace, want.trace, other.trace)
    findings += probe_rows(step, run)
    findings.append(_compare_rows(step, "forward", [x.forward for x in three], base))
    logits = Place("", "logits", 0)
    whole = torch.arange(step.seq_len, device=step.device)
    kept = [(run.logits, run.positions), (want.logits, whole), (other.logits, whole)]
    of_logits = [{logits: rows_of(x, step.seq_len, positions)} for x, positions in kept]
    findings.append(_compare_rows(step, "logits", of_logits, base))
    findings.append(_compare_rows(step, "backward", [x.backward for x in three], base, fit=True))
    findings += probe_loss(step, run, dtype)
    findings.append(_compare_losses(step, step.total_loss(run.loss), want.loss, other.loss, base))
    norm = None if gradient_norm is None else float(local(gradient_norm(step.model)))
    findings += _compare_gradients(step, want.grads, other.grads, base, norm)
    return run


def run_step(step: Step, reduce_gradients: Callable[[nn.Module], Any] | None, trace: Trace | None = None) -> Run:
    """Forward, backward, and what the trainer does to gradients then."""
    with step.agreed():
        run = step.run(trace=trace)
        run.loss.backward()
    if reduce_gradients is not None:
        reduce_gradients(step.model)
    return run


def _twin(
    make: Callable[[], nn.Module], model: nn.Module, dtype: torch.dtype | None, device: torch.device
) -> nn.Module:
    """The model for one rank, with the weights of the spread one."""
    twin = make().to(dtype).to(device)
    if any(styles_of(twin)) or any(isinstance(parameter, DTensor) for parameter in twin.parameters()):
        hint = "make_reference= makes the plain model where make_model spreads it"
        refuse("verify_model: reference", "a model that is not spread", "styles or DTensors in it", hint)
    spread_out = {clean(name): parameter for name, parameter in inner(model).named_parameters()}
    names = [name for name, _ in twin.named_parameters()]
    if unlike := set(names) ^ set(spread_out):
        hint = "make_reference= makes a model whose parameters have the same names"
        refuse("verify_model: parameters", "the same names on one rank and in the spread model", sorted(unlike), hint)
    with torch.no_grad():
        for name, parameter in twin.named_parameters():
            whole = local(spread_out[name].detach())
            if whole.shape != parameter.shape:
                hint = "shard parameters as DTensors, so that the whole can be compared"
                refuse(f"verify_model: {name}", tuple(parameter.shape), tuple(whole.shape), hint)
            parameter.copy_(whole)
    return twin


def _loss_of_one_rank(step: Step) -> Loss:
    root = root_of(step.model)
    positions = root.positions if root is not None else None  # which the root supplies

    def loss(model: nn.Module, batch: Batch) -> Tensor:
        whole = batch.pop(step.labels)
        argument = inspect.signature(model.forward).parameters.get(positions or "")
        if positions and argument and argument.default is argument.empty:
            batch.setdefault(positions, torch.arange(step.seq_len, device=step.device))
        return mean_loss(logits_of(model(**batch)), whole)

    return loss


def _run_reference(ranks: Ranks, step: Step) -> _Reference:
    """One run of the reference; data-parallel ranks weigh by their valid tokens."""
    labels = step.batch.get(step.labels)
    valid = torch.ones(()) if labels is None else (labels != IGNORED).sum()
    valid = valid.double().to(step.device)
    weight = valid / ranks.reduce(valid.clone(), axes=ranks.dp).clamp(min=1)
    step.model.zero_grad()
    trace = Trace(step.seq_len, step.positions)
    run = step.run(trace=trace)
    loss = run.loss.nan_to_num() * weight  # the mean over no token at all
    loss.backward()
    grads = {
        name: ranks.reduce(torch.zeros_like(p) if p.grad is None else p.grad.clone(), axes=ranks.dp)
        for name, p in step.model.named_parameters()
    }
    return _Reference(
        trace, run.logits.detach(), float(ranks.reduce(loss.detach().double().clone(), axes=ranks.dp)), grads
    )


@torch.no_grad()
def _jitter(model: nn.Module) -> None:
    """Change the last bits of all weights, by as much in either direction."""
    generator = torch.Generator().manual_seed(0)
    for parameter in model.parameters():
        if not parameter.is_floating_point():
            continue
        eps = JITTER if parameter.dtype == torch.float64 else torch.finfo(parameter.dtype).eps
        signs = torch.randint(2, parameter.shape, generator=generator).to(parameter.device) * 2 - 1
        parameter.mul_((1 + eps * signs.double()).to(parameter.dtype))


class _Gap(NamedTuple):
    """How far a tensor is off: the worst row, what is allowed, and the first position that is worse, or S."""

    worst: float
    allowed: float
    first: int


def _compare_rows(
    step: Step, check: str, three: Sequence[Mapping[Place, Rows]], base: float, fit: bool = False
) -> Finding:
    """The rows of the step against those of the reference, and against what other rounding does to these.

    Args:
        step: the trainer's step.
        check: its name.
        three: what the step, the reference, and the reference once more gave.
        base: what is always allowed.
        fit: up to a factor, as the losses of a trainer may be scaled.
    """
    got, want, other = three
    seq_len = step.seq_len
    pairs = {place: x for place, rows in want.items() if (x := pair(got.get(place), rows, seq_len))}
    allowed = {}
    for place in pairs:
        again = pair(other.get(place), want[place], seq_len)
        allowed[place] = base + (FACTOR * float(gaps(again, seq_len).max()) if again else 0.0)
    scales = _fit(step, pairs, allowed) if fit else {}
    found: dict[Place, _Gap] = {}
    for place, rows in pairs.items():
        errors = gaps(rows, seq_len, scales.get(place, 1.0))
        bad = (errors > allowed[place]).nonzero().flatten()
        found[place] = _Gap(float(errors.max()), allowed[place], int(bad[0]) if len(bad) else seq_len)
    answers = step.ranks.gather(found)
    places = [place for place in want if any(place in answer for answer in answers)]
    if not places:
        return Finding(check, fit, note="nothing to compare: everything is compiled, or no shapes fit")
    all_of = {place: [answer[place] for answer in answers if place in answer] for place in places}
    wrong = [place for place in places if any(gap.first < seq_len for gap in all_of[place])]
    if not wrong:
        gap = max((gap for of_place in all_of.values() for gap in of_place), key=lambda gap: gap.worst / gap.allowed)
        return Finding(check, True, gap.worst, gap.allowed, note=f"{len(places)} of {len(want)} tensors compared")
    first = wrong[0]
    gap = max((gap for gap in all_of[first] if gap.first < seq_len), key=lambda gap: gap.worst)
    where = f"{first}, position {min(gap.first for gap in all_of[first])}"
    return Finding(check, False, gap.worst, gap.allowed, where, _meaning(check, first, first == places[0]))


def _fit(step: Step, pairs: Mapping[Place, Pair], allowed: Mapping[Place, float]) -> dict[Place, float]:
    """How many times too large gradients of outputs are: by what most rows agree on, of those nearest to the loss.

    Others may differ from these by the ranks of cp alone, as before and after `ShardedSequence.unshard`.
    """
    scales: dict[Place, float] = {}
    cp_size = float(step.ranks.cp_size)
    for place in step.ranks.gather(list(pairs))[0]:
        found = pairs.get(place)
        options = [scale * factor for scale in list(scales.values())[:1] for factor in (1.0, cp_size, 1 / cp_size)]
        if not scales:
            of_rows = [1.0]
            if found is not None and found.want.any():
                dots, squares = (found.got * found.want).sum(1), found.want.square().sum(1)
                of_rows += [float(dots.sum() / squares.sum()), float((dots / squares)[squares > 0].median())]
            options = [scale for scales_of_rank in step.ranks.gather(of_rows) for scale in scales_of_rank]
        agree = [0 if found is None else _agreeing(found, step.seq_len, scale, allowed[place]) for scale in options]
        counts = [sum(answers) for answers in zip(*step.ranks.gather(agree), strict=True)]
        scales[place] = options[counts.index(max(counts))]
    return scales


def _agreeing(found: Pair, seq_len: int, scale: float, allowed: float) -> int:
    return int((gaps(found, seq_len, scale) <= allowed)[found.positions].sum()) if scale else 0


def _meaning(check: str, place: Place, is_first: bool) -> str:
    if check == "logits":
        return ""
    if check == "backward" and is_first:
        return "its gradient differs, the first after the loss: another label, or weight of the label, is read there"
    if check == "backward":
        return "its gradient differs, though those nearer to the loss agree"
    if place.what.startswith("argument"):
        return (
            "it differs, though what modules before it return agrees: another mask of attention in between, other rows"
        )
    return "it differs, though the arguments agree: if this module attends, it sees other tokens"


def _compare_losses(step: Step, got: float, want: float, other: float, base: float) -> Finding:
    size = max(abs(want), 1e-30)
    error, allowed = abs(got - want) / size, base + FACTOR * abs(other - want) / size
    note = f"{got:.6g}, on one rank {want:.6g}"
    return Finding("loss", error <= allowed, error, allowed, note=note + _scaled(step, got / want, error <= allowed))


def _scaled(step: Step, ratio: float, right: bool) -> str:
    return "" if right else f": {step_factor(step, ratio)}"


def _compare_gradients(
    step: Step, want: Mapping[str, Tensor], other: Mapping[str, Tensor], base: float, norm: float | None
) -> Iterator[Finding]:
    """Every parameter's gradient, after the trainer's reduction, and their ``norm``, as the trainer has it."""
    everyone = sum(float(grad.double().square().sum()) for grad in want.values())
    elements = sum(grad.numel() for grad in want.values())
    typical = (everyone / elements) ** 0.5
    got = {clean(name): p for name, p in inner(step.model).named_parameters()}
    errors, allowed, squares = {}, {}, 0.0
    for name, theirs in want.items():
        mine = whole_gradient(got[name])
        squares += float(mine.double().square().sum())
        size = max(_rms(theirs), OF_SMALL * typical)
        error = _rms(mine - theirs) / size
        errors[name] = error if error == error else float("inf")
        allowed[name] = base + FACTOR * _rms(other[name] - theirs) / size
    answers = step.ranks.gather({name: error for name, error in errors.items() if not error <= allowed[name]})
    wrong = [name for name in want if any(name in answer for answer in answers)]
    name = wrong[-1] if wrong else max(errors, key=lambda name: errors[name] / allowed[name])
    worst = max([errors[name], *(answer.get(name, 0.0) for answer in answers)])
    where, note = "", f"{len(want)} parameters"
    if wrong:
        where = name + (f", and {len(wrong) - 1} of {len(want) - 1} others" if len(wrong) > 1 else "")
        note = _explain_gradients(step, want, got)
    yield Finding("gradients", not wrong, worst, allowed[name], where, note)
    norm, on_one_rank = squares**0.5 if norm is None else norm, everyone**0.5
    error = abs(norm / on_one_rank - 1) if on_one_rank else norm
    note = f"{norm:.6g}, on one rank {on_one_rank:.6g}"
    limit = max(base, *allowed.values()) if allowed else base
    right = all(step.ranks.gather(error <= limit))
    yield Finding("gradient norm", right, error, limit, note=note)


def whole_gradient(parameter: Tensor) -> Tensor:
    """The gradient as the optimizer would see it, of all shards; a collective for DTensors."""
    if parameter.grad is None:
        return torch.zeros_like(local(parameter.detach()))
    return local(parameter.grad)


def _explain_gradients(step: Step, want: Mapping[str, Tensor], got: Mapping[str, Tensor]) -> str:
    """What wrong gradients are: a multiple of the right ones, shares that nobody summed, or neither."""
    ranks = step.ranks
    options: list[tuple[str, ...]] = [(), *((axis,) for axis in ranks.data), ranks.data]
    for axes in dict.fromkeys(options):
        dot = square = own = 0.0
        for name, theirs in want.items():
            mine = ranks.reduce(whole_gradient(got[name]).double().clone(), axes=axes)
            dot += float((mine * theirs).sum())
            square += float(theirs.double().square().sum())
            own += float(mine.square().sum())
        ratio = dot / square if square else float("nan")
        is_multiple = own > 0 and abs(own - ratio * dot) <= ALIKE**2 * own
        ratios = ranks.gather(ratio)
        if all(ranks.gather(is_multiple)) and max(ratios) - min(ratios) <= ALIKE * abs(ratio):
            if not axes:
                return f"all of them are {step_factor(step, ratio)}"
            scale = "" if abs(ratio - 1) <= ALIKE else f", and that is {step_factor(step, ratio)}"
            return f"each rank has a share: nothing sums them over {' and '.join(axes)}{scale}"
    return "the last of them in the model is named, from which errors spread to those before it"


def _rms(x: Tensor) -> float:
    return float(x.double().square().mean().sqrt()) if x.numel() else 0.0


def _cast(x: Any, dtype: torch.dtype | None) -> Any:
    return x.to(dtype) if isinstance(x, Tensor) and x.is_floating_point() and dtype is not None else x


def _compare_batches(ranks: Ranks, batch: Batch) -> Iterator[Finding]:
    """The ranks that share sequences have the same batch."""
    axes = (*((ranks.cp,) if ranks.cp else ()), *ranks.same)
    mine = {name: fingerprint(x) if isinstance(x, Tensor) else "" for name, x in batch.items()}
    answers = ranks.gather(mine, axes)
    unlike = [name for name in mine if len({answer.get(name) for answer in answers}) > 1]
    unlike += sorted({name for answer in answers for name in answer} - mine.keys())
    found = [names for names in ranks.gather(unlike) if names]
    note = f"the same on all ranks of {' and '.join(axes)}" if axes else ""
    if found:
        note = f"differs between ranks of {' and '.join(axes)}: seed the loader by the data-parallel rank"
    yield Finding("batch", not found, where=", ".join(found[0]) if found else "", note=note)


def _compare_weights(ranks: Ranks, twin: nn.Module) -> Iterator[Finding]:
    """All ranks began with the same weights, which are those of the spread model."""
    mine = {name: float(parameter.detach().double().sum()) for name, parameter in twin.named_parameters()}
    answers = ranks.gather(mine)
    unlike = [name for name in mine if len({answer[name] for answer in answers}) > 1]
    note = "differ between ranks: seed them alike" if unlike else "the same on all ranks"
    yield Finding("weights", not unlike, where=", ".join(unlike[:3]), note=note)


def _masks(mask: Mask | Sequence[Mask] | None, batch: Batch, rows: int) -> list[Mask]:
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
