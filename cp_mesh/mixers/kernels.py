"""What computes the recurrences of one rank: the reference, or the Triton kernels of flash-linear-attention.

Both take sequences that lie one after another and the state before each, and return the state after each; so the same
functions serve whole sequences, pieces, and what a piece does to the identity.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
from collections.abc import Callable
from itertools import accumulate
from typing import Any, Literal

import torch
from torch import Tensor

from cp_mesh.errors import UnsupportedError, refuse
from cp_mesh.mixers.reference import recurrence

Kernel = Literal["auto", "fla", "reference"]
KERNELS = "auto", "fla", "reference"
Run = Callable[..., tuple[Tensor, Tensor]]
"""As `reference.recurrence`."""
_WRONG = (3, 4, 0), (3, 7, 1)
"""From the first to before the second version of Triton gated backwards are wrong on Hopper (fla issue 640)."""


def choose_kernel(what: str, kernel: str, v: Tensor, g: Tensor | None) -> Run:
    """What computes a call.

    Raises:
        ArgumentError: on another name than those of `KERNELS`.
        UnsupportedError: where ``"fla"``, or ``"auto"`` on a GPU, cannot compute it.
    """
    if kernel not in KERNELS:
        refuse(f"{what}: kernel", " or ".join(KERNELS), kernel, '"auto" takes fla on GPUs')
    if kernel == "reference" or (kernel == "auto" and v.device.type != "cuda"):
        return recurrence
    hint = 'kernel="reference" computes token by token'
    if v.device.type != "cuda" or v.dtype not in (torch.bfloat16, torch.float16):
        refuse(f"{what}: fla", "bfloat16 or float16 on a GPU", f"{v.dtype} on {v.device.type}", hint, UnsupportedError)
    if importlib.util.find_spec("fla") is None:
        refuse(f"{what}: fla", "the package fla-core", "none", f"pip install fla-core; {hint}", UnsupportedError)
    triton = tuple(int(part) for part in importlib.metadata.version("triton").split("+")[0].split(".")[:3])
    hopper = torch.cuda.get_device_capability(v.device)[0] == 9
    if g is not None and hopper and _WRONG[0] <= triton < _WRONG[1]:
        got = f"{'.'.join(map(str, triton))}, whose gated backward is wrong (fla issue 640)"
        refuse(
            f"{what}: fla on Hopper", "triton 3.7.1 or newer", got, f"pip install -U triton; {hint}", UnsupportedError
        )
    return _fla


def _fla(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None,
    beta: Tensor | None,
    initial: Tensor,
    lens: list[int],
    scale: float,
) -> tuple[Tensor, Tensor]:
    """`reference.recurrence` by the kernels of flash-linear-attention."""
    if not len(v):
        return v, initial
    from fla.ops.delta_rule import chunk_delta_rule
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule
    from fla.ops.gla import chunk_gla
    from fla.ops.kda import chunk_kda
    from fla.ops.simple_gla import chunk_simple_gla

    by_channel = g is not None and g.ndim == 3
    if g is None:
        run: Any = chunk_simple_gla if beta is None else chunk_delta_rule
    elif beta is None:
        run = chunk_gla if by_channel else chunk_simple_gla
    else:
        run = chunk_kda if by_channel else chunk_gated_delta_rule
    if v.shape[1] != k.shape[1] and run not in (chunk_gated_delta_rule, chunk_kda):
        q, k = (x.repeat_interleave(v.shape[1] // k.shape[1], 1) for x in (q, k))
    cu = torch.tensor([0, *accumulate(lens)], dtype=torch.int64)
    options: dict[str, Any] = {"scale": scale, "initial_state": initial.float(), "output_final_state": True}
    options |= {"cu_seqlens": cu.to(v.device, non_blocking=True)}
    options |= {} if run in (chunk_gla,) else {"cu_seqlens_cpu": cu}
    options |= {name: x[None] for name, x in (("g", g), ("beta", beta)) if x is not None}
    q, k, v = (x.to(v.dtype)[None].contiguous() for x in (q, k, v))
    out, final = run(q, k, v, **options)
    return out[0], final
