"""The contract between the loops and the kernels that compute tiles.

A pass of a kernel takes one *step* per source of keys, and *finishes* (`cp_mesh.kernels.merge`).

Shapes: q [B, H, Sq, D], k [B, K, Sk, D], v [B, K, Sk, Dv], out [B, H, Sq, Dv], with any strides; H is a multiple of
K and query head h reads kv head h // (H // K). lse [B, H, Sq] is the log-sum-exp of the scaled scores, natural log,
in the accumulation dtype (fp64 for fp64 inputs, else fp32); a row with no key has lse = -inf and out = 0.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor

from cp_mesh.geometry.mask import CAUSAL, FULL, Band, Mask
from cp_mesh.geometry.schedule import Rows, split_causal
from cp_mesh.geometry.varlen import Segments


class Steps(NamedTuple):
    """Positions of rows as numbers: first + step · i for row i, and second + step · i from row ``split`` on."""

    split: int
    first: int
    second: int
    step: int

    @classmethod
    def of(cls, positions: Tensor) -> Steps | None:
        """The steps of int64 positions [S] on the CPU; None if these do not have this form."""
        num = len(positions)
        if num < 2:
            return cls(num, int(positions.sum()), 0, 1)
        steps = positions.diff()
        jumps = (steps != (step := int(steps[0]))).nonzero().flatten().tolist()
        if len(jumps) > 1:
            return None
        split = jumps[0] + 1 if jumps else num
        return cls(split, int(positions[0]), int(positions[-1]) - step * (num - 1), step)

    def rows(self, begin: int, end: int) -> Steps:
        """The steps of rows begin to end."""
        split = min(max(self.split - begin, 0), end - begin)
        return Steps(split, self.first + self.step * begin, self.second + self.step * begin, self.step)


@dataclass(frozen=True, eq=False)
class Pairs:
    """The allowed pairs of a tile that is not a band: the mask, and the positions of the tile's rows.

    ``adjacent``: most neighbouring rows of the keys are neighbours in the sequence. ``steps``: the `Steps` of queries
    and of keys, or None. ``sizes``: set if tile sizes differ from batch to batch; a kernel that is compiled per shape
    pads queries and keys to these numbers of rows. ``kept``: a cache for what a kernel prepares from these pairs; all
    layers of a plan share this object on one stream.
    """

    mask: Mask
    q_pos: Tensor
    k_pos: Tensor
    adjacent: bool = False
    steps: tuple[Steps | None, Steps | None] = (None, None)
    sizes: tuple[int, int] | None = None
    kept: dict[Any, Any] = field(default_factory=dict)

    def allowed(self, q_rows: Tensor, k_rows: Tensor) -> Tensor:
        """The allowed pairs, bool [B or 1, len(q_rows), len(k_rows)], from int64 local indices."""
        return self.mask.allowed(self.q_pos[q_rows], self.k_pos[k_rows])


@dataclass(frozen=True, eq=False)
class KernelTile:
    """Rows of q, rows of k and v, and which pairs of them are allowed.

    ``bound``: what integers decide in the tile's passes, by the shapes and strides of their tensors (`merge`). It holds
    no memory of rows and no state of a call.
    """

    q: Rows
    k: Rows
    cover: Band | Pairs | Segments
    bound: dict[Any, Any] = field(default_factory=dict, init=False)

    @cached_property
    def squares(self) -> list[KernelTile]:
        """The tile of a band as full tiles and square causal ones."""
        assert isinstance(self.cover, Band), "choose_kernel gives tensor masks to kernels that read them"
        split = split_causal(self.cover, self.q[1] - self.q[0], self.k[1] - self.k[0])
        assert split is not None, "choose_kernel gives windows to kernels that support them"
        parts = []
        for q, k, causal in split:
            q_rows, k_rows = (self.q[0] + q[0], self.q[0] + q[1]), (self.k[0] + k[0], self.k[0] + k[1])
            parts.append(KernelTile(q_rows, k_rows, CAUSAL if causal else FULL))
        return parts


RECORDED = ((9, 0),)
"""Compute capabilities of the GPUs in docs/results: H100 and H200."""


@dataclass(frozen=True)
class Capability:
    """What a kernel supports: the one source for the choice of kernels, the errors and the docs table.

    Attributes:
        devices: device types.
        dtypes: dtypes of q, k and v.
        compute_capability: minimum CUDA compute capability, (0, 0) on the CPU.
        covers: tile covers: "full", "causal" (bands bounded on the right only), "window", "pairs" (masks read from
            tensors), "segments" (packed documents, as sequences).
        max_head_dim: largest head dim; head dims are multiples of ``head_dim_multiple``.
        min_head_dim: smallest head dim.
        wide_heads_on: if given, the compute capabilities on which head dims above 192 have a backward.
        v_head_dim: whether v's head dim may differ from q's and k's.
        differentiable_lse: whether a gradient of lse is accepted.
        deterministic: whether the backward is bitwise reproducible, or `Kernel.reproducible` is.
        deterministic_covers: covers whose backward is; None: all.
        features: the `Scores.features` it supports.
        deterministic_features: features whose gradients are bitwise reproducible; None: all.
        only_on: if given, the compute capabilities (major, minor) that the kernel was made for.
        auto_on: if given, those on which "auto" takes it; on others it is taken by name.
        lacking: a function that returns which requirement is not installed, or None. It may import packages, and must
            return the same on all ranks.
    """

    devices: tuple[str, ...]
    dtypes: tuple[torch.dtype, ...]
    compute_capability: tuple[int, int] = (0, 0)
    covers: tuple[str, ...] = ("full", "causal")
    max_head_dim: int = 1 << 30
    min_head_dim: int = 1
    wide_heads_on: tuple[tuple[int, int], ...] = ()
    head_dim_multiple: int = 1
    v_head_dim: bool = False
    differentiable_lse: bool = False
    deterministic: bool = True
    deterministic_covers: frozenset[str] | None = None
    features: frozenset[str] = frozenset()
    deterministic_features: frozenset[str] | None = None
    only_on: tuple[tuple[int, int], ...] = ()
    auto_on: tuple[tuple[int, int], ...] = ()
    lacking: Callable[[], str | None] = lambda: None


@dataclass(frozen=True)
class Request:
    """What a call needs from its kernel. Ranks whose GPUs differ may choose different kernels, and are refused."""

    device: str
    compute_capability: tuple[int, int]
    dtype: torch.dtype
    covers: frozenset[str]
    head_dim: int
    v_head_dim: int
    differentiable_lse: bool
    deterministic: bool
    features: frozenset[str] = frozenset()


def shortfalls(capability: Capability, request: Request, *, named: bool = False) -> list[str]:
    """What the request needs and the kernel lacks, in words; empty if the kernel supports the request.

    ``named``: the user named this kernel.
    """
    missing = []
    if request.device not in capability.devices:
        missing.append(f"device {request.device} (has {', '.join(capability.devices)})")
    elif request.compute_capability < capability.compute_capability:
        missing.append(f"compute capability {request.compute_capability} (needs {capability.compute_capability})")
    elif capability.only_on and request.compute_capability not in capability.only_on:
        missing.append(f"compute capability {request.compute_capability} (made for {capability.only_on})")
    elif capability.auto_on and request.compute_capability not in capability.auto_on and not named:
        missing.append(f"a trial on compute capability {request.compute_capability} (by name it runs)")
    if request.dtype not in capability.dtypes:
        missing.append(f"{request.dtype} (has {', '.join(str(dtype) for dtype in capability.dtypes)})")
    for cover in sorted(request.covers - set(capability.covers)):
        missing.append(f"'{cover}' tiles (has {', '.join(capability.covers)})")
    for name, dim in (("head dim", request.head_dim), ("v head dim", request.v_head_dim)):
        least, most, multiple = capability.min_head_dim, capability.max_head_dim, capability.head_dim_multiple
        if not least <= dim <= most or dim % multiple:
            from_least = f" from {least}" if least > 1 else ""
            missing.append(f"{name} {dim} (needs a multiple of {multiple}{from_least} up to {most})")
    if (
        capability.wide_heads_on
        and request.head_dim > 192
        and request.compute_capability not in capability.wide_heads_on
    ):
        missing.append(f"a backward for head dim {request.head_dim} on compute capability {request.compute_capability}")
    if request.v_head_dim != request.head_dim and not capability.v_head_dim:
        missing.append(f"v head dim {request.v_head_dim} other than head dim {request.head_dim}")
    if request.differentiable_lse and not capability.differentiable_lse:
        missing.append("a gradient through lse")
    if request.deterministic and not capability.deterministic:
        missing.append("a deterministic backward")
    elif request.deterministic and capability.deterministic_covers is not None:
        for cover in sorted(request.covers - capability.deterministic_covers):
            missing.append(f"a deterministic backward of '{cover}' tiles")
    reproducible = capability.deterministic_features
    for feature in sorted(request.features):
        if feature not in capability.features:
            missing.append(f"scores with {feature}")
        elif request.deterministic and reproducible is not None and feature not in reproducible:
            missing.append(f"a deterministic gradient of {feature}")
    # Called last, and only if all else is supported: it may import a package.
    if not missing and (lacking := capability.lacking()):
        missing.append(lacking)
    return missing
