"""What a difference means, in words: a layer that the plan leaves out, positions, a number of ranks, a missing sum."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from itertools import pairwise
from typing import Any, NamedTuple

from torch import Tensor

from cp_mesh.errors import written
from cp_mesh.geometry.mask import Mask
from cp_mesh.tools.verify.models import inner, whole_gradient
from cp_mesh.tools.verify.step import Step
from cp_mesh.tools.verify.traces import Place, clean
from cp_mesh.training.context_parallel import ContextParallel
from cp_mesh.training.sharded_model import ShardedModel
from cp_mesh.training.style_helpers import style_of

ALIKE = 1e-3  # of a gradient that is a multiple of another
OF_POSITIONS = re.compile(r"position|rope|rotary|freqs|cos\b|sin\b")
POSITIONS = "other positions, as if each rank counts from 0: ShardedModel(positions=), or sequence.positions(seq_len)"


class Factor(NamedTuple):
    """How many times too large something is, in words, and whether these name a cause."""

    text: str
    named: bool


def of_gradient(is_first: bool, logits_agree: bool) -> str:
    """What it means that the gradient of an output differs, the first after the loss or another one."""
    if not logits_agree:
        return "its gradient differs, as the logits do"
    if is_first:
        return "its gradient differs, the first after the loss: another label, or weight of the label, is read there"
    return "its gradient differs, though those nearer to the loss agree"


def of_forward(step: Step, place: Place, beside: Collection[str]) -> str:
    """What it means that an argument or output differs, where what came before agrees.

    Args:
        step: the trainer's step.
        place: where that is.
        beside: tensors of as many dims that agree, among the arguments of the same call.
    """
    plan = _Plan.of(step)
    if place.what.startswith("argument"):
        name = place.what.removeprefix("argument ")
        if OF_POSITIONS.search(name):
            return f"it differs: {POSITIONS}"
        if beside:
            return f"it differs, and {', '.join(beside)} beside it agrees: {POSITIONS}"
        if left := plan.left_out:
            return f"it differs, though what modules before it return agrees: the plan leaves out {', '.join(left)}"
        also = "" if plan.planned else "; no module is in the plan, where attention sees its own rank's rows alone"
        return f"it differs, though what modules before it return agrees: another mask in between, or other rows{also}"
    what = "it differs, though the arguments agree: "
    if place.module in plan.left_out:
        like = f"as {plan.planned[0]} is, so it sees its own rank's rows alone"
        return f"{what}it is not in the plan, {like}"
    if plan.leaves_alone(place.module):
        return f"{what}it is not in the plan, so if it mixes tokens it sees its own rank's rows alone"
    own = f"{what}if this module attends, it sees other tokens, by another mask, window or scores"
    return f"{own}{of_styles(step, place.module)}"


def of_styles(step: Step, module: str = "") -> str:
    """Of a mask or scores of a style, at a module or within it, which the reference may not have."""
    for name, part in inner(step.model).named_modules():
        style, name = style_of(part), clean(name)
        near = f"{name}.".startswith(f"{module}." if module else "") or f"{module}.".startswith(f"{name}.")
        if near and isinstance(style, ContextParallel) and (style.scores or not _is_plain(style.mask)):
            said = f"mask={written(style.mask)}" + " and scores" * bool(style.scores)
            hint = "if the model's own code does not, make_reference= makes one that does"
            return f"; its style in the plan says {said}: {hint}"
    return ""


def _is_plain(mask: Any) -> bool:
    """Whether a plain causal or full call of SDPA says as much."""
    return isinstance(mask, Mask) and not (mask.window or mask.prefix or mask.elementwise)


class _Plan(NamedTuple):
    """Which modules a plan names, and which ones of the same classes it does not.

    Of a model whose root brings attention itself nothing is known: ``knows`` is False.
    """

    knows: bool
    planned: tuple[str, ...]
    left_out: tuple[str, ...]

    @classmethod
    def of(cls, step: Step) -> _Plan:
        modules = {clean(name): module for name, module in inner(step.model).named_modules()}
        styles = {name: style for name, module in modules.items() if (style := style_of(module)) is not None}
        if step.ranks.cp_size == 1 or not (styles.get("") is None or isinstance(styles[""], ShardedModel)):
            return cls(False, ("",), ())
        planned = tuple(name for name, style in styles.items() if not isinstance(style, ShardedModel))
        kinds = {(type(modules[name]).__module__, type(modules[name]).__qualname__) for name in planned}
        others = (name for name in modules if name not in styles)
        same = (x for x in others if (type(modules[x]).__module__, type(modules[x]).__qualname__) in kinds)
        return cls(True, planned, tuple(same))

    def leaves_alone(self, module: str) -> bool:
        """Whether neither this module nor one that it is part of, or has in it, is in the plan."""
        near = (x for x in self.planned if f"{module}.".startswith(f"{x}.") or f"{x}.".startswith(f"{module}."))
        return self.knows and module != "" and next(near, None) is None


def step_factor(step: Step, ratio: float, tolerance: float = 1e-3) -> Factor:
    """In words, how many times too large something is."""
    ranks = step.ranks
    sizes = {f"the ranks of {axis}": ranks.size(axis) for axis in ranks.axes}
    sizes |= {f"the ranks of {a} and {b}": ranks.size(a, b) for a, b in pairwise(ranks.data)}
    sizes["all ranks"] = ranks.size(*ranks.axes)
    named = [name for name, size in sizes.items() if size > 1 and abs(ratio / size - 1) <= tolerance]
    if named:
        return Factor(f"{ratio:.4g} times too large, as many as {named[0]}", True)
    named = [name for name, size in sizes.items() if size > 1 and abs(ratio * size - 1) <= tolerance]
    if named:
        return Factor(f"{ratio:.4g} of what it is to be, one over {named[0]}", True)
    return Factor(f"{ratio:.6g} times what it is to be", False)


def explain_gradients(step: Step, want: Mapping[str, Tensor], got: Mapping[str, Tensor]) -> Factor:
    """What wrong gradients are: a multiple of the right ones, shares that nobody summed, or neither."""
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
            if not axes:
                text, named = step_factor(step, ratio)
                return Factor(f"all of them are {text}", named)
            scale = "" if abs(ratio - 1) <= ALIKE else f", and that is {step_factor(step, ratio).text}"
            return Factor(f"each rank has a share: nothing sums them over {' and '.join(axes)}{scale}", True)
    return Factor("the last of them in the model is named, from which errors spread to those before it", False)
