"""Kernels of the package fla-core, flash-linear-attention without its layers: half precision, on GPUs."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache, lru_cache
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from cp_mesh.geometry.host_tensors import lasting
from cp_mesh.mixers.between import Between
from cp_mesh.mixers.reference import Inputs
from cp_mesh.mixers.seam import of_package, with_seam

HALF = (torch.bfloat16, torch.float16)
_LOWEST = -100.0
"""exp of it is 0 in float32. The package subtracts sums of g from one another, where greater ones would lose digits."""


Shortfall = tuple[object, object, str] | None
"""What a call lacks: what is expected, what was given, and what to do."""


def shortfall(q: Tensor, k: Tensor, v: Tensor) -> Shortfall:
    """What a recurrence lacks."""
    if (K := k.shape[-1]) > 256 or K % 2 or v.shape[-1] % 2:
        return "K and V even, and K at most 256", f"{K} and {v.shape[-1]}", 'kernel="torch" takes any'
    return shortfall_of("q, k and v", q, k, v)


def shortfall_of(names: str, *tensors: Tensor) -> Shortfall:
    """What any call of the package lacks."""
    if (device := tensors[0].device).type != "cuda" and not _interprets():
        return "tensors on a GPU", device, 'kernel="torch" computes on CPUs'
    dtypes = [x.dtype for x in tensors]
    if len({*dtypes}) > 1 or dtypes[0] not in HALF:
        hint = "cast to half precision; recurrences keep their states in float32"
        return f"{names} in bfloat16, or all in float16", ", ".join(map(str, dtypes)), hint
    if not (0, 6) <= (found := _release("fla-core")) < (0, 7):  # the seam replaces names of 0.6
        got = f"release {'.'.join(map(str, found))}" if found else "no such package"
        return "fla-core 0.6", got, "pip install 'cp_mesh[mixers]'"
    if (3, 4) <= _release("triton") < (3, 7, 1) and _is_hopper(device):
        # issue 640 of flash-linear-attention is of rules with one decay a head; others have not run with these either
        hint = "pip install 'triton>=3.7.1'"
        return "a Triton whose backward is right on Hopper", version("triton"), hint
    return None


def _interprets() -> bool:
    """Whether Triton runs kernels on CPUs, as in tests."""
    return bool(_release("triton")) and import_module("triton").knobs.runtime.interpret


def _is_hopper(device: torch.device) -> bool:
    return torch.cuda.is_available() and torch.cuda.get_device_capability(device)[0] == 9


@cache
def _release(package: str) -> tuple[int, ...]:
    """Its numbers; () without the package. Reading them takes a millisecond."""
    try:
        words = version(package).partition("+")[0].split(".")
    except PackageNotFoundError:
        return ()
    return tuple(int(word) for word in words if word.isdigit())


def by_fla(
    inputs: Inputs, initial: Tensor | None, lens: Sequence[int], scale: float, between: Between | None = None,
    final: bool = True,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """Compute sequences that lie one after another; as `recurrence`, also of inputs [1, T, ...].

    Of whole documents this is one call of the package. Where ``between`` sends states, those of other ranks are added
    to the initial ones. They are part of no graph: the backward passes their gradients on. Initial states may be None,
    zeros; so are final ones that nobody asks for.
    """
    q, k, v, g, beta = inputs if inputs.v.ndim == 4 else inputs.of_each(lambda x: x[None])
    sends = between is not None and between.sends
    rule = _RULES[0 if g is None else g.ndim - 2][beta is not None]
    if sends and rule == "delta_rule":  # which has no seam
        rule, g = "gated_delta_rule", torch.zeros(v.shape[:3], device=v.device)
    groups = v.shape[2] // q.shape[2]
    if groups > 1 and rule not in ("gated_delta_rule", "kda"):  # the others take as many heads of q and k as of v
        q, k = (x.repeat_interleave(groups, 2) for x in (q, k))
    rows: dict[str, Any] = {"q": q, "k": k, "v": v, "scale": scale, "output_final_state": final}
    if g is not None:
        rows["g"] = F.threshold(g.float(), _LOWEST, _LOWEST)  # of the backward of `clamp` the host takes three steps
    if beta is not None:
        rows["beta"] = beta
    rows["initial_state"] = None if initial is None else initial.float()
    rows["cu_seqlens_cpu"], rows["cu_seqlens"] = _ends(tuple(lens), v.device)
    if sends or not v.shape[1]:
        out, states = with_seam(rule, rows, between)
    else:
        out, states = of_package(f"fla.ops.{rule}", f"chunk_{rule}")(**rows)
    return out if inputs.v.ndim == 4 else out[0], states


_RULES = ("simple_gla", "delta_rule"), ("simple_gla", "gated_delta_rule"), ("gla", "kda")


def convolve(
    x: Tensor, weight: Tensor, bias: Tensor | None, activation: str | None, initial: Tensor | None,
    lens: tuple[int, ...],
) -> Tensor:  # fmt: skip
    """Causal, of each channel by itself: sequences one after another, x [1, T, D], with the rows before as states."""
    ends, on_device = _ends(lens, x.device)
    options = {"activation": activation, "cu_seqlens": on_device, "cu_seqlens_cpu": ends}
    convolution = of_package("fla.modules.causal_conv1d", "causal_conv1d")
    return cast(Tensor, convolution(x, weight, bias, initial_state=initial, **options)[0])


def normalize(x: Tensor) -> Tensor:
    """Rows [..., K] of length 1, computed in float32."""
    return cast(Tensor, of_package("fla.modules.norm.l2norm", "l2norm")(x))


@lru_cache(maxsize=8)
@lasting()
def _ends(lens: tuple[int, ...], device: torch.device) -> tuple[Tensor, Tensor]:
    """Where sequences end, on the CPU and on the device. The package finds its indices again by the same tensors.

    In int32, as those of its own `cp_context`: it tunes kernels for each dtype.
    """
    ends = torch.tensor([0, *lens], device="cpu").cumsum(0, dtype=torch.int32)
    return ends, ends.to(device)
