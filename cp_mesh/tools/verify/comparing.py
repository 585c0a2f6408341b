"""The comparison: batches, weights, rows of all modules, losses and gradients, each of which is a finding."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import torch.distributed as dist
from torch import Tensor, nn

from cp_mesh.comm.fingerprints import fingerprint
from cp_mesh.tools.verify.hints import explain_gradients, of_forward, of_gradient, step_factor
from cp_mesh.tools.verify.models import inner, whole_gradient
from cp_mesh.tools.verify.ranks import Ranks
from cp_mesh.tools.verify.report import Finding
from cp_mesh.tools.verify.step import Batch, Step
from cp_mesh.tools.verify.traces import Pair, Place, Rows, clean, gaps, pair

FACTOR = 16.0  # of what other rounding of the weights does to the reference
EXACT = 1e-9  # of the signal, in float64
ALIKE = 1e-3  # of a gradient: ranks that have the same one differ by less
OF_SMALL = 1e-3  # a small gradient is compared with this share of those of all parameters


def compare_batches(ranks: Ranks, batch: Batch) -> Iterator[Finding]:
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


def compare_weights(ranks: Ranks, twin: nn.Module) -> Iterator[Finding]:
    """All ranks began with the same weights, which are those of the spread model."""
    mine = {name: float(parameter.detach().double().sum()) for name, parameter in twin.named_parameters()}
    answers = ranks.gather(mine)
    unlike = [name for name in mine if len({answer[name] for answer in answers}) > 1]
    note = "differ between ranks: seed them alike" if unlike else "the same on all ranks"
    yield Finding("weights", not unlike, where=", ".join(unlike[:3]), note=note)


class _Gap(NamedTuple):
    """How far a tensor is off: the worst row, what is allowed, and the first position that is worse, or S."""

    worst: float
    allowed: float
    first: int


def compare_rows(
    step: Step,
    check: str,
    three: Sequence[Mapping[Place, Rows]],
    base: float,
    fit: bool = False,
    logits_agree: bool = True,
) -> Finding:
    """The rows of the step against those of the reference, and against what other rounding does to these.

    Args:
        step: the trainer's step.
        check: its name.
        three: what the step, the reference, and the reference once more gave.
        base: what is always allowed.
        fit: up to a factor, as the losses of a trainer may be scaled.
        logits_agree: whether the loss was given the same.
    """
    got, want, other = three
    seq_len = step.seq_len
    pairs = {place: x for place, rows in want.items() if (x := pair(got.get(place), rows, seq_len))}
    if fit:
        pairs = _with_sums(step, pairs)
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
    if check == "backward":
        note = of_gradient(first == places[0], logits_agree)
    else:
        same = {place: len(want[place].shape) for place in places if place[::2] == first[::2] and place not in wrong}
        beside = [place.what for place, ndim in same.items() if ndim == len(want[first].shape) and ndim > 2]
        note = of_forward(step, first, [x for x in beside if x.startswith("argument")]) if check == "forward" else ""
    return Finding(check, False, gap.worst, gap.allowed, where, note)


def _with_sums(step: Step, pairs: Mapping[Place, Pair]) -> dict[Place, Pair]:
    """Gradients of tensors that are whole on every cp rank summed over these, where each rank has a part of them.

    So they come before a `ShardInput`. Behind `ShardedSequence.gather` all ranks have the same.
    """
    ranks, cp_size, summed = step.ranks, step.ranks.cp_size, dict(pairs)
    for place in ranks.gather(list(pairs))[0] if cp_size > 1 else ():
        found = pairs.get(place)
        is_whole = found is not None and len(found.positions) == step.seq_len
        if not all(ranks.gather(is_whole)):
            continue
        assert found is not None and ranks.cp is not None
        total = ranks.reduce(found.got.clone(), dist.ReduceOp.SUM, (ranks.cp,))
        apart = float((total - cp_size * found.got).norm()) > ALIKE * float(total.norm())
        if any(ranks.gather(apart)):
            summed[place] = found._replace(got=total)
    return summed


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


def compare_losses(step: Step, got: float, want: float, other: float, base: float) -> Finding:
    size = max(abs(want), 1e-30)
    error, allowed = abs(got - want) / size, base + FACTOR * abs(other - want) / size
    note, named = f"{got:.6g}, on one rank {want:.6g}", False
    if not error <= allowed:
        text, named = step_factor(step, got / want)
        note += f": {text}"
    return Finding("loss", error <= allowed, error, allowed, note=note, named=named)


def compare_gradients(
    step: Step, want: Mapping[str, Tensor], other: Mapping[str, Tensor], base: float, norm: float | None
) -> Iterator[Finding]:
    """Every parameter's gradient, after the trainer's reduction, and their ``norm``, as the trainer has it."""
    everyone = sum(float(grad.double().square().sum()) for grad in want.values())
    elements = sum(grad.numel() for grad in want.values())
    typical = (everyone / elements) ** 0.5
    got = {clean(name): p for name, p in inner(step.model).named_parameters()}
    errors, allowed, squares = {}, {}, 0.0
    for name in want:
        mine = whole_gradient(got[name])
        theirs, again = (x[name].to(mine.device) for x in (want, other))
        squares += float(mine.double().square().sum())
        size = max(_rms(theirs), OF_SMALL * typical)
        error = _rms(mine - theirs) / size
        errors[name] = error if error == error else float("inf")
        allowed[name] = base + FACTOR * _rms(again - theirs) / size
    answers = step.ranks.gather({name: error for name, error in errors.items() if not error <= allowed[name]})
    wrong = [name for name in want if any(name in answer for answer in answers)]
    name = wrong[-1] if wrong else max(errors, key=lambda name: errors[name] / allowed[name])
    worst = max([errors[name], *(answer.get(name, 0.0) for answer in answers)])
    where, note, named = "", f"{len(want)} parameters", False
    if wrong:
        where = name + (f", and {len(wrong) - 1} of {len(want) - 1} others" if len(wrong) > 1 else "")
        note, named = explain_gradients(step, want, got)
    yield Finding("gradients", not wrong, worst, allowed[name], where, note, named)
    norm, on_one_rank = squares**0.5 if norm is None else norm, everyone**0.5
    error = abs(norm / on_one_rank - 1) if on_one_rank else norm
    note = f"{norm:.6g}, on one rank {on_one_rank:.6g}"
    limit = max(base, *allowed.values()) if allowed else base
    right = all(step.ranks.gather(error <= limit))
    yield Finding("gradient norm", right, error, limit, note=note)


def _rms(x: Tensor) -> float:
    return float(x.double().square().mean().sqrt()) if x.numel() else 0.0
