"""What computes a recurrence: its kernels by name."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache, partial
from typing import Any, Literal

import torch
from torch import Tensor

from cp_mesh.errors import UnsupportedError, describe, refuse, warn
from cp_mesh.kernels.precision import exactly
from cp_mesh.mixers.chunks import chunked
from cp_mesh.mixers.fla import by_fla, shortfall, shortfall_of
from cp_mesh.mixers.reference import Inputs, recurrence

Kernel = Literal["auto", "torch", "fla", "reference"]
KERNELS: dict[str, Callable[..., Any]] = {"auto": chunked, "torch": chunked, "fla": by_fla, "reference": recurrence}
"""By name. "auto" takes "fla" on GPUs for rules that passed examples/benchmarks/mixers.py or tests/fla_on_gpu.py."""
_UNTRIED = "a rule that passed its gate on GPUs", "a decay for each channel, no beta", 'kernel="fla" takes it'
MOST = 2**26
"""Numbers of v, and of k of each head of v, that are computed at once: a bound of the working memory."""


def choose_kernel(
    what: str, kernel: str, q: Tensor, k: Tensor, v: Tensor, g: Tensor | None, beta: Tensor | None
) -> Callable[..., tuple[Tensor, Any]]:
    """What computes a call, with the arguments of `recurrence`.

    Raises:
        ArgumentError: on another name than those of `KERNELS`.
        UnsupportedError: on "fla", where it does not compute the call.
    """
    if kernel not in KERNELS:
        refuse(f"{what}: kernel", " or ".join(KERNELS), kernel, '"torch" computes in chunks, on any device')
    if kernel == "fla" or (kernel == "auto" and v.device.type == "cuda"):
        lacking = shortfall(q, k, v)
        if lacking is None and kernel == "auto" and beta is None and g is not None and g.ndim == v.ndim:
            lacking = _UNTRIED
        if lacking is None:
            return by_fla
        if kernel == "fla":
            refuse(f"{what}: kernel", *lacking, UnsupportedError)
        _warn_of_torch(describe(f"{what}: kernels of fla-core", *lacking))
    return partial(_run, KERNELS[kernel])


@lru_cache(maxsize=64)
def _warn_of_torch(lacks: str) -> None:
    """Once of each reason."""
    warn(f'{lacks}. Plain PyTorch runs, exact but 15 times slower and more; kernel="torch" does so without a warning')


def convolves_by_fla(what: str, kernel: str, of_style: str, x: Tensor) -> bool:
    """Whether fla-core computes a convolution of rows like x.

    Args:
        kernel, of_style: the kernels that the call and the style of its module name.

    Raises:
        ArgumentError, UnsupportedError: as `choose_kernel`.
    """
    if kernel not in KERNELS:
        refuse(f"{what}: kernel", " or ".join(KERNELS), kernel, '"torch" computes on any device')
    if kernel != "fla" and (kernel != "auto" or of_style not in ("auto", "fla") or x.device.type != "cuda"):
        return False
    if (lacking := shortfall_of("x", x)) is not None and kernel == "fla":
        refuse(f"{what}: kernel", *lacking, UnsupportedError)
    return lacking is None


def folds(run: Callable[..., Any]) -> bool:
    """Whether it lets states of other ranks in between its summaries of pieces and their rows."""
    return isinstance(run, partial) and run.func is by_fla


def _run(
    compute: Callable[..., Any], inputs: Inputs, initial: Tensor, lens: list[int], scale: float
) -> tuple[Tensor, Tensor]:
    """Some heads after others, so that memory is bounded."""
    (num_rows, heads, V), (H, K) = inputs.v.shape, inputs.k.shape[1:]
    groups = heads // H
    most = max(MOST // max(num_rows * (K + V), 1), 1)
    size = most // groups * groups or next(n for n in range(min(most, groups), 0, -1) if groups % n == 0)
    of_v = [x if x is None else x.split(size, 1) for x in (*inputs[2:], initial)]
    of_q = [
        [part for part in x.split(max(size // groups, 1), 1) for _ in range(max(groups // size, 1))]
        for x in (inputs.q, inputs.k)
    ]

    def of_tensors(initial: Tensor, *tensors: Any) -> Any:
        return compute(Inputs(*tensors), initial, lens, scale)

    parts = [[x if x is None else x[i] for x in (*of_q, *of_v)] for i in range(len(of_q[0]))]
    found = [exactly(of_tensors, initial, *part) for *part, initial in parts]
    out, states = (torch.cat(x, 1) if len(parts) > 1 else x[0] for x in zip(*found, strict=True))
    return out, states
