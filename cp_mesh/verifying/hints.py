"""What a difference means, in words: a number of ranks, a sum that is missing, other rows, another label."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise

from torch import Tensor

from cp_mesh.verifying.models import whole_gradient
from cp_mesh.verifying.step import Step
from cp_mesh.verifying.traces import Place

ALIKE = 1e-3  # of a gradient that is a multiple of another


def meaning(check: str, place: Place, is_first: bool) -> str:
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


def step_factor(step: Step, ratio: float, tolerance: float = 1e-3) -> str:
    """In words, how many times too large something is."""
    ranks = step.ranks
    sizes = {f"the ranks of {axis}": ranks.size(axis) for axis in ranks.axes}
    sizes |= {f"the ranks of {a} and {b}": ranks.size(a, b) for a, b in pairwise(ranks.data)}
    sizes["all ranks"] = ranks.size(*ranks.axes)
    named = [name for name, size in sizes.items() if size > 1 and abs(ratio / size - 1) <= tolerance]
    if named:
        return f"{ratio:.4g} times too large, as many as {named[0]}"
    named = [name for name, size in sizes.items() if size > 1 and abs(ratio * size - 1) <= tolerance]
    if named:
        return f"{ratio:.4g} of what it is to be, one over {named[0]}"
    return f"{ratio:.6g} times what it is to be"


def explain_gradients(step: Step, want: Mapping[str, Tensor], got: Mapping[str, Tensor]) -> str:
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
                return f"all of them are {step_factor(step, ratio)}"
            scale = "" if abs(ratio - 1) <= ALIKE else f", and that is {step_factor(step, ratio)}"
            return f"each rank has a share: nothing sums them over {' and '.join(axes)}{scale}"
    return "the last of them in the model is named, from which errors spread to those before it"
