"""Compare batches, weights, rows of all modules, losses and gradients with the reference, and explain differences.

An explanation names a layer that the plan leaves out, wrong positions, a number of ranks, or a missing sum.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

from torch import Tensor, nn

from cp_mesh._torch import unwrapped
from cp_mesh.comm.fingerprints import fingerprint
from cp_mesh.errors import written
from cp_mesh.geometry.mask import Mask
from cp_mesh.tools.verification.report import Finding
from cp_mesh.tools.verification.step import Batch, Ranks, Step, inner, whole_gradient
from cp_mesh.training.context_parallel import ContextParallel
from cp_mesh.training.sharded_model import ShardedModel
from cp_mesh.training.style_helpers import style_of
from cp_mesh.training.traces import RowProducts, TracedPlace, gaps, pair

FACTOR = 16.0  # allowed error, over the change of the reference when its weights are rounded differently
EXACT = 1e-9  # allowed error in float64, relative to the signal
ALIKE = 1e-3  # gradients that differ by less, relative to their norm, are equal or multiples of each other
OF_SMALL = 1e-3  # errors of small gradients are relative to this share of the RMS over all parameters
OF_POSITIONS = re.compile(r"position|rope|rotary|freqs|cos\b|sin\b")
POSITIONS = "other positions, as if each rank counts from 0: ShardedModel(positions=), or sequence.positions(seq_len)"


def compare_batches(ranks: Ranks, batch: Batch) -> Finding:
    """Check that ranks that share sequences have the same batch."""
    axes = (*ranks.cp, *ranks.same)
    mine = {name: fingerprint(x) if isinstance(x, Tensor) else "" for name, x in batch.items()}
    answers = ranks.gather(mine, axes)
    unlike = [name for name in mine if len({answer.get(name) for answer in answers}) > 1]
    unlike += sorted({name for answer in answers for name in answer} - mine.keys())
    found: list[str] = next((names for names in ranks.gather(unlike) if names), [])
    note = f"the same on all ranks of {' and '.join(axes)}" if axes else ""
    if found:
        note = f"differs between ranks of {' and '.join(axes)}: seed the loader by the data-parallel rank"
    return Finding("batch", not found, where=", ".join(found), note=note)


def compare_weights(ranks: Ranks, twin: nn.Module) -> Finding:
    """Check that all ranks start with the same weights, which ``twin`` copies from the parallelized model."""
    mine = {name: float(parameter.detach().double().sum()) for name, parameter in twin.named_parameters()}
    answers = ranks.gather(mine)
    unlike = [name for name in mine if len({answer[name] for answer in answers}) > 1]
    note = "differ between ranks: seed them alike" if unlike else "the same on all ranks"
    return Finding("weights", not unlike, where=", ".join(unlike[:3]), note=note)


class _Gap(NamedTuple):
    """Error of a tensor: of its worst row, the allowed one, and the first position above it (S if none)."""

    worst: float
    allowed: float
    first: int


def compare_rows(step: Step, check: str, three: Sequence[Mapping[TracedPlace, RowProducts]], base: float) -> Finding:
    """Compare the rows of the step with the reference; the limit comes from the reference with other rounding.

    Args:
        step: the trainer's step.
        check: name of the check.
        three: rows of the step, of the reference, and of the reference with other rounding.
        base: error that is always allowed.
    """
    got, want, other = three
    seq_len = step.seq_len
    pairs = {place: x for place, rows in want.items() if (x := pair(got.get(place), rows, seq_len))}
    allowed = {}
    for place in pairs:
        again = pair(other.get(place), want[place], seq_len)
        allowed[place] = base + (FACTOR * float(gaps(again, seq_len).max()) if again else 0.0)
    found: dict[TracedPlace, _Gap] = {}
    for place, rows in pairs.items():
        errors = gaps(rows, seq_len)
        bad = (errors > allowed[place]).nonzero().flatten()
        found[place] = _Gap(float(errors.max()), allowed[place], int(bad[0]) if len(bad) else seq_len)
    answers = step.ranks.gather(found)
    all_of = {place: [answer[place] for answer in answers if place in answer] for place in want}
    places = [place for place in want if all_of[place]]
    if not places:
        return Finding(check, False, note="nothing to compare: all modules are compiled, or no shapes match")
    wrong = [place for place in places if any(gap.first < seq_len for gap in all_of[place])]
    if not wrong:
        gap = max((gap for place in places for gap in all_of[place]), key=lambda gap: gap.worst / gap.allowed)
        return Finding(check, True, gap.worst, gap.allowed, note=f"{len(places)} of {len(want)} tensors compared")
    first = wrong[0]
    gap = max((gap for gap in all_of[first] if gap.first < seq_len), key=lambda gap: gap.worst)
    where, note = f"{first}, position {min(gap.first for gap in all_of[first])}", ""
    if check == "forward":
        beside = [x for x in places if x[::2] == first[::2] and x not in wrong and x.what.startswith("argument")]
        ndim = len(want[first].shape)
        note = _of_forward(step, first, [x.what for x in beside if len(want[x].shape) == ndim > 2])
    return Finding(check, False, gap.worst, gap.allowed, where, note)


def compare_losses(step: Step, got: float, want: float, other: float, base: float) -> Finding:
    size = max(abs(want), 1e-30)
    allowed, note = base + FACTOR * abs(other - want) / size, f"{got:.6g}, on one rank {want:.6g}"
    return factor_finding(step, "loss", abs(got - want) / size, allowed, note, (got, want))


def compare_gradients(
    step: Step, want: Mapping[str, Tensor], other: Mapping[str, Tensor], base: float, norm: float | None
) -> Iterator[Finding]:
    """Compare all parameter gradients after the trainer's reduction, and the trainer's gradient ``norm``."""
    everyone = sum(float(grad.double().square().sum()) for grad in want.values())
    elements = sum(grad.numel() for grad in want.values())
    typical = (everyone / elements) ** 0.5
    got = {unwrapped(name): p for name, p in inner(step.model).named_parameters()}
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
        note, named = _explain_gradients(step, want, got)
    yield Finding("gradients", not wrong, worst, allowed[name], where, note, named)
    norm, on_one_rank = squares**0.5 if norm is None else norm, everyone**0.5
    error = abs(norm / on_one_rank - 1) if on_one_rank else norm
    limit = max(base, *allowed.values()) if allowed else base
    right = all(step.ranks.gather(error <= limit))
    yield Finding("gradient norm", right, error, limit, note=f"{norm:.6g}, on one rank {on_one_rank:.6g}")


def _rms(x: Tensor) -> float:
    return float(x.double().square().mean().sqrt()) if x.numel() else 0.0


# Explanations of differences.


def _of_forward(step: Step, place: TracedPlace, beside: Collection[str]) -> str:
    """Explain why an argument or output may differ if all earlier ones agree.

    Args:
        step: the trainer's step.
        place: the argument or output.
        beside: arguments of the same call that agree and have as many dims.
    """
    planned, left_out = _plan_of(step)
    if place.what.startswith("argument"):
        if OF_POSITIONS.search(place.what.removeprefix("argument ")):
            return f"it differs: {POSITIONS}"
        if beside:
            return f"it differs, and {', '.join(beside)} beside it agrees: {POSITIONS}"
        what = "it differs, though outputs of earlier modules agree: "
        if left_out:
            return f"{what}the plan leaves out {', '.join(left_out)}"
        also = "; no module is in the plan, so attention sees only its own rank's rows" if planned == () else ""
        return f"{what}code in between applies another mask, or reads other rows{also}"
    what = "it differs, though the arguments agree: "
    if planned and place.module in left_out:
        return f"{what}it is not in the plan, as {planned[0]} is, so it sees only its own rank's rows"
    if planned is not None and place.module and not any(_is_near(place.module, x) for x in planned):
        return f"{what}it is not in the plan, so if it mixes tokens it sees only its own rank's rows"
    return (
        f"{what}if this module attends, its queries see other tokens, by another mask, window or scores"
        f"{of_styles(step, place.module)}"
    )


def _plan_of(step: Step) -> tuple[tuple[str, ...] | None, tuple[str, ...]]:
    """Return the modules in the plan, and modules of the same classes that are not in it.

    Return None and no modules if nothing is known: with one cp rank, or if the root's style handles attention itself.
    """
    modules = {unwrapped(name): module for name, module in inner(step.model).named_modules()}
    styles = {name: style for name, module in modules.items() if (style := style_of(module)) is not None}
    if step.ranks.cp_size == 1 or not (styles.get("") is None or isinstance(styles[""], ShardedModel)):
        return None, ()

    def kind(name: str) -> tuple[str, str]:
        return type(modules[name]).__module__, type(modules[name]).__qualname__

    planned = tuple(name for name, style in styles.items() if not isinstance(style, ShardedModel))
    kinds = {kind(name) for name in planned}
    return planned, tuple(name for name in modules if name not in styles and kind(name) in kinds)


def _is_near(module: str, other: str) -> bool:
    """Whether two module names are equal, or one module contains the other."""
    return not (module and other) or any(f"{x}.".startswith(f"{y}.") for x, y in ((module, other), (other, module)))


def of_styles(step: Step, module: str = "") -> str:
    """Describe the mask or scores of a style at or near ``module``, which the reference may lack; "" if none."""
    for name, part in inner(step.model).named_modules():
        style = style_of(part)
        if isinstance(style, ContextParallel) and _is_near(module, unwrapped(name)):
            if not style.scores and _is_plain(style.mask):
                continue
            said = f"mask={written(style.mask)}" + " and scores" * bool(style.scores)
            hint = "if the model's own code does not apply it, pass a make_reference= that does"
            return f"; its style in the plan has {said}: {hint}"
    return ""


def _is_plain(mask: Any) -> bool:
    """Whether this is plain causal or full attention."""
    return isinstance(mask, Mask) and not (mask.window or mask.prefix or mask.elementwise)


def factor_finding(
    step: Step,
    check: str,
    error: float,
    allowed: float,
    note: str,
    got_want: tuple[float, float],
    tolerance: float = 1e-3,
) -> Finding:
    """Return the finding about a number; if it is wrong, the note names the factor by which it is off."""
    (got, want), passed, named = got_want, error <= allowed, False
    if not passed and want:
        text, named = _factor(step, got / want, tolerance)
        note += f": {text}"
    return Finding(check, passed, error, allowed, note=note, named=named)


def _factor(step: Step, ratio: float, tolerance: float = 1e-3) -> tuple[str, bool]:
    """Describe a factor in words; True if it is a number of ranks, which names the cause."""
    ranks = step.ranks
    sizes = {f"ranks of {axis}": ranks.size(axis) for axis in ranks.axes}
    sizes |= {f"ranks of {a} and {b}": ranks.size(a, b) for a, b in pairwise(ranks.data)}
    sizes["ranks"] = ranks.size(*ranks.axes)
    for power, text in ((1, "times too large, the number of"), (-1, "of the right value, one over the number of")):
        for name, size in sizes.items():
            if size > 1 and abs(ratio / size**power - 1) <= tolerance:
                return f"{ratio:.4g} {text} {name}", True
    return f"{ratio:.6g} times the right value", False


def _explain_gradients(step: Step, want: Mapping[str, Tensor], got: Mapping[str, Tensor]) -> tuple[str, bool]:
    """Explain wrong gradients: a multiple of the right ones, partial gradients that nothing summed, or neither."""
    ranks = step.ranks
    options: list[tuple[str, ...]] = [(), *((axis,) for axis in ranks.data), ranks.data]
    for axes in dict.fromkeys(options):
        dot = square = own = 0.0
        for name, theirs in want.items():
            mine = ranks.reduce(whole_gradient(got[name]).double().clone(), axes=axes)
            dot += float((mine * theirs.to(mine.device)).sum())
            square += float(theirs.double().square().sum())
            own += float(mine.square().sum())
        ratio = dot / square if square else float("nan")
        is_multiple = own > 0 and abs(own - ratio * dot) <= ALIKE**2 * own
        ratios = ranks.gather(ratio)
        if all(ranks.gather(is_multiple)) and max(ratios) - min(ratios) <= ALIKE * abs(ratio):
            text, named = _factor(step, ratio)
            if not axes:
                return f"all of them are {text}", named
            scale = "" if abs(ratio - 1) <= ALIKE else f", and their sum is {text}"
            return f"each rank has a partial gradient: nothing sums them over {' and '.join(axes)}{scale}", True
    return "this is the last wrong one in the model; from it errors spread to earlier parameters", False
